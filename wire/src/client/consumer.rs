//! The consumer: batches of some partitions of a topic, with everything that is not a batch told as an event.
//!
//! For each shard one task fetches ahead: while the application works on one answer the next is fetched and waits. The
//! position of a partition moves only by what a fetch has given, so that a lost connection costs nothing but time.
//! Compressed batches wait as they came; [`Consumer::next`] decompresses one pack or batch at a time.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ringmain_core::batch::BatchHeader;
use ringmain_core::codec::ALL_CODECS;
use ringmain_core::ids::{Offset, PartitionKey};
use ringmain_core::limits::FETCH_PARTITIONS_MAX;
use tokio::sync::mpsc;

use crate::batch::{BatchView, InvalidBatch};
use crate::client::error::ClientError;
use crate::client::fetcher::{Fetcher, FetcherShared, Position};
use crate::client::routes::{Routes, TopicRoute};
use crate::client::unpacking::{FetchedEvent, FetchedEvents, Unpacking};
use crate::fetch::{GapReason, Visibility};
use crate::offsets::Offsets;
use crate::record::RecordView;
use crate::tag::TagFilter;

/// Where to begin in a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartAt {
    /// At the first record kept.
    Earliest,
    /// Behind the last record there is now, as far as the visibility shows it.
    Latest,
    /// At this offset.
    Offset(Offset),
}

/// What and how to fetch.
#[derive(Clone, Debug)]
pub struct ConsumerConfig {
    /// What to see.
    pub visibility: Visibility,
    /// Only records with one of these tags; empty = all.
    pub tags: Vec<String>,
    /// Byte budget of one fetch.
    pub fetch_bytes: u32,
    /// An answer may wait until so much is there …
    pub bytes_min: u32,
    /// … or so long.
    pub wait_max: Duration,
    /// How long a failing partition is tried before `next` says so; then it is tried again.
    pub retry_for: Duration,
    /// Codecs in which stored packs and batches are taken, bit n for codec n: all, unless less is wanted for tests.
    pub codecs: u32,
}

impl Default for ConsumerConfig {
    fn default() -> Self {
        Self {
            visibility: Visibility::LogEnd,
            tags: Vec::new(),
            fetch_bytes: 1024 * 1024,
            bytes_min: 1,
            wait_max: Duration::from_millis(500),
            retry_for: Duration::from_secs(60),
            codecs: ALL_CODECS,
        }
    }
}

/// Ends of a partition, as of the answer they came with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionEnds {
    /// First offset kept.
    pub log_start: Offset,
    /// One past the last offset given.
    pub log_end: Offset,
    /// End of what completed writes cover.
    pub flushed_end: Offset,
    /// End of what fdatasyncs cover.
    pub synced_end: Offset,
}

/// What a consumer is told.
#[derive(Clone, Debug)]
pub enum ConsumerEvent {
    /// Records.
    Batch(ConsumedBatch),
    /// Offsets in `from..to` will never come.
    Gap {
        /// Which partition.
        partition: u32,
        /// First missing.
        from: Offset,
        /// One past the last missing.
        to: Offset,
        /// Why.
        reason: GapReason,
    },
    /// A batch came whose checksum or structure is wrong. It was passed over.
    BadBatch {
        /// Which partition.
        partition: u32,
        /// The position when it came; how far it would have reached can't be known.
        at: Offset,
        /// What is wrong.
        error: InvalidBatch,
    },
    /// The position was below the log start or past the log end; reading goes on at the nearer of the two.
    OutOfRange {
        /// Which partition.
        partition: u32,
        /// The position that is not there.
        asked: Offset,
        /// Where it goes on.
        now: Offset,
    },
    /// All that the partition had has been given. Comes once after the last of it, and again after more.
    CaughtUp {
        /// Which partition.
        partition: u32,
        /// The end.
        offset: Offset,
    },
}

