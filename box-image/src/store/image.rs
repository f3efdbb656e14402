//! The record of an image.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Store, seconds};
use crate::digest::Digest;
use crate::error::{At as _, Error, Result};
use crate::platform::Platform;
use crate::spec::{self, ImageConfig};
use crate::unpack::Unpacked;

/// Image in a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Image {
    /// Digest of the manifest, which identifies the image.
    pub digest: Digest,
    /// Names of the image at the time of the query, with tag or digest.
    #[serde(skip_deserializing, default)]
    pub names: Vec<String>,
    /// Reference that it was pulled by; `None` after an import.
    pub source: Option<String>,
    /// Platform, if the image names one.
    pub platform: Option<Platform>,
    /// Environment, user, command and other settings.
    pub config: ImageConfig,
    /// Layers that the tree was made from.
    pub layers: Vec<LayerInfo>,
    /// Counts of the unpacking.
    pub unpacked: Unpacked,
    /// Bytes that the tree takes on the disk.
    pub disk_bytes: u64,
    /// Time of the pull or import, in seconds since 1970.
    pub created_at: u64,
    /// Time of the last use, in seconds since 1970.
    #[serde(skip_deserializing, default)]
    pub used_at: u64,
}

/// Layer of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// Digest of the compressed layer.
    pub digest: Digest,
    /// Size of the compressed layer in bytes.
    pub size: u64,
}

/// The file whose time of change is that of the last use.
pub(super) const USED: &str = "used";

impl Store {
    /// Returns the directory with the files of an image, which must not be changed.
    ///
    /// The caller holds a [`Lease`](super::Lease) while it uses the path.
    pub fn rootfs(&self, digest: &Digest) -> PathBuf {
        self.image_path(digest).join("rootfs")
    }

    pub(super) fn image_path(&self, digest: &Digest) -> PathBuf {
        self.folder("images", &digest.hex())
    }

    /// Reads the record of an image, without its names; `None` if it does not exist.
    pub(super) fn record(&self, digest: &Digest) -> Result<Option<Image>> {
        let folder = self.image_path(digest);
        let content = match fs::read(folder.join("image.json")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            content => content.at("image store")?,
        };
        let mut image: Image = serde_json::from_slice(&content).map_err(|_| {
            let short = digest.short();
            Error::Storage(format!(
                "image store: the record of {short} is damaged; remove the image"
            ))
        })?;
        let used = fs::metadata(folder.join(USED)).and_then(|found| found.modified());
        image.used_at = seconds(used).max(image.created_at);
        Ok(Some(image))
    }

    /// Returns the configuration of an image as its registry stores it.
    pub fn raw_config(&self, digest: &Digest) -> Result<Vec<u8>> {
        let path = self.image_path(digest).join("config.json");
        match fs::read(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(super::query::unknown(&digest.to_string()))
            }
            content => content.at("image store"),
        }
    }

    pub(super) fn record_json(image: &Image) -> Result<Vec<u8>> {
        spec::to_json(image, "image record")
    }
}
