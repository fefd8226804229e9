//! Bytes that are no frames, frames at the wrong time, and frames that were tampered with.

use std::net::Shutdown;
use std::time::Duration;

use ringmain_core::ids::Durability;
use ringmain_core::limits::FRAME_BYTES_MAX;
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::hello::PROTOCOL_VERSION;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::metadata::MetadataRequest;
use ringmain_wire::offsets::OffsetsRequest;
use ringmain_wire::topic::{CreateTopicRequest, DeleteTopicRequest};

use crate::support::*;

/// A healthy round takes milliseconds; the machine may be busy.
const ROUND_MAX: Duration = Duration::from_secs(15);

/// A valid request whose answer says that the connection lives.
fn probe() -> Vec<u8> {
    frame(&Request::Metadata(MetadataRequest { topics: vec!["?".into()], ..MetadataRequest::default() }), u64::MAX, &[])
}

fn with_healthy(test: impl FnOnce(&mut Broker)) {
    let place = Place::new();
    let mut broker = place.start(1, "64MiB");
    let healthy = Healthy::start(&broker);
    test(&mut broker);
    broker.assert_well();
    healthy.finish(ROUND_MAX);
    broker.stop();
}

#[test]
fn garbage_closes_its_connection_with_a_reason_in_the_log() {
    with_healthy(|broker| {
        let mut random = Random(1);
        for size in [1, 3, 4, 5, 12, 100, 10_000, 100_000] {
            let mut client = Client::raw(broker.address);
            let mut bytes = random.bytes(size);
            // No size that a frame may have.
            bytes.iter_mut().take(4).for_each(|byte| *byte |= 0x81);
            // The broker may close before all is sent.
            let _ = std::io::Write::write_all(&mut client.stream, &bytes);
            let _ = client.stream.shutdown(Shutdown::Write);
            client.assert_closed();
        }
        wait_for("a reason", || broker.log().contains("connection closed: frame of").then_some(()));
    });
}

#[test]
fn sizes_past_the_limit_or_none_at_all_close_the_connection_before_memory_is_taken() {
    with_healthy(|broker| {
        let before = broker.resident_bytes();
        for size in [0, 1, 7, 9, FRAME_BYTES_MAX as u32 + 4, FRAME_BYTES_MAX as u32 + 12, u32::MAX - 3, u32::MAX] {
            let mut client = broker.client();
            client.send(&size.to_le_bytes());
            client.assert_closed();
        }
        assert!(broker.resident_bytes() < before + (32 << 20));
    });
}

#[test]
fn a_frame_that_is_cut_by_the_end_of_the_stream_is_dropped() {
    with_healthy(|broker| {
        let topic = broker.topic("cut", 1);
        let bytes = batch(topic.topic_id, 0, &[&[7; 5000]]);
        let whole = frame(&produce_request(Durability::Memory), 9, &bytes);
        for cut in [1, 3, 4, 8, 11, 40, whole.len() - 8, whole.len() - 1] {
            let mut client = broker.client();
            client.send(&whole[..cut]);
            client.stream.shutdown(Shutdown::Write).unwrap();
            client.assert_closed();
        }
        let (outcomes, _) = broker.client().fetch(fetch_request(topic.topic_id, 0, 0, 0));
        assert_eq!(outcomes[0].log_end.0, 0, "a cut frame was carried out");
    });
}

#[test]
fn a_frame_that_comes_byte_by_byte_is_answered_when_it_is_whole() {
    with_healthy(|broker| {
        let mut client = broker.client();
        let whole = frame(&Request::Metadata(MetadataRequest::default()), 77, &[]);
        for byte in &whole {
            client.send(&[*byte]);
            std::thread::sleep(Duration::from_millis(20));
        }
        let (id, response, _) = client.receive().unwrap();
        assert_eq!(id, 77);
        assert!(matches!(response, Response::Metadata(_)), "{response:?}");
    });
}

#[test]
fn a_version_that_is_too_old_is_refused_and_a_newer_one_gets_this_one() {
    with_healthy(|broker| {
        let mut client = Client::raw(broker.address);
        let error = client.refused(&hello(0), &[]);
        assert_eq!(error.code, ErrorCode::UNSUPPORTED, "{error:?}");
        client.assert_closed();
        let mut client = Client::raw(broker.address);
        match client.ask(&hello(PROTOCOL_VERSION + 6)) {
            Response::Hello(hello) => assert_eq!(hello.protocol_version, PROTOCOL_VERSION),
            other => panic!("{other:?}"),
        }
        client.metadata(&[]);
    });
}

#[test]
fn a_connection_that_does_not_begin_with_a_hello_is_closed() {
    with_healthy(|broker| {
        let mut client = Client::raw(broker.address);
        let error = client.refused(&Request::Metadata(MetadataRequest::default()), &[]);
        assert_eq!(error.code, ErrorCode::BAD_REQUEST);
        client.assert_closed();
        // Also when the first frame is of a kind that nobody knows.
        let mut client = Client::raw(broker.address);
        client.send(&unknown_kind());
        let (_, response, _) = client.receive().expect("an answer before the end");
        assert!(matches!(response, Response::Error(_)), "{response:?}");
        client.assert_closed();
    });
}

