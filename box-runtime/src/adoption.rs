//! Adopts the boxes of an earlier process.
//!
//! # Steps
//! 1. The backend lists the boxes that it finds on disk, with the record of each
//!    (`native/adopt.rs`). The runtime ignores a record that it cannot parse.
//! 2. For each box, the runtime asks the backend to reach its agent, checks the agent's health and
//!    applies the network policy of the record. It repeats this until the box answers or is known
//!    to be dead.
//! 3. A paused box runs while the runtime connects to its agent, and is paused again afterwards.
//! 4. The runtime registers the box, with an actor, as running or paused. A box that has not
//!    answered within five seconds is registered as unreachable; its actor keeps waiting.
//! 5. If an earlier process was stopping the box, the backend completes that, and the runtime
//!    registers the box as stopped. It also registers the boxes without a sandbox (`records.rs`):
//!    stopped ones, and those that have not started, which start again.
//! 6. The runtime ends the boxes of a fork that an earlier process has not completed
//!    (`snapshots/fork_marks.rs`).
//! 7. The actor receives the exits of commands that ended while no server was running (`audit.rs`).
//!
//! Commands continue during all of this. An exec continues if its `on_disconnect` is `keep`.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use box_protocol::actions::AgentHealthParams;
use box_protocol::error::{Detail, Subject};
use box_protocol::{BoxError, BoxId, BoxState};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

use crate::backend::{AdoptedBox, Backend, LayerFiles, Reach};
use crate::box_actor::entry::{BoxEntry, Location, Mounts, PersistedBox};
use crate::box_actor::files::BoxFiles;
use crate::box_actor::{ActorStart, RunningBox, Shared};
use crate::history::History;
use crate::layers::LayerUse;
use crate::registry::RegistryMessage;
use crate::runtime::BoxRuntime;
use crate::snapshots::{ForkMarks, blocking};
use box_rpc::Caller;

/// Maximum time that adopted agents may delay the start of a server.
///
/// The server starts without the agents that have not answered by then, and keeps waiting for them.
const READY_WITHIN: Duration = Duration::from_secs(5);

/// First and longest pause between two attempts to reach a box.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The pending connection to an adopted box, or the reason that the box is dead.
pub(crate) type PendingReach = BoxFuture<'static, Result<Reached, &'static str>>;

