//! Status, list of boxes and recent errors.

use box_protocol::UnixMs;
use box_service::ServiceConfig;
use serde_json::json;

use crate::scripted_runtime::{ScriptedRuntime, object, query};

#[tokio::test]
async fn a_failure_is_recorded() {
    let runtime = ScriptedRuntime::new().without_backend();
    let service = runtime.ready(ServiceConfig::default()).await;
    service
        .execute_tool(object(json!({"command": "echo hello"})), &query(50))
        .await
        .unwrap_err();
    let errors = serde_json::to_value(service.recent_errors()).unwrap();
    assert_eq!(errors.as_array().unwrap().len(), 1);
    assert_eq!(errors[0]["type"], "BoxBackendUnavailableError");
    assert_eq!(errors[0]["message"], "no backend is available");
    assert_eq!(errors[0]["query_id"], "50");
    let at = UnixMs(errors[0]["timestamp"].as_u64().unwrap());
    assert!(UnixMs::now().since(at).as_secs() < 60);
}

#[tokio::test]
async fn at_most_fifty_failures_are_recorded() {
    let runtime = ScriptedRuntime::new().without_backend();
    let service = runtime.ready(ServiceConfig::default()).await;
    for number in 0..60 {
        service
            .execute_tool(object(json!({"command": "fail"})), &query(100 + number))
            .await
            .unwrap_err();
    }
    let errors = service.recent_errors();
    assert_eq!(errors.len(), 50);
    assert_eq!(errors[0].query_id.as_deref(), Some("110"));
    assert_eq!(errors[49].query_id.as_deref(), Some("159"));
}

#[tokio::test]
async fn status_combines_runtime_and_service() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    let status = serde_json::to_value(service.status().await).unwrap();
    for (member, value) in [
        ("profile", json!("default")),
        ("active_boxes", json!(0)),
        ("recent_error_count", json!(0)),
        ("available", json!(true)),
        ("enabled", json!(true)),
        ("connector_error", json!(null)),
    ] {
        assert_eq!(status[member], value, "{member}");
    }
    assert_eq!(status["backend"]["name"], "fake");
    assert_eq!(status["backend"]["available"], true);

    service
        .execute_tool(object(json!({"command": ""})), &query(1))
        .await
        .unwrap_err();
    service
        .execute_tool(object(json!({"command": "ls"})), &query(1))
        .await
        .unwrap();
    let status = service.status().await;
    assert_eq!(status.runtime.active_boxes, 1);
    assert_eq!(status.runtime.recent_error_count, 1);
    assert_eq!(status.runtime.recent_errors, service.recent_errors());
}

#[tokio::test]
async fn status_reports_why_boxes_are_unavailable() {
    let runtime = ScriptedRuntime::new().without_backend();
    let service = runtime.ready(ServiceConfig::default()).await;
    let status = service.status().await;
    assert!(!status.available && status.connector_error.is_none());

    let served = ScriptedRuntime::new().served(ServiceConfig::default());
    served
        .connection
        .near
        .close(std::time::Duration::ZERO)
        .await;
    served.initialize().await.unwrap();
    let status = served.status().await;
    assert!(!status.available && status.enabled);
    assert_eq!(status.runtime.profile.as_deref(), Some("default"));
    assert!(status.connector_error.is_some());
}

#[tokio::test]
async fn sessions_lists_the_boxes_of_the_runtime() {
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(ServiceConfig::default()).await;
    for number in 0..5 {
        let payload = json!({"cmd": "ls", "session_id": format!("test-session-{number}")});
        service
            .execute_spec_payload(object(payload), &query(1))
            .await
            .unwrap();
    }
    let ids: Vec<_> = service
        .sessions()
        .await
        .unwrap()
        .into_iter()
        .map(|info| info.box_id.to_string())
        .collect();
    let expected: Vec<_> = (0..5).map(|n| format!("test-session-{n}")).collect();
    assert_eq!(ids, expected);
}
