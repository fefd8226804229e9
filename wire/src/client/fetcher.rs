//! The task that fetches the partitions of one shard for a consumer: one fetch at a time, its events handed over before
//! the next is sent off, positions moved by what came.
//!
//! What is compressed is handed over as it came, and decompressed when the application gets to it. A partition that fails
//! is left out of the fetches until its own back-off is over: it does not slow the others down.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringmain_core::batch::{BatchError, check_stamp};
use ringmain_core::ids::{Offset, PartitionKey};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::batch::{CompressedBatch, InvalidBatch};
use crate::batch_codec::{FetchedPiece, FetchedPieces};
use crate::client::backoff::Backoff;
use crate::client::connection::OwnedFrame;
use crate::client::consumer::{ConsumerConfig, ConsumerEvent, PartitionEnds};
use crate::client::error::ClientError;
use crate::client::routes::{Routes, TopicRoute};
use crate::client::unpacking::{FetchedEvent, FetchedEvents, Packed, Shown, check_batch};
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
#[derive(Clone, Debug)]
pub(crate) struct Position {
    key: PartitionKey,
    offset: Offset,
    /// The end was told, and nothing came since.
    caught_up: bool,
    /// Its last fetch failed.
    failing: Option<Failing>,
}

/// A partition that is tried again later.
#[derive(Clone, Debug)]
struct Failing {
    backoff: Backoff,
    not_before: Instant,
}

