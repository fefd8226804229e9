//! `ringmain dump` on what real brokers left: sound directories are called sound, damage is named where it is, and what is
//! not damaged can be written out.

#![allow(clippy::unwrap_used)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::broker::{Broker, Home, RINGMAIN};

fn dump(args: &[&str]) -> Output {
    Command::new(RINGMAIN).arg("dump").args(args).env_remove("RINGMAIN_DATA").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The objects of `dump --json`, which must succeed.
fn objects(data: &Path, more: &[&str]) -> Vec<Value> {
    let output = dump(&[&["--data", data.to_str().unwrap(), "--json"], more].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn verify(data: &Path) -> (Option<i32>, String) {
    let output = dump(&["--data", data.to_str().unwrap(), "--verify"]);
    assert_eq!(text(&output.stderr), "");
    (output.status.code(), text(&output.stdout))
}

#[track_caller]
fn assert_sound(data: &Path) {
    let (code, out) = verify(data);
    assert_eq!(code, Some(0), "{out}");
    assert!(out.lines().last().unwrap().starts_with("sound: "), "{out}");
}

/// `count` lines that are nowhere else.
fn lines(topic: &str, round: u32, count: u32) -> Vec<String> {
    (0..count).map(|number| format!("{topic} {round} {number:06} {}", "x".repeat(number as usize % 300))).collect()
}

/// Sends lines to a partition.
fn produce(broker: &Broker, home: &Home, topic: &str, partition: u32, lines: &[String]) {
    let path = home.data().with_file_name("lines");
    let mut file = File::create(&path).unwrap();
    lines.iter().for_each(|line| writeln!(file, "{line}").unwrap());
    let partition = partition.to_string();
    // Small batches, so that runs have several.
    broker.ok(&["produce", topic, path.to_str().unwrap(), "--partition", &partition, "--batch-bytes", "4096"]);
}

/// Two topics with three partitions each, written by two lives of which the first was killed; all lines, by partition.
fn written(home: &Home) -> BTreeMap<(String, u32), Vec<String>> {
    let mut sent: BTreeMap<(String, u32), Vec<String>> = BTreeMap::new();
    for life in 0..2 {
        let broker = home.start();
        for topic in ["first", "second"] {
            if life == 0 {
                // One as it came, one in packs.
                let compression = if topic == "first" { "none" } else { "zstd" };
                broker.ok(&["topic", "create", topic, "--partitions", "3", "--compression", compression]);
            }
            for partition in 0..3 {
                let new = lines(topic, life * 10 + partition, 300);
                produce(&broker, home, topic, partition, &new);
                sent.entry((topic.to_owned(), partition)).or_default().extend(new);
            }
        }
        if life == 0 {
            broker.kill();
        } else {
            broker.stop();
        }
    }
    sent
}

fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x24], at).unwrap();
}

fn files_of(data: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![data.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let bytes = fs::read(&path).unwrap();
                found.insert(path, bytes);
            }
        }
    }
    found
}

#[test]
fn what_a_killed_and_a_stopped_broker_leave_is_sound_and_shown_and_not_changed() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "only", "--partitions", "2"]);
    produce(&broker, &home, "only", 0, &lines("only", 0, 500));
    broker.kill();
    assert_sound(&home.data());
    home.start().kill();
    assert_sound(&home.data());
    let sent = written(&home);
    let before = files_of(&home.data());
    assert_sound(&home.data());
    let found = objects(&home.data(), &["--records"]);
    assert_eq!(files_of(&home.data()), before, "dump has changed a file");

    let of = |kind: &str| found.iter().filter(|object| object["type"] == kind).collect::<Vec<_>>();
    for kind in ["log", "segment", "extent", "run", "batch", "partition", "trailer", "page"] {
        assert!(!of(kind).is_empty(), "no {kind}");
    }
    let values: Vec<&str> = of("record").iter().map(|record| record["value"].as_str().unwrap()).collect();
    for line in sent.values().flatten() {
        assert_eq!(values.iter().filter(|value| *value == line).count(), 1, "{line}");
    }
    let run = of("run")[0];
    assert!(["first", "second", "only"].contains(&run["topic"].as_str().unwrap()), "{run}");

    // The filters, and the table.
    let args = ["--topic", "second", "--partition", "1", "--records"];
    let second = objects(&home.data(), &args);
    let values = second.iter().filter(|object| object["type"] == "record").map(|record| record["value"].clone());
    assert_eq!(values.collect::<Vec<_>>(), sent[&("second".to_owned(), 1)]);
    let output = dump(&["--data", home.data().to_str().unwrap(), "--segment", "0"]);
    let table = text(&output.stdout);
    assert!(table.contains("PLACE") && table.contains("checkpoint") && table.contains("first:0"), "{table}");
    assert!(!table.contains("00000000000000000001.log"), "{table}");
}

