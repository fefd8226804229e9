//! A shard without threads or sockets: the flusher's, log writer's and start's steps in the order in which the real ones
//! take them, over core's decisions. Each step on the disk may be the last one, or fail.

mod flush;
mod read;
mod retain;
mod roll;
mod start;
mod write;

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use ringmain_core::acks::{Acks, Taken, WaitToken};
use ringmain_core::compressor::Level;
use ringmain_core::extent::RunEntry;
use ringmain_core::flush::FlushPlan;
use ringmain_core::ids::{
    Durability, Epoch, ExtentSequence, LogId, Offset, PartitionKey, Position, SegmentSequence, TopicId,
};
use ringmain_core::index::LogIndex;
use ringmain_core::log::LogTail;
use ringmain_core::prefill::Prefill;
use ringmain_core::recover::RecoveredPartition;
use ringmain_core::retention::RetentionClock;
use ringmain_core::store::{AppendError, Appended, PartitionStart, ShardStore};

use crate::arena::SimArena;
use crate::disk::{SyncTicket, WriteId};
use crate::ledger::seen_of;
use crate::world::World;

pub use start::{Started, start};

pub const LOG_ID: LogId = LogId(0xc0ffee);
/// Size of one write to the disk: an extent is several.
const WRITE_BYTES: usize = 8 * 1024;

/// An extent's plan, and who waits for it.
struct Planned {
    plan: FlushPlan,
    taken: Taken,
}

struct Writing {
    sequence: ExtentSequence,
    end: Position,
    segment: SegmentSequence,
    place: u64,
    pieces: Vec<WriteId>,
    /// Its writes sync themselves.
    syncs: bool,
    plan: FlushPlan,
    entries: Vec<RunEntry>,
}

/// One life.
pub struct Shard {
    pub store: ShardStore,
    acks: Acks,
    tail: LogTail,
    index: LogIndex,
    arena: Rc<SimArena>,
    /// Extents whose writes are not all done, in log order.
    writing: VecDeque<Writing>,
    /// Extents whose writes are done; flushed when all before them are.
    written: VecDeque<Writing>,
    prefill: Prefill,
    /// Zeros on their way, all of one fill.
    filling: Vec<(SegmentSequence, WriteId)>,
    syncing: Option<(Position, SyncTicket)>,
    waits: BTreeMap<WaitToken, (PartitionKey, Durability, Offset)>,
    next_token: u64,
    after: Option<PartitionKey>,
    /// How hard runs are compressed, if at all.
    level: Option<Level>,
    /// The extent that found no room, and the segment that was sealed for it.
    stuck: Option<Planned>,
    sealed: Option<SegmentSequence>,
    /// Produces are refused: there is no room for the next segment.
    pub disk_full: bool,
    /// The open segment lacks room that it must have before data is written to it.
    unreserved: bool,
    clock: RetentionClock,
    /// Log starts in the newest synced checkpoint, and its segment.
    durable_starts: BTreeMap<PartitionKey, Offset>,
    checkpointed: SegmentSequence,
}

fn add_partition(store: &mut ShardStore, key: PartitionKey, state: RecoveredPartition) {
    let epoch = store.epoch();
    let added = store.add_partition(PartitionStart {
        key,
        store: (key.partition % 2) as u16,
        log_start: state.log_start,
        log_end: state.resumes_at(epoch),
        last_epoch: epoch,
        durability_floor: Durability::Memory,
    });
    assert!(added);
}

