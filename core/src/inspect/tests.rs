use super::*;
use crate::batch::{BatchError, BatchHeader, seal_crc, stamp};
use crate::crc::crc32c;
use crate::extent::ExtentKind;
use crate::ids::{Epoch, Offset, PartitionKey};
use proptest::prelude::*;
use writer::{Files, LOG_ID, SEGMENT_BYTES, Writer};

#[allow(dead_code, clippy::duplicate_mod, reason = "shared with the tests of recovery")]
#[path = "../recover/tests/writer.rs"]
mod writer;

/// Walks all segments as `ringmain dump` does: ends from recovery where it gives them.
fn walk(files: &mut Files) -> Vec<(u64, Found)> {
    let recovered = files.recover().ok();
    let names: Vec<SegmentSequence> = files.files.keys().copied().collect();
    let mut all = Vec::new();
    let mut before = None;
    for segment in &names {
        let newest = Some(segment) == names.last();
        let end = recovered.as_ref().filter(|_| newest).and_then(|recovered| {
            let place = recovered.flushed.0.checked_sub(segment.0 * SEGMENT_BYTES)?;
            (place <= SEGMENT_BYTES).then_some(place.max(4096))
        });
        let expected = Expected { log_id: Some(LOG_ID), segment_bytes: Some(SEGMENT_BYTES), end, before };
        let mut walk = SegmentWalk::new(files, *segment, expected).unwrap();
        while let Some(found) = walk.advance().unwrap() {
            if let Found::Extent(extent) = &found
                && let FoundBody::Runs(runs) = &extent.body
            {
                for run in runs {
                    let stored = walk.run_bytes(extent.place, run).unwrap();
                    assert_eq!(stored.map(<[u8]>::len), Some(run.stored_bytes as usize));
                }
            }
            all.push((segment.0, found));
        }
        before = walk.end();
    }
    all
}

fn damages(found: &[(u64, Found)]) -> Vec<(u64, Damage)> {
    let damage = |(segment, found): &(u64, Found)| match found {
        Found::Damage(damage) => Some((*segment, *damage)),
        _ => None,
    };
    found.iter().filter_map(damage).collect()
}

/// Two segments, the second stopped clean.
fn stopped() -> Files {
    let mut writer = Writer::new();
    writer.data(&[(0, 3, 104), (1, 2, 208)]);
    writer.blocks(3);
    writer.roll();
    writer.data(&[(0, 3, 104)]);
    writer.sync();
    writer.stop_clean()
}

#[test]
fn a_sound_log_is_walked_without_complaint_in_each_state_it_may_be_left_in() {
    let mut writer = Writer::new();
    writer.data(&[(0, 3, 104), (1, 2, 208)]);
    let mut open = writer.files.clone();
    writer.roll();
    writer.data(&[(0, 3, 104)]);
    for files in [&mut open, &mut writer.files.clone(), &mut stopped()] {
        let found = walk(files);
        assert_eq!(damages(&found), [], "{found:?}");
        let extents = found.iter().filter(|(_, found)| matches!(found, Found::Extent(_))).count();
        assert!(extents >= 2, "{extents}");
    }
    let found = walk(&mut stopped());
    let pages = found.iter().filter(|(_, found)| matches!(found, Found::Page { .. })).count();
    let trailers = found.iter().filter(|(_, found)| matches!(found, Found::Trailer { .. })).count();
    assert_eq!((pages, trailers), (2, 2));
}

#[test]
fn a_damaged_byte_in_each_structure_is_named_with_its_place() {
    let whole = stopped();
    let found = walk(&mut whole.clone());
    let extents: Vec<&FoundExtent> = found
        .iter()
        .filter_map(|(segment, found)| match found {
            Found::Extent(extent) if *segment == 0 => Some(extent),
            _ => None,
        })
        .collect();
    let page =
        found.iter().find_map(|(_, found)| if let Found::Page { place, .. } = found { Some(*place) } else { None });
    let (first, page) = (SegmentSequence(0), page.unwrap());
    let file_bytes = whole.files[&first].len() as u64;
    let data = extents[1].place;
    for (at, named, words) in [
        (9, 0, "segment header: header CRC"),
        (extents[0].place + 20, extents[0].place, "extent header: header CRC"),
        (extents[0].place + 70, extents[0].place + 64, "directory of extent 0: directory CRC"),
        (data + 1, data, "extent header: no header"),
        (data + 65, data + 64, "directory of extent 1: directory CRC"),
        (page + 20, page, "footer page 0: header CRC"),
        (page + 100, page, "footer page 0: footer CRC"),
        (file_bytes - 8192 + 5, file_bytes - 8192, "fences: footer CRC"),
        (file_bytes - 4096 + 5, file_bytes - 4096, "trailer: header CRC"),
    ] {
        let mut files = whole.clone();
        files.files.get_mut(&first).unwrap()[at as usize] ^= 0x40;
        let damages = damages(&walk(&mut files));
        let (segment, damage) = *damages.first().unwrap_or_else(|| panic!("byte {at} went unnoticed"));
        assert_eq!((segment, damage.place), (0, named), "{words}: {damages:?}");
        assert!(damage.what.to_string().contains(words), "{words}: {damages:?}");
    }
}

