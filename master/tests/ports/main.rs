//! The master's two ports and the probe port over real sockets, with a broker that only remembers.

#![expect(clippy::unwrap_used, reason = "a failed test may panic")]

mod fake;
mod frames;
mod http;
mod probes;
