//! The shard log on its way to disk: places extents, writes, syncs, rolls segments, keeps the index.
//!
//! Owns the tail (core), the open segment's file and the index of all segments. Extents are placed by one task, the
//! flusher; writes overlap and complete in any order, the tail makes prefixes of them.

mod fill;
mod roll;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringmain_core::checkpoint::{Checkpoint, CheckpointPartition};
use ringmain_core::crc::crc32c;
use ringmain_core::extent::{ExtentKind, RunEntry};
use ringmain_core::flush::FlushPlan;
use ringmain_core::ids::{ExtentSequence, Incarnation, Position, SegmentSequence};
use ringmain_core::index::{IndexEntry, LogIndex};
use ringmain_core::log::LogTail;
use ringmain_core::prefill::Prefill;
use ringmain_core::segment::file_name;
use ringmain_core::store::ShardStore;

use crate::clock::Clock;
use crate::extent_image::ExtentImage;
use crate::files::{FileError, LogFile};
use crate::metrics::ShardMetrics;
use crate::recycle::RecyclePool;
use crate::shard::Shard;
use crate::signal::Broadcast;

/// Larger extents are not written and synced at once: one fdatasync behind several of them costs less.
const SYNCING_WRITE_BYTES_MAX: u32 = 128 * 1024;

/// An extent that is being written, with what its completion means.
pub(crate) struct Written {
    end: Position,
    segment: SegmentSequence,
    extent_place: u64,
    pub(crate) bytes: u64,
    ack_driven: bool,
    pub(crate) plan: FlushPlan,
    entries: Vec<RunEntry>,
}

/// An extent that has its place and its bytes.
pub(crate) struct PlacedExtent {
    pub(crate) end: Position,
    pub(crate) sequence: ExtentSequence,
    segment: SegmentSequence,
    place: u64,
    file: LogFile,
    image: RefCell<Option<ExtentImage>>,
    bytes: u64,
}

impl PlacedExtent {
    /// Writes all of it; the buffers go out side by side.
    pub(crate) async fn write(&self, shard: &Shard) -> Result<(), String> {
        self.write_to(&shard.metrics).await
    }

    async fn write_to(&self, metrics: &ShardMetrics) -> Result<(), String> {
        let image = self.image.borrow_mut().take().expect("an extent is written once");
        let result = image.write_to(&self.file, self.place).await.map_err(|error| error.to_string());
        metrics.device_bytes_written_total.add(self.bytes);
        result
    }
}

/// What the end of a write moves.
pub(crate) struct Completed {
    pub(crate) flushed: Position,
    /// The synced end, if the write moved it.
    pub(crate) synced: Option<Position>,
    pub(crate) done: Vec<Written>,
}

/// Where the log writes, for recovery to hand over.
pub(crate) struct LogWriterStart {
    pub(crate) dir: PathBuf,
    pub(crate) segment_bytes: u64,
    pub(crate) tail: LogTail,
    pub(crate) index: LogIndex,
    /// The open segment's file, if the log goes on in it.
    pub(crate) file: Option<LogFile>,
    /// The disk was too full to reserve all of it.
    pub(crate) unreserved: bool,
    pub(crate) metrics: Arc<ShardMetrics>,
}

/// The writer of one shard log.
pub(crate) struct LogWriter {
    dir: PathBuf,
    segment_bytes: u64,
    tail: RefCell<LogTail>,
    pub(crate) index: RefCell<LogIndex>,
    file: RefCell<Option<LogFile>>,
    /// The same file, for writes that sync what they write; opened when the first one comes.
    syncing_file: RefCell<Option<LogFile>>,
    /// The disk had no room for all of the open segment when this life began: no data goes into it before it has.
    unreserved: Cell<bool>,
    stopped_without_room: Cell<bool>,
    /// Extents being written, in log order.
    writing: RefCell<VecDeque<Written>>,
    bytes_in_flight: Cell<u64>,
    ack_driven: Cell<usize>,
    syncing: Cell<bool>,
    prefill: RefCell<Prefill>,
    /// Somebody waits for a checkpoint that says what is true now.
    checkpoint_wanted: Cell<bool>,
    /// The segment of the newest checkpoint that is synced.
    checkpointed: Cell<Option<SegmentSequence>>,
    /// The newest segment that has its footer.
    sealed: Cell<Option<SegmentSequence>>,
    last_sync: Cell<Duration>,
    /// Something completed: a roll or stop that waits looks again.
    progress: Broadcast,
    pub(crate) recycle: RecyclePool,
    metrics: Arc<ShardMetrics>,
}

