//! Watched directories: as streams, and as watchers that a client polls.
//!
//! A watcher is a command in its box, so it survives this server. The place in its log up to which a client has read is
//! here; after a restart the client gets the changes again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::extract::Request;
use axum::http::HeaderMap;
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use box_protocol::actions::{
    AttachOptions, ChangeKind, CommandAttachParams, CommandChunk, CommandKillParams, FileChange,
    FileKind, FileWatchParams, ReadFrom, ReadWhy, Until, View,
};
use box_protocol::{BoxId, Code, CommandId, PerStream};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::connect;
use super::entries::{absolute, name_of, one_entry, stat};
use super::error::EnvdError;
use crate::http::body::Json;
use crate::http::context::{Context, InBox};
use crate::http::lines::LineCutter;
use crate::http::stream::{Step, StreamedCall};

type Result<T = Response> = std::result::Result<T, EnvdError>;

/// The maximum length of a line in the log of a watch: a path twice, escaped.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// The maximum number of polled watchers whose place is known. The one that was asked last longest ago is forgotten.
const MAX_WATCHERS: usize = 10_000;

/// The maximum time of a poll. Changes that the kernel has just seen arrive meanwhile.
const POLL_MS: u64 = 500;

/// The time without a change after which a poll ends.
const SILENCE_MS: u64 = 40;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/filesystem.Filesystem/WatchDir", post(watch_dir))
        .route("/filesystem.Filesystem/CreateWatcher", post(create_watcher))
        .route("/filesystem.Filesystem/GetWatcherEvents", post(events))
        .route("/filesystem.Filesystem/RemoveWatcher", post(remove_watcher))
        .layer(Extension(Arc::new(Watchers::default())))
}

/// The places up to which clients have read their watchers.
#[derive(Debug, Default)]
struct Watchers(Mutex<HashMap<WatcherKey, (Instant, PerStream)>>);

/// A watcher: the unique id of its box, and its command. Other boxes may have the same names.
type WatcherKey = (String, CommandId);

impl Watchers {
    fn get(&self, key: &WatcherKey) -> PerStream {
        let places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        places.get(key).map(|(_, place)| *place).unwrap_or_default()
    }

    fn set(&self, key: WatcherKey, place: Option<PerStream>) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = place else {
            places.remove(&key);
            return;
        };
        if places.len() >= MAX_WATCHERS && !places.contains_key(&key) {
            // Clients do not say when they stop to ask.
            let oldest = places.iter().min_by_key(|(_, (at, _))| *at);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                places.remove(&oldest);
            }
        }
        places.insert(key, (Instant::now(), place));
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Watch {
    path: String,
    #[serde(default)]
    recursive: bool,
    #[serde(default)]
    include_entry: bool,
}

/// A watched directory, and what its events have.
#[derive(Debug, Clone)]
struct Watched {
    context: Context,
    box_id: BoxId,
    user: Option<String>,
    path: String,
    with_entry: bool,
}

impl Watched {
    /// Checks that the path is a directory.
    async fn of(
        context: Context,
        box_id: BoxId,
        headers: &HeaderMap,
        request: &Watch,
    ) -> Result<Self> {
        let user = connect::user(headers);
        let path = absolute(&request.path, user.as_deref());
        let directory = stat(&context, &box_id, user.as_deref(), &path, true).await?;
        if directory.kind != FileKind::Directory {
            return Err(EnvdError::invalid(format!(
                "path is not a directory: {path}"
            )));
        }
        Ok(Self {
            context,
            box_id,
            user,
            path,
            with_entry: request.include_entry,
        })
    }

    fn params(&self, recursive: bool) -> FileWatchParams {
        FileWatchParams {
            user: self.user.clone(),
            recursive,
            ..FileWatchParams::new(self.box_id.clone(), self.path.clone())
        }
    }

    /// Returns the events of a change.
    async fn events(&self, change: &FileChange) -> Vec<Value> {
        let mut events = Vec::new();
        // A file that is written before it gets its name.
        let is_unnamed = change.kind == ChangeKind::Changed && is_unnamed(&change.path);
        if is_unnamed && !self.exists(&change.path).await {
            return events;
        }
        for (kind, path) in kinds(change) {
            events.push(self.event(kind, path).await);
        }
        events
    }

