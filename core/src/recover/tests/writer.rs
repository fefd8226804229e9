//! A log in memory, written the way a shard writes it, with room to damage it.

use std::collections::{BTreeMap, BTreeSet};

use crate::checkpoint::{Checkpoint, CheckpointPartition};
use crate::crc::crc32c;
use crate::extent::{ExtentHeader, ExtentKind, Layout, RunEntry, encode_directory};
use crate::ids::{Epoch, LogId, Offset, PartitionKey, SegmentSequence};
use crate::index::{ActiveIndex, encode_footer};
use crate::log::{LogTail, NeedsRoll, NextPlace, Placed};
use crate::recover::{ReadError, RecoverError, Recovered, SegmentSource, recover};

pub(super) const LOG_ID: LogId = LogId(0x5eed);
pub(super) const SEGMENT_BYTES: u64 = 128 * 1024;

/// Files in memory.
#[derive(Clone, Default)]
pub(super) struct Files {
    pub(super) files: BTreeMap<SegmentSequence, Vec<u8>>,
    names: Vec<SegmentSequence>,
    /// Blocks that give EIO.
    pub(super) unreadable: BTreeSet<(SegmentSequence, u64)>,
}

impl SegmentSource for Files {
    fn segments(&self) -> &[SegmentSequence] {
        &self.names
    }

    fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError> {
        Ok(self.files[&segment].len() as u64)
    }

    fn read(&mut self, segment: SegmentSequence, place: u64, into: &mut [u8]) -> Result<usize, ReadError> {
        assert!(place.is_multiple_of(4096) && into.len().is_multiple_of(4096), "reads are aligned");
        let blocks = place / 4096..(place + into.len() as u64) / 4096;
        if blocks.clone().any(|block| self.unreadable.contains(&(segment, block))) {
            return Err(ReadError::Unreadable);
        }
        let file = &self.files[&segment];
        let from = (place as usize).min(file.len());
        let bytes = into.len().min(file.len() - from);
        into[..bytes].copy_from_slice(&file[from..from + bytes]);
        Ok(bytes)
    }
}

impl Files {
    pub(super) fn put(&mut self, segment: SegmentSequence, bytes: Vec<u8>) {
        self.files.insert(segment, bytes);
        self.names = self.files.keys().copied().collect();
    }

    pub(super) fn remove(&mut self, segment: SegmentSequence) {
        self.files.remove(&segment);
        self.names = self.files.keys().copied().collect();
    }

    pub(super) fn newest(&mut self) -> &mut Vec<u8> {
        self.files.values_mut().last().unwrap()
    }

    pub(super) fn recover(&mut self) -> Result<Recovered, RecoverError> {
        recover(self, LOG_ID, SEGMENT_BYTES)
    }

    pub(super) fn zero(&mut self, extent: &Written, from: u64, to: u64) {
        let file = self.files.get_mut(&extent.segment).unwrap();
        file[(extent.place + from) as usize..(extent.place + to) as usize].fill(0);
    }
}

/// An extent that was written.
#[derive(Clone, Debug)]
pub(super) struct Written {
    pub(super) segment: SegmentSequence,
    pub(super) place: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) runs: Vec<RunEntry>,
    placed: Placed,
}

impl Written {
    pub(super) fn end(&self) -> u64 {
        self.place + self.bytes.len() as u64
    }

    pub(super) fn header(&self) -> ExtentHeader {
        ExtentHeader::decode(&self.bytes).unwrap()
    }
}

/// The life of one process.
pub(super) struct Writer {
    pub(super) files: Files,
    pub(super) tail: LogTail,
    index: ActiveIndex,
    pub(super) ends: BTreeMap<PartitionKey, (Offset, Epoch)>,
    /// Log starts that are not 0.
    pub(super) starts: BTreeMap<PartitionKey, Offset>,
    pub(super) written: Vec<Written>,
    fill: u8,
}

impl Writer {
    /// The first life of a new log.
    pub(super) fn new() -> Self {
        Self::start(Files::default(), 0)
    }

    /// A life on what recovery finds, with the epoch raised by `epochs`.
    pub(super) fn start(mut files: Files, epochs: u32) -> Self {
        let recovered = files.recover().unwrap();
        let epoch = Epoch(recovered.epoch.0 + epochs);
        for segment in &recovered.remove {
            files.remove(*segment);
        }
        if let Some(header) = recovered.rewrite_header {
            files.files.get_mut(&header.segment).unwrap()[..64].copy_from_slice(&header.encode());
        }
        if let Some(footer) = &recovered.rewrite_footer {
            let file = files.files.get_mut(&footer.segment).unwrap();
            file.truncate(footer.place as usize);
            file.extend(&footer.bytes);
        }
        if let NextPlace::Continue(open) = recovered.next {
            files.files.get_mut(&open.segment).unwrap().resize(SEGMENT_BYTES as usize, 0);
        }
        let mut writer = Self {
            files,
            tail: LogTail::new(recovered.log_start(LOG_ID, SEGMENT_BYTES, epoch)),
            index: ActiveIndex::default(),
            ends: recovered
                .partitions
                .iter()
                .map(|(key, partition)| (*key, (partition.resumes_at(epoch), epoch)))
                .collect(),
            starts: recovered.partitions.iter().map(|(key, partition)| (*key, partition.log_start)).collect(),
            written: Vec::new(),
            fill: recovered.next_incarnation.0 as u8,
        };
        writer.checkpoint(false);
        writer.sync();
        writer
    }

