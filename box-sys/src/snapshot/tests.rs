use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, lchown, symlink};
use std::path::Path;

use rustix::fs::{CWD, Timespec, Timestamps, XattrFlags};
use tempfile::TempDir;

use super::*;

const FREE: SnapshotLimits = SnapshotLimits {
    bytes: u64::MAX,
    entries: u64::MAX,
};

const BASE: u32 = 1_000_000;

fn owners() -> Owners {
    if is_root() {
        Owners::OfBox {
            base: BASE,
            count: 65_536,
        }
    } else {
        Owners::Same
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn copied(from: &Path) -> (Result<SnapshotSize>, TempDir) {
    let to = tempfile::tempdir().unwrap();
    let size = copy_to(from, to.path(), FREE, &mut || false);
    (size, to)
}

fn copy_to(
    from: &Path,
    to: &Path,
    limits: SnapshotLimits,
    is_cancelled: &mut dyn FnMut() -> bool,
) -> Result<SnapshotSize> {
    let (from, to) = (File::open(from).unwrap(), File::open(to).unwrap());
    copy(from.as_fd(), to.as_fd(), owners(), limits, is_cancelled)
}

/// Gives a file to an id of a box, if this user can.
fn give(path: &Path, id: u32) {
    if is_root() {
        lchown(path, Some(BASE + id), Some(BASE + id)).unwrap();
    }
}

/// Everything about the files below a directory that a snapshot keeps.
fn described(root: &Path) -> BTreeMap<Vec<u8>, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        let name = path
            .strip_prefix(root)
            .unwrap()
            .as_os_str()
            .as_bytes()
            .to_vec();
        let content = if metadata.is_symlink() {
            format!("{:?}", fs::read_link(&path).unwrap())
        } else if metadata.is_file() {
            format!("{:?}", fs::read(&path).unwrap().len())
        } else {
            String::new()
        };
        let id = |id: u32| if id < BASE { id } else { id - BASE };
        let links = if metadata.is_dir() {
            0
        } else {
            metadata.nlink()
        };
        let times = (metadata.mtime(), metadata.mtime_nsec());
        let ids = (id(metadata.uid()), id(metadata.gid()));
        let text = format!(
            "{:o} {ids:?} {links} {times:?} {} {content}",
            metadata.mode(),
            metadata.rdev()
        );
        found.insert(name, text);
        if metadata.is_dir() {
            let entries = fs::read_dir(&path).unwrap();
            left.extend(entries.map(|entry| entry.unwrap().path()));
        }
    }
    found
}

