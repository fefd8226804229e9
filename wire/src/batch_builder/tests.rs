use proptest::prelude::*;

use super::*;
use crate::batch::{BatchView, check_produced};
use crate::generated::batch::ringmain::wire as schema;

const KEY: PartitionKey = PartitionKey::new(5, 1);

fn view(bytes: &[u8]) -> BatchView<'_> {
    let header = BatchHeader::parse(bytes).unwrap();
    check_produced(&header, bytes).unwrap();
    BatchView::parse(bytes, &header).unwrap()
}

#[test]
fn the_generated_reader_understands_the_hand_laid_table() {
    let bytes = crate::samples::batch();
    let body = schema::size_prefixed_root_as_batch_body(&bytes[96..]).unwrap();
    assert_eq!(body.entries().len(), 4);
    assert!(body.indexes().is_none());
    assert_eq!(&body.body().bytes()[..3], b"key");
    let first = body.entries().get(0);
    assert_eq!((first.key_bytes(), first.header_bytes(), first.flags()), (3, 11, 0));
    assert_eq!(first.tag_hash(), tag_hash(b"red"));
    assert_eq!(body.entries().get(2).timestamp_delta_ms(), -7);
    assert_eq!(body.entries().get(1).flags(), ENTRY_NULL_KEY);

    let bytes = crate::samples::sparse_batch();
    let body = schema::size_prefixed_root_as_batch_body(&bytes[96..]).unwrap();
    assert_eq!(body.indexes().unwrap().iter().collect::<Vec<_>>(), [0, 3]);
    assert_eq!(body.entries().len(), 2);
}

#[test]
fn the_announced_size_is_the_size() {
    let mut builder = BatchBuilder::new(KEY);
    for size in 0..20 {
        builder.push(&NewRecord { value: Some(&vec![1; size]), ..NewRecord::default() }).unwrap();
        let announced = builder.batch_bytes();
        let mut copy = BatchBuilder::new(KEY);
        for size in 0..=size {
            copy.push(&NewRecord { value: Some(&vec![1; size]), ..NewRecord::default() }).unwrap();
        }
        assert_eq!(copy.finish().len(), announced);
    }
}

#[test]
fn a_full_batch_refuses_a_record_and_keeps_what_it_has() {
    let mut builder = BatchBuilder::with_bytes_max(KEY, 1024);
    let record = NewRecord { value: Some(&[7; 200]), ..NewRecord::default() };
    let mut pushed = 0;
    while builder.push(&record).is_ok() {
        pushed += 1;
    }
    assert_eq!(builder.push(&record), Err(PushError::Full));
    let bytes = builder.finish();
    assert!(bytes.len() <= 1024);
    assert_eq!(view(&bytes).records().count(), pushed);
    // One record larger than the mark goes in alone.
    builder.push(&NewRecord { value: Some(&[7; 5000]), ..NewRecord::default() }).unwrap();
    assert_eq!(builder.push(&record), Err(PushError::Full));
    assert_eq!(view(&builder.finish()).record_count(), 1);
}

#[test]
fn the_largest_record_fits_and_one_byte_more_does_not() {
    let mut builder = BatchBuilder::new(KEY);
    let value = vec![1; RECORD_BYTES_MAX + 1];
    assert!(matches!(
        builder.push(&NewRecord { value: Some(&value), ..NewRecord::default() }),
        Err(PushError::TooLarge { part: "record", .. })
    ));
    assert!(builder.is_empty());
    builder.push(&NewRecord { value: Some(&value[1..]), ..NewRecord::default() }).unwrap();
    assert_eq!(view(&builder.finish()).record_count(), 1);
    let key = vec![1; KEY_BYTES_MAX + 1];
    assert!(builder.push(&NewRecord { key: Some(&key), ..NewRecord::default() }).is_err());
    let headers = [("n", &value[..HEADERS_BYTES_MAX])];
    assert!(builder.push(&NewRecord { headers: &headers, ..NewRecord::default() }).is_err());
}