    pub(super) fn checkpoint(&mut self, clean: bool) -> Written {
        let partitions = self
            .ends
            .iter()
            .map(|(key, (end, last_epoch))| CheckpointPartition {
                key: *key,
                log_start: self.starts.get(key).copied().unwrap_or_default(),
                next_offset: *end,
                last_epoch: *last_epoch,
            })
            .collect();
        let checkpoint =
            Checkpoint { epoch: self.tail.epoch(), clean, created_ms: 5, partitions, sections: Vec::new() };
        let directory = checkpoint.encode();
        let layout = Layout::of_checkpoint(directory.len());
        let written = self.write(ExtentKind::Checkpoint, &layout, &directory, Vec::new(), &[]);
        self.complete(&written);
        written
    }

    /// Writes an extent with a run of `records` records and `bytes` bytes for each partition, and completes it.
    pub(super) fn data(&mut self, runs: &[(u32, u64, u32)]) -> Written {
        let written = self.data_in_flight(runs);
        self.complete(&written);
        written
    }

    /// A data extent of `blocks` disk blocks.
    pub(super) fn blocks(&mut self, blocks: u32) -> Written {
        self.data(&[(0, 10, blocks * 4096 - 512)])
    }

    pub(super) fn data_in_flight(&mut self, runs: &[(u32, u64, u32)]) -> Written {
        let sizes: Vec<u32> = runs.iter().map(|(_, _, bytes)| *bytes).collect();
        let layout = Layout::of_runs(&sizes, 0);
        let mut entries = Vec::new();
        let mut bodies = Vec::new();
        for ((partition, records, bytes), place) in runs.iter().zip(&layout.run_places) {
            let key = PartitionKey::new(1, *partition);
            let (end, last_epoch) = self.ends.entry(key).or_default();
            let base_offset = *end;
            *end = end.plus(*records);
            *last_epoch = self.tail.epoch();
            self.fill = self.fill.wrapping_mul(31).wrapping_add(7);
            let body = vec![self.fill | 1; *bytes as usize];
            entries.push(RunEntry {
                key,
                base_offset,
                next_offset: *end,
                epoch: self.tail.epoch(),
                place: *place,
                stored_bytes: *bytes,
                raw_bytes: *bytes,
                crc: crc32c(&body),
                batches: 1,
                codec: 0,
                max_append_time_ms: 1,
            });
            bodies.push(body);
        }
        let directory = encode_directory(&entries, &[]);
        self.write(ExtentKind::Data, &layout, &directory, entries, &bodies)
    }

    fn write(
        &mut self,
        kind: ExtentKind,
        layout: &Layout,
        directory: &[u8],
        runs: Vec<RunEntry>,
        bodies: &[Vec<u8>],
    ) -> Written {
        let place = |tail: &mut LogTail| {
            tail.place(kind, layout.directory_bytes, crc32c(directory), layout.extent_bytes, runs.len() as u32)
        };
        let placed = match place(&mut self.tail) {
            Ok(placed) => placed,
            Err(NeedsRoll) => {
                self.roll_without_checkpoint(None);
                if kind == ExtentKind::Data {
                    self.checkpoint(false);
                }
                place(&mut self.tail).unwrap()
            }
        };
        let mut bytes = vec![0; layout.extent_bytes as usize];
        bytes[..64].copy_from_slice(&placed.header);
        bytes[64..64 + directory.len()].copy_from_slice(directory);
        for (run, body) in runs.iter().zip(bodies) {
            bytes[run.place as usize..][..body.len()].copy_from_slice(body);
        }
        let file = self.files.files.get_mut(&placed.segment).unwrap();
        file[placed.place_in_file as usize..][..bytes.len()].copy_from_slice(&bytes);
        self.index.insert_extent(placed.place_in_file, &runs);
        let written = Written { segment: placed.segment, place: placed.place_in_file, bytes, runs, placed };
        self.written.push(written.clone());
        written
    }

    pub(super) fn complete(&mut self, written: &Written) {
        self.tail.extent_completed(written.placed.sequence);
    }

    pub(super) fn sync(&mut self) {
        if let Some(covers) = self.tail.begin_sync() {
            self.tail.sync_completed(covers);
        }
    }

    /// Seals the open segment, if there is one.
    pub(super) fn seal(&mut self) {
        self.sync();
        if let Some(end) = self.tail.segment_end() {
            let mut entries = std::mem::take(&mut self.index).sorted();
            // The index of the writer lacks the runs of lives before: recovery has them.
            if entries.len() < self.tail.open_segment().unwrap().runs {
                let recovered = self.files.clone().recover().unwrap();
                let mut index = recovered.index;
                entries = index.active_mut(end.segment).unwrap().sorted();
            }
            let file = self.files.files.get_mut(&end.segment).unwrap();
            file.truncate(end.end_place as usize);
            file.extend(encode_footer(&entries, &end));
        }
    }

    /// Seals and makes the next segment, over `recycled` bytes if there are any, and puts nothing into it.
    pub(super) fn roll_without_checkpoint(&mut self, recycled: Option<Vec<u8>>) {
        self.seal();
        let header = self.tail.next_segment_header(9);
        let mut bytes = recycled.unwrap_or_default();
        bytes.resize(SEGMENT_BYTES as usize, 0);
        bytes[..4096].fill(0);
        bytes[..64].copy_from_slice(&header.encode());
        self.files.put(header.segment, bytes);
        self.index = ActiveIndex::default();
        self.tail.roll();
    }

    pub(super) fn roll(&mut self) -> Written {
        self.roll_without_checkpoint(None);
        self.checkpoint(false)
    }

    pub(super) fn stop_clean(mut self) -> Files {
        self.checkpoint(true);
        self.seal();
        self.files
    }

    /// What recovery must say when everything written so far is there.
    pub(super) fn all_ends(&self) -> BTreeMap<PartitionKey, Offset> {
        self.ends.iter().map(|(key, (end, _))| (*key, *end)).collect()
    }
}
