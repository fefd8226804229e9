use proptest::prelude::*;

use super::*;
use crate::crc::crc32c;

fn header() -> ExtentHeader {
    ExtentHeader {
        kind: ExtentKind::Data,
        log_id: LogId(0x0102_0304_0506_0708),
        sequence: ExtentSequence(77),
        incarnation: Incarnation(3),
        previous_header_crc: 0xfeed_beef,
        synced_position: Position(1 << 40),
        directory_bytes: 100,
        directory_crc: 5,
        extent_bytes: 8192,
        run_count: 1,
        epoch: Epoch(2),
    }
}

/// Runs of the given sizes, one for each partition, every other one with two batches of a producer, with the header that
/// belongs to them.
fn extent_of(sizes: &[u32]) -> (Directory, Vec<u8>, ExtentHeader) {
    let layout = Layout::of_runs(sizes, sizes.len().div_ceil(2) * 2);
    let runs: Vec<RunEntry> = sizes
        .iter()
        .zip(&layout.run_places)
        .enumerate()
        .map(|(index, (&bytes, &place))| RunEntry {
            key: PartitionKey::new(index as u64 / 3, index as u32 % 3),
            base_offset: Offset(index as u64),
            next_offset: Offset(index as u64 + 5),
            epoch: Epoch(1),
            place,
            stored_bytes: bytes,
            raw_bytes: bytes,
            crc: 9,
            batches: 2,
            codec: 0,
            max_append_time_ms: -7,
        })
        .collect();
    let produced = |number: usize, at: u64| ProducerEntry {
        run: number as u32,
        batch: ProducerBatch {
            producer_id: 70 + at,
            producer_epoch: 2,
            base_sequence: u32::MAX,
            record_count: 2,
            base_offset: Offset(number as u64 + at * 2),
            epoch: Epoch(1),
            crc: 6,
        },
    };
    let producers = (0..runs.len()).step_by(2).flat_map(|number| [produced(number, 0), produced(number, 1)]);
    let producers: Vec<ProducerEntry> = producers.collect();
    let directory = encode_directory(&runs, &producers);
    let header = ExtentHeader {
        directory_bytes: layout.directory_bytes,
        directory_crc: crc32c(&directory),
        extent_bytes: layout.extent_bytes,
        run_count: runs.len() as u32,
        ..header()
    };
    (Directory { runs, producers }, directory, header)
}

#[test]
fn a_header_reads_back_and_any_flipped_bit_is_noticed() {
    let bytes = header().encode();
    assert_eq!(ExtentHeader::decode(&bytes), Ok(header()));
    assert_eq!(header().header_crc().to_le_bytes(), bytes[60..]);
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes;
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(ExtentHeader::decode(&damaged).is_err(), "bit {bit}");
    }
}

#[test]
fn sizes_that_do_not_fit_each_other_are_refused() {
    let refused = |change: fn(&mut ExtentHeader)| {
        let mut header = header();
        change(&mut header);
        ExtentHeader::decode(&header.encode()).unwrap_err()
    };
    assert_eq!(refused(|header| header.extent_bytes = 0), ExtentError::Field("extent_bytes"));
    assert_eq!(refused(|header| header.extent_bytes = 4097), ExtentError::Field("extent_bytes"));
    assert_eq!(refused(|header| header.extent_bytes = 8 << 20), ExtentError::Field("extent_bytes"));
    assert_eq!(refused(|header| header.directory_bytes = 8192 - 63), ExtentError::Field("directory_bytes"));
    assert_eq!(refused(|header| header.run_count = 0), ExtentError::Field("run_count"));
    assert_eq!(refused(|header| header.run_count = u32::MAX), ExtentError::Field("run_count"));
    assert_eq!(refused(|header| header.kind = ExtentKind::Checkpoint), ExtentError::Field("run_count"));
}

#[test]
fn archived_sizes_are_part_of_the_format() {
    assert_eq!(directory::directory_bytes(0, 0), 16);
    assert_eq!(directory::directory_bytes(1, 0), 77);
    assert_eq!(directory::directory_bytes(1, 1), 111);
}

#[test]
fn a_small_extent_fits_one_disk_block() {
    assert_eq!(Layout::of_runs(&[1200, 1200, 1200], 3).extent_bytes, 4096);
    assert_eq!(Layout::of_checkpoint(4032).extent_bytes, 4096);
    assert_eq!(Layout::of_checkpoint(4033).extent_bytes, 8192);
}

