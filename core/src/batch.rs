//! The record batch as the broker sees it: a fixed 96-byte header before a body it never re-encodes.
//!
//! | at | bytes | field | written by |
//! |---|---|---|---|
//! | 0 | 4 | `batch_bytes`: header, table and padding; a multiple of 8 | producer; the broker checks it |
//! | 4 | 1 | `version` = 1 | producer |
//! | 5 | 3 | zero | producer |
//! | 8 | 8 | `base_offset` | broker |
//! | 16 | 8 | `append_time_ms` since the Unix epoch | broker |
//! | 24 | 4 | `leader_epoch` | broker |
//! | 28 | 4 | `stamp_crc`: CRC32C of bytes 0..28 | broker |
//! | 32 | 4 | `crc`: CRC32C of bytes 36..`batch_bytes` | producer |
//! | 36 | 4 | `record_count` | producer |
//! | 40 | 8 | `topic_id` | producer |
//! | 48 | 4 | `partition` | producer |
//! | 52 | 2 | `producer_epoch` | producer |
//! | 54 | 1 | `codec`: 0 none | producer |
//! | 55 | 1 | `flags`: bit 0 sparse | producer; filtered fetch |
//! | 56 | 8 | `producer_id`: 0 = none | producer |
//! | 64 | 4 | `base_sequence` | producer |
//! | 68 | 4 | `raw_body_bytes`: size of the body vector once decompressed | producer |
//! | 72 | 8 | `base_timestamp_ms` | producer |
//! | 80 | 16 | zero, for later versions | producer |
//!
//! Little-endian. The size-prefixed flatbuffer table `BatchBody` follows at byte 96 (see the wire crate). The broker
//! writes only bytes before the CRC, so a batch is never changed under its checksum, and a hostile table can't make a
//! stamp land elsewhere.

use crate::crc::{Crc32c, crc32c};
use crate::ids::{Epoch, Offset, PartitionKey, TopicId};
use crate::limits::{BATCH_ALIGN_BYTES, BATCH_BYTES_MAX, BATCH_RECORDS_MAX};

/// Size of the fixed header.
pub const BATCH_HEADER_BYTES: usize = 96;
/// The version this code writes and accepts.
pub const BATCH_VERSION: u8 = 1;
/// Flag bit 0: the batch is a filtered copy, its records have the offsets `base + indexes[i]`.
pub const FLAG_SPARSE: u8 = 1;
/// First byte that `crc` covers.
const CRC_FROM: usize = 36;
/// Where the codec stands.
const CODEC_AT: usize = 54;
/// Bytes that `stamp_crc` covers.
const STAMP_BYTES: usize = 28;
/// Header, table and padding of a batch beside its entries and body, and what an entry takes with an index: upper bounds.
const RAW_REST_BYTES: usize = 144;
const RAW_ENTRY_BYTES: usize = 24;

/// A batch header, decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchHeader {
    /// Whole batch in bytes, header and padding included.
    pub batch_bytes: u32,
    /// Offset of the first record; the broker's.
    pub base_offset: Offset,
    /// When the broker appended the batch, milliseconds since the Unix epoch.
    pub append_time_ms: i64,
    /// Epoch in which the batch was appended.
    pub leader_epoch: Epoch,
    /// CRC32C of everything after this field.
    pub crc: u32,
    /// Records in the batch.
    pub record_count: u32,
    /// Topic and partition.
    pub key: PartitionKey,
    /// Epoch of an idempotent producer.
    pub producer_epoch: u16,
    /// How the body is compressed: 0 = not.
    pub codec: u8,
    /// `FLAG_SPARSE` or 0.
    pub flags: u8,
    /// Idempotent producer, 0 = none.
    pub producer_id: u64,
    /// Sequence of the first record within its producer.
    pub base_sequence: u32,
    /// Bytes of the body vector once decompressed.
    pub raw_body_bytes: u32,
    /// Time of the record with timestamp delta 0, milliseconds since the Unix epoch.
    pub base_timestamp_ms: i64,
}

