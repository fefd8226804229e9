//! Giving space back: whole dead segments, and large dead ranges inside of living ones.

use std::rc::Rc;
use std::time::Duration;

use ringmain_core::ids::SegmentSequence;
use ringmain_core::index::IndexEntry;
use ringmain_core::retention::{SegmentCount, dead_ranges};

use super::runs::RunReader;
use crate::files::LogFile;
use crate::recycle::allocated_bytes;
use crate::runtime::yield_if_needed;
use crate::shard::Shard;

/// Shorter stretches without live runs are left.
const PUNCH_BYTES_MIN: u64 = 1024 * 1024;
/// Shorter pieces of such a stretch are left: each is an extent more in the filesystem's map of the file.
const PUNCH_PIECE_BYTES_MIN: u64 = 64 * 1024;
/// Bytes that one look punches at most, at one look a second: the filesystem frees them on the device that serves reads.
const PUNCH_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// A segment is looked at when an 8th of it is dead, and again for each further one.
const PUNCH_PART: u64 = 8;

/// How much of a segment is live.
enum Life {
    /// Nothing, by log starts that last.
    Dead,
    /// Nothing, once the log starts of now last.
    Dying,
    /// So many bytes.
    Lives(u64),
}

/// A checkpoint only for more to punch is asked for this seldom: one comes with each segment anyway.
const PUNCH_CHECKPOINT: Duration = Duration::from_secs(10);

/// Frees what the newest synced checkpoint allows, and asks for another one when that would allow more.
pub(super) async fn free(shard: &Rc<Shard>, reader: &mut RunReader) {
    if !shard.retention.counted.get() || shard.log_failed.get() {
        return;
    }
    // Older segments are needed for their runs only: that one's checkpoint carries the ends of all partitions.
    let Some(before) = shard.log.checkpointed() else { return };
    let all: Vec<(SegmentSequence, SegmentCount)> = shard.retention.counts.borrow().segments().collect();
    // Where only the oldest of a row of segments has dead runs, all of it is dead soon, and can be written again whole.
    let is_left_behind = |at: usize| all.get(at + 1).is_some_and(|(_, next)| is_partly_dead(next, 0));
    let segments = all.iter().copied().enumerate().filter(|(_, (segment, _))| *segment < before);
    let (mut dying, mut more_to_punch, mut readers_gone) = (false, false, false);
    let mut left = PUNCH_BYTES_MAX;
    for (at, (segment, count)) in segments {
        if shard.stopping.get() {
            return;
        }
        let looks_dead = count.live == 0;
        let punched_at = shard.retention.punched_at.borrow().get(&segment).copied().unwrap_or(0);
        let is_of_use = looks_dead || is_partly_dead(&count, punched_at) && is_left_behind(at);
        if !is_of_use {
            continue;
        }
        let runs = match reader.all_runs(shard, segment).await {
            Ok(runs) => runs,
            Err(error) => {
                tracing::warn!(shard = shard.id.0, segment = segment.0, "can't tell what is live: {error}");
                continue;
            }
        };
        let life = life_of(shard, &runs);
        dying |= matches!(life, Life::Dying);
        if let Life::Lives(bytes) = life {
            shard.retention.counts.borrow_mut().recount(segment, bytes);
        }
        if matches!(life, Life::Dying) || left == 0 && !looks_dead {
            continue;
        }
        if !readers_gone {
            shard.readers.wait_out().await;
            readers_gone = true;
        }
        reader.close().await;
        let freed = match life {
            Life::Dead => free_segment(shard, segment).await,
            Life::Dying => Ok(()),
            Life::Lives(_) => punch(shard, segment, &count, runs, &mut left, &mut more_to_punch).await,
        };
        if let Err(error) = freed {
            tracing::warn!(shard = shard.id.0, segment = segment.0, "can't free space: {error}");
        }
        yield_if_needed().await;
    }
    let (now, asked) = (shard.clock.monotonic(), shard.retention.asked.get());
    let pause = if dying { super::LOOK } else { PUNCH_CHECKPOINT };
    if (dying || more_to_punch) && asked.is_none_or(|asked| now >= asked + pause) {
        shard.retention.asked.set(Some(now));
        shard.log.want_checkpoint(shard);
    }
}

