//! Lives of a broker on one data directory: killed under load, started again, and compared with the ledger.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::broker::{Broker, Dying, Home, Launched};
use super::ledger::{Ledger, Partition};
use super::load::{Plan, create_topics, produce};
use super::random::Random;
use super::readback::{MayMiss, Read, check};
use super::{LIMIT, run};

/// A data directory with its ledger, over several lives of the broker.
pub struct Trial {
    /// The broker that was killed last, when nobody has waited for its end. Before the home, which it has its log in.
    dying: Option<Dying>,
    /// The broker that was started beside it already.
    starting: Option<Launched>,
    pub home: Home,
    pub ledger: Arc<Ledger>,
    pub topics: Vec<(String, u32)>,
    pub random: Random,
    /// Epochs that were seen last.
    pub epochs: HashMap<Partition, u32>,
    pub seen: Seen,
}

/// How a broker is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kill {
    /// And waited for.
    Waited,
    /// The next one starts when its producers have seen it go.
    Struck,
    /// The next one starts in the same moment.
    Replaced,
}

/// What the starts after the kills have met: it tells whether the rounds were worth their time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Batches that only the arena had.
    pub adopted_batches: u64,
    /// Starts while the killed process was perhaps not gone yet.
    pub at_once: u64,
    /// Starts that had to wait for writes of the dead process.
    pub waited: u64,
    /// Starts that had to wait for the end of the process itself, which writes under way may hold up.
    pub waited_for_exit: u64,
    /// Starts that found a torn end of the log.
    pub torn: u64,
}

impl Seen {
    /// Adds what another home has seen.
    pub fn add(&mut self, other: Self) {
        self.adopted_batches += other.adopted_batches;
        self.at_once += other.at_once;
        self.waited += other.waited;
        self.waited_for_exit += other.waited_for_exit;
        self.torn += other.torn;
    }
}

impl Trial {
    /// The first life on `home`, with three topics.
    pub fn new(home: Home, random: &mut Random) -> (Self, Broker) {
        let topics = vec![("wide".to_owned(), 4), ("two".to_owned(), 2), ("one".to_owned(), 1)];
        let trial = Self {
            dying: None,
            starting: None,
            home,
            ledger: Arc::default(),
            topics,
            random: Random(random.next()),
            epochs: HashMap::new(),
            seen: Seen::default(),
        };
        let broker = trial.home.start();
        run(create_topics(&broker.broker, &trial.topics));
        (trial, broker)
    }

    /// Kills the broker at a random moment under load.
    pub fn kill_under_load(&mut self, broker: Broker) {
        let kill = if self.random.one_in(2) { Kill::Struck } else { Kill::Waited };
        let (plans, acks) = match self.random.one_in(3) {
            true => (Plan::large(&self.topics, &mut self.random), self.random.within(1..150)),
            false => (Plan::all(&self.topics, &mut self.random), self.random.within(1..3000)),
        };
        self.kill_amid(broker, plans, acks, kill);
    }

    /// Kills the broker at a random moment after so many acks of these producers, or once they have ended.
    pub fn kill_amid(&mut self, broker: Broker, plans: Vec<Plan>, acks: u64, kill: Kill) {
        let address = broker.broker.clone();
        let acks_wanted = self.ledger.acks() + acks;
        let moment = Duration::from_micros(self.random.within(0..20_000));
        let stop = Arc::new(AtomicBool::new(false));
        let ledger = Arc::clone(&self.ledger);
        run(async {
            let mut tasks = tokio::task::JoinSet::new();
            for plan in plans {
                tasks.spawn(produce(address.clone(), plan, Arc::clone(&ledger), Arc::clone(&stop)));
            }
            let began = Instant::now();
            while ledger.acks() < acks_wanted && !tasks.is_empty() {
                assert!(began.elapsed() < LIMIT, "no acks");
                tokio::select! {
                    Some(done) = tasks.join_next() => done.unwrap(),
                    () = tokio::time::sleep(Duration::from_micros(200)) => {}
                }
            }
            tokio::time::sleep(moment).await;
            match kill {
                Kill::Waited => broker.kill(),
                Kill::Struck => self.dying = Some(broker.strike()),
                Kill::Replaced => {
                    self.dying = Some(broker.strike());
                    self.starting = Some(self.home.launch(&[]));
                }
            }
            stop.store(true, Ordering::Relaxed);
            while let Some(done) = tasks.join_next().await {
                done.unwrap();
            }
        });
    }

    /// Starts a broker on what the last one left.
    pub fn start(&mut self) -> Broker {
        let dying = self.dying.take();
        self.seen.at_once += u64::from(dying.is_some());
        let broker = match self.starting.take() {
            Some(starting) => starting.ready().unwrap_or_else(|refused| panic!("it did not start: {refused:?}")),
            None => self.home.start(),
        };
        if let Some(dying) = dying {
            dying.end();
        }
        let log = broker.log();
        self.seen.adopted_batches += broker.metric("ringmain_adopted_batches");
        self.seen.waited += u64::from(log.contains("waits for the writes"));
        self.seen.waited_for_exit += u64::from(log.contains("waits for a process that is dying"));
        self.seen.torn += u64::from(log.contains("Torn"));
        broker
    }

    /// Reads everything back and holds it against the ledger.
    pub fn check(&self, broker: &Broker, may_miss: MayMiss) -> HashMap<Partition, Read> {
        run(check(&broker.broker, &self.ledger, may_miss))
    }
}
