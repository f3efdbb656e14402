//! The agent's state: the box, its commands, and the calls that wait for them.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use box_protocol::actions::{AgentCommand, AgentStartParams, OrderKey, Ordered, StreamName};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, CommandId, Env, ExitWhy, Role};
use box_rpc::Turn;
use box_sys::{ChildExit, Init};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::command::Command;
use crate::exit_queue::ExitQueue;
use crate::files::Files;
use crate::head_buffer::OutputTotals;
use crate::log::Log;
use crate::log_file::LogFile;
use crate::pipe::OrphanedPipes;
use crate::ports::Ports;
use crate::shells::Shells;
use crate::shm::{ShmPool, ShmSlot};
use crate::start::Started;
use crate::supervise::{KILLED, Supervisor};
use crate::watch::FileWatch;

/// Maximum number of ended commands in the table.
const ENDED_MAX: usize = 16_384;

/// Maximum number of commands that run or are held at once.
pub(crate) const RUNNING_MAX: usize = 1024;

/// Maximum number of remembered ids of removed commands.
///
/// They tell an expired command from one that never existed.
const FORGOTTEN_MAX: usize = 1024;

/// The state of the agent.
#[derive(Debug)]
pub(crate) struct Agent {
    init: Mutex<Init>,
    table: Mutex<CommandTable>,
    shm: ShmPool,
    log_file: Option<Arc<LogFile>>,
    files: Arc<Files>,
    shells: Shells,
    ports: Arc<Ports>,
    exit_queue: ExitQueue,
    orphaned_pipes: OrphanedPipes,
}

#[derive(Debug, Default)]
struct CommandTable {
    commands: HashMap<CommandId, Arc<Command>>,
    /// The tasks that wait for the exit of a process, by its pid.
    exit_waiters: HashMap<i32, oneshot::Sender<ChildExit>>,
    /// Ended commands that are still in the table, oldest first.
    ended: VecDeque<Arc<Command>>,
    /// The ended commands that have output in the log file, oldest first.
    stored: VecDeque<Weak<Command>>,
    forgotten: VecDeque<CommandId>,
    /// The environment of every command.
    env: Env,
}

/// The command of a requested id.
pub(crate) enum Registered {
    New(Arc<Command>),
    Existing(Arc<Command>),
}

impl Agent {
    pub(crate) fn new(
        init: Init,
        shm: ShmPool,
        log_file: Option<Arc<LogFile>>,
    ) -> io::Result<Self> {
        Ok(Self {
            files: Arc::new(Files::new(&init)?),
            init: Mutex::new(init),
            table: Mutex::default(),
            shm,
            log_file,
            shells: Shells::default(),
            ports: Arc::default(),
            exit_queue: ExitQueue::default(),
            orphaned_pipes: OrphanedPipes::default(),
        })
    }

    pub(crate) fn init(&self) -> MutexGuard<'_, Init> {
        self.init.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, CommandTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// Waits for the turn of a call.
    ///
    /// Calls that name the same object run in order of arrival. The caller gets its place in the queue at once.
    pub(crate) async fn turn(&self, params: &impl Ordered) -> Turn<OrderKey> {
        self.files.turn(params).await
    }

    pub(crate) fn shells(&self) -> &Shells {
        &self.shells
    }

    pub(crate) fn ports(&self) -> &Arc<Ports> {
        &self.ports
    }

    pub(crate) fn exit_queue(&self) -> &ExitQueue {
        &self.exit_queue
    }

    pub(crate) fn orphaned_pipes(&self) -> &OrphanedPipes {
        &self.orphaned_pipes
    }

    pub(crate) fn shm(&self) -> &ShmPool {
        &self.shm
    }

    /// Reaps every process that has ended and notifies the tasks that wait for it.
    pub(crate) fn reap(&self) {
        loop {
            let Some(ended) = self.init().reap() else {
                return;
            };
            // No task waits for an orphan.
            if let Some(waiting) = self.table().exit_waiters.remove(&ended.pid) {
                let _ = waiting.send(ended);
            }
        }
    }

    /// Registers for the exit of a process.
    ///
    /// The caller must do this before it awaits anything, or it can miss the exit.
    pub(crate) fn watch_exit(&self, process: &box_sys::Command) -> oneshot::Receiver<ChildExit> {
        let (sender, receiver) = oneshot::channel();
        self.table().exit_waiters.insert(process.pid, sender);
        receiver
    }

    /// The shared memory slot of this number.
    ///
    /// Returns nothing if the slot does not exist or a dropped call still holds it; the output then travels in
    /// messages.
    pub(crate) fn shm_slot(&self, number: Option<u32>) -> Option<ShmSlot> {
        self.shm.lease(number?)
    }

