//! Starts and reads commands, for every action that runs one.
//!
//! These are `command.start`, `shell.run`, `file.watch` and `box.exec`.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::pin::pin;
use std::time::Duration;

use box_protocol::actions::{
    AgentChunk, AgentCommand, AgentReply, AgentStart, AgentStartParams, AttachOptions,
    CommandChunk, CommandStartParams, CommandStartResult, OnDisconnect, ReadEnd, ReadFrom, ReadWhy,
    Until,
};
use box_protocol::{BoxError, BoxSpec, Code, CommandId, Defaults, Env, Program, Role};
use box_rpc::{Action, CallError};
use futures::StreamExt as _;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::{Failure, agent_violation};
use crate::call_order::OrderTicket;
use crate::commands::id_or_new;
use crate::data_plane::call_agent;
use crate::environment::command_environment;
use crate::output::{Converted, OutputView};
use crate::shm::ShmSlot;

/// Bytes of output that an agent may send after the deadline of its command.
const OVERTIME_BYTES: usize = 1024 * 1024;

/// Maximum time after the deadline for which a reader may block the output.
const STALLED_READER: Duration = Duration::from_mins(1);

/// The reply that the caller of a start wants.
pub(crate) enum ReplyMode<'a> {
    /// The start of the command.
    Started,
    /// The exit of the command, with the first bytes of each stream.
    Collected { bytes: u64 },
    /// The exit of the command, after its output as chunks.
    Streamed {
        attach: AttachOptions,
        to: &'a mpsc::Sender<CommandChunk>,
    },
}

/// The time at which the runtime stops waiting for the exit of a command.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    /// The time limit of the command plus the grace period.
    at: Instant,
    /// Maximum time of each later message of the agent.
    grace: Duration,
}

impl Deadline {
    /// Returns the deadline of a command that starts now.
    ///
    /// A limit beyond the range of the clock means no deadline.
    pub(crate) fn after(limit: Duration, grace: Duration) -> Option<Self> {
        let at = Instant::now().checked_add(limit.saturating_add(grace))?;
        Some(Self { at, grace })
    }
}

/// The client that reads the output of a command.
pub(crate) struct Reader<'a> {
    to: &'a mpsc::Sender<CommandChunk>,
    deadline: Option<Deadline>,
    /// Bytes that arrived after the deadline.
    overtime: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(to: &'a mpsc::Sender<CommandChunk>, deadline: Option<Deadline>) -> Self {
        Self {
            to,
            deadline,
            overtime: 0,
        }
    }

    /// Counts a chunk that arrived after the deadline, up to a limit.
    ///
    /// The agent may still send output that was in transit.
    fn accept(&mut self, chunk: &AgentChunk) -> Result<(), Failure> {
        if self
            .deadline
            .is_some_and(|deadline| Instant::now() > deadline.at)
        {
            self.overtime += size_of(chunk);
            if self.overtime > OVERTIME_BYTES {
                return Err(Failure::Silent);
            }
        }
        Ok(())
    }

    /// Waits until the client takes a chunk.
    ///
    /// A command with a deadline continues after its client has disconnected. It does not wait
    /// forever for a client that never reads.
    async fn send(&self, chunk: CommandChunk) -> Result<(), Failure> {
        let sending = self.to.send(chunk);
        let Some(deadline) = self.deadline else {
            let left = |_| BoxError::cancelled("the client has disconnected");
            return sending.await.map_err(left).map_err(Failure::Other);
        };
        match deadline.at.checked_add(STALLED_READER) {
            Some(end) => drop(
                timeout_at(end, sending)
                    .await
                    .map_err(|_| Failure::Silent)?,
            ),
            None => drop(sending.await),
        }
        Ok(())
    }
}

fn size_of(chunk: &AgentChunk) -> usize {
    match chunk {
        AgentChunk::Bytes(piece) => piece.data.len().max(1),
        AgentChunk::InSlot(piece) => usize::try_from(piece.bytes).unwrap_or(usize::MAX).max(1),
        AgentChunk::Started { .. } | AgentChunk::Begin(_) => 1,
    }
}

/// The agent's answer about a started command.
pub(crate) struct StartAnswer {
    pub(crate) command: AgentCommand,
    /// How reading ended, if the output was streamed.
    pub(crate) read: Option<ReadEnd>,
    /// The shared memory that holds collected output.
    pub(crate) slot: Option<ShmSlot>,
}

/// Returns the program that runs a text in the shell of the box.
///
/// If the box has no shell setting, the agent chooses bash or sh.
pub(crate) fn shell_program(program: Program, shell: Option<String>) -> Result<Program, BoxError> {
    Ok(match (program, shell) {
        (Program::Text { 0: text, .. }, Some(shell)) => {
            Program::argv([shell, "-c".to_owned(), text])?
        }
        (program, _) => program,
    })
}

