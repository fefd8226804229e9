//! The broker as the load sees it: a control connection, the address of each shard, and the topics of a run.
//!
//! Load goes straight to the port of the shard that owns a partition, over one connection per client and shard, however
//! many topics there are; or all of it to the common port, if asked to.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use ringmain_core::codec::Compression;
use ringmain_core::ids::PartitionKey;
use ringmain_core::topic::TopicSettings;
use ringmain_wire::client::{ClientError, Connection, ConnectionConfig};
use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::metadata::{Metadata, MetadataRequest, TopicMetadata};
use ringmain_wire::offsets::{Offsets, OffsetsRequest};
use ringmain_wire::topic::{CreateTopicRequest, DeleteTopicRequest};
use tokio::task::JoinSet;

/// Requests to the control plane that wait at once.
const CONTROL_REQUESTS: usize = 16;
/// Name of a topic that nobody makes.
const NO_TOPIC: &str = "_ringmain_bench";
/// Waits between two looks at the flushed ends.
const DRAIN_POLL: Duration = Duration::from_millis(20);

/// One partition that takes part in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its topic and number.
    pub key: PartitionKey,
    /// Which of [`Cluster::addresses`] serves it.
    pub shard: usize,
}

/// A broker and how to reach its shards.
pub(crate) struct Cluster {
    control: Connection,
    /// Address of each shard; only one, the common one, when direct ports are not used.
    pub addresses: Vec<String>,
    common_port: bool,
}

impl Cluster {
    /// Connects to `broker` and asks for the shards' ports, unless `common_port`.
    pub(crate) async fn connect(broker: &str, common_port: bool) -> Result<Self> {
        let control = connect(broker).await?;
        let mut cluster = Self { control, addresses: vec![broker.to_owned()], common_port };
        if !common_port {
            // No name would mean all topics, of which there may be very many.
            let metadata = cluster.metadata(&[NO_TOPIC.to_owned()]).await?;
            let [broker] = &metadata.brokers[..] else {
                bail!("the metadata names {} brokers: only one can be measured", metadata.brokers.len());
            };
            if broker.direct_ports.is_empty() {
                bail!("the broker has no direct ports: measure through the common port");
            }
            let host = if broker.host.contains(':') { format!("[{}]", broker.host) } else { broker.host.clone() };
            cluster.addresses = broker.direct_ports.iter().map(|port| format!("{host}:{port}")).collect();
        }
        Ok(cluster)
    }

    async fn metadata(&self, topics: &[String]) -> Result<Metadata> {
        let request = Request::Metadata(MetadataRequest { topics: topics.to_vec(), ..MetadataRequest::default() });
        match ask(&self.control, &request).await? {
            Response::Metadata(metadata) => Ok(metadata),
            other => Err(unexpected("metadata", &other)),
        }
    }

    /// The partitions of a topic that exists.
    pub(crate) async fn topic(&self, name: &str) -> Result<Vec<Target>> {
        self.targets_of(name, &self.metadata(&[name.to_owned()]).await?)
    }

    fn targets_of(&self, name: &str, metadata: &Metadata) -> Result<Vec<Target>> {
        let topic = metadata.topics.iter().find(|topic| topic.name == name && topic.code.is_ok());
        self.targets(topic.with_context(|| format!("there is no topic `{name}`"))?)
    }

    fn targets(&self, topic: &TopicMetadata) -> Result<Vec<Target>> {
        let mut targets = Vec::with_capacity(topic.partitions.len());
        for partition in &topic.partitions {
            let shard = if self.common_port { 0 } else { usize::from(partition.shard) };
            if shard >= self.addresses.len() {
                bail!("partition {} of `{}` is on shard {shard}, which has no port", partition.partition, topic.name);
            }
            let key = PartitionKey { topic: topic.topic_id, partition: partition.partition };
            targets.push(Target { key, shard });
        }
        Ok(targets)
    }

    /// Makes `topics` topics of `partitions` each, with names that no other run has. When one fails, those already
    /// made are removed.
    pub(crate) async fn make_topics(
        &self,
        run: u32,
        topics: usize,
        partitions: u32,
        compression: Compression,
    ) -> Result<RunTopics> {
        let names: Vec<String> = (0..topics).map(|index| format!("bench-{run:08x}-{index}")).collect();
        let mut made = RunTopics { names, targets: Vec::new() };
        match self.make_all(&made.names, partitions, compression).await {
            Ok(targets) => made.targets = targets,
            Err(error) => {
                made.remove(self).await;
                return Err(error.context("making the topics of the run"));
            }
        }
        Ok(made)
    }

    async fn make_all(&self, names: &[String], partitions: u32, compression: Compression) -> Result<Vec<Target>> {
        let create = |name: &String| {
            let settings = TopicSettings { compression, ..TopicSettings::default() };
            Request::CreateTopic(CreateTopicRequest { partitions, settings, ..CreateTopicRequest::new(name.clone()) })
        };
        self.ask_all(names.iter().map(create).collect()).await?;
        // The answers came from the master, which does not know the shards of a broker: the broker's metadata does.
        let describe = |name: &String| {
            Request::Metadata(MetadataRequest { topics: vec![name.clone()], ..MetadataRequest::default() })
        };
        let answers = self.ask_all(names.iter().map(describe).collect()).await?;
        let mut targets = Vec::new();
        for (name, answer) in names.iter().zip(&answers) {
            let Response::Metadata(metadata) = answer else { return Err(unexpected("metadata", answer)) };
            targets.extend(self.targets_of(name, metadata)?);
        }
        Ok(targets)
    }

