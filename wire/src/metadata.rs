//! Metadata: brokers with their ports, topics with their partitions and owners.

use ringmain_core::ids::{Epoch, TopicId};
use ringmain_core::limits::{METADATA_TOPICS_MAX, TOPIC_NAME_BYTES_MAX};
use ringmain_core::topic::TopicSettings;

use crate::error_code::ErrorCode;
use crate::frame::FrameEncoder;
use crate::message::{
    Builder, BuiltBody, DecodeError, build_durability, build_texts, decode_durability, decode_texts, within,
};
use crate::schema;
use crate::topic::{build_bound, build_compression, decode_bound, decode_compression};

/// Encoded size of a topic without its name and partitions, and of a partition with one replica: upper bounds.
const TOPIC_REST_BYTES_MAX: usize = 112;
const PARTITION_BYTES_MAX: usize = 48;

/// A metadata request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetadataRequest {
    /// Topics by name; none = all.
    pub topics: Vec<String>,
    /// Answer without topics when the version is still this one; 0 = always answer in full.
    pub known_version: u64,
    /// With `limit`: topics whose names come after this one.
    pub after: String,
    /// So many topics at most, in the order of their names, and a page of those that fit; 0 = all in one answer or none.
    pub limit: u32,
}

/// A broker and its ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BrokerMetadata {
    /// Number of the broker in its cluster.
    pub broker_id: u32,
    /// Name or address that clients reach it by.
    pub host: String,
    /// Common port: any shard answers.
    pub port: u16,
    /// Port of each shard by its index; may be empty.
    pub direct_ports: Vec<u16>,
}

/// One partition and who owns it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionMetadata {
    /// Number of the partition.
    pub partition: u32,
    /// Its store.
    pub store: u32,
    /// The broker that has it.
    pub broker_id: u32,
    /// The shard of that broker.
    pub shard: u16,
    /// Epoch of the owner.
    pub leader_epoch: Epoch,
    /// Brokers with copies; empty in this version.
    pub replicas: Vec<u32>,
}

/// A topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopicMetadata {
    /// Its name.
    pub name: String,
    /// Its number, never reused.
    pub topic_id: TopicId,
    /// `OK`, or `TOPIC_NOT_FOUND` for a name that was asked for and is not there.
    pub code: ErrorCode,
    /// Number of stores.
    pub stores: u32,
    /// What an operator may change.
    pub settings: TopicSettings,
    /// Its partitions by number.
    pub partitions: Vec<PartitionMetadata>,
    /// Milliseconds since the Unix epoch.
    pub created_ms: i64,
}

/// What a broker or master knows of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Rises with each change.
    pub version: u64,
    /// Which cluster.
    pub cluster_id: u64,
    /// All brokers.
    pub brokers: Vec<BrokerMetadata>,
    /// The topics asked for.
    pub topics: Vec<TopicMetadata>,
    /// Whether `memory` acks survive the death of the broker process.
    pub survives_process_kill: bool,
    /// There are topics behind the last one of this page.
    pub more: bool,
}

impl MetadataRequest {
    pub(crate) fn decode(body: &schema::MetadataRequest<'_>) -> Result<Self, DecodeError> {
        let after = body.after().unwrap_or_default();
        within("after", after.len(), TOPIC_NAME_BYTES_MAX)?;
        Ok(Self {
            topics: decode_texts("topics", body.topics(), METADATA_TOPICS_MAX, TOPIC_NAME_BYTES_MAX)?,
            known_version: body.known_version(),
            after: after.to_owned(),
            limit: body.limit(),
        })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let topics = build_texts(builder, &self.topics);
        let after = (!self.after.is_empty()).then(|| builder.create_string(&self.after));
        let args = schema::MetadataRequestArgs { topics, known_version: self.known_version, after, limit: self.limit };
        (schema::Body::MetadataRequest, schema::MetadataRequest::create(builder, &args).as_union_value())
    }
}

/// What a topic adds to an answer at most, its name and partitions included: for answers that must fit a frame.
#[must_use]
pub const fn topic_bytes_max(name_bytes: usize, partitions: usize) -> usize {
    TOPIC_REST_BYTES_MAX + name_bytes + partitions * PARTITION_BYTES_MAX
}

impl Metadata {
    /// The topic of this name, if it is there and well.
    #[must_use]
    pub fn topic(&self, name: &str) -> Option<&TopicMetadata> {
        self.topics.iter().find(|topic| topic.name == name && topic.code.is_ok())
    }

    pub(crate) fn decode(body: &schema::MetadataResponse<'_>) -> Result<Self, DecodeError> {
        let brokers = body.brokers().into_iter().flatten().map(|broker| BrokerMetadata {
            broker_id: broker.broker_id(),
            host: broker.host().to_owned(),
            port: broker.port(),
            direct_ports: broker.direct_ports().into_iter().flatten().collect(),
        });
        let topics = body.topics().into_iter().flatten().map(|topic| TopicMetadata::decode(&topic));
        Ok(Self {
            version: body.version(),
            cluster_id: body.cluster_id(),
            brokers: brokers.collect(),
            topics: topics.collect::<Result<_, _>>()?,
            survives_process_kill: body.survives_process_kill(),
            more: body.more(),
        })
    }
}

