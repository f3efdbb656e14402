//! Schemas written by hand, each beside the rule it repeats.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::{Value, json};

use crate::blob::Blob;
use crate::decode::{Decimal, Whole};
use crate::env::Env;
use crate::ids::MAX_ID_BYTES;
use crate::note::{MAX_NOTE_BYTES, Note};

/// A text without NUL.
pub(crate) const NO_NUL: &str = r"^[^\u0000]*$";

/// One that is not blank, either.
pub(crate) const NOT_BLANK: &str = r"^[^\u0000]*[^\s\u0000][^\u0000]*$";

/// A path inside the box; space around it is dropped.
pub(crate) const INSIDE: &str = r"^\s*/[^\u0000]*$";

/// A path inside the box without detours.
pub(crate) const NORMALIZED: &str =
    r"^/(?:(?!\.{1,2}(?:/|$))[^/\u0000]+(?:/(?!\.{1,2}(?:/|$))[^/\u0000]+)*)?$";

/// A path of the host; space around it is dropped.
pub(crate) const OF_HOST: &str = r"^\s*(?:/|\\\\|[A-Za-z]:[/\\])[^\u0000]*$";

/// The class of what no id holds: `/` and what `is_invisible` finds, of the characters that one unit of UTF-16 can write.
macro_rules! not_in_ids {
    () => {
        r"/\u0000-\u001f\u007f-\u00a0\u00ad\u034f\u061c\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    };
}

/// An id with space around it that is dropped.
pub(crate) const TRIMMED_ID: &str = concat!(
    r"^\s*[^\s",
    not_in_ids!(),
    "](?:[^",
    not_in_ids!(),
    r"]*[^\s",
    not_in_ids!(),
    r"])?\s*$"
);

/// What every id and name keeps.
pub(crate) fn id(about: &str) -> Schema {
    json_schema!({
        "description": format!("{about} 1 to {MAX_ID_BYTES} bytes of UTF-8, not `.` or `..`."),
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_ID_BYTES,
        "pattern": concat!("^[^", not_in_ids!(), "]+$"),
        "not": {"enum": [".", ".."]},
    })
}

/// For a list of words that may grow: readers take any other word, too.
pub(crate) fn open_list(schema: &mut Schema) {
    let known = std::mem::take(schema).to_value();
    *schema = json_schema!({"anyOf": [known, {"type": "string"}]});
}

/// Of a result of an exec: which code goes with which status.
pub(crate) fn code_by_status(schema: &mut Schema) {
    let by_status = json!([
        {
            "properties": {"status": {"const": "completed"}, "exit_code": {"type": "integer"}},
            "required": ["exit_code"],
        },
        {"properties": {
            "status": {"const": "timed_out"},
            "exit_code": {"type": "null"},
            "signal": {"type": "null"},
        }},
    ]);
    schema.insert("oneOf".to_owned(), by_status);
}

macro_rules! by_hand {
    ($($kind:ty, $name:literal: $schema:expr;)*) => {$(
        impl JsonSchema for $kind {
            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    )*};
}

by_hand! {
    Blob, "Blob": json_schema!({
        "description": "Bytes in base64, padded, in the one way there is to write them.",
        "type": "string",
        "contentEncoding": "base64",
        "pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$",
    });

    Env, "Env": json_schema!({
        "description": "Environment variables by name.",
        "type": "object",
        "propertyNames": {"pattern": r"^[^=\u0000]+$"},
        "additionalProperties": {"type": "string", "pattern": NO_NUL},
    });

    Note, "Note": json_schema!({
        "description": format!("Any JSON of at most {MAX_NOTE_BYTES} bytes, kept and returned as it was written."),
    });

    Whole, "Whole": json_schema!({
        "description": "A whole number, also written as text.",
        "anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": r"^\s*\+?[0-9]+(?:\.0*)?\s*$"},
        ],
    });

    Decimal, "Decimal": json_schema!({
        "description": "A number, also written as text.",
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0},
            {"type": "string", "pattern": r"^\s*\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*$"},
        ],
    });
}

/// The id of a draft.
pub(crate) fn asked_id() -> Value {
    json!({
        "description": "The box. As every id, with space around it that is dropped. Needed wherever a box is made or used.",
        "type": ["string", "null"],
        "pattern": TRIMMED_ID,
    })
}

/// The schema of a member with its documentation, and with its default if that says anything.
pub(crate) fn described(mut schema: Schema, doc: &str, default: &impl Serialize) -> Value {
    schema.insert("description".to_owned(), doc.into());
    match serde_json::to_value(default) {
        Ok(Value::String(text)) if text.is_empty() => {}
        Ok(default @ (Value::Bool(_) | Value::Number(_) | Value::String(_))) => {
            schema.insert("default".to_owned(), default);
        }
        _ => {}
    }
    schema.to_value()
}
