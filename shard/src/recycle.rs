//! Dead segment files, kept to be written again: blocks that were written before are cheapest to sync.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use ringmain_core::limits::SEGMENT_BYTES_MIN;

use crate::files::{FileError, LogFile, remove, rename, sync_dir};

/// Dead files that a shard keeps; more are removed.
const POOL_MAX: usize = 4;
/// What a whole segment leaves free on the disk: for the catalog, the master's store and the small segment that a start on
/// a full disk makes, so that topics can be deleted.
const RESERVE_BYTES: u64 = 8 * 1024 * 1024;

/// The pool of one shard. Its files are named `recycled-N.free` in the shard's directory.
pub(crate) struct RecyclePool {
    dir: PathBuf,
    files: RefCell<Vec<PathBuf>>,
    next: RefCell<u64>,
}

impl RecyclePool {
    /// A pool with what earlier lives left in the directory.
    pub(crate) fn new(dir: PathBuf) -> Self {
        let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten().map(|entry| entry.path());
        let files: Vec<PathBuf> = entries.filter(|path| number_of(path).is_some()).collect();
        let next = files.iter().filter_map(|path| number_of(path)).max().map_or(0, |last| last + 1);
        Self { dir, files: RefCell::new(files), next: RefCell::new(next) }
    }

    /// A locked file at `path`, recycled if there is one, with room for its first `bytes`; and how many of them were
    /// written before.
    pub(crate) async fn take(&self, path: &Path, bytes: u64) -> Result<(LogFile, u64), FileError> {
        // Left by a roll that did not come to its end; recovery has decided that it holds nothing.
        if path.exists() {
            remove(path).await?;
        }
        let recycled = self.files.borrow_mut().pop();
        let Some(recycled) = recycled else {
            check_room(path, bytes, bytes)?;
            let made = LogFile::create(path, bytes).await;
            if made.is_err() {
                // It has taken what room there was, which deleting topics needs. The error says what matters.
                let _ = remove(path).await;
            }
            return made.map(|file| (file, 0));
        };
        let missing = bytes.saturating_sub(allocated_bytes(&recycled).unwrap_or(0));
        if let Err(error) = check_room(&recycled, missing, bytes) {
            self.files.borrow_mut().push(recycled);
            return Err(error);
        }
        rename(&recycled, path).await?;
        let file = LogFile::open(path).await?;
        // A dead segment was cut behind its footer; one that was made ahead is empty.
        let written_bytes = file.bytes()?.min(bytes);
        file.reserve(bytes).await?;
        Ok((file, written_bytes))
    }

    /// Makes a file of `bytes` for the next segment ahead of need, unless there is one or the disk is nearly full: a roll then only
    /// renames it.
    pub(crate) async fn prepare(&self, bytes: u64) -> Result<(), FileError> {
        if !self.files.borrow().is_empty() || !self.has_plenty(bytes) {
            return Ok(());
        }
        let path = self.next_path();
        let made = async {
            let file = LogFile::create_empty(&path, bytes).await?;
            file.fdatasync().await?;
            file.close().await
        };
        if let Err(error) = made.await {
            // What is left of it is worth nothing.
            let _ = remove(&path).await;
            return if error.is_full() { Ok(()) } else { Err(error) };
        }
        sync_dir(&self.dir).await?;
        self.files.borrow_mut().push(path);
        Ok(())
    }

    /// Whether the disk has room for several times `bytes`: what is left of a nearly full one is for deleting topics.
    fn has_plenty(&self, bytes: u64) -> bool {
        free_bytes(&self.dir).is_some_and(|free| free / 4 >= bytes)
    }

    fn next_path(&self) -> PathBuf {
        let number = self.next.replace_with(|next| *next + 1);
        self.dir.join(format!("recycled-{number}.free"))
    }

    /// Takes a dead segment's file, which nobody has open any more, or removes it when the pool is full, or the file has
    /// holes or is short of a segment of `bytes`: what is gained by writing to blocks that were written before would be lost.
    pub(crate) async fn put(&self, path: &Path, bytes: u64) -> Result<(), FileError> {
        let is_short = allocated_bytes(path).is_none_or(|allocated| allocated < bytes / 2);
        if self.files.borrow().len() >= POOL_MAX || is_short || has_holes(path) {
            remove(path).await?;
            return sync_dir(&self.dir).await;
        }
        let to = self.next_path();
        rename(path, &to).await?;
        sync_dir(&self.dir).await?;
        self.files.borrow_mut().push(to);
        Ok(())
    }
}

/// Makes `file` a whole segment of `bytes`, unless that would take the last room of the disk: an allocation that fails
/// keeps what it got.
pub(crate) async fn make_whole(file: &LogFile, bytes: u64) -> Result<(), FileError> {
    if file.bytes()? < bytes {
        check_room(file.path(), bytes, bytes)?;
    }
    file.reserve(bytes).await
}

/// Whether the disk has room for the `missing` bytes of a file of `bytes` at `path`, and for the reserve if it is a whole
/// segment.
fn check_room(path: &Path, missing: u64, bytes: u64) -> Result<(), FileError> {
    let kept = if bytes >= SEGMENT_BYTES_MIN { RESERVE_BYTES } else { 0 };
    if missing > 0 && path.parent().and_then(free_bytes).is_some_and(|free| free < missing + kept) {
        let source = std::io::Error::from_raw_os_error(libc::ENOSPC);
        return Err(FileError::Io { action: "reserve space for", path: path.to_owned(), source });
    }
    Ok(())
}

/// Bytes that the device holds for a file.
pub(crate) fn allocated_bytes(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    Some(std::fs::metadata(path).ok()?.blocks() * 512)
}

fn has_holes(path: &Path) -> bool {
    let size = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    allocated_bytes(path).is_some_and(|allocated| allocated < size)
}

fn free_bytes(dir: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(dir).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

fn number_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("recycled-")?.strip_suffix(".free")?.parse().ok()
}
