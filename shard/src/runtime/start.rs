//! Making an executor, with what glommio leaves undone.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use glommio::{LocalExecutor, LocalExecutorBuilder, Placement, PoolPlacement};
use ringmain_core::limits::DISK_BLOCK_BYTES;
use rustix::thread::CpuSet;

use super::{RuntimeError, ShardThreadConfig, io_error};
use crate::raw;

/// How long a task may keep the executor from looking at its IO.
const PREEMPT_TIMER: Duration = Duration::from_micros(300);
/// Entries of each of the executor's rings: an idle connection keeps one poll in flight.
const RING_DEPTH: usize = 512;

/// The CPUs that the calling thread may use, in order.
///
/// # Errors
/// As sched_getaffinity(2).
pub fn usable_cpus() -> io::Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Wakes the executor that listens to one of `eventfds`, whatever it waits for.
pub(super) fn knock(eventfds: &[OwnedFd]) {
    for eventfd in eventfds {
        // A full counter is as good a knock.
        let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
    }
}

/// Makes the executor of this thread, and finds the eventfds one of which it listens to.
pub(super) fn make(config: &ShardThreadConfig, cpus: &[usize]) -> Result<(LocalExecutor, Vec<OwnedFd>), RuntimeError> {
    /// One at a time, to tell whose descriptors are new. Other threads may make some as well: a knock too many at an
    /// eventfd is a spurious wake-up.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let shard = config.index;
    let executor_error = |reason: String| RuntimeError::Executor { shard, reason };
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = open_fds("eventfd").map_err(|error| executor_error(error.to_string()))?;
    let executor = LocalExecutorBuilder::new(config.cpu.map_or(Placement::Unbound, Placement::Fixed))
        .name(&format!("shard-{shard}"))
        .io_memory(config.io_memory_bytes)
        .ring_depth(RING_DEPTH)
        .preempt_timer(PREEMPT_TIMER)
        .blocking_thread_pool_placement(PoolPlacement::Unbound(1))
        .make()
        .map_err(|error| executor_error(error.to_string()))?;
    let mut eventfds = open_fds("eventfd").map_err(|error| executor_error(error.to_string()))?;
    eventfds.retain(|fd| !before.contains(fd));
    let eventfds = eventfds.into_iter().filter_map(|fd| raw::duplicate(fd).ok()).collect();
    drop(guard);
    if let Some(own) = config.cpu {
        move_workers(cpus, own).map_err(|source| RuntimeError::Affinity { shard, source })?;
    }
    Ok((executor, eventfds))
}

/// The process's open descriptors whose name has `kind` in it. They come and go while this runs.
fn open_fds(kind: &str) -> io::Result<Vec<i32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // One that has gone is none of ours.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        if target.to_string_lossy().contains(kind) {
            found.extend(entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
        }
    }
    Ok(found)
}

/// Lets the io_uring workers of this thread, which is bound to CPU `own`, run on the other ones of `cpus`. Not on `own`
/// as well: workers inherit the binding, and the kernel keeps them to the part of a new mask that lies in it, unless
/// there is none. glommio does not tell its rings' descriptors, but any ring will do: workers belong to the thread.
fn move_workers(cpus: &[usize], own: usize) -> io::Result<()> {
    let mut others = vec![0u8; CpuSet::MAX_CPU / 8];
    for cpu in cpus.iter().filter(|&&cpu| cpu != own) {
        others[cpu / 8] |= 1 << (cpu % 8);
    }
    if others.iter().all(|&byte| byte == 0) {
        return Ok(());
    }
    let mut last = io::Error::new(io::ErrorKind::NotFound, "no io_uring found in /proc/self/fd");
    for fd in open_fds("io_uring")? {
        match raw::set_worker_affinity(fd, &others) {
            Ok(()) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Settles glommio's probe of polled IO, and reads a block. The probe is a read through the first descriptor that is
/// opened on a device: one that can't be read switches polling off for this thread, where the end of an empty file would
/// make it believe that polling works.
pub(super) async fn prime(path: &Path) -> io::Result<()> {
    let result = async {
        // Of an earlier process with the same id, if it is there at all.
        let _ = fs::remove_file(path);
        let file = fs::File::create_new(path)?;
        std::os::unix::fs::FileExt::write_all_at(&file, &[0x52; DISK_BLOCK_BYTES], 0)?;
        file.sync_all()?;
        let unreadable = glommio::io::OpenOptions::new().write(true).dma_open(path).await.map_err(io_error)?;
        unreadable.close().await.map_err(io_error)?;
        let file = glommio::io::DmaFile::open(path).await.map_err(io_error)?;
        let read = file.read_at_aligned(0, DISK_BLOCK_BYTES).await.map_err(io_error)?;
        if read.len() != DISK_BLOCK_BYTES {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a block that was just written is not there"));
        }
        drop(read);
        file.close().await.map_err(io_error)?;
        Ok(())
    }
    .await;
    let removed = fs::remove_file(path);
    result.and(removed)
}
