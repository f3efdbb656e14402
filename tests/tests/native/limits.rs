//! What a box takes too much of is its own trouble.

use serde_json::json;

use super::support::{on_each_machine, printed, spec};

#[tokio::test]
async fn a_memory_hog_is_killed_and_everybody_else_lives() {
    on_each_machine(async |machine| {
        let asked = spec(json!({"session_id": "hog", "memory_mb": 64, "cmd": "tail /dev/zero"}));
        let result = machine.exec_spec(asked).await.unwrap();
        // Without cgroups it is refused the memory and ends by itself.
        if machine.lacks("cgroup.memory").await {
            assert_ne!(result.exit_code, Some(0), "{result:?}");
        } else {
            assert_eq!(result.exit_code, Some(137), "{result:?}");
        }
        let again = spec(json!({"session_id": "hog", "memory_mb": 64, "cmd": "echo alive"}));
        assert_eq!(printed(&machine.exec_spec(again).await.unwrap()), "alive");
    })
    .await;
}

#[tokio::test]
async fn a_fork_bomb_stops_at_the_limit() {
    on_each_machine(async |machine| {
        let bomb = "for i in $(seq 100); do sleep 60 & done 2>/dev/null; echo all started";
        let asked = spec(json!({"session_id": "bomb", "pids_limit": 16, "cmd": bomb}));
        let result = machine.exec_spec(asked).await.unwrap();
        assert!(!result.stdout.contains("all started"), "{result:?}");
        printed(&machine.exec("bystander", "sh -c true").await);
    })
    .await;
}
