//! When the next group of synced produces is worth waiting for.
//!
//! Clients that wait for a sync come back with their next records right after it. A flush that starts with the first of
//! them leaves the others for the sync after it, and the group stays split in halves for good: each sync carries half of
//! what it could, and everybody waits for two. So the flusher waits until as many wait as were there when the sync ended,
//! for a bounded time. Where clients do not come back so soon, waiting is given up for a growing number of syncs.

use std::time::Duration;

/// The longest wait: one tick of a working shard.
const WAIT_MAX: Duration = Duration::from_millis(1);
/// Syncs without a wait after one that was in vain: 1, 2, 4 … up to this.
const SKIP_MAX: u32 = 64;

/// The state of one shard. Owned by its executor.
#[derive(Debug, Default)]
pub struct Gather {
    expected: usize,
    until: Duration,
    skip: u32,
    skip_next: u32,
}

impl Gather {
    /// A sync has ended `acked` waits while `pending` others waited for the next flush.
    pub fn synced(&mut self, acked: usize, pending: usize, now: Duration) {
        if self.skip > 0 {
            self.skip -= 1;
            self.expected = 0;
            return;
        }
        self.expected = acked + pending;
        self.until = now + WAIT_MAX;
    }

    /// Whether a flush for `pending` waits should be held back for more of them.
    pub fn holds_back(&mut self, pending: usize, now: Duration) -> bool {
        if self.expected == 0 {
            return false;
        }
        if pending < self.expected && now < self.until {
            return true;
        }
        if pending >= self.expected {
            self.skip_next = 0;
        } else {
            self.skip_next = (self.skip_next * 2).clamp(1, SKIP_MAX);
            self.skip = self.skip_next;
        }
        self.expected = 0;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    #[test]
    fn a_group_is_whole_when_all_are_back() {
        let mut gather = Gather::default();
        gather.synced(2, 2, NOW);
        assert!(gather.holds_back(2, NOW));
        assert!(gather.holds_back(3, NOW));
        assert!(!gather.holds_back(4, NOW));
        assert!(!gather.holds_back(1, NOW), "one sync is followed by one wait");
    }

    #[test]
    fn the_wait_is_bounded_and_given_up_where_it_is_in_vain() {
        let mut gather = Gather::default();
        let mut waits = 0;
        for sync in 0..1000u32 {
            let now = NOW * sync;
            gather.synced(3, 0, now);
            waits += u32::from(gather.holds_back(1, now));
            assert!(!gather.holds_back(1, now + WAIT_MAX));
        }
        assert!(waits < 30, "{waits} of 1000 syncs were followed by a wait in vain");
    }

    #[test]
    fn a_single_client_never_waits() {
        let mut gather = Gather::default();
        gather.synced(1, 0, NOW);
        assert!(!gather.holds_back(1, NOW));
    }
}
