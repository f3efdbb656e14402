//! Builds overlays: a root directory from an image and snapshots, and a workspace.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::Resources;
use super::root::{UPPER, create_dir, within};
use crate::error::{At, Error, Result};
use crate::identity::{self, passwd_line};
use crate::mounts::{
    attach, chown, clone_tree, create_dirs, create_file, is_no_directory, new_fs, open_beneath,
    overlay_of,
};
use crate::plan::{Guest, Mount, Root, Scratch};
use crate::probe::WORKSPACE;
use crate::raw::{ATTR_NODEV, ATTR_NOSUID};
use crate::snapshot::{VersionTimes, open_below};
use crate::walk;

/// Creates an overlay of the private files above the layers.
///
/// Writes go to the private files, never to a layer.
///
/// `is_used`: an earlier box has used the private files.
pub(super) fn root(resources: &Resources<'_>, scratch: &OwnedFd, is_used: bool) -> Result<OwnedFd> {
    if is_used {
        // The kernel does not take a directory of an overlay with `volatile` again.
        walk::remove_all(Path::new("/s/work")).at("remove the directory of an earlier overlay")?;
    }
    create_dir(scratch, "work")?;
    let layers = &resources.layers;
    if let Root::Image(_) = resources.shape.root {
        // Root of the box, if it has more than one id.
        let owner = resources.server.ids.guest(0);
        chown(scratch, UPPER, (owner, owner)).at("give the root to the box")?;
        add_guest(&resources.shape.guest, scratch, &layers.trees, owner)
            .at("add the guest to the root's users")?;
    }
    let trees: Vec<_> = layers.trees.iter().map(AsFd::as_fd).collect();
    mount(resources, &trees, "/s/upper", "/s/work").at("create the overlay")
}

/// Creates an overlay of the changes of a workspace above a directory of the host.
///
/// Snapshots of earlier boxes with the same mount point are between the two.
pub(super) fn workspace(
    resources: &Resources<'_>,
    scratch: &OwnedFd,
    source: &OwnedFd,
    upper: &OwnedFd,
    target: &Mount,
) -> Result<OwnedFd> {
    const WORK: &str = "workspace-work";
    let path = within(&target.target);
    create_dir(scratch, WORK)?;
    // Marks of an earlier mount of the same private files, which the kernel would refuse.
    for mark in ["incompat/volatile", "incompat"] {
        let mark = format!("{WORK}/work/{mark}");
        let _ = rustix::fs::unlinkat(scratch, mark, AtFlags::REMOVEDIR);
    }
    let mut trees = Vec::new();
    for layer in resources
        .layers
        .trees
        .iter()
        .take(resources.shape.layers.len())
    {
        let found = open_beneath(layer, path, OFlags::PATH | OFlags::DIRECTORY);
        match found {
            Ok(found) if resources.layers.by_descriptor => trees.push(found),
            Ok(found) => {
                let tree = clone_tree(&found, "", false).at("clone the mount of a layer")?;
                trees.push(tree);
            }
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => {}
            // An earlier guest had something else there, or had removed it.
            Err(_) => break,
        }
    }
    // Before the guest changes anything.
    let marked = open_below(upper, ".", OFlags::RDONLY | OFlags::DIRECTORY);
    let marked = marked
        .and_then(|upper| VersionTimes::new(resources.server.template.privileged).begin(&upper));
    marked.at("mark the changes of the workspace")?;
    // By the working directory, because the kernel limits and parses paths.
    rustix::process::fchdir(upper).at("enter the changes of the workspace")?;
    let trees: Vec<_> = trees.iter().chain([source]).map(AsFd::as_fd).collect();
    let made = mount(resources, &trees, ".", "/s/workspace-work");
    made.map_err(|_| Error::Unavailable(WORKSPACE.into()))
}

/// Creates an overlay with the topmost layer first.
fn mount(
    resources: &Resources<'_>,
    trees: &[BorrowedFd<'_>],
    upper: &str,
    work: &str,
) -> io::Result<OwnedFd> {
    let mut options = vec![
        ("upperdir", upper),
        ("workdir", work),
        // The private files must be complete without the layers and other marks, so that a copy of
        // them is a layer. Some kernels have other defaults.
        ("redirect_dir", "nofollow"),
        ("metacopy", "off"),
        ("index", "off"),
    ];
    if !resources.server.template.privileged {
        // The overlay's own attributes need a namespace that ordinary users can write.
        options.push(("userxattr", ""));
    }
    if !matches!(resources.shape.scratch, Scratch::Memory(_)) {
        // The end of the box would otherwise sync the file system of its disk.
        options.push(("volatile", ""));
    }
    let attr = ATTR_NOSUID | ATTR_NODEV;
    if resources.layers.by_descriptor {
        return overlay_of(trees, &options, attr);
    }
    let mut places = Vec::with_capacity(trees.len());
    for (n, tree) in trees.iter().enumerate() {
        let place = format!("/l/{n}");
        let onto = rustix::fs::open(&*place, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        attach(tree, onto)?;
        places.push(place);
    }
    let places = places.join(":");
    options.push(("lowerdir", &places));
    new_fs("overlay", &options, attr)
}

/// Adds the guest to copies of the layers' `/etc/passwd` and `/etc/group`.
///
/// Layers that know the id of the guest keep their files. The copies go directly to the private
/// files. Through the overlay, the kernel could not copy up a file with an unmapped owner (EACCES).
fn add_guest(guest: &Guest, scratch: &OwnedFd, layers: &[OwnedFd], owner: u32) -> io::Result<()> {
    let upper = open_beneath(scratch, UPPER, OFlags::PATH | OFlags::DIRECTORY)?;
    let etc = match create_dirs(upper.as_fd(), Path::new("etc")) {
        // An earlier guest has removed or replaced it.
        Err(error) if is_no_directory(&error) => return Ok(()),
        etc => etc?,
    };
    chown(&etc, "", (owner, owner))?;
    create_file(&etc, "resolv.conf", identity::resolv_conf().as_bytes())?;
    chown(&etc, "resolv.conf", (owner, owner))?;
    let group_line = format!("{}:x:{}:\n", guest.name, guest.group);
    for (name, id, line) in [
        ("passwd", guest.id, passwd_line(guest)),
        ("group", guest.group, group_line),
    ] {
        let mut content = read(layers, &format!("etc/{name}"))?;
        if knows(&content, id) {
            continue;
        }
        if !content.is_empty() && !content.ends_with(b"\n") {
            content.push(b'\n');
        }
        content.extend_from_slice(line.as_bytes());
        create_file(&etc, name, &content)?;
        chown(&etc, name, (owner, owner))?;
    }
    Ok(())
}

/// Whether a file of users or groups has an id, which is the third field of a line.
fn knows(content: &[u8], id: u32) -> bool {
    let id = id.to_string();
    content
        .split(|byte| *byte == b'\n')
        .any(|line| line.split(|byte| *byte == b':').nth(2) == Some(id.as_bytes()))
}

/// Reads the beginning of an untrusted file of the topmost layer that has it.
///
/// Anything else than a file is empty, as the mark of a removed file.
fn read(layers: &[OwnedFd], path: &str) -> io::Result<Vec<u8>> {
    const MOST: u64 = 1 << 20;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    let mut content = Vec::new();
    for layer in layers {
        let file = match open_beneath(layer, path, flags) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOENT) => continue,
            Err(_) => break,
            Ok(file) => file,
        };
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_file() {
            let file = std::fs::File::from(file);
            io::Read::read_to_end(&mut io::Read::take(file, MOST), &mut content)?;
        }
        break;
    }
    Ok(content)
}
