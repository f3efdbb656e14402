//! Streaming a command's output to a reader.

use std::time::Duration;

use box_protocol::actions::{
    AgentChunk, Exclusive, OutputPiece, ReadFrom, ReadWhy, SlotPiece, Until, View,
};
use box_protocol::{BoxError, MAX_CHUNK_BYTES, PerStream};
use box_rpc::{Action, ChunkSink};
use tokio::time::{Instant, sleep_until};

use crate::command::{Command, Progress, ReaderGuard};
use crate::head_buffer::INLINE;
use crate::log::{Cursor, Piece};
use crate::shm::ShmSlot;

/// After this time, blocks that are buffered for readers move to the log file.
const FLUSH_AFTER: Duration = Duration::from_millis(100);

/// How long a client whose time is over may take to accept the output that the log held then.
const SEND_LIMIT: Duration = Duration::from_secs(1);

/// The parameters of one reader.
#[derive(Debug, Default)]
pub(crate) struct ReadRequest {
    pub(crate) from: ReadFrom,
    pub(crate) view: View,
    pub(crate) limits: ReadLimits,
    pub(crate) exclusive: Option<Exclusive>,
    pub(crate) slot: Option<ShmSlot>,
}

/// Sends a command's output until its end or the reader's limits.
///
/// Returns why it stopped.
pub(crate) async fn stream<A: Action<Chunk = AgentChunk>>(
    command: &Command,
    request: ReadRequest,
    sink: &mut ChunkSink<A>,
) -> Result<ReadWhy, BoxError> {
    let mut guard = command.attach_reader(request.exclusive)?;
    let mut limits = request.limits;
    if request.view == View::None {
        let mut progress = command.watch();
        return tokio::select! {
            _ = progress.wait_for(Progress::has_ended) => command.failure().map(|()| ReadWhy::Exit),
            why = limits.reached(&mut guard) => Ok(why),
        };
    }
    let (cursor, begin) = command
        .log()
        .read_from(request.from, request.view)
        .ok_or_else(|| BoxError::validation("from: beyond the end of the output"))?;
    // A reader that takes the place of a lost one may need less.
    command.room_freed.notify_one();
    let mut reader = Reader {
        command,
        cursor,
        slot: request.slot,
        is_lost: true,
    };
    let from_start = request.from == ReadFrom::default() && begin.raw == PerStream::default();
    if !from_start {
        sink.send(&AgentChunk::Begin(begin)).await?;
    }
    let why = reader.follow(&mut limits, &mut guard, sink).await?;
    reader.is_lost = false;
    Ok(why)
}

/// A reader's position in the log. The log keeps everything after it.
struct Reader<'a> {
    command: &'a Command,
    cursor: Cursor,
    slot: Option<ShmSlot>,
    /// Whether the connection of the reader broke, which drops the call.
    is_lost: bool,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        if self.is_lost {
            self.command.log().lose(&self.cursor);
        } else {
            self.command.log().detach(&self.cursor);
        }
        self.command.room_freed.notify_one();
    }
}

