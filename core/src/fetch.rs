//! Where the records that a fetch asks for lie: in blocks, on disk, or nowhere.

use crate::batch::BatchHeader;
use crate::block::{BlockId, BlockMemory};
use crate::ids::{Offset, PartitionKey};
use crate::store::{ShardStore, Span};

/// Bytes of whole batches in a block, pinned for the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The block.
    pub block: BlockId,
    /// Where the first batch starts.
    pub at: u32,
    /// How long the batches are together.
    pub bytes: u32,
}

/// How a fetch of one partition is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchPlan {
    /// From blocks; each slice is pinned, and the caller unpins it.
    Memory {
        /// The batches, in order. The first one holds the asked offset, and may start before it.
        slices: Vec<Slice>,
        /// Offset behind the last of them.
        next_offset: Offset,
        /// Bytes of all slices.
        bytes: usize,
        /// Bytes of their batches as the budget counts them.
        counted_bytes: usize,
    },
    /// From disk, or a gap: the index of the shard log knows. Memory starts at `memory_from`.
    Disk {
        /// Nothing before this offset is in memory; nothing past it may be answered from disk.
        memory_from: Offset,
    },
    /// The offset is the end of what may be seen: wait or answer empty.
    AtEnd,
    /// The offset lies before the log start or past the log end.
    OutOfRange,
    /// The partition is not on this shard.
    UnknownPartition,
}

/// How a budget counts a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    /// By what a reader needs for it once it is decompressed.
    Raw,
    /// By what it is.
    Stored,
}

impl Counted {
    fn of_span(self, span: &Span) -> usize {
        match self {
            Self::Raw => span.raw_bytes as usize,
            Self::Stored => span.bytes as usize,
        }
    }

    fn of_batch(self, header: &BatchHeader) -> usize {
        match self {
            Self::Raw => header.raw_bytes(),
            Self::Stored => header.batch_bytes as usize,
        }
    }
}

impl ShardStore {
    /// Plans a fetch from `offset` of about `bytes_max` bytes, decompressed (always at least one batch). With `synced_only`, nothing
    /// past the synced end is shown.
    pub fn plan_fetch(
        &mut self,
        memory: &impl BlockMemory,
        key: PartitionKey,
        offset: Offset,
        bytes_max: usize,
        synced_only: bool,
    ) -> FetchPlan {
        self.plan_counted(memory, key, offset, (bytes_max, Counted::Raw), synced_only)
    }

    /// The same for one who looks at the batches and stops by himself before they decompress to too much: `bytes_max` are
    /// bytes as they are.
    pub fn plan_scan(
        &mut self,
        memory: &impl BlockMemory,
        key: PartitionKey,
        offset: Offset,
        bytes_max: usize,
        synced_only: bool,
    ) -> FetchPlan {
        self.plan_counted(memory, key, offset, (bytes_max, Counted::Stored), synced_only)
    }

    fn plan_counted(
        &mut self,
        memory: &impl BlockMemory,
        key: PartitionKey,
        offset: Offset,
        (bytes_max, counted): (usize, Counted),
        synced_only: bool,
    ) -> FetchPlan {
        let Some(index) = self.find(key) else { return FetchPlan::UnknownPartition };
        let partition = self.partition(index);
        let ends = partition.ends;
        let visible = if synced_only { ends.synced_end() } else { ends.log_end() };
        if offset < ends.log_start() || offset > ends.log_end() {
            return FetchPlan::OutOfRange;
        }
        if offset >= visible {
            return FetchPlan::AtEnd;
        }
        let first = partition.spans.partition_point(|span| span.next_offset <= offset);
        match partition.spans.get(first) {
            Some(span) if span.base_offset <= offset => {}
            found => {
                // Before the spans (or none): what they hold is dense, so only the front can be ahead of the offset.
                let memory_from = found.map_or(ends.log_end(), |span| span.base_offset);
                return FetchPlan::Disk { memory_from: memory_from.min(visible) };
            }
        }
        let mut slices: Vec<Slice> = Vec::new();
        let (mut bytes, mut counted_bytes, mut next_offset) = (0, 0, offset);
        for span in partition.spans.iter().skip(first) {
            // The first batch is taken whatever the budget, so that no reader gets stuck.
            if bytes > 0 && counted_bytes >= bytes_max || span.base_offset >= visible {
                break;
            }
            let left = (bytes_max.saturating_sub(counted_bytes), counted);
            let Some(taken) = take_from_span(memory, span, next_offset, left, bytes == 0, visible) else { break };
            let Taken { slice, .. } = taken;
            bytes += slice.bytes as usize;
            counted_bytes += taken.counted_bytes;
            next_offset = taken.next_offset;
            match slices.last_mut() {
                Some(last) if last.block == slice.block && last.at + last.bytes == slice.at => {
                    last.bytes += slice.bytes;
                }
                _ => slices.push(slice),
            }
            if next_offset < span.next_offset {
                break;
            }
        }
        if slices.is_empty() {
            return FetchPlan::AtEnd;
        }
        for slice in &slices {
            self.blocks.pin(slice.block);
        }
        FetchPlan::Memory { slices, next_offset, bytes, counted_bytes }
    }

    /// Ends the pins of a reply.
    pub fn unpin(&mut self, memory: &impl BlockMemory, slices: &[Slice]) {
        for slice in slices {
            self.blocks.unpin(memory, slice.block);
        }
    }
}

/// What a fetch takes of a span.
struct Taken {
    slice: Slice,
    next_offset: Offset,
    counted_bytes: usize,
}

/// The batches of `span` from the one that holds `offset`, within `bytes_max` (but one at least when `must`).
fn take_from_span(
    memory: &impl BlockMemory,
    span: &Span,
    offset: Offset,
    (bytes_max, counted): (usize, Counted),
    must: bool,
    visible: Offset,
) -> Option<Taken> {
    let whole = span.base_offset == offset && counted.of_span(span) <= bytes_max && span.next_offset <= visible;
    if whole || (must && span.batches == 1 && span.next_offset <= visible) {
        let slice = Slice { block: span.block, at: span.at, bytes: span.bytes };
        return Some(Taken { slice, next_offset: span.next_offset, counted_bytes: counted.of_span(span) });
    }
    let bytes = memory.read(span.block, span.at as usize, span.bytes as usize);
    let (mut at, mut counted_bytes, mut taken) = (0, 0, None);
    while at < bytes.len() {
        let header = BatchHeader::parse(&bytes[at..]).expect("a committed batch was checked when it was appended");
        let end = at + header.batch_bytes as usize;
        if header.next_offset() > offset {
            let from = taken.map_or(at, |(from, _, _)| from);
            let too_much = counted_bytes + counted.of_batch(&header) > bytes_max && !(must && taken.is_none());
            if header.next_offset() > visible || too_much {
                break;
            }
            counted_bytes += counted.of_batch(&header);
            taken = Some((from, end, header.next_offset()));
        }
        at = end;
    }
    let (from, end, next_offset) = taken?;
    let slice = Slice { block: span.block, at: span.at + from as u32, bytes: (end - from) as u32 };
    Some(Taken { slice, next_offset, counted_bytes })
}
