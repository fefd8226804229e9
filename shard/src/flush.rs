//! The flusher: decides when an extent is due, puts it together, writes it, and syncs.
//!
//! Runs as one task per shard, so that extents are placed in order; the writes themselves overlap. What is due: what
//! somebody waits for (only the partitions with waiters), and everything once enough is dirty, old enough, memory is
//! short, or the shard stops. While a sync runs, those who wait for a sync gather for the next extent: group commit
//! without a timer.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use ringmain_core::acks::{RunMark, Taken};
use ringmain_core::crc::Crc32c;
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentKind, Layout, RunEntry, encode_directory};
use ringmain_core::flush::{FlushPlan, FlushScope, PlannedRun};
use ringmain_core::ids::{PartitionKey, Position};
use ringmain_core::limits::{DISK_BLOCK_BYTES, EXTENT_BYTES_MAX, EXTENTS_IN_FLIGHT_MAX};

use crate::extent_image::ExtentImage;
use crate::log_writer::Written;
use crate::produce;
use crate::runtime::{spawn_local, yield_if_needed};
use crate::shard::Shard;

/// Most runs in one extent: with their directory entries it stays within its limit.
const RUNS_MAX: usize = 4096;
/// Bytes of batches in one extent of many runs.
const PLAN_BYTES_MAX: usize = EXTENT_BYTES_MAX - 512 * 1024;
/// Bytes being written at once: past the depth that reaches the device's limit, more only adds latency.
const IN_FLIGHT_BYTES_MAX: usize = 2 * EXTENT_BYTES_MAX;
/// Copying yields after so many bytes, about 50 us of work.
const COPY_SLICE_BYTES: usize = 256 * 1024;
/// A sync is started when so many flushed extents wait for one.
const UNSYNCED_EXTENTS_MAX: usize = 1024;

const _: () = assert!(RUNS_MAX * 80 + DISK_BLOCK_BYTES + EXTENT_HEADER_BYTES <= 512 * 1024);

/// What makes an extent due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Everything,
    Waiters,
}

/// The flusher's task; ends when the shard stops and all is flushed and synced, or when the log fails.
pub(crate) async fn run(shard: Rc<Shard>) {
    let mut after: Option<PartitionKey> = None;
    if let Err(error) = shard.log.reserve_open(&shard).await {
        shard.fail_log(&error);
    }
    loop {
        if shard.log_failed.get() {
            return;
        }
        if shard.log.is_checkpoint_wanted() {
            if let Err(error) = shard.log.checkpoint(&shard).await {
                shard.fail_log(&error);
                return;
            }
            continue;
        }
        if let Some((plan, taken)) = next_plan(&shard, &mut after) {
            if let Err(error) = write_plan(&shard, plan, taken).await {
                shard.fail_log(&error);
                return;
            }
            yield_if_needed().await;
            continue;
        }
        if shard.stopping.get() && shard.log.is_idle() && shard.store.borrow().unplanned_bytes() == 0 {
            return;
        }
        shard.clock.timeout(next_look(&shard), shard.flush_wanted.wait()).await;
    }
}

/// How long the flusher may sleep if nobody wakes it.
fn next_look(shard: &Shard) -> Duration {
    let oldest = shard.store.borrow_mut().oldest_unplanned_ms();
    let now = shard.clock.monotonic();
    match oldest {
        // It may hold a group back, for a tick at most.
        Some(_) if shard.acks.borrow().is_pending() => Duration::from_millis(1),
        Some(oldest) if !shard.log.is_full(IN_FLIGHT_BYTES_MAX) => {
            let due = Duration::from_millis(oldest) + shard.config.flush_interval;
            due.saturating_sub(now).max(Duration::from_millis(1))
        }
        _ => Duration::from_millis(500),
    }
}

