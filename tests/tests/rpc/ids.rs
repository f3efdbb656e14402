//! The caller chooses ids. They are echoed exactly, and are unique while in flight.

use box_rpc::Code;
use box_test_wait::eventually;
use box_tests::actions::{Echo, Text};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup, against_a_script};
use serde_json::json;

every_transport!(
    a_duplicate_id_is_refused_and_the_first_call_continues,
    an_id_may_be_used_again_after_its_answer
);

async fn a_duplicate_id_is_refused_and_the_first_call_continues(setup: Setup) {
    let mut raw = setup.raw().await;
    raw.call(9, "wait", &json!({"n": 150})).await;
    raw.call(9, "echo", &json!({"text": "impostor"})).await;
    let refused = raw.answer().await;
    assert_eq!(
        (refused.id.clone(), refused.error().code),
        (json!(9), Code::Validation)
    );
    let answer = raw.answer().await;
    assert_eq!(
        (answer.id.clone(), answer.result()),
        (json!(9), json!({"n": 150}))
    );
}

async fn an_id_may_be_used_again_after_its_answer(setup: Setup) {
    let mut raw = setup.raw().await;
    for n in 0..200 {
        raw.call(3, "echo", &json!({"text": n.to_string()})).await;
        assert_eq!(raw.answer().await.result(), json!({"text": n.to_string()}));
    }
}

#[tokio::test]
async fn json_rpc_ids_come_back_as_they_were_written() {
    let mut raw = Setup::in_process(Dialect::JsonRpc).raw().await;
    for id in [
        "\"text\"",
        "\"\"",
        "0",
        "-5",
        "1.5",
        "12345678901234567890",
        "\"7\"",
        "\"\\u00e9\\\"\"",
    ] {
        raw.send_text(&format!(
            "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"echo\",\"params\":{{\"text\":\"x\"}}}}"
        ))
        .await;
        let answer = raw.receive_text().await;
        assert!(answer.contains(&format!("\"id\":{id},")), "{answer}");
    }
}

#[tokio::test]
async fn an_unexpected_answer_is_counted_and_ignored() {
    for dialect in [Dialect::JsonRpc, Dialect::LangBot] {
        let (session, mut raw) = against_a_script(dialect).await;
        let peer = session.peer();
        raw.answer_with(4711, &json!({"text": "late"})).await;
        raw.answer_with(1, &json!({"text": "early"})).await;
        eventually("both are counted", async || {
            peer.stats().late_responses == 2
        })
        .await;
        let call = tokio::spawn(async move { peer.call::<Echo>(&Text::new("x")).await });
        let request = raw.receive().await;
        let id = request["id"]
            .as_i64()
            .or(request["seq_id"].as_i64())
            .unwrap();
        raw.answer_with(id, &json!({"text": "right"})).await;
        assert_eq!(call.await.unwrap().unwrap().text, "right");
    }
}
