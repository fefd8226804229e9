//! Retention in the simulated shard: core's counts and verdicts, and freeing by the log starts of the newest synced
//! checkpoint, step by step.

use std::collections::BTreeSet;

use ringmain_core::ids::{Offset, PartitionKey, SegmentSequence, TopicId};
use ringmain_core::index::IndexEntry;
use ringmain_core::retention::{Bounds, ClockVerdict, Retention, dead_ranges};

use super::Shard;
use super::write::{sync_now, write_now};
use crate::disk::Halt;
use crate::world::World;

/// Runs are stamped when they are written, and clocks may be slewed by so much without a word.
const CLOCK_SLACK_MS: u64 = 60_000;

impl Shard {
    /// Raises log starts until each topic has at most `bytes` live.
    pub fn keep_to_bytes(&mut self, world: &mut World, bytes: u64) {
        self.raise_log_starts(world, &Bounds { age_ms: None, bytes: Some(bytes) }, None);
    }

    /// Raises log starts past what is older than `age_ms`, if the clock can be believed.
    pub fn keep_to_age(&mut self, world: &mut World, age_ms: u64) {
        let may_be_believed = world.wall.may_be_believed();
        match self.clock.look(world.wall.now_ms(), world.wall.passed_ms) {
            ClockVerdict::Steady(now_ms) => {
                assert!(may_be_believed, "a clock that was just set is believed");
                let bounds = Bounds { age_ms: Some(age_ms), bytes: None };
                self.raise_log_starts(world, &bounds, Some(now_ms));
            }
            ClockVerdict::Leapt { .. } => world.meet("clock leapt"),
            ClockVerdict::Paused => world.meet("retention paused"),
        }
    }

    fn raise_log_starts(&mut self, world: &mut World, bounds: &Bounds, now_ms: Option<i64>) {
        let segments: Vec<SegmentSequence> = self.index.segments().collect();
        let mut counts = Retention::default();
        for &segment in &segments {
            counts.begin_segment(segment);
            for run in self.runs_of(world, segment) {
                let live = self.log_start(run.key).is_some_and(|start| run.next_offset > start);
                counts.count(segment, &run, live);
            }
        }
        let topics: BTreeSet<TopicId> = world.created.keys().map(|key| key.topic).collect();
        for topic in topics {
            let mut next = counts.due(topic, bounds, now_ms);
            while let Some(segment) = next {
                let runs = self.runs_of(world, segment);
                let ends = |key| self.store.ends(key).map(|(ends, _)| ends);
                let judged = counts.judge(topic, segment, runs, bounds, now_ms, ends);
                for (key, start) in judged.raise {
                    self.raise(world, bounds, key, start);
                }
                next = if judged.done { None } else { counts.segment_after(segment) };
            }
        }
    }

    fn raise(&mut self, world: &mut World, bounds: &Bounds, key: PartitionKey, start: Offset) {
        assert!(self.store.raise_log_start(key, start), "{key}: {start} is no news");
        world.note(format!("log start {key} {start}"));
        world.ledger.raised(key, start);
        let Some(bound) = bounds.age_ms else { return };
        world.meet("raised by age");
        let age = world.ledger.age_ms(key, start, world.wall.passed_ms).unwrap_or(u64::MAX);
        assert!(
            world.wall.stepped || age + CLOCK_SLACK_MS >= bound,
            "{key}: records go that are {age} ms old, the bound is {bound} ms"
        );
    }

    /// Removes segments that are dead by the log starts of the newest synced checkpoint, and punches the others.
    pub fn free(&mut self, world: &mut World) -> Result<(), Halt> {
        let segments: Vec<SegmentSequence> =
            self.index.segments().filter(|segment| *segment < self.checkpointed).collect();
        for segment in segments {
            let runs = self.runs_of(world, segment);
            let durable = &self.durable_starts;
            let created = world.created.clone();
            let is_live = |run: &IndexEntry| {
                created.contains_key(&run.key) && durable.get(&run.key).is_none_or(|start| run.next_offset > *start)
            };
            if !runs.iter().any(is_live) {
                world.note(format!("free {segment}"));
                self.index.remove(segment);
                world.disk.remove(segment)?;
                world.disk.sync_dir()?;
                world.meet("segment freed");
                continue;
            }
            for range in dead_ranges(runs, is_live, 4096, 4096) {
                world.note(format!("punch {segment} {range:?}"));
                let zeros = vec![0; (range.end - range.start) as usize];
                write_now(&mut world.disk, segment, range.start, &zeros)?;
                world.meet("range punched");
            }
            if world.rng.once_in(2) {
                sync_now(&mut world.disk, segment)?;
            }
        }
        Ok(())
    }

    pub fn log_start(&self, key: PartitionKey) -> Option<Offset> {
        self.store.ends(key).map(|(ends, _)| ends.log_start())
    }
}
