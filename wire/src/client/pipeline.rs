//! The batches of one lane of an idempotent producer on their way: several under way at once, in order.
//!
//! The broker takes the batches of a producer in the order of their sequences and recognises what comes again, so a lane need
//! not wait for one ack before it sends the next. When an attempt fails, the oldest batch is settled alone, with back-off; only
//! then are the later ones sent again, with the bytes they had. The same holds on a new connection: the broker behind it may
//! have lost memory, and then takes whatever comes first.

use std::collections::VecDeque;

use bytes::Bytes;
use ringmain_core::codec::Codec;
use ringmain_core::compressor::Compressor;
use tokio::sync::SemaphorePermit;

use crate::ErrorCode;
use crate::batch_codec::compress;
use crate::client::backoff::Backoff;
use crate::client::connection::{Connection, PendingResponse};
use crate::client::error::ClientError;
use crate::client::lane::{Delivered, Lane, ReadyBatch};
use crate::client::numbering::{Numbering, ProducerIdentity};
use crate::client::producer::Shared;

/// A batch that is not acked.
struct Unacked<'a> {
    batch: ReadyBatch,
    /// Its bytes with the producer's numbers.
    payload: Vec<Bytes>,
    /// The answer to its request, if one is under way.
    pending: Option<(PendingResponse, SemaphorePermit<'a>)>,
    /// An attempt may have stored it, and its answer is not known.
    may_be_stored: bool,
}

/// One lane's batches, oldest first.
pub(crate) struct Pipeline<'a> {
    shared: &'a Shared,
    lane: &'a Lane,
    in_flight_max: usize,
    numbering: Numbering,
    compressor: Compressor,
    unacked: VecDeque<Unacked<'a>>,
    /// Where all that is under way was sent, and where a batch has been acked since it is in use.
    connection: Option<Connection>,
    /// Another instance has taken over: nothing can be sent any more.
    fenced: Option<ClientError>,
}

enum Event {
    Answer(Result<Delivered, ClientError>),
    Batch(Option<ReadyBatch>),
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(shared: &'a Shared, lane: &'a Lane, identity: ProducerIdentity, in_flight_max: usize) -> Self {
        Self {
            shared,
            lane,
            in_flight_max,
            numbering: Numbering::new(identity),
            compressor: Compressor::default(),
            unacked: VecDeque::new(),
            connection: None,
            fenced: None,
        }
    }

    /// Sends the batches of the lane until it is closed and empty.
    pub(crate) async fn run(mut self) {
        let mut open = true;
        while open || !self.unacked.is_empty() {
            if self.unacked.is_empty() {
                match self.lane.next().await {
                    Some(batch) => self.admit(batch),
                    None => open = false,
                }
            } else if self.connection.as_ref().is_none_or(Connection::is_closed) {
                self.settle(None).await;
            } else if let Err(error) = self.step(&mut open).await {
                self.settle(Some(error)).await;
            }
            if let Some(error) = &self.fenced {
                for unacked in self.unacked.drain(..) {
                    self.shared.decide(self.lane, &unacked.batch, Err(error.clone()));
                }
            }
        }
    }

    fn admit(&mut self, mut batch: ReadyBatch) {
        let codec = self.shared.config.codec;
        if codec != Codec::None
            && let Some(compressed) = compress(&mut self.compressor, codec, &batch.bytes)
        {
            batch.bytes = compressed;
        }
        if !batch.full {
            self.shared.turn_from(self.lane.partition());
        }
        let payload = self.numbering.number(&batch.bytes);
        self.unacked.push_back(Unacked { batch, payload, pending: None, may_be_stored: false });
    }

    /// Sends what can be sent, then takes the oldest answer or the next batch. An error is one of the oldest batch.
    async fn step(&mut self, open: &mut bool) -> Result<(), ClientError> {
        let all_sent = self.send().await?;
        let takes_more = *open && all_sent && self.unacked.len() < self.in_flight_max;
        let Some((pending, _)) = self.unacked.front_mut().and_then(|unacked| unacked.pending.as_mut()) else {
            return Ok(());
        };
        let event = tokio::select! {
            biased;
            answer = pending => Event::Answer(answer.and_then(|frame| self.shared.outcome(frame, self.lane.partition()))),
            batch = self.lane.next(), if takes_more => Event::Batch(batch),
        };
        match event {
            Event::Answer(answer) => self.acked(answer?),
            Event::Batch(Some(batch)) => self.admit(batch),
            Event::Batch(None) => *open = false,
        }
        Ok(())
    }

