//! The pack: some whole batches of a run, compressed by themselves, so that a part of a run can be read alone.
//!
//! A run whose directory entry has a codec is a row of packs instead of a row of batches. A pack is also what a fetch
//! sends to a client that takes its codec: byte for byte what stands on disk, in place of its batches. Byte 4 tells the
//! two apart: a batch has its version there, 1.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | `pack_bytes`: header, packed bytes and padding; a multiple of 8 |
//! | 4 | 1 | 0x81: a pack, version 1 |
//! | 5 | 1 | `codec`: 0 the batches as they are (on disk only), 1 LZ4 block, 2 Zstandard frame |
//! | 6 | 2 | zero |
//! | 8 | 8 | `base_offset` of the first batch |
//! | 16 | 8 | `next_offset` of the last batch |
//! | 24 | 4 | `raw_bytes`: of the batches, decompressed |
//! | 28 | 4 | `packed_bytes`: of what follows the header, padding not counted |
//! | 32 | 4 | `batches` |
//! | 36 | 4 | `crc`: CRC32C of bytes 0..36 and 40..`pack_bytes` |
//! | 40 | `packed_bytes` | the batches, one behind the other, compressed |
//! | | 0 to 7 | zero, up to `pack_bytes` |
//!
//! Little-endian. A pack has about 64 KiB of batches, or one larger batch: so `raw_bytes` is at most the largest batch.

use crate::codec::Codec;
use crate::compressor::{DecompressError, Decompressor};
use crate::crc::Crc32c;
use crate::ids::Offset;
use crate::limits::{BATCH_ALIGN_BYTES, BATCH_BYTES_MAX};

/// Size of the header.
pub const PACK_HEADER_BYTES: usize = 40;
/// What byte 4 is in a pack of this version.
pub const PACK_MARK: u8 = 0x81;
/// Largest pack: one that saves nothing is stored as it is.
pub const PACK_BYTES_MAX: usize = PACK_HEADER_BYTES + BATCH_BYTES_MAX;

const CRC_AT: usize = 36;

/// A pack's header, checked against the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pack {
    /// Whole pack, padding included.
    pub pack_bytes: u32,
    /// How its batches are compressed.
    pub codec: Codec,
    /// Offset of the first record.
    pub base_offset: Offset,
    /// One past the last record.
    pub next_offset: Offset,
    /// Size of its batches.
    pub raw_bytes: u32,
    /// Size of what stands for them.
    pub packed_bytes: u32,
    /// How many batches it has.
    pub batches: u32,
}

/// Why bytes are not a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// Fewer bytes than the header says, or than a header has.
    #[error("pack is cut short: {has} bytes of {needs}")]
    Truncated {
        /// Bytes there are.
        has: usize,
        /// Bytes there must be.
        needs: usize,
    },
    /// Not a pack of this version.
    #[error("not a pack of version 1")]
    Mark,
    /// A field is out of bounds.
    #[error("pack field `{0}` is out of bounds")]
    Field(&'static str),
    /// The CRC does not match.
    #[error("pack CRC mismatch")]
    Crc,
    /// The packed bytes do not decompress.
    #[error(transparent)]
    Decompress(#[from] DecompressError),
}

/// Whether what starts with `bytes` is meant to be a pack and not a batch.
#[must_use]
pub fn is_pack(bytes: &[u8]) -> bool {
    bytes.get(4) == Some(&PACK_MARK)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at + 4)) << 32 | u64::from(u32_at(bytes, at))
}

impl Pack {
    /// Reads and bounds-checks the header of the pack at the start of `bytes`, which may go on behind it. Does not look
    /// at the CRC.
    pub fn parse(bytes: &[u8]) -> Result<Self, PackError> {
        if bytes.len() < PACK_HEADER_BYTES {
            return Err(PackError::Truncated { has: bytes.len(), needs: PACK_HEADER_BYTES });
        }
        if !is_pack(bytes) {
            return Err(PackError::Mark);
        }
        let pack = Self {
            pack_bytes: u32_at(bytes, 0),
            codec: Codec::from_byte(bytes[5]).ok_or(PackError::Field("codec"))?,
            base_offset: Offset(u64_at(bytes, 8)),
            next_offset: Offset(u64_at(bytes, 16)),
            raw_bytes: u32_at(bytes, 24),
            packed_bytes: u32_at(bytes, 28),
            batches: u32_at(bytes, 32),
        };
        pack.check(bytes[6..8] == [0; 2])?;
        let needs = pack.pack_bytes as usize;
        if bytes.len() < needs {
            return Err(PackError::Truncated { has: bytes.len(), needs });
        }
        Ok(pack)
    }

