//! `ringmain bench`: flags become the bench crate's arguments, its report becomes lines or one line of JSON.

use anyhow::{Result, bail, ensure};
use ringmain_bench::consume::{self, ConsumeArgs};
use ringmain_bench::disk::{self, DiskArgs};
use ringmain_bench::echo::{self, EchoArgs};
use ringmain_bench::produce::{self, ProduceArgs};
use ringmain_bench::report::{Figures, json_line, lines};
use ringmain_bench::scrape::Broker;
use serde::Serialize;

use crate::cli::{BenchCommand, BenchConsumeArgs, BenchDiskArgs, BenchEchoArgs, BenchProduceArgs, BenchTarget};
use crate::output::print_text;

/// The default broker, and its HTTP port.
const DEFAULT_BROKER: (&str, &str) = ("127.0.0.1:8123", "127.0.0.1:8081");

/// Runs one of the benches.
pub fn bench(command: BenchCommand) -> Result<()> {
    match command {
        BenchCommand::Produce(args) => {
            let (json, verify) = (args.target.json, args.target.verify);
            let report = produce::run(&produce_args(args)?)?;
            print_and_judge(&report, json, &report.figures, !verify || report.verified)
        }
        BenchCommand::Consume(args) => {
            let (json, verify) = (args.target.json, args.target.verify);
            let report = consume::run(&consume_args(args)?)?;
            print_and_judge(&report, json, &report.figures, !verify || report.verified)
        }
        BenchCommand::Disk(args) => {
            let json = args.json;
            print(&disk::run(&disk_args(args)?)?, json)
        }
        BenchCommand::Echo(args) => {
            let json = args.json;
            print(&echo::run(&echo_args(args)?)?, json)
        }
    }
}

/// Prints a report in any case; it is an error when records are missing or wrong, or when nothing was measured.
fn print_and_judge(report: &impl Serialize, json: bool, figures: &Figures, verified: bool) -> Result<()> {
    let printed = print(report, json);
    // First: a report that nobody reads must not hide what it says.
    judge(figures, verified)?;
    printed
}

fn judge(figures: &Figures, verified: bool) -> Result<()> {
    let Figures { lost, duplicated, reordered, corrupt, unexpected, .. } = *figures;
    ensure!(
        figures.is_sound(),
        "records are wrong: {lost} lost, {duplicated} duplicated, {reordered} reordered, {corrupt} corrupt, {unexpected} \
         unexpected"
    );
    ensure!(figures.records > 0, "no record was acked or read");
    ensure!(verified, "interrupted before everything was read back: nothing was verified");
    Ok(())
}

fn print(report: &impl Serialize, json: bool) -> Result<()> {
    if json { print_text(&(json_line(report) + "\n")) } else { print_text(&lines(report)) }
}

fn produce_args(args: BenchProduceArgs) -> Result<ProduceArgs> {
    let target = args.target;
    Ok(ProduceArgs {
        broker_http: broker_http(&target),
        size: bytes("--size", target.size)?,
        broker: target.broker.to_string(),
        topics: target.topics,
        partitions: target.partitions,
        batch: target.batch,
        clients: target.clients,
        in_flight: target.in_flight,
        threads: target.threads,
        seconds: target.seconds,
        warm_up_seconds: target.warm_up_seconds,
        durability: target.durability,
        compressibility: target.compressibility,
        codec: target.codec,
        compression: target.compression,
        common_port: target.common_port,
        verify: target.verify,
        broker_pid: target.broker_pid,
    })
}

fn consume_args(args: BenchConsumeArgs) -> Result<ConsumeArgs> {
    let target = args.target;
    Ok(ConsumeArgs {
        broker_http: broker_http(&target),
        size: bytes("--size", target.size)?,
        broker: target.broker.to_string(),
        topic: args.topic,
        mode: args.mode,
        topics: target.topics,
        partitions: target.partitions,
        batch: target.batch,
        clients: target.clients,
        in_flight: target.in_flight,
        consumers: args.consumers,
        threads: target.threads,
        records: args.records,
        seconds: target.seconds,
        warm_up_seconds: target.warm_up_seconds,
        durability: target.durability,
        compressibility: target.compressibility,
        codec: target.codec,
        compression: target.compression,
        common_port: target.common_port,
        verify: target.verify,
        broker_pid: target.broker_pid,
    })
}

