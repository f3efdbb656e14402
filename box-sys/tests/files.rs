//! What a box sees of files, what it may write, and to whom what it writes belongs.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use box_sys::{Caps, Mount, Root, SandboxPlan, Source};
use support::{MACHINES, Machine};

fn bind(path: &Path, target: &str, writable: bool) -> Mount {
    Mount {
        source: Source::Path(path.canonicalize().unwrap()),
        target: target.into(),
        writable,
    }
}

fn with_mounts(machine: &Machine, mounts: Vec<Mount>) -> SandboxPlan {
    let mut plan = machine.plan();
    plan.mounts.extend(mounts);
    plan
}

#[test]
fn a_workspace_is_the_owners() {
    for machine in MACHINES.iter() {
        let dir = machine.directory();
        std::fs::write(dir.path().join("given"), "from outside").unwrap();
        let boxed = machine.boxed(&with_mounts(
            machine,
            vec![bind(dir.path(), "/workspace", true)],
        ));
        let said = boxed.sh("cat /workspace/given; echo made > /workspace/new; stat -c %U /workspace /workspace/new");
        assert_eq!(
            said.out, "from outsidebox\nbox\n",
            "{}: {}",
            machine.name, said.err
        );
        let made = std::fs::metadata(dir.path().join("new")).unwrap();
        assert_eq!(
            (made.uid(), made.gid()),
            (machine.uid(), machine.uid()),
            "{}",
            machine.name
        );
        for (name, errno) in [
            ("make_setuid_chmod", libc::EPERM),
            ("make_setuid_open", libc::EPERM),
        ] {
            assert_eq!(boxed.probe(name, "/workspace/s"), format!("errno {errno}"));
        }
        for entry in std::fs::read_dir(dir.path()).unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().mode() & 0o6000, 0);
        }
    }
}

