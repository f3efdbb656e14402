//! Removes images that are not in use.

use std::collections::HashMap;
use std::time::Duration;

use super::{Name, Store, Work, now};
use crate::digest::Digest;
use crate::error::{Error, Result, shown};

/// Uses of images that have no lease in the store, such as boxes that were found at a start.
pub type Uses = HashMap<Digest, usize>;

/// Result of a removal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Removed {
    /// Names that were removed.
    pub names: Vec<String>,
    /// The image, if its files were removed too.
    pub image: Option<Digest>,
    /// Bytes that the disk gained.
    pub freed_bytes: u64,
}

/// Which images a cleanup removes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PruneOptions {
    /// Remove images with names too.
    pub named: bool,
    /// Keep images that were used or made within this time.
    pub unused_for: Duration,
}

/// Result of a cleanup.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Pruned {
    /// Images that were removed.
    pub images: Vec<Digest>,
    /// Bytes that the disk gained, with those of unfinished downloads.
    pub freed_bytes: u64,
}

impl Store {
    /// Removes a name, and the image with its last name. A digest removes the image with all names.
    ///
    /// An image in use is refused with the number of its leases and `uses`.
    pub fn remove(&self, query: &str, uses: &Uses) -> Result<Removed> {
        let guard = self.exclusive()?;
        let (digest, name) = self.find(query)?;
        let mut names = self.names()?;
        names.retain(|name| name.digest == digest);
        if let Some(name) = name
            && names.len() > 1
        {
            self.remove_name(&name)?;
            let names = vec![name.key()];
            return Ok(Removed {
                names,
                ..Removed::default()
            });
        }
        let count = self.used(&digest, uses)?;
        if count > 0 {
            let image = shown(query);
            return Err(Error::InUse { image, uses: count });
        }
        let freed_bytes = self
            .record(&digest)
            .ok()
            .flatten()
            .map_or(0, |image| image.disk_bytes);
        let work = self.take(&digest, &names)?;
        // The files are removed without the lock.
        drop(guard);
        drop(work);
        Ok(Removed {
            names: names.iter().map(Name::key).collect(),
            image: Some(digest),
            freed_bytes,
        })
    }

    /// Removes images that are not in use, and unfinished downloads.
    pub fn prune(&self, options: PruneOptions, uses: &Uses) -> Result<Pruned> {
        let mut pruned = Pruned::default();
        let mut trash = Vec::new();
        let guard = self.exclusive()?;
        let names = self.names()?;
        for digest in self.digests()? {
            let own: Vec<_> = names
                .iter()
                .filter(|name| name.digest == digest)
                .cloned()
                .collect();
            if !options.named && !own.is_empty() {
                continue;
            }
            // A damaged image is as old as can be.
            let record = self.record(&digest).ok().flatten();
            let (used_at, bytes) = record.map_or((0, 0), |image| (image.used_at, image.disk_bytes));
            let idle = Duration::from_secs(now().saturating_sub(used_at));
            if idle < options.unused_for || self.used(&digest, uses)? > 0 {
                continue;
            }
            trash.push(self.take(&digest, &own)?);
            pruned.images.push(digest);
            pruned.freed_bytes += bytes;
        }
        pruned.freed_bytes += self.sweep_partial(options.unused_for)?;
        self.sweep_leases()?;
        drop(guard);
        drop(trash);
        // A process that only cleans up would end before.
        self.wait_for_sweep();
        Ok(pruned)
    }

    /// Returns how many leases and `uses` an image has.
    pub fn uses(&self, digest: &Digest, uses: &Uses) -> Result<usize> {
        let _guard = self.shared()?;
        self.used(digest, uses)
    }

    /// As [`uses`](Self::uses). The caller holds a lock.
    fn used(&self, digest: &Digest, uses: &Uses) -> Result<usize> {
        Ok(self.leases(digest)? + uses.get(digest).copied().unwrap_or(0))
    }

    /// Removes the names before the image, so that no name ever denotes a missing image.
    fn take(&self, digest: &Digest, names: &[Name]) -> Result<Work> {
        for name in names {
            self.remove_name(name)?;
        }
        self.withdraw(digest)
    }
}
