//! Volumes: `/volumes`.

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemChange, ItemContent, ItemDraft, VolumeChange, VolumeDraft,
};
use box_protocol::error::Detail;
use box_protocol::{BoxError, Code};
use serde::Deserialize;
use serde_json::{Value, json};

use super::catalog::{change, delete_item, item, items, mebibytes_text, put, shown, with};
use super::errors::{ApiError, in_use};
use crate::http::body::Json;
use crate::http::context::Context;
use crate::http::quantity::megabytes;
use crate::http::refusal::json_response;

/// The fields of the contract, and the members of a request that they come from.
const FIELDS: [(&str, &str); 1] = [("size_mb", "size")];

/// The only kind of storage.
const STORAGE_CLASS: &str = "default";

/// A new volume.
#[derive(Debug, Deserialize)]
pub(super) struct NewVolume {
    name: String,
    size: String,
}

fn volume_view(item: &CatalogItem) -> Value {
    let ItemContent::Volume(volume) = &item.content else {
        return shown(item);
    };
    let size = mebibytes_text(volume.size_mb);
    with(
        shown(item),
        json!({"size": size, "storage_class": STORAGE_CLASS}),
    )
}

/// `POST /volumes`.
pub(super) async fn create(
    context: Context,
    Json(request): Json<NewVolume>,
) -> Result<Response, ApiError> {
    let draft = VolumeDraft {
        size_mb: megabytes("size", &request.size)?,
        ..VolumeDraft::default()
    };
    let created = put(&context, request.name, ItemDraft::Volume(draft)).await;
    let item = created.map_err(|error| match error.code() {
        Code::Unavailable | Code::Unsupported => ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "VolumeProvisioning",
            error.message(),
        ),
        _ => ApiError::from(error).with_fields(&FIELDS),
    })?;
    Ok(json_response(StatusCode::CREATED, &volume_view(&item)))
}

/// `GET /volumes`.
pub(super) async fn list(context: Context) -> Result<Response, ApiError> {
    let items = items(&context, CatalogKind::Volume).await?;
    let volumes: Vec<_> = items.iter().map(volume_view).collect();
    Ok(json_response(StatusCode::OK, &json!({"volumes": volumes})))
}

/// `GET /volumes/{name}`.
pub(super) async fn get(context: Context, Path(name): Path<String>) -> Result<Response, ApiError> {
    let item = item(&context, CatalogKind::Volume, &name).await?;
    Ok(json_response(StatusCode::OK, &volume_view(&item)))
}

/// Changes of a volume.
#[derive(Debug, Deserialize)]
pub(super) struct UpdateVolume {
    name: Option<String>,
    size: Option<String>,
}

/// `PATCH /volumes/{name}`.
pub(super) async fn update(
    context: Context,
    Path(name): Path<String>,
    Json(request): Json<UpdateVolume>,
) -> Result<Response, ApiError> {
    let item = item(&context, CatalogKind::Volume, &name).await?;
    let size = request
        .size
        .map(|size| megabytes("size", &size))
        .transpose()?;
    if let (Some(size), ItemContent::Volume(volume)) = (size, &item.content)
        && size < volume.size_mb
    {
        let now = mebibytes_text(volume.size_mb);
        let message =
            format!("size: must be at least the {now} that the volume has; create another volume");
        return Err(resize_error(message));
    }
    let resized = size.map(|size| {
        ItemChange::Volume(VolumeChange {
            size_mb: Some(size),
            shared: None,
        })
    });
    let renames = request.name.is_some();
    let changed = change(&context, &item, request.name, resized).await;
    let item = changed.map_err(|error| {
        let detail: Detail = error.detail().unwrap_or_default();
        let is_in_use = detail.used_by.is_some() || !renames;
        if size.is_some() && error.code() == Code::Conflict && is_in_use {
            return resize_error(error.message());
        }
        ApiError::from(error).with_fields(&FIELDS)
    })?;
    Ok(json_response(StatusCode::OK, &volume_view(&item)))
}

fn resize_error(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "VolumeResize", message)
}

/// `DELETE /volumes/{name}`.
pub(super) async fn delete(
    context: Context,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let volume = item(&context, CatalogKind::Volume, &name).await?;
    if let Some(template) = template_of(&context, &volume).await? {
        return Err(in_use("volume", "template", template.name.as_str()));
    }
    delete_item(&context, &volume).await
}

/// Returns a template that mounts a volume, if there is one.
async fn template_of(
    context: &Context,
    volume: &CatalogItem,
) -> Result<Option<CatalogItem>, BoxError> {
    for template in items(context, CatalogKind::Template).await? {
        let ItemContent::Template(properties) = &template.content else {
            continue;
        };
        for mount in properties.spec.volumes.iter().flatten() {
            let mounted = item(context, CatalogKind::Volume, mount.volume.as_str()).await;
            if mounted.is_ok_and(|mounted| mounted.id == volume.id) {
                return Ok(Some(template));
            }
        }
    }
    Ok(None)
}
