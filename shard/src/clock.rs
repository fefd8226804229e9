//! The clock and timers of one shard, moved on by the tick task.
//!
//! Times are read once per tick (about 1 ms while the shard works, 10 ms when idle) and cached, so that the data path
//! asks no clock. Timers are as exact as the tick. glommio's own timers are not used: they cost a system call each and
//! get stuck with the executor.

mod wheel;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use self::wheel::{TimerKey, Wheel};
use crate::ticker::Pulse;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Clock>>> = const { RefCell::new(None) };
}

/// The clock of one shard. Lives on the shard's thread.
#[derive(Debug)]
pub struct Clock {
    pulse: Arc<Pulse>,
    started: Instant,
    monotonic: Cell<Duration>,
    wall_ms: Cell<i64>,
    timers: RefCell<Wheel>,
    /// Empty; kept for its memory.
    fired: RefCell<Vec<Waker>>,
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
        self.timers.borrow().count()
    }

    /// Is over after `duration`, at the next tick.
    pub fn sleep(self: &Rc<Self>, duration: Duration) -> Sleep {
        self.sleep_until(self.exact() + duration)
    }

    /// Is over at the first tick when `monotonic` has reached `due`.
    pub fn sleep_until(self: &Rc<Self>, due: Duration) -> Sleep {
        Sleep { clock: Rc::clone(self), due, timer: None }
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
            timers: RefCell::new(Wheel::new()),
            fired: RefCell::default(),
            stopped: Cell::new(false),
        });
        CURRENT.with(|current| current.replace(Some(Rc::clone(&clock))));
        clock
    }

    /// Takes the clock away from this thread, and its waker from the ticker: no more ticks come.
    pub(crate) fn uninstall(&self) {
        CURRENT.with(|current| current.take());
        self.stopped.set(true);
        // Dropped here, on its own thread, as glommio's tasks want.
        drop(self.pulse.set_waker(None));
    }

    /// The task that answers the ticks.
    pub(crate) fn ticks(self: &Rc<Self>) -> Ticks {
        Ticks { clock: Rc::clone(self), registered: false }
    }

    fn advance(&self) {
        self.monotonic.set(self.started.elapsed());
        self.wall_ms.set(wall_ms());
        let mut fired = self.fired.take();
        self.timers.borrow_mut().advance(whole_ms(self.monotonic.get()), &mut fired);
        // Not woken under the borrow: what a waker wakes or drops may have timers of its own.
        fired.drain(..).for_each(Waker::wake);
        self.fired.replace(fired);
    }
}

/// Whole milliseconds that have passed.
fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
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
    /// Once it is set.
    timer: Option<TimerKey>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.clock.monotonic() >= self.due {
            return Poll::Ready(());
        }
        let mut timers = self.clock.timers.borrow_mut();
        let set = self.timer.and_then(|key| timers.waker_mut(key));
        let replaced = match set {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            Some(waker) => Some(std::mem::replace(waker, cx.waker().clone())),
            None => {
                // Rounded up: a timer that fires is due.
                let due_ms = whole_ms(self.due + Duration::from_nanos(999_999));
                let key = timers.insert(due_ms, cx.waker().clone());
                drop(timers);
                self.timer = Some(key);
                return Poll::Pending;
            }
        };
        // The old waker goes after the borrow, since dropping one may drop a task with timers of its own.
        drop(timers);
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.timer {
            let removed = self.clock.timers.borrow_mut().remove(key);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::spawn_joined;
    use crate::test_support::on_shard;

    #[test]
    fn sleeps_are_over_in_order_and_never_early() {
        on_shard(|_| async {
            let clock = Clock::current();
            let order = Rc::new(RefCell::new(Vec::new()));
            let tasks: Vec<_> = [40, 5, 20, 1, 10]
                .map(|ms| {
                    let (clock, order) = (Rc::clone(&clock), Rc::clone(&order));
                    spawn_joined(async move {
                        let begun = Instant::now();
                        clock.sleep(Duration::from_millis(ms)).await;
                        assert!(begun.elapsed() >= Duration::from_millis(ms));
                        order.borrow_mut().push(ms);
                    })
                })
                .into();
            for task in tasks {
                task.await;
            }
            // Timers of one tick may end in any order: these are further apart than a busy tick, not than an idle one.
            let order = order.borrow();
            assert_eq!(order.last(), Some(&40));
            assert_eq!(clock.timers(), 0);
        });
    }

    #[test]
    fn a_dropped_sleep_takes_its_timer_away() {
        on_shard(|_| async {
            let clock = Clock::current();
            let done = clock.timeout(Duration::from_secs(3600), async { 1 }).await;
            assert_eq!(done, Some(1));
            let mut sleep = Box::pin(clock.sleep(Duration::from_secs(3600)));
            let over = clock.timeout(Duration::from_millis(5), sleep.as_mut()).await;
            assert!(over.is_none());
            assert_eq!(clock.timers(), 1);
            drop(sleep);
            assert_eq!(clock.timers(), 0);
        });
    }

    #[test]
    fn the_clock_moves_with_the_ticks() {
        on_shard(|_| async {
            let clock = Clock::current();
            let (wall, monotonic) = (clock.now_ms(), clock.monotonic());
            clock.sleep(Duration::from_millis(30)).await;
            assert!(clock.monotonic() >= monotonic + Duration::from_millis(30));
            assert!(clock.now_ms() > wall);
            assert!((clock.now_ms() - wall_ms()).abs() < 5_000);
            assert!(clock.pulse().ticks() > 0);
        });
    }

    #[test]
    fn a_stall_is_measured() {
        on_shard(|_| async {
            let clock = Clock::current();
            clock.sleep(Duration::from_millis(5)).await;
            clock.pulse().take_stall_max();
            // A task that neither waits nor yields.
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(150) {
                std::hint::spin_loop();
            }
            clock.sleep(Duration::from_millis(5)).await;
            assert!(clock.pulse().stall_max() > Duration::from_millis(50), "{:?}", clock.pulse().stall_max());
            assert!(clock.pulse().stalled_for() < Duration::from_secs(5));
        });
    }
}