fn disk_args(args: BenchDiskArgs) -> Result<DiskArgs> {
    Ok(DiskArgs {
        dir: args.dir,
        seconds: args.seconds,
        bytes: args.bytes,
        file_bytes: args.file_bytes,
        write_bytes: bytes("--write-bytes", args.write_bytes)?,
        depth: args.depth,
        runs: args.runs,
        sync_operations: args.sync_operations,
        cpu: args.cpu,
    })
}

fn echo_args(args: BenchEchoArgs) -> Result<EchoArgs> {
    Ok(EchoArgs {
        size: bytes("--size", args.size)?,
        seconds: args.seconds,
        stream_seconds: args.stream_seconds,
        streams: args.streams,
        cpu: args.cpu,
    })
}

/// The broker's HTTP port: what was typed; for the default broker its default one, if that answers. For any other broker
/// nothing is guessed: figures of a wrong process would be worse than none.
fn broker_http(target: &BenchTarget) -> Option<String> {
    if let Some(typed) = &target.broker_http {
        return Some(typed.to_string());
    }
    let (broker, http) = DEFAULT_BROKER;
    let answers = || Broker { http: Some(http.to_owned()), pid: None }.sample().is_ok();
    if target.broker.to_string() == broker && answers() {
        return Some(http.to_owned());
    }
    if target.broker_pid.is_none() {
        eprintln!("ringmain: without --broker-http the report lacks the broker's CPU, memory and disk figures");
    }
    None
}

fn bytes(flag: &str, value: u64) -> Result<usize> {
    match usize::try_from(value) {
        Ok(bytes) if bytes > 0 => Ok(bytes),
        _ => bail!("{flag} is {value}: use a size above 0 that fits memory"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn parse(line: &str) -> BenchCommand {
        match Cli::parse_from(line.split(' ')).command {
            Command::Bench(command) => command,
            _ => panic!("{line}"),
        }
    }

    #[test]
    fn the_defaults_are_those_of_the_bench_crate() {
        let (BenchCommand::Produce(produce), BenchCommand::Consume(consume)) =
            (parse("ringmain bench produce --broker-http h:1"), parse("ringmain bench consume --broker-http h:1"))
        else {
            panic!()
        };
        let http = Some("h:1".to_owned());
        let expected = ProduceArgs { broker_http: http.clone(), ..ProduceArgs::default() };
        assert_eq!(format!("{:?}", produce_args(produce).unwrap()), format!("{expected:?}"));
        let expected = ConsumeArgs { broker_http: http, ..ConsumeArgs::default() };
        assert_eq!(format!("{:?}", consume_args(consume).unwrap()), format!("{expected:?}"));
        let (BenchCommand::Disk(disk), BenchCommand::Echo(echo)) =
            (parse("ringmain bench disk"), parse("ringmain bench echo"))
        else {
            panic!()
        };
        assert_eq!(format!("{:?}", disk_args(disk).unwrap()), format!("{:?}", DiskArgs::default()));
        assert_eq!(format!("{:?}", echo_args(echo).unwrap()), format!("{:?}", EchoArgs::default()));
    }

    #[test]
    fn a_report_with_wrong_records_or_none_is_an_error() {
        let sound = Figures { records: 10, ..Figures::default() };
        assert!(judge(&sound, true).is_ok());
        for wrong in [
            Figures { lost: 1, ..sound.clone() },
            Figures { duplicated: 1, ..sound.clone() },
            Figures { reordered: 1, ..sound.clone() },
            Figures { corrupt: 1, ..sound.clone() },
            Figures { unexpected: 1, ..sound.clone() },
            Figures::default(),
        ] {
            assert!(judge(&wrong, true).is_err(), "{wrong:?}");
        }
        assert!(judge(&sound, false).is_err());
    }

    #[test]
    fn sizes_of_0_are_refused() {
        let BenchCommand::Echo(args) = parse("ringmain bench echo --size 0") else { panic!() };
        assert!(echo_args(args).unwrap_err().to_string().contains("--size"));
    }
}
