//! Parser of OpenSandbox's event stream: JSON lines or SSE frames, split anywhere.
//!
//! Seed 000 specifies this parser. Only tests call it until a client of OpenSandbox's protocol exists.

use std::collections::BTreeMap;
use std::time::Duration;

use box_protocol::actions::{Displayed, StreamName};
use box_protocol::{RunError, UnixMs};
use serde::Deserialize;
use serde_json::Value;

use super::{Execution, Limits, Message};
use crate::command::DEFAULT_CAPTURE_LIMIT;

/// Maximum size of an event; the parser skips longer ones.
pub const MAX_EVENT_BYTES: usize = 16 * 1024 * 1024;

/// Parses the events of a run: one JSON object per line, with or without `data:`.
///
/// The parser skips every other line: comments, pings and other SSE fields.
///
/// ```
/// use box_client::ExecutionReader;
///
/// let mut reader = ExecutionReader::default();
/// reader.push(b"data: {\"type\":\"init\",\"text\":\"run-1\"}\n\n{\"type\":\"stdout\",");
/// reader.push(b"\"text\":\"hi\"}\n: keep alive\n");
/// reader.push(b"data: {\"type\":\"execution_complete\",\"execution_time\":5}\n\n");
/// let run = reader.finish();
/// assert_eq!((run.id.as_deref(), run.stdout_text().as_str()), (Some("run-1"), "hi"));
/// assert_eq!(run.exit_code, Some(0));
/// ```
#[derive(Debug)]
pub struct ExecutionReader {
    execution: Execution,
    limits: Limits,
    line: Vec<u8>,
    /// Whether the rest of the current line is too long and skipped.
    skipping: bool,
}

/// An event on the wire.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    timestamp: Option<u64>,
    #[serde(default)]
    execution_time: Option<u64>,
    #[serde(default)]
    results: Option<BTreeMap<String, Value>>,
    #[serde(default)]
    error: Option<EventError>,
}

#[derive(Deserialize)]
struct EventError {
    #[serde(default, alias = "name")]
    ename: Option<String>,
    #[serde(default, alias = "value")]
    evalue: Option<String>,
    /// Absent and null mean an empty list.
    #[serde(default)]
    traceback: Option<Vec<String>>,
}

/// Keeps [`DEFAULT_CAPTURE_LIMIT`] of each stream and of displayed values.
impl Default for ExecutionReader {
    fn default() -> Self {
        Self {
            execution: Execution::default(),
            limits: Limits::new(DEFAULT_CAPTURE_LIMIT),
            line: Vec::new(),
            skipping: false,
        }
    }
}

impl ExecutionReader {
    /// Parses more bytes, which may end within an event.
    pub fn push(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let whole = part.ends_with(b"\n");
            if self.line.len() + part.len() > MAX_EVENT_BYTES {
                self.skipping = true;
                self.line.clear();
            }
            if !self.skipping {
                self.line.extend_from_slice(part);
            }
            if whole {
                self.end_line();
            }
        }
    }

    /// Returns the run as far as it was received.
    pub fn finish(mut self) -> Execution {
        self.end_line();
        self.execution
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        self.skipping = false;
        let line = line.trim_ascii();
        let data = line.strip_prefix(b"data:").unwrap_or(line);
        if let Ok(event) = serde_json::from_slice(data) {
            self.take(event);
        }
    }

    fn take(&mut self, event: Event) {
        let execution = &mut self.execution;
        match event.kind.as_str() {
            "init" => execution.id = event.text,
            "stdout" => execution.add_message(&mut self.limits, StreamName::Stdout, message(event)),
            "stderr" => execution.add_message(&mut self.limits, StreamName::Stderr, message(event)),
            "result" => {
                let shown = event.results.unwrap_or_default().into_iter();
                let text = |value| match value {
                    Value::String(text) => text,
                    other => other.to_string(),
                };
                let shown = Displayed {
                    data: shown.map(|(kind, value)| (kind, text(value))).collect(),
                    main: false,
                };
                execution.add_result(&mut self.limits, shown);
            }
            "error" => {
                let Some(error) = event.error else { return };
                let value = error.evalue.unwrap_or_default();
                // The error value of a command is its non-zero exit code.
                execution.exit_code = value.trim().parse().ok();
                execution.error = Some(RunError {
                    name: error.ename.unwrap_or_default(),
                    value,
                    traceback: error.traceback.unwrap_or_default(),
                });
            }
            "execution_complete" => {
                let took = event.execution_time.unwrap_or_default();
                execution.took = Some(Duration::from_millis(took));
                if execution.error.is_none() {
                    execution.exit_code = Some(0);
                }
            }
            _ => {}
        }
    }
}

