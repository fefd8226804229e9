use proptest::prelude::*;

use super::*;
use crate::ids::{ExtentSequence, Incarnation, LogId};
use crate::log::SegmentEnd;

const END_PLACE: u32 = 1 << 20;

fn end_of(segment: u64) -> SegmentEnd {
    SegmentEnd {
        log_id: LogId(5),
        segment: SegmentSequence(segment),
        first_sequence: ExtentSequence(segment * 100),
        next_sequence: ExtentSequence(segment * 100 + 60),
        last_header_crc: 0xabcd,
        incarnation: Incarnation(2),
        end_place: END_PLACE,
        checkpoint_place: 4096,
    }
}

fn entry(key: PartitionKey, base_offset: u64, records: u64) -> IndexEntry {
    IndexEntry {
        key,
        base_offset: Offset(base_offset),
        next_offset: Offset(base_offset + records),
        epoch: Epoch(1),
        place: 8192,
        stored_bytes: 200,
        raw_bytes: 400,
        crc: 77,
        batches: 3,
        codec: 1,
        max_append_time_ms: -5,
    }
}

/// Reads a sealed index and all its pages back from a file that ends with `footer`.
fn read_footer(footer: &[u8], segment: u64) -> Result<(SealedIndex, Vec<IndexEntry>), FooterError> {
    let file_bytes = u64::from(END_PLACE) + footer.len() as u64;
    let block = &footer[footer.len() - 4096..];
    let trailer = Trailer::decode(block, LogId(5), SegmentSequence(segment), file_bytes)?;
    let (place, bytes) = trailer.fences();
    let from = (place - u64::from(END_PLACE)) as usize;
    let index = SealedIndex::parse(&trailer, &footer[from..from + bytes])?;
    let mut entries = Vec::new();
    for page in 0..index.pages() {
        let from = (index.page_place(page) - u64::from(END_PLACE)) as usize;
        entries.extend(index.decode_page(page, &footer[from..from + FOOTER_PAGE_BYTES])?);
    }
    Ok((index, entries))
}

/// Runs of a few partitions as appending makes them: dense but for some gaps, rising over the segments.
fn segments() -> impl Strategy<Value = Vec<Vec<IndexEntry>>> {
    let run = (0..4u64, 0..3u32, prop_oneof![4 => Just(0u64), 1 => 1..40u64], 1..20u64);
    proptest::collection::vec(proptest::collection::vec(run, 0..150), 1..9).prop_map(|segments| {
        let mut ends = std::collections::BTreeMap::new();
        let mut append = |(topic, partition, gap, records): (u64, u32, u64, u64)| {
            let key = PartitionKey::new(topic, partition);
            let end: &mut u64 = ends.entry(key).or_default();
            let entry = entry(key, *end + gap, records);
            *end = entry.next_offset.0;
            entry
        };
        segments.into_iter().map(|runs| runs.into_iter().map(&mut append).collect()).collect()
    })
}

struct Log {
    index: LogIndex,
    footers: Vec<Vec<u8>>,
    plain: Vec<(SegmentSequence, IndexEntry)>,
}

/// All segments sealed but the last; sequences leave holes as retention does.
fn log_of(segments: &[Vec<IndexEntry>]) -> Log {
    let mut log = Log { index: LogIndex::default(), footers: Vec::new(), plain: Vec::new() };
    for (number, entries) in segments.iter().enumerate() {
        let segment = SegmentSequence(number as u64 * 2);
        let active: ActiveIndex = entries.iter().copied().collect();
        let footer = encode_footer(&active.sorted(), &end_of(segment.0));
        assert_eq!(footer.len(), footer_bytes(entries.len()));
        let sealed = read_footer(&footer, segment.0).unwrap().0;
        assert_eq!(sealed, SealedIndex::of_entries(&active.sorted(), &end_of(segment.0)));
        let last = number + 1 == segments.len();
        log.index.put(segment, if last { SegmentIndex::Full(active) } else { SegmentIndex::Sealed(sealed) });
        log.footers.push(footer);
        log.plain.extend(entries.iter().map(|entry| (segment, *entry)));
    }
    log
}

impl Log {
    fn run(&self, mut lookup: Lookup) -> (Option<RunCursor>, usize) {
        let mut reads = 0;
        loop {
            match lookup.step(&self.index) {
                LookupStep::Found(segment, entry) => return (Some(RunCursor { segment, entry }), reads),
                LookupStep::NotFound => return (None, reads),
                LookupStep::ReadPage(read) => {
                    reads += 1;
                    assert!(reads < 100, "lookup does not end");
                    let footer = &self.footers[read.segment.0 as usize / 2];
                    let from = (read.place - u64::from(END_PLACE)) as usize;
                    let bytes = &footer[from..from + FOOTER_PAGE_BYTES];
                    let entries = self.index.decode_page(&read, bytes).unwrap().unwrap();
                    lookup.feed(&self.index, &read, &entries);
                }
            }
        }
    }

