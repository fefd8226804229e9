//! Load: clients that produce batches as fast as their acks come back.
//!
//! A [`Load`] has `threads` threads, each with a tokio runtime of one thread and its share of the clients. A client has
//! one connection to each shard that it needs, and `in_flight` lanes; a lane is a closed loop: build a batch, send it, wait
//! for its ack, go on with the client's next partition. So 1 lane is a producer that waits for each ack, and more lanes
//! are one that pipelines. A client goes round its partitions; when there are more partitions than clients, each
//! partition has one producer, else clients share them.
//!
//! A batch that the broker refuses is counted and not sent again: its records carry numbers that are then known not to
//! be there. The lane waits as long as the broker asks and goes on with new records.

mod client;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ringmain_core::codec::Codec;
use ringmain_core::ids::Durability;
use ringmain_core::limits::{BATCH_BYTES_MAX, BATCH_RECORDS_MAX, CONNECTION_BYTES_MAX, CONNECTION_REQUESTS_MAX};
use tokio::sync::{mpsc, oneshot};

use crate::cluster::Target;
use crate::histogram::Latencies;
use crate::payload::{Payload, STAMP_BYTES};
use crate::verify::PartitionLedger;

/// Bytes of a batch beyond its values: header, table, and 20 for each record.
const BATCH_OVERHEAD_BYTES: usize = 256;
const RECORD_OVERHEAD_BYTES: usize = 20;

/// How much each client sends at once, and how safe it is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Bytes of a record's value.
    pub size: usize,
    /// Records in a batch.
    pub batch: usize,
    /// Clients.
    pub clients: usize,
    /// Requests that a client has under way at once.
    pub in_flight: usize,
    /// Threads that the clients run on.
    pub threads: usize,
    /// Level to wait for.
    pub durability: Durability,
    /// How batches are compressed.
    pub codec: Codec,
}

/// What all clients of a load have in common. Immutable.
pub(crate) struct LoadPlan {
    /// Makes the record values.
    pub payload: Payload,
    /// Where records go.
    pub targets: Vec<Target>,
    /// Address of each shard.
    pub addresses: Vec<String>,
    /// How much at once, and how safe.
    pub shape: Shape,
    /// Set from outside: the load ends early.
    pub stop: Arc<AtomicBool>,
}

/// When a run of the load ends.
#[derive(Clone, Debug)]
pub(crate) enum Limit {
    /// After so long.
    Time(Duration),
    /// When so many batches were sent by all clients together.
    Batches(u64),
}

/// What a run of the load did.
#[derive(Debug, Default)]
pub(crate) struct LoadResult {
    /// Records acked.
    pub records: u64,
    /// Requests acked.
    pub requests: u64,
    /// Requests that the broker refused.
    pub refused: u64,
    /// Requests of unknown fate: timed out, or the connection was lost.
    pub unknown: u64,
    /// Time of each acked request, from send to ack.
    pub latencies: Latencies,
    /// From the first send to the last ack.
    pub seconds: f64,
}

/// What one client knows of one partition, at the end.
pub(crate) struct ClientLedger {
    /// Index of the client.
    pub producer: u32,
    /// Index of the target.
    pub target: usize,
    /// What was acked, refused, unknown.
    pub ledger: PartitionLedger,
}

/// One run, as its threads see it.
#[derive(Debug)]
struct Run {
    started: Instant,
    until: Option<Instant>,
    batches_left: Option<AtomicU64>,
}

enum Command {
    Run(Arc<Run>, oneshot::Sender<Result<LoadResult>>),
    Finish(oneshot::Sender<Vec<ClientLedger>>),
}

/// Started clients.
pub(crate) struct Load {
    threads: Vec<(mpsc::UnboundedSender<Command>, JoinHandle<()>)>,
}

