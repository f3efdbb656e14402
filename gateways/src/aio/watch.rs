//! `/v1/file/watch`: changes of files. A cursor is an offset in the log of the watch.

use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use box_protocol::actions::{
    AttachOptions, ChangeKind, CommandAttachParams, CommandAttachResult, CommandChunk, CommandKey,
    CommandKillParams, CommandListParams, FileChange, FileWatchParams, ReadFrom, Until,
};
use box_protocol::{BoxId, CommandId, CommandInfo, PerStream, Program, Role};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use super::envelope::Failure;
use super::file::checked;
use super::path::Path;
use super::watch_filter::{Filter, PREFIX, Patterns};
use crate::http::body::{Json, OptionalJson};
use crate::http::context::{Context, InBox};
use crate::http::framing::{SSE_KEEPALIVE, sse};
use crate::http::refusal::json_response;
use crate::http::stream::{Step, StreamedCall};

/// The changes in an answer, unless a request says so.
const POLL_LIMIT: usize = 1000;

/// How long a request for one change waits, unless it says so.
const WAIT_SECONDS: u64 = 30;

/// The maximum length of changes in an answer.
const MAX_POLL_BYTES: u64 = 4 * 1024 * 1024;

/// The interval of keepalives in an event stream.
const KEEPALIVE: Duration = Duration::from_secs(15);

fn event(change: &FileChange) -> Value {
    json!({
        "type": word(change.kind),
        "path": change.path,
        "old_path": change.from,
        "timestamp": change.at.to_string(),
    })
}

