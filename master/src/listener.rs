//! The master's frames port: a bounded number of connections, each served one request after the other.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ringmain_core::limits::{
    ADMIN_IDLE_TIMEOUT_MS, FRAME_TIMEOUT_MS, MASTER_CONNECTIONS_MAX, MASTER_FRAME_BYTES_MAX, REPLY_TIMEOUT_MS,
};
use ringmain_wire::ErrorCode;
use ringmain_wire::frame::{FRAME_PREFIX_BYTES, frame_bytes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::frames::{Handled, Stage, error_frame, handle};
use crate::topic::TopicService;

/// A frame buffer that a rare large request has grown is not kept.
const FRAME_BYTES_KEPT: usize = 8 * 1024;
/// After this pause accepting is tried again when the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves `listener` until `stop` changes; then lets each connection finish the request it is at.
pub(crate) async fn serve(listener: TcpListener, service: Arc<TopicService>, mut stop: watch::Receiver<bool>) {
    let places = Arc::new(Semaphore::new(MASTER_CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.changed() => break,
            Some(_) = connections.join_next() => continue,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("master port can't accept: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!(%peer, "connection refused: the master port has {MASTER_CONNECTIONS_MAX} already");
            refuse(stream);
            continue;
        };
        let service = Arc::clone(&service);
        let stop = stop.clone();
        connections.spawn(async move {
            let _place = place;
            if let Err(reason) = connection(stream, peer, &service, stop).await {
                tracing::info!(%peer, "master connection closed: {reason}");
            }
        });
    }
    while connections.join_next().await.is_some() {}
}

/// Tells a client that there is no place, as far as the socket's buffer takes it.
fn refuse(stream: TcpStream) {
    let message = "the master port has no free connection: close others, or try again later";
    let _ = stream.try_write(&error_frame(0, ErrorCode::LIMIT_REACHED, message.to_owned()));
}

async fn connection(
    mut stream: TcpStream,
    peer: SocketAddr,
    service: &Arc<TopicService>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), String> {
    stream.set_nodelay(true).map_err(|error| error.to_string())?;
    let (mut frame, mut stage) = (Vec::new(), Stage::New);
    loop {
        let read = tokio::select! {
            read = read_frame(&mut stream, &mut frame) => read,
            _ = stop.changed() => return Ok(()),
        };
        match read {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(Refused::Answer(code, message)) => {
                tracing::info!(%peer, "bad frame: {message}");
                write(&mut stream, &error_frame(0, code, message)).await?;
                return Ok(());
            }
            Err(Refused::Close(reason)) => return Err(reason),
        }
        match handle(service, &frame, &mut stage).await {
            Handled::Reply(reply) => write(&mut stream, &reply).await?,
            Handled::ReplyAndClose(reply) => return write(&mut stream, &reply).await,
        }
    }
}

enum Refused {
    Answer(ErrorCode, String),
    Close(String),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self::Close(error.to_string())
    }
}

/// Reads the next frame, its size in front, into `frame`. False when the client has closed between frames.
async fn read_frame(stream: &mut TcpStream, frame: &mut Vec<u8>) -> Result<bool, Refused> {
    let idle = Duration::from_millis(ADMIN_IDLE_TIMEOUT_MS);
    frame.clear();
    frame.shrink_to(FRAME_BYTES_KEPT);
    frame.resize(FRAME_PREFIX_BYTES, 0);
    match timeout(idle, stream.read(frame)).await {
        Err(_) => return Err(Refused::Close(format!("nothing came for {} s", idle.as_secs()))),
        Ok(read) => {
            let begun = read?;
            if begun == 0 {
                return Ok(false);
            }
            let rest = timeout(Duration::from_millis(FRAME_TIMEOUT_MS), read_rest(stream, frame, begun)).await;
            rest.unwrap_or_else(|_| Err(Refused::Close(format!("a frame was not whole after {FRAME_TIMEOUT_MS} ms"))))?;
        }
    }
    Ok(true)
}

async fn read_rest(stream: &mut TcpStream, frame: &mut Vec<u8>, begun: usize) -> Result<(), Refused> {
    stream.read_exact(&mut frame[begun..]).await?;
    let prefix = frame.first_chunk().copied().unwrap_or_default();
    let bytes = frame_bytes(prefix).map_err(|error| Refused::Answer(ErrorCode::BAD_REQUEST, error.to_string()))?;
    if bytes > MASTER_FRAME_BYTES_MAX {
        let message = format!("frame of {bytes} bytes: the master takes up to {MASTER_FRAME_BYTES_MAX}");
        return Err(Refused::Answer(ErrorCode::TOO_LARGE, message));
    }
    frame.resize(FRAME_PREFIX_BYTES + bytes, 0);
    stream.read_exact(&mut frame[FRAME_PREFIX_BYTES..]).await?;
    Ok(())
}

async fn write(stream: &mut TcpStream, reply: &[u8]) -> Result<(), String> {
    match timeout(Duration::from_millis(REPLY_TIMEOUT_MS), stream.write_all(reply)).await {
        Ok(written) => written.map_err(|error| error.to_string()),
        Err(_) => Err(format!("the client did not take a reply for {REPLY_TIMEOUT_MS} ms")),
    }
}
