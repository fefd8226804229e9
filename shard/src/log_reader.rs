//! The segment files of one shard, read for recovery: plain blocking reads past the page cache, before the shard serves.
//!
//! Before the first read of a segment its lock is waited for. After `kill -9` the kernel goes on with the writes that the
//! dead process had in flight, for 0.3 s in measurements; only the lock of the descriptor that it wrote by tells when that
//! has ended. What is read earlier may change under recovery's eyes.
//!
//! One file is open at a time, however many segments there are.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use ringmain_core::ids::SegmentSequence;
use ringmain_core::limits::DISK_BLOCK_BYTES;
use ringmain_core::recover::{ReadError, SegmentSource};
use ringmain_core::segment::{file_name, parse_file_name};

use crate::files::is_unreadable;

/// How long a dying process may go on writing before recovery gives up.
pub const LOCK_WAIT_MAX: Duration = Duration::from_secs(60);
/// Time between two tries of a lock.
const LOCK_TRY_EVERY: Duration = Duration::from_millis(5);
/// Size of one read.
const READ_BYTES: usize = 1024 * 1024;

/// Why the segments of a shard can't be read.
#[derive(Debug, thiserror::Error)]
pub enum LogReadError {
    /// Another descriptor holds a segment's lock for too long.
    #[error(
        "{} is still locked after {waited:?}: another broker runs on this data directory, or its disk does not answer; \
         stop that process and start again",
        path.display()
    )]
    Locked {
        /// The segment file.
        path: PathBuf,
        /// How long the lock was tried.
        waited: Duration,
    },
    /// The directory or a file can't be opened.
    #[error("can't {what} {}: {error}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
}

impl LogReadError {
    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::Io { what, path, error }
    }
}

impl From<LogReadError> for ReadError {
    fn from(error: LogReadError) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Reads the segments in a shard's directory. Other files there are left alone.
#[derive(Debug)]
pub struct LogReader {
    dir: PathBuf,
    segments: Vec<SegmentSequence>,
    lock_wait: Duration,
    /// The file that was read last; its lock is held.
    open: Option<(SegmentSequence, File)>,
    buffer: AlignedBuffer,
}

impl LogReader {
    /// Lists the segments in `dir`.
    pub fn open(dir: &Path) -> Result<Self, LogReadError> {
        Self::with_lock_wait(dir, LOCK_WAIT_MAX)
    }

    /// The same, with another limit on the wait for a lock.
    pub fn with_lock_wait(dir: &Path, lock_wait: Duration) -> Result<Self, LogReadError> {
        let mut segments = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(LogReadError::io("list", dir))? {
            let entry = entry.map_err(LogReadError::io("list", dir))?;
            segments.extend(entry.file_name().to_str().and_then(parse_file_name));
        }
        segments.sort_unstable();
        Ok(Self { dir: dir.to_owned(), segments, lock_wait, open: None, buffer: AlignedBuffer::new() })
    }

    /// The file of a segment, locked, and the buffer to read into.
    fn file(&mut self, segment: SegmentSequence) -> Result<(&File, &mut [u8]), LogReadError> {
        let (_, file) = match self.open.take() {
            Some(open) if open.0 == segment => self.open.insert(open),
            other => {
                drop(other);
                let path = self.dir.join(file_name(segment));
                let file = open_direct(&path).map_err(LogReadError::io("open", &path))?;
                wait_for_lock(&file, &path, self.lock_wait)?;
                self.open.insert((segment, file))
            }
        };
        Ok((file, self.buffer.bytes()))
    }
}

impl SegmentSource for LogReader {
    fn segments(&self) -> &[SegmentSequence] {
        &self.segments
    }

    fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError> {
        let path = self.dir.join(file_name(segment));
        let (file, _) = self.file(segment)?;
        let metadata = file.metadata().map_err(LogReadError::io("look at", &path))?;
        Ok(metadata.len())
    }

    fn read(&mut self, segment: SegmentSequence, place: u64, into: &mut [u8]) -> Result<usize, ReadError> {
        let path = self.dir.join(file_name(segment));
        let (file, buffer) = self.file(segment)?;
        read_pieces(file, place, into, buffer).map_err(|error| match is_unreadable(&error) {
            true => ReadError::Unreadable,
            false => LogReadError::io("read", &path)(error).into(),
        })
    }
}

/// Reads until `into` is full or the file ends.
fn read_pieces(file: &File, place: u64, into: &mut [u8], buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        let piece = (into.len() - filled).next_multiple_of(DISK_BLOCK_BYTES).min(buffer.len());
        let read = match file.read_at(&mut buffer[..piece], place + filled as u64) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let taken = read.min(into.len() - filled);
        into[filled..filled + taken].copy_from_slice(&buffer[..taken]);
        filled += taken;
        // Only the end of the file cuts a direct read within a block.
        if read == 0 || !read.is_multiple_of(DISK_BLOCK_BYTES) {
            break;
        }
    }
    Ok(filled)
}

/// Opens past the page cache; where the filesystem can't do that (tmpfs), through it.
fn open_direct(path: &Path) -> io::Result<File> {
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    match direct {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => OpenOptions::new().read(true).open(path),
        other => other,
    }
}

