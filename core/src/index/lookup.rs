//! Finding a run over all segments, as a machine that says which footer page it needs next.
//!
//! Runs of a partition rise from segment to segment, so segments are searched by halving. A segment that has nothing of
//! the partition says nothing about the direction: then its successor is asked.

use super::active::Probe;
use super::footer::SealedProbe;
use super::{IndexEntry, LogIndex, SegmentIndex};
use crate::ids::{Offset, PartitionKey, SegmentSequence};

/// Where a sequential reader is: the run it has read last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunCursor {
    /// Segment of the run.
    pub segment: SegmentSequence,
    /// The run.
    pub entry: IndexEntry,
}

/// A page of a footer that a lookup needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRead {
    /// Of which segment.
    pub segment: SegmentSequence,
    /// Number of the page.
    pub page: u32,
    /// Where it stands in the file; it has [`super::FOOTER_PAGE_BYTES`] bytes.
    pub place: u64,
}

/// What a lookup needs or has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookupStep {
    /// The run that covers the offset, or else the next one above it.
    Found(SegmentSequence, IndexEntry),
    /// Read this page, give it to [`Lookup::feed`], and step again.
    ReadPage(PageRead),
    /// No run at or past the offset.
    NotFound,
}

/// A lookup under way. Holds no borrow of the index, so segments may come and go between its steps.
#[derive(Clone, Debug)]
pub struct Lookup {
    key: PartitionKey,
    offset: Offset,
    /// Go from the lowest segment upwards instead of halving.
    forward: bool,
    /// The answer lies in segments `lowest..end`, or is `best`.
    lowest: SegmentSequence,
    end: Option<SegmentSequence>,
    best: Option<RunCursor>,
    /// First segment of the present row of probes; all from it up to `at` have nothing of the partition.
    middle: Option<SegmentSequence>,
    at: SegmentSequence,
    wanted: Option<PageRead>,
}

impl Lookup {
    pub(super) fn anywhere(key: PartitionKey, offset: Offset) -> Self {
        let lowest = SegmentSequence(0);
        Self { key, offset, forward: false, lowest, end: None, best: None, middle: None, at: lowest, wanted: None }
    }

    pub(super) fn forward(cursor: &RunCursor) -> Self {
        let lookup = Self::anywhere(cursor.entry.key, cursor.entry.next_offset);
        Self { forward: true, lowest: cursor.segment, ..lookup }
    }

    /// Goes on as far as it can without a read.
    pub fn step(&mut self, index: &LogIndex) -> LookupStep {
        loop {
            if let Some(read) = self.wanted {
                if matches!(index.get(read.segment), Some(SegmentIndex::Sealed(_))) {
                    return LookupStep::ReadPage(read);
                }
                // The segment is gone, or was given another index: ask anew.
                self.wanted = None;
            }
            let Some((segment, segment_index)) = self.next_segment(index) else {
                return self.best.map_or(LookupStep::NotFound, |run| LookupStep::Found(run.segment, run.entry));
            };
            match segment_index {
                SegmentIndex::Full(active) => {
                    let probe = active.probe(self.key, self.offset);
                    self.learn(segment, probe);
                }
                SegmentIndex::Sealed(sealed) => match sealed.probe(self.key, self.offset) {
                    SealedProbe::Absent => self.learn(segment, Probe::Absent),
                    SealedProbe::Page(page) => {
                        self.wanted = Some(PageRead { segment, page, place: sealed.page_place(page) });
                    }
                },
            }
        }
    }

    /// Takes the decoded page that the last step asked for (see [`LogIndex::decode_page`]).
    pub fn feed(&mut self, index: &LogIndex, read: &PageRead, entries: &[IndexEntry]) {
        if self.wanted != Some(*read) {
            return;
        }
        self.wanted = None;
        let Some(SegmentIndex::Sealed(sealed)) = index.get(read.segment) else { return };
        match sealed.judge(read.page, entries, self.key, self.offset) {
            Ok(probe) => self.learn(read.segment, probe),
            Err(page) => {
                self.wanted = Some(PageRead { segment: read.segment, page, place: sealed.page_place(page) });
            }
        }
    }

    /// The segment to ask next: on with the present row of probes, or the middle of what is left.
    fn next_segment<'a>(&mut self, index: &'a LogIndex) -> Option<(SegmentSequence, &'a SegmentIndex)> {
        loop {
            let (from, to) = index.ranks(self.lowest, self.end);
            let rank = match self.middle {
                Some(middle) => {
                    let (_, rank) = index.ranks(SegmentSequence(0), Some(self.at));
                    if rank >= to {
                        // Nothing of the partition from the middle on.
                        self.end = Some(middle);
                        self.middle = None;
                        continue;
                    }
                    rank
                }
                None if from == to => return None,
                None => {
                    let rank = if self.forward { from } else { from + (to - from) / 2 };
                    self.middle = Some(index.segments[rank].0);
                    rank
                }
            };
            let (segment, segment_index) = &index.segments[rank];
            self.at = *segment;
            return Some((*segment, segment_index));
        }
    }

    /// Narrows the search by what a segment told.
    fn learn(&mut self, segment: SegmentSequence, probe: Probe) {
        let next = SegmentSequence(segment.0 + 1);
        match probe {
            Probe::Absent => self.at = next,
            Probe::Below => {
                self.lowest = next;
                self.middle = None;
            }
            Probe::Covers(entry) => {
                self.best = Some(RunCursor { segment, entry });
                self.end = Some(self.lowest);
                self.middle = None;
            }
            Probe::Above(entry) => {
                self.best = Some(RunCursor { segment, entry });
                self.end = self.middle;
                self.middle = None;
            }
        }
    }
}
