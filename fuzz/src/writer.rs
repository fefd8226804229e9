//! A small log as a shard writes one, for seeds.

use std::collections::BTreeMap;

use ringmain_core::batch::{BatchHeader, seal_crc, stamp};
use ringmain_core::checkpoint::{Checkpoint, CheckpointPartition};
use ringmain_core::crc::crc32c;
use ringmain_core::extent::{ExtentKind, Layout, RunEntry, encode_directory};
use ringmain_core::ids::{Epoch, Incarnation, Offset, PartitionKey, Position, SegmentSequence};
use ringmain_core::index::{ActiveIndex, encode_footer};
use ringmain_core::log::{LogStart, LogTail, NextPlace};

use super::footer::LOG_ID;
use super::segment_recovery::SEGMENT_BYTES;

/// A batch of `records` records that has only a header: storage looks no further.
pub fn bare_batch(key: PartitionKey, base_offset: Offset, records: u32) -> Vec<u8> {
    let header = BatchHeader { batch_bytes: 104, record_count: records, key, ..BatchHeader::default() };
    let mut bytes = vec![0; 104];
    header.write(&mut bytes);
    seal_crc(&mut bytes);
    stamp(&mut bytes, base_offset, 5, Epoch(0));
    bytes
}

/// A log under way.
pub struct Writer {
    pub files: BTreeMap<u64, Vec<u8>>,
    tail: LogTail,
    index: ActiveIndex,
    ends: BTreeMap<PartitionKey, Offset>,
}

impl Writer {
    /// The first life of a log, its checkpoint written.
    pub fn new() -> Self {
        let start = LogStart {
            log_id: LOG_ID,
            segment_bytes: SEGMENT_BYTES,
            incarnation: Incarnation(1),
            last_incarnation: Incarnation(0),
            epoch: Epoch(0),
            next: NextPlace::NewSegment(SegmentSequence(0)),
            next_sequence: 0.into(),
            previous_header_crc: 0,
            flushed: Position(0),
            synced: Position(0),
        };
        let mut writer = Self {
            files: BTreeMap::new(),
            tail: LogTail::new(start),
            index: ActiveIndex::default(),
            ends: BTreeMap::new(),
        };
        writer.roll();
        writer
    }

    /// A new segment with its checkpoint.
    pub fn roll(&mut self) {
        let header = self.tail.next_segment_header(9);
        let mut file = vec![0; SEGMENT_BYTES as usize];
        file[..64].copy_from_slice(&header.encode());
        self.files.insert(header.segment.0, file);
        self.index = ActiveIndex::default();
        self.tail.roll();
        self.checkpoint(false);
    }

    pub fn checkpoint(&mut self, clean: bool) {
        let partition = |(key, end): (&PartitionKey, &Offset)| CheckpointPartition {
            key: *key,
            log_start: Offset(0),
            next_offset: *end,
            last_epoch: Epoch(0),
        };
        let partitions = self.ends.iter().map(partition).collect();
        let checkpoint = Checkpoint { epoch: Epoch(0), clean, created_ms: 5, partitions, sections: Vec::new() };
        let directory = checkpoint.encode();
        let layout = Layout::of_checkpoint(directory.len());
        self.write(ExtentKind::Checkpoint, &layout, &directory, &[], &[]);
        self.sync();
    }

    /// An extent with a run of one batch for each of these partitions.
    pub fn data(&mut self, partitions: &[u32]) {
        let layout = Layout::of_runs(&vec![104; partitions.len()], 0);
        let (mut runs, mut bodies) = (Vec::new(), Vec::new());
        for (partition, place) in partitions.iter().zip(&layout.run_places) {
            let key = PartitionKey::new(1, *partition);
            let end = self.ends.entry(key).or_default();
            let body = bare_batch(key, *end, 3);
            runs.push(RunEntry {
                key,
                base_offset: *end,
                next_offset: end.plus(3),
                place: *place,
                stored_bytes: 104,
                raw_bytes: 104,
                crc: crc32c(&body),
                batches: 1,
                max_append_time_ms: 5,
                ..RunEntry::default()
            });
            *end = end.plus(3);
            bodies.push(body);
        }
        self.write(ExtentKind::Data, &layout, &encode_directory(&runs, &[]), &runs, &bodies);
    }

    fn write(&mut self, kind: ExtentKind, layout: &Layout, directory: &[u8], runs: &[RunEntry], bodies: &[Vec<u8>]) {
        let crc = crc32c(directory);
        let placed = self.tail.place(kind, layout.directory_bytes, crc, layout.extent_bytes, runs.len() as u32);
        let placed = placed.unwrap_or_else(|_| panic!("seeds are smaller than a segment"));
        let file = self.files.get_mut(&placed.segment.0).expect("it was made by the roll");
        let extent = &mut file[placed.place_in_file as usize..];
        extent[..64].copy_from_slice(&placed.header);
        extent[64..64 + directory.len()].copy_from_slice(directory);
        for (run, body) in runs.iter().zip(bodies) {
            extent[run.place as usize..][..body.len()].copy_from_slice(body);
        }
        self.index.insert_extent(placed.place_in_file, runs);
        self.tail.extent_completed(placed.sequence);
    }

    pub fn sync(&mut self) {
        if let Some(covers) = self.tail.begin_sync() {
            self.tail.sync_completed(covers);
        }
    }

    /// Puts the footer behind the open segment.
    pub fn seal(&mut self) {
        self.sync();
        let end = self.tail.segment_end().expect("a segment is open");
        let file = self.files.get_mut(&end.segment.0).expect("it was made by the roll");
        file.truncate(end.end_place as usize);
        file.extend(encode_footer(&std::mem::take(&mut self.index).sorted(), &end));
    }
}
