//! A shard without threads or sockets: the flusher's, log writer's and start's steps in the order in which the real ones
//! take them, over core's decisions. Each step on the disk may be the last one.

mod produce;
mod read;
mod retain;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use ringmain_core::acks::{Acks, WaitToken};
use ringmain_core::adopt::adopt;
use ringmain_core::block::BlockMemory;
use ringmain_core::checkpoint::{Checkpoint, CheckpointPartition};
use ringmain_core::crc::crc32c;
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentKind, Layout, RunEntry, encode_directory};
use ringmain_core::flush::{FlushPlan, FlushScope};
use ringmain_core::ids::{
    Durability, Epoch, ExtentSequence, Incarnation, LogId, Offset, PartitionKey, Position, SegmentSequence,
};
use ringmain_core::index::{ActiveIndex, LogIndex, SealedIndex, SegmentIndex, encode_footer};
use ringmain_core::log::{LogTail, NextPlace};
use ringmain_core::recover::{Case, Recovered, RecoveredPartition, recover};
use ringmain_core::store::{PartitionStart, ShardStore};

use crate::arena::{SLABS, SimArena};
use crate::disk::{Crashed, SimDisk, SyncTicket, WriteId};
use crate::ledger::Ledger;
use crate::rng::Rng;

pub const LOG_ID: LogId = LogId(0xc0ffee);
pub const SEGMENT_BYTES: u64 = 128 * 1024;
/// Size of one write to the disk: an extent is several.
const WRITE_BYTES: usize = 8 * 1024;
const PLAN_BYTES_MAX: usize = 24 * 1024;
/// What only damage may look like, and no crash.
const OF_DAMAGE: [Case; 7] = [
    Case::HeaderDamaged,
    Case::LostWrite,
    Case::ChainBroken,
    Case::DirectoryDamaged,
    Case::FooterLost,
    Case::SegmentHeaderLost,
    Case::FirstExtentDamaged,
];

/// What outlives a process.
pub struct World {
    pub rng: Rng,
    pub disk: SimDisk,
    pub arena: Option<Rc<SimArena>>,
    /// The broker's durable list of partitions, with the epoch in which each was made.
    pub created: BTreeMap<PartitionKey, Epoch>,
    pub ledger: Ledger,
    /// Everything that happened, one line each.
    pub trace: Vec<String>,
    /// What recoveries met.
    pub cases: BTreeSet<Case>,
    /// Sector damage was done: an arena may not fit, segments may be refused.
    pub damaged: bool,
    /// Segments removed and ranges punched by retention.
    pub freed: u64,
    pub punched: u64,
    shows: bool,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut created = BTreeMap::new();
        for (topic, partitions) in [(1, 7), (2, 4)] {
            created.extend((0..partitions).map(|partition| (PartitionKey::new(topic, partition), Epoch(0))));
        }
        Self {
            rng: Rng::new(seed),
            disk: SimDisk::default(),
            arena: None,
            created,
            ledger: Ledger::default(),
            trace: Vec::new(),
            cases: BTreeSet::new(),
            damaged: false,
            freed: 0,
            punched: 0,
            shows: std::env::var_os("RINGMAIN_SIM_SEED").is_some(),
        }
    }

    /// Adds to the trace; a replay (`RINGMAIN_SIM_SEED`) shows it as it goes.
    pub fn note(&mut self, line: String) {
        if self.shows {
            println!("{line}");
        }
        self.trace.push(line);
    }
}

struct Writing {
    sequence: ExtentSequence,
    end: Position,
    segment: SegmentSequence,
    place: u64,
    pieces: Vec<WriteId>,
    plan: FlushPlan,
    entries: Vec<RunEntry>,
}

/// One life.
pub struct Shard {
    pub store: ShardStore,
    acks: Acks,
    tail: LogTail,
    index: LogIndex,
    arena: Rc<SimArena>,
    /// Extents whose writes are not all done, in log order.
    writing: VecDeque<Writing>,
    /// Extents whose writes are done; flushed when all before them are.
    written: VecDeque<Writing>,
    syncing: Option<(Position, SyncTicket)>,
    waits: BTreeMap<WaitToken, (PartitionKey, Durability, Offset)>,
    next_token: u64,
    after: Option<PartitionKey>,
    now_ms: u64,
    /// Log starts in the newest synced checkpoint, and its segment.
    durable_starts: BTreeMap<PartitionKey, Offset>,
    checkpointed: SegmentSequence,
}

