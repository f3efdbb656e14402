//! The state of a shell and its queue of runs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::actions::{
    AgentCommand, AgentStartParams, Language, ShellCreateParams, ShellInfo, ShellState,
};
use box_protocol::{BoxError, CommandId, Env, ExitWhy, Note, Program, ShellId, UnixMs};
use box_rpc::{Turn, Turns};
use box_sys::ChildExit;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::display::RunReport;
use super::interpreter::{Interpreter, RunEnd, RunRequest};
use super::language::Settings;
use crate::agent::Agent;
use crate::command::Command;
use crate::input::InputTarget;
use crate::supervise::{KILLED, Supervisor};

/// Maximum length of a remembered directory. The kernel accepts no longer path.
const PATH_BYTES: usize = 4095;

/// A shell, until it is deleted.
#[derive(Debug)]
pub(crate) struct Shell {
    pub(super) id: ShellId,
    params: ShellCreateParams,
    created_at: UnixMs,
    state: Mutex<State>,
    /// The interpreter, locked by the current run.
    interpreter: tokio::sync::Mutex<Option<Interpreter>>,
    /// The order of the runs.
    turns: Turns<()>,
}

type InterpreterGuard<'a> = tokio::sync::MutexGuard<'a, Option<Interpreter>>;

#[derive(Debug)]
struct State {
    cwd: String,
    /// The exports of the last finished run, in the syntax of the interpreter.
    exports: Option<Vec<u8>>,
    /// Whether the state of a previous interpreter was lost.
    interpreter_lost: bool,
    /// Runs that have not ended, the current one first.
    runs: Vec<Arc<Command>>,
    executions: u64,
    current: Option<CommandId>,
    last: Option<CommandId>,
    last_used_at: UnixMs,
    used: Instant,
    note: Option<Note>,
}

impl Shell {
    /// Creates a shell with its first interpreter.
    ///
    /// The start fails if the box does not have that interpreter.
    pub(super) fn start(
        agent: &Agent,
        id: ShellId,
        params: ShellCreateParams,
    ) -> Result<Self, BoxError> {
        let cwd = params.cwd.clone().unwrap_or_else(|| "/".to_owned());
        let env = agent.env_with(params.env.clone());
        let interpreter = Interpreter::start(agent, params.language, &cwd, env, None)?;
        let now = UnixMs::now();
        Ok(Self {
            id,
            created_at: now,
            state: Mutex::new(State {
                cwd,
                exports: None,
                interpreter_lost: false,
                runs: Vec::new(),
                executions: 0,
                current: None,
                last: None,
                last_used_at: now,
                used: Instant::now(),
                note: params.note.clone(),
            }),
            interpreter: tokio::sync::Mutex::new(Some(interpreter)),
            turns: Turns::default(),
            params,
        })
    }

