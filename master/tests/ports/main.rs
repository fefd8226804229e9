//! The master's two ports and the probe port over real sockets, with a broker that only remembers.

mod fake;
mod frames;
mod http;
mod probes;
