//! A command has no privilege, gets none, and leaves no files that give one to others.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use box_test_wait::eventually;
use box_tests::machine::{ORDINARY_USER, mark, on_each_machine, printed, spec};
use serde_json::json;

use super::{Answers, PRELUDE, as_root, inside, inside_with, outside};

const PRIVILEGES: &str = include_str!("probes/privileges.py");
const SET_ID: &str = include_str!("probes/set_id.py");
const MOUNTS: &str = include_str!("probes/mounts.py");

#[tokio::test]
async fn a_command_has_no_privilege_and_cannot_become_another_user() {
    let host = outside(PRIVILEGES, &[&std::process::id().to_string()]);
    if as_root() {
        assert_ne!(host["CapEff"], "0000000000000000", "control");
        assert_eq!(
            (host["Seccomp"].as_str(), host["setresuid"].as_str()),
            ("0", "ok None")
        );
        assert_eq!(host["capset"], "ok 0", "control");
        assert_eq!(host["another_user"], "ok None", "control");
    }
    on_each_machine(async |machine| {
        let said = inside(machine, "privileges", PRIVILEGES, &[]).await;
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(said[set], "0000000000000000", "{set}");
        }
        assert_eq!(
            (said["NoNewPrivs"].as_str(), said["Seccomp"].as_str()),
            ("1", "2")
        );
        for way in [
            "setresuid",
            "setresgid",
            "setuid",
            "setgroups",
            "another_user",
        ] {
            assert!(
                ["EPERM", "EINVAL"].contains(&said[way].as_str()),
                "{way}: {said:?}"
            );
        }
        assert_eq!(said["capset"], "EPERM");
        assert_eq!(said["init_exe"], "EACCES");
        assert_eq!(host["init_exe"], "ETXTBSY", "control");
    })
    .await;
}

#[tokio::test]
async fn a_guest_is_an_unprivileged_user_of_the_host() {
    on_each_machine(async |machine| {
        let marker = mark();
        let start = format!("sleep {marker} > /dev/null 2>&1 & id -u");
        assert_eq!(printed(&machine.exec("who", &start).await), "1000");
        let mut ids = Vec::new();
        eventually("it runs", async || {
            ids = owners_of(&marker);
            ids.len() == 1
        })
        .await;
        if machine.name == "root" {
            assert!(
                ids[0] >= 100_000,
                "not root and no user of the host: {ids:?}"
            );
        } else {
            assert_eq!(ids, [machine.uid]);
        }
        assert_eq!(
            owners_of_this(),
            rustix::process::geteuid().as_raw(),
            "control"
        );
    })
    .await;
}

/// The host's user ids of the processes with this argument.
fn owners_of(argument: &str) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let found = all.filter(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        line.starts_with(b"sleep\0")
            && line
                .split(|byte| *byte == 0)
                .any(|word| word == argument.as_bytes())
    });
    found.filter_map(|entry| owner(&entry.path())).collect()
}

fn owners_of_this() -> u32 {
    owner(Path::new("/proc/self")).unwrap()
}

