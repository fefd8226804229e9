//! One connection: any number of requests under way at once, paired with their responses by correlation id.
//!
//! A writer task sends heads and payloads with vectored writes, several requests at a time when they come faster than the
//! socket takes them; a reader task cuts the stream into frames, whose payloads are handed out without a copy. The
//! connection is shared by cloning; when the last clone and the last pending response are gone, it is closed.
//! Requests and their bytes under way are limited by what the server said in its hello.
//!
//! A connection that ends while requests wait is reset, not closed: what the kernel still holds of them must not reach the
//! server when its answer goes nowhere and the caller may have sent the same on another connection.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::client::error::ClientError;
use crate::client::stream::{Outgoing, ReadError, WRITE_SLICES, enqueue, read_frame, write_some};
use crate::frame::{FRAME_PREFIX_BYTES, FrameEncoder, FrameView};
use crate::hello::{FEATURES, HelloRequest, HelloResponse, PROTOCOL_VERSION};
use crate::message::{Request, Response};

/// How often overdue requests are looked for.
const WATCH_EVERY: Duration = Duration::from_millis(100);
/// What a head is reckoned with before it is encoded.
const HEAD_BYTES: usize = 512;

/// How to connect.
#[derive(Clone, Debug)]
pub struct ConnectionConfig {
    /// Name that the server's logs show.
    pub client_name: String,
    /// How long TCP connect and hello may take.
    pub connect_timeout: Duration,
    /// A request without its own time must be answered within this; else the connection is given up.
    pub request_timeout: Duration,
}

impl Default for ConnectionConfig {
    fn default() -> Self {
        let client_name = concat!("ringmain-rust/", env!("CARGO_PKG_VERSION")).to_owned();
        Self { client_name, connect_timeout: Duration::from_secs(5), request_timeout: Duration::from_secs(30) }
    }
}

/// A response with its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedFrame {
    /// The id of the request it answers.
    pub correlation_id: u64,
    /// The message.
    pub response: Response,
    /// The batches behind it; shares the memory that the socket was read into.
    pub payload: Bytes,
}

impl OwnedFrame {
    /// Turns an error response into an error.
    pub fn into_result(self) -> Result<Self, ClientError> {
        match self.response {
            Response::Error(error) => Err(error.into()),
            _ => Ok(self),
        }
    }

    pub(crate) fn parse(frame: &Bytes) -> Result<(u64, Result<Self, ClientError>), ClientError> {
        let view = FrameView::parse_response(frame)?;
        let correlation_id = view.correlation_id();
        let payload = frame.slice(frame.len() - view.payload.len()..);
        let response = Response::decode(&view.message);
        let owned = response.map(|response| Self { correlation_id, response, payload }).map_err(ClientError::from);
        Ok((correlation_id, owned))
    }
}

/// A connection to one port of a broker or master.
#[derive(Clone)]
pub struct Connection {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    server: HelloResponse,
    request_timeout: Duration,
    next_id: AtomicU64,
    encoder: Mutex<FrameEncoder>,
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    outgoing: mpsc::UnboundedSender<Outgoing>,
    tasks: [AbortHandle; 2],
}

impl Drop for Inner {
    fn drop(&mut self) {
        // One that has ended has told its tasks so: they let go of the socket themselves.
        if !*self.shared.closed.borrow() {
            for task in &self.tasks {
                task.abort();
            }
        }
    }
}

/// What the tasks and the callers share.
struct Shared {
    address: String,
    waiters: Mutex<Waiters>,
    closed: watch::Sender<bool>,
}

#[derive(Default)]
struct Waiters {
    by_id: HashMap<u64, Waiter>,
    /// Why the connection has ended.
    ended: Option<ClientError>,
    /// It ended while requests waited.
    abandoned: bool,
}

struct Waiter {
    answer: oneshot::Sender<Result<OwnedFrame, ClientError>>,
    overdue_at: Instant,
    /// Given back with the answer: until then the server counts the request as under way, wanted or not.
    _permits: [OwnedSemaphorePermit; 2],
}

