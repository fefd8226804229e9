//! The flusher: plans an extent, packs its runs, gives it its place and submits its writes.

use std::collections::BTreeSet;

use ringmain_core::acks::Taken;
use ringmain_core::batch::any_compressed;
use ringmain_core::block::BlockMemory;
use ringmain_core::crc::crc32c;
use ringmain_core::dedup::RunProducers;
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentKind, Layout, RunEntry, encode_directory};
use ringmain_core::flush::{FlushPlan, FlushScope, PlannedRun};
use ringmain_core::ids::PartitionKey;

use super::{Planned, Shard, WRITE_BYTES, Writing};
use crate::disk::Halt;
use crate::layout::PlacedAt;
use crate::world::World;

impl Shard {
    /// Writes one extent. False when there is nothing to flush.
    pub fn flush(&mut self, world: &mut World, waiters_only: bool) -> Result<bool, Halt> {
        if self.unreserved {
            self.reserve_open(world)?;
        }
        let Some(planned) = self.stuck.take().or_else(|| self.plan(world, waiters_only)) else { return Ok(false) };
        let (layout, image, entries) = self.image_of(world, &planned.plan);
        let full = self.disk_full || !self.tail.has_room(layout.extent_bytes, entries.len() as u32);
        if full && let Err(halt) = self.roll(world) {
            if halt == Halt::Full {
                self.is_full(world);
                self.stuck = Some(planned);
            } else {
                self.acks.give_up(planned.taken);
            }
            return Err(halt);
        }
        self.wait_for_fill(world, layout.extent_bytes)?;
        self.store.flush_copied(&*self.arena, &planned.plan);
        self.place(world, planned, &layout, image, entries)?;
        Ok(true)
    }

    fn plan(&mut self, world: &World, waiters_only: bool) -> Option<Planned> {
        let waiting: BTreeSet<PartitionKey> = self.acks.pending_keys().collect();
        let scope = if waiters_only { FlushScope::Only(&waiting) } else { FlushScope::All };
        let now_ms = world.wall.passed_ms;
        let mut plan = self.store.plan_flush(scope, &mut self.after, world.plan_bytes_max, 64, now_ms)?;
        self.read_producers(&mut plan);
        let taken: Taken = self.acks.take(&plan.marks());
        Some(Planned { plan, taken })
    }

    /// The extent but for its header, with its runs packed where that is smaller in blocks.
    fn image_of(&self, world: &mut World, plan: &FlushPlan) -> (Layout, Vec<u8>, Vec<RunEntry>) {
        let raw: Vec<Vec<u8>> = plan.runs.iter().map(|run| self.bytes_of(run)).collect();
        let mut stored: Vec<(Vec<u8>, u8)> = raw.iter().map(|bytes| (bytes.clone(), 0)).collect();
        self.pack(world, plan, &mut stored);
        let sizes = |runs: &[(Vec<u8>, u8)]| -> Vec<u32> { runs.iter().map(|(bytes, _)| bytes.len() as u32).collect() };
        let mut layout = Layout::of_runs(&sizes(&stored), plan.producers.len());
        let as_it_is: Vec<(Vec<u8>, u8)> = raw.into_iter().map(|bytes| (bytes, 0)).collect();
        let layout_as_it_is = Layout::of_runs(&sizes(&as_it_is), plan.producers.len());
        let raw_sizes = sizes(&as_it_is);
        if layout.extent_bytes == layout_as_it_is.extent_bytes && !world.rng.once_in(2) {
            (layout, stored) = (layout_as_it_is, as_it_is);
        }
        let mut image = vec![0; layout.extent_bytes as usize];
        let mut entries = Vec::new();
        for (at, (run, &place)) in plan.runs.iter().zip(&layout.run_places).enumerate() {
            let (bytes, codec) = &stored[at];
            let from = place as usize;
            image[from..from + bytes.len()].copy_from_slice(bytes);
            if *codec != 0 {
                world.meet("run compressed");
            }
            entries.push(RunEntry {
                key: run.key,
                base_offset: run.base_offset,
                next_offset: run.next_offset,
                epoch: run.epoch,
                place,
                stored_bytes: bytes.len() as u32,
                raw_bytes: raw_sizes[at],
                crc: crc32c(bytes),
                batches: run.batches,
                codec: *codec,
                max_append_time_ms: world.wall.now_ms(),
            });
        }
        let directory = encode_directory(&entries, &plan.producers);
        image[EXTENT_HEADER_BYTES..EXTENT_HEADER_BYTES + directory.len()].copy_from_slice(&directory);
        (layout, image, entries)
    }

