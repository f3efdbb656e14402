//! The repository's own commands, called as `cargo xtask <command>`.
//!
//! # Reading order
//! [`checks`] is the list of steps that CI runs, [`beside`] those of them that run beside others. [`command`] starts programs, [`counts`] reads what the test runners say,
//! [`manifest`] asks cargo about the workspace, [`tools`] installs what is missing, and [`hygiene`], [`unused`],
//! [`guest`], [`langbot`] and [`fuzz`] are single steps. [`schema`] writes the committed schema of the contract.

mod beside;
mod checks;
mod command;
mod counts;
mod fuzz;
mod guest;
mod hygiene;
mod langbot;
mod manifest;
mod picture;
mod release;
mod schema;
mod tools;
mod unused;

use std::{env, path::Path, process::ExitCode};

use command::Workspace;

/// Any failure, already worded for the person who reads it.
type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const HELP: &str = "\
cargo xtask <command>

  test            everything CI checks, in order; the last line is `N passed, N failed`
  bench [args]    the benchmark, side by side with peers; arguments go to the benchmark
  dependencies    licences, sources and version requirements of what we depend on
  guest           tests of limits and networks, on a kernel of another kind
  langbot         LangBot's own packages against this program
  release         the static program, its size, and the README's commands run with it
  fuzz [runs]     the decoder's fuzzer, for that many inputs (ten million unless said)
  readme          the README's commands run, and its picture compared
  picture         writes docs/terminal.svg, the README's picture, from what boxd prints
  schema          writes docs/schema/contract.json and the list of actions in docs/wire.md
  help            this text";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<ExitCode> {
    let (name, rest) = match arguments.split_first() {
        Some((name, rest)) => (name.as_str(), rest),
        None => ("help", arguments),
    };
    match (name, rest) {
        ("test", []) => Ok(checks::run(&Workspace::find()?)),
        ("test", _) => Err(format!("`test` takes no arguments\n\n{HELP}").into()),
        ("bench", rest) => bench(&Workspace::find()?, rest),
        ("fuzz", rest) => {
            let runs = rest.first().map_or("10000000", String::as_str);
            with_target(|workspace, target| fuzz::run(workspace, target, runs))
        }
        ("fuzz-ci", []) => {
            with_target(|workspace, target| fuzz::run(workspace, target, fuzz::CI_RUNS))
        }
        ("dependencies", []) => with_target(tools::check_dependencies),
        ("guest", []) => with_target(|workspace, target| {
            guest::check(workspace, target, &mut counts::Counts::default())
        }),
        ("langbot", []) => with_target(|workspace, target| {
            langbot::check(workspace, target, &mut counts::Counts::default())
        }),
        ("release", []) => with_target(release::check),
        ("readme", []) => with_target(release::readme_only),
        ("picture", []) => with_target(picture::write),
        ("schema", []) => schema::write(&Workspace::find()?).map(|()| ExitCode::SUCCESS),
        ("help" | "--help" | "-h", _) => {
            println!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        (unknown, _) => Err(format!("unknown command `{unknown}`\n\n{HELP}").into()),
    }
}

/// Does something that needs to know where programs are built.
fn with_target(run: impl FnOnce(&Workspace, &Path) -> Result) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    let target = manifest::Manifest::read(&workspace)?.target;
    run(&workspace, &target).map(|()| ExitCode::SUCCESS)
}

fn bench(workspace: &Workspace, arguments: &[String]) -> Result<ExitCode> {
    let mut cargo = workspace.cargo("run --release --package box-bench --");
    if arguments.is_empty() {
        cargo.arg("rpc");
    }
    match arguments.first().map(String::as_str) {
        Some("stalled") => command::status(&mut workspace.cargo("build --release --package boxd"))?,
        Some("langbot") => {
            let target = manifest::Manifest::read(workspace)?.target;
            cargo.env("BOXD", release::build(workspace, &target)?);
        }
        _ => {}
    }
    command::status(cargo.args(arguments))?;
    Ok(ExitCode::SUCCESS)
}
