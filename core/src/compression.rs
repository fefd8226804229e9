//! Which runs of an extent are compressed, and how hard: the decision, from what was seen. Bytes, rates and times come in.
//!
//! Compressing is done by a helper that gets the CPU that nobody else wants. What it got is in the time its jobs took. So
//! for each level three numbers say what the shard could sustain with it:
//!
//! - how fast the helper would be: its speed on a CPU of its own, times the part of one that it has been getting;
//! - how fast the device takes what is left: its rate while it works, divided by the ratio of the topics;
//! - the lower of both is the rate of the level.
//!
//! While memory holds out, the level that saves most is taken among those that keep up with what comes in, with some
//! head-room. When none does, or much is dirty already, the level of the highest rate is taken: with a slow device that is
//! a level that saves much, with a busy CPU it is none.
//!
//! A topic that saves nothing is left alone and looked at again after a second, then after two, up to a minute: one pack
//! of 64 KiB each time. Owns what is remembered of topics, CPU and device; one for each shard.

use std::collections::HashMap;
use std::time::Duration;

use crate::codec::Compression;
use crate::compressor::{LEVELS, Level};
use crate::ids::TopicId;
use crate::limits::{COMPRESSION_TOPICS_MAX, DISK_BLOCK_BYTES};
use crate::packing::Seen;

/// Smaller runs save too little for their header.
const RUN_BYTES_MIN: usize = 512;
/// A topic that keeps more than this part of its bytes is left alone.
const RATIO_MAX: f64 = 0.94;
/// What is assumed of a topic that was never seen: hopeful, since it is found out with the first pack.
const RATIO_UNKNOWN: f64 = 0.4;
/// What a level keeps for each byte that [`Level::Zstd`] keeps, until the level was tried itself.
const RATIO_OF_LEVEL: [f64; LEVELS] = [1.9, 1.6, 1.0];
/// CPU time of each level, nanoseconds for a byte, until it was tried.
const NS_PER_BYTE: [f64; LEVELS] = [2.0, 1.6, 2.3];
/// A level keeps up when it could take so much more than what comes in.
const HEAD_ROOM: f64 = 1.25;
/// Memory of rates.
const RATE_MEMORY: Duration = Duration::from_secs(1);
/// Weight of the newest job in what is remembered.
const NEW_WEIGHT: f64 = 0.3;
/// Least part of a CPU that the helper is thought to get: what it then would take still is a time.
const SHARE_MIN: f64 = 0.02;
/// First and longest time for which a topic that saves nothing is left alone.
const LEFT_ALONE_MIN: Duration = Duration::from_secs(1);
const LEFT_ALONE_MAX: Duration = Duration::from_secs(64);
/// While nothing is compressed for lack of time, a pack is tried so often to see whether there is some again.
const TRY_EVERY: Duration = Duration::from_millis(500);
/// What a job may take: this many times what is expected, within these bounds.
const LATE_AFTER: f64 = 3.0;
const JOB_TIME_MIN: Duration = Duration::from_millis(20);
const JOB_TIME_MAX: Duration = Duration::from_millis(300);
/// What a job may take when the topic's setting asks for a codec.
const ASKED_JOB_TIME: Duration = Duration::from_secs(1);

/// What is done with a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// Stored as it is.
    Leave,
    /// Stored as it is; its front is compressed to see what that would give.
    Sample(Level),
    /// Compressed.
    Compress(Level),
}

/// A run of the extent to be written.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Its topic.
    pub topic: TopicId,
    /// What the topic's operator asks for.
    pub setting: Compression,
    /// Bytes of its batches.
    pub bytes: usize,
}

/// How the shard stands when an extent is put together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// Somebody waits for an ack of this very extent.
    pub is_waited_for: bool,
    /// Bytes appended and not flushed.
    pub dirty_bytes: usize,
    /// What may be dirty at most.
    pub memory_bytes: usize,
    /// A produce waits for memory.
    pub memory_short: bool,
}

/// The decision for one extent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// For each run; empty when all are to be left as they are.
    pub treatments: Vec<Treatment>,
    /// How long the work may take before the extent is written without it.
    pub time: Duration,
    /// A topic's setting asks for a codec: the work is to be done also when the CPU is not idle.
    pub asked: bool,
    /// Runs of topics on `auto` that are left because they would save too little.
    pub skipped: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Topic {
    /// Bytes kept for each byte, by level; none = never tried.
    ratios: [Option<f64>; LEVELS],
    left_alone_for: Duration,
    left_alone_until: Duration,
}

impl Topic {
    fn ratio(&self, level: Level) -> f64 {
        if let Some(ratio) = self.ratios[level as usize] {
            return ratio;
        }
        let zstd = [Level::Zstd, Level::Quick, Level::Lz4]
            .into_iter()
            .find_map(|tried| self.ratios[tried as usize].map(|ratio| ratio / RATIO_OF_LEVEL[tried as usize]));
        (zstd.unwrap_or(RATIO_UNKNOWN) * RATIO_OF_LEVEL[level as usize]).min(1.0)
    }
}

