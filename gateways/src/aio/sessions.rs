//! Sessions of all kinds: shells of the box, whose ids start with the kind.

use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use box_protocol::actions::{
    Language, OutputMode, ShellCreateParams, ShellCreateResult, ShellDeleteParams, ShellInfo,
    ShellListParams, ShellState, Stdin, Until,
};
use box_protocol::{BoxError, BoxId, Code, CommandId, Env, Invalid, Note, ShellId, UnixMs};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::envelope::Failure;
use super::run::RunRequest;
use crate::http::context::{Context, InBox};
use crate::http::refusal::Refusal;

/// How long an idle interpreter lives that the client did not ask for.
const UNNAMED_IDLE: Duration = Duration::from_mins(10);

/// The number of idle sessions of a kind that the client did not ask for. The oldest end first.
const MAX_UNNAMED: usize = 4;

/// The number of sessions of all kinds in a box: the agent's limit of shells.
pub(super) const MAX_SESSIONS: usize = 128;

/// Limits how many requests end sessions at the same time, each one session at a time.
///
/// Every unnamed call ends the surplus. Without the limit, a burst of them fills the box with such calls.
static PRUNES: Semaphore = Semaphore::const_new(16);

/// A session without a run belongs to a client that has left, after this time.
const UNUSED_SECONDS: u64 = 60;

/// How long a shell may take to leave, which runs its traps.
const RETIRE_MS: u64 = 5000;

/// A kind of sessions. Each has its own ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `/v1/shell`: keeps directory and variables.
    Shell,
    /// `/v1/bash`: keeps the directory only.
    Bash,
    /// `/v1/jupyter`, and Python of `/v1/code`.
    Python,
    /// `/v1/nodejs`, and JavaScript of `/v1/code`.
    Node,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Shell, Self::Bash, Self::Python, Self::Node];

    const fn prefix(self) -> &'static str {
        match self {
            Self::Shell => "shell-",
            Self::Bash => "bash-",
            Self::Python => "python-",
            Self::Node => "node-",
        }
    }

    const fn language(self) -> Language {
        match self {
            Self::Shell | Self::Bash => Language::Bash,
            Self::Python => Language::Python,
            Self::Node => Language::JavaScript,
        }
    }
}

/// What a session has that its shell does not know.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct SessionNote {
    /// The time without output after which a run in this session returns.
    pub(super) silence_ms: Option<u64>,
    /// The time after which the session ends, as requested.
    pub(super) idle_s: Option<u64>,
    /// The directory of later commands, unless it is that of the shell.
    #[serde(default)]
    pub(super) cwd: Option<String>,
    /// Whether the client did not ask for the session.
    #[serde(default)]
    pub(super) unnamed: bool,
}

/// Returns what is stored with a session.
pub(super) fn note_of(info: &ShellInfo) -> SessionNote {
    let note = info.note.as_ref();
    note.and_then(Note::read).unwrap_or_default()
}

/// The sessions of one kind in a box.
#[derive(Debug, Clone)]
pub(super) struct Sessions {
    pub(super) context: Context,
    pub(super) box_id: BoxId,
    pub(super) kind: Kind,
}

/// The routes of a kind have it as an extension.
impl<S: Sync> FromRequestParts<S> for Sessions {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let context = Context::from_request_parts(parts, state).await?;
        let InBox(box_id) = InBox::from_request_parts(parts, state).await?;
        let kind = parts.extensions.get().copied().unwrap_or(Kind::Shell);
        Ok(Self {
            context,
            box_id,
            kind,
        })
    }
}

impl Sessions {
    /// Returns the sessions of another kind.
    pub(super) fn of(self, kind: Kind) -> Self {
        Self { kind, ..self }
    }

    /// Returns the shell of a session.
    pub(super) fn shell_id(&self, session: &str) -> Result<ShellId, Invalid> {
        if session.is_empty() {
            return Err(Invalid::new("id", "must not be empty"));
        }
        ShellId::new(format!("{}{session}", self.kind.prefix()))
    }

