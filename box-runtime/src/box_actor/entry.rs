//! Shared description of a box, readable without a request to its actor.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use box_protocol::{
    BoxError, BoxId, BoxInfo, BoxMountSpec, BoxSpec, BoxState, Code, Defaults, Env, Labels,
    LaneStatus, Lifetime, Name, Network, NetworkPolicy, Note, UnixMs, World,
};

use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use uuid::Uuid;

use crate::backend::{Backend, Facts};
use crate::box_actor::agent_access::AgentAccess;
use crate::box_actor::lane::Lane;
use crate::box_actor::persist::Persistence;
use crate::caller::Rights as _;
use box_rpc::Caller;

/// Entry of a box: written by its actor and the table, read by `get` and `list`.
///
/// Callers hold the lock for a few loads and stores and never across an await.
pub(crate) struct BoxEntry {
    pub(crate) owner: Arc<str>,
    /// Requested spec, without per-call fields and without the fields of [`Live`].
    pub(crate) spec: BoxSpec,
    live: Mutex<Live>,
    /// Access to the agent of the box.
    pub(crate) access: AgentAccess,
    /// The exec that runs in the box.
    pub(crate) lane: Lane,
    /// Signals that the expiry of the box may have changed.
    pub(crate) other_end: Notify,
    pub(crate) persistence: watch::Sender<Persistence>,
    /// Held while a network policy is applied, so that the newest one is applied last.
    connecting: Mutex<()>,
}

/// Location of a box: its backend and its id there.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) id: Uuid,
}

/// Mutable part of the entry.
pub(crate) struct Live {
    pub(crate) state: BoxState,
    pub(crate) lane: LaneStatus,
    pub(crate) reason: Option<String>,
    pub(crate) backend_name: Arc<str>,
    pub(crate) backend_id: String,
    pub(crate) created_at: UnixMs,
    pub(crate) last_used_at: UnixMs,
    pub(crate) facts: Facts,
    pub(crate) name: Option<Name>,
    pub(crate) labels: Labels,
    pub(crate) note: Option<Note>,
    pub(crate) lifetime: Option<Box<Lifetime>>,
    pub(crate) defaults: Option<Box<Defaults>>,
    pub(crate) network_policy: Option<Box<NetworkPolicy>>,
    /// Location of the box, while it exists.
    pub(crate) place: Option<Place>,
    pub(crate) mounts: Mounts,
}

/// Version of [`Record`].
///
/// An added field keeps the version. A change that an older program would misread increments it.
const RECORD_VERSION: u32 = 1;

/// Persistent form of an entry, stored on disk with its box.
///
/// Other versions of this program read it. They ignore unknown fields, and every field they need
/// exists since the first version or has a default.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    owner: String,
    #[serde(deserialize_with = "BoxSpec::written_before")]
    spec: BoxSpec,
    backend_id: String,
    created_at: UnixMs,
    facts: Facts,
    name: Option<Name>,
    labels: Labels,
    note: Option<Note>,
    lifetime: Option<Lifetime>,
    defaults: Option<Defaults>,
    #[serde(default)]
    network_policy: Option<NetworkPolicy>,
    #[serde(default)]
    pub(crate) paused: bool,
    #[serde(default)]
    pub(crate) stopped: bool,
    #[serde(default)]
    pub(crate) mounts: Mounts,
}

impl Record {
    /// Parses a record, if this version supports it.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let record: Self = serde_json::from_str(text).ok()?;
        (record.version <= RECORD_VERSION).then_some(record)
    }
}

/// Limit of mounts per box.
const MOUNTS: usize = 256;

/// Mounts of an existing box.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Mounts {
    /// Mounts requested by calls.
    pub(crate) asked: Vec<BoxMountSpec>,
    /// Mounts added later, which no call needs to request.
    pub(crate) added: Vec<BoxMountSpec>,
}

impl Mounts {
    pub(crate) fn has(&self, mount: &BoxMountSpec) -> bool {
        self.asked.contains(mount) || self.added.contains(mount)
    }

