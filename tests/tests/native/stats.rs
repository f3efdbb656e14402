//! The resource usage of a box.

use std::time::Duration;

use box_protocol::actions::{BoxStatsParams, BoxStatsResult};
use box_protocol::{BoxError, Code};
use box_runtime::Caller;
use box_test_wait::eventually;
use box_tests::machine::{Machine, on_each_machine, printed, spec};
use serde_json::{Value, json};
use tokio::sync::mpsc;

fn params(more: Value) -> BoxStatsParams {
    serde_json::from_value(more).unwrap()
}

async fn stats(machine: &Machine) -> Result<BoxStatsResult, BoxError> {
    let once = params(json!({"box_id": "f"}));
    machine.runtime.stats(&Caller::Local, once, None).await
}

async fn delete(machine: &Machine) {
    let asked = serde_json::from_value(json!({"box_id": "f", "force": true})).unwrap();
    let deleted = machine.runtime.delete(&Caller::Local, asked).await;
    deleted.unwrap();
}

#[tokio::test]
async fn stats_are_per_box_and_absent_where_the_kernel_counts_nothing() {
    on_each_machine(async |machine| {
        assert_eq!(stats(machine).await.unwrap_err().code(), Code::NotFound);
        let asked = |cmd: &str| spec(json!({"box_id": "f", "memory_mb": 64, "cmd": cmd}));
        printed(&machine.exec_spec(asked("true")).await.unwrap());
        let before = stats(machine).await.unwrap();
        let work = "i=0; while [ $i -lt 50000 ]; do i=$((i+1)); done; \
            head -c 8000000 /dev/zero > /tmp/held; sleep 60 & sleep 60 & true";
        printed(&machine.exec_spec(asked(work)).await.unwrap());
        let after = stats(machine).await.unwrap();
        assert!(after.at >= before.at);
        let disk = before.disk_bytes.unwrap()..after.disk_bytes.unwrap();
        assert!(
            (8_000_000..9_000_000).contains(&(disk.end - disk.start)),
            "{disk:?}"
        );
        // A value is present if and only if this machine limits that resource.
        let missing = machine.lacks("cgroup.memory").await;
        let grown = before.memory_bytes.zip(after.memory_bytes);
        assert_eq!(grown.is_none(), missing, "{after:?}");
        assert!(grown.is_none_or(|(a, b)| b >= a + 7_000_000), "{grown:?}");
        let limit = (!missing).then_some(64 << 20);
        assert_eq!(after.memory_limit_bytes, limit);
        let missing = machine.lacks("cgroup.pids").await;
        let more = before.pids.zip(after.pids);
        assert_eq!(more.is_none(), missing, "{after:?}");
        assert!(more.is_none_or(|(a, b)| b >= a + 2), "{more:?}");
        let cpu = before.cpu_us.zip(after.cpu_us);
        assert!(cpu.is_none_or(|(a, b)| b > a + 1000), "{cpu:?}");
        assert_eq!(cpu.is_none(), machine.lacks("cgroup.cpu_usage").await);
    })
    .await;
}

#[tokio::test]
async fn disk_counts_private_files_and_a_workspace_with_a_quota_or_is_absent() {
    on_each_machine(async |machine| {
        let workspace = machine.directory();
        let write = "head -c 1000000 /dev/zero > /workspace/w; \
            for dir in /tmp /dev/shm $HOME; do head -c 1000000 /dev/zero > $dir/p; done";
        let asked = |mode: &str, quota: u64| {
            spec(
                json!({"box_id": "f", "cmd": write, "host_path": workspace.path(),
                "host_path_mode": mode, "workspace_quota_mb": quota}),
            )
        };
        // The runtime does not know the usage of a writable workspace without a quota.
        machine.exec_spec(asked("rw", 0)).await.unwrap();
        assert_eq!(stats(machine).await.unwrap().disk_bytes, None);
        delete(machine).await;
        // A read-only workspace does not count.
        machine.exec_spec(asked("ro", 0)).await.unwrap();
        let disk = stats(machine).await.unwrap().disk_bytes.unwrap();
        assert!((3_000_000..3_500_000).contains(&disk), "{disk}");
        delete(machine).await;

        printed(&machine.exec_spec(asked("rw", 8)).await.unwrap());
        let start = std::time::Instant::now();
        loop {
            let disk = stats(machine).await.unwrap().disk_bytes;
            if disk.is_some_and(|disk| (4_000_000..4_500_000).contains(&disk)) {
                break;
            }
            assert!(start.elapsed() < box_test_wait::LONG, "{disk:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_stream_of_stats_lasts_until_the_box_ends_and_does_not_keep_it_alive() {
    on_each_machine(async |machine| {
        let asked = spec(json!({"box_id": "f", "cmd": "true", "lifetime": {"idle_ms": 700}}));
        printed(&machine.exec_spec(asked).await.unwrap());
        let (sender, mut chunks) = mpsc::channel(1);
        let every = params(json!({"box_id": "f", "every_ms": 50}));
        let caller = Caller::Local;
        let running = machine.runtime.stats(&caller, every, Some(sender));
        let reading = async {
            let mut times = Vec::new();
            while let Some(chunk) = chunks.recv().await {
                times.push(chunk.at);
            }
            times
        };
        let (ended, times) = tokio::join!(running, reading);
        assert_eq!(ended.unwrap_err().code(), Code::Conflict);
        assert!((4..=40).contains(&times.len()), "{}", times.len());
        assert!(times.windows(2).all(|two| two[0] < two[1]));
        eventually("the box is gone", async || {
            let gone = stats(machine).await.unwrap_err().code();
            matches!(gone, Code::NotFound | Code::Unavailable)
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn stats_have_figures_in_relation_to_the_limits() {
    on_each_machine(async |machine| {
        let asked =
            |cmd: &str| spec(json!({"box_id": "f", "cpus": 0.5, "memory_mb": 64, "cmd": cmd}));
        printed(&machine.exec_spec(asked("true")).await.unwrap());
        let first = stats(machine).await.unwrap();
        let limited = !machine.lacks("cgroup.cpu").await;
        let machine_cpus = std::thread::available_parallelism().unwrap().get();
        let cpus = if limited {
            0.5
        } else {
            f64::from(u32::try_from(machine_cpus).unwrap())
        };
        assert_eq!(first.cpus, Some(cpus));
        assert_eq!(first.cpu_percent.is_some(), first.cpu_us.is_some());
        assert_eq!(
            first.memory_cache_bytes.is_some(),
            first.memory_bytes.is_some()
        );
        // Nothing but private files: both limits are the same.
        assert_eq!(first.disk_limit_bytes, first.private_limit_bytes);
        let work = "end=$(($(date +%s) + 2)); while [ $(date +%s) -lt $end ]; do :; done";
        printed(&machine.exec_spec(asked(work)).await.unwrap());
        let busy = stats(machine).await.unwrap();
        assert!(
            busy.cpu_percent.is_none_or(|percent| percent > 0.0),
            "{busy:?}"
        );
        delete(machine).await;
        let workspace = machine.directory();
        let quota = spec(
            json!({"box_id": "f", "cmd": "true", "host_path": workspace.path(),
            "host_path_mode": "rw", "workspace_quota_mb": 8}),
        );
        printed(&machine.exec_spec(quota).await.unwrap());
        let limits = stats(machine).await.unwrap();
        let whole = limits
            .private_limit_bytes
            .map(|private| private + (8 << 20));
        assert_eq!(limits.disk_limit_bytes, whole);
    })
    .await;
}
