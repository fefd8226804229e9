//! `bench produce`: how fast, how soon acked, at what cost in CPU and device bytes, and whether all of it is there.
//!
//! The run makes its own topics, warms up, waits until the broker has written all of that, takes the broker's counters,
//! produces for `seconds`, waits again, and takes the counters again: so the device bytes and the CPU seconds are those of
//! just the records that are counted. `mb_per_s` is the rate of the acks; `drained_mb_per_s` counts the time until all is in
//! the log file too: memory can't make it look better.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use ringmain_core::codec::{Codec, Compression};
use ringmain_core::ids::Durability;
use serde::Serialize;

use crate::cluster::Cluster;
use crate::load::{Limit, Load, Shape};
use crate::payload::Compressibility;
use crate::report::{Figures, mb_per_s, ratio, rounded};
use crate::scrape::{Broker, ProcessSample};
use crate::session::{self, Session};

/// What to send.
#[derive(Clone, Debug)]
pub struct ProduceArgs {
    /// Address of the broker, `HOST:PORT`.
    pub broker: String,
    /// Topics to make.
    pub topics: usize,
    /// Partitions of each.
    pub partitions: u32,
    /// Bytes of a record's value, at least 24.
    pub size: usize,
    /// Records in a batch; a request has one batch.
    pub batch: usize,
    /// Clients, each with its own connection to each shard.
    pub clients: usize,
    /// Requests that a client has under way at once: 1 = it waits for each ack.
    pub in_flight: usize,
    /// Threads for the clients.
    pub threads: usize,
    /// Seconds that are measured.
    pub seconds: f64,
    /// Seconds before them that are not.
    pub warm_up_seconds: f64,
    /// Level to wait for.
    pub durability: Durability,
    /// What a codec could save.
    pub compressibility: Compressibility,
    /// How the clients compress their batches.
    pub codec: Codec,
    /// What the broker is asked to do with those of the topics.
    pub compression: Compression,
    /// Send everything to the common port instead of the shards' own.
    pub common_port: bool,
    /// Read everything back at the end and compare it.
    pub verify: bool,
    /// The broker's HTTP address, for its own figures.
    pub broker_http: Option<String>,
    /// The broker's process id on this machine, for what HTTP does not tell.
    pub broker_pid: Option<u32>,
}

