//! Disks: private files of a box in a file system of their own, or in a directory.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::support::{InitClient, TestServer, server_starters, server_with};
use box_sys::{
    Caps, DISK_BYTES_PER_INODE, DiskKind, SandboxPlan, Scratch, ServerConfig, socket_pair,
};
use box_test_wait::blocking::eventually;

const MIB: u64 = 1 << 20;

/// A server of the current user with disks in this directory, and no spares.
pub(crate) fn server_in(directory: &Path, spares: usize) -> TestServer {
    let config = ServerConfig {
        cgroup_parent: format!("box-test-disks-{}", std::process::id()),
        disks: Some(directory.to_owned()),
        spares,
        ..ServerConfig::default()
    };
    server_with(&config)
}

fn with_disk(plan: SandboxPlan, bytes: u64, name: Option<&str>) -> SandboxPlan {
    SandboxPlan {
        scratch: Scratch::FileSystem {
            caps: Caps {
                bytes,
                inodes: bytes / DISK_BYTES_PER_INODE,
            },
            shm: Caps {
                bytes: 4 * MIB,
                inodes: 100,
            },
            name: name.map(PathBuf::from),
        },
        ..plan
    }
}

/// Whether this test can make disks: the current user is root.
///
/// An ordinary user has directories, which `a_directory_as_disk_works_for_every_user` tests.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The loop devices of files in a directory.
pub(crate) fn loops(directory: &Path) -> Vec<String> {
    let directory = directory.canonicalize().unwrap();
    let devices = fs::read_dir("/sys/block").unwrap().flatten();
    let files = devices
        .filter_map(|device| fs::read_to_string(device.path().join("loop/backing_file")).ok());
    files
        .filter(|file| Path::new(file.trim()).starts_with(&directory))
        .collect()
}

pub(crate) fn no_loops(directory: &Path) {
    eventually("no loop device is left", || loops(directory).is_empty());
}

#[test]
fn a_disk_is_full_at_its_limit_and_the_box_lives() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), 0);
    assert_eq!(
        server.fork_server.disk_kind().unwrap(),
        DiskKind::FileSystem
    );
    let plan = SandboxPlan {
        read_only_root: false,
        dirs: vec!["/data".into()],
        ..with_disk(server.plan(), 32 * MIB, None)
    };
    let full = format!("errno {}", libc::ENOSPC);
    for place in ["/tmp", "/var/tmp", "/home/box", "/data", "/opt", "/"] {
        let boxed = server.create_box(&plan);
        let big = format!("{}/big", place.trim_end_matches('/'));
        assert_eq!(boxed.probe("fill_bytes", &big), full, "{place}");
        let size = fs::metadata(directory.path()).unwrap().len();
        assert!(
            size < MIB,
            "the directory lists nothing of a disk without a name"
        );
        assert_eq!(
            boxed
                .sh(&format!("rm {big}; echo ok > {big}; cat {big}"))
                .out,
            "ok\n"
        );
        assert_eq!(boxed.probe("fill_inodes", place), full, "{place}");
    }
    let boxed = server.create_box(&plan);
    assert_eq!(
        boxed.probe("fill_bytes", "/dev/shm/big"),
        full,
        "memory has its own limit"
    );
    assert_eq!(boxed.probe("fill_bytes", "/tmp/big"), full);
    drop(boxed);
    let roomy = server.create_box(&with_disk(server.plan(), 256 * MIB, None));
    assert_eq!(roomy.probe("fill_bytes", "/tmp/big"), "ok 64", "control");
    assert_eq!(roomy.probe("fill_inodes", "/tmp"), "ok 20000", "control");
}

#[test]
fn a_disk_has_a_private_file_and_leaves_no_loop_device() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), 0);
    fs::create_dir(directory.path().join("one")).unwrap();
    let plan = with_disk(server.plan(), 64 * MIB, Some("one/disk"));
    let boxed = server.create_box(&plan);
    assert_eq!(loops(directory.path()).len(), 1);
    let file = fs::metadata(directory.path().join("one/disk")).unwrap();
    assert!(file.is_file());
    assert_eq!((file.permissions().mode() & 0o7777, file.uid()), (0o600, 0));
    assert_eq!(file.len(), 64 * MIB);
    assert!(file.blocks() * 512 < 4 * MIB, "the file is sparse");
    let mounts = boxed.sh("cat /proc/self/mountinfo").out;
    let disks: Vec<_> = mounts
        .lines()
        .filter(|line| line.contains(" ext4 /dev/loop"))
        .collect();
    assert!(disks.len() >= 3, "{mounts}");
    let host = directory.path().to_str().unwrap();
    for line in disks {
        assert!(line.contains("nosuid,nodev"), "{line}");
        assert!(!line.contains(host), "{line}");
    }
    // A second box cannot get the same file.
    let refused = server.fork_server.create(&plan, &[], &[]).unwrap_err();
    assert_eq!(refused.errno(), Some(libc::EEXIST), "{refused}");
    eventually("the disk without a box is gone", || {
        loops(directory.path()).len() == 1
    });
    // Removing the name removes the file once the box has ended.
    fs::remove_file(directory.path().join("one/disk")).unwrap();
    assert_eq!(boxed.sh("echo alive > /tmp/x; cat /tmp/x").out, "alive\n");
    drop(boxed);
    no_loops(directory.path());
    // A name outside, or below a link, is refused.
    std::os::unix::fs::symlink("/tmp", directory.path().join("link")).unwrap();
    for name in ["missing/disk", "link/disk"] {
        let plan = with_disk(server.plan(), 64 * MIB, Some(name));
        assert!(
            server.fork_server.create(&plan, &[], &[]).is_err(),
            "{name}"
        );
    }
    no_loops(directory.path());
}