impl Position {
    pub(crate) const fn new(key: PartitionKey, offset: Offset) -> Self {
        Self { key, offset, caught_up: false, failing: None }
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
            if let Some(due) = self.next_due() {
                tokio::time::sleep_until(due).await;
            }
            let route = self.shared.routes.route(&self.shared.topic).await;
            let fetched = match &route {
                Ok(route) => self.fetch(route).await,
                Err(error) => Err(error.clone()),
            };
            let refresh = match fetched {
                Ok(Fetched { mut events, failures }) => {
                    backoff = self.fresh_backoff();
                    let refresh = failures.iter().any(|(_, error)| error.wants_refresh());
                    self.hold_back(failures, &mut events);
                    if !events.is_empty() && self.shared.events.send(events).await.is_err() {
                        return;
                    }
                    refresh
                }
                Err(error) => {
                    let refresh = error.wants_refresh();
                    if let Err(error) = backoff.wait(error).await {
                        let fatal = !matches!(error, ClientError::GaveUp { .. });
                        if self.shared.events.send(vec![Err(error)]).await.is_err() || fatal {
                            return;
                        }
                        backoff = self.fresh_backoff();
                    }
                    refresh
                }
            };
            if refresh && let Ok(route) = &route {
                self.refresh(route).await;
            }
        }
    }

    /// When the first partition may be fetched, if none may now.
    fn next_due(&self) -> Option<Instant> {
        let due =
            self.positions.iter().map(|position| position.failing.as_ref().map(|failing| failing.not_before)).min();
        due.flatten().filter(|due| *due > Instant::now())
    }

    /// Has each partition that failed wait by itself. One that has failed for so long that the application must know says so
    /// and is tried on; one that can't go better leaves.
    fn hold_back(&mut self, failures: Vec<(PartitionKey, ClientError)>, events: &mut FetchedEvents) {
        for (key, error) in failures {
            let fresh = self.fresh_backoff();
            let Some(position) = self.positions.iter_mut().find(|position| position.key == key) else { continue };
            let mut backoff = position.failing.take().map_or(fresh, |failing| failing.backoff);
            match backoff.pause(error) {
                Ok(pause) => position.failing = Some(Failing { backoff, not_before: Instant::now() + pause }),
                Err(error) => {
                    if !matches!(error, ClientError::GaveUp { .. }) {
                        self.positions.retain(|position| position.key != key);
                    }
                    events.push(Err(error));
                }
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
        let now = Instant::now();
        let (mut due, mut wait) = (Vec::new(), self.shared.config.wait_max);
        for (at, position) in self.positions.iter().enumerate() {
            match position.failing.as_ref().map(|failing| failing.not_before.saturating_duration_since(now)) {
                // No long poll holds up those that wait for their turn.
                Some(left) if !left.is_zero() => wait = wait.min(left.max(Duration::from_millis(1))),
                _ => due.push(at),
            }
        }
        let Some(first) = due.first().map(|&at| &self.positions[at]) else { return Ok(Fetched::default()) };
        if first.key.topic != route.topic.topic_id {
            return Err(ClientError::server(ErrorCode::TOPIC_NOT_FOUND, "the topic was deleted".into(), 0));
        }
        let connection = self.shared.routes.connection_to(route, first.key.partition).await?;
        let config = &self.shared.config;
        let partitions = due.iter().map(|&at| &self.positions[at]);
        let partitions =
            partitions.map(|position| FetchPartition { key: position.key, offset: position.offset, bytes_max: 0 });
        let request = Request::Fetch(FetchRequest {
            partitions: partitions.collect(),
            bytes_max: config.fetch_bytes,
            bytes_min: config.bytes_min,
            wait_ms_max: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
            visibility: config.visibility,
            codecs: config.codecs,
            tags: config.tags.clone(),
        });
        let timeout = config.wait_max + self.shared.routes.config().request_timeout;
        let frame = connection.start(&request, Vec::new(), timeout).await?.await?.into_result()?;
        self.take(frame, &due)
    }

    /// Moves the positions at these places by what came for them and turns it into events.
    fn take(&mut self, frame: OwnedFrame, due: &[usize]) -> Result<Fetched, ClientError> {
        let outcomes = match frame.response {
            Response::Fetch(outcomes) => outcomes,
            other => return Err(ClientError::unexpected("fetch", &other)),
        };
        let keys = due.iter().map(|&at| self.positions[at].key);
        let keys_fit = outcomes.iter().map(|outcome| outcome.key).eq(keys);
        let bytes: u64 = outcomes.iter().map(|outcome| u64::from(outcome.payload_bytes)).sum();
        if !keys_fit || bytes != frame.payload.len() as u64 {
            return Err(ClientError::Protocol("a fetch was answered with other partitions or bytes".to_owned()));
        }
        let mut payload = frame.payload;
        let mut fetched = Fetched::default();
        let mut lost = Vec::new();
        for (&at, outcome) in due.iter().zip(&outcomes) {
            let position = &mut self.positions[at];
            let share = payload.split_to(outcome.payload_bytes as usize);
            let failed = fetched.failures.len();
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
                    fetched.failures.push((position.key, server_error(outcome)));
                }
            }
            if fetched.failures.len() == failed {
                position.failing = None;
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
    /// Partitions that may go better later; the others have been taken.
    failures: Vec<(PartitionKey, ClientError)>,
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
        for piece in FetchedPieces::new(share) {
            match piece.and_then(|piece| check_piece(piece, position.key)) {
                Ok(piece) => {
                    if let Some(gap) = gap.take_if(|gap| gap.from <= piece.first) {
                        self.push_gap(partition, gap);
                    }
                    if piece.end <= position.offset {
                        continue;
                    }
                    let shown = Shown { key: position.key, ends, from: position.offset, tags: tags.cloned() };
                    position.offset = piece.end;
                    self.events.push(Ok(match piece.piece {
                        FetchedPiece::Batch(header, bytes) if header.codec == 0 => {
                            FetchedEvent::Ready(ConsumerEvent::Batch(shown.batch(header, bytes)))
                        }
                        FetchedPiece::Batch(_, bytes) | FetchedPiece::Pack(_, bytes) => {
                            FetchedEvent::Packed(Packed { shown, bytes })
                        }
                    }));
                }
                Err(error) => {
                    self.push(ConsumerEvent::BadBatch { partition, at: position.offset, error });
                }
            }
        }
        if let Some(gap) = gap {
            self.push_gap(partition, gap);
        }
        // A server that sends a reader back would have it read in circles.
        position.offset = position.offset.max(outcome.next_offset);
        if position.offset == began && came {
            let error = ClientError::server(ErrorCode::INTERNAL, "a fetch made no way".into(), 0);
            self.failures.push((position.key, error));
        }
        let end = match visibility {
            Visibility::LogEnd => outcome.log_end,
            Visibility::SyncedEnd => outcome.synced_end,
        };
        let at_end = position.offset >= end;
        if at_end && (!position.caught_up || position.offset > began) {
            self.push(ConsumerEvent::CaughtUp { partition, offset: position.offset });
        }
        position.caught_up = at_end;
    }

    fn push(&mut self, event: ConsumerEvent) {
        self.events.push(Ok(FetchedEvent::Ready(event)));
    }

    fn push_gap(&mut self, partition: u32, gap: crate::fetch::Gap) {
        self.push(ConsumerEvent::Gap { partition, from: gap.from, to: gap.to, reason: gap.reason });
    }

    fn reset(&mut self, position: &mut Position, outcome: &FetchedPartitionOutcome) {
        let asked = position.offset;
        let now = asked.clamp(outcome.log_start, outcome.log_end.max(outcome.log_start));
        if now == asked {
            let error = ClientError::server(ErrorCode::INTERNAL, "an offset in range was refused".into(), 0);
            self.failures.push((position.key, error));
            return;
        }
        position.offset = now;
        position.caught_up = false;
        self.push(ConsumerEvent::OutOfRange { partition: position.key.partition, asked, now });
    }
}

/// A piece that may be shown, as far as can be told without decompressing it.
struct CheckedPiece {
    piece: FetchedPiece,
    first: Offset,
    /// One past its last record.
    end: Offset,
}

/// The CRC was checked before.
fn check_piece(piece: FetchedPiece, key: PartitionKey) -> Result<CheckedPiece, InvalidBatch> {
    let (first, end) = match &piece {
        FetchedPiece::Pack(pack, _) => (pack.base_offset, pack.next_offset),
        FetchedPiece::Batch(header, bytes) if header.codec == 0 => check_batch(header, bytes, key)?,
        FetchedPiece::Batch(header, bytes) => {
            check_stamp(bytes)?;
            if header.key != key {
                return Err(InvalidBatch::Partition(header.key));
            }
            CompressedBatch::parse(bytes, header)?;
            if header.flags != 0 {
                return Err(InvalidBatch::Flags(header.flags));
            }
            let end = header.base_offset.0.checked_add(header.record_count.into());
            (header.base_offset, Offset(end.ok_or(BatchError::Records(header.record_count))?))
        }
    };
    Ok(CheckedPiece { piece, first, end })
}

#[cfg(test)]
mod tests;
