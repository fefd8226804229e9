//! Truncation, tearing and flipped bits at every place of a written log.

use proptest::prelude::*;

use super::writer::{Files, LOG_ID, SEGMENT_BYTES, Writer, Written};
use super::*;
use crate::crc::crc32c;
use crate::index::{IndexEntry, SegmentIndex};
use crate::log::LogTail;

/// Two lives over three segments, synced here and there; the last extents are not synced.
fn log() -> (Files, Vec<Written>, Vec<Written>) {
    let mut writer = Writer::new();
    for round in 0..14u32 {
        writer.data(&[(round % 3, 4, 2500), (3, 2, 8000)]);
        if round % 4 == 0 {
            writer.sync();
        }
    }
    let mut written = writer.written.clone();
    let mut writer = Writer::start(writer.files, 1);
    for round in 0..12u32 {
        writer.data(&[(round % 2, 4, 9000), (4, 2, 500)]);
        if round % 3 == 0 {
            writer.sync();
        }
    }
    let synced = writer.tail.synced();
    written.extend(writer.written);
    let position = |written: &Written| written.segment.0 * SEGMENT_BYTES + written.end();
    let unsynced = written.iter().filter(|written| position(written) > synced.0).cloned().collect();
    (writer.files, written, unsynced)
}

/// All entries of segments that were walked.
fn walked_entries(recovered: &mut Recovered) -> Vec<(SegmentSequence, IndexEntry)> {
    let segments: Vec<_> = recovered.index.segments().collect();
    let mut entries = Vec::new();
    for segment in segments {
        if let Some(active) = recovered.index.active_mut(segment) {
            entries.extend(active.sorted().into_iter().map(|entry| (segment, entry)));
        }
    }
    entries
}

/// Nothing invented, no end past what was written, no partition behind what it must have.
fn check(recovered: &mut Recovered, written: &[Written], must: &[Written]) {
    let entries = walked_entries(recovered);
    for (segment, entry) in entries.iter().copied() {
        let known = written
            .iter()
            .filter(|written| written.segment == segment)
            .any(|written| written.runs.iter().any(|run| IndexEntry::of_run(written.place, run) == entry));
        assert!(known, "invented {entry:?}");
    }
    for (key, partition) in &recovered.partitions {
        let runs = || written.iter().flat_map(|written| &written.runs).filter(|run| run.key == *key);
        let end = runs().map(|run| run.next_offset).max().unwrap();
        // A checkpoint of the second life may have moved it on to where the epoch begins.
        assert!(partition.end <= end.max(Offset(EPOCH_OFFSETS * 2)), "{key} ends at {}", partition.end);
    }
    for (written, run) in must.iter().flat_map(|written| written.runs.iter().map(move |run| (written, run))) {
        let entry = (written.segment, IndexEntry::of_run(written.place, run));
        let walked = matches!(recovered.index.get(written.segment), Some(SegmentIndex::Full(_)));
        assert!(!walked || entries.contains(&entry), "{entry:?} is missing");
        let end = recovered.partitions.get(&run.key).map_or(Offset(0), |partition| partition.end);
        assert!(end >= run.next_offset, "{} ends at {end}, synced to {}", run.key, run.next_offset);
    }
}

fn synced<'a>(written: &'a [Written], unsynced: &'a [Written]) -> impl Iterator<Item = &'a Written> {
    let lost = |written: &Written| {
        unsynced.iter().any(|other| other.place == written.place && other.segment == written.segment)
    };
    written.iter().filter(move |written| !lost(written))
}

#[test]
fn cut_anywhere_in_the_unsynced_tail_the_log_ends_before_the_cut_extent() {
    let (files, written, unsynced) = log();
    assert!(unsynced.len() >= 2);
    let newest = *files.segments().last().unwrap();
    for place in (unsynced[0].place..=unsynced.last().unwrap().end()).step_by(512) {
        for truncate in [false, true] {
            let mut files = files.clone();
            let file = files.newest();
            if truncate {
                file.truncate(place as usize);
            } else {
                file[place as usize..].fill(0);
            }
            let mut recovered = files.recover().unwrap();
            let whole: Vec<Written> =
                written.iter().filter(|written| written.segment < newest || written.end() <= place).cloned().collect();
            check(&mut recovered, &written, &whole);
            let end = whole.last().unwrap().end();
            // Zeros in an extent's padding don't hurt it.
            let padding_cut = recovered.flushed.0 > newest.0 * SEGMENT_BYTES + end;
            assert!(recovered.flushed.0 >= newest.0 * SEGMENT_BYTES + end && (!padding_cut || !truncate));
            assert!(recovered.lost.is_empty() && !recovered.ends_uncertain);
        }
    }
}

