//! The tools that the checks need, installed when they are missing.

use std::path::{Path, PathBuf};

use crate::{
    Result,
    command::{self, Workspace},
};

/// Pinned, so that a check means the same on every machine.
const DENY_VERSION: &str = "0.20.2";

/// The dependency checker, once it is there.
#[derive(Debug)]
pub(crate) struct Deny {
    program: PathBuf,
}

impl Deny {
    /// Everything but `advisories`: their database is cloned from elsewhere on each run, and a check must not depend on that.
    pub(crate) fn check(&self, workspace: &Workspace) -> Result {
        let mut deny = workspace.program(&self.program, "--workspace check bans licenses sources");
        command::status(&mut deny)
    }
}

/// Makes sure that rustfmt, clippy and cargo-deny are there.
pub(crate) fn install(workspace: &Workspace, target: &Path) -> Result<Deny> {
    for (command, install) in [
        ("fmt --version", "component add rustfmt"),
        ("clippy --version", "component add clippy"),
    ] {
        if !command::succeeds(&mut workspace.cargo(command)) {
            command::status(&mut workspace.program("rustup", install))?;
        }
    }
    deny(workspace, target)
}

/// A test runner that isolates each test in a process; cargo's own serves where it is missing.
pub(crate) fn has_nextest(workspace: &Workspace) -> bool {
    command::succeeds(&mut workspace.cargo("nextest --version"))
}

fn deny(workspace: &Workspace, target: &Path) -> Result<Deny> {
    let tools = target.join("tools");
    let installed = tools.join("bin").join("cargo-deny");
    for program in [installed.clone(), PathBuf::from("cargo-deny")] {
        let version = command::output(&mut workspace.program(&program, "--version"));
        if version.is_ok_and(|version| version.trim().ends_with(DENY_VERSION)) {
            return Ok(Deny { program });
        }
    }
    let mut cargo = workspace.cargo("install --locked cargo-deny --version");
    cargo.arg(DENY_VERSION);
    // A private target folder, removed afterwards: nothing of it is shared with our own build.
    let build = tools.join("build");
    cargo
        .arg("--root")
        .arg(&tools)
        .arg("--target-dir")
        .arg(&build);
    command::status(&mut cargo)?;
    std::fs::remove_dir_all(&build)?;
    Ok(Deny { program: installed })
}
