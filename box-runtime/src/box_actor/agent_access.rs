//! Concurrent access of calls to the agent of a box.
//!
//! These calls bypass the actor's queue and may overlap with execs and with each other. A lease
//! keeps the box in use, unless it only queries the agent.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use box_protocol::error::{Detail, Ended, Subject, with_end};
use box_protocol::{Access, BoxError, BoxSpec, BoxState, Code, Defaults};
use box_rpc::Peer;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout};

use crate::audit::Audit;
use crate::box_actor::entry::{BoxEntry, Location};
use crate::shm::{ShmPool, ShmSlot};
use crate::watched::Watched;
use box_rpc::Caller;

/// Limit of concurrent calls per box.
///
/// The limit is lower than the agent's own, so that an exec always finds room.
pub(crate) const MAX_CALLS: usize = 192;

/// Limit of payload bytes of concurrent calls per box.
///
/// The payload occupies memory of this process first, and memory of the box afterwards.
pub(crate) const MAX_PAYLOAD_BYTES: usize = 64 << 20;

/// Limit of payload bytes in messages on their way to the agent.
const MAX_TRANSIT_BYTES: usize = 16 << 20;

/// How long a call waits for the reason of its agent's disconnect.
const REASON_TIMEOUT: Duration = Duration::from_secs(5);

/// Unit in which the semaphores count bytes.
const BYTES_PER_PERMIT: usize = 1024;

/// Access to the agent of one box, opened and shut by its actor.
pub(crate) struct AgentAccess {
    state: Watched<AccessState>,
    /// Permits for the payload of calls in progress.
    payload: Semaphore,
    /// Permits for payload in messages to the agent.
    transit: Semaphore,
    received: AtomicU64,
    sent: AtomicU64,
}

struct AccessState {
    agent: AgentState,
    /// Calls in progress that use the box.
    calls: usize,
    /// Calls in progress that only query the agent.
    queries: usize,
    /// Time of the last start or end of a call that uses the box.
    last_used: Instant,
}

impl AccessState {
    fn is_full(&self) -> bool {
        self.calls + self.queries >= MAX_CALLS
    }
}

/// Agent of a box.
#[derive(Clone)]
pub(crate) struct Agent {
    pub(crate) peer: Peer,
    pub(crate) shm: Option<ShmPool>,
    pub(crate) location: Location,
    pub(crate) audit: Audit,
}

enum AgentState {
    /// The box is starting; calls wait.
    Starting,
    Connected(Agent),
    /// The box does not exist, for this reason.
    Gone(BoxError),
}

impl AgentAccess {
    pub(crate) fn new() -> Self {
        let state = AccessState {
            agent: AgentState::Starting,
            calls: 0,
            queries: 0,
            last_used: Instant::now(),
        };
        Self {
            state: Watched::new(state),
            payload: Semaphore::new(MAX_PAYLOAD_BYTES / BYTES_PER_PERMIT),
            transit: Semaphore::new(MAX_TRANSIT_BYTES / BYTES_PER_PERMIT),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }
    }

    /// Marks the box as starting.
    pub(crate) fn set_starting(&self) {
        self.state
            .modify(|state| state.agent = AgentState::Starting);
    }

    /// Marks the box as running with this agent.
    pub(crate) fn set_connected(&self, agent: Agent) {
        self.state
            .modify(|state| state.agent = AgentState::Connected(agent));
    }

    /// Marks the box as gone, for this reason.
    ///
    /// The first reason stays until the next start. Only an end reason replaces a reason that is
    /// not an end, because an unreachable box may still end.
    pub(crate) fn close(&self, reason: BoxError) {
        self.state.modify(|state| {
            let is_final =
                matches!(&state.agent, AgentState::Gone(first) if is_end(first) || !is_end(&reason));
            if !is_final {
                state.agent = AgentState::Gone(reason);
            }
        });
    }

    /// Shuts the access unless a call uses the box; returns whether no call does.
    ///
    /// Check and change are atomic, so no call can start in between.
    pub(crate) fn close_if_unused(&self, reason: BoxError) -> bool {
        self.state.modify(|state| {
            let unused = state.calls == 0;
            if unused && matches!(state.agent, AgentState::Connected(_)) {
                state.agent = AgentState::Gone(reason);
            }
            unused
        })
    }

    /// Returns the reason why the box does not exist, if it does not.
    pub(crate) fn end_reason(&self) -> Option<BoxError> {
        match &self.state.read().agent {
            AgentState::Gone(reason) => Some(reason.clone()),
            AgentState::Starting | AgentState::Connected(_) => None,
        }
    }

    /// Returns why a box with a disconnected agent has ended.
    ///
    /// The actor reports the reason shortly after the disconnect.
    pub(crate) async fn wait_end_reason(&self) -> BoxError {
        let known = self.state.wait_for(|state| match &state.agent {
            AgentState::Connected(agent) if agent.peer.is_closed() => None,
            AgentState::Connected(_) | AgentState::Starting | AgentState::Gone(_) => Some(()),
        });
        let _ = timeout(REASON_TIMEOUT, known).await;
        self.end_reason().unwrap_or_else(box_ended)
    }

