//! `ringmain topic`, `produce` and `consume` against a real broker: what goes in comes out.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Output, Stdio};

use ringmain_wire::tag::partition_of_key;
use serde_json::{Value, json};
use support::broker::{Broker, Home, lines_of};
use support::random::Random;
use support::{LIMIT, wait_for};

/// Lines as texts have them: empty, short, long, with CRLF, with bytes that are no UTF-8.
fn corpus(bytes: usize) -> Vec<u8> {
    let mut random = Random(11);
    let mut corpus = Vec::with_capacity(bytes);
    while corpus.len() < bytes {
        let size = match random.within(0..100) {
            0..10 => 0,
            10..98 => random.within(1..160),
            _ => random.within(1000..300_000),
        };
        let mut line = random.bytes(size as usize);
        line.iter_mut().for_each(|byte| *byte = if *byte == b'\n' { b' ' } else { *byte });
        if !random.one_in(20) {
            line.iter_mut().for_each(|byte| *byte = b' ' + *byte % 90);
        }
        corpus.extend_from_slice(&line);
        corpus.extend_from_slice(if random.one_in(10) { b"\r\n" } else { b"\n" });
    }
    corpus
}

fn sorted_lines(bytes: &[u8]) -> Vec<&[u8]> {
    let mut lines: Vec<_> = bytes.split(|byte| *byte == b'\n').collect();
    lines.sort_unstable();
    lines
}

/// Produces from standard input.
fn produce(broker: &Broker, args: &[&str], input: &[u8]) -> Output {
    let mut command = broker.command(&[&["produce"], args].concat());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::thread::scope(|scope| {
        // A command that ends early closes the pipe.
        scope.spawn(move || drop(stdin.write_all(input)));
        child.wait_with_output().unwrap()
    })
}

fn produce_ok(broker: &Broker, args: &[&str], input: &[u8]) -> Value {
    let output = produce(broker, &[args, &["--json"]].concat(), input);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn json_lines(bytes: &[u8]) -> Vec<Value> {
    bytes
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_slice(line).unwrap())
        .collect()
}

fn write_file(dir: &Path, bytes: &[u8]) -> String {
    let path = dir.join("corpus");
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_corpus_through_one_partition_is_byte_equal_also_after_a_kill_and_a_stop() {
    let home = Home::default();
    let broker = home.start();
    let corpus = corpus(6 << 20);
    let dir = tempfile::tempdir().unwrap();
    let file = write_file(dir.path(), &corpus);
    broker.ok(&["topic", "create", "text"]);
    let summary: Value = serde_json::from_slice(&broker.ok(&["produce", "text", &file, "--json"])).unwrap();
    let lines = corpus.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!((&summary["records"], &summary["records_acked"]), (&lines.into(), &lines.into()));
    assert_eq!(summary["payload_bytes"], corpus.len() - lines);
    assert_eq!(summary["level"], "memory");
    assert!(broker.ok(&["consume", "text"]) == corpus, "from memory");
    broker.kill();
    let broker = home.start();
    assert!(broker.ok(&["consume", "text"]) == corpus, "after a kill");
    broker.stop();
    let broker = home.start();
    assert!(broker.ok(&["consume", "text"]) == corpus, "from disk");
}

#[test]
fn a_corpus_larger_than_memory_comes_back_from_disk() {
    let home = Home::default();
    let broker = home.start();
    let corpus = corpus(100 << 20);
    broker.ok(&["topic", "create", "text"]);
    let dir = tempfile::tempdir().unwrap();
    let file = write_file(dir.path(), &corpus);
    broker.ok(&["produce", "text", &file]);
    assert!(broker.ok(&["consume", "text"]) == corpus);
}

#[test]
fn a_corpus_through_16_partitions_is_complete() {
    let home = Home::default();
    let broker = home.start();
    let corpus = corpus(4 << 20);
    broker.ok(&["topic", "create", "text", "--partitions", "16"]);
    produce_ok(&broker, &["text", "--batch-bytes", "16KiB"], &corpus);
    let read = broker.ok(&["consume", "text"]);
    assert!(sorted_lines(&read) == sorted_lines(&corpus));
    // One after the other they give the same, and each partition has got its share.
    let parts: Vec<_> =
        (0..16).map(|partition| broker.ok(&["consume", "text", "--partition", &partition.to_string()])).collect();
    assert!(parts.iter().all(|part| !part.is_empty()));
    assert!(sorted_lines(&parts.concat()) == sorted_lines(&corpus));
}

#[test]
fn lines_of_every_kind_come_back_as_they_were() {
    let home = Home::default();
    let broker = home.start();
    let longest = vec![b'x'; 1024 * 1024 - 64];
    let all_bytes: Vec<u8> = (0..=255).filter(|byte| *byte != b'\n').collect();
    let cases: [(&str, Vec<u8>); 6] = [
        ("empty_lines", b"\n\n\na\n\n".to_vec()),
        ("crlf", b"a\r\nb\r\n\r\n".to_vec()),
        ("bytes", [all_bytes.as_slice(), b"\n\0\n\xff\xfe\n"].concat()),
        ("long", [longest.as_slice(), b"\n", &longest, b"\nshort\n"].concat()),
        ("one", b"x\n".to_vec()),
        ("nothing", Vec::new()),
    ];
    for (name, input) in &cases {
        broker.ok(&["topic", "create", name]);
        produce_ok(&broker, &[name], input);
        assert!(broker.ok(&["consume", name]) == *input, "{name}");
    }
    // The last line need not end.
    produce_ok(&broker, &["one"], b"y\nz");
    assert_eq!(broker.ok(&["consume", "one"]), b"x\ny\nz\n");
    let too_long = vec![b'x'; 1024 * 1024 + 1];
    let output = produce(&broker, &["one"], &too_long);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("line 1 has more than 1048576 bytes"));
    assert_eq!(broker.ok(&["consume", "one"]), b"x\ny\nz\n");
}

