//! The arena as a next process finds it: published bytes and descriptors, nothing else of the dead one.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;

use ringmain_core::adopt::LiveBlock;
use ringmain_core::block::{BlockClass, BlockId, BlockMemory};
use ringmain_core::ids::{Incarnation, Position, TopicId};

use crate::rng::Rng;

pub const SLABS: usize = 3;

struct SimBlock {
    topic: TopicId,
    class: BlockClass,
    sequence: u64,
    bytes: Vec<u8>,
    committed: usize,
}

/// Blocks, and what the arena's header says.
#[derive(Default)]
pub struct SimArena {
    blocks: RefCell<BTreeMap<BlockId, SimBlock>>,
    pub incarnation: Cell<Incarnation>,
    pub next_incarnation: Cell<Incarnation>,
    /// How far the log was flushed.
    pub flushed: Cell<Position>,
    reads: Copies,
}

impl SimArena {
    pub fn new(next_incarnation: Incarnation) -> Self {
        let arena = Self::default();
        arena.next_incarnation.set(next_incarnation);
        arena
    }

    pub fn live(&self) -> Vec<LiveBlock> {
        let live = |(&block, found): (&BlockId, &SimBlock)| LiveBlock {
            block,
            topic: found.topic,
            class: found.class,
            sequence: found.sequence,
            committed: found.committed,
        };
        self.blocks.borrow().iter().map(live).collect()
    }

    /// Flips a published bit of some block; says which.
    pub fn flip(&self, rng: &mut Rng) -> Option<String> {
        let mut blocks = self.blocks.borrow_mut();
        let at = rng.index(blocks.len().max(1));
        let (id, block) = blocks.iter_mut().nth(at)?;
        if block.committed == 0 {
            return None;
        }
        let byte = rng.index(block.committed);
        block.bytes[byte] ^= 1 << rng.below(8);
        Some(format!("a bit of byte {byte} of block {}", id.0))
    }
}

impl BlockMemory for SimArena {
    fn slabs(&self) -> usize {
        SLABS
    }

    fn take(&self, block: BlockId, topic: TopicId, class: BlockClass, sequence: u64) {
        let fresh = SimBlock { topic, class, sequence, bytes: Vec::new(), committed: 0 };
        assert!(self.blocks.borrow_mut().insert(block, fresh).is_none(), "block {} is taken twice", block.0);
    }

    fn write(&self, block: BlockId, at: usize, bytes: &[u8]) {
        let mut blocks = self.blocks.borrow_mut();
        let block = blocks.get_mut(&block).expect("a block is written while it is taken");
        assert!(at >= block.committed, "written under what is published");
        block.bytes.truncate(at);
        block.bytes.extend_from_slice(bytes);
    }

    fn publish(&self, block: BlockId, committed: usize) {
        self.blocks.borrow_mut().get_mut(&block).expect("a block is published while it is taken").committed = committed;
    }

    fn seal(&self, _: BlockId) {}

    fn free(&self, block: BlockId) {
        assert!(self.blocks.borrow_mut().remove(&block).is_some(), "a free block is freed");
    }

    fn read(&self, block: BlockId, at: usize, bytes: usize) -> &[u8] {
        let blocks = self.blocks.borrow();
        let block = &blocks[&block];
        assert!(at + bytes <= block.committed, "read past what is published");
        self.reads.keep(&block.bytes[at..at + bytes])
    }
}

/// Cells that are filled once each.
type Row = Vec<OnceCell<Box<[u8]>>>;

/// Copies that live as long as the arena: a reference into bytes that others write needs unsafe code.
#[derive(Default)]
struct Copies {
    /// Row `n` has room for 64 << n copies.
    rows: [OnceCell<Row>; 20],
    count: Cell<usize>,
}

impl Copies {
    fn keep(&self, bytes: &[u8]) -> &[u8] {
        let mut at = self.count.replace(self.count.get() + 1);
        let mut row = 0;
        while at >= 64 << row {
            at -= 64 << row;
            row += 1;
        }
        let row = self.rows[row].get_or_init(|| (0..64 << row).map(|_| OnceCell::new()).collect());
        row[at].get_or_init(|| bytes.into())
    }
}
