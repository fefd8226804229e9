use std::process::Command;

use super::*;

const NEW: NewStore = NewStore { cluster_id: None, first_topic_id: TopicId(1) };

fn topic(name: &str) -> TopicInfo {
    TopicInfo {
        id: TopicId(0),
        name: name.to_owned(),
        stores: 2,
        partition_stores: vec![0, 1, 0],
        settings: TopicSettings {
            durability_default: Durability::Synced,
            durability_floor: Durability::Flushed,
            compression: Compression::Zstd,
            retention_ms: Some(60_000),
            retention_bytes: None,
        },
        created_ms: 1_700_000_000_000,
        version: 0,
    }
}

fn open(path: &Path) -> (Store, Loaded) {
    Store::open(path, NEW).unwrap()
}

#[test]
fn topics_cluster_id_and_version_are_there_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("master/ringmain.redb");
    let (store, first) = open(&path);
    let made = store.create_topic(topic("orders"), &[]).unwrap();
    assert_eq!((made.id, made.version), (TopicId(1), first.version + 1));
    drop(store);
    let (_store, again) = open(&path);
    assert_eq!(again.topics, vec![made]);
    assert_eq!((again.cluster_id, again.version), (first.cluster_id, first.version + 1));
}

#[test]
fn a_record_of_before_compression_and_retention_is_read_with_their_defaults() {
    let old = br#"{"name":"a","stores":2,"partition_stores":[0,1],"durability_default":"memory","durability_floor":"memory","created_ms":5,"version":2}"#;
    let topic = decode(TopicId(1), old).unwrap();
    assert_eq!(topic.settings, TopicSettings::default());
    assert!(decode(TopicId(1), &encode(&topic)).unwrap() == topic);
}

#[test]
fn an_altered_topic_keeps_its_id_and_gets_the_next_version() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    let (store, _) = open(&path);
    let made = store.create_topic(topic("a"), &[]).unwrap();
    let settings = TopicSettings { retention_bytes: Some(1 << 30), ..made.settings };
    let altered = store.alter_topic(TopicInfo { settings, ..made.clone() }, &[]).unwrap();
    assert_eq!((altered.id, altered.version), (made.id, made.version + 1));
    drop(store);
    assert_eq!(open(&path).1.topics, vec![altered]);
}

#[test]
fn two_stores_have_different_cluster_ids() {
    let directory = tempfile::tempdir().unwrap();
    let (_a, a) = open(&directory.path().join("a.redb"));
    let (_b, b) = open(&directory.path().join("b.redb"));
    assert_ne!(a.cluster_id, b.cluster_id);
}

#[test]
fn a_store_made_beside_a_broker_keeps_its_cluster_and_gives_ids_above_the_old_ones() {
    let directory = tempfile::tempdir().unwrap();
    let new = NewStore { cluster_id: Some(77), first_topic_id: TopicId(1 << 40) };
    let (store, loaded) = Store::open(&directory.path().join("m.redb"), new).unwrap();
    assert_eq!(loaded.cluster_id, 77);
    assert_eq!(store.create_topic(topic("a"), &[]).unwrap().id, TopicId(1 << 40));
}

#[test]
fn an_id_is_not_given_again_after_delete_and_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    let (store, _) = open(&path);
    let first = store.create_topic(topic("a"), &[]).unwrap();
    let version = store.delete_topic(first.id, &[]).unwrap();
    assert_eq!(version, first.version + 1);
    drop(store);
    let (store, loaded) = open(&path);
    assert!(loaded.topics.is_empty());
    assert_eq!(loaded.deleting.get(&first.id), Some(&version));
    let second = store.create_topic(topic("a"), &[first.id]).unwrap();
    assert_eq!((second.id, second.version), (TopicId(2), version + 1));
    drop(store);
    assert!(open(&path).1.deleting.is_empty(), "a settled deletion is forgotten with the next change");
}

#[test]
fn adopted_topics_keep_their_ids_and_newer_ones_come_after() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = open(&directory.path().join("m.redb"));
    let held = TopicInfo { id: TopicId(40), version: 90, ..topic("held") };
    let (adopted, version) = store.adopt(vec![held], TopicId(50), 90).unwrap();
    assert_eq!((adopted[0].id, adopted[0].version, version), (TopicId(40), 91, 91));
    assert_eq!(store.create_topic(topic("next"), &[]).unwrap().id, TopicId(51));
}

