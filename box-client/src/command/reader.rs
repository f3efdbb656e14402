//! Reads a command from its beginning to its end, over as many connections as that takes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::actions::{CommandChunk, ReadEnd, ReadWhy};
use box_protocol::error::Detail;
use box_protocol::{Adjusted, BoxError, Code, CommandInfo, Exit};
use box_rpc::{CallError, Peer};
use tokio::sync::watch;

use super::feed::{Begin, Feed, Key, Told};
use crate::chunk::{Chunk, Kept, Offsets, of};
use crate::error::ClientError;
use crate::reconnect::{Decision, Loss, Reconnect};
use box_transports::link::Remote;

/// What the reader and the handle both know.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) server: Remote,
    pub(crate) key: Key,
    pub(crate) kept_bytes: usize,
    progress: Mutex<Progress>,
    kill: watch::Sender<Kill>,
    /// The connection is lost, and the command is to be read on.
    lost: watch::Sender<bool>,
}

/// Whether the command was killed by its handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kill {
    Unasked,
    /// The answer is awaited.
    Asked,
    /// Answered, with the end that was told.
    Answered(Option<Exit>),
    /// Nobody knows whether it came to that.
    Unanswered,
}

/// A kill on its way. Dropped before it is answered, it counts as unanswered.
#[derive(Debug)]
pub(crate) struct Killing<'a>(&'a Shared);

impl Killing<'_> {
    pub(crate) fn answered(self, exit: Option<Exit>) {
        self.0.kill.send_replace(Kill::Answered(exit));
    }
}

impl Drop for Killing<'_> {
    fn drop(&mut self) {
        self.0.kill.send_if_modified(|kill| {
            let asked = *kill == Kill::Asked;
            if asked {
                *kill = Kill::Unanswered;
            }
            asked
        });
    }
}

/// How far it has come.
#[derive(Debug)]
pub(crate) struct Progress {
    pub(crate) policy: Reconnect,
    pub(crate) offsets: Offsets,
    pub(crate) kept: Kept,
    pub(crate) info: Option<CommandInfo>,
    pub(crate) adjusted: Vec<Adjusted>,
    pub(crate) exit: Option<Exit>,
    pub(crate) failed: Option<ClientError>,
}

