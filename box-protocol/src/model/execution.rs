//! The exit status of a command, and the result of an exec.

use serde::{Deserialize, Serialize};

use super::adjusted::Adjusted;
use crate::error::BoxError;
use crate::ids::BoxId;
use crate::invalid::Invalid;

/// The exit status of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Exit {
    /// The exit code; absent after a signal or a timeout.
    #[serde(default)]
    pub code: Option<i32>,
    /// The signal that ended the command; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Why the command ended.
    pub why: ExitWhy,
}

/// Why a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExitWhy {
    /// The process exited.
    Exit,
    /// A signal that the runtime did not send.
    Signal,
    /// The time limit was reached.
    Timeout,
    /// No reader was attached within the idle limit.
    Idle,
    /// A client killed the command.
    Killed,
    /// The box was out of memory. The runtime reports it; the agent cannot observe it.
    Oom,
    /// The box ended.
    BoxEnded,
    /// The exit was not observed.
    Lost,
}

impl Exit {
    /// The exit status of a process that exited with this code.
    pub const fn returned(code: i32) -> Self {
        Self {
            code: Some(code),
            signal: None,
            why: ExitWhy::Exit,
        }
    }

    /// The exit status of a process that a signal ended, for this reason.
    pub const fn by_signal(signal: i32, why: ExitWhy) -> Self {
        Self {
            code: None,
            signal: Some(signal),
            why,
        }
    }

    /// Returns the exit code as a shell shows it, 128 plus the signal after a signal; `None` after
    /// a timeout.
    pub fn shell_code(&self) -> Option<i32> {
        if self.why == ExitWhy::Timeout {
            return None;
        }
        self.code
            .or_else(|| self.signal.map(|signal| signal.saturating_add(128)))
    }
}

/// Whether an exec ran to its exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ExecutionStatus {
    /// The command exited.
    Completed,
    /// The time limit was reached.
    TimedOut,
}

/// What the runtime ended when an exec timed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Killed {
    /// The command and its process tree. The box stays.
    Command,
    /// The whole box.
    Box,
}

