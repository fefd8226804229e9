//! The data directory: whose it is, how many shards it was made for, and that only one process uses it.
//!
//! ```text
//! DATA/LOCK             locked for the life of the process, holds its id
//! DATA/identity         see identity.rs
//! DATA/catalog.log      see catalog.rs
//! DATA/arena-dir        the directory that the last process had its arenas in
//! DATA/shard-NNN/       segments of one shard
//! DATA/master/          the embedded master's database
//! DATA/quarantine/      arenas that could not be adopted
//! ```
//!
//! All of it is used at start, before executors, by plain blocking calls.

mod identity;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ringmain_core::ids::{LogId, ShardId};
use ringmain_core::limits::{SEGMENT_BYTES, SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SHARDS_MAX};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

pub use self::identity::{Identity, IdentityError};

/// A process that was just killed may need a moment to give its lock back.
const LOCK_WAIT: Duration = Duration::from_secs(10);
const LOCK_RETRY: Duration = Duration::from_millis(50);
/// `PF_EXITING` of the kernel's task flags, as `/proc/PID/stat` shows them (include/linux/sched.h).
const PROCESS_IS_EXITING: u64 = 0x4;
/// SIGKILL's bit in the masks of `/proc/PID/status`.
const SIGNAL_IS_KILL: u64 = 1 << 8;

/// What is wanted of a data directory.
#[derive(Clone, Debug)]
pub struct DataDirOptions {
    /// Shards asked for; `None` = as many as it was made with.
    pub shards: Option<u16>,
    /// Shards of a new directory when none are asked for.
    pub shards_if_new: u16,
    /// Segment size of a new directory; an existing one keeps its own.
    pub segment_bytes_if_new: u64,
    /// Refuse a directory of another cluster; a new one gets this id, or a random one.
    pub cluster_id: Option<u64>,
}

impl Default for DataDirOptions {
    fn default() -> Self {
        Self { shards: None, shards_if_new: 1, segment_bytes_if_new: SEGMENT_BYTES, cluster_id: None }
    }
}

/// Why a data directory can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// Another process uses it.
    #[error("data directory {} is in use by {}: stop it, or choose another directory by --data", dir.display(),
        holder.map_or("another process".to_owned(), |pid| format!("process {pid}")))]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// The process, if it has written its id.
        holder: Option<u32>,
    },
    /// Fewer shards were asked for than it has.
    #[error("data directory {} was made for {has} shards, {asked} are asked for: {}; start with --shards {has} (or \
        without --shards)", dir.display(), shards_with_data(with_data))]
    FewerShards {
        /// The directory.
        dir: PathBuf,
        /// Shards it has.
        has: u16,
        /// Shards asked for.
        asked: u16,
        /// Those past the number asked for that have segments.
        with_data: Vec<u16>,
    },
    /// No or too many shards were asked for.
    #[error("{0} shards: give 1 to {SHARDS_MAX}")]
    Shards(u16),
    /// A segment size that can't be.
    #[error("segments of {0} bytes: give a multiple of 4096 from {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}")]
    SegmentBytes(u64),
    /// It belongs to another cluster.
    #[error("data directory {} belongs to cluster {has:016x}, not {asked:016x}: give the right --data", dir.display())]
    ForeignCluster {
        /// The directory.
        dir: PathBuf,
        /// Its cluster.
        has: u64,
        /// The one asked for.
        asked: u64,
    },
    /// There is data but no identity.
    #[error("data directory {} has data but no file `identity`: restore it from a backup, or choose another directory",
        .0.display())]
    IdentityMissing(PathBuf),
    /// The identity can't be read.
    #[error("{} can't be read: {reason}", path.display())]
    Identity {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: IdentityError,
    },
    /// A system call failed.
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

impl DataDirError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

fn shards_with_data(shards: &[u16]) -> String {
    match shards {
        [] => "the ones past it hold no data yet, but shards can't be taken away".to_owned(),
        [one] => format!("shard {one} holds data"),
        [first, rest @ ..] => {
            rest.iter().fold(format!("shards {first}"), |text, shard| format!("{text}, {shard}")) + " hold data"
        }
    }
}

/// A data directory that this process has, for as long as the value lives.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    identity: Identity,
    is_new: bool,
    _lock: File,
}

