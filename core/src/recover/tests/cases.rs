//! One scenario for each row of the decision table.

use super::writer::{Files, SEGMENT_BYTES, Writer, Written};
use super::*;
use crate::extent::{ExtentHeader, ExtentKind};
use crate::ids::Position;
use crate::log::NextPlace;

/// Recovers and expects the case; the ends must be those of partition 0.
fn expect(files: &mut Files, case: Case, end: u64) -> Recovered {
    let recovered = files.recover().unwrap();
    let seen: Vec<Case> = recovered.cases.iter().map(|seen| seen.case).collect();
    assert!(seen.contains(&case), "{case:?} is not among {seen:?}");
    let partition = recovered.partitions.get(&PartitionKey::new(1, 0)).copied().unwrap_or_default();
    assert_eq!(partition.end, Offset(end), "{case:?}");
    // Whatever was found, a life can begin on it, and the one after finds it unchanged.
    let mut writer = Writer::start(files.clone(), 1);
    writer.blocks(1);
    let expected = writer.all_ends();
    let again = Writer::start(writer.files, 0);
    assert_eq!(again.all_ends(), expected, "{case:?}");
    recovered
}

/// Three extents of 10 records each; the last two not synced. The first is synced.
fn three() -> (Writer, [Written; 3]) {
    let mut writer = Writer::new();
    let first = writer.blocks(2);
    writer.sync();
    // A header that knows only the start checkpoint and `first` as synced.
    let second = writer.blocks(2);
    let third = writer.blocks(2);
    (writer, [first, second, third])
}

/// A sync between each two extents: each header proves the ones before.
fn three_synced() -> (Writer, [Written; 3]) {
    let mut writer = Writer::new();
    let extents = [0; 3].map(|_| {
        let extent = writer.blocks(2);
        writer.sync();
        extent
    });
    (writer, extents)
}

/// A life that cut a torn extent, wrote up to where the old life's next extent stands whole, and one place further.
/// Returns the life's extent at that place, not completed, and the bytes of the old one.
fn over_old_life() -> (Writer, Written, Vec<u8>) {
    let mut writer = Writer::new();
    let torn = writer.blocks(3);
    let old = writer.blocks(2);
    writer.files.zero(&torn, 0, 4096);
    let mut writer = Writer::start(writer.files, 0);
    assert_eq!(writer.written[0].place, torn.place, "the start checkpoint goes where the torn extent was");
    let filler = writer.blocks(2);
    assert_eq!(filler.end(), old.place);
    let over = writer.data_in_flight(&[(0, 10, 4096)]);
    assert_eq!(over.place, old.place);
    (writer, over, old.bytes)
}

fn put_back(files: &mut Files, at: &Written, bytes: &[u8]) {
    let file = files.files.get_mut(&at.segment).unwrap();
    file[at.place as usize..at.place as usize + bytes.len()].copy_from_slice(bytes);
}

/// Gives an extent another predecessor.
fn unchain(files: &mut Files, extent: &Written) {
    let header = ExtentHeader { previous_header_crc: 77, ..extent.header() };
    put_back(files, extent, &header.encode());
}

fn whole_extent() -> Case {
    let (mut writer, _) = three_synced();
    let recovered = writer.files.recover().unwrap();
    assert_eq!(recovered.partitions[&PartitionKey::new(1, 0)].end, Offset(30));
    assert_eq!(
        super::super::cases::decide(super::super::cases::Finding::Whole, super::super::cases::Behind::Nothing).0,
        Case::WholeExtent
    );
    Case::WholeExtent
}

fn log_ends() -> Case {
    let (mut writer, [.., third]) = three_synced();
    let recovered = expect(&mut writer.files, Case::LogEnds, 30);
    assert!(matches!(recovered.next, NextPlace::Continue(open) if open.place == third.end()));
    Case::LogEnds
}

fn reordered_tail() -> Case {
    let (mut writer, [_, second, _]) = three();
    writer.files.zero(&second, 0, 4096);
    expect(&mut writer.files, Case::ReorderedTail, 10);
    Case::ReorderedTail
}

