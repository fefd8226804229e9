use super::*;

const RUN: u32 = 77;

/// Two producers that share a partition, in batches of two: offsets 0-1 to the first, 2-3 to the second, 4-5 to the first.
fn shared() -> [PartitionLedger; 2] {
    let mut ledgers = [PartitionLedger::default(), PartitionLedger::default()];
    for (producer, base_offset) in [(0, 0), (1, 2), (0, 4)] {
        let sequence = ledgers[producer].take(2);
        ledgers[producer].acked(sequence, base_offset, 2);
    }
    ledgers
}

fn stamp(producer: u32, sequence: u64) -> Option<Stamp> {
    Some(Stamp { run: RUN, producer, sequence, sent_ns: 0 })
}

fn read_back(ledgers: [PartitionLedger; 2], records: &[(u64, u32, u64)]) -> Findings {
    let mut read = ReadBack::new(RUN);
    for (offset, producer, sequence) in records {
        read.record(*offset, stamp(*producer, *sequence), true);
    }
    read.finish([(0, &ledgers[0]), (1, &ledgers[1])])
}

const ALL: [(u64, u32, u64); 6] = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 0, 2), (5, 0, 3)];

#[test]
fn acks_that_join_are_clean() {
    assert!(check_acks(shared().iter(), 0).none());
}

#[test]
fn a_producer_alone_on_its_partition_keeps_one_span() {
    let mut ledger = PartitionLedger::default();
    for _ in 0..1000 {
        let sequence = ledger.take(10);
        ledger.acked(sequence, sequence, 10);
    }
    assert_eq!(ledger.acked.len(), 1);
    assert_eq!(ledger.acked_records(), 10_000);
    assert_eq!(ledger.next_offset(), 10_000);
}

#[test]
fn an_offset_given_twice_is_a_duplicate_and_a_skipped_one_a_loss() {
    let mut ledgers = shared();
    let sequence = ledgers[1].take(2);
    ledgers[1].acked(sequence, 5, 2);
    assert_eq!(check_acks(ledgers.iter(), 0), Findings { duplicated: 1, ..Findings::default() });

    let mut ledgers = shared();
    let sequence = ledgers[1].take(2);
    ledgers[1].acked(sequence, 9, 2);
    assert_eq!(check_acks(ledgers.iter(), 0), Findings { lost: 3, ..Findings::default() });
}

#[test]
fn records_of_unknown_fate_may_explain_a_hole_but_refused_ones_do_not() {
    let mut ledgers = shared();
    let (open, sequence) = (ledgers[0].take(2), ledgers[1].take(2));
    ledgers[1].acked(sequence, 8, 2);
    let mut refused = ledgers.clone();
    ledgers[0].unknown(open, 2);
    assert!(check_acks(ledgers.iter(), 0).none());
    refused[0].refused(open, 2);
    assert_eq!(check_acks(refused.iter(), 0).lost, 2);
}

#[test]
fn an_ack_below_the_one_before_is_reordered() {
    let mut ledger = PartitionLedger::default();
    let (one, two) = (ledger.take(3), ledger.take(3));
    ledger.acked(one, 3, 3);
    ledger.acked(two, 0, 3);
    assert_eq!(check_acks([ledger].iter(), 0), Findings { reordered: 3, ..Findings::default() });
}

#[test]
fn acks_that_arrive_late_but_stand_in_order_are_clean() {
    let mut ledger = PartitionLedger::default();
    let (one, two) = (ledger.take(3), ledger.take(3));
    ledger.acked(two, 3, 3);
    ledger.acked(one, 0, 3);
    assert!(check_acks([ledger].iter(), 0).none());
}

#[test]
fn reading_back_all_records_in_order_is_clean() {
    assert!(read_back(shared(), &ALL).none());
}

#[test]
fn a_missing_record_is_lost_also_at_the_end() {
    for missing in 0..ALL.len() {
        let mut records = ALL.to_vec();
        records.remove(missing);
        assert_eq!(read_back(shared(), &records), Findings { lost: 1, ..Findings::default() }, "record {missing}");
    }
}

#[test]
fn a_record_read_twice_is_a_duplicate() {
    let records = [&ALL[..], &[(6, 0, 1)]].concat();
    assert_eq!(read_back(shared(), &records), Findings { duplicated: 1, ..Findings::default() });
}

#[test]
fn a_record_behind_a_later_one_or_at_another_offset_is_reordered() {
    let mut records = ALL.to_vec();
    records.swap(0, 1);
    assert_eq!(read_back(shared(), &records), Findings { reordered: 1, ..Findings::default() });
    let mut records = ALL.to_vec();
    records[5].0 = 6;
    assert_eq!(read_back(shared(), &records), Findings { reordered: 1, ..Findings::default() });
}

#[test]
fn records_never_sent_or_refused_are_unexpected() {
    let mut ledgers = shared();
    let refused = ledgers[0].take(1);
    ledgers[0].refused(refused, 1);
    let mut read = ReadBack::new(RUN);
    for (offset, producer, sequence) in ALL {
        read.record(offset, stamp(producer, sequence), true);
    }
    read.record(6, stamp(0, refused), true);
    read.record(7, stamp(0, refused + 1), true);
    read.record(8, stamp(2, 0), true);
    read.record(9, None, true);
    read.record(10, Some(Stamp { run: RUN + 1, ..Stamp::default() }), true);
    let findings = read.finish([(0, &ledgers[0]), (1, &ledgers[1])]);
    assert_eq!(findings, Findings { unexpected: 5, ..Findings::default() });
}

#[test]
fn records_of_unknown_fate_may_be_there_or_not() {
    let mut ledgers = shared();
    let open = ledgers[1].take(1);
    ledgers[1].unknown(open, 1);
    assert!(read_back(ledgers.clone(), &ALL).none());
    assert!(read_back(ledgers, &[&ALL[..], &[(6, 1, open)]].concat()).none());
}

#[test]
fn other_bytes_than_sent_are_corrupt() {
    let ledgers = shared();
    let mut read = ReadBack::new(RUN);
    for (offset, producer, sequence) in ALL {
        read.record(offset, stamp(producer, sequence), offset != 3);
    }
    let findings = read.finish([(0, &ledgers[0]), (1, &ledgers[1])]);
    assert_eq!(findings, Findings { corrupt: 1, ..Findings::default() });
}

#[test]
fn records_out_of_order_are_told_from_duplicates_however_many_there_are() {
    let mut ledger = PartitionLedger::default();
    let first = ledger.take(100);
    ledger.acked(first, 0, 100);
    let mut read = ReadBack::new(RUN);
    for sequence in (0..100).rev().chain([7, 50]) {
        read.record(sequence, stamp(0, sequence), true);
    }
    let findings = read.finish([(0, &ledger)]);
    assert_eq!(findings, Findings { reordered: 99, duplicated: 2, ..Findings::default() });
}