#[test]
fn read_only_is_read_only() {
    for machine in MACHINES.iter() {
        let dir = machine.directory();
        let boxed = machine.boxed(&with_mounts(
            machine,
            vec![bind(dir.path(), "/data", false)],
        ));
        for place in [
            "/data/x",
            "/x",
            "/usr/x",
            "/etc/x",
            "/dev/x",
            "/run/x",
            "/home/x",
            "/proc/sys/kernel/hostname",
        ] {
            assert_ne!(
                boxed.sh(&format!("echo x > {place}")).code,
                Some(0),
                "{} {place}",
                machine.name
            );
        }
        for place in [
            "/tmp/x",
            "/var/tmp/x",
            "/home/box/x",
            "/dev/shm/x",
            "/dev/null",
        ] {
            assert_eq!(
                boxed.sh(&format!("echo x > {place}")).code,
                Some(0),
                "control: {place}"
            );
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_writable_root_is_the_boxs_own() {
    for machine in MACHINES.iter() {
        let plan = SandboxPlan {
            read_only_root: false,
            dirs: vec!["/data/deep".into()],
            ..machine.plan()
        };
        let boxed = machine.boxed(&plan);
        assert_eq!(
            boxed
                .sh("echo x > /x && mkdir /opt/y && touch /data/deep/z && cat /x")
                .out,
            "x\n"
        );
        assert_ne!(boxed.sh("touch /usr/x").code, Some(0));
        let other = machine.boxed(&plan);
        assert_ne!(
            other.run(&["test", "-e", "/x"]).code,
            Some(0),
            "another box does not see it"
        );
        assert!(!Path::new("/x").exists());
    }
}

#[test]
fn a_given_root_is_used_and_never_written() {
    for machine in MACHINES.iter() {
        let root = machine.directory();
        for dir in ["bin", "etc", "lib", "lib64", "usr"] {
            std::fs::create_dir(root.path().join(dir)).unwrap();
        }
        std::fs::write(root.path().join("etc/passwd"), "root:x:0:0::/:/bin/sh\n").unwrap();
        std::fs::write(root.path().join("etc/marker"), "an image").unwrap();
        let mut plan = machine.plan();
        plan.root = Root::Directory(root.path().canonicalize().unwrap());
        plan.read_only_root = false;
        plan.mounts.push(bind(Path::new("/usr"), "/opt/usr", false));
        // No program of its own: the machine's are lent from an odd place, started by their loader.
        let boxed = machine.boxed(&plan);
        let loader = std::fs::canonicalize("/lib64/ld-linux-x86-64.so.2").unwrap();
        let loader = format!("/opt{}", loader.display());
        let libraries = "/opt/usr/lib/x86_64-linux-gnu";
        let sh = |script: &str| {
            boxed.run(&[
                &loader,
                "--library-path",
                libraries,
                "/opt/usr/bin/sh",
                "-c",
                script,
            ])
        };
        let said = sh(
            "read line < /etc/marker; echo $line; while read u; do echo $u; done < /etc/passwd; echo x > /new && echo written",
        );
        assert_eq!(
            said.out,
            "an image\nroot:x:0:0::/:/bin/sh\nbox:x:1000:1000::/home/box:/bin/sh\nwritten\n",
            "{}: {}",
            machine.name,
            said.err
        );
        assert!(!root.path().join("new").exists());
        assert!(!root.path().join("proc").exists());
    }
}

#[test]
fn a_root_with_links_in_it_is_refused() {
    for machine in MACHINES.iter() {
        let (root, outside) = (machine.directory(), machine.directory());
        std::os::unix::fs::symlink(outside.path(), root.path().join("dev")).unwrap();
        let mut plan = machine.plan();
        plan.root = Root::Directory(root.path().canonicalize().unwrap());
        assert!(machine.server.create(&plan, &[], &[]).is_err());
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}

#[test]
fn caps_bite_for_bytes_and_inodes() {
    for machine in MACHINES.iter() {
        let plan = SandboxPlan {
            caps: Caps {
                bytes: 8 << 20,
                inodes: 500,
            },
            ..machine.plan()
        };
        for place in ["/tmp", "/var/tmp", "/dev/shm", "/home/box"] {
            let boxed = machine.boxed(&plan);
            let full = format!("errno {}", libc::ENOSPC);
            assert_eq!(
                boxed.probe("fill_bytes", &format!("{place}/big")),
                full,
                "{place}"
            );
            boxed.sh(&format!("rm {place}/big"));
            assert_eq!(boxed.probe("fill_inodes", place), full, "{place}");
        }
        let roomy = machine.boxed(&SandboxPlan {
            caps: Caps {
                bytes: 128 << 20,
                inodes: 30_000,
            },
            ..machine.plan()
        });
        assert_eq!(roomy.probe("fill_bytes", "/tmp/big"), "ok 64", "control");
        assert_eq!(roomy.probe("fill_inodes", "/tmp"), "ok 20000", "control");
    }
}

#[test]
fn a_mount_can_be_added_while_the_box_runs() {
    for machine in MACHINES.iter() {
        let dir = machine.directory();
        std::fs::write(dir.path().join("late"), "later").unwrap();
        let boxed = machine.boxed(&machine.plan());
        assert_ne!(
            boxed.sh("cat /added/late").code,
            Some(0),
            "control: not there before"
        );
        machine
            .server
            .add_mount(boxed.sandbox(), &bind(dir.path(), "/added", false), None)
            .unwrap();
        let used = boxed.sh("cat /added/late; echo x > /added/new");
        assert_eq!(used.out, "later");
        assert!(!dir.path().join("new").exists(), "{used:?}");
        // A writable one is still behind the second fence, until the first process opens that.
        let writable = bind(dir.path(), "/writable", true);
        let added = machine.server.add_mount(boxed.sandbox(), &writable, None);
        added.unwrap();
        boxed.sh("echo x > /writable/new");
        let fenced = machine.has("landlock");
        assert_eq!(dir.path().join("new").exists(), !fenced);
        boxed.sh("ln -s /usr /tmp/link");
        assert!(
            machine
                .server
                .add_mount(
                    boxed.sandbox(),
                    &bind(dir.path(), "/tmp/link/bin", false),
                    None
                )
                .is_err()
        );
        assert!(
            machine
                .server
                .add_mount(
                    boxed.sandbox(),
                    &bind(dir.path(), "/proc/self", false),
                    None
                )
                .is_err()
        );
    }
}

#[test]
fn a_source_that_was_swapped_is_refused() {
    for machine in MACHINES.iter() {
        let dir = machine.directory();
        let inside = dir.path().join("w");
        std::fs::create_dir(&inside).unwrap();
        std::os::unix::fs::chown(&inside, Some(machine.uid()), Some(machine.uid())).unwrap();
        let opened = std::fs::File::open(&inside).unwrap();
        let mut plan = machine.plan();
        plan.mounts.push(Mount {
            source: Source::Fd(0),
            target: "/w".into(),
            writable: true,
        });
        let create = || {
            machine
                .server
                .create(&plan, &[], &[std::os::fd::AsFd::as_fd(&opened)])
        };
        create().expect("control").destroy().unwrap();
        std::fs::rename(&inside, dir.path().join("moved")).unwrap();
        std::os::unix::fs::symlink("/etc", &inside).unwrap();
        // By its own name it is still found, under the new one.
        create()
            .expect("follows the directory, not the name")
            .destroy()
            .unwrap();
        plan.mounts[1].source = Source::Path(inside);
        assert!(
            machine.server.create(&plan, &[], &[]).is_err(),
            "links are not followed"
        );
    }
}
