//! Writing record batches: a hand-laid flatbuffer, written front to back, so that each record's bytes are copied once.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 96 | header |
//! | 96 | 4 | bytes of the table, from 100 to the end of the last vector |
//! | 100 | 4 | 12: the table's place, from here |
//! | 104 | 8 | vtable: 8, 12, entries at 4, body at 8 |
//! | 112 | 12 | table: 8 back to the vtable, where the entries are, where the body is |
//! | 124 | 4 | bytes of the body |
//! | 128 | | body: key, headers, value of each record |
//! | | 0..3 | zero, to a multiple of 4 |
//! | | 4 | number of entries, then 20 bytes for each |
//! | | 0..7 | zero, to a multiple of 8 |
//!
//! The body comes before the entries, since their number is known last. Any order is a valid flatbuffer; readers must not
//! rely on this one.

use bytes::{BufMut, Bytes, BytesMut};
use ringmain_core::batch::{BATCH_HEADER_BYTES, BatchHeader, FLAG_SPARSE, seal_crc};
use ringmain_core::ids::PartitionKey;
use ringmain_core::limits::{
    BATCH_ALIGN_BYTES, BATCH_BYTES_MAX, BATCH_RECORDS_MAX, HEADERS_BYTES_MAX, KEY_BYTES_MAX, RECORD_BYTES_MAX,
    TAG_BYTES_MAX,
};

use crate::batch::{ENTRY_BYTES, ENTRY_NULL_KEY, ENTRY_NULL_VALUE, Entry, TABLE_AT, TABLE_BYTES_AT};
use crate::record::{HEADER_LENGTHS_BYTES, NewRecord};
use crate::tag::{TAG_HEADER, tag_hash};

/// First byte of the body in a batch made here.
pub(crate) const BODY_AT: usize = 128;
/// The same in a sparse batch, whose vtable and table have one field more.
const SPARSE_BODY_AT: usize = 136;
/// Memory taken for the first batch; later ones start at the size of the one before.
const FIRST_BYTES: usize = 16 * 1024;

/// Why a record can't be put into a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The batch is full, or the record's time is too far from the first one's: finish it and push to the next.
    #[error("batch is full")]
    Full,
    /// A part of the record is larger than any batch takes.
    #[error("{part} of {has} bytes: at most {max} are allowed")]
    TooLarge {
        /// `key`, `headers`, `tag` or `record`.
        part: &'static str,
        /// Its size.
        has: usize,
        /// Its limit.
        max: usize,
    },
}

/// Builds batches of one partition, one after the other, with the same scratch memory.
#[derive(Debug)]
pub struct BatchBuilder {
    key: PartitionKey,
    producer: (u64, u16, u32),
    bytes_max: usize,
    base_timestamp_ms: i64,
    parts: BatchParts,
}

impl BatchBuilder {
    /// A builder for this partition, whose batches may have `BATCH_BYTES_MAX`.
    #[must_use]
    pub fn new(key: PartitionKey) -> Self {
        Self::with_bytes_max(key, BATCH_BYTES_MAX)
    }

    /// A builder whose batches are full at `bytes_max`; a larger record still goes in alone.
    #[must_use]
    pub fn with_bytes_max(key: PartitionKey, bytes_max: usize) -> Self {
        let bytes_max = bytes_max.min(BATCH_BYTES_MAX);
        Self { key, producer: (0, 0, 0), bytes_max, base_timestamp_ms: 0, parts: BatchParts::new(false) }
    }

    /// Drops what was pushed and turns to another partition; keeps the memory.
    pub fn reset(&mut self, key: PartitionKey) {
        self.key = key;
        self.producer = (0, 0, 0);
        self.parts.clear();
    }

    /// Names an idempotent producer in the next batch: id, epoch, sequence of the first record.
    pub fn set_producer(&mut self, id: u64, epoch: u16, base_sequence: u32) {
        self.producer = (id, epoch, base_sequence);
    }

    /// The partition that batches go to.
    #[must_use]
    pub const fn key(&self) -> PartitionKey {
        self.key
    }

    /// Records pushed since the last finish.
    #[must_use]
    pub const fn record_count(&self) -> usize {
        self.parts.records
    }

