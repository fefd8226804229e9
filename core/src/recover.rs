//! Boot-time repair: reads a shard log that a dead process left and says where it ends, what each partition has, and
//! where the next life goes on. What each finding means is one table, in [`cases`].
//!
//! Only the newest segment is read extent by extent; sealed ones give trailer and fences, so the time depends on the
//! tail, not on retained data. Headers and directories are checked always, runs only past the last position that is
//! known to be synced: before it a bad run is damage, which whoever reads it will notice.
//!
//! Three things may look alike at the end of a log: a torn tail, damage before the end, and what an older life left
//! behind. They are told apart so:
//! - Every header names its predecessor's CRC, a sequence, an incarnation that never falls, and the synced position when
//!   it was written. Nothing before a synced position was ever cut off, so an extent that names one beyond a bad place
//!   proves damage there, even if the extent itself is dead.
//! - Reading goes on behind damage only inside what is proved to be synced: all bytes there are of the living chain.
//!   At the end of that, the table is asked again. So an extent behind a cut can't come back.
//! - A recycled segment holds lower sequences; a segment made twice (its first life died in the roll) names the
//!   incarnation that made it.

mod assemble;
pub mod cases;
pub(crate) mod reader;
mod rebuild;
mod sealed;
mod segments;
mod state;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::BTreeMap;

use crate::dedup::Producers;
use crate::disk_header::DiskHeaderError;
use crate::ids::{Epoch, ExtentSequence, Incarnation, LogId, Offset, PartitionKey, Position, SegmentSequence};
use crate::index::LogIndex;
use crate::limits::EPOCH_OFFSETS;
use crate::log::{LogStart, NextPlace};
use crate::segment::SegmentHeader;

pub use cases::{Case, CaseSeen};
pub use rebuild::{RebuiltIndex, rebuild_index};

/// The segment files of one shard log, to be read while nobody writes them.
pub trait SegmentSource {
    /// All segments there are, in any order.
    fn segments(&self) -> &[SegmentSequence];

    /// Size of a segment's file.
    fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError>;

    /// Reads from `place` on; returns how many bytes, fewer than asked only at the end of the file. `place` and the size
    /// of `into` are multiples of 4096.
    fn read(&mut self, segment: SegmentSequence, place: u64, into: &mut [u8]) -> Result<usize, ReadError>;
}

/// Why a read gave nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The device can't give these bytes (EIO): to recovery they are damaged.
    #[error("the device can't read these bytes")]
    Unreadable,
    /// Anything else: recovery must not guess, so it gives up.
    #[error("{0}")]
    Failed(String),
}

/// Why a log can't be opened. None of these is damage that recovery may repair by itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoverError {
    /// A segment file can't be read.
    #[error("segment {segment}: {error}")]
    Read {
        /// Which segment.
        segment: SegmentSequence,
        /// Why.
        error: ReadError,
    },
    /// A later version of this program has written here.
    #[error(
        "segment {segment}, place {place}: format version {version} is not supported: run the version that wrote it"
    )]
    Version {
        /// Which segment.
        segment: SegmentSequence,
        /// Where in its file.
        place: u64,
        /// The version found.
        version: u8,
    },
    /// The file is of another log.
    #[error("segment {segment} belongs to log {found:?}, not to this shard: restore the directory it was copied over")]
    ForeignLog {
        /// Which segment.
        segment: SegmentSequence,
        /// The log it belongs to.
        found: LogId,
    },
    /// The file has segments of another size.
    #[error("segment {segment} is of a log with segments of {found} bytes, not {expected}")]
    SegmentBytes {
        /// Which segment.
        segment: SegmentSequence,
        /// Size in its header.
        found: u64,
        /// Size of this log's segments.
        expected: u64,
    },
    /// The only segment is not the first of its log, and nothing in it is whole: going on would give offsets twice.
    #[error(
        "segment {0} is the only one and holds nothing readable: restore it, or remove the shard's directory to give up its data"
    )]
    NothingReadable(SegmentSequence),
    /// Sequences or incarnations have reached their end.
    #[error("segment {0}: the log's numbers are used up")]
    UsedUp(SegmentSequence),
}

/// What a partition has in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveredPartition {
    /// First offset that is kept.
    pub log_start: Offset,
    /// One past its last record in the log.
    pub end: Offset,
    /// Epoch of its last batch.
    pub last_epoch: Epoch,
}

impl RecoveredPartition {
    /// The next offset to be given in `epoch`: past everything that memory may have acked in the epochs between.
    #[must_use]
    pub fn resumes_at(&self, epoch: Epoch) -> Offset {
        let lost_epochs = u64::from(epoch.0.saturating_sub(self.last_epoch.0));
        self.end.plus(lost_epochs.saturating_mul(EPOCH_OFFSETS))
    }
}

