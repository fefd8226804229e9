//! `kill -9` where the disk is not at its best: while segments are freed and written again and runs are compressed, on a full
//! disk, and on one so slow that large writes are under way long after the process has gone.
//!
//! `RINGMAIN_KILL_ROUNDS` sets the number of rounds of each loop, `RINGMAIN_SEED` replays the choices of one. Needs root for
//! small filesystems and for a slow device; `RINGMAIN_NO_THROTTLE=1` leaves the latter out.

#![allow(clippy::unwrap_used)]

mod support;

use std::fs::File;
use std::path::Path;

use ringmain_core::ids::Durability;
use rustix::fs::FallocateFlags;

use support::broker::{Broker, Home, MEMORY};
use support::ledger::REPEATS_FROM;
use support::load::{Plan, Sizes, produce_all};
use support::mount::Mount;
use support::random::Random;
use support::readback::MayMiss;
use support::throttle::Throttle;
use support::trial::{Kill, Trial};
use support::{number_from_env, run, wait_for};

const MIB: u64 = 1 << 20;
/// Small segments: many are begun, freed and written again in a round.
const FLAGS: [&str; 6] = ["--shards", "1", "--memory", MEMORY, "--segment-bytes", "32MiB"];

fn rounds(default: u64) -> u64 {
    number_from_env("RINGMAIN_KILL_ROUNDS", default)
}

fn any_kill(random: &mut Random) -> Kill {
    [Kill::Waited, Kill::Struck, Kill::Replaced][random.within(0..3) as usize]
}

/// Producers of large records at all levels, half of which compress well.
fn large(trial: &mut Trial, records_max: u64) -> Vec<Plan> {
    let mut plans = Plan::large(&trial.topics, &mut trial.random);
    for plan in &mut plans {
        plan.records_max = records_max;
        if plan.producer % 2 == 0 {
            plan.producer += REPEATS_FROM;
        }
    }
    plans
}

/// Nothing that was acked is missing, and nothing else is told.
fn assert_whole(trial: &Trial, broker: &Broker) {
    for (partition, read) in trial.check(broker, MayMiss::Nothing) {
        assert_eq!((read.gaps, read.epoch), (vec![], 0), "{partition:?}");
    }
    assert_eq!(broker.metric("ringmain_corrupt_runs_total"), 0);
    assert_eq!(broker.metric("ringmain_log_failed"), 0);
}

/// Files of freed segments that are kept to be written again.
fn recycled(home: &Home) -> usize {
    let files = std::fs::read_dir(home.data().join("shard-000")).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|kind| kind == "free")).count()
}

/// What consumers can't get any more is out of the ledger.
fn forget_below_log_starts(trial: &Trial, broker: &Broker) {
    for (topic, partitions) in &trial.topics {
        let described = broker.ok(&["topic", "describe", topic, "--json"]);
        let described: serde_json::Value = serde_json::from_slice(&described).unwrap();
        for partition in 0..*partitions {
            let start = described["partitions"][partition as usize]["log_start"].as_u64().unwrap();
            trial.ledger.with(&(topic.clone(), partition), |ledger| {
                ledger.acked = ledger.acked.split_off(&start);
            });
        }
    }
}

#[test]
fn a_kill_amid_retention_compression_and_recycling_loses_nothing_that_is_kept() {
    let mut random = Random::announced("kill amid retention");
    let (mut trial, mut broker) = Trial::new(Home::new(&FLAGS), &mut random);
    let (mut freed, mut compressed, mut pool) = (0, 0, 0);
    for (topic, _) in &trial.topics {
        broker.ok(&["topic", "alter", topic, "--compression", "zstd"]);
    }
    for round in 0..rounds(3) {
        for (topic, _) in &trial.topics {
            broker.ok(&["topic", "alter", topic, "--retention-bytes", "8MiB"]);
        }
        // Enough for some segments before the kill; then what is retained meets load and the kill.
        wait_for("a segment to go", || {
            let plans = large(&mut trial, 30);
            assert!(run(produce_all(&broker.broker, plans, &trial.ledger)) > 0);
            (broker.metric("ringmain_segments_freed_total") > 0).then_some(())
        });
        freed += broker.metric("ringmain_segments_freed_total");
        compressed += broker.metric("ringmain_runs_zstd_total");
        pool += recycled(&trial.home);
        let (plans, acks) = (large(&mut trial, 60), trial.random.within(1..200));
        let kill = any_kill(&mut trial.random);
        trial.kill_amid(broker, plans, acks, kill);
        broker = trial.start();
        for (topic, _) in &trial.topics {
            broker.ok(&["topic", "alter", topic, "--retention-bytes", "none"]);
        }
        forget_below_log_starts(&trial, &broker);
        assert_whole(&trial, &broker);
        eprintln!("round {round}: {freed} segments freed, {compressed} runs compressed, {pool} files kept");
    }
    assert!(freed > 0 && compressed > 0 && pool > 0, "{freed} freed, {compressed} compressed, {pool} kept");
    broker.stop();
}

