//! Disks of ended boxes: layers of later boxes, and private files again.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use box_sys::{
    Caps, DISK_BYTES_PER_INODE, Layer, Root, SandboxPlan, Scratch, repair_disk, settle_disk,
    socket_pair,
};
use box_test_wait::LONG;

use crate::disks::{is_root, loops, no_loops, server_in};
use crate::support::{TestServer, guest};

const MIB: u64 = 1 << 20;

const SHM: Caps = Caps {
    bytes: 4 * MIB,
    inodes: 100,
};

/// Directory of disks, with a server that is root and an image.
struct Place {
    directory: tempfile::TempDir,
    server: TestServer,
    image: tempfile::TempDir,
}

impl Place {
    fn new(spares: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let server = server_in(directory.path(), spares);
        let image = server.image();
        Self {
            directory,
            server,
            image,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    fn roots(&self) -> [Root; 2] {
        [
            Root::Host,
            Root::Image(self.image.path().canonicalize().unwrap()),
        ]
    }

    fn plan(&self, root: &Root, layers: &[Layer], scratch: Scratch) -> SandboxPlan {
        SandboxPlan {
            root: root.clone(),
            layers: layers.to_vec(),
            read_only_root: false,
            dirs: vec!["/workspace".into()],
            guest: guest("box", "/home/box", 1000, 1000),
            scratch,
            ..self.server.plan()
        }
    }

    /// The number of loop devices with these files. Spares have disks of their own.
    fn loops_of(&self, files: &[&Path]) -> usize {
        let all = loops(self.directory.path());
        let is_one = |file: &&String| files.iter().any(|path| Path::new(file.trim()) == *path);
        all.iter().filter(is_one).count()
    }

    /// Ends the server, which leaves no loop device.
    fn ends(self) {
        drop(self.server);
        no_loops(self.directory.path());
    }

    /// Runs a script in a box with a new disk, and keeps that.
    fn made(&self, root: &Root, layers: &[Layer], name: &str, script: &str) -> PathBuf {
        let scratch = new_disk(name, 64 * MIB);
        self.run(&self.plan(root, layers, scratch), script);
        let path = self.path(name);
        settle_disk(&path, LONG).unwrap();
        path
    }

    /// Runs a script in a box and ends it. Its disk stays.
    fn run(&self, plan: &SandboxPlan, script: &str) -> String {
        let boxed = self.server.create_box(plan);
        let output = boxed.sh(script);
        assert_eq!(output.code, Some(0), "{script}: {output:?}");
        boxed.sandbox().keep_disk().unwrap();
        output.out
    }
}

fn new_disk(name: &str, bytes: u64) -> Scratch {
    Scratch::FileSystem {
        caps: Caps {
            bytes,
            inodes: bytes / DISK_BYTES_PER_INODE,
        },
        shm: SHM,
        name: Some(name.into()),
    }
}

fn used_disk(path: &Path) -> Scratch {
    Scratch::File {
        path: path.to_owned(),
        shm: SHM,
    }
}

/// Makes files of every kind in `/home/box`.
const FILES: &str = "set -e; cd /home/box; mkdir -p dir/deep private; chmod 700 private; echo secret > private/s; chmod 400 private/s; \
    echo one > dir/one; ln dir/one dir/deep/same; ln -s ../one dir/deep/link; mkdir gone; echo g > gone/g; echo old > changed; \
    touch -d @1.5 old; echo w > /workspace/w; mkdir /new; echo n > /new/n; chmod 1777 /new";

/// Shows them.
const SHOW: &str = "set -e; cd /home/box; cat dir/one dir/deep/link /workspace/w /new/n private/s; \
    stat -c '%n %a %U %F' private private/s dir dir/one /new; stat -c '%n %Y' old; stat -c %h dir/deep/same; ls -A";

#[test]
fn the_disk_of_an_ended_box_is_a_layer_of_ten_boxes_at_once() {
    if !is_root() {
        return;
    }
    for spares in [0, 2] {
        let place = Place::new(spares);
        for (n, root) in place.roots().iter().enumerate() {
            let first = format!("{n}-first");
            let path = place.made(root, &[], &first, FILES);
            let shown = {
                let boxed = place
                    .server
                    .create_box(&place.plan(root, &[], used_disk(&path)));
                boxed.sh(SHOW).out
            };
            assert!(shown.contains("private/s 400 box regular file"), "{shown}");
            settle_disk(&path, LONG).unwrap();
            let change = "set -e; cd /home/box; rm -r gone; echo new > changed; rm -r dir; mkdir dir; echo two > dir/one; mkdir dir/deep; ln dir/one dir/deep/same; ln -s ../one dir/deep/link; rm /workspace/w; echo w2 > /workspace/w";
            let top = place.made(root, &[Layer::disk(&path)], &format!("{n}-top"), change);
            let layers = [Layer::disk(&top), Layer::disk(&path)];
            let plan = place.plan(root, &layers, Scratch::default());
            let boxes: Vec<_> = (0..10).map(|_| place.server.create_box(&plan)).collect();
            for (at, boxed) in boxes.iter().enumerate() {
                let shown = boxed.sh("set -e; cd /home/box; cat dir/one dir/deep/link changed /workspace/w /new/n; ls -A; stat -c '%a %U' private/s");
                let wanted = "two\ntwo\nnew\nw2\nn\nchanged\ndir\nold\nprivate\n400 box\n";
                assert_eq!(shown.out, wanted, "{at} {root:?} {}", shown.err);
                let script =
                    format!("cd /home/box; echo {at} > changed; rm -r dir; ls /new; cat changed");
                assert_eq!(boxed.sh(&script).out, format!("n\n{at}\n"));
            }
            assert_eq!(place.loops_of(&[&top, &path]), 2, "one for each disk");
            drop(boxes);
            settle_disk(&top, LONG).unwrap();
            settle_disk(&path, LONG).unwrap();
            assert_eq!(place.loops_of(&[&top, &path]), 0);
            // Control: a box without the upper disk.
            let plan = place.plan(root, &[Layer::disk(&path)], Scratch::default());
            assert_eq!(place.run(&plan, SHOW), shown, "{root:?}");
        }
        place.ends();
    }
}

/// Checks two boxes on the disk of a third, and one that continues on it.
pub(crate) fn check_shared(server: &TestServer, directory: &Path) {
    let plan = |layers: Vec<Layer>, scratch| SandboxPlan {
        layers,
        scratch,
        ..server.plan()
    };
    let boxed = server.create_box(&plan(vec![], new_disk("shared", 64 * MIB)));
    assert_eq!(boxed.sh("echo kept > /home/box/kept").code, Some(0));
    boxed.sandbox().keep_disk().unwrap();
    drop(boxed);
    let path = directory.canonicalize().unwrap().join("shared");
    settle_disk(&path, LONG).unwrap();
    let layers = plan(vec![Layer::disk(&path)], Scratch::default());
    let readers = [server.create_box(&layers), server.create_box(&layers)];
    for boxed in &readers {
        let shown = boxed.sh("cd /home/box; cat kept; rm kept; ls");
        assert_eq!(shown.out, "kept\n", "{}", shown.err);
    }
    drop(readers);
    let boxed = server.create_box(&plan(vec![], used_disk(&path)));
    assert_eq!(boxed.sh("cat /home/box/kept").out, "kept\n");
}

#[test]
fn a_box_continues_on_its_disk_with_the_same_limit() {
    if !is_root() {
        return;
    }
    let place = Place::new(2);
    for (n, root) in place.roots().iter().enumerate() {
        let below = place.made(
            root,
            &[],
            &format!("{n}-below"),
            "echo below > /home/box/below; echo x > /home/box/x",
        );
        for layers in [vec![], vec![Layer::disk(&below)]] {
            let name = format!("{n}-{}", layers.len());
            let path = place.made(root, &layers, &name, FILES);
            let plan = place.plan(root, &layers, used_disk(&path));
            for round in 0..3 {
                let script = format!(
                    "cd /home/box; [ {round} = 0 ] || cat round; echo {round} > round; rm -rf x; cat private/s; ls /new; ls below x 2> /dev/null; true"
                );
                let shown = place.run(&plan, &script);
                let before = if round == 0 {
                    String::new()
                } else {
                    format!("{}\n", round - 1)
                };
                let more = if layers.is_empty() { "" } else { "below\n" };
                assert_eq!(shown, format!("{before}secret\nn\n{more}"), "{name}");
                settle_disk(&path, LONG).unwrap();
            }
            let boxed = place.server.create_box(&plan);
            let full = format!("errno {}", libc::ENOSPC);
            assert_eq!(boxed.probe("fill_bytes", "/home/box/big"), full, "{name}");
            assert_eq!(
                boxed
                    .sh("rm /home/box/big; echo ok > /home/box/ok; cat /home/box/ok")
                    .out,
                "ok\n"
            );
            // The disk has one user.
            let create = |plan: &SandboxPlan| {
                let (_control, far) = socket_pair().unwrap();
                place.server.fork_server.create(plan, &[far.as_fd()], &[])
            };
            assert!(create(&plan).is_err(), "two writers");
            let as_layer = place.plan(root, &[Layer::disk(&path)], Scratch::default());
            assert!(create(&as_layer).is_err(), "a reader and a writer");
            assert_eq!(
                boxed.sh("cat /home/box/ok").out,
                "ok\n",
                "the box is unharmed"
            );
            drop(boxed);
            settle_disk(&path, LONG).unwrap();
            assert_eq!(place.run(&as_layer, "cat /home/box/ok"), "ok\n", "control");
            // From a layer with spares back to the private files.
            assert_eq!(place.run(&plan, "cat /home/box/round"), "2\n");
            settle_disk(&path, LONG).unwrap();
        }
    }
    place.ends();
}

#[test]
fn a_later_server_uses_the_mounts_of_an_earlier_one() {
    if !is_root() {
        return;
    }
    let place = Place::new(0);
    let path = place.made(&Root::Host, &[], "one", "echo kept > /home/box/kept");
    let plan = place.plan(&Root::Host, &[Layer::disk(&path)], Scratch::default());
    let other = server_in(place.directory.path(), 0);
    let (first, second) = (place.server.create_box(&plan), other.create_box(&plan));
    for boxed in [&first, &second] {
        assert_eq!(boxed.sh("cat /home/box/kept").out, "kept\n");
    }
    assert_eq!(loops(place.directory.path()).len(), 1);
    drop(first);
    assert_eq!(
        second.sh("cat /home/box/kept; echo m > /home/box/m").out,
        "kept\n"
    );
    drop(second);
    no_loops(place.directory.path());
    settle_disk(&path, LONG).unwrap();
}

#[test]
fn a_disk_after_a_crash_of_the_machine_is_checked() {
    if !is_root() {
        return;
    }
    let place = Place::new(0);
    let path = place.made(&Root::Host, &[], "one", "echo kept > /home/box/kept");
    let state = |value: Option<u16>| {
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        if let Some(value) = value {
            file.write_all_at(&value.to_le_bytes(), 1024 + 0x3A)
                .unwrap();
        }
        let mut found = [0; 2];
        file.read_exact_at(&mut found, 1024 + 0x3A).unwrap();
        u16::from_le_bytes(found)
    };
    assert_eq!(state(None) & 1, 1, "unmounted in order");
    state(Some(0));
    repair_disk(&path).unwrap();
    assert_eq!(state(None) & 1, 1, "checked");
    let plan = place.plan(&Root::Host, &[], used_disk(&path));
    assert_eq!(place.run(&plan, "cat /home/box/kept"), "kept\n");
    settle_disk(&path, LONG).unwrap();
    // Files without a file system are errors and nothing else.
    for content in [Vec::new(), vec![0; 1 << 20]] {
        let bad = place.path("bad");
        fs::write(&bad, content).unwrap();
        assert!(repair_disk(&bad).is_err());
        let (_control, far) = socket_pair().unwrap();
        let plan = place.plan(&Root::Host, &[Layer::disk(&bad)], Scratch::default());
        let made = place.server.fork_server.create(&plan, &[far.as_fd()], &[]);
        assert!(made.is_err());
        let plan = place.plan(&Root::Host, &[], used_disk(&bad));
        let made = place.server.fork_server.create(&plan, &[far.as_fd()], &[]);
        assert!(made.is_err());
    }
    no_loops(place.directory.path());
}
