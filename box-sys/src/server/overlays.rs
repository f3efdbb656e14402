//! A box's own view of what all boxes are made of: the machine's system directories and the server's pieces.
//!
//! The kernel keeps watches and locks with an inode. A box that had the machine's inodes would see by inotify which programs
//! the machine and other boxes start, and its locks would hold them up. An overlay has inodes of its own and the contents of
//! what is below it, from the same page cache; so every box gets its own overlays, never mounts of one that another has.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD};

use super::template_mounts::Template;
use crate::error::{At, Result};
use crate::mounts::{Attr, clone_tree, new_fs};
use crate::raw::{self, ATTR_NODEV, ATTR_NOEXEC, ATTR_NOSUID, ATTR_RDONLY};

/// What may be done with the system directories.
pub(super) const SYSTEM_ATTR: Attr = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV;
const PIECES_ATTR: Attr = SYSTEM_ATTR | ATTR_NOEXEC;

/// A system directory of the machine, or a part of one that is a mount of its own.
#[derive(Debug)]
pub(crate) struct SystemTree {
    /// Its path below the root, and below `/t`.
    pub(crate) name: String,
    /// Whether boxes get overlays of it. Otherwise they get the machine's own inodes.
    pub(crate) overlaid: bool,
}

/// The mounts of one box, not attached anywhere.
#[derive(Debug)]
pub(crate) struct Overlays {
    /// The server's pieces.
    pub(crate) pieces: OwnedFd,
    /// The system directories, in the order of `World::trees`.
    pub(crate) system: Vec<OwnedFd>,
}

impl Overlays {
    pub(crate) fn new(template: &Template) -> Result<Self> {
        let pieces = if template.use_overlays {
            overlay("/p", PIECES_ATTR).at("make an overlay of the pieces")?
        } else {
            let tree = clone_tree(CWD, "/p", false).at("copy the pieces")?;
            raw::mount_setattr(tree.as_fd(), false, PIECES_ATTR, 0)
                .at("make the pieces read-only")?;
            tree
        };
        let system = template.trees.iter().map(|tree| {
            let place = format!("/t/{}", tree.name);
            if tree.overlaid {
                overlay(&place, SYSTEM_ATTR).at("make an overlay of a system directory")
            } else {
                clone_tree(CWD, place, true).at("copy a system directory's mount")
            }
        });
        Ok(Self {
            pieces,
            system: system.collect::<Result<_>>()?,
        })
    }
}

impl Overlays {
    /// Looks up what most programs begin with, so that the first one of a box finds it known. Of the machine only directories:
    /// an upgrade replaces files, and a box must not find the old one of a pair that belongs together.
    pub(crate) fn warm(&self, template: &Template) {
        let look = |at: &OwnedFd, path: &str| {
            let _ = rustix::fs::statat(at, path, AtFlags::empty());
        };
        for file in [
            "etc/ld.so.cache",
            "etc/ld.so.preload",
            "etc/profile",
            "dev/null",
        ] {
            look(&self.pieces, file);
        }
        let libraries = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
        for (tree, view) in template.trees.iter().zip(&self.system) {
            if tree.name == "usr" {
                for directory in ["bin", "lib64", &libraries] {
                    look(view, directory);
                }
            }
        }
    }
}

/// A read-only overlay of one directory. The kernel wants two layers at least.
fn overlay(place: &str, attr: Attr) -> io::Result<OwnedFd> {
    let layers = format!("{place}:/n");
    new_fs("overlay", &[("lowerdir", &layers)], attr)
}

/// Whether an overlay can be made of a tree that is at its place below `/t`.
pub(super) fn can_overlay(name: &str) -> bool {
    // A colon or a backslash would have to be written otherwise in the list of layers.
    !name.contains([':', '\\']) && overlay(&format!("/t/{name}"), SYSTEM_ATTR).is_ok()
}

/// Whether the mount of a tree that is at its place below `/t` can be copied and looked at.
pub(super) fn can_copy(name: &str) -> bool {
    let tree = clone_tree(CWD, format!("/t/{name}"), true);
    tree.is_ok_and(|tree| rustix::fs::fstat(tree).is_ok())
}

/// Whether this user can make overlays of the machine's system directories, for a process that is to be thrown away.
pub(crate) fn can_overlay_system() -> bool {
    // A container may have mounts below `/etc`, which an ordinary user can make no layer of.
    ["/usr/bin:/usr/lib", "/usr:/etc"]
        .iter()
        .any(|layers| new_fs("overlay", &[("lowerdir", layers)], SYSTEM_ATTR).is_ok())
}

/// What is mounted below a directory of the machine, the outer ones first. An overlay does not show these.
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

/// A path as the kernel's tables of mounts have it: blanks and backslashes are octal numbers.
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
    fn mounts_are_found_below_a_directory_and_not_beside_it() {
        assert_eq!(unescape(r"/usr/a\040b\134c"), r"/usr/a b\c");
        let below = mounts_below(Path::new("/")).unwrap();
        assert!(below.contains(&"proc".to_owned()), "{below:?}");
        assert!(!below.contains(&String::new()), "{below:?}");
        let beside = mounts_below(Path::new("/pro")).unwrap();
        assert!(beside.is_empty(), "{beside:?}");
    }
}
