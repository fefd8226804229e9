//! Produce: check each batch once, append it on its owner, answer when its level is reached.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use ringmain_core::acks::WaitToken;
use ringmain_core::batch::{self, BatchError, BatchHeader, FLAG_SPARSE};
use ringmain_core::dedup::SequenceError;
use ringmain_core::ids::{Durability, PartitionKey, ShardId};
use ringmain_core::limits::{PRODUCE_BATCHES_MAX, PRODUCE_TIMEOUT_MS_MAX, SHARD_WAITS_MAX};
use ringmain_core::store::{AppendError, Appended};
use ringmain_wire::batch::{InvalidBatch, check_structure};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::produce::{ProduceOutcome, ProduceRequest, encode_produce_response, produced_batches};

use crate::connection::Connection;
use crate::flush;
use crate::mesh_message::{HopTicket, MeshReply, MeshRequest};
use crate::runtime::spawn_local;
use crate::shard::Shard;

/// How long a produce waits for memory before it is refused.
const BUSY_PATIENCE: Duration = Duration::from_millis(500);
/// How much longer than the owner a hop waits for its answer.
const HOP_PATIENCE: Duration = Duration::from_secs(5);
/// What a refused client is told to wait.
const BUSY_RETRY_MS: u32 = 50;

/// Who gets the answer to a produce.
pub(crate) enum ReplyTo {
    /// A client of this shard.
    Client { connection: Rc<Connection>, correlation_id: u64 },
    /// Another shard, which has the client.
    Shard(RefCell<Option<HopTicket>>),
}

/// A produce until it is answered.
pub(crate) struct PendingProduce {
    to: ReplyTo,
    outcomes: RefCell<Vec<ProduceOutcome>>,
    /// Batches whose outcome is not known yet, and one more while batches are being appended.
    open: Cell<usize>,
    /// Counted among the requests of its connection.
    counted: Cell<bool>,
    answered: Cell<bool>,
    /// How many batches the request has.
    batches: usize,
    due: Duration,
}

/// All waits of a shard for its own log, by token.
#[derive(Default)]
pub(crate) struct Waits {
    by_token: HashMap<WaitToken, (Rc<PendingProduce>, usize)>,
    next_token: u64,
}

impl Waits {
    fn register(&mut self, produce: &Rc<PendingProduce>, at: usize) -> WaitToken {
        self.next_token += 1;
        let token = WaitToken(self.next_token);
        self.by_token.insert(token, (Rc::clone(produce), at));
        token
    }
}

/// The answer for a batch that has not reached its level when the time is over.
fn overdue(key: PartitionKey) -> ProduceOutcome {
    ProduceOutcome { key, code: ErrorCode::TIMED_OUT, ..ProduceOutcome::default() }
}

fn refused(key: PartitionKey, code: ErrorCode, message: String) -> ProduceOutcome {
    ProduceOutcome { key, code, message: message.into(), ..ProduceOutcome::default() }
}

