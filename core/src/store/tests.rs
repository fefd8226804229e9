//! The store against a plain model: lists of batches, and what of them is flushed and synced.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::acks::RunMark;
use crate::adopt::{AdoptError, adopt};
use crate::batch::{batches, seal_crc};
use crate::fetch::FetchPlan;
use crate::flush::{FlushPlan, FlushScope};
use crate::test_memory::TestMemory;

const SLABS: usize = 3;
const KEYS: [PartitionKey; 4] =
    [PartitionKey::new(1, 0), PartitionKey::new(1, 1), PartitionKey::new(2, 0), PartitionKey::new(3, 7)];

fn batch_of(key: PartitionKey, records: u32, body: usize, mark: u64) -> Vec<u8> {
    let size = (BATCH_HEADER_BYTES + body).next_multiple_of(8);
    // Every third one stands for much more than it has.
    let (codec, raw_body_bytes) = if mark.is_multiple_of(3) { (2, 20_000) } else { (0, 0) };
    let header = BatchHeader {
        batch_bytes: size as u32,
        record_count: records,
        key,
        base_timestamp_ms: mark as i64,
        codec,
        raw_body_bytes,
        ..Default::default()
    };
    let mut bytes = vec![mark as u8; size];
    header.write(&mut bytes);
    seal_crc(&mut bytes);
    bytes
}

fn start(key: PartitionKey, log_end: u64) -> PartitionStart {
    PartitionStart {
        key,
        store: (key.partition % 2) as u16,
        log_start: Offset(0),
        log_end: Offset(log_end),
        last_epoch: Epoch(1),
        durability_floor: Durability::Memory,
    }
}

#[derive(Clone, Debug)]
enum Op {
    Append { key: usize, records: u32, body: usize },
    Plan { all: bool, only: usize, bytes_max: usize },
    Complete,
    Sync,
    Fetch { key: usize, back: u64, bytes_max: usize, synced_only: bool },
    Release,
    Evict,
    Remove { key: usize },
    Restart { damage: Option<usize> },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let body = prop_oneof![8 => 0usize..400, 3 => 5_000usize..40_000, 1 => 200_000usize..600_000];
    let op = prop_oneof![
        12 => (0usize..4, 1u32..5, body).prop_map(|(key, records, body)| Op::Append { key, records, body }),
        4 => (any::<bool>(), 0usize..4, 1usize..300_000)
            .prop_map(|(all, only, bytes_max)| Op::Plan { all, only, bytes_max }),
        4 => Just(Op::Complete),
        2 => Just(Op::Sync),
        5 => (0usize..4, 0u64..40, prop_oneof![1 => Just(0usize), 9 => 1usize..60_000], any::<bool>())
            .prop_map(|(key, back, bytes_max, synced_only)| Op::Fetch { key, back, bytes_max, synced_only }),
        3 => Just(Op::Release),
        2 => Just(Op::Evict),
        1 => (0usize..4).prop_map(|key| Op::Remove { key }),
        1 => proptest::option::weighted(0.3, 0usize..1_000_000).prop_map(|damage| Op::Restart { damage }),
    ];
    proptest::collection::vec(op, 1..120)
}

#[derive(Default)]
struct ModelPartition {
    /// `(base, next, mark)` of each batch ever appended.
    batches: Vec<(u64, u64, u64)>,
    flushed: u64,
    synced: u64,
}

struct Harness {
    memory: TestMemory,
    store: ShardStore,
    model: BTreeMap<PartitionKey, ModelPartition>,
    plans: VecDeque<FlushPlan>,
    unsynced: Vec<RunMark>,
    pinned: Vec<crate::fetch::Slice>,
    after: Option<PartitionKey>,
    next_mark: u64,
}

