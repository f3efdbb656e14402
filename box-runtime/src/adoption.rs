//! Adopts the boxes of an earlier process.
//!
//! # Steps
//! 1. The backend lists the boxes that it finds on disk, with the record of each
//!    (`native/adopt.rs`). The runtime ignores a record that it cannot parse.
//! 2. For each box, the runtime asks the backend to reach its agent, checks the agent's health and
//!    applies the network policy of the record. It repeats this until the box answers or is known
//!    to be dead.
//! 3. A paused box runs while the runtime connects to its agent, and is paused again afterwards.
//! 4. The runtime registers the box, with an actor, as running, paused or stopped. A box that has
//!    not answered within five seconds is registered as unreachable; its actor keeps waiting.
//! 5. The actor receives the exits of commands that ended while no server was running (`audit.rs`).
//!
//! Commands continue during all of this. An exec continues if its `on_disconnect` is `keep`.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::AgentHealthParams;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, BoxState};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::backend::{AdoptedBox, Backend, Reach};
use crate::box_actor::entry::{BoxEntry, Location, Mounts, PersistedBox};
use crate::box_actor::{ActorStart, RunningBox, Shared};
use crate::registry::RegistryMessage;
use crate::runtime::BoxRuntime;

/// Maximum time that adopted agents may delay the start of a server.
///
/// The server starts without the agents that have not answered by then, and keeps waiting for them.
const READY_WITHIN: Duration = Duration::from_secs(5);

/// First and longest pause between two attempts to reach a box.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The pending connection to an adopted box, or the reason that the box is dead.
pub(crate) type PendingReach = BoxFuture<'static, Result<Box<RunningBox>, &'static str>>;

/// An adopted box that the runtime has not reached yet.
pub(crate) struct Unreached {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) id: Uuid,
    pub(crate) pending: PendingReach,
}

impl BoxRuntime {
    /// Adopts the boxes of an earlier process, with their commands and logs.
    ///
    /// The caller must call this once, before the first other call. The result is the number of
    /// boxes with an agent that answered. The runtime abandons a box only if it is known to be
    /// dead. A box is `unreachable` until its agent answers.
    pub async fn adopt(&self) -> Result<usize, BoxError> {
        self.shared().images.clean_up();
        let mut adopted = 0;
        for backend in &self.shared().config.backends {
            let readable = |record: &str| PersistedBox::read(record).is_some();
            let found = backend.adopt(readable).await?;
            let all = found
                .into_iter()
                .map(|found| self.adopt_one(backend, found));
            let all = futures::future::join_all(all).await;
            adopted += all.into_iter().filter(|adopted| *adopted).count();
        }
        self.sweep_items().await;
        Ok(adopted)
    }

    /// Adopts a box and returns whether its agent has answered.
    async fn adopt_one(&self, backend: &Arc<dyn Backend>, found: AdoptedBox) -> bool {
        let Some(record) = PersistedBox::read(&found.record) else {
            return false;
        };
        let persisted = PersistedState {
            paused: record.paused,
            stopped: record.stopped,
            mounts: record.mounts.clone(),
        };
        let entry = Arc::new(BoxEntry::adopted(record, backend.name()));
        let volumes = entry.status().volumes.clone();
        let uses = self.shared().items.adopt(&entry.spec, &volumes);
        entry.status().uses = uses;
        let location = Location {
            backend: Arc::clone(backend),
            id: found.id,
        };
        let of = (Arc::clone(&entry), location);
        let mut pending = reach(self.shared_arc(), of, persisted).boxed();
        let (begin, kind, message) = match timeout(READY_WITHIN, &mut pending).await {
            Ok(Ok(running)) => (ActorStart::Running(running), "adopted", ""),
            Ok(Err(reason)) => {
                let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
                tracing::info!(%owner, %box_id, backend_id = %found.id, reason, "box of an earlier process is dead");
                self.shared().events.record(&entry, "failed", reason);
                self.shared().ended_boxes.record(&entry, reason);
                return false;
            }
            Err(_) => {
                entry.unreachable();
                let unreached = Unreached {
                    backend: Arc::clone(backend),
                    id: found.id,
                    pending,
                };
                let begin = ActorStart::Unreached(Box::new(unreached));
                (begin, "unreachable", "its agent has not answered")
            }
        };
        let answered = matches!(begin, ActorStart::Running(_));
        match self.register(&entry, begin).await {
            Ok(()) => {
                self.shared().events.record(&entry, kind, message);
                answered
            }
            Err(error) => {
                let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
                tracing::warn!(%owner, %box_id, backend_id = %found.id, %error, "cannot adopt a box; ending it");
                self.end(backend, found.id).await;
                false
            }
        }
    }

