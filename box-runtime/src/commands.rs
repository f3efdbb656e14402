//! `command.*`: the agent keeps the commands; here they are found, filled in from the box's defaults, and told to callers.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use box_protocol::actions::{
    AgentChunk, AgentCommand, AgentInput, AgentInputParams, AgentKill, AgentKillParams, AgentList,
    AgentListParams, AgentOutput, AgentOutputParams, AgentReply, AgentStart, AgentStartParams,
    AttachOptions, CommandAttach, CommandAttachParams, CommandAttachResult, CommandChunk,
    CommandGet, CommandInput, CommandInputParams, CommandInputResult, CommandKey, CommandKill,
    CommandKillParams, CommandKillResult, CommandList, CommandListParams, CommandListResult,
    CommandStart, CommandStartParams, CommandStartResult, ListCursor, OnDisconnect, ReadEnd,
    ReadFrom, ReadWhy, Until, View,
};
use box_protocol::{BoxError, Code, CommandId, CommandInfo, CommandState, Invalid, Program};
use box_rpc::{Action, Call, Handle};
use futures::StreamExt as _;
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::data_plane::ask;
use crate::door::Inside;
use crate::env_file::environment;
use crate::handlers::{forwarded, plain, streamed};
use crate::order::Queued;
use crate::retell::{Retelling, Told};
use crate::runtime::BoxRuntime;
use crate::session::{agents_error, nonsense};
use box_rpc::Caller;

/// The longest list of commands there is, about what a message holds. Lists by role or of what runs are shorter.
const LIST_BYTES: usize = 12 << 20;

/// Where commands start whose box says nothing about it.
pub(crate) const DEFAULT_CWD: &str = box_protocol::DEFAULT_MOUNT_PATH;

impl BoxRuntime {
    /// Starts a command, or finds the one that has its id. With a place for chunks and `attach` it stays until the reading
    /// ends; dropping the future then kills the command, unless that was asked not to be done.
    pub async fn start_command(
        &self,
        caller: &Caller,
        params: CommandStartParams,
        chunks: Option<mpsc::Sender<CommandChunk>>,
    ) -> Result<CommandStartResult, BoxError> {
        let order = self.order(caller, &params.session_id, &params);
        let inside = self.enter(caller, &params.session_id).await?;
        let attach = chunks.and_then(|chunks| Some((chunks, params.attach.clone()?)));
        let asked = inside.outcome(Box::pin(inside.asked(params))).await?;
        self.begin(&inside, asked, order, attach).await
    }

    /// Starts a command with what is configured for all of them.
    pub(crate) async fn begin(
        &self,
        inside: &Inside,
        mut asked: AgentStartParams,
        order: Queued,
        attach: Option<(mpsc::Sender<CommandChunk>, AttachOptions)>,
    ) -> Result<CommandStartResult, BoxError> {
        let kept = self.shared().config.command_retention.as_millis();
        let kept = i64::try_from(kept).unwrap_or(i64::MAX);
        asked.retain_ms.get_or_insert(kept);
        order.comes().await;
        // Boxed, because every future that starts a command holds this one.
        let starting = Box::pin(inside.start(asked, order, attach));
        inside.outcome(starting).await
    }

    /// Reads a command's output. Dropping the future ends nothing else.
    pub async fn attach_command(
        &self,
        caller: &Caller,
        params: CommandAttachParams,
        chunks: mpsc::Sender<CommandChunk>,
    ) -> Result<CommandAttachResult, BoxError> {
        let order = self.order(caller, &params.session_id, &params);
        let inside = self.enter(caller, &params.session_id).await?;
        let attached = Box::pin(inside.attach(params, order, chunks));
        inside.outcome(attached).await
    }

    /// What is known of a command. To look is not to use.
    pub async fn get_command(
        &self,
        caller: &Caller,
        key: CommandKey,
    ) -> Result<CommandInfo, BoxError> {
        let order = self.order(caller, &key.session_id, &key);
        let inside = self.look(caller, &key.session_id).await?;
        inside.outcome(inside.look(&key.command_id, order)).await
    }

    /// The commands of a box, oldest first. To look is not to use.
    pub async fn list_commands(
        &self,
        caller: &Caller,
        params: CommandListParams,
    ) -> Result<CommandListResult, BoxError> {
        let inside = self.look(caller, &params.session_id).await?;
        inside.outcome(inside.list(params)).await
    }

