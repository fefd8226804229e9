//! The executor's part of the disk baseline: the rounds of writes, reads and syncs, one file each.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use glommio::io::{DmaBuffer, DmaFile, OpenOptions};

use super::{BLOCK_BYTES, DiskArgs, DiskReport, GROUP_BYTES, SMALL_BYTES};
use crate::device;
use crate::histogram::Latencies;
use crate::payload::{Compressibility, Payload, now_ns};
use crate::report::{mb_per_s, median};

/// The work of the executor.
pub(super) struct Rounds {
    args: DiskArgs,
    /// Largest read that is safe.
    read_bytes_max: usize,
    payload: Payload,
    /// Key of the next buffer's contents.
    key: u64,
}

/// Everything measured, over all rounds.
#[derive(Default)]
pub(super) struct Measured {
    fallocated: Runs,
    written: Runs,
    read: Runs,
    write_latencies: Latencies,
    sync_small: Latencies,
    sync_group: Latencies,
    sync_fallocated_small: Latencies,
    sync_fallocated_group: Latencies,
    bytes_written: u64,
}

/// Runs of one kind.
#[derive(Default)]
struct Runs {
    bytes: u64,
    seconds: f64,
    mb_per_s: Vec<f64>,
}

impl Runs {
    fn add(&mut self, bytes: u64, seconds: f64) {
        self.bytes += bytes;
        self.seconds += seconds;
        self.mb_per_s.push(mb_per_s(bytes, seconds));
    }

    fn total(&self) -> f64 {
        mb_per_s(self.bytes, self.seconds)
    }
}

impl Measured {
    /// The report's figures; what names the run is left out.
    pub(super) fn report(self) -> DiskReport {
        DiskReport {
            write_mb_per_s: self.written.total(),
            write_median_mb_per_s: median(&self.written.mb_per_s),
            write_runs_mb_per_s: self.written.mb_per_s,
            write_p50_us: self.write_latencies.quantile_us(0.5),
            write_p99_us: self.write_latencies.quantile_us(0.99),
            write_fallocated_mb_per_s: self.fallocated.total(),
            write_fallocated_median_mb_per_s: median(&self.fallocated.mb_per_s),
            write_fallocated_runs_mb_per_s: self.fallocated.mb_per_s,
            read_mb_per_s: self.read.total(),
            read_median_mb_per_s: median(&self.read.mb_per_s),
            sync_4k_p50_us: self.sync_small.quantile_us(0.5),
            sync_4k_p99_us: self.sync_small.quantile_us(0.99),
            sync_64k_p50_us: self.sync_group.quantile_us(0.5),
            sync_64k_p99_us: self.sync_group.quantile_us(0.99),
            sync_fallocated_4k_p50_us: self.sync_fallocated_small.quantile_us(0.5),
            sync_fallocated_4k_p99_us: self.sync_fallocated_small.quantile_us(0.99),
            sync_fallocated_64k_p50_us: self.sync_fallocated_group.quantile_us(0.5),
            sync_fallocated_64k_p99_us: self.sync_fallocated_group.quantile_us(0.99),
            bytes_written: self.bytes_written,
            ..DiskReport::default()
        }
    }
}

impl Rounds {
    pub(super) fn new(args: DiskArgs, read_bytes_max: usize) -> Self {
        Self { args, read_bytes_max, payload: Payload::new(std::process::id(), Compressibility::Random), key: 0 }
    }

    /// Runs all rounds; on the executor.
    pub(super) async fn run(mut self) -> Result<Measured> {
        let mut measured = Measured::default();
        for _ in 0..self.args.runs {
            self.round(&mut measured).await?;
        }
        Ok(measured)
    }

