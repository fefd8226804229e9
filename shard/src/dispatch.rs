//! From a verified frame to the one who answers it.

use std::rc::Rc;

use ringmain_core::ids::{PartitionKey, ShardId};
use ringmain_core::limits::{CONNECTION_REQUESTS_MAX, FETCH_PARTITIONS_MAX, TOPIC_PARTITIONS_MAX};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::frame::FrameView;
use ringmain_wire::hello::{HelloRequest, HelloResponse, PROTOCOL_VERSION, ServerLimits, encode_hello};
use ringmain_wire::message::Request;
use ringmain_wire::offsets::{Offsets, OffsetsRequest, PartitionOffsets, encode_offsets};

use crate::connection::Connection;
use crate::mesh_message::{MeshReply, MeshRequest};
use crate::routing::PlacedTopic;
use crate::runtime::spawn_local;
use crate::shard::Shard;
use crate::{fetch, metadata, produce};

/// Handles one frame. An error closes the connection, with itself as the reason.
pub(crate) async fn handle(
    shard: &Rc<Shard>,
    connection: &Rc<Connection>,
    frame: &FrameView<'_>,
) -> Result<(), &'static str> {
    let correlation_id = frame.correlation_id();
    let request = match Request::decode(&frame.message) {
        Ok(request) => request,
        Err(error) => {
            shard.answer_error(connection, correlation_id, error.code(), error.to_string());
            return if connection.greeted.get() { Ok(()) } else { Err("the first frame was not a hello") };
        }
    };
    if !connection.greeted.get() {
        return match request {
            Request::Hello(hello) => greet(shard, connection, correlation_id, &hello),
            _ => {
                let message = "the first frame of a connection must be a hello".to_owned();
                shard.answer_error(connection, correlation_id, ErrorCode::BAD_REQUEST, message);
                Err("the first frame was not a hello")
            }
        };
    }
    if connection.requests.get() >= CONNECTION_REQUESTS_MAX {
        let message = format!("{CONNECTION_REQUESTS_MAX} requests of this connection wait for their answers");
        shard.answer_error(connection, correlation_id, ErrorCode::TOO_MANY_REQUESTS, message);
        return Ok(());
    }
    match request {
        Request::Produce(request) => {
            produce::produce(shard, connection, correlation_id, &request, frame.payload).await;
        }
        Request::Fetch(request) => fetch::fetch(shard, connection, correlation_id, request),
        Request::Metadata(request) => {
            shard.head_room().await;
            metadata::metadata(shard, connection, correlation_id, &request);
        }
        Request::Offsets(request) => offsets(shard, connection, correlation_id, request),
        // Encoded anew: what a client adds to the frame must not wait in the master's queue with it.
        Request::CreateTopic(_) | Request::DeleteTopic(_) | Request::AlterTopic(_) => {
            shard.ask_admin(connection, request.to_frame(correlation_id));
        }
        Request::Hello(_) => {
            shard.answer_error(connection, correlation_id, ErrorCode::BAD_REQUEST, "a second hello".into());
        }
    }
    Ok(())
}

fn greet(
    shard: &Rc<Shard>,
    connection: &Rc<Connection>,
    correlation_id: u64,
    hello: &HelloRequest,
) -> Result<(), &'static str> {
    if hello.protocol_version < PROTOCOL_VERSION {
        let message = format!(
            "protocol version {} is too old: this broker speaks version {PROTOCOL_VERSION}",
            hello.protocol_version
        );
        shard.answer_error(connection, correlation_id, ErrorCode::UNSUPPORTED, message);
        return Err("its protocol version is too old");
    }
    connection.greeted.set(true);
    let response = HelloResponse {
        protocol_version: PROTOCOL_VERSION,
        features: 0,
        server_name: concat!("ringmain ", env!("CARGO_PKG_VERSION")).into(),
        broker_id: shard.config.broker_id,
        cluster_id: shard.config.cluster_id,
        shard: shard.id.0,
        limits: ServerLimits::default(),
    };
    connection.reply(shard, Vec::new(), |encoder, out| encode_hello(encoder, correlation_id, &response, out));
    Ok(())
}

