//! The life of a shard's executor: recover, serve, stop.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use ringmain_core::ids::{Epoch, LogId, ShardId, TopicId};

use crate::admin::AdminService;
use crate::broker::ArenaChoice;
use crate::clock::sleep;
use crate::command::ShardCommand;
use crate::connection::{self, Connection};
use crate::mailbox::{Mailbox, MailboxSender};
use crate::mesh::MeshEnd;
use crate::mesh_message::{MeshReply, MeshRequest};
use crate::metrics::ShardMetrics;
use crate::net::{BoundListener, Listener};
use crate::routing::PlacedTopic;
use crate::runtime::{Joined, spawn_joined, spawn_local};
use crate::shard::{Shard, ShardConfig};
use crate::{dispatch, fetch_hop, flush, packer, produce, retention, start};

/// How often gauges, overdue produces and stalled readers are looked at.
const SWEEP: Duration = Duration::from_millis(100);

/// All that a shard is given when it starts.
pub(crate) struct Life {
    pub(crate) id: ShardId,
    pub(crate) config: Arc<ShardConfig>,
    /// The directory of its segments.
    pub(crate) dir: PathBuf,
    pub(crate) data_dir: PathBuf,
    pub(crate) log_id: LogId,
    pub(crate) segment_bytes: u64,
    pub(crate) arena: ArenaChoice,
    pub(crate) slabs: usize,
    /// All topics of the broker, with the epoch of each store's shard when it was made.
    pub(crate) topics: Vec<(Arc<PlacedTopic>, Vec<Epoch>)>,
    /// Version of the newest change that the catalog has, deletions included.
    pub(crate) version: u64,
    pub(crate) admin: Arc<dyn AdminService>,
    pub(crate) mail: MailboxSender<ShardCommand>,
    pub(crate) metrics: Arc<ShardMetrics>,
    pub(crate) mesh: MeshEnd<MeshRequest, MeshReply>,
    /// Told once when recovery is over.
    pub(crate) ready: SyncSender<Result<(), String>>,
}

/// Runs a shard from recovery to its end. The result says whether it ended clean.
pub(crate) async fn live(life: Life, mut mailbox: Mailbox<ShardCommand>) -> Result<(), String> {
    let (ready, version) = (life.ready.clone(), life.version);
    let shard = match start::start(life).await {
        Ok(shard) => shard,
        Err(reason) => {
            // The one who waits takes just one message.
            let _ = ready.send(Err(reason.clone()));
            return Err(reason);
        }
    };
    // Topics alone do not tell it when the newest change was a deletion.
    shard.routing.borrow_mut().follow(version);
    let flusher = spawn_joined(flush::run(Rc::clone(&shard)));
    let keeper = spawn_joined(retention::run(Rc::clone(&shard)));
    spawn_local(answer_mesh(Rc::clone(&shard)));
    spawn_local(sweep(Rc::clone(&shard)));
    spawn_local(packer::take_back(Rc::clone(&shard)));
    // Recovery reads with blocking calls: that was no stall of a serving shard.
    shard.clock.pulse().take_stall_max();
    // Both sides of the channel live as long as the broker starts.
    let _ = ready.send(Ok(()));
    serve_mail(&shard, &mut mailbox).await;
    stop(&shard, flusher, keeper).await
}

async fn serve_mail(shard: &Rc<Shard>, mailbox: &mut Mailbox<ShardCommand>) {
    loop {
        match mailbox.recv().await {
            ShardCommand::PutTopic { topic, created_epochs, done } => {
                let taken = start::take_topic(&mut shard.store.borrow_mut(), shard.id, &topic, &created_epochs);
                assert!(taken, "the control plane counts the partitions of each shard");
                shard.retention.topic_changed(shard.id, &topic);
                shard.routing.borrow_mut().put(topic);
                drop(done);
            }
            ShardCommand::DeleteTopic { id, version, done } => {
                delete_topic(shard, id, version);
                drop(done);
            }
            ShardCommand::AdminReply { connection, frame } => answer_admin(shard, connection, &frame),
            ShardCommand::Serve { listeners } => {
                for listener in listeners {
                    spawn_local(accept(Rc::clone(shard), listener));
                }
            }
            ShardCommand::Stop => return,
        }
        shard.flush_touched();
    }
}

