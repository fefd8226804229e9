//! The master as one thing to start, wire and stop.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use ringmain_core::limits::ADMIN_REQUESTS_MAX;
use ringmain_wire::ErrorCode;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::frames::{Handled, Stage, error_frame, handle};
use crate::http_server::{self, ListenError, bind};
use crate::link::BrokerLink;
use crate::runtime::control_runtime;
use crate::store::{NewStore, OpenError};
use crate::topic::{Reconciled, ServiceError, TopicService};
use crate::{http_api, listener};

/// How often changes that the broker still owes are repeated.
const REPAIR_EVERY: Duration = Duration::from_secs(5);

/// Where a master listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MasterAddresses {
    /// Frames.
    pub frames: SocketAddr,
    /// HTTP API and console.
    pub http: SocketAddr,
}

/// A running master. Owns its thread and, through the topic service, the store. Its ports answer from the start; changes
/// are taken once a broker is attached.
pub struct Master {
    service: Arc<TopicService>,
    runtime: Handle,
    addresses: MasterAddresses,
    /// Bounds the frames that brokers have submitted and that are not answered yet.
    submitted: Arc<Semaphore>,
    stop: watch::Sender<bool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Why a master does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its store can't be opened.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// A port can't be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
}

impl Master {
    /// Opens the store at `store_path`, or makes it as `new` says, and serves frames on `listen` and HTTP on `http` (`HOST:PORT`, port 0 = any free one).
    pub fn start(store_path: &Path, new: NewStore, listen: &str, http: &str) -> Result<Self, StartError> {
        let runtime = control_runtime("ringmain-master");
        // Ports first: a second process on them must not touch the store.
        let frames_listener = runtime.block_on(bind("the master", listen))?;
        let http_listener = runtime.block_on(bind("the master's API and console", http))?;
        let address = |listener: &TcpListener| listener.local_addr().expect("a bound listener has an address");
        let addresses = MasterAddresses { frames: address(&frames_listener), http: address(&http_listener) };
        let service = Arc::new(TopicService::open(store_path, new)?);
        let (stop, stopping) = watch::channel(false);
        let handle = runtime.handle().clone();
        let serving = Arc::clone(&service);
        let thread = std::thread::Builder::new()
            .name("ringmain-master".to_owned())
            .spawn(move || {
                runtime.block_on(async {
                    let mut parts = JoinSet::new();
                    parts.spawn(listener::serve(frames_listener, Arc::clone(&serving), stopping.clone()));
                    let router = http_api::router(Arc::clone(&serving));
                    parts.spawn(http_server::serve(http_listener, router, stopping.clone()));
                    parts.spawn(repair(serving, stopping));
                    while parts.join_next().await.is_some() {}
                });
            })
            .expect("the system can start one more thread");
        let submitted = Arc::new(Semaphore::new(ADMIN_REQUESTS_MAX));
        Ok(Self { service, runtime: handle, addresses, submitted, stop, thread: Mutex::new(Some(thread)) })
    }

    /// Where it listens.
    #[must_use]
    pub const fn addresses(&self) -> MasterAddresses {
        self.addresses
    }

    /// Random name of the cluster, made with the store.
    #[must_use]
    pub fn cluster_id(&self) -> u64 {
        self.service.cluster_id()
    }

    /// Takes the broker and brings it and the store in step; from then on changes are taken. Blocks until the broker has
    /// answered; not for async code.
    pub fn attach(&self, link: Arc<dyn BrokerLink>) -> Result<Reconciled, ServiceError> {
        let (sender, attached) = mpsc::channel();
        let service = Arc::clone(&self.service);
        self.runtime.spawn(async move {
            let _ = sender.send(service.attach(link).await);
        });
        attached.recv().unwrap_or(Err(ServiceError::NoBroker))
    }

    /// Answers a request frame that arrived at a broker, on the master's thread; `reply` gets a whole frame. Never blocks.
    pub fn submit(&self, frame: Vec<u8>, reply: Box<dyn FnOnce(Vec<u8>) + Send>) {
        let Ok(place) = Arc::clone(&self.submitted).try_acquire_owned() else {
            let correlation_id = ringmain_wire::FrameView::parse(&frame).map_or(0, |view| view.correlation_id());
            return reply(error_frame(correlation_id, ErrorCode::SERVER_BUSY, ServiceError::Busy.to_string()));
        };
        let service = Arc::clone(&self.service);
        self.runtime.spawn(async move {
            let _place = place;
            let (Handled::Reply(answer) | Handled::ReplyAndClose(answer)) =
                handle(&service, &frame, &mut Stage::Greeted).await;
            reply(answer);
        });
    }

    /// Finishes the requests that are being answered, closes ports and store. To be called before the broker stops.
    /// The second call finds nothing to do.
    pub fn stop(&self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // A panic is reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Repeats what the broker owes, while there is something.
async fn repair(service: Arc<TopicService>, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(REPAIR_EVERY) => {}
            _ = stop.changed() => return,
        }
        // Without a broker there is nobody to repair.
        if service.broker().is_some() && service.owes() {
            let report = service.repair().await;
            tracing::info!(
                put = report.put,
                deleted = report.deleted,
                failed = report.failed,
                "repeated changes to the broker"
            );
        }
    }
}