fn word(kind: ChangeKind) -> &'static str {
    match kind {
        ChangeKind::Created => "create",
        ChangeKind::Changed => "write",
        ChangeKind::Removed => "remove",
        ChangeKind::Moved => "rename",
        ChangeKind::Overflow => "overflow",
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct CreateRequest {
    path: String,
    recursive: Option<bool>,
    exclude: Option<Vec<String>>,
    include_patterns: Option<Vec<String>>,
}

/// Starts a watch.
pub(super) async fn create(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<CreateRequest>,
) -> Result<Response, Failure> {
    let path = checked("path", &request.path)?;
    let filter = Filter {
        include: request.include_patterns.unwrap_or_default(),
        exclude: request.exclude.unwrap_or_default(),
    };
    filter.compile()?;
    let params = FileWatchParams {
        recursive: request.recursive.unwrap_or(true),
        command_id: Some(filter.id()?),
        ..FileWatchParams::new(box_id, path)
    };
    let runtime = context.runtime();
    let started = runtime.watch_files(&context.caller, params, None).await?;
    Ok(answer(&described(&started.info)))
}

fn described(info: &CommandInfo) -> Value {
    let path = match &info.program {
        Program::Argv { 0: argv, .. } => argv.get(1).cloned(),
        Program::Text { .. } => None,
    };
    json!({
        "watcher_id": info.command_id,
        "path": path,
        "status": if info.exit.is_none() { "active" } else { "stopped" },
        "created_at": info.created_at.to_string(),
        "cursor": info.size.stdout,
    })
}

/// Lists the watches.
pub(super) async fn list(context: Context, InBox(box_id): InBox) -> Result<Response, Failure> {
    let params = CommandListParams {
        role: Some(Role::Watch),
        running: Some(true),
        ..CommandListParams::new(box_id)
    };
    let found = context
        .runtime()
        .list_commands(&context.caller, params)
        .await?;
    let is_ours = |info: &&CommandInfo| info.command_id.as_str().starts_with(PREFIX);
    let watchers: Vec<Value> = found.items.iter().filter(is_ours).map(described).collect();
    let count = watchers.len();
    Ok(answer(&json!({"watchers": watchers, "count": count})))
}

/// A watch in the path.
#[derive(Debug, Deserialize)]
pub(super) struct WatcherPath {
    watcher: String,
}

/// Returns a watch by its id.
async fn find(context: &Context, box_id: &BoxId, id: &str) -> Result<CommandInfo, Failure> {
    let unknown = || Failure::new(StatusCode::NOT_FOUND, "Watcher not found");
    let is_ours = id.starts_with(PREFIX);
    let command_id = CommandId::new(id).ok().filter(|_| is_ours);
    let key = CommandKey {
        box_id: box_id.clone(),
        command_id: command_id.ok_or_else(unknown)?,
    };
    let found = context.runtime().get_command(&context.caller, key).await;
    found.map_err(|_| unknown())
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct PollRequest {
    since: Option<u64>,
    limit: Option<usize>,
    timeout: Option<u64>,
}

/// Returns the changes after a cursor. A request with a timeout waits for the first one.
pub(super) async fn poll(
    context: Context,
    InBox(box_id): InBox,
    Path(path): Path<WatcherPath>,
    OptionalJson(request): OptionalJson<PollRequest>,
) -> Result<Response, Failure> {
    let info = find(&context, &box_id, &path.watcher).await?;
    let patterns = Filter::of(&info.command_id).compile()?;
    let wait_ms = request.timeout.unwrap_or_default().saturating_mul(1000);
    let deadline = tokio::time::Instant::now() + Duration::from_millis(wait_ms.min(3_600_000));
    let limit = request.limit.unwrap_or(POLL_LIMIT).max(1);
    let mut cursor = request.since.unwrap_or_default();
    let mut polled = Polled::default();
    loop {
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        if !left.is_zero() {
            let wait = Until {
                ms: u64::try_from(left.as_millis()).ok(),
                silence_ms: None,
                bytes: Some(1),
            };
            lines(&context, &box_id, &info.command_id, cursor, wait).await?;
        }
        let now = Until {
            ms: Some(0),
            silence_ms: None,
            bytes: Some(MAX_POLL_BYTES),
        };
        let read = lines(&context, &box_id, &info.command_id, cursor, now).await?;
        cursor = polled.take(&read, &patterns, limit);
        if !polled.events.is_empty() || polled.overflow || left.is_zero() || polled.is_over {
            break;
        }
    }
    Ok(answer(&json!({
        "watcher_id": path.watcher,
        "events": polled.events,
        "cursor": cursor,
        "overflow": polled.overflow,
    })))
}

/// What a poll has found.
#[derive(Debug, Default)]
struct Polled {
    events: Vec<Value>,
    overflow: bool,
    is_over: bool,
}

impl Polled {
    /// Adds the changes of whole lines, and returns the cursor after them.
    fn take(&mut self, read: &Lines, patterns: &Patterns, limit: usize) -> u64 {
        self.overflow |= read.has_gap;
        self.is_over = read.is_over;
        let mut cursor = read.start;
        for line in read.text.split_inclusive('\n') {
            if !line.ends_with('\n') || self.events.len() >= limit {
                break;
            }
            cursor += line.len() as u64;
            let Ok(change) = serde_json::from_str::<FileChange>(line) else {
                continue;
            };
            if change.kind == ChangeKind::Overflow {
                self.overflow = true;
            } else if patterns.pass(&change.path) {
                self.events.push(event(&change));
            }
        }
        cursor
    }
}

/// A part of the log of a watch.
#[derive(Debug)]
struct Lines {
    text: String,
    /// The offset of the first byte.
    start: u64,
    has_gap: bool,
    /// Whether the watch has ended.
    is_over: bool,
}

async fn lines(
    context: &Context,
    box_id: &BoxId,
    command_id: &CommandId,
    from: u64,
    until: Until,
) -> Result<Lines, Failure> {
    let mut call = attached(context, box_id, command_id, from, until);
    let mut read = Lines {
        text: String::new(),
        start: from,
        has_gap: false,
        is_over: false,
    };
    loop {
        match call.next().await {
            Step::Chunk(CommandChunk::Text(piece)) => {
                if read.text.is_empty() {
                    read.start = piece.offset;
                }
                read.text.push_str(&piece.data);
            }
            Step::Chunk(CommandChunk::Gap(_)) => {
                // What precedes the gap is no whole line.
                read.has_gap = true;
                read.text.clear();
            }
            Step::Chunk(_) | Step::Idle => {}
            Step::End(ended) => {
                read.is_over = ended?.info.exit.is_some();
                return Ok(read);
            }
        }
    }
}

fn attached(
    context: &Context,
    box_id: &BoxId,
    command_id: &CommandId,
    from: u64,
    until: Until,
) -> StreamedCall<CommandChunk, CommandAttachResult> {
    let params = CommandAttachParams {
        from: ReadFrom::Offsets(PerStream {
            stdout: from,
            stderr: 0,
        }),
        until,
        ..CommandAttachParams::new(box_id.clone(), command_id.clone())
    };
    let context = context.clone();
    StreamedCall::new(|chunks| async move {
        let runtime = context.runtime();
        runtime
            .attach_command(&context.caller, params, chunks)
            .await
    })
}

/// Streams the changes from now on.
pub(super) async fn events(
    context: Context,
    InBox(box_id): InBox,
    Path(path): Path<WatcherPath>,
) -> Result<Response, Failure> {
    let info = find(&context, &box_id, &path.watcher).await?;
    let patterns = Filter::of(&info.command_id).compile()?;
    let from = info.size.stdout;
    let call = attached(&context, &box_id, &info.command_id, from, Until::default());
    let mut rest = String::new();
    let body = call.into_body(Some(KEEPALIVE), move |step| match step {
        Step::Chunk(CommandChunk::Text(piece)) => {
            rest.push_str(&piece.data);
            let mut frames = Vec::new();
            while let Some(end) = rest.find('\n') {
                let line: String = rest.drain(..=end).collect();
                let Ok(change) = serde_json::from_str::<FileChange>(&line) else {
                    continue;
                };
                if change.kind == ChangeKind::Overflow || patterns.pass(&change.path) {
                    let data = event(&change).to_string();
                    frames.extend_from_slice(&sse(Some(word(change.kind)), None, &data));
                }
            }
            frames.into()
        }
        Step::Chunk(CommandChunk::Gap(_)) => {
            rest.clear();
            sse(Some("overflow"), None, "{}")
        }
        Step::Chunk(_) => Bytes::new(),
        Step::Idle => SSE_KEEPALIVE,
        Step::End(_) => sse(Some("end"), None, "{}"),
    });
    Ok(([(CONTENT_TYPE, "text/event-stream")], body).into_response())
}

#[derive(Debug, Deserialize)]
pub(super) struct WaitRequest {
    path: String,
    timeout: Option<u64>,
    event_types: Option<Vec<String>>,
}

/// Waits for one change of one file, which need not exist yet.
pub(super) async fn wait(
    context: Context,
    InBox(box_id): InBox,
    Json(request): Json<WaitRequest>,
) -> Result<Response, Failure> {
    let path = checked("path", &request.path)?;
    let (parent, _) = path
        .trim_end_matches('/')
        .rsplit_once('/')
        .unwrap_or_default();
    let parent = if parent.is_empty() { "/" } else { parent };
    let seconds = request.timeout.unwrap_or(WAIT_SECONDS);
    let params = FileWatchParams {
        attach: Some(AttachOptions {
            until: Until {
                ms: Some(seconds.saturating_mul(1000)),
                ..Until::default()
            },
            ..AttachOptions::default()
        }),
        ..FileWatchParams::new(box_id, parent)
    };
    let of_call = context.clone();
    // Dropping the call ends the watch.
    let mut call = StreamedCall::new(|chunks| async move {
        let runtime = of_call.runtime();
        runtime
            .watch_files(&of_call.caller, params, Some(chunks))
            .await
    });
    let is_wanted = |change: &FileChange| {
        let types = request.event_types.as_ref();
        let is_type = types.is_none_or(|types| types.iter().any(|kind| kind == word(change.kind)));
        change.path == path && is_type
    };
    let mut rest = String::new();
    loop {
        match call.next().await {
            Step::Chunk(CommandChunk::Text(piece)) => {
                rest.push_str(&piece.data);
                while let Some(end) = rest.find('\n') {
                    let line: String = rest.drain(..=end).collect();
                    let change = serde_json::from_str::<FileChange>(&line);
                    if let Some(change) = change.ok().filter(&is_wanted) {
                        let event = event(&change);
                        return Ok(answer(&json!({"triggered": true, "event": event})));
                    }
                }
            }
            Step::Chunk(_) | Step::Idle => {}
            Step::End(ended) => {
                ended?;
                return Ok(answer(&json!({"triggered": false, "event": null})));
            }
        }
    }
}

/// Ends a watch.
pub(super) async fn stop(
    context: Context,
    InBox(box_id): InBox,
    Path(path): Path<WatcherPath>,
) -> Result<Response, Failure> {
    let info = find(&context, &box_id, &path.watcher).await?;
    let params = CommandKillParams {
        forget: true,
        ..CommandKillParams::new(box_id, info.command_id)
    };
    context
        .runtime()
        .kill_command(&context.caller, params)
        .await?;
    Ok(answer(
        &json!({"success": true, "watcher_id": path.watcher}),
    ))
}

/// Answers without the envelope, which watches do not have.
fn answer(body: &Value) -> Response {
    json_response(StatusCode::OK, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_stays_at_the_start_of_an_unfinished_line() {
        let patterns = Filter::default().compile().unwrap();
        let line = r#"{"kind":"created","path":"/w/a","at":1}"#;
        let read = Lines {
            text: format!("{line}\n{line}\n{{\"kind\""),
            start: 100,
            has_gap: false,
            is_over: false,
        };
        let mut polled = Polled::default();
        let cursor = polled.take(&read, &patterns, 9);
        assert_eq!(cursor, 100 + 2 * (line.len() as u64 + 1));
        assert_eq!(polled.events.len(), 2);
        assert_eq!(polled.events[0]["type"], "create");
    }
}
