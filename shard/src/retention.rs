//! Retention at work: raises log starts as core decides, waits for the checkpoint that makes them last and for readers, and
//! then gives segments and parts of segments back. Segments of deleted topics go the same way.
//!
//! One task for each shard, [`run`]. A log start that was raised counts at once for fetches; space is freed by the log starts
//! that the newest synced checkpoint has, since only those are sure to be there after a crash. Counts of live bytes say where
//! to look; before a segment goes, all of its index is read and checked.

mod free;
mod runs;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::rc::Rc;
use std::time::Duration;

use ringmain_core::ids::{Offset, PartitionKey, SegmentSequence, ShardId, TopicId};
use ringmain_core::index::{IndexEntry, LogIndex, SegmentIndex};
use ringmain_core::retention::{Bounds, ClockVerdict, Retention, RetentionClock};
use ringmain_core::store::ShardStore;

use self::runs::RunReader;
use crate::index_repair::{self, PageError};
use crate::log_writer::LogWriter;
use crate::routing::{PlacedTopic, Routing};
use crate::runtime::yield_if_needed;
use crate::shard::Shard;
use crate::signal::Signal;

/// How often topics are looked at: the shortest bound by age is as long. Finding nothing to do costs a walk over the topics
/// that have bounds, without IO.
const LOOK: Duration = Duration::from_secs(1);

/// What a shard knows for its retention.
pub(crate) struct RetentionState {
    counts: RefCell<Retention>,
    /// Topics that have bounds.
    bounds: RefCell<BTreeMap<TopicId, Bounds>>,
    /// Topics that were there when the shard started: their runs are counted as live until they are dropped.
    at_start: RefCell<HashSet<TopicId>>,
    /// Deleted topics whose runs are still counted as live.
    deleted: RefCell<Vec<TopicId>>,
    /// Of partitions whose log start was raised since the newest checkpoint was made: the log start it has.
    raised: RefCell<HashMap<PartitionKey, Offset>>,
    /// The same for the checkpoint before it, while it is being written.
    raised_before: RefCell<HashMap<PartitionKey, Offset>>,
    /// Dead bytes of a segment when it was last looked at for ranges to punch.
    punched_at: RefCell<HashMap<SegmentSequence, u64>>,
    /// The same for what could not be punched yet because its log starts did not last: counts once a checkpoint is synced.
    punches_left: RefCell<HashMap<SegmentSequence, u64>>,
    /// When a checkpoint was asked for last, in monotonic time.
    asked: Cell<Option<Duration>>,
    /// The segments that had footers when the shard started: they are counted behind serving, all others as they are
    /// written, even if they have footers by then.
    sealed_at_start: Vec<SegmentSequence>,
    clock: RefCell<RetentionClock>,
    /// Look now: settings have changed, a topic was deleted, a checkpoint is synced, or the shard stops.
    pub(crate) wanted: Signal,
    /// Segments were all counted.
    counted: Cell<bool>,
}

impl RetentionState {
    /// Counts what is in memory of the index.
    pub(crate) fn new(shard: ShardId, log: &LogWriter, store: &ShardStore, routing: &Routing) -> Self {
        let index: &LogIndex = &log.index.borrow();
        let is_sealed = |segment: &SegmentSequence| matches!(index.get(*segment), Some(SegmentIndex::Sealed(_)));
        let state = Self {
            sealed_at_start: index.segments().filter(is_sealed).collect(),
            punches_left: RefCell::default(),
            asked: Cell::new(None),
            counts: RefCell::default(),
            bounds: RefCell::default(),
            at_start: RefCell::new(routing.all().iter().map(|topic| topic.info.id).collect()),
            deleted: RefCell::default(),
            raised: RefCell::default(),
            raised_before: RefCell::default(),
            punched_at: RefCell::default(),
            clock: RefCell::default(),
            wanted: Signal::default(),
            counted: Cell::new(false),
        };
        for topic in routing.all() {
            state.topic_changed(shard, topic);
        }
        for segment in index.segments() {
            if let Some(SegmentIndex::Full(active)) = index.get(segment) {
                state.written(store, segment, active.sorted());
            }
        }
        state
    }

    /// A topic is new or has new settings.
    pub(crate) fn topic_changed(&self, shard: ShardId, topic: &PlacedTopic) {
        let here = topic.partitions_on(shard).count();
        let bounds = Bounds::of(&topic.info.settings, here, topic.info.partition_stores.len());
        let before = if bounds.is_none() || here == 0 {
            self.bounds.borrow_mut().remove(&topic.info.id)
        } else {
            self.bounds.borrow_mut().insert(topic.info.id, bounds)
        };
        if before != Some(bounds) {
            self.counts.borrow_mut().reconsider(topic.info.id);
            self.wanted.raise();
        }
    }

