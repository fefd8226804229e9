//! The union of all messages as plain values: [`Request`] is what a client sends and a broker decodes, [`Response`] the
//! other way. On the broker's hot path responses are encoded from slices (`encode_produce_response` and its like in
//! [`crate::produce`], [`crate::fetch`] …) without building a `Response` first.

use std::borrow::Cow;

use flatbuffers::{FlatBufferBuilder, ForwardsUOffset, UnionWIPOffset, Vector, WIPOffset};
use ringmain_core::ids::Durability;

use crate::error_code::ErrorCode;
use crate::fetch::{FetchRequest, FetchedPartitionOutcome};
use crate::frame::FrameEncoder;
use crate::hello::{HelloRequest, HelloResponse};
use crate::metadata::{Metadata, MetadataRequest};
use crate::offsets::{Offsets, OffsetsRequest};
use crate::produce::{ProduceOutcome, ProduceRequest};
use crate::schema;
use crate::topic::{AlterTopicRequest, CreateTopicRequest, DeleteTopicRequest, TopicResponse};

/// Text that is mostly a constant of the program; empty = none.
pub type Text = Cow<'static, str>;

/// The builder that all messages are encoded with.
pub(crate) type Builder = FlatBufferBuilder<'static>;
/// A finished body, with its kind.
pub(crate) type BuiltBody = (schema::Body, WIPOffset<UnionWIPOffset>);

/// A message from a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first frame of a connection.
    Hello(HelloRequest),
    /// Append the batches of the payload.
    Produce(ProduceRequest),
    /// Read batches.
    Fetch(FetchRequest),
    /// Where topics are.
    Metadata(MetadataRequest),
    /// Ends of partitions.
    Offsets(OffsetsRequest),
    /// Make a topic.
    CreateTopic(CreateTopicRequest),
    /// Delete a topic and its records.
    DeleteTopic(DeleteTopicRequest),
    /// Change settings of a topic.
    AlterTopic(AlterTopicRequest),
}

/// A message from a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Response {
    /// The first frame of a connection.
    Hello(HelloResponse),
    /// The request failed as a whole.
    Error(ErrorResponse),
    /// One outcome for each batch, in the request's order.
    Produce(Vec<ProduceOutcome>),
    /// One outcome for each partition; the batches are the payload.
    Fetch(Vec<FetchedPartitionOutcome>),
    /// Where topics are.
    Metadata(Metadata),
    /// Ends of partitions.
    Offsets(Offsets),
    /// The topic as made or altered, or as it was before it was deleted.
    Topic(TopicResponse),
}

/// A request that failed as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorResponse {
    /// Which case.
    pub code: ErrorCode,
    /// What exactly; empty = see the code's sentence.
    pub message: Text,
    /// Wait at least so long before the same request; 0 = no advice.
    pub retry_after_ms: u32,
}

/// Why a verified message is not one that this side can take. The stream is still sound: answer with [`Self::code`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A message kind of another version, or a response where a request belongs.
    #[error("message kind {0} is not supported here")]
    Kind(u8),
    /// A field has a value that this version does not know.
    #[error("`{field}` has the unknown value {value}")]
    Value {
        /// Which field.
        field: &'static str,
        /// What it says.
        value: u64,
    },
    /// A list or text is longer than its limit.
    #[error("`{field}` has {has}, at most {max} are allowed")]
    TooMany {
        /// Which field.
        field: &'static str,
        /// Its length.
        has: usize,
        /// Its limit.
        max: usize,
    },
    /// A field that must have a value has none.
    #[error("`{0}` is missing")]
    Missing(&'static str),
}

impl DecodeError {
    /// The code to answer with.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Kind(_) | Self::Value { .. } => ErrorCode::UNSUPPORTED,
            Self::TooMany { .. } => ErrorCode::TOO_LARGE,
            Self::Missing(_) => ErrorCode::BAD_REQUEST,
        }
    }
}

impl Request {
    /// Decodes a request, checking every count against its limit.
    pub fn decode(message: &schema::Message<'_>) -> Result<Self, DecodeError> {
        let kind = message.body_type();
        if let Some(body) = message.body_as_produce_request() {
            ProduceRequest::decode(&body).map(Self::Produce)
        } else if let Some(body) = message.body_as_fetch_request() {
            FetchRequest::decode(&body).map(Self::Fetch)
        } else if let Some(body) = message.body_as_metadata_request() {
            MetadataRequest::decode(&body).map(Self::Metadata)
        } else if let Some(body) = message.body_as_offsets_request() {
            OffsetsRequest::decode(&body).map(Self::Offsets)
        } else if let Some(body) = message.body_as_hello_request() {
            HelloRequest::decode(&body).map(Self::Hello)
        } else if let Some(body) = message.body_as_create_topic_request() {
            CreateTopicRequest::decode(&body).map(Self::CreateTopic)
        } else if let Some(body) = message.body_as_delete_topic_request() {
            DeleteTopicRequest::decode(&body).map(Self::DeleteTopic)
        } else if let Some(body) = message.body_as_alter_topic_request() {
            AlterTopicRequest::decode(&body).map(Self::AlterTopic)
        } else {
            Err(DecodeError::Kind(kind.0))
        }
    }

