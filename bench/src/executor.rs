//! A bare glommio executor, set up as the broker sets up its own, for the baselines.
//!
//! The rules are those that the broker's runtime follows, since a limit measured under others would not be its limit:
//! preempt timer of 300 us, one CPU, io-wq workers on all CPUs, the IO-poll probe primed by a written file, and a tick
//! from an outside thread each millisecond, because an executor can park with runnable tasks and would then sleep on.

use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use glommio::io::DmaFile;
use glommio::{ExecutorJoinHandle, LocalExecutorBuilder, Placement, PoolPlacement};

/// How often a busy executor looks at its IO.
const PREEMPT_TIMER: Duration = Duration::from_micros(300);
/// How often the outside thread wakes the executor.
const TICK: Duration = Duration::from_millis(1);
/// CPU mask of io_uring_register: one bit for each of 1024 CPUs.
const CPU_MASK_BYTES: usize = 128;
/// `IORING_REGISTER_IOWQ_AFF` of linux/io_uring.h.
const REGISTER_IOWQ_AFF: libc::c_uint = 17;
/// Size of `struct io_uring_params`, of which the probe needs no field.
const RING_PARAMS_BYTES: usize = 120;

/// What an executor needs to know before it starts.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Name of its thread.
    pub name: &'static str,
    /// CPU it is pinned to; none = the first that this process may use.
    pub cpu: Option<usize>,
    /// Registered IO memory.
    pub io_memory_bytes: usize,
    /// Folder in which to prime the IO-poll probe; none when no file will be opened.
    pub prime_in: Option<PathBuf>,
}

/// A started executor and the thread that ticks it.
pub(crate) struct Running<T: Send + 'static> {
    executor: ExecutorJoinHandle<Result<T>>,
    tick: Arc<Tick>,
    ticker: JoinHandle<()>,
}

/// What the outside thread wakes.
#[derive(Default)]
struct Tick {
    waker: Mutex<Option<Waker>>,
    ended: AtomicBool,
}

/// Starts an executor that runs `job` on its own thread.
pub(crate) fn start<T, F>(setup: Setup, job: impl FnOnce() -> F + Send + 'static) -> Result<Running<T>>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + 'static,
{
    probe_io_uring()?;
    let cpus = allowed_cpus()?;
    let cpu = match setup.cpu {
        Some(cpu) if !cpus.contains(&cpu) => bail!("CPU {cpu} is not among those that this process may use: {cpus:?}"),
        Some(cpu) => cpu,
        None => *cpus.first().context("this process may use no CPU")?,
    };
    let tick = Arc::new(Tick::default());
    let ticked = Arc::clone(&tick);
    let executor = LocalExecutorBuilder::new(Placement::Fixed(cpu))
        .name(setup.name)
        .io_memory(setup.io_memory_bytes)
        .preempt_timer(PREEMPT_TIMER)
        .blocking_thread_pool_placement(PoolPlacement::Unbound(1))
        .spawn(move || async move {
            glommio::spawn_local(poll_fn(move |context| {
                let mut waker = ticked.waker.lock().unwrap_or_else(PoisonError::into_inner);
                if !waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                    *waker = Some(context.waker().clone());
                }
                Poll::<()>::Pending
            }))
            .detach();
            spread_io_workers(&cpus)?;
            if let Some(folder) = setup.prime_in {
                prime(&folder).await?;
            }
            job().await
        })
        .map_err(|error| anyhow!("starting a glommio executor on CPU {cpu}: {error}"))?;
    let ticking = Arc::clone(&tick);
    let ticker = std::thread::Builder::new().name(format!("{}-tick", setup.name)).spawn(move || {
        while !ticking.ended.load(Ordering::Relaxed) {
            std::thread::sleep(TICK);
            let waker = ticking.waker.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(waker) = waker {
                waker.wake_by_ref();
            }
        }
    })?;
    Ok(Running { executor, tick, ticker })
}

impl<T: Send + 'static> Running<T> {
    /// Waits for the job's end; blocks.
    pub(crate) fn join(self) -> Result<T> {
        let joined = self.executor.join();
        self.tick.ended.store(true, Ordering::Relaxed);
        // The ticker only sleeps and wakes: it can't have panicked.
        let _ = self.ticker.join();
        joined.map_err(|error| anyhow!("the executor's thread failed: {error}"))?
    }
}

/// CPUs that this process may use, rising.
fn allowed_cpus() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None).context("asking for the CPUs of this process")?;
    Ok((0..CPU_MASK_BYTES * 8).filter(|cpu| *cpu < rustix::thread::CpuSet::MAX_CPU && set.is_set(*cpu)).collect())
}