    /// Returns an error if new mounts would exceed the limit.
    pub(crate) fn has_room_for(&self, new: usize) -> Result<(), BoxError> {
        if self.asked.len() + self.added.len() + new > MOUNTS {
            let what = "mounts of one box";
            return Err(BoxError::limit(Code::Capacity, what, "mounts", MOUNTS));
        }
        Ok(())
    }

    /// Returns whether a mount exists at the same path.
    pub(crate) fn covers(&self, mount: &BoxMountSpec) -> bool {
        let mut there = self.asked.iter().chain(&self.added);
        there.any(|other| other.mount_path == mount.mount_path)
    }
}

impl BoxEntry {
    /// Creates the entry of a box that is about to start.
    pub(crate) fn new(owner: Arc<str>, asked: &BoxSpec) -> Self {
        let mut spec = asked.clone();
        spec.cmd = String::new();
        spec.env = Env::new();
        let now = UnixMs::now();
        let live = Live {
            state: BoxState::Starting,
            lane: LaneStatus::Idle,
            reason: None,
            backend_name: "".into(),
            backend_id: String::new(),
            created_at: now,
            last_used_at: now,
            facts: Facts::default(),
            name: spec.name.take(),
            labels: spec.labels.take().unwrap_or_default(),
            note: spec.note.take(),
            lifetime: spec.lifetime.take().map(Box::new),
            defaults: spec.defaults.take().map(Box::new),
            network_policy: spec.network_policy.take(),
            place: None,
            mounts: Mounts::default(),
        };
        Self {
            owner,
            spec,
            live: Mutex::new(live),
            access: AgentAccess::new(),
            lane: Lane::new(),
            other_end: Notify::new(),
            persistence: watch::Sender::new(Persistence::default()),
            connecting: Mutex::new(()),
        }
    }

    /// Records the location of the box and applies its network policy.
    pub(crate) fn is_at(&self, place: Place, mounts: Mounts) -> Result<(), BoxError> {
        {
            let mut live = self.live();
            live.place = Some(place);
            live.mounts = mounts;
        }
        self.connect()
    }

    /// Records that the box no longer exists.
    pub(crate) fn is_gone(&self) {
        let mut live = self.live();
        live.place = None;
        live.mounts = Mounts::default();
    }

    /// Returns the location of the box, if it exists.
    pub(crate) fn place_now(&self) -> Option<Place> {
        self.live().place.clone()
    }

    /// Replaces the network policy and applies it if the box exists.
    pub(crate) fn set_policy(&self, policy: NetworkPolicy) -> Result<(), BoxError> {
        let policy = Some(Box::new(policy));
        let before = std::mem::replace(&mut self.live().network_policy, policy);
        self.connect()
            .inspect_err(|_| self.live().network_policy = before)
    }

    /// Applies the network policy that the entry holds at the time of the call.
    fn connect(&self) -> Result<(), BoxError> {
        if self.spec.network == Network::Off {
            return Ok(());
        }
        let _last = self
            .connecting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (place, policy) = {
            let live = self.live();
            (live.place.clone(), live.network_policy.as_deref().cloned())
        };
        let policy = policy.unwrap_or_default();
        place.map_or(Ok(()), |place| {
            place.backend.set_network_policy(place.id, &policy)
        })
    }

    /// Locks the mutable part.
    ///
    /// Every change is a few assignments, so a poisoned lock still holds a valid entry.
    pub(crate) fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn world(&self) -> World {
        self.spec.world.clone().unwrap_or_default()
    }

    /// Records the status of the exec queue.
    pub(crate) fn set_lane(&self, lane: LaneStatus) {
        self.live().lane = lane;
    }

    /// Records the status of the exec queue and the use of the box.
    pub(crate) fn used(&self, lane: LaneStatus) {
        let now = UnixMs::now();
        let mut live = self.live();
        live.lane = lane;
        live.last_used_at = now;
    }

    /// Records the use of the box.
    pub(crate) fn touch(&self) {
        self.live().last_used_at = UnixMs::now();
    }

