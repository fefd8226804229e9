//! Segment files: their names, their header, and how a position names a byte in one of them.
//!
//! | place in the file | what |
//! |---|---|
//! | 0 | segment header, 64 bytes; zero up to 4096 |
//! | 4096 | extents, each a multiple of 4096; the first is a checkpoint |
//! | behind the last extent, once sealed | footer pages, fences, trailer (see [`crate::index`]); the file ends there |
//!
//! Segment header:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic |
//! | 4 | 1 | version = 1 |
//! | 5 | 3 | zero |
//! | 8 | 8 | log id |
//! | 16 | 8 | segment sequence |
//! | 24 | 8 | segment bytes |
//! | 32 | 8 | sequence of the first extent |
//! | 40 | 4 | CRC of the header of the extent before the first one; 0 if there is none |
//! | 44 | 4 | incarnation that made the segment |
//! | 48 | 8 | created, milliseconds since the Unix epoch |
//! | 56 | 4 | zero |
//! | 60 | 4 | CRC32C of bytes 0..60 |

use crate::disk_header::{DISK_HEADER_BYTES, DiskHeaderError, HeaderReader, HeaderWriter};
use crate::ids::{ExtentSequence, Incarnation, LogId, Position, SegmentSequence};
use crate::limits::SEGMENT_BYTES_MAX;

/// Place of the first extent in each segment.
pub const FIRST_EXTENT_AT: u64 = 4096;
/// Largest segment sequence: every position of such a segment fits 64 bits.
pub const SEGMENT_SEQUENCE_MAX: u64 = u64::MAX / SEGMENT_BYTES_MAX - 1;

const MAGIC: u32 = u32::from_le_bytes(*b"RMsg");
const VERSION: u8 = 1;

/// What the first 64 bytes of a segment say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The log that the segment belongs to.
    pub log_id: LogId,
    /// Its number, as in the file name.
    pub segment: SegmentSequence,
    /// Size of each segment of the log.
    pub segment_bytes: u64,
    /// Sequence of the extent at [`FIRST_EXTENT_AT`].
    pub first_sequence: ExtentSequence,
    /// Header CRC of the extent before that.
    pub previous_header_crc: u32,
    /// The life that made the segment: no extent in it is older.
    pub incarnation: Incarnation,
    /// Milliseconds since the Unix epoch.
    pub created_ms: i64,
}

impl SegmentHeader {
    /// The 64 bytes for place 0.
    #[must_use]
    pub fn encode(&self) -> [u8; DISK_HEADER_BYTES] {
        HeaderWriter::new(MAGIC, VERSION)
            .put([0; 3])
            .u64(self.log_id.0)
            .u64(self.segment.0)
            .u64(self.segment_bytes)
            .u64(self.first_sequence.0)
            .u32(self.previous_header_crc)
            .u32(self.incarnation.0)
            .u64(self.created_ms as u64)
            .finish()
    }

    /// Reads the header at the start of `bytes`. Whether it is of this log and file is for the caller to check.
    pub fn decode(bytes: &[u8]) -> Result<Self, DiskHeaderError> {
        let mut fields = HeaderReader::open(bytes, MAGIC, VERSION)?;
        let _zero: [u8; 3] = fields.take();
        Ok(Self {
            log_id: LogId(fields.u64()),
            segment: SegmentSequence(fields.u64()),
            segment_bytes: fields.u64(),
            first_sequence: ExtentSequence(fields.u64()),
            previous_header_crc: fields.u32(),
            incarnation: Incarnation(fields.u32()),
            created_ms: fields.u64() as i64,
        })
    }
}

/// Name of a segment file in its shard's directory.
#[must_use]
pub fn file_name(segment: SegmentSequence) -> String {
    format!("{:020}.log", segment.0)
}

/// The segment that a file name stands for; `None` for any other file.
#[must_use]
pub fn parse_file_name(name: &str) -> Option<SegmentSequence> {
    let digits = name.strip_suffix(".log")?;
    if digits.len() != 20 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let sequence = digits.parse().ok()?;
    (sequence <= SEGMENT_SEQUENCE_MAX).then_some(SegmentSequence(sequence))
}

/// The position of a place in a segment.
///
/// # Panics
/// When the segment sequence is past [`SEGMENT_SEQUENCE_MAX`].
#[must_use]
pub fn position_of(segment: SegmentSequence, place: u64, segment_bytes: u64) -> Position {
    assert!(segment.0 <= SEGMENT_SEQUENCE_MAX, "segment {segment} is past the largest");
    Position(segment.0 * segment_bytes + place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_back_and_any_flipped_bit_is_noticed() {
        let header = SegmentHeader {
            log_id: LogId(0x1122_3344_5566_7788),
            segment: SegmentSequence(7),
            segment_bytes: 1 << 28,
            first_sequence: ExtentSequence(901),
            previous_header_crc: 0xdead_beef,
            incarnation: Incarnation(3),
            created_ms: -1,
        };
        let bytes = header.encode();
        assert_eq!(SegmentHeader::decode(&bytes), Ok(header));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentHeader::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn names_sort_like_sequences_and_other_files_are_left_alone() {
        assert_eq!(file_name(SegmentSequence(12)), "00000000000000000012.log");
        assert_eq!(parse_file_name("00000000000000000012.log"), Some(SegmentSequence(12)));
        for other in
            ["12.log", "00000000000000000012.log.tmp", "+0000000000000000012.log", "99999999999999999999.log", ""]
        {
            assert_eq!(parse_file_name(other), None, "{other}");
        }
    }
}
