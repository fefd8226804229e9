//! What every HTTP port of Ringmain shares: a bounded number of connections, idle ones closed, an orderly stop.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::serve::Listener;
use ringmain_core::limits::{ADMIN_IDLE_TIMEOUT_MS, HTTP_BODY_BYTES_MAX, HTTP_CONNECTIONS_MAX};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, timeout};

/// After this pause accepting is tried again when the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A stop waits so long for answers that are on their way.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// Serves `router` until `stop` changes.
pub(crate) async fn serve(listener: TcpListener, router: Router, stop: watch::Receiver<bool>) {
    let listener = BoundedListener { listener, places: Arc::new(Semaphore::new(HTTP_CONNECTIONS_MAX)) };
    let router = router.layer(DefaultBodyLimit::max(HTTP_BODY_BYTES_MAX));
    let mut stopping = stop.clone();
    let serving = axum::serve(listener, router).with_graceful_shutdown(wait_for(stop));
    tokio::select! {
        // It never fails: accept errors are handled below.
        _ = serving => {}
        () = async { wait_for_ref(&mut stopping).await; sleep(STOP_GRACE).await } => {}
    }
}

async fn wait_for(mut stop: watch::Receiver<bool>) {
    wait_for_ref(&mut stop).await;
}

async fn wait_for_ref(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop as well.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Accepts no more connections than there are places; the others wait in the kernel's queue.
struct BoundedListener {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl Listener for BoundedListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            let place = Arc::clone(&self.places).acquire_owned().await.expect("this semaphore is never closed");
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let idle = Duration::from_millis(ADMIN_IDLE_TIMEOUT_MS);
                    return (Connection::new(stream, idle, place), peer);
                }
                Err(error) => {
                    tracing::warn!("HTTP port can't accept: {error}");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A stream that fails when a request does not come whole, or an answer is not taken, for a while; holds its place until it
/// is dropped.
struct Connection {
    stream: TcpStream,
    idle: Duration,
    deadline: Pin<Box<Sleep>>,
    /// Nothing of the next request has come: its first bytes move the deadline, and no later ones do. Who sends a byte now
    /// and then must not hold a place for ever.
    is_between: bool,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    fn new(stream: TcpStream, idle: Duration, place: OwnedSemaphorePermit) -> Self {
        Self { stream, idle, deadline: Box::pin(sleep(idle)), is_between: true, _place: place }
    }

    fn move_deadline(&mut self) {
        let deadline = Instant::now() + self.idle;
        self.deadline.as_mut().reset(deadline);
    }

    /// What has not come in time fails.
    fn in_time<T>(&mut self, context: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            return poll;
        }
        self.deadline.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let poll = Pin::new(&mut this.stream).poll_read(context, into);
        if poll.is_ready() && std::mem::replace(&mut this.is_between, false) {
            this.move_deadline();
        }
        this.in_time(context, poll)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let poll = Pin::new(&mut this.stream).poll_write(context, bytes);
        if poll.is_ready() {
            this.is_between = true;
            this.move_deadline();
        }
        this.in_time(context, poll)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

/// Binds one address of `address` (`HOST:PORT`, port 0 = any free one).
pub(crate) async fn bind(what: &'static str, address: &str) -> Result<TcpListener, ListenError> {
    let error = |source| ListenError { what, address: address.to_owned(), source };
    let bound = timeout(Duration::from_secs(10), TcpListener::bind(address)).await;
    bound.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(error)
}

/// A port can't be listened on.
#[derive(Debug, thiserror::Error)]
#[error("can't listen on {address} for {what}: {source}; {}", advice(source))]
pub struct ListenError {
    what: &'static str,
    address: String,
    source: io::Error,
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "stop the process that has it, or choose another port (0 = any free one)",
        io::ErrorKind::PermissionDenied => "choose a port from 1024",
        io::ErrorKind::AddrNotAvailable => "choose an address of this machine",
        _ => "an address is HOST:PORT, such as 127.0.0.1:8080",
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn a_request_that_comes_byte_by_byte_ends_in_time() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let mut client = TcpStream::connect(address).await.expect("it listens");
        let (stream, _) = listener.accept().await.expect("somebody came");
        let place = Arc::new(Semaphore::new(1)).acquire_owned().await.expect("it is open");
        let mut connection = Connection::new(stream, Duration::from_millis(200), place);
        let dribble = tokio::spawn(async move {
            // Far more often than the connection may be idle, until it is closed.
            while client.write_all(b"x").await.is_ok() {
                sleep(Duration::from_millis(10)).await;
            }
        });
        let mut into = [0; 16];
        let error = loop {
            match connection.read(&mut into).await {
                Ok(read) => assert!(read > 0, "the client does not close"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(connection);
        dribble.await.expect("it ends with the connection");
    }
}
