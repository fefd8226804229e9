//! `/metrics`, `/healthz` and `/readyz` of a process, on a thread of their own: a probe must answer while the rest is busy.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};

use crate::http_server::{ListenError, bind, serve};
use crate::runtime::control_runtime;

/// Reports made at once: each may wait for the shards.
const REPORTS_MAX: usize = 4;

/// A report as JSON and whether it is good.
pub type Report = (bool, Value);

/// Where the answers come from. Called on a thread that may block.
pub struct ProbeSources {
    /// All metrics in Prometheus text format.
    pub metrics: Box<dyn Fn() -> String + Send + Sync>,
    /// Whether the process works at all; if not, it should be restarted.
    pub health: Box<dyn Fn() -> Report + Send + Sync>,
    /// Whether clients should be sent here.
    pub ready: Box<dyn Fn() -> Report + Send + Sync>,
}

struct Probes {
    sources: ProbeSources,
    places: Semaphore,
}

/// A running probe port. Dropping it without [`ProbeServer::stop`] leaves it running.
#[derive(Debug)]
pub struct ProbeServer {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
}

impl ProbeServer {
    /// Listens on `address` (`HOST:PORT`, port 0 = any free one).
    pub fn start(address: &str, sources: ProbeSources) -> Result<Self, ListenError> {
        let runtime = control_runtime("ringmain-probe");
        let listener = runtime.block_on(bind("metrics and probes", address))?;
        let address = listener.local_addr().expect("a bound listener has an address");
        let probes = Arc::new(Probes { sources, places: Semaphore::new(REPORTS_MAX) });
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(health))
            .route("/readyz", get(ready))
            .with_state(probes);
        let (stop, stopping) = watch::channel(false);
        let thread = std::thread::Builder::new()
            .name("ringmain-probe".to_owned())
            .spawn(move || runtime.block_on(serve(listener, router, stopping)))
            .expect("the system can start one more thread");
        Ok(Self { address, stop, thread })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers what is on its way, then ends.
    pub fn stop(self) {
        self.stop.send_replace(true);
        // A panic has aborted the process or is reported by the thread itself.
        let _ = self.thread.join();
    }
}

async fn metrics(State(probes): State<Arc<Probes>>) -> Response {
    match report(&probes, |sources| (sources.metrics)()).await {
        Some(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response(),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

async fn health(State(probes): State<Arc<Probes>>) -> Response {
    answer(report(&probes, |sources| (sources.health)()).await)
}

async fn ready(State(probes): State<Arc<Probes>>) -> Response {
    answer(report(&probes, |sources| (sources.ready)()).await)
}

async fn report<T: Send + 'static>(
    probes: &Arc<Probes>,
    ask: impl FnOnce(&ProbeSources) -> T + Send + 'static,
) -> Option<T> {
    let _place = probes.places.acquire().await.ok()?;
    let probes = Arc::clone(probes);
    tokio::task::spawn_blocking(move || ask(&probes.sources)).await.ok()
}

fn answer(report: Option<Report>) -> Response {
    let (good, body) = report.unwrap_or_else(|| (false, json!({ "error": "the report failed" })));
    let status = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, axum::Json(body)).into_response()
}