/// How a start went.
pub struct Started {
    pub shard: Shard,
    pub clean: bool,
}

/// Takes the arena over if it is this log's last memory.
fn take_over(world: &World, recovered: &Recovered) -> Option<(Rc<SimArena>, ShardStore)> {
    let arena = world.arena.as_ref()?;
    let last = recovered.last_incarnation;
    let fits = arena.incarnation.get() == last || arena.next_incarnation.get() == last;
    if !fits || recovered.ends_uncertain || recovered.clean {
        return None;
    }
    let mut store = filled_store(world, recovered, recovered.epoch);
    let adopted = adopt(&mut store, &**arena, arena.live());
    assert!(adopted.is_ok() || world.damaged, "a kept arena is always taken over: {adopted:?}");
    for block in adopted.ok()?.free {
        arena.free(block);
    }
    Some((Rc::clone(arena), store))
}

fn filled_store(world: &World, recovered: &Recovered, epoch: Epoch) -> ShardStore {
    let mut store = ShardStore::new(SLABS, epoch);
    for (&key, &created) in &world.created {
        let never_flushed = RecoveredPartition { last_epoch: created, ..RecoveredPartition::default() };
        add_partition(&mut store, key, recovered.partitions.get(&key).copied().unwrap_or(never_flushed));
    }
    store.set_producers(recovered.producers.clone());
    store
}

fn add_partition(store: &mut ShardStore, key: PartitionKey, state: RecoveredPartition) {
    let epoch = store.epoch();
    let added = store.add_partition(PartitionStart {
        key,
        store: (key.partition % 2) as u16,
        log_start: state.log_start,
        log_end: state.resumes_at(epoch),
        last_epoch: epoch,
        durability_floor: Durability::Memory,
    });
    assert!(added);
}

/// Recovers, checks what is left against the ledger, and begins a new life.
pub fn start(world: &mut World) -> Result<Started, Crashed> {
    let recovered = match recover(&mut world.disk, LOG_ID, SEGMENT_BYTES) {
        Ok(recovered) => recovered,
        Err(error) => panic!("the log can't be recovered: {error}"),
    };
    for seen in &recovered.cases {
        world.note(format!("  {seen:?}"));
        world.cases.insert(seen.case);
        assert!(world.damaged || !OF_DAMAGE.contains(&seen.case), "damage where none was done: {seen:?}");
    }
    assert!(world.damaged || recovered.lost.is_empty(), "damage where none was done: {:?}", recovered.lost);
    let fresh = recovered.last_incarnation == Incarnation(0);
    let clean = recovered.clean;
    let log_ends: BTreeMap<PartitionKey, RecoveredPartition> = recovered.partitions.clone();
    let (arena, store) = take_over(world, &recovered).unwrap_or_else(|| {
        let lost = recovered.ends_uncertain || !(clean || fresh && world.arena.is_none());
        let epoch = Epoch(recovered.epoch.0 + u32::from(lost));
        let arena = Rc::new(SimArena::new(recovered.next_incarnation));
        (arena, filled_store(world, &recovered, epoch))
    });
    world.arena = Some(Rc::clone(&arena));
    world.note(format!("start: epoch {} after incarnation {}", store.epoch(), recovered.last_incarnation));
    let mut shard = Shard {
        tail: LogTail::new(recovered.log_start(LOG_ID, SEGMENT_BYTES, store.epoch())),
        store,
        acks: Acks::default(),
        index: recovered.index,
        arena,
        writing: VecDeque::new(),
        written: VecDeque::new(),
        syncing: None,
        waits: BTreeMap::new(),
        next_token: 0,
        after: None,
        now_ms: 0,
        durable_starts: BTreeMap::new(),
        checkpointed: SegmentSequence(0),
    };
    for &segment in &recovered.remove {
        world.disk.remove(segment)?;
    }
    if !recovered.remove.is_empty() {
        world.disk.sync_dir()?;
    }
    if let Some(footer) = &recovered.rewrite_footer {
        write_now(&mut world.disk, footer.segment, footer.place, &footer.bytes)?;
        world.disk.set_len(footer.segment, footer.place as usize + footer.bytes.len())?;
    }
    if let NextPlace::Continue(open) = recovered.next {
        world.disk.set_len(open.segment, SEGMENT_BYTES as usize)?;
        if let Some(header) = &recovered.rewrite_header {
            write_now(&mut world.disk, open.segment, 0, &in_block(&header.encode()))?;
        }
    }
    if let Some(newest) = recovered.sync {
        sync_now(&mut world.disk, newest)?;
    }
    let keys: Vec<PartitionKey> = world.created.keys().copied().collect();
    for &key in &keys {
        let seen = shard.read_all(world, key);
        let (ends, _) = shard.store.ends(key).expect("it was just added");
        world.ledger.check_recovered(key, ends.log_start(), &seen);
        if seen.last().map_or(ends.log_start(), |last| last.next) < ends.log_end() {
            world.ledger.resumed(key, ends.log_end());
        }
    }
    world.ledger.check_windows(shard.store.producers());

    shard.arena.next_incarnation.set(shard.tail.incarnation());
    let checkpoint = shard.checkpoint(false);
    if !shard.has_room_for(&checkpoint) {
        shard.sync(world)?;
        shard.seal(world)?;
        shard.open_next(world)?;
    }
    shard.write_checkpoint(world, &checkpoint)?;
    shard.arena.incarnation.set(shard.tail.incarnation());
    for &key in &keys {
        let end = log_ends.get(&key).map_or(Offset(0), |partition| partition.end);
        world.ledger.started(key, end);
    }
    world.ledger.all_started();
    Ok(Started { shard, clean })
}

