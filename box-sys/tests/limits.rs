//! Limits bite, and only in the box that has them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::time::Duration;

use box_sys::{DiskLimits, Limits, Mount, SandboxPlan, ServerConfig, Source};
use support::{Gone, MACHINES, Machine, TestBox};

const FREE: Limits = Limits {
    cpus: None,
    memory: None,
    pids: None,
};

fn limited(machine: &Machine, limits: Limits) -> SandboxPlan {
    SandboxPlan {
        limits,
        ..machine.plan()
    }
}

#[test]
fn a_fork_bomb_stops_at_the_limit() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&limited(
            machine,
            Limits {
                pids: Some(20),
                ..FREE
            },
        ));
        let said = boxed.sh("/probe/probe fork_many 200");
        let count: u32 = said
            .out
            .trim()
            .strip_prefix("ok ")
            .unwrap()
            .parse()
            .unwrap();
        assert!(
            (10..20).contains(&count),
            "{}: {count} of 200",
            machine.name
        );
        let free = machine.boxed(&limited(machine, FREE));
        assert_eq!(free.probe("fork_many", "200"), "ok 200", "control");
    }
}

#[test]
fn a_shell_fork_bomb_leaves_the_box_removable() {
    for machine in MACHINES.iter() {
        let mut boxed = machine.boxed(&limited(
            machine,
            Limits {
                pids: Some(64),
                ..FREE
            },
        ));
        boxed.spawn("f() { f | f & }; f; sleep 1000");
        // Time to fill the box, or to wear it out; either may be over again when it is looked at.
        std::thread::sleep(Duration::from_millis(300));
        boxed.sandbox.take().unwrap().destroy().unwrap();
    }
}

#[test]
fn a_memory_hog_is_killed_and_the_box_lives() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&limited(
            machine,
            Limits {
                memory: Some(64 << 20),
                ..FREE
            },
        ));
        let hog = boxed.probe("eat_memory", "256");
        if machine.has("cgroup.memory") {
            assert_eq!(hog, "signal 9");
            let usage = boxed.sandbox().usage();
            assert_eq!(usage.oom_kills, Some(1));
            assert!(usage.memory_peak.unwrap() <= 64 << 20, "{usage:?}");
        } else {
            // The stand-in is a limit of the process: it is refused memory, and aborts.
            assert_ne!(hog, "ok 256");
        }
        assert_eq!(
            boxed.run(&["true"]).code,
            Some(0),
            "{}: the box lives",
            machine.name
        );
        let free = machine.boxed(&limited(machine, FREE));
        assert_eq!(free.probe("eat_memory", "256"), "ok 256", "control");
    }
}

#[test]
fn files_in_memory_count_as_memory() {
    for machine in MACHINES
        .iter()
        .filter(|machine| machine.has("cgroup.memory"))
    {
        let boxed = machine.boxed(&limited(
            machine,
            Limits {
                memory: Some(32 << 20),
                ..FREE
            },
        ));
        assert_eq!(boxed.probe("fill_bytes", "/tmp/big"), "signal 9");
        assert_eq!(boxed.run(&["true"]).code, Some(0));
    }
}

