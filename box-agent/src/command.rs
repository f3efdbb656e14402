//! A command: what everybody may know of it, and how it is influenced.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use box_protocol::actions::{AgentCommand, AgentStartParams, Exclusive};
use box_protocol::{
    BoxError, CommandId, CommandInfo, CommandState, Exit, ExitWhy, Note, Program, Role, SessionId,
    ShellId, UnixMs,
};
use box_sys::{Ended, Init};
use tokio::sync::{Notify, watch};

use crate::input::Input;
use crate::keep::Sum;
use crate::log::Log;
use crate::shells::{Besides, Turn};

/// How long a record stays after its command's end, unless the command says otherwise.
const RETAIN: Duration = Duration::from_mins(10);

/// A command, from the moment it was asked for.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) id: CommandId,
    pub(crate) role: Role,
    about: Option<Box<About>>,
    /// What it will be started with, as long as it is held.
    held: Mutex<Option<Box<AgentStartParams>>>,
    begun: OnceLock<Begun>,
    /// Why it is being ended, if somebody wants that.
    why: Mutex<Option<ExitWhy>>,
    pub(crate) wanted: Notify,
    log: Mutex<Log>,
    /// Somebody has read on.
    pub(crate) room: Notify,
    /// What others wait for: also told when the log has grown. One for all, because each is half a kilobyte.
    changing: watch::Sender<Changing>,
    next_reader: AtomicU64,
    /// Nobody waits for the answer that its end is in.
    unanswered: AtomicBool,
    /// Whether its own process was killed with its tree.
    killed: AtomicBool,
    /// Why it could not be started.
    failed: OnceLock<BoxError>,
    pub(crate) input: Input,
}

/// What only those commands keep that can be asked for later.
#[derive(Debug)]
struct About {
    program: Program,
    cwd: String,
    env_keys: Vec<String>,
    /// What else it was asked for with, values of variables included, as a number.
    manner: u64,
    note: Option<Note>,
    created_at: UnixMs,
    retain: Option<Duration>,
    ended_at: OnceLock<UnixMs>,
    in_shell: Option<Box<InShell>>,
}

/// What is to say of a run in a shell.
#[derive(Debug)]
struct InShell {
    id: ShellId,
    /// Where it began, and whether the shell had to be replaced for it.
    began: OnceLock<(String, bool)>,
    said: Mutex<Besides>,
}

#[derive(Debug)]
struct Begun {
    process: Process,
    at: Instant,
    time: UnixMs,
}

/// What a command is.
#[derive(Debug)]
enum Process {
    /// A process of its own.
    Own(box_sys::Command),
    /// A run in a shell.
    Run(Arc<Turn>),
    /// None: the agent does it itself.
    None,
}

/// What changes while it is looked at.
#[derive(Debug, Default)]
pub(crate) struct Changing {
    /// Its end, once nothing more comes. Told in full if it was asked for in full.
    ended: Option<Box<AgentCommand>>,
    /// Who reads; for [`Exclusive`] readers, who does so alone.
    readers: usize,
    alone: Option<u64>,
}

impl Changing {
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    pub(crate) fn is_read(&self) -> bool {
        self.readers > 0
    }
}

/// Somebody reads, until this is dropped.
#[derive(Debug)]
pub(crate) struct Reading<'a> {
    command: &'a Command,
    number: u64,
    seen: watch::Receiver<Changing>,
    alone: bool,
}

