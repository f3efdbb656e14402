//! The part of an output that a model gets: all of it, or its head and its tail.

use std::collections::VecDeque;

use schemars::JsonSchema;
use serde::Serialize;

/// The maximum length of an output in an answer, in bytes.
pub(super) const MAX_BYTES: usize = 30_000;

/// The length of each of its two parts.
const PART_BYTES: usize = MAX_BYTES / 2;

/// The maximum length of a line in a progress message.
const MAX_LINE_BYTES: usize = 200;

/// Collects an output: its first bytes, and its last ones.
#[derive(Debug, Default)]
pub(super) struct Collector {
    /// The position of the first byte.
    begin: Option<u64>,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// The position after the last byte.
    end: u64,
    /// The number of bytes, with those between the parts.
    length: u64,
    /// Bytes that the log no longer has.
    lost: u64,
}

/// An output, without the bytes in the middle if it is long.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Excerpt {
    /// The position of the first byte.
    pub(super) begin: u64,
    /// The first bytes: all of them if `omitted` is absent.
    pub(super) head: String,
    /// The bytes between the parts.
    pub(super) omitted: Option<Omitted>,
    pub(super) tail: String,
    /// The position to read on from.
    pub(super) next: u64,
    /// Bytes that the log no longer has.
    pub(super) lost: u64,
}

/// Bytes of an output that an answer leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub(super) struct Omitted {
    /// Byte offset of the first one, for `read_output`.
    pub(super) from: u64,
    /// Number of bytes.
    pub(super) bytes: u64,
}

impl Omitted {
    /// Returns the bytes between two positions.
    pub(super) fn between(from: u64, to: u64) -> Self {
        let bytes = to.saturating_sub(from);
        Self { from, bytes }
    }
}

