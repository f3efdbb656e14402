//! Hello: required where the transport proves no identity, accepted everywhere else.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use box_rpc::{
    Auth, CallError, Caller, CloseReason, Code, Codecs, ConnectionError, Empty, Hello, HelloParams,
    Options, ReceiveHalf, SendHalf, Session, Tokens,
};
use box_tests::actions::{Server, Text, Who};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup, TOKEN, Transport, auth};
use box_tests::raw::Raw;
use box_transports::tls::{ClientTls, Identity, Pem, ServerTls};
use box_transports::{ConnectOptions, Endpoint, ListenOptions, queue};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

every_transport!(
    hello_reports_versions_and_limits,
    a_caller_is_known_by_its_tokens_name,
    the_first_message_must_be_a_hello_where_a_token_is_needed,
    a_hello_over_its_limit_is_refused_and_closed,
    a_hello_within_its_limit_lifts_it,
);

async fn hello_reports_versions_and_limits(setup: Setup) {
    let fixture = setup
        .server(|limits| limits.in_flight = Some(77))
        .start()
        .await;
    let hello = HelloParams {
        token: Some(TOKEN.into()),
        ..HelloParams::default()
    };
    let answer = fixture.peer.call::<Hello>(&hello).await.unwrap();
    assert_eq!((answer.contract, answer.limits.in_flight), (1, 77));
    assert!(
        answer.features.iter().any(|feature| feature == "keys"),
        "{answer:?}"
    );
    let future = HelloParams {
        contract: [7, 9],
        ..hello
    };
    let error = fixture.peer.call::<Hello>(&future).await.unwrap_err();
    assert!(error.to_string().contains("7 to 9"), "{error}");
}

async fn a_caller_is_known_by_its_tokens_name(setup: Setup) {
    let expected = if setup.transport.needs_hello() {
        "tester"
    } else {
        "local"
    };
    let fixture = setup.start().await;
    assert_eq!(
        fixture.peer.call::<Who>(&Empty {}).await.unwrap(),
        Text::new(expected)
    );
}

async fn the_first_message_must_be_a_hello_where_a_token_is_needed(setup: Setup) {
    let needed = setup.transport.needs_hello();
    let mut raw = setup.raw_silent().await;
    raw.call(1, "echo", &json!({"text": "x"})).await;
    let answer = raw.answer().await;
    if needed {
        assert_eq!(answer.error().code, Code::Denied);
        assert_eq!(raw.receive_end().await, 0, "and the connection is closed");
    } else {
        assert_eq!(answer.result(), json!({"text": "x"}));
    }
}

/// A hello message of exactly `bytes` bytes.
fn hello_of(raw: &Raw, bytes: usize) -> String {
    let text = |client: String| {
        let params = json!({"client": client, "token": TOKEN});
        raw.request(1, "hello", &params)
    };
    let hello = text("x".repeat(bytes - text(String::new()).len()));
    assert_eq!(hello.len(), bytes);
    hello
}

const HELLO_BYTES: usize = 4000;

fn of_few_words(setup: Setup) -> Setup {
    setup
        .requires_token()
        .server(|limits| limits.hello_bytes = Some(HELLO_BYTES))
}

async fn a_hello_over_its_limit_is_refused_and_closed(setup: Setup) {
    for bytes in [HELLO_BYTES + 1, 100_000, 3_000_000] {
        let mut raw = of_few_words(setup.clone()).raw_silent().await;
        raw.send_text(&hello_of(&raw, bytes)).await;
        let error = raw.answer().await.error();
        assert_eq!(error.code, Code::TooLarge, "{error:?}");
        let limit = match raw.dialect {
            Dialect::JsonRpc => "hello_bytes of 4000",
            Dialect::LangBot => "4000 byte limit",
        };
        assert!(error.message.contains(limit), "{error:?}");
        assert_eq!(raw.receive_end().await, 0, "and the connection is closed");
    }
}

async fn a_hello_within_its_limit_lifts_it(setup: Setup) {
    let mut raw = of_few_words(setup).raw_silent().await;
    raw.send_text(&hello_of(&raw, HELLO_BYTES)).await;
    // Sent before the answer to the hello.
    let text = json!({"text": "y".repeat(100_000)});
    raw.call(2, "echo", &text).await;
    assert_eq!(raw.answer().await.result()["contract"], json!(1));
    assert_eq!(raw.answer().await.result(), text);
}

/// Receives the sent messages.
struct ChannelSender(UnboundedSender<String>);

/// Records the message limit each time the engine sets it.
struct RecordingReceiver(UnboundedReceiver<String>, UnboundedSender<usize>);

#[async_trait]
impl SendHalf for ChannelSender {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        self.0.send(message).map_err(|_| ConnectionError::Closed)
    }
}