/// Whether a run is live by the log starts of the newest synced checkpoint.
fn is_durably_live(shard: &Shard, run: &IndexEntry) -> bool {
    let ends = shard.store.borrow().ends(run.key);
    ends.is_some_and(|(ends, _)| run.next_offset > shard.retention.durable_start(run.key, ends.log_start()))
}

fn is_live(shard: &Shard, run: &IndexEntry) -> bool {
    shard.store.borrow().ends(run.key).is_some_and(|(ends, _)| run.next_offset > ends.log_start())
}

fn life_of(shard: &Shard, runs: &[IndexEntry]) -> Life {
    let live = runs.iter().filter(|run| is_live(shard, run)).map(|run| u64::from(run.stored_bytes)).sum();
    if live > 0 {
        Life::Lives(live)
    } else if runs.iter().any(|run| is_durably_live(shard, run)) {
        Life::Dying
    } else {
        Life::Dead
    }
}

async fn free_segment(shard: &Rc<Shard>, segment: SegmentSequence) -> Result<(), String> {
    shard.log.index.borrow_mut().remove(segment);
    shard.readers.forget(segment);
    shard.retention.counts.borrow_mut().forget_segment(segment);
    shard.retention.punched_at.borrow_mut().remove(&segment);
    shard.retention.punches_left.borrow_mut().remove(&segment);
    shard
        .log
        .recycle
        .put(&shard.log.path_of(segment), shard.log.segment_bytes())
        .await
        .map_err(|error| error.to_string())?;
    shard.metrics.segments_freed_total.add(1);
    shard.metrics.segments.set(shard.log.index.borrow().segments().count() as u64);
    tracing::info!(shard = shard.id.0, segment = segment.0, "freed a segment that holds nothing any more");
    Ok(())
}

/// Whether enough of the segment has died since `before` bytes of it were dead.
fn is_partly_dead(count: &SegmentCount, before: u64) -> bool {
    let dead = count.total.saturating_sub(count.live);
    dead.saturating_sub(before) >= PUNCH_BYTES_MIN.max(count.total / PUNCH_PART)
}

/// Punches what is dead of a living segment, as far as `left` allows.
async fn punch(
    shard: &Rc<Shard>,
    segment: SegmentSequence,
    count: &SegmentCount,
    runs: Vec<IndexEntry>,
    left: &mut u64,
    more: &mut bool,
) -> Result<(), String> {
    let dying = runs.iter().filter(|run| is_durably_live(shard, run) && !is_live(shard, run));
    let dying: u64 = dying.map(|run| u64::from(run.stored_bytes)).sum();
    let path = shard.log.path_of(segment);
    let ranges = dead_ranges(runs, |run| is_durably_live(shard, run), PUNCH_BYTES_MIN, PUNCH_PIECE_BYTES_MIN);
    let before = allocated_bytes(&path).unwrap_or(0);
    let mut all = true;
    if !ranges.is_empty() {
        let file = LogFile::open(&path).await.map_err(|error| error.to_string())?;
        for range in ranges {
            let bytes = range.end - range.start;
            all &= *left > 0;
            if *left == 0 {
                break;
            }
            *left = left.saturating_sub(bytes);
            file.punch(range.start, bytes).await.map_err(|error| error.to_string())?;
        }
        file.close().await.map_err(|error| error.to_string())?;
    }
    let punched = before.saturating_sub(allocated_bytes(&path).unwrap_or(before));
    shard.metrics.punched_bytes_total.add(punched);
    if all {
        let dead = count.total.saturating_sub(count.live);
        shard.retention.punched_at.borrow_mut().insert(segment, dead);
        if dying > 0 {
            *more = true;
            shard.retention.punches_left.borrow_mut().insert(segment, dead.saturating_sub(dying));
        }
    }
    Ok(())
}
