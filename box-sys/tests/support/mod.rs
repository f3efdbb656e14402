//! Real boxes for tests: as root and as an ordinary user where the tests run as root, else as whoever runs them.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

pub(crate) mod census;

use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use box_sys::{
    ForkServer, Mount, Sandbox, SandboxPlan, ServerConfig, Source, receive, send, socket_pair,
};
use serde_json::{Value, json};

pub(crate) const SERVER: &str = env!("CARGO_BIN_EXE_box-sys-run");
pub(crate) const PROBE: &str = env!("CARGO_BIN_EXE_box-sys-probe");
/// How long a test waits for what must come to be: on a machine that is busy with other things, too.
pub(crate) const LONG: Duration = Duration::from_mins(2);
/// The ordinary user of tests that run as root.
pub(crate) const NOBODY: u32 = 65534;

/// A fork server, and as whom it runs.
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    pub(crate) server: ForkServer,
    /// Programs for boxes, readable by its user.
    programs: PathBuf,
}

impl Machine {
    pub(crate) fn has(&self, name: &str) -> bool {
        !self
            .server
            .primitives()
            .missing()
            .iter()
            .any(|missing| missing == name)
    }

    pub(crate) fn privileged(&self) -> bool {
        self.server.primitives().privileged
    }

    pub(crate) fn uid(&self) -> u32 {
        if self.name == "ordinary" && rustix::process::geteuid().is_root() {
            NOBODY
        } else {
            rustix::process::geteuid().as_raw()
        }
    }

    pub(crate) fn boxed(&self, plan: &SandboxPlan) -> TestBox<'_> {
        TestBox::new(self, plan)
    }

    /// The plan of most tests: defaults, with the probe program in it.
    pub(crate) fn plan(&self) -> SandboxPlan {
        let probe = Mount {
            source: Source::Path(self.programs.clone()),
            target: "/probe".into(),
            writable: false,
        };
        SandboxPlan {
            mounts: vec![probe],
            ..SandboxPlan::default()
        }
    }

    /// A directory of this machine's user.
    pub(crate) fn directory(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(dir.path(), Some(self.uid()), Some(self.uid())).unwrap();
        dir
    }
}

/// A fork server of this user's that is set up in some other way.
pub(crate) fn machine_with(config: &ServerConfig) -> Machine {
    let server = ForkServer::start(&PROGRAMS.join("server"), config).unwrap();
    Machine {
        name: "another",
        server,
        programs: PROGRAMS.clone(),
    }
}

pub(crate) static MACHINES: LazyLock<Vec<Machine>> = LazyLock::new(|| {
    let programs = PROGRAMS.clone();
    let config = ServerConfig::default();
    let server = ForkServer::start(&programs.join("server"), &config).unwrap();
    let name = if server.primitives().privileged {
        "root"
    } else {
        "ordinary"
    };
    let mut machines = vec![Machine {
        name,
        server,
        programs: programs.clone(),
    }];
    if rustix::process::geteuid().is_root() {
        let server =
            ForkServer::start_command(as_nobody(&programs.join("server")), &config).unwrap();
        machines.push(Machine {
            name: "ordinary",
            server,
            programs,
        });
    }
    machines
});

/// A directory with the programs that an ordinary user can reach, which a build directory may not be. Always the same one for a
/// build directory, so that no run leaves another behind and no other checkout's run puts its own there; replaced by renaming,
/// because other test programs may be running them.
///
/// One made by root is used where it is named: an ordinary user may not even read the build directory.
pub(crate) static PROGRAMS: LazyLock<PathBuf> = LazyLock::new(|| {
    use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
    use std::os::unix::fs::PermissionsExt;
    if let Some(dir) = std::env::var_os("BOX_SYS_TEST_PROGRAMS") {
        return dir.into();
    }
    let checkout = BuildHasherDefault::<DefaultHasher>::default().hash_one(SERVER);
    let user = rustix::process::geteuid().as_raw();
    let dir = std::env::temp_dir().join(format!("box-sys-tests-{user}-{checkout:x}"));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (from, name) in [(PROBE, "probe"), (SERVER, "server")] {
        let fresh = dir.join(format!("{name}-{}", std::process::id()));
        // By another process: a child that some thread here has just forked would keep the file open for writing until its own
        // exec, and nobody could run it meanwhile.
        let copied = Command::new("cp").arg(from).arg(&fresh).status();
        assert!(copied.unwrap().success());
        std::fs::rename(fresh, dir.join(name)).unwrap();
    }
    dir.canonicalize().unwrap()
});