/// Answers a client's produce, now or when its level is reached.
pub(crate) async fn produce(
    shard: &Rc<Shard>,
    connection: &Rc<Connection>,
    correlation_id: u64,
    request: &ProduceRequest,
    payload: &[u8],
) {
    let batches = produced_batches(payload).take(PRODUCE_BATCHES_MAX + 1).collect::<Result<_, BatchError>>();
    let batches: Vec<(BatchHeader, &[u8])> = match batches {
        Ok(batches) => batches,
        Err(error) => {
            let code = InvalidBatch::from(error).code();
            return shard.answer_error(connection, correlation_id, code, error.to_string());
        }
    };
    if batches.is_empty() {
        let message = "a produce without batches".into();
        return shard.answer_error(connection, correlation_id, ErrorCode::BAD_REQUEST, message);
    }
    if batches.len() > PRODUCE_BATCHES_MAX {
        let message = format!("a produce has at most {PRODUCE_BATCHES_MAX} batches, this one has more");
        return shard.answer_error(connection, correlation_id, ErrorCode::TOO_LARGE, message);
    }
    let to = ReplyTo::Client { connection: Rc::clone(connection), correlation_id };
    let produce = PendingProduce::new(shard, to, request.timeout_ms, batches.len());
    let mut hops: BTreeMap<ShardId, Vec<usize>> = BTreeMap::new();
    let give_up = shard.clock.exact() + BUSY_PATIENCE;
    for (at, (header, bytes)) in batches.iter().enumerate() {
        let owner = match check(shard, header, bytes) {
            Ok(owner) => owner,
            Err(outcome) => {
                produce.push(outcome);
                continue;
            }
        };
        let asked = level(shard, request.durability, header.key);
        if owner == shard.id {
            append_patiently(shard, &produce, header, bytes, asked, give_up).await;
        } else {
            produce.push(ProduceOutcome { level: asked, ..overdue(header.key) });
            produce.open.set(produce.open.get() + 1);
            produce.count();
            hops.entry(owner).or_default().push(at);
        }
    }
    for (owner, places) in hops {
        hop(shard, &produce, owner, places, &batches, request.timeout_ms).await;
    }
    produce.finish_one(shard);
}

/// Sends the batches at `places` to the shard that has their partitions.
async fn hop(
    shard: &Rc<Shard>,
    produce: &Rc<PendingProduce>,
    owner: ShardId,
    places: Vec<usize>,
    batches: &[(BatchHeader, &[u8])],
    timeout_ms: u32,
) {
    let copies = places
        .iter()
        .map(|&at| (batches[at].0, Bytes::copy_from_slice(batches[at].1), produce.outcomes.borrow()[at].level))
        .collect();
    let keys: Vec<PartitionKey> = places.iter().map(|&at| batches[at].0.key).collect();
    let Some(call) = shard.send_to(owner, MeshRequest::Produce { batches: copies, timeout_ms }).await else {
        shard.metrics.busy_refusals_total.add(1);
        let busy = |&key: &PartitionKey| ProduceOutcome {
            retry_after_ms: BUSY_RETRY_MS,
            ..refused(key, ErrorCode::SERVER_BUSY, format!("shard {owner} has too many requests waiting"))
        };
        return produce.hop_done(shard, &places, keys.iter().map(busy).collect());
    };
    let (shard, produce) = (Rc::clone(shard), Rc::clone(produce));
    spawn_local(async move {
        // The owner answers what is overdue by itself; this is for an owner that does not come round to it.
        let patience = Duration::from_millis(u64::from(timeout_ms)) + HOP_PATIENCE;
        let outcomes = match shard.clock.timeout(patience, call).await {
            Some(Ok(MeshReply::Produce(outcomes))) => outcomes,
            Some(Ok(_)) | None => keys.iter().map(|&key| overdue(key)).collect(),
            Some(Err(lost)) => keys.iter().map(|&key| refused(key, ErrorCode::UNAVAILABLE, lost.to_string())).collect(),
        };
        produce.hop_done(&shard, &places, outcomes);
        shard.flush_touched();
    });
}

/// A hop's produce on the owner. Never waits: a shard always drains its incoming rings.
pub(crate) fn produce_for(
    shard: &Rc<Shard>,
    ticket: HopTicket,
    batches: &[(BatchHeader, Bytes, Durability)],
    timeout_ms: u32,
) {
    let to = ReplyTo::Shard(RefCell::new(Some(ticket)));
    let produce = PendingProduce::new(shard, to, timeout_ms, batches.len());
    for (header, bytes, asked) in batches {
        // Checked by the shard that received them; the topic may have gone meanwhile, which append notices.
        if let Err(error) = append(shard, &produce, header, bytes, *asked) {
            produce.push(append_refusal(shard, header.key, &error));
        }
    }
    produce.finish_one(shard);
}

/// The level that a batch gets: what was asked or the topic's default, but not below the topic's floor.
fn level(shard: &Shard, asked: Option<Durability>, key: PartitionKey) -> Durability {
    let routing = shard.routing.borrow();
    let Some(topic) = routing.topic(key.topic) else { return asked.unwrap_or_default() };
    let settings = &topic.info.settings;
    asked.unwrap_or(settings.durability_default).max(settings.durability_floor)
}

