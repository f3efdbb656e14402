//! Host directories that a box can mount.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use box_protocol::{BoxError, Code};
use box_service::{ServiceConfig, ToolResult};
use serde_json::json;
use tempfile::TempDir;

use crate::scripted_runtime::{ScriptedRuntime, allowing, object, query};

fn temp() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let real = dir.path().canonicalize().unwrap();
    (dir, real)
}

fn made(path: PathBuf) -> PathBuf {
    fs::create_dir_all(&path).unwrap();
    path
}

async fn run_with(
    runtime: &ScriptedRuntime,
    config: ServiceConfig,
    path: &Path,
) -> Result<ToolResult, BoxError> {
    let service = runtime.ready(config).await;
    let payload =
        json!({"cmd": "pwd", "host_path": path, "host_path_mode": "rw", "session_id": "11"});
    service
        .execute_spec_payload(object(payload), &query(11))
        .await
}

#[tokio::test]
async fn a_host_path_under_a_configured_root_is_mounted() {
    let (_dir, top) = temp();
    let workspace = made(top.join("mounted-workspace"));
    let runtime = ScriptedRuntime::new();
    let result = run_with(&runtime, allowing(&[&top]), &workspace)
        .await
        .unwrap();
    assert!(result.ok);
    assert_eq!(runtime.record().started, ["11"]);
    assert_eq!(
        runtime.first_spec().host_path.as_deref(),
        workspace.to_str()
    );
}

#[tokio::test]
async fn a_host_path_outside_the_roots_is_refused() {
    let (_dir, top) = temp();
    let (allowed, other) = (made(top.join("allowed")), made(top.join("disallowed")));
    let look_alike = made(top.join("allowed-not"));
    let runtime = ScriptedRuntime::new();
    for path in [other, look_alike, allowed.join("../disallowed"), "/".into()] {
        let error = run_with(&runtime, allowing(&[&allowed]), &path)
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Validation);
        assert_eq!(
            error.message(),
            "host_path: outside allowed_host_mount_roots; allow it with boxd serve --allow-mount DIR"
        );
    }
    assert!(runtime.record().started.is_empty());
}

#[tokio::test]
async fn a_symbolic_link_is_checked_by_its_target() {
    let (_dir, top) = temp();
    let (allowed, other) = (made(top.join("allowed")), made(top.join("other")));
    let inside = made(allowed.join("real"));
    symlink(&other, allowed.join("out")).unwrap();
    symlink(&inside, top.join("in")).unwrap();
    let runtime = ScriptedRuntime::new();
    let refused = run_with(&runtime, allowing(&[&allowed]), &allowed.join("out")).await;
    assert_eq!(refused.unwrap_err().code(), Code::Validation);
    run_with(&runtime, allowing(&[&allowed]), &top.join("in"))
        .await
        .unwrap();
    assert_eq!(runtime.first_spec().host_path.as_deref(), inside.to_str());
}

#[tokio::test]
async fn a_host_path_must_exist() {
    let (_dir, top) = temp();
    let runtime = ScriptedRuntime::new();
    let error = run_with(&runtime, allowing(&[&top]), &top.join("missing"))
        .await
        .unwrap_err();
    assert_eq!(
        error.message(),
        "host_path: must point to an existing directory on the host"
    );
    let elsewhere = ServiceConfig {
        shared_filesystem: false,
        ..allowing(&[&top])
    };
    run_with(&runtime, elsewhere, &top.join("missing"))
        .await
        .unwrap();
}

#[tokio::test]
async fn the_default_workspace_is_used_when_none_is_named() {
    let (_dir, top) = temp();
    let workspace = made(top.join("default-workspace"));
    let runtime = ScriptedRuntime::new();
    let config = ServiceConfig {
        default_host_workspace: Some(workspace.clone()),
        ..allowing(&[&top])
    };
    let service = runtime.ready(config).await;
    let result = service
        .execute_tool(object(json!({"command": "pwd"})), &query(15))
        .await;
    assert!(result.unwrap().ok);
    let record = runtime.record();
    assert_eq!(record.started, ["person_test_user"]);
    assert_eq!(
        record.executed,
        [("person_test_user".to_owned(), "pwd".to_owned())]
    );
    assert_eq!(record.specs[0].host_path.as_deref(), workspace.to_str());
}

#[tokio::test]
async fn the_default_workspace_is_created_on_initialise() {
    let (_dir, top) = temp();
    let root = made(top.join("allowed-root"));
    let workspace = root.join("default-workspace");
    let config = ServiceConfig {
        default_host_workspace: Some(workspace.clone()),
        ..allowing(&[&root])
    };
    let service = ScriptedRuntime::new().served(config);
    assert!(!workspace.exists());
    service.initialize().await.unwrap();
    assert!(workspace.is_dir());
}

#[tokio::test]
async fn a_default_workspace_outside_the_roots_is_refused_and_not_created() {
    let (_dir, top) = temp();
    let root = made(top.join("allowed-root"));
    let config = ServiceConfig {
        default_host_workspace: Some(top.join("elsewhere")),
        ..allowing(&[&root])
    };
    let service = ScriptedRuntime::new().served(config);
    let error = service.initialize().await.unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (
            Code::Validation,
            "default_host_workspace: outside allowed_host_mount_roots; add its directory there"
        )
    );
    assert!(!top.join("elsewhere").exists());
}

#[tokio::test]
async fn workspace_and_root_derive_from_the_shared_root() {
    let (_dir, top) = temp();
    let shared = top.join("shared-box-root");
    let config = ServiceConfig {
        shared_host_root: Some(shared.clone()),
        ..ServiceConfig::default()
    };
    let service = ScriptedRuntime::new().ready(config).await;
    assert_eq!(service.shared_host_root(), Some(shared.clone()));
    assert_eq!(
        service.default_host_workspace(),
        Some(shared.join("default"))
    );
    assert_eq!(
        service.allowed_host_mount_roots(),
        std::slice::from_ref(&shared)
    );
    assert!(shared.join("default").is_dir());
}

#[tokio::test]
async fn refusals_contain_no_host_path() {
    let (_dir, top) = temp();
    let root = made(top.join("secret-root"));
    let runtime = ScriptedRuntime::new();
    let error = run_with(&runtime, allowing(&[&root]), Path::new("/usr"))
        .await
        .unwrap_err();
    let text = format!("{error:?}");
    assert!(!text.contains("secret-root"), "{text}");
}
