//! What was promised, kept outside of the shard: every batch that was given an offset, how far each partition was said to
//! be flushed and synced, where offsets jumped, and what damage may have cost. Checks what a reader sees against it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ringmain_core::batch::{BATCH_HEADER_BYTES, BatchHeader, batches, check_crc, seal_crc};
use ringmain_core::crc::crc32c;
use ringmain_core::dedup::Producers;
use ringmain_core::ids::{Offset, PartitionKey};
use ringmain_core::limits::PRODUCER_WINDOW_BATCHES;

use crate::disk::Crash;
use crate::layout::Records;
use crate::rng::Rng;

/// A batch as a reader sees it; `id` stands in its body, `sum` is over all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    pub id: u64,
    pub sum: u32,
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
    /// Damage was done to these: they may be missing, and nothing else.
    may_miss: Vec<Range<Offset>>,
    /// When each batch was appended, by its next offset, in time that really passed.
    appended_ms: BTreeMap<Offset, u64>,
}

impl Partition {
    /// The first batch that lies at or past the log start. Log starts are ends of batches.
    fn kept_from(&self, log_start: Offset) -> usize {
        let first = self.batches.partition_point(|batch| batch.next <= log_start);
        let at_an_end = self.batches.get(first).is_none_or(|batch| batch.base >= log_start);
        assert!(at_an_end, "the log start {log_start} is inside a batch");
        first
    }

    /// Whether damage may have taken the batch.
    fn is_spoilt(&self, batch: &Seen) -> bool {
        self.may_miss.iter().any(|range| range.contains(&batch.base))
    }

