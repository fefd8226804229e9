//! What shards ask each other: requests that came on the wrong shard, one hop to the owner.

use bytes::Bytes;
use ringmain_core::batch::BatchHeader;
use ringmain_core::ids::{Durability, Offset, PartitionKey, TopicId};
use ringmain_core::limits::FETCH_BYTES_MAX;
use ringmain_wire::fetch::{FetchRequest, FetchedPartitionOutcome};
use ringmain_wire::offsets::PartitionOffsets;
use ringmain_wire::produce::ProduceOutcome;

use crate::mesh::{MeshPort, Ticket};

/// A request of another shard. Batches are copies: blocks are never shared across threads.
#[derive(Debug)]
pub(crate) enum MeshRequest {
    /// Append these checked batches, each at its level.
    Produce { batches: Vec<(BatchHeader, Bytes, Durability)>, timeout_ms: u32 },
    /// Fetch what is there now: a fetch that waited would keep its credit and bytes from others.
    Fetch(FetchRequest),
    /// Answer when one of these partitions no longer has the log end and synced end that the asker has seen.
    Watch { seen: Vec<(PartitionKey, Offset, Offset)>, wait_ms: u32 },
    /// Ends of partitions.
    Offsets { topic: TopicId, partitions: Vec<u32> },
}

/// The owner's answer.
#[derive(Debug)]
pub(crate) enum MeshReply {
    /// One outcome for each batch.
    Produce(Vec<ProduceOutcome>),
    /// The batches, copied.
    Fetch { outcomes: Vec<FetchedPartitionOutcome>, payload: Bytes },
    /// Something has changed, or the time is over: fetch again.
    Looked,
    /// The ends, in the order asked.
    Offsets(Vec<PartitionOffsets>),
}

impl MeshRequest {
    /// Bytes that request and reply may hold while they are on their way.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Produce { batches, .. } => batches.iter().map(|(_, bytes, _)| bytes.len()).sum(),
            Self::Fetch(fetch) => (fetch.bytes_max as usize).min(FETCH_BYTES_MAX),
            Self::Watch { .. } | Self::Offsets { .. } => 0,
        }
    }
}

/// A shard's end of the mesh.
pub(crate) type ShardMesh = MeshPort<MeshRequest, MeshReply>;
/// The duty to answer one hop.
pub(crate) type HopTicket = Ticket<MeshRequest, MeshReply>;
