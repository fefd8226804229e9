//! Going through the segments of a log, and handing what is found to a visitor.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ringmain_core::extent::RunEntry;
use ringmain_core::ids::{LogId, Offset, PartitionKey, SegmentSequence};
use ringmain_core::inspect::{Expected, Found, FoundBody, FoundExtent, SegmentWalk};
use ringmain_core::limits::SEGMENT_BYTES;
use ringmain_core::log::NextPlace;
use ringmain_core::recover::cases::{Case, CaseSeen};
use ringmain_core::recover::{RecoverError, SegmentSource, recover};
use ringmain_core::segment::SegmentHeader;

use super::place::Log;

/// A segment, for messages.
#[derive(Clone, Debug)]
pub struct At {
    /// Its file, as messages name it.
    pub file: String,
    /// Shard, in a data directory.
    pub shard: Option<u16>,
    /// Its number.
    pub segment: SegmentSequence,
    /// Size of the file.
    pub file_bytes: u64,
}

/// What recovery tells of a log.
#[derive(Debug, Default)]
pub struct LogState {
    /// Where the kept part of each partition starts.
    pub log_starts: BTreeMap<PartitionKey, Offset>,
    /// The segment that the log goes on in, and where.
    open: Option<(SegmentSequence, u64)>,
    /// Segments that the next start removes.
    remove: Vec<SegmentSequence>,
    /// What the next start does at its end.
    cuts: Vec<CaseSeen>,
    /// Why a start would be refused.
    refused: Option<RecoverError>,
}

/// Who looks at what is found.
pub trait Visitor {
    /// A log begins.
    fn log(&mut self, name: &str, state: &LogState) -> Result<()>;
    /// A segment begins.
    fn segment(&mut self, at: &At) -> Result<()>;
    /// Something in it.
    fn found(&mut self, at: &At, found: &Found) -> Result<()>;
    /// Whether a run's bytes are wanted.
    fn wants(&self, run: &RunEntry) -> bool;
    /// A run, with its stored bytes if they can be read.
    fn run(&mut self, at: &At, extent: &FoundExtent, run: &RunEntry, stored: Option<&[u8]>) -> Result<()>;
    /// The segment has ended.
    fn segment_end(&mut self, at: &At, is_sealed: bool, is_newest: bool) -> Result<()>;
    /// Worth saying, and no damage.
    fn note(&mut self, file: &str, place: u64, text: &str) -> Result<()>;
    /// Damage that no segment's walk finds.
    fn damage(&mut self, file: &str, place: u64, text: &str) -> Result<()>;
}

/// Goes through all segments of a log, or through the one asked for.
pub fn walk_log(log: &mut Log, root: &Path, only: Option<u64>, visitor: &mut impl Visitor) -> Result<()> {
    let names = log.source.segments().to_vec();
    let state = if log.whole { state_of(log)? } else { LogState::default() };
    visitor.log(&log.name, &state)?;
    let shown = |path: &Path| path.strip_prefix(root).unwrap_or(path).display().to_string();
    if let Some(refused) = &state.refused {
        visitor.damage(&log.name, 0, &format!("a start would be refused: {refused}"))?;
    }
    let mut before = None;
    for segment in &names {
        let path: PathBuf = log.source.path(*segment).to_owned();
        let file = shown(&path);
        for cut in state.cuts.iter().filter(|cut| cut.segment == *segment) {
            let text = format!("{:?}: a write that was never acked, which the next start cuts off", cut.case);
            visitor.note(&file, cut.place, &text)?;
        }
        if state.remove.contains(segment) {
            visitor.note(&file, 0, "it died while it was being made: the next start removes it")?;
            continue;
        }
        let end = state.open.filter(|(open, _)| open == segment).map(|(_, end)| end);
        let expected = Expected { log_id: log.log_id, segment_bytes: log.segment_bytes, end, before };
        let failed = || format!("can't read {}", path.display());
        let mut walk = SegmentWalk::new(&mut log.source, *segment, expected).with_context(failed)?;
        let at = At { file, shard: log.shard, segment: *segment, file_bytes: walk.file_bytes() };
        if only.is_none_or(|only| only == segment.0) {
            walk_segment(&mut walk, &at, visitor).with_context(failed)?;
            let is_newest = names.last() == Some(segment) || state.open.is_some_and(|(open, _)| open == *segment);
            visitor.segment_end(&at, walk.is_sealed(), is_newest || !log.whole)?;
            before = walk.end();
        } else {
            before = None;
        }
    }
    Ok(())
}

fn walk_segment(walk: &mut SegmentWalk<'_, impl SegmentSource>, at: &At, visitor: &mut impl Visitor) -> Result<()> {
    visitor.segment(at)?;
    while let Some(found) = walk.advance()? {
        visitor.found(at, &found)?;
        let Found::Extent(extent) = &found else { continue };
        let FoundBody::Runs(runs) = &extent.body else { continue };
        for run in runs {
            if visitor.wants(run) {
                let stored = walk.run_bytes(extent.place, run)?;
                visitor.run(at, extent, run, stored)?;
            }
        }
    }
    Ok(())
}

/// What the next start would make of the log.
fn state_of(log: &mut Log) -> Result<LogState> {
    let (log_id, segment_bytes) = match (log.log_id, log.segment_bytes) {
        (Some(log_id), Some(segment_bytes)) => (log_id, segment_bytes),
        _ => match first_header(log)? {
            Some(header) => (log.log_id.unwrap_or(header.log_id), header.segment_bytes),
            None => (log.log_id.unwrap_or(LogId(0)), SEGMENT_BYTES),
        },
    };
    // Also where the identity is lost: all segments are then taken for those of the first one.
    (log.log_id, log.segment_bytes) = (Some(log_id), Some(segment_bytes));
    let recovered = match recover(&mut log.source, log_id, segment_bytes) {
        Ok(recovered) => recovered,
        Err(error @ RecoverError::Read { .. }) => return Err(error.into()),
        Err(error) => return Ok(LogState { refused: Some(error), ..LogState::default() }),
    };
    let is_cut = |case: Case| {
        use Case as C;
        matches!(
            case,
            C::ReorderedTail
                | C::ReorderedOverOldLife
                | C::OffChain
                | C::OffChainReordered
                | C::TornExtent
                | C::TornExtentReordered
                | C::TornRun
                | C::TornRunReordered
        )
    };
    Ok(LogState {
        log_starts: recovered.partitions.iter().map(|(key, partition)| (*key, partition.log_start)).collect(),
        open: match recovered.next {
            NextPlace::Continue(open) => Some((open.segment, open.place)),
            NextPlace::NewSegment(_) => None,
        },
        remove: recovered.remove,
        cuts: recovered.cases.into_iter().filter(|seen| is_cut(seen.case)).collect(),
        refused: None,
    })
}

/// The first header of the log's segments that is whole.
fn first_header(log: &mut Log) -> Result<Option<SegmentHeader>> {
    for segment in log.source.segments().to_vec() {
        let mut block = vec![0; 4096];
        let read = match log.source.read(segment, 0, &mut block) {
            Ok(read) => read,
            Err(ringmain_core::recover::ReadError::Unreadable) => continue,
            Err(error) => return Err(error.into()),
        };
        if let Ok(header) = SegmentHeader::decode(&block[..read]) {
            return Ok(Some(header));
        }
    }
    Ok(None)
}