    /// Whether nothing was pushed since the last finish.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.parts.records == 0
    }

    /// Size of the batch if it were finished now.
    #[must_use]
    pub fn batch_bytes(&self) -> usize {
        self.parts.bytes_with(0, 0)
    }

    /// Copies a record in. On an error nothing is changed.
    pub fn push(&mut self, record: &NewRecord<'_>) -> Result<(), PushError> {
        let header_bytes = checked_header_bytes(record)?;
        let key_bytes = record.key.map_or(0, <[u8]>::len);
        let record_bytes = key_bytes + header_bytes + record.value.map_or(0, <[u8]>::len);
        check_part("key", key_bytes, KEY_BYTES_MAX)?;
        check_part("record", record_bytes, RECORD_BYTES_MAX)?;
        let empty = self.is_empty();
        if empty {
            self.base_timestamp_ms = record.timestamp_ms;
        } else if self.parts.records == BATCH_RECORDS_MAX || self.parts.bytes_with(1, record_bytes) > self.bytes_max {
            return Err(PushError::Full);
        }
        let delta = record.timestamp_ms.checked_sub(self.base_timestamp_ms).and_then(|delta| i32::try_from(delta).ok());
        let timestamp_delta_ms = delta.ok_or(PushError::Full)?;

        let body = self.parts.body(record_bytes);
        body.put_slice(record.key.unwrap_or_default());
        if let Some(tag) = record.tag {
            put_header(body, TAG_HEADER, tag.as_bytes());
        }
        for (name, value) in record.headers {
            put_header(body, name, value);
        }
        body.put_slice(record.value.unwrap_or_default());
        let null_key = if record.key.is_none() { ENTRY_NULL_KEY } else { 0 };
        let null_value = if record.value.is_none() { ENTRY_NULL_VALUE } else { 0 };
        // The casts fit: the sizes were checked above, the body against the largest batch.
        self.parts.put_entry(Entry {
            value_end: self.parts.body_bytes() as u32,
            key_bytes: key_bytes as u32,
            timestamp_delta_ms,
            tag_hash: record.tag.map_or(0, |tag| tag_hash(tag.as_bytes())),
            header_bytes: header_bytes as u16,
            flags: null_key | null_value,
        });
        Ok(())
    }

    /// Finishes the batch with its CRC and starts the next, empty one for the same partition.
    ///
    /// # Panics
    /// When nothing was pushed: a batch has records.
    pub fn finish(&mut self) -> Bytes {
        assert!(!self.is_empty(), "a batch has at least one record");
        let (producer_id, producer_epoch, base_sequence) = self.producer;
        let header = BatchHeader {
            key: self.key,
            producer_id,
            producer_epoch,
            base_sequence,
            base_timestamp_ms: self.base_timestamp_ms,
            ..BatchHeader::default()
        };
        self.parts.finish(header, |_| {})
    }
}

fn check_part(part: &'static str, has: usize, max: usize) -> Result<(), PushError> {
    if has <= max { Ok(()) } else { Err(PushError::TooLarge { part, has, max }) }
}

/// Size of the encoded headers, tag included, or which of them is too large.
fn checked_header_bytes(record: &NewRecord<'_>) -> Result<usize, PushError> {
    let mut bytes = 0usize;
    if let Some(tag) = record.tag {
        check_part("tag", tag.len(), TAG_BYTES_MAX)?;
        bytes += HEADER_LENGTHS_BYTES + TAG_HEADER.len() + tag.len();
    }
    for (name, value) in record.headers {
        bytes = bytes.saturating_add(HEADER_LENGTHS_BYTES).saturating_add(name.len()).saturating_add(value.len());
    }
    check_part("headers", bytes, HEADERS_BYTES_MAX)?;
    Ok(bytes)
}

fn put_header(body: &mut BytesMut, name: &str, value: &[u8]) {
    // Both fit 16 bits: all headers together do.
    body.put_u16_le(name.len() as u16);
    body.put_u16_le(value.len() as u16);
    body.put_slice(name.as_bytes());
    body.put_slice(value);
}

/// A batch being laid out: bytes up to the end of the body, entries and indexes apart until the end.
#[derive(Debug)]
pub(crate) struct BatchParts {
    sparse: bool,
    buffer: BytesMut,
    entries: Vec<u8>,
    indexes: Vec<u8>,
    records: usize,
    /// Size of the batch before: how much memory to take for the next.
    expected_bytes: usize,
}

impl BatchParts {
    pub(crate) fn new(sparse: bool) -> Self {
        let (entries, indexes) = (Vec::new(), Vec::new());
        Self { sparse, buffer: BytesMut::new(), entries, indexes, records: 0, expected_bytes: FIRST_BYTES }
    }

    const fn body_at(&self) -> usize {
        if self.sparse { SPARSE_BODY_AT } else { BODY_AT }
    }

    pub(crate) fn clear(&mut self) {
        self.buffer.clear();
        self.entries.clear();
        self.indexes.clear();
        self.records = 0;
    }

    /// The buffer, to append `record_bytes` of body to.
    pub(crate) fn body(&mut self, record_bytes: usize) -> &mut BytesMut {
        if self.buffer.is_empty() {
            let body_at = self.body_at();
            self.buffer.reserve(self.expected_bytes.max(body_at + record_bytes));
            self.buffer.put_bytes(0, body_at);
        }
        &mut self.buffer
    }

