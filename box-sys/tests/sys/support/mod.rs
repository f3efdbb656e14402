//! Real boxes for tests.
//!
//! If root runs the tests: of root and of an ordinary user. Otherwise of the current user.

#![allow(dead_code, reason = "each test file uses its part")]
mod image;
pub(crate) mod resources;

use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use box_sys::{
    ForkServer, Guest, Mount, Root, Sandbox, SandboxPlan, ServerConfig, Source, receive, send,
    socket_pair,
};
use box_test_wait::LONG;
use serde_json::{Value, json};

pub(crate) const RUN_PROGRAM: &str = env!("CARGO_BIN_EXE_box-sys-run");
pub(crate) const PROBE_PROGRAM: &str = env!("CARGO_BIN_EXE_box-sys-probe");
/// The ordinary user of tests that run as root.
pub(crate) const ORDINARY_UID: u32 = 65534;

/// A fork server and the name of its user.
pub(crate) struct TestServer {
    pub(crate) name: &'static str,
    pub(crate) fork_server: ForkServer,
    /// Programs for boxes, readable by its user.
    programs: PathBuf,
}

impl TestServer {
    /// A running server of the current user, or of the ordinary one if its name is `ordinary`.
    pub(crate) fn new(name: &'static str, fork_server: ForkServer) -> Self {
        Self {
            name,
            fork_server,
            programs: PROGRAMS.clone(),
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        !self
            .fork_server
            .primitives()
            .missing()
            .iter()
            .any(|missing| missing == name)
    }

    pub(crate) fn privileged(&self) -> bool {
        self.fork_server.primitives().privileged
    }

    pub(crate) fn uid(&self) -> u32 {
        if self.name == "ordinary" && rustix::process::geteuid().is_root() {
            ORDINARY_UID
        } else {
            rustix::process::geteuid().as_raw()
        }
    }

    pub(crate) fn create_box(&self, plan: &SandboxPlan) -> TestBox<'_> {
        TestBox::new(self, plan)
    }

    /// The plan of most tests: defaults, with the probe program.
    pub(crate) fn plan(&self) -> SandboxPlan {
        let probe = Mount {
            source: Source::Path(self.programs.clone()),
            target: "/probe".into(),
            writable: false,
            overlay: false,
        };
        SandboxPlan {
            mounts: vec![probe],
            ..SandboxPlan::default()
        }
    }

    /// An image that the server's user owns, with the root of a small system.
    pub(crate) fn image(&self) -> tempfile::TempDir {
        image::make(self.uid())
    }

    /// Runs a test in the default box, and on an image as its user and as root.
    pub(crate) fn on_each_root(&self, test: impl Fn(&SandboxPlan)) {
        test(&self.plan());
        let image = self.image();
        for guest in [Guest::default(), guest("root", "/root", 0, 0)] {
            let root = Root::Image(image.path().canonicalize().unwrap());
            let plan = self.plan();
            test(&SandboxPlan {
                root,
                guest,
                ..plan
            });
        }
    }

    /// A temporary directory of the server's user.
    pub(crate) fn directory(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(dir.path(), Some(self.uid()), Some(self.uid())).unwrap();
        dir
    }
}

/// A guest of an image.
pub(crate) fn guest(name: &str, home: &str, id: u32, group: u32) -> Guest {
    Guest {
        name: name.into(),
        home: home.into(),
        id,
        group,
    }
}

/// A fork server of the current user with another configuration.
pub(crate) fn server_with(config: &ServerConfig) -> TestServer {
    let fork_server = ForkServer::start(&PROGRAMS.join("server"), config).unwrap();
    TestServer::new("another", fork_server)
}

pub(crate) static SERVERS: LazyLock<Vec<TestServer>> = LazyLock::new(|| {
    let programs = PROGRAMS.clone();
    let config = ServerConfig::default();
    let server = ForkServer::start(&programs.join("server"), &config).unwrap();
    let name = if server.primitives().privileged {
        "root"
    } else {
        "ordinary"
    };
    let mut servers = vec![TestServer {
        name,
        fork_server: server,
        programs: programs.clone(),
    }];
    if rustix::process::geteuid().is_root() {
        let server =
            ForkServer::start_command(as_ordinary_user(&programs.join("server")), &config).unwrap();
        servers.push(TestServer {
            name: "ordinary",
            fork_server: server,
            programs,
        });
    }
    servers
});