#[test]
fn a_second_process_or_store_on_one_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    let _held = open(&path);
    assert!(matches!(Store::open(&path, NEW), Err(OpenError::InUse { .. })));
}

#[test]
fn a_file_half_made_by_a_killed_start_is_made_anew() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    fs::write(path.with_extension("new"), b"half").unwrap();
    let (store, _) = open(&path);
    store.create_topic(topic("a"), &[]).unwrap();
}

#[test]
fn what_is_no_store_is_refused_and_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    fs::write(&path, vec![7; 100_000]).unwrap();
    let error = Store::open(&path, NEW).unwrap_err();
    assert!(matches!(error, OpenError::Foreign { .. }), "{error}");
    assert!(error.to_string().contains("move it away"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), vec![7; 100_000]);

    let other = directory.path().join("other.redb");
    let database = Database::create(&other).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(TableDefinition::<u64, u64>::new("theirs")).unwrap();
    transaction.commit().unwrap();
    drop(database);
    assert!(matches!(Store::open(&other, NEW), Err(OpenError::Foreign { .. })));
}

#[test]
fn a_newer_format_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    let (store, _) = open(&path);
    let transaction = store.database.begin_write().unwrap();
    transaction.open_table(META).unwrap().insert("format", FORMAT + 1).unwrap();
    transaction.commit().unwrap();
    drop(store);
    assert!(matches!(Store::open(&path, NEW), Err(OpenError::Newer { found: 2, .. })));
}

#[test]
fn records_that_make_no_sense_are_damage() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    let (store, _) = open(&path);
    let made = store.create_topic(topic("a"), &[]).unwrap();
    for bad in [&b"{"[..], br#"{"name":"../x"}"#, encode(&TopicInfo { stores: 1, ..topic("a") }).as_slice()] {
        let transaction = store.database.begin_write().unwrap();
        transaction.open_table(TOPICS).unwrap().insert(made.id.get(), bad).unwrap();
        transaction.commit().unwrap();
        let error = load(&store.database, &path).unwrap_err();
        assert!(matches!(error, OpenError::Damaged { .. }), "{error}");
    }
}

#[test]
fn a_truncated_file_is_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    let (store, _) = open(&path);
    for number in 0..50 {
        store.create_topic(topic(&format!("t{number}")), &[]).unwrap();
    }
    drop(store);
    let bytes = fs::metadata(&path).unwrap().len();
    File::options().write(true).open(&path).unwrap().set_len(bytes / 2).unwrap();
    let error = Store::open(&path, NEW).unwrap_err();
    assert!(matches!(error, OpenError::Damaged { .. } | OpenError::Foreign { .. }), "{error}");
}

/// Run by the next test in a process of its own: makes topics until it is killed, and says each one that was committed.
#[test]
#[ignore = "only as the child of another test"]
fn child_that_creates_topics_for_ever() {
    use std::io::Write;
    let path = PathBuf::from(std::env::var_os("RINGMAIN_TEST_STORE").unwrap());
    let (store, _) = open(&path);
    for number in 0.. {
        let made = store.create_topic(topic(&format!("t{number}")), &[]).unwrap();
        writeln!(io::stderr(), "made {}", made.id).unwrap();
    }
}

#[test]
fn a_killed_process_leaves_every_change_it_has_reported() {
    use std::io::{BufRead, BufReader};
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    for round in 0..3 {
        let path = path.with_extension(round.to_string());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "store::tests::child_that_creates_topics_for_ever", "--ignored", "--nocapture"])
            .env("RINGMAIN_TEST_STORE", &path)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let reported = said.by_ref().filter(|line| line.starts_with("made ")).take(20 + round * 7).count();
        child.kill().unwrap();
        child.wait().unwrap();
        let reported = reported + said.filter(|line| line.starts_with("made ")).count();
        let (_store, loaded) = open(&path);
        // One more may be committed and not said.
        assert!((reported..=reported + 1).contains(&loaded.topics.len()), "{reported} {}", loaded.topics.len());
    }
}
