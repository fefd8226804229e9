//! Which shard has which partition, as this shard knows it. Each shard has its own copy; changes come through its
//! mailbox and carry the metadata version, so that an update that is older than what is known is ignored.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

use ringmain_core::ids::{PartitionKey, ShardId, TopicId};
use ringmain_core::topic::TopicInfo;

/// A topic and the shard of each of its stores on this broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedTopic {
    /// The topic as the master describes it.
    pub info: TopicInfo,
    /// Shard of each store, by store number.
    pub store_shards: Vec<u16>,
}

impl PlacedTopic {
    /// The shard that has the partition, if the topic has it.
    #[must_use]
    pub fn shard_of(&self, partition: u32) -> Option<ShardId> {
        let store = *self.info.partition_stores.get(partition as usize)?;
        self.store_shards.get(usize::from(store)).map(|&shard| ShardId(shard))
    }

    /// The partitions that live on `shard`, with their store numbers.
    pub fn partitions_on(&self, shard: ShardId) -> impl Iterator<Item = (u32, u16)> + '_ {
        self.info.partition_stores.iter().enumerate().filter_map(move |(partition, &store)| {
            // Partition numbers are bounded by TOPIC_PARTITIONS_MAX.
            (self.store_shards.get(usize::from(store)) == Some(&shard.0)).then_some((partition as u32, store))
        })
    }
}

/// All topics of the broker.
#[derive(Debug, Default)]
pub struct Routing {
    topics: HashMap<TopicId, Arc<PlacedTopic>>,
    names: BTreeMap<String, TopicId>,
    version: u64,
}

impl Routing {
    /// Version of the newest change.
    #[must_use]
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// The topic, if it is here.
    #[must_use]
    pub fn topic(&self, id: TopicId) -> Option<&Arc<PlacedTopic>> {
        self.topics.get(&id)
    }

    /// The topic of that name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Arc<PlacedTopic>> {
        self.topics.get(self.names.get(name)?)
    }

    /// All topics, by name.
    #[must_use]
    pub fn all(&self) -> Vec<&Arc<PlacedTopic>> {
        let mut all: Vec<_> = self.topics.values().collect();
        all.sort_unstable_by(|a, b| a.info.name.cmp(&b.info.name));
        all
    }

    /// The topics whose names come after `after`, in the order of their names.
    pub fn after(&self, after: Option<&str>) -> impl Iterator<Item = &Arc<PlacedTopic>> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.names.range::<str, _>((from, Bound::Unbounded)).filter_map(|(_, id)| self.topics.get(id))
    }

    /// Changes up to this version have been made, also those that left nothing behind, as deletions do.
    pub fn follow(&mut self, version: u64) {
        self.version = self.version.max(version);
    }

    /// The shard that has the partition.
    #[must_use]
    pub fn shard_of(&self, key: PartitionKey) -> Option<ShardId> {
        self.topics.get(&key.topic)?.shard_of(key.partition)
    }

    /// A topic is new or changed. Returns false when a newer state of it is known.
    pub fn put(&mut self, topic: Arc<PlacedTopic>) -> bool {
        if self.topics.get(&topic.info.id).is_some_and(|known| known.info.version > topic.info.version) {
            return false;
        }
        self.version = self.version.max(topic.info.version);
        self.names.insert(topic.info.name.clone(), topic.info.id);
        self.topics.insert(topic.info.id, topic);
        true
    }

    /// A topic is gone.
    pub fn remove(&mut self, id: TopicId, version: u64) -> Option<Arc<PlacedTopic>> {
        self.version = self.version.max(version);
        let topic = self.topics.remove(&id)?;
        // A topic of the same name may have been made since.
        if self.names.get(&topic.info.name) == Some(&id) {
            self.names.remove(&topic.info.name);
        }
        Some(topic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringmain_core::topic::TopicSettings;

    fn topic(id: u64, name: &str, version: u64) -> Arc<PlacedTopic> {
        let info = TopicInfo {
            id: TopicId(id),
            name: name.into(),
            stores: 2,
            partition_stores: vec![0, 1, 0],
            settings: TopicSettings::default(),
            created_ms: 0,
            version,
        };
        Arc::new(PlacedTopic { info, store_shards: vec![1, 0] })
    }

    #[test]
    fn partitions_are_found_on_the_shard_of_their_store() {
        let mut routing = Routing::default();
        routing.put(topic(7, "a", 1));
        assert_eq!(routing.shard_of(PartitionKey::new(7, 2)), Some(ShardId(1)));
        assert_eq!(routing.shard_of(PartitionKey::new(7, 3)), None);
        let on_first: Vec<_> = routing.named("a").unwrap().partitions_on(ShardId(0)).collect();
        assert_eq!(on_first, [(1, 1)]);
    }

    #[test]
    fn pages_go_on_behind_a_name_and_versions_do_not_fall() {
        let mut routing = Routing::default();
        for (id, name) in [(7, "b"), (8, "a"), (9, "c")] {
            routing.put(topic(id, name, id));
        }
        let names = |after| routing.after(after).map(|topic| topic.info.name.as_str()).collect::<Vec<_>>();
        assert_eq!(
            (names(None), names(Some("a")), names(Some("bb"))),
            (vec!["a", "b", "c"], vec!["b", "c"], vec!["c"])
        );
        assert_eq!(names(Some("c")), [""; 0]);
        routing.follow(12);
        routing.follow(3);
        assert_eq!(routing.version(), 12);
    }

    #[test]
    fn an_older_update_is_ignored_and_a_reused_name_survives_the_old_deletion() {
        let mut routing = Routing::default();
        assert!(routing.put(topic(7, "a", 5)));
        assert!(!routing.put(topic(7, "b", 4)));
        routing.put(topic(8, "a", 6));
        routing.remove(TopicId(7), 7);
        assert_eq!(routing.named("a").unwrap().info.id, TopicId(8));
        assert_eq!(routing.version(), 7);
    }
}
