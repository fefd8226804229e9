//! Waiting between attempts: exponential with jitter, never shorter than the server asked for, and not for ever.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use crate::client::error::ClientError;

const FIRST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(1);
/// A server that asks for more is not believed.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(30);

/// The attempts at one thing.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    began: Instant,
    until: Instant,
    attempts: u32,
    next: Duration,
}

impl Backoff {
    /// Attempts that end at `until`; at least one is always made.
    pub(crate) fn until(until: Instant) -> Self {
        Self { began: Instant::now(), until, attempts: 0, next: FIRST }
    }

    /// After a failed attempt: waits until the next one, or says why there is none.
    pub(crate) async fn wait(&mut self, error: ClientError) -> Result<(), ClientError> {
        tokio::time::sleep(self.pause(error)?).await;
        Ok(())
    }

    /// The same after a failure that the caller has mended, whatever its kind.
    pub(crate) async fn wait_mended(&mut self, error: ClientError) -> Result<(), ClientError> {
        tokio::time::sleep(self.pause_mended(error)?).await;
        Ok(())
    }

    /// After a failed attempt: how long to wait until the next one, or why there is none.
    pub(crate) fn pause(&mut self, error: ClientError) -> Result<Duration, ClientError> {
        if error.retriable() { self.pause_mended(error) } else { Err(error) }
    }

    fn pause_mended(&mut self, error: ClientError) -> Result<Duration, ClientError> {
        self.attempts += 1;
        let wait = jittered(self.next).max(error.retry_after().min(RETRY_AFTER_MAX));
        let now = Instant::now();
        if now + wait > self.until {
            let (attempts, seconds) = (self.attempts, now - self.began);
            return Err(ClientError::GaveUp { attempts, seconds, last: Box::new(error) });
        }
        self.next = (self.next * 2).min(LONGEST);
        Ok(wait)
    }
}

/// Some number, another one at each call. Not for secrets.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// Between half of `wait` and all of it, so that clients that failed together do not come back together.
fn jittered(wait: Duration) -> Duration {
    wait / 2 + wait.mul_f64((random() % 1024) as f64 / 2048.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error_code::ErrorCode;

    fn busy(retry_after_ms: u32) -> ClientError {
        ClientError::server(ErrorCode::SERVER_BUSY, "".into(), retry_after_ms)
    }

    #[test]
    fn jitter_stays_between_half_and_all() {
        for _ in 0..100 {
            let wait = jittered(Duration::from_millis(100));
            assert!((50..=100).contains(&wait.as_millis()), "{wait:?}");
        }
    }

    #[tokio::test]
    async fn what_the_server_asks_for_is_waited() {
        let began = Instant::now();
        let mut backoff = Backoff::until(began + Duration::from_secs(60));
        backoff.wait(busy(60)).await.unwrap();
        assert!(began.elapsed() >= Duration::from_millis(60));
    }

    #[tokio::test]
    async fn fatal_errors_end_it_at_once_and_others_when_time_is_over() {
        let mut backoff = Backoff::until(Instant::now() + Duration::from_millis(30));
        let fatal = ClientError::server(ErrorCode::TOO_LARGE, "".into(), 0);
        assert_eq!(backoff.wait(fatal.clone()).await, Err(fatal));
        let error = loop {
            if let Err(error) = backoff.wait(busy(0)).await {
                break error;
            }
        };
        assert!(matches!(&error, ClientError::GaveUp { last, .. } if **last == busy(0)));
        assert_eq!(error.code(), Some(ErrorCode::SERVER_BUSY));
    }
}
