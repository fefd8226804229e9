//! Clients that ask for more than they may have, take nothing, come in crowds, or vanish; and producers that are faster
//! than the disk. Memory stays within its bound and others go on.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ringmain_core::ids::Durability;
use ringmain_core::limits::{CONNECTION_REQUESTS_MAX, FETCH_BYTES_MAX};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::fetch::FetchRequest;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::metadata::MetadataRequest;

use crate::support::*;

const MIB: u64 = 1 << 20;
/// What a broker of one shard may have beside 1.1 times its memory: receive buffers (64 MiB), copies for replies (32 MiB),
/// reads from disk (32 MiB), disk buffers (16 MiB), program, threads and allocator.
const RESIDENT_CONSTANT: u64 = 192 * MIB;

fn assert_bounded(broker: &Broker, memory: u64) {
    let (has, max) = (broker.resident_bytes(), memory / 10 * 11 + RESIDENT_CONSTANT);
    println!(
        "resident: {} MiB, of them beside the memory budget: {}",
        has / MIB,
        has.saturating_sub(memory / 10 * 11) / MIB
    );
    assert!(has <= max, "{has} bytes are resident, {max} may be");
}

/// A round takes milliseconds, and some seconds where memory must first be taken from others; the machine may be busy.
const ROUND_MAX: Duration = Duration::from_secs(15);

/// Watches the resident bytes until it is told to end; fails when they pass the bound.
struct Watch(Arc<AtomicBool>, Option<std::thread::JoinHandle<u64>>);

impl Watch {
    fn start(broker: &Broker) -> Self {
        let (stop, pid) = (Arc::new(AtomicBool::new(false)), broker.pid());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut most = 0;
            while !stopped.load(Ordering::Relaxed) {
                most = most.max(resident_bytes(pid));
                std::thread::sleep(Duration::from_millis(10));
            }
            most
        });
        Self(stop, Some(thread))
    }

    fn finish(mut self, memory: u64) {
        self.0.store(true, Ordering::Relaxed);
        let most = self.1.take().unwrap().join().unwrap();
        let beside = most.saturating_sub(memory / 10 * 11);
        println!("most resident: {} MiB, beside 1.1 x memory: {} MiB", most / MIB, beside / MIB);
        assert!(beside <= RESIDENT_CONSTANT, "{} MiB beside 1.1 times the memory", beside / MIB);
    }
}

