//! What shards ask each other: requests that came on the wrong shard, one hop to the owner.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use bytes::Bytes;
use ringmain_core::batch::BatchHeader;
use ringmain_core::ids::{Durability, TopicId};
use ringmain_wire::fetch::{FetchRequest, FetchedPartitionOutcome};
use ringmain_wire::offsets::PartitionOffsets;
use ringmain_wire::produce::ProduceOutcome;

use crate::signal::Signal;

/// A request of another shard. Batches are copies: blocks are never shared across threads.
#[derive(Debug)]
pub(crate) enum MeshRequest {
    /// Append these checked batches, each at its level.
    Produce { request: u64, batches: Vec<(BatchHeader, Bytes, Durability)>, timeout_ms: u32 },
    /// Fetch, with waiting.
    Fetch { request: u64, fetch: FetchRequest },
    /// Ends of partitions.
    Offsets { request: u64, topic: TopicId, partitions: Vec<u32> },
}

/// The owner's answer.
#[derive(Debug)]
pub(crate) enum MeshReply {
    /// One outcome for each batch.
    Produce { request: u64, outcomes: Vec<ProduceOutcome> },
    /// The batches, copied.
    Fetch { request: u64, outcomes: Vec<FetchedPartitionOutcome>, payload: Bytes },
    /// The ends, in the order asked.
    Offsets { request: u64, partitions: Vec<PartitionOffsets> },
}

impl MeshRequest {
    /// Bytes that the request holds while it is on its way.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Produce { batches, .. } => batches.iter().map(|(_, bytes, _)| bytes.len()).sum(),
            Self::Fetch { fetch, .. } => fetch.bytes_max as usize,
            Self::Offsets { .. } => 0,
        }
    }
}

/// Hops that a task of this shard waits for.
#[derive(Default)]
pub(crate) struct Hops {
    waiting: RefCell<HashMap<u64, Rc<HopSlot>>>,
    next: RefCell<u64>,
}

/// Where the answer of one hop arrives.
#[derive(Default)]
pub(crate) struct HopSlot {
    reply: RefCell<Option<MeshReply>>,
    arrived: Signal,
}

impl HopSlot {
    /// Waits for the answer.
    pub(crate) async fn take(&self) -> MeshReply {
        loop {
            if let Some(reply) = self.reply.borrow_mut().take() {
                return reply;
            }
            self.arrived.wait().await;
        }
    }
}

impl Hops {
    /// A number for a request and the slot of its answer.
    pub(crate) fn open(&self) -> (u64, Rc<HopSlot>) {
        let mut next = self.next.borrow_mut();
        *next += 1;
        let slot = Rc::new(HopSlot::default());
        self.waiting.borrow_mut().insert(*next, Rc::clone(&slot));
        (*next, slot)
    }

    /// Nobody waits for this answer any more.
    pub(crate) fn forget(&self, request: u64) {
        self.waiting.borrow_mut().remove(&request);
    }

    /// The answer is here.
    pub(crate) fn arrived(&self, request: u64, reply: MeshReply) {
        if let Some(slot) = self.waiting.borrow_mut().remove(&request) {
            *slot.reply.borrow_mut() = Some(reply);
            slot.arrived.raise();
        }
    }
}
