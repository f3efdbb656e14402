//! What makes boxes.

use std::borrow::Cow;
use std::fmt;

use async_trait::async_trait;
use box_protocol::actions::BoxStatsResult;
use box_protocol::{BoxError, BoxMountSpec, BoxSpec, DEFAULT_HOME, NetworkPolicy};
use box_rpc::Connection;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::shm::ShmPool;

/// Makes boxes and ends them. It never runs a command: it hands over a connection to the agent in the
/// box, and the runtime talks to that.
///
/// Every call is made by the task of one session, is bounded in time and may panic: the other
/// sessions do not feel it. Names, reasons and errors are shown to callers, so they hold no path of
/// the host.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// What it is called in configuration and in answers.
    fn name(&self) -> &str;

    /// What its boxes can do beyond running commands.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Whether it can make a box now. Asked at most once a second.
    async fn availability(&self) -> Availability;

    /// What it finds out about this machine, for an operator. It may take a second; nothing else waits for it.
    async fn diagnose(&self) -> Diagnosis {
        Diagnosis::default()
    }

    /// Sets the policy that bounds the network of every box, beside the policy of the box itself. Connections that it does
    /// not allow are closed.
    fn set_egress_policy(&self, policy: &NetworkPolicy) -> Result<(), BoxError> {
        if *policy == NetworkPolicy::default() {
            return Ok(());
        }
        Err(BoxError::unsupported(
            "network.policy: this backend has no policy for all boxes",
        ))
    }

    /// Makes a box and returns once its agent can be spoken to.
    ///
    /// The future is dropped when the box is no longer wanted or takes too long; [`stop`](Self::stop)
    /// is called then, as it is after an error.
    async fn start(&self, request: StartRequest<'_>) -> Result<StartedBox, BoxError>;

    /// Whether the box is still there. Asked before it is used again.
    async fn alive(&self, id: Uuid) -> bool;

    /// Mounts more directories into a living box. Called only with [`Capabilities::adds_mounts`].
    async fn add_mounts(&self, id: Uuid, mounts: &[BoxMountSpec]) -> Result<(), BoxError> {
        let _ = (id, mounts);
        Err(BoxError::unsupported("mounts cannot be added to a box"))
    }

    /// Why a box ended though nobody asked for that, if the backend knows. Asked once its agent is gone.
    fn why_gone(&self, id: Uuid) -> Option<BoxError> {
        let _ = id;
        None
    }

    /// What a box uses now, as far as this machine tells. It does not wait.
    fn usage(&self, id: Uuid) -> Result<BoxStatsResult, BoxError> {
        let _ = id;
        Err(BoxError::unsupported(
            "this backend does not count what its boxes use",
        ))
    }

    /// Decides to whom a box with a network may connect. Called once for each, before anything runs in it or after it was
    /// [adopted](Self::adopt), and again for every change; what the box may not any more is broken off.
    fn set_network_policy(&self, id: Uuid, policy: &NetworkPolicy) -> Result<(), BoxError> {
        let _ = id;
        if *policy == NetworkPolicy::default() {
            return Ok(());
        }
        Err(BoxError::unsupported(
            "this backend keeps no policy for the network of its boxes",
        ))
    }

    /// Stops everything in a box, its agent included, or lets it go on. To do so again is a success.
    async fn freeze(&self, id: Uuid, frozen: bool) -> Result<(), BoxError> {
        let _ = (id, frozen);
        Err(BoxError::unsupported("this backend cannot pause a box"))
    }

    /// Keeps a record with a box, in place of the one before, for whoever [adopts](Self::adopt) it. Called only with
    /// [`Capabilities::outlive`].
    fn keep(&self, id: Uuid, record: &str) -> Result<(), BoxError> {
        let _ = (id, record);
        Ok(())
    }

    /// The boxes of a process that is gone which may still live, and are this one's from now on. A box whose record is not
    /// `readable` is somebody else's, and left alone. Called once, before the first start.
    async fn adopt(&self, readable: Readable) -> Result<Vec<AdoptedBox>, BoxError> {
        let _ = readable;
        Ok(Vec::new())
    }

    /// Waits for the agent of a box that was [adopted](Self::adopt). An error proves nothing of the box: it is called again then,
    /// or [`stop`](Self::stop) is.
    async fn reach(&self, id: Uuid) -> Result<Reach, BoxError> {
        let _ = id;
        Ok(Reach::Gone("this backend adopts no boxes"))
    }

    /// Ends a box with everything in it and frees what it held. Nothing to do is a success: the box
    /// may be gone, half made or never begun.
    async fn stop(&self, id: Uuid) -> Result<(), BoxError>;
}

/// What the boxes of a backend can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Reach a network.
    pub network: bool,
    /// Get more mounts while they live.
    pub adds_mounts: bool,
    /// Outlive this process, with the records that are [kept](Backend::keep) with them.
    pub outlive: bool,
}

impl Capabilities {
    /// The same, reaching a network.
    pub const fn with_network(mut self) -> Self {
        self.network = true;
        self
    }

    /// The same, outliving this process if that is so.
    pub const fn with_outliving(mut self, outlive: bool) -> Self {
        self.outlive = outlive;
        self
    }

    /// The same, getting more mounts while they live.
    pub const fn with_added_mounts(mut self) -> Self {
        self.adds_mounts = true;
        self
    }
}

