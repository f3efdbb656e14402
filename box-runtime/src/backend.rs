//! The interface to the backends that create boxes.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use box_protocol::actions::{BoxApplyParams, BoxApplyResult, BoxStatsResult};
use box_protocol::{BoxError, BoxMountSpec, BoxSpec, DEFAULT_HOME, Env, NetworkPolicy};
use box_rpc::Connection;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::shm::ShmPool;
use crate::volumes::{MountedVolume, Volumes};

mod changes;
mod diagnosis;
mod layers;
mod snapshot;

pub use changes::{ChangeList, ChangesRequest, DiffBase};
pub use diagnosis::{Diagnosis, Difference, Feature};
pub use layers::{Layer, LayerFiles, LayerKind};
pub use snapshot::{Snapshot, SnapshotRequest};

/// Creates boxes and ends them.
///
/// A backend never runs a command. It returns a connection to the agent in the box, and the runtime
/// sends commands to that agent.
///
/// The task of one box makes each call, with a time limit. A panic in a call does not affect other
/// boxes. Callers see names, reasons and errors, so these must not contain host paths.
#[async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Returns the name used in the configuration and in answers.
    fn name(&self) -> &str;

    /// Returns the optional features of this backend's boxes.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Returns whether the backend can create a box now.
    ///
    /// The runtime calls this at most once a second.
    async fn availability(&self) -> Availability;

    /// Reports the properties of this machine to an operator.
    ///
    /// The call may take a second. No other call waits for it.
    async fn diagnose(&self) -> Diagnosis {
        Diagnosis::default()
    }

    /// Sets the network policy that applies to every box.
    ///
    /// It applies in addition to the policy of each box. The backend closes connections that the
    /// new policy does not allow.
    fn set_egress_policy(&self, policy: &NetworkPolicy) -> Result<(), BoxError> {
        if *policy == NetworkPolicy::default() {
            return Ok(());
        }
        Err(BoxError::unsupported(
            "network.policy: this backend does not support it",
        ))
    }

    /// Creates a box and returns when its agent accepts calls.
    ///
    /// The runtime drops the future when the box is no longer needed or takes too long. It calls
    /// [`stop`](Self::stop) after that, and also after an error.
    async fn start(&self, request: StartRequest<'_>) -> Result<StartedBox, BoxError>;

    /// Returns whether the box still exists. The runtime asks before reusing it.
    async fn alive(&self, id: Uuid) -> bool;

    /// Mounts more directories into a running box.
    ///
    /// The runtime calls this only with [`Capabilities::adds_mounts`].
    async fn add_mounts(&self, id: Uuid, mounts: &[BoxMountSpec]) -> Result<(), BoxError> {
        let _ = (id, mounts);
        Err(BoxError::unsupported(
            "extra_mounts: this backend cannot add mounts to a running box",
        ))
    }

    /// Returns why a box ended unexpectedly, if the backend knows the reason.
    ///
    /// The runtime calls this after it lost the connection to the agent.
    fn end_reason(&self, id: Uuid) -> Option<BoxError> {
        let _ = id;
        None
    }

    /// Returns the current resource usage of a box without blocking.
    ///
    /// Values that this machine does not report are absent.
    fn usage(&self, id: Uuid) -> Result<BoxStatsResult, BoxError> {
        let _ = id;
        Err(BoxError::unsupported(
            "this backend does not measure the usage of its boxes",
        ))
    }

    /// Sets the destinations that a box with a network may connect to.
    ///
    /// The runtime calls this once for each box: before the first process starts in it, or after it
    /// was [adopted](Self::adopt). It calls this again for every change. The backend closes
    /// connections that the new policy does not allow.
    fn set_network_policy(&self, id: Uuid, policy: &NetworkPolicy) -> Result<(), BoxError> {
        let _ = id;
        if *policy == NetworkPolicy::default() {
            return Ok(());
        }
        Err(BoxError::unsupported(
            "network_policy: this backend does not support it",
        ))
    }

    /// Freezes or thaws all processes of a box, including its agent.
    ///
    /// Repeating the call succeeds.
    async fn freeze(&self, id: Uuid, frozen: bool) -> Result<(), BoxError> {
        let _ = (id, frozen);
        Err(BoxError::unsupported("this backend cannot pause a box"))
    }

    /// Returns the volumes of this backend, if it has any.
    fn volumes(&self) -> Option<&dyn Volumes> {
        None
    }

    /// Copies the private files of a box to a new directory.
    ///
    /// The copy is of one moment: no process of the box runs meanwhile. It is complete, or an
    /// error. The processes continue after a failure as well, and when the runtime drops the
    /// future, unless the box is [frozen](Self::freeze). Mounts and `/dev/shm` are not part of the
    /// copy. The runtime syncs it to disk.
    ///
    /// The directory is a [layer](StartRequest::layers) of later boxes with the same image and
    /// below it the same layers as this box. The runtime owns the directory; after an error the
    /// backend has removed it, or removes it soon.
    async fn snapshot(&self, id: Uuid, request: SnapshotRequest<'_>) -> Result<Snapshot, BoxError> {
        let _ = (id, request);
        Err(BoxError::unsupported("this backend cannot snapshot a box"))
    }

    /// Ends a box and keeps its private files as a [layer](StartRequest::layers).
    ///
    /// The backend creates `into` of the request, whose parent directory exists. It moves a disk
    /// there without a copy, and copies private files in memory. Mounts and `/dev/shm` are not part
    /// of the layer. After success no process, mount or memory of the box is left, and only its
    /// record. The runtime stores the layer with its own record of the box, and then calls
    /// [`stop`](Self::stop), which removes the record of the backend.
    ///
    /// After an error the box still runs with all of its files. The exception is an error of the
    /// disk after the end of the processes: the files then stay, and a repeated call, or
    /// [`reach`](Self::reach) in a later process, makes the layer.
    ///
    /// # Crashes
    /// The decision is one step: the backend stores it in its record before it ends the first
    /// process. After a crash of this process, the next one finds the box in
    /// [`adopt`](Self::adopt), and `reach` returns
    /// * [`Reach::Alive`] if the decision was not stored. The box continues to run, and no layer
    ///   was made.
    /// * [`Reach::Stopped`] if it was stored. The backend has then completed the layer, also if all
    ///   processes had ended in the middle of the move, and after a restart of the machine.
    ///
    /// If the runtime drops the future, the call has no effect or completes, as after a crash. A
    /// repeated call with the same `into` returns the result.
    async fn stop_into_layer(
        &self,
        id: Uuid,
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        let _ = (id, request);
        Err(BoxError::unsupported(
            "this backend cannot keep the files of a stopped box",
        ))
    }

    /// Writes one layer with the files of several, the topmost first.
    ///
    /// Boxes on the new layer see what boxes on all of these layers see, on every image. The new
    /// layer is a directory at `into` of the request. The runtime owns it; after an error the
    /// backend has removed it, or removes it soon. The given layers do not change.
    async fn merge_layers(
        &self,
        layers: &[Layer],
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        let _ = (layers, request);
        Err(BoxError::unsupported("this backend cannot merge layers"))
    }

    /// Lists at most `limit` changes of a box after a position.
    ///
    /// The box may run meanwhile. Without an id, layers are all that is left of the box.
    async fn diff(
        &self,
        id: Option<Uuid>,
        request: ChangesRequest<'_>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ChangeList, BoxError> {
        let _ = (id, request, after, limit);
        Err(BoxError::unsupported(
            "this backend does not know the changes of its boxes",
        ))
    }

    /// Writes the changes of a workspace to its host directory.
    ///
    /// No process of the box runs meanwhile. Without an id, layers are all that is left of the box.
    /// Of `params`, the backend reads `force` and `dry_run`.
    async fn apply(
        &self,
        id: Option<Uuid>,
        request: ChangesRequest<'_>,
        params: &BoxApplyParams,
    ) -> Result<BoxApplyResult, BoxError> {
        let _ = (id, request, params);
        Err(BoxError::unsupported(
            "host_path_mode: this backend has no overlay workspaces; use ro or rw",
        ))
    }

    /// Restores the files of a workspace from its host directory. Returns their number.
    async fn discard(&self, id: Uuid, request: ChangesRequest<'_>) -> Result<u64, BoxError> {
        let _ = (id, request);
        Err(BoxError::unsupported(
            "host_path_mode: this backend has no overlay workspaces; use ro or rw",
        ))
    }

    /// Stores a record with a box and replaces the previous record.
    ///
    /// The runtime that [adopts](Self::adopt) the box reads the record. The runtime calls this only
    /// with [`Capabilities::outlive`].
    fn persist(&self, id: Uuid, record: &str) -> Result<(), BoxError> {
        let _ = (id, record);
        Ok(())
    }

    /// Takes over the boxes that an earlier process left behind.
    ///
    /// The boxes may still be running. The backend skips a box if its record is not `readable`,
    /// because the box belongs to another program. The runtime calls this once, before the first
    /// start.
    async fn adopt(&self, readable: Readable) -> Result<FoundBoxes, BoxError> {
        let _ = readable;
        Ok(FoundBoxes::default())
    }

    /// Returns the records of the boxes on disk, without contact to the boxes. It may block.
    ///
    /// The boxes may be dead.
    fn records(&self, readable: Readable) -> Result<FoundBoxes, BoxError> {
        let _ = readable;
        Ok(FoundBoxes::default())
    }

    /// Waits for the agent of a box that was [adopted](Self::adopt).
    ///
    /// An error does not mean that the box is dead. The runtime then calls this again or calls
    /// [`stop`](Self::stop).
    async fn reach(&self, id: Uuid) -> Result<Reach, BoxError> {
        let _ = id;
        Ok(Reach::Dead("this backend adopts no boxes"))
    }

    /// Ends all processes of a box and frees its resources.
    ///
    /// The call succeeds if the box is gone, partly created or was never started.
    async fn stop(&self, id: Uuid) -> Result<(), BoxError>;
}

