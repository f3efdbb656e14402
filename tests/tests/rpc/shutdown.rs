//! Shutdown is bounded, and loses no message that could still be sent.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use box_rpc::{
    CallError, Caller, CloseReason, Code, Codecs, Empty, Options, Peer, Router, Session,
};
use box_test_wait::eventually;
use box_tests::actions::{Echo, Number, Probe, Server as TestServer, Text, Wait};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup};
use box_transports::server::Server;
use box_transports::{ConnectOptions, Endpoint, ListenError, ListenOptions};
use serde_json::json;
use tokio::time::Instant;

every_transport!(
    a_broken_connection_fails_what_waits,
    end_of_input_loses_no_answer,
    a_closed_peer_refuses_calls_without_sending_them,
);

/// Checks that a call on a closed connection is refused before it is sent.
async fn assert_not_sent(peer: &Peer) {
    let error = peer.call::<Echo>(&Text::new("x")).await.unwrap_err();
    assert!(matches!(error, CallError::NotSent(_)), "{error:?}");
}

async fn a_broken_connection_fails_what_waits(setup: Setup) {
    let fixture = setup.start().await;
    let peer = fixture.peer.clone();
    let waiting = tokio::spawn(async move { peer.call::<Wait>(&Number { n: 60_000 }).await });
    eventually("it has begun", async || {
        fixture.peer.call::<Probe>(&Empty {}).await.unwrap().begun == 1
    })
    .await;
    fixture.kill_server().await;
    let error = waiting.await.unwrap().unwrap_err();
    assert!(matches!(error, CallError::Lost(_)), "{error:?}");
    assert_eq!(error.code(), Code::Unavailable);
    assert_not_sent(&fixture.peer).await;
}

async fn end_of_input_loses_no_answer(setup: Setup) {
    let mut raw = setup.raw().await;
    for id in 1..=20 {
        raw.call(id, "wait", &json!({"n": 100})).await;
    }
    raw.close_input().await;
    let mut seen: Vec<i64> = Vec::new();
    for _ in 0..20 {
        let answer = raw.answer().await;
        seen.push(answer.id.as_i64().unwrap());
        assert_eq!(answer.result(), json!({"n": 100}));
    }
    seen.sort_unstable();
    assert_eq!(seen, (1..=20).collect::<Vec<_>>());
}

async fn a_closed_peer_refuses_calls_without_sending_them(setup: Setup) {
    let fixture = setup.start().await;
    fixture.peer.call::<Echo>(&Text::new("x")).await.unwrap();
    fixture.client.close(Duration::from_secs(1)).await;
    assert_eq!(fixture.client.closed().await, CloseReason::Closed);
    assert!(fixture.peer.is_closed());
    assert_not_sent(&fixture.peer).await;
}

