//! `DATA/catalog.log`: the broker's durable list of topics, and of the shard that each store is on.
//!
//! A log of changes: the last one of a topic counts. Each is synced before it is answered, so only the last record can
//! be torn; the file is rewritten when most of it is out of date. Little-endian:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic "RMCT" |
//! | 4 | 1 | version = 1 |
//! | 5 | 3 | zero |
//! | 8 | | records, each `u32 body_bytes`, `u32 CRC32C of body_bytes and body`, body, zeros to a multiple of 8 |
//!
//! Used by one thread of its own: the calls block on the disk.

mod record;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ringmain_core::ids::TopicId;
use ringmain_core::topic::TopicInfo;
use tracing::warn;

use self::record::{Body, RECORD_ALIGN, Record};

const HEADER: [u8; 8] = *b"RMCT\x01\0\0\0";
/// Where in the header the version is.
const VERSION_AT: usize = 4;
/// A smaller file is not rewritten.
const COMPACT_BYTES_MIN: u64 = 64 * 1024;

/// A topic as this broker keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogTopic {
    /// What the master said.
    pub info: TopicInfo,
    /// For each store, the shard it is on; fixed when the store is made.
    pub store_shards: Vec<u16>,
    /// The epochs that its shards had when its stores, or partitions, were made.
    pub created_epochs: Vec<u32>,
}

/// Why the catalog can't be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The header is none of a catalog.
    #[error("{} is no catalog, or its first bytes are damaged: restore it from a backup", .0.display())]
    NoCatalog(PathBuf),
    /// It is not there, though shards have records.
    #[error("{} is missing, though there are segments of shards: restore it from a backup. Without it nothing tells which topics they belong to, and all of them would be freed", .0.display())]
    Missing(PathBuf),
    /// Written by another version of Ringmain.
    #[error("{} is of format version {version}, this program reads version {}; use the Ringmain that wrote it", path.display(), HEADER[VERSION_AT])]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u8,
    },
    /// A record is whole, but says what this program does not know.
    #[error("{} has a record of a newer Ringmain at byte {place}: use the Ringmain that wrote it", path.display())]
    UnknownRecord {
        /// The file.
        path: PathBuf,
        /// Where the record begins.
        place: u64,
    },
    /// A record is damaged, but whole ones follow it: no torn tail.
    #[error("{} is damaged at byte {place}: restore it from a backup", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where the damaged record begins.
        place: u64,
    },
    /// The change is larger than any topic can be.
    #[error("topic {0} does not fit the catalog")]
    TooLarge(TopicId),
    /// Nothing was written; the catalog is as it was.
    #[error("can't write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A sync failed, so it is not known what is on disk; the catalog takes no more changes until the next start.
    #[error("catalog {} has failed, see the log: repair the disk and start again", .0.display())]
    Failed(PathBuf),
    /// A system call failed while the catalog was opened.
    #[error("can't {action} {}: {source}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// See the module.
#[derive(Debug)]
pub struct Catalog {
    path: PathBuf,
    file: File,
    /// End of the last whole record.
    bytes: u64,
    /// The encoded record of each living topic.
    live: BTreeMap<TopicId, Vec<u8>>,
    live_bytes: u64,
    version: u64,
    /// Not rewritten again before it is this large.
    compact_at: u64,
    failed: bool,
}

