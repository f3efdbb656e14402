//! Handlers of the agent's calls about commands.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{
    AgentAllow, AgentAllowParams, AgentChunk, AgentCommand, AgentHealth, AgentHealthParams,
    AgentHealthResult, AgentInput, AgentInputParams, AgentKill, AgentKillParams, AgentKillResult,
    AgentList, AgentListParams, AgentListResult, AgentOutput, AgentOutputParams, AgentReply,
    AgentStart, AgentStartParams, CommandInputResult, ListCursor, OrderKey, ReadWhy, Until,
};
use box_protocol::{BoxError, ExitWhy, Role};
use box_rpc::{Call, Cancellation, Empty, Handle, Router, Turn};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::CONTRACT;
use crate::agent::{Agent, Registered};
use crate::command::Command;
use crate::head_buffer::HeadBuffers;
use crate::read::{self, ReadLimits, ReadRequest};
use crate::shells::Shell;

/// The router of all actions that the agent serves.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    Router::builder(Arc::new(Handlers(Arc::clone(agent))))
        .on::<AgentHealth>()
        .on::<AgentStart>()
        .on::<AgentOutput>()
        .on::<AgentList>()
        .on::<AgentInput>()
        .on::<AgentKill>()
        .on::<AgentAllow>()
        .and(&crate::files::router(agent.files(), agent.shm()))
        .and(&crate::shells::router(agent))
        .and(&crate::ports::router(agent.ports()))
        .and(&crate::stop_all::router(agent))
        .and(&crate::exit_queue::router(agent))
        .and(&crate::disk::router())
        .build()
}

/// The handlers share the agent with the tasks they start, which outlive a call.
struct Handlers(Arc<Agent>);

impl Handle<AgentHealth> for Handlers {
    async fn handle(
        &self,
        params: AgentHealthParams,
        _: Call<AgentHealth>,
    ) -> Result<AgentHealthResult, BoxError> {
        self.0.files().configure(&params);
        if let Some(env) = params.env {
            self.0.set_env(env);
        }
        Ok(AgentHealthResult {
            contract: CONTRACT,
            running: self.0.running(),
            open: self.0.open_count(),
            unacknowledged: self.0.exit_queue().count(),
        })
    }
}

impl Handle<AgentStart> for Handlers {
    async fn handle(
        &self,
        params: AgentStartParams,
        call: Call<AgentStart>,
    ) -> Result<AgentCommand, BoxError> {
        let agent = &self.0;
        let turn = agent.turn(&params).await;
        let shell = match &params.shell_id {
            Some(id) => Some(agent.shells().find(id)?),
            None => None,
        };
        let registered = loop {
            match agent.register(&params)? {
                // Concurrent calls that replace the same command run one after the other; each one succeeds.
                Registered::Existing(old) if params.replace => {
                    // A command that could not be started has been removed already.
                    if timeout(REPLACE_TIMEOUT, self.kill(&old)).await.is_err() {
                        return Err(BoxError::unavailable(format!(
                            "command_id: the replaced command did not end within {} s; retry later",
                            REPLACE_TIMEOUT.as_secs()
                        )));
                    }
                    agent.forget(&old);
                }
                registered => break registered,
            }
        };
        match registered {
            Registered::Existing(_) if params.role == Role::Exec => Err(BoxError::conflict(
                "command_id: the command is already running; choose another id",
            )),
            Registered::Existing(command) => {
                drop(turn);
                let mut snapshot = match params.reply {
                    AgentReply::Streamed { until } => {
                        let limits = ReadLimits::new(until);
                        self.follow(&command, params.slot, limits, call).await?
                    }
                    AgentReply::Started | AgentReply::Collected { .. } => command.snapshot(),
                };
                snapshot.existed = true;
                Ok(snapshot)
            }
            Registered::New(command) if params.hold => {
                command.hold(params);
                Ok(command.snapshot())
            }
            Registered::New(command) => {
                Box::pin(self.run(command, params, shell, call, turn)).await
            }
        }
    }
}

