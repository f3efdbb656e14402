//! A runtime with a scripted backend, and the actions to inspect and script that backend, which
//! over stdio is in another process. Also a runtime with real boxes, which needs no script.
//!
//! The script knows these commands: `hang`, `exit N`, `signal N`, `print N` (that many characters),
//! `write NAME BYTES` (into the workspace), `spoil NAME BYTES` (as `write`, then the agent exits),
//! `die` (the agent exits). Any other command prints `executed: COMMAND`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use box_rpc::{Action, Call, Empty, Handle, Never, Peer, Router, RpcError};
use box_runtime::fake::{FakeBackend, Reply};
use box_runtime::native::{NativeBackend, NativeConfig};
use box_runtime::{Availability, BoxRuntime, RuntimeConfig};
use box_service::connector::InProcess;
use box_service::{BoxService, ServiceConfig};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::actions::Number;

/// The calls that the backend received.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BackendCalls {
    /// Boxes started, by session.
    pub starts: Vec<String>,
    /// Commands run: session and text.
    pub execs: Vec<(String, String)>,
    /// Boxes ended, by session.
    pub stops: Vec<String>,
    /// The specs of the boxes started.
    pub specs: Vec<Value>,
}

/// Returns the calls that the backend received.
#[derive(Debug)]
pub struct InspectBackend;

impl Action for InspectBackend {
    const NAME: &'static str = "test.backend.inspect";
    type Params = Empty;
    type Result = BackendCalls;
    type Chunk = Never;
}

/// Whether the backend is to be available.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAvailability {
    /// The new availability.
    pub available: bool,
}

/// Makes the backend available or unavailable.
#[derive(Debug)]
pub struct SetBackend;

impl Action for SetBackend {
    const NAME: &'static str = "test.backend.set";
    type Params = SetAvailability;
    type Result = Empty;
    type Chunk = Never;
}

/// Makes the backend of a server available or unavailable.
pub async fn set_available(peer: &Peer, available: bool) {
    let availability = SetAvailability { available };
    let set = peer.call::<SetBackend>(&availability).await;
    set.expect("the backend is set");
}

/// Returns the process id of the runtime.
#[derive(Debug)]
pub struct InspectProcess;

impl Action for InspectProcess {
    const NAME: &'static str = "test.process.inspect";
    type Params = Empty;
    type Result = Number;
    type Chunk = Never;
}

struct Backend(FakeBackend);

impl Handle<InspectProcess> for Backend {
    async fn handle(&self, _: Empty, _: Call<InspectProcess>) -> Result<Number, RpcError> {
        let n = u64::from(std::process::id());
        Ok(Number { n })
    }
}

impl Handle<InspectBackend> for Backend {
    async fn handle(&self, _: Empty, _: Call<InspectBackend>) -> Result<BackendCalls, RpcError> {
        let specs = self
            .0
            .specs()
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<_, _>>();
        Ok(BackendCalls {
            starts: self.0.starts(),
            execs: self.0.execs(),
            stops: self.0.stops(),
            specs: specs.map_err(|error| RpcError::internal(error.to_string()))?,
        })
    }
}

impl Handle<SetBackend> for Backend {
    async fn handle(&self, set: SetAvailability, _: Call<SetBackend>) -> Result<Empty, RpcError> {
        self.0.set_availability(if set.available {
            Availability::full()
        } else {
            Availability::unavailable("switched off by the test")
        });
        Ok(Empty {})
    }
}

/// A new runtime with a scripted backend, and the actions to inspect that backend.
pub fn router() -> Router {
    let backend = FakeBackend::new();
    backend.answer_with(reply);
    let mut config = RuntimeConfig::with(backend.clone());
    config.max_boxes = 8;
    let runtime = BoxRuntime::start(config);
    let own = Router::builder(Arc::new(Backend(backend)));
    own.on::<InspectBackend>()
        .on::<SetBackend>()
        .on::<InspectProcess>()
        .and(&runtime.router())
        .build()
}

/// A new runtime with real boxes. This program is their fork server.
pub fn real_router(fork_server: &Path) -> Router {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let mut config = NativeConfig::new(fork_server);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    config.cgroup_parent = format!("box-far-{}-{number}", std::process::id());
    BoxRuntime::start(RuntimeConfig::with(NativeBackend::new(config))).router()
}

/// The policy layer in front of a runtime with real boxes, as in `boxd serve`.
pub fn real_service_router(fork_server: &Path) -> Router {
    let runtime = InProcess::new(real_router(fork_server));
    let service = BoxService::with_connector(ServiceConfig::default(), runtime);
    service.expect("a service").router()
}

/// The length in characters to which the policy layer of [`service_router`] cuts each stream.
pub const OUTPUT_CHARS: usize = 100;

/// The policy layer in front of a new runtime.
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
        "spoil" => Reply::stdout("").writes(words[1], number(2)).disconnects(),
        "die" => Reply::stdout("")
            .takes(Duration::from_millis(20))
            .disconnects(),
        _ => Reply::stdout(format!("executed: {command}")),
    }
}
