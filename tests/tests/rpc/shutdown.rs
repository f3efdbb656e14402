//! Ends are bounded, and lose nothing that could still be said.

use std::time::Duration;

use box_rpc::{CallError, CloseReason, Code, Dialect};
use box_tests::actions::{Echo, Number, Text, Wait};
use box_tests::every_transport;
use box_tests::world::Setup;
use serde_json::json;
use tokio::time::Instant;

every_transport!(
    a_broken_connection_fails_what_waits,
    end_of_input_loses_no_answer,
    a_closed_peer_refuses_calls_without_sending_them,
);

async fn a_broken_connection_fails_what_waits(setup: Setup) {
    let world = setup.start().await;
    let peer = world.peer.clone();
    let waiting = tokio::spawn(async move { peer.call::<Wait>(&Number { n: 60_000 }).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    world.kill_server().await;
    let error = waiting.await.unwrap().unwrap_err();
    assert!(matches!(error, CallError::Lost(_)), "{error:?}");
    assert_eq!(error.code(), Code::Unavailable);
    let error = world.peer.call::<Echo>(&Text::new("x")).await.unwrap_err();
    assert!(matches!(error, CallError::NotSent(_)), "{error:?}");
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
    let world = setup.start().await;
    world.peer.call::<Echo>(&Text::new("x")).await.unwrap();
    world.client.close(Duration::from_secs(1)).await;
    assert_eq!(world.client.closed().await, CloseReason::Closed);
    assert!(world.peer.is_closed());
    let error = world.peer.call::<Echo>(&Text::new("x")).await.unwrap_err();
    assert!(matches!(error, CallError::NotSent(_)), "{error:?}");
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
async fn close_ends_what_is_not_done_in_time() {
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
    let (session, mut raw) = box_tests::world::against_a_script(Dialect::JsonRpc).await;
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
    let world = Setup::in_process(Dialect::JsonRpc).start().await;
    let peer = world.peer.clone();
    let call = tokio::spawn(async move { peer.call::<Wait>(&Number { n: 500 }).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    world.client.close(Duration::from_secs(10)).await;
    assert_eq!(call.await.unwrap().unwrap().n, 500);
}