impl LogWriter {
    pub(crate) fn new(start: LogWriterStart) -> Self {
        start.metrics.segments.set(start.index.segments().count() as u64);
        // What lies behind the end of the last life counts as not written.
        let written_bytes = start.tail.open_segment().map_or(0, |open| open.place);
        Self {
            prefill: RefCell::new(Prefill::new(written_bytes)),
            recycle: RecyclePool::new(start.dir.clone()),
            segment_bytes: start.segment_bytes,
            unreserved: Cell::new(start.unreserved),
            stopped_without_room: Cell::new(false),
            dir: start.dir,
            tail: RefCell::new(start.tail),
            index: RefCell::new(start.index),
            file: RefCell::new(start.file),
            syncing_file: RefCell::default(),
            writing: RefCell::default(),
            bytes_in_flight: Cell::new(0),
            ack_driven: Cell::new(0),
            syncing: Cell::new(false),
            checkpoint_wanted: Cell::new(false),
            checkpointed: Cell::new(None),
            sealed: Cell::new(None),
            last_sync: Cell::new(Duration::ZERO),
            progress: Broadcast::default(),
            metrics: start.metrics,
        }
    }

    /// The life that writes.
    pub(crate) fn incarnation(&self) -> Incarnation {
        self.tail.borrow().incarnation()
    }

    /// Everything before this position has been written.
    pub(crate) fn flushed(&self) -> Position {
        self.tail.borrow().flushed()
    }

    /// Extents being written.
    pub(crate) fn in_flight(&self) -> usize {
        self.writing.borrow().len()
    }

    /// Extents being written only for those who wait.
    pub(crate) fn ack_driven_in_flight(&self) -> usize {
        self.ack_driven.get()
    }

    /// Whether `bytes_max` or more are being written.
    pub(crate) fn is_full(&self, bytes_max: usize) -> bool {
        self.bytes_in_flight.get() >= bytes_max as u64
    }

    /// Nothing is being written or synced.
    pub(crate) fn is_idle(&self) -> bool {
        self.writing.borrow().is_empty() && !self.syncing.get() && !self.prefill.borrow().is_filling()
    }

    pub(crate) fn is_syncing(&self) -> bool {
        self.syncing.get()
    }

    pub(crate) fn set_syncing(&self, syncing: bool) {
        self.syncing.set(syncing);
        self.progress.raise();
    }

    pub(crate) fn note_synced(&self, clock: &Clock) {
        self.last_sync.set(clock.monotonic());
    }

    /// Time since the last sync ended.
    pub(crate) fn since_sync(&self, clock: &Clock) -> Duration {
        clock.monotonic().saturating_sub(self.last_sync.get())
    }

    /// A write or sync has failed: the log takes nothing more.
    pub(crate) fn fail(&self) {
        self.tail.borrow_mut().fail();
        self.progress.raise();
    }

    /// Whether an extent of that size and number of runs fits the open segment.
    pub(crate) fn has_room(&self, extent_bytes: u32, run_count: usize) -> bool {
        self.tail.borrow().has_room(extent_bytes, run_count as u32)
    }

    /// Gets ready to write an extent of `extent_bytes` that somebody waits to be synced so that the write itself syncs it.
    /// Large ones are better written with all others and synced behind. Without a descriptor left for it the extent is
    /// synced by an fdatasync, as others are.
    pub(crate) async fn prepare_syncing_write(&self, extent_bytes: u32) {
        if extent_bytes > SYNCING_WRITE_BYTES_MAX || self.syncing_file.borrow().is_some() {
            return;
        }
        let Some(file) = self.file.borrow().clone() else { return };
        match file.open_syncing().await {
            Ok(syncing) => drop(self.syncing_file.replace(Some(syncing))),
            Err(error) => tracing::debug!("writes and syncs in two steps: {error}"),
        }
    }

    /// Gives an extent its place; `image` is whole but for its header. When its sync is waited for, its write may do it.
    pub(crate) fn place(
        &self,
        kind: ExtentKind,
        directory: &[u8],
        mut image: ExtentImage,
        run_count: usize,
        sync_is_waited_for: bool,
    ) -> Result<PlacedExtent, String> {
        let bytes = image.bytes() as u64;
        let mut tail = self.tail.borrow_mut();
        // Sizes are bounded by the extent's limits, far below 4 GiB.
        let placed = tail
            .place(kind, directory.len() as u32, crc32c(directory), bytes as u32, run_count as u32)
            .map_err(|error| error.to_string())?;
        image.put(0, &placed.header);
        let small = bytes <= u64::from(SYNCING_WRITE_BYTES_MAX);
        let syncing = self.syncing_file.borrow().clone().filter(|_| sync_is_waited_for && small);
        let syncing = syncing.filter(|_| tail.write_syncs(placed.sequence));
        let file = syncing.or_else(|| self.file.borrow().clone()).ok_or("no segment is open")?;
        self.bytes_in_flight.set(self.bytes_in_flight.get() + bytes);
        Ok(PlacedExtent {
            end: placed.end,
            sequence: placed.sequence,
            segment: placed.segment,
            place: placed.place_in_file,
            file,
            image: RefCell::new(Some(image)),
            bytes,
        })
    }

