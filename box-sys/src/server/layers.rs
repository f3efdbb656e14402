//! Layers: files below the private files of a box, which the server keeps ready.
//!
//! A layer is the root directory of an image, a directory with copied private files of an earlier
//! box, or the disk of an earlier box. The server keeps one detached, read-only mount of each layer
//! in use. Where the server is root, the mount of an image or of copied files maps the ids of the
//! files to those of a box, so that root of an image is root of the box. The files of a disk have
//! these ids already. A box makes its overlay from the descriptors of these mounts, so that no box
//! resolves a path.
//!
//! The mount of a disk can occupy a loop device and the space of a removed file. The server drops it
//! with the last box on it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::OFlags;

use super::launch::open_source;
use super::pools::Pools;
use crate::child::UPPER;
use crate::disk_file::{self, Use};
use crate::error::{At, Error, Result};
use crate::mounts::{clone_tree, new_fs, open_beneath, overlay_of};
use crate::plan::{Layer as PlannedLayer, LayerKind, Root, SandboxPlan};
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};
use crate::record;

/// Most layers that the server keeps. Each takes one descriptor.
const KEPT_MAX: usize = 128;

/// How long the server waits for the end of a box that writes to a disk.
///
/// The server serves no other request meanwhile.
pub(super) const DISK_WAIT: Duration = Duration::from_secs(2);

/// The layers in use, the last used last.
#[derive(Debug, Default)]
pub(super) struct KeptLayers {
    kept: Vec<(PathBuf, Layer)>,
    /// Whether the kernel takes detached mounts as layers of an overlay (6.15).
    by_descriptor: Option<bool>,
}

/// A mounted layer.
#[derive(Debug)]
struct Layer {
    /// A detached, read-only mount.
    tree: OwnedFd,
    /// Its form. `None` is an image.
    kind: Option<LayerKind>,
    /// Whether the owners of its files are ids of the box.
    mapped: bool,
    /// What its path named.
    source: Identity,
}

/// Device and number of a directory or a file, which no other has while a mount uses it.
pub(super) type Identity = (u64, u64);

/// The layers of one box.
#[derive(Debug)]
pub(crate) struct Layers {
    /// Detached, read-only mounts, the topmost first.
    pub(crate) trees: Vec<OwnedFd>,
    /// Whether an overlay takes the mounts by their descriptors. Otherwise a box attaches them.
    pub(crate) by_descriptor: bool,
    /// Whether the owners of an image's files are ids of the box.
    pub(crate) has_owners: bool,
    /// What the paths of the layers named, as [`sources`].
    pub(super) sources: Vec<Option<Identity>>,
}

impl Default for Layers {
    /// No layers.
    fn default() -> Self {
        Self {
            trees: Vec::new(),
            by_descriptor: true,
            has_owners: true,
            sources: Vec::new(),
        }
    }
}

/// The layers of a box, the topmost first, and the form of each. `None` is an image.
fn all(plan: &SandboxPlan) -> impl Iterator<Item = (&Path, Option<LayerKind>)> {
    let image = match &plan.root {
        Root::Host => None,
        Root::Image(path) => Some((path.as_path(), None)),
    };
    listed(&plan.layers).chain(image)
}

fn listed(layers: &[PlannedLayer]) -> impl Iterator<Item = (&Path, Option<LayerKind>)> {
    layers
        .iter()
        .map(|layer| (layer.path.as_path(), Some(layer.kind)))
}

/// The layers that are disks, which the server drops with the last box on them.
pub(super) fn disks(layers: &[PlannedLayer]) -> Vec<PathBuf> {
    let disks = layers.iter().filter(|layer| layer.kind == LayerKind::Disk);
    disks.map(|layer| layer.path.clone()).collect()
}

/// What the paths of a plan's layers name now. `None` is a missing layer.
///
/// The caller is in the host's mount namespace.
pub(super) fn sources(plan: &SandboxPlan) -> Vec<Option<Identity>> {
    all(plan).map(|(path, _)| identity(path)).collect()
}

/// Whether a box uses this layer.
pub(super) fn has(plan: &SandboxPlan, layer: &Path) -> bool {
    all(plan).any(|(path, _)| path == layer)
}

impl KeptLayers {
    /// Drops the mount of a layer.
    pub(super) fn forget(&mut self, path: &Path) {
        self.kept.retain(|(kept, _)| kept != path);
    }

    /// The layers of one box.
    ///
    /// The caller is in the host's mount namespace.
    pub(super) fn open(
        &mut self,
        plan: &SandboxPlan,
        privileged: bool,
        pools: &mut Pools,
    ) -> Result<Layers> {
        self.open_all(all(plan), privileged, pools)
    }

    /// Layers without an image, as [`Self::open`].
    pub(super) fn open_listed(
        &mut self,
        layers: &[PlannedLayer],
        privileged: bool,
        pools: &mut Pools,
    ) -> Result<Vec<OwnedFd>> {
        Ok(self.open_all(listed(layers), privileged, pools)?.trees)
    }

