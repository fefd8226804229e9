//! Plain numbers of each shard, written by its executor and read by whoever renders `/metrics`.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter or gauge. One shard writes it, so a relaxed load and store is enough.
#[derive(Debug, Default)]
pub struct Number(AtomicU64);

impl Number {
    /// Adds to a counter.
    pub fn add(&self, by: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }

    /// Sets a gauge.
    pub fn set(&self, to: u64) {
        self.0.store(to, Ordering::Relaxed);
    }

    /// Raises a gauge to `to` if it is lower.
    pub fn raise(&self, to: u64) {
        if self.get() < to {
            self.set(to);
        }
    }

    /// The value now.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! shard_metrics {
    ($($(#[doc = $help:literal])* $kind:ident $name:ident,)*) => {
        /// All numbers of one shard.
        #[derive(Debug, Default)]
        pub struct ShardMetrics {
            $($(#[doc = $help])* pub $name: Number,)*
        }

        impl ShardMetrics {
            /// Name, kind, help and value of each number, in a fixed order.
            fn list(&self) -> Vec<(&'static str, &'static str, &'static str, u64)> {
                vec![$((stringify!($name), stringify!($kind), concat!($($help),*), self.$name.get()),)*]
            }
        }
    };
}

shard_metrics! {
    /// Record batches appended.
    counter produced_batches_total,
    /// Records appended.
    counter produced_records_total,
    /// Bytes of appended batches.
    counter produced_bytes_total,
    /// Batches that an idempotent producer sent again and that were not stored again.
    counter duplicate_batches_total,
    /// Batches of idempotent producers that were refused for their sequence or epoch.
    counter sequence_refusals_total,
    /// Bytes of batches sent to consumers.
    counter fetched_bytes_total,
    /// Bytes of fetches answered from blocks.
    counter fetched_memory_bytes_total,
    /// Bytes read from disk for fetches.
    counter fetch_disk_read_bytes_total,
    /// Bytes read from disk for fetches that had been within memory when they began: a tail reader never causes any.
    counter tail_disk_read_bytes_total,
    /// Bytes that filtered fetches looked at.
    counter filtered_bytes_total,
    /// Bytes written to segment files: extents, checkpoints, footers, headers.
    counter device_bytes_written_total,
    /// Extents written.
    counter extents_written_total,
    /// Runs written in them.
    counter runs_written_total,
    /// Bytes of the batches in the runs.
    counter run_bytes_total,
    /// Bytes that the runs take on disk, compressed or as they are.
    counter run_stored_bytes_total,
    /// Runs compressed with LZ4.
    counter runs_lz4_total,
    /// Runs compressed with Zstandard.
    counter runs_zstd_total,
    /// Bytes of batches in compressed runs.
    counter compressed_run_bytes_total,
    /// Runs of topics on `auto` that were left as they are because compressing them saves too little.
    counter compress_skipped_runs_total,
    /// Extents that were written before the work of compressing them was done, since it took too long or an ack waited.
    counter compress_late_total,
    /// CPU time spent on compressing, microseconds.
    counter compress_cpu_us_total,
    /// Bytes of padding and directories in extents.
    counter extent_overhead_bytes_total,
    /// Zeros written ahead of small synced extents; also in the device bytes.
    counter filled_bytes_total,
    /// fdatasync calls on segment files.
    counter syncs_total,
    /// Records whose synced end moved by a sync.
    counter synced_records_total,
    /// Produces acked at level flushed or synced.
    counter durable_acks_total,
    /// Segments begun.
    counter segments_begun_total,
    /// Segments on disk.
    gauge segments,
    /// Dead segments freed or recycled.
    counter segments_freed_total,
    /// Bytes of runs that retention gave up.
    counter retention_freed_bytes_total,
    /// Bytes given back to the filesystem from inside of segments.
    counter punched_bytes_total,
    /// Bytes of runs that are kept, as they stand on disk.
    gauge retained_bytes,
    /// 1 while retention by age pauses because the wall clock leapt.
    gauge retention_paused,
    /// Open connections.
    gauge connections,
    /// Connections closed by the broker for a reason.
    counter connections_refused_total,
    /// Frames received.
    counter frames_received_total,
    /// Frames sent.
    counter frames_sent_total,
    /// Requests that were answered with an error.
    counter errors_answered_total,
    /// Requests that came on this shard's sockets for another shard.
    counter mesh_requests_total,
    /// Fetches parked until something is appended.
    gauge parked_fetches,
    /// Memory blocks can take.
    gauge arena_bytes,
    /// Memory of blocks in use, the tail cache included.
    gauge block_bytes,
    /// Bytes appended and not flushed.
    gauge dirty_bytes,
    /// Memory of blocks pinned by replies and flushes.
    gauge pinned_bytes,
    /// Partitions on this shard.
    gauge partitions,
    /// Produces refused because the disk could not keep up.
    counter busy_refusals_total,
    /// 1 while there is no room for another segment.
    gauge disk_full,
    /// 1 when the shard log has failed.
    gauge log_failed,
    /// The shard's epoch: how often memory was lost.
    gauge epoch,
    /// The shard's incarnation: how often it was started.
    gauge incarnation,
    /// Batches taken over from the process before.
    gauge adopted_batches,
    /// Times the executor was found late by more than 50 ms.
    counter stalls_total,
    /// Longest time between two ticks since the start, microseconds.
    gauge stall_max_us,
    /// Time that reads from disk for fetches paused, so that writes go first, in microseconds.
    counter fetch_disk_pause_us_total,
    /// Corrupt runs met by fetches.
    counter corrupt_runs_total,
    /// Indexes of segments that were made again because their footer was damaged.
    counter indexes_rebuilt_total,
}

/// Renders the numbers of all shards, and those of the process, as Prometheus text.
#[must_use]
pub fn render(shards: &[std::sync::Arc<ShardMetrics>]) -> String {
    let mut text = String::new();
    let lists: Vec<_> = shards.iter().map(|shard| shard.list()).collect();
    let Some(first) = lists.first() else { return text };
    for (at, (name, kind, help, _)) in first.iter().enumerate() {
        let help = help.trim();
        let _ = writeln!(text, "# HELP ringmain_{name} {help}\n# TYPE ringmain_{name} {kind}");
        for (shard, list) in lists.iter().enumerate() {
            let _ = writeln!(text, "ringmain_{name}{{shard=\"{shard}\"}} {}", list[at].3);
        }
    }
    let total = |get: fn(&ShardMetrics) -> u64| shards.iter().map(|shard| get(shard)).sum::<u64>();
    let written = total(|shard| shard.device_bytes_written_total.get());
    let produced = total(|shard| shard.produced_bytes_total.get());
    let ratio = if produced == 0 { 0.0 } else { written as f64 / produced as f64 };
    let _ = writeln!(
        text,
        "# HELP ringmain_device_bytes_per_produced_byte Bytes written to the device for each produced byte.\n\
         # TYPE ringmain_device_bytes_per_produced_byte gauge\nringmain_device_bytes_per_produced_byte {ratio:.4}"
    );
    let runs = total(|shard| shard.runs_written_total.get());
    let run_bytes = total(|shard| shard.run_bytes_total.get());
    let mean = run_bytes.checked_div(runs).unwrap_or(0);
    let _ = writeln!(
        text,
        "# HELP ringmain_run_bytes_mean Mean bytes of the runs written so far.\n\
         # TYPE ringmain_run_bytes_mean gauge\nringmain_run_bytes_mean {mean}"
    );
    render_process(&mut text);
    text
}

fn render_process(text: &mut String) {
    let usage = process_usage();
    let _ = writeln!(
        text,
        "# HELP ringmain_process_cpu_seconds_total CPU time of the process.\n\
         # TYPE ringmain_process_cpu_seconds_total counter\nringmain_process_cpu_seconds_total {:.3}\n\
         # HELP ringmain_process_resident_bytes Resident memory of the process.\n\
         # TYPE ringmain_process_resident_bytes gauge\nringmain_process_resident_bytes {}\n\
         # HELP ringmain_process_open_files Open file descriptors of the process.\n\
         # TYPE ringmain_process_open_files gauge\nringmain_process_open_files {}",
        usage.cpu_seconds, usage.resident_bytes, usage.open_files
    );
}

struct Usage {
    cpu_seconds: f64,
    resident_bytes: u64,
    open_files: usize,
}

/// What /proc says of this process; zeros where it says nothing.
fn process_usage() -> Usage {
    let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Fields 14 and 15 (utime, stime), counted behind the command name, which may hold spaces.
    let behind = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field = |at: usize| behind.split_whitespace().nth(at).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split_whitespace().nth(1).and_then(|text| text.parse().ok()).unwrap_or(0);
    Usage {
        cpu_seconds: (field(11) + field(12)) / ticks_per_second,
        resident_bytes: pages * rustix::param::page_size() as u64,
        open_files: std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count),
    }
}
