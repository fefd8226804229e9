//! Reading record batches: [`BatchView`] is a batch whose structure has been checked once, at the edge; after that
//! records are read by plain slicing.
//!
//! Behind the 96-byte header (see `ringmain_core::batch`) stands, at byte 96, the size-prefixed flatbuffer `BatchBody`:
//! a vector of 20-byte entries, a body vector and, in sparse batches, a vector of record indexes.
//!
//! | entry at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | `value_end`: where the record ends in the body; it starts where the one before ends |
//! | 4 | 4 | `key_bytes` |
//! | 8 | 4 | `timestamp_delta_ms`, signed, from the header's `base_timestamp_ms` |
//! | 12 | 4 | `tag_hash` |
//! | 16 | 2 | `header_bytes` |
//! | 18 | 2 | flags: bit 0 null key, bit 1 null value |
//!
//! A table that passes the verifier may still have vectors that overlap each other or the vtable. That is harmless: all
//! reads stay inside the batch, nothing is written, and the two vectors are only read as bytes.

use flatbuffers::{InvalidFlatbuffer, VerifierOptions};
use ringmain_core::batch::{BATCH_HEADER_BYTES, BatchError, BatchHeader, FLAG_SPARSE, check_crc};
use ringmain_core::codec::Codec;
use ringmain_core::compressor::DecompressError;
use ringmain_core::ids::{Offset, PartitionKey};
use ringmain_core::limits::{BATCH_ALIGN_BYTES, BATCH_BYTES_MAX, KEY_BYTES_MAX, RECORD_BYTES_MAX};
use ringmain_core::pack::PackError;

use crate::batch_builder::BODY_AT;
use crate::error_code::ErrorCode;
use crate::generated::batch::ringmain::wire as schema;
use crate::record::RecordView;

/// Size of a record entry.
pub const ENTRY_BYTES: usize = 20;
/// Entry flag bit 0: the key is null, not empty.
pub const ENTRY_NULL_KEY: u16 = 1;
/// Entry flag bit 1: the value is null, not empty.
pub const ENTRY_NULL_VALUE: u16 = 2;
/// Where the size of the table stands; the table's own bytes follow it.
pub(crate) const TABLE_AT: usize = BATCH_HEADER_BYTES;
/// First byte of the table itself.
pub(crate) const TABLE_BYTES_AT: usize = TABLE_AT + 4;

/// Why bytes are not a batch that can be stored or read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBatch {
    /// The header or the CRC is wrong.
    #[error(transparent)]
    Header(#[from] BatchError),
    /// Compressed with a codec that this version does not have, or where a batch must not be compressed.
    #[error("batch codec {0} is not supported here")]
    Codec(u8),
    /// Larger than any batch once it is decompressed.
    #[error("batch of {0} bytes once decompressed: at most {BATCH_BYTES_MAX} are allowed")]
    RawTooLarge(usize),
    /// The body does not decompress to what the header says.
    #[error(transparent)]
    Decompress(#[from] DecompressError),
    /// What should be a pack of batches is none.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// Flags that this version does not know, or that a producer may not set.
    #[error("batch flags {0:#04x} are not allowed here")]
    Flags(u8),
    /// The table's size and padding do not make up the batch.
    #[error("batch table of {table} bytes does not fill a batch of {batch}")]
    TableBytes {
        /// What the table's size field says.
        table: u32,
        /// What the header says.
        batch: u32,
    },
    /// Bytes behind the table that are not zero.
    #[error("padding behind the batch table is not zero")]
    Padding,
    /// The table is not a flatbuffer of the schema.
    #[error("batch table is not valid: {0}")]
    Table(#[from] InvalidFlatbuffer),
    /// Not as many entries, or indexes, as the header has records.
    #[error("batch has {has} entries or indexes, its header says {records} records")]
    Entries {
        /// Entries or indexes there are.
        has: usize,
        /// What the header says.
        records: u32,
    },
    /// The body is not as long as the header says, or as the entries say.
    #[error("batch body has {has} bytes, header or entries say {needs}")]
    BodyBytes {
        /// Bytes there are.
        has: usize,
        /// Bytes there must be.
        needs: usize,
    },
    /// A record whose end falls, or whose key and headers do not fit it, or with unknown or contradicting flags.
    #[error("record {0} of the batch is malformed")]
    Record(u32),
    /// A record or key past its limit.
    #[error("record {0} of the batch is larger than {RECORD_BYTES_MAX} bytes, or its key than {KEY_BYTES_MAX}")]
    RecordTooLarge(u32),
    /// A batch of another partition than the one it was fetched for.
    #[error("batch belongs to partition {0}")]
    Partition(PartitionKey),
    /// Indexes of a sparse batch that do not rise or go past the last offset there is.
    #[error("indexes of the sparse batch do not rise")]
    Indexes,
}

impl InvalidBatch {
    /// The code to answer with.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Header(BatchError::Crc { .. }) => ErrorCode::CORRUPT_BATCH,
            Self::Header(BatchError::Version(_)) | Self::Codec(_) => ErrorCode::UNSUPPORTED,
            Self::Header(BatchError::Bytes(bytes)) if *bytes as usize > BATCH_BYTES_MAX => ErrorCode::TOO_LARGE,
            Self::RecordTooLarge(_) | Self::RawTooLarge(_) => ErrorCode::TOO_LARGE,
            _ => ErrorCode::INVALID_BATCH,
        }
    }
}

