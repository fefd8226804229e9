//! One message of each kind with every field set, and two batches: for round trips, mutations and the golden vectors.

use ringmain_core::batch::{BatchHeader, stamp};
use ringmain_core::codec::{Codec, Compression};
use ringmain_core::compressor::{Compressor, Level};
use ringmain_core::ids::{Durability, Epoch, Offset, PartitionKey};
use ringmain_core::packing::Packing;
use ringmain_core::topic::{TopicAlteration, TopicSettings};

use crate::batch::BatchView;
use crate::batch_builder::BatchBuilder;
use crate::batch_codec::compress;
use crate::error_code::ErrorCode;
use crate::fetch::{
    FetchPartition, FetchRequest, FetchedPartitionOutcome, Gap, GapReason, Visibility, encode_fetch_response,
};
use crate::frame::FrameEncoder;
use crate::hello::{HelloRequest, HelloResponse, PROTOCOL_VERSION, ServerLimits, encode_hello};
use crate::message::{ErrorResponse, Request, Response, encode_error};
use crate::metadata::{BrokerMetadata, Metadata, MetadataRequest, PartitionMetadata, TopicMetadata, encode_metadata};
use crate::offsets::{Offsets, OffsetsRequest, PartitionOffsets, encode_offsets};
use crate::produce::{ProduceOutcome, ProduceRequest, encode_produce_response};
use crate::record::NewRecord;
use crate::sparse::SparseBuilder;
use crate::topic::{AlterTopicRequest, CreateTopicRequest, DeleteTopicRequest, TopicResponse, encode_topic_response};

/// How many frames there are.
pub const FRAMES: usize = 15;
const KEY: PartitionKey = PartitionKey::new(0x1122_3344_5566_7788, 3);

/// A batch as a producer sends it: a keyed and tagged record, one with null key and empty value, a tombstone, one with
/// headers.
pub fn batch() -> Vec<u8> {
    let mut builder = BatchBuilder::new(KEY);
    builder.set_producer(9001, 2, 41);
    let timestamp_ms = 1_700_000_000_000;
    for record in [
        NewRecord { key: Some(b"key"), value: Some(b"value"), tag: Some("red"), timestamp_ms, ..NewRecord::default() },
        NewRecord { value: Some(b""), timestamp_ms: timestamp_ms + 5, ..NewRecord::default() },
        NewRecord { key: Some(b"gone"), timestamp_ms: timestamp_ms - 7, ..NewRecord::default() },
        NewRecord {
            key: Some(b""),
            value: Some("größe".as_bytes()),
            headers: &[("trace", b"\x01\x02"), ("empty", b"")],
            tag: Some("blue"),
            timestamp_ms,
        },
    ] {
        builder.push(&record).unwrap();
    }
    builder.finish().to_vec()
}

/// The same batch as a broker stores and sends it.
pub fn stamped_batch() -> Vec<u8> {
    let mut bytes = batch();
    stamp(&mut bytes, Offset(1000), 1_700_000_000_123, Epoch(4));
    bytes
}

fn repeating_batch() -> Vec<u8> {
    let mut builder = BatchBuilder::new(KEY);
    for number in 0..8 {
        let value = format!("line {number} of a log that repeats itself");
        let timestamp_ms = 1_700_000_000_000;
        builder.push(&NewRecord { value: Some(value.as_bytes()), timestamp_ms, ..NewRecord::default() }).unwrap();
    }
    builder.finish().to_vec()
}

/// A batch whose producer has compressed it, as a broker stores and sends it.
pub fn compressed_batch(codec: Codec) -> Vec<u8> {
    let mut bytes = compress(&mut Compressor::default(), codec, &repeating_batch()).unwrap().to_vec();
    stamp(&mut bytes, Offset(1000), 1_700_000_000_123, Epoch(4));
    bytes
}

/// The same records in a batch that is not compressed, in a pack.
pub fn pack(level: Level) -> Vec<u8> {
    let mut bytes = repeating_batch();
    stamp(&mut bytes, Offset(1000), 1_700_000_000_123, Epoch(4));
    let mut packing = Packing::default();
    packing.begin_run(0, KEY, level, false);
    packing.put(&bytes, Offset(1000)..Offset(1008), 1, false);
    packing.step(&mut Compressor::default());
    packing.results().next().unwrap().stored.to_vec()
}

