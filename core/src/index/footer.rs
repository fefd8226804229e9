//! The footer of a sealed segment: pages, fences, trailer.
//!
//! Page header (64 bytes, then entries of 64 bytes):
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 5 | magic, version = 1 |
//! | 5 | 1 | zero |
//! | 6 | 2 | entries in the page |
//! | 8 | 4 | number of the page |
//! | 12 | 4 | CRC32C of the entries |
//! | 16 | 8 | log id |
//! | 24 | 8 | segment sequence |
//! | 60 | 4 | header CRC |
//!
//! Entry: topic u64, base offset u64, next offset u64, newest append time i64, partition u32, epoch u32, place u32,
//! stored bytes u32, raw bytes u32, CRC u32, batches u32, codec u8, 3 zeros.
//! Fence: topic u64, partition u32, base offset u64.
//!
//! Trailer (64 bytes at the start of the last block):
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 5 | magic, version = 1 |
//! | 5 | 3 | zero |
//! | 8 | 8 | log id |
//! | 16 | 8 | segment sequence |
//! | 24 | 8 | sequence of the first extent |
//! | 32 | 4 | number of extents, lost ones included |
//! | 36 | 4 | header CRC of the last extent |
//! | 40 | 4 | incarnation of the last extent |
//! | 44 | 4 | place behind the last extent: the first page |
//! | 48 | 4 | place of the newest checkpoint; 0 if none is readable |
//! | 52 | 4 | entries |
//! | 56 | 4 | CRC32C of the fences |
//! | 60 | 4 | CRC32C of bytes 0..60 |

use std::ops::Range;

use super::IndexEntry;
use super::active::{Probe, probe_sorted};
use crate::crc::crc32c;
use crate::disk_header::{DISK_HEADER_BYTES, DiskHeaderError, HeaderReader, HeaderWriter};
use crate::ids::{Epoch, ExtentSequence, Incarnation, LogId, Offset, PartitionKey, SegmentSequence, TopicId};
use crate::limits::{DISK_BLOCK_BYTES, EXTENT_BYTES_MAX};
use crate::log::SegmentEnd;
use crate::segment::FIRST_EXTENT_AT;

/// Size of a page.
pub const FOOTER_PAGE_BYTES: usize = DISK_BLOCK_BYTES;
/// Entries of a page.
pub const PAGE_ENTRIES: usize = (FOOTER_PAGE_BYTES - DISK_HEADER_BYTES) / ENTRY_BYTES;

const ENTRY_BYTES: usize = 64;
const FENCE_BYTES: usize = 20;
const PAGE_MAGIC: u32 = u32::from_le_bytes(*b"RMpg");
const TRAILER_MAGIC: u32 = u32::from_le_bytes(*b"RMtr");
const VERSION: u8 = 1;

