//! Templates: what boxes begin with, and the requests that build them.
//!
//! A template is an item of the catalog, and its labels hold the state of its build. Its build runs in a box
//! (`build`), whose files become a snapshot.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::{any, get, post};
use axum::{Extension, Router};
use box_protocol::actions::{
    CatalogGetParams, CatalogListParams, CatalogPutParams, CatalogUpdateParams,
};
use box_protocol::catalog::{CatalogItem, CatalogKind, ItemContent, ItemDraft, TemplateDraft};
use box_protocol::{BoxId, Code, ItemRef, Name, SpecDraft};
use serde::Deserialize;
use serde_json::{Value, json};

use super::build::{self, BUILD, CPUS, MEMORY, REASON, STATUS, Start};
use super::build_log::logs;
use super::builds::Builds;
use super::catalog::{delete_item, items};
use super::error::ApiError;
use super::model::ENVD_VERSION;
use super::sandboxes::{page, with_next};
use super::spec::is_built_in;
use super::tags::{TAG_OF, TAGS, release, snapshot_of, tags_of, user_of};
use crate::http::body::{Json, Params};
use crate::http::context::Context;
use crate::http::page::ListOrder;
use crate::http::refusal::json_response;

type Result<T = Response> = std::result::Result<T, ApiError>;

/// The header by which a proxy says how a client reached it.
const FORWARDED_PROTO: &str = "x-forwarded-proto";

/// The log entries of one response.
const MAX_ENTRIES: usize = 100;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/templates", get(list))
        .route("/v3/templates", post(request))
        .route("/v2/templates", post(request).get(list_page))
        .route("/templates/{id}", get(one).delete(delete_template))
        .route("/templates/aliases/{alias}", get(alias))
        .route("/templates/{id}/files/{hash}", get(upload))
        .route("/v2/templates/{id}/builds/{build}", post(start))
        .route("/templates/{id}/builds/{build}/status", get(status))
        .route("/templates/tags", any(no_tags))
        .route("/templates/{id}/tags", any(no_tags))
        .route("/templates/{id}/tags/{*path}", any(no_tags))
        .layer(Extension(Arc::new(Builds::default())))
}

async fn no_tags() -> ApiError {
    ApiError::unsupported("tags: not supported by this server; name the tags in the build")
}

/// Returns a template of the caller.
pub(super) async fn find(context: &Context, id: &str) -> Result<CatalogItem> {
    let params = CatalogGetParams {
        kind: CatalogKind::Template,
        item: ItemRef::new(id)?,
    };
    let found = context.runtime().item(&context.caller, params).await;
    found.map_err(|error| match error.code() {
        Code::NotFound => {
            ApiError::new(StatusCode::NOT_FOUND, format!("template {id:?} not found"))
        }
        _ => error.into(),
    })
}

/// Returns the state of the build of a template. One that no build made is ready.
pub(super) fn status_of(item: &CatalogItem) -> &str {
    item.labels.get(STATUS).map_or("ready", String::as_str)
}

/// Returns whether boxes can begin with a template: a failed build leaves the result of the one before it.
pub(super) fn is_usable(item: &CatalogItem) -> bool {
    let was_built = match &item.content {
        ItemContent::Template(content) => content.spec.snapshot.is_some(),
        _ => false,
    };
    was_built || status_of(item) == "ready"
}

/// Returns the state as above; a build that no server runs any more has failed.
fn state_of<'a>(item: &'a CatalogItem, running: &HashSet<String>) -> &'a str {
    let build = item.labels.get(BUILD);
    match status_of(item) {
        "building" if !build.is_some_and(|build| running.contains(build)) => "error",
        status => status,
    }
}

/// Returns what a call finds, and the builds that ran meanwhile.
async fn with_builds<T>(
    builds: &Builds,
    call: impl Future<Output = Result<T>>,
) -> Result<(T, HashSet<String>)> {
    // A build runs before it records its begin, and until it has recorded its end.
    let mut running = builds.running();
    let found = call.await?;
    running.extend(builds.running());
    Ok((found, running))
}

fn described(item: &CatalogItem, running: &HashSet<String>) -> Value {
    let ItemContent::Template(content) = &item.content else {
        return Value::Null;
    };
    let names: Vec<&Name> = std::iter::once(&item.name).chain(&item.tags).collect();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a small number of CPUs"
    )]
    let cpus = content.spec.cpus.unwrap_or(1.0).ceil().max(1.0) as u64;
    json!({
        "templateID": item.id,
        "buildID": item.labels.get(BUILD).map_or("", String::as_str),
        "cpuCount": cpus,
        "memoryMB": content.spec.memory_mb.unwrap_or(512),
        "diskSizeMB": content.spec.disk_mb.unwrap_or_default(),
        "public": false,
        "aliases": names,
        "names": names,
        "createdAt": item.created_at.to_string(),
        "updatedAt": item.updated_at.to_string(),
        "createdBy": null,
        "lastSpawnedAt": null,
        "spawnCount": item.used_by,
        "buildCount": u64::from(item.labels.contains_key(BUILD)),
        "envdVersion": ENVD_VERSION,
        "buildStatus": state_of(item, running),
    })
}

