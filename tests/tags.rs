//! Fetches with a tag filter: the broker sends the records with one of the tags, all of them and no others, from memory
//! and from disk, through any port; and where nothing passes the reader makes progress.

#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use bytes::Bytes;
use ringmain_core::ids::{Offset, PartitionKey};
use ringmain_wire::client::{
    Client, ClientConfig, Connection, ConnectionConfig, ConsumerConfig, ConsumerEvent, NewTopic, ProducerConfig,
    StartAt,
};
use ringmain_wire::fetch::{FetchPartition, FetchRequest};
use ringmain_wire::message::{Request, Response};
use ringmain_wire::record::NewRecord;
use support::broker::{Broker, Home};
use support::random::Random;
use support::run;

const RECORDS: u64 = 60_000;
const PARTITIONS: u32 = 2;

/// Tag of a record: `rare` for a few, else one of four, or none.
fn tag_of(number: u64) -> Option<&'static str> {
    if number.is_multiple_of(9973) {
        return Some("rare");
    }
    [Some("red"), Some("green"), Some("blue"), Some("red-ish"), None][(number % 5) as usize]
}

/// About 1 KiB that can't be compressed, its number first.
fn value_of(number: u64) -> Vec<u8> {
    let mut value = number.to_le_bytes().to_vec();
    value.extend(Random(number).bytes(1000));
    value
}

async fn client(broker: &Broker, use_direct_ports: bool) -> Client {
    let config = ClientConfig { use_direct_ports, ..ClientConfig::new(vec![broker.broker.clone()]) };
    Client::connect(config).await.unwrap()
}

/// Numbers of the records from `from` on, given by partition and offset in the order of sending.
async fn fill(broker: &Broker, topic: &str) {
    let client = client(broker, true).await;
    client.create_topic(NewTopic { partitions: PARTITIONS, ..NewTopic::new(topic.to_owned()) }).await.unwrap();
    let producer = client.producer(topic, ProducerConfig::default()).await.unwrap();
    let mut deliveries = tokio::task::JoinSet::new();
    for number in 0..RECORDS {
        let value = value_of(number);
        let record = NewRecord { value: Some(&value), tag: tag_of(number), timestamp_ms: 1, ..NewRecord::default() };
        let delivery = producer.send(&record, Some((number % u64::from(PARTITIONS)) as u32)).await.unwrap();
        deliveries.spawn(async move { delivery.await.unwrap() });
    }
    while let Some(delivered) = deliveries.join_next().await {
        delivered.unwrap();
    }
}

