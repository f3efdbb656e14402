//! One command from its start to its end. It lives as a task of its own, so that its end does not depend on who waits for it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use box_protocol::actions::{AgentCommand, StreamName};
use box_protocol::{BoxError, CommandId, Exit, ExitWhy, PerStream};
use box_sys::Ended;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::sleep_until;

use crate::agent::Agent;
use crate::keep::{Keep, Log, Piece, Sum, pieces};
use crate::pipe::Pipe;

/// Bytes read at once.
const READ: usize = 32 << 10;

/// The most pieces that one read makes: two, at the end of a slot's ring.
pub(crate) const PIECES: usize = 2;

/// What everybody may know of a command.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) id: CommandId,
    pub(crate) process: box_sys::Command,
    /// Nobody's call is open until its end.
    pub(crate) is_detached: bool,
    begun: Instant,
    /// Why it is being ended, if somebody wants that.
    why: Mutex<Option<ExitWhy>>,
    wanted: Notify,
    log: Mutex<Log>,
    /// Changes whenever the log has grown.
    pub(crate) grown: watch::Sender<()>,
    /// Its end, once nothing more comes.
    pub(crate) ended: watch::Sender<Option<AgentCommand>>,
}

impl Command {
    pub(crate) fn new(
        id: CommandId,
        process: box_sys::Command,
        log: Log,
        is_detached: bool,
    ) -> Self {
        Self {
            id,
            process,
            is_detached,
            begun: Instant::now(),
            why: Mutex::default(),
            wanted: Notify::new(),
            log: Mutex::new(log),
            grown: watch::Sender::default(),
            ended: watch::Sender::default(),
        }
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn why(&self) -> MutexGuard<'_, Option<ExitWhy>> {
        self.why.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that its end is wanted, and why. The first reason is the one that counts.
    pub(crate) fn expect_end(&self, why: ExitWhy) {
        self.why().get_or_insert(why);
    }

    /// Wants its whole tree to end.
    pub(crate) fn end(&self, why: ExitWhy) {
        self.expect_end(why);
        self.wanted.notify_one();
    }

    /// How it is now, before its end.
    pub(crate) fn told(&self) -> AgentCommand {
        self.telling(None, self.log().sum())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid.unsigned_abs()
    }

    fn telling(&self, exit: Option<Exit>, sum: Sum) -> AgentCommand {
        AgentCommand {
            command_id: self.id.clone(),
            pid: self.pid(),
            exit,
            duration_ms: u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX),
            size: sum.size,
            dropped: sum.dropped,
            collected: sum.collected,
            spooled: sum.spooled,
        }
    }

    fn exit(&self, ended: Ended) -> Exit {
        let by_itself = if ended.signal.is_some() {
            ExitWhy::Signal
        } else {
            ExitWhy::Exit
        };
        Exit {
            code: ended.code,
            signal: ended.signal,
            why: self.why().unwrap_or(by_itself),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }

    /// Waits for its end.
    pub(crate) async fn end_seen(&self) -> Result<AgentCommand, BoxError> {
        let mut ended = self.ended.subscribe();
        let told = ended.wait_for(Option::is_some).await;
        let told = told.ok().and_then(|told| told.clone());
        told.ok_or_else(|| BoxError::internal("the end of the command was not seen"))
    }
}

/// A command that runs.
pub(crate) struct Life {
    pub(crate) agent: Arc<Agent>,
    pub(crate) command: Arc<Command>,
    pub(crate) reaped: oneshot::Receiver<Ended>,
    pub(crate) stdout: Option<Pipe>,
    pub(crate) stderr: Option<Pipe>,
    /// Held so that the command's input does not end.
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) keep: Keep,
    pub(crate) timeout: Option<Duration>,
}

impl Life {
    /// Lives it, and gives what there is to say of it.
    pub(crate) async fn live(mut self) -> AgentCommand {
        let ended = self.until_reaped().await;
        for stream in [StreamName::Stdout, StreamName::Stderr] {
            self.drain(stream).await;
        }
        let exit = self.command.exit(ended);
        let sum = match std::mem::replace(&mut self.keep, Keep::Log) {
            Keep::First { stdout, stderr, .. } => Sum::of_first(stdout, stderr),
            Keep::Log => self.command.log().sum(),
            Keep::Pass { offsets, .. } => Sum {
                size: offsets,
                dropped: PerStream::default(),
                spooled: PerStream::default(),
                collected: None,
            },
        };
        let told = self.command.telling(Some(exit), sum);
        let known = AgentCommand {
            collected: None,
            ..told.clone()
        };
        self.agent.ended(&self.command);
        self.command.ended.send_replace(Some(known));
        // What the command has left running may go on writing.
        for pipe in [self.stdout.take(), self.stderr.take()]
            .into_iter()
            .flatten()
        {
            if !pipe.has_ended() {
                tokio::spawn(pipe.discard());
            }
        }
        drop(self.stdin);
        told
    }

