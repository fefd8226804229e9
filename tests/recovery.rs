//! Starts of every kind on what an earlier broker left: after a clean stop, after a kill, with other settings, on a copy,
//! with an arena of another life, beside a broker that still runs.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ringmain_core::ids::Durability;
use support::broker::{Broker, Home, MEMORY, http_get};
use support::ledger::Ledger;
use support::load::{Plan, Sizes, create_topics, impatient_client, produce_all};
use support::random::Random;
use support::readback::{MayMiss, check};
use support::{run, wait_for};

const TOPIC: &str = "wide";

/// A home with a topic, and what was sent to it.
struct Stage {
    home: Home,
    ledger: Arc<Ledger>,
    random: Random,
}

impl Stage {
    fn new(flags: &[&str]) -> (Self, Broker) {
        let stage = Self { home: Home::new(flags), ledger: Arc::default(), random: Random(7) };
        let broker = stage.home.start();
        run(create_topics(&broker.broker, &[(TOPIC.to_owned(), 4)]));
        (stage, broker)
    }

    /// Sends records of all sizes at a level; all must be acked.
    fn produce(&mut self, broker: &Broker, level: Durability) {
        let all = [(Sizes::Tiny, 500), (Sizes::Mixed, 100), (Sizes::Large, 8)];
        let plans = all.into_iter().enumerate().map(|(producer, (sizes, records_max))| Plan {
            producer: producer as u32,
            topic: (TOPIC.to_owned(), 4),
            level,
            sizes,
            records_max,
            seed: self.random.next(),
        });
        assert_eq!(run(produce_all(&broker.broker, plans.collect(), &self.ledger)), 608);
    }

    /// Everything acked is there, without gaps, in epoch `epoch`.
    fn check(&self, broker: &Broker, epoch: u32) {
        for (partition, read) in run(check(&broker.broker, &self.ledger, MayMiss::Nothing)) {
            assert_eq!((read.gaps, read.epoch), (vec![], epoch), "{partition:?}");
        }
    }

    /// Everything is there but what `may_miss` says and gaps tell, now or from before. Gives the number of gaps.
    fn check_with_gaps(&self, broker: &Broker, epoch: u32, may_miss: MayMiss) -> usize {
        let read = run(check(&broker.broker, &self.ledger, may_miss));
        assert!(read.values().all(|read| read.epoch == epoch), "{:?}", read.values().next());
        read.values().map(|read| read.gaps.len()).sum()
    }
}

fn copy_dir(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(done.success());
}

fn file_bytes(files: &[PathBuf]) -> Vec<(PathBuf, Vec<u8>)> {
    files.iter().map(|file| (file.clone(), std::fs::read(file).unwrap())).collect()
}

const TWO_SHARDS: &[&str] = &["--shards", "2", "--memory", MEMORY];

#[test]
fn after_a_clean_stop_there_is_nothing_to_recover_and_no_arena() {
    let (mut stage, broker) = Stage::new(TWO_SHARDS);
    for level in [Durability::Memory, Durability::Synced, Durability::Memory] {
        stage.produce(&broker, level);
    }
    broker.stop();
    assert_eq!(stage.home.arena_files(), Vec::<PathBuf>::new());
    let broker = stage.home.start();
    assert!(!broker.log().contains("took over the memory"), "{}", broker.log());
    assert_eq!(broker.metric("ringmain_adopted_batches"), 0);
    stage.check(&broker, 0);
    stage.produce(&broker, Durability::Memory);
    stage.check(&broker, 0);
    // A clean stop right behind a start, with nothing done in between.
    broker.stop();
    stage.home.start().stop();
    stage.check(&stage.home.start(), 0);
}

#[test]
fn a_clean_stop_under_load_keeps_every_ack() {
    let (mut stage, broker) = Stage::new(TWO_SHARDS);
    let plans = Plan::all(&[(TOPIC.to_owned(), 4)], &mut stage.random);
    let (address, ledger) = (broker.broker.clone(), Arc::clone(&stage.ledger));
    let load = std::thread::spawn(move || run(produce_all(&address, plans, &ledger)));
    wait_for("some acks", || (stage.ledger.acks() > 300).then_some(()));
    broker.stop();
    load.join().unwrap();
    assert_eq!(stage.home.arena_files(), Vec::<PathBuf>::new());
    stage.check(&stage.home.start(), 0);
}

#[test]
fn memory_may_be_larger_or_smaller_after_a_kill_and_after_a_stop() {
    let (mut stage, mut broker) = Stage::new(TWO_SHARDS);
    for (memory, clean) in [("128MiB", false), ("64MiB", false), ("96MiB", true), ("64MiB", true), ("192MiB", false)] {
        stage.produce(&broker, Durability::Memory);
        if clean {
            broker.stop();
        } else {
            broker.kill();
        }
        broker = stage.home.start_with(&["--memory", memory]);
        stage.check(&broker, 0);
        // The one after comes to an arena that was changed.
        broker.kill();
        broker = stage.home.start_with(&["--memory", memory]);
        stage.check(&broker, 0);
    }
}

