//! The walk through one segment.

use std::collections::VecDeque;

use super::{Damage, DamageKind, Expected, Found, FoundBody, FoundExtent, WalkEnd};
use crate::checkpoint::Checkpoint;
use crate::crc::crc32c;
use crate::disk_header::DiskHeaderError;
use crate::extent::{EXTENT_HEADER_BYTES, ExtentHeader, ExtentKind, RunEntry, decode_directory};
use crate::ids::{ExtentSequence, Incarnation, LogId, SegmentSequence};
use crate::index::{FOOTER_PAGE_BYTES, FooterError, IndexEntry, SealedIndex, Trailer, is_footer_page};
use crate::limits::{DISK_BLOCK_BYTES, SEGMENT_BYTES_MAX};
use crate::recover::reader::SegmentReader;
use crate::recover::{RecoverError, SegmentSource};
use crate::segment::{FIRST_EXTENT_AT, SegmentHeader};

const BLOCK: u64 = DISK_BLOCK_BYTES as u64;
/// Read at once among extents, and when searching.
const AHEAD_BYTES: usize = 256 * 1024;

/// Where a walk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Header,
    Extents,
    Fences,
    Page(u32),
    Done,
}

/// Goes through a segment as it stands. Holds one window of the file, 16 MiB at most, and a directory.
pub struct SegmentWalk<'a, S> {
    reader: SegmentReader<'a, S>,
    expected: Expected,
    step: Step,
    /// Found, not yet given.
    pending: VecDeque<Found>,
    log_id: Option<LogId>,
    segment_bytes: u64,
    trailer: Option<Trailer>,
    sealed: Option<SealedIndex>,
    place: u64,
    /// What the next extent must be; the CRC is not known behind damage.
    next_sequence: ExtentSequence,
    previous_header_crc: Option<u32>,
    incarnation: Incarnation,
    last: Option<WalkEnd>,
    /// Runs of the extents, and of the footer: how many, and a sum over them that does not depend on the order.
    in_extents: RunSum,
    in_footer: RunSum,
    /// Something was lost, so that counts can't match.
    damaged: bool,
}

/// A set of runs, as far as it must be compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RunSum {
    runs: u64,
    sum: u64,
}

impl RunSum {
    fn add(&mut self, entry: &IndexEntry) {
        let mut bytes = [0; 40];
        bytes[..8].copy_from_slice(&entry.key.topic.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&entry.base_offset.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&entry.next_offset.0.to_le_bytes());
        bytes[24..28].copy_from_slice(&entry.key.partition.to_le_bytes());
        bytes[28..32].copy_from_slice(&entry.place.to_le_bytes());
        bytes[32..36].copy_from_slice(&entry.crc.to_le_bytes());
        bytes[36..].copy_from_slice(&entry.stored_bytes.to_le_bytes());
        self.runs += 1;
        self.sum = self.sum.wrapping_add(u64::from(crc32c(&bytes)));
    }
}

impl<'a, S: SegmentSource> SegmentWalk<'a, S> {
    /// A walk through `segment`.
    pub fn new(source: &'a mut S, segment: SegmentSequence, expected: Expected) -> Result<Self, RecoverError> {
        let reader = SegmentReader::open(source, segment)?;
        Ok(Self {
            reader,
            expected,
            step: Step::Header,
            pending: VecDeque::new(),
            log_id: expected.log_id,
            segment_bytes: expected.segment_bytes.unwrap_or(u64::MAX),
            trailer: None,
            sealed: None,
            place: FIRST_EXTENT_AT,
            next_sequence: ExtentSequence(0),
            previous_header_crc: None,
            incarnation: Incarnation(0),
            last: None,
            in_extents: RunSum::default(),
            in_footer: RunSum::default(),
            damaged: false,
        })
    }

    /// Size of the file.
    #[must_use]
    pub const fn file_bytes(&self) -> u64 {
        self.reader.file_bytes
    }

    /// Whether the segment has a whole trailer; known once its header was given.
    #[must_use]
    pub const fn is_sealed(&self) -> bool {
        self.trailer.is_some()
    }

    /// How the extents ended; for the next segment's [`Expected::before`]. `None` when none was whole.
    #[must_use]
    pub const fn end(&self) -> Option<WalkEnd> {
        self.last
    }

    /// The bytes of a run, as they stand; `None` when the device can't read them or the file has not so many.
    pub fn run_bytes(&mut self, extent_place: u64, run: &RunEntry) -> Result<Option<&[u8]>, RecoverError> {
        let place = extent_place + u64::from(run.place);
        let block = place / BLOCK * BLOCK;
        let before = (place - block) as usize;
        let bytes = self.reader.bytes(block, before + run.stored_bytes as usize, AHEAD_BYTES)?;
        Ok(bytes.map(|bytes| &bytes[before..]))
    }

