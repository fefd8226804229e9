//! A look at a disk from several sides in about 20 seconds: write size and depth, what a sync costs, what many files cost,
//! and what a reader costs a writer. For `ringmain doctor`. The figures come from short runs: they show shapes, while
//! [`super::run`] gives the limits that others are divided by.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use glommio::io::{DmaBuffer, DmaFile};
use serde::Serialize;

use super::DiskArgs;
use super::rounds::{Cursor, Rounds, close, read_run, stamp_blocks, sync, sync_run, write, write_run};
use crate::device::{self, Device};
use crate::executor::{self, Setup};
use crate::histogram::Latencies;
use crate::report::{mb_per_s, rounded};

/// Sizes and depths of the table.
const WRITE_BYTES: [usize; 4] = [4 * 1024, 64 * 1024, 256 * 1024, 1024 * 1024];
const DEPTHS: [usize; 3] = [1, 4, 16];
/// Sizes of synced writes.
const SYNC_BYTES: [usize; 3] = [4 * 1024, 64 * 1024, 1024 * 1024];
/// Files that are written side by side.
const STREAMS: usize = 100;
/// One write to one of them; after one for each, all are synced.
const STREAM_WRITE_BYTES: usize = 64 * 1024;
/// Size of each.
const STREAM_FILE_BYTES: u64 = 1024 * 1024;
/// Writes whose time is taken beside a reader.
const WATCHED_WRITE_BYTES: usize = 256 * 1024;
/// Reads at once of that reader.
const READ_DEPTH: usize = 4;
/// Parts of the time, for the sum below: the first writes, the table, syncs, streams, interference.
const PARTS: usize = 2 + WRITE_BYTES.len() * DEPTHS.len() + 2 * SYNC_BYTES.len() + 2 * 2 + 2 * 2;

/// What to look at.
#[derive(Clone, Debug)]
pub struct ProfileArgs {
    /// Folder on the disk.
    pub dir: PathBuf,
    /// How long all of it may take.
    pub seconds: f64,
    /// Size of the file.
    pub file_bytes: u64,
}

impl Default for ProfileArgs {
    fn default() -> Self {
        Self { dir: PathBuf::from("."), seconds: 20.0, file_bytes: 256 * 1024 * 1024 }
    }
}

/// Sequential writes of one size and depth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WriteCell {
    /// Size of a write.
    pub write_bytes: usize,
    /// Writes at once.
    pub depth: usize,
    /// 10^6 bytes a second, the sync at the end included.
    pub mb_per_s: f64,
    /// Time of a write.
    pub p50_us: f64,
    /// One in 100 takes longer.
    pub p99_us: f64,
}

/// Writes each of which is synced before the next.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SyncCell {
    /// Size of a write.
    pub write_bytes: usize,
    /// Kind of block: `written` before, or only `fallocated`.
    pub blocks: &'static str,
    /// Time of write and sync.
    pub p50_us: f64,
    /// One in 100 takes longer.
    pub p99_us: f64,
}

/// The disk from several sides.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProfileReport {
    /// The folder.
    pub dir: PathBuf,
    /// Kernel name of the block device, if there is one.
    pub device: Option<String>,
    /// Write size times depth.
    pub writes: Vec<WriteCell>,
    /// What a sync costs.
    pub syncs: Vec<SyncCell>,
    /// 64 KiB writes to one file, synced after each 100.
    pub one_stream_mb_per_s: f64,
    /// The same writes to 100 files in turn, all of them synced after each 100.
    pub hundred_streams_mb_per_s: f64,
    /// 99th percentile of a 256 KiB write with nothing else to do.
    pub write_alone_p99_us: f64,
    /// The same while another file is read.
    pub write_beside_reader_p99_us: f64,
    /// How fast that was read.
    pub reader_mb_per_s: f64,
    /// How long it took.
    pub seconds: f64,
}

