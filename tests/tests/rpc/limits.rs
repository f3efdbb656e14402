//! Every limit is enforced, is reported with its name and value, and keeps the connection where
//! possible.

use std::time::Duration;

use async_trait::async_trait;
use box_rpc::{
    CallError, CloseReason, Code, Codecs, ConnectionError, Empty, LimitDetail, Limits, Options,
    ReceiveHalf, Router, SendHalf, Session,
};
use box_test_wait::eventually;
use box_tests::actions::{Big, Count, Echo, Number, Probe, Text, Wait};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup, Transport};
use futures::future::join_all;
use serde_json::json;

every_transport!(
    a_request_over_the_limit_is_not_sent,
    a_message_over_the_limit_is_answered_and_the_connection_lives,
    a_result_over_the_limit_becomes_an_error,
    calls_over_the_limit_are_refused_at_once,
    streams_are_counted_apart,
    nesting_is_bounded,
    invalid_texts_are_counted_and_answered,
    a_peer_that_never_sends_is_disconnected,
    a_peer_that_floods_and_never_reads_is_cut_off,
);

async fn a_request_over_the_limit_is_not_sent(setup: Setup) {
    let fixture = setup
        .client(|limits| limits.message_bytes = Some(1000))
        .start()
        .await;
    let error = fixture
        .peer
        .call::<Echo>(&Text::new("x".repeat(1000)))
        .await
        .unwrap_err();
    let CallError::TooLarge { size, limit: 1000 } = error else {
        panic!("{error:?}")
    };
    assert!(size > 1000);
    assert!(
        error.to_string().contains("message_bytes of 1000"),
        "{error}"
    );
    fixture.peer.call::<Echo>(&Text::new("on")).await.unwrap();
}

async fn a_message_over_the_limit_is_answered_and_the_connection_lives(setup: Setup) {
    let mut raw = setup
        .server(|limits| limits.message_bytes = Some(40_000))
        .raw()
        .await;
    for size in [39_990, 40_001, 100_000, 3_000_000] {
        raw.call(8, "echo", &json!({"text": "x".repeat(size)}))
            .await;
        let answer = raw.answer().await;
        assert_eq!(answer.id, json!(8));
        let error = answer.error();
        assert_eq!(error.code, Code::TooLarge, "{error:?}");
        assert!(error.message.contains("40000"), "{error:?}");
        raw.call(9, "echo", &json!({"text": "on"})).await;
        assert_eq!(raw.answer().await.result(), json!({"text": "on"}));
    }
}

async fn a_result_over_the_limit_becomes_an_error(setup: Setup) {
    let fixture = setup
        .server(|limits| limits.message_bytes = Some(100_000))
        .start()
        .await;
    let error = fixture
        .peer
        .call::<Big>(&Number { n: 200_000 })
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::TooLarge, "{error}");
    assert!(error.to_string().contains("100000"), "{error}");
    assert_eq!(
        fixture
            .peer
            .call::<Big>(&Number { n: 50_000 })
            .await
            .unwrap()
            .text
            .len(),
        50_000
    );
}

async fn calls_over_the_limit_are_refused_at_once(setup: Setup) {
    let fixture = setup
        .server(|limits| limits.in_flight = Some(4))
        .start()
        .await;
    let call = |n| {
        let peer = fixture.peer.clone();
        async move { peer.call::<Wait>(&Number { n }).await }
    };
    let outcomes = join_all((0..10).map(|_| call(300))).await;
    let refused: Vec<_> = outcomes
        .iter()
        .filter_map(|outcome| outcome.as_ref().err())
        .collect();
    assert_eq!(refused.len(), 6);
    for error in refused {
        let CallError::Refused(refused) = error else {
            panic!("{error:?}")
        };
        assert_eq!(error.code(), Code::Overloaded);
        assert_eq!(
            refused.detail(),
            Some(LimitDetail {
                limit: "in_flight".into(),
                max: 4
            })
        );
    }
    call(1).await.unwrap();
}

async fn streams_are_counted_apart(setup: Setup) {
    let limits = |limits: &mut box_tests::fixture::TestLimits| {
        limits.in_flight = Some(1);
        limits.open_streams = Some(2);
    };
    let fixture = setup.server(limits).start().await;
    let open = || {
        fixture
            .peer
            .request::<Count>(&Number { n: 1000 })
            .credit(8)
            .stream()
    };
    let (first, second) = (open().await.unwrap(), open().await.unwrap());
    let error = open().await.unwrap().finish().await.unwrap_err();
    assert_eq!(error.code(), Code::Overloaded, "{error}");
    fixture
        .peer
        .call::<Echo>(&Text::new("streams take no slot of calls"))
        .await
        .unwrap();
    drop(first);
    eventually("a slot is free", async || {
        open().await.unwrap().finish().await.is_ok()
    })
    .await;
    assert_eq!(second.finish().await.unwrap().n, 499_500);
}

