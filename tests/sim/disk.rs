//! A disk and its directory in memory that forget, at a crash, what a real one may forget.
//!
//! A write is submitted, completes later, and is durable only when a sync that was begun after its completion has ended.
//! At a power cut each write that is not durable survives whole, in part (512-byte sectors), or not at all, whatever was
//! written before or after it; a new length or name likewise. A killed process loses nothing that has completed; what it
//! had in flight is written or not.

use std::collections::BTreeMap;

use ringmain_core::ids::SegmentSequence;
use ringmain_core::recover::{ReadError, SegmentSource};

use crate::rng::Rng;

const SECTOR: usize = 512;

/// The process is dead: everything stops.
#[derive(Debug)]
pub struct Crashed;

/// What kills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Crash {
    /// The process alone.
    Kill,
    /// The process, and somebody deletes its arena.
    ArenaLost,
    /// Power: memory and whatever is not durable.
    Power,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WriteId(u64);

/// A sync that has begun: the operations that it covers.
#[derive(Debug)]
pub struct SyncTicket {
    file: u64,
    covers: Vec<WriteId>,
}

#[derive(Clone, Debug)]
enum Change {
    Write { place: usize, bytes: Vec<u8>, completed: bool },
    SetLen(usize),
}

#[derive(Clone, Debug, Default)]
struct SimFile {
    durable: Vec<u8>,
    content: Vec<u8>,
    /// What `content` has beyond `durable`, and what is in flight; in order of submission.
    changes: Vec<(WriteId, Change)>,
}

/// When the next crash comes, counted in operations or syncs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fuse {
    /// Crash instead of the operation with this number (from now, from 0).
    pub operations: Option<u64>,
    /// Crash at the end of the sync with this number: instead of it, or right after it.
    pub sync: Option<(u64, bool)>,
}

/// Files by segment.
#[derive(Clone, Debug, Default)]
pub struct SimDisk {
    files: BTreeMap<u64, SimFile>,
    names: BTreeMap<SegmentSequence, u64>,
    durable_names: BTreeMap<SegmentSequence, u64>,
    listed: Vec<SegmentSequence>,
    next_id: u64,
    pub fuse: Fuse,
    /// Operations and ended syncs so far.
    pub operations: u64,
    pub syncs: u64,
}

fn apply(content: &mut Vec<u8>, place: usize, bytes: &[u8]) {
    if content.len() < place + bytes.len() {
        content.resize(place + bytes.len(), 0);
    }
    content[place..place + bytes.len()].copy_from_slice(bytes);
}