impl Connection {
    /// Connects to `address` (`host:port`) and exchanges hellos.
    pub async fn connect(address: &str, config: &ConnectionConfig) -> Result<Self, ClientError> {
        let failed = |reason: String| ClientError::Connect { address: address.to_owned(), reason };
        let attempt = async {
            let mut stream = TcpStream::connect(address).await.map_err(|error| failed(error.to_string()))?;
            // On one machine, a port of the ephemeral range that nobody listens on may be given to the very socket that tries
            // to reach it; it would then keep the broker from its port.
            if stream.local_addr().ok() == stream.peer_addr().ok() {
                return Err(failed("nobody listens there".to_owned()));
            }
            stream.set_nodelay(true).map_err(|error| failed(error.to_string()))?;
            let mut buffer = BytesMut::new();
            let server = exchange_hellos(&mut stream, &mut buffer, address, &config.client_name).await?;
            Ok::<_, ClientError>((stream, buffer, server))
        };
        let (stream, buffer, server) = tokio::time::timeout(config.connect_timeout, attempt)
            .await
            .map_err(|_| failed(format!("no answer within {:?}", config.connect_timeout)))??;
        Ok(Self::over(stream, buffer, server, address, config))
    }

    fn over(
        stream: TcpStream,
        buffer: BytesMut,
        server: HelloResponse,
        address: &str,
        config: &ConnectionConfig,
    ) -> Self {
        let (waiters, closed) = (Mutex::default(), watch::Sender::new(false));
        let shared = Arc::new(Shared { address: address.to_owned(), waiters, closed });
        let (outgoing, queue) = mpsc::unbounded_channel();
        let (read_half, write_half) = stream.into_split();
        let reader = tokio::spawn(run_reader(read_half, buffer, Arc::clone(&shared)));
        let writer = tokio::spawn(run_writer(write_half, queue, Arc::clone(&shared)));
        // A limit of 0 would never let a request out.
        let requests = server.limits.connection_requests_max.max(1) as usize;
        let bytes = server.limits.connection_bytes_max.max(1) as usize;
        let inner = Inner {
            shared,
            server,
            request_timeout: config.request_timeout,
            next_id: AtomicU64::new(1),
            encoder: Mutex::default(),
            requests: Arc::new(Semaphore::new(requests.min(Semaphore::MAX_PERMITS))),
            bytes: Arc::new(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS))),
            outgoing,
            tasks: [reader.abort_handle(), writer.abort_handle()],
        };
        Self { inner: Arc::new(inner) }
    }

    /// What the server said of itself.
    #[must_use]
    pub fn server(&self) -> &HelloResponse {
        &self.inner.server
    }

    /// Where it goes to.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.inner.shared.address
    }

    /// Whether it has ended, and can't be used any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        *self.inner.shared.closed.borrow()
    }

    /// Sends a request with its payload and waits for the response. An error response is a response here; see
    /// [`OwnedFrame::into_result`].
    pub async fn request(&self, request: &Request, payload: Vec<Bytes>) -> Result<OwnedFrame, ClientError> {
        self.start(request, payload, self.inner.request_timeout).await?.await
    }

    /// Waits until the limits let the request out and queues it; then gives what waits for the response. Requests that one
    /// task starts one after the other are sent in that order. When there is no response within `timeout` the connection
    /// is given up, and all that wait on it fail: a server that is so late may be anything.
    pub async fn start(
        &self,
        request: &Request,
        payload: Vec<Bytes>,
        timeout: Duration,
    ) -> Result<PendingResponse, ClientError> {
        let inner = &*self.inner;
        let payload_bytes: usize = payload.iter().map(Bytes::len).sum();
        // One request may be larger than the limit for all: it then goes out alone.
        let bytes = (payload_bytes + HEAD_BYTES).min(inner.server.limits.connection_bytes_max.max(1) as usize);
        let permits = async {
            let request_permit = Arc::clone(&inner.requests).acquire_owned().await?;
            let bytes_permit = Arc::clone(&inner.bytes).acquire_many_owned(bytes as u32).await?;
            Ok::<_, tokio::sync::AcquireError>([request_permit, bytes_permit])
        };
        let mut closed = inner.shared.closed.subscribe();
        let permits = tokio::select! {
            biased;
            permits = permits => permits.map_err(|_| inner.shared.reason())?,
            _ = closed.wait_for(|closed| *closed) => return Err(inner.shared.reason()),
        };

        let correlation_id = inner.next_id.fetch_add(1, Ordering::Relaxed);
        let mut head = Vec::with_capacity(128);
        request.encode(&mut locked(&inner.encoder), correlation_id, payload_bytes, &mut head);
        let frame_bytes = head.len() - FRAME_PREFIX_BYTES + payload_bytes;
        let frame_bytes_max = inner.server.limits.frame_bytes_max as usize;
        if frame_bytes > frame_bytes_max {
            let message = format!("frame of {frame_bytes} bytes, the server takes {frame_bytes_max}");
            return Err(ClientError::server(crate::ErrorCode::TOO_LARGE, message.into(), 0));
        }
        let (answer, response) = oneshot::channel();
        let waiter = Waiter { answer, overdue_at: Instant::now() + timeout, _permits: permits };
        {
            let mut waiters = locked(&inner.shared.waiters);
            if let Some(ended) = &waiters.ended {
                return Err(ended.clone());
            }
            waiters.by_id.insert(correlation_id, waiter);
        }
        if inner.outgoing.send(Outgoing { head, payload }).is_err() {
            return Err(inner.shared.reason());
        }
        Ok(PendingResponse { response, connection: self.clone() })
    }

    /// Ends the connection; whatever waits on it fails.
    pub fn close(&self) {
        self.inner.shared.end("closed by this client".to_owned());
    }
}

