//! The client against a fake broker over a real socket.

mod servers;

use std::collections::HashSet;
use std::time::Duration;

use ringmain_core::ids::{Durability, Offset, PartitionKey};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};

use super::fake_broker::{FakeBroker, Fault, State, TOPIC, TOPIC_ID};
use super::*;
use crate::batch_builder::{BatchBuilder, PushError};
use crate::error_code::ErrorCode;
use crate::fetch::{Gap, GapReason};
use crate::hello::ServerLimits;
use crate::record::NewRecord;

fn config(broker: &FakeBroker) -> ClientConfig {
    let mut config = ClientConfig::new(vec![broker.address.to_string()]);
    config.retry_for = Duration::from_secs(10);
    config.request_timeout = Duration::from_secs(5);
    config
}

async fn connected(broker: &FakeBroker) -> Client {
    Client::connect(config(broker)).await.unwrap()
}

fn value(text: &str) -> NewRecord<'_> {
    NewRecord { value: Some(text.as_bytes()), ..NewRecord::default() }
}

fn batch(partition: u32, values: &[&str]) -> Vec<u8> {
    let mut builder = BatchBuilder::new(PartitionKey { topic: TOPIC_ID, partition });
    for text in values {
        builder.push(&value(text)).unwrap();
    }
    builder.finish().to_vec()
}

async fn consume(client: &Client, partition: u32, start: StartAt) -> Consumer {
    client.consumer(TOPIC, vec![(partition, start)], ConsumerConfig::default()).await.unwrap()
}

/// Events up to and with the first `CaughtUp`, as short texts.
async fn events(consumer: &mut Consumer) -> Vec<String> {
    let mut seen = Vec::new();
    loop {
        match consumer.next().await.unwrap() {
            ConsumerEvent::Batch(batch) => seen.extend(
                batch
                    .records()
                    .map(|record| format!("{}={}", record.offset, std::str::from_utf8(record.value.unwrap()).unwrap())),
            ),
            ConsumerEvent::Gap { from, to, reason, .. } => seen.push(format!("gap {from}..{to} {reason:?}")),
            ConsumerEvent::BadBatch { at, error, .. } => seen.push(format!("bad at {at}: {error}")),
            ConsumerEvent::OutOfRange { asked, now, .. } => seen.push(format!("{asked} is now {now}")),
            ConsumerEvent::CaughtUp { offset, .. } => {
                seen.push(format!("end {offset}"));
                return seen;
            }
        }
    }
}

#[tokio::test]
async fn what_is_produced_is_acked_and_consumed_in_order() {
    let broker = FakeBroker::start(2).await;
    let client = connected(&broker).await;
    let config = ProducerConfig { durability: Some(Durability::Synced), ..ProducerConfig::default() };
    let producer = client.producer(TOPIC, config).await.unwrap();
    let mut deliveries = Vec::new();
    for number in 0..100 {
        deliveries.push(producer.send(&value(&number.to_string()), Some(1)).await.unwrap());
    }
    for (number, delivery) in (0..).zip(deliveries) {
        let delivered = delivery.await.unwrap();
        assert_eq!((delivered.offset, delivered.partition), (Offset(number), 1));
        assert_eq!(delivered.level, Durability::Synced);
    }
    let stats = producer.close().await.unwrap();
    assert_eq!((stats.records, stats.records_acked, stats.records_failed), (100, 100, 0));
    assert_eq!(stats.payload_bytes_acked, 190);

    let mut expected: Vec<_> = (0..100).map(|number| format!("{number}={number}")).collect();
    expected.push("end 100".to_owned());
    let mut consumer = consume(&client, 1, StartAt::Earliest).await;
    assert_eq!(events(&mut consumer).await, expected);
}

#[tokio::test]
async fn keys_choose_the_partition_that_the_protocol_names() {
    let broker = FakeBroker::start(4).await;
    let producer = connected(&broker).await.producer(TOPIC, ProducerConfig::default()).await.unwrap();
    for key in ["a", "b", "123456789"] {
        let record = NewRecord { key: Some(key.as_bytes()), ..value(key) };
        let delivered = producer.send(&record, None).await.unwrap().await.unwrap();
        assert_eq!(delivered.partition, crate::tag::partition_of_key(key.as_bytes(), 4));
    }
}

