//! What goes over the wire: schema, frames, batches, error codes and, with feature `client`, the Rust client.

/// Code that `flatc` made from `wire/schema/*.fbs`.
#[allow(missing_docs, unsafe_code, unused_imports, clippy::all, clippy::pedantic, clippy::unwrap_used)]
#[rustfmt::skip]
pub mod generated {
    #[path = "batch_generated.rs"]
    pub mod batch;
    #[path = "message_generated.rs"]
    pub mod message;
}
