//! Flags of `bench`. The defaults are those of the bench crate; a test compares them.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use ringmain_bench::consume::ConsumeMode;
use ringmain_bench::payload::Compressibility;
use ringmain_core::codec::{Codec, Compression};
use ringmain_core::ids::Durability;

use super::parse_seconds;
use crate::config::{Address, parse_address, parse_durability, parse_size};

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Send records as fast as they are acked.
    Produce(BenchProduceArgs),
    /// Read records as fast as they come.
    Consume(BenchConsumeArgs),
    /// Raw O_DIRECT sequential writes, reads, and write + sync latency of a disk.
    Disk(BenchDiskArgs),
    /// Raw TCP round trips and streams on loopback.
    Echo(BenchEchoArgs),
}

/// The load, and the broker it goes to.
#[derive(Debug, Args)]
pub struct BenchTarget {
    /// Broker to measure.
    #[arg(long, value_name = "HOST:PORT", env = "RINGMAIN_BROKER", default_value = "127.0.0.1:8123", value_parser = parse_address)]
    pub broker: Address,
    /// The broker's HTTP port, for its CPU, memory and disk figures [default: 127.0.0.1:8081 for the default broker].
    #[arg(long, value_name = "HOST:PORT", env = "RINGMAIN_BROKER_HTTP", value_parser = parse_address)]
    pub broker_http: Option<Address>,
    /// The broker's process id on this machine, for what its HTTP port does not tell.
    #[arg(long, value_name = "PID")]
    pub broker_pid: Option<u32>,
    /// Topics to make; they are deleted after the run.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub topics: usize,
    /// Partitions of each topic.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub partitions: u32,
    /// Bytes of a record's value, 24 at least.
    #[arg(long, value_name = "BYTES", default_value = "1KiB", value_parser = parse_size)]
    pub size: u64,
    /// Records in a batch; a request has one batch.
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub batch: usize,
    /// Producing clients, each with its own connections.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub clients: usize,
    /// Requests that a producing client has under way at once; 1 = it waits for each ack.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub in_flight: usize,
    /// Threads for the clients.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: usize,
    /// Seconds that are measured.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = parse_seconds)]
    pub seconds: f64,
    /// Seconds before them that are not.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_seconds)]
    pub warm_up_seconds: f64,
    /// Level to wait for: memory, flushed or synced.
    #[arg(long, value_name = "LEVEL", default_value = "memory", value_parser = parse_durability)]
    pub durability: Durability,
    /// random, json, or the share of each record that a codec could save, from 0 to 1.
    #[arg(long, value_name = "KIND", default_value = "random")]
    pub compressibility: Compressibility,
    /// How the clients compress their batches: none, lz4 or zstd.
    #[arg(long, value_name = "CODEC", default_value = "none")]
    pub codec: Codec,
    /// What the broker does with what it stores: auto, none, lz4 or zstd.
    #[arg(long, value_name = "SETTING", default_value = "auto")]
    pub compression: Compression,
    /// Send everything to the common port instead of the shards' own.
    #[arg(long)]
    pub common_port: bool,
    /// Read everything back and compare it. Whether it is given or not: exit code 1 when records are lost, repeated, out of
    /// order or damaged, as far as was looked, or when none was acked or read.
    #[arg(long)]
    pub verify: bool,
    /// Print one line of JSON.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `bench produce`.
#[derive(Debug, Args)]
pub struct BenchProduceArgs {
    #[command(flatten)]
    pub target: BenchTarget,
}

/// Flags of `bench consume`.
#[derive(Debug, Args)]
pub struct BenchConsumeArgs {
    #[command(flatten)]
    pub target: BenchTarget,
    /// Read this topic, which exists, instead of one made for the run; catch-up only.
    #[arg(long, value_name = "NAME", conflicts_with = "verify")]
    pub topic: Option<String>,
    /// catch-up: what is stored; tail: what is being produced.
    #[arg(long, value_name = "MODE", default_value = "catch-up")]
    pub mode: ConsumeMode,
    /// Consumers; each reads everything.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub consumers: usize,
    /// Catch-up: records to fill in before.
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    pub records: u64,
}

/// Flags of `bench disk`.
#[derive(Debug, Args)]
pub struct BenchDiskArgs {
    /// Folder on the disk to measure.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
    /// Seconds for each of writes to fresh blocks, to written blocks, and reads.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_seconds)]
    pub seconds: f64,
    /// End each of them after so many bytes, if that is earlier.
    #[arg(long, value_name = "BYTES", value_parser = parse_size)]
    pub bytes: Option<u64>,
    /// Size of the file that is written.
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = parse_size)]
    pub file_bytes: u64,
    /// Size of one write or read.
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_size)]
    pub write_bytes: u64,
    /// Writes or reads at once.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub depth: usize,
    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub runs: usize,
    /// Synced writes of each size and kind of block.
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub sync_operations: usize,
    /// CPU to run on [default: the first allowed].
    #[arg(long, value_name = "CPU")]
    pub cpu: Option<usize>,
    /// Print one line of JSON.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `bench echo`.
#[derive(Debug, Args)]
pub struct BenchEchoArgs {
    /// Bytes each way in a round trip.
    #[arg(long, value_name = "BYTES", default_value = "1KiB", value_parser = parse_size)]
    pub size: u64,
    /// Seconds of round trips.
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = parse_seconds)]
    pub seconds: f64,
    /// Seconds of streaming; 0 = none.
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = parse_seconds)]
    pub stream_seconds: f64,
    /// Connections that stream at once.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub streams: usize,
    /// CPU to run on [default: the first allowed].
    #[arg(long, value_name = "CPU")]
    pub cpu: Option<usize>,
    /// Print one line of JSON.
    #[arg(long)]
    pub json: bool,
}