#[tokio::test]
async fn keyless_records_fill_one_batch_before_the_next_partition() {
    let broker = FakeBroker::start(3).await;
    let config = ProducerConfig { batch_bytes: 1000, linger: Duration::from_secs(60), ..ProducerConfig::default() };
    let producer = connected(&broker).await.producer(TOPIC, config).await.unwrap();
    for number in 0..60 {
        producer.send(&value(&format!("{number:050}")), None).await.unwrap();
    }
    producer.flush().await.unwrap();
    let batches: Vec<_> = (0..3).map(|partition| broker.with(|state| state.log[&partition].len())).collect();
    assert!(batches.iter().all(|batches| (1..=3).contains(batches)), "{batches:?}");
}

#[tokio::test]
async fn keyless_records_that_never_fill_a_batch_take_turns_too() {
    let broker = FakeBroker::start(3).await;
    let config = ProducerConfig { linger: Duration::ZERO, ..ProducerConfig::default() };
    let producer = connected(&broker).await.producer(TOPIC, config).await.unwrap();
    let mut partitions = Vec::new();
    for _ in 0..9 {
        partitions.push(producer.send(&value("a"), None).await.unwrap().await.unwrap().partition);
    }
    let first = partitions[0];
    let in_turn: Vec<_> = (0..9).map(|number| (first + number) % 3).collect();
    assert_eq!(partitions, in_turn);
}

#[tokio::test]
async fn producers_do_not_all_begin_with_the_same_partition() {
    let broker = FakeBroker::start(50).await;
    let client = connected(&broker).await;
    let mut first = HashSet::new();
    // That they are all the same by chance happens once in 50^11 times.
    for _ in 0..12 {
        let producer = client.producer(TOPIC, ProducerConfig::default()).await.unwrap();
        first.insert(producer.send(&value("a"), None).await.unwrap().await.unwrap().partition);
    }
    assert!(first.len() > 1);
}

