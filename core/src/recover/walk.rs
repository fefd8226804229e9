//! Reading one segment extent by extent, and looking past what is not whole.

use super::cases::{Behind, CaseSeen, Finding, Verdict, decide};
use super::reader::SegmentReader;
use super::{LostRange, RecoverError, SegmentSource, unsupported};
use crate::checkpoint::Checkpoint;
use crate::crc::crc32c;
use crate::extent::{
    Directory, EXTENT_HEADER_BYTES, ExtentError, ExtentHeader, ExtentKind, RunEntry, decode_directory,
};
use crate::ids::{Epoch, ExtentSequence, Incarnation, LogId, Position};
use crate::limits::DISK_BLOCK_BYTES;
use crate::segment::{FIRST_EXTENT_AT, position_of};

const BLOCK: u64 = DISK_BLOCK_BYTES as u64;
/// Read-ahead among small extents, and when searching.
const AHEAD_BYTES: usize = 256 * 1024;
const SEARCH_AHEAD_BYTES: usize = 1024 * 1024;
/// Read-ahead among large extents: header and directory.
const AHEAD_LARGE_BYTES: usize = 16 * 1024;
/// From this size on an extent counts as large.
const LARGE_BYTES: u32 = 64 * 1024;

/// The log that is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogShape {
    pub(super) log_id: LogId,
    pub(super) segment_bytes: u64,
}

/// What an accepted extent carries.
#[derive(Debug)]
pub(super) enum Body {
    Runs(Directory),
    Checkpoint(Checkpoint),
}

/// An accepted extent.
#[derive(Debug)]
pub(super) struct Extent {
    pub(super) place: u64,
    pub(super) header: ExtentHeader,
    pub(super) body: Body,
}

/// What the next extent must be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain {
    pub(super) sequence: ExtentSequence,
    /// CRC of the header before; unknown behind damage, and then `sequence` is a lower bound.
    pub(super) previous_header_crc: Option<u32>,
    /// Lowest incarnation.
    pub(super) incarnation: Incarnation,
}

/// What is known about a segment's end before it is read. If it is, all of the segment was synced.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownEnd {
    /// Sequence of the first extent behind the segment, if known.
    pub(super) next_sequence: Option<ExtentSequence>,
    /// Place behind its last extent, if known.
    pub(super) place: Option<u64>,
}

/// A whole header found by searching; the body is not looked at.
#[derive(Clone, Copy, Debug)]
struct Found {
    place: u64,
    sequence: ExtentSequence,
    incarnation: Incarnation,
    synced_position: Position,
}

/// What a walk has accepted.
#[derive(Debug)]
pub(super) struct Walked {
    pub(super) extents: Vec<Extent>,
    pub(super) lost: Vec<LostRange>,
    /// Place behind the last accepted (or lost) extent.
    pub(super) end_place: u64,
    /// What the next extent must be.
    pub(super) chain: Chain,
    /// Highest synced position that a header names.
    pub(super) synced: Position,
    /// Highest incarnation seen, dead ones included.
    pub(super) incarnation_seen: Incarnation,
    /// Highest epoch seen.
    pub(super) epoch_seen: Epoch,
    pub(super) first_skipped: bool,
    /// What the first extent had to be.
    pub(super) start_sequence: ExtentSequence,
    pub(super) cases: Vec<CaseSeen>,
}

/// Walks the segment of `reader` from its first extent.
pub(super) struct Walk<'r, 'a, S> {
    reader: &'r mut SegmentReader<'a, S>,
    log: LogShape,
    start: Chain,
    known_end: Option<KnownEnd>,
    /// Headers behind the place where the chain first broke; searched for once.
    found: Option<Vec<Found>>,
    out: Walked,
}