fn in_block(bytes: &[u8]) -> Vec<u8> {
    let mut block = bytes.to_vec();
    block.resize(bytes.len().next_multiple_of(4096), 0);
    block
}

fn write_now(disk: &mut SimDisk, segment: SegmentSequence, place: u64, bytes: &[u8]) -> Result<(), Crashed> {
    for (at, piece) in bytes.chunks(WRITE_BYTES).enumerate() {
        let id = disk.submit(segment, place + (at * WRITE_BYTES) as u64, piece)?;
        disk.complete(segment, id)?;
    }
    Ok(())
}

fn sync_now(disk: &mut SimDisk, segment: SegmentSequence) -> Result<(), Crashed> {
    let ticket = disk.begin_sync(segment)?;
    disk.end_sync(ticket)
}

impl Shard {
    /// A new topic, made while the shard runs.
    pub fn add_partition(&mut self, world: &mut World, key: PartitionKey) {
        let epoch = self.store.epoch();
        if world.created.insert(key, epoch).is_none() {
            add_partition(
                &mut self.store,
                key,
                RecoveredPartition { last_epoch: epoch, ..RecoveredPartition::default() },
            );
        }
    }

    pub fn in_flight(&self) -> usize {
        self.writing.len() + self.written.len()
    }

    pub fn failed(&self) -> bool {
        self.tail.failed()
    }

    pub fn is_syncing(&self) -> bool {
        self.syncing.is_some()
    }

    pub fn tick(&mut self) {
        self.now_ms += 400;
    }

    /// Plans an extent and submits its writes. False when there is nothing to flush.
    pub fn flush(&mut self, world: &mut World, waiters_only: bool) -> Result<bool, Crashed> {
        let waiting: BTreeSet<PartitionKey> = self.acks.pending_keys().collect();
        let scope = if waiters_only { FlushScope::Only(&waiting) } else { FlushScope::All };
        let plan = self.store.plan_flush(scope, &mut self.after, PLAN_BYTES_MAX, 64, self.now_ms);
        let Some(mut plan) = plan else { return Ok(false) };
        self.read_producers(&mut plan);
        let marks = plan.marks();
        let taken = self.acks.take(&marks);
        let sizes: Vec<u32> = plan.runs.iter().map(|run| run.bytes).collect();
        let layout = Layout::of_runs(&sizes, plan.producers.len());
        if !self.tail.has_room(layout.extent_bytes, sizes.len() as u32) {
            self.roll(world)?;
        }
        let mut image = vec![0; layout.extent_bytes as usize];
        let mut entries = Vec::new();
        for (run, &place) in plan.runs.iter().zip(&layout.run_places) {
            let from = place as usize;
            let mut at = from;
            for span in &run.spans {
                let bytes = self.arena.read(span.block, span.at as usize, span.bytes as usize);
                image[at..at + bytes.len()].copy_from_slice(bytes);
                at += bytes.len();
            }
            entries.push(RunEntry {
                key: run.key,
                base_offset: run.base_offset,
                next_offset: run.next_offset,
                epoch: run.epoch,
                place,
                stored_bytes: run.bytes,
                raw_bytes: run.bytes,
                crc: crc32c(&image[from..at]),
                batches: run.batches,
                codec: 0,
                max_append_time_ms: 0,
            });
        }
        self.store.flush_copied(&*self.arena, &plan);
        let directory = encode_directory(&entries, &plan.producers);
        let placed = self
            .tail
            .place(
                ExtentKind::Data,
                layout.directory_bytes,
                crc32c(&directory),
                layout.extent_bytes,
                sizes.len() as u32,
            )
            .expect("there is room");
        image[..EXTENT_HEADER_BYTES].copy_from_slice(&placed.header);
        image[EXTENT_HEADER_BYTES..EXTENT_HEADER_BYTES + directory.len()].copy_from_slice(&directory);
        self.acks.placed(placed.end, marks, taken);
        world.note(format!(
            "extent {} at {}:{} {} bytes",
            placed.sequence,
            placed.segment,
            placed.place_in_file,
            image.len()
        ));
        let mut pieces = Vec::new();
        for (at, piece) in image.chunks(WRITE_BYTES).enumerate() {
            pieces.push(world.disk.submit(placed.segment, placed.place_in_file + (at * WRITE_BYTES) as u64, piece)?);
        }
        self.writing.push_back(Writing {
            sequence: placed.sequence,
            end: placed.end,
            segment: placed.segment,
            place: placed.place_in_file,
            pieces,
            plan,
            entries,
        });
        Ok(true)
    }

