use proptest::prelude::*;

use super::*;

const MIB: usize = 1024 * 1024;
const TOPIC: TopicId = TopicId(7);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn run(setting: Compression) -> Candidate {
    Candidate { topic: TOPIC, setting, bytes: MIB }
}

fn calm() -> Load {
    Load { memory_bytes: 256 * MIB, ..Load::default() }
}

/// A shard where the topic has been seen at this ratio with the CPU that the helper got, and with this device, MB/s.
fn state(ratio: f64, share: f64, device: f64) -> CompressionState {
    let mut state = CompressionState::default();
    for level in [Level::Quick, Level::Zstd] {
        let packed_bytes = (MIB as f64 * ratio * if level == Level::Zstd { 1.0 } else { 1.6 }) as usize;
        let seen = Seen { topic: TOPIC, level, raw_bytes: MIB, packed_bytes };
        let mut bytes = [0; LEVELS];
        bytes[level as usize] = MIB;
        let cpu = Duration::from_nanos((MIB as f64 * NS_PER_BYTE[level as usize]) as u64);
        for _ in 0..30 {
            state.learn(&[seen], &bytes, cpu, cpu.mul_f64(1.0 / share), ms(1));
        }
    }
    state.note_written((device * 1e6) as u64, Duration::from_secs(1));
    state
}

/// What is chosen once so many MB/s come in.
fn chosen_at(state: &mut CompressionState, input: f64, load: &Load) -> Treatment {
    let every = Duration::from_secs_f64(MIB as f64 / (input * 1e6));
    let mut now = ms(10);
    let mut last = Treatment::Leave;
    for _ in 0..200 {
        now += every;
        let choice = state.choose(&[run(Compression::Auto)], load, now);
        match choice.treatments.first() {
            Some(Treatment::Sample(_)) => {}
            Some(treatment) => last = *treatment,
            None => last = Treatment::Leave,
        }
    }
    last
}

#[test]
fn with_time_to_spare_the_level_that_saves_most_is_taken() {
    let mut state = state(0.2, 1.0, 500.0);
    assert_eq!(chosen_at(&mut state, 50.0, &calm()), Treatment::Compress(Level::Zstd));
}

#[test]
fn with_less_time_the_level_drops_and_then_stops() {
    assert_eq!(chosen_at(&mut state(0.2, 0.5, 900.0), 220.0, &calm()), Treatment::Compress(Level::Quick));
    assert_eq!(chosen_at(&mut state(0.2, 0.1, 900.0), 220.0, &calm()), Treatment::Leave);
}

#[test]
fn a_device_that_is_the_bottleneck_is_paid_for_with_the_cpu() {
    // 50 MB/s of device: as they are, 50 MB/s; with a fifth of them stored, what the CPU can.
    assert_eq!(chosen_at(&mut state(0.2, 0.5, 50.0), 300.0, &calm()), Treatment::Compress(Level::Zstd));
    // Of less CPU the quicker level makes more.
    assert_eq!(chosen_at(&mut state(0.2, 0.2, 50.0), 300.0, &calm()), Treatment::Compress(Level::Quick));
    let pressed = Load { dirty_bytes: 100 * MIB, ..calm() };
    assert_eq!(chosen_at(&mut state(0.2, 1.0, 50.0), 60.0, &pressed), Treatment::Compress(Level::Zstd));
}

#[test]
fn a_full_memory_before_a_fast_device_stops_compression() {
    let pressed = Load { memory_short: true, ..calm() };
    assert_eq!(chosen_at(&mut state(0.2, 0.3, 900.0), 100.0, &pressed), Treatment::Leave);
}

#[test]
fn what_is_waited_for_is_left_alone_unless_a_codec_is_asked_for() {
    let mut state = state(0.2, 1.0, 500.0);
    let load = Load { is_waited_for: true, ..calm() };
    assert_eq!(state.choose(&[run(Compression::Auto)], &load, ms(100)).treatments, []);
    let choice = state.choose(&[run(Compression::Lz4), run(Compression::Auto)], &load, ms(200));
    assert_eq!(choice.treatments, [Treatment::Compress(Level::Lz4), Treatment::Leave]);
    assert_eq!(choice.time, ASKED_JOB_TIME);
}

