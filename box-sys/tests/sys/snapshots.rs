//! Snapshots through the fork server, which has the rights over the files of its boxes.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use box_sys::{
    Cgroups, Guest, Layer, Root, Sandbox, SandboxPlan, SnapshotLimits, SnapshotSize, socket_pair,
};
use box_test_wait::blocking::eventually;
use rustix::process::PidfdFlags;
use tempfile::TempDir;

use crate::support::{SERVERS, TestBox, TestServer, guest};

const FREE: SnapshotLimits = SnapshotLimits {
    bytes: u64::MAX,
    entries: u64::MAX,
};

/// Directory of snapshots that the server's user owns.
fn place(server: &TestServer) -> TempDir {
    server.directory()
}

fn target(server: &TestServer, place: &TempDir, name: &str) -> (PathBuf, File) {
    let path = place.path().canonicalize().unwrap().join(name);
    fs::create_dir(&path).unwrap();
    std::os::unix::fs::chown(&path, Some(server.uid()), Some(server.uid())).unwrap();
    let file = File::open(&path).unwrap();
    (path, file)
}

fn snapshot(
    server: &TestServer,
    sandbox: &Sandbox,
    to: &File,
    limits: SnapshotLimits,
) -> box_sys::Result<SnapshotSize> {
    let copy = server
        .fork_server
        .start_snapshot(sandbox, to.as_fd(), limits);
    copy?.finish()
}

/// A snapshot of a box whose commands have ended.
fn taken(boxed: &TestBox<'_>, server: &TestServer, place: &TempDir, name: &str) -> PathBuf {
    let (path, to) = target(server, place, name);
    snapshot(server, boxed.sandbox(), &to, FREE).unwrap();
    path
}

#[test]
fn files_that_no_user_of_the_host_can_read_are_copied() {
    for server in SERVERS.iter() {
        let place = place(server);
        let boxed = server.create_box(&SandboxPlan {
            read_only_root: false,
            ..server.plan()
        });
        let made = boxed.sh("cd /home/box && mkdir -p locked/in && echo x > locked/in/f && chmod 000 locked/in/f locked/in locked && echo y > f && chmod 200 f");
        assert_eq!(made.code, Some(0), "{made:?}");
        let path = taken(&boxed, server, &place, "one");
        drop(boxed);
        let owner = fs::symlink_metadata(path.join("home/box/f")).unwrap().uid();
        let wanted = if server.privileged() {
            1000
        } else {
            server.uid()
        };
        assert_eq!(owner, wanted, "the id in the box, or the user");
        let boxed = server.create_box(&SandboxPlan {
            layers: vec![Layer::directory(path)],
            ..server.plan()
        });
        let shown = boxed
            .sh("cd /home/box; stat -c '%a %U' locked f; chmod -R u+rwx . && cat locked/in/f f");
        assert_eq!(
            shown.out, "0 box\n200 box\nx\ny\n",
            "{}: {shown:?}",
            server.name
        );
    }
}

#[test]
fn changes_to_an_image_are_in_a_snapshot() {
    for server in SERVERS.iter() {
        let (place, image) = (place(server), server.image());
        let plan = |layers: &[&Path]| SandboxPlan {
            root: Root::Image(image.path().canonicalize().unwrap()),
            layers: layers
                .iter()
                .map(|layer| Layer::directory(*layer))
                .collect(),
            read_only_root: false,
            guest: guest("root", "/root", 0, 0),
            ..server.plan()
        };
        let boxed = server.create_box(&plan(&[]));
        let change = "rm /usr/share/marker && rm -r /srv/app && mkdir /srv/app && echo n > /srv/app/new && echo more >> /etc/list && chmod 600 /etc/list && echo r > /root/r";
        let changed = boxed.sh(change);
        assert_eq!(changed.code, Some(0), "{changed:?}");
        let one = taken(&boxed, server, &place, "one");
        // Running programs see no difference.
        assert_eq!(boxed.sh("cat /etc/list").out, "list\nmore\n");
        drop(boxed);
        let show = "ls /usr/share /srv/app; cat /etc/list /root/r; stat -c '%a %u' /etc/list /root/r; cat /etc/secret";
        let wanted = "/srv/app:\nnew\n\n/usr/share:\nlist\nmore\nr\n600 0\n644 0\nsecret\n";
        let boxed = server.create_box(&plan(&[&one]));
        let shown = boxed.sh(show);
        assert_eq!(shown.out, wanted, "{}: {}", server.name, shown.err);
        boxed.sh("echo back > /usr/share/marker; rm /srv/app/new /root/r");
        let two = taken(&boxed, server, &place, "two");
        drop(boxed);
        let boxed = server.create_box(&plan(&[&two, &one]));
        let shown = boxed.sh("cat /usr/share/marker; ls -A /srv/app /root");
        assert_eq!(shown.out, "back\n/root:\n\n/srv/app:\n", "{}", server.name);
        // Control: each snapshot alone.
        let boxed = server.create_box(&plan(&[&one]));
        assert_eq!(boxed.sh("cat /usr/share/marker").code, Some(1));
    }
}

