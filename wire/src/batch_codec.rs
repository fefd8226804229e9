//! Compressing the body of a batch, as a producer may, and back again.
//!
//! Only the body vector is compressed. Header, entries and indexes stay as they are, so that a broker can check the
//! structure of a batch without decompressing it. What comes out of [`decompress`] is an ordinary batch: the same records
//! at the same offsets, with CRCs of its own.

use bytes::Bytes;
use ringmain_core::batch::{BatchError, BatchHeader, check_crc, check_stamp, stamp};
use ringmain_core::codec::Codec;
use ringmain_core::compressor::{Compressor, Decompressor, Level};
use ringmain_core::pack::{Pack, is_pack};

use crate::batch::{BatchView, CompressedBatch, InvalidBatch};
use crate::batch_builder::BatchParts;

/// Compresses a batch that was built here. None when that would not make it smaller, or it is sparse or compressed.
#[must_use]
pub fn compress(compressor: &mut Compressor, codec: Codec, batch: &[u8]) -> Option<Bytes> {
    let level = match codec {
        Codec::None => return None,
        Codec::Lz4 => Level::Lz4,
        Codec::Zstd => Level::Zstd,
    };
    let header = BatchHeader::parse(batch).ok()?;
    let view = BatchView::parse(batch, &header).ok()?;
    let mut body = vec![0; view.body().len().checked_sub(1)?];
    let size = compressor.compress(level, view.body(), &mut body)?;
    let header = BatchHeader { codec: codec as u8, ..header };
    let compressed = (header.flags == 0)
        .then(|| BatchParts::of_table(view.entry_bytes(), &body[..size], None).finish(header, |_| {}))?;
    // What a broker would refuse is sent as it is.
    let header = BatchHeader::parse(&compressed).ok()?;
    (compressed.len() < batch.len() && CompressedBatch::parse(&compressed, &header).is_ok()).then_some(compressed)
}

/// The batch that a compressed one stands for, as it would be without compression, stamp included. The CRCs of `bytes`
/// are for the caller to check before.
pub fn decompress(
    decompressor: &mut Decompressor,
    header: &BatchHeader,
    bytes: &[u8],
) -> Result<(BatchHeader, Bytes), InvalidBatch> {
    let batch = CompressedBatch::parse(bytes, header)?;
    // The sizes were checked against the largest batch.
    let mut body = vec![0; header.raw_body_bytes as usize];
    decompressor.decompress(batch.codec, batch.table.body, &mut body)?;
    let plain = BatchHeader { codec: 0, ..batch.header };
    let batch = BatchParts::of_table(batch.table.entries, &body, batch.table.indexes).finish(plain, |bytes| {
        stamp(bytes, plain.base_offset, plain.append_time_ms, plain.leader_epoch);
    });
    Ok((BatchHeader::parse(&batch)?, batch))
}

/// Cuts one partition's share of a fetch into batches: those of packs are unpacked, and none is compressed any more.
///
/// Each batch's CRC is checked as it came, but not its stamp nor its structure. Behind a header that can't be read
/// nothing more is found.
pub struct FetchedBatches {
    rest: Bytes,
    /// Batches of the pack that was opened last.
    unpacked: Bytes,
    decompressor: Option<Decompressor>,
}

impl FetchedBatches {
    /// Of the bytes that a fetch gave for one partition.
    #[must_use]
    pub fn new(share: Bytes) -> Self {
        Self { rest: share, unpacked: Bytes::new(), decompressor: None }
    }

    fn unpack(&mut self) -> Result<(), InvalidBatch> {
        let pack = Pack::parse(&self.rest)?;
        let bytes = self.rest.split_to(pack.pack_bytes as usize);
        pack.check_crc(&bytes)?;
        let batches = pack.unpack(self.decompressor.get_or_insert_default(), &bytes)?;
        self.unpacked = Bytes::from(batches);
        Ok(())
    }

    fn next_batch(&mut self) -> Result<Option<(BatchHeader, Bytes)>, InvalidBatch> {
        if self.unpacked.is_empty() && is_pack(&self.rest) {
            self.unpack()?;
        }
        let from = if self.unpacked.is_empty() { &mut self.rest } else { &mut self.unpacked };
        if from.is_empty() {
            return Ok(None);
        }
        let header = match BatchHeader::parse(from) {
            Ok(header) => header,
            Err(error) => {
                from.clear();
                return Err(error.into());
            }
        };
        let bytes = from.split_to(header.batch_bytes as usize);
        check_crc(&header, &bytes)?;
        if header.codec == 0 {
            return Ok(Some((header, bytes)));
        }
        check_stamp(&bytes)?;
        decompress(self.decompressor.get_or_insert_default(), &header, &bytes).map(Some)
    }
}

impl Iterator for FetchedBatches {
    type Item = Result<(BatchHeader, Bytes), InvalidBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.next_batch();
        if let Err(InvalidBatch::Pack(_)) | Err(InvalidBatch::Header(BatchError::Truncated { .. })) = &batch {
            // Where the next one begins is not known for sure.
            self.rest.clear();
        }
        batch.transpose()
    }
}

#[cfg(test)]
mod tests;
