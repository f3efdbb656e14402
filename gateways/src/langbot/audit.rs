//! The audit log of LangBot's own decisions.
//!
//! It has one line for each request and each end of a command, without texts, variable values or paths.

use box_protocol::{BoxExecutionResult, SpecDraft};

/// Logs a request that LangBot makes and the gateway allows.
pub(super) fn allowed(owner: &str, draft: &SpecDraft) {
    tracing::info!(
        target: "box_gateways::audit",
        caller = owner,
        box_id = draft.box_id.as_deref(),
        image = draft.image.as_deref(),
        network = ?draft.network,
        mounts_host_path = draft.host_path.is_some(),
        host_path_mode = ?draft.host_path_mode,
        extra_mounts = draft.extra_mounts.as_ref().map_or(0, Vec::len),
        timeout_sec = draft.timeout_sec,
        cmd_bytes = draft.cmd.as_ref().map_or(0, String::len),
        "allowed"
    );
}

/// Logs the end of a command.
pub(super) fn finished(owner: &str, result: &BoxExecutionResult) {
    tracing::info!(
        target: "box_gateways::audit",
        caller = owner,
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