fn header_damaged() -> Case {
    let (mut writer, [_, second, third]) = three_synced();
    writer.files.zero(&second, 0, 64);
    let recovered = expect(&mut writer.files, Case::HeaderDamaged, 30);
    let lost = LostRange { segment: second.segment, from: second.place, to: third.place };
    assert_eq!(recovered.lost, [lost]);
    assert!(recovered.ends_uncertain);
    Case::HeaderDamaged
}

fn old_life_behind() -> Case {
    let (mut writer, over, old) = over_old_life();
    put_back(&mut writer.files, &over, &old);
    expect(&mut writer.files, Case::OldLifeBehind, 10);
    Case::OldLifeBehind
}

fn reordered_over_old_life() -> Case {
    let (mut writer, over, old) = over_old_life();
    writer.blocks(2);
    put_back(&mut writer.files, &over, &old);
    expect(&mut writer.files, Case::ReorderedOverOldLife, 10);
    Case::ReorderedOverOldLife
}

fn lost_write() -> Case {
    let (mut writer, over, old) = over_old_life();
    writer.complete(&over);
    writer.sync();
    writer.blocks(2);
    put_back(&mut writer.files, &over, &old);
    let recovered = expect(&mut writer.files, Case::LostWrite, 30);
    assert_eq!(recovered.lost.len(), 1);
    Case::LostWrite
}

fn off_chain() -> Case {
    let (mut writer, [.., third]) = three();
    unchain(&mut writer.files, &third);
    expect(&mut writer.files, Case::OffChain, 20);
    Case::OffChain
}

fn off_chain_reordered() -> Case {
    let (mut writer, [_, second, _]) = three();
    unchain(&mut writer.files, &second);
    expect(&mut writer.files, Case::OffChainReordered, 10);
    Case::OffChainReordered
}

fn chain_broken() -> Case {
    let (mut writer, [_, second, _]) = three_synced();
    unchain(&mut writer.files, &second);
    let recovered = expect(&mut writer.files, Case::ChainBroken, 30);
    assert_eq!(recovered.lost.len(), 1);
    Case::ChainBroken
}

fn torn_extent() -> Case {
    let (mut writer, [.., third]) = three();
    writer.files.zero(&third, 64, 512);
    expect(&mut writer.files, Case::TornExtent, 20);
    Case::TornExtent
}

fn torn_extent_reordered() -> Case {
    let (mut writer, [_, second, _]) = three();
    writer.files.zero(&second, 64, 512);
    expect(&mut writer.files, Case::TornExtentReordered, 10);
    Case::TornExtentReordered
}

fn directory_damaged() -> Case {
    let (mut writer, [_, second, _]) = three_synced();
    writer.files.zero(&second, 64, 80);
    let recovered = expect(&mut writer.files, Case::DirectoryDamaged, 30);
    assert_eq!(recovered.lost.len(), 1);
    Case::DirectoryDamaged
}

fn torn_run() -> Case {
    let (mut writer, [.., third]) = three();
    writer.files.zero(&third, 4096, 8192);
    expect(&mut writer.files, Case::TornRun, 20);
    Case::TornRun
}

fn torn_run_reordered() -> Case {
    let (mut writer, [_, second, _]) = three();
    writer.files.zero(&second, 4096, 8192);
    expect(&mut writer.files, Case::TornRunReordered, 10);
    Case::TornRunReordered
}

fn rolled() -> Writer {
    let mut writer = Writer::new();
    writer.blocks(2);
    writer.roll();
    writer.blocks(2);
    writer.sync();
    writer.blocks(2);
    writer
}

fn sealed() -> Case {
    let mut writer = rolled();
    let recovered = expect(&mut writer.files, Case::Sealed, 30);
    assert!(matches!(recovered.index.get(SegmentSequence(0)), Some(SegmentIndex::Sealed(_))));
    Case::Sealed
}

