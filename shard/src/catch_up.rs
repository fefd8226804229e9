//! Reads for consumers that are behind memory: find the run, read from it, check each batch.
//!
//! A sequential reader keeps its place: the cursor of where its next fetch goes on is remembered by partition and
//! offset, so it pays for no lookup. Each batch is checked by its own CRCs, so a run need not be read whole. What is
//! damaged is skipped to the end of its run and told as a gap.
//!
//! Of a compressed run whole packs are sent as they are stored to clients that take their codec ([`packed`]).

mod packed;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::rc::Rc;

use bytes::Bytes;
use ringmain_core::batch::{BATCH_HEADER_BYTES, BatchHeader, check_crc, check_stamp};
use ringmain_core::ids::{Offset, PartitionKey, SegmentSequence};
use ringmain_core::index::{FOOTER_PAGE_BYTES, IndexEntry, Lookup, LookupStep, PageRead, RunCursor};
use ringmain_core::limits::BATCH_BYTES_MAX;
use ringmain_core::pack::PACK_BYTES_MAX;
use ringmain_core::read_share::ReadShare;

use crate::clock::sleep;
use crate::connection::Part;
use crate::files::{FileError, LogFile};
use crate::index_repair::{self, PageError};
use crate::runtime::spawn_joined;
use crate::shard::Shard;
use crate::signal::Broadcast;

/// Open files of sealed segments; the one used longest ago is closed first.
const FILES_MAX: usize = 32;
/// Footer pages kept: 1 MiB.
const PAGES_MAX: usize = 256;
/// Remembered places of sequential readers.
const CURSORS_MAX: usize = 4096;
/// Bytes that reads may hold at once; a fetch waits for its turn.
const READ_BYTES_MAX: usize = 32 * 1024 * 1024;
/// One read of the device; larger ones are split, so that the device works on several.
const PIECE_BYTES_MAX: usize = 256 * 1024;
/// Smallest read from a run.
const READ_BYTES_MIN: usize = 64 * 1024;
/// Runs that one fetch of one partition reads from.
const RUNS_MAX: usize = 64;

/// What the disk has for a fetch.
pub(crate) enum DiskFetch {
    /// Whole batches; the first one holds the asked offset.
    Batches { parts: Vec<Part>, next_offset: Offset, bytes: usize, counted_bytes: usize },
    /// The next batch was compressed by its producer with a codec that the client does not take.
    NotTaken { codec: u8 },
    /// Nothing up to there, for ever.
    Gap { to: Offset, corrupt: bool },
    /// The offset lies below the log start by now.
    Gone,
    /// The index could not be read: the records may be there.
    Failed(String),
}

/// What is wanted of one partition.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) key: PartitionKey,
    pub(crate) offset: Offset,
    /// Nothing past it.
    pub(crate) memory_from: Offset,
    /// About so many bytes of batches, decompressed.
    pub(crate) bytes_max: usize,
    /// The fetch was within memory when it began.
    pub(crate) was_tail: bool,
    /// Codecs that the client takes.
    pub(crate) codecs: u32,
    /// A filter looks at the records: packs are unpacked whatever the client takes, and `bytes_max` counts batches that their
    /// producer compressed as they are, since the filter stops by itself before it has decompressed too much.
    pub(crate) scan: bool,
}

/// Where a reader goes on: so many bytes into a run.
#[derive(Clone, Copy)]
struct Place {
    segment: SegmentSequence,
    entry: IndexEntry,
    at: u32,
}

/// What a shard remembers for its readers.
pub(crate) struct Readers {
    files: RefCell<VecDeque<(SegmentSequence, LogFile)>>,
    pages: RefCell<VecDeque<(PageRead, Rc<Vec<IndexEntry>>)>>,
    cursors: RefCell<HashMap<(PartitionKey, Offset), Place>>,
    unpacked: packed::Unpacked,
    reading: Cell<usize>,
    share: RefCell<ReadShare>,
    done: Broadcast,
    /// Reads under way, by the order in which they began.
    reads: RefCell<BTreeSet<u64>>,
    next_read: Cell<u64>,
    read_ended: Broadcast,
}

