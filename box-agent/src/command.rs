//! The shared state of one command.

mod reader;

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use box_protocol::actions::{AgentCommand, AgentReply, AgentStartParams};
use box_protocol::{
    BoxError, BoxId, CommandId, CommandInfo, CommandState, Exit, ExitWhy, Note, Program, Role,
    ShellId, UnixMs,
};
use box_sys::{ChildExit, Init};
use tokio::sync::{Notify, watch};

pub(crate) use self::reader::ReaderGuard;
use crate::head_buffer::OutputTotals;
use crate::input::Input;
use crate::log::Log;
use crate::shells::{ActiveRun, RunReport};

/// How long the record of an ended command stays by default.
const RETAIN: Duration = Duration::from_mins(10);

/// A command, from its registration on.
#[derive(Debug)]
pub(crate) struct Command {
    pub(crate) id: CommandId,
    pub(crate) role: Role,
    record: Option<Box<Record>>,
    /// The start parameters while the command is held.
    held: Mutex<Option<Box<AgentStartParams>>>,
    start: OnceLock<Start>,
    /// Why the command is being ended, once its end is requested.
    end_reason: Mutex<Option<ExitWhy>>,
    pub(crate) end_requested: Notify,
    log: Mutex<Log>,
    /// A reader has freed room in the log.
    pub(crate) room_freed: Notify,
    /// Notifies waiters of the end, the readers and the growth of the log.
    ///
    /// One channel for all three, because each takes half a kilobyte.
    progress: watch::Sender<Progress>,
    next_reader: AtomicU64,
    /// The call that waited for the exit status has disconnected.
    unanswered: AtomicBool,
    /// Whether the agent has killed the process tree.
    killed: AtomicBool,
    /// Why the command could not be started.
    failed: OnceLock<BoxError>,
    pub(crate) input: Input,
}

/// The record of a command. An exec has one while its output is streamed.
#[derive(Debug)]
struct Record {
    program: Program,
    cwd: String,
    env_keys: Vec<String>,
    /// Hash of what identifies the command, including the values of its variables.
    fingerprint: u64,
    note: Option<Note>,
    created_at: UnixMs,
    retain: Option<Duration>,
    ended_at: OnceLock<UnixMs>,
    shell_run: Option<Box<ShellRun>>,
}

/// The shell part of a run's record.
#[derive(Debug)]
struct ShellRun {
    id: ShellId,
    /// The directory the run started in, and whether its shell was replaced for it.
    began_in: OnceLock<(String, bool)>,
    report: Mutex<RunReport>,
}

#[derive(Debug)]
struct Start {
    process: Process,
    at: Instant,
    time: UnixMs,
}

/// What executes a command.
#[derive(Debug)]
enum Process {
    /// Its own process.
    Own(box_sys::Command),
    /// A run in a shell.
    ShellRun(Arc<ActiveRun>),
    /// A task of the agent.
    Internal,
}

/// The state that waiters watch.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// The summary of the command, once it has ended and its output is complete.
    ended: Option<Box<AgentCommand>>,
    /// The number of readers, and the number of the exclusive reader.
    readers: usize,
    exclusive: Option<u64>,
}

impl Progress {
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    pub(crate) fn has_readers(&self) -> bool {
        self.readers > 0
    }
}

impl Command {
    pub(crate) fn new(params: &AgentStartParams, log: Log) -> Self {
        // The answer to an exec that is not streamed holds all that its caller asks for.
        let streams = matches!(params.reply, AgentReply::Streamed { .. });
        let record = (params.role != Role::Exec || streams).then(|| {
            Box::new(Record {
                program: params.program.clone(),
                cwd: params.cwd.clone(),
                env_keys: params.env.names(),
                fingerprint: fingerprint(params),
                note: params.note.clone(),
                created_at: UnixMs::now(),
                retain: match params.retain_ms {
                    None => Some(RETAIN),
                    Some(ms) => u64::try_from(ms).ok().map(Duration::from_millis),
                },
                ended_at: OnceLock::new(),
                shell_run: params.shell_id.clone().map(|id| {
                    Box::new(ShellRun {
                        id,
                        began_in: OnceLock::new(),
                        report: Mutex::default(),
                    })
                }),
            })
        });
        Self {
            id: params.command_id.clone(),
            role: params.role,
            record,
            held: Mutex::default(),
            start: OnceLock::new(),
            end_reason: Mutex::default(),
            end_requested: Notify::new(),
            log: Mutex::new(log),
            room_freed: Notify::new(),
            progress: watch::Sender::default(),
            next_reader: AtomicU64::new(0),
            unanswered: AtomicBool::new(false),
            killed: AtomicBool::new(false),
            failed: OnceLock::new(),
            input: Input::default(),
        }
    }

    /// Whether these parameters describe this command.
    ///
    /// Program, directory, user and variables must be the same.
    pub(crate) fn matches(&self, params: &AgentStartParams) -> bool {
        let record = self.record.as_ref();
        self.role == params.role
            && record.is_none_or(|record| record.fingerprint == fingerprint(params))
    }

