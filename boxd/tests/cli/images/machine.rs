//! The program as root and as an ordinary user, each with images of its own.

use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use super::registry::Registry;
use crate::support::{BOXD, out};

/// The id of the ordinary user.
const ORDINARY: u32 = 65534;

/// A user with a state directory.
pub(super) struct Machine {
    pub(super) name: &'static str,
    directory: tempfile::TempDir,
    program: PathBuf,
    drops_root: bool,
}

/// Runs a test as root, if this process is root, and as an ordinary user.
pub(super) fn on_each_machine(test: impl Fn(&Machine)) {
    if rustix::process::geteuid().is_root() {
        test(&Machine::new("root"));
    }
    test(&Machine::new("ordinary user"));
}

impl Machine {
    pub(super) fn new(name: &'static str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let drops_root = name != "root" && rustix::process::geteuid().is_root();
        let mut program = PathBuf::from(BOXD);
        if drops_root {
            // The user may be unable to read the directory of the program.
            program = directory.path().join("boxd");
            let copied = Command::new("cp").arg(BOXD).arg(&program).status();
            assert!(copied.unwrap().success());
            chown(directory.path(), Some(ORDINARY), Some(ORDINARY)).unwrap();
        }
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        Self {
            name,
            directory,
            program,
            drops_root,
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// Makes a registry known.
    pub(super) fn trust(&self, registry: &Registry) {
        fs::copy(registry.authority(), self.path("ca.pem")).unwrap();
        fs::set_permissions(self.path("ca.pem"), Permissions::from_mode(0o644)).unwrap();
    }

    /// The program, without a server.
    pub(super) fn boxd(&self, arguments: &[&str]) -> Command {
        let mut command = if self.drops_root {
            let mut command = Command::new("setpriv");
            let ids = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
            command.args(ids).arg(&self.program);
            command
        } else {
            Command::new(&self.program)
        };
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", self.directory.path())
            .env("BOXD_SERVER_STATE_DIR", self.state())
            .args(arguments);
        let authority = self.path("ca.pem");
        if authority.exists() {
            command.env("BOXD_IMAGES_CA_FILE", authority);
        }
        command
    }

    pub(super) fn run(&self, arguments: &[&str]) -> Output {
        self.boxd(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a command that must succeed, and returns its output.
    pub(super) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let name = self.name;
        assert!(output.status.success(), "{name}: {arguments:?}: {output:?}");
        out(&output)
    }

    pub(super) fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let mut all = vec!["--json"];
        all.extend(arguments);
        serde_json::from_str(&self.ok(&all)).unwrap()
    }

    pub(super) fn login(&self, registry: &str, password: &str) -> Output {
        let arguments = ["image", "login", registry, "-u", "box", "--password-stdin"];
        crate::support::feed(&mut self.boxd(&arguments), password.as_bytes())
    }

    /// Starts a server on the default socket, which every command then uses.
    pub(super) fn serve(&self) -> Running {
        Self::start(&mut self.boxd(&["serve"]))
    }

    /// Starts a prepared server.
    pub(super) fn start(serve: &mut Command) -> Running {
        let mut child = serve.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut ready = BufReader::new(child.stdout.take().unwrap());
        ready.read_line(&mut line).unwrap();
        assert!(line.starts_with("boxd ready "), "{line:?}");
        Running { child }
    }

    /// The names in a folder of the store.
    pub(super) fn stored(&self, folder: &str) -> Vec<String> {
        names(&self.state().join("images").join(folder))
    }

    /// Asserts that the store has only complete images.
    pub(super) fn assert_clean(&self) {
        for folder in ["work", "partial", "pulls", "leases"] {
            assert_eq!(self.stored(folder), [""; 0], "{}: {folder}", self.name);
        }
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.collect()
}

/// A server that ends with the test, and its boxes with it.
pub(super) struct Running {
    child: Child,
}

impl Running {
    /// Kills the server without a chance to clean up.
    pub(super) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let pid = rustix::process::Pid::from_child(&self.child);
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            let _ = self.child.wait();
        }
    }
}
