//! The writer's end of a shard log: where the next extent goes, and how far the log is flushed and synced.
//!
//! Owns the chain of extent headers and the three ends of the log as positions; does not own files, buffers or indexes.
//! Lives on the shard that writes the log.
//!
//! What must hold: an extent is flushed when it *and all before it* have completed; a sync covers only what was flushed
//! when it was issued; a write that syncs itself covers only its own extent; a segment takes its first extent only when everything before is synced; nothing but its
//! checkpoint is placed before a new life is synced. Breaking one of these is a bug and panics.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use crate::extent::{EXTENT_HEADER_BYTES, ExtentHeader, ExtentKind};
use crate::ids::{Epoch, ExtentSequence, Incarnation, LogId, Position, SegmentSequence};
use crate::index::footer_bytes;
use crate::segment::{FIRST_EXTENT_AT, SegmentHeader, position_of};

/// Where a log goes on when its shard starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogStart {
    /// The log.
    pub log_id: LogId,
    /// Size of each segment.
    pub segment_bytes: u64,
    /// The new life: higher than any that has written.
    pub incarnation: Incarnation,
    /// The life that wrote the last extent.
    pub last_incarnation: Incarnation,
    /// The shard's epoch from now on.
    pub epoch: Epoch,
    /// Where the first extent goes.
    pub next: NextPlace,
    /// Sequence of the first extent.
    pub next_sequence: ExtentSequence,
    /// Header CRC of the extent before.
    pub previous_header_crc: u32,
    /// End of what recovery accepted.
    pub flushed: Position,
    /// How much of that is known to be synced.
    pub synced: Position,
}

/// Where the first extent of a life goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextPlace {
    /// On in a segment that is not sealed.
    Continue(OpenSegment),
    /// To a segment that has yet to be made (or made anew).
    NewSegment(SegmentSequence),
}

/// A segment that can take more extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenSegment {
    /// Which one.
    pub segment: SegmentSequence,
    /// Sequence of its first extent.
    pub first_sequence: ExtentSequence,
    /// First free place.
    pub place: u64,
    /// Runs in it, which its footer must have room for.
    pub runs: usize,
    /// Place of its newest checkpoint; 0 if none is readable.
    pub checkpoint_place: u32,
}

/// How a segment ended: what its trailer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentEnd {
    /// The log.
    pub log_id: LogId,
    /// The segment.
    pub segment: SegmentSequence,
    /// Sequence of its first extent.
    pub first_sequence: ExtentSequence,
    /// Sequence of the first extent of the next segment.
    pub next_sequence: ExtentSequence,
    /// Header CRC of its last extent.
    pub last_header_crc: u32,
    /// The life that wrote its last extent.
    pub incarnation: Incarnation,
    /// Place behind its last extent; the footer goes there.
    pub end_place: u32,
    /// Place of its newest checkpoint; 0 if none is readable.
    pub checkpoint_place: u32,
}

/// An extent that has its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The first bytes of the extent.
    pub header: [u8; EXTENT_HEADER_BYTES],
    /// Which segment.
    pub segment: SegmentSequence,
    /// Where in the segment file.
    pub place_in_file: u64,
    /// Position behind the extent: it is flushed when the flushed end reaches this.
    pub end: Position,
    /// Its number, for [`LogTail::extent_completed`].
    pub sequence: ExtentSequence,
}

/// The extent does not fit the open segment, or none is open: seal it and [`LogTail::roll`] first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the segment is full")]
pub struct NeedsRoll;

struct InFlight {
    sequence: ExtentSequence,
    end: Position,
    completed: bool,
    /// Its write syncs it, and all before it is synced.
    syncs: bool,
}

/// How far a new life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// Its first extent must be a checkpoint.
    Unborn,
    /// The checkpoint that ends here is not synced yet.
    Unsynced(Position),
    /// Its incarnation is synced: nothing of an older one can come back.
    Synced,
}

/// The writer's state of one shard log.
pub struct LogTail {
    log_id: LogId,
    segment_bytes: u64,
    incarnation: Incarnation,
    /// Of the last extent placed.
    last_incarnation: Incarnation,
    epoch: Epoch,
    life: Life,
    open: Option<OpenSegment>,
    next_segment: SegmentSequence,
    next_sequence: ExtentSequence,
    previous_header_crc: u32,
    in_flight: VecDeque<InFlight>,
    placed: Position,
    flushed: Position,
    synced: Position,
    syncing: Option<Position>,
    failed: bool,
}

