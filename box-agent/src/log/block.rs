//! One block of a log: bytes of both streams, and the runs that say which is whose.

use std::sync::Arc;

use box_protocol::actions::StreamName;
use box_protocol::{MAX_CHUNK_BYTES, UnixMs};

use super::{Cursor, Piece, Place};
use crate::store::{Held, Segment, Store};

/// Bytes that a run takes in the store.
pub(super) const RUN_BYTES: usize = 12;

/// Bytes of an ended command that stay in memory.
const IN_MEMORY: usize = 512;

/// A piece of a log, which can be read without those before it.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) begin: Place,
    pub(super) length: usize,
    /// How many there are.
    pub(super) runs: usize,
    pub(super) content: Content,
}

/// Bytes of one stream that came one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) stream: StreamName,
    pub(super) at: UnixMs,
    pub(super) length: usize,
}

/// Where the bytes and runs are.
#[derive(Debug)]
pub(super) enum Content {
    Memory {
        bytes: Vec<u8>,
        runs: Vec<Run>,
        /// There because the log is read.
        held: Option<Held>,
    },
    /// The bytes, and behind them the runs.
    Stored(Segment),
}

impl Block {
    pub(super) fn at(begin: Place) -> Self {
        Self {
            begin,
            length: 0,
            runs: 0,
            content: Content::Memory {
                bytes: Vec::new(),
                runs: Vec::new(),
                held: None,
            },
        }
    }

    /// What it counts for.
    pub(super) fn cost(&self) -> usize {
        self.length.max(self.runs * RUN_BYTES)
    }

    /// Whether it is in memory, for any other reason than that the log is read.
    pub(super) fn is_in_memory(&self) -> bool {
        matches!(self.content, Content::Memory { held: None, .. })
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self.content, Content::Memory { held: Some(_), .. })
    }

    pub(super) fn is_stored(&self) -> bool {
        matches!(self.content, Content::Stored(_))
    }

    /// Whether it is in memory, and more than an ended command may have there.
    pub(super) fn is_much_in_memory(&self) -> bool {
        self.is_in_memory() && self.cost() > IN_MEMORY
    }

    pub(super) fn take(&mut self, stream: StreamName, at: UnixMs, piece: &[u8]) {
        let Content::Memory { bytes, runs, .. } = &mut self.content else {
            return;
        };
        bytes.extend_from_slice(piece);
        self.length += piece.len();
        match runs.last_mut() {
            Some(run) if run.stream == stream && run.at == at => run.length += piece.len(),
            _ => runs.push(Run {
                stream,
                at,
                length: piece.len(),
            }),
        }
        self.runs = runs.len();
    }

    /// Moves it to the store, if there is room; whether it is there.
    pub(super) fn store(&mut self, store: &Arc<Store>) -> bool {
        let Content::Memory { bytes, runs, .. } = &self.content else {
            return true;
        };
        let notes: Vec<u8> = runs.iter().flat_map(Run::noted).collect();
        let stored = store.segment(bytes.len() + notes.len()).filter(|segment| {
            segment.write(0, bytes).is_ok() && segment.write(bytes.len(), &notes).is_ok()
        });
        let is_stored = stored.is_some();
        if let Some(segment) = stored {
            self.content = Content::Stored(segment);
        }
        is_stored
    }

    /// Lets it stay in memory for now, if its runs are few and others leave room.
    pub(super) fn hold(&mut self, store: &Arc<Store>) -> bool {
        if let Content::Memory { runs, held, .. } = &mut self.content
            && size_of_val(&runs[..]) <= self.length
        {
            *held = store.hold();
            return held.is_some();
        }
        false
    }

    /// The next piece of this block, which has this number.
    pub(super) fn read(&self, number: u64, cursor: &mut Cursor) -> std::io::Result<Option<Piece>> {
        if let Content::Stored(segment) = &self.content
            && cursor.stored.0 != number
        {
            let notes = segment.read(self.length, self.runs * RUN_BYTES)?;
            let runs = notes.chunks_exact(RUN_BYTES).map(Run::from_note).collect();
            cursor.stored = (number, runs);
        }
        loop {
            let runs = match &self.content {
                Content::Memory { runs, .. } => runs,
                Content::Stored(_) => &cursor.stored.1,
            };
            let Some(run) = runs.get(cursor.run).copied() else {
                return Ok(None);
            };
            let length = (run.length - cursor.in_run).min(MAX_CHUNK_BYTES);
            if length == 0 {
                // The newest run may still grow.
                if cursor.run + 1 == runs.len() {
                    return Ok(None);
                }
                cursor.run += 1;
                cursor.in_run = 0;
                continue;
            }
            let data = match &self.content {
                Content::Memory { bytes, .. } => {
                    bytes[cursor.in_block..cursor.in_block + length].to_vec()
                }
                Content::Stored(segment) => segment.read(cursor.in_block, length)?,
            };
            let offset = cursor.at.of_mut(run.stream);
            let piece = Piece {
                stream: run.stream,
                offset: *offset,
                at: run.at,
                data,
            };
            *offset += length as u64;
            cursor.in_block += length;
            cursor.in_run += length;
            return Ok(Some(piece));
        }
    }
}

impl Run {
    /// As it is stored: the time with the stream, and the length.
    pub(super) fn noted(&self) -> [u8; RUN_BYTES] {
        let mut note = [0; RUN_BYTES];
        let stream = u64::from(self.stream == StreamName::Stderr);
        note[..8].copy_from_slice(&(self.at.0 << 1 | stream).to_le_bytes());
        // A block is far shorter.
        let length = u32::try_from(self.length).unwrap_or(u32::MAX);
        note[8..].copy_from_slice(&length.to_le_bytes());
        note
    }

    pub(super) fn from_note(note: &[u8]) -> Self {
        let number = |bytes: &[u8]| {
            let bytes = bytes.iter().rev();
            bytes.fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let (head, length) = note.split_at(8);
        let head = number(head);
        Self {
            stream: if head & 1 == 1 {
                StreamName::Stderr
            } else {
                StreamName::Stdout
            },
            at: UnixMs(head >> 1),
            length: usize::try_from(number(length)).unwrap_or(usize::MAX),
        }
    }
}
