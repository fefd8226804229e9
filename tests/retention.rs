//! Retention with the real binary: by bytes and by age disk use falls, consumers at the log start go on, consumers below it
//! are told; settings count at once and last; kills in the middle of it lose nothing above the log start.
//!
//! `RINGMAIN_KILL_ROUNDS` sets the number of rounds of the loop, `RINGMAIN_SEED` replays the choices of one.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringmain_core::ids::{Durability, Offset};
use ringmain_wire::client::{ConsumerConfig, ConsumerEvent, ProducerConfig, StartAt};
use ringmain_wire::record::NewRecord;

use support::broker::{Broker, Home};
use support::ledger::{Ledger, RecordId};
use support::load::{Plan, Sizes, impatient_client, produce, produce_all};
use support::random::Random;
use support::readback::{MayMiss, check, read_topic};
use support::{number_from_env, run, wait_for};

const MIB: u64 = 1 << 20;
const SEGMENT: u64 = 32 * MIB;

fn home() -> Home {
    Home::new(&["--shards", "1", "--memory", support::broker::MEMORY, "--segment-bytes", "32MiB"])
}

fn json(bytes: &[u8]) -> serde_json::Value {
    serde_json::from_slice(bytes).unwrap()
}

/// What the device holds for the segments of the only shard, without files that are kept to be written again.
fn segment_bytes(home: &Home) -> u64 {
    let files = std::fs::read_dir(home.data().join("shard-000")).unwrap().map(|entry| entry.unwrap().path());
    let segments = files.filter(|path| path.extension().is_some_and(|kind| kind == "log"));
    // One may go between the listing and the look.
    segments.filter_map(|path| std::fs::metadata(path).ok()).map(|metadata| metadata.blocks() * 512).sum()
}

/// Log start and log end of each partition.
fn ends(broker: &Broker, topic: &str) -> Vec<(u64, u64)> {
    let described = json(&broker.ok(&["topic", "describe", topic, "--json"]));
    let partitions = described["partitions"].as_array().unwrap();
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    partitions.iter().map(|ends| (number(&ends["log_start"]), number(&ends["log_end"]))).collect()
}

/// The ends once retention has come to rest: they stay as they are for longer than it takes to look again.
fn settled_ends(broker: &Broker, topic: &str) -> Vec<(u64, u64)> {
    let (mut seen, mut since) = (ends(broker, topic), Instant::now());
    wait_for("retention to come to rest", || {
        let now = ends(broker, topic);
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
        (since.elapsed() > Duration::from_millis(2500)).then_some(())
    });
    seen
}

fn plan(producer: u32, topic: &str, partitions: u32, records_max: u64) -> Plan {
    let level = Durability::Synced;
    Plan { producer, topic: (topic.to_owned(), partitions), level, sizes: Sizes::Large, records_max, seed: 7 }
}

/// Sends about so many MiB of large records to a topic, and waits for their acks.
fn fill(broker: &Broker, ledger: &Arc<Ledger>, producer: u32, topic: &str, partitions: u32, mib: u64) {
    // The mean size is 550 KB.
    let records = mib * 2;
    assert_eq!(run(produce_all(&broker.broker, vec![plan(producer, topic, partitions, records)], ledger)), records);
}

/// Reads a topic from its log starts to its ends; asserts that nothing is missing there.
fn read_all(broker: &Broker, topic: &str, partitions: u32) -> usize {
    run(async {
        let client = impatient_client(&broker.broker).await;
        let numbers: Vec<u32> = (0..partitions).collect();
        let reads = read_topic(&client, topic, &numbers).await;
        assert!(reads.values().all(|read| read.gaps.is_empty()), "gaps in {topic}");
        reads.values().map(|read| read.records.len()).sum()
    })
}

