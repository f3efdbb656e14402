//! Layers of a box: the files below its live ones, and its checkpoints.

use std::sync::Arc;

use box_protocol::{BoxError, BoxSpec, Checkpoint, ItemId, LayerId, PullPolicy};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::entry::BoxEntry;
use super::instance::Instance;
use super::{Facts, Shared};
use crate::backend::LayerKind;
use crate::layers::{self, LayerUse, Layers};

/// Layers of a box.
#[derive(Debug, Default)]
pub(crate) struct BoxFiles {
    /// Snapshot that the box was created from.
    pub(crate) snapshot: Option<ItemId>,
    /// Layers below the live files, the topmost first.
    pub(crate) layers: Vec<LayerUse>,
    /// Layers that the box was created with, the topmost first.
    pub(crate) origin: Vec<LayerUse>,
    /// Layer that the live files are written to, instead of new storage.
    pub(crate) disk: Option<LayerUse>,
    /// Layer that a stop makes of the live files.
    pub(crate) stopping: Option<LayerUse>,
    /// Checkpoints, oldest first.
    pub(crate) checkpoints: Vec<KeptCheckpoint>,
    /// First and last moments of applies to the directory of the workspace.
    pub(crate) applies: Vec<(i64, i64)>,
    /// Mark of the fork that made the box.
    pub(crate) fork: Option<Uuid>,
}

/// Checkpoint with its layers, the topmost first.
#[derive(Debug, Clone)]
pub(crate) struct KeptCheckpoint {
    pub(crate) info: Checkpoint,
    pub(crate) layers: Vec<LayerUse>,
}

/// Files that a new box begins with.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) snapshot: Option<ItemId>,
    /// Volumes of the spec.
    pub(crate) volumes: Vec<ItemId>,
    pub(crate) layers: Vec<LayerUse>,
    /// Image below the layers; the system directories of the machine if absent.
    pub(crate) image: Option<String>,
    /// Applies of the box that had the files before.
    pub(crate) applies: Vec<(i64, i64)>,
    /// Mark of the fork that makes the box.
    pub(crate) fork: Option<Uuid>,
}

/// Persistent form of [`BoxFiles`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PersistedFiles {
    snapshot: Option<ItemId>,
    layers: Vec<LayerId>,
    /// Number of the lowest layers that are those of `origin`. Earlier versions read only this.
    first: usize,
    origin: Option<Vec<LayerId>>,
    disk: Option<LayerId>,
    stopping: Option<LayerId>,
    checkpoints: Vec<PersistedCheckpoint>,
    applies: Vec<(i64, i64)>,
    fork: Option<Uuid>,
}

impl PersistedFiles {
    /// Returns the mark of the fork that made the box.
    pub(crate) fn fork(&self) -> Option<Uuid> {
        self.fork
    }

