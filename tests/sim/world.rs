//! What outlives a process: disk, arena, the broker's list of partitions, and what is known from outside about all of it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use ringmain_core::compressor::{Compressor, Decompressor};
use ringmain_core::ids::{Epoch, PartitionKey, TopicId};
use ringmain_core::packing::Packing;
use ringmain_core::recover::Case;

use crate::arena::SimArena;
use crate::disk::{Crash, Damage, DamageKind, SimDisk};
use crate::layout::Layout;
use crate::ledger::Ledger;
use crate::rng::Rng;
use crate::wall::Wall;

/// One run.
pub struct World {
    pub rng: Rng,
    pub disk: SimDisk,
    pub arena: Option<Rc<SimArena>>,
    /// The broker's durable list of partitions, with the epoch in which each was made.
    pub created: BTreeMap<PartitionKey, Epoch>,
    /// Topics that were deleted; their ids are not used again.
    pub deleted: BTreeSet<TopicId>,
    pub ledger: Ledger,
    pub layout: Layout,
    pub wall: Wall,
    pub segment_bytes: u64,
    /// Bytes of batches in one extent.
    pub plan_bytes_max: usize,
    pub compressor: Compressor,
    pub decompressor: Decompressor,
    pub packing: Packing,
    /// Everything that happened, one line each.
    pub trace: Vec<String>,
    /// What recoveries met.
    pub cases: BTreeSet<Case>,
    /// What else happened, and how often.
    pub met: BTreeMap<&'static str, u64>,
    /// Damage that was done to files.
    pub damages: Vec<Damage>,
    /// Bits of the arena were flipped since the last start.
    pub arena_flipped: bool,
    /// A start has come through: partitions are made only after it.
    pub born: bool,
    /// A start gave up, as it may after damage.
    pub refused: bool,
    shows: bool,
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut created = BTreeMap::new();
        for (topic, partitions) in [(1, 7), (2, 4)] {
            created.extend((0..partitions).map(|partition| (PartitionKey::new(topic, partition), Epoch(0))));
        }
        Self {
            rng: Rng::new(seed),
            disk: SimDisk::default(),
            arena: None,
            created,
            deleted: BTreeSet::new(),
            ledger: Ledger::default(),
            layout: Layout::default(),
            wall: Wall::default(),
            segment_bytes: 128 * 1024,
            plan_bytes_max: 24 * 1024,
            compressor: Compressor::default(),
            decompressor: Decompressor::default(),
            packing: Packing::default(),
            trace: Vec::new(),
            cases: BTreeSet::new(),
            met: BTreeMap::new(),
            damages: Vec::new(),
            arena_flipped: false,
            born: false,
            refused: false,
            shows: std::env::var_os("RINGMAIN_SIM_SEED").is_some(),
        }
    }

    /// Adds to the trace; a replay (`RINGMAIN_SIM_SEED`) shows it as it goes.
    pub fn note(&mut self, line: String) {
        if self.shows {
            println!("{line}");
        }
        self.trace.push(line);
    }

    pub fn meet(&mut self, what: &'static str) {
        *self.met.entry(what).or_default() += 1;
    }

    pub fn is_damaged(&self) -> bool {
        !self.damages.is_empty()
    }

    /// The process dies.
    pub fn crash(&mut self, crash: Crash) {
        self.note(format!("crash: {crash:?}"));
        self.ledger.crashed(crash);
        if crash > Crash::Kill {
            self.arena = None;
            self.arena_flipped = false;
        }
        self.disk.crash(crash, &mut self.rng);
        self.wall.process_begins();
    }

    /// Spoils something of what is synced.
    pub fn damage_files(&mut self) {
        self.layout.keep_only(&self.disk);
        let listed: Vec<_> =
            self.disk.listed().iter().copied().filter(|segment| self.layout.has(&self.disk, *segment)).collect();
        if listed.is_empty() {
            return;
        }
        // The newest one is read in another way than the others.
        let newest = listed.len() - 1;
        let segment = listed[if self.rng.once_in(2) { newest } else { self.rng.index(listed.len()) }];
        let kind = match self.rng.below(3) {
            0 => DamageKind::Flip,
            1 => DamageKind::Sector,
            _ => DamageKind::Unreadable,
        };
        let (file, len) = (self.disk.file_id(segment).expect("it is listed"), self.disk.len(segment));
        let rng = &mut self.rng;
        let place = self.layout.place_in(file, len, |below| rng.index(below));
        let Some(damage) = self.disk.damage(segment, place, kind) else { return };
        self.note(format!("damage: {kind:?} in segment {segment} at {:?}", damage.range));
        for records in self.layout.runs_hit(&damage) {
            self.ledger.may_miss(&records);
        }
        self.damages.push(damage);
        self.ledger.damaged = true;
    }

    /// Flips a bit of what the dead process published in its arena.
    pub fn damage_arena(&mut self) {
        let Some(arena) = self.arena.clone() else { return };
        if let Some(what) = arena.flip(&mut self.rng) {
            self.note(format!("damage: {what}"));
            self.arena_flipped = true;
        }
    }
}
