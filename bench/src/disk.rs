//! The disk's own limits, as the broker could at best reach them: direct sequential writes and reads through a bare
//! executor, and the time that a small write takes until it is synced.
//!
//! Each of `runs` rounds makes one preallocated file and takes, in turn: sequential writes to its fresh (fallocated)
//! blocks, the same again to the blocks that are now written, sequential reads of them, and small synced writes to both
//! kinds. Rounds are interleaved so that a disk that slows down slows all figures. Every write run ends with an fdatasync
//! inside its time: a burst into the device's cache is not a limit. Files have no name from the moment they are open, so
//! nothing is left behind, whatever happens. Contents are incompressible and each 4 KiB block is unique.

mod profile;
mod rounds;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

use crate::device::{self, Device};
use crate::executor::{self, Setup};
use crate::report::rounded;
use crate::scrape::ProcessSample;

pub use profile::{ProfileArgs, ProfileReport, SyncCell, WriteCell, profile};

/// Unit of direct IO: the largest block size of common devices.
const BLOCK_BYTES: usize = 4096;
/// A small write: one block, an ack-driven extent with few records.
const SMALL_BYTES: usize = 4 * 1024;
/// A group commit of many producers.
const GROUP_BYTES: usize = 64 * 1024;
/// Most writes at once: half of the executor's ring.
const DEPTH_MAX: usize = 64;

/// What to measure.
#[derive(Clone, Debug)]
pub struct DiskArgs {
    /// Folder on the disk to be measured.
    pub dir: PathBuf,
    /// Seconds for each of: writes to fresh blocks, to written blocks, reads; over all runs.
    pub seconds: f64,
    /// End each of them after so many bytes, if that is earlier.
    pub bytes: Option<u64>,
    /// Size of the file. A run over fresh blocks ends at its end.
    pub file_bytes: u64,
    /// Size of one write or read.
    pub write_bytes: usize,
    /// Writes or reads at once.
    pub depth: usize,
    /// Rounds.
    pub runs: usize,
    /// Synced writes of each size and kind of block, over all runs.
    pub sync_operations: usize,
    /// CPU of the executor; none = the first that this process may use.
    pub cpu: Option<usize>,
}

impl Default for DiskArgs {
    fn default() -> Self {
        Self {
            dir: PathBuf::from("."),
            seconds: 5.0,
            bytes: None,
            file_bytes: 1024 * 1024 * 1024,
            write_bytes: 1024 * 1024,
            depth: 4,
            runs: 5,
            sync_operations: 500,
            cpu: None,
        }
    }
}

/// The disk's figures. MB are 10^6 bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DiskReport {
    /// Which baseline this is: `disk`.
    pub bench: &'static str,
    /// The folder.
    pub dir: PathBuf,
    /// Kernel name of the block device, if there is one.
    pub device: Option<String>,
    /// Size of one sequential write or read.
    pub write_bytes: usize,
    /// Writes or reads at once.
    pub depth: usize,
    /// Rounds.
    pub runs: usize,
    /// Sequential writes to blocks that were written before, all runs together.
    pub write_mb_per_s: f64,
    /// Their median run.
    pub write_median_mb_per_s: f64,
    /// Each run.
    pub write_runs_mb_per_s: Vec<f64>,
    /// Time of one such write while `depth` are under way.
    pub write_p50_us: f64,
    /// One in 100 takes longer.
    pub write_p99_us: f64,
    /// Sequential writes to fresh, fallocated blocks, all runs together.
    pub write_fallocated_mb_per_s: f64,
    /// Their median run.
    pub write_fallocated_median_mb_per_s: f64,
    /// Each run.
    pub write_fallocated_runs_mb_per_s: Vec<f64>,
    /// Sequential reads of what was just written; a host or controller cache may answer them.
    pub read_mb_per_s: f64,
    /// Their median run.
    pub read_median_mb_per_s: f64,
    /// 4 KiB written to written blocks, then fdatasync: time of both.
    pub sync_4k_p50_us: f64,
    /// One in 100 takes longer.
    pub sync_4k_p99_us: f64,
    /// The same with 64 KiB.
    pub sync_64k_p50_us: f64,
    /// One in 100 takes longer.
    pub sync_64k_p99_us: f64,
    /// 4 KiB to fallocated blocks.
    pub sync_fallocated_4k_p50_us: f64,
    /// One in 100 takes longer.
    pub sync_fallocated_4k_p99_us: f64,
    /// 64 KiB to fallocated blocks.
    pub sync_fallocated_64k_p50_us: f64,
    /// One in 100 takes longer.
    pub sync_fallocated_64k_p99_us: f64,
    /// Bytes that this run wrote.
    pub bytes_written: u64,
    /// Bytes that the device counted meanwhile, by everybody.
    pub device_bytes_written: Option<u64>,
    /// CPU seconds that all this took.
    pub cpu_s: f64,
    /// How long it took.
    pub seconds: f64,
}

