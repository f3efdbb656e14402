//! Merged layers show what an overlay of them shows.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use box_sys::{
    Caps, DISK_BYTES_PER_INODE, Layer, Root, SandboxPlan, Scratch, SnapshotLimits, SnapshotSize,
    settle_disk,
};
use tempfile::TempDir;

use crate::disks::{is_root, no_loops, server_in};
use crate::support::{SERVERS, TestServer, guest};

const FREE: SnapshotLimits = SnapshotLimits {
    bytes: u64::MAX,
    entries: u64::MAX,
};

/// Lists the home directory with the content of every file.
///
/// The size of a directory and the number of a file's names depend on the file system.
const SHOW: &str = "cd /home/box; ls -AR; find . ! -type d -printf '%p %y %m %U %G %l %s %T@\\n' | sort; \
    find . -type d -printf '%p %m %U %G %T@\\n' | sort; find . -type f | sort | while read f; do echo \"$f:\"; cat \"$f\"; done";

/// A directory for layers that the server's user owns.
fn place(server: &TestServer) -> (TempDir, PathBuf) {
    let directory = server.directory();
    let path = directory.path().canonicalize().unwrap();
    (directory, path)
}

fn new_directory(server: &TestServer, path: &Path) -> File {
    fs::create_dir(path).unwrap();
    std::os::unix::fs::chown(path, Some(server.uid()), Some(server.uid())).unwrap();
    File::open(path).unwrap()
}

fn merged(
    server: &TestServer,
    layers: &[Layer],
    into: &Path,
    limits: SnapshotLimits,
) -> box_sys::Result<SnapshotSize> {
    let to = new_directory(server, into);
    let merge = server.fork_server.start_merge(layers, to.as_fd(), limits)?;
    merge.finish()
}

/// A plan in which the home directory, which every box makes, is not the one of the layers.
fn plan(server: &TestServer, root: &Root, layers: &[Layer], scratch: Scratch) -> SandboxPlan {
    SandboxPlan {
        root: root.clone(),
        layers: layers.to_vec(),
        read_only_root: false,
        guest: guest("box", "/home/box", 1000, 1000),
        scratch,
        ..server.plan()
    }
}

fn roots(server: &TestServer) -> (TempDir, [Root; 2]) {
    let image = server.image();
    fs::create_dir_all(image.path().join("home/box/a/b")).unwrap();
    for name in ["home/box/f1", "home/box/a/f2", "home/box/a/b/f1"] {
        fs::write(image.path().join(name), "of the image\n").unwrap();
    }
    let path = image.path().canonicalize().unwrap();
    give(
        &path.join("home"),
        if server.privileged() {
            1000
        } else {
            server.uid()
        },
    );
    (image, [Root::Host, Root::Image(path)])
}

fn give(path: &Path, id: u32) {
    std::os::unix::fs::lchown(path, Some(id), Some(id)).unwrap();
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            give(&entry.unwrap().path(), id);
        }
    }
}

/// Numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn path(&mut self) -> String {
        let mut path = String::new();
        for _ in 0..self.below(3) {
            path += ["a/", "b/", "c/"][usize::try_from(self.below(3)).unwrap()];
        }
        let names = ["a", "b", "c", "f1", "f2", "f3"];
        path + names[usize::try_from(self.below(6)).unwrap()]
    }

    /// Changes of files, some of which fail.
    fn script(&mut self) -> String {
        let mut script = vec!["cd /home/box".to_owned()];
        for n in 0..40 {
            let (one, other) = (self.path(), self.path());
            let change = match self.below(10) {
                0 | 1 => format!("mkdir -p {one}"),
                2 | 3 => format!("echo {n} > {one}"),
                4 => format!("echo {n} >> {one}"),
                5 => format!("rm -rf {one}"),
                // An opaque directory, if layers below have one.
                6 => format!("rm -rf {one}; mkdir {one} && echo {n} > {one}/f1"),
                7 => format!("mv {one} {other}"),
                8 => format!("ln {one} {other}; ln -s {one} {other}"),
                _ => format!("chmod 7{}5 {one}", self.below(8)),
            };
            script.push(format!("{change} 2> /dev/null"));
        }
        script.push("true".to_owned());
        script.join("\n")
    }
}

