//! From lines to batches: splits off the key, chooses the partition, copies each record once into the batch of its
//! partition.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use memchr::memmem::Finder;
use ringmain_core::ids::{PartitionKey, TopicId};
use ringmain_wire::batch_builder::{BatchBuilder, PushError};
use ringmain_wire::record::NewRecord;
use ringmain_wire::tag::partition_of_key;

/// Bytes that batches not finished yet may hold together: with keys there is one for each partition.
const OPEN_BYTES_MAX: usize = 32 * 1024 * 1024;

/// A finished batch.
#[derive(Debug)]
pub struct ReadyBatch {
    /// Where it goes.
    pub partition: u32,
    /// The encoded batch.
    pub bytes: Bytes,
    /// Its records.
    pub records: u64,
    /// Bytes of their keys and values.
    pub payload_bytes: u64,
}

/// How lines become records of a topic.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The topic.
    pub topic: TopicId,
    /// Its partitions.
    pub partitions: u32,
    /// All records go here.
    pub partition: Option<u32>,
    /// Text between key and value.
    pub key_separator: Option<String>,
    /// The tag of all records.
    pub tag: Option<Arc<str>>,
    /// Size from which a batch is full.
    pub batch_bytes: usize,
}

/// Owns the open batches.
pub struct Batcher {
    routing: Routing,
    separator: Option<Finder<'static>>,
    /// Open batches by partition; empty ones stay for their memory.
    open: BTreeMap<u32, Open>,
    open_bytes: usize,
    /// The partition whose turn it is for records without key: it changes with each batch, not with each record.
    turn: u32,
}

struct Open {
    builder: BatchBuilder,
    payload_bytes: u64,
    bytes: usize,
}

impl Batcher {
    pub fn new(routing: Routing) -> Self {
        let separator = routing.key_separator.as_ref().map(|text| Finder::new(text.as_bytes()).into_owned());
        Self { routing, separator, open: BTreeMap::new(), open_bytes: 0, turn: 0 }
    }

    /// Adds a line; `ready` gets the batches that are full because of it.
    pub fn push(
        &mut self,
        line: &[u8],
        timestamp_ms: i64,
        ready: &mut impl FnMut(ReadyBatch),
    ) -> Result<(), PushError> {
        let split = self.separator.as_ref().and_then(|separator| separator.find(line).map(|at| (at, separator)));
        let (key, value) = match split {
            Some((at, separator)) => (Some(&line[..at]), &line[at + separator.needle().len()..]),
            None => (None, line),
        };
        let tag = self.routing.tag.clone();
        let record = NewRecord { key, value: Some(value), tag: tag.as_deref(), timestamp_ms, ..NewRecord::default() };
        let by_turn = self.routing.partition.is_none() && key.is_none();
        let mut partition = match (self.routing.partition, key) {
            (Some(partition), _) => partition,
            (None, Some(key)) => partition_of_key(key, self.routing.partitions),
            (None, None) => self.turn,
        };
        if let Err(PushError::Full) = self.put(partition, &record)? {
            self.finish(partition, ready);
            if by_turn {
                self.turn = (self.turn + 1) % self.routing.partitions;
                partition = self.turn;
                // With keys, the next partition may have an open batch that is full as well.
                if self.put(partition, &record)?.is_ok() {
                    return Ok(());
                }
                self.finish(partition, ready);
            }
            self.put(partition, &record)??;
        }
        if self.open_bytes > OPEN_BYTES_MAX {
            self.flush(ready);
        }
        Ok(())
    }

    /// Gives all that is open to `ready`.
    pub fn flush(&mut self, ready: &mut impl FnMut(ReadyBatch)) {
        let partitions: Vec<u32> = self.open.keys().copied().collect();
        for partition in partitions {
            self.finish(partition, ready);
        }
        self.turn = (self.turn + 1) % self.routing.partitions;
    }

    /// Whether there is nothing to flush.
    pub fn is_empty(&self) -> bool {
        self.open_bytes == 0
    }

    /// Puts a record into its batch: the inner result says that the batch is full, the outer one that no batch takes it.
    fn put(&mut self, partition: u32, record: &NewRecord<'_>) -> Result<Result<(), PushError>, PushError> {
        let Routing { topic, batch_bytes, .. } = self.routing;
        let open = self.open.entry(partition).or_insert_with(|| Open {
            builder: BatchBuilder::with_bytes_max(PartitionKey { topic, partition }, batch_bytes),
            payload_bytes: 0,
            bytes: 0,
        });
        match open.builder.push(record) {
            Ok(()) => {
                open.payload_bytes += (record.key.map_or(0, <[u8]>::len) + record.value.map_or(0, <[u8]>::len)) as u64;
                let bytes = open.builder.batch_bytes();
                self.open_bytes += bytes - open.bytes;
                open.bytes = bytes;
                Ok(Ok(()))
            }
            Err(PushError::Full) => Ok(Err(PushError::Full)),
            Err(error) => Err(error),
        }
    }

