//! Validates the chunks of an agent and converts them to a reader's view.
//!
//! # Output of a command
//! 1. The agent stores the output of a command in a log: the newest blocks in memory, older ones in
//!    a file. Every reader has a position in that log.
//! 2. The agent sends pieces with their offsets, small ones in messages and large ones through a
//!    slot of shared memory. The first chunk states where the stored output begins.
//! 3. [`OutputView::convert`] checks that the pieces of each stream are contiguous and within the
//!    limits. It reports output that the agent no longer has as a gap with its size.
//! 4. The bytes view passes pieces on. The text view decodes UTF-8 and counts offsets in text bytes,
//!    the same way for every reader.
//! 5. A reader that lost its connection calls `command.attach` with the offsets of
//!    [`OutputView::end`] and continues there.

use box_protocol::actions::{
    AgentChunk, CommandChunk, OutputGap, OutputPiece, ReadBegin, ReadEnd, ReadFrom, ReadWhy,
    SlotPiece, StreamName, View,
};
use box_protocol::{Blob, CommandInfo, MAX_CHUNK_BYTES, PerStream, TextDecoder, UnixMs};

use crate::box_actor::{agent_violation, read_slot};
use crate::shm::ShmSlot;

/// The result of converting one chunk of an agent.
pub(crate) enum Converted {
    /// The command has started.
    Started(Option<Box<CommandInfo>>),
    /// Chunks for the reader, possibly none.
    Output(Vec<CommandChunk>),
    /// The last chunks for a reader that has reached its byte limit.
    Enough(Vec<CommandChunk>),
}

/// Converts the output of one command for one reader.
pub(crate) struct OutputView {
    view: View,
    from: ReadFrom,
    slot: Option<ShmSlot>,
    stdout: StreamState,
    stderr: StreamState,
    /// Bytes received from the agent over both streams, as the view counts them.
    pos: u64,
    /// The offsets at which the reader can continue.
    next: PerStream,
    next_pos: u64,
    dropped: PerStream,
    /// Bytes that the reader still wants.
    wanted: Option<u64>,
    has_begun: bool,
    /// Whether the last piece lay before the start of the reader.
    is_before_start: bool,
}

/// The state of one stream.
#[derive(Default)]
struct StreamState {
    /// The offset of the agent in raw bytes.
    raw: u64,
    /// The same offset as the view counts it.
    shown: u64,
    decoder: TextDecoder,
}

/// Maximum offset that the runtime accepts from an agent.
///
/// No real command writes that much. The limit keeps sums and later offsets from overflowing.
const MAX_OFFSET: u64 = 1 << 60;

const STREAMS: [StreamName; 2] = [StreamName::Stdout, StreamName::Stderr];

impl OutputView {
    /// Creates the view of a reader with a start and an optional byte limit.
    pub(crate) fn new(
        view: View,
        from: ReadFrom,
        wanted: Option<u64>,
        slot: Option<ShmSlot>,
    ) -> Self {
        let (next, next_pos) = match from {
            ReadFrom::Offsets(offsets) => (offsets, 0),
            ReadFrom::Pos(pos) => (PerStream::default(), pos),
            ReadFrom::Tail(_) => (PerStream::default(), 0),
        };
        Self {
            view,
            from,
            slot,
            stdout: StreamState::default(),
            stderr: StreamState::default(),
            pos: 0,
            next,
            next_pos,
            dropped: PerStream::default(),
            wanted,
            has_begun: false,
            is_before_start: false,
        }
    }

    /// Returns the number of the slot that the agent may use.
    pub(crate) fn slot(&self) -> Option<u32> {
        self.slot.as_ref().map(ShmSlot::number)
    }

    /// Returns whether the reader wants any chunks.
    pub(crate) fn wants_output(&self) -> bool {
        self.view != View::None
    }

    /// Returns how reading ended.
    pub(crate) fn end(&self, why: ReadWhy) -> ReadEnd {
        ReadEnd {
            why,
            next: self.next,
            pos: self.next_pos,
            dropped: self.dropped,
        }
    }

