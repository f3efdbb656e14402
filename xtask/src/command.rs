//! Programs that are started at the root of the workspace.

use std::{
    env,
    ffi::OsStr,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use crate::{
    Result,
    counts::{Counts, Runner},
};

/// The root of the repository, and its cargo.
#[derive(Debug)]
pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// Finds the workspace by the path of this package, which cargo provides.
    pub(crate) fn find() -> Result<Self> {
        let package = env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = package
            .parent()
            .filter(|root| root.join("Cargo.toml").is_file())
            .ok_or("the workspace's Cargo.toml was not found beside xtask/")?;
        Ok(Self {
            root: root.to_owned(),
        })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the current cargo with these arguments, separated by spaces.
    pub(crate) fn cargo(&self, arguments: &str) -> Command {
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        self.program(cargo, arguments)
    }

    /// Returns a command for any program, started at the root.
    pub(crate) fn program(&self, program: impl AsRef<OsStr>, arguments: &str) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments.split_whitespace())
            .current_dir(&self.root);
        // `cargo run` sets these for xtask; some build scripts watch them and would rebuild needlessly.
        for (name, _) in env::vars_os() {
            if name.to_str().is_some_and(describes_package) {
                command.env_remove(name);
            }
        }
        command
    }
}

fn describes_package(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_"]
        .iter()
        .any(|prefix| variable.starts_with(prefix))
}

/// Runs a command with inherited output; an error names the command.
pub(crate) fn status(command: &mut Command) -> Result {
    let status = command
        .status()
        .map_err(|error| format!("could not start {}: {error}", words(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} ended with {status}", words(command)).into())
    }
}

/// Returns whether the program starts and succeeds; discards its output.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Returns the standard output of a program that must succeed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("could not start {}: {error}", words(command)))?;
    if !output.status.success() {
        return Err(format!("{} ended with {}", words(command), output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Runs a test runner, forwards its output, and adds its report to `counts`.
pub(crate) fn counted(command: &mut Command, runner: Runner, counts: &mut Counts) -> Result {
    let mut child = command
        .env("CARGO_TERM_COLOR", "never")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("could not start {}: {error}", words(command)))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let found = thread::scope(|scope| {
        let errors = scope.spawn(|| pass_through(stderr, runner, |line| eprintln!("{line}")));
        let mut found = pass_through(stdout, runner, |line| println!("{line}"));
        found.add(errors.join().unwrap_or_default());
        found
    });
    let status = child.wait()?;
    counts.add(found);
    if !status.success() {
        return Err(format!("{} ended with {status}", words(command)).into());
    }
    if found.reports == 0 {
        return Err(format!("{} reported no test counts", words(command)).into());
    }
    Ok(())
}

fn pass_through(stream: Option<impl Read>, runner: Runner, print: impl Fn(&str)) -> Counts {
    let mut counts = Counts::default();
    let Some(stream) = stream else {
        return counts;
    };
    for line in BufReader::new(stream)
        .split(b'\n')
        .map_while(std::result::Result::ok)
    {
        let line = String::from_utf8_lossy(&line);
        print(&line);
        counts.read(runner, &line);
    }
    counts
}

fn words(command: &Command) -> String {
    let program = Path::new(command.get_program())
        .file_name()
        .unwrap_or(command.get_program());
    let words: Vec<_> = std::iter::once(program)
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    format!("`{}`", words.join(" "))
}