async fn nesting_is_bounded(setup: Setup) {
    let mut raw = setup.server(|limits| limits.depth = Some(20)).raw().await;
    let deep = format!("{}{}", "[".repeat(30), "]".repeat(30));
    let deep: serde_json::Value = serde_json::from_str(&deep).unwrap();
    raw.call(4, "echo", &json!({"text": deep})).await;
    let error = raw.answer().await.error();
    assert_eq!(error.code, Code::Validation);
    assert!(error.message.contains("depth of 20"), "{error:?}");
    raw.call(5, "echo", &json!({"text": "[".repeat(500)})).await;
    assert_eq!(
        raw.answer().await.result()["text"].as_str().unwrap().len(),
        500
    );
}

async fn invalid_texts_are_counted_and_answered(setup: Setup) {
    let dialect = setup.dialect;
    let mut raw = setup.raw().await;
    raw.call(1, "echo", &json!({"text": "settles the dialect"}))
        .await;
    raw.answer().await.result();
    for rubbish in [
        "{\"open\":",
        "{nonsense}",
        "{}{}",
        "{\"id\": 1,}",
        "{\u{1}}",
        "no JSON at all",
    ] {
        raw.send_text(rubbish).await;
        if dialect == Dialect::JsonRpc {
            let answer = raw.answer().await;
            assert_eq!(answer.id, json!(null), "{rubbish}");
            let fault = answer.error().protocol_fault;
            assert_eq!(fault, Some(box_rpc::Fault::Parse), "{rubbish}");
        }
    }
    raw.call(2, "probe", &json!({})).await;
    let answer = raw.answer().await;
    assert_eq!(
        answer.id,
        json!(2),
        "an invalid LangBot frame is not answered"
    );
    assert_eq!(answer.result()["unparsable"], json!(6));
}

async fn a_peer_that_never_sends_is_disconnected(setup: Setup) {
    let transport = setup.transport;
    if matches!(transport, Transport::Queue | Transport::Stdio) {
        return a_silent_start_is_fine(setup).await;
    }
    let mut raw = setup
        .server(|limits| limits.first_message_ms = Some(100))
        .raw_silent()
        .await;
    assert_eq!(raw.receive_end().await, 0, "closed without a message");
}

/// A connection within one process has no such limit.
async fn a_silent_start_is_fine(setup: Setup) {
    let fixture = setup.start().await;
    tokio::time::sleep(Duration::from_millis(150)).await;
    fixture
        .peer
        .call::<Echo>(&Text::new("late and welcome"))
        .await
        .unwrap();
}

async fn a_peer_that_floods_and_never_reads_is_cut_off(setup: Setup) {
    let limits = |limits: &mut box_tests::fixture::TestLimits| {
        limits.in_flight = Some(1);
        limits.control_queue = Some(64);
    };
    let mut raw = setup.server(limits).raw().await;
    raw.call(1, "wait", &json!({"n": 60_000})).await;
    let cut = async {
        // Refusals fill the pipe, then the queue of refusals, until the server closes the
        // connection.
        for id in 2..2_000_000 {
            if raw
                .try_call(id, "echo", &json!({"text": "x".repeat(200)}))
                .await
                .is_err()
            {
                return;
            }
        }
        panic!("two million refusals were kept for a peer that reads none");
    };
    cut.await;
}

#[tokio::test]
async fn an_id_longer_than_the_limit_is_refused() {
    let mut raw = Setup::in_process(Dialect::JsonRpc).raw().await;
    let id = "x".repeat(300);
    raw.send_text(&format!(
        "{{\"jsonrpc\":\"2.0\",\"id\":\"{id}\",\"method\":\"echo\",\"params\":{{\"text\":\"x\"}}}}"
    ))
    .await;
    let error = raw.answer().await.error();
    assert_eq!(error.code, Code::Validation);
    assert!(error.message.contains("id_bytes"), "{error:?}");
}

