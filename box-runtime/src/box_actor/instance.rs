//! Running instance of a box, if one exists: start, liveness check and stop.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use box_protocol::actions::{AgentHealth, AgentHealthParams, AgentKill, AgentKillParams};
use box_protocol::{
    BoxError, BoxSpec, BoxState, Code, CommandId, Env, Invalid, UnixMs, default_path,
};
use box_rpc::{CallError, Codecs, Connection, Limits, Options, Session};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::sync::Notify;
use tokio::time::timeout;
use uuid::Uuid;

use super::mounts::mounted;
use super::queue::{EndReason, Wakeup};
use super::request::Request;
use super::{BoxEntry, Shared};
use crate::adoption::{Coming, Unreached};
use crate::audit::{Audit, Earlier};
use crate::backend::{Backend, StartRequest, StartedBox, guest_of};
use crate::box_actor::agent_access::{Agent, ended};
use crate::box_actor::entry::{Mounts, Place};
use crate::shm::ShmPool;

/// Version of the `agent.*` contract that this runtime supports.
const AGENT_CONTRACT: u32 = 1;

/// Longest message accepted from an agent.
///
/// It holds both streams of a collected output in base64. Messages to the agent may be longer.
const AGENT_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// Returns the limits of the transport of agent messages.
pub(crate) fn carrier_limits() -> Limits {
    let mut limits = Limits::in_process();
    limits.message_bytes = AGENT_MESSAGE_BYTES;
    limits
}

/// Returns the default environment of the commands in a box.
///
/// It contains nothing of the runtime's environment. The system directories are read-only, so
/// `pip install` and `npm install -g` install into Python's default user directory.
fn environment(spec: &BoxSpec) -> Result<Env, Invalid> {
    let (user, home) = guest_of(spec);
    let own = format!("{}/.local", home.trim_end_matches('/'));
    let path = default_path(home);
    let mut env = Env::new();
    for (name, value) in [
        ("PATH", path.as_str()),
        ("HOME", home),
        ("USER", user),
        ("LANG", "C.UTF-8"),
        ("TERM", "dumb"),
        // Disables Debian's protection of packaged Python modules (PEP 668); they are read-only anyway.
        ("PIP_BREAK_SYSTEM_PACKAGES", "1"),
        ("NPM_CONFIG_PREFIX", own.as_str()),
    ] {
        env.insert(name, value)?;
    }
    Ok(env)
}

pub(super) struct Instance {
    pub(super) shared: Arc<Shared>,
    pub(super) entry: Arc<BoxEntry>,
    pub(super) living: Option<RunningBox>,
    /// Box that is starting or stopping.
    /// The actor stops it even if the caller has stopped waiting.
    unstopped: Option<(Arc<dyn Backend>, Uuid)>,
    /// Adopted box that has not been reached yet. Only this task takes the lock.
    coming: Option<Mutex<Coming>>,
}

/// Running box.
pub(crate) struct RunningBox {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) id: Uuid,
    pub(super) agent: Session,
    pub(super) spool: Option<ShmPool>,
    /// Whether the agent supports file transfer through slots; older agents do not.
    spools_files: bool,
    pub(super) audit: Audit,
    /// Commands that were running when the runtime connected.
    earlier: Earlier,
    /// Signals the end of a main command that ends the box.
    pub(super) over: Arc<Notify>,
    /// Number of execs since the runtime connected.
    execs: u64,
    boot: Uuid,
}

impl RunningBox {
    /// Connects to the agent of a box and checks its health.
    /// `health` holds the parameters of the health call.
    pub(crate) async fn meet(
        shared: &Shared,
        (backend, id): (&Arc<dyn Backend>, Uuid),
        (connection, spool): (Box<dyn Connection>, Option<ShmPool>),
        health: &AgentHealthParams,
    ) -> Result<Self, BoxError> {
        let mut limits = Limits::in_process();
        limits.heartbeat = shared.config.agent_heartbeat;
        limits.in_flight = 4;
        limits.open_streams = 0;
        let options = Options {
            limits,
            codecs: Codecs::JSON_RPC,
            ..Options::client()
        };
        let agent = Session::start_boxed(connection, shared.nothing.clone(), options);
        let health = agent.peer().call::<AgentHealth>(health).await;
        let (spools_files, earlier) = match health {
            Ok(health) if health.contract == AGENT_CONTRACT => {
                (health.spools_files, Earlier::of(&health))
            }
            Ok(health) => {
                return Err(BoxError::unavailable(format!(
                    "the box's agent speaks contract {}, not {AGENT_CONTRACT}",
                    health.contract
                )));
            }
            Err(error) => {
                return Err(BoxError::unavailable(format!(
                    "the box's agent does not answer: {}",
                    error.code()
                )));
            }
        };
        Ok(Self {
            backend: Arc::clone(backend),
            id,
            agent,
            spool,
            spools_files,
            audit: Audit::default(),
            earlier,
            over: Arc::default(),
            execs: 0,
            boot: Uuid::now_v7(),
        })
    }

