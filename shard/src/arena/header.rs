//! The arena's first page: whose arena it is.
//!
//! Two copies of 2048 bytes; a change is written over the older one, so that a kill in the middle leaves the newer one
//! whole. The valid copy with the higher `turn` counts. Little-endian:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic "RMAR" |
//! | 4 | 1 | version = 1 |
//! | 5 | 3 | zero |
//! | 8 | 8 | `turn`: raised by each change |
//! | 16 | 16 | boot id |
//! | 32 | 8 | device of the data directory |
//! | 40 | 8 | inode of the data directory |
//! | 48 | 8 | log id |
//! | 56 | 2 | shard |
//! | 58 | 2 | zero |
//! | 60 | 4 | slab count |
//! | 64 | 4 | incarnation that appends to it |
//! | 68 | 4 | next incarnation: set while a start takes the arena over, else equal to the one before |
//! | 72 | 4 | adoptions that panicked since the last one that succeeded |
//! | 76 | 4 | slab bytes |
//! | 80 | 4 | CRC32C of bytes 0..80 |
//!
//! Between the copies, at 1024, stands one word that is stored at once: how far the log was flushed. 0: not at all yet.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ringmain_core::crc::crc32c;
use ringmain_core::ids::{Incarnation, LogId, ShardId};
use ringmain_core::limits::SLAB_BYTES;

/// Both copies.
pub(super) const HEADER_BYTES: usize = 4096;
/// Where the word stands.
pub(super) const FLUSHED_AT: usize = 1024;
/// One copy.
pub(super) const COPY_BYTES: usize = HEADER_BYTES / 2;
const MAGIC: [u8; 4] = *b"RMAR";
const VERSION: u8 = 1;
const CRC_AT: usize = 80;

/// Whose arena it is. An arena is adopted only by the data directory, log and boot that it was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaIdentity {
    /// Names one run of the kernel.
    pub boot_id: [u8; 16],
    /// Device of the data directory.
    pub data_device: u64,
    /// Inode of the data directory; a copy has another one.
    pub data_inode: u64,
    /// The shard's log.
    pub log_id: LogId,
    /// The shard.
    pub shard: ShardId,
}

impl ArenaIdentity {
    /// The identity of the arena of `shard` of this data directory, now.
    ///
    /// # Errors
    /// When the directory or /proc can't be looked at.
    pub fn of(data_dir: &Path, log_id: LogId, shard: ShardId) -> io::Result<Self> {
        let stat = fs::metadata(data_dir)?;
        let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
        let boot_id = u128::from_str_radix(&digits, 16)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the kernel's boot id is no UUID"))?;
        Ok(Self { boot_id: boot_id.to_be_bytes(), data_device: stat.dev(), data_inode: stat.ino(), log_id, shard })
    }
}

/// What the first page says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaHeader {
    /// Whose it is.
    pub identity: ArenaIdentity,
    /// The incarnation of the shard that appends to it.
    pub incarnation: Incarnation,
    /// The incarnation that is about to take it over; `incarnation` when none is.
    pub next_incarnation: Incarnation,
    /// Slabs it has.
    pub slab_count: u32,
    /// Adoptions that panicked since the last one that succeeded: after three give it up.
    pub adoption_panics: u32,
    /// Raised by each change.
    pub(super) turn: u64,
}

/// Why no header can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Neither copy is whole.
    #[error("neither copy of its header is whole")]
    NotWhole,
    /// Written by another version of Ringmain.
    #[error("its format is version {0}, this is for version {VERSION}")]
    Version(u8),
    /// Slabs of another size.
    #[error("its slabs have {0} bytes, not {SLAB_BYTES}")]
    SlabBytes(u32),
}

