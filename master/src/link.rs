//! How the master reaches its broker. In one process that is a call; between processes it will be frames.

use ringmain_core::topic::{TopicChange, TopicInfo};

/// Told once how a change went; the text of a failure is for people.
pub type Applied = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Where clients reach a broker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BrokerAddress {
    /// Number of the broker in its cluster.
    pub broker_id: u32,
    /// Advertised host name or address.
    pub host: String,
    /// Advertised port.
    pub port: u16,
}

/// The master's broker. Changes must be applied in the order they are handed over; a change that has been applied
/// already, and the deletion of a topic that is not there, are successes that change nothing.
pub trait BrokerLink: Send + Sync {
    /// Hands over a change without blocking; `done` is called on any thread once it is durable at the broker, or failed.
    fn apply(&self, change: TopicChange, done: Applied);

    /// Number of shards, for placing stores.
    fn shard_count(&self) -> u16;

    /// The topics the broker has now.
    fn topics(&self) -> Vec<TopicInfo>;

    /// Where clients reach the broker.
    fn address(&self) -> BrokerAddress;

    /// Whether memory-acked records survive the death of the broker's process.
    fn survives_process_kill(&self) -> bool;
}
