//! Error classes: prefixes of the error text that LangBot's client looks for.

use std::borrow::Cow;

use box_rpc::{Code, Fault, LimitDetail, RpcError};
use serde::{Deserialize, Serialize};

/// The maximum length of an error text without its class, in characters.
const ERROR_CHARS: usize = 4096;

/// The prefixes, in the order in which LangBot's client looks for them.
///
/// Some stand for a narrower subject than the code does; the error's detail `subject` names it.
const PREFIXES: [(&str, Code, Option<&str>); 14] = [
    ("BoxAdmissionError", Code::Denied, Some("grant")),
    ("BoxReadinessError", Code::Unavailable, Some("readiness")),
    ("BoxCapacityExceededError", Code::Capacity, None),
    ("BoxValidationError", Code::Validation, None),
    ("BoxSessionNotFoundError", Code::NotFound, None),
    ("BoxSessionConflictError", Code::Conflict, None),
    (
        "BoxManagedProcessNotFoundError",
        Code::NotFound,
        Some("process"),
    ),
    (
        "BoxManagedProcessConflictError",
        Code::Conflict,
        Some("process"),
    ),
    ("BoxBackendUnavailableError", Code::Unavailable, None),
    ("PermissionError", Code::Denied, None),
    ("TimeoutError", Code::Timeout, None),
    ("CancelledError", Code::Cancelled, None),
    ("RuntimeError", Code::Internal, None),
    ("ValidationError", Code::Validation, None),
];

#[derive(Serialize, Deserialize)]
struct Subject {
    subject: Cow<'static, str>,
}

/// How the engine's error for an unknown action begins. The name follows.
const UNKNOWN_ACTION: &str = "method: unknown action ";

/// The class that a gateway sets itself, to answer as LangBot's own server would.
#[derive(Deserialize)]
struct Class {
    class: String,
}

pub(super) fn error_text(error: &RpcError) -> String {
    let message = truncated(error.message());
    let limit = error.detail::<LimitDetail>();
    let max = limit.as_ref().map(|limit| limit.max);
    let of_bytes = limit.is_some_and(|limit| limit.limit.contains("bytes"));
    match (error.protocol_fault(), error.code(), max) {
        (Some(Fault::UnknownAction), ..) => {
            let name = message.strip_prefix(UNKNOWN_ACTION).unwrap_or(&message);
            return format!("ValueError: Action {name} not found");
        }
        (Some(Fault::InvalidMessage), ..) => return format!("ValidationError: {message}"),
        (Some(Fault::InvalidParams), ..) => {
            // The text of a Python handler for a missing key in `data`.
            let missing = message.split_once("missing field `");
            return match missing.and_then(|(_, rest)| rest.split_once('`')) {
                Some((field, _)) => format!("KeyError: '{field}'"),
                None => format!("BoxValidationError: {message}"),
            };
        }
        (_, Code::TooLarge, Some(max)) => {
            return format!("ValueError: Runtime message exceeds {max} byte limit");
        }
        (_, Code::Overloaded, Some(max)) if !of_bytes => {
            return format!("Runtime connection is busy (max {max} concurrent actions)");
        }
        (_, Code::TooLarge | Code::Overloaded, _) => return format!("ValueError: {message}"),
        _ => {}
    }
    if let Some(Class { class }) = error.detail() {
        return format!("{class}: {message}");
    }
    format!("{}: {message}", class_of(error))
}

/// Returns LangBot's class for this error.
pub(in crate::langbot) fn class_of(error: &RpcError) -> &'static str {
    if matches!(error.code(), Code::TooLarge | Code::Overloaded) {
        return "ValueError";
    }
    let subject = error.detail::<Subject>();
    let subject = subject
        .as_ref()
        .map(|detail| match detail.subject.as_ref() {
            // The commands of LangBot's boxes are its managed processes.
            "command" => "process",
            other => other,
        });
    let wanted = if error.code() == Code::Unsupported {
        Code::Unavailable
    } else {
        error.code()
    };
    let exact = PREFIXES
        .iter()
        .find(|(_, code, of)| *code == wanted && of.is_some() && *of == subject);
    let plain = || {
        PREFIXES
            .iter()
            .find(|(_, code, of)| *code == wanted && of.is_none())
    };
    exact
        .or_else(plain)
        .map_or("RuntimeError", |(prefix, ..)| prefix)
}

/// Truncates a text to the maximum of LangBot's own server.
fn truncated(message: &str) -> Cow<'_, str> {
    match message.char_indices().nth(ERROR_CHARS) {
        Some((cut, _)) => format!("{}... [protocol error truncated]", &message[..cut]).into(),
        None => message.into(),
    }
}

pub(super) fn read_error(text: &str) -> RpcError {
    if let Some(rest) = text.strip_prefix("Runtime connection is busy (max ") {
        let max = rest
            .split(' ')
            .next()
            .and_then(|max| max.parse().ok())
            .unwrap_or(0);
        return RpcError::limit(Code::Overloaded, "calls", "in_flight", max);
    }
    if let Some(rest) = text.strip_prefix("ValueError: Runtime message exceeds ") {
        let max = rest
            .split(' ')
            .next()
            .and_then(|max| max.parse().ok())
            .unwrap_or(0);
        return RpcError::limit(Code::TooLarge, "message", "message_bytes", max);
    }
    let unknown = text.strip_prefix("ValueError: Action ");
    if let Some(name) = unknown.and_then(|rest| rest.strip_suffix(" not found")) {
        return RpcError::fault(Fault::UnknownAction, format!("{UNKNOWN_ACTION}{name}"));
    }
    if let Some(key) = text
        .strip_prefix("KeyError: '")
        .and_then(|rest| rest.strip_suffix('\''))
    {
        return RpcError::fault(Fault::InvalidParams, format!("missing field `{key}`"));
    }
    let found = PREFIXES.iter().find_map(|(prefix, code, subject)| {
        let at = text
            .match_indices(prefix)
            .find(|(at, _)| text[at + prefix.len()..].starts_with(": "))?
            .0;
        let message = if at == 0 {
            &text[prefix.len() + 2..]
        } else {
            text
        };
        Some((message, *code, *subject))
    });
    match found {
        Some((message, code, Some(subject))) => {
            RpcError::new(code, message).with_detail(&Subject {
                subject: subject.into(),
            })
        }
        Some((message, code, None)) => RpcError::new(code, message),
        None => RpcError::new(Code::Internal, text),
    }
}