impl Shared {
    pub(crate) fn new(server: Remote, key: Key, from: Offsets, kept_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            server,
            key,
            kept_bytes,
            progress: Mutex::new(Progress {
                policy: Reconnect::default(),
                offsets: from,
                kept: Kept::new(kept_bytes),
                info: None,
                adjusted: Vec::new(),
                exit: None,
                failed: None,
            }),
            kill: watch::Sender::new(Kill::Unasked),
            lost: watch::Sender::new(false),
        })
    }

    /// Whether the connection is lost and the command is to be read on.
    pub(crate) fn lost(&self) -> watch::Receiver<bool> {
        self.lost.subscribe()
    }

    fn set_lost(&self, lost: bool) {
        self.lost
            .send_if_modified(|was| std::mem::replace(was, lost) != lost);
    }

    pub(crate) fn progress(&self) -> MutexGuard<'_, Progress> {
        // Only assignments run under the lock.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on nothing is read on.
    pub(crate) fn kill(&self) -> Killing<'_> {
        self.progress().policy.kill();
        self.kill.send_replace(Kill::Asked);
        Killing(self)
    }

    /// What is told of a loss after a kill: that it was killed, if that was answered.
    async fn killed(&self, lost: ClientError) -> ClientError {
        let mut kill = self.kill.subscribe();
        let settled = kill.wait_for(|kill| *kill != Kill::Asked).await;
        match settled.as_deref() {
            Ok(Kill::Answered(_)) => ClientError::Killed,
            _ => lost,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Reader {
    shared: Arc<Shared>,
    /// How to begin it, until it is known to have begun.
    begin: Option<Begin>,
    feed: Option<Feed>,
    /// Whom the feed is from.
    peer: Option<Peer>,
    /// What it has shown was told so often, and this often it will be told again: that has no offset.
    shown: usize,
    again: usize,
    over: bool,
}

/// What came of one step.
enum Step {
    Started,
    Nothing,
    Chunk(Chunk),
    Exit,
}

impl Reader {
    pub(crate) fn new(shared: Arc<Shared>, begin: Option<Begin>) -> Self {
        Self {
            shared,
            begin,
            feed: None,
            peer: None,
            shown: 0,
            again: 0,
            over: false,
        }
    }

    /// Begins the command, and waits for the word that it has begun.
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
                Step::Started | Step::Nothing => {}
                Step::Chunk(_) => return Err(early("output")),
                Step::Exit => return Err(early("an end")),
            }
        }
        Ok(())
    }

    /// The next chunk; `None` once the command has ended, or after an error.
    pub(crate) async fn next(&mut self) -> Option<Result<Chunk, ClientError>> {
        while !self.over {
            let error = match self.step().await {
                Ok(Step::Chunk(chunk)) => return Some(Ok(chunk)),
                Ok(Step::Started | Step::Nothing) => continue,
                Ok(Step::Exit) => {
                    self.over = true;
                    continue;
                }
                Err(error) => error,
            };
            let Err(error) = self.recover(error).await else {
                continue;
            };
            self.over = true;
            let mut progress = self.shared.progress();
            if let (ClientError::Killed, Kill::Answered(Some(exit))) =
                (&error, *self.shared.kill.borrow())
            {
                // The end was seen, if not by this stream.
                progress.exit = Some(exit);
                continue;
            }
            progress.failed = Some(error.clone());
            return Some(Err(error));
        }
        None
    }

    async fn step(&mut self) -> Result<Step, ClientError> {
        if self.feed.is_none() {
            self.open().await?;
        }
        let told = match &mut self.feed {
            Some(feed) => feed.next().await,
            None => None,
        };
        if matches!(told, Some(Told::Chunk(_) | Told::End(..))) {
            self.shared.set_lost(false);
        }
        match told {
            Some(Told::Chunk(CommandChunk::Started(info))) => {
                self.begin = None;
                let mut progress = self.shared.progress();
                progress.policy.progress();
                progress.info = Some(*info);
                Ok(Step::Started)
            }
            Some(Told::Chunk(CommandChunk::Display(_))) if self.again > 0 => {
                self.again -= 1;
                Ok(Step::Nothing)
            }
            Some(Told::Chunk(chunk)) => {
                self.shown += usize::from(matches!(chunk, CommandChunk::Display(_)));
                let chunk = Chunk::told(chunk).ok_or_else(|| early("it again"))?;
                let mut progress = self.shared.progress();
                progress.policy.progress();
                if let Some((stream, end)) = chunk.end() {
                    *of(&mut progress.offsets, stream) = end;
                }
                progress.kept.add(&chunk);
                Ok(Step::Chunk(chunk))
            }
            Some(Told::Adjusted(adjusted)) => {
                self.shared.progress().adjusted.extend(adjusted);
                Ok(Step::Nothing)
            }
            Some(Told::End(info, read)) => self.ended(*info, read),
            Some(Told::Failed(error)) => {
                self.feed = None;
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
        let feed = match &self.begin {
            Some(begin) => Feed::begin(peer, &self.shared.key, begin).await?,
            None => Feed::attach(peer, &self.shared.key, from).await?,
        };
        // Whoever attaches is not told that it has begun: that the call was taken has to do.
        if self.begin.is_none() {
            self.shared.set_lost(false);
        }
        self.feed = Some(feed);
        self.again = self.shown;
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

    /// Waits until it is time to read on, or says why there is no reading on.
    async fn recover(&mut self, error: ClientError) -> Result<(), ClientError> {
        self.feed = None;
        let Some(loss) = self.loss(&error) else {
            return Err(error);
        };
        let decision = self.shared.progress().policy.lost(loss);
        let pause = match decision {
            Decision::After(pause) => pause,
            Decision::Killed => return Err(self.shared.killed(error).await),
            Decision::GiveUp { losses } => return Err(given_up(losses, error)),
        };
        if let Remote::Peer(peer) = &self.shared.server
            && peer.is_closed()
        {
            // Nobody makes another connection.
            return Err(given_up(1, error));
        }
        tracing::debug!(command = %self.shared.key.command_id, %error, ?pause, "reading on");
        self.shared.set_lost(true);
        let mut kill = self.shared.kill.subscribe();
        let asked = tokio::select! {
            biased;
            _ = kill.wait_for(|kill| *kill != Kill::Unasked) => true,
            () = tokio::time::sleep(pause) => false,
        };
        if asked {
            return Err(self.shared.killed(error).await);
        }
        Ok(())
    }

    /// Whether an error means that the connection is gone, the command perhaps not.
    fn loss(&self, error: &ClientError) -> Option<Loss> {
        match error {
            ClientError::Failed(CallError::Lost(_) | CallError::NotSent(_)) => {}
            ClientError::Refused(error) if self.is_passing(error) => {}
            _ => return None,
        }
        let restarts = self.peer.as_ref().is_some_and(Peer::restarts);
        Some(if restarts {
            Loss::Restart
        } else {
            Loss::Broken
        })
    }

    /// An answer that says no more than that somebody on the way is gone. What answers so before
    /// anything has begun means it.
    fn is_passing(&self, error: &BoxError) -> bool {
        let lasting = || {
            error
                .detail::<Detail>()
                .is_some_and(|detail| detail.lasting || detail.ended.is_some())
        };
        match error.code() {
            Code::Cancelled => true,
            Code::Unavailable | Code::Overloaded => self.begin.is_none() && !lasting(),
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

/// The first word must be that it has begun.
fn early(what: &str) -> ClientError {
    CallError::Shape(format!(
        "expected the word that the command has started, got {what}"
    ))
    .into()
}