impl Command {
    pub(crate) fn new(params: &AgentStartParams, log: Log) -> Self {
        let about = (params.role != Role::Exec).then(|| {
            Box::new(About {
                program: params.program.clone(),
                cwd: params.cwd.clone(),
                env_keys: params.env.names(),
                manner: manner(params),
                note: params.note.clone(),
                created_at: UnixMs::now(),
                retain: match params.retain_ms {
                    None => Some(RETAIN),
                    Some(ms) => u64::try_from(ms).ok().map(Duration::from_millis),
                },
                ended_at: OnceLock::new(),
                in_shell: params.shell_id.clone().map(|id| {
                    Box::new(InShell {
                        id,
                        began: OnceLock::new(),
                        said: Mutex::default(),
                    })
                }),
            })
        });
        Self {
            id: params.command_id.clone(),
            role: params.role,
            about,
            held: Mutex::default(),
            begun: OnceLock::new(),
            why: Mutex::default(),
            wanted: Notify::new(),
            log: Mutex::new(log),
            room: Notify::new(),
            changing: watch::Sender::default(),
            next_reader: AtomicU64::new(0),
            unanswered: AtomicBool::new(false),
            killed: AtomicBool::new(false),
            failed: OnceLock::new(),
            input: Input::default(),
        }
    }

    /// Whether it is what these ask for: the same program, in the same place, by the same user, with the same variables.
    pub(crate) fn is_asked_for_by(&self, params: &AgentStartParams) -> bool {
        self.role == params.role
            && self.about.as_ref().is_none_or(|about| {
                about.program == params.program
                    && about.cwd == params.cwd
                    && about.manner == manner(params)
            })
    }

    pub(crate) fn hold(&self, params: AgentStartParams) {
        *lock(&self.held) = Some(Box::new(params));
    }

    /// What it is to be started with, for whoever asks first.
    pub(crate) fn release(&self) -> Option<Box<AgentStartParams>> {
        lock(&self.held).take()
    }

    pub(crate) fn has_begun_with(&self, process: box_sys::Command) {
        self.has_begun(Process::Own(process));
    }

    /// It is a run, and its turn has come, there and in a shell that is not the one before or is.
    pub(crate) fn has_begun_in(&self, turn: Arc<Turn>, cwd: String, replaced: bool) {
        if let Some(in_shell) = self.in_shell() {
            let _ = in_shell.began.set((cwd, replaced));
        }
        self.has_begun(Process::Run(turn));
    }

    /// It needs no process.
    pub(crate) fn has_begun_alone(&self) {
        self.has_begun(Process::None);
    }

    fn has_begun(&self, process: Process) {
        let _ = self.begun.set(Begun {
            process,
            at: Instant::now(),
            time: UnixMs::now(),
        });
    }

    fn in_shell(&self) -> Option<&InShell> {
        self.about.as_deref()?.in_shell.as_deref()
    }

