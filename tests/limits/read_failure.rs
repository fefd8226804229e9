//! A disk that loses what was written: blocks that can't be read, and bytes that have changed. Only the run they are in is
//! lost, the consumer is told, and everything else is served.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringmain_core::ids::Durability;
use ringmain_core::topic::TopicAlteration;
use ringmain_wire::fetch::GapReason;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::metadata::TopicMetadata;
use ringmain_wire::topic::AlterTopicRequest;

use crate::mount::Mount;
use crate::support::*;

const SEGMENT_BYTES: u64 = 32 << 20;
/// Records of half a MiB each; a run has seven of them at most.
const RECORD_BYTES: usize = 1 << 19;
const RUN_RECORDS: u64 = 8;

fn start(data: &Path, place: &Place) -> Broker {
    let mut command = serve_at(data, place.arena.path());
    command.args(["--shards", "1", "--memory", "32MiB", "--segment-bytes", "32MiB"]);
    Broker::start(&mut command, place.dir.path())
}

fn value(number: u64) -> Vec<u8> {
    Random(number + 1).bytes(RECORD_BYTES)
}

/// Several segments of records, stopped and started again: nothing of them is in memory.
fn filled(data: &Path, place: &Place) -> (Broker, TopicMetadata, u64) {
    let broker = start(data, place);
    let topic = broker.topic("damaged", 1);
    let mut client = broker.client();
    let count = 180;
    for number in 0..count {
        wait_for("a record is taken", || {
            let outcome = client.produce(Durability::Flushed, &batch(topic.topic_id, 0, &[&value(number)])).remove(0);
            outcome.code.is_ok().then_some(())
        });
    }
    broker.stop();
    (start(data, place), topic, count)
}

/// Sealed segments, oldest first; the newest file is the open one.
fn sealed(data: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(data.join("shard-000")).unwrap().map(|entry| entry.unwrap().path());
    let mut segments: Vec<_> = files.filter(|path| path.extension().is_some_and(|kind| kind == "log")).collect();
    segments.sort();
    segments.pop();
    segments
}

/// Reads the topic from its start to its end: offsets that came, each with the right bytes, and gaps.
fn read_all(broker: &Broker, topic: &TopicMetadata) -> (Vec<u64>, Vec<(u64, u64)>) {
    let (mut client, mut offset) = (broker.client(), 0);
    let (mut found, mut gaps) = (Vec::new(), Vec::new());
    let (mut corrupt, mut holes) = (0, 0);
    loop {
        let (mut outcomes, payload) = client.fetch(fetch_request(topic.topic_id, 0, offset, 0));
        let outcome = outcomes.remove(0);
        assert!(outcome.code.is_ok(), "{outcome:?}");
        for (offset, bytes) in records(&payload) {
            assert!(bytes == value(offset), "offset {offset} has other bytes");
            found.push(offset);
        }
        if let Some(gap) = outcome.gap {
            assert_eq!(gap.from.0, offset, "{gap:?}");
            // Where header and footer are lost as well, nothing tells of the run but the hole it leaves.
            let told = if gap.reason == GapReason::Corrupt { &mut corrupt } else { &mut holes };
            *told += 1;
            gaps.push((gap.from.0, gap.to.0));
        }
        assert!(outcome.next_offset.0 > offset || offset >= outcome.log_end.0, "the fetch stays at {offset}");
        offset = outcome.next_offset.0;
        if offset >= outcome.log_end.0 {
            assert!(corrupt > 0 || holes == 0, "gaps without damage: {gaps:?}");
            return (found, gaps);
        }
    }
}

/// Each offset comes or is in a gap, and never both.
fn assert_covered(count: u64, found: &[u64], gaps: &[(u64, u64)]) {
    for offset in 0..count {
        let came = found.binary_search(&offset).is_ok();
        let told = gaps.iter().any(|(from, to)| (*from..*to).contains(&offset));
        assert!(came != told, "offset {offset}: came {came}, told {told}; gaps {gaps:?}");
    }
}

fn flip(path: &Path, place: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, place).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], place).unwrap();
    file.sync_all().unwrap();
}

/// Where a sealed segment's footer begins: its trailer says so.
fn footer_place(path: &Path) -> u64 {
    let file = File::open(path).unwrap();
    let mut end_place = [0; 4];
    file.read_exact_at(&mut end_place, file.metadata().unwrap().len() - 4096 + 44).unwrap();
    u32::from_le_bytes(end_place).into()
}