#[test]
fn a_copy_has_every_kind_of_file_with_its_attributes() {
    let from = tempfile::tempdir().unwrap();
    let at = |name: &str| from.path().join(name);
    fs::create_dir_all(at("dir/deep/er")).unwrap();
    fs::write(at("dir/file"), "content").unwrap();
    fs::write(at("empty"), "").unwrap();
    fs::write(at("program"), vec![7; 3 << 20]).unwrap();
    fs::hard_link(at("program"), at("dir/same")).unwrap();
    fs::hard_link(at("program"), at("dir/deep/again")).unwrap();
    symlink("../../../etc/passwd", at("dir/out")).unwrap();
    symlink("missing", at("broken")).unwrap();
    fs::write(at("odd\nname "), "odd").unwrap();
    let invalid = from.path().join(std::ffi::OsStr::from_bytes(b"\xff\xfe"));
    fs::write(&invalid, "bytes").unwrap();
    rustix::fs::mkfifoat(CWD, at("fifo"), Mode::from(0o640)).unwrap();
    let (kind, mode) = (FileType::CharacterDevice, Mode::empty());
    rustix::fs::mknodat(CWD, at("removed"), kind, mode, 0).unwrap();
    drop(std::os::unix::net::UnixListener::bind(at("socket")).unwrap());
    let ids = [
        "dir/file", "empty", "program", "broken", "fifo", "removed", "dir",
    ];
    for (name, id) in ids.iter().zip([1000, 0, 33, 1000, 5, 0, 65_535]) {
        give(&at(name), id);
    }
    for (name, mode) in [("program", 0o4755), ("dir/file", 0o000), ("dir", 0o1777)] {
        fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
    }
    let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: time(5, 6),
        last_modification: time(1, 123_456_789),
    };
    for name in ["dir/deep", "empty", "broken", "removed"] {
        rustix::fs::utimensat(CWD, at(name), &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
    if !is_root() {
        // Only the fork server has the rights of root over these files.
        fs::set_permissions(at("dir/file"), Permissions::from_mode(0o400)).unwrap();
    }
    let (size, to) = copied(from.path());
    let size = size.unwrap();
    let (wanted, found) = (described(from.path()), described(to.path()));
    assert_eq!(found, wanted);
    assert_eq!(size.entries, wanted.len() as u64 - 1, "{size:?}");
    assert_eq!(
        size.bytes,
        (3 << 20) + 7 + 3 + 5,
        "a file with three names counts once"
    );
    let number = |name| fs::metadata(to.path().join(name)).unwrap().ino();
    assert_eq!(number("program"), number("dir/same"));
    assert_eq!(number("program"), number("dir/deep/again"));
    assert_eq!(
        fs::read(to.path().join("dir/same")).unwrap(),
        vec![7; 3 << 20]
    );
}

#[test]
fn holes_stay_holes() {
    let from = tempfile::tempdir().unwrap();
    let file = File::create(from.path().join("sparse")).unwrap();
    file.set_len(1 << 32).unwrap();
    file.write_all_at(b"first", 1 << 20).unwrap();
    file.write_all_at(b"last", (1 << 32) - 4).unwrap();
    File::create(from.path().join("hole"))
        .unwrap()
        .set_len(1 << 30)
        .unwrap();
    let (size, to) = copied(from.path());
    assert!(size.unwrap().bytes < 1 << 20);
    let copy = File::open(to.path().join("sparse")).unwrap();
    let metadata = copy.metadata().unwrap();
    assert_eq!(metadata.len(), 1 << 32);
    assert!(metadata.blocks() * 512 < 1 << 20, "{metadata:?}");
    let mut read = [0; 5];
    copy.read_exact_at(&mut read, 1 << 20).unwrap();
    assert_eq!(&read, b"first");
    copy.read_exact_at(&mut read[..4], (1 << 32) - 4).unwrap();
    assert_eq!(&read[..4], b"last");
    assert_eq!(fs::metadata(to.path().join("hole")).unwrap().len(), 1 << 30);
}

#[test]
fn extended_attributes_are_kept_except_those_of_this_machine() {
    let from = tempfile::tempdir().unwrap();
    let (dir, file) = (from.path().join("dir"), from.path().join("file"));
    fs::create_dir(&dir).unwrap();
    fs::write(&file, "x").unwrap();
    let space = if is_root() { "trusted" } else { "user" };
    let set = |path: &Path, name: &str, value: &[u8]| {
        rustix::fs::setxattr(path, name, value, XattrFlags::empty()).unwrap();
    };
    let long = vec![b'v'; 1000];
    set(&file, "user.note", &long);
    set(&file, "user.empty", b"");
    set(&file, &format!("{space}.overlay.origin"), b"handle");
    set(&dir, &format!("{space}.overlay.opaque"), b"y");
    let (size, to) = copied(from.path());
    size.unwrap();
    let get = |name: &str, attribute: &str| {
        let mut value = vec![0; 2000];
        let length = rustix::fs::getxattr(to.path().join(name), attribute, &mut value);
        length.map(|length| value[..length].to_vec())
    };
    assert_eq!(get("file", "user.note").unwrap(), long);
    assert_eq!(get("file", "user.empty").unwrap(), b"");
    assert_eq!(
        get("dir", &format!("{space}.overlay.opaque")).unwrap(),
        b"y"
    );
    assert!(get("file", &format!("{space}.overlay.origin")).is_err());
    if is_root() {
        // Without the layer below, such a file would have no content.
        set(&file, "trusted.overlay.metacopy", b"");
        assert!(copied(from.path()).0.is_err());
    }
}

#[test]
fn access_lists_have_the_ids_of_the_box() {
    if !is_root() {
        return;
    }
    let from = tempfile::tempdir().unwrap();
    let file = from.path().join("file");
    fs::write(&file, "x").unwrap();
    let list = |user: u32| {
        let entry = |tag: u16, permissions: u16, id: u32| {
            let tag = [tag.to_le_bytes(), permissions.to_le_bytes()].concat();
            [tag, id.to_le_bytes().to_vec()].concat()
        };
        let entries = [
            entry(1, 6, u32::MAX),
            entry(2, 4, user),
            entry(4, 4, u32::MAX),
            entry(16, 4, u32::MAX),
            entry(32, 0, u32::MAX),
        ];
        [2_u32.to_le_bytes().to_vec(), entries.concat()].concat()
    };
    let name = "system.posix_acl_access";
    rustix::fs::setxattr(&file, name, &list(BASE + 1000), XattrFlags::empty()).unwrap();
    let (size, to) = copied(from.path());
    size.unwrap();
    let mut value = vec![0; 100];
    let length = rustix::fs::getxattr(to.path().join("file"), name, &mut value).unwrap();
    assert_eq!(value[..length], list(1000));
}

#[test]
fn ids_outside_of_a_box_become_nobody() {
    let attributes = Attributes::new(Owners::OfBox {
        base: BASE,
        count: 65_536,
    });
    for (id, wanted) in [
        (0, 0),
        (1, 65_534),
        (BASE - 1, 65_534),
        (BASE, 0),
        (BASE + 1000, 1000),
        (BASE + 65_535, 65_535),
        (BASE + 65_536, 65_534),
        (u32::MAX, 65_534),
    ] {
        assert_eq!(attributes.id(id), wanted, "{id}");
    }
}

#[test]
fn limits_end_a_copy() {
    let from = tempfile::tempdir().unwrap();
    for n in 0..10 {
        fs::write(from.path().join(n.to_string()), "1234567890").unwrap();
    }
    for (bytes, entries, fits) in [(100, 10, true), (99, 10, false), (100, 9, false)] {
        let to = tempfile::tempdir().unwrap();
        let limits = SnapshotLimits { bytes, entries };
        let size = copy_to(from.path(), to.path(), limits, &mut || false);
        assert_eq!(size.is_ok(), fits, "{limits:?}: {size:?}");
    }
    // A sparse file counts as its data.
    File::create(from.path().join("hole"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let to = tempfile::tempdir().unwrap();
    let limits = SnapshotLimits {
        bytes: 1 << 20,
        entries: 11,
    };
    copy_to(from.path(), to.path(), limits, &mut || false).unwrap();
}

#[test]
fn a_copy_can_be_cancelled() {
    let from = tempfile::tempdir().unwrap();
    fs::write(from.path().join("big"), vec![1; 8 << 20]).unwrap();
    let to = tempfile::tempdir().unwrap();
    let mut looks = 0;
    let mut is_cancelled = || {
        looks += 1;
        looks > 2
    };
    let ended = copy_to(from.path(), to.path(), FREE, &mut is_cancelled).unwrap_err();
    assert_eq!(ended.errno(), Some(libc::ECANCELED));
}

#[test]
fn names_of_the_index_of_links_are_free_for_the_guest() {
    let from = tempfile::tempdir().unwrap();
    fs::write(from.path().join(".links-0"), "mine").unwrap();
    fs::hard_link(from.path().join(".links-0"), from.path().join(".links-1")).unwrap();
    let (size, to) = copied(from.path());
    size.unwrap();
    let mut names: Vec<_> = fs::read_dir(to.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, [".links-0", ".links-1"]);
    assert_eq!(fs::read(to.path().join(".links-1")).unwrap(), b"mine");
}

#[test]
fn a_tree_that_is_too_deep_or_unreadable_is_an_error() {
    let from = tempfile::tempdir().unwrap();
    let mut dir = OwnedFd::from(File::open(from.path()).unwrap());
    for depth in 1..=DEPTH_MAX {
        rustix::fs::mkdirat(&dir, "d", Mode::RWXU).unwrap();
        dir = open_dir(&dir, c"d").unwrap();
        if depth == DEPTH_MAX - 1 {
            copied(from.path()).0.expect("control: the deepest tree");
        }
    }
    let (size, _to) = copied(from.path());
    assert!(matches!(size, Err(Error::Invalid(_))), "{size:?}");
    crate::walk::remove_all(&from.path().join("d")).unwrap();
    if !is_root() {
        fs::create_dir(from.path().join("locked")).unwrap();
        let locked = Permissions::from_mode(0o000);
        fs::set_permissions(from.path().join("locked"), locked).unwrap();
        assert!(copied(from.path()).0.is_err());
    }
}

#[test]
fn a_device_is_an_error() {
    if !is_root() {
        return;
    }
    let from = tempfile::tempdir().unwrap();
    let null = rustix::fs::makedev(1, 3);
    let mode = Mode::from(0o666);
    rustix::fs::mknodat(
        CWD,
        from.path().join("null"),
        FileType::CharacterDevice,
        mode,
        null,
    )
    .unwrap();
    assert!(copied(from.path()).0.is_err());
}