impl Shard {
    /// A produce. False when memory is full; refused when the log has failed or the disk is full.
    pub fn produce(&mut self, world: &mut World, key: PartitionKey, level: Durability) -> bool {
        if self.failed() || self.disk_full {
            return true;
        }
        let records = 1 + world.rng.below(20) as u32;
        let most = world.plan_bytes_max as u64 / 2;
        let body = if world.rng.once_in(12) { world.rng.below(most.min(9000)) } else { world.rng.below(600) } as usize;
        let noise = world.rng.once_in(3);
        let (mut header, bytes) = world.ledger.make_batch(key, records, body, noise);
        let appended = match self.store.append(&*self.arena, &header, &bytes, world.wall.passed_ms, world.wall.now_ms())
        {
            Ok(appended) => appended,
            Err(AppendError::Busy { .. }) => return false,
            Err(AppendError::Sequence(error)) => {
                let may_be = world.is_damaged() || self.store.epoch() > Epoch(0);
                assert!(may_be, "{key}: nothing was lost, yet {error}");
                world.ledger.renumber(&header);
                return true;
            }
            Err(error) => panic!("append: {error}"),
        };
        if appended.duplicate {
            // Its numbers were given before, to one that damage has hidden from the ledger.
            assert!(world.is_damaged(), "{key}: a new batch counts as stored");
            world.ledger.renumber(&header);
            return true;
        }
        if header.producer_id != 0 {
            let now = (world.wall.passed_ms, world.wall.now_ms());
            let again = self.store.append(&*self.arena, &header, &bytes, now.0, now.1);
            assert_eq!(again, Ok(Appended { duplicate: true, ..appended }), "{key}");
        }
        header.base_offset = appended.base_offset;
        let seen = seen_of(&header, &bytes);
        assert_eq!(seen.next, appended.next_offset);
        world.ledger.produced(&header, seen.id);
        world.ledger.appended(key, seen, world.wall.passed_ms);
        world.note(format!("append {key} {}..{} {level}", seen.base, seen.next));
        if level > Durability::Memory {
            let token = WaitToken(self.next_token);
            self.next_token += 1;
            self.acks.wait(key, seen.next, level, token);
            self.waits.insert(token, (key, level, seen.next));
        }
        true
    }

    /// A new topic, made while the shard runs.
    pub fn add_partition(&mut self, world: &mut World, key: PartitionKey) {
        let epoch = self.store.epoch();
        if !world.deleted.contains(&key.topic) && world.created.insert(key, epoch).is_none() {
            add_partition(
                &mut self.store,
                key,
                RecoveredPartition { last_epoch: epoch, ..RecoveredPartition::default() },
            );
        }
    }

    /// A topic goes, with all that it has.
    pub fn delete_topic(&mut self, world: &mut World, topic: TopicId) {
        if !world.created.keys().any(|key| key.topic == topic) {
            return;
        }
        world.note(format!("delete topic {}", topic.0));
        world.meet("topic deleted");
        world.created.retain(|key, _| key.topic != topic);
        world.deleted.insert(topic);
        self.store.remove_topic(&*self.arena, topic);
        for token in self.acks.remove_topic(topic) {
            self.waits.remove(&token);
        }
    }

    pub fn in_flight(&self) -> usize {
        self.writing.len() + self.written.len()
    }

    /// Whether writes are on their way.
    pub fn has_writes(&self) -> bool {
        !self.writing.is_empty() || !self.filling.is_empty()
    }

    pub fn failed(&self) -> bool {
        self.tail.failed()
    }

    pub fn is_syncing(&self) -> bool {
        self.syncing.is_some()
    }

    /// A write or sync has failed: the log takes nothing more, and nobody is acked any more.
    pub fn fail_log(&mut self, world: &mut World) {
        world.note("the log fails".into());
        world.meet("log failed");
        self.tail.fail();
        self.acks.fail();
        self.waits.clear();
        if let Some(planned) = self.stuck.take() {
            self.acks.give_up(planned.taken);
        }
    }

    /// Waits that have come to their end.
    fn acked(&mut self, world: &mut World, tokens: &[WaitToken]) {
        assert!(tokens.is_empty() || !self.failed(), "an ack after the log has failed");
        for token in tokens {
            let (key, level, next) = self.waits.remove(token).expect("each wait is acked once");
            let (flushed, synced) = world.ledger.ends(key);
            let reached = if level == Durability::Synced { synced } else { flushed };
            assert!(next <= reached, "{key}: {next} is acked {level}, which holds only up to {reached}");
            world.note(format!("ack {key} {next} {level}"));
        }
    }

    /// Gives clean memory back, as a full arena would.
    pub fn evict(&mut self) {
        self.store.evict_one(&*self.arena);
    }
}

/// Whether nothing was ever appended in `epoch`.
fn never_flushed(created: Epoch) -> RecoveredPartition {
    RecoveredPartition { last_epoch: created, ..RecoveredPartition::default() }
}
