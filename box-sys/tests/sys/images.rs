//! Boxes on images: owners, users, private files, and the limits of root of a box.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use crate::support::{InitClient, SERVERS, TestServer, guest};
use box_sys::{Caps, Guest, Mount, Root, SandboxPlan, Scratch, Source, socket_pair};
use box_test_wait::blocking::eventually;

/// A plan of a box on an image, with a writable root.
fn plan(server: &TestServer, image: &Path, guest: Guest) -> SandboxPlan {
    SandboxPlan {
        root: Root::Image(image.canonicalize().unwrap()),
        read_only_root: false,
        guest,
        ..server.plan()
    }
}

fn root() -> Guest {
    guest("root", "/root", 0, 0)
}

fn app() -> Guest {
    guest("app", "/srv/app", 1234, 2345)
}

/// Commands that root without capabilities cannot run, after [`FILES`].
const DENIED: &[&str] = &[
    "chown 33:33 /etc/mine",
    "chown 60999 /etc/mine",
    "chgrp 33 /etc/mine",
    "chgrp 61000 /etc/mine",
    "chmod 4755 /etc/mine",
    "chmod g+s /etc/mine",
    "su app -c true",
    "mount -t tmpfs x /mnt",
    "mknod /dev/x c 1 3",
    "mknod /root/x b 7 0",
    "chroot / true",
    "hostname other",
    "head -c 1 /proc/1/mem",
    "ls /proc/1/fd",
    "readlink /proc/1/root",
    "readlink /proc/1/exe",
    "echo 0 > /proc/1/oom_score_adj",
    "echo 0 > /proc/sys/kernel/randomize_va_space",
    "echo 1 > /proc/sys/net/ipv4/ip_forward",
];

const FILES: &str = "echo x > /etc/mine";

#[test]
fn root_of_an_image_is_root_of_the_box_without_any_capability() {
    for server in SERVERS.iter() {
        let image = server.image();
        let boxed = server.create_box(&plan(server, image.path(), root()));
        let shown = boxed.sh(
            "id -u; id -g; stat -c %u:%g / /etc /etc/secret /root /tmp /srv/app; whoami; cat /etc/secret",
        );
        let owners = "0:0\n".repeat(6);
        let wanted = format!("0\n0\n{owners}root\nsecret\n");
        assert_eq!(shown.out, wanted, "{}: {}", server.name, shown.err);
        for denied in DENIED {
            let output = boxed.sh(&format!("{FILES} || exit 0; {denied}"));
            assert_ne!(output.code, Some(0), "{} {denied}: {output:?}", server.name);
        }
        let allowed = "chown 0:0 /etc/mine && chmod 600 /etc/mine && head -c 1 /proc/self/maps && ls /proc/self/fd > /dev/null && readlink /proc/self/exe > /dev/null";
        let control = boxed.sh(&format!("{FILES} && {allowed}"));
        assert_eq!(control.code, Some(0), "{}: {control:?}", server.name);
        let missing = boxed.sandbox().missing();
        let lacks_owners = missing.iter().any(|name| name == "image.owners");
        assert_eq!(lacks_owners, !server.privileged(), "{missing:?}");
    }
}

#[test]
fn root_of_a_box_writes_to_the_box_and_not_to_the_image() {
    for server in SERVERS.iter() {
        let image = server.image();
        let boxed = server.create_box(&plan(server, image.path(), root()));
        let change = "echo new > /etc/secret && rm /usr/share/marker && mkdir /usr/new && mv /etc/list /etc/moved && cat /etc/secret /etc/moved";
        let output = boxed.sh(change);
        let shown = (output.code, output.out.as_str());
        assert_eq!(shown, (Some(0), "new\nlist\n"), "{output:?}");
        let read = |name: &str| fs::read_to_string(image.path().join(name)).unwrap();
        assert_eq!(read("etc/secret"), "secret\n");
        assert_eq!(read("etc/list"), "list\n");
        assert_eq!(read("usr/share/marker"), "marker\n");
        let other = server.create_box(&plan(server, image.path(), root()));
        let output = other.sh("cat /etc/secret /usr/share/marker");
        assert_eq!(output.out, "secret\nmarker\n", "{}", server.name);
    }
}

/// Init must not have the id of the guest where the server has several.
#[test]
fn init_has_another_id_than_root_of_a_box() {
    for server in SERVERS.iter().filter(|server| server.privileged()) {
        let image = server.image();
        for (guest, init) in [(root(), "60999"), (app(), "0")] {
            let id = guest.id;
            let boxed = server.create_box(&plan(server, image.path(), guest));
            let ids = |pid: &str| {
                let shown = boxed.sh(&format!("grep -E '^(Uid|Gid)' /proc/{pid}/status"));
                let fields = shown
                    .out
                    .split_whitespace()
                    .filter_map(|id| id.parse().ok());
                fields.collect::<Vec<u32>>()
            };
            let init: u32 = init.parse().unwrap();
            assert_eq!(ids("1"), [init; 8], "guest {id}");
            assert!(ids("self").starts_with(&[id; 4]), "control: guest {id}");
            let signal = boxed.sh("kill -0 1");
            assert_ne!(signal.code, Some(0), "guest {id}: {signal:?}");
            assert_eq!(boxed.sh("kill -0 $$").code, Some(0), "control: guest {id}");
        }
    }
}

