//! A broker for tests: everything in memory, on a thread of its own, speaking the real frames, and able to misbehave on
//! purpose. Two "shards" share one state.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ringmain_core::batch::stamp;
use ringmain_core::ids::{Epoch, Offset, PartitionKey, TopicId};
use ringmain_wire::batch::check_produced;
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::fetch::{FetchRequest, FetchedPartitionOutcome, encode_fetch_response};
use ringmain_wire::frame::{FRAME_PREFIX_BYTES, FrameEncoder, FrameView, frame_bytes};
use ringmain_wire::hello::{HelloResponse, ServerLimits, encode_hello};
use ringmain_wire::message::{ErrorResponse, Request, encode_error};
use ringmain_wire::metadata::{BrokerMetadata, Metadata, PartitionMetadata, TopicMetadata, encode_metadata};
use ringmain_wire::offsets::{Offsets, PartitionOffsets, encode_offsets};
use ringmain_wire::produce::{ProduceOutcome, ProduceRequest, encode_produce_response, produced_batches};
use ringmain_wire::topic::{TopicResponse, encode_topic_response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

const SHARDS: usize = 2;

/// What it does wrong, by the number of the batch (from 1) over all partitions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// Acks it and stores nothing.
    pub lose: Option<u64>,
    /// Stores it twice and acks the second.
    pub duplicate: Option<u64>,
    /// Flips a bit in it, with a CRC to match.
    pub corrupt: Option<u64>,
    /// Answers SERVER_BUSY and stores nothing.
    pub refuse: Option<u64>,
}

#[derive(Default)]
struct State {
    faults: Faults,
    topics: BTreeMap<String, TopicMetadata>,
    next_topic: u64,
    logs: BTreeMap<PartitionKey, Vec<(u64, u64, Vec<u8>)>>,
    batches: u64,
    ports: Vec<u16>,
}

/// A running fake; ends when dropped.
pub(crate) struct FakeBroker {
    /// Where its common port is.
    pub address: String,
    state: Arc<Mutex<State>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FakeBroker {
    pub(crate) fn start(faults: Faults) -> Self {
        let state = Arc::new(Mutex::new(State { faults, next_topic: 1, ..State::default() }));
        let (address_sender, address) = std::sync::mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let shared = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let mut listeners = Vec::new();
                for _ in 0..=SHARDS {
                    listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
                }
                let ports = listeners.iter().map(|listener| listener.local_addr().unwrap().port());
                let ports: Vec<u16> = ports.collect();
                shared.lock().unwrap().ports = ports[1..].to_vec();
                address_sender.send(format!("127.0.0.1:{}", ports[0])).unwrap();
                for listener in listeners {
                    let shared = Arc::clone(&shared);
                    tokio::spawn(async move {
                        while let Ok((stream, _)) = listener.accept().await {
                            tokio::spawn(serve(stream, Arc::clone(&shared)));
                        }
                    });
                }
                let _ = stopped.await;
            });
        });
        Self { address: address.recv().unwrap(), state, stop: Some(stop), thread: Some(thread) }
    }

    /// Topics that are left.
    pub(crate) fn topics(&self) -> usize {
        self.state.lock().unwrap().topics.len()
    }

    /// Makes a topic with these values in partition 0.
    pub(crate) fn keep_topic(&self, name: &str, partitions: u32) {
        self.state.lock().unwrap().make_topic(name, partitions);
    }
}

