//! The log of a command: the last of its output, both streams in the order they came, addressed by bytes.
//!
//! It is a row of blocks. The newest is in memory, older ones are in the store, and the oldest go when the log is full, unless
//! somebody still reads them: then the command waits. Each block knows where it begins, in bytes and in text, so that reading
//! can begin anywhere by walking one block.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use box_protocol::actions::{Collected, ReadBegin, ReadFrom, StreamName, View};
use box_protocol::{MAX_CHUNK_BYTES, PerStream, TextDecoder, UnixMs};

use crate::store::{SEGMENT, Segment, Store};

/// Bytes that a log keeps, unless its command says otherwise, and the most it may say.
const LOG_BYTES: u64 = 1 << 20;
const LOG_BYTES_MAX: u64 = 64 << 20;

/// The least, so that there is a block to drop and one to keep.
const LOG_BYTES_MIN: u64 = 4 << 10;

/// A log that keeps this much has blocks of a segment each; a smaller one has smaller blocks.
const BLOCKS: usize = 8;

/// Changes between the streams that one block holds.
const RUNS_MAX: usize = 1024;

/// Bytes of an ended command that stay in memory.
const IN_MEMORY: usize = 512;

/// The last of a command's output.
#[derive(Debug)]
pub(crate) struct Log {
    blocks: VecDeque<Block>,
    /// The number of the first block; they are numbered from 0 on.
    first: u64,
    limit: usize,
    kept: usize,
    store: Option<Arc<Store>>,
    end: Place,
    /// Who reads, and in which block they are.
    readers: BTreeMap<u64, u64>,
    next_reader: u64,
}

/// A place in a log.
#[derive(Debug, Clone, Copy, Default)]
struct Place {
    raw: PerStream,
    text: PerStream,
    stdout: TextDecoder,
    stderr: TextDecoder,
}

#[derive(Debug)]
struct Block {
    begin: Place,
    runs: Vec<Run>,
    length: usize,
    bytes: Bytes,
}

/// Bytes of one stream that came one after the other.
#[derive(Debug, Clone, Copy)]
struct Run {
    stream: StreamName,
    at: UnixMs,
    length: usize,
}

#[derive(Debug)]
enum Bytes {
    Memory(Vec<u8>),
    Stored(Segment),
}

/// Where a reader is.
#[derive(Debug)]
pub(crate) struct Cursor {
    reader: u64,
    block: u64,
    run: usize,
    /// Bytes of the block, and of its run, that were read.
    in_block: usize,
    in_run: usize,
    /// Offsets of the streams.
    at: PerStream,
}

/// A piece of one stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) stream: StreamName,
    pub(crate) offset: u64,
    pub(crate) at: UnixMs,
    pub(crate) data: Vec<u8>,
}

impl Place {
    fn advance(&mut self, stream: StreamName, bytes: &[u8]) {
        *self.raw.of_mut(stream) += bytes.len() as u64;
        let decoder = match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        };
        *self.text.of_mut(stream) += decoder.measure(bytes);
    }

    /// As a view counts.
    fn counted(&self, view: View) -> PerStream {
        match view {
            View::Text => self.text,
            View::Bytes | View::None => self.raw,
        }
    }
}

impl Log {
    pub(crate) fn new(bytes: Option<u64>, store: Option<Arc<Store>>) -> Self {
        let limit = bytes
            .unwrap_or(LOG_BYTES)
            .clamp(LOG_BYTES_MIN, LOG_BYTES_MAX);
        Self {
            blocks: VecDeque::new(),
            first: 0,
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            kept: 0,
            store,
            end: Place::default(),
            readers: BTreeMap::new(),
            next_reader: 0,
        }
    }

    /// Bytes written so far.
    pub(crate) fn size(&self) -> PerStream {
        self.end.raw
    }

    /// The first byte of each stream that is kept.
    pub(crate) fn kept_from(&self) -> PerStream {
        self.blocks
            .front()
            .unwrap_or(&Block::at(self.end))
            .begin
            .raw
    }

    /// Whether more can be taken without anything being lost that somebody is about to read.
    pub(crate) fn has_room(&self) -> bool {
        self.kept < self.limit || !self.is_needed(self.first)
    }

    fn is_needed(&self, block: u64) -> bool {
        self.readers.values().any(|at| *at <= block)
    }

    fn block_bytes(&self) -> usize {
        (self.limit / BLOCKS).clamp(512, SEGMENT)
    }

