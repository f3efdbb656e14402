//! Hand-written schemas of types with a hand-written decoder.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::{Value, json};

use crate::blob::Blob;
use crate::decode::{Decimal, Whole};
use crate::env::Env;
use crate::ids::MAX_ID_BYTES;
use crate::note::{MAX_NOTE_BYTES, Note};

/// Text without NUL.
pub(crate) const NO_NUL: &str = r"^[^\u0000]*$";

/// Text without NUL that is not blank.
pub(crate) const NOT_BLANK: &str = r"^[^\u0000]*[^\s\u0000][^\u0000]*$";

/// A path inside the box; the decoder trims it.
pub(crate) const INSIDE: &str = r"^\s*/[^\u0000]*$";

/// A path inside the box without `.` and `..` components.
pub(crate) const NORMALIZED: &str =
    r"^/(?:(?!\.{1,2}(?:/|$))[^/\u0000]+(?:/(?!\.{1,2}(?:/|$))[^/\u0000]+)*)?$";

/// A relative path without `.` and `..` components.
pub(crate) const RELATIVE: &str =
    r"^(?!\.{1,2}(?:/|$))[^/\u0000]+(?:/(?!\.{1,2}(?:/|$))[^/\u0000]+)*$";

/// A host path; the decoder trims it.
pub(crate) const OF_HOST: &str = r"^\s*(?:/|\\\\|[A-Za-z]:[/\\])[^\u0000]*$";

/// Characters that ids must not contain, as far as one UTF-16 unit can express them.
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

/// The schema of ids and names.
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

/// Makes an enum extensible: readers accept any other string.
pub(crate) fn open_list(schema: &mut Schema) {
    let known = std::mem::take(schema).to_value();
    *schema = json_schema!({"anyOf": [known, {"type": "string"}]});
}

/// Adds the rule of an exec result: which exit code each status has.
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
        "description": "Bytes in canonical base64 with padding.",
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
        "description": format!("Any JSON of at most {MAX_NOTE_BYTES} bytes, stored and returned unchanged."),
    });

    Whole, "Whole": json_schema!({
        "description": "A whole number, or its decimal text.",
        "anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": r"^\s*\+?[0-9]+(?:\.0*)?\s*$"},
        ],
    });

    Decimal, "Decimal": json_schema!({
        "description": "A number, or its decimal text.",
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0},
            {"type": "string", "pattern": r"^\s*\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\s*$"},
        ],
    });
}

/// The schema of the id in a draft.
pub(crate) fn asked_id() -> Value {
    json!({
        "description": "The id of the box; the server trims it. Required to create or use a box.",
        "type": ["string", "null"],
        "pattern": TRIMMED_ID,
    })
}

/// The schema of a member with its description and, if it is a scalar, its default.
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