    /// What the directory says about idempotent producers.
    fn read_producers(&self, plan: &mut FlushPlan) {
        let mut gathered = RunProducers::default();
        for (number, run) in (0..).zip(&plan.runs) {
            for span in run.spans.iter().filter(|span| span.idempotent > 0) {
                gathered.batches(number, self.arena.read(span.block, span.at as usize, span.bytes as usize));
            }
            gathered.end_run();
        }
        plan.producers = gathered.into_entries();
    }

    fn bytes_of(&self, run: &PlannedRun) -> Vec<u8> {
        let span = |span: &ringmain_core::store::Span| {
            self.arena.read(span.block, span.at as usize, span.bytes as usize).to_vec()
        };
        run.spans.iter().flat_map(span).collect()
    }

    /// Replaces what gets smaller. The helper may be told to end before it has done all.
    fn pack(&self, world: &mut World, plan: &FlushPlan, stored: &mut [(Vec<u8>, u8)]) {
        let Some(level) = self.level else { return };
        world.packing.clear();
        for (index, run) in plan.runs.iter().enumerate() {
            world.packing.begin_run(index, run.key, level, false);
            for span in &run.spans {
                let batches = self.arena.read(span.block, span.at as usize, span.bytes as usize);
                let offsets = span.base_offset..span.next_offset;
                world.packing.put(batches, offsets, span.batches, any_compressed(batches));
            }
        }
        let ends_early = world.rng.once_in(8);
        while world.packing.step(&mut world.compressor) && !(ends_early && world.rng.once_in(3)) {}
        for packed in world.packing.results() {
            stored[packed.index] = (packed.stored.to_vec(), packed.codec as u8);
        }
    }

    fn place(
        &mut self,
        world: &mut World,
        planned: Planned,
        layout: &Layout,
        mut image: Vec<u8>,
        entries: Vec<RunEntry>,
    ) -> Result<(), Halt> {
        let Planned { plan, taken } = planned;
        let directory_end = EXTENT_HEADER_BYTES + layout.directory_bytes as usize;
        let synced = self.tail.synced();
        let placed = self
            .tail
            .place(
                ExtentKind::Data,
                layout.directory_bytes,
                crc32c(&image[EXTENT_HEADER_BYTES..directory_end]),
                layout.extent_bytes,
                entries.len() as u32,
            )
            .expect("there is room");
        image[..EXTENT_HEADER_BYTES].copy_from_slice(&placed.header);
        let is_waited_for = taken.wants_sync();
        self.acks.placed(placed.end, plan.marks(), taken);
        let (segment, place) = (placed.segment, placed.place_in_file);
        world.note(format!("extent {} at {segment}:{place} {} bytes", placed.sequence, image.len()));
        world.layout.placed(&PlacedAt {
            file: world.disk.file_id(segment).expect("the open segment has a file"),
            place,
            end: placed.end,
            synced,
            directory_end,
            bytes: image.len(),
            epoch: self.tail.epoch(),
            header: &placed.header,
            entries: &entries,
        });
        self.fill_ahead(world, segment, place..place + image.len() as u64, is_waited_for)?;
        let mut pieces = Vec::new();
        for (at, piece) in image.chunks(WRITE_BYTES).enumerate() {
            pieces.push(world.disk.submit(segment, place + (at * WRITE_BYTES) as u64, piece)?);
        }
        let (sequence, end) = (placed.sequence, placed.end);
        let syncs = is_waited_for && world.rng.once_in(2) && self.tail.write_syncs(sequence);
        self.writing.push_back(Writing { sequence, end, segment, place, pieces, syncs, plan, entries });
        Ok(())
    }
}
