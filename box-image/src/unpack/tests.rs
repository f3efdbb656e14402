//! Hostile layers: each test tries what broke another program.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use tar::{EntryType, Header};

use super::*;

/// A layer under construction.
struct Layer(tar::Builder<Vec<u8>>);

impl Layer {
    fn new() -> Self {
        Self(tar::Builder::new(Vec::new()))
    }

    fn add(mut self, kind: EntryType, path: &str, target: &str, mode: u32, content: &[u8]) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        // The library refuses to write such names.
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target.as_bytes());
        header.set_mode(mode);
        header.set_mtime(1);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.append(&header, content).unwrap();
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.add(EntryType::Regular, path, "", 0o644, content.as_bytes())
    }

    fn directory(self, path: &str) -> Self {
        self.add(EntryType::Directory, path, "", 0o755, b"")
    }

    fn symlink(self, path: &str, target: &str) -> Self {
        self.add(EntryType::Symlink, path, target, 0o777, b"")
    }

    fn link(self, path: &str, target: &str) -> Self {
        self.add(EntryType::Link, path, target, 0o644, b"")
    }

    fn attribute(mut self, name: &str, value: &[u8]) -> Self {
        let key = format!("SCHILY.xattr.{name}");
        self.0
            .append_pax_extensions([(key.as_str(), value)])
            .unwrap();
        self
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

/// A directory for an image, beside one that must not change.
struct Target {
    _folder: tempfile::TempDir,
    root: PathBuf,
    outside: PathBuf,
}

impl Target {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        let outside = folder.path().join("outside");
        fs::create_dir(&root).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("secret"), "mine").unwrap();
        fs::set_permissions(outside.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
        Self {
            _folder: folder,
            root,
            outside,
        }
    }

    fn unpack_within(&self, limits: Limits, layers: Vec<Layer>) -> Result<Unpacked> {
        let root = fs::File::open(&self.root).unwrap();
        let mut unpacker = Unpacker::new(root.into(), limits);
        for layer in layers {
            unpacker.apply(&mut &layer.bytes()[..])?;
        }
        unpacker.finish()
    }

    fn unpack(&self, layers: Vec<Layer>) -> Result<Unpacked> {
        let unpacked = self.unpack_within(Limits::default(), layers);
        self.assert_untouched();
        unpacked
    }

    fn assert_untouched(&self) {
        assert_eq!(fs::read_dir(&self.outside).unwrap().count(), 1);
        let secret = self.outside.join("secret");
        assert_eq!(fs::read_to_string(&secret).unwrap(), "mine");
        let found = fs::metadata(&secret).unwrap();
        assert_eq!((found.mode() & 0o7777, found.nlink()), (0o600, 1));
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root.join(path)).unwrap()
    }

    fn has(&self, path: &str) -> bool {
        fs::symlink_metadata(self.root.join(path)).is_ok()
    }

    fn outside(&self) -> &str {
        self.outside.to_str().unwrap()
    }
}

fn refused(unpacked: Result<Unpacked>, words: &str) {
    let error = unpacked.unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    assert!(!error.to_string().contains("/tmp"), "{error}");
}

/// CVE-2026-33056, RUSTSEC-2026-0113, CVE-2025-11395: an entry behind a link of the same layer.
#[test]
fn an_entry_behind_a_link_of_its_layer_is_refused() {
    for target in ["absolute", "../outside", "."] {
        let to = Target::new();
        let target = if target == "absolute" {
            to.outside()
        } else {
            target
        };
        let layer = Layer::new()
            .symlink("link", target)
            .file("link/secret", "theirs");
        refused(to.unpack(vec![layer]), "behind a link");
        let layer = Layer::new().symlink("link", target).directory("link/new");
        refused(to.unpack(vec![layer]), "behind a link");
    }
}

#[test]
fn an_entry_behind_a_link_of_an_earlier_layer_replaces_the_link() {
    let to = Target::new();
    let base = Layer::new().symlink("link", to.outside());
    let upper = Layer::new().file("link/secret", "theirs");
    to.unpack(vec![base, upper]).unwrap();
    assert!(!to.root.join("link").is_symlink());
    assert_eq!(to.read("link/secret"), "theirs");
}