impl Reader<'_> {
    /// Sends the output until the end of the command or a limit.
    async fn follow<A: Action<Chunk = AgentChunk>>(
        &mut self,
        limits: &mut ReadLimits,
        guard: &mut ReaderGuard<'_>,
        sink: &mut ChunkSink<A>,
    ) -> Result<ReadWhy, BoxError> {
        let mut changes = self.command.watch();
        let mut flush_at = None;
        let mut last = None;
        loop {
            // Read before the log, so that output between the two is not missed.
            let has_ended = changes.borrow_and_update().has_ended();
            if let Some(piece) = self.next()? {
                limits.restart_silence();
                for chunk in self.chunks(piece) {
                    tokio::select! {
                        biased;
                        () = guard.displaced() => return Ok(ReadWhy::Taken),
                        sent = sink.send(&chunk) => sent?,
                        () = limits.send_timed_out() => return Ok(ReadWhy::Time),
                    }
                }
                if limits.has_timed_out() {
                    // The reader gets what the log held at that time, and not what a command that never
                    // pauses writes meanwhile.
                    let end = *last.get_or_insert_with(|| self.command.log().size().sum());
                    if self.cursor.position() >= end {
                        return Ok(ReadWhy::Time);
                    }
                }
                continue;
            }
            if has_ended {
                return self.command.failure().map(|()| ReadWhy::Exit);
            }
            let has_buffered = self.command.log().has_buffered();
            // Counted from the first buffered block, so that a command that never pauses does not keep old output in
            // memory.
            let due = flush_at.unwrap_or_else(|| Instant::now() + FLUSH_AFTER);
            flush_at = has_buffered.then_some(due);
            tokio::select! {
                biased;
                _ = changes.changed() => {}
                () = sleep_until(due), if has_buffered => {
                    self.command.log().flush_buffered();
                    flush_at = None;
                }
                why = limits.reached(guard) => return Ok(why),
            }
        }
    }

    fn next(&mut self) -> Result<Option<Piece>, BoxError> {
        let mut log = self.command.log();
        let was_full = !log.has_room();
        let read = log.read(&mut self.cursor);
        if was_full && log.has_room() {
            self.command.room_freed.notify_one();
        }
        read.map_err(|_| BoxError::internal("log: the stored output cannot be read"))
    }

    /// Splits a piece into chunks.
    ///
    /// Large data goes to the slot and never wraps around its ring.
    fn chunks(&self, piece: Piece) -> Vec<AgentChunk> {
        let Piece {
            stream,
            mut offset,
            at,
            data,
        } = piece;
        let Some(slot) = self.slot.as_ref().filter(|_| data.len() > INLINE) else {
            return vec![inline(stream, offset, at, data)];
        };
        let mut chunks = Vec::with_capacity(2);
        let mut rest = &data[..];
        while !rest.is_empty() {
            let (part, after) = rest.split_at(rest.len().min(ShmSlot::room(offset)));
            // If the shared memory is full, the data travels in the message.
            chunks.push(match slot.write(stream, offset, part) {
                Ok(()) => AgentChunk::InSlot(SlotPiece {
                    at,
                    stream,
                    offset,
                    bytes: part.len() as u64,
                }),
                Err(_) => inline(stream, offset, at, part.to_vec()),
            });
            offset += part.len() as u64;
            rest = after;
        }
        debug_assert!(data.len() <= MAX_CHUNK_BYTES);
        chunks
    }
}

fn inline(
    stream: box_protocol::actions::StreamName,
    offset: u64,
    at: box_protocol::UnixMs,
    data: Vec<u8>,
) -> AgentChunk {
    AgentChunk::Bytes(OutputPiece {
        stream,
        offset,
        // The runtime counts the position over both streams.
        pos: 0,
        at,
        data: data.into(),
    })
}

/// When a reader stops waiting.
#[derive(Debug, Default)]
pub(crate) struct ReadLimits {
    until: Option<Instant>,
    silence: Option<Duration>,
    silent_until: Option<Instant>,
}

impl ReadLimits {
    /// The limits of a reader whose request has just arrived.
    pub(crate) fn new(until: Until) -> Self {
        let now = Instant::now();
        let after = |ms: u64| now.checked_add(Duration::from_millis(ms));
        let silence = until.silence_ms.map(Duration::from_millis);
        Self {
            until: until.ms.and_then(after),
            silence,
            silent_until: silence.and_then(|silence| now.checked_add(silence)),
        }
    }

    /// Restarts the silence limit after output.
    fn restart_silence(&mut self) {
        self.silent_until = self
            .silence
            .and_then(|silence| Instant::now().checked_add(silence));
    }

    /// Whether the time of the reader is over.
    fn has_timed_out(&self) -> bool {
        self.until.is_some_and(|until| until <= Instant::now())
    }

    /// Returns once the time is over and the client has had [`SEND_LIMIT`] to take what it gets.
    async fn send_timed_out(&self) {
        match self.until.and_then(|until| until.checked_add(SEND_LIMIT)) {
            Some(end) => sleep_until(end).await,
            None => std::future::pending().await,
        }
    }

    /// Returns once a limit is reached.
    pub(crate) async fn passed(&self) -> ReadWhy {
        let at = |end: Option<Instant>| async move {
            match end {
                Some(end) => sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = at(self.until) => ReadWhy::Time,
            () = at(self.silent_until) => ReadWhy::Silence,
        }
    }

    /// Returns once a limit is reached or another reader takes over.
    async fn reached(&self, guard: &mut ReaderGuard<'_>) -> ReadWhy {
        tokio::select! {
            why = self.passed() => why,
            () = guard.displaced() => ReadWhy::Taken,
        }
    }
}
