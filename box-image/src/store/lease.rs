//! Leases: images in use.

use std::fs::{self, File};
use std::path::PathBuf;

use super::image::USED;
use super::{Store, lock_file, query::unknown, random_id, try_lock};
use crate::digest::Digest;
use crate::error::{At as _, Result};

/// Use of an image; the image cannot be removed while it exists.
///
/// The lease ends when it is dropped or when its process ends.
#[derive(Debug)]
pub struct Lease {
    digest: Digest,
    path: PathBuf,
    /// Holds the lock that other processes see.
    _file: File,
    store: Store,
}

impl Lease {
    /// Returns the digest of the image.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    /// Returns the directory with the files of the image.
    pub fn rootfs(&self) -> PathBuf {
        self.store.rootfs(&self.digest)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Store {
    /// Marks an image as used.
    pub fn lease(&self, digest: &Digest) -> Result<Lease> {
        let _guard = self.shared()?;
        let folder = self.image_path(digest);
        if !folder.exists() {
            return Err(unknown(&digest.to_string()));
        }
        let path = self.folder("leases", &format!("{}.{}", digest.hex(), random_id()?));
        let file = lock_file(&path).at("image store")?;
        file.lock().at("image store")?;
        // The time of the last use only orders a cleanup; an error does not matter.
        let _ = File::create(folder.join(USED));
        Ok(Lease {
            digest: *digest,
            path,
            _file: file,
            store: self.clone(),
        })
    }

    /// Returns how many leases an image has, in all processes.
    pub(super) fn leases(&self, digest: &Digest) -> Result<usize> {
        let prefix = format!("{}.", digest.hex());
        let mut count = 0;
        for name in self.entries("leases")? {
            if name.starts_with(&prefix) && self.is_leased(&name)? {
                count += 1;
            }
        }
        Ok(count)
    }

    /// Removes leases of dead processes. The caller holds the exclusive lock.
    pub(super) fn sweep_leases(&self) -> Result<()> {
        for name in self.entries("leases")? {
            if !self.is_leased(&name)? {
                let _ = fs::remove_file(self.folder("leases", &name));
            }
        }
        Ok(())
    }

    fn is_leased(&self, name: &str) -> Result<bool> {
        match File::open(self.folder("leases", name)) {
            Ok(file) => Ok(!try_lock(&file)?),
            // Its process has just ended it.
            Err(_) => Ok(false),
        }
    }
}