/// Records 0 and 3 of the stamped batch.
pub fn sparse_batch() -> Vec<u8> {
    let bytes = stamped_batch();
    let header = BatchHeader::parse(&bytes).unwrap();
    SparseBuilder::new().copy(&BatchView::parse(&bytes, &header).unwrap(), &[0, 3]).to_vec()
}

pub fn requests() -> Vec<(&'static str, Request)> {
    vec![
        (
            "hello-request",
            Request::Hello(HelloRequest {
                protocol_version: PROTOCOL_VERSION,
                features: 5,
                client_name: "golden".into(),
                auth_mechanism: "none".into(),
                auth_data: vec![1, 2, 3],
            }),
        ),
        (
            "produce-request",
            Request::Produce(ProduceRequest { durability: Some(Durability::Synced), timeout_ms: 1500 }),
        ),
        (
            "fetch-request",
            Request::Fetch(FetchRequest {
                partitions: vec![
                    FetchPartition { key: KEY, offset: Offset(1000), bytes_max: 0 },
                    FetchPartition { key: PartitionKey::new(2, 0), offset: Offset(7), bytes_max: 4096 },
                ],
                bytes_max: 1 << 20,
                bytes_min: 1,
                wait_ms_max: 500,
                visibility: Visibility::SyncedEnd,
                codecs: 1,
                tags: vec!["red".into(), "blue".into()],
            }),
        ),
        (
            "metadata-request",
            Request::Metadata(MetadataRequest {
                topics: vec!["orders".into()],
                known_version: 12,
                ..MetadataRequest::default()
            }),
        ),
        ("offsets-request", Request::Offsets(OffsetsRequest { topic_id: KEY.topic, partitions: vec![3, 0] })),
        (
            "create-topic-request",
            Request::CreateTopic(CreateTopicRequest {
                name: "orders".into(),
                partitions: 4,
                stores: 2,
                settings: settings(),
            }),
        ),
        ("delete-topic-request", Request::DeleteTopic(DeleteTopicRequest { name: "orders".into() })),
        (
            "alter-topic-request",
            Request::AlterTopic(AlterTopicRequest {
                name: "orders".into(),
                change: TopicAlteration {
                    durability_floor: Some(Durability::Flushed),
                    compression: Some(Compression::Auto),
                    retention_ms: Some(None),
                    retention_bytes: Some(Some(1 << 40)),
                    ..TopicAlteration::default()
                },
            }),
        ),
    ]
}

fn settings() -> TopicSettings {
    TopicSettings {
        durability_default: Durability::Flushed,
        durability_floor: Durability::Memory,
        compression: Compression::Zstd,
        retention_ms: Some(604_800_000),
        retention_bytes: Some(10 << 30),
    }
}

fn topic() -> TopicMetadata {
    let partition = |partition, shard| PartitionMetadata {
        partition,
        store: partition,
        broker_id: 1,
        shard,
        leader_epoch: Epoch(4),
        replicas: vec![1],
    };
    TopicMetadata {
        name: "orders".into(),
        topic_id: KEY.topic,
        code: ErrorCode::OK,
        stores: 2,
        settings: settings(),
        partitions: vec![partition(0, 0), partition(1, 1)],
        created_ms: 1_700_000_000_000,
    }
}

