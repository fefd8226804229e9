//! Seeds of the corpus: real structures, as the program writes them, so that mutations start from what is whole.

use std::fs;
use std::path::Path;

use ringmain_core::checkpoint::{Checkpoint, CheckpointPartition, CheckpointSection};
use ringmain_core::dedup::{ProducerBatch, Producers};
use ringmain_core::extent::{ExtentHeader, ExtentKind, Layout, ProducerEntry, RunEntry, encode_directory};
use ringmain_core::ids::{Epoch, ExtentSequence, Incarnation, LogId, Offset, PartitionKey, Position};
use ringmain_core::index::{FOOTER_PAGE_BYTES, IndexEntry, encode_footer};
use ringmain_core::log::SegmentEnd;
use ringmain_wire::batch_builder::BatchBuilder;
use ringmain_wire::record::NewRecord;

use super::arena_adoption::{MEND_BATCHES, MEND_DESCRIPTORS, MEND_HEADER, MEND_OFFSETS};
use super::footer::{LOG_ID, SEGMENT};
use super::segment_recovery::describe;
use super::writer::{Writer, bare_batch};

/// A seed: of which target, its name, its bytes.
pub type Seed = (&'static str, String, Vec<u8>);

/// All seeds. `golden` is the folder with the vectors of the protocol.
pub fn seeds(golden: &Path) -> Vec<Seed> {
    let mut seeds = vectors(golden);
    seeds.extend(batches());
    seeds.push(("extent", "runs".into(), mended(3, extent())));
    seeds.push(("checkpoint", "partitions".into(), mended(3, checkpoint())));
    seeds.extend(footers());
    seeds.extend(logs());
    seeds.extend(arenas());
    seeds
}

fn mended(mend: u8, bytes: Vec<u8>) -> Vec<u8> {
    [vec![mend], bytes].concat()
}

/// The golden vectors as frames, messages and batches.
fn vectors(golden: &Path) -> Vec<Seed> {
    let mut seeds = Vec::new();
    let files = fs::read_dir(golden).expect("the golden vectors are there").flatten();
    for path in files.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "hex")) {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).expect("a golden vector is text");
        let bytes: Vec<u8> = text.split_whitespace().filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
        if name.starts_with("frame-") {
            let size = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
            seeds.push(("message", name.clone(), bytes[8..8 + size].to_vec()));
            seeds.push(("frame", name, bytes));
        } else {
            seeds.push(("batch", name, mended(7, bytes)));
        }
    }
    seeds
}

fn batches() -> Vec<Seed> {
    let mut builder = BatchBuilder::new(PartitionKey::new(1, 0));
    for number in 0..6_u8 {
        let value = [number; 9];
        let record = NewRecord { key: Some(b"k"), value: Some(&value), tag: Some("t"), ..NewRecord::default() };
        builder.push(&record).expect("a small record fits");
    }
    vec![("batch", "six-records".into(), mended(7, builder.finish().to_vec()))]
}

fn header(kind: ExtentKind, directory: &[u8], extent_bytes: u32, run_count: u32) -> Vec<u8> {
    let header = ExtentHeader {
        kind,
        log_id: LogId(7),
        sequence: ExtentSequence(3),
        incarnation: Incarnation(2),
        previous_header_crc: 9,
        synced_position: Position(4096),
        directory_bytes: directory.len() as u32,
        directory_crc: ringmain_core::crc::crc32c(directory),
        extent_bytes,
        run_count,
        epoch: Epoch(1),
    };
    [header.encode().as_slice(), directory].concat()
}

fn extent() -> Vec<u8> {
    let sizes = [104, 208, 96];
    let layout = Layout::of_runs(&sizes, 1);
    let run = |(number, (bytes, place)): (usize, (&u32, &u32))| RunEntry {
        key: PartitionKey::new(1, number as u32 / 2),
        base_offset: Offset(10 * number as u64),
        next_offset: Offset(10 * number as u64 + 3),
        place: *place,
        stored_bytes: *bytes,
        raw_bytes: *bytes,
        batches: 1,
        ..RunEntry::default()
    };
    let runs: Vec<RunEntry> = sizes.iter().zip(&layout.run_places).enumerate().map(run).collect();
    let batch = ProducerBatch {
        producer_id: 7,
        producer_epoch: 1,
        base_sequence: 9,
        record_count: 2,
        base_offset: Offset(11),
        epoch: Epoch(0),
        crc: 5,
    };
    let directory = encode_directory(&runs, &[ProducerEntry { run: 1, batch }]);
    header(ExtentKind::Data, &directory, layout.extent_bytes, runs.len() as u32)
}

