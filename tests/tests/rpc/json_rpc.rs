//! JSON-RPC 2.0 exactly as specified, where a client of any kind would notice.

use box_rpc::{Code, Fault};
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup};
use box_tests::raw::Raw;
use serde_json::{Value, json};

every_transport!(
    an_invalid_message_is_answered_under_null,
    parameters_that_are_not_an_object_are_invalid_parameters,
);

/// The fault that answers a text, without an id.
async fn fault_of(raw: &mut Raw, text: &str) -> Option<Fault> {
    raw.send_text(text).await;
    let answer = raw.answer().await;
    assert_eq!(answer.id, json!(null), "{text}");
    let error = answer.error();
    assert_eq!(error.code, Code::Validation, "{text}");
    error.protocol_fault
}

async fn an_invalid_message_is_answered_under_null(setup: Setup) {
    if setup.dialect != Dialect::JsonRpc {
        return;
    }
    // Also before a message has settled the dialect, where no token is required.
    let mut raw = setup.raw().await;
    for _ in 0..3 {
        for text in [
            "not JSON",
            "INFO a line of a log",
            "{\"jsonrpc\":\"2.0\",",
            "{\"a\"",
            "tru",
        ] {
            assert_eq!(fault_of(&mut raw, text).await, Some(Fault::Parse), "{text}");
        }
        for text in ["[]", " [ ] ", "7", "{}", "\"text\"", "{\"id\":1}", "[1]"] {
            raw.send_text(text).await;
            let answer = raw.receive().await;
            // The members of a batch are answered in one array.
            let answer = answer.get(0).unwrap_or(&answer);
            assert_eq!(answer["error"]["code"], json!(-32600), "{text}: {answer}");
        }
    }
    raw.call(9, "echo", &json!({"text": "still here"})).await;
    assert_eq!(raw.answer().await.result(), json!({"text": "still here"}));
}

async fn parameters_that_are_not_an_object_are_invalid_parameters(setup: Setup) {
    if setup.dialect != Dialect::JsonRpc {
        return;
    }
    let mut raw = setup.service().raw().await;
    let odd = [json!([]), json!(["a"]), json!(3), json!("a"), json!(true)];
    for action in [
        "box.get",
        "box.create",
        "command.attach",
        "file.write",
        "system.health",
    ] {
        for params in &odd {
            raw.call(7, action, params).await;
            let answer = raw.answer().await;
            let error = answer.error();
            let shape = (answer.id, error.code, error.protocol_fault);
            let expected = (json!(7), Code::Validation, Some(Fault::InvalidParams));
            assert_eq!(shape, expected, "{action} {params}: {}", error.message);
            // A notification gets no answer.
            let text = json!({"jsonrpc": "2.0", "method": action, "params": params});
            raw.send_text(&text.to_string()).await;
        }
    }
    raw.call(8, "box.list", &Value::Null).await;
    assert_eq!(
        raw.answer().await.id,
        json!(8),
        "absent and null are an empty object"
    );
}
