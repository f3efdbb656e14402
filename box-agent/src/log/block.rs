//! One block of a log: bytes of both streams, and spans that assign them.

use std::sync::Arc;

use box_protocol::actions::StreamName;
use box_protocol::{MAX_CHUNK_BYTES, UnixMs};

use super::{Cursor, Piece, Position};
use crate::log_file::{LogFile, MemoryPermit, Segment};

/// Bytes of a span in the file.
pub(super) const SPAN_BYTES: usize = 12;

/// Bytes of an ended command that may stay in memory.
const ENDED_IN_MEMORY: usize = 512;

/// A part of a log that can be read without the blocks before it.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) start: Position,
    pub(super) length: usize,
    /// The number of spans.
    pub(super) spans: usize,
    pub(super) content: Content,
}

/// Consecutive bytes of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) stream: StreamName,
    pub(super) at: UnixMs,
    pub(super) length: usize,
}

/// Where the bytes and spans are.
#[derive(Debug)]
pub(super) enum Content {
    Memory {
        bytes: Vec<u8>,
        spans: Vec<Span>,
        /// Set while the block is buffered for readers.
        buffered: Option<MemoryPermit>,
    },
    /// The bytes, followed by the spans.
    Stored(Segment),
}

impl Block {
    pub(super) fn at(start: Position) -> Self {
        Self {
            start,
            length: 0,
            spans: 0,
            content: Content::Memory {
                bytes: Vec::new(),
                spans: Vec::new(),
                buffered: None,
            },
        }
    }

    /// The bytes that count against the limit of the log.
    pub(super) fn cost(&self) -> usize {
        self.length.max(self.spans * SPAN_BYTES)
    }

    /// Whether the block is in memory for another reason than its readers.
    pub(super) fn is_in_memory(&self) -> bool {
        matches!(self.content, Content::Memory { buffered: None, .. })
    }

    pub(super) fn is_buffered(&self) -> bool {
        matches!(
            self.content,
            Content::Memory {
                buffered: Some(_),
                ..
            }
        )
    }

    pub(super) fn is_stored(&self) -> bool {
        matches!(self.content, Content::Stored(_))
    }

    /// Whether the block is in memory and larger than an ended command may keep there.
    pub(super) fn is_large_in_memory(&self) -> bool {
        self.is_in_memory() && self.cost() > ENDED_IN_MEMORY
    }

    pub(super) fn append(&mut self, stream: StreamName, at: UnixMs, piece: &[u8]) {
        let Content::Memory { bytes, spans, .. } = &mut self.content else {
            return;
        };
        bytes.extend_from_slice(piece);
        self.length += piece.len();
        match spans.last_mut() {
            Some(span) if span.stream == stream && span.at == at => span.length += piece.len(),
            _ => spans.push(Span {
                stream,
                at,
                length: piece.len(),
            }),
        }
        self.spans = spans.len();
    }

    /// Moves the block to the file if it has room, and returns whether it is there.
    pub(super) fn store(&mut self, log_file: &Arc<LogFile>) -> bool {
        let Content::Memory { bytes, spans, .. } = &self.content else {
            return true;
        };
        let encoded: Vec<u8> = spans.iter().flat_map(Span::encode).collect();
        let stored = log_file
            .segment(bytes.len() + encoded.len())
            .filter(|segment| {
                segment.write(0, bytes).is_ok() && segment.write(bytes.len(), &encoded).is_ok()
            });
        let is_stored = stored.is_some();
        if let Some(segment) = stored {
            self.content = Content::Stored(segment);
        }
        is_stored
    }

    /// Buffers the block in memory if its spans are few and the limit allows it.
    pub(super) fn buffer(&mut self, log_file: &Arc<LogFile>) -> bool {
        if let Content::Memory {
            spans, buffered, ..
        } = &mut self.content
            && size_of_val(&spans[..]) <= self.length
        {
            *buffered = log_file.memory_permit();
            return buffered.is_some();
        }
        false
    }

    /// Reads the next piece of this block, which has this number.
    pub(super) fn read(&self, number: u64, cursor: &mut Cursor) -> std::io::Result<Option<Piece>> {
        if let Content::Stored(segment) = &self.content
            && cursor.stored.0 != number
        {
            let encoded = segment.read(self.length, self.spans * SPAN_BYTES)?;
            let spans = encoded.chunks_exact(SPAN_BYTES).map(Span::decode).collect();
            cursor.stored = (number, spans);
        }
        loop {
            let spans = match &self.content {
                Content::Memory { spans, .. } => spans,
                Content::Stored(_) => &cursor.stored.1,
            };
            let Some(span) = spans.get(cursor.span).copied() else {
                return Ok(None);
            };
            let length = (span.length - cursor.in_span).min(MAX_CHUNK_BYTES);
            if length == 0 {
                // The newest span may still grow.
                if cursor.span + 1 == spans.len() {
                    return Ok(None);
                }
                cursor.span += 1;
                cursor.in_span = 0;
                continue;
            }
            let data = match &self.content {
                Content::Memory { bytes, .. } => {
                    bytes[cursor.in_block..cursor.in_block + length].to_vec()
                }
                Content::Stored(segment) => segment.read(cursor.in_block, length)?,
            };
            let offset = cursor.at.of_mut(span.stream);
            let piece = Piece {
                stream: span.stream,
                offset: *offset,
                at: span.at,
                data,
            };
            *offset += length as u64;
            cursor.in_block += length;
            cursor.in_span += length;
            return Ok(Some(piece));
        }
    }
}

impl Span {
    /// The stored form: the time with the stream in its lowest bit, then the length.
    pub(super) fn encode(&self) -> [u8; SPAN_BYTES] {
        let mut encoded = [0; SPAN_BYTES];
        let stream = u64::from(self.stream == StreamName::Stderr);
        encoded[..8].copy_from_slice(&(self.at.0 << 1 | stream).to_le_bytes());
        // A block is far shorter.
        let length = u32::try_from(self.length).unwrap_or(u32::MAX);
        encoded[8..].copy_from_slice(&length.to_le_bytes());
        encoded
    }

    pub(super) fn decode(encoded: &[u8]) -> Self {
        let number = |bytes: &[u8]| {
            let bytes = bytes.iter().rev();
            bytes.fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let (head, length) = encoded.split_at(8);
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
