use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::clock::sleep;
use crate::mailbox::{SendError, mailbox};
use crate::runtime::{spawn_joined, spawn_local, yield_if_needed, yield_now};
use crate::test_support::{on_shard, shard, with_watchdog};
use crate::ticker::Ticker;

/// Runs `f` on each of `shards` executors at once, each with its end of one mesh.
fn on_mesh<Q, R, F, Fut, T>(shards: u16, limits: MeshLimits, f: F) -> Vec<T>
where
    Q: Send + 'static,
    R: Send + 'static,
    F: Fn(ShardId, MeshPort<Q, R>) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = T> + 'static,
    T: Send + 'static,
{
    with_watchdog(120, || {
        let ticker = Ticker::start().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let threads: Vec<_> = mesh(shards, limits)
            .into_iter()
            .enumerate()
            .map(|(index, end)| {
                let f = f.clone();
                shard(index as u16, dir.path(), &ticker, move || f(ShardId(index as u16), end.start()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Serves `port` by `f` from now on.
fn serve<Q: 'static, R: 'static>(port: &MeshPort<Q, R>, mut f: impl FnMut(ShardId, Q) -> R + 'static) {
    let port = port.clone();
    spawn_local(async move {
        loop {
            let (ticket, request) = port.next_request().await;
            let reply = f(ticket.from(), request);
            ticket.reply(reply);
            yield_if_needed().await;
        }
    });
}

/// Shards must not leave while others still want their replies.
struct Leave {
    done: AtomicUsize,
    of: usize,
}

impl Leave {
    fn new(of: u16) -> Arc<Self> {
        Arc::new(Self { done: AtomicUsize::new(0), of: of.into() })
    }

    async fn together(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
        while self.done.load(Ordering::Relaxed) < self.of {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Each shard calls all others, `tasks` at a time, and checks each reply.
fn all_to_all(shards: u16, limits: MeshLimits, tasks: u64, calls: u64) {
    let leave = Leave::new(shards);
    on_mesh(shards, limits, move |me, port: MeshPort<(u16, u64), (u16, u64)>| {
        let leave = Arc::clone(&leave);
        async move {
            serve(&port, move |from, (to, number)| {
                assert_eq!(to, me.0);
                (from.0, number * 3 + u64::from(me.0))
            });
            let workers: Vec<_> = (0..tasks)
                .map(|task| {
                    let port = port.clone();
                    spawn_joined(async move {
                        for n in 0..calls {
                            let to =
                                ShardId(((u64::from(me.0) + 1 + n % u64::from(shards - 1)) % u64::from(shards)) as u16);
                            let number = task * calls + n;
                            let call = loop {
                                match port.call(to, (to.0, number), 100) {
                                    Ok(call) => break call,
                                    Err(NoCredit(_)) => port.wait_for_credit(to, 100).await,
                                }
                            };
                            assert_eq!(call.await, Ok((me.0, number * 3 + u64::from(to.0))));
                        }
                    })
                })
                .collect();
            for worker in workers {
                worker.await;
            }
            for other in (0..shards).filter(|&other| other != me.0) {
                assert_eq!(port.in_flight(ShardId(other)), (0, 0));
            }
            leave.together().await;
        }
    });
}

#[test]
fn two_shards_answer_each_other() {
    all_to_all(2, MeshLimits::default(), 16, 2_000);
}

#[test]
fn four_shards_on_fewer_cpus_answer_each_other() {
    all_to_all(4, MeshLimits::default(), 16, 1_000);
}

#[test]
fn nobody_waits_for_ever_when_credits_are_few() {
    all_to_all(4, MeshLimits { credits: 1, bytes: 1 << 20 }, 20, 100);
    all_to_all(3, MeshLimits { credits: 100, bytes: 150 }, 20, 100);
}

#[test]
fn one_call_at_a_time_is_woken_at_both_ends() {
    all_to_all(2, MeshLimits::default(), 1, 3_000);
}

#[test]
fn requests_of_one_task_arrive_in_order() {
    let leave = Leave::new(2);
    on_mesh(2, MeshLimits { credits: 8, bytes: 1 << 20 }, move |me, port: MeshPort<u64, u64>| {
        let leave = Arc::clone(&leave);
        async move {
            let expected = Cell::new(0);
            serve(&port, move |_, number| {
                assert_eq!(number, expected.get());
                expected.set(number + 1);
                number
            });
            let other = ShardId(1 - me.0);
            let mut calls = VecDeque::new();
            for number in 0..5_000 {
                while let Err(NoCredit(_)) = port.call(other, number, 1).map(|call| calls.push_back((number, call))) {
                    let (number, call) = calls.pop_front().unwrap();
                    assert_eq!(call.await, Ok(number));
                }
            }
            for (number, call) in calls {
                assert_eq!(call.await, Ok(number));
            }
            leave.together().await;
        }
    });
}

#[test]
fn a_dropped_request_is_reported_and_a_dropped_call_gives_its_credit_back() {
    let leave = Leave::new(2);
    on_mesh(2, MeshLimits { credits: 2, bytes: 1000 }, move |me, port: MeshPort<bool, ()>| {
        let leave = Arc::clone(&leave);
        async move {
            let serving = port.clone();
            spawn_local(async move {
                loop {
                    let (ticket, keep) = serving.next_request().await;
                    if keep {
                        ticket.reply(());
                    }
                }
            });
            if me.0 == 0 {
                let other = ShardId(1);
                assert_eq!(port.call(other, false, 1).unwrap().await, Err(HopLost));
                for _ in 0..100 {
                    port.wait_for_credit(other, 1).await;
                    drop(port.call(other, true, 1).unwrap());
                }
                while port.in_flight(other) != (0, 0) {
                    sleep(Duration::from_millis(1)).await;
                }
            }
            leave.together().await;
        }
    });
}

#[test]
fn bytes_are_bounded_as_well_as_requests() {
    on_mesh(2, MeshLimits { credits: 10, bytes: 100 }, move |me, port: MeshPort<(), ()>| async move {
        if me.0 == 1 {
            return;
        }
        let other = ShardId(1);
        let _first = port.call(other, (), 60).unwrap();
        assert!(port.call(other, (), 60).is_err());
        let _second = port.call(other, (), 40).unwrap();
        assert!(port.call(other, (), 1).is_err());
        assert_eq!(port.in_flight(other), (2, 100));
    });
}

#[test]
fn calls_are_answered_also_by_a_shard_that_never_rests() {
    let leave = Leave::new(2);
    let slowest = on_mesh(2, MeshLimits::default(), move |me, port: MeshPort<(), ()>| {
        let leave = Arc::clone(&leave);
        async move {
            serve(&port, |_, ()| ());
            let mut slowest = Duration::ZERO;
            if me.0 == 1 {
                let busy = spawn_joined({
                    let leave = Arc::clone(&leave);
                    async move {
                        while leave.done.load(Ordering::Relaxed) == 0 {
                            let begun = Instant::now();
                            while begun.elapsed() < Duration::from_micros(50) {
                                std::hint::spin_loop();
                            }
                            yield_if_needed().await;
                        }
                    }
                });
                busy.await;
            } else {
                for _ in 0..200 {
                    let begun = Instant::now();
                    port.call(ShardId(1), (), 1).unwrap().await.unwrap();
                    slowest = slowest.max(begun.elapsed());
                }
            }
            leave.together().await;
            slowest
        }
    });
    // Without the short preempt timer each takes 100 ms.
    assert!(slowest[0] < Duration::from_secs(2), "{slowest:?}");
}

#[test]
fn messages_of_outside_threads_reach_the_shard_in_order_and_bounded() {
    let (sender, mut inbox) = mailbox::<u64>(16);
    let outside = std::thread::spawn({
        let sender = sender.clone();
        move || {
            let mut full = 0;
            for n in 0..20_000 {
                let mut message = n;
                while let Err(error) = sender.try_send(message) {
                    let SendError::Full(back) = error else { panic!("{error}") };
                    message = back;
                    full += 1;
                    std::thread::yield_now();
                }
            }
            full
        }
    });
    on_shard(move |_| async move {
        for n in 0..20_000 {
            assert_eq!(inbox.recv().await, n);
        }
        yield_now().await;
        assert_eq!(inbox.try_recv(), None);
    });
    outside.join().unwrap();
    assert_eq!(sender.try_send(1), Err(SendError::Stopped(1)));
}
