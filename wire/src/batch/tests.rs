use proptest::prelude::*;
use ringmain_core::batch::seal_crc;
use ringmain_core::ids::PartitionKey;

use super::*;
use crate::batch_builder::BatchBuilder;
use crate::record::NewRecord;
use crate::samples;

fn header_of(bytes: &[u8]) -> BatchHeader {
    BatchHeader::parse(bytes).unwrap()
}

/// Changes bytes and makes the CRC right again, as a hostile producer would.
fn tampered(at: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = samples::batch();
    bytes[at..at + value.len()].copy_from_slice(value);
    seal_crc(&mut bytes);
    bytes
}

fn check(bytes: &[u8]) -> Result<(), InvalidBatch> {
    let header = BatchHeader::parse(bytes)?;
    check_produced(&header, bytes)
}

fn entry_at(index: usize) -> usize {
    let bytes = samples::batch();
    let header = header_of(&bytes);
    (128 + header.raw_body_bytes as usize).next_multiple_of(4) + 4 + index * ENTRY_BYTES
}

#[test]
fn the_sample_batch_reads_back() {
    let bytes = samples::stamped_batch();
    let header = header_of(&bytes);
    check_produced(&header, &bytes).unwrap();
    let view = BatchView::parse(&bytes, &header).unwrap();
    let records: Vec<_> = view.records().collect();
    assert_eq!(records.len(), 4);
    assert_eq!((records[0].key, records[0].value), (Some(&b"key"[..]), Some(&b"value"[..])));
    assert_eq!((records[0].offset, records[0].tag()), (Offset(1000), Some(&b"red"[..])));
    assert_eq!((records[1].key, records[1].value), (None, Some(&b""[..])));
    assert_eq!((records[2].key, records[2].value), (Some(&b"gone"[..]), None));
    assert_eq!(records[2].timestamp_ms, 1_699_999_999_993);
    let headers: Vec<_> = records[3].headers().map(Result::unwrap).collect();
    assert_eq!(headers, [("$tag", &b"blue"[..]), ("trace", b"\x01\x02"), ("empty", b"")]);
    assert_eq!((records[3].offset, records[3].key), (Offset(1003), Some(&b""[..])));
}

#[test]
fn a_wrong_crc_is_told_apart_from_a_wrong_structure() {
    let mut bytes = samples::batch();
    bytes[130] ^= 1;
    assert_eq!(check(&bytes).unwrap_err().code(), ErrorCode::CORRUPT_BATCH);
    let body_bytes = header_of(&samples::batch()).raw_body_bytes;
    let bytes = tampered(entry_at(0), &body_bytes.to_le_bytes());
    assert_eq!(check(&bytes).unwrap_err(), InvalidBatch::Record(1));
    assert_eq!(check(&bytes).unwrap_err().code(), ErrorCode::INVALID_BATCH);
}

#[test]
fn entries_that_do_not_fit_the_body_are_refused() {
    let body_bytes = header_of(&samples::batch()).raw_body_bytes;
    let last = entry_at(3);
    for end in [0, body_bytes - 1, body_bytes + 1, u32::MAX] {
        assert!(check(&tampered(last, &end.to_le_bytes())).is_err(), "{end}");
    }
    for key_bytes in [body_bytes, u32::MAX] {
        assert!(check(&tampered(last + 4, &key_bytes.to_le_bytes())).is_err());
    }
    assert!(check(&tampered(last + 16, &u16::MAX.to_le_bytes())).is_err());
    for flags in [4u16, 0x8000, 1, 2] {
        // Record 0 has a key and a value, so that neither can be null.
        assert_eq!(check(&tampered(entry_at(0) + 18, &flags.to_le_bytes())), Err(InvalidBatch::Record(0)));
    }
}

#[test]
fn counts_that_disagree_with_the_header_are_refused() {
    assert!(matches!(check(&tampered(36, &5u32.to_le_bytes())), Err(InvalidBatch::Entries { .. })));
    assert!(matches!(check(&tampered(68, &1u32.to_le_bytes())), Err(InvalidBatch::BodyBytes { .. })));
    for count in [0u32, 3, 5, 1000, u32::MAX / 20, u32::MAX] {
        assert!(check(&tampered(entry_at(0) - 4, &count.to_le_bytes())).is_err(), "{count}");
    }
}

#[test]
fn unknown_codecs_and_flags_are_refused() {
    assert_eq!(check(&tampered(54, &[3])), Err(InvalidBatch::Codec(3)));
    assert_eq!(check(&tampered(55, &[2])), Err(InvalidBatch::Flags(2)));
    // A sparse batch can only be read, not produced.
    let sparse = samples::sparse_batch();
    assert_eq!(check(&sparse), Err(InvalidBatch::Flags(FLAG_SPARSE)));
    assert!(BatchView::parse(&sparse, &header_of(&sparse)).is_ok());
    assert_eq!(
        BatchView::parse(&tampered(55, &[1]), &header_of(&tampered(55, &[1]))).err(),
        Some(InvalidBatch::Indexes)
    );
}

#[test]
fn table_sizes_that_do_not_fill_the_batch_are_refused() {
    let size = samples::batch().len() as u32 - 100;
    for wrong in [0, 4, size - 8, size + 1, size + 8, u32::MAX, u32::MAX - 99] {
        assert!(check(&tampered(96, &wrong.to_le_bytes())).is_err(), "{wrong}");
    }
}