#[test]
fn the_overhead_of_a_run_is_as_stated() {
    let one = Layout::of_runs(&[104], 0);
    let many = Layout::of_runs(&vec![104; 1000], 0);
    let grown = many.run_places[999] - one.run_places[0];
    assert!(grown as usize <= 999 * (104 + Layout::run_overhead_bytes()), "{grown}");
}

#[test]
fn entries_that_overlap_or_leave_the_extent_are_refused() {
    let refused = |change: fn(&mut Vec<RunEntry>)| {
        let (mut listed, _, mut header) = extent_of(&[100, 200, 300]);
        change(&mut listed.runs);
        let directory = encode_directory(&listed.runs, &listed.producers);
        header.directory_crc = crc32c(&directory);
        match decode_directory(&directory, &header).unwrap_err() {
            ExtentError::Run { index, what } => (index, what),
            other => panic!("{other}"),
        }
    };
    assert_eq!(refused(|runs| runs[0].place = 64).0, 0);
    assert_eq!(refused(|runs| runs[1].place -= 8), (1, "overlaps what stands before it"));
    assert_eq!(refused(|runs| runs[2].place += 4), (2, "is not aligned"));
    assert_eq!(refused(|runs| runs[2].stored_bytes = u32::MAX), (2, "reaches past the extent"));
    assert_eq!(refused(|runs| runs[1].next_offset = runs[1].base_offset), (1, "is empty"));
    assert_eq!(refused(|runs| runs[1].raw_bytes += 1), (1, "is not compressed and yet has another raw size"));
    assert_eq!(refused(|runs| runs[2].key = runs[0].key), (2, "is out of order"));
}

#[test]
fn batches_of_producers_that_are_not_in_their_run_are_refused() {
    let refused = |change: fn(&mut Vec<ProducerEntry>)| {
        let (mut listed, _, mut header) = extent_of(&[100, 200, 300]);
        change(&mut listed.producers);
        let directory = encode_directory(&listed.runs, &listed.producers);
        header.directory_crc = crc32c(&directory);
        match decode_directory(&directory, &header).unwrap_err() {
            ExtentError::Producer { index, what } => (index, what),
            other => panic!("{other}"),
        }
    };
    assert_eq!(refused(|producers| producers[3].run = 3), (3, "is of no run"));
    assert_eq!(refused(|producers| producers[3].batch.base_offset.0 += 2), (3, "lies outside of its run"));
    assert_eq!(refused(|producers| producers[2].batch.base_offset.0 -= 1), (2, "lies outside of its run"));
    assert_eq!(refused(|producers| producers.swap(0, 1)), (1, "is out of order"));
    assert_eq!(refused(|producers| producers.swap(1, 2)), (2, "is out of order"));
    let impossible = "has no producer or an impossible number of records";
    assert_eq!(refused(|producers| producers[0].batch.producer_id = 0), (0, impossible));
    assert_eq!(refused(|producers| producers[0].batch.record_count = 65_537), (0, impossible));
}

proptest! {
    #[test]
    fn a_directory_reads_back(sizes in proptest::collection::vec(1..5000u32, 1..200)) {
        let (listed, directory, header) = extent_of(&sizes);
        prop_assert_eq!(directory.len(), header.directory_bytes as usize);
        prop_assert_eq!(decode_directory(&directory, &header).unwrap(), listed);
    }

    #[test]
    fn damage_under_a_right_crc_never_panics_nor_leaves_the_extent(
        sizes in proptest::collection::vec(1..5000u32, 1..20),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (_, mut directory, mut header) = extent_of(&sizes);
        for (at, value) in damage {
            let at = at.index(directory.len());
            directory[at] = value;
        }
        header.directory_crc = crc32c(&directory);
        for run in decode_directory(&directory, &header).unwrap_or_default().runs {
            prop_assert!(run.place as usize + run.stored_bytes as usize <= header.extent_bytes as usize);
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = ExtentHeader::decode(&bytes);
        let header = ExtentHeader { directory_bytes: bytes.len() as u32, directory_crc: crc32c(&bytes), ..header() };
        let _ = decode_directory(&bytes, &header);
    }
}
