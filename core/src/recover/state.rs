//! What the accepted extents say about the partitions.

use std::collections::BTreeMap;

use super::RecoveredPartition;
use crate::checkpoint::Checkpoint;
use crate::dedup::{PRODUCERS_SECTION, Producers};
use crate::extent::Directory;
use crate::ids::{Epoch, Offset, PartitionKey};

/// Ends of all partitions, as far as the log has been read.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    pub(super) epoch: Epoch,
    /// The last extent was a clean checkpoint.
    pub(super) clean: bool,
    /// Damage since the last checkpoint may hide records.
    pub(super) uncertain: bool,
    pub(super) partitions: BTreeMap<PartitionKey, RecoveredPartition>,
    pub(super) producers: Producers,
}

impl State {
    /// Takes a checkpoint. Ends never fall: a checkpoint may have been made before extents in front of it completed.
    /// A partition that it does not list stays: whether it is gone is not for the log to say.
    pub(super) fn checkpoint(&mut self, checkpoint: &Checkpoint) {
        for listed in &checkpoint.partitions {
            let partition = self.partitions.entry(listed.key).or_default();
            partition.log_start = partition.log_start.max(listed.log_start);
            partition.raise_end(listed.next_offset, listed.last_epoch);
        }
        self.producers = producers_of(checkpoint);
        self.epoch = self.epoch.max(checkpoint.epoch);
        self.clean = checkpoint.clean;
        self.uncertain = false;
    }

    /// Takes the runs of an extent.
    pub(super) fn extent(&mut self, directory: &Directory) {
        directory.runs.iter().for_each(|run| self.run(run.key, run.next_offset, run.epoch));
        self.produced(directory);
    }

    /// Takes what an extent says about producers.
    pub(super) fn produced(&mut self, directory: &Directory) {
        directory.produced().for_each(|(key, batch)| self.producers.stored(key, batch));
    }

    /// Takes a run.
    pub(super) fn run(&mut self, key: PartitionKey, next_offset: Offset, epoch: Epoch) {
        self.partitions.entry(key).or_default().raise_end(next_offset, epoch);
        self.epoch = self.epoch.max(epoch);
        self.clean = false;
    }

    /// Something that was synced is lost.
    pub(super) fn lost(&mut self) {
        self.producers.set_forgotten();
        self.uncertain = true;
        self.clean = false;
    }
}

/// The windows that a checkpoint has: they say all that was flushed before it. What can't be read is forgotten.
fn producers_of(checkpoint: &Checkpoint) -> Producers {
    let Some(section) = checkpoint.sections.iter().find(|section| section.kind == PRODUCERS_SECTION) else {
        return Producers::default();
    };
    Producers::of_section(&section.bytes).unwrap_or_else(|_| {
        let mut producers = Producers::default();
        producers.set_forgotten();
        producers
    })
}

impl RecoveredPartition {
    fn raise_end(&mut self, end: Offset, epoch: Epoch) {
        if end >= self.end {
            self.last_epoch = if end > self.end { epoch } else { self.last_epoch.max(epoch) };
            self.end = end;
        }
    }
}
