//! Blocks: the arena memory that holds the newest batches of each store.
//!
//! The arena is cut into slabs of the largest block; a free slab takes the size class that is asked for, so that small
//! and large blocks share one budget. `BlockTable` decides which block serves whom; it does not hold the bytes: those
//! lie behind [`BlockMemory`], which also keeps the descriptors that the next process adopts.
//!
//! States: free -> open (one store appends) -> sealed (full) -> clean (all flushed: tail cache) -> free. An open block
//! of an idle store may go to free as well once it is clean.

use std::collections::{BTreeSet, VecDeque};

use crate::ids::TopicId;
use crate::limits::{BLOCK_BYTES, SLAB_BYTES};

/// Slots of a slab, whatever its class uses of them.
pub const SLOTS: usize = SLAB_BYTES / BLOCK_BYTES[0];

/// Entries that the clean queues may have beside two for each block.
const STALE_MAX: usize = 1024;

/// Which block: `slab * SLOTS + slot`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The slab that the block lies in.
    #[must_use]
    pub const fn slab(self) -> usize {
        self.0 as usize / SLOTS
    }

    /// Its place among the blocks of the slab.
    #[must_use]
    pub const fn slot(self) -> usize {
        self.0 as usize % SLOTS
    }

    const fn of(slab: usize, slot: usize) -> Self {
        Self((slab * SLOTS + slot) as u32)
    }
}

/// Size class: an index into [`BLOCK_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockClass(u8);

impl BlockClass {
    /// 16 KiB: what a store starts with.
    pub const SMALL: Self = Self(0);
    /// 256 KiB: a busy store.
    pub const MEDIUM: Self = Self(1);
    /// One largest batch.
    pub const LARGE: Self = Self(2);

    /// The class of a descriptor byte, if there is one.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        if (byte as usize) < BLOCK_BYTES.len() { Some(Self(byte)) } else { None }
    }

    /// The byte in the block's descriptor.
    #[must_use]
    pub const fn byte(self) -> u8 {
        self.0
    }

    /// Bytes of a block of this class.
    #[must_use]
    pub const fn bytes(self) -> usize {
        BLOCK_BYTES[self.0 as usize]
    }

    /// The smallest class that holds `bytes`, if one does.
    #[must_use]
    pub fn holding(bytes: usize) -> Option<Self> {
        [Self::SMALL, Self::MEDIUM, Self::LARGE].into_iter().find(|class| class.bytes() >= bytes)
    }

    const fn slots(self) -> usize {
        SLAB_BYTES / self.bytes()
    }
}

/// The bytes of the blocks and their descriptors, as the shard's arena (or a test's plain memory) keeps them.
///
/// Calls for one block follow its life: `take`, then `write` and `publish` by turns, `seal`, `free`. What is published
/// must be readable by a process that starts after this one died at any instruction.
pub trait BlockMemory {
    /// Slabs from 0 whose blocks may be taken; may grow while the memory is being reserved.
    fn slabs(&self) -> usize;
    /// A free block becomes open for a store of `topic`; `sequence` orders the blocks of the shard by age.
    fn take(&self, block: BlockId, topic: TopicId, class: BlockClass, sequence: u64);
    /// Copies `bytes` to `at`, past what is published.
    fn write(&self, block: BlockId, at: usize, bytes: &[u8]);
    /// All bytes before `committed` are whole batches from now on.
    fn publish(&self, block: BlockId, committed: usize);
    /// No more appends.
    fn seal(&self, block: BlockId);
    /// The block's batches are no longer needed.
    fn free(&self, block: BlockId);
    /// Published bytes.
    fn read(&self, block: BlockId, at: usize, bytes: usize) -> &[u8];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockState {
    Open,
    Sealed,
    /// Evicted while replies read from it, or its store is deleted: freed as soon as nothing is planned or pinned.
    Doomed,
}

/// A block in use.
#[derive(Clone, Debug)]
struct Block {
    class: BlockClass,
    state: BlockState,
    store: u32,
    committed: usize,
    /// Bytes not yet flushed.
    dirty: usize,
    /// Replies and flushes that read from it.
    pins: u32,
    /// Stands in one of the clean queues.
    queued: bool,
}

#[derive(Clone, Debug, Default)]
struct Slab {
    class: Option<BlockClass>,
    used: u128,
}

/// No shard takes so many blocks in its life: a descriptor that says so is not one of ours, and to go on counting from it
/// would overflow.
const SEQUENCE_MAX: u64 = 1 << 62;

/// Who has which block. Owned by one shard; not shared.
#[derive(Debug)]
pub struct BlockTable {
    slabs: Vec<Slab>,
    blocks: Vec<Option<Block>>,
    free_slabs: Vec<usize>,
    /// For each class, slabs that may have a free slot; checked when popped.
    partial: [Vec<usize>; 3],
    clean_sealed: VecDeque<BlockId>,
    clean_open: VecDeque<BlockId>,
    next_sequence: u64,
    blocks_in_use: usize,
    bytes_in_use: usize,
    bytes_dirty: usize,
    bytes_pinned: usize,
}

impl BlockTable {
    /// A table over `slabs` free slabs.
    #[must_use]
    pub fn new(slabs: usize) -> Self {
        Self {
            slabs: vec![Slab::default(); slabs],
            blocks: vec![None; slabs * SLOTS],
            // The first slabs are handed out first: the arena's pages are touched in order.
            free_slabs: (0..slabs).rev().collect(),
            partial: [const { Vec::new() }; 3],
            clean_sealed: VecDeque::new(),
            clean_open: VecDeque::new(),
            next_sequence: 1,
            blocks_in_use: 0,
            bytes_in_use: 0,
            bytes_dirty: 0,
            bytes_pinned: 0,
        }
    }

