//! Frames: how messages and batches follow each other on a connection.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 4 | `frame_bytes`: how many bytes follow this number |
//! | 4 | 4 | size of the message |
//! | 8 | size | flatbuffer `Message` |
//! | 8 + size | 0..7 | zero, so that the payload starts at a multiple of 8 |
//! | | rest | payload: record batches, each a multiple of 8 |
//!
//! So every frame is a multiple of 8 bytes as a whole. Little-endian.

use flatbuffers::{FlatBufferBuilder, InvalidFlatbuffer, UnionWIPOffset, VerifierOptions, WIPOffset};
use ringmain_core::limits::{BATCH_ALIGN_BYTES, FRAME_BYTES_MAX, MESSAGE_BYTES_MAX};

use crate::schema;

/// Bytes of the number that a frame starts with.
pub const FRAME_PREFIX_BYTES: usize = 4;
/// First byte of the message itself: behind the frame's and the message's size.
const MESSAGE_AT: usize = 8;
/// Tables nested in a message: `Message`, `MetadataResponse`, `TopicMetadata`, `PartitionMetadata`, and room to grow.
const MESSAGE_DEPTH_MAX: usize = 8;
/// The verifier counts shared vtables once per table: small tables of this schema look up to five times their size.
const APPARENT_SIZE_FACTOR: usize = 8;
/// A builder that has grown past this by a rare large message is not kept.
const BUILDER_BYTES_KEPT: usize = 64 * 1024;

/// Why bytes are not a frame. After one of these the stream can't be trusted: the connection is closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// `frame_bytes` is out of bounds.
    #[error(
        "frame of {0} bytes: must have {MESSAGE_AT} to {FRAME_BYTES_MAX} and a multiple of {BATCH_ALIGN_BYTES} as a whole"
    )]
    Bytes(usize),
    /// The slice is not exactly one frame.
    #[error("frame is cut short or too long: {has} bytes of {needs}")]
    Length {
        /// Bytes there are.
        has: usize,
        /// Bytes there must be.
        needs: usize,
    },
    /// The message is larger than allowed, or than its frame.
    #[error("message of {0} bytes does not fit its frame or is larger than {1}")]
    MessageBytes(usize, usize),
    /// Padding that is not zero.
    #[error("padding behind the message is not zero")]
    Padding,
    /// The message is not a flatbuffer of the schema.
    #[error("message is not valid: {0}")]
    Message(#[from] InvalidFlatbuffer),
}

/// Bytes that follow the number a frame starts with. To be called before memory is taken for the frame.
pub fn frame_bytes(prefix: [u8; FRAME_PREFIX_BYTES]) -> Result<usize, FrameError> {
    let bytes = u32::from_le_bytes(prefix) as usize;
    let whole = bytes.saturating_add(FRAME_PREFIX_BYTES);
    if (MESSAGE_AT..=FRAME_BYTES_MAX).contains(&bytes) && whole.is_multiple_of(BATCH_ALIGN_BYTES) {
        Ok(bytes)
    } else {
        Err(FrameError::Bytes(bytes))
    }
}

/// A frame whose bounds and message have been verified. Reads only; nothing is ever written through it, since a hostile
/// flatbuffer that passes the verifier may have fields that overlap.
#[derive(Clone, Copy, Debug)]
pub struct FrameView<'a> {
    /// The message.
    pub message: schema::Message<'a>,
    /// The bytes behind it: record batches, not looked at yet.
    pub payload: &'a [u8],
}

impl<'a> FrameView<'a> {
    /// Views `frame`, which is one whole frame with its size in front. For requests: the message may have
    /// `MESSAGE_BYTES_MAX`.
    pub fn parse(frame: &'a [u8]) -> Result<Self, FrameError> {
        Self::parse_within(frame, MESSAGE_BYTES_MAX)
    }

    /// Like [`FrameView::parse`], for responses: metadata of many topics may fill the whole frame.
    pub fn parse_response(frame: &'a [u8]) -> Result<Self, FrameError> {
        Self::parse_within(frame, FRAME_BYTES_MAX)
    }

