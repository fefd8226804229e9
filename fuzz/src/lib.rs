//! Bodies of the fuzz targets: each takes any bytes, and panics when a parser of foreign bytes does not keep what it
//! promises. The targets in fuzz_targets/ hand them what libFuzzer makes up; tests/fuzz_corpus.rs of the workspace runs
//! the committed corpus through the same functions.
//!
//! Structures have CRCs, which mutations would hardly ever get past: so most bodies compute them anew where the first
//! byte of the input says so.

pub mod arena_adoption;
pub mod batch;
pub mod checkpoint;
pub mod extent;
pub mod footer;
pub mod frame;
mod input;
pub mod message;
pub mod seeds;
pub mod segment_recovery;
mod writer;

/// A target: its name, which is that of its folder in corpus/, and its body.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("frame", frame::run),
    ("message", message::run),
    ("batch", batch::run),
    ("extent", extent::run),
    ("checkpoint", checkpoint::run),
    ("footer", footer::run),
    ("segment_recovery", segment_recovery::run),
    ("arena_adoption", arena_adoption::run),
];