#[test]
fn a_second_hello_is_refused_and_the_connection_lives() {
    with_healthy(|broker| {
        let mut client = broker.client();
        assert_eq!(client.refused(&hello(PROTOCOL_VERSION), &[]).code, ErrorCode::BAD_REQUEST);
        client.metadata(&[]);
    });
}

/// A metadata request whose union says a kind that is not in the schema.
fn unknown_kind() -> Vec<u8> {
    let bytes = frame(&Request::Metadata(MetadataRequest::default()), 5, &[]);
    let kind = ringmain_wire::schema::Body::MetadataRequest.0;
    // The one byte whose change to an unknown kind leaves a frame with an unknown kind.
    let candidates = (8..bytes.len()).filter(|&at| bytes[at] == kind);
    let changed = candidates.map(|at| {
        let mut changed = bytes.clone();
        changed[at] = 200;
        changed
    });
    let is_it =
        |frame: &Vec<u8>| ringmain_wire::FrameView::parse(frame).is_ok_and(|view| view.message.body_type().0 == 200);
    changed.into_iter().find(is_it).expect("one of the bytes is the kind")
}

#[test]
fn an_unknown_kind_and_a_response_in_place_of_a_request_are_unsupported_and_the_connection_lives() {
    with_healthy(|broker| {
        let mut client = broker.client();
        client.send(&unknown_kind());
        match client.receive() {
            Some((5, Response::Error(error), _)) => assert_eq!(error.code, ErrorCode::UNSUPPORTED),
            other => panic!("{other:?}"),
        }
        let mut response = Vec::new();
        let error = ringmain_wire::message::ErrorResponse::new(ErrorCode::INTERNAL, "x");
        ringmain_wire::message::encode_error(&mut ringmain_wire::FrameEncoder::new(), 6, &error, &mut response);
        client.send(&response);
        match client.receive() {
            Some((6, Response::Error(error), _)) => assert_eq!(error.code, ErrorCode::UNSUPPORTED),
            other => panic!("{other:?}"),
        }
        client.metadata(&[]);
    });
}

/// Every kind of request, valid, for a topic that exists.
fn samples(broker: &Broker) -> Vec<Vec<u8>> {
    let topic = broker.topic("mutated", 2);
    let id = topic.topic_id;
    let batches = [batch(id, 0, &[b"one", b"two"]), batch(id, 1, &[b"three"])].concat();
    let fetch = FetchRequestOf { topic: id }.request();
    vec![
        frame(&produce_request(Durability::Memory), 1, &batches),
        frame(&produce_request(Durability::Flushed), 2, &batches),
        frame(&Request::Fetch(fetch), 3, &[]),
        frame(
            &Request::Metadata(MetadataRequest {
                topics: vec!["mutated".into(), "x".into()],
                ..MetadataRequest::default()
            }),
            4,
            &[],
        ),
        frame(&Request::Offsets(OffsetsRequest { topic_id: id, partitions: vec![0, 1] }), 5, &[]),
        frame(&Request::CreateTopic(CreateTopicRequest::new("mutated")), 6, &[]),
        frame(&Request::DeleteTopic(DeleteTopicRequest { name: "nothing".into() }), 7, &[]),
        frame(&hello(PROTOCOL_VERSION), 8, &[]),
    ]
}

struct FetchRequestOf {
    topic: ringmain_core::ids::TopicId,
}

impl FetchRequestOf {
    fn request(&self) -> ringmain_wire::fetch::FetchRequest {
        let mut request = fetch_request(self.topic, 0, 0, 1);
        request.partitions.push(fetch_partition(self.topic, 1, 1));
        request
    }
}

/// Changes a frame in a few random places; where asked to, its batch gets a right CRC again, so that the change is
/// looked at by what is behind the CRC.
fn mutate(random: &mut Random, valid: &[u8]) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for _ in 0..=random.below(4) {
        let at = 4 + random.below(bytes.len() - 4);
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            3 => {
                let at = at / 4 * 4;
                let value = [0u32, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX, bytes.len() as u32][random.below(6)];
                bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
            4 => {
                let from = 4 + random.below(bytes.len() - 4);
                let count = random.below(16).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + count, at);
            }
            _ => bytes[at] = bytes[at].wrapping_add(4),
        }
    }
    if random.below(2) == 0 {
        reseal(&mut bytes);
    }
    bytes
}

/// Gives the first batch of a produce frame a right CRC.
fn reseal(frame: &mut [u8]) {
    let message = u32::from_le_bytes(frame[4..8].try_into().unwrap()) as usize;
    let payload = (8usize.saturating_add(message)).next_multiple_of(8);
    if frame.len() < payload.saturating_add(96) {
        return;
    }
    let batch = &mut frame[payload..];
    let size = (u32::from_le_bytes(batch[..4].try_into().unwrap()) as usize).min(batch.len());
    if size >= 96 {
        ringmain_core::batch::seal_crc(&mut batch[..size]);
    }
}