    /// Memory that all blocks together may use.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        self.slabs.len() * SLAB_BYTES
    }

    /// Memory of blocks that are not free.
    #[must_use]
    pub const fn bytes_in_use(&self) -> usize {
        self.bytes_in_use
    }

    /// Appended bytes that are not flushed.
    #[must_use]
    pub const fn bytes_dirty(&self) -> usize {
        self.bytes_dirty
    }

    /// Memory of blocks that a reply or flush reads from.
    #[must_use]
    pub const fn bytes_pinned(&self) -> usize {
        self.bytes_pinned
    }

    fn get(&self, id: BlockId) -> &Block {
        self.blocks[id.0 as usize].as_ref().expect("the caller names a block in use")
    }

    fn get_mut(&mut self, id: BlockId) -> &mut Block {
        self.blocks[id.0 as usize].as_mut().expect("the caller names a block in use")
    }

    /// The store that has the block.
    #[must_use]
    pub fn store_of(&self, id: BlockId) -> u32 {
        self.get(id).store
    }

    /// Room left behind the committed bytes.
    #[must_use]
    pub fn room(&self, id: BlockId) -> usize {
        let block = self.get(id);
        block.class.bytes() - block.committed
    }

    /// Bytes committed.
    #[must_use]
    pub fn committed(&self, id: BlockId) -> usize {
        self.get(id).committed
    }

    /// Size class of the block.
    #[must_use]
    pub fn class(&self, id: BlockId) -> BlockClass {
        self.get(id).class
    }

    /// Takes a free block of `class` for `store`, if there is one.
    pub fn take(
        &mut self,
        memory: &impl BlockMemory,
        topic: TopicId,
        store: u32,
        class: BlockClass,
    ) -> Option<BlockId> {
        let id = self.find_slot(class, memory.slabs())?;
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.occupy(id, class, store, BlockState::Open, 0, 0);
        memory.take(id, topic, class, sequence);
        Some(id)
    }

    fn find_slot(&mut self, class: BlockClass, usable_slabs: usize) -> Option<BlockId> {
        let all = u128::MAX >> (SLOTS - class.slots());
        let partial = &mut self.partial[class.0 as usize];
        for at in (0..partial.len()).rev() {
            let slab = partial[at];
            let free = !self.slabs[slab].used & all;
            if self.slabs[slab].class != Some(class) || free == 0 {
                partial.swap_remove(at);
            } else if slab < usable_slabs {
                return Some(BlockId::of(slab, free.trailing_zeros() as usize));
            }
        }
        // The slabs that were used before are on top, then the others in order. Adopted blocks may lie in slabs that are
        // not usable yet.
        let at = self.free_slabs.iter().rposition(|&slab| slab < usable_slabs)?;
        let slab = self.free_slabs.remove(at);
        self.slabs[slab].class = Some(class);
        self.partial[class.0 as usize].push(slab);
        Some(BlockId::of(slab, 0))
    }

