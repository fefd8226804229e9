//! Retention: which runs of a topic may go, by age and by bytes, and which segments have nothing left.
//!
//! Owns counts: live bytes of each topic and of each segment, and when a topic is to be looked at next. A run is live
//! while its topic is there and its end lies past the log start of its partition. Does not own the runs themselves: those
//! of one topic in one segment are handed in when they are judged, since most of the index is on disk. Lives on one shard.
//!
//! Runs go in the order in which they were written, the oldest of the topic first. A run is as old as its newest batch by
//! the broker's clock when it was written; producers' times do not count. It counts as no newer than any run behind it, so
//! that a clock that was ahead for a while does not hold it back.

mod clock;
mod punch;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use crate::ids::{Offset, PartitionKey, SegmentSequence, TopicId};
use crate::index::IndexEntry;
use crate::offsets::Ends;
use crate::topic::TopicSettings;

pub use clock::{ClockVerdict, RetentionClock};
pub use punch::dead_ranges;

/// A topic is looked at again for its age not sooner than a 64th of its bound by age, within these: a footer page is read
/// for it each time.
const LOOK_MS: (u64, u64) = (1_000, 60_000);

/// What a topic may keep on one shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Runs older than this may go.
    pub age_ms: Option<u64>,
    /// When the topic has more live bytes here, the oldest go.
    pub bytes: Option<u64>,
}

impl Bounds {
    /// The bounds of a topic with `here` of its `partitions` on the shard.
    #[must_use]
    pub fn of(settings: &TopicSettings, here: usize, partitions: usize) -> Self {
        Self { age_ms: settings.retention_ms, bytes: settings.retention_bytes_of(here, partitions) }
    }

    /// Whether everything stays for ever.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        self.age_ms.is_none() && self.bytes.is_none()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct TopicCount {
    live: u64,
    /// No segment below has anything live of it.
    first: SegmentSequence,
    /// Wall time before which no run is too old; none = not known.
    due_ms: Option<i64>,
}

/// What is counted of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentCount {
    /// Stored bytes of its live runs.
    pub live: u64,
    /// Stored bytes of all its runs.
    pub total: u64,
    /// Append time of its oldest run.
    oldest_ms: i64,
}

impl Default for SegmentCount {
    fn default() -> Self {
        Self { live: 0, total: 0, oldest_ms: i64::MAX }
    }
}

/// What a look at the runs of a topic in one segment gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// New log starts.
    pub raise: BTreeMap<PartitionKey, Offset>,
    /// Stored bytes of the runs before them.
    pub bytes: u64,
    /// Some run stays: the segments behind need no look.
    pub done: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Retention {
    topics: HashMap<TopicId, TopicCount>,
    segments: BTreeMap<SegmentSequence, SegmentCount>,
}

impl Retention {
    /// A segment is there; its runs are counted as they come.
    pub fn begin_segment(&mut self, segment: SegmentSequence) {
        self.segments.entry(segment).or_default();
    }

    /// Counts a run of a segment, live or not.
    pub fn count(&mut self, segment: SegmentSequence, run: &IndexEntry, is_live: bool) {
        let bytes = u64::from(run.stored_bytes);
        let count = self.segments.entry(segment).or_default();
        count.total += bytes;
        count.oldest_ms = count.oldest_ms.min(run.max_append_time_ms);
        if !is_live {
            return;
        }
        count.live += bytes;
        let fresh = TopicCount { first: segment, ..TopicCount::default() };
        let topic = self.topics.entry(run.key.topic).or_insert(fresh);
        topic.live += bytes;
        topic.first = topic.first.min(segment);
        if topic.due_ms == Some(i64::MAX) {
            topic.due_ms = None;
        }
    }

    /// A live run is live no more.
    pub fn drop_run(&mut self, segment: SegmentSequence, run: &IndexEntry) {
        let bytes = u64::from(run.stored_bytes);
        if let Some(count) = self.segments.get_mut(&segment) {
            count.live = count.live.saturating_sub(bytes);
        }
        if let Some(topic) = self.topics.get_mut(&run.key.topic) {
            topic.live = topic.live.saturating_sub(bytes);
        }
    }

    /// The settings of a topic have changed.
    pub fn reconsider(&mut self, topic: TopicId) {
        if let Some(count) = self.topics.get_mut(&topic) {
            count.due_ms = None;
        }
    }

    /// A topic is gone, and its runs have been dropped one by one.
    pub fn forget_topic(&mut self, topic: TopicId) {
        self.topics.remove(&topic);
    }

    /// A segment's file is gone.
    pub fn forget_segment(&mut self, segment: SegmentSequence) {
        self.segments.remove(&segment);
    }