fn wait_for_lock(file: &File, path: &Path, limit: Duration) -> Result<(), LogReadError> {
    let began = Instant::now();
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Interrupted => {
                return Err(LogReadError::io("lock", path)(error));
            }
            Err(_) => {}
        }
        if !told {
            told = true;
            tracing::info!(path = %path.display(), "waits for the writes of a process that died");
        }
        if began.elapsed() >= limit {
            return Err(LogReadError::Locked { path: path.to_owned(), waited: began.elapsed() });
        }
        sleep(LOCK_TRY_EVERY);
    }
    if told {
        tracing::info!(path = %path.display(), waited_ms = began.elapsed().as_millis() as u64, "those writes have ended");
    }
    Ok(())
}

/// Memory that a direct read may fill: it begins at a multiple of the block size.
#[derive(Debug)]
struct AlignedBuffer {
    memory: Vec<u8>,
    from: usize,
}

impl AlignedBuffer {
    fn new() -> Self {
        let memory = vec![0; READ_BYTES + DISK_BLOCK_BYTES];
        let from = memory.as_ptr().align_offset(DISK_BLOCK_BYTES);
        Self { memory, from }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.from..self.from + READ_BYTES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringmain_core::ids::LogId;
    use ringmain_core::recover::recover;

    fn dir_with(files: &[(u64, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (segment, bytes) in files {
            std::fs::write(dir.path().join(file_name(SegmentSequence(*segment))), bytes).unwrap();
        }
        dir
    }

    #[test]
    fn segments_are_listed_in_order_and_other_files_left_alone() {
        let dir = dir_with(&[(12, b""), (3, b"")]);
        std::fs::write(dir.path().join("notes.log"), b"x").unwrap();
        std::fs::create_dir(dir.path().join("recycle")).unwrap();
        let reader = LogReader::open(dir.path()).unwrap();
        assert_eq!(reader.segments(), [SegmentSequence(3), SegmentSequence(12)]);
    }

    #[test]
    fn reads_of_any_size_give_the_bytes_of_the_file_up_to_its_end() {
        let bytes: Vec<u8> = (0..3 * READ_BYTES as u32 + 5000).map(|at| (at / 7) as u8).collect();
        let dir = dir_with(&[(0, &bytes), (1, b"other")]);
        let mut reader = LogReader::open(dir.path()).unwrap();
        let segment = SegmentSequence(0);
        assert_eq!(reader.file_bytes(segment).unwrap(), bytes.len() as u64);
        for (place, size) in [(0, 4096), (4096, 8192), (0, 3 * READ_BYTES + 8192), (3 * READ_BYTES, 16_384)] {
            let mut into = vec![0; size];
            let read = reader.read(segment, place as u64, &mut into).unwrap();
            assert_eq!(read, size.min(bytes.len() - place));
            assert_eq!(into[..read], bytes[place..place + read]);
        }
        let mut into = vec![0; 4096];
        assert_eq!(reader.read(SegmentSequence(1), 0, &mut into), Ok(5));
        assert_eq!(reader.read(SegmentSequence(1), 8192, &mut into), Ok(0));
    }

    #[test]
    fn a_missing_file_fails_the_read_and_is_not_damage() {
        let dir = dir_with(&[(0, b"x")]);
        let mut reader = LogReader::open(dir.path()).unwrap();
        std::fs::remove_file(dir.path().join(file_name(SegmentSequence(0)))).unwrap();
        assert!(matches!(reader.file_bytes(SegmentSequence(0)), Err(ReadError::Failed(_))));
    }

    #[test]
    fn a_lock_that_stays_is_a_typed_error() {
        let dir = dir_with(&[(0, b"x")]);
        let path = dir.path().join(file_name(SegmentSequence(0)));
        let held = File::open(&path).unwrap();
        held.lock().unwrap();
        let mut reader = LogReader::with_lock_wait(dir.path(), Duration::from_millis(20)).unwrap();
        assert!(matches!(reader.file(SegmentSequence(0)), Err(LogReadError::Locked { .. })));
        held.unlock().unwrap();
        assert_eq!(reader.file_bytes(SegmentSequence(0)), Ok(1));
    }

    #[test]
    fn the_first_read_waits_for_the_writes_of_a_dying_process() {
        let dir = dir_with(&[(0, &[0; 4096])]);
        let path = dir.path().join(file_name(SegmentSequence(0)));
        let dying = OpenOptions::new().write(true).open(&path).unwrap();
        dying.lock().unwrap();
        let mut reader = LogReader::open(dir.path()).unwrap();
        let writer = std::thread::spawn(move || {
            // Long enough that the reader has tried the lock before.
            sleep(Duration::from_millis(50));
            dying.write_all_at(&[7; 4096], 0).unwrap();
            drop(dying);
        });
        let mut into = vec![0; 4096];
        assert_eq!(reader.read(SegmentSequence(0), 0, &mut into), Ok(4096));
        assert_eq!(into, [7; 4096]);
        writer.join().unwrap();
    }

    #[test]
    fn recovery_runs_on_real_files() {
        let dir = dir_with(&[]);
        let mut reader = LogReader::open(dir.path()).unwrap();
        let recovered = recover(&mut reader, LogId(1), 1 << 20).unwrap();
        assert!(recovered.partitions.is_empty());
    }
}
