//! Looking at a log as it stands, whole or damaged, and naming what is wrong with it: for `ringmain dump`. Nothing here is
//! decided about what survives: that is [`crate::recover`]'s business, which also tells where the log ends.
//!
//! [`SegmentWalk`] goes through one segment, extent by extent, and past what is not whole. [`run`] looks into a run,
//! [`OffsetCheck`] at how the runs of each partition join.

mod offsets;
pub mod run;
#[cfg(test)]
mod tests;
mod walk;

use crate::checkpoint::Checkpoint;
use crate::disk_header::DiskHeaderError;
use crate::extent::{ExtentError, ExtentHeader, ProducerEntry, RunEntry};
use crate::ids::{ExtentSequence, Incarnation, LogId, SegmentSequence};
use crate::index::{FooterError, IndexEntry, Trailer};
use crate::segment::SegmentHeader;

pub use offsets::{OffsetCheck, OffsetFinding};
pub use walk::SegmentWalk;

/// What a segment should be, as far as its surroundings tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The log that it belongs to.
    pub log_id: Option<LogId>,
    /// Size of the log's segments.
    pub segment_bytes: Option<u64>,
    /// Place behind its last extent, for a segment that is not sealed.
    pub end: Option<u64>,
    /// How the segment before it ended.
    pub before: Option<WalkEnd>,
}

/// How a walk ended: what the next segment must go on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WalkEnd {
    /// The segment.
    pub segment: SegmentSequence,
    /// Sequence behind its last extent.
    pub next_sequence: ExtentSequence,
    /// CRC of its last extent's header.
    pub header_crc: u32,
    /// Incarnation of its last extent.
    pub incarnation: Incarnation,
    /// Place behind its last extent.
    pub place: u64,
}

/// One thing that a walk came upon, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The segment's header.
    Header(SegmentHeader),
    /// An extent whose header and directory are whole.
    Extent(FoundExtent),
    /// Zeros where extents should stand: never written, or given back to the filesystem.
    Zeros {
        /// First of them.
        from: u64,
        /// One past the last.
        to: u64,
    },
    /// What stands behind the end of the log: of an older life, of a recycled file, or nothing.
    Behind {
        /// First byte.
        from: u64,
        /// One past the last.
        to: u64,
    },
    /// The trailer of a sealed segment.
    Trailer {
        /// Where it stands.
        place: u64,
        /// What it says.
        trailer: Trailer,
    },
    /// A page of the footer.
    Page {
        /// Where it stands.
        place: u64,
        /// Its runs.
        entries: Vec<IndexEntry>,
    },
    /// Something that is not as it was written.
    Damage(Damage),
}

/// An extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundExtent {
    /// Where it stands.
    pub place: u64,
    /// Its header.
    pub header: ExtentHeader,
    /// What its directory says.
    pub body: FoundBody,
    /// Batches of idempotent producers that its directory names.
    pub producers: Vec<ProducerEntry>,
}

/// What an extent carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundBody {
    /// Runs, in the order of their places.
    Runs(Vec<RunEntry>),
    /// Ends of partitions.
    Checkpoint(Checkpoint),
}

/// What is wrong, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Place in the file.
    pub place: u64,
    /// What is wrong there.
    pub what: DamageKind,
}

/// What is wrong at a place of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DamageKind {
    /// The first 64 bytes are no header.
    #[error("segment header: {0}")]
    SegmentHeader(DiskHeaderError),
    /// The file is of another log.
    #[error("the segment belongs to log {0:?}, not to this one")]
    ForeignLog(LogId),
    /// The header is of another segment.
    #[error("the header is of segment {0}: the file has another name, or was recycled")]
    OtherSegment(SegmentSequence),
    /// The header says another size.
    #[error("the header says segments of {found} bytes, not {expected}")]
    SegmentBytes {
        /// Size in the header.
        found: u64,
        /// Size of this log's segments.
        expected: u64,
    },
    /// The header does not go on from the segment before.
    #[error("the segment does not follow segment {0}: sequence or CRC of the extent before differ")]
    SegmentChain(SegmentSequence),
    /// No extent header stands where one must.
    #[error("extent header: {0}")]
    ExtentHeader(ExtentError),
    /// The extent is of another log or life, or says what can't be of this place.
    #[error("an extent of another log or an older life stands where extent {0} must")]
    OtherLife(ExtentSequence),
    /// The extent does not name the one before it.
    #[error("extent {found} does not follow the one before it, {expected} was expected")]
    Chain {
        /// Its sequence.
        found: ExtentSequence,
        /// What must stand here.
        expected: ExtentSequence,
    },
    /// Header whole, directory or checkpoint not.
    #[error("directory of extent {sequence}: {error}")]
    Directory {
        /// Of which extent.
        sequence: ExtentSequence,
        /// What is wrong.
        error: ExtentError,
    },
    /// The file ends before the extent does.
    #[error("extent {0} reaches past the end of the file: it was cut off")]
    CutOff(ExtentSequence),
    /// The file ends where none of ours does.
    #[error("the file ends within a block of 4096 bytes: it was cut off")]
    CutInBlock,
    /// The segment's end does not match its trailer.
    #[error("the trailer says the extents end with {trailer}, found was the end of {found}")]
    End {
        /// Sequence behind the last extent by the trailer.
        trailer: ExtentSequence,
        /// The same by the extents.
        found: ExtentSequence,
    },
    /// The last block is a trailer that is not whole, or does not fit the file.
    #[error("trailer: {0}")]
    Trailer(FooterError),
    /// Pages of a footer and no trailer behind them.
    #[error("a footer stands here, and its trailer is missing: the file was cut off or its last block is damaged")]
    TrailerMissing,
    /// The fences are not whole.
    #[error("fences: {0}")]
    Fences(FooterError),
    /// A page is not whole.
    #[error("footer page {page}: {error}")]
    Page {
        /// Which one.
        page: u32,
        /// What is wrong.
        error: FooterError,
    },
    /// Pages list other runs than the extents have.
    #[error("the footer lists {listed} runs, which are not the {found} of the extents")]
    Index {
        /// In the footer.
        listed: u64,
        /// In the extents.
        found: u64,
    },
    /// The device can't read.
    #[error("the device can't read this block")]
    Unreadable,
}