    async fn register(&self, entry: &Arc<BoxEntry>, begin: ActorStart) -> Result<(), BoxError> {
        let entry = Arc::clone(entry);
        let adopt = |reply| RegistryMessage::Adopt {
            entry,
            begin,
            reply,
        };
        if self.query(adopt).await? {
            return Ok(());
        }
        Err(BoxError::conflict("another box has this id"))
    }

    async fn end(&self, backend: &Arc<dyn Backend>, id: Uuid) {
        let stopped = timeout(self.shared().config.stop_timeout, backend.stop(id)).await;
        if !matches!(stopped, Ok(Ok(()))) {
            tracing::error!(backend_id = %id, "cannot stop the box");
        }
    }
}

/// The state of a box according to its record.
struct PersistedState {
    paused: bool,
    stopped: bool,
    mounts: Mounts,
}

/// Connects to the agent of a box, without a time limit.
async fn reach(
    shared: Arc<Shared>,
    (entry, location): (Arc<BoxEntry>, Location),
    persisted: PersistedState,
) -> Result<Box<RunningBox>, &'static str> {
    let mut pause = FIRST_PAUSE;
    loop {
        match try_to_reach(&shared, &entry, &location, &persisted.mounts).await {
            Ok(Ok(running)) => {
                // The box ran while the runtime connected to its agent. If it cannot be paused
                // again, it keeps running.
                let limit = shared.config.probe_timeout;
                let frozen = persisted.paused && running.freeze(limit, true).await.is_ok();
                entry.reached(match frozen {
                    true => BoxState::Paused,
                    false if persisted.stopped => BoxState::Stopped,
                    false => BoxState::Running,
                });
                return Ok(Box::new(running));
            }
            Ok(Err(reason)) => return Err(reason),
            Err(error) => {
                let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
                tracing::warn!(%owner, %box_id, %error, "cannot reach a box; retrying");
            }
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

async fn try_to_reach(
    shared: &Shared,
    entry: &Arc<BoxEntry>,
    location: &Location,
    mounts: &Mounts,
) -> Result<Result<RunningBox, &'static str>, BoxError> {
    let started = match location.backend.reach(location.id).await? {
        Reach::Alive(started) => started,
        Reach::Dead(why) => return Ok(Err(why)),
    };
    let connection = (started.connection, started.shm);
    let (of, health) = (
        (&location.backend, location.id),
        AgentHealthParams::default(),
    );
    let running = RunningBox::connect(shared, of, connection, &health).await?;
    let located = entry.set_location(location.clone(), mounts.clone());
    located.inspect_err(|_| entry.clear_location())?;
    Ok(Ok(running))
}

/// The error of a call to an unreachable box.
pub(crate) fn unreachable(id: &BoxId) -> BoxError {
    let message =
        format!("box {id}: its agent has not answered; try again later, or delete it with force");
    BoxError::unavailable(message).with_detail(&Detail::about(Subject::Box))
}

impl BoxEntry {
    /// Marks the box as unreachable, because its agent has not answered yet.
    fn unreachable(&self) {
        self.access.close(unreachable(&self.spec.box_id));
        let mut status = self.status();
        status.state = BoxState::Unreachable;
        status.reason = Some("its agent has not answered".to_owned());
    }

    /// Marks the box as reached, in this state.
    fn reached(&self, state: BoxState) {
        let mut status = self.status();
        status.state = state;
        status.reason = None;
    }
}
