use std::collections::HashSet;

use super::*;

/// Records one behind the other, as three producers send them to two partitions.
fn records(kind: Compressibility, size: usize, count: u64) -> Vec<u8> {
    let payload = Payload::new(7, kind);
    let mut all = Vec::new();
    for sequence in 0..count {
        for (producer, partition) in [(0, 0), (1, 0), (2, 1)] {
            let mut record = vec![0; size];
            payload.fill(producer, partition, sequence, 0, &mut record);
            all.extend_from_slice(&record[STAMP_BYTES..]);
        }
    }
    all
}

/// Share of the aligned 8-byte words that occurred before: a lower bound for what a string matcher finds.
fn repeated_share(bytes: &[u8]) -> f64 {
    let mut seen = HashSet::new();
    let words = bytes.chunks_exact(8);
    let count = words.len();
    let repeated = words.filter(|word| !seen.insert(*word)).count();
    repeated as f64 / count as f64
}

#[test]
fn random_records_share_no_eight_byte_string_at_any_place() {
    let bytes = records(Compressibility::Random, 1024, 3000);
    let mut strings: Vec<u64> = bytes.windows(8).map(|window| u64::from_le_bytes(window.try_into().unwrap())).collect();
    let all = strings.len();
    strings.sort_unstable();
    strings.dedup();
    // 9 million strings out of 2^64: a repeat by chance has a probability of 2 in a million.
    assert_eq!(all, strings.len());
}

#[test]
fn random_bytes_are_evenly_spread() {
    let bytes = records(Compressibility::Random, 1000, 2000);
    let mut counts = [0_u64; 256];
    for byte in &bytes {
        counts[usize::from(*byte)] += 1;
    }
    let expected = bytes.len() as f64 / 256.0;
    for (byte, count) in counts.iter().enumerate() {
        assert!((*count as f64 / expected - 1.0).abs() < 0.05, "byte {byte} occurs {count} times for {expected}");
    }
}

#[test]
fn the_stated_share_of_the_bytes_repeats() {
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let measured = repeated_share(&records(Compressibility::Ratio(share), STAMP_BYTES + 1024, 500));
        assert!((measured - share).abs() < 0.02, "{measured} for {share}");
    }
}

#[test]
fn json_records_are_json_lines_that_all_differ() {
    let payload = Payload::new(9, Compressibility::Json);
    let mut ids = HashSet::new();
    for sequence in 0..500 {
        let mut record = vec![0; 1024];
        payload.fill(3, 4, sequence, 0, &mut record);
        let text = std::str::from_utf8(&record[STAMP_BYTES..]).unwrap();
        let whole_lines: Vec<&str> = text.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect();
        assert!(whole_lines.len() >= 3, "{text}");
        for line in whole_lines {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            assert!(ids.insert(value["id"].as_str().unwrap().to_owned()));
        }
    }
}

#[test]
fn a_stamp_is_read_back_and_the_content_checked() {
    for kind in [Compressibility::Random, Compressibility::Json, Compressibility::Ratio(0.3)] {
        let payload = Payload::new(11, kind);
        let mut record = vec![0; 333];
        payload.fill(5, 6, 7, 8, &mut record);
        let stamp = Stamp::read(&record).unwrap();
        assert_eq!(stamp, Stamp { run: 11, producer: 5, sequence: 7, sent_ns: 8 });
        let mut scratch = Vec::new();
        assert!(payload.is_intact(&stamp, 6, &record, &mut scratch));
        assert!(!payload.is_intact(&stamp, 5, &record, &mut scratch), "a record of another partition is not this one");
        record[200] ^= 1;
        assert!(!payload.is_intact(&stamp, 6, &record, &mut scratch));
    }
    assert_eq!(Stamp::read(&[0; STAMP_BYTES - 1]), None);
}

#[test]
fn every_size_from_the_stamp_on_is_filled_to_its_last_byte() {
    let payload = Payload::new(1, Compressibility::Random);
    for size in STAMP_BYTES..300 {
        let (mut one, mut two) = (vec![0x55; size], vec![0xAA; size]);
        payload.fill(0, 0, 1, 2, &mut one);
        payload.fill(0, 0, 1, 2, &mut two);
        assert_eq!(one, two, "size {size}");
    }
}

#[test]
fn compressibility_is_parsed_from_the_words_of_the_command_line() {
    assert_eq!("random".parse(), Ok(Compressibility::Random));
    assert_eq!("json".parse(), Ok(Compressibility::Json));
    assert_eq!("0.5".parse(), Ok(Compressibility::Ratio(0.5)));
    for bad in ["", "1.1", "-0.1", "NaN", "zip"] {
        let error = bad.parse::<Compressibility>().unwrap_err();
        assert!(error.to_string().contains("random, json"), "{error}");
    }
}
