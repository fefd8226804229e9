//! The start: recovers the log, takes the arena over or gives it up, checks what is left against the ledger, and begins a
//! new life.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use ringmain_core::acks::Acks;
use ringmain_core::adopt::adopt;
use ringmain_core::block::BlockMemory;
use ringmain_core::compressor::Level;
use ringmain_core::ids::{Epoch, Incarnation, Offset, PartitionKey, SegmentSequence};
use ringmain_core::log::{LogTail, NextPlace};
use ringmain_core::prefill::Prefill;
use ringmain_core::recover::{Case, Recovered, RecoveredPartition, recover};
use ringmain_core::retention::RetentionClock;
use ringmain_core::store::ShardStore;

use super::write::{in_block, sync_now, write_now};
use super::{LOG_ID, Shard, add_partition, never_flushed};
use crate::arena::{SLABS, SimArena};
use crate::disk::Halt;
use crate::layout::Harm;
use crate::world::World;

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
/// Epochs that a log may have come to that is gone altogether.
const EPOCHS_OF_A_LOST_LOG: u32 = 1 << 16;

/// How a start went.
pub struct Started {
    pub shard: Shard,
    pub clean: bool,
}

/// Recovers, checks what is left against the ledger, and begins a new life. Where damage has left nothing to go by, the world
/// is marked as refused.
pub fn start(world: &mut World) -> Result<Started, Halt> {
    let harm = world.layout.harm(&world.damages, &world.disk);
    harm.lost.iter().for_each(|records| world.ledger.may_miss(records));
    let recovered = match recover(&mut world.disk, LOG_ID, world.segment_bytes) {
        Ok(recovered) => recovered,
        Err(error) => {
            assert!(harm.refused, "the log can't be recovered: {error}");
            world.note(format!("refused: {error}"));
            world.meet("start refused");
            world.refused = true;
            return Err(Halt::Crashed);
        }
    };
    check_cases(world, &recovered, &harm);
    let clean = recovered.clean;
    let log_ends: BTreeMap<PartitionKey, RecoveredPartition> = recovered.partitions.clone();
    let (arena, store) = open_memory(world, &recovered, &harm);
    let mut shard = make_shard(world, &recovered, arena, store);
    shard.index = repair(world, &mut shard, recovered)?;
    check_left(world, &mut shard);

    shard.arena.next_incarnation.set(shard.tail.incarnation());
    shard.begin_life(world)?;
    shard.arena.incarnation.set(shard.tail.incarnation());
    let keys: Vec<PartitionKey> = world.created.keys().copied().collect();
    for key in keys {
        let end = log_ends.get(&key).map_or(Offset(0), |partition| partition.end);
        world.ledger.started(key, end);
    }
    world.ledger.all_started();
    world.born = true;
    Ok(Started { shard, clean })
}

fn check_cases(world: &mut World, recovered: &Recovered, harm: &Harm) {
    for seen in &recovered.cases {
        world.note(format!("  {seen:?}"));
        world.cases.insert(seen.case);
        assert!(world.is_damaged() || !OF_DAMAGE.contains(&seen.case), "damage where none was done: {seen:?}");
    }
    assert!(world.is_damaged() || recovered.lost.is_empty(), "damage where none was done: {:?}", recovered.lost);
    assert!(harm.arena || !recovered.ends_uncertain, "ends are uncertain without a reason");
}

/// The arena of the process before if it is this log's last memory, else a new one and perhaps a new epoch.
fn open_memory(world: &mut World, recovered: &Recovered, harm: &Harm) -> (Rc<SimArena>, ShardStore) {
    let had_arena = world.arena.is_some();
    let taken = take_over(world, recovered, harm);
    world.arena_flipped = false;
    let (arena, store) = taken.unwrap_or_else(|| {
        let lost_log = recovered.last_incarnation == Incarnation(0) && world.born;
        let fresh = recovered.last_incarnation == Incarnation(0) && !lost_log && !had_arena;
        let lost = recovered.ends_uncertain || !(recovered.clean || fresh);
        let mut epoch = Epoch(recovered.epoch.0 + u32::from(lost));
        if lost_log {
            let made = world.created.values().max().copied().unwrap_or_default();
            epoch = Epoch(made.0 + EPOCHS_OF_A_LOST_LOG);
        }
        (Rc::new(SimArena::new(recovered.next_incarnation)), filled_store(world, recovered, epoch))
    });
    world.arena = Some(Rc::clone(&arena));
    world.note(format!("start: epoch {} after incarnation {}", store.epoch(), recovered.last_incarnation));
    (arena, store)
}