fn what_is_due(shard: &Shard) -> Option<Due> {
    if shard.log.in_flight() >= EXTENTS_IN_FLIGHT_MAX || shard.log.is_full(IN_FLIGHT_BYTES_MAX) {
        return None;
    }
    let (unplanned, oldest) = {
        let mut store = shard.store.borrow_mut();
        (store.unplanned_bytes(), store.oldest_unplanned_ms())
    };
    if unplanned == 0 {
        shard.memory_short.set(false);
        return None;
    }
    let age = oldest.map(|oldest| shard.clock.monotonic().saturating_sub(Duration::from_millis(oldest)));
    if unplanned >= shard.config.flush_bytes
        || shard.memory_short.get()
        || shard.stopping.get()
        || age.is_some_and(|age| age >= shard.config.flush_interval)
    {
        return Some(Due::Everything);
    }
    let acks = shard.acks.borrow();
    // One ack-driven extent at a time: the next group gathers meanwhile.
    let gathers = shard.log.ack_driven_in_flight() > 0 || (shard.log.is_syncing() && acks.all_pending_want_sync());
    if !acks.is_pending() || gathers {
        return None;
    }
    let held =
        acks.all_pending_want_sync() && shard.gather.borrow_mut().holds_back(acks.pending(), shard.clock.exact());
    (!held).then_some(Due::Waiters)
}

/// Plans the next extent and takes those who wait for it along, in one breath.
fn next_plan(shard: &Shard, after: &mut Option<PartitionKey>) -> Option<(FlushPlan, Taken)> {
    let due = what_is_due(shard)?;
    let now_ms = shard.clock.monotonic().as_millis() as u64;
    let mut acks = shard.acks.borrow_mut();
    let waiting: BTreeSet<PartitionKey>;
    let scope = match due {
        Due::Everything => FlushScope::All,
        Due::Waiters => {
            waiting = acks.pending_keys().collect();
            FlushScope::Only(&waiting)
        }
    };
    let plan = shard.store.borrow_mut().plan_flush(scope, after, PLAN_BYTES_MAX, RUNS_MAX, now_ms)?;
    let taken = acks.take(&plan.marks());
    shard.log.note_ack_driven(due == Due::Waiters);
    Some((plan, taken))
}

/// Puts the extent together, gives it its place in the log and starts its writes.
async fn write_plan(shard: &Rc<Shard>, plan: FlushPlan, taken: Taken) -> Result<(), String> {
    let waiters = InHand { shard, taken };
    let sizes: Vec<u32> = plan.runs.iter().map(|run| run.bytes).collect();
    let layout = Layout::of_runs(&sizes);
    if shard.log.is_unreserved() {
        return Err("the disk is full".into());
    }
    if !shard.log.has_room(layout.extent_bytes, plan.runs.len()) {
        shard.log.roll(shard).await?;
    }
    let mut image = ExtentImage::new(layout.extent_bytes as usize);
    let mut entries = Vec::with_capacity(plan.runs.len());
    let append_time_ms = shard.clock.now_ms();
    let mut copied = 0;
    for (run, &place) in plan.runs.iter().zip(&layout.run_places) {
        let mut crc = Crc32c::default();
        let mut at = place as usize;
        for span in &run.spans {
            let bytes = span.bytes as usize;
            let batches = shard.memory.read(span.block.0, span.at as usize, bytes);
            crc.update(batches);
            image.put(at, batches);
            at += bytes;
            copied += bytes;
            if copied >= COPY_SLICE_BYTES {
                copied = 0;
                yield_if_needed().await;
            }
        }
        entries.push(entry_of(run, place, crc.finish(), append_time_ms));
    }
    shard.store.borrow_mut().flush_copied(&*shard.memory, &plan);
    let directory = encode_directory(&entries);
    image.put(EXTENT_HEADER_BYTES, &directory);
    let first_run = layout.run_places.first().map_or(layout.extent_bytes as usize, |&place| place as usize);
    image.zero(EXTENT_HEADER_BYTES + directory.len(), first_run);
    let end = entries.last().map_or(first_run, |last| (last.place + last.stored_bytes) as usize);
    image.zero(end, layout.extent_bytes as usize);

    let marks = plan.marks();
    let sized = image.bytes() as u64;
    let synced = waiters.taken.wants_sync();
    shard.log.wait_for_fill(shard, layout.extent_bytes).await?;
    let placed = shard.log.place(ExtentKind::Data, &directory, image, entries.len())?;
    let taken = waiters.into_taken();
    shard.acks.borrow_mut().placed(placed.end, marks, taken);
    shard.log.fill_ahead(shard, &placed, synced);
    shard.metrics.extents_written_total.add(1);
    shard.metrics.runs_written_total.add(plan.runs.len() as u64);
    shard.metrics.run_bytes_total.add(plan.bytes as u64);
    shard.metrics.extent_overhead_bytes_total.add(sized - plan.bytes as u64);
    shard.log.will_write(&placed, plan, entries);
    let shard = Rc::clone(shard);
    spawn_local(async move {
        let written = placed.write(&shard).await;
        extent_written(&shard, placed.sequence, written);
    });
    Ok(())
}

