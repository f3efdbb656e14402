//! An idle connection is kept alive with pings, and a peer that answers none is disconnected.
//!
//! The clock is paused.

use std::time::Duration;

use box_rpc::{CallError, CloseReason};
use box_tests::actions::{Echo, Number, Text, Wait};
use box_tests::fixture::{Dialect, Setup, against_a_script_with};
use serde_json::json;
use tokio::time::Instant;

const BEAT: Duration = Duration::from_secs(15);

#[tokio::test(start_paused = true)]
async fn pings_fill_the_silence_and_three_unanswered_end_it() {
    for (dialect, name, ping) in [
        (Dialect::JsonRpc, "method", "$/ping"),
        (Dialect::LangBot, "action", "__ping"),
    ] {
        let (session, mut raw) =
            against_a_script_with(dialect, |limits| limits.heartbeat = Some(BEAT)).await;
        let begun = Instant::now();
        let peer = session.peer();
        let waiting = tokio::spawn(async move { peer.call::<Wait>(&Number { n: 1 }).await });
        raw.receive().await;
        for _ in 0..3 {
            assert_eq!(raw.receive().await[name], json!(ping));
        }
        assert_eq!(session.closed().await, CloseReason::HeartbeatMissed);
        assert_eq!(begun.elapsed().as_secs(), 60);
        assert!(matches!(waiting.await.unwrap(), Err(CallError::Lost(_))));
    }
}

#[tokio::test(start_paused = true)]
async fn expected_silence_does_not_close_a_connection() {
    let (session, mut raw) =
        against_a_script_with(Dialect::JsonRpc, |limits| limits.heartbeat = Some(BEAT)).await;
    session.peer().expect_silence(true);
    tokio::time::sleep(BEAT * 20).await;
    assert!(!session.peer().is_closed());
    session.peer().expect_silence(false);
    let begun = Instant::now();
    for _ in 0..3 {
        assert_eq!(raw.receive().await["method"], json!("$/ping"));
    }
    assert!(begun.elapsed() >= BEAT * 2, "no ping was waiting");
    assert_eq!(session.closed().await, CloseReason::HeartbeatMissed);
}

#[tokio::test(start_paused = true)]
async fn any_message_counts_as_life() {
    let (session, mut raw) =
        against_a_script_with(Dialect::JsonRpc, |limits| limits.heartbeat = Some(BEAT)).await;
    for _ in 0..20 {
        tokio::time::sleep(BEAT * 2).await;
        raw.answer_with(999, &json!({})).await;
    }
    assert!(!session.peer().is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_ping_is_answered() {
    let mut raw = Setup::in_process(Dialect::JsonRpc).raw().await;
    raw.send_text("{\"jsonrpc\":\"2.0\",\"method\":\"$/ping\",\"params\":{}}")
        .await;
    assert_eq!(raw.receive().await["method"], json!("$/pong"));
    let mut raw = Setup::in_process(Dialect::LangBot).raw().await;
    raw.send_text("{\"seq_id\": 3, \"action\": \"__ping\", \"data\": {}}")
        .await;
    assert_eq!(
        raw.receive().await,
        json!({"seq_id": 3, "code": 0, "message": "success", "data": {}, "chunk_status": "continue"})
    );
}

#[tokio::test(start_paused = true)]
async fn two_idle_peers_stay_connected() {
    let setup = Setup::in_process(Dialect::JsonRpc);
    let beat = |limits: &mut box_tests::fixture::TestLimits| limits.heartbeat_ms = Some(15_000);
    let fixture = setup.client(beat).server(beat).start().await;
    tokio::time::sleep(Duration::from_hours(24)).await;
    fixture
        .peer
        .call::<Echo>(&Text::new("good morning"))
        .await
        .unwrap();
}

/// A client that knows only JSON-RPC answers no pings, and stays connected.
#[tokio::test(start_paused = true)]
async fn a_plain_json_rpc_client_is_not_pinged() {
    let setup =
        Setup::in_process(Dialect::JsonRpc).server(|limits| limits.heartbeat_ms = Some(15_000));
    let mut raw = setup.raw().await;
    raw.call(1, "echo", &json!({"text": "a"})).await;
    raw.answer().await.result();
    tokio::time::sleep(Duration::from_hours(1)).await;
    raw.call(2, "echo", &json!({"text": "b"})).await;
    assert_eq!(raw.answer().await.result(), json!({"text": "b"}));
}
