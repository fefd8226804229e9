//! Memory of replies that are copies: read from disk, or received from another shard.
//!
//! Blocks of the arena are pinned and cost nothing more; copies lie on the heap, from the read until the socket has
//! taken them, and a client that does not read would keep them there. So they have a budget for each shard, given out
//! to clients in turn: one that asks for much waits for itself, not in front of the others.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use ringmain_core::limits::CONNECTION_COPIES_MAX;

use crate::signal::Signal;

/// Who copies are for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Taker {
    /// A connection of this shard, by its id: it may be slow to take them.
    Client(u64),
    /// Another shard, which takes them at once.
    Hop,
}

/// A budget of one shard: for its clients, or for other shards.
pub(crate) struct Copies {
    bytes_max: usize,
    used: Cell<usize>,
    queue: RefCell<Queue>,
}

#[derive(Default)]
struct Queue {
    takers: HashMap<Taker, Account>,
    /// Takers that have asks, the next one to be served first.
    turns: VecDeque<Taker>,
}

/// What one taker has and wants.
#[derive(Default)]
struct Account {
    held: usize,
    asks: VecDeque<Rc<Ask>>,
}

struct Ask {
    bytes: usize,
    answer: Cell<Option<Answer>>,
    signal: Signal,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Granted,
    Gone,
}

/// Part of the budget, given back when dropped.
pub(crate) struct Copied {
    copies: Rc<Copies>,
    taker: Taker,
    bytes: usize,
}

impl Copies {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, used: Cell::new(0), queue: RefCell::default() }
    }

    /// Waits until `bytes` may be copied for `taker`; nothing when it has gone meanwhile.
    ///
    /// Not to be dropped half way: who has been granted a part must give it back.
    pub(crate) async fn reserve(self: &Rc<Self>, taker: Taker, bytes: usize) -> Option<Copied> {
        let ask = Rc::new(Ask { bytes, answer: Cell::new(None), signal: Signal::default() });
        self.queue.borrow_mut().add(taker, &ask);
        self.grant();
        loop {
            match ask.answer.get() {
                Some(Answer::Granted) => return Some(Copied { copies: Rc::clone(self), taker, bytes }),
                Some(Answer::Gone) => return None,
                None => ask.signal.wait().await,
            }
        }
    }

    /// The client has gone: it gets nothing any more, and nobody waits behind it.
    pub(crate) fn forget(&self, taker: Taker) {
        let asks = self.queue.borrow_mut().take_asks(taker);
        for ask in asks {
            ask.answer.set(Some(Answer::Gone));
            ask.signal.raise();
        }
        self.grant();
    }

    /// Whether a client that has nothing waits for memory that unread replies of others hold.
    pub(crate) fn is_short(&self) -> bool {
        let queue = self.queue.borrow();
        queue.turns.iter().any(|taker| queue.takers.get(taker).is_some_and(|account| account.held == 0))
    }

    /// Gives what is free to those whose turn it is.
    fn grant(&self) {
        loop {
            let left = (self.used.get() > 0).then(|| self.bytes_max.saturating_sub(self.used.get()));
            let next = self.queue.borrow_mut().next(left);
            let Some(ask) = next else { break };
            self.used.set(self.used.get() + ask.bytes);
            ask.answer.set(Some(Answer::Granted));
            ask.signal.raise();
        }
    }

    fn give_back(&self, bytes: usize) {
        if bytes > 0 {
            self.used.set(self.used.get() - bytes);
            self.grant();
        }
    }
}

impl Queue {
    fn add(&mut self, taker: Taker, ask: &Rc<Ask>) {
        let account = self.takers.entry(taker).or_default();
        if account.asks.is_empty() {
            self.turns.push_back(taker);
        }
        account.asks.push_back(Rc::clone(ask));
    }

    /// Takes the ask that may be granted now. Turns end at one that finds no room, so that a large one is not passed by
    /// small ones for ever; who has as many copies as it may have is passed over.
    ///
    /// `left` is what may still be given; none when nothing is given out: an ask larger than the whole budget is then let
    /// through alone.
    fn next(&mut self, left: Option<usize>) -> Option<Rc<Ask>> {
        let is_contended = self.turns.len() > 1;
        for _ in 0..self.turns.len() {
            let taker = self.turns.pop_front()?;
            let account = self.takers.get_mut(&taker)?;
            let copies_max = match taker {
                Taker::Hop => usize::MAX,
                // Who has some steps back for who has none.
                Taker::Client(_) if is_contended => 1,
                Taker::Client(_) => CONNECTION_COPIES_MAX,
            };
            if account.held >= copies_max {
                self.turns.push_back(taker);
                continue;
            }
            let ask = account.asks.front()?;
            if left.is_some_and(|left| ask.bytes > left) {
                self.turns.push_front(taker);
                return None;
            }
            let ask = account.asks.pop_front();
            account.held += 1;
            if !account.asks.is_empty() {
                self.turns.push_back(taker);
            }
            return ask;
        }
        None
    }