impl Readers {
    /// For readers that take no more than `share_percent` of the disk's time while the shard writes.
    pub(crate) fn new(share_percent: u32) -> Self {
        Self {
            files: RefCell::default(),
            pages: RefCell::default(),
            cursors: RefCell::default(),
            unpacked: packed::Unpacked::default(),
            reading: Cell::default(),
            share: RefCell::new(ReadShare::new(share_percent)),
            done: Broadcast::default(),
            reads: RefCell::default(),
            next_read: Cell::default(),
            read_ended: Broadcast::default(),
        }
    }

    /// The segment's file is about to be removed or recycled.
    pub(crate) fn forget(&self, segment: SegmentSequence) {
        self.files.borrow_mut().retain(|(other, _)| *other != segment);
        self.pages.borrow_mut().retain(|(page, _)| page.segment != segment);
        self.cursors.borrow_mut().retain(|_, place| place.segment != segment);
        self.unpacked.forget(segment);
    }

    /// Ends when every read that has begun by now has ended: none is at what lies below log starts that were raised before.
    pub(crate) async fn wait_out(&self) {
        let begun = self.next_read.get();
        while self.reads.borrow().first().is_some_and(|&oldest| oldest < begun) {
            self.read_ended.wait().await;
        }
    }

    fn begin_read(&self) -> ReadUnderWay<'_> {
        let number = self.next_read.get();
        self.next_read.set(number + 1);
        self.reads.borrow_mut().insert(number);
        ReadUnderWay { readers: self, number }
    }

    fn remember(&self, key: PartitionKey, offset: Offset, place: Place) {
        let mut cursors = self.cursors.borrow_mut();
        if cursors.len() >= CURSORS_MAX {
            // Readers that are still there pay one lookup each.
            cursors.clear();
        }
        cursors.insert((key, offset), place);
    }

    async fn file(&self, shard: &Shard, segment: SegmentSequence) -> Result<LogFile, FileError> {
        if let Some((open, file)) = shard.log.open_segment()
            && open == segment
        {
            return Ok(file);
        }
        let known = {
            let mut files = self.files.borrow_mut();
            let at = files.iter().position(|(other, _)| *other == segment);
            at.and_then(|at| files.remove(at))
        };
        let file = match known {
            Some((_, file)) => file,
            None => LogFile::open_sealed(&shard.log.path_of(segment)).await?,
        };
        let mut files = self.files.borrow_mut();
        if !files.iter().any(|(other, _)| *other == segment) {
            files.push_back((segment, file.clone()));
        }
        if files.len() > FILES_MAX {
            files.pop_front();
        }
        Ok(file)
    }

    /// Waits until `bytes` more may be read at once.
    async fn admit(&self, bytes: usize) -> Admitted<'_> {
        while self.reading.get() > 0 && self.reading.get() + bytes > READ_BYTES_MAX {
            self.done.wait().await;
        }
        self.reading.set(self.reading.get() + bytes);
        Admitted { readers: self, bytes }
    }
}

struct ReadUnderWay<'a> {
    readers: &'a Readers,
    number: u64,
}

impl Drop for ReadUnderWay<'_> {
    fn drop(&mut self) {
        self.readers.reads.borrow_mut().remove(&self.number);
        self.readers.read_ended.raise();
    }
}

struct Admitted<'a> {
    readers: &'a Readers,
    bytes: usize,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.readers.reading.set(self.readers.reading.get() - self.bytes);
        self.readers.done.raise();
    }
}

