//! What goes into the next extent, and what its completion means for the partitions.
//!
//! A flush takes a partition's unplanned batches whole. An ack-driven flush takes only the partitions that have
//! waiters; else one synced producer would shatter everybody's runs.

use std::collections::BTreeSet;
use std::ops::Bound;

use crate::acks::RunMark;
use crate::block::BlockMemory;
use crate::dedup::ProducerBatch;
use crate::extent::ProducerEntry;
use crate::ids::{Epoch, Offset, PartitionKey};
use crate::limits::EXTENT_PRODUCER_BATCHES_MAX;
use crate::store::{ShardStore, Span};

/// One partition's batches in the extent to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedRun {
    /// Which partition.
    pub key: PartitionKey,
    /// Offset of the first record.
    pub base_offset: Offset,
    /// One past the last record.
    pub next_offset: Offset,
    /// Epoch of its batches.
    pub epoch: Epoch,
    /// Bytes of all its batches.
    pub bytes: u32,
    /// Batches in it.
    pub batches: u32,
    /// How many of them have an idempotent producer.
    pub idempotent: u32,
    /// Batches of the partition that are not in the plan were appended at this time (monotonic ms) or later.
    pub rest_since_ms: u64,
    /// Where they lie; all pinned until [`ShardStore::flush_copied`].
    pub spans: Vec<Span>,
}

/// The runs of one extent, sorted by topic and partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlushPlan {
    /// The runs.
    pub runs: Vec<PlannedRun>,
    /// Bytes of all runs.
    pub bytes: usize,
    /// Batches of idempotent producers in all runs.
    pub idempotent: usize,
    /// What the directory says about them; the one who reads the runs puts it here before the extent is placed.
    pub producers: Vec<ProducerEntry>,
}

impl FlushPlan {
    /// What [`crate::acks::Acks`] keeps of the plan.
    #[must_use]
    pub fn marks(&self) -> Vec<RunMark> {
        let mark = |run: &PlannedRun| RunMark {
            key: run.key,
            next_offset: run.next_offset,
            bytes: run.bytes,
            rest_since_ms: run.rest_since_ms,
        };
        self.runs.iter().map(mark).collect()
    }

    /// What is said about idempotent producers, with the partitions.
    fn produced(&self) -> impl Iterator<Item = (PartitionKey, &ProducerBatch)> {
        self.producers.iter().filter_map(|entry| {
            let run = usize::try_from(entry.run).ok().and_then(|run| self.runs.get(run))?;
            Some((run.key, &entry.batch))
        })
    }
}

/// Which partitions a flush takes.
#[derive(Clone, Copy, Debug)]
pub enum FlushScope<'a> {
    /// Everything unplanned, from the partition after the one where the last flush ended.
    All,
    /// Only these (the ones with waiters), in order.
    Only(&'a BTreeSet<PartitionKey>),
}

impl ShardStore {
    /// Plans one extent of at most `bytes_max` bytes of batches (always at least one span, if there is one) and `runs_max` runs.
    /// `after` is where the last plan ended: with it, flushes of everything go round and starve nobody.
    /// Returns nothing when nothing in the scope is unplanned.
    pub fn plan_flush(
        &mut self,
        scope: FlushScope<'_>,
        after: &mut Option<PartitionKey>,
        bytes_max: usize,
        runs_max: usize,
        now_ms: u64,
    ) -> Option<FlushPlan> {
        let keys = match scope {
            FlushScope::All => self.next_dirty(*after, bytes_max, runs_max),
            FlushScope::Only(keys) => {
                keys.iter().copied().filter(|key| self.dirty.contains(key)).take(runs_max).collect()
            }
        };
        let mut plan = FlushPlan::default();
        for key in keys {
            if !self.plan_partition(key, bytes_max, now_ms, &mut plan) {
                break;
            }
            if matches!(scope, FlushScope::All) {
                *after = Some(key);
            }
        }
        if plan.runs.is_empty() {
            return None;
        }
        for run in &plan.runs {
            for span in &run.spans {
                self.blocks.pin(span.block);
            }
        }
        Some(plan)
    }

