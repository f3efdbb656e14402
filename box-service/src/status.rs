//! Status and results that the service returns.

use box_protocol::actions::SystemStatusResult;
use box_protocol::{BoxExecutionResult, BoxId, ExecutionStatus};
use serde::Serialize;

use crate::truncate::truncate;

/// Status of the runtime and of the service.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServiceStatus {
    /// Status of the runtime, with the profile and the recent errors filled in.
    /// Empty if the runtime is unreachable.
    #[serde(flatten)]
    pub runtime: SystemStatusResult,
    /// Whether boxes can be created now.
    pub available: bool,
    /// Whether the service offers boxes at all.
    pub enabled: bool,
    /// Why the runtime is unreachable, if it is.
    pub connector_error: Option<String>,
}

/// Result of the `exec` tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolResult {
    /// Id of the box.
    pub session_id: BoxId,
    /// Backend that runs the box.
    pub backend: String,
    /// Whether the command completed.
    pub status: ExecutionStatus,
    /// Whether the command completed and returned 0.
    pub ok: bool,
    /// Exit code; `null` after a timeout.
    pub exit_code: Option<i32>,
    /// Standard output, possibly truncated.
    pub stdout: String,
    /// Standard error, possibly truncated.
    pub stderr: String,
    /// Whether a part of standard output is missing.
    pub stdout_truncated: bool,
    /// Whether a part of standard error is missing.
    pub stderr_truncated: bool,
    /// Duration of the run in milliseconds.
    pub duration_ms: u64,
}

/// Truncates each stream of a result to `limit` characters and marks it.
/// A limit of 0 truncates nothing.
pub(crate) fn truncate_output(mut result: BoxExecutionResult, limit: usize) -> BoxExecutionResult {
    let shorten = |text: &mut String, dropped: u64, truncated: &mut bool| {
        let cut = if limit == 0 {
            None
        } else {
            truncate(text, limit)
        };
        *truncated |= cut.is_some() || dropped > 0;
        if let Some(cut) = cut {
            *text = cut;
        }
    };
    let BoxExecutionResult {
        stdout,
        stderr,
        stdout_dropped,
        stderr_dropped,
        stdout_truncated,
        stderr_truncated,
        ..
    } = &mut result;
    shorten(stdout, *stdout_dropped, stdout_truncated);
    shorten(stderr, *stderr_dropped, stderr_truncated);
    result
}

impl From<BoxExecutionResult> for ToolResult {
    fn from(result: BoxExecutionResult) -> Self {
        Self {
            ok: result.ok(),
            session_id: result.box_id,
            backend: result.backend_name,
            status: result.status,
            exit_code: result.exit_code,
            stdout: result.stdout,
            stderr: result.stderr,
            stdout_truncated: result.stdout_truncated,
            stderr_truncated: result.stderr_truncated,
            duration_ms: result.duration_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use box_protocol::{Exit, ExitWhy};
    use serde_json::{Value, json};

    fn ran(exit: Exit) -> BoxExecutionResult {
        let id = BoxId::new("s1").unwrap();
        BoxExecutionResult::new(id, "fake", exit, 12).unwrap()
    }

    #[test]
    fn a_tool_result_has_exactly_these_members() {
        let result = ran(Exit::returned(0)).with_output("out", "err");
        let tool = ToolResult::from(truncate_output(result, 100));
        let expected = json!({"session_id": "s1", "backend": "fake", "status": "completed",
            "ok": true, "exit_code": 0, "stdout": "out", "stderr": "err",
            "stdout_truncated": false, "stderr_truncated": false, "duration_ms": 12});
        assert_eq!(serde_json::to_value(tool).unwrap(), expected);
    }

    #[test]
    fn a_timeout_is_not_ok_and_has_no_code() {
        let late = ran(Exit::by_signal(9, ExitWhy::Timeout));
        let json = serde_json::to_value(ToolResult::from(truncate_output(late, 100))).unwrap();
        assert_eq!(
            (&json["status"], &json["ok"], &json["exit_code"]),
            (&json!("timed_out"), &json!(false), &Value::Null)
        );
    }

    #[test]
    fn output_that_the_runtime_dropped_counts_as_truncated() {
        let mut result = ran(Exit::returned(0)).with_output("out", "err");
        result.stderr_dropped = 1;
        let tool = ToolResult::from(truncate_output(result, 100));
        assert!(!tool.stdout_truncated && tool.stderr_truncated);
    }

    #[test]
    fn a_limit_of_zero_truncates_nothing() {
        let long = "x".repeat(100_000);
        let result = ran(Exit::returned(0)).with_output(long.clone(), "");
        let tool = ToolResult::from(truncate_output(result, 0));
        assert!(tool.stdout == long && !tool.stdout_truncated);
    }
}
