//! Who waits for a flush or a sync, and when the wait is over. One place decides it, by log position alone.
//!
//! A produce at level `flushed` or `synced` waits first with its partition, until a flush takes the partition's
//! batches; then with that extent, until the flushed (synced) end of the shard log has passed the extent's end.
//! Ends are prefixes, so an extent that completes early acks nobody before the ones in front of it.

use std::collections::{BTreeMap, VecDeque};

use crate::ids::{Durability, Offset, PartitionKey, Position};

/// Names a wait to the one who registered it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaitToken(pub u64);

/// One partition's part of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunMark {
    /// Which partition.
    pub key: PartitionKey,
    /// One past the last record that the flush took.
    pub next_offset: Offset,
    /// Bytes that the flush took.
    pub bytes: u32,
    /// Every batch of the partition that the flush did not take was appended at this time (monotonic ms) or later.
    pub rest_since_ms: u64,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    token: WaitToken,
    level: Durability,
    /// One past the last record that must reach the level.
    next_offset: Offset,
}

/// The waiters that a flush took along with their batches, until its extent has its place.
#[derive(Debug, Default)]
pub struct Taken(Vec<Waiter>);

impl Taken {
    /// Whether somebody among them waits for a sync.
    #[must_use]
    pub fn wants_sync(&self) -> bool {
        self.0.iter().any(|waiter| waiter.level == Durability::Synced)
    }

    /// Whether nobody was taken along.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What one flush took, until it is synced.
#[derive(Debug)]
struct Batch {
    end: Position,
    runs: Vec<RunMark>,
    waiters: Vec<Waiter>,
}

/// The waits of one shard. Owned by its executor.
#[derive(Debug, Default)]
pub struct Acks {
    /// Not yet taken by a flush.
    pending: BTreeMap<PartitionKey, Vec<Waiter>>,
    /// Written, not yet flushed as a prefix; in log order.
    writing: VecDeque<Batch>,
    /// Flushed, not yet synced; in log order.
    unsynced: VecDeque<Batch>,
    waiting: usize,
    waiting_for_sync: usize,
}

/// What an end of the shard log set free.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// What is flushed (or synced) now, in log order.
    pub ends: Vec<RunMark>,
    /// Waits that are over.
    pub acked: Vec<WaitToken>,
}

impl Acks {
    /// A produce to `key` whose records end at `next_offset` waits for `level`. Its batch was just appended.
    ///
    /// # Panics
    /// When `level` is `memory`: that is reached when the batch is appended.
    pub fn wait(&mut self, key: PartitionKey, next_offset: Offset, level: Durability, token: WaitToken) {
        assert!(level > Durability::Memory, "memory level is acked at once");
        self.pending.entry(key).or_default().push(Waiter { token, level, next_offset });
        self.waiting += 1;
        self.waiting_for_sync += usize::from(level == Durability::Synced);
    }

    /// The same for records that were appended before, and have not reached the level yet: of a batch that was sent again.
    /// They are in a flush that goes on, or in none yet.
    ///
    /// # Panics
    /// When `level` is `memory`.
    pub fn wait_again(&mut self, key: PartitionKey, next_offset: Offset, level: Durability, token: WaitToken) {
        assert!(level > Durability::Memory, "memory level is acked at once");
        let waiter = Waiter { token, level, next_offset };
        self.waiting += 1;
        self.waiting_for_sync += usize::from(level == Durability::Synced);
        let flushed = if level == Durability::Synced {
            self.unsynced.iter_mut()
        } else {
            std::collections::vec_deque::IterMut::default()
        };
        match flushed.chain(&mut self.writing).find(|batch| has(&batch.runs, key, next_offset)) {
            Some(batch) => batch.waiters.push(waiter),
            None => {
                let waiters = self.pending.entry(key).or_default();
                let at = waiters.partition_point(|other| other.next_offset <= next_offset);
                waiters.insert(at, waiter);
            }
        }
    }

