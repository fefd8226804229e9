//! Fetches that landed on the wrong shard: one hop, and the answer is a copy.
//!
//! A long poll must not hold what the hops of all connections share. So the owner is asked for what is there, and when
//! that is not enough, to say when there is more; asking takes a credit but no bytes, and only half of the credits may
//! be taken so.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_lite::future;
use ringmain_core::ids::{Offset, PartitionKey, ShardId};
use ringmain_core::limits::{FETCH_WAIT_MS_MAX, MESH_CREDITS};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::fetch::{FetchRequest, FetchedPartitionOutcome};
use ringmain_wire::message::ErrorResponse;

use crate::connection::{Connection, Part};
use crate::copies::{Taker, Waiting};
use crate::fetch::{Fetched, ParkedGuard, answer, copy_bytes_max, fetch_here, is_enough, visible_end};
use crate::mesh_message::{HopTicket, MeshReply, MeshRequest};
use crate::runtime::spawn_local;
use crate::shard::Shard;
use crate::signal::Signal;
use crate::tag_filter;

/// How long the owner has to answer a hop that does not wait for records.
const HOP_PATIENCE: Duration = Duration::from_secs(10);
/// Longest watch: so long it holds its credit when the client has gone.
const WATCH_MS_MAX: u32 = 1000;
/// How often is looked when no watch may be taken.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// What a refused client is told to wait.
const BUSY_RETRY_MS: u32 = 50;

/// Serves a client's fetch whose partitions another shard has.
pub(crate) async fn fetch_there(
    shard: &Rc<Shard>,
    connection: &Rc<Connection>,
    correlation_id: u64,
    owner: ShardId,
    mut request: FetchRequest,
) {
    let wait = Duration::from_millis(u64::from(request.wait_ms_max.min(FETCH_WAIT_MS_MAX)));
    let due = shard.clock.exact() + wait;
    let gone = Rc::new(Signal::default());
    connection.when_closed(&gone);
    loop {
        // Its answer would find no room otherwise.
        connection.reply_room().await;
        let taker = Taker::Client(connection.id);
        let Some(mut copied) = shard.copies.reserve(taker, copy_bytes_max(&request)).await else { return };
        let (outcomes, payload) = match hop(shard, owner, &request).await {
            Ok(found) => found,
            Err(error) => return refuse(shard, connection, correlation_id, error),
        };
        let left = due.saturating_sub(shard.clock.exact());
        let over = left.is_zero() || connection.is_closed() || shard.stopping.get();
        // A filter that passed nothing has moved on as far as it may in one answer.
        let used_up = !request.tags.is_empty() && payload.is_empty() && !is_at_end(&request, &outcomes);
        if over || used_up || is_enough(&request, &outcomes, payload.len()) {
            let bytes = payload.len();
            copied.shrink_to(bytes);
            let copied = (bytes > 0).then_some(copied);
            let parts = if payload.is_empty() { Vec::new() } else { vec![Part::Bytes(payload)] };
            return answer(
                shard,
                connection,
                correlation_id,
                Fetched { outcomes, parts, bytes, memory_bytes: 0, copied },
            );
        }
        if payload.is_empty() {
            tag_filter::go_on(&mut request, &outcomes);
        }
        drop((payload, copied));
        let _parked = ParkedGuard::new(shard);
        future::or(watch(shard, owner, &outcomes, left), gone.wait()).await;
    }
}

/// Whether all has been looked at.
fn is_at_end(request: &FetchRequest, outcomes: &[FetchedPartitionOutcome]) -> bool {
    outcomes.iter().all(|outcome| outcome.next_offset >= visible_end(request, outcome))
}