/// Why bytes are not (part of) the footer they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FooterError {
    /// The 64 bytes are not a whole header of this version.
    #[error(transparent)]
    Header(#[from] DiskHeaderError),
    /// A whole header is of another segment, or says what can't be.
    #[error("footer field `{0}` does not fit the segment")]
    Field(&'static str),
    /// The CRC over fences or entries does not match.
    #[error("footer CRC mismatch")]
    Crc,
    /// Fences or entries are out of order or out of bounds.
    #[error("footer entries are out of order or out of bounds")]
    Entries,
}

/// Pages of a footer of `entries` entries.
#[must_use]
pub const fn page_count(entries: usize) -> usize {
    entries.div_ceil(PAGE_ENTRIES)
}

const fn fence_region_bytes(entries: usize) -> usize {
    (page_count(entries) * FENCE_BYTES).next_multiple_of(DISK_BLOCK_BYTES)
}

/// Size of a footer of `entries` entries: pages, fences and trailer.
#[must_use]
pub const fn footer_bytes(entries: usize) -> usize {
    page_count(entries) * FOOTER_PAGE_BYTES + fence_region_bytes(entries) + DISK_BLOCK_BYTES
}

/// The footer of a segment, to be written at `end.end_place`; the file ends behind it.
///
/// # Panics
/// When `entries` are not sorted by partition and base offset.
#[must_use]
pub fn encode_footer(entries: &[IndexEntry], end: &SegmentEnd) -> Vec<u8> {
    assert!(entries.is_sorted_by_key(IndexEntry::sort_key), "footer entries are sorted");
    let mut footer = Vec::with_capacity(footer_bytes(entries.len()));
    let mut fences = Vec::with_capacity(fence_region_bytes(entries.len()));
    for (number, page) in entries.chunks(PAGE_ENTRIES).enumerate() {
        let page_end = footer.len() + FOOTER_PAGE_BYTES;
        let bytes: Vec<u8> = page.iter().flat_map(encode_entry).collect();
        let header = HeaderWriter::new(PAGE_MAGIC, VERSION)
            .put([0])
            .u16(page.len() as u16)
            .u32(number as u32)
            .u32(crc32c(&bytes))
            .u64(end.log_id.0)
            .u64(end.segment.0)
            .finish();
        footer.extend_from_slice(&header);
        footer.extend_from_slice(&bytes);
        footer.resize(page_end, 0);
        fences.extend_from_slice(&page[0].key.topic.0.to_le_bytes());
        fences.extend_from_slice(&page[0].key.partition.to_le_bytes());
        fences.extend_from_slice(&page[0].base_offset.0.to_le_bytes());
    }
    fences.resize(fence_region_bytes(entries.len()), 0);
    let trailer = HeaderWriter::new(TRAILER_MAGIC, VERSION)
        .put([0; 3])
        .u64(end.log_id.0)
        .u64(end.segment.0)
        .u64(end.first_sequence.0)
        .u32((end.next_sequence.0 - end.first_sequence.0) as u32)
        .u32(end.last_header_crc)
        .u32(end.incarnation.0)
        .u32(end.end_place)
        .u32(end.checkpoint_place)
        .u32(entries.len() as u32)
        .u32(crc32c(&fences))
        .finish();
    footer.extend_from_slice(&fences);
    footer.extend_from_slice(&trailer);
    footer.resize(footer_bytes(entries.len()), 0);
    footer
}

fn encode_entry(entry: &IndexEntry) -> [u8; ENTRY_BYTES] {
    let mut bytes = [0; ENTRY_BYTES];
    let mut at = 0;
    let mut put = |field: &[u8]| {
        bytes[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    };
    put(&entry.key.topic.0.to_le_bytes());
    put(&entry.base_offset.0.to_le_bytes());
    put(&entry.next_offset.0.to_le_bytes());
    put(&entry.max_append_time_ms.to_le_bytes());
    for field in [
        entry.key.partition,
        entry.epoch.0,
        entry.place,
        entry.stored_bytes,
        entry.raw_bytes,
        entry.crc,
        entry.batches,
        u32::from(entry.codec),
    ] {
        put(&field.to_le_bytes());
    }
    bytes
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at + 4)) << 32 | u64::from(u32_at(bytes, at))
}

fn decode_entry(bytes: &[u8]) -> IndexEntry {
    IndexEntry {
        key: PartitionKey { topic: TopicId(u64_at(bytes, 0)), partition: u32_at(bytes, 32) },
        base_offset: Offset(u64_at(bytes, 8)),
        next_offset: Offset(u64_at(bytes, 16)),
        max_append_time_ms: u64_at(bytes, 24) as i64,
        epoch: Epoch(u32_at(bytes, 36)),
        place: u32_at(bytes, 40),
        stored_bytes: u32_at(bytes, 44),
        raw_bytes: u32_at(bytes, 48),
        crc: u32_at(bytes, 52),
        batches: u32_at(bytes, 56),
        codec: bytes[60],
    }
}

/// Whether `bytes` begin with the header of a footer page of this segment: what tells a footer whose trailer is lost.
#[must_use]
pub fn is_footer_page(bytes: &[u8], log_id: LogId, segment: SegmentSequence) -> bool {
    let Ok(mut fields) = HeaderReader::open(bytes, PAGE_MAGIC, VERSION) else { return false };
    let _counts: [u8; 11] = fields.take();
    (fields.u64(), fields.u64()) == (log_id.0, segment.0)
}

/// The trailer of a sealed segment, checked against the file it stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// How the segment ended.
    pub end: SegmentEnd,
    /// Entries in all pages.
    pub entries: u32,
    fences_crc: u32,
}

