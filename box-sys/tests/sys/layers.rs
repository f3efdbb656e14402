//! Boxes on snapshots: directories of private files of earlier boxes.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};

use box_sys::{Caps, Guest, Root, SandboxPlan, Scratch, socket_pair};
use box_test_wait::blocking::eventually;
use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use tempfile::TempDir;

use crate::support::{InitClient, SERVERS, TestServer, guest};

/// Directory of a snapshot under construction.
struct Layer<'a> {
    server: &'a TestServer,
    directory: TempDir,
}

impl<'a> Layer<'a> {
    fn new(server: &'a TestServer) -> Self {
        let directory = server.directory();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        Self { server, directory }
    }

    /// The id of a file of the guest.
    fn guest(&self) -> u32 {
        if self.server.privileged() {
            Guest::default().id
        } else {
            self.server.uid()
        }
    }

    fn give(&self, path: &Path) {
        let mut path = path;
        while path != self.directory.path() {
            lchown(path, Some(self.guest()), Some(self.guest())).unwrap();
            path = path.parent().unwrap();
        }
    }

    fn file(self, name: &str, content: &str) -> Self {
        let path = self.directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        self.give(&path);
        self
    }

    fn link(self, name: &str, target: &str) -> Self {
        let path = self.directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, &path).unwrap();
        self.give(&path);
        self
    }

    /// Hides a file of the layers below.
    fn removed(self, name: &str) -> Self {
        let path = self.directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let (kind, mode) = (FileType::CharacterDevice, Mode::empty());
        rustix::fs::mknodat(CWD, &path, kind, mode, rustix::fs::makedev(0, 0)).unwrap();
        self.give(&path);
        self
    }

    /// Hides the content of a directory in the layers below.
    fn opaque(self, name: &str) -> Self {
        let path = self.directory.path().join(name);
        fs::create_dir_all(&path).unwrap();
        let space = if self.server.privileged() {
            "trusted"
        } else {
            "user"
        };
        let attribute = format!("{space}.overlay.opaque");
        rustix::fs::setxattr(&path, attribute, b"y", XattrFlags::empty()).unwrap();
        self.give(&path);
        self
    }

    fn path(&self) -> PathBuf {
        self.directory.path().canonicalize().unwrap()
    }
}

