//! What the agent knows: its box, the commands in it, and who waits for whom.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use box_protocol::actions::{AgentCommand, AgentStartParams, Named, Names, StreamName};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, CommandId, Env, ExitWhy, Role};
use box_rpc::Turn;
use box_sys::{Ended, Init};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::command::Command;
use crate::ends::Ends;
use crate::files::Files;
use crate::keep::Sum;
use crate::life::{KILLED, Keep, Life};
use crate::log::Log;
use crate::pipe::Leftovers;
use crate::ports::Ports;
use crate::shells::Shells;
use crate::slot::{Lease, Slots};
use crate::start::Started;
use crate::store::Store;
use crate::watch::Watching;

/// Ended commands that are kept, at most.
const ENDED_KEPT: usize = 16_384;

/// Commands that run or are held at once.
pub(crate) const RUNNING_MAX: usize = 1024;

/// Ids of forgotten commands that are remembered, to tell "no more" from "never".
const FORGOTTEN_KEPT: usize = 1024;

/// What the agent knows.
#[derive(Debug)]
pub(crate) struct Agent {
    init: Mutex<Init>,
    table: Mutex<Table>,
    slots: Slots,
    store: Option<Arc<Store>>,
    files: Arc<Files>,
    shells: Shells,
    ports: Arc<Ports>,
    ends: Ends,
    leftovers: Leftovers,
}

#[derive(Debug, Default)]
struct Table {
    commands: HashMap<CommandId, Arc<Command>>,
    /// Who waits for the end of which process.
    living: HashMap<i32, oneshot::Sender<Ended>>,
    /// Ended and kept, oldest first.
    ended: VecDeque<Arc<Command>>,
    /// Of those, whose output takes room in the store.
    spooled: VecDeque<Weak<Command>>,
    forgotten: VecDeque<CommandId>,
    /// What every command finds in its environment.
    env: Env,
}

/// A command that was asked for.
pub(crate) enum Asked {
    New(Arc<Command>),
    There(Arc<Command>),
}

impl Agent {
    pub(crate) fn new(init: Init, slots: Slots, store: Option<Arc<Store>>) -> io::Result<Self> {
        Ok(Self {
            files: Arc::new(Files::new(&init)?),
            init: Mutex::new(init),
            table: Mutex::default(),
            slots,
            store,
            shells: Shells::default(),
            ports: Arc::default(),
            ends: Ends::default(),
            leftovers: Leftovers::default(),
        })
    }

    pub(crate) fn init(&self) -> MutexGuard<'_, Init> {
        self.init.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn files(&self) -> &Arc<Files> {
        &self.files
    }

    /// Waits for the turn of a call behind all that name the same, which is taken at once.
    pub(crate) async fn turn(&self, params: &impl Names) -> Turn<Named> {
        self.files.turn(params).await
    }

    pub(crate) fn shells(&self) -> &Shells {
        &self.shells
    }

    pub(crate) fn ports(&self) -> &Arc<Ports> {
        &self.ports
    }

    pub(crate) fn ends(&self) -> &Ends {
        &self.ends
    }

    pub(crate) fn leftovers(&self) -> &Leftovers {
        &self.leftovers
    }

    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Sees off everything that has ended, and tells those who wait.
    pub(crate) fn reap(&self) {
        loop {
            let Some(ended) = self.init().reap() else {
                return;
            };
            // Orphans end unnoticed.
            if let Some(waiting) = self.table().living.remove(&ended.pid) {
                let _ = waiting.send(ended);
            }
        }
    }

    /// The end of a process just started. To be called before anything is waited for.
    pub(crate) fn end_of(&self, process: &box_sys::Command) -> oneshot::Receiver<Ended> {
        let (sender, receiver) = oneshot::channel();
        self.table().living.insert(process.pid, sender);
        receiver
    }

    /// The slot of this number. Where there is none, or a call that was dropped just now still has it, messages will do.
    pub(crate) fn lease(&self, number: Option<u32>) -> Option<Lease> {
        self.slots.lease(number?)
    }