impl SimDisk {
    fn step(&mut self) -> Result<(), Crashed> {
        self.operations += 1;
        match &mut self.fuse.operations {
            Some(0) => Err(Crashed),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Runs `sync` as the sync with the next number.
    fn sync_point(&mut self, sync: impl FnOnce(&mut Self)) -> Result<(), Crashed> {
        self.step()?;
        let number = self.syncs;
        self.syncs += 1;
        if self.fuse.sync == Some((number, false)) {
            return Err(Crashed);
        }
        sync(self);
        if self.fuse.sync == Some((number, true)) { Err(Crashed) } else { Ok(()) }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn file(&mut self, segment: SegmentSequence) -> &mut SimFile {
        let id = self.names[&segment];
        self.files.get_mut(&id).expect("a name has its file")
    }

    /// Makes a file of `bytes` bytes; with old content if it is recycled. Its name is not durable yet.
    pub fn create(&mut self, segment: SegmentSequence, recycled: Option<Vec<u8>>, bytes: usize) -> Result<(), Crashed> {
        self.step()?;
        let id = self.id();
        let mut content = recycled.unwrap_or_default();
        content.resize(bytes, 0);
        self.files.insert(id, SimFile { durable: content.clone(), content, changes: Vec::new() });
        assert!(self.names.insert(segment, id).is_none(), "segment {segment} is made while it is there");
        self.listed = self.names.keys().copied().collect();
        Ok(())
    }

    pub fn remove(&mut self, segment: SegmentSequence) -> Result<(), Crashed> {
        self.step()?;
        self.names.remove(&segment);
        self.listed = self.names.keys().copied().collect();
        Ok(())
    }

    pub fn sync_dir(&mut self) -> Result<(), Crashed> {
        self.sync_point(|disk| disk.durable_names = disk.names.clone())
    }

    pub fn submit(&mut self, segment: SegmentSequence, place: u64, bytes: &[u8]) -> Result<WriteId, Crashed> {
        self.step()?;
        assert!(place.is_multiple_of(4096) && bytes.len().is_multiple_of(4096), "direct writes are aligned");
        let id = WriteId(self.id());
        let write = Change::Write { place: place as usize, bytes: bytes.to_vec(), completed: false };
        self.file(segment).changes.push((id, write));
        Ok(id)
    }

    pub fn complete(&mut self, segment: SegmentSequence, id: WriteId) -> Result<(), Crashed> {
        self.step()?;
        let SimFile { content, changes, .. } = self.file(segment);
        for (_, change) in changes.iter_mut().filter(|(other, _)| *other == id) {
            if let Change::Write { place, bytes, completed } = change {
                *completed = true;
                apply(content, *place, bytes);
            }
        }
        Ok(())
    }

    pub fn set_len(&mut self, segment: SegmentSequence, bytes: usize) -> Result<(), Crashed> {
        self.step()?;
        let id = WriteId(self.id());
        let file = self.file(segment);
        file.content.resize(bytes, 0);
        file.changes.push((id, Change::SetLen(bytes)));
        Ok(())
    }

    /// A sync covers what has completed when it begins.
    pub fn begin_sync(&mut self, segment: SegmentSequence) -> Result<SyncTicket, Crashed> {
        self.step()?;
        let file = self.names[&segment];
        let done = |change: &Change| !matches!(change, Change::Write { completed: false, .. });
        let covers = self.files[&file].changes.iter().filter(|(_, change)| done(change)).map(|(id, _)| *id).collect();
        Ok(SyncTicket { file, covers })
    }

    pub fn end_sync(&mut self, ticket: SyncTicket) -> Result<(), Crashed> {
        self.sync_point(|disk| {
            let file = disk.files.get_mut(&ticket.file).expect("a file that is synced is there");
            for (id, change) in &file.changes {
                if ticket.covers.contains(id) {
                    match change {
                        Change::Write { place, bytes, .. } => apply(&mut file.durable, *place, bytes),
                        Change::SetLen(bytes) => file.durable.resize(*bytes, 0),
                    }
                }
            }
            file.changes.retain(|(id, _)| !ticket.covers.contains(id));
        })
    }

    /// The file's bytes, for recycling.
    pub fn content(&self, segment: SegmentSequence) -> Option<Vec<u8>> {
        let id = self.names.get(&segment)?;
        Some(self.files[id].content.clone())
    }

    /// The process is gone. Nothing is in flight afterwards.
    pub fn crash(&mut self, crash: Crash, rng: &mut Rng) {
        self.fuse = Fuse::default();
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
                    Change::Write { place, bytes, .. } if survives => apply(&mut file.durable, place, &bytes),
                    _ => {}
                }
            }
            file.content = file.durable.clone();
        }
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
        self.names = names.clone();
        self.durable_names = names;
    }

    /// Spoils one sector of what is written. Says where.
    pub fn damage(&mut self, rng: &mut Rng) -> Option<(SegmentSequence, usize)> {
        let segment = *self.listed.get(rng.index(self.listed.len().max(1)))?;
        let file = self.file(segment);
        let sector = rng.index(file.content.len() / SECTOR) * SECTOR;
        // What no sync covers was acked for no more than the memory that it came from: damage there after a kill takes both.
        if file.content.get(sector..sector + SECTOR) != file.durable.get(sector..sector + SECTOR) {
            return None;
        }
        for bytes in [&mut file.content, &mut file.durable] {
            if let Some(sector) = bytes.get_mut(sector..sector + SECTOR) {
                sector.fill(0xdb);
            }
        }
        Some((segment, sector))
    }
}

impl SegmentSource for SimDisk {
    fn segments(&self) -> &[SegmentSequence] {
        &self.listed
    }

    fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError> {
        Ok(self.file(segment).content.len() as u64)
    }

    fn read(&mut self, segment: SegmentSequence, place: u64, into: &mut [u8]) -> Result<usize, ReadError> {
        let content = &self.file(segment).content;
        let from = (place as usize).min(content.len());
        let bytes = into.len().min(content.len() - from);
        into[..bytes].copy_from_slice(&content[from..from + bytes]);
        Ok(bytes)
    }
}
