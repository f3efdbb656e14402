//! The repository's own commands, called as `cargo xtask <command>`.
//!
//! # Reading order
//! [`checks`] lists the steps that CI runs, [`areas`] the parts that a developer runs alone, and [`background`] runs a step
//! in parallel. [`command`] starts programs, [`counts`] reads the reports of test runners, [`manifest`] asks cargo
//! about the workspace, and [`tools`] installs missing tools. [`hygiene`], [`unused`], [`builds`], [`guest`],
//! [`sdk`] (with its [`suites`] and the [`python`] of each) and [`fuzz`] are single steps. [`schema`] writes the committed
//! schema of the contract.

mod areas;
mod background;
mod builds;
mod checks;
mod command;
mod counts;
mod fuzz;
mod guest;
mod hygiene;
mod manifest;
mod picture;
mod python;
mod release;
mod schema;
mod sdk;
mod suites;
mod tools;
mod unused;

use std::{env, path::Path, process::ExitCode};

use command::Workspace;

/// The result of a step; its error is a message for the developer.
type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const HELP: &str = "\
cargo xtask <command>

  check           format, lints and quick tests: what to run before each commit
  test            everything CI checks, in order; the last line is `N passed, N failed`
  test AREA [S]   tests of one area, of names with S; `test help` lists the areas
  bench [args]    benchmark beside peers; arguments go to the benchmark
  fuzz [runs]     fuzz the readers of untrusted input with that many inputs (default: ten million)
  release         build the static program, check its size, run the README with it
  readme          run the README's commands and compare its picture
  picture         write docs/terminal.svg, the README's picture, from boxd's output
  schema          write docs/schema/contract.json and the action list in docs/wire.md
  help            print this text";

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
        ("check", []) => Ok(checks::quick(&Workspace::find()?)),
        ("test", []) => Ok(checks::run(&Workspace::find()?)),
        ("test", [area, filter @ ..]) => {
            with_target(|workspace, target| areas::run(workspace, target, area, filter))
        }
        ("bench", rest) => bench(&Workspace::find()?, rest),
        ("fuzz", rest) => {
            let runs = rest.first().map_or("10000000", String::as_str);
            let runs = runs
                .parse()
                .map_err(|_| format!("runs: `{runs}` is not a number"))?;
            with_target(|workspace, target| fuzz::run(workspace, target, runs))
        }
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

/// Runs a step that needs the target folder.
fn with_target(run: impl FnOnce(&Workspace, &Path) -> Result) -> Result<ExitCode> {
    let workspace = Workspace::find()?;
    let target = manifest::Manifest::read(&workspace)?.target;
    run(&workspace, &target).map(|()| ExitCode::SUCCESS)
}

fn bench(workspace: &Workspace, arguments: &[String]) -> Result<ExitCode> {
    let mut cargo = workspace.cargo("run --profile measured --package box-bench --");
    if arguments.is_empty() {
        cargo.arg("rpc");
    }
    match arguments.first().map(String::as_str) {
        Some("stalled" | "sdk") => {
            command::status(&mut workspace.cargo("build --profile measured --package boxd"))?;
        }
        Some("langbot") => {
            let target = manifest::Manifest::read(workspace)?.target;
            cargo.env("BOXD", release::build(workspace, &target)?);
        }
        _ => {}
    }
    command::status(cargo.args(arguments))?;
    Ok(ExitCode::SUCCESS)
}