    fn occupy(
        &mut self,
        id: BlockId,
        class: BlockClass,
        store: u32,
        state: BlockState,
        committed: usize,
        dirty: usize,
    ) {
        let slab = &mut self.slabs[id.slab()];
        assert!(slab.used & (1 << id.slot()) == 0, "block {} is taken twice", id.0);
        slab.used |= 1 << id.slot();
        self.blocks_in_use += 1;
        self.bytes_in_use += class.bytes();
        self.bytes_dirty += dirty;
        self.blocks[id.0 as usize] = Some(Block { class, state, store, committed, dirty, pins: 0, queued: false });
    }

    /// Puts a block of the process before back in use, sealed. Returns false when it overlaps another one, or has a
    /// sequence that can't be.
    #[must_use]
    pub fn adopt(
        &mut self,
        id: BlockId,
        class: BlockClass,
        store: u32,
        sequence: u64,
        committed: usize,
        dirty: usize,
    ) -> bool {
        let (slab_index, slot) = (id.slab(), id.slot());
        let Some(slab) = self.slabs.get_mut(slab_index) else { return false };
        if slot >= class.slots() || slab.class.is_some_and(|other| other != class) || slab.used & (1 << slot) != 0 {
            return false;
        }
        if sequence >= SEQUENCE_MAX {
            return false;
        }
        if slab.class.is_none() {
            slab.class = Some(class);
            self.free_slabs.retain(|&free| free != slab_index);
            self.partial[class.0 as usize].push(slab_index);
        }
        self.next_sequence = self.next_sequence.max(sequence + 1);
        self.occupy(id, class, store, BlockState::Sealed, committed, dirty);
        self.queue_if_clean(id);
        true
    }

    /// Counts `bytes` appended to an open block.
    pub fn appended(&mut self, id: BlockId, bytes: usize) {
        let block = self.get_mut(id);
        assert!(block.state == BlockState::Open, "append to a block that is not open");
        block.committed += bytes;
        block.dirty += bytes;
        assert!(block.committed <= block.class.bytes(), "append past the end of a block");
        self.bytes_dirty += bytes;
    }

    /// Closes an open block to appends.
    pub fn seal(&mut self, memory: &impl BlockMemory, id: BlockId) {
        let block = self.get_mut(id);
        assert!(block.state == BlockState::Open, "only an open block is sealed");
        block.state = BlockState::Sealed;
        // It may stand among the clean open ones: a second entry is harmless, the first is skipped.
        block.queued = false;
        memory.seal(id);
        self.queue_if_clean(id);
    }

    /// Counts `bytes` of the block as flushed (or given up by a deletion).
    pub fn flushed(&mut self, memory: &impl BlockMemory, id: BlockId, bytes: usize) {
        let block = self.get_mut(id);
        block.dirty = block.dirty.checked_sub(bytes).expect("no more is flushed than was appended");
        self.bytes_dirty -= bytes;
        self.queue_if_clean(id);
        self.free_if_doomed(memory, id);
    }

    fn queue_if_clean(&mut self, id: BlockId) {
        let block = self.get_mut(id);
        if block.dirty > 0 || block.queued {
            return;
        }
        match block.state {
            BlockState::Doomed => return,
            BlockState::Open | BlockState::Sealed => block.queued = true,
        }
        let queue = if block.state == BlockState::Open { &mut self.clean_open } else { &mut self.clean_sealed };
        queue.push_back(id);
        if self.clean_count() > 2 * self.blocks_in_use + STALE_MAX {
            self.drop_stale();
        }
    }

    /// Entries of blocks that have gone stay in the queues until eviction comes by, or until there are too many.
    fn drop_stale(&mut self) {
        for (queue, state) in [(&mut self.clean_sealed, BlockState::Sealed), (&mut self.clean_open, BlockState::Open)] {
            let mut seen = BTreeSet::new();
            queue.retain(|id| {
                let block = self.blocks[id.0 as usize].as_ref();
                block.is_some_and(|block| block.state == state && block.queued) && seen.insert(*id)
            });
        }
    }