/// Each partition must hold its records in order, where a batch may stand twice, one copy behind the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_is_kept_across_refusals_lost_connections_and_lost_answers() {
    for (partition, log) in produced_through_faults(false).await.iter().enumerate() {
        let mut seen = HashSet::new();
        let first_times: Vec<_> = log.iter().filter(|text| seen.insert(*text)).collect();
        assert!(first_times.is_sorted() && first_times.len() == 200, "partition {partition} is out of order");
        // A repeat never goes back past a batch that was acked: at most one batch is repeated.
        for pair in log.windows(2) {
            let (before, after): (u32, u32) = (pair[0].parse().unwrap(), pair[1].parse().unwrap());
            assert!(after > before || before - after < 3 * 30, "{before} then {after}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_numbered_record_is_stored_once_across_refusals_lost_connections_and_lost_answers() {
    for (partition, log) in (0..).zip(produced_through_faults(true).await) {
        let expected: Vec<String> = (0..200).map(|number: u32| format!("{:06}", number * 3 + partition)).collect();
        assert_eq!(log, expected, "partition {partition}");
    }
}

/// Sends 200 numbers to each of three partitions while every kind of failure happens many times. Each ack must name an
/// offset at which that very record stands. Gives what is stored.
async fn produced_through_faults(idempotent: bool) -> Vec<Vec<String>> {
    let broker = FakeBroker::start(3).await;
    broker.with(|state| {
        for round in 0..10 {
            state.produce_faults.extend([
                Fault::Refuse(ErrorCode::SERVER_BUSY, round % 3),
                Fault::DropAfter,
                Fault::Refuse(ErrorCode::NOT_HERE, 0),
                Fault::DropBefore,
            ]);
        }
    });
    let client = connected(&broker).await;
    let mut config =
        ProducerConfig { batch_bytes: 600, linger: Duration::ZERO, idempotent, ..ProducerConfig::default() };
    config.retry_for = Duration::from_secs(60);
    let producer = client.producer(TOPIC, config).await.unwrap();
    let mut deliveries = Vec::new();
    for number in 0..600u32 {
        let text = format!("{number:06}");
        let delivery = producer.send(&value(&text), Some(number % 3)).await.unwrap();
        deliveries.push((text, number % 3, delivery));
    }
    producer.flush().await.unwrap();
    let logs: Vec<_> = (0..3).map(|partition| broker.with(|state| state.records(partition))).collect();
    for (text, partition, delivery) in deliveries {
        let delivered = delivery.await.unwrap();
        let (offset, stored) = &logs[partition as usize][delivered.offset.0 as usize];
        assert_eq!((*offset, stored), (delivered.offset.0, &text));
    }
    let stats = producer.stats();
    assert!(stats.retries >= 30, "{stats:?}");
    assert_eq!(stats.duplicates > 0, idempotent, "{stats:?}");
    logs.into_iter().map(|log| log.into_iter().map(|(_, text)| text).collect()).collect()
}

#[tokio::test]
async fn a_producer_that_was_forgotten_goes_on_unless_a_record_may_be_stored() {
    let broker = FakeBroker::start(1).await;
    let producer = connected(&broker).await.producer(TOPIC, ProducerConfig::default()).await.unwrap();
    let send = async |text| producer.send(&value(text), None).await.unwrap().await;
    assert_eq!(send("a").await.unwrap().offset, Offset(0));
    let first = producer.identity().unwrap();
    broker.with(State::forget_producers);
    // Its first attempt is refused, so it is not stored: it goes on in the next epoch.
    assert_eq!(send("b").await.unwrap().offset, Offset(1));
    assert_eq!(producer.identity().unwrap(), ProducerIdentity { epoch: first.epoch + 1, ..first });
    // Whether this one is stored nobody can say: it is, and the client does not store it again.
    broker.with(|state| state.produce_faults.push_back(Fault::Forget));
    assert_eq!(send("c").await.unwrap_err().code(), Some(ErrorCode::PRODUCER_UNKNOWN));
    assert_eq!(send("d").await.unwrap().offset, Offset(3));
    let stored = broker.with(|state| state.records(0));
    assert_eq!(stored.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>(), ["a", "b", "c", "d"]);
}

#[tokio::test]
async fn five_batches_of_a_partition_are_under_way_and_are_stored_once_when_their_answers_are_lost() {
    let broker = FakeBroker::start(1).await;
    let client = connected(&broker).await;
    let config = ProducerConfig { batch_bytes: 200, linger: Duration::ZERO, ..ProducerConfig::default() };
    let producer = client.producer(TOPIC, config).await.unwrap();
    assert_eq!(producer.send(&value("first"), None).await.unwrap().await.unwrap().offset, Offset(0));
    broker.with(|state| state.produce_faults.extend(std::iter::repeat_n(Fault::Silence, 5)));
    let mut deliveries = Vec::new();
    for number in 0..20 {
        deliveries.push(producer.send(&value(&format!("{number:050}")), None).await.unwrap());
    }
    let all_sent = async {
        while broker.with(|state| state.produces) < 6 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), all_sent).await.unwrap();
    client.connection_for(TOPIC, 0).await.unwrap().close();
    for (number, delivery) in (1..).zip(deliveries) {
        assert_eq!(delivery.await.unwrap().offset, Offset(number));
    }
    assert_eq!(producer.stats().duplicates, 5);
    assert_eq!(broker.with(|state| state.records(0)).len(), 21);
}

#[tokio::test]
async fn a_refusal_that_is_final_fails_its_batch_and_no_other() {
    let broker = FakeBroker::start(1).await;
    broker.with(|state| state.produce_faults.push_back(Fault::Refuse(ErrorCode::TOO_LARGE, 0)));
    let producer = connected(&broker).await.producer(TOPIC, ProducerConfig::default()).await.unwrap();
    let first = producer.send(&value("a"), None).await.unwrap().await;
    assert_eq!(first.unwrap_err().code(), Some(ErrorCode::TOO_LARGE));
    assert_eq!(producer.send(&value("b"), None).await.unwrap().await.unwrap().offset, Offset(0));
    assert_eq!(producer.stats().records_failed, 1);
}

#[tokio::test]
async fn flush_and_close_tell_of_a_batch_that_was_given_up_before() {
    let broker = FakeBroker::start(1).await;
    let client = connected(&broker).await;
    let config = ProducerConfig { linger: Duration::ZERO, ..ProducerConfig::default() };
    let refuse_one = || broker.with(|state| state.produce_faults.push_back(Fault::Refuse(ErrorCode::TOO_LARGE, 0)));
    let producer = client.producer(TOPIC, config).await.unwrap();
    for round in 0..2 {
        refuse_one();
        drop(producer.send(&value("given up"), None).await.unwrap());
        let failed = async {
            while producer.stats().records_failed == round {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), failed).await.unwrap();
        producer.send(&value("stored"), None).await.unwrap().await.unwrap();
        if round == 0 {
            assert_eq!(producer.flush().await.unwrap_err().code(), Some(ErrorCode::TOO_LARGE));
            // It has been said.
            producer.flush().await.unwrap();
        }
    }
    assert_eq!(producer.close().await.unwrap_err().code(), Some(ErrorCode::TOO_LARGE));
}

#[tokio::test]
async fn records_never_go_to_a_broker_of_another_cluster() {
    let (ours, theirs) = (FakeBroker::start(2).await, FakeBroker::start(2).await);
    theirs.with(|state| state.cluster_id = 2);
    // What ours advertises leads to theirs, as behind a tunnel.
    let direct = theirs.direct_port().await;
    ours.with(|state| {
        state.cluster_id = 1;
        state.common_port = theirs.address.port();
        state.direct_ports = vec![direct, direct];
    });
    let client = connected(&ours).await;
    let producer = client.producer(TOPIC, ProducerConfig::default()).await.unwrap();
    for partition in [0, 1, 0] {
        producer.send(&value("a"), Some(partition)).await.unwrap().await.unwrap();
    }
    assert_eq!((ours.with(|state| state.produces), theirs.with(|state| state.produces)), (3, 0));
    let mut consumer = consume(&client, 0, StartAt::Earliest).await;
    assert_eq!(events(&mut consumer).await, ["0=a", "1=a", "end 2"]);
    assert_eq!(theirs.with(|state| state.fetches), 0);
}

#[tokio::test]
async fn a_client_stays_with_its_cluster_when_its_broker_goes() {
    let (ours, theirs) = (FakeBroker::start(1).await, FakeBroker::start(1).await);
    ours.with(|state| state.cluster_id = 1);
    theirs.with(|state| state.cluster_id = 2);
    let both = vec![ours.address.to_string(), theirs.address.to_string()];
    let config = ClientConfig { bootstrap: both, retry_for: Duration::from_millis(50), ..config(&ours) };
    let client = Client::connect(config).await.unwrap();
    client.any_connection().await.unwrap().close();
    // Nobody accepts there any more.
    drop(ours);
    let error = tokio::time::timeout(Duration::from_secs(60), client.metadata()).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("cluster"), "{error}");
}