/// Ends of partitions, gathered from their shards.
fn offsets(shard: &Rc<Shard>, connection: &Rc<Connection>, correlation_id: u64, request: OffsetsRequest) {
    let Some(topic) = shard.routing.borrow().topic(request.topic_id).cloned() else {
        let message = format!("no topic has the id {}: refresh the metadata", request.topic_id);
        return shard.answer_error(connection, correlation_id, ErrorCode::TOPIC_NOT_FOUND, message);
    };
    if request.partitions.len() > FETCH_PARTITIONS_MAX.max(TOPIC_PARTITIONS_MAX as usize) {
        return shard.answer_error(connection, correlation_id, ErrorCode::TOO_LARGE, "too many partitions".into());
    }
    let asked = if request.partitions.is_empty() {
        // Partition numbers are bounded by TOPIC_PARTITIONS_MAX.
        (0..topic.info.partition_stores.len() as u32).collect()
    } else {
        request.partitions
    };
    connection.requests.set(connection.requests.get() + 1);
    let (shard, connection) = (Rc::clone(shard), Rc::clone(connection));
    spawn_local(async move {
        connection.reply_room().await;
        shard.head_room().await;
        let partitions = gather(&shard, &topic, asked).await;
        let offsets = Offsets { topic_id: topic.info.id, partitions };
        connection.reply(&shard, Vec::new(), |encoder, out| encode_offsets(encoder, correlation_id, &offsets, out));
        connection.requests.set(connection.requests.get() - 1);
        shard.flush_touched();
    });
}

async fn gather(shard: &Rc<Shard>, topic: &PlacedTopic, asked: Vec<u32>) -> Vec<PartitionOffsets> {
    let mut groups: std::collections::BTreeMap<ShardId, Vec<u32>> = std::collections::BTreeMap::new();
    let mut found: std::collections::HashMap<u32, PartitionOffsets> = std::collections::HashMap::new();
    for &partition in &asked {
        match topic.shard_of(partition) {
            Some(owner) => groups.entry(owner).or_default().push(partition),
            None => {
                found.insert(partition, missing(partition, ErrorCode::PARTITION_NOT_FOUND));
            }
        }
    }
    for (owner, partitions) in groups {
        let here = if owner == shard.id {
            offsets_of(shard, topic.info.id, &partitions)
        } else {
            let message = MeshRequest::Offsets { topic: topic.info.id, partitions: partitions.clone() };
            let reply = match shard.send_to(owner, message).await {
                Some(call) => shard.clock.timeout(std::time::Duration::from_secs(10), call).await,
                None => None,
            };
            match reply {
                Some(Ok(MeshReply::Offsets(partitions))) => partitions,
                _ => partitions.iter().map(|&partition| missing(partition, ErrorCode::SERVER_BUSY)).collect(),
            }
        };
        found.extend(here.into_iter().map(|offsets| (offsets.partition, offsets)));
    }
    asked.into_iter().filter_map(|partition| found.remove(&partition)).collect()
}

fn missing(partition: u32, code: ErrorCode) -> PartitionOffsets {
    PartitionOffsets { partition, code, ..PartitionOffsets::default() }
}

/// Ends of partitions of this shard.
pub(crate) fn offsets_of(
    shard: &Shard,
    topic: ringmain_core::ids::TopicId,
    partitions: &[u32],
) -> Vec<PartitionOffsets> {
    let store = shard.store.borrow();
    let now_ms = shard.clock.monotonic().as_millis() as u64;
    partitions
        .iter()
        .map(|&partition| {
            let key = PartitionKey { topic, partition };
            let Some((ends, epoch)) = store.ends(key) else { return missing(partition, ErrorCode::NOT_HERE) };
            let (unsynced_bytes, since) = store.unsynced(key).unwrap_or_default();
            let unsynced_ms = since.map_or(0, |since| now_ms.saturating_sub(since));
            PartitionOffsets {
                partition,
                code: ErrorCode::OK,
                log_start: ends.log_start(),
                log_end: ends.log_end(),
                flushed_end: ends.flushed_end(),
                synced_end: ends.synced_end(),
                leader_epoch: epoch,
                unsynced_bytes,
                unsynced_ms: u32::try_from(unsynced_ms).unwrap_or(u32::MAX),
            }
        })
        .collect()
}
