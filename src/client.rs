//! What every command that talks to a broker starts with: a runtime and a connected client.

use std::time::Duration;

use anyhow::{Context, Result};
use ringmain_wire::client::{Client, ClientConfig};

use crate::cli::ClientArgs;

/// How long a command without its own patience goes on trying: people wait for it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs a command to its end.
pub fn run<T>(command: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("can't start the client's threads")?;
    let result = runtime.block_on(command);
    // A thread that is stuck in reading standard input must not hold up the end.
    runtime.shutdown_background();
    result
}

/// Connects to the first of the brokers that answers.
pub async fn connect(args: &ClientArgs, patience: Option<Duration>) -> Result<Client> {
    let bootstrap: Vec<String> = args.broker.iter().map(ToString::to_string).collect();
    let config = ClientConfig {
        client_name: concat!("ringmain/", env!("CARGO_PKG_VERSION")).to_owned(),
        retry_for: patience.unwrap_or(PATIENCE),
        ..ClientConfig::new(bootstrap.clone())
    };
    Client::connect(config).await.with_context(|| {
        format!(
            "no broker at {}: start one with `ringmain serve`, or name another with --broker or RINGMAIN_BROKER",
            bootstrap.join(", ")
        )
    })
}
