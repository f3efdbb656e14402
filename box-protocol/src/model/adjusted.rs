//! What a policy made of a request.

use serde::{Deserialize, Serialize};

/// A value that the profile changed, because it locks the field or bounds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Adjusted {
    /// The field of the request.
    pub field: String,
    /// What the caller asked for, as text.
    pub asked: String,
    /// What the caller got, as text.
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

/// A value as people write it: a word without quotes, `none` if it is absent, anything else as JSON.
pub(super) fn text(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(serde_json::Value::Null) => "none".to_owned(),
        Ok(value) => value.to_string(),
        Err(_) => String::new(),
    }
}
