//! One try of a fetch: what memory has of its partitions, and what disk has of those that memory has not.

use std::collections::BTreeMap;
use std::rc::Rc;

use ringmain_core::batch::batches;
use ringmain_core::codec::{ALL_CODECS, Codec};
use ringmain_core::fetch::{FetchPlan, Slice};
use ringmain_core::ids::Offset;
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::fetch::{FetchPartition, FetchRequest, FetchedPartitionOutcome, Gap, GapReason, Visibility};

use super::{Fetched, budget, is_enough};
use crate::catch_up::{self, DiskFetch, Wanted, codec_is_taken};
use crate::connection::Part;
use crate::shard::Shard;

/// One try of a fetch: what memory gave, and which partitions must be looked for on disk.
pub(super) struct Attempt {
    pub(super) fetched: Fetched,
    /// Places in the request, with the offset where memory starts.
    pub(super) disk: Vec<(usize, Offset)>,
    /// Bytes of batches that the answer has, as budgets count them: decompressed, unless a filter looks at them, which
    /// stops by itself.
    counted_bytes: usize,
}

impl Attempt {
    pub(super) fn from_memory(shard: &Shard, request: &FetchRequest) -> Self {
        let budget = budget(request);
        let fetched = Fetched { outcomes: Vec::new(), parts: Vec::new(), bytes: 0, memory_bytes: 0, copied: None };
        let mut attempt = Self { fetched, disk: Vec::new(), counted_bytes: 0 };
        for (at, partition) in request.partitions.iter().enumerate() {
            let left = budget.saturating_sub(attempt.counted_bytes);
            let bytes_max = if partition.bytes_max == 0 { left } else { left.min(partition.bytes_max as usize) };
            let mut outcome = outcome_of(shard, partition);
            // Once the budget is used up, the others only learn their ends; at least one batch is always sent.
            if outcome.code.is_ok() && (bytes_max > 0 || attempt.fetched.bytes == 0) {
                attempt.plan_one(shard, request, partition, bytes_max, at, &mut outcome);
            }
            attempt.fetched.outcomes.push(outcome);
        }
        attempt
    }

    fn plan_one(
        &mut self,
        shard: &Shard,
        request: &FetchRequest,
        partition: &FetchPartition,
        bytes_max: usize,
        at: usize,
        outcome: &mut FetchedPartitionOutcome,
    ) {
        let synced_only = request.visibility == Visibility::SyncedEnd;
        let mut store = shard.store.borrow_mut();
        let plan = if request.tags.is_empty() {
            store.plan_fetch(&*shard.memory, partition.key, partition.offset, bytes_max, synced_only)
        } else {
            store.plan_scan(&*shard.memory, partition.key, partition.offset, bytes_max, synced_only)
        };
        match plan {
            FetchPlan::Memory { slices, next_offset, bytes, counted_bytes } => {
                let mut taken = TakenSlices { slices, next_offset, bytes };
                if let Some((codec, behind)) = taken.cut_at_codec(shard, request.codecs) {
                    store.unpin(&*shard.memory, &behind);
                    if taken.slices.is_empty() {
                        return not_taken(outcome, codec);
                    }
                }
                outcome.next_offset = taken.next_offset;
                // Bounded by the budget and one batch.
                outcome.payload_bytes = taken.bytes as u32;
                self.fetched.bytes += taken.bytes;
                self.fetched.memory_bytes += taken.bytes;
                self.counted_bytes += counted_bytes;
                self.fetched.parts.extend(taken.slices.into_iter().map(Part::Block));
            }
            FetchPlan::Disk { memory_from } => self.disk.push((at, memory_from)),
            FetchPlan::AtEnd => {}
            FetchPlan::OutOfRange => {
                say_out_of_range(outcome, partition);
            }
            FetchPlan::UnknownPartition => outcome.code = ErrorCode::NOT_HERE,
        }
    }

    pub(super) fn is_enough(&self, request: &FetchRequest) -> bool {
        is_enough(request, &self.fetched.outcomes, self.fetched.bytes)
    }

