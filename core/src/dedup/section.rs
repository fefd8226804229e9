//! The windows in a checkpoint: one of its sections.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | version = 1 |
//! | 4 | 4 | 1: a producer was forgotten; else 0 |
//! | 8 | | windows, the one that was appended to longest ago first |
//!
//! | at | bytes | field of a window |
//! |---|---|---|
//! | 0 | 8 | topic |
//! | 8 | 8 | producer id |
//! | 16 | 4 | partition |
//! | 20 | 2 | producer epoch |
//! | 22 | 2 | batches, 1 to 5 |
//! | 24 | 24 each | batches, oldest first: base offset (8), base sequence, records, epoch of the shard, CRC (4 each) |

use super::{ProducerBatch, Producers, Window};
use crate::checkpoint::CheckpointSection;
use crate::ids::{Epoch, Offset, PartitionKey};
use crate::limits::{BATCH_RECORDS_MAX, PRODUCER_WINDOW_BATCHES};

/// Kind of the section in a checkpoint.
pub const PRODUCERS_SECTION: u32 = 2;
/// Most bytes that a window takes.
pub const WINDOW_BYTES_MAX: usize = WINDOW_HEAD_BYTES + PRODUCER_WINDOW_BATCHES * BATCH_BYTES;

const VERSION: u32 = 1;
const HEAD_BYTES: usize = 8;
const WINDOW_HEAD_BYTES: usize = 24;
const BATCH_BYTES: usize = 24;
// What the limits reckon with.
const _: () = assert!(WINDOW_BYTES_MAX == 144);

/// Why bytes are not the windows of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SectionError {
    /// A later version of this program has written it.
    #[error("version {0} of the producer windows is not known")]
    Version(u32),
    /// It ends inside a window.
    #[error("the producer windows are cut short")]
    Truncated,
    /// A window says what can't be.
    #[error("producer window {0} is not valid")]
    Window(usize),
    /// There are more than a shard or a partition keeps.
    #[error("there are too many producer windows")]
    TooMany,
}

/// Takes fixed-size fields off the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SectionError> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(SectionError::Truncated)?;
        self.0 = rest;
        Ok(*field)
    }

    fn u16(&mut self) -> Result<u16, SectionError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, SectionError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, SectionError> {
        self.take().map(u64::from_le_bytes)
    }
}

impl Producers {
    /// The section for a checkpoint; none when there is nothing to say.
    #[must_use]
    pub fn section(&self) -> Option<CheckpointSection> {
        if self.count() == 0 && !self.has_forgotten() {
            return None;
        }
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.count() * WINDOW_BYTES_MAX);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(u32::from(self.has_forgotten()).to_le_bytes());
        for (key, window) in self.windows() {
            let batches = window.batches();
            bytes.extend(key.topic.0.to_le_bytes());
            bytes.extend(window.producer_id().to_le_bytes());
            bytes.extend(key.partition.to_le_bytes());
            bytes.extend(window.producer_epoch().to_le_bytes());
            bytes.extend(u16::try_from(batches.len()).expect("a window has a few batches").to_le_bytes());
            for batch in batches {
                bytes.extend(batch.base_offset.0.to_le_bytes());
                bytes.extend(batch.base_sequence.to_le_bytes());
                bytes.extend(batch.record_count.to_le_bytes());
                bytes.extend(batch.epoch.0.to_le_bytes());
                bytes.extend(batch.crc.to_le_bytes());
            }
        }
        Some(CheckpointSection { kind: PRODUCERS_SECTION, bytes })
    }

    /// Reads the bytes of a section. Every field is checked, and the limits hold.
    pub fn of_section(bytes: &[u8]) -> Result<Self, SectionError> {
        let mut fields = Fields(bytes);
        match fields.u32()? {
            VERSION => {}
            other => return Err(SectionError::Version(other)),
        }
        let mut producers = Self::default();
        let forgotten = fields.u32()? != 0;
        for index in 0.. {
            if fields.0.is_empty() {
                break;
            }
            let (key, window) = window(&mut fields, index)?;
            if producers.by_name.contains_key(&(key, window.producer_id())) {
                return Err(SectionError::Window(index));
            }
            producers.insert(key, window);
            if producers.has_forgotten() {
                return Err(SectionError::TooMany);
            }
        }
        producers.forgotten = forgotten;
        Ok(producers)
    }
}

fn window(fields: &mut Fields<'_>, index: usize) -> Result<(PartitionKey, Window), SectionError> {
    let (topic, producer_id) = (fields.u64()?, fields.u64()?);
    let key = PartitionKey::new(topic, fields.u32()?);
    let producer_epoch = fields.u16()?;
    let count = usize::from(fields.u16()?);
    if producer_id == 0 || count == 0 || count > PRODUCER_WINDOW_BATCHES {
        return Err(SectionError::Window(index));
    }
    let mut window: Option<Window> = None;
    let mut free_from = Offset(0);
    for _ in 0..count {
        let batch = ProducerBatch {
            producer_id,
            producer_epoch,
            base_offset: Offset(fields.u64()?),
            base_sequence: fields.u32()?,
            record_count: fields.u32()?,
            epoch: Epoch(fields.u32()?),
            crc: fields.u32()?,
        };
        let records = 1..=BATCH_RECORDS_MAX;
        let fits = usize::try_from(batch.record_count).is_ok_and(|count| records.contains(&count));
        if !fits || batch.base_offset < free_from {
            return Err(SectionError::Window(index));
        }
        free_from = batch.next_offset();
        match &mut window {
            None => window = Some(Window::new(&batch)),
            Some(window) => window.take(&batch),
        }
    }
    window.map(|window| (key, window)).ok_or(SectionError::Window(index))
}