/// Returns the working directory of a command.
///
/// The directory of the call comes first, then the default of the box, then the workspace.
pub(crate) fn directory(of_call: Option<String>, of_box: Option<String>, spec: &BoxSpec) -> String {
    let directory = of_call.or(of_box);
    directory.unwrap_or_else(|| spec.mount_path.clone())
}

impl AgentLease {
    /// Builds the agent's start parameters from the call and the box defaults.
    pub(crate) async fn command(
        &self,
        params: CommandStartParams,
    ) -> Result<AgentStartParams, BoxError> {
        let is_named = params.role != Role::Exec && params.command_id.is_some();
        let digest = is_named.then(|| digest(&params));
        let mut defaults = self.defaults();
        let env = self.environment(&defaults, params.env).await?;
        let program = shell_program(params.program, defaults.shell.take())?;
        let cwd = directory(params.cwd, defaults.cwd.take(), self.spec());
        Ok(AgentStartParams {
            env,
            user: params.user.or(defaults.user),
            stdin: params.stdin,
            output: params.output,
            pty: params.pty,
            timeout_ms: params.timeout_ms,
            file_bytes: self.spec().file_bytes(),
            memory_mb: params.memory_mb,
            log_bytes: params.log_bytes,
            keep: params.on_disconnect == OnDisconnect::Keep,
            hold: params.hold,
            replace: params.replace,
            detached_ms: params.detached_ms,
            lost_reader_ms: params.lost_reader_ms,
            retain_ms: params.retain_ms,
            role: params.role,
            note: params.note,
            asked: digest,
            ..AgentStartParams::new(id_or_new(params.command_id)?, program, cwd)
        })
    }

    async fn environment(&self, defaults: &Defaults, of_call: Env) -> Result<Env, BoxError> {
        let box_id = &self.spec().box_id;
        let env = command_environment(&self.agent, box_id, defaults, of_call);
        if defaults.env_file.is_none() {
            return env.await;
        }
        self.with_health_checks(env).await?
    }

    /// Starts a command and writes its start to the audit log.
    pub(crate) async fn start_audited(
        &self,
        agent_params: AgentStartParams,
        ticket: OrderTicket,
        attach: Option<(mpsc::Sender<CommandChunk>, AttachOptions)>,
    ) -> Result<CommandStartResult, BoxError> {
        let (audit, entry) = (self.audit(), self.entry());
        audit.started(self.caller(), &agent_params, &self.agent, entry);
        let id = agent_params.command_id.clone();
        let reply = match &attach {
            None => ReplyMode::Started,
            Some((to, attach)) => ReplyMode::Streamed {
                attach: attach.clone(),
                to,
            },
        };
        let started = self.start(agent_params, ticket, reply, None).await;
        let started = started.map_err(BoxError::from);
        match &started {
            Ok(answer) if answer.command.existed => audit.not_started(&id, None, entry),
            // After any other error the command may be running.
            Err(error) if is_refusal(error.code()) => audit.not_started(&id, Some(error), entry),
            Ok(_) | Err(_) => {}
        }
        let StartAnswer { command, read, .. } = started?;
        Ok(CommandStartResult {
            existed: command.existed,
            info: self.checked(command.info, &id)?,
            read,
            adjusted: Vec::new(),
        })
    }

    /// Starts a command and waits for the data that the reply needs.
    pub(crate) async fn start(
        &self,
        mut agent_params: AgentStartParams,
        ticket: OrderTicket,
        reply: ReplyMode<'_>,
        deadline: Option<Deadline>,
    ) -> Result<StartAnswer, Failure> {
        let (attach, to) = match reply {
            ReplyMode::Started => {
                let command = call_agent::<AgentStart>(self, &agent_params, ticket).await?;
                return Ok(StartAnswer::of(command));
            }
            ReplyMode::Collected { bytes } => {
                let slot = self.slot();
                agent_params.slot = slot.as_ref().map(ShmSlot::number);
                agent_params.reply = AgentReply::Collected { bytes };
                let call = self.agent.call::<AgentStart>(&agent_params);
                let command = self.wait_for(call, deadline).await??;
                let read = None;
                return Ok(StartAnswer {
                    command,
                    read,
                    slot,
                });
            }
            ReplyMode::Streamed { attach, to } => (attach, to),
        };
        let slot = self.slot();
        let output_view =
            OutputView::new(attach.view, ReadFrom::default(), attach.until.bytes, slot);
        agent_params.slot = output_view.slot();
        agent_params.reply = AgentReply::Streamed {
            until: Until {
                bytes: None,
                ..attach.until
            },
        };
        let to = Reader::new(to, deadline);
        let id = &agent_params.command_id;
        let reading = self.read::<AgentStart>(&agent_params, ticket, output_view, id, to);
        let (command, read) = reading.await?;
        Ok(StartAnswer {
            read: Some(read),
            ..StartAnswer::of(command)
        })
    }

