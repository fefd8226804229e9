//! From what the segments gave to a [`Recovered`] log: ends, states of partitions, and what the next life must repair.

use super::reader::SegmentReader;
use super::rebuild::{bounds_of, footer_of};
use super::sealed::sealed_state;
use super::segments::{Kept, Newest, Recovery, walked_first};
use super::state::State;
use super::walk::{Body, Extent, LogShape, Walked};
use super::{RecoverError, Recovered, SegmentSource};
use crate::ids::{ExtentSequence, Incarnation, Position, SegmentSequence};
use crate::index::{ActiveIndex, LogIndex, SealedIndex, SegmentIndex};
use crate::log::{NextPlace, OpenSegment};
use crate::segment::{SegmentHeader, position_of};

impl<S: SegmentSource> Recovery<'_, S> {
    /// What the log says about partitions at the end of `older`.
    fn state_at_end(&mut self, older: &[(SegmentSequence, Kept)]) -> Result<State, RecoverError> {
        // Back to a segment that needs none before it, then forward again.
        let mut rebuilt = Vec::new();
        let mut state = State::default();
        state.lost();
        for (segment, kept) in older.iter().rev() {
            let walked = match kept {
                Kept::Walked(walked) => Replay::Kept(walked),
                Kept::Sealed(sealed) => {
                    let mut reader = SegmentReader::open(self.source, *segment)?;
                    if let Some(sealed_state) = sealed_state(&mut reader, self.log, sealed)? {
                        state = sealed_state;
                        break;
                    }
                    let (start, known_end) = bounds_of(sealed.end());
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
    pub(super) fn finish_new(self, remove: Vec<SegmentSequence>) -> Result<Recovered, RecoverError> {
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

    pub(super) fn finish(
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
                let (repair, index) = footer_of(&walked, sealed.end());
                rewrite_footer = Some(repair);
                (log_end, state, SegmentIndex::Sealed(index), walked.lost)
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
            stillborn: state.clean && !remove.is_empty(),
            ends_uncertain: state.uncertain,
            flushed: end.flushed,
            synced: end.synced,
            partitions: state.partitions,
            producers: state.producers,
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
            Body::Runs(directory) => state.extent(directory),
        }
    }
    if lost.next().is_some() {
        state.lost();
    }
}

pub(super) fn active_index(walked: &Walked) -> ActiveIndex {
    let mut index = ActiveIndex::default();
    for extent in &walked.extents {
        if let Body::Runs(directory) = &extent.body {
            index.insert_extent(extent.place, &directory.runs);
        }
    }
    index
}

pub(super) fn open_segment(segment: SegmentSequence, walked: &Walked) -> OpenSegment {
    let mut open = OpenSegment {
        segment,
        first_sequence: walked_first(walked, None).unwrap_or(walked.start_sequence),
        place: walked.end_place,
        runs: 0,
        checkpoint_place: 0,
    };
    for extent in &walked.extents {
        match &extent.body {
            Body::Runs(directory) => open.runs += directory.runs.len(),
            // A segment is smaller than 4 GiB.
            Body::Checkpoint(_) => open.checkpoint_place = extent.place as u32,
        }
    }
    open
}
