//! Listening, connecting and the connection limit.

use std::time::Duration;

use box_rpc::ConnectionError;
use tokio::{io::AsyncReadExt, net::TcpStream};

use super::*;

#[tokio::test]
async fn every_plain_endpoint_listens_and_connects() {
    let directory = tempfile::tempdir().unwrap();
    let path = format!("unix:{}", directory.path().join("s").display());
    for (text, transport) in [
        ("queue:endpoint-tests", Transport::Queue),
        ("tcp://127.0.0.1:0", Transport::Tcp),
        (&path, Transport::Unix),
        ("ws://127.0.0.1:0", Transport::WebSocket),
        ("ws://127.0.0.1:0/here", Transport::WebSocket),
    ] {
        let mut listener = endpoint(text)
            .listen(&ListenOptions::default())
            .await
            .unwrap();
        assert!(!listener.local_endpoint().to_string().contains(":0"));
        let (_near, _far, peer) = greet(&mut listener, &ConnectOptions::default()).await;
        let uid = (transport == Transport::Unix).then(|| rustix::process::geteuid().as_raw());
        assert_eq!(
            (peer.transport, peer.uid, peer.client_certificate),
            (transport, uid, false)
        );
    }
}

#[tokio::test]
async fn an_endpoint_connects_to_a_command() {
    let (mut send, mut receive) = endpoint("stdio:sh -c 'exec cat'")
        .connect(&ConnectOptions::default())
        .await
        .unwrap()
        .split();
    send.send("{\"cat\":1}".to_owned()).await.unwrap();
    send.flush().await.unwrap();
    assert_eq!(
        receive.receive().await.unwrap().as_deref(),
        Some("{\"cat\":1}")
    );
    let refused = endpoint("stdio:cat")
        .listen(&ListenOptions::default())
        .await;
    assert!(matches!(refused, Err(ListenError::Command)));
}

#[tokio::test]
async fn a_permit_is_held_until_both_halves_are_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let path = format!("unix:{}", directory.path().join("s").display());
    for text in [
        "queue:permits",
        "tcp://127.0.0.1:0",
        &path,
        "ws://127.0.0.1:0",
    ] {
        let options = ListenOptions {
            max_connections: 1,
            ..ListenOptions::default()
        };
        let mut listener = endpoint(text).listen(&options).await.unwrap();
        let connect = ConnectOptions::default();
        let (_near, (send, mut receive), _) = greet(&mut listener, &connect).await;
        assert!(receive.peer_identified());
        let local = listener.local_endpoint().clone();
        let surplus = tokio::spawn(async move {
            let connection = local.connect(&ConnectOptions::default()).await?;
            connection.split().1.receive().await
        });
        let counts = listener.refused();
        tokio::select! {
            accepted = listener.accept() => panic!("{accepted:?} beyond the limit"),
            outcome = surplus => {
                // The kernel may report the end of an unread connection as a reset.
                assert!(!matches!(outcome.unwrap(), Ok(Some(_))));
            }
        }
        assert_eq!(counts.full(), 1, "{text}");
        drop(send);
        drop(receive);
        // The writer of a websocket holds its permit, and the halves share the writer.
        greet(&mut listener, &connect).await;
    }
}