    /// Partitions that somebody waits for and no flush has taken, in the order of an extent.
    pub fn pending_keys(&self) -> impl Iterator<Item = PartitionKey> + '_ {
        self.pending.keys().copied()
    }

    /// Whether somebody waits for a flush that is not planned.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Waits that no flush has taken.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending.values().map(Vec::len).sum()
    }

    /// Waits that are not over.
    #[must_use]
    pub const fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether somebody waits for a sync of what is flushed.
    #[must_use]
    pub fn sync_wanted(&self) -> bool {
        self.waiting_for_sync > 0
            && self.unsynced.iter().any(|batch| batch.waiters.iter().any(|waiter| waiter.level == Durability::Synced))
    }

    /// Whether anything is flushed but not synced.
    #[must_use]
    pub fn has_unsynced(&self) -> bool {
        !self.unsynced.is_empty()
    }

    /// Extents flushed but not synced: bounds what a sync has to release.
    #[must_use]
    pub fn unsynced_extents(&self) -> usize {
        self.unsynced.len()
    }

    /// A flush takes the batches of `runs`: those who wait for them go along. To be called before anything else is
    /// appended; what is appended while the extent is being built waits for the next one.
    pub fn take(&mut self, runs: &[RunMark]) -> Taken {
        let mut taken = Vec::new();
        for run in runs {
            let Some(waiters) = self.pending.get_mut(&run.key) else { continue };
            let covered = waiters.partition_point(|waiter| waiter.next_offset <= run.next_offset);
            taken.extend(waiters.drain(..covered));
            if waiters.is_empty() {
                self.pending.remove(&run.key);
            }
        }
        Taken(taken)
    }

    /// The extent with `runs` and their waiters ends at `end`.
    ///
    /// # Panics
    /// When extents are not placed in log order.
    pub fn placed(&mut self, end: Position, runs: Vec<RunMark>, taken: Taken) {
        assert!(self.writing.back().is_none_or(|last| last.end < end), "extents are placed in log order");
        let mut taken = taken;
        // Whoever came again for these records while the extent was put together.
        taken.0.extend(self.take(&runs).0);
        self.writing.push_back(Batch { end, runs, waiters: taken.0 });
    }

    /// The log failed while an extent was put together: those who were taken along for it wait no more, none of them acked.
    pub fn give_up(&mut self, taken: Taken) -> Vec<WaitToken> {
        taken.0.into_iter().map(|waiter| waiter.token).collect()
    }

    /// Whether everybody who waits for a flush wants a sync as well: then the flush may wait for a running sync.
    #[must_use]
    pub fn all_pending_want_sync(&self) -> bool {
        self.pending.values().flatten().all(|waiter| waiter.level == Durability::Synced)
    }

    /// The shard log is flushed up to `flushed`.
    pub fn flushed(&mut self, flushed: Position) -> Released {
        let mut released = Released::default();
        while self.writing.front().is_some_and(|batch| batch.end <= flushed) {
            let Some(mut batch) = self.writing.pop_front() else { break };
            released.ends.extend(batch.runs.iter().copied());
            batch.waiters.retain(|waiter| {
                let stays = waiter.level > Durability::Flushed;
                if !stays {
                    released.acked.push(waiter.token);
                }
                stays
            });
            self.unsynced.push_back(batch);
        }
        self.waiting -= released.acked.len();
        released
    }

    /// An fdatasync covers the shard log up to `synced`.
    pub fn synced(&mut self, synced: Position) -> Released {
        let mut released = Released::default();
        while self.unsynced.front().is_some_and(|batch| batch.end <= synced) {
            let Some(batch) = self.unsynced.pop_front() else { break };
            released.ends.extend(batch.runs);
            released.acked.extend(batch.waiters.iter().map(|waiter| waiter.token));
        }
        self.waiting -= released.acked.len();
        self.waiting_for_sync -= released.acked.len();
        released
    }

    /// The shard log failed: all waits end, none of them acked.
    pub fn fail(&mut self) -> Vec<WaitToken> {
        let pending = std::mem::take(&mut self.pending).into_values().flatten();
        let writing = std::mem::take(&mut self.writing).into_iter().flat_map(|batch| batch.waiters);
        let unsynced = std::mem::take(&mut self.unsynced).into_iter().flat_map(|batch| batch.waiters);
        self.waiting = 0;
        self.waiting_for_sync = 0;
        pending.chain(writing).chain(unsynced).map(|waiter| waiter.token).collect()
    }

    /// The topic's partitions are gone: waits for batches that no flush has taken end, none of them acked.
    pub fn remove_topic(&mut self, topic: crate::ids::TopicId) -> Vec<WaitToken> {
        let first = PartitionKey { topic, partition: 0 };
        let last = PartitionKey { topic, partition: u32::MAX };
        let keys: Vec<_> = self.pending.range(first..=last).map(|(&key, _)| key).collect();
        let gone: Vec<_> = keys.iter().filter_map(|key| self.pending.remove(key)).flatten().collect();
        self.waiting -= gone.len();
        self.waiting_for_sync -= gone.iter().filter(|waiter| waiter.level == Durability::Synced).count();
        gone.into_iter().map(|waiter| waiter.token).collect()
    }
}