fn checkpoint() -> Vec<u8> {
    let partition = |number| CheckpointPartition {
        key: PartitionKey::new(1, number),
        log_start: Offset(2),
        next_offset: Offset(5),
        last_epoch: Epoch(1),
    };
    let mut producers = Producers::default();
    for number in 0..9 {
        let batch = ProducerBatch {
            producer_id: 7 + u64::from(number) % 2,
            producer_epoch: 1,
            base_sequence: number,
            record_count: 1,
            base_offset: Offset(number.into()),
            epoch: Epoch(1),
            crc: number,
        };
        producers.stored(PartitionKey::new(1, 0), &batch);
    }
    let checkpoint = Checkpoint {
        epoch: Epoch(1),
        clean: true,
        created_ms: 5,
        partitions: (0..4).map(partition).collect(),
        sections: [CheckpointSection { kind: 1, bytes: vec![1, 2, 3] }]
            .into_iter()
            .chain(producers.section())
            .collect(),
    };
    let directory = checkpoint.encode();
    header(ExtentKind::Checkpoint, &directory, Layout::of_checkpoint(directory.len()).extent_bytes, 0)
}

/// Footers of a few entries, and of two pages.
fn footers() -> Vec<Seed> {
    let footer = |entries: u32| {
        let entry = |number: u32| IndexEntry {
            key: PartitionKey::new(1, number / 40),
            base_offset: Offset(u64::from(number % 40) * 2),
            next_offset: Offset(u64::from(number % 40) * 2 + 2),
            place: 8192 + number * 8,
            stored_bytes: 8,
            raw_bytes: 8,
            batches: 1,
            ..IndexEntry::default()
        };
        let entries: Vec<IndexEntry> = (0..entries).map(entry).collect();
        let end = SegmentEnd {
            log_id: LOG_ID,
            segment: SEGMENT,
            first_sequence: ExtentSequence(5),
            next_sequence: ExtentSequence(9),
            last_header_crc: 1,
            incarnation: Incarnation(1),
            end_place: 16384,
            checkpoint_place: 4096,
        };
        let bytes = encode_footer(&entries, &end);
        let pages = ringmain_core::index::page_count(entries.len());
        let trailer = &bytes[bytes.len() - FOOTER_PAGE_BYTES..][..64];
        let fences = &bytes[pages * FOOTER_PAGE_BYTES..][..pages * 20];
        let mut out = [&[7], trailer, &(fences.len() as u16).to_le_bytes(), fences].concat();
        // Topic, partition and offset of a lookup.
        out.extend([1, 0]);
        out.extend(17_u64.to_le_bytes());
        for (number, page) in bytes[..pages * FOOTER_PAGE_BYTES].chunks(FOOTER_PAGE_BYTES).enumerate() {
            let used = 64 + 64 * (entries.len() - number * 63).min(63);
            out.extend((used as u16).to_le_bytes());
            out.extend(&page[..used]);
        }
        out
    };
    vec![("footer", "three".into(), footer(3)), ("footer", "two-pages".into(), footer(70))]
}

/// Logs as different ends leave them.
fn logs() -> Vec<Seed> {
    let mut writer = Writer::new();
    writer.data(&[0, 1]);
    writer.data(&[0]);
    writer.sync();
    writer.data(&[1, 2]);
    let open = writer.files.clone();
    writer.seal();
    let sealed = writer.files.clone();
    writer.roll();
    writer.data(&[0]);
    let two = writer.files.clone();
    writer.sync();
    writer.checkpoint(true);
    writer.seal();
    let files = [("open", open), ("sealed", sealed), ("two-segments", two), ("stopped", writer.files)];
    files.iter().map(|(name, files)| ("segment_recovery", (*name).to_owned(), describe(files, 15))).collect()
}

/// Arenas with blocks of several classes.
fn arenas() -> Vec<Seed> {
    let mut header = [0; 84];
    header[..5].copy_from_slice(b"RMAR\x01");
    header[60] = 4;
    header[76..80].copy_from_slice(&(2_u32 << 20).to_le_bytes());
    let mut input = vec![MEND_HEADER | MEND_DESCRIPTORS | MEND_BATCHES | MEND_OFFSETS];
    input.extend(header);
    for (slab, slot, class, partitions) in [(0, 0, 0, [0, 1, 0]), (0, 5, 0, [2, 2, 1]), (1, 0, 1, [0, 0, 3])] {
        let batches = partitions.map(|partition| bare_batch(PartitionKey::new(1, partition), Offset(0), 3)).concat();
        let generation = 1_u32;
        let mut descriptor = [0; 36];
        let word = (batches.len() as u64) << 32 | u64::from(generation) << 2 | 1;
        descriptor[..8].copy_from_slice(&word.to_le_bytes());
        descriptor[8] = 1;
        descriptor[16] = slab * 128 + slot + 1;
        descriptor[24] = class;
        descriptor[28..32].copy_from_slice(&generation.to_le_bytes());
        input.extend([slab, slot]);
        input.extend(descriptor);
        input.extend((batches.len() as u16).to_le_bytes());
        input.extend(batches);
    }
    vec![("arena_adoption", "three-blocks".into(), input)]
}
