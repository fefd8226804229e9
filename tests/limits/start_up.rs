//! Starts that can't be: each ends with exit code 1 and one line that says what to do.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringmain_core::ids::Durability;

use crate::mount::Mount;
use crate::support::*;

/// Runs a start that must fail; gives its one line.
fn refusal(command: &mut Command) -> String {
    let began = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > Duration::from_secs(40) {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("it has started: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{status}: {stderr}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(!stderr.contains("panicked"), "{stderr}");
    let lines: Vec<_> = stderr.lines().filter(|line| line.starts_with("ringmain: ")).collect();
    assert_eq!(lines.len(), 1, "{stderr}");
    assert!(stderr.trim_end().ends_with(lines[0]), "the reason is not the last line: {stderr}");
    lines[0].to_owned()
}

fn assert_says(line: &str, words: &[&str]) {
    for word in words {
        assert!(line.contains(word), "`{word}` is not in: {line}");
    }
}

#[test]
fn a_second_process_on_the_same_data_directory_is_refused_and_the_first_goes_on() {
    let place = Place::new();
    let broker = place.start(1, "32MiB");
    let healthy = Healthy::start(&broker);
    let line = refusal(&mut place.serve(1, "32MiB"));
    assert_says(&line, &["in use", &place.data().display().to_string()]);
    healthy.finish(Duration::from_secs(15));
    broker.stop();
}

#[test]
fn a_second_process_on_the_same_port_is_refused_and_the_first_goes_on() {
    let (place, other) = (Place::new(), Place::new());
    let broker = place.start(2, "64MiB");
    let healthy = Healthy::start(&broker);
    for (flag, address) in
        [("--listen", broker.address), ("--http", broker.http), ("--master-http", broker.master_http)]
    {
        let mut command = Command::new(BINARY);
        command.arg("serve").arg("--data").arg(other.data()).arg("--arena-dir").arg(other.arena.path());
        for port in ["--listen", "--http", "--master-listen", "--master-http"] {
            let address = if port == flag { address.to_string() } else { "127.0.0.1:0".to_owned() };
            command.args([port, &address]);
        }
        command.args(["--direct-port-base", "0", "--shards", "1", "--memory", "32MiB"]);
        assert_says(&refusal(&mut command), &["in use", &address.to_string()]);
    }
    healthy.finish(Duration::from_secs(15));
    broker.stop();
    // Nothing that was refused is in the way of a start.
    other.start(1, "32MiB").stop();
}

#[test]
fn directories_of_the_wrong_kind_are_refused() {
    let place = Place::new();
    let in_memory = place.arena.path().join("data");
    let line = refusal(serve_at(&in_memory, place.arena.path()).args(["--shards", "1", "--memory", "32MiB"]));
    assert_says(&line, &["in memory", "ext4"]);

    let line = refusal(serve_at(&place.data(), place.dir.path()).args(["--shards", "1", "--memory", "32MiB"]));
    assert_says(&line, &["not in memory", "/dev/shm", "--arena anonymous"]);

    let missing = place.dir.path().join("no-such-arena");
    let line = refusal(serve_at(&place.data(), &missing).args(["--shards", "1", "--memory", "32MiB"]));
    assert_says(&line, &["no-such-arena"]);

    let file = place.dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let line = refusal(serve_at(&file, place.arena.path()).args(["--shards", "1", "--memory", "32MiB"]));
    assert_says(&line, &[&file.display().to_string()]);
    // None of this has left anything that is in the way.
    place.start(1, "32MiB").stop();
}

#[test]
fn too_little_shared_memory_is_told_with_how_to_get_more() {
    let place = Place::new();
    let Some(small) = Mount::tmpfs("16m") else { return };
    let line = refusal(serve_at(&place.data(), small.path()).args(["--shards", "1", "--memory", "64MiB"]));
    assert_says(&line, &["free", "--memory", "remount,size=", "--arena anonymous"]);
    // As told: without the shared arena it goes.
    let mut command = Command::new(BINARY);
    command.arg("serve").arg("--data").arg(place.data()).args(["--arena", "anonymous"]);
    for port in ["--listen", "--http", "--master-listen", "--master-http"] {
        command.args([port, "127.0.0.1:0"]);
    }
    command.args(["--direct-port-base", "0", "--shards", "1", "--memory", "64MiB"]);
    let broker = Broker::start(&mut command, place.dir.path());
    let (_, ready) = http(broker.http, "GET", "/readyz", None);
    assert!(ready.contains("\"survives_process_kill\":false"), "{ready}");
    broker.stop();
}

#[test]
fn settings_that_can_not_be_are_named() {
    let place = Place::new();
    let line = refusal(place.serve(2, "32MiB").args(["--log", "warn"]));
    assert_says(&line, &["memory", "64MiB"]);
    let file = place.dir.path().join("ringmain.toml");
    for (text, words) in [
        ("memroy = 1\n", vec!["memroy", "unknown key", "memory"]),
        ("[broker]\nlisten = \"a:1\"\n", vec!["broker", "unknown key"]),
        ("shards = 0\n", vec!["shards"]),
        ("shards = \"two\"\n", vec!["shards", "number"]),
        ("memory = \"1GB\"\n", vec!["memory", "size"]),
        ("segment_bytes = \"1MiB\"\n", vec!["segment_bytes", "32MiB"]),
        ("segment_bytes = 33554433\n", vec!["segment_bytes", "4096"]),
        ("listen = \"nowhere\"\n", vec!["listen", "HOST:PORT"]),
        ("log = \"loud,,=\"\n", vec!["log"]),
        ("listen = \n", vec!["line 1"]),
    ] {
        fs::write(&file, text).unwrap();
        let mut command = Command::new(BINARY);
        command.arg("serve").arg("--config").arg(&file).arg("--data").arg(place.data());
        assert_says(&refusal(&mut command), &words);
    }
    let mut command = Command::new(BINARY);
    command.args(["serve", "--config", "/no/such/file.toml"]);
    assert_says(&refusal(&mut command), &["/no/such/file.toml"]);
    assert!(!place.data().exists(), "a refused start has made a data directory");
}

/// A data directory with two topics, stopped clean.
fn used() -> Place {
    let place = Place::new();
    let broker = place.start(1, "32MiB");
    for topic in ["first", "second", "third"] {
        broker.topic(topic, 3);
    }
    broker.stop();
    place
}

fn change(path: &Path, at: usize, change: impl FnOnce(u8) -> u8) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] = change(bytes[at]);
    fs::write(path, bytes).unwrap();
}

