//! Host directories in a box.

use std::os::unix::fs::MetadataExt;

use box_protocol::Code;
use box_protocol::actions::FileWrite;
use box_tests::machine::{on_each_machine, on_each_machine_within, printed, spec};
use serde_json::json;
use sha2::{Digest as _, Sha256};

#[tokio::test]
async fn files_in_the_workspace_belong_to_its_owner() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        std::fs::write(dir.path().join("in"), "from outside").unwrap();
        let asked = spec(json!({"box_id": "ws", "host_path": dir.path(),
            "cmd": "cat in; mkdir sub; echo from inside > sub/out; id -u; stat -c %u sub/out"}));
        let result = machine.exec_spec(asked).await.unwrap();
        assert_eq!(printed(&result), "from outside1000\n1000");
        let out = dir.path().join("sub/out");
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "from inside\n");
        assert_eq!(std::fs::metadata(&out).unwrap().uid(), machine.uid);
    })
    .await;
}

#[tokio::test]
async fn read_only_mounts_and_system_directories_refuse_writes() {
    on_each_machine(async |machine| {
        let (workspace, extra) = (machine.directory(), machine.directory());
        std::fs::write(extra.path().join("f"), "data").unwrap();
        let asked = spec(json!({"box_id": "ro", "host_path": workspace.path(), "host_path_mode": "ro",
            "mount_path": "/project", "extra_mounts": [{"host_path": extra.path(),
            "mount_path": "/mnt/data", "mode": "rw"}],
            "cmd": "touch /project/x || cat /mnt/data/f; touch /mnt/data/g; touch /usr/x /x 2>&1 | wc -l"}));
        let result = machine.exec_spec(asked).await.unwrap();
        assert_eq!(printed(&result), "data2");
        assert!(result.stderr.contains("Read-only"), "{result:?}");
        assert!(extra.path().join("g").exists() && !workspace.path().join("x").exists());
    })
    .await;
}

#[tokio::test]
async fn a_mount_below_a_private_directory_is_visible() {
    on_each_machine(async |machine| {
        let extra = machine.directory();
        std::fs::write(extra.path().join("f"), "data").unwrap();
        for read_only in [true, false] {
            let asked = spec(json!({"box_id": format!("below-{read_only}"),
                "read_only_rootfs": read_only,
                "extra_mounts": [{"host_path": extra.path(), "mount_path": "/workspace/data", "mode": "ro"}],
                "cmd": "cat /workspace/data/f && echo own > /workspace/own && cat /workspace/own"}));
            let result = machine.exec_spec(asked).await.unwrap();
            assert_eq!(printed(&result), "dataown", "{}: {result:?}", machine.name);
        }
    })
    .await;
}

#[tokio::test]
async fn a_writable_root_belongs_to_one_box() {
    on_each_machine(async |machine| {
        let asked = spec(json!({"box_id": "rw", "read_only_rootfs": false,
            "cmd": "echo mine > /opt/x && echo mine > /x && cat /opt/x /x"}));
        assert_eq!(
            printed(&machine.exec_spec(asked).await.unwrap()),
            "mine\nmine"
        );
        assert!(!std::path::Path::new("/opt/x").exists());
    })
    .await;
}

#[tokio::test]
async fn a_missing_or_linked_mount_source_is_refused_without_its_path() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        std::fs::create_dir(dir.path().join("real")).unwrap();
        std::os::unix::fs::symlink("real", dir.path().join("link")).unwrap();
        for (name, why) in [("nothing", "does not exist"), ("link", "symbolic link")] {
            let asked = spec(json!({"box_id": name, "host_path": dir.path().join(name),
                "cmd": "true"}));
            let error = machine.exec_spec(asked).await.unwrap_err();
            assert_eq!(error.code(), Code::Validation);
            assert!(error.message().contains(why), "{error:?}");
            assert!(
                !error.message().contains(dir.path().to_str().unwrap()),
                "{error:?}"
            );
        }
    })
    .await;
}

/// A tree with one file, and a mount of it by its digest.
fn known_by_digest(root: &std::path::Path) -> (String, serde_json::Value) {
    let hex = |text: &str| format!("{:x}", Sha256::digest(text));
    std::fs::create_dir(root.join("tree")).unwrap();
    std::fs::write(root.join("tree/skill"), "how to").unwrap();
    std::fs::write(root.join("tree/beside"), "not named").unwrap();
    let manifest = json!({"algorithm": "sha256-tree-v1", "total_bytes": 6, "files":
        [{"path": "skill", "size": 6, "sha256": hex("how to"), "executable": false}]});
    std::fs::write(root.join("manifest.json"), manifest.to_string()).unwrap();
    let digest = hex(&manifest.to_string());
    let place = format!("/opt/langbot-artifacts/{digest}");
    let mount = json!({"host_path": root.join("tree"), "mount_path": place, "mode": "ro",
        "content_digest": format!("sha256:{digest}"), "manifest_path": root.join("manifest.json")});
    (place, mount)
}