/// The result of an exec.
///
/// A completed exec has an exit code, which is 128 plus the signal after a signal. A timed-out one
/// has none. Constructor and decoder enforce this.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(!try_from, transform = crate::schema::code_by_status))]
#[serde(try_from = "Fields")]
#[non_exhaustive]
pub struct BoxExecutionResult {
    /// The box.
    pub box_id: BoxId,
    /// The backend that runs the box.
    pub backend_name: String,
    /// Whether the command ran to its exit.
    pub status: ExecutionStatus,
    /// The exit code, which is 128 plus the signal after a signal; `null` after a timeout.
    pub exit_code: Option<i32>,
    /// The signal that ended the command; absent otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Whether the command was killed because the box was out of memory; absent if not.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub oom: bool,
    /// What the runtime ended because of the timeout; absent without a timeout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub killed: Option<Killed>,
    /// Standard output.
    #[cfg_attr(feature = "schema", schemars(default))]
    pub stdout: String,
    /// Standard error.
    #[cfg_attr(feature = "schema", schemars(default))]
    pub stderr: String,
    /// Run time in milliseconds.
    pub duration_ms: u64,
    /// Number of bytes of standard output that were counted but not kept.
    #[serde(skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub stdout_dropped: u64,
    /// Number of bytes of standard error that were counted but not kept.
    #[serde(skip_serializing_if = "is_zero")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub stderr_dropped: u64,
    /// Whether standard output is incomplete: truncated by the service, or dropped before; absent
    /// if not.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub stdout_truncated: bool,
    /// Whether standard error is incomplete: truncated by the service, or dropped before; absent if
    /// not.
    #[serde(skip_serializing_if = "is_false")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub stderr_truncated: bool,
    /// Fields of the request that the profile changed; absent if none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(default))]
    pub adjusted: Vec<Adjusted>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_false(flag: &bool) -> bool {
    !*flag
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl BoxExecutionResult {
    /// Creates the result of an exec; `unavailable` if the exit status has no code, signal or
    /// timeout.
    pub fn new(
        box_id: BoxId,
        backend_name: impl Into<String>,
        exit: Exit,
        duration_ms: u64,
    ) -> Result<Self, BoxError> {
        let (status, signal) = match exit.why {
            ExitWhy::Timeout => (ExecutionStatus::TimedOut, None),
            _ => (
                ExecutionStatus::Completed,
                exit.signal.filter(|_| exit.code.is_none()),
            ),
        };
        let exit_code = exit.shell_code();
        if status == ExecutionStatus::Completed && exit_code.is_none() {
            return Err(BoxError::unavailable("command: its exit status is unknown"));
        }
        Ok(Self {
            box_id,
            backend_name: backend_name.into(),
            status,
            exit_code,
            signal,
            oom: exit.why == ExitWhy::Oom,
            killed: (status == ExecutionStatus::TimedOut).then_some(Killed::Command),
            stdout: String::new(),
            stderr: String::new(),
            duration_ms,
            stdout_dropped: 0,
            stderr_dropped: 0,
            stdout_truncated: false,
            stderr_truncated: false,
            adjusted: Vec::new(),
        })
    }

    /// Sets the output.
    pub fn with_output(mut self, stdout: impl Into<String>, stderr: impl Into<String>) -> Self {
        self.stdout = stdout.into();
        self.stderr = stderr.into();
        self
    }

    /// It completed, and returned 0.
    pub fn ok(&self) -> bool {
        self.status == ExecutionStatus::Completed && self.exit_code == Some(0)
    }
}

#[derive(Deserialize)]
struct Fields {
    box_id: BoxId,
    backend_name: String,
    status: ExecutionStatus,
    #[serde(default)]
    exit_code: Option<i32>,
    #[serde(default)]
    signal: Option<i32>,
    #[serde(default)]
    oom: bool,
    #[serde(default)]
    killed: Option<Killed>,
    #[serde(default)]
    stdout: String,
    #[serde(default)]
    stderr: String,
    duration_ms: u64,
    #[serde(default)]
    stdout_dropped: u64,
    #[serde(default)]
    stderr_dropped: u64,
    #[serde(default)]
    stdout_truncated: bool,
    #[serde(default)]
    stderr_truncated: bool,
    #[serde(default)]
    adjusted: Vec<Adjusted>,
}

impl TryFrom<Fields> for BoxExecutionResult {
    type Error = Invalid;

    fn try_from(f: Fields) -> Result<Self, Invalid> {
        match (f.status, f.exit_code, f.signal) {
            (ExecutionStatus::TimedOut, Some(_), _) => {
                return Err(Invalid::new(
                    "exit_code",
                    "must be null when status is timed_out",
                ));
            }
            (ExecutionStatus::Completed, None, _) => {
                return Err(Invalid::new(
                    "exit_code",
                    "must be given when status is completed",
                ));
            }
            (_, code, Some(signal)) if code != signal.checked_add(128) => {
                return Err(Invalid::new("signal", "must be exit_code minus 128"));
            }
            _ => {}
        }
        Ok(Self {
            box_id: f.box_id,
            backend_name: f.backend_name,
            status: f.status,
            exit_code: f.exit_code,
            signal: f.signal,
            oom: f.oom,
            killed: f.killed,
            stdout: f.stdout,
            stderr: f.stderr,
            duration_ms: f.duration_ms,
            stdout_dropped: f.stdout_dropped,
            stderr_dropped: f.stderr_dropped,
            stdout_truncated: f.stdout_truncated,
            stderr_truncated: f.stderr_truncated,
            adjusted: f.adjusted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use serde_json::{Value, json};

    fn result(exit: Exit) -> Result<BoxExecutionResult, BoxError> {
        BoxExecutionResult::new(BoxId::new("s1").unwrap(), "fake", exit, 1)
    }

    #[test]
    fn a_result_reports_a_kill_for_memory() {
        let killed = result(Exit::by_signal(9, ExitWhy::Oom)).unwrap();
        let json = serde_json::to_value(&killed).unwrap();
        assert_eq!(
            (&json["exit_code"], &json["oom"]),
            (&json!(137), &json!(true))
        );
        let read: BoxExecutionResult = serde_json::from_value(json).unwrap();
        assert_eq!(read, killed);
        assert!(!result(Exit::by_signal(9, ExitWhy::Signal)).unwrap().oom);
    }

    #[test]
    fn a_completed_result_has_these_members() {
        let ran = result(Exit::returned(0))
            .unwrap()
            .with_output("echo hi", "");
        assert!(ran.ok());
        let captured = json!({"box_id": "s1", "backend_name": "fake", "status": "completed",
            "exit_code": 0, "stdout": "echo hi", "stderr": "", "duration_ms": 1});
        assert_eq!(serde_json::to_value(&ran).unwrap(), captured);
        assert_eq!(
            serde_json::from_value::<BoxExecutionResult>(captured).unwrap(),
            ran
        );
    }

    #[test]
    fn only_missing_output_is_reported() {
        let mut ran = result(Exit::returned(0)).unwrap();
        ran.stderr_truncated = true;
        let json = serde_json::to_value(&ran).unwrap();
        assert_eq!(json["stderr_truncated"], true);
        assert!(json.get("stdout_truncated").is_none());
        assert_eq!(
            serde_json::from_value::<BoxExecutionResult>(json).unwrap(),
            ran
        );
    }

    #[test]
    fn a_timed_out_result_has_a_null_code() {
        let late = result(Exit::by_signal(9, ExitWhy::Timeout)).unwrap();
        assert_eq!(late.status, ExecutionStatus::TimedOut);
        assert!(!late.ok());
        let json = serde_json::to_value(&late).unwrap();
        assert_eq!(json["exit_code"], Value::Null);
        assert_eq!(json["status"], "timed_out");
        assert!(json.get("signal").is_none());
        assert_eq!(
            serde_json::from_value::<BoxExecutionResult>(json).unwrap(),
            late
        );
    }

    #[test]
    fn a_result_has_the_signal_and_the_code() {
        let shot = result(Exit::by_signal(9, ExitWhy::Signal)).unwrap();
        assert_eq!((shot.exit_code, shot.signal), (Some(137), Some(9)));
        let json = serde_json::to_value(&shot).unwrap();
        assert_eq!(
            serde_json::from_value::<BoxExecutionResult>(json).unwrap(),
            shot
        );
    }

    #[test]
    fn an_unobserved_exit_is_not_a_result() {
        let lost = Exit {
            code: None,
            signal: None,
            why: ExitWhy::Lost,
        };
        assert_eq!(result(lost).unwrap_err().code(), Code::Unavailable);
    }

    #[test]
    fn contradictory_results_are_rejected() {
        for (status, code, signal, field) in [
            ("timed_out", json!(0), json!(null), "exit_code"),
            ("completed", json!(null), json!(null), "exit_code"),
            ("completed", json!(1), json!(9), "signal"),
            ("timed_out", json!(null), json!(9), "signal"),
        ] {
            let value = json!({"box_id": "s", "backend_name": "b", "status": status,
                "exit_code": code, "signal": signal, "duration_ms": 0});
            let error = serde_json::from_value::<BoxExecutionResult>(value).unwrap_err();
            assert_eq!(Invalid::from(error).field(), field);
        }
    }
}
