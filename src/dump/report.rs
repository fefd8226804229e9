//! Printing what is found, and checking it: the visitor of `dump` without `--extract`.

use anyhow::Result;
use ringmain_core::dedup::{PRODUCERS_SECTION, Producers};
use ringmain_core::extent::{ExtentKind, RunEntry};
use ringmain_core::ids::{Offset, PartitionKey};
use ringmain_core::index::IndexEntry;
use ringmain_core::inspect::run::{RunDamage, batches, check_stored, raw};
use ringmain_core::inspect::{Found, FoundBody, FoundExtent, OffsetCheck, OffsetFinding};
use serde_json::{Value, json};

use crate::output::show_time;

use super::Filter;
use super::batches::{self as batch_rows, BatchPlace};
use super::out::{Out, row, row_heading};
use super::place::{Names, Place};
use super::walk::{At, LogState, Visitor};

/// How many of each thing there were.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    logs: u64,
    segments: u64,
    extents: u64,
    runs: u64,
    batches: u64,
    records: u64,
    damaged: u64,
    arenas: u64,
}

/// See the module.
pub struct Report {
    out: Out,
    names: Names,
    filter: Filter,
    verify: bool,
    records: bool,
    counts: Counts,
    offsets: OffsetCheck,
    log_starts: std::collections::BTreeMap<PartitionKey, Offset>,
    last_segment: Option<u64>,
    /// Ranges of the present segment that are zeros.
    zeros: Vec<(u64, u64)>,
}

impl Report {
    pub fn new(out: Out, names: Names, filter: Filter, verify: bool, records: bool) -> Self {
        Self {
            out,
            names,
            filter,
            verify,
            records,
            counts: Counts::default(),
            offsets: OffsetCheck::default(),
            log_starts: std::collections::BTreeMap::new(),
            last_segment: None,
            zeros: Vec::new(),
        }
    }

    /// Tells what was met before the logs.
    pub fn start(&mut self, place: &Place) -> Result<()> {
        for note in &place.notes {
            self.tell("note", "", 0, note)?;
        }
        for damage in &place.damage {
            self.damage(&place.shown(&damage.file), damage.place, &damage.what)?;
        }
        Ok(())
    }

    /// The last line; says whether everything was sound.
    pub fn finish(mut self) -> Result<bool> {
        let sound = self.counts.damaged == 0;
        if self.verify {
            let Counts { logs, segments, extents, runs, batches, records, damaged, arenas } = self.counts;
            let object = json!({
                "type": "summary", "sound": sound, "damaged": damaged, "logs": logs, "segments": segments,
                "extents": extents, "runs": runs, "batches": batches, "records": records, "arenas": arenas,
            });
            self.out.put(&object, || {
                let arenas = if arenas > 0 { format!("{arenas} arenas, ") } else { String::new() };
                let verdict = if sound { "sound".to_owned() } else { format!("{damaged} places are damaged") };
                format!(
                    "{verdict}: {logs} logs, {arenas}{segments} segments, {extents} extents, {runs} runs, {batches} \
                     batches, {records} records"
                )
            })?;
        }
        self.out.flush()?;
        // Without --verify damage is shown in its place, which is no failure.
        Ok(sound || !self.verify)
    }

    fn tell(&mut self, kind: &str, file: &str, place: u64, text: &str) -> Result<()> {
        let object = json!({ "type": kind, "file": file, "place": place, "what": text });
        self.out.put(&object, || {
            if file.is_empty() { format!("{kind}: {text}") } else { format!("{kind}: {file} byte {place}: {text}") }
        })
    }

    /// Prints, unless only checks were asked for.
    pub fn show(&mut self, object: &Value, row: impl FnOnce() -> String) -> Result<()> {
        if self.verify { Ok(()) } else { self.out.put(object, row) }
    }

    /// The same for a line that JSON has no need of.
    pub fn heading(&mut self, line: impl FnOnce() -> String) -> Result<()> {
        if self.verify { Ok(()) } else { self.out.heading(line) }
    }

    pub fn count_arena(&mut self) {
        self.counts.arenas += 1;
    }

    pub fn names(&self) -> &Names {
        &self.names
    }

    pub fn takes(&self, key: PartitionKey) -> bool {
        self.filter.takes(key)
    }

