//! A fixed piece of work with a crash or an error at each of its points in turn.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::disk::{Crash, Fuse, Halt};
use crate::rng::Rng;
use crate::run;
use crate::world::World;

/// Each kind of crash, and the moods of the disk that matter for it.
const CRASHES: [(Crash, u64); 3] = [(Crash::Kill, 1), (Crash::ArenaLost, 1), (Crash::Power, 4)];

/// Runs the fixed work with what `fuse` says, then a crash of each kind, then checks what a start finds.
fn crash_each_way(rounds: u32, what: &str, fuse: Fuse, halt: Halt) {
    for (crash, moods) in CRASHES {
        for mood in 0..moods {
            let result = catch_unwind(AssertUnwindSafe(|| {
                let mut world = World::new(0);
                assert_eq!(run::fixed(&mut world, rounds, fuse), Err(halt), "the fuse does not go off");
                world.rng = Rng::new(mood);
                world.crash(crash);
                run::finish(&mut world);
            }));
            if let Err(panic) = result {
                eprintln!("{what}, {crash:?} with seed {mood}");
                resume_unwind(panic);
            }
        }
    }
}

/// The fixed work without a fuse.
fn whole(rounds: u32) -> World {
    let mut world = World::new(0);
    assert_eq!(run::fixed(&mut world, rounds, Fuse::default()), Ok(()));
    assert!(run::ends(&world).iter().any(|(_, end)| end.0 > 0));
    world
}

#[test]
fn a_crash_at_each_sync_point_keeps_every_promise() {
    const ROUNDS: u32 = 30;
    let syncs = whole(ROUNDS).disk.syncs;
    assert!(syncs > 40, "only {syncs} syncs");
    for sync in 0..syncs {
        for after in [false, true] {
            let fuse = Fuse { sync: Some((sync, after)), ..Fuse::default() };
            let side = if after { "after" } else { "before" };
            crash_each_way(ROUNDS, &format!("crash {side} sync {sync}"), fuse, Halt::Crashed);
        }
    }
}

#[test]
fn a_crash_at_each_operation_keeps_every_promise() {
    const ROUNDS: u32 = 14;
    for operation in 0..whole(ROUNDS).disk.operations {
        let fuse = Fuse { operations: Some(operation), ..Fuse::default() };
        crash_each_way(ROUNDS, &format!("crash at operation {operation}"), fuse, Halt::Crashed);
    }
}

#[test]
fn an_error_of_each_write_ends_the_log_and_loses_nothing_that_was_acked() {
    const ROUNDS: u32 = 30;
    let writes = whole(ROUNDS).disk.writes;
    assert!(writes > 100, "only {writes} writes");
    for write in 0..writes {
        let fuse = Fuse { write_error: Some(write), ..Fuse::default() };
        crash_each_way(ROUNDS, &format!("error of write {write}"), fuse, Halt::Failed);
    }
}

#[test]
fn an_error_of_each_sync_ends_the_log_and_loses_nothing_that_was_acked() {
    const ROUNDS: u32 = 30;
    for sync in 0..whole(ROUNDS).disk.syncs {
        let fuse = Fuse { sync_error: Some(sync), ..Fuse::default() };
        crash_each_way(ROUNDS, &format!("error of sync {sync}"), fuse, Halt::Failed);
    }
}
