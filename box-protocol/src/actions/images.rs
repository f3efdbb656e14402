//! `image.*`: the images of a server, from which boxes get their root file systems.
//!
//! All callers of a server share its images. Every caller may list, read and export them, and may
//! use them in boxes. A caller other than the user of the server may pull only the images that the
//! operator allows (`images.allow_pull`). Only the user of the server may import and remove images,
//! and log in to registries; other callers get `denied`.
//!
//! An image is named by its reference (`NAME[:TAG][@DIGEST]`), its digest, or the first digits of
//! its digest, at least four. Errors: `not_found`, `validation` (an invalid reference, or content
//! that breaks a rule), `denied` (also by the registry), `unavailable` (the registry does not answer),
//! `unsupported` (another platform or format), `too_large`, `capacity` (no space left), and
//! `conflict` (an ambiguous name).

use std::collections::BTreeMap;
use std::fmt;

use box_rpc::Empty;
use serde::{Deserialize, Serialize};

use super::{FileChunk, UploadPiece, actions, is_default};
use crate::blob::Blob;
use crate::model::PullPolicy;
use crate::time::UnixMs;

actions! {
    /// Pulls an image from its registry, and reports the progress as chunks. Layers that an earlier
    /// attempt has downloaded are not downloaded again. Cancelling the call ends the pull.
    ImagePull = "image.pull": ImagePullParams => ImageInfo | PullProgress;

    /// Imports an image from an archive that the client sends in pieces: an OCI layout, the output
    /// of `docker save`, or a root file system; each may be compressed. Errors: `conflict` (a piece
    /// that does not follow the earlier ones), `capacity` (`image_uploads`).
    ImageImport = "image.import": ImageImportParams => ImageImportResult;

    /// Reads an image as an archive of an OCI layout, in chunks. The layout has one layer, so its
    /// digest differs from that of a pulled image.
    ImageExport = "image.export": ImageExportParams => ImageExportResult | FileChunk;

    /// Lists the images of the server, newest first.
    ImageList = "image.list": ImageListParams => ImageListResult;

    /// Returns the record of an image.
    ImageGet = "image.get": ImageGetParams => ImageInfo;

    /// Removes a name of an image, and the image with its last name. A digest removes the image with
    /// all its names. Errors: `conflict` (boxes use the image; the message has their number).
    ImageRemove = "image.remove": ImageRemoveParams => ImageRemoveResult;

    /// Removes the images that no box uses, and unfinished downloads.
    ImagePrune = "image.prune": ImagePruneParams => ImagePruneResult;

    /// Checks a user name and a password with a registry, and stores them for later pulls.
    ImageLogin = "image.login": ImageLoginParams => Empty;

    /// Removes the stored password of a registry. Errors: `not_found`.
    ImageLogout = "image.logout": ImageLogoutParams => Empty;
}

/// Parameters of `image.pull`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImagePullParams {
    /// The reference: `NAME[:TAG][@DIGEST]`.
    pub reference: String,
    /// When to ask the registry; `always` if absent. With `never`, the call only finds the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PullPolicy>,
}

/// The progress of a pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum PullProgress {
    /// The manifest is known.
    Resolved {
        /// Digest of the manifest.
        digest: String,
        /// The layers in order.
        layers: Vec<ImageLayer>,
    },
    /// A layer has made progress. The server omits reports that a newer one replaces.
    Layer {
        /// Digest of the layer.
        digest: String,
        /// What happens to the layer.
        phase: LayerPhase,
        /// Compressed bytes that have passed this phase.
        done: u64,
        /// Compressed bytes in total.
        total: u64,
    },
    /// A request failed, and the server repeats it.
    Retry {
        /// Why it failed.
        reason: String,
        /// Time until the next attempt, in milliseconds.
        wait_ms: u64,
    },
    /// The server writes the complete image to its disk.
    Saving {},
}

/// What happens to a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum LayerPhase {
    /// Bytes arrive.
    Download,
    /// Files are written.
    Unpack,
    /// The layer is complete and has the right digest.
    Done,
}

/// A layer of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImageLayer {
    /// Digest of the compressed layer.
    pub digest: String,
    /// Size of the compressed layer, in bytes.
    pub size: u64,
}

