use super::*;
use crate::executor::tests::watchdog;
use crate::fake_broker::{FakeBroker, Faults};
use crate::report::json_line;

fn tiny(broker: &FakeBroker, mode: ConsumeMode) -> ConsumeArgs {
    ConsumeArgs {
        broker: broker.address.clone(),
        mode,
        topics: 2,
        partitions: 3,
        size: 100,
        batch: 10,
        records: 5000,
        seconds: 0.2,
        warm_up_seconds: 0.1,
        verify: true,
        ..ConsumeArgs::default()
    }
}

#[test]
fn catching_up_reads_every_record_once_for_each_consumer() {
    let _watchdog = watchdog("catching up", 120);
    let broker = FakeBroker::start(Faults::default());
    let report = run(&ConsumeArgs { consumers: 2, threads: 2, ..tiny(&broker, ConsumeMode::CatchUp) }).unwrap();
    assert!(report.figures.is_sound() && report.verified, "{report:?}");
    assert_eq!((report.produced_records, report.figures.records), (5000, 10_000));
    assert!(report.figures.mb_per_s > 0.0 && report.figures.p50_us > 0.0 && report.fetches > 0, "{report:?}");
    assert_eq!(broker.topics(), 0);
    let json: serde_json::Value = serde_json::from_str(&json_line(&report)).unwrap();
    assert_eq!(json["mode"], "catch-up");
    assert!(json["ack_p50_us"].is_null());
}

#[test]
fn tailing_measures_from_end_to_end() {
    let _watchdog = watchdog("tailing", 120);
    let broker = FakeBroker::start(Faults::default());
    let report = run(&tiny(&broker, ConsumeMode::Tail)).unwrap();
    assert!(report.figures.is_sound() && report.verified, "{report:?}");
    assert!(report.figures.records > 0 && report.figures.records < report.produced_records, "{report:?}");
    assert!(report.figures.p50_us > 0.0 && report.ack_p50_us.unwrap() > 0.0, "{report:?}");
    assert_eq!(broker.topics(), 0);
}

#[test]
fn a_lost_batch_is_found_while_reading() {
    let _watchdog = watchdog("finding a loss", 120);
    let broker = FakeBroker::start(Faults { lose: Some(7), ..Faults::default() });
    let report = run(&tiny(&broker, ConsumeMode::CatchUp)).unwrap();
    assert_eq!(report.figures.lost, 10, "{report:?}");
}

#[test]
fn a_topic_that_exists_is_read_and_kept() {
    let _watchdog = watchdog("reading a topic", 120);
    let broker = FakeBroker::start(Faults::default());
    broker.keep_topic("orders", 3);
    let args = ConsumeArgs { topic: Some("orders".to_owned()), ..tiny(&broker, ConsumeMode::CatchUp) };
    let report = run(&args).unwrap();
    assert_eq!((report.partitions, report.figures.records), (3, 0));
    assert_eq!(broker.topics(), 1);
    let missing = ConsumeArgs { topic: Some("nothing".to_owned()), ..args };
    assert!(run(&missing).unwrap_err().to_string().contains("nothing"));
}

#[test]
fn modes_are_parsed_and_a_foreign_topic_can_not_be_tailed() {
    assert_eq!("tail".parse(), Ok(ConsumeMode::Tail));
    assert_eq!("catch-up".parse(), Ok(ConsumeMode::CatchUp));
    assert!("fast".parse::<ConsumeMode>().unwrap_err().contains("catch-up"));
    let args = ConsumeArgs { topic: Some("t".to_owned()), mode: ConsumeMode::Tail, ..ConsumeArgs::default() };
    assert!(run(&args).unwrap_err().to_string().contains("tail"));
}
