//! How records look on standard output: raw values as lines, or one JSON object a line.

use std::io::{self, Write};

use ringmain_core::ids::Offset;
use ringmain_wire::record::RecordView;

use crate::cli::Format;

/// Writes records of one topic to `out`.
pub struct Printer<W> {
    out: W,
    format: Format,
    /// `{"topic":"…","partition":`, since it is the same for all.
    json_head: String,
}

impl<W: Write> Printer<W> {
    pub fn new(out: W, format: Format, topic: &str) -> Self {
        let topic = serde_json::Value::from(topic);
        Self { out, format, json_head: format!("{{\"topic\":{topic},\"partition\":") }
    }

    /// Writes one record.
    pub fn record(&mut self, partition: u32, record: &RecordView<'_>) -> io::Result<()> {
        match self.format {
            Format::Raw => {
                self.out.write_all(record.value.unwrap_or_default())?;
                self.out.write_all(b"\n")
            }
            Format::Json => {
                let (head, offset, time) = (&self.json_head, record.offset, record.timestamp_ms);
                write!(self.out, "{head}{partition},\"offset\":{offset},\"timestamp_ms\":{time}")?;
                field(&mut self.out, "key", record.key)?;
                field(&mut self.out, "value", record.value)?;
                self.out.write_all(b"}\n")
            }
        }
    }

    /// Says that offsets `from..to` will never be served: on standard error, and in its place among JSON lines.
    pub fn gap(&mut self, partition: u32, from: Offset, to: Offset, reason: &str) -> io::Result<()> {
        // Records before the gap come out before it is told.
        self.out.flush()?;
        eprintln!("ringmain: gap partition={partition} from={from} to={to} reason={reason}");
        match self.format {
            Format::Raw => Ok(()),
            Format::Json => {
                let head = &self.json_head;
                writeln!(
                    self.out,
                    "{head}{partition},\"gap\":{{\"from\":{from},\"to\":{to},\"reason\":\"{reason}\"}}}}"
                )
            }
        }
    }

    /// Hands everything on.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A field with text, `null`, or as `NAME_base64` what is not UTF-8.
fn field(out: &mut impl Write, name: &str, bytes: Option<&[u8]>) -> io::Result<()> {
    match bytes.map(std::str::from_utf8) {
        None => write!(out, ",\"{name}\":null"),
        Some(Ok(text)) => {
            write!(out, ",\"{name}\":")?;
            serde_json::to_writer(&mut *out, text).map_err(io::Error::from)
        }
        Some(Err(_)) => {
            write!(out, ",\"{name}_base64\":\"")?;
            base64(out, bytes.unwrap_or_default())?;
            out.write_all(b"\"")
        }
    }
}

/// Standard base64 with padding, RFC 4648 section 4.
fn base64(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for three in bytes.chunks(3) {
        let bits = (0..3).fold(0_u32, |bits, at| bits << 8 | u32::from(three.get(at).copied().unwrap_or(0)));
        let mut four = [b'='; 4];
        for (at, letter) in four.iter_mut().enumerate().take(three.len() + 1) {
            *letter = LETTERS[(bits >> (18 - 6 * at)) as usize & 63];
        }
        out.write_all(&four)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record<'a>(key: Option<&'a [u8]>, value: Option<&'a [u8]>) -> RecordView<'a> {
        RecordView { offset: Offset(41), timestamp_ms: 5, key, value, header_bytes: &[], tag_hash: 0 }
    }

    fn printed(format: Format, record: &RecordView<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        Printer::new(&mut out, format, "t").record(3, record).unwrap();
        out
    }

    #[test]
    fn raw_is_the_value_as_it_is_and_a_line_end() {
        assert_eq!(printed(Format::Raw, &record(Some(b"k"), Some(b"\xff\r"))), b"\xff\r\n");
        assert_eq!(printed(Format::Raw, &record(None, None)), b"\n");
    }

    #[test]
    fn json_has_text_where_it_can_and_base64_where_it_must() {
        let line = printed(Format::Json, &record(None, Some("é\"\n".as_bytes())));
        let value: serde_json::Value = serde_json::from_slice(&line).unwrap();
        let expected = serde_json::json!({
            "topic": "t", "partition": 3, "offset": 41, "timestamp_ms": 5, "key": null, "value": "é\"\n"
        });
        assert_eq!(value, expected);
        assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
        let line = printed(Format::Json, &record(Some(b"\xff"), Some(b"")));
        let value: serde_json::Value = serde_json::from_slice(&line).unwrap();
        assert_eq!((&value["key_base64"], &value["value"]), (&"/w==".into(), &"".into()));
    }

    #[test]
    fn a_gap_stands_among_the_json_lines() {
        let mut out = Vec::new();
        Printer::new(&mut out, Format::Json, "t").gap(0, Offset(5), Offset(9), "lost_memory").unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["gap"], serde_json::json!({ "from": 5, "to": 9, "reason": "lost_memory" }));
    }

    #[test]
    fn base64_has_the_vectors_of_rfc_4648() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            let mut out = Vec::new();
            base64(&mut out, plain.as_bytes()).unwrap();
            assert_eq!(out, coded.as_bytes());
        }
    }
}
