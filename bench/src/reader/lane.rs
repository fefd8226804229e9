//! One lane of a consumer: its partitions, fetched together, one fetch at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ringmain_core::batch::{BatchError, BatchHeader, check_stamp};
use ringmain_core::codec::ALL_CODECS;
use ringmain_core::ids::{Offset, PartitionKey};
use ringmain_core::limits::{CONNECTION_REPLY_BYTES_MAX, FETCH_BYTES_MAX};
use ringmain_wire::batch::{BatchView, InvalidBatch};
use ringmain_wire::batch_codec::FetchedBatches;
use ringmain_wire::client::{Connection, OwnedFrame};
use ringmain_wire::error_code::{ClientAction, ErrorCode};
use ringmain_wire::fetch::{FetchPartition, FetchRequest, FetchedPartitionOutcome, Visibility};
use ringmain_wire::message::{Request, Response};

use super::{ReadPlan, ReadResult, Timed};
use crate::payload::{Stamp, now_ns};
use crate::verify::ReadBack;

/// Longest that a fetch is parked; also how late a lane sees that the ends are known.
const WAIT_MS: u32 = 100;
/// Without a record for so long, although the end is known and not reached, reading has failed.
const STALLED_AFTER: Duration = Duration::from_secs(30);
/// Least byte budget of a fetch.
const FETCH_BYTES_MIN: usize = 256 * 1024;
/// Wait after a refusal that names no time.
const PAUSE_MIN: Duration = Duration::from_millis(5);

pub(super) struct Lane {
    plan: Arc<ReadPlan>,
    connection: Connection,
    places: Vec<Place>,
    by_key: HashMap<PartitionKey, usize>,
    bytes_max: u32,
    /// Where the next fetch starts to list partitions: the first listed are served first.
    turn: usize,
    result: ReadResult,
    scratch: Vec<u8>,
    advanced: Instant,
}

/// A partition being read.
struct Place {
    target: usize,
    key: PartitionKey,
    next: u64,
    read: Option<ReadBack>,
}

impl Lane {
    /// A lane for the targets at `indexes`, one of `lanes` that share the connection.
    pub(super) fn new(plan: Arc<ReadPlan>, connection: Connection, indexes: &[usize], lanes: usize) -> Self {
        let places: Vec<Place> = indexes
            .iter()
            .map(|index| Place {
                target: *index,
                key: plan.targets[*index].key,
                next: plan.starts[*index],
                read: plan.payload.as_ref().map(|payload| ReadBack::new(payload.run())),
            })
            .collect();
        let by_key = places.iter().enumerate().map(|(index, place)| (place.key, index)).collect();
        // Half of what the server may hold for a connection: replies that it can't hold are parked.
        let share = (CONNECTION_REPLY_BYTES_MAX / 2 / lanes).clamp(FETCH_BYTES_MIN, FETCH_BYTES_MAX);
        let (result, scratch, advanced) = (ReadResult::default(), Vec::new(), Instant::now());
        Self { plan, connection, places, by_key, bytes_max: share as u32, turn: 0, result, scratch, advanced }
    }

    /// Reads until all partitions are done.
    pub(super) async fn run(mut self) -> Result<ReadResult> {
        loop {
            let wanted = self.wanted();
            if wanted.is_empty() {
                break;
            }
            let request = Request::Fetch(FetchRequest {
                partitions: wanted,
                bytes_max: self.bytes_max,
                bytes_min: 1,
                wait_ms_max: WAIT_MS,
                visibility: Visibility::LogEnd,
                codecs: ALL_CODECS,
                tags: Vec::new(),
            });
            let sent = Instant::now();
            let answer = self.connection.request(&request, Vec::new()).await.and_then(OwnedFrame::into_result);
            let frame = match answer {
                Ok(frame) => frame,
                Err(error) if error.retriable() && error.code().is_some() => {
                    self.check_stall()?;
                    tokio::time::sleep(error.retry_after().max(PAUSE_MIN)).await;
                    continue;
                }
                Err(error) => return Err(error).context("fetching"),
            };
            let pause = self.take(&frame, sent.elapsed())?;
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
        }
        let read = self.places.into_iter().filter_map(|place| Some((place.target, place.read?)));
        self.result.read = read.collect();
        Ok(self.result)
    }

    fn wanted(&mut self) -> Vec<FetchPartition> {
        let count = self.places.len();
        self.turn = (self.turn + 1) % count;
        (0..count)
            .map(|step| &self.places[(self.turn + step) % count])
            .filter(|place| !self.plan.is_done(place.target, place.next))
            .map(|place| FetchPartition { key: place.key, offset: Offset(place.next), bytes_max: 0 })
            .collect()
    }

