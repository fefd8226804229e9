//! When blocks ahead of the log's end are worth writing with zeros.
//!
//! Syncing a small write into blocks that were only allocated makes the filesystem commit that they are written now; into
//! blocks that were written before it is a flush of the device and no more. So while small extents are synced one by
//! one, zeros are written ahead of them in one large write. Large extents gain nothing from it and would write everything
//! twice: where they come, nothing is filled.
//!
//! What must hold: nothing is placed over a range that is being filled, lest the zeros land last.

use std::ops::Range;

/// Bytes of one fill.
const FILL_BYTES: u64 = 1024 * 1024;
/// A fill starts when fewer written bytes than this lie ahead: the next extents go there meanwhile.
const AHEAD_BYTES_MIN: u64 = 1024 * 1024;
/// Larger extents end a series of small ones.
const SMALL_BYTES_MAX: u64 = 128 * 1024;
/// So many small synced extents in a row start the filling.
const SERIES_MIN: u32 = 8;

/// The state of one open segment. Owned by the shard that writes it.
#[derive(Debug, Default)]
pub struct Prefill {
    /// Every block before this place was written before.
    written_end: u64,
    filling: Option<Range<u64>>,
    series: u32,
}

impl Prefill {
    /// The open segment whose first `written_bytes` were written before: of a recycled file, all it held.
    #[must_use]
    pub const fn new(written_bytes: u64) -> Self {
        Self { written_end: written_bytes, filling: None, series: 0 }
    }

    /// Whether an extent that ends at `end` must wait for the running fill.
    #[must_use]
    pub fn must_wait(&self, end: u64) -> bool {
        self.filling.as_ref().is_some_and(|filling| end > filling.start)
    }

    /// Whether a fill is running.
    #[must_use]
    pub const fn is_filling(&self) -> bool {
        self.filling.is_some()
    }

    /// An extent got its place; `synced` tells whether somebody waits for its sync. Gives the range to fill now, with zeros;
    /// [`Prefill::filled`] ends it.
    ///
    /// # Panics
    /// When the extent lies over the range that is being filled.
    pub fn placed(&mut self, extent: Range<u64>, synced: bool, segment_bytes: u64) -> Option<Range<u64>> {
        assert!(!self.must_wait(extent.end), "an extent over blocks that are being filled");
        self.written_end = self.written_end.max(extent.end);
        if extent.end - extent.start > SMALL_BYTES_MAX {
            self.series = 0;
            return None;
        }
        self.series += u32::from(synced && self.series < SERIES_MIN);
        if self.series < SERIES_MIN || self.is_filling() || self.written_end - extent.end >= AHEAD_BYTES_MIN {
            return None;
        }
        let range = self.written_end..(self.written_end + FILL_BYTES).min(segment_bytes);
        if range.is_empty() {
            return None;
        }
        self.filling = Some(range.clone());
        Some(range)
    }

    /// The running fill has ended well.
    pub fn filled(&mut self) {
        if let Some(filling) = self.filling.take() {
            self.written_end = filling.end;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEGMENT: u64 = 32 * 1024 * 1024;

    #[test]
    fn a_series_of_small_synced_extents_starts_a_fill_and_a_large_one_ends_it() {
        let mut prefill = Prefill::new(4096);
        let mut at = 4096;
        let mut place = |prefill: &mut Prefill, bytes, synced| {
            let extent = at..at + bytes;
            at += bytes;
            prefill.placed(extent, synced, SEGMENT)
        };
        for _ in 1..SERIES_MIN {
            assert_eq!(place(&mut prefill, 4096, true), None);
            assert_eq!(place(&mut prefill, 4096, false), None);
        }
        let fill = place(&mut prefill, 4096, true).unwrap();
        assert_eq!(fill, 4096 * 16..4096 * 16 + FILL_BYTES);
        assert!(prefill.must_wait(fill.start + 1) && !prefill.must_wait(fill.start));
        prefill.filled();
        // The next one begins where it ended.
        assert_eq!(place(&mut prefill, 4096, true).unwrap().start, fill.end);
        prefill.filled();
        assert_eq!(place(&mut prefill, 4096, true), None);
        assert_eq!(place(&mut prefill, 4 * 1024 * 1024, true), None);
        assert_eq!(place(&mut prefill, 4096, true), None);
    }

    #[test]
    fn a_recycled_file_is_filled_only_behind_what_it_held() {
        let mut prefill = Prefill::new(SEGMENT);
        for at in 0..100 {
            assert_eq!(prefill.placed(at * 4096..(at + 1) * 4096, true, SEGMENT), None);
        }
    }

    proptest! {
        /// Against a map of blocks: fills touch only blocks behind all extents that nobody wrote, and never twice.
        #[test]
        fn fills_never_touch_what_was_written(
            written_blocks in 1_u64..1000,
            steps in prop::collection::vec((1_u64..2000, any::<bool>(), any::<bool>()), 1..400),
        ) {
            let mut prefill = Prefill::new(written_blocks * 4096);
            let mut written = vec![false; (SEGMENT / 4096) as usize];
            written[..written_blocks as usize].fill(true);
            let (mut at, mut filling) = (1_u64, None::<Range<u64>>);
            for (blocks, small, fill_ends) in steps {
                let blocks = if small { 1 + blocks % 8 } else { blocks };
                let extent = at * 4096..(at + blocks) * 4096;
                if extent.end > SEGMENT {
                    break;
                }
                if filling.is_some() && (fill_ends || prefill.must_wait(extent.end)) {
                    prefill.filled();
                    filling = None;
                }
                if let Some(range) = prefill.placed(extent, small, SEGMENT) {
                    prop_assert!(filling.is_none() && range.end <= SEGMENT);
                    prop_assert!(range.start >= (at + blocks) * 4096);
                    for block in range.start / 4096..range.end / 4096 {
                        prop_assert!(!written[block as usize], "block {block} is filled over what was written");
                        written[block as usize] = true;
                    }
                    filling = Some(range);
                }
                written[at as usize..(at + blocks) as usize].fill(true);
                at += blocks;
            }
        }
    }
}
