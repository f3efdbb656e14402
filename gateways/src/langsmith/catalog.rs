//! Items of the catalog of this server, as all kinds of them are found, made, changed and deleted.

use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::{
    CatalogDeleteParams, CatalogGetParams, CatalogListParams, CatalogPutParams, CatalogUpdateParams,
};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemChange, ItemDraft};
use box_protocol::{BoxError, Code, ItemRef, Name};
use serde_json::{Value, json};

use super::box_request::named;
use super::errors::ApiError;
use crate::http::body::Params;
use crate::http::context::Context;
use crate::http::refusal::json_response;

/// Finds an item by its id, its name or a tag.
pub(super) async fn item(
    context: &Context,
    kind: CatalogKind,
    text: &str,
) -> Result<CatalogItem, ApiError> {
    let item = ItemRef::new(text).map_err(|_| unknown(kind, text))?;
    let params = CatalogGetParams { kind, item };
    match context.runtime().item(&context.caller, params).await {
        Err(error) if error.code() == Code::NotFound => Err(unknown(kind, text)),
        found => Ok(found?),
    }
}

/// Returns a reference to an item of a request that stays valid when the item gets another name, and the item.
///
/// `field` is the member of the request that names it.
pub(super) async fn resolve(
    context: &Context,
    kind: CatalogKind,
    field: &'static str,
    text: &str,
) -> Result<(ItemRef, CatalogItem), ApiError> {
    let item = ItemRef::new(text).map_err(|error| named(field, &error))?;
    let params = CatalogGetParams { kind, item };
    let found = context.runtime().item(&context.caller, params).await?;
    Ok((ItemRef::new(&found.id)?, found))
}

fn unknown(kind: CatalogKind, text: &str) -> ApiError {
    let message = format!("{kind} {text:?} not found");
    ApiError::new(StatusCode::NOT_FOUND, "NotFound", message)
}

/// Returns all items of a kind, the oldest first.
pub(super) async fn items(
    context: &Context,
    kind: CatalogKind,
) -> Result<Vec<CatalogItem>, BoxError> {
    let mut params = CatalogListParams::of(kind);
    let mut items = Vec::new();
    loop {
        let page = context
            .runtime()
            .list_items(&context.caller, params.clone())
            .await?;
        items.extend(page.items);
        params.after = page.next;
        if params.after.is_none() {
            return Ok(items);
        }
    }
}

/// Creates an item.
pub(super) async fn put(
    context: &Context,
    name: String,
    draft: ItemDraft,
) -> Result<CatalogItem, BoxError> {
    let mut params = CatalogPutParams::new(Name::new(name)?, draft);
    let policy = &context.server.policy;
    policy.decide_item(&mut params, &context.caller).await?;
    context.runtime().put_item(&context.caller, params).await
}

/// Changes the name or the properties of an item.
pub(super) async fn change(
    context: &Context,
    item: &CatalogItem,
    name: Option<String>,
    change: Option<ItemChange>,
) -> Result<CatalogItem, BoxError> {
    let mut params = CatalogUpdateParams::of(item.kind(), ItemRef::new(&item.id)?);
    params.name = name.map(Name::new).transpose()?;
    params.content = change;
    let policy = &context.server.policy;
    policy
        .decide_item_change(&mut params, &context.caller)
        .await?;
    context.runtime().update_item(&context.caller, params).await
}

/// Deletes an item.
pub(super) async fn delete_item(
    context: &Context,
    item: &CatalogItem,
) -> Result<Response, ApiError> {
    let params = CatalogDeleteParams {
        kind: item.kind(),
        item: ItemRef::new(&item.id)?,
    };
    context
        .runtime()
        .delete_item(&context.caller, params)
        .await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Returns the members that all items have.
pub(super) fn shown(item: &CatalogItem) -> Value {
    json!({
        "id": item.id, "name": item.name, "created_at": item.created_at.to_string(),
        "updated_at": item.updated_at.to_string(),
    })
}

/// Adds the members of a kind.
pub(super) fn with(mut value: Value, more: Value) -> Value {
    if let (Some(members), Value::Object(more)) = (value.as_object_mut(), more) {
        members.extend(more);
    }
    value
}

/// Returns MiB as a quantity.
pub(super) fn mebibytes_text(megabytes: u64) -> String {
    match megabytes % 1024 {
        0 if megabytes > 0 => format!("{}Gi", megabytes / 1024),
        _ => format!("{megabytes}Mi"),
    }
}

/// `GET /registries`: none, because only the operator logs in to registries.
pub(super) async fn list_registries(_: Context, _: Params) -> Response {
    let body = json!({"registries": [], "items": [], "next_cursor": null, "offset": 0});
    json_response(StatusCode::OK, &body)
}

/// Every other request for registries.
pub(super) async fn no_registries() -> ApiError {
    ApiError::unsupported("registries: the operator logs in to them: boxd image login")
}

/// `GET /usage/costs`.
pub(super) async fn no_costs() -> ApiError {
    ApiError::unsupported("usage: this server has no prices")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_return_as_they_were_sent() {
        for (text, megabytes) in [("512Mi", 512), ("2Gi", 2048), ("1536Mi", 1536)] {
            assert_eq!(mebibytes_text(megabytes), text);
        }
    }
}