    /// Appends the frame's head to `out`; `payload_bytes` of batches follow it.
    pub fn encode(&self, encoder: &mut FrameEncoder, correlation_id: u64, payload_bytes: usize, out: &mut Vec<u8>) {
        encoder.head(correlation_id, payload_bytes, out, |builder| match self {
            Self::Hello(request) => request.build(builder),
            Self::Produce(request) => request.build(builder),
            Self::Fetch(request) => request.build(builder),
            Self::Metadata(request) => request.build(builder),
            Self::Offsets(request) => request.build(builder),
            Self::CreateTopic(request) => request.build(builder),
            Self::DeleteTopic(request) => request.build(builder),
            Self::AlterTopic(request) => request.build(builder),
        });
    }

    /// The whole frame of a request without payload, with memory of its own.
    #[must_use]
    pub fn to_frame(&self, correlation_id: u64) -> Vec<u8> {
        let mut out = Vec::new();
        self.encode(&mut FrameEncoder::new(), correlation_id, 0, &mut out);
        out
    }
}

impl Response {
    /// Decodes a response.
    pub fn decode(message: &schema::Message<'_>) -> Result<Self, DecodeError> {
        let kind = message.body_type();
        if let Some(body) = message.body_as_produce_response() {
            body.results()
                .iter()
                .map(|result| ProduceOutcome::decode(&result))
                .collect::<Result<_, _>>()
                .map(Self::Produce)
        } else if let Some(body) = message.body_as_fetch_response() {
            let outcomes = body.partitions().iter().map(|partition| FetchedPartitionOutcome::decode(&partition));
            outcomes.collect::<Result<_, _>>().map(Self::Fetch)
        } else if let Some(body) = message.body_as_error_response() {
            Ok(Self::Error(ErrorResponse::decode(&body)))
        } else if let Some(body) = message.body_as_metadata_response() {
            Metadata::decode(&body).map(Self::Metadata)
        } else if let Some(body) = message.body_as_offsets_response() {
            Ok(Self::Offsets(Offsets::decode(&body)))
        } else if let Some(body) = message.body_as_hello_response() {
            Ok(Self::Hello(HelloResponse::decode(&body)))
        } else if let Some(body) = message.body_as_topic_response() {
            TopicResponse::decode(&body).map(Self::Topic)
        } else {
            Err(DecodeError::Kind(kind.0))
        }
    }
}

impl ErrorResponse {
    /// An error without advice when to come back.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<Text>) -> Self {
        Self { code, message: message.into(), retry_after_ms: 0 }
    }

    fn decode(body: &schema::ErrorResponse<'_>) -> Self {
        Self {
            code: ErrorCode(body.code()),
            message: decode_text(body.message()),
            retry_after_ms: body.retry_after_ms(),
        }
    }
}

/// Appends the frame that says that a request failed as a whole.
pub fn encode_error(encoder: &mut FrameEncoder, correlation_id: u64, error: &ErrorResponse, out: &mut Vec<u8>) {
    encoder.head(correlation_id, 0, out, |builder| {
        let message = build_text(builder, &error.message);
        let args = schema::ErrorResponseArgs { code: error.code.0, message, retry_after_ms: error.retry_after_ms };
        (schema::Body::ErrorResponse, schema::ErrorResponse::create(builder, &args).as_union_value())
    });
}

/// A string offset, or none for an empty text: most results have no message.
pub(crate) fn build_text(builder: &mut Builder, text: &str) -> Option<WIPOffset<&'static str>> {
    (!text.is_empty()).then(|| builder.create_string(text))
}

pub(crate) fn decode_text(text: Option<&str>) -> Text {
    text.map_or(Cow::Borrowed(""), |text| Cow::Owned(text.to_owned()))
}

/// Checks the length of a list or text before anything is made of it.
pub(crate) fn within(field: &'static str, has: usize, max: usize) -> Result<(), DecodeError> {
    if has <= max { Ok(()) } else { Err(DecodeError::TooMany { field, has, max }) }
}

pub(crate) fn decode_durability(field: &'static str, value: schema::Durability) -> Result<Durability, DecodeError> {
    Durability::from_byte(value.0).ok_or(DecodeError::Value { field, value: u64::from(value.0) })
}

pub(crate) const fn build_durability(level: Durability) -> schema::Durability {
    schema::Durability(level as u8)
}

/// Owned copies of a list of texts, of which there may be `max` with `bytes_max` each.
pub(crate) fn decode_texts<'a>(
    field: &'static str,
    list: Option<Vector<'a, ForwardsUOffset<&'a str>>>,
    max: usize,
    bytes_max: usize,
) -> Result<Vec<String>, DecodeError> {
    let Some(list) = list else { return Ok(Vec::new()) };
    within(field, list.len(), max)?;
    list.iter()
        .map(|text| {
            within(field, text.len(), bytes_max)?;
            Ok(text.to_owned())
        })
        .collect()
}

pub(crate) fn build_texts(
    builder: &mut Builder,
    texts: &[String],
) -> Option<WIPOffset<Vector<'static, ForwardsUOffset<&'static str>>>> {
    if texts.is_empty() {
        return None;
    }
    let texts: Vec<_> = texts.iter().map(|text| builder.create_string(text)).collect();
    Some(builder.create_vector(&texts))
}
