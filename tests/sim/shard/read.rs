//! What a reader sees of the simulated shard: memory, index and disk together.

use ringmain_core::block::BlockMemory;
use ringmain_core::crc::crc32c;
use ringmain_core::fetch::FetchPlan;
use ringmain_core::ids::{Offset, PartitionKey, SegmentSequence};
use ringmain_core::index::{FOOTER_PAGE_BYTES, IndexEntry, LookupStep};
use ringmain_core::recover::SegmentSource;

use super::{Shard, World};
use crate::ledger::{Seen, read_batches};

impl Shard {
    /// Everything that a reader from the log start sees of a partition.
    pub fn read_all(&mut self, world: &mut World, key: PartitionKey) -> Vec<Seen> {
        let mut all: Vec<Seen> = Vec::new();
        let (ends, _) = self.store.ends(key).expect("the partition is there");
        let mut offset = ends.log_start();
        loop {
            let plan = self.store.plan_fetch(&*self.arena, key, offset, 4096, false);
            let seen = match plan {
                FetchPlan::AtEnd => return all,
                FetchPlan::Memory { slices, next_offset, .. } => {
                    let read = |slice: &ringmain_core::fetch::Slice| {
                        read_batches(self.arena.read(slice.block, slice.at as usize, slice.bytes as usize))
                    };
                    let seen: Vec<Seen> = slices.iter().flat_map(read).collect();
                    self.store.unpin(&*self.arena, &slices);
                    assert_eq!(seen.last().map(|last| last.next), Some(next_offset));
                    seen
                }
                FetchPlan::Disk { memory_from } => match self.find(world, key, offset) {
                    Some((segment, entry)) if entry.base_offset < memory_from => read_run(world, segment, &entry),
                    _ => {
                        // A gap up to memory.
                        offset = memory_from;
                        continue;
                    }
                },
                other => panic!("{key} at {offset}: {other:?}"),
            };
            if seen.is_empty() {
                assert!(world.damaged, "an empty run");
                return all;
            }
            all.extend(seen.iter().filter(|seen| seen.base >= offset));
            offset = all.last().map_or(offset, |last| last.next).max(seen.last().map_or(offset, |last| last.next));
        }
    }

    fn find(&self, world: &mut World, key: PartitionKey, offset: Offset) -> Option<(SegmentSequence, IndexEntry)> {
        let mut lookup = self.index.lookup(key, offset);
        loop {
            match lookup.step(&self.index) {
                LookupStep::Found(segment, entry) => return Some((segment, entry)),
                LookupStep::NotFound => return None,
                LookupStep::ReadPage(read) => {
                    let mut page = vec![0; FOOTER_PAGE_BYTES];
                    world.disk.read(read.segment, read.place, &mut page).expect("the disk reads");
                    match self.index.decode_page(&read, &page).expect("the segment is there") {
                        Ok(entries) => lookup.feed(&self.index, &read, &entries),
                        Err(error) => {
                            assert!(world.damaged, "a footer page is not whole: {error}");
                            return None;
                        }
                    }
                }
            }
        }
    }
}

/// The batches of a run, from disk.
fn read_run(world: &mut World, segment: SegmentSequence, entry: &IndexEntry) -> Vec<Seen> {
    let from = u64::from(entry.place) / 4096 * 4096;
    let within = (u64::from(entry.place) - from) as usize;
    let mut bytes = vec![0; (within + entry.stored_bytes as usize).next_multiple_of(4096)];
    world.disk.read(segment, from, &mut bytes).expect("the disk reads");
    let run = &bytes[within..within + entry.stored_bytes as usize];
    if crc32c(run) != entry.crc {
        assert!(world.damaged, "a run is not whole");
        return Vec::new();
    }
    let seen = read_batches(run);
    assert_eq!(seen.len(), entry.batches as usize);
    assert_eq!(seen.first().map(|first| first.base), Some(entry.base_offset));
    assert_eq!(seen.last().map(|last| last.next), Some(entry.next_offset));
    seen
}
