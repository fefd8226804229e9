//! A broker for tests: speaks frames over a real socket, keeps records in memory, and misbehaves when told to.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use ringmain_core::batch::{BatchHeader, stamp};
use ringmain_core::dedup::{Decision, ProducerBatch, Producers, SequenceError};
use ringmain_core::ids::{Durability, Epoch, Offset, PartitionKey, TopicId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::batch::{BatchView, check_produced};
use crate::client::connection::locked;
use crate::error_code::ErrorCode;
use crate::fetch::{FetchRequest, FetchedPartitionOutcome, Gap};
use crate::frame::FrameView;
use crate::hello::{HelloResponse, ServerLimits};
use crate::message::{ErrorResponse, Request, Response};
use crate::metadata::{BrokerMetadata, Metadata, PartitionMetadata, TopicMetadata};
use crate::offsets::{Offsets, PartitionOffsets};
use crate::produce::{ProduceOutcome, ProduceRequest, produced_batches};
use crate::samples::encode_response;
use crate::topic::TopicResponse;

/// The one topic there is.
pub const TOPIC: &str = "orders";
pub const TOPIC_ID: TopicId = TopicId(7);

/// What the broker does wrong with one request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Says no, and does nothing.
    Refuse(ErrorCode, u32),
    /// Closes the connection, having done nothing.
    DropBefore,
    /// Does it and closes the connection without an answer.
    DropAfter,
    /// The same, and gives up what it knows of producers.
    Forget,
    /// Does it and answers with these bytes.
    Garbage(Vec<u8>),
    /// Does it and says nothing.
    Silence,
}

#[derive(Default)]
pub struct State {
    /// Stamped batches by partition.
    pub log: HashMap<u32, Vec<Vec<u8>>>,
    pub producers: Producers,
    pub next_offset: HashMap<u32, u64>,
    pub log_start: HashMap<u32, u64>,
    pub gaps: HashMap<u32, Gap>,
    pub produce_faults: VecDeque<Fault>,
    pub fetch_faults: VecDeque<Fault>,
    pub other_faults: VecDeque<Fault>,
    pub produces: usize,
    pub fetches: usize,
    pub connections: usize,
    pub direct_ports: Vec<u16>,
    pub common_port: u16,
    pub limits: ServerLimits,
    pub protocol_version: u16,
    pub cluster_id: u64,
    /// What fetches of a partition get instead of an answer, each time.
    pub sick: HashMap<u32, ErrorCode>,
    /// How often each partition was in a fetch.
    pub fetched: HashMap<u32, usize>,
    /// Names of further topics, and how many are on a page of metadata.
    pub more_topics: Vec<String>,
    pub page_max: usize,
    /// Every page is the first one.
    pub in_circles: bool,
}

impl State {
    /// Values of all records of a partition, with their offsets.
    pub fn records(&self, partition: u32) -> Vec<(u64, String)> {
        let mut records = Vec::new();
        for batch in self.log.get(&partition).into_iter().flatten() {
            let header = BatchHeader::parse(batch).unwrap();
            for record in BatchView::parse(batch, &header).unwrap().records() {
                records.push((record.offset.0, String::from_utf8(record.value.unwrap().to_vec()).unwrap()));
            }
        }
        records
    }

    pub fn append(&mut self, batch: &[u8]) -> (PartitionKey, Offset) {
        let header = BatchHeader::parse(batch).unwrap();
        let next = self.next_offset.entry(header.key.partition).or_default();
        let base = Offset(*next);
        let mut batch = batch.to_vec();
        stamp(&mut batch, base, 1, Epoch(1));
        *next += u64::from(header.record_count);
        self.log.entry(header.key.partition).or_default().push(batch);
        (header.key, base)
    }

    /// Gives up what it knows of producers, and knows that it does.
    pub fn forget_producers(&mut self) {
        self.producers = Producers::default();
        self.producers.set_forgotten();
    }

    fn end(&self, partition: u32) -> u64 {
        self.next_offset.get(&partition).copied().unwrap_or_default()
    }
}

pub struct FakeBroker {
    pub address: SocketAddr,
    pub state: Arc<Mutex<State>>,
    partitions: u32,
    accepting: JoinHandle<()>,
}

impl Drop for FakeBroker {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl FakeBroker {
    pub async fn start(partitions: u32) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state =
            Arc::new(Mutex::new(State { common_port: address.port(), protocol_version: 1, ..State::default() }));
        let accepting = tokio::spawn(accept(listener, Arc::clone(&state), partitions));
        Self { address, state, partitions, accepting }
    }

