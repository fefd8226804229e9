//! The Rust client, on tokio: topics and metadata here, records through [`Producer`] and [`Consumer`], single requests
//! through [`Connection`].
//!
//! A [`Client`] keeps one connection for each address it uses. It asks metadata which shard owns a partition and goes to
//! that shard's direct port, or to the common port when the direct one does not answer. Whatever may succeed later is
//! tried again, with a back-off, until `retry_for` has passed.

mod backoff;
mod connection;
mod consumer;
mod error;
mod fetcher;
mod lane;
mod numbering;
mod pipeline;
mod producer;
mod routes;
mod stream;
mod unpacking;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use connection::{Connection, ConnectionConfig, OwnedFrame, PendingResponse};
pub use consumer::{ConsumedBatch, Consumer, ConsumerConfig, ConsumerEvent, PartitionEnds, StartAt};
pub use error::ClientError;
pub use lane::{Delivered, Delivery};
pub use numbering::ProducerIdentity;
pub use producer::{Producer, ProducerConfig, ProducerStats};
pub use routes::TopicRoute;

pub use crate::topic::CreateTopicRequest as NewTopic;
pub use ringmain_core::topic::{TopicAlteration, TopicSettings};

use crate::client::backoff::Backoff;
use crate::client::routes::Routes;
use crate::message::{Request, Response};
use crate::metadata::{Metadata, MetadataRequest, TopicMetadata};
use crate::offsets::Offsets;
use crate::topic::{AlterTopicRequest, DeleteTopicRequest, TopicResponse};

/// Topics on one page of metadata: a few hundred KiB when each has ten partitions.
const METADATA_PAGE_TOPICS: u32 = 1000;

/// How a client reaches its cluster, and how patient it is.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// `host:port` of one or more brokers, tried in turn.
    pub bootstrap: Vec<String>,
    /// Name that the server's logs show.
    pub client_name: String,
    /// Go to the ports of the owning shards where they answer.
    pub use_direct_ports: bool,
    /// How long a connection attempt may take.
    pub connect_timeout: Duration,
    /// A connection whose oldest request has waited so long past its own time is given up.
    pub request_timeout: Duration,
    /// How long to go on trying what may succeed later.
    pub retry_for: Duration,
}

impl ClientConfig {
    /// The defaults, for these brokers.
    #[must_use]
    pub fn new(bootstrap: Vec<String>) -> Self {
        Self {
            bootstrap,
            client_name: concat!("ringmain-rust/", env!("CARGO_PKG_VERSION")).to_owned(),
            use_direct_ports: true,
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(30),
            retry_for: Duration::from_secs(60),
        }
    }
}

/// A client of one cluster. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct Client {
    routes: Arc<Routes>,
}

impl Client {
    /// Connects to the first broker that answers.
    pub async fn connect(config: ClientConfig) -> Result<Self, ClientError> {
        let client = Self { routes: Arc::new(Routes::new(config)) };
        client.retrying(|| client.routes.any_connection()).await?;
        Ok(client)
    }

    /// What the cluster has, all topics included, in the order of their names. It is asked for page by page: a topic that is
    /// made or deleted meanwhile may be there or not. The version is that of the first page: what was changed since is newer.
    pub async fn metadata(&self) -> Result<Metadata, ClientError> {
        let mut all = self.metadata_page(String::new()).await?;
        while all.more {
            let after = all.topics.last().map(|topic| topic.name.clone()).unwrap_or_default();
            let page = self.metadata_page(after.clone()).await?;
            if page.topics.first().is_none_or(|first| first.name <= after) {
                return Err(ClientError::Protocol("a page of metadata does not go on where the last one ended".into()));
            }
            all.topics.extend(page.topics);
            all.more = page.more;
        }
        Ok(all)
    }

    async fn metadata_page(&self, after: String) -> Result<Metadata, ClientError> {
        let request = MetadataRequest { after, limit: METADATA_PAGE_TOPICS, ..MetadataRequest::default() };
        match self.call(Request::Metadata(request)).await? {
            Response::Metadata(metadata) => Ok(metadata),
            other => Err(ClientError::unexpected("metadata", &other)),
        }
    }

