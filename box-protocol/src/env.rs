//! Environment variables with validated names and hidden values.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;

use serde::{Deserialize, Serialize};

use crate::invalid::Invalid;

/// The home directory of the guest user if the spec sets none.
pub const DEFAULT_HOME: &str = "/home/box";

/// The default `PATH` of commands: the guest's `.local/bin` and the system directories.
pub fn default_path(home: &str) -> String {
    let home = home.trim_end_matches('/');
    format!("{home}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
}

/// Environment variables by name.
///
/// [`Debug`](fmt::Debug) shows names only because values may be secret.
#[derive(Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>")]
pub struct Env(BTreeMap<String, String>);

impl Env {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds or replaces a variable.
    pub fn insert(
        &mut self,
        name: impl Into<String>,
        value: impl Into<String>,
    ) -> Result<(), Invalid> {
        let (name, value) = (name.into(), value.into());
        check(&name, &value)?;
        self.0.insert(name, value);
        Ok(())
    }

    /// Removes a variable if it is set.
    pub fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Adds all variables of `other`, which override existing ones.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Parses a file with one `NAME=value` per line, optionally after `export`.
    ///
    /// A value in single quotes is literal. A value in double quotes may contain the escapes `\n`,
    /// `\r`, `\t`, `\"`, `\$` and `\\`. A value in quotes may have several lines. An unquoted value is
    /// the trimmed rest of the line, including any `#`. The parser expands nothing. It skips empty
    /// lines, lines that start with `#`, and invalid lines. The last value of a name counts.
    pub fn from_lines(text: &[u8]) -> Self {
        let mut found = BTreeMap::new();
        let mut rest = text;
        while !rest.is_empty() {
            let end = rest.iter().position(|byte| *byte == b'\n');
            let next = end.map_or(rest.len(), |end| end + 1);
            let line = std::str::from_utf8(&rest[..end.unwrap_or(rest.len())]);
            let read = line
                .ok()
                .and_then(|line| variable(line.trim(), &rest[next..]));
            let Some((name, value, more)) = read else {
                rest = &rest[next..];
                continue;
            };
            found.insert(name, value);
            rest = &rest[next + more..];
        }
        Self(found)
    }

    /// Returns the names, sorted.
    pub fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }

    /// Returns the variables as a map.
    pub fn into_map(self) -> BTreeMap<String, String> {
        self.0
    }
}

/// Parses a line; returns the name, the value, and the bytes of later lines that belong to it.
fn variable(line: &str, later: &[u8]) -> Option<(String, String, usize)> {
    let line = match line.strip_prefix("export") {
        Some(rest) if rest.starts_with([' ', '\t']) => rest.trim_start(),
        _ => line,
    };
    let (name, value) = line.split_once('=')?;
    let is_part = |char: char| char.is_ascii_alphanumeric() || char == '_';
    if name.starts_with(|char: char| char.is_ascii_digit()) || !name.chars().all(is_part) {
        return None;
    }
    let value = value.trim();
    let (value, more) = match value.chars().next() {
        Some(quote @ ('\'' | '"')) => match unquoted(&value[1..], quote) {
            Some((value, _)) => (value, 0),
            None => continued(&value[1..], later, quote)?,
        },
        _ => (value.to_owned(), 0),
    };
    check(name, &value).ok()?;
    Some((name.to_owned(), value, more))
}

/// Returns a value in quotes that ends in a later line, and the bytes up to the end of that line.
fn continued(start: &str, later: &[u8], quote: char) -> Option<(String, usize)> {
    let later = match std::str::from_utf8(later) {
        Ok(later) => later,
        Err(error) => std::str::from_utf8(&later[..error.valid_up_to()]).ok()?,
    };
    let (value, after) = unquoted(&format!("{start}\n{later}"), quote)?;
    let more = later.len().checked_sub(after)?;
    let end = later[more..]
        .find('\n')
        .map_or(later.len(), |end| more + end + 1);
    Some((value, end))
}

