//! A runtime that makes real boxes.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use box_protocol::actions::BoxExecParams;
use box_protocol::{BoxError, BoxExecutionResult, ExecutionStatus, SpecDraft};
use box_rpc::{Codecs, Options, Router, Session};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{Backend as _, BoxRuntime, Caller, RuntimeConfig, StartRequest};
use serde_json::json;
use tokio::sync::Mutex;
use uuid::Uuid;

use box_test_wait::eventually;

/// The ordinary user of tests that run as root.
pub const ORDINARY_USER: u32 = 65534;

/// A runtime with real boxes, and their user.
#[derive(Debug)]
pub struct Machine {
    /// The name of the user in messages.
    pub name: &'static str,
    /// The runtime.
    pub runtime: BoxRuntime,
    /// The backend of the runtime.
    pub backend: NativeBackend,
    /// The user of its boxes.
    pub uid: u32,
}

/// One machine at a time: concurrent starts and ends of fork servers disturb each other's cgroups.
static TURN: Mutex<()> = Mutex::const_new(());

/// Runs the test as every available user, one after the other.
pub async fn on_each_machine(test: impl AsyncFn(&Machine)) {
    on_each_machine_within(Duration::from_mins(5), test).await;
}

/// As [`on_each_machine`], for a test that takes long.
pub async fn on_each_machine_within(limit: Duration, test: impl AsyncFn(&Machine)) {
    Box::pin(on_each_machine_set_up(limit, |_| {}, test)).await;
}

/// As [`on_each_machine`], with a changed configuration.
pub async fn on_each_machine_set_up(
    limit: Duration,
    set_up: impl Fn(&mut NativeConfig),
    test: impl AsyncFn(&Machine),
) {
    let _turn = TURN.lock().await;
    let root = rustix::process::geteuid().is_root();
    let users: &[(&str, Option<u32>)] = if root {
        &[("root", None), ("ordinary", Some(ORDINARY_USER))]
    } else {
        &[("ordinary", None)]
    };
    for (name, user) in users {
        eprintln!("as {name}:");
        let mut config = config(*user);
        set_up(&mut config);
        let machine = Machine::with(name, *user, config);
        let done = tokio::time::timeout(limit, test(&machine)).await;
        assert!(done.is_ok(), "{name}: the test hangs");
        machine.end().await;
    }
}

impl Machine {
    /// A machine with boxes of this user, or of the current one.
    pub fn new(name: &'static str, user: Option<u32>) -> Self {
        Self::with(name, user, config(user))
    }

    fn with(name: &'static str, user: Option<u32>, config: NativeConfig) -> Self {
        let backend = NativeBackend::new(config);
        let mut runtime = RuntimeConfig::with(backend.clone());
        // An emulated machine beside other work takes several seconds to start the fork server.
        runtime.probe_timeout = Duration::from_mins(1);
        Self {
            name,
            runtime: BoxRuntime::start(runtime),
            backend,
            uid: user.unwrap_or_else(|| rustix::process::geteuid().as_raw()),
        }
    }

    /// The user of its boxes, if it differs from the current user.
    pub fn user(&self) -> Option<u32> {
        let same = self.uid == rustix::process::geteuid().as_raw();
        (!same).then_some(self.uid)
    }

    /// The configuration of its backend.
    pub fn config(&self) -> NativeConfig {
        config(self.user())
    }

    async fn end(&self) {
        let exit = serde_json::from_value(json!({"exit": true})).unwrap();
        let ended = self.runtime.shutdown(&Caller::Local, exit).await;
        ended.unwrap();
    }

    /// Runs a command in the box of this session.
    pub async fn exec(&self, session: &str, cmd: &str) -> BoxExecutionResult {
        let ran = self.exec_spec(SpecDraft::new(session).cmd(cmd)).await;
        ran.unwrap_or_else(|error| panic!("{}: {cmd}: {error:?}", self.name))
    }

    /// Runs the command of a spec in its box.
    pub async fn exec_spec(&self, spec: SpecDraft) -> Result<BoxExecutionResult, BoxError> {
        self.runtime.exec(&Caller::Local, params(spec)).await
    }

