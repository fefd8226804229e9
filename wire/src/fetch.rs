//! Fetch: read batches of several partitions, within a byte budget, waiting for new ones if asked to.

use ringmain_core::ids::{Offset, PartitionKey};
use ringmain_core::limits::{FETCH_PARTITIONS_MAX, FETCH_TAGS_MAX, TAG_BYTES_MAX};

use crate::error_code::ErrorCode;
use crate::frame::FrameEncoder;
use crate::message::{
    Builder, BuiltBody, DecodeError, Text, build_text, build_texts, decode_text, decode_texts, within,
};
use crate::schema;

/// What a consumer may see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Visibility {
    /// Up to the log end: also what a power cut may still take.
    #[default]
    LogEnd,
    /// Only up to the synced end.
    SyncedEnd,
}

/// One partition of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchPartition {
    /// Which partition.
    pub key: PartitionKey,
    /// First offset wanted.
    pub offset: Offset,
    /// Byte budget of this partition; 0 = only the request's.
    pub bytes_max: u32,
}

/// A fetch request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchRequest {
    /// What to read, 1 to 256.
    pub partitions: Vec<FetchPartition>,
    /// Byte budget of the answer. One batch is sent even when it is larger.
    pub bytes_max: u32,
    /// Answer when so much is there …
    pub bytes_min: u32,
    /// … or when so long has passed.
    pub wait_ms_max: u32,
    /// What to show.
    pub visibility: Visibility,
    /// Bit n: the client takes stored runs of codec n.
    pub codecs: u32,
    /// Exact tag filter; empty = all records.
    pub tags: Vec<String>,
}

/// Why offsets are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapReason {
    /// Memory was lost before it was flushed: the epoch rose.
    LostMemory,
    /// A corrupt run was skipped.
    Corrupt,
}

/// Offsets in `from..to` will never be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// First missing.
    pub from: Offset,
    /// One past the last missing.
    pub to: Offset,
    /// Why.
    pub reason: GapReason,
}

/// What one partition of a fetch gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchedPartitionOutcome {
    /// Which partition.
    pub key: PartitionKey,
    /// `OK`, or why nothing came.
    pub code: ErrorCode,
    /// First offset kept.
    pub log_start: Offset,
    /// One past the last offset given.
    pub log_end: Offset,
    /// End of what completed writes cover.
    pub flushed_end: Offset,
    /// End of what fdatasyncs cover.
    pub synced_end: Offset,
    /// Ask for this offset next, also when nothing came.
    pub next_offset: Offset,
    /// This partition's share of the payload.
    pub payload_bytes: u32,
    /// Offsets that were passed over because they are lost.
    pub gap: Option<Gap>,
    /// On error: wait at least so long; 0 = no advice.
    pub retry_after_ms: u32,
    /// On error: what exactly; empty = see the code's sentence.
    pub message: Text,
}

impl FetchRequest {
    pub(crate) fn decode(body: &schema::FetchRequest<'_>) -> Result<Self, DecodeError> {
        let partitions = body.partitions();
        within("partitions", partitions.len(), FETCH_PARTITIONS_MAX)?;
        if partitions.is_empty() {
            return Err(DecodeError::Missing("partitions"));
        }
        let visibility = match body.visibility() {
            schema::Visibility::LogEnd => Visibility::LogEnd,
            schema::Visibility::SyncedEnd => Visibility::SyncedEnd,
            schema::Visibility(value) => {
                return Err(DecodeError::Value { field: "visibility", value: u64::from(value) });
            }
        };
        let partitions = partitions.iter().map(|partition| FetchPartition {
            key: PartitionKey::new(partition.topic_id(), partition.partition()),
            offset: Offset(partition.offset()),
            bytes_max: partition.max_bytes(),
        });
        Ok(Self {
            partitions: partitions.collect(),
            bytes_max: body.max_bytes(),
            bytes_min: body.min_bytes(),
            wait_ms_max: body.max_wait_ms(),
            visibility,
            codecs: body.codecs(),
            tags: decode_texts("tags", body.tags(), FETCH_TAGS_MAX, TAG_BYTES_MAX)?,
        })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let partitions: Vec<_> = self
            .partitions
            .iter()
            .map(|partition| {
                let args = schema::FetchPartitionArgs {
                    topic_id: partition.key.topic.0,
                    partition: partition.key.partition,
                    offset: partition.offset.0,
                    max_bytes: partition.bytes_max,
                };
                schema::FetchPartition::create(builder, &args)
            })
            .collect();
        let partitions = builder.create_vector(&partitions);
        let tags = build_texts(builder, &self.tags);
        let args = schema::FetchRequestArgs {
            partitions: Some(partitions),
            max_bytes: self.bytes_max,
            min_bytes: self.bytes_min,
            max_wait_ms: self.wait_ms_max,
            visibility: match self.visibility {
                Visibility::LogEnd => schema::Visibility::LogEnd,
                Visibility::SyncedEnd => schema::Visibility::SyncedEnd,
            },
            codecs: self.codecs,
            tags,
        };
        (schema::Body::FetchRequest, schema::FetchRequest::create(builder, &args).as_union_value())
    }
}

