//! Resource usage of a sandbox, and reports of clients.

use axum::http::StatusCode;
use axum::response::Response;
use box_protocol::actions::{BoxStatsParams, BoxStatsResult};
use serde_json::{Value, json};

use super::error::Error;
use super::events::stream_response;
use crate::http::context::{Context, InBox};
use crate::http::framing::ndjson;
use crate::http::refusal::json_response;
use crate::http::stream::{Step, StreamedCall};

/// The interval between two lines of a watch.
const EVERY_MS: u64 = 1000;

pub(super) async fn get(context: Context, InBox(box_id): InBox) -> Result<Response, Error> {
    let params = BoxStatsParams {
        box_id,
        every_ms: None,
    };
    let stats = context
        .runtime()
        .stats(&context.caller, params, None)
        .await?;
    Ok(json_response(StatusCode::OK, &metrics(&stats)))
}

fn metrics(stats: &BoxStatsResult) -> Value {
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    let mib = |bytes: Option<u64>| bytes.unwrap_or(0) as f64 / 1_048_576.0;
    json!({
        "cpu_count": stats.cpus.unwrap_or(0.0),
        "cpu_used_pct": stats.cpu_percent.unwrap_or(0.0),
        "mem_total_mib": mib(stats.memory_limit_bytes),
        "mem_used_mib": mib(stats.memory_bytes),
        "timestamp": stats.at.0,
    })
}

/// Sends a line each second.
pub(super) async fn watch(context: Context, InBox(box_id): InBox) -> Result<Response, Error> {
    let params = BoxStatsParams {
        box_id,
        every_ms: Some(EVERY_MS),
    };
    let call = StreamedCall::new(|chunks| async move {
        let runtime = context.runtime();
        runtime.stats(&context.caller, params, Some(chunks)).await
    });
    let call = call.begun().await?;
    let body = call.into_body(None, |step| match step {
        Step::Chunk(stats) => ndjson(&metrics(&stats)),
        Step::Idle | Step::End(_) => "".into(),
    });
    Ok(stream_response(body))
}

/// Accepts a report of a client about the time of a creation. The server measures its own.
pub(super) async fn event() -> StatusCode {
    StatusCode::NO_CONTENT
}
