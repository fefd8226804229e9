//! A full disk: produces are refused, everything else goes on, and it is over by itself when there is room again.

use std::collections::BTreeMap;
use std::fs::File;
use std::time::{Duration, Instant};

use ringmain_core::ids::Durability;
use ringmain_core::topic::TopicAlteration;
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::metadata::TopicMetadata;
use ringmain_wire::produce::ProduceRequest;
use ringmain_wire::topic::{AlterTopicRequest, DeleteTopicRequest};

use crate::mount::Mount;
use crate::support::*;

/// What has been acked: offset and first bytes of the value.
type Ledger = BTreeMap<u64, Vec<u8>>;

/// Produces at this level until the disk is said to be full.
fn produce_until_full(broker: &Broker, topic: &TopicMetadata, level: Durability, ledger: &mut Ledger) {
    let mut client = broker.client();
    let mut value = Random(5).bytes(1 << 19);
    let give_up = Instant::now() + PATIENCE;
    loop {
        value[..8].copy_from_slice(&(ledger.len() as u64).to_le_bytes());
        let request = Request::Produce(ProduceRequest { durability: Some(level), timeout_ms: 2000 });
        let outcome = match client.ask_with(&request, &batch(topic.topic_id, 0, &[&value])).0 {
            Response::Produce(mut outcomes) => outcomes.remove(0),
            other => panic!("{other:?}"),
        };
        match outcome.code {
            ErrorCode::OK => {
                ledger.insert(outcome.base_offset.0, value[..64].to_vec());
            }
            ErrorCode::DISK_FULL => {
                assert!(outcome.retry_after_ms > 0 && outcome.message.contains("disk"), "{outcome:?}");
                return;
            }
            // Stored, but there was no room to write it: not acked.
            ErrorCode::TIMED_OUT if level > Durability::Memory => {}
            ErrorCode::SERVER_BUSY => std::thread::sleep(Duration::from_millis(50)),
            other => panic!("{other:?}: {outcome:?}"),
        }
        assert!(Instant::now() < give_up, "the disk is never full");
    }
}

/// All records of the topic; everything acked must be among them.
fn assert_all_there(broker: &Broker, topic: &TopicMetadata, ledger: &Ledger) {
    let (mut client, mut offset, mut found) = (broker.client(), 0, Ledger::new());
    loop {
        let (outcomes, payload) = client.fetch(fetch_request(topic.topic_id, 0, offset, 0));
        assert!(outcomes[0].code.is_ok() && outcomes[0].gap.is_none(), "{outcomes:?}");
        for (offset, value) in records(&payload) {
            found.insert(offset, value[..64].to_vec());
        }
        offset = outcomes[0].next_offset.0;
        if offset >= outcomes[0].log_end.0 {
            break;
        }
    }
    for (offset, value) in ledger {
        assert!(found.get(offset) == Some(value), "offset {offset} was acked and is not there");
    }
}

fn start(mount: &Mount, place: &Place) -> Broker {
    let mut command = serve_at(&mount.path().join("data"), place.arena.path());
    command.args(["--shards", "1", "--memory", "32MiB", "--segment-bytes", "32MiB"]);
    Broker::start(&mut command, place.dir.path())
}

#[test]
fn a_full_disk_refuses_produces_until_space_returns_and_loses_nothing() {
    let place = Place::new();
    let Some(mount) = Mount::ext4(200 << 20) else { return };
    let broker = start(&mount, &place);
    let (kept, doomed) = (broker.topic("kept", 1), broker.topic("doomed", 1));
    let mut ledger = Ledger::new();
    for level in [Durability::Memory, Durability::Synced] {
        produce_until_full(&broker, &kept, level, &mut ledger);
    }
    assert!(ledger.len() > 200, "{} half MiB only", ledger.len());
    assert_eq!(broker.metric("ringmain_disk_full"), 1.0);
    assert_eq!(broker.metric("ringmain_log_failed"), 0.0);
    // Everything else goes on.
    assert_all_there(&broker, &kept, &ledger);
    let delete = Request::DeleteTopic(DeleteTopicRequest { name: "doomed".into() });
    let answer = broker.client().ask(&delete);
    assert!(matches!(answer, Response::Topic(_)), "{answer:?}");
    assert_eq!(broker.client().metadata(&["doomed"]).topics[0].code, ErrorCode::TOPIC_NOT_FOUND, "{doomed:?}");
    // Killed and stopped while it is full, it loses nothing either; where it can't start, it says why.
    broker.kill();
    let broker = start(&mount, &place);
    assert_all_there(&broker, &kept, &ledger);
    // Space returns: the topic that filled the disk goes.
    let healthy = broker.topic("after", 1);
    let delete = Request::DeleteTopic(DeleteTopicRequest { name: "kept".into() });
    let answer = broker.client().ask(&delete);
    assert!(matches!(answer, Response::Topic(_)), "{answer:?}");
    let mut client = broker.client();
    wait_for("produces are taken again", || {
        let outcome = client.produce(Durability::Synced, &batch(healthy.topic_id, 0, &[b"again"])).remove(0);
        (outcome.code == ErrorCode::OK).then_some(())
    });
    broker.stop();
}

