//! Layers: directories below the private files of a box, which the server keeps ready.
//!
//! A layer is the root directory of an image or of a snapshot. The server keeps one detached,
//! read-only mount of each layer in use. Where the server is root, the mount maps the ids of the
//! files to those of a box, so that root of an image is root of the box. A box makes its overlay
//! from the descriptors of these mounts, so that no box resolves a path.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::pools::Pools;
use crate::error::{At, Error, Result};
use crate::mounts::{clone_tree, new_fs, overlay_of};
use crate::plan::{Root, SandboxPlan};
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};

/// Most layers that the server keeps. Each takes one descriptor.
const KEPT_MAX: usize = 128;

/// The layers in use, the last used last.
#[derive(Debug, Default)]
pub(super) struct KeptLayers {
    kept: Vec<(PathBuf, Layer)>,
    /// Whether the kernel takes detached mounts as layers of an overlay (6.15).
    by_descriptor: Option<bool>,
}

/// The root directory of an image or of a snapshot.
#[derive(Debug)]
struct Layer {
    /// A detached, read-only mount.
    tree: OwnedFd,
    /// Whether the owners of its files are ids of the box.
    mapped: bool,
}

/// The layers of one box.
#[derive(Debug)]
pub(crate) struct Layers {
    /// Detached, read-only mounts, the topmost first.
    pub(crate) trees: Vec<OwnedFd>,
    /// Whether an overlay takes the mounts by their descriptors. Otherwise a box attaches them.
    pub(crate) by_descriptor: bool,
    /// Whether the owners of an image's files are ids of the box.
    pub(crate) has_owners: bool,
}

impl Default for Layers {
    /// No layers.
    fn default() -> Self {
        Self {
            trees: Vec::new(),
            by_descriptor: true,
            has_owners: true,
        }
    }
}

/// The paths of a box's layers, the topmost first.
fn paths(plan: &SandboxPlan) -> impl Iterator<Item = &Path> {
    let image = match &plan.root {
        Root::Host => None,
        Root::Image(path) => Some(path),
    };
    plan.layers.iter().chain(image).map(PathBuf::as_path)
}

/// Whether a box uses this layer.
pub(super) fn has(plan: &SandboxPlan, layer: &Path) -> bool {
    paths(plan).any(|path| path == layer)
}

impl KeptLayers {
    /// The layers of a plan whose directories have been removed since the server opened them.
    pub(super) fn stale<'a>(&self, plan: &'a SandboxPlan) -> Vec<&'a Path> {
        let is_stale = |path: &&Path| {
            let known = self.kept.iter().find(|(kept, _)| kept == path);
            known.is_some_and(|(_, layer)| !exists(&layer.tree))
        };
        paths(plan).filter(is_stale).collect()
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
        let mut layers = Layers::default();
        for (at, path) in paths(plan).enumerate() {
            let (tree, mapped) = self.open_one(path, privileged, pools)?;
            layers.trees.push(tree);
            let is_image = at == plan.layers.len();
            // The guest could not use its own files of a snapshot.
            if privileged && !mapped && !is_image {
                return Err(Error::Unavailable(
                    "mapped owners on the file system of a snapshot".into(),
                ));
            }
            layers.has_owners &= mapped || !is_image;
        }
        layers.by_descriptor = self.by_descriptor.unwrap_or(true);
        Ok(layers)
    }

    /// Opens a layer. Returns its mount, and whether the owners of its files are ids of the box.
    fn open_one(
        &mut self,
        path: &Path,
        privileged: bool,
        pools: &mut Pools,
    ) -> Result<(OwnedFd, bool)> {
        let known = self.kept.iter().position(|(kept, _)| kept == path);
        let known = known.map(|at| self.kept.remove(at));
        let known = known.filter(|(_, layer)| exists(&layer.tree));
        let layer = match known {
            Some((_, layer)) => layer,
            None => new(path, privileged, pools)?,
        };
        let tree = layer.tree.as_fd();
        let mapped = layer.mapped;
        if !*self.by_descriptor.get_or_insert_with(|| can_overlay(tree)) {
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

/// Whether the directory of a mount has not been removed.
fn exists(tree: &OwnedFd) -> bool {
    rustix::fs::fstat(tree).is_ok_and(|stat| stat.st_nlink > 0)
}

/// Clones the mount of a layer's directory, read-only and with mapped owners.
fn new(path: &Path, privileged: bool, pools: &mut Pools) -> Result<Layer> {
    let place = super::launch::open_source(path).at("open a layer of the root")?;
    // An ordinary user can only clone a tree with its submounts, because they are locked.
    let recursive = !privileged;
    let tree = clone_tree(&place, "", recursive).at("clone the mount of a layer")?;
    let mapped = privileged && map(&tree, pools).at("map the owners of a layer")?;
    let attr = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV;
    raw::mount_setattr(tree.as_fd(), recursive, attr, 0).at("restrict a layer")?;
    Ok(Layer { tree, mapped })
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
