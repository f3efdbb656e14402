//! Making a box touches only the requested directories, whatever they are replaced with meanwhile.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use box_protocol::Code;
use box_protocol::actions::BoxDeleteParams;
use box_runtime::Caller;
use box_tests::machine::{Machine, on_each_machine, printed, spec};
use serde_json::{Value, json};

async fn end(machine: &Machine, session: &str) {
    let asked: BoxDeleteParams =
        serde_json::from_value(json!({"box_id": session, "force": true})).unwrap();
    // Without a box this fails, which is fine.
    let _ = machine.runtime.delete(&Caller::Local, asked).await;
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Sets the flag on drop.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Two directories of the machine's user: one to work in, and one that no box was given.
struct Directories {
    dir: tempfile::TempDir,
    outside: tempfile::TempDir,
}

impl Directories {
    fn new(machine: &Machine) -> Self {
        let directories = Self {
            dir: machine.directory(),
            outside: machine.directory(),
        };
        std::fs::write(directories.outside.path().join("canary"), "the host's").unwrap();
        directories
    }

    fn make(&self, machine: &Machine, name: &str) {
        let path = self.dir.path().join(name);
        std::fs::create_dir(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(machine.uid), Some(machine.uid)).unwrap();
    }

    /// Makes boxes while `name` alternates between a directory and a link to the outside. Returns
    /// how many were made and how many refused.
    fn race(&self, machine: &Machine, rounds: usize, name: &str, asked: &Value) -> (usize, usize) {
        let (here, link) = (self.dir.path().join(name), self.dir.path().join("the-link"));
        std::os::unix::fs::symlink(self.outside.path(), &link).unwrap();
        let stop = AtomicBool::new(false);
        let (mut made, mut refused) = (0, 0);
        let swap = || {
            use rustix::fs::{CWD, RenameFlags, renameat_with};
            while !stop.load(Ordering::Relaxed) {
                renameat_with(CWD, &here, CWD, &link, RenameFlags::EXCHANGE).unwrap();
                std::thread::yield_now();
            }
            if here.is_symlink() {
                renameat_with(CWD, &here, CWD, &link, RenameFlags::EXCHANGE).unwrap();
            }
        };
        // The runtime runs on other threads, so this one may block.
        let racing = async {
            for round in 0..rounds {
                let session = format!("race-{round}");
                let mut asked = asked.clone();
                asked["box_id"] = json!(session);
                match machine.exec_spec(spec(asked)).await {
                    Ok(result) => {
                        assert!(!result.stdout.contains("the host's"), "{result:?}");
                        made += 1;
                    }
                    Err(error) => {
                        let text = format!("{error:?}");
                        assert!(
                            !text.contains(self.outside.path().to_str().unwrap()),
                            "{text}"
                        );
                        refused += 1;
                    }
                }
                end(machine, &session).await;
            }
        };
        tokio::task::block_in_place(|| {
            std::thread::scope(|scope| {
                // Also when an assertion fails: the scope waits for the thread.
                let _stop = StopOnDrop(&stop);
                scope.spawn(swap);
                tokio::runtime::Handle::current().block_on(racing);
            });
        });
        (made, refused)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_source_that_becomes_a_link_during_the_start_is_not_followed() {
    on_each_machine(async |machine| {
        let directories = Directories::new(machine);
        directories.make(machine, "w");
        let asked =
            json!({"host_path": directories.dir.path().join("w"), "cmd": "touch touched; cat canary"});
        let (made, refused) = directories.race(machine, 200, "w", &asked);
        assert!(
            made > 0 && refused > 0,
            "control: both happened: {made} {refused}"
        );
        assert_eq!(names(directories.outside.path()), ["canary"]);
        assert_eq!(names(&directories.dir.path().join("w")), ["touched"], "control");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_point_in_a_workspace_that_turns_into_a_link_is_not_followed() {
    on_each_machine(async |machine| {
        let directories = Directories::new(machine);
        let extra = machine.directory();
        directories.make(machine, "a");
        directories.make(machine, "a/b");
        let asked = json!({"host_path": directories.dir.path(), "cmd": "touch a/b/touched; cat a/canary",
            "extra_mounts": [{"host_path": extra.path(), "mount_path": "/workspace/a/b", "mode": "rw"}]});
        let (made, refused) = directories.race(machine, 100, "a", &asked);
        assert!(made > 0 && refused > 0, "control: both happened: {made} {refused}");
        assert_eq!(names(directories.outside.path()), ["canary"]);
    })
    .await;
}

#[tokio::test]
async fn a_mount_through_a_link_in_a_workspace_is_refused() {
    on_each_machine(async |machine| {
        let directories = Directories::new(machine);
        let extra = machine.directory();
        std::fs::write(extra.path().join("extra"), "").unwrap();
        directories.make(machine, "real");
        directories.make(machine, "real/b");
        std::os::unix::fs::symlink(directories.outside.path(), directories.dir.path().join("a")).unwrap();
        std::os::unix::fs::symlink("/etc", directories.dir.path().join("inner")).unwrap();
        for (target, fine) in [("a/b", false), ("a", false), ("inner", false), ("real/b", true)] {
            let asked = json!({"box_id": target.replace('/', "-"), "host_path": directories.dir.path(),
                "cmd": format!("ls /workspace/{target}"), "extra_mounts": [{"host_path": extra.path(),
                "mount_path": format!("/workspace/{target}"), "mode": "rw"}]});
            let result = machine.exec_spec(spec(asked)).await;
            match result {
                Ok(result) if fine => assert_eq!(printed(&result), "extra", "control"),
                other => assert!(other.is_err() && !fine, "{target}: {other:?}"),
            }
        }
        assert_eq!(names(directories.outside.path()), ["canary"]);
    })
    .await;
}

#[tokio::test]
async fn paths_that_box_provides_cannot_be_mounted_over() {
    on_each_machine(async |machine| {
        let extra = machine.directory();
        for target in [
            "/proc",
            "/proc/self/attr",
            "/proc/sys/kernel",
            "/dev",
            "/dev/null",
            "/sys/fs/cgroup",
            "/etc",
            "/etc/passwd",
            "/usr/bin",
            "/run/box",
            "/",
            "/lib64",
        ] {
            let asked = json!({"box_id": "over", "cmd": "true", "extra_mounts": [
                {"host_path": extra.path(), "mount_path": target, "mode": "rw"}]});
            let error = machine.exec_spec(spec(asked)).await.unwrap_err();
            assert_eq!(error.code(), Code::Validation, "{target}: {error:?}");
        }
        let asked = json!({"box_id": "over", "cmd": "true", "extra_mounts": [
            {"host_path": extra.path(), "mount_path": "/mnt/extra", "mode": "rw"}]});
        printed(&machine.exec_spec(spec(asked)).await.unwrap());
    })
    .await;
}

/// Files that configure other programs. Each would leave a mark if a program followed it.
const CONTROL_FILES: &[&str] = &[
    ".git/hooks/post-checkout",
    ".git/hooks/pre-commit",
    ".envrc",
    ".profile",
    ".bashrc",
    ".bash_profile",
    ".shrc",
    ".env",
    ".box/init",
    ".box/config.json",
    ".box/policy.json",
    "box.toml",
    "policy.json",
    "boxd.json",
    "sitecustomize.py",
    ".boxrc",
    ".config/box/config.toml",
    "Dockerfile",
    ".devcontainer/devcontainer.json",
];

#[tokio::test]
async fn control_files_in_a_workspace_have_no_effect() {
    on_each_machine(async |machine| {
        let (plain, planted) = (machine.directory(), machine.directory());
        for name in CONTROL_FILES {
            let path = planted.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let content = "#!/bin/sh\ntouch \"${PLACE:-.}/followed\"; export FOLLOWED=1\n";
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        }
        let git = "[core]\n\tfsmonitor = touch followed\n\thooksPath = .git/hooks\n";
        std::fs::write(planted.path().join(".git/config"), git).unwrap();
        let mut seen = Vec::new();
        for dir in [&plain, &planted] {
            // Twice: the second box of the session would be the first to find these files.
            for _ in 0..2 {
                let asked = json!({"box_id": "control", "host_path": dir.path(), "workspace_quota_mb": 8,
                    "cmd": "env | sort; id; ulimit -a; pwd; python3 -c 'print(1)'"});
                let result = machine.exec_spec(spec(asked)).await.unwrap();
                seen.push(printed(&result).to_owned());
                end(machine, "control").await;
            }
        }
        seen.dedup();
        assert_eq!(seen.len(), 1, "the same in both: {seen:?}");
        let mut expected: Vec<String> =
            CONTROL_FILES.iter().map(|name| name.split('/').next().unwrap().to_owned()).collect();
        expected.sort();
        expected.dedup();
        assert_eq!(names(planted.path()), expected);
        let asked = json!({"box_id": "control", "host_path": planted.path(), "cmd": ". ./.envrc"});
        printed(&machine.exec_spec(spec(asked)).await.unwrap());
        assert!(planted.path().join("followed").exists(), "control");
    })
    .await;
}