/// Everything a broker checks of a batch before it stores it, `header` having been parsed from `bytes`: CRC, no flags,
/// structure. Said once per batch, in the connection's buffer.
pub fn check_produced(header: &BatchHeader, bytes: &[u8]) -> Result<(), InvalidBatch> {
    check_crc(header, bytes)?;
    if header.flags != 0 {
        return Err(InvalidBatch::Flags(header.flags));
    }
    check_structure(bytes, header)
}

/// Checks the structure of a batch, compressed or not. Of a compressed one all is checked but that its body decompresses
/// to what the entries speak of: that is left to who reads it.
pub fn check_structure(bytes: &[u8], header: &BatchHeader) -> Result<(), InvalidBatch> {
    if header.codec == 0 {
        BatchView::parse(bytes, header).map(|_| ())
    } else {
        CompressedBatch::parse(bytes, header).map(|_| ())
    }
}

/// A batch whose structure is sound. Owns nothing; cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct BatchView<'a> {
    header: BatchHeader,
    entries: &'a [u8],
    body: &'a [u8],
    indexes: Option<&'a [u8]>,
}

impl<'a> BatchView<'a> {
    /// Checks the structure of the batch at the start of `bytes`, from which `header` was parsed: table, counts, that
    /// ends rise and stay in the body, that keys and headers fit their record. Does not look at CRCs or into headers.
    pub fn parse(bytes: &'a [u8], header: &BatchHeader) -> Result<Self, InvalidBatch> {
        if header.codec != 0 {
            return Err(InvalidBatch::Codec(header.codec));
        }
        let table = Table::parse(bytes, header)?;
        if table.body.len() != header.raw_body_bytes as usize {
            return Err(InvalidBatch::BodyBytes { has: table.body.len(), needs: header.raw_body_bytes as usize });
        }
        let Table { entries, body, indexes } = table;
        Ok(Self { header: *header, entries, body, indexes })
    }

    /// The header it was parsed with.
    #[must_use]
    pub const fn header(&self) -> &BatchHeader {
        &self.header
    }

    /// The body vector: all records one behind the other.
    #[must_use]
    pub const fn body(&self) -> &'a [u8] {
        self.body
    }

    /// The entries, 20 bytes each.
    pub(crate) const fn entry_bytes(&self) -> &'a [u8] {
        self.entries
    }

    /// How many records there are.
    #[must_use]
    pub const fn record_count(&self) -> u32 {
        self.header.record_count
    }

    /// Offsets of the first and of the last record.
    #[must_use]
    pub fn offset_range(&self) -> (Offset, Offset) {
        let last = self.header.record_count.saturating_sub(1) as usize;
        let offset = |index| self.header.base_offset.plus(self.offset_delta(index).unwrap_or_default().into());
        (offset(0), offset(last))
    }

    /// The records in the order of their offsets.
    #[must_use]
    pub fn records(&self) -> Records<'a> {
        Records { batch: *self, next: 0, start: 0 }
    }

    pub(crate) fn entry(&self, index: usize) -> Option<Entry> {
        let (entry, _) = self.entries.get(index * ENTRY_BYTES..)?.split_first_chunk::<ENTRY_BYTES>()?;
        Some(Entry::decode(entry))
    }

    /// Distance of record `index` from the base offset.
    pub(crate) fn offset_delta(&self, index: usize) -> Option<u32> {
        match self.indexes {
            None => u32::try_from(index).ok(),
            Some(indexes) => indexes.get(index * 4..)?.first_chunk::<4>().map(|bytes| u32::from_le_bytes(*bytes)),
        }
    }
}

