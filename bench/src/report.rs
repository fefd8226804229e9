//! How reports are printed: one JSON line for machines, aligned lines for people. The same fields in both.

use std::fmt;

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use crate::histogram::Percentiles;
use crate::scrape::BrokerSample;
use crate::verify::Findings;

/// Bytes in a megabyte of every `mb_per_s`: the decimal one, as disks and networks are sold.
pub const MB: f64 = 1e6;

/// What every run of load reports: the same fields for produce and consume, so that tools need one parser.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Records acked, or read, within `seconds`.
    pub records: u64,
    /// Bytes of their values, before any compression.
    pub payload_bytes: u64,
    /// The measured time.
    pub seconds: f64,
    /// `records / seconds`.
    pub records_per_s: f64,
    /// `payload_bytes / seconds`, in 10^6 bytes.
    pub mb_per_s: f64,
    /// Half of the operations are faster.
    pub p50_us: f64,
    /// One in 100 is slower.
    pub p99_us: f64,
    /// One in 1000 is slower.
    pub p999_us: f64,
    /// The slowest.
    pub max_us: f64,
    /// Acked records that are not there.
    pub lost: u64,
    /// Records that are there more than once.
    pub duplicated: u64,
    /// Records behind one that was sent later, or at another offset than acked.
    pub reordered: u64,
    /// Records whose bytes are not those sent.
    pub corrupt: u64,
    /// Records that were never sent, or were refused.
    pub unexpected: u64,
    /// Bytes that the broker wrote to its device for these records; null when neither its HTTP address nor its process
    /// id is known.
    pub device_bytes_written: Option<u64>,
    /// CPU seconds that the broker took for them, flushing included.
    pub broker_cpu_s: Option<f64>,
    /// Resident bytes of the broker when the load ended, arena included.
    pub broker_rss_bytes: Option<u64>,
    /// CPU seconds that the clients took: on one machine they are missing from the broker.
    pub client_cpu_s: f64,
}

impl Figures {
    /// Fills in counts, time, rates and latencies.
    pub(crate) fn measured(records: u64, payload_bytes: u64, seconds: f64, latencies: Percentiles) -> Self {
        Self {
            records,
            payload_bytes,
            seconds: rounded(seconds, 3),
            records_per_s: rounded(records as f64 / seconds, 1),
            mb_per_s: mb_per_s(payload_bytes, seconds),
            p50_us: latencies.p50_us,
            p99_us: latencies.p99_us,
            p999_us: latencies.p999_us,
            max_us: latencies.max_us,
            ..Self::default()
        }
    }

    /// Adds what was found wrong.
    pub(crate) fn set_findings(&mut self, findings: Findings) {
        (self.lost, self.duplicated, self.reordered) = (findings.lost, findings.duplicated, findings.reordered);
        (self.corrupt, self.unexpected) = (findings.corrupt, findings.unexpected);
    }

    /// Adds what the broker spent.
    pub(crate) fn set_broker(&mut self, spent: &BrokerSample, resident_bytes: Option<u64>) {
        self.device_bytes_written = spent.device_bytes_written;
        self.broker_cpu_s = spent.cpu_s.map(|seconds| rounded(seconds, 2));
        self.broker_rss_bytes = resident_bytes;
    }

    /// Whether no record was lost, duplicated, reordered, corrupt or unexpected.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.lost + self.duplicated + self.reordered + self.corrupt + self.unexpected == 0
    }
}

/// The report as one line of JSON, without a line end.
///
/// # Panics
/// When a report has a map with keys that are not strings: none has.
#[must_use]
pub fn json_line(report: &impl Serialize) -> String {
    serde_json::to_string(report).expect("a report is a plain structure")
}

/// The report as lines `field  value`, for people; fields without a value are left out.
///
/// # Panics
/// As [`json_line`].
#[must_use]
pub fn lines(report: &impl Serialize) -> String {
    let Fields(fields) = serde_json::from_str(&json_line(report)).expect("a report is an object with named fields");
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut out = String::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Array(items) => items.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
            other => other.to_string(),
        };
        out.push_str(&format!("{name:width$}  {text}\n"));
    }
    out
}

/// The fields of an object in their own order; `serde_json::Map` sorts them by name.
struct Fields(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;

        impl<'de> Visitor<'de> for InOrder {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(InOrder)
    }
}

/// `value` to so many digits behind the point; what is not a number becomes 0, since JSON has no word for it.
#[must_use]
pub fn rounded(value: f64, digits: i32) -> f64 {
    if !value.is_finite() {
        return 0.0;
    }
    let scale = 10_f64.powi(digits);
    (value * scale).round() / scale
}

/// Megabytes per second, to one tenth.
#[must_use]
pub fn mb_per_s(bytes: u64, seconds: f64) -> f64 {
    rounded(bytes as f64 / MB / seconds, 1)
}

/// A quotient to four digits, or none when there is nothing to divide by.
#[must_use]
pub fn ratio(dividend: Option<u64>, divisor: u64) -> Option<f64> {
    dividend.filter(|_| divisor > 0).map(|dividend| rounded(dividend as f64 / divisor as f64, 4))
}

/// The middle value (of an even number the mean of the two), 0 of none.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[odd / 2],
        even => f64::midpoint(sorted[even / 2 - 1], sorted[even / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Sample {
        zebra: u64,
        apple: Option<f64>,
        none: Option<u64>,
        words: Vec<u32>,
    }

    fn sample() -> Sample {
        Sample { zebra: 7, apple: Some(0.5), none: None, words: vec![1, 2] }
    }

    #[test]
    fn a_json_line_is_one_line_with_a_null_for_what_is_not_known() {
        let line = json_line(&sample());
        assert!(!line.contains('\n'));
        let value: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["zebra"], 7);
        assert!(value["none"].is_null());
    }

    #[test]
    fn lines_for_people_leave_out_what_is_not_known() {
        let text = lines(&sample());
        assert_eq!(text.lines().count(), 3);
        assert!(text.starts_with("zebra"), "fields keep the order of the report: {text}");
        assert!(text.contains("words  1 2\n"));
    }

    #[test]
    fn figures_that_have_no_value_never_reach_the_json() {
        assert_eq!(rounded(f64::NAN, 1), 0.0);
        assert_eq!(mb_per_s(5, 0.0), 0.0);
        assert_eq!(ratio(Some(3), 0), None);
        assert_eq!(ratio(Some(1), 3), Some(0.3333));
        assert_eq!(mb_per_s(1_000_000, 2.0), 0.5);
    }

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_the_middle_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }
}
