//! The master's JSON API under `/api/v1`.
//!
//! | request | answer |
//! |---|---|
//! | `GET /api/v1/topics?limit=N&after=NAME` | `{"version", "total", "topics": […], "next"}`; `next` is null on the last page |
//! | `GET /api/v1/topics/NAME` | the topic with its `partition_stores` |
//! | `POST /api/v1/topics` `{"name", "partitions", "stores", SETTINGS}` | 201 and the topic |
//! | `PATCH /api/v1/topics/NAME` `{SETTINGS}` | the topic; what is not named stays, null removes a bound |
//! | `DELETE /api/v1/topics/NAME` | `{"version", "deleted"}` |
//! | `GET /api/v1/cluster` | `{"cluster_id", "version", "topics", "broker"}` |
//!
//! SETTINGS are `"durability_default", "durability_floor", "compression", "retention_ms", "retention_bytes"`.
//!
//! Failures are `{"code", "name", "message", "action"}` with the codes of the protocol. A POST or PATCH must say that it is
//! JSON, so that no web page can send one from a visitor's browser.

use std::sync::Arc;

use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use ringmain_core::codec::{Compression, UnknownCompression};
use ringmain_core::ids::{Durability, UnknownDurability};
use ringmain_core::limits::HTTP_PAGE_TOPICS_MAX;
use ringmain_core::topic::{TopicAlteration, TopicSettings};
use ringmain_wire::ErrorCode;
use ringmain_wire::topic::CreateTopicRequest;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::json;

use crate::console;
use crate::topic::{ServiceError, TopicService, TopicView};

/// Topics on a page when the request does not say.
pub(crate) const PAGE_TOPICS: usize = 100;

type Service = State<Arc<TopicService>>;
/// The topic of a path; what is no text is refused as everything else is.
type Name = Result<Path<String>, PathRejection>;

/// API and console.
pub(crate) fn router(service: Arc<TopicService>) -> Router {
    Router::new()
        .route("/", get(console::page))
        .route("/api/v1/cluster", get(cluster))
        .route("/api/v1/topics", get(list).post(create))
        .route("/api/v1/topics/{name}", get(describe).patch(alter).delete(delete))
        .fallback(no_page)
        .method_not_allowed_fallback(no_method)
        .with_state(service)
}

/// A failure on its way to JSON.
struct Failure {
    status: StatusCode,
    code: ErrorCode,
    message: String,
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let body = json!({
            "code": self.code.0,
            "name": self.code.name(),
            "message": self.message,
            "action": self.code.action().name(),
        });
        (self.status, Json(body)).into_response()
    }
}

