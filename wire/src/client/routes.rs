//! Where to send what: the cached metadata of topics, and one connection for each address in use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use crate::client::ClientConfig;
use crate::client::connection::{Connection, ConnectionConfig, locked};
use crate::client::error::ClientError;
use crate::message::{Request, Response};
use crate::metadata::{BrokerMetadata, MetadataRequest, PartitionMetadata, TopicMetadata};
use crate::offsets::{Offsets, OffsetsRequest};

/// A port that did not answer is not tried again for so long, if another one did.
const PORT_PAUSE: Duration = Duration::from_secs(10);
/// A direct port that does not answer within this is passed over: the common port serves as well.
const DIRECT_PORT_TIMEOUT: Duration = Duration::from_secs(1);
/// Those who queue behind an attempt to connect that failed share its outcome.
const FAILURE_SHARED_FOR: Duration = Duration::from_millis(50);

/// A topic and the brokers that have it, as of one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicRoute {
    /// The topic; its partitions stand at their numbers.
    pub topic: TopicMetadata,
    /// All brokers.
    pub brokers: Vec<BrokerMetadata>,
}

impl TopicRoute {
    /// The partition of this number.
    pub fn partition(&self, partition: u32) -> Result<&PartitionMetadata, ClientError> {
        let missing = || ClientError::NoPartition { topic: self.topic.name.clone(), partition };
        self.topic.partitions.get(partition as usize).ok_or_else(missing)
    }

    /// Broker and shard of a partition, to group partitions by.
    pub(crate) fn owner(&self, partition: u32) -> Option<(u32, u16)> {
        self.partition(partition).ok().map(|partition| (partition.broker_id, partition.shard))
    }

    fn broker(&self, broker_id: u32) -> Option<&BrokerMetadata> {
        self.brokers.iter().find(|broker| broker.broker_id == broker_id)
    }
}

/// Connections and routes, shared by a client and all its producers and consumers.
pub(crate) struct Routes {
    config: ClientConfig,
    /// The cluster of the first broker that answered. Topic ids mean nothing in another one: an address that leads there,
    /// as one of a tunnel's other end may, counts as one that does not answer.
    cluster: OnceLock<u64>,
    slots: Mutex<HashMap<String, Arc<Slot>>>,
    topics: Mutex<HashMap<String, Arc<TopicRoute>>>,
    /// Common ports of all brokers, to go to when no bootstrap address answers.
    common_addresses: Mutex<Vec<String>>,
    ports_down: Mutex<HashMap<String, Instant>>,
    /// One refresh at a time; those who wait use its result.
    refreshing: tokio::sync::Mutex<()>,
}

/// The connection to one address. The lock is held while connecting, so that nobody connects twice.
#[derive(Default)]
struct Slot {
    state: tokio::sync::Mutex<SlotState>,
}

#[derive(Default)]
struct SlotState {
    connection: Option<Connection>,
    failed: Option<(Instant, ClientError)>,
}

impl Routes {
    pub(crate) fn new(config: ClientConfig) -> Self {
        Self {
            config,
            cluster: OnceLock::new(),
            slots: Mutex::default(),
            topics: Mutex::default(),
            common_addresses: Mutex::default(),
            ports_down: Mutex::default(),
            refreshing: tokio::sync::Mutex::default(),
        }
    }

    pub(crate) const fn config(&self) -> &ClientConfig {
        &self.config
    }

