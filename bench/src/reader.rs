//! Consumers for measurement: each reads all partitions of a run, over one connection per shard, checks every batch as a
//! client has to (bounds, stamp, CRC, structure), and keeps what [`crate::verify`] needs.
//!
//! A lane fetches up to 256 partitions of one shard, one fetch at a time; a consumer has as many lanes as it takes to
//! cover its partitions. A partition is done when its end is known and reached; a lane ends when all of its are.

mod lane;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use ringmain_core::limits::FETCH_PARTITIONS_MAX;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use crate::cluster::{self, Target};
use crate::histogram::Latencies;
use crate::payload::Payload;
use crate::verify::ReadBack;

/// Which time the latencies are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timed {
    /// From sending a fetch to its answer, where records came.
    Fetch,
    /// From building a record's batch to having it in hand: for runs that produce at the same time.
    Record,
}

/// What all consumers of a run have in common.
pub(crate) struct ReadPlan {
    /// What to read.
    pub targets: Vec<Target>,
    /// From which offset on, by target.
    pub starts: Vec<u64>,
    /// Up to which offset, by target; set when it is known.
    pub ends: OnceLock<Vec<u64>>,
    /// Address of each shard.
    pub addresses: Vec<String>,
    /// Consumers; each reads everything.
    pub consumers: usize,
    /// Threads that the consumers run on.
    pub threads: usize,
    /// Which time is measured.
    pub timed: Timed,
    /// The run that the records come from, if it is this one.
    pub payload: Option<Payload>,
    /// Compare each record's bytes with those sent.
    pub compare: bool,
    /// Records sent before do not count, in nanoseconds of [`crate::payload::now_ns`]; with [`Timed::Record`] only.
    pub count_from_ns: AtomicU64,
    /// Set from outside: reading ends early.
    pub stop: Arc<AtomicBool>,
}

/// What one consumer, or all of them, got.
#[derive(Debug, Default)]
pub(crate) struct ReadResult {
    /// Records that count.
    pub records: u64,
    /// Bytes of their values.
    pub payload_bytes: u64,
    /// Fetches that were answered with records.
    pub fetches: u64,
    /// Offsets that the broker said it will never serve.
    pub gap_offsets: u64,
    /// Records whose batch came damaged.
    pub damaged: u64,
    /// Times, as the plan says.
    pub latencies: Latencies,
    /// When the last record came.
    pub last_at: Option<Instant>,
    /// What each consumer read of each target, to be compared with the ledgers; none for foreign records.
    pub read: Vec<(usize, ReadBack)>,
}

/// Consumers at work.
pub(crate) struct Reading {
    threads: Vec<(oneshot::Receiver<Result<ReadResult>>, JoinHandle<()>)>,
}

impl Reading {
    /// Starts the consumers.
    pub(crate) fn start(plan: &Arc<ReadPlan>) -> Result<Self> {
        let mut threads = Vec::new();
        let used = plan.threads.min(plan.consumers).max(1);
        for index in 0..used {
            let (sender, answer) = oneshot::channel();
            let plan = Arc::clone(plan);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let consumers = (index..plan.consumers).step_by(used).count();
            let thread = std::thread::Builder::new().name(format!("bench-read-{index}")).spawn(move || {
                let local = tokio::task::LocalSet::new();
                let result = local.block_on(&runtime, consume(&plan, consumers));
                // Nobody waits for it any more when the run has failed.
                let _ = sender.send(result);
            })?;
            threads.push((answer, thread));
        }
        Ok(Self { threads })
    }

    /// Waits until all have read to the ends.
    pub(crate) async fn join(self) -> Result<ReadResult> {
        let mut total = ReadResult::default();
        let mut failed = None;
        for (answer, thread) in self.threads {
            match answer.await.context("a reading thread is gone")? {
                Ok(result) => total.add(result),
                Err(error) => failed = Some(error),
            }
            if thread.join().is_err() {
                bail!("a reading thread panicked");
            }
        }
        failed.map_or(Ok(total), Err)
    }
}

impl ReadPlan {
    /// Whether `next` is the end of the target, or the run was stopped.
    fn is_done(&self, target: usize, next: u64) -> bool {
        self.stop.load(Ordering::Relaxed) || self.ends.get().is_some_and(|ends| next >= ends[target])
    }
}

impl ReadResult {
    fn add(&mut self, other: Self) {
        self.records += other.records;
        self.payload_bytes += other.payload_bytes;
        self.fetches += other.fetches;
        self.gap_offsets += other.gap_offsets;
        self.damaged += other.damaged;
        self.latencies.merge(&other.latencies);
        self.last_at = self.last_at.max(other.last_at);
        self.read.extend(other.read);
    }
}

/// The consumers of one thread.
async fn consume(plan: &Arc<ReadPlan>, consumers: usize) -> Result<ReadResult> {
    let mut lanes = JoinSet::new();
    for _ in 0..consumers {
        for (shard, address) in plan.addresses.iter().enumerate() {
            let of_shard = plan.targets.iter().enumerate().filter(|(_, target)| target.shard == shard);
            let indexes: Vec<usize> = of_shard.map(|(index, _)| index).collect();
            if indexes.is_empty() {
                continue;
            }
            let connection = cluster::connect(address).await?;
            let lane_count = indexes.len().div_ceil(FETCH_PARTITIONS_MAX);
            for chunk in indexes.chunks(FETCH_PARTITIONS_MAX) {
                let lane = lane::Lane::new(Arc::clone(plan), connection.clone(), chunk, lane_count);
                lanes.spawn_local(lane.run());
            }
        }
    }
    let mut total = ReadResult::default();
    while let Some(ended) = lanes.join_next().await {
        total.add(ended.context("a lane panicked")??);
    }
    Ok(total)
}
