//! Hello: needed where the transport proves nothing, welcome everywhere else.

use std::sync::Arc;

use box_rpc::{
    CallError, Code, Dialect, Empty, Gate, Hello, HelloParams, Options, Session, Tokens,
};
use box_tests::actions::{Server, Text, Who};
use box_tests::every_transport;
use box_tests::world::{Setup, TOKEN, Transport};
use box_transports::queue;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

every_transport!(
    hello_tells_versions_and_limits,
    a_caller_is_known_by_its_tokens_name,
    the_first_message_must_be_a_hello_where_a_token_is_needed,
);

async fn hello_tells_versions_and_limits(setup: Setup) {
    let world = setup
        .server(|limits| limits.in_flight = Some(77))
        .start()
        .await;
    let hello = HelloParams {
        token: Some(TOKEN.into()),
        ..HelloParams::default()
    };
    let answer = world.peer.call::<Hello>(&hello).await.unwrap();
    assert_eq!((answer.contract, answer.limits.in_flight), (1, 77));
    assert!(
        answer.features.iter().any(|feature| feature == "keys"),
        "{answer:?}"
    );
    let future = HelloParams {
        contract: [7, 9],
        ..hello
    };
    let error = world.peer.call::<Hello>(&future).await.unwrap_err();
    assert!(error.to_string().contains("7 to 9"), "{error}");
}

async fn a_caller_is_known_by_its_tokens_name(setup: Setup) {
    let expected = if setup.transport.needs_hello() {
        "tester"
    } else {
        "local"
    };
    let world = setup.start().await;
    assert_eq!(
        world.peer.call::<Who>(&Empty {}).await.unwrap(),
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

fn gated() -> (Session, Session) {
    let (ours, theirs) = queue::pair(64);
    let tokens = Tokens::new([
        ("one".to_owned(), TOKEN.to_owned()),
        ("two".to_owned(), "second".repeat(8)),
    ]);
    let options = Options {
        gate: Gate::Tokens(tokens),
        ..Options::default()
    };
    let server = Session::start(ours, Arc::new(Server::default()).router(), options);
    let options = Options {
        dialect: Some(Dialect::JsonRpc),
        ..Options::default()
    };
    (
        server,
        Session::start(theirs, box_rpc::Router::empty(), options),
    )
}

#[tokio::test]
async fn no_wrong_token_opens_and_none_is_shown() {
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
        let (server, client) = gated();
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
    let (_server, client) = gated();
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
async fn a_browser_that_knocks_at_a_token_port_hears_nothing() {
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
        // A reset instead of an end is fine: what matters is that nothing is said.
        let _ = stream.read_to_end(&mut answer).await;
        assert_eq!(String::from_utf8_lossy(&answer), "", "{request:?}");
    }
}

#[tokio::test]
async fn a_call_after_a_refused_hello_is_not_run() {
    let (_server, client) = gated();
    let hello = HelloParams::default();
    assert!(client.peer().call::<Hello>(&hello).await.is_err());
    client.closed().await;
    assert!(matches!(
        client.peer().call::<Who>(&Empty {}).await,
        Err(CallError::NotSent(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn nothing_but_a_hello_keeps_an_unknown_peer_connected() {
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
        let options = Options {
            gate: Gate::Tokens(tokens),
            ..Options::default()
        };
        let server = Session::start(ours, Arc::new(Server::default()).router(), options);
        let mut raw = box_tests::raw::Raw::over(Box::new(theirs), Dialect::JsonRpc, None);
        raw.send_text(text).await;
        assert_eq!(raw.receive_end().await, 0, "{text} is answered");
        assert_eq!(
            server.closed().await,
            box_rpc::CloseReason::Denied,
            "{text}"
        );
    }
}