    /// A topic is gone: its runs are dead.
    pub(crate) fn topic_deleted(&self, id: TopicId) {
        self.bounds.borrow_mut().remove(&id);
        self.deleted.borrow_mut().push(id);
        self.wanted.raise();
    }

    /// Runs have been written to a segment.
    pub(crate) fn written(
        &self,
        store: &ShardStore,
        segment: SegmentSequence,
        runs: impl IntoIterator<Item = IndexEntry>,
    ) {
        let mut counts = self.counts.borrow_mut();
        for run in runs {
            let is_live = store.ends(run.key).is_some_and(|(ends, _)| run.next_offset > ends.log_start());
            counts.count(segment, &run, is_live);
        }
    }

    /// A checkpoint is made: it has the log starts of now.
    pub(crate) fn checkpoint_begins(&self) {
        let mut before = self.raised_before.borrow_mut();
        for (key, start) in self.raised.borrow_mut().drain() {
            // One that never came to its end has made nothing last.
            before.entry(key).or_insert(start);
        }
    }

    /// The checkpoint that was made last is synced.
    pub(crate) fn checkpointed(&self) {
        self.raised_before.borrow_mut().clear();
        self.punched_at.borrow_mut().extend(self.punches_left.borrow_mut().drain());
        self.wanted.raise();
    }

    /// The log start of a partition that the newest synced checkpoint has; `now` is the one it has in memory.
    fn durable_start(&self, key: PartitionKey, now: Offset) -> Offset {
        let before = self.raised_before.borrow().get(&key).copied();
        before.or_else(|| self.raised.borrow().get(&key).copied()).unwrap_or(now)
    }

    fn raise(&self, shard: &Shard, key: PartitionKey, start: Offset) {
        let mut store = shard.store.borrow_mut();
        let Some((ends, _)) = store.ends(key) else { return };
        if store.raise_log_start(key, start) {
            self.raised.borrow_mut().entry(key).or_insert(ends.log_start());
        }
    }
}

/// The task; ends when the shard stops.
pub(crate) async fn run(shard: Rc<Shard>) {
    let mut reader = RunReader::default();
    count_sealed(&shard, &mut reader).await;
    while !shard.stopping.get() {
        look(&shard, &mut reader).await;
        reader.close().await;
        let retained = shard.retention.counts.borrow().live_bytes();
        shard.metrics.retained_bytes.set(retained);
        shard.clock.timeout(LOOK, shard.retention.wanted.wait()).await;
    }
    reader.close().await;
}

/// Counts the runs of the segments that were sealed before this life. In the background of serving: what is retained must
/// not make a start longer.
async fn count_sealed(shard: &Rc<Shard>, reader: &mut RunReader) {
    for &segment in &shard.retention.sealed_at_start {
        let (mut counted, mut told) = (None, false);
        while let Err(error) = count_segment(shard, reader, segment, &mut counted).await {
            if !told {
                tracing::warn!(shard = shard.id.0, segment = segment.0, "can't count a segment's runs yet: {error}");
            }
            told = true;
            shard.clock.timeout(LOOK, shard.retention.wanted.wait()).await;
        }
        if shard.stopping.get() {
            return;
        }
    }
    shard.retention.at_start.borrow_mut().clear();
    shard.retention.counted.set(true);
}

/// Counts the runs of a segment behind `counted`, the sort key of the last one that was. May be called again after an error.
async fn count_segment(
    shard: &Rc<Shard>,
    reader: &mut RunReader,
    segment: SegmentSequence,
    counted: &mut Option<(PartitionKey, Offset)>,
) -> Result<(), String> {
    for page in reader.all_pages(shard, segment) {
        if shard.stopping.get() {
            return Ok(());
        }
        match reader.page(shard, segment, page).await {
            Ok(runs) => count_page(shard, segment, &runs, counted),
            Err(PageError::Failed(error)) => return Err(error),
            Err(PageError::Damaged(reason)) => {
                index_repair::rebuild(shard, segment, &reason).await?;
                // Sorted as the pages are.
                let runs = reader.all_runs(shard, segment).await?;
                count_page(shard, segment, &runs, counted);
                return Ok(());
            }
        }
        yield_if_needed().await;
    }
    Ok(())
}

