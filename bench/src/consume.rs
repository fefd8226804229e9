//! `bench consume`: how fast, and how soon, records come back.
//!
//! *Catch-up* fills topics of its own (or takes one that exists), waits until all of it is written, and reads it from the
//! start; latencies are those of fetches. The broker answers from memory what it still holds: fill more than its
//! `--memory` to measure its disk. *Tail* produces and consumes at once; latencies are end to end, from building a record's
//! batch to having the record in hand, by a time that each record carries, so both ends are in this process.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ringmain_core::codec::{Codec, Compression};
use ringmain_core::ids::Durability;
use serde::Serialize;

use crate::cluster::Cluster;
use crate::histogram::Percentiles;
use crate::load::{ClientLedger, Limit, Load, LoadResult, Shape};
use crate::payload::{Compressibility, Payload, now_ns};
use crate::reader::{ReadPlan, ReadResult, Reading, Timed};
use crate::report::{Figures, rounded};
use crate::scrape::{Broker, BrokerSample, ProcessSample};
use crate::session::{self, Session};

/// Which reading is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConsumeMode {
    /// From the start of what is there.
    #[default]
    CatchUp,
    /// What is being produced.
    Tail,
}

impl ConsumeMode {
    /// The word of the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CatchUp => "catch-up",
            Self::Tail => "tail",
        }
    }
}

impl FromStr for ConsumeMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "catch-up" => Ok(Self::CatchUp),
            "tail" => Ok(Self::Tail),
            other => Err(format!("unknown mode `{other}`: use catch-up or tail")),
        }
    }
}

/// What to read, and what to produce for it.
#[derive(Clone, Debug)]
pub struct ConsumeArgs {
    /// Address of the broker, `HOST:PORT`.
    pub broker: String,
    /// A topic that exists, to be read as it is; none = make topics and fill them. Catch-up only.
    pub topic: Option<String>,
    /// Which reading is measured.
    pub mode: ConsumeMode,
    /// Topics to make.
    pub topics: usize,
    /// Partitions of each.
    pub partitions: u32,
    /// Bytes of a record's value, at least 24.
    pub size: usize,
    /// Records in a batch.
    pub batch: usize,
    /// Producing clients.
    pub clients: usize,
    /// Requests that a producing client has under way at once.
    pub in_flight: usize,
    /// Consumers; each reads everything.
    pub consumers: usize,
    /// Threads for the producing clients, and as many for the consumers.
    pub threads: usize,
    /// Catch-up: records to fill in before.
    pub records: u64,
    /// Tail: seconds that are measured.
    pub seconds: f64,
    /// Tail: seconds before them that are not.
    pub warm_up_seconds: f64,
    /// Level that produces wait for.
    pub durability: Durability,
    /// What a codec could save.
    pub compressibility: Compressibility,
    /// How the clients compress their batches.
    pub codec: Codec,
    /// What the broker is asked to do with those of the topics.
    pub compression: Compression,
    /// Use the common port instead of the shards' own.
    pub common_port: bool,
    /// Compare every byte with what was sent; costs the consumer about what filling costs the producer. Presence and
    /// order are always checked, where the records are this run's.
    pub verify: bool,
    /// The broker's HTTP address, for its own figures.
    pub broker_http: Option<String>,
    /// The broker's process id on this machine, for what HTTP does not tell.
    pub broker_pid: Option<u32>,
}

