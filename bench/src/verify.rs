//! Whether every acked record is there, once, at its place: from the acks alone, and by reading everything back.
//!
//! Each producer numbers its records per partition (`sequence`, see [`crate::payload`]). A [`PartitionLedger`] is what
//! one producer knows about one partition: which sequences were acked at which offsets, which were refused, and of
//! which nothing is known (timed out, connection lost). It is kept by the thread of its client, without locks.
//! [`check_acks`] lays the ledgers of one partition side by side; a [`ReadBack`] collects what a consumer gets of the
//! partition and compares it with the ledgers at the end, so that reading can go on while producing does.

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

impl Findings {
    /// The larger of both counts each: two looks at the same records.
    #[must_use]
    pub fn worst(self, other: Self) -> Self {
        Self {
            lost: self.lost.max(other.lost),
            duplicated: self.duplicated.max(other.duplicated),
            reordered: self.reordered.max(other.reordered),
            corrupt: self.corrupt.max(other.corrupt),
            unexpected: self.unexpected.max(other.unexpected),
        }
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

/// Records that stand together: `sequence + i` at `base_offset + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Placed {
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
    acked: Vec<Placed>,
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
        self.acked.push(Placed { sequence, base_offset, count });
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

/// What a consumer gets of one partition, in its order.
#[derive(Clone, Debug)]
pub struct ReadBack {
    run: u32,
    producers: BTreeMap<u32, ProducerReadBack>,
    findings: Findings,
}

#[derive(Clone, Debug, Default)]
struct ProducerReadBack {
    /// Sorted by sequence, no sequence twice; neighbours that join are merged.
    seen: Vec<Placed>,
}

impl ReadBack {
    /// Nothing read yet of a partition that run `run` produced to.
    #[must_use]
    pub fn new(run: u32) -> Self {
        Self { run, producers: BTreeMap::new(), findings: Findings::default() }
    }

    /// The record at `offset` has this stamp (none: it has no room for one); `intact` says whether its bytes are those
    /// that were sent.
    pub fn record(&mut self, offset: u64, stamp: Option<Stamp>, intact: bool) {
        let Some(stamp) = stamp.filter(|stamp| stamp.run == self.run) else {
            self.findings.unexpected += 1;
            return;
        };
        if !intact {
            self.findings.corrupt += 1;
        }
        let seen = &mut self.producers.entry(stamp.producer).or_default().seen;
        let sequence = stamp.sequence;
        let end = seen.last().map_or(0, |last| last.sequence + last.count);
        let one = Placed { sequence, base_offset: offset, count: 1 };
        if sequence < end {
            let behind = seen.partition_point(|span| span.sequence <= sequence);
            if behind > 0 && seen[behind - 1].sequence + seen[behind - 1].count > sequence {
                self.findings.duplicated += 1;
            } else {
                self.findings.reordered += 1;
                seen.insert(behind, one);
            }
            return;
        }
        match seen.last_mut() {
            Some(last) if sequence == end && last.base_offset + last.count == offset => last.count += 1,
            _ => seen.push(one),
        }
    }

    /// Records that could not be read, since their batch is damaged.
    pub fn damaged(&mut self, records: u64) {
        self.findings.corrupt += records;
    }

    /// Everything was read: what is wrong with it. `ledgers` are those of all producers of the partition.
    #[must_use]
    pub fn finish<'a>(self, ledgers: impl IntoIterator<Item = (u32, &'a PartitionLedger)>) -> Findings {
        let mut findings = self.findings;
        let mut producers = self.producers;
        for (producer, ledger) in ledgers {
            let seen = producers.remove(&producer).unwrap_or_default().seen;
            for acked in &ledger.acked {
                let mut missing = acked.count;
                for span in overlaps(&seen, acked.sequence, acked.count) {
                    missing -= span.count;
                    if span.base_offset != acked.base_offset + (span.sequence - acked.sequence) {
                        findings.reordered += span.count;
                    }
                }
                findings.lost += missing;
            }
            for refused in &ledger.refused {
                findings.unexpected += counted(overlaps(&seen, refused.sequence, refused.count));
            }
            findings.unexpected += counted(overlaps(&seen, ledger.next_sequence, u64::MAX - ledger.next_sequence));
        }
        findings.unexpected += producers.values().map(|producer| counted(producer.seen.iter().copied())).sum::<u64>();
        findings
    }
}

fn counted(spans: impl Iterator<Item = Placed>) -> u64 {
    spans.map(|span| span.count).sum()
}

/// The parts of the sorted `spans` that lie within the `count` sequences from `sequence` on.
fn overlaps(spans: &[Placed], sequence: u64, count: u64) -> impl Iterator<Item = Placed> {
    let end = sequence + count;
    let first = spans.partition_point(|span| span.sequence + span.count <= sequence);
    spans[first..].iter().take_while(move |span| span.sequence < end).map(move |span| {
        let from = span.sequence.max(sequence);
        let to = (span.sequence + span.count).min(end);
        Placed { sequence: from, base_offset: span.base_offset + (from - span.sequence), count: to - from }
    })
}

#[cfg(test)]
mod tests;
