//! What was promised, kept outside of the shard: every batch that was given an offset, how far each partition was said to
//! be flushed and synced, and where offsets jumped. Checks what a reader sees against it.

use std::collections::{BTreeMap, BTreeSet};

use ringmain_core::batch::{BATCH_HEADER_BYTES, BatchHeader, batches, check_crc, seal_crc};
use ringmain_core::dedup::Producers;
use ringmain_core::ids::{Offset, PartitionKey};
use ringmain_core::limits::PRODUCER_WINDOW_BATCHES;

use crate::disk::Crash;

/// A batch as a reader sees it; `id` stands in its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    pub id: u64,
    pub base: Offset,
    pub next: Offset,
}

#[derive(Clone, Debug, Default)]
struct Partition {
    /// All batches that must or may be there, in order.
    batches: Vec<Seen>,
    flushed_end: Offset,
    synced_end: Offset,
    /// One past the highest offset ever given.
    given: Offset,
    /// Where a start moved the partition on; a gap may end only here.
    resumes: BTreeSet<Offset>,
    /// The highest log start that retention has chosen.
    raised: Offset,
    /// The highest log start that is synced: what lies below may be gone.
    start_synced: Offset,
    /// Damage was done on purpose: batches may be missing anywhere.
    damaged: bool,
}

impl Partition {
    /// The first batch that lies at or past the log start. Log starts are ends of batches.
    fn kept_from(&self, log_start: Offset) -> usize {
        let first = self.batches.partition_point(|batch| batch.next <= log_start);
        let at_an_end = self.batches.get(first).is_none_or(|batch| batch.base >= log_start);
        assert!(at_an_end, "the log start {log_start} is inside a batch");
        first
    }
}

/// Producers, the one that is not idempotent included.
const PRODUCERS: u64 = 3;

/// Which producer sends batch number `id`.
fn producer_of(id: u64) -> u64 {
    id % PRODUCERS
}

/// All promises of one run.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    partitions: BTreeMap<PartitionKey, Partition>,
    next_id: u64,
    /// Epoch and next sequence of each idempotent producer in each partition.
    producers: BTreeMap<(PartitionKey, u64), (u16, u32)>,
    /// The producer epoch of each batch.
    producer_epochs: BTreeMap<u64, u16>,
    /// The worst that has happened since a start last came through.
    worst: Option<Crash>,
    pub lost: u64,
}

impl Ledger {
    /// A new batch of `records` records for `key`, as a producer sends it.
    pub fn make_batch(&mut self, key: PartitionKey, records: u32, body_bytes: usize) -> (u64, BatchHeader, Vec<u8>) {
        self.next_id += 1;
        let name = (key, producer_of(self.next_id));
        let (producer_epoch, base_sequence) = self.producers.get(&name).copied().unwrap_or_default();
        let size = (BATCH_HEADER_BYTES + 8 + body_bytes).next_multiple_of(8);
        let header = BatchHeader {
            batch_bytes: size as u32,
            record_count: records,
            key,
            raw_body_bytes: body_bytes as u32,
            producer_id: producer_of(self.next_id),
            producer_epoch,
            base_sequence,
            ..BatchHeader::default()
        };
        let mut bytes = vec![self.next_id as u8; size];
        header.write(&mut bytes);
        bytes[BATCH_HEADER_BYTES..BATCH_HEADER_BYTES + 8].copy_from_slice(&self.next_id.to_le_bytes());
        seal_crc(&mut bytes);
        (self.next_id, BatchHeader::parse(&bytes).expect("a sound batch"), bytes)
    }

    /// A batch of an idempotent producer was appended.
    pub fn produced(&mut self, header: &BatchHeader, id: u64) {
        if header.producer_id != 0 {
            let next = (header.producer_epoch, header.base_sequence.wrapping_add(header.record_count));
            self.producers.insert((header.key, header.producer_id), next);
            self.producer_epochs.insert(id, header.producer_epoch);
        }
    }

    /// A producer of this partition has learnt that what it sent is lost: it begins anew.
    pub fn renumber(&mut self, header: &BatchHeader) {
        self.producers.insert((header.key, header.producer_id), (header.producer_epoch + 1, 0));
    }

    /// The windows of a shard say what is left of each producer, and nothing else.
    pub fn check_windows(&self, producers: &Producers) {
        if self.partitions.values().any(|partition| partition.damaged) {
            return;
        }
        assert!(!producers.has_forgotten());
        let mut expected = BTreeMap::new();
        for (&key, partition) in &self.partitions {
            for producer in 1..PRODUCERS {
                let mine = partition.batches.iter().rev().filter(|batch| producer_of(batch.id) == producer);
                let epoch = mine.clone().map(|batch| self.producer_epochs[&batch.id]).max();
                let newest = mine.filter(|batch| Some(self.producer_epochs[&batch.id]) == epoch);
                let mut window: Vec<Offset> = newest.take(PRODUCER_WINDOW_BATCHES).map(|batch| batch.base).collect();
                window.reverse();
                if let Some(epoch) = epoch {
                    expected.insert((key, producer), (epoch, window));
                }
            }
        }
        let windows = producers.windows().map(|(key, window)| {
            let offsets = window.batches().map(|batch| batch.base_offset).collect();
            ((key, window.producer_id()), (window.producer_epoch(), offsets))
        });
        assert_eq!(windows.collect::<BTreeMap<_, (u16, Vec<Offset>)>>(), expected);
    }

