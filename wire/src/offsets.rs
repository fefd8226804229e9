//! Offsets: the ends of partitions, and what a power cut would take from them now.

use ringmain_core::ids::{Epoch, Offset, TopicId};
use ringmain_core::limits::TOPIC_PARTITIONS_MAX;

use crate::error_code::ErrorCode;
use crate::frame::FrameEncoder;
use crate::message::{Builder, BuiltBody, DecodeError, within};
use crate::schema;

/// An offsets request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffsetsRequest {
    /// Which topic.
    pub topic_id: TopicId,
    /// Which of its partitions; empty = all.
    pub partitions: Vec<u32>,
}

/// Ends of one partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionOffsets {
    /// Which partition.
    pub partition: u32,
    /// `OK`, or why the rest is zero.
    pub code: ErrorCode,
    /// First offset kept.
    pub log_start: Offset,
    /// One past the last offset given.
    pub log_end: Offset,
    /// End of what completed writes cover.
    pub flushed_end: Offset,
    /// End of what fdatasyncs cover.
    pub synced_end: Offset,
    /// Epoch of the owner.
    pub leader_epoch: Epoch,
    /// Bytes acked that a power cut would take now.
    pub unsynced_bytes: u64,
    /// For how long the oldest of them has been waiting.
    pub unsynced_ms: u32,
}

/// Ends of the partitions of a topic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// Which topic.
    pub topic_id: TopicId,
    /// The partitions asked for.
    pub partitions: Vec<PartitionOffsets>,
}

impl OffsetsRequest {
    pub(crate) fn decode(body: &schema::OffsetsRequest<'_>) -> Result<Self, DecodeError> {
        let partitions = body.partitions().unwrap_or_default();
        within("partitions", partitions.len(), TOPIC_PARTITIONS_MAX as usize)?;
        Ok(Self { topic_id: TopicId(body.topic_id()), partitions: partitions.iter().collect() })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let partitions = (!self.partitions.is_empty()).then(|| builder.create_vector(&self.partitions));
        let args = schema::OffsetsRequestArgs { topic_id: self.topic_id.0, partitions };
        (schema::Body::OffsetsRequest, schema::OffsetsRequest::create(builder, &args).as_union_value())
    }
}

impl Offsets {
    pub(crate) fn decode(body: &schema::OffsetsResponse<'_>) -> Self {
        let partitions = body.partitions().iter().map(|partition| PartitionOffsets {
            partition: partition.partition(),
            code: ErrorCode(partition.code()),
            log_start: Offset(partition.log_start()),
            log_end: Offset(partition.log_end()),
            flushed_end: Offset(partition.flushed_end()),
            synced_end: Offset(partition.synced_end()),
            leader_epoch: Epoch(partition.leader_epoch()),
            unsynced_bytes: partition.unsynced_bytes(),
            unsynced_ms: partition.unsynced_ms(),
        });
        Self { topic_id: TopicId(body.topic_id()), partitions: partitions.collect() }
    }
}

/// Appends the frame that answers an offsets request.
pub fn encode_offsets(encoder: &mut FrameEncoder, correlation_id: u64, offsets: &Offsets, out: &mut Vec<u8>) {
    encoder.head(correlation_id, 0, out, |builder| {
        let partitions: Vec<_> = offsets
            .partitions
            .iter()
            .map(|partition| {
                let args = schema::PartitionOffsetsArgs {
                    partition: partition.partition,
                    code: partition.code.0,
                    log_start: partition.log_start.0,
                    log_end: partition.log_end.0,
                    flushed_end: partition.flushed_end.0,
                    synced_end: partition.synced_end.0,
                    leader_epoch: partition.leader_epoch.0,
                    unsynced_bytes: partition.unsynced_bytes,
                    unsynced_ms: partition.unsynced_ms,
                };
                schema::PartitionOffsets::create(builder, &args)
            })
            .collect();
        let partitions = builder.create_vector(&partitions);
        let args = schema::OffsetsResponseArgs { topic_id: offsets.topic_id.0, partitions: Some(partitions) };
        (schema::Body::OffsetsResponse, schema::OffsetsResponse::create(builder, &args).as_union_value())
    });
}