    async fn exists(&self, path: &str) -> bool {
        let user = self.user.as_deref();
        let found = stat(&self.context, &self.box_id, user, path, false);
        found.await.is_ok()
    }

    async fn event(&self, kind: &str, path: &str) -> Value {
        let name = path.strip_prefix(&self.path).unwrap_or(path);
        let mut event = json!({"name": name.trim_start_matches('/'), "type": kind});
        // The path of others may already be that of another file.
        let has_entry = matches!(kind, CREATE | CHMOD | WRITE);
        if self.with_entry && has_entry {
            let user = self.user.as_deref();
            let file = stat(&self.context, &self.box_id, user, path, false).await;
            if let Ok(file) = file
                && let Ok(entry) = one_entry(&self.context, &self.box_id, user, file).await
            {
                event["entry"] = entry;
            }
        }
        event
    }
}

/// The types of events.
const CREATE: &str = "EVENT_TYPE_CREATE";
const WRITE: &str = "EVENT_TYPE_WRITE";
const REMOVE: &str = "EVENT_TYPE_REMOVE";
const RENAME: &str = "EVENT_TYPE_RENAME";
const CHMOD: &str = "EVENT_TYPE_CHMOD";

/// Returns the types of a change, each with its path, in the order in which a file is made.
fn kinds(change: &FileChange) -> Vec<(&'static str, &str)> {
    let path = change.path.as_str();
    let mut kinds = Vec::new();
    match change.kind {
        ChangeKind::Created => kinds.push((CREATE, path)),
        ChangeKind::Removed => kinds.push((REMOVE, path)),
        ChangeKind::Moved => {
            kinds.extend(change.from.as_deref().map(|from| (RENAME, from)));
            kinds.push((CREATE, path));
        }
        // The callers have refused an overflow.
        ChangeKind::Changed | ChangeKind::Overflow => {}
    }
    if change.attributes {
        kinds.push((CHMOD, path));
    }
    // The agent of an older box does not say what changed.
    let is_changed = change.kind == ChangeKind::Changed && !change.attributes;
    if change.content || is_changed {
        kinds.push((WRITE, path));
    }
    kinds
}

