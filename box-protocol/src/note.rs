//! Notes: data that a gateway stores with a record. The runtime does not interpret it.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::invalid::Invalid;

/// Maximum length of a note in bytes.
pub const MAX_NOTE_BYTES: usize = 16 * 1024;

/// Any JSON up to 16 KiB, stored and returned unchanged.
#[derive(Clone, Serialize)]
#[serde(transparent)]
pub struct Note(Box<RawValue>);

impl Note {
    /// Serializes `value` as a note.
    pub fn new(value: &impl Serialize) -> Result<Self, Invalid> {
        let raw = serde_json::value::to_raw_value(value)
            .map_err(|error| Invalid::new("note", format!("malformed: {error}")))?;
        Self::check(raw)
    }

    /// Returns the JSON.
    pub fn as_json(&self) -> &str {
        self.0.get()
    }

    /// Deserializes the note; `None` if it has another shape.
    pub fn read<'a, T: Deserialize<'a>>(&'a self) -> Option<T> {
        serde_json::from_str(self.as_json()).ok()
    }

    fn check(raw: Box<RawValue>) -> Result<Self, Invalid> {
        if raw.get().len() > MAX_NOTE_BYTES {
            return Err(Invalid::new("note", "must not be longer than 16384 bytes"));
        }
        Ok(Self(raw))
    }
}

impl PartialEq for Note {
    fn eq(&self, other: &Self) -> bool {
        self.as_json() == other.as_json()
    }
}

impl fmt::Debug for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Note({} bytes)", self.as_json().len())
    }
}

impl<'de> Deserialize<'de> for Note {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::check(Box::deserialize(deserializer)?).map_err(|invalid| invalid.decoding())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_returned_unchanged() {
        let text = r#"{"b": [1.50, null],  "a": "é"}"#;
        let note: Note = serde_json::from_str(text).unwrap();
        assert_eq!(note.as_json(), text);
        assert_eq!(serde_json::to_string(&note).unwrap(), text);
        let value: Note = serde_json::from_value(serde_json::json!({"a": 1})).unwrap();
        assert_eq!(value.as_json(), r#"{"a":1}"#);
    }

    #[test]
    fn the_limit_holds_on_construction_and_on_decode() {
        let fits = "x".repeat(MAX_NOTE_BYTES - 2);
        assert!(Note::new(&fits).is_ok());
        let over = format!("{fits}x");
        assert_eq!(Note::new(&over).unwrap_err().field(), "note");
        let json = serde_json::to_string(&over).unwrap();
        let error = serde_json::from_str::<Note>(&json).unwrap_err();
        assert_eq!(Invalid::from(error).field(), "note");
    }
}
