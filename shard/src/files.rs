//! Files of a shard log: O_DIRECT, locked through the descriptor that is written by.
//!
//! The lock is what recovery of the next process waits for: after `kill -9` with writes in flight the ring goes on
//! writing for a while (0.3 s measured), and only this descriptor lives as long.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use glommio::io::{DmaFile, OpenOptions, ReadResult};
use ringmain_core::limits::{CHECKPOINT_BYTES_MAX, DISK_BLOCK_BYTES};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::clock::{mark_busy, sleep};
use crate::raw::OwnsFd;
use crate::runtime::io_error;

/// Largest read: the largest checkpoint. A read is one request, which the kernel splits as the device wants (tried up to
/// 64 MiB, past the 4 MiB of the device).
pub const READ_BYTES_MAX: usize = CHECKPOINT_BYTES_MAX;
/// How often, and how long apart, a lock is tried that somebody has: the reader of recovery gives it back before the
/// executor opens the file, but closing may take a moment.
const LOCK_TRIES: u32 = 100;
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// What failed on which file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// A system call failed.
    #[error("can't {action} {}: {source}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Fewer bytes were written than given: what stands on disk is not known.
    #[error("short write to {} at {place}: {written} of {bytes} bytes", path.display())]
    ShortWrite {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: u64,
        /// Bytes the system says it wrote.
        written: usize,
        /// Bytes given.
        bytes: usize,
    },
    /// The file ends before the bytes asked for.
    #[error("short read of {} at {place}: {read} of {bytes} bytes", path.display())]
    ShortRead {
        /// The file.
        path: PathBuf,
        /// Where in it.
        place: u64,
        /// Bytes there are.
        read: usize,
        /// Bytes asked for.
        bytes: usize,
    },
    /// Another descriptor holds the lock.
    #[error("{} is locked by another process", path.display())]
    Locked {
        /// The file.
        path: PathBuf,
    },
}

impl FileError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// Whether the bytes are lost, as far as anybody can tell: the device can't read them, or the file or a part of it is gone.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        match self {
            Self::Io { source, .. } => is_unreadable(source) || source.kind() == io::ErrorKind::NotFound,
            Self::ShortRead { .. } => true,
            Self::ShortWrite { .. } | Self::Locked { .. } => false,
        }
    }

    /// Whether the device is full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { source, .. }
            if matches!(source.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG)))
    }

    /// Whether the file could not be had for a reason that passes: the process or the host is short of descriptors or
    /// memory, or somebody holds the lock. Nothing was written or synced in vain.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Locked { .. } => true,
            Self::Io { action: "write to" | "sync" | "sync directory", .. } => false,
            Self::Io { source, .. } => matches!(
                source.raw_os_error(),
                Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN | libc::EINTR)
            ),
            Self::ShortWrite { .. } | Self::ShortRead { .. } => false,
        }
    }
}

/// Whether this is the device saying that it can't read its own bytes: Linux has a number for each layer that notices.
pub(crate) fn is_unreadable(error: &io::Error) -> bool {
    let of_device = [libc::EIO, libc::ENODATA, libc::EREMOTEIO, libc::EILSEQ, libc::EBADMSG, libc::EUCLEAN];
    error.raw_os_error().is_some_and(|number| of_device.contains(&number))
}

/// An aligned buffer to write from. Its bytes are whatever was there before: write each one.
#[derive(Debug)]
pub struct WriteBuffer(glommio::io::DmaBuffer);

impl WriteBuffer {
    /// A buffer of `bytes`, a multiple of 4096. It comes from the executor's registered memory while that lasts, which
    /// gives powers of two, else from the heap: nothing here waits, so bound how many are alive.
    ///
    /// # Panics
    /// Outside a shard, when `bytes` is 0 or not a multiple of 4096, or when there is no memory.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        assert!(bytes > 0 && bytes.is_multiple_of(DISK_BLOCK_BYTES), "a disk buffer of {bytes} bytes");
        Self(glommio::allocate_dma_buffer(bytes))
    }

    /// Its bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.0.as_bytes()
    }

    /// Its bytes, to be filled.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.0.as_bytes_mut()
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Makes it smaller; `bytes` must be a multiple of 4096.
    ///
    /// # Panics
    /// When `bytes` is not a multiple of 4096, or larger than the buffer.
    pub fn truncate(&mut self, bytes: usize) {
        assert!(bytes > 0 && bytes.is_multiple_of(DISK_BLOCK_BYTES), "a disk buffer of {bytes} bytes");
        self.0.trim_to_size(bytes);
    }
}

/// Bytes read, in the buffer that the device wrote to. Clones and slices share it.
#[derive(Clone, Debug, Default)]
pub struct ReadBuffer(ReadResult);

