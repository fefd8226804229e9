//! Keeping an arena that can't be adopted: it may hold records that were acked, and a person may want to look.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{Arena, ArenaError, reserve};

/// Copied at a time.
const COPY_BYTES: usize = 64 * 1024;

impl Arena {
    /// Copies the arena's file to `to` (parts of zeros become holes), syncs it and then removes the arena. Takes a second
    /// or so per GiB.
    ///
    /// # Errors
    /// When `to` is there already or can't be written; the arena then stays.
    pub fn quarantine(self, to: &Path) -> Result<(), ArenaError> {
        let Some((file, path)) = &self.file else { return Ok(()) };
        copy_sparse(file, to).map_err(ArenaError::io("keep a copy of", path))?;
        self.remove()
    }
}

/// Moves an arena file that can't be opened as one out of the way; see [`Arena::quarantine`].
///
/// # Errors
/// When `to` is there already or can't be written; the file then stays.
pub fn quarantine_file(path: &Path, to: &Path) -> Result<(), ArenaError> {
    let file = reserve::open_locked(&mut File::options(), path)?;
    copy_sparse(&file, to).map_err(ArenaError::io("keep a copy of", path))?;
    fs::remove_file(path).map_err(ArenaError::io("remove", path))
}

fn copy_sparse(from: &File, to: &Path) -> io::Result<()> {
    let bytes = from.metadata()?.len();
    let out = File::options().write(true).create_new(true).open(to)?;
    let copy = || {
        let mut piece = vec![0; COPY_BYTES];
        let mut at = 0;
        while at < bytes {
            let size = usize::try_from(bytes - at).map_or(COPY_BYTES, |rest| rest.min(COPY_BYTES));
            from.read_exact_at(&mut piece[..size], at)?;
            if piece[..size].iter().any(|&byte| byte != 0) {
                out.write_all_at(&piece[..size], at)?;
            }
            at += size as u64;
        }
        out.set_len(bytes)?;
        out.sync_all()
    };
    let copied = copy();
    if copied.is_err() {
        // Half a copy is of no use and may be what filled the disk.
        let _ = fs::remove_file(to);
    }
    copied
}