    fn parse_within(frame: &'a [u8], message_bytes_max: usize) -> Result<Self, FrameError> {
        let Some((prefix, _)) = frame.split_first_chunk::<FRAME_PREFIX_BYTES>() else {
            return Err(FrameError::Length { has: frame.len(), needs: FRAME_PREFIX_BYTES });
        };
        let needs = FRAME_PREFIX_BYTES + frame_bytes(*prefix)?;
        if frame.len() != needs {
            return Err(FrameError::Length { has: frame.len(), needs });
        }
        // `frame_bytes` has made sure of 12 bytes at least.
        let size = u32::from_le_bytes([frame[4], frame[5], frame[6], frame[7]]) as usize;
        let end = MESSAGE_AT.saturating_add(size);
        let payload_at = end.checked_next_multiple_of(BATCH_ALIGN_BYTES).unwrap_or(usize::MAX);
        if size > message_bytes_max || payload_at > frame.len() {
            return Err(FrameError::MessageBytes(size, message_bytes_max));
        }
        if frame[end..payload_at].iter().any(|byte| *byte != 0) {
            return Err(FrameError::Padding);
        }
        let options = VerifierOptions {
            max_depth: MESSAGE_DEPTH_MAX,
            // A table and the offset that leads to it are 8 bytes; an honest message has no table twice.
            max_tables: size / 8 + 1,
            max_apparent_size: size * APPARENT_SIZE_FACTOR + 1024,
            ignore_missing_null_terminator: false,
        };
        let message = schema::size_prefixed_root_as_message_with_opts(&options, &frame[FRAME_PREFIX_BYTES..end])?;
        Ok(Self { message, payload: &frame[payload_at..] })
    }

    /// The number that pairs request and response.
    #[must_use]
    pub fn correlation_id(&self) -> u64 {
        self.message.correlation_id()
    }
}

/// Encodes frames one after the other with the same scratch memory. One per connection or shard.
pub struct FrameEncoder {
    builder: FlatBufferBuilder<'static>,
}

impl Default for FrameEncoder {
    fn default() -> Self {
        Self { builder: FlatBufferBuilder::with_capacity(1024) }
    }
}

impl FrameEncoder {
    /// A new encoder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends the head of a frame to `out`: everything before the payload of `payload_bytes`, which the caller sends
    /// right behind it (a gather write). Without payload this is the whole frame. `body` builds the message's body.
    ///
    /// # Panics
    /// When the frame would be larger than a `u32` can say: callers keep payloads below `FRAME_BYTES_MAX`.
    pub fn head(
        &mut self,
        correlation_id: u64,
        payload_bytes: usize,
        out: &mut Vec<u8>,
        body: impl FnOnce(&mut FlatBufferBuilder<'static>) -> (schema::Body, WIPOffset<UnionWIPOffset>),
    ) {
        let (body_type, body) = body(&mut self.builder);
        let message = schema::Message::create(
            &mut self.builder,
            &schema::MessageArgs { correlation_id, body_type, body: Some(body) },
        );
        schema::finish_size_prefixed_message_buffer(&mut self.builder, message);
        let message = self.builder.finished_data();
        let head_bytes = (FRAME_PREFIX_BYTES + message.len()).next_multiple_of(BATCH_ALIGN_BYTES);
        let frame_bytes =
            u32::try_from(head_bytes - FRAME_PREFIX_BYTES + payload_bytes).expect("a frame fits its limit");
        let start = out.len();
        out.reserve(head_bytes);
        out.extend_from_slice(&frame_bytes.to_le_bytes());
        out.extend_from_slice(message);
        out.resize(start + head_bytes, 0);
        if message.len() > BUILDER_BYTES_KEPT {
            *self = Self::default();
        } else {
            self.builder.reset();
        }
    }
}

/// Encodes one frame without payload, with memory of its own. For rare frames and tests; else keep a [`FrameEncoder`].
pub fn encode_frame(
    correlation_id: u64,
    body: impl FnOnce(&mut FlatBufferBuilder<'static>) -> (schema::Body, WIPOffset<UnionWIPOffset>),
) -> Vec<u8> {
    let mut out = Vec::new();
    FrameEncoder::new().head(correlation_id, 0, &mut out, body);
    out
}

#[cfg(test)]
mod tests;
