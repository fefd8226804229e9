use proptest::prelude::*;

use super::*;
use crate::batch::{BATCH_HEADER_BYTES, seal_crc, stamp};

const KEY: PartitionKey = PartitionKey::new(1, 0);
const OTHER: PartitionKey = PartitionKey::new(1, 1);
const NOW: Epoch = Epoch(0);

fn header(key: PartitionKey, producer: (u64, u16), base_sequence: u32, record_count: u32) -> BatchHeader {
    BatchHeader {
        key,
        producer_id: producer.0,
        producer_epoch: producer.1,
        base_sequence,
        record_count,
        crc: base_sequence ^ record_count,
        ..BatchHeader::default()
    }
}

/// Checks a batch and, when it is new, stores it.
fn arrive(producers: &mut Producers, header: &BatchHeader, offset: u64, now: Epoch) -> Result<Decision, SequenceError> {
    let decision = producers.check(header, now)?;
    if decision == Decision::New
        && let Some(batch) = ProducerBatch::of(header, Offset(offset), now)
    {
        producers.stored(header.key, &batch);
    }
    Ok(decision)
}

fn is_duplicate_at(decision: Result<Decision, SequenceError>, offset: u64) -> bool {
    matches!(decision, Ok(Decision::Duplicate(batch)) if batch.base_offset == Offset(offset))
}

#[test]
fn the_last_batches_are_recognised_and_what_lies_before_them_is_not_guessed_at() {
    let mut producers = Producers::default();
    let batches: Vec<BatchHeader> = (0..8).map(|number| header(KEY, (7, 0), number * 10, 10)).collect();
    for (number, batch) in batches.iter().enumerate() {
        assert_eq!(arrive(&mut producers, batch, number as u64 * 10, NOW), Ok(Decision::New));
    }
    for (number, batch) in batches.iter().enumerate() {
        let decision = arrive(&mut producers, batch, 999, NOW);
        if number < batches.len() - PRODUCER_WINDOW_BATCHES {
            assert_eq!(decision, Err(SequenceError::TooOld { expected: 80 }));
        } else {
            assert!(is_duplicate_at(decision, number as u64 * 10), "{decision:?}");
        }
    }
    // Other boundaries, or other bytes under the same sequence.
    assert_eq!(producers.check(&header(KEY, (7, 0), 70, 5), NOW), Err(SequenceError::Reused { expected: 80 }));
    let other = BatchHeader { crc: 1, ..batches[7] };
    assert_eq!(producers.check(&other, NOW), Err(SequenceError::Reused { expected: 80 }));
    assert_eq!(producers.check(&header(KEY, (7, 0), 75, 5), NOW), Err(SequenceError::TooOld { expected: 80 }));
}

#[test]
fn a_batch_that_is_checked_and_not_stored_moves_nothing() {
    let producers = Producers::default();
    let first = header(KEY, (7, 0), 0, 3);
    for _ in 0..3 {
        assert_eq!(producers.check(&first, NOW), Ok(Decision::New));
        assert_eq!(producers.check(&header(KEY, (7, 0), 3, 1), NOW), Err(SequenceError::Gap { expected: 0 }));
    }
    assert_eq!(producers, Producers::default());
}

#[test]
fn a_higher_producer_epoch_fences_the_lower_ones_and_begins_at_zero() {
    let mut producers = Producers::default();
    arrive(&mut producers, &header(KEY, (7, 0), 0, 3), 0, NOW).unwrap();
    assert_eq!(producers.check(&header(KEY, (7, 1), 3, 1), NOW), Err(SequenceError::Gap { expected: 0 }));
    arrive(&mut producers, &header(KEY, (7, 1), 0, 1), 3, NOW).unwrap();
    for sequence in [0, 3] {
        let zombie = producers.check(&header(KEY, (7, 0), sequence, 3), NOW);
        assert_eq!(zombie, Err(SequenceError::Fenced { current: 1 }));
    }
    // In another partition nothing is known of it.
    assert_eq!(producers.check(&header(OTHER, (7, 0), 0, 3), NOW), Ok(Decision::New));
}