/// Version 1 has a limit of its own for this, a quarter of that of memory.
#[test]
fn what_waits_in_sockets_is_limited_with_memory() {
    const LIMIT: u64 = 32;
    // The kernel has a limit of its own for all sockets, which is above this with a gigabyte of memory.
    const MORE: u64 = 48;
    for machine in MACHINES
        .iter()
        .filter(|machine| machine.has("cgroup.memory"))
    {
        for probe in ["hold_udp", "hold_tcp"] {
            let boxed = |memory| {
                // Few processes may have many sockets each.
                let pids = Some(32);
                let limits = Limits {
                    memory,
                    pids,
                    ..FREE
                };
                machine.boxed(&limited(machine, limits))
            };
            let held = |said: &str| -> u64 {
                let held = said.strip_prefix("ok ").unwrap_or_else(|| panic!("{said}"));
                held.parse().unwrap()
            };
            let full = boxed(Some(LIMIT << 20));
            let v1 = cgroup_file(&full, &["memory"], "memory.limit_in_bytes").is_some();
            let said = full.try_probe(probe, &MORE.to_string());
            // Version 2 kills for it as for other memory. A process that is killed gives back its own memory before that of its
            // sockets; an allocation of init between the two finds no other process to kill, and the box ends with init.
            let killed = matches!(said.as_deref(), Ok("signal 9") | Err(Gone));
            assert!(!(v1 && killed), "{} {probe}: {said:?}", machine.name);
            if let (Ok(said), false) = (&said, killed) {
                let held = held(said);
                assert!(
                    (1..LIMIT).contains(&held),
                    "{} {probe}: {held}",
                    machine.name
                );
            }
            let lives = || full.try_run(&["true"]).map(|output| output.code == Some(0));
            if v1 {
                assert_eq!(lives(), Ok(true), "the box lives");
            } else {
                support::eventually("the box lives or has ended", || lives() != Ok(false));
            }
            let free = held(&boxed(None).probe(probe, &MORE.to_string()));
            assert!(free >= MORE, "control: {} {probe}: {free}", machine.name);
        }
    }
}

/// A file of a box's cgroup, from the first of these hierarchies that has it.
fn cgroup_file(boxed: &TestBox<'_>, hierarchies: &[&str], file: &str) -> Option<String> {
    let name = boxed.sandbox().cgroup()?;
    let path = |hierarchy| format!("/sys/fs/cgroup/{hierarchy}/box/{name}/{file}");
    hierarchies
        .iter()
        .find_map(|hierarchy| std::fs::read_to_string(path(hierarchy)).ok())
}

#[test]
fn a_box_reads_and_writes_disks_as_fast_as_it_may() {
    const FILE: usize = 3 << 20;
    let config = ServerConfig {
        disk: DiskLimits {
            read: Some(1 << 20),
            write: Some(1 << 20),
        },
        ..ServerConfig::default()
    };
    let slow = support::machine_with(&config);
    assert!(MACHINES[0].has("cgroup.io"), "nothing is missing unasked");
    if !slow.has("cgroup.io") {
        return;
    }
    let limits = |boxed: &TestBox<'_>| {
        let v1 = cgroup_file(boxed, &["blkio"], "blkio.throttle.read_bps_device");
        v1.or_else(|| cgroup_file(boxed, &["", "unified", "user"], "io.max"))
            .unwrap_or_default()
    };
    let fast = &MACHINES[0];
    let said = limits(&slow.boxed(&slow.plan()));
    assert!(said.contains("1048576"), "{said:?}");
    let said = limits(&fast.boxed(&fast.plan()));
    assert!(!said.contains("1048576"), "control: {said}");
    let directory = slow.directory();
    let device = std::os::unix::fs::MetadataExt::dev(&directory.path().metadata().unwrap());
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    if !std::path::Path::new(&format!("/sys/dev/block/{major}:{minor}")).exists() {
        // Temporary files are on no disk here.
        return;
    }
    let path = directory.path().join("file");
    let file = std::fs::File::create(&path).unwrap();
    std::io::Write::write_all(&mut &file, &vec![1; FILE]).unwrap();
    file.sync_all().unwrap();
    let mounted = |mut plan: SandboxPlan| {
        plan.mounts.push(Mount {
            source: Source::Path(directory.path().canonicalize().unwrap()),
            target: "/disk".into(),
            writable: true,
        });
        plan
    };
    let slow_box = slow.boxed(&mounted(slow.plan()));
    let fast_box = fast.boxed(&mounted(fast.plan()));
    for probe in ["read_disk", "write_disk"] {
        let took = |boxed: &TestBox<'_>| -> u64 {
            let said = boxed.probe(probe, "/disk/file");
            let took = said.strip_prefix("ok ").unwrap_or_else(|| panic!("{said}"));
            took.parse().unwrap()
        };
        let slowly = took(&slow_box);
        assert!(
            slowly >= 1500,
            "{probe}: three seconds' worth in {slowly} ms"
        );
        let fastest = (0..5).map(|_| took(&fast_box)).min().unwrap();
        assert!(fastest < slowly, "control: {probe}: {fastest} ms");
    }
}

