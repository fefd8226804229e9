//! Topics that can't be made or are not there, asked for in all three ways: frames, command line, HTTP.

use std::process::Command;
use std::time::Duration;

use ringmain_wire::error_code::ErrorCode;
use ringmain_wire::message::{Request, Response};
use ringmain_wire::metadata::MetadataRequest;
use ringmain_wire::topic::{CreateTopicRequest, DeleteTopicRequest};

use crate::support::*;

#[test]
fn wrong_topics_are_refused_alike_by_frames_command_line_and_http() {
    let place = Place::new();
    let mut broker = place.start(1, "64MiB");
    let healthy = Healthy::start(&broker);
    broker.topic("there", 1);
    let long = "x".repeat(65);
    let cases = [
        ("", 1, ErrorCode::BAD_REQUEST),
        ("9starts-with-a-digit", 1, ErrorCode::BAD_REQUEST),
        ("-starts-with-a-dash", 1, ErrorCode::BAD_REQUEST),
        ("has space", 1, ErrorCode::BAD_REQUEST),
        ("has/slash", 1, ErrorCode::BAD_REQUEST),
        ("../up", 1, ErrorCode::BAD_REQUEST),
        ("größe", 1, ErrorCode::BAD_REQUEST),
        ("new\nline", 1, ErrorCode::BAD_REQUEST),
        (long.as_str(), 1, ErrorCode::TOO_LARGE),
        ("none", 0, ErrorCode::BAD_REQUEST),
        ("many", 10_001, ErrorCode::BAD_REQUEST),
        ("most", u32::MAX, ErrorCode::BAD_REQUEST),
        ("there", 1, ErrorCode::TOPIC_EXISTS),
    ];
    let mut client = broker.client();
    for (name, partitions, code) in cases {
        let request = CreateTopicRequest { partitions, ..CreateTopicRequest::new(name) };
        let by_frame = client.refused(&Request::CreateTopic(request), &[]);
        let is_it = |found: u16| found == code.0 || (code == ErrorCode::BAD_REQUEST && found == ErrorCode::TOO_LARGE.0);
        assert!(is_it(by_frame.code.0), "{name:?} x {partitions}: {by_frame:?}");
        assert!(!by_frame.message.is_empty());

        let body = serde_json::json!({ "name": name, "partitions": partitions }).to_string();
        let (status, answer) = http(broker.master_http, "POST", "/api/v1/topics", Some(&body));
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        assert!((400..500).contains(&status), "{name:?}: {status} {answer}");
        assert_eq!(answer["code"], by_frame.code.0, "{name:?}: {answer}");

        let broker_arg = broker.address.to_string();
        let count = partitions.to_string();
        let output = Command::new(BINARY)
            .args(["topic", "create", "--broker", &broker_arg, "--partitions", &count, "--", name])
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name:?}: {stderr}");
        assert_eq!(stderr.trim_end().lines().count(), 1, "{name:?}: {stderr}");
    }
    assert_eq!(client.metadata(&[]).topics.len(), 2, "something refused was made");

    let missing = Request::DeleteTopic(DeleteTopicRequest { name: "missing".into() });
    assert_eq!(client.refused(&missing, &[]).code, ErrorCode::TOPIC_NOT_FOUND);
    let (status, answer) = http(broker.master_http, "DELETE", "/api/v1/topics/missing", None);
    assert!(status == 404 && answer.contains("431"), "{status} {answer}");
    let output = Command::new(BINARY)
        .args(["topic", "delete", "missing", "--broker", &broker.address.to_string()])
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && stderr.contains("missing"), "{stderr}");

    for (method, path, body, status) in [
        ("POST", "/api/v1/topics", Some("{"), 400),
        ("POST", "/api/v1/topics", Some("{\"name\":\"x\",\"colour\":1}"), 422),
        ("POST", "/api/v1/topics", Some("{\"name\":\"x\",\"durability_default\":\"soon\"}"), 400),
        ("POST", "/api/v1/topics", Some("{\"name\":\"x\",\"partitions\":-1}"), 422),
        ("POST", "/api/v1/topics", None, 415),
        ("PUT", "/api/v1/topics", Some("{}"), 405),
        ("GET", "/api/v1/topics?limit=0", None, 400),
        ("GET", "/api/v1/topics/missing", None, 404),
        ("GET", "/nothing", None, 404),
    ] {
        let (found, answer) = http(broker.master_http, method, path, body);
        assert_eq!(found, status, "{method} {path} {body:?}: {answer}");
        assert!(serde_json::from_str::<serde_json::Value>(&answer).unwrap()["message"].is_string(), "{answer}");
    }
    let huge = format!("{{\"name\":\"{}\"}}", "x".repeat(100 * 1024));
    assert_eq!(http(broker.master_http, "POST", "/api/v1/topics", Some(&huge)).0, 413);
    broker.assert_well();
    healthy.finish(Duration::from_secs(15));
    broker.stop();
}

