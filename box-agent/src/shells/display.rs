//! Values displayed by runs, by media type, and their errors.
//!
//! The agent keeps them with the run for later readers. They come from the guest and take the agent's memory, so they
//! are bounded.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use box_protocol::RunError;
use serde::Deserialize;

use crate::command::Command;

/// One displayed value in several media types.
pub(crate) type MimeBundle = BTreeMap<String, String>;

/// Maximum size of a run's displayed values and of its error.
///
/// The loops of the interpreters truncate them as well, but a guest can change its loop.
const RUN_BYTES: usize = 1 << 20;
const ERROR_BYTES: usize = 64 << 10;

/// Maximum length of an error's name.
const NAME_BYTES: usize = 256;

/// Maximum size of all reports of a box.
const BOX_BYTES: usize = 16 << 20;

/// An interpreter's report on a run besides its exit code: empty, or this as JSON.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RunReport {
    pub(crate) error: Option<RunError>,
    pub(crate) shown: Vec<MimeBundle>,
}

impl RunReport {
    /// Decodes a report. Invalid reports are dropped and large ones truncated.
    pub(super) fn decode(json: &[u8]) -> Self {
        let mut report: Self = serde_json::from_slice(json).unwrap_or_default();
        if size(&report.shown) > RUN_BYTES {
            report.shown = vec![placeholder("displayed values too large")];
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

fn placeholder(text: &str) -> MimeBundle {
    [("text/plain".to_owned(), format!("[{text}]"))].into()
}

fn size(shown: &[MimeBundle]) -> usize {
    let members = shown.iter().flatten();
    members.map(|(kind, data)| kind.len() + data.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_report_is_empty_and_a_large_one_is_replaced() {
        assert!(RunReport::decode(b"").shown.is_empty());
        assert!(RunReport::decode(b"{\"shown\": 7}").shown.is_empty());
        let valid = RunReport::decode(br#"{"shown": [{"text/plain": "42"}], "error": null}"#);
        assert_eq!(valid.shown[0]["text/plain"], "42");
        let large = format!(r#"{{"shown": [{{"a": "{}"}}]}}"#, "x".repeat(RUN_BYTES + 1));
        let large = RunReport::decode(large.as_bytes());
        assert_eq!(large.shown, [placeholder("displayed values too large")]);
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
