//! Compressing and decompressing, with memory that is taken once: pure functions of bytes.
//!
//! Nothing is believed of packed bytes: where they come out is a buffer of the size that their owner states and that was
//! checked against a limit before, and what does not fill it exactly is an error.

use zstd_safe::{CCtx, CParameter, DCtx};

use crate::codec::Codec;

/// How hard to compress. Measured on JSON lines in pieces of 64 KiB, one CPU of 2 GHz: MB/s in, bytes out for each in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// LZ4: 510 MB/s, 0.33; the quickest to read back (1860 MB/s).
    Lz4,
    /// Zstandard, level -3: 640 MB/s, 0.29; read back at 1520 MB/s.
    Quick,
    /// Zstandard, level 1: 440 MB/s, 0.17; read back at 1050 MB/s.
    Zstd,
}

/// How many levels there are.
pub const LEVELS: usize = 3;

impl Level {
    /// What the bytes are then.
    #[must_use]
    pub const fn codec(self) -> Codec {
        match self {
            Self::Lz4 => Codec::Lz4,
            Self::Quick | Self::Zstd => Codec::Zstd,
        }
    }
}

/// Compresses. Holds about 1 MiB once it has been used, and with LZ4 room for the largest piece it has seen.
pub struct Compressor {
    zstd: CCtx<'static>,
    level: Option<Level>,
    /// LZ4 wants room for the worst case.
    lz4: Vec<u8>,
}

impl Default for Compressor {
    fn default() -> Self {
        Self { zstd: CCtx::create(), level: None, lz4: Vec::new() }
    }
}

impl Compressor {
    /// Compresses `raw` into the front of `into` and gives the size; none when it does not fit there.
    pub fn compress(&mut self, level: Level, raw: &[u8], into: &mut [u8]) -> Option<usize> {
        if level == Level::Lz4 {
            self.lz4.resize(lz4_flex::block::get_maximum_output_size(raw.len()).max(self.lz4.len()), 0);
            let size = lz4_flex::block::compress_into(raw, &mut self.lz4).ok()?;
            into.get_mut(..size)?.copy_from_slice(&self.lz4[..size]);
            return Some(size);
        }
        if self.level != Some(level) {
            let number = if level == Level::Quick { -3 } else { 1 };
            self.zstd.set_parameter(CParameter::CompressionLevel(number)).ok()?;
            self.level = Some(level);
        }
        self.zstd.compress2(into, raw).ok()
    }
}

/// Packed bytes that are not what they were said to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecompressError {
    /// They are not of the codec, or give more than was stated.
    #[error("{codec:?} bytes are damaged")]
    Damaged {
        /// The codec they were said to have.
        codec: Codec,
    },
    /// They are whole and give another number of bytes.
    #[error("decompressed to {has} bytes, stated were {needs}")]
    Bytes {
        /// Bytes there are.
        has: usize,
        /// Bytes there must be.
        needs: usize,
    },
}

/// Decompresses. Holds about 160 KiB.
pub struct Decompressor {
    zstd: DCtx<'static>,
}

impl Default for Decompressor {
    fn default() -> Self {
        Self { zstd: DCtx::create() }
    }
}

impl Decompressor {
    /// Decompresses `packed` so that it fills `into` exactly.
    pub fn decompress(&mut self, codec: Codec, packed: &[u8], into: &mut [u8]) -> Result<(), DecompressError> {
        let needs = into.len();
        let damaged = DecompressError::Damaged { codec };
        let has = match codec {
            Codec::None if packed.len() == needs => {
                into.copy_from_slice(packed);
                needs
            }
            Codec::None => packed.len(),
            Codec::Lz4 => lz4_flex::block::decompress_into(packed, into).map_err(|_| damaged)?,
            Codec::Zstd => self.zstd.decompress(into, packed).map_err(|_| damaged)?,
        };
        if has == needs { Ok(()) } else { Err(DecompressError::Bytes { has, needs }) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: [Level; LEVELS] = [Level::Lz4, Level::Quick, Level::Zstd];

    #[test]
    fn what_repeats_becomes_small_and_comes_back() {
        let raw: Vec<u8> = (0..100_000u32).map(|at| (at / 100 % 7) as u8).collect();
        for level in ALL {
            let mut packed = vec![0; raw.len()];
            let size = Compressor::default().compress(level, &raw, &mut packed).unwrap();
            assert!(size < raw.len() / 10, "{level:?}: {size}");
            let mut back = vec![0; raw.len()];
            Decompressor::default().decompress(level.codec(), &packed[..size], &mut back).unwrap();
            assert_eq!(back, raw);
        }
    }

    #[test]
    fn what_does_not_fit_is_no_result() {
        for level in ALL {
            assert_eq!(Compressor::default().compress(level, &[7; 5000], &mut [0; 8]), None);
        }
    }

    #[test]
    fn another_size_than_stated_is_an_error() {
        let mut packed = [0; 1000];
        for level in ALL {
            let size = Compressor::default().compress(level, &[7; 5000], &mut packed).unwrap();
            for stated in [4999, 5001] {
                let mut back = vec![0; stated];
                assert!(Decompressor::default().decompress(level.codec(), &packed[..size], &mut back).is_err());
            }
        }
        assert!(Decompressor::default().decompress(Codec::None, b"abc", &mut [0; 2]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_come_back_from_a_compressor_used_before(
            pieces in proptest::collection::vec((0usize..LEVELS, proptest::collection::vec(0u8..8, 0..3000)), 1..8)
        ) {
            let (mut compressor, mut decompressor) = (Compressor::default(), Decompressor::default());
            for (level, raw) in pieces {
                let mut packed = vec![0; raw.len() + 1000];
                let size = compressor.compress(ALL[level], &raw, &mut packed).unwrap();
                let mut back = vec![0; raw.len()];
                decompressor.decompress(ALL[level].codec(), &packed[..size], &mut back).unwrap();
                prop_assert_eq!(back, raw);
            }
        }

        #[test]
        fn hostile_bytes_never_panic(codec in 0u8..3, packed in proptest::collection::vec(any::<u8>(), 0..200), size in 0usize..5000) {
            let codec = Codec::from_byte(codec).unwrap();
            let _ = Decompressor::default().decompress(codec, &packed, &mut vec![0; size]);
        }
    }
}