async fn watch_dir(context: Context, InBox(box_id): InBox, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let begun = async {
        let request: Watch = connect::request(&parts, body).await?;
        let watched = Watched::of(context, box_id, &parts.headers, &request).await?;
        let mut params = watched.params(request.recursive);
        params.attach = Some(AttachOptions {
            view: View::Text,
            until: Until {
                ms: connect::timeout_ms(&parts.headers)?,
                ..Until::default()
            },
        });
        let call = StreamedCall::new(move |events| translate(watched, params, events));
        Ok(call.begun().await?)
    };
    let call: StreamedCall<Value, End> = match begun.await {
        Ok(call) => call,
        Err(error) => return connect::failed(error),
    };
    let keepalive = connect::keepalive(&parts.headers);
    let body = call.into_body(Some(keepalive), |step| match step {
        Step::Chunk(event) => connect::message(event.to_string().as_bytes()),
        Step::Idle => connect::message(br#"{"keepalive":{}}"#),
        Step::End(Ok(End::Ended)) => connect::end(None),
        Step::End(Ok(End::Lost)) => connect::end(Some(&lost())),
        Step::End(Ok(End::Late)) => {
            let late = EnvdError::new("deadline_exceeded", "context deadline exceeded");
            connect::end(Some(&late))
        }
        Step::End(Err(error)) => connect::end(Some(&error.into())),
    });
    connect::stream(body)
}

/// How a watch ended.
#[derive(Debug, Clone, Copy)]
enum End {
    Ended,
    /// By the deadline of its call.
    Late,
    /// Changes were lost.
    Lost,
}

/// A client that gets this lists the directory again.
fn lost() -> EnvdError {
    let message = "changes were lost: too many at once; list the directory and watch it again";
    EnvdError::new("data_loss", message)
}

fn is_lost(change: &FileChange) -> bool {
    change.kind == ChangeKind::Overflow
}

/// Watches files and sends their changes as events until changes are lost.
async fn translate(
    watched: Watched,
    params: FileWatchParams,
    events: mpsc::Sender<Value>,
) -> std::result::Result<End, box_protocol::BoxError> {
    let context = watched.context.clone();
    let mut call = StreamedCall::new(move |chunks| async move {
        let runtime = context.runtime();
        runtime
            .watch_files(&context.caller, params, Some(chunks))
            .await
    });
    let mut lines = LineCutter::new(MAX_LINE_BYTES);
    loop {
        match call.next().await {
            Step::Chunk(CommandChunk::Started(_)) => {
                let _ = events.send(json!({"start": {}})).await;
            }
            Step::Chunk(CommandChunk::Text(piece)) => {
                for change in changes(&mut lines, &piece.data) {
                    if is_lost(&change) {
                        return Ok(End::Lost);
                    }
                    for event in watched.events(&change).await {
                        // A client that has left drops this call.
                        let _ = events.send(json!({"filesystem": event})).await;
                    }
                }
            }
            Step::Chunk(CommandChunk::Gap(_)) => return Ok(End::Lost),
            Step::Chunk(_) | Step::Idle => {}
            Step::End(ended) => {
                let why = ended?.read.map(|read| read.why);
                return Ok(match why {
                    Some(ReadWhy::Time) => End::Late,
                    _ => End::Ended,
                });
            }
        }
    }
}

/// Returns whether the kernel may have made up the name of a file, as `#23`.
fn is_unnamed(path: &str) -> bool {
    let number = name_of(path).strip_prefix('#');
    number.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Parses the lines of a watch.
fn changes(lines: &mut LineCutter, text: &str) -> Vec<FileChange> {
    let mut changes = Vec::new();
    lines.push(text, |line| changes.extend(serde_json::from_str(line)));
    changes
}

async fn create_watcher(
    context: Context,
    InBox(box_id): InBox,
    headers: HeaderMap,
    Json(request): Json<Watch>,
) -> Result {
    let watched = Watched::of(context, box_id, &headers, &request).await?;
    // The id has what later requests do not say.
    let mark = if request.include_entry { "e" } else { "n" };
    let id = format!("watch-{mark}-{}", CommandId::fresh());
    let mut params = watched.params(request.recursive);
    params.command_id = Some(CommandId::new(&id)?);
    let runtime = watched.context.runtime();
    runtime
        .watch_files(&watched.context.caller, params, None)
        .await?;
    Ok(connect::unary(&json!({"watcherId": id})))
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WatcherId {
    watcher_id: String,
}

impl WatcherId {
    fn command(&self) -> Result<CommandId> {
        let is_ours = self.watcher_id.starts_with("watch-");
        let id = CommandId::new(&self.watcher_id).ok().filter(|_| is_ours);
        id.ok_or_else(|| self.missing())
    }

    fn missing(&self) -> EnvdError {
        EnvdError::not_found(format!("watcher with id {} not found", self.watcher_id))
    }
}

async fn events(
    context: Context,
    InBox(box_id): InBox,
    headers: HeaderMap,
    Extension(watchers): Extension<Arc<Watchers>>,
    Json(request): Json<WatcherId>,
) -> Result {
    let id = request.command()?;
    let key = (context.get(&box_id).await?.unique_id, id.clone());
    let params = CommandAttachParams {
        from: ReadFrom::Offsets(watchers.get(&key)),
        until: Until {
            ms: Some(POLL_MS),
            silence_ms: Some(SILENCE_MS),
            ..Until::default()
        },
        ..CommandAttachParams::new(box_id.clone(), id)
    };
    let held = context.clone();
    let mut call = StreamedCall::new(move |chunks| async move {
        let attached = held.runtime().attach_command(&held.caller, params, chunks);
        attached.await
    });
    let mut lines = LineCutter::new(MAX_LINE_BYTES);
    let (mut read, mut has_gap) = (Vec::new(), false);
    let ended = loop {
        match call.next().await {
            Step::Chunk(CommandChunk::Text(piece)) => read.extend(changes(&mut lines, &piece.data)),
            Step::Chunk(CommandChunk::Gap(_)) => has_gap = true,
            Step::Chunk(_) | Step::Idle => {}
            Step::End(ended) => break ended,
        }
    };
    let ended = match ended {
        Err(error) if error.code() == Code::NotFound => {
            let error = EnvdError::from(error);
            return Err(if error.is_gone() {
                error
            } else {
                request.missing()
            });
        }
        ended => ended?,
    };
    // A change whose line is incomplete comes with the next request.
    let rest = lines.finish().map_or(0, |rest| rest.len() as u64);
    let mut place = ended.read.next;
    place.stdout = place.stdout.saturating_sub(rest);
    if has_gap || read.iter().any(is_lost) {
        watchers.set(key, Some(place));
        return Err(lost());
    }
    let words = match &ended.info.program {
        box_protocol::Program::Argv { 0: words, .. } => words.clone(),
        box_protocol::Program::Text { .. } => Vec::new(),
    };
    let watched = Watched {
        context,
        box_id,
        user: connect::user(&headers),
        path: words.into_iter().nth(1).unwrap_or_default(),
        with_entry: request.watcher_id.starts_with("watch-e-"),
    };
    let mut events = Vec::new();
    for change in &read {
        events.extend(watched.events(change).await);
    }
    // A client that leaves before gets these changes with its next request.
    watchers.set(key, Some(place));
    Ok(connect::unary(&json!({"events": events})))
}

async fn remove_watcher(
    context: Context,
    InBox(box_id): InBox,
    Extension(watchers): Extension<Arc<Watchers>>,
    Json(request): Json<WatcherId>,
) -> Result {
    let id = request.command()?;
    let key = (context.get(&box_id).await?.unique_id, id.clone());
    let params = CommandKillParams {
        forget: true,
        ..CommandKillParams::new(box_id, id)
    };
    let killed = context.runtime().kill_command(&context.caller, params);
    match killed.await {
        Err(error) if error.code() == Code::NotFound => {
            let error = EnvdError::from(error);
            Err(if error.is_gone() {
                error
            } else {
                request.missing()
            })
        }
        killed => {
            killed?;
            watchers.set(key, None);
            Ok(connect::unary(&json!({})))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_has_the_events_of_its_parts() {
        let events = |line: &str| {
            let change: FileChange = serde_json::from_str(line).unwrap();
            let kinds = kinds(&change).into_iter();
            let words = kinds
                .map(|(kind, path)| format!("{} {path}", kind.trim_start_matches("EVENT_TYPE_")));
            words.collect::<Vec<_>>().join(", ")
        };
        for (line, expected) in [
            (r#"{"kind":"created","path":"/f","at":1}"#, "CREATE /f"),
            (
                r#"{"kind":"created","path":"/f","content":true,"attributes":true,"at":1}"#,
                "CREATE /f, CHMOD /f, WRITE /f",
            ),
            (
                r#"{"kind":"changed","path":"/f","content":true,"at":1}"#,
                "WRITE /f",
            ),
            (
                r#"{"kind":"changed","path":"/f","attributes":true,"at":1}"#,
                "CHMOD /f",
            ),
            (r#"{"kind":"changed","path":"/f","at":1}"#, "WRITE /f"),
            (r#"{"kind":"removed","path":"/f","at":1}"#, "REMOVE /f"),
            (
                r#"{"kind":"moved","path":"/f","from":"/e","at":1}"#,
                "RENAME /e, CREATE /f",
            ),
        ] {
            assert_eq!(events(line), expected, "{line}");
        }
    }

    #[test]
    fn the_number_of_known_places_is_limited() {
        let watchers = Watchers::default();
        let place = |stdout| PerStream {
            stdout,
            ..PerStream::default()
        };
        let key = |name: &str, number: usize| {
            let id = CommandId::new(format!("watch-n-{number}")).unwrap();
            (name.to_owned(), id)
        };
        let id = |number| key("one", number);
        for number in 0..=MAX_WATCHERS {
            watchers.set(id(number), Some(place(7)));
        }
        assert_eq!(watchers.0.lock().unwrap().len(), MAX_WATCHERS);
        assert_eq!(watchers.get(&id(0)), place(0), "the oldest is forgotten");
        assert_eq!(watchers.get(&id(MAX_WATCHERS)), place(7));
        let other = key("other", MAX_WATCHERS);
        assert_eq!(watchers.get(&other), place(0), "of another box");
        watchers.set(other, None);
        assert_eq!(watchers.get(&id(MAX_WATCHERS)), place(7));
        watchers.set(id(MAX_WATCHERS), None);
        assert_eq!(watchers.get(&id(MAX_WATCHERS)), place(0));
    }
}