    /// Takes the records of an answer; how long to wait before the next fetch.
    fn take(&mut self, frame: &OwnedFrame, latency: Duration) -> Result<Duration> {
        let Response::Fetch(outcomes) = &frame.response else {
            bail!("the broker answered a fetch with {:?}", frame.response);
        };
        let mut payload = frame.payload.clone();
        let (records_before, mut pause) = (self.result.records, Duration::ZERO);
        let mut advanced = false;
        for outcome in outcomes {
            let share = outcome.payload_bytes as usize;
            if share > payload.len() {
                bail!("the partitions of the answer have more bytes than its payload");
            }
            let batches = FetchedBatches::new(payload.split_to(share));
            let index = *self.by_key.get(&outcome.key).context("the answer has a partition that was not asked for")?;
            match outcome.code {
                ErrorCode::OK => advanced |= self.take_partition(index, outcome, batches)?,
                code if matches!(code.action(), ClientAction::Retry | ClientAction::BackOff) => {
                    let retry_after = Duration::from_millis(u64::from(outcome.retry_after_ms));
                    pause = pause.max(retry_after).max(PAUSE_MIN);
                }
                code => bail!("partition {}: {code} {}", outcome.key, outcome.message),
            }
        }
        if self.plan.timed == Timed::Fetch && self.result.records > records_before {
            self.result.latencies.record(latency);
        }
        if advanced {
            self.result.fetches += 1;
            self.advanced = Instant::now();
            self.result.last_at = Some(self.advanced);
        } else {
            self.check_stall()?;
        }
        // Some partitions may have nothing while others go on: wait only when none did.
        Ok(if advanced { Duration::ZERO } else { pause })
    }

    fn check_stall(&self) -> Result<()> {
        if self.plan.ends.get().is_some() && self.advanced.elapsed() > STALLED_AFTER {
            let waiting = self.places.iter().find(|place| !self.plan.is_done(place.target, place.next));
            let at = waiting.map_or(String::new(), |place| format!(": partition {} is at {}", place.key, place.next));
            bail!("no record came for {} s although the log ends are not reached{at}", STALLED_AFTER.as_secs());
        }
        Ok(())
    }

    /// Takes one partition's batches; whether it got on.
    fn take_partition(
        &mut self,
        index: usize,
        outcome: &FetchedPartitionOutcome,
        batches: FetchedBatches,
    ) -> Result<bool> {
        if let Some(gap) = &outcome.gap {
            self.result.gap_offsets += gap.to.since(gap.from);
        }
        for batch in batches {
            match batch {
                Ok((header, batch)) => self.take_batch(index, &header, &batch)?,
                // How many records it had can't be known.
                Err(InvalidBatch::Header(BatchError::Crc { .. }) | InvalidBatch::Decompress(_)) => {
                    self.result.damaged += 1;
                }
                Err(error) => return Err(error).with_context(|| format!("partition {}", outcome.key)),
            }
        }
        let place = &mut self.places[index];
        let next = outcome.next_offset.0;
        if next < place.next {
            bail!("partition {} was at {} and is to go back to {next}", outcome.key, place.next);
        }
        let advanced = next > place.next;
        place.next = next;
        Ok(advanced)
    }

    fn take_batch(&mut self, index: usize, header: &BatchHeader, batch: &[u8]) -> Result<()> {
        let place = &mut self.places[index];
        if header.key != place.key {
            bail!("a batch of partition {} came for {}", header.key, place.key);
        }
        let view = match check_stamp(batch).map_err(Into::into).and_then(|()| BatchView::parse(batch, header)) {
            Ok(view) => view,
            Err(_) => {
                self.result.damaged += u64::from(header.record_count);
                return Ok(());
            }
        };
        let (now, count_from) = (now_ns(), self.plan.count_from_ns.load(Ordering::Relaxed));
        for record in view.records() {
            // A fetch from the middle of a batch gives the whole batch.
            if record.offset.0 < place.next {
                continue;
            }
            let value = record.value.unwrap_or_default();
            let stamp = Stamp::read(value);
            if let (Some(read), Some(payload)) = (&mut place.read, &self.plan.payload) {
                let intact = !self.plan.compare
                    || stamp
                        .is_some_and(|stamp| payload.is_intact(&stamp, place.target as u32, value, &mut self.scratch));
                read.record(record.offset.0, stamp, intact);
            }
            if self.plan.timed == Timed::Record {
                let sent_ns = stamp.map_or(0, |stamp| stamp.sent_ns);
                if sent_ns < count_from {
                    continue;
                }
                self.result.latencies.record_nanoseconds(now.saturating_sub(sent_ns));
            }
            self.result.records += 1;
            self.result.payload_bytes += value.len() as u64;
        }
        Ok(())
    }
}
