//! `ringmain produce`: lines of a file or of standard input become records.
//!
//! A thread reads and builds batches; the client sends them; acks are counted as they come. A summary is printed however
//! it ends, and counts only what was acked.

mod batcher;
mod lines;

use std::fs::File;
use std::io::{IsTerminal, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use ringmain_core::ids::Durability;
use ringmain_core::limits::BATCH_BYTES_MAX;
use ringmain_wire::client::{Delivery, Producer, ProducerConfig};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;

use crate::cli::ProduceArgs;
use crate::client::{connect, run};
use crate::config::show_size;
use crate::output::print_json;
use crate::signals::Signals;
use batcher::{Batcher, ReadyBatch, Routing};
use lines::Lines;

/// Finished batches that wait between reader and client.
const BATCHES_WAITING: usize = 16;
/// Input that pauses for so long has its open batches sent.
const LINGER: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// After a signal, what is under way has so long to be acked.
const STOP_GRACE: Duration = Duration::from_secs(3);
/// How often the progress is drawn.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// Runs the command. The summary is printed in any case.
pub fn produce(args: ProduceArgs) -> Result<ExitCode> {
    if args.batch_bytes == 0 || args.batch_bytes > BATCH_BYTES_MAX as u64 {
        bail!("--batch-bytes is {}: use 1 to {}", args.batch_bytes, show_size(BATCH_BYTES_MAX as u64));
    }
    let tally = Arc::new(Tally::default());
    let began = Instant::now();
    let result = run(send_all(&args, &tally));
    let seconds = began.elapsed().as_secs_f64();
    let printed = summary(&args, &tally, seconds);
    // First: a summary that nobody reads must not hide that it failed.
    let signal = result?;
    printed?;
    match signal {
        None => Ok(ExitCode::SUCCESS),
        Some(signal) => Ok(ExitCode::from(128 + signal)),
    }
}

/// What has happened so far. Written by the reader, the client's side and the acks; read by progress and summary.
#[derive(Default)]
struct Tally {
    /// Bytes of the input that were read.
    input_bytes: AtomicU64,
    records: AtomicU64,
    records_acked: AtomicU64,
    payload_bytes_acked: AtomicU64,
    /// Weakest level of all acks, plus 1; 0 = none yet.
    level: AtomicU8,
}

impl Tally {
    fn acked(&self, records: u64, payload_bytes: u64, level: Durability) {
        self.records_acked.fetch_add(records, Ordering::Relaxed);
        self.payload_bytes_acked.fetch_add(payload_bytes, Ordering::Relaxed);
        let level = level as u8 + 1;
        let weaker = |known: u8| (known == 0 || level < known).then_some(level);
        // An error means that the known level is as weak.
        let _ = self.level.fetch_update(Ordering::Relaxed, Ordering::Relaxed, weaker);
    }

    fn level(&self) -> Option<Durability> {
        Durability::from_byte(self.level.load(Ordering::Relaxed).checked_sub(1)?)
    }
}

/// Sends everything; gives the number of the signal that stopped it, if one did.
async fn send_all(args: &ProduceArgs, tally: &Arc<Tally>) -> Result<Option<u8>> {
    let mut signals = Signals::new()?;
    let (stop, stopping) = watch::channel(false);
    let sending = send_file(args, tally, stopping);
    tokio::pin!(sending);
    tokio::select! {
        result = &mut sending => result.map(|()| None),
        signal = signals.next() => {
            stop.send_replace(true);
            tokio::select! {
                // Whatever is not acked by then is not counted.
                _ = tokio::time::timeout(STOP_GRACE, &mut sending) => {}
                _ = signals.next() => {}
            }
            Ok(Some(signal))
        }
    }
}

async fn send_file(args: &ProduceArgs, tally: &Arc<Tally>, stopping: watch::Receiver<bool>) -> Result<()> {
    // Before anything else: a wrong name must not wait for a broker.
    let input = Input::open(&args.file)?;
    let retry_for = Duration::from_secs_f64(args.retry_seconds);
    let client = connect(&args.client, Some(retry_for)).await?;
    let config = ProducerConfig {
        durability: args.durability,
        batch_bytes: args.batch_bytes as usize,
        retry_for,
        codec: args.codec,
        idempotent: !args.no_idempotent,
        ..ProducerConfig::default()
    };
    let failed = || format!("can't produce to topic {}", args.topic);
    let producer = client.producer(&args.topic, config).await.with_context(failed)?;
    let partitions = producer.partitions();
    if let Some(partition) = args.partition
        && partition >= partitions
    {
        bail!("topic {} has no partition {partition}: it has {partitions}, counted from 0", args.topic);
    }
    let routing = Routing {
        topic: producer.topic_id(),
        partitions,
        partition: args.partition,
        key_separator: args.key_separator.clone(),
        tag: args.tag.as_deref().map(Into::into),
        batch_bytes: args.batch_bytes as usize,
    };
    let (batches, incoming) = mpsc::channel(BATCHES_WAITING);
    let progress = Progress::start(input.bytes, tally);
    // A thread and not a blocking task: it may be stuck in a read for ever when the process wants to end.
    let reading = Arc::clone(tally);
    std::thread::Builder::new()
        .name("ringmain-input".to_owned())
        .spawn(move || {
            let end = read_batches(input, routing, &reading, &batches);
            // Nobody is left to hear it when the process is ending.
            let _ = batches.blocking_send(FromInput::End(end));
        })
        .context("can't start the reading thread")?;
    // Bounded by the producer's buffer.
    let (deliveries, sent) = mpsc::unbounded_channel();
    let sending = send_batches(incoming, stopping, &producer, deliveries, tally);
    let result = tokio::try_join!(sending, count_acks(sent, tally)).map(|_| ()).with_context(failed);
    drop(progress);
    result
}

enum FromInput {
    Batch(ReadyBatch),
    End(Result<()>),
}

struct Sent {
    delivery: Delivery,
    records: u64,
    payload_bytes: u64,
}

/// Ends with the input or at a stop; `deliveries` ends with it, so that counting ends when all is sent.
async fn send_batches(
    mut incoming: mpsc::Receiver<FromInput>,
    mut stopping: watch::Receiver<bool>,
    producer: &Producer,
    deliveries: mpsc::UnboundedSender<Sent>,
    tally: &Tally,
) -> Result<()> {
    loop {
        let next = tokio::select! {
            biased;
            _ = stopping.wait_for(|stop| *stop) => return Ok(()),
            next = incoming.recv() => next,
        };
        match next {
            Some(FromInput::Batch(batch)) => {
                let ReadyBatch { partition, bytes, records, payload_bytes } = batch;
                let delivery = producer.send_batch(partition, bytes, records, payload_bytes).await?;
                tally.records.fetch_add(records, Ordering::Relaxed);
                // Counting has ended only when it failed, and then this ends as well.
                let _ = deliveries.send(Sent { delivery, records, payload_bytes });
            }
            Some(FromInput::End(result)) => return result,
            None => bail!("the reading thread has died"),
        }
    }
}

async fn count_acks(mut sent: mpsc::UnboundedReceiver<Sent>, tally: &Tally) -> Result<()> {
    while let Some(Sent { delivery, records, payload_bytes }) = sent.recv().await {
        let delivered = delivery.await?;
        tally.acked(records, payload_bytes, delivered.level);
    }
    Ok(())
}

/// What lines are read from.
struct Input {
    file: File,
    /// Its size, when it is a regular file.
    bytes: Option<u64>,
}

impl Input {
    fn open(path: &Path) -> Result<Self> {
        if path == Path::new("-") {
            let copy = std::io::stdin().as_fd().try_clone_to_owned().context("can't read standard input")?;
            let file = File::from(copy);
            let bytes = file.metadata().ok().filter(std::fs::Metadata::is_file).map(|metadata| metadata.len());
            return Ok(Self { file, bytes });
        }
        let file = File::open(path).with_context(|| format!("can't open {}", path.display()))?;
        let metadata = file.metadata().with_context(|| format!("can't open {}", path.display()))?;
        if metadata.is_dir() {
            bail!("{} is a directory: name a file, or - for standard input", path.display());
        }
        Ok(Self { bytes: metadata.is_file().then_some(metadata.len()), file })
    }

    /// Whether more can be read without a wait longer than the linger time. A regular file always can.
    fn has_more_soon(file: &File) -> bool {
        let mut polled = [PollFd::new(file, PollFlags::IN)];
        // When polling fails the read says why.
        !matches!(poll(&mut polled, Some(&LINGER)), Ok(0))
    }
}

/// Reads to the end of the input, or until nobody takes batches any more.
fn read_batches(input: Input, routing: Routing, tally: &Tally, batches: &mpsc::Sender<FromInput>) -> Result<()> {
    let Input { file, bytes } = input;
    let mut lines = Lines::new(Counted { file: &file, tally });
    let mut batcher = Batcher::new(routing);
    let mut hand_on = |batch| {
        // Refused only when the process is ending; the next look at the channel notices.
        let _ = batches.blocking_send(FromInput::Batch(batch));
    };
    let mut number = 0_u64;
    while !batches.is_closed() {
        if bytes.is_none() && !batcher.is_empty() && !Input::has_more_soon(&file) {
            batcher.flush(&mut hand_on);
        }
        if !lines.fill()? {
            break;
        }
        let now_ms = now_ms();
        while let Some(line) = lines.next_line()? {
            number += 1;
            batcher.push(line, now_ms, &mut hand_on).with_context(|| format!("line {number} makes no record"))?;
        }
    }
    batcher.flush(&mut hand_on);
    Ok(())
}

/// Counts what is read, for the progress.
struct Counted<'a> {
    file: &'a File,
    tally: &'a Tally,
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.file.read(into)?;
        self.tally.input_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes)
    }
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The progress bar: on a terminal only, on standard error. Gone when it is dropped.
struct Progress {
    bar: ProgressBar,
    drawing: AbortHandle,
}

