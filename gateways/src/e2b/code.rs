//! The code interpreter: contexts that keep their state, and code that runs in them.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Path;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{delete, post};
use box_protocol::actions::{
    AttachOptions, CommandChunk, CommandStartResult, Language, ShellCreateParams,
    ShellDeleteParams, ShellInfo, ShellListParams, ShellRunParams, StreamName, Until, View,
};
use box_protocol::{BoxError, BoxId, CommandInfo, ExitWhy, ShellId, UnixMs};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::GATEWAY;
use super::body::{Broken, breakable};
use super::entries::absolute;
use super::error::{EnvdError, PlainError};
use super::result::Shown;
use super::spec::{HOME, env};
use crate::http::body::{Json, OptionalJson};
use crate::http::context::{Context, InBox};
use crate::http::framing::ndjson;
use crate::http::refusal::json_response;
use crate::http::stream::{Step, StreamedCall};

type Result<T = Response, E = PlainError> = std::result::Result<T, E>;

/// How the ids of contexts begin.
const CONTEXT: &str = "e2b-";

/// The time without output after which a client gets a line.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// How the text of a Python error begins.
const TRACEBACK: &str = "Traceback (most recent call last):\n";

/// The time after which text that was held back is no error of the run, in milliseconds: the error ends the run at once.
const HELD_MS: u64 = 1000;

/// The maximum length of text that is held back, because it may be the traceback of an error.
const MAX_HELD_BYTES: usize = 256 * 1024;

pub(super) fn routes() -> Router {
    Router::new()
        .route("/execute", post(execute))
        .route("/contexts", post(create_context).get(list_contexts))
        .route("/contexts/{id}", delete(remove_context))
        .route("/contexts/{id}/restart", post(restart_context))
}

fn language(name: Option<&str>) -> std::result::Result<Language, EnvdError> {
    match name.unwrap_or("python").to_ascii_lowercase().as_str() {
        "" | "python" | "python3" => Ok(Language::Python),
        "javascript" | "js" => Ok(Language::JavaScript),
        "bash" | "sh" => Ok(Language::Bash),
        other => Err(EnvdError::unimplemented(format!(
            "language: {other:?} is not available; use python, javascript or bash"
        ))),
    }
}

fn language_name(language: Language) -> &'static str {
    match language {
        Language::Python => "python",
        Language::JavaScript => "javascript",
        Language::Bash | Language::Sh => "bash",
    }
}

/// Creates a context, or returns the existing one.
async fn open(
    context: &Context,
    box_id: &BoxId,
    id: ShellId,
    language: Language,
    cwd: Option<&str>,
) -> std::result::Result<ShellInfo, EnvdError> {
    let params = ShellCreateParams {
        shell_id: Some(id),
        language,
        cwd: Some(cwd.map_or_else(|| HOME.to_owned(), |cwd| absolute(cwd, None))),
        ..ShellCreateParams::new(box_id.clone())
    };
    let created = context.runtime().create_shell(&context.caller, params);
    Ok(created.await?.info)
}

/// Returns the context with an id.
async fn find(
    context: &Context,
    box_id: &BoxId,
    id: &str,
) -> std::result::Result<ShellInfo, EnvdError> {
    let missing = || EnvdError::not_found(format!("context {id} not found"));
    let shell_id = ShellId::new(id).map_err(|_| missing())?;
    if !id.starts_with(CONTEXT) {
        return Err(missing());
    }
    let mut found = list(context, box_id, Some(shell_id.clone())).await?;
    if let Some(found) = found.pop() {
        return Ok(found);
    }
    // The default contexts of all languages exist from the start for clients.
    let default = DEFAULTS
        .into_iter()
        .find(|language| default_id(*language) == id);
    let language = default.ok_or_else(missing)?;
    open(context, box_id, shell_id, language, None).await
}

/// The languages that have a default context.
const DEFAULTS: [Language; 3] = [Language::Python, Language::JavaScript, Language::Bash];

fn default_id(language: Language) -> String {
    format!("{CONTEXT}default-{}", language_name(language))
}

async fn list(
    context: &Context,
    box_id: &BoxId,
    shell_id: Option<ShellId>,
) -> std::result::Result<Vec<ShellInfo>, EnvdError> {
    let params = ShellListParams {
        box_id: box_id.clone(),
        shell_id,
    };
    let listed = context.runtime().list_shells(&context.caller, params);
    let mut items = listed.await?.items;
    items.retain(|shell| shell.shell_id.as_str().starts_with(CONTEXT));
    Ok(items)
}

