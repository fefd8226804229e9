//! Making the footer of a sealed segment again from its extents.

use super::assemble::{active_index, open_segment};
use super::reader::SegmentReader;
use super::sealed::read_trailer;
use super::walk::{Chain, KnownEnd, LogShape, Walk, Walked};
use super::{FooterRepair, LostRange, RecoverError, SegmentSource};
use crate::ids::{Incarnation, LogId, SegmentSequence};
use crate::index::{SealedIndex, encode_footer};
use crate::log::SegmentEnd;

/// What [`rebuild_footer`] gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RebuiltFooter {
    /// The footer to be written.
    pub repair: FooterRepair,
    /// The index that stands for it.
    pub index: SealedIndex,
    /// Ranges of the segment whose runs are lost with their directories.
    pub lost: Vec<LostRange>,
}

/// Makes the footer of a sealed segment again, for a page that turned out damaged while the shard runs. Reads the header
/// and directory of each extent. `None` when the trailer is damaged as well: then a start makes the index again.
pub fn rebuild_footer<S: SegmentSource>(
    source: &mut S,
    log_id: LogId,
    segment_bytes: u64,
    segment: SegmentSequence,
) -> Result<Option<RebuiltFooter>, RecoverError> {
    let mut reader = SegmentReader::open(source, segment)?;
    let Some(trailer) = read_trailer(&mut reader, log_id)? else { return Ok(None) };
    let (start, known_end) = bounds_of(&trailer.end);
    let walked = Walk::new(&mut reader, LogShape { log_id, segment_bytes }, start, Some(known_end)).run()?;
    let (repair, index) = footer_of(&walked, &trailer.end);
    Ok(Some(RebuiltFooter { repair, index, lost: walked.lost }))
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
