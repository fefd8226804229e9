//! Fetch: runs the plans of core on blocks and files ([`attempt`]), parks what finds nothing, answers.

mod attempt;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ringmain_core::ids::{Offset, ShardId};
use ringmain_core::limits::{
    BATCH_BYTES_MAX, FETCH_BYTES_MAX, FETCH_PARTITIONS_MAX, FETCH_WAIT_MS_MAX, FILTERED_FETCH_BYTES_MAX,
    SHARD_FETCH_PARTITIONS_MAX, SHARD_PARKED_FETCHES_MAX,
};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::fetch::{FetchPartition, FetchRequest, FetchedPartitionOutcome, Visibility, encode_fetch_response};

use crate::connection::{Connection, Part};
use crate::copies::{Copied, Taker};
use crate::fetch_hop;
use crate::runtime::{spawn_local, yield_if_needed};
use crate::shard::Shard;
use crate::signal::Signal;
use crate::tag_filter::{self, FetchFilter};
use attempt::Attempt;

/// What a fetch has found.
pub(crate) struct Fetched {
    pub(crate) outcomes: Vec<FetchedPartitionOutcome>,
    pub(crate) parts: Vec<Part>,
    pub(crate) bytes: usize,
    /// How many of them come from blocks.
    pub(crate) memory_bytes: usize,
    /// The budget that copies among the parts hold.
    pub(crate) copied: Option<Copied>,
}

/// Answers a client's fetch: at once when memory has enough, else from a task of its own.
pub(crate) fn fetch(shard: &Rc<Shard>, connection: &Rc<Connection>, correlation_id: u64, request: FetchRequest) {
    if let Err(message) = check(&request) {
        return shard.answer_error(connection, correlation_id, ErrorCode::BAD_REQUEST, message);
    }
    let owner = match owner_of_all(shard, &request.partitions) {
        Ok(owner) => owner,
        Err(message) => return shard.answer_error(connection, correlation_id, ErrorCode::BAD_REQUEST, message),
    };
    if owner == shard.id && request.tags.is_empty() {
        let first = Attempt::from_memory(shard, &request);
        if first.disk.is_empty() && (first.is_enough(&request) || request.wait_ms_max == 0) {
            first.fetched.count_memory(shard);
            return answer(shard, connection, correlation_id, first.fetched);
        }
        first.fetched.release(shard);
    }
    let Some(under_way) = UnderWay::begin(shard, request.partitions.len()) else {
        let message = format!(
            "{SHARD_PARKED_FETCHES_MAX} fetches, or {SHARD_FETCH_PARTITIONS_MAX} partitions of fetches, wait on this shard already"
        );
        return shard.answer_error(connection, correlation_id, ErrorCode::TOO_MANY_REQUESTS, message);
    };
    connection.requests.set(connection.requests.get() + 1);
    let (shard, connection) = (Rc::clone(shard), Rc::clone(connection));
    spawn_local(async move {
        if owner == shard.id {
            let fetched = fetch_here(&shard, request, Some(&connection)).await;
            connection.reply_room().await;
            answer(&shard, &connection, correlation_id, fetched);
        } else {
            fetch_hop::fetch_there(&shard, &connection, correlation_id, owner, request).await;
        }
        connection.requests.set(connection.requests.get() - 1);
        drop(under_way);
        shard.flush_touched();
    });
}

/// Counts a fetch from its start to its answer, whatever it waits for.
struct UnderWay {
    shard: Rc<Shard>,
    partitions: usize,
}

impl UnderWay {
    fn begin(shard: &Rc<Shard>, partitions: usize) -> Option<Self> {
        let (fetches, all) = shard.fetches_under_way.get();
        if fetches >= SHARD_PARKED_FETCHES_MAX || all + partitions > SHARD_FETCH_PARTITIONS_MAX {
            return None;
        }
        shard.fetches_under_way.set((fetches + 1, all + partitions));
        Some(Self { shard: Rc::clone(shard), partitions })
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let (fetches, all) = self.shard.fetches_under_way.get();
        self.shard.fetches_under_way.set((fetches - 1, all - self.partitions));
    }
}

