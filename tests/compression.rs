//! What is stored compressed is served as it was sent: with each setting, after a stop, after `kill -9` with and without
//! the arena, to clients that take codecs and to those that do not; and what is damaged is told and nothing else is lost.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ringmain_core::codec::{ALL_CODECS, Codec};
use ringmain_core::compressor::Compressor;
use ringmain_core::ids::{Durability, Offset, PartitionKey, TopicId};
use ringmain_core::pack::Pack;
use ringmain_wire::ErrorCode;
use ringmain_wire::batch_builder::BatchBuilder;
use ringmain_wire::batch_codec::{FetchedBatches, compress};
use ringmain_wire::client::{
    Client, ClientConfig, ClientError, ConsumerConfig, ConsumerEvent, ProducerConfig, StartAt,
};
use ringmain_wire::fetch::{FetchPartition, FetchRequest, GapReason};
use ringmain_wire::message::{Request, Response};
use ringmain_wire::record::NewRecord;
use support::broker::{Broker, Home};
use support::{LIMIT, run, wait_for};

const SETTINGS: [&str; 4] = ["auto", "none", "lz4", "zstd"];
/// No codec but the one that every client has.
const PLAIN: u32 = Codec::None.bit();

/// Lines that compress as logs do; no two are the same.
fn lines(from: usize, count: usize) -> Vec<Vec<u8>> {
    let line = |number: usize| {
        let id = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let text = r#""action":"page_view","path":"/api/v1/items","region":"eu-west-1","agent":"Mozilla/5.0 (X11)""#;
        format!(r#"{{"id":"{id:016x}","number":{number},{text}}}"#).into_bytes()
    };
    (from..from + count).map(line).collect()
}

async fn client(broker: &Broker) -> Client {
    Client::connect(ClientConfig::new(vec![broker.broker.clone()])).await.unwrap()
}

fn send(broker: &Broker, topic: &str, values: &[Vec<u8>], level: Durability, codec: Codec) {
    run(async {
        let config = ProducerConfig { durability: Some(level), codec, ..ProducerConfig::default() };
        let producer = client(broker).await.producer(topic, config).await.unwrap();
        for value in values {
            producer.send(&NewRecord { value: Some(value), ..NewRecord::default() }, Some(0)).await.unwrap();
        }
        producer.close().await.unwrap();
    });
}

/// Offset and value.
type Record = (u64, Vec<u8>);
/// From and to.
type Lost = (u64, u64);

/// Everything in partition 0, with the gaps that were told.
fn read(broker: &Broker, topic: &str, codecs: u32) -> (Vec<Record>, Vec<Lost>) {
    run(async {
        let config = ConsumerConfig { codecs, ..ConsumerConfig::default() };
        let mut consumer =
            client(broker).await.consumer(topic, vec![(0, StartAt::Offset(Offset(0)))], config).await.unwrap();
        let (mut records, mut gaps) = (Vec::new(), Vec::new());
        loop {
            match tokio::time::timeout(LIMIT, consumer.next()).await.unwrap().unwrap() {
                ConsumerEvent::Batch(batch) => {
                    assert_eq!(batch.header.codec, 0, "a batch is given decompressed");
                    let values = batch.records().map(|record| (record.offset.get(), record.value.unwrap().to_vec()));
                    records.extend(values);
                }
                ConsumerEvent::Gap { from, to, reason, .. } => {
                    assert_eq!(reason, GapReason::Corrupt);
                    gaps.push((from.get(), to.get()));
                }
                ConsumerEvent::CaughtUp { .. } => return (records, gaps),
                event => panic!("{event:?}"),
            }
        }
    })
}

fn assert_all(broker: &Broker, topic: &str, sent: &[Vec<u8>]) {
    for codecs in [ALL_CODECS, PLAIN, PLAIN | Codec::Lz4.bit()] {
        let (records, gaps) = read(broker, topic, codecs);
        assert_eq!(gaps, [], "{topic} {codecs}");
        let expected: Vec<_> = (0u64..).zip(sent.iter().cloned()).collect();
        assert!(records == expected, "{topic} {codecs}: {} of {} records", records.len(), sent.len());
    }
}

fn topics(broker: &Broker) {
    for setting in SETTINGS {
        broker.ok(&["topic", "create", &format!("t-{setting}"), "--compression", setting]);
    }
}

fn wait_until_flushed(broker: &Broker) {
    let is_flushed = || broker.metric("ringmain_run_bytes_total") == broker.metric("ringmain_produced_bytes_total");
    wait_for("all to be flushed", || is_flushed().then_some(()));
}

fn compressed_runs(broker: &Broker) -> (u64, u64) {
    (broker.metric("ringmain_runs_lz4_total"), broker.metric("ringmain_runs_zstd_total"))
}

#[test]
fn each_setting_serves_what_was_sent_from_memory_and_from_disk() {
    let home = Home::default();
    let broker = home.start();
    topics(&broker);
    let sent = lines(0, 20_000);
    for setting in SETTINGS {
        let topic = format!("t-{setting}");
        let before = compressed_runs(&broker);
        send(&broker, &topic, &sent, Durability::Memory, Codec::None);
        wait_until_flushed(&broker);
        let after = compressed_runs(&broker);
        match setting {
            "none" => assert_eq!(before, after),
            "lz4" => assert!(after.0 > before.0 && after.1 == before.1),
            "zstd" => assert!(after.1 > before.1 && after.0 == before.0),
            // Whether there was time for it is not for a test to say.
            _ => {}
        }
        assert_all(&broker, &topic, &sent);
    }
    let raw = broker.metric("ringmain_compressed_run_bytes_total");
    let saved = broker.metric("ringmain_run_bytes_total") - broker.metric("ringmain_run_stored_bytes_total");
    assert!(saved > raw / 2 && saved < raw, "{saved} of {raw}");
    broker.stop();
    // Nothing is in memory now.
    let broker = home.start();
    for setting in SETTINGS {
        assert_all(&broker, &format!("t-{setting}"), &sent);
    }
    assert_eq!(broker.metric("ringmain_corrupt_runs_total"), 0);
}

#[test]
fn a_kill_loses_nothing_that_is_compressed_with_the_arena_or_without() {
    let home = Home::default();
    let mut broker = home.start();
    topics(&broker);
    let mut sent = Vec::new();
    for round in 0..4 {
        let more = lines(sent.len(), 3000);
        sent.extend(more.iter().cloned());
        for setting in SETTINGS {
            send(&broker, &format!("t-{setting}"), &more, Durability::Flushed, Codec::None);
        }
        broker.kill();
        if round % 2 == 1 {
            home.delete_arena();
        }
        broker = home.start();
        for setting in SETTINGS {
            let (records, _) = read_past_epochs(&broker, &format!("t-{setting}"));
            assert!(records == sent, "{setting} in round {round}: {} of {}", records.len(), sent.len());
        }
    }
    assert_eq!(broker.metric("ringmain_corrupt_runs_total"), 0);
}

/// Values only: after a loss of the arena offsets jump.
fn read_past_epochs(broker: &Broker, topic: &str) -> (Vec<Vec<u8>>, usize) {
    run(async {
        let mut consumer = client(broker)
            .await
            .consumer(topic, vec![(0, StartAt::Earliest)], ConsumerConfig::default())
            .await
            .unwrap();
        let (mut values, mut gaps) = (Vec::new(), 0);
        loop {
            match tokio::time::timeout(LIMIT, consumer.next()).await.unwrap().unwrap() {
                ConsumerEvent::Batch(batch) => {
                    values.extend(batch.records().map(|record| record.value.unwrap().to_vec()))
                }
                ConsumerEvent::Gap { reason, .. } => {
                    assert_eq!(reason, GapReason::LostMemory);
                    gaps += 1;
                }
                ConsumerEvent::CaughtUp { .. } => return (values, gaps),
                event => panic!("{event:?}"),
            }
        }
    })
}

#[test]
fn another_setting_counts_from_the_next_flush_on() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--compression", "none"]);
    let mut sent = Vec::new();
    let mut seen = compressed_runs(&broker);
    for setting in ["none", "lz4", "zstd", "none"] {
        broker.ok(&["topic", "alter", "t", "--compression", setting]);
        let more = lines(sent.len(), 5000);
        send(&broker, "t", &more, Durability::Flushed, Codec::None);
        sent.extend(more);
        let now = compressed_runs(&broker);
        assert_eq!((now.0 > seen.0, now.1 > seen.1), (setting == "lz4", setting == "zstd"), "{setting}");
        seen = now;
    }
    broker.stop();
    assert_all(&home.start(), "t", &sent);
}

