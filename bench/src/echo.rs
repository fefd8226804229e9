//! The loopback's own limits: TCP round trips and one-way streams between a bare executor and a client of the kind that
//! `bench produce` uses.
//!
//! The server is a glommio executor set up as the broker's; it does nothing but give bytes back, or count them. The client
//! is a tokio runtime of one thread. So what a produce takes longer than a round trip here is the broker's own work, and
//! what it moves less than a stream here is too.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use futures_lite::{AsyncReadExt as _, AsyncWriteExt as _};
use glommio::net::{TcpListener, TcpStream};
use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::oneshot;

use crate::executor::{self, Setup};
use crate::histogram::Latencies;
use crate::report::{mb_per_s, rounded};
use crate::scrape::ProcessSample;

/// Size of one write of the stream, and of the server's buffer for it.
const STREAM_WRITE_BYTES: usize = 256 * 1024;
/// First bytes of a connection: what it is for, and the size of its messages.
const GREETING_BYTES: usize = 8;
/// Greeting of a stream; any other is the size of messages to be given back.
const STREAM: u64 = 0;
/// Registered IO memory of the executor: it opens no file.
const IO_MEMORY_BYTES: usize = 256 * 1024;
/// Round trips in a warm-up before those that count.
const WARM_UP_TRIPS: usize = 200;

/// What to measure.
#[derive(Clone, Debug)]
pub struct EchoArgs {
    /// Bytes each way in a round trip.
    pub size: usize,
    /// Seconds of round trips, one at a time on one connection.
    pub seconds: f64,
    /// Seconds of streaming; 0 = none.
    pub stream_seconds: f64,
    /// Connections that stream at once, from one client thread to one executor.
    pub streams: usize,
    /// CPU of the executor; none = the first that this process may use.
    pub cpu: Option<usize>,
}

impl Default for EchoArgs {
    fn default() -> Self {
        Self { size: 1024, seconds: 3.0, stream_seconds: 3.0, streams: 1, cpu: None }
    }
}

/// The loopback's figures. MB are 10^6 bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EchoReport {
    /// Which baseline this is: `echo`.
    pub bench: &'static str,
    /// Bytes each way in a round trip.
    pub size: usize,
    /// Round trips measured.
    pub round_trips: u64,
    /// Half of them are faster.
    pub p50_us: f64,
    /// One in 100 is slower.
    pub p99_us: f64,
    /// One in 1000 is slower.
    pub p999_us: f64,
    /// The slowest.
    pub max_us: f64,
    /// Round trips per second.
    pub round_trips_per_s: f64,
    /// One way, client to server, in writes of 256 KiB: the most a broker on one executor could be sent.
    pub stream_mb_per_s: f64,
    /// Connections that streamed at once.
    pub streams: usize,
    /// Bytes streamed.
    pub stream_bytes: u64,
    /// CPU seconds of client and server together.
    pub cpu_s: f64,
    /// How long it all took.
    pub seconds: f64,
}