#[tokio::test]
async fn content_known_by_its_digest_is_added_to_a_living_box() {
    on_each_machine(async |machine| {
        let content = machine.directory();
        let (place, mount) = known_by_digest(content.path());
        let look =
            format!("cat {place}/skill; ls {place}; touch {place}/x 2>/dev/null || echo kept");
        let asked = |id: &str| spec(json!({"box_id": id, "extra_mounts": [&mount], "cmd": look}));
        let seen = "how toskill\nkept";
        // In an existing box, and in one that starts with it.
        printed(&machine.exec("late", "touch /tmp/same-box").await);
        assert_eq!(
            printed(&machine.exec_spec(asked("late")).await.unwrap()),
            seen
        );
        assert_eq!(
            printed(&machine.exec_spec(asked("early")).await.unwrap()),
            seen
        );
        // Later changes of the source are not visible.
        std::fs::write(content.path().join("tree/skill"), "harm").unwrap();
        assert_eq!(
            printed(&machine.exec_spec(asked("late")).await.unwrap()),
            seen
        );
        let same = machine.exec_spec(spec(json!({"box_id": "late", "extra_mounts": [&mount],
            "cmd": "ls /tmp/same-box"})));
        assert_eq!(printed(&same.await.unwrap()), "/tmp/same-box");
    })
    .await;
}

#[tokio::test]
async fn mounted_content_with_another_digest_is_refused() {
    on_each_machine(async |machine| {
        let content = machine.directory();
        let (_, mount) = known_by_digest(content.path());
        std::fs::write(content.path().join("tree/skill"), "how ta").unwrap();
        printed(&machine.exec("late", "echo 1 > /tmp/same-box").await);
        for id in ["late", "early"] {
            let asked = spec(json!({"box_id": id, "extra_mounts": [&mount], "cmd": "true"}));
            let error = machine.exec_spec(asked).await.unwrap_err();
            assert_eq!(error.code(), Code::Validation, "{error:?}");
            let why = "content_digest: the source changed: skill";
            assert_eq!(error.message(), why);
        }
        assert_eq!(
            printed(&machine.exec("late", "cat /tmp/same-box").await),
            "1"
        );
    })
    .await;
}

#[tokio::test]
async fn a_mount_is_added_to_one_running_box_only() {
    on_each_machine(async |machine| {
        let (first, second) = (machine.directory(), machine.directory());
        std::fs::write(first.path().join("f"), "first").unwrap();
        std::fs::write(second.path().join("f"), "second").unwrap();
        printed(&machine.exec("late", "touch /tmp/same-box").await);
        let add = async |source: &std::path::Path, place: &str, mode: &str| {
            let params = json!({"box_id": "late", "labels": {"a": "b"}, "extra_mounts":
                [{"host_path": source, "mount_path": place, "mode": mode}]});
            let params = serde_json::from_value(params).unwrap();
            machine
                .runtime
                .update(&box_runtime::Caller::Local, params)
                .await
        };
        let info = add(first.path(), "/mnt/one", "ro").await.unwrap();
        assert_eq!(info.labels["a"], "b");
        add(second.path(), "/mnt/two", "ro").await.unwrap();
        // Calls need not repeat the mounts, and adding the same mount again changes nothing.
        add(first.path(), "/mnt/one", "ro").await.unwrap();
        let look = "cat /tmp/same-box /mnt/one/f /mnt/two/f; touch /mnt/two/g 2>/dev/null || echo kept; grep -c /mnt/one /proc/mounts";
        let seen = machine.exec("late", look).await;
        assert_eq!(printed(&seen), "firstsecondkept\n1");
        let error = add(second.path(), "/mnt/one", "ro").await.unwrap_err();
        assert_eq!(error.code(), Code::Conflict);
        let error = add(second.path(), "/proc/x", "ro").await.unwrap_err();
        assert_eq!(error.code(), Code::Validation, "{error:?}");
        let params = json!({"box_id": "absent", "extra_mounts": []});
        let params = serde_json::from_value(params).unwrap();
        let none = machine
            .runtime
            .update(&box_runtime::Caller::Local, params)
            .await;
        assert_eq!(none.unwrap_err().code(), Code::NotFound);
    })
    .await;
}

