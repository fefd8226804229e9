//! The share of the disk that consumers behind memory may take while producers write.
//!
//! Reads of what is long on disk are as large as writes, and there may be any number of readers. While the shard writes, a
//! read is followed by a pause, so that reads are under way for no more than their share of the time: with 50 %, as long a
//! pause as the read took. A slow disk makes for long reads, and so for long pauses. Without writes there are no pauses.
//!
//! Owned by the shard's executor; given the times at which reads begin and end.

use std::time::Duration;

/// The longest pause after one read: a device that hangs once must not stop readers for as long again.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// See the module.
#[derive(Debug)]
pub struct ReadShare {
    percent: u32,
    /// When the read that ended last did.
    ended: Duration,
    /// No read begins before this.
    next: Duration,
}

impl ReadShare {
    /// A share of `percent` of the time, 1 to 100; 100 makes no pauses.
    ///
    /// # Panics
    /// When it is none of these.
    #[must_use]
    pub fn new(percent: u32) -> Self {
        assert!((1..=100).contains(&percent), "a share of {percent} %");
        Self { percent, ended: Duration::ZERO, next: Duration::ZERO }
    }

    /// How long a read that would begin at `now` must wait.
    #[must_use]
    pub fn wait(&self, now: Duration) -> Duration {
        self.next.saturating_sub(now)
    }

    /// A read was under way from `began` to `ended`; `writing` tells whether the shard writes. Reads may overlap: time is
    /// counted once.
    pub fn read(&mut self, began: Duration, ended: Duration, writing: bool) {
        let busy = ended.saturating_sub(began.max(self.ended));
        self.ended = self.ended.max(ended);
        if writing {
            let pause = (busy * (100 - self.percent) / self.percent).min(PAUSE_MAX);
            self.next = self.next.max(ended) + pause;
            // Of many short reads side by side, too.
            self.next = self.next.min(ended + PAUSE_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_read_beside_writes_is_followed_by_a_pause_of_its_share() {
        let mut share = ReadShare::new(25);
        share.read(10 * MS, 14 * MS, true);
        assert_eq!(share.wait(14 * MS), 12 * MS);
        assert_eq!(share.wait(26 * MS), Duration::ZERO);
        share.read(26 * MS, 30 * MS, false);
        assert_eq!(share.wait(30 * MS), Duration::ZERO, "nobody writes");
    }

    #[test]
    fn reads_side_by_side_count_once() {
        let mut share = ReadShare::new(50);
        share.read(Duration::ZERO, 10 * MS, true);
        share.read(Duration::ZERO, 10 * MS, true);
        assert_eq!(share.wait(10 * MS), 10 * MS);
    }

    #[test]
    fn a_device_that_hangs_stops_readers_for_a_bounded_time() {
        let mut share = ReadShare::new(1);
        share.read(Duration::ZERO, 10_000 * MS, true);
        assert_eq!(share.wait(10_000 * MS), PAUSE_MAX);
    }

    proptest! {
        /// Readers that always wait as they are told are under way for no more than their share of the time.
        #[test]
        fn the_share_is_kept(percent in 1_u32..=100, reads in prop::collection::vec(0_u64..1000, 1..100)) {
            let mut share = ReadShare::new(percent);
            let (mut now, mut busy) = (Duration::ZERO, Duration::ZERO);
            for micros in reads {
                now += share.wait(now);
                // Short enough that no pause is cut.
                let took = Duration::from_micros(micros);
                share.read(now, now + took, true);
                now += took;
                busy += took;
            }
            now += share.wait(now);
            let kept = busy * 100 <= now * percent + Duration::from_micros(100);
            prop_assert!(kept, "{busy:?} of {now:?} are more than {percent} %");
        }
    }
}
