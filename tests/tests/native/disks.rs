//! Disks: private files that do not fit into the memory of a box.

use std::path::{Path, PathBuf};
use std::time::Duration;

use box_protocol::actions::{
    BoxCreate, BoxDelete, BoxExec, BoxGet, BoxStatsParams, BoxStatsResult, BoxTransition,
};
use box_protocol::error::{Detail, Ended};
use box_protocol::{BoxError, Code};
use box_runtime::Caller;
use box_test_wait::eventually;
use box_tests::machine::{Machine, on_each_machine, on_each_machine_within, printed, spec};
use serde_json::{Value, json};

use super::adoption::{Host, agents, code, directories};

const MIB: u64 = 1 << 20;

/// Whether the kernel limits the disks of this machine: those of root.
fn is_limited(machine: &Machine) -> bool {
    machine.uid == 0
}

async fn stats(machine: &Machine) -> Result<BoxStatsResult, BoxError> {
    let once: BoxStatsParams = serde_json::from_value(json!({"box_id": "d"})).unwrap();
    machine.runtime.stats(&Caller::Local, once, None).await
}

async fn missing(machine: &Machine) -> Vec<String> {
    let id = box_protocol::BoxId::new("d").unwrap();
    machine
        .runtime
        .get(&Caller::Local, &id)
        .await
        .unwrap()
        .missing
}

async fn delete(machine: &Machine) {
    let asked = serde_json::from_value(json!({"box_id": "d", "force": true})).unwrap();
    machine.runtime.delete(&Caller::Local, asked).await.unwrap();
}

/// A spec with 48 MiB of private files in memory, and a larger disk.
fn on_disk(disk_mb: u64, cmd: &str) -> Value {
    json!({"box_id": "d", "memory_mb": 64, "disk_mb": disk_mb, "cmd": cmd, "timeout_sec": 200})
}

/// The loop devices of files below a directory.
fn loops(directory: &Path) -> Vec<PathBuf> {
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten();
    let files = devices
        .filter_map(|device| std::fs::read_to_string(device.path().join("loop/backing_file")).ok());
    let files = files.map(|file| PathBuf::from(file.trim()));
    files.filter(|file| file.starts_with(directory)).collect()
}

#[tokio::test]
async fn a_full_disk_fails_writes_or_ends_the_box_where_the_kernel_has_no_limit() {
    on_each_machine(async |machine| {
        let fill = "head -c 100000000 /dev/zero > /tmp/big; echo $?; rm -f /tmp/big; echo ok > /tmp/f; cat /tmp/f";
        // The runtime measures at intervals.
        let wait = if is_limited(machine) { "" } else { "; sleep 100" };
        let filled = format!("head -c 100000000 /dev/zero > /tmp/big; echo $?{wait}; rm -f /tmp/big; echo ok > /tmp/f; cat /tmp/f");
        let ran = machine.exec_spec(spec(on_disk(80, &filled))).await;
        if is_limited(machine) {
            let ran = ran.unwrap();
            assert_eq!(printed(&ran), "1\nok", "{ran:?}");
            assert!(ran.stderr.contains("No space left"), "{ran:?}");
            assert!(!missing(machine).await.contains(&"disk.limit".to_owned()));
            // Of 80 MiB, 10,240 files.
            let many = "cd /tmp && seq 11000 | xargs touch; echo $?; ls | wc -l; rm -rf /tmp/*; echo ok > f; cat f";
            let ran = machine.exec_spec(spec(on_disk(80, many))).await.unwrap();
            let words: Vec<_> = printed(&ran).split_whitespace().collect();
            assert_eq!((words[0], words[2]), ("123", "ok"), "{ran:?}");
            let made: u64 = words[1].parse().unwrap();
            assert!((10_000..10_240).contains(&made), "{made}");
        } else {
            let error = ran.unwrap_err();
            let detail = error.detail::<Detail>().unwrap();
            assert_eq!(error.code(), Code::Capacity, "{error:?}");
            assert_eq!(detail.limit.as_deref(), Some("disk_mb"), "{error:?}");
            assert_eq!((detail.max, detail.ended), (Some(80), Some(Ended::Quota)));
            // The next call gets a new box.
            machine.exec_spec(spec(on_disk(80, "true"))).await.unwrap();
            assert!(missing(machine).await.contains(&"disk.limit".to_owned()));
            let many = "cd /tmp && seq 11000 | xargs touch; sleep 60";
            let error = machine.exec_spec(spec(on_disk(80, many))).await.unwrap_err();
            assert!(error.message().contains("10240 files"), "{error:?}");
        }
        // Control: the same writes fit.
        delete(machine).await;
        let ran = machine.exec_spec(spec(on_disk(300, fill))).await.unwrap();
        assert_eq!(printed(&ran), "0\nok");
    })
    .await;
}