impl DataDir {
    /// Opens the directory, or makes it; locks it; adds shards if more are asked for than it has.
    ///
    /// # Errors
    /// Each says what to do.
    pub fn open(path: &Path, options: &DataDirOptions) -> Result<Self, DataDirError> {
        for shards in options.shards.iter().chain([&options.shards_if_new]) {
            if *shards == 0 || usize::from(*shards) > SHARDS_MAX {
                return Err(DataDirError::Shards(*shards));
            }
        }
        make_dir(path)?;
        let path = fs::canonicalize(path).map_err(DataDirError::io("find", path))?;
        let lock = lock(&path)?;
        let stored = identity::read(&path.join("identity"))?;
        let is_new = stored.is_none();
        let identity = match stored {
            Some(stored) => Self::checked(&path, stored, options)?,
            None => Self::made(&path, options)?,
        };
        let dir = Self { path, identity, is_new, _lock: lock };
        for shard in 0..dir.shards() {
            make_dir(&dir.shard_dir(ShardId(shard)))?;
        }
        make_dir(&dir.master_dir())?;
        make_dir(&dir.quarantine_dir())?;
        sync_dir(&dir.path)?;
        Ok(dir)
    }

    /// The identity of the directory at `path`, or none when there is none yet. Takes no lock: it is only ever replaced as a
    /// whole.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn peek(path: &Path) -> Result<Option<Identity>, DataDirError> {
        identity::read(&path.join("identity"))
    }

    /// Who uses the directory now, if somebody does. Takes no lock for longer than the look.
    #[must_use]
    pub fn holder(path: &Path) -> Option<String> {
        let file = File::open(path.join("LOCK")).ok()?;
        let lock = rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared);
        (lock == Err(Errno::WOULDBLOCK)).then(|| match holder_of(&file) {
            Some(pid) => format!("process {pid}"),
            None => "another process".to_owned(),
        })
    }

    /// Where the process before had its arenas, if it had any: they may hold acked records.
    ///
    /// # Errors
    /// When the file that says so can't be read.
    pub fn arena_dir_before(&self) -> Result<Option<PathBuf>, DataDirError> {
        let path = self.path.join("arena-dir");
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(PathBuf::from(OsString::from_vec(bytes)))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(DataDirError::io("read", &path)(error)),
        }
    }

    /// Remembers where this process has its arenas.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn remember_arena_dir(&self, dir: &Path) -> Result<(), DataDirError> {
        if self.arena_dir_before()?.as_deref() == Some(dir) {
            return Ok(());
        }
        let (path, new) = (self.path.join("arena-dir"), self.path.join("arena-dir.new"));
        let write = |file: &mut File| file.write_all(dir.as_os_str().as_bytes()).and_then(|()| file.sync_all());
        let written = File::create(&new).and_then(|mut file| write(&mut file)).and_then(|()| fs::rename(&new, &path));
        written.map_err(DataDirError::io("write", &path))?;
        sync_dir(&self.path)
    }

    /// Whether a shard has segments: its topics are in the catalog then, which is made before them.
    #[must_use]
    pub fn has_records(&self) -> bool {
        (0..self.shards()).any(|shard| has_segments(&self.shard_dir(ShardId(shard))))
    }

    /// The identity of a directory that has none yet.
    fn made(path: &Path, options: &DataDirOptions) -> Result<Identity, DataDirError> {
        let segment_bytes = options.segment_bytes_if_new;
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&segment_bytes) || !segment_bytes.is_multiple_of(4096) {
            return Err(DataDirError::SegmentBytes(segment_bytes));
        }
        // Segments and catalog are made after the identity, so one of them without it is no half-made directory.
        for entry in fs::read_dir(path).map_err(DataDirError::io("list", path))? {
            let name = entry.map_err(DataDirError::io("list", path))?.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("shard-") || name == "catalog.log" {
                return Err(DataDirError::IdentityMissing(path.to_owned()));
            }
        }
        let shards = options.shards.unwrap_or(options.shards_if_new);
        let cluster_id = match options.cluster_id {
            Some(asked) => asked,
            None => random(path)?,
        };
        let log_ids = (0..shards).map(|_| random(path).map(LogId)).collect::<Result<_, _>>()?;
        let identity = Identity { segment_bytes, cluster_id, log_ids };
        identity::write(path, &identity)?;
        Ok(identity)
    }

    /// The identity of an existing directory, with shards added if more are asked for.
    fn checked(path: &Path, mut identity: Identity, options: &DataDirOptions) -> Result<Identity, DataDirError> {
        if let Some(asked) = options.cluster_id.filter(|&asked| asked != identity.cluster_id) {
            return Err(DataDirError::ForeignCluster { dir: path.to_owned(), has: identity.cluster_id, asked });
        }
        let has = identity.shards();
        let asked = options.shards.unwrap_or(has);
        if asked < has {
            let with_data = (asked..has).filter(|&shard| has_segments(&shard_dir(path, ShardId(shard)))).collect();
            return Err(DataDirError::FewerShards { dir: path.to_owned(), has, asked, with_data });
        }
        if asked > has {
            for _ in has..asked {
                identity.log_ids.push(LogId(random(path)?));
            }
            identity::write(path, &identity)?;
        }
        Ok(identity)
    }

    /// Where it is, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What was written when it was made.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether this call has made it.
    #[must_use]
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// Shards it has.
    #[must_use]
    pub fn shards(&self) -> u16 {
        self.identity.shards()
    }

    /// Segment size of its logs.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.identity.segment_bytes
    }

    /// The log of a shard.
    ///
    /// # Panics
    /// When there is no such shard.
    #[must_use]
    pub fn log_id(&self, shard: ShardId) -> LogId {
        self.identity.log_ids[usize::from(shard.0)]
    }

    /// Where a shard's segments are.
    #[must_use]
    pub fn shard_dir(&self, shard: ShardId) -> PathBuf {
        shard_dir(&self.path, shard)
    }

    /// The catalog's file.
    #[must_use]
    pub fn catalog_path(&self) -> PathBuf {
        self.path.join("catalog.log")
    }

    /// Where the embedded master keeps its database.
    #[must_use]
    pub fn master_dir(&self) -> PathBuf {
        self.path.join("master")
    }

    /// Where arenas go that can't be adopted.
    #[must_use]
    pub fn quarantine_dir(&self) -> PathBuf {
        self.path.join("quarantine")
    }
}