/// The optional features of a backend's boxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Boxes can connect to a network.
    pub network: bool,
    /// The backend can add mounts to a running box.
    pub adds_mounts: bool,
    /// Boxes outlive this process, with the records [persisted](Backend::persist) with them.
    pub outlive: bool,
}

impl Capabilities {
    /// Returns these capabilities with network access.
    pub const fn with_network(mut self) -> Self {
        self.network = true;
        self
    }

    /// Returns these capabilities with `outlive` set to this value.
    pub const fn with_outliving(mut self, outlive: bool) -> Self {
        self.outlive = outlive;
        self
    }

    /// Returns these capabilities with mounts that can be added to a running box.
    pub const fn with_added_mounts(mut self) -> Self {
        self.adds_mounts = true;
        self
    }
}

/// Whether a backend can create boxes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Availability {
    /// The backend can create boxes.
    Available {
        /// Features that work with restrictions.
        degraded: Vec<String>,
        /// Protections that this machine does not support.
        missing: Vec<String>,
    },
    /// The backend cannot create boxes.
    Unavailable {
        /// The reason, without a final full stop: `the daemon does not answer`.
        reason: String,
        /// Requirements that this machine does not meet.
        missing: Vec<String>,
    },
}

impl Availability {
    /// An available backend without restrictions.
    pub const fn full() -> Self {
        Self::Available {
            degraded: Vec::new(),
            missing: Vec::new(),
        }
    }