/// A directory with the test programs that an ordinary user can read.
///
/// The build directory may not be readable. The path depends on the build directory, so that every
/// run reuses it and other checkouts have their own. The programs are replaced by renaming, because
/// other tests may be running them.
///
/// An ordinary user can name a directory that root created.
pub(crate) static PROGRAMS: LazyLock<PathBuf> = LazyLock::new(|| {
    use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
    use std::os::unix::fs::PermissionsExt;
    if let Some(dir) = std::env::var_os("BOX_SYS_TEST_PROGRAMS") {
        return dir.into();
    }
    let checkout = BuildHasherDefault::<DefaultHasher>::default().hash_one(RUN_PROGRAM);
    let user = rustix::process::geteuid().as_raw();
    let dir = std::env::temp_dir().join(format!("box-sys-tests-{user}-{checkout:x}"));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (from, name) in [(PROBE_PROGRAM, "probe"), (RUN_PROGRAM, "server")] {
        let fresh = dir.join(format!("{name}-{}", std::process::id()));
        // Copied by another process. A child that a thread has just forked would keep the file open
        // for writing until its exec, and the program could not be run meanwhile.
        let copied = Command::new("cp").arg(from).arg(&fresh).status();
        assert!(copied.unwrap().success());
        std::fs::rename(fresh, dir.join(name)).unwrap();
    }
    dir.canonicalize().unwrap()
});

/// A command that runs a program as an ordinary user.
pub(crate) fn as_ordinary_user(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    let id = ORDINARY_UID.to_string();
    command
        .args(["--reuid", &id, "--regid", &id, "--clear-groups"])
        .arg(program);
    command
}

/// Starts a server with a configuration.
pub(crate) type Start = Box<dyn Fn(&ServerConfig) -> ForkServer + Sync>;

/// Functions that start a new server for each user of [`SERVERS`].
pub(crate) fn server_starters() -> Vec<(&'static str, Start)> {
    let root = rustix::process::geteuid().is_root();
    let own = |config: &ServerConfig| ForkServer::start(Path::new(RUN_PROGRAM), config).unwrap();
    let mut all: Vec<(_, Start)> = vec![(if root { "root" } else { "ordinary" }, Box::new(own))];
    if root {
        let server = PROGRAMS.join("server");
        let other = move |config: &ServerConfig| {
            ForkServer::start_command(as_ordinary_user(&server), config).unwrap()
        };
        all.push(("ordinary", Box::new(other)));
    }
    all
}

/// Set for a test that another test runs in a separate process.
pub(crate) const OWN_PROCESS: &str = "BOX_SYS_TEST_ALONE";

/// Whether this is such a process.
pub(crate) fn is_own_process() -> bool {
    std::env::var_os(OWN_PROCESS).is_some()
}

/// Runs an ignored test in a separate process with its own temporary directory.
pub(crate) fn run_in_own_process(test: &str) {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    // The programs of the ordinary user are there.
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .args(["--test-threads", "1"])
        .env(OWN_PROCESS, "1")
        .env("TMPDIR", dir.path())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    println!("{stdout}");
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Raises the descriptor limit of this process to its maximum.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
}

/// Result of a command in a box.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Output {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// A box with a connection to its init.
pub(crate) struct TestBox<'a> {
    pub(crate) sandbox: Option<Sandbox>,
    server: &'a TestServer,
    client: InitClient,
}

/// Init has ended, and the box with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BoxEnded;

/// Converts a closed connection. Any other error fails the test.
fn box_ended(error: &std::io::Error) -> BoxEnded {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    assert!(
        matches!(error.kind(), BrokenPipe | ConnectionReset),
        "{error}"
    );
    BoxEnded
}

/// Connection to a box's init.
#[derive(Debug)]
pub(crate) struct InitClient {
    control: OwnedFd,
    pending_exits: RefCell<Vec<Value>>,
    pub(crate) rlimits: Vec<(u32, u64)>,
}

impl<'a> TestBox<'a> {
    pub(crate) fn new(server: &'a TestServer, plan: &SandboxPlan) -> Self {
        let (control, far) = socket_pair().unwrap();
        let sandbox = server
            .fork_server
            .create(plan, &[far.as_fd()], &[])
            .unwrap_or_else(|error| panic!("{}: {error}", server.name));
        Self {
            sandbox: Some(sandbox),
            server,
            client: InitClient::new(control),
        }
    }

    pub(crate) fn sandbox(&self) -> &Sandbox {
        self.sandbox.as_ref().unwrap()
    }
}

impl std::ops::Deref for TestBox<'_> {
    type Target = InitClient;

    fn deref(&self) -> &InitClient {
        &self.client
    }
}

impl std::ops::DerefMut for TestBox<'_> {
    fn deref_mut(&mut self) -> &mut InitClient {
        &mut self.client
    }
}

impl InitClient {
    pub(crate) fn new(control: OwnedFd) -> Self {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        // A silent init must fail the test instead of blocking it.
        set_socket_timeout(&control, Timeout::Recv, Some(LONG)).unwrap();
        Self {
            control,
            pending_exits: RefCell::default(),
            rlimits: Vec::new(),
        }
    }

    fn next(&self) -> Result<Value, BoxEnded> {
        let mut buffer = [0; 4096];
        match receive(self.control.as_fd(), &mut buffer) {
            Ok(Some((length, _))) => Ok(serde_json::from_slice(&buffer[..length]).unwrap()),
            Ok(None) => Err(BoxEnded),
            Err(error) => Err(box_ended(&error)),
        }
    }

