//! Sockets of a shard: listeners made before the executor, streams that one reading and one writing task share.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use futures_lite::{AsyncRead, AsyncWrite};
use glommio::net::{TcpListener, TcpStream};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tracing::warn;

use crate::clock::{mark_busy, sleep};
use crate::raw::{self, OwnsFd};
use crate::runtime::io_error;

/// Connections that wait to be accepted; the kernel cuts it to net.core.somaxconn.
const BACKLOG: i32 = 4096;
/// How long a start waits for a port that somebody has, and between two tries.
const PORT_WAIT: Duration = Duration::from_secs(3);
const PORT_RETRY: Duration = Duration::from_millis(20);
/// Most slices that one sendmsg takes (IOV_MAX).
const SLICES_MAX: usize = 1024;
/// Between two tries when the process is out of descriptors or memory for a connection.
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(20);
/// A peer that is gone without a word is noticed after KEEPALIVE_IDLE + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEPALIVE_PROBES: u32 = 4;

/// Why an address can't be listened on.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another socket has it.
    #[error("{address} is in use by another process: stop that one or choose another port (find it by `ss -ltnp`)")]
    InUse {
        /// What was asked for.
        address: SocketAddr,
    },
    /// Anything else, such as an address of another host or a port below 1024.
    #[error("can't listen on {address}: {source}")]
    Other {
        /// What was asked for.
        address: SocketAddr,
        /// The system's reason.
        source: io::Error,
    },
}

/// A listening socket on its way to a shard.
#[derive(Debug)]
pub struct BoundListener {
    socket: Socket,
    address: SocketAddr,
}

impl BoundListener {
    /// Listens on `address`, port 0 for any, alone.
    ///
    /// # Errors
    /// When somebody has the port, or the address is not to be had.
    pub fn alone(address: SocketAddr) -> Result<Self, BindError> {
        let mut one = Self::shared(address, 1)?;
        Ok(one.pop().expect("one was asked for"))
    }

    /// `count` sockets that listen on one `address`, port 0 for any; the kernel spreads the connections over them.
    /// Refused when any other process has the port: with SO_REUSEPORT alone, a second broker of the same user would
    /// silently take half the connections.
    ///
    /// # Errors
    /// When somebody has the port, or the address is not to be had.
    pub fn shared(address: SocketAddr, count: usize) -> Result<Vec<Self>, BindError> {
        let wrap = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { address },
            _ => BindError::Other { address, source },
        };
        let first = Self::bind(address, false).map_err(wrap)?;
        let mut all = vec![first];
        if count > 1 {
            // Allowed after the bind, and only sockets that have it join in: the first bind was the probe.
            all[0].socket.set_reuse_port(true).map_err(wrap)?;
            while all.len() < count {
                let next = Self::bind(all[0].address, true).map_err(wrap)?;
                all.push(next);
            }
        }
        for listener in &all {
            listener.socket.listen(BACKLOG).map_err(wrap)?;
        }
        Ok(all)
    }

    /// The same, waiting for a moment while somebody has the port: the ring of a process that was just killed keeps its
    /// listening sockets for some milliseconds after the process has gone.
    ///
    /// # Errors
    /// As [`BoundListener::shared`], when the moment is over.
    pub fn shared_soon(address: SocketAddr, count: usize) -> Result<Vec<Self>, BindError> {
        let begun = Instant::now();
        loop {
            match Self::shared(address, count) {
                Err(BindError::InUse { .. }) if begun.elapsed() < PORT_WAIT => thread::sleep(PORT_RETRY),
                bound => return bound,
            }
        }
    }

    fn bind(address: SocketAddr, reuse_port: bool) -> io::Result<Self> {
        // Blocking, since io_uring's accept gives up at once on a non-blocking one.
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.cloexec(), Some(Protocol::TCP))?;
        if address.is_ipv6() {
            // `[::]` takes IPv4 as well.
            socket.set_only_v6(false)?;
        }
        // For a restart while connections of the process before are in TIME_WAIT; a listening socket still refuses.
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(reuse_port)?;
        socket.bind(&address.into())?;
        let address = socket.local_addr()?.as_socket().unwrap_or(address);
        Ok(Self { socket, address })
    }

    /// Where it listens; never port 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Gives the socket to the executor of this thread.
    ///
    /// # Panics
    /// Outside a shard.
    #[must_use]
    pub fn start(self) -> Listener {
        Listener { listener: raw::listener_of(OwnedFd::from(self.socket)), address: self.address }
    }
}

