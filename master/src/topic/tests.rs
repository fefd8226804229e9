use std::sync::atomic::{AtomicBool, Ordering};

use ringmain_core::codec::Compression;
use ringmain_core::ids::Durability;
use ringmain_core::topic::TopicSettings;

use super::*;
use crate::link::Applied;

/// A broker that applies at once, or fails when told to.
#[derive(Default)]
struct FakeBroker {
    topics: Mutex<BTreeMap<TopicId, TopicInfo>>,
    changes: Mutex<Vec<TopicChange>>,
    failing: AtomicBool,
}

impl BrokerLink for FakeBroker {
    fn apply(&self, change: TopicChange, done: Applied) {
        if self.failing.load(Ordering::SeqCst) {
            return done(Err("no space".to_owned()));
        }
        match &change {
            TopicChange::Put(topic) => drop(self.topics.lock().unwrap().insert(topic.id, topic.clone())),
            TopicChange::Delete { id, .. } => drop(self.topics.lock().unwrap().remove(id)),
        }
        self.changes.lock().unwrap().push(change);
        done(Ok(()));
    }

    fn shard_count(&self) -> u16 {
        4
    }

    fn topics(&self) -> Vec<TopicInfo> {
        self.topics.lock().unwrap().values().cloned().collect()
    }

    fn address(&self) -> BrokerAddress {
        BrokerAddress { broker_id: 1, host: "localhost".to_owned(), port: 8123 }
    }

    fn survives_process_kill(&self) -> bool {
        true
    }
}

const NEW: NewStore = NewStore { cluster_id: None, first_topic_id: TopicId(1) };

fn open(directory: &tempfile::TempDir) -> Arc<TopicService> {
    Arc::new(TopicService::open(&directory.path().join("m.redb"), NEW).unwrap())
}

fn run<T>(test: impl Future<Output = T>) -> T {
    crate::runtime::control_runtime("test").block_on(test)
}

#[test]
fn a_created_topic_is_placed_applied_and_listed() {
    let directory = tempfile::tempdir().unwrap();
    let broker = Arc::new(FakeBroker::default());
    run(async {
        let service = open(&directory);
        assert!(matches!(service.create(CreateTopicRequest::new("a")).await, Err(ServiceError::NoBroker)));
        service.attach(broker.clone()).await.unwrap();
        let new = CreateTopicRequest { partitions: 6, ..CreateTopicRequest::new("a") };
        let made = service.create(new.clone()).await.unwrap();
        assert_eq!((made.info.stores, made.info.partition_stores.clone()), (4, vec![0, 1, 2, 3, 0, 1]));
        assert!(made.applied && service.get("a").unwrap().applied);
        assert_eq!(broker.topics(), vec![TopicInfo::clone(&made.info)]);
        assert!(matches!(service.create(new).await, Err(ServiceError::Exists(_))));
    });
}

#[test]
fn bad_descriptions_are_refused_before_anything_is_written() {
    let directory = tempfile::tempdir().unwrap();
    run(async {
        let service = open(&directory);
        service.attach(Arc::new(FakeBroker::default())).await.unwrap();
        let version = service.version();
        let good = CreateTopicRequest::new("a");
        let floor = TopicSettings { durability_floor: Durability::Synced, ..TopicSettings::default() };
        let floor = CreateTopicRequest { settings: floor, ..good.clone() };
        let partitions = CreateTopicRequest { partitions: 0, ..good.clone() };
        let stores = CreateTopicRequest { stores: 2, ..good.clone() };
        for bad in [floor, partitions, stores, CreateTopicRequest::new("no/path")] {
            let error = service.create(bad).await.unwrap_err();
            assert_eq!(error.code(), ErrorCode::BAD_REQUEST, "{error}");
        }
        assert_eq!(service.version(), version);
        assert!(matches!(service.delete("a".to_owned()).await, Err(ServiceError::NotFound(_))));
    });
}

