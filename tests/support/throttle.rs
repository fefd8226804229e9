//! A device that is slow for one process: a control group of the kernel with a limit on written bytes.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where cgroup v1's blkio is by custom.
const V1: &str = "/sys/fs/cgroup/blkio";
/// Where cgroup v2 may be.
const V2: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Says that a slow device may be left out.
const SKIP: &str = "RINGMAIN_NO_THROTTLE";

/// A group whose processes write to one device with so many bytes a second at most. Gone when it is dropped, once its
/// processes are.
pub struct Throttle {
    dir: PathBuf,
    /// The hierarchy was mounted for this.
    mounted: Option<tempfile::TempDir>,
}

impl Throttle {
    /// A group for the device that `path` is on. None, with a word about it, where that can't be had and the environment
    /// says that it need not be.
    ///
    /// # Panics
    /// Where it can't be had otherwise, with advice.
    pub fn on(path: &Path, bytes_per_second: u64) -> Option<Self> {
        let device = fs::metadata(path).unwrap().dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let name = format!("ringmain-test-{}-{major}-{minor}", std::process::id());
        let v1 = || Self::v1(&name, &format!("{major}:{minor} {bytes_per_second}"));
        let v2 = || Self::v2(&name, &format!("{major}:{minor} wbps={bytes_per_second}"));
        match v1().or_else(|_| v2()) {
            Ok(throttle) => Some(throttle),
            Err(error) if std::env::var_os(SKIP).is_some() => {
                eprintln!("skipped: no control group for block devices here ({error})");
                None
            }
            Err(error) => panic!(
                "no control group for block devices can be had ({error}): run as root with cgroup v1 blkio or v2 io, \
                 or set {SKIP}=1 to leave slow devices out"
            ),
        }
    }

    fn v1(name: &str, limit: &str) -> io::Result<Self> {
        let mut mounted = None;
        let mut root = PathBuf::from(V1);
        if !root.join("cgroup.procs").exists() {
            let dir = tempfile::tempdir()?;
            let done =
                Command::new("mount").args(["-t", "cgroup", "-o", "blkio", "cgroup"]).arg(dir.path()).output()?;
            if !done.status.success() {
                return Err(io::Error::other(String::from_utf8_lossy(&done.stderr).into_owned()));
            }
            root = dir.path().to_owned();
            mounted = Some(dir);
        }
        let dir = root.join(name);
        fs::create_dir(&dir)?;
        let throttle = Self { dir, mounted };
        fs::write(throttle.dir.join("blkio.throttle.write_bps_device"), limit)?;
        Ok(throttle)
    }

    fn v2(name: &str, limit: &str) -> io::Result<Self> {
        let root = V2.iter().map(Path::new).find(|root| root.join("cgroup.controllers").exists());
        let root = root.ok_or_else(|| io::Error::other("no cgroup v2 is mounted"))?;
        fs::write(root.join("cgroup.subtree_control"), "+io")?;
        let dir = root.join(name);
        fs::create_dir(&dir)?;
        let throttle = Self { dir, mounted: None };
        fs::write(throttle.dir.join("io.max"), limit)?;
        Ok(throttle)
    }

    /// From now on the process is slow.
    pub fn take(&self, process_id: u32) {
        fs::write(self.dir.join("cgroup.procs"), process_id.to_string()).unwrap();
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        // A process that is just ending may still be in it.
        for _ in 0..100 {
            match fs::remove_dir(&self.dir) {
                Err(error) if error.raw_os_error() == Some(16) => std::thread::sleep(super::POLL),
                _ => break,
            }
        }
        if let Some(dir) = &self.mounted {
            let _ = Command::new("umount").arg("-l").arg(dir.path()).output();
        }
    }
}