    fn finish(&mut self, partition: u32, ready: &mut impl FnMut(ReadyBatch)) {
        let Some(open) = self.open.get_mut(&partition) else { return };
        if open.builder.is_empty() {
            return;
        }
        self.open_bytes -= open.bytes;
        open.bytes = 0;
        let records = open.builder.record_count() as u64;
        let payload_bytes = std::mem::take(&mut open.payload_bytes);
        ready(ReadyBatch { partition, bytes: open.builder.finish(), records, payload_bytes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringmain_core::batch::{BatchHeader, check_crc};
    use ringmain_wire::batch::BatchView;

    fn routing() -> Routing {
        Routing { topic: TopicId(7), partitions: 3, partition: None, key_separator: None, tag: None, batch_bytes: 4096 }
    }

    type KeyAndValue = (Option<Vec<u8>>, Vec<u8>);

    /// Partition, key and value of all records, batch by batch.
    fn run(routing: Routing, lines: &[Vec<u8>]) -> Vec<(u32, Vec<KeyAndValue>)> {
        let mut batches = Vec::new();
        let mut batcher = Batcher::new(routing);
        let mut ready = |batch: ReadyBatch| batches.push(batch);
        for line in lines {
            batcher.push(line, 5, &mut ready).unwrap();
        }
        batcher.flush(&mut ready);
        assert!(batcher.is_empty());
        batcher.flush(&mut ready);
        let decode = |batch: ReadyBatch| {
            let header = BatchHeader::parse(&batch.bytes).unwrap();
            check_crc(&header, &batch.bytes).unwrap();
            assert_eq!(header.key, PartitionKey { topic: TopicId(7), partition: batch.partition });
            let view = BatchView::parse(&batch.bytes, &header).unwrap();
            let owned = |bytes: &[u8]| bytes.to_vec();
            let records: Vec<_> =
                view.records().map(|record| (record.key.map(owned), record.value.map(owned).unwrap())).collect();
            assert_eq!(records.len() as u64, batch.records);
            let bytes = records.iter().map(|(key, value)| key.as_ref().map_or(0, Vec::len) + value.len());
            assert_eq!(bytes.sum::<usize>() as u64, batch.payload_bytes);
            (batch.partition, records)
        };
        batches.into_iter().map(decode).collect()
    }

    fn lines(count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|number| format!("line {number} {}", "x".repeat(100)).into_bytes()).collect()
    }

    #[test]
    fn without_key_batches_go_to_partitions_in_turn_and_lines_keep_their_order() {
        let lines = lines(300);
        let batches = run(routing(), &lines);
        let partitions: Vec<_> = batches.iter().map(|(partition, _)| *partition).collect();
        assert_eq!(partitions[..5], [0, 1, 2, 0, 1]);
        let values: Vec<_> = batches.into_iter().flat_map(|(_, records)| records).map(|(_, value)| value).collect();
        assert_eq!(values, lines);
    }

    #[test]
    fn a_chosen_partition_gets_everything() {
        let batches =
            run(Routing { partition: Some(2), key_separator: Some("=".to_owned()), ..routing() }, &lines(100));
        assert!(batches.len() > 2 && batches.iter().all(|(partition, _)| *partition == 2));
    }

    #[test]
    fn a_key_ends_at_the_first_separator_and_decides_the_partition() {
        let separator = Some("::".to_owned());
        let input = [&b"k1::a::b"[..], b"k2::", b"::v", b"no key", b"k1::c"].map(<[u8]>::to_vec);
        let batches = run(Routing { key_separator: separator, ..routing() }, &input);
        let mut seen = 0;
        for (partition, records) in batches {
            for (key, value) in records {
                seen += 1;
                match key.as_deref() {
                    Some(key) => {
                        assert_eq!(partition, partition_of_key(key, 3));
                        let expected: &[&[u8]] = match key {
                            b"k1" => &[b"a::b", b"c"],
                            b"k2" => &[b""],
                            _ => &[b"v"],
                        };
                        assert!(expected.contains(&value.as_slice()), "{key:?} {value:?}");
                    }
                    None => assert_eq!((partition, value.as_slice()), (0, &b"no key"[..])),
                }
            }
        }
        assert_eq!(seen, 5);
    }

    #[test]
    fn a_record_larger_than_a_batch_goes_alone_and_a_key_too_large_is_refused() {
        let batches = run(routing(), &[vec![b'a'; 10], vec![b'b'; 100_000], vec![b'c'; 10]]);
        assert_eq!(batches.len(), 3);
        let mut batcher = Batcher::new(Routing { key_separator: Some("=".to_owned()), ..routing() });
        let line = [vec![b'k'; 65 * 1024], b"=v".to_vec()].concat();
        let error = batcher.push(&line, 0, &mut |_| {}).unwrap_err();
        assert!(matches!(error, PushError::TooLarge { part: "key", .. }), "{error}");
    }
}