impl Catalog {
    /// Opens the catalog at `path`, or makes it; gives its topics in order of their ids. A torn tail is cut.
    ///
    /// # Errors
    /// When it is damaged elsewhere, or the disk fails.
    pub fn open(path: &Path) -> Result<(Self, Vec<CatalogTopic>), CatalogError> {
        let wrap = |action| move |source| CatalogError::Io { action, path: path.to_owned(), source };
        if !path.try_exists().map_err(wrap("find"))? {
            write_new(path, &[]).map_err(io::Error::from).map_err(wrap("make"))?;
        }
        let bytes = fs::read(path).map_err(wrap("read"))?;
        let Replayed { topics, live, version, end: at } = replay(path, &bytes)?;
        let file = File::options().write(true).open(path).map_err(wrap("open"))?;
        if at < bytes.len() {
            warn!(path = %path.display(), cut_bytes = bytes.len() - at, "cut a torn record off the catalog");
            file.set_len(at as u64).and_then(|()| file.sync_all()).map_err(wrap("cut"))?;
        }
        let live_bytes = live.values().map(|record| record.len() as u64).sum();
        let path = path.to_owned();
        let mut catalog =
            Self { path, file, bytes: at as u64, live, live_bytes, version, compact_at: 0, failed: false };
        catalog.compact_if_due();
        Ok((catalog, topics.into_values().collect()))
    }

    /// The topics in the catalog at `path`, and where its torn tail begins if it has one. Changes nothing.
    ///
    /// # Errors
    /// When it is damaged elsewhere, or can't be read.
    pub fn peek(path: &Path) -> Result<(Vec<CatalogTopic>, Option<u64>), CatalogError> {
        let wrap = |source| CatalogError::Io { action: "read", path: path.to_owned(), source };
        let bytes = fs::read(path).map_err(wrap)?;
        let replayed = replay(path, &bytes)?;
        let torn = (replayed.end < bytes.len()).then_some(replayed.end as u64);
        Ok((replayed.topics.into_values().collect(), torn))
    }

    /// The highest metadata version of any change so far.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Size of the file in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes a topic, or a change of it, durable.
    ///
    /// # Errors
    /// `Write` when the disk is full: then nothing has changed. `Failed` from the first failed sync on.
    pub fn put(&mut self, topic: CatalogTopic) -> Result<(), CatalogError> {
        let id = topic.info.id;
        let record = self.append(id, &Body::Put(topic))?;
        self.live_bytes += record.len() as u64;
        let before = self.live.insert(id, record);
        self.changed(before)
    }

    /// Makes the end of a topic durable.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn delete(&mut self, id: TopicId, version: u64) -> Result<(), CatalogError> {
        self.append(id, &Body::Delete { id, version })?;
        let before = self.live.remove(&id);
        self.changed(before)
    }

    /// Writes and syncs one record. One at a time: of two unsynced ones, a power cut may leave only the second, which
    /// looks like damage.
    fn append(&mut self, id: TopicId, body: &Body) -> Result<Vec<u8>, CatalogError> {
        if self.failed {
            return Err(CatalogError::Failed(self.path.clone()));
        }
        let record = record::write(body).ok_or(CatalogError::TooLarge(id))?;
        if let Err(source) = self.file.write_all_at(&record, self.bytes) {
            // What was written of it must not be taken for a record later; a file that can't be cut is of no more use.
            self.failed = self.file.set_len(self.bytes).is_err();
            return Err(CatalogError::Write { path: self.path.clone(), source });
        }
        if let Err(error) = self.file.sync_data() {
            return Err(self.fail(&error));
        }
        self.bytes += record.len() as u64;
        self.version = self.version.max(body.version());
        Ok(record)
    }

    /// After a change that took the record `before` out of use.
    fn changed(&mut self, before: Option<Vec<u8>>) -> Result<(), CatalogError> {
        self.live_bytes -= before.map_or(0, |record| record.len() as u64);
        self.compact_if_due();
        if self.failed { Err(CatalogError::Failed(self.path.clone())) } else { Ok(()) }
    }

    fn fail(&mut self, error: &io::Error) -> CatalogError {
        warn!(path = %self.path.display(), %error, "the catalog's sync has failed: it takes no more changes");
        self.failed = true;
        CatalogError::Failed(self.path.clone())
    }

    fn compact_if_due(&mut self) {
        if self.bytes < COMPACT_BYTES_MIN.max(self.compact_at) || self.bytes < 2 * self.live_bytes {
            return;
        }
        let records: Vec<&[u8]> = self.live.values().map(Vec::as_slice).collect();
        let version = record::write(&Body::Version(self.version)).expect("a version fits a record");
        let parts: Vec<&[u8]> = std::iter::once(version.as_slice()).chain(records).collect();
        match write_new(&self.path, &parts) {
            Ok((file, bytes)) => {
                self.file = file;
                self.bytes = bytes;
                self.compact_at = 0;
            }
            Err(NotWritten { source, old_in_place: true }) => {
                warn!(path = %self.path.display(), error = %source, "can't rewrite the catalog, go on with the long one");
                self.compact_at = 2 * self.bytes;
            }
            Err(NotWritten { source, old_in_place: false }) => {
                self.fail(&source);
            }
        }
    }
}