#[test]
fn a_change_the_broker_failed_stays_owed_and_is_repaired() {
    let directory = tempfile::tempdir().unwrap();
    let broker = Arc::new(FakeBroker::default());
    run(async {
        let service = open(&directory);
        service.attach(broker.clone()).await.unwrap();
        service.create(CreateTopicRequest::new("kept")).await.unwrap();
        broker.failing.store(true, Ordering::SeqCst);
        let error = service.create(CreateTopicRequest::new("owed")).await.unwrap_err();
        assert!(matches!(error, ServiceError::NotApplied { .. }), "{error}");
        assert!(!service.get("owed").unwrap().applied);
        assert!(service.delete("kept".to_owned()).await.is_err());
        assert_eq!(service.repair().await, Reconciled { failed: 2, ..Reconciled::default() });
        broker.failing.store(false, Ordering::SeqCst);
        // Asking again for what failed is the same as the repair.
        assert!(service.create(CreateTopicRequest::new("owed")).await.unwrap().applied);
        assert_eq!(service.repair().await, Reconciled { deleted: 1, ..Reconciled::default() });
        assert_eq!(broker.topics().len(), 1);
        assert!(!service.owes());
    });
}

#[test]
fn a_restart_hands_over_only_what_the_broker_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let broker = Arc::new(FakeBroker::default());
    run(async {
        let service = open(&directory);
        service.attach(broker.clone()).await.unwrap();
        for name in ["a", "b", "c"] {
            service.create(CreateTopicRequest::new(name)).await.unwrap();
        }
        broker.failing.store(true, Ordering::SeqCst);
        assert!(service.delete("c".to_owned()).await.is_err());
        assert!(service.create(CreateTopicRequest::new("d")).await.is_err());
    });
    broker.failing.store(false, Ordering::SeqCst);
    broker.changes.lock().unwrap().clear();
    run(async {
        let service = open(&directory);
        let report = service.attach(broker.clone()).await.unwrap();
        assert_eq!(report, Reconciled { put: 1, deleted: 1, adopted: 0, failed: 0 });
        assert_eq!(broker.changes.lock().unwrap().len(), 2);
        let names: Vec<_> = broker.topics().into_iter().map(|topic| topic.name).collect();
        assert_eq!(names, ["a", "b", "d"]);
        assert_eq!(service.attach(broker.clone()).await.unwrap(), Reconciled::default());
    });
}

#[test]
fn a_store_made_anew_takes_topics_over_from_the_broker() {
    let lost = tempfile::tempdir().unwrap();
    let fresh = tempfile::tempdir().unwrap();
    let broker = Arc::new(FakeBroker::default());
    run(async {
        let service = open(&lost);
        service.attach(broker.clone()).await.unwrap();
        for name in ["a", "b", "c"] {
            service.create(CreateTopicRequest::new(name)).await.unwrap();
        }
    });
    run(async {
        let service = open(&fresh);
        let report = service.attach(broker.clone()).await.unwrap();
        assert_eq!((report.adopted, report.failed), (3, 0));
        assert_eq!(service.get("b").unwrap().info.id, TopicId(2));
        let next = service.create(CreateTopicRequest::new("d")).await.unwrap();
        assert_eq!(next.info.id, TopicId(4));
        let versions: Vec<_> = broker.topics().iter().map(|topic| topic.version).collect();
        assert!(versions.iter().all(|version| *version <= next.info.version), "{versions:?}");
    });
}