/// Why bytes are not a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// Fewer bytes than the header says, or than a header has.
    #[error("batch is cut short: {has} bytes of {needs}")]
    Truncated {
        /// Bytes there are.
        has: usize,
        /// Bytes there must be.
        needs: usize,
    },
    /// Not a version this code reads.
    #[error("batch version {0} is not supported (this broker reads version {BATCH_VERSION})")]
    Version(u8),
    /// `batch_bytes` is out of bounds or not a multiple of 8.
    #[error(
        "batch of {0} bytes: must be a multiple of {BATCH_ALIGN_BYTES} between {BATCH_HEADER_BYTES} and {BATCH_BYTES_MAX}"
    )]
    Bytes(u32),
    /// `record_count` is out of bounds.
    #[error("batch of {0} records: must have 1 to {BATCH_RECORDS_MAX}")]
    Records(u32),
    /// Bytes that must be zero in this version are not.
    #[error("reserved bytes of the batch header are not zero")]
    Reserved,
    /// The CRC over header rest and body is wrong.
    #[error("batch CRC mismatch: header says {expected:#010x}, bytes give {actual:#010x}")]
    Crc {
        /// What the header says.
        expected: u32,
        /// What the bytes give.
        actual: u32,
    },
    /// The CRC over the broker's stamp is wrong: only bytes at rest can have this error.
    #[error("batch stamp CRC mismatch")]
    Stamp,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    (u64::from(u32_at(bytes, at + 4)) << 32) | u64::from(u32_at(bytes, at))
}

impl BatchHeader {
    /// Bytes that a reader needs for the batch once its body is decompressed: what budgets of fetches count, since a few
    /// hundred bytes may stand for megabytes.
    #[must_use]
    pub const fn raw_bytes(&self) -> usize {
        let stored = self.batch_bytes as usize;
        if self.codec == 0 {
            return stored;
        }
        let raw = RAW_REST_BYTES + self.record_count as usize * RAW_ENTRY_BYTES + self.raw_body_bytes as usize;
        if raw > stored { raw } else { stored }
    }

    /// Reads and bounds-checks the header of the batch at the start of `bytes`; `bytes` may go on behind the batch.
    /// Does not look at CRCs.
    pub fn parse(bytes: &[u8]) -> Result<Self, BatchError> {
        if bytes.len() < BATCH_HEADER_BYTES {
            return Err(BatchError::Truncated { has: bytes.len(), needs: BATCH_HEADER_BYTES });
        }
        if bytes[4] != BATCH_VERSION {
            return Err(BatchError::Version(bytes[4]));
        }
        let header = Self {
            batch_bytes: u32_at(bytes, 0),
            base_offset: Offset(u64_at(bytes, 8)),
            append_time_ms: u64_at(bytes, 16) as i64,
            leader_epoch: Epoch(u32_at(bytes, 24)),
            crc: u32_at(bytes, 32),
            record_count: u32_at(bytes, 36),
            key: PartitionKey { topic: TopicId(u64_at(bytes, 40)), partition: u32_at(bytes, 48) },
            producer_epoch: u16::from_le_bytes([bytes[52], bytes[53]]),
            codec: bytes[54],
            flags: bytes[55],
            producer_id: u64_at(bytes, 56),
            base_sequence: u32_at(bytes, 64),
            raw_body_bytes: u32_at(bytes, 68),
            base_timestamp_ms: u64_at(bytes, 72) as i64,
        };
        let size = header.batch_bytes as usize;
        if !(BATCH_HEADER_BYTES..=BATCH_BYTES_MAX).contains(&size) || !size.is_multiple_of(BATCH_ALIGN_BYTES) {
            return Err(BatchError::Bytes(header.batch_bytes));
        }
        if header.record_count == 0 || header.record_count as usize > BATCH_RECORDS_MAX {
            return Err(BatchError::Records(header.record_count));
        }
        if bytes[5..8] != [0; 3] || bytes[80..96] != [0; 16] {
            return Err(BatchError::Reserved);
        }
        if bytes.len() < size {
            return Err(BatchError::Truncated { has: bytes.len(), needs: size });
        }
        Ok(header)
    }