/// What the owner has now.
async fn hop(
    shard: &Rc<Shard>,
    owner: ShardId,
    request: &FetchRequest,
) -> Result<(Vec<FetchedPartitionOutcome>, Bytes), ErrorResponse> {
    let now = FetchRequest { wait_ms_max: 0, ..request.clone() };
    let Some(call) = shard.send_to(owner, MeshRequest::Fetch(now)).await else {
        shard.metrics.busy_refusals_total.add(1);
        let busy = ErrorResponse::new(ErrorCode::SERVER_BUSY, format!("shard {owner} has too many requests waiting"));
        return Err(ErrorResponse { retry_after_ms: BUSY_RETRY_MS, ..busy });
    };
    match shard.clock.timeout(HOP_PATIENCE, call).await {
        Some(Ok(MeshReply::Fetch { outcomes, payload })) => Ok((outcomes, payload)),
        Some(_) | None => Err(ErrorResponse::new(ErrorCode::UNAVAILABLE, format!("shard {owner} did not answer"))),
    }
}

fn refuse(shard: &Shard, connection: &Rc<Connection>, correlation_id: u64, error: ErrorResponse) {
    shard.metrics.errors_answered_total.add(1);
    connection.reply(shard, Vec::new(), |encoder, out| {
        ringmain_wire::message::encode_error(encoder, correlation_id, &error, out);
    });
}

/// Waits until the owner says that one of the partitions has changed, or some time has passed.
async fn watch(shard: &Rc<Shard>, owner: ShardId, outcomes: &[FetchedPartitionOutcome], left: Duration) {
    if shard.watches.get() >= MESH_CREDITS / 2 {
        return shard.clock.sleep(left.min(LOOK_EVERY)).await;
    }
    let _watching = Waiting::new(&shard.watches);
    let seen = outcomes.iter().map(|outcome| (outcome.key, outcome.log_end, outcome.synced_end)).collect();
    // Bounded by WATCH_MS_MAX.
    let wait_ms = left.as_millis().min(u128::from(WATCH_MS_MAX)) as u32;
    match shard.send_to(owner, MeshRequest::Watch { seen, wait_ms }).await {
        Some(call) => {
            let patience = Duration::from_millis(u64::from(wait_ms)) + HOP_PATIENCE;
            // Whatever it says: the owner is asked again.
            let _ = shard.clock.timeout(patience, call).await;
        }
        None => shard.clock.sleep(left.min(LOOK_EVERY)).await,
    }
}

/// A hop's fetch on the owner: the answer is copied, since blocks are never shared across threads.
pub(crate) fn fetch_for(shard: &Rc<Shard>, ticket: HopTicket, fetch: FetchRequest) {
    let shard = Rc::clone(shard);
    spawn_local(async move {
        let fetched = fetch_here(&shard, fetch, None).await;
        let mut payload = Vec::with_capacity(fetched.bytes);
        for part in &fetched.parts {
            payload.extend_from_slice(part.as_bytes(&shard));
        }
        fetched.release(&shard);
        let payload = Bytes::from(payload);
        ticket.reply(MeshReply::Fetch { outcomes: fetched.outcomes, payload });
    });
}

/// A hop's watch on the owner.
pub(crate) fn watch_for(shard: &Rc<Shard>, ticket: HopTicket, seen: Vec<(PartitionKey, Offset, Offset)>, wait_ms: u32) {
    let shard = Rc::clone(shard);
    spawn_local(async move {
        let signal = Rc::new(Signal::default());
        // Parked before the look, so that no change between the two is missed.
        for (key, ..) in &seen {
            shard.parked.park(*key, &signal);
        }
        let is_news = |&(key, log_end, synced_end): &(PartitionKey, Offset, Offset)| {
            let store = shard.store.borrow();
            store.ends(key).is_none_or(|(ends, _)| ends.log_end() != log_end || ends.synced_end() != synced_end)
        };
        let news = seen.iter().any(is_news);
        if !news && !shard.stopping.get() {
            shard.clock.timeout(Duration::from_millis(u64::from(wait_ms)), signal.wait()).await;
        }
        for (key, ..) in &seen {
            shard.parked.unpark(*key, &signal);
        }
        ticket.reply(MeshReply::Looked);
    });
}