#[test]
fn pages_cover_all_topics_once_in_order() {
    let directory = tempfile::tempdir().unwrap();
    run(async {
        let service = open(&directory);
        service.attach(Arc::new(FakeBroker::default())).await.unwrap();
        for number in 0..7 {
            service.create(CreateTopicRequest::new(format!("t{number}"))).await.unwrap();
        }
        let (mut after, mut names) = (None, Vec::new());
        loop {
            let page = service.page(after.as_deref(), 3);
            assert_eq!(page.total, 7);
            names.extend(page.topics.iter().map(|view| view.info.name.clone()));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(names, (0..7).map(|number| format!("t{number}")).collect::<Vec<_>>());
    });
}

fn by_bytes(bytes: u64) -> TopicAlteration {
    TopicAlteration { retention_bytes: Some(Some(bytes)), ..TopicAlteration::default() }
}

#[test]
fn an_alter_reaches_the_broker_and_names_only_what_changes() {
    let directory = tempfile::tempdir().unwrap();
    let broker = Arc::new(FakeBroker::default());
    run(async {
        let service = open(&directory);
        service.attach(broker.clone()).await.unwrap();
        let made = service.create(CreateTopicRequest::new("a")).await.unwrap();
        let altered = service.alter("a".to_owned(), by_bytes(1 << 30)).await.unwrap();
        assert_eq!((altered.info.id, altered.info.version), (made.info.id, made.info.version + 1));
        assert_eq!(altered.info.settings.retention_bytes, Some(1 << 30));
        let change = TopicAlteration { compression: Some(Compression::Zstd), ..TopicAlteration::default() };
        let altered = service.alter("a".to_owned(), change).await.unwrap();
        let settings = altered.info.settings;
        assert_eq!((settings.retention_bytes, settings.compression), (Some(1 << 30), Compression::Zstd));
        assert_eq!(broker.topics(), vec![TopicInfo::clone(&altered.info)]);
        // What changes nothing makes no version.
        let again = service.alter("a".to_owned(), change).await.unwrap();
        assert_eq!(again.info.version, altered.info.version);
        assert!(matches!(service.alter("b".to_owned(), change).await, Err(ServiceError::NotFound(_))));
        let error = service.alter("a".to_owned(), by_bytes(0)).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::BAD_REQUEST, "{error}");
    });
    run(async {
        let service = open(&directory);
        assert_eq!(service.attach(broker.clone()).await.unwrap(), Reconciled::default());
        assert_eq!(service.get("a").unwrap().info.settings.retention_bytes, Some(1 << 30));
    });
}

#[test]
fn an_alter_that_the_broker_failed_is_repeated_as_it_is_by_then() {
    let directory = tempfile::tempdir().unwrap();
    let broker = Arc::new(FakeBroker::default());
    run(async {
        let service = open(&directory);
        service.attach(broker.clone()).await.unwrap();
        service.create(CreateTopicRequest::new("a")).await.unwrap();
        broker.failing.store(true, Ordering::SeqCst);
        assert!(service.alter("a".to_owned(), by_bytes(1 << 30)).await.is_err());
        assert!(service.alter("a".to_owned(), by_bytes(1 << 31)).await.is_err());
        broker.failing.store(false, Ordering::SeqCst);
    });
    run(async {
        let service = open(&directory);
        let report = service.attach(broker.clone()).await.unwrap();
        assert_eq!(report, Reconciled { put: 1, ..Reconciled::default() });
        assert_eq!(broker.topics()[0].settings.retention_bytes, Some(1 << 31));
    });
}

#[test]
fn a_store_put_back_from_a_copy_takes_newer_settings_from_the_broker() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.redb");
    let copy = directory.path().join("copy.redb");
    let broker = Arc::new(FakeBroker::default());
    run(async {
        let service = open(&directory);
        service.attach(broker.clone()).await.unwrap();
        service.create(CreateTopicRequest::new("a")).await.unwrap();
    });
    std::fs::copy(&path, &copy).unwrap();
    run(async {
        let service = open(&directory);
        service.attach(broker.clone()).await.unwrap();
        service.alter("a".to_owned(), by_bytes(1 << 30)).await.unwrap();
    });
    std::fs::rename(&copy, &path).unwrap();
    run(async {
        let service = open(&directory);
        let report = service.attach(broker.clone()).await.unwrap();
        assert_eq!((report.adopted, report.failed), (1, 0));
        assert_eq!(service.get("a").unwrap().info.settings.retention_bytes, Some(1 << 30));
        assert_eq!(broker.topics()[0], *service.get("a").unwrap().info);
        service.alter("a".to_owned(), by_bytes(1 << 31)).await.unwrap();
        assert_eq!(broker.topics()[0].settings.retention_bytes, Some(1 << 31));
    });
}

#[test]
fn the_broker_s_answer_to_an_older_version_of_a_topic_settles_nothing() {
    let mut catalogue = Catalogue::default();
    catalogue.putting.insert(TopicId(1), (7, Owed::Sent));
    catalogue.put_settled(TopicId(1), 6, true);
    assert!(catalogue.putting.contains_key(&TopicId(1)));
    catalogue.put_settled(TopicId(1), 7, false);
    assert!(catalogue.put_failed(TopicId(1)));
    catalogue.put_settled(TopicId(1), 7, true);
    assert!(!catalogue.putting.contains_key(&TopicId(1)));
}