    /// What every command finds in its environment from now on.
    pub(crate) fn set_env(&self, env: Env) {
        self.table().env = env;
    }

    /// That, and these over it.
    pub(crate) fn env_with(&self, more: Env) -> Env {
        let mut env = self.table().env.clone();
        env.extend(more);
        env
    }

    pub(crate) fn find(&self, id: &CommandId) -> Result<Arc<Command>, BoxError> {
        let table = self.table();
        table.commands.get(id).cloned().ok_or_else(|| {
            BoxError::not_found("no such command").with_detail(&Detail {
                expired: table.forgotten.contains(id),
                ..Detail::about(Subject::Process)
            })
        })
    }

    /// Every command that can be asked for, oldest first.
    pub(crate) fn commands(&self) -> Vec<Arc<Command>> {
        let mut all: Vec<_> = self.table().commands.values().cloned().collect();
        all.retain(|command| command.role != Role::Exec);
        all.sort_by(|one, other| (one.created_at(), &one.id).cmp(&(other.created_at(), &other.id)));
        all
    }

    /// How many have not ended.
    pub(crate) fn open(&self) -> u64 {
        let table = self.table();
        let open = table.commands.values().filter(|it| !it.has_ended());
        open.count() as u64
    }

    /// What runs and is at work, as a watch is not: it waits for others.
    pub(crate) fn running(&self) -> Vec<CommandId> {
        let table = self.table();
        let running = table
            .commands
            .values()
            .filter(|command| !command.has_ended() && command.role != Role::Watch);
        running.map(|command| command.id.clone()).collect()
    }

    /// Takes the id for a new command, or finds who has it.
    pub(crate) fn ask_for(&self, params: &AgentStartParams) -> Result<Asked, BoxError> {
        let mut table = self.table();
        if let Some(there) = table.commands.get(&params.command_id) {
            if !params.replace && !there.is_asked_for_by(params) {
                return Err(BoxError::conflict(
                    "command_id: a command of this id was asked for with another program, place, user or environment; take another id",
                )
                .with_detail(&Detail::of_field("command_id").of(Subject::Process)));
            }
            return Ok(Asked::There(Arc::clone(there)));
        }
        if table.commands.len() - table.ended.len() >= RUNNING_MAX {
            return Err(BoxError::limit(
                box_protocol::Code::Capacity,
                "commands of one box at once",
                "commands",
                RUNNING_MAX,
            ));
        }
        let log = Log::new(params.log_bytes, self.store.clone());
        let command = Arc::new(Command::new(params, log));
        table
            .commands
            .insert(params.command_id.clone(), Arc::clone(&command));
        Ok(Asked::New(command))
    }

