//! Sparse batches: what a filtered fetch sends. A copy of those records of a batch that pass, with their own CRC; record i
//! has the offset `base_offset + indexes[i]`, so that the offsets stay what they were.

use bytes::{BufMut, Bytes, BytesMut};
use ringmain_core::batch::{BatchHeader, stamp};
use ringmain_core::limits::BATCH_BYTES_MAX;

use crate::batch::{BatchView, Entry};
use crate::batch_builder::BatchParts;
use crate::tag::TagFilter;

/// What a filter leaves of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Filtered {
    /// Every record passes: send the batch as it is.
    All,
    /// No record passes: send nothing.
    Nothing,
    /// Some pass: send these sparse batches instead, one behind the other. It is one but where indexes make it larger than a
    /// batch may be.
    Some(Bytes),
}

/// Cuts batches down to the records that pass a filter, with the same scratch memory for all of them.
#[derive(Debug)]
pub struct SparseBuilder {
    parts: BatchParts,
}

impl Default for SparseBuilder {
    fn default() -> Self {
        Self { parts: BatchParts::new(true) }
    }
}

impl SparseBuilder {
    /// A new builder.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies `filter` to the records of `batch`.
    pub fn filter(&mut self, batch: &BatchView<'_>, filter: &TagFilter) -> Filtered {
        let passing = (0u32..).zip(batch.records()).filter(|(_, record)| filter.passes(record));
        let kept: Vec<u32> = passing.map(|(number, _)| number).collect();
        match kept.len() {
            0 => Filtered::Nothing,
            all if all == batch.record_count() as usize => Filtered::All,
            _ => Filtered::Some(self.copy_all(batch, &kept)),
        }
    }

    fn copy_all(&mut self, batch: &BatchView<'_>, kept: &[u32]) -> Bytes {
        let whole = self.copy(batch, kept);
        if whole.len() <= BATCH_BYTES_MAX {
            return whole;
        }
        // An index has 4 bytes, a record 20 at least: a half fits.
        let (front, back) = kept.split_at(kept.len() / 2);
        let mut halves = BytesMut::from(&self.copy(batch, front)[..]);
        halves.extend_from_slice(&self.copy(batch, back));
        halves.freeze()
    }

    /// A sparse copy of the records of `batch` with these numbers (places in the batch, from 0, rising).
    ///
    /// # Panics
    /// When `kept` is empty, does not rise, or names a record that is not there.
    pub fn copy(&mut self, batch: &BatchView<'_>, kept: &[u32]) -> Bytes {
        assert!(!kept.is_empty() && kept.is_sorted_by(|one, next| one < next), "kept records rise");
        self.parts.clear();
        for number in kept {
            let number = *number as usize;
            let start = match number.checked_sub(1) {
                None => 0,
                Some(before) => batch.entry(before).expect("kept records are there").value_end as usize,
            };
            let entry = batch.entry(number).expect("kept records are there");
            let record = &batch.body()[start..entry.value_end as usize];
            self.parts.body(record.len()).put_slice(record);
            // Fits: it is at most the body of the whole batch.
            let value_end = self.parts.body_bytes() as u32;
            self.parts.put_entry(Entry { value_end, ..entry });
            self.parts.put_index(batch.offset_delta(number).expect("kept records are there"));
        }
        let header: BatchHeader = *batch.header();
        self.parts.finish(header, |bytes| stamp(bytes, header.base_offset, header.append_time_ms, header.leader_epoch))
    }
}

#[cfg(test)]
mod tests;
