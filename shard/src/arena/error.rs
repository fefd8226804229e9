//! What can be wrong with an arena; each says what to do, where there is something.

use std::io;
use std::path::{Path, PathBuf};

use super::descriptor::DescriptorError;
use super::header::HeaderError;

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// There is no such file.
    #[error("there is no arena {}", .0.display())]
    Missing(PathBuf),
    /// The file is there already.
    #[error("arena {} is there already", .0.display())]
    Exists(PathBuf),
    /// Another process has it.
    #[error("arena {} is in use by another process", .0.display())]
    Locked(PathBuf),
    /// Too little room in the memory filesystem.
    #[error(
        "{} has {free} bytes free, the arenas need {needs}: give a smaller --memory, or make it larger \
         (`mount -o remount,size={needs} {}`, docker: --shm-size), or use --arena anonymous", dir.display(), dir.display()
    )]
    NoRoom {
        /// Where.
        dir: PathBuf,
        /// Bytes that are wanted.
        needs: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The directory is on a disk.
    #[error(
        "arena directory {} is not in memory: choose one on tmpfs such as /dev/shm by --arena-dir, or use \
         --arena anonymous", .0.display()
    )]
    NotMemory(PathBuf),
    /// The header can't be read.
    #[error("arena {} can't be read: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: HeaderError,
    },
    /// The file is not as large as its header says.
    #[error("arena {} has {bytes} bytes, its header says {expected}", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// What it must be.
        expected: u64,
    },
    /// A block's descriptor is malformed.
    #[error("descriptor of block {block} is malformed: {reason}")]
    Descriptor {
        /// Which block.
        block: u32,
        /// What is wrong.
        reason: DescriptorError,
    },
    /// A system call failed.
    #[error("can't {action} arena {}: {source}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl ArenaError {
    pub(super) fn io<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source: source.into() }
    }
}
