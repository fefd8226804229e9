//! One shard: its stores, its log, its connections. All of it lives on one executor's thread; the only things other
//! threads touch are its mailbox, the mesh rings, the arena's file and the metrics.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringmain_core::acks::Acks;
use ringmain_core::fetch::Slice;
use ringmain_core::gather::Gather;
use ringmain_core::ids::ShardId;
use ringmain_core::limits::{HOLD_MS_MAX, SHARD_HEAD_BYTES_MAX};
use ringmain_core::store::ShardStore;
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::frame::FrameEncoder;
use ringmain_wire::message::{ErrorResponse, encode_error};

use crate::admin::AdminService;
use crate::arena::Arena;
use crate::catch_up::Readers;
use crate::clock::Clock;
use crate::command::ShardCommand;
use crate::connection::{Connection, Part};
use crate::copies::{Copies, Taker, Waiting};
use crate::log_writer::LogWriter;
use crate::mailbox::MailboxSender;
use crate::mesh::{Call, NoCredit};
use crate::mesh_message::{MeshReply, MeshRequest, ShardMesh};
use crate::metrics::ShardMetrics;
use crate::packer::Packer;
use crate::parked::Parked;
use crate::produce::{self, Waits};
use crate::retention::RetentionState;
use crate::routing::Routing;
use crate::signal::{Broadcast, Signal};

/// How long a request waits for a mesh credit before it is refused.
const CREDIT_PATIENCE: Duration = Duration::from_millis(500);

/// A tick that comes so late is counted and logged.
const STALL: Duration = Duration::from_millis(50);

/// What all shards of a broker are told.
#[derive(Clone, Debug)]
pub(crate) struct ShardConfig {
    pub(crate) broker_id: u32,
    pub(crate) cluster_id: u64,
    pub(crate) advertised_host: String,
    pub(crate) advertised_port: u16,
    pub(crate) advertised_direct_ports: Vec<u16>,
    pub(crate) survives_process_kill: bool,
    /// Connections of one shard: the log's own files must not run out of descriptors.
    pub(crate) connections_max: usize,
    /// Share of the disk's time that reads for consumers behind memory may take while the shard writes.
    pub(crate) catch_up_share_percent: u32,
    /// A flush of everything starts when so much is dirty.
    pub(crate) flush_bytes: usize,
    /// A flush of everything starts when the oldest dirty batch is so old.
    pub(crate) flush_interval: Duration,
    /// A sync starts when the oldest flushed batch has waited so long.
    pub(crate) sync_interval: Duration,
}

/// The state of one shard.
pub(crate) struct Shard {
    pub(crate) id: ShardId,
    pub(crate) config: Arc<ShardConfig>,
    pub(crate) clock: Rc<Clock>,
    pub(crate) memory: Rc<Arena>,
    pub(crate) store: RefCell<ShardStore>,
    pub(crate) acks: RefCell<Acks>,
    pub(crate) waits: RefCell<Waits>,
    pub(crate) gather: RefCell<Gather>,
    pub(crate) routing: RefCell<Routing>,
    pub(crate) log: LogWriter,
    pub(crate) log_failed: Cell<bool>,
    pub(crate) metrics: Arc<ShardMetrics>,
    pub(crate) admin: Arc<dyn AdminService>,
    /// For the master's answers, which come from other threads.
    pub(crate) mailbox: MailboxSender<ShardCommand>,
    pub(crate) mesh: ShardMesh,
    pub(crate) readers: Readers,
    pub(crate) packer: Packer,
    pub(crate) parked: Parked,
    pub(crate) parked_count: Cell<usize>,
    /// Fetches of this shard's clients that another shard watches partitions for.
    pub(crate) watches: Cell<usize>,
    pub(crate) connections: RefCell<HashMap<u64, Rc<Connection>>>,
    pub(crate) next_connection: Cell<u64>,
    /// Connections with replies queued in this turn.
    pub(crate) touched: RefCell<Vec<Rc<Connection>>>,
    pub(crate) encoder: RefCell<FrameEncoder>,
    pub(crate) receive_bytes: Cell<usize>,
    pub(crate) receive_freed: Broadcast,
    /// Connections that wait for receive memory.
    pub(crate) receive_waiting: Cell<usize>,
    /// One connection at a time may have more than there is, so that frames that wait for each other come to an end.
    pub(crate) receive_exceeded: Cell<bool>,
    pub(crate) copies: Rc<Copies>,
    /// The same for what other shards ask for.
    pub(crate) hop_copies: Rc<Copies>,
    /// Fetches that have a task, and their partitions.
    pub(crate) fetches_under_way: Cell<(usize, usize)>,
    /// Bytes of answers without records that are queued on all connections, and who waits for some to go.
    pub(crate) head_bytes: Cell<usize>,
    pub(crate) head_waiting: Cell<usize>,
    pub(crate) heads_sent: Broadcast,
    pub(crate) flush_wanted: Signal,
    pub(crate) memory_freed: Broadcast,
    /// A produce waits for memory: flush what there is.
    pub(crate) memory_short: Cell<bool>,
    /// There is no room for a new segment: produces are refused until there is.
    pub(crate) disk_full: Cell<bool>,
    pub(crate) index_repair: crate::index_repair::IndexRepair,
    pub(crate) stopping: Cell<bool>,
    pub(crate) retention: RetentionState,
}

