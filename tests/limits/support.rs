//! A broker process of the real binary, a client that can misbehave, and a healthy pair that must not notice.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringmain_core::batch::BatchHeader;
use ringmain_core::ids::{Durability, Offset, PartitionKey, TopicId};
use ringmain_wire::batch::BatchView;
use ringmain_wire::batch_builder::BatchBuilder;
use ringmain_wire::fetch::{FetchPartition, FetchRequest, FetchedPartitionOutcome};
use ringmain_wire::hello::{HelloRequest, PROTOCOL_VERSION};
use ringmain_wire::message::{ErrorResponse, Request, Response};
use ringmain_wire::metadata::{Metadata, MetadataRequest, TopicMetadata};
use ringmain_wire::produce::{ProduceOutcome, ProduceRequest};
use ringmain_wire::record::NewRecord;
use ringmain_wire::topic::CreateTopicRequest;
use ringmain_wire::{FrameEncoder, FrameView};

/// The binary under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_ringmain");
/// Whatever is waited for must come within this time.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `condition` gives something.
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < give_up, "waited {PATIENCE:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A directory that is removed at the end; its twin in shared memory holds the arena.
pub struct Place {
    pub dir: tempfile::TempDir,
    pub arena: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let arena = tempfile::Builder::new().prefix("ringmain-limits-").tempdir_in("/dev/shm").unwrap();
        Self { dir: tempfile::tempdir().unwrap(), arena }
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// `ringmain serve` here, on ports of its own.
    pub fn serve(&self, shards: u16, memory: &str) -> Command {
        let mut command = serve_at(&self.data(), self.arena.path());
        command.args(["--shards", &shards.to_string(), "--memory", memory]);
        command
    }

    pub fn start(&self, shards: u16, memory: &str) -> Broker {
        Broker::start(&mut self.serve(shards, memory), self.dir.path())
    }
}

/// `ringmain serve` on ports of its own, with shards and memory still to be said.
pub fn serve_at(data: &Path, arena: &Path) -> Command {
    let mut command = Command::new(BINARY);
    command.arg("serve").arg("--data").arg(data).arg("--arena-dir").arg(arena);
    for port in ["--listen", "--http", "--master-listen", "--master-http"] {
        command.args([port, "127.0.0.1:0"]);
    }
    command.args(["--direct-port-base", "0"]);
    command
}

/// A broker process.
pub struct Broker {
    child: Child,
    stderr: PathBuf,
    pub address: SocketAddr,
    pub http: SocketAddr,
    pub master: SocketAddr,
    pub master_http: SocketAddr,
}

impl Broker {
    /// Starts the command and waits until it is ready.
    pub fn start(command: &mut Command, logs: &Path) -> Self {
        let stderr = logs.join("stderr");
        let log = File::options().create(true).append(true).open(&stderr).unwrap();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let field = |name: &str| {
            let text = line.split_whitespace().find_map(|word| word.strip_prefix(name));
            let text =
                text.unwrap_or_else(|| panic!("no {name} in `{line}`: {}", fs::read_to_string(&stderr).unwrap()));
            text.trim_start_matches("http://").trim_end_matches('/').parse::<SocketAddr>().unwrap()
        };
        let (address, http) = (field("broker="), field("http="));
        let (master, master_http) = (field("master="), field("console="));
        Self { child, stderr, address, http, master, master_http }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap()
    }

    /// The process lives and nothing in it has panicked.
    pub fn assert_well(&mut self) {
        let log = self.log();
        assert!(!log.contains("panicked"), "{log}");
        assert!(self.child.try_wait().unwrap().is_none(), "the broker has ended: {log}");
    }

    /// Stops it with SIGTERM: clean, with exit code 0.
    pub fn stop(mut self) {
        self.assert_well();
        let status = self.terminate();
        assert!(status.success(), "{status}: {}", self.log());
        assert!(!self.log().contains("panicked"), "{}", self.log());
    }

