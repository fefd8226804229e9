//! Create and delete topics. Brokers hand these to the master.

use ringmain_core::ids::Durability;
use ringmain_core::limits::TOPIC_NAME_BYTES_MAX;

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
    /// Level of produces that leave the choice to the topic.
    pub durability_default: Durability,
    /// Produces that ask for less get this.
    pub durability_floor: Durability,
}

/// A topic to be deleted, with all its records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeleteTopicRequest {
    /// Its name.
    pub name: String,
}

/// Answer to create and delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicResponse {
    /// The topic as made, or as it was.
    pub topic: TopicMetadata,
    /// Metadata version of the change.
    pub version: u64,
}

impl CreateTopicRequest {
    /// A topic with one partition, the broker's choice of stores and level `memory`.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            partitions: 1,
            stores: 0,
            durability_default: Durability::Memory,
            durability_floor: Durability::Memory,
        }
    }

    pub(crate) fn decode(body: &schema::CreateTopicRequest<'_>) -> Result<Self, DecodeError> {
        within("name", body.name().len(), TOPIC_NAME_BYTES_MAX)?;
        Ok(Self {
            name: body.name().to_owned(),
            partitions: body.partitions(),
            stores: body.stores(),
            durability_default: decode_durability("durability_default", body.durability_default())?,
            durability_floor: decode_durability("durability_floor", body.durability_floor())?,
        })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let name = builder.create_string(&self.name);
        let args = schema::CreateTopicRequestArgs {
            name: Some(name),
            partitions: self.partitions,
            stores: self.stores,
            durability_default: build_durability(self.durability_default),
            durability_floor: build_durability(self.durability_floor),
        };
        (schema::Body::CreateTopicRequest, schema::CreateTopicRequest::create(builder, &args).as_union_value())
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

/// Appends the frame that answers a create or delete.
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
