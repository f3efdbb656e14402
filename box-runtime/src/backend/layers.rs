//! Layers: private files of earlier boxes, which later boxes have below their own files.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The form of a layer on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// A directory of copied files.
    Directory,
    /// The disk of a stopped box: a file with a file system, or a directory.
    Disk,
}

/// The private files of an earlier box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// An absolute host path without symbolic links.
    ///
    /// The files must not change while a box uses the layer.
    pub path: PathBuf,
    /// The form of the files at the path.
    pub kind: LayerKind,
}

impl Layer {
    /// A layer of this kind.
    pub fn new(path: impl Into<PathBuf>, kind: LayerKind) -> Self {
        Self {
            path: path.into(),
            kind,
        }
    }
}

/// The form and size of a complete layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFiles {
    /// The form of the layer.
    pub kind: LayerKind,
    /// The bytes of all files, without holes. For a disk, the bytes in use.
    pub bytes: u64,
    /// The number of files, directories and links.
    pub entries: u64,
}
