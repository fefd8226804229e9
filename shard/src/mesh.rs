//! Requests that landed on the wrong shard, on their way to the right one and back.
//!
//! Each ordered pair of shards has a ring for requests and one for replies. A request takes a credit for its reply, and
//! both rings have as many places as there are credits, so that no push ever waits: shards that wait for each other's
//! room could wait for ever. Without credit the caller stops reading its connection, then says SERVER_BUSY. The bytes
//! that requests and replies may hold are bounded likewise.
//!
//! What crosses must be owned (`Send`): blocks are never shared between threads.

mod end;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringmain_core::ids::ShardId;

use crate::clock::mark_busy;
use crate::doorbell::Doorbell;

use self::end::{Envelope, Pair};
pub use self::end::{MeshEnd, MeshLimits, mesh};

impl<Q, R> MeshEnd<Q, R> {
    /// Starts to use it, on the shard's thread.
    #[must_use]
    pub fn start(self) -> MeshPort<Q, R> {
        let peers = self.pairs.into_iter().map(|pair| pair.map(Peer::new)).collect();
        let inner = Inner {
            shard: self.shard,
            limits: self.limits,
            doorbells: self.doorbells,
            peers: RefCell::new(Peers { peers, next: 0 }),
        };
        MeshPort { inner: Rc::new(inner) }
    }
}

/// A call's place at the caller.
enum Slot<R> {
    Free,
    /// No reply yet, and the waker of who waits.
    Waiting(Option<Waker>),
    /// No reply yet, and nobody waits any more.
    Abandoned,
    /// The reply, `None` when the other shard dropped the request.
    Done(Option<R>),
}

/// The other end of one pair.
struct Peer<Q, R> {
    pair: Pair<Q, R>,
    slots: Vec<(Slot<R>, usize)>,
    free_slots: Vec<u32>,
    /// Requests without a reply, and the bytes that they were given.
    in_flight: usize,
    in_flight_bytes: usize,
    credit_waiters: VecDeque<Waker>,
}

impl<Q, R> Peer<Q, R> {
    fn new(pair: Pair<Q, R>) -> Self {
        Self {
            pair,
            slots: Vec::new(),
            free_slots: Vec::new(),
            in_flight: 0,
            in_flight_bytes: 0,
            credit_waiters: VecDeque::new(),
        }
    }

    fn has_credit(&self, limits: &MeshLimits, bytes: usize) -> bool {
        self.in_flight < limits.credits && self.in_flight_bytes + bytes <= limits.bytes
    }

    fn take_slot(&mut self, bytes: usize) -> u32 {
        let slot = (Slot::Waiting(None), bytes);
        match self.free_slots.pop() {
            Some(free) => {
                self.slots[free as usize] = slot;
                free
            }
            None => {
                self.slots.push(slot);
                // Bounded by the calls that are held, far below 2^32.
                (self.slots.len() - 1) as u32
            }
        }
    }

    /// Takes a reply from its ring; pushes the wakers to be woken.
    fn take_reply(&mut self, wake: &mut Vec<Waker>) -> bool {
        let Ok(Envelope { slot: number, body }) = self.pair.replies_in.pop() else { return false };
        let (slot, bytes) = &mut self.slots[number as usize];
        self.in_flight -= 1;
        self.in_flight_bytes -= *bytes;
        match std::mem::replace(slot, Slot::Free) {
            Slot::Waiting(waker) => {
                *slot = Slot::Done(body);
                wake.extend(waker);
            }
            Slot::Abandoned => self.free_slots.push(number),
            Slot::Free | Slot::Done(_) => unreachable!("a slot is free or done only after its one reply"),
        }
        wake.extend(self.credit_waiters.drain(..));
        true
    }
}

struct Peers<Q, R> {
    peers: Vec<Option<Peer<Q, R>>>,
    /// Where to look first for a request, so that each shard gets its turn.
    next: usize,
}

