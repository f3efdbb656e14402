//! Chunks arrive in order, before the result, and no faster than the reader takes them.

use std::time::Duration;

use box_rpc::{Code, Empty};
use box_test_wait::eventually;
use box_tests::actions::{Count, Echo, Flow, Number, Probe, Text};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Fixture, Setup, against_a_script};
use futures::StreamExt as _;
use serde_json::json;

every_transport!(
    chunks_come_in_order_and_then_the_result,
    without_credit_only_the_result_comes,
    a_stream_is_never_further_ahead_than_its_credit,
    a_flood_of_chunks_delays_no_other_call,
    a_dropped_stream_ends_its_handler,
    a_stream_that_fails_ends_with_its_error,
    a_chunk_too_large_to_send_ends_its_stream,
    a_chunk_too_large_to_take_ends_its_stream_and_its_handler,
);

async fn chunks_come_in_order_and_then_the_result(setup: Setup) {
    let fixture = setup.start().await;
    let mut chunks = fixture
        .peer
        .stream::<Count>(&Number { n: 1000 })
        .await
        .unwrap();
    for n in 0..1000 {
        assert_eq!(chunks.next().await.unwrap().unwrap().n, n);
    }
    assert!(chunks.next().await.is_none());
    assert_eq!(chunks.finish().await.unwrap().n, 499_500);
}

async fn without_credit_only_the_result_comes(setup: Setup) {
    let fixture = setup.start().await;
    assert_eq!(
        fixture
            .peer
            .call::<Count>(&Number { n: 10 })
            .await
            .unwrap()
            .n,
        45
    );
    assert_eq!(
        fixture.peer.call::<Probe>(&Empty {}).await.unwrap().chunks,
        0
    );
}

async fn a_stream_is_never_further_ahead_than_its_credit(setup: Setup) {
    let fixture = setup.start().await;
    let mut chunks = fixture
        .peer
        .request::<Count>(&Number { n: 100 })
        .credit(8)
        .stream()
        .await
        .unwrap();
    eventually("the window is used", async || sent(&fixture).await == 8).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(
        sent(&fixture).await,
        8,
        "nothing was read, so no more than the window was sent"
    );
    for read in 1..=20_u64 {
        chunks.next().await.unwrap().unwrap();
        assert!(sent(&fixture).await <= read + 8);
    }
    assert_eq!(chunks.finish().await.unwrap().n, 4950);
}

async fn sent(fixture: &box_tests::fixture::Fixture) -> u64 {
    fixture.peer.call::<Probe>(&Empty {}).await.unwrap().chunks
}

async fn a_flood_of_chunks_delays_no_other_call(setup: Setup) {
    let fixture = setup.start().await;
    let mut flow = fixture.peer.stream::<Flow>(&Empty {}).await.unwrap();
    let reader = tokio::spawn(async move {
        for _ in 0..2000 {
            flow.next().await.unwrap().unwrap();
        }
    });
    for n in 0..50 {
        let text = Text::new(n.to_string());
        assert_eq!(fixture.peer.call::<Echo>(&text).await.unwrap(), text);
    }
    reader.await.unwrap();
}

async fn a_dropped_stream_ends_its_handler(setup: Setup) {
    let fixture = setup.start().await;
    let mut flow = fixture.peer.stream::<Flow>(&Empty {}).await.unwrap();
    flow.next().await.unwrap().unwrap();
    drop(flow);
    eventually("the handler is dropped", async || {
        fixture.peer.call::<Probe>(&Empty {}).await.unwrap().dropped == 1
    })
    .await;
}

async fn a_stream_that_fails_ends_with_its_error(setup: Setup) {
    let mut raw = setup.raw().await;
    raw.stream_call(1, "count", &json!({"n": "many"})).await;
    assert_eq!(raw.answer().await.error().code, Code::Validation);
}

/// The chunks of `flow` are longer than this, and everything else is shorter.
const SHORTER_THAN_A_CHUNK: usize = 900;

/// Checks that a stream ends with the error about its first chunk.
async fn assert_too_large(fixture: &Fixture) {
    let flow = fixture.peer.stream::<Flow>(&Empty {}).await.unwrap();
    let error = flow.finish().await.unwrap_err();
    assert_eq!(error.code(), Code::TooLarge, "{error}");
    let text = error.to_string();
    assert!(text.contains("message_bytes of 900"), "{text}");
}

async fn a_chunk_too_large_to_send_ends_its_stream(setup: Setup) {
    let fixture = setup
        .server(|limits| limits.message_bytes = Some(SHORTER_THAN_A_CHUNK))
        .start()
        .await;
    assert_too_large(&fixture).await;
    assert_eq!(sent(&fixture).await, 0);
    assert_eq!(fixture.peer.stats().oversized, 0, "it was never sent");
    assert_eq!(fixture.peer.in_flight(), 0);
}

async fn a_chunk_too_large_to_take_ends_its_stream_and_its_handler(setup: Setup) {
    let fixture = setup
        .client(|limits| limits.message_bytes = Some(SHORTER_THAN_A_CHUNK))
        .start()
        .await;
    assert_too_large(&fixture).await;
    assert_ne!(fixture.peer.stats().oversized, 0);
    eventually("the handler is dropped", async || {
        fixture.peer.call::<Probe>(&Empty {}).await.unwrap().dropped == 1
    })
    .await;
}

/// The chunk is nested deeper than the limit.
#[tokio::test]
async fn a_chunk_that_cannot_be_read_ends_its_stream_and_is_cancelled() {
    let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
    for dialect in [Dialect::JsonRpc, Dialect::LangBot] {
        let (session, mut raw) = against_a_script(dialect).await;
        let flow = session.peer().stream::<Flow>(&Empty {}).await.unwrap();
        let request = raw.receive().await;
        let (id, chunk) = match dialect {
            Dialect::JsonRpc => {
                let id = &request["id"];
                let head = r#""jsonrpc":"2.0","method":"$/chunk","params""#;
                let chunk = format!(r#"{{{head}:{{"id":{id},"chunk":{{"text":{deep}}}}}}}"#);
                (id, chunk)
            }
            Dialect::LangBot => {
                let id = &request["seq_id"];
                let head = format!(r#""seq_id":{id},"code":0,"message":"success""#);
                let tail = r#""chunk_status":"continue","stream_index":0"#;
                (id, format!(r#"{{{head},"data":{{"text":{deep}}},{tail}}}"#))
            }
        };
        raw.send_text(&chunk).await;
        let error = flow.finish().await.unwrap_err();
        assert_eq!(error.code(), Code::Validation, "{error}");
        let cancel = tokio::time::timeout(Duration::from_secs(10), raw.receive());
        let cancel = cancel.await.expect("a cancel");
        let cancelled = match dialect {
            Dialect::JsonRpc => (&cancel["method"], &cancel["params"]["id"]),
            Dialect::LangBot => (&cancel["action"], &cancel["data"]["seq_id"]),
        };
        let word = match dialect {
            Dialect::JsonRpc => "$/cancel",
            Dialect::LangBot => "__cancel_action",
        };
        assert_eq!(cancelled, (&json!(word), id));
    }
}