    fn take_asks(&mut self, taker: Taker) -> VecDeque<Rc<Ask>> {
        let Some(account) = self.takers.get_mut(&taker) else { return VecDeque::new() };
        let asks = std::mem::take(&mut account.asks);
        if account.held == 0 {
            self.takers.remove(&taker);
        }
        if !asks.is_empty() {
            self.turns.retain(|other| *other != taker);
        }
        asks
    }

    fn end_copy(&mut self, taker: Taker) {
        let Some(account) = self.takers.get_mut(&taker) else { return };
        account.held -= 1;
        if account.held == 0 && account.asks.is_empty() {
            self.takers.remove(&taker);
        }
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

impl Drop for Copied {
    fn drop(&mut self) {
        self.copies.used.set(self.copies.used.get() - self.bytes);
        self.copies.queue.borrow_mut().end_copy(self.taker);
        self.copies.grant();
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
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    const BYTES_MAX: usize = 1000;

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn now(copies: &Rc<Copies>, taker: Taker, bytes: usize) -> Option<Copied> {
        match poll(pin!(copies.reserve(taker, bytes))) {
            Poll::Ready(copied) => copied,
            Poll::Pending => panic!("there is no room"),
        }
    }

    #[test]
    fn who_finds_no_room_waits_until_some_is_given_back() {
        let copies = Rc::new(Copies::new(BYTES_MAX));
        let mut first = now(&copies, Taker::Client(1), BYTES_MAX).unwrap();
        let mut second = pin!(copies.reserve(Taker::Client(2), 10));
        assert!(poll(second.as_mut()).is_pending());
        assert!(copies.is_short());
        first.shrink_to(BYTES_MAX - 10);
        assert!(poll(second.as_mut()).is_ready());
        assert!(!copies.is_short());
        drop(first);
        assert_eq!(copies.used.get(), 0);
        assert!(copies.queue.borrow().takers.is_empty());
    }

    #[test]
    fn one_copy_larger_than_the_budget_is_let_through_alone() {
        let copies = Rc::new(Copies::new(BYTES_MAX));
        assert!(now(&copies, Taker::Client(1), BYTES_MAX + 1).is_some());
    }

    #[test]
    fn a_client_with_many_asks_waits_for_itself_and_others_take_turns() {
        let copies = Rc::new(Copies::new(BYTES_MAX));
        let silent = Taker::Client(1);
        let held: Vec<_> = (0..CONNECTION_COPIES_MAX).map(|_| now(&copies, silent, 10).unwrap()).collect();
        let mut more: Vec<_> = (0..100).map(|_| Box::pin(copies.reserve(silent, 10))).collect();
        assert!(more.iter_mut().all(|ask| poll(ask.as_mut()).is_pending()));
        // Nobody is short for its sake.
        assert!(!copies.is_short());
        let other = now(&copies, Taker::Client(2), 10);
        assert!(other.is_some());
        drop(held);
        // It goes on when it has taken what it had.
        assert!(poll(more[0].as_mut()).is_ready());
    }

    #[test]
    fn the_asks_of_a_client_that_has_gone_end() {
        let copies = Rc::new(Copies::new(BYTES_MAX));
        let all = now(&copies, Taker::Client(1), BYTES_MAX);
        let mut gone = pin!(copies.reserve(Taker::Client(2), 10));
        let mut next = pin!(copies.reserve(Taker::Client(3), 10));
        assert!(poll(gone.as_mut()).is_pending() && poll(next.as_mut()).is_pending());
        copies.forget(Taker::Client(2));
        assert!(matches!(poll(gone), Poll::Ready(None)));
        drop(all);
        assert!(matches!(poll(next), Poll::Ready(Some(_))));
        assert!(copies.queue.borrow().turns.is_empty());
    }

    #[test]
    fn hops_are_bound_by_the_budget_alone() {
        let copies = Rc::new(Copies::new(BYTES_MAX));
        let held: Vec<_> = (0..2 * CONNECTION_COPIES_MAX).map(|_| now(&copies, Taker::Hop, 10).unwrap()).collect();
        assert_eq!(copies.used.get(), 10 * held.len());
    }
}
