//! Damage at rest: bytes that change by themselves, and blocks that can't be read any more.

use std::ops::Range;

use ringmain_core::ids::SegmentSequence;

use super::{BLOCK, Change, SECTOR, SimDisk};

/// What happens to the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamageKind {
    /// One bit is another.
    Flip,
    /// A sector holds something else.
    Sector,
    /// A block gives EIO.
    Unreadable,
}

/// Bytes of a file that are not what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    pub segment: SegmentSequence,
    pub file: u64,
    pub range: Range<usize>,
}

impl SimDisk {
    /// Spoils what stands at `place`. None where there is nothing that a sync covers: what is not was acked for no more than
    /// the memory that it came from, and damage there after a kill takes both.
    pub fn damage(&mut self, segment: SegmentSequence, place: usize, kind: DamageKind) -> Option<Damage> {
        let unit = match kind {
            DamageKind::Flip => 1,
            DamageKind::Sector => SECTOR,
            DamageKind::Unreadable => BLOCK,
        };
        let range = place / unit * unit..(place / unit + 1) * unit;
        let file_id = self.file_id(segment)?;
        let file = self.file(segment);
        let bytes = file.content.get(range.clone())?;
        // What is still on its way to the disk would undo it.
        let is_pending = |change: &Change| match change {
            Change::Write { place, bytes, .. } => *place < range.end && range.start < place + bytes.len(),
            Change::SetLen(_) => false,
        };
        if file.durable.get(range.clone()) != Some(bytes) || file.changes.iter().any(|(_, change)| is_pending(change)) {
            return None;
        }
        match kind {
            DamageKind::Unreadable => {
                file.unreadable.insert(range.start / BLOCK);
            }
            DamageKind::Sector => {
                file.content[range.clone()].fill(0xdb);
                file.durable[range.clone()].fill(0xdb);
            }
            DamageKind::Flip => {
                let bit = 1 << (place % 8);
                file.content[place] ^= bit;
                file.durable[place] ^= bit;
            }
        }
        Some(Damage { segment, file: file_id, range })
    }

    /// Whether these bytes stand there.
    pub fn holds(&self, segment: SegmentSequence, place: usize, bytes: &[u8]) -> bool {
        let file = self.file_id(segment).map(|id| &self.files[&id]);
        file.and_then(|file| file.content.get(place..place + bytes.len())) == Some(bytes)
    }

    /// Size of a segment's file.
    pub fn len(&self, segment: SegmentSequence) -> usize {
        self.file_id(segment).map_or(0, |id| self.files[&id].content.len())
    }

    /// Segments that have a file, oldest first.
    pub fn listed(&self) -> &[SegmentSequence] {
        &self.listed
    }
}