#[test]
fn a_damaged_byte_of_each_structure_is_named_with_file_and_place() {
    let home = Home::new(&["--shards", "1", "--memory", "32MiB"]);
    written(&home);
    let data = home.data();
    let found = objects(&data, &[]);
    // The first extents of the first segment, which are all proved to be synced.
    let first = |kind: &str, more: &dyn Fn(&Value) -> bool| {
        let object = found.iter().find(|object| object["type"] == kind && more(object));
        let object = object.unwrap_or_else(|| panic!("no {kind}"));
        (object["file"].as_str().unwrap().to_owned(), object["place"].as_u64().unwrap())
    };
    let any = |_: &Value| true;
    let (segment, _) = first("segment", &any);
    let (_, checkpoint) = first("extent", &|extent| extent["kind"] == "checkpoint");
    let (_, extent) = first("extent", &|extent| extent["kind"] == "data");
    let (_, run) = first("run", &any);
    let (_, page) = first("page", &any);
    let (_, trailer) = first("trailer", &any);
    let cases = [
        (segment.as_str(), 9, 0, "segment header"),
        (&segment, checkpoint + 20, checkpoint, "extent header"),
        (&segment, checkpoint + 70, checkpoint + 64, "directory of extent"),
        (&segment, extent + 40, extent, "extent header"),
        (&segment, extent + 80, extent + 64, "directory of extent"),
        (&segment, run + 10, run, "run CRC mismatch"),
        (&segment, run + 200, run, "batch CRC mismatch"),
        (&segment, page + 30, page, "footer page 0"),
        (&segment, page + 70, page, "footer page 0"),
        (&segment, trailer - 4096 + 3, trailer - 4096, "fences"),
        (&segment, trailer + 12, trailer, "trailer"),
        ("identity", 20, 0, "backup"),
        ("catalog.log", 24, 8, "damaged"),
    ];
    for (file, at, named, words) in cases {
        let path = data.join(file);
        flip(&path, at);
        let (code, out) = verify(&data);
        flip(&path, at);
        let line = format!("damage: {file} byte {named}: ");
        let told = out.lines().any(|told| told.starts_with(&line) && told.contains(words));
        assert!(told && code == Some(1), "{file} byte {at} should be told as `{line}… {words}`:\n{out}");
        assert!(out.lines().last().unwrap().contains("damaged"), "{out}");
    }
    assert_sound(&data);
}

#[test]
fn a_cut_file_and_a_missing_segment_are_noticed() {
    let home = Home::new(&["--shards", "1", "--memory", "32MiB"]);
    written(&home);
    let data = home.data();
    let found = objects(&data, &[]);
    let newest = found.iter().rfind(|object| object["type"] == "segment").unwrap()["file"].as_str().unwrap().to_owned();
    let path = data.join(&newest);
    let whole = fs::read(&path).unwrap();
    // Within the largest extent of the newest segment, and just before the trailer.
    let in_newest = found.iter().filter(|object| object["type"] == "extent" && object["file"] == newest.as_str());
    let largest = in_newest.max_by_key(|extent| extent["bytes"].as_u64()).unwrap();
    let inside = largest["place"].as_u64().unwrap() + 4096;
    for size in [inside, inside + 77, whole.len() as u64 - 4096] {
        File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
        let (code, out) = verify(&data);
        assert_eq!(code, Some(1), "cut at {size}: {out}");
        assert!(out.contains(&newest) && out.contains("cut off"), "cut at {size}: {out}");
        fs::write(&path, &whole).unwrap();
    }
    assert_sound(&data);
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    let (code, out) = verify(&data);
    assert!(code == Some(0) && out.contains("the next start removes it") || code == Some(1), "{out}");
}

