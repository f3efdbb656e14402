//! Validation errors: a field and the rule it violates.

use std::borrow::Cow;
use std::fmt;

use serde::de;

use crate::error::{BoxError, Detail};

/// A field that violates a rule.
///
/// Displayed as `field: rule`, for example `cpus: must be greater than 0`. A serde decoder passes on
/// only text, therefore the field can be recovered from it: see
/// [`From<serde_json::Error>`](#impl-From<Error>-for-Invalid).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    field: Cow<'static, str>,
    rule: Cow<'static, str>,
}

impl Invalid {
    /// Creates an error, displayed as `field: rule`.
    pub fn new(field: impl Into<Cow<'static, str>>, rule: impl Into<Cow<'static, str>>) -> Self {
        Self {
            field: field.into(),
            rule: rule.into(),
        }
    }

    /// Returns the name of the field; empty if the error concerns no single field.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// Returns the rule that the field violates.
    pub fn rule(&self) -> &str {
        &self.rule
    }

    /// Converts the error to a decoder error.
    pub(crate) fn decoding<E: de::Error>(&self) -> E {
        E::custom(self)
    }

    fn from_text(text: &str) -> Self {
        for (start, rule) in [
            ("unknown field `", "unknown field"),
            ("missing field `", "missing"),
            ("duplicate field `", "given twice"),
        ] {
            if let Some((field, _)) = text
                .strip_prefix(start)
                .and_then(|rest| rest.split_once('`'))
            {
                return Self::new(field.to_owned(), rule);
            }
        }
        match text.split_once(": ") {
            Some((field, rule)) if field.bytes().all(is_name) => {
                Self::new(field.to_owned(), rule.to_owned())
            }
            _ => Self::new("", text.to_owned()),
        }
    }
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            return f.write_str(&self.rule);
        }
        write!(f, "{}: {}", self.field, self.rule)
    }
}

impl std::error::Error for Invalid {}

/// Recovers the field from the text of a decoder, without the position in the JSON.
impl From<serde_json::Error> for Invalid {
    fn from(error: serde_json::Error) -> Self {
        let text = error.to_string();
        let position = format!(" at line {} column {}", error.line(), error.column());
        Self::from_text(text.strip_suffix(&position).unwrap_or(&text))
    }
}

/// Becomes `validation`, with the field in the details.
impl From<Invalid> for BoxError {
    fn from(invalid: Invalid) -> Self {
        let field = (!invalid.field.is_empty()).then(|| invalid.field.clone().into_owned());
        Self::validation(invalid.to_string()).with_detail(&Detail {
            field,
            ..Detail::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::error::Code;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        #[allow(dead_code)]
        size: u8,
    }

    fn sample(json: &str) -> Invalid {
        serde_json::from_str::<Sample>(json).unwrap_err().into()
    }

    #[test]
    fn becomes_validation_with_the_field() {
        let error = BoxError::from(Invalid::new("cpus", "must be greater than 0"));
        assert_eq!(error.code(), Code::Validation);
        assert_eq!(error.message(), "cpus: must be greater than 0");
        assert_eq!(
            error.detail::<Detail>().unwrap().field.as_deref(),
            Some("cpus")
        );
    }

    #[test]
    fn field_survives_a_decoder() {
        let rule = Invalid::new("memory_mb", "must be at least 32");
        let text: serde_json::Error = rule.decoding();
        assert_eq!(Invalid::from(text), rule);
        assert_eq!(
            sample(r#"{"siez":1}"#),
            Invalid::new("siez", "unknown field")
        );
        assert_eq!(sample("{}"), Invalid::new("size", "missing"));
        assert_eq!(
            sample(r#"{"size":1,"size":2}"#),
            Invalid::new("size", "given twice")
        );
    }

    #[test]
    fn text_without_a_field_is_kept_without_position() {
        let invalid = sample("[");
        assert_eq!(invalid.field(), "");
        assert!(!invalid.to_string().contains("line 1"), "{invalid}");
    }
}
