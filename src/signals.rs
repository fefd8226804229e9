//! SIGTERM and SIGINT. The first asks for an orderly stop, the second ends the process at once: nothing that was acked is
//! lost by that, but the next start has to recover.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Set once there is something to stop in order.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Both signals.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Takes the signals over from the default of dying; needs a runtime.
    pub fn new() -> Result<Self> {
        let failed = "can't take over SIGTERM and SIGINT";
        Ok(Self {
            terminate: signal(SignalKind::terminate()).context(failed)?,
            interrupt: signal(SignalKind::interrupt()).context(failed)?,
        })
    }

    /// Waits for the next one; gives its number.
    pub async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.terminate.recv() => 15,
            _ = self.interrupt.recv() => 2,
        }
    }
}

/// Watches for signals on a thread of its own; the receiver gets the first.
pub fn watch() -> Result<Receiver<()>> {
    let (sender, receiver) = sync_channel(1);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().build().context("can't watch for signals")?;
    let mut signals = {
        let _inside = runtime.enter();
        Signals::new()?
    };
    let watching = move || {
        runtime.block_on(async move {
            let number = signals.next().await;
            if !STARTED.load(Ordering::SeqCst) {
                // Recovery may be cut off anywhere: the next one starts over.
                tracing::info!(signal = number, "stopped while starting");
                std::process::exit(0);
            }
            tracing::info!(signal = number, "asked to stop; a second signal ends the process at once");
            let _ = sender.send(());
            signals.next().await;
            tracing::warn!("ended at once by a second signal: the next start recovers as after a kill");
            std::process::exit(1);
        });
    };
    std::thread::Builder::new()
        .name("ringmain-signal".to_owned())
        .spawn(watching)
        .context("can't watch for signals")?;
    Ok(receiver)
}

/// From now on a signal is an orderly stop.
pub fn mark_started() {
    STARTED.store(true, Ordering::SeqCst);
}
