//! Packing: the work of compressing the runs of one extent, pack by pack, in memory of its own.
//!
//! The flusher copies batches in and says where packs may be cut; whoever has time for it calls [`Packing::step`] until
//! nothing is left. What has not been done by then, or saves nothing, is stored as it is.
//!
//! Owns the bytes of both sides, and keeps their memory from job to job. Knows no clock and no thread.

use crate::codec::Codec;
use crate::compressor::{Compressor, LEVELS, Level};
use crate::crc::crc32c;
use crate::ids::{Offset, PartitionKey, TopicId};
use crate::limits::{EXTENT_BYTES_MAX, PACK_RAW_BYTES};
use crate::pack::{PACK_HEADER_BYTES, Pack, pack_bytes};

/// A pack that saves less than this part of its bytes is stored as it is.
const SAVES_AT_LEAST: usize = 16;

/// Some whole batches of one partition that were copied in.
#[derive(Clone, Copy, Debug)]
struct Cut {
    raw_from: usize,
    raw_bytes: usize,
    base_offset: Offset,
    next_offset: Offset,
    batches: u32,
    /// Its producer has compressed a batch of it: nothing more is to be gained.
    leave: bool,
}

/// One run under work.
#[derive(Clone, Debug)]
struct Run {
    /// Which run of the plan.
    index: usize,
    key: PartitionKey,
    level: Level,
    /// To learn from: the result is thrown away.
    sample: bool,
    cuts: std::ops::Range<usize>,
    packed_from: usize,
    saves: bool,
    done: bool,
}

/// What became of a run that was packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedRun<'a> {
    /// Which run of the plan.
    pub index: usize,
    /// What is stored for it.
    pub stored: &'a [u8],
    /// The codec for its directory entry.
    pub codec: Codec,
    /// CRC32C of what is stored.
    pub crc: u32,
}

/// What one job showed of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The topic.
    pub topic: TopicId,
    /// How hard its batches were compressed.
    pub level: Level,
    /// Bytes that were compressed.
    pub raw_bytes: usize,
    /// Bytes they became; as many as they were, where nothing is saved.
    pub packed_bytes: usize,
}

/// A job. Made once for each shard and used again.
#[derive(Debug, Default)]
pub struct Packing {
    raw: Vec<u8>,
    packed: Vec<u8>,
    runs: Vec<Run>,
    cuts: Vec<Cut>,
    results: Vec<(usize, std::ops::Range<usize>, Codec, u32)>,
    seen: Vec<Seen>,
    /// Where the work goes on: run and cut.
    at: (usize, usize),
    /// Bytes compressed at each level.
    compressed_bytes: [usize; LEVELS],
}