    pub(crate) fn hold(&self, params: AgentStartParams) {
        *lock(&self.held) = Some(Box::new(params));
    }

    /// Takes the start parameters of a held command; the first caller gets them.
    pub(crate) fn take_held(&self) -> Option<Box<AgentStartParams>> {
        lock(&self.held).take()
    }

    pub(crate) fn set_process(&self, process: box_sys::Command) {
        self.set_started(Process::Own(process));
    }

    /// Records the start of a run in a shell, with its directory.
    ///
    /// `replaced` says whether the shell got a new interpreter for it.
    pub(crate) fn set_shell_run(&self, run: Arc<ActiveRun>, cwd: String, replaced: bool) {
        if let Some(shell_run) = self.shell_run() {
            let _ = shell_run.began_in.set((cwd, replaced));
        }
        self.set_started(Process::ShellRun(run));
    }

    /// Records that a task of the agent executes the command.
    pub(crate) fn set_internal(&self) {
        self.set_started(Process::Internal);
    }

    fn set_started(&self, process: Process) {
        let _ = self.start.set(Start {
            process,
            at: Instant::now(),
            time: UnixMs::now(),
        });
    }

    fn shell_run(&self) -> Option<&ShellRun> {
        self.record.as_deref()?.shell_run.as_deref()
    }

