//! Idempotent producers: which batches of a producer a partition has stored last, so that one that is sent again is acked
//! again and not stored again.
//!
//! A producer numbers its records in each partition: the batch header has its id, its epoch and the sequence of the first
//! record. A partition keeps the last [`PRODUCER_WINDOW_BATCHES`] batches of each producer. [`Producers::check`] says what an
//! arriving batch is and changes nothing; [`Producers::stored`] takes it once it is stored, so that a batch that is refused
//! in between moves no window.
//!
//! Owns: the windows of one shard, bounded by number, the one that was appended to longest ago given up first. A shard has
//! two of these: one of all that is appended, and one of what is flushed, which checkpoints carry. Recovery makes the second
//! one again from the newest checkpoint and the directories behind it.

mod gather;
mod section;
#[cfg(test)]
mod tests;
mod window;

use std::collections::HashMap;

use crate::batch::BatchHeader;
use crate::ids::{Epoch, Offset, PartitionKey, TopicId};
use crate::limits::{PARTITION_PRODUCERS_MAX, PRODUCER_WINDOW_BATCHES, SHARD_PRODUCERS_MAX};

pub use gather::RunProducers;
pub use section::{PRODUCERS_SECTION, SectionError, WINDOW_BYTES_MAX};
pub use window::Window;

/// A stored batch of an idempotent producer, without its records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerBatch {
    /// Whose.
    pub producer_id: u64,
    /// The producer's epoch.
    pub producer_epoch: u16,
    /// Sequence of its first record.
    pub base_sequence: u32,
    /// Its records.
    pub record_count: u32,
    /// Offset of its first record.
    pub base_offset: Offset,
    /// Epoch of the shard in which it was appended.
    pub epoch: Epoch,
    /// The producer's CRC: another batch under the same sequence is no duplicate.
    pub crc: u32,
}

impl ProducerBatch {
    /// The batch with this header, stored at `base_offset` in `epoch`; none when its producer is not idempotent.
    #[must_use]
    pub fn of(header: &BatchHeader, base_offset: Offset, epoch: Epoch) -> Option<Self> {
        (header.producer_id != 0).then_some(Self {
            producer_id: header.producer_id,
            producer_epoch: header.producer_epoch,
            base_sequence: header.base_sequence,
            record_count: header.record_count,
            base_offset,
            epoch,
            crc: header.crc,
        })
    }

    /// One past the offset of its last record.
    #[must_use]
    pub fn next_offset(&self) -> Offset {
        self.base_offset.plus(u64::from(self.record_count))
    }
}

/// What an arriving batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// To be stored.
    New,
    /// Stored already: this is where.
    Duplicate(ProducerBatch),
}

/// Why a batch is neither new nor a duplicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceError {
    /// Batches before it are missing.
    #[error("the batch does not follow the producer's last one: sequence {expected} is next")]
    Gap {
        /// Sequence of the record that is next.
        expected: u32,
    },
    /// The producer has a higher epoch by now: another instance of it has taken over.
    #[error("the producer's epoch is {current} by now: another instance has taken over")]
    Fenced {
        /// The highest epoch seen here.
        current: u16,
    },
    /// It lies behind the last batches that are known: whether and where it is stored is not known any more.
    #[error("the batch lies behind the producer's last {PRODUCER_WINDOW_BATCHES} batches; sequence {expected} is next")]
    TooOld {
        /// Sequence of the record that is next.
        expected: u32,
    },
    /// Another batch was stored under its sequence.
    #[error("another batch was stored under this sequence; sequence {expected} is next")]
    Reused {
        /// Sequence of the record that is next.
        expected: u32,
    },
    /// Nothing is known of the producer here, and something was forgotten since.
    #[error("nothing is known of the producer here any more: begin anew with a higher epoch and sequence 0")]
    Forgotten,
}

/// No slot.
const NONE: u32 = u32::MAX;
/// The two orders of slots: all of the shard, and those of one partition.
const SHARD: usize = 0;
const PARTITION: usize = 1;

#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    behind: u32,
}

/// Ends of a list of slots, in the order of their last append.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    count: usize,
}

impl Default for List {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE, count: 0 }
    }
}

#[derive(Clone, Debug)]
struct Slot {
    key: PartitionKey,
    window: Window,
    links: [Link; 2],
}

/// The windows of all producers of a shard.
#[derive(Clone, Debug)]
pub struct Producers {
    by_name: HashMap<(PartitionKey, u64), u32>,
    partitions: HashMap<PartitionKey, List>,
    all: List,
    slots: Vec<Slot>,
    free: Vec<u32>,
    forgotten: bool,
    shard_max: usize,
    partition_max: usize,
}

impl Default for Producers {
    fn default() -> Self {
        Self::with_limits(SHARD_PRODUCERS_MAX, PARTITION_PRODUCERS_MAX)
    }
}

impl Producers {
    /// None, with other limits than the broker's.
    ///
    /// # Panics
    /// When a limit is 0.
    #[must_use]
    pub fn with_limits(shard_max: usize, partition_max: usize) -> Self {
        assert!(shard_max > 0 && partition_max > 0, "at least one producer");
        Self {
            by_name: HashMap::new(),
            partitions: HashMap::new(),
            all: List::default(),
            slots: Vec::new(),
            free: Vec::new(),
            forgotten: false,
            shard_max,
            partition_max,
        }
    }

