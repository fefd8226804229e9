//! The master's side of the protocol: one request frame in, one response frame out. Serves hello, metadata, create, alter
//! and delete; what belongs to a broker is answered with UNSUPPORTED.

use std::sync::Arc;

use ringmain_core::ids::Epoch;
use ringmain_core::limits::{MASTER_FRAME_BYTES_MAX, METADATA_BYTES_MAX, METADATA_PARTITIONS_MAX};
use ringmain_core::topic::TopicInfo;
use ringmain_wire::frame::{FrameEncoder, FrameError, FrameView};
use ringmain_wire::hello::{FEATURES, HelloRequest, HelloResponse, PROTOCOL_VERSION, ServerLimits, encode_hello};
use ringmain_wire::message::{ErrorResponse, Request, encode_error};
use ringmain_wire::metadata::{
    BrokerMetadata, Metadata, MetadataRequest, PartitionMetadata, TopicMetadata, encode_metadata, topic_bytes_max,
};
use ringmain_wire::topic::{TopicResponse, encode_topic_response};
use ringmain_wire::{ClientAction, ErrorCode};

use crate::link::BrokerAddress;
use crate::topic::{ServiceError, TopicService};

/// What a client hears that is told to back off.
const RETRY_AFTER_MS: u32 = 100;
/// Name of this server in hello answers.
const SERVER_NAME: &str = concat!("ringmain-master/", env!("CARGO_PKG_VERSION"));

/// What to do with the connection after the answer.
pub(crate) enum Handled {
    /// Send the frame, go on.
    Reply(Vec<u8>),
    /// Send the frame, then close: the stream can't be trusted, or the versions don't fit.
    ReplyAndClose(Vec<u8>),
}

/// Whether the connection has begun with a hello, as it must. Frames that a broker hands on come from connections that
/// have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    New,
    Greeted,
}

/// Answers one whole frame, its size in front.
pub(crate) async fn handle(service: &Arc<TopicService>, frame: &[u8], stage: &mut Stage) -> Handled {
    let (correlation_id, request) = match parse(frame) {
        Ok(parsed) => parsed,
        Err(error) => return Handled::ReplyAndClose(error_frame(0, ErrorCode::BAD_REQUEST, error.to_string())),
    };
    let request = match request {
        Ok(request) => request,
        Err((code, message)) => return Handled::Reply(error_frame(correlation_id, code, message)),
    };
    let result = match request {
        Request::Hello(hello) if hello.protocol_version == 0 => {
            let message = format!("protocol version 0 does not exist, this server speaks up to {PROTOCOL_VERSION}");
            return Handled::ReplyAndClose(error_frame(correlation_id, ErrorCode::UNSUPPORTED, message));
        }
        Request::Hello(_) if *stage == Stage::Greeted => {
            return Handled::Reply(error_frame(correlation_id, ErrorCode::BAD_REQUEST, "a second hello".to_owned()));
        }
        Request::Hello(hello) => {
            *stage = Stage::Greeted;
            Ok(hello_frame(service, correlation_id, &hello))
        }
        _ if *stage == Stage::New => {
            let message = "the first frame of a connection must be a hello".to_owned();
            return Handled::ReplyAndClose(error_frame(correlation_id, ErrorCode::BAD_REQUEST, message));
        }
        Request::Metadata(request) => metadata_frame(service, correlation_id, &request),
        Request::CreateTopic(request) => {
            let created = service.create(request).await;
            created.map(|view| topic_frame(service, correlation_id, &view.info, view.info.version))
        }
        Request::AlterTopic(request) => {
            let altered = service.alter(request.name, request.change).await;
            altered.map(|view| topic_frame(service, correlation_id, &view.info, view.info.version))
        }
        Request::DeleteTopic(request) => {
            let deleted = service.delete(request.name).await;
            deleted.map(|(topic, version)| topic_frame(service, correlation_id, &topic, version))
        }
        Request::Produce(_) | Request::Fetch(_) | Request::Offsets(_) => {
            let message = "the master has no records: send this to a broker";
            return Handled::Reply(error_frame(correlation_id, ErrorCode::UNSUPPORTED, message.to_owned()));
        }
    };
    Handled::Reply(result.unwrap_or_else(|error| error_frame(correlation_id, error.code(), error.to_string())))
}

/// The frame that refuses a request.
pub(crate) fn error_frame(correlation_id: u64, code: ErrorCode, message: String) -> Vec<u8> {
    let mut error = ErrorResponse::new(code, message);
    if matches!(code.action(), ClientAction::BackOff | ClientAction::Retry) {
        error.retry_after_ms = RETRY_AFTER_MS;
    }
    let mut out = Vec::new();
    encode_error(&mut FrameEncoder::new(), correlation_id, &error, &mut out);
    out
}

type Parsed = (u64, Result<Request, (ErrorCode, String)>);

