use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::*;
use crate::clock::sleep;
use crate::test_support::{on_shard, shard, with_watchdog};

#[test]
fn a_shard_runs_a_future_and_gives_its_output() {
    assert_eq!(on_shard(|_| async { 6 * 7 }), 42);
}

#[test]
fn the_prime_file_is_gone_afterwards() {
    let left = on_shard(|dir| async move { fs::read_dir(dir).unwrap().count() });
    assert_eq!(left, 0);
}

#[test]
fn spawned_tasks_run_beside_the_first_one() {
    let sum = on_shard(|_| async {
        let tasks: Vec<_> = (0..100u64).map(|n| spawn_joined(async move { n })).collect();
        let mut sum = 0;
        for task in tasks {
            sum += task.await;
        }
        sum
    });
    assert_eq!(sum, 4950);
}

#[test]
fn a_task_that_never_waits_does_not_keep_timers_from_firing() {
    let spins = on_shard(|_| async {
        let done = std::rc::Rc::new(std::cell::Cell::new(false));
        let seen = std::rc::Rc::clone(&done);
        let spinner = spawn_joined(async move {
            let mut spins = 0u64;
            while !seen.get() {
                spins += 1;
                yield_if_needed().await;
            }
            spins
        });
        let begun = Instant::now();
        sleep(Duration::from_millis(30)).await;
        assert!(begun.elapsed() >= Duration::from_millis(30));
        done.set(true);
        spinner.await
    });
    assert!(spins > 0);
}

#[test]
fn io_workers_of_a_pinned_shard_run_on_the_other_cpus() {
    with_watchdog(60, || {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let ticker = Ticker::start().unwrap();
        let cpus = usable_cpus().unwrap();
        let own = cpus[0].to_string();
        let config = ShardThreadConfig {
            index: 0,
            cpu: Some(cpus[0]),
            io_memory_bytes: 1 << 20,
            data_dir: dir.path().to_owned(),
        };
        let thread = spawn_shard(config, &ticker, move || async move {
            let file = crate::files::LogFile::create(&path, 1 << 20).await.unwrap();
            // Makes the workers.
            file.fdatasync().await.unwrap();
            let me = status_of("thread-self", "Cpus_allowed_list");
            let pid = status_of("thread-self", "Pid");
            let workers: Vec<(String, String)> = fs::read_dir("/proc/self/task")
                .unwrap()
                .map(|task| task.unwrap().file_name().into_string().unwrap())
                .filter_map(|tid| {
                    let name = fs::read_to_string(format!("/proc/self/task/{tid}/comm")).ok()?;
                    let mine = name.trim() == format!("iou-wrk-{pid}");
                    mine.then(|| (name, status_of(&format!("self/task/{tid}"), "Cpus_allowed_list")))
                })
                .collect();
            file.close().await.unwrap();
            (me, workers)
        });
        let (me, workers) = thread.unwrap().join().unwrap();
        assert_eq!(me, own);
        assert!(!workers.is_empty());
        for (name, on) in workers {
            // With one CPU there is nowhere else to go.
            assert_eq!(on == own, cpus.len() == 1, "{name}: {on}");
        }
    });
}

fn status_of(task: &str, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{task}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(&format!("{field}:"))).unwrap();
    line.split_once(':').unwrap().1.trim().to_owned()
}

#[test]
fn a_data_directory_that_is_not_there_is_a_typed_error() {
    with_watchdog(60, || {
        let ticker = Ticker::start().unwrap();
        let data_dir = PathBuf::from("/nowhere/at/all");
        let config = ShardThreadConfig { index: 3, cpu: None, io_memory_bytes: 1 << 20, data_dir };
        let error = spawn_shard(config, &ticker, || async {}).err().unwrap();
        assert!(matches!(error, RuntimeError::Prime { shard: 3, .. }), "{error}");
    });
}

#[test]
fn a_cpu_that_is_not_there_is_a_typed_error() {
    with_watchdog(60, || {
        let ticker = Ticker::start().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let data_dir = dir.path().to_owned();
        let config = ShardThreadConfig { index: 0, cpu: Some(4000), io_memory_bytes: 1 << 20, data_dir };
        let error = spawn_shard(config, &ticker, || async {}).err().unwrap();
        assert!(matches!(error, RuntimeError::Executor { .. }), "{error}");
    });
}

#[test]
fn a_panic_in_the_first_task_is_reported_by_join() {
    with_watchdog(60, || {
        let ticker = Ticker::start().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let thread = shard(5, dir.path(), &ticker, || async { panic!("on purpose") });
        let result: Result<(), _> = thread.join();
        assert!(matches!(result, Err(RuntimeError::Panicked { shard: 5 })));
        // The ticker goes on with the others.
        assert_eq!(shard(6, dir.path(), &ticker, || async { 1 }).join().unwrap(), 1);
    });
}

#[test]
fn four_shards_on_few_cpus_all_get_their_ticks() {
    with_watchdog(60, || {
        let ticker = Ticker::start().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let up = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..4)
            .map(|index| {
                let up = Arc::clone(&up);
                shard(index, dir.path(), &ticker, move || async move {
                    up.fetch_add(1, Ordering::Relaxed);
                    let pulse = Clock::current().pulse();
                    while up.load(Ordering::Relaxed) < 4 || pulse.ticks() < 10 {
                        sleep(Duration::from_millis(1)).await;
                    }
                    pulse.ticks()
                })
            })
            .collect();
        for thread in threads {
            assert!(thread.join().unwrap() >= 10);
        }
    });
}