#[tokio::test]
async fn commands_see_a_writable_mount_only_if_they_start_after_it() {
    on_each_machine(async |machine| {
        let (before, added) = (machine.directory(), machine.directory());
        // A thread that touches files, and a program, which both start before.
        let upload = async |path: &str| {
            let params = json!({"box_id": "w", "path": path, "data": "aGk="});
            let caller = box_runtime::Caller::Local;
            let params = serde_json::from_value(params).unwrap();
            let runtime = &machine.runtime;
            runtime.forward::<FileWrite>(&caller, &params).await
        };
        let wait = "(while [ ! -e /mnt/new/f ]; do sleep 0.02; done; echo > /mnt/new/old; echo $? > /tmp/said) &";
        let asked = spec(json!({"box_id": "w", "host_path": before.path(), "cmd": wait}));
        printed(&machine.exec_spec(asked.clone()).await.unwrap());
        upload("/workspace/a").await.unwrap();
        let caller = box_runtime::Caller::Local;
        let update = async || {
            let params = json!({"box_id": "w", "extra_mounts":
                [{"host_path": added.path(), "mount_path": "/mnt/new", "mode": "rw"}]});
            let params = serde_json::from_value(params).unwrap();
            machine.runtime.update(&caller, params).await
        };
        let go = async |to: &str| {
            let params = json!({"box_id": "w", "to": to});
            let params = serde_json::from_value(params).unwrap();
            machine.runtime.transition(&caller, params).await
        };
        if go("paused").await.is_ok() {
            // The runtime could not ask its agent.
            assert_eq!(update().await.unwrap_err().code(), Code::Conflict);
            go("running").await.unwrap();
        }
        update().await.unwrap();
        let exec = async |cmd: &str| {
            let result = machine.exec_spec(asked.clone().cmd(cmd)).await.unwrap();
            printed(&result).to_owned()
        };
        let write = "echo new > /mnt/new/f && mkdir /mnt/new/d && stat -c %u /mnt/new/f";
        assert_eq!(exec(write).await, "1000");
        upload("/mnt/new/uploaded").await.unwrap();
        let owner = std::fs::metadata(added.path().join("f")).unwrap().uid();
        assert_eq!(owner, machine.uid);
        assert_eq!(std::fs::read(added.path().join("uploaded")).unwrap(), b"hi");
        // Only this mount became writable, and not for earlier processes where the kernel has a
        // second restriction.
        assert_eq!(exec("touch /mnt/x 2>/dev/null || echo kept").await, "kept");
        let said = exec("while [ ! -s /tmp/said ]; do sleep 0.02; done; cat /tmp/said").await;
        let fenced = !machine.lacks("landlock").await;
        assert_eq!(said != "0", fenced, "{said}");
        assert_eq!(added.path().join("old").exists(), !fenced);
    })
    .await;
}

#[tokio::test]
async fn a_box_whose_workspace_outgrows_its_quota_is_ended() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let exec = async |session: &str, cmd: &str| {
            let asked = json!({"box_id": session, "host_path": dir.path(), "workspace_quota_mb": 8,
                "cmd": cmd});
            machine.exec_spec(spec(asked)).await
        };
        // The kernel stops one file at the quota.
        let one = exec("one", "head -c 20M /dev/zero > big; stat -c %s big; rm big")
            .await
            .unwrap();
        assert_eq!(printed(&one), (8 << 20).to_string());
        // The runtime finds many files by scanning.
        let many = "for i in $(seq 200); do head -c 1M /dev/urandom > f$i; sleep 0.01; done";
        let error = exec("many", many).await.unwrap_err();
        assert_eq!(error.code(), Code::Capacity, "{error:?}");
        assert!(
            error
                .message()
                .starts_with("workspace_quota_mb: the workspace exceeds 8 MiB"),
            "{error:?}"
        );
        let files = std::fs::read_dir(dir.path()).unwrap().count();
        assert!((8..100).contains(&files), "{files} files of 1 MiB");
        for file in std::fs::read_dir(dir.path()).unwrap() {
            std::fs::remove_file(file.unwrap().path()).unwrap();
        }
        printed(&exec("many", "echo again").await.unwrap());
    })
    .await;
}