/// Whether a backend can make boxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// It can.
    Available {
        /// What it does less well than it could.
        degraded: Vec<String>,
        /// Protections it cannot give on this machine.
        missing: Vec<String>,
    },
    /// It cannot.
    Unavailable {
        /// Why, in words that end no sentence: `the daemon does not answer`.
        reason: String,
        /// What it would need and this machine does not have.
        missing: Vec<String>,
    },
}

impl Availability {
    /// It can, and lacks nothing.
    pub const fn full() -> Self {
        Self::Available {
            degraded: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// It cannot, for this reason.
    pub fn unavailable(reason: impl Into<String>) -> Self {
        Self::Unavailable {
            reason: reason.into(),
            missing: Vec::new(),
        }
    }
}

/// What a backend finds out about this machine, for an operator.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Diagnosis {
    /// The user that boxes would belong to, as `root`.
    pub user: &'static str,
    /// The system directories of a box without an image: `host` for the machine's own.
    pub rootfs: &'static str,
    /// The version of Landlock; 0 if the kernel has none.
    pub landlock: u32,
    /// The features that boxes are made with.
    #[serde(rename = "primitives")]
    pub features: Vec<Feature>,
    /// Differences between the boxes of root and of an ordinary user.
    pub differences: &'static [Difference],
}

impl Diagnosis {
    /// The names of protections that this machine does not give to a box.
    pub fn missing_protections(&self) -> impl Iterator<Item = &'static str> {
        let missing = self.features.iter().filter(|feature| !feature.present);
        missing
            .filter(|feature| feature.protects)
            .map(|feature| feature.name)
    }
}

/// A feature that boxes are made with.
#[derive(Debug, Clone, Serialize)]
pub struct Feature {
    /// The name under which it is reported as missing.
    pub name: &'static str,
    /// The backend makes no box without it.
    pub required: bool,
    /// What it is for, or what happens without it.
    pub about: &'static str,
    /// Whether this machine gives it to this user.
    pub present: bool,
    /// Whether a box without it has a protection less.
    #[serde(skip)]
    pub protects: bool,
}

/// A difference between the boxes of root and of an ordinary user.
#[derive(Debug, Serialize)]
pub struct Difference {
    /// What differs.
    pub what: &'static str,
    /// In boxes of root.
    pub as_root: &'static str,
    /// In boxes of an ordinary user.
    pub as_ordinary_user: &'static str,
}

/// A box to be made.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct StartRequest<'a> {
    /// The box's own id: directories, cgroups and sockets are named after it, never after the
    /// session's id, which the caller chose.
    pub id: Uuid,
    /// What it is asked to be. `cmd` and `env` are not for the backend.
    pub spec: &'a BoxSpec,
}

impl<'a> StartRequest<'a> {
    /// A box with this id, to this spec.
    pub fn new(id: Uuid, spec: &'a BoxSpec) -> Self {
        Self { id, spec }
    }

    /// Whether the box may lack something.
    pub fn does_without(&self, primitive: &str) -> bool {
        let best_effort = self.spec.best_effort.iter().flatten();
        best_effort.into_iter().any(|name| name == primitive)
    }

    /// The guest's name and home directory, which every command of the box finds in its environment.
    pub fn guest(&self) -> (&'a str, &'a str) {
        guest_of(self.spec)
    }
}

pub(crate) fn guest_of(spec: &BoxSpec) -> (&str, &str) {
    match &spec.guest {
        Some(guest) => (&guest.name, &guest.home),
        None => ("box", DEFAULT_HOME),
    }
}

/// A box that was made.
pub struct StartedBox {
    /// What the backend calls it; shown to callers.
    pub backend_id: String,
    /// The agent in it.
    pub connection: Box<dyn Connection>,
    /// What became of the request.
    pub facts: Facts,
    /// The shared memory of the agent, if the backend gave it one.
    pub spool: Option<ShmPool>,
}

impl StartedBox {
    /// A box as it was asked for.
    pub fn new(backend_id: impl Into<String>, connection: impl Connection) -> Self {
        Self {
            backend_id: backend_id.into(),
            connection: Box::new(connection),
            facts: Facts::default(),
            spool: None,
        }
    }

    /// The same, with a slot for output.
    pub fn with_spool(mut self, spool: ShmPool) -> Self {
        self.spool = Some(spool);
        self
    }

    /// The same, with these facts.
    pub fn with_facts(mut self, facts: Facts) -> Self {
        self.facts = facts;
        self
    }
}

impl fmt::Debug for StartedBox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StartedBox")
            .field("backend_id", &self.backend_id)
            .field("facts", &self.facts)
            .finish_non_exhaustive()
    }
}

/// Whether a record that was [kept](Backend::keep) can be understood.
pub type Readable = fn(&str) -> bool;

/// A box that may have outlived the process that made it.
#[derive(Debug)]
pub struct AdoptedBox {
    /// Its own id.
    pub id: Uuid,
    /// What was last [kept](Backend::keep) with it.
    pub record: String,
}

/// What became of a box that was adopted.
#[derive(Debug)]
pub enum Reach {
    /// It lives, and this is the way to its agent.
    Here(StartedBox),
    /// It is known to be dead, for this reason, and what it had is cleared away.
    Gone(&'static str),
}

/// In what a box differs from what was asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// What the image's name led to, where that is something else.
    pub image_resolved: Option<String>,
    /// What the system directories are: `host` for the machine's own, `image` for those of an image.
    pub rootfs: Option<Cow<'static, str>>,
    /// Protections this machine does not grant.
    pub missing: Vec<String>,
    /// What was asked for at best effort and could not be given.
    pub degraded: Vec<String>,
}
