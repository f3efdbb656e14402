//! The parameters of a command.

use std::future::IntoFuture;
use std::time::Duration;

use box_protocol::actions::{
    AttachOptions, CommandStartParams, OnDisconnect, OutputMode, Stdin, TerminalSize, View,
};
use box_protocol::{BoxId, CommandId, Invalid, Program};
use futures::future::BoxFuture;

use super::chunk_stream::{Begin, Key};
use super::handle::CommandHandle;
use super::reader::Shared;
use crate::chunk::{Offsets, Output};
use crate::error::ClientError;
use crate::execution::Execution;
use box_transports::reconnecting::Remote;

/// How long a command may run without a reader, unless it is detached.
pub const DEFAULT_IDLE_LIMIT: Duration = Duration::from_mins(5);

/// Bytes of each stream that a handle keeps for [`result`](CommandHandle::result).
///
/// The handle counts the rest.
pub const DEFAULT_CAPTURE_LIMIT: usize = 16 * 1024 * 1024;

/// The parameters of a command.
///
/// [`start`](Self::start) returns a handle. Awaiting the builder runs the command to its exit and
/// returns its [`Output`].
#[derive(Debug, Clone)]
#[must_use = "a command does not run until it is awaited or started"]
pub struct CommandBuilder {
    server: Remote,
    box_id: BoxId,
    id: Result<CommandId, Invalid>,
    params: Result<CommandStartParams, Invalid>,
    attach: AttachOptions,
    capture_limit: usize,
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl CommandBuilder {
    pub(crate) fn new(server: Remote, box_id: BoxId, program: Result<Program, Invalid>) -> Self {
        let params = program.map(|program| CommandStartParams {
            on_disconnect: OnDisconnect::Keep,
            detached_ms: Some(millis(DEFAULT_IDLE_LIMIT)),
            ..CommandStartParams::new(box_id.clone(), program)
        });
        Self {
            server,
            box_id,
            id: Ok(CommandId::fresh()),
            params,
            attach: AttachOptions::default(),
            capture_limit: DEFAULT_CAPTURE_LIMIT,
        }
    }

    fn set(mut self, change: impl FnOnce(&mut CommandStartParams)) -> Self {
        if let Ok(params) = &mut self.params {
            change(params);
        }
        self
    }

    /// Sets the id. If a command with this id exists, the client attaches to it instead.
    pub fn id(mut self, id: impl AsRef<str>) -> Self {
        self.id = CommandId::new(id);
        self
    }

    /// Sets the working directory; the default of the box unless set.
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

    /// Sets the user, by name or uid; the guest user unless set.
    pub fn user(self, user: impl Into<String>) -> Self {
        self.set(|params| params.user = Some(user.into()))
    }

    /// Opens stdin for [`send_input`](CommandHandle::send_input).
    pub fn with_input(self) -> Self {
        self.set(|params| params.stdin = Stdin::Open)
    }

    /// Merges stderr into stdout, in the order written.
    pub fn merged(self) -> Self {
        self.set(|params| params.output = OutputMode::Merged)
    }

    /// Runs the command in a terminal of this size.
    pub fn terminal(self, cols: u16, rows: u16) -> Self {
        self.set(|params| params.pty = Some(TerminalSize { cols, rows }))
    }

    /// Sets the maximum run time; unlimited unless set.
    pub fn timeout(self, time: Duration) -> Self {
        self.set(|params| params.timeout_ms = Some(millis(time)))
    }

    /// Allows the command to run without a reader indefinitely.
    pub fn detached(self) -> Self {
        self.set(|params| params.detached_ms = None)
    }

    /// Sets the maximum time without a reader; [`DEFAULT_IDLE_LIMIT`] unless set.
    pub fn idle_limit(self, time: Duration) -> Self {
        self.set(|params| params.detached_ms = Some(millis(time)))
    }

    /// Kills the command when the connection is lost or the handle is dropped.
    pub fn kill_on_disconnect(self) -> Self {
        self.set(|params| params.on_disconnect = OnDisconnect::Kill)
    }

    /// Sets how long the server keeps the record of the command after its exit.
    pub fn retain(self, time: Duration) -> Self {
        let millis = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        self.set(|params| params.retain_ms = Some(millis))
    }

    /// Reads the output as bytes instead of text.
    pub fn bytes(mut self) -> Self {
        self.attach.view = View::Bytes;
        self
    }

    /// Sets how many bytes of each stream the handle keeps for [`result`](CommandHandle::result).
    ///
    /// [`DEFAULT_CAPTURE_LIMIT`] unless set.
    pub fn capture_limit(mut self, bytes: usize) -> Self {
        self.capture_limit = bytes;
        self
    }

    /// Starts the command. The handle knows its id and process id.
    pub async fn start(self) -> Result<CommandHandle, ClientError> {
        let mut params = self.params?;
        let command_id = self.id?;
        params.command_id = Some(command_id.clone());
        params.attach = Some(self.attach.clone());
        let key = Key {
            box_id: self.box_id,
            command_id,
            attach: self.attach,
        };
        let shared = Shared::new(self.server, key, Offsets::default(), self.capture_limit);
        CommandHandle::begin(shared, Begin::Start(Box::new(params))).await
    }

    /// Runs the command to its exit and returns its output chunk by chunk.
    pub async fn execute(self) -> Result<Execution, ClientError> {
        let mut command = self.start().await?;
        Ok(Execution::of(&mut command).await)
    }
}

impl IntoFuture for CommandBuilder {
    type Output = Result<Output, ClientError>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.start().await?.result().await })
    }
}