impl Trailer {
    /// Reads the trailer from `block`, the last 4 KiB of the file of `segment`, which has `file_bytes` bytes.
    pub fn decode(block: &[u8], log_id: LogId, segment: SegmentSequence, file_bytes: u64) -> Result<Self, FooterError> {
        let mut fields = HeaderReader::open(block, TRAILER_MAGIC, VERSION)?;
        let _zero: [u8; 3] = fields.take();
        if fields.u64() != log_id.0 {
            return Err(FooterError::Field("log_id"));
        }
        if fields.u64() != segment.0 {
            return Err(FooterError::Field("segment"));
        }
        let first_sequence = fields.u64();
        let extents = fields.u32();
        let end = SegmentEnd {
            log_id,
            segment,
            first_sequence: ExtentSequence(first_sequence),
            next_sequence: ExtentSequence(
                first_sequence.checked_add(u64::from(extents)).ok_or(FooterError::Field("extents"))?,
            ),
            last_header_crc: fields.u32(),
            incarnation: Incarnation(fields.u32()),
            end_place: fields.u32(),
            checkpoint_place: fields.u32(),
        };
        let trailer = Self { end, entries: fields.u32(), fences_crc: fields.u32() };
        let end_place = u64::from(end.end_place);
        if end_place < FIRST_EXTENT_AT || !end_place.is_multiple_of(DISK_BLOCK_BYTES as u64) {
            return Err(FooterError::Field("end_place"));
        }
        if end.checkpoint_place >= end.end_place || !(end.checkpoint_place as usize).is_multiple_of(DISK_BLOCK_BYTES) {
            return Err(FooterError::Field("checkpoint_place"));
        }
        // The file's size bounds everything that is read or allocated for the footer.
        if end_place + footer_bytes(trailer.entries as usize) as u64 != file_bytes {
            return Err(FooterError::Field("entries"));
        }
        Ok(trailer)
    }

    /// Place and size of the fences.
    #[must_use]
    pub fn fences(&self) -> (u64, usize) {
        let pages = page_count(self.entries as usize);
        (u64::from(self.end.end_place) + (pages * FOOTER_PAGE_BYTES) as u64, fence_region_bytes(self.entries as usize))
    }
}

/// The index of a sealed segment: its end and the first key of each page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SealedIndex {
    end: SegmentEnd,
    entries: u32,
    fences: Vec<(PartitionKey, Offset)>,
}

/// Where in a sealed segment a lookup must read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SealedProbe {
    /// The segment has nothing at or past the offset, and nothing before it either, for sure.
    Absent,
    /// The answer is in this page, or it is the first entry of the next one.
    Page(u32),
}

impl SealedIndex {
    /// Reads the fences that `trailer` promises from the bytes at [`Trailer::fences`].
    pub fn parse(trailer: &Trailer, fences: &[u8]) -> Result<Self, FooterError> {
        let entries = trailer.entries as usize;
        if fences.len() != fence_region_bytes(entries) || crc32c(fences) != trailer.fences_crc {
            return Err(FooterError::Crc);
        }
        let fence = |bytes: &[u8]| {
            let key = PartitionKey { topic: TopicId(u64_at(bytes, 0)), partition: u32_at(bytes, 8) };
            (key, Offset(u64_at(bytes, 12)))
        };
        let fences: Vec<_> = fences.chunks_exact(FENCE_BYTES).take(page_count(entries)).map(fence).collect();
        if !fences.is_sorted() {
            return Err(FooterError::Entries);
        }
        Ok(Self { end: trailer.end, entries: trailer.entries, fences })
    }

    /// The index of a segment whose footer was just written from these entries.
    #[must_use]
    pub fn of_entries(entries: &[IndexEntry], end: &SegmentEnd) -> Self {
        let fences = entries.chunks(PAGE_ENTRIES).map(|page| page[0].sort_key()).collect();
        Self { end: *end, entries: entries.len() as u32, fences }
    }

    /// How the segment ended.
    #[must_use]
    pub const fn end(&self) -> &SegmentEnd {
        &self.end
    }