#[test]
fn shards_may_be_added_for_new_stores_but_not_taken_away() {
    let (mut stage, broker) = Stage::new(TWO_SHARDS);
    stage.produce(&broker, Durability::Memory);
    broker.kill();

    let broker = stage.home.start_with(&["--shards", "3", "--memory", "96MiB"]);
    stage.check(&broker, 0);
    broker.ok(&["topic", "create", "new", "--partitions", "6", "--stores", "3"]);
    let described: serde_json::Value =
        serde_json::from_slice(&broker.ok(&["topic", "describe", "new", "--json"])).unwrap();
    let shards: Vec<_> =
        described["partitions"].as_array().unwrap().iter().map(|partition| &partition["shard"]).collect();
    assert!(shards.iter().any(|shard| **shard == 2), "{shards:?}");
    let described: serde_json::Value =
        serde_json::from_slice(&broker.ok(&["topic", "describe", TOPIC, "--json"])).unwrap();
    assert!(described["partitions"].as_array().unwrap().iter().all(|partition| partition["shard"] != 2));
    stage.produce(&broker, Durability::Memory);
    broker.stop();

    let refused = stage.home.launch(&["--shards", "1"]).ready().err().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    for part in ["made for 3 shards", "1 are asked for", "shards 1, 2 hold data", "--shards 3"] {
        assert!(refused.log.contains(part), "{part} is not in: {}", refused.log);
    }
    // Without the flag, the stored number holds.
    stage.home.flags = ["--memory", "96MiB"].map(str::to_owned).to_vec();
    stage.check(&stage.home.start(), 0);
}

#[test]
fn the_same_shards_go_on_with_one_cpu_after_a_kill() {
    let (mut stage, broker) = Stage::new(TWO_SHARDS);
    for level in [Durability::Memory, Durability::Synced] {
        stage.produce(&broker, level);
    }
    broker.kill();
    // What this thread may use, the processes that it starts may use.
    let all = rustix::thread::sched_getaffinity(None).unwrap();
    let mut one = rustix::thread::CpuSet::new();
    one.set((0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| all.is_set(cpu)).unwrap());
    rustix::thread::sched_setaffinity(None, &one).unwrap();
    let broker = stage.home.start();
    rustix::thread::sched_setaffinity(None, &all).unwrap();
    assert_eq!(http_get(&broker.http, "/metrics").matches("\nringmain_epoch{").count(), 2, "both shards are there");
    stage.check(&broker, 0);
    stage.produce(&broker, Durability::Flushed);
    stage.check(&broker, 0);
    broker.stop();
}

#[test]
fn a_copied_data_directory_is_served_and_the_arena_of_the_original_is_left_alone() {
    let (mut stage, broker) = Stage::new(TWO_SHARDS);
    stage.produce(&broker, Durability::Flushed);
    broker.kill();
    let copy = Home::new(TWO_SHARDS);
    // Both homes use one arena directory, as two brokers of a machine do.
    copy_dir(&stage.home.data(), &copy.data());
    let files = stage.home.arena_files();
    let before = file_bytes(&files);
    assert_eq!(before.len(), 2);
    let arena = stage.home.arena().to_str().unwrap();
    let copied = copy.start_with(&["--arena-dir", arena]);
    stage.check_with_gaps(&copied, 1, MayMiss::Nothing);
    copied.stop();
    // From here on the copy goes its own way.
    for partition in stage.ledger.partitions() {
        stage.ledger.with(&partition, |ledger| ledger.next_offset = 0);
    }
    assert!(file_bytes(&files) == before, "the arena of the original was touched");

    let broker = stage.home.start();
    stage.check(&broker, 0);
    stage.produce(&broker, Durability::Memory);
    stage.check(&broker, 0);
}

#[test]
fn an_arena_of_another_life_is_put_aside_and_counts_as_lost() {
    let (mut stage, broker) = Stage::new(TWO_SHARDS);
    stage.produce(&broker, Durability::Memory);
    broker.kill();
    let old = tempfile::tempdir().unwrap();
    for file in stage.home.arena_files() {
        std::fs::copy(&file, old.path().join(file.file_name().unwrap())).unwrap();
    }
    let broker = stage.home.start();
    stage.produce(&broker, Durability::Flushed);
    stage.produce(&broker, Durability::Memory);
    broker.kill();
    stage.home.delete_arena();
    for entry in std::fs::read_dir(old.path()).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), stage.home.arena().join(entry.file_name())).unwrap();
    }
    let broker = stage.home.start();
    assert_eq!(stage.check_with_gaps(&broker, 1, MayMiss::Memory), 4);
    let kept: Vec<_> = std::fs::read_dir(stage.home.data().join("quarantine")).unwrap().collect();
    assert_eq!(kept.len(), 2, "{kept:?}");
    stage.produce(&broker, Durability::Memory);
    broker.kill();
    assert_eq!(stage.check_with_gaps(&stage.home.start(), 1, MayMiss::Nothing), 4);
}

