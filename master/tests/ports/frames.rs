//! The frames port.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::time::Duration;

use ringmain_core::ids::{Durability, TopicId};
use ringmain_core::topic::{TopicAlteration, TopicSettings};
use ringmain_wire::frame::{FRAME_PREFIX_BYTES, FrameView, frame_bytes};
use ringmain_wire::hello::{HelloRequest, PROTOCOL_VERSION};
use ringmain_wire::message::{Request, Response};
use ringmain_wire::metadata::MetadataRequest;
use ringmain_wire::offsets::OffsetsRequest;
use ringmain_wire::topic::{AlterTopicRequest, CreateTopicRequest, DeleteTopicRequest};
use ringmain_wire::{ErrorCode, FrameError};

use crate::fake::{Running, master};

fn connect(running: &Running) -> TcpStream {
    let stream = TcpStream::connect(running.master.addresses().frames).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// A connection that has said hello.
fn greeted(running: &Running) -> TcpStream {
    let mut stream = connect(running);
    assert!(matches!(ask(&mut stream, &hello()), Response::Hello(_)));
    stream
}

fn hello() -> Request {
    Request::Hello(HelloRequest { protocol_version: PROTOCOL_VERSION, ..HelloRequest::default() })
}

fn receive(stream: &mut TcpStream) -> Vec<u8> {
    let mut frame = vec![0; FRAME_PREFIX_BYTES];
    stream.read_exact(&mut frame).unwrap();
    let bytes = frame_bytes(frame[..].try_into().unwrap()).unwrap();
    frame.resize(FRAME_PREFIX_BYTES + bytes, 0);
    stream.read_exact(&mut frame[FRAME_PREFIX_BYTES..]).unwrap();
    frame
}

fn decode(frame: &[u8]) -> (u64, Response) {
    let view = FrameView::parse_response(frame).unwrap();
    (view.correlation_id(), Response::decode(&view.message).unwrap())
}

fn ask(stream: &mut TcpStream, request: &Request) -> Response {
    stream.write_all(&request.to_frame(7)).unwrap();
    let (correlation_id, response) = decode(&receive(stream));
    assert_eq!(correlation_id, 7);
    response
}

fn error_code(response: &Response) -> ErrorCode {
    match response {
        Response::Error(error) => error.code,
        other => panic!("no error: {other:?}"),
    }
}

fn closed(mut stream: TcpStream) -> bool {
    matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_))
}

#[test]
fn a_topic_is_made_seen_and_deleted() {
    let running = master();
    let mut stream = connect(&running);
    let hello = HelloRequest { protocol_version: 99, ..HelloRequest::default() };
    let Response::Hello(hello) = ask(&mut stream, &Request::Hello(hello)) else { panic!() };
    assert_eq!((hello.protocol_version, hello.cluster_id), (PROTOCOL_VERSION, running.master.cluster_id()));

    let new = CreateTopicRequest {
        partitions: 3,
        settings: TopicSettings { durability_default: Durability::Synced, ..TopicSettings::default() },
        ..CreateTopicRequest::new("orders")
    };
    let Response::Topic(made) = ask(&mut stream, &Request::CreateTopic(new.clone())) else { panic!() };
    assert_eq!((made.topic.topic_id, made.topic.stores, made.topic.partitions.len()), (TopicId(1), 2, 3));
    assert_eq!(error_code(&ask(&mut stream, &Request::CreateTopic(new))), ErrorCode::TOPIC_EXISTS);

    let request =
        MetadataRequest { topics: vec!["orders".to_owned(), "none".to_owned()], ..MetadataRequest::default() };
    let Response::Metadata(metadata) = ask(&mut stream, &Request::Metadata(request)) else { panic!() };
    assert_eq!((metadata.version, metadata.brokers[0].host.as_str()), (made.version, "broker.example"));
    assert_eq!(metadata.topic("orders").unwrap(), &made.topic);
    assert_eq!(metadata.topics[1].code, ErrorCode::TOPIC_NOT_FOUND);
    let request = MetadataRequest { topics: Vec::new(), known_version: metadata.version, ..MetadataRequest::default() };
    let Response::Metadata(same) = ask(&mut stream, &Request::Metadata(request)) else { panic!() };
    assert!(same.topics.is_empty());

    let change = TopicAlteration { retention_ms: Some(Some(60_000)), ..TopicAlteration::default() };
    let alter = Request::AlterTopic(AlterTopicRequest { name: "orders".to_owned(), change });
    let Response::Topic(made) = ask(&mut stream, &alter) else { panic!() };
    assert_eq!(made.topic.settings.retention_ms, Some(60_000));
    let change = TopicAlteration { retention_ms: Some(Some(1)), ..change };
    let alter = Request::AlterTopic(AlterTopicRequest { name: "orders".to_owned(), change });
    assert_eq!(error_code(&ask(&mut stream, &alter)), ErrorCode::BAD_REQUEST);

    let delete = Request::DeleteTopic(DeleteTopicRequest { name: "orders".to_owned() });
    let Response::Topic(deleted) = ask(&mut stream, &delete) else { panic!() };
    assert_eq!((deleted.topic, deleted.version), (made.topic, made.version + 1));
    assert!(running.broker.topics.lock().unwrap().is_empty());
    assert_eq!(error_code(&ask(&mut stream, &delete)), ErrorCode::TOPIC_NOT_FOUND);
    running.master.stop();
}

