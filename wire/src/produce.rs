//! Produce: append the batches of the payload, each to the partition its header names.

use ringmain_core::batch::{BatchError, BatchHeader};
use ringmain_core::ids::{Durability, Epoch, Offset, PartitionKey};

use crate::error_code::ErrorCode;
use crate::frame::FrameEncoder;
use crate::message::{
    Builder, BuiltBody, DecodeError, Text, build_durability, build_text, decode_durability, decode_text,
};
use crate::schema;

/// A produce request; its batches are the frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProduceRequest {
    /// Level at which to ack; `None` = the topic's default.
    pub durability: Option<Durability>,
    /// The broker answers `TIMED_OUT` for what has not reached the level by then.
    pub timeout_ms: u32,
}

/// What became of one batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProduceOutcome {
    /// The batch's partition.
    pub key: PartitionKey,
    /// `OK`, or why it was not stored.
    pub code: ErrorCode,
    /// Level reached; at least the one asked for.
    pub level: Durability,
    /// Offset of the batch's first record.
    pub base_offset: Offset,
    /// Epoch it was appended in.
    pub leader_epoch: Epoch,
    /// The partition's flushed end when the ack was made.
    pub flushed_end: Offset,
    /// The partition's synced end when the ack was made.
    pub synced_end: Offset,
    /// On error: wait at least so long; 0 = no advice.
    pub retry_after_ms: u32,
    /// On error: what exactly; empty = see the code's sentence.
    pub message: Text,
    /// The batch was stored by an earlier request; offset and epoch are of then.
    pub duplicate: bool,
    /// With a code of idempotent producers: the sequence that is next.
    pub next_sequence: u32,
    /// With a code of idempotent producers: the producer's epoch in this partition.
    pub producer_epoch: u16,
}

impl ProduceRequest {
    pub(crate) fn decode(body: &schema::ProduceRequest<'_>) -> Result<Self, DecodeError> {
        let durability = match body.topic_default() {
            true => None,
            false => Some(decode_durability("durability", body.durability())?),
        };
        Ok(Self { durability, timeout_ms: body.timeout_ms() })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let args = schema::ProduceRequestArgs {
            durability: build_durability(self.durability.unwrap_or_default()),
            timeout_ms: self.timeout_ms,
            topic_default: self.durability.is_none(),
        };
        (schema::Body::ProduceRequest, schema::ProduceRequest::create(builder, &args).as_union_value())
    }
}

impl ProduceOutcome {
    pub(crate) fn decode(result: &schema::ProduceResult<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            key: PartitionKey::new(result.topic_id(), result.partition()),
            code: ErrorCode(result.code()),
            level: decode_durability("level", result.level())?,
            base_offset: Offset(result.base_offset()),
            leader_epoch: Epoch(result.leader_epoch()),
            flushed_end: Offset(result.flushed_end()),
            synced_end: Offset(result.synced_end()),
            retry_after_ms: result.retry_after_ms(),
            message: decode_text(result.message()),
            duplicate: result.duplicate(),
            next_sequence: result.next_sequence(),
            producer_epoch: result.producer_epoch(),
        })
    }
}

/// Appends the frame that answers a produce, one outcome for each batch in the request's order.
pub fn encode_produce_response(
    encoder: &mut FrameEncoder,
    correlation_id: u64,
    outcomes: &[ProduceOutcome],
    out: &mut Vec<u8>,
) {
    encoder.head(correlation_id, 0, out, |builder| {
        let results = match outcomes {
            // The common case takes no memory.
            [outcome] => {
                let result = build_outcome(builder, outcome);
                builder.create_vector(&[result])
            }
            _ => {
                let results: Vec<_> = outcomes.iter().map(|outcome| build_outcome(builder, outcome)).collect();
                builder.create_vector(&results)
            }
        };
        let args = schema::ProduceResponseArgs { results: Some(results) };
        (schema::Body::ProduceResponse, schema::ProduceResponse::create(builder, &args).as_union_value())
    });
}

fn build_outcome(
    builder: &mut Builder,
    outcome: &ProduceOutcome,
) -> flatbuffers::WIPOffset<schema::ProduceResult<'static>> {
    let message = build_text(builder, &outcome.message);
    let args = schema::ProduceResultArgs {
        topic_id: outcome.key.topic.0,
        partition: outcome.key.partition,
        code: outcome.code.0,
        level: build_durability(outcome.level),
        base_offset: outcome.base_offset.0,
        leader_epoch: outcome.leader_epoch.0,
        flushed_end: outcome.flushed_end.0,
        synced_end: outcome.synced_end.0,
        retry_after_ms: outcome.retry_after_ms,
        message,
        duplicate: outcome.duplicate,
        next_sequence: outcome.next_sequence,
        producer_epoch: outcome.producer_epoch,
    };
    schema::ProduceResult::create(builder, &args)
}

/// Walks the batches of a produce payload: bounds of each header are checked, CRC and structure are not. Ends at the
/// first error, which it yields: where the next batch starts is not known then.
pub fn produced_batches(payload: &[u8]) -> impl Iterator<Item = Result<(BatchHeader, &[u8]), BatchError>> {
    let mut rest = payload;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        match BatchHeader::parse(rest) {
            Ok(header) => {
                let (batch, behind) = rest.split_at(header.batch_bytes as usize);
                rest = behind;
                Some(Ok((header, batch)))
            }
            Err(error) => {
                rest = &[];
                Some(Err(error))
            }
        }
    })
}
