//! Resource limits, which apply only to the box that has them.

use std::time::Duration;

use crate::support::{BoxEnded, SERVERS, TestBox, TestServer};
use box_sys::{DiskLimits, Limits, Mount, SandboxPlan, ServerConfig, Source};

const UNLIMITED: Limits = Limits {
    cpus: None,
    memory: None,
    pids: None,
};

fn limited(server: &TestServer, limits: Limits) -> SandboxPlan {
    SandboxPlan {
        limits,
        ..server.plan()
    }
}

#[test]
fn a_fork_bomb_stops_at_the_limit() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&limited(
            server,
            Limits {
                pids: Some(20),
                ..UNLIMITED
            },
        ));
        let output = boxed.sh("/probe/probe fork_many 200");
        let count: u32 = output
            .out
            .trim()
            .strip_prefix("ok ")
            .unwrap()
            .parse()
            .unwrap();
        assert!((10..20).contains(&count), "{}: {count} of 200", server.name);
        let free = server.create_box(&limited(server, UNLIMITED));
        assert_eq!(free.probe("fork_many", "200"), "ok 200", "control");
    }
}

#[test]
fn a_box_with_a_fork_bomb_can_be_destroyed() {
    for server in SERVERS.iter() {
        let mut boxed = server.create_box(&limited(
            server,
            Limits {
                pids: Some(64),
                ..UNLIMITED
            },
        ));
        boxed.spawn("f() { f | f & }; f; sleep 1000");
        // Time for the bomb to fill the box. It may already have ended by itself.
        std::thread::sleep(Duration::from_millis(300));
        boxed.sandbox.take().unwrap().destroy().unwrap();
    }
}

#[test]
fn a_process_above_the_memory_limit_is_killed_and_the_box_continues() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&limited(
            server,
            Limits {
                memory: Some(64 << 20),
                ..UNLIMITED
            },
        ));
        let result = boxed.probe("use_memory", "256");
        if server.has("cgroup.memory") {
            assert_eq!(result, "signal 9");
            let usage = boxed.sandbox().usage();
            assert_eq!(usage.oom_kills, Some(1));
            assert!(usage.memory_peak.unwrap() <= 64 << 20, "{usage:?}");
        } else {
            // In place of the cgroup, a limit of the process refuses the memory, and the process
            // aborts.
            assert_ne!(result, "ok 256");
        }
        assert_eq!(
            boxed.run(&["true"]).code,
            Some(0),
            "{}: the box still runs",
            server.name
        );
        let free = server.create_box(&limited(server, UNLIMITED));
        assert_eq!(free.probe("use_memory", "256"), "ok 256", "control");
    }
}

#[test]
fn files_in_memory_count_as_memory() {
    for server in SERVERS.iter().filter(|server| server.has("cgroup.memory")) {
        let boxed = server.create_box(&limited(
            server,
            Limits {
                memory: Some(32 << 20),
                ..UNLIMITED
            },
        ));
        assert_eq!(boxed.probe("fill_bytes", "/tmp/big"), "signal 9");
        assert_eq!(boxed.run(&["true"]).code, Some(0));
    }
}

