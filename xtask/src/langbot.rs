//! Tests of our program with LangBot's unmodified packages from the registry.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use crate::{
    Result,
    command::{self, Workspace},
    counts::{Counts, Runner},
};

/// The oldest and newest supported `langbot-plugin`, with their applications.
///
/// Each application is installed without its dependencies: the tests need only its service and its connector.
const PACKAGES: [(&str, &str); 2] = [("0.7.16", "langbot==4.11.1"), ("0.7.18", "langbot==4.11.2")];

/// Builds the program and runs the suite.
pub(crate) fn build_and_check(workspace: &Workspace, target: &Path, counts: &mut Counts) -> Result {
    command::status(&mut workspace.cargo("build --package boxd"))?;
    check(workspace, target, counts)
}

/// Runs the suite with each version in parallel, because the tests mostly wait.
///
/// The program is that of the last build. The whole test command has built it with the tests; a
/// build of `boxd` alone enables other features and compiles most crates again.
pub(crate) fn check(workspace: &Workspace, target: &Path, counts: &mut Counts) -> Result {
    let ran = thread::scope(|scope| {
        let runs = PACKAGES.map(|(plugin, langbot)| {
            scope.spawn(move || {
                let ran = suite(workspace, target, plugin, langbot);
                ran.map_err(|error| format!("langbot-plugin {plugin}: {error}"))
            })
        });
        runs.map(|run| {
            let ran = run.join();
            ran.unwrap_or_else(|_| Err("a run was not waited for".to_owned()))
        })
    });
    let mut failed = Vec::new();
    for ran in ran {
        match ran {
            Ok(found) => {
                counts.add(found);
                if found.failed > 0 {
                    failed.push(found.to_string());
                }
            }
            Err(error) => failed.push(error),
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(failed.join("\n").into())
}

/// Runs the suite with one version, prints its output, and returns its counts.
fn suite(workspace: &Workspace, target: &Path, plugin: &str, langbot: &str) -> Result<Counts> {
    let python = install(workspace, target, plugin, langbot)?;
    let mut pytest = workspace.program(python, "-B -m pytest -q tests/langbot");
    let ran = pytest
        .env("BOXD", target.join("debug").join("boxd"))
        .output()?;
    let said = String::from_utf8_lossy(&ran.stdout);
    println!("langbot-plugin {plugin}, {langbot}:\n{}", said.trim_end());
    eprint!("{}", String::from_utf8_lossy(&ran.stderr));
    let mut found = Counts::default();
    said.lines()
        .for_each(|line| found.read(Runner::Pytest, line));
    if !ran.status.success() && found.failed == 0 || found.passed == 0 {
        return Err(format!("the suite ended with {}", ran.status).into());
    }
    Ok(found)
}

/// Returns the Python of an environment with this version, installed if needed.
fn install(workspace: &Workspace, target: &Path, plugin: &str, langbot: &str) -> Result<PathBuf> {
    let folder = target.join("tools").join(format!("langbot-{plugin}"));
    let python = folder.join("bin").join("python");
    let requirements = workspace.root().join("tests/langbot/requirements.txt");
    let wanted = format!("{plugin} {langbot}\n{}", fs::read_to_string(&requirements)?);
    let stamp = folder.join("installed");
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    let mut make = workspace.program("python3", "-m venv --clear");
    command::status(make.arg(&folder))?;
    let pip = |arguments: &str| {
        let arguments = format!("-m pip install --quiet --disable-pip-version-check {arguments}");
        workspace.program(&python, &arguments)
    };
    let mut needed = pip(&format!("langbot-plugin=={plugin}"));
    command::status(needed.arg("--requirement").arg(&requirements))?;
    command::status(&mut pip(&format!("--no-deps {langbot}")))?;
    fs::write(stamp, wanted)?;
    Ok(python)
}
