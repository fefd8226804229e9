//! Blocks for appends: the open one of a store, a new one, or that of batches which are flushed and long in memory.

use super::*;

impl ShardStore {
    pub(super) fn block_with_room(
        &mut self,
        memory: &impl BlockMemory,
        store: u32,
        bytes: usize,
        now_ms: u64,
    ) -> Result<BlockId, AppendError> {
        /// A block filled within this time is followed by one of the next class.
        const FILLED_SOON_MS: u64 = 1000;

        while self.spans >= self.spans_max {
            if !self.evict_one(memory) {
                return Err(AppendError::Busy { dirty_bytes: self.blocks.bytes_dirty() });
            }
        }
        let state = self.stores[store as usize].as_ref().expect("a partition's store is there");
        let topic = state.topic;
        let mut class = BlockClass::SMALL;
        if let Some(open) = state.open {
            if self.blocks.room(open) >= bytes {
                return Ok(open);
            }
            let filled_soon = now_ms.saturating_sub(state.opened_ms) < FILLED_SOON_MS;
            if filled_soon || self.blocks.class(open) == BlockClass::LARGE {
                class = BlockClass::MEDIUM;
            }
        }
        let needed = BlockClass::holding(bytes).expect("a checked batch fits the largest block");
        // A batch that fills most of a medium block would waste the rest of it.
        let class = if class.max(needed) == BlockClass::MEDIUM && bytes > BlockClass::MEDIUM.bytes() / 2 {
            BlockClass::LARGE
        } else {
            class.max(needed)
        };
        let block = self.take_block(memory, topic, store, class.max(needed), needed)?;
        let state = self.stores[store as usize].as_mut().expect("a partition's store is there");
        if let Some(full) = state.open.replace(block) {
            self.blocks.seal(memory, full);
        }
        let state = self.stores[store as usize].as_mut().expect("a partition's store is there");
        state.opened_ms = now_ms;
        state.blocks.push_back(block);
        Ok(block)
    }

    /// A block of the wanted class, evicting clean blocks for it; else of the smallest class that does.
    fn take_block(
        &mut self,
        memory: &impl BlockMemory,
        topic: TopicId,
        store: u32,
        wanted: BlockClass,
        needed: BlockClass,
    ) -> Result<BlockId, AppendError> {
        loop {
            if let Some(block) = self.blocks.take(memory, topic, store, wanted) {
                return Ok(block);
            }
            if self.evict_one(memory) {
                continue;
            }
            return self
                .blocks
                .take(memory, topic, store, needed)
                .ok_or(AppendError::Busy { dirty_bytes: self.blocks.bytes_dirty() });
        }
    }

    /// Frees the block that has been clean longest, and with it the older ones of its store: spans stay dense only when
    /// blocks leave in the order they were filled. Older ones that replies still read from can't be found any more, and are
    /// freed when the replies have gone; older ones that are not flushed keep it in place.
    pub fn evict_one(&mut self, memory: &impl BlockMemory) -> bool {
        for _ in 0..self.blocks.clean_count() {
            let Some(block) = self.blocks.next_clean() else { return false };
            let store = self.blocks.store_of(block);
            let state = self.stores[store as usize].as_mut().expect("a block in use has its store");
            let older = state.blocks.iter().position(|other| *other == block);
            let older = older.expect("a block in use is among those of its store");
            if state.blocks.iter().take(older).any(|&before| !self.blocks.is_flushed(before)) {
                self.blocks.keep(block);
                continue;
            }
            for _ in 0..=older {
                self.retire_front(memory, store);
            }
            return true;
        }
        false
    }

    /// The oldest block of a store, all flushed, leaves it.
    fn retire_front(&mut self, memory: &impl BlockMemory, store: u32) {
        let state = self.stores[store as usize].as_mut().expect("a block in use has its store");
        let block = state.blocks.pop_front().expect("the caller saw it");
        if state.open == Some(block) {
            state.open = None;
        }
        for at in 0..state.partitions.len() {
            let index = self.stores[store as usize].as_ref().expect("it was there above").partitions[at];
            self.drop_front_spans(index, block);
        }
        self.blocks.doom(memory, block);
    }

    fn drop_front_spans(&mut self, index: u32, block: BlockId) {
        let partition = self.partition_mut(index);
        let mut dropped = 0;
        while partition.spans.front().is_some_and(|span| span.block == block) {
            partition.spans.pop_front();
            dropped += 1;
        }
        assert!(partition.unplanned <= partition.spans.len(), "an unflushed batch is never evicted");
        self.spans -= dropped;
    }
}
