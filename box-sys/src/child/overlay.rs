//! Builds a root directory from layers: an image, snapshots, or both.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;

use super::Resources;
use super::root::{UPPER, create_dir, open};
use crate::error::{At, Result};
use crate::identity::{self, passwd_line};
use crate::mounts::{attach, chown, create_dirs, create_file, new_fs, open_beneath, overlay_of};
use crate::plan::{Guest, Root, Scratch};
use crate::raw::{ATTR_NODEV, ATTR_NOSUID};

/// Creates an overlay of the private files above the layers.
///
/// Writes go to the private files, never to a layer.
pub(super) fn root(resources: &Resources<'_>, scratch: &OwnedFd) -> Result<OwnedFd> {
    create_dir(scratch, "work")?;
    let layers = &resources.layers;
    if let Root::Image(_) = resources.shape.root {
        // Root of the box, if it has more than one id.
        let owner = resources.server.ids.guest(0);
        chown(scratch, UPPER, (owner, owner)).at("give the root to the box")?;
        add_guest(&resources.shape.guest, scratch, &layers.trees, owner)
            .at("add the guest to the root's users")?;
    }
    let mut options = vec![
        ("upperdir", "/s/upper"),
        ("workdir", "/s/work"),
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
    if layers.by_descriptor {
        let trees: Vec<_> = layers.trees.iter().map(AsFd::as_fd).collect();
        return overlay_of(&trees, &options, attr).at("create the overlay");
    }
    let mut places = Vec::with_capacity(layers.trees.len());
    for (n, tree) in layers.trees.iter().enumerate() {
        let place = format!("/l/{n}");
        attach(tree, open(&place)?).at("attach a layer")?;
        places.push(place);
    }
    let places = places.join(":");
    options.push(("lowerdir", &places));
    new_fs("overlay", &options, attr).at("create the overlay")
}

/// Adds the guest to copies of the layers' `/etc/passwd` and `/etc/group`.
///
/// Layers that know the id of the guest keep their files. The copies go directly to the private
/// files. Through the overlay, the kernel could not copy up a file with an unmapped owner (EACCES).
fn add_guest(guest: &Guest, scratch: &OwnedFd, layers: &[OwnedFd], owner: u32) -> io::Result<()> {
    let upper = open_beneath(scratch, UPPER, OFlags::PATH | OFlags::DIRECTORY)?;
    let etc = create_dirs(upper.as_fd(), Path::new("etc"))?;
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
