//! Differences between the interpreters: programs, loops and run settings.

use std::fmt::Write as _;

use box_protocol::Env;
use box_protocol::actions::Language;

/// Settings of one run.
#[derive(Debug)]
pub(super) struct Settings<'a> {
    pub(super) cwd: &'a str,
    /// Whether the interpreter stays in the directory of the run.
    pub(super) cwd_stays: bool,
    pub(super) env: &'a Env,
}

/// The command line of an interpreter in its loop.
///
/// The last argument is its private directory.
pub(super) fn argv(language: Language, dir: &str) -> Vec<String> {
    let shell = include_str!("shell.sh");
    let words: &[&str] = match language {
        Language::Bash => &["bash", "-c", shell, "bash"],
        Language::Sh => &["sh", "-c", shell, "sh"],
        Language::Python => {
            // The loop has its own namespace, because the guest can redefine every name in `__main__`.
            let start = "exec(__import__('sys').argv[1], {})";
            let (driver, notebook) = (include_str!("python.py"), include_str!("notebook.py"));
            let values = include_str!("values.py");
            &["python3", "-c", start, driver, notebook, values]
        }
        Language::JavaScript => &["node", "-e", include_str!("javascript.js"), "--"],
    };
    let words = words.iter().copied().chain([dir]);
    words.map(str::to_owned).collect()
}

/// Maximum size of a text in the line that starts its run.
///
/// A shell reads the line byte by byte, which still costs less than opening a file.
const LINE_BYTES: usize = 128;

/// Whether a text can travel in the line.
pub(super) fn fits_line(language: Language, text: &str) -> bool {
    let ending = match language {
        Language::Bash => '\0',
        Language::Sh => '\n',
        Language::Python | Language::JavaScript => return false,
    };
    // The shell would strip leading and trailing spaces.
    let padded = text.starts_with(' ') || text.ends_with(' ');
    text.len() <= LINE_BYTES && !padded && !text.contains(ending)
}

/// The line that starts a run.
pub(super) fn go_line(
    language: Language,
    run: u64,
    has_settings: bool,
    has_input: bool,
    text: Option<&str>,
) -> String {
    let choose = |is: bool, yes: &'static str, no: &'static str| if is { yes } else { no };
    let (text, is_inline) = (text.unwrap_or_default(), text.is_some());
    match language {
        Language::Bash | Language::Sh => {
            let end = choose(language == Language::Bash, "\0", "\n");
            let mode = choose(has_settings, "s", "p");
            let input = choose(has_input, "o", "c");
            let source = choose(is_inline, "l", "f");
            format!("{run} {mode}{input}{source} {text}{end}")
        }
        Language::Python | Language::JavaScript => {
            let mode = choose(has_settings, "set", "plain");
            let input = choose(has_input, "open", "closed");
            format!("{run} {mode} {input}\n")
        }
    }
}

impl Settings<'_> {
    pub(super) fn is_empty(&self) -> bool {
        self.cwd.is_empty() && self.env.is_empty()
    }

    /// The files that an interpreter reads before and after the run.
    ///
    /// Only a shell reads the second one.
    pub(super) fn files(&self, language: Language) -> (String, String) {
        match language {
            Language::Bash | Language::Sh => self.as_shell_text(),
            Language::Python | Language::JavaScript => {
                let stays = self.cwd_stays;
                let settings =
                    serde_json::json!({"cwd": self.cwd, "stays": stays, "env": self.env});
                (settings.to_string(), String::new())
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
            if !self.cwd_stays {
                let _ = writeln!(after, "command cd -- \"$__box_cwd\"");
            }
        }
        // A shell can only set variables with such names. It passes others on if they were in its environment at its
        // start.
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

/// Quotes a word for a shell.
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
        let settings = Settings {
            cwd: "",
            cwd_stays: false,
            env: &env,
        };
        assert_eq!(settings.files(Language::Sh), (String::new(), String::new()));
    }
}