/// How often a box had to wait for its next period, by the kernel's count.
fn throttled(boxed: &TestBox<'_>) -> u64 {
    let stat = cgroup_file(boxed, &["cpu", "cpu,cpuacct", "", "user"], "cpu.stat").unwrap();
    let mut lines = stat.lines();
    let count = lines.find_map(|line| line.strip_prefix("nr_throttled "));
    count.unwrap().parse().unwrap()
}

#[test]
fn a_quota_of_processor_time_is_kept_loosely() {
    for machine in MACHINES.iter().filter(|machine| machine.has("cgroup.cpu")) {
        let spin = |limits| {
            let boxed = machine.boxed(&limited(machine, limits));
            // A group that is used again has counted before.
            let before = throttled(&boxed);
            let said = boxed.probe("spin", "1000");
            let used = said.strip_prefix("ok ").unwrap().parse::<u32>().unwrap();
            (used, throttled(&boxed) - before)
        };
        let (used, waits) = spin(Limits {
            cpus: Some(0.05),
            ..FREE
        });
        assert!(used <= 300, "{used} ms of 1000 with a twentieth of one");
        assert!(waits > 0, "the limit made it wait");
        // How much time it gets without is the other programs' of the machine to say; that no limit made it wait is ours.
        assert_eq!(spin(FREE).1, 0, "control");
    }
}

#[test]
fn usage_is_counted_from_this_boxs_beginning() {
    for machine in MACHINES
        .iter()
        .filter(|machine| machine.has("cgroup.cpu_usage"))
    {
        // Groups are used again by later boxes; each must start from nothing. How much the making of one takes is the
        // machine's, but one that went on counting would begin with what the box before had ended with.
        let mut last = None;
        for _ in 0..8 {
            let boxed = machine.boxed(&limited(machine, FREE));
            let before = boxed.sandbox().usage();
            assert!(last.is_none_or(|last| before.cpu < last), "{before:?}");
            assert!(before.pids.unwrap() >= 1);
            boxed.probe("spin", "600");
            let after = boxed.sandbox().usage();
            assert!(after.cpu.unwrap() > before.cpu.unwrap());
            last = Some(after.cpu);
        }
    }
}

#[test]
fn a_frozen_box_stands_still_and_can_still_be_killed() {
    for machine in MACHINES.iter() {
        let mut boxed = machine.boxed(&machine.plan());
        if !machine.has("cgroup.freeze") {
            assert!(boxed.sandbox().freeze().is_err(), "says that it cannot");
            continue;
        }
        boxed.spawn("while :; do :; done");
        // A box that never began to would stand still, too.
        let begun = boxed.sandbox().usage().cpu.unwrap();
        support::eventually("it runs", || boxed.sandbox().usage().cpu.unwrap() > begun);
        boxed.sandbox().freeze().unwrap();
        support::eventually("it stands still", || boxed.sandbox().is_frozen());
        let cpu = || boxed.sandbox().usage().cpu.unwrap();
        let before = cpu();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(cpu(), before);
        boxed.sandbox().thaw().unwrap();
        support::eventually("it is let go", || !boxed.sandbox().is_frozen());
        support::eventually("it goes on", || cpu() > before);
        boxed.sandbox().freeze().unwrap();
        boxed.sandbox.take().unwrap().destroy().unwrap();
    }
}

#[test]
fn limits_of_a_command_are_only_lowered() {
    for machine in MACHINES.iter() {
        let mut boxed = machine.boxed(&machine.plan());
        boxed.rlimits = vec![
            (libc::RLIMIT_NOFILE, 64),
            (libc::RLIMIT_FSIZE, 4096),
            (libc::RLIMIT_CORE, u64::MAX),
        ];
        assert_eq!(boxed.sh("ulimit -n; ulimit -c").out, "64\n0\n");
        assert_ne!(boxed.sh("ulimit -n 128").code, Some(0));
        boxed.sh("head -c 10000 /dev/zero > /tmp/x");
        assert_eq!(boxed.sh("stat -c %s /tmp/x").out, "4096\n");
    }
}
