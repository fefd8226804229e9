//! Requests that are frames but ask for what can't be: each gets its code, and the connection goes on.

use std::time::{Duration, Instant};

use ringmain_core::batch::{FLAG_SPARSE, seal_crc};
use ringmain_core::ids::{Durability, TopicId};
use ringmain_core::limits::{BATCH_BYTES_MAX, FETCH_PARTITIONS_MAX, PRODUCE_BATCHES_MAX};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::fetch::FetchRequest;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::offsets::OffsetsRequest;

use crate::support::*;

/// A changed batch whose CRC is right again.
fn resealed(valid: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    change(&mut bytes);
    seal_crc(&mut bytes);
    bytes
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

/// Where the entries of a batch made by `BatchBuilder` start: behind the body.
fn entries_at(valid: &[u8]) -> usize {
    let body = u32::from_le_bytes(valid[124..128].try_into().unwrap()) as usize;
    (128 + body).next_multiple_of(4) + 4
}

#[test]
fn a_batch_that_is_wrong_gets_its_code_and_its_neighbours_are_stored() {
    let place = Place::new();
    let mut broker = place.start(2, "64MiB");
    let healthy = Healthy::start(&broker);
    let topic = broker.topic("wrong", 1);
    let id = topic.topic_id;
    let good = batch(id, 0, &[b"first", b"second"]);
    let entries = entries_at(&good);
    let cases: Vec<(&str, ErrorCode, Vec<u8>)> = vec![
        ("unknown topic", ErrorCode::TOPIC_NOT_FOUND, batch(TopicId(987_654), 0, &[b"x"])),
        ("unknown partition", ErrorCode::PARTITION_NOT_FOUND, batch(id, 1, &[b"x"])),
        ("partition past all numbers", ErrorCode::PARTITION_NOT_FOUND, batch(id, u32::MAX, &[b"x"])),
        ("wrong CRC", ErrorCode::CORRUPT_BATCH, {
            let mut bytes = good.clone();
            bytes[130] ^= 1;
            bytes
        }),
        ("ends that fall", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| put(bytes, entries, 12))),
        ("an end past the body", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| put(bytes, entries + 20, 12))),
        (
            "a last end before the body's",
            ErrorCode::INVALID_BATCH,
            resealed(&good, |bytes| put(bytes, entries + 20, 10)),
        ),
        ("a key longer than its record", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| put(bytes, entries + 4, 6))),
        (
            "a key of all bytes there are",
            ErrorCode::INVALID_BATCH,
            resealed(&good, |bytes| put(bytes, entries + 4, u32::MAX)),
        ),
        (
            "headers longer than their record",
            ErrorCode::INVALID_BATCH,
            resealed(&good, |bytes| bytes[entries + 17] = 1),
        ),
        ("an unknown flag of a record", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| bytes[entries + 18] = 4)),
        ("more records than entries", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| put(bytes, 36, 3))),
        ("fewer records than entries", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| put(bytes, 36, 1))),
        ("another size of the body", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| put(bytes, 68, 7))),
        ("an unknown codec", ErrorCode::UNSUPPORTED, resealed(&good, |bytes| bytes[54] = 9)),
        ("a codec that its body has not", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| bytes[54] = 1)),
        ("the flag sparse", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| bytes[55] = FLAG_SPARSE)),
        ("an unknown flag", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| bytes[55] = 0x80)),
        ("a table of no bytes", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| put(bytes, 96, 0))),
        ("a table larger than the batch", ErrorCode::INVALID_BATCH, resealed(&good, |bytes| put(bytes, 96, u32::MAX))),
    ];
    for wrong_port in [false, true] {
        let mut client = Client::connect(broker.direct(&topic, 0, wrong_port));
        for (what, code, bytes) in &cases {
            let outcomes = client.produce(Durability::Memory, &[&good[..], bytes, &good].concat());
            let codes: Vec<_> = outcomes.iter().map(|outcome| outcome.code).collect();
            assert_eq!(codes, [ErrorCode::OK, *code, ErrorCode::OK], "{what}: {outcomes:?}");
            assert_eq!(outcomes[2].base_offset.0, outcomes[0].base_offset.0 + 2, "{what}");
        }
    }
    broker.assert_well();
    healthy.finish(Duration::from_secs(15));
    broker.stop();
}

