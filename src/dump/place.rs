//! What is to be dumped: a data directory, or single segments; whose they are, and what their topics are called.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ringmain_core::ids::{LogId, PartitionKey, TopicId};
use ringmain_shard::catalog::{Catalog, CatalogError};
use ringmain_shard::data_dir::DataDir;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::source::FileSource;

const LOCK_WAIT: Duration = Duration::from_secs(1);
const LOCK_RETRY: Duration = Duration::from_millis(50);

/// One log to be read.
#[derive(Debug)]
pub struct Log {
    /// Number of its shard, in a data directory.
    pub shard: Option<u16>,
    /// Its name in messages.
    pub name: String,
    /// Its files.
    pub source: FileSource,
    /// The log that it must be, if known.
    pub log_id: Option<LogId>,
    /// Size of its segments, if known.
    pub segment_bytes: Option<u64>,
    /// The files are all of the log: recovery can tell where it ends.
    pub whole: bool,
}

/// What is damaged outside of the logs.
#[derive(Debug)]
pub struct FileDamage {
    /// Which file.
    pub file: PathBuf,
    /// Where in it.
    pub place: u64,
    /// What is wrong.
    pub what: String,
}

/// Everything there is to read.
#[derive(Debug, Default)]
pub struct Place {
    /// Its logs.
    pub logs: Vec<Log>,
    /// The broker's topics, if its catalog could be read.
    pub names: Names,
    /// What was found damaged so far.
    pub damage: Vec<FileDamage>,
    /// Worth saying, and no damage.
    pub notes: Vec<String>,
    /// Cut off file names in messages.
    pub root: PathBuf,
    /// Held, so that no broker starts meanwhile.
    _lock: Option<File>,
}

/// Names of topics.
#[derive(Clone, Debug, Default)]
pub struct Names {
    names: Option<BTreeMap<TopicId, String>>,
}

impl Names {
    /// A topic's name, or its id.
    pub fn of(&self, topic: TopicId) -> String {
        self.get(topic).map_or_else(|| topic.to_string(), str::to_owned)
    }

    /// A topic's name, if it is known.
    pub fn get(&self, topic: TopicId) -> Option<&str> {
        self.names.as_ref()?.get(&topic).map(String::as_str)
    }

    /// A partition as people write it.
    pub fn partition(&self, key: PartitionKey) -> String {
        format!("{}:{}", self.of(key.topic), key.partition)
    }

    /// Whether the topic was deleted, for sure.
    pub fn is_deleted(&self, topic: TopicId) -> bool {
        self.names.as_ref().is_some_and(|names| !names.contains_key(&topic))
    }

    /// The topic that a name or number stands for.
    pub fn find(&self, text: &str) -> Result<TopicId> {
        let named = self.names.iter().flatten().find(|(_, name)| *name == text).map(|(id, _)| *id);
        match named.or_else(|| text.parse().ok().map(TopicId)) {
            Some(id) => Ok(id),
            None if self.names.is_some() => bail!("there is no topic `{text}` in the broker's catalog; give its id"),
            None => bail!("names of topics can't be read here: give the id of `{text}` as a number"),
        }
    }
}

