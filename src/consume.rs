//! `ringmain consume`: records of a topic to standard output, in order within each partition.

mod print;

use std::collections::HashMap;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ringmain_core::ids::Offset;
use ringmain_core::limits::FETCH_BYTES_MAX;
use ringmain_wire::client::{ClientError, Consumer, ConsumerConfig, ConsumerEvent, StartAt};
use ringmain_wire::fetch::GapReason;
use ringmain_wire::offsets::PartitionOffsets;

use crate::cli::{ConsumeArgs, Format, Start};
use crate::client::{connect, run};
use crate::output::stdout;
use crate::signals::Signals;
pub use print::Printer;

/// Runs the command.
pub fn consume(args: ConsumeArgs) -> Result<ExitCode> {
    match run(read_all(&args))? {
        None => Ok(ExitCode::SUCCESS),
        Some(signal) => Ok(ExitCode::from(128 + signal)),
    }
}

/// Prints what was asked for; gives the number of the signal that stopped it, if one did.
async fn read_all(args: &ConsumeArgs) -> Result<Option<u8>> {
    let mut signals = Signals::new()?;
    let reading = async {
        let failed = || format!("can't consume topic {}", args.topic);
        let retry_for = Duration::from_secs_f64(args.retry_seconds);
        let client = connect(&args.client, Some(retry_for)).await?;
        let offsets = client.offsets(&args.topic).await.with_context(failed)?;
        let plan = plan(args, &offsets.partitions)?;
        let starts: Vec<_> = plan.iter().map(|(partition, start, _)| (*partition, StartAt::Offset(*start))).collect();
        let config = ConsumerConfig {
            fetch_bytes: FETCH_BYTES_MAX as u32,
            tags: args.tags.clone(),
            retry_for,
            ..ConsumerConfig::default()
        };
        let progress = Progress::new(&plan, args.follow, args.count);
        let consumer = client.consumer(&args.topic, starts, config).await.with_context(failed)?;
        anyhow::Ok((consumer, progress))
    };
    let (consumer, progress) = tokio::select! {
        ready = reading => ready?,
        signal = signals.next() => return Ok(Some(signal)),
    };
    let format = if args.json { Format::Json } else { args.format };
    let mut printer = Printer::new(stdout(), format, &args.topic);
    let result = print_all(consumer, progress, &mut printer, &mut signals).await;
    // What was read before a failure is printed all the same.
    let flushed = printer.flush();
    let signal = result.with_context(|| format!("can't consume topic {}", args.topic))?;
    flushed?;
    Ok(signal)
}

/// Partition, first offset, and the end seen now, of each partition to read.
type Plan = Vec<(u32, Offset, Offset)>;

fn plan(args: &ConsumeArgs, partitions: &[PartitionOffsets]) -> Result<Plan> {
    let wanted = |ends: &&PartitionOffsets| args.partition.is_none_or(|partition| partition == ends.partition);
    let mut plan = Vec::new();
    for ends in partitions.iter().filter(wanted) {
        let PartitionOffsets { partition, log_start, log_end, .. } = *ends;
        if !ends.code.is_ok() {
            bail!("can't read partition {partition} of topic {}: {}", args.topic, ends.code.sentence());
        }
        let start = match args.from {
            Start::Earliest => log_start,
            Start::Latest => log_end,
            Start::Offset(offset) if offset < log_start.get() => bail!(
                "offset {offset} of partition {partition} is gone: the log starts at {log_start}, use --from earliest"
            ),
            Start::Offset(offset) if offset > log_end.get() => bail!(
                "offset {offset} of partition {partition} was not given yet: the log ends at {log_end}, use --from latest"
            ),
            Start::Offset(offset) => Offset(offset),
        };
        plan.push((partition, start, log_end));
    }
    match args.partition {
        Some(partition) if plan.is_empty() => {
            bail!("topic {} has no partition {partition}: it has {}, counted from 0", args.topic, partitions.len())
        }
        _ => Ok(plan),
    }
}

/// How far reading has come, and when it is over.
#[derive(Debug)]
struct Progress {
    /// Partitions that are not read to their ends yet, with these; none when following.
    ends: Option<HashMap<u32, Offset>>,
    /// Records still to be printed; none = no limit.
    left: Option<u64>,
}

impl Progress {
    fn new(plan: &Plan, follow: bool, count: Option<u64>) -> Self {
        let open = plan.iter().filter(|(_, start, end)| start < end);
        let ends = (!follow).then(|| open.map(|(partition, _, end)| (*partition, *end)).collect());
        Self { ends, left: count }
    }

    fn is_over(&self) -> bool {
        self.left == Some(0) || self.ends.as_ref().is_some_and(HashMap::is_empty)
    }

    /// Whether to print the record; counts it.
    fn takes(&mut self, partition: u32, offset: Offset) -> bool {
        let inside = match &self.ends {
            Some(ends) => ends.get(&partition).is_some_and(|end| offset < *end),
            None => true,
        };
        let takes = inside && self.left != Some(0);
        if let Some(left) = &mut self.left
            && takes
        {
            *left -= 1;
        }
        takes
    }

