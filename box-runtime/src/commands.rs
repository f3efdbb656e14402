//! `command.*`: forwards calls about commands to the agent that runs them.
//!
//! # Steps of `command.start`
//! 1. The handler acquires the agent of the box, past the queue of execs (`data_plane.rs`).
//! 2. `start.rs` fills in the defaults of the box: environment, directory, user and shell.
//! 3. The agent registers the command id, so that a repeated start finds the running command, and
//!    starts the process.
//! 4. With `attach`, the call lasts until reading ends. The output goes through `output.rs`. Without
//!    it, the call returns when the process has started.
//! 5. `audit.rs` logs the start and the exit, with or without a reader.
//!
//! The agent owns the commands, so they continue without a runtime. `command.attach` reads the
//! output of a command from any offset that the agent still has.

use box_protocol::actions::{
    AgentInput, AgentInputParams, AgentKill, AgentKillParams, AgentList, AgentListParams,
    AgentOutput, AgentOutputParams, AgentStartParams, AttachOptions, CommandAttach,
    CommandAttachParams, CommandAttachResult, CommandChunk, CommandGet, CommandInput,
    CommandInputParams, CommandInputResult, CommandKey, CommandKill, CommandKillParams,
    CommandKillResult, CommandList, CommandListParams, CommandListResult, CommandStart,
    CommandStartParams, CommandStartResult, ListCursor, ReadFrom, Until, View,
};
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxState, Code, CommandId, CommandInfo, CommandState, Invalid};
use box_rpc::{Call, Handle};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::agent_violation;
use crate::box_actor::entry::BoxEntry;
use crate::call_order::OrderTicket;
use crate::data_plane::call_agent;
use crate::handlers::{forwarded, plain, streaming};
use crate::history::History;
use crate::output::OutputView;
use crate::runtime::BoxRuntime;
use crate::start::Reader;
use box_rpc::Caller;

/// Size limit of a command list, close to the message limit.
///
/// A caller gets a shorter list by filtering by role or state.
const LIST_BYTES: usize = 12 << 20;

impl BoxRuntime {
    /// Starts a command, or finds the command that has its id.
    ///
    /// With a channel for chunks and `attach`, the call lasts until reading ends. Dropping the
    /// future then kills the command, unless its `on_disconnect` is `keep`.
    pub async fn start_command(
        &self,
        caller: &Caller,
        params: CommandStartParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire(caller, &params.box_id).await?;
        let attach = chunks.and_then(|chunks| Some((chunks, params.attach.clone()?)));
        if let Some(found) = earlier_start(lease.entry(), &params, attach.as_ref()).await? {
            return Ok(found);
        }
        let agent_params = lease.outcome(Box::pin(lease.command(params))).await?;
        self.begin(&lease, agent_params, ticket, attach).await
    }

    /// Starts a command with the configured retention time.
    pub(crate) async fn begin(
        &self,
        lease: &AgentLease,
        mut agent_params: AgentStartParams,
        ticket: OrderTicket,
        attach: Option<(mpsc::Sender<CommandChunk>, AttachOptions)>,
    ) -> Result<CommandStartResult, BoxError> {
        let retention = self.shared().config.command_retention.as_millis();
        let retention = i64::try_from(retention).unwrap_or(i64::MAX);
        agent_params.retain_ms.get_or_insert(retention);
        if agent_params.keep
            || attach
                .as_ref()
                .is_none_or(|(_, it)| it.until.bytes.is_none())
        {
            ticket.wait_turn().await;
            // Boxed to keep the futures small that start a command.
            let starting = Box::pin(lease.start_audited(agent_params, ticket, attach));
            return lease.outcome(starting).await;
        }
        let rule = "requires on_disconnect keep, because the command outlives its reader";
        Err(Invalid::new("attach.until.bytes", rule).into())
    }