#[test]
fn a_payload_that_is_wrong_is_refused_as_a_whole() {
    let place = Place::new();
    let broker = place.start(1, "64MiB");
    let healthy = Healthy::start(&broker);
    let topic = broker.topic("payload", 1);
    let good = batch(topic.topic_id, 0, &[b"value"]);
    let changed = |at: usize, value: u32| {
        let mut bytes = good.clone();
        put(&mut bytes, at, value);
        [&good[..], &bytes].concat()
    };
    let oversized = (BATCH_BYTES_MAX + 8) as u32;
    let cases: Vec<(&str, ErrorCode, Vec<u8>)> = vec![
        ("nothing", ErrorCode::BAD_REQUEST, Vec::new()),
        ("a cut batch", ErrorCode::INVALID_BATCH, [&good[..], &good[..good.len() - 8]].concat()),
        ("a cut header", ErrorCode::INVALID_BATCH, [&good[..], &good[..88]].concat()),
        ("an oversized batch", ErrorCode::TOO_LARGE, changed(0, oversized)),
        ("a batch of no bytes", ErrorCode::INVALID_BATCH, changed(0, 0)),
        ("a batch of all bytes there are", ErrorCode::TOO_LARGE, changed(0, u32::MAX - 7)),
        ("no records", ErrorCode::INVALID_BATCH, changed(36, 0)),
        ("more records than any batch has", ErrorCode::INVALID_BATCH, changed(36, u32::MAX)),
        ("another version", ErrorCode::UNSUPPORTED, changed(4, 9)),
        ("spare bytes", ErrorCode::INVALID_BATCH, changed(84, 1)),
        ("too many batches", ErrorCode::TOO_LARGE, good.repeat(PRODUCE_BATCHES_MAX + 1)),
    ];
    let mut client = broker.client();
    for (what, code, payload) in &cases {
        let error = client.refused(&produce_request(Durability::Memory), payload);
        assert_eq!(error.code, *code, "{what}: {error:?}");
    }
    // A record that is larger than any may be, in a batch that is not.
    let large = vec![7u8; 600 * 1024];
    let two = batch(topic.topic_id, 0, &[&large, &large]);
    let one = resealed(&two, |bytes| {
        let entries = entries_at(bytes);
        put(bytes, entries, 0);
    });
    let outcome = client.produce(Durability::Memory, &one).remove(0);
    assert_eq!(outcome.code, ErrorCode::TOO_LARGE, "{outcome:?}");
    let most = client.produce(Durability::Memory, &good.repeat(PRODUCE_BATCHES_MAX));
    assert!(most.iter().all(|outcome| outcome.code.is_ok()));
    let (outcomes, _) = client.fetch(fetch_request(topic.topic_id, 0, 0, 0));
    assert_eq!(outcomes[0].log_end.0, PRODUCE_BATCHES_MAX as u64, "something refused was stored");
    healthy.finish(Duration::from_secs(15));
    broker.stop();
}