    fn check(&self, zeros: bool) -> Result<(), PackError> {
        let (raw, packed) = (self.raw_bytes as usize, self.packed_bytes as usize);
        let whole_batches = raw.is_multiple_of(BATCH_ALIGN_BYTES);
        let packed_fits = packed > 0 && if self.codec == Codec::None { packed == raw } else { packed < raw };
        let wrong = if !zeros {
            "zero"
        } else if raw == 0 || raw > BATCH_BYTES_MAX || !whole_batches {
            "raw_bytes"
        } else if !packed_fits {
            "packed_bytes"
        } else if self.pack_bytes as usize != pack_bytes(packed) {
            "pack_bytes"
        } else if self.base_offset >= self.next_offset {
            "next_offset"
        } else if self.batches == 0 {
            "batches"
        } else {
            return Ok(());
        };
        Err(PackError::Field(wrong))
    }

    /// Writes header and padding around the packed bytes that stand at their place in `pack`, which has `pack_bytes`
    /// bytes.
    ///
    /// # Panics
    /// When `pack` has another size.
    pub fn seal(&self, pack: &mut [u8]) {
        assert_eq!(pack.len(), self.pack_bytes as usize, "a pack fills its place");
        pack[0..4].copy_from_slice(&self.pack_bytes.to_le_bytes());
        pack[4..8].copy_from_slice(&[PACK_MARK, self.codec as u8, 0, 0]);
        pack[8..16].copy_from_slice(&self.base_offset.0.to_le_bytes());
        pack[16..24].copy_from_slice(&self.next_offset.0.to_le_bytes());
        pack[24..28].copy_from_slice(&self.raw_bytes.to_le_bytes());
        pack[28..32].copy_from_slice(&self.packed_bytes.to_le_bytes());
        pack[32..36].copy_from_slice(&self.batches.to_le_bytes());
        pack[PACK_HEADER_BYTES + self.packed_bytes as usize..].fill(0);
        let crc = crc_of(pack);
        pack[CRC_AT..PACK_HEADER_BYTES].copy_from_slice(&crc.to_le_bytes());
    }

    /// Checks the CRC of the pack that was parsed from `bytes`.
    pub fn check_crc(&self, bytes: &[u8]) -> Result<(), PackError> {
        let pack = &bytes[..self.pack_bytes as usize];
        if crc_of(pack) == u32_at(pack, CRC_AT) { Ok(()) } else { Err(PackError::Crc) }
    }

    /// The batches of the pack that was parsed from `bytes`. They are to be checked by their own CRCs.
    pub fn unpack(&self, decompressor: &mut Decompressor, bytes: &[u8]) -> Result<Vec<u8>, PackError> {
        let packed = &bytes[PACK_HEADER_BYTES..PACK_HEADER_BYTES + self.packed_bytes as usize];
        // `parse` has bounded it.
        let mut raw = vec![0; self.raw_bytes as usize];
        decompressor.decompress(self.codec, packed, &mut raw)?;
        Ok(raw)
    }
}

/// Size of a pack of so many packed bytes.
#[must_use]
pub const fn pack_bytes(packed_bytes: usize) -> usize {
    (PACK_HEADER_BYTES + packed_bytes).next_multiple_of(BATCH_ALIGN_BYTES)
}

fn crc_of(pack: &[u8]) -> u32 {
    let mut crc = Crc32c::default();
    crc.update(&pack[..CRC_AT]);
    crc.update(&pack[PACK_HEADER_BYTES..]);
    crc.finish()
}

/// All batches of a stored run whose directory entry has a codec, for readers that want them in one piece. `raw_bytes`
/// is what the entry says, checked against the limits when the directory was read. The packs' CRCs are checked.
pub fn unpack_run(decompressor: &mut Decompressor, stored: &[u8], raw_bytes: usize) -> Result<Vec<u8>, PackError> {
    let mut raw = Vec::new();
    let mut rest = stored;
    while !rest.is_empty() {
        let pack = Pack::parse(rest)?;
        pack.check_crc(rest)?;
        if raw.len() + pack.raw_bytes as usize > raw_bytes {
            return Err(PackError::Field("raw_bytes"));
        }
        raw.extend_from_slice(&pack.unpack(decompressor, rest)?);
        rest = &rest[pack.pack_bytes as usize..];
    }
    if raw.len() == raw_bytes { Ok(raw) } else { Err(PackError::Field("raw_bytes")) }
}

#[cfg(test)]
mod tests;