#[test]
fn keys_decide_the_partition_and_come_back() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "keyed", "--partitions", "5"]);
    let input: String = (0..500).map(|number| format!("key{}::value {number}\n", number % 37)).collect();
    produce_ok(&broker, &["keyed", "--key-separator", "::"], (input + "no key\n").as_bytes());
    let records = json_lines(&broker.ok(&["consume", "keyed", "--format", "json"]));
    assert_eq!(records.len(), 501);
    let mut by_key: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for record in &records {
        let Some(key) = record["key"].as_str() else {
            assert_eq!(record["value"], "no key");
            continue;
        };
        assert_eq!(record["partition"], partition_of_key(key.as_bytes(), 5));
        let number = record["value"].as_str().unwrap().strip_prefix("value ").unwrap().parse().unwrap();
        by_key.entry(key).or_default().push(number);
    }
    for (key, numbers) in by_key {
        let first = key.strip_prefix("key").unwrap().parse::<u64>().unwrap();
        assert_eq!(numbers, (first..500).step_by(37).collect::<Vec<_>>(), "{key}");
    }
}

#[test]
fn reading_starts_where_it_is_told() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--partitions", "2"]);
    let input: String = (0..1000).map(|number| format!("{number}\n")).collect();
    produce_ok(&broker, &["t", "--partition", "1"], input.as_bytes());
    let read =
        |args: &[&str]| String::from_utf8(broker.ok(&[&["consume", "t", "--partition", "1"], args].concat())).unwrap();
    assert_eq!(read(&["--from", "997"]), "997\n998\n999\n");
    assert_eq!(read(&["--from", "0", "--count", "2"]), "0\n1\n");
    assert_eq!(read(&["--from", "500", "--count", "1"]), "500\n");
    assert_eq!(read(&["--from", "1000"]), "");
    assert_eq!(read(&["--from", "latest"]), "");
    assert_eq!(read(&["--count", "0"]), "");
    assert_eq!(broker.ok(&["consume", "t", "--partition", "0"]), b"");
    assert_eq!(broker.ok(&["consume", "t", "--count", "1000"]), input.as_bytes());
    let error = broker.fails(&["consume", "t", "--partition", "1", "--from", "1001"]);
    assert!(error.contains("log ends at 1000"), "{error}");
    assert!(broker.fails(&["consume", "t", "--partition", "2"]).contains("no partition 2"));
    assert!(broker.fails(&["consume", "other"]).contains("other"));
    let first = &json_lines(&broker.ok(&["consume", "t", "--json", "--from", "999", "--partition", "1"]))[0];
    let time = first["timestamp_ms"].as_i64().unwrap();
    assert!(time > 1_600_000_000_000);
    let expected =
        json!({ "topic": "t", "partition": 1, "offset": 999, "timestamp_ms": time, "key": null, "value": "999" });
    assert_eq!(*first, expected);
}

#[test]
fn following_gives_what_comes_later_and_ends_with_the_count() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--partitions", "3"]);
    produce_ok(&broker, &["t", "--partition", "0"], b"before\n");
    let mut command = broker.command(&["consume", "t", "--follow", "--count", "4"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let out = lines_of(child.stdout.take().unwrap());
    let next = || out.recv_timeout(LIMIT).unwrap();
    assert_eq!(next(), "before");
    for (partition, line) in [("1", "one"), ("2", "two"), ("0", "three")] {
        produce_ok(&broker, &["t", "--partition", partition], line.as_bytes());
        assert_eq!(next(), line);
    }
    assert!(wait_for("the end of consume", || child.try_wait().unwrap()).success());
}

#[test]
fn a_level_is_reached_before_produce_ends() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "t", "--durability", "flushed"]);
    for (args, level) in [(vec!["t"], "flushed"), (vec!["t", "--durability", "synced"], "synced")] {
        assert_eq!(produce_ok(&broker, &args, b"a\nb\n")["level"], level);
        let topic: Value = serde_json::from_slice(&broker.ok(&["topic", "describe", "t", "--json"])).unwrap();
        let ends = &topic["partitions"][0];
        assert_eq!(ends["log_end"], ends[format!("{level}_end")], "{topic}");
    }
}