/// A server that reads no more while a request waits, until the client has given it up: what the client's kernel held back
/// must not come then.
#[tokio::test]
async fn what_was_not_sent_goes_with_a_connection_that_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (given_up, is_given_up) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut prefix = [0; 4];
        stream.read_exact(&mut prefix).await.unwrap();
        let mut hello = vec![0; u32::from_le_bytes(prefix) as usize];
        stream.read_exact(&mut hello).await.unwrap();
        let answer = &crate::samples::responses()[0].1;
        stream.write_all(&crate::samples::encode_response(answer, 0, 0)).await.unwrap();
        is_given_up.await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.map(|_| rest.len())
    });
    let connection = Connection::connect(&address, &ConnectionConfig::default()).await.unwrap();
    let request = Request::Produce(crate::produce::ProduceRequest { durability: None, timeout_ms: 1 });
    let timeout = Duration::from_millis(300);
    let mut pending = Vec::new();
    for _ in 0..6 {
        pending.push(connection.start(&request, vec![vec![0; 4 << 20].into()], timeout).await.unwrap());
    }
    for pending in pending {
        assert!(matches!(pending.await, Err(ClientError::ConnectionLost { .. })));
    }
    drop(connection);
    given_up.send(()).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(60), server).await.unwrap().unwrap();
    assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn retries_end_when_their_time_is_over() {
    let broker = FakeBroker::start(1).await;
    broker.with(|state| state.produce_faults = vec![Fault::Refuse(ErrorCode::DISK_FULL, 0); 1000].into());
    let config = ProducerConfig { retry_for: Duration::from_millis(200), ..ProducerConfig::default() };
    let producer = connected(&broker).await.producer(TOPIC, config).await.unwrap();
    let error = producer.send(&value("a"), None).await.unwrap().await.unwrap_err();
    assert!(matches!(&error, ClientError::GaveUp { .. }), "{error}");
    assert_eq!(error.code(), Some(ErrorCode::DISK_FULL));
}

#[tokio::test]
async fn send_waits_while_the_buffer_is_full() {
    let broker = FakeBroker::start(1).await;
    broker.with(|state| state.produce_faults.push_back(Fault::Silence));
    let config = ProducerConfig { buffer_bytes: 1000, linger: Duration::ZERO, ..ProducerConfig::default() };
    let mut client_config = config_with_timeout(&broker, Duration::from_millis(300));
    client_config.retry_for = Duration::from_secs(20);
    let producer = Client::connect(client_config).await.unwrap().producer(TOPIC, config).await.unwrap();
    let large = "x".repeat(700);
    producer.send(&value(&large), None).await.unwrap();
    let second = tokio::time::timeout(Duration::from_millis(100), producer.send(&value(&large), None)).await;
    assert!(second.is_err(), "the buffer has room for one");
    // Larger than the whole buffer: goes in once that is empty.
    let huge = "y".repeat(5000);
    producer.send(&value(&huge), None).await.unwrap().await.unwrap();
    assert_eq!(broker.with(|state| state.records(0)).last().unwrap().1, huge);
}

