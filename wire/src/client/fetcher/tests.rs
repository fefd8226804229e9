use proptest::prelude::*;
use ringmain_core::batch::{seal_crc, stamp};
use ringmain_core::ids::Epoch;

use super::*;
use crate::batch_builder::BatchBuilder;
use crate::fetch::{Gap, GapReason};
use crate::record::NewRecord;

const KEY: PartitionKey = PartitionKey::new(7, 0);

fn batch(base: u64, records: usize) -> Vec<u8> {
    let mut builder = BatchBuilder::new(KEY);
    for _ in 0..records {
        builder.push(&NewRecord::default()).unwrap();
    }
    let mut bytes = builder.finish().to_vec();
    stamp(&mut bytes, Offset(base), 1, Epoch(1));
    bytes
}

fn outcome(next: u64, end: u64) -> FetchedPartitionOutcome {
    let (next_offset, log_end) = (Offset(next), Offset(end));
    FetchedPartitionOutcome { key: KEY, next_offset, log_end, ..FetchedPartitionOutcome::default() }
}

fn take(position: &mut Position, outcome: &FetchedPartitionOutcome, share: Vec<u8>) -> Fetched {
    let mut fetched = Fetched::default();
    fetched.take_partition(position, outcome, share.into(), Visibility::LogEnd, None);
    fetched
}

#[test]
fn the_position_moves_with_the_batches_even_if_the_server_says_otherwise() {
    let mut position = Position::new(KEY, Offset(5));
    take(&mut position, &outcome(2, 100), batch(5, 3));
    assert_eq!(position.offset, Offset(8));
    // And never back.
    take(&mut position, &outcome(0, 100), Vec::new());
    assert_eq!(position.offset, Offset(8));
}

#[test]
fn an_answer_that_leads_nowhere_is_a_failure_and_no_busy_loop() {
    let mut position = Position::new(KEY, Offset(50));
    let fetched = take(&mut position, &outcome(50, 100), batch(5, 3));
    assert!(fetched.events.is_empty() && fetched.failure.is_some());
}

#[test]
fn a_batch_of_another_partition_is_not_shown() {
    let mut bytes = batch(0, 1);
    bytes[48] = 9;
    seal_crc(&mut bytes);
    let fetched = take(&mut Position::new(KEY, Offset(0)), &outcome(1, 100), bytes);
    assert!(matches!(
        fetched.events.as_slice(),
        [Ok(ConsumerEvent::BadBatch { error: InvalidBatch::Partition(PartitionKey { partition: 9, .. }), .. })]
    ));
}

#[test]
fn offsets_at_the_end_of_the_number_space_do_not_overflow() {
    for base in [u64::MAX, u64::MAX - 1] {
        let fetched = take(&mut Position::new(KEY, Offset(0)), &outcome(u64::MAX, u64::MAX), batch(base, 2));
        assert!(matches!(fetched.events[0], Ok(ConsumerEvent::BadBatch { .. })));
    }
}

#[test]
fn the_end_is_told_once_until_more_has_come() {
    let mut position = Position::new(KEY, Offset(0));
    assert_eq!(take(&mut position, &outcome(0, 0), Vec::new()).events.len(), 1);
    assert_eq!(take(&mut position, &outcome(0, 0), Vec::new()).events.len(), 0);
    assert_eq!(take(&mut position, &outcome(2, 2), batch(0, 2)).events.len(), 2);
}

#[test]
fn a_refused_offset_that_is_in_range_is_a_failure_and_no_busy_loop() {
    let mut position = Position::new(KEY, Offset(5));
    let mut fetched = Fetched::default();
    fetched.reset(&mut position, &outcome(0, 10));
    assert!(fetched.failure.is_some() && fetched.events.is_empty());
    // Ends that contradict each other do not panic.
    let contradiction = FetchedPartitionOutcome { log_start: Offset(20), ..outcome(0, 10) };
    fetched.reset(&mut position, &contradiction);
    assert_eq!(position.offset, Offset(20));
}

proptest! {
    #[test]
    fn whatever_comes_the_position_never_falls(
        at: u64,
        next: u64,
        end: u64,
        gap in proptest::option::of((any::<u64>(), any::<u64>())),
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
        base in 0u64..10,
    ) {
        let mut share = [batch(base, 2), batch(base + 2, 1)].concat();
        for (at, value) in flips {
            let at = at.index(share.len());
            share[at] = value;
        }
        for start in [at, at % 10] {
            let mut position = Position::new(KEY, Offset(start));
            let gap = gap.map(|(from, to)| Gap { from: Offset(from), to: Offset(to), reason: GapReason::Corrupt });
            let fetched = take(&mut position, &FetchedPartitionOutcome { gap, ..outcome(next, end) }, share.clone());
            prop_assert!(position.offset.0 >= start);
            for event in fetched.events.into_iter().flatten() {
                if let ConsumerEvent::Batch(batch) = event {
                    prop_assert!(batch.records().all(|record| record.offset.0 >= start));
                }
            }
        }
    }
}