/// Measures the loopback; blocks.
pub fn run(args: &EchoArgs) -> Result<EchoReport> {
    ensure!((1..=1024 * 1024 * 1024).contains(&args.size), "size must be 1 byte to 1 GiB");
    ensure!(args.seconds > 0.0 && args.seconds.is_finite(), "seconds must be more than 0");
    ensure!(args.stream_seconds >= 0.0 && args.stream_seconds.is_finite(), "stream_seconds must not be negative");
    ensure!((1..=64).contains(&args.streams), "streams must be 1 to 64");
    let (started, own_before) = (Instant::now(), ProcessSample::own()?);

    let (address_sender, address) = oneshot::channel();
    let (stop, stopped) = oneshot::channel();
    let setup = Setup { name: "bench-echo", cpu: args.cpu, io_memory_bytes: IO_MEMORY_BYTES, prime_in: None };
    let server = executor::start(setup, move || serve(address_sender, stopped))?;
    let client = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let measured = client.block_on(async {
        let address = address.await.context("the echo server did not start")?;
        let trips = round_trips(address, args).await.context("measuring round trips")?;
        let streamed = if args.stream_seconds > 0.0 { stream(address, args).await? } else { (0, 0.0) };
        Ok::<_, anyhow::Error>((trips, streamed))
    });
    drop(stop);
    let served = server.join().context("serving the echo");
    // When the server failed, the client's error only says that the connection is gone.
    served?;
    let ((latencies, trip_seconds), (stream_bytes, stream_seconds)) = measured?;

    let percentiles = latencies.percentiles();
    Ok(EchoReport {
        bench: "echo",
        size: args.size,
        round_trips: latencies.count(),
        p50_us: percentiles.p50_us,
        p99_us: percentiles.p99_us,
        p999_us: percentiles.p999_us,
        max_us: percentiles.max_us,
        round_trips_per_s: rounded(latencies.count() as f64 / trip_seconds, 1),
        stream_mb_per_s: mb_per_s(stream_bytes, stream_seconds),
        streams: args.streams,
        stream_bytes,
        cpu_s: rounded(ProcessSample::own()?.cpu_s - own_before.cpu_s, 2),
        seconds: rounded(started.elapsed().as_secs_f64(), 2),
    })
}

/// The server, until the client side is dropped; on the executor.
async fn serve(address: oneshot::Sender<SocketAddr>, stopped: oneshot::Receiver<()>) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| anyhow!("listening on loopback: {error}"))?;
    let bound = listener.local_addr().map_err(|error| anyhow!("{error}"))?;
    // Nobody waits for the address any more when the client has failed.
    let _ = address.send(bound);
    glommio::spawn_local(async move {
        while let Ok(connection) = listener.accept().await {
            // A connection ends when its client does, with or without an error: the client knows better.
            glommio::spawn_local(serve_connection(connection)).detach();
        }
    })
    .detach();
    // Ends when the sender is dropped, which is an error of the channel and none of ours.
    let _ = stopped.await;
    Ok(())
}

async fn serve_connection(mut connection: TcpStream) -> Result<()> {
    connection.set_nodelay(true).map_err(|error| anyhow!("{error}"))?;
    let mut greeting = [0; GREETING_BYTES];
    connection.read_exact(&mut greeting).await?;
    match u64::from_le_bytes(greeting) {
        STREAM => count(connection).await,
        size => give_back(connection, size as usize).await,
    }
}

async fn give_back(mut connection: TcpStream, size: usize) -> Result<()> {
    let mut message = vec![0; size];
    loop {
        connection.read_exact(&mut message).await?;
        connection.write_all(&message).await?;
        glommio::yield_if_needed().await;
    }
}

/// Reads to the end and answers with the number of bytes: so the client knows that all have arrived.
async fn count(mut connection: TcpStream) -> Result<()> {
    let mut buffer = vec![0; STREAM_WRITE_BYTES];
    let mut total = 0_u64;
    loop {
        let read = connection.read(&mut buffer).await?;
        if read == 0 {
            break;
        }
        total += read as u64;
        glommio::yield_if_needed().await;
    }
    connection.write_all(&total.to_le_bytes()).await?;
    Ok(())
}

async fn connect(address: SocketAddr, greeting: u64) -> Result<tokio::net::TcpStream> {
    let mut connection = tokio::net::TcpStream::connect(address).await?;
    connection.set_nodelay(true)?;
    connection.write_all(&greeting.to_le_bytes()).await?;
    Ok(connection)
}

