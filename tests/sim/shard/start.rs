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
    shard.arena.flushed.set(shard.tail.flushed());
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

/// What becomes of the memory of the process before.
enum Memory {
    Taken(Rc<SimArena>, Box<ShardStore>),
    NotNeeded,
    /// With the highest incarnation that it knew.
    Lost(Option<Incarnation>),
}

/// The arena of the process before if it is this log's last memory, else a new one and perhaps a new epoch.
fn open_memory(world: &mut World, recovered: &Recovered, harm: &Harm) -> (Rc<SimArena>, ShardStore) {
    let lost_log = recovered.last_incarnation == Incarnation(0) && world.born;
    let fresh = recovered.last_incarnation == Incarnation(0) && !lost_log;
    let memory = take_over(world, recovered, harm, fresh);
    let epoch = match memory {
        Memory::Taken(..) => recovered.epoch,
        Memory::Lost(_) if lost_log => {
            let made = world.created.values().max().copied().unwrap_or_default();
            Epoch(made.0 + EPOCHS_OF_A_LOST_LOG)
        }
        Memory::Lost(in_arena) => recovered.epoch_past_loss(in_arena),
        Memory::NotNeeded if recovered.ends_uncertain => recovered.epoch_past_loss(None),
        Memory::NotNeeded => recovered.epoch,
    };
    if harm.may_repeat && world.arena.is_none() {
        world.meet("last trace of a life lost");
        world.ledger.may_repeat();
    }
    world.arena_flipped = false;
    let (arena, store) = match memory {
        Memory::Taken(arena, store) => (arena, *store),
        _ => (Rc::new(SimArena::new(recovered.next_incarnation)), filled_store(world, recovered, epoch)),
    };
    world.arena = Some(Rc::clone(&arena));
    world.note(format!("start: epoch {} after incarnation {}", store.epoch(), recovered.last_incarnation));
    (arena, store)
}

fn take_over(world: &mut World, recovered: &Recovered, harm: &Harm, fresh: bool) -> Memory {
    let Some(arena) = world.arena.clone() else {
        let not_needed = recovered.clean && !recovered.stillborn || fresh;
        return if not_needed { Memory::NotNeeded } else { Memory::Lost(None) };
    };
    let known = arena.incarnation.get().max(arena.next_incarnation.get());
    if arena.flushed.get() > recovered.flushed && !fresh {
        return refuse(world, harm, known, "the log is shorter than it was");
    }
    if (recovered.clean || fresh) && !recovered.ends_uncertain {
        return Memory::NotNeeded;
    }
    let last = recovered.last_incarnation;
    if arena.incarnation.get() != last && arena.next_incarnation.get() != last {
        // Of a life that never began, unless damage has taken its beginning.
        if harm.arena {
            return refuse(world, harm, known, "it is of another incarnation");
        }
        return Memory::Lost(Some(known));
    }
    if recovered.ends_uncertain {
        return refuse(world, harm, known, "ends are uncertain");
    }
    let mut store = filled_store(world, recovered, recovered.epoch);
    match adopt(&mut store, &*arena, arena.live()) {
        Ok(adopted) => {
            assert!(!world.arena_flipped, "an arena with another bit is taken over");
            adopted.free.into_iter().for_each(|block| arena.free(block));
            Memory::Taken(arena, Box::new(store))
        }
        Err(error) => refuse(world, harm, known, &error.to_string()),
    }
}

/// Only damage makes the loss of a memory that was kept.
fn refuse(world: &mut World, harm: &Harm, known: Incarnation, reason: &str) -> Memory {
    assert!(world.arena_flipped || harm.arena, "a kept arena is always taken over: {reason}");
    world.note(format!("the arena is refused: {reason}"));
    world.meet("arena refused");
    world.ledger.arena_is_lost();
    Memory::Lost(Some(known))
}

fn filled_store(world: &World, recovered: &Recovered, epoch: Epoch) -> ShardStore {
    let mut store = ShardStore::new(SLABS, epoch);
    for (&key, &created) in &world.created {
        add_partition(&mut store, key, recovered.partitions.get(&key).copied().unwrap_or(never_flushed(created)));
    }
    store.set_producers(recovered.producers.clone());
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
    if !world.is_damaged() {
        world.ledger.check_windows(shard.store.producers(), |key| world.created.contains_key(key));
    }
}