impl Handlers {
    /// Starts a command and replies in the requested mode.
    async fn run(
        &self,
        command: Arc<Command>,
        params: AgentStartParams,
        shell: Option<Arc<Shell>>,
        call: Call<AgentStart>,
        turn: Turn<OrderKey>,
    ) -> Result<AgentCommand, BoxError> {
        let (agent, reply, slot) = (&self.0, params.reply, params.slot);
        let limits = ReadLimits::new(match reply {
            AgentReply::Streamed { until } => until,
            AgentReply::Started | AgentReply::Collected { .. } => Until::default(),
        });
        let waits = reply != AgentReply::Started;
        // A streamed command with a detach limit survives the loss of the runtime; its exit status waits for the next
        // runtime.
        let survives_disconnect =
            matches!(reply, AgentReply::Streamed { .. }) && params.detached_ms.is_some();
        let guard = waits.then(|| CallGuard {
            command: &command,
            keep_running: params.keep,
            survives_disconnect,
            cancellation: call.cancellation(),
        });
        if let AgentReply::Collected { bytes } = reply {
            let head = HeadBuffers::new(bytes, agent.shm_slot(slot));
            command.log().keep_head(head);
        }
        let supervised = if let Some(shell) = shell {
            let limit = params.timeout_ms.map(Duration::from_millis);
            let (supervised, started) = shell.run(agent, &command, params);
            drop(turn);
            // In its own task: the run has its time limit also after the end of this call.
            let queued = tokio::spawn(wait_in_queue(Arc::clone(&command), started, limit));
            if matches!(reply, AgentReply::Streamed { .. }) {
                // A reader whose limit is reached gets the state of the queued run.
                tokio::select! {
                    _ = queued => {}
                    _ = limits.passed() => {}
                }
            }
            supervised
        } else {
            let supervised = agent.launch(&command, params).await?;
            drop(turn);
            supervised
        };
        let snapshot = match reply {
            AgentReply::Started => command.snapshot(),
            AgentReply::Collected { .. } => supervised
                .await
                .map_err(|_| BoxError::internal("command: exit status unknown"))?,
            AgentReply::Streamed { .. } => self.follow(&command, slot, limits, call).await?,
        };
        // A reader that stopped at its limit has not disconnected.
        std::mem::forget(guard);
        Ok(snapshot)
    }

    /// Streams the output of a command from its first byte on.
    async fn follow(
        &self,
        command: &Arc<Command>,
        slot: Option<u32>,
        limits: ReadLimits,
        mut call: Call<AgentStart>,
    ) -> Result<AgentCommand, BoxError> {
        self.start_held(command, None).await?;
        let Some(sink) = call.chunks() else {
            return Err(BoxError::validation(
                "reply: a streamed reply needs a streaming call",
            ));
        };
        if command.role == Role::Run {
            command.wait_for_news(RUN_NEWS_WAIT).await;
        }
        let started = AgentChunk::Started {
            pid: command.pid().unwrap_or_default(),
            info: command.info().map(Box::new),
        };
        sink.send(&started).await?;
        let request = ReadRequest {
            limits,
            slot: self.0.shm_slot(slot),
            ..ReadRequest::default()
        };
        let why = read::stream(command, request, sink).await?;
        Ok(snapshot_with_reason(command, why))
    }

    /// Starts a held command, if no other call has.
    async fn start_held(
        &self,
        command: &Arc<Command>,
        pty: Option<box_protocol::actions::TerminalSize>,
    ) -> Result<(), BoxError> {
        if let Some(mut params) = command.take_held() {
            params.pty = pty.or(params.pty);
            // In its own task: if this call is dropped, the start still completes for the next reader.
            let (agent, command) = (Arc::clone(&self.0), Arc::clone(command));
            let start = async move { agent.launch(&command, *params).await.map(drop) };
            let started = tokio::spawn(start).await;
            return started.map_err(|_| BoxError::internal("command: the start task failed"))?;
        }
        Ok(())
    }

    /// Kills the process tree of a command and waits until it is gone.
    async fn kill(&self, command: &Arc<Command>) -> Result<(), BoxError> {
        if command.take_held().is_some() {
            self.0.end_held(command, ExitWhy::Killed);
            return Ok(());
        }
        command.end(ExitWhy::Killed);
        if command.own_process().is_some() {
            command.kill_tree(&self.0.init());
        }
        command.wait_end().await.map(drop)
    }
}

/// Waits until a run leaves the queue of its shell: it starts, or ends before. After its time limit, it ends.
async fn wait_in_queue(
    command: Arc<Command>,
    mut started: oneshot::Receiver<()>,
    limit: Option<Duration>,
) {
    let limit = limit.unwrap_or(Duration::MAX);
    if timeout(limit, &mut started).await.is_err() {
        command.end(ExitWhy::Timeout);
        let _ = started.await;
    }
}

/// How long the first chunk of a shell run may be delayed.
///
/// A short run then sends its first chunk and its end together and wakes the client once.
const RUN_NEWS_WAIT: Duration = Duration::from_millis(1);

/// How long a replaced command may take to end.
///
/// Other calls for its id wait meanwhile.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes of list entries in one reply. The entry that exceeds it is still included.
const LIST_BYTES: usize = 1 << 20;

/// The state of a command for a reader that stops for this reason.
fn snapshot_with_reason(command: &Command, why: ReadWhy) -> AgentCommand {
    let mut snapshot = command.snapshot();
    snapshot.why = Some(why);
    snapshot
}

/// Guards a call that waits for its command.
///
/// A call dropped before the command ends leaves the exit status unanswered and kills the command, unless the command
/// may keep running. A runtime that crashes cancels nothing: the client may still exist and continue through the next
/// runtime.
struct CallGuard<'a> {
    command: &'a Command,
    keep_running: bool,
    survives_disconnect: bool,
    cancellation: Cancellation,
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        if !self.command.has_ended() {
            self.command.mark_unanswered();
            let keeps_running = self.keep_running
                || (self.survives_disconnect && !self.cancellation.was_cancelled());
            if !keeps_running {
                self.command.end(ExitWhy::Killed);
            }
        }
    }
}