/// More partitions than one answer holds.
#[test]
fn topics_of_any_number_are_listed_page_by_page() {
    let place = Place::new();
    let broker = place.start(1, "64MiB");
    let mut client = broker.client();
    let names: Vec<String> = (0..6).map(|number| format!("t{number}")).collect();
    for name in &names {
        broker.topic(name, 10_000);
    }
    let all = MetadataRequest::default();
    assert_eq!(client.refused(&Request::Metadata(all.clone()), &[]).code, ErrorCode::TOO_LARGE);
    let mut master = Client::connect(broker.master);
    assert_eq!(master.refused(&Request::Metadata(all.clone()), &[]).code, ErrorCode::TOO_LARGE);

    for client in [&mut client, &mut master] {
        let mut page = |after: &str, limit: u32| {
            let request = MetadataRequest { after: after.to_owned(), limit, ..all.clone() };
            let Response::Metadata(metadata) = client.ask(&Request::Metadata(request)) else { panic!() };
            let names: Vec<_> = metadata.topics.into_iter().map(|topic| topic.name).collect();
            (names.join(" "), metadata.more)
        };
        assert_eq!(page("", 2), ("t0 t1".to_owned(), true));
        assert_eq!(page("t1", 4), ("t2 t3 t4 t5".to_owned(), false));
        assert_eq!(page("t1a", 1), ("t2".to_owned(), true));
        assert_eq!(page("t5", 9), (String::new(), false));
        // As many as fit.
        assert_eq!(page("", u32::MAX), ("t0 t1 t2 t3 t4".to_owned(), true));
    }
    let output =
        Command::new(BINARY).args(["topic", "list", "--broker", &broker.address.to_string()]).output().unwrap();
    let listed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(listed.lines().count() == 7 && names.iter().all(|name| listed.contains(name)), "{listed}");
    broker.stop();
}

#[test]
fn the_metadata_version_does_not_fall_when_the_newest_change_was_a_deletion() {
    let place = Place::new();
    let broker = place.start(2, "64MiB");
    broker.topic("a", 1);
    broker.topic("b", 1);
    let before = broker.client().metadata(&[]).version;
    let deleted = broker.client().ask(&Request::DeleteTopic(DeleteTopicRequest { name: "a".into() }));
    assert!(matches!(deleted, Response::Topic(_)), "{deleted:?}");
    broker.stop();
    let broker = place.start(2, "64MiB");
    let mut client = broker.client();
    let metadata = client.metadata(&[]);
    assert!(metadata.version > before, "{} after {before}", metadata.version);
    // Who remembers the state before is told of the new one.
    let Response::Metadata(known) =
        client.ask(&Request::Metadata(MetadataRequest { known_version: before, ..MetadataRequest::default() }))
    else {
        panic!()
    };
    assert_eq!(known.topics.len(), 1);
    broker.stop();
}
