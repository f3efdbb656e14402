//! Shells: interpreters that keep their state between runs and execute one request at a time.

mod builder;
mod run;

use std::path::{Component, Path};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use box_protocol::actions::{
    FileListResult, FileStatInfo, ShellCreateParams, ShellDelete, ShellDeleteParams, ShellInfo,
    ShellList, ShellListParams,
};
use box_protocol::error::Detail;
use box_protocol::{BoxError, BoxId, Code, ShellId};
use bytes::Bytes;
use tokio::sync::{Mutex, MutexGuard};

use crate::error::ClientError;
use crate::files::Files;
use box_transports::reconnecting::Remote;

pub use builder::{DEFAULT_DOWNLOAD_ROOT, DEFAULT_SILENCE_LIMIT, ShellBuilder};
pub use run::{Replaced, ShellRunBuilder};

/// A shell. Clones share its queue: the shell executes runs, listings, writes, appends and
/// downloads one after the other, in the order requested.
///
/// A request that produces no output within the silence limit ends. A run then continues in the
/// box, and [`Output::is_silent`](crate::Output::is_silent) is true; any other request fails with
/// `timeout`.
#[derive(Debug, Clone)]
pub struct ShellHandle(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    server: Remote,
    /// The parameters of the shell, also used for a replacement.
    create: ShellCreateParams,
    id: ShellId,
    silence: Duration,
    root: String,
    files: Files,
    turn: Mutex<()>,
    closed: AtomicBool,
    recovered: AtomicU32,
}

impl ShellHandle {
    fn new(
        server: Remote,
        create: ShellCreateParams,
        id: ShellId,
        silence: Duration,
        root: String,
    ) -> Self {
        let files = Files::new(server.clone(), create.box_id.clone()).timeout(silence);
        Self(Arc::new(Inner {
            server,
            create,
            id,
            silence,
            root,
            files,
            turn: Mutex::new(()),
            closed: AtomicBool::new(false),
            recovered: AtomicU32::new(0),
        }))
    }

    /// Returns the id of the shell.
    pub fn id(&self) -> &ShellId {
        &self.0.id
    }

    /// Returns the id of the box.
    pub fn box_id(&self) -> &BoxId {
        &self.0.create.box_id
    }

    /// Returns how many runs were executed in a replacement because the shell was broken or gone.
    pub fn recovered(&self) -> u32 {
        self.0.recovered.load(Ordering::Relaxed)
    }

    /// Returns the record of the shell: working directory, current run. `not_found` if the shell is
    /// gone.
    pub async fn info(&self) -> Result<ShellInfo, ClientError> {
        let params = ShellListParams {
            box_id: self.box_id().clone(),
            shell_id: Some(self.id().clone()),
        };
        let mut found = self.0.server.call::<ShellList>(&params).await?;
        let gone = || ClientError::from(BoxError::not_found("no such shell"));
        found.items.pop().ok_or_else(gone)
    }

    /// A text to run in the shell. Awaiting the builder returns the [`Output`](crate::Output).
    pub fn run(&self, text: impl Into<String>) -> ShellRunBuilder {
        ShellRunBuilder::new(self.clone(), text.into())
    }

    /// Lists a directory of the box.
    pub async fn list(&self, path: impl Into<String>) -> Result<Vec<FileStatInfo>, ClientError> {
        let _turn = self.turn().await?;
        let FileListResult { entries, .. } = self.0.files.list(path).await?;
        Ok(entries)
    }

    /// Writes a file of the box and creates its parent directories.
    pub async fn write(
        &self,
        path: impl Into<String>,
        data: impl Into<Bytes>,
    ) -> Result<(), ClientError> {
        let _turn = self.turn().await?;
        self.0.files.write(path, data).await.map(drop)
    }

    /// Appends to a file of the box.
    pub async fn append(
        &self,
        path: impl Into<String>,
        data: impl Into<Bytes>,
    ) -> Result<(), ClientError> {
        let _turn = self.turn().await?;
        self.0.files.append(path, data).await.map(drop)
    }

    /// Reads a file below the download root.
    ///
    /// The client refuses any other path, and any path with `..`, with `denied` before it sends the
    /// call.
    pub async fn download(&self, path: impl AsRef<str>) -> Result<Bytes, ClientError> {
        let path = path.as_ref();
        check_download(path, &self.0.root)?;
        let _turn = self.turn().await?;
        self.0.files.read(path).await
    }

    /// Ends the shell and its run. Never fails, and does nothing the second time.
    ///
    /// Later requests to the handle are a `conflict`.
    pub async fn close(&self) {
        if self.0.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.release(self.id().clone()).await;
    }

    /// Ends a shell; a failure is only logged.
    async fn release(&self, shell_id: ShellId) {
        let params = ShellDeleteParams {
            box_id: self.box_id().clone(),
            shell_id,
        };
        if let Err(error) = self.0.server.call::<ShellDelete>(&params).await {
            tracing::warn!(shell = %params.shell_id, %error, "could not end a shell");
        }
    }

    /// Waits for the requests queued before this one.
    async fn turn(&self) -> Result<MutexGuard<'_, ()>, ClientError> {
        let turn = self.0.turn.lock().await;
        if self.0.closed.load(Ordering::SeqCst) {
            return Err(BoxError::conflict("the shell handle is closed").into());
        }
        Ok(turn)
    }
}

fn check_download(path: &str, root: &str) -> Result<(), ClientError> {
    let denied = |message: String| {
        tracing::error!(path, root, "{message}");
        let detail = Detail {
            field: Some("path".to_owned()),
            ..Detail::default()
        };
        ClientError::from(BoxError::new(Code::Denied, message).with_detail(&detail))
    };
    let named = Path::new(path);
    if named.components().any(|part| part == Component::ParentDir) {
        return Err(denied("path: must not contain `..`".to_owned()));
    }
    if !named.starts_with(root) {
        return Err(denied(format!("path: downloads must be under {root}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downloads_stay_under_their_root() {
        let check = |path: &str| check_download(path, "/mnt/data").map_err(|error| error.code());
        for path in [
            "/mnt/data/a",
            "/mnt/data//b/./c",
            "/mnt/data/..a/b..",
            "/mnt/data",
        ] {
            assert_eq!(check(path), Ok(()), "{path}");
        }
        for path in [
            "/etc/passwd",
            "/mnt/data/../../etc/passwd",
            "../secret",
            "/a/b/../../../etc/shadow",
            "/mnt/database/x",
            "mnt/data/x",
            "relative",
            "",
        ] {
            assert_eq!(check(path), Err(Code::Denied), "{path}");
        }
    }
}
