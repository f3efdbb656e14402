//! Agent of a fake box.

use std::collections::HashMap;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::actions::{
    AgentChunk, AgentClear, AgentCommand, AgentHealth, AgentHealthParams, AgentHealthResult,
    AgentKill, AgentKillParams, AgentKillResult, AgentList, AgentListParams, AgentListResult,
    AgentReply, AgentStart, AgentStartParams, Collected, OutputPiece, StreamName,
};
use box_protocol::{
    BoxError, BoxId, BoxSpec, CommandId, CommandInfo, CommandState, Env, Exit, ExitWhy,
    MAX_CHUNK_BYTES, PerStream, Program, UnixMs,
};
use box_rpc::{Call, Empty, Handle, Router};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use super::{FakeBackend, RecordedStart, Reply, script};

struct Agent {
    backend: FakeBackend,
    box_id: Arc<str>,
    host_path: Option<String>,
    running: Commands,
    /// Environment of the box.
    env: Mutex<Env>,
}

type Commands = Arc<Mutex<HashMap<CommandId, Running>>>;

/// Running command, as seen by other calls.
#[derive(Clone)]
struct Running {
    kill: Arc<Notify>,
    /// Closes when the command has ended.
    gone: watch::Receiver<()>,
}

/// Returns the router of the agent in a box with this spec.
pub(super) fn router(backend: FakeBackend, spec: &BoxSpec) -> Router {
    let agent = Agent {
        backend,
        box_id: spec.box_id.as_str().into(),
        host_path: spec.host_path.clone().filter(|_| spec.mounts_host_path()),
        running: Commands::default(),
        env: Mutex::default(),
    };
    Router::builder(Arc::new(agent))
        .on::<AgentHealth>()
        .on::<AgentStart>()
        .on::<AgentKill>()
        .on::<AgentClear>()
        .on::<AgentList>()
        .build()
}

impl Handle<AgentHealth> for Agent {
    async fn handle(
        &self,
        params: AgentHealthParams,
        _: Call<AgentHealth>,
    ) -> Result<AgentHealthResult, BoxError> {
        if let Some(env) = params.env.filter(|_| !self.backend.forgets_commands()) {
            *self.env.lock().unwrap_or_else(PoisonError::into_inner) = env;
        }
        let trouble = self.backend.inner().health_trouble.clone();
        script::apply(trouble, "health").await?;
        Ok(AgentHealthResult {
            contract: self.backend.inner().contract,
            running: self.running().keys().cloned().collect(),
            ..AgentHealthResult::default()
        })
    }
}

impl Handle<AgentStart> for Agent {
    async fn handle(
        &self,
        params: AgentStartParams,
        mut call: Call<AgentStart>,
    ) -> Result<AgentCommand, BoxError> {
        let text = text_of(&params.program);
        let reply = self.backend.reply_to(text);
        let process_text = text.to_owned();
        let streams = matches!(params.reply, AgentReply::Streamed { .. });
        let info = streams.then(|| info_of(&params)).transpose()?;
        let RecordedStart {
            command_id,
            timeout_ms,
            mode,
        } = self.backend.record(&self.box_id, params, &self.env);
        if let Some(error) = reply.refused {
            return Err(error);
        }
        let started_at = Instant::now();
        let (alive, gone) = watch::channel(());
        let kill = Arc::new(Notify::new());
        let mut process = Process {
            agent: self,
            id: command_id.clone(),
            text: process_text,
            ended: false,
            lingers: reply.lingers,
            alive: Some(alive),
        };
        let running = Running {
            kill: Arc::clone(&kill),
            gone,
        };
        let at_once = {
            let mut all = self.running();
            all.insert(command_id.clone(), running);
            all.len()
        };
        self.backend.count_concurrent(at_once);
        self.write_files(&reply.files)?;
        if let (Some(info), Some(sink)) = (info, call.chunks()) {
            for mut chunk in chunks_of(&reply) {
                if let AgentChunk::Started { pid, info: started } = &mut chunk {
                    let pid = Some(*pid);
                    started.get_or_insert_with(|| {
                        Box::new(CommandInfo {
                            pid,
                            ..info.clone()
                        })
                    });
                }
                sink.send(&chunk).await?;
            }
        }
        let limit = timeout_ms.filter(|_| !reply.ignores_timeout);
        let limit = limit.map_or(super::FOREVER, Duration::from_millis);
        let exit = tokio::select! {
            biased;
            in_time = timeout(limit, sleep_for(reply.takes)) => match in_time {
                Ok(()) => reply.exit,
                Err(_) => Exit::by_signal(9, ExitWhy::Timeout),
            },
            () = kill.notified() => Exit::by_signal(9, ExitWhy::Killed),
        };
        process.ended = exit == reply.exit;
        if reply.disconnects {
            self.backend.cut_agent(&self.box_id);
            // A cut agent sends nothing more; the end of the connection drops this call.
            std::future::pending::<()>().await;
        }
        let answer = answer(command_id, mode, &reply, exit, started_at.elapsed());
        Ok(match &reply.tamper {
            Some(tamper) => tamper(answer),
            None => answer,
        })
    }
}

impl Handle<AgentKill> for Agent {
    async fn handle(
        &self,
        params: AgentKillParams,
        _: Call<AgentKill>,
    ) -> Result<AgentKillResult, BoxError> {
        let running = self.running().get(&params.command_id).cloned();
        let Some(Running { kill, mut gone }) = running else {
            return Err(BoxError::not_found("no such command"));
        };
        kill.notify_one();
        let _ = gone.changed().await;
        Ok(AgentKillResult {
            exit: Some(Exit::by_signal(9, ExitWhy::Killed)),
            already: false,
            info: None,
        })
    }
}

