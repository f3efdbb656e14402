//! Adopts the boxes of an earlier process.

use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::AgentHealthParams;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, BoxState};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::backend::{AdoptedBox, Backend, Reach};
use crate::box_actor::entry::{BoxEntry, Mounts, Place, Record};
use crate::box_actor::{Begin, RunningBox, Shared};
use crate::registry::Ask;
use crate::runtime::{BoxRuntime, unanswered};

/// Maximum time that adopted agents may delay the start of a server.
///
/// The server starts without the agents that have not answered by then, and keeps waiting for them.
const READY_WITHIN: Duration = Duration::from_secs(5);

/// First and longest pause between two attempts to reach a box.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The pending connection to an adopted box, or the reason that the box is dead.
pub(crate) type Coming = BoxFuture<'static, Result<Box<RunningBox>, &'static str>>;

/// An adopted box that the runtime has not reached yet.
pub(crate) struct Unreached {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) id: Uuid,
    pub(crate) coming: Coming,
}

impl BoxRuntime {
    /// Adopts the boxes of an earlier process, with their commands and logs.
    ///
    /// The caller must call this once, before the first other call. The result is the number of
    /// boxes with an agent that answered. The runtime abandons a box only if it is known to be
    /// dead. A box is `unreachable` until its agent answers.
    pub async fn adopt(&self) -> Result<usize, BoxError> {
        let mut adopted = 0;
        for backend in &self.shared().config.backends {
            let readable = |record: &str| Record::read(record).is_some();
            let found = backend.adopt(readable).await?;
            let all = found
                .into_iter()
                .map(|found| self.adopt_one(backend, found));
            let all = futures::future::join_all(all).await;
            adopted += all.into_iter().filter(|adopted| *adopted).count();
        }
        Ok(adopted)
    }

    /// Adopts a box and returns whether its agent has answered.
    async fn adopt_one(&self, backend: &Arc<dyn Backend>, found: AdoptedBox) -> bool {
        let Some(record) = Record::read(&found.record) else {
            return false;
        };
        let was = Was {
            paused: record.paused,
            stopped: record.stopped,
            mounts: record.mounts.clone(),
        };
        let entry = Arc::new(BoxEntry::adopted(record, backend.name()));
        let place = Place {
            backend: Arc::clone(backend),
            id: found.id,
        };
        let of = (Arc::clone(&entry), place);
        let mut coming = reach(self.shared_arc(), of, was).boxed();
        let (begin, kind, message) = match timeout(READY_WITHIN, &mut coming).await {
            Ok(Ok(living)) => (Begin::In(living), "adopted", ""),
            Ok(Err(gone)) => {
                let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
                tracing::info!(%owner, %box_id, backend_id = %found.id, gone, "a box of an earlier process is gone");
                self.shared().events.tell(&entry, "failed", gone);
                self.shared().ends.ended(&entry, gone);
                return false;
            }
            Err(_) => {
                entry.unreachable();
                let unreached = Unreached {
                    backend: Arc::clone(backend),
                    id: found.id,
                    coming,
                };
                let begin = Begin::Reaching(Box::new(unreached));
                (begin, "unreachable", "its agent does not answer")
            }
        };
        let answered = matches!(begin, Begin::In(_));
        match self.enter_table(&entry, begin).await {
            Ok(()) => {
                self.shared().events.tell(&entry, kind, message);
                answered
            }
            Err(error) => {
                let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
                tracing::warn!(%owner, %box_id, backend_id = %found.id, %error, "a box cannot be taken over and is ended");
                self.end(backend, found.id).await;
                false
            }
        }
    }

    async fn enter_table(&self, entry: &Arc<BoxEntry>, begin: Begin) -> Result<(), BoxError> {
        let (reply, answer) = oneshot::channel();
        let entry = Arc::clone(entry);
        self.send(Ask::Adopt {
            entry,
            begin,
            reply,
        })
        .await?;
        match answer.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(BoxError::conflict("there is another box of this id")),
            Err(_) => Err(unanswered()),
        }
    }

    async fn end(&self, backend: &Arc<dyn Backend>, id: Uuid) {
        let stopped = timeout(self.shared().config.stop_timeout, backend.stop(id)).await;
        if !matches!(stopped, Ok(Ok(()))) {
            tracing::error!(backend_id = %id, "the box was not stopped");
        }
    }
}

/// The state of a box according to its record.
struct Was {
    paused: bool,
    stopped: bool,
    mounts: Mounts,
}

/// Connects to the agent of a box, without a time limit.
async fn reach(
    shared: Arc<Shared>,
    (entry, place): (Arc<BoxEntry>, Place),
    was: Was,
) -> Result<Box<RunningBox>, &'static str> {
    let mut pause = FIRST_PAUSE;
    loop {
        match try_to_reach(&shared, &entry, &place, &was.mounts).await {
            Ok(Ok(living)) => {
                // The box ran while the runtime connected to its agent. If it cannot be paused
                // again, it keeps running.
                let limit = shared.config.probe_timeout;
                let frozen = was.paused && living.freeze(limit, true).await.is_ok();
                entry.reached(match frozen {
                    true => BoxState::Paused,
                    false if was.stopped => BoxState::Stopped,
                    false => BoxState::Running,
                });
                return Ok(Box::new(living));
            }
            Ok(Err(gone)) => return Err(gone),
            Err(error) => {
                let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
                tracing::warn!(%owner, %box_id, %error, "a box cannot be reached and is tried again");
            }
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

async fn try_to_reach(
    shared: &Shared,
    entry: &Arc<BoxEntry>,
    place: &Place,
    mounts: &Mounts,
) -> Result<Result<RunningBox, &'static str>, BoxError> {
    let started = match place.backend.reach(place.id).await? {
        Reach::Here(started) => started,
        Reach::Gone(why) => return Ok(Err(why)),
    };
    let way = (started.connection, started.shm);
    let (of, health) = ((&place.backend, place.id), AgentHealthParams::default());
    let living = RunningBox::meet(shared, of, way, &health).await?;
    let met = entry.is_at(place.clone(), mounts.clone());
    met.inspect_err(|_| entry.is_gone())?;
    Ok(Ok(living))
}

/// The error of a call to an unreachable box.
pub(crate) fn unreachable(id: &BoxId) -> BoxError {
    let message = format!("box {id} does not answer; try again later, or delete it with force");
    BoxError::unavailable(message).with_detail(&Detail::about(Subject::Box))
}

impl BoxEntry {
    /// Marks the box as unreachable, because its agent has not answered yet.
    fn unreachable(&self) {
        self.access.shut(unreachable(&self.spec.box_id));
        let mut live = self.live();
        live.state = BoxState::Unreachable;
        live.reason = Some("its agent does not answer".to_owned());
    }

    /// Marks the box as reached, in this state.
    fn reached(&self, state: BoxState) {
        let mut live = self.live();
        live.state = state;
        live.reason = None;
    }
}
