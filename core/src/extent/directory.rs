//! The directory of an extent: the archive of its runs, checked entry by entry before anything uses it.

use rkyv::rancor::Failure;
use rkyv::{Archive, Deserialize, Serialize};

use super::{EXTENT_HEADER_BYTES, ExtentError, ExtentHeader, RunEntry};
use crate::crc::crc32c;
use crate::ids::{Epoch, Offset, PartitionKey, TopicId};
use crate::limits::{BATCH_ALIGN_BYTES, EXTENT_BYTES_MAX};

/// Runs start at multiples of this, so that batch headers in them can be viewed aligned.
pub const RUN_ALIGN_BYTES: usize = BATCH_ALIGN_BYTES;
/// Most runs in an extent: their entries take at most half of it.
pub const RUNS_MAX: usize = EXTENT_BYTES_MAX / 2 / RUN_ENTRY_BYTES;

/// Size of an archived entry.
pub(super) const RUN_ENTRY_BYTES: usize = size_of::<ArchivedDiskRun>();

/// [`RunEntry`] as it is archived: bare numbers in a fixed order.
#[derive(Archive, Serialize, Deserialize)]
struct DiskRun {
    topic: u64,
    base_offset: u64,
    next_offset: u64,
    max_append_time_ms: i64,
    partition: u32,
    epoch: u32,
    place: u32,
    stored_bytes: u32,
    raw_bytes: u32,
    crc: u32,
    batches: u32,
    codec: u8,
}

#[derive(Archive, Serialize, Deserialize)]
struct Directory {
    runs: Vec<DiskRun>,
}

/// Size of the archive of `runs` entries.
pub(super) const fn directory_bytes(runs: usize) -> usize {
    runs * RUN_ENTRY_BYTES + size_of::<ArchivedDirectory>()
}

/// The directory's bytes; exactly as many as [`super::Layout::of_runs`] says.
#[must_use]
pub fn encode_directory(runs: &[RunEntry]) -> Vec<u8> {
    let disk_run = |run: &RunEntry| DiskRun {
        topic: run.key.topic.0,
        base_offset: run.base_offset.0,
        next_offset: run.next_offset.0,
        max_append_time_ms: run.max_append_time_ms,
        partition: run.key.partition,
        epoch: run.epoch.0,
        place: run.place,
        stored_bytes: run.stored_bytes,
        raw_bytes: run.raw_bytes,
        crc: run.crc,
        batches: run.batches,
        codec: run.codec,
    };
    let directory = Directory { runs: runs.iter().map(disk_run).collect() };
    let bytes = Vec::with_capacity(directory_bytes(runs.len()));
    let bytes = rkyv::api::high::to_bytes_in::<_, Failure>(&directory, bytes)
        .expect("plain numbers in memory always serialise");
    assert_eq!(bytes.len(), directory_bytes(runs.len()), "archived directory has another size than laid out");
    bytes
}

/// Reads the directory that `header` promises, from `directory`, its `directory_bytes` bytes. Checks the CRC, the
/// archive, and each entry: sorted by partition and offset, in the extent, aligned, not overlapping.
pub fn decode_directory(directory: &[u8], header: &ExtentHeader) -> Result<Vec<RunEntry>, ExtentError> {
    if directory.len() != header.directory_bytes as usize || crc32c(directory) != header.directory_crc {
        return Err(ExtentError::DirectoryCrc);
    }
    let archive = rkyv::access::<ArchivedDirectory, Failure>(directory).map_err(|Failure| ExtentError::Directory)?;
    if archive.runs.len() != header.run_count as usize {
        return Err(ExtentError::Directory);
    }
    let mut runs: Vec<RunEntry> = Vec::with_capacity(archive.runs.len());
    let mut free_from = EXTENT_HEADER_BYTES + directory.len();
    for (index, disk_run) in archive.runs.iter().enumerate() {
        let run = RunEntry {
            key: PartitionKey { topic: TopicId(disk_run.topic.into()), partition: disk_run.partition.into() },
            base_offset: Offset(disk_run.base_offset.into()),
            next_offset: Offset(disk_run.next_offset.into()),
            epoch: Epoch(disk_run.epoch.into()),
            place: disk_run.place.into(),
            stored_bytes: disk_run.stored_bytes.into(),
            raw_bytes: disk_run.raw_bytes.into(),
            crc: disk_run.crc.into(),
            batches: disk_run.batches.into(),
            codec: disk_run.codec,
            max_append_time_ms: disk_run.max_append_time_ms.into(),
        };
        free_from = check_run(&run, runs.last(), free_from, header.extent_bytes as usize)
            .map_err(|what| ExtentError::Run { index, what })?;
        runs.push(run);
    }
    Ok(runs)
}

/// Checks one entry against the one before; returns where the next run may start.
fn check_run(
    run: &RunEntry,
    previous: Option<&RunEntry>,
    free_from: usize,
    extent_bytes: usize,
) -> Result<usize, &'static str> {
    let (place, bytes) = (run.place as usize, run.stored_bytes as usize);
    if place < free_from {
        return Err("overlaps what stands before it");
    }
    if !place.is_multiple_of(RUN_ALIGN_BYTES) {
        return Err("is not aligned");
    }
    if bytes == 0 || run.batches == 0 || run.base_offset >= run.next_offset {
        return Err("is empty");
    }
    // Both fit 32 bits, so the sum fits a usize.
    if place + bytes > extent_bytes {
        return Err("reaches past the extent");
    }
    if run.codec == 0 && run.raw_bytes != run.stored_bytes {
        return Err("is not compressed and yet has another raw size");
    }
    if run.codec != 0 && (run.raw_bytes <= run.stored_bytes || run.raw_bytes as usize > EXTENT_BYTES_MAX) {
        return Err("is compressed and yet not smaller, or larger than an extent before");
    }
    if let Some(previous) = previous
        && (previous.key > run.key || previous.key == run.key && previous.next_offset > run.base_offset)
    {
        return Err("is out of order");
    }
    Ok(place + bytes)
}
