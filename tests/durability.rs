//! `kill -9` at random moments under load, with and without the arena, and again during recovery: what was acked is held
//! against a ledger that is kept outside the broker.
//!
//! `RINGMAIN_KILL_ROUNDS` sets the number of rounds of each loop, `RINGMAIN_SEED` replays the choices of one.

#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use support::broker::{Broker, Home};
use support::load::{Plan, produce_all};
use support::random::Random;
use support::readback::MayMiss;
use support::trial::{Seen, Trial};
use support::{number_from_env, run, wait_for};

/// Rounds on one data directory; then a new one, so that reading all back stays quick.
const ROUNDS_PER_HOME: u64 = 8;

fn rounds(default: u64) -> u64 {
    number_from_env("RINGMAIN_KILL_ROUNDS", default)
}

/// Runs `round` as often as asked, on a new trial every now and then, and tells what was done.
fn run_rounds(test: &str, rounds: u64, mut round: impl FnMut(&mut Trial, Broker) -> Broker) {
    let mut random = Random::announced(test);
    let mut left = rounds;
    let (mut acks, mut lost, mut seen) = ([0; 3], 0, Seen::default());
    while left > 0 {
        let (mut trial, mut broker) = Trial::new(Home::default(), &mut random);
        for _ in 0..left.min(ROUNDS_PER_HOME) {
            broker = round(&mut trial, broker);
            left -= 1;
            eprintln!("{test}: {} of {rounds} rounds, {} acks here", rounds - left, trial.ledger.acks());
        }
        broker.kill();
        lost += trial.ledger.lost();
        seen.add(trial.seen);
        for (sum, count) in acks.iter_mut().zip(trial.ledger.acks_by_level()) {
            *sum += count;
        }
    }
    eprintln!("{test}: {rounds} rounds, acks at memory, flushed, synced: {acks:?}, lost: {lost}, {seen:?}");
}

#[test]
fn a_kill_at_any_moment_loses_nothing_that_was_acked_at_any_level() {
    run_rounds("kill", rounds(4), |trial, broker| {
        trial.kill_under_load(broker);
        let broker = trial.start();
        for (partition, read) in trial.check(&broker, MayMiss::Nothing) {
            assert_eq!((read.gaps, read.epoch), (vec![], 0), "{partition:?}");
        }
        broker
    });
}

#[test]
fn without_the_arena_only_unflushed_memory_acks_are_lost_and_the_gap_is_told() {
    run_rounds("kill and lose the arena", rounds(3), |trial, broker| {
        trial.kill_under_load(broker);
        trial.home.delete_arena();
        let broker = trial.start();
        for (partition, read) in trial.check(&broker, MayMiss::Memory) {
            let before = trial.epochs.insert(partition.clone(), read.epoch).unwrap_or(0);
            assert!(read.epoch > before, "{partition:?}: epoch {before}, then {}", read.epoch);
        }
        broker
    });
}

#[test]
fn a_kill_during_recovery_and_adoption_loses_nothing() {
    run_rounds("kill during recovery", rounds(2), |trial, broker| {
        trial.kill_under_load(broker);
        for _ in 0..trial.random.within(1..6) {
            let starting = trial.home.launch(&[]);
            std::thread::sleep(Duration::from_millis(trial.random.within(0..300)));
            starting.kill();
        }
        let broker = trial.start();
        for (partition, read) in trial.check(&broker, MayMiss::Nothing) {
            assert_eq!((read.gaps, read.epoch), (vec![], 0), "{partition:?}");
        }
        broker
    });
}

#[test]
fn kills_without_the_arena_in_mixed_order_never_give_an_offset_twice() {
    run_rounds("mixed", rounds(2), |trial, broker| {
        trial.kill_under_load(broker);
        let lost = trial.random.one_in(2);
        if lost {
            trial.home.delete_arena();
        }
        // A start that dies may have made a new arena, or not.
        for _ in 0..trial.random.within(0..3) {
            let starting = trial.home.launch(&[]);
            std::thread::sleep(Duration::from_millis(trial.random.within(0..300)));
            starting.kill();
            if lost && trial.random.one_in(2) {
                trial.home.delete_arena();
            }
        }
        let broker = trial.start();
        trial.check(&broker, if lost { MayMiss::Memory } else { MayMiss::Nothing });
        // What comes now must not land on offsets that were acked before, lost or not.
        let plans = Plan::all(&trial.topics, &mut trial.random);
        assert!(run(produce_all(&broker.broker, plans, &trial.ledger)) > 0);
        trial.check(&broker, MayMiss::Nothing);
        broker
    });
}

#[test]
fn zeros_written_ahead_of_synced_records_never_cover_any() {
    let mut random = Random::announced("zeros ahead");
    let (mut trial, mut broker) = Trial::new(Home::default(), &mut random);
    for _ in 0..2 {
        // Small extents, each with a sync; then large ones that go over what was filled, while small ones go on.
        // On a busy machine they gather to large ones at first.
        wait_for("zeros ahead", || {
            let small = Plan::tiny_synced(&trial.topics, &mut trial.random);
            assert!(run(produce_all(&broker.broker, small, &trial.ledger)) > 0);
            (broker.metric("ringmain_filled_bytes_total") > 0).then_some(())
        });
        let mut both = Plan::tiny_synced(&trial.topics, &mut trial.random);
        both.extend(Plan::large(&trial.topics, &mut trial.random));
        for (number, plan) in both.iter_mut().enumerate() {
            plan.producer = number as u32;
        }
        run(produce_all(&broker.broker, both, &trial.ledger));
        broker.kill();
        broker = trial.start();
        trial.check(&broker, MayMiss::Nothing);
    }
}
