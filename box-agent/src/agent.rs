//! What the agent knows, and the calls it answers.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use box_protocol::actions::{
    AgentChunk, AgentCommand, AgentCommandKey, AgentHealth, AgentHealthParams, AgentHealthResult,
    AgentKill, AgentKillParams, AgentKillResult, AgentOutput, AgentOutputParams, AgentReply,
    AgentStart, AgentStartParams, AgentWait, OutputGap, OutputPiece, SpooledPiece, StreamName,
};
use box_protocol::{BoxError, CommandId, Env, ExitWhy, UnixMs};
use box_rpc::{Call, ChunkSink, Handle, Router};
use box_sys::{Ended, Init};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::CONTRACT;
use crate::keep::{Keep, Log, Piece, What};
use crate::life::{Command, Life, PIECES};
use crate::slot::{Lease, Slot};

/// Ended commands whose output and end can still be asked for. Those whose call is open until their end are not counted: their
/// answer is the last word.
const ENDED_KEPT: usize = 64;

/// What the agent knows.
#[derive(Debug)]
pub(crate) struct Agent {
    init: Mutex<Init>,
    table: Mutex<Table>,
    slots: Vec<Slot>,
}

#[derive(Debug, Default)]
struct Table {
    commands: HashMap<CommandId, Arc<Command>>,
    /// Who waits for the end of which process.
    living: HashMap<i32, oneshot::Sender<Ended>>,
    /// Ended and kept, oldest first.
    ended: VecDeque<CommandId>,
    /// What every command finds in its environment.
    env: Env,
}

/// What the agent serves.
pub(crate) fn router(agent: &Arc<Agent>) -> Router {
    Router::builder(Arc::new(Served(Arc::clone(agent))))
        .on::<AgentHealth>()
        .on::<AgentStart>()
        .on::<AgentOutput>()
        .on::<AgentWait>()
        .on::<AgentKill>()
        .build()
}

impl Agent {
    pub(crate) fn new(init: Init, slots: Vec<Slot>) -> Self {
        Self {
            init: Mutex::new(init),
            table: Mutex::default(),
            slots,
        }
    }

    pub(crate) fn init(&self) -> MutexGuard<'_, Init> {
        self.init.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn lease(&self, number: Option<u32>) -> Result<Option<Lease>, BoxError> {
        let Some(number) = number else {
            return Ok(None);
        };
        let slot = usize::try_from(number)
            .ok()
            .and_then(|number| self.slots.get(number));
        let Some(slot) = slot else {
            return Err(BoxError::validation("spool: no such slot"));
        };
        let lease = slot.lease();
        lease
            .map(Some)
            .ok_or_else(|| BoxError::conflict("spool: the slot is in use"))
    }

    fn find(&self, id: &CommandId) -> Result<Arc<Command>, BoxError> {
        let found = self.table().commands.get(id).cloned();
        found.ok_or_else(|| BoxError::not_found("no such command"))
    }

    /// Notes that a command has ended. What its call does not answer is kept for a while.
    pub(crate) fn ended(&self, command: &Command) {
        self.init().forget(&command.process);
        let mut table = self.table();
        if command.is_detached {
            table.ended.push_back(command.id.clone());
            if table.ended.len() > ENDED_KEPT
                && let Some(oldest) = table.ended.pop_front()
            {
                table.commands.remove(&oldest);
            }
        } else {
            table.commands.remove(&command.id);
        }
    }
}

/// The agent as the calls see it: they start tasks that outlive them.
struct Served(Arc<Agent>);

impl Handle<AgentHealth> for Served {
    async fn handle(
        &self,
        params: AgentHealthParams,
        _: Call<AgentHealth>,
    ) -> Result<AgentHealthResult, BoxError> {
        let mut table = self.0.table();
        if let Some(env) = params.env {
            table.env = env;
        }
        let running = table
            .commands
            .values()
            .filter(|command| !command.has_ended());
        Ok(AgentHealthResult {
            contract: CONTRACT,
            running: running.map(|command| command.id.clone()).collect(),
        })
    }
}

impl Handle<AgentStart> for Served {
    async fn handle(
        &self,
        mut params: AgentStartParams,
        mut call: Call<AgentStart>,
    ) -> Result<AgentCommand, BoxError> {
        let agent = &self.0;
        if agent.table().commands.contains_key(&params.command_id) {
            return Err(BoxError::conflict("the command runs already"));
        }
        let slot = agent.lease(params.spool)?;
        let mut env = agent.table().env.clone();
        env.extend(std::mem::take(&mut params.env));
        params.env = env;
        let (reply, timeout) = (params.reply, params.timeout_ms.map(Duration::from_millis));
        let (id, log_bytes) = (params.command_id.clone(), params.log_bytes);
        let started = agent.start(params).await?;
        let reaped = agent.end_of(&started.process);
        let detached = reply == AgentReply::Started;
        let log = Log::new(log_bytes);
        let command = Arc::new(Command::new(id.clone(), started.process, log, detached));
        agent.table().commands.insert(id, Arc::clone(&command));
        let (keep, pieces) = match reply {
            AgentReply::Started => (Keep::Log, None),
            AgentReply::Collected { bytes } => (Keep::first(bytes, slot), None),
            AgentReply::Streamed => {
                let (to, from) = mpsc::channel(2 * PIECES);
                (Keep::pass(to, slot), Some(from))
            }
        };
        let life = Life {
            agent: Arc::clone(agent),
            command: Arc::clone(&command),
            reaped,
            stdout: started.stdout,
            stderr: started.stderr,
            stdin: started.stdin,
            keep,
            timeout,
        };
        let life = tokio::spawn(life.live());
        if detached {
            return Ok(command.told());
        }
        let _owner = Owner(&command);
        if let Some(pieces) = pieces {
            let Some(sink) = call.chunks() else {
                return Err(BoxError::validation("reply: a call that does not stream"));
            };
            let pid = command.pid();
            sink.send(&AgentChunk::Started { pid }).await?;
            stream(pieces, sink).await?;
        }
        life.await
            .map_err(|_| BoxError::internal("the end of the command was not seen"))
    }
}

