//! Concurrent access of calls to the agent of a box.
//!
//! These calls bypass the actor's queue and may overlap with execs and with each other. A call in
//! progress keeps the box in use.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use box_protocol::error::{Detail, Ended, Subject, with_end};
use box_protocol::{Access, BoxError, BoxSpec, BoxState, Code, Defaults};
use box_rpc::Peer;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::time::{Instant, timeout};

use crate::audit::Audit;
use crate::box_actor::entry::{BoxEntry, Place};
use crate::shm::{ShmPool, ShmSlot};
use box_rpc::Caller;

/// Limit of concurrent calls per box.
///
/// The limit is lower than the agent's own, so that an exec always finds room.
pub(crate) const CALLS_INSIDE: usize = 192;

/// Limit of payload bytes of concurrent calls per box.
///
/// The payload occupies memory of this process first, and memory of the box afterwards.
pub(crate) const BYTES_INSIDE: usize = 64 << 20;

/// Limit of payload bytes in messages on their way to the agent.
const BYTES_AHEAD: usize = 16 << 20;

/// How long a call waits for the reason of its agent's disconnect.
const WHY: Duration = Duration::from_secs(5);

/// Unit in which the semaphores count bytes.
const PORTION: usize = 1024;

/// Access to the agent of one box, opened and shut by its actor.
pub(crate) struct AgentAccess {
    state: watch::Sender<State>,
    lease: Semaphore,
    ahead: Semaphore,
    received: AtomicU64,
    sent: AtomicU64,
}

struct State {
    way: Way,
    /// Calls in progress that use the box.
    calls: usize,
    /// Calls in progress that only query the agent.
    looks: usize,
    /// Time of the last start or end of a call that uses the box.
    used: Instant,
}

impl State {
    fn is_full(&self) -> bool {
        self.calls + self.looks >= CALLS_INSIDE
    }
}

/// Agent of a box.
#[derive(Clone)]
pub(crate) struct Agent {
    pub(crate) peer: Peer,
    pub(crate) spool: Option<ShmPool>,
    /// Whether the agent supports file transfer through shared memory slots.
    pub(crate) spools_files: bool,
    pub(crate) place: Place,
    pub(crate) audit: Audit,
}

enum Way {
    /// The box is starting; calls wait.
    Opening,
    Open(Agent),
    /// The box does not exist, for this reason.
    Shut(BoxError),
}

impl AgentAccess {
    pub(crate) fn new() -> Self {
        let state = State {
            way: Way::Opening,
            calls: 0,
            looks: 0,
            used: Instant::now(),
        };
        Self {
            state: watch::Sender::new(state),
            lease: Semaphore::new(BYTES_INSIDE / PORTION),
            ahead: Semaphore::new(BYTES_AHEAD / PORTION),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }
    }

    /// Marks the box as starting.
    pub(crate) fn opening(&self) {
        self.state.send_modify(|state| state.way = Way::Opening);
    }

    /// Marks the box as running with this agent.
    pub(crate) fn open(&self, agent: Agent) {
        self.state.send_modify(|state| state.way = Way::Open(agent));
    }

    /// Marks the box as gone, for this reason.
    ///
    /// The first reason stays until the next start. Only an end reason replaces a reason that is
    /// not an end, because an unreachable box may still end.
    pub(crate) fn shut(&self, reason: BoxError) {
        self.state.send_modify(|state| {
            let stands =
                matches!(&state.way, Way::Shut(first) if is_end(first) || !is_end(&reason));
            if !stands {
                state.way = Way::Shut(reason);
            }
        });
    }

    /// Shuts the access unless a call uses the box; returns whether no call does.
    ///
    /// Check and change are atomic, so no call can start in between.
    pub(crate) fn shut_if_unused(&self, reason: BoxError) -> bool {
        let mut unused = false;
        self.state.send_modify(|state| {
            unused = state.calls == 0;
            if unused && matches!(state.way, Way::Open(_)) {
                state.way = Way::Shut(reason);
            }
        });
        unused
    }

    /// Returns the reason why the box does not exist, if it does not.
    pub(crate) fn why_shut(&self) -> Option<BoxError> {
        match &self.state.borrow().way {
            Way::Shut(reason) => Some(reason.clone()),
            Way::Opening | Way::Open(_) => None,
        }
    }

