use proptest::prelude::*;

use super::*;
use crate::extent::ExtentError;

const SEGMENT_BYTES: u64 = 256 * 1024;

fn fresh() -> LogTail {
    LogTail::new(LogStart {
        log_id: LogId(9),
        segment_bytes: SEGMENT_BYTES,
        incarnation: Incarnation(1),
        last_incarnation: Incarnation(0),
        epoch: Epoch(0),
        next: NextPlace::NewSegment(SegmentSequence(0)),
        next_sequence: ExtentSequence(0),
        previous_header_crc: 0,
        flushed: Position(0),
        synced: Position(0),
    })
}

fn sync(tail: &mut LogTail) {
    let covers = tail.begin_sync().unwrap();
    tail.sync_completed(covers);
}

fn checkpoint(tail: &mut LogTail) -> Placed {
    tail.place(ExtentKind::Checkpoint, 100, 1, 4096, 0).unwrap()
}

/// A tail whose life has begun in segment 0.
fn born() -> LogTail {
    let mut tail = fresh();
    assert_eq!(tail.place(ExtentKind::Checkpoint, 100, 1, 4096, 0), Err(NeedsRoll));
    tail.roll();
    let placed = checkpoint(&mut tail);
    assert_eq!(placed.place_in_file, FIRST_EXTENT_AT);
    assert_eq!(tail.extent_completed(placed.sequence), Some(placed.end));
    assert!(!tail.is_born());
    sync(&mut tail);
    assert!(tail.is_born());
    tail
}

fn decoded(placed: &Placed) -> Result<ExtentHeader, ExtentError> {
    ExtentHeader::decode(&placed.header)
}

#[test]
fn extents_chain_by_header_crc_and_sequence_also_over_a_roll() {
    let mut tail = born();
    let first = tail.place(ExtentKind::Data, 100, 1, 8192, 1).unwrap();
    let second = tail.place(ExtentKind::Data, 100, 2, 4096, 1).unwrap();
    assert_eq!(decoded(&second).unwrap().previous_header_crc, decoded(&first).unwrap().header_crc());
    assert_eq!(second.place_in_file, first.place_in_file + 8192);
    tail.extent_completed(first.sequence);
    tail.extent_completed(second.sequence);
    sync(&mut tail);
    let end = tail.segment_end().unwrap();
    assert_eq!(u64::from(end.end_place), second.place_in_file + 4096);
    assert_eq!(end.checkpoint_place, 4096);
    let header = tail.next_segment_header(0);
    assert_eq!(tail.roll(), SegmentSequence(1));
    let third = checkpoint(&mut tail);
    let third_header = decoded(&third).unwrap();
    assert_eq!(third_header.previous_header_crc, decoded(&second).unwrap().header_crc());
    assert_eq!((header.first_sequence, header.previous_header_crc), (third.sequence, third_header.previous_header_crc));
    assert_eq!(third_header.synced_position, second.end);
}

#[test]
fn a_full_segment_asks_for_a_roll_and_keeps_room_for_its_footer() {
    let mut tail = born();
    let mut placed = Vec::new();
    while let Ok(extent) = tail.place(ExtentKind::Data, 100, 1, 4096, 30) {
        placed.push(extent);
    }
    let open = *tail.open_segment().unwrap();
    assert!(open.place + footer_bytes(open.runs) as u64 <= SEGMENT_BYTES);
    assert!(open.place + 4096 + footer_bytes(open.runs + 30) as u64 > SEGMENT_BYTES);
    for extent in &placed {
        tail.extent_completed(extent.sequence);
    }
    sync(&mut tail);
    tail.roll();
    checkpoint(&mut tail);
}

#[test]
fn a_failed_tail_moves_no_end() {
    let mut tail = born();
    let extent = tail.place(ExtentKind::Data, 100, 1, 4096, 1).unwrap();
    let (flushed, synced) = (tail.flushed(), tail.synced());
    tail.fail();
    assert_eq!(tail.extent_completed(extent.sequence), None);
    assert_eq!(tail.begin_sync(), None);
    assert_eq!((tail.flushed(), tail.synced(), tail.failed()), (flushed, synced, true));
}