/// Takes the disk but for `left` bytes.
fn hog(mount: &Path, left: u64) -> File {
    let hog = File::create(mount.join("hog")).unwrap();
    let disk = rustix::fs::statvfs(mount).unwrap();
    let free = disk.f_bavail * disk.f_frsize;
    if free > left {
        rustix::fs::fallocate(&hog, FallocateFlags::empty(), 0, free - left).unwrap();
    }
    hog
}

#[test]
fn a_kill_on_a_full_disk_loses_nothing_and_it_ends_with_the_fullness() {
    let mut random = Random::announced("kill on a full disk");
    let mut met_full = 0;
    for round in 0..rounds(1) {
        let Some(mount) = Mount::ext4(300 * MIB) else { return };
        let home = Home::within(mount.path(), &FLAGS);
        let (mut trial, mut broker) = Trial::new(home, &mut random);
        // The open segment and the one that is made ahead of need are there; little more fits.
        let hog = hog(mount.path(), 45 * MIB);
        for life in 0..2 {
            // Killed on the way to a full disk, and again where it is full from the start or nearly so.
            let (plans, acks) = (large(&mut trial, 60), trial.random.within(1..400));
            let kill = any_kill(&mut trial.random);
            trial.kill_amid(broker, plans, acks, kill);
            broker = trial.start();
            assert_whole(&trial, &broker);
            let plans = large(&mut trial, 60);
            run(produce_all(&broker.broker, plans, &trial.ledger));
            let full = broker.metric("ringmain_disk_full");
            met_full += full;
            eprintln!("round {round}, life {life}: {} acks, full: {full}", trial.ledger.acks());
            assert_whole(&trial, &broker);
        }
        // Killed while it is full; space returns while nobody looks, or under the eyes of the next one.
        broker.kill();
        let before = trial.random.one_in(2);
        if before {
            hog.set_len(0).unwrap();
        }
        broker = trial.start();
        hog.set_len(0).unwrap();
        assert_whole(&trial, &broker);
        wait_for("produces are taken again", || {
            let plan = Plan {
                producer: 500,
                topic: trial.topics[0].clone(),
                level: Durability::Synced,
                sizes: Sizes::Tiny,
                records_max: 10,
                seed: 1,
            };
            (run(produce_all(&broker.broker, vec![plan], &trial.ledger)) > 0).then_some(())
        });
        assert_whole(&trial, &broker);
        broker.stop();
    }
    assert!(met_full > 0, "the disk was never full");
}

#[test]
fn recovery_waits_for_the_writes_of_a_dying_process_on_a_slow_disk() {
    let mut random = Random::announced("kill on a slow disk");
    let Some(mount) = Mount::ext4(1024 * MIB) else { return };
    let Some(throttle) = Throttle::on(mount.path(), 8 * MIB) else { return };
    let (mut trial, mut broker) = Trial::new(Home::within(mount.path(), &FLAGS), &mut random);
    let wanted = rounds(2);
    let mut round = 0;
    // On a busy machine the next process may come late; the point is the one that does not.
    while round < wanted || trial.seen.waited == 0 && round < wanted + 10 {
        round += 1;
        // Else the next start waits for small files whose writing back stands behind the large writes.
        rustix::fs::syncfs(File::open(mount.path()).unwrap()).unwrap();
        throttle.take(broker.process_id());
        let (plans, acks) = (large(&mut trial, 30), trial.random.within(20..80));
        trial.kill_amid(broker, plans, acks, Kill::Replaced);
        broker = trial.start();
        assert_whole(&trial, &broker);
        eprintln!("round {round}: {} acks, {:?}", trial.ledger.acks(), trial.seen);
    }
    let seen = trial.seen;
    assert!(seen.waited > 0, "no start had to wait for writes under way: {seen:?}");
    broker.kill();
}
