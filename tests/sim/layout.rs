//! What was written where, kept outside of the shard, and so what a given damage may cost.

use std::collections::BTreeMap;
use std::ops::Range;

use ringmain_core::extent::RunEntry;
use ringmain_core::ids::{Epoch, Offset, PartitionKey, Position, SegmentSequence};

use crate::disk::{Damage, SimDisk};

/// Records of one partition.
pub type Records = (PartitionKey, Range<Offset>);

/// An extent that was placed and not cut off since.
#[derive(Clone, Debug)]
struct Placed {
    /// Where in its file; up to the end of the directory it says what it is.
    place: usize,
    directory_end: usize,
    end: usize,
    /// Behind it, counted over all segments.
    position: Position,
    /// What its header says to be synced.
    synced: Position,
    header: Vec<u8>,
    epoch: Epoch,
    runs: Vec<(Records, Range<usize>)>,
}

/// All extents, by file.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    files: BTreeMap<u64, Vec<Placed>>,
}

/// What damage may cost at the next start.
#[derive(Clone, Debug, Default)]
pub struct Harm {
    pub lost: Vec<Records>,
    /// Ends of partitions may not be known any more, so memory counts as lost.
    pub arena: bool,
    /// Nothing may be left that says how the log goes on.
    pub refused: bool,
    /// Nothing may be left that says of the newest epoch.
    pub may_repeat: bool,
}

/// An extent as the shard places it.
pub struct PlacedAt<'a> {
    pub file: u64,
    pub place: u64,
    pub end: Position,
    pub synced: Position,
    pub directory_end: usize,
    pub bytes: usize,
    pub epoch: Epoch,
    pub header: &'a [u8],
    pub entries: &'a [RunEntry],
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Layout {
    pub fn placed(&mut self, extent: &PlacedAt<'_>) {
        let place = usize::try_from(extent.place).expect("a small file");
        let extents = self.files.entry(extent.file).or_default();
        // What stood there or behind was cut off by a start.
        extents.retain(|other| other.end <= place);
        let run = |entry: &RunEntry| {
            let from = place + entry.place as usize;
            ((entry.key, entry.base_offset..entry.next_offset), from..from + entry.stored_bytes as usize)
        };
        extents.push(Placed {
            place,
            directory_end: place + extent.directory_end,
            end: place + extent.bytes,
            position: extent.end,
            synced: extent.synced,
            epoch: extent.epoch,
            header: extent.header.to_vec(),
            runs: extent.entries.iter().map(run).collect(),
        });
    }

    /// Places in a segment that matter, one drawn by each number: in headers, directories, runs, and behind the last extent.
    pub fn place_in(&self, file: u64, len: usize, mut draw: impl FnMut(usize) -> usize) -> usize {
        let extents = self.files.get(&file).map_or(&[][..], Vec::as_slice);
        let end = extents.last().map_or(0, |last| last.end);
        match draw(8) {
            0 => draw(len.max(1)),
            1 => draw(64),
            2 if len > end => end + draw((len - end).min(8192)),
            // The trailer.
            3 if len > end => len - 4096 + draw(64),
            4 | 5 if !extents.is_empty() => {
                let extent = &extents[draw(extents.len())];
                extent.place + draw(extent.directory_end - extent.place)
            }
            _ if !extents.is_empty() => {
                let extent = &extents[draw(extents.len())];
                extent.place + draw(extent.end - extent.place)
            }
            _ => draw(len.max(1)),
        }
    }

    /// The runs that the damage touches: what a running shard may not read.
    pub fn runs_hit(&self, damage: &Damage) -> Vec<Records> {
        let extents = self.files.get(&damage.file).into_iter().flatten();
        let runs = extents.flat_map(|extent| &extent.runs).filter(|(_, bytes)| overlap(bytes, &damage.range));
        runs.map(|(records, _)| records.clone()).collect()
    }

    /// What all damage together may cost at a start.
    pub fn harm(&self, damages: &[Damage], disk: &SimDisk) -> Harm {
        let mut harm = Harm::default();
        let there: Vec<&Damage> =
            damages.iter().filter(|damage| disk.file_id(damage.segment) == Some(damage.file)).collect();
        for damage in &there {
            harm.lost.extend(self.runs_hit(damage));
            self.judge(damage, &there, disk, &mut harm);
        }
        harm
    }

    fn judge(&self, damage: &Damage, all: &[&Damage], disk: &SimDisk, harm: &mut Harm) {
        let newest = disk.listed().last().copied();
        let is_newest = Some(damage.segment) == newest;
        let near_newest = newest.is_some_and(|newest| damage.segment.0 + 1 >= newest.0);
        let no_extents = Vec::new();
        let extents = self.files.get(&damage.file).unwrap_or(&no_extents);
        let hits = |range: Range<usize>| all.iter().any(|one| one.file == damage.file && overlap(&range, &one.range));
        let tail = extents.last().map_or(0, |last| last.end);
        // Extents are looked at one by one where the footer does not stand for them; the newest segment may turn out to have
        // died before it began, so that the one before it is the newest.
        let is_walked = near_newest || hits(tail..usize::MAX);
        let head_hit = |extent: &Placed| hits(extent.place..extent.directory_end);
        for (at, extent) in extents.iter().enumerate() {
            if !overlap(&damage.range, &(extent.place..extent.end)) {
                continue;
            }
            let in_head = overlap(&damage.range, &(extent.place..extent.directory_end));
            let in_runs = extent.runs.iter().any(|(_, bytes)| overlap(bytes, &damage.range));
            if in_head {
                harm.arena |= near_newest;
                if is_walked {
                    harm.lost.extend(extent.runs.iter().map(|(records, _)| records.clone()));
                }
            }
            // What never reached the disk, or not any more, proves nothing.
            let is_there = |later: &&Placed| !head_hit(later) && disk.holds(damage.segment, later.place, &later.header);
            let later = extents[at + 1..].iter().filter(is_there);
            let proved = later.map(|later| later.synced).max().unwrap_or_default();
            if is_newest && (in_head || in_runs) && proved < extent.position {
                // It looks like the torn end of the log.
                let cut = extents[at..].iter().flat_map(|extent| &extent.runs);
                harm.lost.extend(cut.map(|(records, _)| records.clone()));
                harm.arena = true;
                harm.refused |= at == 0;
                harm.may_repeat |= self.newest_epoch_is_in(&extents[at..]);
            }
        }
        harm.arena |= near_newest && damage.range.start >= tail;
    }

    /// Whether only these extents are of the newest epoch.
    fn newest_epoch_is_in(&self, cut: &[Placed]) -> bool {
        let all = self.files.values().flatten();
        let rest = all.filter(|extent| !cut.iter().any(|other| other.position == extent.position));
        rest.map(|extent| extent.epoch).max() < cut.iter().map(|extent| extent.epoch).max()
    }

    /// Segments whose files are gone are of no interest.
    pub fn keep_only(&mut self, disk: &SimDisk) {
        let ids: Vec<u64> = disk.listed().iter().filter_map(|segment| disk.file_id(*segment)).collect();
        self.files.retain(|file, _| ids.contains(file));
    }

    /// The segments that have extents to be damaged.
    pub fn has(&self, disk: &SimDisk, segment: SegmentSequence) -> bool {
        disk.file_id(segment).is_some_and(|file| self.files.contains_key(&file))
    }
}