#[tokio::test]
async fn a_full_queue_makes_its_senders_wait_and_loses_nothing() {
    let setup = Setup::in_process(Dialect::JsonRpc);
    let fixture = setup
        .client(|limits| limits.queue_slots = Some(2))
        .start()
        .await;
    let calls = (0..100).map(|n| {
        let peer = fixture.peer.clone();
        async move {
            peer.call::<Echo>(&Text::new(n.to_string()))
                .await
                .unwrap()
                .text
        }
    });
    assert_eq!(
        join_all(calls).await,
        (0..100).map(|n| n.to_string()).collect::<Vec<_>>()
    );
    assert_eq!(
        fixture
            .peer
            .call::<Probe>(&Empty {})
            .await
            .unwrap()
            .oversized,
        0
    );
}

#[tokio::test]
async fn an_error_does_not_echo_what_the_peer_wrote() {
    for dialect in [Dialect::JsonRpc, Dialect::LangBot] {
        let mut raw = Setup::in_process(dialect).raw().await;
        raw.call(1, "wait", &json!({"n": "x".repeat(1_000_000)}))
            .await;
        let answer = raw.receive_text().await;
        assert!(answer.len() < 1000, "{} bytes", answer.len());
    }
}

/// The answer is nested deeper than the limit: its call fails, and the peer gets no message.
#[tokio::test]
async fn an_answer_that_cannot_be_read_ends_its_call() {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    let with_action = format!(
        "{{\"text\":\"\\\"action\\\" \",\"action\":{}}}",
        "1".repeat(20)
    );
    for body in [format!("{{\"text\":{deep}}}"), with_action] {
        let (session, mut raw) =
            box_tests::fixture::against_a_script_with(Dialect::JsonRpc, |limits| {
                limits.message_bytes = 4000;
            })
            .await;
        let peer = session.peer();
        let call = tokio::spawn(async move { peer.call::<Echo>(&Text::new("x")).await });
        let id = raw.receive().await["id"].clone();
        let filling = "y".repeat(if body.contains("action") { 5000 } else { 0 });
        raw.send_text(&format!(
            "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{body},\"filling\":\"{filling}\"}}"
        ))
        .await;
        let error = call.await.unwrap().unwrap_err();
        assert!(
            matches!(error.code(), Code::Validation | Code::TooLarge),
            "{error}"
        );
        session.cut();
        assert_eq!(raw.receive_end().await, 0, "an answer is never answered");
    }
}

/// A connection that takes this long to send each message, and receives none.
struct SlowSender {
    each: Duration,
    sent: tokio::sync::mpsc::UnboundedSender<String>,
}

struct SilentReceiver;

#[async_trait]
impl SendHalf for SlowSender {
    async fn send(&mut self, message: String) -> Result<(), ConnectionError> {
        tokio::time::sleep(self.each).await;
        self.sent.send(message).map_err(|_| ConnectionError::Closed)
    }
}

#[async_trait]
impl ReceiveHalf for SilentReceiver {
    async fn receive(&mut self) -> Result<Option<String>, ConnectionError> {
        std::future::pending().await
    }
}

/// Makes ten calls at once, which are written as one batch. Returns the time until the connection
/// ends, and how many calls were written.
async fn written_slowly(each: Duration) -> (Duration, usize) {
    let (sent, mut written) = tokio::sync::mpsc::unbounded_channel();
    let options = Options {
        limits: Limits::in_process(),
        codecs: Codecs::JSON_RPC,
        ..Options::client()
    };
    assert_eq!(options.limits.frame, Duration::from_mins(1));
    let session = Session::start(
        (SlowSender { each, sent }, SilentReceiver),
        Router::empty(),
        options,
    );
    let begun = tokio::time::Instant::now();
    for _ in 0..10 {
        let peer = session.peer();
        tokio::spawn(async move { peer.call::<Echo>(&Text::new("x")).await });
    }
    let reason = tokio::time::timeout(Duration::from_hours(1), session.closed()).await;
    if let Ok(reason) = reason {
        let CloseReason::Broken(reason) = reason else {
            panic!("{reason}")
        };
        assert!(reason.contains("limit frame of 60s"), "{reason}");
    }
    let mut count = 0;
    while written.try_recv().is_ok() {
        count += 1;
    }
    (begun.elapsed(), count)
}

#[tokio::test(start_paused = true)]
async fn the_frame_limit_is_each_messages_of_a_batch_and_not_the_batchs() {
    // Each message is in time, and all together take far longer than the limit of one.
    let (lived, written) = written_slowly(Duration::from_secs(50)).await;
    assert_eq!((lived.as_secs(), written), (3600, 10));
    // No message is written: the connection ends after the time of all ten.
    let (lived, written) = written_slowly(Duration::MAX).await;
    assert_eq!((lived.as_secs(), written), (600, 0));
}