/// Sends `count` mutated frames; a connection that the broker has closed is replaced. Gives how many were closed.
fn send_mutated(broker: &mut Broker, seed: u64, count: usize) -> usize {
    let samples = samples(broker);
    let mut random = Random(seed);
    let mut client = broker.client();
    let mut closed = 0;
    for sent in 0..count {
        let sample = &samples[random.below(samples.len())];
        let bytes = mutate(&mut random, sample);
        // A valid request behind it, whose answer says that the connection lives.
        let probe = probe();
        let written = std::io::Write::write_all(&mut client.stream, &[bytes, probe].concat());
        let lives = written.is_ok()
            && loop {
                match client.try_receive_id() {
                    Some(u64::MAX) => break true,
                    Some(_) => {}
                    None => break false,
                }
            };
        if !lives {
            closed += 1;
            client = broker.client();
        }
        if sent % 1000 == 0 {
            broker.assert_well();
        }
    }
    broker.assert_well();
    closed
}

#[test]
fn mutated_frames_break_nothing() {
    with_healthy(|broker| {
        let closed = send_mutated(broker, 20_261_201, 3000);
        assert!(closed > 0 && closed < 3000, "{closed} of 3000 connections closed");
    });
}

/// Long; run by hand: `RINGMAIN_FUZZ_FRAMES=100000 cargo test --test limits fuzz -- --ignored`.
#[test]
#[ignore = "long"]
fn fuzz_with_many_mutated_frames() {
    let number = |name: &str, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (seed, count) = (number("RINGMAIN_FUZZ_SEED", 1), number("RINGMAIN_FUZZ_FRAMES", 100_000));
    with_healthy(|broker| {
        let closed = send_mutated(broker, seed, count as usize);
        println!("seed {seed}: {count} frames, {closed} connections closed");
    });
}

/// Hand-laid messages that the verifier lets pass or should not: the broker reads them without harm.
#[test]
fn hostile_flatbuffers_break_nothing() {
    with_healthy(|broker| {
        let topic = broker.topic("hostile", 1);
        let valid = frame(&Request::Fetch(fetch_request(topic.topic_id, 0, 0, 0)), 3, &[]);
        // Every aligned word of the message in turn points, or counts, to every other place: tables that overlap, vectors
        // that overlap, a vtable inside a table.
        let message_bytes = u32::from_le_bytes(valid[4..8].try_into().unwrap()) as usize;
        let mut client = broker.client();
        for at in (8..8 + message_bytes - 3).step_by(4) {
            for target in (0..message_bytes).step_by(8) {
                let mut bytes = valid.clone();
                let offset = (8 + target) as i64 - at as i64;
                bytes[at..at + 4].copy_from_slice(&(offset as i32).to_le_bytes());
                let probe = probe();
                let written = std::io::Write::write_all(&mut client.stream, &[bytes, probe].concat());
                let lives = written.is_ok()
                    && loop {
                        match client.try_receive_id() {
                            Some(u64::MAX) => break true,
                            Some(_) => {}
                            None => break false,
                        }
                    };
                if !lives {
                    client = broker.client();
                }
            }
        }
    });
}

/// A batch whose table is hostile under a right CRC is stored, if at all, exactly as it was sent: the broker writes to
/// the header only, never through the table.
#[test]
fn a_hostile_batch_that_passes_comes_back_byte_for_byte() {
    with_healthy(|broker| {
        let topic = broker.topic("overlap", 1);
        let valid = batch(topic.topic_id, 0, &[b"12345678", b"abcdefgh"]);
        let mut client = broker.client();
        let (mut stored, mut refused) = (Vec::new(), 0);
        for at in (96..valid.len()).step_by(2) {
            for delta in [-32i16, -16, -8, -4, -2, 2, 4, 8, 16, 32] {
                let mut bytes = valid.clone();
                let word = i16::from_le_bytes([bytes[at], bytes[at + 1]]).wrapping_add(delta);
                bytes[at..at + 2].copy_from_slice(&word.to_le_bytes());
                ringmain_core::batch::seal_crc(&mut bytes);
                let outcome = client.produce(Durability::Memory, &bytes).remove(0);
                match outcome.code {
                    ErrorCode::OK => stored.push((outcome.base_offset.0, bytes)),
                    ErrorCode::INVALID_BATCH | ErrorCode::TOO_LARGE => refused += 1,
                    other => panic!("{other:?}: {outcome:?}"),
                }
            }
        }
        assert!(refused > 100 && !stored.is_empty(), "{} stored, {refused} refused", stored.len());
        for (offset, sent) in stored {
            let mut request = fetch_request(topic.topic_id, 0, offset, 0);
            request.bytes_max = 1;
            let (_, payload) = client.fetch(request);
            assert_eq!(payload.len(), sent.len());
            assert!(payload[32..] == sent[32..], "the batch at offset {offset} was changed behind its stamp");
        }
    });
}
