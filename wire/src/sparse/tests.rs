use proptest::prelude::*;
use ringmain_core::batch::{check_crc, check_stamp};
use ringmain_core::ids::{Epoch, Offset, PartitionKey};

use super::*;
use crate::batch_builder::BatchBuilder;
use crate::record::NewRecord;

fn tagged(tags: &[Option<&str>]) -> Bytes {
    let mut builder = BatchBuilder::new(PartitionKey::new(1, 2));
    for (number, tag) in tags.iter().enumerate() {
        let value = number.to_string();
        builder.push(&NewRecord { value: Some(value.as_bytes()), tag: *tag, ..NewRecord::default() }).unwrap();
    }
    let mut bytes = builder.finish().to_vec();
    stamp(&mut bytes, Offset(100), 5, Epoch(1));
    bytes.into()
}

fn view(bytes: &[u8]) -> BatchView<'_> {
    let header = BatchHeader::parse(bytes).unwrap();
    check_crc(&header, bytes).unwrap();
    check_stamp(bytes).unwrap();
    BatchView::parse(bytes, &header).unwrap()
}

fn offsets(bytes: &[u8]) -> Vec<u64> {
    view(bytes).records().map(|record| record.offset.0).collect()
}

#[test]
fn passing_records_keep_offset_and_content() {
    let bytes = tagged(&[Some("a"), Some("b"), None, Some("a")]);
    let filter = TagFilter::new(&["a".into()]);
    let Filtered::Some(sparse) = SparseBuilder::new().filter(&view(&bytes), &filter) else { panic!("two pass") };
    assert_eq!(offsets(&sparse), [100, 103]);
    let values: Vec<_> = view(&sparse).records().map(|record| record.value.unwrap()).collect();
    assert_eq!(values, [b"0", b"3"]);
    assert_eq!(view(&sparse).header().append_time_ms, 5);
}

#[test]
fn all_or_nothing_needs_no_copy() {
    let bytes = tagged(&[Some("a"), Some("b")]);
    let mut builder = SparseBuilder::new();
    assert_eq!(builder.filter(&view(&bytes), &TagFilter::new(&["a".into(), "b".into()])), Filtered::All);
    assert_eq!(builder.filter(&view(&bytes), &TagFilter::new(&["c".into()])), Filtered::Nothing);
    assert_eq!(builder.filter(&view(&bytes), &TagFilter::new(&[])), Filtered::Nothing);
}

#[test]
fn a_hash_alone_does_not_let_a_record_pass() {
    // The entry claims the hash of "a" while the header says "b", as a collision would look.
    let mut bytes = tagged(&[Some("b"), Some("a")]).to_vec();
    let entry = (128 + view(&bytes).body().len()).next_multiple_of(4) + 4;
    bytes[entry + 12..entry + 16].copy_from_slice(&crate::tag::tag_hash(b"a").to_le_bytes());
    let header = BatchHeader::parse(&bytes).unwrap();
    let view = BatchView::parse(&bytes, &header).unwrap();
    let Filtered::Some(sparse) = SparseBuilder::new().filter(&view, &TagFilter::new(&["a".into()])) else {
        panic!("one passes")
    };
    assert_eq!(offsets(&sparse), [101]);
}

#[test]
fn a_sparse_batch_can_be_cut_again() {
    let bytes = tagged(&[None, Some("a"), Some("b"), Some("a"), Some("b")]);
    let mut builder = SparseBuilder::new();
    let once = builder.copy(&view(&bytes), &[1, 2, 4]);
    let twice = builder.copy(&view(&once), &[1, 2]);
    assert_eq!(offsets(&twice), [102, 104]);
}

proptest! {
    #[test]
    fn any_choice_of_records_round_trips(kept in proptest::collection::btree_set(0u32..30, 1..30)) {
        let bytes = tagged(&[None; 30]);
        let kept: Vec<_> = kept.into_iter().collect();
        let sparse = SparseBuilder::new().copy(&view(&bytes), &kept);
        let expected: Vec<_> = kept.iter().map(|number| 100 + u64::from(*number)).collect();
        prop_assert_eq!(offsets(&sparse), expected);
    }
}

#[test]
fn indexes_never_make_a_batch_larger_than_may_be() {
    let mut builder = BatchBuilder::new(PartitionKey::new(1, 2));
    for number in 0..65_000 {
        let tag = if number == 7 { "n" } else { "y" };
        builder.push(&NewRecord { value: Some(b"abc"), tag: Some(tag), ..NewRecord::default() }).unwrap();
    }
    let mut bytes = builder.finish().to_vec();
    stamp(&mut bytes, Offset(100), 5, Epoch(1));
    let Filtered::Some(sparse) = SparseBuilder::new().filter(&view(&bytes), &TagFilter::new(&["y".into()])) else {
        panic!("most pass")
    };
    let (mut rest, mut found) = (&sparse[..], Vec::new());
    while !rest.is_empty() {
        let header = BatchHeader::parse(rest).unwrap();
        found.extend(offsets(rest));
        rest = &rest[header.batch_bytes as usize..];
    }
    let expected: Vec<u64> = (100..65_100).filter(|offset| *offset != 107).collect();
    assert_eq!(found, expected);
}