    /// Writes to a command's input; answered when that is written.
    pub async fn input_command(
        &self,
        caller: &Caller,
        params: CommandInputParams,
    ) -> Result<CommandInputResult, BoxError> {
        let order = self.order(caller, &params.session_id, &params);
        let inside = self.enter(caller, &params.session_id).await?;
        let bytes = params.data.as_ref().map_or(0, |data| data.len());
        let _room = inside.carry(bytes)?;
        let asked = AgentInputParams {
            command_id: params.command_id,
            size: params.size,
            data: params.data,
            close: params.close,
        };
        let asking = ask::<AgentInput>(&inside, &asked, order);
        inside.outcome(asking).await
    }

    /// Signals a command, or ends it with all it has started.
    pub async fn kill_command(
        &self,
        caller: &Caller,
        params: CommandKillParams,
    ) -> Result<CommandKillResult, BoxError> {
        let order = self.order(caller, &params.session_id, &params);
        let inside = self.enter(caller, &params.session_id).await?;
        let asked = AgentKillParams {
            command_id: params.command_id,
            signal: params.signal,
            grace_ms: params.grace_ms.unwrap_or_default(),
            forget: params.forget,
        };
        let asking = ask::<AgentKill>(&inside, &asked, order);
        let told = inside.outcome(asking).await?;
        Ok(CommandKillResult {
            info: inside.checked(told.info, &asked.command_id)?,
            already: told.already,
        })
    }
}

