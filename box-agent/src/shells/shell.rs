//! A shell: what is known of it, and its runs, one after the other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::actions::{
    AgentCommand, AgentStartParams, ShellCreateParams, ShellInfo, ShellState,
};
use box_protocol::{BoxError, CommandId, Env, ExitWhy, Note, Program, ShellId, UnixMs};
use box_rpc::{Turn, Turns};
use box_sys::Ended;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::interpreter::{End, Interpreter, Run};
use super::language::Settings;
use super::shown::Besides;
use crate::agent::Agent;
use crate::command::Command;
use crate::input::InputTarget;
use crate::supervise::{KILLED, OutputSink, Supervisor};

/// The longest directory that is remembered: nobody could begin in a longer one.
const PATH_BYTES: usize = 4095;

/// A shell, until it is deleted.
#[derive(Debug)]
pub(crate) struct Shell {
    pub(super) id: ShellId,
    asked: ShellCreateParams,
    created_at: UnixMs,
    state: Mutex<State>,
    /// The interpreter, for the run whose turn it is.
    seat: tokio::sync::Mutex<Option<Interpreter>>,
    /// The order of the runs.
    turns: Turns<()>,
}

type Seat<'a> = tokio::sync::MutexGuard<'a, Option<Interpreter>>;

#[derive(Debug)]
struct State {
    cwd: String,
    /// The exports of the last run that has finished, in words of its interpreter.
    exports: Option<Vec<u8>>,
    /// There has been an interpreter before the next one.
    lost: bool,
    /// Runs that have not ended, the one under way first.
    runs: Vec<Arc<Command>>,
    under_way: Option<CommandId>,
    last: Option<CommandId>,
    last_used_at: UnixMs,
    used: Instant,
    note: Option<Note>,
}

impl Shell {
    /// Makes one with its first interpreter, which shows whether the box has such a thing.
    pub(super) fn start(
        agent: &Agent,
        id: ShellId,
        asked: ShellCreateParams,
    ) -> Result<Self, BoxError> {
        let cwd = asked.cwd.clone().unwrap_or_else(|| "/".to_owned());
        let env = agent.env_with(asked.env.clone());
        let interpreter = Interpreter::start(agent, asked.language, &cwd, env, None)?;
        let now = UnixMs::now();
        Ok(Self {
            id,
            created_at: now,
            state: Mutex::new(State {
                cwd,
                exports: None,
                lost: false,
                runs: Vec::new(),
                under_way: None,
                last: None,
                last_used_at: now,
                used: Instant::now(),
                note: asked.note.clone(),
            }),
            seat: tokio::sync::Mutex::new(Some(interpreter)),
            turns: Turns::default(),
            asked,
        })
    }

