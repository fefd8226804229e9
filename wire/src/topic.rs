//! Create, alter and delete topics. Brokers hand these to the master.

use ringmain_core::codec::Compression;
use ringmain_core::limits::TOPIC_NAME_BYTES_MAX;
use ringmain_core::topic::{TopicAlteration, TopicSettings};

use crate::frame::FrameEncoder;
use crate::message::{Builder, BuiltBody, DecodeError, build_durability, decode_durability, within};
use crate::metadata::TopicMetadata;
use crate::schema;

/// A topic to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateTopicRequest {
    /// Its name.
    pub name: String,
    /// Number of partitions.
    pub partitions: u32,
    /// Number of stores; 0 = as many as the broker has shards, but no more than partitions.
    pub stores: u32,
    /// What may be changed later.
    pub settings: TopicSettings,
}

/// Settings of a topic to be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AlterTopicRequest {
    /// Its name.
    pub name: String,
    /// What changes.
    pub change: TopicAlteration,
}

/// A topic to be deleted, with all its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeleteTopicRequest {
    /// Its name.
    pub name: String,
}

/// Answer to create, alter and delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicResponse {
    /// The topic as made or altered, or as it was before it was deleted.
    pub topic: TopicMetadata,
    /// Metadata version of the change.
    pub version: u64,
}

impl CreateTopicRequest {
    /// A topic with one partition, the broker's choice of stores and the default settings.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), partitions: 1, stores: 0, settings: TopicSettings::default() }
    }

    pub(crate) fn decode(body: &schema::CreateTopicRequest<'_>) -> Result<Self, DecodeError> {
        within("name", body.name().len(), TOPIC_NAME_BYTES_MAX)?;
        Ok(Self {
            name: body.name().to_owned(),
            partitions: body.partitions(),
            stores: body.stores(),
            settings: TopicSettings {
                durability_default: decode_durability("durability_default", body.durability_default())?,
                durability_floor: decode_durability("durability_floor", body.durability_floor())?,
                compression: decode_compression(body.compression())?,
                retention_ms: decode_bound(body.retention_ms()),
                retention_bytes: decode_bound(body.retention_bytes()),
            },
        })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let name = builder.create_string(&self.name);
        let args = schema::CreateTopicRequestArgs {
            name: Some(name),
            partitions: self.partitions,
            stores: self.stores,
            durability_default: build_durability(self.settings.durability_default),
            durability_floor: build_durability(self.settings.durability_floor),
            compression: build_compression(self.settings.compression),
            retention_ms: build_bound(self.settings.retention_ms),
            retention_bytes: build_bound(self.settings.retention_bytes),
        };
        (schema::Body::CreateTopicRequest, schema::CreateTopicRequest::create(builder, &args).as_union_value())
    }
}

impl AlterTopicRequest {
    pub(crate) fn decode(body: &schema::AlterTopicRequest<'_>) -> Result<Self, DecodeError> {
        within("name", body.name().len(), TOPIC_NAME_BYTES_MAX)?;
        let level = |field, level: Option<schema::Durability>| level.map(|level| decode_durability(field, level));
        let change = TopicAlteration {
            durability_default: level("durability_default", body.durability_default()).transpose()?,
            durability_floor: level("durability_floor", body.durability_floor()).transpose()?,
            compression: body.compression().map(decode_compression).transpose()?,
            retention_ms: body.retention_ms().map(decode_bound),
            retention_bytes: body.retention_bytes().map(decode_bound),
        };
        Ok(Self { name: body.name().to_owned(), change })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let name = builder.create_string(&self.name);
        let args = schema::AlterTopicRequestArgs {
            name: Some(name),
            durability_default: self.change.durability_default.map(build_durability),
            durability_floor: self.change.durability_floor.map(build_durability),
            compression: self.change.compression.map(build_compression),
            retention_ms: self.change.retention_ms.map(build_bound),
            retention_bytes: self.change.retention_bytes.map(build_bound),
        };
        (schema::Body::AlterTopicRequest, schema::AlterTopicRequest::create(builder, &args).as_union_value())
    }
}

impl DeleteTopicRequest {
    pub(crate) fn decode(body: &schema::DeleteTopicRequest<'_>) -> Result<Self, DecodeError> {
        within("name", body.name().len(), TOPIC_NAME_BYTES_MAX)?;
        Ok(Self { name: body.name().to_owned() })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let name = builder.create_string(&self.name);
        let args = schema::DeleteTopicRequestArgs { name: Some(name) };
        (schema::Body::DeleteTopicRequest, schema::DeleteTopicRequest::create(builder, &args).as_union_value())
    }
}

impl TopicResponse {
    pub(crate) fn decode(body: &schema::TopicResponse<'_>) -> Result<Self, DecodeError> {
        Ok(Self { topic: TopicMetadata::decode(&body.topic())?, version: body.version() })
    }
}

/// A bound as the wire has it: 0 = none.
pub(crate) fn decode_bound(value: u64) -> Option<u64> {
    (value > 0).then_some(value)
}

pub(crate) fn build_bound(bound: Option<u64>) -> u64 {
    bound.unwrap_or(0)
}

pub(crate) fn decode_compression(value: schema::Compression) -> Result<Compression, DecodeError> {
    Compression::from_byte(value.0).ok_or(DecodeError::Value { field: "compression", value: u64::from(value.0) })
}

pub(crate) const fn build_compression(compression: Compression) -> schema::Compression {
    schema::Compression(compression as u8)
}

/// Appends the frame that answers a create, alter or delete.
pub fn encode_topic_response(
    encoder: &mut FrameEncoder,
    correlation_id: u64,
    response: &TopicResponse,
    out: &mut Vec<u8>,
) {
    encoder.head(correlation_id, 0, out, |builder| {
        let topic = response.topic.build(builder);
        let args = schema::TopicResponseArgs { topic: Some(topic), version: response.version };
        (schema::Body::TopicResponse, schema::TopicResponse::create(builder, &args).as_union_value())
    });
}