impl Inside {
    async fn attach(
        &self,
        params: CommandAttachParams,
        order: Queued,
        chunks: mpsc::Sender<CommandChunk>,
    ) -> Result<CommandAttachResult, BoxError> {
        let slot = self.slot().filter(|_| params.view != View::None);
        let retelling = Retelling::new(params.view, params.from, params.until.bytes, slot);
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
            spool: retelling.slot(),
        };
        order.comes().await;
        let id = &asked.command_id;
        let (told, read) = self
            .read::<AgentOutput>(&asked, order, retelling, id, &chunks)
            .await?;
        let info = self.info(told, &asked.command_id)?;
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
                info.session_id = params.session_id.clone();
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
            // An agent that goes back would be asked for ever.
            if last.is_none() || last <= asked.after {
                return Err(BoxError::unavailable(nonsense("lists the same twice")));
            }
            asked.after = last;
        }
    }

    /// What the agent is asked for: the caller's words over the box's defaults.
    async fn asked(&self, params: CommandStartParams) -> Result<AgentStartParams, BoxError> {
        let own = params.command_id.as_ref().map(|_| own_words(&params));
        let defaults = self.defaults().unwrap_or_default();
        let session_id = &params.session_id;
        let env = environment(&self.agent, session_id, &defaults, params.env);
        let env = self.attended(env).await??;
        let program = match (params.program, defaults.shell) {
            (Program::Text { 0: text, .. }, Some(shell)) => {
                Program::argv([shell, "-c".to_owned(), text])?
            }
            (program, _) => program,
        };
        let command_id = id_or_new(params.command_id)?;
        let cwd = params.cwd.or(defaults.cwd);
        let cwd = cwd.unwrap_or_else(|| DEFAULT_CWD.to_owned());
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
            retain_ms: params.retain_ms,
            role: params.role,
            note: params.note,
            asked: own,
            ..AgentStartParams::new(command_id, program, cwd)
        })
    }

    /// Starts what is asked for, and stays with it if somebody wants to read it.
    pub(crate) async fn start(
        &self,
        asked: AgentStartParams,
        order: Queued,
        attach: Option<(mpsc::Sender<CommandChunk>, AttachOptions)>,
    ) -> Result<CommandStartResult, BoxError> {
        let (trail, card) = (self.trail(), self.card());
        trail.started(self.caller(), &asked, &self.agent, card);
        let id = asked.command_id.clone();
        let begun = self.start_now(asked, order, attach).await;
        match &begun {
            Ok(begun) if begun.existed => trail.not_started(&id, None, card),
            // After others it may run.
            Err(error) if refuses(error.code()) => trail.not_started(&id, Some(error), card),
            Ok(_) | Err(_) => {}
        }
        begun
    }

    async fn start_now(
        &self,
        mut asked: AgentStartParams,
        order: Queued,
        attach: Option<(mpsc::Sender<CommandChunk>, AttachOptions)>,
    ) -> Result<CommandStartResult, BoxError> {
        let Some((chunks, attach)) = attach else {
            let told = ask::<AgentStart>(self, &asked, order).await?;
            let existed = told.existed;
            let info = self.info(told, &asked.command_id)?;
            return Ok(CommandStartResult {
                info,
                existed,
                read: None,
                adjusted: Vec::new(),
            });
        };
        if attach.until.bytes.is_some() && !asked.keep {
            let rule = "leaves the command to nobody: it needs on_disconnect keep";
            return Err(Invalid::new("attach.until.bytes", rule).into());
        }
        let slot = self.slot();
        let retelling = Retelling::new(attach.view, ReadFrom::default(), attach.until.bytes, slot);
        asked.spool = retelling.slot();
        asked.reply = AgentReply::Streamed {
            until: Until {
                bytes: None,
                ..attach.until
            },
        };
        let id = &asked.command_id;
        let (told, read) = self
            .read::<AgentStart>(&asked, order, retelling, id, &chunks)
            .await?;
        let existed = told.existed;
        let info = self.info(told, &asked.command_id)?;
        Ok(CommandStartResult {
            info,
            existed,
            read: Some(read),
            adjusted: Vec::new(),
        })
    }

    /// Asks the agent for output, and passes it on until it ends or the reader has enough.
    async fn read<A>(
        &self,
        asked: &A::Params,
        order: Queued,
        mut retelling: Retelling,
        id: &CommandId,
        to: &mpsc::Sender<CommandChunk>,
    ) -> Result<(AgentCommand, ReadEnd), BoxError>
    where
        A: Action<Chunk = AgentChunk, Result = AgentCommand>,
    {
        let stream = self.attended(self.agent.stream::<A>(asked)).await?;
        drop(order);
        let mut stream = stream.map_err(agents_error)?;
        // The first says that the agent is there; those after it come when there is output.
        let mut next = self.attended(stream.next()).await?;
        while let Some(chunk) = next {
            let told = retelling.tell(chunk.map_err(agents_error)?);
            let told = told.map_err(BoxError::unavailable)?;
            let (chunks, enough) = match told {
                Told::Started(_, info) => {
                    let info = self.checked(info, id)?;
                    (vec![CommandChunk::Started(Box::new(info))], false)
                }
                Told::Output(chunks) => (chunks, false),
                Told::Enough(chunks) => (chunks, true),
            };
            for chunk in chunks {
                if to.send(chunk).await.is_err() {
                    return Err(BoxError::cancelled("nobody takes the chunks"));
                }
            }
            if enough {
                drop(stream);
                let mut told = AgentCommand::new(id.clone(), 0);
                told.info = Some(Box::new(self.look(id, Queued::none()).await?));
                return Ok((told, retelling.end(ReadWhy::Bytes)));
            }
            next = stream.next().await;
        }
        let mut told = stream.finish().await.map_err(agents_error)?;
        let why = told.why.unwrap_or(ReadWhy::Exit);
        if why == ReadWhy::Exit {
            for chunk in retelling.rest() {
                // The answer is on its way to whoever does not take this.
                let _ = to.send(chunk).await;
            }
            for shown in std::mem::take(&mut told.shown) {
                if retelling.is_told() {
                    let _ = to.send(CommandChunk::Display(shown)).await;
                }
            }
        }
        Ok((told, retelling.end(why)))
    }

    async fn look(&self, id: &CommandId, order: Queued) -> Result<CommandInfo, BoxError> {
        let one = AgentListParams {
            command_id: Some(id.clone()),
            ..AgentListParams::default()
        };
        let info = ask::<AgentList>(self, &one, order).await?.items.pop();
        self.checked(info.map(Box::new), id)
    }

    fn info(&self, told: AgentCommand, id: &CommandId) -> Result<CommandInfo, BoxError> {
        self.checked(told.info, id)
    }

    /// What an agent says of a command, if it is about that one. Whose box it is, it cannot know.
    fn checked(
        &self,
        info: Option<Box<CommandInfo>>,
        id: &CommandId,
    ) -> Result<CommandInfo, BoxError> {
        let info = info.filter(|info| info.command_id == *id);
        let mut info =
            info.ok_or_else(|| BoxError::unavailable(nonsense("answered for another command")))?;
        info.session_id = self.spec().session_id.clone();
        Ok(*info)
    }
}

/// A digest of what a caller asks for. What the box adds to it may change until the caller repeats the call.
fn own_words(params: &CommandStartParams) -> String {
    let mut hasher = DefaultHasher::new();
    params.program.hash(&mut hasher);
    params.cwd.hash(&mut hasher);
    params.user.hash(&mut hasher);
    params.env.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The command's id, made up if the caller has none.
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
            // Without chunks the call waits for the end, and answers with the result alone.
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

/// Whether an error says that nothing was started.
fn refuses(code: Code) -> bool {
    matches!(
        code,
        Code::Validation | Code::NotFound | Code::Denied | Code::Capacity | Code::Conflict
    )
}