    /// Reads the output of a command. Dropping the future only ends the reading.
    pub async fn attach_command(
        &self,
        caller: &Caller,
        params: CommandAttachParams,
        chunks: mpsc::Sender<CommandChunk>,
    ) -> Result<CommandAttachResult, BoxError> {
        let entry = self.entry(caller, &params.box_id).await?;
        if let Some(history) = entry.only_history() {
            let read = read_earlier(&history, &params, &chunks).await?;
            return read.ok_or_else(|| unknown_command(&params.command_id));
        }
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire(caller, &params.box_id).await?;
        let (earlier, to) = (params.clone(), chunks.clone());
        let attached = Box::pin(lease.attach(params, ticket, chunks));
        match (lease.outcome(attached).await, entry.history()) {
            (Err(error), Some(history)) if error.code() == Code::NotFound => {
                let read = read_earlier(&history, &earlier, &to).await?;
                read.ok_or(error)
            }
            (attached, _) => attached,
        }
    }

    /// Returns the state of a command.
    ///
    /// Does not count as activity and does not wake the box.
    pub async fn get_command(
        &self,
        caller: &Caller,
        key: CommandKey,
    ) -> Result<CommandInfo, BoxError> {
        let entry = self.entry(caller, &key.box_id).await?;
        let earlier = |history: History| history.get(&key);
        if let Some(history) = entry.only_history() {
            return earlier(history).ok_or_else(|| unknown_command(&key.command_id));
        }
        let ticket = self.order_ticket(caller, &key.box_id, &key);
        let lease = self.acquire_readonly(caller, &key.box_id).await?;
        let asking = lease.command_info(&key.command_id, ticket);
        match lease.outcome(asking).await {
            Err(error) if error.code() == Code::NotFound => {
                entry.history().and_then(earlier).ok_or(error)
            }
            found => found,
        }
    }

    /// Lists the commands of a box, oldest first.
    ///
    /// Does not count as activity and does not wake the box.
    pub async fn list_commands(
        &self,
        caller: &Caller,
        params: CommandListParams,
    ) -> Result<CommandListResult, BoxError> {
        let entry = self.entry(caller, &params.box_id).await?;
        let earlier = entry.history().map(|history| history.list(&params.box_id));
        let mut items: Vec<_> = earlier.unwrap_or_default();
        items.retain(|info| is_wanted(&params, info));
        if entry.only_history().is_some() {
            return Ok(CommandListResult { items });
        }
        let lease = self.acquire_readonly(caller, &params.box_id).await?;
        let mut listed = lease.outcome(lease.list(params)).await?;
        items.retain(|info| {
            let mut newer = listed.items.iter();
            !newer.any(|newer| newer.command_id == info.command_id)
        });
        items.append(&mut listed.items);
        Ok(CommandListResult { items })
    }

    /// Writes to the standard input of a command and answers when it is written.
    pub async fn input_command(
        &self,
        caller: &Caller,
        params: CommandInputParams,
    ) -> Result<CommandInputResult, BoxError> {
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire(caller, &params.box_id).await?;
        let bytes = params.data.as_ref().map_or(0, |data| data.len());
        let _reserved = lease.reserve(bytes)?;
        let agent_params = AgentInputParams {
            command_id: params.command_id,
            size: params.size,
            data: params.data,
            close: params.close,
            wait_ms: params.wait_ms,
        };
        let calling = call_agent::<AgentInput>(&lease, &agent_params, ticket);
        lease.outcome(calling).await
    }

    /// Sends a signal to a command, or kills it with all its child processes.
    pub async fn kill_command(
        &self,
        caller: &Caller,
        params: CommandKillParams,
    ) -> Result<CommandKillResult, BoxError> {
        let ticket = self.order_ticket(caller, &params.box_id, &params);
        let lease = self.acquire(caller, &params.box_id).await?;
        let agent_params = AgentKillParams {
            command_id: params.command_id,
            signal: params.signal,
            grace_ms: params.grace_ms.unwrap_or_default(),
            forget: params.forget,
        };
        let calling = call_agent::<AgentKill>(&lease, &agent_params, ticket);
        let answer = match lease.outcome(calling).await {
            Err(error) if error.code() == Code::NotFound => {
                let history = lease.entry().history();
                let key = CommandKey {
                    box_id: params.box_id,
                    command_id: agent_params.command_id.clone(),
                };
                let found = history.and_then(|history| {
                    let info = history.get(&key)?;
                    if agent_params.forget {
                        history.forget(&key.command_id);
                    }
                    Some(info)
                });
                let info = found.ok_or(error)?;
                return Ok(CommandKillResult {
                    info,
                    already: true,
                });
            }
            answer => answer?,
        };
        Ok(CommandKillResult {
            info: lease.checked(answer.info, &agent_params.command_id)?,
            already: answer.already,
        })
    }
}

