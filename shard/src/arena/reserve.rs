//! Room for the arena: memory is taken before it is used, so that a full memory filesystem is an error at start and not
//! a SIGBUS later.
//!
//! fallocate takes about 0.4 s a GiB, so only the first slabs are reserved before the shard is ready. It maps nothing:
//! the process's resident size grows as blocks are used (about 1 us a page).

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use ringmain_core::limits::SLAB_BYTES;
use rustix::fs::{FallocateFlags, FlockOperation};
use rustix::io::Errno;

use super::map::{Map, Populator};
use super::{ArenaError, arena_bytes, slabs_at};

/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of linux/magic.h.
const MEMORY_FILESYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// A process that was just killed may need a moment to give its lock back.
const LOCK_TRIES: u32 = 100;
const LOCK_RETRY: Duration = Duration::from_millis(50);

/// Reserves the slabs of an arena; may run on another thread.
#[derive(Clone, Debug)]
pub struct ArenaReserver {
    /// `None` = anonymous memory, which needs no reserving.
    file: Option<Arc<(File, PathBuf)>>,
    populator: Populator,
    slab_count: u32,
    reserved: Arc<AtomicU32>,
}

impl ArenaReserver {
    pub(super) fn of_file(file: File, path: &Path, map: &Map, slab_count: u32) -> Self {
        let file = Some(Arc::new((file, path.to_owned())));
        Self { file, populator: map.populator(), slab_count, reserved: Arc::default() }
    }

    pub(super) fn of_anonymous(map: &Map, slab_count: u32) -> Self {
        Self { file: None, populator: map.populator(), slab_count, reserved: Arc::new(slab_count.into()) }
    }

    /// Slabs reserved so far, from the first.
    #[must_use]
    pub fn reserved_slabs(&self) -> u32 {
        self.reserved.load(Ordering::Acquire)
    }

    /// Reserves header, descriptors and the first slabs.
    pub(super) fn reserve_first(&self, slabs: u32) -> Result<(), ArenaError> {
        self.allocate(0, slabs_at(self.slab_count))?;
        while self.reserved_slabs() < slabs {
            self.reserve_next()?;
        }
        Ok(())
    }

    /// Reserves the next slab, which takes about a millisecond; says whether there are more.
    ///
    /// # Errors
    /// When the memory filesystem is full.
    pub fn reserve_next(&self) -> Result<bool, ArenaError> {
        let next = self.reserved_slabs();
        if next < self.slab_count {
            self.allocate(slabs_at(self.slab_count) + next as usize * SLAB_BYTES, SLAB_BYTES)?;
            // Two reservers at once do the same work twice, no harm.
            self.reserved.fetch_max(next + 1, Ordering::Release);
        }
        Ok(next + 1 < self.slab_count)
    }

    /// Reserves all slabs.
    ///
    /// # Errors
    /// When the memory filesystem is full; the slabs reserved so far stay usable.
    pub fn reserve_all(&self) -> Result<(), ArenaError> {
        while self.reserve_next()? {}
        Ok(())
    }

    /// Maps the pages of a reserved slab, so that the first writes to it don't fault: 0.7 ms here instead of 1.1 ms on
    /// the shard. The process's resident size then grows by the slab.
    ///
    /// # Errors
    /// As madvise(2); the slab is usable all the same.
    ///
    /// # Panics
    /// When the slab is not reserved.
    pub fn populate(&self, slab: u32) -> io::Result<()> {
        assert!(slab < self.reserved_slabs(), "slab {slab} is not reserved");
        self.populator.populate(slabs_at(self.slab_count) + slab as usize * SLAB_BYTES, SLAB_BYTES)
    }

    fn allocate(&self, at: usize, bytes: usize) -> Result<(), ArenaError> {
        let Some((file, path)) = self.file.as_deref() else { return Ok(()) };
        loop {
            match rustix::fs::fallocate(file, FallocateFlags::empty(), at as u64, bytes as u64) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::NOSPC) => {
                    let dir = path.parent().unwrap_or(path).to_owned();
                    let free = free_bytes(&dir).unwrap_or(0);
                    return Err(ArenaError::NoRoom { dir, needs: arena_bytes(self.slab_count), free });
                }
                Err(errno) => return Err(ArenaError::io("reserve memory for", path)(errno)),
            }
        }
    }
}

fn free_bytes(dir: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Checks that `dir` has room for `needs` more bytes: for all shards together before the first arena is made, since
/// arenas take theirs bit by bit.
///
/// # Errors
/// `NoRoom`, which says what to do; or when `dir` can't be looked at.
pub fn check_room(dir: &Path, needs: u64) -> Result<(), ArenaError> {
    let free = free_bytes(dir).map_err(ArenaError::io("look for room for", dir))?;
    if free < needs { Err(ArenaError::NoRoom { dir: dir.to_owned(), needs, free }) } else { Ok(()) }
}

/// What a start asks of `dir` before it makes arenas there: that it is in memory and has room for `needs` bytes.
///
/// # Errors
/// Each says what to do.
pub fn check_dir(dir: &Path, needs: u64) -> Result<(), ArenaError> {
    check_in_memory(dir)?;
    check_room(dir, needs)
}

/// Checks that `dir` is in a memory filesystem: on a disk, the kernel would write the whole arena back over and over.
pub(super) fn check_in_memory(dir: &Path) -> Result<(), ArenaError> {
    let stat = rustix::fs::statfs(dir).map_err(ArenaError::io("find a directory for", dir))?;
    if MEMORY_FILESYSTEMS.contains(&(stat.f_type as u64)) { Ok(()) } else { Err(ArenaError::NotMemory(dir.to_owned())) }
}

/// Opens a file to read and write and locks it.
pub(super) fn open_locked(options: &mut OpenOptions, path: &Path) -> Result<File, ArenaError> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = options.read(true).write(true).mode(0o600).open(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ArenaError::Missing(path.to_owned()),
        _ => ArenaError::io("open", path)(source),
    })?;
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) => thread::sleep(LOCK_RETRY),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(ArenaError::io("lock", path)(errno)),
        }
    }
    Err(ArenaError::Locked(path.to_owned()))
}
