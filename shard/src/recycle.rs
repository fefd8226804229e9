//! Dead segment files, kept to be written again: blocks that were written before are cheapest to sync.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use crate::files::{FileError, LogFile, remove, rename, sync_dir};

/// Dead files that a shard keeps; more are removed.
const POOL_MAX: usize = 4;

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

    /// A locked file at `path`, recycled if there is one, with room for its first `bytes`.
    pub(crate) async fn take(&self, path: &Path, bytes: u64) -> Result<LogFile, FileError> {
        // Left by a roll that did not come to its end; recovery has decided that it holds nothing.
        if path.exists() {
            remove(path).await?;
        }
        let recycled = self.files.borrow_mut().pop();
        let Some(recycled) = recycled else { return LogFile::create(path, bytes).await };
        rename(&recycled, path).await?;
        let file = LogFile::open(path).await?;
        file.reserve(bytes).await?;
        Ok(file)
    }

    /// Makes a file of `bytes` for the next segment ahead of need, unless there is one: a roll then only renames it. A full disk is
    /// left for the roll to find.
    pub(crate) async fn prepare(&self, bytes: u64) -> Result<(), FileError> {
        if !self.files.borrow().is_empty() {
            return Ok(());
        }
        let path = self.next_path();
        let made = async {
            let file = LogFile::create(&path, bytes).await?;
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

    fn next_path(&self) -> PathBuf {
        let number = self.next.replace_with(|next| *next + 1);
        self.dir.join(format!("recycled-{number}.free"))
    }

    /// Takes a dead segment's file, which nobody has open any more, or removes it when the pool is full.
    pub(crate) async fn put(&self, path: &Path) -> Result<(), FileError> {
        if self.files.borrow().len() >= POOL_MAX {
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

fn number_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("recycled-")?.strip_suffix(".free")?.parse().ok()
}