/// A batch whose body is compressed, and whose structure is sound but for that.
#[derive(Clone, Copy, Debug)]
pub struct CompressedBatch<'a> {
    pub(crate) header: BatchHeader,
    pub(crate) codec: Codec,
    pub(crate) table: Table<'a>,
}

impl<'a> CompressedBatch<'a> {
    /// Checks the structure of the batch at the start of `bytes`, from which `header` was parsed: as of one that is not
    /// compressed, with the entries held against the size that the header states for the decompressed body; that the
    /// batch would be none too large; and that the body is smaller than that. Does not decompress.
    pub fn parse(bytes: &'a [u8], header: &BatchHeader) -> Result<Self, InvalidBatch> {
        let codec = Codec::from_byte(header.codec).filter(|codec| *codec != Codec::None);
        let codec = codec.ok_or(InvalidBatch::Codec(header.codec))?;
        let raw_body_bytes = header.raw_body_bytes as usize;
        // Header, table and entries, with room for their padding.
        let rest = BODY_AT + 16 + header.record_count as usize * (ENTRY_BYTES + 4);
        if raw_body_bytes > BATCH_BYTES_MAX - rest.min(BATCH_BYTES_MAX) {
            return Err(InvalidBatch::RawTooLarge(raw_body_bytes.saturating_add(rest)));
        }
        let table = Table::parse(bytes, header)?;
        if table.body.is_empty() || table.body.len() >= raw_body_bytes {
            return Err(InvalidBatch::BodyBytes { has: table.body.len(), needs: raw_body_bytes });
        }
        Ok(Self { header: *header, codec, table })
    }

    /// The tag hash of each record; 0 = it has none.
    pub fn tag_hashes(&self) -> impl Iterator<Item = u32> {
        self.table.entries.as_chunks::<ENTRY_BYTES>().0.iter().map(|entry| Entry::decode(entry).tag_hash)
    }
}

/// The vectors of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'a> {
    pub(crate) entries: &'a [u8],
    pub(crate) body: &'a [u8],
    pub(crate) indexes: Option<&'a [u8]>,
}

impl<'a> Table<'a> {
    /// Checks all but the body.
    fn parse(bytes: &'a [u8], header: &BatchHeader) -> Result<Self, InvalidBatch> {
        if header.flags & !FLAG_SPARSE != 0 {
            return Err(InvalidBatch::Flags(header.flags));
        }
        let body = verify_table(bytes, header)?;
        let table = Self {
            entries: body.entries().bytes(),
            body: body.body().bytes(),
            indexes: body.indexes().map(|indexes| indexes.bytes()),
        };
        table.check_entries(header)?;
        table.check_indexes(header)?;
        Ok(table)
    }

    fn check_entries(&self, header: &BatchHeader) -> Result<(), InvalidBatch> {
        let records = header.record_count;
        if self.entries.len() != records as usize * ENTRY_BYTES {
            return Err(InvalidBatch::Entries { has: self.entries.len() / ENTRY_BYTES, records });
        }
        let mut start = 0;
        for (number, entry) in (0u32..).zip(self.entries.as_chunks::<ENTRY_BYTES>().0) {
            let entry = Entry::decode(entry);
            let value_bytes = entry.value_bytes(start).ok_or(InvalidBatch::Record(number))?;
            let unknown = entry.flags & !(ENTRY_NULL_KEY | ENTRY_NULL_VALUE) != 0;
            let key_of_null = entry.flags & ENTRY_NULL_KEY != 0 && entry.key_bytes != 0;
            let value_of_null = entry.flags & ENTRY_NULL_VALUE != 0 && value_bytes != 0;
            if unknown || key_of_null || value_of_null {
                return Err(InvalidBatch::Record(number));
            }
            if (entry.value_end - start) as usize > RECORD_BYTES_MAX || entry.key_bytes as usize > KEY_BYTES_MAX {
                return Err(InvalidBatch::RecordTooLarge(number));
            }
            start = entry.value_end;
        }
        // The last end is the body's: so no end lies past it, and no bytes hide behind the last record.
        if start != header.raw_body_bytes {
            return Err(InvalidBatch::BodyBytes { has: header.raw_body_bytes as usize, needs: start as usize });
        }
        Ok(())
    }