#[tokio::test]
async fn private_files_that_fit_into_memory_stay_there() {
    on_each_machine(async |machine| {
        let show = "stat -f -c %T /tmp; df --output=size -BM /tmp | tail -n 1";
        for (disk_mb, size) in [(0, "48M"), (40, "40M"), (48, "48M")] {
            let ran = machine
                .exec_spec(spec(on_disk(disk_mb, show)))
                .await
                .unwrap();
            let words: Vec<_> = printed(&ran).split_whitespace().collect();
            assert_eq!(words, ["tmpfs", size], "{disk_mb}");
            assert!(!missing(machine).await.contains(&"disk.limit".to_owned()));
            delete(machine).await;
        }
        let show = "for d in /tmp /var/tmp ~ /workspace /dev/shm; do stat -f -c %T $d; done";
        let ran = machine.exec_spec(spec(on_disk(49, show))).await.unwrap();
        let kinds: Vec<_> = printed(&ran).split_whitespace().collect();
        assert!(kinds[..4].iter().all(|kind| *kind != "tmpfs"), "{kinds:?}");
        assert_eq!(kinds[4], "tmpfs");
    })
    .await;
}

#[tokio::test]
async fn two_gigabytes_are_written_with_little_memory_and_stats_show_them() {
    on_each_machine_within(Duration::from_mins(15), async |machine| {
        let write = "head -c 2147483648 /dev/zero > /tmp/big && stat -c %s /tmp/big";
        let mut asked = on_disk(3000, write);
        asked["memory_mb"] = json!(256);
        asked["timeout_sec"] = json!(600);
        let ran = machine.exec_spec(spec(asked)).await.unwrap();
        assert_eq!(printed(&ran), "2147483648");
        eventually("stats show the disk", async || {
            let stats = stats(machine).await.unwrap();
            assert_eq!(stats.private_limit_bytes, Some(3000 * MIB));
            let range = 2_147_483_648..2_200_000_000;
            stats
                .private_bytes
                .is_some_and(|bytes| range.contains(&bytes))
                && stats.disk_bytes == stats.private_bytes
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_disk_survives_stops_and_kills_of_the_server_and_ends_with_its_box() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let path = state.path().canonicalize().unwrap();
        let mut host = Host::start(machine, &path).await.unwrap();
        let of = |id: &str| {
            let mut asked = on_disk(400, "");
            asked["box_id"] = json!(id);
            asked["persistent"] = json!(true);
            asked
        };
        let exec = async |host: &Host, id: &str, cmd: &str| {
            let mut asked = of(id);
            asked["cmd"] = json!(cmd);
            host.call::<BoxExec>(json!({"spec": asked}))
                .await
                .unwrap()
                .stdout
        };
        let write =
            "for d in /tmp ~ /workspace; do head -c 30000000 /dev/zero > $d/f; done; md5sum /tmp/f";
        let sum = exec(&host, "kept", write).await;
        let disk = directories(&path)[0].join("disk");
        assert_eq!(disk.is_file(), is_limited(machine), "{disk:?}");
        let mode = std::os::unix::fs::PermissionsExt::mode(&disk.metadata().unwrap().permissions());
        assert_eq!(mode & 0o077, 0, "no other user reads it");
        for to in ["stopped", "running"] {
            host.call::<BoxTransition>(json!({"box_id": "kept", "to": to}))
                .await
                .unwrap();
        }
        let read = "ls -l ~/f /workspace/f | wc -l; md5sum /tmp/f";
        assert_eq!(exec(&host, "kept", read).await, format!("2\n{sum}"));
        // A stopped box stays one while no server runs.
        host.call::<BoxTransition>(json!({"box_id": "kept", "to": "stopped"}))
            .await
            .unwrap();
        host.kill().await;
        host = Host::start(machine, &path).await.unwrap();
        host.adopts(1).await;
        host.call::<BoxTransition>(json!({"box_id": "kept", "to": "running"}))
            .await
            .unwrap();
        assert_eq!(exec(&host, "kept", read).await, format!("2\n{sum}"));
        // The limit still holds.
        let fill = "head -c 500000000 /dev/zero > /tmp/big; echo $?; rm /tmp/big";
        if is_limited(machine) {
            assert_eq!(exec(&host, "kept", fill).await, "1\n");
        }
        // A box that is killed leaves no disk.
        exec(&host, "killed", "true").await;
        assert_eq!(directories(&path).len(), 2);
        for agent in agents(&path).await {
            rustix::process::kill_process(agent, rustix::process::Signal::KILL).unwrap();
        }
        eventually("both disks are gone", async || {
            directories(&path).is_empty()
        })
        .await;
        exec(&host, "again", "true").await;
        host.kill().await;
        for agent in agents(&path).await {
            rustix::process::kill_process(agent, rustix::process::Signal::KILL).unwrap();
        }
        let host = Host::start(machine, &path).await.unwrap();
        eventually(
            "the disk of a box that ended without a server is gone",
            async || directories(&path).is_empty(),
        )
        .await;
        eventually("the box is gone", async || {
            let found = host.call::<BoxGet>(json!({"box_id": "again"})).await;
            found.is_err_and(|error| code(error) == Code::NotFound)
        })
        .await;
        host.kill().await;
        eventually("no loop device is left", async || loops(&path).is_empty()).await;
    })
    .await;
}

#[tokio::test]
async fn twenty_boxes_with_disks_leave_nothing() {
    on_each_machine(async |machine| {
        let state = machine.directory();
        let path = state.path().canonicalize().unwrap();
        let host = Host::start(machine, &path).await.unwrap();
        for n in 0..20 {
            let mut asked = on_disk(10_240, "");
            asked["box_id"] = json!(format!("b{n}"));
            host.call::<BoxCreate>(json!({"spec": asked}))
                .await
                .unwrap();
        }
        assert_eq!(directories(&path).len(), 20);
        if is_limited(machine) {
            assert!(loops(&path).len() >= 20, "control: loop devices are seen");
        }
        for n in 0..20 {
            let asked = json!({"box_id": format!("b{n}"), "force": true});
            host.call::<BoxDelete>(asked).await.unwrap();
        }
        assert_eq!(directories(&path).len(), 0);
        // Those of the spares are left, and end with the server.
        eventually("the loop devices of the boxes are gone", async || {
            loops(&path).len() <= 2
        })
        .await;
        host.kill().await;
        eventually("all loop devices are gone", async || {
            loops(&path).is_empty()
        })
        .await;
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(path.to_str().unwrap()), "{mounts}");
    })
    .await;
}

#[tokio::test]
async fn a_guest_cannot_reach_the_file_or_the_device_of_its_disk() {
    on_each_machine(async |machine| {
        let look = "ls /dev/loop* /sys/block /s 2>/dev/null | wc -l; \
            awk '$3 !~ /^(0|7):/ {print $3}' /proc/self/mountinfo | sort -u | head -1 > /tmp/devices; \
            mount -t ext4 /dev/loop0 /mnt 2>/dev/null; echo $?; \
            mknod /tmp/loop b 7 0 2>/dev/null; echo $?; \
            mount -o remount,dev,suid /tmp 2>/dev/null; echo $?; \
            awk '$5 == \"/tmp\" {print $6}' /proc/self/mountinfo";
        let ran = machine.exec_spec(spec(on_disk(80, look))).await.unwrap();
        let words: Vec<_> = printed(&ran).split_whitespace().collect();
        assert_eq!(words[0], "0", "{ran:?}");
        assert!(words[1..4].iter().all(|status| *status != "0"), "{ran:?}");
        assert!(words[4].contains("nosuid") && words[4].contains("nodev"), "{ran:?}");
        // Control: the host has the control device.
        assert!(Path::new("/dev/loop-control").exists() || !is_limited(machine));
    })
    .await;
}
