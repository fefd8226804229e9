//! Latencies: an HDR histogram of nanoseconds, and the percentiles of it that reports carry.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// Three significant digits: a percentile is at most 0.1 % off.
const DIGITS: u8 = 3;
/// Longest latency that is told apart; longer ones count as this.
const LATENCY_MAX: Duration = Duration::from_secs(600);

/// Latencies of one kind of operation. Each client has its own; they are merged at the end, since an average of
/// percentiles means nothing.
#[derive(Clone, Debug)]
pub struct Latencies {
    nanoseconds: Histogram<u64>,
}

/// Percentiles in microseconds; all 0 when nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half are faster.
    pub p50_us: f64,
    /// One in 100 is slower.
    pub p99_us: f64,
    /// One in 1000 is slower.
    pub p999_us: f64,
    /// The slowest.
    pub max_us: f64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        let nanoseconds = Histogram::new_with_bounds(1, LATENCY_MAX.as_nanos() as u64, DIGITS)
            .expect("bounds and digits are constants that the histogram takes");
        Self { nanoseconds }
    }

    /// Counts one operation that took `latency`.
    pub fn record(&mut self, latency: Duration) {
        self.record_nanoseconds(latency.as_nanos().min(u128::from(u64::MAX)) as u64);
    }

    /// Counts one operation that took so many nanoseconds.
    pub fn record_nanoseconds(&mut self, nanoseconds: u64) {
        self.nanoseconds.saturating_record(nanoseconds.max(1));
    }

    /// Counts `times` operations that took so many nanoseconds each.
    pub fn record_many(&mut self, nanoseconds: u64, times: u64) {
        self.nanoseconds.saturating_record_n(nanoseconds.max(1), times);
    }

    /// Adds all of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.nanoseconds.add(&other.nanoseconds).expect("both have the same bounds and digits");
    }

    /// Operations counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.nanoseconds.len()
    }

    /// The latency that `quantile` of all operations (0.5 = half) do not exceed, in microseconds.
    #[must_use]
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        if self.nanoseconds.is_empty() {
            return 0.0;
        }
        microseconds(self.nanoseconds.value_at_quantile(quantile))
    }

    /// The percentiles that reports carry.
    #[must_use]
    pub fn percentiles(&self) -> Percentiles {
        if self.nanoseconds.is_empty() {
            return Percentiles::default();
        }
        Percentiles {
            p50_us: self.quantile_us(0.5),
            p99_us: self.quantile_us(0.99),
            p999_us: self.quantile_us(0.999),
            max_us: microseconds(self.nanoseconds.max()),
        }
    }
}

/// Microseconds to one tenth: finer is noise.
fn microseconds(nanoseconds: u64) -> f64 {
    (nanoseconds as f64 / 100.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_thousandth_of_the_true_ones() {
        let mut latencies = Latencies::new();
        for us in 1..=10_000 {
            latencies.record(Duration::from_micros(us));
        }
        let percentiles = latencies.percentiles();
        for (got, want) in [(percentiles.p50_us, 5000.0), (percentiles.p99_us, 9900.0), (percentiles.max_us, 10_000.0)]
        {
            assert!((got / want - 1.0_f64).abs() < 0.002, "{got} for {want}");
        }
    }

    #[test]
    fn merging_equals_recording_in_one_place() {
        let (mut one, mut two, mut both) = (Latencies::new(), Latencies::new(), Latencies::new());
        for value in 0..1000_u64 {
            let part = if value % 3 == 0 { &mut one } else { &mut two };
            part.record_nanoseconds(value * 977);
            both.record_nanoseconds(value * 977);
        }
        one.merge(&two);
        assert_eq!(one.percentiles(), both.percentiles());
        assert_eq!(one.count(), 1000);
    }

    #[test]
    fn nothing_measured_gives_zeros_and_the_far_too_long_is_kept() {
        assert_eq!(Latencies::new().percentiles(), Percentiles::default());
        let mut latencies = Latencies::new();
        latencies.record(Duration::from_secs(10_000));
        assert!(latencies.percentiles().max_us >= 599_000_000.0);
    }
}