    /// One more port for the same broker.
    pub async fn direct_port(&self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(accept(listener, Arc::clone(&self.state), self.partitions));
        port
    }

    pub fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut locked(&self.state))
    }
}

async fn accept(listener: TcpListener, state: Arc<Mutex<State>>, partitions: u32) {
    while let Ok((stream, _)) = listener.accept().await {
        locked(&state).connections += 1;
        let state = Arc::clone(&state);
        tokio::spawn(async move {
            // A client that has gone is no failure of the test.
            let _ = serve(stream, state, partitions).await;
        });
    }
}

async fn serve(mut stream: TcpStream, state: Arc<Mutex<State>>, partitions: u32) -> std::io::Result<()> {
    loop {
        let mut frame = vec![0; 4];
        stream.read_exact(&mut frame).await?;
        let bytes = crate::frame::frame_bytes([frame[0], frame[1], frame[2], frame[3]]).unwrap();
        frame.resize(4 + bytes, 0);
        stream.read_exact(&mut frame[4..]).await?;
        let view = FrameView::parse(&frame).unwrap();
        let id = view.correlation_id();
        let request = Request::decode(&view.message).unwrap();
        let (fault, wait) = {
            let mut state = locked(&state);
            match &request {
                Request::Produce(_) => (state.produce_faults.pop_front(), false),
                Request::Fetch(request) => (state.fetch_faults.pop_front(), nothing_new(&state, request)),
                Request::Hello(_) => (None, false),
                _ => (state.other_faults.pop_front(), false),
            }
        };
        if wait && fault.is_none() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        let answer = match fault {
            Some(Fault::DropBefore) => return Ok(()),
            Some(Fault::Refuse(code, retry_after_ms)) => {
                (Response::Error(ErrorResponse { code, message: "".into(), retry_after_ms }), Vec::new())
            }
            _ => answer(&mut locked(&state), &request, view.payload, partitions),
        };
        match fault {
            Some(Fault::DropAfter) => return Ok(()),
            Some(Fault::Forget) => {
                locked(&state).forget_producers();
                return Ok(());
            }
            Some(Fault::Silence) => continue,
            Some(Fault::Garbage(bytes)) => {
                stream.write_all(&bytes).await?;
                continue;
            }
            _ => {}
        }
        stream.write_all(&encode_response(&answer.0, id, answer.1.len())).await?;
        stream.write_all(&answer.1).await?;
    }
}

fn nothing_new(state: &State, request: &FetchRequest) -> bool {
    request.partitions.iter().all(|wanted| wanted.offset.0 == state.end(wanted.key.partition))
}

fn answer(state: &mut State, request: &Request, payload: &[u8], partitions: u32) -> (Response, Vec<u8>) {
    let response = match request {
        Request::Hello(_) => {
            let (protocol_version, limits, cluster_id) = (state.protocol_version, state.limits, state.cluster_id);
            Response::Hello(HelloResponse { protocol_version, limits, cluster_id, ..HelloResponse::default() })
        }
        Request::Produce(request) => Response::Produce(produce(state, *request, payload)),
        Request::Fetch(request) => return fetch(state, request),
        Request::Metadata(request) => {
            let mut more = false;
            let topics = match request.topics.first() {
                Some(name) if name != TOPIC => vec![TopicMetadata {
                    name: name.clone(),
                    code: ErrorCode::TOPIC_NOT_FOUND,
                    ..TopicMetadata::default()
                }],
                Some(_) => vec![topic(partitions)],
                None => {
                    let mut names = state.more_topics.clone();
                    names.push(TOPIC.into());
                    names.sort_unstable();
                    names.retain(|name| state.in_circles || request.limit == 0 || *name > request.after);
                    let page = (request.limit as usize).min(state.page_max.max(1));
                    more = request.limit > 0 && names.len() > page;
                    names.truncate(if more { page } else { names.len() });
                    names.into_iter().map(|name| TopicMetadata { name, ..topic(partitions) }).collect()
                }
            };
            let broker = BrokerMetadata {
                broker_id: 1,
                host: "127.0.0.1".into(),
                port: state.common_port,
                direct_ports: state.direct_ports.clone(),
            };
            let cluster_id = state.cluster_id;
            Response::Metadata(Metadata {
                version: 1,
                cluster_id,
                brokers: vec![broker],
                topics,
                more,
                ..Metadata::default()
            })
        }
        Request::Offsets(request) => {
            let partitions = request.partitions.iter().map(|partition| PartitionOffsets {
                partition: *partition,
                log_start: Offset(state.log_start.get(partition).copied().unwrap_or_default()),
                log_end: Offset(state.end(*partition)),
                ..PartitionOffsets::default()
            });
            Response::Offsets(Offsets { topic_id: TOPIC_ID, partitions: partitions.collect() })
        }
        Request::CreateTopic(_) | Request::DeleteTopic(_) | Request::AlterTopic(_) => {
            Response::Topic(TopicResponse { topic: topic(partitions), version: 2 })
        }
    };
    (response, Vec::new())
}

