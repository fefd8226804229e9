//! Wake-ups between tasks of one executor.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// One task waits for [`Signal::raise`]; a raise before the wait is not lost.
#[derive(Default)]
pub struct Signal {
    raised: Cell<bool>,
    waiting: RefCell<Option<Waker>>,
}

impl Signal {
    /// Wakes the waiting task, or lets the next wait end at once.
    pub fn raise(&self) {
        self.raised.set(true);
        let waiting = self.waiting.borrow_mut().take();
        if let Some(waker) = waiting {
            waker.wake();
        }
    }

    /// Ends at the next raise, or at once when one came since the last wait ended.
    pub async fn wait(&self) {
        poll_fn(|context| {
            if self.raised.replace(false) {
                return Poll::Ready(());
            }
            *self.waiting.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// Any number of tasks wait for the next [`Broadcast::raise`]; each of them sees it. A raise that comes before the wait
/// is polled is not seen: check the condition and wait without another await between.
#[derive(Default)]
pub struct Broadcast {
    raised: Cell<u64>,
    waiting: RefCell<Vec<Waker>>,
}

impl Broadcast {
    /// Wakes all who wait.
    pub fn raise(&self) {
        self.raised.set(self.raised.get() + 1);
        let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        for waker in waiting {
            waker.wake();
        }
    }

    /// Ends at the next raise.
    pub async fn wait(&self) {
        let mut seen = None;
        poll_fn(|context| {
            if *seen.get_or_insert(self.raised.get()) != self.raised.get() {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    fn poll_once(future: std::pin::Pin<&mut impl Future>) -> bool {
        future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn a_raise_before_the_wait_is_not_lost() {
        let signal = Signal::default();
        signal.raise();
        assert!(poll_once(pin!(signal.wait())));
        assert!(!poll_once(pin!(signal.wait())));
    }

    #[test]
    fn everybody_who_waits_sees_a_broadcast() {
        let broadcast = Broadcast::default();
        let (mut one, mut two) = (pin!(broadcast.wait()), pin!(broadcast.wait()));
        assert!(!poll_once(one.as_mut()) && !poll_once(two.as_mut()));
        broadcast.raise();
        assert!(poll_once(one) && poll_once(two));
    }
}
