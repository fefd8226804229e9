//! The probe port of a process.

use ringmain_master::probe_http::{ProbeServer, ProbeSources};
use serde_json::json;

use crate::http::send;

#[test]
fn metrics_health_and_readiness_come_from_their_sources() {
    let sources = ProbeSources {
        metrics: Box::new(|| "ringmain_up 1\n".to_owned()),
        health: Box::new(|| (true, json!({ "healthy": true }))),
        ready: Box::new(|| (false, json!({ "ready": false }))),
    };
    let server = ProbeServer::start("127.0.0.1:0", sources).unwrap();
    let (status, head, body) = send(server.address(), "GET /metrics HTTP/1.1", "");
    assert_eq!((status, body.as_str()), (200, "ringmain_up 1\n"));
    assert!(head.contains("text/plain; version=0.0.4"));
    let (status, _, body) = send(server.address(), "GET /healthz HTTP/1.1", "");
    assert_eq!((status, body.as_str()), (200, r#"{"healthy":true}"#));
    assert_eq!(send(server.address(), "GET /readyz HTTP/1.1", "").0, 503);
    assert_eq!(send(server.address(), "GET /other HTTP/1.1", "").0, 404);
    server.stop();
}

#[test]
fn a_report_that_panics_is_no_good_health() {
    let sources = ProbeSources {
        metrics: Box::new(String::new),
        health: Box::new(|| panic!("broken")),
        ready: Box::new(|| (true, json!({}))),
    };
    let server = ProbeServer::start("127.0.0.1:0", sources).unwrap();
    assert_eq!(send(server.address(), "GET /healthz HTTP/1.1", "").0, 503);
    assert_eq!(send(server.address(), "GET /readyz HTTP/1.1", "").0, 200);
    server.stop();
}
