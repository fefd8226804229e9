//! What Ringmain decides, free of IO, clock, thread and logging: bytes, `now` and completions come in, decisions go out.
//!
//! Read in this order: [`ids`], [`limits`], [`batch`].
#![forbid(unsafe_code)]

pub mod acks;
pub mod adopt;
pub mod batch;
pub mod block;
pub mod checkpoint;
pub mod codec;
pub mod compression;
pub mod compressor;
pub mod crc;
pub mod dedup;
mod disk_header;
pub mod extent;
pub mod fetch;
pub mod flush;
pub mod gather;
pub mod ids;
pub mod index;
pub mod inspect;
pub mod limits;
pub mod log;
pub mod offsets;
pub mod pack;
pub mod packing;
pub mod prefill;
pub mod read_share;
pub mod recover;
pub mod retention;
pub mod segment;
pub mod store;
#[cfg(test)]
mod test_memory;
pub mod topic;
