//! The arena as the memory that core's block table decides over.

use ringmain_core::adopt::LiveBlock;
use ringmain_core::block::{BlockClass, BlockId, BlockMemory};
use ringmain_core::ids::TopicId;

use crate::arena::{Arena, ArenaError};

impl BlockMemory for Arena {
    fn slabs(&self) -> usize {
        self.usable_slabs() as usize
    }

    fn take(&self, block: BlockId, topic: TopicId, class: BlockClass, sequence: u64) {
        Self::take(self, block.0, topic, class.byte(), sequence);
    }

    fn write(&self, block: BlockId, at: usize, bytes: &[u8]) {
        Self::write(self, block.0, at, bytes);
    }

    fn publish(&self, block: BlockId, committed: usize) {
        // A block has 2 MiB at most.
        Self::publish(self, block.0, committed as u32);
    }

    fn seal(&self, block: BlockId) {
        Self::seal(self, block.0);
    }

    fn free(&self, block: BlockId) {
        Self::free(self, block.0);
    }

    fn read(&self, block: BlockId, at: usize, bytes: usize) -> &[u8] {
        Self::read(self, block.0, at, bytes)
    }
}

impl Arena {
    /// The blocks that the process before had in use, as adoption wants them.
    ///
    /// # Errors
    /// When a descriptor is malformed: then none can be trusted.
    pub(crate) fn live(&self) -> Result<Vec<LiveBlock>, ArenaError> {
        let live = self.live_blocks()?;
        let adopted = live.into_iter().map(|found| LiveBlock {
            block: BlockId(found.block),
            topic: found.topic,
            class: BlockClass::from_byte(found.class).expect("live_blocks has checked the class"),
            sequence: found.sequence,
            committed: found.committed_bytes as usize,
        });
        Ok(adopted.collect())
    }
}
