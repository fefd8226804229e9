//! A lane: everything of one producer for one partition. Records are copied into the open batch; full batches wait in
//! order. Without idempotence one batch at a time is under way, until it is acked or has failed for good. That is what keeps
//! the order of a partition across retries and reconnects: nothing overtakes a batch whose fate is open.

use std::collections::VecDeque;
use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use ringmain_core::ids::{Durability, Epoch, Offset, PartitionKey};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::batch_builder::{BatchBuilder, PushError};
use crate::client::connection::locked;
use crate::client::error::ClientError;
use crate::record::NewRecord;

/// A record that was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// Its partition.
    pub partition: u32,
    /// Its offset.
    pub offset: Offset,
    /// Level reached.
    pub level: Durability,
    /// Epoch it was appended in.
    pub leader_epoch: Epoch,
    /// The partition's flushed end when the ack was made.
    pub flushed_end: Offset,
    /// The partition's synced end when the ack was made.
    pub synced_end: Offset,
}

/// What will become of a record; await it, or drop it.
#[derive(Debug)]
pub struct Delivery {
    fate: watch::Receiver<Fate>,
    index: u32,
}

/// What became of a batch; `None` = not known yet. `Delivered` is of its first record.
type Fate = Option<Result<Delivered, ClientError>>;

impl IntoFuture for Delivery {
    type Output = Result<Delivered, ClientError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let first = fate_of(self.fate).await?;
            Ok(Delivered { offset: first.offset.plus(self.index.into()), ..first })
        })
    }
}

/// Waits until a batch's fate is known. A batch that is dropped without one was closed with its producer.
async fn fate_of(mut fate: watch::Receiver<Fate>) -> Result<Delivered, ClientError> {
    let known = fate.wait_for(Option::is_some).await.map_err(|_| ClientError::Closed)?;
    known.clone().unwrap_or(Err(ClientError::Closed))
}

/// A batch that will not change any more.
pub(crate) struct ReadyBatch {
    pub(crate) bytes: Bytes,
    /// Bytes of keys, values and headers.
    pub(crate) payload_bytes: u64,
    pub(crate) records: u64,
    /// What it took of the producer's buffer.
    pub(crate) buffered_bytes: usize,
    pub(crate) opened: Instant,
    /// No record fitted any more. One that goes out before has lingered, or was flushed.
    pub(crate) full: bool,
    fate: watch::Sender<Fate>,
}

impl ReadyBatch {
    pub(crate) fn decide(&self, fate: Result<Delivered, ClientError>) {
        self.fate.send_replace(Some(fate));
    }
}

pub(crate) struct Lane {
    partition: u32,
    linger: Duration,
    state: Mutex<LaneState>,
    work: Notify,
}

struct LaneState {
    builder: BatchBuilder,
    open: Option<OpenBatch>,
    ready: VecDeque<ReadyBatch>,
    /// Fates of the batches under way, oldest first; the front ones may be known.
    under_way: VecDeque<watch::Receiver<Fate>>,
    /// The first batch that was given up since the last flush: why.
    failed: Option<ClientError>,
    closing: bool,
    started: bool,
}

struct OpenBatch {
    opened: Instant,
    payload_bytes: u64,
    buffered_bytes: usize,
    records: u32,
    fate: watch::Sender<Fate>,
}

/// What pushing a record led to.
pub(crate) struct Pushed {
    pub(crate) delivery: Delivery,
    /// The lane has no task yet: the caller starts one.
    pub(crate) first: bool,
    /// A batch became full: keyless records go to the next partition.
    pub(crate) sealed: bool,
}

impl Lane {
    pub(crate) fn new(key: PartitionKey, batch_bytes: usize, linger: Duration) -> Self {
        let state = LaneState {
            builder: BatchBuilder::with_bytes_max(key, batch_bytes),
            open: None,
            ready: VecDeque::new(),
            under_way: VecDeque::new(),
            failed: None,
            closing: false,
            started: false,
        };
        Self { partition: key.partition, linger, state: Mutex::new(state), work: Notify::new() }
    }

    pub(crate) const fn partition(&self) -> u32 {
        self.partition
    }

