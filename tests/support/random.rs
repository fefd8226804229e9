//! Random numbers from a seed: splitmix64. A failing test prints the seed it was run with.

use std::time::{SystemTime, UNIX_EPOCH};

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// From `RINGMAIN_SEED`, else from the clock; says which.
    pub fn announced(test: &str) -> Self {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let seed = super::number_from_env("RINGMAIN_SEED", clock);
        eprintln!("{test}: RINGMAIN_SEED={seed}");
        Self(seed)
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One of `range`.
    pub fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.next().is_multiple_of(times)
    }

    /// Random bytes.
    pub fn bytes(&mut self, size: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(size + 8);
        while bytes.len() < size {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(size);
        bytes
    }
}
