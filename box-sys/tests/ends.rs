//! Everything ends when it should, and keeps to itself until then.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::fs;
use std::os::fd::AsFd as _;
use std::process::Command;

use box_sys::{ForkServer, Limits, SandboxPlan, ServerConfig, socket_pair};
use support::{MACHINES, eventually};

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

/// Each in a way of its own passes for somebody who is not there.
#[test]
fn a_command_that_hides_dies_whole() {
    for machine in MACHINES.iter() {
        let boxed = machine.boxed(&SandboxPlan {
            limits: Limits {
                pids: Some(300),
                ..Limits::default()
            },
            ..machine.plan()
        });
        let init = boxed.sandbox().pid();
        for way in ["strange_name", "leader_gone"] {
            let command = boxed.spawn(&format!("exec /probe/probe {way}"));
            eventually("it hides", || {
                // A name that is no text, or no thread of the process's own number.
                boxed.sh(&format!(
                    "head -c 8 /proc/{command}/status | od -c | grep -q 377 || grep -q '^State:.Z' /proc/{command}/status"
                )).code == Some(0)
            });
            assert_eq!(boxed.kill_tree(command), 1, "{} {way}", machine.name);
            let (_, signal) = boxed.ended(command);
            assert_eq!(signal, Some(libc::SIGKILL), "{} {way}", machine.name);
        }
        // A crowd, which takes longer to look through than any of the next ones lives.
        boxed.spawn("for i in $(seq 60); do sleep 1000 & done; wait");
        eventually("the crowd is there", || population(init) == 62);
        for _ in 0..10 {
            let comet = boxed.spawn("exec /probe/probe comet");
            let last = || {
                let last = boxed.sh("cut -d' ' -f5 /proc/loadavg").out;
                last.trim().parse::<i32>().unwrap()
            };
            let before = last();
            eventually("control: it moves", || last() > before + 50);
            boxed.kill_tree(comet);
            boxed.ended(comet);
            eventually("only the crowd is left", || population(init) == 62);
        }
    }
}

/// What tells commands of an ordinary user apart is a limit, which may be lower than usual.
#[test]
fn commands_are_told_apart_where_queues_are_small() {
    let mut command = Command::new("prlimit");
    command.arg("--msgqueue=100000:100000");
    if rustix::process::geteuid().is_root() {
        let id = support::NOBODY.to_string();
        command.args(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"]);
    }
    command.arg(support::PROGRAMS.join("server"));
    let server = ForkServer::start_command(command, &ServerConfig::default()).unwrap();
    let (near, far) = socket_pair().unwrap();
    let boxed = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]);
    let (boxed, talk) = (boxed.unwrap(), support::Talk::new(near));
    let (one, other) = (talk.spawn("exec sleep 1000"), talk.spawn("exec sleep 1000"));
    assert_eq!(population(boxed.pid()), 3, "control");
    assert_eq!(talk.kill_tree(one), 1);
    talk.ended(one);
    eventually("the other lives", || population(boxed.pid()) == 2);
    assert_eq!(talk.kill_tree(other), 1);
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
        boxed.sandbox.take().unwrap().destroy().unwrap();
        // Dead, but in sight until the server has waited for it.
        machine.server.settle().unwrap();
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

#[test]
fn two_boxes_do_not_see_each_other() {
    for machine in MACHINES.iter() {
        let (one, two) = (
            machine.boxed(&machine.plan()),
            machine.boxed(&machine.plan()),
        );
        one.sh("echo mark > /tmp/mark; echo mark > /dev/shm/mark; echo mark > /home/box/mark");
        one.spawn("exec sleep 4242");
        assert_eq!(
            one.sh("cat /tmp/mark /dev/shm/mark").out,
            "mark\nmark\n",
            "control"
        );
        assert_eq!(two.sh("cat /tmp/mark /dev/shm/mark /home/box/mark").out, "");
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
