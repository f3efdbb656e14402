//! A scripted runtime, which records its calls and is reached over a queue.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use box_protocol::actions::*;
use box_protocol::{BoxError, BoxExecutionResult, BoxId, BoxInfo, BoxSpec, BoxState, Exit, UnixMs};
use box_rpc::{Action, Call, Caller, Empty, Handle, Limits, Options, Router, Session};
use box_service::{BoxService, Query, RuntimeClient, ServiceConfig};
use box_transports::queue;
use serde_json::{Map, Value};

/// The calls that a [`ScriptedRuntime`] received.
#[derive(Debug, Default, Clone)]
pub(crate) struct Record {
    pub(crate) started: Vec<String>,
    pub(crate) specs: Vec<BoxSpec>,
    pub(crate) executed: Vec<(String, String)>,
    pub(crate) callers: Vec<String>,
    pub(crate) deleted: Vec<String>,
    pub(crate) updates: Vec<BoxUpdateParams>,
    pub(crate) commands: Vec<(String, Option<u64>)>,
    pub(crate) health_checks: usize,
    pub(crate) shutdowns: usize,
    pub(crate) contexts: Vec<Value>,
    pub(crate) deadlines: Vec<Duration>,
    pub(crate) cancelled: usize,
}

#[derive(Debug)]
struct State {
    record: Record,
    boxes: BTreeMap<String, BoxInfo>,
    available: bool,
    missing: Vec<String>,
    output: Option<(String, String)>,
    files: Vec<(String, usize)>,
    failure: Option<BoxError>,
}

/// The script and its record. Clones share one runtime.
#[derive(Debug, Clone)]
pub(crate) struct ScriptedRuntime(Arc<Mutex<State>>);

impl ScriptedRuntime {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(State {
            record: Record::default(),
            boxes: BTreeMap::new(),
            available: true,
            missing: Vec::new(),
            output: None,
            files: Vec::new(),
            failure: None,
        })))
    }

    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.0.lock().unwrap())
    }

    /// Removes the backend, so that nothing can run.
    pub(crate) fn without_backend(self) -> Self {
        self.with(|state| state.available = false);
        self
    }

    /// Reports this primitive as missing.
    pub(crate) fn missing(self, primitive: &str) -> Self {
        self.with(|state| state.missing.push(primitive.to_owned()));
        self
    }

    /// Makes every command print this.
    pub(crate) fn printing(self, stdout: impl Into<String>, stderr: impl Into<String>) -> Self {
        self.with(|state| state.output = Some((stdout.into(), stderr.into())));
        self
    }

    /// Makes every command write a file of this size into the workspace.
    pub(crate) fn writing(self, name: &str, bytes: usize) -> Self {
        self.with(|state| state.files.push((name.to_owned(), bytes)));
        self
    }

    /// Makes every command fail at its end and leave its box.
    pub(crate) fn failing(self, error: BoxError) -> Self {
        self.with(|state| state.failure = Some(error));
        self
    }

    pub(crate) fn record(&self) -> Record {
        self.with(|state| state.record.clone())
    }

    /// The spec of the first box.
    pub(crate) fn first_spec(&self) -> BoxSpec {
        self.record().specs.first().expect("no box").clone()
    }

    /// The actions of this runtime.
    pub(crate) fn router(&self) -> Router {
        Router::builder(Arc::new(self.clone()))
            .on::<SystemHealth>()
            .on::<SystemStatus>()
            .on::<SystemShutdown>()
            .on::<BoxCreate>()
            .on::<BoxExec>()
            .on::<BoxList>()
            .on::<BoxUpdate>()
            .on::<BoxDelete>()
            .on::<BoxGet>()
            .on::<BoxEvents>()
            .on::<CommandStart>()
            .on::<ShellRun>()
            .build()
    }

    /// A service over a connection to this runtime.
    pub(crate) fn served(&self, config: ServiceConfig) -> ServiceFixture {
        let (connection, client) = connect(self.router());
        let service = BoxService::with_client(config, client).unwrap();
        ServiceFixture {
            service,
            connection,
        }
    }

    /// As [`served`](Self::served), initialised.
    pub(crate) async fn ready(&self, config: ServiceConfig) -> ServiceFixture {
        let served = self.served(config);
        served.initialize().await.unwrap();
        served
    }

    fn find_or_start(&self, spec: &BoxSpec) -> Result<(BoxInfo, bool), BoxError> {
        self.with(|state| {
            if !state.available {
                return Err(BoxError::unavailable("no backend is available"));
            }
            let id = spec.box_id.as_str();
            if let Some(info) = state.boxes.get(id) {
                return Ok((info.clone(), true));
            }
            let mut info = BoxInfo::starting(spec, "fake", format!("backend-{id}"), UnixMs::now());
            info.state = BoxState::Running;
            state.record.started.push(id.to_owned());
            state.record.specs.push(spec.clone());
            state.boxes.insert(id.to_owned(), info.clone());
            Ok((info, false))
        })
    }

    fn health(&self) -> BackendInfo {
        self.with(|state| BackendInfo {
            name: state.available.then(|| "fake".to_owned()),
            available: state.available,
            degraded: Vec::new(),
            missing: state.missing.clone(),
        })
    }
}

