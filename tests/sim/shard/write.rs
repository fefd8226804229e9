//! Writes and syncs under way: what completes, what fails, and what that means for ends and acks.

use std::ops::Range;

use ringmain_core::ids::{Position, SegmentSequence};

use super::{Shard, WRITE_BYTES, Writing};
use crate::disk::{Halt, SimDisk};
use crate::world::World;

/// Writes bytes and waits for it.
pub(super) fn write_now(disk: &mut SimDisk, segment: SegmentSequence, place: u64, bytes: &[u8]) -> Result<(), Halt> {
    for (at, piece) in bytes.chunks(WRITE_BYTES).enumerate() {
        let id = disk.submit(segment, place + (at * WRITE_BYTES) as u64, piece)?;
        disk.complete(segment, id)?;
    }
    Ok(())
}

pub(super) fn sync_now(disk: &mut SimDisk, segment: SegmentSequence) -> Result<(), Halt> {
    let ticket = disk.begin_sync(segment)?;
    disk.end_sync(ticket)
}

/// The bytes, with zeros up to the end of their block.
pub(super) fn in_block(bytes: &[u8]) -> Vec<u8> {
    let mut block = bytes.to_vec();
    block.resize(bytes.len().next_multiple_of(4096), 0);
    block
}

impl Shard {
    /// Some write completes.
    pub fn complete_one(&mut self, world: &mut World) -> Result<(), Halt> {
        if !self.filling.is_empty() && (self.writing.is_empty() || world.rng.once_in(3)) {
            return self.fill_one(world);
        }
        if self.writing.is_empty() {
            return Ok(());
        }
        let at = world.rng.index(self.writing.len());
        let piece = world.rng.index(self.writing[at].pieces.len());
        let id = self.writing[at].pieces.swap_remove(piece);
        let is_last = self.writing[at].pieces.is_empty();
        let Writing { segment, syncs, .. } = self.writing[at];
        let written = if syncs { world.disk.complete_syncing(segment, id) } else { world.disk.complete(segment, id) };
        if !is_last {
            return written;
        }
        let done = self.writing.remove(at).expect("it is there");
        written?;
        let sequence = done.sequence;
        let behind = self.written.partition_point(|other| other.end < done.end);
        self.written.insert(behind, done);
        let synced_before = self.tail.synced();
        if let Some(flushed) = self.tail.extent_completed(sequence) {
            self.flushed_up_to(world, flushed);
        }
        if self.tail.synced() > synced_before {
            world.meet("extent synced by its write");
            self.synced_up_to(world, self.tail.synced());
        }
        Ok(())
    }

    fn flushed_up_to(&mut self, world: &mut World, flushed: Position) {
        while self.written.front().is_some_and(|done| done.end <= flushed) {
            let done = self.written.pop_front().expect("it is there");
            self.store.flush_completed(&*self.arena, &done.plan);
            self.index.insert_extent(done.segment, done.place, &done.entries);
        }
        self.arena.flushed.set(flushed);
        let released = self.acks.flushed(flushed);
        for mark in &released.ends {
            world.ledger.flushed(mark.key, mark.next_offset);
        }
        self.acked(world, &released.acked);
    }

    pub fn begin_sync(&mut self, world: &mut World) -> Result<(), Halt> {
        if let Some(covers) = self.tail.begin_sync() {
            let segment = self.tail.open_segment().expect("something was flushed").segment;
            self.syncing = Some((covers, world.disk.begin_sync(segment)?));
        }
        Ok(())
    }

    pub fn end_sync(&mut self, world: &mut World) -> Result<(), Halt> {
        if let Some((covers, ticket)) = self.syncing.take() {
            world.disk.end_sync(ticket)?;
            self.tail.sync_completed(covers);
            self.synced_up_to(world, covers);
        }
        Ok(())
    }

    fn synced_up_to(&mut self, world: &mut World, covers: Position) {
        world.note(format!("synced up to {covers}"));
        let released = self.acks.synced(covers);
        for mark in &released.ends {
            self.store.synced(mark);
            world.ledger.synced(mark.key, mark.next_offset);
        }
        self.acked(world, &released.acked);
    }

    pub(super) fn sync(&mut self, world: &mut World) -> Result<(), Halt> {
        self.end_sync(world)?;
        self.begin_sync(world)?;
        self.end_sync(world)
    }

    /// Ends all writes, and syncs.
    pub(super) fn quiesce(&mut self, world: &mut World) -> Result<(), Halt> {
        while !self.writing.is_empty() || !self.filling.is_empty() {
            self.complete_one(world)?;
        }
        self.sync(world)
    }

    /// Zeros ahead, if core wants them for the extent that was just placed.
    pub(super) fn fill_ahead(
        &mut self,
        world: &mut World,
        segment: SegmentSequence,
        extent: Range<u64>,
        synced: bool,
    ) -> Result<(), Halt> {
        let Some(range) = self.prefill.placed(extent, synced, world.segment_bytes) else { return Ok(()) };
        world.note(format!("zeros ahead at {segment}:{range:?}"));
        world.meet("zeros ahead");
        const PIECE: usize = 64 * 1024;
        for place in range.clone().step_by(PIECE) {
            let bytes = (range.end - place).min(PIECE as u64) as usize;
            self.filling.push((segment, world.disk.submit(segment, place, &vec![0; bytes])?));
        }
        Ok(())
    }

    fn fill_one(&mut self, world: &mut World) -> Result<(), Halt> {
        let (segment, id) = self.filling.swap_remove(world.rng.index(self.filling.len()));
        world.disk.complete(segment, id)?;
        if self.filling.is_empty() && !self.failed() {
            self.prefill.filled();
        }
        Ok(())
    }

    /// Ends the fill if the next extent would lie over it.
    pub(super) fn wait_for_fill(&mut self, world: &mut World, extent_bytes: u32) -> Result<(), Halt> {
        let place = self.tail.open_segment().map_or(0, |open| open.place);
        while self.prefill.must_wait(place + u64::from(extent_bytes)) {
            self.fill_one(world)?;
        }
        Ok(())
    }
}
