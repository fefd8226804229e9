//! Topics: create, list, describe, alter, delete, and keeping the broker in step with the store.
//!
//! A change is committed to the store first and applied by the broker then. When the broker fails, the caller is told,
//! and the change stays owed: [`TopicService::repair`] repeats it, at each start and every few seconds.

mod catalogue;

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ringmain_core::ids::TopicId;
use ringmain_core::limits::{
    ADMIN_REQUESTS_MAX, APPLY_TIMEOUT_MS, BROKER_TOPICS_MAX, SHARD_PARTITIONS_MAX, TOPIC_NAME_BYTES_MAX,
};
use ringmain_core::topic::{TopicAlteration, TopicChange, TopicError, TopicInfo, check_name, place_partitions};
use ringmain_wire::ErrorCode;
use ringmain_wire::topic::CreateTopicRequest;
use tokio::sync::{Semaphore, oneshot};

use self::catalogue::{Catalogue, Owed, OwedChange};
use crate::link::{BrokerAddress, BrokerLink};
use crate::store::{NewStore, OpenError, Store, StoreError};

/// Why a request about topics was not carried out.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ServiceError {
    /// The description breaks a rule.
    #[error(transparent)]
    Invalid(#[from] TopicError),
    /// The name is taken.
    #[error("topic `{0}` exists already: choose another name, or delete it first")]
    Exists(String),
    /// There is no topic of this name.
    #[error("there is no topic `{0}`: `ringmain topic list` shows the ones there are")]
    NotFound(String),
    /// One more topic or partition than the broker may have.
    #[error("the broker may have {most} {what}: delete topics that are not used")]
    Limit {
        /// How many there may be.
        most: usize,
        /// Of what.
        what: &'static str,
    },
    /// The change could not be written; it may or may not be there after the next start.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The change is written, but the broker could not apply it.
    #[error(
        "topic `{name}` is recorded, but the broker could not apply the change ({reason}): it is repeated by itself, and at the next start"
    )]
    NotApplied {
        /// The topic.
        name: String,
        /// What the broker said.
        reason: String,
    },
    /// The change is written, and the broker has not answered in time.
    #[error("topic `{0}` is recorded, but the broker has not applied the change yet: look again in a moment")]
    Slow(String),
    /// No broker is attached yet, or none any more.
    #[error("the broker is starting or stopping: try again in a moment")]
    NoBroker,
    /// Metadata of so many topics at once fits no frame.
    #[error("metadata of {0} topics does not fit one answer: ask page by page, or name the topics you need")]
    TooLarge(usize),
    /// Too many changes are waiting.
    #[error("too many changes are waiting for the broker: try again in a moment")]
    Busy,
}

impl ServiceError {
    /// The code on the wire and in HTTP answers.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            // As the frame that carries such a name is answered.
            Self::Invalid(TopicError::Name(name)) if name.len() > TOPIC_NAME_BYTES_MAX => ErrorCode::TOO_LARGE,
            Self::Invalid(_) => ErrorCode::BAD_REQUEST,
            Self::Exists(_) => ErrorCode::TOPIC_EXISTS,
            Self::NotFound(_) => ErrorCode::TOPIC_NOT_FOUND,
            Self::Limit { .. } => ErrorCode::LIMIT_REACHED,
            Self::Store(_) | Self::NotApplied { .. } => ErrorCode::INTERNAL,
            Self::Slow(_) => ErrorCode::TIMED_OUT,
            Self::NoBroker => ErrorCode::UNAVAILABLE,
            Self::TooLarge(_) => ErrorCode::TOO_LARGE,
            Self::Busy => ErrorCode::SERVER_BUSY,
        }
    }
}

/// A topic and how far the broker is with it.
#[derive(Clone, Debug)]
pub struct TopicView {
    /// The topic.
    pub info: Arc<TopicInfo>,
    /// Whether the broker has it.
    pub applied: bool,
}

/// A page of topics in the order of their names.
#[derive(Clone, Debug)]
pub struct TopicPage {
    /// Metadata version that the page shows.
    pub version: u64,
    /// Topics there are, on all pages.
    pub total: usize,
    /// The page.
    pub topics: Vec<TopicView>,
    /// Ask for the topics after this name next; none on the last page.
    pub next: Option<String>,
}