/// A command that runs a program as an ordinary user.
pub(crate) fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    let id = NOBODY.to_string();
    command
        .args(["--reuid", &id, "--regid", &id, "--clear-groups"])
        .arg(program);
    command
}

/// Starts a server with a configuration.
pub(crate) type Start = Box<dyn Fn(&ServerConfig) -> ForkServer + Sync>;

/// The same as whom there are [`MACHINES`], each to be started anew.
pub(crate) fn servers() -> Vec<(&'static str, Start)> {
    let root = rustix::process::geteuid().is_root();
    let own = |config: &ServerConfig| ForkServer::start(Path::new(SERVER), config).unwrap();
    let mut all: Vec<(_, Start)> = vec![(if root { "root" } else { "ordinary" }, Box::new(own))];
    if root {
        let server = PROGRAMS.join("server");
        let other = move |config: &ServerConfig| {
            ForkServer::start_command(as_nobody(&server), config).unwrap()
        };
        all.push(("ordinary", Box::new(other)));
    }
    all
}

/// Set for a test that another one runs in a process of its own, where nothing else makes or ends anything.
pub(crate) const ALONE: &str = "BOX_SYS_TEST_ALONE";

/// Whether this is such a process.
pub(crate) fn alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs an ignored test of this program in a process of its own, with a temporary directory of its own.
pub(crate) fn again_alone(test: &str) {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    // The ordinary user's programs are put there.
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .args(["--test-threads", "1"])
        .env(ALONE, "1")
        .env("TMPDIR", dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Allows this process as many descriptors as it may.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
}

/// How a command in a box ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Output {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A box with someone to speak to.
pub(crate) struct TestBox<'a> {
    pub(crate) sandbox: Option<Sandbox>,
    machine: &'a Machine,
    talk: Talk,
}

/// Init is gone, and the box with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gone;

/// Any error but the one that says this fails the test.
fn gone(error: &std::io::Error) -> Gone {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    assert!(
        matches!(error.kind(), BrokenPipe | ConnectionReset),
        "{error}"
    );
    Gone
}

/// The way to a box's init.
pub(crate) struct Talk {
    control: OwnedFd,
    early: RefCell<Vec<Value>>,
    pub(crate) rlimits: Vec<(u32, u64)>,
}

impl<'a> TestBox<'a> {
    pub(crate) fn new(machine: &'a Machine, plan: &SandboxPlan) -> Self {
        let (control, far) = socket_pair().unwrap();
        let sandbox = machine
            .server
            .create(plan, &[far.as_fd()], &[])
            .unwrap_or_else(|error| panic!("{}: {error}", machine.name));
        Self {
            sandbox: Some(sandbox),
            machine,
            talk: Talk::new(control),
        }
    }

    pub(crate) fn sandbox(&self) -> &Sandbox {
        self.sandbox.as_ref().unwrap()
    }
}

impl std::ops::Deref for TestBox<'_> {
    type Target = Talk;

    fn deref(&self) -> &Talk {
        &self.talk
    }
}

impl std::ops::DerefMut for TestBox<'_> {
    fn deref_mut(&mut self) -> &mut Talk {
        &mut self.talk
    }
}

impl Talk {
    pub(crate) fn new(control: OwnedFd) -> Self {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        // An init that says nothing any more is a failure, not a test without an end.
        set_socket_timeout(&control, Timeout::Recv, Some(LONG)).unwrap();
        Self {
            control,
            early: RefCell::default(),
            rlimits: Vec::new(),
        }
    }

    fn next(&self) -> Result<Value, Gone> {
        let mut buffer = [0; 4096];
        match receive(self.control.as_fd(), &mut buffer) {
            Ok(Some((length, _))) => Ok(serde_json::from_slice(&buffer[..length]).unwrap()),
            Ok(None) => Err(Gone),
            Err(error) => Err(gone(&error)),
        }
    }

