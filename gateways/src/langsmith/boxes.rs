//! The life of a box: `/boxes`.

use std::time::Duration;

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::{BoxListParams, TargetState};
use box_protocol::{BoxError, BoxId, BoxInfo, Code, Invalid, Name};
use serde_json::json;
use tokio::time::timeout;

use super::GATEWAY;
use super::box_request::{CreateBox, UpdateBox};
use super::box_view::{name, shown, status as status_of};
use super::errors::{ApiError, creation_error};
use super::lists::{ListPage, check_filters, has_labels, number_key, sort_key};
use crate::http::body::{Json, OptionalJson, Params};
use crate::http::context::Context;
use crate::http::creation::Creation;
use crate::http::refusal::json_response;

/// The interval at which a request that does not wait looks for its box.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The fields of the contract, and the members of a request that they come from.
const FIELDS: [(&str, &str); 5] = [
    ("cpus", "vcpus"),
    ("memory_mb", "mem_bytes"),
    ("disk_mb", "fs_capacity_bytes"),
    ("user", "run_config.user"),
    ("defaults", "run_config"),
];

/// Finds a box by its name or its id.
pub(super) async fn find(context: &Context, text: &str) -> Result<BoxInfo, ApiError> {
    if let Ok(name) = Name::new(text) {
        let named = context.runtime().get_named(&context.caller, GATEWAY, name);
        match named.await {
            Err(error) if error.code() == Code::NotFound => {}
            found => return Ok(found?),
        }
    }
    let unknown = || {
        let message = format!("sandbox {text:?} not found");
        ApiError::new(StatusCode::NOT_FOUND, "NotFound", message)
    };
    let id = BoxId::new(text).map_err(|_| unknown())?;
    match context.get(&id).await {
        Ok(info) if info.gateway == GATEWAY => Ok(info),
        Err(error) if error.code() != Code::NotFound => Err(error.into()),
        _ => Err(unknown()),
    }
}

/// Returns all boxes of the caller.
pub(super) async fn all(context: &Context) -> Result<Vec<BoxInfo>, BoxError> {
    let params = BoxListParams {
        gateway: Some(GATEWAY),
        ..BoxListParams::default()
    };
    context.list(params).await
}

/// `POST /boxes`.
pub(super) async fn create(
    context: Context,
    OptionalJson(request): OptionalJson<CreateBox>,
) -> Result<Response, ApiError> {
    let limit = request.ready_timeout()?;
    let spec = request.into_spec(&context).await?;
    let id = BoxId::new(spec.box_id.as_deref().unwrap_or_default())?;
    let mut new = Creation::start(context.clone(), GATEWAY, id, spec);
    let created = match limit {
        None => new.ready_or_visible(POLL_INTERVAL).await,
        Some(limit) => timeout(limit, new.ready()).await.unwrap_or_else(|_| {
            let message = format!("sandbox not ready after {}s", limit.as_secs());
            Err(BoxError::timeout(message))
        }),
    };
    let info = created.map_err(|error| creation_error(error).with_fields(&FIELDS))?;
    let body = shown(&context, &info).await;
    new.answered();
    Ok(json_response(StatusCode::CREATED, &body))
}

/// `GET /boxes`.
pub(super) async fn list(context: Context, params: Params) -> Result<Response, ApiError> {
    check_filters(&params)?;
    let mut boxes = all(&context).await?;
    if let Some(part) = params.get("name_contains") {
        let part = part.to_lowercase();
        boxes.retain(|info| name(info).to_lowercase().contains(&part));
    }
    if let Some(wanted) = params.get("status") {
        boxes.retain(|info| status_of(info).0 == wanted);
    }
    boxes.retain(|info| has_labels(&info.labels, &params));
    let value = sorted_by(&params)?;
    let page = ListPage::of(boxes, &params, usize::MAX, |info| {
        sort_key(&value(info), info.box_id.as_str())
    })?;
    let mut boxes = Vec::new();
    for info in &page.items {
        boxes.push(shown(&context, info).await);
    }
    let body = page.body("sandboxes", &boxes);
    Ok(json_response(StatusCode::OK, &body))
}

/// Returns what boxes are sorted by: their age, unless the request says otherwise.
fn sorted_by(params: &Params) -> Result<fn(&BoxInfo) -> String, Invalid> {
    let value: fn(&BoxInfo) -> String = match params.get("sort_by") {
        None | Some("created_at") => |info| number_key(Some(info.created_at.0)),
        Some("name") => |info| name(info).to_owned(),
        Some("status") => |info| status_of(info).0.to_owned(),
        Some("stopped_at") => |info| number_key(Some(info.since.0)),
        Some("idle_ttl_seconds") => |info| {
            let lifetime = info.lifetime.as_ref();
            number_key(lifetime.and_then(|it| it.idle_ms))
        },
        Some("delete_after_stop_seconds") => |info| {
            let lifetime = info.lifetime.as_ref();
            number_key(lifetime.and_then(|it| it.delete_after_stop_ms))
        },
        Some(_) => {
            let rule = "must be name, status, created_at, stopped_at, idle_ttl_seconds or delete_after_stop_seconds";
            return Err(Invalid::new("sort_by", rule));
        }
    };
    Ok(value)
}

/// `GET /boxes/{name}`.
pub(super) async fn get(context: Context, Path(name): Path<String>) -> Result<Response, ApiError> {
    let info = find(&context, &name).await?;
    Ok(json_response(StatusCode::OK, &shown(&context, &info).await))
}

/// `GET /boxes/{name}/status`.
pub(super) async fn status(
    context: Context,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let info = find(&context, &name).await?;
    let (status, message) = status_of(&info);
    let body = json!({"status": status, "status_message": message});
    Ok(json_response(StatusCode::OK, &body))
}

/// `PATCH /boxes/{name}`.
pub(super) async fn update(
    context: Context,
    Path(name): Path<String>,
    Json(request): Json<UpdateBox>,
) -> Result<Response, ApiError> {
    let info = find(&context, &name).await?;
    let params = request.into_params(&info)?;
    let updated = context.update(&GATEWAY, params).await;
    let info = updated.map_err(|error| ApiError::from(error).with_fields(&FIELDS))?;
    Ok(json_response(StatusCode::OK, &shown(&context, &info).await))
}

/// `DELETE /boxes/{name}`.
pub(super) async fn delete(
    context: Context,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let info = find(&context, &name).await?;
    context.delete(&info.box_id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `POST /boxes/{name}/start`.
pub(super) async fn start(
    context: Context,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    transition(&context, &name, TargetState::Running).await
}

/// `POST /boxes/{name}/stop`.
pub(super) async fn stop(context: Context, Path(name): Path<String>) -> Result<Response, ApiError> {
    transition(&context, &name, TargetState::Stopped).await
}

async fn transition(context: &Context, name: &str, to: TargetState) -> Result<Response, ApiError> {
    let info = find(context, name).await?;
    let (info, _) = context.transition(&info.box_id, to).await?;
    Ok(json_response(StatusCode::OK, &shown(context, &info).await))
}
