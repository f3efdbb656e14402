//! The parameters of a shell.

use std::time::Duration;

use box_protocol::actions::{Language, OutputMode, ShellCreate, ShellCreateParams};
use box_protocol::{BoxId, DEFAULT_MOUNT_PATH, Invalid, ShellId};

use super::ShellHandle;
use crate::command::millis;
use crate::error::ClientError;
use box_transports::reconnecting::Remote;

/// How long a request to a shell may produce no output.
pub const DEFAULT_SILENCE_LIMIT: Duration = Duration::from_mins(10);

/// The directory for downloads: the workspace.
pub const DEFAULT_DOWNLOAD_ROOT: &str = DEFAULT_MOUNT_PATH;

/// The parameters of a shell.
#[derive(Debug, Clone)]
#[must_use = "a shell is not created until `open`"]
pub struct ShellBuilder {
    server: Remote,
    params: Result<ShellCreateParams, Invalid>,
    silence: Duration,
    root: String,
}

impl ShellBuilder {
    pub(crate) fn new(server: Remote, box_id: BoxId, id: &str) -> Self {
        let params = ShellId::new(id).map(|shell_id| ShellCreateParams {
            shell_id: Some(shell_id),
            ..ShellCreateParams::new(box_id)
        });
        Self {
            server,
            params,
            silence: DEFAULT_SILENCE_LIMIT,
            root: DEFAULT_DOWNLOAD_ROOT.to_owned(),
        }
    }

    fn set(mut self, change: impl FnOnce(&mut ShellCreateParams)) -> Self {
        if let Ok(params) = &mut self.params {
            change(params);
        }
        self
    }

    /// Sets the language; Bash unless set.
    pub fn language(self, language: Language) -> Self {
        self.set(|params| params.language = language)
    }

    /// Sets the language to Python.
    pub fn python(self) -> Self {
        self.language(Language::Python)
    }

    /// Sets the initial working directory; the default of the box unless set.
    pub fn cwd(self, cwd: impl Into<String>) -> Self {
        self.set(|params| params.cwd = Some(cwd.into()))
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        if let Ok(params) = &mut self.params
            && let Err(invalid) = params.env.insert(name, value)
        {
            self.params = Err(invalid);
        }
        self
    }

    /// Merges stderr into stdout, in the order written.
    pub fn merged(self) -> Self {
        self.set(|params| params.output = OutputMode::Merged)
    }

    /// Keeps only the working directory between runs.
    pub fn stateless(self) -> Self {
        self.set(|params| params.persist = false)
    }

    /// Sets the time without a run after which the shell ends; never unless set.
    pub fn idle_limit(self, time: Duration) -> Self {
        self.set(|params| params.idle_ms = Some(millis(time)))
    }

    /// Sets how long a request may produce no output; [`DEFAULT_SILENCE_LIMIT`] unless set.
    pub fn silence_limit(mut self, limit: Duration) -> Self {
        self.silence = limit;
        self
    }

    /// Sets the directory for downloads; [`DEFAULT_DOWNLOAD_ROOT`] unless set.
    pub fn download_root(mut self, root: impl Into<String>) -> Self {
        self.root = root.into();
        self
    }

    /// Creates the shell, or opens the existing one with its id.
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
