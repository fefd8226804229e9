//! The tokio runtimes of the control plane: one thread that runs everything, a few that may block.

use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

/// Threads for calls that block: store commits go one after the other anyway.
const BLOCKING_THREADS_MAX: usize = 4;

/// A runtime whose blocking threads carry `name`. Its one worker is the thread that calls `block_on`.
pub(crate) fn control_runtime(name: &'static str) -> Runtime {
    Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .thread_keep_alive(Duration::from_secs(5))
        .thread_name(name)
        .build()
        .expect("the system has an epoll and an eventfd descriptor left")
}