impl<'r, 'a, S: SegmentSource> Walk<'r, 'a, S> {
    pub(super) fn new(
        reader: &'r mut SegmentReader<'a, S>,
        log: LogShape,
        chain: Chain,
        known_end: Option<KnownEnd>,
    ) -> Self {
        let out = Walked {
            extents: Vec::new(),
            lost: Vec::new(),
            end_place: FIRST_EXTENT_AT,
            chain,
            synced: Position(0),
            incarnation_seen: chain.incarnation,
            epoch_seen: Epoch(0),
            first_skipped: false,
            start_sequence: chain.sequence,
            cases: Vec::new(),
        };
        Self { reader, log, start: chain, known_end, found: None, out }
    }

    pub(super) fn run(mut self) -> Result<Walked, RecoverError> {
        loop {
            let end = self.known_end.and_then(|end| end.next_sequence);
            if end.is_some_and(|end| self.out.chain.sequence >= end) {
                break;
            }
            let place = self.out.end_place;
            let chain = self.out.chain;
            let (finding, header) = match self.judge(place, &chain)? {
                Judged::Whole(extent) => {
                    self.accept(extent);
                    continue;
                }
                Judged::Torn(header) => (Finding::TornBody, Some(header)),
                Judged::NoHeader => (Finding::NoHeader, None),
                Judged::OldLife => (Finding::OldLife, None),
                Judged::OffChain => (Finding::OffChain, None),
            };
            let behind = self.behind(place)?;
            let (case, verdict) = decide(finding, behind);
            self.note(case, place);
            if verdict != Verdict::Skip || !self.skip(place, header)? {
                break;
            }
        }
        if self.known_end.is_none() {
            self.drop_torn_runs()?;
        }
        self.close_chain();
        Ok(self.out)
    }

    fn note(&mut self, case: super::Case, place: u64) {
        self.out.cases.push(CaseSeen { case, segment: self.reader.segment, place });
    }

    fn position(&self, place: u64) -> Position {
        position_of(self.reader.segment, place, self.log.segment_bytes)
    }

    fn accept(&mut self, extent: Extent) {
        let header = extent.header;
        self.out.end_place = extent.place + u64::from(header.extent_bytes);
        self.out.chain = Chain {
            sequence: ExtentSequence(header.sequence.0 + 1),
            previous_header_crc: Some(header.header_crc()),
            incarnation: header.incarnation,
        };
        self.out.synced = self.out.synced.max(header.synced_position);
        self.out.incarnation_seen = self.out.incarnation_seen.max(header.incarnation);
        self.out.epoch_seen = self.out.epoch_seen.max(header.epoch);
        self.out.extents.push(extent);
    }

    fn judge(&mut self, place: u64, chain: &Chain) -> Result<Judged, RecoverError> {
        let large = self.out.extents.last().is_some_and(|last| last.header.extent_bytes >= LARGE_BYTES);
        let ahead = if large { AHEAD_LARGE_BYTES } else { AHEAD_BYTES };
        judge(self.reader, self.log, place, chain, ahead)
    }

    /// What lies behind a place that is not whole.
    fn behind(&mut self, place: u64) -> Result<Behind, RecoverError> {
        self.search(place)?;
        let known = self.known_end;
        if known.is_some_and(|end| end.next_sequence.is_some()) || self.proved_synced(place) > self.position(place) {
            return Ok(Behind::Synced);
        }
        let any = self.later(place).next().is_some();
        Ok(match (any, known.is_some()) {
            (false, _) => Behind::Nothing,
            (true, false) => Behind::Unsynced,
            (true, true) => Behind::Synced,
        })
    }

    /// Finds all whole headers from `place` on that could follow, once for the segment. The one at `place` is no extent of the
    /// chain, but what it says to be synced was.
    fn search(&mut self, place: u64) -> Result<(), RecoverError> {
        if self.found.is_some() {
            return Ok(());
        }
        let chain = self.out.chain;
        let mut found = Vec::new();
        let mut at = place;
        while at < self.reader.file_bytes.min(self.log.segment_bytes) {
            let header = match self.reader.bytes(at, DISK_BLOCK_BYTES, SEARCH_AHEAD_BYTES)? {
                Some(bytes) => ExtentHeader::decode(bytes).ok(),
                None => None,
            };
            if let Some(header) = header.filter(|header| header.log_id == self.log.log_id) {
                self.out.incarnation_seen = self.out.incarnation_seen.max(header.incarnation);
                self.out.epoch_seen = self.out.epoch_seen.max(header.epoch);
                if is_of_life(&header, self.log, self.position(at), &chain) {
                    found.push(Found {
                        place: at,
                        sequence: header.sequence,
                        incarnation: header.incarnation,
                        synced_position: header.synced_position,
                    });
                }
            }
            at += BLOCK;
        }
        self.found = Some(found);
        Ok(())
    }