fn config_with_timeout(broker: &FakeBroker, request_timeout: Duration) -> ClientConfig {
    ClientConfig { request_timeout, ..config(broker) }
}

#[tokio::test]
async fn records_that_fit_no_batch_are_refused_at_once() {
    let broker = FakeBroker::start(1).await;
    let producer = connected(&broker).await.producer(TOPIC, ProducerConfig::default()).await.unwrap();
    let error = producer.send(&value(&"x".repeat(2 << 20)), None).await.unwrap_err();
    assert!(matches!(error, ClientError::Record(PushError::TooLarge { .. })));
    let error = producer.send(&value("x"), Some(1)).await.unwrap_err();
    assert!(matches!(error, ClientError::NoPartition { partition: 1, .. }));
}

#[tokio::test]
async fn a_dropped_producer_still_sends_what_it_took() {
    let broker = FakeBroker::start(1).await;
    let config = ProducerConfig { linger: Duration::from_secs(60), ..ProducerConfig::default() };
    let producer = connected(&broker).await.producer(TOPIC, config).await.unwrap();
    let delivery = producer.send(&value("a"), None).await.unwrap();
    drop(producer);
    assert_eq!(delivery.await.unwrap().offset, Offset(0));
}

#[tokio::test]
async fn a_consumer_goes_on_where_it_was_after_failures() {
    let broker = FakeBroker::start(1).await;
    let client = connected(&broker).await;
    broker.with(|state| {
        state.append(&batch(0, &["a", "b"]));
        state.fetch_faults.extend([Fault::DropBefore, Fault::Refuse(ErrorCode::SERVER_BUSY, 5), Fault::DropAfter]);
    });
    let mut consumer = consume(&client, 0, StartAt::Earliest).await;
    assert_eq!(events(&mut consumer).await, ["0=a", "1=b", "end 2"]);
    broker.with(|state| {
        state.fetch_faults.extend([Fault::DropAfter, Fault::DropBefore]);
        state.append(&batch(0, &["c"]));
    });
    assert_eq!(events(&mut consumer).await, ["2=c", "end 3"]);
}

#[tokio::test]
async fn a_start_inside_a_batch_leaves_out_what_is_before() {
    let broker = FakeBroker::start(1).await;
    let client = connected(&broker).await;
    broker.with(|state| state.append(&batch(0, &["a", "b", "c"])));
    let mut consumer = consume(&client, 0, StartAt::Offset(Offset(2))).await;
    assert_eq!(events(&mut consumer).await, ["2=c", "end 3"]);
    let mut consumer = consume(&client, 0, StartAt::Latest).await;
    assert_eq!(events(&mut consumer).await, ["end 3"]);
    broker.with(|state| state.append(&batch(0, &["d"])));
    assert_eq!(events(&mut consumer).await, ["3=d", "end 4"]);
}

#[tokio::test]
async fn a_partition_that_always_fails_does_not_slow_the_others_of_its_shard() {
    let broker = FakeBroker::start(3).await;
    let client = connected(&broker).await;
    broker.with(|state| {
        state.sick.insert(0, ErrorCode::INTERNAL);
        for number in 0..200 {
            state.append(&batch(2, &[&number.to_string()]));
        }
    });
    // One batch a fetch.
    let config = ConsumerConfig { fetch_bytes: 1, ..ConsumerConfig::default() };
    let starts = [0, 2].map(|partition| (partition, StartAt::Offset(Offset(0)))).to_vec();
    let mut consumer = client.consumer(TOPIC, starts, config).await.unwrap();
    let mut batches = 0;
    while batches < 200 {
        let event = tokio::time::timeout(Duration::from_secs(60), consumer.next()).await.unwrap();
        batches += usize::from(matches!(event.unwrap(), ConsumerEvent::Batch(_)));
    }
    let (sick, sound) = broker.with(|state| (state.fetched[&0], state.fetched[&2]));
    assert!(sick * 3 < sound, "{sick} of {sound} fetches asked for the partition that fails");
    // And it comes back.
    broker.with(|state| {
        state.sick.clear();
        state.append(&batch(0, &["well"]));
    });
    loop {
        let event = tokio::time::timeout(Duration::from_secs(60), consumer.next()).await.unwrap().unwrap();
        if matches!(event, ConsumerEvent::Batch(batch) if batch.partition == 0) {
            break;
        }
    }
}