#[test]
fn a_merged_layer_shows_what_its_layers_show() {
    for server in SERVERS.iter() {
        let (_image, roots) = roots(server);
        for root in &roots {
            for seed in 1..=4 {
                let (_directory, path) = place(server);
                let mut random = Random(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(seed));
                let mut layers: Vec<Layer> = Vec::new();
                for n in 0..6 {
                    let disk = path.join(n.to_string());
                    drop(new_directory(server, &disk));
                    let scratch = Scratch::Directory {
                        path: disk.clone(),
                        shm: Caps::default(),
                    };
                    let boxed = server.create_box(&plan(server, root, &layers, scratch));
                    let ran = boxed.sh(&random.script());
                    assert_eq!(ran.code, Some(0), "{ran:?}");
                    drop(boxed);
                    layers.insert(0, Layer::disk(disk));
                }
                let show = |layers: &[Layer]| {
                    let boxed = server.create_box(&plan(server, root, layers, Scratch::default()));
                    let shown = boxed.sh(SHOW);
                    assert_eq!(shown.code, Some(0), "{shown:?}");
                    shown.out
                };
                let stacked = show(&layers);
                assert!(stacked.lines().count() > 5, "{stacked}");
                let at = |name: &str| path.join(name);
                // All layers, some at the top, in the middle and at the bottom.
                for (name, range) in [
                    ("all", 0..6),
                    ("top", 0..3),
                    ("mid", 1..5),
                    ("low", 3..6),
                    ("one", 2..3),
                ] {
                    let size = merged(server, &layers[range.clone()], &at(name), FREE).unwrap();
                    assert!(size.entries > 0, "{size:?}");
                    let mut mixed = layers.clone();
                    mixed.splice(range, [Layer::directory(at(name))]);
                    assert_eq!(
                        show(&mixed),
                        stacked,
                        "{} {root:?} {seed} {name}",
                        server.name
                    );
                }
                // A merged layer of merged layers.
                let parts = [Layer::directory(at("top")), Layer::directory(at("low"))];
                merged(server, &parts, &at("again"), FREE).unwrap();
                assert_eq!(show(&[Layer::directory(at("again"))]), stacked);
            }
        }
    }
}

#[test]
fn disks_are_merged_and_leave_no_mounts() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), 0);
    let path = directory.path().canonicalize().unwrap();
    let mut layers: Vec<Layer> = Vec::new();
    let scripts = [
        "cd /home/box; mkdir -p a/b; echo 1 > a/b/f; ln a/b/f a/g; echo gone > gone; mkfifo p; chmod 600 a/g",
        "cd /home/box; rm gone; rm -r a/b; mkdir a/b; echo 2 > a/b/h; ln -s h a/b/l",
    ];
    for (n, script) in scripts.iter().enumerate() {
        let scratch = Scratch::FileSystem {
            caps: Caps {
                bytes: 64 << 20,
                inodes: (64 << 20) / DISK_BYTES_PER_INODE,
            },
            shm: Caps::default(),
            name: Some(n.to_string().into()),
        };
        let boxed = server.create_box(&plan(&server, &Root::Host, &layers, scratch));
        assert_eq!(boxed.sh(script).code, Some(0));
        boxed.sandbox().keep_disk().unwrap();
        drop(boxed);
        let disk = path.join(n.to_string());
        settle_disk(&disk, Duration::from_mins(2)).unwrap();
        layers.insert(0, Layer::disk(disk));
    }
    let into = path.join("merged");
    let size = merged(&server, &layers, &into, FREE).unwrap();
    assert!(size.entries > 5, "{size:?}");
    no_loops(directory.path());
    let home = into.join("home/box");
    assert!(!home.join("a/b/f").exists());
    let owner = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        let metadata = fs::symlink_metadata(path).unwrap();
        (metadata.uid(), metadata.mode() & 0o7777)
    };
    assert_eq!(owner(&home.join("a/g")), (1000, 0o600), "the id in the box");
    let show = |layers: &[Layer]| {
        let plan = plan(&server, &Root::Host, layers, Scratch::default());
        server.create_box(&plan).sh(SHOW).out
    };
    assert_eq!(show(&[Layer::directory(&into)]), show(&layers));
    no_loops(directory.path());
}

#[test]
fn limits_and_bad_layers_end_a_merge() {
    for server in SERVERS.iter() {
        let (_directory, path) = place(server);
        let layer = path.join("layer");
        drop(new_directory(server, &layer));
        for n in 0..20 {
            fs::write(layer.join(n.to_string()), [0; 1000]).unwrap();
        }
        let layers = [Layer::directory(&layer)];
        let few = SnapshotLimits {
            entries: 10,
            ..FREE
        };
        let small = SnapshotLimits {
            bytes: 10_000,
            ..FREE
        };
        for (name, limits) in [("few", few), ("small", small)] {
            let error = merged(server, &layers, &path.join(name), limits).unwrap_err();
            assert!(matches!(error, box_sys::Error::Invalid(_)), "{error:?}");
        }
        let missing = [Layer::directory(path.join("missing"))];
        let without_files = [Layer::disk(&layer)];
        for (name, bad) in [("m", &missing[..]), ("d", &without_files[..]), ("n", &[])] {
            assert!(
                merged(server, bad, &path.join(name), FREE).is_err(),
                "{name}"
            );
        }
        let size = merged(server, &layers, &path.join("whole"), FREE).unwrap();
        assert_eq!((size.entries, size.bytes), (20, 20_000), "control");
    }
}