impl LogTail {
    /// The tail of a log that goes on as recovery says.
    ///
    /// # Panics
    /// When the ends or incarnations are out of order, or a new segment would follow one that is not synced.
    #[must_use]
    pub fn new(start: LogStart) -> Self {
        assert!(start.synced <= start.flushed, "synced {} past flushed {}", start.synced, start.flushed);
        assert!(start.incarnation > start.last_incarnation, "incarnation {} is not new", start.incarnation);
        let continues = matches!(start.next, NextPlace::Continue(_));
        assert!(continues || start.synced == start.flushed, "a new segment follows one that is synced");
        let (open, next_segment) = match start.next {
            NextPlace::Continue(open) => (Some(open), SegmentSequence(open.segment.0 + 1)),
            NextPlace::NewSegment(segment) => (None, segment),
        };
        Self {
            log_id: start.log_id,
            segment_bytes: start.segment_bytes,
            incarnation: start.incarnation,
            last_incarnation: start.last_incarnation,
            epoch: start.epoch,
            life: Life::Unborn,
            open,
            next_segment,
            next_sequence: start.next_sequence,
            previous_header_crc: start.previous_header_crc,
            in_flight: VecDeque::new(),
            placed: start.flushed,
            flushed: start.flushed,
            synced: start.synced,
            syncing: None,
            failed: false,
        }
    }

    /// Gives the next extent its place and header. The write may be issued at once, beside others.
    ///
    /// # Panics
    /// When the tail has failed; when a new segment or life would not begin with a checkpoint, or goes on before its
    /// first checkpoint is synced; when the extent fits no segment at all.
    pub fn place(
        &mut self,
        kind: ExtentKind,
        directory_bytes: u32,
        directory_crc: u32,
        extent_bytes: u32,
        run_count: u32,
    ) -> Result<Placed, NeedsRoll> {
        assert!(!self.failed, "the log has failed: nothing can be placed");
        assert!(
            self.fits(FIRST_EXTENT_AT, extent_bytes, run_count as usize),
            "an extent of {extent_bytes} bytes fits no segment"
        );
        match self.life {
            Life::Unborn => assert!(kind == ExtentKind::Checkpoint, "a life begins with a checkpoint"),
            Life::Unsynced(_) => panic!("the checkpoint that begins this life is not synced"),
            Life::Synced => {}
        }
        let open = self.open.ok_or(NeedsRoll)?;
        let runs = open.runs + run_count as usize;
        if !self.fits(open.place, extent_bytes, runs) {
            return Err(NeedsRoll);
        }
        let first = open.place == FIRST_EXTENT_AT;
        assert!(!first || kind == ExtentKind::Checkpoint, "a segment begins with a checkpoint");
        let header = ExtentHeader {
            kind,
            log_id: self.log_id,
            sequence: self.next_sequence,
            incarnation: self.incarnation,
            previous_header_crc: self.previous_header_crc,
            synced_position: self.synced,
            directory_bytes,
            directory_crc,
            extent_bytes,
            run_count,
            epoch: self.epoch,
        };
        let place = open.place + u64::from(extent_bytes);
        let end = position_of(open.segment, place, self.segment_bytes);
        let checkpoint_place = if kind == ExtentKind::Checkpoint { open.place as u32 } else { open.checkpoint_place };
        self.open = Some(OpenSegment { place, runs, checkpoint_place, ..open });
        self.in_flight.push_back(InFlight { sequence: header.sequence, end, completed: false, syncs: false });
        self.next_sequence = ExtentSequence(header.sequence.0 + 1);
        self.previous_header_crc = header.header_crc();
        self.last_incarnation = self.incarnation;
        self.placed = end;
        if self.life == Life::Unborn {
            self.life = Life::Unsynced(end);
        }
        Ok(Placed {
            header: header.encode(),
            segment: open.segment,
            place_in_file: open.place,
            end,
            sequence: header.sequence,
        })
    }

    /// Whether an extent of that size and number of runs fits the open segment.
    #[must_use]
    pub fn has_room(&self, extent_bytes: u32, run_count: u32) -> bool {
        let room = |open: OpenSegment| self.fits(open.place, extent_bytes, open.runs + run_count as usize);
        self.open.is_some_and(room)
    }

    fn fits(&self, place: u64, extent_bytes: u32, runs: usize) -> bool {
        place + u64::from(extent_bytes) + footer_bytes(runs) as u64 <= self.segment_bytes
    }

    /// Asks that the write of the extent that was just placed syncs it as well (O_DSYNC). `true` only when all before it is
    /// synced: on a device that can write through its cache such a write makes nothing durable but its own bytes. Its
    /// completion then moves the synced end, too.
    ///
    /// # Panics
    /// When that is not the extent placed last.
    #[must_use = "without O_DSYNC the write syncs nothing"]
    pub fn write_syncs(&mut self, sequence: ExtentSequence) -> bool {
        // Whatever is flushed lies before it, since it has not completed itself.
        let before_is_synced = self.in_flight.len() == 1 && self.synced == self.flushed && self.syncing.is_none();
        let last = self.in_flight.back_mut().filter(|extent| extent.sequence == sequence && !extent.completed);
        let last = last.unwrap_or_else(|| panic!("extent {sequence} was not just placed"));
        last.syncs = before_is_synced;
        last.syncs
    }

