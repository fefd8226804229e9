//! Metadata: what this shard knows of brokers and topics, all that were named, all there are, or a page of them.

use std::rc::Rc;

use ringmain_core::limits::{METADATA_BYTES_MAX, METADATA_PARTITIONS_MAX};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::metadata::{
    BrokerMetadata, Metadata, MetadataRequest, PartitionMetadata, TopicMetadata, encode_metadata, topic_bytes_max,
};

use crate::connection::Connection;
use crate::routing::PlacedTopic;
use crate::shard::Shard;

/// Answers a metadata request.
pub(crate) fn metadata(shard: &Rc<Shard>, connection: &Rc<Connection>, correlation_id: u64, request: &MetadataRequest) {
    let version = shard.routing.borrow().version();
    let unchanged = request.known_version != 0 && request.known_version == version;
    let mut found = Found::default();
    if !unchanged {
        found.look(shard, request);
    }
    let is_page = request.topics.is_empty() && request.limit > 0;
    if found.more && !is_page {
        let message = "metadata of so many topics and partitions does not fit one answer: ask page by page with `limit` \
                       and `after`, or name fewer topics";
        return shard.answer_error(connection, correlation_id, ErrorCode::TOO_LARGE, message.to_owned());
    }
    let config = &shard.config;
    let broker = BrokerMetadata {
        broker_id: config.broker_id,
        host: config.advertised_host.clone(),
        port: config.advertised_port,
        direct_ports: config.advertised_direct_ports.clone(),
    };
    let metadata = Metadata {
        version,
        cluster_id: config.cluster_id,
        brokers: vec![broker],
        topics: found.topics,
        survives_process_kill: config.survives_process_kill,
        more: found.more,
    };
    connection.reply(shard, Vec::new(), |encoder, out| encode_metadata(encoder, correlation_id, &metadata, out));
}

/// Topics of an answer.
#[derive(Default)]
struct Found {
    topics: Vec<TopicMetadata>,
    /// What they take in the answer, and how many partitions they have.
    bytes: usize,
    partitions: usize,
    /// There are more, which did not fit or are past the page.
    more: bool,
}

impl Found {
    fn look(&mut self, shard: &Shard, request: &MetadataRequest) {
        let routing = shard.routing.borrow();
        if !request.topics.is_empty() {
            for name in &request.topics {
                match routing.named(name) {
                    Some(topic) => self.add(shard, topic),
                    None => self.add_missing(name),
                }
            }
            return;
        }
        let page = request.limit > 0;
        let after = (page && !request.after.is_empty()).then_some(request.after.as_str());
        for topic in routing.after(after) {
            self.more |= page && self.topics.len() >= request.limit as usize;
            if self.more {
                return;
            }
            self.add(shard, topic);
        }
    }

    fn add(&mut self, shard: &Shard, topic: &PlacedTopic) {
        let partitions = topic.info.partition_stores.len();
        if self.has_room(&topic.info.name, partitions) {
            self.topics.push(topic_metadata(shard, topic));
        }
    }

    fn add_missing(&mut self, name: &str) {
        if self.has_room(name, 0) {
            self.topics.push(TopicMetadata {
                name: name.to_owned(),
                code: ErrorCode::TOPIC_NOT_FOUND,
                ..TopicMetadata::default()
            });
        }
    }

    /// Counts one more topic, if it fits and none before it did not.
    fn has_room(&mut self, name: &str, partitions: usize) -> bool {
        self.bytes += topic_bytes_max(name.len(), partitions);
        self.partitions += partitions;
        self.more |= self.bytes > METADATA_BYTES_MAX || self.partitions > METADATA_PARTITIONS_MAX;
        !self.more
    }
}

fn topic_metadata(shard: &Shard, topic: &PlacedTopic) -> TopicMetadata {
    let epoch = shard.store.borrow().epoch();
    let partitions = topic.info.partition_stores.iter().enumerate().map(|(partition, &store)| PartitionMetadata {
        partition: partition as u32,
        store: u32::from(store),
        broker_id: shard.config.broker_id,
        shard: topic.store_shards.get(usize::from(store)).copied().unwrap_or_default(),
        leader_epoch: epoch,
        replicas: vec![shard.config.broker_id],
    });
    TopicMetadata {
        name: topic.info.name.clone(),
        topic_id: topic.info.id,
        code: ErrorCode::OK,
        stores: topic.info.stores,
        settings: topic.info.settings,
        partitions: partitions.collect(),
        created_ms: topic.info.created_ms,
    }
}