impl AgentLease {
    async fn attach(
        &self,
        params: CommandAttachParams,
        ticket: OrderTicket,
        chunks: mpsc::Sender<CommandChunk>,
    ) -> Result<CommandAttachResult, BoxError> {
        let slot = self.slot().filter(|_| params.view != View::None);
        let output_view = OutputView::new(params.view, params.from, params.until.bytes, slot);
        let agent_params = AgentOutputParams {
            command_id: params.command_id,
            from: params.from,
            view: params.view,
            until: Until {
                bytes: None,
                ..params.until
            },
            exclusive: params.exclusive,
            pty: params.pty,
            slot: output_view.slot(),
        };
        ticket.wait_turn().await;
        let to = Reader::new(&chunks, None);
        let id = &agent_params.command_id;
        let reading = self.read::<AgentOutput>(&agent_params, ticket, output_view, id, to);
        let (answer, read) = reading.await?;
        let info = self.checked(answer.info, &agent_params.command_id)?;
        Ok(CommandAttachResult { info, read })
    }

    async fn list(&self, params: CommandListParams) -> Result<CommandListResult, BoxError> {
        let wanted = |info: &CommandInfo| is_wanted(&params, info);
        let (mut items, mut room) = (Vec::new(), LIST_BYTES);
        let mut agent_params = AgentListParams::default();
        loop {
            let page = self.call::<AgentList>(&agent_params).await?;
            let last = page.items.last().map(ListCursor::from);
            for mut info in page.items.into_iter().filter(&wanted) {
                room = room.saturating_sub(info.estimated_bytes());
                info.box_id = params.box_id.clone();
                items.push(info);
            }
            if room == 0 {
                let what = "the list of commands";
                return Err(BoxError::limit(
                    Code::TooLarge,
                    what,
                    "list_bytes",
                    LIST_BYTES,
                ));
            }
            if !page.more {
                return Ok(CommandListResult { items });
            }
            // An agent that repeats a page would make this loop endless.
            if last.is_none() || last <= agent_params.after {
                return Err(BoxError::unavailable(agent_violation(
                    "sent the same list page twice",
                )));
            }
            agent_params.after = last;
        }
    }

    pub(crate) async fn command_info(
        &self,
        id: &CommandId,
        ticket: OrderTicket,
    ) -> Result<CommandInfo, BoxError> {
        let one = AgentListParams {
            command_id: Some(id.clone()),
            ..AgentListParams::default()
        };
        let info = call_agent::<AgentList>(self, &one, ticket)
            .await?
            .items
            .pop();
        self.checked(info.map(Box::new), id)
    }

    /// Checks that the agent's answer is about this command, and sets the box id.
    ///
    /// The agent does not know the box id that the caller uses.
    pub(crate) fn checked(
        &self,
        info: Option<Box<CommandInfo>>,
        id: &CommandId,
    ) -> Result<CommandInfo, BoxError> {
        let info = info.filter(|info| info.command_id == *id);
        let mut info = info.ok_or_else(|| {
            BoxError::unavailable(agent_violation("answered for another command"))
        })?;
        info.box_id = self.spec().box_id.clone();
        Ok(*info)
    }
}

/// Returns whether a list contains a command.
fn is_wanted(params: &CommandListParams, info: &CommandInfo) -> bool {
    let running = info.state == CommandState::Running;
    params.role.is_none_or(|role| info.role == role)
        && params.running.is_none_or(|wanted| running == wanted)
        && params.pid.is_none_or(|pid| info.pid == Some(pid))
}

