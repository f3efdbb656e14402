//! `snapshot.export`: a snapshot as an archive.

use box_catalog::Viewer;
use box_protocol::actions::{
    FileChunk, SnapshotExport, SnapshotExportParams, SnapshotExportResult,
};
use box_protocol::catalog::{CatalogKind, ItemContent};
use box_protocol::{BoxError, Invalid};
use box_rpc::{Call, Caller, Handle};
use tokio::sync::mpsc;

use crate::backend::LayerKind;
use crate::caller::Visibility as _;
use crate::handlers::streaming;
use crate::layers::LayerUse;
use crate::runtime::BoxRuntime;

streaming! {
    SnapshotExport: export_snapshot(SnapshotExportParams) -> SnapshotExportResult;
}

impl BoxRuntime {
    /// Sends a snapshot as an archive.
    pub async fn export_snapshot(
        &self,
        caller: &Caller,
        params: SnapshotExportParams,
        chunks: Option<mpsc::Sender<FileChunk>>,
    ) -> Result<SnapshotExportResult, BoxError> {
        let Some(chunks) = chunks else {
            let rule = "the archive is sent in chunks; call it with credit";
            return Err(Invalid::new("credit", rule).into());
        };
        let (name, sees_all) = (caller.name(), caller.can_see_all());
        let finding = self.on_store(move |store| {
            let viewer = Viewer {
                owner: &name,
                sees_all,
            };
            store.find(viewer, CatalogKind::Snapshot, &params.snapshot)
        });
        let ItemContent::Snapshot(content) = finding.await?.content else {
            return Err(BoxError::internal("not a snapshot"));
        };
        let layers = self.shared().layers.hold(&content.layers)?;
        let merged = match &layers[..] {
            [] if content.image.is_none() => {
                let rule = "has neither files nor an image; export a snapshot of a box";
                return Err(Invalid::new("snapshot", rule).into());
            }
            // The snapshot is the image.
            [] => None,
            layers => Some(self.directory_of(layers).await?),
        };
        let changes = merged.as_ref().map(LayerUse::path);
        let images = &self.shared().images;
        let exported = images.export_changes(content.image, changes, chunks).await;
        drop((merged, layers));
        self.shared().collect_layers();
        let (digest, bytes) = exported?;
        Ok(SnapshotExportResult { digest, bytes })
    }

    /// Returns one directory with the files of all layers.
    async fn directory_of(&self, layers: &[LayerUse]) -> Result<LayerUse, BoxError> {
        if let [layer] = layers
            && layer.files().kind == LayerKind::Directory
        {
            return Ok(layer.clone());
        }
        let choice = self.shared().selector.choose().await;
        let backend = choice.backend()?;
        self.shared().merge_layers(&**backend, layers).await
    }
}