#[test]
fn a_disk_filled_by_others_is_over_when_they_make_room() {
    let place = Place::new();
    let Some(mount) = Mount::ext4(300 << 20) else { return };
    let broker = start(&mount, &place);
    let topic = broker.topic("squeezed", 1);
    let hog = File::create(mount.path().join("hog")).unwrap();
    rustix::fs::fallocate(&hog, rustix::fs::FallocateFlags::empty(), 0, 200 << 20).unwrap();
    let mut ledger = Ledger::new();
    produce_until_full(&broker, &topic, Durability::Flushed, &mut ledger);
    hog.set_len(0).unwrap();
    hog.sync_all().unwrap();
    let mut client = broker.client();
    wait_for("produces are taken again", || {
        let outcome = client.produce(Durability::Synced, &batch(topic.topic_id, 0, &[&[9; 100]])).remove(0);
        (outcome.code == ErrorCode::OK).then(|| ledger.insert(outcome.base_offset.0, vec![9; 64]))
    });
    assert_all_there(&broker, &topic, &ledger);
    // Full again, and stopped so: the next start finds everything.
    let disk = rustix::fs::statvfs(mount.path()).unwrap();
    let nearly_all = disk.f_bavail * disk.f_frsize - (20 << 20);
    rustix::fs::fallocate(&hog, rustix::fs::FallocateFlags::empty(), 0, nearly_all).unwrap();
    produce_until_full(&broker, &topic, Durability::Memory, &mut ledger);
    let mut broker = broker;
    broker.assert_well();
    let status = broker.terminate();
    assert_eq!(status.code(), Some(1), "what could not be written is no clean stop");
    let log = broker.log();
    assert!(log.contains("stopped without room") && !log.contains("the shard log failed"), "{log}");
    hog.set_len(0).unwrap();
    hog.sync_all().unwrap();
    let broker = start(&mount, &place);
    assert_all_there(&broker, &topic, &ledger);
    broker.stop();
}

#[test]
fn retention_that_is_set_on_a_full_disk_makes_room() {
    retention_makes_room(false);
}

#[test]
fn retention_that_is_set_after_a_start_on_a_full_disk_makes_room() {
    retention_makes_room(true);
}

fn retention_makes_room(starts_anew: bool) {
    let place = Place::new();
    let Some(mount) = Mount::ext4(200 << 20) else { return };
    let mut broker = start(&mount, &place);
    let topic = broker.topic("bounded", 1);
    let mut ledger = Ledger::new();
    produce_until_full(&broker, &topic, Durability::Flushed, &mut ledger);
    if starts_anew {
        broker.kill();
        broker = start(&mount, &place);
    }
    let change = TopicAlteration { retention_bytes: Some(Some(40 << 20)), ..TopicAlteration::default() };
    let alter = Request::AlterTopic(AlterTopicRequest { name: "bounded".into(), change });
    let answer = broker.client().ask(&alter);
    assert!(matches!(answer, Response::Topic(_)), "{answer:?}");
    let mut client = broker.client();
    wait_for("produces are taken again", || {
        let outcome = client.produce(Durability::Synced, &batch(topic.topic_id, 0, &[&[9; 100]])).remove(0);
        (outcome.code == ErrorCode::OK).then(|| ledger.insert(outcome.base_offset.0, vec![9; 64]))
    });
    broker.assert_well();
    assert!(broker.metric("ringmain_segments_freed_total") >= 2.0);
    broker.kill();
    let broker = start(&mount, &place);
    // Nothing more goes while it is compared.
    let change = TopicAlteration { retention_bytes: Some(None), ..TopicAlteration::default() };
    broker.client().ask(&Request::AlterTopic(AlterTopicRequest { name: "bounded".into(), change }));
    let (outcomes, _) = broker.client().fetch(fetch_request(topic.topic_id, 0, 0, 0));
    assert_eq!(outcomes[0].code, ErrorCode::OUT_OF_RANGE, "{outcomes:?}");
    let kept = ledger.split_off(&outcomes[0].log_start.0);
    assert!(kept.len() > 10, "{} records are kept", kept.len());
    let (mut client, mut offset) = (broker.client(), outcomes[0].log_start.0);
    let mut found = Ledger::new();
    while offset < outcomes[0].log_end.0 {
        let (outcomes, payload) = client.fetch(fetch_request(topic.topic_id, 0, offset, 0));
        assert!(outcomes[0].code.is_ok() && outcomes[0].gap.is_none(), "{outcomes:?}");
        found.extend(records(&payload).into_iter().map(|(offset, value)| (offset, value[..64].to_vec())));
        offset = outcomes[0].next_offset.0;
    }
    for (offset, value) in kept {
        assert!(found.get(&offset) == Some(&value), "offset {offset} was acked and is not there");
    }
    broker.stop();
}
