//! The stores and partitions of one shard, and how a batch gets into them.
//!
//! Owns: the ends of each partition, the spans of its newest batches in blocks, which of them are not yet planned for
//! a flush. Does not own: the bytes (see [`BlockMemory`]), files, waiters (see `acks`). Lives on one shard.
//!
//! The spans of a partition are dense up to its log end; what lies before the first span is on disk.

mod adopted;
mod room;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::batch::{self, BATCH_HEADER_BYTES, BatchHeader};
use crate::block::{BlockClass, BlockId, BlockMemory, BlockTable};
use crate::checkpoint::CheckpointSection;
use crate::dedup::{Decision, ProducerBatch, Producers, SequenceError};
use crate::ids::{Durability, Epoch, Offset, PartitionKey, TopicId};
use crate::limits::{EPOCH_OFFSETS, SHARD_PARTITIONS_MAX};
use crate::offsets::Ends;

pub(crate) use adopted::AdoptedBlock;

/// Batches of one partition that lie one behind the other in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Offset of the first record.
    pub base_offset: Offset,
    /// One past the offset of the last record.
    pub next_offset: Offset,
    /// The block they lie in.
    pub block: BlockId,
    /// Where they start in the block.
    pub at: u32,
    /// How long they are together.
    pub bytes: u32,
    /// How long they would be without the compression of their producers. Of a span of joined batches it stays below 1 GiB:
    /// each has more than 128 bytes, and stands for 2 MiB at most.
    pub raw_bytes: u32,
    /// How many batches they are.
    pub batches: u32,
    /// How many of them have an idempotent producer.
    pub idempotent: u32,
}

/// Adjacent batches are joined to spans of at most this: finding an offset in a span walks its headers.
pub(crate) const SPAN_BYTES_MAX: u32 = 64 * 1024;
/// One span costs about 44 bytes of heap: spans may take 4 % of the arena.
const ARENA_BYTES_PER_SPAN: usize = 1024;

/// One partition.
#[derive(Debug)]
pub(crate) struct Partition {
    pub(crate) key: PartitionKey,
    pub(crate) store: u32,
    pub(crate) ends: Ends,
    /// Epoch of the newest batch, or of the creation.
    pub(crate) last_epoch: Epoch,
    pub(crate) spans: VecDeque<Span>,
    /// How many spans at the back of `spans` no flush has taken yet.
    pub(crate) unplanned: usize,
    pub(crate) unplanned_bytes: usize,
    /// When the oldest unplanned batch was appended.
    pub(crate) unplanned_since_ms: u64,
    /// When the oldest batch that is not synced was appended, if there is one; and how many bytes there are.
    pub(crate) unsynced_since_ms: Option<u64>,
    pub(crate) unsynced_bytes: u64,
    pub(crate) durability_floor: Durability,
}

/// The part of a topic that this shard owns.
#[derive(Debug)]
struct Store {
    topic: TopicId,
    open: Option<BlockId>,
    /// When the open block was taken: a block filled soon is followed by a larger one.
    opened_ms: u64,
    /// All its blocks, oldest first.
    blocks: VecDeque<BlockId>,
    partitions: Vec<u32>,
}

/// What a shard must know of a partition to have it.
#[derive(Clone, Copy, Debug)]
pub struct PartitionStart {
    /// Which partition.
    pub key: PartitionKey,
    /// Number of its store in the topic.
    pub store: u16,
    /// Where its log starts, and where it goes on.
    pub log_start: Offset,
    /// Next offset to be given; what is before it is on disk and synced (or lost and to be reported as a gap).
    pub log_end: Offset,
    /// Epoch of its newest batch.
    pub last_epoch: Epoch,
    /// The least level its produces get.
    pub durability_floor: Durability,
}

/// What an append gave, or for a duplicate the append of the same batch before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Offset of the first record of the batch.
    pub base_offset: Offset,
    /// One past its last record.
    pub next_offset: Offset,
    /// The shard's epoch, stamped on the batch.
    pub epoch: Epoch,
    /// Its producer had sent it before: nothing was stored now.
    pub duplicate: bool,
}

/// Why a batch is not appended. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The partition is not on this shard.
    #[error("partition {0} is not on this shard: refresh the metadata")]
    UnknownPartition(PartitionKey),
    /// All memory is taken by batches that wait for the disk.
    #[error("the disk can't keep up: {dirty_bytes} bytes of memory wait to be flushed; back off and retry")]
    Busy {
        /// Unflushed bytes of the shard.
        dirty_bytes: usize,
    },
    /// The unsynced part would grow past what an epoch sets apart.
    #[error("partition {0} has too many unsynced records: wait for the next sync and retry")]
    UnsyncedWindow(PartitionKey),
    /// The batch is not the one that its producer must send now.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
}

