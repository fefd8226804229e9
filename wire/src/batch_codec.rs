//! Compressing the body of a batch, as a producer may, and back again.
//!
//! Only the body vector is compressed. Header, entries and indexes stay as they are, so that a broker can check the
//! structure of a batch without decompressing it. What comes out of [`decompress`] is an ordinary batch: the same records
//! at the same offsets, with CRCs of its own.

use bytes::Bytes;
use ringmain_core::batch::{BatchError, BatchHeader, check_crc, check_stamp, stamp};
use ringmain_core::codec::Codec;
use ringmain_core::compressor::{Compressor, Decompressor, Level};
use ringmain_core::pack::{PACK_MARK, Pack, is_pack};

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

/// A piece of one partition's share of a fetch, as it came.
#[derive(Clone, Debug)]
pub enum FetchedPiece {
    /// A batch, which may be compressed.
    Batch(BatchHeader, Bytes),
    /// A pack of batches.
    Pack(Pack, Bytes),
}

/// Cuts one partition's share of a fetch into pieces and checks the CRC of each, but no stamp and no structure. Nothing is
/// decompressed. Behind a header that can't be read, and behind a damaged pack, nothing more is found.
pub struct FetchedPieces {
    rest: Bytes,
}

impl FetchedPieces {
    /// Of the bytes that a fetch gave for one partition.
    #[must_use]
    pub const fn new(share: Bytes) -> Self {
        Self { rest: share }
    }

    fn next_piece(&mut self) -> Result<FetchedPiece, InvalidBatch> {
        if is_pack(&self.rest) {
            let pack = Pack::parse(&self.rest)?;
            pack.check_crc(&self.rest)?;
            return Ok(FetchedPiece::Pack(pack, self.rest.split_to(pack.pack_bytes as usize)));
        }
        let header = match BatchHeader::parse(&self.rest) {
            Ok(header) => header,
            Err(error) => {
                self.rest.clear();
                return Err(error.into());
            }
        };
        let bytes = self.rest.split_to(header.batch_bytes as usize);
        check_crc(&header, &bytes)?;
        Ok(FetchedPiece::Batch(header, bytes))
    }
}

impl Iterator for FetchedPieces {
    type Item = Result<FetchedPiece, InvalidBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let piece = self.next_piece();
        if let Err(InvalidBatch::Pack(_)) = &piece {
            // Where the next one begins is not known for sure.
            self.rest.clear();
        }
        Some(piece)
    }
}

/// Cuts one partition's share of a fetch into batches: those of packs are unpacked, and none is compressed any more. Pieces
/// are decompressed one at a time, when they are come to.
///
/// Each batch's CRC is checked as it came, but not its stamp nor its structure. Behind a header that can't be read
/// nothing more is found.
pub struct FetchedBatches {
    pieces: FetchedPieces,
    /// Batches of the pack that was opened last.
    unpacked: FetchedPieces,
    decompressor: Option<Decompressor>,
}

impl FetchedBatches {
    /// Of the bytes that a fetch gave for one partition.
    #[must_use]
    pub fn new(share: Bytes) -> Self {
        let unpacked = FetchedPieces::new(Bytes::new());
        Self { pieces: FetchedPieces::new(share), unpacked, decompressor: None }
    }

    fn next_batch(&mut self) -> Result<Option<(BatchHeader, Bytes)>, InvalidBatch> {
        let piece = match self.unpacked.next() {
            Some(piece) => piece?,
            None => match self.pieces.next().transpose()? {
                None => return Ok(None),
                Some(FetchedPiece::Pack(pack, bytes)) => {
                    let batches = pack.unpack(self.decompressor.get_or_insert_default(), &bytes)?;
                    self.unpacked = FetchedPieces::new(Bytes::from(batches));
                    // Not empty: its header says how long it is.
                    return self.next_batch();
                }
                Some(piece) => piece,
            },
        };
        match piece {
            FetchedPiece::Batch(header, bytes) if header.codec == 0 => Ok(Some((header, bytes))),
            FetchedPiece::Batch(header, bytes) => {
                check_stamp(&bytes)?;
                decompress(self.decompressor.get_or_insert_default(), &header, &bytes).map(Some)
            }
            FetchedPiece::Pack(..) => {
                self.unpacked.rest.clear();
                Err(BatchError::Version(PACK_MARK).into())
            }
        }
    }
}

impl Iterator for FetchedBatches {
    type Item = Result<(BatchHeader, Bytes), InvalidBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.next_batch();
        if let Err(InvalidBatch::Pack(_)) | Err(InvalidBatch::Header(BatchError::Truncated { .. })) = &batch {
            // Where the next one begins is not known for sure.
            self.pieces.rest.clear();
        }
        batch.transpose()
    }
}

#[cfg(test)]
mod tests;
