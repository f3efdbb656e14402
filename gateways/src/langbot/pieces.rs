//! LangBot's framing of long messages as several short lines.
//!
//! ```text
//! {"type": "chunk_start", "total_size": <bytes of the message>}
//! {"type": "chunk_data", "data": "<the next piece of its text>", "offset": <bytes before it>}
//! {"type": "chunk_end"}
//! ```

use std::borrow::Cow;

use box_rpc::ConnectionError;
use serde::Deserialize;

/// The maximum length of a line, independent of the message limit.
pub(super) const LINE_BYTES: usize = 64 * 1024;

/// The maximum length of a piece; longer messages are split.
pub(super) const PIECE_BYTES: usize = 16 * 1024;

/// How many bytes of an oversized message are kept to find its id.
const HEAD_BYTES: usize = 512;

/// The maximum length of a `chunk_start` line; longer lines are not parsed as one.
const START_LINE_BYTES: usize = 256;

/// The lines that carry one message.
#[derive(Debug)]
pub(super) struct Pieces<'a> {
    message: &'a str,
    next: Next,
}

#[derive(Debug)]
enum Next {
    Start,
    Data(usize),
    End,
    Nothing,
}

impl<'a> Pieces<'a> {
    /// Splits `message`.
    pub(super) fn of(message: &'a str) -> Self {
        Self {
            message,
            next: Next::Start,
        }
    }

    /// Returns the line for the piece at `offset` and the offset of the next piece.
    fn piece(&self, offset: usize) -> (String, usize) {
        let mut length = PIECE_BYTES;
        loop {
            let mut end = (offset + length).min(self.message.len());
            while !self.message.is_char_boundary(end) {
                end -= 1;
            }
            let data = serde_json::Value::from(&self.message[offset..end]);
            let line = format!(r#"{{"type": "chunk_data", "data": {data}, "offset": {offset}}}"#);
            if line.len() < LINE_BYTES {
                return (line, end);
            }
            // Only text with many control characters grows this much when escaped.
            length /= 4;
        }
    }
}

impl Iterator for Pieces<'_> {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        match self.next {
            Next::Start => {
                self.next = Next::Data(0);
                let total = self.message.len();
                Some(format!(
                    r#"{{"type": "chunk_start", "total_size": {total}}}"#
                ))
            }
            Next::Data(offset) => {
                let (line, end) = self.piece(offset);
                self.next = if end < self.message.len() {
                    Next::Data(end)
                } else {
                    Next::End
                };
                Some(line)
            }
            Next::End => {
                self.next = Next::Nothing;
                Some(r#"{"type": "chunk_end"}"#.to_owned())
            }
            Next::Nothing => None,
        }
    }
}

/// A line that belongs to a split message.
#[derive(Deserialize)]
struct Piece<'a> {
    #[serde(rename = "type", borrow)]
    kind: Option<Cow<'a, str>>,
    total_size: Option<usize>,
    #[serde(borrow)]
    data: Option<Cow<'a, str>>,
    offset: Option<usize>,
}

/// Reassembles split messages.
#[derive(Debug)]
pub(super) struct Assembly {
    limit: usize,
    open: Option<Open>,
}

/// A message that has not arrived completely.
#[derive(Debug)]
struct Open {
    total: usize,
    seen: usize,
    /// The text received so far, or only its beginning if the message is oversized.
    text: String,
}

impl Assembly {
    /// Creates an empty assembly for messages of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, open: None }
    }

    /// Changes the message limit to `limit` bytes.
    pub(super) fn set_message_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Returns whether a message has started and not ended.
    pub(super) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Takes the next line and returns a message if the line completes one.
    pub(super) fn take(&mut self, line: String) -> Result<Option<String>, ConnectionError> {
        if let Some(open) = self.open.take() {
            return self.go_on(open, &line);
        }
        if line.len() <= START_LINE_BYTES
            && memchr::memmem::find(line.as_bytes(), b"\"chunk_start\"").is_some()
            && let Ok(Piece {
                kind: Some(kind),
                total_size: Some(total),
                ..
            }) = serde_json::from_str(&line)
            && kind == "chunk_start"
        {
            self.open = Some(Open {
                total,
                seen: 0,
                text: String::new(),
            });
            return Ok(None);
        }
        if line.len() > self.limit {
            let mut head = String::new();
            extend_head(&mut head, &line);
            return Err(self.too_large(head));
        }
        Ok(Some(line))
    }

    fn go_on(&mut self, mut open: Open, line: &str) -> Result<Option<String>, ConnectionError> {
        let Ok(piece) = serde_json::from_str::<Piece<'_>>(line) else {
            return Err(ConnectionError::Framing(
                "a line inside of a message in pieces",
            ));
        };
        match (piece.kind.as_deref(), piece.data, piece.offset) {
            (Some("chunk_data"), Some(data), Some(offset)) => {
                if offset != open.seen {
                    return Err(ConnectionError::Framing("a piece at the wrong offset"));
                }
                open.seen += data.len();
                if open.seen > open.total {
                    return Err(ConnectionError::Framing(
                        "pieces longer than their total_size",
                    ));
                }
                if open.total > self.limit {
                    extend_head(&mut open.text, &data);
                } else {
                    open.text.push_str(&data);
                }
                self.open = Some(open);
                Ok(None)
            }
            (Some("chunk_end"), ..) if open.seen != open.total => Err(ConnectionError::Framing(
                "pieces shorter than their total_size",
            )),
            (Some("chunk_end"), ..) if open.total > self.limit => Err(self.too_large(open.text)),
            (Some("chunk_end"), ..) => Ok(Some(open.text)),
            _ => Err(ConnectionError::Framing(
                "a line inside of a message in pieces",
            )),
        }
    }

    fn too_large(&self, head: String) -> ConnectionError {
        ConnectionError::TooLarge {
            head,
            limit: self.limit,
        }
    }
}

