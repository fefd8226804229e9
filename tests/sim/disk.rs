//! A disk and its directory in memory that forget, at a crash, what a real one may forget, and that fail where a real one
//! may fail.
//!
//! A write is submitted, completes later, and is durable only when a sync that was begun after its completion has ended, or
//! when it was one that syncs itself.
//! At a power cut each write that is not durable survives whole, in part (512-byte sectors), or not at all, whatever was
//! written before or after it; a new length or name likewise. A killed process loses nothing that has completed; what it
//! had in flight is written or not.
//!
//! A write that fails may have reached the disk in part, a sync that fails has made nothing durable. After either nothing
//! of the log may be written or synced by the same process: the disk panics.

mod crash;
mod damage;

use std::collections::{BTreeMap, BTreeSet};

use ringmain_core::ids::SegmentSequence;
use ringmain_core::recover::{ReadError, SegmentSource};

use crate::rng::Rng;

pub use crash::Crash;
pub use damage::{Damage, DamageKind};

const SECTOR: usize = 512;
const BLOCK: usize = 4096;
/// What a whole segment leaves free on the disk.
pub const RESERVE_BYTES: usize = 64 * 1024;

/// Why an operation of the shard goes no further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Halt {
    /// The process is dead: everything stops.
    Crashed,
    /// The device says EIO.
    Failed,
    /// There is no room for a file; nothing of it was made.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WriteId(u64);

/// A sync that has begun: the operations that it covers.
#[derive(Debug)]
pub struct SyncTicket {
    file: u64,
    covers: Vec<WriteId>,
}

#[derive(Clone, Debug)]
enum Change {
    Write { place: usize, bytes: Vec<u8>, completed: bool },
    SetLen(usize),
}

#[derive(Clone, Debug, Default)]
struct SimFile {
    durable: Vec<u8>,
    content: Vec<u8>,
    /// What `content` has beyond `durable`, and what is in flight; in order of submission.
    changes: Vec<(WriteId, Change)>,
    /// Blocks that the device can't read, by number. One that is written again is whole, once that is durable for good.
    unreadable: BTreeSet<usize>,
}

/// What comes next, counted in operations, syncs or writes from when it is set.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fuse {
    /// Crash instead of the operation with this number.
    pub operations: Option<u64>,
    /// Crash at the end of the sync with this number: instead of it, or right after it.
    pub sync: Option<(u64, bool)>,
    /// The write with this number fails.
    pub write_error: Option<u64>,
    /// The sync with this number fails.
    pub sync_error: Option<u64>,
}

/// Files by segment.
#[derive(Clone, Debug, Default)]
pub struct SimDisk {
    files: BTreeMap<u64, SimFile>,
    names: BTreeMap<SegmentSequence, u64>,
    durable_names: BTreeMap<SegmentSequence, u64>,
    listed: Vec<SegmentSequence>,
    next_id: u64,
    /// Bytes that all files together may have.
    pub capacity: Option<usize>,
    pub fuse: Fuse,
    /// Operations, ended syncs and ended writes so far.
    pub operations: u64,
    pub syncs: u64,
    pub writes: u64,
    /// A write or sync of this process has failed.
    failed: bool,
}

fn apply(content: &mut Vec<u8>, place: usize, bytes: &[u8]) {
    if content.len() < place + bytes.len() {
        content.resize(place + bytes.len(), 0);
    }
    content[place..place + bytes.len()].copy_from_slice(bytes);
}

fn covers(place: usize, bytes: &[u8], block: usize) -> bool {
    (place..place + bytes.len()).contains(&(block * BLOCK))
}

/// Counts down; true when it was at 0.
fn goes_off(left: &mut Option<u64>) -> bool {
    match left {
        Some(0) => {
            *left = None;
            true
        }
        Some(left) => {
            *left -= 1;
            false
        }
        None => false,
    }
}

