//! Error bodies. The SDKs choose an exception by the status, the member `error`, and the call.
//!
//! The format is `{"detail": {"error", "message"}}`, and for an invalid field a list with one entry:
//! `{"detail": [{"loc", "msg", "type"}]}`.

use axum::http::StatusCode;
use axum::http::header::{HeaderValue, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use box_protocol::error::{Detail, Ended, Subject};
use box_protocol::{BoxError, Code, Invalid};
use serde_json::{Value, json};

use crate::http::refusal::{Refusal, RefusalReason, json_response, status_of};

/// An error response.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    body: Body,
}

#[derive(Debug)]
enum Body {
    /// A class and a message.
    Class(&'static str, String),
    /// An invalid field.
    Field(String, String),
    /// A refusal, which the layers write.
    Refused(Refusal),
}

impl ApiError {
    /// An error with a class, by which the SDKs tell it from others with the same status.
    pub(super) fn new(status: StatusCode, class: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            body: Body::Class(class, message.into()),
        }
    }

    /// A request for something that this server does not have.
    pub(super) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "NotSupported", message)
    }

    /// An error with the field of the API that stands for that of the contract, from pairs of both.
    pub(super) fn with_fields(mut self, fields: &[(&str, &str)]) -> Self {
        if let Body::Field(name, message) = &mut self.body
            && let Some((known, field)) = fields.iter().find(|(known, _)| known == name)
        {
            let rule = message.strip_prefix(&format!("{known}: "));
            let rule = rule.unwrap_or(message);
            // The numbers of these fields of the contract are in MiB, those of the API are not.
            let unit = if known.ends_with("_mb") {
                "in MiB, "
            } else {
                ""
            };
            *message = format!("{field}: {unit}{rule}");
            (*field).clone_into(name);
        }
        self
    }
}

/// Returns the error of the deletion of an item that something uses.
pub(super) fn in_use(kind: &str, user: &str, name: &str) -> ApiError {
    let message = format!("{kind}: the {user} {name:?} uses it; delete the {user} first");
    ApiError::new(StatusCode::CONFLICT, "Conflict", message)
}

impl From<Invalid> for ApiError {
    fn from(invalid: Invalid) -> Self {
        let field = invalid.field().to_owned();
        Self {
            status: StatusCode::UNPROCESSABLE_ENTITY,
            body: Body::Field(field, invalid.to_string()),
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        Self {
            status: refusal.status(),
            body: Body::Refused(refusal),
        }
    }
}

impl From<BoxError> for ApiError {
    fn from(error: BoxError) -> Self {
        let detail: Detail = error.detail().unwrap_or_default();
        let class = match error.code() {
            Code::Validation => {
                let field = detail.field.unwrap_or_else(|| "body".to_owned());
                return Self {
                    status: StatusCode::UNPROCESSABLE_ENTITY,
                    body: Body::Field(field, error.message().to_owned()),
                };
            }
            Code::Capacity | Code::Overloaded => {
                let message = quota_message(&error, &detail);
                return Self::new(StatusCode::TOO_MANY_REQUESTS, "QuotaExceeded", message);
            }
            Code::Denied => "Forbidden",
            Code::NotFound => not_found_class(&detail),
            Code::Conflict => "Conflict",
            Code::TooLarge => "TooLarge",
            Code::Unsupported => "NotSupported",
            Code::Unavailable if detail.lasting => "NotSupported",
            Code::Unavailable | Code::Cancelled => "ServiceUnavailable",
            Code::Timeout => "Timeout",
            Code::Internal => "InternalError",
        };
        Self::new(status_of(&error), class, error.message())
    }
}

fn not_found_class(detail: &Detail) -> &'static str {
    match detail.subject {
        Some(Subject::Template) => "TemplateNotFound",
        Some(Subject::Snapshot) => "SnapshotNotFound",
        Some(Subject::Volume) => "VolumeNotFound",
        Some(Subject::Pool) => "PoolNotFound",
        Some(Subject::File) => "FileNotFound",
        _ => "NotFound",
    }
}

/// Returns the message of a limit, with the words by which the SDKs recognize its kind.
fn quota_message(error: &BoxError, detail: &Detail) -> String {
    let message = error.message();
    let limit = detail.limit.as_deref().unwrap_or_default();
    let prefix = match detail.subject {
        Some(Subject::Disk) => "storage: ",
        Some(Subject::Volume) => "volume limit: ",
        _ if limit.contains("boxes") => "sandbox limit: ",
        _ => "",
    };
    format!("{prefix}{message}")
}