#[test]
fn a_sync_that_fails_under_way_covers_nothing() {
    let mut tail = born();
    let extent = tail.place(ExtentKind::Data, 100, 1, 4096, 1).unwrap();
    tail.extent_completed(extent.sequence);
    let covers = tail.begin_sync().unwrap();
    let synced = tail.synced();
    tail.fail();
    tail.sync_completed(covers);
    assert_eq!(tail.synced(), synced);
}

#[test]
#[should_panic(expected = "a life begins with a checkpoint")]
fn data_before_the_first_checkpoint_is_a_bug() {
    let mut tail = fresh();
    tail.roll();
    let _ = tail.place(ExtentKind::Data, 100, 1, 4096, 1);
}

#[test]
#[should_panic(expected = "is not synced")]
fn data_under_an_incarnation_that_is_not_synced_is_a_bug() {
    let mut tail = fresh();
    tail.roll();
    let placed = checkpoint(&mut tail);
    tail.extent_completed(placed.sequence);
    let _ = tail.place(ExtentKind::Data, 100, 1, 4096, 1);
}

#[test]
#[should_panic(expected = "a segment begins with a checkpoint")]
fn data_at_the_start_of_a_segment_is_a_bug() {
    let mut tail = born();
    tail.roll();
    let _ = tail.place(ExtentKind::Data, 100, 1, 4096, 1);
}

#[test]
#[should_panic(expected = "only when all of it is synced")]
fn a_roll_before_the_sync_is_a_bug() {
    let mut tail = born();
    let placed = tail.place(ExtentKind::Data, 100, 1, 4096, 1).unwrap();
    tail.extent_completed(placed.sequence);
    tail.roll();
}

#[test]
#[should_panic(expected = "completed twice")]
fn a_second_completion_is_a_bug() {
    let mut tail = born();
    tail.place(ExtentKind::Data, 100, 1, 4096, 1).unwrap();
    let second = tail.place(ExtentKind::Data, 100, 1, 4096, 1).unwrap();
    tail.extent_completed(second.sequence);
    tail.extent_completed(second.sequence);
}

#[test]
#[should_panic(expected = "fits no segment")]
fn an_extent_that_fits_no_segment_is_a_bug() {
    let _ = born().place(ExtentKind::Data, 100, 1, SEGMENT_BYTES as u32, 1);
}

#[derive(Clone, Debug)]
enum Step {
    /// So many blocks, and whether the write should sync them.
    Place(u32, bool),
    Complete(prop::sample::Index),
    BeginSync,
    EndSync,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..4u32, any::<bool>()).prop_map(|(blocks, wants_sync)| Step::Place(blocks, wants_sync)),
        4 => any::<prop::sample::Index>().prop_map(Step::Complete),
        1 => Just(Step::BeginSync),
        1 => Just(Step::EndSync),
    ]
}