/// The two ends of a connection to a runtime.
#[derive(Debug)]
pub(crate) struct ConnectionEnds {
    pub(crate) near: Session,
    #[allow(dead_code, reason = "keeps the connection open")]
    far: Session,
}

pub(crate) fn connect(router: Router) -> (ConnectionEnds, RuntimeClient) {
    connect_as(&Caller::Local, router)
}

/// A connection on which this caller makes the calls.
pub(crate) fn connect_as(caller: &Caller, router: Router) -> (ConnectionEnds, RuntimeClient) {
    let options = || Options {
        limits: Limits::in_process(),
        ..Options::new(caller.clone())
    };
    let (near, far) = queue::pair(64);
    let far = Session::start(far, router, options());
    let near = Session::start(near, Router::empty(), options());
    let client = near.peer().into();
    (ConnectionEnds { near, far }, client)
}

/// A service and its injected connection.
#[derive(Debug)]
pub(crate) struct ServiceFixture {
    pub(crate) service: BoxService,
    pub(crate) connection: ConnectionEnds,
}

impl std::ops::Deref for ServiceFixture {
    type Target = BoxService;

    fn deref(&self) -> &BoxService {
        &self.service
    }
}

/// The query of the seed tests.
pub(crate) fn query(id: u64) -> Query {
    Query::new(id).from_launcher("person", "test_user")
}

pub(crate) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other} is not an object"),
    }
}

/// A configuration with these allowed roots.
pub(crate) fn allowing(roots: &[&Path]) -> ServiceConfig {
    ServiceConfig {
        allowed_host_mount_roots: roots.iter().map(|root| root.to_path_buf()).collect(),
        ..ServiceConfig::default()
    }
}

impl Handle<SystemHealth> for ScriptedRuntime {
    async fn handle(&self, _: Empty, _: Call<SystemHealth>) -> Result<BackendInfo, BoxError> {
        self.with(|state| state.record.health_checks += 1);
        Ok(self.health())
    }
}

impl Handle<SystemStatus> for ScriptedRuntime {
    async fn handle(
        &self,
        _: Empty,
        _: Call<SystemStatus>,
    ) -> Result<SystemStatusResult, BoxError> {
        Ok(SystemStatusResult {
            backend: self.health(),
            active_boxes: self.with(|state| state.boxes.len() as u64),
            idle_ttl_sec: 300,
            ..SystemStatusResult::default()
        })
    }
}