/// Returns the text before the closing quote, if only a comment follows it in its line, and the
/// number of bytes after the quote.
fn unquoted(text: &str, quote: char) -> Option<(String, usize)> {
    let mut value = String::new();
    let mut chars = text.chars();
    loop {
        match chars.next()? {
            char if char == quote => break,
            '\\' if quote == '"' => match chars.next()? {
                'n' => value.push('\n'),
                'r' => value.push('\r'),
                't' => value.push('\t'),
                char @ ('"' | '$' | '\\') => value.push(char),
                other => value.extend(['\\', other]),
            },
            char => value.push(char),
        }
    }
    let after = chars.as_str();
    let rest = after.split('\n').next().unwrap_or_default().trim_start();
    (rest.is_empty() || rest.starts_with('#')).then_some((value, after.len()))
}

fn check(name: &str, value: &str) -> Result<(), Invalid> {
    if name.is_empty() || name.contains(['=', '\0']) {
        return Err(Invalid::new(
            "env",
            "must have non-empty names without = and NUL",
        ));
    }
    if value.contains('\0') {
        return Err(Invalid::new("env", "must have values without NUL"));
    }
    Ok(())
}

impl TryFrom<BTreeMap<String, String>> for Env {
    type Error = Invalid;

    fn try_from(map: BTreeMap<String, String>) -> Result<Self, Invalid> {
        for (name, value) in &map {
            check(name, value)?;
        }
        Ok(Self(map))
    }
}

impl Deref for Env {
    type Target = BTreeMap<String, String>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay_out_of_debug() {
        let mut env = Env::new();
        env.insert("TOKEN", "hunter2").unwrap();
        assert_eq!(format!("{env:?}"), r#"{"TOKEN"}"#);
    }

    #[test]
    fn rules_hold_on_construction_and_on_decode() {
        for (name, value) in [("", "v"), ("A=B", "v"), ("A\0", "v"), ("A", "v\0")] {
            assert_eq!(Env::new().insert(name, value).unwrap_err().field(), "env");
            let json = serde_json::json!({ name: value }).to_string();
            let error = serde_json::from_str::<Env>(&json).unwrap_err();
            assert_eq!(Invalid::from(error).field(), "env");
        }
        let env: Env = serde_json::from_str(r#"{"B":"=","A":""}"#).unwrap();
        assert_eq!(env.names(), ["A", "B"]);
    }

    #[test]
    fn later_variables_win() {
        let mut env: Env = serde_json::from_str(r#"{"A":"1","B":"1"}"#).unwrap();
        env.extend(serde_json::from_str(r#"{"B":"2"}"#).unwrap());
        assert_eq!((env["A"].as_str(), env["B"].as_str()), ("1", "2"));
    }

    #[test]
    fn a_file_has_one_variable_per_line() {
        let file = b"# first\n\nA=1\n  B = 2 \nexport C= three # words \nD='a\\n$x' # why\r\n\
            E=\"a\\n\\\"b\\\" \\$c \\d\"\nF=\nG\n=H\n1I=1\nJ='open\nK='a' b\nL=\xff\nM=a\0b\nA=last\nexport=x\n\
            N=a=b";
        let env = Env::from_lines(file);
        let found: Vec<_> = env
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(
            found,
            [
                ("A", "last"),
                ("C", "three # words"),
                ("D", "a\\n$x"),
                ("E", "a\n\"b\" $c \\d"),
                ("F", ""),
                ("N", "a=b"),
                ("export", "x"),
            ]
        );
        assert!(Env::from_lines(b"").is_empty());
    }

    #[test]
    fn a_quoted_value_may_have_several_lines() {
        let file =
            b"A='one\ntwo'\nB=\"x\n\\\"y\\r\" # note\nC='open\nD=4\nE='a' b'\nF=\"\xff\"\nG='\n'";
        let env = Env::from_lines(file).into_map();
        let found: Vec<_> = env
            .iter()
            .map(|(name, value)| (&**name, &**value))
            .collect();
        assert_eq!(
            found,
            [
                ("A", "one\ntwo"),
                ("B", "x\n\"y\r"),
                ("D", "4"),
                ("G", "\n"),
            ]
        );
    }
}