/// Returns the templates of the caller without their tags.
async fn all(context: &Context) -> Result<Vec<CatalogItem>> {
    let mut items = items(context, CatalogListParams::of(CatalogKind::Template)).await?;
    items.retain(|item| !item.labels.contains_key(TAG_OF));
    Ok(items)
}

async fn list(context: Context, Extension(builds): Extension<Arc<Builds>>) -> Result {
    let (items, running) = with_builds(&builds, all(&context)).await?;
    let body = items.iter().map(|item| described(item, &running)).collect();
    Ok(json_response(StatusCode::OK, &Value::Array(body)))
}

async fn list_page(
    context: Context,
    Extension(builds): Extension<Arc<Builds>>,
    params: Params,
) -> Result {
    let (items, running) = with_builds(&builds, all(&context)).await?;
    let (items, next) = page(items, &params, ListOrder::Ascending, |item| item.id.clone())?;
    let body = items.iter().map(|item| described(item, &running)).collect();
    Ok(with_next(&Value::Array(body), next))
}

async fn one(
    context: Context,
    Extension(builds): Extension<Arc<Builds>>,
    Path(id): Path<String>,
    params: Params,
) -> Result {
    let (item, running) = with_builds(&builds, find(&context, &id)).await?;
    let mut body = described(&item, &running);
    let build = json!({
        "buildID": body["buildID"], "status": body["buildStatus"], "createdAt": body["createdAt"],
        "updatedAt": body["updatedAt"], "cpuCount": body["cpuCount"], "memoryMB": body["memoryMB"],
    });
    let (builds, next) = page(vec![build], &params, ListOrder::Ascending, |_| "build")?;
    body["builds"] = builds.into();
    Ok(with_next(&body, next))
}

async fn alias(context: Context, Path(alias): Path<String>) -> Result {
    let found = find(&context, &alias).await;
    let body = match found {
        Ok(item) => json!({"templateID": item.id, "public": false}),
        Err(error) if error.status() == StatusCode::NOT_FOUND && is_built_in(&alias) => {
            json!({"templateID": alias, "public": true})
        }
        Err(error) => return Err(error),
    };
    Ok(json_response(StatusCode::OK, &body))
}