/// The stores of a shard. Owned by its executor.
#[derive(Debug)]
pub struct ShardStore {
    pub(crate) blocks: BlockTable,
    stores: Vec<Option<Store>>,
    store_index: HashMap<(TopicId, u16), u32>,
    pub(crate) partitions: Vec<Option<Partition>>,
    partition_index: HashMap<PartitionKey, u32>,
    free_partitions: Vec<u32>,
    /// Partitions with unplanned batches, in the order of an extent.
    pub(crate) dirty: BTreeSet<PartitionKey>,
    /// `(when, partition)` for each time a partition became dirty, oldest first; stale entries are skipped.
    pub(crate) dirty_since: VecDeque<(u64, PartitionKey)>,
    pub(crate) unplanned_bytes: usize,
    spans: usize,
    spans_max: usize,
    epoch: Epoch,
    /// Windows of idempotent producers over all that is appended.
    producers: Producers,
    /// The same over what is flushed: what a checkpoint may say.
    pub(crate) flushed_producers: Producers,
}

impl ShardStore {
    /// An empty shard with memory for `slabs` slabs, in `epoch`.
    #[must_use]
    pub fn new(slabs: usize, epoch: Epoch) -> Self {
        let blocks = BlockTable::new(slabs);
        let spans_max = blocks.bytes_max() / ARENA_BYTES_PER_SPAN;
        Self {
            blocks,
            stores: Vec::new(),
            store_index: HashMap::new(),
            partitions: Vec::new(),
            partition_index: HashMap::new(),
            free_partitions: Vec::new(),
            dirty: BTreeSet::new(),
            dirty_since: VecDeque::new(),
            unplanned_bytes: 0,
            spans: 0,
            spans_max,
            epoch,
            producers: Producers::default(),
            flushed_producers: Producers::default(),
        }
    }

    /// The same partitions with empty memory of another size; everything must be flushed.
    ///
    /// # Panics
    /// When a batch is not flushed: it would be lost.
    #[must_use]
    pub fn emptied(self, slabs: usize) -> Self {
        assert_eq!(self.blocks.bytes_dirty(), 0, "memory is changed only when all of it is flushed");
        let mut fresh = Self::new(slabs, self.epoch);
        fresh.producers = self.producers.clone();
        fresh.flushed_producers = self.flushed_producers.clone();
        for (number, index) in &self.store_index {
            let Some(store) = self.stores[*index as usize].as_ref() else { continue };
            for partition in store.partitions.iter().map(|&index| self.partition(index)) {
                let added = fresh.add_partition(PartitionStart {
                    key: partition.key,
                    store: number.1,
                    log_start: partition.ends.log_start(),
                    log_end: partition.ends.log_end(),
                    last_epoch: partition.last_epoch,
                    durability_floor: partition.durability_floor,
                });
                assert!(added, "there were no more partitions before");
            }
        }
        fresh
    }

    /// The epoch that appends are stamped with.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Memory in use, dirty and pinned, for metrics.
    #[must_use]
    pub const fn blocks(&self) -> &BlockTable {
        &self.blocks
    }

    /// Partitions that there are.
    #[must_use]
    pub fn partition_count(&self) -> usize {
        self.partition_index.len()
    }

    /// Bytes appended that no flush has taken yet.
    #[must_use]
    pub const fn unplanned_bytes(&self) -> usize {
        self.unplanned_bytes
    }

    /// All partitions, in the order of an extent.
    #[must_use]
    pub fn keys(&self) -> Vec<PartitionKey> {
        let mut keys: Vec<_> = self.partition_index.keys().copied().collect();
        keys.sort_unstable();
        keys
    }

    pub(crate) fn find(&self, key: PartitionKey) -> Option<u32> {
        self.partition_index.get(&key).copied()
    }

    pub(crate) fn partition(&self, index: u32) -> &Partition {
        self.partitions[index as usize].as_ref().expect("an index from the map is in use")
    }

    pub(crate) fn partition_mut(&mut self, index: u32) -> &mut Partition {
        self.partitions[index as usize].as_mut().expect("an index from the map is in use")
    }

    /// The ends of a partition and its newest epoch.
    #[must_use]
    pub fn ends(&self, key: PartitionKey) -> Option<(Ends, Epoch)> {
        self.find(key).map(|index| (self.partition(index).ends, self.partition(index).last_epoch))
    }

