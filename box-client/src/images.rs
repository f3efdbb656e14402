//! The images of a server.

use box_protocol::actions::{
    ImageExport, ImageExportParams, ImageGet, ImageGetParams, ImageImport, ImageImportParams,
    ImageInfo, ImageList, ImageListParams, ImageListResult, ImageLogin, ImageLoginParams,
    ImageLogout, ImageLogoutParams, ImagePrune, ImagePruneParams, ImagePruneResult, ImagePull,
    ImagePullParams, ImageRemove, ImageRemoveParams, ImageRemoveResult, PullProgress, UploadPiece,
};
use box_protocol::{Blob, BoxError, PullPolicy, UploadId};
use box_rpc::Action;
use box_transports::reconnecting::Remote;
use futures::StreamExt as _;
use tokio::io::{AsyncRead, AsyncReadExt as _};

use crate::error::ClientError;
use crate::files::{FileReader, PIECE_BYTES};

/// The images of a server, which all its callers share.
#[derive(Debug, Clone)]
pub struct Images {
    server: Remote,
}

impl Images {
    pub(crate) fn new(server: Remote) -> Self {
        Self { server }
    }

    async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, ClientError> {
        Ok(self.server.call::<A>(params).await?)
    }

    /// Pulls an image, and calls `report` with the progress.
    ///
    /// Dropping the future ends the pull. The next one continues it.
    pub async fn pull(
        &self,
        reference: impl Into<String>,
        policy: PullPolicy,
        mut report: impl FnMut(PullProgress),
    ) -> Result<ImageInfo, ClientError> {
        let params = ImagePullParams {
            reference: reference.into(),
            policy: Some(policy),
        };
        let mut chunks = self.server.peer()?.stream::<ImagePull>(&params).await?;
        while let Some(progress) = chunks.next().await {
            report(progress?);
        }
        Ok(chunks.finish().await?)
    }

    /// Imports an archive under a name: an OCI layout, `docker save` or a root file system.
    ///
    /// `select` chooses one of several images in the archive, by its name there or its digest.
    pub async fn import(
        &self,
        name: impl Into<String>,
        select: Option<String>,
        mut archive: impl AsyncRead + Unpin,
    ) -> Result<ImageInfo, ClientError> {
        let mut params = ImageImportParams {
            name: name.into(),
            select,
            data: Blob::default(),
            upload: UploadPiece {
                id: UploadId::fresh(),
                offset: 0,
                done: false,
                abort: false,
            },
        };
        loop {
            let mut piece = Vec::new();
            let read = (&mut archive)
                .take(PIECE_BYTES as u64)
                .read_to_end(&mut piece)
                .await;
            if let Err(error) = read {
                params.data = Blob::default();
                params.upload.abort = true;
                // The server removes an abandoned upload after a timeout.
                let _ = self.call::<ImageImport>(&params).await;
                return Err(BoxError::unavailable(format!("archive: {error}")).into());
            }
            let size = piece.len();
            params.data = piece.into();
            params.upload.done = size < PIECE_BYTES;
            let imported = self.call::<ImageImport>(&params).await?;
            if let Some(image) = imported.image {
                return Ok(image);
            }
            if params.upload.done {
                let message = "the server did not answer with the image";
                return Err(BoxError::internal(message).into());
            }
            params.upload.offset += size as u64;
        }
    }

    /// Reads an image as an archive of an OCI layout.
    pub async fn export(
        &self,
        image: impl Into<String>,
    ) -> Result<FileReader<ImageExport>, ClientError> {
        let params = ImageExportParams {
            image: image.into(),
        };
        let chunks = self.server.peer()?.stream::<ImageExport>(&params).await?;
        Ok(FileReader::new(chunks))
    }

    /// Lists the images, newest first.
    pub async fn list(&self) -> Result<ImageListResult, ClientError> {
        self.call::<ImageList>(&ImageListParams {}).await
    }

    /// Finds an image by its name, its digest, or the first digits of its digest.
    pub async fn get(&self, image: impl Into<String>) -> Result<ImageInfo, ClientError> {
        let image = image.into();
        self.call::<ImageGet>(&ImageGetParams { image }).await
    }

    /// Removes a name, and the image with its last name; `conflict` while boxes use it.
    pub async fn remove(&self, image: impl Into<String>) -> Result<ImageRemoveResult, ClientError> {
        let image = image.into();
        self.call::<ImageRemove>(&ImageRemoveParams { image }).await
    }

    /// Removes the images that no box uses, and unfinished downloads.
    pub async fn prune(&self, params: ImagePruneParams) -> Result<ImagePruneResult, ClientError> {
        self.call::<ImagePrune>(&params).await
    }

    /// Checks a password with a registry, and stores it on the server.
    pub async fn login(
        &self,
        registry: impl Into<String>,
        username: impl Into<String>,
        password: impl Into<String>,
    ) -> Result<(), ClientError> {
        let params = ImageLoginParams {
            registry: registry.into(),
            username: username.into(),
            password: password.into(),
        };
        self.call::<ImageLogin>(&params).await.map(drop)
    }

    /// Removes the stored password of a registry.
    pub async fn logout(&self, registry: impl Into<String>) -> Result<(), ClientError> {
        let registry = registry.into();
        let params = ImageLogoutParams { registry };
        self.call::<ImageLogout>(&params).await.map(drop)
    }
}