/// A part of the log that was synced and is not readable any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostRange {
    /// In which segment.
    pub segment: SegmentSequence,
    /// First lost byte of the file.
    pub from: u64,
    /// One past the last.
    pub to: u64,
}

/// A footer made again from the extents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FooterRepair {
    /// Of which segment.
    pub segment: SegmentSequence,
    /// Where it goes.
    pub place: u64,
    /// Its bytes, a multiple of 4096; the file ends behind them.
    pub bytes: Vec<u8>,
}

/// A log as recovery found it.
#[derive(Debug)]
pub struct Recovered {
    /// Where the next life's first extent goes. A segment to be continued may have a file shorter than its full size: make
    /// it full again first.
    pub next: NextPlace,
    /// Sequence of that extent.
    pub next_sequence: ExtentSequence,
    /// Header CRC of the extent before it.
    pub previous_header_crc: u32,
    /// The life that wrote the last accepted extent: the arena of its process matches this.
    pub last_incarnation: Incarnation,
    /// The next life: higher than any incarnation seen, dead ones included.
    pub next_incarnation: Incarnation,
    /// The shard's epoch.
    pub epoch: Epoch,
    /// The shard stopped with everything flushed and synced, and nothing follows.
    pub clean: bool,
    /// Behind a clean stop a life had begun to make its first segment, and nothing of it is whole. It died at once, or what it
    /// wrote is damaged: only its arena knows. Without one its memory counts as lost.
    pub stillborn: bool,
    /// Damage hides what may have been the last records of some partition. The epoch must be raised as if memory was lost,
    /// or offsets would be given twice.
    pub ends_uncertain: bool,
    /// End of the log.
    pub flushed: Position,
    /// How much of it is known to be synced.
    pub synced: Position,
    /// Every partition that the log knows.
    pub partitions: BTreeMap<PartitionKey, RecoveredPartition>,
    /// Windows of idempotent producers over what is in the log.
    pub producers: Producers,
    /// The runs of all segments. The segment to be continued is in it, in full.
    pub index: LogIndex,
    /// Ranges that were synced and are lost, oldest first.
    pub lost: Vec<LostRange>,
    /// The newest segment that stays. What its process wrote last may be in the device's cache only, a footer included: sync
    /// it (after the repairs below) before the log goes on.
    pub sync: Option<SegmentSequence>,
    /// Segments that died while being made. Remove them and sync the directory before the log goes on.
    pub remove: Vec<SegmentSequence>,
    /// The header of the segment to be continued is lost: write this one before the log goes on.
    pub rewrite_header: Option<SegmentHeader>,
    /// The footer of the newest segment is damaged: write this one, cut the file behind it and sync it before the log goes
    /// on. Later starts read of this segment only the footer's end, and would not notice.
    pub rewrite_footer: Option<FooterRepair>,
    /// Every case of the table that was met, but for whole extents.
    pub cases: Vec<CaseSeen>,
}

impl Recovered {
    /// The epoch to go on in when memory is lost. Each life since the last one in the log may have raised it, and each left its
    /// number at least: in the log, or as `in_arena`, the highest incarnation that the arena knows.
    #[must_use]
    pub fn epoch_past_loss(&self, in_arena: Option<Incarnation>) -> Epoch {
        let next = self.next_incarnation.0.max(in_arena.map_or(0, |incarnation| incarnation.0.saturating_add(1)));
        Epoch(self.epoch.0.saturating_add(next - self.last_incarnation.0))
    }

    /// The start of the next life in `epoch`.
    #[must_use]
    pub fn log_start(&self, log_id: LogId, segment_bytes: u64, epoch: Epoch) -> LogStart {
        LogStart {
            log_id,
            segment_bytes,
            incarnation: self.next_incarnation,
            last_incarnation: self.last_incarnation,
            epoch,
            next: self.next,
            next_sequence: self.next_sequence,
            previous_header_crc: self.previous_header_crc,
            flushed: self.flushed,
            synced: self.synced,
        }
    }
}

/// Recovers the log `log_id`, whose segments have `segment_bytes` bytes. Changes nothing on disk.
pub fn recover<S: SegmentSource>(source: &mut S, log_id: LogId, segment_bytes: u64) -> Result<Recovered, RecoverError> {
    segments::Recovery::new(source, log_id, segment_bytes).run()
}

/// The error for a whole header of a version that this code does not know, if that is what `error` says.
fn unsupported(error: DiskHeaderError, segment: SegmentSequence, place: u64) -> Option<RecoverError> {
    match error {
        DiskHeaderError::Version(version) => Some(RecoverError::Version { segment, place, version }),
        DiskHeaderError::Absent | DiskHeaderError::Crc => None,
    }
}
