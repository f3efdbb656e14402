//! Values displayed by runs, by media type, and their errors.
//!
//! The agent keeps them with the run for later readers. They come from the guest and take the agent's memory, so they
//! are bounded.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use box_protocol::RunError;
use box_protocol::actions::Displayed;
use serde::Deserialize;

use crate::command::Command;

/// Maximum size of a run's displayed values as JSON, and of its error.
///
/// The values are one message to the runtime. The loops of the interpreters truncate them as well, but a guest can
/// change its loop.
pub(super) const RUN_BYTES: usize = 10 << 20;
const ERROR_BYTES: usize = 64 << 10;

/// Maximum length of an error's name.
const NAME_BYTES: usize = 256;

/// Maximum size of all reports of a box.
const BOX_BYTES: usize = 32 << 20;

/// An interpreter's report on a run besides its exit code: empty, or this as JSON.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RunReport {
    pub(crate) error: Option<RunError>,
    pub(crate) shown: Vec<Displayed>,
}

impl RunReport {
    /// Decodes a report. Invalid reports are dropped and large ones truncated.
    pub(super) fn decode(json: &[u8]) -> Self {
        let mut report: Self = serde_json::from_slice(json).unwrap_or_default();
        if size(&report.shown) > RUN_BYTES {
            report.shown = vec![placeholder(&format!(
                "displayed values too large: at most {RUN_BYTES} bytes"
            ))];
        }
        if let Some(error) = &mut report.error {
            truncate_error(error);
        }
        report
    }

    /// The bytes that count against the limit of the box.
    fn bytes(&self) -> usize {
        size(&self.shown) + self.error.as_ref().map_or(0, error_bytes)
    }

    /// Drops everything but the name of the error.
    fn drop_details(&mut self) {
        if !self.shown.is_empty() {
            self.shown = vec![placeholder("displayed values no longer available")];
        }
        if let Some(error) = &mut self.error {
            error.value = String::from("[no longer available]");
            error.traceback = Vec::new();
        }
    }
}

/// Truncates an error. The last lines of its traceback are kept.
fn truncate_error(error: &mut RunError) {
    truncate(&mut error.name, NAME_BYTES);
    truncate(&mut error.value, ERROR_BYTES / 2);
    let mut room = ERROR_BYTES / 2;
    let fitting = error.traceback.iter().rev().take_while(|line| {
        let left = room.checked_sub(line.len() + size_of::<String>());
        room = left.unwrap_or(0);
        left.is_some()
    });
    let omitted = error.traceback.len() - fitting.count();
    if omitted > 0 {
        error.traceback.drain(..omitted);
        error.traceback.shrink_to_fit();
        error
            .traceback
            .insert(0, "[earlier lines omitted]".to_owned());
    }
}

fn truncate(text: &mut String, max: usize) {
    if text.len() > max {
        text.truncate(text.floor_char_boundary(max));
        text.push_str(" [truncated]");
        text.shrink_to_fit();
    }
}

fn error_bytes(error: &RunError) -> usize {
    let lines = error.traceback.iter();
    let lines: usize = lines.map(|line| line.len() + size_of::<String>()).sum();
    error.name.len() + error.value.len() + lines
}

/// The stored reports, oldest first.
#[derive(Debug, Default)]
pub(crate) struct ReportStore(Mutex<Stored>);

#[derive(Debug, Default)]
struct Stored {
    bytes: usize,
    runs: VecDeque<(Weak<Command>, usize)>,
}

impl ReportStore {
    /// Stores the report of a run.
    ///
    /// If all reports exceed the limit, the oldest are dropped.
    pub(super) fn store(&self, command: &Arc<Command>, report: RunReport) {
        let bytes = report.bytes();
        if bytes == 0 {
            return;
        }
        if let Some(mut current) = command.report() {
            *current = report;
        }
        let mut stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stored.bytes += bytes;
        stored.runs.push_back((Arc::downgrade(command), bytes));
        while stored.bytes > BOX_BYTES
            && let Some((oldest, bytes)) = stored.runs.pop_front()
        {
            stored.bytes -= bytes;
            if let Some(oldest) = oldest.upgrade()
                && let Some(mut report) = oldest.report()
            {
                report.drop_details();
            }
        }
        // Removed commands have freed their reports.
        while let Some((first, bytes)) = stored.runs.front()
            && first.strong_count() == 0
        {
            let bytes = *bytes;
            stored.bytes -= bytes;
            stored.runs.pop_front();
        }
    }
}

fn placeholder(text: &str) -> Displayed {
    Displayed {
        data: [("text/plain".to_owned(), format!("[{text}]"))].into(),
        main: false,
    }
}

fn size(shown: &[Displayed]) -> usize {
    let members = shown.iter().flat_map(|one| &one.data);
    let texts: usize = members
        .map(|(kind, data)| encoded_bytes(kind) + encoded_bytes(data))
        .sum();
    texts + size_of_val(shown)
}

/// The size of a text as JSON.
fn encoded_bytes(text: &str) -> usize {
    let each = text.bytes().map(|byte| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    });
    each.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_report_is_empty_and_a_large_one_is_replaced() {
        assert!(RunReport::decode(b"").shown.is_empty());
        assert!(RunReport::decode(b"{\"shown\": 7}").shown.is_empty());
        let valid = br#"{"shown": [{"data": {"text/plain": "42"}, "main": true}], "error": null}"#;
        let valid = RunReport::decode(valid);
        assert_eq!(valid.shown[0].data["text/plain"], "42");
        assert!(valid.shown[0].main);
        let shown = |text: String| {
            let report = format!(r#"{{"shown": [{{"data": {{"a": "{text}"}}}}]}}"#);
            RunReport::decode(report.as_bytes()).shown
        };
        let fitting = shown("x".repeat(RUN_BYTES - 1000));
        assert_eq!(fitting[0].data["a"].len(), RUN_BYTES - 1000);
        // The second text is short here and long in the message to the runtime.
        for large in [
            "x".repeat(RUN_BYTES + 1),
            "\\u0001".repeat(RUN_BYTES / 6 + 1),
        ] {
            let large = shown(large);
            let text = &large[0].data["text/plain"];
            assert!(text.contains("too large: at most 10485760 bytes"), "{text}");
        }
    }

    #[test]
    fn an_error_is_truncated_and_keeps_its_last_lines() {
        let lines: Vec<_> = (0..100_000).map(|line| format!("line {line}")).collect();
        let long = "\u{20ac}".repeat(1 << 20);
        let error = serde_json::json!({"name": long, "value": long, "traceback": lines});
        let report = serde_json::json!({ "error": error }).to_string();
        let report = RunReport::decode(report.as_bytes());
        assert!(
            report.bytes() <= ERROR_BYTES + NAME_BYTES + 100,
            "{}",
            report.bytes()
        );
        let error = report.error.unwrap();
        assert!(error.name.starts_with('\u{20ac}') && error.value.ends_with("[truncated]"));
        assert_eq!(error.traceback.last().unwrap(), "line 99999");
        assert_eq!(error.traceback[0], "[earlier lines omitted]");
        let small = br#"{"error": {"name": "E", "value": "v", "traceback": ["a", "b"]}}"#;
        let small = RunReport::decode(small).error.unwrap();
        assert_eq!(
            (&*small.name, &*small.value, small.traceback.len()),
            ("E", "v", 2)
        );
    }
}
