use proptest::prelude::*;
use ringmain_core::codec::Compression;
use ringmain_core::ids::Durability;
use ringmain_core::topic::TopicSettings;

use super::*;

fn topic(id: u64, version: u64, partitions: usize) -> CatalogTopic {
    CatalogTopic {
        info: TopicInfo {
            id: TopicId(id),
            name: format!("topic_{id}"),
            stores: 2,
            partition_stores: (0..partitions).map(|partition| (partition % 2) as u16).collect(),
            settings: TopicSettings {
                durability_default: Durability::Synced,
                durability_floor: Durability::Flushed,
                compression: Compression::Lz4,
                retention_ms: Some(version * 1000),
                retention_bytes: version.is_multiple_of(2).then_some(1 << 30),
            },
            created_ms: -5,
            version,
        },
        store_shards: vec![1, 0],
        created_epochs: vec![3, version as u32],
    }
}

fn open(path: &Path) -> (Catalog, Vec<CatalogTopic>) {
    Catalog::open(path).unwrap()
}

#[test]
fn what_was_put_is_there_after_the_next_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog.log");
    let (mut catalog, topics) = open(&path);
    assert!(topics.is_empty());
    catalog.put(topic(2, 1, 3)).unwrap();
    catalog.put(topic(1, 2, 0)).unwrap();
    catalog.put(topic(3, 3, 10_000)).unwrap();
    catalog.put(topic(2, 4, 5)).unwrap();
    catalog.delete(TopicId(1), 9).unwrap();
    catalog.delete(TopicId(77), 5).unwrap();
    drop(catalog);
    let (catalog, topics) = open(&path);
    assert_eq!(topics, [topic(2, 4, 5), topic(3, 3, 10_000)]);
    assert_eq!(catalog.version(), 9);
}

#[test]
fn a_file_of_old_changes_is_rewritten_and_keeps_topics_and_version() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog.log");
    let (mut catalog, _) = open(&path);
    catalog.put(topic(1, 1, 100)).unwrap();
    for version in 2..2000 {
        catalog.put(topic(2, version, 50)).unwrap();
    }
    catalog.delete(TopicId(2), 5000).unwrap();
    assert!(catalog.bytes() < 2 * COMPACT_BYTES_MIN, "{} bytes", catalog.bytes());
    assert_eq!(fs::metadata(&path).unwrap().len(), catalog.bytes());
    catalog.put(topic(3, 4, 1)).unwrap();
    drop(catalog);
    let (catalog, topics) = open(&path);
    assert_eq!(topics, [topic(1, 1, 100), topic(3, 4, 1)]);
    assert_eq!(catalog.version(), 5000);
    assert!(!path.with_extension("new").exists());
}

#[test]
fn a_half_written_rewrite_of_an_earlier_process_does_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog.log");
    let (mut catalog, _) = open(&path);
    catalog.put(topic(1, 1, 1)).unwrap();
    drop(catalog);
    fs::write(path.with_extension("new"), "half").unwrap();
    assert_eq!(open(&path).1, [topic(1, 1, 1)]);
}

#[test]
fn damage_before_whole_records_is_refused_and_not_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog.log");
    let (mut catalog, _) = open(&path);
    catalog.put(topic(1, 1, 10)).unwrap();
    let first_end = catalog.bytes();
    catalog.put(topic(2, 2, 10)).unwrap();
    drop(catalog);
    let whole = fs::read(&path).unwrap();
    for place in HEADER.len()..first_end as usize {
        let mut damaged = whole.clone();
        damaged[place] ^= 0x80;
        fs::write(&path, &damaged).unwrap();
        match Catalog::open(&path) {
            Err(CatalogError::Corrupt { place: 8, .. }) => assert_eq!(fs::read(&path).unwrap(), damaged),
            // Padding has no meaning.
            Ok((_, topics)) => assert_eq!(topics, [topic(1, 1, 10), topic(2, 2, 10)]),
            Err(error) => panic!("{place}: {error}"),
        }
    }
}

#[test]
fn foreign_files_and_later_versions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog.log");
    for bytes in [&b""[..], b"RMC", b"something else"] {
        fs::write(&path, bytes).unwrap();
        assert!(matches!(Catalog::open(&path), Err(CatalogError::NoCatalog(_))));
    }
    fs::write(&path, b"RMCT\x02\0\0\0").unwrap();
    assert!(matches!(Catalog::open(&path), Err(CatalogError::Version { version: 2, .. })));
}

