//! Names of images. A name moves to another image in one step.

use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

use super::Store;
use crate::digest::Digest;
use crate::error::{At as _, Error, Result};
use crate::reference::Reference;
use crate::spec;

/// Name of an image, and the digests that it denotes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Name {
    /// The full name with a tag or, without a tag, with a digest.
    pub(crate) reference: Reference,
    /// The image.
    pub(crate) digest: Digest,
    /// The digest that the registry gave for the name, which may be that of an index.
    pub(crate) resolved: Digest,
}

/// Returns the key of a reference: a tag, or a digest if it has none.
fn key(reference: &Reference) -> String {
    reference.tag_key().unwrap_or_else(|| reference.to_string())
}

/// Returns the name of the file for a key; a key may be longer than a file name.
fn file_name(key: &str) -> String {
    Digest::of(key.as_bytes()).hex()
}

impl Name {
    pub(super) fn key(&self) -> String {
        key(&self.reference)
    }

    /// Returns whether a reference with a digest denotes this name's image.
    pub(super) fn has_digest(&self, reference: &Reference, digest: Digest) -> bool {
        self.reference.name() == reference.name()
            && (self.digest == digest || self.resolved == digest)
    }
}

impl Store {
    /// Reads all names. The caller holds a lock.
    pub(super) fn names(&self) -> Result<Vec<Name>> {
        let mut names = Vec::new();
        for file in self.entries("tags")? {
            let content = fs::read(self.folder("tags", &file)).at("image store")?;
            let name: Name = serde_json::from_slice(&content).map_err(|_| {
                Error::Storage("image store: a name is damaged; tag its image again".to_owned())
            })?;
            names.push(name);
        }
        names.sort_by_key(Name::key);
        Ok(names)
    }

    /// Reads one name. The caller holds a lock.
    pub(super) fn name(&self, reference: &Reference) -> Result<Option<Name>> {
        match fs::read(self.folder("tags", &file_name(&key(reference)))) {
            Ok(content) => Ok(serde_json::from_slice(&content).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).at("image store"),
        }
    }

    /// Sets a name. The caller holds the exclusive lock.
    pub(super) fn set_name(&self, name: &Name) -> Result<()> {
        let path = self.folder("tags", &file_name(&name.key()));
        self.write_file(&path, &spec::to_json(name, "image name")?)
    }

    /// Removes a name. The caller holds the exclusive lock.
    pub(super) fn remove_name(&self, name: &Name) -> Result<()> {
        let path = self.folder("tags", &file_name(&name.key()));
        fs::remove_file(&path).at("image store")?;
        super::sync_parent(&path)
    }

    /// Removes damaged names and names of missing images. The caller holds the exclusive lock.
    pub(super) fn sweep_tags(&self) -> Result<()> {
        for file in self.entries("tags")? {
            let path = self.folder("tags", &file);
            let content = fs::read(&path).at("image store")?;
            let name: Option<Name> = serde_json::from_slice(&content).ok();
            if !name.is_some_and(|name| self.image_path(&name.digest).exists()) {
                fs::remove_file(&path).at("image store")?;
            }
        }
        Ok(())
    }
}
