//! Shared description of a box, readable without a request to its actor.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::{
    BoxError, BoxId, BoxInfo, BoxMountSpec, BoxSpec, BoxState, Code, Defaults, Env, ExecStatus,
    GatewayName, ItemId, Labels, Lifetime, Main, Name, Network, NetworkPolicy, Note, UnixMs,
};

use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use uuid::Uuid;

use crate::backend::{Backend, Facts};
use crate::box_actor::agent_access::AgentAccess;
use crate::box_actor::current_exec::CurrentExec;
use crate::box_actor::files::{BoxFiles, PersistedFiles};
use crate::box_actor::persist::Persistence;
use crate::box_actor::unstarted::{PersistedStart, Unstarted};
use crate::caller::Visibility as _;
use crate::catalog::ItemUse;
use crate::history::History;
use crate::layers::LayerUse;
use crate::records::RecordPlace;
use crate::stats::CpuSample;
use crate::watched::Watched;
use box_rpc::Caller;

/// Entry of a box: written by its actor and the registry, read by `get` and `list`.
///
/// Callers hold the lock for a few loads and stores and never across an await.
pub(crate) struct BoxEntry {
    pub(crate) owner: Arc<str>,
    /// Requested spec, without per-call fields and without the fields of [`BoxStatus`].
    pub(crate) spec: BoxSpec,
    status: Mutex<BoxStatus>,
    /// Access to the agent of the box.
    pub(crate) access: AgentAccess,
    /// The exec that runs in the box.
    pub(crate) current_exec: CurrentExec,
    /// Signals that the expiry of the box may have changed.
    pub(crate) lifetime_changed: Notify,
    pub(crate) persistence: Watched<Persistence>,
    /// Number of copies of the files that the runtime makes now.
    pub(crate) copies: Watched<usize>,
    /// Held while a network policy is applied, so that the newest one is applied last.
    policy_lock: Mutex<()>,
}

/// Location of a box: its backend and its id there.
#[derive(Clone)]
pub(crate) struct Location {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) id: Uuid,
}

/// Mutable part of the entry.
pub(crate) struct BoxStatus {
    pub(crate) state: BoxState,
    /// When the box entered the state.
    pub(crate) since: UnixMs,
    pub(crate) exec_status: ExecStatus,
    pub(crate) reason: Option<String>,
    pub(crate) backend_name: Arc<str>,
    pub(crate) backend_id: String,
    /// The id in addresses, from the creation of the box to its deletion.
    pub(crate) unique_id: String,
    pub(crate) created_at: UnixMs,
    pub(crate) last_used_at: UnixMs,
    pub(crate) facts: Facts,
    pub(crate) name: Option<Name>,
    pub(crate) labels: Labels,
    pub(crate) note: Option<Note>,
    pub(crate) lifetime: Option<Box<Lifetime>>,
    pub(crate) defaults: Option<Box<Defaults>>,
    pub(crate) network_policy: Option<Box<NetworkPolicy>>,
    /// Settings of the image of the box.
    pub(crate) image: Option<Box<ImageDefaults>>,
    /// Location of the box, while it exists.
    pub(crate) location: Option<Location>,
    pub(crate) mounts: Mounts,
    /// Ids of the volumes in the spec, after the first start.
    pub(crate) volumes: Vec<ItemId>,
    /// Uses of items, while the box exists.
    pub(crate) uses: Vec<ItemUse>,
    /// The pool that the box was taken from.
    pub(crate) pool: Option<Name>,
    /// Why it could not be taken from a pool.
    pub(crate) pool_missed: Option<String>,
    /// The sample of the CPU time from which the next one counts.
    pub(crate) cpu_sample: CpuSample,
    pub(crate) files: Box<BoxFiles>,
    /// Place of the record, while the box is stopped.
    pub(crate) stopped: Option<Box<RecordPlace>>,
    /// Record of a box that outlives this process before it has started.
    pub(crate) unstarted: Option<Box<Unstarted>>,
    /// Records on disk that no longer describe the box.
    pub(crate) obsolete_records: Vec<RecordPlace>,
    /// Commands before the last stop.
    pub(crate) history: Option<History>,
}

impl BoxStatus {
    /// Changes the state and records the time of a change.
    pub(crate) fn set_state(&mut self, state: BoxState) {
        if self.state != state {
            self.state = state;
            self.since = UnixMs::now();
        }
    }

    /// Records that a record is not obsolete.
    pub(crate) fn keep_record(&mut self, place: &RecordPlace) {
        self.obsolete_records
            .retain(|other| other.id() != place.id());
    }
}

