//! How a shard comes to life: recover the log, take over or give up the arena of the process before, begin a new
//! incarnation, and only then serve.
//!
//! The order closes one way each to lose or resurrect data: the log is read first (its lock tells when a dying process
//! has written its last); what to adopt is decided from the log; the arena learns of the next incarnation before the log
//! does, so that a kill between the two leaves a pair that still matches; the incarnation is synced before any ack.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringmain_core::acks::Acks;
use ringmain_core::adopt::{self, Adopted};
use ringmain_core::block::BlockMemory;
use ringmain_core::ids::{Epoch, Incarnation, PartitionKey, ShardId};
use ringmain_core::log::{LogTail, NextPlace};
use ringmain_core::recover::{Case, Recovered, RecoveredPartition, recover};
use ringmain_core::segment::file_name;
use ringmain_core::store::{PartitionStart, ShardStore};
use ringmain_wire::frame::FrameEncoder;

use crate::arena::{Arena, ArenaError, ArenaIdentity};
use crate::broker::ArenaChoice;
use crate::clock::{Clock, sleep};
use crate::copies::Copies;
use crate::files::{LogFile, WriteBuffer, remove, sync_dir};
use crate::flush;
use crate::life::Life;
use crate::log_reader::LogReader;
use crate::log_writer::{LogWriter, LogWriterStart, checkpoint_of, write_bytes};
use crate::panic_mark::{self, PanicMark};
use crate::recycle::make_whole;
use crate::retention::RetentionState;
use crate::routing::{PlacedTopic, Routing};
use crate::runtime::{spawn_joined, yield_now};
use crate::shard::Shard;
use crate::signal::{Broadcast, Signal};
use ringmain_core::limits::{SHARD_COPY_BYTES_MAX, SHARD_HOP_COPY_BYTES_MAX};

/// An arena whose adoption panicked so often is put aside.
const ADOPTIONS_MAX: u32 = 3;

/// The memory that a shard starts with, and what it holds.
struct Memory {
    arena: Arena,
    store: ShardStore,
    adopted: Adopted,
    /// It was made by the process before.
    is_old: bool,
}

/// Recovers the shard and begins its new incarnation. The error says what to do.
pub(crate) async fn start(life: Life) -> Result<Rc<Shard>, String> {
    let clock = Clock::current();
    let mut reader = LogReader::open(&life.dir).map_err(|error| error.to_string())?;
    let recovered = recover(&mut reader, life.log_id, life.segment_bytes).map_err(|error| error.to_string())?;
    drop(reader);
    report(&life, &recovered);
    let mark = PanicMark::new(&life.data_dir, life.id);
    let mut memory = open_memory(&life, &recovered)?;
    let log = open_log(&life, recovered, memory.store.epoch()).await?;
    let incarnation = log.incarnation();

    // The log may begin the new life only when the arena knows of it.
    memory.arena.set_next_incarnation(incarnation);
    let checkpoint = checkpoint_of(&memory.store, false, clock.now_ms());
    log.begin_life(&checkpoint, clock.now_ms()).await?;
    memory.arena.commit_incarnation();
    memory.arena.note_flushed(log.flushed());
    drop(mark);

    life.metrics.incarnation.set(u64::from(incarnation.0));
    life.metrics.epoch.set(u64::from(memory.store.epoch().0));
    life.metrics.adopted_batches.set(memory.adopted.batches);
    if memory.is_old {
        tracing::info!(
            shard = life.id.0,
            batches = memory.adopted.batches,
            bytes = memory.adopted.bytes,
            "took over the memory of the process before"
        );
        if memory.arena.header().slab_count as usize != life.slabs {
            return change_size(life, memory, log, clock).await;
        }
    }
    reserve_rest(&memory.arena);
    Ok(Rc::new(make_shard(life, memory, log, clock)))
}

fn report(life: &Life, recovered: &Recovered) {
    for seen in &recovered.cases {
        // One for each segment there is: not worth a line in the log.
        if seen.case == Case::Sealed {
            tracing::debug!(shard = life.id.0, segment = seen.segment.0, "recovery: {:?}", seen.case);
        } else {
            tracing::info!(
                shard = life.id.0,
                segment = seen.segment.0,
                place = seen.place,
                "recovery: {:?}",
                seen.case
            );
        }
    }
    for lost in &recovered.lost {
        tracing::error!(
            shard = life.id.0,
            segment = lost.segment.0,
            from = lost.from,
            to = lost.to,
            "bytes that were synced can't be read back: their records are reported as gaps"
        );
    }
}

