//! Box of a call, and parameters of the tool interface.

use box_protocol::actions::IfExists;
use box_protocol::error::Detail;
use box_protocol::{Code, SpecDraft};
use box_service::{Query, ServiceConfig};
use serde_json::json;

use crate::scripted_runtime::{ScriptedRuntime, object, query};

#[tokio::test]
async fn a_tool_runs_in_the_box_of_its_launcher() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    let result = service
        .execute_tool(object(json!({"command": "pwd"})), &query(7))
        .await
        .unwrap();
    assert_eq!(result.session_id.as_str(), "person_test_user");
    assert!(result.ok);
    assert_eq!(result.stdout, "executed: pwd");
    assert_eq!(runtime.record().started, ["person_test_user"]);
}

#[tokio::test]
async fn a_query_without_a_launcher_runs_in_a_separate_box() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    let result = service
        .execute_tool(
            object(json!({"command": "echo service-path"})),
            &Query::new(42),
        )
        .await
        .unwrap();
    let json = serde_json::to_value(&result).unwrap();
    assert_eq!(json["ok"], true);
    assert_eq!(json["status"], "completed");
    assert!(result.stdout.contains("service-path"));
    assert_eq!(json["session_id"], "42");
}

#[tokio::test]
async fn a_payload_can_name_its_box() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    let payload = object(json!({"cmd": "pwd", "session_id": "mine"}));
    service
        .execute_spec_payload(payload, &query(1))
        .await
        .unwrap();
    let blank = object(json!({"cmd": "pwd", "session_id": "  "}));
    service
        .execute_spec_payload(blank, &query(1))
        .await
        .unwrap();
    assert_eq!(runtime.record().started, ["mine", "person_test_user"]);
}

#[tokio::test]
async fn a_configured_template_names_the_box() {
    let runtime = ScriptedRuntime::new();
    let config = ServiceConfig {
        session_id_template: "{launcher_type}-{query_id}".into(),
        ..ServiceConfig::default()
    };
    let service = runtime.ready(config).await;
    let result = service
        .execute_tool(object(json!({"command": "pwd"})), &query(9))
        .await
        .unwrap();
    assert_eq!(result.session_id.as_str(), "person-9");
}

#[tokio::test]
async fn a_request_without_any_id_is_refused() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    let error = service
        .execute_tool(object(json!({"command": "pwd"})), &Query::default())
        .await
        .unwrap_err();
    assert_eq!(error.message(), "session_id: must not be empty");
    assert!(runtime.record().started.is_empty());
}

#[tokio::test]
async fn without_a_backend_execution_fails_closed() {
    let runtime = ScriptedRuntime::new().without_backend();
    let service = runtime.ready(ServiceConfig::default()).await;
    let error = service
        .execute_tool(object(json!({"command": "echo hello"})), &query(9))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
}

#[tokio::test]
async fn an_invalid_parameter_is_named_and_starts_nothing() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    for (parameters, field, text) in [
        (json!({}), "command", "command: must not be empty"),
        (
            json!({"command": " "}),
            "command",
            "command: must not be empty",
        ),
        (
            json!({"command": 5}),
            "command",
            "command: must be a string",
        ),
        (
            json!({"command": "ls", "session_id": "someone_else"}),
            "session_id",
            "session_id: not a parameter of exec",
        ),
        (
            json!({"command": "ls", "timeout_sec": 0}),
            "timeout_sec",
            "timeout_sec: 0 is below the minimum of 1",
        ),
        (
            json!({"command": "ls", "workdir": "relative"}),
            "workdir",
            "workdir: must be an absolute path inside the sandbox",
        ),
    ] {
        let error = service
            .execute_tool(object(parameters), &query(1))
            .await
            .unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::Validation, text));
        let detail: Detail = error.detail().unwrap();
        assert_eq!(detail.field.as_deref(), Some(field));
    }
    for payload in [
        json!({"cmd": "ls", "no_such_field": 1}),
        json!({"cmd": "ls", "cpus": 0}),
        json!({"cmd": "", "session_id": "s"}),
        json!({"session_id": "s"}),
    ] {
        let error = service
            .execute_spec_payload(object(payload), &query(1))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Validation);
    }
    assert_eq!(runtime.record().started, [""; 0]);
    assert_eq!(service.recent_errors().len(), 10);
}

#[tokio::test]
async fn a_tools_description_is_ignored_and_its_variables_forwarded() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    let parameters = json!({"command": "env", "description": "why", "env": {"A": "1"},
        "workdir": "/workspace/sub"});
    service
        .execute_tool(object(parameters), &query(1))
        .await
        .unwrap();
    let spec = runtime.first_spec();
    assert_eq!(spec.env["A"], "1");
    assert_eq!(spec.workdir, "/workspace/sub");
}

#[tokio::test]
async fn create_applies_the_same_policy() {
    let runtime = ScriptedRuntime::new();
    let config = ServiceConfig {
        profile: "offline_readonly".into(),
        ..ServiceConfig::default()
    };
    let service = runtime.ready(config).await;
    let draft = SpecDraft::new("made").read_only_rootfs(false);
    let made = service
        .create(draft.clone(), IfExists::Reuse, &query(1))
        .await
        .unwrap();
    assert!(!made.existed && made.info.read_only_rootfs);
    let again = service
        .create(draft, IfExists::Reuse, &query(1))
        .await
        .unwrap();
    assert!(again.existed);
}
