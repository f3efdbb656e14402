//! LangBot's framing of long messages as several short lines.
//!
//! ```text
//! {"type": "chunk_start", "total_size": <bytes of the message>}
//! {"type": "chunk_data", "data": "<the next chunk of its text>", "offset": <bytes before it>}
//! {"type": "chunk_end"}
//! ```

use std::borrow::Cow;

use box_rpc::ConnectionError;
use serde::Deserialize;

/// The maximum length of a line, independent of the message limit.
pub(super) const LINE_BYTES: usize = 64 * 1024;

/// The maximum length of a chunk; longer messages are split.
pub(super) const CHUNK_BYTES: usize = 16 * 1024;

/// How many bytes of an oversized message are kept to find its id.
const HEAD_BYTES: usize = 512;

/// The maximum length of a `chunk_start` line; longer lines are not parsed as one.
const START_LINE_BYTES: usize = 256;

/// The lines that carry one message.
#[derive(Debug)]
pub(super) struct Chunks<'a> {
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

impl<'a> Chunks<'a> {
    /// Splits `message`.
    pub(super) fn of(message: &'a str) -> Self {
        Self {
            message,
            next: Next::Start,
        }
    }

    /// Returns the line for the chunk at `offset` and the offset of the next chunk.
    fn chunk(&self, offset: usize) -> (String, usize) {
        let mut length = CHUNK_BYTES;
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

impl Iterator for Chunks<'_> {
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
                let (line, end) = self.chunk(offset);
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
struct ChunkLine<'a> {
    #[serde(rename = "type", borrow)]
    kind: Option<Cow<'a, str>>,
    total_size: Option<usize>,
    #[serde(borrow)]
    data: Option<Cow<'a, str>>,
    offset: Option<usize>,
}

/// Reassembles split messages.
#[derive(Debug)]
pub(super) struct Reassembly {
    limit: usize,
    partial: Option<Partial>,
}

/// A message that has not arrived completely.
#[derive(Debug)]
struct Partial {
    total: usize,
    seen: usize,
    /// The text received so far, or only its beginning if the message is oversized.
    text: String,
}

impl Reassembly {
    /// Creates an empty assembly for messages of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            partial: None,
        }
    }

    /// Changes the message limit to `limit` bytes.
    pub(super) fn set_message_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Returns whether a message has started and not ended.
    pub(super) fn is_open(&self) -> bool {
        self.partial.is_some()
    }

    /// Takes the next line and returns a message if the line completes one.
    pub(super) fn push(&mut self, line: String) -> Result<Option<String>, ConnectionError> {
        if let Some(partial) = self.partial.take() {
            return self.continue_message(partial, &line);
        }
        if line.len() <= START_LINE_BYTES
            && memchr::memmem::find(line.as_bytes(), b"\"chunk_start\"").is_some()
            && let Ok(ChunkLine {
                kind: Some(kind),
                total_size: Some(total),
                ..
            }) = serde_json::from_str(&line)
            && kind == "chunk_start"
        {
            self.partial = Some(Partial {
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

    fn continue_message(
        &mut self,
        mut partial: Partial,
        line: &str,
    ) -> Result<Option<String>, ConnectionError> {
        let Ok(chunk) = serde_json::from_str::<ChunkLine<'_>>(line) else {
            return Err(ConnectionError::Framing(
                "unexpected line inside a chunked message",
            ));
        };
        match (chunk.kind.as_deref(), chunk.data, chunk.offset) {
            (Some("chunk_data"), Some(data), Some(offset)) => {
                if offset != partial.seen {
                    return Err(ConnectionError::Framing("chunk at the wrong offset"));
                }
                partial.seen += data.len();
                if partial.seen > partial.total {
                    return Err(ConnectionError::Framing("chunks exceed total_size"));
                }
                if partial.total > self.limit {
                    extend_head(&mut partial.text, &data);
                } else {
                    partial.text.push_str(&data);
                }
                self.partial = Some(partial);
                Ok(None)
            }
            (Some("chunk_end"), ..) if partial.seen != partial.total => {
                Err(ConnectionError::Framing("chunks shorter than total_size"))
            }
            (Some("chunk_end"), ..) if partial.total > self.limit => {
                Err(self.too_large(partial.text))
            }
            (Some("chunk_end"), ..) => Ok(Some(partial.text)),
            _ => Err(ConnectionError::Framing(
                "unexpected line inside a chunked message",
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
        let mut assembly = Reassembly::new(limit);
        let mut messages = Vec::new();
        for line in lines {
            if let Some(message) = assembly.push(line)? {
                messages.push(message);
            }
        }
        Ok(messages)
    }

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn chunk_lines_match_pythons_format() {
        let message = "x".repeat(CHUNK_BYTES + 1);
        let lines: Vec<String> = Chunks::of(&message).collect();
        assert_eq!(lines.len(), 4);
        assert_eq!(lines[0], r#"{"type": "chunk_start", "total_size": 16385}"#);
        assert_eq!(
            lines[2],
            r#"{"type": "chunk_data", "data": "x", "offset": 16384}"#
        );
        assert_eq!(lines[3], r#"{"type": "chunk_end"}"#);
    }

    #[test]
    fn split_messages_are_reassembled() {
        for unit in ["a", "\"\\", "é", "漢", "🦀", "\u{1}"] {
            for offset in 0..4 {
                let message = format!("{}{}", "a".repeat(offset), unit.repeat(30_000));
                let lines: Vec<String> = Chunks::of(&message).collect();
                assert!(lines.iter().all(|line| line.len() < LINE_BYTES));
                assert_eq!(assembled(lines, 1 << 20).unwrap(), [message]);
            }
        }
    }

    #[test]
    fn an_oversized_message_is_reported_with_its_head() {
        let message = format!("{{\"id\":7,{}", "x".repeat(50_000));
        let mut assembly = Reassembly::new(40_000);
        let mut outcome = None;
        for line in Chunks::of(&message) {
            outcome = Some(assembly.push(line));
        }
        let Some(Err(ConnectionError::TooLarge { head, limit })) = outcome else {
            panic!("expected TooLarge, got {outcome:?}");
        };
        assert_eq!((head.len(), limit), (512, 40_000));
        assert!(head.starts_with("{\"id\":7,"));
        let next = assembly.push("{}".to_owned()).unwrap();
        assert_eq!(next.as_deref(), Some("{}"));
    }

    #[test]
    fn invalid_chunks_are_framing_errors() {
        let start = r#"{"type": "chunk_start", "total_size": 4}"#;
        for (rest, reason) in [
            (
                r#"{"type": "chunk_data", "data": "ab", "offset": 1}"#,
                "chunk at the wrong offset",
            ),
            (
                r#"{"type": "chunk_data", "data": "abcde", "offset": 0}"#,
                "chunks exceed total_size",
            ),
            (r#"{"type": "chunk_end"}"#, "chunks shorter than total_size"),
            (
                r#"{"seq_id": 1}"#,
                "unexpected line inside a chunked message",
            ),
            (r"[]", "unexpected line inside a chunked message"),
        ] {
            let outcome = assembled(lines(&format!("{start}\n{rest}")), 100);
            assert!(
                matches!(&outcome, Err(ConnectionError::Framing(found)) if *found == reason),
                "{rest}: {outcome:?}"
            );
        }
    }

    #[test]
    fn text_that_mentions_chunk_start_is_a_message() {
        let message = r#"{"data": {"type": "chunk_start"}, "note": "\"chunk_start\""}"#;
        assert_eq!(assembled(lines(message), 100).unwrap(), [message]);
    }
}