#[test]
fn what_belongs_to_a_broker_is_unsupported_and_the_connection_goes_on() {
    let running = master();
    let mut stream = greeted(&running);
    let offsets = Request::Offsets(OffsetsRequest { topic_id: TopicId(1), partitions: Vec::new() });
    for _ in 0..2 {
        assert_eq!(error_code(&ask(&mut stream, &offsets)), ErrorCode::UNSUPPORTED);
    }
    let mut out = Vec::new();
    let mut encoder = ringmain_wire::FrameEncoder::new();
    Request::DeleteTopic(DeleteTopicRequest { name: "a".to_owned() }).encode(&mut encoder, 9, 8, &mut out);
    out.extend([0; 8]);
    stream.write_all(&out).unwrap();
    let (correlation_id, response) = decode(&receive(&mut stream));
    assert_eq!((correlation_id, error_code(&response)), (9, ErrorCode::UNSUPPORTED));
}

#[test]
fn a_connection_begins_with_one_hello_of_a_version_that_exists() {
    let running = master();
    let mut stream = connect(&running);
    let metadata = Request::Metadata(MetadataRequest::default());
    assert_eq!(error_code(&ask(&mut stream, &metadata)), ErrorCode::BAD_REQUEST);
    assert!(closed(stream));
    let mut stream = connect(&running);
    let old = HelloRequest::default();
    assert_eq!(error_code(&ask(&mut stream, &Request::Hello(old))), ErrorCode::UNSUPPORTED);
    assert!(closed(stream));
    let mut stream = greeted(&running);
    assert_eq!(error_code(&ask(&mut stream, &hello())), ErrorCode::BAD_REQUEST);
    assert!(matches!(ask(&mut stream, &metadata), Response::Metadata(_)));
}

#[test]
fn garbage_gets_a_typed_error_and_a_closed_connection() {
    let running = master();
    let oversized = [&(900_000_u32 - 4).to_le_bytes()[..], &[0; 64]].concat();
    let hostile = [&60_u32.to_le_bytes()[..], &[0xff; 60]].concat();
    for (bytes, code) in [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), ErrorCode::BAD_REQUEST),
        (oversized, ErrorCode::TOO_LARGE),
        (hostile, ErrorCode::BAD_REQUEST),
    ] {
        let mut stream = connect(&running);
        stream.write_all(&bytes).unwrap();
        let (_, response) = decode(&receive(&mut stream));
        assert_eq!(error_code(&response), code);
        assert!(closed(stream));
    }
    assert!(matches!(frame_bytes([0xff; 4]), Err(FrameError::Bytes(_))));
    // Others did not notice.
    greeted(&running);
}

#[test]
fn one_connection_too_many_is_told_so() {
    let running = master();
    let mut open: Vec<_> = (0..ringmain_core::limits::MASTER_CONNECTIONS_MAX).map(|_| greeted(&running)).collect();
    let mut refused = connect(&running);
    assert_eq!(error_code(&decode(&receive(&mut refused)).1), ErrorCode::LIMIT_REACHED);
    assert!(closed(refused));
    let metadata = Request::Metadata(MetadataRequest::default());
    assert!(matches!(ask(&mut open[0], &metadata), Response::Metadata(_)));
    // A stop closes idle connections at once.
    running.master.stop();
    assert!(open.into_iter().all(closed));
}

#[test]
fn a_frame_submitted_by_a_broker_is_answered_as_a_whole_frame() {
    let running = master();
    let (sender, replies) = mpsc::channel();
    let frame = Request::CreateTopic(CreateTopicRequest::new("a")).to_frame(31);
    running.master.submit(frame, Box::new(move |reply| sender.send(reply).unwrap()));
    let (correlation_id, response) = decode(&replies.recv_timeout(Duration::from_secs(20)).unwrap());
    assert_eq!(correlation_id, 31);
    assert!(matches!(response, Response::Topic(_)), "{response:?}");
}