#[test]
fn by_bytes_the_oldest_go_and_disk_use_falls() {
    let home = home();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--partitions", "2", "--retention-bytes", "64MiB"]);
    let ledger = Arc::default();
    fill(&broker, &ledger, 0, "t", 2, 320);
    // The bound, the open segment, the one that is partly live, and one that is not seen as dead yet.
    wait_for("disk use to fall", || (segment_bytes(&home) <= 64 * MIB + 3 * SEGMENT).then_some(()));
    assert!(broker.metric("ringmain_segments_freed_total") >= 4);
    // Alone in its segments, the topic leaves whole ones, to be written again.
    assert_eq!(broker.metric("ringmain_punched_bytes_total"), 0);
    let kept_records = || ends(&broker, "t").iter().map(|(start, end)| end - start).sum::<u64>();
    wait_for("the bound to be kept", || (kept_records() <= 135).then_some(()));
    assert!(broker.metric("ringmain_retained_bytes") > 0);
    let before = settled_ends(&broker, "t");
    assert!(before.iter().all(|(start, end)| 0 < *start && start < end), "{before:?}");
    // 64 MiB are kept, less a run of each shard at most: about 120 records of 550 KB.
    let kept = read_all(&broker, "t", 2);
    assert!((100..=135).contains(&kept), "{kept} records are kept");
    // After a restart everything is as it was.
    broker.stop();
    let broker = home.start();
    assert_eq!(ends(&broker, "t"), before);
    assert_eq!(read_all(&broker, "t", 2), kept);
    broker.kill();
    let broker = home.start();
    assert_eq!(ends(&broker, "t"), before);
    fill(&broker, &ledger, 0, "t", 2, 64);
    read_all(&broker, "t", 2);
    broker.stop();
}

#[test]
fn by_age_everything_goes_whatever_time_the_records_claim() {
    let home = home();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--retention-ms", "2s"]);
    let far_future = 4_102_444_800_000;
    run(async {
        let client = impatient_client(&broker.broker).await;
        let config = ProducerConfig { durability: Some(Durability::Flushed), ..ProducerConfig::default() };
        let producer = client.producer("t", config).await.unwrap();
        let mut deliveries = Vec::new();
        for number in 0..200 {
            let value = RecordId { producer: 0, number }.value(500_000);
            let record = NewRecord { value: Some(&value), timestamp_ms: far_future, ..NewRecord::default() };
            deliveries.push(producer.send(&record, Some(0)).await.unwrap());
        }
        for delivery in deliveries {
            delivery.await.unwrap();
        }
    });
    let (start, end) = wait_for("all records to be too old", || {
        let (start, end) = ends(&broker, "t")[0];
        (start == end).then_some((start, end))
    });
    assert_eq!((start, end), (200, 200));
    wait_for("disk use to fall", || (segment_bytes(&home) <= 2 * SEGMENT).then_some(()));
    assert_eq!(broker.metric("ringmain_retained_bytes"), 0);
    // The topic goes on, from where it was; and nothing is given twice after a kill.
    assert_eq!(read_all(&broker, "t", 1), 0);
    broker.kill();
    let broker = home.start();
    // The last rise may not have been in a checkpoint; then it comes again.
    wait_for("the log start", || (ends(&broker, "t") == [(200, 200)]).then_some(()));
    broker.ok(&["topic", "alter", "t", "--retention-ms", "none"]);
    let ledger: Arc<Ledger> = Arc::default();
    fill(&broker, &ledger, 1, "t", 1, 8);
    assert_eq!(ends(&broker, "t"), [(200, 216)]);
    assert_eq!(read_all(&broker, "t", 1), 16);
    broker.stop();
}

