//! What of a dead process's arena the next one takes over, decided from the recovered log.
//!
//! Every batch at or past its partition's recovered end is acked data that only memory has: all of it must be whole and
//! join the log and each other without a hole. If one does not, the arena is not this log's last memory, and none of it
//! is taken. Batches before the recovered end are kept as tail cache where they join densely.

use std::collections::{BTreeMap, HashMap};

use crate::batch::{self, BatchError};
use crate::block::{BlockClass, BlockId, BlockMemory};
use crate::dedup::ProducerBatch;
use crate::ids::{Offset, PartitionKey, TopicId};
use crate::store::{AdoptedBlock, SPAN_BYTES_MAX, ShardStore, Span};

/// A block that was in use when the process died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Which block.
    pub block: BlockId,
    /// Topic of its store.
    pub topic: TopicId,
    /// Its size class.
    pub class: BlockClass,
    /// Its age among the blocks of the shard.
    pub sequence: u64,
    /// Bytes of whole batches.
    pub committed: usize,
}

/// What was taken over.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Adopted {
    /// Batches that only memory had.
    pub batches: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Blocks that hold nothing worth keeping: the caller frees them in the arena.
    pub free: Vec<BlockId>,
}

/// Why the arena is not the log's last memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// Bytes said to be committed are not whole batches.
    #[error("block {block:?} holds bytes that are not whole batches: {error}")]
    Damaged {
        /// The block.
        block: BlockId,
        /// What is wrong with them.
        error: BatchError,
    },
    /// The batches of a partition do not go on where the log (or the batch before) ends.
    #[error("partition {key} has a hole: expected offset {expected}, found {found}")]
    Hole {
        /// The partition.
        key: PartitionKey,
        /// Where the next batch should start.
        expected: Offset,
        /// Where it starts.
        found: Offset,
    },
    /// Two blocks claim the same memory, one mixes stores, or its sequence is higher than any can be.
    #[error("block {0:?} overlaps another, mixes stores, or has an impossible sequence")]
    Block(BlockId),
}

/// Batches of one partition found one behind the other in a block: small ones are joined as spans are, since each of them
/// alone would cost as much memory as it has.
#[derive(Clone, Copy)]
struct Found {
    base_offset: Offset,
    next_offset: Offset,
    block: usize,
    at: u32,
    bytes: u32,
    raw_bytes: u32,
    batches: u32,
    idempotent: u32,
}

/// What [`read_blocks`] gives.
#[derive(Default)]
struct Read {
    /// The batches of each living partition.
    found: BTreeMap<PartitionKey, Vec<Found>>,
    /// Those that only memory has and that have an idempotent producer.
    produced: Vec<(PartitionKey, ProducerBatch)>,
}

/// Takes over what the blocks hold past the ends in `store`, which was just filled with the recovered partitions.
/// Partitions that are not in `store` were deleted: their batches are dropped. On an error `store` must be thrown away.
pub fn adopt(
    store: &mut ShardStore,
    memory: &impl BlockMemory,
    mut live: Vec<LiveBlock>,
) -> Result<Adopted, AdoptError> {
    live.sort_unstable_by_key(|block| block.sequence);
    let Read { found, produced } = read_blocks(store, memory, &live)?;
    let mut adopted = Adopted::default();
    // For each block the spans worth keeping, in the order of their place in it.
    let mut keep: HashMap<usize, Vec<(PartitionKey, Span, bool)>> = HashMap::new();
    for (key, batches) in found {
        let Some((ends, _)) = store.ends(key) else { continue };
        let first_new = batches.partition_point(|batch| batch.next_offset <= ends.log_end());
        check_dense(key, ends.log_end(), &batches[first_new..])?;
        let cached = dense_suffix(ends.log_end(), &batches[..first_new]);
        for (at, batch) in batches.iter().enumerate().skip(cached) {
            let dirty = at >= first_new;
            if dirty {
                adopted.batches += u64::from(batch.batches);
                adopted.bytes += u64::from(batch.bytes);
            }
            let span = Span {
                base_offset: batch.base_offset,
                next_offset: batch.next_offset,
                block: live[batch.block].block,
                at: batch.at,
                bytes: batch.bytes,
                raw_bytes: batch.raw_bytes,
                batches: batch.batches,
                idempotent: batch.idempotent,
            };
            keep.entry(batch.block).or_default().push((key, span, dirty));
        }
    }
    for (at, block) in live.iter().enumerate() {
        let Some(mut spans) = keep.remove(&at) else {
            adopted.free.push(block.block);
            continue;
        };
        spans.sort_unstable_by_key(|(_, span, _)| span.at);
        let ok = store.adopt_block(AdoptedBlock {
            id: block.block,
            class: block.class,
            sequence: block.sequence,
            committed: block.committed,
            spans: &spans,
        });
        if !ok {
            return Err(AdoptError::Block(block.block));
        }
    }
    produced.iter().for_each(|(key, batch)| store.adopt_producer(*key, batch));
    Ok(adopted)
}

