//! One producing client: its partitions, its connections, its lanes. Lives on one load thread, so its state needs no
//! locks; no borrow of it is held across an await.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use ringmain_core::compressor::Compressor;
use ringmain_core::ids::Durability;
use ringmain_wire::batch_builder::BatchBuilder;
use ringmain_wire::batch_codec::compress;
use ringmain_wire::client::{ClientError, Connection, OwnedFrame};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::produce::ProduceRequest;
use ringmain_wire::record::NewRecord;
use tokio::task::JoinSet;

use super::{ClientLedger, LoadPlan, LoadResult, Run};
use crate::cluster;
use crate::payload::now_ns;
use crate::verify::PartitionLedger;

/// The broker is to give up earlier than the client's own patience ends.
const PRODUCE_TIMEOUT_MS: u32 = 20_000;
/// An answer that comes later counts as lost.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Least wait after a refusal.
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// Failures in a row, of one lane, after which the run has failed.
const FAILURES_MAX: u32 = 10;
/// Wait after a lost connection.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

/// A client between runs; lanes share it while one goes on.
pub(super) struct Client {
    index: u32,
    plan: Arc<LoadPlan>,
    /// By shard; made when first needed, dropped when lost.
    links: RefCell<Vec<Option<Connection>>>,
    /// Held from building a batch until it is queued on its connection: the broker is to see records in the order of
    /// their numbers.
    sending: tokio::sync::Mutex<()>,
    state: RefCell<State>,
}

struct State {
    /// Indexes of the targets that this client goes round.
    targets: Vec<usize>,
    /// What is known of each of them.
    ledgers: Vec<PartitionLedger>,
    /// Which of them is next.
    next: usize,
    builder: BatchBuilder,
    compressor: Compressor,
    record: Vec<u8>,
    result: LoadResult,
}

/// A batch on its way.
struct Sent {
    place: usize,
    sequence: u64,
}

impl Client {
    pub(super) fn new(index: usize, plan: &Arc<LoadPlan>) -> Rc<Self> {
        let partitions = plan.targets.len();
        // With fewer partitions than clients, several clients share one.
        let targets: Vec<usize> = (index % partitions..partitions).step_by(plan.shape.clients.max(1)).collect();
        let state = State {
            ledgers: vec![PartitionLedger::default(); targets.len()],
            next: 0,
            builder: BatchBuilder::new(plan.targets[targets[0]].key),
            compressor: Compressor::default(),
            record: vec![0; plan.shape.size],
            result: LoadResult::default(),
            targets,
        };
        let links = plan.addresses.iter().map(|_| None).collect();
        Rc::new(Self {
            index: index as u32,
            plan: Arc::clone(plan),
            links: RefCell::new(links),
            sending: tokio::sync::Mutex::new(()),
            state: RefCell::new(state),
        })
    }

    pub(super) fn ledgers(&self) -> Vec<ClientLedger> {
        let state = self.state.borrow();
        let known = state.targets.iter().zip(&state.ledgers);
        known
            .map(|(target, ledger)| ClientLedger { producer: self.index, target: *target, ledger: ledger.clone() })
            .collect()
    }

    /// Connects to every shard that this client produces to: before the clock starts.
    async fn connect(&self) -> Result<()> {
        let mut shards: Vec<usize> = {
            let state = self.state.borrow();
            state.targets.iter().map(|target| self.plan.targets[*target].shard).collect()
        };
        shards.sort_unstable();
        shards.dedup();
        for shard in shards {
            self.link(shard).await?;
        }
        Ok(())
    }

    async fn link(&self, shard: usize) -> Result<Connection> {
        let known = self.links.borrow()[shard].clone();
        if let Some(link) = known {
            return Ok(link);
        }
        let address = &self.plan.addresses[shard];
        let link = cluster::connect(address).await.with_context(|| {
            format!("shard {shard} does not answer at {address}; the common port may be the only one reachable")
        })?;
        // Another lane may have been faster; all of a client's lanes share one connection, for the sake of order.
        Ok(self.links.borrow_mut()[shard].get_or_insert(link).clone())
    }

    /// Forgets the connection to `shard` if it has ended.
    fn drop_link(&self, shard: usize) {
        let slot = &mut self.links.borrow_mut()[shard];
        if slot.as_ref().is_some_and(Connection::is_closed) {
            *slot = None;
        }
    }

    /// The place, among this client's partitions, that the next batch goes to.
    fn next_place(&self) -> (usize, usize) {
        let mut state = self.state.borrow_mut();
        let place = state.next;
        state.next = (place + 1) % state.targets.len();
        (place, self.plan.targets[state.targets[place]].shard)
    }

    /// Builds the next batch of the partition at `place`; `sending` must be held.
    fn build(&self, place: usize) -> (Sent, Bytes) {
        let mut state = self.state.borrow_mut();
        let State { targets, ledgers, builder, compressor, record, .. } = &mut *state;
        let target = targets[place];
        let sequence = ledgers[place].take(self.plan.shape.batch as u64);
        let (sent_ns, timestamp_ms) = (now_ns(), unix_ms());
        builder.reset(self.plan.targets[target].key);
        for number in 0..self.plan.shape.batch as u64 {
            self.plan.payload.fill(self.index, target as u32, sequence + number, sent_ns, record);
            let record = NewRecord { value: Some(record), timestamp_ms, ..NewRecord::default() };
            builder.push(&record).expect("the plan was checked: its batches fit");
        }
        let batch = builder.finish();
        let batch = compress(compressor, self.plan.shape.codec, &batch).unwrap_or(batch);
        (Sent { place, sequence }, batch)
    }