#[test]
fn an_alter_counts_at_once_and_survives_restart_and_kill() {
    let home = home();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--compression", "none"]);
    broker.ok(&["topic", "create", "other"]);
    let ledger = Arc::default();
    fill(&broker, &ledger, 0, "t", 1, 160);
    fill(&broker, &ledger, 1, "other", 1, 8);
    assert_eq!(ends(&broker, "t")[0].0, 0);
    assert_eq!(broker.metric("ringmain_segments_freed_total"), 0);
    let altered = json(&broker.ok(&["topic", "alter", "t", "--retention-bytes", "32MiB", "--json"]));
    assert_eq!((&altered["retention_bytes"], &altered["compression"]), (&(32 * MIB).into(), &"none".into()));
    wait_for("segments to go", || (broker.metric("ringmain_segments_freed_total") >= 3).then_some(()));
    let started = ends(&broker, "t")[0].0;
    assert!(started > 200, "the log start is only {started}");
    broker.kill();
    let broker = home.start();
    let described = json(&broker.ok(&["topic", "describe", "t", "--json"]));
    assert_eq!(described["retention_bytes"], 32 * MIB);
    assert!(ends(&broker, "t")[0].0 >= started, "the log start fell below what was freed");
    assert_eq!(ends(&broker, "other")[0].0, 0);
    // Taken back: everything stays from here on.
    broker.ok(&["topic", "alter", "t", "--retention-bytes", "none", "--durability", "synced"]);
    let start = ends(&broker, "t")[0].0;
    broker.stop();
    let broker = home.start();
    let described = json(&broker.ok(&["topic", "describe", "t", "--json"]));
    assert_eq!((&described["retention_bytes"], &described["durability_default"]), (&().into(), &"synced".into()));
    fill(&broker, &ledger, 0, "t", 1, 96);
    assert_eq!(ends(&broker, "t")[0].0, start);
    assert_eq!(read_all(&broker, "other", 1), 16);
    // What can't be is refused, and changes nothing.
    for bad in [["--retention-ms", "5"], ["--retention-bytes", "1"]] {
        assert!(broker.fails(&["topic", "alter", "t", bad[0], bad[1]]).contains("retention of"));
    }
    assert!(broker.fails(&["topic", "alter", "nothing", "--compression", "lz4"]).contains("no topic"));
    assert!(broker.fails(&["topic", "alter", "t"]).contains("name a setting"));
    broker.stop();
}

#[test]
fn a_consumer_below_the_log_start_is_told_and_goes_on_from_there() {
    let home = home();
    let broker = home.start();
    broker.ok(&["topic", "create", "t"]);
    let ledger = Arc::default();
    fill(&broker, &ledger, 0, "t", 1, 160);
    run(async {
        let client = impatient_client(&broker.broker).await;
        let config = ConsumerConfig { fetch_bytes: 64 * 1024, ..ConsumerConfig::default() };
        let starts = BTreeMap::from([(0, StartAt::Earliest)]).into_iter().collect();
        let mut consumer = client.consumer("t", starts, config).await.unwrap();
        let mut next = 0;
        let mut jumped = None;
        loop {
            match consumer.next().await.unwrap() {
                ConsumerEvent::Batch(batch) => {
                    for record in batch.records() {
                        assert_eq!(record.offset, Offset(next));
                        assert!(
                            RecordId::of_value(record.value.unwrap()).is_some(),
                            "offset {next} is not as it was sent"
                        );
                        next += 1;
                    }
                    // In the middle of what goes now.
                    if next == 5 {
                        broker.ok(&["topic", "alter", "t", "--retention-bytes", "32MiB"]);
                        wait_for("segments to go", || {
                            (broker.metric("ringmain_segments_freed_total") >= 3).then_some(())
                        });
                    }
                }
                ConsumerEvent::OutOfRange { asked, now, .. } => {
                    assert!(asked < now && jumped.is_none(), "{asked} {now}");
                    assert_eq!(now.get(), ends(&broker, "t")[0].0);
                    (jumped, next) = (Some(now), now.get());
                }
                ConsumerEvent::CaughtUp { .. } if next >= 320 => break,
                ConsumerEvent::CaughtUp { .. } => {}
                event => panic!("{event:?}"),
            }
        }
        assert!(jumped.is_some_and(|to| to.get() > 200), "{jumped:?}");
    });
    assert_eq!(broker.metric("ringmain_corrupt_runs_total"), 0);
    broker.stop();
}

