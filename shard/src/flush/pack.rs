//! An extent on its way through the packer: what of it is compressed, and for how long the flusher waits for that.

use std::rc::Rc;
use std::time::Duration;

use ringmain_core::batch::any_compressed;
use ringmain_core::compression::{Candidate, Load, Treatment};
use ringmain_core::compressor::Level;
use ringmain_core::flush::{FlushPlan, PlannedRun};
use ringmain_core::ids::PartitionKey;
use ringmain_core::limits::PACK_RAW_BYTES;
use ringmain_core::packing::Packing;

use super::{COPY_SLICE_BYTES, Planned};
use crate::packer::Priority;
use crate::runtime::yield_if_needed;
use crate::shard::Shard;

/// What the helper gets to end its job once it was told to: a few packs.
const END_TIME: Duration = Duration::from_millis(5);

/// What became of a plan that might be compressed.
pub(super) enum Begun {
    /// The helper has it.
    Packing(PackedExtent),
    /// It is written at once.
    AsItIs(Planned),
}

/// An extent whose runs are being compressed.
pub(super) struct PackedExtent {
    pub(super) planned: Planned,
    priority: Priority,
    /// When the helper is told to end, and then, when it is waited for no more.
    due: Duration,
    ending: bool,
}

/// Whether an extent can be written.
pub(super) enum Look {
    /// With what was packed, if anything.
    Ready(Planned, Option<Box<Packing>>),
    Wait(PackedExtent),
}

/// Gives the runs that are worth it to the helper.
pub(super) async fn begin(shard: &Rc<Shard>, planned: Planned) -> Begun {
    let candidates: Vec<Candidate> = planned.plan.runs.iter().map(|run| candidate(shard, run)).collect();
    let load = load(shard, &planned);
    let now = shard.clock.monotonic();
    let choice = shard.packer.state.borrow_mut().choose(&candidates, &load, now);
    shard.metrics.compress_skipped_runs_total.add(choice.skipped as u64);
    if choice.treatments.is_empty() {
        return Begun::AsItIs(planned);
    }
    let Some(mut packing) = shard.packer.take_job() else { return Begun::AsItIs(planned) };
    let awaited = fill(shard, &planned.plan, &choice.treatments, &mut packing).await;
    let priority = if choice.asked { Priority::Normal } else { Priority::Idle };
    shard.packer.begin(packing, priority, awaited);
    if !awaited {
        return Begun::AsItIs(planned);
    }
    let due = shard.clock.exact() + choice.time;
    Begun::Packing(PackedExtent { planned, priority, due, ending: false })
}

fn candidate(shard: &Shard, run: &PlannedRun) -> Candidate {
    let routing = shard.routing.borrow();
    // A topic that has gone meanwhile is flushed nevertheless.
    let setting = routing.topic(run.key.topic).map(|topic| topic.info.settings.compression).unwrap_or_default();
    Candidate { topic: run.key.topic, setting, bytes: run.bytes as usize }
}

fn load(shard: &Shard, planned: &Planned) -> Load {
    let store = shard.store.borrow();
    Load {
        is_waited_for: planned.ack_driven || !planned.taken.is_empty(),
        dirty_bytes: store.blocks().bytes_dirty(),
        memory_bytes: store.blocks().bytes_max(),
        memory_short: shard.memory_short.get(),
    }
}

/// Copies what is to be compressed. Returns whether the extent is to wait for it: not for samples.
async fn fill(shard: &Shard, plan: &FlushPlan, treatments: &[Treatment], packing: &mut Packing) -> bool {
    let (mut awaited, mut copied) = (false, 0);
    for (index, (run, treatment)) in plan.runs.iter().zip(treatments).enumerate() {
        let level: Level = match *treatment {
            Treatment::Leave => continue,
            Treatment::Sample(level) => {
                sample(shard, index, run, level, packing);
                continue;
            }
            Treatment::Compress(level) => level,
        };
        awaited = true;
        packing.begin_run(index, run.key, level, false);
        for span in &run.spans {
            let batches = shard.memory.read(span.block.0, span.at as usize, span.bytes as usize);
            let compressed = any_compressed(batches);
            packing.put(batches, span.base_offset..span.next_offset, span.batches, compressed);
            copied += batches.len();
            if copied >= COPY_SLICE_BYTES {
                copied = 0;
                yield_if_needed().await;
            }
        }
    }
    awaited
}

/// The front of a run, for a look at it only.
fn sample(shard: &Shard, index: usize, run: &PlannedRun, level: Level, packing: &mut Packing) {
    packing.begin_run(index, run.key, level, true);
    let mut left = PACK_RAW_BYTES;
    for span in &run.spans {
        let batches = shard.memory.read(span.block.0, span.at as usize, (span.bytes as usize).min(left));
        packing.put(batches, span.base_offset..span.next_offset, span.batches, any_compressed(batches));
        left -= batches.len();
        if left == 0 {
            break;
        }
    }
}

impl PackedExtent {
    /// Whether it has batches of the partition.
    pub(super) fn has(&self, key: PartitionKey) -> bool {
        self.planned.plan.runs.binary_search_by_key(&key, |run| run.key).is_ok()
    }

    /// How long the helper still has, one way or the other.
    pub(super) fn due_in(&self, shard: &Shard) -> Duration {
        self.due.saturating_sub(shard.clock.exact()).max(Duration::from_millis(1))
    }

    /// Takes what is done. Who waits for newer batches of its partitions can't pass it by: then it goes out soon.
    pub(super) fn look(mut self, shard: &Shard) -> Look {
        if let Some(packing) = shard.packer.take_done() {
            return Look::Ready(self.planned, Some(packing));
        }
        let now = shard.clock.exact();
        if !self.ending && (now >= self.due || self.is_waited_for(shard)) {
            self.ending = true;
            self.due = now + END_TIME;
            shard.packer.end_soon();
            shard.metrics.compress_late_total.add(1);
        }
        if now >= self.due {
            shard.packer.abandon();
            if self.priority == Priority::Idle {
                shard.packer.state.borrow_mut().was_late();
            }
            return Look::Ready(self.planned, None);
        }
        Look::Wait(self)
    }

    fn is_waited_for(&self, shard: &Shard) -> bool {
        shard.acks.borrow().pending_keys().any(|key| self.has(key))
    }
}