    /// The write of an extent has completed in full. Returns the flushed end if that moves it; the synced end moves along
    /// when the write was one that syncs.
    ///
    /// # Panics
    /// When no such extent is being written.
    pub fn extent_completed(&mut self, sequence: ExtentSequence) -> Option<Position> {
        if self.failed {
            return None;
        }
        let extent = self.in_flight.iter_mut().find(|extent| extent.sequence == sequence);
        let extent = extent.unwrap_or_else(|| panic!("extent {sequence} is not being written"));
        assert!(!extent.completed, "extent {sequence} completed twice");
        extent.completed = true;
        let before = self.flushed;
        while let Some(extent) = self.in_flight.front()
            && extent.completed
        {
            self.flushed = extent.end;
            if extent.syncs {
                self.synced = extent.end;
            }
            self.in_flight.pop_front();
        }
        (self.flushed > before).then_some(self.flushed)
    }

    /// Call right before issuing an fdatasync of the open segment: what it will cover. `None` when there is nothing to
    /// sync, or a sync is under way (what it does not cover is for the next one).
    pub fn begin_sync(&mut self) -> Option<Position> {
        if self.failed || self.syncing.is_some() || self.flushed == self.synced {
            return None;
        }
        self.syncing = Some(self.flushed);
        self.syncing
    }

    /// The fdatasync that was to cover `position` has completed.
    ///
    /// # Panics
    /// When that is not the sync under way.
    pub fn sync_completed(&mut self, position: Position) {
        if self.failed {
            return;
        }
        assert_eq!(self.syncing.take(), Some(position), "another sync is under way");
        self.synced = position;
        if matches!(self.life, Life::Unsynced(end) if end <= position) {
            self.life = Life::Synced;
        }
    }

    /// A write or sync has failed: the log takes nothing more, and no end moves again.
    pub fn fail(&mut self) {
        self.failed = true;
    }

    /// How the open segment ends, for its footer; `None` if none is open. The footer goes to `end_place`, the file is cut
    /// behind it and synced; only then may the next segment be made.
    ///
    /// # Panics
    /// When an extent is in flight or not synced: a footer speaks of synced extents only.
    #[must_use]
    pub fn segment_end(&self) -> Option<SegmentEnd> {
        let open = self.open?;
        self.assert_synced();
        Some(SegmentEnd {
            log_id: self.log_id,
            segment: open.segment,
            first_sequence: open.first_sequence,
            next_sequence: self.next_sequence,
            last_header_crc: self.previous_header_crc,
            incarnation: self.last_incarnation,
            end_place: open.place as u32,
            checkpoint_place: open.checkpoint_place,
        })
    }

    /// The header for the segment that [`Self::roll`] opens next. The file must have it at place 0, and file and directory
    /// be synced, before the roll.
    #[must_use]
    pub fn next_segment_header(&self, created_ms: i64) -> SegmentHeader {
        SegmentHeader {
            log_id: self.log_id,
            segment: self.next_segment,
            segment_bytes: self.segment_bytes,
            first_sequence: self.next_sequence,
            previous_header_crc: self.previous_header_crc,
            incarnation: self.incarnation,
            created_ms,
        }
    }

    /// Goes over to the next segment, whose file is ready. Its first extent must be a checkpoint.
    ///
    /// # Panics
    /// When the tail has failed, or what stands before is not synced.
    pub fn roll(&mut self) -> SegmentSequence {
        assert!(!self.failed, "the log has failed: it can't roll");
        self.assert_synced();
        let segment = self.next_segment;
        self.open = Some(OpenSegment {
            segment,
            first_sequence: self.next_sequence,
            place: FIRST_EXTENT_AT,
            runs: 0,
            checkpoint_place: 0,
        });
        self.next_segment = SegmentSequence(segment.0 + 1);
        segment
    }

    fn assert_synced(&self) {
        assert!(
            self.in_flight.is_empty() && self.syncing.is_none() && self.synced == self.placed,
            "a segment is left only when all of it is synced (placed {}, synced {})",
            self.placed,
            self.synced
        );
    }

    /// Everything before this position has been written.
    #[must_use]
    pub const fn flushed(&self) -> Position {
        self.flushed
    }

    /// Everything before this position survives power loss.
    #[must_use]
    pub const fn synced(&self) -> Position {
        self.synced
    }

    /// Everything before this position has been given a place.
    #[must_use]
    pub const fn placed(&self) -> Position {
        self.placed
    }

    /// Extents that were placed and are not flushed.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Whether a write or sync has failed.
    #[must_use]
    pub const fn failed(&self) -> bool {
        self.failed
    }

    /// Whether the life's first checkpoint is synced, so that acks may be given.
    #[must_use]
    pub fn is_born(&self) -> bool {
        self.life == Life::Synced
    }

    /// The open segment; `None` until the first roll when the log goes on in a new one.
    #[must_use]
    pub const fn open_segment(&self) -> Option<&OpenSegment> {
        self.open.as_ref()
    }

    /// The segment that the next roll opens.
    #[must_use]
    pub const fn next_segment(&self) -> SegmentSequence {
        self.next_segment
    }

    /// The life that writes.
    #[must_use]
    pub const fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The shard's epoch.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }
}
