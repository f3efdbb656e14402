//! The output of an exec on its way from the agent to whoever watches.

use std::time::Duration;

use box_protocol::actions::{
    AgentChunk, AgentCommand, AgentStart, AgentStartParams, CommandChunk, ReadFrom,
};
use box_protocol::{CommandInfo, CommandState, PerStream, Role, SessionId, UnixMs};
use box_rpc::{CallError, Chunks, Peer};
use futures::StreamExt as _;
use tokio::time::{Instant, timeout_at};

use super::doubt::{Failure, nonsense};
use super::exec::{NoAnswer, OUTPUT_BYTES};
use super::work::Streaming;
use crate::retell::{Retelling, Told};
use crate::spool::Slot;

/// How long a reader that does not read may hold up a command whose time is over.
const STALLED_READER: Duration = Duration::from_mins(1);

/// Passes an exec's output on in the view asked for.
pub(super) struct Relay<'a> {
    to: &'a Streaming,
    started: Option<CommandInfo>,
    retelling: Retelling,
}

impl<'a> Relay<'a> {
    pub(super) fn new(
        to: &'a Streaming,
        params: &AgentStartParams,
        session_id: &SessionId,
        slot: Option<Slot>,
    ) -> Self {
        let now = UnixMs::now();
        let info = CommandInfo {
            session_id: session_id.clone(),
            command_id: params.command_id.clone(),
            role: Role::Exec,
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
        };
        Self {
            to,
            started: Some(info),
            retelling: Retelling::new(to.view, ReadFrom::default(), None, slot),
        }
    }

    /// Runs the command and passes its output on. A slow reader does not count as a silent agent.
    pub(super) async fn run(
        mut self,
        peer: &Peer,
        params: &AgentStartParams,
        until: Option<Instant>,
        grace: Duration,
    ) -> Result<AgentCommand, NoAnswer> {
        let mut chunks = peer.stream::<AgentStart>(params).await?;
        let mut overtime = 0;
        while let Some(chunk) = next(&mut chunks, until, grace).await? {
            if until.is_some_and(|until| Instant::now() > until) {
                // What was under way when the time ended may still come, but not for ever.
                overtime += size_of(&chunk);
                if overtime > OUTPUT_BYTES {
                    return Err(NoAnswer::Silent);
                }
            }
            let told = self
                .tell(chunk)
                .map_err(|reason| NoAnswer::Failed(Failure::Broken(reason)))?;
            self.hand_over(told, until).await?;
        }
        let answer = chunks.finish().await?;
        let rest = self.retelling.rest();
        self.hand_over(rest, until).await?;
        Ok(answer)
    }

    /// Waits for the reader, but once the command's time is over not for ever. A reader that left
    /// without wanting the command killed misses the rest.
    async fn hand_over(
        &self,
        chunks: Vec<CommandChunk>,
        until: Option<Instant>,
    ) -> Result<(), NoAnswer> {
        for chunk in chunks {
            let sent = self.to.chunks.send(chunk);
            if let Some(end) = until.and_then(|until| until.checked_add(STALLED_READER)) {
                timeout_at(end, sent)
                    .await
                    .map(drop)
                    .map_err(|_| NoAnswer::Silent)?;
            } else {
                let _ = sent.await;
            }
        }
        Ok(())
    }

    fn tell(&mut self, chunk: AgentChunk) -> Result<Vec<CommandChunk>, String> {
        match (self.retelling.tell(chunk)?, self.started.take()) {
            (Told::Started(pid, _), Some(mut info)) => {
                info.pid = Some(pid);
                Ok(vec![CommandChunk::Started(Box::new(info))])
            }
            (Told::Started(..), None) => Err(nonsense("started a command twice")),
            (_, Some(_)) => Err(nonsense("told output before the start")),
            (Told::Output(chunks) | Told::Enough(chunks), None) => Ok(chunks),
        }
    }
}

fn size_of(chunk: &AgentChunk) -> usize {
    match chunk {
        AgentChunk::Bytes(piece) => piece.data.len().max(1),
        AgentChunk::Spooled(piece) => usize::try_from(piece.bytes).unwrap_or(usize::MAX).max(1),
        AgentChunk::Started { .. } | AgentChunk::Begin(_) => 1,
    }
}

async fn next(
    chunks: &mut Chunks<AgentStart>,
    until: Option<Instant>,
    grace: Duration,
) -> Result<Option<AgentChunk>, NoAnswer> {
    let chunk: Option<Result<AgentChunk, CallError>> = match until {
        Some(until) => timeout_at(until.max(Instant::now() + grace), chunks.next())
            .await
            .map_err(|_| NoAnswer::Silent)?,
        None => chunks.next().await,
    };
    Ok(chunk.transpose()?)
}