fn check(request: &FetchRequest) -> Result<(), String> {
    if request.partitions.is_empty() || request.partitions.len() > FETCH_PARTITIONS_MAX {
        return Err(format!(
            "a fetch has 1 to {FETCH_PARTITIONS_MAX} partitions, this one has {}",
            request.partitions.len()
        ));
    }
    Ok(())
}

/// The one shard that has all partitions of the fetch; unknown partitions count as anybody's.
fn owner_of_all(shard: &Shard, partitions: &[FetchPartition]) -> Result<ShardId, String> {
    let routing = shard.routing.borrow();
    let mut owner = None;
    for partition in partitions {
        let Some(here) = routing.shard_of(partition.key) else { continue };
        if owner.is_some_and(|other| other != here) {
            return Err(
                "the partitions of one fetch must be on one shard: group them by the shards of the metadata".into()
            );
        }
        owner = Some(here);
    }
    Ok(owner.unwrap_or(shard.id))
}

pub(crate) fn answer(shard: &Shard, connection: &Rc<Connection>, correlation_id: u64, fetched: Fetched) {
    let Fetched { outcomes, parts, bytes, copied, .. } = fetched;
    shard.metrics.fetched_bytes_total.add(bytes as u64);
    connection.reply_copied(shard, parts, copied, |encoder, out| {
        encode_fetch_response(encoder, correlation_id, &outcomes, bytes, out);
    });
}

/// Serves a fetch on the owner, with waiting for its own clients; it ends early when the client has gone.
pub(crate) async fn fetch_here(
    shard: &Rc<Shard>,
    mut request: FetchRequest,
    client: Option<&Rc<Connection>>,
) -> Fetched {
    let mut filter = FetchFilter::of(&request);
    let taker = client.map_or(Taker::Hop, |client| Taker::Client(client.id));
    let wait = Duration::from_millis(u64::from(request.wait_ms_max.min(FETCH_WAIT_MS_MAX)));
    let due = shard.clock.exact() + wait;
    let mut parked_before = false;
    // Told of changes from before the first look on, so that none between a look and a wait is missed.
    let signal = Rc::new(Signal::default());
    if let Some(client) = client {
        client.when_closed(&signal);
    }
    loop {
        for partition in &request.partitions {
            shard.parked.park(partition.key, &signal);
        }
        let mut fetched = look(shard, &request, filter.is_some(), parked_before, taker).await;
        let mut used_up = false;
        if let Some(filter) = &mut filter {
            filter.apply(shard, &request, &mut fetched, client).await;
            used_up = filter.is_used_up();
        }
        let left = due.saturating_sub(shard.clock.exact());
        let gone = client.is_some_and(|client| client.is_closed());
        let enough = is_enough(&request, &fetched.outcomes, fetched.bytes);
        // Whether there is time to wait or not: where nothing passed, the filter looks on as far as it may.
        let go_on = filter.is_some() && fetched.bytes == 0 && !(enough || used_up || shard.stopping.get() || gone);
        if go_on && tag_filter::go_on(&mut request, &fetched.outcomes) {
            fetched.release(shard);
            yield_if_needed().await;
            continue;
        }
        if enough || used_up || left.is_zero() || shard.stopping.get() || gone {
            fetched.count_memory(shard);
            for partition in &request.partitions {
                shard.parked.unpark(partition.key, &signal);
            }
            return fetched;
        }
        fetched.release(shard);
        drop(fetched);
        let parked = ParkedGuard::new(shard);
        shard.clock.timeout(left, signal.wait()).await;
        drop(parked);
        parked_before = true;
    }
}