#[tokio::test]
async fn the_oldest_silent_connection_is_evicted_first() {
    let directory = tempfile::tempdir().unwrap();
    let path = format!("unix:{}", directory.path().join("s").display());
    for text in ["tcp://127.0.0.1:0", &path, "ws://127.0.0.1:0"] {
        let options = ListenOptions {
            max_connections: 3,
            ..ListenOptions::default()
        };
        let mut listener = endpoint(text).listen(&options).await.unwrap();
        let connect = ConnectOptions::default();
        let (known_near, (_send, mut known), _) = greet(&mut listener, &connect).await;
        assert!(known.peer_identified());
        let local = listener.local_endpoint().clone();
        let counts = listener.refused();
        let mut silent = Vec::new();
        for count in 0..20 {
            // A raw stream that sends nothing; for a websocket, it never sends the upgrade request.
            let raw: Endpoint = match &local {
                Endpoint::WebSocket { address, .. } => {
                    format!("tcp://{}:{}", address.host, address.port)
                }
                other => other.to_string(),
            }
            .parse()
            .unwrap();
            let near = raw.connect(&connect).await.unwrap();
            silent.push(near.split());
            let made_room = u64::try_from(count).unwrap().saturating_sub(1);
            tokio::time::timeout(Duration::from_secs(30), async {
                while counts.full() < made_room {
                    let accepting = listener.accept();
                    let accepting = tokio::time::timeout(Duration::from_millis(10), accepting);
                    if let Ok(accepted) = accepting.await {
                        let (send, mut receive) = accepted.unwrap().connection.split();
                        tokio::spawn(async move {
                            let _ = receive.receive().await;
                            drop(send);
                        });
                    }
                }
            })
            .await
            .unwrap();
        }
        // The newest connections still hold their permits, and so does the one that sent a message.
        let (near, _, _) = greet(&mut listener, &connect).await;
        drop((near, known_near));
        let (_, first) = &mut silent[0];
        let end = tokio::time::timeout(Duration::from_secs(30), first.receive()).await;
        assert!(matches!(end, Ok(Ok(None) | Err(_))), "{text}: {end:?}");
        assert!(counts.full() >= 18, "{text}");
    }
}

#[tokio::test]
async fn a_slow_handshake_delays_no_other_and_times_out() {
    let mut options = ListenOptions::default();
    options.limits.first_message = Some(Duration::from_millis(200));
    let mut listener = endpoint("ws://127.0.0.1:0").listen(&options).await.unwrap();
    let Endpoint::WebSocket { address, .. } = listener.local_endpoint().clone() else {
        panic!("not a websocket");
    };
    let mut slow = TcpStream::connect((address.host.as_str(), address.port))
        .await
        .unwrap();
    greet(&mut listener, &ConnectOptions::default()).await;
    let mut bytes = Vec::new();
    tokio::select! {
        accepted = listener.accept() => panic!("{accepted:?}"),
        end = slow.read_to_end(&mut bytes) => assert_eq!(end.unwrap(), 0),
    }
    let counts = listener.refused();
    let _ = tokio::time::timeout(Duration::from_millis(1), listener.accept()).await;
    assert_eq!(counts.handshake(), 1);
}

#[tokio::test]
async fn an_endpoint_without_a_listener_is_refused() {
    for text in [
        "queue:no-listener",
        "unix:/nonexistent/socket",
        "stdio:",
        "tcp://127.0.0.1:1",
    ] {
        let outcome = endpoint(text).connect(&ConnectOptions::default()).await;
        assert!(matches!(outcome, Err(ConnectionError::Io(_))), "{text}");
    }
}

/// Set in the child process that runs out of descriptors on purpose.
const CHILD: &str = "BOX_TRANSPORTS_TEST_DESCRIPTORS";

#[tokio::test]
async fn accepting_survives_a_lack_of_descriptors() {
    if std::env::var_os(CHILD).is_some() {
        return accept_without_descriptors().await;
    }
    let status = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "endpoint::tests::listener::accepting_survives_a_lack_of_descriptors",
        ])
        .env(CHILD, "1")
        .stdout(std::process::Stdio::null())
        .status();
    assert!(status.await.unwrap().success());
}

async fn accept_without_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let mut listener = endpoint("tcp://127.0.0.1:0")
        .listen(&ListenOptions::default())
        .await
        .unwrap();
    let Endpoint::Tcp { address, .. } = listener.local_endpoint().clone() else {
        panic!("not TCP");
    };
    let _client = TcpStream::connect((address.host.as_str(), address.port))
        .await
        .unwrap();
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        ..before
    };
    setrlimit(Resource::Nofile, none).unwrap();
    let accepted = tokio::time::timeout(Duration::from_millis(100), listener.accept()).await;
    setrlimit(Resource::Nofile, before).unwrap();
    assert!(accepted.is_err(), "{accepted:?} without a descriptor");
    listener.accept().await.unwrap();
}
