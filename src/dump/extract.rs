//! Writing out the records of a topic that can still be read.
//!
//! First all runs of the topic are listed, about 120 bytes each; then they are read in the order of offsets. Copies of the same
//! records (moved runs, batches that are still in an arena) fill in for each other.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ringmain_core::batch::BatchHeader;
use ringmain_core::extent::RunEntry;
use ringmain_core::ids::{Offset, PartitionKey, SegmentSequence};
use ringmain_core::inspect::run::{RunDamage, batches, check_stored, raw};
use ringmain_core::inspect::{Found, FoundExtent};
use ringmain_core::recover::SegmentSource;
use ringmain_shard::arena::LiveBlock;
use ringmain_shard::arena::image::ArenaImage;
use ringmain_wire::batch::BatchView;

use crate::cli::Format;
use crate::consume::Printer;
use crate::output::stdout;

use super::batches::plain;
use super::place::Place;
use super::walk::{At, LogState, Visitor};
use super::{Filter, arena};

/// Where some records of a partition are.
#[derive(Clone, Copy, Debug)]
struct Piece {
    partition: u32,
    base_offset: Offset,
    next_offset: Offset,
    source: Source,
}

#[derive(Clone, Copy, Debug)]
enum Source {
    /// A run: log, segment, place in the file.
    Run { log: u16, segment: SegmentSequence, place: u64, run: RunEntry },
    /// A batch of an arena: which arena, block, place in the block.
    Batch { arena: u16, block: LiveBlock, at: u32, bytes: u32 },
}

/// Gathers where records are, then writes them.
pub struct Extract {
    name: String,
    format: Format,
    filter: Filter,
    pieces: Vec<Piece>,
    logs: u16,
    log_starts: Vec<(PartitionKey, Offset)>,
}

impl Extract {
    pub fn new(name: String, format: Format, filter: Filter) -> Self {
        Self { name, format, filter, pieces: Vec::new(), logs: 0, log_starts: Vec::new() }
    }

    /// Writes everything that was found.
    pub fn write(mut self, place: &mut Place, arenas: &[PathBuf], force: bool) -> Result<()> {
        let mut images = Vec::new();
        for (number, path) in (0u16..).zip(arenas) {
            let (file, bytes) = arena::open(path, force)?;
            match ArenaImage::read(file, bytes) {
                Ok(image) => {
                    self.list_arena(number, path, &image)?;
                    images.push(Some(image));
                }
                Err(error) => {
                    skipped(&path.display().to_string(), 0, &format!("arena header: {error}"));
                    images.push(None);
                }
            }
        }
        // Logs before arenas, where both have the same.
        self.pieces
            .sort_by_key(|piece| (piece.partition, piece.base_offset, matches!(piece.source, Source::Batch { .. })));
        let mut writer = Writer {
            printer: Printer::new(stdout(), self.format, &self.name),
            partition: None,
            next: Offset(0),
            log_starts: self.log_starts,
            topic: self.filter.topic.unwrap_or_default(),
        };
        for piece in &self.pieces {
            writer.go_to(piece.partition);
            if piece.next_offset <= writer.next {
                continue;
            }
            match &piece.source {
                Source::Run { log, segment, place: at, run } => {
                    let log = &mut place.logs[usize::from(*log)];
                    let file = log.source.path(*segment).display().to_string();
                    let stored = read_run(&mut log.source, *segment, *at, run)?;
                    writer.run(&file, *at, run, stored.as_deref())?;
                }
                Source::Batch { arena, block, at, bytes } => {
                    let Some(image) = &images[usize::from(*arena)] else { continue };
                    let batch = image.committed_part(block, *at, *bytes).context("can't read the arena")?;
                    if let Ok(header) = BatchHeader::parse(&batch) {
                        let file = arenas[usize::from(*arena)].display().to_string();
                        writer.batch(&file, image.place(block) + u64::from(*at), &header, &batch)?;
                    }
                }
            }
        }
        Ok(writer.printer.flush()?)
    }

    fn list_arena(&mut self, number: u16, path: &Path, image: &ArenaImage<File>) -> Result<()> {
        let file = path.display().to_string();
        for slab in 0..image.header().slab_count {
            for found in image.blocks(slab).with_context(|| format!("can't read {file}"))? {
                let block = match found {
                    Ok(block) if self.filter.topic.is_none_or(|topic| topic == block.topic) => block,
                    Ok(_) => continue,
                    Err((block, reason)) => {
                        skipped(&file, 0, &format!("block {block}: {reason}"));
                        continue;
                    }
                };
                let committed = image.committed(&block).with_context(|| format!("can't read {file}"))?;
                for batch in arena::batches(&committed) {
                    match batch {
                        Ok((at, header, bytes)) if self.filter.takes(header.key) => self.pieces.push(Piece {
                            partition: header.key.partition,
                            base_offset: header.base_offset,
                            next_offset: header.next_offset(),
                            source: Source::Batch { arena: number, block, at: at as u32, bytes: bytes.len() as u32 },
                        }),
                        Ok(_) => {}
                        Err((at, error)) => skipped(&file, image.place(&block) + at as u64, &format!("batch: {error}")),
                    }
                }
            }
        }
        Ok(())
    }
}

/// Tells what is left out.
fn skipped(file: &str, place: u64, why: &str) {
    eprintln!("ringmain: skipped file={file} byte={place}: {why}");
}