struct Inner<Q, R> {
    shard: u16,
    limits: MeshLimits,
    doorbells: Arc<[Doorbell]>,
    peers: RefCell<Peers<Q, R>>,
}

impl<Q, R> Inner<Q, R> {
    fn with_peer<T>(&self, shard: u16, f: impl FnOnce(&mut Peer<Q, R>) -> T) -> T {
        let mut peers = self.peers.borrow_mut();
        let peer = peers.peers.get_mut(usize::from(shard)).and_then(Option::as_mut);
        f(peer.expect("a hop goes to another shard of this broker"))
    }

    fn reply(&self, ticket: (u16, u32), body: Option<R>) {
        let (to, slot) = ticket;
        let pushed = self.with_peer(to, |peer| peer.pair.replies_out.push(Envelope { slot, body }).is_ok());
        assert!(pushed, "the request's credit keeps a place for its reply");
        self.doorbells[usize::from(to)].ring();
    }

    /// Takes all replies that are there, then the next request.
    fn look(self: &Rc<Self>) -> Option<(Ticket<Q, R>, Q)> {
        let mut wake = Vec::new();
        let found = {
            let mut peers = self.peers.borrow_mut();
            let Peers { peers, next } = &mut *peers;
            for peer in peers.iter_mut().flatten() {
                while peer.take_reply(&mut wake) {}
            }
            let (first, count) = (*next, peers.len());
            (0..count).map(|step| (first + step) % count).find_map(|from| {
                let envelope = peers[from].as_mut()?.pair.requests_in.pop().ok()?;
                *next = from + 1;
                Some((from as u16, envelope))
            })
        };
        // Not under the borrow: what is woken may look at the mesh.
        wake.into_iter().for_each(Waker::wake);
        let (from, Envelope { slot, body }) = found?;
        Some((Ticket { inner: Rc::clone(self), from, slot, answered: false }, body))
    }
}

impl<Q, R> Drop for Inner<Q, R> {
    fn drop(&mut self) {
        self.doorbells[usize::from(self.shard)].leave();
    }
}

/// One shard's end of the mesh, shared by its tasks.
pub struct MeshPort<Q, R> {
    inner: Rc<Inner<Q, R>>,
}

impl<Q, R> Clone for MeshPort<Q, R> {
    fn clone(&self) -> Self {
        Self { inner: Rc::clone(&self.inner) }
    }
}

/// There is no credit for a request now; it comes back.
#[derive(Debug)]
pub struct NoCredit<Q>(pub Q);

/// The other shard has dropped the request without a reply, which happens only when it stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the owning shard has dropped the request")]
pub struct HopLost;

impl<Q, R> MeshPort<Q, R> {
    /// Sends `request` to another shard. `bytes` is what request and reply may hold together. Await the answer for the
    /// reply; dropping it forgets the reply, not the request.
    ///
    /// # Errors
    /// When too many requests, or bytes, to that shard are without a reply.
    ///
    /// # Panics
    /// When `to` is this shard or none, or `bytes` alone is more than the limit.
    pub fn call(&self, to: ShardId, request: Q, bytes: usize) -> Result<Call<Q, R>, NoCredit<Q>> {
        let inner = &self.inner;
        assert!(bytes <= inner.limits.bytes, "a hop of {bytes} bytes");
        let slot = inner.with_peer(to.0, |peer| {
            if !peer.has_credit(&inner.limits, bytes) {
                return Err(NoCredit(request));
            }
            let slot = peer.take_slot(bytes);
            peer.in_flight += 1;
            peer.in_flight_bytes += bytes;
            let pushed = peer.pair.requests_out.push(Envelope { slot, body: request }).is_ok();
            assert!(pushed, "there are no more requests than credits");
            Ok(slot)
        })?;
        inner.doorbells[usize::from(to.0)].ring();
        mark_busy();
        Ok(Call { inner: Rc::clone(inner), to: to.0, slot })
    }

