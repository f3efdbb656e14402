//! The picture of the README: commands and their output as an image of a terminal.
//!
//! `cargo xtask picture` writes it. The tests run the commands again and fail if the output has changed.

use std::{
    fmt::Write as _,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{
    Result,
    command::{self, Workspace},
    tools,
};

const FILE: &str = "docs/terminal.svg";

/// The commands in the picture.
const TYPED: [&str; 7] = [
    "boxd run 'echo hello from a box; id -un; ls /home; cat /etc/shadow'",
    r#"boxd run --timeout 1 'while :; do :; done'; echo "exit code $?""#,
    "boxd run --name work 'echo kept > /tmp/note'",
    "boxd run --name work 'cat /tmp/note'",
    "boxd exec --detach --id web work 'python3 -m http.server -d /tmp 8000'",
    "boxd ps",
    r#"curl -fs "$(boxd port work 8000)note""#,
];

/// An additional program that the commands need.
const CURL: tools::Needed = ("curl", "--version", "curl");

/// How long a command without output is retried; a server may not listen yet.
const PATIENCE: Duration = Duration::from_secs(10);

/// The commands that print nothing.
const SILENT: [&str; 1] = [TYPED[2]];

/// Sizes in pixels: the width of a letter, the height of a line, the margin.
const LETTER: usize = 8;
const LINE: usize = 19;
const MARGIN: usize = 18;
const TOP: usize = 56;

/// Writes the picture.
pub(crate) fn write(workspace: &Workspace, target: &Path) -> Result {
    command::status(&mut workspace.cargo("build --package boxd"))?;
    let picture = draw(&play(workspace, target, &target.join("debug/boxd"))?);
    fs::write(workspace.root().join(FILE), picture)?;
    println!("wrote {FILE}");
    Ok(())
}

/// Fails unless the picture shows the program's output; ages are not compared.
pub(crate) fn check(workspace: &Workspace, target: &Path, program: &Path) -> Result {
    let shown = fs::read_to_string(workspace.root().join(FILE))?;
    let now = draw(&play(workspace, target, program)?);
    if timeless(&shown) == timeless(&now) {
        return Ok(());
    }
    Err(format!(
        "{FILE} is not what boxd prints; `cargo xtask picture` writes it anew. It would be:\n{now}"
    )
    .into())
}

/// A server that ends when it is dropped.
struct Server {
    child: Child,
    state: PathBuf,
}

impl Server {
    fn start(target: &Path, program: &Path) -> Result<Self> {
        let state = target.join("picture");
        let _ = fs::remove_dir_all(&state);
        let mut serve = Command::new(program);
        serve.args(["serve", "--http", "127.0.0.1:0", "--state-dir"]);
        let piped = serve
            .arg(&state)
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut server = Self {
            child: piped.spawn()?,
            state,
        };
        let mut line = String::new();
        if let Some(stdout) = server.child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line.starts_with("boxd ready") {
            Ok(server)
        } else {
            Err("boxd serve is not ready".into())
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = self.child.id().to_string();
        let _ = Command::new("kill").arg(pid).status();
        let _ = self.child.wait();
    }
}

/// Runs every command, and returns the commands with their output.
fn play(
    workspace: &Workspace,
    target: &Path,
    program: &Path,
) -> Result<Vec<(&'static str, String)>> {
    tools::programs(workspace, &[CURL])?;
    let server = Server::start(target, program)?;
    let folder = program.parent().ok_or("a program without a folder")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", folder.display());
    let type_in = |typed: &str| -> Result<String> {
        let mut shell = Command::new("bash");
        shell.args(["-c", &format!("exec 2>&1; {typed}")]);
        shell
            .env("PATH", &path)
            .env("BOXD_SERVER_STATE_DIR", &server.state);
        let output = shell.stdin(Stdio::null()).output()?;
        Ok(String::from_utf8(output.stdout)?)
    };
    let mut seen = Vec::new();
    for typed in TYPED {
        let since = Instant::now();
        let mut printed = type_in(typed)?;
        while printed.is_empty() && !SILENT.contains(&typed) {
            if since.elapsed() > PATIENCE {
                return Err(format!("`{typed}` prints nothing").into());
            }
            thread::sleep(Duration::from_millis(100));
            printed = type_in(typed)?;
        }
        seen.push((typed, printed));
    }
    Ok(seen)
}

fn draw(seen: &[(&str, String)]) -> String {
    let mut text = String::new();
    let (mut lines, mut longest) = (0, 0);
    let mut add = |content: &str, length: usize, colour: &str| {
        let y = TOP + lines * LINE;
        let _ = writeln!(
            text,
            r#"<text x="{MARGIN}" y="{y}"{colour}>{content}</text>"#
        );
        lines += 1;
        longest = longest.max(length);
    };
    for (typed, printed) in seen {
        let prompt = r##"<tspan fill="#7ee787">$</tspan>"##;
        let words = format!(
            r##"<tspan fill="#ffffff" font-weight="600">{}</tspan>"##,
            escaped(typed)
        );
        add(&format!("{prompt} {words}"), typed.chars().count() + 2, "");
        for line in printed.lines() {
            let complains = line.starts_with("boxd: ") || line.starts_with("cat: ");
            let colour = if complains {
                r##" fill="#ff9f6b""##
            } else {
                ""
            };
            add(&escaped(line), line.chars().count(), colour);
        }
    }
    // A letter is slightly wider than its nominal pixels.
    let width = 2 * MARGIN + longest * LETTER + longest / 2;
    let height = TOP + lines * LINE + 6;
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="boxd in a terminal">
<rect width="{width}" height="{height}" rx="8" fill="#16181d"/>
<circle cx="20" cy="17" r="5.5" fill="#ff5f57"/><circle cx="38" cy="17" r="5.5" fill="#febc2e"/><circle cx="56" cy="17" r="5.5" fill="#28c840"/>
<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14" fill="#d7dae0" xml:space="preserve">
{text}</g></svg>
"##
    )
}

fn escaped(text: &str) -> String {
    let pairs = [
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("\"", "&quot;"),
        ("'", "&#x27;"),
    ];
    pairs
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

/// Returns a picture with all ages replaced by the same text.
fn timeless(picture: &str) -> String {
    let words = picture.split_inclusive([' ', '\n']).map(|word| {
        let number = word.trim_end().strip_suffix('s');
        let is_age = number.is_some_and(|digits| {
            !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
        });
        if is_age { " " } else { word }
    });
    words.filter(|word| *word != " ").collect()
}

#[cfg(test)]
mod tests {
    use super::{draw, timeless};

    #[test]
    fn typed_and_printed_text_is_drawn() {
        let picture = draw(&[("echo '<'", "<\nboxd: no\n".to_owned())]);
        assert!(picture.contains("echo &#x27;&lt;&#x27;"));
        assert!(picture.contains(">&lt;</text>"));
        assert!(picture.contains("fill=\"#ff9f6b\">boxd: no</text>"));
    }

    #[test]
    fn ages_are_not_compared_and_everything_else_is() {
        assert_eq!(
            timeless("work  running  0s   12s  1"),
            timeless("work  running  3s   0s   1")
        );
        assert_ne!(timeless("a 1s b"), timeless("a 1s c"));
        assert_ne!(timeless("exit code 124"), timeless("exit code 0"));
    }
}
