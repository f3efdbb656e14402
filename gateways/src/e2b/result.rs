//! Displayed values as results of the code interpreter.

use std::collections::BTreeMap;

use box_protocol::actions::Displayed;
use serde::Serialize;
use serde_json::value::RawValue;

/// The media types of results, and the members that carry them.
const MEMBERS: [(&str, &str); 12] = [
    ("text/plain", "text"),
    ("text/html", "html"),
    ("text/markdown", "markdown"),
    ("image/svg+xml", "svg"),
    ("image/png", "png"),
    ("image/jpeg", "jpeg"),
    ("application/pdf", "pdf"),
    ("text/latex", "latex"),
    ("application/json", "json"),
    ("application/javascript", "javascript"),
    ("application/vnd.box.table+json", "data"),
    ("application/vnd.box.chart+json", "chart"),
];

/// The members whose values are JSON and not text.
const DATA: [&str; 3] = ["json", "data", "chart"];

/// A line with a displayed value.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    #[serde(rename = "type")]
    kind: &'static str,
    is_main_result: bool,
    #[serde(flatten)]
    members: BTreeMap<&'static str, Member>,
    /// Values of other media types.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    extra: BTreeMap<String, String>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Member {
    Text(String),
    /// Not parsed: a short text can describe a value that takes much memory.
    Data(Box<RawValue>),
}

impl From<Displayed> for Shown {
    fn from(shown: Displayed) -> Self {
        let (mut members, mut extra) = (BTreeMap::new(), BTreeMap::new());
        for (kind, text) in shown.data {
            let Some((_, name)) = MEMBERS.iter().find(|(known, _)| *known == kind) else {
                extra.insert(kind, text);
                continue;
            };
            let member = if DATA.contains(name) {
                match data(text) {
                    Ok(data) => Member::Data(data),
                    // The value of a table or chart is an object.
                    Err(text) if *name != "json" => {
                        extra.insert(kind, text);
                        continue;
                    }
                    Err(text) => Member::Text(text),
                }
            } else if *name == "text" {
                Member::Text(unquoted(&text).to_owned())
            } else {
                Member::Text(text)
            };
            members.insert(*name, member);
        }
        Self {
            kind: "result",
            is_main_result: shown.main,
            members,
            extra,
        }
    }
}

/// Checks a text of JSON, and makes it one line; returns a text that is none.
fn data(text: String) -> Result<Box<RawValue>, String> {
    if serde_json::from_str::<&RawValue>(&text).is_err() {
        return Err(text);
    }
    // Line ends in JSON are between its words only.
    let text = text.replace(['\n', '\r'], " ");
    RawValue::from_string(text).map_err(|error| error.to_string())
}

/// Returns the text of a value without the quotes of a string, as clients expect.
fn unquoted(text: &str) -> &str {
    let inner = |quote: char| text.strip_prefix(quote)?.strip_suffix(quote);
    inner('\'').or_else(|| inner('"')).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn result(data: &[(&str, &str)]) -> (String, Value) {
        let data = data.iter();
        let shown = Displayed {
            data: data
                .map(|(kind, text)| ((*kind).to_owned(), (*text).to_owned()))
                .collect(),
            main: true,
        };
        let line = serde_json::to_string(&Shown::from(shown)).unwrap();
        let value = serde_json::from_str(&line).unwrap();
        (line, value)
    }

    #[test]
    fn a_result_has_its_formats_as_members() {
        let (line, value) = result(&[
            ("text/plain", "'1'"),
            ("application/json", "{\"a\":\n1}"),
            ("application/vnd.box.table+json", "{\"a\": [1]}"),
            ("application/vnd.box.chart+json", "{\"type\": \"line\"}"),
            ("x/y", "z"),
        ]);
        let expected = json!({
            "type": "result", "is_main_result": true, "text": "1", "json": {"a": 1}, "data": {"a": [1]},
            "chart": {"type": "line"}, "extra": {"x/y": "z"},
        });
        assert_eq!(value, expected);
        assert!(!line.contains('\n'), "{line}");
    }

    #[test]
    fn a_text_that_is_no_json_stays_a_text() {
        let (chart, table) = (
            "application/vnd.box.chart+json",
            "application/vnd.box.table+json",
        );
        let (_, value) = result(&[("application/json", "{"), (chart, "{}}"), (table, "")]);
        let expected = json!({
            "type": "result", "is_main_result": true, "json": "{", "extra": {chart: "{}}", table: ""},
        });
        assert_eq!(value, expected);
    }
}