/// Takes the profile of the disk under `args.dir`; blocks.
pub fn profile(args: &ProfileArgs) -> Result<ProfileReport> {
    ensure!(args.seconds > 0.0 && args.seconds.is_finite(), "seconds must be more than 0");
    let depth = DEPTHS[DEPTHS.len() - 1];
    let largest = WRITE_BYTES[WRITE_BYTES.len() - 1];
    ensure!(args.file_bytes >= (depth * largest) as u64, "file_bytes must be at least {}", depth * largest);
    let started = Instant::now();
    device::check_folder(&args.dir, 3 * args.file_bytes)?;
    let device = Device::under(&args.dir);
    let disk = DiskArgs { dir: args.dir.clone(), write_bytes: largest, depth, runs: 1, ..DiskArgs::default() };
    let read_bytes = device::read_bytes_max(device.as_ref()).min(128 * 1024) / 4096 * 4096;
    let profiler = Profiler {
        rounds: Rounds::new(disk, read_bytes),
        part: Duration::from_secs_f64(args.seconds / PARTS as f64),
        file_bytes: args.file_bytes / largest as u64 * largest as u64,
        read_bytes,
    };
    let setup = Setup {
        name: "disk-profile",
        cpu: None,
        io_memory_bytes: (2 * depth * largest).next_power_of_two(),
        prime_in: Some(args.dir.clone()),
    };
    let mut report = executor::start(setup, move || profiler.run())?
        .join()
        .with_context(|| format!("measuring the disk under {}", args.dir.display()))?;
    report.dir.clone_from(&args.dir);
    report.device = device.map(|device| device.name);
    report.seconds = rounded(started.elapsed().as_secs_f64(), 2);
    Ok(report)
}

/// The executor's part.
struct Profiler {
    rounds: Rounds,
    part: Duration,
    file_bytes: u64,
    read_bytes: usize,
}

impl Profiler {
    async fn run(mut self) -> Result<ProfileReport> {
        let mut report = ProfileReport::default();
        let file = self.rounds.scratch_file(self.file_bytes).await?;
        // Blocks that were never written cost more: the table is about those that were.
        let (largest, deepest) = (WRITE_BYTES[WRITE_BYTES.len() - 1], DEPTHS[DEPTHS.len() - 1]);
        let mut buffers = self.buffers(&file, largest, deepest);
        let first = self.cursor(self.file_bytes, largest, false, 2);
        let (written, _) = write_run(&file, first, &mut buffers, &mut Latencies::new()).await?;
        drop(buffers);
        for write_bytes in WRITE_BYTES {
            for depth in DEPTHS {
                let mut buffers = self.buffers(&file, write_bytes, depth);
                let mut latencies = Latencies::new();
                let cursor = self.cursor(written, write_bytes, true, 1);
                let (bytes, seconds) = write_run(&file, cursor, &mut buffers, &mut latencies).await?;
                report.writes.push(WriteCell {
                    write_bytes,
                    depth,
                    mb_per_s: mb_per_s(bytes, seconds),
                    p50_us: latencies.quantile_us(0.5),
                    p99_us: latencies.quantile_us(0.99),
                });
            }
        }
        self.syncs(&file, written, &mut report).await?;
        self.streams(&mut report).await?;
        self.interference(&file, written, &mut report).await?;
        close(file).await?;
        Ok(report)
    }

    fn buffers(&mut self, file: &DmaFile, bytes: usize, count: usize) -> Vec<Rc<DmaBuffer>> {
        (0..count).map(|_| self.rounds.buffer(file, bytes)).collect()
    }

    fn cursor(&self, extent: u64, step: usize, wraps: bool, parts: u32) -> Cursor {
        Cursor::until(Instant::now() + self.part * parts, extent, step, wraps)
    }

    async fn syncs(&mut self, file: &Rc<DmaFile>, written: u64, report: &mut ProfileReport) -> Result<()> {
        for write_bytes in SYNC_BYTES {
            for blocks in ["written", "fallocated"] {
                let fresh = self.rounds.scratch_file(self.file_bytes).await?;
                let (file, wrap) = if blocks == "written" { (file, written) } else { (&fresh, u64::MAX) };
                let most = (self.file_bytes / write_bytes as u64) as usize;
                let mut buffer = self.rounds.buffer(file, write_bytes);
                let mut latencies = Latencies::new();
                sync_run(file, 0, wrap, most, Instant::now() + self.part, &mut buffer, &mut latencies).await?;
                close(fresh).await?;
                report.syncs.push(SyncCell {
                    write_bytes,
                    blocks,
                    p50_us: latencies.quantile_us(0.5),
                    p99_us: latencies.quantile_us(0.99),
                });
            }
        }
        Ok(())
    }

    async fn streams(&mut self, report: &mut ProfileReport) -> Result<()> {
        let one = self.rounds.scratch_file(STREAM_FILE_BYTES * STREAMS as u64).await?;
        let one_file = vec![Rc::clone(&one)];
        report.one_stream_mb_per_s = self.stream_run(&one_file).await?;
        drop(one_file);
        close(one).await?;
        let mut files = Vec::new();
        for _ in 0..STREAMS {
            files.push(self.rounds.scratch_file(STREAM_FILE_BYTES).await?);
        }
        report.hundred_streams_mb_per_s = self.stream_run(&files).await?;
        for file in files {
            close(file).await?;
        }
        Ok(())
    }