#[test]
fn the_most_records_fit_and_one_more_does_not() {
    let mut builder = BatchBuilder::new(KEY);
    for _ in 0..BATCH_RECORDS_MAX {
        builder.push(&NewRecord::default()).unwrap();
    }
    assert_eq!(builder.push(&NewRecord::default()), Err(PushError::Full));
    assert_eq!(view(&builder.finish()).record_count() as usize, BATCH_RECORDS_MAX);
}

#[test]
fn times_too_far_apart_go_to_different_batches() {
    let mut builder = BatchBuilder::new(KEY);
    builder.push(&NewRecord { timestamp_ms: 0, ..NewRecord::default() }).unwrap();
    for timestamp_ms in [i64::from(i32::MAX) + 1, i64::MAX, i64::MIN] {
        assert_eq!(builder.push(&NewRecord { timestamp_ms, ..NewRecord::default() }), Err(PushError::Full));
    }
    builder.push(&NewRecord { timestamp_ms: i64::from(i32::MIN), ..NewRecord::default() }).unwrap();
    let bytes = builder.finish();
    assert_eq!(view(&bytes).records().nth(1).unwrap().timestamp_ms, i64::from(i32::MIN));
}

#[test]
fn reset_forgets_records_and_producer() {
    let mut builder = BatchBuilder::new(KEY);
    builder.set_producer(1, 2, 3);
    builder.push(&NewRecord::default()).unwrap();
    let other = PartitionKey::new(6, 0);
    builder.reset(other);
    assert!(builder.is_empty());
    builder.push(&NewRecord { value: Some(b"x"), ..NewRecord::default() }).unwrap();
    let bytes = builder.finish();
    let header = *view(&bytes).header();
    assert_eq!((header.key, header.producer_id, header.record_count), (other, 0, 1));
}

#[derive(Clone, Debug)]
struct Owned {
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<(String, Vec<u8>)>,
    tag: Option<String>,
    delta: i32,
}

fn any_record() -> impl Strategy<Value = Owned> {
    let bytes = |most| proptest::option::of(proptest::collection::vec(any::<u8>(), 0..most));
    let header = ("[a-z]{0,8}", proptest::collection::vec(any::<u8>(), 0..12));
    let headers = proptest::collection::vec(header, 0..3);
    let parts = (bytes(20), bytes(60), headers, proptest::option::of("\\PC{0,6}"), any::<i32>());
    parts.prop_map(|(key, value, headers, tag, delta)| Owned { key, value, headers, tag, delta })
}

proptest! {
    #[test]
    fn records_round_trip(records in proptest::collection::vec(any_record(), 1..40), base in any::<i32>()) {
        let mut builder = BatchBuilder::new(KEY);
        // Two rounds: the second uses memory that the first has left behind.
        for _ in 0..2 {
            for (number, record) in records.iter().enumerate() {
                let headers: Vec<_> = record.headers.iter().map(|(name, value)| (&**name, &**value)).collect();
                let delta = if number == 0 { 0 } else { record.delta };
                builder.push(&NewRecord {
                    key: record.key.as_deref(),
                    value: record.value.as_deref(),
                    headers: &headers,
                    tag: record.tag.as_deref(),
                    timestamp_ms: i64::from(base) + i64::from(delta),
                }).unwrap();
            }
            let announced = builder.batch_bytes();
            let bytes = builder.finish();
            prop_assert_eq!(bytes.len(), announced);
            prop_assert!(schema::size_prefixed_root_as_batch_body(&bytes[96..]).is_ok());
            let view = view(&bytes);
            prop_assert_eq!(view.records().len(), records.len());
            for (view, record) in view.records().zip(&records) {
                prop_assert_eq!(view.key, record.key.as_deref());
                prop_assert_eq!(view.value, record.value.as_deref());
                prop_assert_eq!(view.tag(), record.tag.as_deref().map(str::as_bytes));
                let headers: Vec<_> = view.headers().map(Result::unwrap).filter(|(name, _)| *name != TAG_HEADER).collect();
                let expected: Vec<_> = record.headers.iter().map(|(name, value)| (&**name, &**value)).collect();
                prop_assert_eq!(headers, expected);
            }
        }
    }
}