#[tokio::test(start_paused = true)]
async fn close_lets_running_calls_answer_and_refuses_new_ones() {
    for dialect in [Dialect::JsonRpc, Dialect::LangBot] {
        let (server, mut raw) = Setup::in_process(dialect).server_session().await;
        raw.call(1, "wait", &json!({"n": 1000})).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        let begun = Instant::now();
        let closing = tokio::spawn(async move { server.close(Duration::from_secs(30)).await });
        tokio::time::sleep(Duration::from_millis(10)).await;
        if dialect == Dialect::JsonRpc {
            let bye = raw.receive().await;
            assert_eq!(
                (&bye["method"], &bye["params"]["restart"]),
                (&json!("$/bye"), &json!(false))
            );
        }
        raw.call(2, "echo", &json!({"text": "too late"})).await;
        let refused = raw.answer().await;
        assert_eq!(
            (refused.id.clone(), refused.error().code),
            (json!(2), Code::Unavailable)
        );
        assert_eq!(raw.answer().await.result(), json!({"n": 1000}));
        closing.await.unwrap();
        assert!(
            begun.elapsed() < Duration::from_secs(2),
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(raw.receive_end().await, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn close_ends_calls_that_exceed_its_time_limit() {
    let (server, mut raw) = Setup::in_process(Dialect::JsonRpc).server_session().await;
    raw.call(1, "wait", &json!({"n": 3_600_000})).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let begun = Instant::now();
    server.close(Duration::from_secs(5)).await;
    let took = begun.elapsed();
    assert!(
        took >= Duration::from_secs(5) && took < Duration::from_secs(6),
        "{took:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn answers_after_the_end_of_input_are_bounded_too() {
    let setup = Setup::in_process(Dialect::JsonRpc).server(|limits| limits.drain_ms = Some(5000));
    let (server, mut raw) = setup.server_session().await;
    raw.call(1, "wait", &json!({"n": 3_600_000})).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let begun = Instant::now();
    raw.close_input().await;
    assert_eq!(server.closed().await, CloseReason::EndOfInput);
    let took = begun.elapsed();
    assert!(
        took >= Duration::from_secs(5) && took < Duration::from_secs(6),
        "{took:?}"
    );
}

#[tokio::test]
async fn a_bye_for_a_restart_is_passed_on() {
    let (session, mut raw) = box_tests::fixture::against_a_script(Dialect::JsonRpc).await;
    raw.send_text("{\"jsonrpc\":\"2.0\",\"method\":\"$/bye\",\"params\":{\"reason\":\"new version\",\"restart\":true}}").await;
    raw.close_input().await;
    let reason = CloseReason::Bye {
        reason: "new version".into(),
        restart: true,
    };
    assert_eq!(session.closed().await, reason);
}

#[tokio::test(start_paused = true)]
async fn close_waits_for_answers_to_our_own_calls() {
    let fixture = Setup::in_process(Dialect::JsonRpc).start().await;
    let peer = fixture.peer.clone();
    let call = tokio::spawn(async move { peer.call::<Wait>(&Number { n: 500 }).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    fixture.client.close(Duration::from_secs(10)).await;
    assert_eq!(call.await.unwrap().unwrap().n, 500);
}

async fn serve(endpoint: &Endpoint) -> Result<Server, ListenError> {
    let listener = endpoint.listen(&ListenOptions::default()).await?;
    let router = Arc::new(TestServer::default()).router();
    Ok(Server::start(listener, router, |_| {
        Options::new(Caller::Local)
    }))
}

fn endpoints(directory: &Path) -> [Endpoint; 4] {
    [
        "tcp://127.0.0.1:0".to_owned(),
        "ws://127.0.0.1:0".to_owned(),
        format!("unix:{}", directory.join("socket").display()),
        format!("queue:{}", directory.display()),
    ]
    .map(|text| text.parse().unwrap())
}

/// Single-threaded, so that nothing happens between the end of `close` and the next line.
#[tokio::test]
async fn the_address_of_a_closed_server_is_free_at_once() {
    let directory = tempfile::tempdir().unwrap();
    for endpoint in endpoints(directory.path()) {
        let first = serve(&endpoint).await.unwrap();
        let endpoint = first.endpoint().clone();
        let taken = serve(&endpoint).await;
        assert!(matches!(taken, Err(ListenError::InUse)), "{endpoint}");
        first.close(Duration::from_secs(10), false).await;
        let second = serve(&endpoint).await;
        assert!(second.is_ok(), "{endpoint}: {second:?}");
    }
}

#[tokio::test]
async fn a_draining_server_frees_its_address_for_the_next() {
    let directory = tempfile::tempdir().unwrap();
    for endpoint in endpoints(directory.path()) {
        let first = serve(&endpoint).await.unwrap();
        let endpoint = first.endpoint().clone();
        let connect = async || {
            let connection = endpoint.connect(&ConnectOptions::default()).await.unwrap();
            let options = Options {
                codecs: Codecs::JSON_RPC,
                ..Options::client()
            };
            Session::start_boxed(connection, Router::empty(), options)
        };
        let client = connect().await;
        let peer = client.peer();
        let call = tokio::spawn(async move { peer.call::<Wait>(&Number { n: 500 }).await });
        eventually("the call runs", async || {
            let seen = client.peer().call::<Probe>(&Empty {}).await.unwrap();
            seen.begun == 1
        })
        .await;
        let closing = tokio::spawn(first.close(Duration::from_secs(10), true));
        // A closing server first frees its address, then says bye.
        eventually("the bye has arrived", async || {
            let echo = client.peer().call::<Echo>(&Text::new("x")).await;
            matches!(echo, Err(CallError::NotSent(_)))
        })
        .await;
        let _second = serve(&endpoint).await.unwrap();
        assert!(!closing.is_finished() && !call.is_finished(), "{endpoint}");
        let next = connect().await;
        next.peer().call::<Echo>(&Text::new("x")).await.unwrap();
        assert_eq!(call.await.unwrap().unwrap().n, 500);
        closing.await.unwrap();
    }
}