/// Waits for the response to one request. Dropping it does not take the request back.
pub struct PendingResponse {
    response: oneshot::Receiver<Result<OwnedFrame, ClientError>>,
    connection: Connection,
}

impl Future for PendingResponse {
    type Output = Result<OwnedFrame, ClientError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.response).poll(context));
        Poll::Ready(answer.unwrap_or_else(|_| Err(self.connection.inner.shared.reason())))
    }
}

impl Shared {
    fn lost(&self, reason: String) -> ClientError {
        ClientError::ConnectionLost { address: self.address.clone(), reason }
    }

    fn reason(&self) -> ClientError {
        locked(&self.waiters).ended.clone().unwrap_or_else(|| self.lost("its tasks have ended".to_owned()))
    }

    fn end(&self, reason: String) {
        self.end_with(self.lost(reason));
    }

    /// Marks the connection as ended, for the first reason given, and fails all who wait.
    fn end_with(&self, error: ClientError) {
        let waiting = {
            let mut waiters = locked(&self.waiters);
            waiters.ended.get_or_insert_with(|| error.clone());
            waiters.abandoned |= !waiters.by_id.is_empty();
            std::mem::take(&mut waiters.by_id)
        };
        self.closed.send_replace(true);
        for waiter in waiting.into_values() {
            // Whoever waited may have gone.
            let _ = waiter.answer.send(Err(error.clone()));
        }
    }

    /// Has the socket reset instead of closed when it is dropped, if requests waited when the connection ended; tells
    /// whether they did.
    fn reset_if_abandoned(&self, stream: &TcpStream) -> bool {
        let abandoned = locked(&self.waiters).abandoned;
        if abandoned {
            // A socket that can't be told so is closed.
            let _ = stream.set_zero_linger();
        }
        abandoned
    }

