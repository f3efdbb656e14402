//! Backend for tests that starts no process.
//!
//! Its boxes are in-process agents that answer from a script. All code above the agent is the
//! production code.
//!
//! ```
//! use box_protocol::SpecDraft;
//! use box_protocol::actions::BoxExecParams;
//! use box_runtime::fake::{FakeBackend, Reply};
//! use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), box_protocol::BoxError> {
//! let backend = FakeBackend::new();
//! backend.on_command("make test", Reply::stdout("2 passed").exit(0));
//! let runtime = BoxRuntime::start(RuntimeConfig::with(backend.clone()));
//!
//! let exec = BoxExecParams::new(SpecDraft::new("job-1").cmd("make test"));
//! let result = runtime.exec(&Caller::Local, exec).await?;
//!
//! assert_eq!(result.stdout, "2 passed");
//! assert_eq!(backend.starts(), ["job-1"]);
//! assert_eq!(backend.execs(), [("job-1".to_owned(), "make test".to_owned())]);
//! # Ok(())
//! # }
//! ```

mod agent;
mod layers;
mod script;
mod volumes;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use box_protocol::actions::{AgentReply, AgentStartParams};
use box_protocol::{BoxError, BoxMountSpec, BoxSpec, CommandId, Env, ItemId, NetworkPolicy};
use box_rpc::{Caller, Limits, Options, Session};
use box_transports::queue;
use uuid::Uuid;

pub use self::script::{InjectedFault, Reply};
use crate::backend::{
    Availability, Backend, Capabilities, Facts, Layer, LayerFiles, LayerKind, Snapshot,
    SnapshotRequest, StartRequest, StartedBox,
};
use crate::volumes::{MountedVolume, Volumes};

/// Capacity of the message queue in each direction between runtime and fake agent.
const QUEUE: usize = 16;

/// Longest sleep, used as "forever".
const FOREVER: Duration = Duration::from_hours(24 * 365);

type Answer = dyn Fn(&str) -> Reply + Send + Sync;

type PolicyHook = dyn Fn(&NetworkPolicy) + Send + Sync;

/// Backend that starts nothing and records every request. Clones share state.
///
/// A command's [`Reply`] is the first of: the reply queued by [`next_command`](Self::next_command),
/// the reply of [`on_command`](Self::on_command) for its text, the result of
/// [`answer_with`](Self::answer_with), and `executed: <command>`.
#[derive(Clone)]
pub struct FakeBackend {
    name: Arc<str>,
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    availability: Availability,
    probe_trouble: Option<InjectedFault>,
    capabilities: Capabilities,
    facts: Facts,
    contract: u32,
    start_troubles: VecDeque<InjectedFault>,
    persist_error: Option<BoxError>,
    persist_time: Duration,
    policy_hook: Option<Arc<PolicyHook>>,
    stop_troubles: VecDeque<InjectedFault>,
    layer_troubles: VecDeque<InjectedFault>,
    stopped_kind: LayerKind,
    health_trouble: Option<InjectedFault>,
    clear_trouble: Option<InjectedFault>,
    next: VecDeque<Reply>,
    by_text: HashMap<String, Reply>,
    computed: Option<Arc<Answer>>,
    boxes: HashMap<Uuid, FakeBox>,
    volumes: Vec<(ItemId, u64)>,
    volume_error: Option<BoxError>,
    record: Record,
}

#[derive(Default)]
struct Record {
    probes: usize,
    starts: Vec<String>,
    specs: Vec<BoxSpec>,
    volumes: Vec<Vec<MountedVolume>>,
    layers: Vec<(Vec<Layer>, Option<PathBuf>)>,
    merged: Vec<(Vec<Layer>, PathBuf)>,
    commands: Vec<(Arc<str>, AgentStartParams)>,
    forgets_commands: bool,
    killed: Vec<String>,
    mounts: Vec<BoxMountSpec>,
    policies: Vec<(String, NetworkPolicy)>,
    persisted: Vec<(String, String)>,
    stops: Vec<String>,
    max_execs: usize,
    max_boxes: usize,
}