/// Appends text to the beginning of an oversized message as far as it fits.
fn extend_head(head: &mut String, more: &str) {
    let room = HEAD_BYTES.saturating_sub(head.len());
    head.push_str(&more[..more.floor_char_boundary(room)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assembled(
        lines: impl IntoIterator<Item = String>,
        limit: usize,
    ) -> Result<Vec<String>, ConnectionError> {
        let mut assembly = Assembly::new(limit);
        let mut messages = Vec::new();
        for line in lines {
            if let Some(message) = assembly.take(line)? {
                messages.push(message);
            }
        }
        Ok(messages)
    }

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn pieces_are_written_as_python_writes_them() {
        let message = "x".repeat(PIECE_BYTES + 1);
        let cut: Vec<String> = Pieces::of(&message).collect();
        assert_eq!(cut.len(), 4);
        assert_eq!(cut[0], r#"{"type": "chunk_start", "total_size": 16385}"#);
        assert_eq!(
            cut[2],
            r#"{"type": "chunk_data", "data": "x", "offset": 16384}"#
        );
        assert_eq!(cut[3], r#"{"type": "chunk_end"}"#);
    }

    #[test]
    fn cutting_and_joining_gives_the_message_back() {
        for unit in ["a", "\"\\", "é", "漢", "🦀", "\u{1}"] {
            for offset in 0..4 {
                let message = format!("{}{}", "a".repeat(offset), unit.repeat(30_000));
                let cut: Vec<String> = Pieces::of(&message).collect();
                assert!(cut.iter().all(|line| line.len() < LINE_BYTES));
                assert_eq!(assembled(cut, 1 << 20).unwrap(), [message]);
            }
        }
    }

    #[test]
    fn an_oversize_total_is_reported_with_the_head_of_its_first_piece() {
        let message = format!("{{\"id\":7,{}", "x".repeat(50_000));
        let mut assembly = Assembly::new(40_000);
        let mut outcome = None;
        for line in Pieces::of(&message) {
            outcome = Some(assembly.take(line));
        }
        let Some(Err(ConnectionError::TooLarge { head, limit })) = outcome else {
            panic!("expected TooLarge, got {outcome:?}");
        };
        assert_eq!((head.len(), limit), (512, 40_000));
        assert!(head.starts_with("{\"id\":7,"));
        let next = assembly.take("{}".to_owned()).unwrap();
        assert_eq!(next.as_deref(), Some("{}"));
    }

    #[test]
    fn broken_pieces_break_the_framing() {
        let start = r#"{"type": "chunk_start", "total_size": 4}"#;
        for (rest, reason) in [
            (
                r#"{"type": "chunk_data", "data": "ab", "offset": 1}"#,
                "a piece at the wrong offset",
            ),
            (
                r#"{"type": "chunk_data", "data": "abcde", "offset": 0}"#,
                "pieces longer than their total_size",
            ),
            (
                r#"{"type": "chunk_end"}"#,
                "pieces shorter than their total_size",
            ),
            (r#"{"seq_id": 1}"#, "a line inside of a message in pieces"),
            (r"[]", "a line inside of a message in pieces"),
        ] {
            let outcome = assembled(lines(&format!("{start}\n{rest}")), 100);
            assert!(
                matches!(&outcome, Err(ConnectionError::Framing(why)) if *why == reason),
                "{rest}: {outcome:?}"
            );
        }
    }

    #[test]
    fn a_message_that_only_mentions_pieces_is_a_message() {
        let message = r#"{"data": {"type": "chunk_start"}, "note": "\"chunk_start\""}"#;
        assert_eq!(assembled(lines(message), 100).unwrap(), [message]);
    }
}
