//! What the black-box tests share: a home for brokers with its data and arena directories, the real binary run in it, a
//! ledger of what was sent and acked, producers that fill the ledger, and the reading back that is compared with it.

#![allow(dead_code, reason = "each test file uses its own part of this")]

pub mod broker;
pub mod ledger;
pub mod load;
pub mod mount;
pub mod random;
pub mod readback;
pub mod throttle;
pub mod trial;

use std::time::{Duration, Instant};

/// How long a condition may take to come true. Generous: it only matters when a test fails.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Time between two looks at something slow.
pub const POLL: Duration = Duration::from_millis(10);

/// Waits until `condition` gives something, at most for [`LIMIT`].
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(began.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs client code to its end, at most for four times [`LIMIT`].
pub fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let result = runtime.block_on(async { tokio::time::timeout(4 * LIMIT, work).await });
    runtime.shutdown_background();
    result.expect("client code came to no end")
}

/// A number from the environment.
pub fn number_from_env(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`")))
}