#[tokio::test]
async fn a_quota_covers_everything_that_a_box_can_write() {
    on_each_machine(async |machine| {
        let (one, two, given) = (machine.directory(), machine.directory(), machine.directory());
        std::fs::write(given.path().join("large"), vec![1; 20 << 20]).unwrap();
        std::fs::create_dir(one.path().join("inner")).unwrap();
        std::os::unix::fs::chown(one.path().join("inner"), Some(machine.uid), None).unwrap();
        let mount = |source: &std::path::Path, place: &str, mode: &str| json!({"host_path": source, "mount_path": place, "mode": mode});
        let exec = async |session: &str, mounts: &[serde_json::Value], cmd: &str| {
            let asked = json!({"box_id": session, "workspace_quota_mb": 8, "cmd": cmd, "extra_mounts": mounts});
            machine.exec_spec(spec(asked)).await
        };
        // The kernel stops one file at the quota.
        let only = [mount(two.path(), "/mnt/two", "rw")];
        let large = "head -c 20M /dev/zero > /mnt/two/big; stat -c %s /mnt/two/big; rm /mnt/two/big";
        assert_eq!(printed(&exec("one", &only, large).await.unwrap()), (8 << 20).to_string());
        // Read-only mounts do not count, and nothing counts twice.
        let all = [mount(one.path(), "/mnt/one", "rw"), mount(two.path(), "/mnt/two", "rw"),
            mount(&one.path().join("inner"), "/mnt/inner", "rw"), mount(given.path(), "/mnt/given", "ro")];
        let counted = "head -c 5M /dev/urandom > /mnt/inner/f; sleep 0.3; stat -c %s /mnt/one/inner/f";
        assert_eq!(printed(&exec("all", &all, counted).await.unwrap()), (5 << 20).to_string());
        // Together they exceed the quota.
        let error = exec("all", &all, "head -c 5M /dev/urandom > /mnt/two/f; sleep 20").await.unwrap_err();
        assert_eq!(error.code(), Code::Capacity, "{error:?}");
        assert!(error.message().starts_with("workspace_quota_mb: the workspace exceeds 8 MiB"), "{error:?}");
    })
    .await;
}

#[tokio::test]
#[ignore = "needs temporary files on a file system with project quotas: `cargo xtask test` runs it in its guest"]
async fn a_file_system_with_quotas_keeps_that_of_a_workspace() {
    // An emulated machine beside other work creates a hundred files a second.
    let (long, timeout_sec) = (std::time::Duration::from_mins(30), 1200);
    on_each_machine_within(long, async |machine| {
        if machine.uid != 0 {
            // Only root can set it. The boxes of an ordinary user are scanned as everywhere.
            return;
        }
        let (dir, free) = (machine.directory(), machine.directory());
        std::fs::create_dir(dir.path().join("old")).unwrap();
        std::fs::write(dir.path().join("old/file"), vec![1; 1 << 20]).unwrap();
        let exec = async |session: &str, dir: &std::path::Path, quota: Option<u32>, cmd: &str| {
            let asked = json!({"box_id": session, "host_path": dir, "workspace_quota_mb": quota, "cmd": cmd, "timeout_sec": timeout_sec});
            printed(&machine.exec_spec(spec(asked)).await.unwrap()).to_owned()
        };
        let fill = "for i in $(seq 20); do head -c 1M /dev/urandom > f$i; done 2>/dev/null; du -sm . | cut -f1";
        let of = |megabytes: &str| megabytes.trim().parse::<u64>().unwrap();
        let held = of(&exec("q", dir.path(), Some(8), fill).await);
        assert!((7..=8).contains(&held), "{held} MiB, old files counted");
        let more = "head -c 512K /dev/zero > more 2>/dev/null && echo room; rm f1; head -c 512K /dev/zero > more && echo room now";
        assert_eq!(exec("q", dir.path(), Some(8), more).await.trim(), "room now", "and the box lives");
        // A deleted open file counts until it is closed.
        let deleted = "rm -f f*; exec 3> big; rm big; head -c 20M /dev/urandom >&3 2>/dev/null; \
            head -c 2M /dev/urandom > small 2>/dev/null; stat -c %s small; exec 3>&-; head -c 2M /dev/zero > small; stat -c %s small";
        let sizes = exec("q", dir.path(), Some(8), deleted).await;
        let sizes: Vec<u64> = sizes.lines().map(|size| size.parse().unwrap()).collect();
        assert!(sizes[0] < 2 << 20 && sizes[1] == 2 << 20, "{sizes:?}");
        let empty = "n=0; while true > e$n; do n=$((n+1)); done 2>/dev/null; echo $n";
        let files = of(&exec("q", dir.path(), Some(8), empty).await);
        assert!((10_000..=16_384).contains(&files), "{files} empty files");
        assert!(of(&exec("free", free.path(), None, fill).await) >= 20, "control");
        // The limit ends with the box.
        let delete = serde_json::from_value(json!({"box_id": "q", "force": true})).unwrap();
        machine.runtime.delete(&box_runtime::Caller::Local, delete).await.unwrap();
        let room = async || of(&exec("later", dir.path(), None, "rm -f e*; head -c 20M /dev/zero > l; du -sm . | cut -f1").await);
        assert!(room().await >= 20);
        // The quota of one box does not end with another box of the same directory, neither later
        // nor at once.
        let shared = machine.directory();
        let delete = async |session: &str| {
            let delete = serde_json::from_value(json!({"box_id": session, "force": true})).unwrap();
            machine.runtime.delete(&box_runtime::Caller::Local, delete).await.unwrap();
        };
        for session in ["first", "second"] {
            exec(session, shared.path(), Some(8), "true").await;
        }
        delete("first").await;
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        let held = of(&exec("second", shared.path(), Some(8), fill).await);
        assert!((7..=8).contains(&held), "{held} MiB, after the end of another");
        delete("second").await;
        exec("third", shared.path(), Some(8), "rm -f f*; sleep 0.5").await;
        let held = of(&exec("third", shared.path(), Some(8), fill).await);
        assert!((7..=8).contains(&held), "{held} MiB, after the end of the one before");
        // The limit of a parent directory does not replace it either.
        let inner = shared.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        delete("third").await;
        exec("inner", &inner, Some(4), "true").await;
        exec("outer", shared.path(), Some(16), "rm -f f*").await;
        delete("outer").await;
        let more = json!({"box_id": "inner", "host_path": inner, "workspace_quota_mb": 4, "cmd": format!("{fill}; sleep {timeout_sec}"), "timeout_sec": timeout_sec});
        let error = machine.exec_spec(spec(more)).await.unwrap_err();
        assert!(error.message().starts_with("workspace_quota_mb: the workspace exceeds 4 MiB"), "{error:?}");
    })
    .await;
}