#[test]
fn limits_and_cancelling_end_a_copy() {
    for server in SERVERS.iter() {
        let place = place(server);
        let boxed = server.create_box(&server.plan());
        let many = "cd /tmp; i=0; while [ $i -lt 3000 ]; do echo x > $i; i=$((i+1)); done; head -c 50000000 /dev/zero > big";
        assert_eq!(boxed.sh(many).code, Some(0));
        for (name, bytes, entries) in [("bytes", 1 << 20, u64::MAX), ("files", u64::MAX, 1000)] {
            let (_, to) = target(server, &place, name);
            let limits = SnapshotLimits { bytes, entries };
            let error = snapshot(server, boxed.sandbox(), &to, limits).unwrap_err();
            assert!(
                matches!(error, box_sys::Error::Invalid(_)),
                "{name}: {error:?}"
            );
        }
        // After the cancelling nothing writes any more, so the directory can be removed.
        for n in 0..10 {
            let (path, to) = target(server, &place, &format!("cancelled-{n}"));
            let copy = server
                .fork_server
                .start_snapshot(boxed.sandbox(), to.as_fd(), FREE);
            let copy = copy.unwrap();
            if n > 0 {
                eventually("the copy begins", || {
                    fs::read_dir(&path).unwrap().count() > n % 3
                });
            }
            copy.cancel();
            fs::remove_dir_all(&path).unwrap();
        }
        // A directory with files is not used.
        let (path, to) = target(server, &place, "full");
        fs::create_dir(path.join("tmp")).unwrap();
        assert!(snapshot(server, boxed.sandbox(), &to, FREE).is_err());
        // Control, and the server still makes boxes.
        let (path, to) = target(server, &place, "whole");
        let size = snapshot(server, boxed.sandbox(), &to, FREE).unwrap();
        assert!(size.entries > 3000 && size.bytes > 50_000_000, "{size:?}");
        assert_eq!(fs::read_dir(path.join("tmp")).unwrap().count(), 3001);
        assert_eq!(server.create_box(&server.plan()).sh("true").code, Some(0));
    }
}

/// The agent of an adopted box sends the directory, and a guest may control that agent.
#[test]
fn only_the_directory_of_the_record_is_copied_after_an_adoption() {
    for server in SERVERS.iter() {
        let (place, other) = (place(server), server.directory());
        fs::write(other.path().join("secret"), "of the host").unwrap();
        let (_control, far) = socket_pair().unwrap();
        let plan = SandboxPlan {
            guest: Guest::default(),
            ..server.plan()
        };
        let sandbox = server
            .fork_server
            .create(&plan, &[far.as_fd()], &[])
            .unwrap();
        let record = sandbox.record();
        assert!(record.upper.is_some());
        let cgroups = Arc::new(Cgroups::open("box"));
        let adopt = |upper: Option<OwnedFd>| {
            let pid = rustix::process::Pid::from_raw(record.pid).unwrap();
            let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
            let mounts = sandbox.mount_namespace().try_clone_to_owned().unwrap();
            Sandbox::adopt(
                pidfd,
                mounts,
                upper,
                Vec::new(),
                record.clone(),
                cgroups.clone(),
            )
        };
        let upper = sandbox
            .private_files()
            .unwrap()
            .try_clone_to_owned()
            .unwrap();
        let wrong = OwnedFd::from(File::open(other.path()).unwrap());
        for (name, upper, works) in [
            ("right", Some(upper), true),
            ("wrong", Some(wrong), false),
            ("none", None, false),
        ] {
            let (path, to) = target(server, &place, name);
            let adopted = adopt(upper);
            let copied = snapshot(server, &adopted, &to, FREE);
            assert_eq!(copied.is_ok(), works, "{name}: {copied:?}");
            assert!(!path.join("secret").exists());
        }
        sandbox.destroy().unwrap();
    }
}
