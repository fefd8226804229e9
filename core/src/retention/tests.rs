//! Retention against a plain model: a list of runs in the order they were written.

use proptest::prelude::*;

use super::*;

const TOPIC: TopicId = TopicId(1);

fn bounds(age_ms: Option<u64>, bytes: Option<u64>) -> Bounds {
    Bounds { age_ms, bytes }
}

/// A run in the model.
#[derive(Clone, Debug)]
struct Run {
    segment: SegmentSequence,
    entry: IndexEntry,
}

/// A topic of a few partitions, as the shard has it.
#[derive(Default)]
struct World {
    retention: Retention,
    runs: Vec<Run>,
    ends: BTreeMap<PartitionKey, Ends>,
    place: u32,
    segment: SegmentSequence,
}

impl World {
    fn append(&mut self, partition: u32, bytes: u32, time_ms: i64, synced: bool) {
        let key = PartitionKey { topic: TOPIC, partition };
        let ends = self.ends.entry(key).or_insert(Ends::at_rest(Offset(0), Offset(0)));
        let base_offset = ends.log_end();
        let next_offset = base_offset.plus(3);
        ends.appended(next_offset);
        ends.flushed(next_offset);
        if synced {
            ends.synced(next_offset);
        }
        let entry = IndexEntry {
            key,
            base_offset,
            next_offset,
            place: self.place,
            stored_bytes: bytes,
            max_append_time_ms: time_ms,
            ..IndexEntry::default()
        };
        self.place += bytes;
        self.retention.count(self.segment, &entry, true);
        self.runs.push(Run { segment: self.segment, entry });
    }

    fn roll(&mut self) {
        self.segment.0 += 1;
        self.place = 0;
        self.retention.begin_segment(self.segment);
    }

    /// Looks as a shard does, and raises log starts.
    fn look(&mut self, bounds: &Bounds, now_ms: Option<i64>) {
        let mut next = self.retention.due(TOPIC, bounds, now_ms);
        while let Some(segment) = next {
            let runs = self.runs.iter().filter(|run| run.segment == segment).map(|run| run.entry).collect();
            let ends = &self.ends;
            let judged = self.retention.judge(TOPIC, segment, runs, bounds, now_ms, |key| ends.get(&key).copied());
            for (key, start) in judged.raise {
                assert!(self.ends.get_mut(&key).unwrap().start_raised(start), "a log start is raised for nothing");
            }
            next = if judged.done { None } else { self.retention.segment_after(segment) };
        }
    }

    fn is_live(&self, run: &Run) -> bool {
        run.entry.next_offset > self.ends[&run.entry.key].log_start()
    }

    fn live_bytes(&self) -> u64 {
        self.runs.iter().filter(|run| self.is_live(run)).map(|run| u64::from(run.entry.stored_bytes)).sum()
    }
}

#[test]
fn by_bytes_the_oldest_go_whatever_their_partition() {
    let mut world = World::default();
    for (partition, time) in [(0, 1), (1, 2), (0, 3), (1, 4)] {
        world.append(partition, 100, time, true);
        world.roll();
    }
    world.look(&bounds(None, Some(250)), Some(5));
    let live: Vec<bool> = world.runs.iter().map(|run| world.is_live(run)).collect();
    assert_eq!(live, [false, false, true, true]);
    assert_eq!(world.retention.topic_bytes(TOPIC), 200);
    let dead: Vec<u64> = world.retention.segments().map(|(_, count)| count.live).collect();
    assert_eq!(dead, [0, 0, 100, 100, 0]);
}

#[test]
fn by_age_what_is_too_old_goes_and_nothing_else() {
    let mut world = World::default();
    world.append(0, 100, 1_000, true);
    world.append(0, 100, 5_000, true);
    world.look(&bounds(Some(2_000), None), Some(2_999));
    assert_eq!(world.live_bytes(), 200);
    world.look(&bounds(Some(2_000), None), Some(4_000));
    assert_eq!(world.live_bytes(), 100);
    world.look(&bounds(Some(2_000), None), Some(10_000));
    assert_eq!(world.live_bytes(), 0);
    // Emptied, it is looked at again for what comes.
    world.append(0, 100, 11_000, true);
    world.look(&bounds(Some(2_000), None), Some(20_000));
    assert_eq!(world.live_bytes(), 0);
}

#[test]
fn a_clock_that_was_ahead_for_a_while_does_not_keep_old_runs() {
    let mut world = World::default();
    world.append(0, 100, 900_000_000, true);
    world.append(0, 100, 1_000, true);
    world.roll();
    world.append(0, 100, 900_000_000, true);
    world.roll();
    world.append(0, 100, 2_000, true);
    world.look(&bounds(Some(5_000), None), Some(6_500));
    assert_eq!(world.live_bytes(), 200);
    world.look(&bounds(Some(5_000), None), Some(9_000));
    assert_eq!(world.live_bytes(), 0);
}