/// What a reconcile did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reconciled {
    /// Topics that the broker got.
    pub put: usize,
    /// Deletions that were repeated.
    pub deleted: usize,
    /// Topics of the broker that the store did not know, or knew as they were before.
    pub adopted: usize,
    /// Changes that the broker could not apply; they stay owed.
    pub failed: usize,
}

/// Deletions and puts handed over at once by a repair.
const REPAIR_PORTION: usize = 256;

type Answer = oneshot::Receiver<Result<(), String>>;

/// Owns the store and the catalogue. Changes go one after the other; shared by all listeners.
pub(crate) struct TopicService {
    cluster_id: u64,
    /// Held over commit and hand-over, so that the broker gets changes in the order of their versions.
    changes: Mutex<Store>,
    catalogue: RwLock<Catalogue>,
    link: OnceLock<Arc<dyn BrokerLink>>,
    /// Bounds the changes that wait for their turn or for the broker.
    waiting: Semaphore,
}

impl TopicService {
    pub fn open(path: &Path, new: NewStore) -> Result<Self, OpenError> {
        let (store, loaded) = Store::open(path, new)?;
        Ok(Self {
            cluster_id: loaded.cluster_id,
            changes: Mutex::new(store),
            catalogue: RwLock::new(Catalogue::new(loaded)),
            link: OnceLock::new(),
            waiting: Semaphore::new(ADMIN_REQUESTS_MAX),
        })
    }

    /// Random name of the cluster, made with the store.
    pub const fn cluster_id(&self) -> u64 {
        self.cluster_id
    }

    pub fn version(&self) -> u64 {
        self.read().version
    }

    /// Where clients reach the broker, and whether its memory survives its process; none while it starts.
    pub fn broker(&self) -> Option<(BrokerAddress, bool)> {
        self.link.get().map(|link| (link.address(), link.survives_process_kill()))
    }

    pub fn get(&self, name: &str) -> Result<TopicView, ServiceError> {
        let catalogue = self.read();
        let info = catalogue.topics.get(name).ok_or_else(|| ServiceError::NotFound(name.to_owned()))?;
        Ok(catalogue.view(info))
    }

    /// Up to `limit` topics whose names come after `after`.
    pub fn page(&self, after: Option<&str>, limit: usize) -> TopicPage {
        let catalogue = self.read();
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = catalogue.topics.range::<str, _>((start, Bound::Unbounded)).map(|(_, info)| info);
        let topics: Vec<_> = rest.by_ref().take(limit).map(|info| catalogue.view(info)).collect();
        let next = rest.next().and_then(|_| topics.last()).map(|last| last.info.name.clone());
        TopicPage { version: catalogue.version, total: catalogue.topics.len(), topics, next }
    }

    /// Every topic with the version, in the order of their names.
    pub fn all(&self) -> (u64, Vec<Arc<TopicInfo>>) {
        let catalogue = self.read();
        (catalogue.version, catalogue.topics.values().cloned().collect())
    }

    /// Makes a topic; returns when the broker has it.
    pub async fn create(self: &Arc<Self>, new: CreateTopicRequest) -> Result<TopicView, ServiceError> {
        let _permit = self.waiting.try_acquire().map_err(|_| ServiceError::Busy)?;
        let name = new.name.clone();
        let (info, applied) = self.change(move |service, store| service.commit_create(store, new)).await?;
        wait(&name, applied).await?;
        Ok(TopicView { info, applied: true })
    }

    /// Changes settings of a topic; returns when every shard of the broker goes by them.
    pub async fn alter(self: &Arc<Self>, name: String, change: TopicAlteration) -> Result<TopicView, ServiceError> {
        let _permit = self.waiting.try_acquire().map_err(|_| ServiceError::Busy)?;
        let topic = name.clone();
        let altered = self.change(move |service, store| service.commit_alter(store, &topic, &change)).await?;
        let (info, applied) = altered;
        if let Some(applied) = applied {
            wait(&name, applied).await?;
        }
        Ok(TopicView { info, applied: true })
    }