/// Init and the marks of commands have these ids.
#[test]
fn a_guest_has_no_reserved_id() {
    for server in SERVERS.iter() {
        let image = server.image();
        let create = |id, group| {
            let plan = plan(server, image.path(), guest("g", "/root", id, group));
            let (control, far) = socket_pair().unwrap();
            let made = server.fork_server.create(&plan, &[far.as_fd()], &[]);
            made.map(|sandbox| (sandbox, InitClient::new(control)))
        };
        for id in [60_999, 61_000, 61_999, 65_536, u32::MAX] {
            for (id, group, field) in [(id, 5, "guest.id"), (5, id, "guest.group")] {
                let refused = create(id, group).unwrap_err().to_string();
                assert!(refused.contains(field), "{refused}");
            }
        }
        for id in [60_998, 62_000, 65_534] {
            let (sandbox, client) = create(id, id).unwrap();
            let shown = client.sh("id -u; id -g").out;
            assert_eq!(shown, format!("{id}\n{id}\n"), "control");
            sandbox.destroy().unwrap();
        }
    }
}

#[test]
fn root_of_a_box_needs_an_image() {
    for server in SERVERS.iter() {
        let plan = SandboxPlan {
            guest: root(),
            ..server.plan()
        };
        let refused = server.fork_server.create(&plan, &[], &[]).unwrap_err();
        assert!(refused.to_string().contains("guest.id"), "{refused}");
    }
}

#[test]
fn an_image_runs_as_its_user_and_group() {
    for server in SERVERS.iter() {
        let image = server.image();
        let boxed = server.create_box(&plan(server, image.path(), app()));
        let output = boxed.sh(
            "id -u; id -g; id -un; cat /srv/app/kept; echo x > /srv/app/new; stat -c %u:%g /srv/app/new; grep -c app /etc/passwd",
        );
        let wanted = "1234\n2345\napp\nkept\n1234:2345\n1\n";
        assert_eq!(output.out, wanted, "{}: {}", server.name, output.err);
        if server.privileged() {
            let secret = boxed.sh("cat /etc/secret");
            assert_ne!(secret.code, Some(0), "a file of root");
        }
        let boxed = server.create_box(&plan(server, image.path(), Guest::default()));
        let output = boxed.sh("id -un; tail -n 1 /etc/passwd; touch /home/box/x && ls /home/box");
        let wanted = "box\nbox:x:1000:1000::/home/box:/bin/sh\nx\n";
        assert_eq!(output.out, wanted, "{}: {}", server.name, output.err);
    }
}

#[test]
fn files_in_a_workspace_belong_to_its_owner_for_every_guest() {
    for server in SERVERS.iter() {
        let image = server.image();
        for guest in [root(), app(), Guest::default()] {
            let workspace = server.directory();
            let ids = format!("{}:{}\n", guest.id, guest.group);
            let mut plan = plan(server, image.path(), guest);
            plan.mounts.push(Mount {
                source: Source::Path(workspace.path().canonicalize().unwrap()),
                target: "/workspace".into(),
                writable: true,
                overlay: false,
            });
            let boxed = server.create_box(&plan);
            let output = boxed.sh("echo x > /workspace/new && stat -c %u:%g /workspace/new");
            assert_eq!(output.out, ids, "{}: {output:?}", server.name);
            let made = fs::metadata(workspace.path().join("new")).unwrap();
            assert_eq!((made.uid(), made.gid()), (server.uid(), server.uid()));
        }
    }
}

#[test]
fn a_read_only_image_has_writable_private_directories() {
    for server in SERVERS.iter() {
        let image = server.image();
        let boxed = server.create_box(&SandboxPlan {
            read_only_root: true,
            dirs: vec!["/workspace".into(), "/data/deep".into()],
            ..plan(server, image.path(), root())
        });
        for place in [
            "/tmp",
            "/var/tmp",
            "/root",
            "/workspace",
            "/data/deep",
            "/dev/shm",
        ] {
            let output = boxed.sh(&format!("echo x > {place}/f && cat {place}/f"));
            assert_eq!(output.out, "x\n", "{} {place}: {output:?}", server.name);
        }
        for place in ["/etc", "/", "/usr", "/bin", "/data", "/var", "/srv"] {
            let output = boxed.sh(&format!("echo x > {place}/f"));
            assert_ne!(output.code, Some(0), "{} {place}", server.name);
        }
        let mut left = fs::read_dir(image.path().join("tmp")).unwrap();
        assert!(left.next().is_none(), "{}", server.name);
    }
}