#[test]
fn what_is_not_synced_stays() {
    let mut world = World::default();
    world.append(0, 100, 1_000, true);
    world.append(1, 100, 1_000, false);
    world.append(0, 100, 1_000, true);
    world.look(&bounds(Some(1_000), Some(0)), Some(100_000));
    let live: Vec<bool> = world.runs.iter().map(|run| world.is_live(run)).collect();
    assert_eq!(live, [false, true, true]);
}

#[test]
fn without_a_time_only_bytes_count_and_new_settings_are_looked_at_at_once() {
    let mut world = World::default();
    world.append(0, 100, 1_000, true);
    world.append(0, 100, 2_000, true);
    world.look(&bounds(Some(1_000), None), None);
    assert_eq!(world.live_bytes(), 200);
    world.look(&bounds(Some(1_000_000), None), Some(5_000));
    assert_eq!(world.live_bytes(), 200);
    world.retention.reconsider(TOPIC);
    world.look(&bounds(Some(3_500), None), Some(5_000));
    assert_eq!(world.live_bytes(), 100);
    world.look(&bounds(None, Some(50)), None);
    assert_eq!(world.live_bytes(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Append { partition: u32, bytes: u32, synced: bool },
    Pass(i64),
    Leap(i64),
    Roll,
    Look,
    Sync,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3_u32, 1..200_u32, prop::bool::weighted(0.8))
            .prop_map(|(partition, bytes, synced)| Step::Append { partition, bytes, synced }),
        3 => (0..3_000_i64).prop_map(Step::Pass),
        1 => (-20_000..20_000_i64).prop_map(Step::Leap),
        2 => Just(Step::Roll),
        3 => Just(Step::Look),
        1 => Just(Step::Sync),
    ]
}

proptest! {
    #[test]
    fn the_oldest_go_and_no_more_than_the_bounds_want(
        steps in proptest::collection::vec(step(), 1..120),
        age_ms in prop::option::of(1_000..10_000_u64),
        bytes in prop::option::of(0..2_000_u64),
    ) {
        let mut world = World::default();
        world.retention.begin_segment(SegmentSequence(0));
        let bounds = bounds(age_ms, bytes);
        let mut now_ms = 1_000_000;
        for step in steps {
            match step {
                Step::Append { partition, bytes, synced } => world.append(partition, bytes, now_ms, synced),
                Step::Pass(ms) | Step::Leap(ms) => now_ms += ms,
                Step::Roll => world.roll(),
                Step::Sync => world.ends.values_mut().for_each(|ends| { ends.synced(ends.flushed_end()); }),
                Step::Look => {
                    let before: Vec<bool> = world.runs.iter().map(|run| world.is_live(run)).collect();
                    let live_before = world.live_bytes();
                    // As if it had not been looked at for long.
                    world.retention.reconsider(TOPIC);
                    world.look(&bounds, Some(now_ms));
                    let after: Vec<bool> = world.runs.iter().map(|run| world.is_live(run)).collect();
                    // The model: from the front, in the order of writing, as long as a run must go.
                    let mut model = before.clone();
                    let mut live = live_before;
                    for (at, run) in world.runs.iter().enumerate().filter(|(at, _)| before[*at]) {
                        let behind = world.runs[at..].iter().filter(|other| {
                            // Runs of other segments count also when they are dead.
                            other.segment > run.segment || before[world.runs.iter().position(|it| it.entry == other.entry
                                && it.segment == other.segment).unwrap()]
                        });
                        let time = behind.map(|run| run.entry.max_append_time_ms).min().unwrap();
                        let too_old = age_ms.is_some_and(|age| time + age as i64 <= now_ms);
                        let too_much = bounds.bytes.is_some_and(|bytes| live > bytes);
                        let synced = run.entry.next_offset <= world.ends[&run.entry.key].synced_end();
                        if !(too_old || too_much) || !synced {
                            break;
                        }
                        model[at] = false;
                        live -= u64::from(run.entry.stored_bytes);
                    }
                    prop_assert_eq!(after, model);
                    prop_assert_eq!(world.retention.topic_bytes(TOPIC), world.live_bytes());
                    prop_assert_eq!(world.retention.live_bytes(), world.live_bytes());
                    for (segment, count) in world.retention.segments() {
                        let here = world.runs.iter().filter(|run| run.segment == segment && world.is_live(run));
                        let bytes: u64 = here.map(|run| u64::from(run.entry.stored_bytes)).sum();
                        prop_assert_eq!(count.live, bytes);
                    }
                }
            }
        }
    }
}