#[test]
fn a_topic_that_saves_nothing_is_looked_at_ever_more_seldom() {
    let mut state = CompressionState::default();
    let (mut looks, mut at) = (Vec::new(), 0);
    while at < 200_000 {
        let choice = state.choose(&[run(Compression::Auto)], &calm(), ms(at));
        if let Some(Treatment::Compress(level) | Treatment::Sample(level)) = choice.treatments.first() {
            looks.push(at);
            let seen = Seen { topic: TOPIC, level: *level, raw_bytes: 65_536, packed_bytes: 65_536 };
            let mut bytes = [0; LEVELS];
            bytes[*level as usize] = 65_536;
            state.learn(&[seen], &bytes, Duration::from_micros(150), Duration::from_micros(150), ms(at));
        } else {
            assert_eq!(choice.skipped, 1);
        }
        at += 10;
    }
    assert!(looks.len() < 12, "{looks:?}");
    // When its records change, that is noticed.
    let seen = Seen { topic: TOPIC, level: Level::Zstd, raw_bytes: 65_536, packed_bytes: 10_000 };
    let cpu = Duration::from_micros(150);
    state.learn(&[seen], &[0, 0, 65_536], cpu, cpu, ms(at));
    assert_eq!(chosen_at(&mut state, 50.0, &calm()), Treatment::Compress(Level::Zstd));
}

#[test]
fn without_time_it_is_tried_now_and_then_whether_there_is_some_again() {
    let mut state = state(0.2, SHARE_MIN, 900.0);
    // Until a rate is known it is hopeful.
    assert_eq!(chosen_at(&mut state, 1000.0, &calm()), Treatment::Leave);
    let mut samples = 0;
    for at in 0..5000 {
        let choice = state.choose(&[run(Compression::Auto)], &calm(), ms(300 + at));
        samples += usize::from(choice.treatments == [Treatment::Sample(Level::Zstd)]);
        assert!(!choice.treatments.iter().any(|treatment| matches!(treatment, Treatment::Compress(_))));
    }
    assert!((8..=11).contains(&samples), "{samples}");
}

#[test]
fn a_job_that_is_late_costs_trust() {
    let mut state = state(0.2, 1.0, 900.0);
    for _ in 0..5 {
        state.was_late();
    }
    assert_eq!(chosen_at(&mut state, 220.0, &calm()), Treatment::Leave);
}

#[test]
fn what_saves_no_block_or_is_switched_off_is_left() {
    let mut state = state(0.2, 1.0, 500.0);
    let small = Candidate { bytes: 4000, ..run(Compression::Zstd) };
    assert_eq!(state.choose(&[small], &calm(), ms(50)).treatments, []);
    assert_eq!(state.choose(&[run(Compression::None)], &calm(), ms(60)).treatments, []);
}

#[test]
fn memory_of_topics_is_bounded() {
    let mut state = CompressionState::default();
    for topic in 0..COMPRESSION_TOPICS_MAX as u64 + 10 {
        let seen = Seen { topic: TopicId(topic), level: Level::Zstd, raw_bytes: 100, packed_bytes: 50 };
        state.learn(&[seen], &[0; LEVELS], Duration::ZERO, Duration::ZERO, ms(1));
    }
    assert!(state.topics.len() <= COMPRESSION_TOPICS_MAX);
}

proptest! {
    #[test]
    fn whatever_comes_in_every_run_has_a_treatment_and_the_time_is_bounded(
        steps in proptest::collection::vec(
            (0u8..4, 1usize..4_000_000, 0u64..3000, any::<bool>(), 0usize..600, 0u64..5_000_000), 1..60)
    ) {
        let mut state = CompressionState::default();
        let mut now = Duration::ZERO;
        for (setting, bytes, after_ms, late, dirty, cpu_ns) in steps {
            now += ms(after_ms);
            let setting = Compression::from_byte(setting).unwrap();
            let runs = [Candidate { topic: TopicId(bytes as u64 % 5), setting, bytes }; 3];
            let load = Load { dirty_bytes: dirty * MIB, ..calm() };
            let choice = state.choose(&runs, &load, now);
            prop_assert!(choice.treatments.is_empty() || choice.treatments.len() == 3);
            prop_assert!(choice.treatments.is_empty() || choice.time >= JOB_TIME_MIN && choice.time <= ASKED_JOB_TIME);
            if late {
                state.was_late();
            }
            let seen = Seen { topic: runs[0].topic, level: Level::Zstd, raw_bytes: bytes, packed_bytes: bytes / 3 };
            let cpu = Duration::from_nanos(cpu_ns);
            state.learn(&[seen], &[0, 0, bytes], cpu, cpu * 2, now);
            state.note_written(bytes as u64, cpu);
            prop_assert!(state.share >= SHARE_MIN && state.share <= 1.0);
        }
    }
}
