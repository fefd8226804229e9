//! Whether every acked record is there, once, at its place: from the acks alone, and by reading everything back.
//!
//! Each producer numbers its records per partition (`sequence`, see [`crate::payload`]). A [`PartitionLedger`] is what
//! one producer knows about one partition: which sequences were acked at which offsets, which were refused, and of
//! which nothing is known (timed out, connection lost). It is kept by the thread of its client, without locks.
//! [`check_acks`] lays the ledgers of one partition side by side; [`ReadBack`] compares them with what a consumer gets.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use crate::payload::Stamp;

/// What was found wrong, in records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Acked but not there; from acks alone: offsets that nobody was given, between others.
    pub lost: u64,
    /// There more than once; from acks alone: offsets that were given twice.
    pub duplicated: u64,
    /// Behind a record that was sent later, or at another offset than acked.
    pub reordered: u64,
    /// Not the bytes that were sent.
    pub corrupt: u64,
    /// Never sent, or sent and refused.
    pub unexpected: u64,
}

impl Findings {
    /// Whether nothing was wrong.
    #[must_use]
    pub fn none(&self) -> bool {
        *self == Self::default()
    }
}

impl AddAssign for Findings {
    fn add_assign(&mut self, other: Self) {
        self.lost += other.lost;
        self.duplicated += other.duplicated;
        self.reordered += other.reordered;
        self.corrupt += other.corrupt;
        self.unexpected += other.unexpected;
    }
}

/// Acked records: `sequence + i` stands at `base_offset + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Acked {
    sequence: u64,
    base_offset: u64,
    count: u64,
}

/// Sequences that have the same fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    sequence: u64,
    count: u64,
}

/// What one producer knows about one partition. Neighbours are merged, so that a producer alone on its partition needs
/// one entry, however long it runs; producers that share one need 24 bytes a batch.
#[derive(Clone, Debug, Default)]
pub struct PartitionLedger {
    acked: Vec<Acked>,
    refused: Vec<Span>,
    unknown: Vec<Span>,
    next_sequence: u64,
}

impl PartitionLedger {
    /// Takes the sequences of the next `count` records; the first of them.
    pub fn take(&mut self, count: u64) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += count;
        sequence
    }

    /// The records from `sequence` on were acked at the offsets from `base_offset` on.
    pub fn acked(&mut self, sequence: u64, base_offset: u64, count: u64) {
        if let Some(last) = self.acked.last_mut()
            && last.sequence + last.count == sequence
            && last.base_offset + last.count == base_offset
        {
            last.count += count;
            return;
        }
        self.acked.push(Acked { sequence, base_offset, count });
    }

    /// The broker said that it did not take them.
    pub fn refused(&mut self, sequence: u64, count: u64) {
        push_span(&mut self.refused, sequence, count);
    }

    /// No answer, or one that leaves it open: they may be there or not.
    pub fn unknown(&mut self, sequence: u64, count: u64) {
        push_span(&mut self.unknown, sequence, count);
    }

    /// Records acked.
    #[must_use]
    pub fn acked_records(&self) -> u64 {
        self.acked.iter().map(|span| span.count).sum()
    }

    /// One past the highest offset acked; 0 when none was.
    #[must_use]
    pub fn next_offset(&self) -> u64 {
        self.acked.iter().map(|span| span.base_offset + span.count).max().unwrap_or(0)
    }

    /// Acked spans whose offsets lie below those of records sent before them, in records.
    fn reordered(&self) -> u64 {
        let mut by_sequence = self.acked.clone();
        by_sequence.sort_unstable_by_key(|span| span.sequence);
        let mut end = 0;
        let mut reordered = 0;
        for span in by_sequence {
            if span.base_offset < end {
                reordered += span.count;
            }
            end = end.max(span.base_offset + span.count);
        }
        reordered
    }
}

fn push_span(spans: &mut Vec<Span>, sequence: u64, count: u64) {
    match spans.last_mut() {
        Some(last) if last.sequence + last.count == sequence => last.count += count,
        _ => spans.push(Span { sequence, count }),
    }
}