/// The one check of a batch, on entry: where it belongs, CRC, structure.
fn check(shard: &Shard, header: &BatchHeader, bytes: &[u8]) -> Result<ShardId, ProduceOutcome> {
    let key = header.key;
    let owner = {
        let routing = shard.routing.borrow();
        let Some(topic) = routing.topic(key.topic) else {
            let message = format!("no topic has the id {}: refresh the metadata", key.topic);
            return Err(refused(key, ErrorCode::TOPIC_NOT_FOUND, message));
        };
        topic.shard_of(key.partition).ok_or_else(|| {
            let message = format!("topic `{}` has {} partitions", topic.info.name, topic.info.partition_stores.len());
            refused(key, ErrorCode::PARTITION_NOT_FOUND, message)
        })?
    };
    if header.flags & FLAG_SPARSE != 0 {
        return Err(refused(key, ErrorCode::INVALID_BATCH, "a sparse batch can't be produced".into()));
    }
    batch::check_crc(header, bytes).map_err(|error| refused(key, ErrorCode::CORRUPT_BATCH, error.to_string()))?;
    check_structure(bytes, header).map_err(|error| refused(key, error.code(), error.to_string()))?;
    Ok(owner)
}

/// Appends a batch and, above level `memory`, registers its wait in the same breath: a flush that starts later must
/// find the waiter. One that was appended before waits for the level that is asked for now.
fn append(
    shard: &Rc<Shard>,
    produce: &Rc<PendingProduce>,
    header: &BatchHeader,
    bytes: &[u8],
    level: Durability,
) -> Result<(), AppendError> {
    if shard.log_failed.get() {
        produce.push(store_failed(shard, header.key));
        return Ok(());
    }
    if shard.disk_full.get() {
        let message = "the disk has no room for another segment: delete topics or free space".into();
        produce.push(ProduceOutcome { retry_after_ms: 1000, ..refused(header.key, ErrorCode::DISK_FULL, message) });
        return Ok(());
    }
    if shard.stopping.get() {
        produce.push(refused(header.key, ErrorCode::UNAVAILABLE, "the broker is stopping".into()));
        return Ok(());
    }
    if level > Durability::Memory && shard.acks.borrow().waiting() >= SHARD_WAITS_MAX {
        shard.metrics.busy_refusals_total.add(1);
        let message = format!("{SHARD_WAITS_MAX} batches of this shard wait for the disk already");
        let busy = refused(header.key, ErrorCode::SERVER_BUSY, message);
        produce.push(ProduceOutcome { retry_after_ms: BUSY_RETRY_MS, ..busy });
        return Ok(());
    }
    let now_ms = shard.clock.monotonic().as_millis() as u64;
    let mut store = shard.store.borrow_mut();
    let appended = store.append(&*shard.memory, header, bytes, now_ms, shard.clock.now_ms())?;
    let ends = store.ends(header.key).map(|(ends, _)| ends).unwrap_or_default();
    let unplanned = store.unplanned_bytes();
    drop(store);
    if appended.duplicate {
        shard.metrics.duplicate_batches_total.add(1);
    } else {
        shard.metrics.produced_batches_total.add(1);
        shard.metrics.produced_records_total.add(u64::from(header.record_count));
        shard.metrics.produced_bytes_total.add(u64::from(header.batch_bytes));
        shard.parked.notify(header.key);
    }
    let mut outcome = ProduceOutcome {
        key: header.key,
        code: ErrorCode::OK,
        level,
        base_offset: appended.base_offset,
        leader_epoch: appended.epoch,
        flushed_end: ends.flushed_end(),
        synced_end: ends.synced_end(),
        duplicate: appended.duplicate,
        ..ProduceOutcome::default()
    };
    let reached = match level {
        Durability::Memory => true,
        Durability::Flushed => ends.flushed_end() >= appended.next_offset,
        Durability::Synced => ends.synced_end() >= appended.next_offset,
    };
    if !reached {
        // What it answers if the wait is never over.
        outcome.code = ErrorCode::TIMED_OUT;
        produce.open.set(produce.open.get() + 1);
        produce.count();
        let token = shard.waits.borrow_mut().register(produce, produce.outcomes.borrow().len());
        wait(shard, header.key, &appended, level, token);
    } else if unplanned >= shard.config.flush_bytes {
        shard.flush_wanted.raise();
    }
    produce.push(outcome);
    Ok(())
}