#[test]
fn sequences_wrap() {
    let mut producers = Producers::default();
    let mut window = header(KEY, (7, 0), 0, 1);
    for (number, sequence) in [0_u32, u32::MAX - 4].into_iter().enumerate() {
        window.base_sequence = sequence;
        let batch = ProducerBatch::of(&window, Offset(number as u64), NOW).unwrap();
        producers.stored(KEY, &batch);
    }
    assert_eq!(arrive(&mut producers, &header(KEY, (7, 0), u32::MAX - 3, 10), 2, NOW), Ok(Decision::New));
    assert_eq!(producers.check(&header(KEY, (7, 0), 7, 1), NOW), Err(SequenceError::Gap { expected: 6 }));
    assert_eq!(arrive(&mut producers, &header(KEY, (7, 0), 6, 1), 12, NOW), Ok(Decision::New));
    assert!(is_duplicate_at(producers.check(&header(KEY, (7, 0), u32::MAX - 3, 10), NOW), 2));
}

#[test]
fn after_memory_was_lost_the_next_sequence_may_skip_once() {
    let mut producers = Producers::default();
    arrive(&mut producers, &header(KEY, (7, 0), 0, 5), 0, NOW).unwrap();
    assert_eq!(producers.check(&header(KEY, (7, 0), 20, 5), NOW), Err(SequenceError::Gap { expected: 5 }));
    let now = Epoch(1);
    // What was lost is new when it comes again, and what survived is not.
    assert_eq!(producers.check(&header(KEY, (7, 0), 5, 5), now), Ok(Decision::New));
    assert!(is_duplicate_at(producers.check(&header(KEY, (7, 0), 0, 5), now), 0));
    assert_eq!(arrive(&mut producers, &header(KEY, (7, 0), 20, 5), 1 << 32, now), Ok(Decision::New));
    assert_eq!(producers.check(&header(KEY, (7, 0), 40, 5), now), Err(SequenceError::Gap { expected: 25 }));
    assert_eq!(producers.check(&header(KEY, (7, 0), 10, 5), now), Err(SequenceError::TooOld { expected: 25 }));
}

#[test]
fn a_producer_that_was_given_up_must_begin_anew() {
    let mut producers = Producers::with_limits(3, 2);
    arrive(&mut producers, &header(KEY, (1, 0), 0, 1), 0, NOW).unwrap();
    arrive(&mut producers, &header(KEY, (2, 0), 0, 1), 1, NOW).unwrap();
    assert_eq!(producers.check(&header(KEY, (9, 0), 4, 1), NOW), Err(SequenceError::Gap { expected: 0 }));
    // The partition is full: the one that was appended to longest ago goes.
    arrive(&mut producers, &header(KEY, (1, 0), 1, 1), 2, NOW).unwrap();
    arrive(&mut producers, &header(KEY, (3, 0), 0, 1), 3, NOW).unwrap();
    assert_eq!(producers.check(&header(KEY, (2, 0), 1, 1), NOW), Err(SequenceError::Forgotten));
    // Then the shard.
    arrive(&mut producers, &header(OTHER, (4, 0), 0, 1), 0, NOW).unwrap();
    arrive(&mut producers, &header(OTHER, (5, 0), 0, 1), 1, NOW).unwrap();
    assert_eq!(producers.count(), 3);
    assert_eq!(producers.check(&header(KEY, (1, 0), 2, 1), NOW), Err(SequenceError::Forgotten));
    assert_eq!(arrive(&mut producers, &header(KEY, (1, 1), 0, 1), 4, NOW), Ok(Decision::New));
}

#[test]
fn windows_of_a_deleted_topic_go_and_nothing_counts_as_forgotten() {
    let mut producers = Producers::default();
    let elsewhere = PartitionKey::new(2, 0);
    for key in [KEY, OTHER, elsewhere] {
        arrive(&mut producers, &header(key, (7, 0), 0, 1), 0, NOW).unwrap();
    }
    producers.remove_topic(KEY.topic);
    assert_eq!(producers.windows().map(|(key, _)| key).collect::<Vec<_>>(), [elsewhere]);
    assert!(!producers.has_forgotten());
    assert_eq!(producers.check(&header(KEY, (7, 0), 0, 1), NOW), Ok(Decision::New));
}

