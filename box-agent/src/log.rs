//! The log of a command: the last part of its output, addressed by bytes.
//!
//! The log holds both streams in order of arrival as a sequence of blocks. The newest block is in memory; older ones
//! are in the log file. The start offset of every block stays in memory, in bytes and in text, so a reader can start
//! anywhere by scanning one block.
//!
//! While a command is read, some full blocks stay buffered in memory for a moment. A reader that keeps up finds them
//! there, and a block that is dropped before never reaches the file.
//!
//! The oldest blocks are dropped when the log or the file is full. If a reader still needs them, the command waits
//! instead, for a while also if that reader was lost.
//!
//! The log of an exec that returns its output keeps the first bytes instead: those that the reply contains.
//!
//! The guest controls how often the output switches streams. The metadata of a block therefore counts as output where
//! it is larger.

mod block;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::{Collected, ReadBegin, ReadFrom, StreamName, View};
use box_protocol::{PerStream, TextDecoder, UnixMs};

use tokio::time::Instant;

use crate::head_buffer::HeadBuffers;
use crate::log_file::{LogFile, SEGMENT};
use block::{Block, Content, SPAN_BYTES};

/// Default and maximum size of a log in bytes.
const LOG_BYTES: u64 = 1 << 20;
const LOG_BYTES_MAX: u64 = 64 << 20;

/// Minimum size of a log: one block to drop and one to keep.
const LOG_BYTES_MIN: u64 = 4 << 10;

/// Blocks per log.
///
/// The block of a large log is a segment; a smaller log has smaller blocks.
const BLOCKS: usize = 8;

/// Blocks that may stay in memory for their readers while the file is full.
const MEMORY_BLOCKS: usize = 2;

/// The last part of a command's output.
#[derive(Debug)]
pub(crate) struct Log {
    blocks: VecDeque<Block>,
    /// The number of the first block. Blocks are numbered from 0.
    first: u64,
    limit: usize,
    /// The cost of all blocks, and the numbers of blocks in memory.
    ///
    /// `in_memory` counts the newest block and those that the full file does not take; `buffered` counts those held for
    /// readers.
    kept_bytes: usize,
    in_memory: usize,
    buffered: usize,
    finished: bool,
    /// What the log keeps instead of blocks.
    head: Option<Box<HeadBuffers>>,
    file: Option<Arc<LogFile>>,
    end: Position,
    /// The block of each reader.
    readers: BTreeMap<u64, u64>,
    /// How long a lost reader counts as one, and the block and the end of that time.
    lost_limit: Duration,
    lost: Option<(u64, Instant)>,
    next_reader: u64,
}

/// A position in a log.
#[derive(Debug, Clone, Copy, Default)]
struct Position {
    raw: PerStream,
    text: PerStream,
    stdout: TextDecoder,
    stderr: TextDecoder,
}

/// The position of a reader.
#[derive(Debug)]
pub(crate) struct Cursor {
    reader: u64,
    block: u64,
    span: usize,
    /// Bytes of the block, and of its span, that were read.
    in_block: usize,
    in_span: usize,
    /// Offsets of the streams.
    at: PerStream,
    /// The number and the spans of the last read stored block.
    stored: (u64, Vec<block::Span>),
}

impl Cursor {
    /// The position in the combined output of both streams, in bytes.
    pub(crate) fn position(&self) -> u64 {
        self.at.sum()
    }
}

/// A piece of one stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) stream: StreamName,
    pub(crate) offset: u64,
    pub(crate) at: UnixMs,
    pub(crate) data: Vec<u8>,
}

impl Position {
    fn advance(&mut self, stream: StreamName, bytes: &[u8]) {
        *self.raw.of_mut(stream) += bytes.len() as u64;
        let decoder = match stream {
            StreamName::Stdout => &mut self.stdout,
            StreamName::Stderr => &mut self.stderr,
        };
        *self.text.of_mut(stream) += decoder.measure(bytes);
    }

    /// The offsets in the unit of this view.
    fn offsets(&self, view: View) -> PerStream {
        match view {
            View::Text => self.text,
            View::Bytes | View::None => self.raw,
        }
    }
}

impl Log {
    pub(crate) fn new(bytes: Option<u64>, log_file: Option<Arc<LogFile>>) -> Self {
        let limit = bytes
            .unwrap_or(LOG_BYTES)
            .clamp(LOG_BYTES_MIN, LOG_BYTES_MAX);
        Self {
            blocks: VecDeque::new(),
            first: 0,
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
            kept_bytes: 0,
            in_memory: 0,
            buffered: 0,
            finished: false,
            head: None,
            file: log_file,
            end: Position::default(),
            readers: BTreeMap::new(),
            lost_limit: Duration::ZERO,
            lost: None,
            next_reader: 0,
        }
    }

    /// Keeps the first bytes of the output and no others.
    pub(crate) fn keep_head(&mut self, head: HeadBuffers) {
        self.head = Some(Box::new(head));
    }

