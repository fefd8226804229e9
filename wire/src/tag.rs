//! Tags and keys as numbers: the hash that preselects records in a filtered fetch, and the hash that picks a partition.

use ringmain_core::crc::crc32c;

use crate::record::RecordView;

/// Name of the record header that holds the tag.
pub const TAG_HEADER: &str = "$tag";

/// The hash that stands in a record's entry: CRC32C of the tag. 0 means no tag, so a tag whose CRC is 0 has 1.
#[must_use]
pub fn tag_hash(tag: &[u8]) -> u32 {
    crc32c(tag).max(1)
}

/// The partition of a key: CRC32C of its bytes modulo the number of partitions. All clients must agree on it.
///
/// # Panics
/// When there are no partitions.
#[must_use]
pub fn partition_of_key(key: &[u8], partitions: u32) -> u32 {
    crc32c(key) % partitions
}

/// The tags of a filtered fetch. A record passes when its tag is one of them, byte for byte; the hash only saves looking
/// into bodies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TagFilter {
    tags: Vec<(u32, String)>,
}

impl TagFilter {
    /// A filter for these tags. Without any, no record passes.
    #[must_use]
    pub fn new(tags: &[String]) -> Self {
        Self { tags: tags.iter().map(|tag| (tag_hash(tag.as_bytes()), tag.clone())).collect() }
    }

    /// Whether a record with this entry hash may pass.
    #[must_use]
    pub fn may_pass(&self, hash: u32) -> bool {
        hash != 0 && self.tags.iter().any(|(wanted, _)| *wanted == hash)
    }

    /// Whether this record passes.
    #[must_use]
    pub fn passes(&self, record: &RecordView<'_>) -> bool {
        self.may_pass(record.tag_hash)
            && record.tag().is_some_and(|tag| self.tags.iter().any(|(_, wanted)| wanted.as_bytes() == tag))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_hash_has_known_answers() {
        // CRC32C of "123456789" is 0xe3069283.
        assert_eq!(partition_of_key(b"123456789", 16), 0x3);
        assert_eq!(partition_of_key(b"", 7), 0);
        assert_eq!(tag_hash(b""), 1);
        assert_eq!(tag_hash(b"123456789"), 0xe306_9283);
    }
}