    /// Replaces the layers by those of a box without live files.
    pub(crate) fn set_layers(&mut self, layers: &[LayerUse]) {
        self.layers = layers::ids(layers);
        if let Some(origin) = &self.origin {
            let own = self.layers.iter().take_while(|id| !origin.contains(id));
            self.first = self.layers.len() - own.count();
        }
        (self.disk, self.stopping) = (None, None);
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct PersistedCheckpoint {
    info: Checkpoint,
    layers: Vec<LayerId>,
}

impl BoxFiles {
    /// Returns the layers without those that the box made itself.
    ///
    /// A box that has failed begins with the same files as the first time.
    pub(crate) fn reset_to_origin(&mut self) {
        self.layers.clone_from(&self.origin);
        (self.disk, self.stopping) = (None, None);
    }

    /// Returns the number of the topmost layers that the box made itself.
    pub(crate) fn own(&self) -> usize {
        let is_of_origin = |layer: &&LayerUse| {
            let mut origin = self.origin.iter();
            origin.any(|first| first.id() == layer.id())
        };
        self.layers
            .iter()
            .take_while(|layer| !is_of_origin(layer))
            .count()
    }

    /// Moves the topmost layer to the live files, if it is a disk that nothing else uses.
    pub(crate) fn take_disk(&mut self, is_named: impl FnOnce(&LayerId) -> bool) {
        if let Some(top) = self.layers.first()
            && self.own() > 0
            && top.files().kind == LayerKind::Disk
            && top.is_sole()
            && !is_named(top.id())
        {
            self.disk = Some(self.layers.remove(0));
        }
    }

    pub(crate) fn persisted(&self) -> PersistedFiles {
        let checkpoint = |kept: &KeptCheckpoint| PersistedCheckpoint {
            info: kept.info.clone(),
            layers: layers::ids(&kept.layers),
        };
        PersistedFiles {
            snapshot: self.snapshot.clone(),
            layers: layers::ids(&self.layers),
            first: self.layers.len() - self.own(),
            origin: Some(layers::ids(&self.origin)),
            disk: self.disk.as_ref().map(|disk| disk.id().clone()),
            stopping: self.stopping.as_ref().map(|layer| layer.id().clone()),
            checkpoints: self.checkpoints.iter().map(checkpoint).collect(),
            applies: self.applies.clone(),
            fork: self.fork,
        }
    }

    /// Counts the layers of a box that an earlier process started.
    pub(crate) fn adopted(record: PersistedFiles, all: &Layers) -> Self {
        let checkpoint = |kept: PersistedCheckpoint| KeptCheckpoint {
            info: kept.info,
            layers: all.adopt(&kept.layers),
        };
        let one = |id: Option<LayerId>| id.and_then(|id| all.adopt(&[id]).pop());
        let layers = all.adopt(&record.layers);
        let origin = match record.origin {
            Some(origin) => all.adopt(&origin),
            None => layers[layers.len().saturating_sub(record.first)..].to_vec(),
        };
        Self {
            snapshot: record.snapshot,
            layers,
            origin,
            disk: one(record.disk),
            stopping: one(record.stopping),
            checkpoints: record.checkpoints.into_iter().map(checkpoint).collect(),
            applies: record.applies,
            fork: record.fork,
        }
    }
}

impl BoxEntry {
    /// Sets the files that the box begins with.
    pub(crate) fn set_origin(&self, origin: Origin) {
        let mut status = self.status();
        status.facts = Facts {
            rootfs: Some(
                if origin.image.is_some() {
                    "image"
                } else {
                    "host"
                }
                .into(),
            ),
            image_resolved: origin.image,
            ..Facts::default()
        };
        status.volumes = origin.volumes;
        let files = &mut status.files;
        files.origin.clone_from(&origin.layers);
        files.layers = origin.layers;
        files.snapshot = origin.snapshot;
        files.applies = origin.applies;
        files.fork = origin.fork;
    }

    /// Returns the image below the layers of the box, by its digest or its configured name.
    pub(crate) fn image_below(&self) -> Option<String> {
        let status = self.status();
        let is_image = status.facts.rootfs.as_deref() == Some("image");
        let name = || self.spec.image.clone();
        let image = status.facts.image_resolved.clone().or_else(name);
        image.filter(|_| is_image)
    }

    /// Removes all that is left of a box that has ended: its layers, its record as a stopped box,
    /// and its earlier commands.
    pub(crate) async fn discard_files(self: &Arc<Self>, shared: &Shared) {
        let (stopped, history) = {
            let mut status = self.status();
            *status.files = BoxFiles::default();
            status.end_unstarted();
            (status.end_stopped(), status.history.take())
        };
        self.remove_obsolete_records().await;
        if let Some(stopped) = stopped {
            shared.images.release(stopped);
        }
        if let Some(history) = history {
            let _ = tokio::task::spawn_blocking(move || history.remove()).await;
        }
        shared.collect_layers();
    }
}

impl Instance {
    /// Resolves the snapshot of the spec, and counts the box as its user.
    pub(super) fn use_snapshot(&self, spec: &BoxSpec) -> Result<(), BoxError> {
        self.entry.status().uses.clear();
        let Some(snapshot) = &spec.snapshot else {
            return Ok(());
        };
        let earlier = self.entry.status().files.snapshot.clone();
        let items = &self.shared.items;
        let found = items.use_snapshot(&self.entry.owner, snapshot, earlier.as_ref());
        let (id, content, used) = found?;
        if earlier.is_none() {
            self.entry.set_origin(Origin {
                snapshot: Some(id),
                volumes: Vec::new(),
                layers: self.shared.layers.hold(&content.layers)?,
                image: content.image,
                applies: Vec::new(),
                fork: None,
            });
        }
        self.entry.status().uses.push(used);
        Ok(())
    }

    /// Returns the spec with the image that the files of the box belong to.
    ///
    /// The name in the spec may mean another image now. A snapshot of an image has no layers.
    pub(super) fn with_image_below(&self, spec: &BoxSpec) -> Option<BoxSpec> {
        {
            let status = self.entry.status();
            let files = &status.files;
            let has_layers = !files.layers.is_empty() || files.disk.is_some();
            if !has_layers && files.snapshot.is_none() {
                return None;
            }
        }
        let mut spec = spec.clone();
        spec.image = self.entry.image_below();
        spec.pull = Some(PullPolicy::Never);
        Some(spec)
    }
}

impl Shared {
    /// Removes layers that nothing uses any more, in the background.
    pub(crate) fn collect_layers(&self) {
        let (layers, items) = (self.layers.clone(), self.items.clone());
        // The layers of a snapshot with a damaged record are unknown.
        if !items.has_damaged_snapshots() {
            tokio::task::spawn_blocking(move || layers.collect(|| items.named_layers()));
        }
    }
}