    /// Dirty partitions in order, starting behind `after` and not wrapping: an extent is sorted.
    fn next_dirty(&self, after: Option<PartitionKey>, bytes_max: usize, runs_max: usize) -> Vec<PartitionKey> {
        let mut keys = Vec::new();
        let mut bytes = 0;
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        for round in [(from, Bound::Unbounded), (Bound::Unbounded, Bound::Unbounded)] {
            for &key in self.dirty.range(round) {
                if bytes >= bytes_max || keys.len() >= runs_max {
                    break;
                }
                bytes += self.find(key).map_or(0, |index| self.partition(index).unplanned_bytes);
                keys.push(key);
            }
            if !keys.is_empty() {
                break;
            }
        }
        keys
    }

    /// Takes the unplanned spans of a partition as far as they fit. Returns false when the extent is full.
    fn plan_partition(&mut self, key: PartitionKey, bytes_max: usize, now_ms: u64, plan: &mut FlushPlan) -> bool {
        let Some(index) = self.find(key) else { return true };
        let partition = self.partition_mut(index);
        let first = partition.spans.len() - partition.unplanned;
        let mut run: Option<PlannedRun> = None;
        for &span in partition.spans.iter().skip(first) {
            let idempotent = plan.idempotent + span.idempotent as usize;
            let full = plan.bytes + span.bytes as usize > bytes_max || idempotent > EXTENT_PRODUCER_BATCHES_MAX;
            if plan.bytes > 0 && full {
                break;
            }
            let epoch = partition.last_epoch;
            let run = run.get_or_insert_with(|| PlannedRun {
                key,
                base_offset: span.base_offset,
                next_offset: span.base_offset,
                epoch,
                bytes: 0,
                batches: 0,
                idempotent: 0,
                rest_since_ms: partition.unplanned_since_ms,
                spans: Vec::new(),
            });
            run.next_offset = span.next_offset;
            run.bytes += span.bytes;
            run.batches += span.batches;
            run.idempotent += span.idempotent;
            run.spans.push(span);
            plan.bytes += span.bytes as usize;
            plan.idempotent = idempotent;
        }
        let Some(mut run) = run else { return false };
        partition.unplanned -= run.spans.len();
        partition.unplanned_bytes -= run.bytes as usize;
        let done = partition.unplanned == 0;
        self.unplanned_bytes -= run.bytes as usize;
        if done {
            run.rest_since_ms = now_ms;
            self.dirty.remove(&key);
        }
        plan.runs.push(run);
        done
    }

    /// The bytes of the plan are copied out: its blocks need not stay for it.
    pub fn flush_copied(&mut self, memory: &impl BlockMemory, plan: &FlushPlan) {
        for span in plan.runs.iter().flat_map(|run| &run.spans) {
            self.blocks.unpin(memory, span.block);
        }
    }

    /// The extent is flushed, and all before it: its blocks are clean as far as it goes.
    pub fn flush_completed(&mut self, memory: &impl BlockMemory, plan: &FlushPlan) {
        for run in &plan.runs {
            for span in &run.spans {
                self.blocks.flushed(memory, span.block, span.bytes as usize);
            }
            if let Some(index) = self.find(run.key) {
                self.partition_mut(index).ends.flushed(run.next_offset);
            }
        }
        for (key, batch) in plan.produced() {
            if self.find(key).is_some() {
                self.flushed_producers.stored(key, batch);
            }
        }
    }

    /// An fdatasync covers what `mark` stands for.
    pub fn synced(&mut self, mark: &RunMark) {
        let Some(index) = self.find(mark.key) else { return };
        let partition = self.partition_mut(index);
        partition.ends.synced(mark.next_offset);
        partition.unsynced_bytes = partition.unsynced_bytes.saturating_sub(u64::from(mark.bytes));
        let all = partition.ends.synced_end() == partition.ends.log_end();
        partition.unsynced_since_ms = if all { None } else { Some(mark.rest_since_ms) };
    }

    /// When the oldest unplanned batch was appended (monotonic ms).
    pub fn oldest_unplanned_ms(&mut self) -> Option<u64> {
        while let Some(&(since_ms, key)) = self.dirty_since.front() {
            let current = self
                .find(key)
                .map(|index| self.partition(index))
                .is_some_and(|partition| partition.unplanned > 0 && partition.unplanned_since_ms == since_ms);
            if current {
                return Some(since_ms);
            }
            self.dirty_since.pop_front();
        }
        None
    }
}
