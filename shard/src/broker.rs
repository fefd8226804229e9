//! The broker: opens the data directory, starts one executor per shard, and is the face of all that to the binary.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringmain_core::ids::{Epoch, ShardId};
use ringmain_core::limits::{ARENA_BYTES_MIN, EXTENT_BYTES_MAX, SHARDS_MAX, SLAB_BYTES};
use ringmain_core::topic::TopicInfo;

use crate::admin::AdminService;
use crate::arena::{ArenaError, ArenaIdentity, arena_path, check_room, missing_bytes};
use crate::catalog::{Catalog, CatalogError};
use crate::command::{COMMANDS_MAX, ShardCommand};
use crate::control::{BrokerControl, Placements};
use crate::data_dir::{DataDir, DataDirOptions};
use crate::life::{self, Life};
use crate::mailbox::{MailboxSender, mailbox};
use crate::mesh::{MeshLimits, mesh};
use crate::metrics::{self, ShardMetrics};
use crate::net::{BindError, BoundListener};
use crate::preflight::{self, PreflightConfig, PreflightError};
use crate::routing::PlacedTopic;
use crate::runtime::{ShardThread, ShardThreadConfig, spawn_shard};
use crate::shard::ShardConfig;
use crate::ticker::Ticker;

/// Registered memory of each executor for disk buffers: what may be in flight at once, twice.
pub(crate) const IO_MEMORY_BYTES: usize = 16 * 1024 * 1024;

/// Connections that the limit of open files must allow at least.
pub(crate) const CONNECTIONS_MIN: u64 = 128;

/// Where the blocks of the shards lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArenaChoice {
    /// Files in this directory, which must be on a memory filesystem: what was acked survives the death of the process.
    Dir(PathBuf),
    /// Plain memory: what is not flushed dies with the process.
    Anonymous,
}

/// How a broker is started.
#[derive(Clone, Debug)]
pub struct BrokerConfig {
    /// Number of this broker in its cluster.
    pub broker_id: u32,
    /// The cluster it belongs to; a data directory of another one is refused.
    pub cluster_id: u64,
    /// Where segments, catalog and identity live.
    pub data_dir: PathBuf,
    /// The common port; port 0 takes any.
    pub listen: SocketAddr,
    /// Port of shard 0's own listener, the next shards follow; 0 takes any.
    pub direct_port_base: u16,
    /// Host that clients are told; `None` = the one of `listen`, or 127.0.0.1 when that is a wildcard.
    pub advertised_host: Option<String>,
    /// Common port that clients are told; `None` = the one listened on.
    pub advertised_port: Option<u16>,
    /// First direct port that clients are told; `None` = the ones listened on.
    pub advertised_direct_base: Option<u16>,
    /// Number of shards; `None` = what the data directory has, or one per CPU for a new one.
    pub shards: Option<u16>,
    /// Memory for blocks, of all shards together.
    pub memory_bytes: u64,
    /// Where that memory lies.
    pub arena: ArenaChoice,
    /// Segment size of a new data directory.
    pub segment_bytes: u64,
    /// Share of the disk's time that reads for consumers behind memory may take while a shard writes, 1 to 100 %.
    pub catch_up_share_percent: u32,
    /// Dirty bytes of a shard that start a flush.
    pub flush_bytes: usize,
    /// Age of a dirty batch that starts a flush.
    pub flush_interval: Duration,
    /// Age of an unsynced extent that starts a sync.
    pub sync_interval: Duration,
}

/// Why a broker did not start. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The host lacks something.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Preflight(Vec<PreflightError>),
    /// The data directory can't be used.
    #[error(transparent)]
    DataDir(#[from] crate::data_dir::DataDirError),
    /// The catalog of topics can't be read.
    #[error(transparent)]
    Catalog(#[from] crate::catalog::CatalogError),
    /// A port is taken.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// A thread or executor could not be made.
    #[error(transparent)]
    Runtime(#[from] crate::runtime::RuntimeError),
    /// The outside tick could not be started.
    #[error("can't start the tick thread: {0}")]
    Ticker(std::io::Error),
    /// Too little memory for the blocks of all shards.
    #[error("memory of {has} bytes is too little: {shards} shards need {needs} at least (--memory)")]
    Memory {
        /// What was given.
        has: u64,
        /// Number of shards.
        shards: u16,
        /// What they need.
        needs: u64,
    },
    /// The memory filesystem has too little room.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// Memory of the process before lies elsewhere.
    #[error("the process before had its memory in {dir}, and records that were acked from it are still there: start once with --arena-dir {dir} and stop, or remove ringmain-*.arena there to give them up", dir = .0.display())]
    ArenaElsewhere(PathBuf),
    /// The host can't be told from others.
    #[error("can't tell which boot and data directory this is: {0}")]
    Identity(std::io::Error),
    /// A shard could not recover.
    #[error("shard {shard}: {reason}")]
    Shard {
        /// Which shard.
        shard: u16,
        /// Why, and what to do.
        reason: String,
    },
}

/// A stop that did not end clean.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StopError(String);

/// Where a broker listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerAddresses {
    /// The common port.
    pub common: SocketAddr,
    /// Each shard's own port.
    pub direct: Vec<SocketAddr>,
}

/// How a broker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Serves clients.
    pub ready: bool,
    /// Memory acks survive the death of the process.
    pub survives_process_kill: bool,
    /// Shards whose log has failed: they serve fetches only.
    pub failed_shards: Vec<u16>,
    /// Shards whose executor has not answered the tick for a second or more.
    pub stalled_shards: Vec<u16>,
}

