//! What the kernel says of the disk under a directory.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A whole disk: a partition has its settings there.
#[derive(Clone, Debug)]
pub(super) struct BlockDevice {
    /// Kernel name, such as `nvme0n1`.
    pub(super) name: String,
    /// Its folder of settings.
    pub(super) queue: PathBuf,
}

impl BlockDevice {
    /// The disk that has `dir`, when there is one: network and overlay filesystems have none.
    pub(super) fn under(dir: &Path) -> Option<Self> {
        let device = fs::metadata(dir).ok()?.dev();
        let link = format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let folder = fs::canonicalize(link).ok()?;
        let disk = if folder.join("queue").exists() { folder } else { folder.parent()?.to_owned() };
        let queue = disk.join("queue");
        queue
            .exists()
            .then(|| Self { name: disk.file_name().unwrap_or_default().to_string_lossy().into_owned(), queue })
    }

    /// A setting.
    pub(super) fn text(&self, setting: &str) -> Option<String> {
        fs::read_to_string(self.queue.join(setting)).ok().map(|text| text.trim().to_owned())
    }

    /// A setting that is a number.
    pub(super) fn number(&self, setting: &str) -> Option<u64> {
        self.text(setting)?.parse().ok()
    }

    /// Whether a hypervisor makes the disk up: what it says about rotation means nothing.
    pub(super) fn is_virtual(&self) -> bool {
        ["vd", "xvd", "loop", "dm-", "md"].iter().any(|prefix| self.name.starts_with(prefix))
    }
}
