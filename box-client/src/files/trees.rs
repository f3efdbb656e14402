//! Whole directories: watching them, and copying them as archives.

use box_protocol::actions::{
    FilePack, FilePackParams, FileTreeResult, FileUnpack, FileUnpackParams, FileWatchParams,
    UploadPiece,
};
use box_protocol::{Blob, BoxError, CommandId, UploadId};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::{FileReader, Files, PIECE_BYTES};
use crate::chunk::Offsets;
use crate::command::{Begin, CommandHandle, DEFAULT_CAPTURE_LIMIT, Key, Shared};
use crate::error::ClientError;

impl Files {
    /// Watches a path and everything below it.
    ///
    /// The output of the returned command is one JSON object per line, with `kind`, `path` and `at`.
    /// A gap in the output means that changes were lost.
    pub async fn watch(&self, path: impl Into<String>) -> Result<CommandHandle, ClientError> {
        let key = Key {
            box_id: self.box_id.clone(),
            command_id: CommandId::fresh(),
            attach: box_protocol::actions::AttachOptions::default(),
        };
        let params = FileWatchParams {
            recursive: true,
            command_id: Some(key.command_id.clone()),
            attach: Some(key.attach.clone()),
            ..FileWatchParams::new(self.box_id(), path)
        };
        let shared = Shared::new(
            self.server.clone(),
            key,
            Offsets::default(),
            DEFAULT_CAPTURE_LIMIT,
        );
        CommandHandle::begin(shared, Begin::Watch(Box::new(params))).await
    }

    /// Reads a file, or a directory with its contents, as a tar archive.
    pub async fn download_tree(
        &self,
        path: impl Into<String>,
    ) -> Result<FileReader<FilePack>, ClientError> {
        let params = FilePackParams::new(self.box_id(), path);
        let chunks = self.server.peer()?.stream::<FilePack>(&params).await?;
        Ok(FileReader::new(chunks))
    }

    /// Extracts a tar archive into a directory.
    pub async fn upload_tree(
        &self,
        path: impl Into<String>,
        mut archive: impl AsyncRead + Unpin,
    ) -> Result<FileTreeResult, ClientError> {
        let mut upload = UploadPiece {
            id: UploadId::fresh(),
            offset: 0,
            done: false,
            abort: false,
        };
        let path = path.into();
        loop {
            let mut piece = Vec::new();
            let read = (&mut archive)
                .take(PIECE_BYTES as u64)
                .read_to_end(&mut piece)
                .await;
            if let Err(error) = read {
                upload.abort = true;
                let params = FileUnpackParams::new(self.box_id(), path, Blob::default(), upload);
                // The agent removes an abandoned upload after a timeout.
                let _ = self.call::<FileUnpack>(&params).await;
                return Err(BoxError::unavailable(format!("archive: {error}")).into());
            }
            let size = piece.len();
            upload.done = size < PIECE_BYTES;
            let params = FileUnpackParams::new(self.box_id(), &*path, piece, upload.clone());
            let unpacked = self.call::<FileUnpack>(&params).await?;
            if upload.done {
                return Ok(unpacked);
            }
            upload.offset += size as u64;
        }
    }
}
