//! The master's durable state in one redb file: settings of the cluster, topics, and deletions the broker has not
//! confirmed yet.
//!
//! | table | key | value |
//! |---|---|---|
//! | `ringmain.meta` | `format`, `cluster_id`, `version`, `next_topic_id` | u64 |
//! | `ringmain.topics` | topic id | JSON of [`TopicRecord`] |
//! | `ringmain.deleting` | topic id | version of the deletion |
//!
//! Records are JSON: they are small and rarely written, and a later version can add fields. Every change is one
//! transaction that raises `version`, so a crash leaves the state before it or after it.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition, TableError};
use ringmain_core::codec::Compression;
use ringmain_core::ids::{Durability, TopicId};
use ringmain_core::topic::{TopicInfo, TopicSettings};
use serde::{Deserialize, Serialize};

/// Version of the tables and records; a file with a higher one is refused.
const FORMAT: u64 = 1;
/// redb's page cache: the state is held decoded as well, so only writes profit.
const CACHE_BYTES: usize = 4 * 1024 * 1024;

const META: TableDefinition<&str, u64> = TableDefinition::new("ringmain.meta");
const TOPICS: TableDefinition<u64, &[u8]> = TableDefinition::new("ringmain.topics");
const DELETING: TableDefinition<u64, u64> = TableDefinition::new("ringmain.deleting");

/// Why the master's file can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it.
    #[error("the master's store {path} is in use by another process: stop that one, or choose another data directory")]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// A newer Ringmain has written it.
    #[error("the master's store {path} has format {found}, this ringmain knows up to {FORMAT}: run the newer ringmain")]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// It is not a redb file, or one of another program.
    #[error(
        "{path} is not a ringmain master's store ({what}): move it away and start again, topics are taken over from the broker"
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What gave it away.
        what: String,
    },
    /// It was one, but can't be read whole.
    #[error(
        "the master's store {path} is damaged ({what}): restore it from a copy, or move it away and start again, topics are taken over from the broker"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The file system refuses.
    #[error("can't open the master's store {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A change could not be written. Whether it was can only be told by the next start, so the store takes no more
/// changes until then.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the master's store can't be written: {0}; free or repair its disk, then restart")]
pub struct StoreError(String);

impl<E: Into<redb::Error>> From<E> for StoreError {
    fn from(error: E) -> Self {
        Self(error.into().to_string())
    }
}

/// A topic as it stands in the file.
#[derive(Debug, Serialize, Deserialize)]
struct TopicRecord {
    name: String,
    stores: u32,
    partition_stores: Vec<u16>,
    durability_default: String,
    durability_floor: String,
    created_ms: i64,
    version: u64,
    /// None in records of before there was a choice.
    compression: Option<String>,
    retention_ms: Option<u64>,
    retention_bytes: Option<u64>,
}

/// What a store is made with, when there is none yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewStore {
    /// Name of the cluster; none = a random one. A broker that belongs to a cluster already keeps to it.
    pub cluster_id: Option<u64>,
    /// Id of the first topic. Ids are never given twice, so it must lie above all that a lost store has given.
    pub first_topic_id: TopicId,
}

/// What a store holds when it is opened.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    pub cluster_id: u64,
    pub version: u64,
    pub topics: Vec<TopicInfo>,
    /// Deletions to be repeated to the broker: topic and version.
    pub deleting: BTreeMap<TopicId, u64>,
}

/// Owns the open file and its lock. Used under the service's change lock only; blocks.
#[derive(Debug)]
pub(crate) struct Store {
    database: Database,
    _lock: File,
}

/// How long a process that was killed may take to give up its lock, and between two tries.
const LOCK_WAIT: Duration = Duration::from_secs(3);
const LOCK_RETRY: Duration = Duration::from_millis(20);