    /// Sends all requests, some at a time; the answers in their order.
    async fn ask_all(&self, requests: Vec<Request>) -> Result<Vec<Response>> {
        let mut answers: Vec<Option<Response>> = requests.iter().map(|_| None).collect();
        let mut asking = JoinSet::new();
        for (index, request) in requests.into_iter().enumerate() {
            if asking.len() == CONTROL_REQUESTS
                && let Some(done) = asking.join_next().await
            {
                let (index, answer): (usize, Result<Response, ClientError>) = done?;
                answers[index] = Some(answer?);
            }
            let control = self.control.clone();
            asking.spawn(async move { (index, ask(&control, &request).await) });
        }
        while let Some(done) = asking.join_next().await {
            let (index, answer) = done?;
            answers[index] = Some(answer?);
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// The ends of all partitions, in the order of `targets`, which must stand topic by topic.
    pub(crate) async fn offsets(&self, targets: &[Target]) -> Result<Vec<Ends>> {
        let by_topic: Vec<&[Target]> = targets.chunk_by(|one, two| one.key.topic == two.key.topic).collect();
        let requests = by_topic.iter().map(|topic| {
            let partitions = topic.iter().map(|target| target.key.partition).collect();
            Request::Offsets(OffsetsRequest { topic_id: topic[0].key.topic, partitions })
        });
        let answers = self.ask_all(requests.collect()).await.context("asking for the ends of the partitions")?;
        let mut ends = Vec::with_capacity(targets.len());
        for (topic, answer) in by_topic.iter().zip(&answers) {
            let Response::Offsets(offsets) = answer else { return Err(unexpected("offsets", answer)) };
            for target in *topic {
                ends.push(ends_of(offsets, target)?);
            }
        }
        Ok(ends)
    }

    /// Waits until all that was acked is in the log file, at most `limit`: whether it is.
    pub(crate) async fn drained(&self, targets: &[Target], limit: Duration) -> Result<bool> {
        let give_up = tokio::time::Instant::now() + limit;
        // Partitions that were seen drained are not asked again: nobody produces any more.
        let mut waiting = targets.to_vec();
        loop {
            let ends = self.offsets(&waiting).await?;
            let mut drained = ends.iter().map(|end| end.flushed_end >= end.log_end);
            waiting.retain(|_| !drained.next().unwrap_or(false));
            if waiting.is_empty() {
                return Ok(true);
            }
            if tokio::time::Instant::now() >= give_up {
                return Ok(false);
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
    }
}

/// Ends of one partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ends {
    /// First offset kept.
    pub log_start: u64,
    /// One past the last offset given.
    pub log_end: u64,
    /// One past the last offset in the log file.
    pub flushed_end: u64,
}

fn ends_of(offsets: &Offsets, target: &Target) -> Result<Ends> {
    let of_partition = offsets.partitions.iter().find(|ends| ends.partition == target.key.partition);
    let ends = of_partition.with_context(|| format!("no ends of partition {} were sent", target.key))?;
    if !ends.code.is_ok() {
        bail!("partition {}: {}", target.key, ends.code);
    }
    Ok(Ends { log_start: ends.log_start.0, log_end: ends.log_end.0, flushed_end: ends.flushed_end.0 })
}

/// The topics of a run.
pub(crate) struct RunTopics {
    names: Vec<String>,
    /// All partitions of all of them, topic by topic.
    pub targets: Vec<Target>,
}

impl RunTopics {
    /// Removes the topics, also those whose making is not certain. What fails is said on stderr, with the names: the
    /// figures are good nevertheless.
    pub(crate) async fn remove(&self, cluster: &Cluster) {
        let mut left = Vec::new();
        for names in self.names.chunks(CONTROL_REQUESTS) {
            let requests = names.iter().map(|name| Request::DeleteTopic(DeleteTopicRequest { name: name.clone() }));
            if cluster.ask_all(requests.collect()).await.is_err() {
                // One of them may be gone already, or was never made: ask for each alone.
                for name in names {
                    let request = Request::DeleteTopic(DeleteTopicRequest { name: name.clone() });
                    if let Err(error) = ask(&cluster.control, &request).await
                        && error.code() != Some(ErrorCode::TOPIC_NOT_FOUND)
                    {
                        left.push((name, error));
                    }
                }
            }
        }
        if let Some((name, error)) = left.first() {
            eprintln!("{} topics of this run could not be removed, the first is `{name}`: {error}", left.len());
        }
    }
}

/// Connects to one port of the broker.
pub(crate) async fn connect(address: &str) -> Result<Connection, ClientError> {
    let config = ConnectionConfig { client_name: "ringmain-bench".to_owned(), ..ConnectionConfig::default() };
    Connection::connect(address, &config).await
}

async fn ask(control: &Connection, request: &Request) -> Result<Response, ClientError> {
    Ok(control.request(request, Vec::new()).await?.into_result()?.response)
}

fn unexpected(wanted: &str, answer: &Response) -> anyhow::Error {
    anyhow::anyhow!("the broker answered a request for {wanted} with {answer:?}")
}