    /// The next thing there is; `None` at the end.
    pub fn advance(&mut self) -> Result<Option<Found>, RecoverError> {
        while self.pending.is_empty() && self.step != Step::Done {
            match self.step {
                Step::Header => self.header()?,
                Step::Extents => self.extent()?,
                Step::Fences => self.fences()?,
                Step::Page(page) => self.page(page)?,
                Step::Done => {}
            }
        }
        Ok(self.pending.pop_front())
    }

    fn damage(&mut self, place: u64, what: DamageKind) {
        self.damaged = true;
        self.pending.push_back(Found::Damage(Damage { place, what }));
    }

    /// Header and trailer, which say what to expect in between.
    fn header(&mut self) -> Result<(), RecoverError> {
        self.step = Step::Extents;
        let cut_short = self.reader.file_bytes < BLOCK;
        let decoded = match self.reader.bytes(0, DISK_BLOCK_BYTES, AHEAD_BYTES)? {
            Some(block) => SegmentHeader::decode(block).map_err(DamageKind::SegmentHeader),
            None if cut_short => Err(DamageKind::SegmentHeader(DiskHeaderError::Absent)),
            None => Err(DamageKind::Unreadable),
        };
        match decoded {
            Ok(header) => self.take_header(&header),
            Err(what) => self.damage(0, what),
        }
        if let Some(before) = self.expected.before
            && before.segment.0 + 1 == self.reader.segment.0
        {
            self.next_sequence = before.next_sequence;
            self.previous_header_crc = Some(before.header_crc);
            self.incarnation = before.incarnation;
        }
        if !self.reader.file_bytes.is_multiple_of(BLOCK) {
            self.damage(self.reader.file_bytes, DamageKind::CutInBlock);
        }
        self.read_trailer()
    }

    fn take_header(&mut self, header: &SegmentHeader) {
        self.pending.push_back(Found::Header(*header));
        let log_id = *self.log_id.get_or_insert(header.log_id);
        if header.log_id != log_id {
            return self.damage(0, DamageKind::ForeignLog(header.log_id));
        }
        if header.segment != self.reader.segment {
            return self.damage(0, DamageKind::OtherSegment(header.segment));
        }
        if let Some(expected) = self.expected.segment_bytes.filter(|expected| *expected != header.segment_bytes) {
            self.damage(0, DamageKind::SegmentBytes { found: header.segment_bytes, expected });
        }
        self.segment_bytes = self.expected.segment_bytes.unwrap_or(header.segment_bytes);
        self.next_sequence = header.first_sequence;
        // An extent with sequence 0 has none before it; what the header says then is 0, as its extent does.
        self.previous_header_crc = Some(header.previous_header_crc);
        if let Some(before) = self.expected.before {
            let adjacent = before.segment.0 + 1 == header.segment.0;
            let follows = before.next_sequence == header.first_sequence;
            let same = follows && before.header_crc == header.previous_header_crc;
            if adjacent && !same || before.next_sequence > header.first_sequence {
                self.damage(0, DamageKind::SegmentChain(before.segment));
            }
        }
    }

    fn read_trailer(&mut self) -> Result<(), RecoverError> {
        let (segment, file_bytes) = (self.reader.segment, self.reader.file_bytes);
        let Some(place) = file_bytes.checked_sub(BLOCK).filter(|place| place.is_multiple_of(BLOCK) && *place > 0)
        else {
            return Ok(());
        };
        let Some(log_id) = self.log_id else { return Ok(()) };
        let Some(block) = self.reader.bytes(place, DISK_BLOCK_BYTES, DISK_BLOCK_BYTES)? else { return Ok(()) };
        match Trailer::decode(block, log_id, segment, file_bytes) {
            Ok(trailer) => {
                self.trailer = Some(trailer);
                self.pending.push_back(Found::Trailer { place, trailer });
            }
            Err(FooterError::Header(DiskHeaderError::Absent)) => {}
            // A recycled file may end with the trailer of its life before.
            Err(FooterError::Field(_)) if self.expected.end.is_some_and(|end| end <= place) => {}
            Err(error) => self.damage(place, DamageKind::Trailer(error)),
        }
        Ok(())
    }

    /// Place behind the last extent, if it is known; and where to stop looking.
    fn known_end(&self) -> Option<u64> {
        self.trailer.map(|trailer| u64::from(trailer.end.end_place)).or(self.expected.end)
    }

    fn limit(&self) -> u64 {
        let most = self.segment_bytes.min(SEGMENT_BYTES_MAX);
        self.known_end().unwrap_or(u64::MAX).min(self.reader.file_bytes).min(most)
    }

