//! Escapes, through the runtime: what a guest tries in root's boxes and in an ordinary user's, and
//! how the kernel answers.
//!
//! Every probe also runs where its answer must differ, mostly on the host itself. A probe that
//! cannot fail shows nothing.
//!
//! The probes are Python programs in `probes/`. `docs/security.md` lists the promise of each test.

mod calls;
mod endings;
mod host_process;
mod kernel;
mod neighbours;
mod privileges;
mod promises;
mod resources;
mod secrets;
mod setup;
mod shared;
mod views;

use std::collections::BTreeMap;
use std::process::Command;

use box_tests::machine::{Machine, printed, spec};
use serde_json::{Value, json};

/// The output of a probe: an answer for each question.
type Answers = BTreeMap<String, String>;

const PRELUDE: &str = include_str!("probes/prelude.py");

/// A shell command that runs a probe with these arguments.
fn command(probe: &str, args: &[&str]) -> String {
    let args = args.join(" ");
    format!("python3 -I - {args} <<'END-OF-PROBE'\n{PRELUDE}{probe}\nEND-OF-PROBE\n")
}

fn answers(said: &str) -> Answers {
    let pair = |line: &str| {
        let (name, answer) = line.split_once('=').unwrap();
        (name.to_owned(), answer.to_owned())
    };
    let answers: Answers = said.lines().map(pair).collect();
    assert!(!answers.is_empty(), "the probe printed nothing");
    answers
}

/// Runs a probe in the box of this session.
async fn inside(machine: &Machine, session: &str, probe: &str, args: &[&str]) -> Answers {
    inside_with(machine, session, probe, args, json!({})).await
}

/// As [`inside`], in a box with more settings.
async fn inside_with(
    machine: &Machine,
    session: &str,
    probe: &str,
    args: &[&str],
    more: Value,
) -> Answers {
    let mut asked = json!({"box_id": session, "cmd": command(probe, args), "timeout_sec": 60});
    for (name, value) in more.as_object().unwrap() {
        asked[name] = value.clone();
    }
    let result = machine.exec_spec(spec(asked)).await;
    let result = result.unwrap_or_else(|error| panic!("{}: {error:?}", machine.name));
    answers(printed(&result))
}

/// Runs a probe on the host as the current user.
fn outside(probe: &str, args: &[&str]) -> Answers {
    let ran = Command::new("sh")
        .args(["-c", &command(probe, args)])
        .output()
        .unwrap();
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
    answers(&String::from_utf8(ran.stdout).unwrap())
}

/// Whether the tests run as root. Most controls need it, because the host refuses an ordinary user
/// a lot as well.
fn as_root() -> bool {
    rustix::process::geteuid().is_root()
}