/// CVE-2021-32760: a mode was set through a link.
#[test]
fn a_mode_is_never_set_through_a_link() {
    let to = Target::new();
    let secret = format!("{}/secret", to.outside());
    let layer = Layer::new()
        .symlink("link", &secret)
        .add(EntryType::Link, "hard", "link", 0o4777, b"")
        .add(EntryType::Directory, "d", "", 0o777, b"")
        .symlink("d", to.outside())
        .add(EntryType::Directory, "e", "", 0o777, b"");
    to.unpack(vec![layer, Layer::new().symlink("e", to.outside())])
        .unwrap();
    let mode = fs::metadata(&to.outside).unwrap().mode() & 0o7777;
    assert_ne!(mode, 0o777);
    assert!(
        to.root.join("hard").is_symlink(),
        "the link itself has another name"
    );
}

/// CVE-2021-29136: the root of an image was a link.
#[test]
fn a_root_that_is_no_directory_is_refused() {
    let to = Target::new();
    for path in [".", "./", "/", "a/.."] {
        let layer = Layer::new().symlink(path, to.outside());
        assert!(to.unpack(vec![layer]).is_err(), "{path}");
    }
    let layer = Layer::new().add(EntryType::Directory, "./", "", 0o711, b"");
    to.unpack(vec![layer]).unwrap();
    assert_eq!(fs::metadata(&to.root).unwrap().mode() & 0o7777, 0o711);
}

#[test]
fn a_path_that_leads_outside_is_refused_and_an_absolute_one_stays_inside() {
    let to = Target::new();
    for path in [
        "../outside/secret",
        "a/../../outside/secret",
        "..",
        "a/..",
        "./../x",
    ] {
        refused(
            to.unpack(vec![Layer::new().file(path, "theirs")]),
            "outside",
        );
    }
    let absolute = format!("{}/secret", to.outside());
    to.unpack(vec![Layer::new().file(&absolute, "theirs")])
        .unwrap();
    assert_eq!(to.read(&absolute[1..]), "theirs");
}

/// CVE-2025-11395, CVE-2019-10152: a hard link to a file of the host.
#[test]
fn a_hard_link_leads_only_to_a_file_of_the_image() {
    let to = Target::new();
    let secret = format!("{}/secret", to.outside());
    for target in [
        secret.as_str(),
        "../outside/secret",
        "missing",
        "hard",
        "d",
        "link/secret",
        "/",
    ] {
        let layer = Layer::new()
            .directory("d")
            .symlink("link", to.outside())
            .link("hard", target);
        assert!(to.unpack(vec![layer]).is_err(), "{target}");
    }
    let layer = Layer::new()
        .file("a", "one")
        .link("b", "./a")
        .link("c", "/b");
    to.unpack(vec![layer]).unwrap();
    assert_eq!(fs::metadata(to.root.join("c")).unwrap().nlink(), 3);
    // A later file under one of the names leaves the others.
    to.unpack(vec![Layer::new().file("b", "two")]).unwrap();
    assert_eq!((to.read("a"), to.read("b")), ("one".into(), "two".into()));
    // A hard link in the place of the directory of its target.
    let layer = Layer::new().file("x/y", "").link("x", "x/y");
    refused(to.unpack(vec![layer]), "lacks");
}

#[test]
fn whiteouts_hide_earlier_layers_only() {
    let to = Target::new();
    let base = Layer::new()
        .file("gone", "")
        .file("kept", "")
        .file("dir/a", "")
        .file("dir/sub/b", "")
        .file("opaque/old", "")
        .file("opaque/sub/old", "");
    let upper = Layer::new()
        .file(".wh.gone", "")
        .file(".wh.dir", "")
        .file(".wh.never", "")
        .file("missing/.wh.x", "")
        .file("opaque/new", "")
        .file("opaque/sub/new", "")
        .file("opaque/.wh..wh..opq", "")
        .file("same", "")
        .file(".wh.same", "")
        .file(".wh..wh.plnk", "");
    to.unpack(vec![base, upper]).unwrap();
    for path in ["kept", "opaque/new", "opaque/sub/new", "same"] {
        assert!(to.has(path), "{path}");
    }
    for path in [
        "gone",
        "dir",
        "opaque/old",
        "opaque/sub/old",
        "missing",
        ".wh.gone",
        ".wh..wh.plnk",
    ] {
        assert!(!to.has(path), "{path}");
    }
}

