//! A command: reading its output, waiting for its exit, and controlling it.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use box_protocol::actions::{
    CommandGet, CommandInput, CommandInputParams, CommandKey, CommandKill, CommandKillParams,
    TerminalSize,
};
use box_protocol::{Adjusted, CommandId, CommandInfo, Exit};
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt as _};
use tokio::sync::watch;

use super::chunk_stream::Begin;
use super::reader::{Reader, Shared};
use crate::chunk::{Chunk, Offsets, Output};
use crate::error::ClientError;

/// Maximum number of bytes of input in one message.
const INPUT_BYTES: usize = 256 * 1024;

/// A command: a stream of its output, which resumes after lost connections.
///
/// A command with a full log waits for its reader. Dropping the handle does not end the command: it
/// continues for as long as it may run without a reader.
///
/// ```no_run
/// # async fn example(work: box_client::BoxHandle) -> Result<(), box_client::ClientError> {
/// use futures::StreamExt as _;
///
/// let mut build = work.command("make").id("build-7").start().await?;
/// while let Some(chunk) = build.next().await.transpose()? {
///     print!("{}", chunk.text());
/// }
/// println!("{:?}", build.exit().await?);
/// # Ok(())
/// # }
/// ```
pub struct CommandHandle {
    control: CommandControl,
    // The mutex makes the handle `Sync`; it is never locked.
    chunks: Mutex<BoxStream<'static, Result<Chunk, ClientError>>>,
}

impl fmt::Debug for CommandHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.control.fmt(f)
    }
}

impl CommandHandle {
    /// Starts a command and waits for its `started` chunk.
    pub(crate) async fn begin(shared: Arc<Shared>, begin: Begin) -> Result<Self, ClientError> {
        let mut reader = Reader::new(Arc::clone(&shared), Some(begin));
        reader.started().await?;
        Ok(Self::reading(shared, reader))
    }

    /// Attaches to an existing command.
    pub(crate) async fn attach(shared: Arc<Shared>) -> Result<Self, ClientError> {
        let control = CommandControl(Arc::clone(&shared));
        shared.server.try_now().await?;
        control.refresh().await?;
        Ok(Self::follow(shared))
    }

    /// Attaches to a command without checking that it exists.
    pub(crate) fn follow(shared: Arc<Shared>) -> Self {
        let reader = Reader::new(Arc::clone(&shared), None);
        Self::reading(shared, reader)
    }

    fn reading(shared: Arc<Shared>, reader: Reader) -> Self {
        let chunks = stream::unfold(reader, |mut reader| async move {
            let chunk = reader.next().await?;
            Some((chunk, reader))
        });
        Self {
            control: CommandControl(shared),
            // Fused, so that it can be polled after the end.
            chunks: Mutex::new(chunks.fuse().boxed()),
        }
    }

    /// Returns the id of the command.
    pub fn id(&self) -> &CommandId {
        self.control.id()
    }

    /// Returns the process id inside the box; `None` while the command is queued.
    pub fn pid(&self) -> Option<u32> {
        self.info().and_then(|info| info.pid)
    }

    /// Returns the latest record of the command that the client has received.
    pub fn info(&self) -> Option<CommandInfo> {
        self.control.0.progress().info.clone()
    }

    /// Returns the fields of the request that the profile of the server changed; known after the
    /// exit.
    pub fn adjusted(&self) -> Vec<Adjusted> {
        self.control.0.progress().adjusted.clone()
    }

    /// Returns the offsets after the last returned chunk, from which reading would resume.
    pub fn offsets(&self) -> Offsets {
        self.control.0.progress().offsets
    }

    pub(crate) fn capture_limit(&self) -> usize {
        self.control.0.capture_limit
    }

    /// Returns a handle that controls the command while another task reads it.
    pub fn control(&self) -> CommandControl {
        self.control.clone()
    }

    /// Reads the remaining output and returns the exit status. Can be called again.
    pub async fn exit(&mut self) -> Result<Exit, ClientError> {
        while let Some(chunk) = self.next().await {
            chunk?;
        }
        let progress = self.control.0.progress();
        match (progress.exit, &progress.failed) {
            (Some(exit), _) => Ok(exit),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Err(ClientError::NoExit(None)),
        }
    }

    /// Reads the remaining output and returns all output, including earlier chunks, and the exit
    /// status.
    ///
    /// Can be called again.
    pub async fn result(&mut self) -> Result<Output, ClientError> {
        self.exit().await?;
        Ok(self.outcome().await)
    }

    /// Returns the same as [`result`](Self::result), also if the exit is not observed.
    pub(crate) async fn outcome(&mut self) -> Output {
        let ended = self.exit().await;
        let progress = self.control.0.progress();
        let mut output = progress.captured.output();
        output.id = Some(self.id().clone());
        match ended {
            Ok(exit) => output.exit = Some(exit),
            Err(error) => output.cut = Some(error),
        }
        if let Some(info) = &progress.info {
            let begun = info.started_at.unwrap_or(info.created_at);
            output.took = info.ended_at.map(|ended| ended.since(begun));
            output.error.clone_from(&info.error);
        }
        output.adjusted.clone_from(&progress.adjusted);
        output
    }

