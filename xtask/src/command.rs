//! Starting programs from the root of the workspace.

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

/// Where the repository is, and how its cargo is called.
#[derive(Debug)]
pub(crate) struct Workspace {
    root: PathBuf,
}

impl Workspace {
    /// Cargo says where this package lives, whatever folder the command was typed in.
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

    /// The cargo that runs us, with these words as its arguments.
    pub(crate) fn cargo(&self, arguments: &str) -> Command {
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        self.program(cargo, arguments)
    }

    /// Any program, started at the root.
    pub(crate) fn program(&self, program: impl AsRef<OsStr>, arguments: &str) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments.split_whitespace())
            .current_dir(&self.root);
        // `cargo run` describes xtask in these; some build scripts watch them and would rebuild for nothing.
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

/// Runs to the end with our own output; a failure names the command.
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

/// True when the program starts and succeeds; its output is dropped.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Standard output of a program that must succeed.
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

/// Runs a test runner, passes its output through, and adds what it reports to `counts`.
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