impl Harness {
    fn new() -> Self {
        let mut harness = Self {
            memory: TestMemory::new(SLABS),
            store: ShardStore::new(SLABS, Epoch(1)),
            model: BTreeMap::new(),
            plans: VecDeque::new(),
            unsynced: Vec::new(),
            pinned: Vec::new(),
            after: None,
            next_mark: 1,
        };
        for key in KEYS {
            assert!(harness.store.add_partition(start(key, 0)));
            harness.model.insert(key, ModelPartition::default());
        }
        harness
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Append { key, records, body } => self.append(KEYS[key], records, body),
            Op::Plan { all, only, bytes_max } => {
                let keys = BTreeSet::from([KEYS[only]]);
                let scope = if all { FlushScope::All } else { FlushScope::Only(&keys) };
                if let Some(plan) = self.store.plan_flush(scope, &mut self.after, bytes_max, 3, 5) {
                    self.check_plan(&plan, bytes_max);
                    self.store.flush_copied(&self.memory, &plan);
                    self.plans.push_back(plan);
                }
            }
            Op::Complete => self.complete(),
            Op::Sync => {
                for mark in std::mem::take(&mut self.unsynced) {
                    self.store.synced(&mark);
                    if let Some(model) = self.model.get_mut(&mark.key) {
                        model.synced = mark.next_offset.0;
                    }
                }
            }
            Op::Fetch { key, back, bytes_max, synced_only } => self.fetch(KEYS[key], back, bytes_max, synced_only),
            Op::Release => {
                for slice in std::mem::take(&mut self.pinned) {
                    self.store.unpin(&self.memory, &[slice]);
                }
            }
            Op::Evict => {
                self.store.evict_one(&self.memory);
            }
            Op::Remove { key } => self.remove(KEYS[key].topic),
            Op::Restart { damage } => self.restart(damage),
        }
        self.check_ends();
    }

    fn append(&mut self, key: PartitionKey, records: u32, body: usize) {
        let bytes = batch_of(key, records, body, self.next_mark);
        let header = BatchHeader::parse(&bytes).unwrap();
        let known = self.model.get_mut(&key);
        match self.store.append(&self.memory, &header, &bytes, 5, 77) {
            Ok(appended) => {
                let model = known.expect("only known partitions take batches");
                let end = model.batches.last().map_or(0, |batch| batch.1);
                assert_eq!(appended.base_offset.0, end, "offsets are dense");
                model.batches.push((end, end + u64::from(records), self.next_mark));
                self.next_mark += 1;
            }
            Err(AppendError::UnknownPartition(_)) => assert!(known.is_none()),
            Err(AppendError::Busy { dirty_bytes }) => {
                assert!(dirty_bytes > 0 || !self.pinned.is_empty(), "busy with nothing to wait for");
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn check_plan(&self, plan: &FlushPlan, bytes_max: usize) {
        assert!(plan.runs.windows(2).all(|pair| pair[0].key < pair[1].key), "runs are sorted and unique");
        assert!(plan.bytes <= bytes_max || plan.runs.iter().map(|run| run.spans.len()).sum::<usize>() == 1);
        for run in &plan.runs {
            let mut next = run.base_offset;
            let mut count = 0;
            for span in &run.spans {
                for batch in batches(self.memory.read(span.block, span.at as usize, span.bytes as usize)) {
                    let (header, _) = batch.unwrap();
                    assert_eq!((header.key, header.base_offset), (run.key, next), "a run is one partition, dense");
                    next = header.next_offset();
                    count += 1;
                }
            }
            assert_eq!((next, count), (run.next_offset, run.batches));
        }
    }

    fn complete(&mut self) {
        let Some(plan) = self.plans.pop_front() else { return };
        self.store.flush_completed(&self.memory, &plan);
        for mark in plan.marks() {
            if let Some(model) = self.model.get_mut(&mark.key) {
                model.flushed = mark.next_offset.0;
                self.unsynced.push(mark);
            }
        }
    }

    fn fetch(&mut self, key: PartitionKey, back: u64, bytes_max: usize, synced_only: bool) {
        let Some(model) = self.model.get(&key) else {
            let plan = self.store.plan_fetch(&self.memory, key, Offset(0), bytes_max, synced_only);
            return assert_eq!(plan, FetchPlan::UnknownPartition);
        };
        let end = model.batches.last().map_or(0, |batch| batch.1);
        let visible = if synced_only { model.synced } else { end };
        let offset = end.saturating_sub(back);
        match self.store.plan_fetch(&self.memory, key, Offset(offset), bytes_max, synced_only) {
            FetchPlan::Memory { slices, next_offset, bytes, counted_bytes: raw_bytes } => {
                let expected: Vec<_> = model
                    .batches
                    .iter()
                    .filter(|batch| batch.1 > offset && batch.1 <= next_offset.0)
                    .copied()
                    .collect();
                let mut got = Vec::new();
                let mut sizes = (0, 0);
                for slice in &slices {
                    for batch in batches(self.memory.read(slice.block, slice.at as usize, slice.bytes as usize)) {
                        let (header, _) = batch.unwrap();
                        if header.key == key {
                            sizes = (sizes.0 + header.batch_bytes as usize, sizes.1 + header.raw_bytes());
                            got.push((header.base_offset.0, header.next_offset().0, header.base_timestamp_ms as u64));
                        }
                    }
                }
                assert_eq!(got, expected, "a fetch gives just the batches from its offset on");
                assert!(next_offset.0 <= visible && !got.is_empty());
                assert_eq!((bytes, raw_bytes), sizes);
                assert!(raw_bytes <= bytes_max || got.len() == 1, "the budget holds but for the first batch");
                self.pinned.extend(slices);
            }
            FetchPlan::Disk { memory_from } => {
                assert!(offset < memory_from.0 && memory_from.0 <= model.flushed.max(offset + 1));
            }
            FetchPlan::AtEnd => assert!(offset >= visible),
            other => panic!("{other:?}"),
        }
    }

    fn remove(&mut self, topic: TopicId) {
        self.store.remove_topic(&self.memory, topic);
        self.model.retain(|key, _| key.topic != topic);
    }

    /// The process dies: pins and plans are gone, what was flushed is in the log, the rest must come from memory.
    fn restart(&mut self, damage: Option<usize>) {
        self.pinned.clear();
        self.plans.clear();
        self.unsynced.clear();
        let damaged = damage.is_some_and(|at| self.memory.damage(at));
        let mut store = ShardStore::new(SLABS, Epoch(1));
        for (&key, model) in &self.model {
            assert!(store.add_partition(start(key, model.flushed)));
        }
        match adopt(&mut store, &self.memory, self.memory.live()) {
            Ok(adopted) => {
                for block in adopted.free {
                    self.memory.free(block);
                }
                self.store = store;
                self.model.values_mut().for_each(|model| model.synced = model.flushed);
            }
            Err(AdoptError::Damaged { .. } | AdoptError::Hole { .. }) => {
                assert!(damaged, "an undamaged arena must be adopted");
                *self = Self::new();
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn check_ends(&self) {
        for (key, model) in &self.model {
            let (ends, _) = self.store.ends(*key).unwrap();
            let end = model.batches.last().map_or(0, |batch| batch.1);
            assert_eq!(ends.log_end().0, end);
            assert_eq!(ends.flushed_end().0, model.flushed);
            assert_eq!(ends.synced_end().0, model.synced);
        }
        assert!(self.store.blocks().bytes_in_use() <= self.store.blocks().bytes_max());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_store_behaves_like_lists_of_batches(ops in ops()) {
        let mut harness = Harness::new();
        for op in &ops {
            harness.run(op);
        }
        // Whatever happened: once all is flushed and released, memory can be emptied.
        harness.run(&Op::Release);
        while let Some(plan) = harness.store.plan_flush(FlushScope::All, &mut harness.after, 1 << 20, 100, 9) {
            harness.store.flush_copied(&harness.memory, &plan);
            harness.plans.push_back(plan);
        }
        while !harness.plans.is_empty() {
            harness.complete();
        }
        while harness.store.evict_one(&harness.memory) {}
        prop_assert_eq!(harness.store.blocks().bytes_in_use(), 0);
        prop_assert_eq!(harness.store.blocks().bytes_dirty(), 0);
        prop_assert!(harness.memory.live().is_empty());
    }
}

#[test]
fn a_hole_in_memory_is_not_adopted() {
    let mut harness = Harness::new();
    for _ in 0..3 {
        harness.append(KEYS[0], 2, 100);
    }
    let mut store = ShardStore::new(SLABS, Epoch(1));
    // The log ends before what memory begins with.
    harness.store.plan_flush(FlushScope::All, &mut None, 1 << 20, 9, 1).unwrap();
    assert!(store.add_partition(PartitionStart { log_start: Offset(0), ..start(KEYS[0], 1) }));
    let error = adopt(&mut store, &harness.memory, harness.memory.live()).unwrap_err();
    assert!(matches!(error, AdoptError::Hole { .. }), "{error}");
}

#[test]
fn the_unsynced_window_of_a_partition_is_bounded() {
    let mut harness = Harness::new();
    let index = harness.store.find(KEYS[0]).unwrap();
    harness.store.partition_mut(index).ends.appended(Offset(EPOCH_OFFSETS - 1));
    let bytes = batch_of(KEYS[0], 1, 10, 1);
    let header = BatchHeader::parse(&bytes).unwrap();
    let error = harness.store.append(&harness.memory, &header, &bytes, 0, 0).unwrap_err();
    assert_eq!(error, AppendError::UnsyncedWindow(KEYS[0]));
}

#[test]
fn a_reply_that_is_not_taken_does_not_keep_newer_blocks_of_its_store() {
    let mut harness = Harness::new();
    // One store fills the memory; a reader holds its first block for good.
    harness.append(KEYS[0], 1, 100);
    let mut appended = 0;
    let reply = match harness.store.plan_fetch(&harness.memory, KEYS[0], Offset(0), 1000, false) {
        FetchPlan::Memory { slices, .. } => slices,
        other => panic!("{other:?}"),
    };
    let pinned = harness.store.blocks().bytes_pinned();
    for mark in 0..2000 {
        let bytes = batch_of(KEYS[0], 1, 20_000, mark);
        let header = BatchHeader::parse(&bytes).unwrap();
        harness.store.append(&harness.memory, &header, &bytes, mark, 0).expect("the rest of the memory goes round");
        appended += bytes.len();
        while let Some(plan) = harness.store.plan_flush(FlushScope::All, &mut harness.after, 1 << 20, 100, mark) {
            harness.store.flush_copied(&harness.memory, &plan);
            harness.store.flush_completed(&harness.memory, &plan);
        }
    }
    assert!(appended > 5 * harness.store.blocks().bytes_max());
    assert_eq!(harness.store.blocks().bytes_pinned(), pinned);
    // What the reader has is still there, and goes with it.
    assert!(harness.memory.live().iter().any(|block| block.block == reply[0].block));
    harness.store.unpin(&harness.memory, &reply);
    assert_eq!(harness.store.blocks().bytes_pinned(), 0);
    assert!(!harness.memory.live().iter().any(|block| block.block == reply[0].block));
}

#[test]
fn blocks_are_taken_only_where_memory_is_reserved_also_beside_adopted_ones() {
    let mut harness = Harness::new();
    // The second slab gets a medium block, and has room for more of them.
    for (at, key) in KEYS.iter().enumerate() {
        harness.append(*key, 1, [100, 100_000, 100, 100][at]);
    }
    let highest = harness.memory.live().iter().map(|block| block.block.slab()).max().unwrap();
    assert!(highest > 0);
    let mut store = ShardStore::new(SLABS, Epoch(1));
    for key in KEYS {
        assert!(store.add_partition(start(key, 0)));
    }
    adopt(&mut store, &harness.memory, harness.memory.live()).unwrap();
    // The next process has reserved the first slab only so far; its memory refuses blocks of others.
    harness.memory.set_slabs(1);
    for mark in 0..200 {
        let bytes = batch_of(KEYS[(mark % 4) as usize], 1, 100_000, mark);
        let header = BatchHeader::parse(&bytes).unwrap();
        match store.append(&harness.memory, &header, &bytes, mark, 0) {
            Ok(_) | Err(AppendError::Busy { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn entries_of_blocks_that_have_gone_do_not_pile_up() {
    let mut harness = Harness::new();
    for round in 0..5000 {
        let key = PartitionKey::new(100 + round, 0);
        assert!(harness.store.add_partition(start(key, 0)));
        let bytes = batch_of(key, 1, 100, round);
        let header = BatchHeader::parse(&bytes).unwrap();
        harness.store.append(&harness.memory, &header, &bytes, round, 0).unwrap();
        while let Some(plan) = harness.store.plan_flush(FlushScope::All, &mut harness.after, 1 << 20, 100, round) {
            harness.store.flush_copied(&harness.memory, &plan);
            harness.store.flush_completed(&harness.memory, &plan);
        }
        harness.store.remove_topic(&harness.memory, key.topic);
    }
    assert!(harness.store.blocks().clean_count() < 2000, "{}", harness.store.blocks().clean_count());
}

#[test]
fn batches_that_decompress_to_much_use_the_budget_up_by_that() {
    let (memory, mut store) = (TestMemory::new(SLABS), ShardStore::new(SLABS, Epoch(1)));
    assert!(store.add_partition(start(KEYS[0], 0)));
    let mut bytes = batch_of(KEYS[0], 2, 100, 0);
    for _ in 0..200 {
        let header = BatchHeader { codec: 2, raw_body_bytes: 2_000_000, ..BatchHeader::parse(&bytes).unwrap() };
        header.write(&mut bytes);
        store.append(&memory, &header, &bytes, 5, 77).unwrap();
    }
    let fetched = store.plan_fetch(&memory, KEYS[0], Offset(4), 5_000_000, false);
    let FetchPlan::Memory { counted_bytes, next_offset, .. } = fetched else { panic!("{fetched:?}") };
    assert!((4_000_000..=5_000_000).contains(&counted_bytes) && next_offset == Offset(8), "{next_offset}");
    let scanned = store.plan_scan(&memory, KEYS[0], Offset(4), 5_000_000, false);
    let FetchPlan::Memory { bytes, counted_bytes, next_offset, .. } = scanned else { panic!("{scanned:?}") };
    assert!(bytes == counted_bytes && next_offset == Offset(400), "{next_offset}");
}

/// A batch of 3 records of producer 7.
fn numbered(sequence: u32, body: usize) -> (BatchHeader, Vec<u8>) {
    let mut bytes = batch_of(KEYS[0], 3, body, 1);
    let header = BatchHeader::parse(&bytes).unwrap();
    BatchHeader { producer_id: 7, base_sequence: sequence, ..header }.write(&mut bytes);
    seal_crc(&mut bytes);
    (BatchHeader::parse(&bytes).unwrap(), bytes)
}

#[test]
fn a_batch_that_is_refused_for_memory_moves_no_window_and_a_duplicate_takes_none() {
    let mut harness = Harness::new();
    let mut sequence = 0;
    let (header, bytes) = loop {
        let (header, bytes) = numbered(sequence, 100_000);
        match harness.store.append(&harness.memory, &header, &bytes, 0, 0) {
            Ok(_) => sequence += 3,
            Err(AppendError::Busy { .. }) => break (header, bytes),
            Err(error) => panic!("{error}"),
        }
    };
    let (last, last_bytes) = numbered(sequence - 3, 100_000);
    let first = harness.store.append(&harness.memory, &last, &last_bytes, 0, 0).unwrap();
    assert!(first.duplicate && first.next_offset == Offset(sequence.into()));
    let (behind, behind_bytes) = numbered(sequence + 3, 10);
    for _ in 0..2 {
        assert!(matches!(harness.store.append(&harness.memory, &header, &bytes, 0, 0), Err(AppendError::Busy { .. })));
        let gap = harness.store.append(&harness.memory, &behind, &behind_bytes, 0, 0);
        assert_eq!(gap, Err(AppendError::Sequence(SequenceError::Gap { expected: sequence })));
    }
    // Once there is room it is taken where it was refused.
    let plan = harness.store.plan_flush(FlushScope::All, &mut None, usize::MAX, 9, 1).unwrap();
    harness.store.flush_copied(&harness.memory, &plan);
    harness.store.flush_completed(&harness.memory, &plan);
    let taken = harness.store.append(&harness.memory, &header, &bytes, 0, 0).unwrap();
    assert_eq!((taken.base_offset, taken.duplicate), (Offset(sequence.into()), false));
}

#[test]
fn a_checkpoint_tells_of_flushed_batches_only_and_adopted_ones_come_back() {
    use crate::dedup::RunProducers;
    let mut harness = Harness::new();
    let append = |harness: &mut Harness, sequence| {
        let (header, bytes) = numbered(sequence, 50);
        harness.store.append(&harness.memory, &header, &bytes, 0, 0).map(|appended| appended.base_offset.0)
    };
    assert_eq!(append(&mut harness, 0), Ok(0));
    assert_eq!(append(&mut harness, 3), Ok(3));
    let mut plan = harness.store.plan_flush(FlushScope::All, &mut None, usize::MAX, 9, 1).unwrap();
    assert_eq!(plan.idempotent, 2);
    let mut gathered = RunProducers::default();
    for span in &plan.runs[0].spans {
        gathered.batches(0, harness.memory.read(span.block, span.at as usize, span.bytes as usize));
    }
    gathered.end_run();
    plan.producers = gathered.into_entries();
    harness.store.flush_copied(&harness.memory, &plan);
    assert_eq!(append(&mut harness, 6), Ok(6));
    assert_eq!(harness.store.producers_section(), None, "nothing is flushed yet");
    harness.store.flush_completed(&harness.memory, &plan);

    let read = || Producers::of_section(&harness.store.producers_section().unwrap().bytes).unwrap();
    let offsets = |producers: &Producers| -> Vec<u64> {
        producers.windows().flat_map(|(_, window)| window.batches()).map(|batch| batch.base_offset.0).collect()
    };
    assert_eq!(offsets(&read()), [0, 3]);
    // The next life: with the memory, and without it.
    let mut next = ShardStore::new(SLABS, Epoch(1));
    assert!(next.add_partition(start(KEYS[0], 6)));
    next.set_producers(read());
    let mut without = next.emptied(SLABS);
    assert_eq!(offsets(without.producers()), [0, 3]);
    let (header, bytes) = numbered(6, 50);
    let memory = TestMemory::new(SLABS);
    assert!(!without.append(&memory, &header, &bytes, 0, 0).unwrap().duplicate);
    let mut next = ShardStore::new(SLABS, Epoch(1));
    assert!(next.add_partition(start(KEYS[0], 6)));
    next.set_producers(read());
    adopt(&mut next, &harness.memory, harness.memory.live()).unwrap();
    assert_eq!(offsets(next.producers()), [0, 3, 6]);
    let again = next.append(&harness.memory, &header, &bytes, 0, 0).unwrap();
    assert_eq!((again.base_offset, again.duplicate), (Offset(6), true));
    assert_eq!(
        next.producers_section().map(|section| section.bytes),
        harness.store.producers_section().map(|section| section.bytes)
    );
}
