//! Idempotent producers over real sockets: what is sent again is stored once, after kills, restarts and the loss of the arena,
//! and what was lost is taken anew.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ringmain_core::ids::{Durability, PartitionKey, TopicId};
use ringmain_core::limits::PRODUCER_WINDOW_BATCHES;
use ringmain_wire::ErrorCode;
use ringmain_wire::batch_builder::BatchBuilder;
use ringmain_wire::client::{
    Client, ClientConfig, Connection, ConsumerConfig, ConsumerEvent, NewTopic, Producer, ProducerConfig,
    ProducerIdentity, StartAt, TopicAlteration,
};
use ringmain_wire::message::{Request, Response};
use ringmain_wire::produce::{ProduceOutcome, ProduceRequest};
use ringmain_wire::record::NewRecord;
use support::broker::{Broker, Home};
use support::load::impatient_client;
use support::random::Random;
use support::{LIMIT, number_from_env, run, wait_for};

const TOPIC: &str = "numbered";
const LEVELS: [Durability; 3] = [Durability::Memory, Durability::Flushed, Durability::Synced];
const ONE_SHARD: &[&str] = &["--shards", "1", "--memory", "64MiB"];

fn make_topic(broker: &Broker, partitions: u32) -> TopicId {
    run(async {
        let client = impatient_client(&broker.broker).await;
        client.create_topic(NewTopic { partitions, ..NewTopic::new(TOPIC.to_owned()) }).await.unwrap().topic_id
    })
}

/// A batch of `records` records whose values tell their sequence.
fn batch(topic: TopicId, producer: (u64, u16), base_sequence: u32, records: u32) -> Vec<u8> {
    let mut builder = BatchBuilder::new(PartitionKey { topic, partition: 0 });
    builder.set_producer(producer.0, producer.1, base_sequence);
    for record in 0..records {
        let value = base_sequence.wrapping_add(record).to_string();
        builder.push(&NewRecord { value: Some(value.as_bytes()), ..NewRecord::default() }).unwrap();
    }
    builder.finish().to_vec()
}

/// Sends the very bytes of a batch.
async fn send_on(connection: &Connection, batch: &[u8], level: Durability) -> ProduceOutcome {
    let request = Request::Produce(ProduceRequest { durability: Some(level), timeout_ms: 30_000 });
    match connection.request(&request, vec![batch.to_vec().into()]).await.unwrap().response {
        Response::Produce(mut outcomes) => outcomes.remove(0),
        other => panic!("{other:?}"),
    }
}

fn send(broker: &Broker, batch: &[u8], level: Durability) -> ProduceOutcome {
    run(async {
        let client = impatient_client(&broker.broker).await;
        send_on(&client.any_connection().await.unwrap(), batch, level).await
    })
}

/// A batch that must be taken, now or as a duplicate of what is at `offset`.
fn ok(broker: &Broker, batch: &[u8], level: Durability, offset: u64, duplicate: bool) -> ProduceOutcome {
    let outcome = send(broker, batch, level);
    assert!(outcome.code.is_ok() && outcome.level >= level, "{outcome:?}");
    assert_eq!((outcome.base_offset.0, outcome.duplicate), (offset, duplicate), "{outcome:?}");
    outcome
}

fn refused(broker: &Broker, batch: &[u8], code: ErrorCode) -> ProduceOutcome {
    let outcome = send(broker, batch, Durability::Memory);
    assert_eq!(outcome.code, code, "{outcome:?}");
    outcome
}