fn shown(shell: &ShellInfo) -> Value {
    json!({"id": shell.shell_id, "language": language_name(shell.language), "cwd": shell.cwd})
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NewContext {
    language: Option<String>,
    cwd: Option<String>,
}

async fn create_context(
    context: Context,
    InBox(box_id): InBox,
    OptionalJson(request): OptionalJson<NewContext>,
) -> Result {
    let language = language(request.language.as_deref())?;
    let id = ShellId::new(format!("{CONTEXT}{}", ShellId::fresh()))?;
    let cwd = request.cwd.as_deref();
    let shell = open(&context, &box_id, id, language, cwd).await?;
    Ok(json_response(StatusCode::OK, &shown(&shell)))
}

async fn list_contexts(context: Context, InBox(box_id): InBox) -> Result {
    let shells = list(&context, &box_id, None).await?;
    let guest = context.runtime().guest(&context.caller, &box_id).await?;
    let waiting = DEFAULTS.into_iter().filter(|language| {
        let id = default_id(*language);
        let is_open = shells.iter().any(|shell| shell.shell_id.as_str() == id);
        !is_open && guest.interpreters.contains_key(language_name(*language))
    });
    let waiting = waiting.map(|language| {
        json!({"id": default_id(language), "language": language_name(language), "cwd": HOME})
    });
    let listed = waiting.chain(shells.iter().map(shown)).collect();
    Ok(json_response(StatusCode::OK, &Value::Array(listed)))
}

async fn remove(context: &Context, shell: &ShellInfo) -> std::result::Result<(), EnvdError> {
    let params = ShellDeleteParams {
        box_id: shell.box_id.clone(),
        shell_id: shell.shell_id.clone(),
    };
    let deleted = context.runtime().delete_shell(&context.caller, params);
    deleted.await?;
    Ok(())
}

async fn remove_context(
    context: Context,
    InBox(box_id): InBox,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let mut shell = find(&context, &box_id, &id).await?;
    shell.box_id = box_id;
    remove(&context, &shell).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn restart_context(
    context: Context,
    InBox(box_id): InBox,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let mut shell = find(&context, &box_id, &id).await?;
    shell.box_id = box_id.clone();
    remove(&context, &shell).await?;
    let (language, cwd) = (shell.language, Some(shell.cwd.as_str()));
    open(&context, &box_id, shell.shell_id, language, cwd).await?;
    Ok(StatusCode::OK)
}

#[derive(Debug, Deserialize)]
struct Execute {
    #[serde(default)]
    code: String,
    context_id: Option<String>,
    language: Option<String>,
    env_vars: Option<BTreeMap<String, String>>,
}

async fn execute(context: Context, InBox(box_id): InBox, Json(request): Json<Execute>) -> Result {
    let shell = if let Some(id) = request.context_id.as_deref() {
        find(&context, &box_id, id).await?
    } else {
        let language = language(request.language.as_deref())?;
        let id = ShellId::new(default_id(language))?;
        open(&context, &box_id, id, language, None).await?
    };
    if request.code.trim().is_empty() {
        return Ok(lines(Body::from(count(shell.executions))));
    }
    let env = env("env_vars", request.env_vars.unwrap_or_default())?;
    let params = ShellRunParams {
        env,
        attach: Some(AttachOptions {
            view: View::Text,
            until: Until::default(),
        }),
        ..ShellRunParams::new(box_id.clone(), shell.shell_id.clone(), request.code)
    };
    let (held, shell_id) = (context.clone(), shell.shell_id);
    let call = StreamedCall::new(move |chunks| async move {
        let ran = held.run_in_shell(&GATEWAY, params, Some(chunks)).await?;
        let shells = list(&held, &box_id, Some(shell_id))
            .await
            .unwrap_or_default();
        Ok((ran, shells.first().map(|shell| shell.executions)))
    });
    let call = call.begun().await?;
    let mut output = Output::default();
    let frame = move |step| output.frame(step);
    Ok(lines(breakable(call, KEEPALIVE, frame)))
}

fn lines(body: Body) -> Response {
    (
        StatusCode::OK,
        [(CONTENT_TYPE, "application/x-ndjson")],
        body,
    )
        .into_response()
}

fn count(executions: u64) -> Bytes {
    line(&json!({"type": "number_of_executions", "execution_count": executions}))
}

/// Writes a line. Clients also end lines at these characters.
fn line(value: &impl Serialize) -> Bytes {
    let bytes = ndjson(value);
    let Ok(text) = std::str::from_utf8(&bytes) else {
        return bytes;
    };
    if !text.contains(['\u{85}', '\u{2028}', '\u{2029}']) {
        return bytes;
    }
    let escaped = text
        .replace('\u{85}', "\\u0085")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029");
    escaped.into()
}

/// Writes the output of a run.
#[derive(Debug, Default)]
struct Output {
    /// Text of stderr that may be the traceback, which clients get with the error.
    held: String,
    /// When the last traceback in it began.
    held_at: UnixMs,
}

impl Output {
    fn frame(
        &mut self,
        step: Step<CommandChunk, (CommandStartResult, Option<u64>)>,
    ) -> Result<Bytes, Broken> {
        Ok(match step {
            Step::Chunk(CommandChunk::Text(piece)) => {
                let overdue = self.overdue(piece.at);
                let said = match piece.stream {
                    StreamName::Stdout => said("stdout", &piece.data, piece.at),
                    StreamName::Stderr => self.stderr(&piece.data, piece.at),
                };
                if overdue.is_empty() {
                    said
                } else {
                    [&overdue[..], &said[..]].concat().into()
                }
            }
            Step::Chunk(CommandChunk::Gap(gap)) => {
                let text = format!("[{} bytes of output were lost]\n", gap.bytes);
                said("stderr", &text, UnixMs::now())
            }
            Step::Chunk(CommandChunk::Display(shown)) => line(&Shown::from(shown)),
            Step::Chunk(CommandChunk::Started(_) | CommandChunk::Bytes(_)) => Bytes::new(),
            Step::Idle => {
                let released = self.release();
                if released.is_empty() {
                    line(&json!({"type": "keepalive"}))
                } else {
                    released
                }
            }
            Step::End(Ok((ran, executions))) => {
                let why = ran.info.exit.as_ref().map(|exit| exit.why);
                // A box that ended has no last line: the client must see a broken connection.
                if matches!(why, Some(ExitWhy::BoxEnded | ExitWhy::Lost)) {
                    return Err(Broken(self.release()));
                }
                self.end(error_of(&ran.info), executions)
            }
            Step::End(Err(error)) if EnvdError::from(error.clone()).is_gone() => {
                return Err(Broken(self.release()));
            }
            Step::End(Err(error)) => self.failed(&error),
        })
    }

    /// Returns the text that was held back.
    fn release(&mut self) -> Bytes {
        said("stderr", &std::mem::take(&mut self.held), self.held_at)
    }

    /// Returns the text that was held back if the run has gone on since then.
    fn overdue(&mut self, at: UnixMs) -> Bytes {
        if at.0 < self.held_at.0.saturating_add(HELD_MS) {
            return Bytes::new();
        }
        self.release()
    }

    fn stderr(&mut self, text: &str, at: UnixMs) -> Bytes {
        let found = text.find(TRACEBACK);
        let found = found.filter(|at| *at == 0 || text[..*at].ends_with('\n'));
        if !self.held.is_empty() {
            if found.is_some() {
                self.held_at = at;
            }
            self.held.push_str(text);
            if self.held.len() <= MAX_HELD_BYTES {
                return Bytes::new();
            }
            return self.release();
        }
        let Some(begins) = found else {
            return said("stderr", text, at);
        };
        text[begins..].clone_into(&mut self.held);
        self.held_at = at;
        said("stderr", &text[..begins], at)
    }

    fn end(&self, error: Option<(String, String, String)>, executions: Option<u64>) -> Bytes {
        let traceback = error.as_ref().map_or("", |error| error.2.as_str());
        let printed = self.held.strip_suffix(traceback).unwrap_or(&self.held);
        let mut bytes = said("stderr", printed, self.held_at).to_vec();
        if let Some((name, value, traceback)) = error {
            let error =
                json!({"type": "error", "name": name, "value": value, "traceback": traceback});
            bytes.extend(line(&error));
        }
        if let Some(executions) = executions {
            bytes.extend(count(executions));
        }
        bytes.extend(line(&json!({"type": "end_of_execution"})));
        bytes.into()
    }

    fn failed(&self, error: &BoxError) -> Bytes {
        let mut bytes = said("stderr", &self.held, self.held_at).to_vec();
        let error = json!({
            "type": "error", "name": "SandboxError", "value": error.message(), "traceback": "",
        });
        bytes.extend(line(&error));
        bytes.into()
    }
}

fn said(kind: &str, text: &str, at: UnixMs) -> Bytes {
    if text.is_empty() {
        return Bytes::new();
    }
    let nanoseconds = at.0.saturating_mul(1_000_000);
    line(&json!({"type": kind, "text": text, "timestamp": nanoseconds}))
}

/// Returns name, value and traceback of the error that ended a run.
fn error_of(info: &CommandInfo) -> Option<(String, String, String)> {
    if let Some(error) = &info.error {
        let traceback = error.traceback.concat();
        return Some((error.name.clone(), error.value.clone(), traceback));
    }
    let exit = info.exit.as_ref()?;
    let (name, value) = match (exit.why, exit.code) {
        (ExitWhy::Exit, Some(0)) => return None,
        (ExitWhy::Timeout, _) => ("TimeoutError", "the run exceeded its time limit".to_owned()),
        (ExitWhy::Oom, _) => ("MemoryError", "the sandbox was out of memory".to_owned()),
        (_, Some(code)) => ("ExitError", format!("exit status {code}")),
        (_, None) => {
            let signal = exit
                .signal
                .map_or_else(String::new, |number| format!(" by signal {number}"));
            ("ExitError", format!("the interpreter was ended{signal}"))
        }
    };
    Some((name.to_owned(), value, String::new()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_for_every_client() {
        let bytes = line(&json!({"text": "a\n\u{2028}\u{85}b"}));
        let text = std::str::from_utf8(&bytes).unwrap();
        assert_eq!(text, "{\"text\":\"a\\n\\u2028\\u0085b\"}\n");
    }

    #[test]
    fn only_the_traceback_of_the_error_is_held_back() {
        let mut output = Output::default();
        assert!(!output.stderr("before\n", UnixMs(1)).is_empty());
        assert!(output.stderr(TRACEBACK, UnixMs(1)).is_empty());
        assert!(output.stderr("  x\n", UnixMs(1)).is_empty());
        assert_eq!(output.held, format!("{TRACEBACK}  x\n"));
    }

    #[test]
    fn a_printed_traceback_is_text() {
        let (printed, last) = (format!("{TRACEBACK}1\n"), format!("{TRACEBACK}2\n"));
        let error = |traceback: &str| Some(("E".into(), "e".into(), traceback.to_owned()));
        for (error, expected) in [
            (error(&last), &printed),
            (error(""), &(printed.clone() + &last)),
        ] {
            let mut output = Output::default();
            assert!(output.stderr(&printed, UnixMs(1)).is_empty());
            assert!(output.stderr(&last, UnixMs(2)).is_empty());
            let sent = output.end(error, None);
            let sent = std::str::from_utf8(&sent).unwrap().lines().next().unwrap();
            let sent: Value = serde_json::from_str(sent).unwrap();
            assert_eq!(sent["text"], expected.as_str());
        }
    }

    #[test]
    fn text_is_held_back_for_a_moment() {
        let mut output = Output::default();
        output.stderr(TRACEBACK, UnixMs(1));
        output.stderr("  x\n", UnixMs(HELD_MS));
        assert!(output.overdue(UnixMs(HELD_MS)).is_empty());
        assert!(!output.overdue(UnixMs(HELD_MS + 1)).is_empty());
        assert!(output.held.is_empty());
        // A later traceback may be that of the error.
        output.stderr(TRACEBACK, UnixMs(HELD_MS + 2));
        output.stderr(TRACEBACK, UnixMs(2 * HELD_MS));
        assert!(output.overdue(UnixMs(3 * HELD_MS - 1)).is_empty());
        assert!(!output.frame(Step::Idle).unwrap().is_empty());
        assert!(output.held.is_empty());
    }

    #[test]
    fn a_box_that_ends_loses_no_text() {
        let mut output = Output::default();
        output.stderr(TRACEBACK, UnixMs(1));
        let ended = output.frame(Step::End(Err(BoxError::not_found("no"))));
        assert!(matches!(ended, Err(Broken(last)) if !last.is_empty()));
    }

    #[test]
    fn a_guest_cannot_make_the_server_hold_much() {
        let mut output = Output::default();
        let piece = "x".repeat(MAX_HELD_BYTES / 4);
        let mut sent = output.stderr(TRACEBACK, UnixMs(1)).len();
        for _ in 0..100 {
            sent += output.stderr(&piece, UnixMs(1)).len();
            assert!(output.held.len() <= MAX_HELD_BYTES);
        }
        assert!(sent > 100 * piece.len(), "all of it is sent");
    }
}