    /// Returns why a box with a disconnected agent has ended.
    ///
    /// The actor reports the reason shortly after the disconnect.
    pub(crate) async fn why_gone(&self) -> BoxError {
        let is_over = |state: &State| match &state.way {
            Way::Open(agent) => !agent.peer.is_closed(),
            Way::Opening | Way::Shut(_) => true,
        };
        let mut access = self.state.subscribe();
        let _ = timeout(WHY, access.wait_for(is_over)).await;
        self.why_shut().unwrap_or_else(ended)
    }

    /// Waits until the box is no longer starting.
    async fn decided(&self) {
        let mut access = self.state.subscribe();
        // The sender is in `self`, so the channel is open.
        let _ = access
            .wait_for(|state| !matches!(state.way, Way::Opening))
            .await;
    }

    /// Returns the time of the last start or end of a call.
    pub(crate) fn used(&self) -> Instant {
        self.state.borrow().used
    }

    /// Returns whether no call uses the box.
    pub(crate) fn is_unused(&self) -> bool {
        self.state.borrow().calls == 0
    }

    /// Returns the bytes received and sent by the box over its ports.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (load(&self.received), load(&self.sent))
    }

    /// Waits until no call uses the box.
    pub(crate) async fn unused(&self) {
        // The sender is in `self`, so the channel is open.
        let _ = self
            .state
            .subscribe()
            .wait_for(|state| state.calls == 0)
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
    spool: Option<ShmPool>,
    spools_files: bool,
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
    Look,
}

impl fmt::Debug for AgentLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentLease").finish_non_exhaustive()
    }
}

impl AgentLease {
    /// Waits for the box to start and begins a call.
    pub(crate) async fn enter(
        entry: Arc<BoxEntry>,
        caller: &Caller,
        purpose: Purpose,
    ) -> Result<Self, BoxError> {
        loop {
            entry.access.decided().await;
            if let Some(lease) = Self::now(&entry, caller, purpose)? {
                return Ok(lease);
            }
        }
    }

    /// Begins a call if the box has started; returns `None` while it is starting.
    pub(crate) fn now(
        entry: &Arc<BoxEntry>,
        caller: &Caller,
        purpose: Purpose,
    ) -> Result<Option<Self>, BoxError> {
        Ok(entry.come_in(purpose)?.map(|agent| Self {
            entry: Arc::clone(entry),
            purpose,
            caller: caller.name(),
            agent: agent.peer,
            audit: agent.audit,
            spool: agent.spool,
            spools_files: agent.spools_files,
        }))
    }
}

