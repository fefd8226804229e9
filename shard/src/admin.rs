//! Where requests about topics go: the master, in this process or another.

/// Takes a frame that creates or deletes a topic and answers with a whole frame, from any thread, later.
pub trait AdminService: Send + Sync {
    /// Must not block. `reply` is called once.
    fn submit(&self, frame: Vec<u8>, reply: Box<dyn FnOnce(Vec<u8>) + Send>);
}
