//! The calls about commands that the agent answers.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{
    AgentAllow, AgentAllowParams, AgentChunk, AgentCommand, AgentHealth, AgentHealthParams,
    AgentHealthResult, AgentInput, AgentInputParams, AgentKill, AgentKillParams, AgentKillResult,
    AgentList, AgentListParams, AgentListResult, AgentOutput, AgentOutputParams, AgentReply,
    AgentStart, AgentStartParams, CommandInputResult, ListedLast, Named, ReadWhy, Until,
};
use box_protocol::{BoxError, ExitWhy, Role};
use box_rpc::{Call, Empty, Handle, Router, Turn, Withdrawal};
use tokio::time::timeout;

use crate::CONTRACT;
use crate::agent::{Agent, Asked};
use crate::command::Command;
use crate::keep::Firsts;
use crate::life::Keep;
use crate::read::{self, Wish};
use crate::shells::Shell;

/// What the agent serves.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    Router::builder(Arc::new(Served(Arc::clone(agent))))
        .on::<AgentHealth>()
        .on::<AgentStart>()
        .on::<AgentOutput>()
        .on::<AgentList>()
        .on::<AgentInput>()
        .on::<AgentKill>()
        .on::<AgentAllow>()
        .and(&crate::files::router(agent.files(), agent.slots()))
        .and(&crate::shells::router(agent))
        .and(&crate::ports::router(agent.ports()))
        .and(&crate::clear::router(agent))
        .and(&crate::ends::router(agent))
        .and(&crate::disk::router())
        .build()
}

/// The agent as the calls see it: they start tasks that outlive them.
struct Served(Arc<Agent>);

impl Handle<AgentHealth> for Served {
    async fn handle(
        &self,
        params: AgentHealthParams,
        _: Call<AgentHealth>,
    ) -> Result<AgentHealthResult, BoxError> {
        self.0.files().learn(&params);
        if let Some(env) = params.env {
            self.0.set_env(env);
        }
        Ok(AgentHealthResult {
            contract: CONTRACT,
            running: self.0.running(),
            spools_files: true,
            open: self.0.open(),
            unheard: self.0.ends().count(),
        })
    }
}

impl Handle<AgentStart> for Served {
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
        let asked = loop {
            match agent.ask_for(&params)? {
                // Whoever else wants the place comes before or after, and each of them gets it.
                Asked::There(old) if params.replace => {
                    // One that could not be started has left it already.
                    if timeout(REPLACED, self.kill(&old)).await.is_err() {
                        return Err(BoxError::unavailable(
                            "command_id: the command in its place does not end; try again later",
                        ));
                    }
                    agent.forget(&old);
                }
                asked => break asked,
            }
        };
        match asked {
            Asked::There(_) if params.role == Role::Exec => {
                Err(BoxError::conflict("the command runs already"))
            }
            Asked::There(command) => {
                drop(turn);
                let mut told = match params.reply {
                    AgentReply::Streamed { until } => {
                        self.follow(&command, params.spool, until, call).await?
                    }
                    AgentReply::Started | AgentReply::Collected { .. } => command.told(),
                };
                told.existed = true;
                Ok(told)
            }
            Asked::New(command) if params.hold => {
                command.hold(params);
                Ok(command.told())
            }
            Asked::New(command) => Box::pin(self.run(command, params, shell, call, turn)).await,
        }
    }
}

