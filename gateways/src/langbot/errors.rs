//! Errors with LangBot's texts; its client finds the class in the text.

use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxInfo, Code};
use serde_json::{Value, json};

/// Creates an error of a class that has no code of its own.
pub(super) fn of_class(class: &str, code: Code, message: impl Into<String>) -> BoxError {
    BoxError::new(code, message).with_detail(&json!({"class": class}))
}

/// Creates the error that Python raises for an invalid value.
pub(super) fn value_error(message: impl Into<String>) -> BoxError {
    of_class("ValueError", Code::Validation, message)
}

/// Creates the error that Python raises for a missing key.
pub(super) fn key_error(key: &str) -> BoxError {
    of_class("KeyError", Code::Validation, format!("'{key}'"))
}

/// Creates the error for a caller without permission.
pub(super) fn permission(message: impl Into<String>) -> BoxError {
    BoxError::denied(message)
}

/// Returns a validation error in LangBot's form: `cmd must not be empty`, without a colon.
pub(super) fn without_colon(error: BoxError) -> BoxError {
    let detail = error.detail::<Detail>().unwrap_or_default();
    let Some(field) = detail.field.as_deref() else {
        return error;
    };
    let rule = error.message().strip_prefix(&format!("{field}: "));
    match rule.and_then(|rule| langbot_rule(field, rule)) {
        Some(rule) => {
            let message = format!("{field} {rule}");
            BoxError::new(error.code(), message).with_detail(&detail)
        }
        None => error,
    }
}

/// Returns LangBot's text of a rule.
fn langbot_rule(field: &str, rule: &str) -> Option<String> {
    if rule == "must not be negative" {
        return Some("must be greater than or equal to 0".to_owned());
    }
    match rule.split_once(" is below the minimum of ") {
        Some(_) if field == "timeout_sec" => Some("must be greater than 0".to_owned()),
        Some((_, minimum)) => Some(format!("must be at least {minimum}")),
        None => rule.starts_with("must ").then(|| rule.to_owned()),
    }
}

pub(super) fn stale() -> BoxError {
    permission("Stale Box placement generation")
}

/// Creates the error for a missing or exceeded grant.
pub(super) fn admission(message: impl Into<String>) -> BoxError {
    BoxError::denied(message).with_detail(&Detail::about(Subject::Grant))
}

/// Creates the error for an installation that is not ready.
pub(super) fn readiness(message: impl Into<String>) -> BoxError {
    BoxError::unavailable(message).with_detail(&Detail::about(Subject::Readiness))
}

pub(super) fn shutting_down() -> BoxError {
    of_class(
        "BoxRuntimeUnavailableError",
        Code::Unavailable,
        "Box runtime is shutting down",
    )
}

pub(super) fn no_session(physical: &str) -> BoxError {
    BoxError::not_found(format!("session {physical} not found"))
}

pub(super) fn no_process(physical: &str, process: &str) -> BoxError {
    let message = format!("session {physical} has no managed process with process_id={process}");
    BoxError::not_found(message).with_detail(&Detail::about(Subject::Process))
}

pub(super) fn not_running(physical: &str, process: &str) -> BoxError {
    let message = format!("managed process {process} in session {physical} is not running");
    BoxError::conflict(message).with_detail(&Detail::about(Subject::Process))
}

pub(super) fn already_attached(physical: &str, process: &str) -> BoxError {
    let message = format!("managed process {process} in session {physical} is already attached");
    BoxError::conflict(message).with_detail(&Detail::about(Subject::Process))
}

/// Creates the error for a box of the same name with a different field.
pub(super) fn conflict(field: &str, info: &BoxInfo) -> BoxError {
    let message = if field == "extra_mounts" {
        "Box mounts differ from this session's immutable mount set; acquire a Box with a distinct reuse key for \
         different host mounts. The existing session was preserved."
            .to_owned()
    } else {
        let (id, value) = (&info.box_id, python_text(field, info));
        format!("Box session {id} already exists with {field}={value}")
    };
    BoxError::conflict(message)
}

/// Formats a field's value as Python prints it.
fn python_text(field: &str, info: &BoxInfo) -> String {
    let info = serde_json::to_value(info).unwrap_or_default();
    match info.get(field) {
        Some(Value::Null) => "None".to_owned(),
        Some(Value::Bool(true)) => "True".to_owned(),
        Some(Value::Bool(false)) => "False".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => "another value".to_owned(),
    }
}

/// Returns the limit of boxes that a refusal is about.
pub(super) fn box_limit(error: &BoxError) -> Option<u64> {
    let detail = error.detail::<Detail>()?;
    let limit = detail.limit.filter(|name| name.starts_with("max_boxes"));
    limit.and(detail.max)
}

