//! A shell about to be opened.

use std::time::Duration;

use box_protocol::actions::{Language, OutputMode, ShellCreate, ShellCreateParams};
use box_protocol::{DEFAULT_MOUNT_PATH, Env, Invalid, SessionId, ShellId};

use super::ShellHandle;
use crate::command::millis;
use crate::error::ClientError;
use box_transports::link::Remote;

/// How long anything asked of a shell may be silent.
pub const DEFAULT_SILENCE: Duration = Duration::from_mins(10);

/// Where downloads come from: the workspace.
pub const DEFAULT_DOWNLOAD_ROOT: &str = DEFAULT_MOUNT_PATH;

/// A shell about to be opened.
#[derive(Debug, Clone)]
#[must_use = "nothing is opened until `open`"]
pub struct ShellBuilder {
    server: Remote,
    params: Result<ShellCreateParams, Invalid>,
    silence: Duration,
    root: String,
}

impl ShellBuilder {
    pub(crate) fn new(server: Remote, session_id: SessionId, id: &str) -> Self {
        let params = ShellId::new(id).map(|shell_id| ShellCreateParams {
            session_id,
            shell_id: Some(shell_id),
            language: Language::default(),
            cwd: None,
            env: Env::new(),
            output: OutputMode::default(),
            persist: true,
            idle_ms: None,
            note: None,
        });
        Self {
            server,
            params,
            silence: DEFAULT_SILENCE,
            root: DEFAULT_DOWNLOAD_ROOT.to_owned(),
        }
    }

    fn set(mut self, change: impl FnOnce(&mut ShellCreateParams)) -> Self {
        if let Ok(params) = &mut self.params {
            change(params);
        }
        self
    }

    /// What it speaks; bash unless said otherwise.
    pub fn language(self, language: Language) -> Self {
        self.set(|params| params.language = language)
    }

    /// Speaks Python.
    pub fn python(self) -> Self {
        self.language(Language::Python)
    }

    /// Begins there.
    pub fn cwd(self, cwd: impl Into<String>) -> Self {
        self.set(|params| params.cwd = Some(cwd.into()))
    }

    /// Sets a variable.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        if let Ok(params) = &mut self.params
            && let Err(invalid) = params.env.insert(name, value)
        {
            self.params = Err(invalid);
        }
        self
    }

    /// Has both streams of its runs in one.
    pub fn merged(self) -> Self {
        self.set(|params| params.output = OutputMode::Merged)
    }

    /// Keeps nothing between runs but its directory.
    pub fn stateless(self) -> Self {
        self.set(|params| params.persist = false)
    }

    /// Ends it after so long without a run.
    pub fn idle_limit(self, time: Duration) -> Self {
        self.set(|params| params.idle_ms = Some(millis(time)))
    }

    /// How long anything asked of it may be silent; [`DEFAULT_SILENCE`] unless said otherwise.
    pub fn silence(mut self, limit: Duration) -> Self {
        self.silence = limit;
        self
    }

    /// Where downloads come from; [`DEFAULT_DOWNLOAD_ROOT`] unless said otherwise.
    pub fn download_root(mut self, root: impl Into<String>) -> Self {
        self.root = root.into();
        self
    }

    /// Makes the shell, or finds the one with its id.
    pub async fn open(self) -> Result<ShellHandle, ClientError> {
        let params = self.params?;
        let made = self.server.call::<ShellCreate>(&params).await?;
        let id = made.info.shell_id;
        Ok(ShellHandle::new(
            self.server,
            params,
            id,
            self.silence,
            self.root,
        ))
    }
}
