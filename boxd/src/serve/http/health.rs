//! Liveness, readiness and the version; these routes need no token.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use box_gateways::http::refusal::json_response as response;
use box_runtime::Caller;
use serde_json::json;

use super::state::{HttpState, Phase};

/// Answers that the process is alive, in the format of every client.
pub(super) async fn live(State(state): State<Arc<HttpState>>) -> Response {
    let resources = state.langbot.resources().await;
    let body = json!({"live": true, "status": "ok", "resources": resources});
    response(StatusCode::OK, &body)
}

/// Answers with the version.
pub(super) async fn version() -> Response {
    response(StatusCode::OK, &crate::version::json())
}

/// Answers whether the server is serving and has a usable backend.
pub(super) async fn ready(State(state): State<Arc<HttpState>>) -> Response {
    let phase = state.phase();
    let (backend, boxes) = match state.runtime.status(&Caller::Local).await {
        Ok(status) => (Some(status.backend), status.active_boxes),
        Err(_) => (None, 0),
    };
    let usable = backend.as_ref().is_some_and(|backend| backend.available);
    let error = match phase {
        Phase::Starting => Some("starting"),
        Phase::Draining => Some("draining"),
        Phase::Serving if !usable => Some("no backend can create boxes; run boxd doctor"),
        Phase::Serving => None,
    };
    let mut resources = state.langbot.resources().await;
    // LangBot's name for them.
    resources["sessions"] = boxes.into();
    let serving = phase == Phase::Serving;
    let mut body = json!({
        "ready": error.is_none(),
        "status": error.unwrap_or("ok"),
        "mode": "standard",
        "backend": {"name": backend.and_then(|backend| backend.name), "available": usable},
        "checks": {"serving": serving, "backend_available": usable},
        "resources": resources,
    });
    // An installation that requires grants needs more than a backend.
    if let Some(readiness) = state.langbot.grants_readiness().await {
        for member in ["mode", "backend", "checks", "unsafe_soft_storage_limits"] {
            body[member] = readiness[member].clone();
        }
        body["checks"]["serving"] = serving.into();
        if readiness["ready"] != true && error.is_none() {
            body["ready"] = false.into();
            let reason = readiness["error"]
                .as_str()
                .unwrap_or("the requirements of grants are not met");
            body["status"] = reason.into();
            body["error"] = reason.into();
            return response(StatusCode::SERVICE_UNAVAILABLE, &body);
        }
    }
    let status = match error {
        None => StatusCode::OK,
        Some(error) => {
            body["error"] = error.into();
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    response(status, &body)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use box_gateways::langbot::{LangBot, Settings};
    use box_rpc::Router;
    use box_runtime::{BoxRuntime, RuntimeConfig};
    use box_service::connector::InProcess;
    use box_service::{BoxService, ServiceConfig};
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::serve::http::auth::Auth;
    use crate::serve::http::body::BodyLimit;
    use crate::serve::http::origin::Hosts;
    use crate::serve::http::pages::Origins;
    use crate::serve::http::state::PortSettings;

    #[tokio::test]
    async fn readiness_needs_the_serving_phase_and_a_backend() {
        let auth = Auth {
            tokens: None,
            loopback: true,
        };
        let hosts = Hosts::new(&[], "127.0.0.1");
        let runtime = BoxRuntime::start(RuntimeConfig::new(Vec::new()));
        let settings = PortSettings {
            auth,
            hosts,
            origins: Origins::none(),
            public_url: None,
            box_domain: None,
            max_body: BodyLimit::of_megabytes(NonZeroU64::MIN),
            only_langbot: false,
        };
        let connector = InProcess::new(runtime.router());
        let service = BoxService::with_connector(ServiceConfig::default(), connector).unwrap();
        let langbot = LangBot::new(runtime.clone(), service.clone(), Settings::default()).unwrap();
        let key = crate::serve::url_key::ephemeral().unwrap();
        let langbot = Arc::new(langbot);
        let boxes = (runtime, service);
        let state = HttpState::new(Router::empty(), boxes, langbot, settings, key, 1);
        let state = Arc::new(state);
        for (phase, error) in [
            (Phase::Starting, "starting"),
            (Phase::Serving, "no backend"),
            (Phase::Draining, "draining"),
        ] {
            state.enter(phase);
            let response = ready(State(Arc::clone(&state))).await;
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["ready"], false);
            assert!(body["error"].as_str().unwrap().starts_with(error), "{body}");
        }
    }
}