/// The settings of an image that the runtime applies to the commands of its box.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ImageDefaults {
    /// The working directory, unless a host directory is mounted as the workspace.
    pub(crate) cwd: Option<String>,
    /// Entrypoint and command, if the spec asks for them.
    pub(crate) argv: Vec<String>,
}

/// Returns an id that no other box has.
pub(crate) fn new_unique_id() -> String {
    Uuid::now_v7().simple().to_string()
}

/// Version of [`PersistedBox`].
///
/// An added field keeps the version. A change that an older program would misread increments it.
/// Version 2 is that of boxes that have not started, which older programs would take for stopped
/// ones. All other records have version 1.
const RECORD_VERSION: u32 = 2;

/// Persistent form of an entry, stored on disk with its box.
///
/// Other versions of this program read it. They ignore unknown fields, and every field they need
/// exists since the first version or has a default.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PersistedBox {
    version: u32,
    owner: String,
    #[serde(deserialize_with = "BoxSpec::written_before")]
    spec: BoxSpec,
    backend_id: String,
    /// Absent in records of earlier versions, whose addresses contain `backend_id`.
    #[serde(default)]
    unique_id: Option<String>,
    created_at: UnixMs,
    #[serde(default)]
    since: Option<UnixMs>,
    facts: Facts,
    name: Option<Name>,
    labels: Labels,
    note: Option<Note>,
    lifetime: Option<Lifetime>,
    defaults: Option<Defaults>,
    #[serde(default)]
    network_policy: Option<NetworkPolicy>,
    #[serde(default)]
    image: Option<ImageDefaults>,
    #[serde(default)]
    pub(crate) paused: bool,
    #[serde(default)]
    pub(crate) stopped: bool,
    #[serde(default)]
    pub(crate) mounts: Mounts,
    #[serde(default)]
    volumes: Vec<ItemId>,
    #[serde(default)]
    pool: Option<Name>,
    #[serde(default)]
    pool_missed: Option<String>,
    #[serde(default)]
    pub(crate) files: PersistedFiles,
    /// Commands before the last stop.
    #[serde(default)]
    pub(crate) history: Option<String>,
    /// Start of a box that has not started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unstarted: Option<PersistedStart>,
}

impl PersistedBox {
    /// Parses a record, if this version supports it.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let record: Self = serde_json::from_str(text).ok()?;
        (record.version <= RECORD_VERSION).then_some(record)
    }

    /// Returns the unique id of the box.
    pub(crate) fn unique_id(&self) -> &str {
        self.unique_id.as_ref().unwrap_or(&self.backend_id)
    }

    /// Returns the digest of the image of the box.
    #[cfg(feature = "native")]
    pub(crate) fn image_digest(self) -> Option<String> {
        self.facts.image_resolved
    }
}

/// Limit of mounts per box.
const MAX_MOUNTS: usize = 256;

/// Mounts of an existing box.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Mounts {
    /// Mounts requested by calls.
    #[serde(rename = "asked")]
    pub(crate) requested: Vec<BoxMountSpec>,
    /// Mounts added later, which no call needs to request.
    pub(crate) added: Vec<BoxMountSpec>,
}

impl Mounts {
    pub(crate) fn has(&self, mount: &BoxMountSpec) -> bool {
        self.requested.contains(mount) || self.added.contains(mount)
    }

    /// Returns an error if new mounts would exceed the limit.
    pub(crate) fn check_room_for(&self, new: usize) -> Result<(), BoxError> {
        if self.requested.len() + self.added.len() + new > MAX_MOUNTS {
            let what = "the number of mounts of this box";
            return Err(BoxError::limit(Code::Capacity, what, "mounts", MAX_MOUNTS));
        }
        Ok(())
    }

    /// Returns whether a mount exists at the same path.
    pub(crate) fn covers(&self, mount: &BoxMountSpec) -> bool {
        let mut existing = self.requested.iter().chain(&self.added);
        existing.any(|other| other.mount_path == mount.mount_path)
    }
}