    fn extent(&mut self) -> Result<(), RecoverError> {
        let place = self.place;
        if place >= self.limit() {
            return self.extents_end();
        }
        let Some(block) = self.reader.bytes(place, DISK_BLOCK_BYTES, AHEAD_BYTES)? else {
            return self.lost(place, DamageKind::Unreadable);
        };
        if block.iter().all(|byte| *byte == 0) {
            return self.zeros();
        }
        let header = match ExtentHeader::decode(block) {
            Ok(header) => header,
            Err(error) => return self.lost(place, DamageKind::ExtentHeader(error)),
        };
        if !self.is_of_life(&header, place) {
            return self.lost(place, DamageKind::OtherLife(self.next_sequence));
        }
        let follows = header.sequence == self.next_sequence
            && self.previous_header_crc.is_none_or(|crc| crc == header.previous_header_crc);
        if !follows && self.previous_header_crc.is_some() {
            self.damage(place, DamageKind::Chain { found: header.sequence, expected: self.next_sequence });
        }
        self.whole_header(place, header)
    }

    /// Whether a whole header can be of this log at this place.
    fn is_of_life(&self, header: &ExtentHeader, place: u64) -> bool {
        let position = |segment_bytes: u64| self.reader.segment.0.checked_mul(segment_bytes)?.checked_add(place);
        let position = if self.segment_bytes == u64::MAX { None } else { position(self.segment_bytes) };
        self.log_id.is_none_or(|log_id| log_id == header.log_id)
            && header.sequence >= self.next_sequence
            && header.sequence.0 < u64::MAX
            && header.incarnation >= self.incarnation
            && position.is_none_or(|position| header.synced_position.0 <= position)
    }

    fn whole_header(&mut self, place: u64, header: ExtentHeader) -> Result<(), RecoverError> {
        let end = place + u64::from(header.extent_bytes);
        self.log_id.get_or_insert(header.log_id);
        self.place = end;
        self.next_sequence = ExtentSequence(header.sequence.0 + 1);
        self.previous_header_crc = Some(header.header_crc());
        self.incarnation = header.incarnation;
        self.last = Some(WalkEnd {
            segment: self.reader.segment,
            next_sequence: self.next_sequence,
            header_crc: header.header_crc(),
            incarnation: header.incarnation,
            place: end,
        });
        let sequence = header.sequence;
        if end > self.reader.file_bytes {
            self.damage(place, DamageKind::CutOff(sequence));
        }
        // Bounded to a checkpoint extent by the header's check.
        let upto = EXTENT_HEADER_BYTES + header.directory_bytes as usize;
        let Some(bytes) = self.reader.bytes(place, upto, AHEAD_BYTES)? else {
            if end <= self.reader.file_bytes {
                self.damage(place, DamageKind::Unreadable);
            }
            return Ok(());
        };
        let directory = &bytes[EXTENT_HEADER_BYTES..];
        let mut producers = Vec::new();
        let body = match header.kind {
            ExtentKind::Checkpoint => Checkpoint::decode(directory, &header).map(FoundBody::Checkpoint),
            ExtentKind::Data | ExtentKind::Moved => decode_directory(directory, &header).map(|directory| {
                producers = directory.producers;
                FoundBody::Runs(directory.runs)
            }),
        };
        match body {
            Ok(body) => {
                if let FoundBody::Runs(runs) = &body {
                    runs.iter().for_each(|run| self.in_extents.add(&IndexEntry::of_run(place, run)));
                }
                self.pending.push_back(Found::Extent(FoundExtent { place, header, body, producers }));
            }
            Err(error) => {
                let at = place + EXTENT_HEADER_BYTES as u64;
                self.damage(at, DamageKind::Directory { sequence, error });
            }
        }
        Ok(())
    }

    /// Nothing of the chain stands at `place`: goes on where something does.
    fn lost(&mut self, place: u64, what: DamageKind) -> Result<(), RecoverError> {
        let found = self.search(place + BLOCK)?;
        if found.is_some() || self.known_end().is_some() {
            self.damage(place, what);
        } else {
            let to = self.reader.file_bytes.min(self.segment_bytes).max(place);
            self.pending.push_back(Found::Behind { from: place, to });
        }
        self.previous_header_crc = None;
        self.place = found.unwrap_or(self.limit());
        Ok(())
    }

