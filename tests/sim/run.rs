//! Runs: a schedule of produces, flushes, syncs, stops, errors, damage and crashes, drawn from a seed or fixed.

use ringmain_core::ids::{Durability, Offset, PartitionKey, TopicId};

use crate::disk::{Crash, Fuse, Halt};
use crate::shard::{Shard, Started, start};
use crate::world::World;

const LEVELS: [Durability; 3] = [Durability::Memory, Durability::Flushed, Durability::Synced];
const MINUTE_MS: u64 = 60_000;
const DAY_MS: i64 = 86_400_000;

/// How a life ended.
pub enum Ended {
    Crashed(Crash),
    Stopped,
}

/// What may go wrong in a run besides crashes.
#[derive(Clone, Copy)]
struct Troubles {
    /// Writes and syncs fail.
    errors: bool,
    /// Files are spoilt at rest, arenas after a kill.
    damage: bool,
    /// The disk is small.
    small_disk: bool,
    /// Somebody sets the clock.
    clock: bool,
}

/// One whole run from a seed: several lives, and what a last start finds.
pub fn random(seed: u64) -> World {
    let mut world = World::new(seed);
    let mut trouble = |once_in| world.rng.once_in(once_in);
    let troubles = Troubles { errors: trouble(4), damage: trouble(3), small_disk: trouble(5), clock: trouble(5) };
    if world.rng.once_in(8) {
        // Room for fills ahead of the log's end, and for runs of several packs.
        (world.segment_bytes, world.plan_bytes_max) = (4 << 20, 256 * 1024);
    }
    let lives = 2 + world.rng.below(7);
    let mut expect_clean = false;
    for _ in 0..lives {
        world.disk.fuse = fuse(&mut world, troubles);
        let ended = live(&mut world, troubles, expect_clean);
        expect_clean = matches!(ended, Ended::Stopped);
        if let Ended::Crashed(crash) = ended {
            world.crash(crash);
        }
        between_lives(&mut world, troubles, &mut expect_clean);
        if world.refused {
            return world;
        }
    }
    finish(&mut world);
    world
}

/// Some lives die at an operation drawn beforehand, also inside the start; in some a write or sync fails.
fn fuse(world: &mut World, troubles: Troubles) -> Fuse {
    let rng = &mut world.rng;
    let operations = if rng.once_in(2) { Some(rng.below(120)) } else { None };
    let mut fuse = Fuse { operations, ..Fuse::default() };
    if troubles.errors {
        match rng.below(4) {
            0 => fuse.write_error = Some(rng.below(60)),
            1 => fuse.sync_error = Some(rng.below(15)),
            _ => {}
        }
    }
    fuse
}

fn between_lives(world: &mut World, troubles: Troubles, expect_clean: &mut bool) {
    world.disk.capacity = None;
    if troubles.small_disk && world.rng.once_in(2) {
        let segments = world.segment_bytes * (1 + world.rng.below(3));
        world.disk.capacity = Some(world.disk.used() + segments as usize);
    }
    if troubles.damage && world.rng.once_in(2) {
        world.damage_files();
        *expect_clean = false;
    }
    if troubles.damage && world.rng.once_in(3) {
        world.damage_arena();
    }
    if troubles.clock && world.rng.once_in(4) {
        step_clock(world);
    }
}

fn step_clock(world: &mut World) {
    let by_ms = match world.rng.below(3) {
        0 => world.rng.below(10 * MINUTE_MS).cast_signed(),
        1 => DAY_MS * (1 + world.rng.below(800).cast_signed()),
        _ => -DAY_MS * (1 + world.rng.below(800).cast_signed()),
    };
    world.note(format!("the clock is set by {by_ms} ms"));
    world.wall.step(by_ms);
}

fn any_crash(world: &mut World) -> Crash {
    match world.rng.below(5) {
        0 | 1 => Crash::Kill,
        2 => Crash::ArenaLost,
        _ => Crash::Power,
    }
}

/// Starts, works for a while, and ends somehow.
fn live(world: &mut World, troubles: Troubles, expect_clean: bool) -> Ended {
    let mut shard = match start(world) {
        Ok(Started { shard, clean }) => {
            assert!(clean || !expect_clean, "a clean stop is not seen as one");
            shard
        }
        // A start that meets an error or finds no room at all ends its process.
        Err(halt) => {
            if halt == Halt::Failed {
                world.meet("start failed");
            }
            return Ended::Crashed(any_crash(world));
        }
    };
    let steps = 20 + world.rng.below(200);
    for _ in 0..steps {
        match random_step(world, &mut shard, troubles) {
            Ok(()) => {}
            Err(Halt::Full) => assert!(shard.disk_full, "a full disk that nobody knows of"),
            Err(Halt::Failed) => shard.fail_log(world),
            Err(Halt::Crashed) => return Ended::Crashed(any_crash(world)),
        }
    }
    if !shard.failed() && world.rng.once_in(4) && shard.stop(world).is_ok() {
        return Ended::Stopped;
    }
    Ended::Crashed(any_crash(world))
}