    pub fn terminate(&mut self) -> ExitStatus {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        wait_for("the broker stops", || self.child.try_wait().unwrap())
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sum over all shards of a metric.
    pub fn metric(&self, name: &str) -> f64 {
        let (_, text) = http(self.http, "GET", "/metrics", None);
        let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']));
        text.lines().filter(of_name).map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    }

    pub fn resident_bytes(&self) -> u64 {
        resident_bytes(self.pid())
    }

    pub fn client(&self) -> Client {
        Client::connect(self.address)
    }

    /// Makes a topic and gives its metadata.
    pub fn topic(&self, name: &str, partitions: u32) -> TopicMetadata {
        let mut client = self.client();
        let request = CreateTopicRequest { partitions, ..CreateTopicRequest::new(name) };
        match client.ask(&Request::CreateTopic(request)) {
            // The answer is the master's; which shard has what, only the broker knows.
            Response::Topic(_) => client.metadata(&[name]).topics.remove(0),
            other => panic!("{other:?}"),
        }
    }

    /// Address of the port of the shard that has a partition, or of another shard's.
    pub fn direct(&self, topic: &TopicMetadata, partition: u32, wrong: bool) -> SocketAddr {
        let ports = self.client().metadata(&[]).brokers[0].direct_ports.clone();
        let owner = usize::from(topic.partitions[partition as usize].shard);
        let at = if wrong { (owner + 1) % ports.len() } else { owner };
        SocketAddr::new(self.address.ip(), ports[at])
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // Ended already after stop or kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of the broker ---\n{}", self.log());
        }
    }
}

/// Resident bytes as the budget counts them: the arena's pages and the process's own.
pub fn resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

/// One HTTP/1.1 request; status and body.
pub fn http(address: SocketAddr, method: &str, path: &str, json: Option<&str>) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let body = json.unwrap_or_default();
    let kind = if json.is_some() { "content-type: application/json\r\n" } else { "" };
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{kind}content-length: {length}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// A frame with its payload.
pub fn frame(request: &Request, correlation_id: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    request.encode(&mut FrameEncoder::new(), correlation_id, payload.len(), &mut out);
    out.extend_from_slice(payload);
    out
}

/// A connection that sends what it is told, one thing after the other.
pub struct Client {
    pub stream: TcpStream,
    next_id: u64,
}