/// A batch that was fetched, checked, with the records before the position left out.
#[derive(Clone, Debug)]
pub struct ConsumedBatch {
    /// Its partition.
    pub partition: u32,
    /// Ends of the partition when it was fetched.
    pub ends: PartitionEnds,
    /// Its header.
    pub header: BatchHeader,
    pub(crate) bytes: Bytes,
    pub(crate) from: Offset,
    /// Only records that pass, if there is one: a batch that its producer compressed comes whole when one of them passes.
    pub(crate) tags: Option<Arc<TagFilter>>,
}

impl ConsumedBatch {
    /// The batch as it was received, decompressed if it was compressed.
    #[must_use]
    pub const fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Its records, from the position at which it was fetched.
    pub fn records(&self) -> impl Iterator<Item = RecordView<'_>> {
        // It was valid when it was made and nobody has changed it; were it not, there would be no records.
        let view = BatchView::parse(&self.bytes, &self.header).ok();
        let records = view.into_iter().flat_map(|view| view.records()).skip_while(|record| record.offset < self.from);
        records.filter(|record| self.tags.as_ref().is_none_or(|tags| tags.passes(record)))
    }
}

/// Reads some partitions of one topic. When it is dropped, its tasks end.
pub struct Consumer {
    fetched: mpsc::Receiver<FetchedEvents>,
    events: VecDeque<Result<FetchedEvent, ClientError>>,
    unpacking: Option<Unpacking>,
}

impl Consumer {
    pub(crate) fn start(
        routes: Arc<Routes>,
        route: &Arc<TopicRoute>,
        offsets: &Offsets,
        partitions: Vec<(u32, StartAt)>,
        config: ConsumerConfig,
    ) -> Result<Self, ClientError> {
        let mut groups: HashMap<Option<(u32, u16)>, Vec<Position>> = HashMap::new();
        for (partition, start) in partitions {
            route.partition(partition)?;
            let key = PartitionKey { topic: route.topic.topic_id, partition };
            let offset = start_offset(start, partition, offsets, config.visibility)
                .ok_or_else(|| ClientError::Protocol(format!("offsets lack partition {partition}")))?;
            groups.entry(route.owner(partition)).or_default().push(Position::new(key, offset));
        }
        // One answer per fetcher may wait.
        let (events, fetched) = mpsc::channel(groups.len().max(1));
        let tags = (!config.tags.is_empty()).then(|| Arc::new(TagFilter::new(&config.tags)));
        let shared = Arc::new(FetcherShared { routes, topic: route.topic.name.clone(), config, tags, events });
        for positions in groups.into_values() {
            for positions in positions.chunks(FETCH_PARTITIONS_MAX) {
                Fetcher::start(Arc::clone(&shared), positions.to_vec());
            }
        }
        Ok(Self { fetched, events: VecDeque::new(), unpacking: None })
    }

    /// The next event. An error says that a partition could not be read: for good when it is not a [`ClientError::GaveUp`],
    /// else for `retry_for` so far. [`ClientError::Closed`] comes when no partition is left. May be dropped while it
    /// waits without losing anything.
    pub async fn next(&mut self) -> Result<ConsumerEvent, ClientError> {
        loop {
            if let Some(unpacking) = &mut self.unpacking {
                if let Some(event) = unpacking.next() {
                    return Ok(event);
                }
                self.unpacking = None;
            }
            match self.events.pop_front() {
                Some(Ok(FetchedEvent::Ready(event))) => return Ok(event),
                Some(Ok(FetchedEvent::Packed(packed))) => self.unpacking = Some(Unpacking::new(packed)),
                Some(Err(error)) => return Err(error),
                None => match self.fetched.recv().await {
                    Some(events) => self.events.extend(events),
                    None => return Err(ClientError::Closed),
                },
            }
        }
    }
}

fn start_offset(start: StartAt, partition: u32, offsets: &Offsets, visibility: Visibility) -> Option<Offset> {
    let ends = || offsets.partitions.iter().find(|ends| ends.partition == partition);
    match (start, visibility) {
        (StartAt::Offset(offset), _) => Some(offset),
        (StartAt::Earliest, _) => ends().map(|ends| ends.log_start),
        (StartAt::Latest, Visibility::LogEnd) => ends().map(|ends| ends.log_end),
        (StartAt::Latest, Visibility::SyncedEnd) => ends().map(|ends| ends.synced_end),
    }
}