    /// What is behind this lock is sound after every assignment.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note(&self, note: Note) {
        self.state().note = Some(note);
    }

    /// Whether it is what somebody else asks for under the same id.
    pub(super) fn fits(&self, asked: &ShellCreateParams) -> Result<(), BoxError> {
        let differs = if self.asked.language != asked.language {
            "language"
        } else if self.asked.persist != asked.persist {
            "persist"
        } else {
            return Ok(());
        };
        Err(BoxError::conflict(format!(
            "the shell exists with another {differs}"
        )))
    }

    pub(super) fn info(&self) -> ShellInfo {
        let state = self.state();
        ShellInfo {
            session_id: self.asked.session_id.clone(),
            shell_id: self.id.clone(),
            language: self.asked.language,
            state: if state.runs.is_empty() {
                ShellState::Idle
            } else {
                ShellState::Busy
            },
            cwd: state.cwd.clone(),
            persist: self.asked.persist,
            current: state.under_way.clone(),
            last: state.last.clone(),
            created_at: self.created_at,
            last_used_at: state.last_used_at,
            note: state.note.clone(),
        }
    }

    /// How long it may be idle.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.asked.idle_ms.map(Duration::from_millis)
    }

    /// How long it has been idle; not at all if it runs something.
    pub(super) fn idle(&self) -> Duration {
        let state = self.state();
        if state.runs.is_empty() {
            state.used.elapsed()
        } else {
            Duration::ZERO
        }
    }

    /// Lets a command run in its turn. What is given besides is told when it begins, or dropped if it never does.
    pub(crate) fn run(
        self: &Arc<Self>,
        agent: &Arc<Agent>,
        command: &Arc<Command>,
        params: AgentStartParams,
    ) -> (JoinHandle<AgentCommand>, oneshot::Receiver<()>) {
        self.state().runs.push(Arc::clone(command));
        let turn = self.turns.take([()]);
        let (begins, begun) = oneshot::channel();
        let (shell, agent, command) = (Arc::clone(self), Arc::clone(agent), Arc::clone(command));
        let running = tokio::spawn(async move {
            let (told, seat) = shell
                .run_in_turn(&agent, &command, &params, begins, &turn)
                .await;
            shell.has_run(&command);
            if let Some(mut seat) = seat {
                // The answer goes first.
                tokio::task::yield_now().await;
                if let Some(interpreter) = &mut *seat {
                    interpreter.prepare(shell.asked.output);
                }
            }
            told
        });
        (running, begun)
    }

    fn has_run(&self, command: &Arc<Command>) {
        let mut state = self.state();
        state.runs.retain(|run| !Arc::ptr_eq(run, command));
        state.used = Instant::now();
        state.last_used_at = UnixMs::now();
    }

    /// What there is to say of the run, and the seat, if it has come to that.
    async fn run_in_turn(
        &self,
        agent: &Arc<Agent>,
        command: &Arc<Command>,
        params: &AgentStartParams,
        begins: oneshot::Sender<()>,
        turn: &Turn<()>,
    ) -> (AgentCommand, Option<Seat<'_>>) {
        let mut seat = tokio::select! {
            biased;
            () = command.end_requested.notified() => {
                agent.end_held(command, ExitWhy::Killed);
                return (command.snapshot(), None);
            }
            seat = async { turn.comes().await; self.seat.lock().await } => seat,
        };
        self.state().under_way = Some(command.id.clone());
        let ran = self
            .run_now(agent, &mut seat, command, params, begins)
            .await;
        self.state().under_way = None;
        let told = ran.unwrap_or_else(|error| {
            agent.abandon(command, error);
            command.snapshot()
        });
        (told, Some(seat))
    }

    async fn run_now(
        &self,
        agent: &Arc<Agent>,
        seat: &mut Option<Interpreter>,
        command: &Arc<Command>,
        params: &AgentStartParams,
        begins: oneshot::Sender<()>,
    ) -> Result<AgentCommand, BoxError> {
        let Program::Text { 0: text, .. } = &params.program else {
            return Err(BoxError::validation("program: a shell runs texts"));
        };
        let (mut interpreter, replaced) = self.interpreter(agent, seat.take())?;
        let run = Run {
            text,
            settings: Settings {
                cwd: &params.cwd,
                env: &params.env,
            },
            stdin: params.stdin,
            output: self.asked.output,
        };
        let begun = interpreter.begin(self.asked.language, &run);
        let (turn, streams) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                interpreter.end(agent).await;
                self.state().lost = true;
                return Err(error);
            }
        };
        let cwd = Some(params.cwd.clone()).filter(|cwd| !cwd.is_empty());
        let cwd = cwd.unwrap_or_else(|| self.state().cwd.clone());
        command.set_shell_run(Arc::clone(&turn), cwd, replaced);
        if let Some(input) = streams.input {
            command.input.open(InputTarget::Pipe(input));
        }
        let (ends, reaped) = oneshot::channel();
        let life = Supervisor {
            agent: Arc::clone(agent),
            command: Arc::clone(command),
            reaped,
            stdout: Some(streams.stdout),
            stderr: streams.stderr,
            sink: OutputSink::Log,
            timeout: params.timeout_ms.map(Duration::from_millis),
            unread_limit: None,
            oom_kills_at_start: agent.init().oom_kills(),
        };
        let life = tokio::spawn(life.run());
        let _ = begins.send(());
        let end = interpreter.finish(agent, &turn).await;
        drop(streams.held);
        self.state().last = Some(command.id.clone());
        let exports = interpreter.exports(matches!(end, End::Gone(_)));
        if let Some(exports) = exports.filter(|_| self.asked.persist) {
            self.state().exports = Some(exports);
        }
        let ended = match end {
            End::Done(done) => {
                let besides = Besides::read(&done.besides);
                agent.shells().shows().keep(command, besides);
                let ended = Ended {
                    pid: 0,
                    code: Some(done.code),
                    signal: None,
                };
                if self.asked.persist {
                    *seat = Some(interpreter);
                    if done.cwd.len() <= PATH_BYTES {
                        self.state().cwd = done.cwd;
                    }
                } else {
                    interpreter.dismiss(agent).await;
                }
                ended
            }
            End::Gone(ended) => {
                self.state().lost = true;
                ended
            }
        };
        // One that was made to end did not choose how.
        let _ = ends.send(if command.is_ending() { KILLED } else { ended });
        life.await
            .map_err(|_| BoxError::internal("the end of the run was not seen"))
    }

    /// The interpreter there is, or a new one if that has ended; and whether it takes the place of another that had state.
    fn interpreter(
        &self,
        agent: &Agent,
        there: Option<Interpreter>,
    ) -> Result<(Interpreter, bool), BoxError> {
        if let Some(mut there) = there {
            if !there.has_ended() {
                return Ok((there, false));
            }
            let exports = there.exports(true);
            let mut state = self.state();
            state.lost = true;
            state.exports = exports.or(state.exports.take());
        }
        let (cwd, exports) = {
            let state = self.state();
            (state.cwd.clone(), state.exports.clone())
        };
        let language = self.asked.language;
        let start = |cwd: &str| {
            let env = agent.env_with(self.asked.env.clone());
            // The exports are the whole environment, but for where to find the program.
            let env = exports
                .as_ref()
                .map_or_else(|| env.clone(), |_| only_path(&env));
            Interpreter::start(agent, language, cwd, env, exports.as_deref())
        };
        // The directory may be gone.
        let begin = self.asked.cwd.as_deref().unwrap_or("/");
        let interpreter = start(&cwd)
            .or_else(|_| start(begin))
            .or_else(|_| start("/"))?;
        let replaced = std::mem::take(&mut self.state().lost) && self.asked.persist;
        Ok((interpreter, replaced))
    }

    /// Ends its runs, and then itself.
    pub(crate) async fn end(&self, agent: &Agent) {
        let runs = self.state().runs.clone();
        for run in &runs {
            run.end(ExitWhy::Killed);
        }
        for run in &runs {
            // One that never began has ended as well.
            let _ = run.wait_end().await;
        }
        if let Some(interpreter) = self.seat.lock().await.take() {
            interpreter.end(agent).await;
        }
    }
}

fn only_path(env: &Env) -> Env {
    let mut only = Env::new();
    if let Some(path) = env.get("PATH") {
        // It was checked when it came.
        let _ = only.insert("PATH", path.clone());
    }
    only
}