impl Place {
    /// A data directory.
    pub fn data_dir(dir: &Path, force: bool) -> Result<Self> {
        let mut place = Self { root: dir.to_owned(), ..Self::default() };
        let mut shards = Vec::new();
        for entry in std::fs::read_dir(dir).with_context(|| format!("can't list {}", dir.display()))? {
            let name = entry.with_context(|| format!("can't list {}", dir.display()))?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("shard-"));
            shards.extend(number.and_then(|number| number.parse::<u16>().ok()));
        }
        shards.sort_unstable();
        let identity_path = dir.join("identity");
        if shards.is_empty() && !identity_path.exists() {
            bail!("{} is no data directory: it has no file `identity` and no shards", dir.display());
        }
        place._lock = lock(dir, force)?;
        let identity = match DataDir::peek(dir) {
            Ok(identity) => identity,
            Err(error) => {
                place.damage.push(FileDamage { file: identity_path.clone(), place: 0, what: error.to_string() });
                None
            }
        };
        if identity.is_none() && place.damage.is_empty() {
            let what = "it is missing: restore it from a backup".to_owned();
            place.damage.push(FileDamage { file: identity_path, place: 0, what });
        }
        place.read_catalog(dir);
        for shard in shards {
            let source = FileSource::of_dir(&dir.join(format!("shard-{shard:03}")), force)?;
            let log_id = identity.as_ref().and_then(|identity| identity.log_ids.get(usize::from(shard)).copied());
            place.logs.push(Log {
                shard: Some(shard),
                name: format!("shard-{shard:03}"),
                source,
                log_id,
                segment_bytes: identity.as_ref().map(|identity| identity.segment_bytes),
                whole: true,
            });
        }
        Ok(place)
    }

    fn read_catalog(&mut self, dir: &Path) {
        let path = dir.join("catalog.log");
        if !path.exists() {
            self.notes.push(format!("{} is missing: topics have no names", path.display()));
            return;
        }
        match Catalog::peek(&path) {
            Ok((topics, torn)) => {
                let names = topics.into_iter().map(|topic| (topic.info.id, topic.info.name)).collect();
                self.names = Names { names: Some(names) };
                if let Some(place) = torn {
                    let path = path.display();
                    self.notes.push(format!("{path} byte {place}: a torn change, which the next start cuts off"));
                }
            }
            Err(error) => {
                let place = if let CatalogError::Corrupt { place, .. } = &error { *place } else { 0 };
                self.damage.push(FileDamage { file: path, place, what: error.to_string() });
            }
        }
    }

    /// Segment files, and directories of segments.
    pub fn paths(paths: &[PathBuf], force: bool) -> Result<Self> {
        let mut place = Self::default();
        for path in paths {
            let is_dir = path.is_dir();
            if is_dir && (path.join("identity").exists() || path.join("shard-000").exists()) {
                bail!("{} is a data directory: name it with --data", path.display());
            }
            let source = if is_dir { FileSource::of_dir(path, force)? } else { FileSource::of_file(path, force)? };
            let name = path.display().to_string();
            place.logs.push(Log { shard: None, name, source, log_id: None, segment_bytes: None, whole: is_dir });
        }
        Ok(place)
    }

    /// A file's name in messages.
    pub fn shown(&self, path: &Path) -> String {
        let inside =
            if self.root.as_os_str().is_empty() { path } else { path.strip_prefix(&self.root).unwrap_or(path) };
        inside.display().to_string()
    }
}

/// Locks the directory against a start, without writing to it.
fn lock(dir: &Path, force: bool) -> Result<Option<File>> {
    let path = dir.join("LOCK");
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("can't open {}", path.display())),
    };
    let mut locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared);
    let began = Instant::now();
    // A process that was just killed needs a moment to give its lock back.
    while locked == Err(Errno::WOULDBLOCK) && !force && began.elapsed() < LOCK_WAIT {
        std::thread::sleep(LOCK_RETRY);
        locked = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared);
    }
    match locked {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) if force => {
            eprintln!(
                "ringmain: a broker runs on {}: only what it has finished can be relied on, and what it is writing may \
                 look damaged",
                dir.display()
            );
            Ok(None)
        }
        Err(Errno::WOULDBLOCK) => {
            let holder = std::fs::read_to_string(&path).unwrap_or_default();
            let holder = holder.trim();
            let by = if holder.is_empty() { "a broker".to_owned() } else { format!("process {holder}") };
            bail!("data directory {} is in use by {by}: stop it, or read all the same with --force", dir.display())
        }
        Err(errno) => Err(errno).with_context(|| format!("can't lock {}", path.display())),
    }
}