    /// Returns the id of a session as the client knows it; `None` for shells of other kinds.
    pub(super) fn id_of<'a>(&self, info: &'a ShellInfo) -> Option<&'a str> {
        info.shell_id.as_str().strip_prefix(self.kind.prefix())
    }

    /// Creates a session for the client, or returns the existing one with this id.
    ///
    /// A session that the client asks for by its id stays, also if the server chose that id.
    pub(super) async fn create(
        &self,
        session: &str,
        cwd: Option<String>,
        note: Option<SessionNote>,
    ) -> Result<ShellCreateResult, BoxError> {
        let created = self.create_or_find(session, cwd, note).await?;
        let known = note_of(&created.info);
        if !known.unnamed {
            return Ok(created);
        }
        let note = named(known);
        let named = self.create_or_find(session, None, Some(note)).await?;
        Ok(ShellCreateResult {
            existed: created.existed,
            ..named
        })
    }

    /// Stores this note with an existing session.
    pub(super) async fn set_note(
        &self,
        session: &str,
        note: SessionNote,
    ) -> Result<ShellInfo, Failure> {
        let stored = self.create_or_find(session, None, Some(note)).await?;
        if !stored.existed {
            // It has ended since its client found it.
            self.delete(session).await?;
            return Err(Failure::no_session());
        }
        Ok(stored.info)
    }

    /// Creates a session that the client did not ask for, and returns its id and its record.
    pub(super) async fn create_unnamed(&self) -> Result<(String, ShellInfo), BoxError> {
        let session = CommandId::fresh().to_string();
        let note = SessionNote {
            unnamed: true,
            ..SessionNote::default()
        };
        let info = self.create_or_find(&session, None, Some(note)).await?.info;
        let sessions = self.clone();
        tokio::spawn(async move { sessions.prune(0).await });
        Ok((session, info))
    }

    /// Creates a session or finds it. If the box has no place for it, sessions that no client asked for end first.
    async fn create_or_find(
        &self,
        session: &str,
        cwd: Option<String>,
        note: Option<SessionNote>,
    ) -> Result<ShellCreateResult, BoxError> {
        let idle = note.as_ref().and_then(|note| {
            let requested = note.idle_s.map(|seconds| seconds.saturating_mul(1000));
            let is_interpreter = matches!(self.kind, Kind::Python | Kind::Node);
            let unnamed = u64::try_from(UNNAMED_IDLE.as_millis()).ok();
            requested.or_else(|| unnamed.filter(|_| note.unnamed && is_interpreter))
        });
        let params = ShellCreateParams {
            shell_id: Some(self.shell_id(session)?),
            language: self.kind.language(),
            cwd,
            output: match self.kind {
                Kind::Shell => OutputMode::Merged,
                _ => OutputMode::Split,
            },
            persist: self.kind != Kind::Bash,
            idle_ms: idle,
            note: note.as_ref().map(Note::new).transpose()?,
            ..ShellCreateParams::new(self.box_id.clone())
        };
        let (runtime, caller) = (self.context.runtime(), &self.context.caller);
        match runtime.create_shell(caller, params.clone()).await {
            Err(error) if error.code() == Code::Capacity => {
                for kind in Kind::ALL {
                    self.clone().of(kind).prune(MAX_UNNAMED).await;
                }
                runtime.create_shell(caller, params).await
            }
            created => created,
        }
    }

    /// Returns a session that the client asks for by its id. It stays, also if the server chose that id.
    pub(super) async fn find(&self, session: &str) -> Result<ShellInfo, Failure> {
        let info = self.info(session).await?;
        let known = note_of(&info);
        if !known.unnamed {
            return Ok(info);
        }
        self.set_note(session, named(known)).await
    }

    /// Returns a session, for the server itself.
    pub(super) async fn info(&self, session: &str) -> Result<ShellInfo, Failure> {
        let shell = self.shell_id(session)?;
        let found = self.shells(Some(shell)).await?;
        found.into_iter().next().ok_or_else(Failure::no_session)
    }

    /// Returns all sessions of the kind, oldest first.
    pub(super) async fn list(&self) -> Result<Vec<ShellInfo>, BoxError> {
        let mut found = self.shells(None).await?;
        found.retain(|info| self.id_of(info).is_some());
        Ok(found)
    }

    async fn shells(&self, shell_id: Option<ShellId>) -> Result<Vec<ShellInfo>, BoxError> {
        let params = ShellListParams {
            box_id: self.box_id.clone(),
            shell_id,
        };
        let (runtime, caller) = (self.context.runtime(), &self.context.caller);
        Ok(runtime.list_shells(caller, params).await?.items)
    }

    /// Ends a session and its runs; returns whether it existed.
    pub(super) async fn delete(&self, session: &str) -> Result<bool, BoxError> {
        self.delete_shell(self.shell_id(session)?).await
    }

    async fn delete_shell(&self, shell_id: ShellId) -> Result<bool, BoxError> {
        let params = ShellDeleteParams {
            box_id: self.box_id.clone(),
            shell_id,
        };
        let (runtime, caller) = (self.context.runtime(), &self.context.caller);
        Ok(runtime.delete_shell(caller, params).await?.deleted)
    }

    /// Ends all sessions of the kind.
    pub(super) async fn delete_all(&self) -> Result<(), BoxError> {
        for info in self.list().await? {
            self.delete_shell(info.shell_id).await?;
        }
        Ok(())
    }

    /// Ends an idle session. What its commands left in the background goes on, such as a server.
    async fn retire(&self, shell_id: ShellId) -> Result<bool, BoxError> {
        if self.kind == Kind::Shell {
            let leave = RunRequest {
                shell_id: shell_id.clone(),
                text: "exit".to_owned(),
                cwd: None,
                cwd_stays: true,
                env: Env::new(),
                hard_ms: Some(RETIRE_MS),
                until: Until::default(),
                keep: true,
                stdin: Stdin::Closed,
            };
            self.run(leave).await?;
        }
        self.delete_shell(shell_id).await
    }

    /// Ends the oldest idle sessions that no client asked for: the surplus, and at least this many.
    async fn prune(&self, least: usize) {
        let Ok(_permit) = PRUNES.acquire().await else {
            return;
        };
        let Ok(mut idle) = self.list().await else {
            return;
        };
        idle.retain(is_disposable);
        idle.sort_by_key(|info| info.last_used_at);
        let surplus = idle.len().saturating_sub(MAX_UNNAMED).max(least);
        for info in idle.into_iter().take(surplus) {
            // Its client may have deleted it.
            let _ = self.retire(info.shell_id).await;
        }
    }
}

