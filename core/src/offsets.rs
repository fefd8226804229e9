//! The ends of one partition, in the one order that may hold: log start <= synced <= flushed <= log end.

use crate::ids::Offset;

/// Ends of a partition; all exclusive, all only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    log_start: Offset,
    synced_end: Offset,
    flushed_end: Offset,
    log_end: Offset,
}

impl Ends {
    /// A partition with everything up to `log_end` on disk and synced, as after a start.
    #[must_use]
    pub fn at_rest(log_start: Offset, log_end: Offset) -> Self {
        assert!(log_start <= log_end, "log start {log_start} is past log end {log_end}");
        Self { log_start, synced_end: log_end, flushed_end: log_end, log_end }
    }

    /// First offset that is kept.
    #[must_use]
    pub const fn log_start(&self) -> Offset {
        self.log_start
    }

    /// What a completed fdatasync covers.
    #[must_use]
    pub const fn synced_end(&self) -> Offset {
        self.synced_end
    }

    /// What completed writes cover.
    #[must_use]
    pub const fn flushed_end(&self) -> Offset {
        self.flushed_end
    }

    /// Next offset to be given.
    #[must_use]
    pub const fn log_end(&self) -> Offset {
        self.log_end
    }

    /// Batches were appended up to `end`.
    ///
    /// # Panics
    /// When `end` lies before the log end: an offset would be given twice.
    pub fn appended(&mut self, end: Offset) {
        assert!(end >= self.log_end, "log end would fall from {} to {end}", self.log_end);
        self.log_end = end;
    }

    /// Everything before `end` is flushed. Says whether that is news.
    ///
    /// # Panics
    /// When `end` lies past the log end.
    pub fn flushed(&mut self, end: Offset) -> bool {
        assert!(end <= self.log_end, "flushed end {end} past log end {}", self.log_end);
        let news = end > self.flushed_end;
        self.flushed_end = self.flushed_end.max(end);
        news
    }

    /// Everything before `end` is synced. Says whether that is news.
    ///
    /// # Panics
    /// When `end` lies past the flushed end.
    pub fn synced(&mut self, end: Offset) -> bool {
        assert!(end <= self.flushed_end, "synced end {end} past flushed end {}", self.flushed_end);
        let news = end > self.synced_end;
        self.synced_end = self.synced_end.max(end);
        news
    }

    /// Everything before `start` is given up. Says whether that is news; never goes past the synced end.
    pub fn start_raised(&mut self, start: Offset) -> bool {
        let start = start.min(self.synced_end);
        let news = start > self.log_start;
        self.log_start = self.log_start.max(start);
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_order_holds_whatever_comes(steps in proptest::collection::vec((0..4u8, 0..50u64), 0..100)) {
            let mut ends = Ends::at_rest(Offset(3), Offset(10));
            for (kind, by) in steps {
                match kind {
                    0 => ends.appended(ends.log_end().plus(by)),
                    1 => { ends.flushed(Offset(ends.flushed_end().0 + by).min(ends.log_end())); }
                    2 => { ends.synced(Offset(ends.synced_end().0 + by).min(ends.flushed_end())); }
                    _ => { ends.start_raised(Offset(ends.log_start().0 + by)); }
                }
                prop_assert!(ends.log_start() <= ends.synced_end());
                prop_assert!(ends.synced_end() <= ends.flushed_end());
                prop_assert!(ends.flushed_end() <= ends.log_end());
            }
        }
    }

    #[test]
    #[should_panic(expected = "past flushed end")]
    fn a_sync_past_the_flushed_end_is_a_bug() {
        let mut ends = Ends::at_rest(Offset(0), Offset(0));
        ends.appended(Offset(5));
        ends.synced(Offset(1));
    }
}