impl Handle<AgentOutput> for Handlers {
    async fn handle(
        &self,
        params: AgentOutputParams,
        mut call: Call<AgentOutput>,
    ) -> Result<AgentCommand, BoxError> {
        drop(self.0.turn(&params).await);
        let command = self.0.find(&params.command_id)?;
        self.start_held(&command, params.pty).await?;
        let Some(sink) = call.chunks() else {
            return Err(BoxError::validation("output: needs a streaming call"));
        };
        let request = ReadRequest {
            from: params.from,
            view: params.view,
            limits: ReadLimits::new(params.until),
            exclusive: params.exclusive,
            slot: self.0.shm_slot(params.slot),
        };
        let why = read::stream(&command, request, sink).await?;
        Ok(snapshot_with_reason(&command, why))
    }
}

impl Handle<AgentAllow> for Handlers {
    async fn handle(
        &self,
        params: AgentAllowParams,
        _: Call<AgentAllow>,
    ) -> Result<Empty, BoxError> {
        let allowed = self.0.init().allow_writing(params.path.as_ref());
        allowed.map_err(|_| BoxError::not_found("path: no such directory"))?;
        self.0.files().replace_threads();
        Ok(Empty {})
    }
}

impl Handle<AgentList> for Handlers {
    async fn handle(
        &self,
        params: AgentListParams,
        _: Call<AgentList>,
    ) -> Result<AgentListResult, BoxError> {
        drop(self.0.turn(&params).await);
        let commands = match params.command_id {
            Some(id) => vec![self.0.find(&id)?],
            None => self.0.commands(),
        };
        let (mut items, mut room) = (Vec::new(), LIST_BYTES);
        for command in &commands {
            let is_next = |after: &ListCursor| after.is_before(command.created_at(), &command.id);
            if !params.after.as_ref().is_none_or(is_next) {
                continue;
            }
            if room == 0 {
                return Ok(AgentListResult { items, more: true });
            }
            if let Some(info) = command.info() {
                room = room.saturating_sub(info.estimated_bytes());
                items.push(info);
            }
        }
        Ok(AgentListResult { items, more: false })
    }
}

impl Handle<AgentInput> for Handlers {
    async fn handle(
        &self,
        params: AgentInputParams,
        _: Call<AgentInput>,
    ) -> Result<CommandInputResult, BoxError> {
        let turn = self.0.turn(&params).await;
        let command = self.0.find(&params.command_id)?;
        if command.has_ended() {
            return Err(BoxError::conflict("command_id: the command has ended"));
        }
        // Other calls do not wait until the command reads its input: one of them may have to kill it.
        let queued = command.input.queue();
        drop(turn);
        if let Some(size) = params.size {
            command.input.resize(size)?;
        }
        let accepted = command.input.apply(&queued, &params).await?;
        Ok(CommandInputResult { accepted })
    }
}

impl Handle<AgentKill> for Handlers {
    async fn handle(
        &self,
        params: AgentKillParams,
        _: Call<AgentKill>,
    ) -> Result<AgentKillResult, BoxError> {
        let signal = signal(&params.signal)?;
        drop(self.0.turn(&params).await);
        let command = self.0.find(&params.command_id)?;
        let already = command.has_ended();
        if !already {
            self.end(&command, signal, params.grace_ms).await?;
        }
        let snapshot = command.snapshot();
        if params.forget && snapshot.exit.is_some() {
            self.0.forget(&command);
        }
        Ok(AgentKillResult {
            exit: snapshot.exit,
            already,
            info: snapshot.info,
        })
    }
}

impl Handlers {
    async fn end(
        &self,
        command: &Arc<Command>,
        signal: i32,
        grace_ms: u64,
    ) -> Result<(), BoxError> {
        if signal != KILL && command.pid().is_some() {
            let grace = Duration::from_millis(grace_ms);
            if !grace.is_zero() {
                command.set_end_reason(ExitWhy::Killed);
            }
            command.signal(&self.0.init(), signal);
            let ended = timeout(grace.max(SIGNAL_WAIT), command.wait_end()).await;
            // Without a grace period the command may continue. With one, the rest of its process tree is killed.
            if grace.is_zero() {
                return ended.map_or(Ok(()), |ended| ended.map(drop));
            }
        }
        self.kill(command).await
    }
}

const KILL: i32 = 9;

/// How long the agent waits for a signalled command to end before it replies.
const SIGNAL_WAIT: Duration = Duration::from_millis(20);

/// The number of a signal by its name.
///
/// The numbers are the same on every supported architecture.
fn signal(name: &str) -> Result<i32, BoxError> {
    const NAMES: [(&str, i32); 14] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ABRT", 6),
        ("KILL", KILL),
        ("USR1", 10),
        ("USR2", 12),
        ("ALRM", 14),
        ("TERM", 15),
        ("CONT", 18),
        ("STOP", 19),
        ("TSTP", 20),
        ("WINCH", 28),
        ("PIPE", 13),
    ];
    let known = NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, number)| *number).ok_or_else(|| {
        // The caller's text may be long.
        let shown: String = name.chars().take(16).collect();
        BoxError::validation(format!(
            "signal: {shown:?} is unknown; use a name without SIG, such as TERM"
        ))
    })
}