/// Measures the disk under `args.dir`; blocks.
pub fn run(args: &DiskArgs) -> Result<DiskReport> {
    let sync_bytes = (args.sync_operations * (SMALL_BYTES + GROUP_BYTES)) as u64;
    check(args)?;
    device::check_folder(&args.dir, args.file_bytes + sync_bytes)?;
    let device = Device::under(&args.dir);
    let device_before = device.as_ref().and_then(Device::written_bytes);
    let (started, own_before) = (Instant::now(), ProcessSample::own()?);

    let rounds = rounds::Rounds::new(args.clone(), device::read_bytes_max(device.as_ref()));
    let setup = Setup {
        name: "bench-disk",
        cpu: args.cpu,
        io_memory_bytes: (2 * args.depth * args.write_bytes).next_power_of_two(),
        prime_in: Some(args.dir.clone()),
    };
    let measured = executor::start(setup, move || rounds.run())?
        .join()
        .with_context(|| format!("measuring the disk under {}", args.dir.display()))?;

    let device_after = device.as_ref().and_then(Device::written_bytes);
    let mut report = measured.report();
    report.bench = "disk";
    report.dir.clone_from(&args.dir);
    report.device = device.map(|device| device.name);
    (report.write_bytes, report.depth, report.runs) = (args.write_bytes, args.depth, args.runs);
    report.device_bytes_written = device_after.zip(device_before).map(|(after, before)| after.saturating_sub(before));
    report.cpu_s = rounded(ProcessSample::own()?.cpu_s - own_before.cpu_s, 2);
    report.seconds = rounded(started.elapsed().as_secs_f64(), 2);
    Ok(report)
}

fn check(args: &DiskArgs) -> Result<()> {
    ensure!(args.seconds > 0.0 && args.seconds.is_finite(), "seconds must be more than 0");
    ensure!((1..=1000).contains(&args.runs), "runs must be 1 to 1000");
    ensure!((1..=DEPTH_MAX).contains(&args.depth), "depth must be 1 to {DEPTH_MAX}");
    ensure!(args.sync_operations >= args.runs, "each run needs a synced write: at least {}", args.runs);
    if args.write_bytes == 0 || !args.write_bytes.is_multiple_of(BLOCK_BYTES) {
        bail!("write_bytes must be a multiple of {BLOCK_BYTES}");
    }
    let least = (args.write_bytes * args.depth).max(GROUP_BYTES) as u64;
    ensure!(args.file_bytes >= least, "file_bytes must be at least {least}: one write at each place of the queue");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::tests::watchdog;
    use crate::report::json_line;

    fn tiny(dir: PathBuf) -> DiskArgs {
        DiskArgs {
            dir,
            seconds: 0.2,
            bytes: Some(2 * 1024 * 1024),
            file_bytes: 4 * 1024 * 1024,
            write_bytes: 256 * 1024,
            depth: 2,
            runs: 2,
            sync_operations: 6,
            cpu: None,
        }
    }

    /// On the disk that the build is on: the folder for temporary files may be in memory.
    fn folder() -> tempfile::TempDir {
        let build = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
        tempfile::tempdir_in(build).unwrap()
    }

    #[test]
    fn a_tiny_run_measures_everything_and_leaves_nothing_behind() {
        let _watchdog = watchdog("the disk baseline", 120);
        let folder = folder();
        let report = run(&tiny(folder.path().to_path_buf())).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json_line(&report)).unwrap();
        for name in [
            "write_mb_per_s",
            "write_median_mb_per_s",
            "write_fallocated_mb_per_s",
            "read_mb_per_s",
            "sync_4k_p50_us",
            "sync_4k_p99_us",
            "sync_64k_p50_us",
            "sync_fallocated_4k_p50_us",
            "seconds",
        ] {
            assert!(json[name].as_f64().unwrap() > 0.0, "{name}: {json}");
        }
        assert_eq!(report.write_runs_mb_per_s.len(), 2);
        // At most 1 MiB a run and kind of block, and the synced writes.
        assert!(report.bytes_written <= 4 * 1024 * 1024 + 12 * (4 + 64) * 1024, "{}", report.bytes_written);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_is_not_a_multiple_of_the_write_is_used_up_to_the_last_whole_one() {
        let _watchdog = watchdog("the odd disk baseline", 120);
        let folder = folder();
        let args =
            DiskArgs { file_bytes: 1_000_000, bytes: None, seconds: 0.05, runs: 1, ..tiny(folder.path().into()) };
        assert!(run(&args).unwrap().write_fallocated_mb_per_s > 0.0);
    }

    #[test]
    fn arguments_that_make_no_sense_are_refused() {
        for (args, word) in [
            (DiskArgs { write_bytes: 1000, ..tiny(".".into()) }, "multiple"),
            (DiskArgs { depth: 0, ..tiny(".".into()) }, "depth"),
            (DiskArgs { runs: 0, ..tiny(".".into()) }, "runs"),
            (DiskArgs { seconds: f64::NAN, ..tiny(".".into()) }, "seconds"),
            (DiskArgs { file_bytes: 4096, ..tiny(".".into()) }, "file_bytes"),
            (DiskArgs { sync_operations: 1, ..tiny(".".into()) }, "synced"),
        ] {
            let error = run(&args).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        let nowhere = run(&tiny("/nowhere/at/all".into())).unwrap_err();
        assert!(nowhere.to_string().contains("/nowhere/at/all"));
    }
}
