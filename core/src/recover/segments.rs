//! From segment files to a [`Recovered`] log: which segments are read how, and what their ends say together.

use super::cases::{Case, CaseSeen, FirstExtent, Footer, decide_newest, decide_newest_walked, decide_older};
use super::sealed::{read_fences, read_sealed, read_trailer, sealed_state};
use super::state::State;
use super::walk::{Body, Chain, Extent, KnownEnd, LogShape, SegmentReader, Walk, Walked};
use super::{FooterRepair, RecoverError, Recovered, SegmentSource, unsupported};
use crate::ids::{Epoch, ExtentSequence, Incarnation, LogId, Position, SegmentSequence};
use crate::index::{ActiveIndex, LogIndex, SealedIndex, SegmentIndex, encode_footer};
use crate::limits::DISK_BLOCK_BYTES;
use crate::log::{NextPlace, OpenSegment, SegmentEnd};
use crate::segment::{SEGMENT_SEQUENCE_MAX, SegmentHeader, position_of};

/// A segment that stays.
enum Kept {
    Sealed(SealedIndex),
    Walked(Walked),
}

/// What the newest segment turned out to be.
enum Newest {
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
    source: &'a mut S,
    log: LogShape,
    cases: Vec<CaseSeen>,
    incarnation_seen: Incarnation,
    epoch_seen: Epoch,
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
    fn start_of(
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

    fn walk(
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
    fn segment_header(&mut self, segment: SegmentSequence) -> Result<Option<SegmentHeader>, RecoverError> {
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

    /// What the log says about partitions at the end of `older`.
    fn state_at_end(&mut self, older: &[(SegmentSequence, Kept)]) -> Result<State, RecoverError> {
        // Back to a segment that needs none before it, then forward again.
        let mut rebuilt = Vec::new();
        let mut state = State { uncertain: true, ..State::default() };
        for (segment, kept) in older.iter().rev() {
            let walked = match kept {
                Kept::Walked(walked) => Replay::Kept(walked),
                Kept::Sealed(sealed) => {
                    let mut reader = SegmentReader::open(self.source, *segment)?;
                    if let Some(sealed_state) = sealed_state(&mut reader, self.log, sealed)? {
                        state = sealed_state;
                        break;
                    }
                    let end = sealed.end();
                    let known_end =
                        KnownEnd { next_sequence: Some(end.next_sequence), place: Some(u64::from(end.end_place)) };
                    let start =
                        Chain { sequence: end.first_sequence, previous_header_crc: None, incarnation: Incarnation(0) };
                    Replay::Again(self.walk(*segment, start, Some(known_end))?)
                }
            };
            let alone = starts_with_checkpoint(walked.get());
            rebuilt.push(walked);
            if alone {
                state = State::default();
                break;
            }
        }
        for walked in rebuilt.iter().rev() {
            replay(&mut state, walked.get());
        }
        Ok(state)
    }

    /// A log that has nothing yet.
    fn finish_new(self, remove: Vec<SegmentSequence>) -> Result<Recovered, RecoverError> {
        let next = NextPlace::NewSegment(SegmentSequence(0));
        let end = LogEnd {
            next,
            next_sequence: ExtentSequence(0),
            previous_header_crc: 0,
            incarnation: Incarnation(0),
            flushed: Position(0),
            synced: Position(0),
        };
        self.recovered(SegmentSequence(0), end, State::default(), remove)
    }

    fn finish(
        mut self,
        newest: SegmentSequence,
        found: Newest,
        older: Vec<(SegmentSequence, Kept)>,
        remove: Vec<SegmentSequence>,
    ) -> Result<Recovered, RecoverError> {
        // A segment number is not used for two contents while a file of that name may exist.
        let behind = SegmentSequence(remove.iter().map(|segment| segment.0).max().unwrap_or(newest.0 + 1));
        let sealed_end = |sealed: &SealedIndex, log: LogShape| {
            let end = sealed.end();
            let position = position_of(newest, u64::from(end.end_place), log.segment_bytes);
            LogEnd {
                next: NextPlace::NewSegment(behind),
                next_sequence: end.next_sequence,
                previous_header_crc: end.last_header_crc,
                incarnation: end.incarnation,
                flushed: position,
                synced: position,
            }
        };
        let mut rewrite_header = None;
        let mut rewrite_footer = None;
        let (end, state, newest_index, newest_lost) = match found {
            Newest::Died => return Err(RecoverError::NothingReadable(newest)),
            Newest::Sealed(sealed, state) => {
                (sealed_end(&sealed, self.log), state, SegmentIndex::Sealed(sealed), Vec::new())
            }
            Newest::Rebuilt(sealed, walked) => {
                let state = self.state_of(&walked, &older)?;
                let log_end = sealed_end(&sealed, self.log);
                let checkpoint_place = open_segment(newest, &walked).checkpoint_place;
                let end = SegmentEnd { checkpoint_place, ..*sealed.end() };
                let entries = active_index(&walked).sorted();
                let (place, bytes) = (u64::from(end.end_place), encode_footer(&entries, &end));
                rewrite_footer = Some(FooterRepair { segment: newest, place, bytes });
                (log_end, state, SegmentIndex::Sealed(SealedIndex::of_entries(&entries, &end)), walked.lost)
            }
            Newest::Open(walked, header) => {
                let state = self.state_of(&walked, &older)?;
                let open = open_segment(newest, &walked);
                if header.is_none() {
                    rewrite_header = Some(self.made_again(&open, &walked));
                }
                let end = self.open_end(&walked, open);
                (end, state, SegmentIndex::Full(active_index(&walked)), walked.lost)
            }
        };
        let mut recovered = self.recovered(newest, end, state, remove)?;
        recovered.sync = Some(newest);
        recovered.rewrite_header = rewrite_header;
        recovered.rewrite_footer = rewrite_footer;
        for (segment, kept) in older {
            let index = match kept {
                Kept::Sealed(sealed) => SegmentIndex::Sealed(sealed),
                Kept::Walked(walked) => {
                    recovered.lost.extend(&walked.lost);
                    SegmentIndex::Full(active_index(&walked))
                }
            };
            recovered.index.put(segment, index);
        }
        recovered.index.put(newest, newest_index);
        recovered.lost.extend(newest_lost);
        Ok(recovered)
    }

    /// What the log says about partitions at the end of the newest segment.
    fn state_of(&mut self, walked: &Walked, older: &[(SegmentSequence, Kept)]) -> Result<State, RecoverError> {
        let mut state = if starts_with_checkpoint(walked) { State::default() } else { self.state_at_end(older)? };
        replay(&mut state, walked);
        Ok(state)
    }

    fn open_end(&self, walked: &Walked, open: OpenSegment) -> LogEnd {
        let flushed = position_of(open.segment, walked.end_place, self.log.segment_bytes);
        LogEnd {
            next: NextPlace::Continue(open),
            next_sequence: walked.chain.sequence,
            // Behind damage the chain starts anew: nobody can check this one.
            previous_header_crc: walked.chain.previous_header_crc.unwrap_or(0),
            incarnation: walked.chain.incarnation,
            flushed,
            synced: walked.synced.min(flushed),
        }
    }

    /// The lost header of a segment, as far as its extents tell.
    fn made_again(&self, open: &OpenSegment, walked: &Walked) -> SegmentHeader {
        let first = walked.extents.first().map(|extent| extent.header);
        SegmentHeader {
            log_id: self.log.log_id,
            segment: open.segment,
            segment_bytes: self.log.segment_bytes,
            first_sequence: open.first_sequence,
            previous_header_crc: first.map_or(0, |header| header.previous_header_crc),
            incarnation: first.map_or(Incarnation(0), |header| header.incarnation),
            created_ms: 0,
        }
    }

    fn recovered(
        self,
        newest: SegmentSequence,
        end: LogEnd,
        state: State,
        remove: Vec<SegmentSequence>,
    ) -> Result<Recovered, RecoverError> {
        let seen = self.incarnation_seen.max(end.incarnation);
        let next_incarnation = seen.0.checked_add(1).map(Incarnation).ok_or(RecoverError::UsedUp(newest))?;
        Ok(Recovered {
            next: end.next,
            next_sequence: end.next_sequence,
            previous_header_crc: end.previous_header_crc,
            last_incarnation: end.incarnation,
            next_incarnation,
            epoch: state.epoch.max(self.epoch_seen),
            clean: state.clean,
            ends_uncertain: state.uncertain,
            flushed: end.flushed,
            synced: end.synced,
            partitions: state.partitions,
            index: LogIndex::default(),
            lost: Vec::new(),
            sync: None,
            remove,
            rewrite_header: None,
            rewrite_footer: None,
            cases: self.cases,
        })
    }
}

/// Where a log ends.
struct LogEnd {
    next: NextPlace,
    next_sequence: ExtentSequence,
    previous_header_crc: u32,
    incarnation: Incarnation,
    flushed: Position,
    synced: Position,
}

/// A walk that is replayed: one that was made before, or only for that.
enum Replay<'a> {
    Kept(&'a Walked),
    Again(Walked),
}

impl Replay<'_> {
    fn get(&self) -> &Walked {
        match self {
            Self::Kept(walked) => walked,
            Self::Again(walked) => walked,
        }
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
fn walked_first(walked: &Walked, header: Option<&SegmentHeader>) -> Option<ExtentSequence> {
    let first = walked.extents.first().filter(|_| !walked.first_skipped).map(|extent| extent.header.sequence);
    first.or(header.map(|header| header.first_sequence))
}

fn starts_with_checkpoint(walked: &Walked) -> bool {
    !walked.first_skipped && matches!(walked.extents.first(), Some(Extent { body: Body::Checkpoint(_), .. }))
}

/// Applies what was walked, in the order of the log, damage included.
fn replay(state: &mut State, walked: &Walked) {
    let mut lost = walked.lost.iter().peekable();
    for extent in &walked.extents {
        while lost.next_if(|lost| lost.from < extent.place).is_some() {
            state.lost();
        }
        match &extent.body {
            Body::Checkpoint(checkpoint) => state.checkpoint(checkpoint),
            Body::Runs(runs) => runs.iter().for_each(|run| state.run(run.key, run.next_offset, run.epoch)),
        }
    }
    if lost.next().is_some() {
        state.lost();
    }
}

fn active_index(walked: &Walked) -> ActiveIndex {
    let mut index = ActiveIndex::default();
    for extent in &walked.extents {
        if let Body::Runs(runs) = &extent.body {
            index.insert_extent(extent.place, runs);
        }
    }
    index
}

fn open_segment(segment: SegmentSequence, walked: &Walked) -> OpenSegment {
    let mut open = OpenSegment {
        segment,
        first_sequence: walked_first(walked, None).unwrap_or(walked.start_sequence),
        place: walked.end_place,
        runs: 0,
        checkpoint_place: 0,
    };
    for extent in &walked.extents {
        match &extent.body {
            Body::Runs(runs) => open.runs += runs.len(),
            // A segment is smaller than 4 GiB.
            Body::Checkpoint(_) => open.checkpoint_place = extent.place as u32,
        }
    }
    open
}
