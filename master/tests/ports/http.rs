//! The HTTP API and the console.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

use crate::fake::{NEW, Running, master};

/// Sends one request, returns status, head and body.
pub fn send(address: SocketAddr, head: &str, body: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let length = body.len();
    let request = format!("{head}\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}");
    // A server that refuses a body early may close before it has taken all of it.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_owned(), body.to_owned())
}

fn call(running: &Running, method_path: &str, body: &Value) -> (u16, Value) {
    let head = format!("{method_path} HTTP/1.1\r\nContent-Type: application/json");
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let (status, _, answer) = send(running.master.addresses().http, &head, &body);
    (status, serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}")))
}

#[test]
fn a_topic_is_made_listed_described_and_deleted() {
    let running = master();
    let (status, made) = call(
        &running,
        "POST /api/v1/topics",
        &json!({ "name": "orders", "partitions": 4, "durability_floor": "flushed" }),
    );
    assert_eq!(status, 201, "{made}");
    assert_eq!((&made["id"], &made["stores"], &made["state"]), (&json!(1), &json!(2), &json!("ready")));
    assert_eq!((&made["durability_default"], &made["durability_floor"]), (&json!("flushed"), &json!("flushed")));
    let (_, list) = call(&running, "GET /api/v1/topics", &Value::Null);
    assert_eq!((&list["total"], &list["next"], &list["topics"][0]), (&json!(1), &Value::Null, &made));
    let (_, one) = call(&running, "GET /api/v1/topics/orders", &Value::Null);
    assert_eq!(one["partition_stores"], json!([0, 1, 0, 1]));
    let (_, cluster) = call(&running, "GET /api/v1/cluster", &Value::Null);
    assert_eq!((&cluster["topics"], &cluster["broker"]["port"]), (&json!(1), &json!(8123)));
    let (status, deleted) = call(&running, "DELETE /api/v1/topics/orders", &Value::Null);
    assert_eq!((status, &deleted["deleted"]["name"]), (200, &json!("orders")));
    let (status, gone) = call(&running, "GET /api/v1/topics/orders", &Value::Null);
    assert_eq!((status, &gone["code"], &gone["name"]), (404, &json!(431), &json!("TOPIC_NOT_FOUND")));
}

#[test]
fn every_failure_is_typed_json() {
    let running = master();
    call(&running, "POST /api/v1/topics", &json!({ "name": "taken" }));
    let large = json!({ "name": "x".repeat(100_000) });
    for (request, body, status, code) in [
        ("POST /api/v1/topics", json!({ "name": "taken" }), 409, 607),
        ("POST /api/v1/topics", json!({ "name": "a b" }), 400, 400),
        ("POST /api/v1/topics", json!({ "name": "a", "partitions": 0 }), 400, 400),
        ("POST /api/v1/topics", json!({ "name": "a", "durability_default": "soon" }), 400, 400),
        ("POST /api/v1/topics", json!({ "name": "a", "colour": 1 }), 422, 400),
        ("POST /api/v1/topics", json!({ "name": "a", "compression": "rar" }), 400, 400),
        ("POST /api/v1/topics", json!({ "name": "a", "retention_ms": 0 }), 400, 400),
        ("PATCH /api/v1/topics/taken", json!({ "retention_bytes": 5 }), 400, 400),
        ("PATCH /api/v1/topics/taken", json!({ "partitions": 5 }), 422, 400),
        ("PATCH /api/v1/topics/none", json!({ "compression": "lz4" }), 404, 431),
        ("POST /api/v1/topics", json!([]), 422, 400),
        ("POST /api/v1/topics", large, 413, 445),
        ("GET /api/v1/topics?limit=0", Value::Null, 400, 400),
        ("GET /api/v1/topics?limit=x", Value::Null, 400, 400),
        ("DELETE /api/v1/topics/none", Value::Null, 404, 431),
        ("GET /api/v1/topics/%ff", Value::Null, 400, 400),
        ("DELETE /api/v1/topics/%ff", Value::Null, 400, 400),
        ("PATCH /api/v1/topics/%ff", json!({}), 400, 400),
        ("GET /api/v2", Value::Null, 404, 400),
        ("PUT /api/v1/topics", Value::Null, 405, 400),
    ] {
        let (got, answer) = call(&running, request, &body);
        assert_eq!((got, &answer["code"]), (status, &json!(code)), "{request} {answer}");
        assert!(answer["message"].is_string() && answer["action"].is_string() && answer["name"].is_string());
    }
    // A web page of somebody else can send this without asking, so it must not work.
    let simple = "POST /api/v1/topics HTTP/1.1\r\nContent-Type: text/plain";
    assert_eq!(send(running.master.addresses().http, simple, r#"{"name":"a"}"#).0, 415);
}

#[test]
fn settings_are_made_and_altered_and_null_removes_a_bound() {
    let running = master();
    let body = json!({ "name": "a", "compression": "zstd", "retention_ms": 60_000, "retention_bytes": 2_u64 << 30 });
    let (status, made) = call(&running, "POST /api/v1/topics", &body);
    assert_eq!((status, &made["compression"], &made["retention_ms"]), (201, &json!("zstd"), &json!(60_000)));
    let body = json!({ "compression": "lz4", "retention_ms": null });
    let (status, altered) = call(&running, "PATCH /api/v1/topics/a", &body);
    assert_eq!((status, &altered["compression"], &altered["retention_ms"]), (200, &json!("lz4"), &Value::Null));
    assert_eq!(altered["retention_bytes"], json!(2_u64 << 30));
    let (_, seen) = call(&running, "GET /api/v1/topics", &Value::Null);
    assert_eq!(seen["topics"][0], altered);
}

#[test]
fn the_list_comes_in_pages() {
    let running = master();
    for number in 0..5 {
        call(&running, "POST /api/v1/topics", &json!({ "name": format!("t{number}") }));
    }
    let (_, first) = call(&running, "GET /api/v1/topics?limit=3", &Value::Null);
    assert_eq!((first["topics"].as_array().unwrap().len(), &first["next"]), (3, &json!("t2")));
    let (_, last) = call(&running, "GET /api/v1/topics?limit=3&after=t2", &Value::Null);
    assert_eq!((last["topics"].as_array().unwrap().len(), &last["next"]), (2, &Value::Null));
}

#[test]
fn the_console_shows_topics_and_loads_nothing() {
    let running = master();
    call(&running, "POST /api/v1/topics", &json!({ "name": "orders.eu" }));
    let (status, head, page) = send(running.master.addresses().http, "GET / HTTP/1.1", "");
    assert_eq!(status, 200);
    assert!(page.contains("orders.eu") && page.contains("broker.example:8123"), "{page}");
    assert!(head.contains("default-src 'none'") && !page.contains("<script") && !page.contains("http://"));
}

#[test]
fn a_second_master_on_the_same_port_or_store_is_refused() {
    let running = master();
    let other = tempfile::tempdir().unwrap();
    let path = other.path().join("m.redb");
    let taken = running.master.addresses().http.to_string();
    let error = ringmain_master::Master::start(&path, NEW, "127.0.0.1:0", &taken).err().unwrap();
    assert!(error.to_string().contains("choose another port"), "{error}");
    assert!(!path.exists(), "the store is not touched when a port is taken");
}
