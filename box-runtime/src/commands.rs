//! `command.*`: forwards calls about commands to the agent that runs them.
//!
//! The agent owns the commands. The runtime finds them, applies the defaults of the box, and
//! answers the callers.

use box_protocol::actions::{
    AgentInput, AgentInputParams, AgentKill, AgentKillParams, AgentList, AgentListParams,
    AgentOutput, AgentOutputParams, AgentStartParams, AttachOptions, CommandAttach,
    CommandAttachParams, CommandAttachResult, CommandChunk, CommandGet, CommandInput,
    CommandInputParams, CommandInputResult, CommandKey, CommandKill, CommandKillParams,
    CommandKillResult, CommandList, CommandListParams, CommandListResult, CommandStart,
    CommandStartParams, CommandStartResult, ListCursor, Until, View,
};
use box_protocol::{BoxError, Code, CommandId, CommandInfo, CommandState, Invalid};
use box_rpc::{Call, Handle};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::box_actor::agent_access::AgentLease;
use crate::box_actor::agent_violation;
use crate::data_plane::ask;
use crate::handlers::{forwarded, plain, streamed};
use crate::order::Queued;
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
        let order = self.order(caller, &params.box_id, &params);
        let lease = self.enter(caller, &params.box_id).await?;
        let attach = chunks.and_then(|chunks| Some((chunks, params.attach.clone()?)));
        let asked = lease.outcome(Box::pin(lease.command(params))).await?;
        self.begin(&lease, asked, order, attach).await
    }

    /// Starts a command with the configured retention time.
    pub(crate) async fn begin(
        &self,
        lease: &AgentLease,
        mut asked: AgentStartParams,
        order: Queued,
        attach: Option<(mpsc::Sender<CommandChunk>, AttachOptions)>,
    ) -> Result<CommandStartResult, BoxError> {
        let kept = self.shared().config.command_retention.as_millis();
        let kept = i64::try_from(kept).unwrap_or(i64::MAX);
        asked.retain_ms.get_or_insert(kept);
        if asked.keep
            || attach
                .as_ref()
                .is_none_or(|(_, it)| it.until.bytes.is_none())
        {
            order.comes().await;
            // Boxed to keep the futures small that start a command.
            let starting = Box::pin(lease.start_audited(asked, order, attach));
            return lease.outcome(starting).await;
        }
        let rule = "needs on_disconnect keep: the command outlives its reader";
        Err(Invalid::new("attach.until.bytes", rule).into())
    }

    /// Reads the output of a command. Dropping the future only ends the reading.
    pub async fn attach_command(
        &self,
        caller: &Caller,
        params: CommandAttachParams,
        chunks: mpsc::Sender<CommandChunk>,
    ) -> Result<CommandAttachResult, BoxError> {
        let order = self.order(caller, &params.box_id, &params);
        let lease = self.enter(caller, &params.box_id).await?;
        let attached = Box::pin(lease.attach(params, order, chunks));
        lease.outcome(attached).await
    }

    /// Returns the state of a command.
    ///
    /// Does not count as activity and does not wake the box.
    pub async fn get_command(
        &self,
        caller: &Caller,
        key: CommandKey,
    ) -> Result<CommandInfo, BoxError> {
        let order = self.order(caller, &key.box_id, &key);
        let lease = self.look(caller, &key.box_id).await?;
        lease.outcome(lease.look(&key.command_id, order)).await
    }

    /// Lists the commands of a box, oldest first.
    ///
    /// Does not count as activity and does not wake the box.
    pub async fn list_commands(
        &self,
        caller: &Caller,
        params: CommandListParams,
    ) -> Result<CommandListResult, BoxError> {
        let lease = self.look(caller, &params.box_id).await?;
        lease.outcome(lease.list(params)).await
    }

    /// Writes to the standard input of a command and answers when it is written.
    pub async fn input_command(
        &self,
        caller: &Caller,
        params: CommandInputParams,
    ) -> Result<CommandInputResult, BoxError> {
        let order = self.order(caller, &params.box_id, &params);
        let lease = self.enter(caller, &params.box_id).await?;
        let bytes = params.data.as_ref().map_or(0, |data| data.len());
        let _room = lease.carry(bytes)?;
        let asked = AgentInputParams {
            command_id: params.command_id,
            size: params.size,
            data: params.data,
            close: params.close,
        };
        let asking = ask::<AgentInput>(&lease, &asked, order);
        lease.outcome(asking).await
    }

    /// Sends a signal to a command, or kills it with all its child processes.
    pub async fn kill_command(
        &self,
        caller: &Caller,
        params: CommandKillParams,
    ) -> Result<CommandKillResult, BoxError> {
        let order = self.order(caller, &params.box_id, &params);
        let lease = self.enter(caller, &params.box_id).await?;
        let asked = AgentKillParams {
            command_id: params.command_id,
            signal: params.signal,
            grace_ms: params.grace_ms.unwrap_or_default(),
            forget: params.forget,
        };
        let asking = ask::<AgentKill>(&lease, &asked, order);
        let told = lease.outcome(asking).await?;
        Ok(CommandKillResult {
            info: lease.checked(told.info, &asked.command_id)?,
            already: told.already,
        })
    }
}