    /// An unavailable backend, with the reason.
    pub fn unavailable(reason: impl Into<String>) -> Self {
        Self::Unavailable {
            reason: reason.into(),
            missing: Vec::new(),
        }
    }
}

/// An unpacked image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageRoot {
    /// The root directory, without symbolic links in the path.
    ///
    /// It must not change while a box uses it.
    pub path: PathBuf,
    /// The digest of the image, if it is known. Callers see it.
    pub digest: Option<String>,
    /// The user of its configuration: `NAME`, `UID`, `NAME:GROUP` or `UID:GID`; empty for root.
    ///
    /// Without one, boxes run as the user `box`, which the image need not contain.
    pub user: Option<String>,
    /// The environment of its configuration. The backend ignores it.
    pub env: Env,
    /// The working directory of its configuration. The backend ignores it.
    pub workdir: Option<String>,
}

impl ImageRoot {
    /// An image without a configuration.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            ..Self::default()
        }
    }
}

/// The request to create a box.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct StartRequest<'a> {
    /// The internal id of the box.
    ///
    /// The backend names directories, cgroups and sockets after it. It never uses the box id in the
    /// spec for that, because the caller chose that id.
    pub id: Uuid,
    /// The requested properties of the box. The backend ignores `cmd` and `env`.
    pub spec: &'a BoxSpec,
    /// The image of the spec, if the runtime has resolved it.
    ///
    /// Otherwise the backend resolves the name in the spec.
    pub image: Option<&'a ImageRoot>,
    /// The layers on top of the image, the topmost first.
    ///
    /// [`Backend::snapshot`], [`Backend::stop_into_layer`] or [`Backend::merge_layers`] made each.
    pub layers: &'a [Layer],
    /// A layer of the kind [`LayerKind::Disk`] that becomes the private files of the box again.
    ///
    /// No other box uses it. The box uses it at this path and keeps its limit. The runtime owns
    /// it: the path has the files after each end of the box, unless
    /// [`stop_into_layer`](Backend::stop_into_layer) moves them. `into` may be this path.
    pub disk: Option<&'a Path>,
    /// The volumes of the spec, which the runtime has resolved.
    pub volumes: &'a [MountedVolume],
}

