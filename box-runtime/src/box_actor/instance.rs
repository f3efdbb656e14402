//! The box behind a session, if there is one now.

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

/// The version of `agent.*` this runtime speaks.
const AGENT_CONTRACT: u32 = 1;

/// The longest message of an agent: both streams of a collected output, in base64, and some. It is sent longer ones, as long
/// as what callers may send.
const AGENT_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// The limits of what carries the messages of an agent.
pub(crate) fn carrier_limits() -> Limits {
    let mut limits = Limits::in_process();
    limits.message_bytes = AGENT_MESSAGE_BYTES;
    limits
}

/// What every command of a box finds in its environment. Nothing of the runtime's own gets in. The system directories of a box
/// are for reading only, so what `pip install` and `npm install -g` install goes where Python's own default for a user is.
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
        // Debian's mark of a Python that its packages own (PEP 668). There is nothing of theirs that a guest could break.
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
    /// A box that is being made or ended, so that it is stopped even if nobody waits for that any
    /// more.
    unstopped: Option<(Arc<dyn Backend>, Uuid)>,
    /// A box that was adopted and not reached yet. Only this task has the lock.
    coming: Option<Mutex<Coming>>,
}

/// A box that runs.
pub(crate) struct RunningBox {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) id: Uuid,
    pub(super) agent: Session,
    pub(super) spool: Option<ShmPool>,
    /// Whether the agent can move files through slots; one of an older make cannot.
    spools_files: bool,
    pub(super) audit: Audit,
    /// The commands it had when it was met.
    earlier: Earlier,
    /// Told once the command has ended that the box ends with.
    pub(super) over: Arc<Notify>,
    /// Execs so far, since this.
    execs: u64,
    boot: Uuid,
}

impl RunningBox {
    /// Hears the agent of a box; `health` is what it is told.
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

    /// An id for the next exec, which no other command of the box has.
    pub(super) fn next_exec(&mut self) -> Result<CommandId, Invalid> {
        self.execs += 1;
        CommandId::new(format!("exec-{}-{}", self.boot.simple(), self.execs))
    }

    /// Stops everything in it, or lets that go on. An agent that stands still is not one that is gone.
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

/// Why there is no box for a call.
pub(super) enum NotReady {
    /// There is one, but not for this call.
    Refused(BoxError),
    /// There is none.
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

    /// This is the box, which was adopted.
    pub(super) fn is_in(&mut self, living: RunningBox) {
        (self.coming, self.unstopped) = (None, None);
        self.living = Some(living);
        self.open_door();
        self.watch_main();
    }

    /// The box was adopted, and its agent is waited for.
    pub(super) fn reaches(&mut self, unreached: Unreached) {
        let Unreached {
            backend,
            id,
            coming,
        } = unreached;
        self.unstopped = Some((backend, id));
        self.coming = Some(Mutex::new(coming));
    }

    /// Whether this call needs an agent that does not answer. A delete that waits for nothing does not.
    pub(super) fn is_out_of_reach(&self, work: &Request) -> bool {
        let forced = matches!(work, Request::Delete(delete) if delete.force);
        self.coming.is_some() && !forced
    }

    /// Lets calls in, if there is a box.
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

    /// Keeps what is on the entry with the box, for a later process. What cannot be kept now is tried again, and the entry says so
    /// meanwhile.
    pub(super) async fn keep(&self) {
        self.entry.changed();
        if self.entry.kept().await.is_err() {
            let without = "without a record of what has changed";
            self.shared.events.tell(&self.entry, "degraded", without);
        }
    }

    /// Whether commands run in the box, or may: an agent that is slow to say so is in want of processor time, and one that is gone
    /// ends the session by that.
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

    /// Sees to it that the box lives and has what is asked for. Whether it was started for that.
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
            // Boxed: what a start needs is not kept room for in every session.
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

    /// Why the box ended by itself, if its backend knows.
    pub(super) fn why_gone(&self) -> Option<BoxError> {
        let living = self.living.as_ref()?;
        living.backend.why_gone(living.id)
    }

    /// Resolves when the agent is gone, which it is not supposed to be, or the command is that the box ends with; of a box that
    /// was not reached yet, when that is decided.
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
        // A box made again is what it was when it was made first, but for its mounts: only those of this
        // call have been decided on just now.
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
        // A box without a record is one that nobody would know again.
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

    /// Notes on the entry that this backend starts the box. Whether there was one before.
    fn announce(&self, backend: &Arc<dyn Backend>) -> bool {
        self.entry.access.opening();
        let mut live = self.entry.live();
        let again = !live.backend_name.is_empty();
        live.state = BoxState::Starting;
        live.reason = None;
        live.backend_name = backend.name().into();
        again
    }

    /// Lets the backend make the box, and hears its agent.
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
            spool,
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

    /// Waits until nothing is left of an exec, so that the next one does not meet its processes. The reason if the agent
    /// cannot end it.
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
        // No answer tells its end.
        living.audit.expect(&peer, &self.entry);
        let killed = peer.call::<AgentKill>(&params);
        match timeout(self.shared.config.stop_timeout, killed).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(CallError::Refused(error))) if error.code() == Code::NotFound => Ok(()),
            Ok(Err(error)) => Err(format!("the box's agent cannot kill: {}", error.code())),
            Err(_) => Err("the box's agent does not kill in time".to_owned()),
        }
    }

    /// Ends the box, or what was begun of one. Boxed, as it is awaited in many places and rarely.
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

/// A backend's call that may neither hang nor panic, as far as anybody else can tell.
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