/// A listening socket of this shard.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection. Waits a little and goes on when the process is out of descriptors or memory, and skips
    /// connections that are gone already. Dropping the future may lose a connection that was about to be accepted.
    ///
    /// # Errors
    /// When the listening socket itself is broken.
    pub async fn accept(&self) -> io::Result<Stream> {
        let mut backed_off = 0u64;
        loop {
            let error = match self.listener.accept().await {
                Ok(stream) => match Stream::new(stream) {
                    Ok(stream) => {
                        mark_busy();
                        return Ok(stream);
                    }
                    // The connection is gone again.
                    Err(_) => continue,
                },
                Err(error) => io_error(error),
            };
            match error.raw_os_error() {
                Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                    if backed_off.is_multiple_of(500) {
                        warn!(%error, address = %self.address, "can't accept connections: raise the limit of open files");
                    }
                    backed_off += 1;
                    sleep(ACCEPT_BACK_OFF).await;
                }
                Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP | libc::EFAULT) | None => {
                    return Err(error);
                }
                // The connection's own trouble, reported by accept; the next one may be fine.
                Some(_) => crate::runtime::yield_now().await,
            }
        }
    }
}

/// A connection, shared by the tasks of one shard: one of them may read while another writes.
#[derive(Clone, Debug)]
pub struct Stream {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Borrowed only inside a poll, never across an await.
    stream: RefCell<TcpStream>,
    peer: SocketAddr,
}

impl Stream {
    fn new(stream: TcpStream) -> io::Result<Self> {
        rustix::io::fcntl_setfd(stream.fd(), rustix::io::FdFlags::CLOEXEC)?;
        let fd = stream.fd();
        let socket = SockRef::from(&fd);
        socket.set_tcp_nodelay(true)?;
        socket.set_tcp_keepalive(
            &TcpKeepalive::new()
                .with_time(KEEPALIVE_IDLE)
                .with_interval(KEEPALIVE_INTERVAL)
                .with_retries(KEEPALIVE_PROBES),
        )?;
        let peer = socket.peer_addr()?.as_socket().ok_or(Errno::AFNOSUPPORT)?;
        Ok(Self { inner: Rc::new(Inner { stream: RefCell::new(stream), peer }) })
    }

    /// Connects to `address`.
    ///
    /// # Errors
    /// As connect(2).
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        Self::new(TcpStream::connect(address).await.map_err(io_error)?)
    }

    /// The other end.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.inner.peer
    }

    /// Waits for bytes and puts them at the start of `into`; gives their number, 0 at the end of the stream. Copied once,
    /// by the kernel. May be dropped: nothing is lost then. One task at a time.
    ///
    /// # Errors
    /// As recv(2).
    ///
    /// # Panics
    /// When `into` is empty, which would look like the end of the stream.
    pub async fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        assert!(!into.is_empty(), "reading into nothing looks like the end of the stream");
        let bytes = poll_fn(|cx| {
            let mut stream = self.inner.stream.borrow_mut();
            loop {
                match Pin::new(&mut *stream).poll_read(cx, into) {
                    std::task::Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                    other => return other,
                }
            }
        })
        .await?;
        mark_busy();
        Ok(bytes)
    }

    /// Sends as much of `slices` as the socket takes at once, in one system call; gives the number of bytes.
    /// At most 1024 slices are looked at.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes nothing: then await [`write`](Self::write). Else as sendmsg(2).
    pub fn try_send(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let stream = self.inner.stream.borrow();
        let slices = &slices[..slices.len().min(SLICES_MAX)];
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            match rustix::net::sendmsg(stream.fd(), slices, &mut SendAncillaryBuffer::default(), flags) {
                Ok(bytes) => {
                    mark_busy();
                    return Ok(bytes);
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Waits until the socket takes some of `bytes`; gives how many it took. One task at a time.
    ///
    /// # Errors
    /// As send(2).
    ///
    /// # Panics
    /// When `bytes` is empty, which no socket would ever wait for.
    pub async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        assert!(!bytes.is_empty(), "there is no waiting for room for nothing");
        let sent = poll_fn(|cx| {
            let mut stream = self.inner.stream.borrow_mut();
            loop {
                match Pin::new(&mut *stream).poll_write(cx, bytes) {
                    std::task::Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                    other => return other,
                }
            }
        })
        .await?;
        mark_busy();
        Ok(sent)
    }

    /// Sends all of `slices`, waiting as often as needed.
    ///
    /// # Errors
    /// As sendmsg(2); then part of the bytes may have been sent.
    pub async fn send_all(&self, slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut rest = slices;
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            let sent = match self.try_send(rest) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.write(&rest[0]).await?,
                sent => sent?,
            };
            IoSlice::advance_slices(&mut rest, sent);
        }
        Ok(())
    }

    /// Ends one or both directions at once; a task that waits to read or write then wakes up. Errors mean that the
    /// connection is gone already.
    pub fn shutdown(&self, how: Shutdown) {
        let stream = self.inner.stream.borrow();
        let fd = stream.fd();
        let _ = SockRef::from(&fd).shutdown(how);
    }
}

#[cfg(test)]
mod tests;
