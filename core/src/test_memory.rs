//! Plain memory in place of the arena, for tests: keeps what a process that starts after a kill would find.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use crate::adopt::LiveBlock;
use crate::block::{BlockClass, BlockId, BlockMemory};
use crate::ids::TopicId;

#[derive(Clone)]
struct TestBlock {
    topic: TopicId,
    class: BlockClass,
    sequence: u64,
    bytes: Vec<u8>,
    committed: usize,
    sealed: bool,
}

/// Blocks in maps. Reads leak their copy: a test is short.
#[derive(Clone, Default)]
pub(crate) struct TestMemory {
    slabs: Cell<usize>,
    blocks: RefCell<BTreeMap<BlockId, TestBlock>>,
}

impl TestMemory {
    pub(crate) fn new(slabs: usize) -> Self {
        Self { slabs: Cell::new(slabs), blocks: RefCell::default() }
    }

    pub(crate) fn live(&self) -> Vec<LiveBlock> {
        let live = |(&block, found): (&BlockId, &TestBlock)| LiveBlock {
            block,
            topic: found.topic,
            class: found.class,
            sequence: found.sequence,
            committed: found.committed,
        };
        self.blocks.borrow().iter().map(live).collect()
    }

    /// So many slabs may be used from now on.
    pub(crate) fn set_slabs(&self, slabs: usize) {
        self.slabs.set(slabs);
    }

    /// Flips one bit of what is committed in some block.
    pub(crate) fn damage(&self, at: usize) -> bool {
        let mut blocks = self.blocks.borrow_mut();
        let Some(block) = blocks.values_mut().find(|block| block.committed > 0) else { return false };
        let at = at % block.committed;
        block.bytes[at] ^= 0x10;
        true
    }
}

impl BlockMemory for TestMemory {
    fn slabs(&self) -> usize {
        self.slabs.get()
    }

    fn take(&self, block: BlockId, topic: TopicId, class: BlockClass, sequence: u64) {
        let fresh = TestBlock { topic, class, sequence, bytes: vec![0xee; class.bytes()], committed: 0, sealed: false };
        assert!(block.slab() < self.slabs.get(), "a block of a slab that is not reserved");
        assert!(self.blocks.borrow_mut().insert(block, fresh).is_none(), "a block is taken while it is in use");
    }

    fn write(&self, block: BlockId, at: usize, bytes: &[u8]) {
        let mut blocks = self.blocks.borrow_mut();
        let block = blocks.get_mut(&block).unwrap();
        assert!(at >= block.committed && !block.sealed, "written under what is published");
        block.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn publish(&self, block: BlockId, committed: usize) {
        self.blocks.borrow_mut().get_mut(&block).unwrap().committed = committed;
    }

    fn seal(&self, block: BlockId) {
        self.blocks.borrow_mut().get_mut(&block).unwrap().sealed = true;
    }

    fn free(&self, block: BlockId) {
        assert!(self.blocks.borrow_mut().remove(&block).is_some(), "a free block is freed");
    }

    fn read(&self, block: BlockId, at: usize, bytes: usize) -> &[u8] {
        let blocks = self.blocks.borrow();
        let block = &blocks[&block];
        assert!(at + bytes <= block.committed, "read past what is published");
        Box::leak(block.bytes[at..at + bytes].to_vec().into_boxed_slice())
    }
}
