//! The shard's memory for blocks: a locked file in a memory filesystem, so that what was acked from memory is still
//! there after the process has died.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 4096 | header, see header.rs |
//! | 4096 | 8192 a slab | descriptors: 128 slots of 64 bytes for each slab, see descriptor.rs |
//! | next multiple of 2 MiB | 2 MiB a slab | slabs; each holds blocks of one class |
//!
//! A block's number is `slab * 128 + slot`. An [`Arena`] lives on its shard's thread, which alone reads and writes it.
//! Which block is taken for what is decided elsewhere; here is only what must hold for the next process: bytes are in
//! place before the word that commits them.

mod descriptor;
mod error;
mod header;
pub mod image;
#[expect(unsafe_code, reason = "mapped memory")]
mod map;
mod quarantine;
mod reserve;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{Ordering, fence};

use ringmain_core::ids::{Incarnation, Position, TopicId};
use ringmain_core::limits::{BLOCK_BYTES, SLAB_BYTES};

pub use self::descriptor::{BlockState, DescriptorError};
use self::descriptor::{DESCRIPTOR_BYTES, FIELDS_AT, FIELDS_BYTES, Fields, Word};
pub use self::error::ArenaError;
pub use self::header::{ArenaHeader, ArenaIdentity, HeaderError};
use self::header::{FLUSHED_AT, HEADER_BYTES};
use self::map::Map;
pub use self::quarantine::quarantine_file;
pub use self::reserve::{ArenaReserver, check_dir, check_room};

/// Descriptor slots of a slab: as many blocks as the smallest class has.
pub const SLAB_SLOTS: usize = SLAB_BYTES / BLOCK_BYTES[0];
/// Slabs reserved before the arena is given out; the [`ArenaReserver`] does the rest.
const SLABS_AT_ONCE: u32 = 16;

/// A block that is not free, as found in an arena of the process before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Its number.
    pub block: u32,
    /// Whose batches it holds.
    pub topic: TopicId,
    /// Index into `BLOCK_BYTES`.
    pub class: u8,
    /// The order in which the shard took its blocks.
    pub sequence: u64,
    /// Bytes of whole batches at its start.
    pub committed_bytes: u32,
    /// Open or sealed.
    pub state: BlockState,
}

/// See the module.
#[derive(Debug)]
pub struct Arena {
    map: Map,
    header: ArenaHeader,
    /// `None` = anonymous.
    file: Option<(File, PathBuf)>,
    reserver: ArenaReserver,
}

/// Slabs that fit `bytes`, descriptors and header included.
#[must_use]
pub fn slabs_in(bytes: u64) -> u32 {
    let mut slabs = u32::try_from(bytes / SLAB_BYTES as u64).unwrap_or(u32::MAX / SLAB_SLOTS as u32);
    while slabs > 0 && arena_bytes(slabs) > bytes {
        slabs -= 1;
    }
    slabs
}

/// Size of an arena of `slab_count` slabs.
#[must_use]
pub fn arena_bytes(slab_count: u32) -> u64 {
    (slabs_at(slab_count) + slab_count as usize * SLAB_BYTES) as u64
}

fn slabs_at(slab_count: u32) -> usize {
    (HEADER_BYTES + slab_count as usize * SLAB_SLOTS * DESCRIPTOR_BYTES).next_multiple_of(SLAB_BYTES)
}

/// The file of an arena. The name has the data directory's inode, so that a copy of the directory, which has the same
/// log id, takes nothing from the original.
#[must_use]
pub fn arena_path(dir: &Path, identity: &ArenaIdentity) -> PathBuf {
    let ArenaIdentity { data_device, data_inode, log_id, shard, .. } = identity;
    dir.join(format!("ringmain-{:016x}-{data_device:x}-{data_inode:x}-{:03}.arena", log_id.0, shard.0))
}

/// Bytes that `dir` must still have room for: arenas of `slabs` slabs for these shards, less those that are there. `None`
/// is a shard that has no log yet.
#[must_use]
pub fn missing_bytes(dir: &Path, identities: &[Option<ArenaIdentity>], slabs: usize) -> u64 {
    let bytes = arena_bytes(u32::try_from(slabs).unwrap_or(u32::MAX));
    let there = |identity: &Option<ArenaIdentity>| identity.is_some_and(|identity| arena_path(dir, &identity).exists());
    identities.iter().filter(|identity| !there(identity)).count() as u64 * bytes
}

