//! Which bytes of a living segment can be given back to the filesystem.

use std::ops::Range;

use crate::extent::EXTENT_HEADER_BYTES;
use crate::index::IndexEntry;
use crate::limits::DISK_BLOCK_BYTES;

/// The ranges of a segment file, at least `bytes_min` long and in whole blocks, that hold nothing but runs that are not
/// live. Headers and directories of extents are never in one, so that the segment can be walked and its footer made again:
/// runs of one extent stand closer together than a header is long.
pub fn dead_ranges(
    mut runs: Vec<IndexEntry>,
    is_live: impl Fn(&IndexEntry) -> bool,
    bytes_min: u64,
) -> Vec<Range<u64>> {
    const BLOCK: u64 = DISK_BLOCK_BYTES as u64;
    runs.sort_unstable_by_key(|run| run.place);
    let mut ranges = Vec::new();
    let mut dead: Option<Range<u64>> = None;
    let mut push = |dead: Option<Range<u64>>| {
        let Some(dead) = dead else { return };
        let (from, to) = (dead.start.next_multiple_of(BLOCK), dead.end / BLOCK * BLOCK);
        if to >= from + bytes_min.max(BLOCK) {
            ranges.push(from..to);
        }
    };
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
        dead = match dead.take() {
            before if live => {
                push(before);
                None
            }
            Some(before) if start - before.end < EXTENT_HEADER_BYTES as u64 => Some(before.start..end),
            before => {
                push(before);
                Some(start..end)
            }
        };
    }
    push(dead);
    ranges
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::extent::{Layout, RunEntry};
    use crate::ids::{Offset, PartitionKey};

    #[test]
    fn neighbours_are_joined_and_headers_stay() {
        let run = |place, stored_bytes, key| IndexEntry {
            place,
            stored_bytes,
            key: PartitionKey::new(key, 0),
            ..IndexEntry::default()
        };
        // Two extents: the second one's header stands in the block at 20480.
        let runs = vec![run(8192, 4000, 1), run(12192, 8288, 1), run(20736, 12032, 1), run(32768, 100, 2)];
        let dead = |bytes_min| dead_ranges(runs.clone(), |run| run.key.topic.0 == 2, bytes_min);
        assert_eq!(dead(4096), [8192..20480, 24576..32768]);
        assert_eq!(dead(10_000), [8192..20480]);
        assert_eq!(dead_ranges(runs.clone(), |_| true, 1), []);
    }

    proptest! {
        #[test]
        fn no_live_run_and_no_header_is_in_a_range_and_no_dead_megabyte_is_left(
            extents in proptest::collection::vec(
                proptest::collection::vec((1..40_u32, any::<bool>()), 1..20), 1..8),
            bytes_min in prop_oneof![Just(4096_u64), Just(16_384)],
        ) {
            let mut place = 4096_u64;
            let (mut runs, mut live, mut heads) = (Vec::new(), Vec::new(), Vec::new());
            for extent in &extents {
                let sizes: Vec<u32> = extent.iter().map(|(size, _)| size * 500).collect();
                let layout = Layout::of_runs(&sizes);
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
            let ranges = dead_ranges(runs.clone(), |run| live[run.key.topic.0 as usize], bytes_min);
            let overlaps = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
            for range in &ranges {
                prop_assert!(range.start % 4096 == 0 && range.end % 4096 == 0);
                prop_assert!(range.end - range.start >= bytes_min);
                prop_assert!(!heads.iter().any(|head| overlaps(head, range)));
            }
            for (run, live) in runs.iter().zip(&live) {
                let bytes = u64::from(run.place)..u64::from(run.place + run.stored_bytes);
                if *live {
                    prop_assert!(!ranges.iter().any(|range| overlaps(range, &bytes)));
                } else if bytes.end - bytes.start >= bytes_min + 2 * 4096 {
                    prop_assert!(ranges.iter().any(|range| overlaps(range, &bytes)));
                }
            }
        }
    }
}
