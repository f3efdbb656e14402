//! The supervision of one command from its start to its end.
//!
//! Each command has its own task, so its end does not depend on the call that waits for it.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{AgentCommand, StreamName};
use box_protocol::{Exit, ExitWhy};
use box_sys::ChildExit;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use crate::agent::Agent;
use crate::command::Command;
use crate::head_buffer::OutputTotals;
use crate::pipe::Pipe;

/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;

/// How long the end of a killed command waits for the rest of its process tree.
///
/// A process in an uninterruptible system call may take longer.
const TREE_EXIT_WAIT: Duration = Duration::from_secs(1);

/// The exit of a killed process, also used if the agent did not see its exit.
pub(crate) const KILLED: ChildExit = ChildExit {
    pid: 0,
    code: None,
    signal: Some(9),
};

/// The supervisor of a running command.
pub(crate) struct Supervisor {
    pub(crate) agent: Arc<Agent>,
    pub(crate) command: Arc<Command>,
    pub(crate) reaped: oneshot::Receiver<ChildExit>,
    pub(crate) stdout: Option<Pipe>,
    pub(crate) stderr: Option<Pipe>,
    pub(crate) timeout: Option<Duration>,
    /// How long the command may run without a reader.
    pub(crate) unread_limit: Option<Duration>,
    /// The box's count of OOM kills when the command started.
    pub(crate) oom_kills_at_start: Option<u64>,
}

impl Supervisor {
    /// Sets the reason to out of memory if the kernel has killed for it.
    ///
    /// The killed process is the command itself, or a child that its shell reported by exit code 137.
    fn mark_oom(&self, mut exit: Exit) -> Exit {
        let killed = match exit.why {
            ExitWhy::Signal => exit.signal == Some(9),
            ExitWhy::Exit => exit.code == Some(128 + 9),
            _ => false,
        };
        if killed && self.agent.init().oom_kills() > self.oom_kills_at_start {
            exit.why = ExitWhy::Oom;
        }
        exit
    }

    /// Supervises the command until its end and returns its summary.
    pub(crate) async fn run(mut self) -> AgentCommand {
        let ended = self.until_reaped().await;
        if self.command.is_killed() {
            self.until_tree_gone().await;
        }
        for stream in [StreamName::Stdout, StreamName::Stderr] {
            self.drain(stream);
        }
        self.command.input.shut();
        let exit = self.mark_oom(self.command.exit(ended));
        let totals = OutputTotals::of_ended(&mut self.command.log());
        let summary = self.command.summary(Some(exit), totals);
        self.command.finish(AgentCommand {
            collected: None,
            ..summary.clone()
        });
        self.agent.record_end(&self.command);
        // Processes that the command has left behind may still write.
        for pipe in [self.stdout.take(), self.stderr.take()]
            .into_iter()
            .flatten()
        {
            if !pipe.has_ended() {
                self.agent.orphaned_pipes().drain(pipe);
            }
        }
        summary
    }

    /// Takes output until the command's own process has exited.
    async fn until_reaped(&mut self) -> ChildExit {
        let command = Arc::clone(&self.command);
        let started = command.started_at().map(Instant::from);
        let deadline = |timeout: Option<Duration>| started?.checked_add(timeout?);
        let mut timeout_passed = std::pin::pin!(deadline_passed(deadline(self.timeout)));
        let mut readers = command.watch();
        let mut unread = std::pin::pin!(sleep_until(Instant::now()));
        let mut is_unread = false;
        let mut timed_out = false;
        loop {
            if let Some(limit) = self.unread_limit {
                let no_readers = !readers.borrow_and_update().has_readers();
                if no_readers && !is_unread {
                    let end = Instant::now().checked_add(limit);
                    unread.as_mut().reset(end.unwrap_or_else(far_future));
                }
                is_unread = no_readers;
            }
            let stream = tokio::select! {
                biased;
                ended = &mut self.reaped => match ended {
                    Ok(ended) => return ended,
                    // The agent drops the sender only when it exits.
                    Err(_) => std::future::pending().await,
                },
                () = command.end_requested.notified() => {
                    self.kill();
                    continue;
                }
                () = &mut timeout_passed, if !timed_out => {
                    timed_out = true;
                    command.set_end_reason(ExitWhy::Timeout);
                    self.kill();
                    continue;
                }
                () = &mut unread, if is_unread => {
                    self.unread_limit = None;
                    is_unread = false;
                    command.set_end_reason(ExitWhy::Idle);
                    self.kill();
                    continue;
                }
                _ = readers.changed(), if self.unread_limit.is_some() => continue,
                () = ready(self.stdout.as_ref(), &command) => StreamName::Stdout,
                () = ready(self.stderr.as_ref(), &command) => StreamName::Stderr,
            };
            let bytes = self.read(stream, READ_BYTES);
            self.take(stream, &bytes);
        }
    }

    /// Waits for the rest of a killed process tree.
    ///
    /// A client that learns of the kill may then use the command's ports and files at once.
    async fn until_tree_gone(&self) {
        let end = Instant::now() + TREE_EXIT_WAIT;
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

    fn read(&mut self, stream: StreamName, max: usize) -> Vec<u8> {
        let pipe = self.pipe(stream);
        pipe.as_mut().map(|pipe| pipe.read(max)).unwrap_or_default()
    }

    /// Takes the output that the command left in the pipe.
    ///
    /// Later output comes from its children, which may write without end.
    fn drain(&mut self, stream: StreamName) {
        let mut left = self.pipe(stream).as_ref().map_or(0, Pipe::capacity);
        while left > 0 {
            let pipe = self.pipe(stream).as_mut();
            let bytes = pipe.map(|pipe| pipe.read_unpolled(READ_BYTES.min(left)));
            let bytes = bytes.unwrap_or_default();
            if bytes.is_empty() {
                return;
            }
            left = left.saturating_sub(bytes.len());
            self.take(stream, &bytes);
        }
    }

    fn take(&self, stream: StreamName, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.agent.append_output(&self.command, stream, bytes);
        }
    }
}

async fn deadline_passed(end: Option<Instant>) {
    match end {
        Some(end) => sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// A time beyond every deadline.
fn far_future() -> Instant {
    Instant::now() + Duration::from_hours(24 * 365)
}

/// Waits until a pipe is readable and its output has room.
async fn ready(pipe: Option<&Pipe>, command: &Command) {
    let Some(pipe) = pipe else {
        return std::future::pending().await;
    };
    pipe.readable().await;
    command.wait_for_room().await;
}