    /// What a power cut would take of a partition now: bytes, and since when (the monotonic ms given to `append`).
    #[must_use]
    pub fn unsynced(&self, key: PartitionKey) -> Option<(u64, Option<u64>)> {
        let partition = self.partition(self.find(key)?);
        Some((partition.unsynced_bytes, partition.unsynced_since_ms))
    }

    /// The level that a produce to the partition gets when it asks for `asked`.
    #[must_use]
    pub fn level(&self, key: PartitionKey, asked: Durability) -> Option<Durability> {
        self.find(key).map(|index| asked.max(self.partition(index).durability_floor))
    }

    /// Takes on a partition. A partition that is there already only gets its floor changed.
    ///
    /// Returns false when the shard has as many partitions as a checkpoint can list.
    #[must_use]
    pub fn add_partition(&mut self, start: PartitionStart) -> bool {
        if let Some(index) = self.find(start.key) {
            self.partition_mut(index).durability_floor = start.durability_floor;
            return true;
        }
        if self.partition_index.len() >= SHARD_PARTITIONS_MAX {
            return false;
        }
        let store = self.store_for(start.key.topic, start.store);
        let partition = Partition {
            key: start.key,
            store,
            ends: Ends::at_rest(start.log_start, start.log_end),
            last_epoch: start.last_epoch,
            spans: VecDeque::new(),
            unplanned: 0,
            unplanned_bytes: 0,
            unplanned_since_ms: 0,
            unsynced_since_ms: None,
            unsynced_bytes: 0,
            durability_floor: start.durability_floor,
        };
        let index = if let Some(index) = self.free_partitions.pop() {
            self.partitions[index as usize] = Some(partition);
            index
        } else {
            self.partitions.push(Some(partition));
            (self.partitions.len() - 1) as u32
        };
        self.partition_index.insert(start.key, index);
        self.stores[store as usize].as_mut().expect("just made").partitions.push(index);
        true
    }

    fn store_for(&mut self, topic: TopicId, number: u16) -> u32 {
        if let Some(&index) = self.store_index.get(&(topic, number)) {
            return index;
        }
        let store = Store { topic, open: None, opened_ms: 0, blocks: VecDeque::new(), partitions: Vec::new() };
        let index = match self.stores.iter().position(Option::is_none) {
            Some(free) if self.stores.len() > self.store_index.len() => {
                self.stores[free] = Some(store);
                free as u32
            }
            _ => {
                self.stores.push(Some(store));
                (self.stores.len() - 1) as u32
            }
        };
        self.store_index.insert((topic, number), index);
        index
    }

    /// Windows of idempotent producers over all that is appended.
    #[must_use]
    pub const fn producers(&self) -> &Producers {
        &self.producers
    }

    /// What a checkpoint says of the windows over what is flushed.
    #[must_use]
    pub fn producers_section(&self) -> Option<CheckpointSection> {
        self.flushed_producers.section()
    }

    /// Drops all partitions of a topic; their memory is free once planned flushes and pins have ended.
    pub fn remove_topic(&mut self, memory: &impl BlockMemory, topic: TopicId) {
        self.producers.remove_topic(topic);
        self.flushed_producers.remove_topic(topic);
        let numbers: Vec<_> = self.store_index.keys().filter(|(owner, _)| *owner == topic).copied().collect();
        for number in numbers {
            let Some(index) = self.store_index.remove(&number) else { continue };
            let Some(store) = self.stores[index as usize].take() else { continue };
            for partition_index in store.partitions {
                let Some(partition) = self.partitions[partition_index as usize].take() else { continue };
                self.partition_index.remove(&partition.key);
                self.free_partitions.push(partition_index);
                self.dirty.remove(&partition.key);
                self.unplanned_bytes -= partition.unplanned_bytes;
                self.spans -= partition.spans.len();
                let first_unplanned = partition.spans.len() - partition.unplanned;
                for span in partition.spans.iter().skip(first_unplanned) {
                    self.blocks.flushed(memory, span.block, span.bytes as usize);
                }
            }
            for block in store.blocks {
                self.blocks.doom(memory, block);
            }
        }
    }

