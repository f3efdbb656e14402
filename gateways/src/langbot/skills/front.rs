//! The head of a skill's text: a few words of YAML between two lines of dashes, and the instructions behind it.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle};

use super::Why;

/// Words of plain YAML that are no texts, for readers of its first version.
const WORDS: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];

/// What the head says, by its name, and the instructions.
pub(super) fn read(content: &str) -> Result<(HashMap<String, String>, &str), Why> {
    let mut lines = content.split_inclusive('\n');
    let first = lines.next().unwrap_or_default();
    if first.trim() != "---" {
        return Ok((HashMap::new(), content));
    }
    let mut end = first.len();
    for line in lines {
        if line.trim() == "---" {
            let rest = content[end + line.len()..].trim_start_matches('\n');
            return Ok((words(&content[first.len()..end])?, rest));
        }
        end += line.len();
    }
    Ok((HashMap::new(), content))
}

/// The texts of the outermost mapping. What is nested, repeated by a reference or untrue is passed over; nothing is expanded.
fn words(text: &str) -> Result<HashMap<String, String>, Why> {
    let mut found = HashMap::new();
    let (mut depth, mut key, mut is_key) = (0_usize, None, true);
    for event in Parser::new_from_str(text) {
        let (event, _) = event.map_err(|error| format!("SKILL.md has no sound head: {error}"))?;
        let opens = matches!(event, Event::MappingStart(..) | Event::SequenceStart(..));
        let closes = matches!(event, Event::MappingEnd | Event::SequenceEnd);
        if depth == 0 && matches!(event, Event::SequenceStart(..) | Event::Scalar(..)) {
            return Ok(found);
        }
        if closes {
            depth -= 1;
        }
        let is_node = opens || matches!(event, Event::Scalar(..) | Event::Alias(_));
        if depth == 1 && is_node {
            match event {
                Event::Scalar(text, ..) if is_key => key = Some(text.into_owned()),
                Event::Scalar(text, style, ..) => {
                    if let Some(key) = key.take()
                        && let Some(text) = truly(&text, style)
                    {
                        found.insert(key, text);
                    }
                }
                _ => key = None,
            }
            is_key = !is_key;
        }
        if opens {
            depth += 1;
        }
    }
    Ok(found)
}

/// What Python makes of a value: nothing, if that is nothing, zero or false.
fn truly(text: &str, style: ScalarStyle) -> Option<String> {
    if style != ScalarStyle::Plain {
        return (!text.is_empty()).then(|| text.to_owned());
    }
    match text.to_lowercase().as_str() {
        "" | "~" | "null" | "false" | "no" | "off" | "0" | "0.0" => None,
        "true" | "yes" | "on" => Some("True".to_owned()),
        _ => Some(text.to_owned()),
    }
}

/// A text with this head; blank members are left out.
pub(super) fn write(members: &[(&str, &str)], instructions: &str) -> String {
    let said = members.iter().filter(|(_, text)| !text.trim().is_empty());
    let lines: Vec<_> = said
        .map(|(name, text)| format!("{name}: {}", scalar(text)))
        .collect();
    if lines.is_empty() {
        return instructions.to_owned();
    }
    format!("---\n{}\n---\n\n{instructions}", lines.join("\n"))
}

/// A text as YAML: plain where nobody can mistake it, else as JSON writes it, which is YAML, too.
fn scalar(text: &str) -> String {
    let plain =
        |c: char| c.is_alphanumeric() || matches!(c, ' ' | '_' | '-' | '.' | ',' | '(' | ')' | '/');
    let safe = text.starts_with(char::is_alphabetic)
        && !text.ends_with(' ')
        && text.chars().all(plain)
        && !WORDS.contains(&text.to_lowercase().as_str());
    if safe {
        text.to_owned()
    } else {
        serde_json::Value::from(text).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(content: &str) -> (Vec<(String, String)>, String) {
        let (found, rest) = read(content).unwrap();
        let mut found: Vec<_> = found.into_iter().collect();
        found.sort();
        (found, rest.to_owned())
    }

    #[test]
    fn a_head_is_read_and_written_again() {
        for description in [
            "Does things",
            "a: b # c",
            "ä\nline \"two\"",
            "yes",
            "12",
            "- x",
            "{",
            "'q'",
        ] {
            let members = [
                ("name", "one"),
                ("display_name", " "),
                ("description", description),
            ];
            let (found, rest) = said(&write(&members, "\nDo it.\n---\n"));
            let expected = [("description", description), ("name", "one")];
            assert_eq!(
                found,
                expected.map(|(key, text)| (key.to_owned(), text.to_owned()))
            );
            assert_eq!(rest, "Do it.\n---\n");
        }
        assert_eq!(write(&[("name", "")], "text"), "text");
    }

    #[test]
    fn only_texts_of_the_outermost_mapping_count() {
        let text = "---\nname: &a one\nmeta: {name: other, list: [1, {x: y}]}\ndescription: >-\n  two\n  lines\ndisplay_name: *a\nnone: ~\nyes: on\n---\n\n\nrest";
        let (found, rest) = said(text);
        let expected = [
            ("description", "two lines"),
            ("name", "one"),
            ("yes", "True"),
        ];
        assert_eq!(
            found,
            expected.map(|(key, text)| (key.to_owned(), text.to_owned()))
        );
        assert_eq!(rest, "rest");
        for plain in [
            "no head",
            "---\nname: x\nno end",
            "----\nname: x\n---\n",
            "",
        ] {
            assert_eq!(said(plain), (Vec::new(), plain.to_owned()));
        }
        assert_eq!(said("---\n- a\n---\nx"), (Vec::new(), "x".to_owned()));
        assert!(read("---\na: [\n---\n").is_err());
    }

    #[test]
    fn references_upon_references_cost_nothing() {
        let level = |level: u32| format!("a{level}: &a{level} [*a{0}, *a{0}]", level - 1);
        let levels: Vec<_> = (1..60).map(level).collect();
        let text = format!(
            "---\na0: &a0 [x, x]\n{}\nname: end\n---\n",
            levels.join("\n")
        );
        assert_eq!(said(&text).0, [("name".to_owned(), "end".to_owned())]);
    }
}