    /// Counts a whole batch, and prints it.
    pub fn batch(
        &mut self,
        place: BatchPlace<'_>,
        header: &ringmain_core::batch::BatchHeader,
        bytes: &[u8],
    ) -> Result<()> {
        self.counts.batches += 1;
        self.counts.records += u64::from(header.record_count);
        if self.verify {
            return Ok(());
        }
        batch_rows::put(&mut self.out, &self.names, place, header, bytes, self.records)
    }

    /// Whether nothing needs a run any more: its topic is deleted, or its records are below the log start.
    fn is_dead(&self, key: PartitionKey, next_offset: Offset) -> bool {
        self.names.is_deleted(key.topic) || self.log_starts.get(&key).is_some_and(|start| next_offset <= *start)
    }

    fn extent(&mut self, at: &At, extent: &FoundExtent) -> Result<()> {
        self.counts.extents += 1;
        let header = &extent.header;
        let kind = match header.kind {
            ExtentKind::Data => "data",
            ExtentKind::Checkpoint => "checkpoint",
            ExtentKind::Moved => "moved",
        };
        let mut object = json!({
            "type": "extent", "file": at.file, "shard": at.shard, "segment": at.segment.0, "place": extent.place,
            "kind": kind, "sequence": header.sequence.0, "incarnation": header.incarnation.0, "epoch": header.epoch.0,
            "bytes": header.extent_bytes, "runs": header.run_count, "synced_position": header.synced_position.0,
        });
        let mut says = format!(
            "{kind}, sequence {}, incarnation {}, epoch {}, synced position {}, {} runs",
            header.sequence, header.incarnation, header.epoch, header.synced_position, header.run_count
        );
        if let FoundBody::Checkpoint(checkpoint) = &extent.body {
            let (partitions, sections) = (checkpoint.partitions.len(), checkpoint.sections.len());
            object["partitions"] = partitions.into();
            object["sections"] = sections.into();
            object["clean"] = checkpoint.clean.into();
            says = format!("{says}, {partitions} partitions{}", if checkpoint.clean { ", clean stop" } else { "" });
            if let Some(section) = checkpoint.sections.iter().find(|section| section.kind == PRODUCERS_SECTION) {
                let windows = Producers::of_section(&section.bytes).map(|producers| producers.count());
                object["producer_windows"] = windows.as_ref().ok().copied().into();
                let windows =
                    windows.map_or_else(|error| error.to_string(), |count| format!("{count} producer windows"));
                says = format!("{says}, {windows}");
            }
        } else if !extent.producers.is_empty() {
            let batches = extent.producers.len();
            object["producer_batches"] = batches.into();
            says = format!("{says}, {batches} batches of producers named");
        }
        self.show(&object, || row(extent.place, u64::from(header.extent_bytes), "extent", &says))?;
        let FoundBody::Checkpoint(checkpoint) = &extent.body else { return Ok(()) };
        for partition in checkpoint.partitions.iter().filter(|_| self.records).filter(|one| self.filter.takes(one.key))
        {
            let key = partition.key;
            let object = json!({
                "type": "partition", "file": at.file, "place": extent.place, "topic": self.names.get(key.topic),
                "topic_id": key.topic.0, "partition": key.partition, "log_start": partition.log_start.0,
                "next_offset": partition.next_offset.0, "last_epoch": partition.last_epoch.0,
            });
            let (start, next) = (partition.log_start, partition.next_offset);
            let says =
                format!("{} from {start} up to {next}, epoch {}", self.names.partition(key), partition.last_epoch);
            self.out.put(&object, || row(extent.place, 0, "  partition", &says))?;
        }
        Ok(())
    }

    fn check_offsets(&mut self, at: &At, extent: &FoundExtent) -> Result<()> {
        let FoundBody::Runs(runs) = &extent.body else { return Ok(()) };
        for run in runs {
            let place = extent.place + u64::from(run.place);
            let log_start = self.log_starts.get(&run.key).copied().unwrap_or_default();
            let Some(finding) = self.offsets.run(extent.header.kind, run, log_start) else { continue };
            if !self.filter.takes(run.key) || self.names.is_deleted(run.key.topic) {
                continue;
            }
            let (who, base) = (self.names.partition(run.key), run.base_offset);
            match finding {
                OffsetFinding::Repeats { expected } => {
                    let text = format!("run of {who} begins at offset {base}, though the log has it up to {expected}");
                    self.damage(&at.file, place, &text)?;
                }
                OffsetFinding::Missing { from } => {
                    let text = format!("offsets {from}..{base} of {who} are missing before this run");
                    self.damage(&at.file, place, &text)?;
                }
                OffsetFinding::Gap { from } => {
                    self.note(&at.file, place, &format!("gap: offsets {from}..{base} of {who} are not in the log"))?;
                }
            }
        }
        Ok(())
    }