    /// What a batch that arrives in the shard's epoch `now` is. A batch without a producer is always new.
    pub fn check(&self, header: &BatchHeader, now: Epoch) -> Result<Decision, SequenceError> {
        if header.producer_id == 0 {
            return Ok(Decision::New);
        }
        match self.by_name.get(&(header.key, header.producer_id)) {
            Some(&slot) => self.slots[slot as usize].window.check(header, now),
            None if header.base_sequence == 0 => Ok(Decision::New),
            None if self.forgotten => Err(SequenceError::Forgotten),
            None => Err(SequenceError::Gap { expected: 0 }),
        }
    }

    /// A batch of `key` is stored. To be called in the order of offsets.
    pub fn stored(&mut self, key: PartitionKey, batch: &ProducerBatch) {
        let name = (key, batch.producer_id);
        if let Some(&slot) = self.by_name.get(&name) {
            self.slots[slot as usize].window.take(batch);
            self.unlink(slot, SHARD);
            self.unlink(slot, PARTITION);
            self.link(slot);
            return;
        }
        self.insert(key, Window::new(batch));
    }

    /// Puts a new window at the end of both orders, giving up the oldest ones that are too many.
    fn insert(&mut self, key: PartitionKey, window: Window) {
        if let Some(list) = self.partitions.get(&key)
            && list.count >= self.partition_max
        {
            let oldest = list.oldest;
            self.forget(oldest);
        }
        if self.all.count >= self.shard_max {
            self.forget(self.all.oldest);
        }
        let slot = Slot { key, window, links: [Link { before: NONE, behind: NONE }; 2] };
        let name = (key, window.producer_id());
        let index = if let Some(index) = self.free.pop() {
            self.slots[index as usize] = slot;
            index
        } else {
            self.slots.push(slot);
            u32::try_from(self.slots.len() - 1).expect("the limit on producers is far below")
        };
        self.by_name.insert(name, index);
        self.link(index);
    }

    fn forget(&mut self, slot: u32) {
        self.remove(slot);
        self.forgotten = true;
    }

    fn remove(&mut self, slot: u32) {
        self.unlink(slot, SHARD);
        self.unlink(slot, PARTITION);
        let removed = &self.slots[slot as usize];
        let (key, name) = (removed.key, (removed.key, removed.window.producer_id()));
        self.by_name.remove(&name);
        if self.partitions.get(&key).is_some_and(|list| list.count == 0) {
            self.partitions.remove(&key);
        }
        self.free.push(slot);
    }

    fn list(&mut self, order: usize, key: PartitionKey) -> &mut List {
        if order == SHARD { &mut self.all } else { self.partitions.entry(key).or_default() }
    }

    fn link(&mut self, slot: u32) {
        let key = self.slots[slot as usize].key;
        for order in [SHARD, PARTITION] {
            let list = self.list(order, key);
            let before = std::mem::replace(&mut list.newest, slot);
            list.count += 1;
            if before == NONE {
                list.oldest = slot;
            } else {
                self.slots[before as usize].links[order].behind = slot;
            }
            self.slots[slot as usize].links[order] = Link { before, behind: NONE };
        }
    }

    fn unlink(&mut self, slot: u32, order: usize) {
        let Slot { key, links, .. } = self.slots[slot as usize];
        let Link { before, behind } = links[order];
        let list = self.list(order, key);
        list.count -= 1;
        if before == NONE {
            list.oldest = behind;
        }
        if behind == NONE {
            list.newest = before;
        }
        if before != NONE {
            self.slots[before as usize].links[order].behind = behind;
        }
        if behind != NONE {
            self.slots[behind as usize].links[order].before = before;
        }
    }

    /// Drops the windows of a topic.
    pub fn remove_topic(&mut self, topic: TopicId) {
        self.retain(|key| key.topic != topic);
    }

    /// Drops the windows of the partitions for which `keep` is false: they are gone, so nothing is forgotten by it.
    pub fn retain(&mut self, keep: impl Fn(PartitionKey) -> bool) {
        if self.partitions.keys().all(|key| keep(*key)) {
            return;
        }
        let gone: Vec<u32> = self.oldest_first().filter(|slot| !keep(self.slots[*slot as usize].key)).collect();
        gone.into_iter().for_each(|slot| self.remove(slot));
    }

    fn oldest_first(&self) -> impl Iterator<Item = u32> + '_ {
        let first = (self.all.oldest != NONE).then_some(self.all.oldest);
        std::iter::successors(first, |slot| {
            let behind = self.slots[*slot as usize].links[SHARD].behind;
            (behind != NONE).then_some(behind)
        })
    }

    /// All windows, the one that was appended to longest ago first.
    pub fn windows(&self) -> impl Iterator<Item = (PartitionKey, &Window)> {
        self.oldest_first().map(|slot| (self.slots[slot as usize].key, &self.slots[slot as usize].window))
    }

    /// How many windows there are.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.all.count
    }

    /// Whether a producer that is not known may yet have stored something.
    #[must_use]
    pub const fn has_forgotten(&self) -> bool {
        self.forgotten
    }

    /// Something that was stored may be missing here.
    pub fn set_forgotten(&mut self) {
        self.forgotten = true;
    }
}

impl PartialEq for Producers {
    /// The same windows in the same order.
    fn eq(&self, other: &Self) -> bool {
        self.forgotten == other.forgotten && self.count() == other.count() && self.windows().eq(other.windows())
    }
}
