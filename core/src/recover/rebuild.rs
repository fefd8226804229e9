//! Making the index of a sealed segment again from its extents.

use super::assemble::{active_index, open_segment};
use super::reader::SegmentReader;
use super::walk::{Chain, KnownEnd, LogShape, Walk, Walked};
use super::{FooterRepair, LostRange, RecoverError, SegmentSource};
use crate::ids::Incarnation;
use crate::index::{ActiveIndex, SealedIndex, encode_footer};
use crate::log::SegmentEnd;

/// What [`rebuild_index`] gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RebuiltIndex {
    /// All runs that are left.
    pub index: ActiveIndex,
    /// Ranges of the segment whose runs are lost with their directories.
    pub lost: Vec<LostRange>,
}

/// Makes the index of a sealed segment again, for a page of its footer that turned out damaged while the shard runs. `end` is
/// what the index in memory knows of the segment. Reads the header and directory of each extent.
pub fn rebuild_index<S: SegmentSource>(
    source: &mut S,
    segment_bytes: u64,
    end: &SegmentEnd,
) -> Result<RebuiltIndex, RecoverError> {
    let mut reader = SegmentReader::open(source, end.segment)?;
    let (start, known_end) = bounds_of(end);
    let log = LogShape { log_id: end.log_id, segment_bytes };
    let walked = Walk::new(&mut reader, log, start, Some(known_end)).run()?;
    Ok(RebuiltIndex { index: active_index(&walked), lost: walked.lost })
}

/// What a walk of a sealed segment starts with, and what it must reach.
pub(super) fn bounds_of(end: &SegmentEnd) -> (Chain, KnownEnd) {
    let start = Chain { sequence: end.first_sequence, previous_header_crc: None, incarnation: Incarnation(0) };
    (start, KnownEnd { next_sequence: Some(end.next_sequence), place: Some(u64::from(end.end_place)) })
}

/// The footer of a walked segment that ends as `end` says.
pub(super) fn footer_of(walked: &Walked, end: &SegmentEnd) -> (FooterRepair, SealedIndex) {
    let checkpoint_place = open_segment(end.segment, walked).checkpoint_place;
    let end = SegmentEnd { checkpoint_place, ..*end };
    let entries = active_index(walked).sorted();
    let (place, bytes) = (u64::from(end.end_place), encode_footer(&entries, &end));
    (FooterRepair { segment: end.segment, place, bytes }, SealedIndex::of_entries(&entries, &end))
}