impl Default for ConsumeArgs {
    fn default() -> Self {
        Self {
            broker: "127.0.0.1:8123".to_owned(),
            topic: None,
            mode: ConsumeMode::CatchUp,
            topics: 1,
            partitions: 10,
            size: 1024,
            batch: 100,
            clients: 1,
            in_flight: 1,
            consumers: 1,
            threads: 1,
            records: 1_000_000,
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
pub struct ConsumeReport {
    /// Which run this is: `consume`.
    pub bench: &'static str,
    /// `catch-up` or `tail`.
    pub mode: &'static str,
    /// The topic, when it was there before.
    pub topic: Option<String>,
    /// Partitions read, of all topics.
    pub partitions: usize,
    /// As asked for.
    pub consumers: usize,
    /// As asked for.
    pub threads: usize,
    /// `direct` or `common`.
    pub ports: &'static str,
    /// Counts over all consumers, rates and costs; latencies are of fetches (catch-up) or of records, end to end (tail).
    #[serde(flatten)]
    pub figures: Figures,
    /// Fetches that brought records.
    pub fetches: u64,
    /// Offsets that the broker reported as lost for ever.
    pub gap_offsets: u64,
    /// Bytes that the broker read from its disk for these fetches: what it did not answer from memory.
    pub fetch_disk_read_bytes: Option<u64>,
    /// Those of them for readers that were within memory when they asked: must be 0.
    pub tail_disk_read_bytes: Option<u64>,
    /// Records acked while filling, or in all of the tail run.
    pub produced_records: u64,
    /// Seconds that filling took; catch-up.
    pub fill_s: Option<f64>,
    /// Half of the produces were acked sooner; tail.
    pub ack_p50_us: Option<f64>,
    /// One produce in 100 was acked later; tail.
    pub ack_p99_us: Option<f64>,
    /// Whether every byte was compared with what was sent.
    pub verified: bool,
    /// Whether a signal ended the run early.
    pub interrupted: bool,
}

/// Consumes as `args` say; blocks.
pub fn run(args: &ConsumeArgs) -> Result<ConsumeReport> {
    let shape = args.shape();
    shape.check()?;
    ensure!(args.topics >= 1 && args.partitions >= 1, "there must be a topic with a partition");
    ensure!(args.consumers >= 1, "there must be a consumer");
    ensure!(args.seconds > 0.0 && args.seconds.is_finite(), "seconds must be more than 0");
    ensure!(args.warm_up_seconds >= 0.0 && args.warm_up_seconds.is_finite(), "warm_up_seconds must not be negative");
    if args.topic.is_some() && args.mode == ConsumeMode::Tail {
        bail!("tail mode measures records that it sends itself: leave the topic out, or use catch-up");
    }
    session::block_on(|stop| async {
        match &args.topic {
            Some(topic) => existing(args, topic, stop).await,
            None => in_session(args, shape, stop).await,
        }
    })
}

impl ConsumeArgs {
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

    fn broker(&self) -> Broker {
        Broker { http: self.broker_http.clone(), pid: self.broker_pid }
    }

    fn read_plan(&self, cluster: &Cluster, targets: Vec<crate::cluster::Target>, stop: Arc<AtomicBool>) -> ReadPlan {
        ReadPlan {
            starts: vec![0; targets.len()],
            targets,
            ends: OnceLock::new(),
            addresses: cluster.addresses.clone(),
            consumers: self.consumers,
            threads: self.threads,
            timed: Timed::Fetch,
            payload: None,
            compare: self.verify,
            count_from_ns: AtomicU64::new(0),
            stop,
        }
    }
}

/// What a reading spent, and its report so far.
struct Measured {
    read: ReadResult,
    seconds: f64,
    spent: BrokerSample,
    client_cpu_s: f64,
}

/// Reads a plan whose ends are known.
async fn read_all(plan: ReadPlan, broker: &Broker) -> Result<Measured> {
    let (before, own_before, started) = (broker.sample()?, ProcessSample::own()?, Instant::now());
    let read = Reading::start(&Arc::new(plan))?.join().await?;
    let spent = broker.sample()?.since(&before);
    let seconds = read.last_at.map_or(0.0, |last| last.duration_since(started).as_secs_f64());
    Ok(Measured { read, seconds, spent, client_cpu_s: ProcessSample::own()?.cpu_s - own_before.cpu_s })
}

async fn existing(args: &ConsumeArgs, topic: &str, stop: Arc<AtomicBool>) -> Result<ConsumeReport> {
    let broker = args.broker();
    let cluster = Cluster::connect(&args.broker, args.common_port).await?;
    let targets = cluster.topic(topic).await?;
    let ends = cluster.offsets(&targets).await?;
    let mut plan = args.read_plan(&cluster, targets, Arc::clone(&stop));
    plan.starts = ends.iter().map(|end| end.log_start).collect();
    plan.ends = OnceLock::from(ends.iter().map(|end| end.log_end).collect::<Vec<_>>());
    let partitions = plan.targets.len();
    let measured = read_all(plan, &broker).await?;
    let mut report = report(args, partitions, measured, &stop);
    report.topic = Some(topic.to_owned());
    report.verified = false;
    Ok(report)
}

async fn in_session(args: &ConsumeArgs, shape: Shape, stop: Arc<AtomicBool>) -> Result<ConsumeReport> {
    let broker = args.broker();
    // A wrong address is to be found before topics are made.
    broker.sample()?;
    let run = session::run_number();
    let cluster = Cluster::connect(&args.broker, args.common_port).await?;
    let topics = cluster.make_topics(run, args.topics, args.partitions, args.compression).await?;
    let session = Session { cluster, topics, broker, run, stop };
    let report = match args.mode {
        ConsumeMode::CatchUp => catch_up(args, shape, &session).await,
        ConsumeMode::Tail => tail(args, shape, &session).await,
    };
    session.topics.remove(&session.cluster).await;
    report
}

async fn catch_up(args: &ConsumeArgs, shape: Shape, session: &Session) -> Result<ConsumeReport> {
    let load = Load::start(&session.load_plan(shape, args.compressibility))?;
    let filled = load.run(Limit::Batches(args.records.div_ceil(args.batch as u64))).await?;
    session.drain().await;
    let ledgers = load.finish().await?;

    let targets = session.topics.targets.clone();
    let mut plan = args.read_plan(&session.cluster, targets, Arc::clone(&session.stop));
    plan.ends = OnceLock::from(session::ends_of(plan.targets.len(), &ledgers));
    plan.payload = Some(Payload::new(session.run, args.compressibility));
    let partitions = plan.targets.len();
    let mut measured = read_all(plan, &session.broker).await?;
    let findings = findings(session, &mut measured.read, &ledgers);
    let mut report = report(args, partitions, measured, &session.stop);
    report.figures.set_findings(findings);
    report.produced_records = filled.records;
    report.fill_s = Some(rounded(filled.seconds, 3));
    Ok(report)
}

async fn tail(args: &ConsumeArgs, shape: Shape, session: &Session) -> Result<ConsumeReport> {
    let load = Load::start(&session.load_plan(shape, args.compressibility))?;
    // Connects all clients.
    load.run(Limit::Batches(0)).await?;
    let targets = session.topics.targets.clone();
    let mut plan = args.read_plan(&session.cluster, targets, Arc::clone(&session.stop));
    plan.timed = Timed::Record;
    plan.payload = Some(Payload::new(session.run, args.compressibility));
    plan.count_from_ns = AtomicU64::new(u64::MAX);
    let plan = Arc::new(plan);
    let reading = Reading::start(&plan)?;

    let produced = produce_for_tail(args, session, &load, &plan).await;
    if produced.is_err() {
        // So that the consumers end too.
        session.stop.store(true, Ordering::Relaxed);
    }
    let ledgers = load.finish().await?;
    // Nobody else sets the ends.
    let _ = plan.ends.set(session::ends_of(plan.targets.len(), &ledgers));
    let read = reading.join().await;
    let (started, before, own_before, warmed, produced) = produced?;
    let read = read?;

    let seconds = read.last_at.map_or(0.0, |last| last.duration_since(started).as_secs_f64());
    let spent = session.broker.sample()?.since(&before);
    let client_cpu_s = ProcessSample::own()?.cpu_s - own_before.cpu_s;
    let mut measured = Measured { read, seconds, spent, client_cpu_s };
    let findings = findings(session, &mut measured.read, &ledgers);
    let mut report = report(args, plan.targets.len(), measured, &session.stop);
    report.figures.set_findings(findings);
    report.produced_records = warmed.records + produced.records;
    let acks: Percentiles = produced.latencies.percentiles();
    (report.ack_p50_us, report.ack_p99_us) = (Some(acks.p50_us), Some(acks.p99_us));
    Ok(report)
}

/// Warms up, then produces what counts: when that started, the counters then, and the results of both.
async fn produce_for_tail(
    args: &ConsumeArgs,
    session: &Session,
    load: &Load,
    plan: &ReadPlan,
) -> Result<(Instant, BrokerSample, ProcessSample, LoadResult, LoadResult)> {
    let warmed = load.run(Limit::Time(Duration::from_secs_f64(args.warm_up_seconds))).await?;
    let (before, own_before) = (session.broker.sample()?, ProcessSample::own()?);
    plan.count_from_ns.store(now_ns(), Ordering::Relaxed);
    let started = Instant::now();
    let produced = load.run(Limit::Time(Duration::from_secs_f64(args.seconds))).await?;
    Ok((started, before, own_before, warmed, produced))
}

/// What is wrong with what was read; nothing can be said of a run that was stopped in the middle.
fn findings(session: &Session, read: &mut ReadResult, ledgers: &[ClientLedger]) -> crate::verify::Findings {
    if session.stop.load(Ordering::Relaxed) {
        return crate::verify::Findings::default();
    }
    let read = ReadResult { read: std::mem::take(&mut read.read), damaged: read.damaged, ..ReadResult::default() };
    let acks = session::ack_findings(&session.topics.targets, ledgers);
    acks.worst(session::findings_of(read, ledgers))
}

fn report(args: &ConsumeArgs, partitions: usize, measured: Measured, stop: &AtomicBool) -> ConsumeReport {
    let read = measured.read;
    let mut figures =
        Figures::measured(read.records, read.payload_bytes, measured.seconds, read.latencies.percentiles());
    figures.corrupt = read.damaged;
    figures.set_broker(&measured.spent, measured.spent.resident_bytes);
    figures.client_cpu_s = rounded(measured.client_cpu_s, 2);
    let interrupted = stop.load(Ordering::Relaxed);
    ConsumeReport {
        bench: "consume",
        mode: args.mode.name(),
        partitions,
        consumers: args.consumers,
        threads: args.threads,
        ports: if args.common_port { "common" } else { "direct" },
        fetches: read.fetches,
        gap_offsets: read.gap_offsets,
        fetch_disk_read_bytes: measured.spent.fetch_disk_read_bytes,
        tail_disk_read_bytes: measured.spent.tail_disk_read_bytes,
        verified: args.verify && !interrupted,
        interrupted,
        figures,
        ..ConsumeReport::default()
    }
}

#[cfg(test)]
mod tests;
