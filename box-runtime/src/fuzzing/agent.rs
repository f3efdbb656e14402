//! Messages of an agent, which a guest may control.

use std::fmt::Debug;

use box_protocol::actions::{
    AgentChunk, AgentCommand, AgentEndsResult, AgentFileChunk, AgentHealthResult, AgentKillResult,
    AgentListResult, AgentOutputParams, CommandChunk, FileStatInfo, FileTreeResult, GuestInfo,
    OutputPiece, PortChunk, ReadEnd, ReadFrom, ReadWhy, SLOT_RING, SlotPiece, StreamName, Until,
    View,
};
use box_protocol::error::Detail;
use box_protocol::{Blob, Code, CommandId, MAX_CHUNK_BYTES, PerStream, is_invisible};
use box_rpc::{CallError, RpcError};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::ShmPool;
use crate::box_actor::{agents_error, checked_exit};
use crate::data_plane::NextOffset;
use crate::file_transfer;
use crate::output::{Converted, OutputView};

/// Reads messages of an agent, one per line, with the checks of the runtime.
///
/// The first line holds the parameters of `agent.output`, which describe the reader. The slots hold
/// zeros.
///
/// # Panics
/// If output that passes the checks is out of order, more than the reader wants, or depends on how
/// the agent splits it, if an error keeps text that the runtime does not pass on, or if a message is
/// another one after it is written again.
pub fn agent(text: &str, slots: &ShmPool) {
    let (first, rest) = text.split_once('\n').unwrap_or(("", text));
    let reader = serde_json::from_str(first).ok();
    let (view, from, until) = reader.map_or_else(
        || (View::Text, ReadFrom::default(), Until::default()),
        |reader: AgentOutputParams| (reader.view, reader.from, reader.until),
    );
    let mut chunks = Vec::new();
    let mut files = FileReader::default();
    for line in rest.lines() {
        if let Ok(chunk) = serde_json::from_str::<AgentChunk>(line) {
            survives(&chunk);
            chunks.push(chunk);
        } else if let Ok(chunk) = serde_json::from_str::<AgentFileChunk>(line) {
            survives(&chunk);
            files.read(chunk, slots);
        } else {
            result(line);
        }
    }
    let read = |pieces| {
        let slot = slots.to_read();
        Reading::of(
            &chunks,
            pieces,
            OutputView::new(view, from, until.bytes, slot),
        )
    };
    let whole = read(usize::MAX);
    let wanted = until.bytes.unwrap_or(u64::MAX);
    assert!(whole.output.len() as u64 <= wanted, "more than {wanted}");
    for pieces in [1, 3] {
        assert_eq!(read(pieces), whole, "in pieces of {pieces}");
    }
}

/// An error of an agent, as the codec reads it.
#[derive(Deserialize)]
struct AgentError {
    code: Code,
    message: String,
    #[serde(default)]
    data: serde_json::Value,
}

/// Reads a line as each result and error that an agent may send.
fn result(line: &str) {
    if let Ok(command) = read_again::<AgentCommand>(line) {
        for id in [command.command_id.clone(), CommandId::fresh()] {
            if let Ok(exit) = checked_exit(&command, &id) {
                assert_eq!(id, command.command_id);
                assert!(exit.code.is_none_or(|code| (0..=255).contains(&code)));
                assert!(exit.signal.is_none_or(|signal| (1..=64).contains(&signal)));
            }
        }
    }
    if let Ok(error) = serde_json::from_str::<AgentError>(line) {
        let code = error.code;
        let refused = RpcError::new(code, error.message).with_detail(&error.data);
        let told = agents_error(CallError::Refused(refused));
        assert_eq!(told.code(), code);
        assert!(told.message().chars().count() <= 512);
        assert!(!told.message().contains(is_invisible), "{told:?}");
        if let Some(detail) = told.detail::<Detail>() {
            let short = |text: Option<String>| text.is_none_or(|text| text.len() <= 32);
            assert!(short(detail.errno) && short(detail.field), "{told:?}");
            assert!(detail.limit.is_none() && detail.max.is_none(), "{told:?}");
        }
    }
    let _ = read_again::<AgentHealthResult>(line);
    let _ = read_again::<AgentListResult>(line);
    let _ = read_again::<AgentKillResult>(line);
    let _ = read_again::<AgentEndsResult>(line);
    let _ = read_again::<GuestInfo>(line);
    let _ = read_again::<FileStatInfo>(line);
    let _ = read_again::<FileTreeResult>(line);
    let _ = read_again::<PortChunk>(line);
}

/// Reads a message, and checks that it survives being written.
fn read_again<T>(line: &str) -> serde_json::Result<T>
where
    T: DeserializeOwned + Serialize + PartialEq + Debug,
{
    let read = serde_json::from_str(line)?;
    survives(&read);
    Ok(read)
}

fn survives<T>(message: &T)
where
    T: DeserializeOwned + Serialize + PartialEq + Debug,
{
    let text = serde_json::to_string(message).unwrap_or_default();
    let again = serde_json::from_str::<T>(&text);
    assert!(matches!(&again, Ok(again) if again == message), "{text}");
}

