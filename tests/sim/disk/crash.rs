//! What a crash leaves of the files.

use std::collections::BTreeMap;

use ringmain_core::ids::SegmentSequence;

use super::{Change, Fuse, SECTOR, SimDisk, apply, covers};
use crate::rng::Rng;

/// What kills the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Crash {
    /// The process alone.
    Kill,
    /// The process, and somebody deletes its arena.
    ArenaLost,
    /// Power: memory and whatever is not durable.
    Power,
}

impl SimDisk {
    /// The process is gone. Nothing is in flight afterwards.
    pub fn crash(&mut self, crash: Crash, rng: &mut Rng) {
        self.fuse = Fuse::default();
        self.failed = false;
        if crash == Crash::Power {
            self.cut_power(rng);
        } else {
            for file in self.files.values_mut() {
                for (_, change) in &mut file.changes {
                    if let Change::Write { place, bytes, completed } = change
                        && !*completed
                        && !rng.once_in(3)
                    {
                        *completed = true;
                        apply(&mut file.content, *place, bytes);
                    }
                }
                file.changes.retain(|(_, change)| !matches!(change, Change::Write { completed: false, .. }));
            }
        }
        let live: Vec<u64> = self.names.values().chain(self.durable_names.values()).copied().collect();
        self.files.retain(|id, _| live.contains(id));
        self.listed = self.names.keys().copied().collect();
    }

    fn cut_power(&mut self, rng: &mut Rng) {
        // How forgetful the device is: nothing, all, each write, each sector; or all but one write.
        let mood = rng.below(5);
        for file in self.files.values_mut() {
            let spared = rng.index(file.changes.len().max(1));
            for (at, (_, change)) in file.changes.drain(..).enumerate() {
                let survives = match mood {
                    0 => true,
                    1 => false,
                    2 | 3 => rng.once_in(2),
                    _ => at != spared,
                };
                match change {
                    Change::SetLen(bytes) if survives => file.durable.resize(bytes, 0),
                    Change::Write { place, bytes, .. } if mood == 3 => {
                        for (sector, piece) in bytes.chunks(SECTOR).enumerate() {
                            if rng.once_in(2) {
                                apply(&mut file.durable, place + sector * SECTOR, piece);
                            }
                        }
                    }
                    Change::Write { place, bytes, .. } if survives => {
                        apply(&mut file.durable, place, &bytes);
                        file.unreadable.retain(|block| !covers(place, &bytes, *block));
                    }
                    _ => {}
                }
            }
            file.content = file.durable.clone();
        }
        self.names = self.names_left(rng);
        self.durable_names = self.names.clone();
    }

    fn names_left(&self, rng: &mut Rng) -> BTreeMap<SegmentSequence, u64> {
        let mut names = self.durable_names.clone();
        for (segment, id) in &self.names {
            if rng.once_in(2) {
                names.insert(*segment, *id);
            }
        }
        for segment in self.durable_names.keys() {
            if !self.names.contains_key(segment) && rng.once_in(2) {
                names.remove(segment);
            }
        }
        names
    }
}