    /// That `seen` is what `expected` is, but for what damage may have taken; all that is seen is among them.
    fn assert_all_but_spoilt(&self, key: PartitionKey, expected: &[Seen], seen: &[Seen]) {
        let mut left = seen.iter().copied().peekable();
        for batch in expected {
            if left.next_if_eq(batch).is_none() {
                assert!(self.is_spoilt(batch), "{key}: {batch:?} is missing, and nothing was done to it: {seen:?}");
            }
        }
        assert_eq!(left.next(), None, "{key}: records that are out of place or that nobody sent");
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
    /// Files were spoilt.
    pub damaged: bool,
}

impl Ledger {
    /// A new batch of `records` records for `key`, as a producer sends it; of noise, or of one byte again and again.
    pub fn make_batch(
        &mut self,
        key: PartitionKey,
        records: u32,
        body_bytes: usize,
        noise: bool,
    ) -> (BatchHeader, Vec<u8>) {
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
        if noise {
            let mut rng = Rng::new(self.next_id);
            bytes.chunks_exact_mut(8).for_each(|piece| piece.copy_from_slice(&rng.next().to_le_bytes()));
        }
        header.write(&mut bytes);
        bytes[BATCH_HEADER_BYTES..BATCH_HEADER_BYTES + 8].copy_from_slice(&self.next_id.to_le_bytes());
        seal_crc(&mut bytes);
        (BatchHeader::parse(&bytes).expect("a sound batch"), bytes)
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

    /// The windows of a shard say what is left of each producer in the partitions that are there, and nothing else. Nothing was
    /// damaged.
    pub fn check_windows(&self, producers: &Producers, is_there: impl Fn(&PartitionKey) -> bool) {
        assert!(!producers.has_forgotten());
        let mut expected = BTreeMap::new();
        for (&key, partition) in self.partitions.iter().filter(|(key, _)| is_there(key)) {
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
        let windows = producers.windows().filter(|(key, _)| is_there(key)).map(|(key, window)| {
            let offsets = window.batches().map(|batch| batch.base_offset).collect();
            ((key, window.producer_id()), (window.producer_epoch(), offsets))
        });
        assert_eq!(windows.collect::<BTreeMap<_, (u16, Vec<Offset>)>>(), expected);
    }

    pub fn appended(&mut self, key: PartitionKey, seen: Seen, now_ms: u64) {
        let partition = self.partitions.entry(key).or_default();
        assert!(
            seen.base >= partition.given,
            "{key}: offset {} is given twice (given up to {})",
            seen.base,
            partition.given
        );
        let end = partition.batches.last().map_or(Offset(0), |last| last.next);
        assert!(
            seen.base == end || partition.resumes.contains(&seen.base) || !partition.may_miss.is_empty(),
            "{key}: offset {} leaves an unexplained gap behind {end}",
            seen.base
        );
        partition.given = seen.next;
        partition.batches.push(seen);
        partition.appended_ms.insert(seen.next, now_ms);
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

    /// How long ago the newest batch before `end` was appended.
    pub fn age_ms(&self, key: PartitionKey, end: Offset, now_ms: u64) -> Option<u64> {
        let (_, appended) = self.partitions.get(&key)?.appended_ms.range(..=end).next_back()?;
        Some(now_ms - appended)
    }

    /// Damage was done to these records.
    pub fn may_miss(&mut self, (key, records): &Records) {
        self.partitions.entry(*key).or_default().may_miss.push(records.clone());
    }

    /// Memory is lost, as if somebody had deleted the arena.
    pub fn arena_is_lost(&mut self) {
        self.worst = self.worst.max(Some(Crash::ArenaLost));
    }

    /// Damage and the loss of memory together have taken all that told of a life: its offsets may be given again.
    pub fn may_repeat(&mut self) {
        for partition in self.partitions.values_mut() {
            partition.given = Offset(0);
        }
    }

    /// What a reader sees of a running shard: all that was appended from the log start on.
    pub fn check_all(&self, key: PartitionKey, log_start: Option<Offset>, seen: &[Seen]) {
        let Some(partition) = self.partitions.get(&key) else {
            assert!(seen.is_empty(), "{key}: records that nobody sent: {seen:?}");
            return;
        };
        if self.damaged {
            let start = log_start.unwrap_or_default();
            // Where a log start was lost, what is below the one before may be gone.
            let gone = |batch: &&Seen| batch.base < partition.start_synced && !seen.contains(batch);
            let kept = partition.batches.iter().filter(|batch| batch.next > start && !gone(batch));
            partition.assert_all_but_spoilt(key, &kept.copied().collect::<Vec<_>>(), seen);
            return;
        }
        let kept = &partition.batches[partition.kept_from(log_start.unwrap_or_default())..];
        assert_eq!(seen, kept, "{key}: a reader sees something else than was appended");
    }

    /// What a start finds, before it goes on: what was promised, and nothing else.
    pub fn check_recovered(&mut self, key: PartitionKey, log_start: Offset, seen: &[Seen]) {
        let (worst, damaged) = (self.worst, self.damaged);
        let partition = self.partitions.entry(key).or_default();
        assert!(log_start <= partition.raised, "{key}: nobody raised the log start to {log_start}");
        if damaged {
            self.lost += check_damaged(key, partition, worst, log_start, seen);
            return;
        }
        assert!(log_start >= partition.start_synced, "{key}: the log start fell to {log_start}, below what was freed");
        let first = partition.kept_from(log_start);
        let prefix = partition.batches.get(first..first + seen.len());
        assert_eq!(prefix, Some(seen), "{key}: what is left is not a prefix of what was appended");
        let left = first + seen.len();
        let end = partition.batches[..left].last().map_or(Offset(0), |last| last.next);
        let promised = partition.promised(worst);
        assert!(end >= promised, "{key}: {worst:?} lost acked records: left up to {end}, promised up to {promised}");
        self.lost += (partition.batches.len() - left) as u64;
        partition.cut(left, end);
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

impl Partition {
    /// Up to where everything must be left after the worst that has happened.
    fn promised(&self, worst: Option<Crash>) -> Offset {
        match worst {
            None | Some(Crash::Kill) => self.batches.last().map_or(Offset(0), |last| last.next),
            Some(Crash::ArenaLost) => self.flushed_end,
            Some(Crash::Power) => self.synced_end,
        }
    }

    /// Only the first `left` batches are there any more, up to `end`.
    fn cut(&mut self, left: usize, end: Offset) {
        self.batches.truncate(left);
        self.flushed_end = self.flushed_end.min(end);
        self.synced_end = self.synced_end.min(end);
    }
}

/// The same where damage was done: whatever nobody touched and was promised is there, and nothing that was never sent. Gives
/// how many batches are lost at the end.
fn check_damaged(
    key: PartitionKey,
    partition: &mut Partition,
    worst: Option<Crash>,
    log_start: Offset,
    seen: &[Seen],
) -> u64 {
    let promised = partition.promised(worst);
    let (start, synced_start) = (log_start, partition.start_synced);
    // Below the newest log start that was synced space may be freed, if damage has taken that log start.
    let may_be_gone = |batch: &Seen| batch.base < synced_start && !seen.contains(batch);
    let kept = partition.batches.iter().filter(|batch| batch.next > start && !may_be_gone(batch));
    let last = seen.last().map_or(start, |last| last.next);
    let expected: Vec<Seen> = kept.copied().filter(|batch| batch.next <= promised.max(last)).collect();
    partition.assert_all_but_spoilt(key, &expected, seen);
    let left = partition.batches.partition_point(|batch| batch.next <= last);
    let lost = partition.batches.len() - left;
    partition.cut(left, last);
    lost as u64
}

/// A batch as its bytes say, header and the id behind it.
pub fn seen_of(header: &BatchHeader, bytes: &[u8]) -> Seen {
    let body = &bytes[BATCH_HEADER_BYTES..header.batch_bytes as usize];
    let mut id = [0; 8];
    id.copy_from_slice(&body[..8]);
    Seen { id: u64::from_le_bytes(id), sum: crc32c(body), base: header.base_offset, next: header.next_offset() }
}

/// Reads batches that stand one behind the other, CRCs checked.
pub fn read_batches(bytes: &[u8]) -> Vec<Seen> {
    batches(bytes)
        .map(|batch| {
            let (header, bytes) = batch.expect("whole batches");
            check_crc(&header, bytes).expect("the producer's bytes");
            seen_of(&header, bytes)
        })
        .collect()
}