    /// Returns the connection to the agent, if the box is running.
    pub(crate) fn peer(&self) -> Option<Peer> {
        match &self.state.read().agent {
            AgentState::Connected(agent) => Some(agent.peer.clone()),
            AgentState::Starting | AgentState::Gone(_) => None,
        }
    }

    /// Waits until the box is no longer starting.
    pub(crate) async fn wait_started(&self) {
        let has_started = |state: &AccessState| !matches!(state.agent, AgentState::Starting);
        self.state
            .wait_for(|state| has_started(state).then_some(()))
            .await;
    }

    /// Returns the time of the last start or end of a call.
    pub(crate) fn last_used(&self) -> Instant {
        self.state.read().last_used
    }

    /// Returns whether no call uses the box.
    pub(crate) fn is_unused(&self) -> bool {
        self.state.read().calls == 0
    }

    /// Returns the bytes received and sent by the box over its ports.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (load(&self.received), load(&self.sent))
    }

    /// Waits until no call uses the box.
    pub(crate) async fn wait_unused(&self) {
        self.state
            .wait_for(|state| (state.calls == 0).then_some(()))
            .await;
    }
}

/// Call in progress in a box.
///
/// Until it is dropped, the box counts as used. Calls that only query the agent do not count.
pub struct AgentLease {
    entry: Arc<BoxEntry>,
    purpose: Purpose,
    caller: Arc<str>,
    pub(crate) agent: Peer,
    audit: Audit,
    shm: Option<ShmPool>,
}

/// Purpose of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The call uses the box, which must be running.
    Use,
    /// The call is the box's current exec.
    ///
    /// The actor counts it, so the access does not, and no limit applies.
    Exec,
    /// The call only queries the agent.
    ///
    /// It does not count as use, and the box may be stopped.
    ReadOnly,
}

impl fmt::Debug for AgentLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentLease").finish_non_exhaustive()
    }
}

impl AgentLease {
    /// Waits for the box to start and begins a call.
    pub(crate) async fn acquire(
        entry: Arc<BoxEntry>,
        caller: &Caller,
        purpose: Purpose,
    ) -> Result<Self, BoxError> {
        loop {
            entry.access.wait_started().await;
            if let Some(lease) = Self::try_acquire(&entry, caller, purpose)? {
                return Ok(lease);
            }
        }
    }

    /// Begins a call if the box has started; returns `None` while it is starting.
    pub(crate) fn try_acquire(
        entry: &Arc<BoxEntry>,
        caller: &Caller,
        purpose: Purpose,
    ) -> Result<Option<Self>, BoxError> {
        Ok(entry.acquire_agent(purpose)?.map(|agent| Self {
            entry: Arc::clone(entry),
            purpose,
            caller: caller.name(),
            agent: agent.peer,
            audit: agent.audit,
            shm: agent.shm,
        }))
    }

    pub(crate) fn entry(&self) -> &Arc<BoxEntry> {
        &self.entry
    }

    /// Returns the name of the caller.
    pub(crate) fn caller(&self) -> &str {
        &self.caller
    }

    pub(crate) fn audit(&self) -> &Audit {
        &self.audit
    }

    /// Awaits a call to the agent.
    ///
    /// If the agent has disconnected, the error is the reason for the end of the box.
    pub(crate) async fn outcome<T>(
        &self,
        work: impl Future<Output = Result<T, BoxError>>,
    ) -> Result<T, BoxError> {
        match work.await {
            Err(error) if error.code() == Code::Unavailable && self.agent.is_closed() => {
                Err(self.entry.access.wait_end_reason().await)
            }
            outcome => outcome,
        }
    }

    /// Returns the spec of the box.
    pub(crate) fn spec(&self) -> &BoxSpec {
        &self.entry.spec
    }

    /// Returns the default settings of the box's commands.
    pub(crate) fn defaults(&self) -> Defaults {
        self.entry.command_defaults()
    }

