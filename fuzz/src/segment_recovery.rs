//! Recovery of a log whose segment files hold any bytes.
//!
//! An input is a list of patches on files of zeros, since headers stand 4 KiB apart: a byte of flags, then patches of
//! segment and block (u8: 2 bits, 6 bits), place in the block / 8 (u16), size (u16), bytes. A patch of size 0 sets the
//! length of the segment's file to the end of that block.

use std::collections::BTreeMap;

use ringmain_core::crc::crc32c;
use ringmain_core::extent::{EXTENT_HEADER_BYTES, ExtentHeader, decode_directory, encode_directory};
use ringmain_core::ids::{Offset, SegmentSequence};
use ringmain_core::inspect::{Expected, Found, FoundBody, OffsetCheck, SegmentWalk, run};
use ringmain_core::limits::DISK_BLOCK_BYTES;
use ringmain_core::recover::{ReadError, SegmentSource, recover};

use super::footer::LOG_ID;
use super::input::{Input, fix_header, put_u32, u32_at};

/// Small, so that inputs are.
pub const SEGMENT_BYTES: u64 = (BLOCKS * DISK_BLOCK_BYTES) as u64;
const BLOCKS: usize = 16;

/// Mend the CRCs of headers.
const MEND_HEADERS: u8 = 1;
/// Mend the CRCs of directories and checkpoints.
const MEND_DIRECTORIES: u8 = 2;
/// Mend the CRCs of runs.
const MEND_RUNS: u8 = 4;
/// Make each extent name the one before it.
const MEND_CHAIN: u8 = 8;

/// Files in memory.
#[derive(Clone)]
pub struct Files {
    files: BTreeMap<SegmentSequence, Vec<u8>>,
    names: Vec<SegmentSequence>,
}

impl Files {
    pub fn new(files: BTreeMap<u64, Vec<u8>>) -> Self {
        let files: BTreeMap<_, _> = files.into_iter().map(|(name, bytes)| (SegmentSequence(name), bytes)).collect();
        Self { names: files.keys().copied().collect(), files }
    }
}

impl SegmentSource for Files {
    fn segments(&self) -> &[SegmentSequence] {
        &self.names
    }

    fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError> {
        Ok(self.files[&segment].len() as u64)
    }

    fn read(&mut self, segment: SegmentSequence, place: u64, into: &mut [u8]) -> Result<usize, ReadError> {
        assert!(into.len() as u64 <= SEGMENT_BYTES, "a read of {} bytes was asked for", into.len());
        let file = &self.files[&segment];
        let from = (place as usize).min(file.len());
        let bytes = into.len().min(file.len() - from);
        into[..bytes].copy_from_slice(&file[from..from + bytes]);
        Ok(bytes)
    }
}

/// The files that an input describes.
pub fn files_of(data: &[u8]) -> Files {
    let mut input = Input(data);
    let mend = input.u8();
    let mut files: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    while !input.is_empty() {
        let which = input.u8();
        let (segment, block) = (u64::from(which >> 6), usize::from(which & 63) % BLOCKS);
        let at = usize::from(input.u16()) * 8 % DISK_BLOCK_BYTES;
        let size = usize::from(input.u16());
        let file = files.entry(segment).or_insert_with(|| vec![0; SEGMENT_BYTES as usize]);
        if size == 0 {
            file.resize((block + 1) * DISK_BLOCK_BYTES - at, 0);
            continue;
        }
        let bytes = input.bytes(size.min(DISK_BLOCK_BYTES - at));
        let from = block * DISK_BLOCK_BYTES + at;
        if let Some(into) = file.get_mut(from..from + bytes.len()) {
            into.copy_from_slice(bytes);
        }
    }
    let mut previous = 0;
    for file in files.values_mut() {
        previous = mend_file(file, mend, previous);
    }
    Files::new(files)
}

/// Mends the headers of a file, which all have their own magic; gives the CRC of the last extent's header.
fn mend_file(file: &mut [u8], mend: u8, mut previous: u32) -> u32 {
    for at in (0..file.len()).step_by(DISK_BLOCK_BYTES) {
        let Some(magic) = file.get(at..at + 4) else { break };
        let is_extent = magic == b"RMex";
        if magic == b"RMsg" && mend & MEND_CHAIN != 0 {
            put_u32(&mut file[at..], 40, previous);
        }
        if is_extent {
            if mend & MEND_CHAIN != 0 {
                put_u32(&mut file[at..], 28, previous);
            }
            mend_extent(&mut file[at..], mend);
        }
        if magic_is_ours(&file[at..]) && mend & MEND_HEADERS != 0 {
            fix_header(&mut file[at..]);
        }
        if is_extent {
            previous = u32_at(&file[at..], 60);
        }
    }
    previous
}

