//! The producer: records in, batches out, order per partition kept.
//!
//! Each partition has a [`Lane`]; batches of different partitions are under way side by side, on the connections of their
//! shards. What may succeed later is tried again until `retry_for` has passed since the batch was opened. When a connection is
//! lost, or the broker says that it failed (500, 503, 604) or was too late (606), the fate of a batch is not known: it is sent
//! again.
//!
//! An idempotent producer numbers its batches, so that the broker stores each once, in order, and several of one partition
//! may be under way ([`Pipeline`]). Without that one is at a time, while the next one fills, and records that were sent again may
//! be stored twice. The second copy mostly stands right behind the first; but bytes of the lost connection that the network or
//! the broker still holds may be appended later, so that the old copy stands behind newer records. No ack is taken back by
//! that, and first copies keep their order.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use ringmain_core::codec::Codec;
use ringmain_core::compressor::Compressor;
use ringmain_core::ids::{Durability, PartitionKey, TopicId};
use ringmain_core::limits::PRODUCER_WINDOW_BATCHES;
use tokio::sync::Semaphore;

use crate::batch::ENTRY_BYTES;
use crate::batch_codec::compress;
use crate::client::backoff::{self, Backoff};
use crate::client::connection::{Connection, OwnedFrame, PendingResponse, locked};
use crate::client::error::ClientError;
use crate::client::lane::{Delivered, Delivery, Lane, ReadyBatch};
use crate::client::numbering::ProducerIdentity;
use crate::client::pipeline::Pipeline;
use crate::client::routes::{Routes, TopicRoute};
use crate::message::{Request, Response};
use crate::produce::ProduceRequest;
use crate::record::NewRecord;
use crate::tag::partition_of_key;

/// How much later than the broker's own time-out the client gives a connection up.
const ANSWER_GRACE: Duration = Duration::from_secs(5);

/// How a producer batches, waits and retries.
#[derive(Clone, Debug)]
pub struct ProducerConfig {
    /// Level at which to ack; `None` = the topic's default.
    pub durability: Option<Durability>,
    /// A batch is full at this size.
    pub batch_bytes: usize,
    /// How long a batch that is not full waits for more records, unless the one before it is still under way.
    pub linger: Duration,
    /// Bytes of records that may wait for their ack; then [`Producer::send`] waits.
    pub buffer_bytes: usize,
    /// Requests that may be under way, over all partitions.
    pub requests_in_flight: usize,
    /// Batches of one partition that may be under way, up to 5; without `idempotent` it is always one.
    pub batches_in_flight: usize,
    /// Number the batches, so that what is sent again is not stored again.
    pub idempotent: bool,
    /// Who an idempotent producer is, when that must outlive it: an instance with a higher epoch fences this one. A new one by
    /// default.
    pub identity: Option<ProducerIdentity>,
    /// How long a batch is tried, from when it was opened; a last attempt is always made.
    pub retry_for: Duration,
    /// How batches are compressed before they are sent, where that makes them smaller.
    pub codec: Codec,
}

impl Default for ProducerConfig {
    fn default() -> Self {
        Self {
            durability: None,
            batch_bytes: 256 * 1024,
            linger: Duration::from_millis(1),
            buffer_bytes: 32 * 1024 * 1024,
            requests_in_flight: 64,
            batches_in_flight: PRODUCER_WINDOW_BATCHES,
            idempotent: true,
            identity: None,
            retry_for: Duration::from_secs(60),
            codec: Codec::None,
        }
    }
}

/// What a producer has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerStats {
    /// Records taken by `send`.
    pub records: u64,
    /// Records acked.
    pub records_acked: u64,
    /// Records given up.
    pub records_failed: u64,
    /// Bytes of keys, values and headers of the acked records.
    pub payload_bytes_acked: u64,
    /// Requests sent again.
    pub retries: u64,
    /// Batches that were stored already when they were sent again.
    pub duplicates: u64,
}

/// Sends records to one topic. Share it by reference or `Arc`. It keeps to the number of partitions that the topic had
/// when it was made, so that keys keep their partition as long as it lives. When it is dropped without
/// [`close`](Self::close), what it has taken is still sent, but nobody learns the outcome.
pub struct Producer {
    shared: Arc<Shared>,
    lanes: Vec<Arc<Lane>>,
}

