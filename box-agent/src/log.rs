//! The log of a command: the last of its output, both streams in the order they came, addressed by bytes.
//!
//! It is a row of blocks. The newest is in memory, older ones are in the store, all but where they begin, in bytes and in text, so
//! that reading can begin anywhere by walking one block. The oldest go when the log or the store is full, unless somebody still
//! reads them: then the command waits. How many changes between the streams there are is the guest's to say, so what is noted
//! of them counts like output where it is more.

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

/// Bytes that a run takes in the store.
const RUN_BYTES: usize = 12;

/// Blocks that may be in memory for want of room in the store, while somebody is about to read them.
const WAITING: usize = 2;

/// Bytes of an ended command that stay in memory.
const IN_MEMORY: usize = 512;

/// The last of a command's output.
#[derive(Debug)]
pub(crate) struct Log {
    blocks: VecDeque<Block>,
    /// The number of the first block; they are numbered from 0 on.
    first: u64,
    limit: usize,
    /// What the blocks cost, and how many of them are in memory.
    kept: usize,
    in_memory: usize,
    finished: bool,
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
    length: usize,
    /// How many there are.
    runs: usize,
    content: Content,
}

/// Bytes of one stream that came one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    stream: StreamName,
    at: UnixMs,
    length: usize,
}

#[derive(Debug)]
enum Content {
    Memory {
        bytes: Vec<u8>,
        runs: Vec<Run>,
    },
    /// The bytes, and behind them the runs.
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
    /// The runs of the stored block of this number.
    stored: (u64, Vec<Run>),
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
            in_memory: 0,
            finished: false,
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
        let is_stored = self.store.is_none() || self.in_memory <= WAITING;
        self.kept < self.limit && is_stored || !self.is_needed(self.first)
    }

    /// Whether any of it is in the store.
    pub(crate) fn is_spooled(&self) -> bool {
        self.blocks.len() > self.in_memory
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
                    || block.runs >= most / RUN_BYTES
                    || matches!(block.content, Content::Stored(_))
            });
            if full {
                self.seal();
                self.blocks.push_back(Block::at(self.end));
                self.in_memory += 1;
            }
            let Some(block) = self.blocks.back_mut() else {
                return;
            };
            let (piece, rest) = bytes.split_at(bytes.len().min(most - block.length));
            self.kept -= block.cost();
            block.take(stream, at, piece);
            self.kept += block.cost();
            self.end.advance(stream, piece);
            bytes = rest;
            self.trim();
        }
    }

    /// Drops what is too much, from the oldest on, up to what somebody is about to read.
    fn trim(&mut self) {
        while let Some(oldest) = self.blocks.front()
            && !self.is_needed(self.first)
            && (self.kept > self.limit && self.blocks.len() > 1
                || self.finished && oldest.is_much_in_memory())
        {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.blocks.pop_front() {
            self.kept -= oldest.cost();
            self.in_memory -= usize::from(oldest.is_in_memory());
            self.first += 1;
        }
    }

    /// Drops all that nobody is about to read.
    pub(crate) fn forget(&mut self) {
        while !self.blocks.is_empty() && !self.is_needed(self.first) {
            self.drop_oldest();
        }
        self.blocks.shrink_to_fit();
    }

    /// Moves the newest block to the store. Without room there the oldest ones go for it; if somebody is about to read those,
    /// it stays in memory.
    fn seal(&mut self) {
        let Some(store) = self.store.clone() else {
            return;
        };
        while let Some(block) = self.blocks.back_mut()
            && let Content::Memory { bytes, runs } = &block.content
        {
            let notes: Vec<u8> = runs.iter().flat_map(Run::noted).collect();
            let stored = store.segment(bytes.len() + notes.len()).filter(|segment| {
                segment.write(0, bytes).is_ok() && segment.write(bytes.len(), &notes).is_ok()
            });
            if let Some(segment) = stored {
                block.content = Content::Stored(segment);
                self.in_memory -= 1;
                return;
            }
            if self.blocks.len() == 1 || self.is_needed(self.first) {
                return;
            }
            self.drop_oldest();
        }
    }

    /// Nothing more comes: as little as possible stays in memory.
    pub(crate) fn finish(&mut self) {
        if self.blocks.back().is_some_and(Block::is_much_in_memory) {
            self.seal();
        }
        self.finished = true;
        self.trim();
        if let Some(block) = self.blocks.back_mut()
            && let Content::Memory { bytes, runs } = &mut block.content
        {
            bytes.shrink_to_fit();
            runs.shrink_to_fit();
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
            stored: (u64::MAX, Vec::new()),
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
            if let Some(piece) = block.read(cursor.block, cursor)? {
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
        self.trim();
    }
}

impl Block {
    fn at(begin: Place) -> Self {
        Self {
            begin,
            length: 0,
            runs: 0,
            content: Content::Memory {
                bytes: Vec::new(),
                runs: Vec::new(),
            },
        }
    }

    /// What it counts for.
    fn cost(&self) -> usize {
        self.length.max(self.runs * RUN_BYTES)
    }

    fn is_in_memory(&self) -> bool {
        matches!(self.content, Content::Memory { .. })
    }

    /// Whether it is in memory, and more than an ended command may have there.
    fn is_much_in_memory(&self) -> bool {
        self.is_in_memory() && self.cost() > IN_MEMORY
    }

    fn take(&mut self, stream: StreamName, at: UnixMs, piece: &[u8]) {
        let Content::Memory { bytes, runs } = &mut self.content else {
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

    /// The next piece of this block, which has this number.
    fn read(&self, number: u64, cursor: &mut Cursor) -> std::io::Result<Option<Piece>> {
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
    fn noted(&self) -> [u8; RUN_BYTES] {
        let mut note = [0; RUN_BYTES];
        let stream = u64::from(self.stream == StreamName::Stderr);
        note[..8].copy_from_slice(&(self.at.0 << 1 | stream).to_le_bytes());
        // A block is far shorter.
        let length = u32::try_from(self.length).unwrap_or(u32::MAX);
        note[8..].copy_from_slice(&length.to_le_bytes());
        note
    }

    fn from_note(note: &[u8]) -> Self {
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

#[cfg(test)]
mod tests;
