use std::{os::unix::fs::PermissionsExt, path::Path, time::Duration};

use box_rpc::{Connection, ConnectionError, Limits, ReceiveHalf, SendHalf};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::{
    io::AsyncReadExt,
    net::{TcpStream, UnixStream},
};

use super::*;
use crate::tls::{ClientTls, Identity, Pem, ServerTls};

type Halves = (Box<dyn SendHalf>, Box<dyn ReceiveHalf>);

fn endpoint(text: &str) -> Endpoint {
    text.parse().unwrap()
}

/// Sends one message each way over a connection that `listener` accepts.
async fn greet(listener: &mut Listener, options: &ConnectOptions) -> (Halves, Halves, PeerInfo) {
    let local = listener.local_endpoint().clone();
    let (near, accepted) = tokio::join!(local.connect(options), listener.accept());
    let accepted = accepted.unwrap();
    let (mut near, mut far) = (near.unwrap().split(), accepted.connection.split());
    near.0.send("{\"there\":1}".to_owned()).await.unwrap();
    near.0.flush().await.unwrap();
    assert_eq!(
        far.1.receive().await.unwrap().as_deref(),
        Some("{\"there\":1}")
    );
    far.0.send("{\"back\":1}".to_owned()).await.unwrap();
    far.0.flush().await.unwrap();
    assert_eq!(
        near.1.receive().await.unwrap().as_deref(),
        Some("{\"back\":1}")
    );
    (near, far, accepted.peer)
}

#[test]
fn endpoints_print_as_they_are_written() {
    for text in [
        "queue:tests",
        "stdio:",
        "stdio:boxd stdio --root=/tmp",
        "stdio:sh -c 'echo \"hi\" there' ''",
        "stdio:x 'it'\\''s'",
        "tcp://127.0.0.1:80",
        "tcp://[::1]:0",
        "tls://box.example.org:7000",
        "unix:/run/box/box.sock",
        "unix:relative.sock",
        "ws://localhost:5410/rpc/ws",
        "ws://localhost:5410",
        "wss://[fe80::1]:1/",
    ] {
        let parsed = endpoint(text);
        assert_eq!(parsed.to_string(), text);
        assert_eq!(endpoint(&parsed.to_string()), parsed);
    }
    assert_eq!(endpoint("ws://h").to_string(), "ws://h:80");
    assert_eq!(endpoint("wss://h/x").to_string(), "wss://h:443/x");
}

