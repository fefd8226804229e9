//! What the directory of an extent says about producers: of each run the newest batches of each producer.

use std::collections::HashMap;

use super::ProducerBatch;
use crate::batch;
use crate::extent::ProducerEntry;
use crate::limits::PRODUCER_WINDOW_BATCHES;

/// Gathers the entries of one extent, run by run.
#[derive(Debug, Default)]
pub struct RunProducers {
    entries: Vec<ProducerEntry>,
    /// Where the entries of the present run begin.
    run_from: usize,
}

impl RunProducers {
    /// Takes stamped batches of run number `run` that stand one behind the other in `bytes`, in their order.
    pub fn batches(&mut self, run: u32, bytes: &[u8]) {
        // A batch that is not whole is found by its readers; the ones in front of it count.
        for (header, _) in batch::batches(bytes).map_while(Result::ok) {
            if let Some(batch) = ProducerBatch::of(&header, header.base_offset, header.leader_epoch) {
                self.entries.push(ProducerEntry { run, batch });
            }
        }
    }

    /// The run has no more batches: of each producer only what fits a window stays.
    pub fn end_run(&mut self) {
        let entries = &mut self.entries[self.run_from..];
        let mut seen: HashMap<u64, (u16, usize)> = HashMap::new();
        let mut kept = entries.len();
        for at in (0..entries.len()).rev() {
            let batch = entries[at].batch;
            let (epoch, count) = seen.entry(batch.producer_id).or_insert((batch.producer_epoch, 0));
            if batch.producer_epoch == *epoch && *count < PRODUCER_WINDOW_BATCHES {
                *count += 1;
                kept -= 1;
                entries.swap(kept, at);
            }
        }
        self.entries.drain(self.run_from..self.run_from + kept);
        self.run_from = self.entries.len();
    }

    /// The entries, sorted by run and offset.
    #[must_use]
    pub fn into_entries(self) -> Vec<ProducerEntry> {
        self.entries
    }
}
