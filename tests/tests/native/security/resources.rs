//! The resources of a box are limited, in whichever way it uses them.

use box_protocol::actions::BoxDeleteParams;
use box_runtime::Caller;
use box_tests::machine::{Machine, on_each_machine, printed, spec};
use serde_json::json;

use super::{command, inside_with};

const FILL: &str = include_str!("probes/fill.py");

async fn end(machine: &Machine, session: &str) {
    let asked: BoxDeleteParams = serde_json::from_value(json!({"box_id": session})).unwrap();
    machine.runtime.delete(&Caller::Local, asked).await.unwrap();
}

#[tokio::test]
async fn the_private_storage_of_a_box_is_full_at_its_cap_whichever_way_it_is_filled() {
    on_each_machine(async |machine| {
        for (way, place) in [
            ("one_file", "/tmp"),
            ("many", "/dev/shm"),
            ("hidden", "/home/box"),
            ("files", "/var/tmp"),
        ] {
            let more = json!({"memory_mb": 1024});
            let said = inside_with(machine, way, FILL, &[way, place], more).await;
            assert_eq!(said["filled"], "ENOSPC", "{way} in {place}");
            end(machine, way).await;
        }
        // In a small box they are limited before its memory, which they consist of, and no process
        // is killed.
        let small = "head -c 100M /dev/zero > /tmp/x; stat -c %s /tmp/x; rm /tmp/x; echo lives";
        let asked = spec(json!({"box_id": "small", "memory_mb": 64, "cmd": small}));
        let result = machine.exec_spec(asked).await.unwrap();
        let most = 48 << 20;
        let (size, rest) = result.stdout.split_once('\n').unwrap();
        assert!(
            (most - (4 << 20)..=most).contains(&size.parse().unwrap()),
            "{size}"
        );
        assert_eq!(rest, "lives\n");
        assert!(result.stderr.contains("No space left"), "{}", result.stderr);
        // Far less fits, so the limit stopped them.
        let less = "head -c 300M /dev/zero > /tmp/x && stat -c %s /tmp/x";
        let asked = spec(json!({"box_id": "less", "memory_mb": 1024, "cmd": less}));
        let result = machine.exec_spec(asked).await.unwrap();
        assert_eq!(printed(&result), (300 << 20).to_string(), "control");
    })
    .await;
}

#[tokio::test]
async fn a_sparse_terabyte_is_too_large_for_a_quota() {
    on_each_machine(async |machine| {
        let dir = machine.directory();
        for (session, quota, answer) in [("quota", 8, "EFBIG"), ("free", 0, "ok None")] {
            let more = json!({"host_path": dir.path(), "workspace_quota_mb": quota});
            let said = inside_with(machine, session, FILL, &["sparse", "/workspace"], more).await;
            assert_eq!(said["filled"], answer, "{session}");
        }
    })
    .await;
}

#[tokio::test]
async fn files_in_memory_count_as_memory() {
    on_each_machine(async |machine| {
        if machine.lacks("cgroup.memory").await {
            // Per-process limits do not count them, as `docs/security.md` says.
            return;
        }
        let asked = |session: &str, memory: u64, cmd: String| {
            spec(json!({"box_id": session, "memory_mb": memory, "cmd": cmd}))
        };
        let fill = command(FILL, &["memory_file", "-"]);
        let small = machine
            .exec_spec(asked("small", 64, fill.clone()))
            .await
            .unwrap();
        assert_eq!(small.exit_code, Some(137), "{small:?}");
        let alive = machine
            .exec_spec(asked("small", 64, "echo alive".into()))
            .await
            .unwrap();
        assert_eq!(printed(&alive), "alive");
        let large = machine.exec_spec(asked("large", 512, fill)).await.unwrap();
        assert_eq!(printed(&large), "filled=ok None", "control");
    })
    .await;
}

#[tokio::test]
async fn threads_count_as_processes() {
    on_each_machine(async |machine| {
        let few = json!({"pids_limit": 32});
        let said = inside_with(machine, "few", FILL, &["threads", "-"], few).await;
        assert_eq!(said["filled"], "EAGAIN");
        assert!(said["stopped_at"].parse::<u32>().unwrap() <= 32, "{said:?}");
        let many = json!({"pids_limit": 400});
        let said = inside_with(machine, "many", FILL, &["threads", "-"], many).await;
        assert_eq!(said["filled"], "ok None", "control");
    })
    .await;
}