/// What the lanes share.
pub(crate) struct Shared {
    routes: Arc<Routes>,
    topic: String,
    topic_id: TopicId,
    pub(crate) config: ProducerConfig,
    buffer: Semaphore,
    pub(crate) requests: Semaphore,
    partitions: u32,
    /// Partition of records without key. Each producer begins with another one.
    sticky: AtomicU32,
    /// The highest epoch that a lane has come to.
    identity: Mutex<Option<ProducerIdentity>>,
    records: AtomicU64,
    records_acked: AtomicU64,
    records_failed: AtomicU64,
    payload_bytes_acked: AtomicU64,
    retries: AtomicU64,
    duplicates: AtomicU64,
}

impl Drop for Producer {
    fn drop(&mut self) {
        for lane in &self.lanes {
            lane.close();
        }
    }
}

impl Producer {
    pub(crate) fn new(routes: Arc<Routes>, route: &TopicRoute, mut config: ProducerConfig) -> Self {
        // Semaphores count in u32; no buffer is larger than that can say.
        config.buffer_bytes = config.buffer_bytes.clamp(1, u32::MAX as usize);
        config.batches_in_flight = config.batches_in_flight.clamp(1, PRODUCER_WINDOW_BATCHES);
        let identity = config.idempotent.then(|| config.identity.unwrap_or_else(ProducerIdentity::random));
        config.identity = identity;
        let topic_id = route.topic.topic_id;
        let lanes = route.topic.partitions.iter().map(|partition| {
            let key = PartitionKey { topic: topic_id, partition: partition.partition };
            Arc::new(Lane::new(key, config.batch_bytes, config.linger))
        });
        let lanes: Vec<_> = lanes.collect();
        // Bounded by TOPIC_PARTITIONS_MAX, and one at least.
        let partitions = lanes.len() as u32;
        let shared = Shared {
            routes,
            topic: route.topic.name.clone(),
            topic_id,
            buffer: Semaphore::new(config.buffer_bytes),
            requests: Semaphore::new(config.requests_in_flight.max(1)),
            config,
            partitions,
            // The remainder is smaller than a u32.
            sticky: AtomicU32::new((backoff::random() % u64::from(partitions.max(1))) as u32),
            identity: Mutex::new(identity),
            records: AtomicU64::new(0),
            records_acked: AtomicU64::new(0),
            records_failed: AtomicU64::new(0),
            payload_bytes_acked: AtomicU64::new(0),
            retries: AtomicU64::new(0),
            duplicates: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared), lanes }
    }

    /// Number of partitions it sends to.
    #[must_use]
    pub fn partitions(&self) -> u32 {
        self.shared.partitions
    }

    /// The topic it sends to.
    #[must_use]
    pub fn topic_id(&self) -> TopicId {
        self.shared.topic_id
    }

    /// Who it is, with the highest epoch that it has used; none when it is not idempotent. The next instance under this id
    /// must begin with a higher epoch.
    #[must_use]
    pub fn identity(&self) -> Option<ProducerIdentity> {
        *locked(&self.shared.identity)
    }

    /// Takes a record, waiting while the buffer is full. Without `partition` the key decides; without key too, records go
    /// to one partition until its batch is full, then to the next. Records that one task sends to one partition keep
    /// their order. The record's fate is in the [`Delivery`], which need not be awaited.
    pub async fn send(&self, record: &NewRecord<'_>, partition: Option<u32>) -> Result<Delivery, ClientError> {
        let payload_bytes = payload_bytes(record);
        let buffered_bytes = (payload_bytes + ENTRY_BYTES).min(self.shared.config.buffer_bytes);
        let partition = self.choose(record, partition);
        let topic = &self.shared.topic;
        let no_partition = || ClientError::NoPartition { topic: topic.clone(), partition };
        let lane = self.lanes.get(partition as usize).ok_or_else(no_partition)?;

        let permit = self.shared.buffer.acquire_many(buffered_bytes as u32).await.map_err(|_| ClientError::Closed)?;
        let pushed = lane.push(record, payload_bytes as u64, buffered_bytes)?;
        // The batch gives it back when its fate is known.
        permit.forget();
        self.shared.records.fetch_add(1, Ordering::Relaxed);
        if pushed.sealed {
            self.shared.turn_from(partition);
        }
        if pushed.first {
            tokio::spawn(run_lane(Arc::clone(&self.shared), Arc::clone(lane)));
        }
        Ok(pushed.delivery)
    }

    /// Takes a batch that the caller has built for this topic and `partition` (see [`crate::batch_builder::BatchBuilder`]),
    /// waiting while the buffer is full. It keeps its place among what else is sent to the partition. The [`Delivery`] is
    /// that of its first record. For callers that have many records at hand and need no delivery for each.
    pub async fn send_batch(
        &self,
        partition: u32,
        batch: Bytes,
        records: u64,
        payload_bytes: u64,
    ) -> Result<Delivery, ClientError> {
        let shared = &self.shared;
        let no_partition = || ClientError::NoPartition { topic: shared.topic.clone(), partition };
        let lane = self.lanes.get(partition as usize).ok_or_else(no_partition)?;
        let buffered_bytes = batch.len().min(shared.config.buffer_bytes);
        let permit = shared.buffer.acquire_many(buffered_bytes as u32).await.map_err(|_| ClientError::Closed)?;
        let pushed = lane.push_batch(batch, records, payload_bytes, buffered_bytes)?;
        permit.forget();
        shared.records.fetch_add(records, Ordering::Relaxed);
        if pushed.first {
            tokio::spawn(run_lane(Arc::clone(shared), Arc::clone(lane)));
        }
        Ok(pushed.delivery)
    }

    fn choose(&self, record: &NewRecord<'_>, partition: Option<u32>) -> u32 {
        match (partition, record.key) {
            (Some(partition), _) => partition,
            (None, Some(key)) => partition_of_key(key, self.partitions()),
            (None, None) => self.shared.sticky.load(Ordering::Relaxed),
        }
    }

    /// Sends what was taken so far without lingering, and waits until all of it is acked or given up. An error says that a
    /// batch was given up since the last flush, whether or not somebody awaited its deliveries: the first one of a
    /// partition.
    pub async fn flush(&self) -> Result<(), ClientError> {
        // All lanes first, so that they are sent side by side.
        let flushing: Vec<_> = self.lanes.iter().map(|lane| lane.flush()).collect();
        let mut result = Ok(());
        for (lane, fates) in self.lanes.iter().zip(flushing) {
            let waited = fates.wait().await;
            result = result.and(lane.take_failure().map_or(waited, Err));
        }
        result
    }

    /// Flushes and ends the producer. An error as of [`flush`](Self::flush): not all that was sent is stored.
    pub async fn close(self) -> Result<ProducerStats, ClientError> {
        self.flush().await?;
        Ok(self.stats())
    }

    /// Counts so far.
    #[must_use]
    pub fn stats(&self) -> ProducerStats {
        let shared = &self.shared;
        ProducerStats {
            records: shared.records.load(Ordering::Relaxed),
            records_acked: shared.records_acked.load(Ordering::Relaxed),
            records_failed: shared.records_failed.load(Ordering::Relaxed),
            payload_bytes_acked: shared.payload_bytes_acked.load(Ordering::Relaxed),
            retries: shared.retries.load(Ordering::Relaxed),
            duplicates: shared.duplicates.load(Ordering::Relaxed),
        }
    }
}

