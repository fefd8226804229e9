//! The tick from outside: one plain thread that wakes a tick task on each shard.
//!
//! glommio 0.9 can park an executor on top of runnable tasks and sleep for ever; a timer inside the executor gets stuck
//! with the rest. Waking from a foreign thread through a cloned `Waker` wakes the executor whatever the state of its
//! tasks is. A shard that worked in the last 100 ms is woken about every millisecond, an idle one every 10 ms (1 ms
//! wakes cost 6 % of a core, 10 ms 1 %).

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::thread;
use std::time::{Duration, Instant};

use tracing::{info, warn};

/// Between two ticks of a shard that works.
const BUSY_TICK: Duration = Duration::from_millis(1);
/// Between two ticks of an idle shard.
const IDLE_TICK: Duration = Duration::from_millis(10);
/// A shard counts as working this long after it last did something.
const BUSY_FOR: Duration = Duration::from_millis(100);
/// An unanswered tick is logged after this long.
const STALL_LOGGED_AFTER: Duration = Duration::from_secs(1);
/// Each unanswered tick holds a reference to the tick task, and glommio counts those in 16 bits: after this many, tick
/// once a second, which leaves hours until the count is full.
const UNANSWERED_QUICK: u32 = 1000;
/// No ticks past this many unanswered ones.
const UNANSWERED_MAX: u32 = 30_000;

/// What one shard and the ticker share. All numbers may be read from any thread.
#[derive(Debug)]
pub struct Pulse {
    shard: u16,
    started: Instant,
    /// The tick task's waker; set by its first poll, taken away on the shard's thread before the executor ends.
    waker: Mutex<Option<Waker>>,
    busy: AtomicBool,
    /// When the oldest unanswered tick was sent, in nanoseconds after `started`; 0 = all are answered.
    sent_ns: AtomicU64,
    unanswered: AtomicU32,
    ticks: AtomicU64,
    stall_max_ns: AtomicU64,
}

impl Pulse {
    fn new(shard: u16) -> Self {
        Self {
            shard,
            started: Instant::now(),
            waker: Mutex::new(None),
            busy: AtomicBool::new(false),
            sent_ns: AtomicU64::new(0),
            unanswered: AtomicU32::new(0),
            ticks: AtomicU64::new(0),
            stall_max_ns: AtomicU64::new(0),
        }
    }

    /// The shard whose pulse this is.
    #[must_use]
    pub fn shard(&self) -> u16 {
        self.shard
    }

    /// Ticks the shard has answered.
    #[must_use]
    pub fn ticks(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// The longest that a tick had to wait for its answer, since the start or the last `take_stall_max`.
    #[must_use]
    pub fn stall_max(&self) -> Duration {
        Duration::from_nanos(self.stall_max_ns.load(Ordering::Relaxed))
    }

    /// Like `stall_max`, and starts again from zero.
    pub fn take_stall_max(&self) -> Duration {
        Duration::from_nanos(self.stall_max_ns.swap(0, Ordering::Relaxed))
    }

    /// How long the shard has owed an answer by now; zero when it owes none.
    #[must_use]
    pub fn stalled_for(&self) -> Duration {
        match self.sent_ns.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            sent => self.started.elapsed().saturating_sub(Duration::from_nanos(sent)),
        }
    }

    /// Says that the shard has work, so that it is ticked often.
    pub(crate) fn mark_busy(&self) {
        self.busy.store(true, Ordering::Relaxed);
    }