fn footer_lost() -> Case {
    let mut writer = rolled();
    let file = writer.files.files.get_mut(&SegmentSequence(0)).unwrap();
    let bytes = file.len();
    file[bytes - 4096..].fill(0);
    let mut recovered = expect(&mut writer.files, Case::FooterLost, 30);
    assert_eq!(recovered.index.active_mut(SegmentSequence(0)).unwrap().len(), 1);
    assert!(recovered.lost.is_empty());
    Case::FooterLost
}

fn stopped_clean() -> Case {
    let (writer, _) = three();
    let mut files = writer.stop_clean();
    let recovered = expect(&mut files, Case::StoppedClean, 30);
    assert!(recovered.clean);
    assert_eq!(recovered.next, NextPlace::NewSegment(SegmentSequence(1)));
    Case::StoppedClean
}

fn sealed_in_roll() -> Case {
    let (mut writer, _) = three();
    writer.seal();
    let recovered = expect(&mut writer.files, Case::SealedInRoll, 30);
    assert!(!recovered.clean);
    assert_eq!(recovered.synced, recovered.flushed);
    assert_eq!(recovered.sync, Some(SegmentSequence(0)), "its footer may not be durable");
    Case::SealedInRoll
}

fn footer_damaged() -> Case {
    let (mut writer, [.., third]) = three();
    writer.seal();
    let page = third.end() as usize;
    writer.files.newest()[page + 70] ^= 1;
    let recovered = expect(&mut writer.files, Case::FooterDamaged, 30);
    assert_eq!(recovered.next, NextPlace::NewSegment(SegmentSequence(1)));
    // The footer that it wants written is the one that was there.
    let footer = recovered.rewrite_footer.unwrap();
    writer.files.newest()[page + 70] ^= 1;
    assert_eq!(footer.bytes, writer.files.newest()[page..]);
    Case::FooterDamaged
}

fn open() -> Case {
    let (mut writer, _) = three();
    expect(&mut writer.files, Case::Open, 30);
    Case::Open
}

fn segment_header_lost() -> Case {
    let mut writer = rolled();
    writer.files.newest()[..64].fill(0);
    let recovered = expect(&mut writer.files, Case::SegmentHeaderLost, 30);
    assert_eq!(recovered.rewrite_header.unwrap().segment, SegmentSequence(1));
    Case::SegmentHeaderLost
}

fn first_extent_damaged() -> Case {
    let mut writer = rolled();
    writer.files.newest()[4096..4200].fill(0);
    let recovered = expect(&mut writer.files, Case::FirstExtentDamaged, 30);
    assert!(recovered.ends_uncertain);
    Case::FirstExtentDamaged
}

fn died_in_roll() -> Case {
    let (mut writer, _) = three();
    writer.roll_without_checkpoint(None);
    let recovered = expect(&mut writer.files, Case::DiedInRoll, 30);
    assert_eq!(recovered.remove, [SegmentSequence(1)]);
    assert_eq!(recovered.next, NextPlace::NewSegment(SegmentSequence(1)));
    Case::DiedInRoll
}

fn new_log() -> Case {
    let recovered = expect(&mut Files::default(), Case::NewLog, 0);
    assert_eq!(recovered.next_incarnation, Incarnation(1));
    Case::NewLog
}

#[test]
fn each_case_is_reached() {
    let scenarios: &[fn() -> Case] = &[
        whole_extent,
        log_ends,
        reordered_tail,
        header_damaged,
        old_life_behind,
        reordered_over_old_life,
        lost_write,
        off_chain,
        off_chain_reordered,
        chain_broken,
        torn_extent,
        torn_extent_reordered,
        directory_damaged,
        torn_run,
        torn_run_reordered,
        sealed,
        footer_lost,
        stopped_clean,
        sealed_in_roll,
        footer_damaged,
        open,
        segment_header_lost,
        first_extent_damaged,
        died_in_roll,
        new_log,
    ];
    let mut reached: Vec<Case> = scenarios.iter().map(|scenario| scenario()).collect();
    reached.sort_unstable();
    assert_eq!(reached, Case::ALL, "a case without a scenario");
}