/// Returns the note of a session that the client has asked for.
fn named(note: SessionNote) -> SessionNote {
    SessionNote {
        unnamed: false,
        ..note
    }
}

/// Returns whether no client uses a session: none asked for it, none ran a second command in it, and nothing runs.
fn is_disposable(info: &ShellInfo) -> bool {
    // A new session waits for its first run.
    let is_used = info.executions == 1 || age_seconds(info) > UNUSED_SECONDS;
    info.state == ShellState::Idle && note_of(info).unnamed && info.executions <= 1 && is_used
}

/// Returns the age of a session in seconds.
pub(super) fn age_seconds(info: &ShellInfo) -> u64 {
    UnixMs::now().since(info.created_at).as_secs()
}

/// Checks a command or code of a request before a session is created for it.
pub(super) fn check_text(field: &'static str, text: &str) -> Result<(), Invalid> {
    if text.trim().is_empty() {
        return Err(Invalid::new(field, "must not be blank"));
    }
    if text.contains('\0') {
        return Err(Invalid::new(field, "must not contain NUL"));
    }
    Ok(())
}

/// Converts seconds of a request to milliseconds.
pub(super) fn millis(field: &'static str, seconds: Option<f64>) -> Result<Option<u64>, Invalid> {
    let Some(seconds) = seconds else {
        return Ok(None);
    };
    let time = Duration::try_from_secs_f64(seconds);
    let time = time.map_err(|_| Invalid::new(field, "must be a number of seconds from 0"))?;
    Ok(Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_from_zero() {
        assert_eq!(millis("timeout", None).unwrap(), None);
        assert_eq!(millis("timeout", Some(1.5)).unwrap(), Some(1500));
        assert_eq!(millis("timeout", Some(0.0)).unwrap(), Some(0));
        for wrong in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(millis("timeout", Some(wrong)).is_err(), "{wrong}");
        }
    }
}
