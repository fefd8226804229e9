//! Tells the next start that this one panicked while it took over an arena. Only a panic may count against an arena: it
//! will happen again with the same bytes. A kill in the middle says nothing about it, however often it happens, and what
//! was acked from memory must survive it.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;

use ringmain_core::ids::ShardId;

static HOOK: Once = Once::new();

thread_local! {
    /// Where a panic of this thread leaves its mark now.
    static MARK: RefCell<Option<PathBuf>> = const { RefCell::new(None) };
}

/// While it lives, a panic of this thread leaves a file that [`take`] finds.
pub(crate) struct PanicMark;

impl PanicMark {
    pub(crate) fn new(data_dir: &Path, shard: ShardId) -> Self {
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                // There is nobody left to tell that the mark could not be made.
                let _ = MARK.try_with(|mark| {
                    if let Ok(mark) = mark.try_borrow()
                        && let Some(path) = &*mark
                    {
                        let _ = fs::write(path, panic.to_string());
                    }
                });
                before(panic);
            }));
        });
        MARK.set(Some(path(data_dir, shard)));
        Self
    }
}

impl Drop for PanicMark {
    fn drop(&mut self) {
        MARK.set(None);
    }
}

/// Whether the start before has left a mark; takes it away.
pub(crate) fn take(data_dir: &Path, shard: ShardId) -> bool {
    fs::remove_file(path(data_dir, shard)).is_ok()
}

fn path(data_dir: &Path, shard: ShardId) -> PathBuf {
    data_dir.join("quarantine").join(format!("shard-{:03}.panic", shard.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_panic_of_this_thread_while_it_lives_leaves_a_mark() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("quarantine")).unwrap();
        let shard = ShardId(3);
        let mark = PanicMark::new(dir.path(), shard);
        let elsewhere = std::thread::spawn(|| panic!("on purpose, in another thread"));
        assert!(elsewhere.join().is_err());
        assert!(!take(dir.path(), shard));
        assert!(std::panic::catch_unwind(|| panic!("on purpose")).is_err());
        assert!(take(dir.path(), shard));
        assert!(!take(dir.path(), shard), "it counts once");
        drop(mark);
        assert!(std::panic::catch_unwind(|| panic!("on purpose, too late")).is_err());
        assert!(!take(dir.path(), shard));
    }
}
