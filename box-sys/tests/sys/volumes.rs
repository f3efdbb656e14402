//! Volumes: file systems in files that outlive boxes and servers.

use std::fs;
use std::path::{Path, PathBuf};

use crate::disks::{is_root, loops, no_loops, server_in};
use crate::support::TestServer;
use box_sys::{
    Mount, SandboxPlan, ServerConfig, Source, create_volume, resize_volume, volume_used,
};

const MIB: u64 = 1 << 20;

/// The user and group of the guest on the host.
fn guest() -> (u32, u32) {
    let id = ServerConfig::default().id_base + SandboxPlan::default().guest.id;
    (id, id)
}

/// Creates a volume in this directory and returns its file.
fn new_volume(directory: &Path, name: &str, bytes: u64) -> PathBuf {
    let directory = directory.canonicalize().unwrap().join(name);
    fs::create_dir(&directory).unwrap();
    let file = directory.join("disk");
    create_volume(&file, bytes, guest()).unwrap();
    file
}

fn plan(server: &TestServer, file: &Path, sub_path: Option<&str>, writable: bool) -> SandboxPlan {
    let mut plan = server.plan();
    plan.mounts.push(Mount {
        source: Source::Volume {
            file: file.to_owned(),
            sub_path: sub_path.map(PathBuf::from),
        },
        target: "/data".into(),
        writable,
        overlay: false,
    });
    plan
}

#[test]
fn a_volume_has_one_loop_device_and_its_data_outlives_boxes_and_servers() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = new_volume(directory.path(), "v", 64 * MIB);
    {
        let server = server_in(directory.path(), 0);
        let writer = server.create_box(&plan(&server, &file, None, true));
        let reader = server.create_box(&plan(&server, &file, None, false));
        let written = writer.sh("ls -A /data; id -u > /data/a; sync; ls -ln /data/a");
        assert!(
            written.out.starts_with("-rw-") && written.out.contains(" 1000 1000 "),
            "{written:?}"
        );
        assert_eq!(reader.sh("cat /data/a").out, "1000\n");
        let refused = reader.sh("touch /data/b");
        assert!(refused.err.contains("Read-only"), "{refused:?}");
        assert_eq!(loops(directory.path()).len(), 1);
        let mounts = writer.sh("grep ' /data ' /proc/self/mountinfo").out;
        assert!(mounts.contains("nosuid,nodev"), "{mounts}");
        // A box of another server has the same file system.
        let other = server_in(directory.path(), 0);
        let second = other.create_box(&plan(&other, &file, None, true));
        assert_eq!(second.sh("cat /data/a; echo 2 > /data/c").out, "1000\n");
        assert_eq!(reader.sh("cat /data/c").out, "2\n");
        assert_eq!(loops(directory.path()).len(), 1);
        assert!(volume_used(&file).unwrap() < 16 * MIB);
    }
    no_loops(directory.path());
    let server = server_in(directory.path(), 0);
    let boxed = server.create_box(&plan(&server, &file, None, true));
    assert_eq!(
        boxed.sh("cat /data/a /data/c; ls -A /data").out,
        "1000\n2\na\nc\n"
    );
}

#[test]
fn a_volume_is_full_at_its_limit_and_its_size_changes() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = new_volume(directory.path(), "v", 32 * MIB);
    let server = server_in(directory.path(), 0);
    let boxed = server.create_box(&plan(&server, &file, None, true));
    let full = format!("errno {}", libc::ENOSPC);
    assert_eq!(boxed.probe("fill_bytes", "/data/big"), full);
    assert!(volume_used(&file).unwrap() > 24 * MIB);
    let kept = boxed.sh("rm /data/big; echo kept > /data/kept; sync; cat /data/kept");
    assert_eq!(kept.out, "kept\n");
    drop(boxed);
    // The box may still be ending.
    resize_volume(&file, 256 * MIB).unwrap();
    let boxed = server.create_box(&plan(&server, &file, None, true));
    let more = boxed.sh("cat /data/kept; head -c 100000000 /dev/zero > /data/more; sync; echo $?");
    assert_eq!(more.out, "kept\n0\n");
    assert!(volume_used(&file).unwrap() > 90 * MIB);
    drop(boxed);
    let refused = resize_volume(&file, 64 * MIB).unwrap_err().to_string();
    assert!(refused.contains("do not fit into 64 MiB"), "{refused}");
    resize_volume(&file, 128 * MIB).unwrap();
    assert_eq!(fs::metadata(&file).unwrap().len(), 128 * MIB);
    let boxed = server.create_box(&plan(&server, &file, None, true));
    assert_eq!(
        boxed.sh("cat /data/kept; stat -c %s /data/more").out,
        "kept\n100000000\n"
    );
    assert_eq!(boxed.probe("fill_bytes", "/data/big"), full);
    let names: Vec<_> = fs::read_dir(file.parent().unwrap()).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn a_volume_in_use_keeps_its_size() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = new_volume(directory.path(), "v", 32 * MIB);
    let server = server_in(directory.path(), 0);
    let boxed = server.create_box(&plan(&server, &file, None, true));
    let refused = resize_volume(&file, 64 * MIB).unwrap_err();
    assert_eq!(refused.errno(), Some(libc::EBUSY));
    assert_eq!(boxed.sh("echo 1 > /data/a; cat /data/a").out, "1\n");
    assert_eq!(fs::metadata(&file).unwrap().len(), 32 * MIB);
}

#[test]
fn a_directory_of_a_volume_is_opened_beneath_it() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = new_volume(directory.path(), "v", 32 * MIB);
    let server = server_in(directory.path(), 0);
    let refused = |sub_path: &str, writable: bool| {
        let plan = plan(&server, &file, Some(sub_path), writable);
        let refused = server.fork_server.create(&plan, &[], &[]);
        refused.unwrap_err().to_string()
    };
    let missing = refused("a/b", false);
    assert!(
        missing.contains("sub_path: a/b does not exist"),
        "{missing}"
    );
    let boxed = server.create_box(&plan(&server, &file, Some("a/b"), true));
    let made = boxed.sh("echo 1 > /data/one; stat -c %u /data; ls -A /data");
    assert_eq!(made.out, "1000\none\n");
    let whole = server.create_box(&plan(&server, &file, None, true));
    let linked = whole.sh("cat /data/a/b/one; ln -s /etc /data/l; ln -s a /data/m; echo > /data/f");
    assert_eq!(linked.out, "1\n");
    for (sub_path, problem) in [
        ("l", "contains a symbolic link"),
        ("l/ssl", "contains a symbolic link"),
        ("m/b", "contains a symbolic link"),
        ("f", "is not a directory"),
        ("..", "cannot be opened"),
    ] {
        let refused = refused(sub_path, true);
        assert!(refused.contains(problem), "{sub_path}: {refused}");
    }
    assert!(fs::read_dir(file.parent().unwrap()).unwrap().count() == 1);
    drop((boxed, whole));
    no_loops(directory.path());
}