impl TopicMetadata {
    pub(crate) fn decode(topic: &schema::TopicMetadata<'_>) -> Result<Self, DecodeError> {
        let partitions = topic.partitions().into_iter().flatten().map(|partition| PartitionMetadata {
            partition: partition.partition(),
            store: partition.store(),
            broker_id: partition.broker_id(),
            shard: partition.shard(),
            leader_epoch: Epoch(partition.leader_epoch()),
            replicas: partition.replicas().into_iter().flatten().collect(),
        });
        Ok(Self {
            name: topic.name().to_owned(),
            topic_id: TopicId(topic.topic_id()),
            code: ErrorCode(topic.code()),
            stores: topic.stores(),
            settings: TopicSettings {
                durability_default: decode_durability("durability_default", topic.durability_default())?,
                durability_floor: decode_durability("durability_floor", topic.durability_floor())?,
                compression: decode_compression(topic.compression())?,
                retention_ms: decode_bound(topic.retention_ms()),
                retention_bytes: decode_bound(topic.retention_bytes()),
            },
            partitions: partitions.collect(),
            created_ms: topic.created_ms(),
        })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> flatbuffers::WIPOffset<schema::TopicMetadata<'static>> {
        let partitions: Vec<_> = self
            .partitions
            .iter()
            .map(|partition| {
                let replicas = (!partition.replicas.is_empty()).then(|| builder.create_vector(&partition.replicas));
                let args = schema::PartitionMetadataArgs {
                    partition: partition.partition,
                    store: partition.store,
                    broker_id: partition.broker_id,
                    shard: partition.shard,
                    leader_epoch: partition.leader_epoch.0,
                    replicas,
                };
                schema::PartitionMetadata::create(builder, &args)
            })
            .collect();
        let partitions = builder.create_vector(&partitions);
        let name = builder.create_string(&self.name);
        let args = schema::TopicMetadataArgs {
            name: Some(name),
            topic_id: self.topic_id.0,
            code: self.code.0,
            stores: self.stores,
            durability_default: build_durability(self.settings.durability_default),
            durability_floor: build_durability(self.settings.durability_floor),
            compression: build_compression(self.settings.compression),
            retention_ms: build_bound(self.settings.retention_ms),
            retention_bytes: build_bound(self.settings.retention_bytes),
            partitions: Some(partitions),
            created_ms: self.created_ms,
        };
        schema::TopicMetadata::create(builder, &args)
    }
}

/// Appends the frame that answers a metadata request.
pub fn encode_metadata(encoder: &mut FrameEncoder, correlation_id: u64, metadata: &Metadata, out: &mut Vec<u8>) {
    encoder.head(correlation_id, 0, out, |builder| {
        let brokers: Vec<_> = metadata
            .brokers
            .iter()
            .map(|broker| {
                let host = builder.create_string(&broker.host);
                let direct_ports =
                    (!broker.direct_ports.is_empty()).then(|| builder.create_vector(&broker.direct_ports));
                let args = schema::BrokerMetadataArgs {
                    broker_id: broker.broker_id,
                    host: Some(host),
                    port: broker.port,
                    direct_ports,
                };
                schema::BrokerMetadata::create(builder, &args)
            })
            .collect();
        let brokers = builder.create_vector(&brokers);
        let topics: Vec<_> = metadata.topics.iter().map(|topic| topic.build(builder)).collect();
        let topics = builder.create_vector(&topics);
        let args = schema::MetadataResponseArgs {
            version: metadata.version,
            cluster_id: metadata.cluster_id,
            brokers: Some(brokers),
            topics: Some(topics),
            survives_process_kill: metadata.survives_process_kill,
            more: metadata.more,
        };
        (schema::Body::MetadataResponse, schema::MetadataResponse::create(builder, &args).as_union_value())
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringmain_core::ids::Durability;

    #[test]
    fn no_topic_is_larger_than_what_answers_reckon_with() {
        let settings = TopicSettings {
            durability_default: Durability::Synced,
            durability_floor: Durability::Flushed,
            retention_ms: Some(1 << 40),
            retention_bytes: Some(1 << 40),
            ..TopicSettings::default()
        };
        for (name_bytes, partitions) in [(1, 1), (3, 2), (12, 1), (63, 3), (64, 10), (64, 10_000), (5, 0)] {
            let partition = |partition| PartitionMetadata {
                partition,
                store: 3,
                broker_id: 7,
                shard: 5,
                leader_epoch: Epoch(9),
                replicas: vec![1],
            };
            let topic = TopicMetadata {
                name: "x".repeat(name_bytes),
                topic_id: TopicId(u64::MAX),
                code: ErrorCode::TOPIC_NOT_FOUND,
                stores: 9,
                settings,
                partitions: (1..=partitions).map(partition).collect(),
                created_ms: 1,
            };
            let size = |topics: usize| {
                let metadata = Metadata { topics: vec![topic.clone(); topics], ..Metadata::default() };
                let mut out = Vec::new();
                encode_metadata(&mut FrameEncoder::new(), 1, &metadata, &mut out);
                out.len()
            };
            let (one, eleven) = (size(1), size(11));
            let bound = topic_bytes_max(name_bytes, partitions as usize);
            assert!(eleven - one <= 10 * bound, "{name_bytes} {partitions}: {} of {bound}", (eleven - one) / 10);
        }
    }
}
