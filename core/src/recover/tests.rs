mod cases;
mod damage;
mod retention;
mod writer;

use std::collections::BTreeMap;

use super::*;
use crate::index::SegmentIndex;
use writer::{LOG_ID, SEGMENT_BYTES, Writer};

fn ends(recovered: &Recovered) -> BTreeMap<PartitionKey, Offset> {
    recovered.partitions.iter().map(|(key, partition)| (*key, partition.end)).collect()
}

#[test]
fn a_log_over_several_segments_and_lives_comes_back_whole() {
    let mut writer = Writer::new();
    for round in 0..40 {
        writer.data(&[(round % 3, 5, 3000), (3 + round % 2, 2, 9000)]);
    }
    assert!(writer.tail.open_segment().unwrap().segment.0 >= 2);
    let expected = writer.all_ends();
    let mut writer = Writer::start(writer.files, 0);
    assert_eq!(writer.all_ends(), expected);
    for _ in 0..30 {
        writer.data(&[(1, 5, 10_000)]);
    }
    let expected = writer.all_ends();
    let recovered = writer.files.recover().unwrap();
    assert_eq!(ends(&recovered), expected);
    assert_eq!(recovered.last_incarnation, Incarnation(2));
    assert_eq!(recovered.next_incarnation, Incarnation(3));
    assert!(recovered.lost.is_empty() && recovered.remove.is_empty() && !recovered.ends_uncertain);
    assert_eq!(recovered.flushed, writer.tail.flushed());
    assert!(recovered.synced <= writer.tail.synced());
    let newest = recovered.index.segments().last().unwrap();
    assert!(matches!(recovered.index.get(newest), Some(SegmentIndex::Full(_))));
}

#[test]
fn a_raised_epoch_moves_every_partition_on_once() {
    let mut writer = Writer::new();
    writer.data(&[(0, 5, 100), (1, 7, 100)]);
    writer.sync();
    let writer = Writer::start(writer.files, 1);
    let jumped = writer.all_ends();
    assert_eq!(jumped[&PartitionKey::new(1, 0)], Offset(5 + EPOCH_OFFSETS));
    // Nothing was written in epoch 1: the next start goes on at the same offsets.
    let writer = Writer::start(writer.files, 0);
    assert_eq!(writer.all_ends(), jumped);
    let writer = Writer::start(writer.files, 2);
    assert_eq!(writer.all_ends()[&PartitionKey::new(1, 1)], Offset(7 + 3 * EPOCH_OFFSETS));
}

#[test]
fn recovery_reads_of_a_sealed_segment_only_its_end() {
    struct Counted(writer::Files, BTreeMap<SegmentSequence, u64>);
    impl SegmentSource for Counted {
        fn segments(&self) -> &[SegmentSequence] {
            self.0.segments()
        }
        fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError> {
            self.0.file_bytes(segment)
        }
        fn read(&mut self, segment: SegmentSequence, place: u64, into: &mut [u8]) -> Result<usize, ReadError> {
            *self.1.entry(segment).or_default() += into.len() as u64;
            self.0.read(segment, place, into)
        }
    }
    let mut writer = Writer::new();
    for _ in 0..60 {
        writer.blocks(3);
    }
    let mut source = Counted(writer.files, BTreeMap::new());
    let recovered = recover(&mut source, LOG_ID, SEGMENT_BYTES).unwrap();
    let newest = recovered.index.segments().last().unwrap();
    assert!(newest.0 > 3);
    for (segment, read) in source.1.into_iter().filter(|(segment, _)| *segment != newest) {
        assert!(read <= 2 * 4096, "{read} bytes of segment {segment}");
    }
}

#[test]
fn a_log_of_another_shard_version_or_size_is_refused() {
    let mut writer = Writer::new();
    writer.blocks(1);
    assert!(matches!(
        recover(&mut writer.files.clone(), LogId(1), SEGMENT_BYTES),
        Err(RecoverError::ForeignLog { .. })
    ));
    assert!(matches!(
        recover(&mut writer.files.clone(), LOG_ID, 2 * SEGMENT_BYTES),
        Err(RecoverError::SegmentBytes { .. })
    ));
    // A whole header of version 3 where the next extent belongs: cutting there would lose what a later version wrote.
    let place = writer.written.last().unwrap().end() as usize;
    let mut header = writer.written.last().unwrap().bytes[..64].to_vec();
    header[4] = 3;
    let crc = crate::crc::crc32c(&header[..60]);
    header[60..].copy_from_slice(&crc.to_le_bytes());
    writer.files.newest()[place..place + 64].copy_from_slice(&header);
    assert!(matches!(writer.files.recover(), Err(RecoverError::Version { version: 3, .. })));
}

#[test]
fn a_failed_read_is_not_taken_for_damage() {
    struct Failing(writer::Files);
    impl SegmentSource for Failing {
        fn segments(&self) -> &[SegmentSequence] {
            self.0.segments()
        }
        fn file_bytes(&mut self, segment: SegmentSequence) -> Result<u64, ReadError> {
            self.0.file_bytes(segment)
        }
        fn read(&mut self, _: SegmentSequence, _: u64, _: &mut [u8]) -> Result<usize, ReadError> {
            Err(ReadError::Failed("permission denied".into()))
        }
    }
    let writer = Writer::new();
    let result = recover(&mut Failing(writer.files), LOG_ID, SEGMENT_BYTES);
    assert!(matches!(result, Err(RecoverError::Read { .. })));
}