/// Waiters of the plan in hand. If it comes to nothing they are given back, so that the failing log answers them.
struct InHand<'a> {
    shard: &'a Shard,
    taken: Taken,
}

impl InHand<'_> {
    fn into_taken(mut self) -> Taken {
        std::mem::take(&mut self.taken)
    }
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        self.shard.acks.borrow_mut().give_back(std::mem::take(&mut self.taken));
    }
}

fn entry_of(run: &PlannedRun, place: u32, crc: u32, append_time_ms: i64) -> RunEntry {
    RunEntry {
        key: run.key,
        base_offset: run.base_offset,
        next_offset: run.next_offset,
        epoch: run.epoch,
        place,
        stored_bytes: run.bytes,
        raw_bytes: run.bytes,
        crc,
        batches: run.batches,
        codec: 0,
        max_append_time_ms: append_time_ms,
    }
}

/// A write has ended: what it completes, as a prefix, is flushed now.
fn extent_written(shard: &Rc<Shard>, sequence: ringmain_core::ids::ExtentSequence, result: Result<(), String>) {
    if shard.log_failed.get() {
        return;
    }
    if let Err(error) = result {
        return shard.fail_log(&error);
    }
    if let Some((flushed, done)) = shard.log.completed(sequence) {
        flushed_up_to(shard, flushed, done);
    }
    shard.flush_wanted.raise();
}

fn flushed_up_to(shard: &Rc<Shard>, flushed: Position, done: Vec<Written>) {
    {
        let mut store = shard.store.borrow_mut();
        for written in &done {
            store.flush_completed(&*shard.memory, &written.plan);
        }
    }
    for written in &done {
        let (segment, runs) = shard.log.index_extent(written);
        shard.retention.written(&shard.store.borrow(), segment, runs);
    }
    let released = shard.acks.borrow_mut().flushed(flushed);
    produce::waits_over(shard, &released.acked, true);
    shard.memory_freed.raise();
    shard.flush_touched();
    sync_if_wanted(shard);
}

/// Starts a sync when somebody waits for one, or when one is due.
pub(crate) fn sync_if_wanted(shard: &Rc<Shard>) {
    if shard.log.is_syncing() || shard.log_failed.get() || !sync_is_due(shard) {
        return;
    }
    let shard = Rc::clone(shard);
    shard.log.set_syncing(true);
    spawn_local(async move {
        while !shard.log_failed.get() && sync_is_due(&shard) {
            match shard.log.sync().await {
                Ok(Some(synced)) => synced_up_to(&shard, synced),
                Ok(None) => break,
                Err(error) => shard.fail_log(&error),
            }
        }
        shard.log.set_syncing(false);
        shard.flush_wanted.raise();
    });
}

fn sync_is_due(shard: &Shard) -> bool {
    let acks = shard.acks.borrow();
    acks.sync_wanted()
        || acks.unsynced_extents() >= UNSYNCED_EXTENTS_MAX
        || (acks.has_unsynced() && shard.log.since_sync(&shard.clock) >= shard.config.sync_interval)
}

/// An fdatasync covers the log up to `synced`.
pub(crate) fn synced_up_to(shard: &Rc<Shard>, synced: Position) {
    let released = {
        let mut acks = shard.acks.borrow_mut();
        let released = acks.synced(synced);
        shard.gather.borrow_mut().synced(released.acked.len(), acks.pending(), shard.clock.exact());
        released
    };
    {
        let mut store = shard.store.borrow_mut();
        for mark in &released.ends {
            note_synced(shard, &mut store, mark);
        }
    }
    shard.log.note_synced(&shard.clock);
    shard.metrics.syncs_total.add(1);
    produce::waits_over(shard, &released.acked, true);
    for mark in &released.ends {
        shard.parked.notify(mark.key);
    }
    shard.flush_touched();
    shard.flush_wanted.raise();
}

fn note_synced(shard: &Shard, store: &mut ringmain_core::store::ShardStore, mark: &RunMark) {
    if let Some((ends, _)) = store.ends(mark.key) {
        shard.metrics.synced_records_total.add(mark.next_offset.since(ends.synced_end()));
    }
    store.synced(mark);
}
