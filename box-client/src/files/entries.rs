//! Names in directories: listing, searching, moving, removing, attributes.

use box_protocol::BoxError;
use box_protocol::actions::{
    FileAttributes, FileAttributesParams, FileError, FileFind, FileFindParams, FileFindResult,
    FileGrep, FileGrepParams, FileGrepResult, FileList, FileListParams, FileListResult, FileMkdir,
    FileMkdirParams, FileMove, FileMoveParams, FileOutcome, FileRemove, FileRemoveParams,
    FileReplace, FileReplaceParams, FileStat, FileStatInfo, FileStatParams,
};
use box_protocol::error::Detail;
use box_rpc::CallError;

use super::Files;
use crate::error::ClientError;

impl Files {
    /// Returns the attributes of a path, without following a link.
    pub async fn stat(&self, path: impl Into<String>) -> Result<FileStatInfo, ClientError> {
        let params = FileStatParams::new(self.box_id(), [path.into()]);
        let mut found = self.call::<FileStat>(&params).await?;
        match found.paths.pop_first() {
            Some((_, FileOutcome::Stat(stat))) => Ok(stat),
            Some((_, FileOutcome::Error(error))) => Err(refused(error)),
            None => Err(CallError::Shape("expected an outcome for the path".to_owned()).into()),
        }
    }

    /// Lists a directory, including names that start with a dot.
    pub async fn list(&self, path: impl Into<String>) -> Result<FileListResult, ClientError> {
        let params = FileListParams {
            hidden: true,
            ..FileListParams::new(self.box_id(), path)
        };
        self.call::<FileList>(&params).await
    }

    /// Finds files below a directory whose path matches a glob pattern.
    pub async fn find(
        &self,
        path: impl Into<String>,
        glob: impl Into<String>,
    ) -> Result<FileFindResult, ClientError> {
        let params = FileFindParams::new(self.box_id(), path, glob);
        self.call::<FileFind>(&params).await
    }

    /// Finds lines that match a regular expression, in a file or below a directory.
    pub async fn grep(
        &self,
        path: impl Into<String>,
        pattern: impl Into<String>,
    ) -> Result<FileGrepResult, ClientError> {
        let params = FileGrepParams::new(self.box_id(), path, pattern);
        self.call::<FileGrep>(&params).await
    }

    /// Replaces all occurrences of a text in a file and returns their number.
    pub async fn replace(
        &self,
        path: impl Into<String>,
        old: impl Into<String>,
        new: impl Into<String>,
    ) -> Result<u64, ClientError> {
        let params = FileReplaceParams::new(self.box_id(), path, old, new);
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
        let params = FileMoveParams {
            keep_source: copy,
            parents: true,
            ..FileMoveParams::new(self.box_id(), src, dest)
        };
        self.call::<FileMove>(&params).await.map(drop)
    }

    /// Removes a file, or a directory with its contents.
    pub async fn remove(&self, path: impl Into<String>) -> Result<(), ClientError> {
        let params = FileRemoveParams {
            recursive: true,
            ..FileRemoveParams::new(self.box_id(), [path.into()])
        };
        self.call::<FileRemove>(&params).await.map(drop)
    }

    /// Creates a directory and its parents. An existing directory is not an error.
    pub async fn create_dir_all(&self, path: impl Into<String>) -> Result<(), ClientError> {
        let params = FileMkdirParams::new(self.box_id(), path);
        self.call::<FileMkdir>(&params).await.map(drop)
    }

    /// Sets the permission bits of a file or directory.
    pub async fn set_permissions(
        &self,
        path: impl Into<String>,
        mode: u32,
    ) -> Result<FileStatInfo, ClientError> {
        let params = FileAttributesParams {
            mode: Some(mode),
            ..FileAttributesParams::new(self.box_id(), path)
        };
        self.call::<FileAttributes>(&params).await
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