impl Collector {
    /// Adds bytes that begin at this position.
    pub(super) fn push(&mut self, pos: u64, bytes: &[u8]) {
        self.begin.get_or_insert(pos);
        let room = if self.tail.is_empty() {
            PART_BYTES - self.head.len()
        } else {
            0
        };
        let (head, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(head);
        let rest = &rest[rest.len().saturating_sub(PART_BYTES)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(PART_BYTES);
        self.tail.drain(..excess.min(self.tail.len()));
        self.tail.extend(rest);
        self.end = pos + bytes.len() as u64;
        self.length += bytes.len() as u64;
    }

    /// Counts bytes that the log no longer has.
    pub(super) fn lose(&mut self, bytes: u64) {
        self.lost += bytes;
    }

    /// Returns the last line so far, shortened.
    pub(super) fn last_line(&self) -> String {
        if self.tail.is_empty() {
            return last_line(&self.head);
        }
        let from = self.tail.len().saturating_sub(2 * MAX_LINE_BYTES);
        last_line(&self.tail.range(from..).copied().collect::<Vec<_>>())
    }

    /// Returns the output so far, without the bytes in the middle if it is long.
    pub(super) fn text(&self) -> String {
        let (first, last) = self.tail.as_slices();
        text(&[self.head.as_slice(), first, last].concat())
    }

    /// Returns what a model gets. `next` is the position after the output, or `pos` if there is none.
    ///
    /// A character that is not complete yet is left to the next reading, unless the output has ended.
    pub(super) fn finish(self, has_ended: bool, pos: u64) -> Excerpt {
        let Some(begin) = self.begin else {
            return Excerpt {
                begin: pos,
                head: String::new(),
                omitted: None,
                tail: String::new(),
                next: pos,
                lost: self.lost,
            };
        };
        let (mut head, mut tail) = (self.head, Vec::from(self.tail));
        let is_whole = (head.len() + tail.len()) as u64 == self.length;
        if is_whole {
            head.append(&mut tail);
        } else {
            head.truncate(complete(&head));
            tail.drain(..rest_of_character(&tail));
        }
        let mut next = self.end;
        if !has_ended {
            let last = if is_whole { &mut head } else { &mut tail };
            let whole = complete(last);
            next -= (last.len() - whole) as u64;
            last.truncate(whole);
        }
        let omitted = (!is_whole)
            .then(|| Omitted::between(begin + head.len() as u64, next - tail.len() as u64));
        Excerpt {
            begin,
            head: text(&head),
            omitted,
            tail: text(&tail),
            next,
            lost: self.lost,
        }
    }
}

/// Returns the last line of an output, shortened.
pub(super) fn last_line(output: &[u8]) -> String {
    let recent = &output[output.len().saturating_sub(2 * MAX_LINE_BYTES)..];
    let text = String::from_utf8_lossy(recent);
    let line = text.trim_end().rsplit(['\n', '\r']).next();
    let line = line.unwrap_or_default();
    line[..line.floor_char_boundary(MAX_LINE_BYTES)].to_owned()
}

/// Returns the length of the bytes without an incomplete character at their end.
fn complete(bytes: &[u8]) -> usize {
    let begin = bytes.len().saturating_sub(3);
    for at in (begin..bytes.len()).rev() {
        if is_continuation(bytes[at]) {
            continue;
        }
        let length = match bytes[at] {
            0xF0..=0xF7 => 4,
            0xE0..=0xEF => 3,
            0xC0..=0xDF => 2,
            _ => 1,
        };
        return if at + length > bytes.len() {
            at
        } else {
            bytes.len()
        };
    }
    bytes.len()
}

/// Returns the number of bytes at the start that belong to an earlier character.
pub(super) fn rest_of_character(bytes: &[u8]) -> usize {
    let continued = bytes.iter().take(3);
    continued.take_while(|byte| is_continuation(**byte)).count()
}

/// Returns whether a byte continues a character.
fn is_continuation(byte: u8) -> bool {
    byte & 0xC0 == 0x80
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the first bytes of an output as text, at most [`MAX_BYTES`], and the number of them.
pub(super) fn first_part(bytes: &[u8], has_ended: bool) -> (String, usize) {
    let is_cut = bytes.len() > MAX_BYTES;
    let bytes = &bytes[..bytes.len().min(MAX_BYTES)];
    let length = if is_cut || !has_ended {
        complete(bytes)
    } else {
        bytes.len()
    };
    // Bytes that are no character are never completed.
    let length = if length == 0 { bytes.len() } else { length };
    (text(&bytes[..length]), length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collected(pieces: &[&[u8]]) -> Collector {
        let mut collector = Collector::default();
        let mut pos = 7;
        for piece in pieces {
            collector.push(pos, piece);
            pos += piece.len() as u64;
        }
        collector
    }

    #[test]
    fn a_short_output_is_whole() {
        let excerpt = collected(&[b"one\n", b"two\n"]).finish(true, 0);
        assert_eq!(excerpt.head, "one\ntwo\n");
        assert_eq!((excerpt.omitted, excerpt.next), (None, 15));
        assert_eq!(Collector::default().finish(true, 3).next, 3);
    }

    #[test]
    fn a_long_output_has_head_and_tail_and_says_where_to_read_on() {
        let whole: Vec<u8> = "äöü-0123456789\n".bytes().cycle().take(1_000_003).collect();
        for size in [1, 7, 4096, 40_000, whole.len()] {
            let pieces: Vec<&[u8]> = whole.chunks(size).collect();
            let excerpt = collected(&pieces).finish(false, 0);
            assert!(!excerpt.head.contains('\u{FFFD}') && !excerpt.tail.contains('\u{FFFD}'));
            assert!(excerpt.head.len() + excerpt.tail.len() <= MAX_BYTES);
            let omitted = excerpt.omitted.unwrap();
            let (from, bytes) = (omitted.from - 7, omitted.bytes);
            assert_eq!(excerpt.head.as_bytes(), &whole[..excerpt.head.len()]);
            assert_eq!(from, excerpt.head.len() as u64);
            let resumed = usize::try_from(from + bytes).unwrap();
            let next = usize::try_from(excerpt.next - 7).unwrap();
            assert_eq!(excerpt.tail.as_bytes(), &whole[resumed..next]);
        }
    }

    #[test]
    fn an_incomplete_character_is_left_to_the_next_reading() {
        let output = "aß".as_bytes();
        let running = collected(&[&output[..2]]).finish(false, 0);
        assert_eq!((running.head.as_str(), running.next), ("a", 8));
        let ended = collected(&[&output[..2]]).finish(true, 0);
        assert_eq!((ended.head.as_str(), ended.next), ("a\u{FFFD}", 9));
        assert_eq!(first_part(&output[..2], false), ("a".to_owned(), 1));
        assert_eq!(first_part(&output[1..2], false).1, 1, "it goes on");
        let long = "ä".repeat(MAX_BYTES);
        let (text, length) = first_part(&long.as_bytes()[1..], true);
        assert!(text.len() <= MAX_BYTES + 2 && length >= MAX_BYTES - 1);
    }
}
