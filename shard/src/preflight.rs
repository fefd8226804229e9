//! What the host must offer, checked before the first executor is made: glommio ends the process, or fails much later,
//! where these say in one line what to do.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ringmain_core::limits::{DISK_BLOCK_BYTES, SHARD_CONNECTIONS_MAX};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::raw;

mod device;
mod survey;

pub use survey::{Check, Outcome, SurveyConfig, survey};

/// Oldest kernel that has all the io_uring operations that are used.
const KERNEL_MIN: (u32, u32) = (5, 8);
/// glommio refuses to start below this limit, whoever the user is.
const MEMLOCK_BYTES_MIN: u64 = 512 * 1024;
/// Each executor registers its IO memory with three rings, and the kernel counts each.
const RINGS_PER_SHARD: u64 = 3;
/// Descriptors of an executor: rings, eventfds, segments, listeners.
const FILES_PER_SHARD: u64 = 64;
/// `CAP_IPC_LOCK` of linux/capability.h: locks memory without limit.
const CAP_IPC_LOCK: u32 = 14;
/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS: u64 = 0x0102_1994;

/// What is going to be started.
#[derive(Clone, Debug)]
pub struct PreflightConfig {
    /// An existing directory where the segments will be.
    pub data_dir: PathBuf,
    /// Shards.
    pub shards: u16,
    /// As in `ShardThreadConfig`.
    pub io_memory_bytes: usize,
    /// Connections to be served, all shards together.
    pub connections: u64,
}

/// What the host offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Files and connections that may be open, after the limit was raised as far as allowed.
    pub open_files_max: u64,
}

impl Host {
    /// Connections that each of `shards` may have, so that all of them together leave the logs the files they need.
    #[must_use]
    pub fn shard_connections_max(&self, shards: u16) -> usize {
        let left = self.open_files_max.saturating_sub(FILES_PER_SHARD * (1 + u64::from(shards)));
        let share = left / u64::from(shards.max(1));
        usize::try_from(share).unwrap_or(usize::MAX).min(SHARD_CONNECTIONS_MAX)
    }
}

/// What is missing; each says how to get it.
#[derive(Debug, thiserror::Error)]
pub enum PreflightError {
    /// The kernel is too old.
    #[error("kernel {release} is too old: Ringmain needs Linux {}.{} or later", KERNEL_MIN.0, KERNEL_MIN.1)]
    Kernel {
        /// As uname(2) says.
        release: String,
    },
    /// io_uring is switched off.
    #[error("io_uring is not allowed: {reason}")]
    IoUring {
        /// Why, and what to do.
        reason: IoUringOff,
    },
    /// Too little memory may be locked.
    #[error(
        "{has} bytes may be locked in memory, {needs} are needed: `ulimit -l unlimited`, systemd: \
         LimitMEMLOCK=infinity, docker: --ulimit memlock=-1"
    )]
    Memlock {
        /// The limit.
        has: u64,
        /// What is needed.
        needs: u64,
    },
    /// Too few files may be open.
    #[error(
        "{has} files may be open, {needs} are needed: `ulimit -n {needs}`, systemd: LimitNOFILE={needs}, docker: \
         --ulimit nofile={needs}"
    )]
    OpenFiles {
        /// The hard limit.
        has: u64,
        /// What is needed.
        needs: u64,
    },
    /// The data directory's filesystem has no O_DIRECT.
    #[error(
        "{} is on a filesystem without O_DIRECT ({reason}): put --data on ext4 or xfs on a local disk (docker: a \
         volume, not the container's own layer)", dir.display()
    )]
    DirectIo {
        /// The directory.
        dir: PathBuf,
        /// What failed.
        reason: String,
    },
    /// Files can't be made or written in the data directory.
    #[error("can't write to {}: {source}: give a directory that user {} may write to, with space left", dir.display(),
        rustix::process::geteuid().as_raw())]
    DataDir {
        /// The directory.
        dir: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Who has switched io_uring off.
#[derive(Debug)]
pub enum IoUringOff {
    /// `kernel.io_uring_disabled` is 1 or 2.
    Sysctl(u32),
    /// The system call is filtered.
    Filter(io::Error),
    /// The kernel has none.
    NotBuilt,
    /// Anything else.
    Other(io::Error),
}

impl fmt::Display for IoUringOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sysctl(level) => {
                write!(f, "kernel.io_uring_disabled is {level}: `sysctl -w kernel.io_uring_disabled=0`")
            }
            Self::Filter(error) => write!(
                f,
                "io_uring_setup says `{error}`: allow io_uring_setup, io_uring_enter and io_uring_register in the \
                 seccomp profile (docker: --security-opt seccomp=unconfined, systemd: SystemCallFilter=@io-event)"
            ),
            Self::NotBuilt => write!(
                f,
                "this kernel has no io_uring, or a container hides it: use a kernel with CONFIG_IO_URING, or docker: \
                 --security-opt seccomp=unconfined"
            ),
            Self::Other(error) => write!(f, "io_uring_setup says `{error}`"),
        }
    }
}