#[test]
fn requests_past_the_limit_are_refused_and_the_others_answered() {
    let place = Place::new();
    let broker = place.start(1, "64MiB");
    let healthy = Healthy::start(&broker);
    let topic = broker.topic("waiting", 1);
    let mut client = broker.client();
    let count = CONNECTION_REQUESTS_MAX + 76;
    for _ in 0..count {
        client.request(&Request::Fetch(fetch_request(topic.topic_id, 0, 0, 3000)), &[]);
    }
    let (mut refused, mut answered) = (0, 0);
    for _ in 0..count {
        match client.receive().expect("the connection lives").1 {
            Response::Error(error) => {
                assert_eq!(error.code, ErrorCode::TOO_MANY_REQUESTS);
                refused += 1;
            }
            Response::Fetch(outcomes) => {
                assert!(outcomes[0].code.is_ok());
                answered += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((answered, refused), (CONNECTION_REQUESTS_MAX, 76));
    client.metadata(&[]);
    healthy.finish(ROUND_MAX);
    broker.stop();
}

/// Produces `mib` batches of a MiB each and waits until all are flushed, so that the oldest leave memory.
fn fill(broker: &Broker, topic: &ringmain_wire::metadata::TopicMetadata, mib: usize) {
    let mut client = broker.client();
    let value = Random(7).bytes(1 << 20);
    for _ in 0..mib {
        let bytes = batch(topic.topic_id, 0, &[&value[..(1 << 20) - 1000]]);
        while !client.produce(Durability::Flushed, &bytes)[0].code.is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn largest_fetch(topic: &ringmain_wire::metadata::TopicMetadata, offset: u64) -> FetchRequest {
    FetchRequest { bytes_max: FETCH_BYTES_MAX as u32, ..fetch_request(topic.topic_id, 0, offset, 0) }
}

#[test]
fn clients_that_never_read_are_closed_when_others_need_the_memory() {
    let place = Place::new();
    let mut broker = place.start(1, "32MiB");
    let topic = broker.topic("unread", 1);
    fill(&broker, &topic, 80);
    let healthy = Healthy::start(&broker);
    let watch = Watch::start(&broker);
    // From disk and from memory; those from disk are more than there is memory for one copy each.
    let mut silent: Vec<Client> = (0..64).map(|_| broker.client()).collect();
    for (number, client) in silent.iter_mut().enumerate() {
        let offset = if number % 2 == 0 { 0 } else { 70 };
        for _ in 0..200 {
            client.request(&Request::Fetch(largest_fetch(&topic, offset)), &[]);
        }
    }
    // A reader that does read gets everything, from disk; each of its fetches is answered before its patience ends.
    let (mut reader, mut offset) = (broker.client(), 0);
    while offset < 80 {
        let (outcomes, payload) = reader.fetch(largest_fetch(&topic, offset));
        assert!(outcomes[0].code.is_ok(), "{outcomes:?}");
        assert!(!records(&payload).is_empty());
        offset = outcomes[0].next_offset.0;
    }
    wait_for("a reason", || broker.log().contains("unread replies hold memory that is short").then_some(()));
    broker.assert_well();
    watch.finish(32 * MIB);
    healthy.finish(ROUND_MAX);
    drop(silent);
    wait_for("all pins are gone", || (broker.metric("ringmain_pinned_bytes") == 0.0).then_some(()));
    broker.stop();
}

#[test]
fn small_requests_with_large_answers_do_not_pile_up_for_a_client_that_never_reads() {
    let place = Place::new();
    let broker = place.start(1, "64MiB");
    broker.topic("wide", 10_000);
    let watch = Watch::start(&broker);
    let mut silent: Vec<Client> = (0..4).map(|_| broker.client()).collect();
    // A large frame first: its buffer then takes thousands of small ones at once.
    let large = vec![0u8; 2 << 20];
    let ask = frame(&Request::Metadata(MetadataRequest::default()), 1, &[]);
    let many = [frame(&Request::Metadata(MetadataRequest::default()), 1, &large), ask.repeat(3000)].concat();
    for client in &mut silent {
        client.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
        // Cut when the broker does not read on, which is right.
        let _ = client.stream.write_all(&many);
    }
    let healthy = Healthy::start(&broker);
    std::thread::sleep(Duration::from_secs(2));
    healthy.finish(ROUND_MAX);
    watch.finish(64 * MIB);
    drop(silent);
    broker.stop();
}

#[test]
fn idle_and_stalled_connections_leave_memory_and_room_for_others() {
    let place = Place::new();
    let mut broker = place.start(1, "64MiB");
    let idle: Vec<Client> = (0..1000).map(|_| broker.client()).collect();
    let watch = Watch::start(&broker);
    // 200 frames of 4 MiB, each of which stalls before its end: what they announce is far more than receive buffers may
    // have.
    let stalled: Vec<Client> = (0..200).map(|_| stall(&broker, 60_000)).collect();
    let healthy = Healthy::with_values(&broker, "large", 300 * 1024);
    let rounds = healthy.finish(ROUND_MAX);
    println!("{rounds} rounds beside 1000 idle and 200 stalled connections");
    watch.finish(64 * MIB);
    assert_bounded(&broker, 64 * MIB);
    broker.assert_well();
    drop((idle, stalled));
    wait_for("all are gone", || (broker.metric("ringmain_connections") == 0.0).then_some(()));
    broker.stop();
}

/// A client that has sent so much of a frame of 4 MiB and no more.
fn stall(broker: &Broker, bytes: usize) -> Client {
    let mut client = broker.client();
    client.send(&((4u32 << 20) + 4).to_le_bytes());
    client.send(&vec![1; bytes]);
    client
}

#[test]
fn unfinished_frames_that_hold_the_receive_memory_are_given_up() {
    let place = Place::new();
    let mut broker = place.start(1, "32MiB");
    // 25 times 3 MiB have really been sent.
    let stalled: Vec<Client> = (0..25).map(|_| stall(&broker, 3 << 20)).collect();
    let healthy = Healthy::with_values(&broker, "large", 300 * 1024);
    wait_for("a reason", || broker.log().contains("unfinished frame holds memory that is short").then_some(()));
    healthy.finish(ROUND_MAX);
    broker.assert_well();
    drop(stalled);
    broker.stop();
}

#[test]
fn more_large_producers_than_receive_memory_has_room_for_all_get_their_turn() {
    let place = Place::new();
    let broker = place.start(1, "64MiB");
    let topic = broker.topic("crowded", 1);
    let value = Random(3).bytes(1 << 20);
    // 50 frames of 2 MiB are more than the 64 MiB for receive buffers.
    let bytes = batch(topic.topic_id, 0, &[&value[..(1 << 20) - 64], &value[..900_000]]);
    let request = Arc::new(bytes);
    let threads: Vec<_> = (0..50)
        .map(|_| {
            let (mut client, request) = (broker.client(), Arc::clone(&request));
            std::thread::spawn(move || {
                let mut acked = 0;
                while acked < 4 {
                    let outcome = client.produce(Durability::Memory, &request).remove(0);
                    match outcome.code {
                        ErrorCode::OK => acked += 1,
                        ErrorCode::SERVER_BUSY => std::thread::sleep(Duration::from_millis(50)),
                        other => panic!("{other:?}: {outcome:?}"),
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("each producer gets its turn");
    }
    assert!(!broker.log().contains("connection closed"), "{}", broker.log());
    broker.stop();
}

#[test]
fn connections_that_open_and_close_leave_nothing_behind() {
    let place = Place::new();
    let mut broker = place.start(2, "64MiB");
    let healthy = Healthy::start(&broker);
    let files = || std::fs::read_dir(format!("/proc/{}/fd", broker.pid())).unwrap().count();
    let before = files();
    let greeting = frame(&hello(1), 1, &[]);
    for number in 0..5000 {
        let mut stream = TcpStream::connect(broker.address).unwrap();
        match number % 4 {
            0 => {}
            1 => stream.write_all(&greeting[..7]).unwrap(),
            // Closed with the answer unread: a reset.
            _ => stream.write_all(&greeting).unwrap(),
        }
    }
    wait_for("only the healthy pair is left", || (broker.metric("ringmain_connections") == 2.0).then_some(()));
    wait_for("their files are closed", || (files() <= before + 4).then_some(()));
    broker.assert_well();
    healthy.finish(ROUND_MAX);
    broker.stop();
}

#[test]
fn producers_faster_than_the_disk_are_slowed_or_refused_and_nothing_acked_is_lost() {
    let place = Place::new();
    let mut broker = place.start(1, "32MiB");
    let topic = broker.topic("flood", 1);
    let healthy = {
        let watch = Watch::start(&broker);
        let (acked, busy) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let until = Instant::now() + Duration::from_secs(3);
        let threads: Vec<_> = (0..6u64)
            .map(|producer| {
                let (mut client, id) = (broker.client(), topic.topic_id);
                let (acked, busy) = (Arc::clone(&acked), Arc::clone(&busy));
                std::thread::spawn(move || {
                    let mut ledger = BTreeMap::new();
                    let mut value = Random(producer).bytes(900_000);
                    for round in 0u64.. {
                        if Instant::now() > until {
                            break;
                        }
                        value[..16].copy_from_slice(&[producer.to_le_bytes(), round.to_le_bytes()].concat());
                        let outcome = client.produce(Durability::Memory, &batch(id, 0, &[&value, b"tail"])).remove(0);
                        match outcome.code {
                            ErrorCode::OK => {
                                acked.fetch_add(1, Ordering::Relaxed);
                                ledger.insert(outcome.base_offset.0, value[..16].to_vec());
                            }
                            ErrorCode::SERVER_BUSY => {
                                busy.fetch_add(1, Ordering::Relaxed);
                                assert!(outcome.retry_after_ms > 0, "{outcome:?}");
                                std::thread::sleep(Duration::from_millis(outcome.retry_after_ms.into()));
                            }
                            other => panic!("{other:?}: {outcome:?}"),
                        }
                    }
                    ledger
                })
            })
            .collect();
        let mut ledger = BTreeMap::new();
        for thread in threads {
            ledger.extend(thread.join().unwrap());
        }
        watch.finish(32 * MIB);
        let (acked, busy) = (acked.load(Ordering::Relaxed), busy.load(Ordering::Relaxed));
        println!("{acked} acked, {busy} refused for a while");
        assert!(acked * 900_000 > 2 * 32 * MIB, "only {acked} were acked: no flood");
        // By itself it is ready for more at once.
        let healthy = Healthy::start(&broker);
        let (mut reader, mut offset, mut found) = (broker.client(), 0, BTreeMap::new());
        while offset < acked * 2 {
            let (outcomes, payload) = reader.fetch(largest_fetch(&topic, offset));
            assert!(outcomes[0].code.is_ok() && outcomes[0].gap.is_none(), "{outcomes:?}");
            for (offset, value) in records(&payload).into_iter().filter(|(offset, _)| offset % 2 == 0) {
                found.insert(offset, value[..16].to_vec());
            }
            offset = outcomes[0].next_offset.0;
        }
        assert!(found == ledger, "{} records of {} acked came back", found.len(), ledger.len());
        healthy
    };
    healthy.finish(ROUND_MAX);
    broker.assert_well();
    broker.stop();
}

#[test]
fn tiny_batches_cost_no_more_than_their_budget() {
    let place = Place::new();
    let broker = place.start(1, "64MiB");
    let topic = broker.topic("tiny", 1);
    let watch = Watch::start(&broker);
    let mut client = broker.client();
    let one = batch(topic.topic_id, 0, &[b"x"]);
    let frame = frame(&produce_request(Durability::Flushed), 1, &one.repeat(1000));
    let until = Instant::now() + Duration::from_secs(3);
    let mut sent = 0;
    while Instant::now() < until {
        for _ in 0..20 {
            client.send(&frame);
        }
        for _ in 0..20 {
            assert!(matches!(client.receive().unwrap().1, Response::Produce(_)));
        }
        sent += 20_000;
    }
    println!("{sent} tiny batches");
    watch.finish(64 * MIB);
    broker.stop();
}
