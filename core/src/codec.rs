//! Codecs of record batches and of stored runs, and what a topic asks for.

use std::fmt;
use std::str::FromStr;

/// How bytes are compressed, as the byte in a batch header or in the directory of an extent says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Codec {
    /// As they are.
    #[default]
    None = 0,
    /// LZ4, the block format (<https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md>), without a size in front.
    Lz4 = 1,
    /// One Zstandard frame (RFC 8878).
    Zstd = 2,
}

impl Codec {
    /// The codec of a wire or disk byte, if there is one.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::None),
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// The word for it: `none`, `lz4`, `zstd`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }

    /// Its bit in a set of codecs, as a fetch names those it takes.
    #[must_use]
    pub const fn bit(self) -> u32 {
        1 << self as u8
    }
}

impl FromStr for Codec {
    type Err = UnknownCodec;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::None, Self::Lz4, Self::Zstd]
            .into_iter()
            .find(|codec| codec.name() == text)
            .ok_or_else(|| UnknownCodec(text.to_owned()))
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A codec word that is none of `none`, `lz4`, `zstd`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown codec `{0}`: use none, lz4 or zstd")]
pub struct UnknownCodec(pub String);

/// The set of all codecs of this version.
pub const ALL_CODECS: u32 = Codec::None.bit() | Codec::Lz4.bit() | Codec::Zstd.bit();

/// What a topic's operator asks the flusher to do with its batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Compression {
    /// Compress what pays, as far as the core has time for it.
    #[default]
    Auto = 0,
    /// Store what came.
    None = 1,
    /// LZ4 where it saves anything.
    Lz4 = 2,
    /// Zstandard where it saves anything.
    Zstd = 3,
}

impl Compression {
    /// The setting of a wire or disk byte, if there is one.
    #[must_use]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Auto),
            1 => Some(Self::None),
            2 => Some(Self::Lz4),
            3 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// The word operators write: `auto`, `none`, `lz4`, `zstd`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Compression {
    type Err = UnknownCompression;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            "lz4" => Ok(Self::Lz4),
            "zstd" => Ok(Self::Zstd),
            _ => Err(UnknownCompression(text.to_owned())),
        }
    }
}

/// A compression word that is none of `auto`, `none`, `lz4`, `zstd`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown compression `{0}`: use auto, none, lz4 or zstd")]
pub struct UnknownCompression(pub String);
