//! What a reader sees of the simulated shard: memory, index and disk together. What can't be read is a gap up to the end of
//! its run, and nothing more.

use ringmain_core::batch::{BATCH_HEADER_BYTES, BatchHeader, check_crc, check_stamp};
use ringmain_core::block::BlockMemory;
use ringmain_core::fetch::FetchPlan;
use ringmain_core::ids::{Offset, PartitionKey, SegmentSequence};
use ringmain_core::index::{FOOTER_PAGE_BYTES, IndexEntry, LookupStep, SegmentIndex};
use ringmain_core::pack::Pack;
use ringmain_core::recover::{SegmentSource, rebuild_index};

use super::Shard;
use crate::ledger::{Seen, read_batches, seen_of};
use crate::world::World;

impl Shard {
    /// Everything that a reader from the log start sees of a partition.
    pub fn read_all(&mut self, world: &mut World, key: PartitionKey) -> Vec<Seen> {
        let mut all: Vec<Seen> = Vec::new();
        let (ends, _) = self.store.ends(key).expect("the partition is there");
        let mut offset = ends.log_start();
        loop {
            let next = match self.store.plan_fetch(&*self.arena, key, offset, 4096, false) {
                FetchPlan::AtEnd => return all,
                FetchPlan::Memory { slices, next_offset, .. } => {
                    let read = |slice: &ringmain_core::fetch::Slice| {
                        read_batches(self.arena.read(slice.block, slice.at as usize, slice.bytes as usize))
                    };
                    let seen: Vec<Seen> = slices.iter().flat_map(read).collect();
                    self.store.unpin(&*self.arena, &slices);
                    assert_eq!(seen.last().map(|last| last.next), Some(next_offset));
                    all.extend(seen.iter().filter(|seen| seen.base >= offset));
                    next_offset
                }
                FetchPlan::Disk { memory_from } => match self.find(world, key, offset) {
                    Some((segment, entry)) if entry.base_offset <= offset => {
                        let seen = read_run(world, segment, &entry);
                        all.extend(seen.iter().filter(|seen| seen.base >= offset && seen.next <= memory_from));
                        if seen.last().is_none_or(|last| last.next < entry.next_offset) {
                            world.meet("run lost to a reader");
                        }
                        entry.next_offset.min(memory_from)
                    }
                    // A gap up to the next run or memory.
                    Some((_, entry)) => entry.base_offset.min(memory_from),
                    None => memory_from,
                },
                other => panic!("{key} at {offset}: {other:?}"),
            };
            assert!(next > offset, "{key}: a reader stays at {offset}");
            offset = next;
        }
    }

    fn find(&mut self, world: &mut World, key: PartitionKey, offset: Offset) -> Option<(SegmentSequence, IndexEntry)> {
        let mut lookup = self.index.lookup(key, offset);
        loop {
            match lookup.step(&self.index) {
                LookupStep::Found(segment, entry) => return Some((segment, entry)),
                LookupStep::NotFound => return None,
                LookupStep::ReadPage(read) => {
                    let mut page = vec![0; FOOTER_PAGE_BYTES];
                    let is_read = world.disk.read(read.segment, read.place, &mut page).is_ok();
                    let decoded = self.index.decode_page(&read, &page).expect("the segment is there");
                    match decoded {
                        Ok(entries) if is_read => lookup.feed(&self.index, &read, &entries),
                        _ => self.rebuild(world, read.segment),
                    }
                }
            }
        }
    }

    /// A page of the segment's footer is not whole: all of its index is made again, in memory.
    fn rebuild(&mut self, world: &mut World, segment: SegmentSequence) {
        assert!(world.is_damaged(), "a footer page of segment {segment} is not whole");
        let Some(SegmentIndex::Sealed(sealed)) = self.index.get(segment) else { panic!("only sealed ones have pages") };
        let rebuilt = rebuild_index(&mut world.disk, world.segment_bytes, sealed.end()).expect("the disk reads");
        world.note(format!("the index of segment {segment} is made again, lost: {:?}", rebuilt.lost));
        world.meet("index made again");
        for records in world.layout.harm(&world.damages, &world.disk).lost {
            world.ledger.may_miss(&records);
        }
        self.index.put(segment, SegmentIndex::Full(rebuilt.index));
    }

