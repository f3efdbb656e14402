//! Layers of the fake backend: empty directories and files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use box_protocol::BoxError;
use uuid::Uuid;

use super::{FakeBackend, InjectedFault, script};
use crate::backend::{Layer, LayerFiles, LayerKind, Snapshot, SnapshotRequest};

/// Size of every fake layer.
const BYTES: u64 = 4096;
const ENTRIES: u64 = 1;

impl FakeBackend {
    /// Queues the behaviour of the next call that makes a layer.
    ///
    /// These are snapshots, stops that keep the files, and merges.
    pub fn next_layer(&self, trouble: InjectedFault) {
        self.inner().layer_troubles.push_back(trouble);
    }

    /// Sets the kind of the layers of stopped boxes. Directories are the default.
    pub fn set_stopped_kind(&self, kind: LayerKind) {
        self.inner().stopped_kind = kind;
    }

    /// Returns the layers and the disk of each requested box, in order.
    pub fn layers_used(&self) -> Vec<(Vec<Layer>, Option<PathBuf>)> {
        self.inner().record.layers.clone()
    }

    /// Returns the merged layers with the paths of the results, in order.
    pub fn merged(&self) -> Vec<(Vec<Layer>, PathBuf)> {
        self.inner().record.merged.clone()
    }

    pub(super) async fn make_snapshot(
        &self,
        id: Uuid,
        request: SnapshotRequest<'_>,
    ) -> Result<Snapshot, BoxError> {
        self.box_of(id)?;
        self.make_layer(request.into, LayerKind::Directory).await?;
        Ok(Snapshot::new(BYTES, ENTRIES, Duration::ZERO))
    }

    pub(super) async fn make_stopped(
        &self,
        id: Uuid,
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        self.box_of(id)?;
        // The disk of the box may be there already.
        let kind = if request.into.exists() {
            LayerKind::Disk
        } else {
            self.inner().stopped_kind
        };
        let files = self.make_layer(request.into, kind).await?;
        self.inner().boxes.remove(&id);
        Ok(files)
    }

    pub(super) async fn make_merged(
        &self,
        layers: &[Layer],
        request: SnapshotRequest<'_>,
    ) -> Result<LayerFiles, BoxError> {
        let files = self.make_layer(request.into, LayerKind::Directory).await?;
        let merged = (layers.to_vec(), request.into.to_owned());
        self.inner().record.merged.push(merged);
        Ok(files)
    }

    async fn make_layer(&self, into: &Path, kind: LayerKind) -> Result<LayerFiles, BoxError> {
        let trouble = self.inner().layer_troubles.pop_front();
        script::apply(trouble, "make a layer").await?;
        let made = match kind {
            LayerKind::Directory => std::fs::create_dir(into),
            LayerKind::Disk => {
                let mut options = std::fs::File::options();
                options.append(true).create(true).open(into).map(drop)
            }
        };
        made.map_err(|error| BoxError::unavailable(format!("layer not made: {}", error.kind())))?;
        Ok(LayerFiles {
            kind,
            bytes: BYTES,
            entries: ENTRIES,
        })
    }
}