/// Why an arena is not taken over.
enum NoArena {
    /// It is not needed: the log stopped clean, or there never was one.
    NotNeeded,
    /// What it held is lost: offsets must jump. With the highest incarnation that it knew.
    Lost(String, Option<Incarnation>),
}

/// Epochs that a log may have come to since its partitions were made, for one that is gone altogether.
const EPOCHS_OF_A_LOST_LOG: u32 = 1 << 16;

/// The epoch to be past, when the log of the shard is gone though it has partitions: they are made only once its first
/// checkpoint is synced.
fn epoch_of_lost_log(life: &Life, recovered: &Recovered) -> Option<Epoch> {
    if recovered.last_incarnation != Incarnation(0) {
        return None;
    }
    let here = life.topics.iter().filter(|(topic, _)| topic.partitions_on(life.id).next().is_some());
    let made = here.flat_map(|(_, epochs)| epochs).max()?;
    Some(Epoch(made.0.saturating_add(EPOCHS_OF_A_LOST_LOG)))
}

/// Opens the memory: the arena of the process before if it is this log's last memory, else a new one.
fn open_memory(life: &Life, recovered: &Recovered) -> Result<Memory, String> {
    let identity = ArenaIdentity::of(&life.data_dir, life.log_id, life.id).map_err(|error| error.to_string())?;
    let lost_log = epoch_of_lost_log(life, recovered);
    if lost_log.is_some() {
        tracing::error!(
            shard = life.id.0,
            dir = %life.dir.display(),
            "the log of this shard is gone: all records of its partitions are lost, and their offsets jump"
        );
    }
    let fresh = recovered.last_incarnation == Incarnation(0) && lost_log.is_none();
    let no_arena = match &life.arena {
        ArenaChoice::Anonymous if recovered.clean && !recovered.stillborn || fresh => NoArena::NotNeeded,
        ArenaChoice::Anonymous => NoArena::Lost("the process before had its memory in an anonymous arena".into(), None),
        ArenaChoice::Dir(dir) => match take_over(life, recovered, dir, &identity, fresh)? {
            Ok(memory) => return Ok(memory),
            Err(no_arena) => no_arena,
        },
    };
    let epoch = match no_arena {
        NoArena::NotNeeded if recovered.ends_uncertain => {
            tracing::warn!(shard = life.id.0, "damage hides ends of partitions: the epoch is raised, offsets jump");
            recovered.epoch_past_loss(None)
        }
        NoArena::NotNeeded => recovered.epoch,
        NoArena::Lost(reason, in_arena) => {
            let epoch = lost_log.unwrap_or(recovered.epoch_past_loss(in_arena));
            tracing::warn!(
                shard = life.id.0,
                epoch = epoch.0,
                "unflushed records of the process before are lost, offsets jump: {reason}"
            );
            epoch
        }
    };
    let slabs = u32::try_from(life.slabs).unwrap_or(u32::MAX);
    let arena = match &life.arena {
        ArenaChoice::Anonymous => Arena::anonymous(slabs),
        ArenaChoice::Dir(dir) => Arena::create(dir, identity, recovered.next_incarnation, slabs),
    };
    let arena = arena.map_err(|error| error.to_string())?;
    let store = filled_store(life, recovered, life.slabs, epoch)?;
    Ok(Memory { arena, store, adopted: Adopted::default(), is_old: false })
}