/// All values of each partition, in order.
fn values(broker: &Broker, partitions: u32) -> Vec<Vec<String>> {
    run(async {
        let client = impatient_client(&broker.broker).await;
        let ends = client.offsets(TOPIC).await.unwrap();
        let starts = (0..partitions).map(|partition| (partition, StartAt::Earliest)).collect();
        let mut consumer = client.consumer(TOPIC, starts, ConsumerConfig::default()).await.unwrap();
        let mut values = vec![Vec::new(); partitions as usize];
        let mut next = vec![0; partitions as usize];
        while ends.partitions.iter().any(|ends| next[ends.partition as usize] < ends.log_end.0) {
            match tokio::time::timeout(LIMIT, consumer.next()).await.unwrap().unwrap() {
                ConsumerEvent::Batch(batch) => {
                    for record in batch.records() {
                        let value = String::from_utf8(record.value.unwrap().to_vec()).unwrap();
                        values[batch.partition as usize].push(value);
                        next[batch.partition as usize] = record.offset.0 + 1;
                    }
                }
                ConsumerEvent::Gap { partition, to, .. } => next[partition as usize] = to.0,
                ConsumerEvent::CaughtUp { .. } => {}
                event => panic!("{event:?}"),
            }
        }
        values
    })
}

fn numbers(to: u32) -> Vec<String> {
    (0..to).map(|number| number.to_string()).collect()
}

#[test]
fn a_frame_that_is_sent_again_is_stored_once_and_acked_at_the_level_it_asks_for() {
    let home = Home::new(ONE_SHARD);
    let broker = home.start();
    let topic = make_topic(&broker, 1);
    let batches: Vec<_> = (0..4).map(|number| batch(topic, (7, 0), number * 10, 10)).collect();
    for (number, batch) in batches.iter().enumerate() {
        ok(&broker, batch, Durability::Memory, number as u64 * 10, false);
    }
    let again = ok(&broker, &batches[1], Durability::Flushed, 10, true);
    assert!(again.flushed_end.0 >= 20, "{again:?}");
    let again = ok(&broker, &batches[1], Durability::Synced, 10, true);
    assert!(again.synced_end.0 >= 20, "{again:?}");
    let again = ok(&broker, &batches[3], Durability::Synced, 30, true);
    assert_eq!(again.synced_end.0, 40, "{again:?}");
    for level in LEVELS {
        for (number, batch) in batches.iter().enumerate() {
            ok(&broker, batch, level, number as u64 * 10, true);
        }
    }
    // Sixteen copies of one batch at once, of which one is stored.
    let fifth = batch(topic, (7, 0), 40, 5);
    let outcomes = run(async {
        let client = impatient_client(&broker.broker).await;
        let connection = client.any_connection().await.unwrap();
        let copies = (0..16).map(|copy| {
            let (connection, fifth) = (connection.clone(), fifth.clone());
            tokio::spawn(async move { send_on(&connection, &fifth, LEVELS[copy % 3]).await })
        });
        let mut outcomes = Vec::new();
        for copy in copies.collect::<Vec<_>>() {
            outcomes.push(copy.await.unwrap());
        }
        outcomes
    });
    assert!(outcomes.iter().all(|outcome| outcome.code.is_ok() && outcome.base_offset.0 == 40), "{outcomes:?}");
    assert_eq!(outcomes.iter().filter(|outcome| !outcome.duplicate).count(), 1);
    assert_eq!(values(&broker, 1), [numbers(45)]);
    assert_eq!(broker.metric("ringmain_produced_batches_total"), 5);
    assert!(broker.metric("ringmain_duplicate_batches_total") >= 30);
    broker.stop();
}

#[test]
fn what_does_not_follow_is_refused_with_what_is_next() {
    let home = Home::default();
    let broker = home.start();
    let topic = make_topic(&broker, 1);
    refused(&broker, &batch(topic, (7, 0), 3, 1), ErrorCode::OUT_OF_SEQUENCE);
    for number in 0..8 {
        ok(&broker, &batch(topic, (7, 0), number, 1), Durability::Memory, number.into(), false);
    }
    assert_eq!(refused(&broker, &batch(topic, (7, 0), 9, 1), ErrorCode::OUT_OF_SEQUENCE).next_sequence, 8);
    assert_eq!(refused(&broker, &batch(topic, (7, 0), 2, 1), ErrorCode::SEQUENCE_UNKNOWN).next_sequence, 8);
    // The same sequence with other records is no duplicate.
    assert_eq!(refused(&broker, &batch(topic, (7, 0), 6, 2), ErrorCode::SEQUENCE_UNKNOWN).next_sequence, 8);
    // Without an id nothing is looked at.
    for number in 0..2 {
        ok(&broker, &batch(topic, (0, 0), 99, 1), Durability::Memory, 8 + number, false);
    }
    assert_eq!(broker.metric("ringmain_sequence_refusals_total"), 4);
    broker.stop();
}

