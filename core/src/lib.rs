//! What Ringmain decides, free of IO, clock, thread and logging: bytes, `now` and completions come in, decisions go out.
//!
//! Read in this order: [`ids`], [`limits`], [`batch`].
#![forbid(unsafe_code)]

pub mod batch;
pub mod crc;
pub mod ids;
pub mod limits;
pub mod topic;