#[test]
fn a_cut_file_and_a_lost_trailer_are_named() {
    let mut writer = Writer::new();
    let large = writer.blocks(5);
    writer.sync();
    let whole = writer.stop_clean();
    let first = SegmentSequence(0);
    let size = whole.files[&first].len();
    let inside = large.place as usize + 8192;
    for (size, words) in [
        (inside, "cut off"),
        (inside + 100, "within a block"),
        (5000, "within a block"),
        (size - 4096, "trailer is missing"),
    ] {
        let mut files = whole.clone();
        files.files.get_mut(&first).unwrap().truncate(size);
        let damages = damages(&walk(&mut files));
        assert!(damages.iter().any(|(_, damage)| damage.what.to_string().contains(words)), "{words}: {damages:?}");
    }
}

#[test]
fn zeros_in_a_sealed_segment_are_told_and_what_stands_behind_is_read() {
    let mut files = stopped();
    let extents = walk(&mut files);
    let Some((_, Found::Extent(second))) =
        extents.iter().find(|(_, found)| matches!(found, Found::Extent(extent) if extent.header.sequence.0 == 1))
    else {
        panic!("{extents:?}")
    };
    let (from, to) = (second.place, second.place + u64::from(second.header.extent_bytes));
    files.files.get_mut(&SegmentSequence(0)).unwrap()[from as usize..to as usize].fill(0);
    let found = walk(&mut files);
    assert!(found.contains(&(0, Found::Zeros { from, to })), "{found:?}");
    let third = |found: &(u64, Found)| matches!(&found.1, Found::Extent(extent) if extent.header.sequence.0 == 2);
    assert!(found.iter().any(third));
    assert_eq!(damages(&found), []);
}

#[test]
fn a_segment_that_is_not_the_next_one_is_noticed() {
    let mut other = Writer::new();
    other.data(&[(0, 9, 104)]);
    other.data(&[(0, 9, 104)]);
    other.roll();
    other.data(&[(5, 1, 104)]);
    let mut files = stopped();
    files.put(SegmentSequence(1), other.stop_clean().files[&SegmentSequence(1)].clone());
    let damages = damages(&walk(&mut files));
    assert!(damages.iter().any(|(_, damage)| matches!(damage.what, DamageKind::SegmentChain(_))), "{damages:?}");
    let mut files = stopped();
    let first = files.files[&SegmentSequence(0)].clone();
    files.put(SegmentSequence(1), first);
    let damages = self::damages(&walk(&mut files));
    assert!(damages.iter().any(|(_, damage)| matches!(damage.what, DamageKind::OtherSegment(_))), "{damages:?}");
}

#[test]
fn blocks_that_the_device_can_not_read_are_named() {
    let mut files = stopped();
    files.unreadable.insert((SegmentSequence(0), 2));
    let damages = damages(&walk(&mut files));
    assert!(damages.contains(&(0, Damage { place: 8192, what: DamageKind::Unreadable })), "{damages:?}");
}

const KEY: PartitionKey = PartitionKey::new(1, 0);

fn batch(base_offset: u64, records: u32) -> Vec<u8> {
    let header = BatchHeader { batch_bytes: 104, record_count: records, key: KEY, ..BatchHeader::default() };
    let mut bytes = vec![0; 104];
    header.write(&mut bytes);
    seal_crc(&mut bytes);
    stamp(&mut bytes, Offset(base_offset), 5, Epoch(0));
    bytes
}

fn run_of(bytes: &[u8], next_offset: u64, batches: u32) -> RunEntry {
    let size = bytes.len() as u32;
    RunEntry {
        key: KEY,
        base_offset: Offset(10),
        next_offset: Offset(next_offset),
        stored_bytes: size,
        raw_bytes: size,
        crc: crc32c(bytes),
        batches,
        ..RunEntry::default()
    }
}