impl Packing {
    /// Empties it; keeps the memory.
    pub fn clear(&mut self) {
        self.raw.clear();
        self.packed.clear();
        self.runs.clear();
        self.cuts.clear();
        self.results.clear();
        self.seen.clear();
        self.at = (0, 0);
        self.compressed_bytes = [0; LEVELS];
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Bytes that were copied in.
    #[must_use]
    pub const fn raw_bytes(&self) -> usize {
        self.raw.len()
    }

    /// Bytes that were compressed at each level.
    #[must_use]
    pub const fn compressed_bytes(&self) -> &[usize; LEVELS] {
        &self.compressed_bytes
    }

    /// Begins the run `index` of the plan; its batches follow. The result of a `sample` is only looked at.
    pub fn begin_run(&mut self, index: usize, key: PartitionKey, level: Level, sample: bool) {
        let at = self.cuts.len();
        self.runs.push(Run { index, key, level, sample, cuts: at..at, packed_from: 0, saves: false, done: false });
    }

    /// Adds whole batches of the run that was begun last, behind those before. `compressed` says that their producer has
    /// compressed one of them.
    ///
    /// # Panics
    /// When no run was begun, or more is put in than an extent takes.
    pub fn put(&mut self, batches: &[u8], offsets: std::ops::Range<Offset>, batch_count: u32, compressed: bool) {
        assert!(self.raw.len() + batches.len() <= EXTENT_BYTES_MAX, "an extent is packed at a time");
        let run = self.runs.last_mut().expect("a run was begun");
        let raw_from = self.raw.len();
        if self.raw.capacity() == 0 {
            self.raw.reserve_exact(EXTENT_BYTES_MAX);
        }
        self.raw.extend_from_slice(batches);
        match self.cuts[run.cuts.clone()].last_mut() {
            Some(cut) if cut.raw_bytes + batches.len() <= PACK_RAW_BYTES => {
                cut.raw_bytes += batches.len();
                cut.next_offset = offsets.end;
                cut.batches += batch_count;
                cut.leave |= compressed;
            }
            _ => {
                self.cuts.push(Cut {
                    raw_from,
                    raw_bytes: batches.len(),
                    base_offset: offsets.start,
                    next_offset: offsets.end,
                    batches: batch_count,
                    leave: compressed,
                });
                run.cuts.end = self.cuts.len();
            }
        }
    }

    /// Works on one more pack, about 64 KiB. Returns false when nothing is left to do.
    pub fn step(&mut self, compressor: &mut Compressor) -> bool {
        let Some(run) = self.runs.get_mut(self.at.0) else { return false };
        if self.packed.capacity() == 0 {
            // A run that saves nothing is taken back, so what is kept is smaller than what came; one pack and the
            // headers of its run are on top of that for a moment.
            self.packed.reserve_exact(EXTENT_BYTES_MAX + EXTENT_BYTES_MAX / 8);
        }
        if self.at.1 == 0 {
            run.packed_from = self.packed.len();
        }
        let cut_at = run.cuts.start + self.at.1;
        let goes_on = if cut_at < run.cuts.end {
            let cut = self.cuts[cut_at];
            let raw = &self.raw[cut.raw_from..cut.raw_from + cut.raw_bytes];
            let (codec, size) = put_pack(&mut self.packed, compressor, run.level, raw, &cut);
            if !cut.leave {
                self.compressed_bytes[run.level as usize] += cut.raw_bytes;
                note(&mut self.seen, run, cut.raw_bytes, size);
            }
            run.saves |= codec != Codec::None;
            self.at.1 += 1;
            // One that saves nothing at its front is not worth the rest.
            run.saves && cut_at + 1 < run.cuts.end
        } else {
            false
        };
        if !goes_on {
            self.end_run();
        }
        self.at.0 < self.runs.len()
    }

    fn end_run(&mut self) {
        let run = &mut self.runs[self.at.0];
        self.at = (self.at.0 + 1, 0);
        run.done = true;
        let raw_bytes: usize = self.cuts[run.cuts.clone()].iter().map(|cut| cut.raw_bytes).sum();
        let stored = self.packed.len() - run.packed_from;
        if run.sample || !run.saves || stored + raw_bytes / SAVES_AT_LEAST > raw_bytes {
            self.packed.truncate(run.packed_from);
            return;
        }
        let range = run.packed_from..self.packed.len();
        let crc = crc32c(&self.packed[range.clone()]);
        self.results.push((run.index, range, run.level.codec(), crc));
    }

    /// The runs that are smaller now, in the order of the plan. All others are to be stored as they are.
    pub fn results(&self) -> impl Iterator<Item = PackedRun<'_>> {
        self.results.iter().map(|(index, range, codec, crc)| PackedRun {
            index: *index,
            stored: &self.packed[range.clone()],
            codec: *codec,
            crc: *crc,
        })
    }

    /// What was learned of the topics.
    #[must_use]
    pub fn seen(&self) -> &[Seen] {
        &self.seen
    }
}

/// Appends a pack of `raw`; gives its codec and how many bytes stand for the batches.
fn put_pack(packed: &mut Vec<u8>, compressor: &mut Compressor, level: Level, raw: &[u8], cut: &Cut) -> (Codec, usize) {
    let from = packed.len();
    let body = from + PACK_HEADER_BYTES;
    packed.resize(from + pack_bytes(raw.len()), 0);
    // What does not fit here saves too little.
    let most = raw.len() - (raw.len() / SAVES_AT_LEAST).max(1);
    let size = if cut.leave { None } else { compressor.compress(level, raw, &mut packed[body..body + most]) };
    let (codec, size) = match size {
        Some(size) => (level.codec(), size),
        None => {
            packed[body..body + raw.len()].copy_from_slice(raw);
            (Codec::None, raw.len())
        }
    };
    // An extent bounds all sizes.
    let pack = Pack {
        pack_bytes: pack_bytes(size) as u32,
        codec,
        base_offset: cut.base_offset,
        next_offset: cut.next_offset,
        raw_bytes: raw.len() as u32,
        packed_bytes: size as u32,
        batches: cut.batches,
    };
    packed.truncate(from + pack.pack_bytes as usize);
    pack.seal(&mut packed[from..]);
    (codec, size)
}

