//! Reading from compressed runs: pack by pack. A client that takes the codec gets a pack as it is stored; for others, and
//! where only a part of its batches may be shown, it is unpacked.

use std::cell::RefCell;
use std::collections::VecDeque;

use bytes::Bytes;
use ringmain_core::codec::Codec;
use ringmain_core::compressor::Decompressor;
use ringmain_core::ids::SegmentSequence;
use ringmain_core::pack::{PACK_HEADER_BYTES, Pack, PackError};

use super::{End, Got, Place, Walk, Wanted, take_batches};
use crate::runtime::yield_if_needed;
use crate::shard::Shard;

/// Unpacked packs kept for readers that take one in several fetches.
const KEPT_MAX: usize = 8;
/// Larger ones are not kept: 1 MiB in all.
const KEPT_BYTES_MAX: usize = 128 * 1024;

/// Unpacks, and remembers what it has unpacked last.
#[derive(Default)]
pub(super) struct Unpacked {
    decompressor: RefCell<Decompressor>,
    kept: RefCell<VecDeque<(SegmentSequence, u64, Bytes)>>,
}

impl Unpacked {
    pub(super) fn forget(&self, segment: SegmentSequence) {
        self.kept.borrow_mut().retain(|(other, ..)| *other != segment);
    }

    /// The batches of the pack at `place` of the segment's file.
    fn batches(&self, pack: &Pack, bytes: &[u8], segment: SegmentSequence, place: u64) -> Result<Bytes, PackError> {
        let mut kept = self.kept.borrow_mut();
        if let Some((_, _, batches)) = kept.iter().find(|(other, at, _)| (*other, *at) == (segment, place)) {
            return Ok(batches.clone());
        }
        let batches = Bytes::from(pack.unpack(&mut self.decompressor.borrow_mut(), bytes)?);
        if batches.len() <= KEPT_BYTES_MAX {
            if kept.len() >= KEPT_MAX {
                kept.pop_front();
            }
            kept.push_back((segment, place, batches.clone()));
        }
        Ok(batches)
    }
}

/// Takes packs from `bytes`, which stand at `place` of the run. A pack that is not taken whole is not walked past: the
/// next fetch begins with it again.
pub(super) async fn take_packs(shard: &Shard, bytes: &Bytes, place: &Place, wanted: &Wanted, got: &mut Got) -> Walk {
    let (mut at, mut as_stored) = (0, 0..0);
    let end = loop {
        let rest = &bytes[at..];
        let pack = match Pack::parse(rest) {
            Ok(pack) => pack,
            Err(PackError::Truncated { needs, .. }) => break End::Cut { needs },
            Err(_) => break End::Damaged,
        };
        let size = pack.pack_bytes as usize;
        if pack.next_offset <= got.next_offset {
            at += size;
            continue;
        }
        if pack.check_crc(rest).is_err() {
            break End::Damaged;
        }
        let taken = !wanted.scan && pack.codec != Codec::None && pack.codec.bit() & wanted.codecs != 0;
        if taken && pack.next_offset <= wanted.memory_from {
            if got.counted_bytes > 0 && got.counted_bytes + pack.raw_bytes as usize > wanted.bytes_max {
                break End::Enough;
            }
            if as_stored.end != at {
                as_stored.start = at;
            }
            at += size;
            as_stored.end = at;
            got.counted_bytes += pack.raw_bytes as usize;
            got.next_offset = pack.next_offset;
            continue;
        }
        push_stored(bytes, &mut as_stored, got);
        let batches = if pack.codec == Codec::None {
            // A copy, so that a part of it does not keep all that was read.
            Bytes::copy_from_slice(&rest[PACK_HEADER_BYTES..PACK_HEADER_BYTES + pack.raw_bytes as usize])
        } else {
            let at_file = u64::from(place.entry.place) + u64::from(place.at) + at as u64;
            match shard.readers.unpacked.batches(&pack, rest, place.segment, at_file) {
                Ok(batches) => batches,
                Err(_) => break End::Damaged,
            }
        };
        let walk = take_batches(&batches, wanted, got);
        match walk.end {
            End::Cut { .. } if walk.walked == batches.len() => at += size,
            End::Cut { .. } | End::Damaged => break End::Damaged,
            end @ (End::Enough | End::NotTaken { .. }) => break end,
        }
        yield_if_needed().await;
    };
    push_stored(bytes, &mut as_stored, got);
    Walk { walked: at, end }
}

/// Packs that stand side by side are one part of the reply.
fn push_stored(bytes: &Bytes, packs: &mut std::ops::Range<usize>, got: &mut Got) {
    if packs.start < packs.end {
        got.push(bytes, std::mem::take(packs));
    }
}