    fn check_indexes(&self, header: &BatchHeader) -> Result<(), InvalidBatch> {
        let sparse = header.flags & FLAG_SPARSE != 0;
        let Some(indexes) = self.indexes else {
            return if sparse { Err(InvalidBatch::Indexes) } else { Ok(()) };
        };
        if !sparse {
            return Err(InvalidBatch::Indexes);
        }
        let records = header.record_count;
        if indexes.len() != records as usize * 4 {
            return Err(InvalidBatch::Entries { has: indexes.len() / 4, records });
        }
        let (indexes, _) = indexes.as_chunks::<4>();
        if indexes.is_sorted_by(|one, next| u32::from_le_bytes(*one) < u32::from_le_bytes(*next)) {
            Ok(())
        } else {
            Err(InvalidBatch::Indexes)
        }
    }
}

fn verify_table<'a>(bytes: &'a [u8], header: &BatchHeader) -> Result<schema::BatchBody<'a>, InvalidBatch> {
    let batch_bytes = header.batch_bytes as usize;
    let needs = batch_bytes.max(TABLE_BYTES_AT);
    let batch = bytes.get(..needs).ok_or(BatchError::Truncated { has: bytes.len(), needs })?;
    let size = u32::from_le_bytes([batch[96], batch[97], batch[98], batch[99]]);
    let end = TABLE_BYTES_AT.saturating_add(size as usize);
    if end > batch_bytes || end.checked_next_multiple_of(BATCH_ALIGN_BYTES) != Some(batch_bytes) {
        return Err(InvalidBatch::TableBytes { table: size, batch: header.batch_bytes });
    }
    if batch[end..].iter().any(|byte| *byte != 0) {
        return Err(InvalidBatch::Padding);
    }
    let options = VerifierOptions {
        max_depth: 1,
        max_tables: 1,
        // One table and three vectors that honestly do not overlap; the slack is for its vtable.
        max_apparent_size: size as usize + 1024,
        ignore_missing_null_terminator: false,
    };
    Ok(schema::size_prefixed_root_as_batch_body_with_opts(&options, &batch[TABLE_AT..end])?)
}

/// A record entry, decoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) value_end: u32,
    pub(crate) key_bytes: u32,
    pub(crate) timestamp_delta_ms: i32,
    pub(crate) tag_hash: u32,
    pub(crate) header_bytes: u16,
    pub(crate) flags: u16,
}

impl Entry {
    fn decode(bytes: &[u8; ENTRY_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t] = *bytes;
        Self {
            value_end: u32::from_le_bytes([a, b, c, d]),
            key_bytes: u32::from_le_bytes([e, f, g, h]),
            timestamp_delta_ms: i32::from_le_bytes([i, j, k, l]),
            tag_hash: u32::from_le_bytes([m, n, o, p]),
            header_bytes: u16::from_le_bytes([q, r]),
            flags: u16::from_le_bytes([s, t]),
        }
    }

    pub(crate) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[0..4].copy_from_slice(&self.value_end.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.key_bytes.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.timestamp_delta_ms.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.tag_hash.to_le_bytes());
        bytes[16..18].copy_from_slice(&self.header_bytes.to_le_bytes());
        bytes[18..20].copy_from_slice(&self.flags.to_le_bytes());
        bytes
    }

    /// Bytes of the value when the record starts at `start`; none when key and headers do not fit before the end.
    fn value_bytes(&self, start: u32) -> Option<u32> {
        let record = self.value_end.checked_sub(start)?;
        record.checked_sub(self.key_bytes)?.checked_sub(u32::from(self.header_bytes))
    }
}

/// Iterator over the records of a batch.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    batch: BatchView<'a>,
    next: usize,
    start: usize,
}

impl<'a> Iterator for Records<'a> {
    type Item = RecordView<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = self.batch.entry(self.next)?;
        let delta = self.batch.offset_delta(self.next)?;
        let record = self.batch.body.get(self.start..entry.value_end as usize)?;
        let (key, rest) = record.split_at_checked(entry.key_bytes as usize)?;
        let (header_bytes, value) = rest.split_at_checked(usize::from(entry.header_bytes))?;
        self.next += 1;
        self.start = entry.value_end as usize;
        let base_timestamp_ms = self.batch.header.base_timestamp_ms;
        Some(RecordView {
            offset: Offset(self.batch.header.base_offset.0.saturating_add(u64::from(delta))),
            timestamp_ms: base_timestamp_ms.saturating_add(i64::from(entry.timestamp_delta_ms)),
            key: (entry.flags & ENTRY_NULL_KEY == 0).then_some(key),
            value: (entry.flags & ENTRY_NULL_VALUE == 0).then_some(value),
            header_bytes,
            tag_hash: entry.tag_hash,
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.batch.header.record_count as usize - self.next;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Records<'_> {}

#[cfg(test)]
mod tests;