/// A running broker.
pub struct Broker {
    addresses: BrokerAddresses,
    threads: Vec<ShardThread<Result<(), String>>>,
    mailboxes: Vec<MailboxSender<ShardCommand>>,
    metrics: Vec<Arc<ShardMetrics>>,
    control: BrokerControl,
    survives_process_kill: bool,
    _data_dir: DataDir,
    _ticker: Ticker,
}

impl Broker {
    /// Starts all shards and returns when they have recovered and serve clients.
    ///
    /// # Errors
    /// When host, data directory, ports or memory do not allow it; each error says what to do.
    pub fn start(config: &BrokerConfig, admin: Arc<dyn AdminService>) -> Result<Self, StartError> {
        let cpus = cpus_of_this_process();
        let options = DataDirOptions {
            shards: config.shards,
            // One shard per CPU; a data directory that has shards already keeps its number.
            shards_if_new: u16::try_from(cpus.len().clamp(1, SHARDS_MAX)).unwrap_or(1),
            segment_bytes_if_new: config.segment_bytes,
            cluster_id: Some(config.cluster_id),
        };
        let data_dir = DataDir::open(&config.data_dir, &options)?;
        let shards = data_dir.shards();
        let preflight = PreflightConfig {
            data_dir: data_dir.path().to_owned(),
            shards,
            io_memory_bytes: IO_MEMORY_BYTES,
            connections: CONNECTIONS_MIN,
        };
        let host = preflight::check(&preflight).map_err(StartError::Preflight)?;
        let slabs = slabs_of(config.memory_bytes, shards)?;
        check_arenas_before(&config.arena, &data_dir)?;
        if let ArenaChoice::Dir(dir) = &config.arena {
            check_room_for_arenas(dir, &data_dir, slabs)?;
            data_dir.remember_arena_dir(dir)?;
        }
        if data_dir.has_records() && !data_dir.catalog_path().exists() {
            return Err(CatalogError::Missing(data_dir.catalog_path()).into());
        }
        let (catalog, topics) = Catalog::open(&data_dir.catalog_path())?;
        let listeners = bind(config, shards)?;
        let shard_config = Arc::new(shard_config(config, &listeners, host.shard_connections_max(shards)));
        let addresses = BrokerAddresses {
            common: listeners.common[0].address(),
            direct: listeners.direct.iter().map(BoundListener::address).collect(),
        };
        let placed: Vec<(Arc<PlacedTopic>, Vec<Epoch>)> = topics
            .into_iter()
            .map(|topic| {
                let epochs = topic.created_epochs.iter().map(|&epoch| Epoch(epoch)).collect();
                (Arc::new(PlacedTopic { info: topic.info, store_shards: topic.store_shards }), epochs)
            })
            .collect();

        let ticker = Ticker::start().map_err(StartError::Ticker)?;
        let meshes = mesh(shards, MeshLimits::default());
        let mut broker_threads = Vec::new();
        let (mut mailboxes, mut all_metrics, mut ready) = (Vec::new(), Vec::new(), Vec::new());
        for (index, mesh) in meshes.into_iter().enumerate() {
            // The number of shards is a u16.
            let id = ShardId(index as u16);
            let (mail, mailbox) = mailbox(COMMANDS_MAX);
            let metrics = Arc::new(ShardMetrics::default());
            let (is_ready, wait_ready) = sync_channel(1);
            let life = Life {
                id,
                config: Arc::clone(&shard_config),
                dir: data_dir.shard_dir(id),
                data_dir: data_dir.path().to_owned(),
                log_id: data_dir.log_id(id),
                segment_bytes: data_dir.segment_bytes(),
                arena: config.arena.clone(),
                slabs,
                topics: placed.clone(),
                version: catalog.version(),
                admin: Arc::clone(&admin),
                mail: mail.clone(),
                metrics: Arc::clone(&metrics),
                mesh,
                ready: is_ready,
            };
            let thread = ShardThreadConfig {
                index: id.0,
                cpu: (usize::from(shards) <= cpus.len()).then(|| cpus[index]),
                io_memory_bytes: IO_MEMORY_BYTES,
                data_dir: data_dir.path().to_owned(),
            };
            broker_threads.push(spawn_shard(thread, &ticker, move || life::live(life, mailbox))?);
            mailboxes.push(mail);
            all_metrics.push(metrics);
            ready.push(wait_ready);
        }
        let control =
            BrokerControl::start(catalog, Placements::new(shards, &placed), mailboxes.clone(), all_metrics.clone());
        let broker = Self {
            addresses,
            threads: broker_threads,
            mailboxes,
            metrics: all_metrics,
            control,
            survives_process_kill: shard_config.survives_process_kill,
            _data_dir: data_dir,
            _ticker: ticker,
        };
        broker.wait_ready(&ready)?;
        broker.serve(listeners);
        Ok(broker)
    }

