//! A broker link that keeps topics in a map, and a master on free ports.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ringmain_core::ids::TopicId;
use ringmain_core::topic::{TopicChange, TopicInfo};
use ringmain_master::{Applied, BrokerAddress, BrokerLink, Master, NewStore};

pub const NEW: NewStore = NewStore { cluster_id: None, first_topic_id: TopicId(1) };

#[derive(Default)]
pub struct FakeBroker {
    pub topics: Mutex<BTreeMap<TopicId, TopicInfo>>,
}

impl BrokerLink for FakeBroker {
    fn apply(&self, change: TopicChange, done: Applied) {
        match change {
            TopicChange::Put(topic) => drop(self.topics.lock().unwrap().insert(topic.id, topic)),
            TopicChange::Delete { id, .. } => drop(self.topics.lock().unwrap().remove(&id)),
        }
        // As from another thread: never inside the call.
        std::thread::spawn(move || done(Ok(())));
    }

    fn shard_count(&self) -> u16 {
        2
    }

    fn topics(&self) -> Vec<TopicInfo> {
        self.topics.lock().unwrap().values().cloned().collect()
    }

    fn address(&self) -> BrokerAddress {
        BrokerAddress { broker_id: 1, host: "broker.example".to_owned(), port: 8123 }
    }

    fn survives_process_kill(&self) -> bool {
        true
    }
}

pub struct Running {
    pub master: Master,
    pub broker: Arc<FakeBroker>,
    _directory: tempfile::TempDir,
}

/// A master with its broker attached.
pub fn master() -> Running {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ringmain.redb");
    let master = Master::start(&path, NEW, "127.0.0.1:0", "127.0.0.1:0").unwrap();
    let broker = Arc::new(FakeBroker::default());
    master.attach(broker.clone()).unwrap();
    Running { master, broker, _directory: directory }
}