#[tokio::test]
async fn gaps_damage_and_lost_ranges_are_told() {
    let broker = FakeBroker::start(1).await;
    let client = connected(&broker).await;
    broker.with(|state| {
        state.append(&batch(0, &["a"]));
        state.next_offset.insert(0, 10);
        state.append(&batch(0, &["b"]));
        state.append(&batch(0, &["damaged"]));
        state.append(&batch(0, &["c"]));
        state.log.get_mut(&0).unwrap()[2][130] ^= 1;
        state.gaps.insert(0, Gap { from: Offset(1), to: Offset(10), reason: GapReason::LostMemory });
    });
    let mut consumer = consume(&client, 0, StartAt::Earliest).await;
    let seen = events(&mut consumer).await;
    assert_eq!(seen[..3], ["0=a", "gap 1..10 LostMemory", "10=b"]);
    assert!(seen[3].starts_with("bad at 11: batch CRC mismatch"), "{seen:?}");
    assert_eq!(seen[4..], ["12=c", "end 13"]);

    broker.with(|state| state.log_start.insert(0, 12));
    let mut consumer = consume(&client, 0, StartAt::Offset(Offset(3))).await;
    assert_eq!(events(&mut consumer).await, ["3 is now 12", "12=c", "end 13"]);
    let mut consumer = consume(&client, 0, StartAt::Offset(Offset(99))).await;
    assert_eq!(events(&mut consumer).await, ["99 is now 13", "end 13"]);
}

#[tokio::test]
async fn a_direct_port_is_used_and_the_common_one_when_it_is_down() {
    let broker = FakeBroker::start(2).await;
    let (up, (_held, down)) = (broker.direct_port().await, unused_port());
    broker.with(|state| state.direct_ports = vec![up, down]);
    let client = connected(&broker).await;
    let direct = client.connection_for(TOPIC, 0).await.unwrap();
    assert_eq!(direct.address(), format!("127.0.0.1:{up}"));
    let common = client.connection_for(TOPIC, 1).await.unwrap();
    assert_eq!(common.address(), broker.address.to_string());
    let without = ClientConfig { use_direct_ports: false, ..config(&broker) };
    let client = Client::connect(without).await.unwrap();
    assert_eq!(client.connection_for(TOPIC, 0).await.unwrap().address(), broker.address.to_string());
}

/// A port that refuses connections, and is nobody else's as long as the socket lives.
fn unused_port() -> (TcpSocket, u16) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = socket.local_addr().unwrap().port();
    (socket, port)
}

#[tokio::test]
async fn topics_and_offsets_survive_a_lost_connection() {
    let broker = FakeBroker::start(2).await;
    let client = connected(&broker).await;
    broker.with(|state| {
        state.append(&batch(1, &["a"]));
        state.other_faults.extend([Fault::DropBefore, Fault::Refuse(ErrorCode::UNAVAILABLE, 0)]);
    });
    assert_eq!(client.list_topics().await.unwrap().len(), 1);
    broker.with(|state| state.other_faults.extend([Fault::DropAfter, Fault::DropBefore]));
    let offsets = client.offsets(TOPIC).await.unwrap();
    assert_eq!(offsets.partitions[1].log_end, Offset(1));
    assert_eq!(client.create_topic(NewTopic::new(TOPIC)).await.unwrap().topic_id, TOPIC_ID);
    let error = client.topic("nothing").await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::TOPIC_NOT_FOUND));
}

#[tokio::test]
async fn all_topics_come_page_by_page() {
    let broker = FakeBroker::start(1).await;
    let client = connected(&broker).await;
    broker.with(|state| {
        state.more_topics = (0..25).map(|number| format!("t{number:02}")).collect();
        state.page_max = 4;
    });
    let names: Vec<_> = client.list_topics().await.unwrap().into_iter().map(|topic| topic.name).collect();
    assert!(names.len() == 26 && names.is_sorted_by(|one, next| one < next), "{names:?}");
    // A server that goes in circles.
    broker.with(|state| state.in_circles = true);
    let error = client.list_topics().await.unwrap_err();
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
}