    pub(crate) fn body_bytes(&self) -> usize {
        self.buffer.len().saturating_sub(self.body_at())
    }

    pub(crate) fn put_entry(&mut self, entry: Entry) {
        self.entries.extend_from_slice(&entry.encode());
        self.records += 1;
    }

    /// Takes all vectors of a batch at once; its header comes with [`Self::finish`].
    pub(crate) fn of_table(entries: &[u8], body: &[u8], indexes: Option<&[u8]>) -> Self {
        let mut parts = Self::new(indexes.is_some());
        // Room for the whole batch, so that nothing moves.
        parts.expected_bytes = SPARSE_BODY_AT + body.len() + entries.len() + indexes.map_or(0, <[u8]>::len) + 32;
        parts.body(body.len()).put_slice(body);
        parts.entries = entries.to_vec();
        parts.indexes = indexes.unwrap_or_default().to_vec();
        parts.records = entries.len() / ENTRY_BYTES;
        parts
    }

    pub(crate) fn put_index(&mut self, index: u32) {
        self.indexes.extend_from_slice(&index.to_le_bytes());
    }

    /// Size of the whole batch with so much more in it.
    fn bytes_with(&self, records: usize, body_bytes: usize) -> usize {
        let records = self.records + records;
        let body_end = (self.body_at() + self.body_bytes() + body_bytes).next_multiple_of(4);
        let indexes = if self.sparse { 4 + records * 4 } else { 0 };
        (body_end + 4 + records * ENTRY_BYTES + indexes).next_multiple_of(BATCH_ALIGN_BYTES)
    }

    /// Lays out table and header and computes the CRC; then `stamp` may write to the bytes before it. `header` gives what
    /// is not known here.
    pub(crate) fn finish(&mut self, mut header: BatchHeader, stamp: impl FnOnce(&mut [u8])) -> Bytes {
        let body_bytes = self.body_bytes();
        let body_at = self.body_at();
        let batch_bytes = self.bytes_with(0, 0);
        let buffer = &mut self.buffer;
        buffer.reserve(batch_bytes - buffer.len());
        buffer.put_bytes(0, buffer.len().next_multiple_of(4) - buffer.len());
        let entries_at = buffer.len();
        buffer.put_u32_le(self.records as u32);
        buffer.put_slice(&self.entries);
        let indexes_at = buffer.len();
        if self.sparse {
            buffer.put_u32_le(self.records as u32);
            buffer.put_slice(&self.indexes);
        }
        let table_end = buffer.len();
        buffer.put_bytes(0, batch_bytes - table_end);

        let indexes_at = self.sparse.then_some(indexes_at);
        write_table(buffer, body_at, body_bytes, entries_at, indexes_at, table_end);
        header.batch_bytes = batch_bytes as u32;
        header.record_count = self.records as u32;
        if header.codec == 0 {
            header.raw_body_bytes = body_bytes as u32;
        }
        header.flags = if self.sparse { FLAG_SPARSE } else { 0 };
        header.write(buffer);
        seal_crc(buffer);
        stamp(buffer);
        let batch = buffer.split().freeze();
        self.expected_bytes = batch_bytes;
        self.clear();
        batch
    }
}

/// Writes everything between the header and the body: sizes, vtable, table.
fn write_table(
    batch: &mut [u8],
    body_at: usize,
    body_bytes: usize,
    entries_at: usize,
    indexes_at: Option<usize>,
    table_end: usize,
) {
    let mut at = BATCH_HEADER_BYTES;
    // All values are below BATCH_BYTES_MAX.
    let mut put_u32 = |value: usize| {
        batch[at..at + 4].copy_from_slice(&(value as u32).to_le_bytes());
        at += 4;
    };
    let pair = |low: usize, high: usize| low | (high << 16);
    put_u32(table_end - TABLE_BYTES_AT);
    match indexes_at {
        None => {
            put_u32(12);
            put_u32(pair(8, 12));
            put_u32(pair(4, 8));
            put_u32(8);
            put_u32(entries_at - (TABLE_AT + 20));
            put_u32(body_at - 4 - (TABLE_AT + 24));
        }
        Some(indexes_at) => {
            put_u32(16);
            put_u32(pair(10, 16));
            put_u32(pair(4, 8));
            put_u32(pair(12, 0));
            put_u32(12);
            put_u32(entries_at - (TABLE_AT + 24));
            put_u32(body_at - 4 - (TABLE_AT + 28));
            put_u32(indexes_at - (TABLE_AT + 32));
        }
    }
    put_u32(body_bytes);
}

#[cfg(test)]
mod tests;
