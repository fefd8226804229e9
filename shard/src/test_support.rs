//! For tests: executors under a watchdog, since a hang is how a runtime fails.

use std::future::Future;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::runtime::{ShardThread, ShardThreadConfig, spawn_shard};
use crate::ticker::Ticker;

/// Runs `f`; aborts the process with a message when it takes longer than `seconds`.
pub(crate) fn with_watchdog<T>(seconds: u64, f: impl FnOnce() -> T) -> T {
    let (done, is_done) = channel::<()>();
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let watchdog = std::thread::spawn(move || {
        if is_done.recv_timeout(Duration::from_secs(seconds)) == Err(RecvTimeoutError::Timeout) {
            eprintln!("watchdog: {test} hangs, {seconds} s are over");
            std::process::abort();
        }
    });
    let output = f();
    drop(done);
    watchdog.join().unwrap();
    output
}

/// A shard thread on any CPU, with little IO memory.
pub(crate) fn shard<F, Fut, T>(index: u16, dir: &Path, ticker: &Ticker, f: F) -> ShardThread<T>
where
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let config = ShardThreadConfig { index, cpu: None, io_memory_bytes: 1 << 20, data_dir: dir.to_owned() };
    spawn_shard(config, ticker, f).unwrap()
}

/// Runs `f`'s future on a shard of its own, with a temporary directory on disk, for at most 60 seconds.
pub(crate) fn on_shard<F, Fut, T>(f: F) -> T
where
    F: FnOnce(std::path::PathBuf) -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
    T: Send + 'static,
{
    with_watchdog(60, || {
        let dir = tempfile::tempdir().unwrap();
        let ticker = Ticker::start().unwrap();
        let path = dir.path().to_owned();
        let output = shard(0, dir.path(), &ticker, move || f(path)).join();
        output.unwrap()
    })
}
