//! A run in a shell, and its replacement when the shell is broken or gone.

use std::future::IntoFuture;
use std::sync::atomic::Ordering;
use std::time::Duration;

use box_protocol::actions::{
    AttachOptions, OnDisconnect, ShellCreate, ShellCreateParams, ShellRunParams, Stdin, Until, View,
};
use box_protocol::error::Subject;
use box_protocol::{Code, CommandId, Env, Invalid, Program, ShellId};
use futures::future::BoxFuture;

use super::ShellHandle;
use crate::chunk::{Offsets, Output};
use crate::command::{Begin, CommandHandle, DEFAULT_CAPTURE_LIMIT, Key, Shared, millis};
use crate::error::ClientError;

/// The shell that executed a run instead of the requested one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Replaced {
    /// A new shell for this run only, which the client ended afterwards.
    For(ShellId),
    /// A new shell with the same id, which the agent created.
    InPlace,
}

/// The parameters of a run in a shell.
#[derive(Debug, Clone)]
#[must_use = "a run does not start until it is awaited"]
pub struct ShellRunBuilder {
    shell: ShellHandle,
    text: String,
    id: Result<CommandId, Invalid>,
    cwd: Option<String>,
    cwd_stays: bool,
    env: Result<Env, Invalid>,
    timeout: Option<Duration>,
    idle_limit: Option<Duration>,
    on_disconnect: OnDisconnect,
    stdin: Stdin,
    view: View,
}

impl ShellRunBuilder {
    pub(super) fn new(shell: ShellHandle, text: String) -> Self {
        Self {
            shell,
            text,
            id: Ok(CommandId::fresh()),
            cwd: None,
            cwd_stays: false,
            env: Ok(Env::new()),
            timeout: None,
            idle_limit: None,
            on_disconnect: OnDisconnect::Kill,
            stdin: Stdin::Closed,
            view: View::Text,
        }
    }

    /// Sets the id of the run.
    pub fn id(mut self, id: impl AsRef<str>) -> Self {
        self.id = CommandId::new(id);
        self
    }

    /// Sets the working directory of this run; that of the shell unless set.
    pub fn cwd(mut self, cwd: impl Into<String>) -> Self {
        self.cwd = Some(cwd.into());
        self
    }

    /// Sets the working directory of this run and of the shell after it.
    pub fn chdir(mut self, cwd: impl Into<String>) -> Self {
        self.cwd = Some(cwd.into());
        self.cwd_stays = true;
        self
    }

    /// Sets an environment variable for this run.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        if let Ok(env) = &mut self.env
            && let Err(invalid) = env.insert(name, value)
        {
            self.env = Err(invalid);
        }
        self
    }

    /// Sets the maximum run time; unlimited unless set.
    pub fn timeout(mut self, time: Duration) -> Self {
        self.timeout = Some(time);
        self
    }

    /// Lets the run continue when the connection is lost or the handle is dropped.
    pub fn detached(mut self) -> Self {
        self.on_disconnect = OnDisconnect::Keep;
        self
    }

    /// Lets the run continue without a reader for this long.
    pub fn idle_limit(mut self, time: Duration) -> Self {
        self.idle_limit = Some(time);
        self.detached()
    }

    /// Opens stdin for [`send_input`](CommandHandle::send_input).
    pub fn with_input(mut self) -> Self {
        self.stdin = Stdin::Open;
        self
    }

    /// Reads the output as bytes instead of text. Applies to [`start`](Self::start).
    pub fn bytes(mut self) -> Self {
        self.view = View::Bytes;
        self
    }

    /// Starts the run in exactly this shell and returns a handle to read it.
    ///
    /// The handle keeps no output for [`result`](CommandHandle::result). Later requests to the
    /// shell handle do not wait for the exit, but the shell executes them one after the other.
    pub async fn start(self) -> Result<CommandHandle, ClientError> {
        let attach = AttachOptions {
            view: self.view,
            until: Until::default(),
        };
        let (shell, params) = self.into_params()?;
        let _turn = shell.turn().await?;
        shell.begin(params, attach, 0).await
    }

    fn into_params(self) -> Result<(ShellHandle, ShellRunParams), ClientError> {
        // The client refuses a blank text before it sends the call.
        Program::text(self.text.as_str())?;
        let (box_id, shell_id) = (self.shell.box_id().clone(), self.shell.id().clone());
        let params = ShellRunParams {
            command_id: Some(self.id?),
            cwd: self.cwd,
            cwd_stays: self.cwd_stays,
            env: self.env?,
            stdin: self.stdin,
            timeout_ms: self.timeout.map(millis),
            detached_ms: self.idle_limit.map(millis),
            on_disconnect: self.on_disconnect,
            ..ShellRunParams::new(box_id, shell_id, self.text)
        };
        Ok((self.shell, params))
    }

    async fn run(self) -> Result<Output, ClientError> {
        let (shell, params) = self.into_params()?;
        let _turn = shell.turn().await?;
        match shell.run_in(params.clone()).await {
            Err(error) if is_broken(&error) => shell.run_in_replacement(params, &error).await,
            outcome => outcome,
        }
    }
}

impl IntoFuture for ShellRunBuilder {
    type Output = Result<Output, ClientError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// Whether the shell is gone or unusable, so that nothing ran.
fn is_broken(error: &ClientError) -> bool {
    matches!(error.code(), Code::NotFound | Code::Unavailable)
        && error.detail().subject == Some(Subject::Shell)
}

impl ShellHandle {
    /// Runs in the shell that the parameters name. An error means that nothing ran.
    async fn run_in(&self, params: ShellRunParams) -> Result<Output, ClientError> {
        let attach = AttachOptions {
            view: View::Text,
            until: Until {
                silence_ms: Some(millis(self.0.silence)),
                ..Until::default()
            },
        };
        let mut command = self.begin(params, attach, DEFAULT_CAPTURE_LIMIT).await?;
        let mut output = command.outcome().await;
        let in_place = command.info().is_some_and(|info| info.shell_replaced);
        output.replaced = in_place.then_some(Replaced::InPlace);
        Ok(output)
    }

    async fn begin(
        &self,
        params: ShellRunParams,
        attach: AttachOptions,
        capture_limit: usize,
    ) -> Result<CommandHandle, ClientError> {
        let key = Key {
            box_id: params.box_id.clone(),
            command_id: params.command_id.clone().unwrap_or_else(CommandId::fresh),
            attach,
        };
        let server = self.0.server.clone();
        let shared = Shared::new(server, key, Offsets::default(), capture_limit);
        CommandHandle::begin(shared, Begin::Run(Box::new(params))).await
    }

    /// Creates a shell for one run, runs in it, and ends it.
    async fn run_in_replacement(
        &self,
        mut params: ShellRunParams,
        why: &ClientError,
    ) -> Result<Output, ClientError> {
        let id = ShellId::fresh();
        tracing::warn!(shell = %self.id(), %why, replacement = %id, "shell is unusable; running in a replacement");
        let create = ShellCreateParams {
            shell_id: Some(id.clone()),
            // Ends the shell if the client is gone before it deletes the shell below.
            idle_ms: Some(self.0.create.idle_ms.unwrap_or(millis(self.0.silence))),
            ..self.0.create.clone()
        };
        self.0.server.call::<ShellCreate>(&create).await?;
        params.shell_id = id.clone();
        let outcome = self.run_in(params).await;
        self.release(id.clone()).await;
        let mut outcome = outcome?;
        self.0.recovered.fetch_add(1, Ordering::Relaxed);
        outcome.replaced = Some(Replaced::For(id));
        Ok(outcome)
    }
}
