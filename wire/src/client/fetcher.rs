//! The task that fetches the partitions of one shard for a consumer: one fetch at a time, its events handed over before
//! the next is sent off, positions moved by what came.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use ringmain_core::batch::{BatchError, BatchHeader, check_stamp};
use ringmain_core::ids::{Offset, PartitionKey};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::batch::{BatchView, InvalidBatch};
use crate::batch_codec::FetchedBatches;
use crate::client::backoff::Backoff;
use crate::client::connection::OwnedFrame;
use crate::client::consumer::{ConsumedBatch, ConsumerConfig, ConsumerEvent, FetchedEvents, PartitionEnds};
use crate::client::error::ClientError;
use crate::client::routes::{Routes, TopicRoute};
use crate::error_code::{ClientAction, ErrorCode};
use crate::fetch::{FetchPartition, FetchRequest, FetchedPartitionOutcome, Visibility};
use crate::message::{Request, Response};
use crate::tag::TagFilter;

/// What all fetchers of a consumer share.
pub(crate) struct FetcherShared {
    pub(crate) routes: Arc<Routes>,
    pub(crate) topic: String,
    pub(crate) config: ConsumerConfig,
    /// Of the configuration, made once.
    pub(crate) tags: Option<Arc<TagFilter>>,
    pub(crate) events: mpsc::Sender<FetchedEvents>,
}

/// How far a partition has been read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    key: PartitionKey,
    offset: Offset,
    /// The end was told, and nothing came since.
    caught_up: bool,
}

impl Position {
    pub(crate) const fn new(key: PartitionKey, offset: Offset) -> Self {
        Self { key, offset, caught_up: false }
    }
}

/// Fetches the partitions of one shard.
pub(crate) struct Fetcher {
    shared: Arc<FetcherShared>,
    positions: Vec<Position>,
}

impl Fetcher {
    /// Starts a task that ends when the consumer is dropped or no partition is left.
    pub(crate) fn start(shared: Arc<FetcherShared>, positions: Vec<Position>) {
        tokio::spawn(Self { shared, positions }.run());
    }

    async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        tokio::select! {
            () = self.fetch_on() => {}
            () = shared.events.closed() => {}
        }
    }

    async fn fetch_on(&mut self) {
        let mut backoff = self.fresh_backoff();
        while !self.positions.is_empty() {
            let route = self.shared.routes.route(&self.shared.topic).await;
            let fetched = match &route {
                Ok(route) => self.fetch(route).await,
                Err(error) => Err(error.clone()),
            };
            let (events, failure) = match fetched {
                Ok(fetched) => (fetched.events, fetched.failure),
                Err(error) => (Vec::new(), Some(error)),
            };
            if !events.is_empty() && self.shared.events.send(events).await.is_err() {
                return;
            }
            let Some(error) = failure else {
                backoff = self.fresh_backoff();
                continue;
            };
            let refresh = error.wants_refresh();
            if let Err(error) = backoff.wait(error).await {
                let fatal = !matches!(error, ClientError::GaveUp { .. });
                if self.shared.events.send(vec![Err(error)]).await.is_err() || fatal {
                    return;
                }
                backoff = self.fresh_backoff();
            }
            if refresh && let Ok(route) = &route {
                self.refresh(route).await;
            }
        }
    }

    fn fresh_backoff(&self) -> Backoff {
        Backoff::until(Instant::now() + self.shared.config.retry_for)
    }

    /// Gets a newer route. Partitions that another shard has by now go on in tasks of their own.
    async fn refresh(&mut self, used: &Arc<TopicRoute>) {
        let Ok(route) = self.shared.routes.refresh(&self.shared.topic, used).await else { return };
        let mut groups: HashMap<Option<(u32, u16)>, Vec<Position>> = HashMap::new();
        for position in self.positions.drain(..) {
            groups.entry(route.owner(position.key.partition)).or_default().push(position);
        }
        let mut groups = groups.into_values();
        self.positions = groups.next().unwrap_or_default();
        for positions in groups {
            Self::start(Arc::clone(&self.shared), positions);
        }
    }

    async fn fetch(&mut self, route: &TopicRoute) -> Result<Fetched, ClientError> {
        // Another partition first each time: a budget that the first one uses up does not starve the others.
        self.positions.rotate_left(1);
        let Some(first) = self.positions.first() else { return Ok(Fetched::default()) };
        if first.key.topic != route.topic.topic_id {
            return Err(ClientError::server(ErrorCode::TOPIC_NOT_FOUND, "the topic was deleted".into(), 0));
        }
        let connection = self.shared.routes.connection_to(route, first.key.partition).await?;
        let config = &self.shared.config;
        let partitions = self.positions.iter();
        let partitions =
            partitions.map(|position| FetchPartition { key: position.key, offset: position.offset, bytes_max: 0 });
        let request = Request::Fetch(FetchRequest {
            partitions: partitions.collect(),
            bytes_max: config.fetch_bytes,
            bytes_min: config.bytes_min,
            wait_ms_max: u32::try_from(config.wait_max.as_millis()).unwrap_or(u32::MAX),
            visibility: config.visibility,
            codecs: config.codecs,
            tags: config.tags.clone(),
        });
        let timeout = config.wait_max + self.shared.routes.config().request_timeout;
        let frame = connection.start(&request, Vec::new(), timeout).await?.await?.into_result()?;
        self.take(frame)
    }

    /// Moves the positions by what came and turns it into events.
    fn take(&mut self, frame: OwnedFrame) -> Result<Fetched, ClientError> {
        let outcomes = match frame.response {
            Response::Fetch(outcomes) => outcomes,
            other => return Err(ClientError::unexpected("fetch", &other)),
        };
        let keys_fit =
            outcomes.iter().map(|outcome| outcome.key).eq(self.positions.iter().map(|position| position.key));
        let bytes: u64 = outcomes.iter().map(|outcome| u64::from(outcome.payload_bytes)).sum();
        if !keys_fit || bytes != frame.payload.len() as u64 {
            return Err(ClientError::Protocol("a fetch was answered with other partitions or bytes".to_owned()));
        }
        let mut payload = frame.payload;
        let mut fetched = Fetched::default();
        let mut lost = Vec::new();
        for (position, outcome) in self.positions.iter_mut().zip(&outcomes) {
            let share = payload.split_to(outcome.payload_bytes as usize);
            match ErrorCode::action(outcome.code) {
                ClientAction::Proceed => fetched.take_partition(
                    position,
                    outcome,
                    share,
                    self.shared.config.visibility,
                    self.shared.tags.as_ref(),
                ),
                ClientAction::ResetOffset => fetched.reset(position, outcome),
                ClientAction::Renumber | ClientAction::Fix => {
                    fetched.events.push(Err(server_error(outcome)));
                    lost.push(position.key);
                }
                ClientAction::Retry | ClientAction::Refresh | ClientAction::BackOff => {
                    fetched.failure = Some(server_error(outcome));
                }
            }
        }
        self.positions.retain(|position| !lost.contains(&position.key));
        Ok(fetched)
    }
}