    /// Something reads from the block: it is not freed until as many `unpin`s came.
    pub fn pin(&mut self, id: BlockId) {
        let block = self.get_mut(id);
        block.pins += 1;
        if block.pins == 1 {
            self.bytes_pinned += self.get(id).class.bytes();
        }
    }

    /// Ends one `pin`.
    pub fn unpin(&mut self, memory: &impl BlockMemory, id: BlockId) {
        let block = self.get_mut(id);
        block.pins = block.pins.checked_sub(1).expect("each unpin has its pin");
        if block.pins == 0 {
            self.bytes_pinned -= self.get(id).class.bytes();
            self.queue_if_clean(id);
            self.free_if_doomed(memory, id);
        }
    }

    fn free_if_doomed(&mut self, memory: &impl BlockMemory, id: BlockId) {
        let block = self.get(id);
        if block.state == BlockState::Doomed && block.dirty == 0 && block.pins == 0 {
            self.free(memory, id);
        }
    }

    /// The next block to evict: the one longest clean, sealed ones first. It leaves its queue; the caller frees it or
    /// gives it back with [`BlockTable::keep`].
    pub fn next_clean(&mut self) -> Option<BlockId> {
        while let Some(id) = self.clean_sealed.pop_front() {
            if self.is_clean(id, BlockState::Sealed) {
                return Some(id);
            }
        }
        while let Some(id) = self.clean_open.pop_front() {
            if self.is_clean(id, BlockState::Open) {
                return Some(id);
            }
        }
        None
    }

    fn is_clean(&mut self, id: BlockId, state: BlockState) -> bool {
        // The entry may be of an earlier life of the block, or the block was appended to since.
        let Some(block) = self.blocks[id.0 as usize].as_mut() else { return false };
        if block.state != state || !block.queued {
            return false;
        }
        block.queued = false;
        block.dirty == 0 && block.pins == 0
    }

    /// Whether all of the block is flushed; replies may still read from it.
    #[must_use]
    pub fn is_flushed(&self, id: BlockId) -> bool {
        self.get(id).dirty == 0
    }

    /// Puts a block from [`BlockTable::next_clean`] back behind the others.
    pub fn keep(&mut self, id: BlockId) {
        self.queue_if_clean(id);
    }

    /// Blocks in the queues, stale entries included: bounds an eviction sweep.
    #[must_use]
    pub fn clean_count(&self) -> usize {
        self.clean_sealed.len() + self.clean_open.len()
    }

    /// Frees a clean block.
    ///
    /// # Panics
    /// When the block has unflushed or pinned bytes: that would lose or tear data.
    pub fn free(&mut self, memory: &impl BlockMemory, id: BlockId) {
        let block = self.blocks[id.0 as usize].take().expect("the caller names a block in use");
        assert!(block.dirty == 0 && block.pins == 0, "block {} is freed while in use", id.0);
        self.blocks_in_use -= 1;
        self.bytes_in_use -= block.class.bytes();
        memory.free(id);
        let slab = &mut self.slabs[id.slab()];
        slab.used &= !(1 << id.slot());
        if slab.used == 0 {
            slab.class = None;
            self.free_slabs.push(id.slab());
        } else if !self.partial[block.class.0 as usize].contains(&id.slab()) {
            self.partial[block.class.0 as usize].push(id.slab());
        }
    }

    /// Nobody is to find the block any more: it is freed now, or once planned flushes and pins have ended.
    pub fn doom(&mut self, memory: &impl BlockMemory, id: BlockId) {
        self.get_mut(id).state = BlockState::Doomed;
        self.free_if_doomed(memory, id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_with_a_sequence_that_can_not_be_is_not_adopted() {
        for sequence in [u64::MAX, u64::MAX - 1, SEQUENCE_MAX] {
            let mut table = BlockTable::new(1);
            assert!(!table.adopt(BlockId(0), BlockClass::SMALL, 0, sequence, 8, 0));
            assert!(table.adopt(BlockId(0), BlockClass::SMALL, 0, SEQUENCE_MAX - 1, 8, 0));
        }
    }
}