impl Store {
    /// Opens the file at `path`, or makes it as `new` says.
    pub fn open(path: &Path, new: NewStore) -> Result<(Self, Loaded), OpenError> {
        let io_error = |source| OpenError::Io { path: path.to_owned(), source };
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(io_error)?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.with_extension("lock"))
            .map_err(io_error)?;
        let (begun, mut told) = (Instant::now(), false);
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if begun.elapsed() < LOCK_WAIT => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::info!(path = %path.display(), "waits for a process that is dying, if it is, to give up the master's store");
                    }
                    thread::sleep(LOCK_RETRY);
                }
                Err(TryLockError::WouldBlock) => return Err(OpenError::InUse { path: path.to_owned() }),
                Err(TryLockError::Error(source)) => return Err(io_error(source)),
            }
        }
        if !path.try_exists().map_err(io_error)? {
            create(path, parent, new)?;
        }
        let database = builder().open(path).map_err(|error| open_error(path, error))?;
        let loaded = load(&database, path)?;
        Ok((Self { database, _lock: lock }, loaded))
    }

    /// Adds a topic in one transaction: gives it the next id and the next version.
    pub fn create_topic(&self, mut topic: TopicInfo, settled: &[TopicId]) -> Result<TopicInfo, StoreError> {
        let transaction = self.database.begin_write()?;
        {
            let mut meta = transaction.open_table(META)?;
            let id = value(&meta, "next_topic_id")?;
            topic.id = TopicId(id);
            topic.version = value(&meta, "version")? + 1;
            meta.insert("next_topic_id", id + 1)?;
            meta.insert("version", topic.version)?;
            transaction.open_table(TOPICS)?.insert(id, encode(&topic).as_slice())?;
        }
        forget_deletions(&transaction, settled)?;
        transaction.commit()?;
        Ok(topic)
    }

    /// Changes a topic in one transaction: gives it the next version.
    pub fn alter_topic(&self, mut topic: TopicInfo, settled: &[TopicId]) -> Result<TopicInfo, StoreError> {
        let transaction = self.database.begin_write()?;
        {
            let mut meta = transaction.open_table(META)?;
            topic.version = value(&meta, "version")? + 1;
            meta.insert("version", topic.version)?;
            transaction.open_table(TOPICS)?.insert(topic.id.get(), encode(&topic).as_slice())?;
        }
        forget_deletions(&transaction, settled)?;
        transaction.commit()?;
        Ok(topic)
    }

    /// Removes a topic in one transaction, and keeps its deletion until it is among the `settled` of a later change.
    /// Gives the new version.
    pub fn delete_topic(&self, id: TopicId, settled: &[TopicId]) -> Result<u64, StoreError> {
        let transaction = self.database.begin_write()?;
        let version;
        {
            let mut meta = transaction.open_table(META)?;
            version = value(&meta, "version")? + 1;
            meta.insert("version", version)?;
            transaction.open_table(TOPICS)?.remove(id.get())?;
            transaction.open_table(DELETING)?.insert(id.get(), version)?;
        }
        forget_deletions(&transaction, settled)?;
        transaction.commit()?;
        Ok(version)
    }

    /// Takes over `topics` that a broker has and this store does not know, or knows as they were before, ids and all, in one
    /// transaction. From then on
    /// no id up to `highest_id` is given again, and versions go on above `newest_version`: a store that was made anew or
    /// put back from a copy must not fall behind its broker. The topics get the new version.
    pub fn adopt(
        &self,
        mut topics: Vec<TopicInfo>,
        highest_id: TopicId,
        newest_version: u64,
    ) -> Result<(Vec<TopicInfo>, u64), StoreError> {
        let transaction = self.database.begin_write()?;
        let version;
        {
            let mut meta = transaction.open_table(META)?;
            version = value(&meta, "version")?.max(newest_version) + 1;
            let next_id = value(&meta, "next_topic_id")?.max(highest_id.get() + 1);
            meta.insert("version", version)?;
            meta.insert("next_topic_id", next_id)?;
            let mut table = transaction.open_table(TOPICS)?;
            for topic in &mut topics {
                topic.version = version;
                table.insert(topic.id.get(), encode(topic).as_slice())?;
            }
        }
        transaction.commit()?;
        Ok((topics, version))
    }

    /// The id the next topic will get.
    pub fn next_topic_id(&self) -> Result<TopicId, StoreError> {
        let meta = self.database.begin_read()?.open_table(META)?;
        value(&meta, "next_topic_id").map(TopicId)
    }
}

