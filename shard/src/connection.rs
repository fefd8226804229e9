//! One client connection: frames in, replies out.
//!
//! Owns the socket, the receive buffer (while it is served) and the queue of replies. Lives on the shard that accepted
//! it. One task reads; replies are sent by whoever has one, straight to the socket, and only when that is full by a
//! second task that waits for room.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::Duration;

use bytes::Bytes;
use ringmain_core::fetch::Slice;
use ringmain_core::limits::{
    CONNECTION_REPLY_BYTES_MAX, FRAME_TIMEOUT_MS, HELLO_TIMEOUT_MS, RECEIVE_BYTES_MIN, REPLY_TIMEOUT_MS,
    SHARD_RECEIVE_BYTES_MAX,
};
use ringmain_wire::frame::{FRAME_PREFIX_BYTES, FrameEncoder, FrameError, FrameView, frame_bytes};

use crate::copies::{Copied, Taker, Waiting};
use crate::dispatch;
use crate::net::Stream;
use crate::runtime::{spawn_local, yield_if_needed};
use crate::shard::Shard;
use crate::signal::{Broadcast, Signal};

/// Slices given to one sendmsg: the kernel takes up to 1024.
const SLICES_MAX: usize = 256;
/// A grown receive buffer is given back when nothing came for this long.
const RECEIVE_IDLE: Duration = Duration::from_secs(2);
/// Up to this size a frame is read into a buffer that may hold the beginning of the next one.
const SMALL_FRAME_BYTES: usize = 64 * 1024;

/// Bytes of a reply that do not lie in its head.
pub(crate) enum Part {
    /// Pinned bytes of a block.
    Block(Slice),
    /// A copy: from another shard, or read from disk.
    Bytes(Bytes),
}