fn magic_is_ours(bytes: &[u8]) -> bool {
    matches!(&bytes[..4], b"RMsg" | b"RMex" | b"RMpg" | b"RMtr")
}

fn mend_extent(extent: &mut [u8], mend: u8) {
    let bytes = u32_at(extent, 40) as usize;
    let end = EXTENT_HEADER_BYTES.saturating_add(bytes);
    let Some(directory) = extent.get(EXTENT_HEADER_BYTES..end) else { return };
    if mend & MEND_DIRECTORIES != 0 {
        let crc = crc32c(directory);
        put_u32(extent, 44, crc);
        fix_header(extent);
    }
    if mend & MEND_RUNS == 0 {
        return;
    }
    let Ok(header) = ExtentHeader::decode(extent) else { return };
    let Ok(mut listed) = decode_directory(&extent[EXTENT_HEADER_BYTES..end], &header) else { return };
    for run in &mut listed.runs {
        let from = run.place as usize;
        if let Some(stored) = extent.get(from..from + run.stored_bytes as usize) {
            run.crc = crc32c(stored);
        }
    }
    let mended = encode_directory(&listed.runs, &listed.producers);
    if mended.len() == bytes {
        let crc = crc32c(&mended);
        extent[EXTENT_HEADER_BYTES..end].copy_from_slice(&mended);
        put_u32(extent, 44, crc);
        fix_header(extent);
    }
}

/// Recovers the files that `data` describes.
pub fn run(data: &[u8]) {
    let mut files = files_of(data);
    walk(&mut files);
    let Ok(recovered) = recover(&mut files, LOG_ID, SEGMENT_BYTES) else { return };
    assert!(recovered.synced <= recovered.flushed);
    assert!(recovered.next_incarnation > recovered.last_incarnation);
    for partition in recovered.partitions.values() {
        assert!(partition.resumes_at(recovered.epoch) >= partition.end);
    }
    for segment in &recovered.remove {
        assert!(files.segments().contains(segment));
    }
    // Recovery changes nothing, so it comes to the same again.
    let again = recover(&mut files, LOG_ID, SEGMENT_BYTES).expect("it went well before");
    assert_eq!(again.partitions, recovered.partitions);
    assert_eq!((again.flushed, again.next, again.cases), (recovered.flushed, recovered.next, recovered.cases));
}

/// Walks all segments as `ringmain dump` does, and into each run.
fn walk(files: &mut Files) {
    let mut offsets = OffsetCheck::default();
    let mut before = None;
    for segment in files.segments().to_vec() {
        let expected = Expected { log_id: Some(LOG_ID), segment_bytes: Some(SEGMENT_BYTES), end: None, before };
        let mut walk = SegmentWalk::new(files, segment, expected).expect("memory can be read");
        let mut steps = 0;
        while let Some(found) = walk.advance().expect("memory can be read") {
            steps += 1;
            assert!(steps < 1000, "the walk does not end");
            let Found::Extent(extent) = found else { continue };
            let FoundBody::Runs(runs) = &extent.body else { continue };
            for entry in runs {
                offsets.run(extent.header.kind, entry, Offset(0));
                let Some(stored) = walk.run_bytes(extent.place, entry).expect("memory can be read") else { continue };
                let _ = run::check_stored(entry, stored);
                if let Ok(raw) = run::raw(entry, stored) {
                    assert!(run::batches(entry, &raw).count() <= raw.len() / 96 + 2);
                }
            }
        }
        before = walk.end();
    }
}

/// The input that describes `files`: patches of what is not zero.
pub fn describe(files: &BTreeMap<u64, Vec<u8>>, mend: u8) -> Vec<u8> {
    let mut out = vec![mend];
    let mut patch = |segment: u64, block: usize, at: usize, bytes: &[u8]| {
        out.push((segment as u8) << 6 | block as u8);
        out.extend((at as u16 / 8).to_le_bytes());
        out.extend((bytes.len() as u16).to_le_bytes());
        out.extend(bytes);
    };
    for (&segment, file) in files {
        for (number, block) in file.chunks(DISK_BLOCK_BYTES).enumerate() {
            let words: Vec<bool> = block.chunks(8).map(|word| word.iter().any(|byte| *byte != 0)).collect();
            let mut at = 0;
            while let Some(from) = (at..words.len()).find(|word| words[*word]) {
                // A patch ends where 3 words are zero: a new one costs five bytes.
                let ends = |word: &usize| (*word..word + 3).all(|word| !words.get(word).copied().unwrap_or(false));
                let to = (from..=words.len()).find(ends).unwrap_or(words.len());
                patch(segment, number, from * 8, &block[from * 8..(to * 8).min(block.len())]);
                at = to;
            }
        }
        if file.len() as u64 != SEGMENT_BYTES {
            patch(segment, file.len() / DISK_BLOCK_BYTES - 1, 0, &[]);
        }
    }
    out
}