    /// One past the offset of the last record. A sparse batch covers the same offsets as the batch it was cut from
    /// only up to its own records, so this is not for sparse batches.
    #[must_use]
    pub fn next_offset(&self) -> Offset {
        self.base_offset.plus(u64::from(self.record_count))
    }

    /// Writes the whole header, both CRC fields as zero, to the first 96 bytes of `out`.
    ///
    /// # Panics
    /// When `out` is shorter than a header.
    pub fn write(&self, out: &mut [u8]) {
        out[..BATCH_HEADER_BYTES].fill(0);
        out[0..4].copy_from_slice(&self.batch_bytes.to_le_bytes());
        out[4] = BATCH_VERSION;
        out[8..16].copy_from_slice(&self.base_offset.0.to_le_bytes());
        out[16..24].copy_from_slice(&self.append_time_ms.to_le_bytes());
        out[24..28].copy_from_slice(&self.leader_epoch.0.to_le_bytes());
        out[36..40].copy_from_slice(&self.record_count.to_le_bytes());
        out[40..48].copy_from_slice(&self.key.topic.0.to_le_bytes());
        out[48..52].copy_from_slice(&self.key.partition.to_le_bytes());
        out[52..54].copy_from_slice(&self.producer_epoch.to_le_bytes());
        out[54] = self.codec;
        out[55] = self.flags;
        out[56..64].copy_from_slice(&self.producer_id.to_le_bytes());
        out[64..68].copy_from_slice(&self.base_sequence.to_le_bytes());
        out[68..72].copy_from_slice(&self.raw_body_bytes.to_le_bytes());
        out[72..80].copy_from_slice(&self.base_timestamp_ms.to_le_bytes());
    }
}

/// Computes the producer's CRC of the whole batch `batch` and puts it in its place. The last step of encoding.
///
/// # Panics
/// When `batch` is shorter than a header.
pub fn seal_crc(batch: &mut [u8]) {
    let crc = crc32c(&batch[CRC_FROM..]);
    batch[32..36].copy_from_slice(&crc.to_le_bytes());
}

/// The same for a batch in two pieces: `head` is its header, `rest` all behind.
///
/// # Panics
/// When `head` is not just a header.
pub fn seal_crc_of(head: &mut [u8], rest: &[u8]) {
    assert_eq!(head.len(), BATCH_HEADER_BYTES, "the head is the header");
    let mut crc = Crc32c::default();
    crc.update(&head[CRC_FROM..]);
    crc.update(rest);
    head[32..36].copy_from_slice(&crc.finish().to_le_bytes());
}

/// Checks the producer's CRC of the batch that `header` was parsed from.
pub fn check_crc(header: &BatchHeader, bytes: &[u8]) -> Result<(), BatchError> {
    let actual = crc32c(&bytes[CRC_FROM..header.batch_bytes as usize]);
    if actual == header.crc { Ok(()) } else { Err(BatchError::Crc { expected: header.crc, actual }) }
}

/// Puts the broker's stamp on the batch at the start of `batch`: offset, time, epoch and their CRC.
///
/// # Panics
/// When `batch` is shorter than a header.
pub fn stamp(batch: &mut [u8], base_offset: Offset, append_time_ms: i64, epoch: Epoch) {
    batch[8..16].copy_from_slice(&base_offset.0.to_le_bytes());
    batch[16..24].copy_from_slice(&append_time_ms.to_le_bytes());
    batch[24..28].copy_from_slice(&epoch.0.to_le_bytes());
    let crc = crc32c(&batch[..STAMP_BYTES]);
    batch[28..32].copy_from_slice(&crc.to_le_bytes());
}

