//! Reading everything back and comparing it with the ledger.

use std::collections::{BTreeMap, HashMap};

use ringmain_core::ids::Durability;
use ringmain_wire::client::{Client, ConsumerConfig, ConsumerEvent, StartAt};
use ringmain_wire::fetch::GapReason;

use super::LIMIT;
use super::ledger::{Ack, Ledger, Partition, RecordId};
use super::load::impatient_client;

/// A partition as a consumer sees it.
#[derive(Clone, Debug, Default)]
pub struct Read {
    /// Records by offset.
    pub records: BTreeMap<u64, RecordId>,
    /// Gaps that were told: from, to.
    pub gaps: Vec<(u64, u64)>,
    /// The log end when the reading began.
    pub log_end: u64,
    /// The owner's epoch.
    pub epoch: u32,
}

/// What the death of the broker may have taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MayMiss {
    /// Nothing that was acked.
    Nothing,
    /// What was acked `memory` and not flushed since: the arena is gone.
    Memory,
    /// Anything: the log of a shard is gone.
    Log,
}

/// Reads all partitions of the ledger and holds them against it. What is missing by right is taken out of the ledger.
/// Gives what was read, by partition.
pub async fn check(broker: &str, ledger: &Ledger, may_miss: MayMiss) -> HashMap<Partition, Read> {
    let client = impatient_client(broker).await;
    let mut topics: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for (topic, partition) in ledger.partitions() {
        topics.entry(topic).or_default().push(partition);
    }
    let mut all = HashMap::new();
    for (topic, partitions) in topics {
        for (partition, read) in read_topic(&client, &topic, &partitions).await {
            let key = (topic.clone(), partition);
            compare(&key, ledger, &read, may_miss);
            all.insert(key, read);
        }
    }
    all
}

/// Reads partitions of a topic to the ends that they have now. Asserts that offsets are dense but for gaps that are told,
/// and that each record is whole.
pub async fn read_topic(client: &Client, topic: &str, partitions: &[u32]) -> BTreeMap<u32, Read> {
    let offsets = client.offsets(topic).await.unwrap();
    let mut reads = BTreeMap::new();
    let mut next = HashMap::new();
    for ends in offsets.partitions.iter().filter(|ends| partitions.contains(&ends.partition)) {
        assert!(ends.code.is_ok(), "{topic} {ends:?}");
        assert!(ends.log_start <= ends.synced_end, "{topic} {ends:?}");
        assert!(ends.synced_end <= ends.flushed_end && ends.flushed_end <= ends.log_end, "{topic} {ends:?}");
        let (log_end, epoch) = (ends.log_end.get(), ends.leader_epoch.get());
        reads.insert(ends.partition, Read { log_end, epoch, ..Read::default() });
        next.insert(ends.partition, ends.log_start.get());
    }
    assert_eq!(reads.len(), partitions.len(), "{topic} lacks partitions");
    let starts = partitions.iter().map(|&partition| (partition, StartAt::Earliest)).collect();
    let mut consumer = client.consumer(topic, starts, ConsumerConfig::default()).await.unwrap();
    while reads.iter().any(|(partition, read)| next[partition] < read.log_end) {
        let event = tokio::time::timeout(LIMIT, consumer.next()).await;
        let event = event.unwrap_or_else(|_| panic!("{topic}: nothing came; at {next:?} of {reads:?}")).unwrap();
        match event {
            ConsumerEvent::Batch(batch) => {
                let expected = next.get_mut(&batch.partition).unwrap();
                let read = reads.get_mut(&batch.partition).unwrap();
                for record in batch.records() {
                    let what = format!("{topic}/{} offset {}", batch.partition, record.offset);
                    assert_eq!(record.offset.get(), *expected, "{what}: {expected} was to come");
                    let id = RecordId::of_value(record.value.unwrap());
                    let id = id.unwrap_or_else(|| panic!("{what}: the record is not as it was sent"));
                    read.records.insert(*expected, id);
                    *expected += 1;
                }
            }
            ConsumerEvent::Gap { partition, from, to, reason } => {
                let expected = next.get_mut(&partition).unwrap();
                assert_eq!(from.get(), *expected, "{topic}/{partition}: a gap {from}..{to} starts elsewhere");
                assert!(to > from, "{topic}/{partition}: a gap {from}..{to}");
                assert_eq!(reason, GapReason::LostMemory, "{topic}/{partition}: {from}..{to}");
                reads.get_mut(&partition).unwrap().gaps.push((from.get(), to.get()));
                *expected = to.get();
            }
            ConsumerEvent::CaughtUp { .. } => {}
            event @ (ConsumerEvent::BadBatch { .. } | ConsumerEvent::OutOfRange { .. }) => panic!("{topic}: {event:?}"),
        }
    }
    for (partition, read) in &reads {
        assert_eq!(next[partition], read.log_end, "{topic}/{partition}: read past the end");
    }
    reads
}

fn compare(partition: &Partition, all: &Ledger, read: &Read, may_miss: MayMiss) {
    all.with(partition, |ledger| {
        let what = format!("{partition:?}");
        // No record that was not sent; none twice; the order of each producer.
        let mut last: HashMap<u32, u64> = HashMap::new();
        for (offset, id) in &read.records {
            let sent = ledger.sent.get(&id.producer).copied().unwrap_or(0);
            assert!(id.number < sent, "{what} offset {offset}: {id:?} was never sent");
            if let Some(before) = last.insert(id.producer, id.number) {
                assert!(before < id.number, "{what} offset {offset}: {id:?} comes after number {before}");
            }
        }
        let mut lost = Vec::new();
        for (&offset, ack) in &ledger.acked {
            match read.records.get(&offset) {
                Some(id) => assert_eq!(*id, ack.id, "{what} offset {offset}: acked for another record"),
                None => {
                    if may_miss != MayMiss::Log {
                        let may = may_miss == MayMiss::Memory && ack.level == Durability::Memory;
                        assert!(may, "{what} offset {offset}: acked {ack:?} and not there");
                        assert!(offset >= ledger.flushed_end, "{what} offset {offset}: lost below the flushed end");
                    }
                    let in_gap = read.gaps.iter().any(|(from, to)| (*from..*to).contains(&offset));
                    assert!(in_gap, "{what} offset {offset}: lost and no gap tells: {:?}", read.gaps);
                    lost.push(offset);
                }
            }
        }
        // What is lost is a suffix of what was acked before.
        if let Some(first) = lost.first() {
            let behind = ledger.acked.range(first..).count();
            assert_eq!(behind, lost.len(), "{what}: acked records behind the lost offset {first} are there");
        }
        all.note_lost(lost.len());
        for offset in &lost {
            ledger.acked.remove(offset);
        }
        assert!(
            read.log_end >= ledger.next_offset,
            "{what}: the log end {} is below {}, which was seen before",
            read.log_end,
            ledger.next_offset
        );
        if let Some(first) = lost.first() {
            assert!(read.log_end > lost[lost.len() - 1], "{what}: offsets from {first} would be given again");
        }
        // What has been seen must be there the next time.
        for (&offset, &id) in &read.records {
            ledger.acked.entry(offset).or_insert(Ack { id, level: Durability::Memory });
        }
        ledger.next_offset = read.log_end;
    });
}
