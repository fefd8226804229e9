//! The shard's storage logic under a disk that forgets: lost, torn and reordered writes, crashes at any operation, arenas
//! kept or lost. Everything comes from one seed.
//!
//! `RINGMAIN_SIM_SEEDS=10000 cargo test --test sim` tries more seeds; a failure prints the command that replays its own.

mod arena;
mod disk;
mod ledger;
mod rng;
mod run;
mod shard;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ringmain_core::recover::Case;

use disk::{Crash, Fuse};
use rng::Rng;
use shard::World;

/// Seeds of an ordinary test run.
const SEEDS: u64 = 300;

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")))
}

/// What a run met.
struct Met {
    cases: BTreeSet<Case>,
    freed: u64,
    punched: u64,
}

/// Runs one seed; gives the cases that its recoveries met, and what its retention did.
fn run_seed(seed: u64) -> Met {
    let result = catch_unwind(AssertUnwindSafe(|| run::random(seed)));
    result.map(|world| Met { cases: world.cases, freed: world.freed, punched: world.punched }).unwrap_or_else(|panic| {
        eprintln!(
            "seed {seed} fails; replay: RINGMAIN_SIM_SEED={seed} cargo test --test sim random_lives -- --nocapture"
        );
        resume_unwind(panic);
    })
}

#[test]
fn random_lives_keep_every_promise() {
    if let Some(seed) = number_from("RINGMAIN_SIM_SEED") {
        run_seed(seed);
        return;
    }
    let seeds = number_from("RINGMAIN_SIM_SEEDS").unwrap_or(SEEDS);
    let all: Vec<Met> = (0..seeds).map(run_seed).collect();
    let met: BTreeSet<Case> = all.iter().flat_map(|met| met.cases.iter().copied()).collect();
    // A schedule that no longer gets a log into these states would prove little.
    let expected = [
        Case::NewLog,
        Case::StoppedClean,
        Case::SealedInRoll,
        Case::FooterDamaged,
        Case::DiedInRoll,
        Case::Open,
        Case::LogEnds,
        Case::OldLifeBehind,
        Case::ReorderedTail,
        Case::ReorderedOverOldLife,
        Case::TornExtent,
        Case::TornRun,
        Case::TornRunReordered,
    ];
    if seeds >= SEEDS {
        for case in expected {
            assert!(met.contains(&case), "no seed meets {case:?}");
        }
        let sum = |count: fn(&Met) -> u64| all.iter().map(count).sum::<u64>();
        assert!(sum(|met| met.freed) > seeds / 10, "hardly a segment is freed");
        assert!(sum(|met| met.punched) > seeds / 10, "hardly a range is punched");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [1, 7, 42] {
        assert_eq!(run::random(seed).trace, run::random(seed).trace);
    }
    assert_ne!(run::random(1).trace, run::random(2).trace);
}

/// Runs the fixed work with a crash of each kind where `fuse` says, then checks what a start finds.
fn crash_each_way(rounds: u32, what: &str, fuse: Fuse) {
    for (crash, moods) in [(Crash::Kill, 1), (Crash::ArenaLost, 1), (Crash::Power, 4)] {
        for mood in 0..moods {
            let result = catch_unwind(AssertUnwindSafe(|| {
                let mut world = World::new(0);
                assert!(!run::fixed(&mut world, rounds, fuse), "the fuse does not go off");
                world.rng = Rng::new(mood);
                run::crashed(&mut world, crash);
                run::finish(&mut world);
            }));
            if let Err(panic) = result {
                eprintln!("{what}, {crash:?} with seed {mood}");
                resume_unwind(panic);
            }
        }
    }
}

#[test]
fn a_crash_at_each_sync_point_keeps_every_promise() {
    const ROUNDS: u32 = 30;
    let mut world = World::new(0);
    assert!(run::fixed(&mut world, ROUNDS, Fuse::default()));
    assert!(run::ends(&world).iter().any(|(_, end)| end.0 > 0));
    let syncs = world.disk.syncs;
    assert!(syncs > 40, "only {syncs} syncs");
    for sync in 0..syncs {
        for after in [false, true] {
            let fuse = Fuse { operations: None, sync: Some((sync, after)) };
            let side = if after { "after" } else { "before" };
            crash_each_way(ROUNDS, &format!("crash {side} sync {sync}"), fuse);
        }
    }
}

#[test]
fn a_crash_at_each_operation_keeps_every_promise() {
    const ROUNDS: u32 = 14;
    let mut world = World::new(0);
    assert!(run::fixed(&mut world, ROUNDS, Fuse::default()));
    for operation in 0..world.disk.operations {
        let fuse = Fuse { operations: Some(operation), sync: None };
        crash_each_way(ROUNDS, &format!("crash at operation {operation}"), fuse);
    }
}
