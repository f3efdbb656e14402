//! Reads the output of a command to its exit, over as many connections as necessary.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{CommandChunk, ReadEnd, ReadWhy};
use box_protocol::error::Detail;
use box_protocol::{Adjusted, BoxError, Code, CommandInfo, Exit};
use box_rpc::{CallError, Peer};
use tokio::sync::watch;

use super::chunk_stream::{Begin, ChunkStream, Event, Key};
use crate::chunk::{Capture, Chunk, Offsets, of};
use crate::error::ClientError;
use crate::reconnect::{Decision, Loss, Reconnect};
use box_transports::reconnecting::Remote;

/// State that the reader and the handle share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) server: Remote,
    pub(crate) key: Key,
    pub(crate) capture_limit: usize,
    progress: Mutex<Progress>,
    kill: watch::Sender<KillState>,
    /// Whether the connection is lost and the reader is going to resume.
    lost: watch::Sender<bool>,
}

/// Whether the handle has killed the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KillState {
    NotRequested,
    /// The server has not answered yet.
    Pending,
    /// The server confirmed the kill, with the exit status if it knew one.
    Confirmed(Option<Exit>),
    /// The call failed; the command may or may not have been killed.
    Unknown,
}

/// A pending kill. Dropping it before [`confirm`](Self::confirm) sets the state to `Unknown`.
#[derive(Debug)]
pub(crate) struct PendingKill<'a>(&'a Shared);

impl PendingKill<'_> {
    pub(crate) fn confirm(self, exit: Option<Exit>) {
        self.0.kill.send_replace(KillState::Confirmed(exit));
    }
}

impl Drop for PendingKill<'_> {
    fn drop(&mut self) {
        self.0.kill.send_if_modified(|kill| {
            let is_pending = *kill == KillState::Pending;
            if is_pending {
                *kill = KillState::Unknown;
            }
            is_pending
        });
    }
}

/// How far the command has been read.
#[derive(Debug)]
pub(crate) struct Progress {
    pub(crate) policy: Reconnect,
    pub(crate) offsets: Offsets,
    pub(crate) captured: Capture,
    pub(crate) info: Option<CommandInfo>,
    pub(crate) adjusted: Vec<Adjusted>,
    pub(crate) exit: Option<Exit>,
    pub(crate) failed: Option<ClientError>,
}

impl Shared {
    pub(crate) fn new(server: Remote, key: Key, from: Offsets, capture_limit: usize) -> Arc<Self> {
        Arc::new(Self {
            server,
            key,
            capture_limit,
            progress: Mutex::new(Progress {
                policy: Reconnect::default(),
                offsets: from,
                captured: Capture::new(capture_limit),
                info: None,
                adjusted: Vec::new(),
                exit: None,
                failed: None,
            }),
            kill: watch::Sender::new(KillState::NotRequested),
            lost: watch::Sender::new(false),
        })
    }

    /// Watches whether the connection is lost and the reader is going to resume.
    pub(crate) fn lost(&self) -> watch::Receiver<bool> {
        self.lost.subscribe()
    }

    fn set_lost(&self, lost: bool) {
        self.lost
            .send_if_modified(|was| std::mem::replace(was, lost) != lost);
    }

    pub(crate) fn progress(&self) -> MutexGuard<'_, Progress> {
        // The lock protects assignments only, so a poisoned state is consistent.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a requested kill, after which the reader does not resume.
    pub(crate) fn kill(&self) -> PendingKill<'_> {
        self.progress().policy.on_kill();
        self.kill.send_replace(KillState::Pending);
        PendingKill(self)
    }

    /// Returns the error for a loss after a kill: `Killed` if the server confirmed the kill.
    async fn error_after_kill(&self, lost: ClientError) -> ClientError {
        let mut kill = self.kill.subscribe();
        let settled = kill.wait_for(|kill| *kill != KillState::Pending).await;
        match settled.as_deref() {
            Ok(KillState::Confirmed(_)) => ClientError::Killed,
            _ => lost,
        }
    }
}