impl Shard {
    /// Pinned bytes of a block.
    pub(crate) fn block_bytes(&self, slice: &Slice) -> &[u8] {
        self.memory.read(slice.block.0, slice.at as usize, slice.bytes as usize)
    }

    /// Ends the pins of a reply that is sent or dropped.
    pub(crate) fn release(&self, parts: &[Part]) {
        let mut store = self.store.borrow_mut();
        for part in parts {
            if let Part::Block(slice) = part {
                store.unpin(&*self.memory, std::slice::from_ref(slice));
            }
        }
    }

    /// Waits until another large answer without records may be queued.
    pub(crate) async fn head_room(&self) {
        let _waiting = Waiting::new(&self.head_waiting);
        while self.head_bytes.get() > SHARD_HEAD_BYTES_MAX {
            self.heads_sent.wait().await;
        }
    }

    pub(crate) fn heads_gone(&self, bytes: usize) {
        self.head_bytes.set(self.head_bytes.get() - bytes);
        self.heads_sent.raise();
    }

    /// The budget that copies for `taker` come from.
    pub(crate) fn copies_for(&self, taker: Taker) -> &Rc<Copies> {
        match taker {
            Taker::Client(_) => &self.copies,
            Taker::Hop => &self.hop_copies,
        }
    }

    /// Sends what this turn has queued on all connections.
    pub(crate) fn flush_touched(&self) {
        loop {
            let Some(connection) = self.touched.borrow_mut().pop() else { return };
            connection.flush(self);
        }
    }

    /// Answers a request that failed as a whole.
    pub(crate) fn answer_error(
        &self,
        connection: &Rc<Connection>,
        correlation_id: u64,
        code: ErrorCode,
        message: String,
    ) {
        self.metrics.errors_answered_total.add(1);
        let error = ErrorResponse::new(code, message);
        connection.reply(self, Vec::new(), |encoder, out| encode_error(encoder, correlation_id, &error, out));
    }

    /// Sends a request to another shard; nothing when there is no credit for it within a bounded wait.
    pub(crate) async fn send_to(&self, owner: ShardId, message: MeshRequest) -> Option<Call<MeshRequest, MeshReply>> {
        self.metrics.mesh_requests_total.add(1);
        let bytes = message.bytes();
        let give_up = self.clock.exact() + CREDIT_PATIENCE;
        let mut message = message;
        loop {
            message = match self.mesh.call(owner, message, bytes) {
                Ok(call) => return Some(call),
                Err(NoCredit(message)) => message,
            };
            let left = give_up.saturating_sub(self.clock.exact());
            if left.is_zero() {
                return None;
            }
            self.flush_touched();
            self.clock.timeout(left, self.mesh.wait_for_credit(owner, bytes)).await;
        }
    }

