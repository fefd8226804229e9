//! A wheel of timers: one list of timers for each millisecond of the next four seconds, and, in the same lists, those
//! of later turns. Setting and taking away a timer is a few stores, whatever their number: there is one for each fetch
//! that waits.

use std::task::Waker;

/// Milliseconds of one turn.
const SLOTS: u64 = 4096;
/// End of a list.
const NONE: u32 = u32::MAX;

/// Names a timer; stays harmless when the timer is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimerKey {
    index: u32,
    generation: u32,
}

#[derive(Debug)]
struct Entry {
    /// `None` = not in use.
    waker: Option<Waker>,
    due_ms: u64,
    generation: u32,
    /// In the list of its slot; `next` alone also links the entries not in use.
    previous: u32,
    next: u32,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Wheel {
    heads: Vec<u32>,
    entries: Vec<Entry>,
    free: u32,
    /// All timers due up to here have fired.
    now_ms: u64,
    count: usize,
}

fn slot_of(ms: u64) -> usize {
    (ms % SLOTS) as usize
}

impl Wheel {
    pub(super) fn new() -> Self {
        Self { heads: vec![NONE; SLOTS as usize], entries: Vec::new(), free: NONE, now_ms: 0, count: 0 }
    }

    /// Timers that wait.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Sets a timer that fires when time reaches `due_ms`, and not before the next `advance`.
    pub(super) fn insert(&mut self, due_ms: u64, waker: Waker) -> TimerKey {
        let due_ms = due_ms.max(self.now_ms + 1);
        let index = if self.free == NONE {
            self.entries.push(Entry { waker: None, due_ms: 0, generation: 0, previous: NONE, next: NONE });
            // Memory ends long before 2^32 timers.
            (self.entries.len() - 1) as u32
        } else {
            self.free
        };
        let head = self.heads[slot_of(due_ms)];
        let entry = &mut self.entries[index as usize];
        if self.free == index {
            self.free = entry.next;
        }
        *entry = Entry { waker: Some(waker), due_ms, generation: entry.generation, previous: NONE, next: head };
        let key = TimerKey { index, generation: entry.generation };
        if head != NONE {
            self.entries[head as usize].previous = index;
        }
        self.heads[slot_of(due_ms)] = index;
        self.count += 1;
        key
    }

    /// The waker of a timer that has not fired.
    pub(super) fn waker_mut(&mut self, key: TimerKey) -> Option<&mut Waker> {
        let entry = self.entries.get_mut(key.index as usize).filter(|entry| entry.generation == key.generation)?;
        entry.waker.as_mut()
    }

    /// Takes a timer away, if it has not fired.
    pub(super) fn remove(&mut self, key: TimerKey) -> Option<Waker> {
        self.waker_mut(key)?;
        Some(self.unlink(key.index))
    }

    fn unlink(&mut self, index: u32) -> Waker {
        let entry = &mut self.entries[index as usize];
        let (previous, next, slot) = (entry.previous, entry.next, slot_of(entry.due_ms));
        let waker = entry.waker.take().expect("only timers that wait are linked");
        entry.generation = entry.generation.wrapping_add(1);
        entry.next = self.free;
        self.free = index;
        match previous {
            NONE => self.heads[slot] = next,
            previous => self.entries[previous as usize].next = next,
        }
        if next != NONE {
            self.entries[next as usize].previous = previous;
        }
        self.count -= 1;
        waker
    }

    /// Moves time on; puts the wakers of all timers that are due into `fired`.
    pub(super) fn advance(&mut self, now_ms: u64, fired: &mut Vec<Waker>) {
        if now_ms <= self.now_ms {
            return;
        }
        // After a stall of more than a turn each slot is looked at once.
        let from = (self.now_ms + 1).max(now_ms.saturating_sub(SLOTS - 1));
        for ms in from..=now_ms {
            let mut index = self.heads[slot_of(ms)];
            while index != NONE {
                let Entry { next, due_ms, .. } = self.entries[index as usize];
                if due_ms <= now_ms {
                    fired.push(self.unlink(index));
                }
                index = next;
            }
        }
        self.now_ms = now_ms;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::task::Wake;

    use proptest::prelude::*;

    use super::*;

    /// Notes when it is woken.
    struct Note(AtomicU64);

    impl Wake for Note {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Set(u64),
        Remove(usize),
        Advance(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let far = prop_oneof![0u64..50, 0u64..5_000, 0u64..20_000];
        prop_oneof![
            5 => far.clone().prop_map(Step::Set),
            2 => any::<prop::sample::Index>().prop_map(|index| Step::Remove(index.index(1000))),
            3 => far.prop_map(Step::Advance),
        ]
    }

    proptest! {
        #[test]
        fn timers_fire_once_at_the_first_advance_that_reaches_them(steps in prop::collection::vec(step(), 1..200)) {
            let mut wheel = Wheel::new();
            let mut now = 0;
            // Due time, key, note, and whether it should still wait.
            let mut timers: Vec<(u64, TimerKey, Arc<Note>, bool)> = Vec::new();
            for step in steps {
                match step {
                    Step::Set(after) => {
                        let note = Arc::new(Note(AtomicU64::new(0)));
                        let key = wheel.insert(now + after, Arc::clone(&note).into());
                        timers.push((now + after.max(1), key, note, true));
                    }
                    Step::Remove(index) if !timers.is_empty() => {
                        let count = timers.len();
                        let (_, key, _, waits) = &mut timers[index % count];
                        prop_assert_eq!(wheel.remove(*key).is_some(), *waits);
                        *waits = false;
                    }
                    Step::Remove(_) => {}
                    Step::Advance(by) => {
                        now += by;
                        let mut fired = Vec::new();
                        wheel.advance(now, &mut fired);
                        fired.into_iter().for_each(Waker::wake);
                        for (due, _, note, waits) in &mut timers {
                            let fires = *waits && *due <= now;
                            *waits &= !fires;
                            prop_assert_eq!(note.0.swap(0, Ordering::Relaxed), u64::from(fires));
                        }
                    }
                }
                prop_assert_eq!(wheel.count(), timers.iter().filter(|timer| timer.3).count());
            }
        }
    }

    #[test]
    fn a_wheel_keeps_no_more_memory_than_the_most_timers_at_once() {
        let mut wheel = Wheel::new();
        let waker = Waker::noop();
        for round in 0..1000 {
            let keys: Vec<_> = (0..10).map(|n| wheel.insert(round + n, waker.clone())).collect();
            keys.into_iter().for_each(|key| assert!(wheel.remove(key).is_some()));
        }
        assert_eq!(wheel.entries.len(), 10);
    }
}