/// Properties of a recorded command that the agent needs.
struct RecordedStart {
    command_id: CommandId,
    timeout_ms: Option<u64>,
    mode: AgentReply,
}

struct FakeBox {
    box_id: String,
    alive: bool,
    agent: Session,
}

impl Default for FakeBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for FakeBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FakeBackend").field(&self.name).finish()
    }
}

impl FakeBackend {
    /// Creates an available backend named `fake` with network support.
    pub fn new() -> Self {
        Self::named("fake")
    }

    /// Creates the same backend with another name.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.into(),
            inner: Arc::new(Mutex::new(Inner {
                availability: Availability::full(),
                probe_trouble: None,
                capabilities: Capabilities::default().with_network(),
                facts: Facts::default(),
                contract: 2,
                start_troubles: VecDeque::new(),
                persist_error: None,
                persist_time: Duration::ZERO,
                policy_hook: None,
                stop_troubles: VecDeque::new(),
                layer_troubles: VecDeque::new(),
                stopped_kind: LayerKind::Directory,
                health_trouble: None,
                clear_trouble: None,
                next: VecDeque::new(),
                by_text: HashMap::new(),
                computed: None,
                boxes: HashMap::new(),
                volumes: Vec::new(),
                volume_error: None,
                record: Record::default(),
            })),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the reported availability.
    pub fn set_availability(&self, availability: Availability) {
        self.inner().availability = availability;
    }

    /// Sets the behaviour of availability probes; `None` answers normally.
    pub fn set_probe_trouble(&self, trouble: Option<InjectedFault>) {
        self.inner().probe_trouble = trouble;
    }

    /// Sets the capabilities of boxes.
    pub fn set_capabilities(&self, capabilities: Capabilities) {
        self.inner().capabilities = capabilities;
    }

    /// Sets the reported facts of future boxes.
    pub fn set_facts(&self, facts: Facts) {
        self.inner().facts = facts;
    }

    /// Sets the version of the `agent.*` contract that agents report.
    pub fn set_contract(&self, contract: u32) {
        self.inner().contract = contract;
    }

    /// Queues the behaviour of a future start.
    pub fn next_start(&self, trouble: InjectedFault) {
        self.inner().start_troubles.push_back(trouble);
    }

    /// Queues the behaviour of a future stop.
    pub fn next_stop(&self, trouble: InjectedFault) {
        self.inner().stop_troubles.push_back(trouble);
    }

    /// Sets the behaviour of agent health checks; `None` answers normally.
    pub fn set_health_trouble(&self, trouble: Option<InjectedFault>) {
        self.inner().health_trouble = trouble;
    }

    /// Sets the behaviour of agent clear calls; `None` answers normally.
    pub fn set_clear_trouble(&self, trouble: Option<InjectedFault>) {
        self.inner().clear_trouble = trouble;
    }

    /// Sets the time that each write of a record blocks its thread.
    pub fn set_persist_time(&self, time: Duration) {
        self.inner().persist_time = time;
    }

    /// Sets the error of writing a record; `None` succeeds.
    pub fn set_persist_error(&self, error: Option<BoxError>) {
        self.inner().persist_error = error;
    }

    /// Sets a hook that runs before a network policy is applied.
    pub fn before_policy(&self, policy_hook: impl Fn(&NetworkPolicy) + Send + Sync + 'static) {
        self.inner().policy_hook = Some(Arc::new(policy_hook));
    }

    /// Queues the reply to a future command.
    pub fn next_command(&self, reply: Reply) {
        self.inner().next.push_back(reply);
    }

    /// Sets the reply to every command with this text.
    pub fn on_command(&self, text: impl Into<String>, reply: Reply) {
        self.inner().by_text.insert(text.into(), reply);
    }

    /// Sets a function that computes replies from the text of a command.
    pub fn answer_with(&self, answer: impl Fn(&str) -> Reply + Send + Sync + 'static) {
        self.inner().computed = Some(Arc::new(answer));
    }

    /// Marks a box as dead while its agent still listens.
    pub fn kill_box(&self, box_id: &str) {
        for found in self.inner().boxes.values_mut() {
            found.alive &= found.box_id != box_id;
        }
    }

