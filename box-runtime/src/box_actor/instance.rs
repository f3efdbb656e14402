//! Running instance of a box, if one exists: start, liveness check and stop.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use box_protocol::actions::{AgentHealth, AgentHealthParams, AgentKill, AgentKillParams};
use box_protocol::{BoxError, BoxSpec, Code, CommandId, Invalid};
use box_rpc::{CallError, Codecs, Connection, Limits, Options, Session};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::sync::Notify;
use tokio::time::timeout;
use uuid::Uuid;

use super::queue::{EndReason, Wakeup};
use super::request::Request;
use super::{BoxEntry, Shared};
use crate::adoption::{PendingReach, Unreached};
use crate::audit::{Audit, Earlier};
use crate::backend::Backend;
use crate::box_actor::agent_access::{Agent, box_ended};
use crate::box_actor::entry::Location;
use crate::shm::ShmPool;

/// Version of the `agent.*` contract that this runtime supports.
const AGENT_CONTRACT: u32 = 2;

/// Longest message accepted from an agent.
///
/// It holds both streams of a collected output in base64, or the 10 MiB of values that a run may display. Messages to
/// the agent may be longer.
const AGENT_MESSAGE_BYTES: usize = 12 * 1024 * 1024;

/// Returns the limits of the transport of agent messages.
pub(crate) fn carrier_limits() -> Limits {
    let mut limits = Limits::in_process();
    limits.message_bytes = AGENT_MESSAGE_BYTES;
    limits
}

pub(crate) struct Instance {
    pub(super) shared: Arc<Shared>,
    pub(super) entry: Arc<BoxEntry>,
    pub(super) running: Option<RunningBox>,
    /// Box that is starting or stopping.
    /// The actor stops it even if the caller has stopped waiting.
    pub(super) to_stop: Option<(Arc<dyn Backend>, Uuid)>,
    /// Adopted box that has not been reached yet. Only this task takes the lock.
    pending: Option<Mutex<PendingReach>>,
}

/// Running box.
pub(crate) struct RunningBox {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) id: Uuid,
    pub(super) agent: Session,
    pub(super) shm: Option<ShmPool>,
    pub(super) audit: Audit,
    /// Commands that were running when the runtime connected.
    earlier: Earlier,
    /// Signals the end of a main command that ends the box.
    pub(super) main_ended: Arc<Notify>,
    /// Number of execs since the runtime connected.
    execs: u64,
    boot: Uuid,
}