impl Default for ProduceArgs {
    fn default() -> Self {
        Self {
            broker: "127.0.0.1:8123".to_owned(),
            topics: 1,
            partitions: 10,
            size: 1024,
            batch: 100,
            clients: 1,
            in_flight: 1,
            threads: 1,
            seconds: 10.0,
            warm_up_seconds: 2.0,
            durability: Durability::Memory,
            compressibility: Compressibility::Random,
            codec: Codec::None,
            compression: Compression::Auto,
            common_port: false,
            verify: false,
            broker_http: None,
            broker_pid: None,
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProduceReport {
    /// Which run this is: `produce`.
    pub bench: &'static str,
    /// As asked for.
    pub topics: usize,
    /// As asked for.
    pub partitions: u32,
    /// As asked for.
    pub size: usize,
    /// As asked for.
    pub batch: usize,
    /// As asked for.
    pub clients: usize,
    /// As asked for.
    pub in_flight: usize,
    /// As asked for.
    pub threads: usize,
    /// As asked for.
    pub durability: &'static str,
    /// As asked for.
    pub compressibility: String,
    /// As asked for.
    pub codec: &'static str,
    /// As asked for.
    pub compression: &'static str,
    /// `direct` or `common`.
    pub ports: &'static str,
    /// Counts, rates and costs; latencies are from send to ack, of requests.
    #[serde(flatten)]
    pub figures: Figures,
    /// Requests acked.
    pub requests: u64,
    /// Requests that the broker refused; their records are not sent again.
    pub refused_requests: u64,
    /// Requests of which it is not known whether they are in the log.
    pub unknown_requests: u64,
    /// Seconds after the last ack until everything was in the log file.
    pub drain_s: Option<f64>,
    /// Payload over the measured seconds and `drain_s`.
    pub drained_mb_per_s: Option<f64>,
    /// `device_bytes_written / payload_bytes`.
    pub device_bytes_per_payload_byte: Option<f64>,
    /// fdatasync calls meanwhile.
    pub syncs: Option<u64>,
    /// Records per fdatasync.
    pub records_per_sync: Option<f64>,
    /// Broker CPU seconds for 10^9 bytes of payload.
    pub broker_cpu_s_per_gb: Option<f64>,
    /// Whether everything was read back and compared.
    pub verified: bool,
    /// Whether a signal ended the run early.
    pub interrupted: bool,
}

/// Produces as `args` say; blocks.
pub fn run(args: &ProduceArgs) -> Result<ProduceReport> {
    let shape = args.shape();
    shape.check()?;
    ensure!(args.topics >= 1 && args.partitions >= 1, "there must be a topic with a partition");
    ensure!(args.seconds > 0.0 && args.seconds.is_finite(), "seconds must be more than 0");
    ensure!(args.warm_up_seconds >= 0.0 && args.warm_up_seconds.is_finite(), "warm_up_seconds must not be negative");
    session::block_on(|stop| in_session(args, shape, stop))
}

impl ProduceArgs {
    fn shape(&self) -> Shape {
        Shape {
            size: self.size,
            batch: self.batch,
            clients: self.clients,
            in_flight: self.in_flight,
            threads: self.threads,
            durability: self.durability,
            codec: self.codec,
        }
    }
}

async fn in_session(args: &ProduceArgs, shape: Shape, stop: Arc<AtomicBool>) -> Result<ProduceReport> {
    let broker = Broker { http: args.broker_http.clone(), pid: args.broker_pid };
    // A wrong address is to be found before topics are made.
    broker.sample()?;
    let run = session::run_number();
    let cluster = Cluster::connect(&args.broker, args.common_port).await?;
    let topics = cluster.make_topics(run, args.topics, args.partitions, args.compression).await?;
    let session = Session { cluster, topics, broker, run, stop };
    let report = measure(args, shape, &session).await;
    session.topics.remove(&session.cluster).await;
    report
}

async fn measure(args: &ProduceArgs, shape: Shape, session: &Session) -> Result<ProduceReport> {
    let load = Load::start(&session.load_plan(shape, args.compressibility))?;
    // Connects all clients.
    load.run(Limit::Batches(0)).await?;
    if args.warm_up_seconds > 0.0 {
        load.run(Limit::Time(Duration::from_secs_f64(args.warm_up_seconds))).await?;
        session.drain().await;
    }

    let (broker_before, own_before) = (session.broker.sample()?, ProcessSample::own()?);
    let result = load.run(Limit::Time(Duration::from_secs_f64(args.seconds))).await?;
    let (loaded, own_after) = (session.broker.sample()?, ProcessSample::own()?);
    let drain_s = session.drain().await;
    let spent = session.broker.sample()?.since(&broker_before);
    let interrupted = session.stop.load(Ordering::Relaxed);

    let ledgers = load.finish().await?;
    let mut findings = session::ack_findings(&session.topics.targets, &ledgers);
    let verified = args.verify && !interrupted;
    if verified {
        findings = findings.worst(session.read_back(&ledgers, args.compressibility, args.threads).await?);
    }

    let payload_bytes = result.records * args.size as u64;
    let mut figures = Figures::measured(result.records, payload_bytes, result.seconds, result.latencies.percentiles());
    figures.set_findings(findings);
    figures.set_broker(&spent, loaded.resident_bytes);
    figures.client_cpu_s = rounded(own_after.cpu_s - own_before.cpu_s, 2);
    let with_drain = drain_s.map(|drain_s| mb_per_s(payload_bytes, result.seconds + drain_s));
    Ok(ProduceReport {
        bench: "produce",
        topics: args.topics,
        partitions: args.partitions,
        size: args.size,
        batch: args.batch,
        clients: args.clients,
        in_flight: args.in_flight,
        threads: args.threads,
        durability: args.durability.name(),
        compressibility: args.compressibility.to_string(),
        codec: args.codec.name(),
        compression: args.compression.name(),
        ports: if args.common_port { "common" } else { "direct" },
        requests: result.requests,
        refused_requests: result.refused,
        unknown_requests: result.unknown,
        drain_s: drain_s.map(|seconds| rounded(seconds, 3)),
        drained_mb_per_s: with_drain,
        device_bytes_per_payload_byte: ratio(spent.device_bytes_written, payload_bytes),
        syncs: spent.syncs,
        records_per_sync: spent.syncs.and_then(|syncs| ratio(Some(result.records), syncs)),
        broker_cpu_s_per_gb: spent
            .cpu_s
            .filter(|_| payload_bytes > 0)
            .map(|seconds| rounded(seconds / (payload_bytes as f64 / 1e9), 3)),
        verified,
        interrupted,
        figures,
    })
}

#[cfg(test)]
mod tests;
