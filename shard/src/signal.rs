//! A wake-up between tasks of one executor.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// One or more tasks wait for [`Signal::raise`]; a raise before a wait is not lost.
#[derive(Default)]
pub struct Signal {
    raised: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl Signal {
    /// Wakes the waiting tasks, or lets the next wait end at once.
    pub fn raise(&self) {
        self.raised.set(true);
        for waker in self.waiting.borrow_mut().drain(..) {
            waker.wake();
        }
    }

    /// Ends at the next raise, or at once when one came since the last wait ended.
    pub async fn wait(&self) {
        poll_fn(|context| {
            if self.raised.replace(false) {
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