    fn acked(&mut self, delivered: Delivered) {
        if let Some(oldest) = self.unacked.pop_front() {
            self.shared.decide(self.lane, &oldest.batch, Ok(delivered));
        }
    }

    /// Starts the requests that are not under way, in order. False when some must wait until others have ended.
    async fn send(&mut self) -> Result<bool, ClientError> {
        let Some(connection) = &self.connection else { return Ok(false) };
        for (at, unacked) in self.unacked.iter_mut().enumerate() {
            if unacked.pending.is_some() {
                continue;
            }
            // Whoever holds a permit must not wait for another one: all lanes might.
            let permit = match at {
                0 => self.shared.requests.acquire().await.map_err(|_| ClientError::Closed)?,
                _ => match self.shared.requests.try_acquire() {
                    Ok(permit) => permit,
                    Err(_) => return Ok(false),
                },
            };
            match self.shared.start(connection, unacked.payload.clone()).await {
                Ok(pending) => unacked.pending = Some((pending, permit)),
                Err(error) if at == 0 => return Err(error),
                // The oldest one learns what is wrong with the connection; what is wrong with this one comes up in its turn.
                Err(_) => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Gets the oldest batch stored or given up, alone. `failure` is what came of it so far.
    async fn settle(&mut self, failure: Option<ClientError>) {
        self.connection = None;
        for (at, unacked) in self.unacked.iter_mut().enumerate() {
            let known = at == 0 && failure.as_ref().is_some_and(is_refusal);
            unacked.may_be_stored |= unacked.pending.take().is_some() && !known;
        }
        match self.settle_oldest(failure).await {
            Ok(delivered) => self.acked(delivered),
            // If it leaves a hole in the sequences, the next batch is told so; until then that one may be stored under its
            // old numbers.
            Err(error) => {
                if let Some(oldest) = self.unacked.pop_front() {
                    self.shared.decide(self.lane, &oldest.batch, Err(error));
                }
            }
        }
    }

    async fn settle_oldest(&mut self, mut failure: Option<ClientError>) -> Result<Delivered, ClientError> {
        let opened = self.unacked.front().map(|oldest| oldest.batch.opened).ok_or(ClientError::Closed)?;
        let mut backoff = Backoff::until(opened + self.shared.config.retry_for);
        loop {
            let error = match failure.take() {
                Some(error) => error,
                None => match self.attempt().await {
                    Ok(delivered) => return Ok(delivered),
                    Err(error) => error,
                },
            };
            let refresh = error.wants_refresh();
            match error.code() {
                // It is not stored, and what is missing was acked: the broker has lost it with its memory.
                Some(ErrorCode::OUT_OF_SEQUENCE) => {
                    backoff.wait_mended(error).await?;
                    self.renumber();
                }
                Some(ErrorCode::PRODUCER_UNKNOWN)
                    if !self.unacked.front().is_some_and(|oldest| oldest.may_be_stored) =>
                {
                    backoff.wait_mended(error).await?;
                    self.renumber();
                }
                Some(ErrorCode::PRODUCER_FENCED) => {
                    self.fenced = Some(error.clone());
                    return Err(error);
                }
                _ => backoff.wait(error).await?,
            }
            self.shared.note_retry(refresh).await;
        }
    }

    /// Sends the oldest batch alone and waits for the answer.
    async fn attempt(&mut self) -> Result<Delivered, ClientError> {
        let oldest = self.unacked.front_mut().ok_or(ClientError::Closed)?;
        let connection = self.shared.connection_to(self.lane.partition()).await?;
        let result = self.shared.request(&connection, oldest.payload.clone(), self.lane.partition()).await;
        match &result {
            Ok(_) => self.connection = Some(connection),
            Err(error) => oldest.may_be_stored |= !is_refusal(error),
        }
        result
    }

    /// Numbers all that is not acked anew, in the next epoch.
    fn renumber(&mut self) {
        self.numbering.raise();
        for unacked in &mut self.unacked {
            unacked.payload = self.numbering.number(&unacked.batch.bytes);
        }
        self.shared.note_identity(self.numbering.identity());
    }
}

/// Whether the broker has said that this attempt stored nothing.
fn is_refusal(error: &ClientError) -> bool {
    matches!(error, ClientError::Server { code, .. } if !code.leaves_fate_open())
}
