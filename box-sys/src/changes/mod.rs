//! Compares the files of a box with those it began with, and carries the difference over.
//!
//! # Reading order
//! 1. [`Comparison`] names two views of a directory. Each is a stack of layers, as an overlay has
//!    them: the private files of the box, snapshots, an image or a directory of the host.
//! 2. `compare.rs` walks what can differ between the two views, in the order of the names.
//! 3. `list.rs` collects a page of the differences.
//! 4. `apply.rs` writes the new view to the directory of the host, `host.rs` is that directory.
//!    `times.rs` finds the times by which it knows conflicts.
//! 5. `discard.rs` writes the old view to the box. `missing.rs` finds paths that do not exist.
//!
//! A guest chose every name, and may run meanwhile. All access is by descriptor: no link is
//! followed, no mount is crossed, and no directory is left upwards.

mod apply;
mod compare;
mod discard;
mod host;
mod list;
mod missing;
mod times;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::plan::{Layer, LayerKind};

pub(crate) use apply::apply;
pub(crate) use compare::{Part, Views};
pub(crate) use discard::discard;
pub(crate) use host::Host;
pub(crate) use list::list;
pub(crate) use times::Times;

/// Most paths that are named in a result.
const NAMED_MAX: usize = 64;

/// Two views of a directory of a box: the new one and the old one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// The layers, the topmost first.
    pub layers: Vec<ComparedLayer>,
    /// The directory in the box, without the first slash. Empty for the root.
    pub directory: PathBuf,
    /// Paths below the directory that are no part of the comparison.
    pub hidden: Vec<PathBuf>,
    /// Directories below the directory that Box creates, which are no addition.
    pub made: Vec<PathBuf>,
    /// Whether the bits of the mode above `0o777` count.
    pub special_modes: bool,
}

/// A layer of one view or of both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComparedLayer {
    /// Where its files are.
    pub source: LayerSource,
    /// Whether the new view has it.
    pub in_new: bool,
    /// Whether the old view has it.
    pub in_old: bool,
}

/// The files of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerSource {
    /// The private files of the running box.
    Private,
    /// An image: an absolute host path.
    Image(PathBuf),
    /// The private files of an earlier box.
    Layer(Layer),
    /// The directory of the host that is the workspace. It is the last layer.
    Workspace,
    /// The same at this path below the compared directory, in both views.
    WorkspaceAt(PathBuf),
}

impl LayerSource {
    /// Whether the files are a copy of private files.
    pub(crate) fn is_copy(&self) -> bool {
        matches!(self, Self::Layer(layer) if layer.kind == LayerKind::Directory)
    }
}

/// Which differences are wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Selection {
    /// Paths below the compared directory, with everything below them. Empty for all.
    pub paths: Vec<PathBuf>,
}

/// How a file differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    /// Only the new view has it.
    Added,
    /// Type, mode, content or link target differ.
    Changed,
    /// Only the old view has it.
    Deleted,
}

/// Type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangedType {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// A FIFO, a socket or a device.
    Other,
}

impl ChangedType {
    fn of(kind: FileType) -> Self {
        match kind {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Directory,
            FileType::Symlink => Self::Link,
            _ => Self::Other,
        }
    }
}

/// A difference between the views.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Path below the compared directory. Bytes that are not UTF-8 are replaced.
    pub path: String,
    /// How it differs.
    pub kind: ChangeKind,
    /// Type in the new view; in the old one if it was deleted.
    pub file_type: ChangedType,
    /// Bytes of content of a file.
    pub size: u64,
}

/// A part of the differences, in the order of their paths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangePage {
    /// The differences.
    pub changes: Vec<Change>,
    /// Where the next page begins, unless this is the last one.
    pub next: Option<String>,
}

/// What an apply may do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplyOptions {
    /// Replace files that changed on the host.
    pub force: bool,
    /// Change nothing.
    pub dry_run: bool,
    /// Name of temporary files, unique to the box. An interrupted apply can leave one behind.
    pub temporary: String,
    /// Times of earlier applies, in nanoseconds since 1970: first and last moment.
    ///
    /// A file with a change time within one of them has no other change of the host.
    pub own_writes: Vec<(i64, i64)>,
}