/// Reads a command and resumes after lost connections.
#[derive(Debug)]
pub(crate) struct Reader {
    shared: Arc<Shared>,
    /// The request that starts the command, until the command has started.
    begin: Option<Begin>,
    stream: Option<ChunkStream>,
    /// The connection of the stream.
    peer: Option<Peer>,
    /// Number of display chunks that the reader has returned.
    displays_seen: usize,
    /// Number of display chunks to skip: they have no offset, so a new stream repeats them.
    displays_to_skip: usize,
    is_done: bool,
}

/// The result of one step.
enum Step {
    Started,
    Skipped,
    Chunk(Chunk),
    Exit,
}

impl Reader {
    pub(crate) fn new(shared: Arc<Shared>, begin: Option<Begin>) -> Self {
        Self {
            shared,
            begin,
            stream: None,
            peer: None,
            displays_seen: 0,
            displays_to_skip: 0,
            is_done: false,
        }
    }

    /// Starts the command and waits for the `started` chunk.
    pub(crate) async fn started(&mut self) -> Result<(), ClientError> {
        while self.begin.is_some() {
            let step = match self.step().await {
                Ok(step) => step,
                Err(error) => {
                    self.recover(error).await?;
                    continue;
                }
            };
            match step {
                Step::Started | Step::Skipped => {}
                Step::Chunk(_) => return Err(unexpected("output")),
                Step::Exit => return Err(unexpected("an exit")),
            }
        }
        Ok(())
    }

    /// Returns the next chunk; `None` after the exit or an error.
    pub(crate) async fn next(&mut self) -> Option<Result<Chunk, ClientError>> {
        while !self.is_done {
            let error = match self.step().await {
                Ok(Step::Chunk(chunk)) => return Some(Ok(chunk)),
                Ok(Step::Started | Step::Skipped) => continue,
                Ok(Step::Exit) => {
                    self.is_done = true;
                    continue;
                }
                Err(error) => error,
            };
            let Err(error) = self.recover(error).await else {
                continue;
            };
            self.is_done = true;
            let mut progress = self.shared.progress();
            if let (ClientError::Killed, KillState::Confirmed(Some(exit))) =
                (&error, *self.shared.kill.borrow())
            {
                // The answer to the kill carries the exit status.
                progress.exit = Some(exit);
                continue;
            }
            progress.failed = Some(error.clone());
            return Some(Err(error));
        }
        None
    }

    async fn step(&mut self) -> Result<Step, ClientError> {
        if self.stream.is_none() {
            self.open().await?;
        }
        let event = match &mut self.stream {
            Some(stream) => stream.next().await,
            None => None,
        };
        if matches!(event, Some(Event::Chunk(_) | Event::End(..))) {
            self.shared.set_lost(false);
        }
        match event {
            Some(Event::Chunk(CommandChunk::Started(info))) => {
                self.begin = None;
                let mut progress = self.shared.progress();
                progress.policy.on_progress();
                progress.info = Some(*info);
                Ok(Step::Started)
            }
            Some(Event::Chunk(CommandChunk::Display(_))) if self.displays_to_skip > 0 => {
                self.displays_to_skip -= 1;
                Ok(Step::Skipped)
            }
            Some(Event::Chunk(chunk)) => {
                self.displays_seen += usize::from(matches!(chunk, CommandChunk::Display(_)));
                let chunk =
                    Chunk::from_wire(chunk).ok_or_else(|| unexpected("a repeated start"))?;
                let mut progress = self.shared.progress();
                progress.policy.on_progress();
                if let Some((stream, end)) = chunk.end() {
                    *of(&mut progress.offsets, stream) = end;
                }
                progress.captured.add(&chunk);
                Ok(Step::Chunk(chunk))
            }
            Some(Event::Adjusted(adjusted)) => {
                self.shared.progress().adjusted.extend(adjusted);
                Ok(Step::Skipped)
            }
            Some(Event::End(info, read)) => self.ended(*info, read),
            Some(Event::Failed(error)) => {
                self.stream = None;
                Err(error.into())
            }
            None => Err(ClientError::NoExit(None)),
        }
    }