proptest! {
    /// Against a plain list of extents with a completed mark each.
    #[test]
    fn ends_are_prefixes_in_whatever_order_writes_complete(steps in proptest::collection::vec(step(), 0..120)) {
        let mut tail = born();
        let base = tail.flushed();
        let mut extents: Vec<(Placed, bool)> = Vec::new();
        let mut syncing = None;
        let mut synced = base;
        let mut syncing_writes = Vec::new();
        let prefix = |extents: &[(Placed, bool)]| {
            extents.iter().take_while(|(_, completed)| *completed).last().map_or(base, |(placed, _)| placed.end)
        };
        for step in steps {
            match step {
                Step::Place(blocks, wants_sync) => {
                    if let Ok(placed) = tail.place(ExtentKind::Data, 100, 1, blocks * 4096, 1) {
                        prop_assert_eq!(decoded(&placed).unwrap().synced_position, synced);
                        if wants_sync && tail.write_syncs(placed.sequence) {
                            syncing_writes.push(placed.sequence);
                        }
                        extents.push((placed, false));
                    }
                }
                Step::Complete(index) => {
                    let open: Vec<usize> = (0..extents.len()).filter(|&at| !extents[at].1).collect();
                    if !open.is_empty() {
                        let at = open[index.index(open.len())];
                        let before = prefix(&extents);
                        extents[at].1 = true;
                        let after = prefix(&extents);
                        let sequence = extents[at].0.sequence;
                        prop_assert_eq!(tail.extent_completed(sequence), (after > before).then_some(after));
                        if syncing_writes.contains(&sequence) {
                            // Nothing before it is left to sync.
                            let start = if at == 0 { base } else { extents[at - 1].0.end };
                            prop_assert_eq!(synced, start);
                            synced = extents[at].0.end;
                        }
                    }
                }
                Step::BeginSync => {
                    let flushed = prefix(&extents);
                    let begun = tail.begin_sync();
                    prop_assert_eq!(begun, (syncing.is_none() && flushed > synced).then_some(flushed));
                    syncing = syncing.or(begun);
                }
                Step::EndSync => {
                    if let Some(covers) = syncing.take() {
                        tail.sync_completed(covers);
                        synced = covers;
                    }
                }
            }
            prop_assert_eq!(tail.flushed(), prefix(&extents));
            prop_assert_eq!(tail.synced(), synced);
            prop_assert!(tail.synced() <= tail.flushed() && tail.flushed() <= tail.placed());
        }
    }
}

#[test]
fn a_write_that_syncs_itself_moves_both_ends_when_all_before_is_synced() {
    let mut tail = born();
    let extent = tail.place(ExtentKind::Data, 100, 1, 4096, 1).unwrap();
    assert!(tail.write_syncs(extent.sequence));
    // What is placed behind it is not covered by it, even when it completes first.
    let behind = tail.place(ExtentKind::Data, 100, 2, 4096, 1).unwrap();
    assert_eq!(tail.extent_completed(behind.sequence), None);
    assert_eq!(tail.begin_sync(), None);
    assert_eq!(tail.extent_completed(extent.sequence), Some(behind.end));
    assert_eq!((tail.flushed(), tail.synced()), (behind.end, extent.end));
    sync(&mut tail);
    assert_eq!(tail.synced(), behind.end);
}

#[test]
fn a_write_syncs_nothing_that_stands_before_it() {
    let mut tail = born();
    let first = tail.place(ExtentKind::Data, 100, 1, 4096, 1).unwrap();
    let second = tail.place(ExtentKind::Data, 100, 2, 4096, 1).unwrap();
    assert!(!tail.write_syncs(second.sequence), "the one before is in flight");
    tail.extent_completed(first.sequence);
    tail.extent_completed(second.sequence);
    let third = tail.place(ExtentKind::Data, 100, 3, 4096, 1).unwrap();
    assert!(!tail.write_syncs(third.sequence), "those before are not synced");
    let synced = tail.synced();
    tail.extent_completed(third.sequence);
    assert_eq!(tail.synced(), synced);
    let covers = tail.begin_sync().unwrap();
    let fourth = tail.place(ExtentKind::Data, 100, 4, 4096, 1).unwrap();
    assert!(!tail.write_syncs(fourth.sequence), "a sync is under way");
    tail.sync_completed(covers);
}

#[test]
fn a_write_that_fails_under_way_syncs_nothing() {
    let mut tail = born();
    let extent = tail.place(ExtentKind::Data, 100, 1, 4096, 1).unwrap();
    assert!(tail.write_syncs(extent.sequence));
    let synced = tail.synced();
    tail.fail();
    assert_eq!(tail.extent_completed(extent.sequence), None);
    assert_eq!(tail.synced(), synced);
}
