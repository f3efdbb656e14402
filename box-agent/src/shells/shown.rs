//! What runs show by media type. It is kept with the run, so that whoever reads it later sees it too, within bounds: it comes
//! from the guest, and is in the memory of the agent.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use box_protocol::RunError;
use serde::Deserialize;

use crate::command::Command;

/// One thing shown, by media type.
pub(crate) type Shown = BTreeMap<String, String>;

/// The most that one run may show. The interpreters' loops cut it, too; what a guest has made of them is not believed.
const RUN_BYTES: usize = 1 << 20;

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
    /// What makes no sense is left out.
    pub(super) fn read(json: &[u8]) -> Self {
        let mut besides: Self = serde_json::from_slice(json).unwrap_or_default();
        if size(&besides.shown) > RUN_BYTES {
            besides.shown = vec![note("what was shown is too large")];
        }
        besides
    }
}

/// The runs that have shown something, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Shows(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    bytes: usize,
    runs: VecDeque<(Weak<Command>, usize)>,
}

impl Shows {
    /// Keeps what a run has shown, in the place of what the oldest have if there is too much of it.
    pub(super) fn keep(&self, command: &Arc<Command>, shown: Vec<Shown>) {
        if shown.is_empty() {
            return;
        }
        let bytes = size(&shown);
        command.has_shown(shown);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.bytes += bytes;
        kept.runs.push_back((Arc::downgrade(command), bytes));
        while kept.bytes > BOX_BYTES
            && let Some((oldest, bytes)) = kept.runs.pop_front()
        {
            kept.bytes -= bytes;
            if let Some(oldest) = oldest.upgrade() {
                oldest.has_shown(vec![note("what was shown is no longer kept")]);
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
}