/// Whether one of the runs has the records of `key` up to `next_offset`. Runs are sorted by partition.
fn has(runs: &[RunMark], key: PartitionKey, next_offset: Offset) -> bool {
    let found = runs.binary_search_by_key(&key, |run| run.key);
    found.is_ok_and(|at| runs[at].next_offset >= next_offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: PartitionKey = PartitionKey::new(1, 0);
    const OTHER: PartitionKey = PartitionKey::new(2, 0);

    fn run(key: PartitionKey, next_offset: u64) -> RunMark {
        RunMark { key, next_offset: Offset(next_offset), bytes: 1, rest_since_ms: 0 }
    }

    fn plan(acks: &mut Acks, end: u64, runs: Vec<RunMark>) {
        let taken = acks.take(&runs);
        acks.placed(Position(end), runs, taken);
    }

    #[test]
    fn a_wait_ends_at_its_own_level_and_not_before() {
        let mut acks = Acks::default();
        acks.wait(KEY, Offset(3), Durability::Flushed, WaitToken(1));
        acks.wait(KEY, Offset(5), Durability::Synced, WaitToken(2));
        plan(&mut acks, 100, vec![run(KEY, 5)]);
        assert_eq!(acks.flushed(Position(99)), Released::default());
        let released = acks.flushed(Position(100));
        assert_eq!(released, Released { ends: vec![run(KEY, 5)], acked: vec![WaitToken(1)] });
        assert!(acks.sync_wanted());
        assert_eq!(acks.synced(Position(100)).acked, vec![WaitToken(2)]);
        assert_eq!(acks.waiting(), 0);
        assert!(!acks.sync_wanted());
    }

    #[test]
    fn a_sync_issued_before_a_flush_does_not_cover_it() {
        let mut acks = Acks::default();
        plan(&mut acks, 10, vec![run(KEY, 1)]);
        acks.flushed(Position(10));
        acks.wait(OTHER, Offset(1), Durability::Synced, WaitToken(7));
        plan(&mut acks, 20, vec![run(OTHER, 1)]);
        acks.flushed(Position(20));
        assert_eq!(acks.synced(Position(10)).acked, vec![]);
        assert_eq!(acks.synced(Position(20)).acked, vec![WaitToken(7)]);
    }

    #[test]
    fn a_wait_registered_while_the_extent_is_built_goes_with_the_next_one() {
        let mut acks = Acks::default();
        let runs = vec![run(KEY, 1)];
        let taken = acks.take(&runs);
        acks.wait(KEY, Offset(2), Durability::Flushed, WaitToken(1));
        acks.placed(Position(10), runs, taken);
        assert_eq!(acks.flushed(Position(10)).acked, vec![]);
        plan(&mut acks, 20, vec![run(KEY, 2)]);
        assert_eq!(acks.flushed(Position(20)).acked, vec![WaitToken(1)]);
    }

    #[test]
    fn a_flush_that_takes_half_a_partition_leaves_the_waiters_of_the_rest() {
        let mut acks = Acks::default();
        acks.wait(KEY, Offset(5), Durability::Flushed, WaitToken(1));
        acks.wait(KEY, Offset(9), Durability::Flushed, WaitToken(2));
        plan(&mut acks, 10, vec![run(KEY, 5)]);
        assert_eq!(acks.flushed(Position(10)).acked, vec![WaitToken(1)]);
        assert!(acks.is_pending());
    }

    #[test]
    fn who_comes_again_waits_with_the_extent_that_has_the_records() {
        let mut acks = Acks::default();
        // Not planned yet; the ones behind it come first.
        acks.wait(KEY, Offset(9), Durability::Flushed, WaitToken(1));
        acks.wait_again(KEY, Offset(5), Durability::Flushed, WaitToken(2));
        let runs = vec![run(KEY, 5)];
        let taken = acks.take(&runs);
        // Being put together.
        acks.wait_again(KEY, Offset(5), Durability::Synced, WaitToken(3));
        acks.placed(Position(10), runs, taken);
        // Being written.
        acks.wait_again(KEY, Offset(3), Durability::Flushed, WaitToken(4));
        acks.wait_again(KEY, Offset(3), Durability::Synced, WaitToken(5));
        assert_eq!(acks.flushed(Position(10)).acked, vec![WaitToken(2), WaitToken(4)]);
        // Flushed.
        acks.wait_again(KEY, Offset(5), Durability::Synced, WaitToken(6));
        plan(&mut acks, 20, vec![run(KEY, 9)]);
        assert_eq!(acks.synced(Position(10)).acked, vec![WaitToken(3), WaitToken(5), WaitToken(6)]);
        assert_eq!(acks.flushed(Position(20)).acked, vec![WaitToken(1)]);
        assert_eq!(acks.waiting(), 0);
        assert!(!acks.sync_wanted());
    }

    #[test]
    fn a_failed_log_ends_all_waits() {
        let mut acks = Acks::default();
        acks.wait(KEY, Offset(1), Durability::Synced, WaitToken(1));
        plan(&mut acks, 10, vec![run(KEY, 1)]);
        acks.wait(OTHER, Offset(1), Durability::Flushed, WaitToken(2));
        let mut ended = acks.fail();
        ended.sort_unstable();
        assert_eq!(ended, vec![WaitToken(1), WaitToken(2)]);
        assert_eq!(acks.waiting(), 0);
    }
}
