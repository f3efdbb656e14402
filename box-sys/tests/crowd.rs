//! Many at once: boxes asked for by many threads, boxes alive together, and servers that share a machine.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

mod support;

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use box_sys::{Sandbox, SandboxPlan, ServerConfig, socket_pair};
use support::census::parent_exists;
use support::{MACHINES, Talk, again_alone, alone, servers};

#[test]
fn sixty_four_threads_each_get_a_box_of_their_own() {
    const THREADS: usize = 64;
    for machine in MACHINES.iter() {
        let together = Barrier::new(THREADS);
        let one = |n: usize| {
            together.wait();
            let boxed = machine.boxed(&SandboxPlan::default());
            let said = boxed.sh(&format!("echo {n} > /tmp/n; cat /tmp/n")).out;
            // All are alive at once.
            together.wait();
            let sandbox = boxed.sandbox();
            let seen = (sandbox.pid(), sandbox.cgroup().map(str::to_owned));
            let alive = !sandbox.wait(Some(Duration::ZERO)).unwrap();
            assert!(alive, "{}: {n} lives", machine.name);
            assert_eq!(said, format!("{n}\n"), "{}", machine.name);
            assert_eq!(boxed.sh("cat /tmp/n").out, said, "still its own");
            seen
        };
        let one = &one;
        let seen: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|n| scope.spawn(move || one(n))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let pids: BTreeSet<i32> = seen.iter().map(|(pid, _)| *pid).collect();
        assert_eq!(pids.len(), THREADS, "{}", machine.name);
        let groups: BTreeSet<&String> = seen
            .iter()
            .filter_map(|(_, group)| group.as_ref())
            .collect();
        assert_eq!(
            groups.len(),
            if machine.has("cgroup.pids") {
                THREADS
            } else {
                0
            }
        );
    }
}

#[test]
fn servers_that_share_a_parent_do_not_disturb_each_other() {
    let config = ServerConfig {
        cgroup_parent: format!("box-test-crowd-{}", std::process::id()),
        pool: 1,
        spares: 1,
        ..ServerConfig::default()
    };
    let (_, start) = servers().remove(0);
    // Short lives at different times: again and again one is the last to go while another is about to come.
    let (_near, far) = socket_pair().unwrap();
    std::thread::scope(|scope| {
        for n in 0..6 {
            let (config, start, far) = (&config, &start, far.as_fd());
            scope.spawn(move || {
                for round in 0..8 {
                    let server = start(config);
                    let sandbox = server.create(&SandboxPlan::default(), &[far], &[]);
                    let sandbox = sandbox.unwrap_or_else(|error| panic!("{n}.{round}: {error}"));
                    assert_eq!(
                        sandbox.cgroup().is_some(),
                        server.primitives().cgroup_missing.len() < 5,
                        "with its cgroups"
                    );
                    sandbox.destroy().unwrap();
                }
            });
        }
    });
    assert!(!parent_exists(&config.cgroup_parent), "the last removed it");
}

#[test]
fn a_thousand_boxes_live_together() {
    again_alone("thousand");
}

#[test]
#[ignore = "run by a_thousand_boxes_live_together, in a process of its own"]
fn thousand() {
    if !alone() {
        return;
    }
    support::raise_descriptor_limit();
    // What a box costs the machine is the same as whomever, so a fifth of it will do for the second.
    for ((name, start), boxes) in servers().into_iter().zip([1000, 200]) {
        let server = start(&ServerConfig::default());
        let boxed = || {
            let (near, far) = socket_pair().unwrap();
            let sandbox = server.create(&SandboxPlan::default(), &[far.as_fd()], &[]);
            (sandbox.unwrap(), Talk::new(near))
        };
        let first = boxed();
        let began = Instant::now();
        let mut all = vec![first];
        let some = || (0..boxes / 4).map(|_| boxed()).collect::<Vec<_>>();
        std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(some));
            let made = threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap());
            all.extend(made);
        });
        let made = began.elapsed();
        let ended = |(sandbox, _): &&(Sandbox, Talk)| sandbox.wait(Some(Duration::ZERO)).unwrap();
        assert_eq!(all.iter().filter(ended).count(), 0, "{name}: all live");
        let pids: BTreeSet<i32> = all.iter().map(|(sandbox, _)| sandbox.pid()).collect();
        assert_eq!(pids.len(), boxes + 1, "{name}");
        for talk in [&all[0].1, &all[boxes].1] {
            assert_eq!(talk.run(&["/bin/true"]).code, Some(0), "{name}");
        }
        println!("{name}: {boxes} made in {made:?}");
        for (sandbox, _) in &all {
            sandbox.kill().unwrap();
        }
        for (sandbox, _) in &all {
            let end = sandbox.wait(Some(support::LONG)).unwrap();
            assert!(end, "{name}: all end");
        }
        drop(all);
        server.settle().unwrap();
    }
}
