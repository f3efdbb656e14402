//! The real program, built beside this one.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::process::Process;

/// The maximum number of boxes of a server.
const MAX_BOXES: &str = "1000";

/// Returns the path of `boxd`.
///
/// `BOXD` names it, as `cargo xtask bench langbot` does with the release binary. Otherwise it is the binary that was
/// built with the profile of this one.
pub(crate) fn program() -> Result<PathBuf> {
    let program = match std::env::var_os("BOXD") {
        Some(program) => PathBuf::from(program),
        None => std::env::current_exe()?.with_file_name("boxd"),
    };
    ensure!(
        program.is_file(),
        "boxd is not built: cargo build --profile measured --package boxd"
    );
    Ok(program)
}

/// `boxd serve` with an HTTP port and a TCP listener, without tokens. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Boxd {
    child: Child,
    /// The address of the HTTP port: host and port.
    pub(crate) http: String,
    /// The address of the RPC listener: host and port.
    pub(crate) tcp: String,
    _state: tempfile::TempDir,
}

impl Boxd {
    pub(crate) fn start() -> Result<Self> {
        let state = tempfile::tempdir()?;
        let mut command = Command::new(program()?);
        command.args([
            "serve",
            "--http",
            "127.0.0.1:0",
            "--listen",
            "tcp://127.0.0.1:0",
            "--state-dir",
        ]);
        command
            .arg(state.path())
            .env("BOXD_RUNTIME_MAX_BOXES", MAX_BOXES)
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn()?;
        let mut line = String::new();
        let stdout = child.stdout.take().context("no output")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let address = |scheme| {
            let found = line
                .split_whitespace()
                .find_map(|word| word.strip_prefix(scheme));
            found.map(str::to_owned).context("the server is not ready")
        };
        let (http, tcp) = (address("http://")?, address("tcp://")?);
        Ok(Self {
            child,
            http,
            tcp,
            _state: state,
        })
    }

    pub(crate) fn process(&self) -> Process {
        Process::with_pid(self.child.id())
    }
}

impl Drop for Boxd {
    fn drop(&mut self) {
        // In order, because boxes survive a killed server.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}