#[async_trait]
impl ReceiveHalf for RecordingReceiver {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        Ok(self.0.recv().await)
    }

    fn set_message_limit(&mut self, bytes: usize) {
        self.1.send(bytes).unwrap();
    }
}

#[tokio::test]
async fn a_transport_buffers_little_before_authentication() {
    let (to_server, from_client) = unbounded_channel();
    let (to_client, mut from_server) = unbounded_channel();
    let (record, mut reported) = unbounded_channel();
    let options = Options::new(auth(true));
    let connection = (
        ChannelSender(to_client),
        RecordingReceiver(from_client, record),
    );
    let _server = Session::start(connection, Arc::new(Server::default()).router(), options);
    let mut reported = async || {
        let next = tokio::time::timeout(Duration::from_secs(10), reported.recv());
        next.await.expect("the engine sets the limit")
    };
    assert_eq!(reported().await, Some(64 * 1024));
    let params = json!({"token": TOKEN});
    let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "hello", "params": params});
    to_server.send(hello.to_string()).unwrap();
    assert!(from_server.recv().await.unwrap().contains("result"));
    assert_eq!(reported().await, Some(16 * 1024 * 1024));
}

/// A connection that its peer abandoned for another one before it authenticated.
struct AbandonedReceiver(UnboundedReceiver<String>);

#[async_trait]
impl ReceiveHalf for AbandonedReceiver {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        Ok(self.0.recv().await)
    }

    fn receive_ready(&mut self) -> Option<String> {
        self.0.try_recv().ok()
    }

    fn peer_identified(&mut self) -> bool {
        false
    }
}

#[tokio::test]
async fn a_connection_that_timed_out_ignores_late_messages() {
    let (to_server, from_client) = unbounded_channel();
    let (to_client, _from_server) = unbounded_channel();
    let options = Options::new(auth(true));
    let state = Arc::new(Server::default());
    let params = json!({"token": TOKEN});
    let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "hello", "params": params});
    to_server.send(hello.to_string()).unwrap();
    let call = json!({"jsonrpc": "2.0", "id": 2, "method": "wait", "params": {"n": 60_000}});
    to_server.send(call.to_string()).unwrap();
    let connection = (ChannelSender(to_client), AbandonedReceiver(from_client));
    let server = Session::start(connection, Arc::clone(&state).router(), options);
    let closed = tokio::time::timeout(Duration::from_mins(2), server.closed());
    assert!(matches!(closed.await, Ok(CloseReason::Broken(_))));
    assert_eq!(state.begun(), 0, "no call was begun");
}

fn with_tokens() -> (Session, Session) {
    let (ours, theirs) = queue::pair(64);
    let tokens = Tokens::new([
        ("one".to_owned(), TOKEN.to_owned()),
        ("two".to_owned(), "second".repeat(8)),
    ]);
    let options = Options::new(tokens);
    let server = Session::start(ours, Arc::new(Server::default()).router(), options);
    let options = Options {
        codecs: Codecs::JSON_RPC,
        ..Options::client()
    };
    (
        server,
        Session::start(theirs, box_rpc::Router::empty(), options),
    )
}

#[tokio::test]
async fn wrong_tokens_are_refused_and_no_message_contains_one() {
    let wrong = [
        "",
        "x",
        &TOKEN[1..],
        &TOKEN[..TOKEN.len() - 1],
        &TOKEN.to_uppercase(),
        &format!("{TOKEN} "),
    ];
    let tokens = wrong
        .iter()
        .map(|token| Some((*token).to_owned()))
        .chain([None]);
    for token in tokens {
        let (server, client) = with_tokens();
        let hello = HelloParams {
            token: token.clone(),
            ..HelloParams::default()
        };
        assert!(!format!("{hello:?}").contains(&TOKEN[5..20]));
        let error = client.peer().call::<Hello>(&hello).await.unwrap_err();
        assert_eq!(error.code(), Code::Denied, "{token:?}");
        assert!(!error.to_string().contains(TOKEN));
        assert_eq!(server.closed().await, box_rpc::CloseReason::Denied);
    }
    let (_server, client) = with_tokens();
    let hello = HelloParams {
        token: Some("second".repeat(8)),
        ..HelloParams::default()
    };
    client.peer().call::<Hello>(&hello).await.unwrap();
    assert_eq!(
        client.peer().call::<Who>(&Empty {}).await.unwrap(),
        Text::new("two")
    );
}

