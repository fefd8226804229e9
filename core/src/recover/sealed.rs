//! Reading what a sealed segment says about itself: trailer, fences, newest checkpoint, pages.

use super::reader::SegmentReader;
use super::state::State;
use super::walk::{Body, Chain, Judged, LogShape, judge};
use super::{RecoverError, SegmentSource, unsupported};
use crate::extent::ExtentHeader;
use crate::ids::{ExtentSequence, Incarnation, LogId};
use crate::index::{FOOTER_PAGE_BYTES, FooterError, IndexEntry, SealedIndex, Trailer};
use crate::limits::DISK_BLOCK_BYTES;

/// Footer pages read at once.
const PAGES_AHEAD_BYTES: usize = 1024 * 1024;

/// The trailer in the last block of the segment, if there is a whole one.
pub(super) fn read_trailer<S: SegmentSource>(
    reader: &mut SegmentReader<'_, S>,
    log_id: LogId,
) -> Result<Option<Trailer>, RecoverError> {
    let (segment, file_bytes) = (reader.segment, reader.file_bytes);
    let Some(place) = file_bytes.checked_sub(DISK_BLOCK_BYTES as u64) else { return Ok(None) };
    if !place.is_multiple_of(DISK_BLOCK_BYTES as u64) {
        return Ok(None);
    }
    let Some(block) = reader.bytes(place, DISK_BLOCK_BYTES, DISK_BLOCK_BYTES)? else { return Ok(None) };
    match Trailer::decode(block, log_id, segment, file_bytes) {
        Ok(trailer) => Ok(Some(trailer)),
        Err(FooterError::Header(error)) => unsupported(error, segment, place).map_or(Ok(None), Err),
        Err(_) => Ok(None),
    }
}

/// The fences that a trailer promises, if they are whole.
pub(super) fn read_fences<S: SegmentSource>(
    reader: &mut SegmentReader<'_, S>,
    trailer: &Trailer,
) -> Result<Option<SealedIndex>, RecoverError> {
    let (place, bytes) = trailer.fences();
    Ok(reader.bytes(place, bytes, bytes)?.and_then(|fences| SealedIndex::parse(trailer, fences).ok()))
}

/// Fences and end state of a sealed segment; `None` when anything that the trailer promises is not whole.
pub(super) fn read_sealed<S: SegmentSource>(
    reader: &mut SegmentReader<'_, S>,
    log: LogShape,
    trailer: &Trailer,
) -> Result<Option<(SealedIndex, State)>, RecoverError> {
    let Some(index) = read_fences(reader, trailer)? else { return Ok(None) };
    let state = sealed_state(reader, log, &index)?;
    Ok(state.map(|state| (index, state)))
}

/// What partitions have at the end of a sealed segment: its newest checkpoint, and the runs behind it.
pub(super) fn sealed_state<S: SegmentSource>(
    reader: &mut SegmentReader<'_, S>,
    log: LogShape,
    index: &SealedIndex,
) -> Result<Option<State>, RecoverError> {
    let end = index.end();
    let place = u64::from(end.checkpoint_place);
    let any = Chain { sequence: end.first_sequence, previous_header_crc: None, incarnation: Incarnation(0) };
    if place == 0 {
        return Ok(None);
    }
    let Judged::Whole(extent) = judge(reader, log, place, &any, DISK_BLOCK_BYTES)? else { return Ok(None) };
    let Body::Checkpoint(checkpoint) = extent.body else { return Ok(None) };
    let mut state = State::default();
    state.checkpoint(&checkpoint);
    let header = extent.header;
    let last = place + u64::from(header.extent_bytes) == u64::from(end.end_place);
    if header.sequence >= end.next_sequence || last && header.header_crc() != end.last_header_crc {
        return Ok(None);
    }
    state.clean &= last;
    for page in 0..index.pages() {
        let Some(entries) = read_page(reader, index, page)? else { return Ok(None) };
        for entry in entries.iter().filter(|entry| u64::from(entry.place) > place) {
            state.run(entry.key, entry.next_offset, entry.epoch);
        }
    }
    if !last {
        read_producers(reader, log, index, &header, place, &mut state)?;
    }
    Ok(Some(state))
}

/// Takes what the extents behind the checkpoint at `place` say about producers: pages do not have it. A segment ends
/// so only when its process died between sealing it and beginning the next one.
fn read_producers<S: SegmentSource>(
    reader: &mut SegmentReader<'_, S>,
    log: LogShape,
    index: &SealedIndex,
    checkpoint: &ExtentHeader,
    place: u64,
    state: &mut State,
) -> Result<(), RecoverError> {
    let end_place = u64::from(index.end().end_place);
    let (mut header, mut at) = (*checkpoint, place);
    loop {
        at += u64::from(header.extent_bytes);
        if at >= end_place {
            return Ok(());
        }
        let chain = Chain {
            sequence: ExtentSequence(header.sequence.0 + 1),
            previous_header_crc: Some(header.header_crc()),
            incarnation: header.incarnation,
        };
        let Judged::Whole(extent) = judge(reader, log, at, &chain, DISK_BLOCK_BYTES)? else {
            // Damage: its runs are still found by the footer, but whose they are is not known.
            state.producers.set_forgotten();
            return Ok(());
        };
        if let Body::Runs(directory) = &extent.body {
            state.produced(directory);
        }
        header = extent.header;
    }
}

fn read_page<S: SegmentSource>(
    reader: &mut SegmentReader<'_, S>,
    index: &SealedIndex,
    page: u32,
) -> Result<Option<Vec<IndexEntry>>, RecoverError> {
    let bytes = reader.bytes(index.page_place(page), FOOTER_PAGE_BYTES, PAGES_AHEAD_BYTES)?;
    Ok(bytes.and_then(|bytes| index.decode_page(page, bytes).ok()))
}