#[test]
fn a_topic_larger_than_any_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog.log");
    let (mut catalog, _) = open(&path);
    let error = catalog.put(topic(1, 1, 10_001)).unwrap_err();
    assert!(matches!(error, CatalogError::TooLarge(TopicId(1))));
    assert_eq!(catalog.bytes(), 8);
    catalog.put(topic(1, 1, 1)).unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Put { id: u64, partitions: usize },
    Delete { id: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..6u64, 0..40usize).prop_map(|(id, partitions)| Step::Put { id, partitions }),
        1 => (0..6u64).prop_map(|id| Step::Delete { id }),
    ];
    proptest::collection::vec(step, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Cut after any byte, the catalog is as it was after the last record that is whole.
    #[test]
    fn a_file_cut_anywhere_gives_a_state_that_was(steps in steps()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalog.log");
        let (mut catalog, _) = open(&path);
        let mut model = BTreeMap::new();
        let mut states = vec![(catalog.bytes(), model.clone(), 0)];
        for (version, step) in (1..).zip(steps) {
            match step {
                Step::Put { id, partitions } => {
                    let topic = topic(id, version, partitions);
                    model.insert(id, topic.clone());
                    catalog.put(topic).unwrap();
                }
                Step::Delete { id } => {
                    model.remove(&id);
                    catalog.delete(TopicId(id), version).unwrap();
                }
            }
            states.push((catalog.bytes(), model.clone(), version));
        }
        drop(catalog);
        let whole = fs::read(&path).unwrap();
        for bytes in HEADER.len()..=whole.len() {
            fs::write(&path, &whole[..bytes]).unwrap();
            let (mut catalog, topics) = open(&path);
            let (end, model, version) = states.iter().rev().find(|state| state.0 <= bytes as u64).unwrap();
            prop_assert_eq!(topics, model.values().cloned().collect::<Vec<_>>());
            prop_assert_eq!(catalog.version(), *version);
            prop_assert_eq!(catalog.bytes(), *end);
            // Goes on from there; the disk is spared at most places.
            if bytes % 16 == 0 {
                catalog.put(topic(9, 1000, 1)).unwrap();
                drop(catalog);
                prop_assert!(open(&path).1.contains(&topic(9, 1000, 1)));
            }
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = record::read(&bytes);
    }
}

#[test]
fn a_topic_written_before_there_was_retention_has_the_default_settings() {
    let levels = TopicSettings { durability_default: Durability::Synced, ..TopicSettings::default() };
    let mut old = topic(2, 1, 3);
    old.info.settings = levels;
    let record = record::write(&Body::Put(old.clone())).unwrap();
    // Without the two bounds at its end.
    let record = with_body(&record, |body| body.truncate(body.len() - 16));
    let Some(Record::Whole(read, _)) = record::read(&record) else { panic!("no record") };
    assert_eq!(read, Body::Put(old));
}

/// The record with another body, sealed anew.
fn with_body(record: &[u8], change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let body_bytes = u32::from_le_bytes(*record.first_chunk::<4>().unwrap()) as usize;
    let mut body = record[8..8 + body_bytes].to_vec();
    change(&mut body);
    let size = (body.len() as u32).to_le_bytes();
    let mut crc = ringmain_core::crc::Crc32c::default();
    crc.update(&size);
    crc.update(&body);
    let mut record = [&size[..], &crc.finish().to_le_bytes(), &body].concat();
    record.resize(record.len().next_multiple_of(8), 0);
    record
}

#[test]
fn a_whole_record_of_an_unknown_form_is_refused_and_never_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog.log");
    let (mut catalog, _) = open(&path);
    catalog.put(topic(1, 1, 3)).unwrap();
    let known = fs::read(&path).unwrap();
    catalog.put(topic(2, 2, 3)).unwrap();
    drop(catalog);
    // The record of topic 2 with a longer body and the right CRC.
    let whole = fs::read(&path).unwrap();
    let record = with_body(&whole[known.len()..], |body| body.extend([7; 8]));
    let newer = [known.as_slice(), &record].concat();
    fs::write(&path, &newer).unwrap();
    let place = known.len() as u64;
    assert!(matches!(Catalog::open(&path), Err(CatalogError::UnknownRecord { place: at, .. }) if at == place));
    assert_eq!(fs::read(&path).unwrap(), newer);
}

#[test]
fn a_look_gives_the_topics_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("catalog.log");
    let (mut catalog, _) = open(&path);
    catalog.put(topic(1, 1, 3)).unwrap();
    catalog.put(topic(2, 2, 3)).unwrap();
    drop(catalog);
    assert_eq!(Catalog::peek(&path).unwrap(), (vec![topic(1, 1, 3), topic(2, 2, 3)], None));
    // A torn change at the end is told, and left there.
    let whole = fs::read(&path).unwrap();
    let torn = [whole.as_slice(), &[9; 13]].concat();
    fs::write(&path, &torn).unwrap();
    let (topics, tail) = Catalog::peek(&path).unwrap();
    assert_eq!((topics.len(), tail), (2, Some(whole.len() as u64)));
    assert_eq!(fs::read(&path).unwrap(), torn);
    assert!(matches!(Catalog::peek(&dir.path().join("none")), Err(CatalogError::Io { .. })));
}