    /// Writes to these files in turn, each at its own end, and syncs them all after each 100 writes.
    async fn stream_run(&mut self, files: &[Rc<DmaFile>]) -> Result<f64> {
        let mut buffers = self.buffers(&files[0], STREAM_WRITE_BYTES, DEPTHS[1]);
        let each = STREAM_FILE_BYTES * STREAMS as u64 / files.len() as u64;
        let (started, until) = (Instant::now(), Instant::now() + self.part * 2);
        let mut written = 0_u64;
        loop {
            let mut writers = Vec::new();
            for (first, mut buffer) in buffers.drain(..).enumerate() {
                let files = files.to_vec();
                writers.push(glommio::spawn_local(async move {
                    for number in (first..STREAMS).step_by(DEPTHS[1]) {
                        let done = written / STREAM_WRITE_BYTES as u64 + number as u64;
                        let file = &files[done as usize % files.len()];
                        let place = done / files.len() as u64 * STREAM_WRITE_BYTES as u64 % each;
                        stamp_blocks(&mut buffer, file, place);
                        write(file, &buffer, place).await?;
                    }
                    Ok::<_, anyhow::Error>(buffer)
                }));
            }
            for writer in writers {
                buffers.push(writer.await?);
            }
            let syncs: Vec<_> = files
                .iter()
                .map(|file| {
                    let file = Rc::clone(file);
                    glommio::spawn_local(async move { sync(&file).await })
                })
                .collect();
            for synced in syncs {
                synced.await?;
            }
            written += (STREAMS * STREAM_WRITE_BYTES) as u64;
            if Instant::now() >= until {
                return Ok(mb_per_s(written, started.elapsed().as_secs_f64()));
            }
        }
    }

    async fn interference(&mut self, file: &Rc<DmaFile>, written: u64, report: &mut ProfileReport) -> Result<()> {
        let other = self.rounds.scratch_file(self.file_bytes).await?;
        for beside_reader in [false, true] {
            let reads =
                self.cursor(written / self.read_bytes as u64 * self.read_bytes as u64, self.read_bytes, true, 2);
            let reader = beside_reader.then(|| {
                let (file, read_bytes) = (Rc::clone(file), self.read_bytes);
                glommio::spawn_local(async move { read_run(&file, reads, read_bytes, READ_DEPTH).await })
            });
            let mut buffers = self.buffers(&other, WATCHED_WRITE_BYTES, 1);
            let cursor = self.cursor(self.file_bytes, WATCHED_WRITE_BYTES, true, 2);
            let mut latencies = Latencies::new();
            write_run(&other, cursor, &mut buffers, &mut latencies).await?;
            let p99_us = latencies.quantile_us(0.99);
            match reader {
                None => report.write_alone_p99_us = p99_us,
                Some(reader) => {
                    let (bytes, seconds) = reader.await.context("reading beside a writer")?;
                    report.write_beside_reader_p99_us = p99_us;
                    report.reader_mb_per_s = mb_per_s(bytes, seconds);
                }
            }
        }
        close(other).await.map_err(|error| anyhow!("{error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::tests::watchdog;

    #[test]
    fn a_short_profile_has_every_figure_and_leaves_nothing_behind() {
        let _watchdog = watchdog("the disk profile", 120);
        // On the disk that the build is on: the folder for temporary files may be in memory.
        let build = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
        let folder = tempfile::tempdir_in(build).unwrap();
        let args = ProfileArgs { dir: folder.path().into(), seconds: 0.3, file_bytes: 32 * 1024 * 1024 };
        let report = profile(&args).unwrap();
        assert_eq!((report.writes.len(), report.syncs.len()), (12, 6));
        assert!(report.writes.iter().all(|cell| cell.mb_per_s > 0.0 && cell.p99_us >= cell.p50_us), "{report:?}");
        assert!(report.syncs.iter().all(|cell| cell.p50_us > 0.0), "{report:?}");
        for figure in [
            report.one_stream_mb_per_s,
            report.hundred_streams_mb_per_s,
            report.write_alone_p99_us,
            report.write_beside_reader_p99_us,
            report.reader_mb_per_s,
        ] {
            assert!(figure > 0.0, "{report:?}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_is_too_small_for_the_deepest_writes_is_refused() {
        let args = ProfileArgs { file_bytes: 1024, ..ProfileArgs::default() };
        assert!(profile(&args).unwrap_err().to_string().contains("file_bytes"));
    }
}