/// Checks everything, and raises the limits of files and locked memory as far as allowed. Blocks for a moment.
///
/// # Errors
/// All that is missing, not only the first.
pub fn check(config: &PreflightConfig) -> Result<Host, Vec<PreflightError>> {
    let mut missing = Vec::new();
    missing.extend(check_kernel(&kernel_release()).err());
    missing.extend(check_io_uring().err());
    missing.extend(check_memlock(config).err());
    let files = check_open_files(config);
    let host = files.as_ref().ok().copied();
    missing.extend(files.err());
    missing.extend(check_direct_io(&config.data_dir).err());
    match host {
        Some(host) if missing.is_empty() => Ok(host),
        _ => Err(missing),
    }
}

fn kernel_release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

fn check_kernel(release: &str) -> Result<(), PreflightError> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let version = (numbers.next(), numbers.next());
    match version {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < KERNEL_MIN => {
            Err(PreflightError::Kernel { release: release.to_owned() })
        }
        // A release that can't be read is left to the io_uring probe.
        _ => Ok(()),
    }
}

fn check_io_uring() -> Result<(), PreflightError> {
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
    let disabled = disabled.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    match raw::probe_io_uring() {
        Ok(_) => Ok(()),
        Err(error) => Err(PreflightError::IoUring { reason: why_off(error, disabled) }),
    }
}

fn why_off(error: io::Error, disabled: u32) -> IoUringOff {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) if disabled > 0 => IoUringOff::Sysctl(disabled),
        Some(libc::EPERM | libc::EACCES) => IoUringOff::Filter(error),
        Some(libc::ENOSYS) => IoUringOff::NotBuilt,
        _ => IoUringOff::Other(error),
    }
}

/// Raises a soft limit to `wanted`, or as near as the hard limit allows; gives what it is then.
fn raise(resource: Resource, wanted: u64) -> u64 {
    let Rlimit { current, maximum } = getrlimit(resource);
    let reachable = maximum.map_or(wanted, |maximum| wanted.min(maximum));
    // No limit at all is shown as None.
    match current {
        Some(current) if current < reachable => match setrlimit(resource, Rlimit { current: Some(reachable), maximum })
        {
            Ok(()) => reachable,
            Err(_) => current,
        },
        Some(current) => current,
        None => u64::MAX,
    }
}

fn check_memlock(config: &PreflightConfig) -> Result<(), PreflightError> {
    let pinned = RINGS_PER_SHARD * config.io_memory_bytes as u64 * u64::from(config.shards);
    let needs = if may_lock_all() { MEMLOCK_BYTES_MIN } else { MEMLOCK_BYTES_MIN + pinned };
    let has = raise(Resource::Memlock, needs);
    if has < needs { Err(PreflightError::Memlock { has, needs }) } else { Ok(()) }
}

/// Whether this process has CAP_IPC_LOCK.
fn may_lock_all() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    effective >> CAP_IPC_LOCK & 1 == 1
}

fn check_open_files(config: &PreflightConfig) -> Result<Host, PreflightError> {
    let needs = FILES_PER_SHARD * (1 + u64::from(config.shards)) + config.connections;
    // As many as are allowed: who connects is not ours to choose.
    let has = raise(Resource::Nofile, u64::MAX);
    if has < needs { Err(PreflightError::OpenFiles { has, needs }) } else { Ok(Host { open_files_max: has }) }
}

fn check_direct_io(dir: &Path) -> Result<(), PreflightError> {
    let data_dir = |source: io::Error| PreflightError::DataDir { dir: dir.to_owned(), source };
    let direct_io = |reason: String| PreflightError::DirectIo { dir: dir.to_owned(), reason };
    let stat = rustix::fs::statfs(dir).map_err(|errno| data_dir(errno.into()))?;
    if stat.f_type as u64 == TMPFS {
        return Err(direct_io("it is in memory and would be gone after a restart".to_owned()));
    }
    let path = dir.join(format!(".probe-{}", std::process::id()));
    let made = File::create(&path).and_then(|file| file.write_all_at(&[0; DISK_BLOCK_BYTES], 0));
    let result = made.map_err(data_dir).and_then(|()| {
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        let file = File::options().read(true).write(true).custom_flags(flags).open(&path);
        let file = file.map_err(|error| direct_io(error.to_string()))?;
        // Some filesystems take the flag and then fail the transfer.
        let buffer = vec![0; 2 * DISK_BLOCK_BYTES];
        let from = buffer.as_ptr().align_offset(DISK_BLOCK_BYTES);
        let written = file.write_at(&buffer[from..from + DISK_BLOCK_BYTES], 0);
        let written = written.map_err(|error| direct_io(error.to_string()))?;
        if written == DISK_BLOCK_BYTES { Ok(()) } else { Err(direct_io(format!("wrote {written} bytes of a block"))) }
    });
    // Not there when it could not be made.
    let _ = fs::remove_file(&path);
    result
}

#[cfg(test)]
mod tests;