    fn wait_ready(&self, ready: &[Receiver<Result<(), String>>]) -> Result<(), StartError> {
        let mut failed = None;
        for (shard, ready) in ready.iter().enumerate() {
            let result = ready.recv().unwrap_or_else(|_| Err("its thread died while it recovered".into()));
            if let Err(reason) = result {
                failed.get_or_insert(StartError::Shard { shard: shard as u16, reason });
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn serve(&self, listeners: Listeners) {
        for ((mailbox, common), direct) in self.mailboxes.iter().zip(listeners.common).zip(listeners.direct) {
            // Refused only by a shard that has ended, whose thread says why when it is joined.
            let _ = mailbox.try_send(ShardCommand::Serve { listeners: vec![common, direct] });
        }
    }

    /// Where it listens.
    #[must_use]
    pub const fn addresses(&self) -> &BrokerAddresses {
        &self.addresses
    }

    /// Takes changes of topics.
    #[must_use]
    pub fn control(&self) -> BrokerControl {
        self.control.clone()
    }

    /// The topics that it has.
    #[must_use]
    pub fn topics(&self) -> Vec<TopicInfo> {
        self.control.topics()
    }

    /// Renders what `/metrics` shows; may be called from any thread.
    #[must_use]
    pub fn metrics(&self) -> String {
        metrics::render(&self.metrics)
    }

    /// A view that outlives borrows, for the HTTP server.
    #[must_use]
    pub fn probe(&self) -> BrokerProbe {
        BrokerProbe {
            metrics: self.metrics.clone(),
            pulses: self.threads.iter().map(ShardThread::pulse).collect(),
            survives_process_kill: self.survives_process_kill,
            stopped: Arc::new(Mutex::new(false)),
        }
    }

    /// Flushes, syncs, writes clean checkpoints and ends.
    ///
    /// # Errors
    /// When a shard could not do that: its next start recovers as after a kill.
    pub fn stop(self) -> Result<(), StopError> {
        self.control.stop();
        for mailbox in &self.mailboxes {
            // Refused only by a shard that has ended already.
            let _ = mailbox.try_send(ShardCommand::Stop);
        }
        let mut errors = Vec::new();
        for thread in self.threads {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => errors.push(error),
                Err(error) => errors.push(error.to_string()),
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(StopError(errors.join("; "))) }
    }

    /// Whether any shard's thread has ended although nobody asked.
    #[must_use]
    pub fn has_died(&self) -> bool {
        self.threads.iter().any(ShardThread::is_finished)
    }
}

/// Health and metrics of a broker, for any thread.
#[derive(Clone)]
pub struct BrokerProbe {
    metrics: Vec<Arc<ShardMetrics>>,
    pulses: Vec<Arc<crate::ticker::Pulse>>,
    survives_process_kill: bool,
    stopped: Arc<Mutex<bool>>,
}

impl BrokerProbe {
    /// Prometheus text.
    #[must_use]
    pub fn metrics(&self) -> String {
        metrics::render(&self.metrics)
    }

    /// The broker is being stopped: not ready any more.
    pub fn set_stopping(&self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// How it is now.
    #[must_use]
    pub fn health(&self) -> Health {
        let numbered = |shards: Vec<bool>| -> Vec<u16> {
            shards.iter().enumerate().filter(|(_, bad)| **bad).map(|(shard, _)| shard as u16).collect()
        };
        let failed_shards = numbered(self.metrics.iter().map(|shard| shard.log_failed.get() > 0).collect());
        let late = |pulse: &Arc<crate::ticker::Pulse>| pulse.stalled_for() > Duration::from_secs(1);
        let stalled_shards = numbered(self.pulses.iter().map(late).collect());
        let stopped = *self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        Health {
            ready: !stopped && failed_shards.len() < self.metrics.len(),
            survives_process_kill: self.survives_process_kill,
            failed_shards,
            stalled_shards,
        }
    }
}

struct Listeners {
    common: Vec<BoundListener>,
    direct: Vec<BoundListener>,
}

fn bind(config: &BrokerConfig, shards: u16) -> Result<Listeners, BindError> {
    let common = BoundListener::shared_soon(config.listen, usize::from(shards))?;
    let direct = (0..shards)
        .map(|shard| {
            let port = if config.direct_port_base == 0 { 0 } else { config.direct_port_base.saturating_add(shard) };
            let mut one = BoundListener::shared_soon(SocketAddr::new(config.listen.ip(), port), 1)?;
            Ok(one.pop().expect("one was asked for"))
        })
        .collect::<Result<_, _>>()?;
    Ok(Listeners { common, direct })
}

fn shard_config(config: &BrokerConfig, listeners: &Listeners, connections_max: usize) -> ShardConfig {
    let address = listeners.common[0].address();
    let host = if address.ip().is_unspecified() { "127.0.0.1".to_owned() } else { address.ip().to_string() };
    let direct_ports =
        listeners.direct.iter().enumerate().map(|(shard, listener)| match config.advertised_direct_base {
            Some(base) => base.saturating_add(shard as u16),
            None => listener.address().port(),
        });
    ShardConfig {
        broker_id: config.broker_id,
        cluster_id: config.cluster_id,
        advertised_host: config.advertised_host.clone().unwrap_or(host),
        advertised_port: config.advertised_port.unwrap_or(address.port()),
        advertised_direct_ports: direct_ports.collect(),
        survives_process_kill: config.arena != ArenaChoice::Anonymous,
        connections_max,
        catch_up_share_percent: config.catch_up_share_percent.clamp(1, 100),
        flush_bytes: config.flush_bytes.clamp(64 * 1024, EXTENT_BYTES_MAX),
        flush_interval: config.flush_interval,
        sync_interval: config.sync_interval,
    }
}

/// That the process before has not left memory where this one would not look for it.
fn check_arenas_before(arena: &ArenaChoice, data_dir: &DataDir) -> Result<(), StartError> {
    let Some(before) = data_dir.arena_dir_before()? else { return Ok(()) };
    if matches!(arena, ArenaChoice::Dir(dir) if *dir == before) {
        return Ok(());
    }
    for shard in (0..data_dir.shards()).map(ShardId) {
        let identity = ArenaIdentity::of(data_dir.path(), data_dir.log_id(shard), shard);
        if arena_path(&before, &identity.map_err(StartError::Identity)?).exists() {
            return Err(StartError::ArenaElsewhere(before));
        }
    }
    Ok(())
}

/// Whether the memory filesystem has room for the arenas of all shards: each of them looks for itself only, and takes its
/// pages bit by bit. Arenas that the process before left are there already.
fn check_room_for_arenas(dir: &Path, data_dir: &DataDir, slabs: usize) -> Result<(), StartError> {
    let identity = |shard: u16| {
        let shard = ShardId(shard);
        ArenaIdentity::of(data_dir.path(), data_dir.log_id(shard), shard).map(Some).map_err(StartError::Identity)
    };
    let identities: Vec<_> = (0..data_dir.shards()).map(identity).collect::<Result<_, _>>()?;
    Ok(check_room(dir, missing_bytes(dir, &identities, slabs))?)
}

/// The CPUs that this process may use.
pub(crate) fn cpus_of_this_process() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect(),
        Err(_) => (0..std::thread::available_parallelism().map_or(1, usize::from)).collect(),
    }
}

/// Slabs of each shard's arena.
pub(crate) fn slabs_of(memory_bytes: u64, shards: u16) -> Result<usize, StartError> {
    let each = usize::try_from(memory_bytes).unwrap_or(usize::MAX) / usize::from(shards.max(1));
    if each < ARENA_BYTES_MIN {
        let needs = ARENA_BYTES_MIN as u64 * u64::from(shards);
        return Err(StartError::Memory { has: memory_bytes, shards, needs });
    }
    Ok(each / SLAB_BYTES)
}
