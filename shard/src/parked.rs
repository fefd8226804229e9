//! Fetches that wait until something is appended (or synced) to one of their partitions.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use ringmain_core::ids::PartitionKey;

use crate::signal::Signal;

/// The fetches that wait for one partition, by the address of their signal: each is found at once, however many wait.
type Waiting = HashMap<*const Signal, Weak<Signal>>;

/// The parked fetches of one shard.
#[derive(Default)]
pub(crate) struct Parked {
    by_key: RefCell<HashMap<PartitionKey, Waiting>>,
}

impl Parked {
    /// Raises `signal` at the next change of the partition. Whoever parks takes it back before the signal goes.
    pub(crate) fn park(&self, key: PartitionKey, signal: &Rc<Signal>) {
        self.by_key.borrow_mut().entry(key).or_default().insert(Rc::as_ptr(signal), Rc::downgrade(signal));
    }

    /// Takes the signal back.
    pub(crate) fn unpark(&self, key: PartitionKey, signal: &Rc<Signal>) {
        let mut by_key = self.by_key.borrow_mut();
        if let Some(waiting) = by_key.get_mut(&key) {
            waiting.remove(&Rc::as_ptr(signal));
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
        for signal in by_key.remove(&key).unwrap_or_default().into_values().filter_map(|signal| signal.upgrade()) {
            signal.raise();
        }
    }

    /// The shard stops: every fetch looks again.
    pub(crate) fn notify_all(&self) {
        let waiting = std::mem::take(&mut *self.by_key.borrow_mut());
        for signal in waiting.into_values().flat_map(HashMap::into_values).filter_map(|signal| signal.upgrade()) {
            signal.raise();
        }
    }
}
