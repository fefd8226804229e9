//! A topic as master and brokers speak of it.

mod settings;

use crate::ids::{Durability, TopicId};
use crate::limits::{
    RETENTION_BYTES_MIN, RETENTION_MS_MAX, RETENTION_MS_MIN, TOPIC_NAME_BYTES_MAX, TOPIC_PARTITIONS_MAX,
    TOPIC_STORES_MAX,
};

pub use settings::{TopicAlteration, TopicSettings};

/// A topic with its partitions and their stores. Immutable: a change is a new value with a higher version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicInfo {
    /// Never reused, also not after deletion.
    pub id: TopicId,
    /// Unique among living topics.
    pub name: String,
    /// Number of stores; only grows.
    pub stores: u32,
    /// For each partition, from 0, the store that has it; fixed when the partition is made.
    pub partition_stores: Vec<u16>,
    /// What an operator may change.
    pub settings: TopicSettings,
    /// Milliseconds since the Unix epoch.
    pub created_ms: i64,
    /// Metadata version of the last change.
    pub version: u64,
}

/// One change of the topics of a broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopicChange {
    /// The topic is new, or has new settings.
    Put(TopicInfo),
    /// The topic is gone for good: its stores are freed.
    Delete {
        /// Which topic.
        id: TopicId,
        /// Metadata version of the deletion.
        version: u64,
    },
}

/// Why a topic can't be made as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TopicError {
    /// The name breaks the rules.
    #[error(
        "topic name `{0}` is not allowed: use 1 to {TOPIC_NAME_BYTES_MAX} letters, digits, `_`, `-` or `.`, a letter or `_` first"
    )]
    Name(String),
    /// Too few or too many partitions.
    #[error("{0} partitions: a topic has 1 to {TOPIC_PARTITIONS_MAX}")]
    Partitions(u32),
    /// Too few or too many stores.
    #[error("{stores} stores: a topic of {partitions} partitions has 1 to {most}", most = most_stores(*partitions))]
    Stores {
        /// Asked for.
        stores: u32,
        /// Partitions of the topic.
        partitions: u32,
    },
    /// The default level is weaker than the floor.
    #[error("default durability `{default}` is weaker than the floor `{floor}`: raise the default or lower the floor")]
    Floor {
        /// The default level asked for.
        default: Durability,
        /// The floor asked for.
        floor: Durability,
    },
    /// A bound by age that is too short or too long.
    #[error(
        "retention of {0} ms: it is {RETENTION_MS_MIN} ms to {RETENTION_MS_MAX} ms; to keep records for ever, give none"
    )]
    RetentionMs(u64),
    /// A bound by bytes that is too small.
    #[error("retention of {0} bytes: it is {RETENTION_BYTES_MIN} bytes at least; to keep all records, give none")]
    RetentionBytes(u64),
}

fn most_stores(partitions: u32) -> u32 {
    partitions.min(TOPIC_STORES_MAX)
}

/// Checks a topic name: TubeMQ's `^[a-zA-Z]\w+$` widened by `-` and `.`, and one-letter names.
pub fn check_name(name: &str) -> Result<(), TopicError> {
    let mut chars = name.chars();
    let first = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    let rest = chars.all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.'));
    if first && rest && name.len() <= TOPIC_NAME_BYTES_MAX { Ok(()) } else { Err(TopicError::Name(name.to_owned())) }
}

/// Checks the counts of a new topic and spreads its partitions over its stores, round robin. `stores` 0 means
/// as many as the broker has shards, but no more than partitions.
pub fn place_partitions(partitions: u32, stores: u32, shards: u16) -> Result<(u32, Vec<u16>), TopicError> {
    if partitions == 0 || partitions > TOPIC_PARTITIONS_MAX {
        return Err(TopicError::Partitions(partitions));
    }
    let most = most_stores(partitions);
    let stores = if stores == 0 { u32::from(shards).clamp(1, most) } else { stores };
    if stores > most {
        return Err(TopicError::Stores { stores, partitions });
    }
    // A store number fits 16 bits: TOPIC_STORES_MAX is far below.
    let placed = (0..partitions).map(|partition| (partition % stores) as u16).collect();
    Ok((stores, placed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tubemq_pass_and_paths_do_not() {
        for good in ["a", "topic_1", "Orders.eu-west", "_x"] {
            check_name(good).unwrap();
        }
        for bad in ["", "1a", "a/b", "../x", "a b", "ü", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn partitions_go_round_robin_over_stores() {
        assert_eq!(place_partitions(5, 2, 8).unwrap(), (2, vec![0, 1, 0, 1, 0]));
        assert_eq!(place_partitions(3, 0, 8).unwrap().0, 3);
        assert!(place_partitions(2, 3, 1).is_err());
        assert!(place_partitions(0, 1, 1).is_err());
        assert!(place_partitions(10_001, 1, 1).is_err());
    }
}
