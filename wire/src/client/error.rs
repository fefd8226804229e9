//! What can go wrong for a client, and whether it may go right later.

use std::time::Duration;

use crate::batch_builder::PushError;
use crate::error_code::ErrorCode;
use crate::frame::FrameError;
use crate::message::{DecodeError, ErrorResponse, Response, Text};

/// Why a request, record or connection failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// No connection could be made.
    #[error("can't connect to {address}: {reason}")]
    Connect {
        /// Where to.
        address: String,
        /// What the system or the server said.
        reason: String,
    },
    /// The connection ended while the request waited: it may or may not have been carried out.
    #[error("connection to {address} lost: {reason}")]
    ConnectionLost {
        /// Where to.
        address: String,
        /// Why.
        reason: String,
    },
    /// The server said no.
    #[error("{code}: {}", if message.is_empty() { code.sentence() } else { message })]
    Server {
        /// Which case.
        code: ErrorCode,
        /// What exactly; may be empty.
        message: Text,
        /// Wait at least so long before the same request.
        retry_after: Duration,
    },
    /// The server sent what this client can't read.
    #[error("the server broke the protocol: {0}")]
    Protocol(String),
    /// It may have succeeded later, but the time to try was over.
    #[error("gave up after {} attempts in {:.1} s: {last}", attempts, seconds.as_secs_f64())]
    GaveUp {
        /// How often it was tried.
        attempts: u32,
        /// For how long.
        seconds: Duration,
        /// What the last attempt said.
        last: Box<ClientError>,
    },
    /// The record can't be put into any batch.
    #[error(transparent)]
    Record(#[from] PushError),
    /// The topic has no such partition.
    #[error("topic `{topic}` has no partition {partition}")]
    NoPartition {
        /// Which topic.
        topic: String,
        /// Which partition was asked for.
        partition: u32,
    },
    /// The producer or consumer was closed.
    #[error("closed")]
    Closed,
}

impl ClientError {
    pub(crate) fn server(code: ErrorCode, message: Text, retry_after_ms: u32) -> Self {
        Self::Server { code, message, retry_after: Duration::from_millis(retry_after_ms.into()) }
    }

    pub(crate) fn unexpected(wanted: &str, got: &Response) -> Self {
        let got = match got {
            Response::Hello(_) => "hello",
            Response::Error(_) => "error",
            Response::Produce(_) => "produce",
            Response::Fetch(_) => "fetch",
            Response::Metadata(_) => "metadata",
            Response::Offsets(_) => "offsets",
            Response::Topic(_) => "topic",
        };
        Self::Protocol(format!("a {wanted} request was answered with a {got} response"))
    }

    /// The server's code, if it was the server that refused.
    #[must_use]
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Server { code, .. } => Some(*code),
            Self::GaveUp { last, .. } => last.code(),
            _ => None,
        }
    }

    /// Whether the same may succeed later without anybody changing it.
    #[must_use]
    pub fn retriable(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::ConnectionLost { .. } => true,
            Self::Server { code, .. } => code.retriable(),
            _ => false,
        }
    }

    /// Whether the client's metadata may be to blame.
    #[must_use]
    pub fn wants_refresh(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::ConnectionLost { .. } => true,
            Self::Server { code, .. } => code.wants_refresh(),
            _ => false,
        }
    }

    /// How long the server asked to wait.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        match self {
            Self::Server { retry_after, .. } => *retry_after,
            _ => Duration::ZERO,
        }
    }
}

impl From<ErrorResponse> for ClientError {
    fn from(error: ErrorResponse) -> Self {
        Self::server(error.code, error.message, error.retry_after_ms)
    }
}

impl From<FrameError> for ClientError {
    fn from(error: FrameError) -> Self {
        Self::Protocol(error.to_string())
    }
}

impl From<DecodeError> for ClientError {
    fn from(error: DecodeError) -> Self {
        Self::Protocol(error.to_string())
    }
}