/// A call that stays open until the command's end. Dropped before it, the command ends.
struct Owner<'a>(&'a Command);

impl Drop for Owner<'_> {
    fn drop(&mut self) {
        if !self.0.has_ended() {
            self.0.end(ExitWhy::Killed);
        }
    }
}

async fn stream(
    mut pieces: mpsc::Receiver<Piece>,
    sink: &mut ChunkSink<AgentStart>,
) -> Result<(), BoxError> {
    let mut pos = 0;
    while let Some(Piece {
        stream,
        offset,
        what,
    }) = pieces.recv().await
    {
        let (chunk, bytes) = match what {
            What::Bytes(data) => {
                let bytes = data.len() as u64;
                (AgentChunk::Bytes(piece(stream, offset, pos, data)), bytes)
            }
            What::Spooled(bytes) => {
                let piece = SpooledPiece {
                    stream,
                    offset,
                    bytes,
                };
                (AgentChunk::Spooled(piece), bytes)
            }
            What::Lost(bytes) => (
                AgentChunk::Gap(OutputGap {
                    stream,
                    offset,
                    bytes,
                }),
                bytes,
            ),
        };
        pos += bytes;
        sink.send(&chunk).await?;
    }
    Ok(())
}

fn piece<T: From<Vec<u8>>>(
    stream: StreamName,
    offset: u64,
    pos: u64,
    data: Vec<u8>,
) -> OutputPiece<T> {
    OutputPiece {
        stream,
        offset,
        pos,
        at: UnixMs::now(),
        data: data.into(),
    }
}

impl Handle<AgentOutput> for Served {
    async fn handle(
        &self,
        params: AgentOutputParams,
        mut call: Call<AgentOutput>,
    ) -> Result<AgentCommand, BoxError> {
        let command = self.0.find(&params.command_id)?;
        let Some(sink) = call.chunks() else {
            return Err(BoxError::validation("output is only streamed"));
        };
        let mut grown = command.grown.subscribe();
        let mut ended = command.ended.subscribe();
        let (mut next, mut pos) = (params.from, 0);
        loop {
            // Looked at first: what comes between this and the look into the log is not missed.
            grown.mark_unchanged();
            let over = ended.borrow_and_update().clone();
            let mut silent = true;
            for stream in [StreamName::Stdout, StreamName::Stderr] {
                let next = match stream {
                    StreamName::Stdout => &mut next.stdout,
                    StreamName::Stderr => &mut next.stderr,
                };
                let (from, data) = command.log().of(stream).read(*next);
                if from > *next {
                    let (offset, bytes) = (*next, from - *next);
                    sink.send(&AgentChunk::Gap(OutputGap {
                        stream,
                        offset,
                        bytes,
                    }))
                    .await?;
                    pos += bytes;
                }
                *next = from + data.len() as u64;
                if !data.is_empty() {
                    silent = false;
                    let length = data.len() as u64;
                    sink.send(&AgentChunk::Bytes(piece(stream, from, pos, data)))
                        .await?;
                    pos += length;
                }
            }
            if !silent {
                continue;
            }
            if let Some(told) = over {
                return Ok(told);
            }
            tokio::select! {
                _ = grown.changed() => {}
                _ = ended.changed() => {}
            }
        }
    }
}

impl Handle<AgentWait> for Served {
    async fn handle(
        &self,
        params: AgentCommandKey,
        _: Call<AgentWait>,
    ) -> Result<AgentCommand, BoxError> {
        let command = self.0.find(&params.command_id)?;
        command.end_seen().await
    }
}

impl Handle<AgentKill> for Served {
    async fn handle(
        &self,
        params: AgentKillParams,
        _: Call<AgentKill>,
    ) -> Result<AgentKillResult, BoxError> {
        let signal = signal(&params.signal)?;
        let command = self.0.find(&params.command_id)?;
        if command.has_ended() {
            let exit = command.end_seen().await?.exit;
            return Ok(AgentKillResult {
                exit,
                already: true,
            });
        }
        command.expect_end(ExitWhy::Killed);
        let grace = Duration::from_millis(params.grace_ms);
        if signal != KILL {
            // A command that has just ended needs no signal.
            let _ = self.0.init().signal(&command.process, signal);
            let ended = timeout(grace, command.end_seen()).await;
            if grace.is_zero() {
                let exit = ended.ok().and_then(Result::ok).and_then(|told| told.exit);
                return Ok(AgentKillResult {
                    exit,
                    already: false,
                });
            }
        }
        // Also what is left of one that has ended within the grace.
        command.end(ExitWhy::Killed);
        self.0.init().kill_tree(&command.process);
        let exit = command.end_seen().await?.exit;
        Ok(AgentKillResult {
            exit,
            already: false,
        })
    }
}

const KILL: i32 = 9;

/// The number of a signal by its name, which is the same on every machine this runs on.
fn signal(name: &str) -> Result<i32, BoxError> {
    const NAMES: [(&str, i32); 11] = [
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
    ];
    let known = NAMES.iter().find(|(known, _)| *known == name);
    known
        .map(|(_, number)| *number)
        .ok_or_else(|| BoxError::validation("signal: not a name of a signal, without SIG"))
}
