//! A record: what producers hand in, and what readers of a batch see. Its bytes in the body are key, headers, value;
//! headers stand one behind the other as `u16 name_bytes | u16 value_bytes | name | value`, the tag first.

use ringmain_core::ids::Offset;

use crate::tag::TAG_HEADER;

/// Bytes of the two lengths before each header.
pub(crate) const HEADER_LENGTHS_BYTES: usize = 4;

/// A record to be put into a batch; borrows everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewRecord<'a> {
    /// Decides the partition where the client chooses by key.
    pub key: Option<&'a [u8]>,
    /// The content.
    pub value: Option<&'a [u8]>,
    /// Names with values, besides the tag. Names that start with `$` are reserved.
    pub headers: &'a [(&'a str, &'a [u8])],
    /// Filtered fetches select by it.
    pub tag: Option<&'a str>,
    /// When it happened, milliseconds since the Unix epoch.
    pub timestamp_ms: i64,
}

/// A record of a batch; borrows from the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordView<'a> {
    /// Its number in the partition.
    pub offset: Offset,
    /// When it happened, milliseconds since the Unix epoch.
    pub timestamp_ms: i64,
    /// The key.
    pub key: Option<&'a [u8]>,
    /// The content.
    pub value: Option<&'a [u8]>,
    /// Encoded headers, tag included; see [`RecordView::headers`].
    pub header_bytes: &'a [u8],
    /// Hash of the tag; 0 = none.
    pub tag_hash: u32,
}

/// Headers that do not follow their layout. Producers write them and brokers do not look, so readers must.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("record headers are malformed")]
pub struct MalformedHeaders;

impl<'a> RecordView<'a> {
    /// Names and values in their order, the tag (name `$tag`) included. Ends at the first malformed one, which it yields.
    #[must_use]
    pub fn headers(&self) -> Headers<'a> {
        Headers { rest: self.header_bytes }
    }

    /// The tag's bytes, if there is one. Records without a tag cost nothing here.
    #[must_use]
    pub fn tag(&self) -> Option<&'a [u8]> {
        if self.tag_hash == 0 {
            return None;
        }
        self.headers().map_while(Result::ok).find(|(name, _)| *name == TAG_HEADER).map(|(_, value)| value)
    }
}

/// Iterator over the headers of a record.
#[derive(Clone, Debug)]
pub struct Headers<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Headers<'a> {
    type Item = Result<(&'a str, &'a [u8]), MalformedHeaders>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let header = split_header(self.rest);
        self.rest = header.map_or(&[], |(_, _, rest)| rest);
        Some(header.map(|(name, value, _)| (name, value)).ok_or(MalformedHeaders))
    }
}

fn split_header(bytes: &[u8]) -> Option<(&str, &[u8], &[u8])> {
    let (lengths, rest) = bytes.split_first_chunk::<HEADER_LENGTHS_BYTES>()?;
    let name_bytes = usize::from(u16::from_le_bytes([lengths[0], lengths[1]]));
    let value_bytes = usize::from(u16::from_le_bytes([lengths[2], lengths[3]]));
    let (name, rest) = rest.split_at_checked(name_bytes)?;
    let (value, rest) = rest.split_at_checked(value_bytes)?;
    Some((std::str::from_utf8(name).ok()?, value, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(header_bytes: &[u8]) -> RecordView<'_> {
        RecordView { offset: Offset(0), timestamp_ms: 0, key: None, value: None, header_bytes, tag_hash: 1 }
    }

    #[test]
    fn headers_come_out_in_order() {
        let bytes = [4, 0, 1, 0, b'$', b't', b'a', b'g', b'x', 1, 0, 0, 0, b'n'];
        let headers: Vec<_> = record(&bytes).headers().map(Result::unwrap).collect();
        assert_eq!(headers, [("$tag", &b"x"[..]), ("n", &b""[..])]);
        assert_eq!(record(&bytes).tag(), Some(&b"x"[..]));
    }

    #[test]
    fn malformed_headers_end_the_walk_with_an_error() {
        for bytes in [&[1, 0][..], &[2, 0, 0, 0, b'n'], &[1, 0, 255, 255, b'n', 1], &[1, 0, 0, 0, 0xff]] {
            let walked: Vec<_> = record(bytes).headers().collect();
            assert_eq!(walked, [Err(MalformedHeaders)]);
            assert_eq!(record(bytes).tag(), None);
        }
    }
}