pub fn responses() -> Vec<(&'static str, Response)> {
    let (flushed_end, synced_end) = (Offset(1003), Offset(900));
    vec![
        (
            "hello-response",
            Response::Hello(HelloResponse {
                protocol_version: PROTOCOL_VERSION,
                features: 1,
                server_name: "ringmain 0.1.0".into(),
                broker_id: 1,
                cluster_id: 0xfeed,
                shard: 1,
                limits: ServerLimits::default(),
            }),
        ),
        (
            "error-response",
            Response::Error(ErrorResponse {
                code: ErrorCode::SERVER_BUSY,
                message: "the disk can't keep up".into(),
                retry_after_ms: 50,
            }),
        ),
        (
            "produce-response",
            Response::Produce(vec![
                ProduceOutcome {
                    key: KEY,
                    level: Durability::Synced,
                    base_offset: Offset(1000),
                    leader_epoch: Epoch(4),
                    flushed_end,
                    synced_end,
                    ..ProduceOutcome::default()
                },
                ProduceOutcome {
                    key: PartitionKey::new(2, 0),
                    code: ErrorCode::DISK_FULL,
                    retry_after_ms: 1000,
                    message: "no space".into(),
                    ..ProduceOutcome::default()
                },
                ProduceOutcome { key: KEY, base_offset: Offset(990), duplicate: true, ..ProduceOutcome::default() },
                ProduceOutcome {
                    key: PartitionKey::new(2, 1),
                    code: ErrorCode::OUT_OF_SEQUENCE,
                    next_sequence: 44,
                    producer_epoch: 2,
                    ..ProduceOutcome::default()
                },
            ]),
        ),
        (
            "fetch-response",
            Response::Fetch(vec![FetchedPartitionOutcome {
                key: KEY,
                code: ErrorCode::OK,
                log_start: Offset(10),
                log_end: Offset(1004),
                flushed_end,
                synced_end,
                next_offset: Offset(1004),
                payload_bytes: sparse_batch().len() as u32,
                gap: Some(Gap { from: Offset(990), to: Offset(1000), reason: GapReason::Corrupt }),
                retry_after_ms: 0,
                message: "".into(),
            }]),
        ),
        (
            "metadata-response",
            Response::Metadata(Metadata {
                version: 13,
                cluster_id: 0xfeed,
                brokers: vec![BrokerMetadata {
                    broker_id: 1,
                    host: "broker.example".into(),
                    port: 8123,
                    direct_ports: vec![8200, 8201],
                }],
                topics: vec![topic()],
                survives_process_kill: true,
                more: false,
            }),
        ),
        (
            "offsets-response",
            Response::Offsets(Offsets {
                topic_id: KEY.topic,
                partitions: vec![PartitionOffsets {
                    partition: 3,
                    code: ErrorCode::OK,
                    log_start: Offset(10),
                    log_end: Offset(1004),
                    flushed_end,
                    synced_end,
                    leader_epoch: Epoch(4),
                    unsynced_bytes: 4096,
                    unsynced_ms: 12,
                }],
            }),
        ),
        ("topic-response", Response::Topic(TopicResponse { topic: topic(), version: 13 })),
    ]
}

/// Encodes a response the way a broker does.
pub fn encode_response(response: &Response, correlation_id: u64, payload_bytes: usize) -> Vec<u8> {
    let (mut encoder, mut out) = (FrameEncoder::new(), Vec::new());
    match response {
        Response::Hello(hello) => encode_hello(&mut encoder, correlation_id, hello, &mut out),
        Response::Error(error) => encode_error(&mut encoder, correlation_id, error, &mut out),
        Response::Produce(outcomes) => encode_produce_response(&mut encoder, correlation_id, outcomes, &mut out),
        Response::Fetch(outcomes) => {
            encode_fetch_response(&mut encoder, correlation_id, outcomes, payload_bytes, &mut out);
        }
        Response::Metadata(metadata) => encode_metadata(&mut encoder, correlation_id, metadata, &mut out),
        Response::Offsets(offsets) => encode_offsets(&mut encoder, correlation_id, offsets, &mut out),
        Response::Topic(topic) => encode_topic_response(&mut encoder, correlation_id, topic, &mut out),
    }
    out
}

/// Whole frames by name, payload included.
pub fn frames() -> Vec<(&'static str, Vec<u8>)> {
    let mut frames = Vec::new();
    for (id, (name, request)) in (1..).zip(requests()) {
        let payload = if name == "produce-request" { batch() } else { Vec::new() };
        let mut frame = Vec::new();
        request.encode(&mut FrameEncoder::new(), id, payload.len(), &mut frame);
        frame.extend(payload);
        frames.push((name, frame));
    }
    for (id, (name, response)) in (101..).zip(responses()) {
        let payload = if name == "fetch-response" { sparse_batch() } else { Vec::new() };
        let mut frame = encode_response(&response, id, payload.len());
        frame.extend(payload);
        frames.push((name, frame));
    }
    frames
}

/// Compares what was decoded from the frame of this name with what it was made from.
pub fn check(name: &str, request: Option<Request>, response: Option<Response>) {
    let request_then = requests().into_iter().find(|(sample, _)| *sample == name).map(|(_, request)| request);
    let response_then = responses().into_iter().find(|(sample, _)| *sample == name).map(|(_, response)| response);
    assert_eq!((request, response), (request_then, response_then), "{name}");
}