    /// A connection to any broker: bootstrap addresses first, then what metadata told.
    pub(crate) async fn any_connection(&self) -> Result<Connection, ClientError> {
        let mut addresses = self.config.bootstrap.clone();
        for known in locked(&self.common_addresses).iter() {
            if !addresses.contains(known) {
                addresses.push(known.clone());
            }
        }
        let nowhere = ClientError::Connect { address: "nowhere".to_owned(), reason: "no broker was named".to_owned() };
        let mut last = nowhere;
        for address in addresses {
            match self.connection_at(&address, self.config.connect_timeout).await {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// The connection for requests to a partition: the direct port of its shard if that answers, else its broker's common
    /// port, else, where there is just one broker, wherever that was reached before.
    pub(crate) async fn connection_to(&self, route: &TopicRoute, partition: u32) -> Result<Connection, ClientError> {
        let owner = route.partition(partition)?;
        let Some(broker) = route.broker(owner.broker_id) else {
            return Err(ClientError::Protocol(format!("metadata names broker {}, which it lacks", owner.broker_id)));
        };
        let direct_port = broker.direct_ports.get(usize::from(owner.shard)).copied().filter(|port| *port != 0);
        let direct = direct_port.filter(|_| self.config.use_direct_ports).map(|port| address(&broker.host, port));
        let direct = direct.filter(|direct| !self.is_down(direct));
        if let Some(direct) = &direct {
            let timeout = DIRECT_PORT_TIMEOUT.min(self.config.connect_timeout);
            if let Ok(connection) = self.connection_at(direct, timeout).await {
                return Ok(connection);
            }
        }
        let common = address(&broker.host, broker.port);
        let alone = route.brokers.len() == 1;
        let connection = if alone && self.is_down(&common) {
            self.any_connection().await?
        } else {
            match self.connection_at(&common, self.config.connect_timeout).await {
                Err(_) if alone => {
                    let connection = self.any_connection().await?;
                    self.set_down(common);
                    connection
                }
                connection => connection?,
            }
        };
        // Only now is it the port that is down, and not the whole broker.
        if let Some(direct) = direct {
            self.set_down(direct);
        }
        Ok(connection)
    }

    fn is_down(&self, address: &str) -> bool {
        locked(&self.ports_down).get(address).is_some_and(|until| Instant::now() < *until)
    }

    fn set_down(&self, address: String) {
        locked(&self.ports_down).insert(address, Instant::now() + PORT_PAUSE);
    }

    async fn connection_at(&self, address: &str, connect_timeout: Duration) -> Result<Connection, ClientError> {
        let slot = Arc::clone(locked(&self.slots).entry(address.to_owned()).or_default());
        let mut state = slot.state.lock().await;
        if let Some(connection) = state.connection.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        state.connection = None;
        if let Some((at, error)) = &state.failed
            && at.elapsed() < FAILURE_SHARED_FOR
        {
            return Err(error.clone());
        }
        match self.connect(address, connect_timeout).await {
            Ok(connection) => {
                *state = SlotState { connection: Some(connection.clone()), failed: None };
                Ok(connection)
            }
            Err(error) => {
                state.failed = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    async fn connect(&self, address: &str, connect_timeout: Duration) -> Result<Connection, ClientError> {
        let client_name = self.config.client_name.clone();
        let config = ConnectionConfig { client_name, connect_timeout, request_timeout: self.config.request_timeout };
        let connection = Connection::connect(address, &config).await?;
        let theirs = connection.server().cluster_id;
        let ours = *self.cluster.get_or_init(|| theirs);
        if theirs == ours {
            return Ok(connection);
        }
        let reason = format!("it belongs to cluster {theirs:016x}, and this client to {ours:016x}");
        Err(ClientError::Connect { address: address.to_owned(), reason })
    }

    /// The route of a topic, from the cache if it is there.
    pub(crate) async fn route(&self, topic: &str) -> Result<Arc<TopicRoute>, ClientError> {
        let cached = locked(&self.topics).get(topic).cloned();
        match cached {
            Some(route) => Ok(route),
            None => self.fetch_route(topic).await,
        }
    }

    /// A newer route than `used`: fetched, unless somebody else has done so meanwhile.
    pub(crate) async fn refresh(&self, topic: &str, used: &Arc<TopicRoute>) -> Result<Arc<TopicRoute>, ClientError> {
        let _refreshing = self.refreshing.lock().await;
        let cached = locked(&self.topics).get(topic).cloned();
        match cached {
            Some(route) if !Arc::ptr_eq(&route, used) => Ok(route),
            _ => self.fetch_route(topic).await,
        }
    }

    /// The route of a topic from a broker; the cache has it afterwards.
    pub(crate) async fn fetch_route(&self, topic: &str) -> Result<Arc<TopicRoute>, ClientError> {
        let connection = self.any_connection().await?;
        let request =
            Request::Metadata(MetadataRequest { topics: vec![topic.to_owned()], ..MetadataRequest::default() });
        let frame = connection.request(&request, Vec::new()).await?.into_result()?;
        let mut metadata = match frame.response {
            Response::Metadata(metadata) => metadata,
            other => return Err(ClientError::unexpected("metadata", &other)),
        };
        if metadata.cluster_id != connection.server().cluster_id {
            return Err(ClientError::Protocol("metadata of another cluster than the hello's".to_owned()));
        }
        let Some(at) = metadata.topics.iter().position(|answer| answer.name == topic) else {
            return Err(ClientError::Protocol(format!("metadata lacks topic `{topic}`, which was asked for")));
        };
        let topic_metadata = metadata.topics.swap_remove(at);
        if !topic_metadata.code.is_ok() {
            self.forget(topic);
            let message = format!("topic `{topic}`: {}", topic_metadata.code.sentence());
            return Err(ClientError::server(topic_metadata.code, message.into(), 0));
        }
        let route = TopicRoute { topic: with_partitions_in_order(topic_metadata)?, brokers: metadata.brokers };
        *locked(&self.common_addresses) =
            route.brokers.iter().map(|broker| address(&broker.host, broker.port)).collect();
        let route = Arc::new(route);
        locked(&self.topics).insert(topic.to_owned(), Arc::clone(&route));
        Ok(route)
    }

    pub(crate) fn forget(&self, topic: &str) {
        locked(&self.topics).remove(topic);
    }

    /// Ends of all partitions of a topic, from each broker that has some.
    pub(crate) async fn offsets(&self, topic: &str) -> Result<Offsets, ClientError> {
        let route = self.fetch_route(topic).await?;
        let topic_id = route.topic.topic_id;
        let mut by_broker: HashMap<u32, Vec<u32>> = HashMap::new();
        for partition in &route.topic.partitions {
            by_broker.entry(partition.broker_id).or_default().push(partition.partition);
        }
        let mut all = Offsets { topic_id, partitions: Vec::new() };
        for partitions in by_broker.into_values() {
            let connection = self.connection_to(&route, partitions[0]).await?;
            let request = Request::Offsets(OffsetsRequest { topic_id, partitions });
            match connection.request(&request, Vec::new()).await?.into_result()?.response {
                Response::Offsets(offsets) => all.partitions.extend(offsets.partitions),
                other => return Err(ClientError::unexpected("offsets", &other)),
            }
        }
        if let Some(failed) = all.partitions.iter().find(|partition| !partition.code.is_ok()) {
            let message = format!("offsets of `{topic}` partition {}", failed.partition);
            return Err(ClientError::server(failed.code, message.into(), 0));
        }
        all.partitions.sort_by_key(|partition| partition.partition);
        Ok(all)
    }
}

/// Sorts the partitions, so that each stands at its number; a list with holes can't be used.
fn with_partitions_in_order(mut topic: TopicMetadata) -> Result<TopicMetadata, ClientError> {
    topic.partitions.sort_by_key(|partition| partition.partition);
    let in_order = (0u32..).zip(&topic.partitions).all(|(number, partition)| partition.partition == number);
    if in_order && !topic.partitions.is_empty() {
        Ok(topic)
    } else {
        Err(ClientError::Protocol(format!("metadata of topic `{}` lacks partitions", topic.name)))
    }
}

fn address(host: &str, port: u16) -> String {
    // An IPv6 address needs brackets before a port.
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}
