//! `ringmain doctor`: what it checks, and that it names what a start would be refused for, with the fix.

#![allow(clippy::unwrap_used)]

mod support;

use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use support::broker::{Home, RINGMAIN};
use support::mount::Mount;

/// Checks that are always made.
const CHECKS: [&str; 18] = [
    "kernel",
    "io_uring",
    "clock_source",
    "data_dir",
    "memlock",
    "nofile",
    "cpus",
    "cpu_quota",
    "direct_io",
    "filesystem",
    "free_space",
    "block_size",
    "write_cache",
    "scheduler",
    "memory",
    "arena",
    "cgroup_memory",
    "ports",
];

/// `doctor --quick --json` with ports of its own, in front of what `command` may put before it.
fn quick(command: &mut Command, data: &Path, arena: &Path, more: &[&str]) -> (Option<i32>, Value) {
    command.args(["doctor", "--quick", "--json", "--data", data.to_str().unwrap(), "--shards", "1"]);
    command.args(["--arena-dir", arena.to_str().unwrap(), "--direct-port-base", "0"]);
    for port in ["--listen", "--http", "--master-listen", "--master-http"] {
        if !more.contains(&port) {
            command.args([port, "127.0.0.1:0"]);
        }
    }
    if !more.contains(&"--memory") {
        command.args(["--memory", "32MiB"]);
    }
    let output = command.args(more).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    let report = serde_json::from_str(&stdout);
    let report = report.unwrap_or_else(|_| panic!("`{stdout}`: {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code(), report)
}

fn doctor(data: &Path, arena: &Path, more: &[&str]) -> (Option<i32>, Value) {
    quick(&mut Command::new(RINGMAIN), data, arena, more)
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let found = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == name);
    found.unwrap_or_else(|| panic!("no {name}: {report}"))
}

/// The report says that no broker starts, because of this check alone, with these words of found and fix.
#[track_caller]
fn assert_problem((code, report): &(Option<i32>, Value), name: &str, words: &[&str]) {
    let check = check(report, name);
    assert_eq!(check["outcome"], "problem", "{check}");
    for word in words {
        let told = format!("{} {}", check["found"].as_str().unwrap(), check["fix"].as_str().unwrap());
        assert!(told.contains(word), "`{word}` is not in: {told}");
    }
    assert_eq!(*code, Some(1));
    assert_eq!(report["starts"], false);
}

#[test]
fn a_host_that_can_start_a_broker_is_told_so_with_every_check() {
    let home = Home::default();
    let (code, report) = doctor(&home.data(), home.arena(), &[]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(report["starts"], true);
    for name in CHECKS {
        let check = check(&report, name);
        assert!(["ok", "warning"].contains(&check["outcome"].as_str().unwrap()), "{check}");
        assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
        assert_eq!(check["fix"].is_null(), check["outcome"] == "ok", "{check}");
    }
    assert!(report["disk_profile"].is_null());
    assert!(!home.data().exists(), "doctor has made a data directory");
}

#[test]
fn the_table_says_what_to_do_in_the_line_below() {
    let home = Home::default();
    home.start().stop();
    let mut command = Command::new(RINGMAIN);
    // Too little for the two shards that the directory has.
    let output = command.args(["doctor", "--quick", "--memory", "32MiB", "--data"]).arg(home.data()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("problem  memory") && text.contains("-> give at least --memory 64MiB"), "{text}");
    assert!(text.trim_end().lines().last().unwrap().starts_with("no broker starts here: "), "{text}");
}

#[test]
fn what_a_start_would_be_refused_for_is_a_problem_with_its_fix() {
    let home = Home::default();
    let (data, arena) = (home.data(), home.arena());
    // In memory, not a directory, and an arena on a disk.
    let in_memory = arena.join("data");
    assert_problem(&doctor(&in_memory, arena, &[]), "direct_io", &["in memory", "ext4"]);
    let file = data.with_file_name("file");
    std::fs::write(&file, "x").unwrap();
    let report = doctor(&file, arena, &[]);
    assert_eq!(report.0, Some(1), "{}", report.1);
    assert_eq!(check(&report.1, "data_dir")["outcome"], "problem");
    assert_problem(&doctor(&data, data.parent().unwrap(), &[]), "arena", &["not in memory", "/dev/shm"]);
    // Ports.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flag in ["--listen", "--http", "--master-http"] {
        assert_problem(&doctor(&data, arena, &[flag, &address]), "ports", &[flag, "in use", "ss -ltnp"]);
    }
    // Settings that can't be are told as `serve` tells them.
    let output = Command::new(RINGMAIN).args(["doctor", "--memory", "64MB"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let output = Command::new(RINGMAIN).args(["doctor", "--shards", "1", "--memory", "16MiB"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("memory"));
}

#[test]
fn too_little_shared_memory_is_named_with_how_to_get_more() {
    let home = Home::default();
    let Some(small) = Mount::tmpfs("16m") else { return };
    let report = doctor(&home.data(), small.path(), &["--memory", "64MiB"]);
    assert_problem(&report, "arena", &["free", "remount,size=", "--memory"]);
}

#[test]
fn a_low_limit_of_open_files_is_named_with_how_to_raise_it() {
    let home = Home::default();
    let mut command = Command::new("prlimit");
    let report = quick(command.arg("--nofile=64:64").arg(RINGMAIN), &home.data(), home.arena(), &[]);
    assert_problem(&report, "nofile", &["files may be open", "ulimit -n", "LimitNOFILE"]);
}

#[test]
fn a_low_limit_of_locked_memory_is_named_with_how_to_raise_it() {
    let home = Home::default();
    let can = Command::new("setpriv").args(["--reuid=65534", "--regid=65534", "--clear-groups", "true"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: needs root and setpriv");
        return;
    }
    // Where the other user can reach it.
    let folder = home.data().parent().unwrap().to_owned();
    let binary = folder.join("ringmain");
    std::fs::copy(RINGMAIN, &binary).unwrap();
    for path in [&folder, &binary, &home.arena().to_owned()] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        chown(path, Some(65534), Some(65534)).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--ambient-caps=-all"]);
    command.args(["prlimit", "--memlock=65536:65536"]).arg(&binary);
    let report = quick(&mut command, &home.data(), home.arena(), &[]);
    assert_problem(&report, "memlock", &["locked", "ulimit -l", "LimitMEMLOCK"]);
}

#[test]
fn a_broker_that_runs_is_no_fault_of_the_host() {
    let home = Home::new(&["--shards", "1", "--memory", "32MiB"]);
    let broker = home.start();
    let (code, report) = doctor(&home.data(), home.arena(), &["--listen", &broker.broker]);
    assert_eq!(code, Some(0), "{report}");
    let data_dir = check(&report, "data_dir");
    assert_eq!(data_dir["outcome"], "warning");
    assert!(data_dir["found"].as_str().unwrap().contains("in use by process"), "{data_dir}");
    broker.stop();
    let (_, report) = doctor(&home.data(), home.arena(), &[]);
    assert_eq!(check(&report, "data_dir")["outcome"], "ok");
}

/// On the disk that the build is on: the folder for temporary files may be in memory.
#[test]
fn the_disk_profile_has_each_of_its_parts() {
    let build = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let folder = tempfile::tempdir_in(build).unwrap();
    let mut command = Command::new(RINGMAIN);
    command.args(["doctor", "--json", "--arena", "anonymous", "--shards", "1", "--memory", "32MiB"]);
    command.args(["--direct-port-base", "0", "--data"]).arg(folder.path());
    for port in ["--listen", "--http", "--master-listen", "--master-http"] {
        command.args([port, "127.0.0.1:0"]);
    }
    let output = command.output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let profile = &report["disk_profile"];
    assert_eq!(profile["writes"].as_array().unwrap().len(), 12, "{report}");
    assert_eq!(profile["syncs"].as_array().unwrap().len(), 6);
    for figure in
        ["one_stream_mb_per_s", "hundred_streams_mb_per_s", "write_alone_p99_us", "write_beside_reader_p99_us"]
    {
        assert!(profile[figure].as_f64().unwrap() > 0.0, "{figure}: {profile}");
    }
    for name in ["disk_writes", "disk_sync", "disk_streams", "disk_interference"] {
        check(&report, name);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