/// Returns the result of a start that names a command before the last stop of the box.
async fn earlier_start(
    entry: &BoxEntry,
    params: &CommandStartParams,
    attach: Option<&(mpsc::Sender<CommandChunk>, AttachOptions)>,
) -> Result<Option<CommandStartResult>, BoxError> {
    let (Some(history), Some(id)) = (entry.history(), &params.command_id) else {
        return Ok(None);
    };
    if params.replace {
        history.forget(id);
        return Ok(None);
    }
    let key = CommandKey {
        box_id: params.box_id.clone(),
        command_id: id.clone(),
    };
    let Some(info) = history.get(&key) else {
        return Ok(None);
    };
    if info.program != params.program {
        let message = format!("command {id} already exists with another program");
        let detail = Detail::of_field("command_id").of(Subject::Command);
        return Err(BoxError::conflict(message).with_detail(&detail));
    }
    let mut read = None;
    if let Some((chunks, attach)) = attach {
        let started = CommandChunk::Started(Box::new(info.clone()));
        let left = |_| BoxError::cancelled("the client has disconnected");
        chunks.send(started).await.map_err(left)?;
        let how = (attach.view, ReadFrom::default(), attach.until.bytes);
        read = history.read(&key, how, chunks).await?.map(|(_, end)| end);
    }
    Ok(Some(CommandStartResult {
        info,
        existed: true,
        read,
        adjusted: Vec::new(),
    }))
}

/// Reads the output of a command before the last stop of the box.
async fn read_earlier(
    history: &History,
    params: &CommandAttachParams,
    to: &mpsc::Sender<CommandChunk>,
) -> Result<Option<CommandAttachResult>, BoxError> {
    let how = (params.view, params.from, params.until.bytes);
    let key = CommandKey {
        box_id: params.box_id.clone(),
        command_id: params.command_id.clone(),
    };
    let read = history.read(&key, how, to).await?;
    Ok(read.map(|(info, read)| CommandAttachResult { info, read }))
}

fn unknown_command(id: &CommandId) -> BoxError {
    BoxError::not_found(format!("command {id} not found"))
}

impl BoxEntry {
    /// Returns the commands before the last stop of the box.
    fn history(&self) -> Option<History> {
        self.status().history.clone()
    }

    /// Returns the commands of a stopped box, which has no agent.
    ///
    /// A box that starts at the next call counts as stopped.
    fn only_history(&self) -> Option<History> {
        let status = self.status();
        let history = status.history.clone();
        history.filter(|_| status.stopped.is_some() && status.state == BoxState::Stopped)
    }
}

/// Returns the command id of the caller, or a new one.
pub(crate) fn id_or_new(id: Option<CommandId>) -> Result<CommandId, BoxError> {
    Ok(match id {
        Some(id) => id,
        None => CommandId::new(Uuid::now_v7().simple().to_string())?,
    })
}

streaming! {
    CommandStart: start_command(CommandStartParams) -> CommandStartResult;
}

impl Handle<CommandAttach> for BoxRuntime {
    async fn handle(
        &self,
        mut params: CommandAttachParams,
        mut call: Call<CommandAttach>,
    ) -> Result<CommandAttachResult, BoxError> {
        let caller = call.caller();
        if call.chunks().is_none() {
            if params.until.bytes.is_some() {
                let rule = "requires a call with chunks; send credit";
                return Err(Invalid::new("until.bytes", rule).into());
            }
            // Without chunks the call waits for the exit and returns only the result.
            params.view = View::None;
        }
        forwarded(call, |chunks| self.attach_command(&caller, params, chunks)).await
    }
}

plain! {
    CommandGet: get_command(CommandKey) -> CommandInfo;
    CommandList: list_commands(CommandListParams) -> CommandListResult;
    CommandInput: input_command(CommandInputParams) -> CommandInputResult;
    CommandKill: kill_command(CommandKillParams) -> CommandKillResult;
}