impl Client {
    /// Without a hello.
    pub fn raw(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, next_id: 1 }
    }

    pub fn connect(address: SocketAddr) -> Self {
        let mut client = Self::raw(address);
        let answer = client.ask(&hello(PROTOCOL_VERSION));
        assert!(matches!(answer, Response::Hello(_)), "{answer:?}");
        client
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn request(&mut self, request: &Request, payload: &[u8]) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.send(&frame(request, id, payload));
        id
    }

    /// The next frame; none when the broker has closed the connection.
    pub fn receive(&mut self) -> Option<(u64, Response, Vec<u8>)> {
        let mut bytes = vec![0; 4];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => {}
            Err(error) if is_closed(&error) => return None,
            Err(error) => panic!("no answer: {error}"),
        }
        let size = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
        bytes.resize(4 + size, 0);
        self.stream.read_exact(&mut bytes[4..]).unwrap();
        let view = FrameView::parse_response(&bytes).unwrap();
        let response = Response::decode(&view.message).unwrap();
        Some((view.correlation_id(), response, view.payload.to_vec()))
    }

    /// Correlation id of the next frame, whatever it says; none when the broker has closed the connection.
    pub fn try_receive_id(&mut self) -> Option<u64> {
        let mut bytes = vec![0; 4];
        self.stream.read_exact(&mut bytes).map_err(|error| assert!(is_closed(&error), "{error}")).ok()?;
        let size = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
        bytes.resize(4 + size, 0);
        self.stream.read_exact(&mut bytes[4..]).ok()?;
        Some(FrameView::parse_response(&bytes).unwrap().correlation_id())
    }

    /// Sends and waits for the one answer.
    pub fn ask(&mut self, request: &Request) -> Response {
        self.ask_with(request, &[]).0
    }

    pub fn ask_with(&mut self, request: &Request, payload: &[u8]) -> (Response, Vec<u8>) {
        let id = self.request(request, payload);
        let (answered, response, payload) = self.receive().expect("the connection lives");
        assert_eq!(answered, id, "{response:?}");
        (response, payload)
    }

    /// Nothing comes any more but the end of the stream.
    pub fn assert_closed(&mut self) {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(0) => {}
            Ok(_) => panic!("an answer where the connection should be closed"),
            Err(error) => assert!(is_closed(&error), "not closed: {error}"),
        }
    }

    pub fn metadata(&mut self, topics: &[&str]) -> Metadata {
        let topics = topics.iter().map(|name| (*name).to_owned()).collect();
        match self.ask(&Request::Metadata(MetadataRequest { topics, ..MetadataRequest::default() })) {
            Response::Metadata(metadata) => metadata,
            other => panic!("{other:?}"),
        }
    }

    pub fn produce(&mut self, level: Durability, payload: &[u8]) -> Vec<ProduceOutcome> {
        match self.ask_with(&produce_request(level), payload).0 {
            Response::Produce(outcomes) => outcomes,
            other => panic!("{other:?}"),
        }
    }

    /// The error that answers a request as a whole.
    pub fn refused(&mut self, request: &Request, payload: &[u8]) -> ErrorResponse {
        match self.ask_with(request, payload).0 {
            Response::Error(error) => error,
            other => panic!("{other:?}"),
        }
    }

    pub fn fetch(&mut self, request: FetchRequest) -> (Vec<FetchedPartitionOutcome>, Vec<u8>) {
        match self.ask_with(&Request::Fetch(request), &[]) {
            (Response::Fetch(outcomes), payload) => (outcomes, payload),
            other => panic!("{other:?}"),
        }
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

pub fn hello(protocol_version: u16) -> Request {
    Request::Hello(HelloRequest { protocol_version, client_name: "limits".into(), ..HelloRequest::default() })
}

pub fn produce_request(level: Durability) -> Request {
    Request::Produce(ProduceRequest { durability: Some(level), timeout_ms: 30_000 })
}

/// A fetch of one partition from an offset.
pub fn fetch_request(topic: TopicId, partition: u32, offset: u64, wait_ms_max: u32) -> FetchRequest {
    FetchRequest {
        partitions: vec![fetch_partition(topic, partition, offset)],
        bytes_max: 1024 * 1024,
        bytes_min: 1,
        wait_ms_max,
        ..FetchRequest::default()
    }
}

pub fn fetch_partition(topic: TopicId, partition: u32, offset: u64) -> FetchPartition {
    FetchPartition { key: PartitionKey { topic, partition }, offset: Offset(offset), bytes_max: 0 }
}

/// A batch of these values.
pub fn batch(topic: TopicId, partition: u32, values: &[&[u8]]) -> Vec<u8> {
    let mut builder = BatchBuilder::new(PartitionKey { topic, partition });
    for value in values {
        builder
            .push(&NewRecord { value: Some(value), timestamp_ms: 1_700_000_000_000, ..NewRecord::default() })
            .unwrap();
    }
    builder.finish().to_vec()
}

/// Offsets and values of all records in a payload.
pub fn records(payload: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let (mut rest, mut found) = (payload, Vec::new());
    while !rest.is_empty() {
        let header = BatchHeader::parse(rest).unwrap();
        let view = BatchView::parse(rest, &header).unwrap();
        found.extend(view.records().map(|record| (record.offset.0, record.value.unwrap_or_default().to_vec())));
        rest = &rest[header.batch_bytes as usize..];
    }
    found
}

/// Pseudo random numbers from a seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// A producer and a consumer of a topic of their own, who go about their work while others misbehave.
pub struct Healthy {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(u64, Duration)>,
}

impl Healthy {
    pub fn start(broker: &Broker) -> Self {
        Self::start_on(broker, "healthy")
    }

    pub fn start_on(broker: &Broker, topic: &str) -> Self {
        Self::with_values(broker, topic, 100)
    }

    /// The same with large records: their frames need a grown receive buffer.
    pub fn with_values(broker: &Broker, topic: &str, value_bytes: usize) -> Self {
        let topic = broker.topic(topic, 1);
        let (mut producer, mut consumer) = (broker.client(), broker.client());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (mut rounds, mut slowest) = (0u64, Duration::ZERO);
            while !stopped.load(Ordering::Relaxed) || rounds < 10 {
                let began = Instant::now();
                let mut value = rounds.to_le_bytes().to_vec();
                value.resize(value_bytes.max(8), rounds as u8);
                let bytes = batch(topic.topic_id, 0, &[&value]);
                let outcome = producer.produce(Durability::Memory, &bytes).remove(0);
                assert!(outcome.code.is_ok(), "the healthy producer is refused: {outcome:?}");
                assert_eq!(outcome.base_offset.0, rounds);
                let (outcomes, payload) = consumer.fetch(fetch_request(topic.topic_id, 0, rounds, 5000));
                assert!(outcomes[0].code.is_ok(), "{outcomes:?}");
                assert_eq!(records(&payload), [(rounds, value)]);
                rounds += 1;
                slowest = slowest.max(began.elapsed());
                std::thread::sleep(Duration::from_millis(2));
            }
            (rounds, slowest)
        });
        Self { stop, thread }
    }

    /// Ends it; gives how many rounds there were. No round may have taken longer than `round_max`.
    pub fn finish(self, round_max: Duration) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let (rounds, slowest) = self.thread.join().expect("the healthy pair is unharmed");
        assert!(slowest <= round_max, "a round of the healthy pair took {slowest:?}");
        rounds
    }
}