impl Progress {
    fn start(input_bytes: Option<u64>, tally: &Arc<Tally>) -> Option<Self> {
        if !std::io::stderr().is_terminal() {
            return None;
        }
        let bar = match input_bytes {
            Some(bytes) => {
                ProgressBar::new(bytes).with_style(style("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {msg}"))
            }
            None => ProgressBar::new_spinner().with_style(style("{spinner} {bytes} {bytes_per_sec} {msg}")),
        };
        bar.set_draw_target(ProgressDrawTarget::stderr());
        let (drawn, tally) = (bar.clone(), Arc::clone(tally));
        let drawing = tokio::spawn(async move {
            let mut every = tokio::time::interval(DRAW_EVERY);
            loop {
                every.tick().await;
                drawn.set_position(tally.input_bytes.load(Ordering::Relaxed));
                drawn.set_message(format!("{} records acked", tally.records_acked.load(Ordering::Relaxed)));
            }
        });
        Some(Self { bar, drawing: drawing.abort_handle() })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.drawing.abort();
        self.bar.finish_and_clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant that was tried")
}

/// Prints what became of the records: JSON on standard output, or words on standard error.
fn summary(args: &ProduceArgs, tally: &Tally, seconds: f64) -> Result<()> {
    let records = tally.records.load(Ordering::Relaxed);
    let records_acked = tally.records_acked.load(Ordering::Relaxed);
    let payload_bytes = tally.payload_bytes_acked.load(Ordering::Relaxed);
    // Without an ack there is only what was asked for.
    let level = tally.level().or(args.durability).map(Durability::name);
    if args.json {
        return print_json(&json!({
            "records": records,
            "records_acked": records_acked,
            "payload_bytes": payload_bytes,
            "seconds": (seconds * 1000.0).round() / 1000.0,
            "level": level,
        }));
    }
    let megabytes = payload_bytes as f64 / 1e6;
    eprintln!(
        "{records_acked} of {records} records acked{}, {megabytes:.1} MB in {seconds:.2} s, {:.1} MB/s",
        level.map(|level| format!(" at level {level}")).unwrap_or_default(),
        megabytes / seconds.max(1e-9)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_of_the_summary_is_the_weakest_ack() {
        let tally = Tally::default();
        assert_eq!(tally.level(), None);
        tally.acked(1, 10, Durability::Synced);
        assert_eq!(tally.level(), Some(Durability::Synced));
        tally.acked(1, 10, Durability::Memory);
        tally.acked(1, 10, Durability::Flushed);
        assert_eq!(tally.level(), Some(Durability::Memory));
        assert_eq!(tally.records_acked.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn the_templates_of_the_progress_bar_are_right() {
        style("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {msg}");
        style("{spinner} {bytes} {bytes_per_sec} {msg}");
    }

    #[test]
    fn a_file_becomes_batches_in_order() {
        use std::io::Write;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for number in 0..10_000 {
            writeln!(file, "line {number}").unwrap();
        }
        let routing = Routing {
            topic: 1.into(),
            partitions: 4,
            partition: None,
            key_separator: None,
            tag: None,
            batch_bytes: 8192,
        };
        let (batches, mut incoming) = mpsc::channel(10_000);
        let tally = Tally::default();
        read_batches(Input::open(file.path()).unwrap(), routing, &tally, &batches).unwrap();
        drop(batches);
        let mut records = 0;
        while let Ok(FromInput::Batch(batch)) = incoming.try_recv() {
            records += batch.records;
        }
        assert_eq!(records, 10_000);
        assert_eq!(tally.input_bytes.load(Ordering::Relaxed), file.path().metadata().unwrap().len());
    }
}