/// Tries to take over the arena of the process before; a `fresh` log has none. The outer error means that the shard can't start.
fn take_over(
    life: &Life,
    recovered: &Recovered,
    dir: &Path,
    identity: &ArenaIdentity,
    fresh: bool,
) -> Result<Result<Memory, NoArena>, String> {
    let kept = kept_as(&life.data_dir, &crate::arena::arena_path(dir, identity), Clock::current().now_ms());
    let (mut arena, header) = match Arena::open_existing(dir, identity) {
        Ok(found) => found,
        Err(ArenaError::Missing(_)) if recovered.clean && !recovered.stillborn || fresh => {
            return Ok(Err(NoArena::NotNeeded));
        }
        Err(ArenaError::Missing(path)) => {
            return Ok(Err(NoArena::Lost(format!("there is no arena {}", path.display()), None)));
        }
        Err(error @ (ArenaError::Header { .. } | ArenaError::Size { .. })) => {
            let path = crate::arena::arena_path(dir, identity);
            crate::arena::quarantine_file(&path, &kept).map_err(|error| error.to_string())?;
            return Ok(Err(NoArena::Lost(format!("{error}; put aside as {}", kept.display()), None)));
        }
        Err(error) => return Err(error.to_string()),
    };
    let put_aside = |arena: Arena, reason: String| -> Result<Result<Memory, NoArena>, String> {
        let known = header.incarnation.max(header.next_incarnation);
        arena.quarantine(&kept).map_err(|error| error.to_string())?;
        Ok(Err(NoArena::Lost(format!("{reason}; the arena is put aside as {}", kept.display()), Some(known))))
    };
    let is_ours = header.identity == *identity && !fresh;
    if is_ours && arena.flushed() > recovered.flushed {
        let (was, is) = (arena.flushed(), recovered.flushed);
        return put_aside(arena, format!("the log was flushed up to {was} and ends at {is}: its end is damaged"));
    }
    if (recovered.clean || fresh) && !recovered.ends_uncertain && (is_ours || !recovered.stillborn) {
        // The first start of all, or one after a clean stop, died before its first ack.
        arena.remove().map_err(|error| error.to_string())?;
        return Ok(Err(NoArena::NotNeeded));
    }
    if let Some(reason) = mismatch(identity, &header, recovered) {
        return put_aside(arena, reason);
    }
    arena.confirm_incarnation(recovered.last_incarnation);
    if panic_mark::take(&life.data_dir, life.id) && arena.count_panic() >= ADOPTIONS_MAX {
        return put_aside(arena, format!("taking it over has failed {ADOPTIONS_MAX} times"));
    }
    let live = match arena.live() {
        Ok(live) => live,
        Err(error) => return put_aside(arena, error.to_string()),
    };
    let mut store = filled_store(life, recovered, header.slab_count as usize, recovered.epoch)?;
    match adopt::adopt(&mut store, &arena, live) {
        Ok(adopted) => {
            for &block in &adopted.free {
                BlockMemory::free(&arena, block);
            }
            Ok(Ok(Memory { arena, store, adopted, is_old: true }))
        }
        Err(error) => put_aside(arena, error.to_string()),
    }
}

/// Where an arena that can't be taken over is kept: named by the time, since one shard may put aside several.
fn kept_as(data_dir: &Path, arena: &Path, now_ms: i64) -> PathBuf {
    let name = arena.file_stem().unwrap_or_default().to_string_lossy();
    data_dir.join("quarantine").join(format!("{name}-{now_ms}.arena"))
}

/// Why the arena is not the last memory of the recovered log.
fn mismatch(identity: &ArenaIdentity, header: &crate::arena::ArenaHeader, recovered: &Recovered) -> Option<String> {
    let last = recovered.last_incarnation;
    if header.identity != *identity {
        return Some("the arena is of another boot or data directory".into());
    }
    if header.incarnation != last && header.next_incarnation != last {
        let (has, next) = (header.incarnation, header.next_incarnation);
        return Some(format!("the arena is of incarnation {has} (next {next}), the log of {last}"));
    }
    recovered.ends_uncertain.then(|| "damage in the log hides where its partitions end".into())
}

/// A store with all partitions of this shard where the log has them.
fn filled_store(life: &Life, recovered: &Recovered, slabs: usize, epoch: Epoch) -> Result<ShardStore, String> {
    let mut store = ShardStore::new(slabs, epoch);
    for (topic, created_epochs) in &life.topics {
        if !take_partitions(&mut store, life.id, topic, created_epochs, &recovered.partitions) {
            return Err("too many partitions for one shard: delete topics or start with more shards".into());
        }
    }
    store.set_producers(recovered.producers.clone());
    Ok(store)
}

