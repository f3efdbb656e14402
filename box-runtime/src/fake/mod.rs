//! A backend for tests: no process is ever started. Its boxes are agents at the far end of a queue
//! that answer from a script, so everything above the agent is the real thing.
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
mod script;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use box_protocol::actions::{AgentReply, AgentStartParams};
use box_protocol::{BoxError, BoxMountSpec, BoxSpec, CommandId, Env, NetworkPolicy};
use box_rpc::{Caller, Limits, Options, Session};
use box_transports::queue;
use uuid::Uuid;

pub use self::script::{Reply, Trouble};
use crate::backend::{Availability, Backend, Capabilities, Facts, StartRequest, StartedBox};

/// Messages each way between a runtime and a fake agent.
const QUEUE: usize = 16;

/// The longest that counts as for ever.
const FOR_EVER: Duration = Duration::from_hours(24 * 365);

type Answer = dyn Fn(&str) -> Reply + Send + Sync;

type Meanwhile = dyn Fn(&NetworkPolicy) + Send + Sync;

/// A backend that makes nothing and remembers everything. Clones are the same backend.
///
/// A command's [`Reply`] is the first of: what was put in the queue by
/// [`next_command`](Self::next_command), what [`on_command`](Self::on_command) says for its text,
/// what [`answer_with`](Self::answer_with) computes, and `executed: <command>`.
#[derive(Clone)]
pub struct FakeBackend {
    name: Arc<str>,
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    availability: Availability,
    probe_trouble: Option<Trouble>,
    capabilities: Capabilities,
    facts: Facts,
    contract: u32,
    start_troubles: VecDeque<Trouble>,
    keep_error: Option<BoxError>,
    meanwhile: Option<Arc<Meanwhile>>,
    stop_troubles: VecDeque<Trouble>,
    health_trouble: Option<Trouble>,
    clear_trouble: Option<Trouble>,
    next: VecDeque<Reply>,
    by_text: HashMap<String, Reply>,
    computed: Option<Arc<Answer>>,
    boxes: HashMap<Uuid, FakeBox>,
    record: Record,
}

#[derive(Default)]
struct Record {
    probes: usize,
    starts: Vec<String>,
    specs: Vec<BoxSpec>,
    commands: Vec<(Arc<str>, AgentStartParams)>,
    forgets_commands: bool,
    killed: Vec<String>,
    mounts: Vec<BoxMountSpec>,
    policies: Vec<(String, NetworkPolicy)>,
    kept: Vec<(String, String)>,
    stops: Vec<String>,
    most_execs: usize,
    most_boxes: usize,
}

/// What an agent must know of a command after it was recorded.
struct Asked {
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
    /// One that is available, called `fake`, whose boxes reach a network.
    pub fn new() -> Self {
        Self::named("fake")
    }

    /// The same with this name.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.into(),
            inner: Arc::new(Mutex::new(Inner {
                availability: Availability::full(),
                probe_trouble: None,
                capabilities: Capabilities::default().with_network(),
                facts: Facts::default(),
                contract: 1,
                start_troubles: VecDeque::new(),
                keep_error: None,
                meanwhile: None,
                stop_troubles: VecDeque::new(),
                health_trouble: None,
                clear_trouble: None,
                next: VecDeque::new(),
                by_text: HashMap::new(),
                computed: None,
                boxes: HashMap::new(),
                record: Record::default(),
            })),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it says of itself from now on.
    pub fn set_availability(&self, availability: Availability) {
        self.inner().availability = availability;
    }

    /// What happens whenever it is asked whether it is available; `None` for an answer.
    pub fn set_probe_trouble(&self, trouble: Option<Trouble>) {
        self.inner().probe_trouble = trouble;
    }

    /// What its boxes can do from now on.
    pub fn set_capabilities(&self, capabilities: Capabilities) {
        self.inner().capabilities = capabilities;
    }

    /// What it says of the boxes it makes from now on.
    pub fn set_facts(&self, facts: Facts) {
        self.inner().facts = facts;
    }

    /// The version of `agent.*` its agents claim to speak from now on.
    pub fn set_contract(&self, contract: u32) {
        self.inner().contract = contract;
    }

    /// What happens at the next start for which nothing is planned yet.
    pub fn next_start(&self, trouble: Trouble) {
        self.inner().start_troubles.push_back(trouble);
    }

    /// What happens at the next stop for which nothing is planned yet.
    pub fn next_stop(&self, trouble: Trouble) {
        self.inner().stop_troubles.push_back(trouble);
    }

    /// What happens whenever an agent is asked how it is; `None` for an answer.
    pub fn set_health_trouble(&self, trouble: Option<Trouble>) {
        self.inner().health_trouble = trouble;
    }

    /// What happens whenever an agent is asked to end all that runs in its box; `None` if it does.
    pub fn set_clear_trouble(&self, trouble: Option<Trouble>) {
        self.inner().clear_trouble = trouble;
    }

    /// What keeping a record fails with from now on; `None` if it does not.
    pub fn set_keep_error(&self, error: Option<BoxError>) {
        self.inner().keep_error = error;
    }

    /// Does this whenever a policy for the network is to be applied, before it is.
    pub fn before_policy(&self, meanwhile: impl Fn(&NetworkPolicy) + Send + Sync + 'static) {
        self.inner().meanwhile = Some(Arc::new(meanwhile));
    }

    /// The reply to the next command for which none is planned yet.
    pub fn next_command(&self, reply: Reply) {
        self.inner().next.push_back(reply);
    }

    /// The reply to every command with this text.
    pub fn on_command(&self, text: impl Into<String>, reply: Reply) {
        self.inner().by_text.insert(text.into(), reply);
    }

