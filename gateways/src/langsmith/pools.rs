//! Pools: `/pools`.

use std::time::Duration;

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::catalog::{
    CatalogItem, CatalogKind, ItemChange, ItemContent, ItemDraft, MAX_POOL_SIZE, PoolChange,
    PoolDraft,
};
use box_protocol::{Invalid, ItemRef};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::catalog::{change, delete_item, item, items, put, shown, with};
use super::errors::ApiError;
use crate::http::body::Json;
use crate::http::context::Context;
use crate::http::refusal::json_response;

/// The interval at which a request looks for the boxes of its pool.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The time for a pool to become ready if the request sets none, and the longest.
const POOL_SECONDS: f64 = 30.0;
const MAX_POOL_SECONDS: f64 = 3600.0;

/// A new pool.
#[derive(Debug, Deserialize)]
pub(super) struct NewPool {
    name: String,
    template_name: String,
    replicas: u32,
    wait_for_ready: Option<bool>,
    timeout: Option<f64>,
}

fn check_replicas(replicas: u32) -> Result<u32, Invalid> {
    if (1..=MAX_POOL_SIZE).contains(&replicas) {
        return Ok(replicas);
    }
    let rule = format!("must be between 1 and {MAX_POOL_SIZE}, not {replicas}");
    Err(Invalid::new("replicas", rule))
}

async fn pool_view(context: &Context, pool: &CatalogItem) -> Result<Value, ApiError> {
    let ItemContent::Pool(properties) = &pool.content else {
        return Ok(shown(pool));
    };
    let template = item(context, CatalogKind::Template, properties.template.as_str()).await?;
    let more = json!({
        "template_name": template.name, "replicas": properties.size, "ready_replicas": properties.ready,
    });
    Ok(with(shown(pool), more))
}

/// `POST /pools`.
pub(super) async fn create(
    context: Context,
    Json(request): Json<NewPool>,
) -> Result<Response, ApiError> {
    let replicas = check_replicas(request.replicas)?;
    let bad = |class, message: String| ApiError::new(StatusCode::BAD_REQUEST, class, message);
    let template = item(&context, CatalogKind::Template, &request.template_name).await;
    let template = template.map_err(|_| {
        let message = format!("template {:?} not found", request.template_name);
        bad("TemplateNotFound", message)
    })?;
    if let ItemContent::Template(properties) = &template.content
        && properties
            .spec
            .volumes
            .as_ref()
            .is_some_and(|volumes| !volumes.is_empty())
    {
        let message = format!(
            "template {:?} has volumes, which one box mounts",
            template.name
        );
        return Err(bad("ValidationError", message));
    }
    let limit = request
        .timeout
        .unwrap_or(POOL_SECONDS)
        .clamp(0.0, MAX_POOL_SECONDS);
    let limit = Duration::try_from_secs_f64(limit);
    let limit = limit.map_err(|_| Invalid::new("timeout", "must be a number"))?;
    let draft = PoolDraft::new(ItemRef::new(&template.id)?, replicas);
    let pool = put(&context, request.name, ItemDraft::Pool(Box::new(draft))).await?;
    let pool = match request.wait_for_ready {
        Some(false) => pool,
        _ => until_ready(&context, pool, limit).await?,
    };
    let view = pool_view(&context, &pool).await?;
    Ok(json_response(StatusCode::CREATED, &view))
}

/// Waits until the boxes of a pool are ready.
async fn until_ready(
    context: &Context,
    mut pool: CatalogItem,
    limit: Duration,
) -> Result<CatalogItem, ApiError> {
    let end = Instant::now() + limit;
    loop {
        if let ItemContent::Pool(properties) = &pool.content
            && properties.ready >= u64::from(properties.size)
        {
            return Ok(pool);
        }
        if Instant::now() >= end {
            let reason = pool.reason.as_deref().unwrap_or("its boxes still start");
            let message = format!("pool not ready after {}s: {reason}", limit.as_secs());
            // The SDKs repeat the request after this error, and the name must be free then.
            delete_item(context, &pool).await?;
            return Err(ApiError::new(
                StatusCode::GATEWAY_TIMEOUT,
                "Timeout",
                message,
            ));
        }
        sleep(POLL_INTERVAL).await;
        pool = item(context, CatalogKind::Pool, pool.id.as_str()).await?;
    }
}

/// `GET /pools`.
pub(super) async fn list(context: Context) -> Result<Response, ApiError> {
    let mut pools = Vec::new();
    for item in items(&context, CatalogKind::Pool).await? {
        pools.push(pool_view(&context, &item).await?);
    }
    Ok(json_response(StatusCode::OK, &json!({"pools": pools})))
}

/// `GET /pools/{name}`.
pub(super) async fn get(context: Context, Path(name): Path<String>) -> Result<Response, ApiError> {
    let pool = item(&context, CatalogKind::Pool, &name).await?;
    Ok(json_response(
        StatusCode::OK,
        &pool_view(&context, &pool).await?,
    ))
}

/// Changes of a pool.
#[derive(Debug, Deserialize)]
pub(super) struct UpdatePool {
    name: Option<String>,
    replicas: Option<u32>,
}

/// `PATCH /pools/{name}`.
pub(super) async fn update(
    context: Context,
    Path(name): Path<String>,
    Json(request): Json<UpdatePool>,
) -> Result<Response, ApiError> {
    let pool = item(&context, CatalogKind::Pool, &name).await?;
    let size = request.replicas.map(check_replicas).transpose()?;
    let resized = size.map(|size| {
        ItemChange::Pool(Box::new(PoolChange {
            size: Some(size),
            ..PoolChange::default()
        }))
    });
    let pool = change(&context, &pool, request.name, resized).await?;
    Ok(json_response(
        StatusCode::OK,
        &pool_view(&context, &pool).await?,
    ))
}

/// `DELETE /pools/{name}`.
pub(super) async fn delete(
    context: Context,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let pool = item(&context, CatalogKind::Pool, &name).await?;
    delete_item(&context, &pool).await
}