impl Handle<AgentClear> for Agent {
    async fn handle(&self, _: Empty, _: Call<AgentClear>) -> Result<Empty, BoxError> {
        let trouble = self.backend.inner().clear_trouble.clone();
        script::apply(trouble, "clear").await?;
        let running: Vec<_> = self.running().values().cloned().collect();
        for Running { kill, mut gone } in running {
            kill.notify_one();
            let _ = gone.changed().await;
        }
        Ok(Empty {})
    }
}

/// Lists running commands only, with few details.
impl Handle<AgentList> for Agent {
    async fn handle(
        &self,
        _: AgentListParams,
        _: Call<AgentList>,
    ) -> Result<AgentListResult, BoxError> {
        Ok(AgentListResult {
            items: Vec::new(),
            more: false,
        })
    }
}

impl Agent {
    fn running(&self) -> MutexGuard<'_, HashMap<CommandId, Running>> {
        locked(&self.running)
    }

    fn write_files(&self, files: &[(String, usize)]) -> Result<(), BoxError> {
        let Some(root) = &self.host_path else {
            return Ok(());
        };
        for (path, bytes) in files {
            let relative = Path::new(path);
            if relative
                .components()
                .any(|part| !matches!(part, Component::Normal(_)))
            {
                return Err(BoxError::internal("a fake's file stays in its directory"));
            }
            let file = Path::new(root).join(relative);
            let made = file.parent().map_or(Ok(()), std::fs::create_dir_all);
            made.and_then(|()| std::fs::write(file, vec![b'x'; *bytes]))
                .map_err(|error| BoxError::internal(format!("fake file: {}", error.kind())))?;
        }
        Ok(())
    }
}

/// Running command. Dropping it before its end counts as a kill.
struct Process<'a> {
    agent: &'a Agent,
    id: CommandId,
    text: String,
    ended: bool,
    lingers: Duration,
    alive: Option<watch::Sender<()>>,
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let text = std::mem::take(&mut self.text);
            self.agent.backend.inner().record.killed.push(text);
        }
        if self.ended || self.lingers.is_zero() {
            self.agent.running().remove(&self.id);
            return;
        }
        let (running, id) = (Arc::clone(&self.agent.running), self.id.clone());
        let (alive, lingers) = (self.alive.take(), self.lingers);
        tokio::spawn(async move {
            sleep(lingers).await;
            locked(&running).remove(&id);
            drop(alive);
        });
    }
}

fn locked(running: &Commands) -> MutexGuard<'_, HashMap<CommandId, Running>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sleeps, unless the duration is zero.
async fn sleep_for(time: Duration) {
    if !time.is_zero() {
        sleep(time).await;
    }
}

/// Returns the text of a command: the last argument of its program.
pub(super) fn text_of(program: &Program) -> &str {
    match program {
        Program::Argv { 0: argv, .. } => argv.last().map_or("", String::as_str),
        Program::Text { 0: text, .. } => text,
    }
}

fn info_of(params: &AgentStartParams) -> Result<CommandInfo, BoxError> {
    let now = UnixMs::now();
    Ok(CommandInfo {
        box_id: BoxId::new("box")?,
        command_id: params.command_id.clone(),
        role: params.role,
        state: CommandState::Running,
        pid: None,
        program: params.program.clone(),
        cwd: params.cwd.clone(),
        env_keys: params.env.names(),
        attached: true,
        created_at: now,
        started_at: Some(now),
        ended_at: None,
        size: PerStream::default(),
        kept_from: PerStream::default(),
        exit: None,
        error: None,
        shell_id: None,
        shell_replaced: false,
        note: None,
    })
}

fn chunks_of(reply: &Reply) -> Vec<AgentChunk> {
    if let Some(chunks) = &reply.chunks {
        return chunks.clone();
    }
    let mut chunks = vec![AgentChunk::Started { pid: 2, info: None }];
    let mut pos = 0;
    for (stream, output) in [
        (StreamName::Stdout, &reply.stdout),
        (StreamName::Stderr, &reply.stderr),
    ] {
        let mut offset = 0;
        for piece in output.chunks(MAX_CHUNK_BYTES) {
            chunks.push(AgentChunk::Bytes(OutputPiece {
                stream,
                offset,
                pos,
                at: UnixMs::now(),
                data: piece.to_vec().into(),
            }));
            offset += piece.len() as u64;
            pos += piece.len() as u64;
        }
    }
    chunks
}

fn answer(
    command_id: CommandId,
    mode: AgentReply,
    reply: &Reply,
    exit: Exit,
    took: Duration,
) -> AgentCommand {
    let limit = match mode {
        AgentReply::Collected { bytes } => usize::try_from(bytes).unwrap_or(usize::MAX),
        AgentReply::Started | AgentReply::Streamed { .. } => usize::MAX,
    };
    let kept = |output: &[u8]| output[..output.len().min(limit)].to_vec();
    let collected = matches!(mode, AgentReply::Collected { .. }).then(|| Collected {
        stdout: kept(&reply.stdout).into(),
        stderr: kept(&reply.stderr).into(),
    });
    let dropped = |output: &[u8]| output.len().saturating_sub(limit) as u64;
    AgentCommand {
        exit: Some(exit),
        duration_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        size: PerStream {
            stdout: reply.stdout.len() as u64,
            stderr: reply.stderr.len() as u64,
        },
        dropped: PerStream {
            stdout: dropped(&reply.stdout),
            stderr: dropped(&reply.stderr),
        },
        collected,
        ..AgentCommand::new(command_id, 2)
    }
}