impl AgentLease {
    async fn attach(
        &self,
        params: CommandAttachParams,
        order: Queued,
        chunks: mpsc::Sender<CommandChunk>,
    ) -> Result<CommandAttachResult, BoxError> {
        let slot = self.slot().filter(|_| params.view != View::None);
        let output_view = OutputView::new(params.view, params.from, params.until.bytes, slot);
        let asked = AgentOutputParams {
            command_id: params.command_id,
            from: params.from,
            view: params.view,
            until: Until {
                bytes: None,
                ..params.until
            },
            exclusive: params.exclusive,
            pty: params.pty,
            spool: output_view.slot(),
        };
        order.comes().await;
        let to = Reader::new(&chunks, None);
        let id = &asked.command_id;
        let reading = self.read::<AgentOutput>(&asked, order, output_view, id, to);
        let (told, read) = reading.await?;
        let info = self.checked(told.info, &asked.command_id)?;
        Ok(CommandAttachResult { info, read })
    }

    async fn list(&self, params: CommandListParams) -> Result<CommandListResult, BoxError> {
        let wanted = |info: &CommandInfo| {
            let running = info.state == CommandState::Running;
            params.role.is_none_or(|role| info.role == role)
                && params.running.is_none_or(|wanted| running == wanted)
        };
        let (mut items, mut room) = (Vec::new(), LIST_BYTES);
        let mut asked = AgentListParams::default();
        loop {
            let page = self.call::<AgentList>(&asked).await?;
            let last = page.items.last().map(ListCursor::from);
            for mut info in page.items.into_iter().filter(&wanted) {
                room = room.saturating_sub(info.about_bytes());
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
            if last.is_none() || last <= asked.after {
                return Err(BoxError::unavailable(agent_violation(
                    "lists the same twice",
                )));
            }
            asked.after = last;
        }
    }

    pub(crate) async fn look(
        &self,
        id: &CommandId,
        order: Queued,
    ) -> Result<CommandInfo, BoxError> {
        let one = AgentListParams {
            command_id: Some(id.clone()),
            ..AgentListParams::default()
        };
        let info = ask::<AgentList>(self, &one, order).await?.items.pop();
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

/// Returns the command id of the caller, or a new one.
pub(crate) fn id_or_new(id: Option<CommandId>) -> Result<CommandId, BoxError> {
    Ok(match id {
        Some(id) => id,
        None => CommandId::new(Uuid::now_v7().simple().to_string())?,
    })
}

impl Handle<CommandStart> for BoxRuntime {
    async fn handle(
        &self,
        params: CommandStartParams,
        call: Call<CommandStart>,
    ) -> Result<CommandStartResult, BoxError> {
        let caller = call.caller();
        streamed(call, |chunks| self.start_command(&caller, params, chunks)).await
    }
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
                let rule = "is counted in chunks; send credit";
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
