//! Which segments are read how: the newest in full, older ones by their footers.

use super::cases::{Case, CaseSeen, FirstExtent, Footer, decide_newest, decide_newest_walked, decide_older};
use super::reader::SegmentReader;
use super::sealed::{read_fences, read_sealed, read_trailer};
use super::state::State;
use super::walk::{Chain, KnownEnd, LogShape, Walk, Walked};
use super::{RecoverError, Recovered, SegmentSource, unsupported};
use crate::ids::{Epoch, ExtentSequence, Incarnation, LogId, SegmentSequence};
use crate::index::SealedIndex;
use crate::limits::DISK_BLOCK_BYTES;
use crate::segment::{SEGMENT_SEQUENCE_MAX, SegmentHeader};

/// A segment that stays.
pub(super) enum Kept {
    Sealed(SealedIndex),
    Walked(Walked),
}

/// What the newest segment turned out to be.
pub(super) enum Newest {
    /// Sealed: the log goes on in a new segment.
    Sealed(SealedIndex, State),
    /// Sealed, but its index had to be rebuilt.
    Rebuilt(SealedIndex, Walked),
    /// Not sealed: the log goes on in it.
    Open(Walked, Option<SegmentHeader>),
    /// Nothing in it was ever whole.
    Died,
}

/// One recovery.
pub(super) struct Recovery<'a, S> {
    pub(super) source: &'a mut S,
    pub(super) log: LogShape,
    pub(super) cases: Vec<CaseSeen>,
    pub(super) incarnation_seen: Incarnation,
    pub(super) epoch_seen: Epoch,
}

impl<'a, S: SegmentSource> Recovery<'a, S> {
    pub(super) fn new(source: &'a mut S, log_id: LogId, segment_bytes: u64) -> Self {
        let log = LogShape { log_id, segment_bytes };
        Self { source, log, cases: Vec::new(), incarnation_seen: Incarnation(0), epoch_seen: Epoch(0) }
    }

    pub(super) fn run(mut self) -> Result<Recovered, RecoverError> {
        let mut segments = self.source.segments().to_vec();
        segments.sort_unstable();
        segments.dedup();
        if let Some(past) = segments.iter().find(|segment| segment.0 >= SEGMENT_SEQUENCE_MAX) {
            return Err(RecoverError::UsedUp(*past));
        }
        let Some(mut newest) = segments.pop() else {
            self.note(Case::NewLog, SegmentSequence(0));
            return self.finish_new(Vec::new());
        };
        // The sealed ones first: the newest is judged by how the one before it ended.
        let mut footers = Vec::with_capacity(segments.len());
        for segment in &segments {
            footers.push(self.older_footer(*segment)?);
        }
        let mut remove = Vec::new();
        let mut found = self.open_newest(newest, &segments, &footers)?;
        if matches!(found, Newest::Died) {
            remove.push(newest);
            let Some(before) = segments.pop() else {
                // Only the first segment of a log may die alone: others follow one that is synced.
                if newest.0 > 0 {
                    return Err(RecoverError::NothingReadable(newest));
                }
                return self.finish_new(remove);
            };
            footers.pop();
            newest = before;
            found = self.open_newest(newest, &segments, &footers)?;
        }
        if matches!(found, Newest::Died) {
            return Err(RecoverError::NothingReadable(newest));
        }
        let older = self.walk_unsealed(&segments, footers, first_sequence(newest, &found))?;
        self.finish(newest, found, older, remove)
    }

    fn note(&mut self, case: Case, segment: SegmentSequence) {
        self.cases.push(CaseSeen { case, segment, place: 0 });
    }

    /// The fences of a segment that is not the newest, if its footer is whole.
    fn older_footer(&mut self, segment: SegmentSequence) -> Result<Option<SealedIndex>, RecoverError> {
        let mut reader = SegmentReader::open(self.source, segment)?;
        let trailer = read_trailer(&mut reader, self.log.log_id)?;
        let index = match &trailer {
            Some(trailer) => read_fences(&mut reader, trailer)?,
            None => None,
        };
        let footer = if index.is_some() { Footer::Whole { clean: false } } else { Footer::Missing };
        let case = decide_older(footer);
        self.note(case, segment);
        Ok(index)
    }

