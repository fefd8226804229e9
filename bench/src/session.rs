//! What a run of load against a broker needs around it: a control runtime, an end that signals can bring forward, topics
//! that are removed again, and the checks of what was acked.

use std::collections::hash_map::RandomState;
use std::future::Future;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::signal::unix::{SignalKind, signal};

use crate::cluster::{Cluster, RunTopics, Target};
use crate::load::{ClientLedger, LoadPlan, Shape};
use crate::payload::{Compressibility, Payload};
use crate::reader::{ReadPlan, ReadResult, Reading, Timed};
use crate::scrape::Broker;
use crate::verify::{Findings, PartitionLedger, check_acks};

/// Longest wait for the broker to write what it has acked.
const DRAIN_LIMIT: Duration = Duration::from_secs(120);
/// Exit code after a second signal: 128 + SIGINT, as shells say it.
const EXIT_INTERRUPTED: i32 = 130;

/// A broker with this run's own topics.
pub(crate) struct Session {
    /// The broker.
    pub cluster: Cluster,
    /// The topics; must be removed.
    pub topics: RunTopics,
    /// Where the broker's own figures come from.
    pub broker: Broker,
    /// Number of this run: in topic names, and in every record.
    pub run: u32,
    /// Set by the first SIGINT or SIGTERM: the load ends early.
    pub stop: Arc<AtomicBool>,
}

/// Runs `job` on a runtime of this thread. The first SIGINT or SIGTERM sets the flag that it is given, so that it can end
/// early and clean up; the second ends the process.
pub(crate) fn block_on<T, F: Future<Output = Result<T>>>(job: impl FnOnce(Arc<AtomicBool>) -> F) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stop = Arc::new(AtomicBool::new(false));
        let mut interrupts = signal(SignalKind::interrupt())?;
        let mut terminations = signal(SignalKind::terminate())?;
        let stopping = Arc::clone(&stop);
        let watching = tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupts.recv() => {}
                    _ = terminations.recv() => {}
                }
                if stopping.swap(true, Ordering::Relaxed) {
                    std::process::exit(EXIT_INTERRUPTED);
                }
                eprintln!("stopping: removing the topics of this run; once more to leave them");
            }
        });
        let done = job(stop).await;
        watching.abort();
        done
    })
}

/// A number that no other run has.
pub(crate) fn run_number() -> u32 {
    // The standard library seeds these from the system's randomness.
    RandomState::new().build_hasher().finish() as u32
}

impl Session {
    /// The plan of a load on this run's topics.
    pub(crate) fn load_plan(&self, shape: Shape, compressibility: Compressibility) -> Arc<LoadPlan> {
        Arc::new(LoadPlan {
            payload: Payload::new(self.run, compressibility),
            targets: self.topics.targets.clone(),
            addresses: self.cluster.addresses.clone(),
            shape,
            stop: Arc::clone(&self.stop),
        })
    }

    /// Waits until the broker has written what it has acked: for how many seconds, if it did in time. A broker that does
    /// not say its ends is no reason to lose the other figures.
    pub(crate) async fn drain(&self) -> Option<f64> {
        let started = Instant::now();
        match self.cluster.drained(&self.topics.targets, DRAIN_LIMIT).await {
            Ok(true) => Some(started.elapsed().as_secs_f64()),
            Ok(false) => {
                eprintln!("the broker has not written all that it acked within {DRAIN_LIMIT:?}");
                None
            }
            Err(error) => {
                eprintln!("whether the broker has written all that it acked is not known: {error:#}");
                None
            }
        }
    }

    /// Reads everything back and compares it, byte for byte, with what was sent.
    pub(crate) async fn read_back(
        &self,
        ledgers: &[ClientLedger],
        compressibility: Compressibility,
        threads: usize,
    ) -> Result<Findings> {
        let ends = ends_of(self.topics.targets.len(), ledgers);
        let plan = ReadPlan {
            targets: self.topics.targets.clone(),
            starts: vec![0; ends.len()],
            ends: OnceLock::from(ends),
            addresses: self.cluster.addresses.clone(),
            consumers: 1,
            threads,
            timed: Timed::Fetch,
            payload: Some(Payload::new(self.run, compressibility)),
            compare: true,
            count_from_ns: AtomicU64::new(0),
            stop: Arc::new(AtomicBool::new(false)),
        };
        let read = Reading::start(&Arc::new(plan))?.join().await?;
        Ok(findings_of(read, ledgers))
    }
}

/// One past the last offset acked, by target.
pub(crate) fn ends_of(targets: usize, ledgers: &[ClientLedger]) -> Vec<u64> {
    let mut ends = vec![0; targets];
    for known in ledgers {
        ends[known.target] = known.ledger.next_offset().max(ends[known.target]);
    }
    ends
}

/// What the acks alone say.
pub(crate) fn ack_findings(targets: &[Target], ledgers: &[ClientLedger]) -> Findings {
    let mut findings = Findings::default();
    for of_target in by_target(targets.len(), ledgers) {
        findings += check_acks(of_target.iter().map(|(_, ledger)| *ledger), 0);
    }
    findings
}

/// What reading it back says.
pub(crate) fn findings_of(read: ReadResult, ledgers: &[ClientLedger]) -> Findings {
    let targets = read.read.iter().map(|(target, _)| target + 1).max().unwrap_or(0);
    let known = by_target(targets, ledgers);
    let mut findings = Findings { corrupt: read.damaged, ..Findings::default() };
    for (target, read) in read.read {
        findings += read.finish(known[target].iter().copied());
    }
    findings
}

fn by_target(targets: usize, ledgers: &[ClientLedger]) -> Vec<Vec<(u32, &PartitionLedger)>> {
    let mut by_target = vec![Vec::new(); targets];
    for known in ledgers.iter().filter(|known| known.target < targets) {
        by_target[known.target].push((known.producer, &known.ledger));
    }
    by_target
}
