//! Metadata beside the parameters (`_meta`, or the members of LangBot's frames): every action
//! accepts it and applies it.

use std::collections::BTreeMap;

use box_protocol::actions::ALL_ACTIONS;
use box_rpc::Code;
use box_tests::every_transport;
use box_tests::fixture::{Dialect, Setup};
use box_tests::raw::{Raw, RawAnswer};
use serde_json::{Value, json};

every_transport!(
    every_action_accepts_metadata_beside_its_parameters,
    a_deadline_ends_a_call_that_is_passed_on,
    a_request_key_holds_for_a_call_that_is_passed_on,
);

/// Sends a call with metadata where the dialect has it.
async fn call(raw: &mut Raw, id: i64, action: &str, params: &Value, beside: &Value) {
    let text = match raw.dialect {
        Dialect::JsonRpc => {
            let mut params = params.clone();
            params["_meta"] = beside.clone();
            json!({"jsonrpc": "2.0", "id": id, "method": action, "params": params})
        }
        Dialect::LangBot => {
            let mut frame = json!({"seq_id": id, "action": action, "data": params});
            for (name, value) in beside.as_object().unwrap() {
                frame[name] = value.clone();
            }
            frame
        }
    };
    raw.send_text(&text.to_string()).await;
}

/// The outcome of a call, in a form that is the same for each call.
fn outcome(answer: &RawAnswer) -> (bool, Option<Code>, String) {
    match &answer.outcome {
        Ok(_) => (true, None, String::new()),
        Err(error) => (false, Some(error.code), error.message.clone()),
    }
}

async fn every_action_accepts_metadata_beside_its_parameters(setup: Setup) {
    let mut raw = setup.service().raw().await;
    raw.call(1, "box.create", &json!({"spec": {"box_id": "b"}}))
        .await;
    raw.answer().await.result();
    let named = json!({"box_id": "b"});
    let command = json!({"box_id": "b", "command_id": "c"});
    let file = json!({"box_id": "b", "path": "/f"});
    let shell = json!({"box_id": "b", "shell_id": "s"});
    // Each call has the same outcome with and without metadata, whether the runtime serves or refuses it.
    let mut asked: BTreeMap<&str, Value> = [
        ("box.create", json!({"spec": {"box_id": "b"}})),
        ("box.exec", json!({"spec": {"box_id": "b", "cmd": "true"}})),
        ("box.transition", json!({"box_id": "b", "to": "running"})),
        ("command.start", json!({"box_id": "b", "program": {"text": "true"}})),
        ("command.list", named.clone()),
        ("shell.run", json!({"box_id": "b", "shell_id": "s", "text": "true"})),
        ("shell.list", named.clone()),
        ("shell.create", named.clone()),
        ("shell.delete", shell),
        ("file.write", json!({"box_id": "b", "path": "/f", "data": ""})),
        ("file.stat", json!({"box_id": "b", "paths": ["/f"]})),
        ("file.find", json!({"box_id": "b", "path": "/", "glob": "*"})),
        ("file.grep", json!({"box_id": "b", "path": "/", "pattern": "x"})),
        ("file.replace", json!({"box_id": "b", "path": "/f", "old": "a", "new": "b"})),
        ("file.move", json!({"box_id": "b", "src": "/f", "dest": "/g"})),
        ("file.remove", json!({"box_id": "b", "paths": ["/f"]})),
        (
            "file.unpack",
            json!({"box_id": "b", "path": "/", "data": "", "upload": {"id": "u", "offset": 0, "done": true}}),
        ),
        ("port.open", json!({"box_id": "b", "port": 80})),
        ("port.send", json!({"box_id": "b", "conn_id": "x"})),
        ("port.share", json!({"box_id": "b", "port": 80})),
        ("box.events", json!({})),
        ("box.list", json!({})),
    ]
    .into();
    for action in ALL_ACTIONS {
        let noun = action.split('.').next();
        asked.entry(action).or_insert_with(|| match noun {
            Some("box") => named.clone(),
            Some("command") => command.clone(),
            Some("file") => file.clone(),
            _ => json!({}),
        });
    }
    // The action that ends everything is last.
    let last =
        |(action, _): &(&&str, &Value)| **action == "system.shutdown" || **action == "box.delete";
    let (ends, others): (Vec<_>, Vec<_>) = asked.iter().partition(last);
    let mut id = 10;
    for (action, params) in others.into_iter().chain(ends) {
        id += 1;
        raw.call(id, action, params).await;
        let plain = raw.answer().await;
        if *action == "box.delete" {
            raw.call(1, "box.create", &json!({"spec": {"box_id": "b"}}))
                .await;
            raw.answer().await.result();
        }
        let key = format!("{action} once");
        let beside = json!({"deadline_ms": 60_000, "key": key, "context": {}});
        call(&mut raw, id, action, params, &beside).await;
        let with = raw.answer().await;
        assert_eq!(with.id, json!(id));
        assert_eq!(outcome(&with), outcome(&plain), "{action}");
    }
    assert_eq!(id - 10, i64::try_from(ALL_ACTIONS.len()).unwrap());
}

async fn a_deadline_ends_a_call_that_is_passed_on(setup: Setup) {
    let mut raw = setup.service().raw().await;
    let hang = json!({"spec": {"box_id": "b", "cmd": "hang", "timeout_sec": 600}});
    raw.call(1, "box.create", &json!({"spec": {"box_id": "b"}}))
        .await;
    raw.answer().await.result();
    raw.call(2, "box.exec", &hang).await;
    // The call waits behind the command, which never ends.
    let asked = json!({"box_id": "b"});
    call(
        &mut raw,
        3,
        "box.delete",
        &asked,
        &json!({"deadline_ms": 200}),
    )
    .await;
    let answer = raw.answer().await;
    assert_eq!(answer.id, json!(3));
    let message = answer.error().message;
    assert!(message.contains("deadline of"), "{message}");
}

async fn a_request_key_holds_for_a_call_that_is_passed_on(setup: Setup) {
    let mut raw = setup.service().raw().await;
    for id in ["a", "b"] {
        raw.call(1, "box.create", &json!({"spec": {"box_id": id}}))
            .await;
        raw.answer().await.result();
    }
    let beside = json!({"key": "the same"});
    let mut asked = async |id, session: &str| {
        call(
            &mut raw,
            id,
            "box.delete",
            &json!({"box_id": session}),
            &beside,
        )
        .await;
        raw.answer().await
    };
    let first = asked(2, "a").await.result();
    let again = asked(3, "a").await.result();
    assert_eq!(
        again, first,
        "it ran once: the box is gone and the answer is the same"
    );
    let other = asked(4, "b").await.error();
    assert!(other.message.contains("key"), "{other:?}");
}