    /// Sets the environment of every command that starts from now on.
    pub(crate) fn set_env(&self, env: Env) {
        self.table().env = env;
    }

    /// The environment of every command, overridden by `more`.
    pub(crate) fn env_with(&self, more: Env) -> Env {
        let mut env = self.table().env.clone();
        env.extend(more);
        env
    }

    pub(crate) fn find(&self, id: &CommandId) -> Result<Arc<Command>, BoxError> {
        let table = self.table();
        table.commands.get(id).cloned().ok_or_else(|| {
            let message = format!("command_id: {id} not found; list the commands of the box");
            BoxError::not_found(message).with_detail(&Detail {
                expired: table.forgotten.contains(id),
                ..Detail::about(Subject::Command)
            })
        })
    }

    /// Every command that a client can ask for, oldest first.
    pub(crate) fn commands(&self) -> Vec<Arc<Command>> {
        let mut all: Vec<_> = self.table().commands.values().cloned().collect();
        all.retain(|command| command.role != Role::Exec);
        all.sort_by(|left, right| {
            (left.created_at(), &left.id).cmp(&(right.created_at(), &right.id))
        });
        all
    }

    /// The number of commands that have not ended.
    pub(crate) fn open_count(&self) -> u64 {
        let table = self.table();
        let open = table.commands.values().filter(|it| !it.has_ended());
        open.count() as u64
    }

    /// The ids of the running commands, without watches.
    ///
    /// A watch does no work by itself.
    pub(crate) fn running(&self) -> Vec<CommandId> {
        let table = self.table();
        let running = table
            .commands
            .values()
            .filter(|command| !command.has_ended() && command.role != Role::Watch);
        running.map(|command| command.id.clone()).collect()
    }

    /// Registers a new command under its id, or finds the existing one.
    pub(crate) fn register(&self, params: &AgentStartParams) -> Result<Registered, BoxError> {
        let mut table = self.table();
        if let Some(existing) = table.commands.get(&params.command_id) {
            if !params.replace && !existing.matches(params) {
                return Err(BoxError::conflict(
                    "command_id: already used with another program, directory, user or environment; choose another id",
                )
                .with_detail(&Detail::of_field("command_id").of(Subject::Command)));
            }
            return Ok(Registered::Existing(Arc::clone(existing)));
        }
        if table.commands.len() - table.ended.len() >= RUNNING_MAX {
            return Err(BoxError::limit(
                box_protocol::Code::Capacity,
                "the number of open commands in the box",
                "commands",
                RUNNING_MAX,
            ));
        }
        let mut log = Log::new(params.log_bytes, self.log_file.clone());
        log.keep_for_lost(params.lost_reader_ms.map(Duration::from_millis));
        let command = Arc::new(Command::new(params, log));
        table
            .commands
            .insert(params.command_id.clone(), Arc::clone(&command));
        Ok(Registered::New(command))
    }

    /// Starts a registered command. A command that cannot be started is removed.
    pub(crate) async fn launch(
        self: &Arc<Self>,
        command: &Arc<Command>,
        mut params: AgentStartParams,
    ) -> Result<JoinHandle<AgentCommand>, BoxError> {
        // Removes the command if the call is dropped before the command runs.
        let guard = StartGuard(self, command);
        if let Some(watch) = params.watch.take() {
            self.files().check_user(params.user.as_deref())?;
            let watch_task = FileWatch::start(self, command, *watch).await;
            let watch_task = watch_task.inspect_err(|error| command.fail(error.clone()))?;
            std::mem::forget(guard);
            command.set_internal();
            return Ok(tokio::spawn(watch_task.run()));
        }
        params.env = self.env_with(std::mem::take(&mut params.env));
        let timeout = params.timeout_ms.map(Duration::from_millis);
        let unread_limit = params.detached_ms.map(Duration::from_millis);
        let oom_kills_at_start = self.init().oom_kills();
        let started = self.start(params).await.inspect_err(|error| {
            command.fail(error.clone());
        })?;
        // From here on the supervising task owns the command. Nothing may be awaited before it is spawned.
        std::mem::forget(guard);
        let Started {
            process,
            input,
            stdout,
            stderr,
        } = started;
        let reaped = self.watch_exit(&process);
        command.set_process(process);
        if let Some(input) = input {
            command.input.open(input);
        }
        let supervisor = Supervisor {
            agent: Arc::clone(self),
            command: Arc::clone(command),
            reaped,
            stdout,
            stderr,
            timeout,
            unread_limit,
            oom_kills_at_start,
        };
        Ok(tokio::spawn(supervisor.run()))
    }

