//! Where one segment ends and the next begins: seals, checkpoints, new files, and what a full disk does to them.

use std::rc::Rc;
use std::time::Duration;

use ringmain_core::checkpoint::Checkpoint;
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentKind, Layout};
use ringmain_core::index::{ActiveIndex, IndexEntry, SealedIndex, SegmentIndex, encode_footer};
use ringmain_core::limits::DISK_BLOCK_BYTES;
use ringmain_core::log::SegmentEnd;
use ringmain_core::prefill::Prefill;
use ringmain_core::segment::{FIRST_EXTENT_AT, file_name};

use super::{LogWriter, checkpoint_of, write_bytes};
use crate::clock::sleep;
use crate::extent_image::ExtentImage;
use crate::files::{FileError, WriteBuffer, sync_dir};
use crate::flush::synced_up_to;
use crate::recycle::make_whole;
use crate::runtime::spawn_local;
use crate::shard::Shard;

/// How long after a failed try the next segment's file is tried again.
const FILE_RETRY: Duration = Duration::from_millis(500);

impl LogWriter {
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
        let mut told = false;
        loop {
            match self.open_next(shard.clock.now_ms(), self.segment_bytes).await {
                Ok(()) => break,
                // Nothing of the log was written, so nothing of it has failed.
                Err(error) if shard.stopping.get() && (error.is_full() || error.is_passing()) => {
                    return Err(self.stop_without_room(&error));
                }
                Err(error) if error.is_full() => {
                    if self.checkpoint_wanted.get() {
                        self.checkpoint_alone(shard).await?;
                    }
                    wait_for_space(shard, &error).await;
                }
                Err(error) if error.is_passing() => {
                    if !told {
                        tracing::error!(
                            shard = shard.id.0,
                            "can't get a file for the next segment, tries again: {error}"
                        );
                    }
                    told = true;
                    sleep(FILE_RETRY).await;
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        self.unreserved.set(false);
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
            Err(error) if error.is_full() || error.is_passing() => return Ok(()),
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
                // Retention can free segments once its log starts last. The small segment is left behind for that.
                Err(error) if error.is_full() && self.checkpoint_wanted.get() => return self.roll(shard).await,
                Err(error) if error.is_full() || error.is_passing() => wait_for_space(shard, &error).await,
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// The shard stops while there is no file for what is still to be written. Gives the reason.
    pub(crate) fn stop_without_room(&self, reason: &dyn std::fmt::Display) -> String {
        self.stopped_without_room.set(true);
        reason.to_string()
    }

    /// Whether the shard stops with batches that were not written for lack of room: no failure of the log.
    pub(crate) fn has_stopped_without_room(&self) -> bool {
        self.stopped_without_room.get()
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
        let files = [self.file.borrow_mut().take(), self.syncing_file.borrow_mut().take()];
        for file in files.into_iter().flatten() {
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
        let placed = self.place(ExtentKind::Checkpoint, &directory, image, 0, false)?;
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
        let before = [self.file.borrow_mut().replace(file), self.syncing_file.borrow_mut().take()];
        for before in before.into_iter().flatten() {
            before.close().await?;
        }
        self.metrics.segments_begun_total.add(1);
        self.metrics.segments.set(self.index.borrow().segments().count() as u64);
        Ok(())
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
    sleep(FILE_RETRY).await;
}