fn topic(partitions: u32) -> TopicMetadata {
    let partitions = (0..partitions).map(|partition| PartitionMetadata {
        partition,
        broker_id: 1,
        shard: (partition % 2) as u16,
        ..PartitionMetadata::default()
    });
    TopicMetadata {
        name: TOPIC.into(),
        topic_id: TOPIC_ID,
        partitions: partitions.collect(),
        ..TopicMetadata::default()
    }
}

fn produce(state: &mut State, request: ProduceRequest, payload: &[u8]) -> Vec<ProduceOutcome> {
    state.produces += 1;
    let batches = produced_batches(payload).map(Result::unwrap);
    let outcomes = batches.map(|(header, batch)| {
        check_produced(&header, batch).unwrap();
        let level = request.durability.unwrap_or(Durability::Memory);
        let outcome = ProduceOutcome { key: header.key, level, leader_epoch: Epoch(1), ..ProduceOutcome::default() };
        match state.producers.check(&header, Epoch(1)) {
            Ok(Decision::New) => {
                let (key, base_offset) = state.append(batch);
                if let Some(batch) = ProducerBatch::of(&header, base_offset, Epoch(1)) {
                    state.producers.stored(key, &batch);
                }
                ProduceOutcome { base_offset, ..outcome }
            }
            Ok(Decision::Duplicate(first)) => {
                ProduceOutcome { base_offset: first.base_offset, duplicate: true, ..outcome }
            }
            Err(error) => ProduceOutcome { code: code_of(error), ..outcome },
        }
    });
    outcomes.collect()
}

fn code_of(error: SequenceError) -> ErrorCode {
    match error {
        SequenceError::Gap { .. } => ErrorCode::OUT_OF_SEQUENCE,
        SequenceError::Fenced { .. } => ErrorCode::PRODUCER_FENCED,
        SequenceError::TooOld { .. } | SequenceError::Reused { .. } => ErrorCode::SEQUENCE_UNKNOWN,
        SequenceError::Forgotten => ErrorCode::PRODUCER_UNKNOWN,
    }
}

fn fetch(state: &mut State, request: &FetchRequest) -> (Response, Vec<u8>) {
    state.fetches += 1;
    let mut payload = Vec::new();
    let mut outcomes = Vec::new();
    for wanted in &request.partitions {
        let partition = wanted.key.partition;
        let start = state.log_start.get(&partition).copied().unwrap_or_default();
        let end = state.end(partition);
        let mut outcome = FetchedPartitionOutcome {
            key: wanted.key,
            log_start: Offset(start),
            log_end: Offset(end),
            next_offset: wanted.offset,
            ..FetchedPartitionOutcome::default()
        };
        *state.fetched.entry(partition).or_default() += 1;
        if let Some(code) = state.sick.get(&partition) {
            outcome.code = *code;
        } else if wanted.offset.0 < start || wanted.offset.0 > end {
            outcome.code = ErrorCode::OUT_OF_RANGE;
        } else {
            let before = payload.len();
            for batch in state.log.get(&partition).into_iter().flatten() {
                let header = BatchHeader::parse(batch).unwrap();
                if header.next_offset() > wanted.offset && payload.len() - before < request.bytes_max as usize {
                    payload.extend_from_slice(batch);
                    outcome.next_offset = header.next_offset();
                }
            }
            outcome.payload_bytes = (payload.len() - before) as u32;
            outcome.gap = state.gaps.get(&partition).copied().filter(|gap| gap.from >= wanted.offset);
        }
        outcomes.push(outcome);
    }
    (Response::Fetch(outcomes), payload)
}
