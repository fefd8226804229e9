//! The data path of one broker: does what the core crate decides.
//!
//! One glommio executor per shard; each thing has one owner and lives on one thread. Read in this order: [`runtime`],
//! [`clock`], [`net`], [`files`] (the only files that name glommio), then `connection`, `dispatch`, `produce`, `fetch`,
//! and `flush`, `log_writer`, `start`.

pub mod admin;
pub mod arena;
mod broker;
pub mod catalog;
mod catch_up;
pub mod clock;
mod command;
mod connection;
mod control;
mod copies;
pub mod data_dir;
mod dispatch;
mod doorbell;
mod extent_image;
mod fetch;
mod fetch_hop;
pub mod files;
mod flush;
mod index_repair;
mod life;
pub mod log_reader;
mod log_writer;
pub mod mailbox;
mod memory;
pub mod mesh;
mod mesh_message;
mod metadata;
pub mod metrics;
pub mod net;
mod packer;
mod panic_mark;
mod parked;
pub mod preflight;
mod produce;
#[expect(unsafe_code, reason = "io_uring calls, descriptors that glommio knows only as numbers, scheduling")]
mod raw;
mod recycle;
mod retention;
mod routing;
pub mod runtime;
mod shard;
mod signal;
mod start;
mod tag_filter;
#[cfg(test)]
mod test_support;
pub mod ticker;

pub use admin::AdminService;
pub use broker::{ArenaChoice, Broker, BrokerAddresses, BrokerConfig, BrokerProbe, Health, StartError, StopError};
pub use control::{ApplyError, BrokerControl};