#[test]
fn damaged_files_of_the_data_directory_are_named_and_left_alone() {
    let place = used();
    let data = place.data();
    for (name, at, words) in [
        ("identity", 20, vec!["identity", "backup"]),
        ("identity", 0, vec!["identity"]),
        ("catalog.log", 24, vec!["catalog.log", "damaged", "backup"]),
        ("catalog.log", 0, vec!["catalog.log"]),
    ] {
        let path = data.join(name);
        change(&path, at, |byte| byte ^ 0x55);
        let damaged = fs::read(&path).unwrap();
        assert_says(&refusal(&mut place.serve(1, "32MiB")), &words);
        assert_eq!(fs::read(&path).unwrap(), damaged, "{name} was changed by a refused start");
        change(&path, at, |byte| byte ^ 0x55);
    }
    let identity = fs::read(data.join("identity")).unwrap();
    fs::write(data.join("identity"), &identity[..identity.len() / 2]).unwrap();
    assert_says(&refusal(&mut place.serve(1, "32MiB")), &["identity", "backup"]);
    fs::remove_file(data.join("identity")).unwrap();
    assert_says(&refusal(&mut place.serve(1, "32MiB")), &["identity", "backup"]);
    fs::write(data.join("identity"), &identity).unwrap();
    let catalog = fs::read(data.join("catalog.log")).unwrap();
    fs::remove_file(data.join("catalog.log")).unwrap();
    assert_says(&refusal(&mut place.serve(1, "32MiB")), &["catalog.log", "missing", "backup"]);
    fs::write(data.join("catalog.log"), &catalog).unwrap();
    let store = data.join("master/ringmain.redb");
    let whole = fs::read(&store).unwrap();
    fs::write(&store, b"no database").unwrap();
    assert_says(&refusal(&mut place.serve(1, "32MiB")), &["ringmain.redb"]);
    fs::write(&store, &whole).unwrap();
    let broker = place.start(1, "32MiB");
    assert_eq!(broker.client().metadata(&[]).topics.len(), 3);
    broker.stop();
}