    async fn open(&mut self) -> Result<(), ClientError> {
        self.peer = None;
        let peer = self.shared.server.try_now().await?;
        let peer = self.peer.insert(peer);
        let from = self.shared.progress().offsets;
        let stream = match &self.begin {
            Some(begin) => ChunkStream::begin(peer, &self.shared.key, begin).await?,
            None => ChunkStream::attach(peer, &self.shared.key, from).await?,
        };
        // An attached stream has no `started` chunk; the accepted call shows that the connection works.
        if self.begin.is_none() {
            self.shared.set_lost(false);
        }
        self.stream = Some(stream);
        self.displays_to_skip = self.displays_seen;
        Ok(())
    }

    fn ended(&mut self, info: CommandInfo, read: Option<ReadEnd>) -> Result<Step, ClientError> {
        let why = read.map(|read| read.why);
        let mut progress = self.shared.progress();
        let exit = info.exit;
        progress.info = Some(info);
        match (exit, why) {
            (Some(exit), Some(ReadWhy::Exit) | None) => {
                progress.exit = Some(exit);
                Ok(Step::Exit)
            }
            _ => Err(ClientError::NoExit(why)),
        }
    }

    /// Waits until the reader may resume; returns the error if it may not.
    async fn recover(&mut self, error: ClientError) -> Result<(), ClientError> {
        self.stream = None;
        let Some(loss) = self.loss(&error) else {
            return Err(error);
        };
        let decision = self.shared.progress().policy.on_loss(loss);
        let delay = match decision {
            Decision::After(delay) => delay,
            Decision::Killed => return Err(self.shared.error_after_kill(error).await),
            Decision::GiveUp { losses } => return Err(given_up(losses, error)),
        };
        if let Remote::Peer(peer) = &self.shared.server
            && peer.is_closed()
        {
            // The client cannot reconnect a single peer.
            return Err(given_up(1, error));
        }
        tracing::debug!(command = %self.shared.key.command_id, %error, ?delay, "resuming command output");
        self.shared.set_lost(true);
        let mut kill = self.shared.kill.subscribe();
        let kill_requested = tokio::select! {
            biased;
            _ = kill.wait_for(|kill| *kill != KillState::NotRequested) => true,
            () = tokio::time::sleep(delay) => false,
        };
        if kill_requested {
            return Err(self.shared.error_after_kill(error).await);
        }
        Ok(())
    }

    /// Returns the kind of loss if the error means that only the connection is gone.
    fn loss(&self, error: &ClientError) -> Option<Loss> {
        match error {
            ClientError::Failed(CallError::Lost(_) | CallError::NotSent(_)) => {}
            ClientError::Refused(error) if self.is_transient(error) => {}
            _ => return None,
        }
        let restarts = self.peer.as_ref().is_some_and(Peer::restarts);
        Some(if restarts {
            Loss::Restart
        } else {
            Loss::Broken
        })
    }

    /// Whether a refusal means that a server on the path is gone.
    ///
    /// Before the start of the command such a refusal is final.
    fn is_transient(&self, error: &BoxError) -> bool {
        let is_lasting = || {
            error
                .detail::<Detail>()
                .is_some_and(|detail| detail.lasting || detail.ended.is_some())
        };
        match error.code() {
            Code::Cancelled => true,
            Code::Unavailable | Code::Overloaded => self.begin.is_none() && !is_lasting(),
            _ => false,
        }
    }
}

fn given_up(losses: u32, last: ClientError) -> ClientError {
    ClientError::Disconnected {
        losses,
        last: Box::new(last),
    }
}

/// The error for an event before the `started` chunk.
fn unexpected(event: &str) -> ClientError {
    CallError::Shape(format!("expected the started chunk, got {event}")).into()
}
