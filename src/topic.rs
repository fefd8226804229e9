//! `ringmain topic create | list | describe | alter | delete`.

use anyhow::{Context, Result};
use ringmain_core::limits::TOPIC_STORES_MAX;
use ringmain_wire::client::{Client, NewTopic, TopicAlteration, TopicSettings};
use ringmain_wire::metadata::TopicMetadata;
use ringmain_wire::offsets::Offsets;
use serde_json::{Value, json};

use crate::cli::{TopicCommand, TopicOutput, show_ms};
use crate::client::{connect, run};
use crate::config::{show_about, show_size};
use crate::output::{print_json, print_text, show_time, table};

/// Runs one of the commands.
pub fn topic(command: TopicCommand) -> Result<()> {
    run(async {
        match command {
            TopicCommand::Create { name, partitions, stores, settings, output } => {
                let stores = stores.unwrap_or(0).min(TOPIC_STORES_MAX + 1);
                let settings = settings.alteration().apply(TopicSettings::default())?;
                let new = NewTopic { name, partitions, stores, settings };
                create(&open(&output).await?, new, &output).await
            }
            TopicCommand::List { output } => list(&open(&output).await?, &output).await,
            TopicCommand::Describe { name, output } => describe(&open(&output).await?, &name, &output).await,
            TopicCommand::Alter { name, settings, output } => {
                alter(&open(&output).await?, &name, settings.alteration(), &output).await
            }
            TopicCommand::Delete { name, output } => delete(&open(&output).await?, &name, &output).await,
        }
    })
}

async fn open(output: &TopicOutput) -> Result<Client> {
    connect(&output.client, None).await
}

async fn create(client: &Client, new: NewTopic, output: &TopicOutput) -> Result<()> {
    let name = new.name.clone();
    let topic = client.create_topic(new).await.with_context(|| format!("can't create topic {name}"))?;
    if output.json {
        return print_json(&topic_json(&topic));
    }
    let (partitions, stores) = (topic.partitions.len(), topic.stores);
    print_text(&format!("created topic {name}: id {}, {partitions} partitions, {stores} stores\n", topic.topic_id))
}

async fn list(client: &Client, output: &TopicOutput) -> Result<()> {
    let mut metadata = client.metadata().await.context("can't list topics")?;
    metadata.topics.sort_by(|a, b| a.name.cmp(&b.name));
    if output.json {
        let topics: Vec<_> = metadata.topics.iter().map(topic_json).collect();
        return print_json(&json!({ "version": metadata.version, "topics": topics }));
    }
    let row = |topic: &TopicMetadata| {
        vec![
            topic.name.clone(),
            topic.topic_id.to_string(),
            topic.partitions.len().to_string(),
            topic.stores.to_string(),
            topic.settings.durability_default.to_string(),
            topic.settings.durability_floor.to_string(),
            topic.settings.compression.to_string(),
            show_retention(&topic.settings),
        ]
    };
    let rows: Vec<_> = metadata.topics.iter().map(row).collect();
    print_text(&table(
        &["TOPIC", "ID", "PARTITIONS", "STORES", "DURABILITY", "FLOOR", "COMPRESSION", "RETENTION"],
        &rows,
    ))
}

