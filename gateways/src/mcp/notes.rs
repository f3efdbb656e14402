//! What a call must tell the model beside its result.

use std::sync::{Arc, Mutex, PoisonError};

use box_protocol::Adjusted;
use box_protocol::actions::EarlierBox;

/// The notes of one call.
#[derive(Debug, Clone, Default)]
pub(super) struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    fn add(&self, note: String) {
        let mut notes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        notes.push(note);
    }

    /// Notes that the default box is a new one.
    pub(super) fn recreated(&self, earlier: &EarlierBox) {
        let why = &earlier.why;
        self.add(format!(
            "the default box is new and empty; the earlier one ended: {why}"
        ));
    }

    /// Notes fields that the policy changed.
    pub(super) fn adjusted<'a>(&self, fields: impl IntoIterator<Item = &'a Adjusted>) {
        for Adjusted {
            field,
            asked,
            given,
        } in fields
        {
            self.add(match (seconds(asked), seconds(given)) {
                (Some(asked), Some(given)) if field == "timeout_ms" => {
                    format!("timeout_s: the policy changed {asked} to {given}")
                }
                _ => format!("{field}: the policy changed {asked} to {given}"),
            });
        }
    }

    /// Returns the notes, and forgets them.
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns milliseconds in seconds.
fn seconds(millis: &str) -> Option<u64> {
    millis.parse::<u64>().ok().map(|millis| millis / 1000)
}
