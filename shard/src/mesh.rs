//! The rings between shards: one for requests and one for replies for each ordered pair.
//!
//! A request is sent only with a credit for its reply, so replies always fit and nobody waits for ring space. A shard
//! that sleeps is woken once per batch of messages, through a clone of its task's waker that stays registered: waking
//! from outside frees an executor that parked on top of runnable tasks.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use ringmain_core::limits::{MESH_BYTES_MAX, MESH_CREDITS};
use rtrb::{Consumer, Producer, RingBuffer};

use crate::signal::Signal;

/// A message that came in.
pub(crate) enum Incoming<Q, R> {
    /// A request, to be answered with [`Mesh::send_reply`].
    Request { ticket: Ticket, message: Q },
    /// The answer to a request of this shard.
    Reply { message: R },
}

/// There is no credit for the request: it comes back.
pub(crate) struct SendError<Q> {
    pub(crate) message: Q,
}

/// Who sleeps, and how to wake it.
#[derive(Default)]
struct Sleeper {
    asleep: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Sleeper {
    fn wake(&self) {
        // Against the store in `receive`: either this sees that it sleeps, or it sees the message.
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Some(waker) = self.waker.lock().unwrap_or_else(PoisonError::into_inner).as_ref()
        {
            waker.wake_by_ref();
        }
    }
}

/// What a request holds of its sender's credit; it goes along with the request and comes back with the reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticket {
    shard: u16,
    bytes: usize,
}

impl Ticket {
    /// The shard that asks.
    pub(crate) fn from(self) -> u16 {
        self.shard
    }
}

/// What one shard has of the rings that lead to and from one other.
struct Peer<Q, R> {
    requests_out: RefCell<Producer<(Ticket, Q)>>,
    requests_in: RefCell<Consumer<(Ticket, Q)>>,
    replies_out: RefCell<Producer<(Ticket, R)>>,
    replies_in: RefCell<Consumer<(Ticket, R)>>,
    /// Requests of ours that have no reply yet, and their bytes.
    open: Cell<usize>,
    open_bytes: Cell<usize>,
    credit: Signal,
}

/// One shard's end of the mesh. Lives on its thread once it is there.
pub(crate) struct Mesh<Q, R> {
    own: u16,
    peers: Vec<Option<Peer<Q, R>>>,
    sleepers: Arc<Vec<Sleeper>>,
    /// The peer to look at first next time.
    turn: Cell<usize>,
}

impl<Q, R> Mesh<Q, R> {
    /// The ends of a mesh of `shards`.
    pub(crate) fn build(shards: u16) -> Vec<Self> {
        let count = usize::from(shards);
        let sleepers: Arc<Vec<Sleeper>> = Arc::new((0..count).map(|_| Sleeper::default()).collect());
        let mut requests = rings::<(Ticket, Q)>(count);
        let mut replies = rings::<(Ticket, R)>(count);
        (0..count)
            .map(|own| {
                let peers = (0..count).map(|other| {
                    Some(Peer {
                        requests_out: RefCell::new(requests[own][other].0.take()?),
                        requests_in: RefCell::new(requests[other][own].1.take()?),
                        replies_out: RefCell::new(replies[own][other].0.take()?),
                        replies_in: RefCell::new(replies[other][own].1.take()?),
                        open: Cell::new(0),
                        open_bytes: Cell::new(0),
                        credit: Signal::default(),
                    })
                });
                // The number of shards is a u16.
                Self { own: own as u16, peers: peers.collect(), sleepers: Arc::clone(&sleepers), turn: Cell::new(0) }
            })
            .collect()
    }

    fn peer(&self, shard: u16) -> &Peer<Q, R> {
        self.peers[usize::from(shard)].as_ref().expect("a shard sends nothing to itself")
    }

    /// Sends a request that holds `bytes`, unless `shard` has as many of this shard's requests as it may have.
    pub(crate) fn send_request(&self, shard: u16, bytes: usize, message: Q) -> Result<(), SendError<Q>> {
        let peer = self.peer(shard);
        let too_large = peer.open.get() > 0 && peer.open_bytes.get() + bytes > MESH_BYTES_MAX;
        if peer.open.get() >= MESH_CREDITS || too_large {
            return Err(SendError { message });
        }
        peer.open.set(peer.open.get() + 1);
        peer.open_bytes.set(peer.open_bytes.get() + bytes);
        let ticket = Ticket { shard: self.own, bytes };
        let pushed = peer.requests_out.borrow_mut().push((ticket, message));
        assert!(pushed.is_ok(), "a request ring holds as many as there are credits");
        self.sleepers[usize::from(shard)].wake();
        Ok(())
    }

    /// Ends when a credit of `shard` has come back since the last wait.
    pub(crate) async fn credit_back(&self, shard: u16) {
        self.peer(shard).credit.wait().await;
    }

    /// Answers the request that came with `ticket`. Always fits.
    pub(crate) fn send_reply(&self, ticket: Ticket, message: R) {
        let pushed = self.peer(ticket.shard).replies_out.borrow_mut().push((ticket, message));
        assert!(pushed.is_ok(), "a reply ring holds as many as there are credits");
        self.sleepers[usize::from(ticket.shard)].wake();
    }

    /// The next message from any shard, in turn. For one task of the shard.
    pub(crate) async fn receive(&self) -> Incoming<Q, R> {
        let own = &self.sleepers[usize::from(self.own)];
        poll_fn(|context| {
            if let Some(incoming) = self.take() {
                return Poll::Ready(incoming);
            }
            {
                let mut waker = own.waker.lock().unwrap_or_else(PoisonError::into_inner);
                if !waker.as_ref().is_some_and(|known| known.will_wake(context.waker())) {
                    *waker = Some(context.waker().clone());
                }
            }
            own.asleep.store(true, Ordering::SeqCst);
            std::sync::atomic::fence(Ordering::SeqCst);
            // A message may have come between the look and the flag.
            match self.take() {
                Some(incoming) => {
                    own.asleep.store(false, Ordering::SeqCst);
                    Poll::Ready(incoming)
                }
                None => Poll::Pending,
            }
        })
        .await
    }

    fn take(&self) -> Option<Incoming<Q, R>> {
        for step in 0..self.peers.len() {
            let at = (self.turn.get() + step) % self.peers.len();
            let Some(peer) = &self.peers[at] else { continue };
            // Replies first: they give credits back.
            if let Ok((ticket, message)) = peer.replies_in.borrow_mut().pop() {
                peer.open.set(peer.open.get() - 1);
                peer.open_bytes.set(peer.open_bytes.get() - ticket.bytes);
                peer.credit.raise();
                self.turn.set(at + 1);
                return Some(Incoming::Reply { message });
            }
            if let Ok((ticket, message)) = peer.requests_in.borrow_mut().pop() {
                self.turn.set(at + 1);
                return Some(Incoming::Request { ticket, message });
            }
        }
        None
    }

    /// Forgets the waker of this shard's task, on its own thread, before the executor ends.
    pub(crate) fn close(&self) {
        *self.sleepers[usize::from(self.own)].waker.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

type RingEnds<T> = (Option<Producer<T>>, Option<Consumer<T>>);

/// A ring from each shard to each other one; none to itself.
fn rings<T>(count: usize) -> Vec<Vec<RingEnds<T>>> {
    let ring = |from, to| {
        if from == to {
            return (None, None);
        }
        let (producer, consumer) = RingBuffer::new(MESH_CREDITS);
        (Some(producer), Some(consumer))
    };
    (0..count).map(|from| (0..count).map(|to| ring(from, to)).collect()).collect()
}
