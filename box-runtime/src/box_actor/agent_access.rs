//! The access to what is inside a box: calls that overlap with execs and with each other go through it, straight to the box's
//! agent. Whoever is inside keeps the box in use.

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

/// Calls that may be inside one box at once. Less than an agent takes, so that an exec always finds room.
pub(crate) const CALLS_INSIDE: usize = 192;

/// Bytes that calls may carry into one box at once: they are in the memory of this process, and then in the box's.
pub(crate) const BYTES_INSIDE: usize = 64 << 20;

/// Of those that can wait, as many may be in messages on their way to the agent.
const BYTES_AHEAD: usize = 16 << 20;

/// How long a call whose agent is gone waits for its session to say why.
const WHY: Duration = Duration::from_secs(5);

/// What bytes are counted in.
const PORTION: usize = 1024;

/// The access of one session; opened and shut by its actor.
pub(crate) struct AgentAccess {
    state: watch::Sender<State>,
    lease: Semaphore,
    ahead: Semaphore,
    received: AtomicU64,
    sent: AtomicU64,
}

struct State {
    way: Way,
    /// Calls inside that use the box.
    calls: usize,
    /// Those that only look.
    looks: usize,
    /// When the last call came or went.
    used: Instant,
}

impl State {
    fn is_full(&self) -> bool {
        self.calls + self.looks >= CALLS_INSIDE
    }
}

/// The agent of a box.
#[derive(Clone)]
pub(crate) struct Agent {
    pub(crate) peer: Peer,
    pub(crate) spool: Option<ShmPool>,
    /// Whether it can move files through slots.
    pub(crate) spools_files: bool,
    pub(crate) place: Place,
    pub(crate) audit: Audit,
}

enum Way {
    /// The box is being made: whoever comes waits.
    Opening,
    Open(Agent),
    /// There is no box, for this reason.
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

    /// A box is being made.
    pub(crate) fn opening(&self) {
        self.state.send_modify(|state| state.way = Way::Opening);
    }

    /// The box is there, and this is its agent.
    pub(crate) fn open(&self, agent: Agent) {
        self.state.send_modify(|state| state.way = Way::Open(agent));
    }

    /// The box is gone. The first reason stands until another box is made, but an end stands over what is none: a box that does
    /// not answer may still end.
    pub(crate) fn shut(&self, reason: BoxError) {
        self.state.send_modify(|state| {
            let stands =
                matches!(&state.way, Way::Shut(first) if is_end(first) || !is_end(&reason));
            if !stands {
                state.way = Way::Shut(reason);
            }
        });
    }

    /// Shuts it unless somebody is lease. Whether it is shut: nobody can come in between the look and the deed.
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

    /// Why there is no box, if that is so.
    pub(crate) fn why_shut(&self) -> Option<BoxError> {
        match &self.state.borrow().way {
            Way::Shut(reason) => Some(reason.clone()),
            Way::Opening | Way::Open(_) => None,
        }
    }

    /// Why a box has ended whose agent is gone. Its session says so soon after.
    pub(crate) async fn why_gone(&self) -> BoxError {
        let is_over = |state: &State| match &state.way {
            Way::Open(agent) => !agent.peer.is_closed(),
            Way::Opening | Way::Shut(_) => true,
        };
        let mut access = self.state.subscribe();
        let _ = timeout(WHY, access.wait_for(is_over)).await;
        self.why_shut().unwrap_or_else(ended)
    }

    /// Returns once no box is being made.
    async fn decided(&self) {
        let mut access = self.state.subscribe();
        // The sender is `self`, so it cannot be gone.
        let _ = access
            .wait_for(|state| !matches!(state.way, Way::Opening))
            .await;
    }

    /// When somebody last came or went.
    pub(crate) fn used(&self) -> Instant {
        self.state.borrow().used
    }

    /// Whether nobody is lease.
    pub(crate) fn is_unused(&self) -> bool {
        self.state.borrow().calls == 0
    }

