//! What anybody may read of a session without asking it.

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
use crate::box_actor::persist::Persistence;
use crate::caller::Rights as _;
use box_rpc::Caller;

/// A session's entry: written by its actor and by the table, read by `get` and `list`. The lock is held
/// for a few loads and stores, never across a wait.
pub(crate) struct BoxEntry {
    pub(crate) owner: Arc<str>,
    /// As asked for, without what belongs to one call and without what [`Live`] holds.
    pub(crate) spec: BoxSpec,
    live: Mutex<Live>,
    /// The way to what is inside the box.
    pub(crate) access: AgentAccess,
    /// Told when the box may have another end.
    pub(crate) other_end: Notify,
    pub(crate) persistence: watch::Sender<Persistence>,
    /// Held while the network policy is applied: whoever is last applies the newest.
    connecting: Mutex<()>,
}

/// Where a box is.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) id: Uuid,
}

/// What may change while the session lives.
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
    /// The box, while there is one, running or not.
    pub(crate) place: Option<Place>,
    pub(crate) mounts: Mounts,
}

/// The version of [`Record`]. A new member needs none; what an older program would misunderstand does.
const RECORD_VERSION: u32 = 1;

/// A session, as it is kept on disk with its box. Read by other versions of this program than the one that has written it: what
/// they do not know they pass over, and what they need is there from the first version on, or has a default.
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
    /// Reads one back, if this version can.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let record: Self = serde_json::from_str(text).ok()?;
        (record.version <= RECORD_VERSION).then_some(record)
    }
}

/// Mounts one box may come to have.
const MOUNTS: usize = 256;

/// The mounts of a box that is there.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Mounts {
    /// As its calls ask for them.
    pub(crate) asked: Vec<BoxMountSpec>,
    /// Added since, which no call needs to ask for.
    pub(crate) added: Vec<BoxMountSpec>,
}

impl Mounts {
    pub(crate) fn has(&self, mount: &BoxMountSpec) -> bool {
        self.asked.contains(mount) || self.added.contains(mount)
    }

    /// Refuses what would be more than a box may come to have.
    pub(crate) fn has_room_for(&self, new: usize) -> Result<(), BoxError> {
        if self.asked.len() + self.added.len() + new > MOUNTS {
            let what = "mounts of one box";
            return Err(BoxError::limit(Code::Capacity, what, "mounts", MOUNTS));
        }
        Ok(())
    }

    /// Whether something is mounted in the same place.
    pub(crate) fn covers(&self, mount: &BoxMountSpec) -> bool {
        let mut there = self.asked.iter().chain(&self.added);
        there.any(|other| other.mount_path == mount.mount_path)
    }
}

impl BoxEntry {
    /// The entry of a session that is about to be made.
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
            other_end: Notify::new(),
            persistence: watch::Sender::new(Persistence::default()),
            connecting: Mutex::new(()),
        }
    }

    /// There is a box now. Lets it out, if it has a network, to whom it may connect.
    pub(crate) fn is_at(&self, place: Place, mounts: Mounts) -> Result<(), BoxError> {
        {
            let mut live = self.live();
            live.place = Some(place);
            live.mounts = mounts;
        }
        self.connect()
    }

    /// There is no box any more.
    pub(crate) fn is_gone(&self) {
        let mut live = self.live();
        live.place = None;
        live.mounts = Mounts::default();
    }

    /// Where the box is, if there is one, running or not.
    pub(crate) fn place_now(&self) -> Option<Place> {
        self.live().place.clone()
    }

    /// Changes to whom the box may connect, at once if there is one.
    pub(crate) fn set_policy(&self, policy: NetworkPolicy) -> Result<(), BoxError> {
        let policy = Some(Box::new(policy));
        let before = std::mem::replace(&mut self.live().network_policy, policy);
        self.connect()
            .inspect_err(|_| self.live().network_policy = before)
    }

    /// Applies the policy that is on the entry by the time it is applied.
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

    /// Every change is a few assignments, so a poisoned lock still holds a sound entry.
    pub(crate) fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn world(&self) -> World {
        self.spec.world.clone().unwrap_or_default()
    }

    /// Notes what the exec lane does.
    pub(crate) fn set_lane(&self, lane: LaneStatus) {
        self.live().lane = lane;
    }

    /// Notes that the box has work.
    pub(crate) fn used(&self, lane: LaneStatus) {
        let now = UnixMs::now();
        let mut live = self.live();
        live.lane = lane;
        live.last_used_at = now;
    }

    /// Notes that somebody uses the box, or has just done so.
    pub(crate) fn touch(&self) {
        self.live().last_used_at = UnixMs::now();
    }

    /// Notes that the box is gone though nobody deleted it.
    pub(crate) fn failed(&self, why: BoxError) {
        let reason = why.message().to_owned();
        self.access.shut(why);
        let mut live = self.live();
        live.state = BoxState::Failed;
        live.reason = Some(reason);
    }

    /// What a later process needs to know the box again.
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

    /// The entry of a session whose box was adopted from this backend.
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

    /// The box among all: its owner and its id.
    pub(crate) fn key(&self) -> (Arc<str>, BoxId) {
        (Arc::clone(&self.owner), self.spec.box_id.clone())
    }

    /// Whether a caller who sees all means this box of another owner: `ID@OWNER`, or the box's own unique id.
    pub(crate) fn is_called(&self, id: &BoxId) -> bool {
        let owned = id.as_str().strip_suffix(&*self.owner);
        owned.and_then(|id| id.strip_suffix('@')) == Some(self.spec.box_id.as_str())
            || self.live().backend_id == id.as_str()
    }

    /// The id by which this caller knows the box.
    pub(crate) fn seen_as(&self, caller: &Caller) -> BoxId {
        let id = &self.spec.box_id;
        let unique = || BoxId::new(&self.live().backend_id).ok();
        let known = caller.knows(&self.owner, id).or_else(unique);
        known.unwrap_or_else(|| id.clone())
    }

    /// Everything, as this caller is told.
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

    /// What a list tells of it.
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