    /// Returns a unique command id for the next exec.
    pub(super) fn next_exec(&mut self) -> Result<CommandId, Invalid> {
        self.execs += 1;
        CommandId::new(format!("exec-{}-{}", self.boot.simple(), self.execs))
    }

    /// Pauses or resumes all processes of the box.
    /// While the box is paused, the runtime does not treat a silent agent as gone.
    pub(crate) async fn freeze(&self, limit: Duration, frozen: bool) -> Result<(), BoxError> {
        if frozen {
            self.agent.expect_silence(true);
        }
        let what = if frozen { "pause" } else { "resume" };
        let freezing = self.backend.freeze(self.id, frozen);
        let done = bounded(&*self.backend, what, limit, freezing).await;
        let done = done.and_then(|done| done);
        let stands_still = frozen == done.is_ok();
        self.agent.expect_silence(stands_still);
        done
    }
}

/// Reason why a call cannot use the box.
pub(super) enum NotReady {
    /// The box exists but does not accept this call.
    Refused(BoxError),
    /// The box does not exist.
    Failed(BoxError),
}

impl Instance {
    pub(super) fn new(shared: Arc<Shared>, entry: Arc<BoxEntry>) -> Self {
        Self {
            shared,
            entry,
            living: None,
            unstopped: None,
            coming: None,
        }
    }

    /// Takes over an adopted box that has been reached.
    pub(super) fn is_in(&mut self, living: RunningBox) {
        (self.coming, self.unstopped) = (None, None);
        self.living = Some(living);
        self.open_door();
        self.watch_main();
    }

    /// Takes over an adopted box before its agent has answered.
    pub(super) fn reaches(&mut self, unreached: Unreached) {
        let Unreached {
            backend,
            id,
            coming,
        } = unreached;
        self.unstopped = Some((backend, id));
        self.coming = Some(Mutex::new(coming));
    }

    /// Returns whether a call needs an agent that has not answered.
    /// A forced delete does not need the agent.
    pub(super) fn is_out_of_reach(&self, work: &Request) -> bool {
        let forced = matches!(work, Request::Delete(delete) if delete.force);
        self.coming.is_some() && !forced
    }

    /// Opens the access for calls, if the box is running.
    pub(super) fn open_door(&self) {
        if let Some(living) = &self.living {
            let place = Place {
                backend: Arc::clone(&living.backend),
                id: living.id,
            };
            self.entry.access.open(Agent {
                peer: living.agent.peer(),
                spool: living.spool.clone(),
                spools_files: living.spools_files,
                place,
                audit: living.audit.clone(),
            });
            let agent = living.agent.peer();
            living.audit.resume(living.earlier, &agent, &self.entry);
        }
    }

    /// Persists the entry with the box.
    /// If that fails, the runtime retries and marks the box as degraded in the meantime.
    pub(super) async fn keep(&self) {
        self.entry.changed();
        if self.entry.kept().await.is_err() {
            let without = "without a record of what has changed";
            self.shared.events.tell(&self.entry, "degraded", without);
        }
    }

    /// Returns whether commands may be running in the box.
    /// A slow agent counts as busy, because it probably lacks CPU time. A disconnected agent ends
    /// the box elsewhere.
    pub(super) async fn may_be_busy(&self) -> bool {
        let Some(living) = &self.living else {
            return false;
        };
        let (peer, health) = (living.agent.peer(), AgentHealthParams::default());
        let asked = timeout(
            self.shared.config.probe_timeout,
            peer.call::<AgentHealth>(&health),
        );
        !matches!(asked.await, Ok(Ok(health)) if health.running.is_empty())
    }

