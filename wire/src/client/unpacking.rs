//! From what a fetcher hands over to what the application is told: packs and compressed batches are decompressed here, one
//! at a time, when the application gets to them. So an answer takes the memory of its bytes as they came, however much they
//! decompress to.

use std::sync::Arc;

use bytes::Bytes;
use ringmain_core::batch::{BatchError, BatchHeader, check_stamp};
use ringmain_core::ids::{Offset, PartitionKey};

use crate::batch::{BatchView, InvalidBatch};
use crate::batch_codec::FetchedBatches;
use crate::client::consumer::{ConsumedBatch, ConsumerEvent, PartitionEnds};
use crate::client::error::ClientError;
use crate::tag::TagFilter;

/// What a fetcher sends: events, or why a partition can't be read.
pub(crate) type FetchedEvents = Vec<Result<FetchedEvent, ClientError>>;

/// What a fetch has given.
#[derive(Clone, Debug)]
pub(crate) enum FetchedEvent {
    /// To be told as it is.
    Ready(ConsumerEvent),
    /// Batches that must be decompressed first.
    Packed(Packed),
}

/// How batches of a partition are shown.
#[derive(Clone, Debug)]
pub(crate) struct Shown {
    pub(crate) key: PartitionKey,
    pub(crate) ends: PartitionEnds,
    /// Records before it are left out.
    pub(crate) from: Offset,
    pub(crate) tags: Option<Arc<TagFilter>>,
}

impl Shown {
    pub(crate) fn batch(&self, header: BatchHeader, bytes: Bytes) -> ConsumedBatch {
        let Self { key, ends, from, ref tags } = *self;
        ConsumedBatch { partition: key.partition, ends, header, bytes, from, tags: tags.clone() }
    }
}

/// One pack or compressed batch, as it came.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    pub(crate) shown: Shown,
    pub(crate) bytes: Bytes,
}

/// A pack or batch whose batches are being told.
pub(crate) struct Unpacking {
    shown: Shown,
    batches: FetchedBatches,
}

impl Unpacking {
    pub(crate) fn new(packed: Packed) -> Self {
        Self { shown: packed.shown, batches: FetchedBatches::new(packed.bytes) }
    }
}

impl Iterator for Unpacking {
    type Item = ConsumerEvent;

    fn next(&mut self) -> Option<ConsumerEvent> {
        loop {
            let key = self.shown.key;
            let checked = self.batches.next()?.and_then(|(header, bytes)| {
                let (_, end) = check_batch(&header, &bytes, key)?;
                Ok((header, bytes, end))
            });
            match checked {
                Ok((_, _, end)) if end <= self.shown.from => {}
                Ok((header, bytes, end)) => {
                    let batch = self.shown.batch(header, bytes);
                    self.shown.from = end;
                    return Some(ConsumerEvent::Batch(batch));
                }
                Err(error) => {
                    return Some(ConsumerEvent::BadBatch { partition: key.partition, at: self.shown.from, error });
                }
            }
        }
    }
}

/// Checks all but the CRC, which was checked before: the offset of the first record, and one past the last.
pub(crate) fn check_batch(
    header: &BatchHeader,
    bytes: &[u8],
    key: PartitionKey,
) -> Result<(Offset, Offset), InvalidBatch> {
    check_stamp(bytes)?;
    if header.key != key {
        return Err(InvalidBatch::Partition(header.key));
    }
    let (first, last) = BatchView::parse(bytes, header)?.offset_range();
    let end = Offset(last.0.checked_add(1).ok_or(BatchError::Records(header.record_count))?);
    Ok((first, end))
}