    /// Takes output until the command's own process has ended.
    async fn until_reaped(&mut self) -> Ended {
        let deadline = self
            .timeout
            .and_then(|timeout| self.command.begun.checked_add(timeout));
        let mut over = std::pin::pin!(async {
            match deadline {
                Some(deadline) => sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        });
        let mut timed_out = false;
        loop {
            let stream = tokio::select! {
                biased;
                ended = &mut self.reaped => match ended {
                    Ok(ended) => return ended,
                    // The table of the living is gone, and so is the agent.
                    Err(_) => std::future::pending().await,
                },
                () = self.command.wanted.notified() => {
                    self.kill();
                    continue;
                }
                () = &mut over, if !timed_out => {
                    timed_out = true;
                    self.command.expect_end(ExitWhy::Timeout);
                    self.kill();
                    continue;
                }
                () = ready(self.stdout.as_ref(), &self.keep) => StreamName::Stdout,
                () = ready(self.stderr.as_ref(), &self.keep) => StreamName::Stderr,
            };
            let bytes = self.read(stream, READ);
            for piece in self.take(stream, bytes) {
                // There is room for it, so that a reader who does not read cannot hold up the clock.
                self.hand_over(piece).await;
            }
        }
    }

    fn kill(&self) {
        self.agent.init().kill_tree(&self.command.process);
    }

    fn pipe(&mut self, stream: StreamName) -> &mut Option<Pipe> {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    fn read(&mut self, stream: StreamName, most: usize) -> Vec<u8> {
        let pipe = self.pipe(stream);
        pipe.as_mut()
            .map(|pipe| pipe.read(most))
            .unwrap_or_default()
    }

    /// Takes what is in the pipe at the end of the command, and not what others go on writing to it.
    async fn drain(&mut self, stream: StreamName) {
        let mut left = self.pipe(stream).as_ref().map_or(0, Pipe::capacity);
        while left > 0 {
            let bytes = self.read(stream, READ.min(left));
            if bytes.is_empty() {
                return;
            }
            left = left.saturating_sub(bytes.len());
            for piece in self.take(stream, bytes) {
                self.hand_over(piece).await;
            }
        }
    }

    /// Keeps output, or gives what is to be passed on of it.
    fn take(&mut self, stream: StreamName, bytes: Vec<u8>) -> impl Iterator<Item = Piece> + use<> {
        let mut to_pass = None;
        match &mut self.keep {
            Keep::First {
                stdout,
                stderr,
                slot,
            } => {
                let first = match stream {
                    StreamName::Stdout => stdout,
                    StreamName::Stderr => stderr,
                };
                first.take(stream, &bytes, slot.as_ref());
            }
            Keep::Log => {
                self.command.log().of(stream).take(&bytes);
                self.command.grown.send_replace(());
            }
            Keep::Pass { slot, offsets, .. } => {
                let offset = match stream {
                    StreamName::Stdout => &mut offsets.stdout,
                    StreamName::Stderr => &mut offsets.stderr,
                };
                let length = bytes.len() as u64;
                to_pass = Some(pieces(stream, *offset, bytes, slot.as_ref()));
                *offset += length;
            }
        }
        to_pass.into_iter().flatten()
    }

    /// A reader that is gone wants nothing; its call has the command killed.
    async fn hand_over(&self, piece: Piece) {
        if let Keep::Pass { to, .. } = &self.keep {
            let _ = to.send(piece).await;
        }
    }
}

/// Waits until a pipe can be read and what is read can go somewhere.
async fn ready(pipe: Option<&Pipe>, keep: &Keep) {
    let Some(pipe) = pipe else {
        return std::future::pending().await;
    };
    pipe.readable().await;
    if let Keep::Pass { to, .. } = keep
        && to.reserve_many(PIECES).await.is_err()
    {
        std::future::pending::<()>().await;
    }
}