    /// All below `next` has been seen.
    fn reached(&mut self, partition: u32, next: Offset) {
        if let Some(ends) = &mut self.ends
            && ends.get(&partition).is_some_and(|end| next >= *end)
        {
            ends.remove(&partition);
        }
    }
}

enum Step {
    Event(Result<ConsumerEvent, ClientError>),
    /// Nothing has come yet.
    Idle,
    Signal(u8),
}

async fn print_all<W: Write>(
    mut consumer: Consumer,
    mut progress: Progress,
    printer: &mut Printer<W>,
    signals: &mut Signals,
) -> Result<Option<u8>> {
    let mut unflushed = false;
    while !progress.is_over() {
        let step = tokio::select! {
            biased;
            signal = signals.next() => Step::Signal(signal),
            event = consumer.next() => Step::Event(event),
            () = std::future::ready(()), if unflushed => Step::Idle,
        };
        match step {
            Step::Signal(signal) => return Ok(Some(signal)),
            // Before a wait, the reader of our output gets all there is.
            Step::Idle => {
                printer.flush()?;
                unflushed = false;
            }
            Step::Event(event) => {
                print_event(event?, &mut progress, printer)?;
                unflushed = true;
            }
        }
    }
    Ok(None)
}

fn print_event<W: Write>(event: ConsumerEvent, progress: &mut Progress, printer: &mut Printer<W>) -> Result<()> {
    match event {
        ConsumerEvent::Batch(batch) => {
            let partition = batch.partition;
            for record in batch.records() {
                if progress.takes(partition, record.offset) {
                    printer.record(partition, &record)?;
                }
                progress.reached(partition, record.offset.plus(1));
            }
        }
        ConsumerEvent::Gap { partition, from, to, reason } => {
            let reason = match reason {
                GapReason::LostMemory => "lost_memory",
                GapReason::Corrupt => "corrupt",
            };
            printer.gap(partition, from, to, reason)?;
            progress.reached(partition, to);
        }
        ConsumerEvent::OutOfRange { partition, asked, now } => {
            printer.gap(partition, asked, now, "out_of_range")?;
            progress.reached(partition, now);
        }
        ConsumerEvent::BadBatch { partition, at, error } => {
            bail!(
                "partition {partition}, offset {at}: a batch came damaged ({error}); try again, and if it stays, run with --from past it"
            )
        }
        ConsumerEvent::CaughtUp { partition, offset } => progress.reached(partition, offset),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use ringmain_core::ids::Epoch;
    use ringmain_wire::ErrorCode;

    fn args(line: &str) -> ConsumeArgs {
        match crate::cli::Cli::parse_from(line.split(' ')).command {
            crate::cli::Command::Consume(args) => args,
            _ => panic!("{line}"),
        }
    }

    fn ends(partition: u32, log_start: u64, log_end: u64) -> PartitionOffsets {
        PartitionOffsets {
            partition,
            code: ErrorCode::OK,
            log_start: Offset(log_start),
            log_end: Offset(log_end),
            flushed_end: Offset(log_end),
            synced_end: Offset(log_end),
            leader_epoch: Epoch(0),
            unsynced_bytes: 0,
            unsynced_ms: 0,
        }
    }

    #[test]
    fn starts_are_ends_of_the_log_or_offsets_inside_it() {
        let partitions = [ends(0, 5, 10), ends(1, 0, 3)];
        let all = |line: &str| plan(&args(line), &partitions);
        assert_eq!(all("ringmain consume t").unwrap(), [(0, Offset(5), Offset(10)), (1, Offset(0), Offset(3))]);
        assert_eq!(all("ringmain consume t --from latest --partition 1").unwrap(), [(1, Offset(3), Offset(3))]);
        assert_eq!(all("ringmain consume t --from 10 --partition 0").unwrap(), [(0, Offset(10), Offset(10))]);
        for (line, expected) in [
            ("ringmain consume t --from 4 --partition 0", "log starts at 5"),
            ("ringmain consume t --from 11 --partition 0", "log ends at 10"),
            ("ringmain consume t --partition 2", "no partition 2"),
        ] {
            let error = all(line).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn without_follow_reading_is_over_at_the_ends_seen_at_the_start() {
        let plan = vec![(0, Offset(0), Offset(2)), (1, Offset(3), Offset(3))];
        let mut progress = Progress::new(&plan, false, None);
        assert!(progress.takes(0, Offset(0)));
        progress.reached(0, Offset(1));
        assert!(!progress.is_over());
        assert!(progress.takes(0, Offset(1)) && !progress.takes(0, Offset(2)) && !progress.takes(1, Offset(3)));
        progress.reached(0, Offset(2));
        assert!(progress.is_over());
        assert!(Progress::new(&vec![(0, Offset(4), Offset(4))], false, None).is_over());
        assert!(!Progress::new(&vec![(0, Offset(4), Offset(4))], true, None).is_over());
    }

    #[test]
    fn a_count_ends_reading_and_following() {
        let mut progress = Progress::new(&vec![(0, Offset(0), Offset(9))], true, Some(2));
        assert!(progress.takes(0, Offset(0)) && progress.takes(0, Offset(1)));
        assert!(progress.is_over() && !progress.takes(0, Offset(2)));
    }
}
