//! Who an idempotent producer is, and the numbers in its batches.

use std::hash::{BuildHasher, RandomState};

use bytes::Bytes;
use ringmain_core::batch::{BATCH_HEADER_BYTES, BatchHeader, seal_crc_of};

/// An idempotent producer: batches under the same id count as sent by one, and a higher epoch fences the lower ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProducerIdentity {
    /// Its id, for all time; not 0. Two producers must never share one.
    pub id: u64,
    /// Raised by each new instance, above every epoch that one before has used.
    pub epoch: u16,
}

impl ProducerIdentity {
    /// An id that nobody else has: 64 random bits.
    #[must_use]
    pub fn random() -> Self {
        // Each state is keyed anew from what the system gave at random.
        let random = |part: u8| RandomState::new().hash_one((part, std::process::id(), std::time::Instant::now()));
        Self { id: (random(0) ^ random(1).rotate_left(32)).max(1), epoch: 0 }
    }

    /// The same producer one epoch on; another one when there is none left.
    #[must_use]
    pub(crate) fn raised(self) -> Self {
        self.epoch.checked_add(1).map_or_else(Self::random, |epoch| Self { epoch, ..self })
    }
}

/// Numbers the batches of one partition.
#[derive(Debug)]
pub(crate) struct Numbering {
    identity: ProducerIdentity,
    next_sequence: u32,
}

impl Numbering {
    pub(crate) const fn new(identity: ProducerIdentity) -> Self {
        Self { identity, next_sequence: 0 }
    }

    pub(crate) const fn identity(&self) -> ProducerIdentity {
        self.identity
    }

    /// Begins anew in the next epoch: what was numbered before and comes late is refused.
    pub(crate) fn raise(&mut self) {
        self.identity = self.identity.raised();
        self.next_sequence = 0;
    }

    /// The payload of a request with this batch, numbered; the batch's own bytes are shared and not changed. What is no
    /// batch goes as it is, for the server to refuse.
    pub(crate) fn number(&mut self, batch: &Bytes) -> Vec<Bytes> {
        let Ok(header) = BatchHeader::parse(batch) else { return vec![batch.clone()] };
        let header = BatchHeader {
            producer_id: self.identity.id,
            producer_epoch: self.identity.epoch,
            base_sequence: self.next_sequence,
            ..header
        };
        self.next_sequence = self.next_sequence.wrapping_add(header.record_count);
        let mut head = vec![0; BATCH_HEADER_BYTES];
        header.write(&mut head);
        let rest = batch.slice(BATCH_HEADER_BYTES..);
        seal_crc_of(&mut head, &rest);
        vec![head.into(), rest]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch_builder::BatchBuilder;
    use crate::record::NewRecord;
    use ringmain_core::batch::check_crc;
    use ringmain_core::ids::PartitionKey;

    #[test]
    fn random_ids_differ() {
        let ids: std::collections::HashSet<u64> = (0..1000).map(|_| ProducerIdentity::random().id).collect();
        assert_eq!(ids.len(), 1000);
    }

    #[test]
    fn numbers_go_on_and_begin_anew_in_a_higher_epoch() {
        let mut builder = BatchBuilder::new(PartitionKey::new(1, 2));
        for _ in 0..3 {
            builder.push(&NewRecord { value: Some(b"value"), ..NewRecord::default() }).expect("it fits");
        }
        let batch = builder.finish();
        let mut numbering = Numbering::new(ProducerIdentity { id: 7, epoch: u16::MAX - 1 });
        let numbered = |numbering: &mut Numbering| {
            let bytes = numbering.number(&batch).concat();
            let header = BatchHeader::parse(&bytes).expect("a whole batch");
            check_crc(&header, &bytes).expect("a right CRC");
            assert_eq!(bytes[BATCH_HEADER_BYTES..], batch[BATCH_HEADER_BYTES..]);
            (header.producer_id, header.producer_epoch, header.base_sequence)
        };
        assert_eq!(numbered(&mut numbering), (7, u16::MAX - 1, 0));
        assert_eq!(numbered(&mut numbering), (7, u16::MAX - 1, 3));
        numbering.raise();
        assert_eq!(numbered(&mut numbering), (7, u16::MAX, 0));
        numbering.raise();
        let (id, epoch, sequence) = numbered(&mut numbering);
        assert!(id != 7 && id != 0 && epoch == 0 && sequence == 0);
    }
}
