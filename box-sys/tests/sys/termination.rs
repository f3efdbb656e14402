//! Processes end with their command or box, and boxes are isolated until then.

use std::fs;
use std::os::fd::AsFd as _;
use std::process::Command;

use crate::support::SERVERS;
use box_sys::{ForkServer, Limits, SandboxPlan, ServerConfig, socket_pair};
use box_test_wait::blocking::eventually;

/// Two forks, a new session, and all signals ignored.
const DETACHED: &str = "trap '' TERM HUP INT; (setsid sh -c 'trap \"\" TERM HUP; (sleep 1000 &) ; while :; do sleep 1000; done' &) ; sleep 1000";

/// Number of processes of a box, init included. Orphans are children of init.
fn process_count(init: i32) -> usize {
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
fn detached_processes_end_with_their_command_only() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&server.plan());
        let init = boxed.sandbox().pid();
        let other = boxed.spawn("exec sleep 1000");
        let detached = boxed.spawn(DETACHED);
        eventually("all processes run", || process_count(init) >= 6);
        assert!(boxed.kill_tree(detached) >= 4);
        boxed.wait_exit(detached);
        eventually("only init and the other command run", || {
            process_count(init) == 2
        });
        boxed.kill_tree(other);
        boxed.wait_exit(other);
        eventually("only init runs", || process_count(init) == 1);
    }
}

/// Processes that hide by name, without main thread, or by changing their pid.
#[test]
fn hidden_processes_end_with_their_command() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&SandboxPlan {
            limits: Limits {
                pids: Some(300),
                ..Limits::default()
            },
            ..server.plan()
        });
        let init = boxed.sandbox().pid();
        for probe in ["non_text_name", "main_thread_exits"] {
            let command = boxed.spawn(&format!("exec /probe/probe {probe}"));
            eventually("the process hides", || {
                // A name that is not text, or an ended main thread.
                boxed.sh(&format!(
                    "head -c 8 /proc/{command}/status | od -c | grep -q 377 || grep -q '^State:.Z' /proc/{command}/status"
                )).code == Some(0)
            });
            assert_eq!(boxed.kill_tree(command), 1, "{} {probe}", server.name);
            let (_, signal) = boxed.wait_exit(command);
            assert_eq!(signal, Some(libc::SIGKILL), "{} {probe}", server.name);
        }
        // Many processes, so that a scan takes longer than a process of the chain runs.
        boxed.spawn("for i in $(seq 60); do sleep 1000 & done; wait");
        eventually("all sleepers run", || process_count(init) == 62);
        for _ in 0..10 {
            let fork_chain = boxed.spawn("exec /probe/probe fork_chain");
            let last = || {
                let last = boxed.sh("cut -d' ' -f5 /proc/loadavg").out;
                last.trim().parse::<i32>().unwrap()
            };
            let before = last();
            eventually("control: the pid changes", || last() > before + 50);
            boxed.kill_tree(fork_chain);
            boxed.wait_exit(fork_chain);
            eventually("only the sleepers run", || process_count(init) == 62);
        }
    }
}

/// A limit marks the commands of an ordinary user, and it may be lower than usual.
#[test]
fn commands_are_distinguished_with_a_low_queue_limit() {
    let mut command = Command::new("prlimit");
    command.arg("--msgqueue=100000:100000");
    if rustix::process::geteuid().is_root() {
        let id = crate::support::ORDINARY_UID.to_string();
        command.args(["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups"]);
    }
    command.arg(crate::support::PROGRAMS.join("server"));
    let server = ForkServer::start_command(command, &ServerConfig::default()).unwrap();
    let (near, far) = socket_pair().unwrap();
    let boxed = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]);
    let (boxed, client) = (boxed.unwrap(), crate::support::InitClient::new(near));
    let (one, other) = (
        client.spawn("exec sleep 1000"),
        client.spawn("exec sleep 1000"),
    );
    assert_eq!(process_count(boxed.pid()), 3, "control");
    assert_eq!(client.kill_tree(one), 1);
    client.wait_exit(one);
    eventually("the other command runs", || process_count(boxed.pid()) == 2);
    assert_eq!(client.kill_tree(other), 1);
}

#[test]
fn detached_daemons_end_with_the_box() {
    for server in SERVERS.iter() {
        let mut boxed = server.create_box(&server.plan());
        let init = boxed.sandbox().pid();
        for _ in 0..5 {
            boxed.spawn(DETACHED);
        }
        eventually("the daemons run", || process_count(init) > 15);
        boxed.sandbox.take().unwrap().destroy().unwrap();
        // The zombies are visible until the server has reaped them.
        server.fork_server.settle().unwrap();
        assert_eq!(process_count(init), 0);
    }
}

#[test]
fn orphans_are_reaped() {
    for server in SERVERS.iter() {
        let boxed = server.create_box(&server.plan());
        boxed.sh("for i in 1 2 3 4 5 6 7 8 9; do (true &) ; done");
        let init = boxed.sandbox().pid();
        eventually("init has reaped all orphans", || process_count(init) == 1);
    }
}

#[test]
fn two_boxes_are_isolated_from_each_other() {
    for server in SERVERS.iter() {
        let (one, two) = (
            server.create_box(&server.plan()),
            server.create_box(&server.plan()),
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
            let name = |of: &crate::support::TestBox<'_>| {
                of.run(&["readlink", &format!("/proc/self/ns/{kind}")]).out
            };
            assert_ne!(name(&one), name(&two), "{kind}");
            let outside = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
            assert_ne!(name(&one).trim(), outside.to_string_lossy(), "{kind}");
        }
    }
}
