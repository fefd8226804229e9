//! Messages to a shard from threads that are no shards: changes of topics, questions, the order to stop.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use crate::clock::mark_busy;
use crate::doorbell::Doorbell;

/// What sender and shard share.
#[derive(Debug)]
struct Shared<T> {
    /// `None` once the shard has left.
    messages: Mutex<Option<VecDeque<T>>>,
    capacity: usize,
    doorbell: Doorbell,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Option<VecDeque<T>>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The way in; may be cloned and used on any thread.
#[derive(Debug)]
pub struct MailboxSender<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Clone for MailboxSender<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

/// Why a message was not taken; it comes back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError<T> {
    /// As many wait as may.
    #[error("the shard has too many messages waiting")]
    Full(T),
    /// The shard has stopped.
    #[error("the shard has stopped")]
    Stopped(T),
}

impl<T> MailboxSender<T> {
    /// Puts a message in.
    ///
    /// # Errors
    /// When the mailbox is full or its shard has stopped.
    pub fn try_send(&self, message: T) -> Result<(), SendError<T>> {
        match self.shared.lock().as_mut() {
            None => return Err(SendError::Stopped(message)),
            Some(messages) if messages.len() >= self.shared.capacity => return Err(SendError::Full(message)),
            Some(messages) => messages.push_back(message),
        }
        self.shared.doorbell.ring();
        Ok(())
    }
}

/// The shard's end. May go to its thread before it is used, and then stays there.
#[derive(Debug)]
pub struct Mailbox<T> {
    shared: Arc<Shared<T>>,
}

/// Makes a mailbox for at most `capacity` messages that wait.
#[must_use]
pub fn mailbox<T>(capacity: usize) -> (MailboxSender<T>, Mailbox<T>) {
    let messages = Mutex::new(Some(VecDeque::new()));
    let shared = Arc::new(Shared { messages, capacity, doorbell: Doorbell::default() });
    (MailboxSender { shared: Arc::clone(&shared) }, Mailbox { shared })
}

impl<T> Mailbox<T> {
    /// The next message. May be dropped: nothing is lost.
    pub async fn recv(&mut self) -> T {
        let message = poll_fn(|cx| {
            self.shared.doorbell.awake();
            if let Some(message) = self.try_recv() {
                return Poll::Ready(message);
            }
            self.shared.doorbell.sleep(cx.waker());
            self.try_recv().map_or(Poll::Pending, Poll::Ready)
        })
        .await;
        mark_busy();
        message
    }

    /// The next message, if one waits.
    pub fn try_recv(&mut self) -> Option<T> {
        self.shared.lock().as_mut().and_then(VecDeque::pop_front)
    }
}

impl<T> Drop for Mailbox<T> {
    fn drop(&mut self) {
        self.shared.doorbell.leave();
        // Not dropped under the lock: what a message drops may send another.
        let left = self.shared.lock().take();
        drop(left);
    }
}