impl Handle<SystemShutdown> for ScriptedRuntime {
    async fn handle(
        &self,
        _: SystemShutdownParams,
        _: Call<SystemShutdown>,
    ) -> Result<SystemShutdownResult, BoxError> {
        let ended = self.with(|state| {
            state.record.shutdowns += 1;
            std::mem::take(&mut state.boxes).len() as u64
        });
        Ok(SystemShutdownResult { ended })
    }
}

impl Handle<BoxCreate> for ScriptedRuntime {
    async fn handle(
        &self,
        params: BoxCreateParams,
        _: Call<BoxCreate>,
    ) -> Result<BoxCreateResult, BoxError> {
        let (info, existed) = self.find_or_start(&params.spec.build()?)?;
        Ok(BoxCreateResult {
            info,
            existed,
            earlier: None,
            adjusted: Vec::new(),
        })
    }
}

impl Handle<BoxExec> for ScriptedRuntime {
    async fn handle(
        &self,
        params: BoxExecParams,
        mut call: Call<BoxExec>,
    ) -> Result<BoxExecutionResult, BoxError> {
        let spec = params.spec.build()?;
        let (info, _) = self.find_or_start(&spec)?;
        if let Some(context) = call.context::<Value>() {
            self.with(|state| state.record.contexts.push(context.unwrap()));
        }
        if let Some(left) = call.time_left() {
            self.with(|state| state.record.deadlines.push(left));
        }
        if spec.cmd == "hang" {
            let _noted = DropRecorder(self.clone());
            std::future::pending::<()>().await;
        }
        let (stdout, stderr) = self.with(|state| {
            let executed = (info.box_id.to_string(), spec.cmd.clone());
            state.record.executed.push(executed);
            state.record.callers.push(call.caller().to_string());
            for (name, bytes) in &state.files {
                if let Some(workspace) = &info.host_path {
                    std::fs::write(Path::new(workspace).join(name), vec![b'x'; *bytes]).unwrap();
                }
            }
            let default = || (format!("executed: {}", spec.cmd), String::new());
            state.output.clone().unwrap_or_else(default)
        });
        if let Some(chunks) = call.chunks() {
            for (number, word) in stdout.split(' ').enumerate() {
                let piece = OutputPiece {
                    stream: StreamName::Stdout,
                    offset: number as u64,
                    pos: number as u64,
                    at: UnixMs(1),
                    data: word.to_owned(),
                };
                chunks.send(&CommandChunk::Text(piece)).await?;
            }
        }
        if let Some(error) = self.with(|state| state.failure.clone()) {
            return Err(error);
        }
        let result = BoxExecutionResult::new(info.box_id, "fake", Exit::returned(0), 12)?;
        Ok(result.with_output(stdout, stderr))
    }
}

/// Records that a call was dropped.
struct DropRecorder(ScriptedRuntime);

impl Drop for DropRecorder {
    fn drop(&mut self) {
        self.0.with(|state| state.record.cancelled += 1);
    }
}

impl ScriptedRuntime {
    /// Runs a command in an existing box.
    fn command(
        &self,
        box_id: &BoxId,
        text: &str,
        timeout_ms: Option<u64>,
    ) -> Result<CommandStartResult, BoxError> {
        self.with(|state| {
            let info = state.boxes.get(box_id.as_str());
            let info = info.ok_or_else(|| no_such_box(box_id))?;
            for (name, bytes) in &state.files {
                if let Some(workspace) = &info.host_path {
                    std::fs::write(Path::new(workspace).join(name), vec![b'x'; *bytes]).unwrap();
                }
            }
            state.record.commands.push((text.to_owned(), timeout_ms));
            let info = serde_json::json!({"box_id": box_id, "command_id": "c", "role": "command",
                "state": "running", "program": {"text": text}, "cwd": "/", "env_keys": [], "attached": false,
                "created_at": 1, "started_at": 1, "size": {"stdout": 0, "stderr": 0},
                "kept_from": {"stdout": 0, "stderr": 0}});
            Ok(CommandStartResult {
                info: serde_json::from_value(info).unwrap(),
                existed: false,
                read: None,
                adjusted: Vec::new(),
            })
        })
    }
}