    /// Cuts the connection to the agent of a box, as the death of the agent would.
    pub fn cut_agent(&self, box_id: &str) {
        for found in self.inner().boxes.values() {
            if found.box_id == box_id {
                found.agent.cut();
            }
        }
    }

    /// Returns the number of availability probes.
    pub fn probes(&self) -> usize {
        self.inner().record.probes
    }

    /// Returns the ids of the boxes that were requested, in order.
    pub fn starts(&self) -> Vec<String> {
        self.inner().record.starts.clone()
    }

    /// Returns the specs of the requested boxes, in order.
    pub fn specs(&self) -> Vec<BoxSpec> {
        self.inner().record.specs.clone()
    }

    /// Returns the box id and text of every requested command, in order.
    pub fn execs(&self) -> Vec<(String, String)> {
        let text = |params: &AgentStartParams| agent::text_of(&params.program).to_owned();
        let commands = &self.inner().record.commands;
        commands
            .iter()
            .map(|(box_id, params)| (box_id.to_string(), text(params)))
            .collect()
    }

    /// Returns every command as the agent received it.
    pub fn commands(&self) -> Vec<AgentStartParams> {
        let commands = &self.inner().record.commands;
        commands.iter().map(|(_, params)| params.clone()).collect()
    }

    /// Returns the text of every killed command.
    ///
    /// A dropped call or a timeout kills a command.
    pub fn killed(&self) -> Vec<String> {
        self.inner().record.killed.clone()
    }

    /// Returns the mounts that were added to running boxes.
    pub fn added_mounts(&self) -> Vec<BoxMountSpec> {
        self.inner().record.mounts.clone()
    }

    /// Returns the network policies that were applied, with their box ids, in order.
    pub fn policies(&self) -> Vec<(String, NetworkPolicy)> {
        self.inner().record.policies.clone()
    }

    /// Returns the records that were written, with their box ids, in order.
    pub fn persisted(&self) -> Vec<(String, String)> {
        self.inner().record.persisted.clone()
    }

    fn box_of(&self, id: Uuid) -> Result<String, BoxError> {
        let found = self
            .inner()
            .boxes
            .get(&id)
            .map(|found| found.box_id.clone());
        found.ok_or_else(|| BoxError::unavailable("the box is gone"))
    }

    /// Returns the ids of the boxes that were stopped, in order.
    pub fn stops(&self) -> Vec<String> {
        self.inner().record.stops.clone()
    }

    /// Returns the highest number of concurrent commands in one box.
    pub fn max_concurrent_execs(&self) -> usize {
        self.inner().record.max_execs
    }

    /// Returns the highest number of concurrent boxes.
    pub fn max_concurrent_boxes(&self) -> usize {
        self.inner().record.max_boxes
    }

    /// Returns the number of existing boxes.
    pub fn running(&self) -> usize {
        self.inner().boxes.len()
    }

    /// Stops recording commands, for benchmarks with many of them.
    pub fn forget_commands(&self) {
        self.inner().record.forgets_commands = true;
    }

    fn count_concurrent(&self, commands: usize) {
        let record = &mut self.inner().record;
        record.max_execs = record.max_execs.max(commands);
    }

    fn forgets_commands(&self) -> bool {
        self.inner().record.forgets_commands
    }

    /// Records a command with its whole environment.
    fn record(
        &self,
        box_id: &Arc<str>,
        mut params: AgentStartParams,
        env: &Mutex<Env>,
    ) -> RecordedStart {
        let start = RecordedStart {
            command_id: params.command_id.clone(),
            timeout_ms: params.timeout_ms,
            mode: params.reply,
        };
        let record = &mut self.inner().record;
        if !record.forgets_commands {
            let mut whole = env.lock().unwrap_or_else(PoisonError::into_inner).clone();
            whole.extend(std::mem::take(&mut params.env));
            params.env = whole;
            record.commands.push((Arc::clone(box_id), params));
        }
        start
    }

