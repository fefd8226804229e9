use proptest::prelude::*;
use ringmain_core::batch::{BatchHeader, seal_crc, stamp};
use ringmain_core::codec::Codec;
use ringmain_core::compressor::Compressor;
use ringmain_core::ids::Epoch;

use super::*;
use crate::batch_builder::BatchBuilder;
use crate::batch_codec::compress;
use crate::client::unpacking::Unpacking;
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

/// What the application is told, all of it unpacked.
fn told(fetched: Fetched) -> Vec<ConsumerEvent> {
    let events = fetched.events.into_iter().flatten();
    let told = events.flat_map(|event| match event {
        FetchedEvent::Ready(event) => vec![event],
        FetchedEvent::Packed(packed) => Unpacking::new(packed).collect(),
    });
    told.collect()
}

/// Two records that are megabytes, and a few hundred bytes as they are sent.
fn bomb(base: u64) -> Vec<u8> {
    let mut builder = BatchBuilder::new(KEY);
    let value = vec![0; 1_000_000];
    for _ in 0..2 {
        builder.push(&NewRecord { value: Some(&value), ..NewRecord::default() }).unwrap();
    }
    let bytes = compress(&mut Compressor::default(), Codec::Zstd, &builder.finish()).unwrap();
    let mut bytes = bytes.to_vec();
    stamp(&mut bytes, Offset(base), 1, Epoch(1));
    bytes
}

