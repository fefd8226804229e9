//! One executor per shard. Here, in `runtime/start`, [`net`](crate::net), [`files`](crate::files) and `raw` glommio is
//! named, and nowhere else.
//!
//! What a shard thread gets before its first task runs, each for a measured reason:
//! - a preempt timer of 300 us: else a busy executor looks at its IO every 100 ms;
//! - io_uring workers that run on the other CPUs, and a blocking thread that runs on all: else fdatasync waits behind
//!   the executor;
//! - polled IO switched off for the data directory's device: glommio's probe for it goes wrong when the first file that
//!   is opened is a new one, and reads then fail with EOPNOTSUPP; and so all devices take the one path that is tested;
//! - a tick from outside and the [`Clock`], from before the first IO to after the last await: on a busy machine 4 of 600
//!   starts hung without. Until the first task has given the ticker its waker, the thread that starts the shard knocks at
//!   the executor's eventfd instead, since the executor may park on top of that very task.

mod start;

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use glommio::{Latency, Shares};

pub use self::start::usable_cpus;
use self::start::{knock, make, prime};
use crate::clock::Clock;
use crate::ticker::{Pulse, Ticker};

/// How often the executor is knocked at until its first task runs.
const KNOCK_EVERY: Duration = Duration::from_millis(20);

/// How a shard's thread is made.
#[derive(Clone, Debug)]
pub struct ShardThreadConfig {
    /// The shard, for names and messages.
    pub index: u16,
    /// The CPU to stay on; `None` when there are more shards than CPUs.
    pub cpu: Option<usize>,
    /// Memory for disk buffers, registered with the kernel, which counts it three times against RLIMIT_MEMLOCK. Buffers
    /// beyond it come from the heap and are a little slower.
    pub io_memory_bytes: usize,
    /// A directory on the device that the shard will write to; a small file is made in it for a moment.
    pub data_dir: PathBuf,
}

/// Why a shard's thread could not be started, or died.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// No thread.
    #[error("shard {shard}: can't make a thread: {source}; raise the limit of tasks (ulimit -u, TasksMax=)")]
    Thread {
        /// Which shard.
        shard: u16,
        /// The system's reason.
        source: io::Error,
    },
    /// No executor.
    #[error("shard {shard}: can't make its io_uring executor: {reason}")]
    Executor {
        /// Which shard.
        shard: u16,
        /// glommio's reason.
        reason: String,
    },
    /// The first direct IO failed.
    #[error("shard {shard}: can't read with O_DIRECT in {}: {source}", dir.display())]
    Prime {
        /// Which shard.
        shard: u16,
        /// Where.
        dir: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The io_uring workers stayed on the executor's CPU.
    #[error("shard {shard}: can't let io_uring workers run on other CPUs: {source}")]
    Affinity {
        /// Which shard.
        shard: u16,
        /// The system's reason.
        source: io::Error,
    },
    /// The thread panicked.
    #[error("shard {shard}: its thread died of a panic")]
    Panicked {
        /// Which shard.
        shard: u16,
    },
}

/// A running shard thread.
pub struct ShardThread<T> {
    shard: u16,
    pulse: Arc<Pulse>,
    handle: thread::JoinHandle<Option<T>>,
}

impl<T> ShardThread<T> {
    /// The shard's heartbeat.
    #[must_use]
    pub fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.pulse)
    }

    /// Whether the thread has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }

    /// Waits for the end of the shard and gives what its future returned.
    ///
    /// # Errors
    /// When the thread panicked.
    pub fn join(self) -> Result<T, RuntimeError> {
        self.handle.join().ok().flatten().ok_or(RuntimeError::Panicked { shard: self.shard })
    }
}

/// Makes a thread with an executor and runs `f`'s future on it; returns when the executor is ready for it. Tasks that
/// still run when the future returns are dropped with all their IO: await what matters.
///
/// # Errors
/// When thread or executor can't be made; each says what to do.
pub fn spawn_shard<F, Fut, T>(config: ShardThreadConfig, ticker: &Ticker, f: F) -> Result<ShardThread<T>, RuntimeError>
where
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
    T: Send + 'static,
{
    let shard = config.index;
    // Of the caller, before the new thread is bound to one CPU.
    let cpus = usable_cpus().map_err(|source| RuntimeError::Affinity { shard, source })?;
    let pulse = ticker.register(shard);
    let registered = Registered { ticker: ticker.clone(), pulse: Arc::clone(&pulse) };
    let (starting, started) = sync_channel(2);
    let handle = thread::Builder::new()
        .name(format!("shard-{shard}"))
        .spawn(move || run(&config, &cpus, registered, &starting, f))
        .map_err(|source| RuntimeError::Thread { shard, source })?;
    let mut knockers = Vec::new();
    loop {
        match started.recv_timeout(KNOCK_EVERY) {
            Ok(Start::Made(eventfds)) => knockers = eventfds,
            Ok(Start::Ready) => return Ok(ShardThread { shard, pulse, handle }),
            Ok(Start::Failed(error)) => return Err(error),
            Err(RecvTimeoutError::Timeout) => knock(&knockers),
            Err(RecvTimeoutError::Disconnected) => return Err(RuntimeError::Panicked { shard }),
        }
    }
}