impl<'a> StartRequest<'a> {
    /// A request for a box with this internal id and this spec.
    pub fn new(id: Uuid, spec: &'a BoxSpec) -> Self {
        Self {
            id,
            spec,
            image: None,
            layers: &[],
            disk: None,
            volumes: &[],
        }
    }

    /// Returns this request with layers, the topmost first.
    pub fn with_layers(mut self, layers: &'a [Layer]) -> Self {
        self.layers = layers;
        self
    }

    /// Returns this request with the disk of an earlier box.
    pub fn with_disk(mut self, disk: Option<&'a Path>) -> Self {
        self.disk = disk;
        self
    }

    /// Returns this request with a resolved image.
    pub fn with_image(mut self, image: Option<&'a ImageRoot>) -> Self {
        self.image = image;
        self
    }

    /// Returns this request with resolved volumes.
    pub fn with_volumes(mut self, volumes: &'a [MountedVolume]) -> Self {
        self.volumes = volumes;
        self
    }

    /// Returns whether the spec lists this feature as best effort.
    pub fn is_best_effort(&self, primitive: &str) -> bool {
        let best_effort = self.spec.best_effort.iter().flatten();
        best_effort.into_iter().any(|name| name == primitive)
    }

    /// Returns the name and home directory of the guest user.
    ///
    /// Every command of the box gets both in its environment.
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

/// A box that the backend has created.
pub struct StartedBox {
    /// The id that the backend gave to the box. Callers see it.
    pub backend_id: String,
    /// The connection to the agent in the box.
    pub connection: Box<dyn Connection>,
    /// The differences between the box and the request.
    pub facts: Facts,
    /// The memory shared with the agent, if the backend provides it.
    pub shm: Option<ShmPool>,
}

impl StartedBox {
    /// A box without differences from the request and without shared memory.
    pub fn new(backend_id: impl Into<String>, connection: impl Connection) -> Self {
        Self {
            backend_id: backend_id.into(),
            connection: Box::new(connection),
            facts: Facts::default(),
            shm: None,
        }
    }

    /// Returns this box with memory shared with its agent.
    pub fn with_shm(mut self, shm: ShmPool) -> Self {
        self.shm = Some(shm);
        self
    }

    /// Returns this box with these facts.
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

/// Returns whether the runtime can parse a record [persisted](Backend::persist) earlier.
pub type Readable = fn(&str) -> bool;

/// The boxes that earlier processes left on disk.
#[derive(Debug, Default)]
pub struct FoundBoxes {
    /// The boxes with a readable record, oldest first.
    pub boxes: Vec<AdoptedBox>,
    /// The internal ids of the boxes without one. What they use is unknown, so the runtime removes
    /// nothing that they may use.
    pub skipped: Vec<Uuid>,
}

/// A box that may have outlived the process that created it.
#[derive(Debug)]
pub struct AdoptedBox {
    /// The internal id of the box.
    pub id: Uuid,
    /// The record that was last [persisted](Backend::persist) with the box.
    pub record: String,
}

/// The result of reaching an adopted box.
#[derive(Debug)]
pub enum Reach {
    /// The box is running; the value holds the connection to its agent.
    Alive(StartedBox),
    /// The box is dead, for this reason. The backend has freed its resources.
    Dead(&'static str),
    /// An earlier process began to [stop](Backend::stop_into_layer) the box, and this one completed it.
    ///
    /// The runtime calls [`stop`](Backend::stop) after it has stored the layer.
    Stopped {
        /// The path of the layer, as in the request.
        into: PathBuf,
        /// The layer.
        files: LayerFiles,
    },
}

/// The differences between a box and its request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The image that the requested name resolved to, if it differs.
    pub image_resolved: Option<String>,
    /// The source of the system directories: `host` for this machine, or `image`.
    pub rootfs: Option<Cow<'static, str>>,
    /// Protections that this machine does not support.
    pub missing: Vec<String>,
    /// Best-effort requests that the backend could not fulfil.
    pub degraded: Vec<String>,
    /// The user of the image, if the box runs as that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_user: Option<box_protocol::Guest>,
    /// Device and inode of the directory of an overlay workspace, which identify it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<(u64, u64)>,
}