#[test]
fn words_are_split_like_in_a_shell() {
    for (text, words) in [
        ("a  b\tc", &["a", "b", "c"][..]),
        (r#"a "b c" 'd "e'"#, &["a", "b c", "d \"e"]),
        (r#"a\ b "\"\\\n" ''"#, &["a b", "\"\\\\n", ""]),
        (r#"pre"mid"'post'"#, &["premidpost"]),
        ("", &[]),
    ] {
        let Endpoint::Stdio { command } = endpoint(&format!("stdio:{text}")) else {
            panic!("not stdio");
        };
        assert_eq!(command, words, "{text}");
    }
}

#[test]
fn what_is_wrong_with_an_endpoint_is_said() {
    for (text, error) in [
        ("", EndpointError::Scheme),
        ("localhost:80", EndpointError::Scheme),
        ("http://x", EndpointError::Scheme),
        ("queue:", EndpointError::Missing("name")),
        ("unix:", EndpointError::Missing("path")),
        ("tcp:host:1", EndpointError::Missing("//")),
        ("tcp://", EndpointError::Missing("host")),
        ("tcp://host", EndpointError::Missing("port")),
        ("tcp://host:", EndpointError::Missing("port")),
        ("tcp://:80", EndpointError::Missing("host")),
        ("tcp://host:65536", EndpointError::Port),
        ("tcp://host:+1", EndpointError::Port),
        ("tcp://host:80/x", EndpointError::Port),
        ("tcp://::1:80", EndpointError::Missing("host")),
        ("tcp://fe80::1:80", EndpointError::Host),
        ("tcp://[::1:80", EndpointError::Host),
        ("tcp://[::1]80", EndpointError::Host),
        ("tcp://a b:80", EndpointError::Host),
        ("ws://user:secret@host:1/", EndpointError::UserInfo),
        ("ws://host:1/?token=x", EndpointError::Path),
        ("ws://host:1?token=x", EndpointError::Path),
        ("ws://host:1/a b", EndpointError::Path),
        ("ws://host:1/\r\nX: y", EndpointError::Path),
        ("stdio:'x", EndpointError::Quote),
        ("stdio:\"x", EndpointError::Quote),
        ("stdio:x\\", EndpointError::Quote),
    ] {
        assert_eq!(text.parse::<Endpoint>(), Err(error), "{text}");
        assert!(!error.to_string().contains("secret "));
    }
    assert!(EndpointError::Scheme.to_string().contains("unix:PATH"));
}

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
async fn a_command_is_connected_to_by_its_endpoint() {
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
async fn a_place_is_held_until_both_halves_are_gone() {
    let directory = tempfile::tempdir().unwrap();
    let path = format!("unix:{}", directory.path().join("s").display());
    for text in [
        "queue:places",
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
        assert!(receive.peer_is_known());
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
        // The writer of a websocket holds its place, and the halves share the writer.
        greet(&mut listener, &connect).await;
    }
}

#[tokio::test]
async fn connections_that_say_nothing_make_room_the_oldest_first() {
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
        assert!(known.peer_is_known());
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
        // The newest connections still hold their places, and so does the one that sent a message.
        let (near, _, _) = greet(&mut listener, &connect).await;
        drop((near, known_near));
        let (_, first) = &mut silent[0];
        let end = tokio::time::timeout(Duration::from_secs(30), first.receive()).await;
        assert!(matches!(end, Ok(Ok(None) | Err(_))), "{text}: {end:?}");
        assert!(counts.full() >= 18, "{text}");
    }
}

#[tokio::test]
async fn a_slow_handshake_holds_up_nobody_and_ends_in_time() {
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
async fn a_socket_file_is_private_and_goes_with_its_listener() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("box.sock");
    let at = Endpoint::Unix { path: path.clone() };
    let listener = at.listen(&ListenOptions::default()).await.unwrap();
    let mode = std::fs::symlink_metadata(&path)
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(matches!(
        at.listen(&ListenOptions::default()).await,
        Err(ListenError::InUse)
    ));
    assert_eq!(files(directory.path()), ["box.sock"]);
    drop(listener);
    assert_eq!(files(directory.path()), [""; 0]);
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_nothing_else_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("box.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let at = Endpoint::Unix { path: path.clone() };
    let mut listener = at.listen(&ListenOptions::default()).await.unwrap();
    greet(&mut listener, &ConnectOptions::default()).await;

    let file = directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let at = Endpoint::Unix { path: file.clone() };
    assert!(matches!(
        at.listen(&ListenOptions::default()).await,
        Err(ListenError::NotASocket)
    ));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");

    // The listener must not remove a file that another process put at its path.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "theirs").unwrap();
    drop(listener);
    assert!(path.exists());
}

#[tokio::test]
async fn a_failed_bind_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x".repeat(200));
    let outcome = Endpoint::Unix { path }
        .listen(&ListenOptions::default())
        .await;
    assert!(matches!(outcome, Err(ListenError::Io(_))), "{outcome:?}");
    assert_eq!(files(directory.path()), [""; 0]);
}

fn files(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[tokio::test]
async fn a_name_nobody_listens_at_is_refused() {
    for text in [
        "queue:nobody",
        "unix:/nonexistent/socket",
        "stdio:",
        "tcp://127.0.0.1:1",
    ] {
        let outcome = endpoint(text).connect(&ConnectOptions::default()).await;
        assert!(matches!(outcome, Err(ConnectionError::Io(_))), "{text}");
    }
}

#[tokio::test]
async fn a_unix_stream_made_elsewhere_is_a_connection() {
    let (near, far) = UnixStream::pair().unwrap();
    let (mut send, _) = Box::new(crate::unix::over(near, &Limits::default())).split();
    let (_, mut receive) = Box::new(crate::unix::over(far, &Limits::default())).split();
    send.send("{}".to_owned()).await.unwrap();
    send.flush().await.unwrap();
    assert_eq!(receive.receive().await.unwrap().as_deref(), Some("{}"));
}

/// Set in the child process that runs out of descriptors on purpose.
const CHILD: &str = "BOX_TRANSPORTS_TEST_DESCRIPTORS";

#[tokio::test]
async fn accepting_survives_the_want_of_descriptors() {
    if std::env::var_os(CHILD).is_some() {
        return accept_without_descriptors().await;
    }
    let status = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "endpoint::tests::accepting_survives_the_want_of_descriptors",
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

/// A certificate authority that signs test certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> Pem {
        Pem::Bytes(self.0.pem().into_bytes())
    }

    fn identity(&self, name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Identity {
            certificates: Pem::Bytes(certificate.pem().into_bytes()),
            key: Pem::Bytes(key.serialize_pem().into_bytes()),
        }
    }
}

/// Whether a client with `tls` gets an answer from a listener with `server`.
async fn is_served(text: &str, server: &ServerTls, tls: ClientTls) -> Option<PeerInfo> {
    let options = ListenOptions {
        tls: Some(server.clone()),
        ..ListenOptions::default()
    };
    let mut listener = endpoint(text).listen(&options).await.unwrap();
    let local = listener.local_endpoint().clone();
    let server = tokio::spawn(async move {
        let accepted = listener.accept().await.unwrap();
        let (mut send, _receive) = accepted.connection.split();
        send.send("{}".to_owned()).await.unwrap();
        send.close().await.unwrap();
        accepted.peer
    });
    let connect = ConnectOptions {
        tls,
        ..ConnectOptions::default()
    };
    // With TLS 1.3 a client learns about a refusal only from its first read.
    let answer = match local.connect(&connect).await {
        Ok(connection) => connection.split().1.receive().await,
        Err(error) => Err(error),
    };
    if matches!(&answer, Ok(Some(message)) if message == "{}") {
        return Some(server.await.unwrap());
    }
    server.abort();
    None
}

#[tokio::test]
async fn tls_verifies_the_server_and_where_asked_the_client() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let client = |ca: &Authority, identity| ClientTls {
        ca: Some(ca.pem()),
        identity,
        server_name: None,
    };
    let open = ServerTls {
        identity: ours.identity("localhost"),
        client_ca: None,
    };
    let mutual = ServerTls {
        client_ca: Some(ours.pem()),
        ..open.clone()
    };
    for (text, transport) in [
        ("tls://localhost:0", Transport::Tls),
        ("wss://localhost:0/rpc/ws", Transport::WebSocket),
    ] {
        let peer = is_served(text, &open, client(&ours, None)).await.unwrap();
        assert_eq!(
            (peer.transport, peer.client_certificate),
            (transport, false)
        );
        assert!(
            is_served(text, &open, client(&theirs, None))
                .await
                .is_none()
        );
        let other_name = ClientTls {
            server_name: Some("elsewhere".to_owned()),
            ..client(&ours, None)
        };
        assert!(is_served(text, &open, other_name).await.is_none());

        let known = Some(ours.identity("client"));
        let peer = is_served(text, &mutual, client(&ours, known))
            .await
            .unwrap();
        assert!(peer.client_certificate);
        assert!(
            is_served(text, &mutual, client(&ours, None))
                .await
                .is_none()
        );
        let stranger = Some(theirs.identity("client"));
        assert!(
            is_served(text, &mutual, client(&ours, stranger))
                .await
                .is_none()
        );
    }
}

#[tokio::test]
async fn what_tls_lacks_is_said_and_keys_are_not_shown() {
    let at = endpoint("tls://127.0.0.1:0");
    let none = at.listen(&ListenOptions::default()).await;
    assert!(matches!(none, Err(ListenError::NoCertificate)));
    let identity = Identity {
        certificates: Pem::Bytes(b"nonsense".to_vec()),
        key: Pem::Path("/nonexistent/key".into()),
    };
    let options = ListenOptions {
        tls: Some(ServerTls {
            identity,
            client_ca: None,
        }),
        ..ListenOptions::default()
    };
    let error = at.listen(&options).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "no certificate in PEM form where one is expected"
    );
    assert!(!format!("{options:?}").contains("nonsense"));
    let connect = ConnectOptions {
        headers: vec![("Authorization".to_owned(), "Bearer secret".to_owned())],
        ..ConnectOptions::default()
    };
    assert!(!format!("{connect:?}").contains("secret"));
}