/// Deletes a template with its files, or a snapshot.
async fn delete_template(context: Context, Path(id): Path<String>) -> Result<StatusCode> {
    match find(&context, &id).await {
        Ok(item) => {
            let mut items = tags_of(&context, &item).await?;
            items.push(item);
            for item in &items {
                delete_item(&context, CatalogKind::Template, item.id.as_str()).await?;
                let was_built = [BUILD, TAG_OF].map(|label| item.labels.contains_key(label));
                if let (true, Some(snapshot)) = (was_built.contains(&true), snapshot_of(item)) {
                    release(&context, snapshot).await;
                }
            }
        }
        Err(error) if error.status() == StatusCode::NOT_FOUND => {
            delete_snapshot(&context, &id).await?;
        }
        Err(error) => return Err(error),
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Deletes a snapshot that no template begins with.
async fn delete_snapshot(context: &Context, id: &str) -> Result<()> {
    let params = CatalogGetParams {
        kind: CatalogKind::Snapshot,
        item: ItemRef::new(id)?,
    };
    let snapshot = context.runtime().item(&context.caller, params).await?;
    if let Some(template) = user_of(context, snapshot.id.as_str()).await? {
        let message = format!(
            "snapshot: template {:?} begins with it; delete the template first",
            template.name.as_str()
        );
        return Err(ApiError::new(StatusCode::CONFLICT, message));
    }
    delete_item(context, CatalogKind::Snapshot, snapshot.id.as_str()).await
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NewTemplate {
    name: Option<String>,
    alias: Option<String>,
    #[serde(default)]
    tags: Option<Vec<String>>,
    cpu_count: Option<f64>,
    #[serde(rename = "memoryMB")]
    memory_mb: Option<u64>,
}

/// Prepares a build: the template exists afterwards, and no box can use it yet.
async fn request(context: Context, Json(request): Json<NewTemplate>) -> Result {
    let full = request.name.or(request.alias).unwrap_or_default();
    let (name, tag) = full.split_once(':').unwrap_or((&full, ""));
    let tags: Vec<String> = request.tags.unwrap_or_default();
    let tags = tags.into_iter().chain([tag.to_owned()]);
    let tags: Vec<String> = tags.filter(|tag| !tag.is_empty()).collect();
    let item_name = Name::new(name)?;
    for tag in &tags {
        Name::new(format!("{name}:{tag}"))?;
    }
    let build = BoxId::fresh();
    let mut labels = BTreeMap::from([
        (BUILD.to_owned(), build.to_string()),
        (STATUS.to_owned(), "waiting".to_owned()),
        (TAGS.to_owned(), tags.join(",")),
    ]);
    let cpus = request.cpu_count.map(|cpus| (CPUS, cpus.to_string()));
    let memory = request.memory_mb.map(|size| (MEMORY, size.to_string()));
    let sizes = cpus.into_iter().chain(memory);
    labels.extend(sizes.map(|(name, value)| (name.to_owned(), value)));
    let item = match find(&context, name).await {
        Ok(item) => {
            let mut change =
                CatalogUpdateParams::of(CatalogKind::Template, ItemRef::new(item.id.as_str())?);
            let labels = labels.into_iter();
            change.labels = labels.map(|(name, value)| (name, Some(value))).collect();
            change.labels.insert(REASON.to_owned(), None);
            context
                .runtime()
                .update_item(&context.caller, change)
                .await?
        }
        Err(error) if error.status() == StatusCode::NOT_FOUND => {
            let spec = SpecDraft {
                cpus: request.cpu_count,
                memory_mb: request.memory_mb,
                ..SpecDraft::default()
            };
            let draft = ItemDraft::Template(Box::new(TemplateDraft { spec }));
            let mut new = CatalogPutParams::new(item_name, draft);
            new.labels = labels;
            context.runtime().put_item(&context.caller, new).await?
        }
        Err(error) => return Err(error),
    };
    let body = json!({
        "templateID": item.id, "buildID": build, "public": false,
        "names": [name], "aliases": [name], "tags": tags,
    });
    Ok(json_response(StatusCode::ACCEPTED, &body))
}

/// Returns where to upload the files of a step.
async fn upload(
    context: Context,
    headers: HeaderMap,
    Path((id, hash)): Path<(String, String)>,
) -> Result {
    let item = find(&context, &id).await?;
    let mut url = build::upload_url(&context, &item, &hash).await?;
    // A proxy in front of this server ends the TLS of clients.
    let has_tls = headers.get(FORWARDED_PROTO).is_some_and(|it| it == "https");
    if let (true, Some(rest)) = (has_tls, url.strip_prefix("http://")) {
        url = format!("https://{rest}");
    }
    let body = json!({"present": false, "url": url});
    Ok(json_response(StatusCode::CREATED, &body))
}

async fn start(
    context: Context,
    Extension(builds): Extension<Arc<Builds>>,
    Path((id, build)): Path<(String, String)>,
    Json(request): Json<Start>,
) -> Result<StatusCode> {
    let item = find(&context, &id).await?;
    if item.labels.get(BUILD) != Some(&build) {
        let message = format!("build {build:?} not found; request a new one");
        return Err(ApiError::new(StatusCode::NOT_FOUND, message));
    }
    build::start(context, &builds, &item, request).await?;
    Ok(StatusCode::ACCEPTED)
}

async fn status(
    context: Context,
    Extension(builds): Extension<Arc<Builds>>,
    Path((id, build)): Path<(String, String)>,
    params: Params,
) -> Result {
    let (item, running) = with_builds(&builds, find(&context, &id)).await?;
    let skip = params
        .parsed("logsOffset", "must be a number")?
        .unwrap_or(0);
    let logs = logs(&context, &build, skip, MAX_ENTRIES).await?;
    let state = state_of(&item, &running);
    let is_interrupted = state != status_of(&item);
    let reason = if is_interrupted {
        Some("the server ended during the build; build again".to_owned())
    } else {
        item.labels.get(REASON).cloned()
    };
    let entries = logs.unwrap_or_default();
    let is_last = item.labels.get(BUILD) == Some(&build);
    if is_last && (is_interrupted || state != "building" && entries.len() == MAX_ENTRIES) {
        // The client asks for the rest. After that, no server would delete the box of an interrupted build.
        build::keep_logs(&context, &BoxId::new(&build)?).await;
    }
    let lines: Vec<&Value> = entries.iter().map(|entry| &entry["message"]).collect();
    let mut body = json!({
        "templateID": item.id, "buildID": build, "status": state, "logs": lines, "logEntries": entries,
    });
    if let Some(message) = reason {
        let step = message
            .strip_prefix("step ")
            .and_then(|rest| rest.split(':').next());
        body["reason"] = json!({"message": message, "step": step, "logEntries": []});
    }
    Ok(json_response(StatusCode::OK, &body))
}