    /// Reads the newest segment as far as needed.
    fn open_newest(
        &mut self,
        segment: SegmentSequence,
        older: &[SegmentSequence],
        footers: &[Option<SealedIndex>],
    ) -> Result<Newest, RecoverError> {
        let header = self.segment_header(segment)?;
        let mut reader = SegmentReader::open(self.source, segment)?;
        let sealed = match read_trailer(&mut reader, self.log.log_id)? {
            Some(trailer) => Some((trailer, read_sealed(&mut reader, self.log, &trailer)?)),
            None => None,
        };
        let footer = match &sealed {
            None => Footer::Missing,
            Some((_, None)) => Footer::Damaged,
            Some((_, Some((_, state)))) => Footer::Whole { clean: state.clean },
        };
        if let Some(case) = decide_newest(footer) {
            self.note(case, segment);
        }
        if let Some((trailer, whole)) = sealed {
            if let Some((index, state)) = whole {
                return Ok(Newest::Sealed(index, state));
            }
            let known_end = KnownEnd {
                next_sequence: Some(trailer.end.next_sequence),
                place: Some(u64::from(trailer.end.end_place)),
            };
            let start = self.start_of(segment, header.as_ref(), older, footers)?;
            let walked = self.walk(segment, start, Some(known_end))?;
            let index = SealedIndex::of_entries(&[], &trailer.end);
            return Ok(Newest::Rebuilt(index, walked));
        }
        let start = self.start_of(segment, header.as_ref(), older, footers)?;
        let walked = self.walk(segment, start, None)?;
        let first = match (walked.first_skipped, walked.extents.is_empty()) {
            (_, true) => FirstExtent::Missing,
            (true, false) => FirstExtent::Skipped,
            (false, false) => FirstExtent::Whole,
        };
        let case = decide_newest_walked(header.is_some(), first);
        self.note(case, segment);
        Ok(if case == Case::DiedInRoll { Newest::Died } else { Newest::Open(walked, header) })
    }

    /// What the first extent of a segment must be: what follows the end of the segment before, or else what the header
    /// says.
    pub(super) fn start_of(
        &mut self,
        segment: SegmentSequence,
        header: Option<&SegmentHeader>,
        older: &[SegmentSequence],
        footers: &[Option<SealedIndex>],
    ) -> Result<Chain, RecoverError> {
        let made_by = header.map_or(Incarnation(0), |header| header.incarnation);
        let before = older.last().copied().filter(|before| before.0 + 1 == segment.0);
        if let (Some(_), Some(Some(sealed))) = (before, footers.last()) {
            let end = sealed.end();
            return Ok(Chain {
                sequence: end.next_sequence,
                previous_header_crc: Some(end.last_header_crc),
                incarnation: end.incarnation.max(made_by),
            });
        }
        if let Some(header) = header {
            return Ok(Chain {
                sequence: header.first_sequence,
                previous_header_crc: Some(header.previous_header_crc),
                incarnation: made_by,
            });
        }
        let Some(before) = before else {
            // Nothing says how the log got here: any sequence past what is known of older segments.
            let ends = footers.iter().flatten().map(SealedIndex::end);
            let (sequence, incarnation) =
                ends.map(|end| (end.next_sequence, end.incarnation)).max().unwrap_or_default();
            return Ok(Chain { sequence, previous_header_crc: None, incarnation });
        };
        let (rest, rest_footers) = (&older[..older.len() - 1], &footers[..footers.len() - 1]);
        let before_header = self.segment_header(before)?;
        let start = self.start_of(before, before_header.as_ref(), rest, rest_footers)?;
        let cases = self.cases.len();
        let walked = self.walk(before, start, None)?;
        // It is walked again when it is known what it must reach.
        self.cases.truncate(cases);
        Ok(walked.chain)
    }