    /// Deletes a topic; returns it, and the version of the deletion, when the broker has freed it.
    pub async fn delete(self: &Arc<Self>, name: String) -> Result<(Arc<TopicInfo>, u64), ServiceError> {
        let _permit = self.waiting.try_acquire().map_err(|_| ServiceError::Busy)?;
        let topic = name.clone();
        let (info, version, applied) = self.change(move |service, store| service.commit_delete(store, &topic)).await?;
        wait(&name, applied).await?;
        Ok((info, version))
    }

    /// Takes the broker, once: what it has and the store does not know is adopted, what it lacks is handed over.
    pub async fn attach(self: &Arc<Self>, link: Arc<dyn BrokerLink>) -> Result<Reconciled, ServiceError> {
        let adopted = self.change(move |service, store| service.take_over(store, link)).await?;
        Ok(Reconciled { adopted, ..self.repair().await })
    }

    /// Repeats the changes that are still owed to the broker, deletions first, and waits for them. In portions: a broker
    /// that has 100 000 topics to catch up on must not be sent them all at once.
    pub async fn repair(self: &Arc<Self>) -> Reconciled {
        let mut report = Reconciled::default();
        let owed = self.read().owed();
        for portion in owed.chunks(REPAIR_PORTION) {
            let portion = portion.to_vec();
            let sent = self.change(move |service, _| Ok(service.hand_over_again(&portion))).await;
            for (owed, name, applied) in sent.unwrap_or_default() {
                match (wait(&name, applied).await, owed) {
                    (Ok(()), OwedChange::Put(_)) => report.put += 1,
                    (Ok(()), OwedChange::Delete(_)) => report.deleted += 1,
                    (Err(error), _) => {
                        tracing::error!(topic = name, "{error}");
                        report.failed += 1;
                    }
                }
            }
        }
        report
    }

    /// Whether a repair has something to do.
    pub fn owes(&self) -> bool {
        !self.read().owed().is_empty()
    }

