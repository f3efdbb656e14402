//! Everything ends when it should, and nothing is left.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use box_sys::{Cgroups, ForkServer, SandboxPlan, ServerConfig};
use support::{MACHINES, SERVER, as_nobody, eventually};

/// Detached as thoroughly as a shell can: two forks, a session of its own, deaf to everything.
const STUBBORN: &str = "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM HUP; (sleep 1000 &) ; while :; do sleep 1000; done' &) ; sleep 1000";

/// How many processes a box has, init included: all that descend from it, since orphans are its own.
fn population(init: i32) -> usize {
    let parent = |pid: i32| -> Option<i32> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        line.trim().parse().ok()
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let mut line = std::iter::successors(Some(*pid), |pid| parent(*pid).filter(|pid| *pid > 0));
        line.any(|pid| pid == init)
    })
    .count()
}

#[test]
fn a_stubborn_tree_dies_with_its_command_and_others_live() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&machine.plan());
        let init = boxed.sandbox().pid();
        let other = boxed.spawn("exec sleep 1000");
        let stubborn = boxed.spawn(STUBBORN);
        eventually("all of it runs", || population(init) >= 6);
        assert!(boxed.kill_tree(stubborn) >= 4);
        boxed.ended(stubborn);
        eventually("only init and the other are left", || population(init) == 2);
        boxed.kill_tree(other);
        boxed.ended(other);
        eventually("only init is left", || population(init) == 1);
    }
}

#[test]
fn stubborn_daemons_die_with_the_box() {
    for machine in MACHINES.iter() {
        let mut boxed = machine.boxed(&machine.plan());
        let init = boxed.sandbox().pid();
        for _ in 0..5 {
            boxed.spawn(STUBBORN);
        }
        eventually("they run", || population(init) > 15);
        let start = Instant::now();
        boxed.sandbox.take().unwrap().destroy().unwrap();
        assert!(start.elapsed() < Duration::from_secs(2));
        assert_eq!(population(init), 0);
    }
}

#[test]
fn orphans_are_reaped() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&machine.plan());
        boxed.sh("for i in 1 2 3 4 5 6 7 8 9; do (true &) ; done");
        let init = boxed.sandbox().pid();
        eventually("no zombie is left", || population(init) == 1);
    }
}

fn groups() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for hierarchy in ["memory", "cpu", "pids", "unified", ""] {
        for entry in fs::read_dir(format!("/sys/fs/cgroup/{hierarchy}/box-test"))
            .into_iter()
            .flatten()
            .flatten()
        {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                names.insert(format!(
                    "{hierarchy}/{}",
                    entry.file_name().to_string_lossy()
                ));
            }
        }
    }
    names
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn children(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap()
}

fn cycles(server: &ForkServer) {
    let cycle = || {
        let sandbox = server.create(&SandboxPlan::default(), &[], &[]);
        sandbox.unwrap().destroy().unwrap();
    };
    cycle();
    server.settle().unwrap();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let (here, there) = (descriptors(std::process::id()), descriptors(server.pid()));
    for _ in 0..100 {
        cycle();
    }
    server.settle().unwrap();
    // Boxes begun for the next plan are the only children.
    let spares = ServerConfig::default().spares;
    eventually("no process", || {
        children(server.pid()).split_whitespace().count() <= spares
    });
    assert_eq!(
        fs::read_to_string("/proc/self/mountinfo").unwrap(),
        mounts,
        "no mount"
    );
    eventually("no descriptor", || {
        descriptors(server.pid()) <= there + 32 && descriptors(std::process::id()) <= here
    });
}