    /// Ensures that the box runs with the requested mounts; returns whether it started.
    pub(super) async fn ready(&mut self, asked: &BoxSpec) -> Result<bool, NotReady> {
        if self.living.is_some() && !self.is_alive().await {
            let why = self.why_gone();
            let why = why.as_ref().map_or("its agent is gone", BoxError::message);
            let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
            tracing::warn!(%owner, %box_id, why, "the box is dead; making another");
            self.shared.events.tell(&self.entry, "failed", why);
            self.shared.ends.ended(&self.entry, why);
            let _ = self.stop().await;
        }
        if self.living.is_none() {
            // Boxed, so that the future of every actor does not reserve space for a start.
            let started = Box::pin(self.start(asked)).await;
            started.map_err(NotReady::Failed)?;
            return Ok(true);
        }
        if self.has_mounts(asked) {
            let mounted = Box::pin(self.mount(asked)).await;
            mounted.map_err(NotReady::Refused)?;
        }
        Ok(false)
    }

    async fn is_alive(&self) -> bool {
        let Some(living) = &self.living else {
            return false;
        };
        if living.agent.peer().is_closed() {
            return false;
        }
        let limit = self.shared.config.probe_timeout;
        bounded(
            &*living.backend,
            "look after",
            limit,
            living.backend.alive(living.id),
        )
        .await
        .unwrap_or(false)
    }

    /// Returns why the box ended by itself, if its backend knows.
    pub(super) fn why_gone(&self) -> Option<BoxError> {
        let living = self.living.as_ref()?;
        living.backend.why_gone(living.id)
    }

    /// Resolves when the agent disconnects or a main command ends the box.
    /// For an unreached box, it resolves when the runtime has reached it or given up.
    pub(super) async fn ended(&mut self) -> Wakeup {
        if let Some(coming) = &mut self.coming {
            let coming = coming.get_mut().unwrap_or_else(PoisonError::into_inner);
            return match coming.await {
                Ok(living) => Wakeup::Reached(living),
                Err(gone) => {
                    (self.coming, self.unstopped) = (None, None);
                    Wakeup::Broken(gone.to_owned())
                }
            };
        }
        let Some(living) = &self.living else {
            return std::future::pending().await;
        };
        tokio::select! {
            biased;
            why = living.agent.closed() => Wakeup::Broken(format!("the box's agent is gone: {why}")),
            () = living.over.notified() => Wakeup::EndReason(EndReason::Done),
        }
    }

    async fn start(&mut self, asked: &BoxSpec) -> Result<(), BoxError> {
        let choice = self.shared.selector.choose().await;
        let backend = choice.backend_for(asked)?;
        let again = self.announce(backend);
        let id = Uuid::now_v7();
        self.unstopped = Some((Arc::clone(backend), id));
        // A restarted box keeps its original spec except for the mounts. Only the mounts of this
        // call have been authorized now.
        let remade = again.then(|| {
            let mut spec = self.entry.spec.clone();
            spec.extra_mounts.clone_from(&asked.extra_mounts);
            spec
        });
        let spec = remade.as_ref().unwrap_or(asked);
        let limit = self.shared.config.start_timeout;
        let making = self.make(backend, id, spec);
        let made = bounded(&**backend, "start", limit, making).await;
        let (living, started) = match made.and_then(|made| made) {
            Ok(made) => made,
            Err(error) => {
                let _ = self.stop().await;
                return Err(error);
            }
        };
        self.unstopped = None;
        self.living = Some(living);
        if let Err(error) = self.enter_main().await {
            let _ = self.stop().await;
            return Err(error);
        }
        let now = UnixMs::now();
        {
            let mut live = self.entry.live();
            live.state = BoxState::Running;
            live.backend_id = started.0;
            live.facts = started.1;
            live.last_used_at = now;
            live.created_at = now;
        }
        // A later process could not adopt a box without a record.
        self.entry.changed();
        if let Err(error) = self.entry.kept().await {
            let _ = self.stop().await;
            return Err(error);
        }
        let degraded = self.entry.live().facts.degraded.join(", ");
        self.shared.events.tell(&self.entry, "started", "");
        if !degraded.is_empty() {
            let less = format!("without {degraded}");
            self.shared.events.tell(&self.entry, "degraded", &less);
        }
        self.open_door();
        Ok(())
    }