    /// All runs of a segment.
    pub(super) fn runs_of(&mut self, world: &mut World, segment: SegmentSequence) -> Vec<IndexEntry> {
        loop {
            let sealed = match self.index.get(segment) {
                None => return Vec::new(),
                Some(SegmentIndex::Full(active)) => return active.sorted(),
                Some(SegmentIndex::Sealed(sealed)) => sealed,
            };
            let mut runs = Vec::new();
            let whole = (0..sealed.pages()).all(|page| {
                let mut bytes = vec![0; FOOTER_PAGE_BYTES];
                let read = world.disk.read(segment, sealed.page_place(page), &mut bytes);
                let entries = sealed.decode_page(page, &bytes);
                match (read, entries) {
                    (Ok(_), Ok(entries)) => {
                        runs.extend(entries);
                        true
                    }
                    _ => false,
                }
            });
            if whole {
                return runs;
            }
            self.rebuild(world, segment);
        }
    }
}

/// The batches of a run from disk, up to the first one that is not whole.
fn read_run(world: &mut World, segment: SegmentSequence, entry: &IndexEntry) -> Vec<Seen> {
    let from = u64::from(entry.place) / 4096 * 4096;
    let within = (u64::from(entry.place) - from) as usize;
    let mut bytes = vec![0; (within + entry.stored_bytes as usize).next_multiple_of(4096)];
    if world.disk.read(segment, from, &mut bytes).is_err() {
        assert!(world.is_damaged(), "the disk fails to read");
        world.meet("EIO on read");
        return Vec::new();
    }
    let run = &bytes[within..within + entry.stored_bytes as usize];
    let (seen, whole) =
        if entry.codec == 0 { whole_batches(entry.key, run) } else { whole_packs(world, entry.key, run) };
    if !whole {
        assert!(world.is_damaged(), "a run is not whole: {entry:?}");
        world.meet(if entry.codec == 0 { "bad batch in a run" } else { "bad pack in a run" });
        return seen;
    }
    assert_eq!(seen.len(), entry.batches as usize);
    assert_eq!(seen.first().map(|first| first.base), Some(entry.base_offset));
    assert_eq!(seen.last().map(|last| last.next), Some(entry.next_offset));
    if entry.codec != 0 {
        world.meet("packed run read");
    }
    seen
}

/// Batches up to the first that is not what its CRCs say, and whether that was all.
fn whole_batches(key: PartitionKey, mut rest: &[u8]) -> (Vec<Seen>, bool) {
    let mut seen = Vec::new();
    while rest.len() >= BATCH_HEADER_BYTES {
        let Ok(header) = BatchHeader::parse(rest) else { return (seen, false) };
        if header.key != key || check_stamp(rest).is_err() || check_crc(&header, rest).is_err() {
            return (seen, false);
        }
        seen.push(seen_of(&header, rest));
        rest = &rest[header.batch_bytes as usize..];
    }
    (seen, rest.is_empty())
}

/// The same, pack by pack.
fn whole_packs(world: &mut World, key: PartitionKey, mut rest: &[u8]) -> (Vec<Seen>, bool) {
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let Ok(pack) = Pack::parse(rest) else { return (seen, false) };
        if pack.check_crc(rest).is_err() {
            return (seen, false);
        }
        let raw = pack.unpack(&mut world.decompressor, rest).expect("a pack with a right CRC unpacks");
        let (more, whole) = whole_batches(key, &raw);
        assert!(whole && more.len() == pack.batches as usize, "a pack with a right CRC holds other batches");
        assert_eq!((more[0].base, more[more.len() - 1].next), (pack.base_offset, pack.next_offset));
        seen.extend(more);
        rest = &rest[pack.pack_bytes as usize..];
    }
    (seen, true)
}