impl RunningBox {
    /// Connects to the agent of a box and checks its health.
    /// `health` holds the parameters of the health call.
    pub(crate) async fn connect(
        shared: &Shared,
        (backend, id): (&Arc<dyn Backend>, Uuid),
        (connection, shm): (Box<dyn Connection>, Option<ShmPool>),
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
        let agent = Session::start_boxed(connection, shared.empty_router.clone(), options);
        let health = agent.peer().call::<AgentHealth>(health).await;
        let earlier = match health {
            Ok(health) if health.contract == AGENT_CONTRACT => Earlier::of(&health),
            Ok(health) => {
                return Err(BoxError::unavailable(format!(
                    "the box's agent has contract version {}; this runtime requires {AGENT_CONTRACT}",
                    health.contract
                )));
            }
            Err(error) => {
                return Err(BoxError::unavailable(format!(
                    "the box's agent did not answer: {}",
                    error.code()
                )));
            }
        };
        Ok(Self {
            backend: Arc::clone(backend),
            id,
            agent,
            shm,
            audit: Audit::default(),
            earlier,
            main_ended: Arc::default(),
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
            self.agent.peer().expect_silence(true);
        }
        let what = if frozen { "pause" } else { "resume" };
        let freezing = self.backend.freeze(self.id, frozen);
        let done = bounded(&*self.backend, what, limit, freezing).await;
        let done = done.and_then(|done| done);
        let is_frozen = frozen == done.is_ok();
        self.agent.peer().expect_silence(is_frozen);
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
    pub(crate) fn new(shared: Arc<Shared>, entry: Arc<BoxEntry>) -> Self {
        Self {
            shared,
            entry,
            running: None,
            to_stop: None,
            pending: None,
        }
    }

    /// Takes over an adopted box that has been reached.
    pub(super) fn set_running(&mut self, running: RunningBox) {
        (self.pending, self.to_stop) = (None, None);
        self.running = Some(running);
        self.open_access();
        self.watch_main();
    }

    /// Takes over an adopted box that an earlier process was stopping.
    pub(super) fn set_unreached_stopped(&mut self) {
        (self.pending, self.to_stop) = (None, None);
    }

    /// Takes over an adopted box before its agent has answered.
    pub(super) fn reaches(&mut self, unreached: Unreached) {
        let Unreached {
            backend,
            id,
            pending,
        } = unreached;
        self.to_stop = Some((backend, id));
        self.pending = Some(Mutex::new(pending));
    }

    /// Returns whether a call needs an agent that has not answered.
    /// A forced delete does not need the agent.
    pub(super) fn is_unreachable(&self, work: &Request) -> bool {
        let forced = matches!(work, Request::Delete(delete) if delete.force);
        self.pending.is_some() && !forced
    }

    /// Opens the access for calls, if the box is running.
    pub(super) fn open_access(&self) {
        if let Some(running) = &self.running {
            let location = Location {
                backend: Arc::clone(&running.backend),
                id: running.id,
            };
            self.entry.access.set_connected(Agent {
                peer: running.agent.peer(),
                shm: running.shm.clone(),
                location,
                audit: running.audit.clone(),
            });
            let agent = running.agent.peer();
            running.audit.resume(running.earlier, &agent, &self.entry);
        }
    }

    /// Persists the entry with the box.
    /// If that fails, the runtime retries and marks the box as degraded in the meantime.
    pub(super) async fn persist(&self) {
        self.entry.mark_changed();
        if self.entry.wait_persisted().await.is_err() {
            let message = "its record could not be written";
            self.shared.events.record(&self.entry, "degraded", message);
        }
    }

    /// Returns whether commands may be running in the box.
    /// A slow agent counts as busy, because it probably lacks CPU time. A disconnected agent ends
    /// the box elsewhere.
    pub(super) async fn may_be_busy(&self) -> bool {
        let Some(running) = &self.running else {
            return false;
        };
        let (peer, health) = (running.agent.peer(), AgentHealthParams::default());
        let check = timeout(
            self.shared.config.probe_timeout,
            peer.call::<AgentHealth>(&health),
        );
        !matches!(check.await, Ok(Ok(health)) if health.running.is_empty())
    }

    /// Ensures that the box runs with the requested mounts; returns whether it started.
    ///
    /// `pulls_all` says whether the caller may pull every image.
    pub(super) async fn ready(
        &mut self,
        requested: &BoxSpec,
        pulls_all: bool,
    ) -> Result<bool, NotReady> {
        if self.running.is_some() && !self.is_alive().await {
            let why = self.end_reason();
            let why = why
                .as_ref()
                .map_or("its agent has disconnected", BoxError::message);
            let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
            tracing::warn!(%owner, %box_id, why, "the box is dead; starting a new one");
            self.shared.events.record(&self.entry, "failed", why);
            self.shared.ended_boxes.record(&self.entry, why);
            let _ = self.stop().await;
        }
        if self.is_stopped() {
            return Ok(false);
        }
        if self.running.is_none() {
            // Boxed, so that the future of every actor does not reserve space for a start.
            let started = Box::pin(self.start(requested, pulls_all)).await;
            started.map_err(NotReady::Failed)?;
            return Ok(true);
        }
        if self.has_mounts(requested) {
            let mounted = Box::pin(self.mount(requested)).await;
            mounted.map_err(NotReady::Refused)?;
        }
        Ok(false)
    }

    /// Whether the agent of the box is connected.
    pub(crate) fn is_connected(&self) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|running| !running.agent.peer().is_closed())
    }

    pub(super) async fn is_alive(&self) -> bool {
        let Some(running) = &self.running else {
            return false;
        };
        if running.agent.peer().is_closed() {
            return false;
        }
        let limit = self.shared.config.probe_timeout;
        bounded(
            &*running.backend,
            "check",
            limit,
            running.backend.alive(running.id),
        )
        .await
        .unwrap_or(false)
    }