    /// Ends a command that was never started.
    pub(crate) fn end_held(self: &Arc<Self>, command: &Arc<Command>, why: ExitWhy) {
        // The first recorded reason counts.
        command.set_end_reason(why);
        let exit = command.exit(KILLED);
        let summary = command.summary(Some(exit), OutputTotals::of_log(&command.log()));
        command.finish(summary);
        self.record_end(command);
    }

    /// Requests the end of every command, and returns how many are still open.
    ///
    /// The recorded reason is the end of the box.
    pub(crate) fn end_all(self: &Arc<Self>) -> usize {
        let mut all: Vec<_> = self.table().commands.values().cloned().collect();
        all.retain(|command| !command.has_ended());
        for command in &all {
            if command.take_held().is_some() {
                self.end_held(command, ExitWhy::BoxEnded);
            } else {
                command.end(ExitWhy::BoxEnded);
            }
        }
        all.len()
    }

    /// Removes a command that cannot be started.
    pub(crate) fn abandon(&self, command: &Arc<Command>, error: BoxError) {
        command.fail(error);
        let mut table = self.table();
        let same = |existing: &Arc<Command>| Arc::ptr_eq(existing, command);
        if table.commands.get(&command.id).is_some_and(same) {
            table.commands.remove(&command.id);
        }
    }

    /// Appends output to the log of a command.
    ///
    /// If the log file is nearly full, the output of the commands that ended first is dropped and counted.
    pub(crate) fn append_output(&self, command: &Command, stream: StreamName, bytes: &[u8]) {
        command.log().append(stream, bytes);
        command.notify_output();
        let is_low = || {
            self.log_file
                .as_ref()
                .is_some_and(|log_file| log_file.is_low())
        };
        let mut still_read = Vec::new();
        while is_low() {
            let Some(oldest) = self.table().stored.pop_front() else {
                break;
            };
            if let Some(oldest) = oldest.upgrade() {
                let mut log = oldest.log();
                log.drop_unneeded();
                if log.has_stored() {
                    drop(log);
                    still_read.push(Arc::downgrade(&oldest));
                }
            }
        }
        // Their readers may be done next time, so they stay the first candidates.
        for one in still_read.into_iter().rev() {
            self.table().stored.push_front(one);
        }
    }

    /// Records that a command has ended, and schedules its removal.
    pub(crate) fn record_end(self: &Arc<Self>, command: &Arc<Command>) {
        if let Some(process) = command.own_process() {
            self.init().release_mark(process);
        }
        if command.role != Role::Exec || command.is_unanswered() {
            self.exit_queue.push(command);
        }
        if command.role == Role::Exec {
            self.table().commands.remove(&command.id);
            return;
        }
        let has_stored = command.log().has_stored();
        let mut table = self.table();
        if has_stored {
            table.stored.push_back(Arc::downgrade(command));
        }
        table.ended.push_back(Arc::clone(command));
        if table.ended.len() > ENDED_MAX
            && let Some(oldest) = table.ended.pop_front()
        {
            table.remove(&oldest);
        }
        if let Some(retained) = command.retained() {
            let (agent, command) = (Arc::downgrade(self), Arc::downgrade(command));
            tokio::spawn(async move {
                tokio::time::sleep(retained).await;
                if let (Some(agent), Some(command)) = (agent.upgrade(), command.upgrade()) {
                    agent.forget(&command);
                }
            });
        }
    }

    /// Removes a command that has ended.
    pub(crate) fn forget(&self, command: &Arc<Command>) {
        let mut table = self.table();
        table.ended.retain(|ended| !Arc::ptr_eq(ended, command));
        table.remove(command);
    }
}

impl CommandTable {
    fn remove(&mut self, command: &Arc<Command>) {
        let other =
            |existing: &Weak<Command>| !std::ptr::eq(existing.as_ptr(), Arc::as_ptr(command));
        self.stored.retain(other);
        // Another command may have the id by now.
        let same = |existing: &Arc<Command>| Arc::ptr_eq(existing, command);
        if self.commands.get(&command.id).is_some_and(same) {
            self.commands.remove(&command.id);
            self.forgotten.push_back(command.id.clone());
            if self.forgotten.len() > FORGOTTEN_MAX {
                self.forgotten.pop_front();
            }
        }
    }
}

/// Removes a command if it is dropped before the command runs.
struct StartGuard<'a>(&'a Arc<Agent>, &'a Arc<Command>);

impl Drop for StartGuard<'_> {
    fn drop(&mut self) {
        let Self(agent, command) = self;
        agent.abandon(
            command,
            BoxError::cancelled("command: the call ended before the command started"),
        );
    }
}