fn random_step(world: &mut World, shard: &mut Shard, troubles: Troubles) -> Result<(), Halt> {
    let keys: Vec<PartitionKey> = world.created.keys().copied().collect();
    let key = keys[world.rng.index(keys.len())];
    let works = !shard.failed();
    match world.rng.below(112) {
        0..40 => {
            let level = LEVELS[world.rng.index(3)];
            if !shard.produce(world, key, level) {
                shard.evict();
            }
        }
        40..56 if works && shard.in_flight() < 4 => {
            let waiters_only = world.rng.once_in(2);
            shard.flush(world, waiters_only)?;
        }
        56..80 => shard.complete_one(world)?,
        80..92 => {
            if shard.is_syncing() {
                shard.end_sync(world)?;
            } else {
                shard.begin_sync(world)?;
            }
        }
        92 | 93 => shard.evict(),
        94 => world.wall.passed_ms += 400,
        95 | 96 => {
            let seen = shard.read_all(world, key);
            world.ledger.check_all(key, shard.log_start(key), &seen);
        }
        97 if world.rng.once_in(3) => {
            let key = PartitionKey::new(3 + world.rng.below(4), world.rng.below(3) as u32);
            shard.add_partition(world, key);
        }
        98 if world.rng.once_in(12) => {
            let topic = TopicId(3 + world.rng.below(4));
            shard.delete_topic(world, topic);
        }
        100 | 101 => {
            let bytes = world.rng.below(40_000);
            shard.keep_to_bytes(world, bytes);
        }
        102 if works && world.rng.once_in(2) => shard.checkpoint_now(world)?,
        103..106 if works => shard.free(world)?,
        106 => world.wall.passed_ms += world.rng.below(20 * MINUTE_MS),
        107 => {
            let age_ms = MINUTE_MS * (1 + world.rng.below(600));
            shard.keep_to_age(world, age_ms);
        }
        108 if troubles.clock && world.rng.once_in(3) => step_clock(world),
        109 if troubles.damage && world.rng.once_in(4) => world.damage_files(),
        110 if shard.disk_full && world.rng.once_in(3) => world.disk.capacity = None,
        // A flusher that was left without room looks again.
        111 if works && shard.disk_full => {
            shard.flush(world, false)?;
        }
        _ => {}
    }
    Ok(())
}

/// The last start of a run: everything is checked, a little more is done, and checked again after a clean stop.
pub fn finish(world: &mut World) {
    world.disk.fuse = Fuse::default();
    world.disk.capacity = None;
    let mut shard = match start(world) {
        Ok(Started { shard, .. }) => shard,
        Err(_) if world.refused => return,
        Err(halt) => panic!("nothing goes wrong here: {halt:?}"),
    };
    work(world, &mut shard, 3).expect("nothing goes wrong here");
    shard.stop(world).expect("nothing goes wrong here");
    let started = start(world).expect("nothing goes wrong here");
    assert!(started.clean, "a clean stop is not seen as one");
    check_all(world, started.shard);
}

fn check_all(world: &mut World, mut shard: Shard) {
    let keys: Vec<PartitionKey> = world.created.keys().copied().collect();
    for key in keys {
        let seen = shard.read_all(world, key);
        world.ledger.check_all(key, shard.log_start(key), &seen);
    }
}

/// A fixed amount of work that rolls now and then: `rounds` times four produces, a flush, and every other time a sync.
pub fn work(world: &mut World, shard: &mut Shard, rounds: u32) -> Result<(), Halt> {
    for round in 0..rounds {
        for partition in 0..3 {
            let level = LEVELS[((round + partition) % 3) as usize];
            shard.produce(world, PartitionKey::new(1, partition), level);
        }
        shard.produce(world, PartitionKey::new(2, 0), Durability::Synced);
        shard.flush(world, round % 3 == 1)?;
        // Two extents in flight, completing in any order.
        if round % 2 == 1 {
            while shard.in_flight() > 0 {
                shard.complete_one(world)?;
            }
            shard.begin_sync(world)?;
            shard.produce(world, PartitionKey::new(1, 1), Durability::Memory);
            shard.flush(world, false)?;
            shard.end_sync(world)?;
        }
        if round % 6 == 5 {
            shard.keep_to_bytes(world, 6_000);
            shard.checkpoint_now(world)?;
            shard.free(world)?;
        }
    }
    Ok(())
}

/// Two lives of fixed work, the first one stopped, with a fuse. Says why it came to no end. After an error the life goes on
/// for a while: all is still served, nothing more is taken.
pub fn fixed(world: &mut World, rounds: u32, fuse: Fuse) -> Result<(), Halt> {
    world.disk.fuse = fuse;
    let mut first = start(world)?.shard;
    let worked = work(world, &mut first, rounds).and_then(|()| first.stop(world));
    after_error(world, first, worked)?;
    let mut second = start(world)?.shard;
    let worked = work(world, &mut second, rounds);
    after_error(world, second, worked)
}

fn after_error(world: &mut World, mut shard: Shard, worked: Result<(), Halt>) -> Result<(), Halt> {
    if worked == Err(Halt::Failed) {
        shard.fail_log(world);
        for level in LEVELS {
            shard.produce(world, PartitionKey::new(1, 0), level);
        }
        while shard.has_writes() {
            shard.complete_one(world)?;
        }
        shard.end_sync(world)?;
        check_all(world, shard);
    }
    worked
}

/// One past the highest offset of each partition, to tell runs apart.
pub fn ends(world: &World) -> Vec<(PartitionKey, Offset)> {
    world.created.keys().map(|&key| (key, world.ledger.ends(key).0)).collect()
}