#[test]
fn what_is_compressed_waits_as_it_came_and_is_told_batch_by_batch() {
    let share: Vec<u8> = (0..500).flat_map(|number| bomb(number * 2)).collect();
    let came = share.len();
    assert!(came < 500 * 600, "{came}");
    let mut position = Position::new(KEY, Offset(1));
    let fetched = take(&mut position, &outcome(1000, 2000), share);
    assert_eq!(position.offset, Offset(1000));
    let held = fetched.events.iter().map(|event| match event {
        Ok(FetchedEvent::Packed(packed)) => packed.bytes.len(),
        other => panic!("{other:?}"),
    });
    assert_eq!(held.sum::<usize>(), came);
    let events = fetched.events.into_iter().take(3).map(Result::unwrap);
    let batches = events.flat_map(|event| match event {
        FetchedEvent::Packed(packed) => Unpacking::new(packed),
        FetchedEvent::Ready(event) => panic!("{event:?}"),
    });
    let offsets: Vec<u64> = batches
        .flat_map(|event| match event {
            ConsumerEvent::Batch(batch) => batch.records().map(|record| record.offset.0).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(offsets, [1, 2, 3, 4, 5]);
}

#[test]
fn a_compressed_batch_that_does_not_decompress_is_told_and_the_next_one_is_shown() {
    let mut damaged = bomb(0);
    damaged[150..].fill(0xff);
    seal_crc(&mut damaged);
    let share = [damaged, bomb(2)].concat();
    let fetched = take(&mut Position::new(KEY, Offset(0)), &outcome(4, 100), share);
    let told = told(fetched);
    assert!(
        matches!(told.as_slice(), [ConsumerEvent::BadBatch { at: Offset(0), .. }, ConsumerEvent::Batch(_)]),
        "{told:?}"
    );
}

/// A fetcher that is not connected.
fn fetcher(positions: Vec<Position>) -> Fetcher {
    let routes = Arc::new(Routes::new(crate::client::ClientConfig::new(Vec::new())));
    let (events, _) = mpsc::channel(1);
    let config = ConsumerConfig::default();
    Fetcher { shared: Arc::new(FetcherShared { routes, topic: "t".into(), config, tags: None, events }), positions }
}

/// A fetch answer of two partitions with plain, sparse and compressed batches, as a whole frame.
fn answer_frame() -> Vec<u8> {
    let shares = [[batch(0, 3), bomb(3)].concat(), crate::samples::sparse_batch().to_vec()];
    let keys = [KEY, BatchHeader::parse(&shares[1]).unwrap().key];
    let outcomes = keys.iter().zip(&shares).map(|(key, share)| FetchedPartitionOutcome {
        key: *key,
        payload_bytes: share.len() as u32,
        gap: Some(Gap { from: Offset(1), to: Offset(2), reason: GapReason::Corrupt }),
        ..outcome(5, 100)
    });
    let payload = shares.concat();
    let response = Response::Fetch(outcomes.collect());
    [crate::samples::encode_response(&response, 7, payload.len()), payload].concat()
}

#[test]
fn hostile_answers_give_events_or_errors_and_never_panic() {
    let good = answer_frame();
    let keys = [KEY, BatchHeader::parse(&crate::samples::sparse_batch()).unwrap().key];
    let mut seen = [0; 3];
    for at in 0..good.len() {
        for flip in [0x01, 0x55, 0xff] {
            let mut frame = good.clone();
            frame[at] ^= flip;
            let Ok((_, Ok(frame))) = OwnedFrame::parse(&frame.into()) else {
                seen[0] += 1;
                continue;
            };
            let positions = keys.map(|key| Position::new(key, Offset(0))).to_vec();
            match fetcher(positions).take(frame, &[0, 1]) {
                Err(_) => seen[1] += 1,
                Ok(fetched) => {
                    seen[2] += 1;
                    let _ = told(fetched);
                }
            }
        }
    }
    assert!(seen.iter().all(|times| *times > 0), "not all ways were taken: {seen:?}");
}

#[tokio::test]
async fn a_partition_that_fails_waits_by_itself_and_the_others_go_on() {
    let other = PartitionKey::new(7, 1);
    let mut fetcher = fetcher(vec![Position::new(KEY, Offset(0)), Position::new(other, Offset(0))]);
    let busy = || ClientError::server(ErrorCode::INTERNAL, "".into(), 60_000);
    let mut events = Vec::new();
    fetcher.hold_back(vec![(KEY, busy())], &mut events);
    assert!(events.is_empty() && fetcher.positions[0].failing.is_some());
    assert_eq!(fetcher.next_due(), None, "the other one may be fetched now");
    fetcher.hold_back(vec![(other, busy())], &mut events);
    assert!(fetcher.next_due().is_some_and(|due| due > Instant::now()));
    // What can't go better leaves, and says why.
    fetcher.hold_back(vec![(other, ClientError::server(ErrorCode::TOO_LARGE, "".into(), 0))], &mut events);
    assert!(fetcher.positions.len() == 1 && matches!(events.as_slice(), [Err(_)]));
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
    assert!(fetched.events.is_empty() && !fetched.failures.is_empty());
}

#[test]
fn a_batch_of_another_partition_is_not_shown() {
    let mut bytes = batch(0, 1);
    bytes[48] = 9;
    seal_crc(&mut bytes);
    let fetched = take(&mut Position::new(KEY, Offset(0)), &outcome(1, 100), bytes);
    assert!(matches!(
        told(fetched).as_slice(),
        [ConsumerEvent::BadBatch { error: InvalidBatch::Partition(PartitionKey { partition: 9, .. }), .. }]
    ));
}

#[test]
fn offsets_at_the_end_of_the_number_space_do_not_overflow() {
    for base in [u64::MAX, u64::MAX - 1] {
        let fetched = take(&mut Position::new(KEY, Offset(0)), &outcome(u64::MAX, u64::MAX), batch(base, 2));
        assert!(matches!(told(fetched)[0], ConsumerEvent::BadBatch { .. }));
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
    assert!(!fetched.failures.is_empty() && fetched.events.is_empty());
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
            for event in told(fetched) {
                if let ConsumerEvent::Batch(batch) = event {
                    prop_assert!(batch.records().all(|record| record.offset.0 >= start));
                }
            }
        }
    }
}