impl Handle<CommandStart> for ScriptedRuntime {
    async fn handle(
        &self,
        params: CommandStartParams,
        _: Call<CommandStart>,
    ) -> Result<CommandStartResult, BoxError> {
        let text = params.program.to_string();
        self.command(&params.box_id, &text, params.timeout_ms)
    }
}

impl Handle<ShellRun> for ScriptedRuntime {
    async fn handle(
        &self,
        params: ShellRunParams,
        _: Call<ShellRun>,
    ) -> Result<CommandStartResult, BoxError> {
        self.command(&params.box_id, &params.text, params.timeout_ms)
    }
}

impl Handle<BoxList> for ScriptedRuntime {
    async fn handle(
        &self,
        params: BoxListParams,
        _: Call<BoxList>,
    ) -> Result<BoxListResult, BoxError> {
        // Pages of two, so that a client must read more than the first.
        let all: Vec<_> = self.with(|state| state.boxes.values().cloned().collect());
        let after = |info: &BoxInfo| Some(&info.box_id) > params.after.as_ref();
        let mut items: Vec<_> = all.iter().filter(|info| after(info)).cloned().collect();
        let more = items.len() > 2;
        items.truncate(2);
        let next = items.last().filter(|_| more);
        Ok(BoxListResult {
            next: next.map(|info| info.box_id.clone()),
            items,
            total: all.len() as u64,
        })
    }
}

fn no_such_box(box_id: &BoxId) -> BoxError {
    BoxError::not_found(format!("box {box_id} not found"))
}

impl Handle<BoxUpdate> for ScriptedRuntime {
    async fn handle(
        &self,
        params: BoxUpdateParams,
        _: Call<BoxUpdate>,
    ) -> Result<BoxInfo, BoxError> {
        self.with(|state| {
            state.record.updates.push(params.clone());
            let info = state.boxes.get(params.box_id.as_str());
            info.cloned().ok_or_else(|| no_such_box(&params.box_id))
        })
    }
}

impl Handle<BoxDelete> for ScriptedRuntime {
    async fn handle(
        &self,
        params: BoxDeleteParams,
        _: Call<BoxDelete>,
    ) -> Result<BoxDeleteResult, BoxError> {
        self.with(|state| {
            let id = params.box_id;
            if state.boxes.remove(id.as_str()).is_none() {
                return Err(no_such_box(&id));
            }
            state.record.deleted.push(id.to_string());
            Ok(BoxDeleteResult { deleted: id })
        })
    }
}

impl Handle<BoxGet> for ScriptedRuntime {
    async fn handle(
        &self,
        params: BoxGetParams,
        _: Call<BoxGet>,
    ) -> Result<BoxGetResult, BoxError> {
        let id = params.box_id.unwrap();
        let info = self.with(|state| state.boxes.get(id.as_str()).cloned());
        Ok(BoxGetResult {
            info: info.ok_or_else(|| no_such_box(&id))?,
            guest: None,
        })
    }
}

impl Handle<BoxEvents> for ScriptedRuntime {
    async fn handle(
        &self,
        params: BoxEventsParams,
        mut call: Call<BoxEvents>,
    ) -> Result<BoxEventsResult, BoxError> {
        let from = params.after.unwrap_or(0);
        let Some(chunks) = call.chunks() else {
            return Err(BoxError::validation(format!("{} streams", BoxEvents::NAME)));
        };
        for seq in from..from + 100 {
            let event = BoxEvent {
                seq,
                at: UnixMs(1),
                box_id: BoxId::new("s")?,
                kind: "started".to_owned(),
                message: String::new(),
                lost: 0,
            };
            chunks.send(&event).await?;
        }
        if params.follow {
            return Err(BoxError::capacity("no more events"));
        }
        Ok(BoxEventsResult {
            next: from + 100,
            lost: 0,
        })
    }
}
