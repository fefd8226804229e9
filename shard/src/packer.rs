//! Where runs are compressed: a thread beside each shard that gets the CPU time that no other thread wants, on any CPU.
//! Another one, with the priority of the shard, does what the setting of a topic asks for.
//!
//! So the kernel decides from moment to moment whether there is time: a shard that wakes up takes the CPU from the helper
//! at once, and a busy shard can use a CPU that idles elsewhere. What the helper got is in the time its jobs took, and
//! from that core decides what to give it next. The flusher never waits for long: a job that is late is left behind, and
//! its extent written as it is.
//!
//! There is one job for each shard. Its memory goes to the helper and comes back with it; while it is away, nothing else
//! is compressed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use ringmain_core::compression::CompressionState;
use ringmain_core::compressor::Compressor;
use ringmain_core::ids::ShardId;
use ringmain_core::packing::Packing;

use crate::mailbox::{Mailbox, MailboxSender, mailbox};
use crate::raw::{step_back, thread_cpu_time};
use crate::shard::Shard;

/// Writes that say something about the device's rate.
const DEVICE_RATE_BYTES_MIN: u64 = 64 * 1024;

/// Which helper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Only when nobody else wants a CPU.
    Idle,
    /// As the shard's own.
    Normal,
}

/// A job that the helper has ended.
struct Ended {
    priority: Priority,
    packing: Box<Packing>,
    cpu: Duration,
    wall: Duration,
}

/// The shard's side of its helper.
pub(crate) struct Packer {
    pub(crate) state: RefCell<CompressionState>,
    /// Empty when there are no helpers, for lack of threads.
    helpers: Vec<(Priority, SyncSender<Box<Packing>>)>,
    /// Until [`take_back`] has it: before, nothing is compressed.
    ended: RefCell<Option<Mailbox<Ended>>>,
    /// Tells the helper to end its job after the pack it is at.
    stop_early: Arc<AtomicBool>,
    /// Here while the helper does not have it.
    idle: RefCell<Option<Box<Packing>>>,
    /// What the flusher waits for.
    done: RefCell<Option<Box<Packing>>>,
    awaited: Cell<bool>,
    /// Since when the device has something to write.
    device_busy_since: Cell<Option<Duration>>,
}

impl Packer {
    /// Starts the helper of a shard.
    pub(crate) fn start(shard: ShardId) -> Self {
        let (from_helper, ended) = mailbox(1);
        let stop_early = Arc::new(AtomicBool::new(false));
        let mut helpers = Vec::new();
        for priority in [Priority::Idle, Priority::Normal] {
            let (to_helper, jobs) = sync_channel(1);
            let (from_helper, told) = (from_helper.clone(), Arc::clone(&stop_early));
            let thread = thread::Builder::new().name(format!("packer-{shard}"));
            match thread.spawn(move || run(shard, priority, &jobs, &from_helper, &told)) {
                Ok(_) => helpers.push((priority, to_helper)),
                Err(error) => {
                    tracing::warn!(shard = shard.0, %error, "no thread to compress on: some is stored as it is");
                }
            }
        }
        Self {
            state: RefCell::default(),
            helpers,
            ended: RefCell::new(Some(ended)),
            stop_early,
            idle: RefCell::new(Some(Box::default())),
            done: RefCell::default(),
            awaited: Cell::new(false),
            device_busy_since: Cell::new(None),
        }
    }

    /// The memory for a job, unless one is under way.
    pub(crate) fn take_job(&self) -> Option<Box<Packing>> {
        let is_taken_back = self.ended.borrow().is_none();
        if self.helpers.is_empty() || !is_taken_back {
            return None;
        }
        let mut packing = self.idle.borrow_mut().take()?;
        packing.clear();
        Some(packing)
    }