/// The outcome of an apply.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// Number of files, directories and links that are new on the host.
    pub added: u64,
    /// Number of those that are different now.
    pub changed: u64,
    /// Number of those that were removed, without those below a removed directory.
    pub deleted: u64,
    /// Files that changed on the host after the box did. Nothing was written because of them.
    pub conflicts: Named,
    /// Differences that are never applied, with the reason.
    pub skipped: Named,
    /// The file at which the apply ended early, with the error number.
    pub failed: Option<(String, i32)>,
}

/// A count with the first paths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// How many.
    pub count: u64,
    /// The first of them, each with a reason, which can be empty.
    pub first: Vec<(String, String)>,
}

impl Named {
    fn add(&mut self, path: &[u8], why: &str) {
        self.count += 1;
        if self.first.len() < NAMED_MAX {
            self.first.push((shown(path), why.to_owned()));
        }
    }
}

impl Comparison {
    /// Checks the comparison before anything is opened.
    pub(crate) fn validate(&self) -> Result<()> {
        let inner = self.hidden.iter().chain(&self.made);
        for path in inner.chain([&self.directory]) {
            check_relative(path)?;
        }
        if let Some(at) = self.workspace_at() {
            check_relative(at)?;
        }
        let workspaces = |layer: &&ComparedLayer| {
            matches!(
                layer.source,
                LayerSource::Workspace | LayerSource::WorkspaceAt(_)
            )
        };
        if self.layers.iter().filter(workspaces).count() > 1
            || self.layers.len() > 2 * (crate::plan::LAYERS_MAX + 2)
        {
            return Err(Error::Invalid("layers: too many".into()));
        }
        Ok(())
    }

    /// Path of the workspace below the compared directory, if it is not that directory.
    pub(crate) fn workspace_at(&self) -> Option<&Path> {
        self.layers.iter().find_map(|layer| match &layer.source {
            LayerSource::WorkspaceAt(path) => Some(path.as_path()),
            _ => None,
        })
    }
}

impl Selection {
    pub(crate) fn validate(&self) -> Result<()> {
        self.paths.iter().try_for_each(|path| check_relative(path))
    }

    /// How a path relates to the selection.
    fn relation(&self, path: &[u8]) -> Relation {
        if self.paths.is_empty() {
            return Relation::Inside;
        }
        let path = as_path(path);
        if self.paths.iter().any(|wanted| path.starts_with(wanted)) {
            Relation::Inside
        } else if self.paths.iter().any(|wanted| wanted.starts_with(path)) {
            Relation::Above
        } else {
            Relation::Outside
        }
    }
}

/// How a path relates to a selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    /// Selected.
    Inside,
    /// A directory that contains selected paths.
    Above,
    /// Neither.
    Outside,
}

fn check_relative(path: &Path) -> Result<()> {
    let plain = |component| matches!(component, Component::Normal(_));
    if path.components().all(plain) {
        return Ok(());
    }
    Err(Error::Invalid(
        "path: must be relative and without `..`".into(),
    ))
}

fn as_path(bytes: &[u8]) -> &Path {
    use std::os::unix::ffi::OsStrExt as _;
    Path::new(std::ffi::OsStr::from_bytes(bytes))
}

fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// The directories of a path, and its last name.
fn split(path: &[u8]) -> Result<(&[u8], CString)> {
    let at = path.iter().rposition(|byte| *byte == b'/');
    let (parent, name) = match at {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&path[..0], path),
    };
    let name = CString::new(name).map_err(|_| Error::Invalid("path: contains a zero".into()))?;
    Ok((parent, name))
}

/// Opens a directory below another one. Follows no link and crosses no mount.
fn open_dir(at: impl AsFd, path: &[u8]) -> io::Result<OwnedFd> {
    use rustix::fs::OFlags;
    let path = if path.is_empty() { b"." } else { path };
    crate::snapshot::open_below(at, path, OFlags::RDONLY | OFlags::DIRECTORY)
}
