//! Access to the files of a box, through its agent.

mod reader;
mod writer;

use std::time::Duration;

use box_protocol::actions::{
    FileAttributes, FileAttributesParams, FileChunk, FileCreate, FileError, FileFind,
    FileFindParams, FileFindResult, FileGrep, FileGrepParams, FileGrepResult, FileList,
    FileListParams, FileListResult, FileMkdir, FileMkdirParams, FileMove, FileMoveParams,
    FileOutcome, FilePack, FilePackParams, FilePart, FileRead, FileReadParams, FileRemove,
    FileRemoveParams, FileReplace, FileReplaceParams, FileStat, FileStatInfo, FileStatParams,
    FileTreeResult, FileUnpack, FileUnpackParams, FileWatchParams, FileWrite, FileWriteParams,
    GlobMatch, TreeCaps, UploadPiece,
};
use box_protocol::error::Detail;
use box_protocol::{Blob, BoxError, BoxId, Code, CommandId, UploadId};
use box_rpc::{Action, CallError, Chunks};
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use tokio::io::{AsyncRead, AsyncReadExt as _};

use crate::chunk::Offsets;
use crate::command::{Begin, CommandHandle, DEFAULT_CAPTURE_LIMIT, Key, Shared};
use crate::error::ClientError;
use box_transports::reconnecting::Remote;

pub use reader::FileReader;
pub use writer::FileWriter;

/// Maximum size of a file that is read into memory.
///
/// [`reader`](Files::reader) reads larger files.
pub const MAX_READ_BYTES: u64 = 256 * 1024 * 1024;

/// Size of the pieces in which larger files are uploaded.
pub const PIECE_BYTES: usize = 1024 * 1024;

/// The files of a box. Paths are absolute.
#[derive(Debug, Clone)]
pub struct Files {
    server: Remote,
    box_id: BoxId,
    timeout: Option<Duration>,
}

/// Builds parameters with the common members of `file.*`.
macro_rules! params {
    ($files:expr, $name:ident { $($fields:tt)* }) => {
        $name { box_id: $files.box_id.clone(), user: None, expand: false, $($fields)* }
    };
}

impl Files {
    pub(crate) fn new(server: Remote, box_id: BoxId) -> Self {
        Self {
            server,
            box_id,
            timeout: None,
        }
    }

