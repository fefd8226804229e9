//! Fetches that wait until something is appended (or synced) to one of their partitions.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use ringmain_core::ids::PartitionKey;

use crate::signal::Signal;

/// The parked fetches of one shard.
#[derive(Default)]
pub(crate) struct Parked {
    by_key: RefCell<HashMap<PartitionKey, Vec<Weak<Signal>>>>,
}

impl Parked {
    /// Raises `signal` at the next change of the partition.
    pub(crate) fn park(&self, key: PartitionKey, signal: &Rc<Signal>) {
        let mut by_key = self.by_key.borrow_mut();
        let waiting = by_key.entry(key).or_default();
        let is_it = |other: &Weak<Signal>| std::ptr::eq(other.as_ptr(), Rc::as_ptr(signal));
        waiting.retain(|other| other.strong_count() > 0 && !is_it(other));
        waiting.push(Rc::downgrade(signal));
    }

    /// Takes the signal back.
    pub(crate) fn unpark(&self, key: PartitionKey, signal: &Rc<Signal>) {
        let mut by_key = self.by_key.borrow_mut();
        if let Some(waiting) = by_key.get_mut(&key) {
            waiting.retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), Rc::as_ptr(signal)));
            if waiting.is_empty() {
                by_key.remove(&key);
            }
        }
    }

    /// The partition has more to show.
    pub(crate) fn notify(&self, key: PartitionKey) {
        let mut by_key = self.by_key.borrow_mut();
        if by_key.is_empty() {
            return;
        }
        for signal in by_key.remove(&key).unwrap_or_default() {
            if let Some(signal) = signal.upgrade() {
                signal.raise();
            }
        }
    }

    /// The shard stops: every fetch looks again.
    pub(crate) fn notify_all(&self) {
        for signal in self.by_key.borrow_mut().drain().flat_map(|(_, waiting)| waiting) {
            if let Some(signal) = signal.upgrade() {
                signal.raise();
            }
        }
    }
}
