//! Files in a box: which are visible, which are writable, and their owners.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::support::{SERVERS, TestServer};
use box_sys::{Caps, Mount, Root, SandboxPlan, Scratch, Source};

fn bind(path: &Path, target: &str, writable: bool) -> Mount {
    Mount {
        source: Source::Path(path.canonicalize().unwrap()),
        target: target.into(),
        writable,
        overlay: false,
    }
}

fn with_mounts(server: &TestServer, mounts: Vec<Mount>) -> SandboxPlan {
    let mut plan = server.plan();
    plan.mounts.extend(mounts);
    plan
}

#[test]
fn files_in_a_workspace_belong_to_its_owner() {
    for server in SERVERS.iter() {
        let dir = server.directory();
        std::fs::write(dir.path().join("given"), "from outside").unwrap();
        let boxed = server.create_box(&with_mounts(
            server,
            vec![bind(dir.path(), "/workspace", true)],
        ));
        let output = boxed.sh("cat /workspace/given; echo made > /workspace/new; stat -c %U /workspace /workspace/new");
        assert_eq!(
            output.out, "from outsidebox\nbox\n",
            "{}: {}",
            server.name, output.err
        );
        let made = std::fs::metadata(dir.path().join("new")).unwrap();
        assert_eq!(
            (made.uid(), made.gid()),
            (server.uid(), server.uid()),
            "{}",
            server.name
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
fn read_only_paths_cannot_be_written() {
    for server in SERVERS.iter() {
        let dir = server.directory();
        let boxed = server.create_box(&with_mounts(server, vec![bind(dir.path(), "/data", false)]));
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
                server.name
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
fn a_writable_root_is_private_to_the_box() {
    for server in SERVERS.iter() {
        let plan = SandboxPlan {
            read_only_root: false,
            dirs: vec!["/data/deep".into()],
            ..server.plan()
        };
        let boxed = server.create_box(&plan);
        assert_eq!(
            boxed
                .sh("echo x > /x && mkdir /opt/y && touch /data/deep/z && cat /x")
                .out,
            "x\n"
        );
        assert_ne!(boxed.sh("touch /usr/x").code, Some(0));
        let other = server.create_box(&plan);
        assert_ne!(
            other.run(&["test", "-e", "/x"]).code,
            Some(0),
            "another box does not see it"
        );
        assert!(!Path::new("/x").exists());
    }
}

#[test]
fn an_image_is_used_and_never_written() {
    for server in SERVERS.iter() {
        let root = server.directory();
        for dir in ["bin", "etc", "lib", "lib64", "usr"] {
            std::fs::create_dir(root.path().join(dir)).unwrap();
        }
        std::fs::write(root.path().join("etc/passwd"), "root:x:0:0::/:/bin/sh\n").unwrap();
        std::fs::write(root.path().join("etc/marker"), "an image").unwrap();
        let mut plan = server.plan();
        plan.root = Root::Image(root.path().canonicalize().unwrap());
        plan.read_only_root = false;
        plan.mounts.push(bind(Path::new("/usr"), "/opt/usr", false));
        // The image has no programs. The host's programs are mounted elsewhere and started by their
        // loader.
        let boxed = server.create_box(&plan);
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
        let output = sh(
            "read line < /etc/marker; echo $line; while read u; do echo $u; done < /etc/passwd; echo x > /new && echo written",
        );
        assert_eq!(
            output.out,
            "an image\nroot:x:0:0::/:/bin/sh\nbox:x:1000:1000::/home/box:/bin/sh\nwritten\n",
            "{}: {}",
            server.name,
            output.err
        );
        assert!(!root.path().join("new").exists());
        assert!(!root.path().join("proc").exists());
    }
}

#[test]
fn an_image_with_links_is_refused() {
    for server in SERVERS.iter() {
        let (root, outside) = (server.directory(), server.directory());
        std::os::unix::fs::symlink(outside.path(), root.path().join("dev")).unwrap();
        let mut plan = server.plan();
        plan.root = Root::Image(root.path().canonicalize().unwrap());
        assert!(server.fork_server.create(&plan, &[], &[]).is_err());
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}

#[test]
fn caps_limit_bytes_and_inodes() {
    for server in SERVERS.iter() {
        let plan = SandboxPlan {
            scratch: Scratch::Memory(Caps {
                bytes: 8 << 20,
                inodes: 500,
            }),
            ..server.plan()
        };
        for place in ["/tmp", "/var/tmp", "/dev/shm", "/home/box"] {
            let boxed = server.create_box(&plan);
            let full = format!("errno {}", libc::ENOSPC);
            assert_eq!(
                boxed.probe("fill_bytes", &format!("{place}/big")),
                full,
                "{place}"
            );
            boxed.sh(&format!("rm {place}/big"));
            assert_eq!(boxed.probe("fill_inodes", place), full, "{place}");
        }
        let roomy = server.create_box(&SandboxPlan {
            scratch: Scratch::Memory(Caps {
                bytes: 128 << 20,
                inodes: 30_000,
            }),
            ..server.plan()
        });
        assert_eq!(roomy.probe("fill_bytes", "/tmp/big"), "ok 64", "control");
        assert_eq!(roomy.probe("fill_inodes", "/tmp"), "ok 20000", "control");
    }
}

#[test]
fn a_mount_can_be_added_to_a_running_box() {
    for server in SERVERS.iter() {
        let dir = server.directory();
        std::fs::write(dir.path().join("late"), "later").unwrap();
        let boxed = server.create_box(&server.plan());
        assert_ne!(
            boxed.sh("cat /added/late").code,
            Some(0),
            "control: not there before"
        );
        server
            .fork_server
            .add_mount(boxed.sandbox(), &bind(dir.path(), "/added", false), None)
            .unwrap();
        let used = boxed.sh("cat /added/late; echo x > /added/new");
        assert_eq!(used.out, "later");
        assert!(!dir.path().join("new").exists(), "{used:?}");
        // Landlock still denies writes to a writable mount until init allows them.
        let writable = bind(dir.path(), "/writable", true);
        let added = server
            .fork_server
            .add_mount(boxed.sandbox(), &writable, None);
        added.unwrap();
        boxed.sh("echo x > /writable/new");
        let fenced = server.has("landlock");
        assert_eq!(dir.path().join("new").exists(), !fenced);
        boxed.sh("ln -s /usr /tmp/link");
        assert!(
            server
                .fork_server
                .add_mount(
                    boxed.sandbox(),
                    &bind(dir.path(), "/tmp/link/bin", false),
                    None
                )
                .is_err()
        );
        assert!(
            server
                .fork_server
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
fn a_replaced_mount_source_is_refused() {
    for server in SERVERS.iter() {
        let dir = server.directory();
        let inside = dir.path().join("w");
        std::fs::create_dir(&inside).unwrap();
        std::os::unix::fs::chown(&inside, Some(server.uid()), Some(server.uid())).unwrap();
        let opened = std::fs::File::open(&inside).unwrap();
        let mut plan = server.plan();
        plan.mounts.push(Mount {
            source: Source::Fd(0),
            target: "/w".into(),
            writable: true,
            overlay: false,
        });
        let create = || {
            server
                .fork_server
                .create(&plan, &[], &[std::os::fd::AsFd::as_fd(&opened)])
        };
        create().expect("control").destroy().unwrap();
        std::fs::rename(&inside, dir.path().join("moved")).unwrap();
        std::os::unix::fs::symlink("/etc", &inside).unwrap();
        // The descriptor still refers to the directory under its new name.
        create()
            .expect("follows the directory, not the name")
            .destroy()
            .unwrap();
        plan.mounts[1].source = Source::Path(inside);
        assert!(
            server.fork_server.create(&plan, &[], &[]).is_err(),
            "links are not followed"
        );
    }
}