/// A rate that forgets: what came lately counts most.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    bytes: f64,
    ns: f64,
}

impl Rate {
    fn note(&mut self, bytes: u64, took: Duration) {
        let keep = (-took.as_secs_f64() / RATE_MEMORY.as_secs_f64()).exp();
        self.bytes = self.bytes * keep + bytes as f64;
        self.ns = self.ns * keep + took.as_nanos() as f64;
    }

    /// Bytes in a nanosecond; none while nothing is known.
    fn get(&self) -> Option<f64> {
        (self.ns > 0.0).then(|| self.bytes / self.ns)
    }
}

/// What one shard knows about compressing.
#[derive(Debug)]
pub struct CompressionState {
    topics: HashMap<TopicId, Topic>,
    ns_per_byte: [f64; LEVELS],
    /// The part of a CPU that the helper got while it worked.
    share: f64,
    input: Rate,
    input_since: Option<Duration>,
    device: Rate,
    tried_at: Duration,
}

impl Default for CompressionState {
    fn default() -> Self {
        Self {
            topics: HashMap::new(),
            ns_per_byte: NS_PER_BYTE,
            share: 1.0,
            input: Rate::default(),
            input_since: None,
            device: Rate::default(),
            tried_at: Duration::ZERO,
        }
    }
}

impl CompressionState {
    /// The device took `bytes` while it had something to write for so long.
    pub fn note_written(&mut self, bytes: u64, busy: Duration) {
        self.device.note(bytes, busy);
    }

    /// The runs of the next extent were taken from memory at `now`: what is taken is what came in.
    fn note_input(&mut self, bytes: usize, now: Duration) {
        let took = now.saturating_sub(self.input_since.replace(now).unwrap_or(now));
        self.input.note(bytes as u64, took);
    }

    /// Decides for the runs of one extent, to be called once for each at the time (monotonic) it is planned.
    pub fn choose(&mut self, runs: &[Candidate], load: &Load, now: Duration) -> Choice {
        let total: usize = runs.iter().map(|run| run.bytes).sum();
        self.note_input(total, now);
        // Less than a block can't be saved.
        if total <= DISK_BLOCK_BYTES || runs.iter().all(|run| run.setting == Compression::None) {
            return Choice::default();
        }
        let mut choice = Choice { treatments: Vec::with_capacity(runs.len()), ..Choice::default() };
        let mut auto = self.judge_auto(runs, load, now, total);
        for run in runs {
            let big_enough = run.bytes >= RUN_BYTES_MIN;
            let treatment = match run.setting {
                _ if !big_enough => Treatment::Leave,
                Compression::None => Treatment::Leave,
                Compression::Lz4 => Treatment::Compress(Level::Lz4),
                Compression::Zstd => Treatment::Compress(Level::Zstd),
                Compression::Auto if load.is_waited_for => Treatment::Leave,
                Compression::Auto => match self.outlook(run.topic, now) {
                    Outlook::Pays => auto.take(),
                    Outlook::LookAgain => {
                        self.look_again_later(run.topic, now);
                        Treatment::Sample(Level::Zstd)
                    }
                    Outlook::SavesNothing => {
                        choice.skipped += 1;
                        Treatment::Leave
                    }
                },
            };
            choice.asked |= big_enough && matches!(run.setting, Compression::Lz4 | Compression::Zstd);
            choice.treatments.push(treatment);
        }
        if choice.treatments.iter().all(|treatment| *treatment == Treatment::Leave) {
            choice.treatments.clear();
        }
        choice.time = if choice.asked { ASKED_JOB_TIME } else { auto.time };
        choice
    }

    /// The level for all runs of topics that pay.
    fn judge_auto(&mut self, runs: &[Candidate], load: &Load, now: Duration, total: usize) -> AutoLevel {
        let paying = |run: &&Candidate| {
            run.setting == Compression::Auto
                && run.bytes >= RUN_BYTES_MIN
                && self.outlook(run.topic, now) == Outlook::Pays
        };
        let mut bytes = 0.0;
        let mut kept = [0.0; LEVELS];
        for run in runs.iter().filter(paying) {
            let topic = self.topics.get(&run.topic).copied().unwrap_or_default();
            bytes += run.bytes as f64;
            for level in [Level::Quick, Level::Zstd] {
                kept[level as usize] += run.bytes as f64 * topic.ratio(level);
            }
        }
        if bytes < DISK_BLOCK_BYTES as f64 || load.is_waited_for {
            return AutoLevel::leave();
        }
        let total = total as f64;
        let device = self.device.get().unwrap_or(f64::INFINITY);
        let pressed = load.memory_short || load.dirty_bytes > load.memory_bytes / 4;
        let input = self.input.get().unwrap_or(0.0);
        let needs = if pressed { f64::INFINITY } else { input * HEAD_ROOM };
        let work = |level: Level| bytes * self.ns_per_byte[level as usize] / self.share;
        let rate = |level: Level| {
            let stored = total - bytes + kept[level as usize];
            total / work(level).max(stored / device)
        };
        // What saves most comes first.
        let levels = [Level::Zstd, Level::Quick];
        let keeps_up = levels.into_iter().find(|level| rate(*level) >= needs);
        let fastest =
            || levels.into_iter().filter(|level| rate(*level) > device).max_by(|a, b| rate(*a).total_cmp(&rate(*b)));
        let Some(level) = keeps_up.or_else(fastest) else {
            let mut auto = AutoLevel::leave();
            if now >= self.tried_at + TRY_EVERY {
                self.tried_at = now;
                auto.once = Some(Treatment::Sample(Level::Zstd));
            }
            return auto;
        };
        self.tried_at = now;
        let expected = Duration::from_nanos((work(level) * LATE_AFTER) as u64);
        AutoLevel { once: None, rest: Treatment::Compress(level), time: expected.clamp(JOB_TIME_MIN, JOB_TIME_MAX) }
    }

