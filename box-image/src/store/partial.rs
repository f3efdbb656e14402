//! Layers that are downloaded. They outlive their process, and a later pull continues them.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::{Store, Work, lock_file, try_lock};
use crate::digest::Digest;
use crate::error::{At as _, Result};

/// File of a layer that is downloaded.
#[derive(Debug)]
pub(crate) struct Partial {
    pub(crate) file: File,
    path: PathBuf,
    /// Bytes of an earlier attempt.
    pub(crate) resumed: u64,
}

impl Partial {
    /// Removes the file: its content is used or wrong.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Right to pull an image; other pulls of it wait.
#[derive(Debug)]
pub(crate) struct PullLock {
    path: PathBuf,
    _file: File,
}

impl Drop for PullLock {
    fn drop(&mut self) {
        // A waiter may hold the removed file. Then two pulls run at once, and the first to end wins.
        let _ = fs::remove_file(&self.path);
    }
}

impl Store {
    /// Returns the right to pull an image; `None` while another process has it.
    pub(crate) fn try_pull_lock(&self, digest: &Digest) -> Result<Option<PullLock>> {
        let path = self.folder("pulls", &digest.hex());
        let _guard = self.shared()?;
        let file = lock_file(&path).at("image store")?;
        // A lock that was not taken must not be dropped: that removes the file.
        Ok(try_lock(&file)?.then(|| PullLock { path, _file: file }))
    }

    /// Removes the locks of dead processes. The caller holds the exclusive lock.
    pub(super) fn sweep_pulls(&self) -> Result<()> {
        for name in self.entries("pulls")? {
            let path = self.folder("pulls", &name);
            if let Ok(file) = File::open(&path)
                && try_lock(&file)?
            {
                let _ = fs::remove_file(&path);
            }
        }
        Ok(())
    }

    /// Opens the file of a layer.
    ///
    /// If another pull downloads the same layer, this one uses a file of its own.
    pub(crate) fn partial(&self, work: &Work, digest: &Digest, size: u64) -> Result<Partial> {
        let open = |path: &PathBuf| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).mode(0o600);
            options.open(path).at("image store")
        };
        let mut path = self.folder("partial", &digest.hex());
        // The lock keeps a cleanup from removing the file before it is locked.
        let guard = self.shared()?;
        let mut file = open(&path)?;
        if !try_lock(&file)? {
            path = work.path().join(digest.hex());
            file = open(&path)?;
            // The open file is enough, and must not become part of the image.
            fs::remove_file(&path).at("image store")?;
        }
        drop(guard);
        let mut resumed = file.metadata().at("image store")?.len();
        if resumed > size {
            file.set_len(0).at("image store")?;
            resumed = 0;
        }
        Ok(Partial {
            file,
            path,
            resumed,
        })
    }

    /// Removes downloads that no process continues. The caller holds the exclusive lock.
    pub(super) fn sweep_partial(&self, age: Duration) -> Result<u64> {
        let mut freed = 0;
        for name in self.entries("partial")? {
            let path = self.folder("partial", &name);
            let Ok(file) = File::open(&path) else {
                continue;
            };
            let found = file.metadata().at("image store")?;
            let changed = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let old = changed.elapsed().is_ok_and(|elapsed| elapsed >= age);
            if (old || age.is_zero()) && try_lock(&file)? {
                fs::remove_file(&path).at("image store")?;
                freed += found.len();
            }
        }
        Ok(freed)
    }
}