    /// Converts a chunk of the agent. The error describes an invalid chunk.
    pub(crate) fn convert(&mut self, chunk: AgentChunk) -> Result<Converted, String> {
        let chunks = match chunk {
            AgentChunk::Started { info, .. } => return Ok(Converted::Started(info)),
            AgentChunk::Begin(begin) => self.begin(&begin)?,
            AgentChunk::Bytes(piece) => {
                self.piece(piece.stream, piece.offset, piece.at, piece.data)?
            }
            AgentChunk::InSlot(SlotPiece {
                at,
                stream,
                offset,
                bytes,
            }) => {
                if bytes > MAX_CHUNK_BYTES as u64 {
                    return Err(agent_violation(
                        "sent output out of order or beyond the size limit",
                    ));
                }
                let data = read_slot(self.slot.as_ref(), stream, offset, bytes)?;
                self.piece(stream, offset, at, data)?
            }
        };
        self.has_begun = true;
        // A reader that has not reached its start reads on, however the agent splits the output.
        Ok(if self.wanted == Some(0) && !self.is_before_start {
            Converted::Enough(chunks)
        } else {
            Converted::Output(chunks)
        })
    }

    /// Returns the replacement for incomplete characters at the end of each stream.
    pub(crate) fn finish(&mut self) -> Vec<CommandChunk> {
        let mut chunks = Vec::new();
        for stream in STREAMS {
            if self.view == View::Text
                && let Some(left) = self.state(stream).decoder.finish()
            {
                chunks.extend(self.text(stream, UnixMs::now(), left.to_string()));
            }
        }
        chunks
    }