#[test]
fn a_whiteout_reaches_nothing_outside() {
    let to = Target::new();
    let base = || {
        Layer::new()
            .symlink("link", to.outside())
            .symlink("up", "..")
    };
    for path in ["link/.wh.secret", "link/.wh..wh..opq", "up/.wh.outside"] {
        to.unpack(vec![base(), Layer::new().file(path, "")])
            .unwrap();
        assert!(to.root.join("link").is_symlink(), "{path}");
    }
    for path in [".wh...", "a/.wh...", ".wh..", ".wh."] {
        refused(to.unpack(vec![Layer::new().file(path, "")]), "invalid name");
    }
    refused(
        to.unpack(vec![Layer::new().file(".wh.a/b", "")]),
        "below a whiteout",
    );
}

#[test]
fn kinds_replace_each_other() {
    let to = Target::new();
    let one = Layer::new()
        .file("a", "")
        .directory("b")
        .file("b/c", "")
        .symlink("c", "b")
        .file("d", "");
    let two = Layer::new()
        .directory("a")
        .file("b", "file")
        .directory("c")
        .symlink("d", "a")
        .file("a/x/y", "");
    let device = Layer::new().add(EntryType::Char, "d", "", 0o666, b"");
    let counts = to.unpack(vec![one, two, device]).unwrap();
    assert!(to.root.join("a/x/y").is_file() && !to.root.join("c").is_symlink());
    assert_eq!(to.read("b"), "file");
    assert!(!to.has("d"), "a skipped device hides what was there");
    assert_eq!(counts.devices_skipped, 1);
}

#[test]
fn devices_are_skipped_and_pipes_are_made() {
    let to = Target::new();
    let layer = Layer::new()
        .add(EntryType::Char, "null", "", 0o666, b"")
        .add(EntryType::Block, "disk", "", 0o666, b"")
        .add(EntryType::Fifo, "pipe", "", 0o622, b"");
    let counts = to.unpack(vec![layer]).unwrap();
    assert_eq!(counts.devices_skipped, 2);
    assert_eq!(fs::read_dir(&to.root).unwrap().count(), 1);
    let pipe = fs::metadata(to.root.join("pipe")).unwrap();
    assert_eq!(pipe.mode(), 0o010_622);
}

#[test]
fn modes_and_times_are_kept() {
    let to = Target::new();
    let layer = Layer::new()
        .add(EntryType::Directory, "readonly", "", 0o555, b"")
        .add(EntryType::Regular, "readonly/su", "", 0o4755, b"x")
        .add(EntryType::Directory, "tmp", "", 0o1777, b"")
        .file("implied/f", "");
    to.unpack(vec![layer, Layer::new().file("tmp/f", "")])
        .unwrap();
    let found = |path: &str| {
        let found = fs::metadata(to.root.join(path)).unwrap();
        (found.mode() & 0o7777, found.mtime())
    };
    assert_eq!(found("readonly"), (0o555, 1));
    assert_eq!(found("readonly/su"), (0o4755, 1));
    assert_eq!(found("tmp"), (0o1777, 1));
    assert_eq!(found("implied"), (0o755, 0));
}

#[test]
fn attributes_of_users_are_kept_and_others_dropped() {
    let to = Target::new();
    let mut layer = Layer::new();
    for (name, path) in [
        ("user.note", "kept"),
        ("security.capability", "cap"),
        ("trusted.overlay.opaque", "trusted"),
        ("user.overlay.redirect", "redirect"),
        ("system.posix_acl_access", "acl"),
    ] {
        layer = layer.attribute(name, b"v").file(path, "");
    }
    layer = layer.attribute("user.note", b"v").directory("dir");
    layer = layer.attribute("user.note", b"v").symlink("link", "kept");
    let counts = to.unpack(vec![layer]).unwrap();
    let attributes = |path: &str| {
        let mut names = vec![0; 4096];
        let path = to.root.join(path);
        let read = rustix::fs::llistxattr(&path, &mut names[..]).unwrap();
        String::from_utf8_lossy(&names[..read]).into_owned()
    };
    assert_eq!(attributes("dir"), "user.note\0");
    assert_eq!(attributes("kept"), "user.note\0");
    for path in ["cap", "trusted", "redirect", "acl", "link"] {
        assert!(
            !attributes(path).contains("user.") && !attributes(path).contains("cap"),
            "{path}"
        );
    }
    assert_eq!(counts.attributes_dropped, 5);
}