async fn describe(client: &Client, name: &str, output: &TopicOutput) -> Result<()> {
    let failed = || format!("can't describe topic {name}");
    let topic = client.topic(name).await.with_context(failed)?;
    let offsets = client.offsets(name).await.with_context(failed)?;
    if output.json {
        let mut described = topic_json(&topic);
        described["partitions"] = partitions_json(&topic, &offsets);
        described["unsynced_bytes"] = unsynced_bytes(&offsets).into();
        described["unsynced_ms"] = unsynced_ms(&offsets).into();
        return print_json(&described);
    }
    let mut text = format!(
        "topic {name}: id {}, {} partitions, {} stores, created {}\n",
        topic.topic_id,
        topic.partitions.len(),
        topic.stores,
        show_time(topic.created_ms)
    );
    text.push_str(&show_settings(&topic.settings));
    text.push_str(&match unsynced_bytes(&offsets) {
        0 => "a power cut now would take nothing that was acked\n\n".to_owned(),
        bytes => format!(
            "a power cut now would take up to {} acked at `memory` or `flushed` in the last {} ms\n\n",
            show_about(bytes),
            unsynced_ms(&offsets)
        ),
    });
    let rows: Vec<_> = offsets
        .partitions
        .iter()
        .map(|ends| {
            let place = topic.partitions.iter().find(|partition| partition.partition == ends.partition);
            let numbers = [
                u64::from(ends.partition),
                place.map_or(0, |place| u64::from(place.store)),
                place.map_or(0, |place| u64::from(place.shard)),
                u64::from(ends.leader_epoch.get()),
                ends.log_start.get(),
                ends.log_end.get(),
                ends.flushed_end.get(),
                ends.synced_end.get(),
                ends.unsynced_bytes,
                u64::from(ends.unsynced_ms),
            ];
            let mut row: Vec<String> = numbers.iter().map(u64::to_string).collect();
            row.push(if ends.code.is_ok() { "ok".to_owned() } else { ends.code.name().to_owned() });
            row
        })
        .collect();
    let headings = [
        "PARTITION",
        "STORE",
        "SHARD",
        "EPOCH",
        "LOG START",
        "LOG END",
        "FLUSHED END",
        "SYNCED END",
        "UNSYNCED BYTES",
        "FOR MS",
        "STATE",
    ];
    text.push_str(&table(&headings, &rows));
    print_text(&text)
}

async fn alter(client: &Client, name: &str, change: TopicAlteration, output: &TopicOutput) -> Result<()> {
    let topic = client.alter_topic(name, change).await.with_context(|| format!("can't alter topic {name}"))?;
    if output.json {
        return print_json(&topic_json(&topic));
    }
    print_text(&format!("altered topic {name}\n{}", show_settings(&topic.settings)))
}

async fn delete(client: &Client, name: &str, output: &TopicOutput) -> Result<()> {
    let topic = client.delete_topic(name).await.with_context(|| format!("can't delete topic {name}"))?;
    if output.json { print_json(&topic_json(&topic)) } else { print_text(&format!("deleted topic {name}\n")) }
}

fn show_settings(settings: &TopicSettings) -> String {
    format!(
        "durability: default {}, floor {}\ncompression: {}\nretention: {}\n",
        settings.durability_default,
        settings.durability_floor,
        settings.compression,
        show_retention(settings)
    )
}

fn show_retention(settings: &TopicSettings) -> String {
    match (settings.retention_ms.map(show_ms), settings.retention_bytes.map(show_size)) {
        (None, None) => "none".to_owned(),
        (Some(time), None) => time,
        (None, Some(size)) => size,
        (Some(time), Some(size)) => format!("{time}, {size}"),
    }
}

fn unsynced_bytes(offsets: &Offsets) -> u64 {
    offsets.partitions.iter().map(|ends| ends.unsynced_bytes).sum()
}

fn unsynced_ms(offsets: &Offsets) -> u32 {
    offsets.partitions.iter().map(|ends| ends.unsynced_ms).max().unwrap_or(0)
}

fn topic_json(topic: &TopicMetadata) -> Value {
    json!({
        "name": topic.name,
        "id": topic.topic_id.get(),
        "partitions": topic.partitions.len(),
        "stores": topic.stores,
        "durability_default": topic.settings.durability_default.name(),
        "durability_floor": topic.settings.durability_floor.name(),
        "compression": topic.settings.compression.name(),
        "retention_ms": topic.settings.retention_ms,
        "retention_bytes": topic.settings.retention_bytes,
        "created_ms": topic.created_ms,
    })
}

fn partitions_json(topic: &TopicMetadata, offsets: &Offsets) -> Value {
    let partitions = offsets.partitions.iter().map(|ends| {
        let place = topic.partitions.iter().find(|partition| partition.partition == ends.partition);
        json!({
            "partition": ends.partition,
            "store": place.map(|place| place.store),
            "broker_id": place.map(|place| place.broker_id),
            "shard": place.map(|place| place.shard),
            "leader_epoch": ends.leader_epoch.get(),
            "code": ends.code.0,
            "log_start": ends.log_start.get(),
            "log_end": ends.log_end.get(),
            "flushed_end": ends.flushed_end.get(),
            "synced_end": ends.synced_end.get(),
            "unsynced_bytes": ends.unsynced_bytes,
            "unsynced_ms": ends.unsynced_ms,
        })
    });
    partitions.collect()
}