fn take_over(world: &mut World, recovered: &Recovered, harm: &Harm) -> Option<(Rc<SimArena>, ShardStore)> {
    let arena = world.arena.clone()?;
    let last = recovered.last_incarnation;
    let fits = arena.incarnation.get() == last || arena.next_incarnation.get() == last;
    if !fits || recovered.ends_uncertain || recovered.clean {
        // Of another life, or not needed: only damage makes the loss of a memory that is.
        if harm.arena {
            world.ledger.arena_is_lost();
        }
        return None;
    }
    let mut store = filled_store(world, recovered, recovered.epoch);
    match adopt(&mut store, &*arena, arena.live()) {
        Ok(adopted) => {
            assert!(!world.arena_flipped, "an arena with another bit is taken over");
            adopted.free.into_iter().for_each(|block| arena.free(block));
            Some((arena, store))
        }
        Err(error) => {
            assert!(world.arena_flipped || harm.arena, "a kept arena is always taken over: {error}");
            world.note(format!("the arena is refused: {error}"));
            world.meet("arena refused");
            world.ledger.arena_is_lost();
            None
        }
    }
}

fn filled_store(world: &World, recovered: &Recovered, epoch: Epoch) -> ShardStore {
    let mut store = ShardStore::new(SLABS, epoch);
    for (&key, &created) in &world.created {
        add_partition(&mut store, key, recovered.partitions.get(&key).copied().unwrap_or(never_flushed(created)));
    }
    store
}

fn make_shard(world: &mut World, recovered: &Recovered, arena: Rc<SimArena>, store: ShardStore) -> Shard {
    let levels = [None, None, Some(Level::Lz4), Some(Level::Quick), Some(Level::Zstd)];
    let written_bytes = match recovered.next {
        NextPlace::Continue(open) => open.place,
        NextPlace::NewSegment(_) => 0,
    };
    Shard {
        tail: LogTail::new(recovered.log_start(LOG_ID, world.segment_bytes, store.epoch())),
        store,
        acks: Acks::default(),
        index: ringmain_core::index::LogIndex::default(),
        arena,
        writing: VecDeque::new(),
        written: VecDeque::new(),
        prefill: Prefill::new(written_bytes),
        filling: Vec::new(),
        syncing: None,
        waits: BTreeMap::new(),
        next_token: 0,
        after: None,
        level: levels[world.rng.index(levels.len())],
        stuck: None,
        sealed: None,
        disk_full: false,
        unreserved: false,
        clock: RetentionClock::default(),
        durable_starts: BTreeMap::new(),
        checkpointed: SegmentSequence(0),
    }
}

/// Makes the files what recovery says. Gives the index.
fn repair(world: &mut World, shard: &mut Shard, recovered: Recovered) -> Result<ringmain_core::index::LogIndex, Halt> {
    let disk = &mut world.disk;
    for &segment in &recovered.remove {
        disk.remove(segment)?;
    }
    if !recovered.remove.is_empty() {
        disk.sync_dir()?;
    }
    if let Some(footer) = &recovered.rewrite_footer {
        write_now(disk, footer.segment, footer.place, &footer.bytes)?;
        disk.set_len(footer.segment, footer.place as usize + footer.bytes.len())?;
    }
    if let NextPlace::Continue(open) = recovered.next {
        match disk.set_len(open.segment, world.segment_bytes as usize) {
            Err(Halt::Full) => shard.unreserved = true,
            made => made?,
        }
        if let Some(header) = &recovered.rewrite_header {
            write_now(disk, open.segment, 0, &in_block(&header.encode()))?;
        }
    }
    if let Some(newest) = recovered.sync {
        sync_now(disk, newest)?;
    }
    Ok(recovered.index)
}

/// What a reader finds before the new life begins.
fn check_left(world: &mut World, shard: &mut Shard) {
    let keys: Vec<PartitionKey> = world.created.keys().copied().collect();
    for key in keys {
        let seen = shard.read_all(world, key);
        let (ends, _) = shard.store.ends(key).expect("it was just added");
        world.ledger.check_recovered(key, ends.log_start(), &seen);
        if seen.last().map_or(ends.log_start(), |last| last.next) < ends.log_end() {
            world.ledger.resumed(key, ends.log_end());
        }
    }
}
