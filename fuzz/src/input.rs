//! Taking an input apart, and the CRCs that mutations break.

use ringmain_core::crc::crc32c;

/// Bytes not yet used. Past their end everything is zero.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Puts the right CRC at the end of the 64-byte header at the start of `bytes`, if there is one.
pub fn fix_header(bytes: &mut [u8]) {
    if bytes.len() >= 64 {
        let crc = crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
    }
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |four| u32::from_le_bytes([four[0], four[1], four[2], four[3]]))
}

pub fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    if let Some(four) = bytes.get_mut(at..at + 4) {
        four.copy_from_slice(&value.to_le_bytes());
    }
}
