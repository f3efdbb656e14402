//! Sandboxes after their creation: list, get, delete, metadata, pause, resume, expiry.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{BoxListParams, BoxUpdateParams, TargetState};
use box_protocol::{BoxId, BoxInfo, BoxState, LifetimeChange, UnixMs};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::{Error, InPath};
use super::{GATEWAY, model};
use crate::http::body::{Json, Params};
use crate::http::context::Context;
use crate::http::page::Page;
use crate::http::refusal::json_response;

/// The default and the maximum number of items of a page.
const PAGE_SIZE: usize = 20;
const MAX_PAGE_SIZE: usize = 200;

/// Returns the box of a path. An invalid id is one that no sandbox has.
pub(super) fn box_id(id: &str) -> Result<BoxId, Error> {
    BoxId::new(id).map_err(|_| Error::no_sandbox(id))
}

/// Returns the sandbox of a path.
pub(super) async fn find(context: &Context, id: &str) -> Result<BoxInfo, Error> {
    Ok(context.get(&box_id(id)?).await?)
}

/// Lists the sandboxes of the caller, newest first.
pub(super) async fn list(context: Context, params: Params) -> Result<Response, Error> {
    let mut wanted = BoxListParams {
        gateway: Some(GATEWAY),
        ..BoxListParams::default()
    };
    if let Some(metadata) = params.get("metadata") {
        // The pairs are encoded once more than the query.
        for (name, value) in Params::parse(metadata)?.into_pairs() {
            wanted.labels.insert(name, value);
        }
    }
    let states: Vec<&str> = params.all("state").collect();
    let mut found = context.list(wanted).await?;
    found.retain(|info| {
        let state = model::state(info);
        states.is_empty()
            || states
                .iter()
                .any(|wanted| wanted.eq_ignore_ascii_case(state))
    });
    found.sort_by(|one, other| {
        let newest = other.created_at.cmp(&one.created_at);
        newest.then_with(|| other.box_id.cmp(&one.box_id))
    });
    let page = paged(&params, found)?;
    Ok(json_response(
        StatusCode::OK,
        &page_json(page, |info| model::sandbox(&info)),
    ))
}

/// Cuts the page out of a list that a query asks for.
pub(super) fn paged<T>(params: &Params, items: Vec<T>) -> Result<Page<T>, Error> {
    let number = params
        .parsed("page", "must be a positive number")?
        .unwrap_or(1);
    let size = params.parsed("pageSize", "must be a positive number")?;
    let size: usize = size.unwrap_or(PAGE_SIZE);
    if number == 0 {
        return Err(Error::invalid("page: must be a positive number"));
    }
    if !(1..=MAX_PAGE_SIZE).contains(&size) {
        let message = format!("pageSize: must be between 1 and {MAX_PAGE_SIZE}, not {size}");
        return Err(Error::invalid(message));
    }
    Ok(Page::of(items, number, size))
}

/// Returns a page as the protocol describes it.
pub(super) fn page_json<T>(page: Page<T>, item: impl Fn(T) -> Value) -> Value {
    let pagination = json!({
        "page": page.number,
        "pageSize": page.size,
        "totalItems": page.total,
        "totalPages": page.pages(),
        "hasNextPage": page.has_next(),
    });
    let items: Vec<Value> = page.items.into_iter().map(item).collect();
    json!({"items": items, "pagination": pagination})
}

pub(super) async fn get(context: Context, InPath(id): InPath<String>) -> Result<Response, Error> {
    let info = find(&context, &id).await?;
    Ok(json_response(StatusCode::OK, &model::sandbox(&info)))
}

pub(super) async fn delete(
    context: Context,
    InPath(id): InPath<String>,
) -> Result<StatusCode, Error> {
    context.delete(&box_id(&id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Merges metadata; `null` removes a value.
pub(super) async fn patch_metadata(
    context: Context,
    InPath(id): InPath<String>,
    Json(labels): Json<BTreeMap<String, Option<String>>>,
) -> Result<Response, Error> {
    let params = BoxUpdateParams {
        labels,
        ..BoxUpdateParams::of(box_id(&id)?)
    };
    let info = context.update(&GATEWAY, params).await?;
    Ok(json_response(StatusCode::OK, &model::sandbox(&info)))
}

pub(super) async fn pause(
    context: Context,
    InPath(id): InPath<String>,
) -> Result<StatusCode, Error> {
    let info = find(&context, &id).await?;
    if info.state != BoxState::Running {
        return Err(wrong_state("DOCKER::SANDBOX_NOT_RUNNING", &info));
    }
    context
        .transition(&info.box_id, TargetState::Paused)
        .await?;
    Ok(StatusCode::ACCEPTED)
}

pub(super) async fn resume(
    context: Context,
    InPath(id): InPath<String>,
) -> Result<StatusCode, Error> {
    let info = find(&context, &id).await?;
    if !matches!(info.state, BoxState::Paused | BoxState::Stopped) {
        return Err(wrong_state("DOCKER::SANDBOX_NOT_PAUSED", &info));
    }
    context
        .transition(&info.box_id, TargetState::Running)
        .await?;
    Ok(StatusCode::ACCEPTED)
}

fn wrong_state(code: &'static str, info: &BoxInfo) -> Error {
    let message = format!("sandbox {} is {}", info.box_id, model::state(info));
    Error::new(StatusCode::CONFLICT, code, message)
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RenewRequest {
    expires_at: String,
}

/// Sets the expiry, also to an earlier time.
pub(super) async fn renew(
    context: Context,
    InPath(id): InPath<String>,
    Json(request): Json<RenewRequest>,
) -> Result<Response, Error> {
    let at = model::time(&request.expires_at).ok_or_else(|| {
        Error::invalid_expiry("expiresAt: must be a time of RFC 3339 with its offset")
    })?;
    if at <= UnixMs::now() {
        return Err(Error::invalid_expiry("expiresAt: must be in the future"));
    }
    let params = BoxUpdateParams {
        lifetime: Some(LifetimeChange {
            expires_at: Some(Some(at)),
            ..LifetimeChange::default()
        }),
        ..BoxUpdateParams::of(box_id(&id)?)
    };
    let info = context.update(&GATEWAY, params).await?;
    let expires = info.lifetime.and_then(|lifetime| lifetime.expires_at);
    let expires = expires.unwrap_or(at).to_string();
    Ok(json_response(
        StatusCode::OK,
        &json!({"expiresAt": expires}),
    ))
}