impl BoxEntry {
    /// Creates the entry of a box that is about to start.
    pub(crate) fn new(owner: Arc<str>, requested: &BoxSpec) -> Self {
        let mut spec = requested.clone();
        spec.cmd = String::new();
        spec.env = Env::new();
        let now = UnixMs::now();
        let status = BoxStatus {
            state: BoxState::Starting,
            since: now,
            cpu_sample: CpuSample::default(),
            exec_status: ExecStatus::Idle,
            reason: None,
            backend_name: "".into(),
            backend_id: String::new(),
            unique_id: new_unique_id(),
            created_at: now,
            last_used_at: now,
            facts: Facts::default(),
            name: spec.name.take(),
            labels: spec.labels.take().unwrap_or_default(),
            note: spec.note.take(),
            lifetime: spec.lifetime.take().map(Box::new),
            defaults: spec.defaults.take().map(Box::new),
            network_policy: spec.network_policy.take(),
            image: None,
            location: None,
            mounts: Mounts::default(),
            volumes: Vec::new(),
            uses: Vec::new(),
            pool: None,
            pool_missed: None,
            files: Box::default(),
            stopped: None,
            unstarted: None,
            obsolete_records: Vec::new(),
            history: None,
        };
        Self {
            owner,
            spec,
            status: Mutex::new(status),
            access: AgentAccess::new(),
            current_exec: CurrentExec::new(),
            lifetime_changed: Notify::new(),
            persistence: Watched::new(Persistence::default()),
            copies: Watched::new(0),
            policy_lock: Mutex::new(()),
        }
    }

    /// Records the location of the box and applies its network policy.
    pub(crate) fn set_location(&self, location: Location, mounts: Mounts) -> Result<(), BoxError> {
        {
            let mut status = self.status();
            status.location = Some(location);
            status.mounts = mounts;
        }
        self.apply_policy()
    }

    /// Records that the box no longer exists.
    pub(crate) fn clear_location(&self) {
        let mut status = self.status();
        status.location = None;
        status.mounts = Mounts::default();
    }

    /// Replaces the network policy and applies it if the box exists.
    pub(crate) fn set_policy(&self, policy: NetworkPolicy) -> Result<(), BoxError> {
        let policy = Some(Box::new(policy));
        let before = std::mem::replace(&mut self.status().network_policy, policy);
        self.apply_policy()
            .inspect_err(|_| self.status().network_policy = before)
    }

    /// Applies the network policy that the entry holds at the time of the call.
    fn apply_policy(&self) -> Result<(), BoxError> {
        if self.spec.network == Network::Off {
            return Ok(());
        }
        let _guard = self
            .policy_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (location, policy) = {
            let status = self.status();
            (
                status.location.clone(),
                status.network_policy.as_deref().cloned(),
            )
        };
        let policy = policy.unwrap_or_default();
        location.map_or(Ok(()), |location| {
            location.backend.set_network_policy(location.id, &policy)
        })
    }

    /// Locks the mutable part.
    ///
    /// Every change is a few assignments, so a poisoned lock still holds a valid entry.
    pub(crate) fn status(&self) -> MutexGuard<'_, BoxStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the defaults of the commands of the box, with those of its image.
    pub(crate) fn command_defaults(&self) -> Defaults {
        let status = self.status();
        let mut defaults = status.defaults.as_deref().cloned().unwrap_or_default();
        if defaults.cwd.is_none()
            && let Some(image) = &status.image
        {
            defaults.cwd.clone_from(&image.cwd);
        }
        defaults
    }

    pub(crate) fn gateway(&self) -> GatewayName {
        self.spec.gateway.clone().unwrap_or_default()
    }

    /// Records the status of the exec queue.
    pub(crate) fn set_exec_status(&self, exec_status: ExecStatus) {
        self.status().exec_status = exec_status;
    }

    /// Records the status of the exec queue and the use of the box.
    pub(crate) fn set_used(&self, exec_status: ExecStatus) {
        let now = UnixMs::now();
        let mut status = self.status();
        status.exec_status = exec_status;
        status.last_used_at = now;
    }

    /// Records the use of the box.
    pub(crate) fn touch(&self) {
        self.status().last_used_at = UnixMs::now();
    }

    /// Records that the box failed, i.e. ended without a delete.
    pub(crate) fn set_failed(&self, why: BoxError, reason: String) {
        self.access.close(why);
        let mut status = self.status();
        status.set_state(BoxState::Failed);
        status.reason = Some(reason);
    }

    /// Returns the record that a later process needs to adopt the box.
    pub(crate) fn persisted(&self) -> PersistedBox {
        self.persisted_with(&self.status())
    }

    /// Returns the record of the box with this status, which the caller has locked.
    pub(crate) fn persisted_with(&self, status: &BoxStatus) -> PersistedBox {
        let unstarted = status.persisted_start();
        PersistedBox {
            version: if unstarted.is_some() {
                RECORD_VERSION
            } else {
                1
            },
            owner: self.owner.to_string(),
            spec: self.spec.clone(),
            backend_id: status.backend_id.clone(),
            unique_id: Some(status.unique_id.clone()),
            created_at: status.created_at,
            since: Some(status.since),
            facts: status.facts.clone(),
            name: status.name.clone(),
            labels: status.labels.clone(),
            note: status.note.clone(),
            lifetime: status.lifetime.as_deref().cloned(),
            defaults: status.defaults.as_deref().cloned(),
            network_policy: status.network_policy.as_deref().cloned(),
            image: status.image.as_deref().cloned(),
            paused: status.state == BoxState::Paused,
            stopped: status.state == BoxState::Stopped,
            mounts: status.mounts.clone(),
            volumes: status.volumes.clone(),
            pool: status.pool.clone(),
            pool_missed: status.pool_missed.clone(),
            files: status.files.persisted(),
            history: status.history.as_ref().and_then(History::name),
            unstarted,
        }
    }