    /// Reads what memory did not have. The parts of the reply stay in the order of its partitions.
    pub(super) async fn read_disk(
        &mut self,
        shard: &Rc<Shard>,
        request: &FetchRequest,
        disk: Vec<(usize, Offset)>,
        was_tail: bool,
    ) {
        let mut found: BTreeMap<usize, Vec<Part>> = BTreeMap::new();
        let budget = budget(request);
        for (at, memory_from) in disk {
            let left = budget.saturating_sub(self.counted_bytes);
            if left == 0 && self.counted_bytes > 0 {
                break;
            }
            let partition = &request.partitions[at];
            let bytes_max = if partition.bytes_max == 0 { left } else { left.min(partition.bytes_max as usize) };
            let outcome = &mut self.fetched.outcomes[at];
            let (key, offset, codecs) = (partition.key, partition.offset, request.codecs);
            let scan = !request.tags.is_empty();
            let wanted = Wanted { key, offset, memory_from, bytes_max, was_tail, codecs, scan };
            match catch_up::read(shard, &wanted).await {
                DiskFetch::Batches { parts, next_offset, bytes, counted_bytes } => {
                    outcome.next_offset = next_offset;
                    outcome.payload_bytes = bytes as u32;
                    self.fetched.bytes += bytes;
                    self.counted_bytes += counted_bytes;
                    found.insert(at, parts);
                }
                DiskFetch::NotTaken { codec } => not_taken(outcome, codec),
                DiskFetch::Gap { to, corrupt } => {
                    let reason = if corrupt { GapReason::Corrupt } else { GapReason::LostMemory };
                    outcome.gap = Some(Gap { from: partition.offset, to, reason });
                    outcome.next_offset = to;
                }
                DiskFetch::Gone => *outcome = gone(shard, partition),
                DiskFetch::Failed(message) => {
                    outcome.code = ErrorCode::INTERNAL;
                    outcome.message = message.into();
                }
            }
        }
        self.interleave(found);
    }

    fn interleave(&mut self, mut found: BTreeMap<usize, Vec<Part>>) {
        if found.is_empty() {
            return;
        }
        let mut memory = std::mem::take(&mut self.fetched.parts).into_iter();
        for (at, outcome) in self.fetched.outcomes.iter().enumerate() {
            if let Some(parts) = found.remove(&at) {
                self.fetched.parts.extend(parts);
                continue;
            }
            let mut bytes = 0;
            while bytes < outcome.payload_bytes as usize {
                let Some(part) = memory.next() else { break };
                bytes += part.bytes();
                self.fetched.parts.push(part);
            }
        }
    }
}

/// What memory gave of one partition.
struct TakenSlices {
    slices: Vec<Slice>,
    next_offset: Offset,
    bytes: usize,
}

impl TakenSlices {
    /// Cuts it before the first batch whose codec is not in `codecs`: that codec, and the slices that are given up whole. Most
    /// clients take all, and nothing is looked at.
    fn cut_at_codec(&mut self, shard: &Shard, codecs: u32) -> Option<(u8, Vec<Slice>)> {
        if codecs & ALL_CODECS == ALL_CODECS {
            return None;
        }
        let mut bytes = 0;
        for (place, slice) in self.slices.iter().enumerate() {
            let mut kept = 0;
            for (header, batch) in batches(shard.block_bytes(slice)).filter_map(Result::ok) {
                if header.codec == 0 || codec_is_taken(header.codec, codecs) {
                    kept += batch.len();
                    continue;
                }
                (self.bytes, self.next_offset) = (bytes + kept, header.base_offset);
                let behind = self.slices.split_off(if kept == 0 { place } else { place + 1 });
                if kept > 0
                    && let Some(last) = self.slices.last_mut()
                {
                    // A part of the slice, whose length is a u32.
                    last.bytes = kept as u32;
                }
                return Some((header.codec, behind));
            }
            bytes += kept;
        }
        None
    }
}

fn not_taken(outcome: &mut FetchedPartitionOutcome, codec: u8) {
    outcome.code = ErrorCode::UNSUPPORTED;
    let name = Codec::from_byte(codec).map_or("a codec of another version", Codec::name);
    outcome.message =
        format!("its producer compressed the next batch with {name}, which this client does not take").into();
}

/// The answer for an offset that was given up while it was read.
fn gone(shard: &Shard, partition: &FetchPartition) -> FetchedPartitionOutcome {
    let mut outcome = outcome_of(shard, partition);
    if outcome.code.is_ok() {
        say_out_of_range(&mut outcome, partition);
    }
    outcome
}

fn say_out_of_range(outcome: &mut FetchedPartitionOutcome, partition: &FetchPartition) {
    outcome.code = ErrorCode::OUT_OF_RANGE;
    let (start, end) = (outcome.log_start, outcome.log_end);
    outcome.message = format!("offset {} is outside {start}..{end}", partition.offset).into();
}

fn outcome_of(shard: &Shard, partition: &FetchPartition) -> FetchedPartitionOutcome {
    let mut outcome = FetchedPartitionOutcome {
        key: partition.key,
        next_offset: partition.offset,
        ..FetchedPartitionOutcome::default()
    };
    match shard.store.borrow().ends(partition.key) {
        Some((ends, _)) => {
            outcome.log_start = ends.log_start();
            outcome.log_end = ends.log_end();
            outcome.flushed_end = ends.flushed_end();
            outcome.synced_end = ends.synced_end();
        }
        None => {
            let routing = shard.routing.borrow();
            outcome.code = match routing.topic(partition.key.topic) {
                None => ErrorCode::TOPIC_NOT_FOUND,
                Some(topic) if topic.shard_of(partition.key.partition).is_none() => ErrorCode::PARTITION_NOT_FOUND,
                Some(_) => ErrorCode::NOT_HERE,
            };
        }
    }
    outcome
}