    /// The live bytes of a segment as they were counted anew.
    pub fn recount(&mut self, segment: SegmentSequence, live: u64) {
        if let Some(count) = self.segments.get_mut(&segment) {
            count.live = live;
        }
    }

    /// Live bytes of all segments.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.segments.values().map(|count| count.live).sum()
    }

    /// Live bytes of a topic.
    #[must_use]
    pub fn topic_bytes(&self, topic: TopicId) -> u64 {
        self.topics.get(&topic).map_or(0, |count| count.live)
    }

    /// All segments that were counted, oldest first.
    pub fn segments(&self) -> impl Iterator<Item = (SegmentSequence, SegmentCount)> + '_ {
        self.segments.iter().map(|(segment, count)| (*segment, *count))
    }

    /// Whether a topic has something to give up at `now_ms`, and in which segment to look first. Without a time only
    /// its bytes are looked at.
    #[must_use]
    pub fn due(&self, topic: TopicId, bounds: &Bounds, now_ms: Option<i64>) -> Option<SegmentSequence> {
        let count = self.topics.get(&topic)?;
        let by_bytes = bounds.bytes.is_some_and(|bytes| count.live > bytes);
        let is_time = |now| count.due_ms.is_none_or(|due| now >= due);
        let by_age = bounds.age_ms.is_some() && now_ms.is_some_and(is_time);
        if !by_bytes && !by_age {
            return None;
        }
        self.segments.range(count.first..).next().map(|(segment, _)| *segment)
    }

    /// The segment behind another one.
    #[must_use]
    pub fn segment_after(&self, segment: SegmentSequence) -> Option<SegmentSequence> {
        let behind = SegmentSequence(segment.0.checked_add(1)?);
        self.segments.range(behind..).next().map(|(segment, _)| *segment)
    }

    /// Judges the runs of `topic` in `segment`: drops from the front what is too old or too much, and counts it out. `ends`
    /// gives the ends of a partition that is here. What is not synced stays: a start could not tell it from lost.
    pub fn judge(
        &mut self,
        topic: TopicId,
        segment: SegmentSequence,
        mut runs: Vec<IndexEntry>,
        bounds: &Bounds,
        now_ms: Option<i64>,
        ends: impl Fn(PartitionKey) -> Option<Ends>,
    ) -> Judged {
        let mut judged = Judged::default();
        let is_live = |run: &IndexEntry| ends(run.key).is_some_and(|ends| run.next_offset > ends.log_start());
        runs.retain(|run| run.key.topic == topic && is_live(run));
        runs.sort_unstable_by_key(|run| run.place);
        let times = self.no_newer_than_behind(segment, &runs);
        let slack = bounds.age_ms.unwrap_or(0).div_euclid(64).clamp(LOOK_MS.0, LOOK_MS.1).cast_signed();
        let mut due_ms = Some(i64::MAX);
        for (run, time_ms) in runs.iter().zip(times) {
            let expires_ms = bounds.age_ms.map(|age| time_ms.saturating_add_unsigned(age));
            let too_old = now_ms.zip(expires_ms).is_some_and(|(now, expires)| expires <= now);
            let too_much = bounds.bytes.is_some_and(|bytes| self.topic_bytes(topic) > bytes);
            let synced = ends(run.key).is_some_and(|ends| run.next_offset <= ends.synced_end());
            if !(too_old || too_much) || !synced {
                judged.done = true;
                // Without a bound by age the topic is due by its bytes alone, without a time by nothing known.
                let soonest = now_ms.map(|now| now.saturating_add(slack));
                due_ms = soonest.zip(expires_ms).map(|(soonest, expires)| expires.max(soonest));
                break;
            }
            judged.raise.insert(run.key, run.next_offset);
            judged.bytes += u64::from(run.stored_bytes);
            self.drop_run(segment, run);
        }
        if let Some(count) = self.topics.get_mut(&topic) {
            count.first = segment;
            count.due_ms = due_ms;
        }
        judged
    }

    /// For each run its append time, or that of a run behind it where that is older.
    fn no_newer_than_behind(&self, segment: SegmentSequence, runs: &[IndexEntry]) -> Vec<i64> {
        let behind = SegmentSequence(segment.0.saturating_add(1));
        let mut oldest = self.segments.range(behind..).map(|(_, count)| count.oldest_ms).min().unwrap_or(i64::MAX);
        let mut times: Vec<i64> = Vec::with_capacity(runs.len());
        for run in runs.iter().rev() {
            oldest = oldest.min(run.max_append_time_ms);
            times.push(oldest);
        }
        times.reverse();
        times
    }
}
