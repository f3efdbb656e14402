//! Images: root directories that the server keeps ready for boxes.
//!
//! The server keeps one detached, read-only mount of each image in use. Where the server is root,
//! the mount maps the ids of the image to those of a box, so that root of the image is root of the
//! box. A box makes its overlay from the descriptor of that mount, so that no box resolves the path.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::pools::Pools;
use crate::error::{At, Result};
use crate::mounts::{clone_tree, new_fs, overlay_of};
use crate::raw::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};

/// Most images that the server keeps. Each takes one descriptor.
const IMAGES_MAX: usize = 16;

/// The images in use, the last used last.
#[derive(Debug, Default)]
pub(super) struct Images {
    kept: Vec<(PathBuf, Image)>,
    /// Whether the kernel takes detached mounts as layers of an overlay (6.15).
    by_descriptor: Option<bool>,
}

/// The root directory of an image.
#[derive(Debug)]
pub(crate) struct Image {
    /// A detached, read-only mount.
    pub(crate) tree: OwnedFd,
    /// Whether the owners of its files are ids of the box.
    pub(crate) mapped: bool,
    /// Whether an overlay takes the mount by its descriptor. Otherwise a box attaches the mount.
    pub(crate) by_descriptor: bool,
}

impl Images {
    /// Whether the directory of an image has been removed since the server opened it.
    pub(super) fn is_stale(&self, path: &Path) -> bool {
        let known = self.kept.iter().find(|(kept, _)| kept == path);
        known.is_some_and(|(_, image)| !exists(&image.tree))
    }

    /// The root directory of an image for one box.
    ///
    /// The caller is in the host's mount namespace.
    pub(super) fn open(
        &mut self,
        path: &Path,
        privileged: bool,
        pools: &mut Pools,
    ) -> Result<Image> {
        let known = self.kept.iter().position(|(kept, _)| kept == path);
        let known = known.map(|at| self.kept.remove(at));
        let known = known.filter(|(_, image)| exists(&image.tree));
        let image = match known {
            Some((_, image)) => image,
            None => new(path, privileged, pools)?,
        };
        let tree = image.tree.as_fd();
        let by_descriptor = *self.by_descriptor.get_or_insert_with(|| can_overlay(tree));
        if !by_descriptor {
            // A box uses up the mount.
            return Ok(image);
        }
        let copy = Image {
            tree: raw::duplicate(tree).at("duplicate")?,
            mapped: image.mapped,
            by_descriptor,
        };
        if self.kept.len() == IMAGES_MAX {
            self.kept.remove(0);
        }
        self.kept.push((path.to_owned(), image));
        Ok(copy)
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

/// Clones the mount of an image's directory, read-only and with mapped owners.
fn new(path: &Path, privileged: bool, pools: &mut Pools) -> Result<Image> {
    let place = super::launch::open_source(path).at("open the root directory")?;
    // An ordinary user can only clone a tree with its submounts, because they are locked.
    let recursive = !privileged;
    let tree = clone_tree(&place, "", recursive).at("clone the root directory's mount")?;
    let mapped = privileged && map(&tree, pools).at("map the owners of an image")?;
    let attr = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV;
    raw::mount_setattr(tree.as_fd(), recursive, attr, 0).at("restrict the root directory")?;
    Ok(Image {
        tree,
        mapped,
        by_descriptor: false,
    })
}

/// Maps the owners of an image to the ids of boxes.
///
/// Returns `false` if the file system cannot do that, as an overlay cannot.
fn map(tree: &OwnedFd, pools: &mut Pools) -> io::Result<bool> {
    match raw::mount_idmap(tree.as_fd(), pools.image_map()?.as_fd()) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        mapped => mapped.map(|()| true),
    }
}