    async fn round(&mut self, measured: &mut Measured) -> Result<()> {
        let write_bytes = self.args.write_bytes;
        let whole_writes = self.args.file_bytes / write_bytes as u64 * write_bytes as u64;
        let file = self.scratch_file(whole_writes).await?;
        let mut buffers = Vec::new();
        for _ in 0..self.args.depth {
            buffers.push(self.buffer(&file, write_bytes));
        }

        let fresh = self.cursor(whole_writes, write_bytes, false);
        let (bytes, seconds) = write_run(&file, fresh, &mut buffers, &mut Latencies::new()).await?;
        measured.fallocated.add(bytes, seconds);
        measured.bytes_written += bytes;

        let written = bytes;
        let again = self.cursor(written, write_bytes, true);
        let (bytes, seconds) = write_run(&file, again, &mut buffers, &mut measured.write_latencies).await?;
        measured.written.add(bytes, seconds);
        measured.bytes_written += bytes;

        // Their memory is what the reads are given: buffers from the heap would cost page faults.
        drop(buffers);
        let read_bytes = write_bytes.min(self.read_bytes_max / BLOCK_BYTES * BLOCK_BYTES);
        let reads = self.cursor(written / read_bytes as u64 * read_bytes as u64, read_bytes, true);
        let (bytes, seconds) = read_run(&file, reads, read_bytes, self.args.depth).await?;
        measured.read.add(bytes, seconds);

        let operations = self.args.sync_operations / self.args.runs;
        let fresh = self.scratch_file((operations * (SMALL_BYTES + GROUP_BYTES)) as u64).await?;
        let small_end = (operations * SMALL_BYTES) as u64;
        for (file, from, wrap, bytes, latencies) in [
            (&file, 0, written, SMALL_BYTES, &mut measured.sync_small),
            (&fresh, 0, u64::MAX, SMALL_BYTES, &mut measured.sync_fallocated_small),
            (&file, 0, written, GROUP_BYTES, &mut measured.sync_group),
            (&fresh, small_end, u64::MAX, GROUP_BYTES, &mut measured.sync_fallocated_group),
        ] {
            let mut buffer = self.buffer(file, bytes);
            let until = Instant::now() + self.run_time();
            measured.bytes_written += sync_run(file, from, wrap, operations, until, &mut buffer, latencies).await?;
        }
        close(fresh).await?;
        close(file).await
    }

    fn run_time(&self) -> Duration {
        Duration::from_secs_f64(self.args.seconds / self.args.runs as f64)
    }

    fn cursor(&self, extent: u64, step: usize, wraps: bool) -> Cursor {
        let share = self.args.bytes.map_or(u64::MAX, |bytes| bytes.div_ceil(self.args.runs as u64));
        Cursor {
            next: 0,
            taken: 0,
            extent,
            step: step as u64,
            wraps,
            most: share,
            until: Instant::now() + self.run_time(),
        }
    }

    /// A preallocated file without a name.
    pub(super) async fn scratch_file(&self, bytes: u64) -> Result<Rc<DmaFile>> {
        let path = device::scratch_path(&self.args.dir);
        let file = OpenOptions::new().read(true).write(true).create_new(true).dma_open(&path).await;
        let removed = std::fs::remove_file(&path);
        let file = file.map_err(|error| anyhow!("{error}"))?;
        removed?;
        file.pre_allocate(bytes, false).await.map_err(|error| anyhow!("preallocating {bytes} bytes: {error}"))?;
        Ok(Rc::new(file))
    }

    /// A buffer of incompressible bytes that no other has.
    pub(super) fn buffer(&mut self, file: &DmaFile, bytes: usize) -> Rc<DmaBuffer> {
        let mut buffer = file.alloc_dma_buffer(bytes);
        self.payload.fill_content(self.key, buffer.as_bytes_mut());
        self.key += 1 << 32;
        Rc::new(buffer)
    }
}

/// Hands out places to the writers of one run, in order.
pub(super) struct Cursor {
    next: u64,
    taken: u64,
    extent: u64,
    step: u64,
    wraps: bool,
    most: u64,
    until: Instant,
}

impl Cursor {
    /// Places in a file of `extent` bytes, from its start, until that time.
    pub(super) fn until(until: Instant, extent: u64, step: usize, wraps: bool) -> Self {
        Self { next: 0, taken: 0, extent, step: step as u64, wraps, most: u64::MAX, until }
    }

    fn take(&mut self) -> Option<u64> {
        // The first write is always allowed, so that every run has a figure.
        if self.taken > 0 && (self.taken >= self.most || Instant::now() >= self.until) {
            return None;
        }
        if self.next + self.step > self.extent {
            if !self.wraps || self.extent < self.step {
                return None;
            }
            self.next = 0;
        }
        let place = self.next;
        self.next += self.step;
        self.taken += self.step;
        Some(place)
    }
}