/// Checks the broker's stamp of the batch at the start of `bytes`.
pub fn check_stamp(bytes: &[u8]) -> Result<(), BatchError> {
    if bytes.len() < BATCH_HEADER_BYTES {
        return Err(BatchError::Truncated { has: bytes.len(), needs: BATCH_HEADER_BYTES });
    }
    if crc32c(&bytes[..STAMP_BYTES]) == u32_at(bytes, 28) { Ok(()) } else { Err(BatchError::Stamp) }
}

/// Whether the producer of one of the batches in `bytes` has compressed it. They stand one behind the other and were
/// checked before; of others the answer means nothing.
#[must_use]
pub fn any_compressed(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    while rest.len() >= BATCH_HEADER_BYTES {
        if rest[CODEC_AT] != 0 {
            return true;
        }
        let step = (u32_at(rest, 0) as usize).clamp(BATCH_HEADER_BYTES, rest.len());
        rest = &rest[step..];
    }
    false
}

/// Walks the stamped batches that stand one behind the other in `bytes`, checking bounds and stamp of each (not the
/// body CRC). Ends at the first error, which it yields, or at the end of `bytes`.
pub fn batches(bytes: &[u8]) -> impl Iterator<Item = Result<(BatchHeader, &[u8]), BatchError>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let parsed = BatchHeader::parse(rest).and_then(|header| check_stamp(rest).map(|()| header));
        match parsed {
            Ok(header) => {
                let (batch, behind) = rest.split_at(header.batch_bytes as usize);
                rest = behind;
                Some(Ok((header, batch)))
            }
            Err(error) => {
                rest = &[];
                Some(Err(error))
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(body: usize) -> Vec<u8> {
        let size = (BATCH_HEADER_BYTES + body).next_multiple_of(8);
        let header = BatchHeader {
            batch_bytes: size as u32,
            record_count: 3,
            key: PartitionKey::new(0x0102_0304_0506_0708, 9),
            producer_id: 77,
            base_timestamp_ms: -5,
            raw_body_bytes: body as u32,
            ..BatchHeader::default()
        };
        let mut bytes = vec![0xa5; size];
        header.write(&mut bytes);
        seal_crc(&mut bytes);
        stamp(&mut bytes, Offset(41), 1_700_000_000_000, Epoch(2));
        bytes
    }

    #[test]
    fn a_stamped_batch_reads_back_and_the_stamp_leaves_the_crc_valid() {
        let bytes = sample(50);
        let header = BatchHeader::parse(&bytes).unwrap();
        assert_eq!(header.base_offset, Offset(41));
        assert_eq!(header.next_offset(), Offset(44));
        assert_eq!(header.leader_epoch, Epoch(2));
        check_crc(&header, &bytes).unwrap();
        check_stamp(&bytes).unwrap();
    }

    #[test]
    fn each_flipped_bit_is_noticed_by_one_of_the_checks() {
        let good = sample(24);
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let sound = BatchHeader::parse(&bytes)
                .and_then(|header| check_crc(&header, &bytes))
                .and_then(|()| check_stamp(&bytes));
            assert!(sound.is_err(), "bit {bit} went unnoticed");
        }
    }

    #[test]
    fn a_walk_yields_each_batch_and_stops_at_damage() {
        let mut run = sample(10);
        run.extend(sample(100));
        assert_eq!(batches(&run).filter(Result::is_ok).count(), 2);
        let damaged = run.len() - 100;
        run[damaged - 80] ^= 0xff;
        let walked: Vec<_> = batches(&run).collect();
        assert!(walked[0].is_ok() && walked.last().unwrap().is_err());
    }

    #[test]
    fn a_batch_that_its_producer_compressed_is_found_among_others() {
        let mut run = sample(10);
        let second = run.len();
        run.extend(sample(100));
        assert!(!any_compressed(&run));
        run[second + 54] = 1;
        assert!(any_compressed(&run));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(header) = BatchHeader::parse(&bytes) {
                let _ = check_crc(&header, &bytes);
            }
            let _ = batches(&bytes).count();
            let _ = any_compressed(&bytes);
        }
    }
}
