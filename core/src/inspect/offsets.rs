//! How the runs of each partition join, over a whole log.

use std::collections::HashMap;

use crate::extent::{ExtentKind, RunEntry};
use crate::ids::{Epoch, Offset, PartitionKey};

/// What is to be said about a run's offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffsetFinding {
    /// It begins below the end of the partition: offsets stand in the log twice.
    Repeats {
        /// Where it should begin.
        expected: Offset,
    },
    /// Records before it are missing, and nothing in the log says why.
    Missing {
        /// First of them.
        from: Offset,
    },
    /// Offsets before it were given up: memory was lost, or they are not kept any more, or damage was met in between.
    Gap {
        /// First of them.
        from: Offset,
    },
}

/// Where a partition is.
#[derive(Clone, Copy, Debug)]
struct End {
    next: Offset,
    epoch: Epoch,
    /// How often something had been lost when its last run came.
    losses: u64,
}

/// The ends of all partitions so far: about 50 bytes for each.
#[derive(Clone, Debug, Default)]
pub struct OffsetCheck {
    ends: HashMap<PartitionKey, End>,
    losses: u64,
}

impl OffsetCheck {
    /// Part of the log is damaged or not there: runs of any partition may have stood in it.
    pub fn lost(&mut self) {
        self.losses += 1;
    }

    /// The next run of an extent; `log_start` is where the partition's log starts now.
    pub fn run(&mut self, kind: ExtentKind, run: &RunEntry, log_start: Offset) -> Option<OffsetFinding> {
        // Copies of older runs stand where the log was when they were copied.
        if kind == ExtentKind::Moved {
            return None;
        }
        let end = End { next: run.next_offset, epoch: run.epoch, losses: self.losses };
        let before = self.ends.insert(run.key, end)?;
        if run.base_offset == before.next {
            return None;
        }
        if run.base_offset < before.next {
            // The larger end stays: what repeats must not make what follows look whole.
            self.ends.insert(run.key, End { next: before.next.max(run.next_offset), ..end });
            return Some(OffsetFinding::Repeats { expected: before.next });
        }
        let explained = run.epoch > before.epoch || self.losses > before.losses || run.base_offset <= log_start;
        let from = before.next;
        Some(if explained { OffsetFinding::Gap { from } } else { OffsetFinding::Missing { from } })
    }
}
