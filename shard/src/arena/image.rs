//! An arena as bytes, read without adopting it: by `ringmain dump`, while no process uses it. Adoption reads descriptors
//! by the same function.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ringmain_core::limits::{BLOCK_BYTES, SLAB_BYTES};

use super::descriptor::{self, DESCRIPTOR_BYTES, DescriptorError, FIELDS_AT, FIELDS_BYTES, Word};
use super::header::{ArenaHeader, HEADER_BYTES, HeaderError};
use super::{LiveBlock, SLAB_SLOTS, arena_bytes, slabs_at};

/// Bytes that can be read from any place.
pub trait ArenaBytes {
    /// Fills `into` from place `at` on.
    ///
    /// # Errors
    /// As read(2); `UnexpectedEof` when they end before.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
}

impl ArenaBytes for File {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(into, at)
    }
}

/// Why bytes are not an arena.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The first page is not readable.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// It is not as large as its header says.
    #[error("it has {bytes} bytes, its header says {expected}")]
    Size {
        /// Its size.
        bytes: u64,
        /// What it must be.
        expected: u64,
    },
    /// The system can't read it.
    #[error("it can't be read: {0}")]
    Io(#[from] io::Error),
}

/// An arena's bytes, and the header that makes sense of them.
#[derive(Debug)]
pub struct ArenaImage<B> {
    bytes: B,
    header: ArenaHeader,
}

impl<B: ArenaBytes> ArenaImage<B> {
    /// Reads the header of the arena that `bytes`, `size` of them, are.
    ///
    /// # Errors
    /// When they are none.
    pub fn read(bytes: B, size: u64) -> Result<Self, ImageError> {
        if size < HEADER_BYTES as u64 {
            return Err(HeaderError::NotWhole.into());
        }
        let mut page = [0; HEADER_BYTES];
        bytes.read(0, &mut page)?;
        let header = ArenaHeader::read(&page)?;
        let expected = arena_bytes(header.slab_count);
        if header.slab_count == 0 || size != expected {
            return Err(ImageError::Size { bytes: size, expected });
        }
        Ok(Self { bytes, header })
    }

    /// What the first page says.
    #[must_use]
    pub const fn header(&self) -> &ArenaHeader {
        &self.header
    }

    /// Place of a block's descriptor.
    #[must_use]
    pub const fn descriptor_place(block: u32) -> u64 {
        (HEADER_BYTES + block as usize * DESCRIPTOR_BYTES) as u64
    }

    /// Place of a block's first byte.
    #[must_use]
    pub fn place(&self, block: &LiveBlock) -> u64 {
        let (slab, slot) = (block.block as usize / SLAB_SLOTS, block.block as usize % SLAB_SLOTS);
        (slabs_at(self.header.slab_count) + slab * SLAB_BYTES + slot * BLOCK_BYTES[usize::from(block.class)]) as u64
    }

    /// The blocks of a slab that are not free, and what is wrong with the ones whose descriptors are malformed.
    ///
    /// # Errors
    /// When they can't be read.
    ///
    /// # Panics
    /// When there is no such slab.
    pub fn blocks(&self, slab: u32) -> io::Result<Vec<Result<LiveBlock, (u32, DescriptorError)>>> {
        assert!(slab < self.header.slab_count, "there is no slab {slab}");
        let mut bytes = [0; SLAB_SLOTS * DESCRIPTOR_BYTES];
        self.bytes.read(Self::descriptor_place(slab * SLAB_SLOTS as u32), &mut bytes)?;
        let descriptor = |slot: usize| {
            let (word, fields) = bytes[slot * DESCRIPTOR_BYTES..][..DESCRIPTOR_BYTES].split_at(FIELDS_AT);
            let mut word_bytes = [0; FIELDS_AT];
            word_bytes.copy_from_slice(word);
            (u64::from_le_bytes(word_bytes), &fields[..FIELDS_BYTES])
        };
        Ok(blocks_of_slab(slab, descriptor).collect())
    }

    /// The committed bytes of a block that [`Self::blocks`] gave: 2 MiB at most.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn committed(&self, block: &LiveBlock) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; block.committed_bytes as usize];
        self.bytes.read(self.place(block), &mut bytes)?;
        Ok(bytes)
    }

    /// So many of them, from `at` on.
    ///
    /// # Errors
    /// When they can't be read, or the block has not so many.
    pub fn committed_part(&self, block: &LiveBlock, at: u32, bytes: u32) -> io::Result<Vec<u8>> {
        if at.checked_add(bytes).is_none_or(|end| end > block.committed_bytes) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut part = vec![0; bytes as usize];
        self.bytes.read(self.place(block) + u64::from(at), &mut part)?;
        Ok(part)
    }
}