#[test]
fn an_extent_behind_a_cut_stays_dead_when_the_new_life_is_damaged() {
    // The old life: first (synced), torn, old (whole, names `first` as synced).
    let mut writer = Writer::new();
    let first = writer.blocks(2);
    writer.sync();
    let torn = writer.blocks(3);
    let old = writer.blocks(2);
    writer.files.zero(&torn, 0, 4096);
    let mut writer = Writer::start(writer.files, 1);
    // Damage in both lives: the old extent proves that `first` was synced, and must not come back itself.
    writer.files.zero(&first, 0, 64);
    writer.files.zero(&writer.written[0].clone(), 0, 64);
    let recovered = writer.files.recover().unwrap();
    assert!(recovered.ends_uncertain);
    assert_eq!(recovered.flushed.0, first.end());
    let mut index = recovered.index;
    assert_eq!(index.active_mut(SegmentSequence(0)).unwrap().len(), 0);
    assert!(old.place > first.end());
}

#[test]
fn the_next_life_is_higher_than_any_seen_also_a_stillborn_one() {
    let mut writer = Writer::new();
    writer.blocks(1);
    let mut writer = Writer::start(writer.files, 3);
    // Its first checkpoint is torn: header whole, body not.
    let checkpoint = writer.written[0].clone();
    writer.files.zero(&checkpoint, 64, 200);
    let recovered = writer.files.recover().unwrap();
    assert_eq!(recovered.last_incarnation, Incarnation(1));
    assert_eq!(recovered.next_incarnation, Incarnation(3));
    assert_eq!(recovered.epoch, Epoch(3), "nor is its epoch used again");
}

#[test]
fn the_header_of_a_torn_extent_still_proves_what_was_synced() {
    let (mut writer, [first, _, third]) = three_synced();
    let torn = writer.blocks(2);
    // The last one's directory never came, and a run that was synced long before is damaged.
    writer.files.zero(&torn, 64, 4096);
    writer.files.zero(&first, 4096, 5000);
    let recovered = expect(&mut writer.files, Case::TornExtent, 30);
    assert_eq!(recovered.flushed.0, third.end());
    assert!(!recovered.cases.iter().any(|seen| seen.case == Case::TornRun), "{:?}", recovered.cases);
}

#[test]
fn a_life_that_left_only_a_segment_behind_a_clean_stop_may_have_given_offsets() {
    let mut writer = Writer::new();
    writer.blocks(1);
    let stopped = writer.stop_clean();
    let mut files = stopped.clone();
    assert!(!files.recover().unwrap().stillborn);
    let mut writer = Writer::start(files, 0);
    let checkpoint = writer.written[0].clone();
    assert_eq!(checkpoint.segment, SegmentSequence(1));
    writer.files.zero(&checkpoint, 0, 4096);
    let recovered = writer.files.recover().unwrap();
    assert!(recovered.clean && recovered.stillborn);
}

#[test]
fn the_epoch_after_a_loss_is_past_every_life_that_may_have_raised_it() {
    let mut writer = Writer::new();
    writer.blocks(1);
    let mut recovered = writer.files.recover().unwrap();
    assert_eq!(recovered.epoch_past_loss(None), Epoch(recovered.epoch.0 + 1));
    // A life that the log shows, and one that only the arena knows.
    recovered.next_incarnation = Incarnation(recovered.last_incarnation.0 + 3);
    assert_eq!(recovered.epoch_past_loss(None), Epoch(recovered.epoch.0 + 3));
    let known = Incarnation(recovered.last_incarnation.0 + 5);
    assert_eq!(recovered.epoch_past_loss(Some(known)), Epoch(recovered.epoch.0 + 6));
}