    fn state(&mut self, stream: StreamName) -> &mut StreamState {
        match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        }
    }

    fn begin(&mut self, begin: &ReadBegin) -> Result<Vec<CommandChunk>, String> {
        let invalid = || agent_violation("began the output at an invalid offset");
        let offsets = [begin.raw, begin.raw_end, begin.text, begin.text_end];
        let is_valid = |offset: &PerStream| offset.stdout.max(offset.stderr) <= MAX_OFFSET;
        if self.has_begun || !offsets.iter().all(is_valid) {
            return Err(invalid());
        }
        let text = self.view == View::Text;
        let (shown, end) = if text {
            (begin.text, begin.text_end)
        } else {
            (begin.raw, begin.raw_end)
        };
        for (stream, pending) in STREAMS
            .into_iter()
            .zip([&begin.pending.stdout, &begin.pending.stderr])
        {
            *self.state(stream) = StreamState {
                raw: begin.raw.of(stream),
                shown: shown.of(stream),
                decoder: TextDecoder::resume(pending).ok_or_else(invalid)?,
            };
        }
        self.pos = shown.sum();
        let mut gone = PerStream::default();
        match self.from {
            ReadFrom::Offsets(from) => {
                gone.stdout = shown.stdout.saturating_sub(from.stdout);
                gone.stderr = shown.stderr.saturating_sub(from.stderr);
            }
            ReadFrom::Pos(pos) => {
                // The split of the lost bytes between the streams is unknown; their sum is known.
                let both = self.pos.saturating_sub(pos);
                gone.stdout = both.min(shown.stdout);
                gone.stderr = both - gone.stdout;
            }
            ReadFrom::Tail(bytes) => {
                self.from = ReadFrom::Pos(end.sum().saturating_sub(bytes));
            }
        }
        self.next.stdout = self.next.stdout.max(shown.stdout);
        self.next.stderr = self.next.stderr.max(shown.stderr);
        self.next_pos = self.next_pos.max(self.pos);
        let mut chunks = Vec::new();
        for stream in STREAMS {
            let bytes = gone.of(stream);
            if bytes > 0 {
                let offset = self.state(stream).shown - bytes;
                chunks.push(self.lost(OutputGap {
                    stream,
                    offset,
                    bytes,
                }));
            }
        }
        Ok(chunks)
    }

    fn lost(&mut self, gap: OutputGap) -> CommandChunk {
        let dropped = self.dropped.of_mut(gap.stream);
        *dropped = dropped.saturating_add(gap.bytes);
        CommandChunk::Gap(gap)
    }

    fn piece(
        &mut self,
        stream: StreamName,
        offset: u64,
        at: UnixMs,
        data: Blob,
    ) -> Result<Vec<CommandChunk>, String> {
        let text = self.view == View::Text;
        let state = self.state(stream);
        let in_order = data.len() <= MAX_CHUNK_BYTES && offset == state.raw;
        let raw = state.raw.checked_add(data.len() as u64);
        let Some(raw) = raw.filter(|_| in_order) else {
            return Err(agent_violation(
                "sent output out of order or beyond the size limit",
            ));
        };
        state.raw = raw;
        if text {
            let text = state.decoder.decode_owned(data.0.into());
            return Ok(self.text(stream, at, text).into_iter().collect());
        }
        let length = data.len();
        let Some((skip, keep, position)) = self.position(stream, at, length) else {
            return Ok(Vec::new());
        };
        let data = if (skip, keep) == (0, length) {
            data
        } else {
            data[skip..skip + keep].to_vec().into()
        };
        self.advance_reader(stream, keep);
        Ok(vec![CommandChunk::Bytes(position.of(data))])
    }

    fn text(&mut self, stream: StreamName, at: UnixMs, text: String) -> Option<CommandChunk> {
        let (skip, _, mut position) = self.position(stream, at, text.len())?;
        // Never splits a character. A character that does not fit comes with the next read.
        let begin = (skip..text.len()).find(|at| text.is_char_boundary(*at))?;
        let moved = (begin - skip) as u64;
        position.offset += moved;
        position.pos += moved;
        *self.next.of_mut(stream) = position.offset;
        self.next_pos = position.pos;
        // The rest of a character before the start does not count as output.
        let wanted = self.wanted.and_then(|wanted| usize::try_from(wanted).ok());
        let limit = begin.saturating_add(wanted.unwrap_or(usize::MAX));
        let end = text.floor_char_boundary(limit);
        if end == begin {
            self.wanted = Some(0);
            return None;
        }
        self.advance_reader(stream, end - begin);
        if end < text.len() {
            self.wanted = Some(0);
        }
        let text = if (begin, end) == (0, text.len()) {
            text
        } else {
            text[begin..end].to_owned()
        };
        Some(CommandChunk::Text(position.of(text)))
    }

    /// Returns how many bytes of a piece to skip and to keep, and their position.
    fn position(
        &mut self,
        stream: StreamName,
        at: UnixMs,
        length: usize,
    ) -> Option<(usize, usize, PiecePosition)> {
        let (from, pos) = (self.from, self.pos);
        let state = self.state(stream);
        let shown = state.shown;
        state.shown = shown.saturating_add(length as u64);
        self.pos = pos.saturating_add(length as u64);
        let skip = match from {
            ReadFrom::Offsets(offsets) => offsets.of(stream).saturating_sub(shown),
            ReadFrom::Pos(from) => from.saturating_sub(pos),
            ReadFrom::Tail(_) => 0,
        };
        let skip = usize::try_from(skip).unwrap_or(usize::MAX).min(length);
        self.is_before_start = skip == length;
        let next = self.next.of_mut(stream);
        *next = (*next).max(shown.saturating_add(skip as u64));
        self.next_pos = self.next_pos.max(pos.saturating_add(skip as u64));
        let wanted = self.wanted.and_then(|wanted| usize::try_from(wanted).ok());
        let keep = (length - skip).min(wanted.unwrap_or(usize::MAX));
        (keep > 0).then_some((
            skip,
            keep,
            PiecePosition {
                stream,
                at,
                offset: shown + skip as u64,
                pos: pos + skip as u64,
            },
        ))
    }

    /// Advances the reader by this many bytes.
    fn advance_reader(&mut self, stream: StreamName, bytes: usize) {
        let bytes = bytes as u64;
        *self.next.of_mut(stream) += bytes;
        self.next_pos += bytes;
        self.wanted = self.wanted.map(|wanted| wanted.saturating_sub(bytes));
    }
}

/// The position of a piece in the output.
struct PiecePosition {
    stream: StreamName,
    at: UnixMs,
    offset: u64,
    pos: u64,
}

impl PiecePosition {
    fn of<T>(self, data: T) -> OutputPiece<T> {
        OutputPiece {
            stream: self.stream,
            offset: self.offset,
            pos: self.pos,
            at: self.at,
            data,
        }
    }
}

#[cfg(test)]
mod tests;