    /// Some write completes.
    pub fn complete_one(&mut self, world: &mut World) -> Result<(), Crashed> {
        if self.writing.is_empty() {
            return Ok(());
        }
        let at = world.rng.index(self.writing.len());
        let piece = world.rng.index(self.writing[at].pieces.len());
        let id = self.writing[at].pieces.swap_remove(piece);
        world.disk.complete(self.writing[at].segment, id)?;
        if !self.writing[at].pieces.is_empty() {
            return Ok(());
        }
        let done = self.writing.remove(at).expect("it is there");
        let sequence = done.sequence;
        let behind = self.written.partition_point(|other| other.end < done.end);
        self.written.insert(behind, done);
        if let Some(flushed) = self.tail.extent_completed(sequence) {
            self.flushed_up_to(world, flushed);
        }
        Ok(())
    }

    /// Some write fails: the log takes nothing more.
    pub fn fail_one(&mut self, world: &mut World) {
        world.note("a write fails".into());
        self.tail.fail();
        self.acks.fail();
        self.waits.clear();
    }

    fn flushed_up_to(&mut self, world: &mut World, flushed: Position) {
        while self.written.front().is_some_and(|done| done.end <= flushed) {
            let done = self.written.pop_front().expect("it is there");
            self.store.flush_completed(&*self.arena, &done.plan);
            self.index.insert_extent(done.segment, done.place, &done.entries);
        }
        let released = self.acks.flushed(flushed);
        for mark in &released.ends {
            world.ledger.flushed(mark.key, mark.next_offset);
        }
        self.acked(world, &released.acked);
    }

    fn acked(&mut self, world: &mut World, tokens: &[WaitToken]) {
        for token in tokens {
            let (key, level, next) = self.waits.remove(token).expect("each wait is acked once");
            let (flushed, synced) = world.ledger.ends(key);
            let reached = if level == Durability::Synced { synced } else { flushed };
            assert!(next <= reached, "{key}: {next} is acked {level}, which holds only up to {reached}");
            world.note(format!("ack {key} {next} {level}"));
        }
    }

    pub fn begin_sync(&mut self, world: &mut World) -> Result<(), Crashed> {
        if let Some(covers) = self.tail.begin_sync() {
            let segment = self.tail.open_segment().expect("something was flushed").segment;
            self.syncing = Some((covers, world.disk.begin_sync(segment)?));
        }
        Ok(())
    }

    pub fn end_sync(&mut self, world: &mut World) -> Result<(), Crashed> {
        if let Some((covers, ticket)) = self.syncing.take() {
            world.disk.end_sync(ticket)?;
            self.tail.sync_completed(covers);
            world.note(format!("synced up to {covers}"));
            let released = self.acks.synced(covers);
            for mark in &released.ends {
                self.store.synced(mark);
                world.ledger.synced(mark.key, mark.next_offset);
            }
            self.acked(world, &released.acked);
        }
        Ok(())
    }

    fn sync(&mut self, world: &mut World) -> Result<(), Crashed> {
        self.end_sync(world)?;
        self.begin_sync(world)?;
        self.end_sync(world)
    }