#[test]
fn a_damaged_page_is_made_again_while_the_log_runs() {
    let mut writer = rolled();
    let footer_at = writer.written[1].end() as usize;
    let index = writer.files.recover().unwrap().index;
    let Some(SegmentIndex::Sealed(sealed)) = index.get(SegmentSequence(0)) else { panic!("segment 0 is sealed") };
    // Trailer and page: what memory has is enough.
    let file = writer.files.files.get_mut(&SegmentSequence(0)).unwrap();
    let page = file[footer_at..footer_at + 4096].to_vec();
    file[footer_at..].fill(0xdb);
    let rebuilt = rebuild_index(&mut writer.files, SEGMENT_BYTES, sealed.end()).unwrap();
    assert!(rebuilt.lost.is_empty());
    assert_eq!(rebuilt.index.sorted(), sealed.decode_page(0, &page).unwrap());
}

#[test]
fn an_old_extent_in_place_of_a_lost_one_does_not_follow_damage() {
    let mut writer = Writer::new();
    let torn = writer.blocks(1);
    writer.blocks(1);
    let old = writer.blocks(1);
    writer.files.zero(&torn, 0, 64);
    // The next life: a checkpoint where the torn extent was, then one that is synced, then one where `old` stands.
    let mut writer = Writer::start(writer.files, 1);
    let damaged = writer.blocks(1);
    writer.sync();
    let lost = writer.data_in_flight(&[(0, 10, 3000)]);
    assert_eq!((lost.segment, lost.place), (old.segment, old.place));
    let proof = writer.data_in_flight(&[(0, 10, 3000)]);
    // `proof` knows `damaged` as synced, so reading goes on behind it: where the sequence of `old` would do.
    writer.files.zero(&damaged, 0, 64);
    put_back(&mut writer.files, &lost, &old.bytes);
    assert!(old.header().sequence > damaged.header().sequence && proof.header().synced_position.0 == old.place);
    let recovered = writer.files.recover().unwrap();
    assert_eq!(recovered.flushed.0, old.place);
    let mut index = recovered.index;
    assert_eq!(index.active_mut(SegmentSequence(0)).unwrap().len(), 0);
}

#[test]
fn a_recycled_segment_gives_nothing_of_its_old_content() {
    let mut writer = Writer::new();
    for _ in 0..10 {
        writer.blocks(2);
    }
    let recycled = writer.files.files[&SegmentSequence(0)].clone();
    writer.sync();
    writer.roll_without_checkpoint(Some(recycled.clone()));
    // Died before the first checkpoint: the old content must not pass for it.
    let recovered = expect(&mut writer.files.clone(), Case::DiedInRoll, 100);
    assert_eq!(recovered.remove, [SegmentSequence(1)]);
    writer.checkpoint(false);
    writer.blocks(2);
    let recovered = writer.files.recover().unwrap();
    assert_eq!(recovered.partitions[&PartitionKey::new(1, 0)].end, Offset(110));
    let case = recovered.cases.last().unwrap();
    assert!(recovered.cases.iter().any(|seen| seen.case == Case::OldLifeBehind), "{case:?}");
}

#[test]
fn a_segment_made_twice_gives_nothing_of_its_first_life() {
    let mut writer = Writer::new();
    writer.blocks(2);
    let checkpoint = writer.roll();
    writer.blocks(2);
    let dead = writer.blocks(2);
    // Unsynced: the checkpoint is lost, what follows it is not.
    writer.files.zero(&checkpoint, 0, 4096);
    let content = writer.files.files[&SegmentSequence(1)].clone();
    let mut next = Writer::start(writer.files.clone(), 1);
    // The new life takes the same file again; its checkpoint is synced and then damaged.
    let file = next.files.newest();
    file[8192..].copy_from_slice(&content[8192..]);
    file[4096..4160].fill(0);
    let recovered = next.files.recover().unwrap();
    let key = PartitionKey::new(1, 0);
    assert_eq!(recovered.partitions[&key].end, Offset(10));
    assert_eq!(recovered.remove, [SegmentSequence(1)]);
    assert!(dead.place > 8192);
}