/// The blocks of a slab that are not free, by its descriptors: `descriptor` gives word and fields of a slot.
pub(super) fn blocks_of_slab<'a>(
    slab: u32,
    descriptor: impl Fn(usize) -> (u64, &'a [u8]),
) -> impl Iterator<Item = Result<LiveBlock, (u32, DescriptorError)>> {
    let mut slab_class = None;
    (0..SLAB_SLOTS).filter_map(move |slot| {
        let block = slab * SLAB_SLOTS as u32 + slot as u32;
        let (word, fields) = descriptor(slot);
        let (word, fields) = match descriptor::check(word, fields, slot) {
            Ok(found) => found?,
            Err(reason) => return Some(Err((block, reason))),
        };
        let Word { state: Some(state), committed_bytes, .. } = word else { return None };
        let descriptor::Fields { topic, sequence, class, .. } = fields;
        if *slab_class.get_or_insert(class) != class {
            return Some(Err((block, DescriptorError::MixedSlab(class))));
        }
        Some(Ok(LiveBlock { block, topic, class, sequence, committed_bytes, state }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Arena, ArenaIdentity, BlockState, arena_path};
    use ringmain_core::ids::{Incarnation, LogId, ShardId, TopicId};

    fn arena(dir: &std::path::Path) -> (Arena, std::path::PathBuf) {
        let identity =
            ArenaIdentity { boot_id: [7; 16], data_device: 1, data_inode: 2, log_id: LogId(3), shard: ShardId(4) };
        (Arena::create(dir, identity, Incarnation(5), 2).unwrap(), arena_path(dir, &identity))
    }

    fn image(path: &std::path::Path) -> Result<ArenaImage<File>, ImageError> {
        let file = File::open(path).unwrap();
        let size = file.metadata().unwrap().len();
        ArenaImage::read(file, size)
    }

    #[test]
    fn what_an_arena_holds_is_read_from_its_file() {
        let dir = tempfile::Builder::new().prefix("ringmain-test-").tempdir_in("/dev/shm").unwrap();
        let (arena, path) = arena(dir.path());
        for (block, class, bytes) in [(1, 0, b"small".as_slice()), (128 + 3, 1, b"medium")] {
            arena.take(block, TopicId(9), class, u64::from(block));
            arena.write(block, 0, bytes);
            arena.publish(block, bytes.len() as u32);
        }
        arena.seal(1);
        let image = image(&path).unwrap();
        assert_eq!(*image.header(), arena.header());
        let blocks: Vec<LiveBlock> = (0..2).flat_map(|slab| image.blocks(slab).unwrap()).map(Result::unwrap).collect();
        assert_eq!(blocks, arena.live_blocks().unwrap());
        assert_eq!((blocks[0].state, blocks[1].state), (BlockState::Sealed, BlockState::Open));
        let held: Vec<Vec<u8>> = blocks.iter().map(|block| image.committed(block).unwrap()).collect();
        assert_eq!(held, [b"small".to_vec(), b"medium".to_vec()]);
    }

    #[test]
    fn a_malformed_descriptor_hides_no_other_block() {
        let dir = tempfile::Builder::new().prefix("ringmain-test-").tempdir_in("/dev/shm").unwrap();
        let (arena, path) = arena(dir.path());
        for block in 0..3 {
            arena.take(block, TopicId(9), 0, u64::from(block));
        }
        drop(arena);
        let place = ArenaImage::<File>::descriptor_place(1) + 9;
        File::options().write(true).open(&path).unwrap().write_all_at(&[0xff], place).unwrap();
        let blocks = image(&path).unwrap().blocks(0).unwrap();
        let numbers: Vec<_> = blocks.iter().map(|found| found.as_ref().map(|live| live.block)).collect();
        assert_eq!(numbers, [Ok(0), Err(&(1, DescriptorError::Crc)), Ok(2)]);
    }

    #[test]
    fn other_files_and_cut_ones_are_no_arena() {
        let dir = tempfile::Builder::new().prefix("ringmain-test-").tempdir_in("/dev/shm").unwrap();
        let (arena, path) = arena(dir.path());
        drop(arena);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(8192).unwrap();
        assert!(matches!(image(&path), Err(ImageError::Size { bytes: 8192, .. })));
        file.set_len(100).unwrap();
        assert!(matches!(image(&path), Err(ImageError::Header(HeaderError::NotWhole))));
    }
}
