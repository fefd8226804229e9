//! A disk that fails: the log of the shard that met it is over, and everything else goes on.

use ringmain_core::ids::Durability;
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::produce::ProduceRequest;

use crate::mount::Mount;
use crate::support::*;

#[test]
fn a_write_that_fails_ends_the_log_of_its_shard_and_nothing_else() {
    let place = Place::new();
    let Some(mount) = Mount::failing_ext4(1 << 30, 48 << 20) else { return };
    let mut command = serve_at(&mount.path().join("data"), place.arena.path());
    command.args(["--shards", "2", "--memory", "64MiB", "--segment-bytes", "64MiB"]);
    let mut broker = Broker::start(&mut command, place.dir.path());
    // One topic for each shard.
    let topics = [broker.topic("first", 1), broker.topic("second", 1)];
    let (doomed, other) = (&topics[0], &topics[1]);
    let small = Random(2).bytes(1000);
    let mut client = broker.client();
    let mut acked = Vec::new();
    for topic in [doomed, other] {
        let outcome = client.produce(Durability::Synced, &batch(topic.topic_id, 0, &[&small])).remove(0);
        assert!(outcome.code.is_ok(), "{outcome:?}");
        acked.push(outcome.base_offset.0);
    }
    // Several wait at each level while the device runs out; each gets an answer, and at last all say that the log failed.
    let large = Random(3).bytes(900_000);
    let mut failed = 0;
    for round in 0..400 {
        let level = [Durability::Memory, Durability::Flushed, Durability::Synced][round % 3];
        let request = Request::Produce(ProduceRequest { durability: Some(level), timeout_ms: 20_000 });
        let outcome = match client.ask_with(&request, &batch(doomed.topic_id, 0, &[&large])).0 {
            Response::Produce(mut outcomes) => outcomes.remove(0),
            answer => panic!("{answer:?}"),
        };
        match outcome.code {
            ErrorCode::OK => assert_eq!(failed, 0, "an ack after the log had failed"),
            ErrorCode::STORE_FAILED => failed += 1,
            ErrorCode::SERVER_BUSY => std::thread::sleep(std::time::Duration::from_millis(20)),
            answer => panic!("{answer:?}: {outcome:?}"),
        }
        if failed == 10 {
            break;
        }
    }
    assert_eq!(failed, 10, "the disk never failed: {}", broker.log());
    broker.assert_well();
    assert!(broker.metric("ringmain_log_failed") >= 1.0);
    // What was acked is still served, and the metadata is.
    for (topic, offset) in topics.iter().zip(acked) {
        let (outcomes, payload) = client.fetch(fetch_request(topic.topic_id, 0, offset, 0));
        assert!(outcomes[0].code.is_ok(), "{outcomes:?}");
        assert_eq!(records(&payload)[0].1, small);
    }
    assert_eq!(client.metadata(&[]).topics.len(), 2);
    // The other shard takes records in memory; its own writes may fail by now, which is its own affair.
    let outcome = client.produce(Durability::Memory, &batch(other.topic_id, 0, &[&small])).remove(0);
    assert!(outcome.code.is_ok() || outcome.code == ErrorCode::STORE_FAILED, "{outcome:?}");
    // It can't end cleanly, and says so.
    let status = broker.terminate();
    assert_eq!(status.code(), Some(1), "{}", broker.log());
    assert!(broker.log().contains("the shard log failed") && !broker.log().contains("panicked"), "{}", broker.log());
}
