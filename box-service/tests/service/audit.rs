//! The audit lines of the log: one per decision, one per finished execution, and no secret in any.

use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex};

use box_service::ServiceConfig;
use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::scripted_runtime::{ScriptedRuntime, object, query};

/// Collects the audit lines of its thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct AuditLines(Arc<Mutex<Vec<String>>>);

impl AuditLines {
    pub(crate) fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, "{field}={value:?};");
    }
}

impl Subscriber for AuditLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "box_service::audit"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = String::new();
        event.record(&mut Line(&mut line));
        self.0.lock().unwrap().push(line);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

async fn lines(config: ServiceConfig) -> Vec<String> {
    let audit = AuditLines::default();
    let _guard = tracing::subscriber::set_default(audit.clone());
    let service = ScriptedRuntime::new()
        .printing("secret-output", "")
        .ready(config)
        .await;
    let parameters = json!({"command": "echo secret-text", "env": {"TOKEN": "secret-value"},
        "timeout_sec": 999});
    service
        .execute_tool(object(parameters), &query(60))
        .await
        .unwrap();
    service
        .execute_tool(object(json!({"command": "ls", "workdir": "x"})), &query(61))
        .await
        .unwrap_err();
    audit.lines()
}

#[tokio::test]
async fn decisions_and_ends_are_logged_without_secrets() {
    let lines = lines(ServiceConfig::default()).await;
    assert_eq!(lines.len(), 3, "{lines:?}");
    for (line, parts) in lines.iter().zip([
        &["message=allowed", "query_id=\"60\"", "asked: \"999\""][..],
        &[
            "message=finished",
            "box_id=\"person_test_user\"",
            "exit_code=0",
        ],
        &["message=failed", "query_id=\"61\"", "code=\"validation\""],
    ]) {
        for part in parts {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(!line.contains("secret"), "{line}");
    }
    assert!(lines[0].contains("TOKEN"), "{}", lines[0]);
}

#[tokio::test]
async fn commands_are_logged_only_if_configured() {
    let config = ServiceConfig {
        log_commands: true,
        ..ServiceConfig::default()
    };
    let lines = lines(config).await;
    assert!(lines[0].contains("echo secret-text"), "{}", lines[0]);
    assert!(!lines[0].contains("secret-value"), "{}", lines[0]);
}
