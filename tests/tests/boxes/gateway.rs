//! The contract of a gateway: the policy layer, served over every transport.

use box_tests::boxes::OUTPUT_CHARS;
use box_tests::every_transport;
use box_tests::fixture::Setup;
use serde_json::{Map, Value, json};

every_transport!(an_exec_reports_which_output_was_cut_and_is_otherwise_langbots);

async fn an_exec_reports_which_output_was_cut_and_is_otherwise_langbots(setup: Setup) {
    let mut raw = setup.service().raw().await;
    let mut exec = async |id, command: &str| -> Map<String, Value> {
        let spec = json!({"box_id": "s", "cmd": command});
        raw.call(id, "box.exec", &json!({"spec": spec})).await;
        serde_json::from_value(raw.answer().await.result()).unwrap()
    };
    let mut whole = exec(1, "print 100").await;
    whole.remove("duration_ms").expect("a duration");
    let expected = json!({"box_id": "s", "backend_name": "fake", "status": "completed",
        "exit_code": 0, "stdout": "é".repeat(OUTPUT_CHARS), "stderr": "quiet"});
    assert_eq!(json!(whole), expected);
    let cut = exec(2, "print 101").await;
    assert_eq!(cut["stdout_truncated"], json!(true));
    assert_eq!(cut.get("stderr_truncated"), None);
    assert_eq!(
        cut["stdout"].as_str().unwrap().chars().count(),
        OUTPUT_CHARS
    );
}