    /// The first bytes, if the log keeps those.
    pub(crate) fn head(&self) -> Option<&HeadBuffers> {
        self.head.as_deref()
    }

    /// Takes the first bytes for the reply.
    pub(crate) fn take_head(&mut self) -> Option<HeadBuffers> {
        self.head.take().map(|head| *head)
    }

    /// Sets how long a lost reader counts as a reader.
    pub(crate) fn keep_for_lost(&mut self, limit: Option<Duration>) {
        self.lost_limit = limit.unwrap_or_default();
    }

    /// Bytes written so far.
    pub(crate) fn size(&self) -> PerStream {
        self.end.raw
    }

    /// The first kept byte of each stream.
    pub(crate) fn kept_from(&self) -> PerStream {
        self.blocks
            .front()
            .unwrap_or(&Block::at(self.end))
            .start
            .raw
    }

    /// Whether the log can take more output without losing a block that a reader needs.
    pub(crate) fn has_room(&self) -> bool {
        let is_stored = self.file.is_none() || self.in_memory <= MEMORY_BLOCKS;
        let is_full = self.kept_bytes >= self.limit && self.may_be_needed(self.first);
        !is_full && (is_stored || !self.is_needed(self.first))
    }

    /// Whether a block is in the file or about to move there.
    pub(crate) fn has_stored(&self) -> bool {
        self.blocks.len() > self.in_memory
    }

    /// Whether a reader has not read a block.
    fn is_needed(&self, block: u64) -> bool {
        let now = Instant::now;
        self.readers.values().any(|at| *at <= block)
            || self
                .lost
                .is_some_and(|(at, end)| at <= block && now() < end)
    }

    /// Whether a reader may lack a block: a lost one has not received what was on the way to it.
    ///
    /// That is less than a quarter of a log.
    fn may_be_needed(&self, block: u64) -> bool {
        let on_the_way = if self.lost_limit.is_zero() {
            0
        } else {
            self.limit / 4 / self.block_bytes()
        };
        self.is_needed(block.saturating_add(on_the_way as u64))
    }

    /// Until when the log keeps blocks for a lost reader.
    pub(crate) fn lost_until(&self) -> Option<Instant> {
        self.lost.map(|(_, end)| end)
    }

    fn block_bytes(&self) -> usize {
        (self.limit / BLOCKS).clamp(512, SEGMENT)
    }

    /// Appends output. The oldest blocks are dropped if necessary.
    pub(crate) fn append(&mut self, stream: StreamName, mut bytes: &[u8]) {
        if let Some(head) = &mut self.head {
            head.append(stream, bytes);
            // The reply alone shows this output, so its text has no offsets.
            *self.end.raw.of_mut(stream) += bytes.len() as u64;
            return;
        }
        let at = UnixMs::now();
        while !bytes.is_empty() {
            let max = self.block_bytes();
            let full = self.blocks.back().is_none_or(|block| {
                block.length >= max || block.spans >= max / SPAN_BYTES || !block.is_in_memory()
            });
            if full {
                self.close_newest();
                self.blocks.push_back(Block::at(self.end));
                self.in_memory += 1;
            }
            let Some(block) = self.blocks.back_mut() else {
                return;
            };
            let (piece, rest) = bytes.split_at(bytes.len().min(max - block.length));
            self.kept_bytes -= block.cost();
            block.append(stream, at, piece);
            self.kept_bytes += block.cost();
            self.end.advance(stream, piece);
            bytes = rest;
            self.trim();
        }
    }

    /// Drops the oldest blocks beyond the limit, up to the first needed one.
    fn trim(&mut self) {
        while self.kept_bytes > self.limit
            && self.blocks.len() > 1
            && !self.may_be_needed(self.first)
        {
            self.drop_oldest();
        }
        if self.finished || self.readers.is_empty() {
            self.flush_buffered();
        }
    }

    /// Whether blocks are buffered for readers.
    pub(crate) fn has_buffered(&self) -> bool {
        self.buffered > 0
    }

    /// Moves buffered blocks to the file.
    ///
    /// After the end it also moves the large newest block. If the file is full, the oldest blocks are dropped, up to
    /// the first one that a reader needs. After the end, a few blocks that do not fit stay in memory.
    pub(crate) fn flush_buffered(&mut self) {
        let mut at = 0;
        while let Some(block) = self.blocks.get(at) {
            let is_due = block.is_buffered() || self.finished && block.is_large_in_memory();
            if !is_due || self.move_to_file(at) {
                at += 1;
            } else if self.is_needed(self.first) {
                return;
            } else if self.finished && self.keep_in_memory(at) {
                at += 1;
            } else {
                self.drop_oldest();
                at = at.saturating_sub(1);
            }
        }
    }