fn server_error(outcome: &FetchedPartitionOutcome) -> ClientError {
    ClientError::server(outcome.code, outcome.message.clone(), outcome.retry_after_ms)
}

/// What one answer gave.
#[derive(Default)]
struct Fetched {
    events: FetchedEvents,
    /// A partition that may go better later; the others have been taken.
    failure: Option<ClientError>,
}

impl Fetched {
    fn take_partition(
        &mut self,
        position: &mut Position,
        outcome: &FetchedPartitionOutcome,
        share: Bytes,
        visibility: Visibility,
        tags: Option<&Arc<TagFilter>>,
    ) {
        let partition = position.key.partition;
        let began = position.offset;
        let came = !share.is_empty();
        let mut gap = outcome.gap;
        let ends = PartitionEnds {
            log_start: outcome.log_start,
            log_end: outcome.log_end,
            flushed_end: outcome.flushed_end,
            synced_end: outcome.synced_end,
        };
        for batch in checked_batches(share, position.key) {
            match batch {
                Ok(batch) => {
                    if let Some(gap) = gap.take_if(|gap| gap.from <= batch.first) {
                        self.push_gap(partition, gap);
                    }
                    if batch.end <= position.offset {
                        continue;
                    }
                    let from = position.offset;
                    position.offset = batch.end;
                    let CheckedBatch { header, bytes, .. } = batch;
                    self.events.push(Ok(ConsumerEvent::Batch(ConsumedBatch {
                        partition,
                        ends,
                        header,
                        bytes,
                        from,
                        tags: tags.cloned(),
                    })));
                }
                Err(error) => {
                    self.events.push(Ok(ConsumerEvent::BadBatch { partition, at: position.offset, error }));
                }
            }
        }
        if let Some(gap) = gap {
            self.push_gap(partition, gap);
        }
        // A server that sends a reader back would have it read in circles.
        position.offset = position.offset.max(outcome.next_offset);
        if position.offset == began && came {
            self.failure = Some(ClientError::server(ErrorCode::INTERNAL, "a fetch made no way".into(), 0));
        }
        let end = match visibility {
            Visibility::LogEnd => outcome.log_end,
            Visibility::SyncedEnd => outcome.synced_end,
        };
        let at_end = position.offset >= end;
        if at_end && (!position.caught_up || position.offset > began) {
            self.events.push(Ok(ConsumerEvent::CaughtUp { partition, offset: position.offset }));
        }
        position.caught_up = at_end;
    }

    fn push_gap(&mut self, partition: u32, gap: crate::fetch::Gap) {
        self.events.push(Ok(ConsumerEvent::Gap { partition, from: gap.from, to: gap.to, reason: gap.reason }));
    }

    fn reset(&mut self, position: &mut Position, outcome: &FetchedPartitionOutcome) {
        let asked = position.offset;
        let now = asked.clamp(outcome.log_start, outcome.log_end.max(outcome.log_start));
        if now == asked {
            self.failure = Some(ClientError::server(ErrorCode::INTERNAL, "an offset in range was refused".into(), 0));
            return;
        }
        position.offset = now;
        position.caught_up = false;
        self.events.push(Ok(ConsumerEvent::OutOfRange { partition: position.key.partition, asked, now }));
    }
}

/// A batch that may be shown.
struct CheckedBatch {
    header: BatchHeader,
    bytes: Bytes,
    first: Offset,
    /// One past its last record.
    end: Offset,
}

/// Cuts a partition's share of a payload into batches and checks each. Behind a bad header nothing more is found.
fn checked_batches(share: Bytes, key: PartitionKey) -> impl Iterator<Item = Result<CheckedBatch, InvalidBatch>> {
    FetchedBatches::new(share).map(move |batch| batch.and_then(|(header, bytes)| check_batch(header, bytes, key)))
}

/// The CRC was checked before.
fn check_batch(header: BatchHeader, bytes: Bytes, key: PartitionKey) -> Result<CheckedBatch, InvalidBatch> {
    check_stamp(&bytes)?;
    if header.key != key {
        return Err(InvalidBatch::Partition(header.key));
    }
    let (first, last) = BatchView::parse(&bytes, &header)?.offset_range();
    let end = Offset(last.0.checked_add(1).ok_or(BatchError::Records(header.record_count))?);
    Ok(CheckedBatch { header, bytes, first, end })
}

#[cfg(test)]
mod tests;