fn delete_topic(shard: &Rc<Shard>, id: TopicId, version: u64) {
    let Some(topic) = shard.routing.borrow_mut().remove(id, version) else { return };
    let ended = shard.acks.borrow_mut().remove_topic(id);
    shard.store.borrow_mut().remove_topic(&*shard.memory, id);
    shard.packer.state.borrow_mut().forget(id);
    produce::waits_over(shard, &ended, false);
    for (partition, _) in topic.partitions_on(shard.id) {
        shard.parked.notify(ringmain_core::ids::PartitionKey { topic: id, partition });
    }
    shard.memory_freed.raise();
    shard.retention.topic_deleted(id);
}

fn answer_admin(shard: &Shard, connection: u64, frame: &[u8]) {
    let Some(connection) = shard.connections.borrow().get(&connection).map(Rc::clone) else { return };
    connection.requests.set(connection.requests.get().saturating_sub(1));
    connection.reply(shard, Vec::new(), |_, out| out.extend_from_slice(frame));
}

async fn accept(shard: Rc<Shard>, listener: BoundListener) {
    let listener: Listener = listener.start();
    while !shard.stopping.get() {
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                tracing::error!(shard = shard.id.0, address = %listener.address(), %error, "can't accept any more");
                return;
            }
        };
        if shard.stopping.get() {
            return;
        }
        let connections_max = shard.config.connections_max;
        if shard.connections.borrow().len() >= connections_max {
            tracing::warn!(
                shard = shard.id.0, peer = %stream.peer(),
                "connection closed: the shard has {connections_max} connections"
            );
            shard.metrics.connections_refused_total.add(1);
            continue;
        }
        let id = shard.next_connection.get();
        shard.next_connection.set(id + 1);
        let connection = Connection::new(id, stream);
        spawn_local(connection::serve(Rc::clone(&shard), connection));
    }
}

async fn answer_mesh(shard: Rc<Shard>) {
    loop {
        let (ticket, request) = shard.mesh.next_request().await;
        match request {
            MeshRequest::Produce { batches, timeout_ms } => {
                produce::produce_for(&shard, ticket, &batches, timeout_ms);
            }
            MeshRequest::Fetch(fetch) => fetch_hop::fetch_for(&shard, ticket, fetch),
            MeshRequest::Watch { seen, wait_ms } => fetch_hop::watch_for(&shard, ticket, seen, wait_ms),
            MeshRequest::Offsets { topic, partitions } => {
                ticket.reply(MeshReply::Offsets(dispatch::offsets_of(&shard, topic, &partitions)));
            }
        }
        shard.flush_touched();
    }
}

async fn sweep(shard: Rc<Shard>) {
    loop {
        sleep(SWEEP).await;
        shard.sweep();
        flush::sync_if_wanted(&shard);
    }
}

/// What becomes of batches that were not flushed when the process ends.
fn fate_of_memory(shard: &Shard) -> &'static str {
    if shard.config.survives_process_kill { "stays in the arena for the next start" } else { "is lost" }
}

/// Ends a shard so that its next start has nothing to recover: acks what waits, flushes, syncs, checkpoints, seals.
async fn stop(shard: &Rc<Shard>, flusher: Joined<()>, keeper: Joined<()>) -> Result<(), String> {
    shard.stopping.set(true);
    shard.parked.notify_all();
    shard.flush_wanted.raise();
    shard.retention.wanted.raise();
    keeper.await;
    flusher.await;
    shard.flush_touched();
    let result = if shard.log_failed.get() {
        Err(format!("shard {}: its log had failed; what was not flushed {}", shard.id, fate_of_memory(shard)))
    } else if shard.log.has_stopped_without_room() {
        Err(format!(
            "shard {}: stopped without room on the disk for what was not flushed: it {}",
            shard.id,
            fate_of_memory(shard)
        ))
    } else {
        shard.log.finish(shard).await.map_err(|error| format!("shard {}: {error}", shard.id))
    };
    shard.flush_touched();
    let connections: Vec<_> = shard.connections.borrow().values().map(Rc::clone).collect();
    for connection in connections {
        connection.close(shard);
    }
    if result.is_ok() {
        shard.memory.remove().map_err(|error| format!("shard {}: {error}", shard.id))?;
        tracing::info!(shard = shard.id.0, "stopped clean");
    }
    result
}