/// glommio ends the process when it finds no io_uring; so look first and say what to do.
fn probe_io_uring() -> Result<()> {
    let mut params = [0_u8; RING_PARAMS_BYTES];
    // SAFETY: the kernel reads and writes `io_uring_params` within the 120 bytes, which outlive the call.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1_u32, params.as_mut_ptr()) };
    if ring >= 0 {
        // SAFETY: the descriptor was just made here and nobody else knows it.
        unsafe { libc::close(ring as libc::c_int) };
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    let fix = match error.raw_os_error() {
        Some(libc::ENOSYS) => "the kernel has none: Linux 5.8 or newer is needed, or a seccomp profile hides it",
        Some(libc::EPERM) => {
            "it is forbidden here: `sysctl kernel.io_uring_disabled=0`, and in a container a seccomp profile that \
             allows io_uring_setup, io_uring_enter and io_uring_register"
        }
        Some(libc::ENOMEM) => "too little memory may be locked: raise `ulimit -l`",
        _ => "see `man io_uring_setup`",
    };
    bail!("no io_uring: {error}; {fix}")
}

/// Lets the io-wq workers of this thread's rings (fdatasync always runs there) use all CPUs: they would else wait behind
/// the pinned executor. The kernel sets it for the calling thread, through any of the process's rings.
fn spread_io_workers(cpus: &[usize]) -> Result<()> {
    let mut mask = [0_u8; CPU_MASK_BYTES];
    for cpu in cpus {
        mask[cpu / 8] |= 1 << (cpu % 8);
    }
    for entry in std::fs::read_dir("/proc/self/fd")?.flatten() {
        let is_ring = std::fs::read_link(entry.path()).is_ok_and(|link| link.to_string_lossy().contains("io_uring"));
        let Some(ring) = entry.file_name().to_str().and_then(|name| name.parse::<libc::c_int>().ok()) else { continue };
        if !is_ring {
            continue;
        }
        // SAFETY: the kernel reads `mask` within the stated length; a descriptor that is no ring any more is refused.
        let done = unsafe {
            libc::syscall(libc::SYS_io_uring_register, ring, REGISTER_IOWQ_AFF, mask.as_ptr(), CPU_MASK_BYTES)
        };
        if done == 0 {
            return Ok(());
        }
    }
    // Linux before 5.14 can't: the figures are then those that the broker would get there too.
    Ok(())
}

/// glommio tries IO polling on the first file it opens; an empty one misleads it, and later reads fail.
async fn prime(folder: &Path) -> Result<()> {
    let path = folder.join(format!(".ringmain-bench-prime-{}-{}", std::process::id(), glommio::executor().id()));
    let primed = prime_with(&path).await.with_context(|| format!("priming with {}", path.display()));
    let _ = std::fs::remove_file(&path);
    primed
}

async fn prime_with(path: &Path) -> Result<()> {
    let file = std::fs::File::create(path)?;
    std::io::Write::write_all(&mut &file, &[1; 4096])?;
    file.sync_all()?;
    let file = DmaFile::open(path).await.map_err(|error| anyhow!("{error}"))?;
    file.close().await.map_err(|error| anyhow!("{error}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Hangs are how an executor fails: after `seconds` the test process aborts and names the test.
    pub(crate) fn watchdog(what: &'static str, seconds: u64) -> impl Drop {
        struct Watchdog(Option<std::sync::mpsc::Sender<()>>);

        impl Drop for Watchdog {
            fn drop(&mut self) {
                self.0.take();
            }
        }

        let (alive, ended) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            let waited = ended.recv_timeout(Duration::from_secs(seconds));
            if waited == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("{what} did not end in {seconds} s");
                std::process::abort();
            }
        });
        Watchdog(Some(alive))
    }

    fn setup(cpu: Option<usize>) -> Setup {
        Setup { name: "bench-test", cpu, io_memory_bytes: 64 * 1024, prime_in: None }
    }

    #[test]
    fn a_job_runs_pinned_and_gives_its_result() {
        let _watchdog = watchdog("the pinned job", 60);
        let first = allowed_cpus().unwrap()[0];
        let job = || async { allowed_cpus() };
        assert_eq!(start(setup(None), job).unwrap().join().unwrap(), vec![first]);
    }

    #[test]
    fn a_task_that_nobody_else_wakes_is_woken_by_the_tick() {
        let _watchdog = watchdog("the ticked job", 60);
        let woken = start(setup(None), || async {
            let (sender, receiver) = tokio::sync::oneshot::channel();
            std::thread::spawn(move || sender.send(5));
            Ok(receiver.await?)
        });
        assert_eq!(woken.unwrap().join().unwrap(), 5);
    }

    #[test]
    fn a_job_that_fails_and_a_cpu_that_is_not_there_are_errors() {
        let _watchdog = watchdog("the failing job", 60);
        let failed = start(setup(None), || async { Err::<(), _>(anyhow!("on purpose")) }).unwrap().join();
        assert_eq!(failed.unwrap_err().to_string(), "on purpose");
        assert!(start(setup(Some(1023)), || async { Ok(()) }).is_err());
    }
}
