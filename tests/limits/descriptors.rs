//! A process that is out of file descriptors: nothing is lost, nothing fails for good, nothing sound is called damaged.

use std::net::TcpStream;
use std::time::Instant;

use ringmain_core::ids::Durability;
use ringmain_wire::error_code::ErrorCode;
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::support::*;

/// Below what any process has open: every open, accept and socket fails.
const NO_MORE: u64 = 3;

/// Sets how many descriptors the broker may have; gives what it was.
fn limit_files(broker: &Broker, files: u64) -> u64 {
    let pid = Pid::from_raw(broker.pid().cast_signed()).unwrap();
    let hard = rustix::process::getrlimit(Resource::Nofile).maximum;
    let before = prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(files), maximum: hard }).unwrap();
    before.current.unwrap_or(u64::MAX)
}

fn start(place: &Place) -> Broker {
    let mut command = place.serve(1, "32MiB");
    command.args(["--segment-bytes", "32MiB"]);
    Broker::start(&mut command, place.dir.path())
}

#[test]
fn runs_that_cannot_be_opened_for_now_are_no_gap() {
    let place = Place::new();
    let broker = start(&place);
    let topic = broker.topic("old", 1);
    let mut client = broker.client();
    // Several times the memory, over several segments.
    let value = Random(1).bytes(1 << 20);
    for _ in 0..150 {
        let outcome = client.produce(Durability::Flushed, &batch(topic.topic_id, 0, &[&value])).remove(0);
        assert!(outcome.code.is_ok(), "{outcome:?}");
    }
    let before = limit_files(&broker, NO_MORE);
    for _ in 0..3 {
        let (outcomes, _) = client.fetch(fetch_request(topic.topic_id, 0, 0, 0));
        assert!(outcomes[0].gap.is_none() && !outcomes[0].code.is_ok(), "{outcomes:?}");
    }
    limit_files(&broker, before);
    let (outcomes, payload) = client.fetch(fetch_request(topic.topic_id, 0, 0, 0));
    assert!(outcomes[0].gap.is_none() && outcomes[0].code.is_ok(), "{outcomes:?}");
    assert_eq!(records(&payload)[0].0, 0);
    assert_eq!(broker.metric("ringmain_corrupt_runs_total"), 0.0);
    broker.stop();
}

#[test]
fn a_segment_that_cannot_be_made_for_now_is_waited_for() {
    let place = Place::new();
    let broker = start(&place);
    let topic = broker.topic("new", 1);
    let mut client = broker.client();
    let value = Random(2).bytes(1 << 20);
    let first = client.produce(Durability::Synced, &batch(topic.topic_id, 0, &[&value])).remove(0);
    assert!(first.code.is_ok(), "{first:?}");
    let before = limit_files(&broker, NO_MORE);
    // The open segment fills; then memory does, and produces are refused, but only for now.
    let give_up = Instant::now() + PATIENCE;
    let mut acked = 1;
    loop {
        let outcome = client.produce(Durability::Memory, &batch(topic.topic_id, 0, &[&value])).remove(0);
        match outcome.code {
            ErrorCode::OK => acked += 1,
            ErrorCode::SERVER_BUSY => break,
            other => panic!("{other:?}: {outcome:?}"),
        }
        assert!(Instant::now() < give_up, "{acked} MiB were taken");
    }
    assert!(acked > 30, "{acked} MiB only: the segment did not fill");
    limit_files(&broker, before);
    wait_for("produces are taken again", || {
        let outcome = client.produce(Durability::Synced, &batch(topic.topic_id, 0, &[&value])).remove(0);
        outcome.code.is_ok().then_some(())
    });
    assert_eq!(broker.metric("ringmain_log_failed"), 0.0);
    assert!(broker.log().contains("can't get a file for the next segment"), "{}", broker.log());
    broker.stop();
}

#[test]
fn connections_leave_the_log_its_descriptors() {
    let place = Place::new();
    let mut command = std::process::Command::new("prlimit");
    let serve = place.serve(1, "32MiB");
    // 128 are kept for one shard and the process.
    command.args(["--nofile=320:320"]).arg(serve.get_program()).args(serve.get_args());
    command.args(["--segment-bytes", "32MiB"]);
    let broker = Broker::start(&mut command, place.dir.path());
    let topic = broker.topic("busy", 1);
    let mut client = broker.client();
    let crowd: Vec<TcpStream> = (0..400).filter_map(|_| TcpStream::connect(broker.address).ok()).collect();
    wait_for("the crowd is refused", || (broker.metric("ringmain_connections_refused_total") > 0.0).then_some(()));
    let value = Random(3).bytes(1 << 20);
    for _ in 0..100 {
        let outcome = client.produce(Durability::Synced, &batch(topic.topic_id, 0, &[&value])).remove(0);
        assert!(outcome.code.is_ok(), "{outcome:?}");
    }
    assert_eq!(broker.metric("ringmain_log_failed"), 0.0);
    assert!(broker.metric("ringmain_segments") > 2.0);
    drop(crowd);
    // Who went makes room for others.
    wait_for("a new client is served", || {
        let mut client = Client::raw(broker.address);
        client.request(&hello(1), &[]);
        client.receive().map(|_| ())
    });
    broker.stop();
}