fn read_run(
    source: &mut impl SegmentSource,
    segment: SegmentSequence,
    place: u64,
    run: &RunEntry,
) -> Result<Option<Vec<u8>>> {
    let block = place / 4096 * 4096;
    let before = (place - block) as usize;
    // Whole blocks, as core reads them; a run has 4 MiB at most.
    let mut bytes = vec![0; (before + run.stored_bytes as usize).next_multiple_of(4096)];
    let read = match source.read(segment, block, &mut bytes) {
        Ok(read) => read,
        Err(ringmain_core::recover::ReadError::Unreadable) => 0,
        Err(error) => return Err(error.into()),
    };
    bytes.truncate(read);
    Ok(bytes.get(before..before + run.stored_bytes as usize).map(<[u8]>::to_vec))
}

/// Prints records in order.
struct Writer<W> {
    printer: Printer<W>,
    topic: ringmain_core::ids::TopicId,
    partition: Option<u32>,
    /// Everything of the partition before this was printed, or is not kept.
    next: Offset,
    log_starts: Vec<(PartitionKey, Offset)>,
}

impl<W: std::io::Write> Writer<W> {
    fn go_to(&mut self, partition: u32) {
        if self.partition != Some(partition) {
            self.partition = Some(partition);
            let key = PartitionKey { topic: self.topic, partition };
            let start = self.log_starts.iter().find(|(known, _)| *known == key);
            self.next = start.map_or(Offset(0), |(_, start)| *start);
        }
    }

    fn run(&mut self, file: &str, place: u64, run: &RunEntry, stored: Option<&[u8]>) -> Result<()> {
        let what =
            format!("run of partition {} with offsets {}..{}", run.key.partition, run.base_offset, run.next_offset);
        let Some(stored) = stored else {
            skipped(file, place, &format!("{what}: the device can't read it, or the file ends before"));
            return Ok(());
        };
        let raw = match check_stored(run, stored) {
            // Plain batches have CRCs of their own: those that are whole are worth having.
            Err(RunDamage::Crc) if run.codec == 0 => raw(run, stored),
            whole => whole.and_then(|()| raw(run, stored)),
        };
        let raw = match raw {
            Ok(raw) => raw,
            Err(damage) => {
                skipped(file, place, &format!("{what}: {damage}"));
                return Ok(());
            }
        };
        for batch in batches(run, &raw) {
            match batch {
                Ok(batch) => self.batch(file, place + batch.at as u64, &batch.header, batch.bytes)?,
                Err(damage) => skipped(file, place, &format!("{what}: {damage}")),
            }
        }
        Ok(())
    }

    fn batch(&mut self, file: &str, place: u64, header: &BatchHeader, bytes: &[u8]) -> Result<()> {
        let (header, bytes) = match plain(header, bytes) {
            Ok(plain) => plain,
            Err(error) => {
                skipped(file, place, &format!("batch at offset {}: {error}", header.base_offset));
                return Ok(());
            }
        };
        match BatchView::parse(&bytes, &header) {
            Ok(view) => {
                for record in view.records().filter(|record| record.offset >= self.next) {
                    self.printer.record(header.key.partition, &record)?;
                }
                self.next = self.next.max(header.next_offset());
            }
            Err(error) => skipped(file, place, &format!("batch at offset {}: {error}", header.base_offset)),
        }
        Ok(())
    }
}

impl Visitor for Extract {
    fn log(&mut self, _: &str, state: &LogState) -> Result<()> {
        let wanted = state.log_starts.iter().filter(|(key, _)| self.filter.takes(**key));
        self.log_starts.extend(wanted.map(|(key, start)| (*key, *start)));
        self.logs += 1;
        Ok(())
    }

    fn segment(&mut self, _: &At) -> Result<()> {
        Ok(())
    }

    fn found(&mut self, at: &At, found: &Found) -> Result<()> {
        match found {
            Found::Damage(damage) => skipped(&at.file, damage.place, &damage.what.to_string()),
            Found::Zeros { from, to } => skipped(&at.file, *from, &format!("{} bytes of zeros", to - from)),
            Found::Extent(extent) => {
                let ringmain_core::inspect::FoundBody::Runs(runs) = &extent.body else { return Ok(()) };
                let wanted = runs.iter().filter(|run| self.filter.takes(run.key)).map(|run| Piece {
                    partition: run.key.partition,
                    base_offset: run.base_offset,
                    next_offset: run.next_offset,
                    source: Source::Run {
                        log: self.logs - 1,
                        segment: at.segment,
                        place: extent.place + u64::from(run.place),
                        run: *run,
                    },
                });
                self.pieces.extend(wanted);
            }
            _ => {}
        }
        Ok(())
    }

    fn wants(&self, _: &RunEntry) -> bool {
        false
    }

    fn run(&mut self, _: &At, _: &FoundExtent, _: &RunEntry, _: Option<&[u8]>) -> Result<()> {
        Ok(())
    }

    fn segment_end(&mut self, _: &At, _: bool, _: bool) -> Result<()> {
        Ok(())
    }

    fn note(&mut self, _: &str, _: u64, _: &str) -> Result<()> {
        Ok(())
    }

    fn damage(&mut self, file: &str, place: u64, text: &str) -> Result<()> {
        skipped(file, place, text);
        Ok(())
    }
}
