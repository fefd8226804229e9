//! What can be typed behind `ringmain topic`.

use clap::{ArgGroup, Args, Subcommand};
use ringmain_core::codec::{Compression, UnknownCompression};
use ringmain_core::ids::Durability;
use ringmain_core::topic::TopicAlteration;

use super::ClientArgs;
use crate::config::{parse_durability, parse_size};

/// Units of time as typed and shown, in milliseconds.
const TIME_UNITS: [(&str, u64); 5] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// What to do with topics.
#[derive(Debug, Subcommand)]
pub enum TopicCommand {
    /// Make a topic.
    Create {
        /// Its name: letters, digits, `_`, `-`, `.`, a letter or `_` first.
        name: String,
        /// Number of partitions: order holds within one, consumers share them.
        #[arg(long, value_name = "N", default_value_t = 1)]
        partitions: u32,
        /// Number of stores, spread over the shards [default: as many as there are shards].
        #[arg(long, value_name = "N")]
        stores: Option<u32>,
        #[command(flatten)]
        settings: SettingArgs,
        #[command(flatten)]
        output: TopicOutput,
    },
    /// List all topics.
    List {
        #[command(flatten)]
        output: TopicOutput,
    },
    /// Show a topic with the ends of its partitions and what a power cut would take now.
    Describe {
        /// Its name.
        name: String,
        #[command(flatten)]
        output: TopicOutput,
    },
    /// Change settings of a topic; what is not named stays as it is.
    #[command(group = ArgGroup::new("settings").multiple(true).required(true))]
    Alter {
        /// Its name.
        name: String,
        #[command(flatten)]
        settings: SettingArgs,
        #[command(flatten)]
        output: TopicOutput,
    },
    /// Delete a topic and all its records.
    Delete {
        /// Its name.
        name: String,
        #[command(flatten)]
        output: TopicOutput,
    },
}

/// Settings of a topic, when it is made and later.
#[derive(Clone, Debug, Args)]
pub struct SettingArgs {
    /// Level of produces that leave it to the topic: memory, flushed or synced [a new topic has: memory].
    #[arg(long, value_name = "LEVEL", group = "settings", value_parser = parse_durability)]
    pub durability: Option<Durability>,
    /// Least level: produces that ask for less get this; raises the other with it [a new topic has: memory].
    #[arg(long, value_name = "LEVEL", group = "settings", value_parser = parse_durability)]
    pub durability_floor: Option<Durability>,
    /// Compress records on disk: auto, none, lz4 or zstd [a new topic has: auto].
    #[arg(long, value_name = "HOW", group = "settings", value_parser = parse_compression)]
    pub compression: Option<Compression>,
    /// Drop records that were appended longer ago: milliseconds, or such as 90s, 30m, 12h, 7d; none = keep them for ever [a
    /// new topic has: none].
    #[arg(long, value_name = "TIME", group = "settings", value_parser = parse_retention_ms)]
    pub retention_ms: Option<Bound>,
    /// Drop the oldest records when the topic takes more of the broker's disk: bytes, or such as 512MiB; none = no bound [a
    /// new topic has: none].
    #[arg(long, value_name = "BYTES", group = "settings", value_parser = parse_retention_bytes)]
    pub retention_bytes: Option<Bound>,
}

/// A bound of retention as typed: `none` removes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound(pub Option<u64>);

impl SettingArgs {
    /// What was named, as a change.
    #[must_use]
    pub fn alteration(&self) -> TopicAlteration {
        TopicAlteration {
            durability_default: self.durability,
            durability_floor: self.durability_floor,
            compression: self.compression,
            retention_ms: self.retention_ms.map(|bound| bound.0),
            retention_bytes: self.retention_bytes.map(|bound| bound.0),
        }
    }
}

/// What all topic commands take.
#[derive(Clone, Debug, Args)]
pub struct TopicOutput {
    #[command(flatten)]
    pub client: ClientArgs,
    /// Print one line of JSON.
    #[arg(long)]
    pub json: bool,
}

fn parse_compression(text: &str) -> Result<Compression, String> {
    text.parse().map_err(|error: UnknownCompression| error.to_string())
}

fn parse_retention_ms(text: &str) -> Result<Bound, String> {
    let wrong = || format!("`{text}` is not a time: use milliseconds, or 90s, 30m, 12h, 7d, or none");
    if text == "none" {
        return Ok(Bound(None));
    }
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = &text[digits.len()..];
    let (_, ms) = TIME_UNITS.iter().find(|(name, _)| *name == unit || unit.is_empty()).ok_or_else(wrong)?;
    let number: u64 = digits.trim_end().parse().map_err(|_| wrong())?;
    number.checked_mul(*ms).map(|ms| Bound(Some(ms))).ok_or_else(|| format!("`{text}` is too long"))
}

fn parse_retention_bytes(text: &str) -> Result<Bound, String> {
    if text == "none" { Ok(Bound(None)) } else { parse_size(text).map(|bytes| Bound(Some(bytes))) }
}

/// A time as [`SettingArgs`] takes it, in the largest unit that is exact.
#[must_use]
pub fn show_ms(ms: u64) -> String {
    let exact = TIME_UNITS.iter().rev().find(|(_, unit)| ms > 0 && ms.is_multiple_of(*unit));
    exact.map_or_else(|| format!("{ms}ms"), |(name, unit)| format!("{}{name}", ms / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_in_every_unit_and_shown_as_they_are_read() {
        for (text, ms) in
            [("1500", 1500), ("90s", 90_000), ("30m", 1_800_000), ("12h", 43_200_000), ("7d", 604_800_000)]
        {
            assert_eq!(parse_retention_ms(text), Ok(Bound(Some(ms))), "{text}");
            assert_eq!(parse_retention_ms(&show_ms(ms)), Ok(Bound(Some(ms))));
        }
        assert_eq!(parse_retention_ms("none"), Ok(Bound(None)));
        for bad in ["", "d", "7w", "-1s", "1.5h", "18446744073709551615d"] {
            assert!(parse_retention_ms(bad).is_err(), "{bad}");
        }
    }
}