#[test]
fn dead_ranges_beside_a_topic_that_is_kept_are_given_back() {
    let home = home();
    let broker = home.start();
    broker.ok(&["topic", "create", "bulk", "--retention-bytes", "32MiB"]);
    broker.ok(&["topic", "create", "kept"]);
    let ledger = Arc::default();
    for _ in 0..8 {
        fill(&broker, &ledger, 0, "bulk", 1, 30);
        fill(&broker, &ledger, 1, "kept", 1, 1);
    }
    wait_for("dead ranges to be punched", || (broker.metric("ringmain_punched_bytes_total") >= 60 * MIB).then_some(()));
    wait_for("disk use to fall", || (segment_bytes(&home) <= 150 * MIB).then_some(()));
    assert_eq!(read_all(&broker, "kept", 1), 16);
    // Neither a stop nor a kill minds the holes.
    broker.stop();
    let broker = home.start();
    assert_eq!(read_all(&broker, "kept", 1), 16);
    read_all(&broker, "bulk", 1);
    broker.kill();
    let broker = home.start();
    assert_eq!(read_all(&broker, "kept", 1), 16);
    read_all(&broker, "bulk", 1);
    assert_eq!(broker.metric("ringmain_corrupt_runs_total"), 0);
    broker.stop();
}

#[test]
fn kills_while_retention_frees_lose_nothing_above_the_log_start() {
    let mut random = Random::announced("retention kills");
    let home = home();
    let ledger: Arc<Ledger> = Arc::default();
    let topics = [("bounded".to_owned(), 3), ("kept".to_owned(), 1)];
    let mut broker = home.start();
    for (name, partitions) in &topics {
        broker.ok(&["topic", "create", name, "--partitions", &partitions.to_string()]);
    }
    let mut starts = vec![0; 3];
    let (mut freed, mut punched) = (0, 0);
    for round in 0..number_from_env("RINGMAIN_KILL_ROUNDS", 5) {
        broker.ok(&["topic", "alter", "bounded", "--retention-bytes", "16MiB"]);
        let mut plans: Vec<Plan> = (0..3).map(|number| plan(number, "bounded", 3, 1_000)).collect();
        plans.push(Plan { sizes: Sizes::Mixed, ..plan(9, "kept", 1, 200) });
        for plan in &mut plans {
            plan.level = [Durability::Memory, Durability::Flushed, Durability::Synced][random.within(0..3) as usize];
        }
        let segments = random.within(1..5);
        let moment = Duration::from_micros(random.within(0..30_000));
        run(async {
            let stop = Arc::new(AtomicBool::new(false));
            let mut tasks = tokio::task::JoinSet::new();
            for plan in plans {
                tasks.spawn(produce(broker.broker.clone(), plan, Arc::clone(&ledger), Arc::clone(&stop)));
            }
            // On a busy machine the producers, which do not try again, may end before.
            wait_for("segments to go", || {
                while let Some(done) = tasks.try_join_next() {
                    done.unwrap();
                }
                let freed = broker.metric("ringmain_segments_freed_total");
                (freed >= segments || tasks.is_empty()).then_some(())
            });
            tokio::time::sleep(moment).await;
            freed += broker.metric("ringmain_segments_freed_total");
            punched += broker.metric("ringmain_punched_bytes_total");
            broker.kill();
            stop.store(true, Ordering::Relaxed);
            while let Some(done) = tasks.join_next().await {
                done.unwrap();
            }
        });
        broker = home.start();
        // Nothing more goes while it is compared.
        broker.ok(&["topic", "alter", "bounded", "--retention-bytes", "none"]);
        for (partition, (start, _)) in ends(&broker, "bounded").into_iter().enumerate() {
            starts[partition] = start;
            ledger.with(&("bounded".to_owned(), partition as u32), |ledger| {
                ledger.acked = ledger.acked.split_off(&start);
            });
        }
        // A log start below what was freed would show as a gap.
        for (partition, read) in run(check(&broker.broker, &ledger, MayMiss::Nothing)) {
            assert_eq!((read.gaps, read.epoch), (vec![], 0), "round {round}: {partition:?}");
        }
        assert_eq!(broker.metric("ringmain_corrupt_runs_total"), 0);
    }
    eprintln!("{freed} segments freed, {punched} bytes punched, log starts {starts:?}");
    assert!(freed > 0 && starts.iter().all(|start| *start > 0));
    broker.stop();
}
