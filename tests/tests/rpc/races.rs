//! Races that other engines lost. Each test fails on the naive version named in its comment.

use std::time::Duration;

use box_rpc::{CallError, Caller, Empty, Limits, Options, Session};
use box_test_wait::eventually;
use box_tests::actions::{Echo, Flow, Number, Probe, Server, Text, Wait};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup, against_a_script_with};
use box_transports::line::Line;
use futures::StreamExt as _;
use serde_json::json;
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

every_transport!(a_peer_that_dies_between_two_chunks_ends_the_stream_with_an_error);

/// Naive: `receive()` inside a `select!` with the sending of answers. A half-read line is lost
/// whenever an answer is sent.
#[tokio::test]
async fn a_half_read_line_survives_answers_that_flow_meanwhile() {
    let (ours, theirs) = duplex(1 << 20);
    let (read, write) = tokio::io::split(ours);
    let limits = Limits::in_process();
    let _server = Session::start(
        Line::new(read, write, &limits),
        Arc::new(Server::default()).router(),
        Options {
            limits,
            ..Options::new(Caller::Local)
        },
    );
    let (mut read, mut write) = tokio::io::split(theirs);
    for id in 1..=200 {
        // An answer becomes due while the next line is half written.
        let slow = format!(
            "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"wait\",\"params\":{{\"n\":1}}}}\n"
        );
        let text = "y".repeat(300);
        let split = format!(
            "{{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"echo\",\"params\":{{\"text\":\"{text}\"}}}}\n",
            1000 + id
        );
        write.write_all(slow.as_bytes()).await.unwrap();
        write.write_all(&split.as_bytes()[..150]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        write.write_all(&split.as_bytes()[150..]).await.unwrap();
    }
    let mut answers = Vec::new();
    let mut buffer = vec![0; 64 * 1024];
    while String::from_utf8_lossy(&answers).lines().count() < 400 {
        let count = read.read(&mut buffer).await.unwrap();
        assert_ne!(count, 0);
        answers.extend_from_slice(&buffer[..count]);
    }
    let text = String::from_utf8(answers).unwrap();
    assert_eq!(text.matches("yyy\"}").count(), 200);
    assert_eq!(text.matches("{\"n\":1}").count(), 200);
}

/// Naive: end of input ends the session, and pending answers are dropped. (`shutdown` tests the
/// same over every transport.)
#[tokio::test]
async fn end_of_input_with_answers_pending_loses_none() {
    for dialect in [Dialect::JsonRpc, Dialect::LangBot] {
        let (_server, mut raw) = Setup::in_process(dialect).server_session().await;
        for id in 1..=50 {
            raw.call(id, "wait", &json!({"n": 1 + id % 7})).await;
        }
        raw.close_input().await;
        assert_eq!(raw.receive_end().await, 50);
    }
}

/// Naive: the call is registered, or its cancel is sent, although the call was never sent. The
/// table of calls leaks, and the peer gets a cancel of an unknown call.
#[tokio::test]
async fn a_call_dropped_before_it_is_sent_leaves_no_trace() {
    let (session, mut raw) =
        against_a_script_with(Dialect::JsonRpc, |limits| limits.queue_slots = 1).await;
    let peer = session.peer();
    // The peer does not read: the queue fills, and further calls wait for a slot.
    let text = Text::new("x".repeat(10_000));
    let mut first = Vec::new();
    for _ in 0..70 {
        let (peer, text) = (peer.clone(), text.clone());
        first.push(tokio::spawn(async move { peer.call::<Echo>(&text).await }));
    }
    eventually("all have taken an id", async || peer.in_flight() == 70).await;
    for _ in 0..100 {
        let unsent = Text::new("never sent");
        let call = peer.call::<Echo>(&unsent);
        assert!(
            tokio::time::timeout(Duration::from_millis(1), call)
                .await
                .is_err()
        );
    }
    assert_eq!(peer.in_flight(), 70);
    for call in first {
        call.abort();
        let _ = call.await;
    }
    assert_eq!(peer.in_flight(), 0);
    let mut calls = 0;
    let mut cancels = 0;
    raw.answer_with(0, &json!({})).await;
    while calls == 0 || cancels < calls {
        let message = raw.receive().await;
        assert!(!message.to_string().contains("never sent"));
        if message["method"] == json!("$/cancel") {
            cancels += 1;
        } else {
            calls += 1;
        }
    }
    assert_eq!(
        cancels, calls,
        "each call that went out was cancelled, and no other"
    );
}

/// Naive: a stream waits without end when its peer dies between two chunks, or ends as if it were
/// complete.
async fn a_peer_that_dies_between_two_chunks_ends_the_stream_with_an_error(setup: Setup) {
    let fixture = setup.start().await;
    let mut flow = fixture.peer.stream::<Flow>(&Empty {}).await.unwrap();
    for _ in 0..20 {
        flow.next().await.unwrap().unwrap();
    }
    fixture.kill_server().await;
    let end = loop {
        match flow.next().await {
            Some(Ok(_)) => {}
            other => break other,
        }
    };
    assert!(matches!(end, Some(Err(CallError::Lost(_)))), "{end:?}");
    assert!(flow.next().await.is_none());
}

/// Naive: the answer and the cancel cross, and the slot is freed twice or never.
#[tokio::test]
async fn a_cancel_that_crosses_its_answer_frees_one_place() {
    let setup = Setup::in_process(Dialect::JsonRpc).server(|limits| limits.in_flight = Some(3));
    let fixture = setup.start().await;
    for round in 0..300_u64 {
        let wait = Number { n: 1 };
        let call = fixture.peer.call::<Wait>(&wait);
        let _ = tokio::time::timeout(Duration::from_micros(900 + round), call).await;
    }
    eventually("all slots are free", async || {
        let empty = Text::default();
        let calls = (0..3).map(|_| fixture.peer.call::<Echo>(&empty));
        futures::future::join_all(calls)
            .await
            .iter()
            .all(Result::is_ok)
    })
    .await;
    let seen = fixture.peer.call::<Probe>(&Empty {}).await.unwrap();
    assert_eq!(seen.begun, seen.finished + seen.dropped);
}
