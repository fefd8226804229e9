//! Wiring: all rings of the mesh are made at once, then each shard gets its ends.

use std::sync::Arc;

use ringmain_core::limits::{MESH_BYTES_MAX, MESH_CREDITS};
use rtrb::{Consumer, Producer, RingBuffer};

use crate::doorbell::Doorbell;

/// What each ordered pair of shards may have under way.
#[derive(Clone, Copy, Debug)]
pub struct MeshLimits {
    /// Requests without their reply.
    pub credits: usize,
    /// Bytes of those, each request counted with the reply it may get.
    pub bytes: usize,
}

impl Default for MeshLimits {
    fn default() -> Self {
        Self { credits: MESH_CREDITS, bytes: MESH_BYTES_MAX }
    }
}

/// A request or reply in its ring.
pub(super) struct Envelope<M> {
    /// The caller's slot that waits for the reply.
    pub(super) slot: u32,
    pub(super) body: M,
}

/// What one shard shares with one other.
pub(super) struct Pair<Q, R> {
    pub(super) requests_out: Producer<Envelope<Q>>,
    pub(super) requests_in: Consumer<Envelope<Q>>,
    pub(super) replies_out: Producer<Envelope<Option<R>>>,
    pub(super) replies_in: Consumer<Envelope<Option<R>>>,
}

/// One shard's end of the mesh, on its way to the shard.
pub struct MeshEnd<Q, R> {
    pub(super) shard: u16,
    pub(super) limits: MeshLimits,
    pub(super) doorbells: Arc<[Doorbell]>,
    /// By shard; `None` at the own place.
    pub(super) pairs: Vec<Option<Pair<Q, R>>>,
}

/// Makes the mesh of `shards` shards: one end for each, by index. `Q` is a request, `R` its reply.
///
/// # Panics
/// When there are no shards or no credits.
#[must_use]
pub fn mesh<Q, R>(shards: u16, limits: MeshLimits) -> Vec<MeshEnd<Q, R>> {
    assert!(shards > 0 && limits.credits > 0 && limits.bytes > 0);
    let doorbells: Arc<[Doorbell]> = (0..shards).map(|_| Doorbell::default()).collect();
    let mut ends: Vec<MeshEnd<Q, R>> = (0..shards)
        .map(|shard| MeshEnd { shard, limits, doorbells: Arc::clone(&doorbells), pairs: Vec::new() })
        .collect();
    // Pairs are pushed in order of the other shard, at both ends.
    for a in 0..usize::from(shards) {
        for b in 0..a {
            let (ab_requests_out, ab_requests_in) = RingBuffer::new(limits.credits);
            let (ba_requests_out, ba_requests_in) = RingBuffer::new(limits.credits);
            let (ab_replies_out, ab_replies_in) = RingBuffer::new(limits.credits);
            let (ba_replies_out, ba_replies_in) = RingBuffer::new(limits.credits);
            ends[a].put(
                b,
                Pair {
                    requests_out: ab_requests_out,
                    requests_in: ba_requests_in,
                    replies_out: ab_replies_out,
                    replies_in: ba_replies_in,
                },
            );
            ends[b].put(
                a,
                Pair {
                    requests_out: ba_requests_out,
                    requests_in: ab_requests_in,
                    replies_out: ba_replies_out,
                    replies_in: ab_replies_in,
                },
            );
        }
    }
    for end in &mut ends {
        end.pairs.resize_with(usize::from(shards), || None);
    }
    ends
}

impl<Q, R> MeshEnd<Q, R> {
    fn put(&mut self, other: usize, pair: Pair<Q, R>) {
        if self.pairs.len() <= other {
            self.pairs.resize_with(other + 1, || None);
        }
        self.pairs[other] = Some(pair);
    }
}
