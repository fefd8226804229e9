//! Where each run of a log lies: in full for the segment being written, by footer pages for sealed ones.
//!
//! A sealed segment ends with its footer, behind the last extent:
//!
//! | what | bytes |
//! |---|---|
//! | pages of up to 63 entries, sorted by (topic, partition, base offset) over the whole footer | 4096 each |
//! | fences: the first key of each page, 20 bytes each; zeros | a multiple of 4096 |
//! | trailer: 64 bytes; zeros | 4096, the last of the file |
//!
//! Only fences stay in memory. A lookup is a step machine that asks for pages; the caller reads and may cache them.
//! Everything here can be rebuilt from the extents.

mod active;
mod footer;
mod lookup;
#[cfg(test)]
mod tests;

use crate::extent::RunEntry;
use crate::ids::{Epoch, Offset, PartitionKey, SegmentSequence};

pub use active::ActiveIndex;
pub use footer::{
    FOOTER_PAGE_BYTES, FooterError, PAGE_ENTRIES, SealedIndex, Trailer, encode_footer, footer_bytes, is_footer_page,
    page_count,
};
pub use lookup::{Lookup, LookupStep, PageRead, RunCursor};

/// One run of a segment: what its extent's directory says, with the place counted from the start of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexEntry {
    /// Whose batches.
    pub key: PartitionKey,
    /// Offset of the first record.
    pub base_offset: Offset,
    /// One past the last record.
    pub next_offset: Offset,
    /// Epoch of its last batch.
    pub epoch: Epoch,
    /// Where the run starts in the segment file.
    pub place: u32,
    /// Bytes as they stand on disk.
    pub stored_bytes: u32,
    /// Bytes once decompressed.
    pub raw_bytes: u32,
    /// CRC32C of the stored bytes.
    pub crc: u32,
    /// Batches in the run.
    pub batches: u32,
    /// 0: the run is a row of batches. Else it is a row of packs (see [`crate::pack`]).
    pub codec: u8,
    /// Append time of the newest batch, milliseconds since the Unix epoch.
    pub max_append_time_ms: i64,
}

impl IndexEntry {
    /// The entry of a run of the extent at `extent_place`.
    ///
    /// # Panics
    /// When the run lies past 4 GiB: segments are smaller.
    #[must_use]
    pub fn of_run(extent_place: u64, run: &RunEntry) -> Self {
        let place = extent_place + u64::from(run.place);
        Self {
            key: run.key,
            base_offset: run.base_offset,
            next_offset: run.next_offset,
            epoch: run.epoch,
            place: u32::try_from(place).expect("a place in a segment fits 32 bits"),
            stored_bytes: run.stored_bytes,
            raw_bytes: run.raw_bytes,
            crc: run.crc,
            batches: run.batches,
            codec: run.codec,
            max_append_time_ms: run.max_append_time_ms,
        }
    }

    /// What entries are sorted by.
    #[must_use]
    pub const fn sort_key(&self) -> (PartitionKey, Offset) {
        (self.key, self.base_offset)
    }
}

/// The index of one segment.
#[derive(Debug)]
pub enum SegmentIndex {
    /// All entries in memory: the segment being written, or one whose footer is lost.
    Full(ActiveIndex),
    /// Fences in memory, entries in the footer.
    Sealed(SealedIndex),
}

/// The indexes of all segments of one shard log.
///
/// Runs of a partition are expected to rise from segment to segment, as appending makes them.
#[derive(Debug, Default)]
pub struct LogIndex {
    /// Sorted by sequence.
    segments: Vec<(SegmentSequence, SegmentIndex)>,
}

impl LogIndex {
    /// Adds a segment, or replaces its index: an active one by a sealed one.
    pub fn put(&mut self, segment: SegmentSequence, index: SegmentIndex) {
        match self.segments.binary_search_by_key(&segment, |(sequence, _)| *sequence) {
            Ok(rank) => self.segments[rank].1 = index,
            Err(rank) => self.segments.insert(rank, (segment, index)),
        }
    }

    /// Forgets a segment; lookups under way go on without it. Says whether it was there.
    pub fn remove(&mut self, segment: SegmentSequence) -> bool {
        let found = self.segments.binary_search_by_key(&segment, |(sequence, _)| *sequence);
        if let Ok(rank) = found {
            self.segments.remove(rank);
        }
        found.is_ok()
    }

    /// Adds the runs of an extent at `extent_place` of a segment that has its index in memory.
    ///
    /// # Panics
    /// When the segment is not there or is sealed.
    pub fn insert_extent(&mut self, segment: SegmentSequence, extent_place: u64, runs: &[RunEntry]) {
        let index = self.active_mut(segment).expect("extents are added to the segment being written");
        index.insert_extent(extent_place, runs);
    }

    /// The full index of a segment, if that is what it has.
    pub fn active_mut(&mut self, segment: SegmentSequence) -> Option<&mut ActiveIndex> {
        let rank = self.segments.binary_search_by_key(&segment, |(sequence, _)| *sequence).ok()?;
        match &mut self.segments[rank].1 {
            SegmentIndex::Full(active) => Some(active),
            SegmentIndex::Sealed(_) => None,
        }
    }

    /// The index of a segment.
    #[must_use]
    pub fn get(&self, segment: SegmentSequence) -> Option<&SegmentIndex> {
        let rank = self.segments.binary_search_by_key(&segment, |(sequence, _)| *sequence).ok()?;
        Some(&self.segments[rank].1)
    }

    /// All segments, oldest first.
    pub fn segments(&self) -> impl Iterator<Item = SegmentSequence> + '_ {
        self.segments.iter().map(|(sequence, _)| *sequence)
    }

    /// Bytes that fences hold in memory.
    #[must_use]
    pub fn fence_bytes(&self) -> usize {
        let bytes = |(_, index): &(SegmentSequence, SegmentIndex)| match index {
            SegmentIndex::Full(_) => 0,
            SegmentIndex::Sealed(sealed) => sealed.fence_bytes(),
        };
        self.segments.iter().map(bytes).sum()
    }

    /// Starts looking for the run that covers `offset`, or else the next one above it.
    #[must_use]
    pub fn lookup(&self, key: PartitionKey, offset: Offset) -> Lookup {
        Lookup::anywhere(key, offset)
    }

    /// Starts looking for the run behind the one that a sequential reader has read.
    #[must_use]
    pub fn next_after(&self, cursor: &RunCursor) -> Lookup {
        Lookup::forward(cursor)
    }

    /// Checks and decodes a page that a lookup asked for. `None` when the segment is gone meanwhile.
    pub fn decode_page(&self, read: &PageRead, bytes: &[u8]) -> Option<Result<Vec<IndexEntry>, FooterError>> {
        match self.get(read.segment)? {
            SegmentIndex::Sealed(sealed) => Some(sealed.decode_page(read.page, bytes)),
            SegmentIndex::Full(_) => None,
        }
    }

    /// Ranks `from..to` of the segments with a sequence in `lowest..end`.
    fn ranks(&self, lowest: SegmentSequence, end: Option<SegmentSequence>) -> (usize, usize) {
        let from = self.segments.partition_point(|(sequence, _)| *sequence < lowest);
        let to = end.map_or(self.segments.len(), |end| self.segments.partition_point(|(sequence, _)| *sequence < end));
        (from, to.max(from))
    }
}