    /// Headers behind `place` that could follow the chain as it is now.
    fn later(&self, place: u64) -> impl Iterator<Item = Found> {
        let chain = self.out.chain;
        let follows = move |found: &Found| {
            found.place > place && found.sequence >= chain.sequence && found.incarnation >= chain.incarnation
        };
        self.found.iter().flatten().copied().filter(follows)
    }

    /// Highest synced position that a header behind `place` names.
    fn proved_synced(&self, place: u64) -> Position {
        self.later(place).map(|found| found.synced_position).max().unwrap_or_default()
    }

    /// Goes on behind damage at `place`. False when nothing readable is left of what was synced.
    fn skip(&mut self, place: u64, header: Option<ExtentHeader>) -> Result<bool, RecoverError> {
        self.out.first_skipped |= place == FIRST_EXTENT_AT;
        let proved = self.proved_synced(place);
        self.out.synced = self.out.synced.max(proved);
        // A header that follows the chain says where the next extent stands.
        if let Some(header) = header {
            let to = place + u64::from(header.extent_bytes);
            self.lose(place, to);
            self.out.chain = Chain {
                sequence: ExtentSequence(header.sequence.0 + 1),
                previous_header_crc: Some(header.header_crc()),
                incarnation: header.incarnation,
            };
            return Ok(to < self.reader.file_bytes);
        }
        self.out.chain.previous_header_crc = None;
        // All bytes up to `to` were synced, so a whole extent among them is of the living chain. Where that is not known
        // by position, the segment is an older one, and all of it was synced.
        let limit = self.reader.file_bytes.min(self.log.segment_bytes);
        let known = self.known_end.map(|end| end.place.unwrap_or(limit).min(limit));
        let to = known.unwrap_or_else(|| proved.0.saturating_sub(self.position(0).0));
        let chain = self.out.chain;
        let candidates: Vec<u64> = self.later(place).map(|found| found.place).filter(|at| *at < to).collect();
        for at in candidates {
            if matches!(self.judge(at, &chain)?, Judged::Whole(_)) {
                self.lose(place, at);
                return Ok(true);
            }
        }
        self.lose(place, to.max(place));
        Ok(self.known_end.is_none())
    }

    fn lose(&mut self, from: u64, to: u64) {
        self.out.end_place = to;
        let segment = self.reader.segment;
        match self.out.lost.last_mut() {
            Some(last) if last.to == from => last.to = to,
            _ => self.out.lost.push(LostRange { segment, from, to }),
        }
    }

    /// Past the last known sync an extent counts only if its runs are whole, too.
    fn drop_torn_runs(&mut self) -> Result<(), RecoverError> {
        let synced = self.out.synced.max(self.proved_synced(0));
        for at in 0..self.out.extents.len() {
            let extent = &self.out.extents[at];
            let end = self.position(extent.place + u64::from(extent.header.extent_bytes));
            if end <= synced || runs_are_whole(self.reader, extent)? {
                continue;
            }
            let extent = &self.out.extents[at];
            let (place, header) = (extent.place, extent.header);
            let more = at + 1 < self.out.extents.len() || self.later(0).next().is_some();
            let (case, _) = decide(Finding::TornRun, if more { Behind::Unsynced } else { Behind::Nothing });
            self.note(case, place);
            self.out.extents.truncate(at);
            self.out.lost.retain(|lost| lost.from < place);
            self.out.end_place = place;
            let incarnation = self.out.extents.last().map(|last| last.header.incarnation);
            self.out.chain = Chain {
                sequence: header.sequence,
                previous_header_crc: Some(header.previous_header_crc),
                incarnation: incarnation.unwrap_or(self.start.incarnation),
            };
            break;
        }
        Ok(())
    }