    pub fn appended(&mut self, key: PartitionKey, seen: Seen) {
        let partition = self.partitions.entry(key).or_default();
        assert!(
            seen.base >= partition.given,
            "{key}: offset {} is given twice (given up to {})",
            seen.base,
            partition.given
        );
        let end = partition.batches.last().map_or(Offset(0), |last| last.next);
        assert!(
            seen.base == end || partition.resumes.contains(&seen.base) || partition.damaged,
            "{key}: offset {} leaves an unexplained gap behind {end}",
            seen.base
        );
        partition.given = seen.next;
        partition.batches.push(seen);
    }

    pub fn flushed(&mut self, key: PartitionKey, end: Offset) {
        let partition = self.partitions.entry(key).or_default();
        partition.flushed_end = partition.flushed_end.max(end);
    }

    pub fn synced(&mut self, key: PartitionKey, end: Offset) {
        let partition = self.partitions.entry(key).or_default();
        assert!(end <= partition.flushed_end, "{key}: synced past flushed");
        partition.synced_end = partition.synced_end.max(end);
    }

    /// Ends that acks may be given for.
    pub fn ends(&self, key: PartitionKey) -> (Offset, Offset) {
        self.partitions
            .get(&key)
            .map_or((Offset(0), Offset(0)), |partition| (partition.flushed_end, partition.synced_end))
    }

    /// Retention gives up what lies before `start`.
    pub fn raised(&mut self, key: PartitionKey, start: Offset) {
        let partition = self.partitions.entry(key).or_default();
        partition.raised = partition.raised.max(start);
    }

    /// A checkpoint with this log start is synced.
    pub fn start_synced(&mut self, key: PartitionKey, start: Offset) {
        let partition = self.partitions.entry(key).or_default();
        partition.start_synced = partition.start_synced.max(start);
    }

    /// A start moves the partition on to `offset`.
    pub fn resumed(&mut self, key: PartitionKey, offset: Offset) {
        self.partitions.entry(key).or_default().resumes.insert(offset);
    }

    pub fn crashed(&mut self, crash: Crash) {
        self.worst = self.worst.max(Some(crash));
    }

    /// From here on batches may be missing, but nothing else may be wrong.
    pub fn damaged(&mut self) {
        self.partitions.values_mut().for_each(|partition| partition.damaged = true);
    }

    /// What a reader sees of a running shard: all that was appended from the log start on.
    pub fn check_all(&self, key: PartitionKey, log_start: Option<Offset>, seen: &[Seen]) {
        let Some(partition) = self.partitions.get(&key) else {
            assert!(seen.is_empty(), "{key}: records that nobody sent: {seen:?}");
            return;
        };
        if !partition.damaged {
            let kept = &partition.batches[partition.kept_from(log_start.unwrap_or_default())..];
            assert_eq!(seen, kept, "{key}: a reader sees something else than was appended");
        }
    }

    /// What a start finds, before it goes on: what was promised, and nothing else.
    pub fn check_recovered(&mut self, key: PartitionKey, log_start: Offset, seen: &[Seen]) {
        let worst = self.worst;
        let partition = self.partitions.entry(key).or_default();
        if partition.damaged {
            let known = |seen: &Seen| partition.batches.contains(seen);
            assert!(seen.iter().all(known), "{key}: records that nobody sent: {seen:?}");
            assert!(seen.is_sorted_by(|a, b| a.next <= b.base), "{key}: out of order");
            // What a damaged page hides now may be found again later.
            return;
        }
        assert!(log_start <= partition.raised, "{key}: nobody raised the log start to {log_start}");
        assert!(log_start >= partition.start_synced, "{key}: the log start fell to {log_start}, below what was freed");
        let first = partition.kept_from(log_start);
        let prefix = partition.batches.get(first..first + seen.len());
        assert_eq!(prefix, Some(seen), "{key}: what is left is not a prefix of what was appended");
        let left = first + seen.len();
        let end = partition.batches[..left].last().map_or(Offset(0), |last| last.next);
        let all = partition.batches.last().map_or(Offset(0), |last| last.next);
        let promised = match worst {
            None | Some(Crash::Kill) => all,
            Some(Crash::ArenaLost) => partition.flushed_end,
            Some(Crash::Power) => partition.synced_end,
        };
        assert!(end >= promised, "{key}: {worst:?} lost acked records: left up to {end}, promised up to {promised}");
        self.lost += (partition.batches.len() - left) as u64;
        partition.batches.truncate(left);
        partition.flushed_end = partition.flushed_end.min(end);
        partition.synced_end = partition.synced_end.min(end);
    }

    /// A start has come through: what recovery found in the log of `key`, up to `log_end`, is synced.
    pub fn started(&mut self, key: PartitionKey, log_end: Offset) {
        let partition = self.partitions.entry(key).or_default();
        let in_log = partition.batches.iter().rev().find(|batch| batch.next <= log_end);
        let end = in_log.map_or(Offset(0), |last| last.next);
        partition.flushed_end = partition.flushed_end.max(end);
        partition.synced_end = partition.synced_end.max(end);
    }

    pub fn all_started(&mut self) {
        self.worst = None;
    }
}

/// Reads batches that stand one behind the other, CRCs checked.
pub fn read_batches(bytes: &[u8]) -> Vec<Seen> {
    batches(bytes)
        .map(|batch| {
            let (header, bytes) = batch.expect("whole batches");
            check_crc(&header, bytes).expect("the producer's bytes");
            let mut id = [0; 8];
            id.copy_from_slice(&bytes[BATCH_HEADER_BYTES..BATCH_HEADER_BYTES + 8]);
            Seen { id: u64::from_le_bytes(id), base: header.base_offset, next: header.next_offset() }
        })
        .collect()
}