impl Part {
    /// How many bytes it is.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Block(slice) => slice.bytes as usize,
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// The bytes, wherever they lie.
    pub(crate) fn as_bytes<'a>(&'a self, shard: &'a Shard) -> &'a [u8] {
        match self {
            Self::Block(slice) => shard.block_bytes(slice),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// A frame (or several small ones) on its way out.
struct Outgoing {
    head: Vec<u8>,
    parts: Vec<Part>,
    /// The budget that copies among the parts hold.
    _copied: Option<Copied>,
    /// Bytes of head and parts that the socket has taken.
    sent: usize,
    total: usize,
}

/// A client.
pub(crate) struct Connection {
    pub(crate) id: u64,
    pub(crate) peer: SocketAddr,
    stream: Stream,
    out: RefCell<VecDeque<Outgoing>>,
    out_bytes: Cell<usize>,
    /// The socket is full: the writer task is at it.
    blocked: Cell<bool>,
    writer_wanted: Signal,
    drained: Broadcast,
    /// Raised when the connection closes: parked fetches then end.
    parked: RefCell<Vec<Weak<Signal>>>,
    touched: Cell<bool>,
    /// Since when the first reply of the queue waits for a socket that is full.
    blocked_since: Cell<Option<Duration>>,
    /// Replies that have been sent.
    replies_sent: Cell<u64>,
    /// Since when the client owes the rest of a frame for which memory is held.
    receiving_since: Cell<Option<Duration>>,
    pub(crate) requests: Cell<usize>,
    pub(crate) greeted: Cell<bool>,
    closed: Cell<bool>,
}

impl Connection {
    pub(crate) fn new(id: u64, stream: Stream) -> Rc<Self> {
        let peer = stream.peer();
        Rc::new(Self {
            id,
            peer,
            stream,
            out: RefCell::default(),
            out_bytes: Cell::new(0),
            blocked: Cell::new(false),
            writer_wanted: Signal::default(),
            drained: Broadcast::default(),
            parked: RefCell::default(),
            touched: Cell::new(false),
            blocked_since: Cell::new(None),
            replies_sent: Cell::new(0),
            receiving_since: Cell::new(None),
            requests: Cell::new(0),
            greeted: Cell::new(false),
            closed: Cell::new(false),
        })
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Since when the client has not taken a reply.
    pub(crate) fn blocked_since(&self) -> Option<Duration> {
        self.blocked_since.get()
    }

    /// Since when the client has not sent the rest of a frame for which memory is held.
    pub(crate) fn receiving_since(&self) -> Option<Duration> {
        self.receiving_since.get()
    }

    /// Queues a frame; [`Connection::flush`] (by the shard, at the end of its turn) sends it. `head` appends the frame's
    /// head to the bytes given.
    pub(crate) fn reply(
        self: &Rc<Self>,
        shard: &Shard,
        parts: Vec<Part>,
        head: impl FnOnce(&mut FrameEncoder, &mut Vec<u8>),
    ) {
        self.reply_copied(shard, parts, None, head);
    }

    /// The same for parts that are copies, with the budget that they hold.
    pub(crate) fn reply_copied(
        self: &Rc<Self>,
        shard: &Shard,
        parts: Vec<Part>,
        copied: Option<Copied>,
        head: impl FnOnce(&mut FrameEncoder, &mut Vec<u8>),
    ) {
        if self.closed.get() {
            shard.release(&parts);
            return;
        }
        shard.metrics.frames_sent_total.add(1);
        let mut out = self.out.borrow_mut();
        let joins = parts.is_empty() && out.back().is_some_and(|last| last.parts.is_empty() && last.sent == 0);
        if !joins {
            let head = Vec::with_capacity(128);
            out.push_back(Outgoing { head, parts: Vec::new(), _copied: copied, sent: 0, total: 0 });
        }
        let Some(last) = out.back_mut() else { return };
        let before = last.head.len();
        head(&mut shard.encoder.borrow_mut(), &mut last.head);
        shard.head_bytes.set(shard.head_bytes.get() + last.head.len() - before);
        last.parts = parts;
        let total = last.head.len() + last.parts.iter().map(Part::bytes).sum::<usize>();
        self.out_bytes.set(self.out_bytes.get() + total - last.total);
        last.total = total;
        drop(out);
        if !self.touched.replace(true) {
            shard.touched.borrow_mut().push(Rc::clone(self));
        }
    }

    /// Sends what the socket takes of the queued replies.
    pub(crate) fn flush(&self, shard: &Shard) {
        self.touched.set(false);
        if self.blocked.get() || self.closed.get() {
            return;
        }
        match self.send_queued(shard) {
            Ok(true) => {}
            Ok(false) => {
                self.blocked.set(true);
                self.blocked_since.set(Some(shard.clock.monotonic()));
                self.writer_wanted.raise();
            }
            Err(_) => self.close(shard),
        }
    }

    /// Returns true when everything is sent, false when the socket is full.
    fn send_queued(&self, shard: &Shard) -> io::Result<bool> {
        loop {
            let out = self.out.borrow();
            if out.is_empty() {
                self.drained.raise();
                return Ok(true);
            }
            let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(16);
            for outgoing in out.iter() {
                if slices.len() >= SLICES_MAX {
                    break;
                }
                outgoing.slices(shard, &mut slices);
            }
            let sent = match self.stream.try_send(&slices) {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            };
            drop(slices);
            drop(out);
            self.sent(shard, sent);
        }
    }

    /// The socket has taken `sent` bytes from the front of the queue.
    fn sent(&self, shard: &Shard, mut sent: usize) {
        let mut out = self.out.borrow_mut();
        self.out_bytes.set(self.out_bytes.get() - sent);
        while let Some(first) = out.front_mut() {
            let left = first.total - first.sent;
            if sent < left {
                first.sent += sent;
                break;
            }
            sent -= left;
            let Some(done) = out.pop_front() else { break };
            self.replies_sent.set(self.replies_sent.get() + 1);
            shard.release(&done.parts);
            shard.heads_gone(done.head.len());
        }
    }

    /// A copy of the next bytes to be sent: the queue may grow while the socket is waited for.
    fn copy_front(&self, shard: &Shard) -> Vec<u8> {
        const COPY_BYTES: usize = 16 * 1024;
        let out = self.out.borrow();
        let mut slices = Vec::new();
        if let Some(first) = out.front() {
            first.slices(shard, &mut slices);
        }
        slices.first().map_or_else(Vec::new, |slice| slice[..slice.len().min(COPY_BYTES)].to_vec())
    }

    /// Closes the connection at once; what is queued is dropped.
    pub(crate) fn close(&self, shard: &Shard) {
        if self.closed.replace(true) {
            return;
        }
        self.stream.shutdown(Shutdown::Both);
        for outgoing in self.out.borrow_mut().drain(..) {
            shard.release(&outgoing.parts);
            shard.heads_gone(outgoing.head.len());
        }
        self.out_bytes.set(0);
        shard.copies.forget(Taker::Client(self.id));
        self.writer_wanted.raise();
        self.drained.raise();
        for parked in self.parked.take() {
            if let Some(parked) = parked.upgrade() {
                parked.raise();
            }
        }
    }

    /// Raises `signal` when the connection closes.
    pub(crate) fn when_closed(&self, signal: &Rc<Signal>) {
        let mut parked = self.parked.borrow_mut();
        parked.retain(|other| other.strong_count() > 0);
        parked.push(Rc::downgrade(signal));
    }

    /// The task that sends when the socket was full.
    async fn write_blocked(self: Rc<Self>, shard: Rc<Shard>) {
        loop {
            self.writer_wanted.wait().await;
            while self.blocked.get() && !self.closed.get() {
                let next = self.copy_front(&shard);
                let now = shard.clock.monotonic();
                // A client that takes a reply drop by drop has no more time for it than one that takes nothing.
                let due = self.blocked_since.get().unwrap_or(now) + Duration::from_millis(REPLY_TIMEOUT_MS);
                let sent = shard.clock.timeout(due.saturating_sub(now), self.stream.write(&next)).await;
                if self.closed.get() {
                    return;
                }
                match sent {
                    Some(Ok(sent)) => {
                        let before = self.replies_sent.get();
                        self.sent(&shard, sent);
                        match self.send_queued(&shard) {
                            Ok(all) => self.blocked.set(!all),
                            Err(_) => self.close(&shard),
                        }
                        if self.replies_sent.get() != before {
                            self.blocked_since.set(Some(shard.clock.monotonic()));
                        }
                    }
                    Some(Err(_)) => self.close(&shard),
                    None => {
                        tracing::info!(
                            shard = shard.id.0, peer = %self.peer,
                            "connection closed: the client did not take a reply within {REPLY_TIMEOUT_MS} ms"
                        );
                        shard.metrics.connections_refused_total.add(1);
                        self.close(&shard);
                    }
                }
            }
            self.blocked_since.set(None);
            if self.closed.get() {
                return;
            }
        }
    }

    /// As many replies are queued as may be, though perhaps only because none has been tried to be sent yet.
    pub(crate) fn has_many_replies(&self) -> bool {
        self.out_bytes.get() > CONNECTION_REPLY_BYTES_MAX
    }

    /// Waits until the client has taken so much that more replies may be queued.
    pub(crate) async fn reply_room(&self) {
        while self.has_many_replies() && !self.closed.get() {
            self.drained.wait().await;
        }
    }
}

impl Outgoing {
    fn slices<'a>(&'a self, shard: &'a Shard, slices: &mut Vec<IoSlice<'a>>) {
        let mut skip = self.sent;
        let mut push = |bytes: &'a [u8]| {
            if skip >= bytes.len() {
                skip -= bytes.len();
            } else if slices.len() < SLICES_MAX {
                slices.push(IoSlice::new(&bytes[skip..]));
                skip = 0;
            }
        };
        push(&self.head);
        for part in &self.parts {
            push(part.as_bytes(shard));
        }
    }
}

/// Why a connection ended, when it was not the client's wish.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("{0}")]
    Frame(#[from] FrameError),
    #[error("the frame did not arrive whole within {FRAME_TIMEOUT_MS} ms")]
    SlowFrame,
    #[error("no hello within {HELLO_TIMEOUT_MS} ms")]
    NoHello,
    #[error("no memory to receive the frame became free within {FRAME_TIMEOUT_MS} ms")]
    NoMemory,
    #[error("{0}")]
    Protocol(&'static str),
    #[error("{0}")]
    Io(io::Error),
}

/// Serves a connection until the client leaves or breaks the rules. Spawned once per connection.
pub(crate) async fn serve(shard: Rc<Shard>, connection: Rc<Connection>) {
    shard.connections.borrow_mut().insert(connection.id, Rc::clone(&connection));
    shard.metrics.connections.set(shard.connections.borrow().len() as u64);
    spawn_local(Rc::clone(&connection).write_blocked(Rc::clone(&shard)));
    let mut receive = Receive::new();
    let ended = read_frames(&shard, &connection, &mut receive).await;
    receive.give_back(&shard);
    match ended {
        Ok(()) => {}
        Err(Fault::Io(error)) => {
            tracing::debug!(shard = shard.id.0, peer = %connection.peer, %error, "connection lost");
        }
        Err(fault) => {
            shard.metrics.connections_refused_total.add(1);
            tracing::info!(shard = shard.id.0, peer = %connection.peer, "connection closed: {fault}");
            connection.flush(&shard);
        }
    }
    connection.close(&shard);
    shard.connections.borrow_mut().remove(&connection.id);
    shard.metrics.connections.set(shard.connections.borrow().len() as u64);
}

/// The bounded buffer that frames are checked in.
struct Receive {
    bytes: Vec<u8>,
    filled: usize,
    /// Bytes of the shard's receive budget that the buffer holds.
    budget: usize,
    /// It has what is beyond the shard's budget.
    exceeds: bool,
}

impl Receive {
    fn new() -> Self {
        Self { bytes: vec![0; RECEIVE_BYTES_MIN], filled: 0, budget: 0, exceeds: false }
    }

    /// Whether more room is needed to go on with a frame of `frame` bytes.
    fn is_short_for(&self, frame: usize) -> bool {
        frame > self.bytes.len() && (self.bytes.len() == RECEIVE_BYTES_MIN || self.filled == self.bytes.len())
    }

    /// Makes room to go on with a frame of `frame` bytes, from the shard's budget: for four times of what the client
    /// has sent of it, since a size is quickly said.
    ///
    /// Frames that have some of the budget and wait for more might so wait for each other; one of them at a time gets
    /// what it needs beyond the budget.
    async fn grow(&mut self, shard: &Shard, frame: usize) {
        let _waiting = Waiting::new(&shard.receive_waiting);
        let mut wanted = frame.min(SMALL_FRAME_BYTES.max(self.filled * 4));
        while shard.receive_bytes.get() + wanted - self.bytes.len() > SHARD_RECEIVE_BYTES_MAX {
            if self.exceeds || !shard.receive_exceeded.replace(true) {
                self.exceeds = true;
                wanted = frame;
                break;
            }
            shard.receive_freed.wait().await;
        }
        let more = wanted - self.bytes.len();
        shard.receive_bytes.set(shard.receive_bytes.get() + more);
        self.budget += more;
        // Exact, since a vector that grows by itself may take twice as much.
        self.bytes.reserve_exact(more);
        self.bytes.resize(wanted, 0);
    }

    /// When others wait for memory, a grown buffer is given up between two frames, so that all get their turn.
    fn make_way(&mut self, shard: &Shard) {
        if self.budget > 0 && shard.receive_waiting.get() > 0 && self.filled <= RECEIVE_BYTES_MIN {
            let mut small = vec![0; RECEIVE_BYTES_MIN];
            small[..self.filled].copy_from_slice(&self.bytes[..self.filled]);
            self.give_back(shard);
            self.bytes = small;
        }
    }

    fn give_back(&mut self, shard: &Shard) {
        if self.budget > 0 {
            shard.receive_bytes.set(shard.receive_bytes.get() - self.budget);
            self.budget = 0;
            if std::mem::take(&mut self.exceeds) {
                shard.receive_exceeded.set(false);
            }
            shard.receive_freed.raise();
        }
        self.bytes = Vec::new();
    }

    fn shrink(&mut self, shard: &Shard) {
        self.give_back(shard);
        self.bytes = vec![0; RECEIVE_BYTES_MIN];
    }

    /// Size of the frame that starts at `at`, when enough of it is there to tell.
    fn frame_at(&self, at: usize) -> Result<Option<usize>, FrameError> {
        match self.bytes[at..self.filled].first_chunk::<FRAME_PREFIX_BYTES>() {
            Some(prefix) => frame_bytes(*prefix).map(|bytes| Some(bytes + FRAME_PREFIX_BYTES)),
            None => Ok(None),
        }
    }
}

async fn read_frames(shard: &Rc<Shard>, connection: &Rc<Connection>, receive: &mut Receive) -> Result<(), Fault> {
    // Since when the frame at the front of the buffer is being received.
    let mut begun = None;
    loop {
        // The whole frame that is being received, once its size is known.
        let partial = receive.frame_at(0)?;
        if let Some(frame) = partial
            && receive.is_short_for(frame)
        {
            let asked = shard.clock.monotonic();
            let wanted = shard.clock.timeout(Duration::from_millis(FRAME_TIMEOUT_MS), receive.grow(shard, frame)).await;
            wanted.ok_or(Fault::NoMemory)?;
            // The wait was the broker's, not the client's.
            let waited = shard.clock.monotonic().saturating_sub(asked);
            begun = begun.map(|begun| begun + waited);
        }
        // Of a large frame just the rest is read, so that nothing has to be moved behind it.
        let room = match partial {
            Some(frame) if frame > SMALL_FRAME_BYTES => frame.min(receive.bytes.len()),
            _ => receive.bytes.len(),
        };
        let now = shard.clock.monotonic();
        let into = &mut receive.bytes[receive.filled..room];
        let read = connection.stream.read(into);
        let read = if receive.filled > 0 {
            let since = *begun.get_or_insert(now);
            connection.receiving_since.set((receive.budget > 0).then_some(since));
            // For the whole frame, not for each piece: a client that sends drop by drop must come to an end.
            let left = (since + Duration::from_millis(FRAME_TIMEOUT_MS)).saturating_sub(now);
            shard.clock.timeout(left, read).await.ok_or(Fault::SlowFrame)?
        } else if receive.budget > 0 {
            match shard.clock.timeout(RECEIVE_IDLE, read).await {
                Some(read) => read,
                None => {
                    receive.shrink(shard);
                    continue;
                }
            }
        } else if connection.greeted.get() {
            read.await
        } else {
            let left = Duration::from_millis(HELLO_TIMEOUT_MS);
            shard.clock.timeout(left, read).await.ok_or(Fault::NoHello)?
        };
        connection.receiving_since.set(None);
        let count = read.map_err(Fault::Io)?;
        if count == 0 || connection.is_closed() {
            return Ok(());
        }
        receive.filled += count;
        if handle_frames(shard, connection, receive).await? {
            begun = None;
            receive.make_way(shard);
        }
        yield_if_needed().await;
    }
}

/// Handles all whole frames in the buffer and moves what is behind them to its front; tells whether there was one.
async fn handle_frames(shard: &Rc<Shard>, connection: &Rc<Connection>, receive: &mut Receive) -> Result<bool, Fault> {
    let mut at = 0;
    while let Some(bytes) = receive.frame_at(at)? {
        if at + bytes > receive.filled {
            break;
        }
        shard.metrics.frames_received_total.add(1);
        let frame = FrameView::parse(&receive.bytes[at..at + bytes])?;
        dispatch::handle(shard, connection, &frame).await.map_err(Fault::Protocol)?;
        at += bytes;
        yield_if_needed().await;
        if connection.has_many_replies() {
            // A buffer may hold tens of thousands of small requests, and each answer may have megabytes.
            shard.flush_touched();
            connection.reply_room().await;
            if connection.is_closed() {
                break;
            }
        }
    }
    shard.flush_touched();
    connection.reply_room().await;
    if at > 0 {
        receive.bytes.copy_within(at..receive.filled, 0);
        receive.filled -= at;
    }
    Ok(at > 0)
}