    /// The interpreter's report on the run, if the command is one.
    pub(crate) fn report(&self) -> Option<MutexGuard<'_, RunReport>> {
        self.shell_run().map(|shell_run| lock(&shell_run.report))
    }

    fn process(&self) -> Option<&Process> {
        self.start.get().map(|start| &start.process)
    }

    /// The command's own process, if it has one.
    pub(crate) fn own_process(&self) -> Option<&box_sys::Command> {
        match self.process()? {
            Process::Own(process) => Some(process),
            Process::ShellRun(_) | Process::Internal => None,
        }
    }

    /// Kills the process tree of the command. A run is stopped by its shell.
    pub(crate) fn kill_tree(&self, init: &Init) {
        match self.process() {
            Some(Process::Own(process)) => {
                self.killed.store(true, Ordering::Relaxed);
                init.kill_tree(process);
            }
            Some(Process::ShellRun(run)) => run.stop(),
            Some(Process::Internal) | None => {}
        }
    }

    /// Whether the agent has killed the command's process tree.
    pub(crate) fn is_killed(&self) -> bool {
        self.killed.load(Ordering::Relaxed)
    }

    /// Sends a signal. A process that has just exited ignores it.
    pub(crate) fn signal(&self, init: &Init, signal: i32) {
        match self.process() {
            Some(Process::Own(process)) => {
                let _ = init.signal(process, signal);
            }
            Some(Process::ShellRun(run)) => run.signal(init, signal),
            Some(Process::Internal) | None => {}
        }
    }

    pub(crate) fn started_at(&self) -> Option<Instant> {
        self.start.get().map(|start| start.at)
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }

    /// Waits until the log has room.
    pub(crate) async fn wait_for_room(&self) {
        loop {
            let room = self.room_freed.notified();
            let lost_until = {
                let log = self.log();
                if log.has_room() {
                    return;
                }
                log.lost_until()
            };
            match lost_until {
                Some(end) => drop(tokio::time::timeout_at(end, room).await),
                None => room.await,
            }
        }
    }

    /// Records why the command is being ended. The first reason counts.
    pub(crate) fn set_end_reason(&self, why: ExitWhy) {
        lock(&self.end_reason).get_or_insert(why);
    }

    /// Whether the end of the command is requested.
    pub(crate) fn is_ending(&self) -> bool {
        lock(&self.end_reason).is_some()
    }

    /// Records that the call waiting for the exit status has disconnected.
    pub(crate) fn mark_unanswered(&self) {
        self.unanswered.store(true, Ordering::Relaxed);
    }

    /// Whether the call that waited for the exit status has disconnected.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed)
    }

    /// Requests the end of the command's process tree.
    pub(crate) fn end(&self, why: ExitWhy) {
        self.set_end_reason(why);
        self.end_requested.notify_one();
    }

    pub(crate) fn exit(&self, ended: ChildExit) -> Exit {
        let by_itself = if ended.signal.is_some() {
            ExitWhy::Signal
        } else {
            ExitWhy::Exit
        };
        Exit {
            code: ended.code,
            signal: ended.signal,
            why: lock(&self.end_reason).unwrap_or(by_itself),
        }
    }

    /// The summary of an ended command.
    pub(crate) fn end_summary(&self) -> Option<AgentCommand> {
        self.progress.borrow().ended.as_deref().cloned()
    }

    /// The current state of the command, with its record.
    pub(crate) fn snapshot(&self) -> AgentCommand {
        let mut summary = self
            .end_summary()
            .unwrap_or_else(|| self.summary(None, OutputTotals::of_log(&self.log())));
        summary.info = self.info().map(Box::new);
        if let Some(report) = self.report() {
            summary.shown.clone_from(&report.shown);
        }
        summary
    }

    /// A summary with this exit and these output totals.
    pub(crate) fn summary(&self, exit: Option<Exit>, totals: OutputTotals) -> AgentCommand {
        let elapsed = self.started_at().map(|at| at.elapsed());
        AgentCommand {
            exit,
            duration_ms: elapsed.map_or(0, |elapsed| {
                u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
            }),
            size: totals.size,
            dropped: totals.dropped,
            collected: totals.collected,
            in_slot: totals.in_slot,
            ..AgentCommand::new(self.id.clone(), self.pid().unwrap_or_default())
        }
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        let pid = match self.process()? {
            Process::Own(process) => process.pid,
            Process::ShellRun(run) => run.pid(),
            Process::Internal => return None,
        };
        Some(pid.unsigned_abs())
    }

    /// The record of the command, if it has one.
    pub(crate) fn info(&self) -> Option<CommandInfo> {
        let record = self.record.as_deref()?;
        let progress = self.progress.borrow();
        let exit = progress.ended.as_ref().and_then(|ended| ended.exit);
        let attached = progress.has_readers();
        drop(progress);
        let state = match (exit, self.start.get(), &*lock(&self.held)) {
            (Some(_), ..) => CommandState::Exited,
            (None, None, Some(_)) => CommandState::Held,
            (None, None, None) => CommandState::Pending,
            (None, Some(_), _) => CommandState::Running,
        };
        let shell_run = record.shell_run.as_deref();
        let began_in = shell_run.and_then(|shell_run| shell_run.began_in.get());
        let log = self.log();
        Some(CommandInfo {
            // The agent does not know the id of its box; the runtime fills it in.
            box_id: BoxId::new("box").ok()?,
            command_id: self.id.clone(),
            role: self.role,
            state,
            pid: self.pid(),
            program: record.program.clone(),
            cwd: began_in.map_or(&record.cwd, |(cwd, _)| cwd).clone(),
            env_keys: record.env_keys.clone(),
            attached,
            created_at: record.created_at,
            started_at: self.start.get().map(|start| start.time),
            ended_at: record.ended_at.get().copied(),
            size: log.size(),
            kept_from: log.kept_from(),
            exit,
            error: self.report().and_then(|report| report.error.clone()),
            shell_id: shell_run.map(|shell_run| shell_run.id.clone()),
            shell_replaced: began_in.is_some_and(|(_, replaced)| *replaced),
            note: record.note.clone(),
        })
    }

    /// How long the record stays after the end; `None` means until the box ends.
    pub(crate) fn retained(&self) -> Option<Duration> {
        self.record
            .as_ref()
            .map_or(Some(Duration::ZERO), |record| record.retain)
    }

    /// When the command was registered. A command without a record has no time.
    pub(crate) fn created_at(&self) -> UnixMs {
        let record = self.record.as_ref();
        record.map(|record| record.created_at).unwrap_or_default()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.progress.borrow().has_ended()
    }

    /// Records the end of the command. No output follows.
    pub(crate) fn finish(&self, summary: AgentCommand) {
        self.log().finish();
        if let Some(record) = &self.record {
            let _ = record.ended_at.set(UnixMs::now());
        }
        self.progress
            .send_modify(|progress| progress.ended = Some(Box::new(summary)));
    }

    /// Records that the command could not be started.
    pub(crate) fn fail(&self, error: BoxError) {
        let _ = self.failed.set(error);
        let summary = self.summary(None, OutputTotals::of_log(&self.log()));
        self.progress
            .send_modify(|progress| progress.ended = Some(Box::new(summary)));
    }

    /// Notifies waiters that the log has grown.
    pub(crate) fn notify_output(&self) {
        self.progress.send_modify(|_| {});
    }

    /// Watches the end, the readers and the growth of the log.
    pub(crate) fn watch(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Returns once the command has output or has ended, or after this time.
    pub(crate) async fn wait_for_news(&self, within: Duration) {
        let news = |progress: &Progress| progress.has_ended() || self.log().size().sum() > 0;
        let _ = tokio::time::timeout(within, self.watch().wait_for(news)).await;
    }

    /// The error of a command that could not be started.
    pub(crate) fn failure(&self) -> Result<(), BoxError> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Waits for the end of the command.
    pub(crate) async fn wait_end(&self) -> Result<AgentCommand, BoxError> {
        // `self` owns the sender, so the channel is open.
        let _ = self.watch().wait_for(Progress::has_ended).await;
        self.failure()?;
        Ok(self.snapshot())
    }
}

/// Hashes what identifies a command: the digest of the caller's request, or the parameters if the runtime sends none.
fn fingerprint(params: &AgentStartParams) -> u64 {
    let mut hasher = DefaultHasher::new();
    params.asked.hash(&mut hasher);
    if params.asked.is_none() {
        params.program.hash(&mut hasher);
        params.cwd.hash(&mut hasher);
        params.user.hash(&mut hasher);
        params.shell_id.hash(&mut hasher);
        params.env.hash(&mut hasher);
    }
    hasher.finish()
}

/// Locks a mutex.
///
/// A panic cannot leave these values inconsistent, so poisoning is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