/// Makes each block unlike all that were written before: a disk may fold equal blocks.
pub(super) fn stamp_blocks(buffer: &mut Rc<DmaBuffer>, file: &DmaFile, place: u64) {
    let now = now_ns();
    if Rc::get_mut(buffer).is_none() {
        let mut copy = file.alloc_dma_buffer(buffer.len());
        copy.as_bytes_mut().copy_from_slice(buffer.as_bytes());
        *buffer = Rc::new(copy);
    }
    let bytes = Rc::get_mut(buffer).expect("a buffer that was just made has one owner").as_bytes_mut();
    for (index, block) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
        block[..8].copy_from_slice(&(place + index as u64).to_le_bytes());
        block[8..16].copy_from_slice(&now.to_le_bytes());
    }
}

/// Writes with one task for each buffer, then syncs: bytes and seconds, the sync included.
pub(super) async fn write_run(
    file: &Rc<DmaFile>,
    cursor: Cursor,
    buffers: &mut Vec<Rc<DmaBuffer>>,
    latencies: &mut Latencies,
) -> Result<(u64, f64)> {
    let started = Instant::now();
    let cursor = Rc::new(RefCell::new(cursor));
    let mut writers = Vec::new();
    for mut buffer in buffers.drain(..) {
        let (file, cursor) = (Rc::clone(file), Rc::clone(&cursor));
        writers.push(glommio::spawn_local(async move {
            let mut latencies = Latencies::new();
            loop {
                let Some(place) = cursor.borrow_mut().take() else { break };
                stamp_blocks(&mut buffer, &file, place);
                let started = Instant::now();
                write(&file, &buffer, place).await?;
                latencies.record(started.elapsed());
            }
            Ok::<_, anyhow::Error>((buffer, latencies))
        }));
    }
    for writer in writers {
        let (buffer, own) = writer.await?;
        buffers.push(buffer);
        latencies.merge(&own);
    }
    sync(file).await?;
    let bytes = cursor.borrow().taken;
    Ok((bytes, started.elapsed().as_secs_f64()))
}

pub(super) async fn write(file: &DmaFile, buffer: &Rc<DmaBuffer>, place: u64) -> Result<()> {
    let written = file.write_rc_at(Rc::clone(buffer), place).await.map_err(|error| anyhow!("{error}"))?;
    ensure!(written == buffer.len(), "{written} of {} bytes were written at {place}", buffer.len());
    Ok(())
}

pub(super) async fn sync(file: &DmaFile) -> Result<()> {
    file.fdatasync().await.map_err(|error| anyhow!("{error}"))
}

pub(super) async fn close(file: Rc<DmaFile>) -> Result<()> {
    file.close_rc().await.map(|_| ()).map_err(|error| anyhow!("{error}"))
}

/// Reads with `depth` tasks: bytes and seconds.
pub(super) async fn read_run(
    file: &Rc<DmaFile>,
    cursor: Cursor,
    read_bytes: usize,
    depth: usize,
) -> Result<(u64, f64)> {
    let started = Instant::now();
    let cursor = Rc::new(RefCell::new(cursor));
    let mut readers = Vec::new();
    for _ in 0..depth {
        let (file, cursor) = (Rc::clone(file), Rc::clone(&cursor));
        readers.push(glommio::spawn_local(async move {
            loop {
                let Some(place) = cursor.borrow_mut().take() else { break };
                let read = file.read_at_aligned(place, read_bytes).await.map_err(|error| anyhow!("{error}"))?;
                ensure!(read.len() == read_bytes, "{} of {read_bytes} bytes were read at {place}", read.len());
            }
            Ok(())
        }));
    }
    for reader in readers {
        reader.await?;
    }
    let bytes = cursor.borrow().taken;
    Ok((bytes, started.elapsed().as_secs_f64()))
}

/// Small writes one behind the other, each synced before the next: bytes written.
pub(super) async fn sync_run(
    file: &Rc<DmaFile>,
    from: u64,
    wrap: u64,
    operations: usize,
    until: Instant,
    buffer: &mut Rc<DmaBuffer>,
    latencies: &mut Latencies,
) -> Result<u64> {
    let bytes = buffer.len() as u64;
    let (mut place, mut total) = (from, 0);
    for _ in 0..operations {
        if place + bytes > wrap {
            place = 0;
        }
        stamp_blocks(buffer, file, place);
        let started = Instant::now();
        write(file, buffer, place).await?;
        sync(file).await?;
        latencies.record(started.elapsed());
        place += bytes;
        total += bytes;
        if Instant::now() >= until {
            break;
        }
    }
    Ok(total)
}