    /// Runs a change on a thread that may block, one change at a time.
    async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        run: impl FnOnce(&Arc<Self>, &Store) -> Result<T, ServiceError> + Send + 'static,
    ) -> Result<T, ServiceError> {
        let service = Arc::clone(self);
        let task = tokio::task::spawn_blocking(move || {
            let store = service.changes.lock().unwrap_or_else(PoisonError::into_inner);
            run(&service, &store)
        });
        // The task fails only when the runtime stops, or by a bug that has aborted the process.
        task.await.unwrap_or(Err(ServiceError::NoBroker))
    }

    fn commit_create(
        self: &Arc<Self>,
        store: &Store,
        new: CreateTopicRequest,
    ) -> Result<(Arc<TopicInfo>, Answer), ServiceError> {
        let link = self.link.get().ok_or(ServiceError::NoBroker)?;
        let topic = self.plan(new, link.shard_count())?;
        let existing = self.read().topics.get(&topic.name).cloned();
        if let Some(existing) = existing {
            // Asked for again after the broker failed: the answer the first caller wanted.
            let same =
                TopicInfo { id: existing.id, created_ms: existing.created_ms, version: existing.version, ..topic };
            let failed = self.read().put_failed(existing.id);
            if !failed || same != *existing {
                return Err(ServiceError::Exists(same.name));
            }
            let answer = self.hand_over_put(link.as_ref(), &existing);
            return Ok((existing, answer));
        }
        let settled = self.read().settled.clone();
        let topic = Arc::new(store.create_topic(topic, &settled)?);
        let mut catalogue = self.write();
        catalogue.forget(&settled);
        catalogue.insert(Arc::clone(&topic));
        drop(catalogue);
        tracing::info!(
            topic = topic.name,
            id = topic.id.get(),
            partitions = topic.partition_stores.len(),
            "topic created"
        );
        let answer = self.hand_over_put(link.as_ref(), &topic);
        Ok((topic, answer))
    }

    /// Checks a description and places its partitions; id and version are given by the store.
    fn plan(&self, new: CreateTopicRequest, shards: u16) -> Result<TopicInfo, ServiceError> {
        check_name(&new.name)?;
        let (stores, partition_stores) = place_partitions(new.partitions, new.stores, shards)?;
        new.settings.check()?;
        let catalogue = self.read();
        if !catalogue.topics.contains_key(&new.name) {
            if catalogue.topics.len() >= BROKER_TOPICS_MAX {
                return Err(ServiceError::Limit { most: BROKER_TOPICS_MAX, what: "topics" });
            }
            let most = SHARD_PARTITIONS_MAX * usize::from(shards);
            if catalogue.partitions + partition_stores.len() > most {
                return Err(ServiceError::Limit { most, what: "partitions" });
            }
        }
        Ok(TopicInfo {
            id: TopicId(0),
            name: new.name,
            stores,
            partition_stores,
            settings: new.settings,
            created_ms: now_ms(),
            version: 0,
        })
    }

    /// Gives the topic as altered, and the broker's answer to come; none when it is like that already, there too.
    fn commit_alter(
        self: &Arc<Self>,
        store: &Store,
        name: &str,
        change: &TopicAlteration,
    ) -> Result<(Arc<TopicInfo>, Option<Answer>), ServiceError> {
        let link = self.link.get().ok_or(ServiceError::NoBroker)?;
        let before = self.get(name)?;
        let settings = change.apply(before.info.settings)?;
        if settings == before.info.settings {
            let answer = (!before.applied).then(|| self.hand_over_put(link.as_ref(), &before.info));
            return Ok((before.info, answer));
        }
        let settled = self.read().settled.clone();
        let topic = store.alter_topic(TopicInfo { settings, ..TopicInfo::clone(&before.info) }, &settled)?;
        let topic = Arc::new(topic);
        let mut catalogue = self.write();
        catalogue.forget(&settled);
        catalogue.insert(Arc::clone(&topic));
        drop(catalogue);
        tracing::info!(topic = topic.name, id = topic.id.get(), ?settings, "topic altered");
        let answer = self.hand_over_put(link.as_ref(), &topic);
        Ok((topic, Some(answer)))
    }

    fn commit_delete(
        self: &Arc<Self>,
        store: &Store,
        name: &str,
    ) -> Result<(Arc<TopicInfo>, u64, Answer), ServiceError> {
        let link = self.link.get().ok_or(ServiceError::NoBroker)?;
        let topic = self.get(name)?.info;
        let settled = self.read().settled.clone();
        let version = store.delete_topic(topic.id, &settled)?;
        let mut catalogue = self.write();
        catalogue.forget(&settled);
        catalogue.remove(&topic, version);
        drop(catalogue);
        tracing::info!(topic = topic.name, id = topic.id.get(), "topic deleted");
        let answer = self.hand_over_delete(link.as_ref(), topic.id, version);
        Ok((topic, version, answer))
    }

    fn take_over(&self, store: &Store, link: Arc<dyn BrokerLink>) -> Result<usize, ServiceError> {
        let held = link.topics();
        let unknown = self.settle_by(&held);
        let count = unknown.len();
        let highest_id = held.iter().map(|topic| topic.id).max().unwrap_or_default();
        let newest_version = held.iter().map(|topic| topic.version).max().unwrap_or_default();
        if count > 0 || highest_id >= store.next_topic_id()? || newest_version > self.version() {
            let (adopted, version) = store.adopt(unknown, highest_id, newest_version)?;
            let mut catalogue = self.write();
            catalogue.version = version;
            for topic in adopted {
                tracing::warn!(topic = topic.name, id = topic.id.get(), "topic taken over from the broker");
                catalogue.insert(Arc::new(topic));
            }
            for (_, state) in catalogue.putting.values_mut() {
                *state = Owed::Failed;
            }
        }
        // A second broker is refused by who starts the first: there is one link in a process.
        let _ = self.link.set(link);
        Ok(count)
    }

    /// Compares with what the broker has: what is the same is not owed. Gives the topics that the store does not know
    /// and did not delete, and whose names are free; and those that it knows from before their last change, as it does when
    /// it was put back from a copy.
    fn settle_by(&self, held: &[TopicInfo]) -> Vec<TopicInfo> {
        let mut catalogue = self.write();
        let known: HashMap<_, _> = catalogue.topics.values().map(|topic| (topic.id, Arc::clone(topic))).collect();
        let mut unknown: BTreeMap<&str, &TopicInfo> = BTreeMap::new();
        for topic in held {
            match known.get(&topic.id) {
                Some(ours) if **ours == *topic => {
                    catalogue.putting.remove(&topic.id);
                }
                Some(ours) if topic.version > ours.version && topic.name == ours.name => {
                    unknown.insert(&topic.name, topic);
                }
                Some(_) => {}
                None if catalogue.deleting.contains_key(&topic.id) => {}
                None if catalogue.topics.contains_key(&topic.name) || unknown.contains_key(topic.name.as_str()) => {
                    tracing::error!(
                        topic = topic.name,
                        id = topic.id.get(),
                        "the broker has an unknown topic whose name is taken by another: its data stays where it is"
                    );
                }
                None => {
                    unknown.insert(&topic.name, topic);
                }
            }
        }
        unknown.into_values().cloned().collect()
    }

    fn hand_over_again(self: &Arc<Self>, owed: &[OwedChange]) -> Vec<(OwedChange, String, Answer)> {
        let Some(link) = self.link.get() else { return Vec::new() };
        let mut sent = Vec::new();
        for change in owed {
            // Looked up anew: in the meantime the topic may have been deleted, or the change repeated by somebody else.
            let (name, answer) = match change {
                OwedChange::Put(topic) => {
                    let current = self.read().topics.get(&topic.name).cloned();
                    let owed = |current: &Arc<TopicInfo>| current.id == topic.id && self.read().put_failed(topic.id);
                    let Some(current) = current.filter(owed) else { continue };
                    (topic.name.clone(), self.hand_over_put(link.as_ref(), &current))
                }
                OwedChange::Delete(id) => {
                    let state = self.read().deleting.get(id).copied();
                    let Some((version, Owed::Failed)) = state else { continue };
                    (format!("deleted topic {id}"), self.hand_over_delete(link.as_ref(), *id, version))
                }
            };
            sent.push((change.clone(), name, answer));
        }
        sent
    }

    fn hand_over_put(self: &Arc<Self>, link: &dyn BrokerLink, topic: &Arc<TopicInfo>) -> Answer {
        let (id, version) = (topic.id, topic.version);
        self.write().putting.insert(id, (version, Owed::Sent));
        self.hand_over(link, TopicChange::Put(TopicInfo::clone(topic)), move |catalogue, applied| {
            catalogue.put_settled(id, version, applied);
        })
    }

    fn hand_over_delete(self: &Arc<Self>, link: &dyn BrokerLink, id: TopicId, version: u64) -> Answer {
        self.write().deleting.insert(id, (version, Owed::Sent));
        self.hand_over(link, TopicChange::Delete { id, version }, move |catalogue, applied| {
            if applied {
                catalogue.deleting.remove(&id);
                catalogue.settled.push(id);
            } else {
                catalogue.deleting.insert(id, (version, Owed::Failed));
            }
        })
    }

    fn hand_over(
        self: &Arc<Self>,
        link: &dyn BrokerLink,
        change: TopicChange,
        settle: impl FnOnce(&mut Catalogue, bool) + Send + 'static,
    ) -> Answer {
        let (sender, answer) = oneshot::channel();
        let service = Arc::clone(self);
        link.apply(
            change,
            Box::new(move |result| {
                settle(&mut service.write(), result.is_ok());
                // Whoever asked may have gone: the change holds all the same.
                let _ = sender.send(result);
            }),
        );
        answer
    }

    fn read(&self) -> RwLockReadGuard<'_, Catalogue> {
        self.catalogue.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Catalogue> {
        self.catalogue.write().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn wait(name: &str, answer: Answer) -> Result<(), ServiceError> {
    match tokio::time::timeout(Duration::from_millis(APPLY_TIMEOUT_MS), answer).await {
        Ok(Ok(Ok(()))) => Ok(()),
        Ok(Ok(Err(reason))) => Err(ServiceError::NotApplied { name: name.to_owned(), reason }),
        // The broker dropped the change when it stopped.
        Ok(Err(_)) => Err(ServiceError::NotApplied { name: name.to_owned(), reason: "it is stopping".to_owned() }),
        Err(_) => Err(ServiceError::Slow(name.to_owned())),
    }
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