/// Returns the error of a call that creates a box.
///
/// The SDKs repeat a request after 503, so a failure that would last is a 422.
pub(super) fn creation_error(error: BoxError) -> ApiError {
    let detail: Detail = error.detail().unwrap_or_default();
    let refused = |class| {
        ApiError::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            class,
            describe(&error, &detail),
        )
    };
    match error.code() {
        Code::Validation | Code::Capacity | Code::Overloaded => error.into(),
        _ if detail.subject == Some(Subject::Image) => refused("ImagePull"),
        _ if detail.field.as_deref() == Some("prepare") || detail.ended.is_some() => {
            refused("CrashLoop")
        }
        Code::Timeout => ApiError::new(StatusCode::REQUEST_TIMEOUT, "Timeout", error.message()),
        Code::Unsupported => refused("SandboxConfig"),
        Code::Unavailable if detail.lasting => refused("Unschedulable"),
        Code::Unavailable => ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "Unschedulable",
            error.message(),
        ),
        _ => error.into(),
    }
}

/// Returns the message of an error, with the last lines of a command that failed.
fn describe(error: &BoxError, detail: &Detail) -> String {
    let message = error.message();
    match &detail.output {
        Some(output) => format!("{message}\n{output}"),
        None => message.to_owned(),
    }
}

/// Returns the error of a call to the inside of a box.
///
/// `class` names the operation, such as `WriteError`.
pub(super) fn operation_error(error: BoxError, class: &'static str) -> ApiError {
    let detail: Detail = error.detail().unwrap_or_default();
    let is_file = detail.subject == Some(Subject::File) || detail.errno.is_some();
    let is_command = detail.subject == Some(Subject::Command);
    match error.code() {
        Code::NotFound if is_file => {
            ApiError::new(StatusCode::NOT_FOUND, "FileNotFound", error.message())
        }
        Code::NotFound | Code::Overloaded => error.into(),
        Code::Denied => ApiError::new(StatusCode::FORBIDDEN, "PermissionDenied", error.message()),
        // The box ended during the call.
        Code::Conflict if detail.ended.is_some() => {
            ApiError::new(StatusCode::NOT_FOUND, "NotFound", error.message())
        }
        // The box has failed. The SDKs would repeat a 502, and the failure lasts.
        Code::Unavailable if detail.ended.is_some_and(|ended| ended != Ended::Shutdown) => {
            ApiError::new(StatusCode::BAD_REQUEST, "NotReady", error.message())
        }
        // The box is paused or stopped and does not wake.
        Code::Conflict if !is_file && !is_command => {
            ApiError::new(StatusCode::BAD_REQUEST, "NotReady", error.message())
        }
        Code::Unavailable | Code::Cancelled => {
            ApiError::new(StatusCode::BAD_GATEWAY, "ConnectionError", error.message())
        }
        _ => {
            let status = match error.code() {
                Code::Validation => StatusCode::BAD_REQUEST,
                _ => status_of(&error),
            };
            ApiError::new(status, class, error.message())
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = match self.body {
            Body::Class(class, message) => class_body(class, &message),
            Body::Field(field, message) => field_body(&field, &message),
            Body::Refused(refusal) => return refusal.into_response(),
        };
        let mut response = json_response(self.status, &body);
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            let second = HeaderValue::from_static("1");
            response.headers_mut().insert(RETRY_AFTER, second);
        }
        response
    }
}

fn class_body(class: &str, message: &str) -> Value {
    json!({"detail": {"error": class, "message": message}})
}

/// The SDKs read the last word of `loc` as the field.
fn field_body(field: &str, message: &str) -> Value {
    let mut loc = vec!["body"];
    loc.extend(field.split('.').filter(|part| *part != "body"));
    json!({"detail": [{"loc": loc, "msg": message, "type": "value_error"}]})
}