/// How far a shard's start has come.
enum Start {
    /// The executor is made; it listens to one of these.
    Made(Vec<OwnedFd>),
    /// The shard's own future runs.
    Ready,
    Failed(RuntimeError),
}

/// The shard's place in the ticker's list, for as long as its thread lives.
struct Registered {
    ticker: Ticker,
    pulse: Arc<Pulse>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.pulse.set_waker(None);
        self.ticker.unregister(&self.pulse);
    }
}

fn run<F, Fut, T>(
    config: &ShardThreadConfig,
    cpus: &[usize],
    registered: Registered,
    starting: &SyncSender<Start>,
    f: F,
) -> Option<T>
where
    F: FnOnce() -> Fut,
    Fut: Future<Output = T> + 'static,
    T: 'static,
{
    // The receiver waits in spawn_shard until it is told Ready or Failed.
    let tell = |start| drop(starting.send(start));
    let executor = match make(config, cpus) {
        Ok((executor, eventfds)) => {
            tell(Start::Made(eventfds));
            executor
        }
        Err(error) => {
            tell(Start::Failed(error));
            return None;
        }
    };
    let prime_path = config.data_dir.join(format!(".prime-{}-{}", std::process::id(), config.index));
    executor.run(async {
        let clock = Clock::install(Arc::clone(&registered.pulse));
        spawn_local(clock.ticks());
        let output = match prime(&prime_path).await {
            Ok(()) => {
                tell(Start::Ready);
                Some(f().await)
            }
            Err(source) => {
                let dir = config.data_dir.clone();
                tell(Start::Failed(RuntimeError::Prime { shard: config.index, dir, source }));
                None
            }
        };
        // Nothing is awaited from here on: without ticks the executor might park on top of it for ever.
        clock.uninstall();
        output
    })
}

/// The system's error in an error of glommio, which wraps it with the operation and path.
pub(crate) fn io_error(error: glommio::GlommioError<()>) -> io::Error {
    match error {
        glommio::GlommioError::IoError(source) | glommio::GlommioError::EnhancedIoError { source, .. } => source,
        other => other.into(),
    }
}

/// Runs `future` beside the calling task until it is done.
pub fn spawn_local(future: impl Future<Output = ()> + 'static) {
    glommio::spawn_local(future).detach();
}

/// Like [`spawn_local`]; awaiting the answer gives the future's output.
pub fn spawn_joined<T: 'static>(future: impl Future<Output = T> + 'static) -> Joined<T> {
    Joined(glommio::spawn_local(future).detach())
}

/// Waits for a task of [`spawn_joined`]. Dropping it does not stop the task.
#[derive(Debug)]
#[must_use = "await it, or use spawn_local"]
pub struct Joined<T>(glommio::task::JoinHandle<T>);

impl<T> Future for Joined<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        Pin::new(&mut self.0).poll(cx).map(|output| output.expect("a task ends only by its own return"))
    }
}

/// A task queue of this shard with its own share of the CPU; the default queue has 1000.
#[derive(Clone, Copy, Debug)]
pub struct TaskQueue(glommio::TaskQueueHandle);

impl TaskQueue {
    /// Makes one with `shares` from 1 to 1000.
    ///
    /// # Panics
    /// Outside a shard.
    #[must_use]
    pub fn new(shares: usize, name: &str) -> Self {
        let queue = glommio::executor().create_task_queue(Shares::Static(shares), Latency::NotImportant, name);
        Self(queue)
    }

    /// Runs `future` in this queue until it is done.
    pub fn spawn(self, future: impl Future<Output = ()> + 'static) {
        glommio::spawn_local_into(future, self.0).expect("task queues are never removed").detach();
    }
}

/// Lets other tasks run and IO be looked at if the time slice is over. Call it after each 50 us of CPU work.
pub async fn yield_if_needed() {
    glommio::yield_if_needed().await;
}

/// Lets the other tasks of the queue run, whatever time is left.
pub async fn yield_now() {
    futures_lite::future::yield_now().await;
}

#[cfg(test)]
mod tests;