    /// Locks the state. A panic cannot leave it inconsistent, so poisoning is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_note(&self, note: Note) {
        self.state().note = Some(note);
    }

    /// Returns an error if these parameters describe another shell.
    pub(super) fn check_same(&self, params: &ShellCreateParams) -> Result<(), BoxError> {
        let differs = if self.params.language != params.language {
            "language"
        } else if self.params.persist != params.persist {
            "persist"
        } else {
            return Ok(());
        };
        Err(BoxError::conflict(format!(
            "{differs}: the shell exists with another value; delete it or choose another shell_id"
        )))
    }

    pub(super) fn info(&self) -> ShellInfo {
        let state = self.state();
        ShellInfo {
            box_id: self.params.box_id.clone(),
            shell_id: self.id.clone(),
            language: self.params.language,
            state: if state.runs.is_empty() {
                ShellState::Idle
            } else {
                ShellState::Busy
            },
            cwd: state.cwd.clone(),
            persist: self.params.persist,
            current: state.current.clone(),
            last: state.last.clone(),
            executions: state.executions,
            created_at: self.created_at,
            last_used_at: state.last_used_at,
            note: state.note.clone(),
        }
    }

    /// How long the shell may be idle.
    pub(super) fn idle_limit(&self) -> Option<Duration> {
        self.params.idle_ms.map(Duration::from_millis)
    }

    /// How long the shell has been idle; zero while it has runs.
    pub(super) fn idle_for(&self) -> Duration {
        let state = self.state();
        if state.runs.is_empty() {
            state.used.elapsed()
        } else {
            Duration::ZERO
        }
    }

    /// Queues a run.
    ///
    /// The receiver fires when the run starts, or fails if it never does.
    pub(crate) fn run(
        self: &Arc<Self>,
        agent: &Arc<Agent>,
        command: &Arc<Command>,
        params: AgentStartParams,
    ) -> (JoinHandle<AgentCommand>, oneshot::Receiver<()>) {
        self.state().runs.push(Arc::clone(command));
        let turn = self.turns.take([()]);
        let (started_sender, started) = oneshot::channel();
        let (shell, agent, command) = (Arc::clone(self), Arc::clone(agent), Arc::clone(command));
        let running = tokio::spawn(async move {
            let (summary, guard) = shell
                .run_in_turn(&agent, &command, &params, started_sender, &turn)
                .await;
            shell.record_run(&command);
            if let Some(mut guard) = guard {
                // The reply is sent first.
                tokio::task::yield_now().await;
                if let Some(interpreter) = &mut *guard {
                    interpreter.prepare(shell.params.output);
                }
            }
            summary
        });
        (running, started)
    }

    fn record_run(&self, command: &Arc<Command>) {
        let mut state = self.state();
        state.runs.retain(|run| !Arc::ptr_eq(run, command));
        state.used = Instant::now();
        state.last_used_at = UnixMs::now();
    }

    /// Returns the summary of the run, and the interpreter's lock if the run got it.
    async fn run_in_turn(
        &self,
        agent: &Arc<Agent>,
        command: &Arc<Command>,
        params: &AgentStartParams,
        started_sender: oneshot::Sender<()>,
        turn: &Turn<()>,
    ) -> (AgentCommand, Option<InterpreterGuard<'_>>) {
        let mut guard = tokio::select! {
            biased;
            () = command.end_requested.notified() => {
                agent.end_held(command, ExitWhy::Killed);
                return (command.snapshot(), None);
            }
            guard = async { turn.wait().await; self.interpreter.lock().await } => guard,
        };
        self.state().current = Some(command.id.clone());
        let result = self
            .run_in(agent, &mut guard, command, params, started_sender)
            .await;
        self.state().current = None;
        let summary = result.unwrap_or_else(|error| {
            agent.abandon(command, error);
            command.snapshot()
        });
        (summary, Some(guard))
    }

    async fn run_in(
        &self,
        agent: &Arc<Agent>,
        guard: &mut Option<Interpreter>,
        command: &Arc<Command>,
        params: &AgentStartParams,
        started_sender: oneshot::Sender<()>,
    ) -> Result<AgentCommand, BoxError> {
        let Program::Text { 0: text, .. } = &params.program else {
            return Err(BoxError::validation(
                "program: a shell runs a text, not an argv",
            ));
        };
        let (mut interpreter, replaced) = self.take_or_start(agent, guard.take())?;
        let request = RunRequest {
            text,
            settings: Settings {
                cwd: &params.cwd,
                cwd_stays: params.cwd_stays,
                env: &params.env,
            },
            stdin: params.stdin,
            output: self.params.output,
        };
        let started = interpreter.start_run(self.params.language, &request);
        let (active, streams) = match started {
            Ok(started) => started,
            Err(error) => {
                interpreter.end(agent).await;
                self.state().interpreter_lost = true;
                return Err(error);
            }
        };
        let cwd = {
            let mut state = self.state();
            state.executions += 1;
            let cwd = Some(params.cwd.clone()).filter(|cwd| !cwd.is_empty());
            cwd.unwrap_or_else(|| state.cwd.clone())
        };
        command.set_shell_run(Arc::clone(&active), cwd, replaced);
        if let Some(input) = streams.input {
            command.input.open(InputTarget::Pipe(input));
        }
        let (exit_sender, reaped) = oneshot::channel();
        let supervisor = Supervisor {
            agent: Arc::clone(agent),
            command: Arc::clone(command),
            reaped,
            stdout: Some(streams.stdout),
            stderr: streams.stderr,
            timeout: params.timeout_ms.map(Duration::from_millis),
            unread_limit: params.detached_ms.map(Duration::from_millis),
            oom_kills_at_start: agent.init().oom_kills(),
        };
        let supervised = tokio::spawn(supervisor.run());
        let _ = started_sender.send(());
        let end = interpreter.finish(agent, &active).await;
        drop(streams.input_reader);
        self.state().last = Some(command.id.clone());
        let exports = interpreter.exports(matches!(end, RunEnd::Exited(_)));
        if let Some(exports) = exports.filter(|_| self.params.persist) {
            self.state().exports = Some(exports);
        }
        let ended = match end {
            RunEnd::Done(done) => {
                let report = RunReport::decode(&done.report);
                agent.shells().reports().store(command, report);
                let ended = ChildExit {
                    pid: 0,
                    code: Some(done.code),
                    signal: None,
                };
                let cwd_stays = self.params.persist || params.cwd_stays;
                if cwd_stays && done.cwd.len() <= PATH_BYTES {
                    self.state().cwd = done.cwd;
                }
                if self.params.persist {
                    *guard = Some(interpreter);
                } else {
                    interpreter.kill_alone(agent).await;
                }
                ended
            }
            RunEnd::Exited(ended) => {
                self.state().interpreter_lost = true;
                ended
            }
        };
        // A run that the agent has ended reports the kill and not its exit code.
        let _ = exit_sender.send(if command.is_ending() { KILLED } else { ended });
        supervised
            .await
            .map_err(|_| BoxError::internal("run: exit status unknown"))
    }

    /// Returns the current interpreter, or starts a new one if it has exited.
    ///
    /// The flag says whether the state of a previous interpreter was lost.
    fn take_or_start(
        &self,
        agent: &Agent,
        existing: Option<Interpreter>,
    ) -> Result<(Interpreter, bool), BoxError> {
        if let Some(mut existing) = existing {
            if !existing.has_ended() {
                return Ok((existing, false));
            }
            let exports = existing.exports(true);
            let mut state = self.state();
            state.interpreter_lost = true;
            state.exports = exports.or(state.exports.take());
        }
        let (cwd, exports) = {
            let state = self.state();
            (state.cwd.clone(), state.exports.clone())
        };
        let language = self.params.language;
        let start = |cwd: &str| {
            let env = agent.env_with(self.params.env.clone());
            // The interpreter replaces its environment by the exports, but it reads some variables at its start.
            let env = match &exports {
                Some(exports) => exported(language, exports).unwrap_or_else(|| only_path(&env)),
                None => env,
            };
            Interpreter::start(agent, language, cwd, env, exports.as_deref())
        };
        // The directory may no longer exist.
        let first_cwd = self.params.cwd.as_deref().unwrap_or("/");
        let interpreter = start(&cwd)
            .or_else(|_| start(first_cwd))
            .or_else(|_| start("/"))?;
        let replaced = std::mem::take(&mut self.state().interpreter_lost) && self.params.persist;
        Ok((interpreter, replaced))
    }

    /// Ends the runs of the shell and then its interpreter.
    pub(crate) async fn end(&self, agent: &Agent) {
        let runs = self.state().runs.clone();
        for run in &runs {
            run.end(ExitWhy::Killed);
        }
        for run in &runs {
            // A run that failed to start has ended as well.
            let _ = run.wait_end().await;
        }
        if let Some(interpreter) = self.interpreter.lock().await.take() {
            interpreter.end(agent).await;
        }
    }
}

/// Returns the exports of an interpreter that writes them as JSON; `None` for a shell.
fn exported(language: Language, exports: &[u8]) -> Option<Env> {
    match language {
        Language::Bash | Language::Sh => None,
        Language::Python | Language::JavaScript => serde_json::from_slice(exports).ok(),
    }
}

fn only_path(env: &Env) -> Env {
    let mut only = Env::new();
    if let Some(path) = env.get("PATH") {
        // The variable was validated when the agent received it.
        let _ = only.insert("PATH", path.clone());
    }
    only
}
