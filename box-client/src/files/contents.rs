//! Reading and writing whole files, and parts of them.

use box_protocol::actions::{
    FileChunk, FilePart, FileRead, FileReadParams, FileStatInfo, FileWrite, FileWriteParams,
    UploadPiece,
};
use box_protocol::{Blob, BoxError, Code, UploadId};
use box_rpc::Chunks;
use bytes::{Bytes, BytesMut};

use super::{FileReader, FileWriter, Files, MAX_READ_BYTES, PIECE_BYTES};
use crate::error::ClientError;

impl Files {
    async fn open(
        &self,
        path: String,
        part: Option<FilePart>,
    ) -> Result<Chunks<FileRead>, ClientError> {
        let params = FileReadParams {
            part,
            ..FileReadParams::new(self.box_id(), path)
        };
        Ok(self.server.peer()?.stream::<FileRead>(&params).await?)
    }

    /// Reads a file. A file of more than [`MAX_READ_BYTES`] is `too_large`.
    pub async fn read(&self, path: impl Into<String>) -> Result<Bytes, ClientError> {
        self.read_part(path, None).await
    }

    /// Reads a part of a file, by bytes or by lines.
    pub async fn read_part(
        &self,
        path: impl Into<String>,
        part: impl Into<Option<FilePart>>,
    ) -> Result<Bytes, ClientError> {
        let mut chunks = self.open(path.into(), part.into()).await?;
        let mut all = BytesMut::new();
        while let Some(FileChunk { data, .. }) = self.next(&mut chunks).await? {
            if (all.len() + data.len()) as u64 > MAX_READ_BYTES {
                let max = usize::try_from(MAX_READ_BYTES).unwrap_or(usize::MAX);
                return Err(BoxError::limit(Code::TooLarge, "the file", "read_bytes", max).into());
            }
            all.extend_from_slice(&data);
        }
        chunks.finish().await?;
        Ok(all.freeze())
    }

    /// Reads a UTF-8 file; `validation` if it is not valid UTF-8.
    pub async fn read_to_string(&self, path: impl Into<String>) -> Result<String, ClientError> {
        let bytes = self.read(path).await?;
        String::from_utf8(bytes.into())
            .map_err(|_| BoxError::validation("the file is not valid UTF-8").into())
    }

    /// Reads lines of a file, numbered from 1, up to and including `end`.
    pub async fn read_lines(
        &self,
        path: impl Into<String>,
        start: u64,
        end: impl Into<Option<u64>>,
    ) -> Result<String, ClientError> {
        let end = end.into();
        let bytes = self.read_part(path, FilePart::Lines { start, end }).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Opens a file of any size for reading.
    pub async fn reader(&self, path: impl Into<String>) -> Result<FileReader, ClientError> {
        Ok(FileReader::new(self.open(path.into(), None).await?))
    }

    /// Writes a file atomically and creates its parent directories.
    pub async fn write(
        &self,
        path: impl Into<String>,
        data: impl Into<Bytes>,
    ) -> Result<FileStatInfo, ClientError> {
        let mut data = data.into();
        let mut params = self.write_params(path.into());
        if data.len() <= PIECE_BYTES {
            params.data = data.into();
            return self.call::<FileWrite>(&params).await;
        }
        let (id, mut offset) = (UploadId::fresh(), 0);
        loop {
            let piece = data.split_to(data.len().min(PIECE_BYTES));
            let size = piece.len() as u64;
            params.data = piece.into();
            params.upload = Some(UploadPiece {
                id: id.clone(),
                offset,
                done: data.is_empty(),
                abort: false,
            });
            let written = self.call::<FileWrite>(&params).await?;
            offset += size;
            if data.is_empty() {
                return Ok(written);
            }
        }
    }

    /// Appends to a file, which is created if it does not exist.
    pub async fn append(
        &self,
        path: impl Into<String>,
        data: impl Into<Bytes>,
    ) -> Result<FileStatInfo, ClientError> {
        let mut data = data.into();
        let mut params = self.write_params(path.into());
        params.append = true;
        loop {
            params.data = data.split_to(data.len().min(PIECE_BYTES)).into();
            let written = self.call::<FileWrite>(&params).await?;
            if data.is_empty() {
                return Ok(written);
            }
        }
    }

    /// Opens a file for writing. The file appears with [`finish`](FileWriter::finish).
    pub fn writer(&self, path: impl Into<String>) -> FileWriter {
        FileWriter::new(self.clone(), self.write_params(path.into()))
    }

    fn write_params(&self, path: String) -> FileWriteParams {
        FileWriteParams {
            parents: true,
            ..FileWriteParams::new(self.box_id(), path, Blob::default())
        }
    }
}