impl Arena {
    /// Makes the arena's file in `dir`, all blocks free. The first slabs are usable at once, the others when the
    /// [`reserver`](Self::reserver) has run. A kill in the middle leaves no arena.
    ///
    /// # Errors
    /// When the file is there already, `dir` is not in memory, or there is no room for all slabs.
    pub fn create(
        dir: &Path,
        identity: ArenaIdentity,
        incarnation: Incarnation,
        slab_count: u32,
    ) -> Result<Self, ArenaError> {
        assert!(slab_count > 0 && slab_count <= u32::MAX / SLAB_SLOTS as u32, "an arena of {slab_count} slabs");
        let path = arena_path(dir, &identity);
        if path.exists() {
            return Err(ArenaError::Exists(path));
        }
        reserve::check_in_memory(dir)?;
        let new_path = path.with_extension("new");
        match fs::remove_file(&new_path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(ArenaError::io("remove what is left of", &new_path)(error));
            }
            _ => reserve::check_room(dir, arena_bytes(slab_count))?,
        }
        let file = reserve::open_locked(File::options().create_new(true), &new_path)?;
        let made = (|| {
            let bytes = arena_bytes(slab_count);
            file.set_len(bytes).map_err(ArenaError::io("size", &new_path))?;
            let header = ArenaHeader {
                identity,
                incarnation,
                next_incarnation: incarnation,
                slab_count,
                adoption_panics: 0,
                turn: 0,
            };
            let mut arena = Self::of_file(file, &path, header)?;
            arena.reserver.reserve_first(SLABS_AT_ONCE.min(slab_count))?;
            arena.change(|_| {});
            fs::rename(&new_path, &path).map_err(ArenaError::io("name", &path))?;
            Ok(arena)
        })();
        if made.is_err() {
            // The error says what matters; what is left is removed by the next try at the latest.
            let _ = fs::remove_file(&new_path);
        }
        made
    }

    /// Opens the arena that an earlier process left for `identity`. Whether it may be adopted is the caller's to
    /// decide: compare the header with `identity` and with the log.
    ///
    /// # Errors
    /// `Missing` when there is none; else what is malformed.
    pub fn open_existing(dir: &Path, identity: &ArenaIdentity) -> Result<(Self, ArenaHeader), ArenaError> {
        let path = arena_path(dir, identity);
        let file = reserve::open_locked(&mut File::options(), &path)?;
        let bytes = file.metadata().map_err(ArenaError::io("look at", &path))?.len();
        if bytes < HEADER_BYTES as u64 {
            return Err(ArenaError::Header { path, reason: HeaderError::NotWhole });
        }
        let mut page = [0; HEADER_BYTES];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut page, 0).map_err(ArenaError::io("read", &path))?;
        let header = ArenaHeader::read(&page).map_err(|reason| ArenaError::Header { path: path.clone(), reason })?;
        let expected = arena_bytes(header.slab_count);
        if header.slab_count == 0 || bytes != expected {
            return Err(ArenaError::Size { path, bytes, expected });
        }
        let arena = Self::of_file(file, &path, header)?;
        arena.reserver.reserve_first(SLABS_AT_ONCE.min(header.slab_count))?;
        Ok((arena, header))
    }

    /// An arena that dies with the process.
    ///
    /// # Errors
    /// When there is no address space for it.
    pub fn anonymous(slab_count: u32) -> Result<Self, ArenaError> {
        assert!(slab_count > 0 && slab_count <= u32::MAX / SLAB_SLOTS as u32, "an arena of {slab_count} slabs");
        let path = PathBuf::from("(anonymous)");
        let map = Map::anonymous(arena_bytes(slab_count) as usize).map_err(ArenaError::io("map", &path))?;
        let identity =
            ArenaIdentity { boot_id: [0; 16], data_device: 0, data_inode: 0, log_id: 0.into(), shard: 0.into() };
        let header = ArenaHeader {
            identity,
            incarnation: Incarnation(0),
            next_incarnation: Incarnation(0),
            slab_count,
            adoption_panics: 0,
            turn: 0,
        };
        let reserver = ArenaReserver::of_anonymous(&map, slab_count);
        Ok(Self { map, header, file: None, reserver })
    }

    fn of_file(file: File, path: &Path, header: ArenaHeader) -> Result<Self, ArenaError> {
        let bytes = arena_bytes(header.slab_count) as usize;
        let map = Map::of_file(std::os::fd::AsFd::as_fd(&file), bytes).map_err(ArenaError::io("map", path))?;
        let handle = file.try_clone().map_err(ArenaError::io("open", path))?;
        let reserver = ArenaReserver::of_file(handle, path, &map, header.slab_count);
        Ok(Self { map, header, file: Some((file, path.to_owned())), reserver })
    }

    /// What its first page says.
    #[must_use]
    pub fn header(&self) -> ArenaHeader {
        self.header
    }

    /// Whether it outlives the process.
    #[must_use]
    pub fn survives_process_kill(&self) -> bool {
        self.file.is_some()
    }

    /// For reserving the rest of the slabs on another thread.
    #[must_use]
    pub fn reserver(&self) -> ArenaReserver {
        self.reserver.clone()
    }

    /// Slabs from 0 whose blocks may be taken; grows to the header's slab count as the reserver runs.
    #[must_use]
    pub fn usable_slabs(&self) -> u32 {
        self.reserver.reserved_slabs()
    }

    fn change(&mut self, change: impl FnOnce(&mut ArenaHeader)) {
        change(&mut self.header);
        self.header.turn += 1;
        if self.file.is_some() {
            let bytes = self.header.encode();
            self.map.write(self.header.copy_at(), &bytes);
            // What the caller does next, such as writing the log, must not come before it.
            fence(Ordering::SeqCst);
        }
    }

    /// Says that `next` is about to take the arena over. Call it before that incarnation is written to the log.
    pub fn set_next_incarnation(&mut self, next: Incarnation) {
        self.change(|header| header.next_incarnation = next);
    }

    /// Says that the log ends with `last`, which this arena was known to. Call it before
    /// [`set_next_incarnation`](Self::set_next_incarnation): when the start before died between writing `last` to the log
    /// and committing it here, the next one to come would else replace it, and a kill before *that* is in the log leave an
    /// arena that does not know the log's last incarnation.
    pub fn confirm_incarnation(&mut self, last: Incarnation) {
        if self.header.incarnation != last {
            self.change(|header| header.incarnation = last);
        }
    }

    /// Says that the next incarnation is in the log, and that the adoption has succeeded.
    pub fn commit_incarnation(&mut self) {
        self.change(|header| {
            header.incarnation = header.next_incarnation;
            header.adoption_panics = 0;
        });
    }

    /// Counts a start that panicked while it took the arena over; gives how many there were since one succeeded.
    pub fn count_panic(&mut self) -> u32 {
        self.change(|header| header.adoption_panics += 1);
        self.header.adoption_panics
    }

    /// Everything before `flushed` is in the log. A log that ends before it is not the one it was.
    pub fn note_flushed(&self, flushed: Position) {
        self.map.word(FLUSHED_AT).store(flushed.0, Ordering::Release);
    }

    /// How far the log was flushed by those who wrote it with this arena.
    #[must_use]
    pub fn flushed(&self) -> Position {
        Position(self.map.word(FLUSHED_AT).load(Ordering::Acquire))
    }

    fn descriptor_at(&self, block: u32) -> usize {
        assert!(
            (block as usize) < self.header.slab_count as usize * SLAB_SLOTS,
            "block {block} is outside of the arena"
        );
        HEADER_BYTES + block as usize * DESCRIPTOR_BYTES
    }

    fn word(&self, block: u32) -> Word {
        let word = self.map.word(self.descriptor_at(block)).load(Ordering::Acquire);
        Word::decode(word).expect("descriptors were checked at the start and are written by us alone")
    }

    fn set_word(&self, block: u32, word: Word) {
        self.map.word(self.descriptor_at(block)).store(word.encode(), Ordering::Release);
    }

    /// Takes the free block `block` for batches of `topic`. Nothing is committed yet.
    ///
    /// # Panics
    /// When the block is not free, its slab not usable, or no slab has such a block of `class`.
    pub fn take(&self, block: u32, topic: TopicId, class: u8, sequence: u64) {
        let slot = block as usize % SLAB_SLOTS;
        assert!(descriptor::slots_of(class).is_some_and(|slots| slot < slots), "block {block} of class {class}");
        assert!(block / (SLAB_SLOTS as u32) < self.usable_slabs(), "block {block} is not reserved yet");
        let word = self.word(block);
        assert!(word.state.is_none(), "block {block} is taken twice");
        let generation = word.next_generation();
        let fields = Fields { topic, sequence, class, generation };
        let at = self.descriptor_at(block) + FIELDS_AT;
        self.map.write(at, &fields.encode());
        self.set_word(block, Word { state: Some(BlockState::Open), generation, committed_bytes: 0 });
    }

    /// Commits the first `committed_bytes` of an open block, whose bytes are in place.
    ///
    /// # Panics
    /// When the block is not open, or committed bytes would fall.
    pub fn publish(&self, block: u32, committed_bytes: u32) {
        let word = self.word(block);
        assert_eq!(word.state, Some(BlockState::Open), "block {block} is not open");
        assert!(committed_bytes >= word.committed_bytes, "committed bytes of block {block} would fall");
        debug_assert!(committed_bytes as usize <= self.block_bytes(block));
        self.set_word(block, Word { committed_bytes, ..word });
    }

    /// Closes an open block for more batches.
    ///
    /// # Panics
    /// When the block is not open.
    pub fn seal(&self, block: u32) {
        let word = self.word(block);
        assert_eq!(word.state, Some(BlockState::Open), "block {block} is not open");
        self.set_word(block, Word { state: Some(BlockState::Sealed), ..word });
    }

    /// Gives a block back; its batches are gone for the next process.
    ///
    /// # Panics
    /// When the block is free already.
    pub fn free(&self, block: u32) {
        let word = self.word(block);
        assert!(word.state.is_some(), "block {block} is freed twice");
        self.set_word(block, Word { state: None, committed_bytes: 0, ..word });
    }

    /// Bytes of a taken block's class.
    fn block_bytes(&self, block: u32) -> usize {
        let fields = self.map.slice(self.descriptor_at(block) + FIELDS_AT, FIELDS_BYTES);
        BLOCK_BYTES[usize::from(fields[16])]
    }

    fn place(&self, block: u32, bytes: usize) -> usize {
        let (slab, slot) = (block as usize / SLAB_SLOTS, block as usize % SLAB_SLOTS);
        slabs_at(self.header.slab_count) + slab * SLAB_BYTES + slot * bytes
    }

    /// Committed bytes of a block. They stay as they are until the block is free: don't keep the slice longer.
    ///
    /// # Panics
    /// When the range is not committed.
    #[must_use]
    pub fn read(&self, block: u32, at: usize, bytes: usize) -> &[u8] {
        let committed = self.word(block).committed_bytes as usize;
        assert!(at <= committed && bytes <= committed - at, "{bytes} bytes at {at} of block {block} are not committed");
        self.map.slice(self.place(block, self.block_bytes(block)) + at, bytes)
    }

    /// Copies `from` to `at` of a block, behind its committed bytes.
    ///
    /// # Panics
    /// When the block is free, or the range reaches past it or under what is committed.
    pub fn write(&self, block: u32, at: usize, from: &[u8]) {
        let word = self.word(block);
        assert!(word.state.is_some(), "block {block} is free");
        assert!(at >= word.committed_bytes as usize, "committed bytes of block {block} written again");
        let bytes = self.block_bytes(block);
        assert!(at <= bytes && from.len() <= bytes - at, "{} bytes at {at} do not fit block {block}", from.len());
        self.map.write(self.place(block, bytes) + at, from);
    }

    /// All blocks that are not free, in the order they were taken; for adoption.
    ///
    /// # Errors
    /// When any descriptor is malformed: then trust none.
    pub fn live_blocks(&self) -> Result<Vec<LiveBlock>, ArenaError> {
        let mut live: Vec<LiveBlock> = Vec::new();
        for slab in 0..self.header.slab_count {
            let descriptor = |slot: usize| {
                let at = self.descriptor_at(slab * SLAB_SLOTS as u32 + slot as u32);
                (self.map.word(at).load(Ordering::Acquire), self.map.slice(at + FIELDS_AT, FIELDS_BYTES))
            };
            for found in image::blocks_of_slab(slab, descriptor) {
                live.push(found.map_err(|(block, reason)| ArenaError::Descriptor { block, reason })?);
            }
        }
        live.sort_unstable_by_key(|found| found.sequence);
        if let Some(pair) = live.windows(2).find(|pair| pair[0].sequence == pair[1].sequence) {
            let reason = DescriptorError::Sequence(pair[1].sequence);
            return Err(ArenaError::Descriptor { block: pair[1].block, reason });
        }
        Ok(live)
    }

    /// Removes the file: nothing in it is needed any more.
    ///
    /// # Errors
    /// When the file can't be removed.
    pub fn remove(&self) -> Result<(), ArenaError> {
        match &self.file {
            Some((_, path)) => fs::remove_file(path).map_err(ArenaError::io("remove", path)),
            None => Ok(()),
        }
    }
}
