//! What goes over the wire: schema, frames, batches, error codes and, with feature `client`, the Rust client.
//!
//! PROTOCOL.md beside this crate is the specification. Read in this order: [`frame`], [`message`], one message such as
//! [`produce`], [`batch`], [`error_code`].

pub mod batch;
pub mod batch_builder;
pub mod batch_codec;
#[cfg(feature = "client")]
pub mod client;
pub mod error_code;
pub mod fetch;
pub mod frame;
pub mod hello;
pub mod message;
pub mod metadata;
pub mod offsets;
pub mod produce;
pub mod record;
pub mod sparse;
pub mod tag;
pub mod topic;

/// Code that `flatc` made from `wire/schema/*.fbs`.
#[allow(missing_docs, rustdoc::all, unsafe_code, unused_imports, clippy::all, clippy::pedantic, clippy::unwrap_used)]
#[rustfmt::skip]
pub mod generated {
    #[path = "batch_generated.rs"]
    pub mod batch;
    #[path = "message_generated.rs"]
    pub mod message;
}

#[cfg(test)]
mod golden;
#[cfg(test)]
pub(crate) mod samples;

pub use generated::message::ringmain::wire as schema;

pub use error_code::{ClientAction, ErrorCode};
pub use frame::{FrameEncoder, FrameError, FrameView};
