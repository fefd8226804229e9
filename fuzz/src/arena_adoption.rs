//! The arena of a dead process: header, descriptors, blocks, and what the next process takes over.

use std::collections::BTreeMap;
use std::io;

use ringmain_core::adopt::{LiveBlock, adopt};
use ringmain_core::batch::{BatchHeader, seal_crc, stamp};
use ringmain_core::block::{BlockClass, BlockId, BlockMemory};
use ringmain_core::crc::crc32c;
use ringmain_core::ids::{Durability, Epoch, Offset, PartitionKey, TopicId};
use ringmain_core::store::{PartitionStart, ShardStore};
use ringmain_shard::arena::image::{ArenaBytes, ArenaImage};
use ringmain_shard::arena::{SLAB_SLOTS, arena_bytes};

use super::input::{Input, put_u32, u32_at};

/// Mend the header's CRC.
pub const MEND_HEADER: u8 = 1;
/// Mend the CRCs of descriptors.
pub const MEND_DESCRIPTORS: u8 = 2;
/// Mend the CRCs of batches.
pub const MEND_BATCHES: u8 = 4;
/// Number the offsets of each partition through.
pub const MEND_OFFSETS: u8 = 8;
/// Size of the part of a descriptor that is used.
const DESCRIPTOR_BYTES: usize = 36;

/// Pieces of an arena; all else is zero.
#[derive(Default)]
struct Pieces(BTreeMap<u64, Vec<u8>>);

impl ArenaBytes for Pieces {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        let end = at + into.len() as u64;
        for (&place, bytes) in &self.0 {
            let (from, to) = (place.max(at), (place + bytes.len() as u64).min(end));
            if from < to {
                into[(from - at) as usize..(to - at) as usize]
                    .copy_from_slice(&bytes[(from - place) as usize..(to - place) as usize]);
            }
        }
        Ok(())
    }
}

/// The blocks as adoption reads them.
struct Memory(BTreeMap<BlockId, Vec<u8>>);

impl BlockMemory for Memory {
    fn slabs(&self) -> usize {
        8
    }

    fn take(&self, _: BlockId, _: TopicId, _: BlockClass, _: u64) {}

    fn write(&self, _: BlockId, _: usize, _: &[u8]) {}

    fn publish(&self, _: BlockId, _: usize) {}

    fn seal(&self, _: BlockId) {}

    fn free(&self, _: BlockId) {}

    fn read(&self, block: BlockId, at: usize, bytes: usize) -> &[u8] {
        &self.0[&block][at..at + bytes]
    }
}

/// First byte: what to mend. Then the header's copy (84 bytes), and blocks: slab (u8), slot (u8), 36 bytes of descriptor,
/// size (u16), bytes.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mend = input.u8();
    let mut header = input.array::<84>().to_vec();
    if mend & MEND_HEADER != 0 {
        let crc = crc32c(&header[..80]);
        put_u32(&mut header, 80, crc);
    }
    let slab_count = u32_at(&header, 60);
    let mut pieces = Pieces(BTreeMap::from([(0, header)]));
    let slabs = slab_count.min(8);
    let mut ends = BTreeMap::new();
    while !input.is_empty() && pieces.0.len() < 64 {
        let (slab, slot) = (u32::from(input.u8()) % slabs.max(1), u32::from(input.u8()) % SLAB_SLOTS as u32);
        let mut descriptor = input.array::<DESCRIPTOR_BYTES>().to_vec();
        if mend & MEND_DESCRIPTORS != 0 {
            let crc = crc32c(&descriptor[8..32]);
            put_u32(&mut descriptor, 32, crc);
        }
        let size = usize::from(input.u16());
        let mut bytes = input.bytes(size).to_vec();
        mend_batches(&mut bytes, mend, &mut ends);
        let class = usize::from(descriptor[24]) % 3;
        let block_bytes = [16 << 10, 256 << 10, 2 << 20][class];
        let slabs_at = arena_bytes(slab_count) - u64::from(slab_count) * (2 << 20);
        let place = slabs_at + (u64::from(slab) << 21) + u64::from(slot) * block_bytes;
        pieces.0.insert(4096 + u64::from(slab * SLAB_SLOTS as u32 + slot) * 64, descriptor);
        pieces.0.insert(place, bytes);
    }
    let Ok(image) = ArenaImage::read(pieces, arena_bytes(slab_count)) else { return };
    let mut live = Vec::new();
    let mut memory = Memory(BTreeMap::new());
    for slab in 0..image.header().slab_count.min(8) {
        for found in image.blocks(slab).expect("memory can be read") {
            let Ok(found) = found else { continue };
            let committed = image.committed(&found).expect("memory can be read");
            assert_eq!(committed.len(), found.committed_bytes as usize);
            memory.0.insert(BlockId(found.block), committed);
            live.push(LiveBlock {
                block: BlockId(found.block),
                topic: found.topic,
                class: BlockClass::from_byte(found.class).expect("descriptors are checked"),
                sequence: found.sequence,
                committed: found.committed_bytes as usize,
            });
        }
    }
    live.sort_unstable_by_key(|block| block.sequence);
    // Refused by whoever lists the blocks of an arena.
    if live.windows(2).all(|pair| pair[0].sequence != pair[1].sequence) {
        take_over(&memory, live);
    }
}

fn take_over(memory: &Memory, live: Vec<LiveBlock>) {
    let mut store = ShardStore::new(8, Epoch(1));
    for (partition, log_end) in [(0, 0), (1, 3), (2, 1 << 32)] {
        let added = store.add_partition(PartitionStart {
            key: PartitionKey::new(1, partition),
            store: 0,
            log_start: Offset(0),
            log_end: Offset(log_end),
            last_epoch: Epoch(0),
            durability_floor: Durability::Memory,
        });
        assert!(added, "each partition is there once");
    }
    let blocks = live.len();
    let before = store.snapshot();
    let Ok(adopted) = adopt(&mut store, memory, live) else { return };
    assert!(adopted.free.len() <= blocks);
    for (key, (ends, _)) in store.snapshot() {
        assert!(ends.log_end() >= before[&key].0.log_end(), "{key} has lost records");
    }
    // A shard goes on with it: one more append to each partition, and the cache is given back.
    for partition in 0..3 {
        let key = PartitionKey::new(1, partition);
        let batch = super::writer::bare_batch(key, Offset(0), 2);
        let Ok(header) = BatchHeader::parse(&batch) else { return };
        let _ = store.append(memory, &header, &batch, 9, 9);
    }
    while store.evict_one(memory) {}
}

/// Gives each batch its CRCs, and offsets that go on, as the flags say.
fn mend_batches(mut bytes: &mut [u8], mend: u8, ends: &mut BTreeMap<PartitionKey, Offset>) {
    while let Ok(header) = BatchHeader::parse(bytes) {
        let (batch, rest) = bytes.split_at_mut(header.batch_bytes as usize);
        let mut base_offset = header.base_offset;
        if mend & MEND_OFFSETS != 0 {
            let end = ends.entry(header.key).or_default();
            base_offset = *end;
            *end = end.plus(u64::from(header.record_count));
        }
        if mend & MEND_BATCHES != 0 {
            seal_crc(batch);
            stamp(batch, base_offset, header.append_time_ms, header.leader_epoch);
        }
        bytes = rest;
    }
}
