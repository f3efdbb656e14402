//! One interpreter process from its start to its end, and the runs in it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{Language, OutputMode, Stdin};
use box_protocol::{BoxError, Env};
use box_sys::{ChildExit, Init, ProcessTime};
use rustix::process::{Pid, Signal};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, timeout};

use super::ipc::{Done, IpcDir, Streams};
use super::language::{Settings, argv, fits_line, go_line};
use crate::agent::Agent;
use crate::supervise::KILLED;

/// How long an interrupted interpreter may take to end its run.
///
/// The agent kills it after that. A busy machine needs a while.
const INTERRUPT_GRACE: Duration = Duration::from_secs(2);

/// Time between interrupts.
///
/// A run that has just started may have missed the first one.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(500);

/// Time between two checks whether a starting interpreter has read the line of its run.
const LINE_INTERVAL: Duration = Duration::from_millis(5);

/// Time between two kills of the processes that a run has started.
const KILL_INTERVAL: Duration = Duration::from_millis(10);

/// A started interpreter, which may have exited since.
#[derive(Debug)]
pub(super) struct Interpreter {
    process: Arc<box_sys::Command>,
    reaped: oneshot::Receiver<ChildExit>,
    ipc: IpcDir,
    runs: u64,
}

/// The parameters of a run.
pub(super) struct RunRequest<'a> {
    pub(super) text: &'a str,
    pub(super) settings: Settings<'a>,
    pub(super) stdin: Stdin,
    pub(super) output: OutputMode,
}

/// A run in progress in an interpreter.
#[derive(Debug)]
pub(crate) struct ActiveRun {
    process: Arc<box_sys::Command>,
    since: ProcessTime,
    stop: Notify,
    interrupt: Notify,
}

/// How a run ended.
pub(super) enum RunEnd {
    /// The interpreter has reported the end and waits for the next run.
    Done(Done),
    /// The interpreter has exited.
    Exited(ChildExit),
}

impl ActiveRun {
    pub(crate) fn pid(&self) -> i32 {
        self.process.pid
    }

    /// Requests the end of the run and of all processes it has started.
    pub(crate) fn stop(&self) {
        self.stop.notify_one();
    }

    /// Signals the processes that the run has started.
    ///
    /// A terminating signal also interrupts the interpreter.
    pub(crate) fn signal(&self, init: &Init, signal: i32) {
        const TERMINATING: [Signal; 4] = [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM];
        if TERMINATING
            .iter()
            .any(|terminating| terminating.as_raw() == signal)
        {
            self.interrupt.notify_one();
        }
        init.signal_started_since(&self.process, self.since, signal);
    }

    fn send_interrupt(&self) {
        // The pid is not reused before the agent reaps the process.
        if let Some(pid) = Pid::from_raw(self.process.pid) {
            let _ = rustix::process::kill_process(pid, Signal::INT);
        }
    }
}

impl Interpreter {
    /// Starts an interpreter with the exports of the previous one.
    pub(super) fn start(
        agent: &Agent,
        language: Language,
        cwd: &str,
        env: Env,
        exports: Option<&[u8]>,
    ) -> Result<Self, BoxError> {
        let ipc = IpcDir::new(exports).map_err(|error| ipc_error(&error))?;
        let argv = argv(language, &ipc.path);
        let process = agent.start_interpreter(argv, env, cwd)?;
        Ok(Self {
            reaped: agent.watch_exit(&process),
            process: Arc::new(process),
            ipc,
            runs: 0,
        })
    }

