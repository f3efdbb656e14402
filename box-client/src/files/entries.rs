//! Names in directories: listing, searching, moving, removing, attributes.

use box_protocol::BoxError;
use box_protocol::actions::{
    FileAttributes, FileAttributesParams, FileError, FileFind, FileFindParams, FileFindResult,
    FileGrep, FileGrepParams, FileGrepResult, FileList, FileListParams, FileListResult, FileMkdir,
    FileMkdirParams, FileMove, FileMoveParams, FileOutcome, FileRemove, FileRemoveParams,
    FileReplace, FileReplaceParams, FileStat, FileStatInfo, FileStatParams, GlobMatch,
};
use box_protocol::error::Detail;
use box_rpc::CallError;

use super::{Files, params};
use crate::error::ClientError;

impl Files {
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
