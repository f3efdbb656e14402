//! Metrics and logs of boxes.

use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::get;
use box_protocol::actions::{BoxEvent, BoxEventsParams, BoxStatsParams, BoxStatsResult};
use box_protocol::{BoxInfo, BoxState, Invalid};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::sandboxes::find;
use crate::http::body::Params;
use crate::http::context::Context;
use crate::http::refusal::json_response;
use crate::http::stream::{Step, StreamedCall};

type Result<T = Response> = std::result::Result<T, ApiError>;

/// The levels of log entries, the least important first.
const LEVELS: [&str; 4] = ["debug", "info", "warn", "error"];

/// The rule of times in logs.
const MILLISECONDS: &str = "must be a number of milliseconds";

/// The maximum number of boxes that one request measures.
const MAX_BOXES: usize = 100;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/sandboxes/metrics", get(all_metrics))
        .route("/sandboxes/{id}/metrics", get(metrics))
        .route("/sandboxes/{id}/logs", get(logs))
        .route("/v2/sandboxes/{id}/logs", get(entries))
}

/// Answers with one sample, taken now: the server keeps no history.
async fn metrics(context: Context, Path(id): Path<String>, params: Params) -> Result {
    let info = find(&context, &id).await?;
    let now = box_protocol::UnixMs::now().0 / 1000;
    let rule = "must be a Unix time in seconds";
    let start: Option<u64> = params.parsed("start", rule)?;
    let end: Option<u64> = params.parsed("end", rule)?;
    let is_now = start.is_none_or(|start| start <= now)
        && end.is_none_or(|end| end.saturating_add(5) >= now);
    let sample = sample(&context, &info).await?.filter(|_| is_now);
    let samples = sample.into_iter().collect();
    Ok(json_response(StatusCode::OK, &Value::Array(samples)))
}

async fn all_metrics(context: Context, params: Params) -> Result {
    let ids: Vec<&str> = params
        .all("sandbox_ids")
        .flat_map(|ids| ids.split(','))
        .filter(|id| !id.is_empty())
        .collect();
    if ids.len() > MAX_BOXES {
        let rule = format!("must have at most {MAX_BOXES} ids");
        return Err(Invalid::new("sandbox_ids", rule).into());
    }
    let mut samples = Map::new();
    for id in ids {
        // A box that has ended meanwhile has no sample.
        if let Ok(info) = find(&context, id).await
            && let Some(sample) = sample(&context, &info).await?
        {
            samples.insert(id.to_owned(), sample);
        }
    }
    let body = json!({"sandboxes": samples});
    Ok(json_response(StatusCode::OK, &body))
}

async fn sample(context: &Context, info: &BoxInfo) -> Result<Option<Value>> {
    if info.state != BoxState::Running {
        return Ok(None);
    }
    let params = BoxStatsParams {
        box_id: info.box_id.clone(),
        every_ms: None,
    };
    let stats = context
        .runtime()
        .stats(&context.caller, params, None)
        .await?;
    Ok(Some(described(info, &stats)))
}

fn described(info: &BoxInfo, stats: &BoxStatsResult) -> Value {
    const MEBIBYTE: u64 = 1024 * 1024;
    let cpus = stats.cpus.unwrap_or(info.cpus);
    let used = stats.cpu_percent.unwrap_or_default() / cpus.max(0.01);
    let limit = stats
        .memory_limit_bytes
        .unwrap_or(info.memory_mb * MEBIBYTE);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a small number of CPUs"
    )]
    let count = cpus.ceil().max(1.0) as u64;
    json!({
        "timestamp": stats.at.to_string(),
        "timestampUnix": stats.at.0 / 1000,
        "cpuCount": count,
        "cpuUsedPct": used,
        "memUsed": stats.memory_bytes.unwrap_or_default(),
        "memTotal": limit,
        "memCache": stats.memory_cache_bytes.unwrap_or_default(),
        "diskUsed": stats.disk_bytes.or(stats.private_bytes).unwrap_or_default(),
        "diskTotal": stats.disk_limit_bytes.or(stats.private_limit_bytes).unwrap_or_default(),
    })
}

/// Returns the events of a box, oldest first.
async fn events(context: &Context, id: &str) -> Result<Vec<BoxEvent>> {
    let info = find(context, id).await?;
    let params = BoxEventsParams {
        box_id: Some(info.box_id),
        ..BoxEventsParams::default()
    };
    let held = context.clone();
    let mut call = StreamedCall::new(move |chunks| async move {
        let events = held.runtime().events(&held.caller, params, Some(chunks));
        events.await
    });
    let mut events = Vec::new();
    loop {
        match call.next().await {
            Step::Chunk(event) => events.push(event),
            Step::Idle => {}
            Step::End(ended) => {
                ended?;
                return Ok(events);
            }
        }
    }
}

fn text(event: &BoxEvent) -> String {
    if event.message.is_empty() {
        return event.kind.clone();
    }
    format!("{}: {}", event.kind, event.message)
}

async fn logs(context: Context, Path(id): Path<String>, params: Params) -> Result {
    let mut events = events(&context, &id).await?;
    let start: Option<u64> = params.parsed("start", MILLISECONDS)?;
    events.retain(|event| start.is_none_or(|start| event.at.0 >= start));
    events.truncate(limit(&params)?);
    let lines: Vec<Value> = events
        .iter()
        .map(|event| json!({"timestamp": event.at.to_string(), "line": text(event)}))
        .collect();
    let body = json!({"logs": lines, "logEntries": logged(&events)});
    Ok(json_response(StatusCode::OK, &body))
}

async fn entries(context: Context, Path(id): Path<String>, params: Params) -> Result {
    let mut events = events(&context, &id).await?;
    let cursor: Option<u64> = params.parsed("cursor", MILLISECONDS)?;
    match params.get("direction") {
        None | Some("forward") => {
            events.retain(|event| cursor.is_none_or(|cursor| event.at.0 >= cursor));
        }
        Some("backward") => {
            events.reverse();
            events.retain(|event| cursor.is_none_or(|cursor| event.at.0 <= cursor));
        }
        Some(_) => return Err(Invalid::new("direction", "must be forward or backward").into()),
    }
    if let Some(level) = params.get("level") {
        let least = LEVELS.iter().position(|known| *known == level);
        let least = least.ok_or_else(|| {
            Invalid::new("level", format!("must be one of {}", LEVELS.join(", ")))
        })?;
        events.retain(|event| LEVELS[least..].contains(&level_of(event)));
    }
    if let Some(search) = params.get("search") {
        events.retain(|event| text(event).contains(search));
    }
    events.truncate(limit(&params)?);
    let body = json!({"logs": logged(&events)});
    Ok(json_response(StatusCode::OK, &body))
}

fn limit(params: &Params) -> std::result::Result<usize, Invalid> {
    let limit: Option<usize> = params.parsed("limit", "must be a number")?;
    Ok(limit.unwrap_or(1000))
}

fn level_of(event: &BoxEvent) -> &'static str {
    match event.kind.as_str() {
        "failed" | "oom" | "unreachable" | "unstopped" => "error",
        "degraded" | "timeout" => "warn",
        _ => "info",
    }
}

fn logged(events: &[BoxEvent]) -> Vec<Value> {
    let entry = |event: &BoxEvent| {
        let at = event.at.to_string();
        json!({"timestamp": at, "message": text(event), "level": level_of(event), "fields": {}})
    };
    events.iter().map(entry).collect()
}
