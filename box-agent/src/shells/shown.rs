//! What runs show by media type, and their errors. They are kept with the run, so that whoever reads it later sees them too,
//! within bounds: they come from the guest, and are in the memory of the agent.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use box_protocol::RunError;
use serde::Deserialize;

use crate::command::Command;

/// One thing shown, by media type.
pub(crate) type Shown = BTreeMap<String, String>;

/// The most that one run may show, and that may be said of its error. The interpreters' loops cut it, too; what a guest has
/// made of them is not believed.
const RUN_BYTES: usize = 1 << 20;
const ERROR_BYTES: usize = 64 << 10;

/// The longest name of an error.
const NAME_BYTES: usize = 256;

/// The most that is kept of all runs of a box.
const BOX_BYTES: usize = 16 << 20;

/// What an interpreter says of a run besides its code: nothing, or this as JSON.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Besides {
    pub(crate) error: Option<RunError>,
    pub(crate) shown: Vec<Shown>,
}

impl Besides {
    /// What makes no sense is left out, and what is too large is cut.
    pub(super) fn read(json: &[u8]) -> Self {
        let mut besides: Self = serde_json::from_slice(json).unwrap_or_default();
        if size(&besides.shown) > RUN_BYTES {
            besides.shown = vec![note("what was shown is too large")];
        }
        if let Some(error) = &mut besides.error {
            cut(error);
        }
        besides
    }

    /// What it takes of the memory that all runs share.
    fn bytes(&self) -> usize {
        size(&self.shown) + self.error.as_ref().map_or(0, error_bytes)
    }

    /// All but the name of its error is not kept any longer.
    fn fade(&mut self) {
        if !self.shown.is_empty() {
            self.shown = vec![note("what was shown is no longer kept")];
        }
        if let Some(error) = &mut self.error {
            error.value = String::from("[no longer kept]");
            error.traceback = Vec::new();
        }
    }
}

/// The end of its lines is what tells most.
fn cut(error: &mut RunError) {
    shorten(&mut error.name, NAME_BYTES);
    shorten(&mut error.value, ERROR_BYTES / 2);
    let mut room = ERROR_BYTES / 2;
    let fitting = error.traceback.iter().rev().take_while(|line| {
        let left = room.checked_sub(line.len() + size_of::<String>());
        room = left.unwrap_or(0);
        left.is_some()
    });
    let left_out = error.traceback.len() - fitting.count();
    if left_out > 0 {
        error.traceback.drain(..left_out);
        error.traceback.shrink_to_fit();
        error
            .traceback
            .insert(0, "[lines before this are left out]".to_owned());
    }
}

fn shorten(text: &mut String, most: usize) {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.push_str(" [cut]");
        text.shrink_to_fit();
    }
}

fn error_bytes(error: &RunError) -> usize {
    let lines = error.traceback.iter();
    let lines: usize = lines.map(|line| line.len() + size_of::<String>()).sum();
    error.name.len() + error.value.len() + lines
}

/// The runs of which something is kept, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Shows(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    bytes: usize,
    runs: VecDeque<(Weak<Command>, usize)>,
}

impl Shows {
    /// Keeps what was said of a run, in the place of what was of the oldest if there is too much of it.
    pub(super) fn keep(&self, command: &Arc<Command>, said: Besides) {
        let bytes = said.bytes();
        if bytes == 0 {
            return;
        }
        if let Some(mut place) = command.said() {
            *place = said;
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.bytes += bytes;
        kept.runs.push_back((Arc::downgrade(command), bytes));
        while kept.bytes > BOX_BYTES
            && let Some((oldest, bytes)) = kept.runs.pop_front()
        {
            kept.bytes -= bytes;
            if let Some(oldest) = oldest.upgrade()
                && let Some(mut said) = oldest.said()
            {
                said.fade();
            }
        }
        // Those whose records are gone have taken it along.
        while let Some((first, bytes)) = kept.runs.front()
            && first.strong_count() == 0
        {
            let bytes = *bytes;
            kept.bytes -= bytes;
            kept.runs.pop_front();
        }
    }
}

fn note(text: &str) -> Shown {
    [("text/plain".to_owned(), format!("[{text}]"))].into()
}

fn size(shown: &[Shown]) -> usize {
    let members = shown.iter().flatten();
    members.map(|(kind, data)| kind.len() + data.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_nothing_and_what_is_too_large_is_told_so() {
        assert!(Besides::read(b"").shown.is_empty());
        assert!(Besides::read(b"{\"shown\": 7}").shown.is_empty());
        let fine = Besides::read(br#"{"shown": [{"text/plain": "42"}], "error": null}"#);
        assert_eq!(fine.shown[0]["text/plain"], "42");
        let large = format!(r#"{{"shown": [{{"a": "{}"}}]}}"#, "x".repeat(RUN_BYTES + 1));
        let large = Besides::read(large.as_bytes());
        assert_eq!(large.shown, [note("what was shown is too large")]);
    }
    #[test]
    fn an_error_is_cut_and_its_last_lines_stay() {
        let lines: Vec<_> = (0..100_000).map(|line| format!("line {line}")).collect();
        let long = "\u{20ac}".repeat(1 << 20);
        let error = serde_json::json!({"name": long, "value": long, "traceback": lines});
        let said = serde_json::json!({ "error": error }).to_string();
        let said = Besides::read(said.as_bytes());
        assert!(
            said.bytes() <= ERROR_BYTES + NAME_BYTES + 100,
            "{}",
            said.bytes()
        );
        let error = said.error.unwrap();
        assert!(error.name.starts_with('\u{20ac}') && error.value.ends_with("[cut]"));
        assert_eq!(error.traceback.last().unwrap(), "line 99999");
        assert_eq!(error.traceback[0], "[lines before this are left out]");
        let small = br#"{"error": {"name": "E", "value": "v", "traceback": ["a", "b"]}}"#;
        let small = Besides::read(small).error.unwrap();
        assert_eq!(
            (&*small.name, &*small.value, small.traceback.len()),
            ("E", "v", 2)
        );
    }
}
