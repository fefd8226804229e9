//! Small filesystems, for tests of what is full, slow or broken.

#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted filesystem, unmounted at the end.
pub struct Mount {
    at: PathBuf,
    _dir: tempfile::TempDir,
    /// What it lies in, unmounted after it.
    below: Option<Box<Mount>>,
}

impl Mount {
    /// A tmpfs of this size; none, with a word about it, where mounting is not allowed.
    pub fn tmpfs(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("mounted");
        std::fs::create_dir(&at).unwrap();
        Self::made(dir, &at, Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]))
    }

    /// An ext4 in a file of so many bytes.
    pub fn ext4(bytes: u64) -> Option<Self> {
        Self::ext4_in(tempfile::tempdir().unwrap(), bytes, None)
    }

    /// An ext4 whose device fails writes with EIO once `good_bytes` of it have been written: its file lies in a smaller
    /// filesystem.
    pub fn failing_ext4(bytes: u64, good_bytes: u64) -> Option<Self> {
        let below = Self::tmpfs(&good_bytes.to_string())?;
        let dir = tempfile::tempdir_in(below.path()).unwrap();
        Self::ext4_in(dir, bytes, Some(Box::new(below)))
    }

    fn ext4_in(dir: tempfile::TempDir, bytes: u64, below: Option<Box<Self>>) -> Option<Self> {
        let (image, at) = (dir.path().join("image"), dir.path().join("mounted"));
        std::fs::create_dir(&at).unwrap();
        std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
        if !runs(Command::new("mkfs.ext4").args(["-q", "-m", "0", "-O", "^has_journal"]).arg(&image)) {
            eprintln!("skipped: mkfs.ext4 does not work here");
            return None;
        }
        let mut made = Self::made(dir, &at, Command::new("mount").args(["-o", "loop"]).arg(&image))?;
        made.below = below;
        Some(made)
    }

    fn made(dir: tempfile::TempDir, at: &Path, command: &mut Command) -> Option<Self> {
        if !runs(command.arg(at)) {
            eprintln!("skipped: mounting is not allowed here (needs root)");
            return None;
        }
        Some(Self { at: at.to_owned(), below: None, _dir: dir })
    }

    pub fn path(&self) -> &Path {
        &self.at
    }

    /// The file that an ext4 lies in.
    pub fn image(&self) -> PathBuf {
        self.at.with_file_name("image")
    }
}

fn runs(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: a process that is just ending may still have it open.
        if !runs(Command::new("umount").arg("-l").arg(&self.at)) {
            eprintln!("{} could not be unmounted", self.at.display());
        }
    }
}
