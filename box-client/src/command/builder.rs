//! What to run, and how.

use std::future::IntoFuture;
use std::time::Duration;

use box_protocol::actions::{
    AttachOptions, CommandStartParams, OnDisconnect, OutputMode, Stdin, TerminalSize, View,
};
use box_protocol::{CommandId, Invalid, Program, SessionId};
use futures::future::BoxFuture;

use super::feed::{Begin, Key};
use super::handle::CommandHandle;
use super::reader::Shared;
use crate::chunk::{Offsets, Output};
use crate::error::ClientError;
use crate::execution::Execution;
use box_transports::link::Remote;

/// How long a command may run without a reader, unless it is detached.
pub const DEFAULT_IDLE_LIMIT: Duration = Duration::from_mins(5);

/// How much of each stream a handle keeps for [`result`](CommandHandle::result); the rest is counted.
pub const DEFAULT_KEPT_BYTES: usize = 16 * 1024 * 1024;

/// A command about to be run. [`start`](Self::start) gives a handle; awaiting the builder itself runs the
/// command to its end and gives its [`Output`].
#[derive(Debug, Clone)]
#[must_use = "nothing runs until it is awaited or started"]
pub struct CommandBuilder {
    server: Remote,
    session_id: SessionId,
    id: Result<CommandId, Invalid>,
    params: Result<CommandStartParams, Invalid>,
    attach: AttachOptions,
    kept_bytes: usize,
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl CommandBuilder {
    pub(crate) fn new(
        server: Remote,
        session_id: SessionId,
        program: Result<Program, Invalid>,
    ) -> Self {
        let params = program.map(|program| CommandStartParams {
            on_disconnect: OnDisconnect::Keep,
            detached_ms: Some(millis(DEFAULT_IDLE_LIMIT)),
            ..CommandStartParams::new(session_id.clone(), program)
        });
        Self {
            server,
            session_id,
            id: Ok(CommandId::fresh()),
            params,
            attach: AttachOptions::default(),
            kept_bytes: DEFAULT_KEPT_BYTES,
        }
    }

    fn set(mut self, change: impl FnOnce(&mut CommandStartParams)) -> Self {
        if let Ok(params) = &mut self.params {
            change(params);
        }
        self
    }

    /// Gives it this id. If a command with this id is there already, it is read instead of started.
    pub fn id(mut self, id: impl AsRef<str>) -> Self {
        self.id = CommandId::new(id);
        self
    }

    /// Runs it there.
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

    /// Runs it as this user, by name or number.
    pub fn user(self, user: impl Into<String>) -> Self {
        self.set(|params| params.user = Some(user.into()))
    }

    /// Leaves its input open, to be written by [`send_input`](CommandHandle::send_input).
    pub fn with_input(self) -> Self {
        self.set(|params| params.stdin = Stdin::Open)
    }

    /// Has both streams in one, in the order written.
    pub fn merged(self) -> Self {
        self.set(|params| params.output = OutputMode::Merged)
    }

    /// Gives it a terminal of this size.
    pub fn terminal(self, cols: u16, rows: u16) -> Self {
        self.set(|params| params.pty = Some(TerminalSize { cols, rows }))
    }

    /// Ends it after so long.
    pub fn timeout(self, time: Duration) -> Self {
        self.set(|params| params.timeout_ms = Some(millis(time)))
    }

    /// Lets it run without a reader for as long as it likes.
    pub fn detached(self) -> Self {
        self.set(|params| params.detached_ms = None)
    }

    /// Ends it after so long without a reader; [`DEFAULT_IDLE_LIMIT`] unless said otherwise.
    pub fn idle_limit(self, time: Duration) -> Self {
        self.set(|params| params.detached_ms = Some(millis(time)))
    }

    /// Ends it as soon as the connection is lost or the handle dropped: then there is nothing to read on.
    pub fn tied(self) -> Self {
        self.set(|params| params.on_disconnect = OnDisconnect::Kill)
    }

    /// Keeps its record for so long after its end.
    pub fn retain(self, time: Duration) -> Self {
        let millis = i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        self.set(|params| params.retain_ms = Some(millis))
    }

    /// Reads its output as the bytes they are, not as text.
    pub fn bytes(mut self) -> Self {
        self.attach.view = View::Bytes;
        self
    }

    /// Keeps so much of each stream for [`result`](CommandHandle::result); [`DEFAULT_KEPT_BYTES`] unless
    /// said otherwise.
    pub fn keep(mut self, bytes: usize) -> Self {
        self.kept_bytes = bytes;
        self
    }

    /// Starts it. The id and the process are known when this returns.
    pub async fn start(self) -> Result<CommandHandle, ClientError> {
        let mut params = self.params?;
        let command_id = self.id?;
        params.command_id = Some(command_id.clone());
        params.attach = Some(self.attach.clone());
        let key = Key {
            session_id: self.session_id,
            command_id,
            attach: self.attach,
        };
        let shared = Shared::new(self.server, key, Offsets::default(), self.kept_bytes);
        CommandHandle::begin(shared, Begin::Start(Box::new(params))).await
    }

    /// Runs it to its end, and collects it piece by piece.
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
