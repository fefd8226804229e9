//! From one segment to the next, checkpoints, the clean stop, and what becomes of them on a full disk.

use ringmain_core::checkpoint::{Checkpoint, CheckpointPartition};
use ringmain_core::crc::crc32c;
use ringmain_core::extent::{ExtentKind, Layout};
use ringmain_core::ids::{Epoch, PartitionKey, SegmentSequence};
use ringmain_core::index::{ActiveIndex, SealedIndex, SegmentIndex, encode_footer};
use ringmain_core::offsets::Ends;
use ringmain_core::prefill::Prefill;
use ringmain_core::segment::FIRST_EXTENT_AT;

use super::Shard;
use super::write::{in_block, sync_now, write_now};
use crate::disk::{Halt, RESERVE_BYTES};
use crate::layout::PlacedAt;
use crate::world::World;

/// Blocks of a small segment behind its checkpoints: its footer.
const SMALL_SEGMENT_BLOCKS: u64 = 16;

fn checkpoint_bytes(checkpoint: &Checkpoint) -> u32 {
    Layout::of_checkpoint(checkpoint.encode().len()).extent_bytes
}

impl Shard {
    /// Seals the open segment and begins the next one.
    pub(super) fn roll(&mut self, world: &mut World) -> Result<(), Halt> {
        world.note("roll".into());
        self.quiesce(world)?;
        self.seal(world)?;
        self.open_next(world, world.segment_bytes, RESERVE_BYTES)?;
        if self.disk_full {
            world.meet("disk full ends");
            world.note("the disk has room again".into());
        }
        self.disk_full = false;
        let checkpoint = self.checkpoint(false);
        self.write_checkpoint(world, &checkpoint)
    }

    pub(super) fn is_full(&mut self, world: &mut World) {
        if !self.disk_full {
            world.note("the disk is full".into());
            world.meet("disk full");
        }
        self.disk_full = true;
    }

    /// Room for all of the open segment, before data goes into it.
    pub(super) fn reserve_open(&mut self, world: &mut World) -> Result<(), Halt> {
        let open = self.tail.open_segment().expect("a life has begun").segment;
        world.disk.set_len(open, world.segment_bytes as usize)?;
        world.meet("disk full ends");
        (self.unreserved, self.disk_full) = (false, false);
        Ok(())
    }

    /// A checkpoint between other extents, or at the start of the next segment; on a full disk in a small segment of its own,
    /// so that retention can make room.
    pub fn checkpoint_now(&mut self, world: &mut World) -> Result<(), Halt> {
        if self.unreserved {
            return Ok(());
        }
        self.quiesce(world)?;
        let checkpoint = self.checkpoint(false);
        if self.disk_full {
            match self.open_next(world, small_segment_bytes(&checkpoint, 1), 0) {
                Err(Halt::Full) => return Ok(()),
                opened => opened?,
            }
            world.meet("checkpoint alone");
            self.write_checkpoint(world, &checkpoint)?;
            return self.seal(world);
        }
        if self.has_room_for(&checkpoint) {
            return self.write_checkpoint(world, &checkpoint);
        }
        match self.roll(world) {
            Err(Halt::Full) => {
                self.is_full(world);
                Ok(())
            }
            rolled => rolled,
        }
    }

    /// Flushes and syncs everything, and says so.
    pub fn stop(&mut self, world: &mut World) -> Result<(), Halt> {
        world.note("stop".into());
        while self.flush(world, false)? {
            self.quiesce(world)?;
        }
        self.quiesce(world)?;
        let checkpoint = self.checkpoint(true);
        if self.disk_full || !self.has_room_for(&checkpoint) {
            self.roll(world)?;
        }
        self.write_checkpoint(world, &checkpoint)?;
        self.seal(world)?;
        world.arena = None;
        world.wall.process_begins();
        Ok(())
    }

    /// The first extent of a life. A full disk gives it a segment that has room for little else.
    pub(super) fn begin_life(&mut self, world: &mut World) -> Result<(), Halt> {
        let checkpoint = self.checkpoint(false);
        if !self.has_room_for(&checkpoint) {
            self.sync(world)?;
            self.seal(world)?;
            self.unreserved = false;
            match self.open_next(world, world.segment_bytes, RESERVE_BYTES) {
                Err(Halt::Full) => {
                    self.unreserved = true;
                    self.open_next(world, small_segment_bytes(&checkpoint, 2), 0)?;
                }
                opened => opened?,
            }
        }
        if self.unreserved {
            world.meet("start on a full disk");
            self.is_full(world);
        }
        self.write_checkpoint(world, &checkpoint)
    }

