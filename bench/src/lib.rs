//! The benchmark harness: what Ringmain does, and the limits of the machine that the figures are divided by.
//!
//! Limits: [`disk`] (raw O_DIRECT writes, reads and syncs) and [`echo`] (TCP round trips and streams on loopback), both
//! through a bare glommio executor set up as the broker sets up its own. Load: [`produce`] and [`consume`], against a
//! running broker. Each has a plain `…Args` with defaults, a `run` that blocks, and a `…Report` that serialises to one
//! JSON line ([`report::json_line`]). `run` starts its own threads and runtimes: call it outside any async runtime.
//!
//! Read in this order: [`histogram`], [`payload`], [`verify`], [`scrape`], [`disk`], [`echo`], then `load`, [`produce`],
//! [`consume`]. `bench/README.md` says what each figure means.

mod cluster;
pub mod consume;
mod device;
pub mod disk;
pub mod echo;
#[expect(unsafe_code, reason = "io_uring_setup and io_uring_register have no safe face")]
mod executor;
#[cfg(test)]
mod fake_broker;
pub mod histogram;
mod load;
pub mod payload;
pub mod produce;
mod reader;
pub mod report;
pub mod scrape;
mod session;
pub mod verify;