/// Creates the error for a box beyond that limit.
pub(super) fn box_limit_reached(limit: u64) -> BoxError {
    BoxError::capacity(format!("Box session capacity reached ({limit})"))
}

/// LangBot's words for the beginnings of the runtime's reasons to refuse mounted content.
const CONTENT_REASONS: [(&str, &str); 4] = [
    ("the manifest", "Artifact manifest"),
    ("the source", "Artifact source"),
    ("the content", "Artifact"),
    (
        "the box holds the maximum of mounted content; create a new box",
        "Immutable artifact cache limit reached; acquire a new Box",
    ),
];

/// Returns LangBot's text for the reason why the runtime refused mounted content, if it did.
pub(super) fn content_refused(error: &BoxError) -> Option<String> {
    let detail = error.detail::<Detail>()?;
    let is_content =
        detail.subject == Some(Subject::File) && detail.field.as_deref() == Some("content_digest");
    if !is_content {
        return None;
    }
    let why = error.message().trim_start_matches("content_digest: ");
    let reason = CONTENT_REASONS.iter().find_map(|(ours, theirs)| {
        let rest = why.strip_prefix(ours)?;
        Some(format!("{theirs}{rest}"))
    });
    let reason = reason.as_deref().unwrap_or(why);
    Some(format!("Immutable artifact preparation failed: {reason}"))
}

/// Returns the field that a conflict is about.
pub(super) fn field_of(error: &BoxError) -> Option<String> {
    if error.code() != Code::Conflict {
        return None;
    }
    error.detail::<Detail>()?.field
}

#[cfg(test)]
mod tests {
    use box_protocol::{BoxSpec, Invalid, SpecDraft, UnixMs};

    use super::*;

    #[test]
    fn refused_content_gets_langbots_text_and_an_invalid_digest_does_not() {
        let detail = Detail::of_field("content_digest").of(Subject::File);
        for (ours, theirs) in [
            ("the source changed: a", "Artifact source changed: a"),
            (
                "the manifest is invalid JSON",
                "Artifact manifest is invalid JSON",
            ),
            (
                "the box holds the maximum of mounted content; create a new box",
                "Immutable artifact cache limit reached; acquire a new Box",
            ),
        ] {
            let refused = BoxError::validation(format!("content_digest: {ours}"));
            let theirs = format!("Immutable artifact preparation failed: {theirs}");
            let refused = refused.with_detail(&detail);
            assert_eq!(content_refused(&refused), Some(theirs));
        }
        let invalid = BoxError::from(Invalid::new("content_digest", "must be a digest"));
        assert_eq!(content_refused(&invalid), None);
    }

    #[test]
    fn a_validation_error_has_langbots_form() {
        let error = BoxError::from(Invalid::new("cmd", "must not be empty"));
        assert_eq!(error.message(), "cmd: must not be empty", "control");
        let detail = error.detail::<Detail>();
        let converted = without_colon(error);
        assert_eq!(converted.message(), "cmd must not be empty");
        assert_eq!(converted.detail::<Detail>(), detail);
        for (mut draft, text) in [
            (
                json!({"timeout_sec": 0}),
                "timeout_sec must be greater than 0",
            ),
            (json!({"cpus": 0}), "cpus must be greater than 0"),
            (json!({"memory_mb": 31}), "memory_mb must be at least 32"),
            (json!({"memory_mb": -1}), "memory_mb must be at least 32"),
            (json!({"pids_limit": 0}), "pids_limit must be at least 1"),
            (
                json!({"workspace_quota_mb": -1}),
                "workspace_quota_mb must be greater than or equal to 0",
            ),
        ] {
            draft["box_id"] = "s".into();
            let refused = BoxSpec::from_value(draft).unwrap_err();
            assert_eq!(without_colon(refused.into()).message(), text);
        }
        for other in [
            Invalid::new("surprise", "unknown field").into(),
            value_error("Box session_id must not be empty"),
        ] {
            assert_eq!(without_colon(other.clone()), other);
        }
    }

    #[test]
    fn a_conflict_shows_the_existing_value_in_python_syntax() {
        let spec = SpecDraft::new("ws-1-g1-s").cpus(2.0).build().unwrap();
        let info = BoxInfo::starting(&spec, "fake", "b", UnixMs(0));
        for (field, value) in [
            ("network", "off"),
            ("host_path", "None"),
            ("host_path_mode", "rw"),
            ("mount_path", "/workspace"),
            ("persistent", "False"),
            ("cpus", "2.0"),
            ("memory_mb", "512"),
            ("read_only_rootfs", "True"),
        ] {
            let error = conflict(field, &info);
            let text = format!("Box session ws-1-g1-s already exists with {field}={value}");
            assert_eq!(error.message(), text);
        }
        assert!(
            conflict("extra_mounts", &info)
                .message()
                .starts_with("Box mounts differ")
        );
    }
}