    /// Whether the interpreter has exited.
    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(
            self.reaped.try_recv(),
            Err(oneshot::error::TryRecvError::Empty)
        )
    }

    /// Starts a run.
    pub(super) fn start_run(
        &mut self,
        language: Language,
        request: &RunRequest<'_>,
    ) -> Result<(Arc<ActiveRun>, Streams), BoxError> {
        self.send_run(language, request)
            .map_err(|error| ipc_error(&error))
    }

    fn send_run(
        &mut self,
        language: Language,
        request: &RunRequest<'_>,
    ) -> io::Result<(Arc<ActiveRun>, Streams)> {
        let streams = self.ipc.streams(request.stdin, request.output)?;
        let inline = fits_line(language, request.text);
        if !inline {
            self.ipc.write_file("text", request.text.as_bytes())?;
        }
        let has_settings = !request.settings.is_empty();
        if has_settings {
            let (before, after) = request.settings.files(language);
            self.ipc.write_file("before", before.as_bytes())?;
            self.ipc.write_file("after", after.as_bytes())?;
        }
        self.runs += 1;
        let run = ActiveRun {
            process: Arc::clone(&self.process),
            since: ProcessTime::now(),
            stop: Notify::new(),
            interrupt: Notify::new(),
        };
        let has_input = self.ipc.has_input();
        let text = inline.then_some(request.text);
        let line = go_line(language, self.runs, has_settings, has_input, text);
        self.ipc.send_line(&line)?;
        Ok((Arc::new(run), streams))
    }

    /// Prepares the next run. After an error the next run tries again and reports it.
    pub(super) fn prepare(&mut self, output: OutputMode) {
        let _ = self.ipc.prepare(output);
    }

    /// Takes the exports reported since the last call.
    pub(super) fn exports(&mut self, has_ended: bool) -> Option<Vec<u8>> {
        self.ipc.exports(has_ended)
    }

    /// Waits for the end of a run, and enforces the end once it is requested.
    pub(super) async fn finish(&mut self, agent: &Agent, run: &ActiveRun) -> RunEnd {
        let mut wanted = false;
        loop {
            // A signal would end an interpreter that starts, and one that waits ignores it.
            if wanted && self.ipc.has_read_line() {
                wanted = false;
                run.send_interrupt();
            }
            tokio::select! {
                biased;
                end = self.wait_run_end() => return self.or_kill(agent, end).await,
                () = run.stop.notified() => break,
                () = run.interrupt.notified() => wanted = true,
                () = sleep(LINE_INTERVAL), if wanted => {}
            }
        }
        run.send_interrupt();
        let stop_began = Instant::now();
        let (mut end, mut next_interrupt) = (None, stop_began + INTERRUPT_INTERVAL);
        while end.is_none() && stop_began.elapsed() < INTERRUPT_GRACE {
            if next_interrupt <= Instant::now() {
                run.send_interrupt();
                next_interrupt += INTERRUPT_INTERVAL;
            }
            self.kill_children(agent, run);
            end = timeout(KILL_INTERVAL, self.wait_run_end()).await.ok();
        }
        self.kill_children(agent, run);
        let end = end.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()));
        self.or_kill(agent, end).await
    }

    fn kill_children(&self, agent: &Agent, run: &ActiveRun) {
        let kill = Signal::KILL.as_raw();
        agent
            .init()
            .signal_started_since(&self.process, run.since, kill);
    }

    async fn wait_run_end(&mut self) -> io::Result<RunEnd> {
        tokio::select! {
            biased;
            done = self.ipc.wait_done(self.runs) => done.map(RunEnd::Done),
            ended = &mut self.reaped => Ok(RunEnd::Exited(ended.unwrap_or(KILLED))),
        }
    }

    /// Kills an interpreter that does not end its run or that sent an invalid message.
    async fn or_kill(&mut self, agent: &Agent, end: io::Result<RunEnd>) -> RunEnd {
        match end {
            Ok(RunEnd::Exited(ended)) => {
                agent.init().release_mark(&self.process);
                RunEnd::Exited(ended)
            }
            Ok(done) => done,
            Err(_) => RunEnd::Exited(self.kill(agent).await),
        }
    }

    /// Kills the interpreter with its process tree.
    async fn kill(&mut self, agent: &Agent) -> ChildExit {
        agent.init().kill_tree(&self.process);
        let ended = (&mut self.reaped).await.unwrap_or(KILLED);
        agent.init().release_mark(&self.process);
        ended
    }

    /// Kills the interpreter with its process tree, if it still runs.
    pub(super) async fn end(mut self, agent: &Agent) {
        if !self.has_ended() {
            self.kill(agent).await;
        }
    }

    /// Kills only the interpreter. The processes started in it continue.
    pub(super) async fn kill_alone(mut self, agent: &Agent) {
        if let (false, Some(pid)) = (self.has_ended(), Pid::from_raw(self.process.pid)) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            let _ = (&mut self.reaped).await;
        }
        agent.init().release_mark(&self.process);
    }
}

fn ipc_error(error: &io::Error) -> BoxError {
    BoxError::unavailable(format!(
        "shell: cannot create its files in /tmp: {}",
        error.kind()
    ))
}
