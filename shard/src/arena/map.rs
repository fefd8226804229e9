//! Mapped memory behind a safe face: the only unsafe code of the arena.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// A mapping, given back to the system when the last one who knows it is gone.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a region is an address and a size; what may be done with the memory is decided by `Map` and `Populator`.
unsafe impl Send for Region {}
// SAFETY: as for Send; through a shared `Region` nothing can be reached.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `Map` in whole, and all references into it borrow from a `Map`, which holds
        // this region.
        let result = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(result.is_ok());
    }
}

/// Memory that one thread reads and writes; other processes are kept out by the file's lock. Writes go through a shared
/// reference, since replies read committed batches while others are appended: whoever writes a range must know that
/// nobody holds a slice of it. The arena does: slices are of committed bytes, which are not written again until the
/// block is free, or end within the call that made them.
#[derive(Debug)]
pub(super) struct Map {
    region: Arc<Region>,
    /// Not Sync: one thread at a time.
    _one_thread: PhantomData<Cell<()>>,
}

impl Map {
    /// Maps the first `bytes` of a file that is at least that large, shared.
    pub(super) fn of_file(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that is in use.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )?
        };
        Self::of(start.cast(), bytes)
    }

    /// Maps `bytes` of memory that belongs to this process only.
    pub(super) fn anonymous(bytes: usize) -> io::Result<Self> {
        // SAFETY: as in `of_file`.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        Self::of(start.cast(), bytes)
    }

    fn of(start: *mut u8, bytes: usize) -> io::Result<Self> {
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        let map = Self { region: Arc::new(Region { start, bytes }), _one_thread: PhantomData };
        // Children must not keep it alive, and a core dump of gigabytes of records helps nobody. Advice only.
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: the range is the mapping just made, and these advices change no contents in this process.
            let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, advice) };
        }
        Ok(map)
    }

    fn check(&self, at: usize, bytes: usize) {
        let end = at.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.region.bytes), "{bytes} bytes at {at} are outside of the arena");
    }

    /// `bytes` at `at`, to read.
    pub(super) fn slice(&self, at: usize, bytes: usize) -> &[u8] {
        self.check(at, bytes);
        // SAFETY: checked to lie in the mapping, which lives as long as `self`; any byte is a valid u8; nothing in the
        // range is written while the slice is about, see the type; no slice covers an atomic word (see `word`).
        unsafe { std::slice::from_raw_parts(self.region.start.as_ptr().add(at), bytes) }
    }

    /// Copies `from` to `at`. Nobody may hold a slice of that range.
    pub(super) fn write(&self, at: usize, from: &[u8]) {
        self.check(at, from.len());
        // SAFETY: checked to lie in the mapping, which lives as long as `self`; `from` is no slice of the range, see the
        // type; the map is not Sync, so no other thread is here.
        unsafe { std::ptr::copy(from.as_ptr(), self.region.start.as_ptr().add(at), from.len()) }
    }

    /// The atomic word at `at`, a multiple of 8. The arena reaches these eight bytes in no other way.
    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        self.check(at, size_of::<u64>());
        assert!(at.is_multiple_of(align_of::<AtomicU64>()));
        // SAFETY: checked to lie in the mapping and to be aligned (the mapping starts at a page); valid as long as
        // `self`; all access to this word in this process is atomic.
        unsafe { AtomicU64::from_ptr(self.region.start.as_ptr().add(at).cast()) }
    }

    /// For making pages ready on another thread.
    pub(super) fn populator(&self) -> Populator {
        Populator { region: Arc::clone(&self.region) }
    }
}

/// Makes pages of a map ready to write without touching their contents; may be used on any thread.
#[derive(Clone, Debug)]
pub(super) struct Populator {
    region: Arc<Region>,
}

impl Populator {
    /// Makes the pages of a range ready, so that the first write to each does not fault.
    pub(super) fn populate(&self, at: usize, bytes: usize) -> io::Result<()> {
        assert!(at.checked_add(bytes).is_some_and(|end| end <= self.region.bytes));
        // SAFETY: the range lies in the mapping, which `self` keeps; populating changes no contents.
        unsafe {
            let start = self.region.start.as_ptr().add(at).cast();
            rustix::mm::madvise(start, bytes, Advice::LinuxPopulateWrite)?;
        }
        Ok(())
    }
}
