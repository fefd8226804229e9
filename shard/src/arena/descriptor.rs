//! What the arena knows of one block: 64 bytes, little-endian.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | the word: bits 0-1 state (0 free, 1 open, 2 sealed), 2-31 generation, 32-63 committed bytes |
//! | 8 | 8 | topic id |
//! | 16 | 8 | block sequence: the order in which the shard took its blocks |
//! | 24 | 1 | block class |
//! | 25 | 3 | zero |
//! | 28 | 4 | generation that these fields belong to |
//! | 32 | 4 | CRC32C of bytes 8..32 |
//! | 36 | 28 | zero |
//!
//! The fields are written only while the word says free; the word is written last and at once. So a kill at any
//! instruction leaves either the block as it was or as it became. The generation, raised by each take, ties the two:
//! fields of an earlier life never pass for the word's.

use ringmain_core::crc::crc32c;
use ringmain_core::ids::TopicId;
use ringmain_core::limits::{BLOCK_BYTES, SLAB_BYTES};

/// Size of a descriptor.
pub(super) const DESCRIPTOR_BYTES: usize = 64;
/// The fields behind the word.
pub(super) const FIELDS_AT: usize = 8;
pub(super) const FIELDS_BYTES: usize = 28;
const GENERATION_BITS: u32 = 30;
const GENERATION_MASK: u32 = (1 << GENERATION_BITS) - 1;

/// Where a block is in its life, as the next process must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Batches may be added.
    Open,
    /// Full: no more batches.
    Sealed,
}

/// The word, taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word {
    /// `None` = free.
    pub(super) state: Option<BlockState>,
    pub(super) generation: u32,
    pub(super) committed_bytes: u32,
}

impl Word {
    pub(super) fn encode(self) -> u64 {
        let state = match self.state {
            None => 0,
            Some(BlockState::Open) => 1,
            Some(BlockState::Sealed) => 2,
        };
        u64::from(self.committed_bytes) << 32 | u64::from(self.generation & GENERATION_MASK) << 2 | state
    }

    /// `None` when the state is none that there is.
    pub(super) fn decode(word: u64) -> Option<Self> {
        let state = match word & 3 {
            0 => None,
            1 => Some(BlockState::Open),
            2 => Some(BlockState::Sealed),
            _ => return None,
        };
        let generation = (word >> 2) as u32 & GENERATION_MASK;
        Some(Self { state, generation, committed_bytes: (word >> 32) as u32 })
    }

    /// The generation of the next life of the block.
    pub(super) fn next_generation(self) -> u32 {
        self.generation.wrapping_add(1) & GENERATION_MASK
    }
}

/// The fields behind the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fields {
    pub(super) topic: TopicId,
    pub(super) sequence: u64,
    pub(super) class: u8,
    pub(super) generation: u32,
}

impl Fields {
    pub(super) fn encode(&self) -> [u8; FIELDS_BYTES] {
        let mut out = [0; FIELDS_BYTES];
        out[0..8].copy_from_slice(&self.topic.0.to_le_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16] = self.class;
        out[20..24].copy_from_slice(&self.generation.to_le_bytes());
        let crc = crc32c(&out[..24]);
        out[24..28].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// `None` when the CRC is wrong.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        (crc32c(&bytes[..24]) == u32_at(24)).then(|| Self {
            topic: TopicId(u64_at(0)),
            sequence: u64_at(8),
            class: bytes[16],
            generation: u32_at(20),
        })
    }
}

/// What is wrong with a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// The word has a state that there is not.
    #[error("its state is none that there is")]
    State,
    /// The fields' CRC is wrong.
    #[error("the CRC of its fields is wrong")]
    Crc,
    /// The fields belong to another life of the block.
    #[error("its word and fields are of different generations")]
    Generation,
    /// The class is none that there is, or has no such slot in a slab.
    #[error("no slab has such a block of class {0}")]
    Class(u8),
    /// The slab has blocks of another class.
    #[error("class {0} stands in a slab of another class")]
    MixedSlab(u8),
    /// More bytes are committed than the block has.
    #[error("{0} committed bytes are more than the block has")]
    Committed(u32),
    /// Another block has the same sequence.
    #[error("another block has its sequence {0}")]
    Sequence(u64),
}

/// Blocks of a class in one slab.
pub(super) fn slots_of(class: u8) -> Option<usize> {
    BLOCK_BYTES.get(usize::from(class)).map(|bytes| SLAB_BYTES / bytes)
}

/// Checks a descriptor of slot `slot`; `None` when the block is free.
pub(super) fn check(word: u64, fields: &[u8], slot: usize) -> Result<Option<(Word, Fields)>, DescriptorError> {
    let word = Word::decode(word).ok_or(DescriptorError::State)?;
    if word.state.is_none() {
        return Ok(None);
    }
    let fields = Fields::decode(fields).ok_or(DescriptorError::Crc)?;
    if fields.generation != word.generation {
        return Err(DescriptorError::Generation);
    }
    if slots_of(fields.class).is_none_or(|slots| slot >= slots) {
        return Err(DescriptorError::Class(fields.class));
    }
    if word.committed_bytes as usize > BLOCK_BYTES[usize::from(fields.class)] {
        return Err(DescriptorError::Committed(word.committed_bytes));
    }
    Ok(Some((word, fields)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_and_fields_come_back_as_they_were(
            state in prop_oneof![Just(None), Just(Some(BlockState::Open)), Just(Some(BlockState::Sealed))],
            generation in 0..=GENERATION_MASK, committed_bytes: u32, topic: u64, sequence: u64, class: u8,
        ) {
            let word = Word { state, generation, committed_bytes };
            prop_assert_eq!(Word::decode(word.encode()), Some(word));
            let fields = Fields { topic: TopicId(topic), sequence, class, generation };
            prop_assert_eq!(Fields::decode(&fields.encode()), Some(fields));
        }

        #[test]
        fn no_bytes_make_the_check_panic(word: u64, fields: [u8; FIELDS_BYTES], slot in 0usize..128) {
            let _ = check(word, &fields, slot);
        }
    }

    #[test]
    fn generations_go_round() {
        let last = Word { state: None, generation: GENERATION_MASK, committed_bytes: 0 };
        assert_eq!(last.next_generation(), 0);
    }
}