/// Lays the offsets acked to all producers of one partition, which was empty at `log_start`, side by side: they must
/// join without hole or overlap. Records of unknown fate may explain a hole.
pub fn check_acks<'a>(ledgers: impl Iterator<Item = &'a PartitionLedger>, log_start: u64) -> Findings {
    let mut offsets: Vec<(u64, u64)> = Vec::new();
    let mut findings = Findings::default();
    let mut unknown = 0;
    for ledger in ledgers {
        offsets.extend(ledger.acked.iter().map(|span| (span.base_offset, span.count)));
        findings.reordered += ledger.reordered();
        unknown += ledger.unknown.iter().map(|span| span.count).sum::<u64>();
    }
    offsets.sort_unstable();
    let mut end = log_start;
    let mut holes = 0;
    for (base, count) in offsets {
        holes += base.saturating_sub(end);
        findings.duplicated += end.saturating_sub(base).min(count);
        end = end.max(base + count);
    }
    findings.lost = holes.saturating_sub(unknown);
    findings
}

/// What a consumer gets of one partition, in its order, against the ledgers.
#[derive(Debug)]
pub struct ReadBack {
    run: u32,
    producers: BTreeMap<u32, ProducerReadBack>,
    findings: Findings,
}

#[derive(Debug)]
struct ProducerReadBack {
    ledger: PartitionLedger,
    /// Bit n: sequence n was read.
    seen: Vec<u64>,
    /// One past the highest sequence read.
    end: u64,
}

impl ReadBack {
    /// `ledgers` are all producers of the partition in run `run`.
    #[must_use]
    pub fn new(run: u32, ledgers: impl IntoIterator<Item = (u32, PartitionLedger)>) -> Self {
        let mut producers = BTreeMap::new();
        for (producer, mut ledger) in ledgers {
            ledger.acked.sort_unstable_by_key(|span| span.sequence);
            ledger.refused.sort_unstable_by_key(|span| span.sequence);
            let words = ledger.next_sequence.div_ceil(64) as usize;
            producers.insert(producer, ProducerReadBack { ledger, seen: vec![0; words], end: 0 });
        }
        Self { run, producers, findings: Findings::default() }
    }

    /// One past the highest offset acked: read at least up to there.
    #[must_use]
    pub fn next_offset(&self) -> u64 {
        self.producers.values().map(|producer| producer.ledger.next_offset()).max().unwrap_or(0)
    }

    /// The record at `offset` has this stamp (none: it has no room for one); `intact` says whether its bytes are those
    /// that were sent.
    pub fn record(&mut self, offset: u64, stamp: Option<Stamp>, intact: bool) {
        let known = stamp.filter(|stamp| stamp.run == self.run);
        let Some((stamp, producer)) = known.and_then(|stamp| Some((stamp, self.producers.get_mut(&stamp.producer)?)))
        else {
            self.findings.unexpected += 1;
            return;
        };
        let sequence = stamp.sequence;
        if sequence >= producer.ledger.next_sequence || span_of(&producer.ledger.refused, sequence) {
            self.findings.unexpected += 1;
            return;
        }
        if !intact {
            self.findings.corrupt += 1;
        }
        let (word, bit) = ((sequence / 64) as usize, 1_u64 << (sequence % 64));
        if producer.seen[word] & bit != 0 {
            self.findings.duplicated += 1;
            return;
        }
        producer.seen[word] |= bit;
        let misplaced = producer.ledger.offset_of(sequence).is_some_and(|acked| acked != offset);
        if sequence < producer.end || misplaced {
            self.findings.reordered += 1;
        }
        producer.end = producer.end.max(sequence + 1);
    }

    /// Everything was read: what is wrong with it.
    #[must_use]
    pub fn finish(mut self) -> Findings {
        for producer in self.producers.values() {
            for span in &producer.ledger.acked {
                let sequences = span.sequence..span.sequence + span.count;
                self.findings.lost += sequences.filter(|sequence| !producer.has_seen(*sequence)).count() as u64;
            }
        }
        self.findings
    }
}

impl ProducerReadBack {
    fn has_seen(&self, sequence: u64) -> bool {
        self.seen[(sequence / 64) as usize] & (1 << (sequence % 64)) != 0
    }
}

impl PartitionLedger {
    /// Where `sequence` was acked; the spans must be sorted.
    fn offset_of(&self, sequence: u64) -> Option<u64> {
        let behind = self.acked.partition_point(|span| span.sequence <= sequence);
        let span = self.acked[..behind].last()?;
        (sequence < span.sequence + span.count).then(|| span.base_offset + (sequence - span.sequence))
    }
}

fn span_of(spans: &[Span], sequence: u64) -> bool {
    let behind = spans.partition_point(|span| span.sequence <= sequence);
    spans[..behind].last().is_some_and(|span| sequence < span.sequence + span.count)
}

#[cfg(test)]
mod tests;