impl FetchedPartitionOutcome {
    pub(crate) fn decode(partition: &schema::FetchedPartition<'_>) -> Result<Self, DecodeError> {
        let gap = partition.gap().map(|gap| {
            let reason = match gap.reason() {
                schema::GapReason::LostMemory => GapReason::LostMemory,
                schema::GapReason::Corrupt => GapReason::Corrupt,
                schema::GapReason(value) => {
                    return Err(DecodeError::Value { field: "gap.reason", value: u64::from(value) });
                }
            };
            Ok(Gap { from: Offset(gap.from_offset()), to: Offset(gap.to_offset()), reason })
        });
        Ok(Self {
            key: PartitionKey::new(partition.topic_id(), partition.partition()),
            code: ErrorCode(partition.code()),
            log_start: Offset(partition.log_start()),
            log_end: Offset(partition.log_end()),
            flushed_end: Offset(partition.flushed_end()),
            synced_end: Offset(partition.synced_end()),
            next_offset: Offset(partition.next_offset()),
            payload_bytes: partition.payload_bytes(),
            gap: gap.transpose()?,
            retry_after_ms: partition.retry_after_ms(),
            message: decode_text(partition.message()),
        })
    }
}

/// Appends the head of the frame that answers a fetch. The caller sends the partitions' batches, `payload_bytes` in all,
/// right behind it, in the order of `outcomes`.
pub fn encode_fetch_response(
    encoder: &mut FrameEncoder,
    correlation_id: u64,
    outcomes: &[FetchedPartitionOutcome],
    payload_bytes: usize,
    out: &mut Vec<u8>,
) {
    debug_assert_eq!(payload_bytes, outcomes.iter().map(|outcome| outcome.payload_bytes as usize).sum::<usize>());
    encoder.head(correlation_id, payload_bytes, out, |builder| {
        let partitions = match outcomes {
            // The common case takes no memory.
            [outcome] => {
                let partition = build_outcome(builder, outcome);
                builder.create_vector(&[partition])
            }
            _ => {
                let partitions: Vec<_> = outcomes.iter().map(|outcome| build_outcome(builder, outcome)).collect();
                builder.create_vector(&partitions)
            }
        };
        let args = schema::FetchResponseArgs { partitions: Some(partitions) };
        (schema::Body::FetchResponse, schema::FetchResponse::create(builder, &args).as_union_value())
    });
}

fn build_outcome(
    builder: &mut Builder,
    outcome: &FetchedPartitionOutcome,
) -> flatbuffers::WIPOffset<schema::FetchedPartition<'static>> {
    let message = build_text(builder, &outcome.message);
    let gap = outcome.gap.map(|gap| {
        let reason = match gap.reason {
            GapReason::LostMemory => schema::GapReason::LostMemory,
            GapReason::Corrupt => schema::GapReason::Corrupt,
        };
        schema::Gap::create(builder, &schema::GapArgs { from_offset: gap.from.0, to_offset: gap.to.0, reason })
    });
    let args = schema::FetchedPartitionArgs {
        topic_id: outcome.key.topic.0,
        partition: outcome.key.partition,
        code: outcome.code.0,
        log_start: outcome.log_start.0,
        log_end: outcome.log_end.0,
        flushed_end: outcome.flushed_end.0,
        synced_end: outcome.synced_end.0,
        next_offset: outcome.next_offset.0,
        payload_bytes: outcome.payload_bytes,
        gap,
        retry_after_ms: outcome.retry_after_ms,
        message,
    };
    schema::FetchedPartition::create(builder, &args)
}