#[test]
fn a_data_directory_of_a_newer_version_is_refused() {
    let place = used();
    let path = place.data().join("identity");
    let mut bytes = fs::read(&path).unwrap();
    bytes[4] = 99;
    // Its CRC is right: it is not damaged, only newer.
    let crc_at = bytes.len() - 4;
    let crc = ringmain_core::crc::crc32c(&bytes[..crc_at]);
    bytes[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
    fs::write(&path, &bytes).unwrap();
    assert_says(&refusal(&mut place.serve(1, "32MiB")), &["identity", "version 99", "use the Ringmain that wrote it"]);
}

/// As another user, without rights of its own; none when this is not root or the tools are not there.
fn as_nobody(place: &Place) -> Option<(Command, std::path::PathBuf)> {
    let can = Command::new("setpriv").args(["--reuid=65534", "--regid=65534", "--clear-groups", "true"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: needs root and setpriv");
        return None;
    }
    let can = Command::new("prlimit").args(["--memlock=unlimited", "true"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!(
            "skipped: this root may not raise the limit of locked memory, which another user needs to get that far"
        );
        return None;
    }
    // Where the other user can reach it.
    let binary = place.dir.path().join("ringmain");
    fs::copy(BINARY, &binary).unwrap();
    for path in [place.dir.path(), place.arena.path(), &binary] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        chown(path, Some(65534), Some(65534)).unwrap();
    }
    let mut command = Command::new("prlimit");
    command.args(["--memlock=unlimited", "setpriv"]);
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--ambient-caps=-all"]);
    Some((command, binary))
}

fn serve_args(command: &mut Command, place: &Place) {
    let args: Vec<_> = place.serve(1, "32MiB").get_args().map(ToOwned::to_owned).collect();
    command.args(args);
}

#[test]
fn too_low_a_limit_of_locked_memory_is_told_with_how_to_raise_it() {
    let place = Place::new();
    let Some((mut command, binary)) = as_nobody(&place) else { return };
    command.arg("prlimit").arg("--memlock=65536:65536").arg(binary);
    serve_args(&mut command, &place);
    assert_says(&refusal(&mut command), &["locked", "ulimit -l", "LimitMEMLOCK"]);
}

#[test]
fn a_data_directory_of_another_user_is_told() {
    let place = used();
    let Some((mut command, binary)) = as_nobody(&place) else { return };
    command.arg(binary);
    serve_args(&mut command, &place);
    let line = refusal(&mut command);
    assert_says(&line, &[&place.data().display().to_string(), "ermission denied"]);
}

#[test]
fn too_few_open_files_are_told_with_how_to_raise_the_limit() {
    let place = Place::new();
    let mut command = Command::new("prlimit");
    command.arg("--nofile=64:64").arg(BINARY);
    serve_args(&mut command, &place);
    assert_says(&refusal(&mut command), &["files may be open", "ulimit -n", "LimitNOFILE"]);
}

#[test]
fn a_start_that_would_leave_acked_memory_behind_is_refused() {
    let place = Place::new();
    let broker = place.start(1, "32MiB");
    let topic = broker.topic("kept", 1);
    let outcome = broker.client().produce(Durability::Memory, &batch(topic.topic_id, 0, &[b"acked"])).remove(0);
    assert!(outcome.code.is_ok(), "{outcome:?}");
    broker.kill();
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    for flags in [["--arena", "anonymous"], ["--arena-dir", other.path().to_str().unwrap()]] {
        let mut command = serve_at(&place.data(), other.path());
        let typed: Vec<_> = command.get_args().map(std::ffi::OsStr::to_owned).collect();
        command = Command::new(command.get_program());
        // Without the directory that the support names.
        let at = typed.iter().position(|word| word == "--arena-dir").unwrap();
        command.args(&typed[..at]).args(&typed[at + 2..]).args(flags).args(["--shards", "1", "--memory", "32MiB"]);
        assert_says(&refusal(&mut command), &["--arena-dir", &place.arena.path().display().to_string()]);
    }
    let broker = place.start(1, "32MiB");
    let (_, payload) = broker.client().fetch(fetch_request(topic.topic_id, 0, 0, 0));
    assert_eq!(records(&payload), [(0, b"acked".to_vec())]);
    broker.stop();
}