#[test]
fn what_nobody_needs_any_more_is_not_called_damaged() {
    let home = Home::new(&["--shards", "1", "--memory", "32MiB"]);
    let sent = written(&home);
    let broker = home.start();
    broker.ok(&["topic", "delete", "first"]);
    broker.stop();
    let data = home.data();
    let found = objects(&data, &[]);
    // The segment of the first life has runs of both topics, so it is still there.
    let dead = found.iter().find(|object| object["type"] == "run" && object["topic"].is_null()).unwrap();
    flip(&data.join(dead["file"].as_str().unwrap()), dead["place"].as_u64().unwrap() + 150);
    assert_sound(&data);
    let living = found.iter().find(|object| object["type"] == "run" && object["topic"] == "second").unwrap();
    flip(&data.join(living["file"].as_str().unwrap()), living["place"].as_u64().unwrap() + 150);
    assert_eq!(verify(&data).0, Some(1));
    assert_eq!(sent.len(), 6);
}

#[test]
fn what_is_not_damaged_is_extracted_in_order() {
    let home = Home::default();
    let sent = written(&home);
    let data = home.data();
    let extract = |what: &str, more: &[&str]| {
        let output = dump(&[&["--data", data.to_str().unwrap(), "--extract", what], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    };
    let all = &sent[&("second".to_owned(), 1)];
    let (out, told) = extract("second:1", &[]);
    assert!(out.lines().eq(all.iter()), "not all lines came out");
    assert_eq!(told, "");
    let (out, _) = extract("second", &["--format", "json"]);
    let records: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.len(), 3 * 600);
    for (number, record) in records.iter().filter(|record| record["partition"] == 1).enumerate() {
        assert_eq!(record["value"], all[number].as_str());
        assert_eq!(record["topic"], "second");
    }

    // One run is damaged: at most its records are missing.
    let found = objects(&data, &["--topic", "second", "--partition", "1", "--records"]);
    let runs: Vec<&Value> = found.iter().filter(|object| object["type"] == "run").collect();
    let run = runs[0];
    flip(&data.join(run["file"].as_str().unwrap()), run["place"].as_u64().unwrap() + 150);
    let (out, told) = extract("second:1", &[]);
    assert!(told.contains("skipped file=") && told.contains("second") || told.contains("partition 1"), "{told}");
    let (from, to) = (run["base_offset"].as_u64().unwrap(), run["next_offset"].as_u64().unwrap());
    let came: BTreeSet<&str> = out.lines().collect();
    let missing: Vec<u64> =
        (0..).zip(all).filter(|(_, line)| !came.contains(line.as_str())).map(|(at, _)| at).collect();
    assert!(!missing.is_empty() && missing.iter().all(|offset| (from..to).contains(offset)), "{missing:?}");
    assert!(out.lines().is_sorted_by_key(|line| all.iter().position(|sent| sent == line)));
    // The other partitions are not touched, and a topic may be named by its id where names are lost.
    let id = run["topic_id"].as_u64().unwrap();
    fs::remove_file(data.join("catalog.log")).unwrap();
    let (out, _) = extract(&format!("{id}:2"), &[]);
    assert!(out.lines().eq(sent[&("second".to_owned(), 2)].iter()));
}

#[test]
fn records_that_only_the_arena_has_are_shown_and_extracted() {
    let home = Home::new(&["--shards", "1", "--memory", "32MiB"]);
    let broker = home.start();
    broker.ok(&["topic", "create", "fresh"]);
    let sent = lines("fresh", 0, 50);
    produce(&broker, &home, "fresh", 0, &sent);
    broker.kill();
    let arenas = home.arena_files();
    let arena = arenas[0].to_str().unwrap();
    let data = home.data();
    let data = data.to_str().unwrap();
    let output = dump(&["--arena", arena, "--json", "--records"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let found: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let count = |kind: &str| found.iter().filter(|object| object["type"] == kind).count();
    assert_eq!((count("arena"), count("record")), (1, 50));
    let output = dump(&["--data", data, "--extract", "fresh", "--arena", arena]);
    assert!(text(&output.stdout).lines().eq(sent.iter()), "{}", text(&output.stdout));
    let output = dump(&["--data", data, "--verify", "--arena", arena]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));

    let block = found.iter().find(|object| object["type"] == "block").unwrap();
    let descriptor = 4096 + block["block"].as_u64().unwrap() * 64;
    let place = block["place"].as_u64().unwrap();
    for (at, named, words) in [
        (5, 0, "arena header"),
        (descriptor + 9, descriptor, "descriptor of block"),
        (place + 120, place, "batch CRC mismatch"),
    ] {
        // Both copies of the header, where it is the header's turn.
        flip(&arenas[0], at);
        if at == 5 {
            flip(&arenas[0], at + 2048);
        }
        let output = dump(&["--arena", arena, "--verify"]);
        let out = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{out}");
        assert!(out.contains(&format!("damage: {arena} byte {named}: ")) && out.contains(words), "{out}");
        flip(&arenas[0], at);
        if at == 5 {
            flip(&arenas[0], at + 2048);
        }
    }
}

#[test]
fn a_directory_in_use_is_refused_unless_forced() {
    let home = Home::default();
    let broker = home.start();
    broker.ok(&["topic", "create", "busy"]);
    produce(&broker, &home, "busy", 0, &lines("busy", 0, 100));
    let data = home.data();
    let arenas = home.arena_files();
    let segment = fs::read_dir(data.join("shard-000")).unwrap().map(|entry| entry.unwrap().path());
    let segment = segment.filter(|path| path.extension().is_some_and(|end| end == "log")).min().unwrap();
    for args in [
        ["--data", data.to_str().unwrap()].as_slice(),
        &["--arena", arenas[0].to_str().unwrap()],
        &["--verify", segment.to_str().unwrap()],
    ] {
        let output = dump(args);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {told}");
        assert!(told.contains("in use") && told.contains("--force"), "{told}");
        assert!(output.stdout.is_empty());
    }
    let output = dump(&["--data", data.to_str().unwrap(), "--force"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("a broker runs"), "{}", text(&output.stderr));
    assert!(!output.stdout.is_empty());
    broker.stop();
    assert_sound(&data);
}

#[test]
fn what_is_no_data_is_said_to_be_none() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().to_str().unwrap().to_owned();
    for args in [["--data", empty.as_str()].as_slice(), &["--data", "/no/such/folder"], &["/no/such/file"]] {
        let output = dump(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).starts_with("ringmain: "), "{}", text(&output.stderr));
    }
    assert_eq!(dump(&["--verify", "--records"]).status.code(), Some(2));

    // Foreign and odd files, among them one that is larger than any segment and all zeros.
    let foreign = folder.path().join("foreign");
    fs::write(&foreign, "this is no segment".repeat(1000)).unwrap();
    let zeros = folder.path().join("zeros");
    File::create(&zeros).unwrap().set_len(5 << 30).unwrap();
    let nothing = folder.path().join("nothing");
    File::create(&nothing).unwrap();
    for path in [&foreign, &zeros, &nothing] {
        let output = dump(&["--verify", path.to_str().unwrap()]);
        let out = text(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{}: {out}", path.display());
        assert!(out.contains("segment header"), "{out}");
    }
}

#[test]
fn a_verification_that_nobody_reads_does_not_count_as_sound() {
    let home = Home::default();
    written(&home);
    let data = home.data();
    let code = |more: &[&str]| {
        let mut command = Command::new(RINGMAIN);
        command.arg("dump").args(["--data", data.to_str().unwrap()]).args(more).env_remove("RINGMAIN_DATA");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        drop(child.stdout.take());
        child.wait().unwrap().code()
    };
    assert_eq!(code(&["--verify"]), Some(2));
    // Just looking is something else.
    assert_eq!(code(&[]), Some(0));
}
