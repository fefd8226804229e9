//! Newtypes for everything that is counted, named or addressed, so that an offset can't be passed where a byte
//! position is meant. All ends are exclusive.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl $name {
            /// The bare number, for encoding and display.
            #[must_use]
            pub const fn get(self) -> $inner {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

id!(
    /// A topic for all time: never reused, also not after the topic is deleted.
    TopicId(u64)
);
id!(
    /// Logical number of a record in its partition.
    Offset(u64)
);
id!(
    /// Byte place in a shard log, counted over all its segments: `segment * segment_bytes + place in the file`.
    Position(u64)
);
id!(
    /// Raised when memory was lost (offsets jump by 2^32 for each), or by a new leader.
    Epoch(u32)
);
id!(
    /// Raised at every start of a shard; an extent of an older incarnation behind a newer one is dead.
    Incarnation(u32)
);
id!(
    /// Random name of one shard log, made with the data directory: a foreign or copied-over extent never chains.
    LogId(u64)
);
id!(
    /// Place of an extent in its shard log: 0, 1, 2 … without holes.
    ExtentSequence(u64)
);
id!(
    /// Number of a segment file in its shard log.
    SegmentSequence(u64)
);
id!(
    /// Index of a shard in its broker, from 0.
    ShardId(u16)
);

/// The unit of order: one partition of one topic. Sorts by topic, then partition: the order inside an extent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionKey {
    /// The topic.
    pub topic: TopicId,
    /// Number of the partition in its topic, from 0.
    pub partition: u32,
}

impl PartitionKey {
    /// Shorthand for tests and call sites that have bare numbers.
    #[must_use]
    pub const fn new(topic: u64, partition: u32) -> Self {
        Self { topic: TopicId(topic), partition }
    }
}

impl fmt::Display for PartitionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.topic, self.partition)
    }
}

impl Offset {
    /// This offset moved on by `records`; saturates, since an offset past 2^64 can't be given.
    #[must_use]
    pub const fn plus(self, records: u64) -> Self {
        Self(self.0.saturating_add(records))
    }

    /// Records from `earlier` up to this offset; 0 when `earlier` lies past it.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// How safe a record must be before its produce is acked. Ordered: each level includes the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Durability {
    /// In the shared-memory arena: survives the death of the process, not a power cut.
    #[default]
    Memory = 0,
    /// The write has completed, and all before it: survives also the loss of the arena.
    Flushed = 1,
    /// An fdatasync covers it: survives power loss.
    Synced = 2,
}

impl Durability {
    /// The level of a wire or disk byte, if there is one.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Memory),
            1 => Some(Self::Flushed),
            2 => Some(Self::Synced),
            _ => None,
        }
    }

    /// The word operators write: `memory`, `flushed`, `synced`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Flushed => "flushed",
            Self::Synced => "synced",
        }
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Durability {
    type Err = UnknownDurability;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "memory" => Ok(Self::Memory),
            "flushed" => Ok(Self::Flushed),
            "synced" => Ok(Self::Synced),
            _ => Err(UnknownDurability(text.to_owned())),
        }
    }
}

/// A durability word that is none of `memory`, `flushed`, `synced`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown durability `{0}`: use memory, flushed or synced")]
pub struct UnknownDurability(pub String);
