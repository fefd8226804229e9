//! The clock and timers of one shard, moved on by the tick task.
//!
//! Times are read once per tick (about 1 ms while the shard works, 10 ms when idle) and cached, so that the data path
//! asks no clock. Timers are as exact as the tick. glommio's own timers are not used: they cost a system call each and
//! get stuck with the executor.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::ticker::Pulse;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Clock>>> = const { RefCell::new(None) };
}

/// Due time and a number that tells timers of the same time apart.
type TimerKey = (Duration, u64);

/// The clock of one shard. Lives on the shard's thread.
#[derive(Debug)]
pub struct Clock {
    pulse: Arc<Pulse>,
    started: Instant,
    monotonic: Cell<Duration>,
    wall_ms: Cell<i64>,
    timers: RefCell<BTreeMap<TimerKey, Waker>>,
    timers_made: Cell<u64>,
    stopped: Cell<bool>,
}

impl Clock {
    /// The clock of this thread's shard.
    ///
    /// # Panics
    /// On a thread that is no shard's.
    #[must_use]
    pub fn current() -> Rc<Self> {
        CURRENT.with(|current| current.borrow().clone()).expect("Clock::current is called on shard threads only")
    }

    /// Wall time of the last tick, milliseconds since the Unix epoch. May step back when the host's clock does.
    #[must_use]
    pub fn now_ms(&self) -> i64 {
        self.wall_ms.get()
    }

    /// Time of the last tick since the shard's start; never steps back.
    #[must_use]
    pub fn monotonic(&self) -> Duration {
        self.monotonic.get()
    }

    /// Time since the shard's start, read now: for measuring what is shorter than a tick.
    #[must_use]
    pub fn exact(&self) -> Duration {
        self.started.elapsed()
    }

    /// The shard's heartbeat, for metrics.
    #[must_use]
    pub fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.pulse)
    }

    /// Timers that wait.
    #[must_use]
    pub fn timers(&self) -> usize {
        self.timers.borrow().len()
    }

    /// Is over after `duration`, at the next tick.
    pub fn sleep(self: &Rc<Self>, duration: Duration) -> Sleep {
        self.sleep_until(self.exact() + duration)
    }

    /// Is over at the first tick when `monotonic` has reached `due`.
    pub fn sleep_until(self: &Rc<Self>, due: Duration) -> Sleep {
        Sleep { clock: Rc::clone(self), due, number: None }
    }

    /// Runs `future` until it is done or `duration` is over; then it is dropped and the answer is `None`. Not for
    /// futures that must not be dropped half-way.
    pub async fn timeout<T>(self: &Rc<Self>, duration: Duration, future: impl Future<Output = T>) -> Option<T> {
        let sleep = self.sleep(duration);
        futures_lite::future::or(async { Some(future.await) }, async {
            sleep.await;
            None
        })
        .await
    }

    pub(crate) fn install(pulse: Arc<Pulse>) -> Rc<Self> {
        let clock = Rc::new(Self {
            pulse,
            started: Instant::now(),
            monotonic: Cell::new(Duration::ZERO),
            wall_ms: Cell::new(wall_ms()),
            timers: RefCell::default(),
            timers_made: Cell::new(0),
            stopped: Cell::new(false),
        });
        CURRENT.with(|current| current.replace(Some(Rc::clone(&clock))));
        clock
    }

    /// Takes the clock away from this thread; its tick task ends at its next poll.
    pub(crate) fn uninstall(&self) {
        CURRENT.with(|current| current.take());
        self.stopped.set(true);
        // The waker is dropped here, on its own thread, which glommio's tasks want.
        if let Some(waker) = self.pulse.set_waker(None) {
            waker.wake_by_ref();
        }
    }

    /// The task that answers the ticks.
    pub(crate) fn ticks(self: &Rc<Self>) -> Ticks {
        Ticks { clock: Rc::clone(self), registered: false }
    }

    fn advance(&self) {
        self.monotonic.set(self.started.elapsed());
        self.wall_ms.set(wall_ms());
        let now = self.monotonic.get();
        loop {
            // Not woken under the borrow: what a waker wakes or drops may have timers of its own.
            let waker = {
                let mut timers = self.timers.borrow_mut();
                match timers.first_entry() {
                    Some(first) if first.key().0 <= now => first.remove(),
                    _ => break,
                }
            };
            waker.wake();
        }
    }
}

/// Says that this thread's shard has work, so that it is ticked often. Does nothing on other threads.
pub fn mark_busy() {
    CURRENT.with(|current| {
        if let Some(clock) = current.borrow().as_ref() {
            clock.pulse.mark_busy();
        }
    });
}

/// `Clock::sleep` of this thread's shard.
///
/// # Panics
/// On a thread that is no shard's.
pub fn sleep(duration: Duration) -> Sleep {
    Clock::current().sleep(duration)
}

fn wall_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// Waits for a time; see [`Clock::sleep`]. Dropping it takes the timer away.
#[derive(Debug)]
#[must_use = "a sleep does nothing unless awaited"]
pub struct Sleep {
    clock: Rc<Clock>,
    due: Duration,
    /// The number of the timer, once it is set.
    number: Option<u64>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.clock.monotonic() >= self.due {
            return Poll::Ready(());
        }
        let number = match self.number {
            Some(number) => number,
            None => {
                let number = self.clock.timers_made.get();
                self.clock.timers_made.set(number + 1);
                self.number = Some(number);
                number
            }
        };
        let replaced = self.clock.timers.borrow_mut().insert((self.due, number), cx.waker().clone());
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let removed = self.clock.timers.borrow_mut().remove(&(self.due, number));
            drop(removed);
        }
    }
}

/// See [`Clock::ticks`].
pub(crate) struct Ticks {
    clock: Rc<Clock>,
    registered: bool,
}

impl Future for Ticks {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.clock.stopped.get() {
            return Poll::Ready(());
        }
        if !self.registered {
            self.registered = true;
            self.clock.pulse.set_waker(Some(cx.waker().clone()));
        }
        self.clock.pulse.answer();
        self.clock.advance();
        Poll::Pending
    }
}