#[test]
fn a_hundred_boxes_leave_nothing() {
    // Other tests of this file run in this process at the same time; descriptors are counted in a server and a program alone.
    let program = std::env::current_exe().unwrap();
    let alone = [
        "--exact",
        "cycles_alone",
        "--ignored",
        "--test-threads",
        "1",
        "--nocapture",
    ];
    let output = std::process::Command::new(program)
        .args(alone)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
#[ignore = "run by a_hundred_boxes_leave_nothing, in a process of its own"]
fn cycles_alone() {
    let config = ServerConfig {
        cgroup_parent: "box-test".into(),
        ..ServerConfig::default()
    };
    let server = ForkServer::start(SERVER.as_ref(), &config).unwrap();
    cycles(&server);
    if server.primitives().cgroup_missing.is_empty() {
        assert!(!groups().is_empty(), "control: pooled ones are seen");
    }
    let spares = children(server.pid());
    drop(server);
    assert_eq!(groups(), BTreeSet::new(), "no cgroup");
    for pid in spares.split_whitespace() {
        assert!(!fs::exists(format!("/proc/{pid}")).unwrap(), "no spare");
    }
    if rustix::process::geteuid().is_root() {
        cycles(
            &ForkServer::start_command(as_nobody(&support::programs().join("server")), &config)
                .unwrap(),
        );
    }
    eventually("the parents are gone", || {
        !fs::exists("/sys/fs/cgroup/memory/box-test").unwrap()
    });
}

#[test]
fn owned_boxes_die_with_the_server_and_others_live_on() {
    let config = ServerConfig {
        cgroup_parent: "box-test-kill".into(),
        ..ServerConfig::default()
    };
    let server = ForkServer::start(SERVER.as_ref(), &config).unwrap();
    let (near, far) = box_sys::socket_pair().unwrap();
    let control = std::os::fd::AsFd::as_fd(&far);
    let owned = server
        .create(&SandboxPlan::default(), &[control], &[])
        .unwrap();
    let free = server
        .create(
            &SandboxPlan {
                owned: false,
                ..SandboxPlan::default()
            },
            &[control],
            &[],
        )
        .unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(server.pid()).unwrap());
    rustix::process::kill_process(pid.unwrap(), rustix::process::Signal::KILL).unwrap();
    assert!(owned.wait(Some(Duration::from_secs(5))).unwrap(), "owned");
    assert!(
        !free.wait(Some(Duration::from_millis(200))).unwrap(),
        "free"
    );
    // Adopted by what was written down, ended, and its cgroups swept.
    let record = free.record();
    let (pidfd, mounts) = (
        free.pidfd().try_clone_to_owned().unwrap(),
        free.mount_namespace().try_clone_to_owned().unwrap(),
    );
    let cgroups = std::sync::Arc::new(Cgroups::open(&config.cgroup_parent));
    box_sys::Sandbox::adopt(pidfd, mounts, record, cgroups.clone())
        .destroy()
        .unwrap();
    drop((near, far, server));
    if cgroups.missing().is_empty() {
        eventually("swept", || {
            cgroups.sweep();
            let mut left = fs::read_dir("/sys/fs/cgroup/memory/box-test-kill")
                .unwrap()
                .flatten();
            !left.any(|entry| entry.path().is_dir())
        });
    }
    cgroups.close();
}

#[test]
fn two_boxes_do_not_see_each_other() {
    for machine in MACHINES.iter() {
        let (one, two) = (
            machine.boxed(&machine.plan()),
            machine.boxed(&machine.plan()),
        );
        one.sh("echo mark > /tmp/mark; echo mark > /dev/shm/mark; echo mark > /home/agent/mark");
        one.spawn("exec sleep 4242");
        assert_eq!(
            one.sh("cat /tmp/mark /dev/shm/mark").out,
            "mark\nmark\n",
            "control"
        );
        assert_eq!(
            two.sh("cat /tmp/mark /dev/shm/mark /home/agent/mark").out,
            ""
        );
        eventually("control: the sleeper runs", || {
            one.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
                .out
                .contains("sleep 4242")
        });
        assert!(
            !two.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
                .out
                .contains("sleep 4242")
        );
        for kind in ["pid", "mnt", "net", "uts", "ipc", "user", "cgroup"] {
            let name = |of: &support::TestBox<'_>| {
                of.run(&["readlink", &format!("/proc/self/ns/{kind}")]).out
            };
            assert_ne!(name(&one), name(&two), "{kind}");
            let outside = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
            assert_ne!(name(&one).trim(), outside.to_string_lossy(), "{kind}");
        }
    }
}