    /// Waits for the agent until the deadline.
    ///
    /// Without a deadline it waits as long as the agent answers health checks.
    async fn wait_for<T>(
        &self,
        work: impl Future<Output = Result<T, CallError>>,
        deadline: Option<Deadline>,
    ) -> Result<Result<T, CallError>, Failure> {
        match deadline {
            Some(deadline) => {
                let mut work = pin!(work);
                loop {
                    let end = deadline.at.max(Instant::now() + deadline.grace);
                    match timeout_at(end, &mut work).await {
                        Ok(done) => return Ok(done),
                        // The agent is frozen during a snapshot, and so is the command.
                        Err(_) if self.entry().is_copied() => self.entry().wait_copied().await,
                        Err(_) => return Err(Failure::Silent),
                    }
                }
            }
            None => Ok(self.with_health_checks(work).await?),
        }
    }

    /// Reads output from the agent until it ends or the reader has enough.
    pub(crate) async fn read<A>(
        &self,
        agent_params: &A::Params,
        ticket: OrderTicket,
        mut output_view: OutputView,
        id: &CommandId,
        mut to: Reader<'_>,
    ) -> Result<(AgentCommand, ReadEnd), Failure>
    where
        A: Action<Chunk = AgentChunk, Result = AgentCommand>,
    {
        let stream = self.agent.stream::<A>(agent_params);
        let mut stream = self.wait_for(stream, to.deadline).await??;
        drop(ticket);
        let mut awaits_start = A::NAME == AgentStart::NAME;
        // The first chunk shows that the agent answers. Later ones come when the command writes.
        let first = async { stream.next().await.transpose() };
        let mut next = self.wait_for(first, to.deadline).await??;
        while let Some(chunk) = next {
            to.accept(&chunk)?;
            let converted = output_view.convert(chunk).map_err(Failure::Violation)?;
            let is_start = matches!(converted, Converted::Started(..));
            if is_start != awaits_start {
                let what = if is_start {
                    "started a command twice"
                } else {
                    "sent output before the start"
                };
                return Err(Failure::Violation(agent_violation(what)));
            }
            awaits_start = false;
            let (chunks, enough) = match converted {
                Converted::Started(info) => {
                    let info = self.checked(info, id)?;
                    (vec![CommandChunk::Started(Box::new(info))], false)
                }
                Converted::Output(chunks) => (chunks, false),
                Converted::Enough(chunks) => (chunks, true),
            };
            for chunk in chunks {
                to.send(chunk).await?;
            }
            if enough {
                drop(stream);
                let mut command = AgentCommand::new(id.clone(), 0);
                command.info = Some(Box::new(self.command_info(id, OrderTicket::none()).await?));
                return Ok((command, output_view.end(ReadWhy::Bytes)));
            }
            next = match to.deadline {
                Some(_) => {
                    let chunk = async { stream.next().await.transpose() };
                    self.wait_for(chunk, to.deadline).await??
                }
                None => stream.next().await.transpose()?,
            };
        }
        let mut command = stream.finish().await?;
        let why = command.why.unwrap_or(ReadWhy::Exit);
        if why == ReadWhy::Exit {
            let mut last = output_view.finish();
            let shown = std::mem::take(&mut command.shown).into_iter();
            if output_view.wants_output() {
                last.extend(shown.map(CommandChunk::Display));
            }
            for chunk in last {
                // The client gets the answer even if it does not take this chunk.
                if let Err(Failure::Silent) = to.send(chunk).await {
                    return Err(Failure::Silent);
                }
            }
        }
        Ok((command, output_view.end(why)))
    }
}

impl StartAnswer {
    fn of(command: AgentCommand) -> Self {
        Self {
            command,
            read: None,
            slot: None,
        }
    }
}

/// Returns a digest of the caller's parameters.
///
/// It excludes the defaults of the box, because these may change before the caller repeats the
/// call.
fn digest(params: &CommandStartParams) -> String {
    let mut hasher = DefaultHasher::new();
    params.program.hash(&mut hasher);
    params.cwd.hash(&mut hasher);
    params.user.hash(&mut hasher);
    params.env.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Returns whether an error means that the agent started nothing.
fn is_refusal(code: Code) -> bool {
    matches!(
        code,
        Code::Validation | Code::NotFound | Code::Denied | Code::Capacity | Code::Conflict
    )
}
