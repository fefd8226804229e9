//! Messages to a shard from threads that are no shards: the control plane and the main thread. Rare, so a mutex will do.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use ringmain_core::ids::{Epoch, TopicId};

use crate::net::BoundListener;
use crate::routing::PlacedTopic;

/// Commands that may wait for a shard.
const MAILBOX_MAX: usize = 200_000;

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

/// The mailbox of one shard.
#[derive(Default)]
pub(crate) struct Mailbox {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    commands: VecDeque<ShardCommand>,
    waker: Option<Waker>,
    closed: bool,
}

impl Mailbox {
    /// Puts a command in; gives it back when the shard has ended or does not come round to its mail.
    pub(crate) fn send(&self, command: ShardCommand) -> Result<(), ShardCommand> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.closed || inner.commands.len() >= MAILBOX_MAX {
            return Err(command);
        }
        inner.commands.push_back(command);
        // A clone stays: the task may be stuck with its first wake-up, and wake_by_ref from outside frees it.
        if let Some(waker) = &inner.waker {
            waker.wake_by_ref();
        }
        Ok(())
    }

    /// The next command, for the shard's own task.
    pub(crate) async fn receive(&self) -> ShardCommand {
        std::future::poll_fn(|context: &mut Context<'_>| {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            match inner.commands.pop_front() {
                Some(command) => Poll::Ready(command),
                None => {
                    inner.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// The shard ends: whoever sends now gets the command back. Called on the shard's thread, which made the waker.
    pub(crate) fn close(&self) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.closed = true;
        inner.waker = None;
        inner.commands.clear();
    }
}