#[test]
fn owners_are_kept_by_root_only_and_large_ones_clamped() {
    let to = Target::new();
    let mut layer = Layer::new();
    for (path, uid, gid) in [
        ("small", 1234, 5678),
        ("last", 65_535, 0),
        ("large", 70_000, 1),
    ] {
        let mut header = Header::new_gnu();
        header.set_path(path).unwrap();
        header.set_mode(0o4755);
        header.set_uid(uid);
        header.set_gid(gid);
        header.set_size(0);
        header.set_mtime(0);
        header.set_cksum();
        layer.0.append(&header, &b""[..]).unwrap();
    }
    let counts = to.unpack(vec![layer]).unwrap();
    let found = |path: &str| {
        let found = fs::metadata(to.root.join(path)).unwrap();
        (found.uid(), found.gid(), found.mode() & 0o7777)
    };
    if rustix::process::geteuid().is_root() {
        assert_eq!(found("small"), (1234, 5678, 0o4755));
        assert_eq!(found("last"), (65_535, 0, 0o4755));
        assert_eq!(found("large"), (65_534, 1, 0o4755));
        assert_eq!(counts.owners_clamped, 1);
    } else {
        let user = rustix::process::geteuid().as_raw();
        assert_eq!((found("small").0, found("large").0), (user, user));
        assert_eq!(counts.owners_clamped, 0);
    }
}

#[test]
fn limits_on_entries_bytes_and_names_hold() {
    let to = Target::new();
    let limits = Limits {
        entries: 3,
        decoded_bytes: 10,
        ..Limits::default()
    };
    let four = Layer::new()
        .file("a", "")
        .file("b", "")
        .file("c", "")
        .file("d", "");
    refused(to.unpack_within(limits, vec![four]), "entries");
    let large = Layer::new().file("a", "123456").file("b", "123456");
    refused(to.unpack_within(limits, vec![large]), "decoded_bytes");
    // In every layer together.
    let layers = || {
        vec![
            Layer::new().file("a", "123456"),
            Layer::new().file("a", "123456"),
        ]
    };
    refused(to.unpack_within(limits, layers()), "decoded_bytes");
    let deep = "d/".repeat(45);
    let mut path = String::new();
    let mut layer = Layer::new();
    for _ in 0..3 {
        path.push_str(&deep);
        layer
            .0
            .append_pax_extensions([("path", path.as_bytes())])
            .unwrap();
        layer = layer.directory("x");
    }
    refused(to.unpack(vec![layer]), "path_depth");
}

/// A file of a terabyte that is one hole counts with its size.
#[test]
fn a_hole_counts_as_its_size() {
    let to = Target::new();
    let keys = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.realsize", "1099511627776"),
    ];
    let mut layer = Layer::new();
    layer
        .0
        .append_pax_extensions(keys.map(|(key, value)| (key, value.as_bytes())))
        .unwrap();
    let mut map = b"0\n".to_vec();
    map.resize(512, 0);
    let layer = layer.add(EntryType::Regular, "hole", "", 0o644, &map);
    refused(to.unpack(vec![layer]), "decoded_bytes");
}

#[test]
fn a_sparse_file_is_written_with_its_holes() {
    let to = Target::new();
    let keys = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.realsize", "5000"),
    ];
    let mut layer = Layer::new();
    layer
        .0
        .append_pax_extensions(keys.map(|(key, value)| (key, value.as_bytes())))
        .unwrap();
    let mut map = b"1\n4000\n3\n".to_vec();
    map.resize(512, 0);
    map.extend(b"abc");
    let layer = layer
        .add(EntryType::Regular, "hole", "", 0o644, &map)
        .file("after", "x");
    to.unpack(vec![layer]).unwrap();
    let content = fs::read(to.root.join("hole")).unwrap();
    assert_eq!(content.len(), 5000);
    assert_eq!(&content[4000..4003], b"abc");
    assert!(
        content[..4000]
            .iter()
            .chain(&content[4003..])
            .all(|c| *c == 0)
    );
    assert_eq!(to.read("after"), "x");
}

#[test]
fn names_need_not_be_text() {
    let to = Target::new();
    let mut header = Header::new_gnu();
    header.as_mut_bytes()[..2].copy_from_slice(&[b'a', 0xff]);
    header.set_size(0);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_cksum();
    let mut layer = Layer::new();
    layer.0.append(&header, &b""[..]).unwrap();
    to.unpack(vec![layer]).unwrap();
    let name = std::os::unix::ffi::OsStrExt::from_bytes(&[b'a', 0xff]);
    let name: &std::ffi::OsStr = name;
    assert!(to.root.join(Path::new(name)).exists());
}
