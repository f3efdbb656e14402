//! Snapshots: the files of a sandbox at one moment.

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{
    BoxSnapshotParams, CatalogDeleteParams, CatalogGetParams, CatalogListParams,
};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemState};
use box_protocol::{ItemRef, Name};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::{Error, InPath};
use super::lifecycle::{box_id, page_json, paged};
use crate::http::body::{OptionalJson, Params};
use crate::http::context::Context;
use crate::http::refusal::json_response;

/// The label with the name that the client gave, which need not be unique.
const NAME_LABEL: &str = "opensandbox.name";

#[derive(Debug, Default, Deserialize)]
pub(super) struct CreateRequest {
    name: Option<String>,
}

/// Makes a snapshot, and answers when it is ready.
pub(super) async fn create(
    context: Context,
    InPath(id): InPath<String>,
    OptionalJson(request): OptionalJson<CreateRequest>,
) -> Result<Response, Error> {
    let name = Name::new(format!("snapshot-{}", Name::fresh()))?;
    let mut params = BoxSnapshotParams::new(box_id(&id)?, name);
    if let Some(name) = request.name {
        params.labels.insert(NAME_LABEL.to_owned(), name);
    }
    let item = context.runtime().snapshot(&context.caller, params).await?;
    Ok(json_response(StatusCode::ACCEPTED, &snapshot(&item)))
}

fn snapshot(item: &CatalogItem) -> Value {
    let mut status = json!({
        "state": state(item),
        "lastTransitionAt": item.updated_at.to_string(),
    });
    if let Some(reason) = &item.reason {
        status["reason"] = "FAILED".into();
        status["message"] = reason.as_str().into();
    }
    let sandbox = item.source_box().map(ToString::to_string);
    let mut found = json!({
        "id": item.id,
        "sandboxId": sandbox.unwrap_or_default(),
        "status": status,
        "createdAt": item.created_at.to_string(),
    });
    if let Some(name) = item.labels.get(NAME_LABEL) {
        found["name"] = name.as_str().into();
    }
    found
}

fn state(item: &CatalogItem) -> &'static str {
    match item.state {
        ItemState::Building => "Creating",
        ItemState::Ready => "Ready",
        ItemState::Failed => "Failed",
    }
}

/// Lists the snapshots of the caller, newest first.
pub(super) async fn list(context: Context, params: Params) -> Result<Response, Error> {
    let sandbox = params.get("sandboxId");
    let states: Vec<&str> = params.all("state").collect();
    let mut items = Vec::new();
    let mut wanted = CatalogListParams::of(CatalogKind::Snapshot);
    loop {
        let page = context
            .runtime()
            .list_items(&context.caller, wanted.clone())
            .await?;
        items.extend(page.items);
        wanted.after = page.next;
        if wanted.after.is_none() {
            break;
        }
    }
    items.retain(|item| {
        let source = item.source_box().map(AsRef::as_ref);
        let is_in = |wanted: &&str| wanted.eq_ignore_ascii_case(state(item));
        (sandbox.is_none() || source == sandbox) && (states.is_empty() || states.iter().any(is_in))
    });
    items.sort_by(|one, other| {
        let newest = other.created_at.cmp(&one.created_at);
        newest.then_with(|| other.id.cmp(&one.id))
    });
    let page = paged(&params, items)?;
    Ok(json_response(
        StatusCode::OK,
        &page_json(page, |item| snapshot(&item)),
    ))
}

fn item(id: &str) -> Result<ItemRef, Error> {
    let unknown = || {
        let message = format!("snapshot {id} not found");
        Error::new(StatusCode::NOT_FOUND, "SNAPSHOT::NOT_FOUND", message)
    };
    ItemRef::new(id).map_err(|_| unknown())
}

pub(super) async fn get(context: Context, InPath(id): InPath<String>) -> Result<Response, Error> {
    let params = CatalogGetParams {
        kind: CatalogKind::Snapshot,
        item: item(&id)?,
    };
    let item = context.runtime().item(&context.caller, params).await?;
    Ok(json_response(StatusCode::OK, &snapshot(&item)))
}

pub(super) async fn delete(
    context: Context,
    InPath(id): InPath<String>,
) -> Result<StatusCode, Error> {
    let params = CatalogDeleteParams {
        kind: CatalogKind::Snapshot,
        item: item(&id)?,
    };
    context
        .runtime()
        .delete_item(&context.caller, params)
        .await?;
    Ok(StatusCode::NO_CONTENT)
}
