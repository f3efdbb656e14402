//! Finds images.

use super::work::tree_bytes;
use super::{Image, Name, Store};
use crate::digest::Digest;
use crate::error::{Error, Result, shown};
use crate::reference::Reference;

/// Minimum length of an abbreviated digest.
const PREFIX_MIN: usize = 4;

/// Disk usage of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskUsage {
    /// Number of images.
    pub images: usize,
    /// Bytes of all images.
    pub image_bytes: u64,
    /// Bytes of images without leases.
    pub unused_bytes: u64,
    /// Bytes of unfinished downloads.
    pub partial_bytes: u64,
    /// Bytes of images that are made or removed now.
    pub work_bytes: u64,
}

impl Store {
    /// Returns all images, newest first, without those whose records are damaged.
    pub fn list(&self) -> Result<Vec<Image>> {
        let _guard = self.shared()?;
        let names = self.names()?;
        let mut images = Vec::new();
        for digest in self.digests()? {
            let record = match self.record(&digest) {
                // The others are listed all the same.
                Err(Error::Storage(problem)) => {
                    tracing::warn!("{problem}");
                    continue;
                }
                record => record?,
            };
            if let Some(mut image) = record {
                image.names = names_of(&names, &digest);
                images.push(image);
            }
        }
        images.sort_by(|a, b| {
            b.created_at
                .cmp(&a.created_at)
                .then(a.digest.cmp(&b.digest))
        });
        Ok(images)
    }

    /// Finds an image by name, by digest, or by the first digits of its digest.
    pub fn get(&self, query: &str) -> Result<Image> {
        let _guard = self.shared()?;
        let digest = self.find(query)?.0;
        let mut image = self.record(&digest)?.ok_or_else(|| unknown(query))?;
        image.names = names_of(&self.names()?, &digest);
        Ok(image)
    }

    /// Gives an image another name, which leaves any other image.
    pub fn tag(&self, query: &str, reference: &Reference) -> Result<()> {
        if reference.digest().is_some() {
            return Err(Error::invalid(format!(
                "tag: `{reference}` contains a digest; use NAME:TAG"
            )));
        }
        let _guard = self.exclusive()?;
        let digest = self.find(query)?.0;
        self.set_name(&Name {
            reference: reference.clone(),
            digest,
            resolved: digest,
        })
    }

    /// Sets a name of an image if the store has it.
    pub(crate) fn name_known(&self, name: &Name) -> Result<Option<Image>> {
        let guard = self.exclusive()?;
        if self.record(&name.digest)?.is_none() {
            return Ok(None);
        }
        self.set_name(name)?;
        drop(guard);
        self.get(&name.digest.to_string()).map(Some)
    }

    /// Returns the disk usage.
    pub fn disk_usage(&self) -> Result<DiskUsage> {
        let mut usage = DiskUsage::default();
        for image in self.list()? {
            usage.images += 1;
            usage.image_bytes += image.disk_bytes;
            if self.leases(&image.digest)? == 0 {
                usage.unused_bytes += image.disk_bytes;
            }
        }
        usage.partial_bytes = tree_bytes(&self.path("partial"))?;
        // Its files may vanish meanwhile; then the rest counts.
        usage.work_bytes = tree_bytes(&self.path("work")).unwrap_or(0);
        Ok(usage)
    }

    /// Finds a digest, and the name if the query is one. The caller holds a lock.
    pub(super) fn find(&self, query: &str) -> Result<(Digest, Option<Name>)> {
        if let Ok(digest) = query.parse::<Digest>() {
            let exists = self.image_path(&digest).exists();
            return exists
                .then_some((digest, None))
                .ok_or_else(|| unknown(query));
        }
        let reference = query.parse::<Reference>();
        if let Ok(reference) = &reference
            && let Some(found) = self.find_reference(reference)?
        {
            return Ok(found);
        }
        if let Some(digest) = self.find_prefix(query)? {
            return Ok((digest, None));
        }
        // A query that is neither a reference nor digits breaks a rule.
        let digits = is_prefix(query.strip_prefix("sha256:").unwrap_or(query));
        match reference {
            Err(error) if !digits => Err(error),
            _ => Err(unknown(query)),
        }
    }

    fn find_reference(&self, reference: &Reference) -> Result<Option<(Digest, Option<Name>)>> {
        let Some(digest) = reference.digest() else {
            let name = self.name(reference)?;
            return Ok(name.map(|name| (name.digest, Some(name))));
        };
        // A digest decides over a tag beside it.
        if self.image_path(&digest).exists() {
            return Ok(Some((digest, None)));
        }
        let names = self.names()?;
        let found = names
            .into_iter()
            .find(|name| name.has_digest(reference, digest));
        Ok(found.map(|name| (name.digest, Some(name))))
    }

    fn find_prefix(&self, query: &str) -> Result<Option<Digest>> {
        let prefix = query.strip_prefix("sha256:").unwrap_or(query);
        if !is_prefix(prefix) {
            return Ok(None);
        }
        let mut found = self.digests()?;
        found.retain(|digest| digest.hex().starts_with(prefix));
        match found.as_slice() {
            [] => Ok(None),
            [digest] => Ok(Some(*digest)),
            several => Err(Error::Ambiguous(format!(
                "image: `{prefix}` matches {} digests; use more digits",
                several.len()
            ))),
        }
    }

    pub(super) fn digests(&self) -> Result<Vec<Digest>> {
        let names = self.entries("images")?;
        Ok(names
            .iter()
            .filter_map(|name| Digest::from_hex(name))
            .collect())
    }
}

fn is_prefix(text: &str) -> bool {
    text.len() >= PREFIX_MIN && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

fn names_of(names: &[Name], digest: &Digest) -> Vec<String> {
    let own = names.iter().filter(|name| name.digest == *digest);
    own.map(Name::key).collect()
}

pub(super) fn unknown(query: &str) -> Error {
    Error::not_found(format!(
        "image: `{}` is not on this machine; pull or import it first",
        shown(query)
    ))
}
