//! The trail of decisions: one line each, for whoever keeps the log. No values of variables, and
//! command texts only where configuration asks for them.

use box_protocol::{BoxError, BoxExecutionResult, Env};
use box_rpc::Caller;

use crate::policy::Decision;

/// Whose call it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) query_id: Option<String>,
    /// The owner of what comes of it.
    pub(crate) caller: Caller,
}

/// A request was allowed, as this.
pub(crate) fn allowed(action: &str, origin: &Origin, decision: &Decision, log_commands: bool) {
    let Decision { spec, adjusted } = decision;
    tracing::info!(
        target: "box_service::audit",
        action,
        caller = &*origin.caller.name(),
        query_id = origin.query_id.as_deref(),
        session_id = spec.session_id.as_str(),
        image = spec.image.as_deref(),
        network = spec.network.as_str(),
        mounts_host_path = spec.mounts_host_path(),
        host_path_mode = spec.host_path_mode.as_str(),
        extra_mounts = spec.extra_mounts.len(),
        timeout_sec = spec.timeout_sec,
        adjusted = ?adjusted,
        env_names = ?Env::names(&spec.env),
        cmd = log_commands.then_some(spec.cmd.as_str()),
        cmd_bytes = spec.cmd.len(),
        "allowed"
    );
}

/// A request failed, or was refused.
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

/// A command came to its end.
pub(crate) fn finished(origin: &Origin, result: &BoxExecutionResult) {
    tracing::info!(
        target: "box_service::audit",
        caller = &*origin.caller.name(),
        query_id = origin.query_id.as_deref(),
        session_id = result.session_id.as_str(),
        backend = result.backend_name,
        status = ?result.status,
        exit_code = result.exit_code,
        duration_ms = result.duration_ms,
        stdout_bytes = result.stdout.len(),
        stderr_bytes = result.stderr.len(),
        "finished"
    );
}