    fn try_ask(&self, what: &Value, fds: &[BorrowedFd<'_>]) -> Result<Value, Gone> {
        let what = serde_json::to_vec(what).unwrap();
        send(self.control.as_fd(), &what, fds).map_err(|error| gone(&error))?;
        loop {
            let said = self.next()?;
            if said.get("Ended").is_none() {
                return Ok(said);
            }
            self.early.borrow_mut().push(said);
        }
    }

    fn ask(&self, what: &Value, fds: &[BorrowedFd<'_>]) -> Value {
        self.try_ask(what, fds).unwrap()
    }

    /// Starts a command; gives its pid inside, or the error number.
    pub(crate) fn start(&self, argv: &[&str], fds: &[BorrowedFd<'_>]) -> Result<i64, i64> {
        self.try_start(argv, fds).unwrap()
    }

    fn try_start(&self, argv: &[&str], fds: &[BorrowedFd<'_>]) -> Result<Result<i64, i64>, Gone> {
        let env = [
            ["PATH", "/usr/local/bin:/usr/bin:/bin"],
            ["HOME", "/home/box"],
        ];
        let ask =
            json!({"Run": {"argv": argv, "env": env, "cwd": "/tmp", "rlimits": self.rlimits}});
        let said = self.try_ask(&ask, fds)?;
        Ok(match said.get("Started") {
            Some(started) => Ok(started["pid"].as_i64().unwrap()),
            None => Err(said["NotStarted"]["errno"].as_i64().unwrap()),
        })
    }

    /// Waits for a command's end.
    pub(crate) fn ended(&self, pid: i64) -> (Option<i32>, Option<i32>) {
        self.try_ended(pid).unwrap()
    }

    fn try_ended(&self, pid: i64) -> Result<(Option<i32>, Option<i32>), Gone> {
        let number = |value: &Value| value.as_i64().map(|n| i32::try_from(n).unwrap());
        loop {
            let mut early = self.early.borrow_mut();
            let said = match early.iter().position(|said| said["Ended"]["pid"] == pid) {
                Some(place) => early.remove(place),
                None => self.next()?,
            };
            if said["Ended"]["pid"] == pid {
                let ended = &said["Ended"];
                return Ok((number(&ended["code"]), number(&ended["signal"])));
            }
            early.push(said);
        }
    }

    pub(crate) fn run(&self, argv: &[&str]) -> Output {
        self.try_run(argv).unwrap()
    }

    /// The same in a box that may have ended.
    pub(crate) fn try_run(&self, argv: &[&str]) -> Result<Output, Gone> {
        let null = File::open("/dev/null").unwrap();
        let (mut out, mut err) = (memory(), memory());
        let pid = match self.try_start(argv, &[null.as_fd(), out.as_fd(), err.as_fd()])? {
            Ok(pid) => pid,
            Err(errno) => {
                return Ok(Output {
                    err: format!("not started: {errno}"),
                    ..Output::default()
                });
            }
        };
        let (code, signal) = self.try_ended(pid)?;
        Ok(Output {
            code,
            signal,
            out: text(&mut out),
            err: text(&mut err),
        })
    }

    pub(crate) fn sh(&self, script: &str) -> Output {
        self.run(&["/bin/sh", "-c", script])
    }

    /// Runs a probe inside; its one line, or the signal that ended it.
    pub(crate) fn probe(&self, name: &str, argument: &str) -> String {
        self.try_probe(name, argument).unwrap()
    }

    /// The same in a box that may end meanwhile.
    pub(crate) fn try_probe(&self, name: &str, argument: &str) -> Result<String, Gone> {
        let output = self.try_run(&["/probe/probe", name, argument])?;
        Ok(answer(&output))
    }

    pub(crate) fn spawn(&self, script: &str) -> i64 {
        let null = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .unwrap();
        self.start(&["/bin/sh", "-c", script], &[null.as_fd(); 3])
            .unwrap()
    }

    pub(crate) fn kill_tree(&self, pid: i64) -> i64 {
        self.ask(&json!({"KillTree": {"pid": pid}}), &[])["Killed"]["count"]
            .as_i64()
            .unwrap()
    }
}

impl Drop for TestBox<'_> {
    fn drop(&mut self) {
        if let Some(sandbox) = self.sandbox.take() {
            let _ = sandbox.destroy();
            let _ = self.machine.server.settle();
        }
    }
}

fn answer(output: &Output) -> String {
    match output.signal {
        Some(signal) => format!("signal {signal}"),
        None => output.out.trim().to_owned(),
    }
}

/// The control: the same probe outside, as whoever runs the tests.
pub(crate) fn probe_outside(name: &str, argument: &str) -> String {
    let output = Command::new(PROBE).args([name, argument]).output().unwrap();
    match std::os::unix::process::ExitStatusExt::signal(&output.status) {
        Some(signal) => format!("signal {signal}"),
        None => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    }
}

fn memory() -> File {
    File::from(rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
}

fn text(file: &mut File) -> String {
    let mut text = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut text).unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

/// Waits for something that must come to be.
pub(crate) fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LONG, "{what}: not within {LONG:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