fn shard_dir(data: &Path, shard: ShardId) -> PathBuf {
    data.join(format!("shard-{:03}", shard.0))
}

/// Whether a shard's directory has segment files; one that can't be read counts as if.
fn has_segments(dir: &Path) -> bool {
    match fs::read_dir(dir) {
        Ok(mut entries) => entries.any(|entry| {
            entry.map_or(true, |entry| Path::new(&entry.file_name()).extension().is_some_and(|name| name == "log"))
        }),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

fn random(dir: &Path) -> Result<u64, DataDirError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| DataDirError::io("make a random id for", dir)(error.into()))?;
    // 0 stands for none in many places.
    Ok(u64::from_le_bytes(bytes).max(1))
}

fn make_dir(path: &Path) -> Result<(), DataDirError> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(path).map_err(DataDirError::io("make directory", path))
}

/// Makes the names in a directory durable.
fn sync_dir(path: &Path) -> Result<(), DataDirError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(DataDirError::io("sync directory", path))
}

/// Locks the directory and writes this process's id to the lock file. A holder that is alive is told at once; one that
/// is dying, or not to be seen from here, gets a moment to finish. So does one with our own id: in a container, the
/// process before had the same.
fn lock(dir: &Path) -> Result<File, DataDirError> {
    let path = dir.join("LOCK");
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o640).open(&path);
    let file = file.map_err(DataDirError::io("open", &path))?;
    let (begun, mut told) = (Instant::now(), false);
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => {
                let holder = holder_of(&file);
                let alive = holder.is_some_and(|pid| pid != std::process::id() && is_alive(pid));
                if alive || begun.elapsed() > LOCK_WAIT {
                    return Err(DataDirError::InUse { dir: dir.to_owned(), holder });
                }
                if !told {
                    told = true;
                    tracing::info!(dir = %dir.display(), "waits for a process that is dying to give up the data directory");
                }
                thread::sleep(LOCK_RETRY);
            }
            Err(errno) => return Err(DataDirError::io("lock", &path)(errno.into())),
        }
    }
    let text = format!("{}\n", std::process::id());
    let written = file.set_len(0).and_then(|()| file.write_all_at(text.as_bytes(), 0));
    written.map_err(DataDirError::io("write", &path))?;
    Ok(file)
}

fn holder_of(file: &File) -> Option<u32> {
    let mut text = [0; 16];
    let bytes = file.read_at(&mut text, 0).ok()?;
    std::str::from_utf8(&text[..bytes]).ok()?.trim().parse().ok()
}

/// Whether a process is there and not on its way out, as one is from the moment it was killed.
fn is_alive(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // State and flags follow the name, which is in brackets and may hold any character.
    let mut fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace();
    let state = fields.next();
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or(0);
    if matches!(state, Some("Z" | "X") | None) || flags & PROCESS_IS_EXITING != 0 {
        return false;
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().filter_map(|line| {
        let mask = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    pending.fold(0, |all, mask| all | mask) & SIGNAL_IS_KILL == 0
}