    /// Waits until a request of `bytes` to that shard may have credit; another task may take it first.
    ///
    /// # Panics
    /// As [`call`](Self::call).
    pub async fn wait_for_credit(&self, to: ShardId, bytes: usize) {
        assert!(bytes <= self.inner.limits.bytes, "a hop of {bytes} bytes");
        poll_fn(|cx| {
            self.inner.with_peer(to.0, |peer| {
                if peer.has_credit(&self.inner.limits, bytes) {
                    return Poll::Ready(());
                }
                if !peer.credit_waiters.iter().any(|waker| waker.will_wake(cx.waker())) {
                    peer.credit_waiters.push_back(cx.waker().clone());
                }
                Poll::Pending
            })
        })
        .await;
    }

    /// The next request of another shard. This is also what takes in the replies to this shard's calls, so one task must
    /// always be waiting here, and hand the requests on without waiting for anything else.
    pub async fn next_request(&self) -> (Ticket<Q, R>, Q) {
        let doorbell = &self.inner.doorbells[usize::from(self.inner.shard)];
        let found = poll_fn(|cx| {
            doorbell.awake();
            if let Some(found) = self.inner.look() {
                return Poll::Ready(found);
            }
            doorbell.sleep(cx.waker());
            self.inner.look().map_or(Poll::Pending, Poll::Ready)
        })
        .await;
        mark_busy();
        found
    }

    /// Requests to that shard without a reply, and their bytes.
    ///
    /// # Panics
    /// When `to` is this shard or none.
    #[must_use]
    pub fn in_flight(&self, to: ShardId) -> (usize, usize) {
        self.inner.with_peer(to.0, |peer| (peer.in_flight, peer.in_flight_bytes))
    }
}

/// The right, and duty, to reply to one request. Dropping it tells the caller that the request is lost.
pub struct Ticket<Q, R> {
    inner: Rc<Inner<Q, R>>,
    from: u16,
    slot: u32,
    answered: bool,
}

impl<Q, R> Ticket<Q, R> {
    /// The shard that asks.
    #[must_use]
    pub fn from(&self) -> ShardId {
        ShardId(self.from)
    }

    /// Sends the reply; never waits.
    pub fn reply(mut self, reply: R) {
        self.answered = true;
        self.inner.reply((self.from, self.slot), Some(reply));
    }
}

impl<Q, R> Drop for Ticket<Q, R> {
    fn drop(&mut self) {
        if !self.answered {
            self.inner.reply((self.from, self.slot), None);
        }
    }
}

/// Waits for the reply to a [`MeshPort::call`].
#[must_use = "the reply is dropped with it"]
pub struct Call<Q, R> {
    inner: Rc<Inner<Q, R>>,
    to: u16,
    slot: u32,
}

impl<Q, R> Future for Call<Q, R> {
    type Output = Result<R, HopLost>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.with_peer(self.to, |peer| {
            let (slot, _) = &mut peer.slots[self.slot as usize];
            match slot {
                Slot::Waiting(waker) => {
                    if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                        *waker = Some(cx.waker().clone());
                    }
                    Poll::Pending
                }
                // The slot is given back by the drop.
                Slot::Done(reply) => Poll::Ready(reply.take().ok_or(HopLost)),
                Slot::Free | Slot::Abandoned => unreachable!("the slot is this call's until its drop"),
            }
        })
    }
}

impl<Q, R> Drop for Call<Q, R> {
    fn drop(&mut self) {
        // Kept alive over the borrow, since dropping a reply or waker may look at the mesh.
        let _old = self.inner.with_peer(self.to, |peer| {
            let (slot, _) = &mut peer.slots[self.slot as usize];
            let old = std::mem::replace(slot, Slot::Abandoned);
            if matches!(old, Slot::Done(_)) {
                *slot = Slot::Free;
                peer.free_slots.push(self.slot);
            }
            old
        });
    }
}