impl AgentLease {
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
                Err(self.entry.access.why_gone().await)
            }
            outcome => outcome,
        }
    }

    /// Returns the spec of the box.
    pub(crate) fn spec(&self) -> &BoxSpec {
        &self.entry.spec
    }

    /// Returns the default settings of the box's commands.
    pub(crate) fn defaults(&self) -> Option<Defaults> {
        self.entry.live().defaults.as_deref().cloned()
    }

    /// Reserves memory for the payload of a call.
    ///
    /// The reservation fails if concurrent calls have reached the limit.
    pub(crate) fn carry(&self, bytes: usize) -> Result<SemaphorePermit<'_>, BoxError> {
        let room = self.entry.access.lease.try_acquire_many(portions(bytes));
        room.map_err(|_| {
            let what = "bytes of calls inside one box";
            BoxError::limit(Code::Overloaded, what, "bytes_inside", BYTES_INSIDE)
        })
    }

    /// Waits until the payload may be sent to the agent. Permits are held briefly.
    pub(crate) async fn go_ahead(&self, bytes: usize) -> Option<SemaphorePermit<'_>> {
        let portions = portions(bytes.min(BYTES_AHEAD));
        // The semaphore is never closed.
        self.entry.access.ahead.acquire_many(portions).await.ok()
    }

    /// Counts bytes received by the box over a port.
    pub(crate) fn has_received(&self, bytes: usize) {
        let received = &self.entry.access.received;
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts bytes sent by the box over a port.
    pub(crate) fn has_sent(&self, bytes: usize) {
        let sent = &self.entry.access.sent;
        sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Returns the slots for file transfer, if the agent supports them.
    pub(crate) fn file_slots(&self) -> Option<&ShmPool> {
        self.spool.as_ref().filter(|_| self.spools_files)
    }

    /// Returns a free slot for large output.
    pub(crate) fn slot(&self) -> Option<ShmSlot> {
        self.spool.as_ref().and_then(ShmPool::to_read)
    }
}

impl Drop for AgentLease {
    fn drop(&mut self) {
        let purpose = self.purpose;
        if purpose == Purpose::Exec {
            return;
        }
        self.entry.access.state.send_modify(|state| match purpose {
            Purpose::Use => {
                state.calls -= 1;
                state.used = Instant::now();
            }
            Purpose::Look => state.looks -= 1,
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
    pub(crate) async fn place(&self) -> Result<(Place, Peer), BoxError> {
        loop {
            self.access.decided().await;
            self.is_awake()?;
            match &self.access.state.borrow().way {
                Way::Opening => {}
                Way::Open(agent) => return Ok((agent.place.clone(), agent.peer.clone())),
                Way::Shut(reason) => return Err(reason.clone()),
            }
        }
    }

    /// Returns how the state of the box treats a call to its agent.
    pub(crate) fn access(&self) -> Access {
        let live = self.live();
        let wake = live.lifetime.as_ref().is_some_and(|lifetime| lifetime.wake);
        live.state.access(wake)
    }

    /// Returns an error if the box is paused or stopped.
    pub(crate) fn is_awake(&self) -> Result<(), BoxError> {
        match self.access() {
            Access::WakeFirst | Access::Refused(Code::Conflict) => {
                let id = &self.spec.box_id;
                let error = BoxError::conflict(format!("box {id} is not running"));
                Err(error.with_detail(&Detail::about(Subject::Box)))
            }
            Access::Now | Access::Wait | Access::Refused(_) => Ok(()),
        }
    }

    /// Returns the agent if the access is open, or `None` while the box is starting.
    fn come_in(&self, purpose: Purpose) -> Result<Option<Agent>, BoxError> {
        if purpose != Purpose::Look || self.live().state != BoxState::Stopped {
            self.is_awake()?;
        }
        if purpose == Purpose::Exec {
            return match &self.access.state.borrow().way {
                Way::Opening => Ok(None),
                Way::Shut(reason) => Err(reason.clone()),
                Way::Open(agent) => Ok(Some(agent.clone())),
            };
        }
        let mut met = Ok(None);
        self.access.state.send_modify(|state| {
            met = match &state.way {
                Way::Opening => Ok(None),
                Way::Shut(reason) => Err(reason.clone()),
                Way::Open(_) if state.is_full() => Err(BoxError::limit(
                    Code::Overloaded,
                    "calls inside one box",
                    "calls_inside",
                    CALLS_INSIDE,
                )),
                Way::Open(agent) => Ok(Some(agent.clone())),
            };
            match (&met, purpose) {
                (Ok(Some(_)), Purpose::Use) => {
                    state.calls += 1;
                    state.used = Instant::now();
                }
                (Ok(Some(_)), Purpose::Look) => state.looks += 1,
                _ => {}
            }
        });
        if matches!(met, Ok(Some(_))) && purpose == Purpose::Use {
            self.touch();
        }
        met
    }
}

fn portions(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(PORTION)).unwrap_or(u32::MAX)
}

/// Returns whether a reason marks the end of a box.
fn is_end(reason: &BoxError) -> bool {
    let detail: Option<Detail> = reason.detail();
    detail.is_some_and(|detail| detail.ended.is_some())
}

/// Returns the error of a call to a box that has ended.
pub(crate) fn ended() -> BoxError {
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
    fn an_end_stands_over_a_reason_that_is_none() {
        let access = AgentAccess::new();
        let why = || access.why_shut().unwrap();
        access.shut(BoxError::unavailable("does not answer"));
        access.shut(BoxError::unavailable("later"));
        assert_eq!(why().message(), "does not answer");
        access.shut(ended());
        assert_eq!(why().message(), "the box has ended");
        let later = with_end(BoxError::conflict("was deleted"), Ended::Deleted);
        access.shut(later);
        access.shut(BoxError::unavailable("later"));
        assert_eq!(why().message(), "the box has ended");
    }
}
