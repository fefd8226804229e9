//! The flusher: decides when an extent is due, puts it together, writes it, and syncs.
//!
//! Runs as one task per shard, so that extents are placed in order; the writes themselves overlap. What is due: what
//! somebody waits for (only the partitions with waiters), and everything once enough is dirty, old enough, memory is
//! short, or the shard stops. While a sync runs, those who wait for a sync gather for the next extent: group commit
//! without a timer.
//!
//! What is flushed because it is due, and not because somebody waits, may be compressed before ([`pack`]). Meanwhile
//! extents that are waited for pass it by.

mod pack;

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use ringmain_core::acks::{RunMark, Taken};
use ringmain_core::codec::Codec;
use ringmain_core::crc::Crc32c;
use ringmain_core::dedup::RunProducers;
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentKind, Layout, RunEntry, encode_directory};
use ringmain_core::flush::{FlushPlan, FlushScope, PlannedRun};
use ringmain_core::ids::{PartitionKey, Position};
use ringmain_core::limits::{DISK_BLOCK_BYTES, EXTENT_BYTES_MAX, EXTENT_PRODUCER_BATCHES_MAX, EXTENTS_IN_FLIGHT_MAX};
use ringmain_core::packing::{PackedRun, Packing};

use self::pack::{Begun, Look, PackedExtent};
use crate::extent_image::ExtentImage;
use crate::log_writer::{Completed, PlacedExtent};
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

/// Reading the headers of batches yields after so many, about 50 us of work.
const HEADER_SLICE_BATCHES: u32 = 512;

const DIRECTORY_BYTES_MAX: usize = RUNS_MAX * 80 + EXTENT_PRODUCER_BATCHES_MAX * 40;
const _: () = assert!(DIRECTORY_BYTES_MAX + DISK_BLOCK_BYTES + EXTENT_HEADER_BYTES <= 512 * 1024);

/// What makes an extent due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Everything,
    Waiters,
}

/// The flusher's task; ends when the shard stops and all is flushed and synced, or when the log fails.
pub(crate) async fn run(shard: Rc<Shard>) {
    let mut after: Option<PartitionKey> = None;
    let mut packed: Option<PackedExtent> = None;
    if let Err(error) = shard.log.reserve_open(&shard).await {
        stop_or_fail(&shard, &error);
    }
    loop {
        if shard.log_failed.get() || shard.log.has_stopped_without_room() {
            if let Some(extent) = packed {
                give_up(&shard, extent.planned.taken);
            }
            return;
        }
        if shard.log.is_checkpoint_wanted() {
            if let Err(error) = shard.log.checkpoint(&shard).await {
                stop_or_fail(&shard, &error);
            }
            continue;
        }
        let step = match packed.take() {
            Some(extent) => match extent.look(&shard) {
                Look::Ready(planned, packing) => Some((planned, packing)),
                Look::Wait(extent) => {
                    packed = Some(extent);
                    None
                }
            },
            None => None,
        };
        let step = match step {
            Some(step) => Some(step),
            None => match next_plan(&shard, &mut after, packed.as_ref()) {
                Some(planned) => match pack::begin(&shard, planned).await {
                    Begun::Packing(extent) => {
                        packed = Some(extent);
                        continue;
                    }
                    Begun::AsItIs(planned) => Some((planned, None)),
                },
                None => None,
            },
        };
        if let Some((planned, packing)) = step {
            let written = write_plan(&shard, planned, packing.as_deref()).await;
            if let Some(packing) = packing {
                shard.packer.put_back(packing);
            }
            if let Err(error) = written {
                stop_or_fail(&shard, &error);
            }
            yield_if_needed().await;
            continue;
        }
        let nothing_left = packed.is_none() && shard.log.is_idle() && shard.store.borrow().unplanned_bytes() == 0;
        if shard.stopping.get() && nothing_left {
            return;
        }
        let look = next_look(&shard);
        let look = packed.as_ref().map_or(look, |extent| look.min(extent.due_in(&shard)));
        shard.clock.timeout(look, shard.flush_wanted.wait()).await;
    }
}

/// What the next extent holds, and who waits for it.
struct Planned {
    plan: FlushPlan,
    taken: Taken,
    ack_driven: bool,
}

/// Without room for what is to be written a stop can't be clean; anything else fails the log.
fn stop_or_fail(shard: &Shard, error: &str) {
    if shard.log.has_stopped_without_room() {
        tracing::error!(shard = shard.id.0, "stops before all is written: {error}");
    } else {
        shard.fail_log(error);
    }
}

