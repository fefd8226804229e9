//! What the control plane and the main thread tell a shard through its mailbox.

use std::sync::{Arc, Mutex, PoisonError};

use ringmain_core::ids::{Epoch, TopicId};

use crate::net::BoundListener;
use crate::routing::PlacedTopic;

/// Commands that may wait for a shard.
pub(crate) const COMMANDS_MAX: usize = 200_000;

/// Calls back when its last clone is dropped: when every shard has carried out the command, or has ended.
pub(crate) struct Done(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Done {
    /// To be cloned for each shard that gets the command.
    pub(crate) fn new(callback: Box<dyn FnOnce() + Send>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(callback))))
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Some(callback) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            callback();
        }
    }
}

/// What a shard is told to do.
pub(crate) enum ShardCommand {
    /// A topic is new or changed.
    PutTopic { topic: Arc<PlacedTopic>, created_epochs: Vec<Epoch>, done: Arc<Done> },
    /// A topic is gone.
    DeleteTopic { id: TopicId, version: u64, done: Arc<Done> },
    /// The master's answer to a request of a connection.
    AdminReply { connection: u64, frame: Vec<u8> },
    /// All shards are ready: serve clients.
    Serve { listeners: Vec<BoundListener> },
    /// Flush, sync, checkpoint and end.
    Stop,
}
