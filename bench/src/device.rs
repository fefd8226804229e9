//! The folder that a disk baseline runs in: its block device, what that device counted, and whether O_DIRECT works.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};

/// Sectors of `/sys/dev/block/*/stat` have this size on every device.
const SECTOR_BYTES: u64 = 512;
/// Requests that the device takes whole when the kernel does not say: its own default.
const REQUEST_BYTES_DEFAULT: usize = 128 * 1024;
/// `f_type` of tmpfs: it accepts O_DIRECT and ignores it.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// The block device under a folder, when there is one: network and overlay file systems have none.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    folder: PathBuf,
    /// Its kernel name, such as `nvme0n1p1`.
    pub name: String,
}

impl Device {
    /// The device that has `folder`.
    pub(crate) fn under(folder: &Path) -> Option<Self> {
        let device = std::fs::metadata(folder).ok()?.dev();
        let link = format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let folder = std::fs::canonicalize(link).ok()?;
        let name = folder.file_name()?.to_string_lossy().into_owned();
        Some(Self { folder, name })
    }

    /// Bytes written to it since it appeared, by everybody.
    pub(crate) fn written_bytes(&self) -> Option<u64> {
        let stat = std::fs::read_to_string(self.folder.join("stat")).ok()?;
        Some(stat.split_whitespace().nth(6)?.parse::<u64>().ok()? * SECTOR_BYTES)
    }

    /// Largest request that it takes whole. glommio waits for ever for a direct read that is larger.
    fn request_bytes_max(&self) -> Option<usize> {
        // A partition has its limits one folder up, at its disk.
        let queue = [self.folder.join("queue"), self.folder.parent()?.join("queue")];
        let text = queue.iter().find_map(|queue| std::fs::read_to_string(queue.join("max_sectors_kb")).ok())?;
        Some(text.trim().parse::<usize>().ok()? * 1024)
    }
}

/// Largest direct read that is safe in this folder.
pub(crate) fn read_bytes_max(device: Option<&Device>) -> usize {
    device.and_then(Device::request_bytes_max).unwrap_or(REQUEST_BYTES_DEFAULT)
}

/// Fails with the fix when files in `folder` can't be opened with O_DIRECT, or when `bytes` do not fit.
pub(crate) fn check_folder(folder: &Path, bytes: u64) -> Result<()> {
    let at = folder.display();
    let file_system = rustix::fs::statfs(folder).with_context(|| format!("{at} can't be used"))?;
    if file_system.f_type == TMPFS_MAGIC {
        bail!("{at} is in memory (tmpfs), not on a disk: name a folder on the disk that the broker will use");
    }
    let room = file_system.f_bavail * file_system.f_bsize as u64;
    if room < bytes {
        bail!("{at} has room for {room} bytes, but this run needs {bytes}: free some, or make the file smaller");
    }
    let (file, path) = unnamed(folder, libc::O_DIRECT).with_context(|| {
        format!("{at} takes no direct IO (O_DIRECT): name a folder on ext4, xfs or another local file system")
    })?;
    drop(file);
    debug_assert!(!path.exists());
    Ok(())
}

/// A new file of this run in `folder`, already without its name, so that nothing is left whatever happens; and the name
/// it had.
fn unnamed(folder: &Path, flags: libc::c_int) -> Result<(File, PathBuf)> {
    let path = scratch_path(folder);
    let file = OpenOptions::new().read(true).write(true).create_new(true).custom_flags(flags).open(&path);
    let removed = std::fs::remove_file(&path);
    let file = file?;
    removed?;
    Ok((file, path))
}

/// A name that no other run and no other call has.
pub(crate) fn scratch_path(folder: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!(".ringmain-bench-{}-{number}", std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_memory_is_refused_with_the_fix() {
        let error = check_folder(Path::new("/dev/shm"), 0).unwrap_err().to_string();
        assert!(error.contains("tmpfs"), "{error}");
    }

    #[test]
    fn too_little_room_and_a_missing_folder_are_errors() {
        let folder = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
        check_folder(&folder, 4096).unwrap();
        assert!(check_folder(&folder, u64::MAX).unwrap_err().to_string().contains("room"));
        assert!(check_folder(Path::new("/nowhere/at/all"), 0).is_err());
    }

    #[test]
    fn a_device_that_is_there_has_a_request_limit_and_counts_what_it_wrote() {
        let folder = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
        let device = Device::under(&folder);
        assert!(read_bytes_max(device.as_ref()) >= 4096);
        if let Some(device) = device {
            assert!(device.written_bytes().is_some(), "{device:?}");
        }
        assert_eq!(read_bytes_max(None), REQUEST_BYTES_DEFAULT);
    }
}