    /// Runs that a footer lists where there are only zeros.
    fn check_zeros(&mut self, at: &At, entries: &[IndexEntry]) -> Result<()> {
        for entry in entries {
            let place = u64::from(entry.place);
            let inside = self.zeros.iter().any(|(from, to)| (*from..*to).contains(&place));
            if inside && !self.is_dead(entry.key, entry.next_offset) {
                let (who, base, next) = (self.names.partition(entry.key), entry.base_offset, entry.next_offset);
                let text = format!("zeros where the run of {who} with offsets {base}..{next} was");
                self.damage(&at.file, place, &text)?;
            }
        }
        Ok(())
    }

    fn show_run(&mut self, at: &At, extent: &FoundExtent, run: &RunEntry) -> Result<()> {
        let place = extent.place + u64::from(run.place);
        let object = json!({
            "type": "run", "file": at.file, "shard": at.shard, "segment": at.segment.0, "place": place,
            "topic": self.names.get(run.key.topic), "topic_id": run.key.topic.0, "partition": run.key.partition,
            "base_offset": run.base_offset.0, "next_offset": run.next_offset.0, "epoch": run.epoch.0,
            "stored_bytes": run.stored_bytes, "raw_bytes": run.raw_bytes, "codec": run.codec, "crc": run.crc,
            "batches": run.batches, "max_append_time_ms": run.max_append_time_ms,
        });
        let who = self.names.partition(run.key);
        self.show(&object, || {
            let (base, next, epoch) = (run.base_offset, run.next_offset, run.epoch);
            let codec = if run.codec == 0 { String::new() } else { format!(", codec {}", run.codec) };
            let says = format!("{who} offsets {base}..{next}, epoch {epoch}, {} batches{codec}", run.batches);
            row(place, u64::from(run.stored_bytes), "  run", &says)
        })
    }
}

impl Visitor for Report {
    fn log(&mut self, name: &str, state: &LogState) -> Result<()> {
        self.counts.logs += 1;
        self.offsets = OffsetCheck::default();
        self.log_starts.clone_from(&state.log_starts);
        self.last_segment = None;
        let object = json!({ "type": "log", "name": name, "partitions": state.log_starts.len() });
        self.show(&object, || format!("{name}: {} partitions", state.log_starts.len()))
    }

    fn segment(&mut self, at: &At) -> Result<()> {
        self.counts.segments += 1;
        self.zeros.clear();
        if self.last_segment.is_some_and(|last| last + 1 != at.segment.0) {
            // Segments in between were freed, or are gone.
            self.offsets.lost();
        }
        self.last_segment = Some(at.segment.0);
        self.heading(|| format!("\n{}, {} bytes\n{}", at.file, at.file_bytes, row_heading()))
    }

