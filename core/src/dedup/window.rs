//! The window of one producer in one partition: its epoch and its newest batches, oldest first.

use super::{Decision, ProducerBatch, SequenceError};
use crate::batch::BatchHeader;
use crate::ids::{Epoch, Offset};
use crate::limits::PRODUCER_WINDOW_BATCHES;

/// A batch in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stored {
    base_offset: Offset,
    base_sequence: u32,
    record_count: u32,
    epoch: Epoch,
    crc: u32,
}

/// What a partition knows of one producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    producer_id: u64,
    producer_epoch: u16,
    count: u8,
    stored: [Stored; PRODUCER_WINDOW_BATCHES],
}

impl Window {
    /// A window that holds this batch and nothing else.
    #[must_use]
    pub fn new(batch: &ProducerBatch) -> Self {
        let mut window = Self {
            producer_id: batch.producer_id,
            producer_epoch: batch.producer_epoch,
            count: 0,
            stored: [Stored::default(); PRODUCER_WINDOW_BATCHES],
        };
        window.push(batch);
        window
    }

    /// Whose window it is.
    #[must_use]
    pub const fn producer_id(&self) -> u64 {
        self.producer_id
    }

    /// The producer's epoch.
    #[must_use]
    pub const fn producer_epoch(&self) -> u16 {
        self.producer_epoch
    }

    /// The batches, oldest first; at least one.
    pub fn batches(&self) -> impl ExactSizeIterator<Item = ProducerBatch> + '_ {
        self.stored[..usize::from(self.count)].iter().map(|stored| self.batch(stored))
    }

    fn batch(&self, stored: &Stored) -> ProducerBatch {
        ProducerBatch {
            producer_id: self.producer_id,
            producer_epoch: self.producer_epoch,
            base_sequence: stored.base_sequence,
            record_count: stored.record_count,
            base_offset: stored.base_offset,
            epoch: stored.epoch,
            crc: stored.crc,
        }
    }

    fn last(&self) -> &Stored {
        &self.stored[usize::from(self.count) - 1]
    }

    /// The sequence that follows the newest batch.
    #[must_use]
    pub fn next_sequence(&self) -> u32 {
        self.last().base_sequence.wrapping_add(self.last().record_count)
    }

    /// Takes a batch that was stored. A higher producer epoch starts the window anew; a lower one changes nothing.
    pub fn take(&mut self, batch: &ProducerBatch) {
        if batch.producer_epoch > self.producer_epoch {
            *self = Self::new(batch);
        } else if batch.producer_epoch == self.producer_epoch {
            self.push(batch);
        }
    }

    fn push(&mut self, batch: &ProducerBatch) {
        let stored = Stored {
            base_offset: batch.base_offset,
            base_sequence: batch.base_sequence,
            record_count: batch.record_count,
            epoch: batch.epoch,
            crc: batch.crc,
        };
        if usize::from(self.count) == PRODUCER_WINDOW_BATCHES {
            self.stored.rotate_left(1);
            self.count -= 1;
        }
        self.stored[usize::from(self.count)] = stored;
        self.count += 1;
    }

    /// What a batch of this producer that arrives in the shard's epoch `now` is.
    pub fn check(&self, header: &BatchHeader, now: Epoch) -> Result<Decision, SequenceError> {
        if header.producer_epoch < self.producer_epoch {
            return Err(SequenceError::Fenced { current: self.producer_epoch });
        }
        if header.producer_epoch > self.producer_epoch {
            return match header.base_sequence {
                0 => Ok(Decision::New),
                _ => Err(SequenceError::Gap { expected: 0 }),
            };
        }
        let expected = self.next_sequence();
        // Sequences wrap: what lies less than 2^31 ahead is ahead, the rest is behind.
        let ahead = header.base_sequence.wrapping_sub(expected);
        if ahead == 0 {
            return Ok(Decision::New);
        }
        if ahead < 1 << 31 {
            // What memory lost in the epochs between may be what is missing.
            let lost = self.last().epoch < now;
            return if lost { Ok(Decision::New) } else { Err(SequenceError::Gap { expected }) };
        }
        let same = |stored: &&Stored| stored.base_sequence == header.base_sequence;
        match self.stored[..usize::from(self.count)].iter().rev().find(same) {
            Some(stored) if stored.record_count == header.record_count && stored.crc == header.crc => {
                Ok(Decision::Duplicate(self.batch(stored)))
            }
            Some(_) => Err(SequenceError::Reused { expected }),
            None => Err(SequenceError::TooOld { expected }),
        }
    }
}