impl SimDisk {
    fn step(&mut self) -> Result<(), Halt> {
        self.operations += 1;
        match &mut self.fuse.operations {
            Some(0) => Err(Halt::Crashed),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn assert_sound(&self) {
        assert!(!self.failed, "the log is written or synced after an error");
    }

    /// Runs `sync` as the sync with the next number.
    fn sync_point(&mut self, sync: impl FnOnce(&mut Self)) -> Result<(), Halt> {
        self.step()?;
        let number = self.syncs;
        self.syncs += 1;
        if self.fuse.sync == Some((number, false)) {
            return Err(Halt::Crashed);
        }
        if goes_off(&mut self.fuse.sync_error) {
            self.failed = true;
            return Err(Halt::Failed);
        }
        sync(self);
        if self.fuse.sync == Some((number, true)) { Err(Halt::Crashed) } else { Ok(()) }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Which file a segment is in: a number that no other file ever has.
    pub fn file_id(&self, segment: SegmentSequence) -> Option<u64> {
        self.names.get(&segment).copied()
    }

    fn file(&mut self, segment: SegmentSequence) -> &mut SimFile {
        let id = self.names[&segment];
        self.files.get_mut(&id).expect("a name has its file")
    }

    fn has_room(&self, more: usize, reserve: usize) -> bool {
        let used: usize = self.names.values().map(|id| self.files[id].content.len()).sum();
        self.capacity.is_none_or(|capacity| used + more + reserve <= capacity)
    }

    /// Makes a file of `bytes` bytes; with old content if it is recycled. Its name is not durable yet. `reserve` is what it
    /// must leave free.
    pub fn create(
        &mut self,
        segment: SegmentSequence,
        recycled: Option<Vec<u8>>,
        bytes: usize,
        reserve: usize,
    ) -> Result<(), Halt> {
        self.step()?;
        self.assert_sound();
        if !self.has_room(bytes, reserve) {
            return Err(Halt::Full);
        }
        let id = self.id();
        let mut content = recycled.unwrap_or_default();
        content.resize(bytes, 0);
        self.files.insert(id, SimFile { durable: content.clone(), content, ..SimFile::default() });
        assert!(self.names.insert(segment, id).is_none(), "segment {segment} is made while it is there");
        self.listed = self.names.keys().copied().collect();
        Ok(())
    }

    pub fn remove(&mut self, segment: SegmentSequence) -> Result<(), Halt> {
        self.step()?;
        self.names.remove(&segment);
        self.listed = self.names.keys().copied().collect();
        Ok(())
    }

    pub fn sync_dir(&mut self) -> Result<(), Halt> {
        self.sync_point(|disk| disk.durable_names = disk.names.clone())
    }

    pub fn submit(&mut self, segment: SegmentSequence, place: u64, bytes: &[u8]) -> Result<WriteId, Halt> {
        self.step()?;
        self.assert_sound();
        assert!(place.is_multiple_of(4096) && bytes.len().is_multiple_of(4096), "direct writes are aligned");
        let id = WriteId(self.id());
        let write = Change::Write { place: place as usize, bytes: bytes.to_vec(), completed: false };
        self.file(segment).changes.push((id, write));
        Ok(id)
    }

    pub fn complete(&mut self, segment: SegmentSequence, id: WriteId) -> Result<(), Halt> {
        self.step()?;
        self.writes += 1;
        let fails = goes_off(&mut self.fuse.write_error);
        self.failed |= fails;
        let file = self.file(segment);
        let at = file.changes.iter().position(|(other, _)| *other == id).expect("a write completes once");
        let (_, Change::Write { place, bytes, completed }) = &mut file.changes[at] else {
            panic!("{id:?} is no write")
        };
        if fails {
            // Some sectors may have made it, in a way that only the id decides.
            let mut rng = Rng::new(id.0);
            let mood = rng.below(3);
            let old = file.content.get(*place..*place + bytes.len()).map(<[u8]>::to_vec);
            let old = old.unwrap_or_else(|| vec![0; bytes.len()]);
            for (new, old) in bytes.chunks_mut(SECTOR).zip(old.chunks(SECTOR)) {
                if mood == 0 || mood == 1 && rng.once_in(2) {
                    new.copy_from_slice(old);
                }
            }
        }
        *completed = true;
        let (place, bytes) = (*place, bytes.clone());
        apply(&mut file.content, place, &bytes);
        if fails { Err(Halt::Failed) } else { Ok(()) }
    }

    /// The same for a write that syncs itself: its own bytes are durable then, and no others. What was written to their place
    /// before can't come back over them.
    pub fn complete_syncing(&mut self, segment: SegmentSequence, id: WriteId) -> Result<(), Halt> {
        self.complete(segment, id)?;
        let file = self.file(segment);
        let at = file.changes.iter().position(|(other, _)| *other == id).expect("it has just completed");
        let (_, Change::Write { place, bytes, .. }) = file.changes.remove(at) else { panic!("{id:?} is no write") };
        apply(&mut file.durable, place, &bytes);
        file.unreadable.retain(|block| !covers(place, &bytes, *block));
        for (_, change) in &mut file.changes[..at] {
            if let Change::Write { place: before, bytes: old, .. } = change {
                let from = place.max(*before);
                let to = (place + bytes.len()).min(*before + old.len());
                if from < to {
                    old[from - *before..to - *before].copy_from_slice(&bytes[from - place..to - place]);
                }
            }
        }
        Ok(())
    }

    /// Makes a file longer or shorter. Longer ones need room.
    pub fn set_len(&mut self, segment: SegmentSequence, bytes: usize) -> Result<(), Halt> {
        self.step()?;
        self.assert_sound();
        let has = self.file(segment).content.len();
        if bytes > has && !self.has_room(bytes - has, RESERVE_BYTES) {
            return Err(Halt::Full);
        }
        let id = WriteId(self.id());
        let file = self.file(segment);
        file.content.resize(bytes, 0);
        file.changes.push((id, Change::SetLen(bytes)));
        Ok(())
    }

    /// A sync covers what has completed when it begins.
    pub fn begin_sync(&mut self, segment: SegmentSequence) -> Result<SyncTicket, Halt> {
        self.step()?;
        self.assert_sound();
        let file = self.names[&segment];
        let done = |change: &Change| !matches!(change, Change::Write { completed: false, .. });
        let covers = self.files[&file].changes.iter().filter(|(_, change)| done(change)).map(|(id, _)| *id).collect();
        Ok(SyncTicket { file, covers })
    }

    pub fn end_sync(&mut self, ticket: SyncTicket) -> Result<(), Halt> {
        self.sync_point(|disk| {
            let file = disk.files.get_mut(&ticket.file).expect("a file that is synced is there");
            for (id, change) in &file.changes {
                if ticket.covers.contains(id) {
                    match change {
                        Change::Write { place, bytes, .. } => {
                            apply(&mut file.durable, *place, bytes);
                            file.unreadable.retain(|block| !covers(*place, bytes, *block));
                        }
                        Change::SetLen(bytes) => file.durable.resize(*bytes, 0),
                    }
                }
            }
            file.changes.retain(|(id, _)| !ticket.covers.contains(id));
        })
    }

    /// The file's bytes, for recycling.
    pub fn content(&self, segment: SegmentSequence) -> Option<Vec<u8>> {
        let id = self.names.get(&segment)?;
        Some(self.files[id].content.clone())
    }

    /// Size of all files.
    pub fn used(&self) -> usize {
        self.names.values().map(|id| self.files[id].content.len()).sum()
    }
}

impl SegmentSource for SimDisk {
    fn segments(&self) -> &[SegmentSequence] {
        &self.listed
    }

    fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError> {
        Ok(self.file(segment).content.len() as u64)
    }

    fn read(&mut self, segment: SegmentSequence, place: u64, into: &mut [u8]) -> Result<usize, ReadError> {
        let file = self.file(segment);
        let from = (place as usize).min(file.content.len());
        let bytes = into.len().min(file.content.len() - from);
        let blocks = from / BLOCK..(from + bytes).div_ceil(BLOCK);
        let is_rewritten = |block: usize| {
            file.changes.iter().any(|(_, change)| match change {
                Change::Write { place, bytes, completed: true } => covers(*place, bytes, block),
                _ => false,
            })
        };
        if file.unreadable.range(blocks).any(|&block| !is_rewritten(block)) {
            return Err(ReadError::Unreadable);
        }
        into[..bytes].copy_from_slice(&file.content[from..from + bytes]);
        Ok(bytes)
    }
}