/// A message view borrows the frame and may not cross an await, so the request is taken out of it first.
fn parse(frame: &[u8]) -> Result<Parsed, FrameError> {
    let view = FrameView::parse(frame)?;
    let request = if view.payload.is_empty() {
        Request::decode(&view.message).map_err(|error| (error.code(), error.to_string()))
    } else {
        Err((ErrorCode::UNSUPPORTED, "the master takes no records: send them to a broker".to_owned()))
    };
    Ok((view.correlation_id(), request))
}

fn hello_frame(service: &TopicService, correlation_id: u64, hello: &HelloRequest) -> Vec<u8> {
    let response = HelloResponse {
        protocol_version: hello.protocol_version.min(PROTOCOL_VERSION),
        features: hello.features & FEATURES,
        server_name: SERVER_NAME.into(),
        broker_id: service.broker().map_or(0, |(address, _)| address.broker_id),
        cluster_id: service.cluster_id(),
        shard: 0,
        limits: ServerLimits { frame_bytes_max: MASTER_FRAME_BYTES_MAX as u32, ..ServerLimits::default() },
    };
    let mut out = Vec::new();
    encode_hello(&mut FrameEncoder::new(), correlation_id, &response, &mut out);
    out
}

fn metadata_frame(
    service: &TopicService,
    correlation_id: u64,
    request: &MetadataRequest,
) -> Result<Vec<u8>, ServiceError> {
    let (broker, survives_process_kill) = service.broker().ok_or(ServiceError::NoBroker)?;
    let is_page = request.topics.is_empty() && request.limit > 0;
    let (version, mut topics, mut more) = if is_page {
        let after = (!request.after.is_empty()).then_some(request.after.as_str());
        // No more fit one answer: each has a partition.
        let page = service.page(after, (request.limit as usize).min(METADATA_PARTITIONS_MAX));
        (page.version, page.topics.into_iter().map(|view| view.info).collect(), page.next.is_some())
    } else if request.topics.is_empty() {
        let (version, topics) = service.all();
        (version, topics, false)
    } else {
        let found = request.topics.iter().filter_map(|name| service.get(name).ok()).map(|view| view.info);
        (service.version(), found.collect::<Vec<_>>(), false)
    };
    let mut metadata = Metadata {
        version,
        cluster_id: service.cluster_id(),
        brokers: vec![BrokerMetadata {
            broker_id: broker.broker_id,
            host: broker.host.clone(),
            port: broker.port,
            // Which shard has a store is the broker's to know: its own metadata names the direct ports.
            direct_ports: Vec::new(),
        }],
        topics: Vec::new(),
        survives_process_kill,
        more: false,
    };
    if request.known_version == 0 || request.known_version != version {
        let fitting = fitting(&topics);
        if fitting < topics.len() && !is_page {
            return Err(ServiceError::TooLarge(topics.len()));
        }
        more |= fitting < topics.len();
        topics.truncate(fitting);
        metadata.more = more;
        metadata.topics = topics.iter().map(|topic| topic_metadata(topic, &broker)).collect();
        for name in &request.topics {
            if !topics.iter().any(|topic| topic.name == *name) {
                let code = ErrorCode::TOPIC_NOT_FOUND;
                metadata.topics.push(TopicMetadata { name: name.clone(), code, ..TopicMetadata::default() });
            }
        }
    }
    let mut out = Vec::new();
    encode_metadata(&mut FrameEncoder::new(), correlation_id, &metadata, &mut out);
    Ok(out)
}

/// How many of these topics, the first ones, one answer can hold.
fn fitting(topics: &[Arc<TopicInfo>]) -> usize {
    let (mut bytes, mut partitions) = (0, 0);
    let fits = |topic: &&Arc<TopicInfo>| {
        bytes += topic_bytes_max(topic.name.len(), topic.partition_stores.len());
        partitions += topic.partition_stores.len();
        bytes <= METADATA_BYTES_MAX && partitions <= METADATA_PARTITIONS_MAX
    };
    topics.iter().take_while(fits).count()
}

fn topic_frame(service: &TopicService, correlation_id: u64, topic: &TopicInfo, version: u64) -> Vec<u8> {
    let broker = service.broker().map_or_else(BrokerAddress::default, |(address, _)| address);
    let response = TopicResponse { topic: topic_metadata(topic, &broker), version };
    let mut out = Vec::new();
    encode_topic_response(&mut FrameEncoder::new(), correlation_id, &response, &mut out);
    out
}

fn topic_metadata(topic: &TopicInfo, broker: &BrokerAddress) -> TopicMetadata {
    let partitions = topic.partition_stores.iter().zip(0..).map(|(store, partition)| PartitionMetadata {
        partition,
        store: u32::from(*store),
        broker_id: broker.broker_id,
        shard: 0,
        leader_epoch: Epoch(0),
        replicas: Vec::new(),
    });
    TopicMetadata {
        name: topic.name.clone(),
        topic_id: topic.id,
        code: ErrorCode::OK,
        stores: topic.stores,
        settings: topic.settings,
        partitions: partitions.collect(),
        created_ms: topic.created_ms,
    }
}