#[test]
fn a_zombie_is_fenced_after_every_kind_of_end() {
    let home = Home::default();
    let mut broker = home.start();
    let topic = make_topic(&broker, 1);
    ok(&broker, &batch(topic, (7, 3), 0, 1), Durability::Synced, 0, false);
    ok(&broker, &batch(topic, (7, 4), 0, 1), Durability::Synced, 1, false);
    for end in 0..4 {
        for sequence in 0..2 {
            let outcome = refused(&broker, &batch(topic, (7, 3), sequence, 1), ErrorCode::PRODUCER_FENCED);
            assert_eq!(outcome.producer_epoch, 4);
        }
        match end {
            0 => broker.kill(),
            1 => broker.stop(),
            _ => {
                broker.kill();
                home.delete_arena();
            }
        }
        broker = home.start();
    }
    ok(&broker, &batch(topic, (7, 4), 0, 1), Durability::Memory, 1, true);
    broker.stop();
}

#[test]
fn windows_outlive_kills_and_clean_stops() {
    let home = Home::new(ONE_SHARD);
    let mut broker = home.start();
    let topic = make_topic(&broker, 1);
    let mut sent: Vec<Vec<u8>> = Vec::new();
    for life in 0..9 {
        for (at, level) in [Durability::Memory, LEVELS[life % 3], Durability::Memory].into_iter().enumerate() {
            let number = sent.len() as u32;
            sent.push(batch(topic, (7, 0), number, 1));
            ok(&broker, &sent[sent.len() - 1], level, number.into(), false);
            // Some of them again at once.
            if at == life % 3 {
                ok(&broker, &sent[sent.len() - 1], level, number.into(), true);
            }
        }
        if life % 4 == 3 {
            broker.stop();
        } else {
            broker.kill();
        }
        broker = home.start();
        let first = sent.len().saturating_sub(PRODUCER_WINDOW_BATCHES);
        for (number, batch) in sent.iter().enumerate().skip(first) {
            ok(&broker, batch, LEVELS[(number + life) % 3], number as u64, true);
        }
        if first > 0 {
            refused(&broker, &sent[first - 1], ErrorCode::SEQUENCE_UNKNOWN);
        }
    }
    assert_eq!(values(&broker, 1), [numbers(sent.len() as u32)]);
    broker.stop();
}