fn segments(data: &Path) -> Vec<PathBuf> {
    let shards = std::fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path());
    let shards = shards.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("shard-"));
    let files = shards.flat_map(|shard| std::fs::read_dir(shard).unwrap().map(|entry| entry.unwrap().path()));
    files.filter(|path| path.extension().is_some_and(|extension| extension == "log")).collect()
}

/// Where whole packs stand in a file.
fn packs(bytes: &[u8]) -> Vec<(usize, Pack)> {
    let places = (0..bytes.len().saturating_sub(40)).step_by(8);
    let pack = |at: usize| {
        let pack = Pack::parse(&bytes[at..]).ok()?;
        pack.check_crc(&bytes[at..]).ok().map(|()| (at, pack))
    };
    places.filter_map(pack).collect()
}

#[test]
fn a_damaged_pack_is_a_gap_to_the_end_of_its_run_and_the_rest_is_served() {
    let home = Home::new(&["--shards", "1", "--memory", "64MiB"]);
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--compression", "zstd"]);
    let mut sent = Vec::new();
    for _ in 0..4 {
        let more = lines(sent.len(), 2000);
        send(&broker, "t", &more, Durability::Flushed, Codec::None);
        sent.extend(more);
    }
    broker.stop();
    let (path, mut bytes, found) = segments(&home.data())
        .into_iter()
        .map(|path| {
            let bytes = std::fs::read(&path).unwrap();
            let found = packs(&bytes);
            (path, bytes, found)
        })
        .find(|(_, _, found)| !found.is_empty())
        .unwrap();
    let (at, pack) = *found.iter().find(|(_, pack)| pack.base_offset.get() >= 2000).unwrap();
    bytes[at + 40 + pack.packed_bytes as usize / 2] ^= 0x10;
    std::fs::write(&path, bytes).unwrap();

    let broker = home.start();
    for codecs in [ALL_CODECS, PLAIN] {
        let (records, gaps) = read(&broker, "t", codecs);
        assert_eq!(gaps.len(), 1, "{gaps:?}");
        let (from, to) = gaps[0];
        assert!(from <= pack.base_offset.get() && to >= pack.next_offset.get(), "{gaps:?} {pack:?}");
        assert!(to < sent.len() as u64, "{gaps:?}");
        let expected: Vec<_> =
            (0u64..).zip(sent.iter().cloned()).filter(|(offset, _)| !(from..to).contains(offset)).collect();
        assert!(records == expected, "{} of {} records", records.len(), expected.len());
    }
    assert!(broker.metric("ringmain_corrupt_runs_total") >= 2);
}

