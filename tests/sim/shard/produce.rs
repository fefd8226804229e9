//! Produces of a simulated shard, and what its extents say of their producers.

use ringmain_core::acks::WaitToken;
use ringmain_core::block::BlockMemory;
use ringmain_core::dedup::RunProducers;
use ringmain_core::flush::FlushPlan;
use ringmain_core::ids::{Durability, Epoch, PartitionKey};
use ringmain_core::store::{AppendError, Appended};

use super::{Shard, World};
use crate::ledger::Seen;

impl Shard {
    /// A produce. False when memory is full.
    pub fn produce(&mut self, world: &mut World, key: PartitionKey, level: Durability) -> bool {
        let records = 1 + world.rng.below(20) as u32;
        let body = if world.rng.once_in(12) { world.rng.below(9000) } else { world.rng.below(600) } as usize;
        let (id, header, bytes) = world.ledger.make_batch(key, records, body);
        let appended = match self.store.append(&*self.arena, &header, &bytes, self.now_ms, 0) {
            Ok(appended) => appended,
            Err(AppendError::Busy { .. }) => return false,
            Err(AppendError::Sequence(error)) => {
                let may_be = world.damaged || self.store.epoch() > Epoch(0);
                assert!(may_be, "{key}: nothing was lost, yet {error}");
                world.ledger.renumber(&header);
                return true;
            }
            Err(error) => panic!("append: {error}"),
        };
        assert!(!appended.duplicate, "{key}: a new batch counts as stored");
        world.ledger.produced(&header, id);
        if header.producer_id != 0 {
            let again = self.store.append(&*self.arena, &header, &bytes, self.now_ms, 0);
            assert_eq!(again, Ok(Appended { duplicate: true, ..appended }), "{key}");
        }
        let seen = Seen { id, base: appended.base_offset, next: appended.next_offset };
        world.ledger.appended(key, seen);
        world.note(format!("append {key} {}..{} {level}", seen.base, seen.next));
        if level > Durability::Memory && !self.tail.failed() {
            let token = WaitToken(self.next_token);
            self.next_token += 1;
            self.acks.wait(key, seen.next, level, token);
            self.waits.insert(token, (key, level, seen.next));
        }
        true
    }

    /// What the directory says about idempotent producers.
    pub(super) fn read_producers(&self, plan: &mut FlushPlan) {
        let mut gathered = RunProducers::default();
        for (number, run) in (0..).zip(&plan.runs) {
            for span in run.spans.iter().filter(|span| span.idempotent > 0) {
                let bytes = self.arena.read(span.block, span.at as usize, span.bytes as usize);
                gathered.batches(number, bytes);
            }
            gathered.end_run();
        }
        plan.producers = gathered.into_entries();
    }
}