#[test]
fn without_the_arena_what_was_flushed_is_recognised_and_what_was_lost_is_stored_anew() {
    let home = Home::new(ONE_SHARD);
    let mut broker = home.start();
    let topic = make_topic(&broker, 1);
    let mut sequence = 0;
    let (mut epoch, mut lost_batches) = (0_u64, 0);
    // What is acked `memory` is flushed within a second by itself: not each kill takes it.
    while lost_batches < 4 {
        epoch += 1;
        assert!(epoch < 40, "no kill has taken anything");
        let next = |sequence: &mut u32| {
            *sequence += 2;
            batch(topic, (7, 0), *sequence - 2, 2)
        };
        let kept: Vec<_> = (0..3).map(|_| next(&mut sequence)).collect();
        let lost: Vec<_> = (0..2).map(|_| next(&mut sequence)).collect();
        let mut kept_at = Vec::new();
        for batch in &kept {
            kept_at.push(send(&broker, batch, LEVELS[1 + (epoch % 2) as usize]).base_offset.0);
        }
        let before: Vec<_> = lost.iter().map(|batch| send(&broker, batch, Durability::Memory)).collect();
        broker.kill();
        home.delete_arena();
        broker = home.start();
        for (batch, at) in kept.iter().zip(&kept_at) {
            ok(&broker, batch, LEVELS[(epoch % 3) as usize], *at, true);
        }
        for (batch, before) in lost.iter().zip(before) {
            assert!(before.code.is_ok());
            let outcome = send(&broker, batch, Durability::Memory);
            assert!(outcome.code.is_ok(), "{outcome:?}");
            if outcome.duplicate {
                assert_eq!(outcome.base_offset, before.base_offset);
            } else {
                lost_batches += 1;
                assert_eq!(u64::from(outcome.leader_epoch.0), epoch);
                assert!(outcome.base_offset.0 >= 1 << 32, "{outcome:?}");
            }
            let again = send(&broker, batch, Durability::Flushed);
            assert!(again.code.is_ok() && again.duplicate && again.base_offset == outcome.base_offset, "{again:?}");
        }
    }
    assert_eq!(values(&broker, 1), [numbers(sequence)]);
    // Who gives lost records up may go on behind them, once.
    let (last, behind) = (batch(topic, (7, 0), sequence, 1), batch(topic, (7, 0), sequence + 5, 1));
    assert!(send(&broker, &last, Durability::Memory).code.is_ok());
    broker.kill();
    home.delete_arena();
    let broker = home.start();
    let outcome = send(&broker, &behind, Durability::Memory);
    assert!(outcome.code.is_ok() && !outcome.duplicate, "{outcome:?}");
    refused(&broker, &batch(topic, (7, 0), sequence + 9, 1), ErrorCode::OUT_OF_SEQUENCE);
    let again = send(&broker, &last, Durability::Memory);
    assert!(again.duplicate || again.code == ErrorCode::SEQUENCE_UNKNOWN, "{again:?}");
    broker.stop();
}

#[test]
fn windows_outlive_their_segments_and_their_records() {
    let home = Home::new(&["--shards", "1", "--memory", "64MiB", "--segment-bytes", "32MiB"]);
    let mut broker = home.start();
    let topic = make_topic(&broker, 2);
    let first = batch(topic, (7, 0), 0, 3);
    ok(&broker, &first, Durability::Synced, 0, false);
    for round in 0..2 {
        // The other partition fills segments.
        run(async {
            let client = impatient_client(&broker.broker).await;
            let change = TopicAlteration { retention_bytes: Some(Some(8 * 1024 * 1024)), ..TopicAlteration::default() };
            client.alter_topic(TOPIC, change).await.unwrap();
            let producer = client.producer(TOPIC, ProducerConfig::default()).await.unwrap();
            let mut random = Random(5 + round);
            for _ in 0..80 {
                let value = random.bytes(1_000_000);
                producer.send(&NewRecord { value: Some(&value), ..NewRecord::default() }, Some(1)).await.unwrap();
            }
            producer.close().await.unwrap();
        });
        wait_for("retention", || {
            let offsets = run(async { impatient_client(&broker.broker).await.offsets(TOPIC).await.unwrap() });
            (offsets.partitions[0].log_start.0 == 3).then_some(())
        });
        ok(&broker, &first, Durability::Synced, 0, true);
        broker.kill();
        if round == 1 {
            home.delete_arena();
        }
        broker = home.start();
        ok(&broker, &first, Durability::Synced, 0, true);
    }
    // A topic made anew is another one.
    broker.ok(&["topic", "delete", TOPIC]);
    let again = make_topic(&broker, 1);
    assert_ne!(again, topic);
    ok(&broker, &batch(again, (7, 0), 0, 3), Durability::Memory, 0, false);
    broker.stop();
}

/// A way to the broker that can be cut, and that outlives it.
struct Proxy {
    address: String,
    shared: Arc<ProxyShared>,
}

