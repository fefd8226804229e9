//! Segment files as core reads them, by plain reads through the page cache. Nothing is ever written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ringmain_core::ids::SegmentSequence;
use ringmain_core::limits::DISK_BLOCK_BYTES;
use ringmain_core::recover::{ReadError, SegmentSource};
use ringmain_core::segment::{SegmentHeader, parse_file_name};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// EIO: the device can't read.
const EIO: i32 = Errno::IO.raw_os_error();
/// After a kill the kernel goes on writing for a moment, and holds the segment's lock meanwhile.
const LOCK_WAIT: Duration = Duration::from_secs(10);
const LOCK_RETRY: Duration = Duration::from_millis(50);

/// The segments of one log.
#[derive(Debug)]
pub struct FileSource {
    /// Sorted by number.
    files: Vec<(SegmentSequence, PathBuf)>,
    names: Vec<SegmentSequence>,
    /// Read what another process has locked.
    force: bool,
    open: Option<(SegmentSequence, File)>,
}

impl FileSource {
    /// The segments in a shard's directory. Other files there are left alone.
    pub fn of_dir(dir: &Path, force: bool) -> Result<Self> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(dir).with_context(|| format!("can't list {}", dir.display()))? {
            let entry = entry.with_context(|| format!("can't list {}", dir.display()))?;
            if let Some(segment) = entry.file_name().to_str().and_then(parse_file_name) {
                files.push((segment, entry.path()));
            }
        }
        Ok(Self::new(files, force))
    }

    /// One file. Its number is in its name, or else in its header, or else 0.
    pub fn of_file(path: &Path, force: bool) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("can't open {}", path.display()))?;
        let mut head = [0; 64];
        let read = file.read_at(&mut head, 0).with_context(|| format!("can't read {}", path.display()))?;
        let named = path.file_name().and_then(|name| name.to_str()).and_then(parse_file_name);
        let number = named.or_else(|| SegmentHeader::decode(&head[..read]).ok().map(|header| header.segment));
        Ok(Self::new(vec![(number.unwrap_or_default(), path.to_owned())], force))
    }

    fn new(mut files: Vec<(SegmentSequence, PathBuf)>, force: bool) -> Self {
        files.sort_unstable();
        let names = files.iter().map(|(segment, _)| *segment).collect();
        Self { files, names, force, open: None }
    }

    /// Where a segment is.
    pub fn path(&self, segment: SegmentSequence) -> &Path {
        let at = self.files.binary_search_by_key(&segment, |(number, _)| *number);
        at.map_or(Path::new(""), |at| &self.files[at].1)
    }

    fn file(&mut self, segment: SegmentSequence) -> Result<&File> {
        let open = match self.open.take() {
            Some(open) if open.0 == segment => open,
            _ => {
                let path = self.path(segment);
                let file = File::open(path).with_context(|| format!("can't open {}", path.display()))?;
                if !self.force {
                    wait_for_lock(&file, path)?;
                }
                (segment, file)
            }
        };
        Ok(&self.open.insert(open).1)
    }
}

/// Waits until nobody writes to the file.
fn wait_for_lock(file: &File, path: &Path) -> Result<()> {
    let began = Instant::now();
    loop {
        // A writer may share it among descriptors of its own. The lock of the directory keeps new ones out.
        let alone = rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive);
        match alone.and_then(|()| rustix::fs::flock(file, FlockOperation::Unlock)) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if began.elapsed() < LOCK_WAIT => std::thread::sleep(LOCK_RETRY),
            Err(Errno::WOULDBLOCK) => {
                bail!("{} is in use by a broker: stop it, or read all the same with --force", path.display())
            }
            Err(errno) => return Err(errno).with_context(|| format!("can't lock {}", path.display())),
        }
    }
}

impl SegmentSource for FileSource {
    fn segments(&self) -> &[SegmentSequence] {
        &self.names
    }

    fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError> {
        let metadata = self.file(segment).and_then(|file| Ok(file.metadata()?));
        metadata.map(|metadata| metadata.len()).map_err(|error| ReadError::Failed(format!("{error:#}")))
    }

    fn read(&mut self, segment: SegmentSequence, place: u64, into: &mut [u8]) -> Result<usize, ReadError> {
        let file = self.file(segment).map_err(|error| ReadError::Failed(format!("{error:#}")))?;
        let mut filled = 0;
        while filled < into.len() {
            match file.read_at(&mut into[filled..], place + filled as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(EIO) => {
                    // Whole blocks before the bad one are as good as any.
                    let whole = filled / DISK_BLOCK_BYTES * DISK_BLOCK_BYTES;
                    return if whole > 0 { Ok(whole) } else { Err(ReadError::Unreadable) };
                }
                Err(error) => return Err(ReadError::Failed(error.to_string())),
            }
        }
        Ok(filled)
    }
}
