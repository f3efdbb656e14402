//! Output on its way to a reader: from where it asks, as fast as it takes it, until it has enough.

use std::time::Duration;

use box_protocol::actions::{
    AgentChunk, Exclusive, OutputPiece, ReadFrom, ReadWhy, SpooledPiece, Until, View,
};
use box_protocol::{BoxError, MAX_CHUNK_BYTES, PerStream};
use box_rpc::{Action, ChunkSink};
use tokio::time::{Instant, sleep_until};

use crate::command::{Changing, Command, Reading};
use crate::keep::INLINE;
use crate::log::{Cursor, Piece};
use crate::slot::Lease;

/// After so long, what is in memory for the sake of speed goes to the store.
const SOON: Duration = Duration::from_millis(100);

/// What a reader wants.
#[derive(Debug, Default)]
pub(crate) struct Wish {
    pub(crate) from: ReadFrom,
    pub(crate) view: View,
    pub(crate) until: Until,
    pub(crate) exclusive: Option<Exclusive>,
    pub(crate) slot: Option<Lease>,
}

/// Sends a command's output until its end, or until the reader has enough. Why it ended.
pub(crate) async fn stream<A: Action<Chunk = AgentChunk>>(
    command: &Command,
    wish: Wish,
    sink: &mut ChunkSink<A>,
) -> Result<ReadWhy, BoxError> {
    let mut reading = command.read_by(wish.exclusive)?;
    let mut patience = Patience::new(wish.until);
    if wish.view == View::None {
        let mut over = command.watch();
        return tokio::select! {
            _ = over.wait_for(Changing::has_ended) => command.failure().map(|()| ReadWhy::Exit),
            why = patience.over(&mut reading) => Ok(why),
        };
    }
    let (cursor, begin) = command
        .log()
        .read_from(wish.from, wish.view)
        .ok_or_else(|| BoxError::validation("from: beyond the end of the output"))?;
    let mut reader = Reader {
        command,
        cursor,
        slot: wish.slot,
    };
    let from_the_first = wish.from == ReadFrom::default() && begin.raw == PerStream::default();
    if !from_the_first {
        sink.send(&AgentChunk::Begin(begin)).await?;
    }
    let mut changes = command.watch();
    let mut settle_at = None;
    loop {
        // Looked at first: what comes between this and the look into the log is not missed.
        let is_over = changes.borrow_and_update().has_ended();
        if let Some(piece) = reader.next()? {
            patience.begin_anew();
            for chunk in reader.chunks(piece) {
                tokio::select! {
                    sent = sink.send(&chunk) => sent?,
                    why = patience.over(&mut reading) => return Ok(why),
                }
            }
            continue;
        }
        if is_over {
            return command.failure().map(|()| ReadWhy::Exit);
        }
        let unsettled = command.log().is_unsettled();
        // From the first block on, not the last byte: one that never pauses is not to keep what it said long ago in memory.
        let due = settle_at.unwrap_or_else(|| Instant::now() + SOON);
        settle_at = unsettled.then_some(due);
        tokio::select! {
            biased;
            _ = changes.changed() => {}
            () = sleep_until(due), if unsettled => {
                command.log().settle();
                settle_at = None;
            }
            why = patience.over(&mut reading) => return Ok(why),
        }
    }
}

/// A place in the log that nothing is dropped behind.
struct Reader<'a> {
    command: &'a Command,
    cursor: Cursor,
    slot: Option<Lease>,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.command.log().leave(&self.cursor);
        self.command.room.notify_one();
    }
}

impl Reader<'_> {
    fn next(&mut self) -> Result<Option<Piece>, BoxError> {
        let mut log = self.command.log();
        let was_full = !log.has_room();
        let read = log.read(&mut self.cursor);
        if was_full && log.has_room() {
            self.command.room.notify_one();
        }
        read.map_err(|_| BoxError::internal("the output cannot be read from its store"))
    }

    /// The piece as it is sent: what is not little goes to the slot, never over the end of its ring.
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
            let (part, after) = rest.split_at(rest.len().min(Lease::room(offset)));
            // Without memory for the slot it travels in the message.
            chunks.push(match slot.write(stream, offset, part) {
                Ok(()) => AgentChunk::Spooled(SpooledPiece {
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
        // Over both streams it is for the runtime to count.
        pos: 0,
        at,
        data: data.into(),
    })
}

/// How long a reader waits.
struct Patience {
    until: Option<Instant>,
    silence: Option<Duration>,
    quiet_until: Option<Instant>,
}

impl Patience {
    fn new(until: Until) -> Self {
        let now = Instant::now();
        let after = |ms: u64| now.checked_add(Duration::from_millis(ms));
        let silence = until.silence_ms.map(Duration::from_millis);
        Self {
            until: until.ms.and_then(after),
            silence,
            quiet_until: silence.and_then(|silence| now.checked_add(silence)),
        }
    }

    /// There was output.
    fn begin_anew(&mut self) {
        self.quiet_until = self
            .silence
            .and_then(|silence| Instant::now().checked_add(silence));
    }

    /// Returns once the reader has waited enough, or has lost its place to another.
    async fn over(&self, reading: &mut Reading<'_>) -> ReadWhy {
        let at = |end: Option<Instant>| async move {
            match end {
                Some(end) => sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = at(self.until) => ReadWhy::Time,
            () = at(self.quiet_until) => ReadWhy::Silence,
            () = reading.taken() => ReadWhy::Taken,
        }
    }
}