#[derive(Default)]
struct ProxyShared {
    target: Mutex<Option<SocketAddr>>,
    open: Mutex<Vec<TcpStream>>,
    cuts: AtomicU64,
    ended: AtomicBool,
}

impl Proxy {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(ProxyShared::default());
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if accepting.ended.load(Ordering::Relaxed) {
                    return;
                }
                let target = *accepting.target.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(server) = target.and_then(|target| TcpStream::connect(target).ok()) else { continue };
                let mut open = accepting.open.lock().unwrap_or_else(PoisonError::into_inner);
                for (from, to) in [(&stream, &server), (&server, &stream)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || copy(from, to));
                }
                open.extend([stream, server]);
            }
        });
        Self { address, shared }
    }

    fn to(&self, broker: &Broker) {
        *self.shared.target.lock().unwrap() = Some(broker.broker.parse().unwrap());
    }

    /// Ends all connections wherever they are, in the middle of a frame too.
    fn cut(&self) {
        for stream in self.shared.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.shared.cuts.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(&self.address);
        for stream in self.shared.open.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = [0; 1500];
    while let Ok(bytes) = from.read(&mut buffer) {
        if bytes == 0 || to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

fn client_config(address: &str) -> ClientConfig {
    ClientConfig { use_direct_ports: false, retry_for: LIMIT, ..ClientConfig::new(vec![address.to_owned()]) }
}

/// Sends numbers to all partitions until it is told to stop; gives how many of each, and how often batches came twice.
async fn send_numbers(
    address: String,
    level: Durability,
    partitions: u32,
    stop: Arc<AtomicBool>,
    acked: Arc<AtomicU64>,
) -> (u32, u64) {
    let client = Client::connect(client_config(&address)).await.unwrap();
    let config = ProducerConfig {
        durability: Some(level),
        batch_bytes: 700,
        linger: Duration::from_micros(200),
        buffer_bytes: 64 * 1024,
        retry_for: LIMIT,
        ..ProducerConfig::default()
    };
    let producer = client.producer(TOPIC, config).await.unwrap();
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        for partition in 0..partitions {
            let value = format!("{level}-{number}");
            let record = NewRecord { value: Some(value.as_bytes()), ..NewRecord::default() };
            let delivery = producer.send(&record, Some(partition)).await.unwrap();
            let acked = Arc::clone(&acked);
            tokio::spawn(async move {
                if delivery.await.is_ok() {
                    acked.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        number += 1;
    }
    let stats = producer.close().await.unwrap();
    assert_eq!((stats.records_acked, stats.records_failed), (u64::from(number * partitions), 0));
    (number, stats.duplicates)
}

/// `RINGMAIN_KILL_ROUNDS` sets how many ends there are.
#[test]
fn cut_connections_and_kills_leave_every_record_once_and_in_order() {
    const PARTITIONS: u32 = 3;
    let rounds = number_from_env("RINGMAIN_KILL_ROUNDS", 12);
    let mut random = Random(number_from_env("RINGMAIN_SEED", 11));
    let home = Home::default();
    let mut broker = home.start();
    make_topic(&broker, PARTITIONS);
    let proxy = Proxy::start();
    proxy.to(&broker);
    let (stop, acked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let senders = LEVELS.map(|level| {
        let (address, stop, acked) = (proxy.address.clone(), Arc::clone(&stop), Arc::clone(&acked));
        std::thread::spawn(move || run(send_numbers(address, level, PARTITIONS, stop, acked)))
    });
    for round in 0..rounds {
        let wanted = acked.load(Ordering::Relaxed) + random.within(100..3000);
        wait_for("acks", || (acked.load(Ordering::Relaxed) >= wanted).then_some(()));
        match round % 4 {
            0 | 2 => proxy.cut(),
            1 => {
                broker.kill();
                broker = home.start();
                proxy.to(&broker);
            }
            _ => {
                broker.stop();
                broker = home.start();
                proxy.to(&broker);
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    let sent: Vec<(u32, u64)> = senders.into_iter().map(|sender| sender.join().unwrap()).collect();
    // Else nothing of it was tried.
    assert!(sent.iter().map(|(_, duplicates)| duplicates).sum::<u64>() > 0, "no batch came twice");
    for (partition, values) in values(&broker, PARTITIONS).into_iter().enumerate() {
        for (level, (count, _)) in LEVELS.iter().zip(&sent) {
            let prefix = format!("{level}-");
            let mine: Vec<&str> = values.iter().filter_map(|value| value.strip_prefix(&prefix)).collect();
            let expected: Vec<String> = numbers(*count);
            assert_eq!(mine.len(), expected.len(), "partition {partition}, {level}");
            assert!(mine == expected, "partition {partition}, {level}: out of order");
        }
    }
    broker.stop();
}

async fn producer(client: &Client, identity: Option<ProducerIdentity>) -> Producer {
    let config = ProducerConfig { identity, ..ProducerConfig::default() };
    client.producer(TOPIC, config).await.unwrap()
}

async fn send_one(producer: &Producer, value: &str) -> Result<u64, Option<ErrorCode>> {
    let record = NewRecord { value: Some(value.as_bytes()), ..NewRecord::default() };
    let delivery = producer.send(&record, Some(0)).await.unwrap();
    delivery.await.map(|delivered| delivered.offset.0).map_err(|error| error.code())
}

#[test]
fn a_client_goes_on_when_the_broker_has_lost_what_it_had_acked() {
    // What is acked `memory` is flushed within a second by itself: not each kill takes all of it.
    let mut attempts = 0;
    while !loses_all() {
        attempts += 1;
        assert!(attempts < 40, "no kill has taken everything");
    }
}

/// Kills a broker behind a producer's acks. False when something of them is left.
fn loses_all() -> bool {
    let home = Home::new(ONE_SHARD);
    let broker = home.start();
    make_topic(&broker, 1);
    let proxy = Proxy::start();
    proxy.to(&broker);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let producer = runtime.block_on(async {
        let client = Client::connect(client_config(&proxy.address)).await.unwrap();
        let producer = producer(&client, None).await;
        for number in 0..10 {
            assert_eq!(send_one(&producer, &number.to_string()).await, Ok(number));
        }
        producer
    });
    // Everything it has sent is lost, and the broker does not know it any more.
    broker.kill();
    home.delete_arena();
    let broker = home.start();
    if values(&broker, 1) != [numbers(0)] {
        return false;
    }
    broker.kill();
    let broker = home.start();
    proxy.to(&broker);
    runtime.block_on(async {
        assert_eq!(send_one(&producer, "0").await, Ok(1 << 32));
        assert_eq!(send_one(&producer, "1").await, Ok((1 << 32) + 1));
        assert_eq!(producer.identity().unwrap().epoch, 1);
        producer.close().await.unwrap();
    });
    assert_eq!(values(&broker, 1), [numbers(2)]);
    broker.stop();
    true
}

#[test]
fn a_second_instance_of_a_producer_fences_the_first() {
    let home = Home::default();
    let broker = home.start();
    make_topic(&broker, 1);
    run(async {
        let client = Client::connect(client_config(&broker.broker)).await.unwrap();
        let first = producer(&client, Some(ProducerIdentity { id: 77, epoch: 0 })).await;
        assert_eq!(send_one(&first, "0").await, Ok(0));
        let second = producer(&client, Some(ProducerIdentity { id: 77, epoch: 1 })).await;
        assert_eq!(send_one(&second, "1").await, Ok(1));
        for _ in 0..2 {
            assert_eq!(send_one(&first, "zombie").await, Err(Some(ErrorCode::PRODUCER_FENCED)));
        }
        assert_eq!(send_one(&second, "2").await, Ok(2));
    });
    assert_eq!(values(&broker, 1), [numbers(3)]);
    broker.stop();
}
