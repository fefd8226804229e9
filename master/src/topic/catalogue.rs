//! What the master knows of topics, and what it still owes the broker.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ringmain_core::ids::TopicId;
use ringmain_core::topic::TopicInfo;

use super::TopicView;
use crate::store::Loaded;

/// A change that the broker failed to apply.
#[derive(Clone, Debug)]
pub(super) enum OwedChange {
    Put(Arc<TopicInfo>),
    Delete(TopicId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owed {
    /// Handed over, not answered yet.
    Sent,
    /// The broker failed: to be repeated.
    Failed,
}

/// What readers see. Behind a lock that is held for look-ups only, never over IO.
#[derive(Debug, Default)]
pub(super) struct Catalogue {
    pub version: u64,
    pub partitions: usize,
    pub topics: BTreeMap<String, Arc<TopicInfo>>,
    /// Topics the broker may not have yet, with the version it was last to get.
    pub putting: HashMap<TopicId, (u64, Owed)>,
    /// Deletions the broker may not have applied yet, with their versions.
    pub deleting: BTreeMap<TopicId, (u64, Owed)>,
    /// Deletions it has applied: the next change forgets them in the store as well.
    pub settled: Vec<TopicId>,
}

impl Catalogue {
    /// All that a store held. The broker may lack any of it until it has been asked.
    pub fn new(loaded: Loaded) -> Self {
        Self {
            version: loaded.version,
            partitions: loaded.topics.iter().map(|topic| topic.partition_stores.len()).sum(),
            putting: loaded.topics.iter().map(|topic| (topic.id, (topic.version, Owed::Failed))).collect(),
            topics: loaded.topics.into_iter().map(|topic| (topic.name.clone(), Arc::new(topic))).collect(),
            deleting: loaded.deleting.into_iter().map(|(id, version)| (id, (version, Owed::Failed))).collect(),
            settled: Vec::new(),
        }
    }

    pub fn view(&self, info: &Arc<TopicInfo>) -> TopicView {
        TopicView { applied: !self.putting.contains_key(&info.id), info: Arc::clone(info) }
    }

    /// A topic is new or altered, and not at the broker yet.
    pub fn insert(&mut self, topic: Arc<TopicInfo>) {
        self.version = self.version.max(topic.version);
        self.partitions += topic.partition_stores.len();
        self.putting.insert(topic.id, (topic.version, Owed::Failed));
        if let Some(before) = self.topics.insert(topic.name.clone(), topic) {
            self.partitions -= before.partition_stores.len();
        }
    }

    pub fn remove(&mut self, topic: &TopicInfo, version: u64) {
        self.version = version;
        self.partitions -= topic.partition_stores.len();
        self.putting.remove(&topic.id);
        self.topics.remove(&topic.name);
        self.deleting.insert(topic.id, (version, Owed::Failed));
    }

    pub fn forget(&mut self, settled: &[TopicId]) {
        self.settled.retain(|id| !settled.contains(id));
    }

    /// Whether the broker failed to take the topic as it is now.
    pub fn put_failed(&self, id: TopicId) -> bool {
        matches!(self.putting.get(&id), Some((_, Owed::Failed)))
    }

    /// The broker has answered to a topic of this version. The answer to an older one says nothing, and a topic that was
    /// deleted meanwhile is not owed any more.
    pub fn put_settled(&mut self, id: TopicId, version: u64, applied: bool) {
        match self.putting.get_mut(&id) {
            Some((sent, _)) if *sent != version => {}
            Some(_) if applied => drop(self.putting.remove(&id)),
            Some((_, state)) => *state = Owed::Failed,
            None => {}
        }
    }

    pub fn owed(&self) -> Vec<OwedChange> {
        let failed =
            |(id, (_, state)): (&TopicId, &(u64, Owed))| (*state == Owed::Failed).then_some(OwedChange::Delete(*id));
        let deletions = self.deleting.iter().filter_map(failed);
        let puts = self.topics.values().filter(|topic| self.put_failed(topic.id));
        deletions.chain(puts.cloned().map(OwedChange::Put)).collect()
    }
}