#[test]
fn a_changed_byte_costs_the_rest_of_its_run_and_is_told() {
    let place = Place::new();
    let (mut broker, topic, count) = filled(&place.data(), &place);
    flip(&sealed(&place.data())[1], SEGMENT_BYTES / 2);
    let (found, gaps) = read_all(&broker, &topic);
    assert_covered(count, &found, &gaps);
    assert!(gaps.len() == 1 && gaps[0].1 - gaps[0].0 <= RUN_RECORDS, "{gaps:?}");
    assert_eq!(broker.metric("ringmain_corrupt_runs_total"), 1.0);
    broker.assert_well();
    broker.stop();
}

#[test]
fn a_changed_footer_costs_nothing_but_the_work_of_making_its_index_again() {
    let place = Place::new();
    let (mut broker, topic, count) = filled(&place.data(), &place);
    let segments = sealed(&place.data());
    for segment in &segments {
        flip(segment, footer_place(segment) + 100);
    }
    let (found, gaps) = read_all(&broker, &topic);
    assert!(gaps.is_empty() && found.len() as u64 == count, "{} records, gaps {gaps:?}", found.len());
    assert!(broker.metric("ringmain_indexes_rebuilt_total") >= 1.0);
    // Retention, too, knows what is in them: also in a life that has not read them for anybody.
    broker.stop();
    broker = start(&place.data(), &place);
    let change = TopicAlteration { retention_bytes: Some(Some(8 << 20)), ..TopicAlteration::default() };
    let alter = Request::AlterTopic(AlterTopicRequest { name: "damaged".into(), change });
    assert!(matches!(broker.client().ask(&alter), Response::Topic(_)));
    wait_for("segments to go", || (broker.metric("ringmain_segments_freed_total") >= 2.0).then_some(()));
    broker.assert_well();
    broker.stop();
}

/// Byte ranges of the device that a file lies in, in the order of the file, each with its place there.
fn on_device(path: &Path) -> Vec<(u64, u64)> {
    let output = Command::new("filefrag").args(["-b1", "-v"]).arg(path).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let extent = |line: &str| {
        let fields: Vec<&str> =
            line.split(|mark: char| !mark.is_ascii_digit()).filter(|field| !field.is_empty()).collect();
        let is_extent = line.trim_start().split(':').next().is_some_and(|number| number.parse::<u32>().is_ok());
        (is_extent && fields.len() >= 6).then(|| (fields[3].parse().unwrap(), fields[5].parse().unwrap()))
    };
    let extents: Vec<(u64, u64)> = text.lines().filter_map(extent).collect();
    assert!(!extents.is_empty(), "filefrag says {text}");
    extents
}

#[test]
fn blocks_that_the_device_cannot_read_cost_their_runs_and_are_told() {
    let place = Place::new();
    let Some(mount) = Mount::ext4(400 << 20) else { return };
    let data = mount.path().join("data");
    let (mut broker, topic, count) = filled(&data, &place);
    // The device ends in the middle of what stands highest on it: reads behind give EIO. Nothing is written meanwhile.
    let ends = sealed(&data).iter().flat_map(|path| on_device(path)).map(|(from, bytes)| (from + bytes, bytes)).max();
    let (end, bytes) = ends.unwrap();
    let kept = end - bytes.min(12 << 20) / 2;
    OpenOptions::new().write(true).open(mount.image()).unwrap().set_len(kept).unwrap();
    let (found, gaps) = read_all(&broker, &topic);
    assert_covered(count, &found, &gaps);
    let lost: u64 = gaps.iter().map(|(from, to)| to - from).sum();
    assert!(lost > 0, "nothing was lost: the device reads all");
    // What is cut off, and the runs at its edges.
    let most = bytes / RECORD_BYTES as u64 + 2 * RUN_RECORDS;
    assert!(lost <= most, "{lost} records lost, at most {most} were touched: {gaps:?}");
    assert!(broker.metric("ringmain_corrupt_runs_total") >= 1.0);
    assert_eq!(broker.metric("ringmain_log_failed"), 0.0);
    broker.assert_well();
    assert!(broker.log().contains("can't read a run"), "{}", broker.log());
    broker.kill();
}
