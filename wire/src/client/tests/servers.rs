//! Servers with limits, of other protocols, silent, or not there at all.

use super::*;

#[tokio::test]
async fn no_more_requests_are_under_way_than_the_server_allows() {
    let broker = FakeBroker::start(1).await;
    let limits = ServerLimits { connection_requests_max: 2, ..ServerLimits::default() };
    broker.with(|state| {
        state.limits = limits;
        state.other_faults.extend([Fault::Silence, Fault::Silence]);
    });
    let connection = connected(&broker).await.any_connection().await.unwrap();
    let request = Request::Metadata(MetadataRequest::default());
    let timeout = Duration::from_secs(60);
    let first = connection.start(&request, Vec::new(), timeout).await.unwrap();
    let _second = connection.start(&request, Vec::new(), timeout).await.unwrap();
    let third = tokio::time::timeout(Duration::from_millis(100), connection.start(&request, Vec::new(), timeout)).await;
    assert!(third.is_err());
    connection.close();
    assert!(matches!(first.await, Err(ClientError::ConnectionLost { .. })));
    assert!(connection.start(&request, Vec::new(), timeout).await.is_err());
}

#[tokio::test]
async fn frames_past_the_servers_limit_are_not_sent() {
    let broker = FakeBroker::start(1).await;
    broker.with(|state| state.limits = ServerLimits { frame_bytes_max: 1000, connection_bytes_max: 0, ..state.limits });
    let connection = connected(&broker).await.any_connection().await.unwrap();
    let request = Request::Produce(crate::produce::ProduceRequest { durability: None, timeout_ms: 1 });
    let error = connection.request(&request, vec![vec![0; 2000].into()]).await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::TOO_LARGE));
    assert!(connection.request(&Request::Metadata(MetadataRequest::default()), Vec::new()).await.is_ok());
}

#[tokio::test]
async fn a_silent_server_is_given_up() {
    let broker = FakeBroker::start(1).await;
    let client = Client::connect(config_with_timeout(&broker, Duration::from_millis(200))).await.unwrap();
    broker.with(|state| state.other_faults.push_back(Fault::Silence));
    let connection = client.any_connection().await.unwrap();
    let error = connection.request(&Request::Metadata(MetadataRequest::default()), Vec::new()).await.unwrap_err();
    assert!(matches!(error, ClientError::ConnectionLost { .. }), "{error}");
    assert!(connection.is_closed());
    // A new one is made for the next request.
    assert!(client.metadata().await.is_ok());
}

#[tokio::test]
async fn bytes_that_are_no_answer_end_the_connection_and_nothing_else() {
    let broker = FakeBroker::start(1).await;
    let client = connected(&broker).await;
    let good = crate::samples::encode_response(&crate::samples::responses()[1].1, 1, 0);
    let mut broken = good.clone();
    broken[9] ^= 0xff;
    let mut unknown_id = crate::samples::encode_response(&crate::samples::responses()[1].1, 999, 0);
    unknown_id.extend([1, 2, 3]);
    for garbage in [vec![0; 64], vec![0xff; 64], b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), broken, unknown_id] {
        broker.with(|state| state.other_faults.push_back(Fault::Garbage(garbage)));
        let connection = client.any_connection().await.unwrap();
        let error = connection.request(&Request::Metadata(MetadataRequest::default()), Vec::new()).await.unwrap_err();
        assert!(matches!(error, ClientError::Protocol(_)), "{error}");
        assert!(connection.is_closed());
    }
    assert!(client.metadata().await.is_ok());
}

#[tokio::test]
async fn a_server_of_another_protocol_is_not_connected_to() {
    let broker = FakeBroker::start(1).await;
    broker.with(|state| state.protocol_version = 2);
    let error = Client::connect(config(&broker)).await.err().unwrap();
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut hello = [0; 16];
        stream.read_exact(&mut hello).await.unwrap();
        stream.write_all(b"220 mail.example ESMTP\r\n").await.unwrap();
    });
    let error = Connection::connect(&address, &ConnectionConfig::default()).await.err().unwrap();
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
}

#[tokio::test]
async fn connecting_to_nobody_says_where_and_why() {
    let (_held, port) = unused_port();
    let address = format!("127.0.0.1:{port}");
    let mut config = ClientConfig::new(vec![address.clone()]);
    config.retry_for = Duration::from_millis(50);
    let error = Client::connect(config).await.err().unwrap();
    assert!(error.to_string().contains(&address) && error.to_string().contains("gave up after"), "{error}");
}
