//! Logs that retention has worked on: old segments gone, holes in others, log starts raised between segments.

use super::writer::{Files, Writer};
use super::*;
use crate::retention::dead_ranges;

const BUSY: u32 = 0;
const QUIET: u32 = 9;

fn key(partition: u32) -> PartitionKey {
    PartitionKey::new(1, partition)
}

/// Five segments and a bit; a partition that has records in the first segment only.
fn five_segments() -> Writer {
    let mut writer = Writer::new();
    writer.data(&[(QUIET, 7, 500)]);
    for round in 0..50 {
        writer.data(&[(BUSY, 5, 3000), (1 + round % 2, 3, 9000)]);
        if round % 7 == 3 {
            writer.sync();
            writer.checkpoint(false);
            writer.sync();
        }
    }
    assert!(writer.tail.open_segment().unwrap().segment.0 >= 4);
    writer
}

/// Recovers without a finding of damage, with the ends that the writer gave; a life can begin on it.
fn expect_ends(files: &mut Files, writer: &Writer, what: &str) -> Recovered {
    let recovered = files.recover().unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(ends(&recovered), writer.all_ends(), "{what}");
    assert!(recovered.lost.is_empty() && !recovered.ends_uncertain, "{what}: {:?}", recovered.cases);
    let again = Writer::start(files.clone(), 0);
    assert_eq!(again.all_ends(), writer.all_ends(), "{what}");
    recovered
}

fn older(writer: &Writer) -> Vec<SegmentSequence> {
    let newest = writer.tail.open_segment().unwrap().segment;
    writer.files.segments().iter().copied().filter(|segment| *segment < newest).collect()
}

#[test]
fn whichever_old_segments_are_gone_no_end_is_lost() {
    let writer = five_segments();
    let older = older(&writer);
    for gone in 0..1_u32 << older.len() {
        let mut files = writer.files.clone();
        let is_gone = |(at, _): &(usize, &SegmentSequence)| gone >> at & 1 == 1;
        older.iter().enumerate().filter(is_gone).for_each(|(_, segment)| files.remove(*segment));
        let recovered = expect_ends(&mut files, &writer, &format!("without {gone:b}"));
        assert_eq!(recovered.index.segments().count(), older.len() + 1 - gone.count_ones() as usize);
    }
}

#[test]
fn the_newest_segment_needs_none_before_it_also_without_its_header() {
    let writer = five_segments();
    let mut files = writer.files.clone();
    older(&writer).into_iter().for_each(|segment| files.remove(segment));
    files.newest()[..64].fill(0);
    expect_ends(&mut files, &writer, "without a header");
}

#[test]
fn a_segment_that_died_in_the_roll_is_removed_also_when_the_old_ones_are_gone() {
    let mut writer = five_segments();
    writer.roll_without_checkpoint(None);
    let mut files = writer.files.clone();
    let older = older(&writer);
    older[..older.len() - 1].iter().for_each(|segment| files.remove(*segment));
    let recovered = expect_ends(&mut files, &writer, "died in the roll");
    assert!(recovered.cases.iter().any(|seen| seen.case == Case::DiedInRoll));
}

#[test]
fn holes_in_old_segments_are_not_met_with_their_footers_nor_without() {
    let writer = five_segments();
    let index = writer.files.clone().recover().unwrap().index;
    for footers in [true, false] {
        let mut files = writer.files.clone();
        let mut holes = 0;
        for segment in older(&writer) {
            let Some(SegmentIndex::Sealed(sealed)) = index.get(segment) else { panic!("it is sealed") };
            let file = files.files.get_mut(&segment).unwrap();
            let page = |page| {
                let place = sealed.page_place(page) as usize;
                sealed.decode_page(page, &file[place..place + 4096]).unwrap()
            };
            let runs: Vec<_> = (0..sealed.pages()).flat_map(page).collect();
            for hole in dead_ranges(runs, |run| run.key == key(1), 4096, 4096) {
                file[hole.start as usize..hole.end as usize].fill(0);
                holes += 1;
            }
            if !footers {
                let bytes = file.len();
                file[bytes - 4096..].fill(0);
            }
        }
        assert!(holes > 5, "only {holes} holes");
        let recovered = expect_ends(&mut files, &writer, if footers { "with footers" } else { "without footers" });
        let count = |index: &crate::index::LogIndex| match index.get(SegmentSequence(1)) {
            Some(SegmentIndex::Sealed(sealed)) => sealed.len(),
            Some(SegmentIndex::Full(active)) => active.len(),
            None => 0,
        };
        assert_eq!(count(&recovered.index), count(&index));
    }
}

#[test]
fn a_log_start_is_that_of_the_newest_checkpoint_that_is_whole() {
    let mut writer = Writer::new();
    writer.data(&[(BUSY, 30, 3000)]);
    writer.sync();
    writer.starts.insert(key(BUSY), Offset(10));
    writer.checkpoint(false);
    writer.sync();
    let first_synced = writer.written.last().unwrap().end();
    writer.data(&[(BUSY, 5, 3000)]);
    writer.sync();
    writer.starts.insert(key(BUSY), Offset(20));
    let second = writer.checkpoint(false);
    writer.data(&[(BUSY, 5, 3000)]);
    let start = |files: &mut Files| {
        let recovered = files.recover().unwrap();
        recovered.partitions[&key(BUSY)].log_start
    };
    assert_eq!(start(&mut writer.files.clone()), Offset(20));
    // Wherever the tail is torn behind the first one's end, its log start is there.
    let end = writer.written.last().unwrap().end();
    for sector in first_synced / 512..end / 512 {
        let mut files = writer.files.clone();
        files.newest()[(sector * 512) as usize..].fill(0);
        let expected = if sector * 512 >= second.place + 512 { Offset(20) } else { Offset(10) };
        assert_eq!(start(&mut files), expected, "cut at sector {sector}");
    }
    // Sealed and followed by another segment, it is the same.
    writer.roll();
    assert_eq!(start(&mut writer.files.clone()), Offset(20));
    let files = writer.stop_clean();
    assert_eq!(start(&mut files.clone()), Offset(20));
}