#[tokio::test]
async fn a_box_that_fills_its_workspace_with_empty_files_is_ended() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        let cmd = "n=0; while :; do : > f$n; n=$((n+1)); done";
        let asked = json!({"box_id": "empty", "host_path": dir.path(), "workspace_quota_mb": 1, "cmd": cmd});
        let error = machine.exec_spec(spec(asked)).await.unwrap_err();
        assert_eq!(error.code(), Code::Capacity, "{error:?}");
        assert!(error.message().starts_with("workspace_quota_mb: the workspace exceeds 1 MiB"), "{error:?}");
    })
    .await;
}

#[tokio::test]
async fn requested_directories_in_a_workspace_belong_to_its_owner() {
    on_each_machine(async |machine| {
        let (workspace, elsewhere) = (machine.directory(), machine.directory());
        std::fs::create_dir(workspace.path().join("old")).unwrap();
        let link = workspace.path().join("link");
        std::os::unix::fs::symlink(elsewhere.path(), &link).unwrap();
        let run = async |session: &str, mode: &str, dirs: serde_json::Value| {
            let asked = json!({"box_id": session, "host_path": workspace.path(), "dirs": dirs,
                "host_path_mode": mode, "cmd": "cd /workspace/a/b && touch mine && pwd"});
            machine.exec_spec(spec(asked)).await
        };
        // The runtime cannot create them in a read-only mount.
        let error = run("ro", "ro", json!(["/workspace/a/b"]))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Validation, "{error:?}");
        let made = run(
            "made",
            "rw",
            json!(["/workspace/a/b", "/workspace/old", "/other"]),
        )
        .await;
        assert_eq!(printed(&made.unwrap()), "/workspace/a/b");
        for name in ["a", "a/b", "a/b/mine"] {
            let owner = std::fs::metadata(workspace.path().join(name))
                .unwrap()
                .uid();
            assert_eq!(owner, machine.uid, "{name}");
        }
        // Existing directories are enough, also in a read-only mount.
        let there = run("there", "ro", json!(["/workspace/a/b"])).await.unwrap();
        assert_eq!(there.exit_code, Some(1), "{there:?}");
        let error = run("link", "rw", json!(["/workspace/link/x"]))
            .await
            .unwrap_err();
        assert_eq!(error.code(), Code::Validation, "{error:?}");
        assert!(error.message().contains("/workspace/link/x"), "{error:?}");
        assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    })
    .await;
}