    /// Whether a block that does not fit into the file may stay in memory.
    ///
    /// It may if no older block of this log is in the file, as on a full disk, and if the limit on buffered blocks
    /// allows it.
    fn keep_in_memory(&mut self, at: usize) -> bool {
        let older = self.blocks.front().is_some_and(Block::is_stored);
        let (Some(log_file), Some(block), false) = (&self.file, self.blocks.get_mut(at), older)
        else {
            return false;
        };
        if block.is_buffered() {
            return true;
        }
        let stays = block.buffer(log_file);
        self.in_memory -= usize::from(stays);
        self.buffered += usize::from(stays);
        stays
    }

    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.blocks.pop_front() {
            self.kept_bytes -= oldest.cost();
            self.in_memory -= usize::from(oldest.is_in_memory());
            self.buffered -= usize::from(oldest.is_buffered());
            self.first += 1;
        }
    }

    /// Drops all blocks that no reader needs.
    pub(crate) fn drop_unneeded(&mut self) {
        self.lost = None;
        while !self.blocks.is_empty() && !self.is_needed(self.first) {
            self.drop_oldest();
        }
        self.blocks.shrink_to_fit();
    }

    /// Closes the newest block.
    ///
    /// It stays buffered while the log is read, or moves to the file.
    fn close_newest(&mut self) {
        if !self.readers.is_empty()
            && let Some(log_file) = &self.file
            && let Some(block) = self.blocks.back_mut()
            && block.is_in_memory()
            && block.buffer(log_file)
        {
            self.in_memory -= 1;
            self.buffered += 1;
            return;
        }
        self.store_newest();
    }

    /// Moves the newest block to the file.
    ///
    /// If the file is full, the oldest blocks are dropped. If a reader needs those, the block stays in memory.
    fn store_newest(&mut self) {
        while !self.blocks.is_empty() && !self.move_to_file(self.blocks.len() - 1) {
            if self.file.is_none() || self.blocks.len() == 1 || self.is_needed(self.first) {
                return;
            }
            self.drop_oldest();
        }
    }

    /// Moves a block to the file if it has room, and returns whether it is there.
    fn move_to_file(&mut self, at: usize) -> bool {
        let (Some(log_file), Some(block)) = (&self.file, self.blocks.get_mut(at)) else {
            return false;
        };
        let (is_buffered, is_in_memory) = (block.is_buffered(), block.is_in_memory());
        let is_stored = block.store(log_file);
        if is_stored {
            self.buffered -= usize::from(is_buffered);
            self.in_memory -= usize::from(is_in_memory);
        }
        is_stored
    }

    /// Ends the log and minimises its memory.
    pub(crate) fn finish(&mut self) {
        if self.blocks.back().is_some_and(Block::is_large_in_memory) {
            self.store_newest();
        }
        self.finished = true;
        self.trim();
        if let Some(block) = self.blocks.back_mut()
            && let Content::Memory { bytes, spans, .. } = &mut block.content
        {
            bytes.shrink_to_fit();
            spans.shrink_to_fit();
        }
        self.blocks.shrink_to_fit();
    }

    /// Attaches a reader near `from`.
    ///
    /// The reader starts at the last block that begins at or before `from` in the unit of `view`, or at the first kept
    /// block. The log keeps the following output until the reader has read it. Returns `None` if `from` is beyond the
    /// end.
    pub(crate) fn read_from(&mut self, from: ReadFrom, view: View) -> Option<(Cursor, ReadBegin)> {
        let end = self.end.offsets(view);
        let not_after = |position: &Position| {
            let counted = position.offsets(view);
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
            .rposition(|block| not_after(&block.start));
        let at = at.unwrap_or(0);
        let begin = self.blocks.get(at).map_or(self.end, |block| block.start);
        let block = self.first + at as u64;
        if !matches!(from, ReadFrom::Tail(_)) {
            self.lost = None;
        }
        let reader = self.next_reader;
        self.next_reader += 1;
        self.readers.insert(reader, block);
        let cursor = Cursor {
            reader,
            block,
            span: 0,
            in_block: 0,
            in_span: 0,
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

    /// Reads the next piece, if it is available. An error is an error of the file.
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
            (cursor.span, cursor.in_block, cursor.in_span) = (0, 0, 0);
            self.readers.insert(cursor.reader, cursor.block);
        }
    }

    /// Detaches a reader. Blocks that only this reader needed can be dropped.
    pub(crate) fn detach(&mut self, cursor: &Cursor) {
        self.readers.remove(&cursor.reader);
        self.trim();
    }

    /// Detaches a reader that may attach again. Its blocks stay for a while.
    pub(crate) fn lose(&mut self, cursor: &Cursor) {
        // One that has attached since has its place.
        let is_replaced = self.readers.keys().any(|reader| *reader > cursor.reader);
        if !self.finished && !is_replaced && !self.lost_limit.is_zero() {
            self.lost = Some((cursor.block, Instant::now() + self.lost_limit));
        }
        self.detach(cursor);
    }
}

#[cfg(test)]
mod tests;