    /// Books what became of a batch. Asks for a pause when it was not taken; fails when going on makes no sense.
    fn settle(&self, sent: &Sent, latency: Duration, answer: Result<OwnedFrame, ClientError>) -> Result<Verdict> {
        let mut state = self.state.borrow_mut();
        let count = self.plan.shape.batch as u64;
        let State { ledgers, result, .. } = &mut *state;
        let ledger = &mut ledgers[sent.place];
        let error = match answer.and_then(OwnedFrame::into_result) {
            Ok(frame) => {
                let Response::Produce(outcomes) = &frame.response else {
                    bail!("the broker answered a produce with {:?}", frame.response);
                };
                let [outcome] = &outcomes[..] else {
                    bail!("the broker answered one batch with {} results", outcomes.len());
                };
                if outcome.code.is_ok() {
                    check_level(outcome.level, self.plan.shape.durability)?;
                    ledger.acked(sent.sequence, outcome.base_offset.0, count);
                    result.records += count;
                    result.requests += 1;
                    result.latencies.record(latency);
                    return Ok(Verdict::Acked);
                }
                let retry_after = Duration::from_millis(u64::from(outcome.retry_after_ms));
                ClientError::Server { code: outcome.code, message: outcome.message.clone(), retry_after }
            }
            Err(error) => error,
        };
        // Without the server's word, and with these words of it, the batch may be in the log or not.
        let open = error.code().is_none_or(ErrorCode::leaves_fate_open);
        if open {
            ledger.unknown(sent.sequence, count);
            result.unknown += 1;
        } else {
            ledger.refused(sent.sequence, count);
            result.refused += 1;
        }
        if !error.retriable() {
            bail!("the broker refuses the load: {error}");
        }
        Ok(if error.code().is_some() { Verdict::Pause(error.retry_after()) } else { Verdict::Lost(error) })
    }
}

enum Verdict {
    Acked,
    Pause(Duration),
    Lost(ClientError),
}

fn check_level(reached: Durability, wanted: Durability) -> Result<()> {
    if reached < wanted {
        bail!("the broker acked `{reached}` where `{wanted}` was asked for");
    }
    Ok(())
}

fn unix_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

/// Runs all clients of this thread; on its local set.
pub(super) async fn run(clients: &[Rc<Client>], run: &Arc<Run>) -> Result<LoadResult> {
    for client in clients {
        client.state.borrow_mut().result = LoadResult::default();
        client.connect().await?;
    }
    let mut lanes = JoinSet::new();
    for client in clients {
        for _ in 0..client.plan.shape.in_flight {
            lanes.spawn_local(lane(Rc::clone(client), Arc::clone(run)));
        }
    }
    let mut failed = None;
    while let Some(ended) = lanes.join_next().await {
        if let Err(error) = ended.context("a lane panicked").and_then(|lane| lane) {
            // The run has failed: the other lanes, of all threads, need not go on to its end.
            if let Some(client) = clients.first() {
                client.plan.stop.store(true, Ordering::Relaxed);
            }
            failed = Some(error);
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let mut total = LoadResult::default();
    for client in clients {
        total.add(&client.state.borrow().result);
    }
    total.seconds = run.started.elapsed().as_secs_f64();
    Ok(total)
}

/// A closed loop until the run ends.
async fn lane(client: Rc<Client>, run: Arc<Run>) -> Result<()> {
    let durability = Some(client.plan.shape.durability);
    let request = Request::Produce(ProduceRequest { durability, timeout_ms: PRODUCE_TIMEOUT_MS });
    let mut failures = 0;
    while run.goes_on(&client.plan.stop) {
        let (place, shard) = client.next_place();
        let link = match client.link(shard).await {
            Ok(link) => link,
            Err(_) if failures < FAILURES_MAX => {
                failures += 1;
                tokio::time::sleep(RECONNECT_PAUSE).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        let (sent, started, queued) = {
            let _sending = client.sending.lock().await;
            let (sent, batch) = client.build(place);
            let started = Instant::now();
            (sent, started, link.start(&request, vec![batch], REQUEST_TIMEOUT).await)
        };
        let answer = match queued {
            Ok(pending) => pending.await,
            Err(error) => Err(error),
        };
        match client.settle(&sent, started.elapsed(), answer)? {
            Verdict::Acked => failures = 0,
            Verdict::Pause(pause) => tokio::time::sleep(pause.max(PAUSE_MIN)).await,
            Verdict::Lost(error) => {
                failures += 1;
                if failures > FAILURES_MAX {
                    return Err(error).with_context(|| format!("{failures} requests in a row were lost"));
                }
                client.drop_link(shard);
                tokio::time::sleep(RECONNECT_PAUSE).await;
            }
        }
    }
    Ok(())
}