impl ArenaHeader {
    pub(super) fn encode(&self) -> [u8; CRC_AT + 4] {
        let mut out = [0; CRC_AT + 4];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[8..16].copy_from_slice(&self.turn.to_le_bytes());
        out[16..32].copy_from_slice(&self.identity.boot_id);
        out[32..40].copy_from_slice(&self.identity.data_device.to_le_bytes());
        out[40..48].copy_from_slice(&self.identity.data_inode.to_le_bytes());
        out[48..56].copy_from_slice(&self.identity.log_id.0.to_le_bytes());
        out[56..58].copy_from_slice(&self.identity.shard.0.to_le_bytes());
        out[60..64].copy_from_slice(&self.slab_count.to_le_bytes());
        out[64..68].copy_from_slice(&self.incarnation.0.to_le_bytes());
        out[68..72].copy_from_slice(&self.next_incarnation.0.to_le_bytes());
        out[72..76].copy_from_slice(&self.adoption_panics.to_le_bytes());
        out[76..80].copy_from_slice(&(SLAB_BYTES as u32).to_le_bytes());
        let crc = crc32c(&out[..CRC_AT]);
        out[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads one copy.
    fn decode(copy: &[u8]) -> Result<Self, HeaderError> {
        let u32_at = |at: usize| u32::from_le_bytes([copy[at], copy[at + 1], copy[at + 2], copy[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        if copy[0..4] != MAGIC || crc32c(&copy[..CRC_AT]) != u32_at(CRC_AT) {
            return Err(HeaderError::NotWhole);
        }
        if copy[4] != VERSION {
            return Err(HeaderError::Version(copy[4]));
        }
        if u32_at(76) as usize != SLAB_BYTES {
            return Err(HeaderError::SlabBytes(u32_at(76)));
        }
        let mut boot_id = [0; 16];
        boot_id.copy_from_slice(&copy[16..32]);
        Ok(Self {
            identity: ArenaIdentity {
                boot_id,
                data_device: u64_at(32),
                data_inode: u64_at(40),
                log_id: LogId(u64_at(48)),
                shard: ShardId(u16::from_le_bytes([copy[56], copy[57]])),
            },
            slab_count: u32_at(60),
            incarnation: Incarnation(u32_at(64)),
            next_incarnation: Incarnation(u32_at(68)),
            adoption_panics: u32_at(72),
            turn: u64_at(8),
        })
    }

    /// Reads the newer valid copy of the page.
    pub(super) fn read(page: &[u8]) -> Result<Self, HeaderError> {
        match (Self::decode(&page[..COPY_BYTES]), Self::decode(&page[COPY_BYTES..HEADER_BYTES])) {
            (Ok(a), Ok(b)) => Ok(if a.turn > b.turn { a } else { b }),
            (Ok(one), Err(_)) | (Err(_), Ok(one)) => Ok(one),
            // A version that this code can't read says more than a copy that was never written.
            (Err(HeaderError::NotWhole), Err(error)) | (Err(error), Err(_)) => Err(error),
        }
    }

    /// Where in the page this copy goes: changes take turns.
    pub(super) fn copy_at(&self) -> usize {
        (self.turn % 2) as usize * COPY_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(turn: u64) -> ArenaHeader {
        let identity =
            ArenaIdentity { boot_id: [7; 16], data_device: 1, data_inode: 2, log_id: LogId(3), shard: ShardId(4) };
        ArenaHeader {
            identity,
            incarnation: Incarnation(5),
            next_incarnation: Incarnation(5 + turn as u32),
            slab_count: 16,
            adoption_panics: 1,
            turn,
        }
    }

    #[test]
    fn the_newer_whole_copy_counts_whatever_happens_to_the_other() {
        let mut page = [0; HEADER_BYTES];
        assert_eq!(ArenaHeader::read(&page), Err(HeaderError::NotWhole));
        let first = sample(1);
        page[first.copy_at()..][..84].copy_from_slice(&first.encode());
        assert_eq!(ArenaHeader::read(&page), Ok(first));
        let second = sample(2);
        let bytes = second.encode();
        // A kill after any number of bytes of the second change.
        for written in 0..bytes.len() {
            let mut torn = page;
            torn[second.copy_at()..][..written].copy_from_slice(&bytes[..written]);
            assert_eq!(ArenaHeader::read(&torn), Ok(first), "{written}");
        }
        page[second.copy_at()..][..84].copy_from_slice(&bytes);
        assert_eq!(ArenaHeader::read(&page), Ok(second));
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let bytes = sample(1).encode();
        for bit in 0..bytes.len() * 8 {
            let mut page = [0; HEADER_BYTES];
            page[..84].copy_from_slice(&bytes);
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(ArenaHeader::read(&page), Err(HeaderError::NotWhole), "bit {bit}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = sample(1).encode();
        bytes[4] = 9;
        let crc = crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        let mut page = [0; HEADER_BYTES];
        page[..84].copy_from_slice(&bytes);
        assert_eq!(ArenaHeader::read(&page), Err(HeaderError::Version(9)));
    }
}
