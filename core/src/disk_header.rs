//! Hand-laid little-endian headers of 64 bytes, as segments, extents, footer pages and trailers have them.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic: what the header is of |
//! | 4 | 1 | version |
//! | 5 | 55 | fields of the owner |
//! | 60 | 4 | CRC32C of bytes 0..60 |
//!
//! Magic, version and CRC stand at the same place in every version, so that bytes of a later version are told from damage.

use crate::crc::crc32c;

/// Size of every header.
pub const DISK_HEADER_BYTES: usize = 64;
/// Where the CRC stands.
const CRC_AT: usize = 60;
/// First byte of the owner's fields.
const FIELDS_AT: usize = 5;

/// Why 64 bytes are not the header that was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskHeaderError {
    /// Fewer than 64 bytes, or another magic: nothing of this kind stands here.
    #[error("no header")]
    Absent,
    /// The CRC does not match.
    #[error("header CRC mismatch")]
    Crc,
    /// Whole, but of a version this code does not read.
    #[error("version {0} is not supported")]
    Version(u8),
}

/// Lays fields one behind the other.
pub(crate) struct HeaderWriter {
    bytes: [u8; DISK_HEADER_BYTES],
    at: usize,
}

impl HeaderWriter {
    pub(crate) fn new(magic: u32, version: u8) -> Self {
        let mut bytes = [0; DISK_HEADER_BYTES];
        bytes[..4].copy_from_slice(&magic.to_le_bytes());
        bytes[4] = version;
        Self { bytes, at: FIELDS_AT }
    }

    pub(crate) fn put<const N: usize>(mut self, field: [u8; N]) -> Self {
        assert!(self.at + N <= CRC_AT, "header fields overflow");
        self.bytes[self.at..self.at + N].copy_from_slice(&field);
        self.at += N;
        self
    }

    pub(crate) fn u16(self, value: u16) -> Self {
        self.put(value.to_le_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Self {
        self.put(value.to_le_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Self {
        self.put(value.to_le_bytes())
    }

    /// Puts the CRC behind the fields.
    pub(crate) fn finish(mut self) -> [u8; DISK_HEADER_BYTES] {
        let crc = crc32c(&self.bytes[..CRC_AT]);
        self.bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        self.bytes
    }
}

/// Takes the fields in the order in which they were laid.
pub(crate) struct HeaderReader {
    bytes: [u8; DISK_HEADER_BYTES],
    at: usize,
}

impl HeaderReader {
    /// Checks magic, CRC and version of the header at the start of `bytes`.
    pub(crate) fn open(bytes: &[u8], magic: u32, version: u8) -> Result<Self, DiskHeaderError> {
        let Some(bytes) = bytes.first_chunk::<DISK_HEADER_BYTES>() else { return Err(DiskHeaderError::Absent) };
        if bytes[..4] != magic.to_le_bytes() {
            return Err(DiskHeaderError::Absent);
        }
        if header_crc(bytes) != crc32c(&bytes[..CRC_AT]) {
            return Err(DiskHeaderError::Crc);
        }
        if bytes[4] != version {
            return Err(DiskHeaderError::Version(bytes[4]));
        }
        Ok(Self { bytes: *bytes, at: FIELDS_AT })
    }

    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        assert!(self.at + N <= CRC_AT, "header has no such field");
        let mut field = [0; N];
        field.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        field
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// The CRC that stands in a header.
pub(crate) fn header_crc(bytes: &[u8; DISK_HEADER_BYTES]) -> u32 {
    u32::from_le_bytes([bytes[60], bytes[61], bytes[62], bytes[63]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_in_the_order_they_were_laid() {
        let bytes = HeaderWriter::new(7, 1).put([9]).u16(500).u32(70_000).u64(u64::MAX).finish();
        let mut reader = HeaderReader::open(&bytes, 7, 1).unwrap();
        assert_eq!(reader.take::<1>(), [9]);
        assert_eq!((reader.u16(), reader.u32(), reader.u64()), (500, 70_000, u64::MAX));
    }

    #[test]
    fn a_later_version_is_told_from_damage() {
        let later = HeaderWriter::new(7, 2).finish();
        assert_eq!(HeaderReader::open(&later, 7, 1).err(), Some(DiskHeaderError::Version(2)));
        let mut damaged = later;
        damaged[30] ^= 1;
        assert_eq!(HeaderReader::open(&damaged, 7, 1).err(), Some(DiskHeaderError::Crc));
        assert_eq!(HeaderReader::open(&damaged, 8, 1).err(), Some(DiskHeaderError::Absent));
        assert_eq!(HeaderReader::open(&damaged[..63], 7, 1).err(), Some(DiskHeaderError::Absent));
    }
}
