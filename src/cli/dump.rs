//! Flags of `dump`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::Format;

/// Flags of `dump`.
#[derive(Debug, Args)]
pub struct DumpArgs {
    /// Segment files, or directories of them; read instead of a data directory.
    #[arg(value_name = "PATH", conflicts_with = "data")]
    pub paths: Vec<PathBuf>,
    /// Data directory that no broker runs on [default: ringmain-data].
    #[arg(long, value_name = "DIR", env = "RINGMAIN_DATA")]
    pub data: Option<PathBuf>,
    /// Arena file to read as well; may be given several times.
    #[arg(long, value_name = "FILE")]
    pub arena: Vec<PathBuf>,
    /// Check every CRC, the chain of extents and the order of offsets, and print only what is wrong. Exit code 1 when
    /// something is.
    #[arg(long, conflicts_with_all = ["extract", "records"])]
    pub verify: bool,
    /// Write the records of a topic, named by name or id, to standard output, and leave out what is damaged.
    #[arg(long, value_name = "TOPIC[:PARTITION]", conflicts_with_all = ["records", "topic", "partition"])]
    pub extract: Option<TopicPartition>,
    /// How --extract prints: raw: values as lines; json: one object a line.
    #[arg(long, value_name = "FORMAT", default_value = "raw", requires = "extract")]
    pub format: Format,
    /// Print each record of the batches as well, and each partition of the checkpoints.
    #[arg(long)]
    pub records: bool,
    /// Only runs of this topic, named by name or id.
    #[arg(long, value_name = "TOPIC")]
    pub topic: Option<String>,
    /// Only runs of this partition.
    #[arg(long, value_name = "P")]
    pub partition: Option<u32>,
    /// Only this segment of each shard.
    #[arg(long, value_name = "N")]
    pub segment: Option<u64>,
    /// Read although a broker runs: what it is writing may look damaged.
    #[arg(long)]
    pub force: bool,
    /// Print one JSON object a line.
    #[arg(long)]
    pub json: bool,
}

/// A topic, or one partition of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicPartition {
    /// Name or id.
    pub topic: String,
    /// None = all.
    pub partition: Option<u32>,
}

impl FromStr for TopicPartition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (topic, partition) = match text.rsplit_once(':') {
            Some((topic, partition)) => (topic, Some(partition)),
            None => (text, None),
        };
        // No topic's name has a colon.
        let partition = partition.map(str::parse).transpose();
        match partition {
            Ok(partition) if !topic.is_empty() => Ok(Self { topic: topic.to_owned(), partition }),
            _ => Err(format!("`{text}` is not TOPIC or TOPIC:PARTITION, such as orders:3")),
        }
    }
}