    /// Returns a new handle that resumes at the current offsets, with no losses counted.
    ///
    /// `not_found` if the record of the command is gone.
    pub async fn reconnect(&self) -> Result<Self, ClientError> {
        let old = &self.control.0;
        let (server, key) = (old.server.clone(), old.key.clone());
        Self::attach(Shared::new(server, key, self.offsets(), old.capture_limit)).await
    }

    /// See [`CommandControl::send_input`].
    pub async fn send_input(&self, data: impl Into<Bytes>) -> Result<(), ClientError> {
        self.control.send_input(data).await
    }

    /// See [`CommandControl::close_input`].
    pub async fn close_input(&self) -> Result<(), ClientError> {
        self.control.close_input().await
    }

    /// See [`CommandControl::resize`].
    pub async fn resize(&self, cols: u16, rows: u16) -> Result<(), ClientError> {
        self.control.resize(cols, rows).await
    }

    /// See [`CommandControl::signal`].
    pub async fn signal(&self, signal: &str) -> Result<(), ClientError> {
        self.control.signal(signal).await
    }

    /// See [`CommandControl::kill`].
    pub async fn kill(&self) -> Result<(), ClientError> {
        self.control.kill().await
    }
}

impl Stream for CommandHandle {
    /// An error is the last item; the command may continue nevertheless.
    type Item = Result<Chunk, ClientError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let chunks = self.get_mut().chunks.get_mut();
        chunks
            .unwrap_or_else(PoisonError::into_inner)
            .poll_next_unpin(cx)
    }
}

/// Controls a command. The methods do nothing once the command has ended.
#[derive(Clone)]
pub struct CommandControl(Arc<Shared>);

impl fmt::Debug for CommandControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommandHandle")
            .field("box_id", &self.0.key.box_id)
            .field("command_id", self.id())
            .field("offsets", &self.0.progress().offsets)
            .finish_non_exhaustive()
    }
}

impl CommandControl {
    /// Returns the id of the command.
    pub fn id(&self) -> &CommandId {
        &self.0.key.command_id
    }

    /// Watches whether the connection is lost and the client is going to resume reading.
    pub fn connection_lost(&self) -> watch::Receiver<bool> {
        self.0.lost()
    }

    /// Writes to stdin; returns when the command's pipe has accepted all bytes.
    pub async fn send_input(&self, data: impl Into<Bytes>) -> Result<(), ClientError> {
        let mut data = data.into();
        while !data.is_empty() && !self.has_ended() {
            let piece = data.split_to(data.len().min(INPUT_BYTES));
            let mut params = self.input();
            params.data = Some(piece.into());
            self.send(params).await?;
        }
        Ok(())
    }

    /// Closes stdin.
    pub async fn close_input(&self) -> Result<(), ClientError> {
        let mut params = self.input();
        params.close = true;
        self.send(params).await
    }

    /// Resizes the terminal.
    pub async fn resize(&self, cols: u16, rows: u16) -> Result<(), ClientError> {
        let mut params = self.input();
        params.size = Some(TerminalSize { cols, rows });
        self.send(params).await
    }

    /// Sends a signal, named without `SIG`. The command may survive it.
    pub async fn signal(&self, signal: &str) -> Result<(), ClientError> {
        self.send_signal(signal).await.map(drop)
    }

    /// Kills the command and its process tree.
    ///
    /// The client does not resume reading afterwards: if the exit status is lost, the stream ends
    /// with [`Killed`](ClientError::Killed).
    pub async fn kill(&self) -> Result<(), ClientError> {
        if self.has_ended() {
            return Ok(());
        }
        let killing = self.0.kill();
        let info = self.send_signal("KILL").await?;
        killing.confirm(info.and_then(|info| info.exit));
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.0.progress().exit.is_some()
    }

    fn input(&self) -> CommandInputParams {
        CommandInputParams::new(self.0.key.box_id.clone(), self.id().clone())
    }

    async fn send(&self, params: CommandInputParams) -> Result<(), ClientError> {
        if self.has_ended() {
            return Ok(());
        }
        let peer = self.0.server.try_now().await?;
        let answer = peer.call::<CommandInput>(&params).await;
        let Err(error) = answer.map_err(ClientError::from) else {
            return Ok(());
        };
        // The command may have ended although the client has not read its exit yet.
        let ended = is_expired(&error)
            || error.is_conflict() && self.refresh().await.is_ok_and(|info| info.exit.is_some());
        if ended { Ok(()) } else { Err(error) }
    }

    async fn send_signal(&self, signal: &str) -> Result<Option<CommandInfo>, ClientError> {
        if self.has_ended() {
            return Ok(None);
        }
        let peer = self.0.server.try_now().await?;
        let params = CommandKillParams {
            signal: signal.to_owned(),
            ..CommandKillParams::new(self.0.key.box_id.clone(), self.id().clone())
        };
        match peer
            .call::<CommandKill>(&params)
            .await
            .map_err(ClientError::from)
        {
            Ok(answer) => Ok(Some(answer.info)),
            Err(error) if is_expired(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn refresh(&self) -> Result<CommandInfo, ClientError> {
        let key = CommandKey {
            box_id: self.0.key.box_id.clone(),
            command_id: self.id().clone(),
        };
        let info = self.0.server.call::<CommandGet>(&key).await?;
        self.0.progress().info = Some(info.clone());
        Ok(info)
    }
}

/// Whether the record of the command is gone, which happens only after its exit.
fn is_expired(error: &ClientError) -> bool {
    error.is_not_found() && error.detail().expired
}