/// Version 1 has a separate limit for sockets, a quarter of the memory limit.
#[test]
fn socket_buffers_are_limited_with_memory() {
    const LIMIT: u64 = 32;
    // The kernel's own limit of all sockets is above this on a host with a gigabyte of memory.
    const MORE: u64 = 48;
    for server in SERVERS.iter().filter(|server| server.has("cgroup.memory")) {
        for probe in ["fill_udp_buffers", "fill_tcp_buffers"] {
            let boxed = |memory| {
                // With few processes, each can have many sockets.
                let pids = Some(32);
                let limits = Limits {
                    memory,
                    pids,
                    ..UNLIMITED
                };
                server.create_box(&limited(server, limits))
            };
            let held = |output: &str| -> u64 {
                let held = output
                    .strip_prefix("ok ")
                    .unwrap_or_else(|| panic!("{output}"));
                held.parse().unwrap()
            };
            let full = boxed(Some(LIMIT << 20));
            let v1 = cgroup_file(&full, &["memory"], "memory.limit_in_bytes").is_some();
            let output = full.try_probe(probe, &MORE.to_string());
            // Version 2 kills for socket memory as well. A killed process releases its memory
            // before its sockets. If init allocates in between, the kernel has no other process to
            // kill, and the box ends.
            let killed = matches!(output.as_deref(), Ok("signal 9") | Err(BoxEnded));
            assert!(!(v1 && killed), "{} {probe}: {output:?}", server.name);
            if let (Ok(output), false) = (&output, killed) {
                let held = held(output);
                assert!(
                    (1..LIMIT).contains(&held),
                    "{} {probe}: {held}",
                    server.name
                );
            }
            let answers = || full.try_run(&["true"]).map(|output| output.code == Some(0));
            if v1 {
                assert_eq!(answers(), Ok(true), "the box still runs");
            } else {
                box_test_wait::blocking::eventually("the box runs or has ended", || {
                    answers() != Ok(false)
                });
            }
            let free = held(&boxed(None).probe(probe, &MORE.to_string()));
            assert!(free >= MORE, "control: {} {probe}: {free}", server.name);
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
fn disk_bandwidth_is_limited() {
    const FILE: usize = 3 << 20;
    let config = ServerConfig {
        disk: DiskLimits {
            read: Some(1 << 20),
            write: Some(1 << 20),
        },
        ..ServerConfig::default()
    };
    let slow = crate::support::server_with(&config);
    assert!(
        SERVERS[0].has("cgroup.io"),
        "without a disk limit nothing is missing"
    );
    if !slow.has("cgroup.io") {
        return;
    }
    let limits = |boxed: &TestBox<'_>| {
        let v1 = cgroup_file(boxed, &["blkio"], "blkio.throttle.read_bps_device");
        v1.or_else(|| cgroup_file(boxed, &["", "unified", "user"], "io.max"))
            .unwrap_or_default()
    };
    let fast = &SERVERS[0];
    let output = limits(&slow.create_box(&slow.plan()));
    assert!(output.contains("1048576"), "{output:?}");
    let output = limits(&fast.create_box(&fast.plan()));
    assert!(!output.contains("1048576"), "control: {output}");
    let directory = slow.directory();
    let device = std::os::unix::fs::MetadataExt::dev(&directory.path().metadata().unwrap());
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    if !std::path::Path::new(&format!("/sys/dev/block/{major}:{minor}")).exists() {
        // The temporary directory is not on a disk.
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
            overlay: false,
        });
        plan
    };
    let slow_box = slow.create_box(&mounted(slow.plan()));
    let fast_box = fast.create_box(&mounted(fast.plan()));
    for probe in ["read_disk", "write_disk"] {
        let took = |boxed: &TestBox<'_>| -> u64 {
            let output = boxed.probe(probe, "/disk/file");
            let took = output
                .strip_prefix("ok ")
                .unwrap_or_else(|| panic!("{output}"));
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

/// How often the kernel throttled a box.
fn throttled(boxed: &TestBox<'_>) -> u64 {
    let stat = cgroup_file(boxed, &["cpu", "cpu,cpuacct", "", "user"], "cpu.stat").unwrap();
    let mut lines = stat.lines();
    let count = lines.find_map(|line| line.strip_prefix("nr_throttled "));
    count.unwrap().parse().unwrap()
}

#[test]
fn cpu_time_is_limited() {
    for server in SERVERS.iter().filter(|server| server.has("cgroup.cpu")) {
        let spin = |limits| {
            let boxed = server.create_box(&limited(server, limits));
            // A reused cgroup has counted before.
            let before = throttled(&boxed);
            let output = boxed.probe("spin", "1000");
            let used = output.strip_prefix("ok ").unwrap().parse::<u32>().unwrap();
            (used, throttled(&boxed) - before)
        };
        let spin_limited = || {
            let (used, waits) = spin(Limits {
                cpus: Some(0.05),
                ..UNLIMITED
            });
            assert!(waits > 0, "the limit throttled it");
            used
        };
        // A virtual machine counts the time in which its host ran other programs, so one of several
        // measurements must show the limit.
        let used = (0..10).map(|_| spin_limited()).find(|used| *used <= 300);
        assert!(
            used.is_some(),
            "over 300 ms of 1000 with a twentieth of one"
        );
        // Other programs also use the CPU, so the time is not checked. Without a limit the kernel
        // must not throttle.
        assert_eq!(spin(UNLIMITED).1, 0, "control");
    }
}

#[test]
fn usage_starts_at_zero_for_each_box() {
    for server in SERVERS
        .iter()
        .filter(|server| server.has("cgroup.cpu_usage"))
    {
        // Later boxes reuse cgroups, and each must start at zero. Creation itself uses some CPU
        // time. Without a reset, a box would start with the total of the previous one.
        let mut last = None;
        for _ in 0..8 {
            let boxed = server.create_box(&limited(server, UNLIMITED));
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
fn a_frozen_box_uses_no_cpu_and_can_be_killed() {
    for server in SERVERS.iter() {
        let mut boxed = server.create_box(&server.plan());
        if !server.has("cgroup.freeze") {
            assert!(boxed.sandbox().freeze().is_err(), "freeze fails");
            continue;
        }
        boxed.spawn("while :; do :; done");
        // Control: the box must use the CPU before it is frozen.
        let start = boxed.sandbox().usage().cpu.unwrap();
        box_test_wait::blocking::eventually("the command runs", || {
            boxed.sandbox().usage().cpu.unwrap() > start
        });
        boxed.sandbox().freeze().unwrap();
        box_test_wait::blocking::eventually("the box is frozen", || boxed.sandbox().is_frozen());
        let cpu = || boxed.sandbox().usage().cpu.unwrap();
        let before = cpu();
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(cpu(), before);
        boxed.sandbox().thaw().unwrap();
        box_test_wait::blocking::eventually("the box is resumed", || !boxed.sandbox().is_frozen());
        box_test_wait::blocking::eventually("the command runs again", || cpu() > before);
        boxed.sandbox().freeze().unwrap();
        boxed.sandbox.take().unwrap().destroy().unwrap();
    }
}

#[test]
fn limits_of_a_command_can_only_be_lowered() {
    for server in SERVERS.iter() {
        let mut boxed = server.create_box(&server.plan());
        boxed.rlimits = vec![
            (libc::RLIMIT_NOFILE, 64),
            (libc::RLIMIT_FSIZE, 4096),
            (libc::RLIMIT_CORE, u64::MAX),
        ];
        assert_eq!(boxed.sh("ulimit -n; ulimit -c").out, "64\n0\n");
        assert_ne!(boxed.sh("ulimit -n 128").code, Some(0));
        let written = boxed.sh("head -c 10000 /dev/zero > /tmp/x");
        assert_eq!(written.code, Some(1), "the write fails, no signal ends it");
        assert_eq!(boxed.sh("stat -c %s /tmp/x").out, "4096\n");
    }
}