    /// Sets the timeout of each answer and of each chunk of a read file; unlimited unless set.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    async fn call<A: Action>(&self, params: &A::Params) -> Result<A::Result, ClientError> {
        let peer = self.server.peer()?;
        let mut request = peer.request::<A>(params);
        if let Some(limit) = self.timeout {
            request = request.deadline(limit);
        }
        Ok(request.call().await?)
    }

    async fn next<A: Action>(
        &self,
        chunks: &mut Chunks<A>,
    ) -> Result<Option<A::Chunk>, ClientError> {
        let next = match self.timeout {
            None => chunks.next().await,
            Some(limit) => tokio::time::timeout(limit, chunks.next())
                .await
                .map_err(|_| CallError::Timeout(limit))?,
        };
        Ok(next.transpose()?)
    }

    async fn open(
        &self,
        path: String,
        part: Option<FilePart>,
    ) -> Result<Chunks<FileRead>, ClientError> {
        let if_match = None;
        let params = params!(
            self,
            FileReadParams {
                path,
                part,
                if_match
            }
        );
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
        params!(
            self,
            FileWriteParams {
                path,
                data: Blob::default(),
                append: false,
                parents: true,
                mode: None,
                owner: None,
                group: None,
                create: FileCreate::Any,
                if_match: None,
                upload: None,
            }
        )
    }

    /// Returns the attributes of a path, without following a link.
    pub async fn stat(&self, path: impl Into<String>) -> Result<FileStatInfo, ClientError> {
        let paths = vec![path.into()];
        let params = params!(
            self,
            FileStatParams {
                paths,
                follow: false
            }
        );
        let mut found = self.call::<FileStat>(&params).await?;
        match found.paths.pop_first() {
            Some((_, FileOutcome::Stat(stat))) => Ok(stat),
            Some((_, FileOutcome::Error(error))) => Err(refused(error)),
            None => Err(CallError::Shape("expected an outcome for the path".to_owned()).into()),
        }
    }

    /// Lists a directory, including names that start with a dot.
    pub async fn list(&self, path: impl Into<String>) -> Result<FileListResult, ClientError> {
        let path = path.into();
        let (kinds, limit, after) = (Vec::new(), None, None);
        let params = params!(
            self,
            FileListParams {
                path,
                depth: 1,
                hidden: true,
                kinds,
                limit,
                after
            }
        );
        self.call::<FileList>(&params).await
    }

    /// Finds files below a directory whose path matches a glob pattern.
    pub async fn find(
        &self,
        path: impl Into<String>,
        glob: impl Into<String>,
    ) -> Result<FileFindResult, ClientError> {
        let params = params!(
            self,
            FileFindParams {
                path: path.into(),
                glob: glob.into(),
                r#match: GlobMatch::Path,
                hidden: false,
                kinds: Vec::new(),
                exclude: Vec::new(),
                limit: None,
            }
        );
        self.call::<FileFind>(&params).await
    }

    /// Finds lines that match a regular expression, in a file or below a directory.
    pub async fn grep(
        &self,
        path: impl Into<String>,
        pattern: impl Into<String>,
    ) -> Result<FileGrepResult, ClientError> {
        let params = params!(
            self,
            FileGrepParams {
                path: path.into(),
                pattern: pattern.into(),
                fixed: false,
                ignore_case: false,
                multiline: false,
                include: Vec::new(),
                exclude: Vec::new(),
                before: 0,
                after: 0,
                limit: None,
                offset: 0,
                max_file_bytes: None,
            }
        );
        self.call::<FileGrep>(&params).await
    }

    /// Replaces all occurrences of a text in a file and returns their number.
    pub async fn replace(
        &self,
        path: impl Into<String>,
        old: impl Into<String>,
        new: impl Into<String>,
    ) -> Result<u64, ClientError> {
        let params = params!(
            self,
            FileReplaceParams {
                path: path.into(),
                old: old.into(),
                new: new.into(),
                first_only: false,
                insert_line: None,
            }
        );
        Ok(self.call::<FileReplace>(&params).await?.count)
    }

    /// Moves a file or directory. An existing destination is a `conflict`.
    pub async fn rename(
        &self,
        src: impl Into<String>,
        dest: impl Into<String>,
    ) -> Result<(), ClientError> {
        self.transfer(src.into(), dest.into(), false).await
    }

    /// Copies a file or directory. An existing destination is a `conflict`.
    pub async fn copy(
        &self,
        src: impl Into<String>,
        dest: impl Into<String>,
    ) -> Result<(), ClientError> {
        self.transfer(src.into(), dest.into(), true).await
    }

    async fn transfer(&self, src: String, dest: String, copy: bool) -> Result<(), ClientError> {
        let params = params!(
            self,
            FileMoveParams {
                src,
                dest,
                keep_source: copy,
                overwrite: false,
                parents: true,
            }
        );
        self.call::<FileMove>(&params).await.map(drop)
    }

    /// Removes a file, or a directory with its contents.
    pub async fn remove(&self, path: impl Into<String>) -> Result<(), ClientError> {
        let paths = vec![path.into()];
        let params = params!(
            self,
            FileRemoveParams {
                paths,
                recursive: true,
                missing_ok: false
            }
        );
        self.call::<FileRemove>(&params).await.map(drop)
    }

    /// Creates a directory and its parents. An existing directory is not an error.
    pub async fn create_dir_all(&self, path: impl Into<String>) -> Result<(), ClientError> {
        let path = path.into();
        let params = params!(
            self,
            FileMkdirParams {
                path,
                mode: None,
                owner: None,
                group: None
            }
        );
        self.call::<FileMkdir>(&params).await.map(drop)
    }

    /// Sets the permission bits of a file or directory.
    pub async fn set_permissions(
        &self,
        path: impl Into<String>,
        mode: u32,
    ) -> Result<FileStatInfo, ClientError> {
        let (path, mode) = (path.into(), Some(mode));
        let params = params!(
            self,
            FileAttributesParams {
                path,
                mode,
                owner: None,
                group: None
            }
        );
        self.call::<FileAttributes>(&params).await
    }

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
        let params = params!(
            self,
            FileWatchParams {
                path: path.into(),
                recursive: true,
                command_id: Some(key.command_id.clone()),
                attach: Some(key.attach.clone()),
            }
        );
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
        let (path, caps) = (path.into(), TreeCaps::default());
        let params = params!(self, FilePackParams { path, caps });
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
                let (data, caps) = (Blob::default(), TreeCaps::default());
                upload.abort = true;
                let params = params!(
                    self,
                    FileUnpackParams {
                        path,
                        data,
                        upload,
                        caps
                    }
                );
                // The agent removes an abandoned upload after a timeout.
                let _ = self.call::<FileUnpack>(&params).await;
                return Err(BoxError::unavailable(format!("archive: {error}")).into());
            }
            let size = piece.len();
            upload.done = size < PIECE_BYTES;
            let (path, upload_now) = (path.clone(), upload.clone());
            let (data, caps) = (piece.into(), TreeCaps::default());
            let params = params!(
                self,
                FileUnpackParams {
                    path,
                    data,
                    upload: upload_now,
                    caps
                }
            );
            let unpacked = self.call::<FileUnpack>(&params).await?;
            if upload.done {
                return Ok(unpacked);
            }
            upload.offset += size as u64;
        }
    }
}

fn refused(error: FileError) -> ClientError {
    let detail = Detail {
        errno: error.errno,
        ..Detail::default()
    };
    BoxError::new(error.code, error.message)
        .with_detail(&detail)
        .into()
}