/// Reads what is wanted, one batch at least.
pub(crate) async fn read(shard: &Rc<Shard>, wanted: &Wanted) -> DiskFetch {
    let Wanted { key, offset, .. } = *wanted;
    // Retention waits for this before it frees anything.
    let _read = shard.readers.begin_read();
    let is_gone = || shard.store.borrow().ends(key).is_none_or(|(ends, _)| offset < ends.log_start());
    if is_gone() {
        return DiskFetch::Gone;
    }
    match read_from(shard, wanted).await {
        found @ DiskFetch::Batches { .. } => found,
        // What was given up meanwhile is neither damaged nor a gap.
        _ if is_gone() => DiskFetch::Gone,
        DiskFetch::Gap { to, corrupt: true } => {
            shard.metrics.corrupt_runs_total.add(1);
            tracing::error!(
                shard = shard.id.0,
                topic = key.topic.0,
                partition = key.partition,
                offset = offset.0,
                to = to.0,
                "a run can't be read back: its records are reported as a gap"
            );
            DiskFetch::Gap { to, corrupt: true }
        }
        other => other,
    }
}

async fn read_from(shard: &Rc<Shard>, wanted: &Wanted) -> DiskFetch {
    let Wanted { key, offset, memory_from, bytes_max, .. } = *wanted;
    let remembered = shard.readers.cursors.borrow_mut().remove(&(key, offset));
    let mut place = match remembered {
        Some(place) => place,
        None => {
            // By itself, so that the index is not borrowed while its pages are read.
            let lookup = shard.log.index.borrow().lookup(key, offset);
            match find(shard, lookup).await {
                Ok(Some(place)) => place,
                Ok(None) => return DiskFetch::Gap { to: memory_from, corrupt: false },
                Err(error) => return DiskFetch::Failed(error),
            }
        }
    };
    if place.entry.base_offset > offset {
        return DiskFetch::Gap { to: place.entry.base_offset.min(memory_from), corrupt: false };
    }
    let mut got = Got { parts: Vec::new(), next_offset: offset, bytes: 0, counted_bytes: 0, not_taken: None };
    for _ in 0..RUNS_MAX {
        let sound = match read_run(shard, &mut place, wanted, &mut got).await {
            Ok(sound) => sound,
            Err(error) if got.parts.is_empty() => return DiskFetch::Failed(error.to_string()),
            // The next fetch will find out.
            Err(_) => break,
        };
        if !sound && got.parts.is_empty() {
            tracing::warn!(
                shard = shard.id.0,
                segment = place.segment.0,
                place = place.entry.place,
                "what stands on disk is not what the index says"
            );
            return DiskFetch::Gap { to: place.entry.next_offset.min(memory_from), corrupt: true };
        }
        let run_is_read = place.at >= place.entry.stored_bytes;
        if !sound || got.counted_bytes >= bytes_max || got.next_offset >= memory_from || !run_is_read {
            break;
        }
        let cursor = RunCursor { segment: place.segment, entry: place.entry };
        let lookup = shard.log.index.borrow().next_after(&cursor);
        match find(shard, lookup).await {
            Ok(Some(next)) if next.entry.base_offset == got.next_offset => place = next,
            // A gap, memory, or trouble: the next fetch will find out.
            _ => break,
        }
    }
    if place.at < place.entry.stored_bytes {
        shard.readers.remember(key, got.next_offset, place);
    }
    if let (true, Some(codec)) = (got.parts.is_empty(), got.not_taken) {
        return DiskFetch::NotTaken { codec };
    }
    if got.parts.is_empty() {
        // Nothing in the run reaches the offset: its batches lie.
        return DiskFetch::Gap { to: place.entry.next_offset.min(memory_from), corrupt: true };
    }
    let Got { parts, next_offset, bytes, counted_bytes, .. } = got;
    DiskFetch::Batches { parts, next_offset, bytes, counted_bytes }
}

async fn find(shard: &Rc<Shard>, mut lookup: Lookup) -> Result<Option<Place>, String> {
    loop {
        let step = lookup.step(&shard.log.index.borrow());
        match step {
            LookupStep::Found(segment, entry) => return Ok(Some(Place { segment, entry, at: 0 })),
            LookupStep::NotFound => return Ok(None),
            LookupStep::ReadPage(page) => match read_page(shard, &page).await {
                Ok(Some(entries)) => lookup.feed(&shard.log.index.borrow(), &page, &entries),
                Ok(None) => {}
                Err(PageError::Damaged(reason)) => index_repair::rebuild(shard, page.segment, &reason).await?,
                Err(PageError::Failed(error)) => return Err(error),
            },
        }
    }
}