    /// Returns the record of the box as a stopped one with these layers.
    pub(crate) fn record_on(&self, layers: &[LayerUse]) -> Result<String, BoxError> {
        let mut record = self.persisted();
        record.files.set_layers(layers);
        (record.paused, record.stopped) = (false, true);
        serde_json::to_string(&record).map_err(|error| BoxError::internal(error.to_string()))
    }

    /// Creates the entry of a box that this backend has adopted.
    pub(crate) fn adopted(record: PersistedBox, backend_name: &str) -> Self {
        let entry = Self::new(record.owner.as_str().into(), &record.spec);
        {
            let mut status = entry.status();
            status.backend_name = backend_name.into();
            record.unique_id().clone_into(&mut status.unique_id);
            status.backend_id = record.backend_id;
            status.created_at = record.created_at;
            status.since = record.since.unwrap_or(record.created_at);
            status.facts = record.facts;
            status.name = record.name;
            status.labels = record.labels;
            status.note = record.note;
            status.lifetime = record.lifetime.map(Box::new);
            status.defaults = record.defaults.map(Box::new);
            status.network_policy = record.network_policy.map(Box::new);
            status.image = record.image.map(Box::new);
            status.volumes = record.volumes;
            status.pool = record.pool;
            status.pool_missed = record.pool_missed;
        }
        entry
    }

    /// Returns the unique key of the box: its owner and its id.
    pub(crate) fn key(&self) -> (Arc<str>, BoxId) {
        (Arc::clone(&self.owner), self.spec.box_id.clone())
    }

    /// Returns whether this id is the unique id of the box.
    pub(crate) fn has_unique_id(&self, id: &str) -> bool {
        self.status().unique_id == id
    }

    /// Returns the id under which this caller sees the box.
    pub(crate) fn visible_id(&self, caller: &Caller) -> BoxId {
        let id = &self.spec.box_id;
        let unique = || BoxId::new(&self.status().unique_id).ok();
        let known = caller.id_for(&self.owner, id).or_else(unique);
        known.unwrap_or_else(|| id.clone())
    }

    /// Returns the full description of the box for this caller.
    pub(crate) fn info(&self, caller: &Caller) -> BoxInfo {
        let (defaults, network_policy, checkpoints) = {
            let status = self.status();
            let defaults = status.defaults.as_deref().cloned();
            let checkpoints = status.files.checkpoints.iter();
            let checkpoints = checkpoints.map(|kept| kept.info.clone()).collect();
            (defaults, status.network_policy.clone(), checkpoints)
        };
        BoxInfo {
            defaults,
            network_policy,
            checkpoints,
            ..self.list_info(caller)
        }
    }

    /// Returns the main command, with the command of the image if the spec has none of its own.
    fn main(&self, status: &BoxStatus) -> Option<Main> {
        let mut main = self.spec.main.clone()?;
        if main.argv.is_empty()
            && let Some(image) = &status.image
        {
            main.argv.clone_from(&image.argv);
        }
        Some(main)
    }

    /// Returns the description of the box in a list.
    pub(crate) fn list_info(&self, caller: &Caller) -> BoxInfo {
        let box_id = self.visible_id(caller);
        let status = self.status();
        BoxInfo {
            box_id,
            unique_id: status.unique_id.clone(),
            last_used_at: status.last_used_at,
            state: status.state,
            pool: status.pool.clone(),
            pool_missed: status.pool_missed.clone(),
            since: status.since,
            main: self.main(&status),
            reason: status.reason.clone(),
            status: status.exec_status,
            image_resolved: status.facts.image_resolved.clone(),
            rootfs: status.facts.rootfs.as_deref().map(str::to_owned),
            missing: status.facts.missing.clone(),
            degraded: status.facts.degraded.clone(),
            name: status.name.clone(),
            labels: status.labels.clone(),
            note: status.note.clone(),
            lifetime: status.lifetime.as_deref().cloned(),
            ..BoxInfo::starting(
                &self.spec,
                &*status.backend_name,
                status.backend_id.clone(),
                status.created_at,
            )
        }
    }
}