    /// Keeps what the completion of a data extent means.
    pub(crate) fn will_write(&self, placed: &PlacedExtent, plan: FlushPlan, entries: Vec<RunEntry>, ack_driven: bool) {
        self.ack_driven.set(self.ack_driven.get() + usize::from(ack_driven));
        self.writing.borrow_mut().push_back(Written {
            end: placed.end,
            segment: placed.segment,
            extent_place: placed.place,
            bytes: placed.bytes,
            ack_driven,
            plan,
            entries,
        });
    }

    /// A write has ended well. Gives the new ends with all extents that are flushed by it.
    pub(crate) fn completed(&self, sequence: ExtentSequence) -> Option<Completed> {
        let mut tail = self.tail.borrow_mut();
        let before = tail.synced();
        let flushed = tail.extent_completed(sequence)?;
        let synced = Some(tail.synced()).filter(|&synced| synced > before);
        drop(tail);
        let mut writing = self.writing.borrow_mut();
        let mut done = Vec::new();
        while writing.front().is_some_and(|written| written.end <= flushed) {
            let Some(written) = writing.pop_front() else { break };
            self.bytes_in_flight.set(self.bytes_in_flight.get() - written.bytes);
            self.ack_driven.set(self.ack_driven.get() - usize::from(written.ack_driven));
            done.push(written);
        }
        self.progress.raise();
        Some(Completed { flushed, synced, done })
    }

    /// The runs of a flushed extent can be found from now on. Gives them, with their segment.
    pub(crate) fn index_extent<'w>(
        &self,
        written: &'w Written,
    ) -> (SegmentSequence, impl Iterator<Item = IndexEntry> + use<'w>) {
        self.index.borrow_mut().insert_extent(written.segment, written.extent_place, &written.entries);
        let place = written.extent_place;
        (written.segment, written.entries.iter().map(move |run| IndexEntry::of_run(place, run)))
    }

    /// One fdatasync of the open segment; gives what it covers, nothing when there was nothing to sync.
    pub(crate) async fn sync(&self) -> Result<Option<Position>, String> {
        let Some(position) = self.tail.borrow_mut().begin_sync() else { return Ok(None) };
        let file = self.file.borrow().clone().ok_or("no segment is open")?;
        file.fdatasync().await.map_err(|error| error.to_string())?;
        self.tail.borrow_mut().sync_completed(position);
        Ok(Some(position))
    }

    /// Asks the flusher for a checkpoint of what is true now.
    pub(crate) fn want_checkpoint(&self, shard: &Shard) {
        self.checkpoint_wanted.set(true);
        shard.flush_wanted.raise();
    }

    /// Whether somebody waits for one, and there may be room for it.
    pub(crate) fn is_checkpoint_wanted(&self) -> bool {
        self.checkpoint_wanted.get() && !self.unreserved.get()
    }

    /// The segment of the newest checkpoint that is synced: older ones are needed for their runs only.
    pub(crate) fn checkpointed(&self) -> Option<SegmentSequence> {
        self.checkpointed.get()
    }

    /// Whether the open segment still lacks room that it must have before data is written to it.
    pub(crate) fn is_unreserved(&self) -> bool {
        self.unreserved.get()
    }

    /// The segment that is being written.
    pub(crate) fn open_segment(&self) -> Option<(SegmentSequence, LogFile)> {
        let segment = self.tail.borrow().open_segment()?.segment;
        self.file.borrow().clone().map(|file| (segment, file))
    }

    /// Where the segments are.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Size of a whole segment.
    pub(crate) fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Path of a segment's file.
    pub(crate) fn path_of(&self, segment: SegmentSequence) -> PathBuf {
        self.dir.join(file_name(segment))
    }
}

/// What a checkpoint says of a store whose planned batches are all flushed.
pub(crate) fn checkpoint_of(store: &ShardStore, clean: bool, now_ms: i64) -> Checkpoint {
    let partitions = store.snapshot().into_iter().map(|(key, (ends, last_epoch))| CheckpointPartition {
        key,
        log_start: ends.log_start(),
        next_offset: ends.flushed_end(),
        last_epoch,
    });
    Checkpoint {
        epoch: store.epoch(),
        clean,
        created_ms: now_ms,
        partitions: partitions.collect(),
        sections: store.producers_section().into_iter().collect(),
    }
}

/// Writes bytes of any length (a multiple of 4096) in pieces of one write each.
pub(crate) async fn write_bytes(
    file: &LogFile,
    place: u64,
    bytes: &[u8],
    metrics: &ShardMetrics,
) -> Result<(), FileError> {
    let mut image = ExtentImage::new(bytes.len());
    image.put(0, bytes);
    for (at, buffer) in image.into_writes() {
        file.write_at(buffer, place + at).await?;
    }
    metrics.device_bytes_written_total.add(bytes.len() as u64);
    Ok(())
}