    fn open_all<'a>(
        &mut self,
        all: impl Iterator<Item = (&'a Path, Option<LayerKind>)>,
        privileged: bool,
        pools: &mut Pools,
    ) -> Result<Layers> {
        let mut layers = Layers::default();
        for (path, kind) in all {
            layers.sources.push(identity(path));
            let (tree, mapped) = self.open_one(path, kind, privileged, pools)?;
            layers.trees.push(tree);
            // The guest could not use its own files of a snapshot.
            if privileged && !mapped && kind.is_some() {
                return Err(Error::Unavailable(
                    "mapped owners on the file system of a snapshot".into(),
                ));
            }
            layers.has_owners &= mapped || kind.is_some();
        }
        layers.by_descriptor = self.by_descriptor.unwrap_or(true);
        Ok(layers)
    }

    /// Whether an overlay takes detached mounts as this one by their descriptors.
    pub(super) fn takes_descriptors(&mut self, tree: BorrowedFd<'_>) -> bool {
        *self.by_descriptor.get_or_insert_with(|| can_overlay(tree))
    }

    /// Opens a layer. Returns its mount, and whether the owners of its files are ids of the box.
    pub(super) fn open_one(
        &mut self,
        path: &Path,
        kind: Option<LayerKind>,
        privileged: bool,
        pools: &mut Pools,
    ) -> Result<(OwnedFd, bool)> {
        let known = self.kept.iter().position(|(kept, _)| kept == path);
        let known = known.map(|at| self.kept.remove(at));
        let known = known.filter(|(path, layer)| layer.kind == kind && layer.is_current(path));
        let layer = match known {
            Some((_, layer)) => layer,
            None => Layer::new(path, kind, privileged, pools)?,
        };
        let tree = layer.tree.as_fd();
        let mapped = layer.mapped;
        let by_descriptor = *self.by_descriptor.get_or_insert_with(|| can_overlay(tree));
        if !by_descriptor {
            // A box uses up the mount.
            return Ok((layer.tree, mapped));
        }
        let copy = raw::duplicate(tree).at("duplicate")?;
        if self.kept.len() == KEPT_MAX {
            self.kept.remove(0);
        }
        self.kept.push((path.to_owned(), layer));
        Ok((copy, mapped))
    }
}

/// Whether an overlay can be made of a detached mount. A read-only one needs two layers.
fn can_overlay(tree: BorrowedFd<'_>) -> bool {
    let empty = new_fs("tmpfs", &[], ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
    empty.is_ok_and(|empty| overlay_of(&[tree, empty.as_fd()], &[], ATTR_RDONLY).is_ok())
}

impl Layer {
    fn new(
        path: &Path,
        kind: Option<LayerKind>,
        privileged: bool,
        pools: &mut Pools,
    ) -> Result<Self> {
        let place = open_source(path).at("open a layer of the root")?;
        let source = record::identity(&place).at("read the metadata of a layer")?;
        let is_disk = kind == Some(LayerKind::Disk);
        if is_disk && is_file(&place) {
            if !privileged {
                return Err(Error::Unavailable("disks of root's boxes".into()));
            }
            return Self::in_file(path, source);
        }
        let place = if is_disk { open_upper(&place)? } else { place };
        // An ordinary user can only clone a tree with its submounts, because they are locked.
        let recursive = !privileged;
        let tree = clone_tree(&place, "", recursive).at("clone the mount of a layer")?;
        // The files of a disk have the ids of boxes.
        let mapped =
            is_disk || (privileged && map(&tree, pools).at("map the owners of a layer")?);
        let attr = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV;
        raw::mount_setattr(tree.as_fd(), recursive, attr, 0).at("restrict a layer")?;
        Ok(Self {
            tree,
            kind,
            mapped,
            source,
        })
    }

    /// Mounts the file system in a file.
    fn in_file(path: &Path, source: Identity) -> Result<Self> {
        let mount = disk_file::mount(path, Use::Layer, DISK_WAIT)?;
        let tree = disk_file::subtree(&mount, path, || open_upper(&mount))?;
        Ok(Self {
            tree,
            kind: Some(LayerKind::Disk),
            mapped: true,
            source,
        })
    }

    /// Whether the path still names what is mounted.
    ///
    /// A removal first gives an image another path, where it may stay for minutes, while the same image
    /// arrives at the old path again. The caller is in the host's mount namespace.
    fn is_current(&self, path: &Path) -> bool {
        identity(path) == Some(self.source)
    }
}

/// Opens the directory of the private files in their storage.
fn open_upper(storage: &OwnedFd) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    open_beneath(storage, UPPER, flags).at("open the files of a layer")
}

fn is_file(place: &OwnedFd) -> bool {
    let stat = rustix::fs::fstat(place);
    stat.is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file())
}

/// What a path names.
fn identity(path: &Path) -> Option<Identity> {
    let stat = rustix::fs::lstat(path).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Maps the owners of a layer to the ids of boxes.
///
/// Returns `false` if the file system cannot do that, as an overlay cannot.
fn map(tree: &OwnedFd, pools: &mut Pools) -> io::Result<bool> {
    match raw::mount_idmap(tree.as_fd(), pools.layer_map()?.as_fd()) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        mapped => mapped.map(|()| true),
    }
}