/// What the records of a catalog amount to.
struct Replayed {
    topics: BTreeMap<TopicId, CatalogTopic>,
    /// The newest record of each topic.
    live: BTreeMap<TopicId, Vec<u8>>,
    version: u64,
    /// Behind the last whole record; a torn one may follow.
    end: usize,
}

/// Goes through the records of a catalog. A torn one at the end is left out.
fn replay(path: &Path, bytes: &[u8]) -> Result<Replayed, CatalogError> {
    let version_byte = bytes.get(VERSION_AT).copied();
    match bytes.first_chunk::<8>() {
        Some(&HEADER) => {}
        Some(header) if header[..VERSION_AT] == HEADER[..VERSION_AT] => {
            return Err(CatalogError::Version { path: path.to_owned(), version: version_byte.unwrap_or(0) });
        }
        _ => return Err(CatalogError::NoCatalog(path.to_owned())),
    }
    let mut replayed = Replayed { topics: BTreeMap::new(), live: BTreeMap::new(), version: 0, end: HEADER.len() };
    while replayed.end < bytes.len() {
        let at = replayed.end;
        let (body, record_bytes) = match record::read(&bytes[at..]) {
            Some(Record::Whole(body, record_bytes)) => (body, record_bytes),
            // Its CRC is right: no torn tail, and not to be cut.
            Some(Record::Unknown) => {
                return Err(CatalogError::UnknownRecord { path: path.to_owned(), place: at as u64 });
            }
            None => break,
        };
        replayed.version = replayed.version.max(body.version());
        match body {
            Body::Put(topic) => {
                replayed.live.insert(topic.info.id, bytes[at..at + record_bytes].to_vec());
                replayed.topics.insert(topic.info.id, topic);
            }
            Body::Delete { id, .. } => {
                replayed.live.remove(&id);
                replayed.topics.remove(&id);
            }
            Body::Version(_) => {}
        }
        replayed.end += record_bytes;
    }
    let whole_behind = (replayed.end + RECORD_ALIGN..bytes.len()).step_by(RECORD_ALIGN);
    if whole_behind.into_iter().any(|at| record::read(&bytes[at..]).is_some()) {
        return Err(CatalogError::Corrupt { path: path.to_owned(), place: replayed.end as u64 });
    }
    Ok(replayed)
}

/// A file that could not be put in place.
struct NotWritten {
    source: io::Error,
    /// Whether the old file still has the name, for sure.
    old_in_place: bool,
}

impl From<NotWritten> for io::Error {
    fn from(error: NotWritten) -> Self {
        error.source
    }
}

/// Writes a catalog of `records` and puts it in place at once; gives the file and its size.
fn write_new(path: &Path, records: &[&[u8]]) -> Result<(File, u64), NotWritten> {
    let new_path = path.with_extension("new");
    let write = || {
        let file = File::options().write(true).create(true).truncate(true).mode(0o640).open(&new_path)?;
        let mut bytes = HEADER.to_vec();
        records.iter().for_each(|record| bytes.extend(*record));
        file.write_all_at(&bytes, 0)?;
        file.sync_all()?;
        fs::rename(&new_path, path)?;
        Ok((file, bytes.len() as u64))
    };
    let written = write().map_err(|source| NotWritten { source, old_in_place: true })?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(|source| NotWritten { source, old_in_place: false })?;
    Ok(written)
}