/// One look at memory and disk.
async fn look(shard: &Rc<Shard>, request: &FetchRequest, filtered: bool, was_tail: bool, taker: Taker) -> Fetched {
    let mut first = Attempt::from_memory(shard, request);
    if first.disk.is_empty() && !filtered {
        return first.fetched;
    }
    // Nothing is pinned while the copies wait for their turn.
    first.fetched.release(shard);
    let Some(copied) = shard.copies_for(taker).reserve(taker, copy_bytes_max(request)).await else {
        // The client has gone.
        first.fetched.parts.clear();
        first.fetched.memory_bytes = 0;
        return first.fetched;
    };
    let mut attempt = Attempt::from_memory(shard, request);
    attempt.fetched.copied = Some(copied);
    let memory_bytes = attempt.fetched.memory_bytes;
    let disk = std::mem::take(&mut attempt.disk);
    attempt.read_disk(shard, request, disk, was_tail).await;
    if !filtered {
        attempt.fetched.shrink_copied(attempt.fetched.bytes - memory_bytes);
    }
    attempt.fetched
}

/// Whether there is something to answer now: enough bytes, as many as fit, or what the client must learn at once.
pub(crate) fn is_enough(request: &FetchRequest, outcomes: &[FetchedPartitionOutcome], bytes: usize) -> bool {
    let news = |outcome: &FetchedPartitionOutcome| !outcome.code.is_ok() || outcome.gap.is_some();
    // More is there, but the budget is used up: waiting would bring nothing.
    let cut = |outcome: &FetchedPartitionOutcome| {
        outcome.payload_bytes > 0 && outcome.next_offset < visible_end(request, outcome)
    };
    // What passes a filter is worth an answer however little it is.
    let bytes_min = if request.tags.is_empty() { (request.bytes_min as usize).max(1) } else { 1 };
    bytes >= bytes_min || outcomes.iter().any(|outcome| news(outcome) || cut(outcome))
}

/// Up to where the client sees the partition.
pub(crate) fn visible_end(request: &FetchRequest, outcome: &FetchedPartitionOutcome) -> Offset {
    match request.visibility {
        Visibility::LogEnd => outcome.log_end,
        Visibility::SyncedEnd => outcome.synced_end,
    }
}

pub(crate) struct ParkedGuard<'a>(&'a Cell<usize>, &'a Shard);

impl<'a> ParkedGuard<'a> {
    pub(crate) fn new(shard: &'a Shard) -> Self {
        shard.parked_count.set(shard.parked_count.get() + 1);
        shard.metrics.parked_fetches.set(shard.parked_count.get() as u64);
        Self(&shard.parked_count, shard)
    }
}

impl Drop for ParkedGuard<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
        self.1.metrics.parked_fetches.set(self.0.get() as u64);
    }
}

impl Fetched {
    /// The copies are only so many bytes; the rest of what was reserved for them is given back.
    pub(crate) fn shrink_copied(&mut self, bytes: usize) {
        if let Some(mut copied) = self.copied.take() {
            copied.shrink_to(bytes);
            self.copied = (copied.bytes() > 0).then_some(copied);
        }
    }

    pub(crate) fn release(&self, shard: &Shard) {
        shard.release(&self.parts);
    }

    /// Counts what an answer has from blocks.
    fn count_memory(&self, shard: &Shard) {
        shard.metrics.fetched_memory_bytes_total.add(self.memory_bytes as u64);
    }
}

/// What one answer may have before the next partition is left out. The last batch taken may go past it by its own size, and
/// all must fit one frame.
fn budget(request: &FetchRequest) -> usize {
    let most = if request.tags.is_empty() { FETCH_BYTES_MAX - BATCH_BYTES_MAX } else { FILTERED_FETCH_BYTES_MAX };
    (request.bytes_max as usize).min(most)
}

/// What the copies of one answer may take: a batch that is larger than the budget is read nevertheless.
pub(crate) fn copy_bytes_max(request: &FetchRequest) -> usize {
    budget(request).max(BATCH_BYTES_MAX)
}