#[test]
fn an_arena_that_is_garbage_is_put_aside_and_counts_as_lost() {
    let (mut stage, mut broker) = Stage::new(TWO_SHARDS);
    for epoch in 1..3 {
        stage.produce(&broker, Durability::Flushed);
        stage.produce(&broker, Durability::Memory);
        broker.kill();
        for (number, file) in stage.home.arena_files().iter().enumerate() {
            match (epoch + number as u32) % 2 {
                0 => std::fs::write(file, b"garbage").unwrap(),
                _ => std::fs::File::options().write(true).open(file).unwrap().set_len(1 << 20).unwrap(),
            }
        }
        broker = stage.home.start();
        stage.check_with_gaps(&broker, epoch, MayMiss::Memory);
    }
}

#[test]
fn a_data_directory_that_is_in_use_is_refused_and_its_broker_does_not_notice() {
    let (mut stage, broker) = Stage::new(TWO_SHARDS);
    let refused = stage.home.launch(&[]).ready().err().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.log.contains("in use") || refused.log.contains("another"), "{}", refused.log);
    stage.produce(&broker, Durability::Memory);
    stage.check(&broker, 0);
}

#[test]
fn a_port_that_is_in_use_is_refused_and_its_broker_does_not_notice() {
    let (mut stage, broker) = Stage::new(TWO_SHARDS);
    let other = Home::default();
    for (flag, address) in [("--listen", &broker.broker), ("--http", &broker.http)] {
        let refused = other.launch(&[flag, address]).ready().err().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{flag}");
        assert!(refused.log.contains(address.as_str()), "{flag}: {}", refused.log);
    }
    stage.produce(&broker, Durability::Memory);
    stage.check(&broker, 0);
}

#[test]
fn an_anonymous_arena_says_so_and_a_kill_takes_unflushed_memory_acks_only() {
    let (mut stage, broker) = Stage::new(&["--shards", "2", "--memory", MEMORY, "--arena", "anonymous"]);
    let survives = |broker: &Broker| {
        run(async { impatient_client(&broker.broker).await.metadata().await.unwrap().survives_process_kill })
    };
    assert!(!survives(&broker));
    assert!(http_get(&broker.http, "/readyz").contains("\"survives_process_kill\":false"));
    stage.produce(&broker, Durability::Synced);
    stage.produce(&broker, Durability::Memory);
    broker.kill();
    assert_eq!(stage.home.arena_files(), Vec::<PathBuf>::new());
    let broker = stage.home.start();
    assert_eq!(stage.check_with_gaps(&broker, 1, MayMiss::Memory), 4);
    stage.produce(&broker, Durability::Memory);
    broker.stop();
    // A clean stop loses nothing, and the epoch stays.
    let broker = stage.home.start();
    assert_eq!(stage.check_with_gaps(&broker, 1, MayMiss::Nothing), 4);
    broker.stop();

    let (_, broker) = Stage::new(TWO_SHARDS);
    assert!(survives(&broker));
    assert!(http_get(&broker.http, "/readyz").contains("\"survives_process_kill\":true"));
}

#[test]
fn topics_made_and_deleted_survive_a_kill() {
    let home = Home::default();
    let broker = home.start();
    for name in ["a", "b", "c"] {
        broker.ok(&["topic", "create", name, "--partitions", "3"]);
    }
    broker.ok(&["topic", "delete", "b"]);
    broker.kill();
    let broker = home.start();
    let names = |broker: &Broker| -> Vec<String> {
        let list: serde_json::Value = serde_json::from_slice(&broker.ok(&["topic", "list", "--json"])).unwrap();
        list["topics"].as_array().unwrap().iter().map(|topic| topic["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&broker), ["a", "c"]);
    // A new one of the old name is another topic: it starts empty.
    broker.ok(&["topic", "create", "b"]);
    broker.kill();
    let broker = home.start();
    assert_eq!(names(&broker), ["a", "b", "c"]);
    assert_eq!(broker.ok(&["consume", "b"]), b"");
}

#[test]
fn a_shard_whose_log_was_removed_never_gives_an_offset_twice() {
    for clean in [true, false] {
        let (mut stage, broker) = Stage::new(TWO_SHARDS);
        stage.produce(&broker, Durability::Synced);
        if clean {
            broker.stop();
        } else {
            broker.kill();
        }
        std::fs::remove_dir_all(stage.home.data().join("shard-000")).unwrap();
        let broker = stage.home.start();
        assert!(broker.log().contains("the log of this shard is gone"), "{}", broker.log());
        let read = run(check(&broker.broker, &stage.ledger, MayMiss::Log));
        let lost = read.values().filter(|read| read.epoch > 0).count();
        assert!(lost > 0 && lost < read.len(), "one of two shards has lost its partitions: {lost} of {}", read.len());
        // The ledger refuses an offset that was acked before.
        stage.produce(&broker, Durability::Synced);
        broker.kill();
        // The epoch stays.
        let broker = stage.home.start();
        assert!(!broker.log().contains("the log of this shard is gone"), "{}", broker.log());
        let again = run(check(&broker.broker, &stage.ledger, MayMiss::Log));
        assert!(again.iter().all(|(partition, now)| now.epoch == read[partition].epoch));
    }
}