    /// Returns why the box ended by itself, if its backend knows.
    pub(super) fn end_reason(&self) -> Option<BoxError> {
        let running = self.running.as_ref()?;
        running.backend.end_reason(running.id)
    }

    /// Resolves when the agent disconnects or a main command ends the box.
    /// For an unreached box, it resolves when the runtime has reached it or given up.
    pub(super) async fn ended(&mut self) -> Wakeup {
        if let Some(pending) = &mut self.pending {
            let pending = pending.get_mut().unwrap_or_else(PoisonError::into_inner);
            return match pending.await {
                Ok(reached) => Wakeup::Reached(reached),
                Err(reason) => {
                    (self.pending, self.to_stop) = (None, None);
                    Wakeup::Broken(reason.to_owned())
                }
            };
        }
        let Some(running) = &self.running else {
            return std::future::pending().await;
        };
        tokio::select! {
            biased;
            why = running.agent.closed() => Wakeup::Broken(format!("the box's agent has disconnected: {why}")),
            () = running.main_ended.notified() => Wakeup::End(EndReason::MainEnded),
        }
    }

    /// Waits until all processes of an exec are gone.
    /// The next exec must not meet them. The error is the reason why the agent could not kill them.
    pub(super) async fn confirm_killed(&self, command_id: &CommandId) -> Result<(), String> {
        let Some(running) = &self.running else {
            return Ok(());
        };
        let params = AgentKillParams {
            command_id: command_id.clone(),
            signal: "KILL".to_owned(),
            grace_ms: 0,
            forget: false,
        };
        let peer = running.agent.peer();
        // No response reports the end of this command.
        running.audit.expect(&peer, &self.entry);
        let killed = peer.call::<AgentKill>(&params);
        match timeout(self.shared.config.stop_timeout, killed).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(CallError::Refused(error))) if error.code() == Code::NotFound => Ok(()),
            Ok(Err(error)) => Err(format!(
                "the box's agent could not kill a command: {}",
                error.code()
            )),
            Err(_) => Err("the box's agent did not kill a command in time".to_owned()),
        }
    }

    /// Stops the box or aborts its start.
    /// The future is boxed, because many functions await it and it rarely runs.
    pub(crate) fn stop(&mut self) -> BoxFuture<'_, Result<(), BoxError>> {
        self.entry.clear_location();
        self.pending = None;
        if let Some(running) = self.running.take() {
            self.entry.access.close(box_ended());
            running.agent.cut();
            self.to_stop = Some((running.backend, running.id));
        }
        async move {
            let Some((backend, id)) = self.to_stop.clone() else {
                self.entry.status().uses.clear();
                return Ok(());
            };
            let limit = self.shared.config.stop_timeout;
            let stopped = bounded(&*backend, "end", limit, backend.stop(id)).await;
            self.to_stop = None;
            self.entry.status().uses.clear();
            let stopped = stopped.and_then(|stopped| stopped);
            if let Ok(()) = stopped {
                self.shared.images.release(id);
            }
            if let Err(error) = &stopped {
                let (owner, box_id) = (&self.entry.owner, &self.entry.spec.box_id);
                tracing::error!(%owner, %box_id, backend_id = %id, %error, "cannot stop the box");
            }
            stopped
        }
        .boxed()
    }
}

/// Runs a backend call with a timeout and turns a panic into an error.
pub(crate) async fn bounded<T>(
    backend: &dyn Backend,
    what: &str,
    limit: Duration,
    call: impl Future<Output = T>,
) -> Result<T, BoxError> {
    match timeout(limit, AssertUnwindSafe(call).catch_unwind()).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(_)) => Err(BoxError::internal(format!(
            "backend {} panicked: it could not {what} the box",
            backend.name()
        ))),
        Err(_) => Err(BoxError::timeout(format!(
            "backend {} did not {what} the box within {} s",
            backend.name(),
            limit.as_secs_f64()
        ))),
    }
}
