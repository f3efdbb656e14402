//! Snapshots: of a box, or of an image. Their names have tags, as images have.
//!
//! Several snapshots can have one name here, and a tag belongs to one of them. In the catalog, an item has a unique
//! name, and the tag `NAME:TAG`. Labels with a prefix keep what this API adds.

use std::future::Future;
use std::time::Duration;

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{BoxSnapshotParams, CatalogPutParams};
use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemContent, ItemDraft, ItemState, SnapshotDraft,
};
use box_protocol::{
    BoxError, Code, Defaults, HOST_IMAGE, Invalid, ItemRef, Labels, MAX_LABEL_BYTES, Name,
    SpecDraft, check_labels,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::box_request::refuse_content;
use super::boxes;
use super::catalog::{delete_item, item, items};
use super::errors::ApiError;
use super::lists::{ListPage, check_filters, has_labels, number_key, sort_key};
use super::run_config::RunConfig;
use super::sizes::{MAX_DISK_MB, check_megabytes, mebibytes};
use crate::http::body::{Json, Params};
use crate::http::context::Context;
use crate::http::refusal::json_response;

/// The prefix of labels that belong to this gateway.
const PREFIX: &str = "langsmith.";
const NAME: &str = "langsmith.name";
const IMAGE: &str = "langsmith.image";
const CAPACITY: &str = "langsmith.capacity";
const RUN_CONFIG: &str = "langsmith.run_config";
const DESCRIPTION: &str = "langsmith.description";

/// The tag of a request that names none, also in its image.
const LATEST: &str = "latest";

/// The number of snapshots on a page if the request sets none.
const PAGE: usize = 50;

/// How long a request waits for its snapshot. Then the client asks for it again and again.
const INLINE: Duration = Duration::from_secs(4);

/// The interval at which a request looks for the record of its snapshot.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Finds a snapshot by its id, as `NAME:TAG`, or by its name, which means `NAME:latest`.
///
/// A name without that tag means its newest snapshot without a tag. A failed snapshot is found by its id, and by its
/// name only if no other has it.
pub(super) async fn find(context: &Context, text: &str) -> Result<CatalogItem, ApiError> {
    let plain_id = text.replace('-', "");
    let latest = format!("{text}:{LATEST}");
    let is_uuid = text.len() == 36 && plain_id.len() == 32;
    let candidates = [Some(text), is_uuid.then_some(&*plain_id), Some(&*latest)];
    let mut failed = None;
    for candidate in candidates.into_iter().flatten() {
        let Ok(item) = ItemRef::new(candidate) else {
            continue;
        };
        let params = box_protocol::actions::CatalogGetParams {
            kind: CatalogKind::Snapshot,
            item,
        };
        match context.runtime().item(&context.caller, params).await {
            Err(error) if error.code() == Code::NotFound => {}
            Ok(item) if item.state == ItemState::Failed && item.id.as_str() != candidate => {
                failed = Some(item);
            }
            found => return Ok(found?),
        }
    }
    let all = items(context, CatalogKind::Snapshot).await?;
    let untagged = all.into_iter().rev().find(|item| {
        name(item) == text && item.state == ItemState::Ready && tags_of(item).next().is_none()
    });
    untagged.or(failed).ok_or_else(|| {
        let message = format!("snapshot {text:?} not found");
        ApiError::new(StatusCode::NOT_FOUND, "SnapshotNotFound", message)
    })
}

/// Makes a box begin as a snapshot.
pub(super) fn apply(
    item: &CatalogItem,
    spec: &mut SpecDraft,
    defaults: &mut Defaults,
) -> Result<(), Invalid> {
    spec.snapshot = Some(ItemRef::new(&item.id)?);
    if let Some(config) = run_config(item) {
        config.apply(spec, defaults)?;
    }
    spec.disk_mb = capacity(item).map(mebibytes);
    spec.labels = Some(own_labels(item)).filter(|labels| !labels.is_empty());
    Ok(())
}

fn name(item: &CatalogItem) -> &str {
    match item.labels.get(NAME) {
        Some(name) => name,
        None => item.name.as_str(),
    }
}

/// Returns the tags below the name.
fn tags_of(item: &CatalogItem) -> impl Iterator<Item = &str> {
    let tags = item.tags.iter();
    tags.filter_map(|tag| tag.as_str().strip_prefix(name(item))?.strip_prefix(':'))
}

fn run_config(item: &CatalogItem) -> Option<RunConfig> {
    serde_json::from_str(item.labels.get(RUN_CONFIG)?).ok()
}

fn capacity(item: &CatalogItem) -> Option<u64> {
    item.labels.get(CAPACITY)?.parse().ok()
}

/// Returns the labels of the client.
fn own_labels(item: &CatalogItem) -> Labels {
    let labels = item.labels.iter();
    let own = labels.filter(|(name, _)| !name.starts_with(PREFIX));
    own.map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

fn status(item: &CatalogItem) -> &'static str {
    match item.state {
        ItemState::Building => "building",
        ItemState::Ready => "ready",
        ItemState::Failed => "failed",
    }
}

fn shown(item: &CatalogItem) -> Value {
    let digest = match &item.content {
        ItemContent::Snapshot(snapshot) => snapshot.image.as_deref(),
        _ => None,
    };
    json!({
        "id": item.id,
        "name": name(item),
        "status": status(item),
        "status_message": item.reason,
        "fs_capacity_bytes": capacity(item).or(item.size_bytes).unwrap_or_default(),
        "fs_used_bytes": item.size_bytes,
        "docker_image": item.labels.get(IMAGE),
        "image_digest": digest,
        "source_sandbox_id": item.source_box(),
        "created_by": Value::Null,
        "registry_id": Value::Null,
        "created_at": item.created_at.to_string(),
        "updated_at": item.updated_at.to_string(),
        "tags": tags_of(item).collect::<Vec<_>>(),
        "run_config": run_config(item),
        "labels": own_labels(item),
        "description": item.labels.get(DESCRIPTION),
    })
}

/// A request for a snapshot.
#[derive(Debug, Deserialize)]
pub(super) struct NewSnapshot {
    name: String,
    tag: Option<String>,
    docker_image: Option<String>,
    fs_capacity_bytes: Option<u64>,
    registry_id: Option<Value>,
    run_config: Option<RunConfig>,
    labels: Option<Labels>,
    description: Option<String>,
    checkpoint: Option<Value>,
    include: Option<Value>,
    include_memory: Option<bool>,
    image_config: Option<Value>,
}

/// What an item of the catalog needs.
#[derive(Clone)]
struct Record {
    name: Name,
    tags: Vec<Name>,
    labels: Labels,
}

impl NewSnapshot {
    /// Refuses what snapshots of this server do not have.
    fn check(&self) -> Result<(), Invalid> {
        for (field, value) in [
            ("registry_id", &self.registry_id),
            ("checkpoint", &self.checkpoint),
            ("include", &self.include),
            ("image_config", &self.image_config),
        ] {
            refuse_content(field, value.as_ref())?;
        }
        if self.include_memory == Some(true) {
            let rule = "a snapshot of this server has no memory; omit it";
            return Err(Invalid::new("include_memory", rule));
        }
        let capacity = self.fs_capacity_bytes.map(mebibytes);
        check_megabytes("fs_capacity_bytes", capacity, MAX_DISK_MB)?;
        let tag = self.tag.as_deref().unwrap_or(LATEST);
        for (field, text) in [("name", &*self.name), ("tag", tag)] {
            if text.is_empty() || text.contains(':') {
                let rule = "must have at least one character, and no colon";
                return Err(Invalid::new(field, rule));
            }
        }
        Ok(())
    }

    fn record(self, config: Option<&RunConfig>) -> Result<Record, Invalid> {
        let tag = self.tag.as_deref().unwrap_or(LATEST);
        let mut labels = self.labels.unwrap_or_default();
        labels.retain(|name, _| !name.starts_with(PREFIX));
        check_labels(&labels)?;
        let config = config.and_then(|config| serde_json::to_string(config).ok());
        let capacity = self.fs_capacity_bytes.map(|bytes| bytes.to_string());
        for (label, value) in [
            (NAME, Some(self.name.clone())),
            (IMAGE, self.docker_image),
            (CAPACITY, capacity),
            (RUN_CONFIG, config),
            (DESCRIPTION, self.description),
        ] {
            labels.extend(value.map(|value| (label.to_owned(), value)));
        }
        check_labels(&labels).map_err(|_| {
            let rule = format!(
                "must have at most {MAX_LABEL_BYTES} bytes together with labels and description"
            );
            Invalid::new("run_config", rule)
        })?;
        let unique = box_protocol::ItemId::fresh();
        Ok(Record {
            name: Name::new(format!("{}@{unique}", self.name))?,
            tags: vec![Name::new(format!("{}:{tag}", self.name))?],
            labels,
        })
    }
}

/// Returns the tag of an image, if its name has one.
fn image_tag(image: &str) -> Option<&str> {
    let (name, _) = image.split_once('@').unwrap_or((image, ""));
    // A colon before the last part belongs to a port.
    let (_, tag) = name.rsplit('/').next()?.rsplit_once(':')?;
    Some(tag).filter(|tag| !tag.is_empty())
}

/// `POST /snapshots`: a snapshot of an image.
pub(super) async fn build(
    context: Context,
    Json(mut request): Json<NewSnapshot>,
) -> Result<Response, ApiError> {
    request.check()?;
    let Some(image) = request.docker_image.clone() else {
        return Err(Invalid::new("docker_image", "missing").into());
    };
    if request.tag.is_none() {
        request.tag = image_tag(&image).map(str::to_owned);
    }
    let config = request.run_config.clone();
    if let Some(config) = &config {
        config.check(image != HOST_IMAGE)?;
    }
    let record = request.record(config.as_ref())?;
    let Record { name, tags, labels } = record.clone();
    let params = CatalogPutParams {
        name,
        tags,
        labels,
        content: ItemDraft::Snapshot(SnapshotDraft { image }),
    };
    let made = {
        let context = context.clone();
        async move { context.runtime().put_item(&context.caller, params).await }
    };
    respond(&context, &record, made).await
}

/// `POST /boxes/{name}/snapshot`.
pub(super) async fn capture(
    context: Context,
    Path(name): Path<String>,
    Json(request): Json<NewSnapshot>,
) -> Result<Response, ApiError> {
    request.check()?;
    if request.docker_image.is_some() {
        let rule = "images inside a sandbox cannot be exported; omit it";
        return Err(Invalid::new("docker_image", rule).into());
    }
    let info = boxes::find(&context, &name).await?;
    // Boxes of the snapshot begin with the settings of this one.
    let mut config = RunConfig::of(&info);
    if let Some(change) = request.run_config.clone() {
        config = config.changed(change)?;
    }
    let record = request.record(Some(&config))?;
    let Record { name, tags, labels } = record.clone();
    let mut params = BoxSnapshotParams::new(info.box_id, name);
    params.tags = tags;
    params.labels = labels;
    params.keep_failed = true;
    let made = {
        let context = context.clone();
        async move { context.runtime().snapshot(&context.caller, params).await }
    };
    respond(&context, &record, made).await
}

/// Deletes the failed snapshots that a new one with this record replaces: those of its name with its tag or without any.
///
/// A failure leaves them to the next snapshot of the name, because the new one exists.
async fn forget_failed(context: &Context, record: &Record) {
    let all = items(context, CatalogKind::Snapshot).await;
    for item in all.unwrap_or_default() {
        let is_new = item.name == record.name;
        let is_same_name = item.labels.get(NAME) == record.labels.get(NAME);
        let is_replaced = item.tags.iter().all(|tag| record.tags.contains(tag));
        if item.state == ItemState::Failed && !is_new && is_same_name && is_replaced {
            let _ = delete_item(context, &item).await;
        }
    }
}

/// Responds with a snapshot that is being made: when it is ready, or before if that takes long.
///
/// It replaces failed ones when the client can see it; if it is refused, they stay with their reasons.
async fn respond(
    context: &Context,
    record: &Record,
    made: impl Future<Output = Result<CatalogItem, BoxError>> + Send + 'static,
) -> Result<Response, ApiError> {
    let name = record.name.as_str();
    let mut making = tokio::spawn(made);
    let mut waited = timeout(INLINE, &mut making).await.ok();
    let made = loop {
        if let Some(made) = waited {
            break made.map_err(|_| BoxError::internal("the snapshot ended early"))?;
        }
        if let Ok(visible) = item(context, CatalogKind::Snapshot, name).await {
            break Ok(visible);
        }
        waited = timeout(POLL_INTERVAL, &mut making).await.ok();
    };
    let made = match made {
        Ok(made) => made,
        // The client learns the reason when it asks for the status.
        Err(error) => match item(context, CatalogKind::Snapshot, name).await {
            Ok(failed) => failed,
            Err(_) => return Err(error.into()),
        },
    };
    forget_failed(context, record).await;
    Ok(json_response(StatusCode::CREATED, &shown(&made)))
}

/// `GET /snapshots`.
pub(super) async fn list(context: Context, params: Params) -> Result<Response, ApiError> {
    check_filters(&params)?;
    let mut all = items(&context, CatalogKind::Snapshot).await?;
    if let Some(part) = params.get("name_contains") {
        let part = part.to_lowercase();
        all.retain(|item| name(item).to_lowercase().contains(&part));
    }
    if let Some(status) = params.get("status") {
        all.retain(|item| self::status(item) == status);
    }
    all.retain(|item| has_labels(&own_labels(item), &params));
    let value: fn(&CatalogItem) -> String = match params.get("sort_by") {
        None | Some("created_at") => |item| number_key(Some(item.created_at.0)),
        Some("name") => |item| name(item).to_owned(),
        Some("status") => |item| self::status(item).to_owned(),
        Some(_) => {
            let rule = "must be name, status or created_at";
            return Err(Invalid::new("sort_by", rule).into());
        }
    };
    let page = ListPage::of(all, &params, PAGE, |item| {
        sort_key(&value(item), item.id.as_str())
    })?;
    let all: Vec<_> = page.items.iter().map(shown).collect();
    let body = page.body("snapshots", &all);
    Ok(json_response(StatusCode::OK, &body))
}

/// `GET /snapshots/{snapshot}`.
pub(super) async fn get(
    context: Context,
    Path(snapshot): Path<String>,
) -> Result<Response, ApiError> {
    let item = find(&context, &snapshot).await?;
    Ok(json_response(StatusCode::OK, &shown(&item)))
}

/// `DELETE /snapshots/{snapshot}`.
pub(super) async fn delete(
    context: Context,
    Path(snapshot): Path<String>,
) -> Result<Response, ApiError> {
    let item = find(&context, &snapshot).await?;
    delete_item(&context, &item).await
}

/// `GET /snapshots-by-name/{name}`.
pub(super) async fn tags(
    context: Context,
    Path(asked): Path<String>,
) -> Result<Response, ApiError> {
    let mut all = items(&context, CatalogKind::Snapshot).await?;
    all.retain(|item| name(item) == asked);
    if all.is_empty() {
        let message = format!("snapshot {asked:?} not found");
        return Err(ApiError::new(
            StatusCode::NOT_FOUND,
            "SnapshotNotFound",
            message,
        ));
    }
    let tags = all
        .iter()
        .flat_map(|item| tags_of(item).map(|tag| json!({"tag": tag, "snapshot_id": item.id})));
    let body = json!({"name": asked, "tags": tags.collect::<Vec<_>>()});
    Ok(json_response(StatusCode::OK, &body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_may_have_a_tag() {
        let digest = "a".repeat(64);
        for (image, tag) in [
            ("host", None),
            ("python:3.12-slim", Some("3.12-slim")),
            ("localhost:5000/none", None),
            ("localhost:5000/team/none:1.2", Some("1.2")),
            (&*format!("python@sha256:{digest}"), None),
            (&*format!("python:3.12@sha256:{digest}"), Some("3.12")),
        ] {
            assert_eq!(image_tag(image), tag, "{image}");
        }
    }
}