    /// Zeros at the present place, up to where they end.
    fn zeros(&mut self) -> Result<(), RecoverError> {
        let (from, limit) = (self.place, self.limit());
        let mut to = from + BLOCK;
        while to < limit {
            match self.reader.bytes(to, DISK_BLOCK_BYTES, AHEAD_BYTES)? {
                Some(block) if block.iter().all(|byte| *byte == 0) => to += BLOCK,
                _ => break,
            }
        }
        let ends_here = to >= limit || self.search(to)?.is_none();
        if ends_here && self.known_end().is_none() {
            let to = self.reader.file_bytes.min(self.segment_bytes);
            self.pending.push_back(Found::Behind { from, to });
            self.place = limit;
        } else {
            self.pending.push_back(Found::Zeros { from, to: to.min(limit) });
            self.damaged = true;
            self.place = to.min(limit);
        }
        self.previous_header_crc = None;
        Ok(())
    }

    /// The next place from `from` on where an extent of the chain stands.
    fn search(&mut self, from: u64) -> Result<Option<u64>, RecoverError> {
        let mut place = from;
        while place < self.limit() {
            if let Some(block) = self.reader.bytes(place, DISK_BLOCK_BYTES, AHEAD_BYTES)?
                && let Ok(header) = ExtentHeader::decode(block)
                && self.is_of_life(&header, place)
            {
                return Ok(Some(place));
            }
            place += BLOCK;
        }
        Ok(None)
    }

    fn extents_end(&mut self) -> Result<(), RecoverError> {
        let Some(trailer) = self.trailer else {
            self.step = Step::Done;
            return self.behind_open();
        };
        self.step = Step::Fences;
        let found = self.last.map_or(trailer.end.first_sequence, |last| last.next_sequence);
        let crc = self.last.map(|last| last.header_crc);
        let same = trailer.end.next_sequence == found && crc.is_none_or(|crc| crc == trailer.end.last_header_crc);
        if !same && !self.damaged {
            let place = self.reader.file_bytes - BLOCK;
            self.damage(place, DamageKind::End { trailer: trailer.end.next_sequence, found });
        }
        Ok(())
    }

    /// What stands behind the end of a segment without trailer.
    fn behind_open(&mut self) -> Result<(), RecoverError> {
        let from = self.last.map_or(FIRST_EXTENT_AT, |last| last.place);
        let known = self.expected.end.unwrap_or(from).max(from);
        if known >= self.reader.file_bytes {
            return Ok(());
        }
        let (segment, log_id) = (self.reader.segment, self.log_id);
        let block = self.reader.bytes(known, DISK_BLOCK_BYTES, AHEAD_BYTES)?;
        let footer = block.zip(log_id).is_some_and(|(block, log_id)| is_footer_page(block, log_id, segment));
        let next = block.and_then(|block| ExtentHeader::decode(block).ok());
        // Extents are placed inside the file, so one that is larger was whole once.
        let next = next.filter(|header| known + u64::from(header.extent_bytes) > self.reader.file_bytes);
        if footer {
            self.damage(known, DamageKind::TrailerMissing);
        } else if let Some(header) = next.filter(|header| self.is_of_life(header, known)) {
            self.damage(known, DamageKind::CutOff(header.sequence));
        } else if self.expected.end.is_some() {
            self.pending.push_back(Found::Behind { from: known, to: self.reader.file_bytes });
        }
        Ok(())
    }

    fn fences(&mut self) -> Result<(), RecoverError> {
        self.step = Step::Done;
        let Some(trailer) = self.trailer else { return Ok(()) };
        let (place, bytes) = trailer.fences();
        let Some(fences) = self.reader.bytes(place, bytes, bytes)? else {
            self.damage(place, DamageKind::Unreadable);
            return Ok(());
        };
        match SealedIndex::parse(&trailer, fences) {
            Ok(sealed) => {
                self.sealed = Some(sealed);
                self.step = Step::Page(0);
            }
            Err(error) => self.damage(place, DamageKind::Fences(error)),
        }
        Ok(())
    }

    fn page(&mut self, page: u32) -> Result<(), RecoverError> {
        let Some(sealed) = &self.sealed else { return Ok(()) };
        if page >= sealed.pages() {
            self.step = Step::Done;
            if !self.damaged && self.in_footer != self.in_extents {
                let (listed, found) = (self.in_footer.runs, self.in_extents.runs);
                let place = self.trailer.map_or(0, |trailer| u64::from(trailer.end.end_place));
                self.damage(place, DamageKind::Index { listed, found });
            }
            return Ok(());
        }
        self.step = Step::Page(page + 1);
        let place = sealed.page_place(page);
        let bytes = self.reader.bytes(place, FOOTER_PAGE_BYTES, AHEAD_BYTES)?;
        match bytes.map(|bytes| sealed.decode_page(page, bytes)) {
            Some(Ok(entries)) => {
                entries.iter().for_each(|entry| self.in_footer.add(entry));
                self.pending.push_back(Found::Page { place, entries });
            }
            Some(Err(error)) => self.damage(place, DamageKind::Page { page, error }),
            None => self.damage(place, DamageKind::Unreadable),
        }
        Ok(())
    }
}
