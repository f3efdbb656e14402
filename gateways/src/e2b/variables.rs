//! Variables in the steps of a build: `$NAME`, `${NAME}` and `${NAME:-TEXT}`.

use std::collections::BTreeMap;

use box_protocol::Invalid;

/// The maximum length of a value with its variables. Linux has no longer variables.
const MAX_VALUE_BYTES: usize = 128 * 1024;

/// Returns the variables in the text of `/proc/PID/environ`.
pub(super) fn variables(environ: &str) -> BTreeMap<String, String> {
    let pairs = environ.split('\0').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Replaces the variables in a text by their values. One without a value is empty, and `\$` is `$`.
pub(super) fn expanded(
    field: &'static str,
    text: &str,
    variables: &BTreeMap<String, String>,
) -> Result<String, Invalid> {
    let (mut done, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(['\\', '$']) {
        let (before, from) = rest.split_at(at);
        done.push_str(before);
        let (value, after) = replaced(from, variables).unwrap_or_else(|| from.split_at(1));
        done.push_str(value);
        rest = after;
        if done.len() > MAX_VALUE_BYTES {
            let rule = format!("must have at most {MAX_VALUE_BYTES} bytes with its variables");
            return Err(Invalid::new(field, rule));
        }
    }
    done.push_str(rest);
    Ok(done)
}

/// Returns the value of the variable that a text begins with, and the rest of the text.
fn replaced<'a>(
    from: &'a str,
    variables: &'a BTreeMap<String, String>,
) -> Option<(&'a str, &'a str)> {
    if let Some(after) = from.strip_prefix(r"\$") {
        return Some(("$", after));
    }
    let from = from.strip_prefix('$')?;
    let (name, default, after) = if let Some(inner) = from.strip_prefix('{') {
        let (body, after) = inner.split_once('}')?;
        let (name, default) = body.split_once(":-").unwrap_or((body, ""));
        (name, default, after)
    } else {
        let end = from.find(|letter: char| !is_of_name(letter));
        let (name, after) = from.split_at(end.unwrap_or(from.len()));
        (name, "", after)
    };
    let begins = name.starts_with(|first: char| is_of_name(first) && !first.is_ascii_digit());
    if !begins || !name.chars().all(is_of_name) || default.contains('$') {
        return None;
    }
    let value = variables.get(name).filter(|value| !value.is_empty());
    Some((value.map_or(default, String::as_str), after))
}

fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_replaced_by_their_values() {
        let variables = variables("APP=/app\0PATH=/bin:/usr/bin\0EMPTY=\0no variable\0");
        for (text, expected) in [
            ("plain \\ text", "plain \\ text"),
            ("$APP/data", "/app/data"),
            ("${APP}data", "/appdata"),
            ("/home/user/bin:$PATH", "/home/user/bin:/bin:/usr/bin"),
            ("$APP$APP-$MISSING.", "/app/app-."),
            ("${MISSING:-/tmp}${EMPTY:-e}${APP:-x}", "/tmpe/app"),
            (r"\$APP costs \$5 $5 $", "$APP costs $5 $5 $"),
            (
                "${APP $() ${A B} ${MISSING:-$APP}",
                "${APP $() ${A B} ${MISSING:-/app}",
            ),
            ("ü$APPü", "ü/appü"),
        ] {
            let found = expanded("ENV", text, &variables).unwrap();
            assert_eq!(found, expected, "{text}");
        }
    }

    #[test]
    fn a_value_with_its_variables_has_a_limit() {
        let variables = BTreeMap::from([("A".to_owned(), "x".repeat(1024))]);
        assert!(expanded("ENV", &"$A".repeat(128), &variables).is_ok());
        let error = expanded("ENV", &"$A".repeat(100_000), &variables).unwrap_err();
        assert!(error.to_string().contains("131072"), "{error}");
    }
}