    fn quiesce(&mut self, world: &mut World) -> Result<(), Crashed> {
        while !self.writing.is_empty() {
            self.complete_one(world)?;
        }
        self.sync(world)
    }

    /// Seals the open segment and begins the next one.
    fn roll(&mut self, world: &mut World) -> Result<(), Crashed> {
        world.note("roll".into());
        self.quiesce(world)?;
        let checkpoint = self.checkpoint(false);
        self.seal(world)?;
        self.open_next(world)?;
        self.write_checkpoint(world, &checkpoint)
    }

    /// Flushes and syncs everything, and says so.
    pub fn stop(&mut self, world: &mut World) -> Result<(), Crashed> {
        world.note("stop".into());
        while self.flush(world, false)? {
            self.quiesce(world)?;
        }
        self.quiesce(world)?;
        let checkpoint = self.checkpoint(true);
        if !self.has_room_for(&checkpoint) {
            self.roll(world)?;
        }
        self.write_checkpoint(world, &checkpoint)?;
        self.seal(world)?;
        world.arena = None;
        Ok(())
    }

    fn checkpoint(&self, clean: bool) -> Checkpoint {
        let partition = |(key, (ends, last_epoch)): (PartitionKey, (ringmain_core::offsets::Ends, Epoch))| {
            CheckpointPartition { key, log_start: ends.log_start(), next_offset: ends.flushed_end(), last_epoch }
        };
        let partitions = self.store.snapshot().into_iter().map(partition).collect();
        Checkpoint {
            epoch: self.store.epoch(),
            clean,
            created_ms: 0,
            partitions,
            sections: self.store.producers_section().into_iter().collect(),
        }
    }

    fn has_room_for(&self, checkpoint: &Checkpoint) -> bool {
        self.tail.has_room(Layout::of_checkpoint(checkpoint.encode().len()).extent_bytes, 0)
    }

    fn write_checkpoint(&mut self, world: &mut World, checkpoint: &Checkpoint) -> Result<(), Crashed> {
        let directory = checkpoint.encode();
        let layout = Layout::of_checkpoint(directory.len());
        let placed = self
            .tail
            .place(ExtentKind::Checkpoint, layout.directory_bytes, crc32c(&directory), layout.extent_bytes, 0)
            .expect("there is room");
        world.note(format!("checkpoint {} at {}:{}", placed.sequence, placed.segment, placed.place_in_file));
        let mut image = placed.header.to_vec();
        image.extend_from_slice(&directory);
        write_now(&mut world.disk, placed.segment, placed.place_in_file, &in_block(&image))?;
        self.tail.extent_completed(placed.sequence);
        self.sync(world)?;
        self.checkpointed = placed.segment;
        self.durable_starts = checkpoint.partitions.iter().map(|listed| (listed.key, listed.log_start)).collect();
        self.durable_starts.iter().for_each(|(&key, &start)| world.ledger.start_synced(key, start));
        Ok(())
    }

    fn seal(&mut self, world: &mut World) -> Result<(), Crashed> {
        let Some(end) = self.tail.segment_end() else { return Ok(()) };
        let entries = self.index.active_mut(end.segment).expect("the open segment's index is in memory").sorted();
        let footer = encode_footer(&entries, &end);
        write_now(&mut world.disk, end.segment, u64::from(end.end_place), &footer)?;
        world.disk.set_len(end.segment, end.end_place as usize + footer.len())?;
        sync_now(&mut world.disk, end.segment)?;
        self.index.put(end.segment, SegmentIndex::Sealed(SealedIndex::of_entries(&entries, &end)));
        Ok(())
    }

    fn open_next(&mut self, world: &mut World) -> Result<(), Crashed> {
        let header = self.tail.next_segment_header(0);
        // A recycled file: whatever an older segment has in it.
        let older = header.segment.0.checked_sub(1 + world.rng.below(3)).map(SegmentSequence);
        let recycled = older.and_then(|older| world.disk.content(older));
        world.disk.create(header.segment, recycled, SEGMENT_BYTES as usize)?;
        write_now(&mut world.disk, header.segment, 0, &in_block(&header.encode()))?;
        sync_now(&mut world.disk, header.segment)?;
        world.disk.sync_dir()?;
        let segment = self.tail.roll();
        self.index.put(segment, SegmentIndex::Full(ActiveIndex::default()));
        Ok(())
    }

    /// Gives clean memory back, as a full arena would.
    pub fn evict(&mut self) {
        self.store.evict_one(&*self.arena);
    }
}