/// Takes on the partitions of a topic that live on this shard; those that are there already only get new settings.
pub(crate) fn take_topic(
    store: &mut ShardStore,
    shard: ShardId,
    topic: &PlacedTopic,
    created_epochs: &[Epoch],
) -> bool {
    take_partitions(store, shard, topic, created_epochs, &BTreeMap::new())
}

fn take_partitions(
    store: &mut ShardStore,
    shard: ShardId,
    topic: &PlacedTopic,
    created_epochs: &[Epoch],
    recovered: &BTreeMap<PartitionKey, RecoveredPartition>,
) -> bool {
    let epoch = store.epoch();
    topic.partitions_on(shard).all(|(partition, number)| {
        let key = PartitionKey { topic: topic.info.id, partition };
        let created = created_epochs.get(usize::from(number)).copied().unwrap_or(epoch);
        let never_flushed = RecoveredPartition { last_epoch: created, ..RecoveredPartition::default() };
        let state = recovered.get(&key).copied().unwrap_or(never_flushed);
        store.add_partition(PartitionStart {
            key,
            store: number,
            log_start: state.log_start,
            log_end: state.resumes_at(epoch),
            last_epoch: epoch,
            durability_floor: topic.info.settings.durability_floor,
        })
    })
}

/// Makes the segment files what recovery says, and opens the one that the log goes on in.
async fn open_log(life: &Life, recovered: Recovered, epoch: Epoch) -> Result<LogWriter, String> {
    let text = |error: crate::files::FileError| error.to_string();
    for &segment in &recovered.remove {
        remove(&life.dir.join(file_name(segment))).await.map_err(text)?;
    }
    if !recovered.remove.is_empty() {
        sync_dir(&life.dir).await.map_err(text)?;
    }
    if let Some(footer) = &recovered.rewrite_footer {
        let file = LogFile::open(&life.dir.join(file_name(footer.segment))).await.map_err(text)?;
        write_bytes(&file, footer.place, &footer.bytes, &life.metrics).await.map_err(text)?;
        file.truncate(footer.place + footer.bytes.len() as u64).await.map_err(text)?;
        file.close().await.map_err(text)?;
    }
    let mut unreserved = false;
    let file = match recovered.next {
        NextPlace::NewSegment(_) => {
            // The process before may have died between writing a footer and syncing it.
            if let Some(sealed) = recovered.sync {
                let file = LogFile::open(&life.dir.join(file_name(sealed))).await.map_err(text)?;
                file.fdatasync().await.map_err(text)?;
                file.close().await.map_err(text)?;
            }
            None
        }
        NextPlace::Continue(open) => {
            let file = LogFile::open(&life.dir.join(file_name(open.segment))).await.map_err(text)?;
            match make_whole(&file, life.segment_bytes).await {
                Err(error) if error.is_full() => unreserved = true,
                reserved => reserved.map_err(text)?,
            }
            if let Some(header) = &recovered.rewrite_header {
                let mut block = WriteBuffer::new(ringmain_core::limits::DISK_BLOCK_BYTES);
                block.as_mut_slice().fill(0);
                let encoded = header.encode();
                block.as_mut_slice()[..encoded.len()].copy_from_slice(&encoded);
                file.write_at(block, 0).await.map_err(text)?;
            }
            // What the dead process wrote is in the device's cache at best: nothing may build on it before this.
            file.fdatasync().await.map_err(text)?;
            Some(file)
        }
    };
    let tail = LogTail::new(recovered.log_start(life.log_id, life.segment_bytes, epoch));
    Ok(LogWriter::new(LogWriterStart {
        dir: life.dir.clone(),
        segment_bytes: life.segment_bytes,
        tail,
        index: recovered.index,
        file,
        unreserved,
        metrics: Arc::clone(&life.metrics),
    }))
}