#[test]
fn any_one_damaged_sector_costs_at_most_its_own_extent() {
    let (files, written, unsynced) = log();
    let must: Vec<Written> = synced(&written, &unsynced).cloned().collect();
    let segments: Vec<_> = files.segments().to_vec();
    for segment in segments {
        for place in (0..files.files[&segment].len()).step_by(512) {
            let mut files = files.clone();
            files.files.get_mut(&segment).unwrap()[place..place + 512].fill(0xa5);
            let mut recovered =
                files.recover().unwrap_or_else(|error| panic!("segment {segment} place {place}: {error}"));
            let hit = |written: &Written| {
                written.segment == segment && written.place < place as u64 + 512 && place as u64 + 512 <= written.end()
            };
            // The last synced extent has nobody behind it to prove that it was synced; all others must survive.
            let unproved = must.last().is_some_and(&hit) && recovered.lost.is_empty();
            let rest: Vec<Written> =
                must.iter().filter(|written| !hit(written)).filter(|_| !unproved).cloned().collect();
            check(&mut recovered, &written, &rest);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Fields of headers changed under a right CRC: what a bug or malice could leave, not what a device does.
    #[test]
    fn forged_headers_never_panic(
        forged in proptest::collection::vec((any::<prop::sample::Index>(), 0..60usize, any::<u8>()), 1..8),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), 0..512u32), 0..8),
    ) {
        let (mut files, _, _) = log();
        let segments: Vec<_> = files.segments().to_vec();
        // Blocks that begin with one of our magics.
        let mut headers = Vec::new();
        for segment in &segments {
            let file = &files.files[segment];
            headers.extend((0..file.len()).step_by(4096).filter(|at| file[*at..].starts_with(b"RM")).map(|at| (*segment, at)));
        }
        for (which, field, value) in forged {
            let (segment, at) = headers[which.index(headers.len())];
            let header = &mut files.files.get_mut(&segment).unwrap()[at..at + 64];
            header[field] = value;
            let crc = crc32c(&header[..60]);
            header[60..].copy_from_slice(&crc.to_le_bytes());
        }
        for (at, bit) in flips {
            let segment = segments[at.index(segments.len())];
            let file = files.files.get_mut(&segment).unwrap();
            let at = at.index(file.len());
            file[at] ^= 1 << (bit % 8);
        }
        if let Ok(recovered) = files.recover() {
            let _ = LogTail::new(recovered.log_start(LOG_ID, SEGMENT_BYTES, recovered.epoch));
        }
    }

    #[test]
    fn random_files_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..20_000), name in 0..3u64) {
        let mut files = Files::default();
        files.put(SegmentSequence(name), bytes);
        let _ = files.recover();
    }

    #[test]
    fn a_tail_torn_and_reordered_at_will_is_cut_at_the_first_extent_that_is_not_whole(
        keep in proptest::collection::vec(any::<bool>(), 64),
    ) {
        let (mut files, written, unsynced) = log();
        let newest = *files.segments().last().unwrap();
        let mut first_torn = None;
        let mut at = 0;
        for extent in &unsynced {
            for sector in 0..extent.bytes.len() / 4096 {
                let from = extent.place as usize + sector * 4096;
                let kept = keep[at % keep.len()];
                at += 1;
                let sector = &mut files.newest()[from..from + 4096];
                if !kept && sector.iter().any(|byte| *byte != 0) {
                    sector.fill(0);
                    first_torn.get_or_insert(extent.place);
                }
            }
        }
        let mut recovered = files.recover().unwrap();
        let survives = |written: &&Written| written.segment < newest || first_torn.is_none_or(|torn| written.place < torn);
        let whole: Vec<Written> = written.iter().filter(survives).cloned().collect();
        check(&mut recovered, &written, &whole);
        prop_assert_eq!(recovered.flushed.0, newest.0 * SEGMENT_BYTES + whole.last().unwrap().end());
        prop_assert!(recovered.lost.is_empty());
    }
}