#[test]
fn a_fetch_that_asks_for_too_much_or_the_wrong_thing_gets_its_code() {
    let place = Place::new();
    let broker = place.start(2, "64MiB");
    let healthy = Healthy::start(&broker);
    let topic = broker.topic("fetched", 4);
    let id = topic.topic_id;
    for wrong_port in [false, true] {
        let mut client = Client::connect(broker.direct(&topic, 0, wrong_port));
        let payload = [batch(id, 0, &[b"a", b"b"]), batch(id, 0, &[b"c"])].concat();
        let first = client.produce(Durability::Memory, &payload)[0].base_offset.0;
        let end = first + 3;
        // Errors come at once, however long the fetch may wait.
        let began = Instant::now();
        for (offset, partition, topic, code) in [
            (end + 1, 0, id, ErrorCode::OUT_OF_RANGE),
            (u64::MAX, 0, id, ErrorCode::OUT_OF_RANGE),
            (0, 4, id, ErrorCode::PARTITION_NOT_FOUND),
            (0, u32::MAX, id, ErrorCode::PARTITION_NOT_FOUND),
            (0, 0, TopicId(987_654), ErrorCode::TOPIC_NOT_FOUND),
        ] {
            let (outcomes, payload) = client.fetch(fetch_request(topic, partition, offset, 30_000));
            assert_eq!((outcomes[0].code, payload.len()), (code, 0), "{outcomes:?}");
        }
        // One wrong partition does not hide the others.
        let mut request = fetch_request(id, 0, first, 30_000);
        request.partitions.insert(0, fetch_partition(id, 77, 0));
        let (outcomes, payload) = client.fetch(request);
        assert_eq!(outcomes[0].code, ErrorCode::PARTITION_NOT_FOUND);
        assert_eq!(records(&payload).len(), 3);
        assert!(began.elapsed() < Duration::from_secs(10), "an error waited");
        // A batch larger than the budget is sent nevertheless, also when the budget is nothing.
        for bytes_max in [0, 1] {
            let (outcomes, payload) = client.fetch(FetchRequest { bytes_max, ..fetch_request(id, 0, first, 30_000) });
            assert_eq!((records(&payload).len(), outcomes[0].next_offset.0), (2, first + 2));
        }
        // More than fits is asked for as the least: the budget being used up ends the wait.
        let least = FetchRequest { bytes_min: u32::MAX, bytes_max: 200, ..fetch_request(id, 0, first, 30_000) };
        assert_eq!(records(&client.fetch(least).1).len(), 2);
        assert!(began.elapsed() < Duration::from_secs(20), "a fetch waited for more than it may have");
    }
    let mut client = broker.client();
    let many =
        |count| FetchRequest { partitions: vec![fetch_partition(id, 0, 0); count], ..fetch_request(id, 0, 0, 0) };
    let error = client.refused(&Request::Fetch(many(FETCH_PARTITIONS_MAX + 1)), &[]);
    assert_eq!(error.code, ErrorCode::TOO_LARGE);
    let error = client.refused(&Request::Fetch(many(0)), &[]);
    assert_eq!(error.code, ErrorCode::BAD_REQUEST);
    assert_eq!(client.fetch(many(FETCH_PARTITIONS_MAX)).0.len(), FETCH_PARTITIONS_MAX);
    let shards: std::collections::BTreeSet<u16> = topic.partitions.iter().map(|partition| partition.shard).collect();
    assert_eq!(shards.len(), 2);
    let mut both = fetch_request(id, 0, 0, 0);
    both.partitions.extend((1..4).map(|partition| fetch_partition(id, partition, 0)));
    assert_eq!(client.refused(&Request::Fetch(both), &[]).code, ErrorCode::BAD_REQUEST);
    let offsets = Request::Offsets(OffsetsRequest { topic_id: id, partitions: vec![0, 9] });
    match client.ask(&offsets) {
        Response::Offsets(offsets) => {
            let codes: Vec<_> = offsets.partitions.iter().map(|partition| partition.code).collect();
            assert_eq!(codes, [ErrorCode::OK, ErrorCode::PARTITION_NOT_FOUND]);
        }
        other => panic!("{other:?}"),
    }
    let unknown = Request::Offsets(OffsetsRequest { topic_id: TopicId(987_654), partitions: Vec::new() });
    assert_eq!(client.refused(&unknown, &[]).code, ErrorCode::TOPIC_NOT_FOUND);
    healthy.finish(Duration::from_secs(15));
    broker.stop();
}

#[test]
fn a_longer_wait_than_allowed_is_cut_and_does_not_outlive_its_client() {
    let place = Place::new();
    let broker = place.start(2, "64MiB");
    let topic = broker.topic("long", 1);
    for wrong_port in [false, true] {
        let mut clients: Vec<Client> = (0..20).map(|_| Client::connect(broker.direct(&topic, 0, wrong_port))).collect();
        for client in &mut clients {
            for _ in 0..10 {
                client.request(&Request::Fetch(fetch_request(topic.topic_id, 0, 0, u32::MAX)), &[]);
            }
        }
        wait_for("all are parked", || (broker.metric("ringmain_parked_fetches") == 200.0).then_some(()));
        // Long polls of others do not keep a produce from the shared hops.
        let healthy = Healthy::start_on(&broker, &format!("beside-{wrong_port}"));
        healthy.finish(Duration::from_secs(15));
        drop(clients);
        wait_for("none is parked any more", || (broker.metric("ringmain_parked_fetches") == 0.0).then_some(()));
        wait_for("the connections are gone", || (broker.metric("ringmain_connections") <= 2.0).then_some(()));
    }
    broker.stop();
}