    /// Reserves memory for the payload of a call.
    ///
    /// The reservation fails if concurrent calls have reached the limit.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<SemaphorePermit<'_>, BoxError> {
        let reserved = self.entry.access.payload.try_acquire_many(permits(bytes));
        reserved.map_err(|_| {
            let what = "the payload of the calls to this box";
            BoxError::limit(Code::Overloaded, what, "bytes_inside", MAX_PAYLOAD_BYTES)
        })
    }

    /// Waits until the payload may be sent to the agent. Permits are held briefly.
    pub(crate) async fn wait_to_send(&self, bytes: usize) -> Option<SemaphorePermit<'_>> {
        let permits = permits(bytes.min(MAX_TRANSIT_BYTES));
        // The semaphore is never closed.
        self.entry.access.transit.acquire_many(permits).await.ok()
    }

    /// Counts bytes received by the box over a port.
    pub(crate) fn count_received(&self, bytes: usize) {
        let received = &self.entry.access.received;
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts bytes sent by the box over a port.
    pub(crate) fn count_sent(&self, bytes: usize) {
        let sent = &self.entry.access.sent;
        sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the slots for file transfer, if the backend has shared memory.
    pub(crate) fn file_shm(&self) -> Option<&ShmPool> {
        self.shm.as_ref()
    }

    /// Returns a free slot for large output.
    pub(crate) fn slot(&self) -> Option<ShmSlot> {
        self.shm.as_ref().and_then(ShmPool::to_read)
    }
}

impl Drop for AgentLease {
    fn drop(&mut self) {
        let purpose = self.purpose;
        if purpose == Purpose::Exec {
            return;
        }
        self.entry.access.state.modify(|state| match purpose {
            Purpose::Use => {
                state.calls -= 1;
                state.last_used = Instant::now();
            }
            Purpose::ReadOnly => state.queries -= 1,
            Purpose::Exec => {}
        });
        if purpose == Purpose::Use {
            self.entry.touch();
        }
    }
}

impl BoxEntry {
    /// Waits for the box to start and returns its location and agent.
    ///
    /// This does not count as use.
    pub(crate) async fn wait_location(&self) -> Result<(Location, Peer), BoxError> {
        loop {
            self.access.wait_started().await;
            self.check_awake()?;
            match &self.access.state.read().agent {
                AgentState::Starting => {}
                AgentState::Connected(agent) => {
                    return Ok((agent.location.clone(), agent.peer.clone()));
                }
                AgentState::Gone(reason) => return Err(reason.clone()),
            }
        }
    }

    /// Returns how the state of the box treats a call to its agent.
    pub(crate) fn access(&self) -> Access {
        let status = self.status();
        let wake = status
            .lifetime
            .as_ref()
            .is_some_and(|lifetime| lifetime.wake);
        status.state.access(wake)
    }

    /// Returns an error if the box is paused or stopped.
    pub(crate) fn check_awake(&self) -> Result<(), BoxError> {
        match self.access() {
            Access::WakeFirst | Access::Refused(Code::Conflict) => Err(self.not_running()),
            Access::Now | Access::Wait | Access::Refused(_) => Ok(()),
        }
    }

    /// Returns the agent if the access is open, or `None` while the box is starting.
    fn acquire_agent(&self, purpose: Purpose) -> Result<Option<Agent>, BoxError> {
        if purpose != Purpose::ReadOnly || self.status().state != BoxState::Stopped {
            self.check_awake()?;
        }
        if purpose == Purpose::Exec {
            return match &self.access.state.read().agent {
                AgentState::Starting => Ok(None),
                AgentState::Gone(reason) => Err(reason.clone()),
                AgentState::Connected(agent) => Ok(Some(agent.clone())),
            };
        }
        let acquired = self.access.state.modify(|state| {
            let acquired = match &state.agent {
                AgentState::Starting => Ok(None),
                AgentState::Gone(reason) => Err(reason.clone()),
                AgentState::Connected(_) if state.is_full() => Err(BoxError::limit(
                    Code::Overloaded,
                    "the number of calls to this box",
                    "calls_inside",
                    MAX_CALLS,
                )),
                AgentState::Connected(agent) => Ok(Some(agent.clone())),
            };
            match (&acquired, purpose) {
                (Ok(Some(_)), Purpose::Use) => {
                    state.calls += 1;
                    state.last_used = Instant::now();
                }
                (Ok(Some(_)), Purpose::ReadOnly) => state.queries += 1,
                _ => {}
            }
            acquired
        });
        if matches!(acquired, Ok(Some(_))) && purpose == Purpose::Use {
            self.touch();
        }
        acquired
    }
}

fn permits(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(BYTES_PER_PERMIT)).unwrap_or(u32::MAX)
}

/// Returns whether a reason marks the end of a box.
fn is_end(reason: &BoxError) -> bool {
    let detail: Option<Detail> = reason.detail();
    detail.is_some_and(|detail| detail.ended.is_some())
}

/// Returns the error of a call to a box that has ended.
pub(crate) fn box_ended() -> BoxError {
    let error = BoxError::unavailable("the box has ended");
    with_end(
        error.with_detail(&Detail::about(Subject::Box)),
        Ended::Failed,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_replaces_a_reason_that_is_not_an_end() {
        let access = AgentAccess::new();
        let why = || access.end_reason().unwrap();
        access.close(BoxError::unavailable("does not answer"));
        access.close(BoxError::unavailable("later"));
        assert_eq!(why().message(), "does not answer");
        access.close(box_ended());
        assert_eq!(why().message(), "the box has ended");
        let later = with_end(BoxError::conflict("was deleted"), Ended::Deleted);
        access.close(later);
        access.close(BoxError::unavailable("later"));
        assert_eq!(why().message(), "the box has ended");
    }
}