fn forget_deletions(transaction: &redb::WriteTransaction, settled: &[TopicId]) -> Result<(), StoreError> {
    if !settled.is_empty() {
        let mut deleting = transaction.open_table(DELETING)?;
        for id in settled {
            deleting.remove(id.get())?;
        }
    }
    Ok(())
}

fn value(meta: &impl ReadableTable<&'static str, u64>, key: &str) -> Result<u64, StoreError> {
    let found = meta.get(key)?.map(|value| value.value());
    found.ok_or_else(|| StoreError(format!("`{key}` is missing from its meta table")))
}

fn builder() -> redb::Builder {
    let mut builder = Database::builder();
    // Without the check redb trusts a file that was closed cleanly, and may panic when it was altered since.
    builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true);
    builder
}

/// Makes the file under another name and moves it into place when it is whole: a crash in between leaves nothing that
/// the next start would have to refuse.
fn create(path: &Path, parent: &Path, new: NewStore) -> Result<(), OpenError> {
    let io_error = |source| OpenError::Io { path: path.to_owned(), source };
    let unfinished = path.with_extension("new");
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io_error(error)),
        _ => {}
    }
    let cluster_id = match new.cluster_id {
        Some(cluster_id) => cluster_id,
        None => {
            let mut random = [0; 8];
            getrandom::fill(&mut random).map_err(|error| io_error(io::Error::other(error)))?;
            u64::from_le_bytes(random)
        }
    };
    let database = builder().create(&unfinished).map_err(|error| open_error(&unfinished, error))?;
    first_records(&database, cluster_id, new.first_topic_id).map_err(|error| io_error(io::Error::other(error)))?;
    drop(database);
    File::open(&unfinished).and_then(|file| file.sync_all()).map_err(io_error)?;
    fs::rename(&unfinished, path).map_err(io_error)?;
    File::open(parent).and_then(|directory| directory.sync_all()).map_err(io_error)
}

fn first_records(database: &Database, cluster_id: u64, first_topic_id: TopicId) -> Result<(), StoreError> {
    let transaction = database.begin_write()?;
    {
        let mut meta = transaction.open_table(META)?;
        meta.insert("format", FORMAT)?;
        meta.insert("cluster_id", cluster_id)?;
        // 0 means "no version known" on the wire.
        meta.insert("version", 1)?;
        meta.insert("next_topic_id", first_topic_id.get())?;
        transaction.open_table(TOPICS)?;
        transaction.open_table(DELETING)?;
    }
    transaction.commit()?;
    Ok(())
}

fn open_error(path: &Path, error: DatabaseError) -> OpenError {
    let path = path.to_owned();
    match error {
        DatabaseError::DatabaseAlreadyOpen => OpenError::InUse { path },
        DatabaseError::UpgradeRequired(version) => {
            OpenError::Foreign { path, what: format!("it has redb's old file format {version}") }
        }
        DatabaseError::Storage(StorageError::Io(source)) if source.kind() == io::ErrorKind::InvalidData => {
            OpenError::Foreign { path, what: source.to_string() }
        }
        DatabaseError::Storage(StorageError::Io(source)) if source.kind() == io::ErrorKind::UnexpectedEof => {
            OpenError::Damaged { path, what: "it is cut short".to_owned() }
        }
        DatabaseError::Storage(StorageError::Io(source)) => OpenError::Io { path, source },
        other => OpenError::Damaged { path, what: other.to_string() },
    }
}