    /// Copies a record into the open batch, sealing it first when the record does not fit.
    pub(crate) fn push(
        &self,
        record: &NewRecord<'_>,
        payload_bytes: u64,
        buffered_bytes: usize,
    ) -> Result<Pushed, ClientError> {
        let mut state = locked(&self.state);
        if state.closing {
            return Err(ClientError::Closed);
        }
        let mut sealed = false;
        match state.builder.push(record) {
            Err(PushError::Full) => {
                state.seal(true);
                sealed = true;
                state.builder.push(record)?;
            }
            pushed => pushed?,
        }
        let open = state.open.get_or_insert_with(OpenBatch::new);
        let delivery = Delivery { fate: open.fate.subscribe(), index: open.records };
        open.records += 1;
        open.payload_bytes += payload_bytes;
        open.buffered_bytes += buffered_bytes;
        // A new open batch starts the linger time; a sealed one can go at once.
        let wake = open.records == 1;
        let first = !std::mem::replace(&mut state.started, true);
        drop(state);
        if wake {
            self.work.notify_one();
        }
        Ok(Pushed { delivery, first, sealed })
    }

    /// Takes a batch that was built elsewhere, behind all that was pushed so far.
    pub(crate) fn push_batch(
        &self,
        bytes: Bytes,
        records: u64,
        payload_bytes: u64,
        buffered_bytes: usize,
    ) -> Result<Pushed, ClientError> {
        let mut state = locked(&self.state);
        if state.closing {
            return Err(ClientError::Closed);
        }
        state.seal(false);
        let fate = watch::Sender::new(None);
        let delivery = Delivery { fate: fate.subscribe(), index: 0 };
        let opened = Instant::now();
        state.ready.push_back(ReadyBatch { bytes, payload_bytes, records, buffered_bytes, opened, full: true, fate });
        let first = !std::mem::replace(&mut state.started, true);
        drop(state);
        self.work.notify_one();
        Ok(Pushed { delivery, first, sealed: true })
    }

    /// The next batch to send, once there is one: a full one, or the open one when it has lingered. None when the lane is
    /// closing and empty. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&self) -> Option<ReadyBatch> {
        loop {
            let work = self.work.notified();
            let due = {
                let mut state = locked(&self.state);
                let due = state.open.as_ref().map(|open| open.opened + self.linger);
                let lingered = due.is_some_and(|due| due <= Instant::now());
                if state.ready.is_empty() && (lingered || state.closing) {
                    state.seal(false);
                }
                if let Some(batch) = state.ready.pop_front() {
                    while state.under_way.front().is_some_and(|fate| fate.borrow().is_some()) {
                        state.under_way.pop_front();
                    }
                    state.under_way.push_back(batch.fate.subscribe());
                    return Some(batch);
                }
                if state.closing {
                    return None;
                }
                due
            };
            match due {
                None => work.await,
                Some(due) => {
                    // Whichever comes first; the loop looks again.
                    let _ = tokio::time::timeout_at(due, work).await;
                }
            }
        }
    }

    /// Seals what is open and sends it without lingering. The result waits for the fate of all that was pushed so far.
    pub(crate) fn flush(&self) -> Flushing {
        let fates = {
            let mut state = locked(&self.state);
            state.seal(false);
            let ready = state.ready.iter().map(|batch| batch.fate.subscribe());
            state.under_way.iter().cloned().chain(ready).collect()
        };
        self.work.notify_one();
        Flushing { fates }
    }

    /// A batch was given up. To be said before its fate is known, so that a flush that waits for that finds it.
    pub(crate) fn failed(&self, error: &ClientError) {
        locked(&self.state).failed.get_or_insert_with(|| error.clone());
    }

    /// Why a batch was given up, if one was since this was asked last: the first one.
    pub(crate) fn take_failure(&self) -> Option<ClientError> {
        locked(&self.state).failed.take()
    }

    /// No more records come; what is there is still sent.
    pub(crate) fn close(&self) {
        locked(&self.state).closing = true;
        self.work.notify_one();
    }
}

/// The batches that a flush waits for.
pub(crate) struct Flushing {
    fates: Vec<watch::Receiver<Fate>>,
}

impl Flushing {
    /// Waits until each is acked or given up; the first failure is the result.
    pub(crate) async fn wait(self) -> Result<(), ClientError> {
        let mut result = Ok(());
        for fate in self.fates {
            result = result.and(fate_of(fate).await.map(|_| ()));
        }
        result
    }
}

impl LaneState {
    fn seal(&mut self, full: bool) {
        if let Some(open) = self.open.take() {
            self.ready.push_back(ReadyBatch {
                bytes: self.builder.finish(),
                payload_bytes: open.payload_bytes,
                records: open.records.into(),
                buffered_bytes: open.buffered_bytes,
                opened: open.opened,
                full,
                fate: open.fate,
            });
        }
    }
}

impl OpenBatch {
    fn new() -> Self {
        let fate = watch::Sender::new(None);
        Self { opened: Instant::now(), payload_bytes: 0, buffered_bytes: 0, records: 0, fate }
    }
}