/// A page of a footer; nothing when its segment has gone meanwhile.
async fn read_page(shard: &Rc<Shard>, page: &PageRead) -> Result<Option<Rc<Vec<IndexEntry>>>, PageError> {
    let known =
        shard.readers.pages.borrow().iter().find(|(other, _)| other == page).map(|(_, entries)| Rc::clone(entries));
    if let Some(entries) = known {
        return Ok(Some(entries));
    }
    let file = shard.readers.file(shard, page.segment).await?;
    let bytes = read_bytes(shard, &file, page.place, FOOTER_PAGE_BYTES).await?;
    let Some(decoded) = shard.log.index.borrow().decode_page(page, &bytes) else { return Ok(None) };
    let entries = Rc::new(decoded.map_err(|error| PageError::Damaged(error.to_string()))?);
    let mut pages = shard.readers.pages.borrow_mut();
    pages.push_back((*page, Rc::clone(&entries)));
    if pages.len() > PAGES_MAX {
        pages.pop_front();
    }
    Ok(Some(entries))
}

impl From<FileError> for PageError {
    fn from(error: FileError) -> Self {
        let text = error.to_string();
        if error.is_lost() { Self::Damaged(text) } else { Self::Failed(text) }
    }
}

/// Reads side by side, in pieces that the device takes at once.
async fn read_bytes(shard: &Shard, file: &LogFile, place: u64, bytes: usize) -> Result<Vec<u8>, FileError> {
    let _admitted = shard.readers.admit(bytes).await;
    let pause = shard.readers.share.borrow().wait(shard.clock.exact());
    if !pause.is_zero() {
        shard.metrics.fetch_disk_pause_us_total.add(pause.as_micros() as u64);
        sleep(pause).await;
    }
    let began = shard.clock.exact();
    let pieces: Vec<_> = (0..bytes)
        .step_by(PIECE_BYTES_MAX)
        .map(|at| {
            let file = file.clone();
            spawn_joined(async move { file.read_at(place + at as u64, PIECE_BYTES_MAX.min(bytes - at)).await })
        })
        .collect();
    let mut copy = Vec::with_capacity(bytes);
    let mut failed = None;
    for piece in pieces {
        // Each is waited for: the kernel owns its buffer until then.
        match piece.await {
            Ok(read) => copy.extend_from_slice(read.as_slice()),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    shard.readers.share.borrow_mut().read(began, shard.clock.exact(), !shard.log.is_idle());
    shard.metrics.fetch_disk_read_bytes_total.add(copy.len() as u64);
    failed.map_or(Ok(copy), Err)
}

struct Got {
    parts: Vec<Part>,
    next_offset: Offset,
    /// As they are sent.
    bytes: usize,
    /// As the budget counts them.
    counted_bytes: usize,
    /// The codec of the batch at which it ended because the client does not take it.
    not_taken: Option<u8>,
}

impl Got {
    fn push(&mut self, read: &Bytes, part: std::ops::Range<usize>) {
        // A small part of what was read must not keep all of it in memory while it waits for its client.
        let is_most = part.len() * 2 >= read.len();
        let part = read.slice(part);
        self.bytes += part.len();
        self.parts.push(Part::Bytes(if is_most { part } else { Bytes::copy_from_slice(&part) }));
    }
}

/// Takes batches from the run, from where `place` is in it. Gives false when the run is damaged there, or the device can't
/// read it; any other error says nothing about the run.
async fn read_run(shard: &Rc<Shard>, place: &mut Place, wanted: &Wanted, got: &mut Got) -> Result<bool, FileError> {
    let file = match shard.readers.file(shard, place.segment).await {
        Ok(file) => file,
        Err(error) => return lost(shard, place, error),
    };
    let mut window = READ_BYTES_MIN.max(wanted.bytes_max.saturating_sub(got.counted_bytes).min(1024 * 1024));
    while place.at < place.entry.stored_bytes {
        let left = (place.entry.stored_bytes - place.at) as usize;
        let size = window.min(left);
        let from = u64::from(place.entry.place) + u64::from(place.at);
        let bytes = match read_bytes(shard, &file, from, size).await {
            Ok(bytes) => Bytes::from(bytes),
            Err(error) => return lost(shard, place, error),
        };
        if wanted.was_tail {
            shard.metrics.tail_disk_read_bytes_total.add(size as u64);
        }
        let taken = if place.entry.codec == 0 {
            take_batches(&bytes, wanted, got)
        } else {
            packed::take_packs(shard, &bytes, place, wanted, got).await
        };
        // Bounded by the run's size, a u32.
        place.at += taken.walked as u32;
        match taken.end {
            End::Damaged => return Ok(false),
            End::Enough => return Ok(true),
            End::NotTaken { codec } => {
                got.not_taken = Some(codec);
                return Ok(true);
            }
            End::Cut { needs } if taken.walked == 0 && size < left => {
                window = needs.max(window).min(BATCH_BYTES_MAX.max(PACK_BYTES_MAX));
            }
            End::Cut { .. } if size == left => return Ok(taken.walked == size),
            End::Cut { .. } => {
                if got.counted_bytes >= wanted.bytes_max {
                    return Ok(true);
                }
            }
        }
    }
    Ok(true)
}

/// What an error says about the run: lost, or nothing.
fn lost(shard: &Shard, place: &Place, error: FileError) -> Result<bool, FileError> {
    tracing::warn!(shard = shard.id.0, segment = place.segment.0, place = place.entry.place, %error, "can't read a run");
    if error.is_lost() { Ok(false) } else { Err(error) }
}

/// Whether a client that takes `codecs` takes this one.
pub(crate) fn codec_is_taken(codec: u8, codecs: u32) -> bool {
    1u32.checked_shl(u32::from(codec)).is_some_and(|bit| bit & codecs != 0)
}

/// How a walk over the bytes of a run ended.
enum End {
    /// The budget is used up, or memory begins.
    Enough,
    /// The bytes end; a batch that is cut needs so many.
    Cut { needs: usize },
    /// The next batch has a codec that the client does not take.
    NotTaken { codec: u8 },
    /// What stands there is not the next batch.
    Damaged,
}

struct Walk {
    walked: usize,
    end: End,
}

fn take_batches(bytes: &Bytes, wanted: &Wanted, got: &mut Got) -> Walk {
    let (mut at, mut first) = (0, None);
    let end = loop {
        let rest = &bytes[at..];
        if rest.len() < BATCH_HEADER_BYTES {
            break End::Cut { needs: BATCH_HEADER_BYTES };
        }
        let header = match BatchHeader::parse(rest) {
            Ok(header) => header,
            Err(ringmain_core::batch::BatchError::Truncated { needs, .. }) => break End::Cut { needs },
            Err(_) => break End::Damaged,
        };
        let size = header.batch_bytes as usize;
        if header.key != wanted.key || check_stamp(rest).is_err() {
            break End::Damaged;
        }
        if header.next_offset() <= got.next_offset {
            at += size;
            continue;
        }
        if check_crc(&header, rest).is_err() {
            break End::Damaged;
        }
        if header.codec != 0 && !codec_is_taken(header.codec, wanted.codecs) {
            break End::NotTaken { codec: header.codec };
        }
        let counted = if wanted.scan { size } else { header.raw_bytes() };
        let over = got.counted_bytes > 0 && got.counted_bytes + counted > wanted.bytes_max;
        if over || header.next_offset() > wanted.memory_from {
            break End::Enough;
        }
        first.get_or_insert(at);
        got.counted_bytes += counted;
        got.next_offset = header.next_offset();
        at += size;
    };
    if let Some(first) = first {
        got.push(bytes, first..at);
    }
    Walk { walked: at, end }
}