#[test]
fn spares_have_disks_and_twenty_boxes_leave_nothing() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), 2);
    let plan = with_disk(server.plan(), 10 << 30, None);
    drop(server.create_box(&plan));
    eventually("two spares wait with their disks", || {
        loops(directory.path()).len() == 2
    });
    for n in 0..20 {
        fs::create_dir(directory.path().join(n.to_string())).unwrap();
        let name = format!("{n}/disk");
        let boxed = server.create_box(&with_disk(server.plan(), 10 << 30, Some(&name)));
        assert!(directory.path().join(&name).is_file());
        let made = boxed
            .sh("echo $(ls /tmp | wc -l); df --output=size -BG /tmp | tail -n 1; echo x > /tmp/x");
        assert_eq!(
            made.out.split_whitespace().collect::<Vec<_>>(),
            ["0", "10G"]
        );
        fs::remove_dir_all(directory.path().join(n.to_string())).unwrap();
    }
    eventually("only the spares have disks", || {
        loops(directory.path()).len() == 2
    });
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(
        !mounts.contains("/dev/loop") || !mounts.contains(" ext4 /dev/loop"),
        "{mounts}"
    );
    drop(server);
    no_loops(directory.path());
}

#[test]
fn a_disk_outlives_its_server_and_ends_with_its_box() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), 1);
    let plan = SandboxPlan {
        owned: false,
        ..with_disk(server.plan(), 64 * MIB, None)
    };
    let (control, far) = socket_pair().unwrap();
    let sandbox = server
        .fork_server
        .create(&plan, &[far.as_fd()], &[])
        .unwrap();
    let client = InitClient::new(control);
    eventually("the spare has its disk", || {
        loops(directory.path()).len() == 2
    });
    let pid = rustix::process::Pid::from_raw(server.fork_server.pid().try_into().unwrap());
    rustix::process::kill_process(pid.unwrap(), rustix::process::Signal::KILL).unwrap();
    eventually("the spare has ended", || loops(directory.path()).len() == 1);
    assert_eq!(client.sh("echo kept > /tmp/x; cat /tmp/x").out, "kept\n");
    sandbox.destroy().unwrap();
    no_loops(directory.path());
}

/// Number of dirty pages of a file.
fn dirty(file: &fs::File) -> u64 {
    let range = [0_u64; 2];
    let mut counts = [0_u64; 5];
    // SAFETY: the call reads two numbers and writes five.
    let result = unsafe {
        libc::syscall(
            451,
            std::os::fd::AsRawFd::as_raw_fd(file),
            range.as_ptr(),
            counts.as_mut_ptr(),
            0,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    counts[1]
}

#[test]
fn the_end_of_a_box_writes_neither_its_disk_nor_the_hosts() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = server_in(directory.path(), 0);
    // The kernel may write the pages on its own, and then the test tries again.
    eventually(
        "the end of a box leaves the host's dirty pages alone",
        || {
            let boxed = server.create_box(&with_disk(server.plan(), 256 * MIB, None));
            assert_eq!(boxed.probe("fill_bytes", "/tmp/big"), "ok 64");
            let host = tempfile::tempfile_in(directory.path()).unwrap();
            std::io::Write::write_all(&mut &host, &vec![1; 4 << 20]).unwrap();
            let before = dirty(&host);
            drop(boxed);
            no_loops(directory.path());
            let after = dirty(&host);
            rustix::fs::syncfs(&host).unwrap();
            assert_eq!(dirty(&host), 0, "control: a sync is seen");
            before > 0 && after == before
        },
    );
}

#[test]
fn a_directory_as_disk_works_for_every_user() {
    for (name, start) in server_starters() {
        let config = ServerConfig {
            cgroup_parent: format!("box-test-dirs-{name}-{}", std::process::id()),
            ..ServerConfig::default()
        };
        let server = start(&config);
        // Without a directory of disks the server makes none.
        assert_eq!(server.disk_kind().unwrap(), DiskKind::Directory, "{name}");
        let refused = server.create(&with_disk(SandboxPlan::default(), 64 * MIB, None), &[], &[]);
        assert!(refused.is_err(), "{name}");
        let directory = tempfile::tempdir().unwrap();
        let user = if name == "ordinary" && is_root() {
            crate::support::ORDINARY_UID
        } else {
            rustix::process::geteuid().as_raw()
        };
        std::os::unix::fs::chown(directory.path(), Some(user), Some(user)).unwrap();
        let plan = SandboxPlan {
            scratch: Scratch::Directory {
                path: directory.path().canonicalize().unwrap(),
                shm: Caps::default(),
            },
            dirs: vec!["/data".into()],
            ..SandboxPlan::default()
        };
        let (control, far) = socket_pair().unwrap();
        let sandbox = server.create(&plan, &[far.as_fd()], &[]).unwrap();
        let client = InitClient::new(control);
        let wrote = client.sh("for d in /tmp /home/box /data /dev/shm; do echo x > $d/f || exit 1; done; ln /tmp/f /tmp/g");
        assert_eq!(wrote.code, Some(0), "{name}: {wrote:?}");
        assert_eq!(
            fs::read_to_string(directory.path().join("upper/tmp/g")).unwrap(),
            "x\n"
        );
        assert_eq!(
            fs::read_to_string(directory.path().join("upper/data/f")).unwrap(),
            "x\n"
        );
        assert!(
            !directory.path().join("shm").exists(),
            "shared memory is memory"
        );
        let outside =
            client.sh("ls /s /tmp/.. 2>&1; cat /proc/self/mountinfo | grep -c ' / /tmp '");
        assert!(!outside.out.contains("work"), "{outside:?}");
        sandbox.destroy().unwrap();
    }
}
