//! What can be typed: commands, flags and their environment variables. What it means is config.rs's business, and each
//! command's.

mod bench;
mod doctor;
mod dump;
mod topic;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ringmain_core::codec::Codec;
use ringmain_core::ids::Durability;
use ringmain_core::limits::TAG_BYTES_MAX;

pub use bench::{BenchCommand, BenchConsumeArgs, BenchDiskArgs, BenchEchoArgs, BenchProduceArgs, BenchTarget};
pub use doctor::DoctorArgs;
pub use dump::DumpArgs;
pub use topic::{TopicCommand, TopicOutput, show_ms};

use crate::config::{Address, parse_address, parse_durability, parse_log, parse_size};

/// A message broker for Linux: one io_uring per CPU core.
#[derive(Debug, Parser)]
#[command(name = "ringmain", version, about, max_term_width = 110, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a broker with its master in one process.
    Serve(Box<ServeArgs>),
    /// Create, list, describe, alter and delete topics.
    #[command(subcommand)]
    Topic(TopicCommand),
    /// Send lines of a file or of standard input, one record each.
    Produce(ProduceArgs),
    /// Print the records of a topic.
    Consume(ConsumeArgs),
    /// Check what on this machine would keep a broker from starting, or from being fast or safe, and say how to mend it.
    Doctor(Box<DoctorArgs>),
    /// Look at a data directory that no broker runs on: print it, check it, or write records out of it.
    Dump(Box<DumpArgs>),
    /// Measure the broker, or the limits of this machine that its figures are divided by.
    #[command(subcommand)]
    Bench(BenchCommand),
}

/// Settings of `serve` as typed: what is not given comes from the file, then from the defaults.
#[derive(Debug, Default, Args)]
pub struct ServeArgs {
    /// TOML file with any of these settings; flags and environment win over it.
    #[arg(long, value_name = "FILE", env = "RINGMAIN_CONFIG")]
    pub config: Option<PathBuf>,
    /// Data directory; made when it is not there [default: ringmain-data].
    #[arg(long, value_name = "DIR", env = "RINGMAIN_DATA")]
    pub data: Option<PathBuf>,
    /// Broker port for clients [default: 127.0.0.1:8123].
    #[arg(long, value_name = "HOST:PORT", env = "RINGMAIN_LISTEN", value_parser = parse_address)]
    pub listen: Option<Address>,
    /// HTTP port with /metrics, /healthz and /readyz [default: 127.0.0.1:8081].
    #[arg(long, value_name = "HOST:PORT", env = "RINGMAIN_HTTP", value_parser = parse_address)]
    pub http: Option<Address>,
    /// Master port [default: 127.0.0.1:8715].
    #[arg(long, value_name = "HOST:PORT", env = "RINGMAIN_MASTER_LISTEN", value_parser = parse_address)]
    pub master_listen: Option<Address>,
    /// HTTP port with the master's API and console [default: 127.0.0.1:8080].
    #[arg(long, value_name = "HOST:PORT", env = "RINGMAIN_MASTER_HTTP", value_parser = parse_address)]
    pub master_http: Option<Address>,
    /// First of the direct ports, one for each shard; 0 = any free ones [default: 8200].
    #[arg(long, value_name = "PORT", env = "RINGMAIN_DIRECT_PORT_BASE")]
    pub direct_port_base: Option<u16>,
    /// Name or address that clients are told to use [default: what the broker listens on].
    #[arg(long, value_name = "HOST[:PORT]", env = "RINGMAIN_ADVERTISE")]
    pub advertise: Option<String>,
    /// First direct port that clients are told to use [default: the direct ports].
    #[arg(long, value_name = "PORT", env = "RINGMAIN_ADVERTISE_DIRECT_BASE")]
    pub advertise_direct_base: Option<u16>,
    /// Shards, fixed by the data directory when it is made; may be raised later [default: the stored number, else one
    /// for each CPU].
    #[arg(long, value_name = "N", env = "RINGMAIN_SHARDS", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub shards: Option<u16>,
    /// Memory for records, all shards together, such as 512MiB [default: a quarter of the machine's].
    #[arg(long, value_name = "BYTES", env = "RINGMAIN_MEMORY", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Size of the files that a new data directory keeps its records in; an existing one keeps its own [default: 256MiB].
    #[arg(long, value_name = "BYTES", env = "RINGMAIN_SEGMENT_BYTES", value_parser = parse_size)]
    pub segment_bytes: Option<u64>,
    /// Most of the disk's time, in per cent, that consumers behind memory take while producers write [default: 50].
    #[arg(long, value_name = "N", env = "RINGMAIN_CATCH_UP_SHARE_PERCENT", value_parser = clap::value_parser!(u16).range(1..=100))]
    pub catch_up_share_percent: Option<u16>,
    /// Directory in a memory filesystem where that memory lives, so that it survives the process [default: /dev/shm].
    #[arg(long, value_name = "DIR", env = "RINGMAIN_ARENA_DIR", conflicts_with = "arena")]
    pub arena_dir: Option<PathBuf>,
    /// `anonymous`: memory that dies with the process [default: shared].
    #[arg(long, value_name = "KIND", env = "RINGMAIN_ARENA")]
    pub arena: Option<ArenaKind>,
    /// Log level: error, warn, info, debug, trace, or a filter such as info,ringmain_shard=debug [default: info].
    #[arg(long, value_name = "LEVEL", env = "RINGMAIN_LOG", value_parser = parse_log)]
    pub log: Option<String>,
}

