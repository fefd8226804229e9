//! The data path of one broker: does what the core crate decides.

pub mod arena;
pub mod catalog;
pub mod clock;
pub mod data_dir;
mod doorbell;
pub mod files;
pub mod mailbox;
pub mod mesh;
pub mod net;
pub mod preflight;
#[expect(unsafe_code, reason = "io_uring calls and descriptors that glommio knows only as numbers")]
mod raw;
pub mod runtime;
#[cfg(test)]
mod test_support;
pub mod ticker;
