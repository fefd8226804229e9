//! Bad input and trouble, from outside: the real binary over real sockets. In each case a healthy producer and consumer
//! on the same broker go on unharmed and the broker neither panics nor ends.

#![allow(clippy::unwrap_used)]

mod descriptors;
mod disk_failure;
mod disk_full;
mod frames;
#[path = "../support/mount.rs"]
mod mount;
mod pressure;
mod produce_fetch;
mod read_failure;
mod start_up;
mod support;
mod topics;