    /// Hands a create, alter or delete of a topic to the master; the answer is a whole frame.
    pub(crate) fn ask_admin(self: &Rc<Self>, connection: &Rc<Connection>, frame: Vec<u8>) {
        connection.requests.set(connection.requests.get() + 1);
        let id = connection.id;
        let mailbox = self.mailbox.clone();
        self.admin.submit(
            frame,
            Box::new(move |reply| {
                // Full only when the shard has stopped: then nobody waits for the answer.
                let _ = mailbox.try_send(ShardCommand::AdminReply { connection: id, frame: reply });
            }),
        );
    }

    /// An error once the log has failed: nothing is placed, synced or sealed in it any more.
    pub(crate) fn check_log(&self) -> Result<(), String> {
        if self.log_failed.get() { Err("the log has failed".into()) } else { Ok(()) }
    }

    /// The shard's log has failed for good: nobody is acked any more; blocks and files stay readable.
    pub(crate) fn fail_log(&self, reason: &str) {
        if !self.log_failed.replace(true) {
            tracing::error!(shard = self.id.0, "the shard log failed, its partitions only serve fetches now: {reason}");
            self.metrics.log_failed.set(1);
            self.log.fail();
        }
        // Also when it had failed before: a flush that was under way comes to its end only now.
        let tokens = self.acks.borrow_mut().fail();
        produce::waits_over(self, &tokens, false);
        self.flush_touched();
        self.memory_freed.raise();
        self.flush_wanted.raise();
    }

    /// Once per 100 ms: gauges, overdue produces, the connection that holds most memory when it runs short.
    pub(crate) fn sweep(&self) {
        produce::answer_overdue(self);
        self.flush_touched();
        self.close_stalled();
        self.close_half_sent();
        let store = self.store.borrow();
        let blocks = store.blocks();
        self.metrics.block_bytes.set(blocks.bytes_in_use() as u64);
        self.metrics.dirty_bytes.set(blocks.bytes_dirty() as u64);
        self.metrics.pinned_bytes.set(blocks.bytes_pinned() as u64);
        self.metrics.partitions.set(store.partition_count() as u64);
        let pulse = self.clock.pulse();
        let stall = pulse.take_stall_max();
        self.metrics.stall_max_us.raise(stall.as_micros() as u64);
        if stall > STALL {
            self.metrics.stalls_total.add(1);
            tracing::warn!(
                shard = self.id.0,
                stall_ms = stall.as_millis() as u64,
                "the executor came late to its tick"
            );
        }
    }

    /// When replies pin too much memory, or others wait for what copies hold, the connection that has been stalled
    /// longest is given up.
    fn close_stalled(&self) {
        let (pinned, all) = {
            let store = self.store.borrow();
            (store.blocks().bytes_pinned(), store.blocks().bytes_max())
        };
        if pinned >= all / 2 {
            self.close_oldest(
                "its unread replies hold memory that is short",
                Duration::ZERO,
                Connection::blocked_since,
            );
        } else if self.copies.is_short() || self.head_waiting.get() > 0 {
            let patience = Duration::from_millis(HOLD_MS_MAX);
            self.close_oldest("its unread replies hold memory that is short", patience, Connection::blocked_since);
        }
    }

    /// When others wait for receive memory, the connection that has owed the rest of its frame longest is given up.
    fn close_half_sent(&self) {
        if self.receive_waiting.get() > 0 {
            let patience = Duration::from_millis(HOLD_MS_MAX);
            self.close_oldest("its unfinished frame holds memory that is short", patience, Connection::receiving_since);
        }
    }

    /// Closes the connection whose `since` is the longest ago, if that is longer than `patience`.
    fn close_oldest(&self, reason: &str, patience: Duration, since: impl Fn(&Connection) -> Option<Duration>) {
        let latest = self.clock.monotonic().saturating_sub(patience);
        let oldest = self
            .connections
            .borrow()
            .values()
            .filter_map(|connection| since(connection).map(|since| (since, Rc::clone(connection))))
            .filter(|(since, _)| *since <= latest)
            .min_by_key(|(since, _)| *since);
        if let Some((_, connection)) = oldest {
            tracing::warn!(shard = self.id.0, peer = %connection.peer, "connection closed: {reason}");
            self.metrics.connections_refused_total.add(1);
            connection.close(self);
        }
    }
}