/// Those who were taken along for an extent that can't be written.
fn give_up(shard: &Shard, taken: Taken) {
    let tokens = shard.acks.borrow_mut().give_up(taken);
    produce::waits_over(shard, &tokens, false);
    shard.flush_touched();
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

fn what_is_due(shard: &Shard, packing: bool) -> Option<Due> {
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
    let everything = unplanned >= shard.config.flush_bytes
        || shard.memory_short.get()
        || shard.stopping.get()
        || age.is_some_and(|age| age >= shard.config.flush_interval);
    // What is being packed goes first.
    if everything && !packing {
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

/// Plans the next extent and takes those who wait for it along, in one breath. While one is being packed, only what is
/// waited for passes it by, and nothing of its partitions: a partition's runs stay in order.
fn next_plan(shard: &Shard, after: &mut Option<PartitionKey>, packed: Option<&PackedExtent>) -> Option<Planned> {
    let due = what_is_due(shard, packed.is_some())?;
    let now_ms = shard.clock.monotonic().as_millis() as u64;
    let mut acks = shard.acks.borrow_mut();
    let waiting: BTreeSet<PartitionKey>;
    let scope = match due {
        Due::Everything => FlushScope::All,
        Due::Waiters => {
            waiting = acks.pending_keys().filter(|key| !packed.is_some_and(|extent| extent.has(*key))).collect();
            FlushScope::Only(&waiting)
        }
    };
    let plan = shard.store.borrow_mut().plan_flush(scope, after, PLAN_BYTES_MAX, RUNS_MAX, now_ms)?;
    let taken = acks.take(&plan.marks());
    Some(Planned { plan, taken, ack_driven: due == Due::Waiters })
}

/// Puts the extent together, gives it its place in the log and starts its writes. `packing` has what takes the place of
/// some runs.
async fn write_plan(shard: &Rc<Shard>, planned: Planned, packing: Option<&Packing>) -> Result<(), String> {
    let Planned { mut plan, taken, ack_driven } = planned;
    read_producers(shard, &mut plan).await;
    let synced = taken.wants_sync();
    match place_plan(shard, &plan, packing, synced).await {
        Ok((placed, entries)) => {
            shard.acks.borrow_mut().placed(placed.end, plan.marks(), taken);
            shard.log.fill_ahead(shard, &placed, synced);
            shard.packer.device_begins(shard.clock.exact());
            shard.log.will_write(&placed, plan, entries, ack_driven);
            let shard = Rc::clone(shard);
            spawn_local(async move {
                let written = placed.write(&shard).await;
                extent_written(&shard, placed.sequence, written);
            });
            Ok(())
        }
        Err(error) => {
            give_up(shard, taken);
            Err(error)
        }
    }
}

/// Reads from the batches what the directory says about idempotent producers.
async fn read_producers(shard: &Rc<Shard>, plan: &mut FlushPlan) {
    if plan.idempotent == 0 {
        return;
    }
    let mut gathered = RunProducers::default();
    let mut read = 0;
    for (number, run) in (0..).zip(&plan.runs) {
        for span in run.spans.iter().filter(|span| span.idempotent > 0) {
            gathered.batches(number, shard.memory.read(span.block.0, span.at as usize, span.bytes as usize));
            read += span.batches;
            if read >= HEADER_SLICE_BATCHES {
                read = 0;
                yield_if_needed().await;
            }
        }
        gathered.end_run();
    }
    plan.producers = gathered.into_entries();
}

async fn place_plan(
    shard: &Rc<Shard>,
    plan: &FlushPlan,
    packing: Option<&Packing>,
    sync_is_waited_for: bool,
) -> Result<(PlacedExtent, Vec<RunEntry>), String> {
    let raw_sizes: Vec<u32> = plan.runs.iter().map(|run| run.bytes).collect();
    let mut sizes = raw_sizes.clone();
    let mut packed: Vec<Option<PackedRun<'_>>> = vec![None; plan.runs.len()];
    for run in packing.iter().flat_map(|packing| packing.results()) {
        // Smaller than what it stands for.
        sizes[run.index] = run.stored.len() as u32;
        packed[run.index] = Some(run);
    }
    let mut layout = Layout::of_runs(&sizes, plan.producers.len());
    if packed.iter().any(Option::is_some) {
        let as_it_is = Layout::of_runs(&raw_sizes, plan.producers.len());
        // Blocks are what a device writes.
        if layout.extent_bytes == as_it_is.extent_bytes {
            (layout, packed) = (as_it_is, vec![None; plan.runs.len()]);
        }
    }
    if shard.log.is_unreserved() {
        return Err(shard.log.stop_without_room(&"the disk is full"));
    }
    if !shard.log.has_room(layout.extent_bytes, plan.runs.len()) {
        shard.log.roll(shard).await?;
    }
    let mut image = ExtentImage::new(layout.extent_bytes as usize);
    let mut entries = Vec::with_capacity(plan.runs.len());
    let append_time_ms = shard.clock.now_ms();
    let mut copied = 0;
    for ((run, &place), packed) in plan.runs.iter().zip(&layout.run_places).zip(&packed) {
        let entry = entry_of(run, place, append_time_ms);
        if let Some(packed) = packed {
            image.put(place as usize, packed.stored);
            copied += packed.stored.len();
            let stored_bytes = packed.stored.len() as u32;
            entries.push(RunEntry { stored_bytes, codec: packed.codec as u8, crc: packed.crc, ..entry });
            note_packed(shard, run, packed.codec);
            continue;
        }
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
        entries.push(RunEntry { crc: crc.finish(), ..entry });
    }
    shard.store.borrow_mut().flush_copied(&*shard.memory, plan);
    let directory = encode_directory(&entries, &plan.producers);
    image.put(EXTENT_HEADER_BYTES, &directory);
    let first_run = layout.run_places.first().map_or(layout.extent_bytes as usize, |&place| place as usize);
    image.zero(EXTENT_HEADER_BYTES + directory.len(), first_run);
    // A run ends where the padding to the next one begins.
    for (at, entry) in entries.iter().enumerate() {
        let end = (entry.place + entry.stored_bytes) as usize;
        let next = layout.run_places.get(at + 1).map_or(layout.extent_bytes as usize, |&place| place as usize);
        image.zero(end, next);
    }
    note_placed(shard, plan, &entries, image.bytes());
    if sync_is_waited_for {
        shard.log.prepare_syncing_write(layout.extent_bytes).await;
    }
    shard.log.wait_for_fill(shard, layout.extent_bytes).await?;
    let placed = shard.log.place(ExtentKind::Data, &directory, image, entries.len(), sync_is_waited_for)?;
    Ok((placed, entries))
}

fn note_packed(shard: &Shard, run: &PlannedRun, codec: Codec) {
    let counter = if codec == Codec::Lz4 { &shard.metrics.runs_lz4_total } else { &shard.metrics.runs_zstd_total };
    counter.add(1);
    shard.metrics.compressed_run_bytes_total.add(u64::from(run.bytes));
}

fn note_placed(shard: &Shard, plan: &FlushPlan, entries: &[RunEntry], extent_bytes: usize) {
    let stored: u64 = entries.iter().map(|entry| u64::from(entry.stored_bytes)).sum();
    shard.metrics.extents_written_total.add(1);
    shard.metrics.runs_written_total.add(plan.runs.len() as u64);
    shard.metrics.run_bytes_total.add(plan.bytes as u64);
    shard.metrics.run_stored_bytes_total.add(stored);
    shard.metrics.extent_overhead_bytes_total.add(extent_bytes as u64 - stored);
}

/// The entry of a run that is stored as it is, but for its CRC.
fn entry_of(run: &PlannedRun, place: u32, append_time_ms: i64) -> RunEntry {
    RunEntry {
        key: run.key,
        base_offset: run.base_offset,
        next_offset: run.next_offset,
        epoch: run.epoch,
        place,
        stored_bytes: run.bytes,
        raw_bytes: run.bytes,
        crc: 0,
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
    if let Some(completed) = shard.log.completed(sequence) {
        flushed_up_to(shard, completed);
    }
    shard.flush_wanted.raise();
}

fn flushed_up_to(shard: &Rc<Shard>, completed: Completed) {
    let Completed { flushed, synced, done } = completed;
    shard.memory.note_flushed(flushed);
    {
        let mut store = shard.store.borrow_mut();
        for written in &done {
            store.flush_completed(&*shard.memory, &written.plan);
        }
    }
    let bytes = done.iter().map(|written| written.bytes).sum();
    shard.packer.device_wrote(bytes, shard.clock.exact(), shard.log.in_flight() > 0);
    for written in &done {
        let (segment, runs) = shard.log.index_extent(written);
        shard.retention.written(&shard.store.borrow(), segment, runs);
    }
    let released = shard.acks.borrow_mut().flushed(flushed);
    produce::waits_over(shard, &released.acked, true);
    shard.memory_freed.raise();
    shard.flush_touched();
    if let Some(synced) = synced {
        synced_up_to(shard, synced);
    }
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
