//! The limits of a box affect only that box.

use box_protocol::Program;
use box_rpc::Caller;
use box_tests::machine::{on_each_machine, params, printed, spec};
use serde_json::json;

#[tokio::test]
async fn a_memory_hog_is_killed_and_other_boxes_survive() {
    on_each_machine(async |machine| {
        let asked = spec(json!({"box_id": "hog", "memory_mb": 64, "cmd": "exec tail /dev/zero"}));
        let result = machine.exec_spec(asked).await.unwrap();
        // Without cgroups the process is refused the memory and ends by itself.
        if machine.lacks("cgroup.memory").await {
            assert_ne!(result.exit_code, Some(0), "{result:?}");
        } else {
            assert_eq!(
                (result.exit_code, result.oom),
                (Some(137), true),
                "{result:?}"
            );
            assert!(result.stderr.ends_with("memory_mb is 64"), "{result:?}");
        }
        let again = spec(json!({"box_id": "hog", "memory_mb": 64, "cmd": "echo alive"}));
        assert_eq!(printed(&machine.exec_spec(again).await.unwrap()), "alive");
        // The same end for other reasons, in a box that ran out of memory before.
        let killed = spec(json!({"box_id": "hog", "memory_mb": 64, "cmd": "kill -KILL $$"}));
        let killed = machine.exec_spec(killed).await.unwrap();
        assert_eq!(
            (killed.exit_code, killed.oom),
            (Some(137), false),
            "{killed:?}"
        );
        // A shell that outlives a killed child returns its end as an exit code.
        let waits = "tail /dev/zero";
        let waits = spec(json!({"box_id": "hog", "memory_mb": 64, "cmd": waits}));
        let waits = machine.exec_spec(waits).await.unwrap();
        assert_eq!(
            waits.oom,
            !machine.lacks("cgroup.memory").await,
            "{waits:?}"
        );
    })
    .await;
}

#[tokio::test]
async fn a_fork_bomb_stops_at_the_limit() {
    on_each_machine(async |machine| {
        let bomb = "for i in $(seq 100); do sleep 60 & done 2>/dev/null; echo all started";
        let asked = spec(json!({"box_id": "bomb", "pids_limit": 16, "cmd": bomb}));
        let result = machine.exec_spec(asked).await.unwrap();
        assert!(!result.stdout.contains("all started"), "{result:?}");
        printed(&machine.exec("bystander", "sh -c true").await);
    })
    .await;
}

/// Many small processes, each no larger than the agent.
#[tokio::test]
async fn the_kernel_kills_commands_before_the_agent_out_of_memory() {
    const CROWD: &str = "echo kept > /tmp/mark; \
        for i in $(seq 40); do (x=$(head -c 2M /dev/zero | tr '\\0' x); sleep 3) & all=\"$all $!\"; done; \
        for one in $all; do wait $one || echo killed; done";
    on_each_machine(async |machine| {
        let scores = "cat /proc/self/oom_score_adj /proc/1/oom_score_adj";
        assert_eq!(printed(&machine.exec("worth", scores).await), "1000\n500");
        if machine.lacks("cgroup.memory").await {
            return;
        }
        let asked = |cmd: &str| {
            spec(json!({"box_id": "crowd", "memory_mb": 64,
            "pids_limit": 400, "cmd": cmd}))
        };
        // The shell must be the smallest process by far, or the kernel chooses it.
        let mut crowd = params(asked(""));
        crowd.program = Some(Program::argv(["sh", "-c", CROWD]).unwrap());
        let crowd = machine.runtime.exec(&Caller::Local, crowd).await.unwrap();
        assert!(printed(&crowd).contains("killed"), "control: {crowd:?}");
        let mark = machine.exec_spec(asked("cat /tmp/mark")).await.unwrap();
        assert_eq!(printed(&mark), "kept", "the same box");
    })
    .await;
}
