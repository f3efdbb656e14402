//! The configuration as text: effective values with their origins, the example and the reference.

use std::fmt::Write as _;

use serde_json::json;
use toml::Value;

use super::{KEYS, Values};

/// Formats every key with its value and origin.
pub(crate) fn show(values: &Values, json: bool) -> String {
    if json {
        let keys = values.iter().map(|(name, (value, origin))| {
            let value = without_secret(name, value);
            let shown = json!({"value": value, "from": origin.to_string()});
            (name.clone(), shown)
        });
        let all: serde_json::Map<_, _> = keys.collect();
        return format!("{:#}\n", serde_json::Value::Object(all));
    }
    let mut text = String::new();
    let mut section = "";
    for key in KEYS {
        let Some((name, rest)) = key.name.split_once('.') else {
            continue;
        };
        if name != section {
            let gap = if section.is_empty() { "" } else { "\n" };
            let _ = writeln!(text, "{gap}[{name}]");
            section = name;
        }
        let _ = match values.get(key.name) {
            Some((value, origin)) => {
                let value = without_secret(key.name, value);
                writeln!(text, "{rest} = {value}  # {origin}")
            }
            None => writeln!(text, "# {rest} is not set"),
        };
    }
    text
}

/// Masks the password in the address of a proxy.
fn without_secret(name: &str, value: &Value) -> Value {
    let address = value.as_str().filter(|_| name == "network.proxy");
    match address.and_then(|address| address.rsplit_once('@')) {
        Some((before, host)) => {
            let scheme = before.find("://").map_or(0, |host_port| host_port + 3);
            Value::String(format!("{}***@{host}", &before[..scheme]))
        }
        None => value.clone(),
    }
}

/// The example file, with every key commented out.
pub(crate) fn example() -> String {
    let mut text = String::from(
        "# boxd's configuration. Every key is shown with its default, or with an example where it has none.\n\
         # `boxd config show` prints the effective values and their origins. Environment variables override this\n\
         # file (BOXD_SERVER_HTTP=127.0.0.1:0), and flags override both.\n",
    );
    let mut section = "";
    for key in KEYS {
        let Some((name, rest)) = key.name.split_once('.') else {
            continue;
        };
        if name != section {
            let _ = write!(text, "\n[{name}]\n");
            section = name;
        }
        for line in key.about.lines() {
            let _ = writeln!(text, "# {line}");
        }
        let _ = writeln!(text, "#{rest} = {}", key.example);
    }
    text
}

/// Every key as a Markdown table.
pub(crate) fn reference() -> String {
    let mut text = String::from("| key | default | variable | description |\n|---|---|---|---|\n");
    for key in KEYS {
        let default = match (key.default, key.example) {
            ("", example) => format!("none; for example `{example}`"),
            (default, _) => format!("`{default}`"),
        };
        let about = key.about.replace('\n', " ");
        let (name, variable) = (key.name, key.variable());
        let _ = writeln!(text, "| `{name}` | {default} | `{variable}` | {about} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_the_file_in_the_repository() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/boxd.example.toml");
        let committed = std::fs::read_to_string(file).unwrap();
        assert_eq!(
            committed,
            example(),
            "regenerate it: boxd config example > boxd/boxd.example.toml"
        );
    }

    const PAGE: &str = include_str!("../../../docs/configuration.md");

    #[test]
    fn the_configuration_page_has_every_key() {
        assert!(
            PAGE.contains(&reference()),
            "regenerate the part between the marks: boxd config reference"
        );
    }

    #[test]
    fn examples_of_the_configuration_page_are_valid() {
        let blocks: Vec<&str> = PAGE.split("```toml\n").skip(1).collect();
        assert!(blocks.len() >= 3);
        for block in blocks {
            let block = block.split("```").next().unwrap();
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), block).unwrap();
            let read = super::super::load(Some(file.path()), [], Vec::new());
            let (config, _) = read.unwrap_or_else(|error| panic!("{error:#} in {block}"));
            // Fails if the example names an unknown profile.
            box_service::BoxService::with_connector(
                config.policy,
                box_service::connector::InProcess::new(box_rpc::Router::empty()),
            )
            .unwrap_or_else(|error| panic!("{error} in {block}"));
        }
    }

    #[test]
    fn the_example_has_every_key_and_is_valid() {
        let uncommented: String = example()
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(rest) if !rest.starts_with(' ') => format!("{rest}\n"),
                _ => format!("{line}\n"),
            })
            .collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &uncommented).unwrap();
        let (_, values) = super::super::load(Some(file.path()), [], Vec::new()).unwrap();
        for key in KEYS {
            let from = values[key.name].1.to_string();
            assert_eq!(from, file.path().display().to_string(), "{}", key.name);
        }
    }
}