/// Round trips, one at a time: their times, and the seconds of all.
async fn round_trips(address: SocketAddr, args: &EchoArgs) -> Result<(Latencies, f64)> {
    let mut connection = connect(address, args.size as u64).await?;
    let message = vec![0x5A; args.size];
    let mut answer = vec![0; args.size];
    for _ in 0..WARM_UP_TRIPS {
        round_trip(&mut connection, &message, &mut answer).await?;
    }
    let mut latencies = Latencies::new();
    let (started, time) = (Instant::now(), Duration::from_secs_f64(args.seconds));
    while started.elapsed() < time {
        let sent = Instant::now();
        round_trip(&mut connection, &message, &mut answer).await?;
        latencies.record(sent.elapsed());
    }
    ensure!(answer == message, "the echo gave other bytes back");
    Ok((latencies, started.elapsed().as_secs_f64()))
}

async fn round_trip(connection: &mut tokio::net::TcpStream, message: &[u8], answer: &mut [u8]) -> Result<()> {
    // Both at once: a message larger than the socket buffers would else wait for a reader that waits for it.
    let (mut reader, mut writer) = connection.split();
    tokio::try_join!(writer.write_all(message), async { reader.read_exact(answer).await.map(|_| ()) })?;
    Ok(())
}

/// Streams on all connections at once: bytes that arrived, and the seconds it took them.
async fn stream(address: SocketAddr, args: &EchoArgs) -> Result<(u64, f64)> {
    let mut connections = Vec::new();
    for _ in 0..args.streams {
        connections.push(connect(address, STREAM).await?);
    }
    let (started, time) = (Instant::now(), Duration::from_secs_f64(args.stream_seconds));
    let mut senders = tokio::task::JoinSet::new();
    for connection in connections {
        senders.spawn(send_stream(connection, started, time));
    }
    let mut bytes = 0;
    while let Some(sent) = senders.join_next().await {
        bytes += sent?.context("streaming")?;
    }
    Ok((bytes, started.elapsed().as_secs_f64()))
}

async fn send_stream(mut connection: tokio::net::TcpStream, started: Instant, time: Duration) -> Result<u64> {
    let buffer = vec![0xA5; STREAM_WRITE_BYTES];
    let mut sent = 0;
    while started.elapsed() < time {
        connection.write_all(&buffer).await?;
        sent += buffer.len() as u64;
    }
    connection.shutdown().await?;
    let mut counted = [0; GREETING_BYTES];
    connection.read_exact(&mut counted).await?;
    ensure!(u64::from_le_bytes(counted) == sent, "the server counted other bytes than were sent");
    Ok(sent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::tests::watchdog;
    use crate::report::json_line;

    #[test]
    fn a_short_run_measures_round_trips_and_streams() {
        let _watchdog = watchdog("the echo baseline", 60);
        let args = EchoArgs { seconds: 0.1, stream_seconds: 0.1, streams: 2, ..EchoArgs::default() };
        let report = run(&args).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json_line(&report)).unwrap();
        for name in ["p50_us", "p99_us", "p999_us", "max_us", "round_trips_per_s", "stream_mb_per_s"] {
            assert!(json[name].as_f64().unwrap() > 0.0, "{name}: {json}");
        }
        assert!(report.p50_us <= report.p99_us && report.p99_us <= report.max_us);
        assert_eq!(report.stream_bytes % STREAM_WRITE_BYTES as u64, 0);
    }

    #[test]
    fn messages_larger_than_the_socket_buffers_do_not_block_both_ends() {
        let _watchdog = watchdog("the large echo", 120);
        let args = EchoArgs { size: 16 * 1024 * 1024, seconds: 0.01, stream_seconds: 0.0, ..EchoArgs::default() };
        let report = run(&args).unwrap();
        assert!(report.round_trips >= 1);
        assert_eq!(report.stream_mb_per_s, 0.0);
    }

    #[test]
    fn arguments_that_make_no_sense_are_refused() {
        assert!(run(&EchoArgs { size: 0, ..EchoArgs::default() }).is_err());
        assert!(run(&EchoArgs { streams: 0, ..EchoArgs::default() }).is_err());
        assert!(run(&EchoArgs { seconds: f64::INFINITY, ..EchoArgs::default() }).is_err());
    }
}