    /// The tick task's answer.
    pub(crate) fn answer(&self) {
        let sent = self.sent_ns.swap(0, Ordering::Relaxed);
        self.unanswered.store(0, Ordering::Relaxed);
        if sent != 0 {
            let late = nanos(self.started.elapsed()).saturating_sub(sent);
            self.stall_max_ns.fetch_max(late, Ordering::Relaxed);
            self.ticks.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Gives the ticker the waker to use; must be called on the shard's thread.
    pub(crate) fn set_waker(&self, waker: Option<Waker>) -> Option<Waker> {
        let mut slot = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *slot, waker)
    }

    fn tick(&self, now: Instant) {
        let slot = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waker) = slot.as_ref() else { return };
        // A time of 0 means none: the first nanosecond of a shard's life is not missed.
        let now_ns = nanos(now.saturating_duration_since(self.started)).max(1);
        // Unless an older tick is unanswered, which then is the one to measure.
        let _ = self.sent_ns.compare_exchange(0, now_ns, Ordering::Relaxed, Ordering::Relaxed);
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        waker.wake_by_ref();
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The ticker thread's view of one shard.
struct Ticked {
    pulse: Arc<Pulse>,
    busy_until: Option<Instant>,
    next: Instant,
    stall_logged: bool,
}

impl Ticked {
    /// Ticks the shard if it is due.
    fn run(&mut self, now: Instant) {
        if self.pulse.busy.swap(false, Ordering::Relaxed) {
            self.busy_until = Some(now + BUSY_FOR);
        }
        let busy = self.busy_until.is_some_and(|until| now < until);
        if now >= self.next || (busy && now + BUSY_TICK < self.next) {
            let unanswered = self.pulse.unanswered.load(Ordering::Relaxed);
            if unanswered < UNANSWERED_MAX {
                self.pulse.tick(now);
            }
            self.next = match unanswered {
                0..UNANSWERED_QUICK if busy => now + BUSY_TICK,
                0..UNANSWERED_QUICK => now + IDLE_TICK,
                _ => now + Duration::from_secs(1),
            };
        }
        let stalled = self.pulse.stalled_for();
        if stalled >= STALL_LOGGED_AFTER && !self.stall_logged {
            self.stall_logged = true;
            warn!(shard = self.pulse.shard, stalled_ms = stalled.as_millis() as u64, "shard does not answer its tick");
        } else if stalled.is_zero() && self.stall_logged {
            self.stall_logged = false;
            let longest_ms = self.pulse.stall_max().as_millis() as u64;
            info!(shard = self.pulse.shard, longest_ms, "shard answers its tick again");
        }
    }
}

#[derive(Default)]
struct Shared {
    pulses: Mutex<Vec<Arc<Pulse>>>,
    stop: AtomicBool,
}

/// The ticker thread. Clones share it; it ends when the last one is dropped.
#[derive(Clone)]
pub struct Ticker {
    thread: Arc<TickerThread>,
}

struct TickerThread {
    shared: Arc<Shared>,
    handle: Option<thread::JoinHandle<()>>,
}

impl Ticker {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the thread can't be made.
    pub fn start() -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let seen = Arc::clone(&shared);
        let handle = thread::Builder::new().name("ticker".to_owned()).spawn(move || run(&seen))?;
        Ok(Self { thread: Arc::new(TickerThread { shared, handle: Some(handle) }) })
    }

    /// Takes a shard under the ticker's care; it is ticked once its tick task has set its waker.
    pub(crate) fn register(&self, shard: u16) -> Arc<Pulse> {
        let pulse = Arc::new(Pulse::new(shard));
        self.thread.shared.pulses.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&pulse));
        pulse
    }

    pub(crate) fn unregister(&self, pulse: &Arc<Pulse>) {
        let mut pulses = self.thread.shared.pulses.lock().unwrap_or_else(PoisonError::into_inner);
        pulses.retain(|other| !Arc::ptr_eq(other, pulse));
    }
}

impl Drop for TickerThread {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(handle) = self.handle.take() {
            handle.thread().unpark();
            // It only waits on its own clock and never panics on purpose: nothing to do with an error here.
            let _ = handle.join();
        }
    }
}

fn run(shared: &Shared) {
    let mut ticked: Vec<Ticked> = Vec::new();
    while !shared.stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        {
            let pulses = shared.pulses.lock().unwrap_or_else(PoisonError::into_inner);
            if pulses.len() != ticked.len() || pulses.iter().zip(&ticked).any(|(a, b)| !Arc::ptr_eq(a, &b.pulse)) {
                ticked.retain(|old| pulses.iter().any(|pulse| Arc::ptr_eq(pulse, &old.pulse)));
                for pulse in pulses.iter().skip(ticked.len()) {
                    let pulse = Arc::clone(pulse);
                    ticked.push(Ticked { pulse, busy_until: None, next: now, stall_logged: false });
                }
            }
        }
        for shard in &mut ticked {
            shard.run(now);
        }
        // A shard that begins to work is noticed at the next idle tick at the latest.
        let busy = ticked.iter().any(|shard| shard.busy_until.is_some_and(|until| now < until));
        thread::park_timeout(if busy { BUSY_TICK } else { IDLE_TICK });
    }
}