    fn answer(&self, frame: &Bytes) -> Result<(), ClientError> {
        let (correlation_id, answer) = OwnedFrame::parse(frame)?;
        let Some(waiter) = locked(&self.waiters).by_id.remove(&correlation_id) else {
            return Err(ClientError::Protocol(format!("response to request {correlation_id}, which does not wait")));
        };
        let _ = waiter.answer.send(answer);
        Ok(())
    }

    fn overdue(&self, now: Instant) -> bool {
        locked(&self.waiters).by_id.values().any(|waiter| waiter.overdue_at <= now)
    }
}

/// A poisoned lock means a panic elsewhere; the maps behind these locks are whole at any time.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn exchange_hellos(
    stream: &mut TcpStream,
    buffer: &mut BytesMut,
    address: &str,
    client_name: &str,
) -> Result<HelloResponse, ClientError> {
    let failed = |reason: String| ClientError::Connect { address: address.to_owned(), reason };
    let hello = Request::Hello(HelloRequest {
        protocol_version: PROTOCOL_VERSION,
        features: FEATURES,
        client_name: client_name.to_owned(),
        ..HelloRequest::default()
    });
    stream.write_all(&hello.to_frame(0)).await.map_err(|error| failed(error.to_string()))?;
    let frame = read_frame(stream, buffer).await.map_err(|error| match error {
        ReadError::Io(reason) => failed(reason),
        ReadError::Protocol(error) => error,
    })?;
    match OwnedFrame::parse(&frame)?.1?.into_result()?.response {
        Response::Hello(server) if (1..=PROTOCOL_VERSION).contains(&server.protocol_version) => Ok(server),
        Response::Hello(server) => {
            Err(ClientError::Protocol(format!("protocol version {} was not offered", server.protocol_version)))
        }
        other => Err(ClientError::unexpected("hello", &other)),
    }
}

async fn run_reader(mut stream: OwnedReadHalf, mut buffer: BytesMut, shared: Arc<Shared>) {
    let mut closed = shared.closed.subscribe();
    let reading = async {
        loop {
            let answered = match read_frame(&mut stream, &mut buffer).await {
                Ok(frame) => shared.answer(&frame),
                Err(ReadError::Io(reason)) => Err(shared.lost(reason)),
                Err(ReadError::Protocol(error)) => Err(error),
            };
            if let Err(error) = answered {
                break error;
            }
        }
    };
    let watching = async {
        loop {
            tokio::time::sleep(WATCH_EVERY).await;
            if shared.overdue(Instant::now()) {
                break shared.lost("a request was not answered in time".to_owned());
            }
        }
    };
    let error = tokio::select! {
        error = reading => Some(error),
        error = watching => Some(error),
        _ = closed.wait_for(|closed| *closed) => None,
    };
    if let Some(error) = error {
        shared.end_with(error);
    }
    shared.reset_if_abandoned(stream.as_ref());
}

async fn run_writer(mut stream: OwnedWriteHalf, mut queue: mpsc::UnboundedReceiver<Outgoing>, shared: Arc<Shared>) {
    let mut closed = shared.closed.subscribe();
    let writing = async {
        let mut slices: VecDeque<Bytes> = VecDeque::new();
        loop {
            if slices.is_empty() {
                let Some(outgoing) = queue.recv().await else { return Ok(()) };
                enqueue(&mut slices, outgoing);
            }
            while slices.len() < WRITE_SLICES
                && let Ok(outgoing) = queue.try_recv()
            {
                enqueue(&mut slices, outgoing);
            }
            write_some(&mut stream, &mut slices).await?;
        }
    };
    let written: std::io::Result<()> = tokio::select! {
        written = writing => written,
        _ = closed.wait_for(|closed| *closed) => Ok(()),
    };
    if let Err(error) = written {
        shared.end(error.to_string());
    }
    if shared.reset_if_abandoned(stream.as_ref()) {
        // Dropped, this half would end the sending side in order, and what is buffered would still go out.
        stream.forget();
    }
}
