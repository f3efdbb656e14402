//! Output on its way from an agent to whoever watches.

use std::time::Duration;

use box_protocol::actions::{
    AgentChunk, AgentCommand, AgentStart, AgentStartParams, CommandChunk, OutputGap, OutputPiece,
    SpooledPiece, StreamName, View,
};
use box_protocol::{
    Blob, CommandInfo, CommandState, MAX_CHUNK_BYTES, PerStream, Role, SessionId, UnixMs,
};
use box_rpc::{CallError, Chunks, Peer};
use futures::StreamExt as _;
use tokio::time::{Instant, timeout_at};

use super::doubt::{Failure, look_up, nonsense};
use super::exec::{NoAnswer, OUTPUT_BYTES};
use super::work::Streaming;
use crate::spool::Spool;

/// How long a reader that does not read may hold up a command whose time is over.
const STALLED_READER: Duration = Duration::from_mins(1);

/// Checks an agent's chunks and passes them on in the view asked for.
pub(super) struct Relay<'a> {
    to: &'a Streaming,
    spool: Option<&'a Spool>,
    started: Option<CommandInfo>,
    stdout: Track,
    stderr: Track,
    /// Bytes passed on, over both streams.
    pos: u64,
}

/// One stream.
#[derive(Default)]
struct Track {
    /// Where the agent is.
    told: u64,
    /// Where the reader is: the same in bytes, its own count in text.
    shown: u64,
    /// The begin of a character whose rest has not come yet.
    unfinished: Vec<u8>,
}

impl<'a> Relay<'a> {
    pub(super) fn new(
        to: &'a Streaming,
        params: &AgentStartParams,
        session_id: &SessionId,
        spool: Option<&'a Spool>,
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
            spool,
            started: Some(info),
            stdout: Track::default(),
            stderr: Track::default(),
            pos: 0,
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
            let passed_on = self
                .pass(chunk)
                .map_err(|reason| NoAnswer::Failed(Failure::Broken(reason)))?;
            if let Some(chunk) = passed_on {
                self.hand_over(chunk, until).await?;
            }
        }
        let answer = chunks.finish().await?;
        for stream in [StreamName::Stdout, StreamName::Stderr] {
            let rest = std::mem::take(&mut self.track(stream).unfinished);
            if !rest.is_empty() {
                let text = String::from_utf8_lossy(&rest).into_owned();
                let chunk = self.text(stream, text);
                self.hand_over(chunk, until).await?;
            }
        }
        Ok(answer)
    }

    /// Waits for the reader, but once the command's time is over not for ever. A reader that left
    /// without wanting the command killed misses the rest.
    async fn hand_over(&self, chunk: CommandChunk, until: Option<Instant>) -> Result<(), NoAnswer> {
        let sent = self.to.chunks.send(chunk);
        if let Some(end) = until.and_then(|until| until.checked_add(STALLED_READER)) {
            let passed_on = timeout_at(end, sent).await;
            return passed_on.map(drop).map_err(|_| NoAnswer::Silent);
        }
        let _ = sent.await;
        Ok(())
    }

    fn track(&mut self, stream: StreamName) -> &mut Track {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    /// What the reader gets for a chunk; the reason if the agent makes no sense.
    fn pass(&mut self, chunk: AgentChunk) -> Result<Option<CommandChunk>, String> {
        match chunk {
            AgentChunk::Started { pid } => match self.started.take() {
                Some(mut info) => {
                    info.pid = Some(pid);
                    Ok(Some(CommandChunk::Started(Box::new(info))))
                }
                None => Err(nonsense("started a command twice")),
            },
            _ if self.started.is_some() => Err(nonsense("told output before the start")),
            AgentChunk::Bytes(piece) => self.piece(piece.stream, piece.offset, piece.data),
            AgentChunk::Spooled(SpooledPiece {
                stream,
                offset,
                bytes,
            }) => {
                if bytes > MAX_CHUNK_BYTES as u64 {
                    return Err(nonsense("sent output out of order or too much of it"));
                }
                let data = look_up(self.spool, stream, offset, bytes)?;
                self.piece(stream, offset, data)
            }
            AgentChunk::Gap(gap) => self.gap(gap).map(Some),
        }
    }

    fn piece(
        &mut self,
        stream: StreamName,
        offset: u64,
        data: Blob,
    ) -> Result<Option<CommandChunk>, String> {
        let length = data.len();
        let track = self.track(stream);
        let in_order = length <= MAX_CHUNK_BYTES && offset == track.told;
        let Some(told) = track.told.checked_add(length as u64).filter(|_| in_order) else {
            return Err(nonsense("sent output out of order or too much of it"));
        };
        track.told = told;
        if self.to.view == View::Text {
            let text = self.track(stream).decode(&data);
            return Ok((!text.is_empty()).then(|| self.text(stream, text)));
        }
        Ok(Some(CommandChunk::Bytes(self.place(stream, data, length))))
    }

    fn text(&mut self, stream: StreamName, text: String) -> CommandChunk {
        let length = text.len();
        CommandChunk::Text(self.place(stream, text, length))
    }

    fn place<T>(&mut self, stream: StreamName, data: T, length: usize) -> OutputPiece<T> {
        let pos = self.pos;
        self.pos = self.pos.saturating_add(length as u64);
        let track = self.track(stream);
        let offset = track.shown;
        track.shown = track.shown.saturating_add(length as u64);
        OutputPiece {
            stream,
            offset,
            pos,
            at: UnixMs::now(),
            data,
        }
    }

    fn gap(&mut self, gap: OutputGap) -> Result<CommandChunk, String> {
        let track = self.track(gap.stream);
        let next = track.told.checked_add(gap.bytes);
        let shown = track.shown.checked_add(gap.bytes);
        let (Some(next), Some(shown), true) = (next, shown, gap.offset == track.told) else {
            return Err(nonsense("told an impossible gap"));
        };
        let offset = track.shown;
        track.told = next;
        track.shown = shown;
        self.pos = self.pos.saturating_add(gap.bytes);
        Ok(CommandChunk::Gap(OutputGap { offset, ..gap }))
    }
}

impl Track {
    /// The text of these bytes, as far as it is decided: what may be the begin of a character waits
    /// for the rest.
    fn decode(&mut self, bytes: &[u8]) -> String {
        self.unfinished.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.unfinished.len());
        let mut decided = 0;
        for chunk in self.unfinished.utf8_chunks() {
            text.push_str(chunk.valid());
            decided += chunk.valid().len();
            let invalid = chunk.invalid();
            let at_end = decided + invalid.len() == self.unfinished.len();
            if at_end && may_go_on(invalid) {
                break;
            }
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            decided += invalid.len();
        }
        self.unfinished.drain(..decided);
        text
    }
}

/// Whether these bytes are the begin of a character.
fn may_go_on(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_none())
}

fn size_of(chunk: &AgentChunk) -> usize {
    match chunk {
        AgentChunk::Bytes(piece) => piece.data.len().max(1),
        AgentChunk::Spooled(piece) => usize::try_from(piece.bytes).unwrap_or(usize::MAX).max(1),
        AgentChunk::Started { .. } | AgentChunk::Gap(_) => 1,
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_does_not_depend_on_where_it_is_cut(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(0xf0), Just(0x9f)], 0..64),
            cuts in proptest::collection::vec(1_usize..5, 0..64),
        ) {
            let mut track = Track::default();
            let mut text = String::new();
            let mut rest = &bytes[..];
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                text.push_str(&track.decode(piece));
                rest = after;
            }
            text.push_str(&track.decode(rest));
            text.push_str(&String::from_utf8_lossy(&track.unfinished));
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
