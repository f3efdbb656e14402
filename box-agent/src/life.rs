//! One command from its start to its end. It lives as a task of its own, so that its end does not depend on who waits for it.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{AgentCommand, StreamName};
use box_protocol::{Exit, ExitWhy};
use box_sys::Ended;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::agent::Agent;
use crate::command::Command;
use crate::keep::{Firsts, Sum};
use crate::pipe::Pipe;

/// Bytes read at once.
const READ: usize = 64 << 10;

/// How long the end of a killed command waits for what else was killed with it. A process in the middle of a call that cannot
/// be interrupted may take longer.
const GONE_WITHIN: Duration = Duration::from_secs(1);

/// How everything ends that is killed, or whose end nobody saw.
pub(crate) const KILLED: Ended = Ended {
    pid: 0,
    code: None,
    signal: Some(9),
};

/// Where output goes.
#[derive(Debug)]
pub(crate) enum Keep {
    /// The first of it to the answer.
    First(Firsts),
    /// All of it to the command's log.
    Log,
}

/// A command that runs.
pub(crate) struct Life {
    pub(crate) agent: Arc<Agent>,
    pub(crate) command: Arc<Command>,
    pub(crate) reaped: oneshot::Receiver<Ended>,
    pub(crate) stdout: Option<Pipe>,
    pub(crate) stderr: Option<Pipe>,
    pub(crate) keep: Keep,
    pub(crate) timeout: Option<Duration>,
    /// How long it may go unread.
    pub(crate) alone: Option<Duration>,
    /// Processes of the box that had been killed for memory when it began.
    pub(crate) killed_before: Option<u64>,
}

impl Life {
    /// The same end, said to be for want of memory if the kernel has killed for that meanwhile: the command itself, or what its
    /// shell waited for and told of by a code.
    fn for_memory(&self, mut exit: Exit) -> Exit {
        let killed = match exit.why {
            ExitWhy::Signal => exit.signal == Some(9),
            ExitWhy::Exit => exit.code == Some(128 + 9),
            _ => false,
        };
        if killed && self.agent.init().oom_kills() > self.killed_before {
            exit.why = ExitWhy::Oom;
        }
        exit
    }

    /// Lives it, and gives what there is to say of it.
    pub(crate) async fn live(mut self) -> AgentCommand {
        let ended = self.until_reaped().await;
        if self.command.is_killed() {
            self.until_gone().await;
        }
        for stream in [StreamName::Stdout, StreamName::Stderr] {
            self.drain(stream);
        }
        self.command.input.shut();
        let exit = self.for_memory(self.command.exit(ended));
        let sum = match std::mem::replace(&mut self.keep, Keep::Log) {
            Keep::First(firsts) => Sum::of_firsts(firsts),
            Keep::Log => Sum::of(&self.command.log()),
        };
        let told = self.command.telling(Some(exit), sum);
        self.command.has_ended_as(AgentCommand {
            collected: None,
            ..told.clone()
        });
        self.agent.ended(&self.command);
        // What the command has left running may go on writing.
        for pipe in [self.stdout.take(), self.stderr.take()]
            .into_iter()
            .flatten()
        {
            if !pipe.has_ended() {
                self.agent.leftovers().read_on(pipe);
            }
        }
        told
    }

    /// Takes output until the command's own process has ended.
    async fn until_reaped(&mut self) -> Ended {
        let command = Arc::clone(&self.command);
        let begun = command.begun_at().map(Instant::from);
        let deadline = |timeout: Option<Duration>| begun?.checked_add(timeout?);
        let mut over = std::pin::pin!(strike(deadline(self.timeout)));
        let mut readers = command.watch();
        let mut alone = std::pin::pin!(sleep_until(Instant::now()));
        let mut is_alone = false;
        let mut timed_out = false;
        loop {
            if let Some(limit) = self.alone {
                let nobody = !readers.borrow_and_update().is_read();
                if nobody && !is_alone {
                    let end = Instant::now().checked_add(limit);
                    alone.as_mut().reset(end.unwrap_or_else(far_away));
                }
                is_alone = nobody;
            }
            let stream = tokio::select! {
                biased;
                ended = &mut self.reaped => match ended {
                    Ok(ended) => return ended,
                    // The table of the living is gone, and so is the agent.
                    Err(_) => std::future::pending().await,
                },
                () = command.wanted.notified() => {
                    self.kill();
                    continue;
                }
                () = &mut over, if !timed_out => {
                    timed_out = true;
                    command.expect_end(ExitWhy::Timeout);
                    self.kill();
                    continue;
                }
                () = &mut alone, if is_alone => {
                    self.alone = None;
                    is_alone = false;
                    command.expect_end(ExitWhy::Idle);
                    self.kill();
                    continue;
                }
                _ = readers.changed(), if self.alone.is_some() => continue,
                () = ready(self.stdout.as_ref(), &command, &self.keep) => StreamName::Stdout,
                () = ready(self.stderr.as_ref(), &command, &self.keep) => StreamName::Stderr,
            };
            let bytes = self.read(stream, READ);
            self.take(stream, &bytes);
        }
    }

    /// Waits for the rest of a killed tree: whoever is answered that it was killed may use its ports and files at once.
    async fn until_gone(&self) {
        let end = Instant::now() + GONE_WITHIN;
        let mut pause = Duration::from_millis(1);
        while let Some(process) = self.command.own_process()
            && self.agent.init().is_alive(process)
            && Instant::now() < end
        {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    fn kill(&self) {
        self.command.kill_tree(&self.agent.init());
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

    /// What is left in the pipe is the command's own; what comes later is its children's, who may write for ever.
    fn drain(&mut self, stream: StreamName) {
        let mut left = self.pipe(stream).as_ref().map_or(0, Pipe::capacity);
        while left > 0 {
            let pipe = self.pipe(stream).as_mut();
            let bytes = pipe.map(|pipe| pipe.read_now(READ.min(left)));
            let bytes = bytes.unwrap_or_default();
            if bytes.is_empty() {
                return;
            }
            left = left.saturating_sub(bytes.len());
            self.take(stream, &bytes);
        }
    }

    fn take(&mut self, stream: StreamName, bytes: &[u8]) {
        match &mut self.keep {
            Keep::First(firsts) => firsts.take(stream, bytes),
            Keep::Log if bytes.is_empty() => {}
            Keep::Log => self.agent.keep_output(&self.command, stream, bytes),
        }
    }
}

async fn strike(end: Option<Instant>) {
    match end {
        Some(end) => sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// Later than anything that is waited for.
fn far_away() -> Instant {
    Instant::now() + Duration::from_hours(24 * 365)
}

/// Waits until a pipe can be read and what is read can go somewhere.
async fn ready(pipe: Option<&Pipe>, command: &Command, keep: &Keep) {
    let Some(pipe) = pipe else {
        return std::future::pending().await;
    };
    pipe.readable().await;
    if matches!(keep, Keep::Log) {
        command.room().await;
    }
}