fn message(event: Event) -> Message {
    Message {
        text: event.text.unwrap_or_default(),
        at: UnixMs(event.timestamp.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Execution {
        let mut reader = ExecutionReader::default();
        reader.push(text.as_bytes());
        let whole = reader.finish();
        // Splitting the text must not change the result.
        for size in 1..text.len().min(40) {
            let mut reader = ExecutionReader::default();
            for piece in text.as_bytes().chunks(size) {
                reader.push(piece);
            }
            assert_eq!(reader.finish(), whole, "pieces of {size}");
        }
        whole
    }

    #[test]
    fn an_endless_run_uses_bounded_memory() {
        let mut reader = ExecutionReader::default();
        let mebibyte = "x".repeat(1 << 20);
        for kind in ["stdout", "stderr"] {
            let event = format!("{{\"type\":\"{kind}\",\"text\":\"{mebibyte}\"}}\n");
            for _ in 0..20 {
                reader.push(event.as_bytes());
            }
        }
        let event = format!("{{\"type\":\"result\",\"results\":{{\"text\":\"{mebibyte}\"}}}}\n");
        for _ in 0..20 {
            reader.push(event.as_bytes());
        }
        let run = reader.finish();
        for (said, dropped) in [
            (run.stdout_text(), run.dropped.stdout),
            (run.stderr_text(), run.dropped.stderr),
        ] {
            assert_eq!(said.len(), DEFAULT_CAPTURE_LIMIT);
            assert_eq!(dropped, 4 << 20);
        }
        assert_eq!((run.results.len(), run.dropped_results), (15, 5));
    }

    #[test]
    fn frames_and_plain_objects_are_parsed_and_other_lines_skipped() {
        let run = read(
            "data: {\"type\":\"init\",\"text\":\"run-1\",\"timestamp\":1}\n\n\n\
             event: stdout\r\ndata:{\"type\":\"stdout\",\"text\":\"hi\",\"timestamp\":2}\r\n\r\n\
             not-json\n\n[1]\nnull\n{\"type\":7}\n{\"type\":\"ping\"}\n: comment\n\
             {\"type\":\"stderr\",\"text\":\"oh\",\"timestamp\":3}\n\
             data: {\"type\":\"result\",\"results\":{\"text\":\"ok\",\"n\":1},\"timestamp\":3}\n\n\
             data: {\"type\":\"execution_complete\",\"timestamp\":4,\"execution_time\":5}",
        );
        let said = |text: &str, at| Message {
            text: text.to_owned(),
            at: UnixMs(at),
        };
        assert_eq!(run.id.as_deref(), Some("run-1"));
        assert_eq!(
            (run.stdout, run.stderr),
            (vec![said("hi", 2)], vec![said("oh", 3)])
        );
        let shown = &run.results[0].data;
        assert_eq!((&*shown["text"], &*shown["n"]), ("ok", "1"));
        assert_eq!(run.took, Some(Duration::from_millis(5)));
        assert_eq!((run.exit_code, run.error), (Some(0), None));
    }

    #[test]
    fn a_nonzero_exit_code_is_an_error_value() {
        let run = read(
            "data: {\"type\":\"init\",\"text\":\"run-2\"}\n\n\
             data: {\"type\":\"error\",\"error\":{\"ename\":\"E\",\"evalue\":\"7\",\"traceback\":[\"status 7\"]}}\n\n",
        );
        let error = run.error.unwrap();
        assert_eq!((&*error.name, &*error.value), ("E", "7"));
        assert_eq!(error.traceback, ["status 7"]);
        assert_eq!((run.exit_code, run.took), (Some(7), None));
    }

    #[test]
    fn a_traceback_may_be_null_or_absent() {
        for traceback in [",\"traceback\":null", ""] {
            let run = read(&format!(
                "data: {{\"type\":\"error\",\"error\":{{\"ename\":\"E\",\"evalue\":\"no room\"{traceback}}}}}\n\n"
            ));
            let error = run.error.unwrap();
            assert_eq!(error.value, "no room");
            assert!(error.traceback.is_empty());
            assert_eq!((run.exit_code, run.took), (None, None));
        }
    }

    #[test]
    fn an_incomplete_run_has_no_exit_code() {
        let run = read("data: {\"type\":\"stdout\",\"text\":\"half\"}\n\ndata: {\"type\":\"exec");
        assert_eq!(run.stdout_text(), "half");
        assert_eq!((run.exit_code, run.took), (None, None));
    }

    #[test]
    fn an_event_beyond_the_limit_is_skipped() {
        let mut reader = ExecutionReader::default();
        reader.push(b"{\"type\":\"stdout\",\"text\":\"");
        let piece = "x".repeat(65536);
        for _ in 0..=MAX_EVENT_BYTES / piece.len() {
            reader.push(piece.as_bytes());
        }
        assert!(reader.line.len() <= MAX_EVENT_BYTES);
        reader.push(b"\"}\n{\"type\":\"stdout\",\"text\":\"after\"}\n");
        assert_eq!(reader.finish().stdout_text(), "after");
    }
}
