//! One run of code, with its outputs as notebooks have them.

use std::collections::BTreeMap;

use box_protocol::actions::{Displayed, Stdin, Until};
use box_protocol::{BoxError, CommandId, CommandInfo, Env, Invalid};
use serde::Serialize;

use super::envelope::Failure;
use super::file::{checked, write_bytes};
use super::run::{Outcome, RunRequest, Status, status_of};
use super::sessions::{Sessions, check_text, millis};

/// The time limit of a run, unless a request says so.
pub(super) const TIMEOUT_SECONDS: u32 = 30;

/// The maximum length of each stream of a run.
const MAX_OUTPUT_CHARS: usize = 1_000_000;

/// An output of a run, in the form of notebooks.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Output {
    #[serde(rename = "output_type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<BTreeMap<String, String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    evalue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceback: Option<Vec<String>>,
}

/// What a run of code produced.
#[derive(Debug)]
pub(super) struct CodeResult {
    /// `ok`, `error` or `timeout`.
    pub(super) status: &'static str,
    pub(super) outputs: Vec<Output>,
    pub(super) stdout: String,
    pub(super) stderr: String,
    pub(super) exit_code: i32,
    pub(super) traceback: Option<Vec<String>>,
    pub(super) command_id: CommandId,
}

/// Runs code in a session. It ends with its time limit or with its client.
pub(super) async fn run_code(
    sessions: &Sessions,
    session: &str,
    code: String,
    cwd: Option<String>,
    timeout: Option<f64>,
) -> Result<CodeResult, Failure> {
    let limit = timeout.unwrap_or(TIMEOUT_SECONDS.into());
    let run = RunRequest {
        shell_id: sessions.shell_id(session)?,
        text: code,
        cwd,
        cwd_stays: true,
        env: Env::new(),
        hard_ms: millis("timeout", Some(limit))?,
        until: Until::default(),
        keep: false,
        stdin: Stdin::Closed,
    };
    Ok(result_of(sessions.run(run).await?))
}

fn result_of(outcome: Outcome) -> CodeResult {
    let Outcome {
        info,
        read,
        stdout,
        stderr,
        displayed,
    } = outcome;
    let stdout = stdout.within(MAX_OUTPUT_CHARS);
    let stderr = stderr.within(MAX_OUTPUT_CHARS);
    let mut outputs = Vec::new();
    for (name, text) in [("stdout", &stdout), ("stderr", &stderr)] {
        if !text.is_empty() {
            outputs.push(Output {
                kind: "stream",
                name: Some(name),
                text: Some(text.clone()),
                ..Output::default()
            });
        }
    }
    outputs.extend(displayed.into_iter().map(shown));
    let traceback = info.error.as_ref().map(|error| error.traceback.clone());
    if let Some(error) = &info.error {
        outputs.push(Output {
            kind: "error",
            ename: Some(error.name.clone()),
            evalue: Some(error.value.clone()),
            traceback: traceback.clone(),
            ..Output::default()
        });
    }
    let status = match status_of(&info, read) {
        Status::TimedOut => "timeout",
        Status::Completed if info.error.is_none() && exit_code(&info) == 0 => "ok",
        _ => "error",
    };
    CodeResult {
        status,
        outputs,
        stdout,
        stderr,
        exit_code: exit_code(&info),
        traceback,
        command_id: info.command_id,
    }
}

fn exit_code(info: &CommandInfo) -> i32 {
    let failed = i32::from(info.error.is_some());
    // 124 is how a shell reports a timeout.
    super::run::exit_code(info).map_or(124, |code| code.max(failed))
}

fn shown(value: Displayed) -> Output {
    Output {
        kind: if value.main {
            "execute_result"
        } else {
            "display_data"
        },
        data: Some(value.data),
        metadata: Some(BTreeMap::new()),
        ..Output::default()
    }
}

/// Code to run once, or in a session.
#[derive(Debug, Default)]
pub(super) struct CodeRequest {
    pub(super) code: String,
    pub(super) timeout: Option<f64>,
    pub(super) cwd: Option<String>,
    /// Whether the session stays without an id of the client.
    pub(super) stateful: Option<bool>,
    pub(super) session_id: Option<String>,
    /// Files to write before, by their names below the working directory.
    pub(super) files: BTreeMap<String, Option<String>>,
}

/// Runs code; returns the id of the session if that stays.
pub(super) async fn execute_code(
    sessions: &Sessions,
    request: CodeRequest,
) -> Result<(Option<String>, CodeResult), Failure> {
    check_text("code", &request.code)?;
    for name in request.files.keys() {
        if name.is_empty() || name.starts_with('/') {
            return Err(Invalid::new("files", "must have relative names").into());
        }
        checked("files", &format!("/{name}"))?;
    }
    if request.stateful.unwrap_or_default() || request.session_id.is_some() {
        // The client uses the session again.
        let fresh = || CommandId::fresh().to_string();
        let session = request.session_id.clone().unwrap_or_else(fresh);
        sessions.create(&session, None, None).await?;
        let ran = run_with_files(sessions, &session, request).await?;
        return Ok((Some(session), ran));
    }
    let once = OneOff {
        session: sessions.create_unnamed().await?.0,
        sessions: sessions.clone(),
    };
    let ran = run_with_files(sessions, &once.session, request).await?;
    once.end().await?;
    Ok((None, ran))
}

/// A session of one run. It ends when it is dropped, also after an error and when the client has left.
struct OneOff {
    sessions: Sessions,
    session: String,
}

impl OneOff {
    async fn end(mut self) -> Result<(), BoxError> {
        self.sessions.delete(&self.session).await?;
        self.session.clear();
        Ok(())
    }
}

impl Drop for OneOff {
    fn drop(&mut self) {
        if self.session.is_empty() {
            return;
        }
        let (sessions, session) = (self.sessions.clone(), std::mem::take(&mut self.session));
        tokio::spawn(async move {
            // Its box may have ended.
            let _ = sessions.delete(&session).await;
        });
    }
}

/// Writes the files of a request below the working directory, and runs its code.
async fn run_with_files(
    sessions: &Sessions,
    session: &str,
    request: CodeRequest,
) -> Result<CodeResult, Failure> {
    if !request.files.is_empty() {
        let dir = match &request.cwd {
            Some(dir) => dir.clone(),
            None => sessions.info(session).await?.cwd,
        };
        let (context, box_id) = (&sessions.context, &sessions.box_id);
        for (name, text) in request.files {
            let path = checked("files", &format!("{}/{name}", dir.trim_end_matches('/')))?;
            let text = text.unwrap_or_default();
            write_bytes(context, box_id, &path, text.into_bytes(), false).await?;
        }
    }
    let (code, cwd) = (request.code, request.cwd);
    run_code(sessions, session, code, cwd, request.timeout).await
}

/// Returns the session that a request names, which is created if needed, or a new one.
pub(super) async fn session_or_new(
    sessions: &Sessions,
    session: Option<String>,
) -> Result<String, BoxError> {
    match session {
        Some(session) => {
            sessions.create(&session, None, None).await?;
            Ok(session)
        }
        None => Ok(sessions.create_unnamed().await?.0),
    }
}