impl Drop for FakeBroker {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Serves one connection until it ends or says something that is not a frame.
async fn serve(mut stream: TcpStream, state: Arc<Mutex<State>>) {
    let mut encoder = FrameEncoder::new();
    loop {
        let mut prefix = [0; FRAME_PREFIX_BYTES];
        if stream.read_exact(&mut prefix).await.is_err() {
            return;
        }
        let mut frame = prefix.to_vec();
        frame.resize(FRAME_PREFIX_BYTES + frame_bytes(prefix).unwrap(), 0);
        stream.read_exact(&mut frame[FRAME_PREFIX_BYTES..]).await.unwrap();
        let view = FrameView::parse(&frame).unwrap();
        let request = Request::decode(&view.message).unwrap();
        let is_parked = matches!(request, Request::Fetch(_));
        let mut out = Vec::new();
        for _ in 0..20 {
            out.clear();
            let (reply, empty) =
                state.lock().unwrap().answer(&request, view.correlation_id(), view.payload, &mut encoder);
            out = reply;
            if !(is_parked && empty) {
                break;
            }
            // A long poll, to the letter if not to the spirit.
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
        if stream.write_all(&out).await.is_err() {
            return;
        }
    }
}

impl State {
    /// The reply, and whether it is a fetch that brings nothing.
    fn answer(&mut self, request: &Request, id: u64, payload: &[u8], encoder: &mut FrameEncoder) -> (Vec<u8>, bool) {
        let mut out = Vec::new();
        let mut empty = false;
        match request {
            Request::Hello(_) => encode_hello(encoder, id, &self.hello(), &mut out),
            Request::Metadata(request) => {
                let topics = self.topics.values().filter(|topic| request.topics.contains(&topic.name));
                let metadata = Metadata { topics: topics.cloned().collect(), ..self.metadata() };
                encode_metadata(encoder, id, &metadata, &mut out);
            }
            Request::CreateTopic(request) => {
                let topic = self.make_topic(&request.name, request.partitions);
                encode_topic_response(encoder, id, &TopicResponse { topic, version: 1 }, &mut out);
            }
            Request::AlterTopic(request) => match self.topics.get(&request.name).cloned() {
                Some(topic) => encode_topic_response(encoder, id, &TopicResponse { topic, version: 1 }, &mut out),
                None => encode_error(encoder, id, &ErrorResponse::new(ErrorCode::TOPIC_NOT_FOUND, ""), &mut out),
            },
            Request::DeleteTopic(request) => match self.topics.remove(&request.name) {
                Some(topic) => encode_topic_response(encoder, id, &TopicResponse { topic, version: 1 }, &mut out),
                None => encode_error(encoder, id, &ErrorResponse::new(ErrorCode::TOPIC_NOT_FOUND, ""), &mut out),
            },
            Request::Offsets(request) => {
                let partitions = request.partitions.iter().map(|partition| {
                    let end = Offset(self.log_end(PartitionKey { topic: request.topic_id, partition: *partition }));
                    PartitionOffsets { partition: *partition, log_end: end, flushed_end: end, ..Default::default() }
                });
                let offsets = Offsets { topic_id: request.topic_id, partitions: partitions.collect() };
                encode_offsets(encoder, id, &offsets, &mut out);
            }
            Request::Produce(request) => {
                let outcomes: Vec<_> = produced_batches(payload)
                    .map(|batch| {
                        let (header, bytes) = batch.unwrap();
                        check_produced(&header, bytes).unwrap();
                        self.append(request, header.key, u64::from(header.record_count), bytes)
                    })
                    .collect();
                encode_produce_response(encoder, id, &outcomes, &mut out);
            }
            Request::Fetch(request) => empty = self.fetch(request, id, encoder, &mut out),
        }
        (out, empty)
    }

    fn append(&mut self, request: &ProduceRequest, key: PartitionKey, records: u64, bytes: &[u8]) -> ProduceOutcome {
        self.batches += 1;
        let number = Some(self.batches);
        let refused = ProduceOutcome { key, code: ErrorCode::SERVER_BUSY, retry_after_ms: 1, ..Default::default() };
        if self.faults.refuse == number {
            return refused;
        }
        let level = request.durability.unwrap_or_default();
        let base = self.log_end(key);
        let copies = match number {
            _ if self.faults.lose == number => 0,
            _ if self.faults.duplicate == number => 2,
            _ => 1,
        };
        for copy in 0..copies {
            let base = base + copy * records;
            let mut stored = bytes.to_vec();
            if self.faults.corrupt == number {
                let middle = stored.len() / 2;
                stored[middle] ^= 1;
                ringmain_core::batch::seal_crc(&mut stored);
            }
            stamp(&mut stored, Offset(base), 0, Epoch(0));
            self.logs.entry(key).or_default().push((base, base + records, stored));
        }
        let acked = base + u64::saturating_sub(copies, 1) * records;
        ProduceOutcome { key, level, base_offset: Offset(acked), ..Default::default() }
    }

    fn fetch(&self, request: &FetchRequest, id: u64, encoder: &mut FrameEncoder, out: &mut Vec<u8>) -> bool {
        let mut payload = Vec::new();
        let mut outcomes = Vec::new();
        for wanted in &request.partitions {
            let before = payload.len();
            let mut next = wanted.offset.0;
            for (base, end, bytes) in self.logs.get(&wanted.key).into_iter().flatten() {
                let fits = payload.is_empty() || payload.len() + bytes.len() <= request.bytes_max as usize;
                if *end > next && *base <= next && fits {
                    payload.extend_from_slice(bytes);
                    next = *end;
                }
            }
            outcomes.push(FetchedPartitionOutcome {
                key: wanted.key,
                next_offset: Offset(next),
                log_end: Offset(self.log_end(wanted.key)),
                payload_bytes: (payload.len() - before) as u32,
                ..Default::default()
            });
        }
        encode_fetch_response(encoder, id, &outcomes, payload.len(), out);
        out.extend_from_slice(&payload);
        payload.is_empty()
    }

    fn log_end(&self, key: PartitionKey) -> u64 {
        self.logs.get(&key).and_then(|log| log.last()).map_or(0, |(_, end, _)| *end)
    }

    fn make_topic(&mut self, name: &str, partitions: u32) -> TopicMetadata {
        let partition = |partition| PartitionMetadata {
            partition,
            shard: (partition as usize % SHARDS) as u16,
            ..PartitionMetadata::default()
        };
        let topic = TopicMetadata {
            name: name.to_owned(),
            topic_id: TopicId(self.next_topic),
            partitions: (0..partitions).map(partition).collect(),
            ..TopicMetadata::default()
        };
        self.next_topic += 1;
        self.topics.insert(name.to_owned(), topic.clone());
        topic
    }

    fn metadata(&self) -> Metadata {
        let host = "127.0.0.1".to_owned();
        let broker = BrokerMetadata { broker_id: 1, host, port: 0, direct_ports: self.ports.clone() };
        Metadata { version: 1, brokers: vec![broker], ..Metadata::default() }
    }

    fn hello(&self) -> HelloResponse {
        HelloResponse { protocol_version: 1, limits: ServerLimits::default(), ..HelloResponse::default() }
    }
}