    /// Entries in all pages.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.entries as usize
    }

    /// Whether the segment has no runs.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Pages of the footer.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.fences.len() as u32
    }

    /// The pages that may hold entries of a topic.
    #[must_use]
    pub fn pages_of(&self, topic: TopicId) -> Range<u32> {
        let from = self.fences.partition_point(|(key, _)| key.topic < topic).saturating_sub(1);
        let to = self.fences.partition_point(|(key, _)| key.topic <= topic);
        // A footer has fewer pages than a u32 can count.
        from as u32..to as u32
    }

    /// Where a page stands in the file.
    #[must_use]
    pub fn page_place(&self, page: u32) -> u64 {
        u64::from(self.end.end_place) + u64::from(page) * FOOTER_PAGE_BYTES as u64
    }

    /// Bytes that the fences take in memory.
    #[must_use]
    pub fn fence_bytes(&self) -> usize {
        self.fences.len() * size_of::<(PartitionKey, Offset)>()
    }

    /// Checks and decodes a page: CRCs, that it is this page of this segment, order, and that runs lie in extents.
    pub fn decode_page(&self, page: u32, bytes: &[u8]) -> Result<Vec<IndexEntry>, FooterError> {
        let mut fields = HeaderReader::open(bytes, PAGE_MAGIC, VERSION)?;
        let [_zero] = fields.take();
        let count = fields.u16() as usize;
        let (number, crc) = (fields.u32(), fields.u32());
        if (fields.u64(), fields.u64(), number) != (self.end.log_id.0, self.end.segment.0, page) {
            return Err(FooterError::Field("page"));
        }
        let Some(fence) = self.fences.get(page as usize) else { return Err(FooterError::Field("page")) };
        let left = self.len() - page as usize * PAGE_ENTRIES;
        if count != left.min(PAGE_ENTRIES) || bytes.len() < FOOTER_PAGE_BYTES {
            return Err(FooterError::Field("count"));
        }
        let bytes = &bytes[DISK_HEADER_BYTES..DISK_HEADER_BYTES + count * ENTRY_BYTES];
        if crc32c(bytes) != crc {
            return Err(FooterError::Crc);
        }
        let entries: Vec<IndexEntry> = bytes.chunks_exact(ENTRY_BYTES).map(decode_entry).collect();
        let sound = |entry: &IndexEntry| {
            let (place, bytes) = (u64::from(entry.place), u64::from(entry.stored_bytes));
            place >= FIRST_EXTENT_AT
                && bytes <= EXTENT_BYTES_MAX as u64
                && entry.raw_bytes as usize <= EXTENT_BYTES_MAX
                && place + bytes <= u64::from(self.end.end_place)
                && entry.base_offset < entry.next_offset
        };
        let sorted = entries.is_sorted_by_key(IndexEntry::sort_key);
        if !sorted || entries[0].sort_key() != *fence || !entries.iter().all(sound) {
            return Err(FooterError::Entries);
        }
        Ok(entries)
    }

    /// Which page tells about `offset` of `key`: the one that holds the last entry at or before it.
    pub(super) fn probe(&self, key: PartitionKey, offset: Offset) -> SealedProbe {
        let behind = self.fences.partition_point(|fence| *fence <= (key, offset));
        if behind > 0 {
            return SealedProbe::Page(behind as u32 - 1);
        }
        match self.fences.first() {
            Some((first, _)) if *first == key => SealedProbe::Page(0),
            _ => SealedProbe::Absent,
        }
    }

    /// What the entries of `page`, chosen by [`Self::probe`], tell. `Err` names the next page when the answer is there.
    pub(super) fn judge(
        &self,
        page: u32,
        entries: &[IndexEntry],
        key: PartitionKey,
        offset: Offset,
    ) -> Result<Probe, u32> {
        let from = entries.partition_point(|entry| entry.key < key);
        let to = entries.partition_point(|entry| entry.key <= key);
        let probe = probe_sorted(&entries[from..to], offset);
        let next = self.fences.get(page as usize + 1);
        match probe {
            Probe::Absent | Probe::Below if next.is_some_and(|(next, _)| *next == key) => Err(page + 1),
            _ => Ok(probe),
        }
    }
}
