//! The interface to the volumes of a backend, which outlive boxes.

use std::collections::BTreeSet;

use async_trait::async_trait;
use box_protocol::{BoxError, ItemId, VolumeMount};

/// Makes and removes the data of volumes, which outlive boxes.
///
/// Callers see errors, so these must not contain host paths.
#[async_trait]
pub trait Volumes: Send + Sync {
    /// Creates a volume of this many bytes, and returns whether the kernel enforces the size.
    ///
    /// The data is on disk before the call returns. After an error the runtime calls
    /// [`remove`](Self::remove).
    async fn create(&self, id: &ItemId, bytes: u64) -> Result<bool, BoxError>;

    /// Changes the size of a volume that no box uses.
    ///
    /// The new size is on disk before the call returns.
    async fn resize(&self, id: &ItemId, bytes: u64) -> Result<(), BoxError>;

    /// Returns the bytes that the files of a volume occupy.
    async fn used_bytes(&self, id: &ItemId) -> Result<u64, BoxError>;

    /// Removes a volume that no box uses. The call succeeds if it is gone or partly created.
    async fn remove(&self, id: &ItemId) -> Result<(), BoxError>;

    /// Removes every volume that is not among these, after a crash.
    async fn retain(&self, known: &BTreeSet<ItemId>) -> Result<(), BoxError>;
}

/// A volume that a box mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    /// The id of the volume.
    pub id: ItemId,
    /// Its maximum size in bytes.
    pub bytes: u64,
    /// How the box mounts it. Its `volume` is the name that the caller used.
    pub mount: VolumeMount,
}
