//! Which bytes of a living segment can be given back to the filesystem.

use std::ops::Range;

use crate::extent::EXTENT_HEADER_BYTES;
use crate::index::IndexEntry;
use crate::limits::DISK_BLOCK_BYTES;

/// The pieces of a segment file, in whole blocks, that hold nothing but runs that are not live: where at least `bytes_min`
/// of such pieces, each of `piece_bytes_min`, follow one another with no live run between them. Headers and directories of extents are never in a
/// piece, so that the segment can be walked and its footer made again: runs of one extent stand closer together than a
/// header is long.
pub fn dead_ranges(
    mut runs: Vec<IndexEntry>,
    is_live: impl Fn(&IndexEntry) -> bool,
    bytes_min: u64,
    piece_bytes_min: u64,
) -> Vec<Range<u64>> {
    let take = |dead: &mut Vec<Range<u64>>, ranges: &mut _| take_stretch(dead, bytes_min, piece_bytes_min, ranges);
    runs.sort_unstable_by_key(|run| run.place);
    let mut ranges = Vec::new();
    let mut dead: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < runs.len() {
        // Runs that share bytes go together or not at all.
        let start = u64::from(runs[at].place);
        let (mut end, mut live) = (start, false);
        while at < runs.len() && (u64::from(runs[at].place) < end || u64::from(runs[at].place) == start) {
            end = end.max(u64::from(runs[at].place) + u64::from(runs[at].stored_bytes));
            live |= is_live(&runs[at]);
            at += 1;
        }
        match dead.last_mut() {
            _ if live => take(&mut dead, &mut ranges),
            Some(last) if start - last.end < EXTENT_HEADER_BYTES as u64 => last.end = end,
            _ => dead.push(start..end),
        }
    }
    take(&mut dead, &mut ranges);
    ranges
}

/// Takes the whole blocks of a stretch without live runs, if they are enough.
fn take_stretch(dead: &mut Vec<Range<u64>>, bytes_min: u64, piece_bytes_min: u64, ranges: &mut Vec<Range<u64>>) {
    const BLOCK: u64 = DISK_BLOCK_BYTES as u64;
    let whole = |piece: Range<u64>| piece.start.next_multiple_of(BLOCK)..piece.end / BLOCK * BLOCK;
    let is_worth_it = |piece: &Range<u64>| piece.end >= piece.start + piece_bytes_min.max(BLOCK);
    let pieces: Vec<Range<u64>> = dead.drain(..).map(whole).filter(is_worth_it).collect();
    if pieces.iter().map(|piece| piece.end - piece.start).sum::<u64>() >= bytes_min {
        ranges.extend(pieces);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::extent::{Layout, RunEntry};
    use crate::ids::{Offset, PartitionKey};

    const KIB: u32 = 1024;
    const PIECE: u64 = 64 * 1024;

    #[test]
    fn neighbours_are_joined_headers_stay_and_short_stretches_are_left() {
        let run = |place, stored_bytes, key| IndexEntry {
            place,
            stored_bytes,
            key: PartitionKey::new(key, 0),
            ..IndexEntry::default()
        };
        // Two extents of dead runs, a live run, and more that is dead; the second extent's header is at 200 KiB.
        let runs = vec![
            run(8 * KIB, 100 * KIB, 1),
            run(108 * KIB, 90 * KIB, 1),
            run(200 * KIB + 256, 100 * KIB, 1),
            run(304 * KIB, 100, 2),
            run(308 * KIB, 100 * KIB, 1),
        ];
        let dead = |bytes_min| dead_ranges(runs.clone(), |run| run.key.topic.0 == 2, bytes_min, PIECE);
        let kib = |from: u64, to: u64| from * 1024..to * 1024;
        assert_eq!(dead(4096), [kib(8, 196), kib(204, 300), kib(308, 408)]);
        assert_eq!(dead(256 * 1024), [kib(8, 196), kib(204, 300)]);
        assert_eq!(dead(1024 * 1024), []);
        assert_eq!(dead_ranges(runs.clone(), |_| true, 1, 1), []);
    }

    proptest! {
        #[test]
        fn no_live_run_and_no_header_is_in_a_range_and_no_large_dead_run_is_left(
            extents in proptest::collection::vec(
                proptest::collection::vec((1..200_u32, prop::bool::weighted(0.2)), 1..20), 1..8),
            bytes_min in prop_oneof![Just(4096_u64), Just(500_000)],
        ) {
            let mut place = 4096_u64;
            let (mut runs, mut live, mut heads) = (Vec::new(), Vec::new(), Vec::new());
            for extent in &extents {
                let sizes: Vec<u32> = extent.iter().map(|(size, _)| size * 500).collect();
                let layout = Layout::of_runs(&sizes, 0);
                for ((size, is_live), at) in sizes.iter().zip(extent).map(|(size, (_, live))| (*size, *live))
                    .zip(&layout.run_places)
                {
                    let number = runs.len() as u64;
                    let run = RunEntry { key: PartitionKey::new(number, 0), base_offset: Offset(0),
                        next_offset: Offset(1), place: *at, stored_bytes: size, ..RunEntry::default() };
                    runs.push(IndexEntry::of_run(place, &run));
                    live.push(is_live);
                }
                heads.push(place..place + u64::from(layout.run_places[0]));
                place += u64::from(layout.extent_bytes);
            }
            let ranges = dead_ranges(runs.clone(), |run| live[run.key.topic.0 as usize], bytes_min, PIECE);
            let overlaps = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
            for range in &ranges {
                prop_assert!(range.start % 4096 == 0 && range.end % 4096 == 0);
                prop_assert!(range.end - range.start >= PIECE);
                prop_assert!(!heads.iter().any(|head| overlaps(head, range)));
            }
            for (run, live) in runs.iter().zip(&live) {
                let bytes = u64::from(run.place)..u64::from(run.place + run.stored_bytes);
                if *live {
                    prop_assert!(!ranges.iter().any(|range| overlaps(range, &bytes)));
                } else if bytes.end - bytes.start >= bytes_min.max(PIECE) + 2 * 4096 {
                    prop_assert!(ranges.iter().any(|range| overlaps(range, &bytes)));
                }
            }
        }
    }
}