fn wait(shard: &Rc<Shard>, key: PartitionKey, appended: &Appended, level: Durability, token: WaitToken) {
    if appended.duplicate {
        shard.acks.borrow_mut().wait_again(key, appended.next_offset, level, token);
        // It may be flushed, with nobody who waited for a sync.
        flush::sync_if_wanted(shard);
    } else {
        shard.acks.borrow_mut().wait(key, appended.next_offset, level, token);
    }
    shard.flush_wanted.raise();
}

fn store_failed(shard: &Shard, key: PartitionKey) -> ProduceOutcome {
    let message = format!("the log of shard {} failed on a write or sync; see the broker's log", shard.id);
    refused(key, ErrorCode::STORE_FAILED, message)
}

fn append_refusal(shard: &Shard, key: PartitionKey, error: &AppendError) -> ProduceOutcome {
    let code = match error {
        AppendError::Sequence(error) => return sequence_refusal(shard, key, error),
        AppendError::UnknownPartition(_) => ErrorCode::NOT_HERE,
        AppendError::Busy { .. } | AppendError::UnsyncedWindow(_) => {
            shard.metrics.busy_refusals_total.add(1);
            shard.flush_wanted.raise();
            ErrorCode::SERVER_BUSY
        }
    };
    let retry_after_ms = if code == ErrorCode::SERVER_BUSY { BUSY_RETRY_MS } else { 0 };
    ProduceOutcome { retry_after_ms, ..refused(key, code, error.to_string()) }
}

/// What an idempotent producer is told, with what it must know to go on.
fn sequence_refusal(shard: &Shard, key: PartitionKey, error: &SequenceError) -> ProduceOutcome {
    shard.metrics.sequence_refusals_total.add(1);
    let (code, next_sequence, producer_epoch) = match *error {
        SequenceError::Gap { expected } => (ErrorCode::OUT_OF_SEQUENCE, expected, 0),
        SequenceError::Fenced { current } => (ErrorCode::PRODUCER_FENCED, 0, current),
        SequenceError::TooOld { expected } | SequenceError::Reused { expected } => {
            (ErrorCode::SEQUENCE_UNKNOWN, expected, 0)
        }
        SequenceError::Forgotten => (ErrorCode::PRODUCER_UNKNOWN, 0, 0),
    };
    ProduceOutcome { next_sequence, producer_epoch, ..refused(key, code, error.to_string()) }
}

/// Appends; when memory is full of what waits for the disk, the connection is not read for a while, then refused. One
/// such wait is for all batches of a request: a client learns soon, whatever it has sent.
async fn append_patiently(
    shard: &Rc<Shard>,
    produce: &Rc<PendingProduce>,
    header: &BatchHeader,
    bytes: &[u8],
    level: Durability,
    give_up: Duration,
) {
    while let Err(error) = append(shard, produce, header, bytes, level) {
        let left = give_up.saturating_sub(shard.clock.exact());
        let passes = matches!(error, AppendError::Busy { .. } | AppendError::UnsyncedWindow(_));
        if left.is_zero() || !passes {
            produce.push(append_refusal(shard, header.key, &error));
            return;
        }
        // Acks of what this very turn appended must not wait with it.
        shard.flush_touched();
        shard.memory_short.set(true);
        shard.flush_wanted.raise();
        shard.clock.timeout(left, shard.memory_freed.wait()).await;
    }
}

