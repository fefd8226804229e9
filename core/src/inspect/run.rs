//! Looking into a run: its bytes, and the batches in them.

use std::borrow::Cow;

use crate::batch::{BatchError, BatchHeader, check_crc, check_stamp};
use crate::codec::Codec;
use crate::compressor::Decompressor;
use crate::crc::crc32c;
use crate::extent::RunEntry;
use crate::ids::{Offset, PartitionKey};
use crate::pack::{PackError, unpack_run};

/// What is wrong with a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunDamage {
    /// The stored bytes are not those that were written.
    #[error("run CRC mismatch")]
    Crc,
    /// All of it is zeros.
    #[error("the run's bytes are zeros: they were lost, or given back to the filesystem")]
    Zeros,
    /// Compressed in a way that this program does not know.
    #[error("codec {0} is not readable here")]
    Codec(u8),
    /// Its packs are not whole, or do not decompress.
    #[error("packs of the run: {0}")]
    Pack(PackError),
    /// A batch is not whole.
    #[error("batch at {at} of the run: {error}")]
    Batch {
        /// Where it begins in the run, decompressed.
        at: usize,
        /// What is wrong with it.
        error: BatchError,
    },
    /// A batch of another partition.
    #[error("batch at {at} of the run belongs to partition {key}")]
    Partition {
        /// Where it begins.
        at: usize,
        /// Whose it is.
        key: PartitionKey,
    },
    /// Offsets of a batch overlap the one before, or leave the run.
    #[error("batch at {at} of the run starts at offset {found}, {expected} was expected")]
    Offsets {
        /// Where it begins.
        at: usize,
        /// Where it should start.
        expected: Offset,
        /// Where it starts.
        found: Offset,
    },
    /// Not as many batches, or another end, than the directory says.
    #[error("the run has {found} batches up to offset {end}, its directory says {expected} up to {next}")]
    Count {
        /// Batches there are.
        found: u32,
        /// Where they end.
        end: Offset,
        /// What the directory says.
        expected: u32,
        /// The same of the end.
        next: Offset,
    },
}

/// A batch of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunBatch<'a> {
    /// Where it begins in the run, decompressed.
    pub at: usize,
    /// Its header.
    pub header: BatchHeader,
    /// All its bytes.
    pub bytes: &'a [u8],
}

/// Whether the stored bytes are those that were written.
pub fn check_stored(run: &RunEntry, stored: &[u8]) -> Result<(), RunDamage> {
    if crc32c(stored) == run.crc {
        return Ok(());
    }
    Err(if stored.iter().all(|byte| *byte == 0) { RunDamage::Zeros } else { RunDamage::Crc })
}

/// The batches' bytes of a run: here is the one place that knows how runs are compressed.
pub fn raw<'a>(run: &RunEntry, stored: &'a [u8]) -> Result<Cow<'a, [u8]>, RunDamage> {
    match run.codec {
        0 => Ok(Cow::Borrowed(stored)),
        codec if Codec::from_byte(codec).is_some() => {
            let raw = unpack_run(&mut Decompressor::default(), stored, run.raw_bytes as usize);
            raw.map(Cow::Owned).map_err(RunDamage::Pack)
        }
        codec => Err(RunDamage::Codec(codec)),
    }
}

/// The batches in the raw bytes of a run, each checked: header, stamp, CRC, whose it is, and how its offsets join. Goes on
/// behind a batch whose header is whole; the last item may tell that there are too few.
pub fn batches<'a>(run: &RunEntry, raw: &'a [u8]) -> impl Iterator<Item = Result<RunBatch<'a>, RunDamage>> {
    let run = *run;
    let mut at = 0;
    let (mut count, mut next) = (0, run.base_offset);
    let mut ended = false;
    std::iter::from_fn(move || {
        if ended {
            return None;
        }
        if at == raw.len() {
            ended = true;
            let whole = count == run.batches && next == run.next_offset;
            let damage = RunDamage::Count { found: count, end: next, expected: run.batches, next: run.next_offset };
            return (!whole).then_some(Err(damage));
        }
        let rest = &raw[at..];
        let header = match BatchHeader::parse(rest) {
            Ok(header) => header,
            Err(error) => {
                ended = true;
                return Some(Err(RunDamage::Batch { at, error }));
            }
        };
        let here = at;
        let bytes = &rest[..header.batch_bytes as usize];
        at += bytes.len();
        count += 1;
        let expected = next;
        let checked = check_stamp(bytes).and_then(|()| check_crc(&header, bytes));
        if let Err(error) = checked {
            // What its stamp says can't be relied on for the next one.
            next = if error == BatchError::Stamp { run.next_offset } else { header.next_offset() };
            return Some(Err(RunDamage::Batch { at: here, error }));
        }
        next = header.next_offset();
        if header.key != run.key {
            return Some(Err(RunDamage::Partition { at: here, key: header.key }));
        }
        // Offsets jump where memory was lost; they never go back.
        let found = header.base_offset;
        if found < expected || here == 0 && found != expected || next > run.next_offset {
            return Some(Err(RunDamage::Offsets { at: here, expected, found }));
        }
        Some(Ok(RunBatch { at: here, header, bytes }))
    })
}