    /// Starts what was asked for. What cannot be started is not there any more.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        command: &Arc<Command>,
        mut params: AgentStartParams,
        keep: Keep,
    ) -> Result<JoinHandle<AgentCommand>, BoxError> {
        // If the call is dropped meanwhile, nobody will finish it.
        let unfinished = Unfinished(self, command);
        if let Some(watch) = params.watch.take() {
            self.files().check_user(params.user.as_deref())?;
            let watching = Watching::begin(self, command, *watch).await;
            let watching = watching.inspect_err(|error| command.has_failed(error.clone()))?;
            std::mem::forget(unfinished);
            command.has_begun_alone();
            return Ok(tokio::spawn(watching.live()));
        }
        params.env = self.env_with(std::mem::take(&mut params.env));
        let timeout = params.timeout_ms.map(Duration::from_millis);
        let alone = params.detached_ms.map(Duration::from_millis);
        let killed_before = self.init().oom_kills();
        let started = self.start(params).await.inspect_err(|error| {
            command.has_failed(error.clone());
        })?;
        // From here on it is its life's: nothing is waited for before that is there.
        std::mem::forget(unfinished);
        let Started {
            process,
            input,
            stdout,
            stderr,
        } = started;
        let reaped = self.end_of(&process);
        command.has_begun_with(process);
        if let Some(input) = input {
            command.input.open(input);
        }
        let life = Life {
            agent: Arc::clone(self),
            command: Arc::clone(command),
            reaped,
            stdout,
            stderr,
            keep,
            timeout,
            alone,
            killed_before,
        };
        Ok(tokio::spawn(life.live()))
    }

    /// Ends one that was never started.
    pub(crate) fn end_held(self: &Arc<Self>, command: &Arc<Command>, why: ExitWhy) {
        // Somebody may have had another reason before.
        command.expect_end(why);
        let exit = command.exit(KILLED);
        let told = command.telling(Some(exit), Sum::of(&command.log()));
        command.has_ended_as(told);
        self.ended(command);
    }

    /// Wants every command to end with the box; how many are still to.
    pub(crate) fn end_all(self: &Arc<Self>) -> usize {
        let mut all: Vec<_> = self.table().commands.values().cloned().collect();
        all.retain(|command| !command.has_ended());
        for command in &all {
            if command.release().is_some() {
                self.end_held(command, ExitWhy::BoxEnded);
            } else {
                command.end(ExitWhy::BoxEnded);
            }
        }
        all.len()
    }

    /// Takes back one that cannot be started.
    pub(crate) fn abandon(&self, command: &Arc<Command>, error: BoxError) {
        command.has_failed(error);
        let mut table = self.table();
        let same = |there: &Arc<Command>| Arc::ptr_eq(there, command);
        if table.commands.get(&command.id).is_some_and(same) {
            table.commands.remove(&command.id);
        }
    }

    /// Takes output of a command. Where there is little room for it, that of those who ended first goes, and is counted.
    pub(crate) fn keep_output(&self, command: &Command, stream: StreamName, bytes: &[u8]) {
        command.log().take(stream, bytes);
        command.has_grown();
        let is_low = || self.store.as_ref().is_some_and(|store| store.is_low());
        let mut still_read = Vec::new();
        while is_low() {
            let Some(oldest) = self.table().spooled.pop_front() else {
                break;
            };
            if let Some(oldest) = oldest.upgrade() {
                let mut log = oldest.log();
                log.forget();
                if log.is_spooled() {
                    drop(log);
                    still_read.push(Arc::downgrade(&oldest));
                }
            }
        }
        // They are asked again next time, before the others.
        for one in still_read.into_iter().rev() {
            self.table().spooled.push_front(one);
        }
    }

    /// Notes that a command has ended. Its record is kept for a while.
    pub(crate) fn ended(self: &Arc<Self>, command: &Arc<Command>) {
        if let Some(process) = command.own_process() {
            self.init().forget(process);
        }
        if command.role != Role::Exec || command.is_unanswered() {
            self.ends.tell(command);
        }
        if command.role == Role::Exec {
            self.table().commands.remove(&command.id);
            return;
        }
        let is_spooled = command.log().is_spooled();
        let mut table = self.table();
        if is_spooled {
            table.spooled.push_back(Arc::downgrade(command));
        }
        table.ended.push_back(Arc::clone(command));
        if table.ended.len() > ENDED_KEPT
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

    /// Forgets one that has ended.
    pub(crate) fn forget(&self, command: &Arc<Command>) {
        let mut table = self.table();
        table.ended.retain(|ended| !Arc::ptr_eq(ended, command));
        table.remove(command);
    }
}

impl Table {
    fn remove(&mut self, command: &Arc<Command>) {
        let other = |there: &Weak<Command>| !std::ptr::eq(there.as_ptr(), Arc::as_ptr(command));
        self.spooled.retain(other);
        // Another one may have the id by now.
        let same = |there: &Arc<Command>| Arc::ptr_eq(there, command);
        if self.commands.get(&command.id).is_some_and(same) {
            self.commands.remove(&command.id);
            self.forgotten.push_back(command.id.clone());
            if self.forgotten.len() > FORGOTTEN_KEPT {
                self.forgotten.pop_front();
            }
        }
    }
}

/// A command that is being started. Dropped before it runs, it is not there any more.
struct Unfinished<'a>(&'a Arc<Agent>, &'a Arc<Command>);

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        let Self(agent, command) = self;
        agent.abandon(command, BoxError::cancelled("the command was not started"));
    }
}
