//! Filtered fetches: of what a fetch has found, only the records with one of its tags are sent, as sparse batches.
//!
//! The answer is a copy, counted among the copies of replies. Where nothing passes, the fetch goes on from where it has
//! looked, up to a bound; then the answer says how far that was, so that a rare tag makes progress.

use std::rc::Rc;

use bytes::Bytes;
use ringmain_core::batch::BatchHeader;
use ringmain_core::compressor::Decompressor;
use ringmain_core::ids::Offset;
use ringmain_core::limits::{FETCH_SCAN_BYTES_MAX, FILTERED_FETCH_BYTES_MAX};
use ringmain_wire::batch::{BatchView, CompressedBatch, InvalidBatch};
use ringmain_wire::batch_codec::decompress;
use ringmain_wire::fetch::{FetchRequest, FetchedPartitionOutcome};
use ringmain_wire::sparse::{Filtered, SparseBuilder};
use ringmain_wire::tag::TagFilter;

use crate::connection::{Connection, Part};
use crate::fetch::Fetched;
use crate::runtime::yield_if_needed;
use crate::shard::Shard;

/// The filter of one fetch, and how much it has looked at.
pub(crate) struct FetchFilter {
    tags: TagFilter,
    builder: SparseBuilder,
    decompressor: Decompressor,
    /// Bytes looked at: of batches that had to be decompressed, those that came out.
    scanned: usize,
    /// The latter of the look under way.
    decompressed: usize,
}

impl FetchFilter {
    /// The filter that `request` asks for, if it does.
    pub(crate) fn of(request: &FetchRequest) -> Option<Self> {
        let tags = (!request.tags.is_empty()).then(|| TagFilter::new(&request.tags))?;
        Some(Self {
            tags,
            builder: SparseBuilder::new(),
            decompressor: Decompressor::default(),
            scanned: 0,
            decompressed: 0,
        })
    }

    /// Whether the fetch has looked at so much that it answers even when nothing has passed.
    pub(crate) fn is_used_up(&self) -> bool {
        self.scanned >= FETCH_SCAN_BYTES_MAX
    }

    /// Replaces what was found by copies of what passes, which its budget for copies covers. It ends before all has been looked
    /// at when it has decompressed as much as a filtered fetch may have, or when the client has gone; what was not looked at
    /// is left to the next look.
    pub(crate) async fn apply(
        &mut self,
        shard: &Shard,
        request: &FetchRequest,
        fetched: &mut Fetched,
        client: Option<&Rc<Connection>>,
    ) {
        let found = std::mem::take(&mut fetched.parts);
        let mut parts = found.iter();
        fetched.bytes = 0;
        self.decompressed = 0;
        let before = self.scanned;
        for (wanted, outcome) in request.partitions.iter().zip(&mut fetched.outcomes) {
            let mut left = outcome.payload_bytes as usize;
            let mut look = Look { passed: Vec::new(), reached: wanted.offset, cut: false };
            while left > 0
                && let Some(part) = parts.next()
            {
                left = left.saturating_sub(part.bytes());
                self.copy_passing(part.as_bytes(shard), client, &mut look).await;
            }
            if look.cut {
                outcome.next_offset = look.reached;
            }
            // Indexes may make it a little more than was found, which is a few MiB.
            outcome.payload_bytes = look.passed.len() as u32;
            fetched.bytes += look.passed.len();
            if !look.passed.is_empty() {
                fetched.parts.push(Part::Bytes(Bytes::from(look.passed)));
            }
        }
        shard.release(&found);
        shard.metrics.filtered_bytes_total.add((self.scanned - before) as u64);
        fetched.memory_bytes = fetched.memory_bytes.min(fetched.bytes);
        fetched.shrink_copied(fetched.bytes);
    }

    /// What passes of a batch. One that its producer compressed goes as a whole or not at all: decompressed, a few MiB would
    /// become a hundred.
    fn filter(&mut self, header: &BatchHeader, batch: &[u8]) -> Result<Filtered, InvalidBatch> {
        if header.codec == 0 {
            self.scanned += batch.len();
            let view = BatchView::parse(batch, header)?;
            return Ok(self.builder.filter(&view, &self.tags));
        }
        let compressed = CompressedBatch::parse(batch, header)?;
        if !compressed.tag_hashes().any(|hash| self.tags.may_pass(hash)) {
            // Entries are in the clear: the body need not be looked at.
            self.scanned += batch.len();
            return Ok(Filtered::Nothing);
        }
        self.scanned += header.raw_bytes();
        self.decompressed += header.raw_bytes();
        let (header, plain) = decompress(&mut self.decompressor, header, batch)?;
        let view = BatchView::parse(&plain, &header)?;
        let any = view.records().any(|record| self.tags.passes(&record));
        Ok(if any { Filtered::All } else { Filtered::Nothing })
    }

    /// Appends what passes of the batches in `bytes`, which belong to one partition.
    async fn copy_passing(&mut self, mut bytes: &[u8], client: Option<&Rc<Connection>>, look: &mut Look) {
        while !bytes.is_empty() {
            let gone = client.is_some_and(|client| client.is_closed());
            look.cut |= gone || self.decompressed >= FILTERED_FETCH_BYTES_MAX;
            if look.cut {
                return;
            }
            let Ok(header) = BatchHeader::parse(bytes) else { return };
            let (batch, rest) = bytes.split_at(header.batch_bytes as usize);
            bytes = rest;
            match self.filter(&header, batch) {
                Ok(Filtered::Nothing) => {}
                Ok(Filtered::Some(sparse)) => look.passed.extend_from_slice(&sparse),
                // What can't be looked into is the client's to judge.
                Ok(Filtered::All) | Err(_) => look.passed.extend_from_slice(batch),
            }
            look.reached = header.next_offset();
            yield_if_needed().await;
        }
    }
}

/// What a look at one partition has come to.
struct Look {
    passed: Vec<u8>,
    /// Behind the last batch looked at.
    reached: Offset,
    /// It ended before all that was found.
    cut: bool,
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
