//! The overlays of a box: separate inodes of the host's system directories.
//!
//! The kernel attaches watches and locks to inodes. With the host's inodes, a box could watch which
//! programs the host and other boxes start, and could block them with locks. An overlay has
//! separate inodes, with the content of the lower directory from the same page cache. Every box
//! therefore gets its own overlays.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD};

use super::template_mounts::Template;
use crate::error::{At, Result};
use crate::mounts::{Attr, clone_tree, new_fs};
use crate::raw::{self, ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID, ATTR_RDONLY};

/// Mount attributes of the system directories.
pub(super) const SYSTEM_ATTR: Attr = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV;
const TEMPLATE_ATTR: Attr = SYSTEM_ATTR | ATTR_NOEXEC;

/// A system directory of the host, or a mount below one.
#[derive(Debug)]
pub(crate) struct SystemTree {
    /// Path below the root, and below `/t`.
    pub(crate) name: String,
    /// Whether boxes get overlays of it. Otherwise they get the host's inodes.
    pub(crate) overlaid: bool,
}

/// The detached mounts of one box.
#[derive(Debug)]
pub(crate) struct Overlays {
    /// The template's own files.
    pub(crate) template_files: OwnedFd,
    /// The system directories, in the order of `Template::trees`.
    pub(crate) system: Vec<OwnedFd>,
}

impl Overlays {
    pub(crate) fn new(template: &Template) -> Result<Self> {
        let template_files = if template.use_overlays {
            overlay("/p", TEMPLATE_ATTR).at("create an overlay of the template files")?
        } else {
            let tree = clone_tree(CWD, "/p", false).at("clone the template files")?;
            raw::mount_setattr(tree.as_fd(), false, TEMPLATE_ATTR, 0)
                .at("make the template files read-only")?;
            tree
        };
        let system = template.trees.iter().map(|tree| {
            let place = format!("/t/{}", tree.name);
            if tree.overlaid {
                overlay(&place, SYSTEM_ATTR).at("create an overlay of a system directory")
            } else {
                clone_tree(CWD, place, true).at("clone a system directory's mount")
            }
        });
        Ok(Self {
            template_files,
            system: system.collect::<Result<_>>()?,
        })
    }
}

impl Overlays {
    /// Fills the caches of the overlays with the paths that most programs use first.
    ///
    /// Only directories of the host: an upgrade replaces files, and a box must not combine an old
    /// file with a new one.
    pub(crate) fn warm(&self, template: &Template) {
        let lookup = |at: &OwnedFd, path: &str| {
            let _ = rustix::fs::statat(at, path, AtFlags::empty());
        };
        for file in [
            "etc/ld.so.cache",
            "etc/ld.so.preload",
            "etc/profile",
            "dev/null",
        ] {
            lookup(&self.template_files, file);
        }
        let libraries = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
        for (tree, view) in template.trees.iter().zip(&self.system) {
            if tree.name == "usr" {
                for directory in ["bin", "lib64", &libraries] {
                    lookup(view, directory);
                }
            }
        }
    }
}

/// Creates a read-only overlay of one directory. The kernel requires two layers.
fn overlay(place: &str, attr: Attr) -> io::Result<OwnedFd> {
    let layers = format!("{place}:/n");
    new_fs("overlay", &[("lowerdir", &layers)], attr)
}

/// Whether an overlay of a tree below `/t` can be created.
pub(super) fn can_overlay(name: &str) -> bool {
    // The list of layers would require escapes for a colon or a backslash.
    !name.contains([':', '\\']) && overlay(&format!("/t/{name}"), SYSTEM_ATTR).is_ok()
}

/// Whether a tree below `/t` can be cloned and read.
pub(super) fn can_copy(name: &str) -> bool {
    let tree = clone_tree(CWD, format!("/t/{name}"), true);
    tree.is_ok_and(|tree| rustix::fs::fstat(tree).is_ok())
}

/// Whether this user can create overlays of the host's system directories.
///
/// A child process that exits afterwards calls it.
pub(crate) fn can_overlay_system() -> bool {
    // A container may have mounts below `/etc`, and an ordinary user cannot use such a layer.
    ["/usr/bin:/usr/lib", "/usr:/etc"]
        .iter()
        .any(|layers| new_fs("overlay", &[("lowerdir", layers)], SYSTEM_ATTR).is_ok())
}

/// Mounts below a directory of the host, parents first.
///
/// An overlay does not contain them.
pub(super) fn mounts_below(directory: &Path) -> io::Result<Vec<String>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let places = table.lines().filter_map(|line| line.split(' ').nth(4));
    let mut below: Vec<String> = places
        .map(unescape)
        .filter(|place| {
            let place = Path::new(place);
            place != directory && place.starts_with(directory)
        })
        .map(|place| place.trim_start_matches('/').to_owned())
        .collect();
    below.sort_unstable();
    below.dedup();
    Ok(below)
}

/// Decodes the octal escapes of a path in the kernel's mount table.
fn unescape(path: &str) -> String {
    let escapes = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    escapes
        .into_iter()
        .fold(path.to_owned(), |path, (from, to)| path.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_below_the_directory_are_listed() {
        assert_eq!(unescape(r"/usr/a\040b\134c"), r"/usr/a b\c");
        let below = mounts_below(Path::new("/")).unwrap();
        assert!(below.contains(&"proc".to_owned()), "{below:?}");
        assert!(!below.contains(&String::new()), "{below:?}");
        let beside = mounts_below(Path::new("/pro")).unwrap();
        assert!(beside.is_empty(), "{beside:?}");
    }
}