#[test]
fn topics_are_made_listed_described_and_deleted_and_wrong_use_is_told() {
    let home = Home::default();
    let broker = home.start();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let made: Value = serde_json::from_slice(&broker.ok(&[
        "topic",
        "create",
        "a.b-c_1",
        "--partitions",
        "7",
        "--stores",
        "2",
        "--durability-floor",
        "flushed",
        "--json",
    ]))
    .unwrap();
    assert_eq!(
        (&made["partitions"], &made["stores"], &made["durability_floor"]),
        (&7.into(), &2.into(), &"flushed".into())
    );
    assert!(broker.fails(&["topic", "create", "a.b-c_1"]).to_lowercase().contains("exists"));
    for (name, flags) in [
        ("1a", &[][..]),
        ("a b", &[]),
        ("", &[]),
        ("t", &["--partitions", "0"]),
        ("t", &["--partitions", "10001"]),
        ("t", &["--stores", "2000"]),
    ] {
        let error = broker.fails(&[&["topic", "create", name], flags].concat());
        assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    }
    assert!(text(broker.ok(&["topic", "list"])).contains("a.b-c_1"));
    let described = text(broker.ok(&["topic", "describe", "a.b-c_1"]));
    assert!(described.contains("a power cut now would take nothing"), "{described}");
    assert!(broker.fails(&["topic", "describe", "none"]).contains("none"));
    assert!(broker.fails(&["topic", "delete", "none"]).contains("none"));
    assert_eq!(produce(&broker, &["none", "--retry-seconds", "1"], b"x\n").status.code(), Some(1));

    produce_ok(&broker, &["a.b-c_1"], b"x\n");
    broker.ok(&["topic", "delete", "a.b-c_1"]);
    assert!(broker.fails(&["consume", "a.b-c_1", "--retry-seconds", "1"]).contains("a.b-c_1"));
    broker.ok(&["topic", "create", "a.b-c_1"]);
    assert_eq!(broker.ok(&["consume", "a.b-c_1"]), b"");
}

#[test]
fn produce_and_consume_ride_over_restarts_of_the_broker() {
    let home = Home::default();
    // The port must stay for clients that are to find the broker again, and must not be one that a socket of another test
    // may get meanwhile: below the ephemeral ones.
    let mut random = Random(u64::from(std::process::id()));
    let address = wait_for("a free port", || {
        let address = format!("127.0.0.1:{}", random.within(10_000..30_000));
        std::net::TcpListener::bind(&address).ok().map(|_| address)
    });
    let restart = || home.start_with(&["--listen", &address]);
    let mut broker = restart();
    broker.ok(&["topic", "create", "t"]);
    let mut producing = broker.command(&["produce", "t", "--json", "--retry-seconds", "50"]);
    let mut producing = producing.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut consuming = broker.command(&["consume", "t", "--follow", "--json", "--retry-seconds", "50"]);
    let mut consuming = consuming.stdout(Stdio::piped()).spawn().unwrap();
    let mut input = producing.stdin.take().unwrap();
    let out = lines_of(consuming.stdout.take().unwrap());
    let mut next_offset = 0;
    let mut sent = 0_u64;
    // Sends lines, and reads until the last of them has come. A batch whose ack was lost is stored twice: what counts is
    // that the first of each comes in order, and no offset twice.
    let mut seen = 0_u64;
    for round in 0..4 {
        if round > 0 {
            let from = sent;
            sent += 2000;
            (from..sent).for_each(|number| writeln!(input, "{number}").unwrap());
            input.flush().unwrap();
            match round {
                2 => broker.stop(),
                _ => broker.kill(),
            }
            broker = restart();
        }
        let from = sent;
        sent += 2000;
        (from..sent).for_each(|number| writeln!(input, "{number}").unwrap());
        input.flush().unwrap();
        while seen < sent {
            let record: Value = serde_json::from_str(&out.recv_timeout(LIMIT).unwrap()).unwrap();
            assert_eq!(record["offset"], next_offset, "{record}");
            next_offset += 1;
            let number: u64 = record["value"].as_str().unwrap().parse().unwrap();
            assert!(number <= seen, "{number} comes before {seen}");
            seen = seen.max(number + 1);
        }
    }
    drop(input);
    let output = producing.wait_with_output().unwrap();
    assert!(output.status.success());
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&summary["records"], &summary["records_acked"]), (&sent.into(), &sent.into()));
    consuming.kill().unwrap();
    consuming.wait().unwrap();
}

#[test]
fn a_failure_is_told_though_nobody_reads_the_summary() {
    let home = Home::default();
    let broker = home.start();
    let dir = tempfile::tempdir().unwrap();
    let file = write_file(dir.path(), b"line\n");
    for topic in ["missing", "there"] {
        if topic == "there" {
            broker.ok(&["topic", "create", topic]);
        }
        let mut command = broker.command(&["produce", topic, &file, "--json"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        drop(child.stdout.take());
        let code = child.wait().unwrap().code();
        assert_eq!(code, Some(i32::from(topic == "missing")), "{topic}");
    }
    broker.stop();
}
