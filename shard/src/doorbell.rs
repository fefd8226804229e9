//! How another thread gets a shard's task to look at its rings: it rings only when the task sleeps, since a wake-up
//! costs 20-45 us and a look at a flag nothing.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;

/// Shared by one sleeper, a task, and any number of ringers.
#[derive(Debug, Default)]
pub(crate) struct Doorbell {
    asleep: AtomicBool,
    /// The sleeper's waker; taken away on its thread when it goes.
    waker: Mutex<Option<Waker>>,
}

impl Doorbell {
    /// Called by a ringer after it has put something where the sleeper will look.
    pub(crate) fn ring(&self) {
        // Pairs with the fence in `sleep`: either the sleeper sees what was put there, or we see that it sleeps.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(waker) = waker.as_ref() {
                waker.wake_by_ref();
            }
        }
    }

    /// Called by the sleeper when it has found nothing. It must look once more afterwards, and may return `Pending` only
    /// if there is nothing still.
    pub(crate) fn sleep(&self, with: &Waker) {
        let mut waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(with)) {
            *waker = Some(with.clone());
        }
        drop(waker);
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Called by the sleeper when it looks.
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Called by the sleeper, on its thread, when it goes for good.
    pub(crate) fn leave(&self) {
        self.awake();
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(waker);
    }
}