    /// Records that the box failed, i.e. ended without a delete.
    pub(crate) fn failed(&self, why: BoxError) {
        let reason = why.message().to_owned();
        self.access.shut(why);
        let mut live = self.live();
        live.state = BoxState::Failed;
        live.reason = Some(reason);
    }

    /// Returns the record that a later process needs to adopt the box.
    pub(crate) fn record(&self) -> Record {
        let live = self.live();
        Record {
            version: RECORD_VERSION,
            owner: self.owner.to_string(),
            spec: self.spec.clone(),
            backend_id: live.backend_id.clone(),
            created_at: live.created_at,
            facts: live.facts.clone(),
            name: live.name.clone(),
            labels: live.labels.clone(),
            note: live.note.clone(),
            lifetime: live.lifetime.as_deref().cloned(),
            defaults: live.defaults.as_deref().cloned(),
            network_policy: live.network_policy.as_deref().cloned(),
            paused: live.state == BoxState::Paused,
            stopped: live.state == BoxState::Stopped,
            mounts: live.mounts.clone(),
        }
    }

    /// Creates the entry of a box that this backend has adopted.
    pub(crate) fn adopted(record: Record, backend_name: &str) -> Self {
        let entry = Self::new(record.owner.into(), &record.spec);
        {
            let mut live = entry.live();
            live.backend_name = backend_name.into();
            live.backend_id = record.backend_id;
            live.created_at = record.created_at;
            live.facts = record.facts;
            live.name = record.name;
            live.labels = record.labels;
            live.note = record.note;
            live.lifetime = record.lifetime.map(Box::new);
            live.defaults = record.defaults.map(Box::new);
            live.network_policy = record.network_policy.map(Box::new);
        }
        entry
    }

    /// Returns the unique key of the box: its owner and its id.
    pub(crate) fn key(&self) -> (Arc<str>, BoxId) {
        (Arc::clone(&self.owner), self.spec.box_id.clone())
    }

    /// Returns whether an id names this box of another owner.
    ///
    /// A caller with access to all boxes writes `ID@OWNER`, or the unique id of the box.
    pub(crate) fn is_called(&self, id: &BoxId) -> bool {
        let owned = id.as_str().strip_suffix(&*self.owner);
        owned.and_then(|id| id.strip_suffix('@')) == Some(self.spec.box_id.as_str())
            || self.live().backend_id == id.as_str()
    }

    /// Returns the id under which this caller sees the box.
    pub(crate) fn seen_as(&self, caller: &Caller) -> BoxId {
        let id = &self.spec.box_id;
        let unique = || BoxId::new(&self.live().backend_id).ok();
        let known = caller.knows(&self.owner, id).or_else(unique);
        known.unwrap_or_else(|| id.clone())
    }

    /// Returns the full description of the box for this caller.
    pub(crate) fn info(&self, caller: &Caller) -> BoxInfo {
        let (defaults, network_policy) = {
            let live = self.live();
            let defaults = live.defaults.as_deref().cloned();
            (defaults, live.network_policy.clone())
        };
        BoxInfo {
            defaults,
            network_policy,
            ..self.listed(caller)
        }
    }

    /// Returns the description of the box in a list.
    pub(crate) fn listed(&self, caller: &Caller) -> BoxInfo {
        let box_id = self.seen_as(caller);
        let live = self.live();
        BoxInfo {
            box_id,
            last_used_at: live.last_used_at,
            state: live.state,
            reason: live.reason.clone(),
            status: live.lane,
            image_resolved: live.facts.image_resolved.clone(),
            rootfs: live.facts.rootfs.as_deref().map(str::to_owned),
            missing: live.facts.missing.clone(),
            degraded: live.facts.degraded.clone(),
            name: live.name.clone(),
            labels: live.labels.clone(),
            note: live.note.clone(),
            lifetime: live.lifetime.as_deref().cloned(),
            ..BoxInfo::starting(
                &self.spec,
                &*live.backend_name,
                live.backend_id.clone(),
                live.created_at,
            )
        }
    }
}