    /// Whether the machine lacks this primitive.
    pub async fn lacks(&self, primitive: &str) -> bool {
        let missing = self.runtime.health().await.missing;
        missing.iter().any(|name| name == primitive)
    }

    /// A box without a session, and its agent.
    pub async fn agent(&self) -> (Uuid, Session) {
        agent_of(&self.backend).await
    }

    /// A directory that this machine's user owns, with a path without links.
    pub fn directory(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir_in(std::env::temp_dir().canonicalize().unwrap()).unwrap();
        std::os::unix::fs::chown(dir.path(), Some(self.uid), Some(self.uid)).unwrap();
        dir
    }
}

/// A box without a session, and its agent.
pub async fn agent_of(backend: &NativeBackend) -> (Uuid, Session) {
    let (id, spec) = (Uuid::now_v7(), SpecDraft::new("direct").build().unwrap());
    let request = StartRequest::new(id, &spec);
    let started = backend.start(request).await.unwrap();
    let options = Options {
        codecs: Codecs::JSON_RPC,
        ..Options::client()
    };
    let session = Session::start_boxed(started.connection, Router::empty(), options);
    (id, session)
}

/// The configuration of a backend with boxes of this user.
pub fn config(user: Option<u32>) -> NativeConfig {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let mut config = NativeConfig::new(&*PROGRAM);
    config.run_as = user.map(|user| (user, user));
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    config.cgroup_parent = format!("box-test-{}-{number}", std::process::id());
    config
}

/// The parameters of an exec of this spec.
#[expect(
    clippy::needless_pass_by_value,
    reason = "callers build the value for this call"
)]
pub fn params(spec: SpecDraft) -> BoxExecParams {
    serde_json::from_value(json!({ "spec": spec })).unwrap()
}

/// A spec from its JSON.
pub fn spec(json: serde_json::Value) -> SpecDraft {
    serde_json::from_value(json).unwrap()
}

/// The output of a command that succeeded.
pub fn printed(result: &BoxExecutionResult) -> &str {
    assert_eq!(result.status, ExecutionStatus::Completed, "{result:?}");
    assert_eq!(result.exit_code, Some(0), "{result:?}");
    result.stdout.trim_end()
}

/// The fork server's program, in a directory that an ordinary user can read.
///
/// A build directory may not be readable. The program is replaced by renaming, because another test
/// may be running it. Its path is unique to this build directory, because the tests of another
/// checkout may run as well.
pub static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
    use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
    use std::os::unix::fs::PermissionsExt;
    let host = host_program();
    let user = rustix::process::geteuid().as_raw();
    let checkout = BuildHasherDefault::<DefaultHasher>::default().hash_one(&host);
    let dir = std::env::temp_dir().join(format!("box-native-tests-{user}-{checkout:x}"));
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.join("host");
    let fresh = dir.join(format!("host-{}", std::process::id()));
    std::fs::copy(&host, &fresh).unwrap();
    std::fs::rename(fresh, &program).unwrap();
    program
});

/// The path of `box-test-host`, which cargo builds beside the directory of the test programs.
fn host_program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let build = test.parent().and_then(Path::parent).unwrap();
    build.join("box-test-host")
}

/// A unique number of seconds for `sleep`, also across checkouts: it marks the processes of one
/// test.
pub fn mark() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = 86400 + NUMBER.fetch_add(1, Ordering::Relaxed);
    format!(
        "{number}.{}{}",
        std::process::id(),
        Uuid::now_v7().as_u128() % 1_000_000_007
    )
}

/// The number of processes of the machine with this argument.
pub fn processes_with(argument: &str) -> usize {
    pids_with(argument).len()
}

/// The processes of the machine with this argument.
pub fn pids_with(argument: &str) -> Vec<i32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let with = all.filter(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0)
            .any(|word| word == argument.as_bytes())
    });
    with.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// The parent of the process with this argument.
pub fn parent_of(argument: &str) -> Option<i32> {
    let child = *pids_with(argument).first()?;
    let status = std::fs::read_to_string(format!("/proc/{child}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    parent.trim().parse().ok()
}

/// Waits until no process with this mark is left. On a busy machine a killed process takes a moment
/// to end.
pub async fn gone(mark: &str) {
    eventually("no process is left", async || processes_with(mark) == 0).await;
}
