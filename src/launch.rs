//! `ringmain serve`: master and broker in one process, wired to each other, from the first check to the clean stop.
//!
//! Order of a start: probes (so that they say "starting" while a long recovery runs), master's store and ports, broker
//! (recovers, then listens), master and broker brought in step, ready line. A stop goes the other way round.

use std::io::Write;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use ringmain_core::ids::TopicId;
use ringmain_core::topic::{TopicChange, TopicInfo};
use ringmain_master::probe_http::{ProbeServer, ProbeSources, Report};
use ringmain_master::{Applied, BrokerAddress, BrokerLink, Master, NewStore};
use ringmain_shard::data_dir::{DataDir, Identity};
use ringmain_shard::{AdminService, ArenaChoice, Broker, BrokerConfig, BrokerControl, BrokerProbe};
use serde_json::json;

use crate::budget::default_memory;
use crate::cli::ServeArgs;
use crate::config::{Arena, Config, show_size};
use crate::signals;

/// The one broker of a cluster of one.
const BROKER_ID: u32 = 1;
/// How often the main thread looks whether a shard has died.
const WATCH_EVERY: Duration = Duration::from_millis(500);
/// A flush starts when so much of a shard is dirty: one write of the largest extent.
const FLUSH_BYTES: usize = 4 * 1024 * 1024;
/// A flush starts when the oldest dirty batch is so old: what the loss of the arena may take at level `memory`.
const FLUSH_INTERVAL: Duration = Duration::from_millis(1000);
/// A sync starts when the oldest unsynced extent is so old: what a power cut may take below level `synced`.
const SYNC_INTERVAL: Duration = Duration::from_millis(5000);