    fn reply_to(&self, text: &str) -> Reply {
        let mut inner = self.inner();
        if let Some(reply) = inner.next.pop_front() {
            return reply;
        }
        if let Some(reply) = inner.by_text.get(text) {
            return reply.clone();
        }
        let computed = inner.computed.clone();
        drop(inner);
        computed.map_or_else(
            || Reply::stdout(format!("executed: {text}")),
            |answer| answer(text),
        )
    }
}

#[async_trait]
impl Backend for FakeBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        self.inner().capabilities
    }

    async fn availability(&self) -> Availability {
        let trouble = {
            let mut inner = self.inner();
            inner.record.probes += 1;
            inner.probe_trouble.clone()
        };
        if let Err(error) = script::apply(trouble, "probe").await {
            return Availability::unavailable(error.message());
        }
        self.inner().availability.clone()
    }

    async fn start(&self, request: StartRequest<'_>) -> Result<StartedBox, BoxError> {
        let box_id = request.spec.box_id.as_str().to_owned();
        let trouble = {
            let mut inner = self.inner();
            inner.record.starts.push(box_id.clone());
            inner.record.specs.push(request.spec.clone());
            inner.record.volumes.push(request.volumes.to_vec());
            let layers = (request.layers.to_vec(), request.disk.map(Path::to_owned));
            inner.record.layers.push(layers);
            inner.start_troubles.pop_front()
        };
        script::apply(trouble, "start").await?;
        let (near, far) = queue::pair(QUEUE);
        let options = Options {
            limits: Limits::in_process(),
            ..Options::new(Caller::Local)
        };
        let agent = Session::start(far, agent::router(self.clone(), request.spec), options);
        let mut inner = self.inner();
        let started = StartedBox::new(format!("backend-{box_id}"), near);
        let started = started.with_facts(inner.facts.clone());
        let created = FakeBox {
            box_id,
            alive: true,
            agent,
        };
        inner.boxes.insert(request.id, created);
        inner.record.max_boxes = inner.record.max_boxes.max(inner.boxes.len());
        Ok(started)
    }

    fn volumes(&self) -> Option<&dyn Volumes> {
        Some(self)
    }

    async fn alive(&self, id: Uuid) -> bool {
        self.inner().boxes.get(&id).is_some_and(|found| found.alive)
    }

    async fn add_mounts(&self, _: Uuid, mounts: &[BoxMountSpec]) -> Result<(), BoxError> {
        self.inner().record.mounts.extend_from_slice(mounts);
        Ok(())
    }

    fn set_network_policy(&self, id: Uuid, policy: &NetworkPolicy) -> Result<(), BoxError> {
        let box_id = self.box_of(id)?;
        let policy_hook = self.inner().policy_hook.clone();
        if let Some(policy_hook) = policy_hook {
            policy_hook(policy);
        }
        let applied = (box_id, policy.clone());
        self.inner().record.policies.push(applied);
        Ok(())
    }

    fn persist(&self, id: Uuid, record: &str) -> Result<(), BoxError> {
        let box_id = self.box_of(id)?;
        let time = self.inner().persist_time;
        std::thread::sleep(time);
        let mut inner = self.inner();
        if let Some(error) = &inner.persist_error {
            return Err(error.clone());
        }
        inner.record.persisted.push((box_id, record.to_owned()));
        Ok(())
    }

    async fn freeze(&self, id: Uuid, _: bool) -> Result<(), BoxError> {
        // A paused fake agent still answers; callers must not ask it.
        self.box_of(id).map(drop)
    }

    async fn snapshot(&self, id: Uuid, request: SnapshotRequest<'_>) -> Result<Snapshot, BoxError> {
        self.make_snapshot(id, request).await
    }

    async fn stop_into_layer(
        &self,
        id: Uuid,
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        self.make_stopped(id, request).await
    }

    async fn merge_layers(
        &self,
        layers: &[Layer],
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        self.make_merged(layers, request).await
    }

    async fn stop(&self, id: Uuid) -> Result<(), BoxError> {
        let trouble = self.inner().stop_troubles.pop_front();
        script::apply(trouble, "stop").await?;
        let mut inner = self.inner();
        if let Some(gone) = inner.boxes.remove(&id) {
            inner.record.stops.push(gone.box_id);
        }
        Ok(())
    }
}