    fn found(&mut self, at: &At, found: &Found) -> Result<()> {
        let about = |kind: &str, place: u64, bytes: u64| {
            json!({
                "type": kind, "file": at.file, "shard": at.shard, "segment": at.segment.0, "place": place,
                "bytes": bytes,
            })
        };
        match found {
            Found::Header(header) => {
                let mut object = about("segment", 0, 64);
                object["file_bytes"] = at.file_bytes.into();
                object["log_id"] = format!("{:016x}", header.log_id.0).into();
                object["segment_bytes"] = header.segment_bytes.into();
                object["first_sequence"] = header.first_sequence.0.into();
                object["incarnation"] = header.incarnation.0.into();
                object["created_ms"] = header.created_ms.into();
                let says = format!(
                    "segment {} of log {:016x}, extents from {}, incarnation {}, made {}",
                    header.segment,
                    header.log_id.0,
                    header.first_sequence,
                    header.incarnation,
                    show_time(header.created_ms)
                );
                self.show(&object, || row(0, 64, "header", &says))
            }
            Found::Extent(extent) => {
                self.extent(at, extent)?;
                self.check_offsets(at, extent)
            }
            Found::Zeros { from, to } => {
                self.zeros.push((*from, *to));
                self.offsets.lost();
                self.show(&about("zeros", *from, to - from), || row(*from, to - from, "zeros", ""))
            }
            Found::Behind { from, to } => {
                let says = "behind the end of the log: never written, or of an earlier life";
                self.show(&about("behind", *from, to - from), || row(*from, to - from, "behind", says))
            }
            Found::Trailer { place, trailer } => {
                let mut object = about("trailer", *place, 4096);
                object["entries"] = trailer.entries.into();
                object["next_sequence"] = trailer.end.next_sequence.0.into();
                object["end_place"] = trailer.end.end_place.into();
                object["checkpoint_place"] = trailer.end.checkpoint_place.into();
                let end = &trailer.end;
                let says = format!(
                    "sealed: extents {}..{} up to place {}, {} runs, newest checkpoint at {}",
                    end.first_sequence, end.next_sequence, end.end_place, trailer.entries, end.checkpoint_place
                );
                self.show(&object, || row(*place, 4096, "trailer", &says))
            }
            Found::Page { place, entries } => {
                self.check_zeros(at, entries)?;
                let mut object = about("page", *place, 4096);
                object["entries"] = entries.len().into();
                self.show(&object, || row(*place, 4096, "page", &format!("{} runs", entries.len())))
            }
            Found::Damage(damage) => {
                self.offsets.lost();
                self.damage(&at.file, damage.place, &damage.what.to_string())
            }
        }
    }

    fn wants(&self, run: &RunEntry) -> bool {
        self.filter.takes(run.key)
    }

    fn run(&mut self, at: &At, extent: &FoundExtent, run: &RunEntry, stored: Option<&[u8]>) -> Result<()> {
        self.counts.runs += 1;
        self.show_run(at, extent, run)?;
        let place = extent.place + u64::from(run.place);
        let who =
            format!("run of {} with offsets {}..{}", self.names.partition(run.key), run.base_offset, run.next_offset);
        let is_dead = self.is_dead(run.key, run.next_offset);
        let whole = stored.map(|stored| check_stored(run, stored));
        let (stored, whole) = match (stored, whole) {
            // Its bytes may be given back at any time.
            (_, None | Some(Err(_))) if is_dead => return Ok(()),
            (Some(stored), Some(whole)) => (stored, whole),
            _ => {
                let text = format!("{who}: the device can't read it, or the file ends before");
                return self.damage(&at.file, place, &text);
            }
        };
        if let Err(damage) = whole {
            self.damage(&at.file, place, &format!("{who}: {damage}"))?;
            if damage == RunDamage::Zeros {
                return Ok(());
            }
        }
        let raw = match raw(run, stored) {
            Ok(raw) => raw,
            // Its CRC was checked all the same.
            Err(RunDamage::Codec(_)) if run.codec != 0 => {
                let text = format!("{who}: {}", RunDamage::Codec(run.codec));
                return self.note(&at.file, place, &text);
            }
            Err(damage) => return self.damage(&at.file, place, &format!("{who}: {damage}")),
        };
        for batch in batches(run, &raw) {
            match batch {
                Ok(batch) => {
                    let place = BatchPlace { file: &at.file, place, at: batch.at };
                    self.batch(place, &batch.header, batch.bytes)?;
                }
                Err(damage) => self.damage(&at.file, place, &format!("{who}: {damage}"))?,
            }
        }
        Ok(())
    }

    fn segment_end(&mut self, at: &At, is_sealed: bool, is_newest: bool) -> Result<()> {
        if !is_sealed && !is_newest {
            let text = "it is not the newest segment and has no whole footer";
            self.damage(&at.file, at.file_bytes.saturating_sub(4096), text)?;
        }
        for (from, to) in std::mem::take(&mut self.zeros) {
            let text = format!("{} bytes of zeros", to - from);
            if is_sealed {
                self.note(&at.file, from, &format!("{text}: given back to the filesystem, nothing kept was there"))?;
            } else {
                self.damage(&at.file, from, &format!("{text} where extents must be"))?;
            }
        }
        Ok(())
    }

    fn note(&mut self, file: &str, place: u64, text: &str) -> Result<()> {
        self.tell("note", file, place, text)
    }

    fn damage(&mut self, file: &str, place: u64, text: &str) -> Result<()> {
        self.counts.damaged += 1;
        self.tell("damage", file, place, text)
    }
}
