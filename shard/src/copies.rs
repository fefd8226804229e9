//! Memory of replies that are copies: read from disk, or received from another shard.
//!
//! Blocks of the arena are pinned and cost nothing more; copies lie on the heap, from the read until the socket has
//! taken them, and a client that does not read would keep them there. So they have a budget for each shard.

use std::cell::Cell;
use std::rc::Rc;

use ringmain_core::limits::SHARD_COPY_BYTES_MAX;

use crate::signal::Broadcast;

/// The budget of one shard.
#[derive(Default)]
pub(crate) struct Copies {
    used: Cell<usize>,
    waiting: Cell<usize>,
    freed: Broadcast,
}

/// Part of the budget, given back when dropped.
pub(crate) struct Copied {
    copies: Rc<Copies>,
    bytes: usize,
}

impl Copies {
    /// Waits until `bytes` may be copied.
    pub(crate) async fn reserve(self: &Rc<Self>, bytes: usize) -> Copied {
        let _waiting = Waiting::new(&self.waiting);
        while self.used.get() > 0 && self.used.get() + bytes > SHARD_COPY_BYTES_MAX {
            self.freed.wait().await;
        }
        self.take(bytes)
    }

    /// Counts bytes that are there already: what was asked of other shards is bounded by the mesh.
    pub(crate) fn take(self: &Rc<Self>, bytes: usize) -> Copied {
        self.used.set(self.used.get() + bytes);
        Copied { copies: Rc::clone(self), bytes }
    }

    /// Whether somebody waits for memory that unread replies hold.
    pub(crate) fn is_short(&self) -> bool {
        self.waiting.get() > 0
    }
}

impl Copied {
    /// Less was needed than reserved.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.copies.give_back(less);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Copies {
    fn give_back(&self, bytes: usize) {
        if bytes > 0 {
            self.used.set(self.used.get() - bytes);
            self.freed.raise();
        }
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        self.copies.give_back(self.bytes);
    }
}

/// Counts a waiter for as long as it waits, also when it is dropped.
pub(crate) struct Waiting<'a>(&'a Cell<usize>);

impl<'a> Waiting<'a> {
    pub(crate) fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn who_finds_no_room_waits_until_a_copy_is_dropped() {
        let copies = Rc::new(Copies::default());
        let mut first = copies.take(SHARD_COPY_BYTES_MAX);
        let mut context = Context::from_waker(Waker::noop());
        let mut second = pin!(copies.reserve(10));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(copies.is_short());
        first.shrink_to(SHARD_COPY_BYTES_MAX - 10);
        assert!(second.as_mut().poll(&mut context).is_ready());
        assert!(!copies.is_short());
    }

    #[test]
    fn one_copy_larger_than_the_budget_is_let_through_alone() {
        let copies = Rc::new(Copies::default());
        let mut large = pin!(copies.reserve(SHARD_COPY_BYTES_MAX + 1));
        assert!(large.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }
}