    /// Hands a job to a helper. If it is `awaited`, its end is told by [`Packer::take_done`] and the flusher's signal.
    pub(crate) fn begin(&self, packing: Box<Packing>, priority: Priority, awaited: bool) {
        self.stop_early.store(false, Ordering::Relaxed);
        self.awaited.set(awaited);
        let helper = self.helpers.iter().find(|(other, _)| *other == priority);
        let Some((_, helper)) = helper else { return self.ended_with(packing) };
        if let Err(error) = helper.try_send(packing) {
            // Its thread is gone, which only a panic does.
            let (std::sync::mpsc::TrySendError::Full(packing) | std::sync::mpsc::TrySendError::Disconnected(packing)) =
                error;
            self.ended_with(packing);
        }
    }

    /// The job that was waited for, once it has ended. It must be put back.
    pub(crate) fn take_done(&self) -> Option<Box<Packing>> {
        self.done.borrow_mut().take()
    }

    pub(crate) fn put_back(&self, packing: Box<Packing>) {
        *self.idle.borrow_mut() = Some(packing);
    }

    /// The helper ends its job soon, with what it has done.
    pub(crate) fn end_soon(&self) {
        self.stop_early.store(true, Ordering::Relaxed);
    }

    /// Nobody waits for the job any more.
    pub(crate) fn abandon(&self) {
        self.end_soon();
        self.awaited.set(false);
    }

    fn ended_with(&self, packing: Box<Packing>) {
        if self.awaited.replace(false) {
            *self.done.borrow_mut() = Some(packing);
        } else {
            self.put_back(packing);
        }
    }

    /// The device got something to write at `now`.
    pub(crate) fn device_begins(&self, now: Duration) {
        if self.device_busy_since.get().is_none() {
            self.device_busy_since.set(Some(now));
        }
    }

    /// The device has written `bytes`, and has more to write or not.
    pub(crate) fn device_wrote(&self, bytes: u64, now: Duration, more: bool) {
        let since = self.device_busy_since.replace(more.then_some(now));
        // Small ones show what a write takes, not what the device can.
        if let Some(since) = since.filter(|_| bytes >= DEVICE_RATE_BYTES_MIN) {
            self.state.borrow_mut().note_written(bytes, now.saturating_sub(since));
        }
    }
}

/// Takes back what the helper has ended, for as long as the shard lives.
pub(crate) async fn take_back(shard: Rc<Shard>) {
    let Some(mut ended) = shard.packer.ended.borrow_mut().take() else { return };
    loop {
        let Ended { priority, packing, cpu, wall } = ended.recv().await;
        shard.metrics.compress_cpu_us_total.add(cpu.as_micros() as u64);
        let now = shard.clock.monotonic();
        {
            let mut state = shard.packer.state.borrow_mut();
            match priority {
                Priority::Idle => state.learn(packing.seen(), packing.compressed_bytes(), cpu, wall, now),
                Priority::Normal => state.learn_topics(packing.seen(), now),
            }
        }
        shard.packer.ended_with(packing);
        shard.flush_wanted.raise();
    }
}

/// The helper: ends when its shard does.
fn run(
    shard: ShardId,
    priority: Priority,
    jobs: &Receiver<Box<Packing>>,
    ended: &MailboxSender<Ended>,
    stop_early: &AtomicBool,
) {
    if let Err(error) = leave_the_shards_cpu().and_then(|()| step_back(priority == Priority::Idle)) {
        tracing::warn!(shard = shard.0, %error, "the thread that compresses competes with the shard for its CPU");
    }
    let mut compressor = Compressor::default();
    while let Ok(mut packing) = jobs.recv() {
        let (cpu, wall) = (thread_cpu_time(), Instant::now());
        while packing.step(&mut compressor) && !stop_early.load(Ordering::Relaxed) {}
        let (cpu, wall) = (thread_cpu_time().saturating_sub(cpu), wall.elapsed());
        if ended.try_send(Ended { priority, packing, cpu, wall }).is_err() {
            return;
        }
    }
}

/// A thread begins on the CPUs of the one that starts it, and a shard has only one: this takes those of the process.
fn leave_the_shards_cpu() -> std::io::Result<()> {
    let cpus = rustix::thread::sched_getaffinity(Some(rustix::process::getpid()))?;
    rustix::thread::sched_setaffinity(None, &cpus)?;
    Ok(())
}
