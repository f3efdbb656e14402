//! Truncation of each output stream.

use box_service::{ServiceConfig, ToolResult};
use serde_json::json;

use crate::scripted_runtime::{ScriptedRuntime, object, query};

async fn print(stdout: &str, stderr: &str, limit: usize) -> ToolResult {
    let runtime = ScriptedRuntime::new().printing(stdout, stderr);
    let config = ServiceConfig {
        output_limit_chars: limit,
        ..ServiceConfig::default()
    };
    let service = runtime.ready(config).await;
    service
        .execute_tool(object(json!({"command": "cat"})), &query(20))
        .await
        .unwrap()
}

#[tokio::test]
async fn short_output_is_unchanged() {
    let result = print("hello world", "", 100).await;
    assert_eq!(result.stdout, "hello world");
    assert!(!result.stdout_truncated);
}

#[tokio::test]
async fn truncation_preserves_head_and_tail() {
    let big = format!("HEAD_START|{}|TAIL_END", "x".repeat(500));
    let result = print(&big, "", 100).await;
    assert!(result.stdout_truncated);
    assert!(result.stdout.starts_with("HEAD_START|"));
    assert!(result.stdout.ends_with("|TAIL_END"));
    assert!(result.stdout.contains("characters truncated"));
    assert!(result.stdout.chars().count() <= 100);
}

#[tokio::test]
async fn output_of_exactly_the_limit_is_unchanged() {
    let exact = "a".repeat(200);
    let result = print(&exact, "", 200).await;
    assert_eq!(result.stdout, exact);
    assert!(!result.stdout_truncated);
}

#[tokio::test]
async fn each_stream_is_truncated_separately() {
    let result = print("short", &"E".repeat(300), 100).await;
    assert!(!result.stdout_truncated);
    assert_eq!(result.stdout, "short");
    assert!(result.stderr_truncated);
    assert!(result.stderr.contains("characters truncated"));
    assert!(result.stderr.chars().count() <= 100);
}

#[tokio::test]
async fn the_default_limit_is_4000_characters() {
    let limit = ServiceConfig::default().output_limit_chars;
    let result = print(&"é".repeat(4000), &"é".repeat(4001), limit).await;
    assert!(!result.stdout_truncated && result.stderr_truncated);
    assert_eq!(result.stderr.chars().count(), 4000);
}
