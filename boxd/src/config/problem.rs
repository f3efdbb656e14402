//! Errors of values, without the names of Rust types.

use serde_path_to_error::{Path, Segment};
use toml::Value;

/// Returns the value at a path.
pub(super) fn value_at<'a>(mut value: &'a Value, path: &Path) -> Option<&'a Value> {
    for segment in path {
        value = match segment {
            Segment::Seq { index } => value.get(index)?,
            Segment::Map { key } => value.get(key)?,
            Segment::Enum { .. } | Segment::Unknown => return None,
        };
    }
    Some(value)
}

/// Describes the problem of a value for an operator.
pub(super) fn describe(message: &str, value: Option<&Value>) -> String {
    let mismatch = ["invalid type: ", "invalid value: "]
        .into_iter()
        .find_map(|prefix| message.strip_prefix(prefix)?.rsplit_once(", expected "));
    if let Some((found, expected)) = mismatch {
        return format!("{} is not {}", found_in_words(found), in_words(expected));
    }
    for (prefix, problem) in [
        ("unknown variant `", "unknown value"),
        ("unknown field `", "unknown key"),
    ] {
        let rest = message.strip_prefix(prefix);
        if let Some((name, known)) = rest.and_then(|rest| rest.split_once("`, expected ")) {
            let known = known.replace('`', "");
            let known = known.strip_prefix("one of ").unwrap_or(&known);
            return format!("{problem} {name:?}; use {known}");
        }
    }
    if message.starts_with("data did not match any variant") {
        return "neither a list nor text".to_owned();
    }
    // A rule names its own field, which says less than the key.
    let rule = match message.split_once(": ") {
        Some((field, rule)) if !field.contains(' ') => rule,
        _ => message,
    };
    match value {
        Some(Value::String(text)) => match rule.strip_prefix("must be ") {
            Some(rule) => format!("{text:?} is not {rule}"),
            None if rule.starts_with("must ") => format!("{text:?} {rule}"),
            None => message.to_owned(),
        },
        _ => message.to_owned(),
    }
}

/// The value that serde found.
fn found_in_words(found: &str) -> &str {
    match found {
        "map" => "a table",
        "sequence" => "a list",
        _ => match found.split_once('`') {
            Some((_, value)) => value.trim_end_matches('`'),
            None => found.strip_prefix("string ").unwrap_or(found),
        },
    }
}

/// The type that serde expected.
fn in_words(expected: &str) -> &str {
    match expected {
        "usize" | "u64" => "a whole number",
        "u32" => "a whole number up to 4294967295",
        "a nonzero usize" | "a nonzero u64" => "a whole number above 0",
        "f64" => "a number",
        "a boolean" => "true or false",
        "a string" | "path string" => "text",
        "a sequence" => "a list",
        "a map" => "a table",
        _ if expected.starts_with("struct ") => "a table",
        _ => expected,
    }
}

#[cfg(test)]
mod tests {
    use super::super::load;

    #[test]
    fn a_wrong_value_is_described_without_types_of_rust() {
        let cases = [
            (
                "[runtime]\nmax_boxes = \"x\"",
                "runtime.max_boxes",
                "\"x\" is not a whole number",
            ),
            (
                "[runtime]\nmax_boxes = -1",
                "runtime.max_boxes",
                "-1 is not a whole number",
            ),
            (
                "[server]\nmax_body_mb = 0",
                "server.max_body_mb",
                "0 is not a whole number above 0",
            ),
            (
                "[server]\nkeep_boxes = 1",
                "server.keep_boxes",
                "1 is not true or false",
            ),
            ("[server]\nhttp = 7080", "server.http", "7080 is not text"),
            (
                "[server]\nlisten = \"a\"",
                "server.listen",
                "\"a\" is not a list",
            ),
            (
                "[log]\nformat = \"xml\"",
                "log.format",
                "unknown value \"xml\"; use human or json",
            ),
            (
                "[network]\nallow = [\"a b\"]",
                "network.allow[0]",
                "\"a b\" is not a DNS name: letters",
            ),
            (
                "[network]\nallow = [\"a:0\"]",
                "network.allow[0]",
                "\"a:0\" must have a port",
            ),
            (
                "[[policy.profiles]]\nname = \"x\"\ncpu = 1",
                "policy.profiles[0].cpu",
                "unknown key \"cpu\"; use ",
            ),
        ];
        for (text, key, problem) in cases {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            let error = load(Some(file.path()), [], Vec::new()).unwrap_err();
            let expected = format!("{key} (from {}): {problem}", file.path().display());
            assert!(
                error.to_string().starts_with(&expected),
                "{error} / {expected}"
            );
        }
    }
}
