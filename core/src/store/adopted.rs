//! What a start puts back in place: windows of producers from the log, and batches of the process before.

use super::{ShardStore, Span};
use crate::block::{BlockClass, BlockId};
use crate::dedup::{ProducerBatch, Producers};
use crate::ids::PartitionKey;

/// A block of the process before with the spans worth keeping: `(partition, span, still to be flushed)`.
pub(crate) struct AdoptedBlock<'a> {
    pub(crate) id: BlockId,
    pub(crate) class: BlockClass,
    pub(crate) sequence: u64,
    pub(crate) committed: usize,
    pub(crate) spans: &'a [(PartitionKey, Span, bool)],
}

impl ShardStore {
    /// Takes the windows of idempotent producers that recovery made, without those of partitions that are not here.
    pub fn set_producers(&mut self, mut producers: Producers) {
        producers.retain(|key| self.partition_index.contains_key(&key));
        self.flushed_producers = producers.clone();
        self.producers = producers;
    }

    /// A batch of the process before was taken over.
    pub(crate) fn adopt_producer(&mut self, key: PartitionKey, batch: &ProducerBatch) {
        self.producers.stored(key, batch);
    }

    /// Puts batches of the process before back in place; see `adopt`. They join densely and are older than any append.
    pub(crate) fn adopt_block(&mut self, block: AdoptedBlock<'_>) -> bool {
        let Some(first) = block.spans.first() else { return true };
        let Some(index) = self.find(first.0) else { return false };
        let store = self.partition(index).store;
        let dirty = block.spans.iter().filter(|(_, _, dirty)| *dirty).map(|(_, span, _)| span.bytes as usize).sum();
        if !self.blocks.adopt(block.id, block.class, store, block.sequence, block.committed, dirty) {
            return false;
        }
        self.stores[store as usize].as_mut().expect("a partition's store is there").blocks.push_back(block.id);
        for &(key, span, dirty) in block.spans {
            let Some(index) = self.find(key) else { return false };
            if self.partition(index).store != store {
                return false;
            }
            self.spans += 1;
            let partition = self.partition_mut(index);
            partition.spans.push_back(span);
            if dirty {
                partition.ends.appended(span.next_offset);
                partition.unplanned += 1;
                partition.unplanned_bytes += span.bytes as usize;
                partition.unsynced_bytes += u64::from(span.bytes);
                partition.unsynced_since_ms.get_or_insert(0);
                self.unplanned_bytes += span.bytes as usize;
                if self.dirty.insert(key) {
                    self.note_dirty(0, key);
                }
            }
        }
        true
    }
}