    /// Bytes into the box and out of it, over its ports.
    pub(crate) fn traffic(&self) -> (u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (load(&self.received), load(&self.sent))
    }

    /// Returns once nobody is lease.
    pub(crate) async fn unused(&self) {
        // The sender is `self`, so it cannot be gone.
        let _ = self
            .state
            .subscribe()
            .wait_for(|state| state.calls == 0)
            .await;
    }
}

/// A call inside a box. The box counts as used until it is dropped, unless the call only looks.
pub struct AgentLease {
    entry: Arc<BoxEntry>,
    purpose: Purpose,
    caller: Arc<str>,
    pub(crate) agent: Peer,
    audit: Audit,
    spool: Option<ShmPool>,
    spools_files: bool,
}

/// What a call does lease.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// It uses the box, which must run.
    Use,
    /// The same, for the one exec that runs. The actor of the box counts it, so the access does not, and no limit holds.
    Exec,
    /// It asks the agent what it knows. That is no use of the box, which may be stopped.
    Look,
}

impl fmt::Debug for AgentLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentLease").finish_non_exhaustive()
    }
}

impl AgentLease {
    /// Goes in once the box is there.
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

    /// Goes in if the box is there; nothing if it is being made.
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

    /// Who came in.
    pub(crate) fn caller(&self) -> &str {
        &self.caller
    }

    pub(crate) fn audit(&self) -> &Audit {
        &self.audit
    }

    /// The outcome of what was asked of the agent: if the agent is gone, the reason why the box has ended.
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

    /// What the box was made to.
    pub(crate) fn spec(&self) -> &BoxSpec {
        &self.entry.spec
    }

    /// What its commands find unless they say otherwise.
    pub(crate) fn defaults(&self) -> Option<Defaults> {
        self.entry.live().defaults.as_deref().cloned()
    }

    /// Room for the bytes that a call carries; refused if others carry too many.
    pub(crate) fn carry(&self, bytes: usize) -> Result<SemaphorePermit<'_>, BoxError> {
        let room = self.entry.access.lease.try_acquire_many(portions(bytes));
        room.map_err(|_| {
            let what = "bytes of calls inside one box";
            BoxError::limit(Code::Overloaded, what, "bytes_inside", BYTES_INSIDE)
        })
    }

    /// Waits until those bytes may go to the agent in a message. Nobody holds this for long.
    pub(crate) async fn go_ahead(&self, bytes: usize) -> Option<SemaphorePermit<'_>> {
        let portions = portions(bytes.min(BYTES_AHEAD));
        // It is never closed.
        self.entry.access.ahead.acquire_many(portions).await.ok()
    }

    /// So many bytes have come into the box over a port.
    pub(crate) fn has_received(&self, bytes: usize) {
        let received = &self.entry.access.received;
        received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// So many have left it.
    pub(crate) fn has_sent(&self, bytes: usize) {
        let sent = &self.entry.access.sent;
        sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The slots for files, if there are any and the agent can use them.
    pub(crate) fn file_slots(&self) -> Option<&ShmPool> {
        self.spool.as_ref().filter(|_| self.spools_files)
    }

    /// A slot for much output, if there is one left.
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
    /// Where the box is, and its agent, once it is there. To look at it is not to use it.
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

    /// What a call to the inside of the box meets.
    pub(crate) fn access(&self) -> Access {
        let live = self.live();
        let wake = live.lifetime.as_ref().is_some_and(|lifetime| lifetime.wake);
        live.state.access(wake)
    }

    /// An error if the box is there and does not run.
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

    /// The agent, if the access is open; nothing if it has just begun to be opened again.
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

/// Whether this says that a box has ended.
fn is_end(reason: &BoxError) -> bool {
    let detail: Option<Detail> = reason.detail();
    detail.is_some_and(|detail| detail.ended.is_some())
}

/// What a call meets that comes when its box has ended.
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