#[test]
fn a_run_gives_its_batches_and_what_is_wrong_with_them() {
    let bytes = [batch(10, 3), batch(13, 2), batch(15, 1)].concat();
    let entry = run_of(&bytes, 16, 3);
    assert_eq!(run::check_stored(&entry, &bytes), Ok(()));
    assert_eq!(run::batches(&entry, &bytes).filter(Result::is_ok).count(), 3);

    let mut damaged = bytes.clone();
    damaged[104 + 99] ^= 1;
    assert_eq!(run::check_stored(&entry, &damaged), Err(run::RunDamage::Crc));
    let found: Vec<_> = run::batches(&entry, &damaged).collect();
    assert!(matches!(found[1], Err(run::RunDamage::Batch { at: 104, error: BatchError::Crc { .. } })));
    assert_eq!(found[2].map(|batch| batch.at), Ok(208), "a batch behind a damaged one is still found");

    let overlapping = [batch(10, 3), batch(12, 4)].concat();
    let last = run::batches(&run_of(&overlapping, 16, 2), &overlapping).last();
    assert!(matches!(last, Some(Err(run::RunDamage::Offsets { at: 104, .. }))), "{last:?}");
    let last = run::batches(&run_of(&bytes, 17, 3), &bytes).last();
    assert!(matches!(last, Some(Err(run::RunDamage::Count { found: 3, .. }))), "{last:?}");
    let compressed = RunEntry { codec: 9, ..entry };
    assert_eq!(run::raw(&compressed, &bytes), Err(run::RunDamage::Codec(9)));
    let zeros = vec![0; bytes.len()];
    assert_eq!(run::check_stored(&entry, &zeros), Err(run::RunDamage::Zeros));
}

#[test]
fn offsets_that_repeat_or_are_missing_are_told_from_gaps_that_have_a_reason() {
    let run = |base, next, epoch| RunEntry {
        key: KEY,
        base_offset: Offset(base),
        next_offset: Offset(next),
        epoch: Epoch(epoch),
        ..RunEntry::default()
    };
    let mut check = OffsetCheck::default();
    let data = |check: &mut OffsetCheck, run: &RunEntry| check.run(ExtentKind::Data, run, Offset(20));
    assert_eq!(data(&mut check, &run(5, 10, 0)), None);
    assert_eq!(data(&mut check, &run(10, 12, 0)), None);
    assert_eq!(data(&mut check, &run(11, 12, 0)), Some(OffsetFinding::Repeats { expected: Offset(12) }));
    // Below the log start nothing is missed.
    assert_eq!(data(&mut check, &run(20, 30, 0)), Some(OffsetFinding::Gap { from: Offset(12) }));
    assert_eq!(data(&mut check, &run(31, 40, 0)), Some(OffsetFinding::Missing { from: Offset(30) }));
    assert_eq!(data(&mut check, &run(1 << 32, 1 << 33, 1)), Some(OffsetFinding::Gap { from: Offset(40) }));
    check.lost();
    assert_eq!(data(&mut check, &run(1 << 34, 1 << 35, 1)), Some(OffsetFinding::Gap { from: Offset(1 << 33) }));
    assert_eq!(check.run(ExtentKind::Moved, &run(0, 3, 0), Offset(0)), None);
}

proptest! {
    #[test]
    fn any_damage_is_walked_to_the_end(
        changes in proptest::collection::vec((0u64..2, any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in proptest::option::of((0u64..2, any::<prop::sample::Index>())),
    ) {
        let mut files = stopped();
        for (segment, at, value) in changes {
            let file = files.files.get_mut(&SegmentSequence(segment)).unwrap();
            let at = at.index(file.len());
            file[at] = value;
        }
        if let Some((segment, at)) = cut {
            let file = files.files.get_mut(&SegmentSequence(segment)).unwrap();
            let at = at.index(file.len());
            file.truncate(at);
        }
        // The helper wants whole runs; here only the walk must come to its end.
        for segment in [0, 1] {
            let mut walk = SegmentWalk::new(&mut files, SegmentSequence(segment), Expected::default()).unwrap();
            let mut steps = 0;
            while let Some(found) = walk.advance().unwrap() {
                steps += 1;
                prop_assert!(steps < 1000);
                if let Found::Extent(FoundExtent { place, body: FoundBody::Runs(runs), .. }) = found {
                    for run in &runs {
                        walk.run_bytes(place, run).unwrap();
                    }
                }
            }
        }
    }
}