fn owner(process: &Path) -> Option<u32> {
    let status = std::fs::read_to_string(process.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[tokio::test]
async fn a_set_user_id_program_in_a_workspace_gains_no_privilege() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let id = dir.path().join("id");
        std::fs::copy("/usr/bin/id", &id).unwrap();
        std::fs::set_permissions(&id, Permissions::from_mode(0o6755)).unwrap();
        let asked =
            spec(json!({"box_id": "suid", "host_path": dir.path(), "cmd": "./id -u; ./id -g"}));
        let result = machine.exec_spec(asked).await.unwrap();
        assert_eq!(printed(&result), "1000\n1000");
        if as_root() {
            let outside = Command::new(&id)
                .arg("-u")
                .uid(ORDINARY_USER)
                .output()
                .unwrap();
            assert_eq!(
                outside.stdout, b"0\n",
                "control: the same file, the same user, outside"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn every_mount_of_a_box_is_without_set_id_and_devices_and_none_is_a_control_file_system() {
    let host = outside(MOUNTS, &[]);
    assert_ne!(
        (host["suid"].as_str(), host["devices"].as_str()),
        ("", ""),
        "control"
    );
    assert_eq!(
        (host["cgroup"].as_str(), host["sysfs"].as_str()),
        ("True", "True"),
        "control"
    );
    on_each_machine(async |machine| {
        let (workspace, extra) = (machine.directory(), machine.directory());
        let more = json!({"host_path": workspace.path(), "extra_mounts": [
            {"host_path": extra.path(), "mount_path": "/mnt/extra", "mode": "rw"}]});
        let said = inside_with(machine, "mounts", MOUNTS, &[], more).await;
        assert_eq!(said["suid"], "");
        let devices: Vec<&str> = said["devices"].split(' ').collect();
        assert!(
            devices
                .iter()
                .all(|place| place.starts_with("/dev") && *place != "/dev/shm"),
            "{said:?}"
        );
        assert_eq!(
            (said["cgroup"].as_str(), said["sysfs"].as_str()),
            ("False", "False")
        );
        assert_eq!(said["mounts"], "True");
    })
    .await;
}

/// The forbidden entries of a directory: set-id files, devices, files with capabilities.
fn dangerous(dir: &Path) -> Vec<String> {
    use std::os::unix::fs::FileTypeExt as _;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let meta = entry.metadata().unwrap();
        let kind = meta.file_type();
        if meta.mode() & 0o6000 != 0 || kind.is_char_device() || kind.is_block_device() {
            found.push(entry.file_name().into_string().unwrap());
        }
    }
    let names = Command::new("python3")
        .args([
            "-Ic",
            "import os, sys; [print(n) for n in os.listdir('.') if os.listxattr(n)]",
        ])
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(names.status.success());
    found.extend(
        String::from_utf8(names.stdout)
            .unwrap()
            .lines()
            .map(str::to_owned),
    );
    found.sort();
    found
}

#[tokio::test]
async fn a_box_leaves_no_set_id_file_in_a_workspace() {
    let ways: &[&str] = &[
        "chmod",
        "fchmod",
        "fchmodat2",
        "open",
        "creat",
        "mkdir",
        "mknod",
    ];
    if as_root() {
        let dir = tempfile::tempdir().unwrap();
        let program = format!("{PRELUDE}{SET_ID}");
        let ran = Command::new("python3")
            .args(["-Ic", &program])
            .current_dir(dir.path())
            .output();
        assert!(ran.unwrap().status.success());
        // A new directory gets no set-id bit by its mode, and only privileged users can make these
        // files.
        let mut expected = vec![
            "block",
            "capabilities",
            "char",
            "openat2",
            "mark",
            "whiteout",
        ];
        expected.extend(ways.iter().filter(|way| **way != "mkdir"));
        expected.sort_unstable();
        assert_eq!(dangerous(dir.path()), expected, "control");
    }
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let said: Answers = inside_with(
            machine,
            "leave",
            SET_ID,
            &[],
            json!({"host_path": dir.path()}),
        )
        .await;
        for way in ways {
            assert_eq!(said[*way], "EPERM", "{way}");
        }
        assert_eq!(said["openat2"], "ENOSYS");
        assert_eq!(said["whiteout"], "EINVAL");
        for way in [
            "char_device",
            "block_device",
            "file_capabilities",
            "overlay_mark",
        ] {
            assert!(
                ["EPERM", "EACCES"].contains(&said[way].as_str()),
                "{way}: {said:?}"
            );
        }
        assert_eq!(said["plain_chmod"], "ok None", "control");
        assert_eq!(dangerous(dir.path()), Vec::<String>::new());
        assert!(dir.path().join("plain").exists(), "control");
    })
    .await;
}