/// Writes a refusal of the layers.
pub(super) fn refusal_body(refusal: &Refusal) -> (StatusCode, Value) {
    let message = refusal.message();
    if refusal.reason == RefusalReason::Malformed {
        let field = message.split_once(": ").map_or("body", |(field, _)| field);
        return (StatusCode::UNPROCESSABLE_ENTITY, field_body(field, message));
    }
    let class = match refusal.reason {
        RefusalReason::BadGateway => "ConnectionError",
        RefusalReason::NotReady => "ServiceUnavailable",
        _ => refusal.class(),
    };
    (refusal.status(), class_body(class, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(error: ApiError) -> (u16, Value) {
        let status = error.status.as_u16();
        let body = match error.body {
            Body::Class(class, message) => class_body(class, &message),
            Body::Field(field, message) => field_body(&field, &message),
            Body::Refused(refusal) => refusal_body(&refusal).1,
        };
        (status, body)
    }

    #[test]
    fn an_invalid_field_is_the_last_word_of_its_location() {
        let (status, body) = shown(Invalid::new("resources.cpu", "must be a quantity").into());
        assert_eq!(status, 422);
        assert_eq!(
            body["detail"][0]["loc"],
            json!(["body", "resources", "cpu"])
        );
        let refusal = Refusal::new(RefusalReason::Malformed, "timeout: must be a number");
        let (status, body) = refusal_body(&refusal);
        assert_eq!(status.as_u16(), 422);
        assert_eq!(body["detail"][0]["loc"][1], "timeout");
    }

    #[test]
    fn a_failure_that_lasts_is_not_repeated() {
        let lasting = BoxError::unavailable("no user namespaces").with_detail(&Detail::lasting());
        assert_eq!(shown(creation_error(lasting)).0, 422);
        let image =
            BoxError::not_found("image x not found").with_detail(&Detail::about(Subject::Image));
        let (status, body) = shown(creation_error(image));
        assert_eq!(
            (status, &body["detail"]["error"]),
            (422, &json!("ImagePull"))
        );
        assert_eq!(shown(creation_error(BoxError::unavailable("busy"))).0, 503);
        assert_eq!(shown(creation_error(BoxError::timeout("slow"))).0, 408);
    }

    #[test]
    fn quotas_have_the_words_that_the_sdk_looks_for() {
        let detail = Detail {
            limit: Some("max_boxes".to_owned()),
            ..Detail::default()
        };
        let error = BoxError::capacity("full").with_detail(&detail);
        let (status, body) = shown(error.into());
        assert_eq!(status, 429);
        assert_eq!(body["detail"]["message"], "sandbox limit: full");
        for (subject, message) in [
            (Subject::Volume, "volume limit: full"),
            (Subject::Template, "full"),
        ] {
            let detail = Detail {
                limit: Some("items_per_owner".to_owned()),
                ..Detail::about(subject)
            };
            let error = BoxError::capacity("full").with_detail(&detail);
            assert_eq!(shown(error.into()).1["detail"]["message"], message);
        }
    }

    #[test]
    fn a_call_into_a_failed_box_is_not_repeated() {
        let of = |error, why| {
            let error = box_protocol::error::with_end(error, why);
            let (status, body) = shown(operation_error(error, "ReadError"));
            (status, body["detail"]["error"].clone())
        };
        let gone = || BoxError::unavailable("the agent is gone");
        assert_eq!(of(gone(), Ended::Failed), (400, json!("NotReady")));
        assert_eq!(of(gone(), Ended::Shutdown), (502, json!("ConnectionError")));
        let deleted = BoxError::conflict("box b was deleted");
        assert_eq!(of(deleted, Ended::Deleted), (404, json!("NotFound")));
    }

    #[test]
    fn a_conflict_is_one_of_the_box_or_of_its_command() {
        let of = |detail: Detail| {
            let error = BoxError::conflict("taken").with_detail(&detail);
            let (status, body) = shown(operation_error(error, "CommandError"));
            (status, body["detail"]["error"].clone())
        };
        let taken = Detail::of_field("command_id").of(Subject::Command);
        assert_eq!(of(taken), (409, json!("CommandError")));
        let stopped = Detail::about(Subject::Box);
        assert_eq!(of(stopped), (400, json!("NotReady")));
    }

    #[test]
    fn a_field_of_the_contract_has_the_name_of_the_api() {
        let fields = [("memory_mb", "mem_bytes"), ("user", "run_config.user")];
        for (field, loc) in [
            ("memory_mb", json!(["body", "mem_bytes"])),
            ("user", json!(["body", "run_config", "user"])),
            ("name", json!(["body", "name"])),
        ] {
            let error = ApiError::from(Invalid::new(field, "wrong"));
            let (status, body) = shown(error.with_fields(&fields));
            assert_eq!((status, &body["detail"][0]["loc"]), (422, &loc));
        }
        for (field, message) in [
            ("memory_mb", "mem_bytes: in MiB, wrong"),
            ("user", "run_config.user: wrong"),
            ("name", "name: wrong"),
        ] {
            let error = ApiError::from(Invalid::new(field, "wrong"));
            let (_, body) = shown(error.with_fields(&fields));
            assert_eq!(body["detail"][0]["msg"], message);
        }
    }
}