    fn outlook(&self, topic: TopicId, now: Duration) -> Outlook {
        let Some(topic) = self.topics.get(&topic) else { return Outlook::Pays };
        match topic.ratios.iter().flatten().copied().reduce(f64::min) {
            Some(best) if best > RATIO_MAX && now < topic.left_alone_until => Outlook::SavesNothing,
            Some(best) if best > RATIO_MAX => Outlook::LookAgain,
            _ => Outlook::Pays,
        }
    }

    fn look_again_later(&mut self, topic: TopicId, now: Duration) {
        if let Some(topic) = self.topics.get_mut(&topic) {
            topic.left_alone_for = (topic.left_alone_for * 2).clamp(LEFT_ALONE_MIN, LEFT_ALONE_MAX);
            topic.left_alone_until = now + topic.left_alone_for;
        }
    }

    /// What a job of idle time showed: of its topics, and of the CPU. `cpu` is the time the helper worked, `wall` what passed
    /// meanwhile; `bytes` what it compressed at each level.
    pub fn learn(&mut self, seen: &[Seen], bytes: &[usize; LEVELS], cpu: Duration, wall: Duration, now: Duration) {
        self.learn_topics(seen, now);
        let all: usize = bytes.iter().sum();
        if all == 0 || cpu.is_zero() {
            return;
        }
        // A job of more than one level tells nothing of each.
        if let Some(level) = bytes.iter().position(|at_level| *at_level == all) {
            let ns_per_byte = (cpu.as_nanos() as f64 / all as f64).clamp(0.05, 200.0);
            mix(&mut self.ns_per_byte[level], ns_per_byte);
        }
        let share = cpu.as_secs_f64() / wall.max(cpu).as_secs_f64();
        mix(&mut self.share, share.max(SHARE_MIN));
    }

    /// What a job showed of its topics.
    pub fn learn_topics(&mut self, seen: &[Seen], now: Duration) {
        for seen in seen {
            self.learn_topic(seen, now);
        }
    }

    /// A job was not done in its time.
    pub fn was_late(&mut self) {
        self.share = (self.share / 2.0).max(SHARE_MIN);
    }

    fn learn_topic(&mut self, seen: &Seen, now: Duration) {
        if !self.topics.contains_key(&seen.topic) && self.topics.len() >= COMPRESSION_TOPICS_MAX {
            self.topics.clear();
        }
        let topic = self.topics.entry(seen.topic).or_default();
        let ratio = seen.packed_bytes as f64 / seen.raw_bytes.max(1) as f64;
        let known = topic.ratios[seen.level as usize].get_or_insert(ratio);
        mix(known, ratio);
        if ratio > RATIO_MAX {
            // Of more than one kind of records, perhaps; the newest look counts.
            topic.ratios = [Some(ratio); LEVELS];
            if topic.left_alone_until <= now {
                self.look_again_later(seen.topic, now);
            }
        } else if *known > RATIO_MAX {
            *topic = Topic::default();
            topic.ratios[seen.level as usize] = Some(ratio);
        } else {
            topic.left_alone_for = Duration::ZERO;
        }
    }

    /// The topic is gone.
    pub fn forget(&mut self, topic: TopicId) {
        self.topics.remove(&topic);
    }
}

fn mix(known: &mut f64, new: f64) {
    *known += (new - *known) * NEW_WEIGHT;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outlook {
    Pays,
    SavesNothing,
    LookAgain,
}

/// The level of an extent's runs on `auto`; a first one may be treated by itself.
struct AutoLevel {
    once: Option<Treatment>,
    rest: Treatment,
    time: Duration,
}

impl AutoLevel {
    const fn leave() -> Self {
        Self { once: None, rest: Treatment::Leave, time: JOB_TIME_MIN }
    }

    fn take(&mut self) -> Treatment {
        self.once.take().unwrap_or(self.rest)
    }
}

#[cfg(test)]
mod tests;
