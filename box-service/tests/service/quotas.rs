//! Quota of a workspace.

use std::fs;
use std::path::Path;

use box_protocol::{BoxError, Code};
use box_service::{ServiceConfig, ToolResult};
use serde_json::json;

use crate::scripted_runtime::{ScriptedRuntime, ServiceFixture, allowing, object, query};

const TWO_MIB: usize = 2 * 1024 * 1024;

fn with_quota(workspace: &Path, megabytes: u64) -> ServiceConfig {
    ServiceConfig {
        default_host_workspace: Some(workspace.to_owned()),
        workspace_quota_mb: Some(megabytes),
        ..allowing(&[workspace])
    }
}

async fn run(service: &ServiceFixture) -> Result<ToolResult, BoxError> {
    service
        .execute_tool(object(json!({"command": "generate-output"})), &query(45))
        .await
}

#[tokio::test]
async fn the_configured_quota_is_set_in_the_spec() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(with_quota(dir.path(), 32)).await;
    run(&service).await.unwrap();
    assert_eq!(runtime.first_spec().workspace_quota_mb, 32);
}

#[tokio::test]
async fn a_workspace_over_its_quota_refuses_a_command() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("already-too-large.bin"),
        vec![b'x'; TWO_MIB],
    )
    .unwrap();
    let runtime = ScriptedRuntime::new();
    let service = runtime.ready(with_quota(dir.path(), 1)).await;
    let error = run(&service).await.unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    assert!(
        error
            .message()
            .contains("workspace_quota_mb: the workspace exceeds 1 MiB, counted before execution"),
        "{error}"
    );
    assert!(runtime.record().started.is_empty());
}

#[tokio::test]
async fn a_box_is_deleted_when_its_command_exceeds_the_quota() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = ScriptedRuntime::new().writing("output.bin", TWO_MIB);
    let service = runtime.ready(with_quota(dir.path(), 1)).await;
    let error = run(&service).await.unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    assert!(
        error
            .message()
            .contains("workspace_quota_mb: the workspace exceeds 1 MiB, counted after execution"),
        "{error}"
    );
    let record = runtime.record();
    assert_eq!(record.started, ["person_test_user"]);
    assert_eq!(record.deleted, ["person_test_user"]);
}

#[tokio::test]
async fn without_a_quota_the_workspace_is_not_measured() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = ScriptedRuntime::new().writing("output.bin", TWO_MIB);
    let service = runtime.ready(with_quota(dir.path(), 0)).await;
    run(&service).await.unwrap();
    assert!(runtime.record().deleted.is_empty());
}

#[tokio::test]
async fn a_box_is_deleted_when_a_failed_command_exceeds_the_quota() {
    let dir = tempfile::tempdir().unwrap();
    let failure = BoxError::unavailable("the agent is gone");
    let within = ScriptedRuntime::new().failing(failure.clone());
    let service = within.ready(with_quota(dir.path(), 1)).await;
    assert_eq!(run(&service).await.unwrap_err(), failure);
    assert!(within.record().deleted.is_empty());

    let beyond = ScriptedRuntime::new()
        .writing("output.bin", TWO_MIB)
        .failing(failure);
    let service = beyond.ready(with_quota(dir.path(), 1)).await;
    let error = run(&service).await.unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    assert!(
        error
            .message()
            .contains("workspace_quota_mb: the workspace exceeds 1 MiB, counted after execution"),
        "{error}"
    );
    assert_eq!(beyond.record().deleted, ["person_test_user"]);
    assert_eq!(service.recent_errors().len(), 1, "and it is reported once");
}