impl Served {
    /// Starts a command and answers as was asked.
    async fn run(
        &self,
        command: Arc<Command>,
        params: AgentStartParams,
        shell: Option<Arc<Shell>>,
        call: Call<AgentStart>,
        turn: Turn<Named>,
    ) -> Result<AgentCommand, BoxError> {
        let (agent, reply, spool) = (&self.0, params.reply, params.spool);
        let waits = reply != AgentReply::Started;
        // Of one whose output is kept and that ends without a reader, the end can wait for another runtime.
        let patient = matches!(reply, AgentReply::Streamed { .. }) && params.detached_ms.is_some();
        let owner = waits.then(|| Owner {
            command: &command,
            keep: params.keep,
            patient,
            withdrawal: call.withdrawal(),
        });
        let keep = match reply {
            AgentReply::Collected { bytes } => Keep::First(Firsts::new(bytes, agent.lease(spool))),
            AgentReply::Started | AgentReply::Streamed { .. } => Keep::Log,
        };
        let life = if let Some(shell) = shell {
            let (life, begun) = shell.run(agent, &command, params);
            drop(turn);
            if reply != AgentReply::Started {
                // It may also end before its turn.
                let _ = begun.await;
            }
            life
        } else {
            let life = agent.begin(&command, params, keep).await?;
            drop(turn);
            life
        };
        let told = match reply {
            AgentReply::Started => command.told(),
            AgentReply::Collected { .. } => life
                .await
                .map_err(|_| BoxError::internal("the end of the command was not seen"))?,
            AgentReply::Streamed { until } => self.follow(&command, spool, until, call).await?,
        };
        // A reader that has enough is not one that is gone.
        std::mem::forget(owner);
        Ok(told)
    }

    /// Streams a command's output from its first byte on.
    async fn follow(
        &self,
        command: &Arc<Command>,
        spool: Option<u32>,
        until: Until,
        mut call: Call<AgentStart>,
    ) -> Result<AgentCommand, BoxError> {
        self.release(command, None).await?;
        let Some(sink) = call.chunks() else {
            return Err(BoxError::validation("reply: a call that does not stream"));
        };
        if command.role == Role::Run {
            command.has_news(SOON).await;
        }
        let started = AgentChunk::Started {
            pid: command.pid().unwrap_or_default(),
            info: command.info().map(Box::new),
        };
        sink.send(&started).await?;
        let wish = Wish {
            until,
            slot: self.0.lease(spool),
            ..Wish::default()
        };
        let why = read::stream(command, wish, sink).await?;
        Ok(read_to(command, why))
    }

    /// Starts a held one, if nobody else has.
    async fn release(
        &self,
        command: &Arc<Command>,
        pty: Option<box_protocol::actions::TerminalSize>,
    ) -> Result<(), BoxError> {
        if let Some(mut params) = command.release() {
            params.pty = pty.or(params.pty);
            // Not with this call: the next reader would find nobody starting it.
            let (agent, command) = (Arc::clone(&self.0), Arc::clone(command));
            let start = async move { agent.begin(&command, *params, Keep::Log).await.map(drop) };
            let started = tokio::spawn(start).await;
            return started.map_err(|_| BoxError::internal("the command was not started"))?;
        }
        Ok(())
    }

    /// Kills everything of a command, and waits until that is gone.
    async fn kill(&self, command: &Arc<Command>) -> Result<(), BoxError> {
        if command.release().is_some() {
            self.0.end_held(command, ExitWhy::Killed);
            return Ok(());
        }
        command.end(ExitWhy::Killed);
        if command.own_process().is_some() {
            command.kill_tree(&self.0.init());
        }
        command.end_seen().await.map(drop)
    }
}

/// How long it may take to tell of the begin of a run: a short one tells of its begin and its end at once, and wakes whoever
/// waits for it once.
const SOON: Duration = Duration::from_millis(1);

/// How long a command may take to end that another one replaces. Others that want its place wait for that.
const REPLACED: Duration = Duration::from_secs(10);

/// How much of a list goes into one answer, before the one that is too much.
const LIST_BYTES: usize = 1 << 20;

/// How a command is, to a reader that stops for this reason.
fn read_to(command: &Command, why: ReadWhy) -> AgentCommand {
    let mut told = command.told();
    told.why = Some(why);
    told
}

/// A call that waits for its command. Dropped before the command's end, nobody is told of that, and the command ends unless it
/// shall go on. A runtime that dies withdraws nothing: the caller may be there still, and read on from the next one.
struct Owner<'a> {
    command: &'a Command,
    keep: bool,
    patient: bool,
    withdrawal: Withdrawal,
}

