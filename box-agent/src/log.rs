//! The log of a command: the last of its output, both streams in the order they came, addressed by bytes.
//!
//! It is a row of blocks. The newest is in memory, older ones are in the store, all but where they begin, in bytes and in text, so
//! that reading can begin anywhere by walking one block. While a command is read, some of those stay in memory for a moment:
//! a reader that keeps up finds them there, and what is dropped before that never sees the store. The oldest go when the log or
//! the store is full, unless somebody still reads them: then the command waits. How many changes between the streams there are is
//! the guest's to say, so what is noted of them counts like output where it is more.

mod block;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use box_protocol::actions::{Collected, ReadBegin, ReadFrom, StreamName, View};
use box_protocol::{PerStream, TextDecoder, UnixMs};

use crate::store::{SEGMENT, Store};
use block::{Block, Content, RUN_BYTES};

/// Bytes that a log keeps, unless its command says otherwise, and the most it may say.
const LOG_BYTES: u64 = 1 << 20;
const LOG_BYTES_MAX: u64 = 64 << 20;

/// The least, so that there is a block to drop and one to keep.
const LOG_BYTES_MIN: u64 = 4 << 10;

/// A log that keeps this much has blocks of a segment each; a smaller one has smaller blocks.
const BLOCKS: usize = 8;

/// Blocks that may be in memory for want of room in the store, while somebody is about to read them.
const WAITING: usize = 2;

/// The last of a command's output.
#[derive(Debug)]
pub(crate) struct Log {
    blocks: VecDeque<Block>,
    /// The number of the first block; they are numbered from 0 on.
    first: u64,
    limit: usize,
    /// What the blocks cost; how many are in memory as the newest or for want of room, and how many because the log is read.
    kept: usize,
    in_memory: usize,
    held: usize,
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
    stored: (u64, Vec<block::Run>),
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
            held: 0,
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

    /// Whether any of it is in the store, or will be.
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
                block.length >= most || block.runs >= most / RUN_BYTES || !block.is_in_memory()
            });
            if full {
                self.close();
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
        while self.kept > self.limit && self.blocks.len() > 1 && !self.is_needed(self.first) {
            self.drop_oldest();
        }
        if self.finished || self.readers.is_empty() {
            self.settle();
        }
    }

    /// Whether anything is in memory for the sake of its readers.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.held > 0
    }

    /// Moves to the store what is in memory for the sake of speed, and after the end whatever is much. Without room there the
    /// oldest go for it, up to what somebody is about to read. After the end, what no store takes stays in memory, if that is little.
    pub(crate) fn settle(&mut self) {
        let mut at = 0;
        while let Some(block) = self.blocks.get(at) {
            let is_due = block.is_held() || self.finished && block.is_much_in_memory();
            if !is_due || self.put_away(at) {
                at += 1;
            } else if self.is_needed(self.first) {
                return;
            } else if self.finished && self.stays_in_memory(at) {
                at += 1;
            } else {
                self.drop_oldest();
                at = at.saturating_sub(1);
            }
        }
    }

    /// Whether a block that the store does not take may stay in memory: nothing older is in the store that could make room
    /// there, as on a full disk, and all logs together have few such blocks.
    fn stays_in_memory(&mut self, at: usize) -> bool {
        let older = self.blocks.front().is_some_and(Block::is_stored);
        let (Some(store), Some(block), false) = (&self.store, self.blocks.get_mut(at), older)
        else {
            return false;
        };
        if block.is_held() {
            return true;
        }
        let stays = block.hold(store);
        self.in_memory -= usize::from(stays);
        self.held += usize::from(stays);
        stays
    }

    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.blocks.pop_front() {
            self.kept -= oldest.cost();
            self.in_memory -= usize::from(oldest.is_in_memory());
            self.held -= usize::from(oldest.is_held());
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

    /// Closes the newest block: it stays in memory for now if the log is read, or goes to the store.
    fn close(&mut self) {
        if !self.readers.is_empty()
            && let Some(store) = &self.store
            && let Some(block) = self.blocks.back_mut()
            && block.is_in_memory()
            && block.hold(store)
        {
            self.in_memory -= 1;
            self.held += 1;
            return;
        }
        self.seal();
    }

    /// Moves the newest block to the store. Without room there the oldest ones go for it; if somebody is about to read those,
    /// it stays in memory.
    fn seal(&mut self) {
        while !self.blocks.is_empty() && !self.put_away(self.blocks.len() - 1) {
            if self.store.is_none() || self.blocks.len() == 1 || self.is_needed(self.first) {
                return;
            }
            self.drop_oldest();
        }
    }

    /// Moves a block to the store, if there is room; whether it is there.
    fn put_away(&mut self, at: usize) -> bool {
        let (Some(store), Some(block)) = (&self.store, self.blocks.get_mut(at)) else {
            return false;
        };
        let (is_held, is_in_memory) = (block.is_held(), block.is_in_memory());
        let is_stored = block.store(store);
        if is_stored {
            self.held -= usize::from(is_held);
            self.in_memory -= usize::from(is_in_memory);
        }
        is_stored
    }

    /// Nothing more comes: as little as possible stays in memory.
    pub(crate) fn finish(&mut self) {
        if self.blocks.back().is_some_and(Block::is_much_in_memory) {
            self.seal();
        }
        self.finished = true;
        self.trim();
        if let Some(block) = self.blocks.back_mut()
            && let Content::Memory { bytes, runs, .. } = &mut block.content
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

#[cfg(test)]
mod tests;
