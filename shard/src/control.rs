//! Changes of topics on this broker: made durable in the catalog first, then told to all shards.
//!
//! One thread of its own, since the catalog syncs files; never an executor.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringmain_core::ids::{Epoch, ShardId, TopicId};
use ringmain_core::limits::{BROKER_TOPICS_MAX, SHARD_PARTITIONS_MAX};
use ringmain_core::topic::{TopicChange, TopicInfo};

use crate::catalog::{Catalog, CatalogTopic};
use crate::command::{Done, ShardCommand};
use crate::mailbox::{MailboxSender, SendError};
use crate::metrics::ShardMetrics;
use crate::routing::PlacedTopic;

/// Changes that may wait.
const CHANGES_MAX: usize = 4096;
/// How soon a mailbox that was full is tried again.
const FULL_PAUSE: Duration = Duration::from_millis(5);

/// Why a change of a topic was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// The broker stops or has too many changes waiting.
    #[error("the broker takes no changes of topics now: retry")]
    Busy,
    /// The broker has as many topics as it may have.
    #[error("the broker has {BROKER_TOPICS_MAX} topics: delete some first")]
    TooMany,
    /// A shard would have more partitions than a checkpoint can list.
    #[error("a shard would have more than {SHARD_PARTITIONS_MAX} partitions: delete topics, or start with more shards")]
    TooManyPartitions,
    /// The catalog could not be written.
    #[error("the broker can't write its catalog: {0}")]
    Catalog(String),
}

type Callback = Box<dyn FnOnce(Result<(), ApplyError>) + Send>;

/// Which shard has which store.
#[derive(Debug, Default)]
pub(crate) struct Placements {
    topics: HashMap<TopicId, Arc<PlacedTopic>>,
    /// For each topic the epoch of each store's shard when the store was made.
    created_epochs: HashMap<TopicId, Vec<u32>>,
    /// Stores on each shard.
    load: Vec<usize>,
    /// Partitions on each shard.
    partitions: Vec<usize>,
}

impl Placements {
    /// The placements that the catalog has.
    pub(crate) fn new(shards: u16, topics: &[(Arc<PlacedTopic>, Vec<Epoch>)]) -> Self {
        let mut placements =
            Self { load: vec![0; usize::from(shards)], partitions: vec![0; usize::from(shards)], ..Self::default() };
        for (topic, epochs) in topics {
            placements.count(topic, 1);
            placements.topics.insert(topic.info.id, Arc::clone(topic));
            placements.created_epochs.insert(topic.info.id, epochs.iter().map(|epoch| epoch.0).collect());
        }
        placements
    }

    fn count(&mut self, topic: &PlacedTopic, by: isize) {
        for &shard in &topic.store_shards {
            if let Some(load) = self.load.get_mut(usize::from(shard)) {
                *load = load.saturating_add_signed(by);
            }
        }
        for (shard, partitions) in self.partitions.iter_mut().enumerate() {
            // The number of shards is a u16.
            let here = topic.partitions_on(ShardId(shard as u16)).count();
            *partitions = partitions.saturating_add_signed(by * here.cast_signed());
        }
    }

    /// Whether no shard would have too many partitions with `topic` in place of what is known of it.
    fn has_room(&self, topic: &PlacedTopic) -> bool {
        let known = self.topics.get(&topic.info.id);
        self.partitions.iter().enumerate().all(|(shard, &partitions)| {
            let on = |topic: &PlacedTopic| topic.partitions_on(ShardId(shard as u16)).count();
            partitions + on(topic) <= SHARD_PARTITIONS_MAX + known.map_or(0, |known| on(known))
        })
    }

    /// Shards for the stores of a topic: old ones stay, new ones go to the shards with the fewest.
    fn place(&self, info: &TopicInfo) -> Vec<u16> {
        let mut shards = self.topics.get(&info.id).map_or_else(Vec::new, |known| known.store_shards.clone());
        let mut load = self.load.clone();
        while shards.len() < info.stores as usize {
            let least = load.iter().enumerate().min_by_key(|(_, stores)| **stores).map_or(0, |(shard, _)| shard);
            load[least] += 1;
            // The number of shards is a u16.
            shards.push(least as u16);
        }
        shards
    }
}

enum Message {
    Apply(TopicChange, Callback),
    Stop,
}

/// Takes changes of topics; clones serve any thread.
#[derive(Clone)]
pub struct BrokerControl {
    changes: SyncSender<Message>,
    topics: Arc<Mutex<HashMap<TopicId, TopicInfo>>>,
}

impl BrokerControl {
    pub(crate) fn start(
        catalog: Catalog,
        placements: Placements,
        mailboxes: Vec<MailboxSender<ShardCommand>>,
        metrics: Vec<Arc<ShardMetrics>>,
    ) -> Self {
        let infos = placements.topics.values().map(|topic| (topic.info.id, topic.info.clone())).collect();
        let topics = Arc::new(Mutex::new(infos));
        let (changes, incoming) = sync_channel(CHANGES_MAX);
        let worker = Worker { catalog, placements, mailboxes, metrics, topics: Arc::clone(&topics) };
        // A thread that can't be made leaves the channel without a receiver: every change is then refused as busy.
        let made = std::thread::Builder::new().name("catalog".into()).spawn(move || worker.run(&incoming));
        if let Err(error) = made {
            tracing::error!(%error, "can't make the catalog thread: topics can't be changed");
        }
        Self { changes, topics }
    }

