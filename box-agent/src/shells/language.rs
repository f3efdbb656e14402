//! What differs between interpreters: their programs, the loop they are in, and how they are told of a run's own settings.

use std::fmt::Write as _;

use box_protocol::Env;
use box_protocol::actions::Language;

/// What is done for one run only.
#[derive(Debug)]
pub(super) struct Settings<'a> {
    pub(super) cwd: &'a str,
    pub(super) env: &'a Env,
}

/// The command line of an interpreter in its loop, which finds its private directory as an argument.
pub(super) fn argv(language: Language, dir: &str) -> Vec<String> {
    let shell = include_str!("shell.sh");
    let words: &[&str] = match language {
        Language::Bash => &["bash", "-c", shell, "bash"],
        Language::Sh => &["sh", "-c", shell, "sh"],
        Language::Python => &["python3", "-c", include_str!("python.py")],
        Language::JavaScript => &["node", "-e", include_str!("javascript.js"), "--"],
    };
    let words = words.iter().copied().chain([dir]);
    words.map(str::to_owned).collect()
}

/// Up to here a text goes along with the line that lets it run: a shell reads that byte by byte, which is still less than to
/// open a file.
const LINE_BYTES: usize = 128;

/// Whether a text can go along with the line.
pub(super) fn fits_line(language: Language, text: &str) -> bool {
    let ending = match language {
        Language::Bash => '\0',
        Language::Sh => '\n',
        Language::Python | Language::JavaScript => return false,
    };
    // The spaces at its begin and end would be taken for what parts it from the rest.
    let parted = text.starts_with(' ') || text.ends_with(' ');
    text.len() <= LINE_BYTES && !parted && !text.contains(ending)
}

/// What lets a run begin.
pub(super) fn go_line(
    language: Language,
    run: u64,
    has_settings: bool,
    has_input: bool,
    text: Option<&str>,
) -> String {
    let or = |is: bool, yes: &'static str, no: &'static str| if is { yes } else { no };
    let (text, is_there) = (text.unwrap_or_default(), text.is_some());
    match language {
        Language::Bash | Language::Sh => {
            let end = or(language == Language::Bash, "\0", "\n");
            let how = or(has_settings, "s", "p");
            let input = or(has_input, "o", "c");
            let from = or(is_there, "l", "f");
            format!("{run} {how}{input}{from} {text}{end}")
        }
        Language::Python | Language::JavaScript => {
            let how = or(has_settings, "set", "plain");
            let input = or(has_input, "open", "closed");
            format!("{run} {how} {input}\n")
        }
    }
}

impl Settings<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.cwd.is_empty() && self.env.is_empty()
    }

    /// What an interpreter reads before the run, and what a shell reads after it.
    pub(super) fn told(&self, language: Language) -> (String, String) {
        match language {
            Language::Bash | Language::Sh => self.as_shell_text(),
            Language::Python | Language::JavaScript => {
                let told = serde_json::json!({"cwd": self.cwd, "env": self.env});
                (told.to_string(), String::new())
            }
        }
    }

    fn as_shell_text(&self) -> (String, String) {
        let (mut before, mut after) = (String::new(), String::new());
        if !self.cwd.is_empty() {
            let cwd = quoted(self.cwd);
            let _ = writeln!(
                before,
                "__box_cwd=$PWD\ncommand cd -- {cwd} || __box_code=1"
            );
            let _ = writeln!(after, "command cd -- \"$__box_cwd\"");
        }
        // A shell has no other names; what it cannot name it passes on only if it found it at its start.
        let nameable = self.env.iter().filter(|(name, _)| is_name(name));
        for (name, value) in nameable {
            let value = quoted(value);
            let _ = writeln!(
                before,
                "unset __box_old_{name}; if [ -n \"${{{name}+x}}\" ]; then __box_old_{name}=${name}; fi; export {name}={value}"
            );
            let _ = writeln!(
                after,
                "if [ -n \"${{__box_old_{name}+x}}\" ]; then {name}=$__box_old_{name}; unset __box_old_{name}; else unset {name}; fi"
            );
        }
        (before, after)
    }
}

fn is_name(name: &str) -> bool {
    !name.starts_with(|first: char| first.is_ascii_digit())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// A word of a shell that is taken as it is.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_cannot_end_its_quotes() {
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }

    #[test]
    fn names_that_a_shell_cannot_write_are_left_out() {
        let mut env = Env::new();
        env.insert("A;reboot", "x").unwrap();
        env.insert("1A", "x").unwrap();
        let settings = Settings { cwd: "", env: &env };
        assert_eq!(settings.told(Language::Sh), (String::new(), String::new()));
    }
}
