//! Whether it lives, whether it can be used, and which version it is. Anybody may ask.

use hyper::StatusCode;
use serde_json::json;

use box_runtime::Caller;

use super::answer::{Answer, json as answer};
use super::shared::{Phase, Shared};

/// The process answers. In the words of every world that asks.
pub(super) fn alive() -> Answer {
    answer(StatusCode::OK, &json!({"live": true, "status": "ok"}))
}

/// Which version this is.
pub(super) fn version() -> Answer {
    answer(StatusCode::OK, &crate::version::json())
}

/// Boxes can be had: this is between its start and its end, and there is a backend.
pub(super) async fn ready(shared: &Shared) -> Answer {
    let phase = shared.phase();
    let (backend, sessions) = match shared.runtime.status(&Caller::local()).await {
        Ok(status) => (Some(status.backend), status.active_sessions),
        Err(_) => (None, 0),
    };
    let usable = backend.as_ref().is_some_and(|backend| backend.available);
    let error = match phase {
        Phase::Starting => Some("starting"),
        Phase::Draining => Some("draining"),
        Phase::Serving if !usable => Some("no backend can make boxes here; see boxd doctor"),
        Phase::Serving => None,
    };
    let mut body = json!({
        "ready": error.is_none(),
        "status": error.unwrap_or("ok"),
        "mode": "standard",
        "backend": backend.and_then(|backend| backend.name),
        "checks": {"serving": phase == Phase::Serving, "backend": usable},
        "resources": {"sessions": sessions},
    });
    let status = match error {
        None => StatusCode::OK,
        Some(error) => {
            body["error"] = error.into();
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    answer(status, &body)
}