    /// Makes a change durable and known to all shards, then calls `done`, from another thread. A change that is made
    /// already is made again without harm.
    pub fn apply(&self, change: TopicChange, done: Callback) {
        use std::sync::mpsc::TrySendError;
        match self.changes.try_send(Message::Apply(change, done)) {
            Ok(()) => {}
            Err(TrySendError::Full(Message::Apply(_, done)) | TrySendError::Disconnected(Message::Apply(_, done))) => {
                done(Err(ApplyError::Busy));
            }
            Err(_) => {}
        }
    }

    /// The topics that the broker has.
    #[must_use]
    pub fn topics(&self) -> Vec<TopicInfo> {
        self.topics.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub(crate) fn stop(&self) {
        // Gone already, or so busy that its last change will find the shards stopped.
        let _ = self.changes.try_send(Message::Stop);
    }
}

struct Worker {
    catalog: Catalog,
    placements: Placements,
    mailboxes: Vec<MailboxSender<ShardCommand>>,
    metrics: Vec<Arc<ShardMetrics>>,
    topics: Arc<Mutex<HashMap<TopicId, TopicInfo>>>,
}

impl Worker {
    fn run(mut self, incoming: &Receiver<Message>) {
        while let Ok(Message::Apply(change, done)) = incoming.recv() {
            match change {
                TopicChange::Put(info) => self.put(info, done),
                TopicChange::Delete { id, version } => self.delete(id, version, done),
            }
        }
    }

    fn put(&mut self, info: TopicInfo, done: Callback) {
        let known = self.placements.topics.get(&info.id).cloned();
        if known.is_none() && self.placements.topics.len() >= BROKER_TOPICS_MAX {
            return done(Err(ApplyError::TooMany));
        }
        if known.as_ref().is_some_and(|known| known.info == info || known.info.version > info.version) {
            return done(Ok(()));
        }
        let store_shards = self.placements.place(&info);
        let mut epochs = self.placements.created_epochs.get(&info.id).cloned().unwrap_or_default();
        for &shard in store_shards.iter().skip(epochs.len()) {
            // The epoch fits: the gauge was set from a u32.
            epochs.push(self.metrics[usize::from(shard)].epoch.get() as u32);
        }
        let topic = Arc::new(PlacedTopic { info: info.clone(), store_shards: store_shards.clone() });
        if !self.placements.has_room(&topic) {
            return done(Err(ApplyError::TooManyPartitions));
        }
        let entry =
            CatalogTopic { info: info.clone(), store_shards: store_shards.clone(), created_epochs: epochs.clone() };
        if let Err(error) = self.catalog.put(entry) {
            return done(Err(ApplyError::Catalog(error.to_string())));
        }
        if let Some(known) = known {
            self.placements.count(&known, -1);
        }
        self.placements.count(&topic, 1);
        self.placements.topics.insert(info.id, Arc::clone(&topic));
        self.placements.created_epochs.insert(info.id, epochs.clone());
        self.topics.lock().unwrap_or_else(PoisonError::into_inner).insert(info.id, info);
        let done = Done::new(Box::new(move || done(Ok(()))));
        let created_epochs: Vec<Epoch> = epochs.into_iter().map(Epoch).collect();
        for mailbox in &self.mailboxes {
            let (topic, created_epochs, done) = (Arc::clone(&topic), created_epochs.clone(), Arc::clone(&done));
            deliver(mailbox, ShardCommand::PutTopic { topic, created_epochs, done });
        }
    }

    fn delete(&mut self, id: TopicId, version: u64, done: Callback) {
        if !self.placements.topics.contains_key(&id) {
            return done(Ok(()));
        }
        if let Err(error) = self.catalog.delete(id, version) {
            return done(Err(ApplyError::Catalog(error.to_string())));
        }
        self.placements.created_epochs.remove(&id);
        if let Some(topic) = self.placements.topics.remove(&id) {
            self.placements.count(&topic, -1);
        }
        self.topics.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        let done = Done::new(Box::new(move || done(Ok(()))));
        for mailbox in &self.mailboxes {
            deliver(mailbox, ShardCommand::DeleteTopic { id, version, done: Arc::clone(&done) });
        }
    }
}

/// Waits while the mailbox is full: a shard that never learnt of a change would go by the old state until its next start.
/// Further changes queue up behind meanwhile, and are then refused.
fn deliver(mailbox: &MailboxSender<ShardCommand>, mut command: ShardCommand) {
    loop {
        match mailbox.try_send(command) {
            // A shard that has ended reads the catalog at its next start.
            Ok(()) | Err(SendError::Stopped(_)) => return,
            Err(SendError::Full(refused)) => command = refused,
        }
        std::thread::sleep(FULL_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::mailbox::mailbox;

    #[test]
    fn a_change_waits_for_a_full_mailbox_and_counts_as_made_only_when_it_was_taken() {
        let (sender, mut shard) = mailbox(1);
        assert!(sender.try_send(ShardCommand::Stop).is_ok());
        let (tell, told) = channel();
        let done = Done::new(Box::new(move || tell.send(()).expect("the test waits")));
        let deleted = ShardCommand::DeleteTopic { id: TopicId(7), version: 3, done };
        std::thread::scope(|scope| {
            scope.spawn(|| deliver(&sender, deleted));
            assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "nobody has it yet");
            assert!(matches!(shard.try_recv(), Some(ShardCommand::Stop)));
            let command = std::iter::repeat_with(|| shard.try_recv()).find_map(|command| {
                std::thread::yield_now();
                command
            });
            assert!(matches!(command, Some(ShardCommand::DeleteTopic { id: TopicId(7), version: 3, .. })));
        });
        told.recv_timeout(Duration::from_secs(60)).expect("it has been carried out");
    }

    #[test]
    fn a_shard_that_has_ended_is_not_waited_for() {
        let (sender, shard) = mailbox(1);
        drop(shard);
        deliver(&sender, ShardCommand::Stop);
    }
}
