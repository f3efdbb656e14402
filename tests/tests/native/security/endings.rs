//! No process outlives its owner, and no resource accumulates.

use std::time::{Duration, Instant};

use box_protocol::ExecutionStatus;
use box_runtime::{BoxRuntime, Caller, RuntimeConfig};
use box_test_wait::eventually;
use box_tests::machine::{gone, mark, on_each_machine, params, printed, processes_with, spec};
use serde_json::json;

use super::host_process::HostProcess;

/// Starts two processes that keep standard output open and ignore signals. One of them is forked
/// twice, in a new session and with a name that is not UTF-8.
fn stubborn(seconds: &str) -> String {
    format!(
        "trap '' TERM HUP INT; name=$(printf '/tmp/\\377'); ln -sf $(command -v sleep) \"$name\"; \
         (setsid \"$name\" {seconds} &) ; exec sleep {seconds}"
    )
}

/// The cgroup directories with this parent.
fn cgroups(parent: &str) -> Vec<String> {
    let hierarchies = std::fs::read_dir("/sys/fs/cgroup")
        .into_iter()
        .flatten()
        .flatten();
    let mut tops: Vec<_> = hierarchies.map(|entry| entry.path()).collect();
    tops.push("/sys/fs/cgroup".into());
    let mut found = Vec::new();
    for top in tops {
        let parent = top.join(parent);
        if parent.is_dir() {
            let inner = std::fs::read_dir(&parent).into_iter().flatten().flatten();
            found.extend(
                inner
                    .filter(|entry| entry.path().is_dir())
                    .map(|entry| entry.path()),
            );
            found.push(parent);
        }
    }
    found
        .iter()
        .map(|path| path.display().to_string())
        .collect()
}

/// Runs a stubborn command in an existing box with a timeout of one second. Returns the duration.
async fn timed_out(runtime: &BoxRuntime, session: &str, seconds: &str) -> Duration {
    // The box is made before the clock starts: making a box is not part of the promise.
    let ready = params(spec(json!({"box_id": session, "cmd": "true"})));
    runtime.exec(&Caller::Local, ready).await.unwrap();
    let cmd = stubborn(seconds);
    let asked = spec(json!({"box_id": session, "timeout_sec": 1, "cmd": cmd}));
    let asked = json!({"spec": asked, "on_timeout": "kill"});
    let asked = serde_json::from_value(asked).unwrap();
    let begun = Instant::now();
    let result = runtime.exec(&Caller::Local, asked).await.unwrap();
    assert_eq!(result.status, ExecutionStatus::TimedOut, "{result:?}");
    begun.elapsed()
}

/// Five hundred as root and five hundred as an ordinary user.
#[tokio::test]
async fn a_thousand_stubborn_commands_end_with_their_timeouts() {
    const BOXES: usize = 250;
    const ROUNDS: usize = 2;
    on_each_machine(async |machine| {
        let seconds = mark();
        let mut config = RuntimeConfig::with(machine.backend.clone());
        config.max_boxes = BOXES + 1;
        let runtime = BoxRuntime::start(config);
        let mut times: Vec<Duration> = Vec::new();
        for _ in 0..ROUNDS {
            let sessions: Vec<String> = (0..BOXES).map(|n| format!("stubborn-{n}")).collect();
            let all = sessions
                .iter()
                .map(|session| timed_out(&runtime, session, &seconds));
            times.extend(futures::future::join_all(all).await);
            gone(&seconds).await;
        }
        // The control: the process count sees a process that stays.
        let cmd = format!("sleep {seconds} > /dev/null 2>&1 &");
        let control = params(spec(json!({"box_id": "control", "cmd": cmd})));
        runtime.exec(&Caller::Local, control).await.unwrap();
        eventually("control: one runs", async || processes_with(&seconds) == 1).await;
        times.sort_unstable();
        assert_eq!(times.len(), BOXES * ROUNDS);
        let (half, worst) = (times[times.len() / 2], times[times.len() - 1]);
        eprintln!("timeout of 1 s: half within {half:?}, the last after {worst:?}");
        assert!(half >= Duration::from_secs(1), "{half:?}");
        let exit = serde_json::from_value(json!({"exit": true})).unwrap();
        runtime.shutdown(&Caller::Local, exit).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn boxes_of_a_killed_runtime_end() {
    on_each_machine(async |machine| {
        let seconds = mark();
        let mut held = HostProcess::start(machine, &[]);
        for n in 0..4 {
            let background = format!("({}) > /dev/null 2>&1 & echo started", stubborn(&seconds));
            let result = held.exec(&json!({"box_id": format!("owned-{n}"), "cmd": background}));
            assert_eq!(printed(&result), "started");
        }
        eventually("control: they run", async || processes_with(&seconds) == 8).await;
        assert_eq!(
            cgroups(&held.parent).is_empty(),
            machine.lacks("cgroup.memory").await,
            "control"
        );
        let parent = held.parent.clone();
        held.kill();
        gone(&seconds).await;
        eventually("no cgroup is left", async || cgroups(&parent).is_empty()).await;
    })
    .await;
}

/// The number of descendants of a process.
fn descendants(of: u32) -> usize {
    let path = format!("/proc/{of}/task/{of}/children");
    let all = std::fs::read_dir(format!("/proc/{of}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let mut sum = 0;
    let mut children = std::fs::read_to_string(path).unwrap_or_default();
    for task in all {
        let more = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        if task.file_name().to_string_lossy() != of.to_string() {
            children += &more;
        }
    }
    for child in children.split_whitespace() {
        sum += 1 + descendants(child.parse().unwrap());
    }
    sum
}

#[tokio::test]
async fn a_hundred_boxes_leave_nothing() {
    on_each_machine(async |machine| {
        let state = tempfile::tempdir().unwrap();
        let mut held = HostProcess::start_with(machine, &[], Some(state.path()));
        let workspace = machine.directory();
        let asked = json!({"box_id": "cycle", "host_path": workspace.path(), "workspace_quota_mb": 64,
            "cmd": "sleep 1000 > /dev/null 2>&1 & echo ran"});
        let files = || std::fs::read_dir(state.path()).unwrap().count();
        let mounts = || std::fs::read_to_string(format!("/proc/{}/mountinfo", std::process::id())).unwrap();
        // The first few calls fill pools.
        for _ in 0..5 {
            held.exec(&asked);
            held.delete("cycle");
        }
        let calm = async |held: &HostProcess| {
            // Spare processes come and go for a moment, so the test waits for a stable count.
            let mut last = (0, 0);
            for _ in 0..100 {
                let now = (held.descriptors(), descendants(held.pid()));
                if now == last {
                    break;
                }
                last = now;
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            last
        };
        let (before, mounted) = (calm(&held).await, mounts());
        held.exec(&asked);
        let with = calm(&held).await;
        assert!(with.0 > before.0 && with.1 > before.1, "control: a living box is seen: {before:?} {with:?}");
        assert_eq!(files(), 1, "control");
        held.delete("cycle");
        for _ in 0..100 {
            assert_eq!(printed(&held.exec(&asked)), "ran");
            held.delete("cycle");
        }
        assert_eq!(files(), 0, "no state");
        eventually("as before", async || (held.descriptors(), descendants(held.pid())) == before).await;
        assert_eq!(mounts(), mounted);
        let many = cgroups(&held.parent).len();
        assert!(many < 300, "{many} cgroups");
        held.kill();
        eventually("no cgroup is left", async || cgroups(&held.parent).is_empty()).await;
    })
    .await;
}