/// Where the arena lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ArenaKind {
    /// In a file of a memory filesystem: survives the death of the process.
    Shared,
    /// In memory of the process.
    Anonymous,
}

/// How to reach the broker.
#[derive(Clone, Debug, Args)]
pub struct ClientArgs {
    /// Broker to start from; several with commas.
    #[arg(
        long,
        value_name = "HOST:PORT",
        env = "RINGMAIN_BROKER",
        default_value = "127.0.0.1:8123",
        value_delimiter = ',',
        value_parser = parse_address
    )]
    pub broker: Vec<Address>,
}

/// Flags of `produce`.
#[derive(Debug, Args)]
pub struct ProduceArgs {
    /// Topic to send to.
    pub topic: String,
    /// File whose lines are sent; - = standard input.
    #[arg(default_value = "-")]
    pub file: PathBuf,
    /// Send everything to this partition [default: by key, else in turn].
    #[arg(long, value_name = "P")]
    pub partition: Option<u32>,
    /// Text between key and value; a line without it has no key.
    #[arg(long, value_name = "C", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub key_separator: Option<String>,
    /// Give all records this tag.
    #[arg(long, value_name = "TAG", value_parser = parse_tag)]
    pub tag: Option<String>,
    /// When a record counts as sent: memory, flushed or synced [default: the topic's].
    #[arg(long, value_name = "LEVEL", value_parser = parse_durability)]
    pub durability: Option<Durability>,
    /// Send a batch when it has so many bytes.
    #[arg(long, value_name = "BYTES", default_value = "256KiB", value_parser = parse_size)]
    pub batch_bytes: u64,
    /// Compress batches before they are sent: none, lz4 or zstd.
    #[arg(long, value_name = "CODEC", default_value = "none")]
    pub codec: Codec,
    /// Do not number the batches: after a lost connection records may then be stored twice.
    #[arg(long)]
    pub no_idempotent: bool,
    /// Seconds to go on trying while the broker does not answer or can't take more.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = parse_seconds)]
    pub retry_seconds: f64,
    #[command(flatten)]
    pub client: ClientArgs,
    /// Print the summary as one line of JSON.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `consume`.
#[derive(Debug, Args)]
pub struct ConsumeArgs {
    /// Topic to read.
    pub topic: String,
    /// Read only this partition.
    #[arg(long, value_name = "P")]
    pub partition: Option<u32>,
    /// Where to start: earliest, latest, or an offset.
    #[arg(long, value_name = "WHERE", default_value = "earliest", value_parser = parse_start)]
    pub from: Start,
    /// Wait for more at the end [default: stop at the ends of when it started].
    #[arg(long)]
    pub follow: bool,
    /// Only records with this tag, chosen by the broker; may be given several times.
    #[arg(long = "tag", value_name = "TAG", value_parser = parse_tag)]
    pub tags: Vec<String>,
    /// Stop after so many records.
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// raw: values as lines; json: one object a line.
    #[arg(long, value_name = "FORMAT", default_value = "raw")]
    pub format: Format,
    /// The same as --format json.
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
    /// Seconds to go on trying while the broker does not answer.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = parse_seconds)]
    pub retry_seconds: f64,
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Where `consume` starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At the log start.
    Earliest,
    /// At the log end.
    Latest,
    /// At this offset of each partition.
    Offset(u64),
}

/// How `consume` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Value and a line end.
    Raw,
    /// One object a line.
    Json,
}