/// A reader of a file, which an agent sends in chunks.
#[derive(Default)]
struct FileReader {
    next_offset: NextOffset,
    number: u64,
    next: Option<u64>,
}

impl FileReader {
    fn read(&mut self, chunk: AgentFileChunk, slots: &ShmPool) {
        let Some(slot) = slots.to_read() else {
            return;
        };
        let read = file_transfer::checked(chunk, &slot, &mut self.number, &mut self.next_offset);
        if let Ok(chunk) = read {
            assert!(self.next.is_none_or(|next| next == chunk.offset));
            let end = chunk.offset.checked_add(chunk.data.len() as u64);
            assert!(end.is_some_and(|end| i64::try_from(end).is_ok()));
            self.next = end;
        }
    }
}

/// Everything that a reader gets.
#[derive(Debug, PartialEq)]
struct Reading {
    /// The bytes of both streams, in order.
    output: Vec<u8>,
    streams: PerStream,
    gaps: Vec<CommandChunk>,
    end: ReadEnd,
    /// The violation that ended the reading.
    violation: Option<String>,
}

impl Reading {
    /// Reads chunks after splitting them into pieces of this size.
    fn of(chunks: &[AgentChunk], pieces: usize, mut view: OutputView) -> Self {
        let mut reading = Self {
            output: Vec::new(),
            streams: PerStream::default(),
            gaps: Vec::new(),
            end: view.end(ReadWhy::Exit),
            violation: None,
        };
        let mut places: [Option<(u64, u64)>; 2] = [None; 2];
        'chunks: for chunk in chunks {
            for part in split(chunk, pieces) {
                match view.convert(part) {
                    Ok(Converted::Started(_)) => {}
                    Ok(Converted::Output(told)) => reading.take(told, &mut places),
                    Ok(Converted::Enough(told)) => {
                        reading.take(told, &mut places);
                        break 'chunks;
                    }
                    Err(violation) => {
                        reading.violation = Some(violation);
                        break 'chunks;
                    }
                }
            }
        }
        if reading.violation.is_none() {
            reading.end = view.end(ReadWhy::Exit);
            for (stream, place) in [StreamName::Stdout, StreamName::Stderr].iter().zip(places) {
                let next = reading.end.next.of(*stream);
                assert!(place.is_none_or(|(offset, _)| offset == next), "{next}");
            }
        }
        reading
    }

    /// Takes chunks, and checks that each follows the previous one of its stream.
    fn take(&mut self, told: Vec<CommandChunk>, places: &mut [Option<(u64, u64)>; 2]) {
        for chunk in told {
            let (stream, offset, pos, data) = match chunk {
                CommandChunk::Text(piece) => (
                    piece.stream,
                    piece.offset,
                    piece.pos,
                    piece.data.into_bytes(),
                ),
                CommandChunk::Bytes(piece) => {
                    assert!(piece.data.len() <= MAX_CHUNK_BYTES);
                    (piece.stream, piece.offset, piece.pos, piece.data.to_vec())
                }
                gap => {
                    self.gaps.push(gap);
                    continue;
                }
            };
            assert!(!data.is_empty());
            let length = data.len() as u64;
            for place in places.iter().flatten() {
                assert!(place.1 <= pos, "position {pos} is before {}", place.1);
            }
            let place = &mut places[stream as usize];
            if let Some((next, _)) = *place {
                assert_eq!(next, offset, "{stream:?}");
            }
            *place = Some((offset + length, pos + length));
            *self.streams.of_mut(stream) += length;
            self.output.extend(data);
        }
    }
}

/// Returns the same output in pieces.
fn split(chunk: &AgentChunk, pieces: usize) -> Vec<AgentChunk> {
    match chunk {
        // An oversized chunk is a violation only as a whole.
        AgentChunk::Bytes(piece) if (1..=MAX_CHUNK_BYTES).contains(&piece.data.len()) => {
            let mut offset = piece.offset;
            let parts = piece.data.chunks(pieces).map(|data| {
                let part = OutputPiece {
                    offset,
                    data: Blob::from(data.to_vec()),
                    ..piece.clone()
                };
                offset = offset.saturating_add(data.len() as u64);
                AgentChunk::Bytes(part)
            });
            parts.collect()
        }
        // A chunk that is not in the slot is a violation only as a whole, too.
        AgentChunk::InSlot(piece)
            if (2..=MAX_CHUNK_BYTES as u64).contains(&piece.bytes)
                && piece.offset % SLOT_RING + piece.bytes <= SLOT_RING
                && pieces < usize::MAX =>
        {
            let first = SlotPiece { bytes: 1, ..*piece };
            let rest = SlotPiece {
                offset: piece.offset.saturating_add(1),
                bytes: piece.bytes - 1,
                ..*piece
            };
            [first, rest].map(AgentChunk::InSlot).to_vec()
        }
        chunk => vec![chunk.clone()],
    }
}