impl From<ServiceError> for Failure {
    fn from(error: ServiceError) -> Self {
        let status = match error {
            ServiceError::Invalid(_) => StatusCode::BAD_REQUEST,
            ServiceError::Exists(_) => StatusCode::CONFLICT,
            ServiceError::NotFound(_) => StatusCode::NOT_FOUND,
            ServiceError::Limit { .. } | ServiceError::TooLarge(_) => StatusCode::UNPROCESSABLE_ENTITY,
            ServiceError::Store(_) | ServiceError::NotApplied { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            ServiceError::Slow(_) => StatusCode::GATEWAY_TIMEOUT,
            ServiceError::NoBroker | ServiceError::Busy => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self { status, code: error.code(), message: error.to_string() }
    }
}

impl From<PathRejection> for Failure {
    fn from(rejection: PathRejection) -> Self {
        Self { status: rejection.status(), code: ErrorCode::BAD_REQUEST, message: rejection.body_text() }
    }
}

impl From<QueryRejection> for Failure {
    fn from(rejection: QueryRejection) -> Self {
        Self { status: rejection.status(), code: ErrorCode::BAD_REQUEST, message: rejection.body_text() }
    }
}

impl From<JsonRejection> for Failure {
    fn from(rejection: JsonRejection) -> Self {
        let status = rejection.status();
        let code = if status == StatusCode::PAYLOAD_TOO_LARGE { ErrorCode::TOO_LARGE } else { ErrorCode::BAD_REQUEST };
        Self { status, code, message: rejection.body_text() }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PageQuery {
    pub limit: Option<usize>,
    pub after: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateBody {
    name: String,
    #[serde(default = "one")]
    partitions: u32,
    #[serde(default)]
    stores: u32,
    durability_default: Option<String>,
    durability_floor: Option<String>,
    compression: Option<String>,
    retention_ms: Option<u64>,
    retention_bytes: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AlterBody {
    durability_default: Option<String>,
    durability_floor: Option<String>,
    compression: Option<String>,
    #[serde(default, deserialize_with = "present")]
    retention_ms: Option<Option<u64>>,
    #[serde(default, deserialize_with = "present")]
    retention_bytes: Option<Option<u64>>,
}

/// Tells null, which removes a bound, from a field that is not there.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<u64>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

fn level(word: Option<&str>) -> Result<Option<Durability>, Failure> {
    word.map(|word| word.parse().map_err(|error: UnknownDurability| bad_request(error.to_string()))).transpose()
}

fn compression(word: Option<&str>) -> Result<Option<Compression>, Failure> {
    word.map(|word| word.parse().map_err(|error: UnknownCompression| bad_request(error.to_string()))).transpose()
}

const fn one() -> u32 {
    1
}

#[derive(Serialize)]
struct TopicBody<'a> {
    id: u64,
    name: &'a str,
    partitions: usize,
    stores: u32,
    durability_default: &'static str,
    durability_floor: &'static str,
    compression: &'static str,
    retention_ms: Option<u64>,
    retention_bytes: Option<u64>,
    created_ms: i64,
    version: u64,
    /// `ready`, or `pending` while the broker does not have it yet.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition_stores: Option<&'a [u16]>,
}

impl<'a> TopicBody<'a> {
    fn new(view: &'a TopicView) -> Self {
        let info = &view.info;
        Self {
            id: info.id.get(),
            name: &info.name,
            partitions: info.partition_stores.len(),
            stores: info.stores,
            durability_default: info.settings.durability_default.name(),
            durability_floor: info.settings.durability_floor.name(),
            compression: info.settings.compression.name(),
            retention_ms: info.settings.retention_ms,
            retention_bytes: info.settings.retention_bytes,
            created_ms: info.created_ms,
            version: info.version,
            state: if view.applied { "ready" } else { "pending" },
            partition_stores: None,
        }
    }
}

async fn cluster(State(service): Service) -> Response {
    let page = service.page(None, 0);
    let broker = service.broker().map(|(address, survives)| {
        let (id, host, port) = (address.broker_id, address.host, address.port);
        json!({ "id": id, "host": host, "port": port, "survives_process_kill": survives })
    });
    // As hex: many JSON readers keep only 53 bits of a number.
    let cluster_id = format!("{:016x}", service.cluster_id());
    Json(json!({ "cluster_id": cluster_id, "version": page.version, "topics": page.total, "broker": broker }))
        .into_response()
}

async fn list(State(service): Service, query: Result<Query<PageQuery>, QueryRejection>) -> Result<Response, Failure> {
    let Query(query) = query?;
    let limit = query.limit.unwrap_or(PAGE_TOPICS);
    if !(1..=HTTP_PAGE_TOPICS_MAX).contains(&limit) {
        return Err(bad_request(format!("`limit` must be 1 to {HTTP_PAGE_TOPICS_MAX}")));
    }
    let page = service.page(query.after.as_deref(), limit);
    let topics: Vec<_> = page.topics.iter().map(TopicBody::new).collect();
    let body = json!({ "version": page.version, "total": page.total, "topics": topics, "next": page.next });
    Ok(Json(body).into_response())
}

async fn describe(State(service): Service, name: Name) -> Result<Response, Failure> {
    let Path(name) = name?;
    let view = service.get(&name)?;
    let body = TopicBody { partition_stores: Some(&view.info.partition_stores), ..TopicBody::new(&view) };
    Ok(Json(body).into_response())
}

async fn create(State(service): Service, body: Result<Json<CreateBody>, JsonRejection>) -> Result<Response, Failure> {
    let Json(body) = body?;
    let durability_floor = level(body.durability_floor.as_deref())?.unwrap_or_default();
    let settings = TopicSettings {
        // A floor alone raises the default with it.
        durability_default: level(body.durability_default.as_deref())?.unwrap_or(durability_floor),
        durability_floor,
        compression: compression(body.compression.as_deref())?.unwrap_or_default(),
        retention_ms: body.retention_ms,
        retention_bytes: body.retention_bytes,
    };
    let new = CreateTopicRequest { name: body.name, partitions: body.partitions, stores: body.stores, settings };
    let view = service.create(new).await?;
    Ok((StatusCode::CREATED, Json(TopicBody::new(&view))).into_response())
}

async fn alter(
    State(service): Service,
    name: Name,
    body: Result<Json<AlterBody>, JsonRejection>,
) -> Result<Response, Failure> {
    let Path(name) = name?;
    let Json(body) = body?;
    let change = TopicAlteration {
        durability_default: level(body.durability_default.as_deref())?,
        durability_floor: level(body.durability_floor.as_deref())?,
        compression: compression(body.compression.as_deref())?,
        retention_ms: body.retention_ms,
        retention_bytes: body.retention_bytes,
    };
    let view = service.alter(name, change).await?;
    Ok(Json(TopicBody::new(&view)).into_response())
}

async fn delete(State(service): Service, name: Name) -> Result<Response, Failure> {
    let Path(name) = name?;
    let (topic, version) = service.delete(name).await?;
    let deleted = TopicView { info: topic, applied: true };
    Ok(Json(json!({ "version": version, "deleted": TopicBody::new(&deleted) })).into_response())
}

async fn no_page(uri: Uri) -> Failure {
    let message = format!("there is nothing at {}: the API is under /api/v1/topics, the console at /", uri.path());
    Failure { status: StatusCode::NOT_FOUND, code: ErrorCode::BAD_REQUEST, message }
}

async fn no_method(method: Method, uri: Uri) -> Failure {
    let message = format!("{} does not take {method}", uri.path());
    Failure { status: StatusCode::METHOD_NOT_ALLOWED, code: ErrorCode::BAD_REQUEST, message }
}

fn bad_request(message: String) -> Failure {
    Failure { status: StatusCode::BAD_REQUEST, code: ErrorCode::BAD_REQUEST, message }
}
