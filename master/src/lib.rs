//! The control plane: topics and their placement in redb, behind frames, an HTTP API and a console. An ordinary tokio
//! program on threads of its own, never on the data path.
//!
//! Read in this order: [`Master`], `store`, `topic`, `frames`, `listener`, `http_api`, `console`; [`probe_http`] serves
//! the probes of any process.
#![forbid(unsafe_code)]

mod console;
mod frames;
mod http_api;
mod http_server;
mod link;
mod listener;
mod master;
pub mod probe_http;
mod runtime;
mod store;
mod topic;

pub use http_server::ListenError;
pub use link::{Applied, BrokerAddress, BrokerLink};
pub use master::{Master, MasterAddresses, StartError};
pub use store::{NewStore, OpenError, StoreError};
pub use topic::{Reconciled, ServiceError, TopicPage, TopicView};