fn parse_start(text: &str) -> Result<Start, String> {
    match text {
        "earliest" => Ok(Start::Earliest),
        "latest" => Ok(Start::Latest),
        _ => text.parse().map(Start::Offset).map_err(|_| "use earliest, latest, or an offset".to_owned()),
    }
}

fn parse_tag(text: &str) -> Result<String, String> {
    match text.len() {
        1..=TAG_BYTES_MAX => Ok(text.to_owned()),
        bytes => Err(format!("a tag has 1 to {TAG_BYTES_MAX} bytes, this one has {bytes}")),
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=1e9).contains(&seconds) => Ok(seconds),
        _ => Err("use a number of seconds, such as 2.5".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_of_the_manual_parses() {
        for line in [
            "ringmain serve",
            "ringmain serve --data d --listen 0.0.0.0:0 --http :8081 --master-listen [::1]:0 --master-http localhost:0",
            "ringmain serve --direct-port-base 0 --advertise h:1 --shards 2 --memory 64MiB --arena-dir /dev/shm --config f",
            "ringmain serve --arena anonymous",
            "ringmain topic create t --partitions 3 --stores 2 --durability synced --json",
            "ringmain topic list --broker a:1,b:2",
            "ringmain topic describe t --json",
            "ringmain topic delete t",
            "ringmain topic create t --compression zstd --retention-ms 7d --retention-bytes 10GiB",
            "ringmain topic alter t --retention-ms none --retention-bytes 1073741824 --compression none",
            "ringmain topic alter t --durability synced --durability-floor flushed --json",
            "ringmain produce t",
            "ringmain produce t - --partition 1 --key-separator : --durability flushed --batch-bytes 65536 --retry-seconds 5",
            "ringmain consume t --partition 0 --from 17 --follow --count 3 --format json",
            "ringmain consume t --from latest --json",
            "ringmain dump --data d --records --topic t --partition 3 --segment 7 --force --json",
            "ringmain dump a b --verify",
            "ringmain doctor --quick --json --data d --memory 64MiB --listen 127.0.0.1:0",
            "ringmain doctor",
            "ringmain dump --arena f --arena g",
            "ringmain dump --extract t:3 --format json",
            "ringmain bench produce --topics 2 --size 1024 --compressibility 0.5 --json",
            "ringmain bench produce --partitions 10 --batch 256 --clients 8 --seconds 5 --durability synced --broker a:1",
            "ringmain bench consume --clients 2 --mode tail",
            "ringmain bench disk --dir /tmp --json",
            "ringmain bench echo --size 100",
        ] {
            parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn wrong_use_is_told_with_exit_code_2() {
        for line in [
            "ringmain",
            "ringmain serve --arena anonymous --arena-dir /dev/shm",
            "ringmain serve --shards 0",
            "ringmain serve --memory 64MB",
            "ringmain serve --listen nowhere",
            "ringmain serve --log loud,,=",
            "ringmain produce t --durability soon",
            "ringmain topic alter t --compression rar",
            "ringmain topic create t --retention-ms 7parsecs",
            "ringmain topic create t --retention-bytes lots",
            "ringmain produce t --key-separator=",
            "ringmain produce t --retry-seconds -1",
            "ringmain consume t --from yesterday",
            "ringmain consume t --json --format raw",
            "ringmain dump --extract t:x",
            "ringmain dump --extract t --verify",
            "ringmain dump a --data d",
            "ringmain dump --format json",
            "ringmain bench produce --compressibility 2",
            "ringmain bench consume --mode sideways",
            "ringmain bench disk --seconds fast",
        ] {
            assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
        }
    }
}