/// Walks all blocks, oldest first, and lists the batches of each living partition.
fn read_blocks(store: &ShardStore, memory: &impl BlockMemory, live: &[LiveBlock]) -> Result<Read, AdoptError> {
    let mut read = Read::default();
    for (index, block) in live.iter().enumerate() {
        let damaged = |error| AdoptError::Damaged { block: block.block, error };
        let mut at = 0;
        for batch in batch::batches(memory.read(block.block, 0, block.committed)) {
            let (header, bytes) = batch.map_err(damaged)?;
            let here = at;
            let raw_bytes = u32::try_from(header.raw_bytes()).unwrap_or(u32::MAX);
            at += header.batch_bytes;
            // Of every batch, since a damaged key or offset would make an acked one look like one that is not needed.
            batch::check_crc(&header, bytes).map_err(damaged)?;
            let Some((ends, _)) = store.ends(header.key) else { continue };
            let batches = read.found.entry(header.key).or_default();
            let produced = ProducerBatch::of(&header, header.base_offset, header.leader_epoch);
            let idempotent = u32::from(produced.is_some());
            if let Some(produced) = produced
                && header.next_offset() > ends.log_end()
            {
                read.produced.push((header.key, produced));
            }
            if let Some(last) = batches.last_mut()
                && last.block == index
                && last.at + last.bytes == here
                && last.next_offset == header.base_offset
                // What is flushed and what is not are apart.
                && last.next_offset != ends.log_end()
                && last.bytes + header.batch_bytes <= SPAN_BYTES_MAX
            {
                last.bytes += header.batch_bytes;
                last.raw_bytes = last.raw_bytes.saturating_add(raw_bytes);
                last.batches += 1;
                last.idempotent += idempotent;
                last.next_offset = header.next_offset();
                continue;
            }
            batches.push(Found {
                base_offset: header.base_offset,
                next_offset: header.next_offset(),
                block: index,
                at: here,
                bytes: header.batch_bytes,
                raw_bytes,
                batches: 1,
                idempotent,
            });
        }
    }
    Ok(read)
}

fn check_dense(key: PartitionKey, mut expected: Offset, batches: &[Found]) -> Result<(), AdoptError> {
    for batch in batches {
        if batch.base_offset != expected {
            return Err(AdoptError::Hole { key, expected, found: batch.base_offset });
        }
        expected = batch.next_offset;
    }
    Ok(())
}

/// Index of the first batch from which on they join each other and `end`.
fn dense_suffix(end: Offset, batches: &[Found]) -> usize {
    let mut next = end;
    let mut first = batches.len();
    for (at, batch) in batches.iter().enumerate().rev() {
        if batch.next_offset != next {
            break;
        }
        next = batch.base_offset;
        first = at;
    }
    first
}