fn note(seen: &mut Vec<Seen>, run: &Run, raw_bytes: usize, packed_bytes: usize) {
    let (topic, level) = (run.key.topic, run.level);
    // Runs of a topic stand side by side.
    match seen.last_mut() {
        Some(last) if last.topic == topic && last.level == level => {
            last.raw_bytes += raw_bytes;
            last.packed_bytes += packed_bytes;
        }
        _ => seen.push(Seen { topic, level, raw_bytes, packed_bytes }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::compressor::Decompressor;
    use crate::pack::unpack_run;

    fn key(topic: u64) -> PartitionKey {
        PartitionKey::new(topic, 0)
    }

    fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 1u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        };
        (0..bytes).map(|_| next()).collect()
    }

    fn run_of(packing: &mut Packing, index: usize, pieces: &[Vec<u8>]) {
        packing.begin_run(index, key(index as u64), Level::Zstd, false);
        for (at, piece) in pieces.iter().enumerate() {
            packing.put(piece, Offset(at as u64)..Offset(at as u64 + 1), 1, false);
        }
    }

    fn finish(packing: &mut Packing) {
        let mut compressor = Compressor::default();
        while packing.step(&mut compressor) {}
    }

    #[test]
    fn a_run_that_saves_nothing_is_given_up_after_its_first_pack() {
        let mut packing = Packing::default();
        let pieces: Vec<_> = (0..8).map(|_| noise(PACK_RAW_BYTES)).collect();
        run_of(&mut packing, 0, &pieces);
        run_of(&mut packing, 1, &[vec![7; 8000]]);
        finish(&mut packing);
        assert_eq!(packing.results().map(|run| run.index).collect::<Vec<_>>(), [1]);
        let seen = packing.seen();
        assert_eq!((seen[0].raw_bytes, seen[0].packed_bytes), (PACK_RAW_BYTES, PACK_RAW_BYTES));
        assert_eq!(packing.compressed_bytes()[Level::Zstd as usize], PACK_RAW_BYTES + 8000);
    }

    #[test]
    fn what_a_producer_has_compressed_is_left_alone() {
        let mut packing = Packing::default();
        packing.begin_run(0, key(1), Level::Lz4, false);
        packing.put(&[7; 800], Offset(0)..Offset(1), 1, true);
        finish(&mut packing);
        assert_eq!(packing.results().count(), 0);
        assert!(packing.seen().is_empty());
    }

    #[test]
    fn a_sample_teaches_and_stores_nothing() {
        let mut packing = Packing::default();
        packing.begin_run(3, key(1), Level::Quick, true);
        packing.put(&[7; 8000], Offset(0)..Offset(1), 1, false);
        finish(&mut packing);
        assert_eq!(packing.results().count(), 0);
        assert!(packing.seen()[0].packed_bytes < 1000);
    }

    #[test]
    fn what_was_not_reached_is_no_result() {
        let mut packing = Packing::default();
        run_of(&mut packing, 0, &[vec![7; PACK_RAW_BYTES], vec![8; PACK_RAW_BYTES]]);
        run_of(&mut packing, 1, &[vec![7; 8000]]);
        let mut compressor = Compressor::default();
        assert!(packing.step(&mut compressor));
        assert_eq!(packing.results().count(), 0);
        assert!(packing.step(&mut compressor));
        assert_eq!(packing.results().count(), 1);
        assert!(!packing.step(&mut compressor));
        packing.clear();
        assert!(packing.is_empty() && !packing.step(&mut compressor));
    }

    proptest! {
        #[test]
        fn packed_runs_give_back_their_batches_and_are_smaller(
            runs in proptest::collection::vec(
                proptest::collection::vec((1usize..3000, 0u8..4, any::<bool>()), 1..40), 1..6),
            level in 0usize..3,
        ) {
            let level = [Level::Lz4, Level::Quick, Level::Zstd][level];
            let mut packing = Packing::default();
            let mut whole = Vec::new();
            for (index, pieces) in runs.iter().enumerate() {
                packing.begin_run(index, key(index as u64), level, false);
                let mut run = Vec::new();
                for (at, (size, byte, random)) in pieces.iter().enumerate() {
                    let size = size.next_multiple_of(8);
                    let piece = if *random { noise(size) } else { vec![*byte; size] };
                    packing.put(&piece, Offset(at as u64)..Offset(at as u64 + 1), 1, false);
                    run.extend_from_slice(&piece);
                }
                whole.push(run);
            }
            finish(&mut packing);
            let mut decompressor = Decompressor::default();
            for result in packing.results() {
                let raw = &whole[result.index];
                prop_assert!(result.stored.len() < raw.len());
                prop_assert_eq!(result.crc, crc32c(result.stored));
                prop_assert_eq!(&unpack_run(&mut decompressor, result.stored, raw.len()).unwrap(), raw);
            }
        }
    }
}
