//! The two ends of a connection's stream: frames cut out of what the socket gives, requests written with as few calls as
//! it takes them.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::OwnedWriteHalf;

use crate::client::error::ClientError;
use crate::frame::{FRAME_PREFIX_BYTES, frame_bytes};

/// Room for reading that is made at least.
const READ_BYTES: usize = 64 * 1024;
/// Slices of one vectored write: more than a socket takes at once.
pub(crate) const WRITE_SLICES: usize = 64;

/// A request on its way to the socket.
pub(crate) struct Outgoing {
    pub(crate) head: Vec<u8>,
    pub(crate) payload: Vec<Bytes>,
}

/// Why there is no next frame.
pub(crate) enum ReadError {
    Io(String),
    Protocol(ClientError),
}

/// Reads until the buffer holds a whole frame, and takes it out. Memory is taken only for a length that is in bounds.
pub(crate) async fn read_frame(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
) -> Result<Bytes, ReadError> {
    loop {
        let mut wanted = READ_BYTES;
        if let Some(prefix) = buffer.first_chunk::<FRAME_PREFIX_BYTES>() {
            let bytes = frame_bytes(*prefix).map_err(|error| ReadError::Protocol(error.into()))?;
            let needs = FRAME_PREFIX_BYTES + bytes;
            if buffer.len() >= needs {
                return Ok(buffer.split_to(needs).freeze());
            }
            wanted = wanted.max(needs - buffer.len());
        }
        if buffer.capacity() - buffer.len() < READ_BYTES / 4 || wanted > READ_BYTES {
            buffer.reserve(wanted);
        }
        match stream.read_buf(buffer).await {
            Ok(0) if buffer.is_empty() => return Err(ReadError::Io("closed by the server".to_owned())),
            Ok(0) => return Err(ReadError::Io("closed by the server in the middle of a frame".to_owned())),
            Ok(_) => {}
            Err(error) => return Err(ReadError::Io(error.to_string())),
        }
    }
}

/// Puts a request's pieces behind those that wait.
pub(crate) fn enqueue(slices: &mut VecDeque<Bytes>, outgoing: Outgoing) {
    slices.push_back(outgoing.head.into());
    slices.extend(outgoing.payload.into_iter().filter(|piece| !piece.is_empty()));
}

/// Writes as much as the socket takes at once and drops what was written.
pub(crate) async fn write_some(stream: &mut OwnedWriteHalf, slices: &mut VecDeque<Bytes>) -> std::io::Result<()> {
    let mut written = {
        let mut io_slices = [IoSlice::new(&[]); WRITE_SLICES];
        let mut used = 0;
        for (io_slice, bytes) in io_slices.iter_mut().zip(slices.iter()) {
            *io_slice = IoSlice::new(bytes);
            used += 1;
        }
        stream.write_vectored(&io_slices[..used]).await?
    };
    if written == 0 {
        return Err(std::io::ErrorKind::WriteZero.into());
    }
    while written > 0 {
        let Some(first) = slices.front_mut() else { break };
        if first.len() > written {
            first.advance(written);
            break;
        }
        written -= first.len();
        slices.pop_front();
    }
    Ok(())
}
