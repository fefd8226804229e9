//! The shard's storage logic under a disk that forgets and fails: lost, torn and reordered writes, crashes at any operation,
//! errors of writes, syncs and reads, changed bits, no room, arenas kept, lost or damaged, clocks that are set. Everything
//! comes from one seed.
//!
//! `RINGMAIN_SIM_SEEDS=10000 cargo test --test sim` tries more seeds; a failure prints the command that replays its own.

mod arena;
mod disk;
mod layout;
mod ledger;
mod points;
mod rng;
mod run;
mod shard;
mod wall;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use ringmain_core::recover::Case;

/// Seeds of an ordinary test run.
const SEEDS: u64 = 300;

/// Rows of recovery's table that the seeds must meet.
const CASES: [Case; 18] = [
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
    Case::HeaderDamaged,
    Case::DirectoryDamaged,
    Case::FooterLost,
    Case::SegmentHeaderLost,
    Case::FirstExtentDamaged,
];

/// What else must happen, each in one of 100 seeds at least.
const EVENTS: [&str; 21] = [
    "segment freed",
    "range punched",
    "topic deleted",
    "log failed",
    "EIO on read",
    "bad batch in a run",
    "bad pack in a run",
    "run lost to a reader",
    "index made again",
    "arena refused",
    "disk full",
    "disk full ends",
    "checkpoint alone",
    "start on a full disk",
    "run compressed",
    "packed run read",
    "zeros ahead",
    "clock leapt",
    "retention paused",
    "raised by age",
    "start failed",
];

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")))
}

/// What a run met.
struct Met {
    cases: BTreeSet<Case>,
    events: BTreeMap<&'static str, u64>,
}

fn run_seed(seed: u64) -> Met {
    let result = catch_unwind(AssertUnwindSafe(|| run::random(seed)));
    result.map(|world| Met { cases: world.cases, events: world.met }).unwrap_or_else(|panic| {
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
    let from = number_from("RINGMAIN_SIM_FROM").unwrap_or(0);
    let (mut cases, mut events) = (BTreeSet::new(), BTreeMap::<&str, u64>::new());
    for seed in from..from + seeds {
        let met = run_seed(seed);
        cases.extend(met.cases);
        for event in met.events.keys() {
            *events.entry(event).or_default() += 1;
        }
    }
    println!("of {seeds} seeds, so many meet: {events:?}");
    // A schedule that no longer gets a log into these states would prove little.
    if seeds >= SEEDS {
        for case in CASES {
            assert!(cases.contains(&case), "no seed meets {case:?}");
        }
        for event in EVENTS {
            let count = events.get(event).copied().unwrap_or(0);
            assert!(count * 100 >= seeds, "{event}: only {count} of {seeds} seeds");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..60 {
        assert_eq!(run::random(seed).trace, run::random(seed).trace);
    }
    assert_ne!(run::random(1).trace, run::random(2).trace);
}
