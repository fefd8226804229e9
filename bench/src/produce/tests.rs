use super::*;
use crate::executor::tests::watchdog;
use crate::fake_broker::{FakeBroker, Faults};
use crate::report::json_line;

fn tiny(broker: &FakeBroker) -> ProduceArgs {
    ProduceArgs {
        broker: broker.address.clone(),
        topics: 2,
        partitions: 3,
        size: 100,
        batch: 10,
        clients: 2,
        in_flight: 3,
        threads: 2,
        seconds: 0.2,
        warm_up_seconds: 0.1,
        verify: true,
        ..ProduceArgs::default()
    }
}

#[test]
fn a_sound_broker_gives_a_sound_report_and_keeps_no_topics() {
    let _watchdog = watchdog("producing to a sound broker", 120);
    let broker = FakeBroker::start(Faults::default());
    let report = run(&tiny(&broker)).unwrap();
    assert!(report.figures.is_sound(), "{report:?}");
    assert!(report.verified && report.figures.records > 0);
    assert_eq!(report.figures.records, report.requests * 10);
    assert_eq!(report.figures.payload_bytes, report.figures.records * 100);
    assert_eq!(broker.topics(), 0);

    let json: serde_json::Value = serde_json::from_str(&json_line(&report)).unwrap();
    for name in
        ["records", "payload_bytes", "seconds", "records_per_s", "mb_per_s", "p50_us", "p99_us", "p999_us", "max_us"]
    {
        assert!(json[name].as_f64().unwrap() > 0.0, "{name}: {json}");
    }
    for name in ["lost", "duplicated", "reordered", "corrupt", "unexpected"] {
        assert_eq!(json[name], 0, "{name}: {json}");
    }
    for name in ["device_bytes_written", "broker_cpu_s", "broker_rss_bytes", "client_cpu_s", "records_per_sync"] {
        assert!(json.get(name).is_some(), "{name}: {json}");
    }
}

#[test]
fn clients_that_share_a_partition_and_the_common_port_are_sound_too() {
    let _watchdog = watchdog("sharing a partition", 120);
    let broker = FakeBroker::start(Faults::default());
    let args = ProduceArgs { topics: 1, partitions: 1, clients: 5, common_port: true, ..tiny(&broker) };
    let report = run(&args).unwrap();
    assert!(report.figures.is_sound() && report.verified, "{report:?}");
    assert_eq!(report.ports, "common");
}

#[test]
fn each_fault_of_a_broker_is_found() {
    let _watchdog = watchdog("finding faults", 240);
    let one_partition = |broker: &FakeBroker| ProduceArgs { topics: 1, partitions: 1, ..tiny(broker) };

    let broker = FakeBroker::start(Faults { lose: Some(5), ..Faults::default() });
    let report = run(&one_partition(&broker)).unwrap();
    // The next batch gets the same offsets, so the acks alone show it as given twice, and reading back as lost.
    assert!(report.figures.lost >= 10, "{report:?}");
    assert_eq!(report.figures.duplicated, 10, "{report:?}");

    let broker = FakeBroker::start(Faults { duplicate: Some(5), ..Faults::default() });
    let report = run(&one_partition(&broker)).unwrap();
    assert!(report.figures.duplicated == 10 && report.figures.lost == 10, "{report:?}");

    let broker = FakeBroker::start(Faults { corrupt: Some(5), ..Faults::default() });
    let report = run(&one_partition(&broker)).unwrap();
    assert_eq!((report.figures.corrupt, report.figures.lost), (1, 0), "{report:?}");
    assert_eq!(broker.topics(), 0);
}

#[test]
fn refused_batches_are_counted_and_not_missed() {
    let _watchdog = watchdog("being refused", 120);
    // The first batch after the warm-up has begun, whatever the machine's speed.
    let broker = FakeBroker::start(Faults { refuse: Some(3), ..Faults::default() });
    let report = run(&ProduceArgs { warm_up_seconds: 0.0, ..tiny(&broker) }).unwrap();
    assert_eq!(report.refused_requests, 1);
    assert!(report.figures.is_sound(), "{report:?}");
}

#[test]
fn arguments_that_can_not_work_are_refused_before_anything_is_made() {
    let broker = ProduceArgs::default();
    for (args, word) in [
        (ProduceArgs { size: 23, ..broker.clone() }, "24"),
        (ProduceArgs { batch: 3000, ..broker.clone() }, "at most"),
        (ProduceArgs { in_flight: 2000, ..broker.clone() }, "in_flight"),
        (ProduceArgs { batch: 1024, in_flight: 1000, ..broker.clone() }, "lower"),
        (ProduceArgs { topics: 0, ..broker.clone() }, "topic"),
        (ProduceArgs { seconds: 0.0, ..broker.clone() }, "seconds"),
    ] {
        let error = run(&args).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let nobody = ProduceArgs { broker: "127.0.0.1:1".to_owned(), ..broker };
    assert!(format!("{:#}", run(&nobody).unwrap_err()).contains("127.0.0.1:1"));
}
