//! Audit log of decisions, one line each.
//!
//! It never contains values of environment variables, and contains commands only if the configuration enables them.

use box_protocol::{Adjusted, BoxError, BoxExecutionResult, Env};
use box_rpc::Caller;

use crate::policy::Decision;
use crate::run::StartFields;
use crate::service::Rules;

/// Origin of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) query_id: Option<String>,
    /// The caller, which owns the results of the call.
    pub(crate) caller: Caller,
}

impl Origin {
    /// The origin of a call without a query.
    pub(crate) fn of(caller: &Caller) -> Self {
        Self {
            query_id: None,
            caller: caller.clone(),
        }
    }
}

/// Logs that a command was allowed to start in an existing box.
pub(crate) fn allowed_start(
    action: &str,
    origin: &Origin,
    (start, adjusted): (&StartFields<'_>, Option<&Adjusted>),
    rules: &Rules,
) {
    tracing::info!(
        target: "box_service::audit",
        action,
        caller = &*origin.caller.name(),
        box_id = start.box_id.as_str(),
        timeout_ms = start.timeout_ms,
        adjusted = ?adjusted.as_slice(),
        env_names = ?start.env.names(),
        cmd = rules.config.log_commands.then_some(start.text.as_str()),
        cmd_bytes = start.text.len(),
        "allowed"
    );
}

/// Logs that a request was allowed, with the decided spec and command.
pub(crate) fn allowed(
    action: &str,
    origin: &Origin,
    decision: &Decision,
    (rules, text): (&Rules, &str),
) {
    let Decision { spec, adjusted } = decision;
    tracing::info!(
        target: "box_service::audit",
        action,
        caller = &*origin.caller.name(),
        query_id = origin.query_id.as_deref(),
        box_id = spec.box_id.as_str(),
        image = spec.image.as_deref(),
        network = spec.network.as_str(),
        mounts_host_path = spec.mounts_host_path(),
        host_path_mode = spec.host_path_mode.as_str(),
        extra_mounts = spec.extra_mounts.len(),
        timeout_sec = spec.timeout_sec,
        adjusted = ?adjusted,
        env_names = ?Env::names(&spec.env),
        cmd = rules.config.log_commands.then_some(text),
        cmd_bytes = text.len(),
        "allowed"
    );
}

/// Logs that a request failed or was refused.
pub(crate) fn failed(action: &str, origin: &Origin, error: &BoxError) {
    tracing::warn!(
        target: "box_service::audit",
        action,
        caller = &*origin.caller.name(),
        query_id = origin.query_id.as_deref(),
        code = error.code().as_str(),
        reason = error.message(),
        "failed"
    );
}

/// Logs the end of a command.
pub(crate) fn finished(origin: &Origin, result: &BoxExecutionResult) {
    tracing::info!(
        target: "box_service::audit",
        caller = &*origin.caller.name(),
        query_id = origin.query_id.as_deref(),
        box_id = result.box_id.as_str(),
        backend = result.backend_name,
        status = ?result.status,
        exit_code = result.exit_code,
        duration_ms = result.duration_ms,
        stdout_bytes = result.stdout.len(),
        stderr_bytes = result.stderr.len(),
        "finished"
    );
}