    fn plain_lookup(&self, key: PartitionKey, offset: Offset) -> Option<RunCursor> {
        let behind = |(_, entry): &&(SegmentSequence, IndexEntry)| entry.key == key && entry.next_offset > offset;
        let found = self.plain.iter().filter(behind).min_by_key(|(_, entry)| entry.base_offset)?;
        Some(RunCursor { segment: found.0, entry: found.1 })
    }
}

proptest! {
    #[test]
    fn lookups_agree_with_a_plain_list(segments in segments(), topic in 0..5u64, partition in 0..4u32, offset in 0..700u64) {
        let log = log_of(&segments);
        let key = PartitionKey::new(topic, partition);
        let (found, _) = log.run(log.index.lookup(key, Offset(offset)));
        prop_assert_eq!(found, log.plain_lookup(key, Offset(offset)));
    }

    #[test]
    fn a_cursor_visits_every_run_in_order(segments in segments(), topic in 0..4u64, partition in 0..3u32) {
        let log = log_of(&segments);
        let key = PartitionKey::new(topic, partition);
        let mut visited = Vec::new();
        let mut at = log.run(log.index.lookup(key, Offset(0))).0;
        while let Some(cursor) = at {
            visited.push(cursor.entry);
            at = log.run(log.index.next_after(&cursor)).0;
        }
        let plain: Vec<_> = log.plain.iter().map(|(_, entry)| *entry).filter(|entry| entry.key == key).collect();
        prop_assert_eq!(visited, plain);
    }

    #[test]
    fn a_removed_segment_is_passed_over(segments in segments(), gone in any::<prop::sample::Index>(), offset in 0..300u64) {
        let mut log = log_of(&segments);
        let gone = SegmentSequence(gone.index(segments.len()) as u64 * 2);
        let key = PartitionKey::new(1, 1);
        // Once under way, so that the lookup may already want a page of it.
        let mut lookup = log.index.lookup(key, Offset(offset));
        let _ = lookup.step(&log.index);
        prop_assert!(log.index.remove(gone));
        log.plain.retain(|(segment, _)| *segment != gone);
        prop_assert_eq!(log.run(log.index.lookup(key, Offset(offset))).0, log.plain_lookup(key, Offset(offset)));
        let _ = log.run(lookup);
    }

    #[test]
    fn a_footer_reads_back(segments in segments()) {
        for entries in &segments {
            let active: ActiveIndex = entries.iter().copied().collect();
            let footer = encode_footer(&active.sorted(), &end_of(1));
            let (index, read) = read_footer(&footer, 1).unwrap();
            prop_assert_eq!(index.end(), &end_of(1));
            prop_assert_eq!(read, active.sorted());
        }
    }

    #[test]
    fn a_damaged_footer_is_refused_or_reads_the_same_and_never_panics(
        segments in segments(),
        at in any::<prop::sample::Index>(),
        flip in 1..=255u8,
    ) {
        let active: ActiveIndex = segments[0].iter().copied().collect();
        let mut footer = encode_footer(&active.sorted(), &end_of(1));
        let at = at.index(footer.len());
        footer[at] ^= flip;
        if let Ok((_, read)) = read_footer(&footer, 1) {
            prop_assert_eq!(read, active.sorted(), "only padding may be damaged unnoticed");
        }
    }
}

#[test]
fn a_first_lookup_halves_the_segments() {
    let key = PartitionKey::new(1, 0);
    let segments: Vec<Vec<IndexEntry>> = (0..1000).map(|number| vec![entry(key, number * 10, 10)]).collect();
    let log = log_of(&segments);
    for offset in [0, 5005, 9989] {
        let (found, reads) = log.run(log.index.lookup(key, Offset(offset)));
        assert_eq!(found.unwrap().entry.base_offset, Offset(offset / 10 * 10));
        assert!(reads <= 11, "{reads} reads for offset {offset}");
    }
}

#[test]
fn a_trailer_of_another_life_of_the_file_is_refused() {
    let footer = encode_footer(&[], &end_of(1));
    assert_eq!(read_footer(&footer, 2), Err(FooterError::Field("segment")));
    let block = &footer[footer.len() - 4096..];
    let wrong_log = Trailer::decode(block, LogId(6), SegmentSequence(1), u64::from(END_PLACE) + footer.len() as u64);
    assert_eq!(wrong_log, Err(FooterError::Field("log_id")));
    let not_at_the_end = Trailer::decode(block, LogId(5), SegmentSequence(1), 1 << 28);
    assert_eq!(not_at_the_end, Err(FooterError::Field("entries")));
}