    /// All topics.
    pub async fn list_topics(&self) -> Result<Vec<TopicMetadata>, ClientError> {
        Ok(self.metadata().await?.topics)
    }

    /// One topic with its partitions, from the server and not from the cache.
    pub async fn topic(&self, name: &str) -> Result<TopicMetadata, ClientError> {
        let route = self.retrying(|| self.routes.fetch_route(name)).await?;
        Ok(route.topic.clone())
    }

    /// Makes a topic. When the connection is lost meanwhile it is tried again, and may then say `TOPIC_EXISTS` although it
    /// was this very call that made it.
    pub async fn create_topic(&self, topic: NewTopic) -> Result<TopicMetadata, ClientError> {
        self.call_topic(Request::CreateTopic(topic)).await.map(|response| response.topic)
    }

    /// Changes settings of a topic; gives it as it is now. What the change does not name stays as it is.
    pub async fn alter_topic(&self, name: &str, change: TopicAlteration) -> Result<TopicMetadata, ClientError> {
        let request = Request::AlterTopic(AlterTopicRequest { name: name.to_owned(), change });
        self.call_topic(request).await.map(|response| response.topic)
    }

    /// Deletes a topic and its records. When the connection is lost meanwhile it is tried again, and may then say
    /// `TOPIC_NOT_FOUND` although it was this very call that deleted it.
    pub async fn delete_topic(&self, name: &str) -> Result<TopicMetadata, ClientError> {
        let request = Request::DeleteTopic(DeleteTopicRequest { name: name.to_owned() });
        let response = self.call_topic(request).await?;
        self.routes.forget(name);
        Ok(response.topic)
    }

    /// Ends of all partitions of a topic, by partition.
    pub async fn offsets(&self, topic: &str) -> Result<Offsets, ClientError> {
        self.retrying(|| self.routes.offsets(topic)).await
    }

    /// A producer for one topic.
    pub async fn producer(&self, topic: &str, config: ProducerConfig) -> Result<Producer, ClientError> {
        let route = self.retrying(|| self.routes.fetch_route(topic)).await?;
        Ok(Producer::new(Arc::clone(&self.routes), &route, config))
    }

    /// A consumer of some partitions of a topic.
    pub async fn consumer(
        &self,
        topic: &str,
        partitions: Vec<(u32, StartAt)>,
        config: ConsumerConfig,
    ) -> Result<Consumer, ClientError> {
        let route = self.retrying(|| self.routes.fetch_route(topic)).await?;
        let offsets = match partitions.iter().all(|(_, start)| matches!(start, StartAt::Offset(_))) {
            true => Offsets::default(),
            false => self.offsets(topic).await?,
        };
        Consumer::start(Arc::clone(&self.routes), &route, &offsets, partitions, config)
    }

    /// A connection to some broker, for requests of one's own.
    pub async fn any_connection(&self) -> Result<Connection, ClientError> {
        self.routes.any_connection().await
    }

    /// The connection on which requests for this partition go: to its shard's direct port if that answers.
    pub async fn connection_for(&self, topic: &str, partition: u32) -> Result<Connection, ClientError> {
        let route = self.routes.route(topic).await?;
        self.routes.connection_to(&route, partition).await
    }

    async fn call_topic(&self, request: Request) -> Result<TopicResponse, ClientError> {
        match self.call(request).await? {
            Response::Topic(response) => Ok(response),
            other => Err(ClientError::unexpected("topic", &other)),
        }
    }

    /// Sends a request to any broker until it is answered or can't succeed.
    async fn call(&self, request: Request) -> Result<Response, ClientError> {
        self.retrying(|| async {
            let connection = self.routes.any_connection().await?;
            connection.request(&request, Vec::new()).await?.into_result().map(|frame| frame.response)
        })
        .await
    }

    async fn retrying<T, F>(&self, mut attempt: impl FnMut() -> F) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, ClientError>>,
    {
        let mut backoff = Backoff::until(Instant::now() + self.routes.config().retry_for);
        loop {
            match attempt().await {
                Ok(value) => return Ok(value),
                Err(error) => backoff.wait(error).await?,
            }
        }
    }
}

#[cfg(test)]
mod fake_broker;
#[cfg(test)]
mod tests;
