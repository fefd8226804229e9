//! The shard log on its way to disk: places extents, writes, syncs, rolls segments, keeps the index.
//!
//! Owns the tail (core), the open segment's file and the index of all segments. Extents are placed by one task, the
//! flusher; writes overlap and complete in any order, the tail makes prefixes of them.

mod fill;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringmain_core::checkpoint::{Checkpoint, CheckpointPartition};
use ringmain_core::crc::crc32c;
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentKind, Layout, RunEntry};
use ringmain_core::flush::FlushPlan;
use ringmain_core::ids::{ExtentSequence, Incarnation, Position, SegmentSequence};
use ringmain_core::index::{ActiveIndex, IndexEntry, LogIndex, SealedIndex, SegmentIndex, encode_footer};
use ringmain_core::limits::DISK_BLOCK_BYTES;
use ringmain_core::log::{LogTail, SegmentEnd};
use ringmain_core::prefill::Prefill;
use ringmain_core::segment::{FIRST_EXTENT_AT, file_name};
use ringmain_core::store::ShardStore;

use crate::clock::{Clock, sleep};
use crate::extent_image::ExtentImage;
use crate::files::{FileError, LogFile, WriteBuffer, sync_dir};
use crate::flush::synced_up_to;
use crate::metrics::ShardMetrics;
use crate::recycle::{RecyclePool, make_whole};
use crate::runtime::spawn_local;
use crate::shard::Shard;
use crate::signal::Broadcast;

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
    /// The disk had no room for all of the open segment when this life began: no data goes into it before it has.
    unreserved: Cell<bool>,
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
            dir: start.dir,
            tail: RefCell::new(start.tail),
            index: RefCell::new(start.index),
            file: RefCell::new(start.file),
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

    /// Gives an extent its place; `image` is whole but for its header.
    pub(crate) fn place(
        &self,
        kind: ExtentKind,
        directory: &[u8],
        mut image: ExtentImage,
        run_count: usize,
    ) -> Result<PlacedExtent, String> {
        let bytes = image.bytes() as u64;
        // Sizes are bounded by the extent's limits, far below 4 GiB.
        let placed = self
            .tail
            .borrow_mut()
            .place(kind, directory.len() as u32, crc32c(directory), bytes as u32, run_count as u32)
            .map_err(|error| error.to_string())?;
        image.put(0, &placed.header);
        let file = self.file.borrow().clone().ok_or("no segment is open")?;
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

    /// A write has ended well. Gives the new flushed end with all extents that are flushed by it.
    pub(crate) fn completed(&self, sequence: ExtentSequence) -> Option<(Position, Vec<Written>)> {
        let flushed = self.tail.borrow_mut().extent_completed(sequence)?;
        let mut writing = self.writing.borrow_mut();
        let mut done = Vec::new();
        while writing.front().is_some_and(|written| written.end <= flushed) {
            let Some(written) = writing.pop_front() else { break };
            self.bytes_in_flight.set(self.bytes_in_flight.get() - written.bytes);
            self.ack_driven.set(self.ack_driven.get() - usize::from(written.ack_driven));
            done.push(written);
        }
        self.progress.raise();
        Some((flushed, done))
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

    /// Waits until nothing is being written or synced.
    async fn quiesce(&self, shard: &Shard) -> Result<(), String> {
        while !self.is_idle() {
            shard.check_log()?;
            self.progress.wait().await;
        }
        // What ended last may have failed.
        shard.check_log()
    }

    /// Syncs all that is placed. Nothing else writes meanwhile: only the flusher places extents, and it waits here.
    pub(crate) async fn sync_all(&self, shard: &Rc<Shard>) -> Result<(), String> {
        self.quiesce(shard).await?;
        if let Some(synced) = self.sync().await? {
            synced_up_to(shard, synced);
        }
        Ok(())
    }

    /// Seals the open segment and begins the next one with a checkpoint. Called by the flusher only.
    pub(crate) async fn roll(&self, shard: &Rc<Shard>) -> Result<(), String> {
        self.sync_all(shard).await?;
        self.seal_open().await.map_err(|error| error.to_string())?;
        loop {
            match self.open_next(shard.clock.now_ms(), self.segment_bytes).await {
                Ok(()) => break,
                Err(error) if error.is_full() && !shard.stopping.get() => {
                    if self.checkpoint_wanted.get() {
                        self.checkpoint_alone(shard).await?;
                    }
                    wait_for_space(shard, &error).await;
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        shard.disk_full.set(false);
        shard.metrics.disk_full.set(0);
        self.checkpoint_wanted.set(false);
        // Taken now: the segment before may have been followed by one with newer log starts in it.
        let checkpoint = self.checkpoint_of(shard, false);
        self.write_checkpoint(&checkpoint).await?;
        shard.retention.checkpointed();
        self.note_synced(&shard.clock);
        prepare_next(shard);
        Ok(())
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

    /// Writes and syncs a checkpoint between other extents. Called by the flusher only.
    pub(crate) async fn checkpoint(&self, shard: &Rc<Shard>) -> Result<(), String> {
        self.checkpoint_wanted.set(false);
        self.sync_all(shard).await?;
        let checkpoint = self.checkpoint_of(shard, false);
        if !self.has_room(checkpoint_extent_bytes(&checkpoint), 0) {
            return self.roll(shard).await;
        }
        self.write_checkpoint(&checkpoint).await?;
        shard.retention.checkpointed();
        self.note_synced(&shard.clock);
        Ok(())
    }

    /// On a full disk: a segment that holds a checkpoint and nothing else, so that retention can free the segments that
    /// the next one needs room of. The open segment is sealed, and so is this one.
    async fn checkpoint_alone(&self, shard: &Rc<Shard>) -> Result<(), String> {
        let checkpoint = self.checkpoint_of(shard, false);
        let bytes = FIRST_EXTENT_AT + u64::from(checkpoint_extent_bytes(&checkpoint)) + 16 * DISK_BLOCK_BYTES as u64;
        match self.open_next(shard.clock.now_ms(), bytes).await {
            Err(error) if error.is_full() => return Ok(()),
            opened => opened.map_err(|error| error.to_string())?,
        }
        self.checkpoint_wanted.set(false);
        self.write_checkpoint(&checkpoint).await?;
        shard.retention.checkpointed();
        self.seal_open().await.map_err(|error| error.to_string())
    }

    /// What a checkpoint says now. Everything that is placed is flushed.
    fn checkpoint_of(&self, shard: &Shard, clean: bool) -> Checkpoint {
        shard.retention.checkpoint_begins();
        checkpoint_of(&shard.store.borrow(), clean, shard.clock.now_ms())
    }

    /// Whether the open segment still lacks room that it must have before data is written to it.
    pub(crate) fn is_unreserved(&self) -> bool {
        self.unreserved.get()
    }

    /// Waits until the disk has room for all of the open segment, or the shard stops.
    pub(crate) async fn reserve_open(&self, shard: &Rc<Shard>) -> Result<(), String> {
        while self.unreserved.get() && !shard.stopping.get() {
            let file = self.file.borrow().clone().ok_or("no segment is open")?;
            match make_whole(&file, self.segment_bytes).await {
                Ok(()) => {
                    self.unreserved.set(false);
                    shard.disk_full.set(false);
                    shard.metrics.disk_full.set(0);
                    tracing::info!(shard = shard.id.0, "the disk has room again, produces are taken");
                }
                Err(error) if error.is_full() => wait_for_space(shard, &error).await,
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Ends the log of a clean stop: a checkpoint that says so, and a footer.
    pub(crate) async fn finish(&self, shard: &Rc<Shard>) -> Result<(), String> {
        self.sync_all(shard).await?;
        let checkpoint = self.checkpoint_of(shard, true);
        if !self.has_room(checkpoint_extent_bytes(&checkpoint), 0) {
            self.roll(shard).await?;
        }
        self.write_checkpoint(&checkpoint).await?;
        self.seal_open().await.map_err(|error| error.to_string())?;
        let file = self.file.borrow_mut().take();
        if let Some(file) = file {
            file.close().await.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// The first extent of a life: its checkpoint, synced, in the open segment or a new one.
    pub(crate) async fn begin_life(&self, checkpoint: &Checkpoint, now_ms: i64) -> Result<(), String> {
        let bytes = checkpoint_extent_bytes(checkpoint);
        if !self.has_room(bytes, 0) {
            // A segment is sealed only when all of it is synced.
            self.sync().await?;
            self.seal_open().await.map_err(|error| error.to_string())?;
            self.unreserved.set(false);
            let opened = match self.open_next(now_ms, self.segment_bytes).await {
                // A full disk must not keep the broker from starting: fetches go on, and topics can be deleted.
                Err(error) if error.is_full() => {
                    tracing::error!(
                        "the disk is full, this life begins with a segment that has room for little: {error}"
                    );
                    self.unreserved.set(true);
                    // For this checkpoint, the one of a clean stop, and a footer.
                    self.open_next(now_ms, FIRST_EXTENT_AT + 2 * u64::from(bytes) + 16 * DISK_BLOCK_BYTES as u64).await
                }
                opened => opened,
            };
            opened.map_err(|error| error.to_string())?;
        }
        self.write_checkpoint(checkpoint).await
    }

    /// Writes and syncs a checkpoint; nothing else is in flight.
    async fn write_checkpoint(&self, checkpoint: &Checkpoint) -> Result<(), String> {
        let directory = checkpoint.encode();
        let layout = Layout::of_checkpoint(directory.len());
        let mut image = ExtentImage::new(layout.extent_bytes as usize);
        image.put(EXTENT_HEADER_BYTES, &directory);
        image.zero(EXTENT_HEADER_BYTES + directory.len(), layout.extent_bytes as usize);
        let placed = self.place(ExtentKind::Checkpoint, &directory, image, 0)?;
        placed.write_to(&self.metrics).await?;
        self.bytes_in_flight.set(self.bytes_in_flight.get() - placed.bytes);
        self.tail.borrow_mut().extent_completed(placed.sequence);
        self.sync().await?;
        self.metrics.syncs_total.add(1);
        self.checkpointed.set(Some(placed.segment));
        Ok(())
    }

    /// Writes the footer of the open segment, if one is open, and cuts the file behind it.
    async fn seal_open(&self) -> Result<(), FileError> {
        let Some(end) = self.tail.borrow().segment_end() else { return Ok(()) };
        if self.sealed.get() == Some(end.segment) {
            // By a roll that found no room for the next one.
            return Ok(());
        }
        let Some(file) = self.file.borrow().clone() else { return Ok(()) };
        let entries = self.index.borrow_mut().active_mut(end.segment).map_or_else(Vec::new, |active| active.sorted());
        let footer = encode_footer(&entries, &end);
        let footer_end = u64::from(end.end_place) + footer.len() as u64;
        write_bytes(&file, u64::from(end.end_place), &footer, &self.metrics).await?;
        file.truncate(footer_end).await?;
        file.fdatasync().await?;
        self.seal_in_index(&entries, &end);
        self.sealed.set(Some(end.segment));
        Ok(())
    }

    fn seal_in_index(&self, entries: &[IndexEntry], end: &SegmentEnd) {
        let sealed = SealedIndex::of_entries(entries, end);
        self.index.borrow_mut().put(end.segment, SegmentIndex::Sealed(sealed));
    }

    /// Makes the next segment's file, recycled or new, with its header, and goes over to it.
    async fn open_next(&self, now_ms: i64, bytes: u64) -> Result<(), FileError> {
        let header = self.tail.borrow().next_segment_header(now_ms);
        let path = self.dir.join(file_name(header.segment));
        let (file, written_bytes) = self.recycle.take(&path, bytes).await?;
        let mut block = WriteBuffer::new(DISK_BLOCK_BYTES);
        block.as_mut_slice().fill(0);
        let encoded = header.encode();
        block.as_mut_slice()[..encoded.len()].copy_from_slice(&encoded);
        file.write_at(block, 0).await?;
        self.metrics.device_bytes_written_total.add(DISK_BLOCK_BYTES as u64);
        file.fdatasync().await?;
        sync_dir(&self.dir).await?;
        self.prefill.replace(Prefill::new(written_bytes));
        let segment = self.tail.borrow_mut().roll();
        self.index.borrow_mut().put(segment, SegmentIndex::Full(ActiveIndex::default()));
        let before = self.file.borrow_mut().replace(file);
        if let Some(before) = before {
            before.close().await?;
        }
        self.metrics.segments_begun_total.add(1);
        self.metrics.segments.set(self.index.borrow().segments().count() as u64);
        Ok(())
    }

    /// The segment that is being written.
    pub(crate) fn open_segment(&self) -> Option<(SegmentSequence, LogFile)> {
        let segment = self.tail.borrow().open_segment()?.segment;
        self.file.borrow().clone().map(|file| (segment, file))
    }

    /// Path of a segment's file.
    pub(crate) fn path_of(&self, segment: SegmentSequence) -> PathBuf {
        self.dir.join(file_name(segment))
    }
}

fn checkpoint_extent_bytes(checkpoint: &Checkpoint) -> u32 {
    Layout::of_checkpoint(checkpoint.encode().len()).extent_bytes
}

/// Makes the file of the segment after this one while this one fills.
fn prepare_next(shard: &Rc<Shard>) {
    let shard = Rc::clone(shard);
    spawn_local(async move {
        if let Err(error) = shard.log.recycle.prepare(shard.log.segment_bytes).await {
            tracing::warn!(shard = shard.id.0, "can't make a segment ahead of need: {error}");
        }
    });
}

/// There is no room for another segment. Nothing was written, so this is no failure: produces are refused and the
/// flusher tries again until there is room.
async fn wait_for_space(shard: &Rc<Shard>, error: &FileError) {
    if !shard.disk_full.replace(true) {
        tracing::error!(
            shard = shard.id.0,
            "the disk is full, produces are refused until there is room for a segment (delete topics or files): {error}"
        );
    }
    shard.metrics.disk_full.set(1);
    shard.memory_freed.raise();
    sleep(Duration::from_millis(500)).await;
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