#[test]
fn sparse_indexes_must_rise_and_be_as_many_as_the_records() {
    let good = samples::sparse_batch();
    let table_bytes = u32::from_le_bytes(good[96..100].try_into().unwrap()) as usize;
    let indexes_at = 100 + table_bytes - 8;
    for (first, second) in [(3u32, 3u32), (3, 0), (u32::MAX, 0)] {
        let mut bytes = good.clone();
        bytes[indexes_at..indexes_at + 4].copy_from_slice(&first.to_le_bytes());
        bytes[indexes_at + 4..indexes_at + 8].copy_from_slice(&second.to_le_bytes());
        assert_eq!(BatchView::parse(&bytes, &header_of(&bytes)).err(), Some(InvalidBatch::Indexes));
    }
    let mut fewer = good.clone();
    fewer[indexes_at - 4..indexes_at].copy_from_slice(&1u32.to_le_bytes());
    assert!(matches!(BatchView::parse(&fewer, &header_of(&fewer)), Err(InvalidBatch::Entries { .. })));
}

#[test]
fn offsets_at_the_end_of_the_number_space_do_not_overflow() {
    let mut bytes = samples::batch();
    ringmain_core::batch::stamp(&mut bytes, Offset(u64::MAX), i64::MAX, ringmain_core::ids::Epoch(0));
    bytes[72..80].copy_from_slice(&i64::MAX.to_le_bytes());
    let view = BatchView::parse(&bytes, &header_of(&bytes)).unwrap();
    assert_eq!(view.records().count(), 4);
}

/// The table's vectors, and even its vtable, may be any bytes of the batch: here the entries are read from inside the
/// body, and in the second case the vtable lies inside an entry.
#[test]
fn vectors_that_overlap_are_read_without_harm() {
    let mut builder = BatchBuilder::new(PartitionKey::new(1, 0));
    // The value holds a vector of one entry: 1, then an entry that ends at 64 with nothing else set.
    let mut value = [0u8; 64];
    value[..4].copy_from_slice(&1u32.to_le_bytes());
    value[4..8].copy_from_slice(&64u32.to_le_bytes());
    builder.push(&NewRecord { value: Some(&value), ..NewRecord::default() }).unwrap();
    let mut bytes = builder.finish().to_vec();
    // Entries: at 128, the first byte of the body; told from field 116.
    bytes[116..120].copy_from_slice(&12u32.to_le_bytes());
    seal_crc(&mut bytes);
    let view = check(&bytes).and_then(|()| BatchView::parse(&bytes, &header_of(&bytes)));
    assert_eq!(view.map(|view| view.records().count()), Ok(1));

    // The vtable 8, 12, 4, 8 stands in the body, which the entries overlap too: readable, so accepted, and harmless.
    value[8..16].copy_from_slice(&[8, 0, 12, 0, 4, 0, 8, 0]);
    let mut builder = BatchBuilder::new(PartitionKey::new(1, 0));
    builder.push(&NewRecord { value: Some(&value), ..NewRecord::default() }).unwrap();
    let mut bytes = builder.finish().to_vec();
    // From the table at 112 back to 136 = 128 + 8: a negative distance.
    bytes[112..116].copy_from_slice(&(-24i32).to_le_bytes());
    seal_crc(&mut bytes);
    let before = bytes.clone();
    let view = check(&bytes).and_then(|()| BatchView::parse(&bytes, &header_of(&bytes)));
    assert_eq!(view.map(|view| view.records().count()), Ok(1));
    // A stamp on it changes only the stamp.
    ringmain_core::batch::stamp(&mut bytes, Offset(9), 9, ringmain_core::ids::Epoch(9));
    assert_eq!(bytes[32..], before[32..]);
}

fn read_everything(bytes: &[u8]) {
    let Ok(header) = BatchHeader::parse(bytes) else { return };
    let Ok(view) = BatchView::parse(bytes, &header) else { return };
    let inside = bytes.as_ptr_range();
    let mut records = 0;
    for record in view.records() {
        records += 1;
        let _ = record.headers().count();
        for part in [record.key.unwrap_or_default(), record.value.unwrap_or_default(), record.header_bytes] {
            let range = part.as_ptr_range();
            assert!(part.is_empty() || (inside.start <= range.start && range.end <= inside.end));
        }
    }
    assert_eq!(records, header.record_count, "a valid batch yields each of its records");
}

proptest! {
    #[test]
    fn mutated_batches_never_panic_and_never_read_outside(
        sparse: bool,
        flips in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = if sparse { samples::sparse_batch() } else { samples::stamped_batch() };
        for (at, value) in flips {
            // Not the first bytes: version and size would hide the rest.
            let at = 36 + at.index(bytes.len() - 36);
            bytes[at] = value;
        }
        read_everything(&bytes);
    }

    #[test]
    fn mutated_tables_never_panic_and_never_read_outside(at in 100usize..140, value in any::<[u8; 4]>(), sparse: bool) {
        let mut bytes = if sparse { samples::sparse_batch() } else { samples::stamped_batch() };
        bytes[at..at + 4].copy_from_slice(&value);
        read_everything(&bytes);
        // Small numbers reach further than random ones.
        bytes[at..at + 4].copy_from_slice(&[value[0] & 63, 0, 0, 0]);
        read_everything(&bytes);
        bytes[at..at + 4].copy_from_slice(&[0u8.wrapping_sub(value[0] & 63), 255, 255, 255]);
        read_everything(&bytes);
    }

    #[test]
    fn arbitrary_tables_never_panic(table in proptest::collection::vec(any::<u8>(), 0..300), records in 1u32..9) {
        let size = (100 + table.len()).next_multiple_of(8);
        let header = BatchHeader { batch_bytes: size as u32, record_count: records, ..BatchHeader::default() };
        let mut bytes = vec![0; size];
        header.write(&mut bytes);
        bytes[96..100].copy_from_slice(&(table.len() as u32).to_le_bytes());
        bytes[100..100 + table.len()].copy_from_slice(&table);
        read_everything(&bytes);
    }
}