/// The default plan on layers, the topmost first.
fn on(server: &TestServer, layers: &[&Layer<'_>]) -> SandboxPlan {
    SandboxPlan {
        layers: layers
            .iter()
            .map(|layer| box_sys::Layer::directory(layer.path()))
            .collect(),
        ..server.plan()
    }
}

/// Runs a test on the host's directories and on an image.
fn on_each_root(server: &TestServer, test: impl Fn(&dyn Fn(SandboxPlan) -> SandboxPlan)) {
    test(&|plan| plan);
    let image = server.image();
    let root = Root::Image(image.path().canonicalize().unwrap());
    test(&|plan| SandboxPlan {
        root: root.clone(),
        ..plan
    });
}

#[test]
fn a_box_sees_the_files_of_its_snapshots() {
    SERVERS.iter().for_each(check_files);
}

pub(crate) fn check_files(server: &TestServer) {
    on_each_root(server, |with_root| {
        let first = Layer::new(server)
            .file("home/box/kept", "kept\n")
            .file("home/box/changed", "old\n")
            .file("home/box/gone", "gone\n")
            .file("home/box/emptied/old", "old\n")
            .file("data/file", "data\n");
        let second = Layer::new(server)
            .file("home/box/changed", "new\n")
            .removed("home/box/gone")
            .opaque("home/box/emptied")
            .file("home/box/emptied/new", "new\n");
        let plan = with_root(on(server, &[&second, &first]));
        let boxed = server.create_box(&plan);
        let shown = boxed
            .sh("cd /home/box; cat kept changed /data/file; ls . emptied; stat -c %U kept emptied");
        let wanted = "kept\nnew\ndata\n.:\nchanged\nemptied\nkept\n\nemptied:\nnew\nbox\nbox\n";
        assert_eq!(shown.out, wanted, "{}: {}", server.name, shown.err);
        // The guest owns these files, and writes go to the box.
        let changed = boxed.sh("cd /home/box; echo more >> kept && rm changed && mkdir gone && chmod 700 emptied && cat kept");
        assert_eq!(changed.out, "kept\nmore\n", "{}: {changed:?}", server.name);
        let read = |layer: &Layer<'_>, name| fs::read_to_string(layer.path().join(name)).unwrap();
        assert_eq!(read(&first, "home/box/kept"), "kept\n");
        assert_eq!(read(&second, "home/box/changed"), "new\n");
        let other = server.create_box(&plan);
        assert_eq!(
            other.sh("cd /home/box; cat kept changed").out,
            "kept\nnew\n"
        );
        // Control: the box without the second snapshot.
        let lower = server.create_box(&with_root(on(server, &[&first])));
        let shown = lower.sh("cd /home/box; cat changed gone; ls emptied");
        assert_eq!(shown.out, "old\ngone\nold\n", "{}", server.name);
    });
}

#[test]
fn the_private_files_of_a_box_are_a_layer_of_the_next() {
    for server in SERVERS.iter() {
        on_each_root(server, |with_root| {
            let disks: Vec<TempDir> = (0..3).map(|_| server.directory()).collect();
            let path = |n: usize| disks[n].path().canonicalize().unwrap();
            let plan = |n: usize| {
                let layers = (0..n).rev().map(|below| box_sys::Layer::disk(path(below)));
                with_root(SandboxPlan {
                    layers: layers.collect(),
                    read_only_root: false,
                    dirs: vec!["/workspace".into()],
                    scratch: Scratch::Directory {
                        path: path(n),
                        shm: Caps::default(),
                    },
                    ..server.plan()
                })
            };
            for (n, script) in [
                "cd /home/box && mkdir -p a/b && echo 1 > a/b/f && echo x > gone && ln -s a link && echo w > /workspace/w && mkdir /tmp/t /opt/o /new && echo n > /new/n && rm -r /opt/o && touch /var/tmp/v",
                "cd /home/box && rm gone && rm -r a && mkdir a && echo 2 > a/f && echo w2 >> /workspace/w && rm -r /new /tmp/t && mkdir /opt/p",
            ]
            .iter()
            .enumerate()
            {
                let boxed = server.create_box(&plan(n));
                let output = boxed.sh(script);
                assert_eq!(output.code, Some(0), "{} {n}: {output:?}", server.name);
            }
            let boxed = server.create_box(&plan(2));
            let shown = boxed.sh("cd /home/box; ls -d *; ls -R a; readlink link; cat link/f /workspace/w; ls /opt; ls -d /new /tmp/t 2> /dev/null; ls /var/tmp; touch a/f link /workspace/w /opt/p/x && echo writable");
            let wanted = "a\nlink\na:\nf\na\n2\nw\nw2\np\nv\nwritable\n";
            assert_eq!(shown.out, wanted, "{}: {}", server.name, shown.err);
        });
    }
}

#[test]
fn a_layer_in_which_a_guest_replaced_directories_makes_a_box() {
    for server in SERVERS.iter() {
        on_each_root(server, |with_root| {
            let odd = Layer::new(server)
                .link("home", "/opt/home")
                .file("opt/home/box/kept", "kept\n")
                .link("run", "/nowhere")
                .file("dev", "a file")
                .link("proc", "/etc")
                .file("workspace", "a file")
                .link("mounted", "/etc")
                .link("var", "/tmp");
            let mounted = server.directory();
            let mut plan = with_root(on(server, &[&odd]));
            plan.read_only_root = false;
            plan.dirs = vec!["/workspace".into(), "/home/box/more".into()];
            plan.mounts.push(box_sys::Mount {
                source: box_sys::Source::Path(mounted.path().canonicalize().unwrap()),
                target: "/mounted".into(),
                writable: true,
                overlay: false,
            });
            let boxed = server.create_box(&plan);
            let shown = boxed.sh("cat /home/box/kept /workspace; touch /mounted/x /tmp/x && : > /dev/null && id -un && head -c 5 /proc/self/comm");
            assert_eq!(
                shown.out, "kept\na filebox\nhead\n",
                "{}: {}",
                server.name, shown.err
            );
            assert!(mounted.path().join("x").exists(), "{}", server.name);
            assert!(
                odd.path().join("mounted").is_symlink(),
                "the layer is unchanged"
            );
        });
    }
}

#[test]
fn spares_have_the_layers_of_their_shape() {
    for server in SERVERS.iter() {
        let (one, other) = (
            Layer::new(server).file("home/box/name", "one"),
            Layer::new(server).file("home/box/name", "other"),
        );
        let name = |layers: &[&Layer<'_>]| {
            let boxed = server.create_box(&on(server, layers));
            boxed
                .sh("cat /home/box/name; echo changed > /home/box/name")
                .out
        };
        for _ in 0..4 {
            assert_eq!(name(&[&one]), "one", "{}", server.name);
            assert_eq!(name(&[&other]), "other", "{}", server.name);
            assert_eq!(name(&[]), "", "{}", server.name);
            assert_eq!(name(&[&other, &one]), "other", "{}", server.name);
        }
        // A layer that was replaced is not used again.
        let path = one.path();
        let replaced = Layer::new(server).file("home/box/name", "replaced");
        fs::remove_dir_all(&path).unwrap();
        fs::rename(replaced.path(), &path).unwrap();
        eventually("the new layer is used", || name(&[&one]) == "replaced");
    }
}

#[test]
fn the_limits_of_private_files_hold_above_layers() {
    for server in SERVERS.iter() {
        on_each_root(server, |with_root| {
            let big = Layer::new(server).file("home/box/big", &"x".repeat(8 << 20));
            let caps = Caps {
                bytes: 4 << 20,
                inodes: 200,
            };
            let plan = SandboxPlan {
                scratch: Scratch::Memory(caps),
                ..with_root(on(server, &[&big]))
            };
            let boxed = server.create_box(&plan);
            let fits = boxed.sh("head -c 1000000 /home/box/big > /home/box/part");
            assert_eq!(fits.code, Some(0), "control: {fits:?}");
            let copied = boxed.sh("echo x >> /home/box/big");
            assert_ne!(copied.code, Some(0), "a copy of a large file: {copied:?}");
            let full = boxed.sh("cat /home/box/big > /home/box/copy");
            assert_ne!(full.code, Some(0), "{full:?}");
            let many = boxed
                .sh("cd /tmp; i=0; while [ $i -lt 300 ]; do : > f$i || exit 1; i=$((i+1)); done");
            assert_ne!(many.code, Some(0), "{many:?}");
            assert_eq!(boxed.sh("true").code, Some(0), "the box lives");
        });
    }
}

#[test]
fn a_guest_cannot_write_to_a_layer_through_its_box() {
    for server in SERVERS.iter() {
        let layer = Layer::new(server).file("home/box/file", "kept");
        let plan = on(server, &[&layer]);
        let boxed = server.create_box(&plan);
        let mounts = boxed.sh("cat /proc/self/mountinfo").out;
        assert!(mounts.contains(" overlay "), "control: {mounts}");
        let name = layer
            .path()
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned();
        assert!(!mounts.contains(&name), "{mounts}");
        // The layer is behind the overlay, also for open files and links.
        let output = boxed.sh("cd /home/box; exec 3< file; ln file linked && echo x >> linked && chmod 600 file && cat file <&3");
        assert_eq!(output.code, Some(0), "{}: {output:?}", server.name);
        let file = layer.path().join("home/box/file");
        assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
        assert_eq!(fs::metadata(&file).unwrap().nlink(), 1);
    }
}

#[test]
fn plans_with_layers_that_cannot_be_are_refused() {
    for server in SERVERS.iter() {
        let layer = Layer::new(server).file("home/box/file", "kept");
        let link = layer.directory.path().join("link");
        symlink(layer.path(), &link).unwrap();
        let create = |layers: Vec<PathBuf>| {
            let layers = layers.into_iter().map(box_sys::Layer::directory);
            let plan = SandboxPlan {
                layers: layers.collect(),
                ..server.plan()
            };
            let (control, far) = socket_pair().unwrap();
            let made = server.fork_server.create(&plan, &[far.as_fd()], &[]);
            made.map(|sandbox| (sandbox, InitClient::new(control)))
        };
        let missing = layer.path().join("missing");
        for layers in [vec![missing], vec![link], vec![layer.path(); 33]] {
            assert!(create(layers.clone()).is_err(), "{layers:?}");
        }
        check_most(server);
    }
}

/// Makes a box on as many layers as one can have.
pub(crate) fn check_most(server: &TestServer) {
    let layers: Vec<Layer<'_>> = (0..32)
        .map(|n| Layer::new(server).file(&format!("home/box/f{n}"), ""))
        .collect();
    let layers: Vec<&Layer<'_>> = layers.iter().collect();
    let boxed = server.create_box(&on(server, &layers));
    let shown = boxed.sh("ls /home/box | wc -l").out;
    assert_eq!(shown.trim(), "32", "{}", server.name);
}

#[test]
fn a_snapshot_can_have_another_user() {
    for server in SERVERS.iter() {
        let image = server.image();
        let layer = Layer::new(server).file("home/box/file", "kept\n");
        let boxed = server.create_box(&SandboxPlan {
            root: Root::Image(image.path().canonicalize().unwrap()),
            guest: guest("root", "/root", 0, 0),
            ..on(server, &[&layer])
        });
        let shown = boxed.sh("id -u; cat /home/box/file; touch /root/x && stat -c %u /root/x");
        assert_eq!(shown.out, "0\nkept\n0\n", "{}: {shown:?}", server.name);
    }
}