    fn checkpoint(&self, clean: bool) -> Checkpoint {
        let partition = |(key, (ends, last_epoch)): (PartitionKey, (Ends, Epoch))| CheckpointPartition {
            key,
            log_start: ends.log_start(),
            next_offset: ends.flushed_end(),
            last_epoch,
        };
        let partitions = self.store.snapshot().into_iter().map(partition).collect();
        let sections = self.store.producers_section().into_iter().collect();
        Checkpoint { epoch: self.store.epoch(), clean, created_ms: 0, partitions, sections }
    }

    fn has_room_for(&self, checkpoint: &Checkpoint) -> bool {
        self.tail.has_room(checkpoint_bytes(checkpoint), 0)
    }

    fn write_checkpoint(&mut self, world: &mut World, checkpoint: &Checkpoint) -> Result<(), Halt> {
        self.wait_for_fill(world, checkpoint_bytes(checkpoint))?;
        let directory = checkpoint.encode();
        let layout = Layout::of_checkpoint(directory.len());
        let synced = self.tail.synced();
        let placed = self
            .tail
            .place(ExtentKind::Checkpoint, layout.directory_bytes, crc32c(&directory), layout.extent_bytes, 0)
            .expect("there is room");
        let (segment, place) = (placed.segment, placed.place_in_file);
        world.note(format!("checkpoint {} at {segment}:{place}", placed.sequence));
        let mut image = placed.header.to_vec();
        image.extend_from_slice(&directory);
        world.layout.placed(&PlacedAt {
            file: world.disk.file_id(segment).expect("the open segment has a file"),
            place,
            end: placed.end,
            synced,
            directory_end: image.len(),
            bytes: layout.extent_bytes as usize,
            epoch: self.tail.epoch(),
            header: &placed.header,
            entries: &[],
        });
        write_now(&mut world.disk, segment, place, &in_block(&image))?;
        self.tail.extent_completed(placed.sequence);
        self.sync(world)?;
        self.checkpointed = segment;
        self.durable_starts = checkpoint.partitions.iter().map(|listed| (listed.key, listed.log_start)).collect();
        self.durable_starts.iter().for_each(|(&key, &start)| world.ledger.start_synced(key, start));
        Ok(())
    }

    fn seal(&mut self, world: &mut World) -> Result<(), Halt> {
        let Some(end) = self.tail.segment_end() else { return Ok(()) };
        if self.sealed == Some(end.segment) {
            // By a roll that found no room for the next one.
            return Ok(());
        }
        let entries = self.index.active_mut(end.segment).expect("the open segment's index is in memory").sorted();
        let footer = encode_footer(&entries, &end);
        write_now(&mut world.disk, end.segment, u64::from(end.end_place), &footer)?;
        world.disk.set_len(end.segment, end.end_place as usize + footer.len())?;
        sync_now(&mut world.disk, end.segment)?;
        self.index.put(end.segment, SegmentIndex::Sealed(SealedIndex::of_entries(&entries, &end)));
        self.sealed = Some(end.segment);
        Ok(())
    }

    fn open_next(&mut self, world: &mut World, bytes: u64, reserve: usize) -> Result<(), Halt> {
        let header = self.tail.next_segment_header(0);
        let bytes = bytes as usize;
        // A recycled file: whatever an older segment has in it.
        let older = header.segment.0.checked_sub(1 + world.rng.below(3)).map(SegmentSequence);
        let recycled = older.and_then(|older| world.disk.content(older));
        let written_bytes = recycled.as_ref().map_or(0, |content| content.len().min(bytes));
        world.disk.create(header.segment, recycled, bytes, reserve)?;
        write_now(&mut world.disk, header.segment, 0, &in_block(&header.encode()))?;
        sync_now(&mut world.disk, header.segment)?;
        world.disk.sync_dir()?;
        self.prefill = Prefill::new(written_bytes as u64);
        let segment = self.tail.roll();
        self.index.put(segment, SegmentIndex::Full(ActiveIndex::default()));
        Ok(())
    }
}

fn small_segment_bytes(checkpoint: &Checkpoint, checkpoints: u64) -> u64 {
    FIRST_EXTENT_AT + checkpoints * u64::from(checkpoint_bytes(checkpoint)) + SMALL_SEGMENT_BLOCKS * 4096
}