/// An image of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImageInfo {
    /// Digest of the manifest, which identifies the image.
    pub digest: String,
    /// The full names: `REGISTRY/REPOSITORY:TAG`.
    pub names: Vec<String>,
    /// The reference that it was pulled by; absent after an import.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// The platform, for example `linux/amd64`; absent if the image names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// Size of its files on the disk of the server, in bytes.
    pub disk_bytes: u64,
    /// When it was pulled or imported.
    pub created_at: UnixMs,
    /// When a box last used it.
    pub used_at: UnixMs,
    /// Number of boxes and exports that use it.
    pub uses: u64,
    /// The layers that it was made from. Empty in lists.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<ImageLayer>,
    /// The settings of its boxes. Absent in lists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<Box<ImageConfig>>,
}

/// The settings that an image has for its boxes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ImageConfig {
    /// Environment variables.
    pub env: BTreeMap<String, String>,
    /// The user as `NAME`, `UID`, `NAME:GROUP` or `UID:GID`; empty for root.
    pub user: String,
    /// The working directory; empty for the root directory.
    pub working_dir: String,
    /// Program and arguments before `cmd`.
    pub entrypoint: Vec<String>,
    /// The command, or the arguments of `entrypoint`.
    pub cmd: Vec<String>,
    /// Ports as `PORT/PROTOCOL`.
    pub exposed_ports: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
}

impl ImageConfig {
    /// Returns the program and the arguments of a box that names none: `entrypoint` and `cmd`.
    pub fn argv(&self) -> Vec<String> {
        self.entrypoint.iter().chain(&self.cmd).cloned().collect()
    }
}

/// Parameters of `image.import`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageImportParams {
    /// The name of the new image: `NAME[:TAG]`.
    pub name: String,
    /// Which image to take if the archive has several: its name in the archive, or its digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub select: Option<String>,
    /// A piece of the archive.
    pub data: Blob,
    /// Position of the piece in the upload.
    pub upload: UploadPiece,
}

/// Result of `image.import`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ImageImportResult {
    /// The image; absent until the last piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageInfo>,
}

/// Parameters of `image.export`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageExportParams {
    /// The image.
    pub image: String,
}

/// Result of `image.export`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImageExportResult {
    /// Digest of the manifest in the archive.
    pub digest: String,
    /// Size of the archive, in bytes.
    pub bytes: u64,
}

/// Parameters of `image.list`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageListParams {}

/// Result of `image.list`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImageListResult {
    /// The images, newest first.
    pub items: Vec<ImageInfo>,
    /// Size of unfinished downloads, in bytes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub partial_bytes: u64,
}

/// Parameters of `image.get`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageGetParams {
    /// The image.
    pub image: String,
}

/// Parameters of `image.remove`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageRemoveParams {
    /// The image.
    pub image: String,
}

/// Result of `image.remove`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImageRemoveResult {
    /// The removed names.
    pub names: Vec<String>,
    /// Digest of the image, if its files were removed too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Bytes that the disk of the server has gained.
    pub freed_bytes: u64,
}

/// Parameters of `image.prune`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ImagePruneParams {
    /// Whether to remove images with names too; `false` if absent.
    pub all: bool,
    /// Keep what was used or made within this time, in milliseconds; nothing if absent.
    #[serde(skip_serializing_if = "is_default")]
    pub unused_for_ms: u64,
}

/// Result of `image.prune`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ImagePruneResult {
    /// Digests of the removed images.
    pub digests: Vec<String>,
    /// Bytes that the disk of the server has gained.
    pub freed_bytes: u64,
}

/// Parameters of `image.login`. `Debug` does not show the password.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageLoginParams {
    /// The registry: `HOST[:PORT]`.
    pub registry: String,
    /// The user name.
    pub username: String,
    /// The password or access token.
    pub password: String,
}

impl fmt::Debug for ImageLoginParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageLoginParams")
            .field("registry", &self.registry)
            .field("username", &self.username)
            .finish_non_exhaustive()
    }
}

/// Parameters of `image.logout`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ImageLogoutParams {
    /// The registry: `HOST[:PORT]`.
    pub registry: String,
}