#[test]
fn what_a_producer_compresses_stays_so_on_disk_and_comes_back_plain() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--compression", "zstd"]);
    let mut sent = Vec::new();
    for codec in [Codec::Lz4, Codec::None, Codec::Zstd] {
        let more = lines(sent.len(), 5000);
        send(&broker, "t", &more, Durability::Flushed, codec);
        sent.extend(more);
    }
    let raw: usize = sent.iter().map(Vec::len).sum();
    let produced = broker.metric("ringmain_produced_bytes_total");
    assert!((produced as usize) < raw * 3 / 4, "{produced} of {raw}");
    let expected: Vec<_> = (0u64..).zip(sent.iter().cloned()).collect();
    assert!(read(&broker, "t", ALL_CODECS).0 == expected);
    assert_not_taken(&broker);
    broker.stop();
    let broker = home.start();
    assert!(read(&broker, "t", ALL_CODECS).0 == expected);
    assert_not_taken(&broker);
}

/// A client that takes no codecs is told why it gets nothing.
fn assert_not_taken(broker: &Broker) {
    run(async {
        let config = ConsumerConfig { codecs: PLAIN, retry_for: Duration::ZERO, ..ConsumerConfig::default() };
        let mut consumer = client(broker).await.consumer("t", vec![(0, StartAt::Earliest)], config).await.unwrap();
        let error: ClientError = tokio::time::timeout(LIMIT, consumer.next()).await.unwrap().unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::UNSUPPORTED), "{error}");
        assert!(error.to_string().contains("lz4"), "{error}");
    });
}

