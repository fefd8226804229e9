//! The checkpoint: what must not die with the last record of a quiet partition. Each segment starts with one, each
//! start of a shard and each clean stop writes one.
//!
//! On disk it is the rkyv archive that takes the place of an extent's directory; the extent has no runs.

use rkyv::rancor::Failure;
use rkyv::{Archive, Deserialize, Serialize};

use crate::crc::crc32c;
use crate::extent::{ExtentError, ExtentHeader, ExtentKind};
use crate::ids::{Epoch, Offset, PartitionKey, TopicId};
use crate::limits::SHARD_PARTITIONS_MAX;

/// All ends of a shard at one place of its log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// The shard's epoch.
    pub epoch: Epoch,
    /// The shard stopped here with everything flushed and synced.
    pub clean: bool,
    /// Milliseconds since the Unix epoch.
    pub created_ms: i64,
    /// Every partition of the shard, sorted by key.
    pub partitions: Vec<CheckpointPartition>,
    /// Further tables (committed offsets, producer windows) in their own encoding; a reader leaves the ones it does
    /// not know alone.
    pub sections: Vec<CheckpointSection>,
}

/// One partition in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointPartition {
    /// Which one.
    pub key: PartitionKey,
    /// First offset that is kept.
    pub log_start: Offset,
    /// One past the last offset that lies in extents before the checkpoint, or where a start moved it. Not the log end:
    /// what memory has beyond it follows in later extents.
    pub next_offset: Offset,
    /// Epoch that `next_offset` belongs to: of the last batch before it, or, where a start moved it past offsets that
    /// memory may have acked, the epoch of that start.
    pub last_epoch: Epoch,
}

/// A table that belongs to one part of the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointSection {
    /// What the bytes are.
    pub kind: u32,
    /// The table.
    pub bytes: Vec<u8>,
}

#[derive(Archive, Serialize, Deserialize)]
struct DiskCheckpoint {
    partitions: Vec<DiskPartition>,
    sections: Vec<DiskSection>,
    created_ms: i64,
    epoch: u32,
    clean: bool,
}

#[derive(Archive, Serialize, Deserialize)]
struct DiskPartition {
    topic: u64,
    log_start: u64,
    next_offset: u64,
    partition: u32,
    last_epoch: u32,
}

#[derive(Archive, Serialize, Deserialize)]
struct DiskSection {
    kind: u32,
    bytes: Vec<u8>,
}

