//! Snapshots, forks and volumes: what the catalog of the server holds.

use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{any, get, post};
use box_protocol::actions::{
    BoxForkParams, BoxSnapshotParams, BoxUpdateParams, CatalogDeleteParams, CatalogGetParams,
    CatalogListParams, CatalogPutParams,
};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemDraft, ItemState, VolumeDraft};
use box_protocol::{BoxId, Invalid, ItemRef, LifetimeChange, Name};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::sandboxes::{find, page, with_next};
use super::spec::end_after;
use super::tags::BUILT;
use super::{GATEWAY, model};
use crate::http::body::{Json, OptionalJson, Params};
use crate::http::context::Context;
use crate::http::page::ListOrder;
use crate::http::refusal::json_response;

type Result<T = Response> = std::result::Result<T, ApiError>;

/// The maximum number of boxes that one request forks.
const MAX_FORKS: u32 = 20;

/// The size of a volume, in MiB. Requests name none.
const VOLUME_MB: u64 = 10 * 1024;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/sandboxes/{id}/snapshots", post(create_snapshot))
        .route("/snapshots", get(list_snapshots))
        .route("/sandboxes/{id}/fork", post(fork))
        .route("/volumes", post(create_volume).get(list_volumes))
        .route("/volumes/{id}", get(get_volume).delete(delete_volume))
        .route("/volumecontent/{*path}", any(no_content))
}

#[derive(Debug, Default, Deserialize)]
struct NewSnapshot {
    name: Option<String>,
    memory: Option<bool>,
}

async fn create_snapshot(
    context: Context,
    Path(id): Path<String>,
    OptionalJson(request): OptionalJson<NewSnapshot>,
) -> Result {
    if request.memory == Some(true) {
        let message = "memory: snapshots hold files only; use mode \"filesystem\"";
        return Err(ApiError::unsupported(message));
    }
    let info = find(&context, &id).await?;
    // `name:tag` is the snapshot that a tag of the name points to.
    let name = match &request.name {
        Some(name) => Name::new(name)?,
        None => Name::new(format!("snapshot-{}", BoxId::fresh()))?,
    };
    let params = BoxSnapshotParams::new(info.box_id, name);
    let item = context.runtime().snapshot(&context.caller, params).await?;
    Ok(json_response(StatusCode::CREATED, &snapshot(&item)))
}

fn snapshot(item: &CatalogItem) -> Value {
    let names: Vec<&Name> = std::iter::once(&item.name).chain(&item.tags).collect();
    json!({"snapshotID": item.id, "names": names})
}

/// Returns all items of a kind.
pub(super) async fn items(
    context: &Context,
    mut params: CatalogListParams,
) -> Result<Vec<CatalogItem>> {
    let mut items = Vec::new();
    loop {
        let asked = params.clone();
        let page = context.runtime().list_items(&context.caller, asked).await?;
        items.extend(page.items);
        params.after = page.next;
        if params.after.is_none() {
            return Ok(items);
        }
    }
}

async fn list_snapshots(context: Context, params: Params) -> Result {
    let mut asked = CatalogListParams::of(CatalogKind::Snapshot);
    if let Some(id) = params.get("sandboxID") {
        let id = BoxId::new(id)
            .map_err(|invalid| Invalid::new("sandboxID", invalid.rule().to_owned()))?;
        asked.source_box = Some(id);
    }
    asked.name = params.get("name").map(Name::new).transpose()?;
    let mut items = items(&context, asked).await?;
    // The files of templates are no snapshots of a client, and clients see no state of a snapshot.
    items.retain(|item| item.state == ItemState::Ready && !item.labels.contains_key(BUILT));
    let (items, next) = page(items, &params, ListOrder::Ascending, |item| item.id.clone())?;
    let body = items.iter().map(snapshot).collect();
    Ok(with_next(&Value::Array(body), next))
}

#[derive(Debug, Default, Deserialize)]
struct Fork {
    timeout: Option<u64>,
    count: Option<u32>,
}

async fn fork(
    context: Context,
    Path(id): Path<String>,
    OptionalJson(request): OptionalJson<Fork>,
) -> Result {
    let info = find(&context, &id).await?;
    let count = request.count.unwrap_or(1);
    if !(1..=MAX_FORKS).contains(&count) {
        let rule = format!("must be between 1 and {MAX_FORKS}, not {count}");
        return Err(Invalid::new("count", rule).into());
    }
    let params = BoxForkParams {
        count,
        // The ids of forks of forks would grow beyond a label of a host name.
        prefix: Some(BoxId::fresh()),
        ..BoxForkParams::new(info.box_id)
    };
    let forked = context.runtime().fork(&context.caller, params).await?;
    let end = end_after(request.timeout.unwrap_or(model::DEFAULT_TIMEOUT_SEC));
    let mut results = Vec::new();
    for item in forked.items {
        let mut change = BoxUpdateParams::of(item.box_id);
        change.lifetime = Some(LifetimeChange {
            expires_at: Some(Some(end)),
            ..LifetimeChange::default()
        });
        results.push(match context.update(&GATEWAY, change).await {
            Ok(info) => json!({"sandbox": model::sandbox(&context, &info)}),
            Err(error) => json!({"error": ApiError::from(error).to_json()}),
        });
    }
    Ok(json_response(StatusCode::CREATED, &Value::Array(results)))
}

#[derive(Debug, Deserialize)]
struct NewVolume {
    name: String,
}

fn volume(item: &CatalogItem) -> Value {
    json!({"volumeID": item.id, "name": item.name, "token": ""})
}

async fn create_volume(context: Context, Json(request): Json<NewVolume>) -> Result {
    let draft = ItemDraft::Volume(VolumeDraft {
        size_mb: VOLUME_MB,
        shared: true,
    });
    let params = CatalogPutParams::new(Name::new(request.name)?, draft);
    let item = context.runtime().put_item(&context.caller, params).await?;
    Ok(json_response(StatusCode::CREATED, &volume(&item)))
}

async fn list_volumes(context: Context) -> Result {
    let items = items(&context, CatalogListParams::of(CatalogKind::Volume)).await?;
    let body = items.iter().map(volume).collect();
    Ok(json_response(StatusCode::OK, &Value::Array(body)))
}

async fn get_volume(context: Context, Path(id): Path<String>) -> Result {
    let params = CatalogGetParams {
        kind: CatalogKind::Volume,
        item: ItemRef::new(id)?,
    };
    let item = context.runtime().item(&context.caller, params).await?;
    Ok(json_response(StatusCode::OK, &volume(&item)))
}

async fn delete_volume(context: Context, Path(id): Path<String>) -> Result<StatusCode> {
    delete_item(&context, CatalogKind::Volume, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Deletes an item of the caller.
pub(super) async fn delete_item(context: &Context, kind: CatalogKind, id: &str) -> Result<()> {
    let item = ItemRef::new(id)?;
    let params = CatalogDeleteParams { kind, item };
    context
        .runtime()
        .delete_item(&context.caller, params)
        .await?;
    Ok(())
}

async fn no_content() -> ApiError {
    let message = "volumecontent: not supported by this server; mount the volume in a sandbox";
    ApiError::unsupported(message)
}