fn load(database: &Database, path: &Path) -> Result<Loaded, OpenError> {
    let damaged = |what: String| OpenError::Damaged { path: path.to_owned(), what };
    let storage = |error: StorageError| damaged(error.to_string());
    let transaction = database.begin_read().map_err(|error| damaged(error.to_string()))?;
    let meta = match transaction.open_table(META) {
        Ok(meta) => meta,
        Err(TableError::TableDoesNotExist(_) | TableError::TableTypeMismatch { .. }) => {
            return Err(OpenError::Foreign { path: path.to_owned(), what: "it has other tables".to_owned() });
        }
        Err(error) => return Err(damaged(error.to_string())),
    };
    let number = |key: &str| value(&meta, key).map_err(|error| damaged(error.0));
    let found = number("format")?;
    if found > FORMAT {
        return Err(OpenError::Newer { path: path.to_owned(), found });
    }
    let next_topic_id = number("next_topic_id")?;
    let mut loaded = Loaded { cluster_id: number("cluster_id")?, version: number("version")?, ..Loaded::default() };
    let topics = transaction.open_table(TOPICS).map_err(|error| damaged(error.to_string()))?;
    let mut names = BTreeMap::new();
    for entry in topics.iter().map_err(storage)? {
        let (id, bytes) = entry.map_err(storage)?;
        let topic = decode(TopicId(id.value()), bytes.value()).map_err(&damaged)?;
        if topic.id.get() >= next_topic_id || topic.version > loaded.version {
            return Err(damaged(format!("topic {} is newer than the file itself", topic.id)));
        }
        if let Some(other) = names.insert(topic.name.clone(), topic.id) {
            return Err(damaged(format!("topics {other} and {} have one name", topic.id)));
        }
        loaded.topics.push(topic);
    }
    let deleting = transaction.open_table(DELETING).map_err(|error| damaged(error.to_string()))?;
    for entry in deleting.iter().map_err(storage)? {
        let (id, version) = entry.map_err(storage)?;
        loaded.deleting.insert(TopicId(id.value()), version.value());
    }
    Ok(loaded)
}

fn encode(topic: &TopicInfo) -> Vec<u8> {
    let record = TopicRecord {
        name: topic.name.clone(),
        stores: topic.stores,
        partition_stores: topic.partition_stores.clone(),
        durability_default: topic.settings.durability_default.name().to_owned(),
        durability_floor: topic.settings.durability_floor.name().to_owned(),
        created_ms: topic.created_ms,
        version: topic.version,
        compression: Some(topic.settings.compression.name().to_owned()),
        retention_ms: topic.settings.retention_ms,
        retention_bytes: topic.settings.retention_bytes,
    };
    serde_json::to_vec(&record).expect("strings and numbers always encode")
}

fn decode(id: TopicId, bytes: &[u8]) -> Result<TopicInfo, String> {
    let bad = |what: &dyn std::fmt::Display| format!("topic {id}: {what}");
    let record: TopicRecord = serde_json::from_slice(bytes).map_err(|error| bad(&error))?;
    let level = |word: &str| word.parse::<Durability>().map_err(|error| bad(&error));
    ringmain_core::topic::check_name(&record.name).map_err(|error| bad(&error))?;
    if record.partition_stores.iter().any(|store| u32::from(*store) >= record.stores) {
        return Err(bad(&"a partition has a store that does not exist"));
    }
    let compression = match &record.compression {
        Some(word) => word.parse::<Compression>().map_err(|error| bad(&error))?,
        None => Compression::default(),
    };
    let settings = TopicSettings {
        durability_default: level(&record.durability_default)?,
        durability_floor: level(&record.durability_floor)?,
        compression,
        retention_ms: record.retention_ms,
        retention_bytes: record.retention_bytes,
    };
    settings.check().map_err(|error| bad(&error))?;
    Ok(TopicInfo {
        id,
        stores: record.stores,
        settings,
        name: record.name,
        partition_stores: record.partition_stores,
        created_ms: record.created_ms,
        version: record.version,
    })
}

#[cfg(test)]
mod tests;
