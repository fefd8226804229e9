//! Retention in the simulated shard: core's counts and verdicts, and freeing by the log starts of the newest synced
//! checkpoint, step by step.

use ringmain_core::ids::{Offset, PartitionKey, SegmentSequence, TopicId};
use ringmain_core::index::{FOOTER_PAGE_BYTES, IndexEntry, SegmentIndex};
use ringmain_core::recover::SegmentSource;
use ringmain_core::retention::{Bounds, Retention, dead_ranges};

use super::{Shard, World, sync_now, write_now};
use crate::disk::Crashed;

impl Shard {
    /// Raises log starts until each topic has at most `bytes` live.
    pub fn raise_log_starts(&mut self, world: &mut World, bytes: u64) {
        let bounds = Bounds { age_ms: None, bytes: Some(bytes) };
        let segments: Vec<SegmentSequence> = self.index.segments().collect();
        let mut counts = Retention::default();
        for &segment in &segments {
            counts.begin_segment(segment);
            for run in self.runs_of(world, segment).unwrap_or_default() {
                let live = self.log_start(run.key).is_some_and(|start| run.next_offset > start);
                counts.count(segment, &run, live);
            }
        }
        let topics: std::collections::BTreeSet<TopicId> = world.created.keys().map(|key| key.topic).collect();
        for topic in topics {
            let mut next = counts.due(topic, &bounds, None);
            while let Some(segment) = next {
                let runs = self.runs_of(world, segment).unwrap_or_default();
                let ends = |key| self.store.ends(key).map(|(ends, _)| ends);
                let judged = counts.judge(topic, segment, runs, &bounds, None, ends);
                for (key, start) in judged.raise {
                    assert!(self.store.raise_log_start(key, start), "{key}: {start} is no news");
                    world.note(format!("log start {key} {start}"));
                    world.ledger.raised(key, start);
                }
                next = if judged.done { None } else { counts.segment_after(segment) };
            }
        }
    }

    /// A checkpoint between other extents, or at the start of the next segment.
    pub fn checkpoint_now(&mut self, world: &mut World) -> Result<(), Crashed> {
        self.quiesce(world)?;
        let checkpoint = self.checkpoint(false);
        if !self.has_room_for(&checkpoint) {
            return self.roll(world);
        }
        self.write_checkpoint(world, &checkpoint)
    }

    /// Removes segments that are dead by the log starts of the newest synced checkpoint, and punches the others.
    pub fn free(&mut self, world: &mut World) -> Result<(), Crashed> {
        let segments: Vec<SegmentSequence> =
            self.index.segments().filter(|segment| *segment < self.checkpointed).collect();
        for segment in segments {
            let Some(runs) = self.runs_of(world, segment) else { continue };
            let durable = &self.durable_starts;
            let is_live = |run: &IndexEntry| durable.get(&run.key).is_none_or(|start| run.next_offset > *start);
            if !runs.iter().any(is_live) {
                world.note(format!("free {segment}"));
                self.index.remove(segment);
                world.disk.remove(segment)?;
                world.disk.sync_dir()?;
                world.freed += 1;
                continue;
            }
            for range in dead_ranges(runs, is_live, 4096, 4096) {
                world.note(format!("punch {segment} {range:?}"));
                let zeros = vec![0; (range.end - range.start) as usize];
                write_now(&mut world.disk, segment, range.start, &zeros)?;
                world.punched += 1;
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

    /// All runs of a segment; none when damage hides them.
    fn runs_of(&self, world: &mut World, segment: SegmentSequence) -> Option<Vec<IndexEntry>> {
        match self.index.get(segment)? {
            SegmentIndex::Full(active) => Some(active.sorted()),
            SegmentIndex::Sealed(sealed) => {
                let mut runs = Vec::new();
                for page in 0..sealed.pages() {
                    let mut bytes = vec![0; FOOTER_PAGE_BYTES];
                    world.disk.read(segment, sealed.page_place(page), &mut bytes).expect("the disk reads");
                    match sealed.decode_page(page, &bytes) {
                        Ok(entries) => runs.extend(entries),
                        Err(error) => {
                            assert!(world.damaged, "a footer page is not whole: {error}");
                            return None;
                        }
                    }
                }
                Some(runs)
            }
        }
    }
}