impl ReadBuffer {
    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }

    /// Number of bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Part of it.
    ///
    /// # Panics
    /// When the range reaches past it.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.bytes(), "{range:?} of {} bytes", self.bytes());
        Self(ReadResult::slice(&self.0, range.start, range.len()).unwrap_or_default())
    }
}

/// A file opened for O_DIRECT. Close it with [`close`](Self::close); a drop closes it later.
#[derive(Clone, Debug)]
pub struct LogFile {
    inner: Rc<Inner>,
}

#[derive(Debug)]
struct Inner {
    file: DmaFile,
    path: PathBuf,
    /// Requests in flight.
    busy: Cell<u32>,
}

impl LogFile {
    /// Makes a new file of `bytes`, all allocated on the device and reading as zeros, and locks it. The directory is
    /// not synced. When it fails the file may be left behind.
    ///
    /// # Errors
    /// When the file exists, or the device is full.
    pub async fn create(path: &Path, bytes: u64) -> Result<Self, FileError> {
        let file = Self::open_with(OpenOptions::new().read(true).write(true).create_new(true), path, "create").await?;
        file.lock(FlockOperation::NonBlockingLockExclusive).await?;
        file.reserve(bytes).await?;
        Ok(file)
    }

    /// The same, but the file stays empty: its size tells that none of its blocks was written.
    ///
    /// # Errors
    /// As [`LogFile::create`].
    pub async fn create_empty(path: &Path, bytes: u64) -> Result<Self, FileError> {
        let file = Self::open_with(OpenOptions::new().read(true).write(true).create_new(true), path, "create").await?;
        file.lock(FlockOperation::NonBlockingLockExclusive).await?;
        mark_busy();
        file.inner.file.pre_allocate(bytes, true).await.map_err(file.error("reserve space for"))?;
        Ok(file)
    }

    /// Opens an existing file to read and write, and locks it.
    ///
    /// # Errors
    /// When it is not there, or another descriptor keeps the lock for two seconds.
    pub async fn open(path: &Path) -> Result<Self, FileError> {
        let file = Self::open_with(OpenOptions::new().read(true).write(true), path, "open").await?;
        file.lock(FlockOperation::NonBlockingLockExclusive).await?;
        Ok(file)
    }

    /// Opens the file once more, for writes that sync what they write (O_DSYNC) before they complete. Both descriptors then
    /// hold the lock together: it is free when the last write through either has ended.
    ///
    /// # Errors
    /// When the file was renamed or removed meanwhile, or another process has got the lock.
    pub async fn open_syncing(&self) -> Result<Self, FileError> {
        let path = &self.inner.path;
        let mut options = OpenOptions::new();
        let file = Self::open_with(options.read(true).write(true).custom_flags(libc::O_DSYNC), path, "open").await?;
        // Who waits for the lock wants it for itself alone, so nobody gets in between.
        self.lock(FlockOperation::NonBlockingLockShared).await?;
        file.lock(FlockOperation::NonBlockingLockShared).await?;
        Ok(file)
    }

    /// Opens a sealed file to read only, without a lock.
    ///
    /// # Errors
    /// When it is not there.
    pub async fn open_sealed(path: &Path) -> Result<Self, FileError> {
        Self::open_with(OpenOptions::new().read(true), path, "open").await
    }

    async fn open_with(options: &OpenOptions, path: &Path, action: &'static str) -> Result<Self, FileError> {
        let file = options.dma_open(path).await.map_err(|error| FileError::io(action, path)(io_error(error)))?;
        Ok(Self { inner: Rc::new(Inner { file, path: path.to_owned(), busy: Cell::new(0) }) })
    }

    async fn lock(&self, operation: FlockOperation) -> Result<(), FileError> {
        for _ in 0..LOCK_TRIES {
            match rustix::fs::flock(self.inner.file.fd(), operation) {
                Ok(()) => return Ok(()),
                Err(Errno::WOULDBLOCK) => sleep(LOCK_RETRY).await,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(FileError::io("lock", &self.inner.path)(errno.into())),
            }
        }
        Err(FileError::Locked { path: self.inner.path.clone() })
    }

