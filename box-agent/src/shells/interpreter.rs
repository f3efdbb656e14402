//! One interpreter process in its loop, from its start to its end, and a run's turn in it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{Language, OutputMode, Stdin};
use box_protocol::{BoxError, Env};
use box_sys::{Ended, Init, Moment};
use rustix::process::{Pid, Signal};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout};

use super::exchange::{Done, Exchange, Streams};
use super::language::{Settings, argv, fits_line, go_line};
use crate::agent::Agent;
use crate::supervise::KILLED;

/// How long an interpreter has to let go of a run that is to end, before it is ended itself. On a busy machine that takes a while.
const GRACE: Duration = Duration::from_secs(2);

/// How often it is interrupted meanwhile: a run that has only just begun may have missed the first interrupt.
const AGAIN: Duration = Duration::from_millis(500);

/// How often what a run starts meanwhile is ended.
const ROUND: Duration = Duration::from_millis(10);

/// An interpreter that was started, and may have ended since.
#[derive(Debug)]
pub(super) struct Interpreter {
    process: Arc<box_sys::Command>,
    reaped: oneshot::Receiver<Ended>,
    exchange: Exchange,
    runs: u64,
}

/// What a run is given.
pub(super) struct Run<'a> {
    pub(super) text: &'a str,
    pub(super) settings: Settings<'a>,
    pub(super) stdin: Stdin,
    pub(super) output: OutputMode,
}

/// A run that is under way in an interpreter.
#[derive(Debug)]
pub(crate) struct Turn {
    process: Arc<box_sys::Command>,
    since: Moment,
    stop: Notify,
}

/// How a run ended.
pub(super) enum End {
    /// Its interpreter says so, and waits for the next.
    Done(Done),
    /// With its interpreter.
    Gone(Ended),
}

impl Turn {
    pub(crate) fn pid(&self) -> i32 {
        self.process.pid
    }

    /// Wants the run to end, with all it has started.
    pub(crate) fn stop(&self) {
        self.stop.notify_one();
    }

    /// Signals what the run has started. Its interpreter is interrupted by what usually ends a program.
    pub(crate) fn signal(&self, init: &Init, signal: i32) {
        const ENDING: [Signal; 4] = [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM];
        if ENDING.iter().any(|ending| ending.as_raw() == signal) {
            self.interrupt();
        }
        init.signal_younger(&self.process, self.since, signal);
    }

    fn interrupt(&self) {
        // One that has just ended needs none; its number is not given away before it was reaped.
        if let Some(pid) = Pid::from_raw(self.process.pid) {
            let _ = rustix::process::kill_process(pid, Signal::INT);
        }
    }
}

impl Interpreter {
    /// Starts one, with the exports that the one before left behind.
    pub(super) fn start(
        agent: &Agent,
        language: Language,
        cwd: &str,
        env: Env,
        exports: Option<&[u8]>,
    ) -> Result<Self, BoxError> {
        let exchange = Exchange::new(exports).map_err(|error| no_exchange(&error))?;
        let argv = argv(language, &exchange.path);
        let process = agent.start_interpreter(argv, env, cwd)?;
        Ok(Self {
            reaped: agent.watch_exit(&process),
            process: Arc::new(process),
            exchange,
            runs: 0,
        })
    }

    /// Whether it has ended by itself.
    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(
            self.reaped.try_recv(),
            Err(oneshot::error::TryRecvError::Empty)
        )
    }

    /// Lets a run begin.
    pub(super) fn begin(
        &mut self,
        language: Language,
        run: &Run<'_>,
    ) -> Result<(Arc<Turn>, Streams), BoxError> {
        self.hand_over(language, run)
            .map_err(|error| no_exchange(&error))
    }

    fn hand_over(&mut self, language: Language, run: &Run<'_>) -> io::Result<(Arc<Turn>, Streams)> {
        let streams = self.exchange.streams(run.stdin, run.output)?;
        let inline = fits_line(language, run.text);
        if !inline {
            self.exchange.put("text", run.text.as_bytes())?;
        }
        let has_settings = !run.settings.is_empty();
        if has_settings {
            let (before, after) = run.settings.told(language);
            self.exchange.put("before", before.as_bytes())?;
            self.exchange.put("after", after.as_bytes())?;
        }
        self.runs += 1;
        let turn = Turn {
            process: Arc::clone(&self.process),
            since: Moment::now(),
            stop: Notify::new(),
        };
        let has_input = self.exchange.has_input();
        let text = inline.then_some(run.text);
        let line = go_line(language, self.runs, has_settings, has_input, text);
        self.exchange.go(&line)?;
        Ok((Arc::new(turn), streams))
    }

    /// Makes ready for the next run. What cannot be made now is made, or found missing, then.
    pub(super) fn prepare(&mut self, output: OutputMode) {
        let _ = self.exchange.prepare(output);
    }

    /// What it has told of its exports since it was asked last.
    pub(super) fn exports(&mut self, has_ended: bool) -> Option<Vec<u8>> {
        self.exchange.exports(has_ended)
    }

    /// Waits for the end of a run, and sees to it if that is wanted.
    pub(super) async fn finish(&mut self, agent: &Agent, turn: &Turn) -> End {
        tokio::select! {
            biased;
            end = self.end_of_run() => return self.or_gone(agent, end).await,
            () = turn.stop.notified() => {}
        }
        turn.interrupt();
        let begun = Instant::now();
        let (mut end, mut again) = (None, begun + AGAIN);
        while end.is_none() && begun.elapsed() < GRACE {
            if again <= Instant::now() {
                turn.interrupt();
                again += AGAIN;
            }
            self.kill_started(agent, turn);
            end = timeout(ROUND, self.end_of_run()).await.ok();
        }
        self.kill_started(agent, turn);
        let end = end.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()));
        self.or_gone(agent, end).await
    }

    fn kill_started(&self, agent: &Agent, turn: &Turn) {
        let kill = Signal::KILL.as_raw();
        agent.init().signal_younger(&self.process, turn.since, kill);
    }

    async fn end_of_run(&mut self) -> io::Result<End> {
        tokio::select! {
            biased;
            done = self.exchange.done(self.runs) => done.map(End::Done),
            ended = &mut self.reaped => Ok(End::Gone(ended.unwrap_or(KILLED))),
        }
    }

    /// One that does not end, or that makes no sense, is ended.
    async fn or_gone(&mut self, agent: &Agent, end: io::Result<End>) -> End {
        match end {
            Ok(End::Gone(ended)) => {
                agent.init().forget(&self.process);
                End::Gone(ended)
            }
            Ok(done) => done,
            Err(_) => End::Gone(self.kill(agent).await),
        }
    }

    /// Ends it with all that was started in it.
    async fn kill(&mut self, agent: &Agent) -> Ended {
        agent.init().kill_tree(&self.process);
        let ended = (&mut self.reaped).await.unwrap_or(KILLED);
        agent.init().forget(&self.process);
        ended
    }

    /// Ends it with all that was started in it, if it has not ended already.
    pub(super) async fn end(mut self, agent: &Agent) {
        if !self.has_ended() {
            self.kill(agent).await;
        }
    }

    /// Ends it alone: what was started in it goes on.
    pub(super) async fn dismiss(mut self, agent: &Agent) {
        if let (false, Some(pid)) = (self.has_ended(), Pid::from_raw(self.process.pid)) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            let _ = (&mut self.reaped).await;
        }
        agent.init().forget(&self.process);
    }
}

fn no_exchange(error: &io::Error) -> BoxError {
    BoxError::unavailable(format!(
        "the box has no place for a shell in /tmp: {}",
        error.kind()
    ))
}