#[test]
fn of_a_run_the_newest_batches_of_each_producer_are_gathered() {
    let batch = |id: u64, epoch: u16, sequence: u32, offset: u64| {
        let mut bytes = vec![0; BATCH_HEADER_BYTES];
        let size = bytes.len() as u32;
        BatchHeader { batch_bytes: size, ..header(KEY, (id, epoch), sequence, 1) }.write(&mut bytes);
        seal_crc(&mut bytes);
        stamp(&mut bytes, Offset(offset), 5, Epoch(3));
        bytes
    };
    let mut gathered = RunProducers::default();
    let mut run: Vec<u8> = (0..20).flat_map(|number| batch(7, 0, number, u64::from(number))).collect();
    run.extend(batch(0, 0, 0, 20));
    run.extend([batch(8, 0, 0, 21), batch(8, 1, 0, 22)].concat());
    let (front, back) = run.split_at(10 * BATCH_HEADER_BYTES);
    gathered.batches(0, front);
    gathered.batches(0, back);
    gathered.end_run();
    gathered.batches(1, &batch(7, 0, 20, 0));
    gathered.end_run();
    let entries = gathered.into_entries();
    let said: Vec<_> =
        entries.iter().map(|entry| (entry.run, entry.batch.producer_id, entry.batch.base_offset.0)).collect();
    let expected = [(0, 7, 15), (0, 7, 16), (0, 7, 17), (0, 7, 18), (0, 7, 19), (0, 8, 22), (1, 7, 0)];
    assert_eq!(said, expected);
    assert!(entries.iter().all(|entry| entry.batch.epoch == Epoch(3)));
}

#[test]
fn a_full_shard_fits_its_part_of_a_checkpoint() {
    let mut producers = Producers::default();
    for number in 0..SHARD_PRODUCERS_MAX as u64 + 10 {
        let key = PartitionKey::new(number / 100, 0);
        for sequence in 0..PRODUCER_WINDOW_BATCHES as u32 {
            let header = header(key, (number + 1, 0), sequence, 1);
            producers.stored(key, &ProducerBatch::of(&header, Offset(sequence.into()), NOW).unwrap());
        }
    }
    let bytes = producers.section().unwrap().bytes;
    assert!(bytes.len() <= 8 + SHARD_PRODUCERS_MAX * WINDOW_BYTES_MAX);
    assert_eq!(Producers::of_section(&bytes), Ok(producers));
}

/// What the windows stand for, without bounds in its memory: every batch that was stored, in order.
#[derive(Default)]
struct Model {
    stored: Vec<(PartitionKey, ProducerBatch)>,
    /// Producers that are known, the one that was appended to longest ago first.
    known: Vec<(PartitionKey, u64)>,
    forgotten: bool,
    limits: (usize, usize),
}

impl Model {
    fn check(&self, header: &BatchHeader, now: Epoch) -> Result<Decision, SequenceError> {
        let name = (header.key, header.producer_id);
        if !self.known.contains(&name) {
            return match header.base_sequence {
                0 => Ok(Decision::New),
                _ if self.forgotten => Err(SequenceError::Forgotten),
                _ => Err(SequenceError::Gap { expected: 0 }),
            };
        }
        let all = self.stored.iter().filter(|(key, batch)| (*key, batch.producer_id) == name).map(|(_, batch)| batch);
        let current = all.clone().map(|batch| batch.producer_epoch).max().unwrap();
        if header.producer_epoch < current {
            return Err(SequenceError::Fenced { current });
        }
        if header.producer_epoch > current {
            return if header.base_sequence == 0 { Ok(Decision::New) } else { Err(SequenceError::Gap { expected: 0 }) };
        }
        let mine: Vec<_> = all.filter(|batch| batch.producer_epoch == current).collect();
        let last = mine.last().unwrap();
        let expected = last.base_sequence.wrapping_add(last.record_count);
        if header.base_sequence == expected {
            return Ok(Decision::New);
        }
        if header.base_sequence.wrapping_sub(expected) < 1 << 31 {
            return if last.epoch < now { Ok(Decision::New) } else { Err(SequenceError::Gap { expected }) };
        }
        let window = &mine[mine.len().saturating_sub(PRODUCER_WINDOW_BATCHES)..];
        match window.iter().rev().find(|batch| batch.base_sequence == header.base_sequence) {
            Some(batch) if batch.record_count == header.record_count && batch.crc == header.crc => {
                Ok(Decision::Duplicate(**batch))
            }
            Some(_) => Err(SequenceError::Reused { expected }),
            None => Err(SequenceError::TooOld { expected }),
        }
    }

