//! The directory of an extent: the archive of its runs, and of the newest batches of idempotent producers in them, checked
//! entry by entry before anything uses it.

use rkyv::rancor::Failure;
use rkyv::{Archive, Deserialize, Serialize};

use super::{Directory, EXTENT_HEADER_BYTES, ExtentError, ExtentHeader, ProducerEntry, RunEntry};
use crate::crc::crc32c;
use crate::dedup::ProducerBatch;
use crate::ids::{Epoch, Offset, PartitionKey, TopicId};
use crate::limits::{BATCH_ALIGN_BYTES, BATCH_RECORDS_MAX, EXTENT_BYTES_MAX};

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

/// [`ProducerEntry`] as it is archived; its epoch is the run's.
#[derive(Archive, Serialize, Deserialize)]
struct DiskProducer {
    producer_id: u64,
    base_offset: u64,
    base_sequence: u32,
    record_count: u32,
    crc: u32,
    run: u32,
    producer_epoch: u16,
}

#[derive(Archive, Serialize, Deserialize)]
struct DiskDirectory {
    runs: Vec<DiskRun>,
    producers: Vec<DiskProducer>,
}

/// Size of the archive of so many runs and batches of producers.
pub(super) const fn directory_bytes(runs: usize, producers: usize) -> usize {
    let producers = producers * size_of::<ArchivedDiskProducer>();
    runs * RUN_ENTRY_BYTES + producers + size_of::<ArchivedDiskDirectory>()
}

/// The directory's bytes; exactly as many as [`super::Layout::of_runs`] says.
#[must_use]
pub fn encode_directory(runs: &[RunEntry], producers: &[ProducerEntry]) -> Vec<u8> {
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
    let disk_producer = |entry: &ProducerEntry| DiskProducer {
        producer_id: entry.batch.producer_id,
        base_offset: entry.batch.base_offset.0,
        base_sequence: entry.batch.base_sequence,
        record_count: entry.batch.record_count,
        crc: entry.batch.crc,
        run: entry.run,
        producer_epoch: entry.batch.producer_epoch,
    };
    let directory = DiskDirectory {
        runs: runs.iter().map(disk_run).collect(),
        producers: producers.iter().map(disk_producer).collect(),
    };
    let laid_out = directory_bytes(runs.len(), producers.len());
    let bytes = Vec::with_capacity(laid_out);
    let bytes = rkyv::api::high::to_bytes_in::<_, Failure>(&directory, bytes)
        .expect("plain numbers in memory always serialise");
    assert_eq!(bytes.len(), laid_out, "archived directory has another size than laid out");
    bytes
}

/// Reads the directory that `header` promises, from `directory`, its `directory_bytes` bytes. Checks the CRC, the
/// archive, and each entry: runs sorted by partition and offset, in the extent, aligned, not overlapping; batches of
/// producers sorted by run and offset, inside their runs.
pub fn decode_directory(directory: &[u8], header: &ExtentHeader) -> Result<Directory, ExtentError> {
    if directory.len() != header.directory_bytes as usize || crc32c(directory) != header.directory_crc {
        return Err(ExtentError::DirectoryCrc);
    }
    let archive =
        rkyv::access::<ArchivedDiskDirectory, Failure>(directory).map_err(|Failure| ExtentError::Directory)?;
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
    // The archive check made sure that entries do not share bytes, so together they fit the directory.
    let mut producers: Vec<ProducerEntry> = Vec::with_capacity(archive.producers.len());
    for (index, disk_producer) in archive.producers.iter().enumerate() {
        let entry = producer_entry(disk_producer, &runs, producers.last());
        producers.push(entry.map_err(|what| ExtentError::Producer { index, what })?);
    }
    Ok(Directory { runs, producers })
}

/// Checks one batch of a producer against its run and the entry before.
fn producer_entry(
    disk_producer: &ArchivedDiskProducer,
    runs: &[RunEntry],
    previous: Option<&ProducerEntry>,
) -> Result<ProducerEntry, &'static str> {
    let number = disk_producer.run.to_native();
    let run = usize::try_from(number).ok().and_then(|number| runs.get(number)).ok_or("is of no run")?;
    let batch = ProducerBatch {
        producer_id: disk_producer.producer_id.into(),
        producer_epoch: disk_producer.producer_epoch.into(),
        base_sequence: disk_producer.base_sequence.into(),
        record_count: disk_producer.record_count.into(),
        base_offset: Offset(disk_producer.base_offset.into()),
        epoch: run.epoch,
        crc: disk_producer.crc.into(),
    };
    if batch.producer_id == 0 || batch.record_count == 0 || batch.record_count as usize > BATCH_RECORDS_MAX {
        return Err("has no producer or an impossible number of records");
    }
    if batch.base_offset < run.base_offset || batch.next_offset() > run.next_offset {
        return Err("lies outside of its run");
    }
    if let Some(previous) = previous
        && (previous.run > number || previous.run == number && previous.batch.next_offset() > batch.base_offset)
    {
        return Err("is out of order");
    }
    Ok(ProducerEntry { run: number, batch })
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