    /// Takes output, all of it; the oldest goes if need be.
    pub(crate) fn take(&mut self, stream: StreamName, mut bytes: &[u8]) {
        let at = UnixMs::now();
        while !bytes.is_empty() {
            let most = self.block_bytes();
            let full = self.blocks.back().is_none_or(|block| {
                block.length >= most
                    || block.runs.len() >= RUNS_MAX
                    || matches!(block.bytes, Bytes::Stored(_))
            });
            if full {
                self.seal();
                self.blocks.push_back(Block::at(self.end));
            }
            let Some(block) = self.blocks.back_mut() else {
                return;
            };
            let (piece, rest) = bytes.split_at(bytes.len().min(most - block.length));
            block.take(stream, at, piece);
            self.end.advance(stream, piece);
            self.kept += piece.len();
            bytes = rest;
            while self.kept > self.limit && self.blocks.len() > 1 && !self.is_needed(self.first) {
                self.drop_oldest();
            }
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.blocks.pop_front() {
            self.kept -= oldest.length;
            self.first += 1;
        }
    }

    /// Moves the newest block to the store. Without room there it stays in memory.
    fn seal(&mut self) {
        let (Some(block), Some(store)) = (self.blocks.back_mut(), &self.store) else {
            return;
        };
        block.runs.shrink_to_fit();
        if let Bytes::Memory(bytes) = &block.bytes
            && let Some(segment) = store.segment()
            && segment.write(0, bytes).is_ok()
        {
            block.bytes = Bytes::Stored(segment);
        }
    }

    /// Nothing more comes: as little as possible stays in memory.
    pub(crate) fn finish(&mut self) {
        if self
            .blocks
            .back()
            .is_some_and(|block| block.length > IN_MEMORY)
        {
            self.seal();
        }
        if let Some(block) = self.blocks.back_mut() {
            block.runs.shrink_to_fit();
            if let Bytes::Memory(bytes) = &mut block.bytes {
                bytes.shrink_to_fit();
            }
        }
        self.blocks.shrink_to_fit();
    }

    /// Begins to read, in the last block that begins not after `from` as `view` counts, or in the first that is kept. What is
    /// read from now on stays until it was. Nothing, if `from` is beyond the end.
    pub(crate) fn read_from(&mut self, from: ReadFrom, view: View) -> Option<(Cursor, ReadBegin)> {
        let end = self.end.counted(view);
        let not_after = |place: &Place| {
            let counted = place.counted(view);
            match from {
                ReadFrom::Offsets(offsets) => {
                    counted.stdout <= offsets.stdout && counted.stderr <= offsets.stderr
                }
                ReadFrom::Pos(pos) => counted.sum() <= pos,
                ReadFrom::Tail(bytes) => counted.sum() <= end.sum().saturating_sub(bytes),
            }
        };
        let beyond = match from {
            ReadFrom::Offsets(offsets) => {
                offsets.stdout > end.stdout || offsets.stderr > end.stderr
            }
            ReadFrom::Pos(pos) => pos > end.sum(),
            ReadFrom::Tail(_) => false,
        };
        if beyond {
            return None;
        }
        let at = self
            .blocks
            .iter()
            .rposition(|block| not_after(&block.begin));
        let at = at.unwrap_or(0);
        let begin = self.blocks.get(at).map_or(self.end, |block| block.begin);
        let block = self.first + at as u64;
        let reader = self.next_reader;
        self.next_reader += 1;
        self.readers.insert(reader, block);
        let cursor = Cursor {
            reader,
            block,
            run: 0,
            in_block: 0,
            in_run: 0,
            at: begin.raw,
        };
        let pending = Collected {
            stdout: begin.stdout.pending().to_vec().into(),
            stderr: begin.stderr.pending().to_vec().into(),
        };
        let begin = ReadBegin {
            raw: begin.raw,
            text: begin.text,
            pending,
            raw_end: self.end.raw,
            text_end: self.end.text,
        };
        Some((cursor, begin))
    }

    /// The next piece, if it is there already. The error is the store's.
    pub(crate) fn read(&mut self, cursor: &mut Cursor) -> std::io::Result<Option<Piece>> {
        loop {
            let Some(at) = cursor.block.checked_sub(self.first) else {
                return Err(std::io::ErrorKind::NotFound.into());
            };
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let Some(block) = self.blocks.get(at) else {
                return Ok(None);
            };
            if let Some(piece) = block.read(cursor)? {
                return Ok(Some(piece));
            }
            if at + 1 == self.blocks.len() {
                return Ok(None);
            }
            cursor.block += 1;
            (cursor.run, cursor.in_block, cursor.in_run) = (0, 0, 0);
            self.readers.insert(cursor.reader, cursor.block);
        }
    }

    /// Ends reading. What was kept for this reader alone may go.
    pub(crate) fn leave(&mut self, cursor: &Cursor) {
        self.readers.remove(&cursor.reader);
        while self.kept > self.limit && self.blocks.len() > 1 && !self.is_needed(self.first) {
            self.drop_oldest();
        }
    }
}

impl Block {
    fn at(begin: Place) -> Self {
        Self {
            begin,
            runs: Vec::new(),
            length: 0,
            bytes: Bytes::Memory(Vec::new()),
        }
    }

    fn take(&mut self, stream: StreamName, at: UnixMs, piece: &[u8]) {
        let Bytes::Memory(bytes) = &mut self.bytes else {
            return;
        };
        bytes.extend_from_slice(piece);
        self.length += piece.len();
        match self.runs.last_mut() {
            Some(run) if run.stream == stream && run.at == at => run.length += piece.len(),
            _ => self.runs.push(Run {
                stream,
                at,
                length: piece.len(),
            }),
        }
    }

    fn read(&self, cursor: &mut Cursor) -> std::io::Result<Option<Piece>> {
        while let Some(run) = self.runs.get(cursor.run) {
            let length = (run.length - cursor.in_run).min(MAX_CHUNK_BYTES);
            if length == 0 {
                // The newest run may still grow.
                if cursor.run + 1 == self.runs.len() {
                    return Ok(None);
                }
                cursor.run += 1;
                cursor.in_run = 0;
                continue;
            }
            let data = match &self.bytes {
                Bytes::Memory(bytes) => bytes[cursor.in_block..cursor.in_block + length].to_vec(),
                Bytes::Stored(segment) => segment.read(cursor.in_block, length)?,
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
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