    fn stored(&mut self, key: PartitionKey, batch: ProducerBatch) {
        let name = (key, batch.producer_id);
        if let Some(at) = self.known.iter().position(|known| *known == name) {
            self.known.remove(at);
        } else {
            if self.known.iter().filter(|(of, _)| *of == key).count() == self.limits.1 {
                let oldest = *self.known.iter().find(|(of, _)| *of == key).unwrap();
                self.forget(oldest);
            }
            if self.known.len() == self.limits.0 {
                self.forget(self.known[0]);
            }
        }
        self.known.push(name);
        self.stored.push((key, batch));
    }

    fn forget(&mut self, name: (PartitionKey, u64)) {
        self.known.retain(|known| *known != name);
        self.stored.retain(|(key, batch)| (*key, batch.producer_id) != name);
        self.forgotten = true;
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A batch: partition, producer, epoch, sequence relative to what would be next, records, stored if it is new.
    Arrive(u32, u64, u16, i32, u32, bool),
    LoseMemory,
    /// By way of a checkpoint.
    Restart,
    DeleteTopic(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let sequence = prop_oneof![6 => Just(0), 3 => -12..0, 2 => 1..12, 1 => any::<i32>()];
    let arrive = (0..4_u32, 1..4_u64, 0..3_u16, sequence, 1..4_u32, any::<bool>());
    prop_oneof![
        30 => arrive.prop_map(|(partition, id, epoch, sequence, records, stored)| {
            Step::Arrive(partition, id, epoch / 2, sequence, records, stored || records > 1)
        }),
        1 => Just(Step::LoseMemory),
        2 => Just(Step::Restart),
        1 => (0..2_u64).prop_map(Step::DeleteTopic),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn windows_decide_as_a_full_history_does(
        limits in (2..6_usize, 1..3_usize),
        start in prop_oneof![Just(0_u32), Just(u32::MAX - 20)],
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut producers = Producers::with_limits(limits.0, limits.1);
        let mut model = Model { limits, ..Model::default() };
        let mut now = Epoch(0);
        let mut offset = 0;
        let mut next: HashMap<(PartitionKey, u64), u32> = HashMap::new();
        for step in steps {
            match step {
                Step::Arrive(partition, id, epoch, relative, records, stores) => {
                    let key = PartitionKey::new(u64::from(partition % 2), partition / 2);
                    let from = next.get(&(key, id)).copied().unwrap_or(0);
                    let header = header(key, (id, epoch), from.wrapping_add_signed(relative), records);
                    let decision = producers.check(&header, now);
                    prop_assert_eq!(decision, model.check(&header, now));
                    if decision == Ok(Decision::New) && stores {
                        let mut batch = ProducerBatch::of(&header, Offset(offset), now).unwrap();
                        if !next.contains_key(&(key, id)) {
                            // As if it had sent much before, so that its sequences wrap.
                            batch.base_sequence = start;
                        }
                        offset += u64::from(records);
                        next.insert((key, id), batch.base_sequence.wrapping_add(records));
                        producers.stored(key, &batch);
                        model.stored(key, batch);
                    }
                }
                Step::LoseMemory => now = Epoch(now.0 + 1),
                Step::Restart => {
                    let read = match producers.section() {
                        Some(section) => Producers::of_section(&section.bytes).unwrap(),
                        None => Producers::default(),
                    };
                    prop_assert_eq!(&read, &producers);
                    producers = Producers { shard_max: limits.0, partition_max: limits.1, ..read };
                }
                Step::DeleteTopic(topic) => {
                    producers.remove_topic(TopicId(topic));
                    model.known.retain(|(key, _)| key.topic.0 != topic);
                    model.stored.retain(|(key, _)| key.topic.0 != topic);
                }
            }
            prop_assert_eq!(producers.count(), model.known.len());
            let known: Vec<_> = producers.windows().map(|(key, window)| (key, window.producer_id())).collect();
            prop_assert_eq!(&known, &model.known);
        }
    }

    #[test]
    fn damaged_sections_never_panic(
        ids in proptest::collection::vec(1..u64::MAX, 1..20),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut producers = Producers::default();
        for id in ids {
            producers.stored(KEY, &ProducerBatch::of(&header(KEY, (id, 0), 0, 2), Offset(id / 2), NOW).unwrap());
        }
        let mut bytes = producers.section().unwrap().bytes;
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(cut.index(bytes.len() + 1));
        let _ = Producers::of_section(&bytes);
    }
}