#[test]
fn the_last_records_of_a_partition_lost_to_damage_are_not_given_again() {
    let mut writer = Writer::new();
    writer.data(&[(0, 10, 100)]);
    writer.sync();
    let last_of_one = writer.data(&[(1, 10, 100)]);
    writer.sync();
    writer.data(&[(0, 10, 100)]);
    writer.files.zero(&last_of_one, 0, 64);
    let recovered = writer.files.recover().unwrap();
    assert!(!recovered.partitions.contains_key(&PartitionKey::new(1, 1)));
    assert!(recovered.ends_uncertain, "the caller must raise the epoch");
    // The checkpoint of that start knows nothing of partition 1 either, but the epoch is raised.
    let next = Writer::start(writer.files, 1);
    assert!(!next.files.clone().recover().unwrap().ends_uncertain);
}

#[test]
fn an_unreadable_block_is_damage_where_a_sync_is_proved_and_the_end_where_none_is() {
    let (writer, [_, second, third]) = three_synced();
    let mut files = writer.files.clone();
    files.unreadable.insert((second.segment, second.place / 4096));
    let recovered = files.recover().unwrap();
    assert_eq!(recovered.lost.len(), 1);
    assert_eq!(recovered.partitions[&PartitionKey::new(1, 0)].end, Offset(30));
    let mut files = writer.files.clone();
    files.unreadable.insert((third.segment, third.place / 4096));
    let recovered = files.recover().unwrap();
    assert_eq!(recovered.partitions[&PartitionKey::new(1, 0)].end, Offset(20));
}

#[test]
fn the_tail_of_an_older_segment_without_footer_is_reported_when_lost() {
    let mut writer = rolled();
    let tail = writer.written[1].clone();
    let file = writer.files.files.get_mut(&SegmentSequence(0)).unwrap();
    file.truncate(tail.place as usize);
    let recovered = writer.files.recover().unwrap();
    assert_eq!(recovered.lost.len(), 1);
    assert!(!recovered.ends_uncertain, "the checkpoint of the next segment has all ends");
    assert_eq!(recovered.partitions[&PartitionKey::new(1, 0)].end, Offset(30));
}

#[test]
fn ends_of_quiet_partitions_survive_a_lost_first_checkpoint_and_footer() {
    let mut writer = Writer::new();
    writer.data(&[(5, 3, 100)]);
    writer.roll();
    writer.data(&[(0, 10, 100)]);
    writer.roll();
    writer.data(&[(0, 10, 100)]);
    writer.sync();
    writer.data(&[(0, 10, 100)]);
    // First extent of the newest segment, and the newest checkpoint of the one before.
    writer.files.newest()[4096..4200].fill(0);
    writer.files.files.get_mut(&SegmentSequence(1)).unwrap()[4096..4200].fill(0);
    let recovered = writer.files.recover().unwrap();
    assert_eq!(recovered.partitions[&PartitionKey::new(1, 5)].end, Offset(3));
    assert_eq!(recovered.partitions[&PartitionKey::new(1, 0)].end, Offset(30));
    assert!(recovered.ends_uncertain);
}

#[test]
fn a_lone_segment_that_is_not_the_first_and_not_readable_is_refused() {
    let mut writer = rolled();
    writer.files.remove(SegmentSequence(0));
    assert!(writer.files.clone().recover().is_ok(), "older segments may be gone");
    writer.files.newest().fill(0);
    assert_eq!(writer.files.recover().err(), Some(RecoverError::NothingReadable(SegmentSequence(1))));
}

#[test]
fn a_clean_checkpoint_counts_also_without_its_footer() {
    let (mut writer, _) = three();
    writer.checkpoint(true);
    writer.sync();
    assert!(writer.files.recover().unwrap().clean);
    assert_eq!(writer.written.last().unwrap().header().kind, ExtentKind::Checkpoint);
    assert!(writer.files.clone().recover().unwrap().synced > Position(0));
    // A life that went on after it is not clean.
    let mut next = Writer::start(writer.files, 0);
    assert!(!next.files.recover().unwrap().clean);
    assert_eq!(next.files.newest().len() as u64, SEGMENT_BYTES);
}