impl Checkpoint {
    /// The bytes that stand behind the extent header.
    ///
    /// # Panics
    /// When the partitions are not sorted by key.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.partitions.is_sorted_by(|a, b| a.key < b.key), "partitions of a checkpoint are sorted by key");
        let disk_partition = |partition: &CheckpointPartition| DiskPartition {
            topic: partition.key.topic.0,
            log_start: partition.log_start.0,
            next_offset: partition.next_offset.0,
            partition: partition.key.partition,
            last_epoch: partition.last_epoch.0,
        };
        let disk_section =
            |section: &CheckpointSection| DiskSection { kind: section.kind, bytes: section.bytes.clone() };
        let checkpoint = DiskCheckpoint {
            partitions: self.partitions.iter().map(disk_partition).collect(),
            sections: self.sections.iter().map(disk_section).collect(),
            created_ms: self.created_ms,
            epoch: self.epoch.0,
            clean: self.clean,
        };
        rkyv::api::high::to_bytes_in::<_, Failure>(&checkpoint, Vec::new())
            .expect("plain numbers in memory always serialise")
    }

    /// Reads the checkpoint that `header` promises, from `directory`, its `directory_bytes` bytes. Checks the CRC, the
    /// archive, and that partitions are sorted, unique and no more than a shard has.
    pub fn decode(directory: &[u8], header: &ExtentHeader) -> Result<Self, ExtentError> {
        if header.kind != ExtentKind::Checkpoint {
            return Err(ExtentError::Field("kind"));
        }
        if directory.len() != header.directory_bytes as usize || crc32c(directory) != header.directory_crc {
            return Err(ExtentError::DirectoryCrc);
        }
        let archive =
            rkyv::access::<ArchivedDiskCheckpoint, Failure>(directory).map_err(|Failure| ExtentError::Directory)?;
        if archive.partitions.len() > SHARD_PARTITIONS_MAX {
            return Err(ExtentError::Directory);
        }
        let mut partitions: Vec<CheckpointPartition> = Vec::with_capacity(archive.partitions.len());
        for (index, disk_partition) in archive.partitions.iter().enumerate() {
            let partition = CheckpointPartition {
                key: PartitionKey {
                    topic: TopicId(disk_partition.topic.into()),
                    partition: disk_partition.partition.into(),
                },
                log_start: Offset(disk_partition.log_start.into()),
                next_offset: Offset(disk_partition.next_offset.into()),
                last_epoch: Epoch(disk_partition.last_epoch.into()),
            };
            if partition.log_start > partition.next_offset {
                return Err(ExtentError::Run { index, what: "starts past its end" });
            }
            if partitions.last().is_some_and(|last| last.key >= partition.key) {
                return Err(ExtentError::Run { index, what: "is out of order" });
            }
            partitions.push(partition);
        }
        // The archive check made sure that sections do not share bytes, so together they fit the directory.
        let section = |section: &ArchivedDiskSection| CheckpointSection {
            kind: section.kind.into(),
            bytes: section.bytes.as_slice().to_vec(),
        };
        Ok(Self {
            epoch: Epoch(archive.epoch.into()),
            clean: archive.clean,
            created_ms: archive.created_ms.into(),
            partitions,
            sections: archive.sections.iter().map(section).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extent::Layout;
    use crate::ids::{ExtentSequence, Incarnation, LogId, Position};
    use crate::limits::CHECKPOINT_BYTES_MAX;
    use proptest::prelude::*;

    fn header_for(bytes: &[u8]) -> ExtentHeader {
        ExtentHeader {
            kind: ExtentKind::Checkpoint,
            log_id: LogId(1),
            sequence: ExtentSequence(1),
            incarnation: Incarnation(1),
            previous_header_crc: 0,
            synced_position: Position(0),
            directory_bytes: bytes.len() as u32,
            directory_crc: crc32c(bytes),
            extent_bytes: Layout::of_checkpoint(bytes.len()).extent_bytes,
            run_count: 0,
            epoch: Epoch(0),
        }
    }

    fn checkpoint() -> impl Strategy<Value = Checkpoint> {
        let partitions = proptest::collection::btree_map((0..9u64, 0..9u32), (0..99u64, 0..99u64, 0..9u32), 0..40);
        let sections = proptest::collection::vec((any::<u32>(), proptest::collection::vec(any::<u8>(), 0..50)), 0..4);
        (any::<u32>(), any::<bool>(), any::<i64>(), partitions, sections).prop_map(
            |(epoch, clean, created_ms, partitions, sections)| Checkpoint {
                epoch: Epoch(epoch),
                clean,
                created_ms,
                partitions: partitions
                    .into_iter()
                    .map(|((topic, partition), (log_start, more, last_epoch))| CheckpointPartition {
                        key: PartitionKey::new(topic, partition),
                        log_start: Offset(log_start),
                        next_offset: Offset(log_start + more),
                        last_epoch: Epoch(last_epoch),
                    })
                    .collect(),
                sections: sections.into_iter().map(|(kind, bytes)| CheckpointSection { kind, bytes }).collect(),
            },
        )
    }

    proptest! {
        #[test]
        fn a_checkpoint_reads_back(checkpoint in checkpoint()) {
            let bytes = checkpoint.encode();
            prop_assert_eq!(Checkpoint::decode(&bytes, &header_for(&bytes)).unwrap(), checkpoint);
        }

        #[test]
        fn damage_under_a_right_crc_never_panics(
            checkpoint in checkpoint(),
            damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        ) {
            let mut bytes = checkpoint.encode();
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            let _ = Checkpoint::decode(&bytes, &header_for(&bytes));
        }
    }

    #[test]
    fn a_full_shard_fits_a_checkpoint_extent() {
        let partition = |number| CheckpointPartition {
            key: PartitionKey::new(number, 0),
            log_start: Offset(0),
            next_offset: Offset(1),
            last_epoch: Epoch(0),
        };
        let partitions = (0..SHARD_PARTITIONS_MAX as u64).map(partition).collect();
        let bytes = Checkpoint { partitions, ..Checkpoint::default() }.encode();
        // The other half is for commits and producer windows.
        assert!(bytes.len() < CHECKPOINT_BYTES_MAX / 2);
    }
}
