//! What was sent and what was acked, kept outside the broker. A record is told by its stream (producer and partition) and
//! its number there; its size and bytes follow from these, so that a read-back can be compared without keeping bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use ringmain_core::ids::Durability;
use ringmain_wire::client::Delivered;

use super::random::Random;

/// A partition of a topic.
pub type Partition = (String, u32);

/// One record: `number` is its place among what its producer sent to the partition, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId {
    /// Who sent it.
    pub producer: u32,
    /// Which of its records in the partition.
    pub number: u64,
}

/// Producers from this number on send what compresses well.
pub const REPEATS_FROM: u32 = 1000;
/// Bytes before the random ones: producer, number, size.
const ID_BYTES: usize = 16;

impl RecordId {
    /// The record's value.
    pub fn value(self, size: usize) -> Vec<u8> {
        let mut value = Vec::with_capacity(size.max(ID_BYTES));
        value.extend_from_slice(&self.producer.to_le_bytes());
        value.extend_from_slice(&self.number.to_le_bytes());
        value.extend_from_slice(&(size.max(ID_BYTES) as u32).to_le_bytes());
        let mut random = Random(u64::from(self.producer) << 40 ^ self.number);
        let rest = size.saturating_sub(ID_BYTES);
        if self.producer < REPEATS_FROM {
            value.extend_from_slice(&random.bytes(rest));
        } else {
            let piece = random.bytes(64);
            value.extend(piece.iter().cycle().take(rest));
        }
        value
    }

    /// The record that a value is, when it is exactly as it was sent.
    pub fn of_value(value: &[u8]) -> Option<Self> {
        let producer = u32::from_le_bytes(value.get(..4)?.try_into().ok()?);
        let number = u64::from_le_bytes(value.get(4..12)?.try_into().ok()?);
        let id = Self { producer, number };
        (id.value(value.len()) == value).then_some(id)
    }
}

/// An ack.
#[derive(Clone, Copy, Debug)]
pub struct Ack {
    /// Which record.
    pub id: RecordId,
    /// Level reached.
    pub level: Durability,
}

/// What is known of a partition.
#[derive(Clone, Debug, Default)]
pub struct PartitionLedger {
    /// Records that each producer has begun to send.
    pub sent: HashMap<u32, u64>,
    /// What must be there, by offset: what was acked, and at level `memory` what a consumer has seen.
    pub acked: BTreeMap<u64, Ack>,
    /// The highest flushed and synced ends that any ack told.
    pub flushed_end: u64,
    /// See `flushed_end`.
    pub synced_end: u64,
    /// No offset below may be given again.
    pub next_offset: u64,
}

/// The ledger of all partitions.
#[derive(Default)]
pub struct Ledger {
    partitions: Mutex<HashMap<Partition, PartitionLedger>>,
    /// Acks by level.
    acks: [AtomicU64; 3],
    lost: AtomicU64,
}

impl Ledger {
    /// The producer is about to send its next record to the partition: its number.
    pub fn send(&self, partition: &Partition, producer: u32) -> RecordId {
        let mut partitions = self.partitions.lock().unwrap();
        let sent = partitions.entry(partition.clone()).or_default().sent.entry(producer).or_default();
        let number = *sent;
        *sent += 1;
        RecordId { producer, number }
    }

    /// An ack has come for a record sent at level `asked`.
    pub fn ack(&self, partition: &Partition, id: RecordId, asked: Durability, delivered: &Delivered) {
        let mut partitions = self.partitions.lock().unwrap();
        let ledger = partitions.get_mut(partition).unwrap();
        let offset = delivered.offset.get();
        let what = format!("{partition:?} offset {offset}, {id:?}");
        assert_eq!(delivered.partition, partition.1, "{what}: acked for another partition");
        assert!(delivered.level >= asked, "{what}: acked at {} and not {asked}", delivered.level);
        if delivered.level >= Durability::Flushed {
            assert!(offset < delivered.flushed_end.get(), "{what}: not below the flushed end of {delivered:?}");
        }
        if delivered.level >= Durability::Synced {
            assert!(offset < delivered.synced_end.get(), "{what}: not below the synced end of {delivered:?}");
        }
        assert!(offset >= ledger.next_offset, "{what}: offsets below {} were given before", ledger.next_offset);
        let before = ledger.acked.insert(offset, Ack { id, level: delivered.level });
        assert!(before.is_none(), "{what}: the offset was given before, to {before:?}");
        ledger.flushed_end = ledger.flushed_end.max(delivered.flushed_end.get());
        ledger.synced_end = ledger.synced_end.max(delivered.synced_end.get());
        drop(partitions);
        self.acks[delivered.level as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Acks so far.
    pub fn acks(&self) -> u64 {
        self.acks_by_level().iter().sum()
    }

    /// Acks so far at `memory`, `flushed`, `synced`.
    pub fn acks_by_level(&self) -> [u64; 3] {
        self.acks.each_ref().map(|acks| acks.load(Ordering::Relaxed))
    }

    /// What was acked or seen has been lost by right.
    pub fn note_lost(&self, records: usize) {
        self.lost.fetch_add(records as u64, Ordering::Relaxed);
    }

    /// Records lost by right so far.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// All partitions that something was sent to, in order.
    pub fn partitions(&self) -> Vec<Partition> {
        let mut all: Vec<_> = self.partitions.lock().unwrap().keys().cloned().collect();
        all.sort();
        all
    }

    /// Looks at and changes what is known of a partition.
    pub fn with<T>(&self, partition: &Partition, work: impl FnOnce(&mut PartitionLedger) -> T) -> T {
        work(self.partitions.lock().unwrap().entry(partition.clone()).or_default())
    }
}
