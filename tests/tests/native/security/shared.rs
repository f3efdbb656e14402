//! What one box takes of resources that a user or the whole machine has once.

use box_tests::machine::{on_each_machine, printed};
use serde_json::json;

use super::{answers, as_root, command, inside, inside_with, outside};

const SHARED: &str = include_str!("probes/shared.py");

#[tokio::test]
async fn a_crash_starts_no_handler_of_the_host_and_a_guest_gets_no_priority() {
    let host = outside(SHARED, &["limits"]);
    assert_eq!(
        (host["set_core"].as_str(), host["core_then"].as_str()),
        ("ok None", "(0, 0)"),
        "control"
    );
    on_each_machine(async |machine| {
        let said = inside(machine, "limits", SHARED, &["limits"]).await;
        assert_eq!(said["core"], "(1, 1)", "{}", machine.name);
        // The call succeeds without an effect.
        assert_eq!(said["set_core"], "ok None");
        assert_eq!(said["core_then"], "(1, 1)");
        assert_eq!((said["RTPRIO"].as_str(), said["NICE"].as_str()), ("0", "0"));
        for (limit, most) in [("MEMLOCK", 8 << 20), ("SIGPENDING", 4096)] {
            let limit: i64 = said[limit].parse().unwrap();
            assert!((0..=most).contains(&limit), "{said:?}");
        }
        assert_eq!(said["fifo"], "EPERM");
        if as_root() {
            assert_eq!(host["fifo"], "ok None", "control");
        }
    })
    .await;
}

#[tokio::test]
async fn the_file_watches_of_one_box_leave_watches_for_others() {
    assert_eq!(outside(SHARED, &["watchers"])["watchers"], "100", "control");
    on_each_machine(async |machine| {
        let said = inside(machine, "watchers", SHARED, &["watchers"]).await;
        let made: u32 = said["watchers"].parse().unwrap();
        assert!((8..=16).contains(&made), "{}: {made}", machine.name);
    })
    .await;
}

#[tokio::test]
async fn the_terminals_of_one_box_leave_terminals_for_others() {
    let host = outside(SHARED, &["terminals"]);
    assert_eq!(host["terminals"], "200", "control");
    on_each_machine(async |machine| {
        let said = inside(machine, "terminals", SHARED, &["terminals"]).await;
        assert_eq!(said["terminals"], "64", "{}", machine.name);
        assert_eq!(said["error"], "ENOSPC", "{}", machine.name);
    })
    .await;
}

#[tokio::test]
async fn the_processes_of_a_box_share_one_limit_of_open_files() {
    on_each_machine(async |machine| {
        for (processes, files) in [(64, "4096"), (128, "2048"), (256, "1024")] {
            let session = format!("files-{processes}");
            let more = json!({"pids_limit": processes});
            let said = inside_with(machine, &session, SHARED, &["files"], more).await;
            assert_eq!(said["files"], files, "{}: {said:?}", machine.name);
            assert_eq!(said["error"], "EMFILE");
            assert_eq!(said["more"], "EPERM", "only the soft limit is the guest's");
        }
    })
    .await;
}

#[tokio::test]
async fn no_signal_reaches_the_agent_and_no_command_chooses_its_processors() {
    // Of this process, which handles signals as every Rust program does and has the same user as
    // the probe.
    let host = outside(SHARED, &["first", &std::process::id().to_string()]);
    assert_ne!(host["handled"].trim_start_matches('0'), "", "control");
    assert_eq!(host["affinity_0"], "ok None", "control");
    // A machine with one processor leaves no choice.
    let kept = if host["processors"] == "1" {
        "True"
    } else {
        "False"
    };
    assert_eq!(host["kept_0"], kept, "control");
    on_each_machine(async |machine| {
        // The agent has a second thread after its first command.
        machine.exec("first", "true").await;
        let said = inside(machine, "first", SHARED, &["first", "1"]).await;
        assert_eq!(said["handled"], "0000000000000000", "{}", machine.name);
        let threads: usize = said["threads"].parse().unwrap();
        assert!(threads > 1, "control: {said:?}");
        let one_id = machine.lacks("two_uids").await;
        for thread in 0..threads {
            // The first of these is the agent's first thread, which every box refuses.
            let wanted = if one_id && thread > 0 {
                "ok None"
            } else {
                "EPERM"
            };
            assert_eq!(said[&format!("affinity_{thread}")], wanted, "{said:?}");
            assert_eq!(said[&format!("kept_{thread}")], "True", "{said:?}");
        }
        assert_eq!(
            said["affinity_own"], "ok None",
            "control: it chooses its own"
        );
        assert_eq!(said["kept_own"], kept, "control: the call has an effect");
    })
    .await;
}

#[tokio::test]
async fn a_command_cannot_make_the_kernel_kill_its_agent_first_out_of_memory() {
    let host = outside(SHARED, &["score"]);
    assert_eq!(
        (host["lower"].as_str(), host["score"].as_str()),
        ("ok None", "500"),
        "control"
    );
    on_each_machine(async |machine| {
        let said = inside(machine, "score", SHARED, &["score"]).await;
        assert_eq!(said["lower"], "EACCES", "{}", machine.name);
        assert_eq!(said["score"], "1000", "{}", machine.name);
        // At any moment, including the program's first one: the agent that starts it waits until
        // then.
        for _ in 0..50 {
            let agent = machine.exec("score", "cat /proc/1/oom_score_adj").await;
            assert_eq!(printed(&agent), "500", "{}", machine.name);
        }
    })
    .await;
}

#[tokio::test]
async fn descriptors_that_are_never_received_do_not_prevent_other_boxes() {
    on_each_machine(async |machine| {
        let fill = command(SHARED, &["in_flight"]).replacen('\n', " > /tmp/said 2>&1 &\n", 1);
        machine.exec("fill", &fill).await;
        let read = "until grep -q in_flight /tmp/said; do sleep 0.05; done; cat /tmp/said";
        let said = machine.exec("fill", read).await.stdout;
        let filled = &answers(&said)["in_flight"];
        let (count, why) = filled.split_once(' ').unwrap();
        assert_eq!(why, "ETOOMANYREFS", "control: the maximum is in use");
        assert!(count.parse::<u32>().unwrap() < 4096 + 2 * 253, "{filled}");
        for n in 0..4 {
            let other = machine.exec(&format!("other-{n}"), "echo made").await;
            assert_eq!(printed(&other), "made");
        }
    })
    .await;
}