/// An adopted box.
pub(crate) enum Reached {
    /// Its agent has answered.
    Running(Box<RunningBox>),
    /// An earlier process was stopping it, and the runtime has completed that.
    Stopped,
}

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
        let layers = self.shared().layers.clone();
        let loaded = tokio::task::spawn_blocking(move || layers.load()).await;
        loaded.map_err(|_| BoxError::internal("layer task failed"))??;
        // A call that fails has reached no box, because the end of this process would end the
        // boxes that it has reached.
        let records = self.records().await?;
        let mut found = Vec::new();
        for backend in &self.shared().config.backends {
            let readable = |record: &str| PersistedBox::read(record).is_some();
            found.push((backend, backend.adopt(readable).await?));
        }
        let forks = ForkMarks::new(self.shared().state.forks());
        let incomplete = self.incomplete_forks(&forks).await?;
        let mut adopted = 0;
        let mut skipped = 0;
        let (mut unended, mut started) = (HashSet::new(), HashSet::new());
        for (backend, found) in found {
            skipped += found.skipped.len();
            let mut kept = Vec::new();
            for found in found.boxes {
                let record = PersistedBox::read(&found.record);
                started.extend(record.as_ref().map(|record| record.unique_id().to_owned()));
                let fork = record.and_then(|record| record.files.fork());
                match fork.filter(|fork| incomplete.contains(fork)) {
                    None => kept.push(found),
                    Some(_) if self.end(backend, found.id).await => {}
                    Some(fork) => drop(unended.insert(fork)),
                }
            }
            let all = kept.into_iter();
            let all = all.map(|found| self.adopt_one(backend, found));
            let all = futures::future::join_all(all).await;
            adopted += all.into_iter().filter(|adopted| *adopted).count();
        }
        let known = self.stopped_ids().await;
        // The backend has completed the stop of the known ones.
        for (id, record) in records.into_iter().filter(|(id, _)| !known.contains(id)) {
            let Some(mut record) = PersistedBox::read(&record) else {
                tracing::warn!(record = %id, "cannot adopt a box of another version");
                skipped += 1;
                continue;
            };
            let fork = record.files.fork();
            let is_incomplete = fork.is_some_and(|fork| incomplete.contains(&fork));
            match record.unstarted.take() {
                Some(_) if started.contains(record.unique_id()) => self.remove_record(id).await,
                Some(start) => self.adopt_unstarted(id, record, start).await,
                None if is_incomplete => self.remove_record(id).await,
                None => adopted += usize::from(self.adopt_stopped(id, record).await),
            }
        }
        if skipped == 0 {
            self.shared().layers.keep_unused(false);
            self.sweep_histories().await;
        } else {
            tracing::warn!(
                skipped,
                "the layers and logs of skipped boxes are unknown; unused ones stay"
            );
        }
        for fork in incomplete.difference(&unended).copied() {
            let forks = forks.clone();
            let _ = tokio::task::spawn_blocking(move || forks.remove(fork)).await;
        }
        self.sweep_items().await;
        self.open_pools();
        Ok(adopted)
    }

    /// Returns the forks that an earlier process has not completed.
    async fn incomplete_forks(&self, forks: &ForkMarks) -> Result<HashSet<Uuid>, BoxError> {
        let forks = forks.clone();
        let found = tokio::task::spawn_blocking(move || forks.incomplete()).await;
        let found = found.map_err(|_| BoxError::internal("state directory task failed"))?;
        let found = found.map_err(|error| {
            BoxError::unavailable(format!(
                "the marks of forks cannot be read: {}",
                error.kind()
            ))
        })?;
        for fork in &found {
            tracing::info!(%fork, "ending the boxes of a fork that an earlier server did not complete");
        }
        Ok(found)
    }

    /// Removes the record of a box without a sandbox.
    async fn remove_record(&self, id: Uuid) {
        self.shared().records.place(id).remove_soon().await;
    }

    /// Reads the records of boxes without a sandbox.
    async fn records(&self) -> Result<Vec<(Uuid, String)>, BoxError> {
        let records = self.shared().records.clone();
        let found = tokio::task::spawn_blocking(move || records.list()).await;
        let found = found.map_err(|_| BoxError::internal("state directory task failed"))?;
        found.map_err(|error| {
            let kind = error.kind();
            BoxError::unavailable(format!("the records of boxes cannot be read: {kind}"))
        })
    }

    /// Adopts a box and returns whether its agent has answered.
    async fn adopt_one(&self, backend: &Arc<dyn Backend>, found: AdoptedBox) -> bool {
        let Some(record) = PersistedBox::read(&found.record) else {
            return false;
        };
        let persisted = PersistedState {
            paused: record.paused,
            mounts: record.mounts.clone(),
        };
        let entry = self.adopted_entry(record, backend.name()).await;
        let location = Location {
            backend: Arc::clone(backend),
            id: found.id,
        };
        let of = (Arc::clone(&entry), location);
        let mut pending = reach(self.shared_arc(), of, persisted).boxed();
        let (begin, kind, message) = match timeout(READY_WITHIN, &mut pending).await {
            Ok(Ok(Reached::Running(running))) => (ActorStart::Running(running), "adopted", ""),
            Ok(Ok(Reached::Stopped)) => (ActorStart::Stopped, "adopted", "it is stopped"),
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
        let answered = matches!(begin, ActorStart::Running(_) | ActorStart::Stopped);
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

    /// Creates the entry of a box of an earlier process, with its layers and items.
    pub(crate) async fn adopted_entry(
        &self,
        record: PersistedBox,
        backend_name: &str,
    ) -> Arc<BoxEntry> {
        let files = BoxFiles::adopted(record.files.clone(), &self.shared().layers);
        let directory = record.history.as_deref();
        let directory = directory.and_then(|name| self.shared().state.history(name));
        let history = match directory {
            Some(directory) => tokio::task::spawn_blocking(|| History::load(directory))
                .await
                .ok(),
            None => None,
        };
        let entry = Arc::new(BoxEntry::adopted(record, backend_name));
        let volumes = entry.status().volumes.clone();
        let items = &self.shared().items;
        let mut uses = items.adopt(&entry.spec, &volumes);
        uses.extend(files.snapshot.as_ref().map(|id| items.adopt_snapshot(id)));
        {
            let mut status = entry.status();
            status.uses = uses;
            status.history = history;
            *status.files = files;
        }
        entry
    }

    /// The internal ids of the stopped boxes that are registered.
    async fn stopped_ids(&self) -> HashSet<Uuid> {
        let entries = self.all_entries().await;
        let id_of = |entry: &Arc<BoxEntry>| {
            let status = entry.status();
            status.stopped.as_ref().map(|record| record.id())
        };
        entries.iter().filter_map(id_of).collect()
    }

    /// Adopts a stopped box of an earlier process, and returns whether it is stopped.
    async fn adopt_stopped(&self, id: Uuid, record: PersistedBox) -> bool {
        let backend = self.shared().config.backends.first();
        let backend_name = backend.map_or("", |backend| backend.name());
        let mounts = record.mounts.clone();
        let entry = self.adopted_entry(record, backend_name).await;
        let place = self.shared().records.place(id);
        {
            let mut status = entry.status();
            status.state = BoxState::Stopped;
            status.mounts = mounts;
            status.stopped = Some(Box::new(place));
            // The earlier process was starting the box.
            if let Some(disk) = status.files.disk.take() {
                status.files.layers.insert(0, disk);
            }
        }
        let is_stopped = self.register(&entry, ActorStart::Stopped).await.is_ok();
        if is_stopped {
            self.shared()
                .events
                .record(&entry, "adopted", "it is stopped");
        } else {
            // The box has started again, or was not stopped after all.
            entry.status().history = None;
            self.remove_record(id).await;
        }
        is_stopped
    }

    pub(crate) async fn register(
        &self,
        entry: &Arc<BoxEntry>,
        begin: ActorStart,
    ) -> Result<(), BoxError> {
        let entry = Arc::clone(entry);
        let adopt = |reply| RegistryMessage::Adopt {
            entry,
            begin,
            reply,
        };
        if self.query(adopt).await? {
            return Ok(());
        }
        Err(BoxError::conflict("box_id: used by another box"))
    }

    pub(crate) async fn all_entries(&self) -> Vec<Arc<BoxEntry>> {
        let all = |reply| RegistryMessage::All {
            caller: Caller::Local,
            reply,
        };
        self.query(all).await.unwrap_or_default()
    }

    /// Removes the commands of boxes that no longer exist.
    async fn sweep_histories(&self) {
        let entries = self.all_entries().await;
        let id = |entry: &Arc<BoxEntry>| entry.status().history.as_ref().and_then(History::name);
        let known: Vec<_> = entries.iter().filter_map(id).collect();
        let shared = self.shared_arc();
        let sweeping = move || shared.state.retain_histories(&known);
        let _ = tokio::task::spawn_blocking(sweeping).await;
    }

    /// Ends a box that is not adopted, and returns whether it is gone.
    async fn end(&self, backend: &Arc<dyn Backend>, id: Uuid) -> bool {
        let stopped = timeout(self.shared().config.stop_timeout, backend.stop(id)).await;
        let is_gone = matches!(stopped, Ok(Ok(())));
        if !is_gone {
            tracing::error!(backend_id = %id, "cannot stop the box");
        }
        is_gone
    }
}

/// The state of a box according to its record.
struct PersistedState {
    paused: bool,
    mounts: Mounts,
}

/// Connects to the agent of a box, without a time limit.
async fn reach(
    shared: Arc<Shared>,
    (entry, location): (Arc<BoxEntry>, Location),
    persisted: PersistedState,
) -> Result<Reached, &'static str> {
    let mut pause = FIRST_PAUSE;
    loop {
        match try_to_reach(&shared, &entry, &location, &persisted.mounts).await {
            Ok(Ok(None)) => return Ok(Reached::Stopped),
            Ok(Ok(Some(running))) => {
                // The box ran while the runtime connected to its agent. If it cannot be paused
                // again, it keeps running.
                let limit = shared.config.probe_timeout;
                let frozen = persisted.paused && running.freeze(limit, true).await.is_ok();
                entry.reached(if frozen {
                    BoxState::Paused
                } else {
                    BoxState::Running
                });
                return Ok(Reached::Running(Box::new(running)));
            }
            Ok(Err(reason)) => return Err(reason),
            Err(error) => {
                let (owner, box_id) = (&entry.owner, &entry.spec.box_id);
                tracing::warn!(%owner, %box_id, %error, "cannot reach a box; retrying");
                let mut status = entry.status();
                if status.state == BoxState::Unreachable {
                    // For example, an agent of a version that this program does not know.
                    status.reason = Some(error.message().to_owned());
                }
            }
        }
        sleep(pause).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
}

/// Reaches a box. The result is `None` for a box that an earlier process was stopping.
async fn try_to_reach(
    shared: &Shared,
    entry: &Arc<BoxEntry>,
    location: &Location,
    mounts: &Mounts,
) -> Result<Result<Option<RunningBox>, &'static str>, BoxError> {
    let started = match location.backend.reach(location.id).await? {
        Reach::Alive(started) => started,
        Reach::Dead(why) => return Ok(Err(why)),
        Reach::Stopped { into, files } => {
            let Some(layer) = shared.layers.at(&into) else {
                return Ok(Err("its files are not where an earlier process left them"));
            };
            complete_stop(shared, entry, location, mounts, (layer, files)).await?;
            return Ok(Ok(None));
        }
    };
    let connection = (started.connection, started.shm);
    let (of, health) = (
        (&location.backend, location.id),
        AgentHealthParams::default(),
    );
    let running = RunningBox::connect(shared, of, connection, &health).await?;
    let located = entry.set_location(location.clone(), mounts.clone());
    located.inspect_err(|_| entry.clear_location())?;
    Ok(Ok(Some(running)))
}

/// Stores a box that an earlier process was stopping, and ends the rest of it.
async fn complete_stop(
    shared: &Shared,
    entry: &Arc<BoxEntry>,
    location: &Location,
    mounts: &Mounts,
    (layer, files): (LayerUse, LayerFiles),
) -> Result<(), BoxError> {
    let of_layer = layer.clone();
    blocking(move || of_layer.finish(files)).await?;
    let history = entry.status().history.clone();
    let history = history.unwrap_or_else(|| History::new(shared.state.new_history()));
    entry.set_stopped(&shared.records, location.id, layer, history);
    {
        let mut status = entry.status();
        status.mounts = mounts.clone();
        status.reason = None;
    }
    entry.mark_changed();
    entry.wait_persisted().await?;
    location.backend.stop(location.id).await
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
        status.set_state(BoxState::Unreachable);
        status.reason = Some("its agent has not answered".to_owned());
    }

    /// Marks the box as reached, in this state.
    fn reached(&self, state: BoxState) {
        let mut status = self.status();
        // The record has the time at which the box entered this state.
        if status.state == BoxState::Starting {
            status.state = state;
        }
        status.set_state(state);
        status.reason = None;
    }
}
