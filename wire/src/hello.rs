//! The first frame of a connection, each way: versions, features, names, limits, and room for sign-in.

use ringmain_core::limits::{
    BATCH_BYTES_MAX, CLIENT_NAME_BYTES_MAX, CONNECTION_BYTES_MAX, CONNECTION_REQUESTS_MAX, FETCH_BYTES_MAX,
    FRAME_BYTES_MAX, RECORD_BYTES_MAX, SIGN_IN_BYTES_MAX,
};

use crate::frame::FrameEncoder;
use crate::message::{Builder, BuiltBody, DecodeError, Text, build_text, decode_text, within};
use crate::schema;

/// The protocol version of this crate. A server answers with the smaller of the client's and its own.
pub const PROTOCOL_VERSION: u16 = 1;
/// Feature bits of this version: none yet.
pub const FEATURES: u64 = 0;

/// What a client says first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HelloRequest {
    /// Newest version that the client speaks.
    pub protocol_version: u16,
    /// Features that the client can use.
    pub features: u64,
    /// For logs and metrics.
    pub client_name: String,
    /// How the client signs in; empty = not at all.
    pub auth_mechanism: String,
    /// First bytes of the sign-in.
    pub auth_data: Vec<u8>,
}

/// Limits of a server that a client must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Largest `frame_bytes` of a request.
    pub frame_bytes_max: u32,
    /// Largest batch.
    pub batch_bytes_max: u32,
    /// Largest record: key, headers and value together.
    pub record_bytes_max: u32,
    /// Largest byte budget of a fetch.
    pub fetch_bytes_max: u32,
    /// Requests of one connection that may wait for their answer.
    pub connection_requests_max: u32,
    /// Bytes of requests of one connection that may wait for their answer.
    pub connection_bytes_max: u32,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            frame_bytes_max: FRAME_BYTES_MAX as u32,
            batch_bytes_max: BATCH_BYTES_MAX as u32,
            record_bytes_max: RECORD_BYTES_MAX as u32,
            fetch_bytes_max: FETCH_BYTES_MAX as u32,
            connection_requests_max: CONNECTION_REQUESTS_MAX as u32,
            connection_bytes_max: CONNECTION_BYTES_MAX as u32,
        }
    }
}

/// What a server answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HelloResponse {
    /// The version that both will speak.
    pub protocol_version: u16,
    /// Features that both can use.
    pub features: u64,
    /// Name and version of the server, for logs.
    pub server_name: Text,
    /// Number of the broker in its cluster.
    pub broker_id: u32,
    /// Which cluster.
    pub cluster_id: u64,
    /// Shard that this connection has landed on.
    pub shard: u16,
    /// What the client must keep to.
    pub limits: ServerLimits,
}

impl HelloRequest {
    pub(crate) fn decode(body: &schema::HelloRequest<'_>) -> Result<Self, DecodeError> {
        let name = body.client_name().unwrap_or_default();
        let mechanism = body.auth_mechanism().unwrap_or_default();
        let data = body.auth_data().map(|data| data.bytes()).unwrap_or_default();
        within("client_name", name.len(), CLIENT_NAME_BYTES_MAX)?;
        within("auth_mechanism", mechanism.len(), CLIENT_NAME_BYTES_MAX)?;
        within("auth_data", data.len(), SIGN_IN_BYTES_MAX)?;
        Ok(Self {
            protocol_version: body.protocol_version(),
            features: body.features(),
            client_name: name.to_owned(),
            auth_mechanism: mechanism.to_owned(),
            auth_data: data.to_vec(),
        })
    }

    pub(crate) fn build(&self, builder: &mut Builder) -> BuiltBody {
        let client_name = build_text(builder, &self.client_name);
        let auth_mechanism = build_text(builder, &self.auth_mechanism);
        let auth_data = (!self.auth_data.is_empty()).then(|| builder.create_vector(&self.auth_data));
        let args = schema::HelloRequestArgs {
            protocol_version: self.protocol_version,
            features: self.features,
            client_name,
            auth_mechanism,
            auth_data,
        };
        (schema::Body::HelloRequest, schema::HelloRequest::create(builder, &args).as_union_value())
    }
}

impl HelloResponse {
    pub(crate) fn decode(body: &schema::HelloResponse<'_>) -> Self {
        // A server that states no limits has those of this version.
        let limits = body.limits().map_or_else(ServerLimits::default, |limits| ServerLimits {
            frame_bytes_max: limits.frame_bytes_max(),
            batch_bytes_max: limits.batch_bytes_max(),
            record_bytes_max: limits.record_bytes_max(),
            fetch_bytes_max: limits.fetch_bytes_max(),
            connection_requests_max: limits.connection_requests_max(),
            connection_bytes_max: limits.connection_bytes_max(),
        });
        Self {
            protocol_version: body.protocol_version(),
            features: body.features(),
            server_name: decode_text(body.server_name()),
            broker_id: body.broker_id(),
            cluster_id: body.cluster_id(),
            shard: body.shard(),
            limits,
        }
    }
}

/// Appends the frame that answers a hello.
pub fn encode_hello(encoder: &mut FrameEncoder, correlation_id: u64, response: &HelloResponse, out: &mut Vec<u8>) {
    encoder.head(correlation_id, 0, out, |builder| {
        let server_name = build_text(builder, &response.server_name);
        let limits = schema::LimitsArgs {
            frame_bytes_max: response.limits.frame_bytes_max,
            batch_bytes_max: response.limits.batch_bytes_max,
            record_bytes_max: response.limits.record_bytes_max,
            fetch_bytes_max: response.limits.fetch_bytes_max,
            connection_requests_max: response.limits.connection_requests_max,
            connection_bytes_max: response.limits.connection_bytes_max,
        };
        let limits = schema::Limits::create(builder, &limits);
        let args = schema::HelloResponseArgs {
            protocol_version: response.protocol_version,
            features: response.features,
            server_name,
            broker_id: response.broker_id,
            cluster_id: response.cluster_id,
            shard: response.shard,
            limits: Some(limits),
        };
        (schema::Body::HelloResponse, schema::HelloResponse::create(builder, &args).as_union_value())
    });
}