/// The arena of the process before has another size than is wanted now: write all that is in it to disk, then go on
/// with a new one.
async fn change_size(life: Life, memory: Memory, log: LogWriter, clock: Rc<Clock>) -> Result<Rc<Shard>, String> {
    let (dir, slabs) = match &life.arena {
        ArenaChoice::Dir(dir) => (dir.clone(), u32::try_from(life.slabs).unwrap_or(u32::MAX)),
        ArenaChoice::Anonymous => return Err("an anonymous arena is never taken over".into()),
    };
    let identity = memory.arena.header().identity;
    let incarnation = log.incarnation();
    let shard = Rc::new(make_shard(life, memory, log, clock));
    shard.stopping.set(true);
    spawn_joined(flush::run(Rc::clone(&shard))).await;
    if shard.log_failed.get() {
        return Err("the memory of the process before could not be flushed: see above".into());
    }
    shard.log.sync_all(&shard).await?;
    // The last tasks of the flush still hold the shard for a moment.
    while Rc::strong_count(&shard) > 1 {
        sleep(Duration::from_millis(1)).await;
        yield_now().await;
    }
    let mut shard = Rc::into_inner(shard).ok_or("a task of the flush is still about")?;
    shard.memory = Rc::new(Arena::anonymous(1).map_err(|error| error.to_string())?);
    let arena = Arena::open_existing(&dir, &identity).map_err(|error| error.to_string())?.0;
    arena.remove().map_err(|error| error.to_string())?;
    let arena = Arena::create(&dir, identity, incarnation, slabs).map_err(|error| error.to_string())?;
    arena.note_flushed(shard.log.flushed());
    reserve_rest(&arena);
    shard.store = RefCell::new(shard.store.into_inner().emptied(slabs as usize));
    shard.memory = Rc::new(arena);
    shard.metrics.arena_bytes.set(shard.store.borrow().blocks().bytes_max() as u64);
    shard.stopping.set(false);
    Ok(Rc::new(shard))
}

/// Reserves the rest of the arena's pages beside the first work: touching a gigabyte takes a second.
fn reserve_rest(arena: &Arena) {
    let reserver = arena.reserver();
    let made = std::thread::Builder::new().name("arena".into()).spawn(move || {
        if let Err(error) = reserver.reserve_all() {
            tracing::error!("the arena stays smaller than it should be: {error}");
        }
    });
    if let Err(error) = made {
        tracing::error!(%error, "can't make the thread that reserves the arena: it stays small");
    }
}

fn make_shard(life: Life, memory: Memory, log: LogWriter, clock: Rc<Clock>) -> Shard {
    let mut routing = Routing::default();
    for (topic, _) in life.topics {
        routing.put(topic);
    }
    life.metrics.arena_bytes.set(memory.store.blocks().bytes_max() as u64);
    let retention = RetentionState::new(life.id, &log, &memory.store, &routing);
    let disk_full = log.is_unreserved();
    life.metrics.disk_full.set(u64::from(disk_full));
    let readers = crate::catch_up::Readers::new(life.config.catch_up_share_percent);
    Shard {
        id: life.id,
        config: life.config,
        clock,
        memory: Rc::new(memory.arena),
        store: RefCell::new(memory.store),
        acks: RefCell::new(Acks::default()),
        waits: RefCell::default(),
        gather: RefCell::default(),
        routing: RefCell::new(routing),
        log,
        log_failed: Cell::new(false),
        metrics: life.metrics,
        admin: life.admin,
        mailbox: life.mail,
        mesh: life.mesh.start(),
        readers,
        packer: crate::packer::Packer::start(life.id),
        parked: crate::parked::Parked::default(),
        parked_count: Cell::new(0),
        watches: Cell::new(0),
        connections: RefCell::default(),
        next_connection: Cell::new(1),
        touched: RefCell::default(),
        encoder: RefCell::new(FrameEncoder::new()),
        receive_bytes: Cell::new(0),
        receive_freed: Broadcast::default(),
        receive_waiting: Cell::new(0),
        receive_exceeded: Cell::new(false),
        copies: Rc::new(Copies::new(SHARD_COPY_BYTES_MAX)),
        fetches_under_way: Cell::default(),
        head_bytes: Cell::default(),
        head_waiting: Cell::default(),
        heads_sent: Broadcast::default(),
        hop_copies: Rc::new(Copies::new(SHARD_HOP_COPY_BYTES_MAX)),
        flush_wanted: Signal::default(),
        memory_freed: Broadcast::default(),
        memory_short: Cell::new(false),
        disk_full: Cell::new(disk_full),
        index_repair: crate::index_repair::IndexRepair::default(),
        stopping: Cell::new(false),
        retention,
    }
}