    /// Appends one checked batch: gives it offsets, copies and stamps it into a block of its store and publishes it.
    /// `now_ms` is monotonic, `wall_ms` goes into the stamp. What an idempotent producer has sent before is not stored again:
    /// the result is that of the first time.
    pub fn append(
        &mut self,
        memory: &impl BlockMemory,
        header: &BatchHeader,
        bytes: &[u8],
        now_ms: u64,
        wall_ms: i64,
    ) -> Result<Appended, AppendError> {
        let index = self.find(header.key).ok_or(AppendError::UnknownPartition(header.key))?;
        let epoch = self.epoch;
        if let Decision::Duplicate(first) = self.producers.check(header, epoch)? {
            let (base_offset, next_offset) = (first.base_offset, first.next_offset());
            return Ok(Appended { base_offset, next_offset, epoch: first.epoch, duplicate: true });
        }
        let partition = self.partition(index);
        let base_offset = partition.ends.log_end();
        let next_offset = base_offset.plus(u64::from(header.record_count));
        if next_offset.since(partition.ends.synced_end()) >= EPOCH_OFFSETS {
            return Err(AppendError::UnsyncedWindow(header.key));
        }
        let store = partition.store;
        let size = header.batch_bytes as usize;
        let block = self.block_with_room(memory, store, size, now_ms)?;
        let at = self.blocks.committed(block);

        let mut head = [0; BATCH_HEADER_BYTES];
        head.copy_from_slice(&bytes[..BATCH_HEADER_BYTES]);
        batch::stamp(&mut head, base_offset, wall_ms, epoch);
        memory.write(block, at, &head);
        memory.write(block, at + BATCH_HEADER_BYTES, &bytes[BATCH_HEADER_BYTES..size]);
        memory.publish(block, at + size);
        self.blocks.appended(block, size);

        let produced = ProducerBatch::of(header, base_offset, epoch);
        // Bounded by BATCH_BYTES_MAX: checked when the batch came in.
        let raw_bytes = u32::try_from(header.raw_bytes()).unwrap_or(u32::MAX);
        let span = Span {
            base_offset,
            next_offset,
            block,
            at: at as u32,
            bytes: size as u32,
            raw_bytes,
            batches: 1,
            idempotent: u32::from(produced.is_some()),
        };
        self.push_span(index, span, now_ms);
        if let Some(batch) = produced {
            self.producers.stored(header.key, &batch);
        }
        Ok(Appended { base_offset, next_offset, epoch, duplicate: false })
    }

    fn push_span(&mut self, index: u32, span: Span, now_ms: u64) {
        let epoch = self.epoch;
        let partition = self.partition_mut(index);
        partition.ends.appended(span.next_offset);
        partition.last_epoch = epoch;
        if partition.unplanned_bytes == 0 {
            partition.unplanned_since_ms = now_ms;
        }
        partition.unplanned_bytes += span.bytes as usize;
        partition.unsynced_bytes += u64::from(span.bytes);
        partition.unsynced_since_ms.get_or_insert(now_ms);
        let mut joined = false;
        // Only an unplanned span may grow: a flush takes spans whole.
        if partition.unplanned > 0
            && let Some(last) = partition.spans.back_mut()
            && last.block == span.block
            && last.at + last.bytes == span.at
            && last.bytes + span.bytes <= SPAN_BYTES_MAX
        {
            last.bytes += span.bytes;
            last.raw_bytes = last.raw_bytes.saturating_add(span.raw_bytes);
            last.batches += 1;
            last.idempotent += span.idempotent;
            last.next_offset = span.next_offset;
            joined = true;
        }
        if !joined {
            partition.spans.push_back(span);
            partition.unplanned += 1;
        }
        let key = partition.key;
        self.spans += usize::from(!joined);
        self.unplanned_bytes += span.bytes as usize;
        if self.dirty.insert(key) {
            self.note_dirty(now_ms, key);
        }
    }

    fn note_dirty(&mut self, now_ms: u64, key: PartitionKey) {
        if self.dirty_since.len() > 4 * self.dirty.len() + 1024 {
            // Mostly stale entries behind one partition that waits for its mark.
            let mut fresh: Vec<_> = self
                .dirty
                .iter()
                .filter_map(|&key| self.find(key))
                .map(|index| (self.partition(index).unplanned_since_ms, self.partition(index).key))
                .collect();
            fresh.sort_unstable();
            self.dirty_since = fresh.into();
        } else {
            self.dirty_since.push_back((now_ms, key));
        }
    }

    /// Gives up what lies before `start`, but nothing that is not synced. Says whether that is news.
    pub fn raise_log_start(&mut self, key: PartitionKey, start: Offset) -> bool {
        let Some(index) = self.find(key) else { return false };
        self.partition_mut(index).ends.start_raised(start)
    }

    /// For each partition what a checkpoint says of it.
    #[must_use]
    pub fn snapshot(&self) -> BTreeMap<PartitionKey, (Ends, Epoch)> {
        self.partition_index
            .iter()
            .map(|(&key, &index)| (key, (self.partition(index).ends, self.partition(index).last_epoch)))
            .collect()
    }
}

#[cfg(test)]
mod tests;
