//! How reports are printed: one JSON line for machines, aligned lines for people. The same fields in both.

use std::fmt;

use serde::Serialize;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

/// Bytes in a megabyte of every `mb_per_s`: the decimal one, as disks and networks are sold.
pub const MB: f64 = 1e6;

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