/// All records with one of `tags`, as numbers, with how many batches came.
async fn read(broker: &Broker, topic: &str, tags: &[&str], use_direct_ports: bool) -> (Vec<u64>, usize) {
    let client = client(broker, use_direct_ports).await;
    let config =
        ConsumerConfig { tags: tags.iter().map(|tag| (*tag).to_owned()).collect(), ..ConsumerConfig::default() };
    let starts = (0..PARTITIONS).map(|partition| (partition, StartAt::Earliest)).collect();
    let mut consumer = client.consumer(topic, starts, config).await.unwrap();
    let (mut numbers, mut batches, mut at_end) = (Vec::new(), 0, 0);
    while at_end < PARTITIONS {
        match consumer.next().await.unwrap() {
            ConsumerEvent::Batch(batch) => {
                batches += 1;
                for record in batch.records() {
                    let value = record.value.unwrap();
                    let number = u64::from_le_bytes(value[..8].try_into().unwrap());
                    assert_eq!(value, value_of(number));
                    assert_eq!(record.tag(), tag_of(number).map(str::as_bytes));
                    // Sent in turn, so the offset follows from the number.
                    assert_eq!(record.offset, Offset(number / u64::from(PARTITIONS)));
                    numbers.push(number);
                }
            }
            ConsumerEvent::CaughtUp { offset, .. } => {
                assert_eq!(offset, Offset(RECORDS / u64::from(PARTITIONS)));
                at_end += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    numbers.sort_unstable();
    (numbers, batches)
}

fn expected(tags: &[&str]) -> Vec<u64> {
    (0..RECORDS).filter(|&number| tag_of(number).is_some_and(|tag| tags.contains(&tag))).collect()
}

#[test]
fn a_filtered_fetch_gives_all_records_with_its_tags_and_no_others() {
    // The records do not fit the memory: most come from disk.
    let home = Home::new(&["--shards", "2", "--memory", "64MiB"]);
    let broker = home.start();
    run(async {
        fill(&broker, "tagged").await;
        for tags in [&["red"][..], &["rare"], &["green", "blue"], &["nothing-has-this"], &["red", "rare", "re"]] {
            for use_direct_ports in [true, false] {
                let (numbers, batches) = read(&broker, "tagged", tags, use_direct_ports).await;
                assert_eq!(numbers, expected(tags), "{tags:?}");
                // What does not pass is not sent.
                assert!(batches > 0 || numbers.is_empty());
            }
        }
    });
    assert!(broker.metric("ringmain_fetch_disk_read_bytes_total") > 0);
    assert!(broker.metric("ringmain_filtered_bytes_total") > 0);
    broker.stop();
}

#[test]
fn a_filtered_reader_at_the_end_is_woken_by_what_passes() {
    let home = Home::default();
    let broker = home.start();
    run(async {
        let client = client(&broker, true).await;
        client.create_topic(NewTopic { partitions: 1, ..NewTopic::new("live") }).await.unwrap();
        let producer = client.producer("live", ProducerConfig::default()).await.unwrap();
        let config =
            ConsumerConfig { tags: vec!["yes".into()], wait_max: Duration::from_secs(20), ..ConsumerConfig::default() };
        let mut consumer = client.consumer("live", vec![(0, StartAt::Latest)], config).await.unwrap();
        for round in 0..20_u64 {
            // What does not pass comes first, and must not end or harm the wait.
            for tag in ["no", "yes-but-longer", "yes"] {
                let value = Bytes::from(round.to_string());
                let record = NewRecord { value: Some(&value), tag: Some(tag), timestamp_ms: 1, ..NewRecord::default() };
                producer.send(&record, Some(0)).await.unwrap().await.unwrap();
            }
            let batch = loop {
                match consumer.next().await.unwrap() {
                    ConsumerEvent::Batch(batch) => break batch,
                    ConsumerEvent::CaughtUp { .. } => {}
                    other => panic!("{other:?}"),
                }
            };
            let got: Vec<_> = batch.records().map(|record| (record.offset, record.value.unwrap().to_vec())).collect();
            assert_eq!(got, [(Offset(round * 3 + 2), round.to_string().into_bytes())]);
        }
    });
    broker.stop();
}

#[test]
fn a_filtered_fetch_that_does_not_wait_looks_on_behind_the_first_portion_on_any_port() {
    let home = Home::default();
    let broker = home.start();
    run(async {
        let client = client(&broker, true).await;
        let topic = client.create_topic(NewTopic { partitions: 1, ..NewTopic::new("none") }).await.unwrap().topic_id;
        let producer = client.producer("none", ProducerConfig::default()).await.unwrap();
        const RECORDS: u64 = 6000;
        for number in 0..RECORDS {
            let value = value_of(number);
            let record = NewRecord { value: Some(&value), tag: Some("no"), timestamp_ms: 1, ..NewRecord::default() };
            producer.send(&record, Some(0)).await.unwrap();
        }
        producer.close().await.unwrap();
        let key = PartitionKey { topic, partition: 0 };
        let request = Request::Fetch(FetchRequest {
            partitions: vec![FetchPartition { key, offset: Offset(0), bytes_max: 0 }],
            bytes_max: 1024 * 1024,
            tags: vec!["yes".into()],
            ..FetchRequest::default()
        });
        let metadata = client.metadata().await.unwrap();
        for port in &metadata.brokers[0].direct_ports {
            let address = format!("127.0.0.1:{port}");
            let connection = Connection::connect(&address, &ConnectionConfig::default()).await.unwrap();
            let frame = connection.request(&request, Vec::new()).await.unwrap().into_result().unwrap();
            let Response::Fetch(outcomes) = frame.response else { panic!() };
            assert_eq!((outcomes[0].next_offset, frame.payload.len()), (Offset(RECORDS), 0), "port {port}");
        }
        // Nothing was sent, so nothing was answered from memory.
        assert_eq!(broker.metric("ringmain_fetched_memory_bytes_total"), 0);
    });
    broker.stop();
}

#[test]
fn the_command_line_gives_and_asks_for_tags() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "lines", "--partitions", "3"]);
    let file = home.data().parent().unwrap().join("input");
    for tag in ["red", "blue"] {
        let lines: String = (0..1000).map(|number| format!("{tag} {number}\n")).collect();
        std::fs::write(&file, lines).unwrap();
        broker.ok(&["produce", "lines", file.to_str().unwrap(), "--tag", tag]);
    }
    let count = |args: &[&str]| {
        let out = broker.ok(&[&["consume", "lines"], args].concat());
        String::from_utf8(out).unwrap().lines().filter(|line| !line.is_empty()).count()
    };
    assert_eq!(
        (count(&["--tag", "red"]), count(&["--tag", "red", "--tag", "blue"]), count(&["--tag", "x"])),
        (1000, 2000, 0)
    );
    let wrong = broker.output(&["consume", "lines", "--tag", ""]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8(wrong.stderr).unwrap().contains("1 to 1024 bytes"));
    broker.stop();
}