    fn error(&self, action: &'static str) -> impl FnOnce(glommio::GlommioError<()>) -> FileError + '_ {
        move |error| FileError::io(action, &self.inner.path)(io_error(error))
    }

    /// The path it was opened by.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Size of the file in bytes.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn bytes(&self) -> Result<u64, FileError> {
        let stat = rustix::fs::fstat(self.inner.file.fd());
        let stat = stat.map_err(|errno| FileError::io("look at", &self.inner.path)(errno.into()))?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    /// Allocates the device's blocks of the first `bytes` and makes the file at least that large.
    ///
    /// # Errors
    /// When the device is full.
    pub async fn reserve(&self, bytes: u64) -> Result<(), FileError> {
        mark_busy();
        self.inner.file.pre_allocate(bytes, false).await.map_err(self.error("reserve space for"))
    }

    /// Writes the whole buffer at `place`, a multiple of 4096. Dropping the future leaves open whether it was written.
    ///
    /// # Errors
    /// When the device fails or writes short; then never write to the same range again.
    pub async fn write_at(&self, buffer: WriteBuffer, place: u64) -> Result<(), FileError> {
        debug_assert!(place.is_multiple_of(DISK_BLOCK_BYTES as u64));
        mark_busy();
        let bytes = buffer.bytes();
        let _busy = self.begin();
        let written = self.inner.file.write_at(buffer.0, place).await.map_err(self.error("write to"))?;
        mark_busy();
        if written == bytes {
            return Ok(());
        }
        Err(FileError::ShortWrite { path: self.inner.path.clone(), place, written, bytes })
    }

    /// Reads `bytes` at `place`, which need not be aligned (aligned ones are cheaper).
    ///
    /// # Errors
    /// When the device fails or the file ends before.
    ///
    /// # Panics
    /// When `bytes` is more than [`READ_BYTES_MAX`].
    pub async fn read_at(&self, place: u64, bytes: usize) -> Result<ReadBuffer, FileError> {
        assert!(bytes <= READ_BYTES_MAX, "a read of {bytes} bytes");
        mark_busy();
        let _busy = self.begin();
        let read = self.inner.file.read_at(place, bytes).await.map_err(self.error("read"))?;
        mark_busy();
        if read.len() == bytes {
            return Ok(ReadBuffer(read));
        }
        Err(FileError::ShortRead { path: self.inner.path.clone(), place, read: read.len(), bytes })
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// When the device fails; then nothing is known about any write since the last good one: never try again.
    pub async fn fdatasync(&self) -> Result<(), FileError> {
        mark_busy();
        let _busy = self.begin();
        let result = self.inner.file.fdatasync().await.map_err(self.error("sync"));
        mark_busy();
        result
    }

    /// Cuts the file to `bytes`.
    ///
    /// # Errors
    /// As ftruncate(2).
    pub async fn truncate(&self, bytes: u64) -> Result<(), FileError> {
        self.inner.file.truncate(bytes).await.map_err(self.error("truncate"))
    }

    /// Gives the device's blocks of a range back; the range then reads as zeros.
    ///
    /// # Errors
    /// When the filesystem can't.
    pub async fn punch(&self, place: u64, bytes: u64) -> Result<(), FileError> {
        self.inner.file.deallocate(place, bytes).await.map_err(self.error("punch a hole in"))
    }

    fn begin(&self) -> Busy<'_> {
        self.inner.busy.set(self.inner.busy.get() + 1);
        Busy(&self.inner.busy)
    }

    /// Requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.inner.busy.get()
    }

    /// Closes the file and with it gives the lock back, unless clones are still about: then the last one's drop does it.
    ///
    /// # Errors
    /// As close(2).
    pub async fn close(self) -> Result<(), FileError> {
        match Rc::try_unwrap(self.inner) {
            Ok(Inner { file, path, .. }) => {
                file.close().await.map_err(|error| FileError::io("close", &path)(io_error(error)))
            }
            Err(_) => Ok(()),
        }
    }
}

/// Counts a request in flight.
struct Busy<'a>(&'a Cell<u32>);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Makes the entries of a directory durable: names of files made, renamed or removed.
///
/// # Errors
/// When the device fails.
pub async fn sync_dir(path: &Path) -> Result<(), FileError> {
    let wrap = |action| move |error: glommio::GlommioError<()>| FileError::io(action, path)(io_error(error));
    let dir = glommio::io::Directory::open(path).await.map_err(wrap("open directory"))?;
    let synced = dir.sync().await.map_err(wrap("sync directory"));
    dir.close().await.map_err(wrap("close directory"))?;
    synced
}

/// Renames a file; sync the directory to make it last.
///
/// # Errors
/// As rename(2).
pub async fn rename(from: &Path, to: &Path) -> Result<(), FileError> {
    glommio::io::rename(from, to).await.map_err(|error| FileError::io("rename", from)(error.into()))
}

/// Removes a file; sync the directory to make it last.
///
/// # Errors
/// As unlink(2).
pub async fn remove(path: &Path) -> Result<(), FileError> {
    glommio::io::remove(path).await.map_err(|error| FileError::io("remove", path)(error.into()))
}

#[cfg(test)]
mod tests;