fn payload_bytes(record: &NewRecord<'_>) -> usize {
    let headers: usize = record.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    let tag = record.tag.map_or(0, str::len);
    record.key.map_or(0, <[u8]>::len) + record.value.map_or(0, <[u8]>::len) + headers + tag
}

/// Sends the batches of one lane: several at once when they are numbered, else one after the other.
async fn run_lane(shared: Arc<Shared>, lane: Arc<Lane>) {
    if let Some(identity) = shared.config.identity {
        return Pipeline::new(&shared, &lane, identity, shared.config.batches_in_flight).run().await;
    }
    let mut compressor = Compressor::default();
    while let Some(mut batch) = lane.next().await {
        if let Some(compressed) = compress(&mut compressor, shared.config.codec, &batch.bytes) {
            batch.bytes = compressed;
        }
        if !batch.full {
            shared.turn_from(lane.partition());
        }
        let fate = shared.deliver(&batch, lane.partition()).await;
        shared.decide(&lane, &batch, fate);
    }
}

impl Shared {
    /// A batch of this partition goes out: records without key go to the next one from now on.
    pub(crate) fn turn_from(&self, partition: u32) {
        let next = (partition + 1) % self.partitions.max(1);
        // Lost races are harmless: somebody else has moved on.
        let _ = self.sticky.compare_exchange(partition, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Tries to get a batch stored until it is, can't be, or `retry_for` has passed.
    async fn deliver(&self, batch: &ReadyBatch, partition: u32) -> Result<Delivered, ClientError> {
        let mut backoff = Backoff::until(batch.opened + self.config.retry_for);
        loop {
            let attempt = async {
                let connection = self.connection_to(partition).await?;
                self.request(&connection, vec![batch.bytes.clone()], partition).await
            };
            let error = match attempt.await {
                Ok(delivered) => return Ok(delivered),
                Err(error) => error,
            };
            let refresh = error.wants_refresh();
            backoff.wait(error).await?;
            self.note_retry(refresh).await;
        }
    }

    /// Counts a retry; with `refresh` the metadata may have been to blame.
    pub(crate) async fn note_retry(&self, refresh: bool) {
        self.retries.fetch_add(1, Ordering::Relaxed);
        if refresh && let Ok(route) = self.routes.route(&self.topic).await {
            // When this fails too, the old route is as good as any.
            let _ = self.routes.refresh(&self.topic, &route).await;
        }
    }

    /// A lane has come to a higher epoch.
    pub(crate) fn note_identity(&self, identity: ProducerIdentity) {
        let mut known = locked(&self.identity);
        if known.is_none_or(|known| known.id != identity.id || known.epoch < identity.epoch) {
            *known = Some(identity);
        }
    }

    /// The fate of a batch of `lane` is known.
    pub(crate) fn decide(&self, lane: &Lane, batch: &ReadyBatch, fate: Result<Delivered, ClientError>) {
        match &fate {
            Ok(_) => {
                self.records_acked.fetch_add(batch.records, Ordering::Relaxed);
                self.payload_bytes_acked.fetch_add(batch.payload_bytes, Ordering::Relaxed);
            }
            Err(error) => {
                self.records_failed.fetch_add(batch.records, Ordering::Relaxed);
                lane.failed(error);
            }
        }
        batch.decide(fate);
        self.buffer.add_permits(batch.buffered_bytes);
    }

    /// The connection for requests to a partition, by the metadata as it is known.
    pub(crate) async fn connection_to(&self, partition: u32) -> Result<Connection, ClientError> {
        let route = self.routes.route(&self.topic).await?;
        if route.topic.topic_id != self.topic_id {
            // The name has been given to another topic; its records are not ours.
            return Err(ClientError::server(crate::ErrorCode::TOPIC_NOT_FOUND, "the topic was deleted".into(), 0));
        }
        self.routes.connection_to(&route, partition).await
    }

    /// Sends one batch and waits for its outcome.
    pub(crate) async fn request(
        &self,
        connection: &Connection,
        payload: Vec<Bytes>,
        partition: u32,
    ) -> Result<Delivered, ClientError> {
        let _request = self.requests.acquire().await.map_err(|_| ClientError::Closed)?;
        let pending = self.start(connection, payload).await?;
        self.outcome(pending.await?, partition)
    }

    /// Sends one batch.
    pub(crate) async fn start(
        &self,
        connection: &Connection,
        payload: Vec<Bytes>,
    ) -> Result<PendingResponse, ClientError> {
        let timeout = self.routes.config().request_timeout;
        let timeout_ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        let request = Request::Produce(ProduceRequest { durability: self.config.durability, timeout_ms });
        connection.start(&request, payload, timeout + ANSWER_GRACE).await
    }

    /// What the answer to one batch says.
    pub(crate) fn outcome(&self, answer: OwnedFrame, partition: u32) -> Result<Delivered, ClientError> {
        let outcomes = match answer.into_result()?.response {
            Response::Produce(outcomes) => outcomes,
            other => return Err(ClientError::unexpected("produce", &other)),
        };
        let key = PartitionKey { topic: self.topic_id, partition };
        match outcomes.as_slice() {
            [outcome] if outcome.key == key && outcome.code.is_ok() => {
                self.duplicates.fetch_add(u64::from(outcome.duplicate), Ordering::Relaxed);
                Ok(Delivered {
                    partition,
                    offset: outcome.base_offset,
                    level: outcome.level,
                    leader_epoch: outcome.leader_epoch,
                    flushed_end: outcome.flushed_end,
                    synced_end: outcome.synced_end,
                })
            }
            [outcome] if outcome.key == key => {
                Err(ClientError::server(outcome.code, outcome.message.clone(), outcome.retry_after_ms))
            }
            _ => Err(ClientError::Protocol(format!("the ack of one batch of {key} has {} others", outcomes.len()))),
        }
    }
}
