use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::thread;

use super::*;
use crate::runtime::{spawn_joined, spawn_local};
use crate::test_support::{on_shard, shard, with_watchdog};
use crate::ticker::Ticker;

const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

#[test]
fn bytes_come_back_from_an_echo() {
    let listener = BoundListener::alone(ANY).unwrap();
    let address = listener.address();
    let client = thread::spawn(move || {
        let mut socket = std::net::TcpStream::connect(address).unwrap();
        for n in 0..200u8 {
            socket.write_all(&[n; 100]).unwrap();
            let mut back = [0; 100];
            socket.read_exact(&mut back).unwrap();
            assert_eq!(back, [n; 100]);
        }
        address
    });
    on_shard(move |_| async move {
        let stream = listener.start().accept().await.unwrap();
        let mut bytes = [0; 64];
        loop {
            let read = stream.read(&mut bytes).await.unwrap();
            if read == 0 {
                break;
            }
            stream.send_all(&mut [IoSlice::new(&bytes[..read])]).await.unwrap();
        }
    });
    client.join().unwrap();
}

#[test]
fn one_task_reads_while_another_waits_to_write() {
    let listener = BoundListener::alone(ANY).unwrap();
    let address = listener.address();
    const BYTES: usize = 32 << 20;
    let client = thread::spawn(move || {
        let mut socket = std::net::TcpStream::connect(address).unwrap();
        // Bytes go in while nothing is taken out: the writer must be waiting by then.
        socket.write_all(&vec![7; 1 << 20]).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        let mut all = Vec::new();
        socket.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), BYTES);
        assert!(all.chunks(1 << 16).enumerate().all(|(n, chunk)| chunk.iter().all(|&byte| byte == n as u8)));
    });
    on_shard(move |_| async move {
        let stream = listener.start().accept().await.unwrap();
        let other = stream.clone();
        let writer = spawn_joined(async move {
            let chunks: Vec<Vec<u8>> = (0..BYTES >> 16).map(|n| vec![n as u8; 1 << 16]).collect();
            let mut slices: Vec<_> = chunks.iter().map(|chunk| IoSlice::new(chunk)).collect();
            other.send_all(&mut slices).await.unwrap();
            other.shutdown(Shutdown::Write);
        });
        let mut bytes = vec![0; 1000];
        let mut sum = 0;
        loop {
            let read = stream.read(&mut bytes).await.unwrap();
            if read == 0 {
                break;
            }
            sum += read;
        }
        assert_eq!(sum, 1 << 20);
        writer.await;
    });
    client.join().unwrap();
}

#[test]
fn shutdown_wakes_a_waiting_reader() {
    let listener = BoundListener::alone(ANY).unwrap();
    let _client = std::net::TcpStream::connect(listener.address()).unwrap();
    on_shard(move |_| async move {
        let stream = listener.start().accept().await.unwrap();
        let reading = stream.clone();
        let reader = spawn_joined(async move { reading.read(&mut [0; 10]).await.unwrap() });
        sleep(Duration::from_millis(20)).await;
        stream.shutdown(Shutdown::Both);
        assert_eq!(reader.await, 0);
    });
}

#[test]
fn a_read_that_is_dropped_half_way_loses_nothing() {
    let listener = BoundListener::alone(ANY).unwrap();
    let mut client = std::net::TcpStream::connect(listener.address()).unwrap();
    on_shard(move |_| async move {
        let stream = listener.start().accept().await.unwrap();
        let clock = crate::clock::Clock::current();
        for n in 0..50u8 {
            let mut bytes = [0; 8];
            let gave_up = clock.timeout(Duration::from_millis(1), stream.read(&mut bytes)).await;
            assert!(gave_up.is_none());
            client.write_all(&[n]).unwrap();
            assert_eq!(stream.read(&mut bytes).await.unwrap(), 1);
            assert_eq!(bytes[0], n);
        }
    });
}

#[test]
fn a_second_socket_on_the_port_is_refused_also_when_the_first_ones_share_it() {
    let first = BoundListener::shared(ANY, 2).unwrap();
    let address = first[0].address();
    assert!(first.iter().all(|listener| listener.address() == address));
    for count in [1, 2] {
        let error = BoundListener::shared(address, count).unwrap_err();
        assert!(matches!(error, BindError::InUse { .. }), "{error}");
    }
    drop(first);
    BoundListener::shared(address, 2).unwrap();
}

#[test]
fn shared_listeners_all_get_connections() {
    with_watchdog(60, || {
        let ticker = Ticker::start().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let listeners = BoundListener::shared(ANY, 2).unwrap();
        let address = listeners[0].address();
        let threads: Vec<_> = (0..)
            .zip(listeners)
            .map(|(index, listener)| {
                shard(index, dir.path(), &ticker, move || async move {
                    let listener = listener.start();
                    let got_one = listener.accept().await.unwrap();
                    // The rest, until the client has seen both shards.
                    spawn_local(async move {
                        loop {
                            let other = listener.accept().await.unwrap();
                            other.send_all(&mut [IoSlice::new(&[index as u8])]).await.unwrap();
                        }
                    });
                    got_one.send_all(&mut [IoSlice::new(&[index as u8])]).await.unwrap();
                    assert_eq!(got_one.read(&mut [0; 1]).await.unwrap(), 0);
                })
            })
            .collect();
        let mut seen = [const { Vec::new() }; 2];
        while seen.iter().any(Vec::is_empty) {
            let mut socket = std::net::TcpStream::connect(address).unwrap();
            let mut shard = [0];
            socket.read_exact(&mut shard).unwrap();
            seen[usize::from(shard[0])].push(socket);
        }
        drop(seen);
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn an_address_of_another_host_is_an_error_that_names_it() {
    let error = BoundListener::alone("192.0.2.1:0".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("192.0.2.1"), "{error}");
}

#[test]
fn connections_have_no_delay_and_are_not_inherited() {
    let listener = BoundListener::alone(ANY).unwrap();
    let _client = std::net::TcpStream::connect(listener.address()).unwrap();
    on_shard(move |_| async move {
        let stream = listener.start().accept().await.unwrap();
        let inner = stream.inner.stream.borrow();
        let fd = inner.fd();
        assert!(SockRef::from(&fd).tcp_nodelay().unwrap());
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    });
}

#[test]
fn try_send_says_would_block_when_the_socket_is_full() {
    let listener = BoundListener::alone(ANY).unwrap();
    let _client = std::net::TcpStream::connect(listener.address()).unwrap();
    on_shard(move |_| async move {
        let stream = listener.start().accept().await.unwrap();
        let bytes = vec![0; 1 << 20];
        let error = loop {
            if let Err(error) = stream.try_send(&[IoSlice::new(&bytes)]) {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    });
}