fn count_page(
    shard: &Shard,
    segment: SegmentSequence,
    runs: &[IndexEntry],
    counted: &mut Option<(PartitionKey, Offset)>,
) {
    let store = shard.store.borrow();
    let at_start = shard.retention.at_start.borrow();
    let mut counts = shard.retention.counts.borrow_mut();
    for run in runs.iter().filter(|run| counted.is_none_or(|last| run.sort_key() > last)) {
        // A topic that was deleted meanwhile is dropped with the others when all are counted.
        let is_live = match store.ends(run.key) {
            Some((ends, _)) => run.next_offset > ends.log_start(),
            None => at_start.contains(&run.key.topic),
        };
        counts.count(segment, run, is_live);
    }
    *counted = runs.last().map(IndexEntry::sort_key).max(*counted);
}

async fn look(shard: &Rc<Shard>, reader: &mut RunReader) {
    let segments: Vec<SegmentSequence> = shard.log.index.borrow().segments().collect();
    for segment in segments {
        shard.retention.counts.borrow_mut().begin_segment(segment);
    }
    let now_ms = time(shard);
    let deleted = std::mem::take(&mut *shard.retention.deleted.borrow_mut());
    for topic in deleted {
        drop_topic(shard, reader, topic).await;
    }
    let mut after = None;
    while let Some((topic, bounds)) = next_bounded(shard, after) {
        after = Some(topic);
        keep_to(shard, reader, topic, &bounds, now_ms).await;
        if shard.stopping.get() {
            return;
        }
        yield_if_needed().await;
    }
    free::free(shard, reader).await;
}

/// The time by which runs are too old; none while the clock can't be believed.
fn time(shard: &Shard) -> Option<i64> {
    // A monotonic time in milliseconds fits for 500 million years.
    let monotonic_ms = shard.clock.monotonic().as_millis() as u64;
    let verdict = shard.retention.clock.borrow_mut().look(shard.clock.now_ms(), monotonic_ms);
    let time = match verdict {
        ClockVerdict::Steady(now_ms) => Some(now_ms),
        ClockVerdict::Leapt { by_ms } => {
            tracing::warn!(
                shard = shard.id.0,
                by_ms,
                "the wall clock has leapt: retention by age pauses until the clock is set back or has been steady for an hour"
            );
            None
        }
        ClockVerdict::Paused => None,
    };
    shard.metrics.retention_paused.set(u64::from(time.is_none()));
    time
}

fn next_bounded(shard: &Shard, after: Option<TopicId>) -> Option<(TopicId, Bounds)> {
    use std::ops::Bound::{Excluded, Unbounded};
    let bounds = shard.retention.bounds.borrow();
    let range = (after.map_or(Unbounded, Excluded), Unbounded);
    bounds.range(range).next().map(|(topic, bounds)| (*topic, *bounds))
}

/// Raises the log starts of a topic until it keeps to its bounds.
async fn keep_to(shard: &Rc<Shard>, reader: &mut RunReader, topic: TopicId, bounds: &Bounds, now_ms: Option<i64>) {
    let mut next = shard.retention.counts.borrow().due(topic, bounds, now_ms);
    while let Some(segment) = next {
        let runs = match reader.runs_of(shard, segment, topic).await {
            Ok(runs) => runs,
            Err(error) => {
                // Not past what can't be read now: newer records would go in its place.
                tracing::warn!(shard = shard.id.0, topic = topic.0, "can't look at a topic's runs: {error}");
                return;
            }
        };
        let judged = {
            let store = shard.store.borrow();
            let ends = |key| store.ends(key).map(|(ends, _)| ends);
            shard.retention.counts.borrow_mut().judge(topic, segment, runs, bounds, now_ms, ends)
        };
        for (key, start) in judged.raise {
            shard.retention.raise(shard, key, start);
        }
        shard.metrics.retention_freed_bytes_total.add(judged.bytes);
        next = if judged.done { None } else { shard.retention.counts.borrow().segment_after(segment) };
    }
}

/// Counts out the runs of a deleted topic.
async fn drop_topic(shard: &Rc<Shard>, reader: &mut RunReader, topic: TopicId) {
    let segments: Vec<SegmentSequence> = shard.log.index.borrow().segments().collect();
    for segment in segments {
        match reader.runs_of(shard, segment, topic).await {
            Ok(runs) => {
                let mut counts = shard.retention.counts.borrow_mut();
                runs.iter().for_each(|run| counts.drop_run(segment, run));
            }
            Err(error) => {
                tracing::warn!(shard = shard.id.0, segment = segment.0, "can't count out a deleted topic: {error}");
            }
        }
    }
    shard.retention.counts.borrow_mut().forget_topic(topic);
}
