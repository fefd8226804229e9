//! The index of a segment that has no footer yet: all its entries, in memory.

use std::collections::BTreeMap;

use super::IndexEntry;
use crate::extent::RunEntry;
use crate::ids::{Offset, PartitionKey, TopicId};

/// All runs of one segment, for each partition sorted by offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActiveIndex {
    partitions: BTreeMap<PartitionKey, Vec<IndexEntry>>,
    entries: usize,
}

/// What a segment knows about an offset of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Probe {
    /// The segment has nothing of the partition.
    Absent,
    /// All it has of the partition lies before the offset.
    Below,
    /// The run that covers the offset.
    Covers(IndexEntry),
    /// Nothing covers the offset; this is the next run above it.
    Above(IndexEntry),
}

/// Judges sorted entries of one partition.
pub(super) fn probe_sorted(entries: &[IndexEntry], offset: Offset) -> Probe {
    let at = entries.partition_point(|entry| entry.next_offset <= offset);
    match entries.get(at) {
        Some(entry) if entry.base_offset <= offset => Probe::Covers(*entry),
        Some(entry) => Probe::Above(*entry),
        None if entries.is_empty() => Probe::Absent,
        None => Probe::Below,
    }
}

impl ActiveIndex {
    /// Adds an entry where it belongs. Appending makes entries of a partition come in order, so this is cheap.
    pub fn insert(&mut self, entry: IndexEntry) {
        let entries = self.partitions.entry(entry.key).or_default();
        let at = entries.partition_point(|other| other.base_offset <= entry.base_offset);
        entries.insert(at, entry);
        self.entries += 1;
    }

    /// Adds the runs of the extent at `extent_place`.
    pub fn insert_extent(&mut self, extent_place: u64, runs: &[RunEntry]) {
        for run in runs {
            self.insert(IndexEntry::of_run(extent_place, run));
        }
    }

    /// Number of entries.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.entries
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// All entries, sorted as a footer wants them.
    #[must_use]
    pub fn sorted(&self) -> Vec<IndexEntry> {
        self.partitions.values().flatten().copied().collect()
    }

    /// All entries of a topic, partition by partition.
    pub fn runs_of(&self, topic: TopicId) -> impl Iterator<Item = IndexEntry> + '_ {
        let partition = |partition| PartitionKey { topic, partition };
        self.partitions.range(partition(0)..=partition(u32::MAX)).flat_map(|(_, entries)| entries).copied()
    }

    /// The run that covers `offset`, or else the next one above it.
    #[must_use]
    pub fn lookup(&self, key: PartitionKey, offset: Offset) -> Option<IndexEntry> {
        match self.probe(key, offset) {
            Probe::Covers(entry) | Probe::Above(entry) => Some(entry),
            Probe::Absent | Probe::Below => None,
        }
    }

    pub(super) fn probe(&self, key: PartitionKey, offset: Offset) -> Probe {
        self.partitions.get(&key).map_or(Probe::Absent, |entries| probe_sorted(entries, offset))
    }
}

impl FromIterator<IndexEntry> for ActiveIndex {
    fn from_iter<T: IntoIterator<Item = IndexEntry>>(entries: T) -> Self {
        let mut index = Self::default();
        entries.into_iter().for_each(|entry| index.insert(entry));
        index
    }
}
