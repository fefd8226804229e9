//! Producers that write down in the ledger what they send and what is acked. They never send a record twice: when the
//! broker dies under them, what was under way stays unknown, and the rest is given up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringmain_core::codec::Codec;
use ringmain_core::ids::Durability;
use ringmain_core::limits::RECORD_BYTES_MAX;
use ringmain_wire::ErrorCode;
use ringmain_wire::client::{Client, ClientConfig, ClientError, NewTopic, ProducerConfig};
use ringmain_wire::record::NewRecord;

use super::ledger::{Ledger, Partition};
use super::random::Random;

/// How large the records of a producer are.
#[derive(Clone, Copy, Debug)]
pub enum Sizes {
    /// 16 to 200 bytes.
    Tiny,
    /// 200 bytes to 20 KB.
    Mixed,
    /// 100 KB to the largest that there may be.
    Large,
}

/// What one producer does.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its number, for ever.
    pub producer: u32,
    /// Topic and number of its partitions.
    pub topic: (String, u32),
    /// Level that it asks for.
    pub level: Durability,
    /// Sizes of its records.
    pub sizes: Sizes,
    /// Records after which it ends.
    pub records_max: u64,
    /// Seed of its choices.
    pub seed: u64,
}

impl Plan {
    /// One producer for each level and size, each on one of `topics`.
    pub fn all(topics: &[(String, u32)], random: &mut Random) -> Vec<Self> {
        let levels = [Durability::Memory, Durability::Flushed, Durability::Synced];
        let sizes = [(Sizes::Tiny, 3000), (Sizes::Mixed, 400), (Sizes::Large, 12)];
        let mut plans = Vec::new();
        for level in levels {
            for (sizes, records_max) in sizes {
                let producer = plans.len() as u32;
                let topic = topics[(producer as usize + level as usize) % topics.len()].clone();
                plans.push(Self { producer, topic, level, sizes, records_max, seed: random.next() });
            }
        }
        plans
    }

    /// Large records only, so that the disk has many large writes in flight at any moment.
    pub fn large(topics: &[(String, u32)], random: &mut Random) -> Vec<Self> {
        let mut plans = Self::all(topics, random);
        for plan in &mut plans {
            (plan.sizes, plan.records_max) = (Sizes::Large, 30);
        }
        plans
    }

    /// Tiny records at `synced`: many small extents, each with its own sync.
    pub fn tiny_synced(topics: &[(String, u32)], random: &mut Random) -> Vec<Self> {
        let mut plans = Self::all(topics, random);
        for plan in &mut plans {
            (plan.level, plan.sizes, plan.records_max) = (Durability::Synced, Sizes::Tiny, 300);
        }
        plans
    }
}

/// Whether the broker has taken a record but not in time, or has not taken it because it is busy or its disk is full.
fn is_passing(error: &ClientError) -> bool {
    matches!(error.code(), Some(ErrorCode::SERVER_BUSY | ErrorCode::TIMED_OUT | ErrorCode::DISK_FULL))
}

/// A client that does not try again, and does not wait for long.
pub async fn impatient_client(broker: &str) -> Client {
    let config = ClientConfig { retry_for: Duration::ZERO, ..ClientConfig::new(vec![broker.to_owned()]) };
    Client::connect(config).await.unwrap()
}

/// Makes topics.
pub async fn create_topics(broker: &str, topics: &[(String, u32)]) {
    let client = impatient_client(broker).await;
    for (name, partitions) in topics {
        client.create_topic(NewTopic { partitions: *partitions, ..NewTopic::new(name.clone()) }).await.unwrap();
    }
}

/// Runs one producer until it has sent all, the broker dies, or `stop` is set; then waits for what is under way.
pub async fn produce(broker: String, plan: Plan, ledger: Arc<Ledger>, stop: Arc<AtomicBool>) {
    // A client of its own, so that each producer has its own connections.
    let Ok(client) = Client::connect(ClientConfig {
        retry_for: Duration::ZERO,
        use_direct_ports: !plan.producer.is_multiple_of(3),
        ..ClientConfig::new(vec![broker])
    })
    .await
    else {
        return;
    };
    let mut random = Random(plan.seed);
    let config = ProducerConfig {
        durability: Some(plan.level),
        batch_bytes: [4 * 1024, 64 * 1024, 1024 * 1024][random.within(0..3) as usize],
        buffer_bytes: 4 * 1024 * 1024,
        linger: Duration::from_millis(random.within(0..3)),
        requests_in_flight: random.within(1..9) as usize,
        batches_in_flight: random.within(1..6) as usize,
        idempotent: random.one_in(2),
        identity: None,
        retry_for: Duration::ZERO,
        codec: [Codec::None, Codec::Lz4, Codec::Zstd][random.within(0..3) as usize],
    };
    let Ok(producer) = client.producer(&plan.topic.0, config).await else { return };
    let broken = Arc::new(AtomicBool::new(false));
    let mut deliveries = tokio::task::JoinSet::new();
    for _ in 0..plan.records_max {
        if stop.load(Ordering::Relaxed) || broken.load(Ordering::Relaxed) {
            break;
        }
        let partition: Partition = (plan.topic.0.clone(), random.within(0..plan.topic.1.into()) as u32);
        let size = match plan.sizes {
            Sizes::Tiny => random.within(16..200),
            Sizes::Mixed => random.within(200..20_000),
            Sizes::Large => random.within(100_000..RECORD_BYTES_MAX as u64 - 200),
        };
        let id = ledger.send(&partition, plan.producer);
        let value = id.value(size as usize);
        let key = random.one_in(2).then(|| random.bytes(20));
        let record = NewRecord { key: key.as_deref(), value: Some(&value), timestamp_ms: 1, ..NewRecord::default() };
        let delivery = match producer.send(&record, Some(partition.1)).await {
            Ok(delivery) => delivery,
            Err(error) => panic!("a record was refused: {error}"),
        };
        let (ledger, broken, level) = (Arc::clone(&ledger), Arc::clone(&broken), plan.level);
        deliveries.spawn(async move {
            match delivery.await {
                Ok(delivered) => ledger.ack(&partition, id, level, &delivered),
                Err(error) if is_passing(&error) => {}
                Err(_) => broken.store(true, Ordering::Relaxed),
            }
        });
    }
    while let Some(done) = deliveries.join_next().await {
        done.unwrap();
    }
}

/// Runs all plans to their ends; gives the number of acks.
pub async fn produce_all(broker: &str, plans: Vec<Plan>, ledger: &Arc<Ledger>) -> u64 {
    let before = ledger.acks();
    let mut tasks = tokio::task::JoinSet::new();
    for plan in plans {
        tasks.spawn(produce(broker.to_owned(), plan, Arc::clone(ledger), Arc::default()));
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    ledger.acks() - before
}