    /// Records that this backend starts the box; returns whether it is a restart.
    fn announce(&self, backend: &Arc<dyn Backend>) -> bool {
        self.entry.access.opening();
        let mut live = self.entry.live();
        let again = !live.backend_name.is_empty();
        live.state = BoxState::Starting;
        live.reason = None;
        live.backend_name = backend.name().into();
        again
    }

    /// Starts the box with the backend and connects to its agent.
    async fn make(
        &self,
        backend: &Arc<dyn Backend>,
        id: Uuid,
        spec: &BoxSpec,
    ) -> Result<(RunningBox, (String, crate::Facts)), BoxError> {
        let StartedBox {
            backend_id,
            connection,
            facts,
            shm: spool,
        } = backend.start(StartRequest::new(id, spec)).await?;
        let defaults = self.entry.live().defaults.clone();
        let health = AgentHealthParams {
            env: Some(environment(spec)?),
            cwd: defaults
                .and_then(|defaults| defaults.cwd)
                .or_else(|| Some(spec.mount_path.clone())),
            file_bytes: spec.file_bytes(),
        };
        let way = (connection, spool);
        let living = RunningBox::meet(&self.shared, (backend, id), way, &health).await?;
        let mounts = Mounts {
            asked: mounted(&spec.extra_mounts).cloned().collect(),
            added: Vec::new(),
        };
        let backend = Arc::clone(backend);
        self.entry.is_at(Place { backend, id }, mounts)?;
        Ok((living, (backend_id, facts)))
    }

    /// Waits until all processes of an exec are gone.
    /// The next exec must not meet them. The error is the reason why the agent could not kill them.
    pub(super) async fn confirm_killed(&self, command_id: &CommandId) -> Result<(), String> {
        let Some(living) = &self.living else {
            return Ok(());
        };
        let params = AgentKillParams {
            command_id: command_id.clone(),
            signal: "KILL".to_owned(),
            grace_ms: 0,
            forget: false,
        };
        let peer = living.agent.peer();
        // No response reports the end of this command.
        living.audit.expect(&peer, &self.entry);
        let killed = peer.call::<AgentKill>(&params);
        match timeout(self.shared.config.stop_timeout, killed).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(CallError::Refused(error))) if error.code() == Code::NotFound => Ok(()),
            Ok(Err(error)) => Err(format!("the box's agent cannot kill: {}", error.code())),
            Err(_) => Err("the box's agent does not kill in time".to_owned()),
        }
    }

    /// Stops the box or aborts its start.
    /// The future is boxed, because many functions await it and it rarely runs.
    pub(super) fn stop(&mut self) -> BoxFuture<'_, Result<(), BoxError>> {
        self.entry.is_gone();
        self.coming = None;
        if let Some(living) = self.living.take() {
            self.entry.access.shut(ended());
            living.agent.cut();
            self.unstopped = Some((living.backend, living.id));
        }
        async move {
            let Some((backend, id)) = self.unstopped.clone() else {
                return Ok(());
            };
            let limit = self.shared.config.stop_timeout;
            let stopped = bounded(&*backend, "end", limit, backend.stop(id)).await;
            self.unstopped = None;
            let stopped = stopped.and_then(|stopped| stopped);
            if let Err(error) = &stopped {
                let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
                tracing::error!(%owner, %box_id, backend_id = %id, %error, "the box was not stopped");
            }
            stopped
        }
        .boxed()
    }
}

/// Runs a backend call with a timeout and turns a panic into an error.
pub(super) async fn bounded<T>(
    backend: &dyn Backend,
    what: &str,
    limit: Duration,
    call: impl Future<Output = T>,
) -> Result<T, BoxError> {
    match timeout(limit, AssertUnwindSafe(call).catch_unwind()).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(_)) => Err(BoxError::internal(format!(
            "backend {} failed unexpectedly: it could not {what} the box",
            backend.name()
        ))),
        Err(_) => Err(BoxError::timeout(format!(
            "backend {} did not {what} the box within {} s",
            backend.name(),
            limit.as_secs_f64()
        ))),
    }
}