    pub(super) fn walk(
        &mut self,
        segment: SegmentSequence,
        start: Chain,
        known_end: Option<KnownEnd>,
    ) -> Result<Walked, RecoverError> {
        let mut reader = SegmentReader::open(self.source, segment)?;
        let walked = Walk::new(&mut reader, self.log, start, known_end).run()?;
        self.cases.extend(&walked.cases);
        self.incarnation_seen = self.incarnation_seen.max(walked.incarnation_seen);
        self.epoch_seen = self.epoch_seen.max(walked.epoch_seen);
        Ok(walked)
    }

    /// The header of a segment, if it is whole and of this segment: a recycled file may still have its old one.
    pub(super) fn segment_header(&mut self, segment: SegmentSequence) -> Result<Option<SegmentHeader>, RecoverError> {
        let mut reader = SegmentReader::open(self.source, segment)?;
        let Some(bytes) = reader.bytes(0, DISK_BLOCK_BYTES, DISK_BLOCK_BYTES)? else { return Ok(None) };
        let header = match SegmentHeader::decode(bytes) {
            Ok(header) => header,
            Err(error) => return unsupported(error, segment, 0).map_or(Ok(None), Err),
        };
        if header.log_id != self.log.log_id {
            return Err(RecoverError::ForeignLog { segment, found: header.log_id });
        }
        if header.segment_bytes != self.log.segment_bytes {
            let (found, expected) = (header.segment_bytes, self.log.segment_bytes);
            return Err(RecoverError::SegmentBytes { segment, found, expected });
        }
        self.incarnation_seen = self.incarnation_seen.max(header.incarnation);
        Ok((header.segment == segment).then_some(header))
    }

    /// Walks the older segments whose footers are lost, each up to what its successor says, newest first. Returns all
    /// older segments, oldest first.
    fn walk_unsealed(
        &mut self,
        segments: &[SegmentSequence],
        mut footers: Vec<Option<SealedIndex>>,
        newest: (SegmentSequence, Option<ExtentSequence>),
    ) -> Result<Vec<(SegmentSequence, Kept)>, RecoverError> {
        let mut kept = Vec::with_capacity(segments.len());
        let mut next = newest;
        while let Some(footer) = footers.pop() {
            let segment = segments[footers.len()];
            let one = match footer {
                Some(sealed) => {
                    next = (segment, Some(sealed.end().first_sequence));
                    Kept::Sealed(sealed)
                }
                None => {
                    let header = self.segment_header(segment)?;
                    let start = self.start_of(segment, header.as_ref(), &segments[..footers.len()], &footers)?;
                    let next_sequence = next.1.filter(|_| segment.0 + 1 == next.0.0);
                    let walked = self.walk(segment, start, Some(KnownEnd { next_sequence, place: None }))?;
                    next = (segment, walked_first(&walked, header.as_ref()));
                    Kept::Walked(walked)
                }
            };
            kept.push((segment, one));
        }
        kept.reverse();
        Ok(kept)
    }
}

fn first_sequence(segment: SegmentSequence, found: &Newest) -> (SegmentSequence, Option<ExtentSequence>) {
    let first = match found {
        Newest::Sealed(sealed, _) | Newest::Rebuilt(sealed, _) => Some(sealed.end().first_sequence),
        Newest::Open(walked, header) => walked_first(walked, header.as_ref()),
        Newest::Died => None,
    };
    (segment, first)
}

/// Sequence of the first extent of a walked segment, if that is known for sure.
pub(super) fn walked_first(walked: &Walked, header: Option<&SegmentHeader>) -> Option<ExtentSequence> {
    let first = walked.extents.first().filter(|_| !walked.first_skipped).map(|extent| extent.header.sequence);
    first.or(header.map(|header| header.first_sequence))
}