fn answer(shard: &Shard, to: &ReplyTo, outcomes: &[ProduceOutcome]) {
    if outcomes.iter().any(|outcome| !outcome.code.is_ok()) {
        shard.metrics.errors_answered_total.add(1);
    }
    match to {
        ReplyTo::Client { connection, correlation_id } => connection.reply(shard, Vec::new(), |encoder, out| {
            encode_produce_response(encoder, *correlation_id, outcomes, out);
        }),
        ReplyTo::Shard(ticket) => {
            if let Some(ticket) = ticket.take() {
                ticket.reply(MeshReply::Produce(outcomes.to_vec()));
            }
        }
    }
}

impl PendingProduce {
    fn new(shard: &Shard, to: ReplyTo, timeout_ms: u32, batches: usize) -> Rc<Self> {
        Rc::new(Self {
            to,
            outcomes: RefCell::new(Vec::with_capacity(batches)),
            open: Cell::new(1),
            counted: Cell::new(false),
            answered: Cell::new(false),
            batches,
            due: shard.clock.monotonic() + Duration::from_millis(u64::from(timeout_ms.min(PRODUCE_TIMEOUT_MS_MAX))),
        })
    }

    fn push(&self, outcome: ProduceOutcome) {
        self.outcomes.borrow_mut().push(outcome);
    }

    fn is_overdue(&self, now: Duration) -> bool {
        self.due <= now && !self.answered.get() && self.outcomes.borrow().len() == self.batches
    }

    /// It will wait: it counts among the requests of its connection.
    fn count(&self) {
        if let ReplyTo::Client { connection, .. } = &self.to
            && !self.counted.replace(true)
        {
            connection.requests.set(connection.requests.get() + 1);
        }
    }

    fn finish_one(&self, shard: &Shard) {
        self.open.set(self.open.get() - 1);
        if self.open.get() == 0 {
            self.answer(shard);
        }
    }

    /// The owner of the batches at `places` has answered.
    fn hop_done(&self, shard: &Shard, places: &[usize], outcomes: Vec<ProduceOutcome>) {
        for (&at, outcome) in places.iter().zip(outcomes) {
            self.outcomes.borrow_mut()[at] = outcome;
            self.finish_one(shard);
        }
    }

    fn answer(&self, shard: &Shard) {
        if self.answered.replace(true) {
            return;
        }
        if let ReplyTo::Client { connection, .. } = &self.to
            && self.counted.get()
        {
            connection.requests.set(connection.requests.get() - 1);
        }
        answer(shard, &self.to, &self.outcomes.borrow());
    }
}

/// Waits that the log has ended: with an ack, or because it failed (`acked` false).
pub(crate) fn waits_over(shard: &Shard, tokens: &[WaitToken], acked: bool) {
    for token in tokens {
        let Some((produce, at)) = shard.waits.borrow_mut().by_token.remove(token) else { continue };
        {
            let mut outcomes = produce.outcomes.borrow_mut();
            let outcome = &mut outcomes[at];
            match shard.store.borrow().ends(outcome.key) {
                Some((ends, _)) if acked => {
                    outcome.code = ErrorCode::OK;
                    outcome.flushed_end = ends.flushed_end();
                    outcome.synced_end = ends.synced_end();
                    shard.metrics.durable_acks_total.add(1);
                }
                None if acked => outcome.code = ErrorCode::OK,
                Some(_) => *outcome = store_failed(shard, outcome.key),
                None => *outcome = refused(outcome.key, ErrorCode::TOPIC_NOT_FOUND, "the topic was deleted".into()),
            }
        }
        produce.finish_one(shard);
    }
}

/// Answers produces whose time is over; called every 100 ms or so.
pub(crate) fn answer_overdue(shard: &Shard) {
    let now = shard.clock.monotonic();
    let overdue: Vec<Rc<PendingProduce>> = {
        let waits = shard.waits.borrow();
        let all = waits.by_token.values().map(|(produce, _)| produce);
        all.filter(|produce| produce.is_overdue(now)).map(Rc::clone).collect()
    };
    for produce in overdue {
        produce.answer(shard);
    }
}
