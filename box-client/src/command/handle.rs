//! A command, to be read, waited for and spoken to.

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

/// The most bytes of input in one message.
const INPUT_BYTES: usize = 256 * 1024;

/// A command: a stream of what it says, in the order in which it came, across lost connections.
///
/// Not reading it slows the command down once its log is full. Dropping the handle ends nothing at once:
/// the command goes on, for as long as it may run without a reader.
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
    // In a mutex, which nobody locks, so that the handle can be shared.
    chunks: Mutex<BoxStream<'static, Result<Chunk, ClientError>>>,
}

impl fmt::Debug for CommandHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.control.fmt(f)
    }
}

impl CommandHandle {
    /// Begins a command, and waits for the word that it has begun.
    pub(crate) async fn begin(shared: Arc<Shared>, begin: Begin) -> Result<Self, ClientError> {
        let mut reader = Reader::new(Arc::clone(&shared), Some(begin));
        reader.started().await?;
        Ok(Self::reading(shared, reader))
    }

    /// Reads a command that is there.
    pub(crate) async fn attach(shared: Arc<Shared>) -> Result<Self, ClientError> {
        let control = CommandControl(Arc::clone(&shared));
        shared.server.try_now().await?;
        control.look().await?;
        Ok(Self::follow(shared))
    }

    /// Reads a command of which nothing is known yet.
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
            // Fused: whoever asks again after the end is told so again.
            chunks: Mutex::new(chunks.fuse().boxed()),
        }
    }

    /// The command's id: the one asked for, or the one made here.
    pub fn id(&self) -> &CommandId {
        self.control.id()
    }

    /// Its process, as the box numbers it. Not known for a command that waits for its turn.
    pub fn pid(&self) -> Option<u32> {
        self.info().and_then(|info| info.pid)
    }

    /// What was last told of it.
    pub fn info(&self) -> Option<CommandInfo> {
        self.control.0.progress().info.clone()
    }

    /// What the server's profile changed of the request; known at the end.
    pub fn adjusted(&self) -> Vec<Adjusted> {
        self.control.0.progress().adjusted.clone()
    }

    /// Where reading would go on: behind the last chunk that this stream has given.
    pub fn offsets(&self) -> Offsets {
        self.control.0.progress().offsets
    }

    pub(crate) fn kept_bytes(&self) -> usize {
        self.control.0.kept_bytes
    }

    /// What can be done to the command while it is read. Cheap to clone.
    pub fn control(&self) -> CommandControl {
        self.control.clone()
    }

    /// Reads what is left and returns how the command ended. May be asked again.
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

    /// Reads what is left and returns all that the command said, what was read before included, and how
    /// it ended. May be asked again.
    pub async fn result(&mut self) -> Result<Output, ClientError> {
        let exit = self.exit().await?;
        Ok(self.control.0.progress().kept.output(exit))
    }

    /// A new handle, which reads on from where this one is, and may lose its connection as often as a
    /// new one. `not_found` if the command's record is gone.
    pub async fn reconnect(&self) -> Result<Self, ClientError> {
        let old = &self.control.0;
        let (server, key) = (old.server.clone(), old.key.clone());
        Self::attach(Shared::new(server, key, self.offsets(), old.kept_bytes)).await
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
    /// An error is the last item; the command may go on all the same.
    type Item = Result<Chunk, ClientError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let chunks = self.get_mut().chunks.get_mut();
        chunks
            .unwrap_or_else(PoisonError::into_inner)
            .poll_next_unpin(cx)
    }
}

/// What can be done to a command, from wherever: all of it does nothing once the command has ended.
#[derive(Clone)]
pub struct CommandControl(Arc<Shared>);

impl fmt::Debug for CommandControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommandHandle")
            .field("session_id", &self.0.key.session_id)
            .field("command_id", self.id())
            .field("offsets", &self.0.progress().offsets)
            .finish_non_exhaustive()
    }
}

impl CommandControl {
    /// The command.
    pub fn id(&self) -> &CommandId {
        &self.0.key.command_id
    }

    /// Whether the connection is lost, so that the command is to be read on once there is another. Tells of every change.
    pub fn lost(&self) -> watch::Receiver<bool> {
        self.0.lost()
    }

    /// Writes to the command's input; returns when that is written.
    pub async fn send_input(&self, data: impl Into<Bytes>) -> Result<(), ClientError> {
        let mut data = data.into();
        while !data.is_empty() && !self.has_ended() {
            let piece = data.split_to(data.len().min(INPUT_BYTES));
            let mut params = self.input();
            params.data = Some(piece.into());
            self.speak(params).await?;
        }
        Ok(())
    }

    /// Ends the command's input.
    pub async fn close_input(&self) -> Result<(), ClientError> {
        let mut params = self.input();
        params.close = true;
        self.speak(params).await
    }

    /// Tells the command's terminal its size.
    pub async fn resize(&self, cols: u16, rows: u16) -> Result<(), ClientError> {
        let mut params = self.input();
        params.size = Some(TerminalSize { cols, rows });
        self.speak(params).await
    }

    /// Sends a signal, named without `SIG`. The command may live on.
    pub async fn signal(&self, signal: &str) -> Result<(), ClientError> {
        self.end_with(signal).await.map(drop)
    }

    /// Kills the command and all it has started. From now on a lost connection stays lost: if the end is
    /// not seen, the stream says `Killed`.
    pub async fn kill(&self) -> Result<(), ClientError> {
        if self.has_ended() {
            return Ok(());
        }
        let killing = self.0.kill();
        let info = self.end_with("KILL").await?;
        killing.confirm(info.and_then(|info| info.exit));
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.0.progress().exit.is_some()
    }

    fn input(&self) -> CommandInputParams {
        CommandInputParams {
            session_id: self.0.key.session_id.clone(),
            command_id: self.id().clone(),
            size: None,
            data: None,
            close: false,
        }
    }

    async fn speak(&self, params: CommandInputParams) -> Result<(), ClientError> {
        if self.has_ended() {
            return Ok(());
        }
        let peer = self.0.server.try_now().await?;
        let answer = peer.call::<CommandInput>(&params).await;
        let Err(error) = answer.map_err(ClientError::from) else {
            return Ok(());
        };
        // It may have ended without our having read so: that is no error, anything else is.
        let ended = is_expired(&error)
            || error.is_conflict() && self.look().await.is_ok_and(|info| info.exit.is_some());
        if ended { Ok(()) } else { Err(error) }
    }

    async fn end_with(&self, signal: &str) -> Result<Option<CommandInfo>, ClientError> {
        if self.has_ended() {
            return Ok(None);
        }
        let peer = self.0.server.try_now().await?;
        let params = CommandKillParams {
            session_id: self.0.key.session_id.clone(),
            command_id: self.id().clone(),
            signal: signal.to_owned(),
            grace_ms: None,
            forget: false,
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

    async fn look(&self) -> Result<CommandInfo, ClientError> {
        let key = CommandKey {
            session_id: self.0.key.session_id.clone(),
            command_id: self.id().clone(),
        };
        let info = self.0.server.call::<CommandGet>(&key).await?;
        self.0.progress().info = Some(info.clone());
        Ok(info)
    }
}

/// Its record is gone, which is so only after its end.
fn is_expired(error: &ClientError) -> bool {
    error.is_not_found() && error.detail().expired
}
