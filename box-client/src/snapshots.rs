//! Snapshots, forks and checkpoints of a box.

use box_protocol::actions::{
    BoxCheckpoint, BoxCheckpointParams, BoxFork, BoxForkParams, BoxRollback, BoxRollbackParams,
    BoxSnapshot, BoxSnapshotParams, SnapshotExport, SnapshotExportParams,
};
use box_protocol::catalog::CatalogItem;
use box_protocol::{BoxInfo, Checkpoint, ItemRef, Name};

use crate::client::BoxClient;
use crate::error::ClientError;
use crate::files::FileReader;
use crate::handle::BoxHandle;

impl BoxClient {
    /// Makes a snapshot of the private files of a box; `conflict` if its name is taken.
    pub async fn snapshot(&self, params: &BoxSnapshotParams) -> Result<CatalogItem, ClientError> {
        self.call::<BoxSnapshot>(params).await
    }

    /// Creates boxes with the spec and the files of a box: all of them, or none.
    pub async fn fork(&self, params: &BoxForkParams) -> Result<Vec<BoxInfo>, ClientError> {
        params.check()?;
        Ok(self.call::<BoxFork>(params).await?.items)
    }

    /// Reads a snapshot as an archive.
    ///
    /// With an image it is an OCI layout; otherwise it has the files of the snapshot.
    pub async fn export_snapshot(
        &self,
        snapshot: impl AsRef<str>,
    ) -> Result<FileReader<SnapshotExport>, ClientError> {
        let snapshot = ItemRef::new(snapshot)?;
        let params = SnapshotExportParams { snapshot };
        let chunks = self.peer()?.stream::<SnapshotExport>(&params).await?;
        Ok(FileReader::new(chunks))
    }
}

impl BoxHandle {
    /// Makes a snapshot of the private files of the box; `conflict` if its name is taken.
    ///
    /// A running box is paused meanwhile. Boxes can be created from the snapshot with the field
    /// `snapshot` of their spec.
    pub async fn snapshot(&self, name: impl AsRef<str>) -> Result<CatalogItem, ClientError> {
        let params = BoxSnapshotParams::new(self.id().clone(), Name::new(name)?);
        self.client().snapshot(&params).await
    }

    /// Creates boxes with the spec and the files of this one: all of them, or none.
    ///
    /// The server chooses their ids. For other settings, see [`BoxClient::fork`].
    pub async fn fork(&self, count: u32) -> Result<Vec<BoxInfo>, ClientError> {
        let params = BoxForkParams {
            count,
            ..BoxForkParams::new(self.id().clone())
        };
        self.client().fork(&params).await
    }

    /// Keeps the private files of the box under a name, until the box is deleted.
    ///
    /// The server chooses a name if it is absent. [`info`](Self::info) lists the checkpoints.
    pub async fn checkpoint(&self, name: Option<Name>) -> Result<Checkpoint, ClientError> {
        let box_id = self.id().clone();
        let params = BoxCheckpointParams { box_id, name };
        self.client().call::<BoxCheckpoint>(&params).await
    }

    /// Replaces the private files of the box by those of a checkpoint, the newest if absent.
    ///
    /// All processes of the box end. A box that was not stopped starts again.
    pub async fn rollback(&self, name: Option<Name>) -> Result<BoxInfo, ClientError> {
        let box_id = self.id().clone();
        let params = BoxRollbackParams { box_id, name };
        self.client().call::<BoxRollback>(&params).await
    }
}