    /// Computes the reply to a command from its text.
    pub fn answer_with(&self, answer: impl Fn(&str) -> Reply + Send + Sync + 'static) {
        self.inner().computed = Some(Arc::new(answer));
    }

    /// From now on the box of this session is dead, though its agent still listens.
    pub fn kill_box(&self, box_id: &str) {
        for found in self.inner().boxes.values_mut() {
            found.alive &= found.box_id != box_id;
        }
    }

    /// Cuts the connection to this session's agent, as its death would.
    pub fn cut_agent(&self, box_id: &str) {
        for found in self.inner().boxes.values() {
            if found.box_id == box_id {
                found.agent.cut();
            }
        }
    }

    /// How often it was asked whether it is available.
    pub fn probes(&self) -> usize {
        self.inner().record.probes
    }

    /// The sessions for which it was asked to start a box, in order.
    pub fn starts(&self) -> Vec<String> {
        self.inner().record.starts.clone()
    }

    /// The spec of each of those.
    pub fn specs(&self) -> Vec<BoxSpec> {
        self.inner().record.specs.clone()
    }

    /// The session and text of every command its agents were asked to run, in order.
    pub fn execs(&self) -> Vec<(String, String)> {
        let text = |params: &AgentStartParams| agent::text_of(&params.program).to_owned();
        let commands = &self.inner().record.commands;
        commands
            .iter()
            .map(|(box_id, params)| (box_id.to_string(), text(params)))
            .collect()
    }

    /// Every command as its agent was asked for it.
    pub fn commands(&self) -> Vec<AgentStartParams> {
        let commands = &self.inner().record.commands;
        commands.iter().map(|(_, params)| params.clone()).collect()
    }

    /// The text of every command that was killed: its call was dropped, or its time was over.
    pub fn killed(&self) -> Vec<String> {
        self.inner().record.killed.clone()
    }

    /// The mounts that were added to living boxes.
    pub fn added_mounts(&self) -> Vec<BoxMountSpec> {
        self.inner().record.mounts.clone()
    }

    /// The policies for the network that were applied, with the session of each, in order.
    pub fn policies(&self) -> Vec<(String, NetworkPolicy)> {
        self.inner().record.policies.clone()
    }

    /// The records that were kept, with the session of each, in order.
    pub fn kept(&self) -> Vec<(String, String)> {
        self.inner().record.kept.clone()
    }

    fn box_of(&self, id: Uuid) -> Result<String, BoxError> {
        let found = self
            .inner()
            .boxes
            .get(&id)
            .map(|found| found.box_id.clone());
        found.ok_or_else(|| BoxError::unavailable("the box is gone"))
    }

    /// The sessions whose box it has stopped, in order.
    pub fn stops(&self) -> Vec<String> {
        self.inner().record.stops.clone()
    }

    /// The most commands that one box had at once.
    pub fn most_execs_at_once(&self) -> usize {
        self.inner().record.most_execs
    }

    /// The most boxes there were at once.
    pub fn most_boxes_at_once(&self) -> usize {
        self.inner().record.most_boxes
    }

    /// How many boxes exist.
    pub fn running(&self) -> usize {
        self.inner().boxes.len()
    }

    /// Keeps no record of commands from now on: for measurements with very many of them.
    pub fn forget_commands(&self) {
        self.inner().record.forgets_commands = true;
    }

    fn has_at_once(&self, commands: usize) {
        let record = &mut self.inner().record;
        record.most_execs = record.most_execs.max(commands);
    }

    fn forgets_commands(&self) -> bool {
        self.inner().record.forgets_commands
    }

    /// Keeps a command, with its whole environment.
    fn record(&self, box_id: &Arc<str>, mut params: AgentStartParams, env: &Mutex<Env>) -> Asked {
        let asked = Asked {
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
        asked
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
        if let Err(error) = script::meet(trouble, "probe").await {
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
            inner.start_troubles.pop_front()
        };
        script::meet(trouble, "start").await?;
        let (near, far) = queue::pair(QUEUE);
        let options = Options {
            limits: Limits::in_process(),
            ..Options::new(Caller::Local)
        };
        let agent = Session::start(far, agent::router(self.clone(), request.spec), options);
        let mut inner = self.inner();
        let started = StartedBox::new(format!("backend-{box_id}"), near);
        let started = started.with_facts(inner.facts.clone());
        let made = FakeBox {
            box_id,
            alive: true,
            agent,
        };
        inner.boxes.insert(request.id, made);
        inner.record.most_boxes = inner.record.most_boxes.max(inner.boxes.len());
        Ok(started)
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
        let meanwhile = self.inner().meanwhile.clone();
        if let Some(meanwhile) = meanwhile {
            meanwhile(policy);
        }
        let applied = (box_id, policy.clone());
        self.inner().record.policies.push(applied);
        Ok(())
    }

    fn keep(&self, id: Uuid, record: &str) -> Result<(), BoxError> {
        let box_id = self.box_of(id)?;
        let mut inner = self.inner();
        if let Some(error) = &inner.keep_error {
            return Err(error.clone());
        }
        inner.record.kept.push((box_id, record.to_owned()));
        Ok(())
    }

    async fn freeze(&self, id: Uuid, _: bool) -> Result<(), BoxError> {
        // What is frozen here says nothing less; nobody is to ask it.
        self.box_of(id).map(drop)
    }

    async fn stop(&self, id: Uuid) -> Result<(), BoxError> {
        let trouble = self.inner().stop_troubles.pop_front();
        script::meet(trouble, "stop").await?;
        let mut inner = self.inner();
        if let Some(gone) = inner.boxes.remove(&id) {
            inner.record.stops.push(gone.box_id);
        }
        Ok(())
    }
}
