//! Output: text, JSON, tables that fit the terminal, and colours.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};

use box_protocol::is_invisible;
use serde::Serialize;

use crate::terminal;

/// Prints to stdout.
///
/// If the reader has closed the pipe, as `head` does, this fails with a broken pipe, and boxd exits without a message.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Prints a line to stderr and ignores errors.
pub(crate) fn eprintln(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Prints a text to stderr without a line break and ignores errors.
pub(crate) fn eprint(text: &str) {
    let _ = write!(io::stderr().lock(), "{}", visible(text));
}

/// Prints which fields of a request the server's profile changed.
pub(crate) fn report_adjusted(adjusted: &[box_protocol::Adjusted]) {
    for one in adjusted {
        let (field, requested, given) = (&one.field, &one.asked, &one.given);
        eprintln(&format!(
            "boxd: {field}: {given} instead of {requested}; set by the profile"
        ));
    }
}

/// Escapes control and invisible characters in text of a guest or a peer, as in `\u{1b}`.
pub(crate) fn visible(text: &str) -> Cow<'_, str> {
    escaped(text, is_invisible, |text, c| {
        let _ = write!(text, "\\u{{{:x}}}", u32::from(c));
    })
}

/// Escapes control and invisible characters in the strings of a JSON text.
///
/// `serde_json` writes only spaces and line breaks between strings.
pub(crate) fn visible_json(text: &str) -> Cow<'_, str> {
    escaped(
        text,
        |c| is_invisible(c) && c != '\n',
        |text, c| {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(text, "\\u{unit:04x}");
            }
        },
    )
}

fn escaped(
    text: &str,
    is_to_escape: impl Fn(char) -> bool,
    escape: impl Fn(&mut String, char),
) -> Cow<'_, str> {
    if !text.contains(&is_to_escape) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_to_escape(c) {
            escape(&mut escaped, c);
        } else {
            escaped.push(c);
        }
    }
    Cow::Owned(escaped)
}

/// Formats a value as indented JSON with a line break at its end.
pub(crate) fn json(value: &impl Serialize) -> io::Result<String> {
    let text = serde_json::to_string_pretty(value)?;
    Ok(format!("{}\n", visible_json(&text)))
}

/// One line per item.
pub(crate) fn lines(items: impl IntoIterator<Item = impl std::fmt::Display>) -> String {
    let mut text = String::new();
    for item in items {
        text.push_str(&visible(&item.to_string()));
        text.push('\n');
    }
    text
}

/// Prints the text, or the value as JSON.
pub(crate) fn print_or_json(json: bool, text: &str, value: &impl Serialize) -> io::Result<()> {
    if json {
        print(&self::json(value)?)
    } else {
        print(text)
    }
}

/// Whether stdout is a terminal and `NO_COLOR` is not set.
pub(crate) fn colours() -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stdout().is_terminal() && !unwanted && !dumb
}

/// The width of the terminal on stdout.
fn width() -> Option<usize> {
    let size = io::stdout().is_terminal().then(terminal::size).flatten();
    size.map(|(columns, _)| usize::from(columns))
}

/// Wraps lines at the width of the terminal; leaves them unchanged in a pipe.
pub(crate) fn wrapped(text: &str) -> String {
    match width() {
        Some(width) => text.lines().map(|line| wrap(line, width)).collect(),
        None => text.to_owned(),
    }
}

/// Wraps one line, and indents the rest to its last column.
fn wrap(line: &str, width: usize) -> String {
    let width_of = |text: &str| text.chars().count();
    let margin = width_of(line) - width_of(line.trim_start());
    let column = line
        .rfind("  ")
        .map_or(0, |index| width_of(&line[..index + 2]));
    // A column beyond half the width leaves too little room.
    let indent = column.max(margin).min(width / 2);
    let mut text = String::new();
    let mut used = 0;
    for (index, word) in line.split(' ').enumerate() {
        if index > 0 && used + 1 + width_of(word) > width && used > indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent));
            used = indent;
        } else if index > 0 {
            text.push(' ');
            used += 1;
        }
        text.push_str(word);
        used += width_of(word);
    }
    text.push('\n');
    text
}

/// Formats a table. On a terminal the last column is cut at the width; in a pipe it is not.
pub(crate) fn table(heads: &[&str], rows: &[Vec<String>]) -> String {
    let visible = |cell: &String| visible(cell).into_owned();
    let row = |row: &Vec<String>| row.iter().map(visible).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(row).collect();
    layout(heads, &rows, width(), colours())
}

fn layout(heads: &[&str], rows: &[Vec<String>], width: Option<usize>, colored: bool) -> String {
    const GAP: usize = 2;
    let width_of = |text: &str| text.chars().count();
    let mut widths: Vec<usize> = heads.iter().map(|head| width_of(head)).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(width_of(cell));
        }
    }
    let line = |cells: &[&str]| {
        let mut text = String::new();
        for (index, cell) in cells.iter().enumerate() {
            text.push_str(cell);
            if index + 1 < cells.len() {
                text.extend(std::iter::repeat_n(
                    ' ',
                    widths[index] - width_of(cell) + GAP,
                ));
            }
        }
        match width {
            Some(width) if width_of(&text) > width => {
                let kept: String = text.chars().take(width.saturating_sub(1)).collect();
                format!("{}…", kept.trim_end())
            }
            _ => text.trim_end().to_owned(),
        }
    };
    let head = line(heads);
    let mut text = if colored {
        format!("\x1b[1m{head}\x1b[0m\n")
    } else {
        format!("{head}\n")
    };
    for row in rows {
        let cells: Vec<&str> = row.iter().map(String::as_str).collect();
        text.push_str(&line(&cells));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_wraps_below_its_last_column() {
        assert_eq!(wrap("short", 20), "short\n");
        assert_eq!(
            wrap("  yes  some words that are long", 20),
            "  yes  some words\n       that are long\n"
        );
        assert_eq!(wrap("", 20), "\n");
        let word = "w".repeat(30);
        assert_eq!(wrap(&word, 20), format!("{word}\n"));
    }

    #[test]
    fn control_and_invisible_characters_are_escaped() {
        assert_eq!(visible("a é…😀"), "a é…😀");
        assert_eq!(
            visible("a\x1b[2J\u{9b}2J\u{202e}b\n"),
            "a\\u{1b}[2J\\u{9b}2J\\u{202e}b\\u{a}"
        );
        let value = serde_json::json!({"a\u{9b}": "\x1b\u{7f}\u{202e}\u{e0041}\n"});
        let text = json(&value).unwrap();
        assert_eq!(
            text,
            "{\n  \"a\\u009b\": \"\\u001b\\u007f\\u202e\\udb40\\udc41\\n\"\n}\n"
        );
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            value
        );
        assert_eq!(lines(["a\nb"]), "a\\u{a}b\n");
        assert!(table(&["A"], &[vec!["\u{9b}".to_owned()]]).ends_with("\n\\u{9b}\n"));
    }

    #[test]
    fn a_table_is_aligned_and_fits_the_terminal() {
        let rows = [
            vec!["a".to_owned(), "long text".to_owned()],
            vec!["bcd".to_owned(), "é".to_owned()],
        ];
        assert_eq!(
            layout(&["ID", "X"], &rows, None, false),
            "ID   X\na    long text\nbcd  é\n"
        );
        assert_eq!(
            layout(&["ID", "X"], &rows, Some(8), false),
            "ID   X\na    lo…\nbcd  é\n"
        );
        assert!(layout(&["ID"], &[], None, true).starts_with("\x1b[1mID"));
    }
}