/// Runs until it is told to stop.
pub fn serve(args: ServeArgs) -> Result<ExitCode> {
    let config = Config::resolve(args)?;
    start_log(&config.log)?;
    let stop = signals::watch()?;
    let view = Arc::new(OnceLock::new());
    let probes = ProbeServer::start(&config.http.to_string(), probe_sources(&view))?;
    let store = config.data.join("master").join("ringmain.redb");
    let identity = DataDir::peek(&config.data)?;
    let (frames, http) = (config.master_listen.to_string(), config.master_http.to_string());
    let master = Arc::new(Master::start(&store, new_store(identity.as_ref()), &frames, &http)?);
    let shards = config.shards.or(identity.map(|identity| identity.shards()));
    let broker_config = broker_config(&config, shards.unwrap_or_else(cpu_count), master.cluster_id());
    let broker = Broker::start(&broker_config, Arc::new(Admin(Arc::clone(&master))))?;
    let probe = broker.probe();
    let _ = view.set(probe.clone());
    let link = Link {
        control: broker.control(),
        probe: probe.clone(),
        address: address_for_clients(&config, &broker),
        shards: broker.addresses().direct.len(),
    };
    let reconciled = master.attach(Arc::new(link)).context("can't bring the broker in step with the master")?;
    tracing::info!(
        put = reconciled.put,
        deleted = reconciled.deleted,
        adopted = reconciled.adopted,
        failed = reconciled.failed,
        "master and broker are in step"
    );
    say_ready(&broker, &probes, &master)?;
    signals::mark_started();

    let died = wait_for_end(&stop, &broker);
    tracing::info!("stopping: flushing, syncing, writing the clean mark");
    probe.set_stopping();
    master.stop();
    let stopped = broker.stop();
    probes.stop();
    stopped.context("the stop was not clean, the next start recovers as after a kill")?;
    if died {
        bail!("a shard ended by itself; its reason is in the log above");
    }
    tracing::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

/// Waits for a signal; true when a shard has ended without one.
fn wait_for_end(stop: &Receiver<()>, broker: &Broker) -> bool {
    loop {
        match stop.recv_timeout(WATCH_EVERY) {
            Err(RecvTimeoutError::Timeout) if broker.has_died() => {
                tracing::error!("a shard has ended by itself: stopping the others");
                return true;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
}

fn say_ready(broker: &Broker, probes: &ProbeServer, master: &Master) -> Result<()> {
    let addresses = master.addresses();
    let mut out = std::io::stdout().lock();
    let line = format!(
        "ringmain ready broker={} http={} master={} console=http://{}/\n",
        broker.addresses().common,
        probes.address(),
        addresses.frames,
        addresses.http
    );
    // Whoever started us may not listen, which is no reason not to serve.
    match out.write_all(line.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("can't print the ready line")
        }
        _ => Ok(()),
    }
}

fn start_log(filter: &str) -> Result<()> {
    use std::io::IsTerminal;
    let filter = tracing_subscriber::EnvFilter::try_new(filter).context("the log filter is wrong")?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}

/// How a master's store is made that is not there. Beside a broker that has data it was lost: the cluster stays the same,
/// and topic ids, which are never given twice, start at the present second in units of 2^20, far above all before.
fn new_store(identity: Option<&Identity>) -> NewStore {
    match identity {
        None => NewStore { cluster_id: None, first_topic_id: TopicId(1) },
        Some(identity) => {
            let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            NewStore { cluster_id: Some(identity.cluster_id), first_topic_id: TopicId(seconds << 20) }
        }
    }
}

fn broker_config(config: &Config, shards: u16, cluster_id: u64) -> BrokerConfig {
    let memory_bytes = config.memory.unwrap_or_else(|| default_memory(&config.arena, shards));
    tracing::info!(data = %config.data.display(), memory = show_size(memory_bytes), "starting");
    BrokerConfig {
        broker_id: BROKER_ID,
        cluster_id,
        data_dir: config.data.clone(),
        listen: config.listen,
        direct_port_base: config.direct_port_base,
        advertised_host: Some(config.advertise_host.clone()),
        advertised_port: config.advertise_port,
        advertised_direct_base: config.advertise_direct_base,
        shards: config.shards,
        memory_bytes,
        arena: match &config.arena {
            Arena::Shared(directory) => ArenaChoice::Dir(directory.clone()),
            Arena::Anonymous => ArenaChoice::Anonymous,
        },
        segment_bytes: config.segment_bytes,
        catch_up_share_percent: u32::from(config.catch_up_share_percent),
        flush_bytes: FLUSH_BYTES,
        flush_interval: FLUSH_INTERVAL,
        sync_interval: SYNC_INTERVAL,
    }
}

/// Shards of a new data directory, when nobody says: for reckoning the memory they need at least.
fn cpu_count() -> u16 {
    std::thread::available_parallelism().map_or(1, |cpus| u16::try_from(cpus.get()).unwrap_or(u16::MAX))
}

fn address_for_clients(config: &Config, broker: &Broker) -> BrokerAddress {
    let port = config.advertise_port.unwrap_or_else(|| broker.addresses().common.port());
    BrokerAddress { broker_id: BROKER_ID, host: config.advertise_host.clone(), port }
}

/// Requests about topics that arrive at the broker, on their way to the master.
struct Admin(Arc<Master>);

impl AdminService for Admin {
    fn submit(&self, frame: Vec<u8>, reply: Box<dyn FnOnce(Vec<u8>) + Send>) {
        self.0.submit(frame, reply);
    }
}

/// The master's way to the broker.
struct Link {
    control: BrokerControl,
    probe: BrokerProbe,
    address: BrokerAddress,
    shards: usize,
}

impl BrokerLink for Link {
    fn apply(&self, change: TopicChange, done: Applied) {
        self.control.apply(change, Box::new(move |result| done(result.map_err(|error| error.to_string()))));
    }

    fn shard_count(&self) -> u16 {
        u16::try_from(self.shards).unwrap_or(u16::MAX)
    }

    fn topics(&self) -> Vec<TopicInfo> {
        self.control.topics()
    }

    fn address(&self) -> BrokerAddress {
        self.address.clone()
    }

    fn survives_process_kill(&self) -> bool {
        self.probe.health().survives_process_kill
    }
}

/// Answers of the probe port; before the broker has recovered they say so.
fn probe_sources(view: &Arc<OnceLock<BrokerProbe>>) -> ProbeSources {
    let (metrics, health, ready) = (Arc::clone(view), Arc::clone(view), Arc::clone(view));
    ProbeSources {
        metrics: Box::new(move || metrics.get().map_or_else(String::new, BrokerProbe::metrics)),
        health: Box::new(move || report(health.get(), false)),
        ready: Box::new(move || report(ready.get(), true)),
    }
}

fn report(probe: Option<&BrokerProbe>, for_clients: bool) -> Report {
    let Some(probe) = probe else {
        return (!for_clients, json!({ "ready": false, "state": "starting" }));
    };
    let health = probe.health();
    // A process whose shards do not tick is beyond help; one whose logs have failed still serves fetches.
    let good = if for_clients { health.ready } else { health.stalled_shards.is_empty() };
    let state = if health.ready { "ready" } else { "not ready" };
    let body = json!({
        "ready": health.ready,
        "state": state,
        "survives_process_kill": health.survives_process_kill,
        "failed_shards": health.failed_shards,
        "stalled_shards": health.stalled_shards,
    });
    (good, body)
}
