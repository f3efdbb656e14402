//! A runtime with a scripted backend, and the actions by which a test sees and scripts the backend,
//! which over stdio is in another process. And a runtime with real boxes, which needs no script.
//!
//! Commands the script knows: `hang`, `exit N`, `signal N`, `print N` (so many characters), `write
//! NAME BYTES` (into the workspace), `spoil NAME BYTES` (as `write`, then the agent goes), `die` (the
//! agent goes). Any other prints `executed: COMMAND`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use box_rpc::{Action, Call, Empty, Handle, Never, Router, RpcError};
use box_runtime::fake::{FakeBackend, Reply};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{Availability, BoxRuntime, RuntimeConfig};
use box_service::connector::InProcess;
use box_service::{BoxService, ServiceConfig};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::actions::Number;

/// What the backend was asked to do.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Seen {
    /// Boxes started, by session.
    pub starts: Vec<String>,
    /// Commands run: session and text.
    pub execs: Vec<(String, String)>,
    /// Boxes ended, by session.
    pub stops: Vec<String>,
    /// The specs of the boxes started.
    pub specs: Vec<Value>,
}

/// What the backend was asked to do.
#[derive(Debug)]
pub struct SeeBackend;

impl Action for SeeBackend {
    const NAME: &'static str = "test.backend.see";
    type Params = Empty;
    type Result = Seen;
    type Chunk = Never;
}

/// Whether the backend is to be available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Available {
    /// Whether it is.
    pub available: bool,
}

/// Makes the backend available, or not.
#[derive(Debug)]
pub struct SetBackend;

impl Action for SetBackend {
    const NAME: &'static str = "test.backend.set";
    type Params = Available;
    type Result = Empty;
    type Chunk = Never;
}

/// Which process the runtime is in.
#[derive(Debug)]
pub struct SeeProcess;

impl Action for SeeProcess {
    const NAME: &'static str = "test.process.see";
    type Params = Empty;
    type Result = Number;
    type Chunk = Never;
}

struct Backend(FakeBackend);

impl Handle<SeeProcess> for Backend {
    async fn handle(&self, _: Empty, _: Call<SeeProcess>) -> Result<Number, RpcError> {
        let n = u64::from(std::process::id());
        Ok(Number { n })
    }
}

impl Handle<SeeBackend> for Backend {
    async fn handle(&self, _: Empty, _: Call<SeeBackend>) -> Result<Seen, RpcError> {
        let specs = self
            .0
            .specs()
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<_, _>>();
        Ok(Seen {
            starts: self.0.starts(),
            execs: self.0.execs(),
            stops: self.0.stops(),
            specs: specs.map_err(|error| RpcError::internal(error.to_string()))?,
        })
    }
}

impl Handle<SetBackend> for Backend {
    async fn handle(&self, set: Available, _: Call<SetBackend>) -> Result<Empty, RpcError> {
        self.0.set_availability(if set.available {
            Availability::full()
        } else {
            Availability::unavailable("switched off by the test")
        });
        Ok(Empty {})
    }
}

/// A runtime of its own, and the actions to look at its backend.
pub fn router() -> Router {
    let backend = FakeBackend::new();
    backend.answer_with(reply);
    let mut config = RuntimeConfig::with(backend.clone());
    config.max_sessions = 8;
    let runtime = BoxRuntime::start(config);
    let own = Router::builder(Arc::new(Backend(backend)));
    own.on::<SeeBackend>()
        .on::<SetBackend>()
        .on::<SeeProcess>()
        .and(&runtime.router())
        .build()
}

/// A runtime of its own whose boxes are real, begun by this program.
pub fn real_router(fork_server: &Path) -> Router {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let mut config = NativeConfig::new(fork_server);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    config.cgroup_parent = format!("box-far-{}-{number}", std::process::id());
    BoxRuntime::start(RuntimeConfig::with(NativeBackend::new(config))).router()
}

/// The policy layer in front of a runtime whose boxes are real, as `boxd serve` has it.
pub fn real_service_router(fork_server: &Path) -> Router {
    let runtime = InProcess::new(real_router(fork_server));
    let service = BoxService::with_connector(ServiceConfig::default(), runtime);
    service.expect("a service").router()
}

/// The characters of each stream that the policy layer of [`service_router`] leaves.
pub const OUTPUT_CHARS: usize = 100;

/// The policy layer in front of a runtime of its own.
pub fn service_router() -> Router {
    let config = ServiceConfig {
        output_limit_chars: OUTPUT_CHARS,
        ..ServiceConfig::default()
    };
    let runtime = InProcess::new(router());
    let service = BoxService::with_connector(config, runtime).expect("a service");
    service.router()
}

fn reply(command: &str) -> Reply {
    let words: Vec<&str> = command.split(' ').collect();
    let number = |at: usize| {
        words
            .get(at)
            .and_then(|word| word.parse::<usize>().ok())
            .unwrap_or(0)
    };
    let small = |at: usize| i32::try_from(number(at)).unwrap_or(i32::MAX);
    match words[0] {
        "hang" => Reply::hang(),
        "sleep" => Reply::stdout("slept").takes(Duration::from_millis(number(1) as u64)),
        "exit" => Reply::stdout("").exit(small(1)),
        "signal" => Reply::stdout("").signal(small(1)),
        "print" => Reply::stdout("é".repeat(number(1))).stderr("quiet"),
        "write" => Reply::stdout("wrote").writes(words[1], number(2)),
        "spoil" => Reply::stdout("").writes(words[1], number(2)).dies(),
        "die" => Reply::stdout("").takes(Duration::from_millis(20)).dies(),
        _ => Reply::stdout(format!("executed: {command}")),
    }
}