    /// What its interpreter has said of it, if it is a run.
    pub(crate) fn said(&self) -> Option<MutexGuard<'_, Besides>> {
        self.in_shell().map(|in_shell| lock(&in_shell.said))
    }

    fn process(&self) -> Option<&Process> {
        self.begun.get().map(|begun| &begun.process)
    }

    /// The process that is its own, if it has one.
    pub(crate) fn own_process(&self) -> Option<&box_sys::Command> {
        match self.process()? {
            Process::Own(process) => Some(process),
            Process::Run(_) | Process::None => None,
        }
    }

    /// Kills all it has started. A run's end is for its shell to see to.
    pub(crate) fn kill_tree(&self, init: &Init) {
        match self.process() {
            Some(Process::Own(process)) => {
                self.killed.store(true, Ordering::Relaxed);
                init.kill_tree(process);
            }
            Some(Process::Run(turn)) => turn.stop(),
            Some(Process::None) | None => {}
        }
    }

    /// Whether its own process was killed with all that it has started.
    pub(crate) fn is_killed(&self) -> bool {
        self.killed.load(Ordering::Relaxed)
    }

    /// Sends it a signal; one that has just ended needs none.
    pub(crate) fn signal(&self, init: &Init, signal: i32) {
        match self.process() {
            Some(Process::Own(process)) => {
                let _ = init.signal(process, signal);
            }
            Some(Process::Run(turn)) => turn.signal(init, signal),
            Some(Process::None) | None => {}
        }
    }

    pub(crate) fn begun_at(&self) -> Option<Instant> {
        self.begun.get().map(|begun| begun.at)
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }

    /// Waits until its log can take more.
    pub(crate) async fn room(&self) {
        loop {
            let room = self.room.notified();
            if self.log().has_room() {
                return;
            }
            room.await;
        }
    }

    /// Notes that its end is wanted, and why. The first reason is the one that counts.
    pub(crate) fn expect_end(&self, why: ExitWhy) {
        lock(&self.why).get_or_insert(why);
    }

    /// Whether its end is wanted.
    pub(crate) fn is_unwanted(&self) -> bool {
        lock(&self.why).is_some()
    }

    /// Whoever waited for the answer that its end is in does not any more.
    pub(crate) fn is_answered_to_nobody(&self) {
        self.unanswered.store(true, Ordering::Relaxed);
    }

    /// Whether nobody waits for that.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed)
    }

    /// Wants its whole tree to end.
    pub(crate) fn end(&self, why: ExitWhy) {
        self.expect_end(why);
        self.wanted.notify_one();
    }

    pub(crate) fn exit(&self, ended: Ended) -> Exit {
        let by_itself = if ended.signal.is_some() {
            ExitWhy::Signal
        } else {
            ExitWhy::Exit
        };
        Exit {
            code: ended.code,
            signal: ended.signal,
            why: lock(&self.why).unwrap_or(by_itself),
        }
    }

    /// How it has ended, in few words.
    pub(crate) fn ended(&self) -> Option<AgentCommand> {
        self.changing.borrow().ended.as_deref().cloned()
    }

    /// How it is now.
    pub(crate) fn told(&self) -> AgentCommand {
        let mut told = self
            .ended()
            .unwrap_or_else(|| self.telling(None, Sum::of(&self.log())));
        told.info = self.info().map(Box::new);
        if let Some(said) = self.said() {
            told.shown.clone_from(&said.shown);
        }
        told
    }

    /// How it is, with this end and this output.
    pub(crate) fn telling(&self, exit: Option<Exit>, sum: Sum) -> AgentCommand {
        let lasted = self.begun_at().map(|at| at.elapsed());
        AgentCommand {
            exit,
            duration_ms: lasted.map_or(0, |lasted| {
                u64::try_from(lasted.as_millis()).unwrap_or(u64::MAX)
            }),
            size: sum.size,
            dropped: sum.dropped,
            collected: sum.collected,
            spooled: sum.spooled,
            ..AgentCommand::new(self.id.clone(), self.pid().unwrap_or_default())
        }
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        let pid = match self.process()? {
            Process::Own(process) => process.pid,
            Process::Run(turn) => turn.pid(),
            Process::None => return None,
        };
        Some(pid.unsigned_abs())
    }

    /// All there is to know, if any of it is kept.
    pub(crate) fn info(&self) -> Option<CommandInfo> {
        let about = self.about.as_deref()?;
        let changing = self.changing.borrow();
        let exit = changing.ended.as_ref().and_then(|ended| ended.exit);
        let attached = changing.is_read();
        drop(changing);
        let state = match (exit, self.begun.get(), &*lock(&self.held)) {
            (Some(_), ..) => CommandState::Exited,
            (None, None, Some(_)) => CommandState::Held,
            (None, None, None) => CommandState::Pending,
            (None, Some(_), _) => CommandState::Running,
        };
        let in_shell = about.in_shell.as_deref();
        let began = in_shell.and_then(|in_shell| in_shell.began.get());
        let log = self.log();
        Some(CommandInfo {
            // The runtime knows whose agent this is; the agent does not.
            session_id: SessionId::new("box").ok()?,
            command_id: self.id.clone(),
            role: self.role,
            state,
            pid: self.pid(),
            program: about.program.clone(),
            cwd: began.map_or(&about.cwd, |(cwd, _)| cwd).clone(),
            env_keys: about.env_keys.clone(),
            attached,
            created_at: about.created_at,
            started_at: self.begun.get().map(|begun| begun.time),
            ended_at: about.ended_at.get().copied(),
            size: log.size(),
            kept_from: log.kept_from(),
            exit,
            error: self.said().and_then(|said| said.error.clone()),
            shell_id: in_shell.map(|in_shell| in_shell.id.clone()),
            shell_replaced: began.is_some_and(|(_, replaced)| *replaced),
            note: about.note.clone(),
        })
    }

    /// How long its record stays once it has ended; nothing if for ever.
    pub(crate) fn retained(&self) -> Option<Duration> {
        self.about
            .as_ref()
            .map_or(Some(Duration::ZERO), |about| about.retain)
    }

    /// When it was asked for; of an exec nobody keeps that.
    pub(crate) fn created_at(&self) -> UnixMs {
        let about = self.about.as_ref();
        about.map(|about| about.created_at).unwrap_or_default()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.changing.borrow().has_ended()
    }

    /// Nothing more comes of it.
    pub(crate) fn has_ended_as(&self, told: AgentCommand) {
        self.log().finish();
        if let Some(about) = &self.about {
            let _ = about.ended_at.set(UnixMs::now());
        }
        self.changing
            .send_modify(|changing| changing.ended = Some(Box::new(told)));
    }

    /// It never began.
    pub(crate) fn has_failed(&self, error: BoxError) {
        let _ = self.failed.set(error);
        let told = self.telling(None, Sum::of(&self.log()));
        self.changing
            .send_modify(|changing| changing.ended = Some(Box::new(told)));
    }

    /// Its log has grown.
    pub(crate) fn has_grown(&self) {
        self.changing.send_modify(|_| {});
    }

    /// Its end, its readers and the growth of its log, looked at so that what comes later is told.
    pub(crate) fn watch(&self) -> watch::Receiver<Changing> {
        self.changing.subscribe()
    }

    /// Returns once there is output of it, it has ended, or so much time is over.
    pub(crate) async fn has_news(&self, within: Duration) {
        let news = |changing: &Changing| changing.has_ended() || self.log().size().sum() > 0;
        let _ = tokio::time::timeout(within, self.watch().wait_for(news)).await;
    }

    /// The error of one that never began.
    pub(crate) fn failure(&self) -> Result<(), BoxError> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Waits for its end.
    pub(crate) async fn end_seen(&self) -> Result<AgentCommand, BoxError> {
        // The sender is `self`, so it cannot be gone.
        let _ = self.watch().wait_for(Changing::has_ended).await;
        self.failure()?;
        Ok(self.told())
    }

    /// Begins to read. An exclusive reader is refused while there is another, or takes its place.
    pub(crate) fn read_by(&self, exclusive: Option<Exclusive>) -> Result<Reading<'_>, BoxError> {
        let number = self.next_reader.fetch_add(1, Ordering::Relaxed);
        let mut refused = false;
        self.changing.send_modify(|changing| {
            refused = exclusive == Some(Exclusive::Refuse) && changing.alone.is_some();
            if !refused {
                changing.readers += 1;
                if exclusive.is_some() {
                    changing.alone = Some(number);
                }
            }
        });
        if refused {
            return Err(BoxError::conflict("somebody else is attached"));
        }
        Ok(Reading {
            command: self,
            number,
            seen: self.watch(),
            alone: exclusive.is_some(),
        })
    }
}

impl Reading<'_> {
    /// Returns once another reader has taken this one's place.
    pub(crate) async fn taken(&mut self) {
        let (alone, number) = (self.alone, self.number);
        if !alone {
            return std::future::pending().await;
        }
        let _ = self
            .seen
            .wait_for(|changing| changing.alone != Some(number))
            .await;
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.command.changing.send_modify(|changing| {
            changing.readers -= 1;
            if changing.alone == Some(self.number) {
                changing.alone = None;
            }
        });
    }
}

/// What of the parameters changes what a command does, beside its program and its place.
fn manner(params: &AgentStartParams) -> u64 {
    let mut hasher = DefaultHasher::new();
    params.user.hash(&mut hasher);
    params.shell_id.hash(&mut hasher);
    params.env.iter().for_each(|one| one.hash(&mut hasher));
    hasher.finish()
}

/// What is behind these locks is sound after every assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