#[tokio::test]
async fn a_browser_gets_no_response_from_a_port_with_tokens() {
    let setup = Setup::new(Transport::Tcp, Dialect::JsonRpc, "");
    let (address, _place) = setup.address().await;
    for request in [
        "GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "POST /rpc HTTP/1.1\r\nContent-Type: application/json\r\n\r\n{\"jsonrpc\":\"2.0\"}\n"
            .to_owned(),
        "\u{16}\u{3}\u{1}\n".to_owned(),
    ] {
        let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        // A reset instead of an end is fine: the server must only send nothing.
        let _ = stream.read_to_end(&mut answer).await;
        assert_eq!(String::from_utf8_lossy(&answer), "", "{request:?}");
    }
}

#[tokio::test]
async fn a_call_after_a_refused_hello_is_not_run() {
    let (_server, client) = with_tokens();
    let hello = HelloParams::default();
    assert!(client.peer().call::<Hello>(&hello).await.is_err());
    client.closed().await;
    assert!(matches!(
        client.peer().call::<Who>(&Empty {}).await,
        Err(CallError::NotSent(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn only_a_hello_keeps_an_unauthenticated_peer_connected() {
    let strangers = [
        r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
        r#"{"jsonrpc":"2.0","method":"hello","params":{}}"#,
        r#"{"jsonrpc":"2.0","method":"$/pong","params":{}}"#,
        "[1,2,3]",
        r#"{"seq_id":1,"code":0}"#,
    ];
    for text in strangers {
        let (ours, theirs) = queue::pair(64);
        let tokens = Tokens::new([("one".to_owned(), TOKEN.to_owned())]);
        let options = Options::new(tokens);
        let server = Session::start(ours, Arc::new(Server::default()).router(), options);
        let mut raw = Raw::over(Box::new(theirs), Dialect::JsonRpc, None);
        raw.send_text(text).await;
        assert_eq!(raw.receive_end().await, 0, "{text} is answered");
        assert_eq!(
            server.closed().await,
            box_rpc::CloseReason::Denied,
            "{text}"
        );
    }
}

/// A server that knows callers by their user and by their certificate, and its address.
async fn knowing_callers(
    text: &str,
    tokens: Option<Tokens>,
) -> (box_transports::server::Server, ConnectOptions) {
    let (server, ca) = self_signed();
    let (client, client_ca) = self_signed();
    let listen = ListenOptions {
        tls: Some(ServerTls {
            identity: server,
            client_ca: Some(client_ca),
        }),
        ..ListenOptions::default()
    };
    let endpoint: Endpoint = text.parse().unwrap();
    let listener = endpoint.listen(&listen).await.unwrap();
    let router = Arc::new(Server::default()).router();
    let server = box_transports::server::Server::start(listener, router, move |peer| {
        let transport = match (peer.uid, peer.client_certificate) {
            (Some(_), _) => Caller::Local,
            (None, true) => Caller::Certificate,
            (None, false) => Caller::Loopback,
        };
        Options::new(tokens.clone().map_or(Auth::Caller(transport), Auth::Tokens))
    });
    let connect = ConnectOptions {
        tls: ClientTls {
            ca: Some(ca),
            identity: Some(client),
            ..ClientTls::default()
        },
        ..ConnectOptions::default()
    };
    (server, connect)
}

fn self_signed() -> (Identity, Pem) {
    let names = vec!["127.0.0.1".to_owned()];
    let certified = rcgen::generate_simple_self_signed(names).unwrap();
    let certificate = Pem::Bytes(certified.cert.pem().into_bytes());
    let identity = Identity {
        certificates: certificate.clone(),
        key: Pem::Bytes(certified.signing_key.serialize_pem().into_bytes()),
    };
    (identity, certificate)
}

/// The caller that the server sees after a hello with each of these tokens in turn.
async fn taken_for(text: &str, known: Option<Tokens>, tokens: [&str; 2]) -> String {
    let (server, connect) = knowing_callers(text, known).await;
    let connection = server.endpoint().connect(&connect).await.unwrap();
    let options = Options {
        codecs: Codecs::JSON_RPC,
        ..Options::client()
    };
    let client = Session::start_boxed(connection, box_rpc::Router::empty(), options);
    for token in tokens {
        let hello = HelloParams {
            token: Some(token.to_owned()),
            ..HelloParams::default()
        };
        client.peer().call::<Hello>(&hello).await.unwrap();
    }
    let name = client.peer().call::<Who>(&Empty {}).await.unwrap().text;
    server.close(Duration::from_secs(1), false).await;
    name
}

#[tokio::test]
async fn the_caller_is_named_by_its_token_or_else_by_the_transport() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let socket = format!("unix:{}", socket.display());
    let second = "second".repeat(8);
    let tokens = || {
        Some(Tokens::new([
            ("one".to_owned(), TOKEN.to_owned()),
            ("two".to_owned(), second.clone()),
        ]))
    };
    for (text, transports) in [
        (socket.as_str(), "local"),
        ("tls://127.0.0.1:0", "certificate"),
    ] {
        assert_eq!(taken_for(text, None, [TOKEN, &second]).await, transports);
        assert_eq!(
            taken_for(text, tokens(), [TOKEN, &second]).await,
            "one",
            "and the first token counts"
        );
        assert_eq!(taken_for(text, tokens(), [&second, TOKEN]).await, "two");
    }
}
