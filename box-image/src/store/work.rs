//! Images that are made or removed, outside the view of others.

use std::fs::{self, DirBuilder, File};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::PathBuf;

use super::{
    Image, Name, PARTIAL_AGE, Store, lock_file, random_id, sync_parent, try_lock, write_new,
};
use crate::digest::Digest;
use crate::error::{At as _, Result};
use crate::unpack;

const LOCK: &str = ".lock";

/// Directory of one operation; dropping it removes everything in it.
#[derive(Debug)]
pub(crate) struct Work {
    store: Store,
    id: String,
    /// Shows other processes that this one lives.
    lock: Option<File>,
}

impl Work {
    /// Returns the directory.
    pub(crate) fn path(&self) -> PathBuf {
        self.store.folder("work", &self.id)
    }

    /// Opens the directory that becomes the root of an image.
    pub(crate) fn rootfs(&self) -> Result<OwnedFd> {
        let directory = File::open(self.path().join("rootfs")).at("image store")?;
        Ok(directory.into())
    }

    /// Writes a file beside the tree.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> Result<()> {
        write_new(&self.path().join(name), content).at("image store")
    }

    /// Returns the bytes that the tree takes on the disk; hard links count once.
    pub(crate) fn disk_bytes(&self) -> Result<u64> {
        tree_bytes(&self.path().join("rootfs"))
    }

    /// Makes the image visible under its digest, and sets its name.
    ///
    /// The tree is on the disk before. If another process has made the same image meanwhile, that one stays.
    pub(crate) fn commit(self, image: &Image, name: Option<&Name>) -> Result<()> {
        self.write("image.json", &Store::record_json(image)?)?;
        let folder = File::open(self.path()).at("image store")?;
        rustix::fs::syncfs(folder.as_fd()).at("image store")?;
        let target = self.store.image_path(&image.digest);
        let _guard = self.store.exclusive()?;
        if !target.exists() {
            fs::rename(self.path(), &target).at("image store")?;
            sync_parent(&target)?;
        }
        if let Some(name) = name {
            self.store.set_name(name)?;
        }
        Ok(())
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let work = self.store.path("work");
        let removed = File::open(&work).and_then(|folder| {
            let folder = OwnedFd::from(folder);
            unpack::remove_tree(&folder, self.id.as_bytes())?;
            Ok(())
        });
        match removed {
            Ok(()) => {
                let _ = fs::remove_file(work.join(format!("{}{LOCK}", self.id)));
            }
            Err(error) => {
                tracing::warn!(%error, "an unfinished image stays until the store is opened again");
            }
        }
        self.lock = None;
    }
}

impl Store {
    /// Makes a directory for an image.
    pub(crate) fn work(&self) -> Result<Work> {
        let guard = self.exclusive()?;
        // A server may run for longer than downloads are kept.
        let _ = self.sweep_partial(PARTIAL_AGE);
        let work = self.empty_work()?;
        let make = |path: PathBuf| DirBuilder::new().mode(0o700).create(path).at("image store");
        make(work.path())?;
        make(work.path().join("rootfs"))?;
        drop(guard);
        Ok(work)
    }

    /// Reserves a name for a directory. The caller holds the exclusive lock.
    fn empty_work(&self) -> Result<Work> {
        let id = random_id()?;
        let lock = lock_file(&self.folder("work", &format!("{id}{LOCK}"))).at("image store")?;
        lock.lock().at("image store")?;
        Ok(Work {
            store: self.clone(),
            id,
            lock: Some(lock),
        })
    }

    /// Takes an image out of view; its files are removed when the result is dropped.
    ///
    /// The caller holds the exclusive lock, and drops it first.
    pub(super) fn withdraw(&self, digest: &Digest) -> Result<Work> {
        let work = self.empty_work()?;
        let path = self.image_path(digest);
        fs::rename(&path, work.path()).at("image store")?;
        sync_parent(&path)?;
        Ok(work)
    }

    /// Returns the directories of dead processes. The caller holds the exclusive lock.
    pub(super) fn dead_work(&self) -> Result<Vec<Work>> {
        let mut dead = Vec::new();
        for name in self.entries("work")? {
            // A draft is written under the lock, which we hold.
            if name.strip_suffix(".draft").is_some() {
                let _ = fs::remove_file(self.folder("work", &name));
                continue;
            }
            let id = name.strip_suffix(LOCK).unwrap_or(&name).to_owned();
            if dead.iter().any(|work: &Work| work.id == id) {
                continue;
            }
            let lock = lock_file(&self.folder("work", &format!("{id}{LOCK}"))).at("image store")?;
            if try_lock(&lock)? {
                dead.push(Work {
                    store: self.clone(),
                    id,
                    lock: Some(lock),
                });
            }
        }
        Ok(dead)
    }
}

/// Returns the bytes that a tree takes on the disk.
pub(super) fn tree_bytes(root: &std::path::Path) -> Result<u64> {
    let mut folders = vec![root.to_owned()];
    let mut links = std::collections::HashSet::new();
    let mut bytes = 0_u64;
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            // A mode of the image that keeps its own user out.
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => continue,
            entries => entries.at("image store")?,
        };
        for entry in entries {
            let entry = entry.at("image store")?;
            let Ok(found) = entry.metadata() else {
                continue;
            };
            if found.is_dir() {
                folders.push(entry.path());
            } else if found.nlink() > 1 && !links.insert(found.ino()) {
                continue;
            }
            bytes += found.blocks() * 512;
        }
    }
    Ok(bytes)
}