#[test]
fn a_link_from_var_tmp_to_tmp_is_kept() {
    for server in SERVERS.iter() {
        for (target, is_kept) in [("/tmp", true), ("../tmp", true), ("/etc", false)] {
            let image = server.image();
            let place = image.path().join("var/tmp");
            fs::remove_dir(&place).unwrap();
            symlink(target, &place).unwrap();
            let plan = plan(server, image.path(), root());
            let (control, far) = socket_pair().unwrap();
            let made = server.fork_server.create(&plan, &[far.as_fd()], &[]);
            assert_eq!(made.is_ok(), is_kept, "{} {target}: {made:?}", server.name);
            if let Ok(sandbox) = made {
                let output = InitClient::new(control).sh("echo x > /var/tmp/f && cat /tmp/f");
                assert_eq!(output.out, "x\n", "{} {target}", server.name);
                sandbox.destroy().unwrap();
            }
        }
    }
}

#[test]
fn everything_that_a_box_writes_is_in_one_directory() {
    for server in SERVERS.iter() {
        let (image, disk) = (server.image(), server.directory());
        let plan = SandboxPlan {
            scratch: Scratch::Directory {
                path: disk.path().canonicalize().unwrap(),
                shm: Caps::default(),
            },
            dirs: vec!["/workspace".into()],
            ..plan(server, image.path(), root())
        };
        let boxed = server.create_box(&plan);
        let places = "tmp var/tmp root workspace opt usr etc";
        let write = format!("for d in {places}; do echo x > /$d/f || exit 1; done");
        assert_eq!(boxed.sh(&write).code, Some(0), "{}", server.name);
        for place in places.split(' ') {
            let file = disk.path().join("upper").join(place).join("f");
            assert_eq!(fs::read_to_string(&file).unwrap(), "x\n", "{place}");
        }
        drop(boxed);
        let entries = fs::read_dir(disk.path()).unwrap();
        let mut left: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["upper", "work"], "{}", server.name);
    }
}

#[test]
fn an_image_that_was_replaced_is_opened_again() {
    for server in SERVERS.iter() {
        let parent = server.directory();
        let image = parent.path().join("image");
        let install = |content: &str| {
            let made = server.image();
            fs::rename(made.path(), &image).unwrap();
            fs::write(image.join("etc/list"), content).unwrap();
        };
        install("first");
        let list = || {
            let boxed = server.create_box(&plan(server, &image, app()));
            boxed.sh("cat /etc/list").out
        };
        // The second box is a spare of the first image, or leaves one.
        assert_eq!(list(), "first");
        assert_eq!(list(), "first");
        fs::remove_dir_all(&image).unwrap();
        install("second");
        eventually("the new image is used", || list() == "second");
    }
}

/// The files of a removed image leave the disk later than its name.
#[test]
fn an_image_at_the_place_of_one_that_is_being_removed_is_used_at_once() {
    for server in SERVERS.iter() {
        let parent = server.directory();
        let image = parent.path().join("image");
        let install = |content: &str| {
            let made = server.image();
            fs::rename(made.path(), &image).unwrap();
            fs::write(image.join("etc/list"), content).unwrap();
        };
        let list = || {
            let boxed = server.create_box(&plan(server, &image, app()));
            boxed.sh("cat /etc/list").out
        };
        install("first");
        // The second box is a spare of the first image, or leaves one.
        assert_eq!(list(), "first", "{}", server.name);
        assert_eq!(list(), "first", "{}", server.name);
        fs::rename(&image, parent.path().join("removed")).unwrap();
        install("second");
        for _ in 0..3 {
            assert_eq!(list(), "second", "{}", server.name);
        }
    }
}

#[test]
fn the_mounts_of_a_box_on_an_image_name_no_directory_of_the_host() {
    for server in SERVERS.iter() {
        let image = server.image();
        let boxed = server.create_box(&SandboxPlan {
            mounts: Vec::new(),
            ..plan(server, image.path(), app())
        });
        let mounts = boxed.sh("cat /proc/self/mountinfo").out;
        assert!(mounts.contains(" overlay "), "control: {mounts}");
        let name = image.path().file_name().unwrap().to_str().unwrap();
        assert!(!mounts.contains(name), "{mounts}");
    }
}

#[test]
fn a_box_without_an_image_directory_is_refused() {
    for server in SERVERS.iter() {
        let directory = server.directory();
        let place = directory.path().canonicalize().unwrap();
        symlink(&place, place.join("link")).unwrap();
        let create = |path| {
            let plan = SandboxPlan {
                root: Root::Image(path),
                ..SandboxPlan::default()
            };
            let (control, far) = socket_pair().unwrap();
            let made = server.fork_server.create(&plan, &[far.as_fd()], &[]);
            made.map(|sandbox| (sandbox, InitClient::new(control)))
        };
        for path in [place.join("missing"), place.join("link")] {
            assert!(create(path).is_err());
        }
        // Control: an empty directory is a root without programs.
        let (sandbox, client) = create(place).unwrap();
        assert!(client.run(&["/bin/sh"]).err.starts_with("not started"));
        sandbox.destroy().unwrap();
    }
}
