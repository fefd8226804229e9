//! What an operator may set of a topic and change later: levels, compression, retention.

use crate::codec::Compression;
use crate::ids::Durability;
use crate::limits::{RETENTION_BYTES_MIN, RETENTION_MS_MAX, RETENTION_MS_MIN};

use super::TopicError;

/// The settings of a topic. A change takes effect on every shard as soon as it has been told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TopicSettings {
    /// Level of produces that leave the choice to the topic.
    pub durability_default: Durability,
    /// Produces that ask for less get this.
    pub durability_floor: Durability,
    /// What the flusher does with its batches.
    pub compression: Compression,
    /// Records that were appended longer ago than this may go, in milliseconds; none = they stay for ever.
    pub retention_ms: Option<u64>,
    /// Bytes on disk that the topic may take, all its partitions on one broker together; the oldest go first; none = no
    /// bound.
    pub retention_bytes: Option<u64>,
}

impl TopicSettings {
    /// Checks each value and that they fit each other.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), TopicError> {
        let (default, floor) = (self.durability_default, self.durability_floor);
        if default < floor {
            return Err(TopicError::Floor { default, floor });
        }
        match (self.retention_ms, self.retention_bytes) {
            (Some(ms), _) if !(RETENTION_MS_MIN..=RETENTION_MS_MAX).contains(&ms) => Err(TopicError::RetentionMs(ms)),
            (_, Some(bytes)) if bytes < RETENTION_BYTES_MIN => Err(TopicError::RetentionBytes(bytes)),
            _ => Ok(()),
        }
    }

    /// The part of [`retention_bytes`](Self::retention_bytes) that falls to a shard with `here` of the topic's
    /// `partitions`: bytes follow partitions, and a shard decides without asking the others. So a topic whose records go
    /// to few of its partitions keeps less than its bound, never more.
    #[must_use]
    pub fn retention_bytes_of(&self, here: usize, partitions: usize) -> Option<u64> {
        let bytes = u128::from(self.retention_bytes?) * here as u128 / partitions.max(1) as u128;
        // At most what it is a part of, which is a u64.
        (here <= partitions).then_some(bytes as u64).or(self.retention_bytes)
    }
}

/// Changes of settings; what is none stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TopicAlteration {
    /// New default level.
    pub durability_default: Option<Durability>,
    /// New floor; without a new default it raises the default with it.
    pub durability_floor: Option<Durability>,
    /// New compression, for what is flushed from now on.
    pub compression: Option<Compression>,
    /// New bound by age; an inner none removes it.
    pub retention_ms: Option<Option<u64>>,
    /// New bound by bytes; an inner none removes it.
    pub retention_bytes: Option<Option<u64>>,
}

impl TopicAlteration {
    /// The settings after the change.
    ///
    /// # Errors
    /// When they break a rule.
    pub fn apply(&self, before: TopicSettings) -> Result<TopicSettings, TopicError> {
        let durability_floor = self.durability_floor.unwrap_or(before.durability_floor);
        let raised = match self.durability_floor {
            Some(floor) => before.durability_default.max(floor),
            None => before.durability_default,
        };
        let after = TopicSettings {
            durability_default: self.durability_default.unwrap_or(raised),
            durability_floor,
            compression: self.compression.unwrap_or(before.compression),
            retention_ms: self.retention_ms.unwrap_or(before.retention_ms),
            retention_bytes: self.retention_bytes.unwrap_or(before.retention_bytes),
        };
        after.check()?;
        Ok(after)
    }

    /// Whether it changes nothing, whatever the settings are.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_named_stays_and_an_inner_none_removes_a_bound() {
        let before = TopicSettings { retention_ms: Some(60_000), retention_bytes: Some(1 << 30), ..Default::default() };
        let change = TopicAlteration { retention_ms: Some(None), ..Default::default() };
        assert_eq!(change.apply(before), Ok(TopicSettings { retention_ms: None, ..before }));
        assert_eq!(TopicAlteration::default().apply(before), Ok(before));
    }

    #[test]
    fn a_floor_alone_raises_the_default_and_a_default_below_the_floor_is_refused() {
        let floor = TopicAlteration { durability_floor: Some(Durability::Flushed), ..Default::default() };
        let raised = floor.apply(TopicSettings::default()).unwrap();
        assert_eq!((raised.durability_default, raised.durability_floor), (Durability::Flushed, Durability::Flushed));
        let below = TopicAlteration { durability_default: Some(Durability::Memory), ..Default::default() };
        assert!(matches!(below.apply(raised), Err(TopicError::Floor { .. })));
    }

    #[test]
    fn bounds_outside_their_range_are_refused() {
        let by_age = |ms| TopicSettings { retention_ms: Some(ms), ..Default::default() }.check();
        assert_eq!(by_age(0), Err(TopicError::RetentionMs(0)));
        assert_eq!(by_age(u64::MAX), Err(TopicError::RetentionMs(u64::MAX)));
        assert_eq!(by_age(RETENTION_MS_MIN), Ok(()));
        let by_bytes = TopicSettings { retention_bytes: Some(0), ..Default::default() };
        assert_eq!(by_bytes.check(), Err(TopicError::RetentionBytes(0)));
    }

    #[test]
    fn a_shard_gets_the_part_of_the_bytes_that_its_partitions_are() {
        let settings = TopicSettings { retention_bytes: Some(u64::MAX), ..Default::default() };
        assert_eq!(settings.retention_bytes_of(1, 2), Some(u64::MAX / 2));
        assert_eq!(settings.retention_bytes_of(3, 3), Some(u64::MAX));
        assert_eq!(TopicSettings::default().retention_bytes_of(1, 2), None);
    }
}
