//! Storage of private files: of a box, and of the earlier boxes below it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Storage of a box's private files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scratch {
    /// Memory of the box, limited by the kernel. `/dev/shm` is part of it.
    Memory(Caps),
    /// A file system in a file of [`ServerConfig::disks`](crate::ServerConfig::disks).
    ///
    /// The kernel enforces the limit. The file ends with the box, except for its name, or stays
    /// ([`Sandbox::keep_disk`](crate::Sandbox::keep_disk)).
    FileSystem {
        /// Limit of the private files.
        caps: Caps,
        /// Limit of `/dev/shm`, which is in memory.
        shm: Caps,
        /// Path of the file below that directory. Its parent directory must exist.
        ///
        /// Without it the file has no name.
        name: Option<PathBuf>,
    },
    /// The file of a [`Scratch::FileSystem`] of an ended box, with its content.
    ///
    /// No other box uses it. The file stays after the end of the box.
    File {
        /// An absolute host path without symbolic links.
        path: PathBuf,
        /// Limit of `/dev/shm`, which is in memory.
        shm: Caps,
    },
    /// A directory of the host, which the caller limits and removes.
    ///
    /// It is empty, or of an ended box.
    Directory {
        /// An absolute host path without symbolic links.
        path: PathBuf,
        /// Limit of `/dev/shm`, which is in memory.
        shm: Caps,
    },
}

impl Default for Scratch {
    fn default() -> Self {
        Self::Memory(Caps::default())
    }
}

impl Scratch {
    /// Whether a prepared box with one storage can serve a plan with the other.
    pub(crate) fn same_shape(&self, other: &Self) -> bool {
        match (self, other) {
            (
                Self::FileSystem { caps, shm, .. },
                Self::FileSystem {
                    caps: other_caps,
                    shm: other_shm,
                    ..
                },
            ) => caps == other_caps && shm == other_shm,
            _ => self == other,
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let (Self::Memory(shm)
        | Self::FileSystem { shm, .. }
        | Self::File { shm, .. }
        | Self::Directory { shm, .. }) = self;
        shm.validate()?;
        let Self::FileSystem { caps, name, .. } = self else {
            return Ok(());
        };
        caps.validate()?;
        if caps.bytes < DISK_MIN || caps.bytes > DISK_MAX {
            return Err(Error::Invalid(format!(
                "scratch: a file system of {} bytes; must be between {DISK_MIN} and {DISK_MAX}",
                caps.bytes
            )));
        }
        let plain = |component| matches!(component, std::path::Component::Normal(_));
        if name
            .as_ref()
            .is_some_and(|name| name.as_os_str().is_empty() || !name.components().all(plain))
        {
            return Err(Error::Invalid(
                "scratch: the name of the file must be a relative path without `..`".into(),
            ));
        }
        Ok(())
    }
}

/// Smallest and largest file system of [`Scratch::FileSystem`].
pub(super) const DISK_MIN: u64 = 16 << 20;
pub(super) const DISK_MAX: u64 = 8 << 40;

/// Limit of a box's private files. The kernel enforces it with `ENOSPC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    /// Total size of all files.
    pub bytes: u64,
    /// Number of files and directories.
    pub inodes: u64,
}

impl Caps {
    fn validate(self) -> Result<()> {
        if self.bytes == 0 || self.inodes < 64 {
            return Err(Error::Invalid(
                "caps: must be at least 1 byte and 64 inodes; 0 would mean no limit".into(),
            ));
        }
        Ok(())
    }
}

impl Default for Caps {
    fn default() -> Self {
        Self {
            bytes: 512 << 20,
            inodes: 65_536,
        }
    }
}

/// Private files of an earlier box, with the marks of an overlay for removed files.
///
/// Box never writes to them, and they must not change while a box uses them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// An absolute host path without symbolic links.
    pub path: PathBuf,
    /// The form of the files at the path.
    pub kind: LayerKind,
}

/// Form of a layer on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// A directory of copied files. Files of root's boxes have the ids that they have in a box.
    Directory,
    /// The storage of an ended box, [`Scratch::FileSystem`] or [`Scratch::Directory`].
    Disk,
}

impl Layer {
    /// A layer of copied files.
    pub fn directory(path: impl Into<PathBuf>) -> Self {
        let (path, kind) = (path.into(), LayerKind::Directory);
        Self { path, kind }
    }

    /// The storage of an ended box.
    pub fn disk(path: impl Into<PathBuf>) -> Self {
        let (path, kind) = (path.into(), LayerKind::Disk);
        Self { path, kind }
    }
}
