//! Fields of a request that a profile changed.

use serde::{Deserialize, Serialize};

/// A field of a request that the profile changed because it locks or limits it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Adjusted {
    /// The name of the field.
    pub field: String,
    /// The requested value, as text.
    pub asked: String,
    /// The value in effect, as text.
    pub given: String,
}

impl Adjusted {
    /// This field was asked to be one value and is another.
    pub fn new(field: &str, asked: &impl Serialize, given: &impl Serialize) -> Self {
        Self {
            field: field.to_owned(),
            asked: text(asked),
            given: text(given),
        }
    }
}

/// Formats a value for people: a string without quotes, `none` if absent, otherwise JSON.
pub(super) fn text(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(serde_json::Value::Null) => "none".to_owned(),
        Ok(value) => value.to_string(),
        Err(_) => String::new(),
    }
}
