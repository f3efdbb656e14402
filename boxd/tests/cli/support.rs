//! A server for one test, and the program as its client.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) const BOXD: &str = env!("CARGO_BIN_EXE_boxd");

/// The program, without environment variables that change its behaviour.
pub(crate) fn boxd() -> Command {
    let mut command = Command::new(BOXD);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BOXD_")) {
        command.env_remove(name);
    }
    command
}

/// Runs a command to its end with this standard input.
pub(crate) fn feed(command: &mut Command, input: &[u8]) -> Output {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feeding = std::thread::spawn(move || {
        // A program that does not read everything closes the pipe.
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    feeding.join().unwrap();
    output
}

pub(crate) fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A unique number of seconds for `sleep`, also across checkouts: it marks the processes of one
/// test.
pub(crate) fn mark() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = 86400 + NUMBER.fetch_add(1, Ordering::Relaxed);
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    format!("{number}.{}{now}", std::process::id())
}

/// The number of processes of the machine with this argument.
pub(crate) fn running(mark: &str) -> usize {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let marked = |line: &Vec<u8>| {
        line.split(|byte| *byte == 0)
            .any(|word| word == mark.as_bytes())
    };
    lines.filter(marked).count()
}

/// The users of a test that depends on the user of the server: the current one if `None`.
pub(crate) fn users() -> Vec<Option<u32>> {
    if rustix::process::geteuid().is_root() {
        vec![None, Some(65534)]
    } else {
        vec![None]
    }
}

/// A running `boxd serve`, which ends when this is dropped.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) endpoints: Vec<String>,
    pub(crate) directory: tempfile::TempDir,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(tempfile::tempdir().unwrap(), |_| {})
    }

    /// Starts a server with more arguments or variables, in a directory that a server may have
    /// used.
    pub(crate) fn with(directory: tempfile::TempDir, more: impl FnOnce(&mut Command)) -> Self {
        Self::spawn(boxd(), directory, more)
    }

    /// Starts a server of this user, in a directory that a server of the same user may have used.
    pub(crate) fn of_user(directory: tempfile::TempDir, user: Option<u32>) -> Self {
        Self::of_user_with(directory, user, |_| {})
    }

    /// Starts a server of this user with more arguments.
    pub(crate) fn of_user_with(
        directory: tempfile::TempDir,
        user: Option<u32>,
        more: impl FnOnce(&mut Command),
    ) -> Self {
        let Some(user) = user else {
            return Self::with(directory, more);
        };
        let program = directory.path().join("boxd");
        // Copied by another process, because a child of this one could keep the file open for
        // writing. A build directory may not be readable.
        if !program.exists() {
            let copied = Command::new("cp").arg(BOXD).arg(&program).status();
            assert!(copied.unwrap().success());
        }
        std::os::unix::fs::chown(directory.path(), Some(user), Some(user)).unwrap();
        let mut command = Command::new(&program);
        command.env_clear().env("PATH", "/usr/bin:/bin");
        command.uid(user).gid(user).current_dir("/");
        Self::spawn(command, directory, more)
    }

    /// Kills the server, and returns its directory.
    pub(crate) fn kill(mut self) -> tempfile::TempDir {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::mem::replace(&mut self.directory, tempfile::tempdir().unwrap())
    }

    /// Starts a server by a command that gets its arguments.
    pub(crate) fn spawn(
        mut command: Command,
        directory: tempfile::TempDir,
        more: impl FnOnce(&mut Command),
    ) -> Self {
        command
            .args(["serve", "--state-dir"])
            .arg(directory.path().join("state"));
        more(&mut command);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let addresses = line.trim().strip_prefix("boxd ready ");
        let addresses = addresses.unwrap_or_else(|| panic!("not ready: {line:?}"));
        let endpoints = addresses.split(' ').map(str::to_owned).collect();
        Self {
            child,
            endpoints,
            directory,
        }
    }

    /// The program as a client of this server.
    pub(crate) fn boxd(&self, arguments: &[&str]) -> Command {
        let mut command = boxd();
        command
            .env("BOXD_ENDPOINT", &self.endpoints[0])
            .args(arguments);
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.boxd(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        out(&output)
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let mut all = vec!["--json"];
        all.extend(arguments);
        serde_json::from_str(&self.ok(&all)).unwrap()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(rustix::process::Signal::TERM);
            let _ = self.child.wait();
        }
    }
}
