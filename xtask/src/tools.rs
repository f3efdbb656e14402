//! The tools that the checks need, installed when they are missing.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::{
    Result,
    command::{self, Workspace},
};

/// A program that cargo installs, pinned so that all machines run the same.
struct Pinned {
    name: &'static str,
    version: &'static str,
    /// More arguments of `cargo install`.
    options: &'static str,
}

const DENY: Pinned = Pinned {
    name: "cargo-deny",
    version: "0.20.2",
    options: "",
};

const NEXTEST: Pinned = Pinned {
    name: "cargo-nextest",
    version: "0.9.151",
    options: "--no-default-features",
};

/// Checks the dependencies, except for advisories.
///
/// Advisories need a database from the network on each run, and this check must not depend on it.
pub(crate) fn check_dependencies(workspace: &Workspace, target: &Path) -> Result {
    let deny = DENY.install(workspace, target)?;
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

/// Returns the test runner, which runs each test in a process, and installs it if it is missing.
pub(crate) fn nextest(workspace: &Workspace, target: &Path) -> Result<PathBuf> {
    NEXTEST.install(workspace, target)
}

impl Pinned {
    /// Returns the path of the program, and installs it if it is missing.
    fn install(&self, workspace: &Workspace, target: &Path) -> Result<PathBuf> {
        let tools = target.join("tools");
        let installed = tools.join("bin").join(self.name);
        for program in [installed.clone(), PathBuf::from(self.name)] {
            let version = command::output(&mut workspace.program(&program, "--version"));
            let is_it = |line: &str| line.split_whitespace().nth(1) == Some(self.version);
            if version.is_ok_and(|version| version.lines().next().is_some_and(is_it)) {
                return Ok(program);
            }
        }
        // Unoptimised, because an optimised build takes minutes and saves seconds.
        let Self {
            name,
            version,
            options,
        } = self;
        let mut cargo = workspace.cargo("install --debug --locked");
        cargo
            .args([name, "--version", version])
            .args(options.split_whitespace())
            .env("CARGO_PROFILE_DEV_DEBUG", "0");
        // A private target folder, because it shares no artefacts with our own build.
        let build = tools.join(format!("build-{name}"));
        cargo
            .arg("--root")
            .arg(&tools)
            .arg("--target-dir")
            .arg(&build);
        command::status(&mut cargo)?;
        std::fs::remove_dir_all(&build)?;
        Ok(installed)
    }
}

/// A program, an argument that makes it do nothing, and its Debian package.
pub(crate) type Needed = (&'static str, &'static str, &'static str);

/// Programs that tests run inside a box, and programs that make and serve images.
pub(crate) const PROGRAMS: [Needed; 8] = [
    ("/usr/bin/pip3", "--version", "python3-pip"),
    ("/usr/bin/ipython3", "--version", "ipython3"),
    ("npm", "--version", "npm"),
    ("docker-registry", "--version", "docker-registry"),
    ("skopeo", "--version", "skopeo"),
    ("umoci", "--version", "umoci"),
    ("mmdebstrap", "--version", "mmdebstrap"),
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
    if lacking().is_empty() {
        return Ok(());
    }
    // Steps run in parallel, and apt-get fails while another one runs.
    let turn = File::open(workspace.root())?;
    turn.lock()?;
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