    /// Behind damage the next sequence must lie past every one that may be in use.
    fn close_chain(&mut self) {
        if self.out.chain.previous_header_crc.is_none() {
            let highest = self.later(0).map(|found| found.sequence.0 + 1).max().unwrap_or(0);
            self.out.chain.sequence = ExtentSequence(self.out.chain.sequence.0.max(highest));
        }
    }
}

/// What stands at a place.
#[derive(Debug)]
pub(super) enum Judged {
    Whole(Extent),
    /// The header follows the chain, the directory is not whole.
    Torn(ExtentHeader),
    NoHeader,
    OldLife,
    OffChain,
}

/// Looks at the extent that should stand at `place`.
pub(super) fn judge<S: SegmentSource>(
    reader: &mut SegmentReader<'_, S>,
    log: LogShape,
    place: u64,
    chain: &Chain,
    ahead: usize,
) -> Result<Judged, RecoverError> {
    let segment = reader.segment;
    let Some(bytes) = reader.bytes(place, DISK_BLOCK_BYTES, ahead)? else { return Ok(Judged::NoHeader) };
    let header = match ExtentHeader::decode(bytes) {
        Ok(header) => header,
        Err(ExtentError::Header(error)) => {
            return unsupported(error, segment, place).map_or(Ok(Judged::NoHeader), Err);
        }
        Err(_) => return Ok(Judged::NoHeader),
    };
    if !is_of_life(&header, log, position_of(segment, place, log.segment_bytes), chain) {
        return Ok(Judged::OldLife);
    }
    let follows = chain
        .previous_header_crc
        .is_none_or(|crc| crc == header.previous_header_crc && chain.sequence == header.sequence);
    if !follows {
        return Ok(Judged::OffChain);
    }
    // The header bounds the directory to a checkpoint extent, and the reader to the file.
    let upto = EXTENT_HEADER_BYTES + header.directory_bytes as usize;
    let fits = place + u64::from(header.extent_bytes) <= reader.file_bytes.min(log.segment_bytes);
    let bytes = if fits { reader.bytes(place, upto, ahead)? } else { None };
    let Some(directory) = bytes.map(|bytes| &bytes[EXTENT_HEADER_BYTES..]) else { return Ok(Judged::Torn(header)) };
    let body = match header.kind {
        ExtentKind::Checkpoint => Checkpoint::decode(directory, &header).map(Body::Checkpoint),
        ExtentKind::Data | ExtentKind::Moved => decode_directory(directory, &header).map(Body::Runs),
    };
    Ok(body.map_or(Judged::Torn(header), |body| Judged::Whole(Extent { place, header, body })))
}

/// Whether a whole header at `position` can be of the living chain from `chain` on.
fn is_of_life(header: &ExtentHeader, log: LogShape, position: Position, chain: &Chain) -> bool {
    header.log_id == log.log_id
        && header.sequence >= chain.sequence
        && header.sequence.0 < u64::MAX
        && header.incarnation >= chain.incarnation
        && header.synced_position <= position
}

/// Checks the CRC of each run of an extent.
fn runs_are_whole<S: SegmentSource>(reader: &mut SegmentReader<'_, S>, extent: &Extent) -> Result<bool, RecoverError> {
    let Body::Runs(directory) = &extent.body else { return Ok(true) };
    let bytes = extent.header.extent_bytes as usize;
    let Some(bytes) = reader.bytes(extent.place, bytes, bytes.max(AHEAD_BYTES))? else { return Ok(false) };
    // The directory was checked to keep its runs inside the extent.
    let whole = |run: &RunEntry| {
        let from = run.place as usize;
        crc32c(&bytes[from..from + run.stored_bytes as usize]) == run.crc
    };
    Ok(directory.runs.iter().all(whole))
}
