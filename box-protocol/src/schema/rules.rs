//! Schemas written by hand, each beside the rule it repeats.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::json;

use crate::blob::Blob;
use crate::env::Env;
use crate::ids::MAX_ID_BYTES;
use crate::model::{BoxMountSpec, HostPathMode, Network, SpecDraft, SpecExtras};
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

/// A whole number as specs take it.
struct Whole;

/// A number as specs take it.
struct Decimal;

/// A spec as it is asked for: all may be absent or `null`, which is the same.
#[derive(JsonSchema)]
#[schemars(rename = "SpecDraft", deny_unknown_fields)]
#[allow(dead_code, reason = "only its schema is used")]
struct Draft {
    /// The box. As every id, with space around it that is dropped. Needed wherever a box is made or used.
    #[schemars(regex(pattern = TRIMMED_ID))]
    session_id: Option<String>,
    /// The text to run, for the box's shell; needed by `box.exec`.
    #[schemars(regex(pattern = NO_NUL))]
    cmd: Option<String>,
    /// Where it runs: an absolute path; `mount_path` if absent. Under `mount_path` if a host directory is mounted
    /// there.
    #[schemars(regex(pattern = r"^\s*(?:/[^\u0000]*)?$"))]
    workdir: Option<String>,
    /// How many seconds it may run. Greater than 0; 30 if absent.
    #[schemars(extend("minimum" = 1))]
    timeout_sec: Option<Whole>,
    /// Whether the box reaches a network; `off` if absent.
    network: Option<Network>,
    /// What the box's files come from.
    image: Option<String>,
    /// Variables for the command.
    env: Option<Env>,
    /// The host directory that is the workspace: an absolute path, of Windows, too.
    #[schemars(regex(pattern = r"^\s*(?:(?:/|\\\\|[A-Za-z]:[/\\])[^\u0000]*)?$"))]
    host_path: Option<String>,
    /// How it is mounted; `rw` if absent.
    host_path_mode: Option<HostPathMode>,
    /// Where the workspace appears: an absolute path; `/workspace` if absent.
    #[schemars(regex(pattern = INSIDE))]
    mount_path: Option<String>,
    /// More host directories.
    extra_mounts: Option<Vec<BoxMountSpec>>,
    /// Idleness does not end the box.
    persistent: Option<bool>,
    /// Processors' worth of time. Greater than 0; 1 if absent.
    cpus: Option<Decimal>,
    /// Memory in mebibytes. At least 32; 512 if absent.
    #[schemars(extend("minimum" = 32))]
    memory_mb: Option<Whole>,
    /// Processes and threads. At least 1; 128 if absent.
    #[schemars(extend("minimum" = 1))]
    pids_limit: Option<Whole>,
    /// The system's directories cannot be written; so if absent.
    read_only_rootfs: Option<bool>,
    /// How large the workspace may grow, in mebibytes; 0, as if absent, for no limit.
    workspace_quota_mb: Option<Whole>,
    #[schemars(flatten)]
    extras: SpecExtras,
}

impl JsonSchema for SpecDraft {
    fn schema_name() -> Cow<'static, str> {
        Draft::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Draft::json_schema(generator)
    }
}
