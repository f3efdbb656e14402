//! The tools that the checks need, installed when they are missing.

use std::path::{Path, PathBuf};

use crate::{
    Result,
    command::{self, Workspace},
};

/// The version of cargo-deny, pinned so that all machines check the same.
const DENY_VERSION: &str = "0.20.2";

/// Checks the dependencies, except for advisories.
///
/// Advisories need a database from the network on each run, and this check must not depend on it.
pub(crate) fn check_dependencies(workspace: &Workspace, target: &Path) -> Result {
    let deny = deny(workspace, target)?;
    command::status(&mut workspace.program(deny, "--workspace check bans licenses sources"))
}

/// Installs rustfmt and clippy if they are missing.
pub(crate) fn components(workspace: &Workspace) -> Result {
    for (command, install) in [
        ("fmt --version", "component add rustfmt"),
        ("clippy --version", "component add clippy"),
    ] {
        if !command::succeeds(&mut workspace.cargo(command)) {
            command::status(&mut workspace.program("rustup", install))?;
        }
    }
    Ok(())
}

/// Returns whether nextest is installed, which runs each test in a process.
///
/// Without it, xtask runs `cargo test`.
pub(crate) fn has_nextest(workspace: &Workspace) -> bool {
    command::succeeds(&mut workspace.cargo("nextest --version"))
}

/// Returns the path of cargo-deny, and installs it if it is missing.
fn deny(workspace: &Workspace, target: &Path) -> Result<PathBuf> {
    let tools = target.join("tools");
    let installed = tools.join("bin").join("cargo-deny");
    for program in [installed.clone(), PathBuf::from("cargo-deny")] {
        let version = command::output(&mut workspace.program(&program, "--version"));
        if version.is_ok_and(|version| version.trim().ends_with(DENY_VERSION)) {
            return Ok(program);
        }
    }
    // Unoptimised, because it runs for a second and an optimised build takes minutes.
    let mut cargo = workspace.cargo("install --debug --locked cargo-deny --version");
    cargo.arg(DENY_VERSION).env("CARGO_PROFILE_DEV_DEBUG", "0");
    // A private target folder, because it shares no artefacts with our own build.
    let build = tools.join("build");
    cargo
        .arg("--root")
        .arg(&tools)
        .arg("--target-dir")
        .arg(&build);
    command::status(&mut cargo)?;
    std::fs::remove_dir_all(&build)?;
    Ok(installed)
}

/// A program, an argument that makes it do nothing, and its Debian package.
pub(crate) type Needed = (&'static str, &'static str, &'static str);

/// A registry, makers of images and the smallest image, for the tests of images.
pub(crate) const IMAGES: [Needed; 4] = [
    ("docker-registry", "--version", "docker-registry"),
    ("skopeo", "--version", "skopeo"),
    ("umoci", "--version", "umoci"),
    ("busybox", "true", "busybox-static"),
];

/// Installs missing programs, if this user is root on Debian.
pub(crate) fn programs(workspace: &Workspace, needed: &[Needed]) -> Result {
    let lacking = || {
        let there = |program: &str, argument: &str| {
            command::succeeds(&mut workspace.program(program, argument))
        };
        let lacking = needed
            .iter()
            .filter(|(program, argument, _)| !there(program, argument));
        lacking.map(|(_, _, package)| *package).collect::<Vec<_>>()
    };
    let packages = lacking();
    if packages.is_empty() {
        return Ok(());
    }
    let root = command::output(&mut workspace.program("id", "-u"))?.trim() == "0";
    if root {
        // Outdated package lists name versions that the mirror no longer has.
        for arguments in ["update -q", "install -qy --no-install-recommends"] {
            let mut apt = workspace.program("apt-get", arguments);
            if arguments.starts_with("install") {
                apt.args(&packages);
            }
            command::status(apt.env("DEBIAN_FRONTEND", "noninteractive"))?;
        }
    }
    match lacking().as_slice() {
        [] => Ok(()),
        packages => Err(format!("missing packages: {}", packages.join(", ")).into()),
    }
}