#[test]
fn what_stands_before_a_batch_with_another_codec_is_served_from_memory_and_from_disk() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--compression", "none"]);
    let plain = lines(0, 10);
    send(&broker, "t", &plain, Durability::Flushed, Codec::None);
    send(&broker, "t", &lines(10, 1000), Durability::Flushed, Codec::Zstd);
    let read_plain = |broker: &Broker| {
        run(async {
            let config = ConsumerConfig { codecs: PLAIN, retry_for: Duration::ZERO, ..ConsumerConfig::default() };
            let mut consumer = client(broker).await.consumer("t", vec![(0, StartAt::Earliest)], config).await.unwrap();
            let mut values = Vec::new();
            loop {
                match tokio::time::timeout(LIMIT, consumer.next()).await.unwrap() {
                    Ok(ConsumerEvent::Batch(batch)) => {
                        values.extend(batch.records().map(|record| record.value.unwrap().to_vec()))
                    }
                    Ok(event) => panic!("{event:?}"),
                    Err(error) => {
                        assert_eq!(error.code(), Some(ErrorCode::UNSUPPORTED), "{error}");
                        return values;
                    }
                }
            }
        })
    };
    assert!(read_plain(&broker) == plain);
    broker.stop();
    assert!(read_plain(&home.start()) == plain);
}

const BOMBS: u64 = 100;

/// Batches of two records that are 2 MB, and a few hundred bytes as they are sent, with the tag `boom`.
async fn send_bombs(client: &Client, topic: &str) {
    let producer = client.producer(topic, ProducerConfig::default()).await.unwrap();
    let mut builder = BatchBuilder::new(PartitionKey { topic: producer.topic_id(), partition: 0 });
    let value = vec![0; 1_000_000];
    for _ in 0..2 {
        let record = NewRecord { value: Some(&value), tag: Some("boom"), timestamp_ms: 1, ..NewRecord::default() };
        builder.push(&record).unwrap();
    }
    let batch = compress(&mut Compressor::default(), Codec::Zstd, &builder.finish()).unwrap();
    assert!(batch.len() < 1000, "{}", batch.len());
    for _ in 0..BOMBS {
        producer.send_batch(0, batch.clone(), 2, 2_000_000).await.unwrap();
    }
    producer.close().await.unwrap();
}

/// One fetch without waiting: how far it came, and the batches that it gave.
async fn fetch_bombs(client: &Client, topic: TopicId, bytes_max: u32, tags: &[&str]) -> (u64, usize) {
    let key = PartitionKey { topic, partition: 0 };
    let request = Request::Fetch(FetchRequest {
        partitions: vec![FetchPartition { key, offset: Offset(0), bytes_max: 0 }],
        bytes_max,
        bytes_min: 1,
        codecs: ALL_CODECS,
        tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        ..FetchRequest::default()
    });
    let connection = client.connection_for("bombs", 0).await.unwrap();
    let frame = connection.request(&request, Vec::new()).await.unwrap().into_result().unwrap();
    let Response::Fetch(outcomes) = frame.response else { panic!() };
    assert!(outcomes[0].code.is_ok(), "{outcomes:?}");
    (outcomes[0].next_offset.get(), FetchedBatches::new(frame.payload).map(Result::unwrap).count())
}

/// Budgets count what a reader must hold: neither a consumer nor a shard works on gigabytes for one small answer.
#[test]
fn batches_that_decompress_to_much_come_few_at_a_time_and_cost_little_where_no_tag_fits() {
    let home = Home::new(&["--shards", "1", "--memory", "64MiB"]);
    let broker = home.start();
    broker.ok(&["topic", "create", "bombs", "--compression", "none"]);
    run(async { send_bombs(&client(&broker).await, "bombs").await });
    let look = |broker: &Broker| {
        run(async {
            let client = client(broker).await;
            let topic = client.topic("bombs").await.unwrap().topic_id;
            assert_eq!(fetch_bombs(&client, topic, 1024 * 1024, &[]).await, (2, 1));
            assert_eq!(fetch_bombs(&client, topic, 4 * 1024 * 1024, &[]).await, (2, 1));
            assert_eq!(fetch_bombs(&client, topic, 1024 * 1024, &["boom"]).await, (2, 1));
            let before = broker.metric("ringmain_filtered_bytes_total");
            assert_eq!(fetch_bombs(&client, topic, 1024 * 1024, &["other"]).await, (2 * BOMBS, 0));
            let looked_at = broker.metric("ringmain_filtered_bytes_total") - before;
            assert!(looked_at < 1000 * BOMBS, "{looked_at} bytes were looked at, so some were decompressed");
        });
        let (records, gaps) = read(broker, "bombs", ALL_CODECS);
        assert!(records.len() as u64 == 2 * BOMBS && gaps.is_empty());
        assert!(records.iter().all(|(_, value)| value.len() == 1_000_000));
    };
    look(&broker);
    broker.stop();
    let broker = home.start();
    look(&broker);
    assert!(broker.metric("ringmain_fetch_disk_read_bytes_total") > 0);
}