    fn try_request(&self, request: &Value, fds: &[BorrowedFd<'_>]) -> Result<Value, BoxEnded> {
        let bytes = serde_json::to_vec(request).unwrap();
        send(self.control.as_fd(), &bytes, fds).map_err(|error| box_ended(&error))?;
        loop {
            let event = self.next()?;
            if event.get("Exited").is_none() {
                return Ok(event);
            }
            self.pending_exits.borrow_mut().push(event);
        }
    }

    fn request(&self, request: &Value, fds: &[BorrowedFd<'_>]) -> Value {
        self.try_request(request, fds).unwrap()
    }

    /// Starts a command. Returns its pid in the box, or the error number.
    pub(crate) fn start(&self, argv: &[&str], fds: &[BorrowedFd<'_>]) -> Result<i64, i64> {
        self.try_start(argv, fds).unwrap()
    }

    fn try_start(
        &self,
        argv: &[&str],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Result<i64, i64>, BoxEnded> {
        let env = [
            ["PATH", "/usr/local/bin:/usr/bin:/bin"],
            ["HOME", "/home/box"],
        ];
        let request =
            json!({"Run": {"argv": argv, "env": env, "cwd": "/tmp", "rlimits": self.rlimits}});
        let event = self.try_request(&request, fds)?;
        Ok(match event.get("Started") {
            Some(started) => Ok(started["pid"].as_i64().unwrap()),
            None => Err(event["NotStarted"]["errno"].as_i64().unwrap()),
        })
    }

    /// Waits for a command's exit.
    pub(crate) fn wait_exit(&self, pid: i64) -> (Option<i32>, Option<i32>) {
        self.try_wait_exit(pid).unwrap()
    }

    fn try_wait_exit(&self, pid: i64) -> Result<(Option<i32>, Option<i32>), BoxEnded> {
        let number = |value: &Value| value.as_i64().map(|n| i32::try_from(n).unwrap());
        loop {
            let mut pending_exits = self.pending_exits.borrow_mut();
            let event = match pending_exits
                .iter()
                .position(|event| event["Exited"]["pid"] == pid)
            {
                Some(place) => pending_exits.remove(place),
                None => self.next()?,
            };
            if event["Exited"]["pid"] == pid {
                let exit = &event["Exited"];
                return Ok((number(&exit["code"]), number(&exit["signal"])));
            }
            pending_exits.push(event);
        }
    }

    pub(crate) fn run(&self, argv: &[&str]) -> Output {
        self.try_run(argv).unwrap()
    }

    /// The same in a box that may have ended.
    pub(crate) fn try_run(&self, argv: &[&str]) -> Result<Output, BoxEnded> {
        let null = File::open("/dev/null").unwrap();
        let (mut out, mut err) = (memory_file(), memory_file());
        let pid = match self.try_start(argv, &[null.as_fd(), out.as_fd(), err.as_fd()])? {
            Ok(pid) => pid,
            Err(errno) => {
                return Ok(Output {
                    err: format!("not started: {errno}"),
                    ..Output::default()
                });
            }
        };
        let (code, signal) = self.try_wait_exit(pid)?;
        Ok(Output {
            code,
            signal,
            out: read_text(&mut out),
            err: read_text(&mut err),
        })
    }

    pub(crate) fn sh(&self, script: &str) -> Output {
        self.run(&["/bin/sh", "-c", script])
    }

    /// Runs a probe in the box. Returns its line, or the signal that ended it.
    pub(crate) fn probe(&self, name: &str, argument: &str) -> String {
        self.try_probe(name, argument).unwrap()
    }

    /// The same in a box that may end meanwhile.
    pub(crate) fn try_probe(&self, name: &str, argument: &str) -> Result<String, BoxEnded> {
        let output = self.try_run(&["/probe/probe", name, argument])?;
        Ok(probe_result(&output))
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
        self.request(&json!({"KillTree": {"pid": pid}}), &[])["Killed"]["count"]
            .as_i64()
            .unwrap()
    }
}

impl Drop for TestBox<'_> {
    fn drop(&mut self) {
        if let Some(sandbox) = self.sandbox.take() {
            let _ = sandbox.destroy();
            let _ = self.server.fork_server.settle();
        }
    }
}

fn probe_result(output: &Output) -> String {
    match output.signal {
        Some(signal) => format!("signal {signal}"),
        None => output.out.trim().to_owned(),
    }
}

/// The control: the same probe outside, as the current user.
pub(crate) fn probe_outside(name: &str, argument: &str) -> String {
    let output = Command::new(PROBE_PROGRAM)
        .args([name, argument])
        .output()
        .unwrap();
    match std::os::unix::process::ExitStatusExt::signal(&output.status) {
        Some(signal) => format!("signal {signal}"),
        None => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    }
}

fn memory_file() -> File {
    File::from(rustix::fs::memfd_create("output", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
}

fn read_text(file: &mut File) -> String {
    let mut text = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut text).unwrap();
    String::from_utf8_lossy(&text).into_owned()
}
