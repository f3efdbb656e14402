//! JSON-RPC batches: answered together in one array, with any members.

use box_rpc::Code;
use box_tests::fixture::{Dialect, Setup};
use serde_json::{Value, json};

fn request(id: u64, method: &str, params: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

async fn answer_to(batch: &Value) -> Value {
    let mut raw = Setup::in_process(Dialect::JsonRpc).raw().await;
    raw.send_text(&batch.to_string()).await;
    raw.receive().await
}

fn by_id(mut answers: Value) -> Vec<Value> {
    let answers = answers.as_array_mut().expect("an array");
    answers.sort_by_key(|answer| answer["id"].as_u64());
    answers.clone()
}

#[tokio::test]
async fn answers_come_together_whatever_their_order() {
    let batch = json!([
        request(1, "wait", &json!({"n": 50})),
        request(2, "echo", &json!({"text": "x"})),
        {"jsonrpc": "2.0", "method": "note", "params": {"text": "no answer to this one"}},
        request(3, "no.such", &json!({})),
        7,
    ]);
    let answers = by_id(answer_to(&batch).await);
    assert_eq!(answers.len(), 4);
    assert_eq!(
        (&answers[0]["id"], &answers[0]["error"]["code"]),
        (&json!(null), &json!(-32600))
    );
    assert_eq!(answers[1]["result"], json!({"n": 50}));
    assert_eq!(answers[2]["result"], json!({"text": "x"}));
    assert_eq!(answers[3]["error"]["code"], json!(-32601));
}

#[tokio::test]
async fn a_batch_of_notifications_has_no_answer() {
    let mut raw = Setup::in_process(Dialect::JsonRpc).raw().await;
    let note = |text: &str| json!({"jsonrpc": "2.0", "method": "note", "params": {"text": text}});
    raw.send_text(&json!([note("a"), note("b")]).to_string())
        .await;
    raw.send_text(&request(1, "probe", &json!({})).to_string())
        .await;
    let answer = raw.receive().await;
    assert_eq!(
        (&answer["id"], &answer["result"]["notes"]),
        (&json!(1), &json!(["a", "b"]))
    );
}

#[tokio::test]
async fn an_empty_batch_and_one_of_invalid_members_are_refused_as_the_standard_says() {
    let answer = answer_to(&json!([])).await;
    assert_eq!(
        (&answer["id"], &answer["error"]["code"]),
        (&json!(null), &json!(-32600))
    );
    let answers = answer_to(&json!([1, 2, 3])).await;
    let codes: Vec<_> = answers
        .as_array()
        .unwrap()
        .iter()
        .map(|answer| answer["error"]["code"].clone())
        .collect();
    assert_eq!(codes, [json!(-32600), json!(-32600), json!(-32600)]);
}

#[tokio::test]
async fn members_over_the_limit_of_calls_are_refused_one_by_one() {
    let setup = Setup::in_process(Dialect::JsonRpc).server(|limits| limits.in_flight = Some(2));
    let mut raw = setup.raw().await;
    let batch: Vec<_> = (0..5)
        .map(|id| request(id, "wait", &json!({"n": 50})))
        .collect();
    raw.send_text(&json!(batch).to_string()).await;
    let answers = by_id(raw.receive().await);
    let refused = answers
        .iter()
        .filter(|answer| answer["error"]["data"]["code"] == json!("overloaded"));
    assert_eq!((answers.len(), refused.count()), (5, 3));
}

#[tokio::test]
async fn too_many_members_are_refused_by_name() {
    let batch: Vec<_> = (0..200)
        .map(|id| request(id, "echo", &json!({"text": "x"})))
        .collect();
    let answer = answer_to(&json!(batch)).await;
    assert_eq!(
        answer["error"]["data"]["code"],
        json!(Code::TooLarge.as_str())
    );
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("batch of 128"),
        "{answer}"
    );
}

#[tokio::test]
async fn an_answer_that_does_not_fit_the_batch_is_replaced_by_its_error() {
    let setup =
        Setup::in_process(Dialect::JsonRpc).server(|limits| limits.message_bytes = Some(50_000));
    let mut raw = setup.raw().await;
    let batch: Vec<_> = (0..3)
        .map(|id| request(id, "big", &json!({"n": 20_000})))
        .collect();
    raw.send_text(&json!(batch).to_string()).await;
    let answers = by_id(raw.receive().await);
    let large = answers
        .iter()
        .filter(|answer| answer["error"]["data"]["code"] == json!("too_large"))
        .count();
    let whole = answers
        .iter()
        .filter(|answer| answer["result"]["text"].is_string())
        .count();
    assert_eq!((whole, large), (2, 1), "{answers:?}");
}