impl Drop for Owner<'_> {
    fn drop(&mut self) {
        if !self.command.has_ended() {
            self.command.is_answered_to_nobody();
            let goes_on = self.keep || (self.patient && !self.withdrawal.happened());
            if !goes_on {
                self.command.end(ExitWhy::Killed);
            }
        }
    }
}

impl Handle<AgentOutput> for Served {
    async fn handle(
        &self,
        params: AgentOutputParams,
        mut call: Call<AgentOutput>,
    ) -> Result<AgentCommand, BoxError> {
        drop(self.0.turn(&params).await);
        let command = self.0.find(&params.command_id)?;
        self.release(&command, params.pty).await?;
        let Some(sink) = call.chunks() else {
            return Err(BoxError::validation("output is only streamed"));
        };
        let wish = Wish {
            from: params.from,
            view: params.view,
            until: params.until,
            exclusive: params.exclusive,
            slot: self.0.lease(params.spool),
        };
        let why = read::stream(&command, wish, sink).await?;
        Ok(read_to(&command, why))
    }
}

impl Handle<AgentAllow> for Served {
    async fn handle(
        &self,
        params: AgentAllowParams,
        _: Call<AgentAllow>,
    ) -> Result<Empty, BoxError> {
        let allowed = self.0.init().allow_writing(params.path.as_ref());
        allowed.map_err(|_| BoxError::not_found("path: no such directory"))?;
        self.0.files().renew();
        Ok(Empty {})
    }
}

impl Handle<AgentList> for Served {
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
            let is_next = |after: &ListedLast| after.is_before(command.created_at(), &command.id);
            if !params.after.as_ref().is_none_or(is_next) {
                continue;
            }
            if room == 0 {
                return Ok(AgentListResult { items, more: true });
            }
            if let Some(info) = command.info() {
                room = room.saturating_sub(info.about_bytes());
                items.push(info);
            }
        }
        Ok(AgentListResult { items, more: false })
    }
}

impl Handle<AgentInput> for Served {
    async fn handle(
        &self,
        params: AgentInputParams,
        _: Call<AgentInput>,
    ) -> Result<CommandInputResult, BoxError> {
        let turn = self.0.turn(&params).await;
        let command = self.0.find(&params.command_id)?;
        if command.has_ended() {
            return Err(BoxError::conflict("the command has ended"));
        }
        // Other calls do not wait until the command reads: it may have to be killed for that.
        let queued = command.input.queue();
        drop(turn);
        if let Some(size) = params.size {
            command.input.resize(size)?;
        }
        let mut accepted = 0;
        if let Some(data) = &params.data {
            command.input.write(&queued, data).await?;
            accepted = data.len() as u64;
        }
        if params.close {
            command.input.close(&queued).await?;
        }
        Ok(CommandInputResult { accepted })
    }
}

impl Handle<AgentKill> for Served {
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
        let told = command.told();
        if params.forget && told.exit.is_some() {
            self.0.forget(&command);
        }
        Ok(AgentKillResult {
            exit: told.exit,
            already,
            info: told.info,
        })
    }
}

impl Served {
    async fn end(
        &self,
        command: &Arc<Command>,
        signal: i32,
        grace_ms: u64,
    ) -> Result<(), BoxError> {
        if signal != KILL && command.pid().is_some() {
            let grace = Duration::from_millis(grace_ms);
            if !grace.is_zero() {
                command.expect_end(ExitWhy::Killed);
            }
            command.signal(&self.0.init(), signal);
            let ended = timeout(grace.max(NOTICE), command.end_seen()).await;
            // It may well go on; what is left of one that has ended within its grace may not.
            if grace.is_zero() {
                return ended.map_or(Ok(()), |ended| ended.map(drop));
            }
        }
        self.kill(command).await
    }
}

const KILL: i32 = 9;

/// How long a signal that is not meant to end a command is given to do so, before its answer.
const NOTICE: Duration = Duration::from_millis(20);

/// The number of a signal by its name, which is the same on every machine this runs on.
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
    known
        .map(|(_, number)| *number)
        .ok_or_else(|| BoxError::validation("signal: not a name of a signal, without SIG"))
}
