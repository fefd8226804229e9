//! Filtered fetches: of what a fetch has found, only the records with one of its tags are sent, as sparse batches.
//!
//! The answer is a copy, counted among the copies of replies. Where nothing passes, the fetch goes on from where it has
//! looked, up to a bound; then the answer says how far that was, so that a rare tag makes progress.

use bytes::Bytes;
use ringmain_core::batch::BatchHeader;
use ringmain_core::compressor::Decompressor;
use ringmain_core::limits::FETCH_SCAN_BYTES_MAX;
use ringmain_wire::batch::{BatchView, InvalidBatch};
use ringmain_wire::batch_codec::decompress;
use ringmain_wire::fetch::{FetchRequest, FetchedPartitionOutcome};
use ringmain_wire::sparse::{Filtered, SparseBuilder};
use ringmain_wire::tag::TagFilter;

use crate::connection::Part;
use crate::fetch::Fetched;
use crate::runtime::yield_if_needed;
use crate::shard::Shard;

/// The filter of one fetch, and how much it has looked at.
pub(crate) struct FetchFilter {
    tags: TagFilter,
    builder: SparseBuilder,
    decompressor: Decompressor,
    scanned: usize,
}

impl FetchFilter {
    /// The filter that `request` asks for, if it does.
    pub(crate) fn of(request: &FetchRequest) -> Option<Self> {
        let tags = (!request.tags.is_empty()).then(|| TagFilter::new(&request.tags))?;
        Some(Self { tags, builder: SparseBuilder::new(), decompressor: Decompressor::default(), scanned: 0 })
    }

    /// Whether the fetch has looked at so much that it answers even when nothing has passed.
    pub(crate) fn is_used_up(&self) -> bool {
        self.scanned >= FETCH_SCAN_BYTES_MAX
    }

    /// Replaces what was found by copies of what passes, which its budget for copies covers.
    pub(crate) async fn apply(&mut self, shard: &Shard, fetched: &mut Fetched) {
        let found = std::mem::take(&mut fetched.parts);
        self.scanned += fetched.bytes;
        shard.metrics.filtered_bytes_total.add(fetched.bytes as u64);
        let mut at = 0;
        fetched.bytes = 0;
        for outcome in &mut fetched.outcomes {
            let mut left = outcome.payload_bytes as usize;
            let mut passed = Vec::new();
            while left > 0 && at < found.len() {
                left = left.saturating_sub(found[at].bytes());
                self.copy_passing(found[at].as_bytes(shard), &mut passed).await;
                at += 1;
            }
            // Indexes may make it a little more than was found, which is a few MiB.
            outcome.payload_bytes = passed.len() as u32;
            fetched.bytes += passed.len();
            if !passed.is_empty() {
                fetched.parts.push(Part::Bytes(Bytes::from(passed)));
            }
        }
        shard.release(&found);
        fetched.shrink_copied(fetched.bytes);
    }

    /// What passes of a batch. One that its producer compressed goes as a whole or not at all: decompressed, a few MiB would
    /// become a hundred.
    fn filter(&mut self, header: &BatchHeader, batch: &[u8]) -> Result<Filtered, InvalidBatch> {
        if header.codec == 0 {
            let view = BatchView::parse(batch, header)?;
            return Ok(self.builder.filter(&view, &self.tags));
        }
        let (header, plain) = decompress(&mut self.decompressor, header, batch)?;
        let view = BatchView::parse(&plain, &header)?;
        let any = view.records().any(|record| self.tags.passes(&record));
        Ok(if any { Filtered::All } else { Filtered::Nothing })
    }

    /// Appends what passes of the batches in `bytes`.
    async fn copy_passing(&mut self, mut bytes: &[u8], passed: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let Ok(header) = BatchHeader::parse(bytes) else { return };
            let (batch, rest) = bytes.split_at(header.batch_bytes as usize);
            bytes = rest;
            match self.filter(&header, batch) {
                Ok(Filtered::Nothing) => {}
                Ok(Filtered::Some(sparse)) => passed.extend_from_slice(&sparse),
                // What can't be looked into is the client's to judge.
                Ok(Filtered::All) | Err(_) => passed.extend_from_slice(batch),
            }
            yield_if_needed().await;
        }
    }
}

/// Moves the offsets of `request` to where its last look ended, when that gave nothing: what did not pass is not looked at
/// again. Tells whether it moved.
pub(crate) fn go_on(request: &mut FetchRequest, outcomes: &[FetchedPartitionOutcome]) -> bool {
    let mut moved = false;
    for (partition, outcome) in request.partitions.iter_mut().zip(outcomes) {
        if outcome.next_offset > partition.offset {
            partition.offset = outcome.next_offset;
            moved = true;
        }
    }
    moved
}
