//! Runs: a schedule of produces, flushes, syncs, stops and crashes, drawn from a seed or fixed.

use ringmain_core::ids::{Durability, Offset, PartitionKey};

use crate::disk::{Crash, Crashed, Fuse};
use crate::shard::{Shard, Started, World, start};

const LEVELS: [Durability; 3] = [Durability::Memory, Durability::Flushed, Durability::Synced];

/// How a life ended.
enum Ended {
    Crashed(Crash),
    Stopped,
}

/// One whole run from a seed: several lives, and what a last start finds.
pub fn random(seed: u64) -> World {
    let mut world = World::new(seed);
    let lives = 2 + world.rng.below(7);
    let mut expect_clean = false;
    for _ in 0..lives {
        // Some lives die at an operation drawn beforehand, also inside the start.
        let operations = if world.rng.once_in(2) { Some(world.rng.below(120)) } else { None };
        world.disk.fuse = Fuse { operations, sync: None };
        let ended = live(&mut world, expect_clean);
        expect_clean = matches!(ended, Ended::Stopped);
        if let Ended::Crashed(crash) = ended {
            crashed(&mut world, crash);
        }
    }
    if world.rng.once_in(4)
        && let Some((segment, place)) = damage(&mut world)
    {
        world.note(format!("damage in segment {segment} at {place}"));
    }
    finish(&mut world);
    world
}

fn damage(world: &mut World) -> Option<(u64, usize)> {
    let mut rng = world.rng.clone();
    let damaged = world.disk.damage(&mut rng);
    world.rng = rng;
    world.ledger.damaged();
    world.damaged = true;
    damaged.map(|(segment, place)| (segment.0, place))
}

/// The process dies.
pub fn crashed(world: &mut World, crash: Crash) {
    world.note(format!("crash: {crash:?}"));
    world.ledger.crashed(crash);
    if crash > Crash::Kill {
        world.arena = None;
    }
    let mut rng = world.rng.clone();
    world.disk.crash(crash, &mut rng);
    world.rng = rng;
}

fn any_crash(world: &mut World) -> Crash {
    match world.rng.below(5) {
        0 | 1 => Crash::Kill,
        2 => Crash::ArenaLost,
        _ => Crash::Power,
    }
}

/// Starts, works for a while, and ends somehow.
fn live(world: &mut World, expect_clean: bool) -> Ended {
    let mut shard = match start(world) {
        Ok(Started { shard, clean }) => {
            assert!(clean || !expect_clean, "a clean stop is not seen as one");
            shard
        }
        Err(Crashed) => return Ended::Crashed(any_crash(world)),
    };
    let steps = 20 + world.rng.below(200);
    for _ in 0..steps {
        if random_step(world, &mut shard).is_err() {
            return Ended::Crashed(any_crash(world));
        }
    }
    if !shard.failed() && world.rng.once_in(4) && shard.stop(world).is_ok() {
        return Ended::Stopped;
    }
    Ended::Crashed(any_crash(world))
}

fn random_step(world: &mut World, shard: &mut Shard) -> Result<(), Crashed> {
    let keys: Vec<PartitionKey> = world.created.keys().copied().collect();
    let key = keys[world.rng.index(keys.len())];
    match world.rng.below(106) {
        0..40 => {
            let level = LEVELS[world.rng.index(3)];
            if !shard.produce(world, key, level) {
                shard.evict();
            }
        }
        40..56 if !shard.failed() && shard.in_flight() < 4 => {
            let waiters_only = world.rng.once_in(2);
            shard.flush(world, waiters_only)?;
        }
        56..80 if !shard.failed() => shard.complete_one(world)?,
        80..92 if !shard.failed() => {
            if shard.is_syncing() {
                shard.end_sync(world)?;
            } else {
                shard.begin_sync(world)?;
            }
        }
        92 | 93 => shard.evict(),
        94 => shard.tick(),
        95 => {
            let seen = shard.read_all(world, key);
            world.ledger.check_all(key, shard.log_start(key), &seen);
        }
        96 if world.rng.once_in(3) => {
            let key = PartitionKey::new(3 + world.rng.below(2), world.rng.below(3) as u32);
            shard.add_partition(world, key);
        }
        97 if world.rng.once_in(10) && shard.in_flight() > 0 => shard.fail_one(world),
        100 | 101 => {
            let bytes = world.rng.below(40_000);
            shard.raise_log_starts(world, bytes);
        }
        102 if !shard.failed() && world.rng.once_in(2) => shard.checkpoint_now(world)?,
        103..106 if !shard.failed() => shard.free(world)?,
        _ => {}
    }
    Ok(())
}

/// The last start of a run: everything is checked, a little more is done, and checked again after a clean stop.
pub fn finish(world: &mut World) {
    world.disk.fuse = Fuse::default();
    let Ok(Started { mut shard, .. }) = start(world) else { panic!("nothing crashes here") };
    work(world, &mut shard, 3).expect("nothing crashes here");
    shard.stop(world).expect("nothing crashes here");
    let started = start(world).expect("nothing crashes here");
    assert!(started.clean, "a clean stop is not seen as one");
    let mut shard = started.shard;
    let keys: Vec<PartitionKey> = world.created.keys().copied().collect();
    for key in keys {
        let seen = shard.read_all(world, key);
        world.ledger.check_all(key, shard.log_start(key), &seen);
    }
}

/// A fixed amount of work that rolls now and then: `rounds` times four produces, a flush, and every other time a sync.
pub fn work(world: &mut World, shard: &mut Shard, rounds: u32) -> Result<(), Crashed> {
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
            shard.raise_log_starts(world, 6_000);
            shard.checkpoint_now(world)?;
            shard.free(world)?;
        }
    }
    Ok(())
}

/// Two lives of fixed work, the first one stopped, with a fuse. Says whether it came to the end without a crash.
pub fn fixed(world: &mut World, rounds: u32, fuse: Fuse) -> bool {
    world.disk.fuse = fuse;
    let mut lives = || -> Result<(), Crashed> {
        let mut first = start(world)?.shard;
        work(world, &mut first, rounds)?;
        first.stop(world)?;
        let mut second = start(world)?.shard;
        work(world, &mut second, rounds)
    };
    lives().is_ok()
}

/// One past the highest offset of each partition, to tell runs apart.
pub fn ends(world: &World) -> Vec<(PartitionKey, Offset)> {
    world.created.keys().map(|&key| (key, world.ledger.ends(key).0)).collect()
}