impl Shape {
    /// Fails when the broker would refuse every request of this shape, and says what to change.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(self.size >= STAMP_BYTES, "size must be at least {STAMP_BYTES}: each record says who sent it and when");
        ensure!((1..=BATCH_RECORDS_MAX).contains(&self.batch), "batch must be 1 to {BATCH_RECORDS_MAX} records");
        ensure!(self.clients >= 1 && self.threads >= 1, "there must be a client and a thread");
        ensure!(
            (1..=CONNECTION_REQUESTS_MAX).contains(&self.in_flight),
            "in_flight must be 1 to {CONNECTION_REQUESTS_MAX}"
        );
        let batch_bytes = self.batch.saturating_mul(self.size + RECORD_OVERHEAD_BYTES) + BATCH_OVERHEAD_BYTES;
        if batch_bytes > BATCH_BYTES_MAX {
            let most = (BATCH_BYTES_MAX - BATCH_OVERHEAD_BYTES) / (self.size + RECORD_OVERHEAD_BYTES);
            bail!("{} records of {} bytes are too much for a batch: at most {most} fit", self.batch, self.size);
        }
        if batch_bytes * self.in_flight > CONNECTION_BYTES_MAX {
            bail!(
                "{} requests of {batch_bytes} bytes are more than the {CONNECTION_BYTES_MAX} bytes that a connection \
                 may have in flight: lower in_flight or batch",
                self.in_flight
            );
        }
        Ok(())
    }
}

impl Load {
    /// Starts the threads; clients connect when they first need to.
    pub(crate) fn start(plan: &Arc<LoadPlan>) -> Result<Self> {
        let mut threads = Vec::new();
        for index in 0..plan.shape.threads.min(plan.shape.clients) {
            let (commands, receiver) = mpsc::unbounded_channel();
            let plan = Arc::clone(plan);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let thread = std::thread::Builder::new().name(format!("bench-load-{index}")).spawn(move || {
                let local = tokio::task::LocalSet::new();
                local.block_on(&runtime, serve(index, plan, receiver));
            })?;
            threads.push((commands, thread));
        }
        Ok(Self { threads })
    }

    /// Lets all clients produce until `limit`, and waits for their last acks.
    pub(crate) async fn run(&self, limit: Limit) -> Result<LoadResult> {
        let started = Instant::now();
        let run = Arc::new(match limit {
            Limit::Time(time) => Run { started, until: Some(started + time), batches_left: None },
            Limit::Batches(batches) => Run { started, until: None, batches_left: Some(AtomicU64::new(batches)) },
        });
        let mut answers = Vec::new();
        for (commands, _) in &self.threads {
            let (sender, answer) = oneshot::channel();
            // A thread that is gone does not answer, which is found below.
            let _ = commands.send(Command::Run(Arc::clone(&run), sender));
            answers.push(answer);
        }
        let mut total = LoadResult::default();
        let mut failed = None;
        for answer in answers {
            match answer.await.context("a load thread is gone")? {
                Ok(result) => total.add(&result),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(total), Err)
    }

    /// Ends all clients: what they know of the partitions.
    pub(crate) async fn finish(self) -> Result<Vec<ClientLedger>> {
        let mut ledgers = Vec::new();
        for (commands, thread) in self.threads {
            let (sender, answer) = oneshot::channel();
            let _ = commands.send(Command::Finish(sender));
            ledgers.extend(answer.await.context("a load thread is gone")?);
            if thread.join().is_err() {
                bail!("a load thread panicked");
            }
        }
        Ok(ledgers)
    }
}

impl LoadResult {
    fn add(&mut self, other: &Self) {
        self.records += other.records;
        self.requests += other.requests;
        self.refused += other.refused;
        self.unknown += other.unknown;
        self.latencies.merge(&other.latencies);
        self.seconds = self.seconds.max(other.seconds);
    }
}

impl Run {
    /// Whether a lane may send one more batch.
    fn goes_on(&self, stop: &AtomicBool) -> bool {
        if stop.load(Ordering::Relaxed) || self.until.is_some_and(|until| Instant::now() >= until) {
            return false;
        }
        let Some(left) = &self.batches_left else { return true };
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }
}

/// A load thread: its clients live here from the first command to the last.
async fn serve(thread: usize, plan: Arc<LoadPlan>, mut commands: mpsc::UnboundedReceiver<Command>) {
    let own = (thread..plan.shape.clients).step_by(plan.shape.threads);
    let clients: Vec<_> = own.map(|index| client::Client::new(index, &plan)).collect();
    while let Some(command) = commands.recv().await {
        match command {
            Command::Run(run, answer) => {
                let _ = answer.send(client::run(&clients, &run).await);
            }
            Command::Finish(answer) => {
                let _ = answer.send(clients.iter().flat_map(|client| client.ledgers()).collect());
                return;
            }
        }
    }
}
