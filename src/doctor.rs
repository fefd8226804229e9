//! `ringmain doctor`: what on this machine would keep a broker from starting, or from being fast or safe, each with its
//! fix; and a profile of the disk. Takes the settings of `serve`, and looks at what they would start.

use std::process::ExitCode;

use anyhow::Result;
use ringmain_bench::disk::{ProfileArgs, ProfileReport, profile};
use ringmain_shard::ArenaChoice;
use ringmain_shard::preflight::{Check, Outcome, SurveyConfig, survey};
use serde_json::{Value, json};

use crate::budget::default_memory;
use crate::cli::DoctorArgs;
use crate::config::{Arena, Config};
use crate::output::{print_json, print_text, table};

/// Above this a synced ack of a small record is slow for what it is.
const SYNC_SLOW_US: f64 = 3_000.0;
/// No flush of a device's cache is so quick: it lies, or is backed by power.
const SYNC_QUICK_US: f64 = 20.0;
/// A write beside a reader may take so many times longer.
const INTERFERENCE_MAX: f64 = 5.0;
/// Checks without which the disk can't be measured.
const PROFILE_NEEDS: [&str; 3] = ["io_uring", "direct_io", "memlock"];

/// Runs the command; the exit code says whether a broker would start.
pub fn doctor(args: DoctorArgs) -> Result<ExitCode> {
    let config = Config::resolve(args.serve)?;
    let survey_config = survey_config(&config);
    let mut checks = survey(&survey_config);
    let measurable =
        !checks.iter().any(|check| PROFILE_NEEDS.contains(&check.name) && check.outcome == Outcome::Problem);
    let mut report = None;
    if !args.quick && measurable {
        if !args.json {
            eprintln!("ringmain: measuring the disk for about 20 seconds (--quick leaves that out)");
        }
        let mut dir = config.data.as_path();
        while !dir.exists() {
            dir = dir.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(std::path::Path::new("."));
        }
        match profile(&ProfileArgs { dir: dir.to_owned(), ..ProfileArgs::default() }) {
            Ok(measured) => {
                checks.extend(judge(&measured));
                report = Some(measured);
            }
            Err(error) => checks.push(Check {
                name: "disk_profile",
                outcome: Outcome::Warning,
                found: format!("could not be taken: {error:#}"),
                fix: Some("make what it names possible, or leave it out with --quick".to_owned()),
            }),
        }
    }
    let starts = checks.iter().all(|check| check.outcome != Outcome::Problem);
    if args.json {
        print_json(&as_json(starts, &checks, report.as_ref()))?;
    } else {
        print_text(&as_text(starts, &checks, report.as_ref()))?;
    }
    Ok(if starts { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn survey_config(config: &Config) -> SurveyConfig {
    SurveyConfig {
        data_dir: config.data.clone(),
        shards: config.shards,
        memory_bytes: config.memory,
        memory_default: |arena, shards| {
            let arena = match arena {
                ArenaChoice::Dir(dir) => Arena::Shared(dir.clone()),
                ArenaChoice::Anonymous => Arena::Anonymous,
            };
            default_memory(&arena, shards)
        },
        arena: match &config.arena {
            Arena::Shared(dir) => ArenaChoice::Dir(dir.clone()),
            Arena::Anonymous => ArenaChoice::Anonymous,
        },
        segment_bytes: config.segment_bytes,
        listen: config.listen,
        direct_port_base: config.direct_port_base,
        ports: vec![
            ("--http", config.http),
            ("--master-listen", config.master_listen),
            ("--master-http", config.master_http),
        ],
    }
}

/// What the profile says about the disk.
fn judge(report: &ProfileReport) -> Vec<Check> {
    let check = |name, good: bool, found: String, fix: &str| Check {
        name,
        outcome: if good { Outcome::Ok } else { Outcome::Warning },
        found,
        fix: (!good).then(|| fix.to_owned()),
    };
    let best = report.writes.iter().map(|cell| cell.mb_per_s).fold(0.0, f64::max);
    let large = report.writes.iter().filter(|cell| cell.write_bytes == 1 << 20 && cell.depth == 4);
    let large = large.map(|cell| cell.mb_per_s).fold(0.0, f64::max);
    let sync = |bytes: usize, blocks: &str| {
        let cell = report.syncs.iter().find(|cell| cell.write_bytes == bytes && cell.blocks == blocks);
        cell.map_or(0.0, |cell| cell.p50_us)
    };
    let small = sync(4096, "written");
    let sync_found = format!(
        "write and sync p50: 4 KiB {small:.0} us, 64 KiB {:.0} us, 1 MiB {:.0} us; 4 KiB on fallocated blocks {:.0} us",
        sync(64 << 10, "written"),
        sync(1 << 20, "written"),
        sync(4096, "fallocated")
    );
    let sync_fix = if small < SYNC_QUICK_US {
        "no volatile cache is flushed so quickly: make sure that the device, or the hypervisor's cache mode, really writes"
    } else {
        "synced acks wait for this: use a device with power-loss protection, or level `flushed` or `memory`"
    };
    let (alone, beside) = (report.write_alone_p99_us, report.write_beside_reader_p99_us);
    let many = report.one_stream_mb_per_s / report.hundred_streams_mb_per_s.max(0.001);
    vec![
        check(
            "disk_writes",
            large >= 0.5 * best,
            format!("{large:.0} MB/s with 1 MiB writes, 4 at once; best {best:.0} MB/s"),
            "the broker writes 1 MiB, 4 at once, which is not what this device likes best: see the table",
        ),
        check("disk_sync", (SYNC_QUICK_US..=SYNC_SLOW_US).contains(&small), sync_found, sync_fix),
        check(
            "disk_streams",
            true,
            format!(
                "100 files instead of one cost a factor of {many:.1} ({:.0} and {:.0} MB/s): Ringmain writes one for each \
                 shard",
                report.one_stream_mb_per_s, report.hundred_streams_mb_per_s
            ),
            "",
        ),
        check(
            "disk_interference",
            beside <= alone.max(1.0) * INTERFERENCE_MAX,
            format!("write p99 {alone:.0} us, {beside:.0} us beside a reader of {:.0} MB/s", report.reader_mb_per_s),
            "consumers that catch up will slow producers down: scheduler `none` or `mq-deadline`, or a faster device",
        ),
    ]
}

fn as_json(starts: bool, checks: &[Check], report: Option<&ProfileReport>) -> Value {
    let checks: Vec<Value> = checks
        .iter()
        .map(|check| {
            json!({ "name": check.name, "outcome": check.outcome.name(), "found": check.found, "fix": check.fix })
        })
        .collect();
    json!({ "starts": starts, "checks": checks, "disk_profile": report })
}

fn as_text(starts: bool, checks: &[Check], report: Option<&ProfileReport>) -> String {
    let mut text = String::new();
    for check in checks {
        text.push_str(&format!("{:<8} {:<18} {}\n", check.outcome.name(), check.name, check.found));
        if let Some(fix) = &check.fix {
            text.push_str(&format!("{:<8} {:<18} -> {fix}\n", "", ""));
        }
    }
    if let Some(report) = report {
        let kib = |bytes: usize| format!("{} KiB", bytes / 1024);
        let rows: Vec<Vec<String>> = report
            .writes
            .iter()
            .map(|cell| {
                let (mb, p50, p99) = (cell.mb_per_s, cell.p50_us, cell.p99_us);
                vec![
                    kib(cell.write_bytes),
                    cell.depth.to_string(),
                    format!("{mb:.1}"),
                    format!("{p50:.0}"),
                    format!("{p99:.0}"),
                ]
            })
            .collect();
        text.push_str(&format!("\n{}", table(&["WRITE", "AT ONCE", "MB/s", "P50 us", "P99 us"], &rows)));
        let rows: Vec<Vec<String>> = report
            .syncs
            .iter()
            .map(|cell| {
                let (p50, p99) = (cell.p50_us, cell.p99_us);
                vec![kib(cell.write_bytes), cell.blocks.to_owned(), format!("{p50:.0}"), format!("{p99:.0}")]
            })
            .collect();
        text.push_str(&format!("\n{}", table(&["WRITE + SYNC", "BLOCKS", "P50 us", "P99 us"], &rows)));
    }
    let problems = checks.iter().filter(|check| check.outcome == Outcome::Problem).count();
    let warnings = checks.iter().filter(|check| check.outcome == Outcome::Warning).count();
    let verdict = if starts { "a broker starts here" } else { "no broker starts here" };
    text.push_str(&format!("\n{verdict}: {problems} problems, {warnings} warnings\n"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringmain_bench::disk::{SyncCell, WriteCell};

    fn report(sync_us: f64, beside: f64) -> ProfileReport {
        let cell = |write_bytes, depth, mb_per_s| WriteCell { write_bytes, depth, mb_per_s, p50_us: 1.0, p99_us: 2.0 };
        let sync = SyncCell { write_bytes: 4096, blocks: "written", p50_us: sync_us, p99_us: 2.0 * sync_us };
        ProfileReport {
            writes: vec![cell(4096, 1, 40.0), cell(1 << 20, 4, 900.0), cell(1 << 20, 16, 1000.0)],
            syncs: vec![sync],
            one_stream_mb_per_s: 500.0,
            hundred_streams_mb_per_s: 50.0,
            write_alone_p99_us: 300.0,
            write_beside_reader_p99_us: beside,
            ..ProfileReport::default()
        }
    }

    #[test]
    fn a_good_disk_passes_and_slow_lying_and_disturbed_ones_are_warnings() {
        assert!(judge(&report(200.0, 900.0)).iter().all(|check| check.outcome == Outcome::Ok));
        for (report, name, word) in [
            (report(9000.0, 900.0), "disk_sync", "power-loss"),
            (report(5.0, 900.0), "disk_sync", "really writes"),
            (report(200.0, 9000.0), "disk_interference", "mq-deadline"),
        ] {
            let checks = judge(&report);
            let warnings: Vec<&Check> = checks.iter().filter(|check| check.outcome == Outcome::Warning).collect();
            assert_eq!(warnings.len(), 1, "{warnings:?}");
            assert_eq!(warnings[0].name, name);
            assert!(warnings[0].fix.as_ref().unwrap().contains(word), "{warnings:?}");
        }
        let streams = &judge(&report(200.0, 900.0))[2];
        assert!(streams.found.contains("factor of 10.0"), "{streams:?}");
    }
}
